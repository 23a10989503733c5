// Package natengine is packet in, verdict out: it decides for each packet that crosses a gateway
// which peer it belongs to, whether it may pass, and what address of ours it shows on the other
// side. It knows no kernel, no clock and no I/O.
//
//	                 cluster A                            tunnel to peer B
//	Outbound   a      ─► b@A     prefix map, stateless    Pa ⇒ Pa@B     a@B   ─► b@A
//	           node   ─► b@A     NAPT, flow                             natIP ─► b@A
//	           e      ─► b@A     reply of a mapped endpoint, flow       x@B   ─► b@A
//	Inbound    b@A    ─► a       prefix map, reversed     Pa@B ⇒ Pa     b@A   ─► a@B
//	           b@A    ─► node    flow                                   b@A   ─► natIP
//	           b@A    ─► e       mapped endpoint, flow                  b@A   ─► x@B
//
// The notation is that of Liqo's fabric: Pa@B are A's pods as B sees them, natIP is the network
// address of Pa@B, x@B an address of A's ExternalCIDR as B sees it. Only addresses of our own side
// are rewritten, the source on the way out and the destination on the way in. Everything is keyed
// by peer and direction: two peers may see us under one range, and a peer may see us under the
// range under which we see it, so that source and destination of a packet in the tunnel can be the
// same address. No rule may therefore look at both ends as an unordered pair, and there is no LAND
// check.
//
// # The path of a packet
//
// Outbound finds the peer by the destination, Inbound by the source, both by prefix. A pod that is
// mapped 1:1 is done then, without state. The general path goes on with ICMP errors (by the packet
// they quote), flows, mapped endpoints and NAPT. What no rule permits is dropped and counted under
// one of the reasons in verdict.go; a peer reaches our pods as it sees them and mapped endpoints,
// nothing else. A packet is never forwarded half rewritten, and one that is discarded is untouched.
// The engine does not look at TTL, DSCP, ECN, IP options or the IP identification: the TTL is
// counted down by the kernels on either side of the gateway. Nor does it compare sizes: whoever
// sends a packet on does, and asks TooBig for the error when it exceeds the peer's MTU.
//
// Rules are an immutable table behind an atomic pointer. Flows live in a table per peer, which
// survives a change of rules; a lookup takes no lock, a new flow takes the mutex of its peer.
// Neither a hit nor an insert allocates, apart from the growth of tables.
//
// # Bounds
//
//	what                                default               when reached
//	flows, all peers                    1,048,576             oldest half-open flow is evicted (evicted): of a peer above its
//	                                                          share for one below, else of the same; else flow_table_full
//	flows of one peer                   equal share of that   oldest half-open flow of the peer is evicted, else
//	                                                          flow_table_full
//	flows of one host                   quarter of the        oldest half-open flow of the host is evicted, else host_quota
//	  (per peer; see below)             peer's, 1,024-16,384
//	ports at a NAPT address             65,535 TCP, 65,535    oldest half-open flow with such a port is evicted, else
//	  (per peer, family and protocol)   UDP, 65,536 ICMP ids  ports_exhausted; established flows go on
//	datagrams with fragments under way  256                   oldest gives way, fragment_store_full for what it held
//	octets of held fragments            1 MiB                 the same
//	  (both per peer and direction)
//	  of which one source               a quarter of both     its own oldest gives way, in the same way
//	held fragments of one datagram      256                   fragment_store_full
//	time a fragment is held             5 s, 2-30 s           fragment_timeout
//	ICMP errors that the gateway sends, per peer    1,000 a second, 100   the sender is not told; counted
//	                                    at once
//
// A flow is half-open until packets were seen both ways (TCP: with ACK), and a TCP flow again after
// a RST or two FINs. An established flow is never evicted. Queues of the half-open flows of each
// peer and of each host, oldest first, make an eviction take the same time whatever there is; a
// connection that was closed is back in them after the next Sweep.
//
// As each peer has its own table, fragment stores and share, a flood from or to one peer cannot
// displace or block another's flows. Where MaxFlowsPerPeer times the number of peers exceeds
// MaxFlows, a peer may use what others leave free and gives it back, half-open flows first, as soon
// as one of them comes that has less than its equal share; what it has established beyond its share
// stays, so that the others have at least MaxFlows less MaxFlowsPerPeer of it.
//
// The host of a flow is ours that opens it for a NAPT flow, and the peer's that opens it for a flow
// to a mapped endpoint; the nodes of a peer, which all come from its NAPT address, are one. An
// address of IPv6 is a host too, as each pod has one and those of a node share a prefix; who sends
// from many has the bound of his peer. A mapping needs a flow, so that the quota also keeps one
// host from taking all ports of the NAPT address: by default it may have a quarter of them at most
// (RFC 6888, REQ-4). When all ports of a protocol are in use, a new mapping takes the port of the
// oldest half-open flow. It fails only if all flows are established. Flows of forged sources stay
// half-open, so they cannot use up the ports.
//
// Timeouts: UDP 300 s, TCP 7,440 s established and 240 s else, ICMP 60 s, other protocols 300 s.
// Packets of either direction refresh a flow, RSTs and ICMP errors do not. Shorter ones than the
// RFCs demand are taken as they are, because both ends of a tunnel are the operator's own;
// Config.Warnings says which. A UDP flow that was never answered lasts as long as others: no RFC
// asks for less, and being half-open it gives way at a bound. An unsolicited SYN to the NAPT
// address is dropped without an answer, which leaves a simultaneous open its chance (RFC 5382,
// REQ-4).
//
// # Ports
//
// A mapping keeps the port of the inside end when that is free, as kernel MASQUERADE does, else it
// gets a random one of the same range (0-1023, 1024-65535) and, while there are any, of the same
// parity. With Config.RandomPorts every mapping gets one so (RFC 6056, RFC 7857). Random means the
// first free port from a random place on.
//
// # Memory
//
// An entry is one cache line of 64 octets plus 28 that only writers touch, and two index slots of 8
// octets at a load of 42 to 75 %; a NAPT mapping takes 16 octets and is shared by all flows of one
// inside port, a host takes 16; both 2 to 4 more of hash chain. At 1,048,576 flows the heap grows
// by 117 octets per flow for those of few hosts and ports, of either family, by 136 when each has
// an inside port of its own, 136 when each is of another pod of a peer to a mapped endpoint and 155
// when each has an inside host and a port of its own (BenchmarkFlowMemory, 2026-11). Tables grow as
// needed, a shard or chunk at a time, from 24 KiB for a peer with a flow or two on, and are given
// back when their peer goes. The rule table takes 128 KiB and a few hundred octets per peer.
package natengine
