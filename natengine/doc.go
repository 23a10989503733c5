// Package natengine takes a packet and returns a verdict. For each packet through a gateway it
// finds the peer, decides whether the packet may pass, and translates the addresses of our side. It
// uses no kernel, no clock and no I/O.
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
// by peer and direction: two peers may see us under the same range, and a peer and we may see each
// other under the same range, so a packet in the tunnel may have the same address as source and
// destination. Therefore no rule may treat the two as an unordered pair, and there is no LAND
// check.
//
// # The path of a packet
//
// Outbound finds the peer by the destination, Inbound by the source, both by prefix. A pod that is
// mapped 1:1 needs nothing more, and no state. The general path continues with ICMP errors (by the
// packet they quote), flows, mapped endpoints and NAPT. A packet that no rule permits is dropped
// and counted by a reason of verdict.go; a peer reaches only our pods and mapped endpoints. A
// packet is rewritten completely or, if it is dropped, not at all. The engine ignores TTL, DSCP,
// ECN, IP options and the IP identification: the kernels on either side of the gateway decrement
// the TTL. Nor does it check sizes: the caller does, and gets the error from TooBig if a packet
// exceeds the peer's MTU.
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
//	ICMP errors that the gateway sends, per peer    1,000 a second, 100   no error is sent; counted
//	                                    at once
//
// A flow is half-open until packets were seen both ways (TCP: with ACK), and a TCP flow again after
// a RST or two FINs. An established flow is never evicted. Each peer and each host has a queue of
// its half-open flows, oldest first, so an eviction takes constant time. The next Sweep puts a
// closed connection back into these queues.
//
// As each peer has its own table, fragment stores and share, a flood from or to one peer cannot
// displace or block another's flows. If MaxFlowsPerPeer times the number of peers exceeds MaxFlows,
// a peer may use the free flows of others. When a peer below its equal share needs one, half-open
// flows of a peer above its share are evicted. Established flows beyond a share stay, so the other
// peers always have at least MaxFlows - MaxFlowsPerPeer.
//
// The host of a flow is the one that opens it: ours for a NAPT flow, the peer's for a flow to a
// mapped endpoint. The nodes of a peer count as one host, because they share its NAPT address. Each
// IPv6 address counts as a host; a sender with many addresses is limited by the bound of its peer.
// A mapping needs a flow, so the quota also limits the ports of one host at the NAPT address, by
// default to a quarter (RFC 6888, REQ-4). When all ports of a protocol are in use, a new mapping
// takes the port of the oldest half-open flow. It fails only if all flows are established. Flows of
// forged sources stay half-open, so they cannot use up the ports.
//
// Timeouts: UDP 300 s, TCP 7,440 s established and 240 s else, ICMP 60 s, other protocols 300 s.
// Packets of either direction refresh a flow, RSTs and ICMP errors do not. Timeouts below the RFCs'
// minimum are accepted, because both ends of a tunnel belong to operators; Config.Warnings lists
// them. A UDP flow without an answer has the same timeout: no RFC requires less, and it can be
// evicted because it is half-open. An unsolicited SYN to the NAPT address is dropped without an
// answer, which leaves a simultaneous open its chance (RFC 5382, REQ-4).
//
// # Ports
//
// A mapping keeps the port of the inside host if it is free, as kernel MASQUERADE does. Otherwise
// it gets a random port of the same range (0-1023, 1024-65535) and, if there is one, of the same
// parity. With Config.RandomPorts every mapping gets a random port (RFC 6056, RFC 7857). Random
// means the first free port after a random one.
//
// # Memory
//
// A flow takes one cache line of 64 octets, 28 octets that only writers use, and two index slots of
// 8 octets at a load of 42 to 75 %. A NAPT mapping, shared by all flows of an inside port, takes 16
// octets, and a host 16; both need 2 to 4 more for hash chains. At 1,048,576 flows of either family
// a flow takes 117 octets of heap if hosts and ports are few, 136 if each flow has its own inside
// port, or comes from its own pod of the peer to a mapped endpoint, and 155 if each has its own
// inside host and port (BenchmarkFlowMemory, 2026-11). Tables grow as needed, a shard or chunk at a
// time, from 24 KiB for a peer with one or two flows, and are freed with their peer. The rule table
// takes 128 KiB and a few hundred octets per peer.
package natengine
