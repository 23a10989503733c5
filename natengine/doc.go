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
// address of Pa@B, and x@B is an address of A's ExternalCIDR as B sees it. The engine rewrites only
// addresses of our own side: the source of outbound packets and the destination of inbound ones.
// All lookups are by peer and direction. Two peers may use the same network for our pods. A peer
// may also use for our pods the network that we use for its pods, so a packet in the tunnel may
// have the same address as source and as destination. Therefore no rule may treat source and
// destination as an unordered pair, and the engine has no check against LAND attacks.
//
// # The path of a packet
//
// Outbound finds the peer by the destination, Inbound by the source, both by prefix. A packet of a
// pod that is mapped 1:1 needs only this lookup, and no state. All other packets take the general
// path, which handles ICMP errors (by the packet they quote), flows, mapped endpoints and NAPT. The
// engine drops a packet that no rule permits, and counts it under a reason of verdict.go. A peer
// reaches only our pods and mapped endpoints. A packet that is dropped is not changed. The
// in-process endpoint is the gateway itself, as a host that peers reach through the tunnel
// (Config.Self4, Self6). The engine ignores the TTL, DSCP, ECN, IP options and the IP
// identification. The kernels on either side of the gateway decrement the TTL. The caller checks
// the size of packets and, if a packet exceeds the peer's MTU, calls TooBig for the ICMP error.
//
// Rules are an immutable table behind an atomic pointer. Each peer has a table of flows, which
// survives a change of rules. A lookup takes no lock; a new flow takes the mutex of its peer.
// Neither a hit nor an insert allocates memory, apart from the growth of tables.
//
// # Bounds
//
//	bound                               default               when reached
//	flows of all peers                  1,048,576             oldest half-open flow of a peer is evicted (which peer: see
//	                                                          below); if there is none, flow_table_full
//	flows of one peer                   equal share of the    oldest half-open flow of the peer is evicted; if there is
//	                                    flows of all peers    none, flow_table_full
//	flows of one host                   quarter of the        oldest half-open flow of the host is evicted; if there is
//	  (per peer; see below)             peer's, 1,024-16,384  none, host_quota
//	ports at a NAPT address             65,535 TCP, 65,535    oldest half-open flow with such a port is evicted; if there
//	  (per peer, family and protocol)   UDP, 65,536 ICMP ids  is none, ports_exhausted; established flows continue
//	incomplete datagrams                256                   oldest is evicted; fragment_store_full per lost fragment
//	octets of held fragments            1 MiB                 oldest datagram is evicted; counted in the same way
//	  (both per peer and direction)
//	  part of both for one source       a quarter             oldest datagram of the source is evicted
//	held fragments of one datagram      256                   fragment_store_full
//	time a fragment is held             5 s, 2-30 s           fragment_timeout
//	ICMP errors that the gateway        1,000 a second, 100   no error is sent; counted
//	  sends (per peer)                  at once
//
// A flow is half-open until packets were seen in both directions (for TCP, packets with ACK). A TCP
// flow is half-open again after a RST or two FINs. An established flow is never evicted. Each peer
// and each host has a queue of its half-open flows, oldest first, so an eviction takes constant
// time. When a connection closes, the next Sweep puts its flow back into these queues.
//
// Each peer has its own flow table, its own fragment stores and an equal share of MaxFlows. So a
// flood from or to one peer cannot displace or block the flows of another. If MaxFlowsPerPeer times
// the number of peers exceeds MaxFlows, a peer may exceed its share while the other peers leave
// flows unused. When all flows are in use, a peer below its equal share evicts a half-open flow of
// a peer above its share. Any other peer evicts one of its own half-open flows. Established flows
// are not evicted, so a peer that has exceeded its share may stay above it. The other peers
// together can always have at least MaxFlows - MaxFlowsPerPeer flows.
//
// The host of a flow is the one that opens it: our host for a NAPT flow, the peer's for a flow to a
// mapped endpoint. The nodes of a peer count as one host, because they share its NAPT address. Each
// IPv6 address counts as a host; a sender with many addresses is limited by the bound of its peer.
// A mapping needs a flow, so the quota of a host also limits its ports at the NAPT address (RFC
// 6888, REQ-4). By default, a host gets at most a quarter of the ports. When all ports of a
// protocol are in use, a new mapping takes the port of the oldest half-open flow. Without a
// half-open flow, the new mapping fails. Flows of forged sources stay half-open, so they cannot use
// up the ports.
//
// The timeouts are 300 s for UDP, 7,440 s for established and 240 s for other TCP connections, 60 s
// for ICMP, and 300 s for other protocols. Packets of either direction refresh a flow; RSTs and
// ICMP errors do not. Timeouts below the minimum of the RFCs are accepted, because operators
// control both ends of a tunnel; Config.Warnings lists them. A UDP flow has the same timeout with
// and without an answer. No RFC requires a shorter timeout for a flow without an answer, and the
// engine can evict this flow, because it is half-open. An unsolicited SYN to the NAPT address is
// dropped without an answer, so that a simultaneous open can succeed (RFC 5382, REQ-4).
//
// # Ports
//
// A mapping keeps the port of the inside host if that port is free, as kernel MASQUERADE does.
// Otherwise it gets a random port of the same range (0-1023, 1024-65535) and, if possible, of the
// same parity. With Config.RandomPorts every mapping gets a random port (RFC 6056, RFC 7857). A
// random port is the first free one at or after a randomly chosen number.
//
// # Memory
//
// A flow takes one cache line of 64 octets, 28 octets that only writers use, and two index slots of
// 8 octets. Of all slots, 42 to 75 % are in use. A NAPT mapping, which all flows of an inside port
// share, takes 16 octets, and so does a host. Each mapping and each host takes 2 to 4 octets more
// for hash chains. With 1,048,576 flows of either family, the heap per flow is as follows
// (BenchmarkFlowMemory, 2026-11):
//
//	117 octets   few hosts and ports
//	136 octets   each flow has its own inside port, or comes from its own pod of the peer to a mapped endpoint
//	155 octets   each flow has its own inside host and port
//
// Tables grow as needed, a shard or chunk at a time, from 24 KiB for a peer with one or two flows.
// The tables of a peer are freed when the peer is removed. The rule table takes 128 KiB and a few
// hundred octets per peer.
package natengine
