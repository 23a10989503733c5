// Package natengine is packet in, verdict out: it decides for each packet that crosses a gateway which peer it belongs
// to, whether it may pass, and what address of ours it shows on the other side. It knows no kernel, no clock and no I/O.
//
//	                 cluster A                            tunnel to peer B
//	Outbound   a      ─► b@A     prefix map, stateless    Pa ⇒ Pa@B     a@B   ─► b@A
//	           node   ─► b@A     NAPT, flow                             natIP ─► b@A
//	           e      ─► b@A     reply of a mapped endpoint, flow       x@B   ─► b@A
//	Inbound    b@A    ─► a       prefix map, reversed     Pa@B ⇒ Pa     b@A   ─► a@B
//	           b@A    ─► node    flow                                   b@A   ─► natIP
//	           b@A    ─► e       mapped endpoint, flow                  b@A   ─► x@B
//
// The notation is that of Liqo's fabric: Pa@B are A's pods as B sees them, natIP is the network address of Pa@B, x@B an
// address of A's ExternalCIDR as B sees it. Only addresses of our own side are rewritten, the source on the way out and
// the destination on the way in. Everything is keyed by peer and direction: two peers may see us under one range, and a
// peer may see us under the range under which we see it, so that source and destination of a packet in the tunnel can
// be the same address. No rule may therefore look at both ends as an unordered pair, and there is no LAND check.
//
// # The path of a packet
//
// Outbound finds the peer by the destination, Inbound by the source, both by longest prefix. A pod that is mapped 1:1
// over IPv4 is done then, without state. The general path goes on with ICMP errors (by the packet they quote), flows,
// mapped endpoints and NAPT. What no rule permits is dropped and counted under one of the reasons in verdict.go; a peer
// reaches our pods as it sees them and mapped endpoints, nothing else. A packet is never forwarded half rewritten, and
// one that is discarded is untouched. The engine does not look at TTL, DSCP, ECN, IP options or the IP identification:
// the TTL is counted down by the kernels on either side of the gateway.
//
// Rules are an immutable table behind an atomic pointer. Flows live in a table per peer, which survives a change of
// rules; a lookup takes no lock, a new flow takes the mutex of its peer. Neither a hit nor an insert allocates, apart from
// the growth of tables.
//
// # Bounds
//
//	what                                default               when reached
//	flows, all peers                    1,048,576             oldest half-open flow of the same peer is evicted (evicted),
//	flows of one peer                   equal share of that   else flow_table_full
//	ports at a NAPT address             65,535 TCP, 65,535    ports_exhausted; established flows go on
//	  (per peer, family and protocol)   UDP, 65,536 ICMP ids
//	datagrams with fragments under way  256                   oldest gives way, fragment_store_full for what it held
//	octets of held fragments            1 MiB                 the same
//	  (both per peer and direction)
//	held fragments of one datagram      64                    fragment_store_full
//	time a fragment is held             5 s, 2-30 s           fragment_timeout
//
// A flow is half-open until packets were seen both ways (TCP: with ACK), and a TCP flow again after a RST or two FINs. An
// established flow is never evicted. As each peer has its own table, fragment stores and share, a flood from or to one
// peer cannot displace or block another's flows; only where MaxFlowsPerPeer times the number of peers exceeds MaxFlows can
// it keep others from opening new ones. The bound over all peers may be exceeded by one flow per peer for a moment.
//
// Timeouts: UDP 300 s, TCP 7,440 s established and 240 s else, ICMP 60 s, other protocols 300 s. Packets of either
// direction refresh a flow, RSTs and ICMP errors do not.
//
// # Memory
//
// An entry is one cache line of 64 octets plus 12 that only writers touch, and two index slots of 8 octets at a load of
// 31 to 75 %; a NAPT mapping takes 32 octets plus 4 to 8 of hash chain and is shared by all flows of one inside port. At
// 1,048,576 flows the heap grows by 113 octets per flow, by 150 when each has an inside port of its own
// (BenchmarkFlowMemory, 2026-11). Tables grow as needed, a shard or chunk at a time, and are given back when their peer
// goes. The rule table takes 128 KiB and a few hundred octets per peer.
package natengine
