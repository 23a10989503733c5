package natengine

// Direction is the direction in which a packet passes the gateway.
type Direction uint8

const (
	Outbound Direction = iota // from the cluster towards the tunnel
	Inbound                   // from the tunnel towards the cluster
	directions
)

// String returns "outbound" or "inbound", the values of the metrics label direction.
func (d Direction) String() string {
	if d == Outbound {
		return "outbound"
	}
	return "inbound"
}

// Action is the caller's next step with a packet that the engine has processed.
type Action uint8

const (
	Discard Action = iota // drop it; Verdict.Drop is the reason, already counted
	Forward               // send it on: outbound into the tunnel of Verdict.Peer, inbound to the TUN
	Deliver               // inbound only: pass it to the in-process endpoint (Config.Self4, Self6)
	Hold                  // a fragment that the engine has copied until its datagram is complete; nothing to do
)

// String returns the action in lower case.
func (a Action) String() string {
	switch a {
	case Forward:
		return "forward"
	case Deliver:
		return "deliver"
	case Hold:
		return "hold"
	default:
		return "discard"
	}
}

// Verdict is the engine's decision about one packet.
type Verdict struct {
	Action Action
	Drop   Drop       // the reason of a Discard, otherwise DropNone
	Peer   *PeerState // nil if no peer has the address

	released *[][]byte // a pointer, so that a Verdict has three words and is returned in registers
}

// Released returns further fragments of the packet's datagram. The caller must apply the same
// Action to them, after the packet itself. Outbound, these fragments waited for the first fragment.
// Inbound, they are the rest of an IPv6 datagram that was joined and fragmented again. Each is a
// whole, rewritten IP packet that the caller owns.
func (v Verdict) Released() [][]byte {
	if v.released == nil {
		return nil
	}
	return *v.released
}

// Drop is the reason why a packet was not forwarded. Each reason has a constant here, and its
// metrics label and explanation in the table below.
type Drop uint8

const (
	DropNone Drop = iota

	// Malformed packets.
	DropMalformed   // not a whole, parseable IP packet
	DropBadChecksum // a checksum that must be correct is wrong
	DropFragment    // tiny first fragment, fragment that overlaps or repeats another, datagram beyond 65,535 octets

	// Packets that no rule permits; the default is to deny.
	DropNoPeer      // no peer has the destination (outbound) or the source (inbound)
	DropPeerDown    // the peer has no WireGuard session
	DropSource      // outbound: martian source; inbound: source that does not belong to the peer, or that no peer may have
	DropDestination // inbound: neither in our PodCIDR as the peer sees it nor a mapped address
	DropNoMapping   // inbound: address of the ExternalCIDR that is not mapped for this peer
	DropNoFlow      // no known flow, and the packet cannot begin one (TCP RST, ICMP reply, packet to the NAPT address)

	// Packets that contradict the known flows or fragments, or exceed a bound.
	DropPortsExhausted    // no free port or ICMP identifier towards this peer, and no half-open flow to evict
	DropFlowTableFull     // flow bound reached and no flow may be evicted
	DropHostQuota         // flow bound of one host reached and none of its flows may be evicted
	DropFlowClash         // another flow already has the tuple
	DropFragmentStoreFull // fragment bound reached
	DropFragmentTimeout   // fragment held until the timeout; outbound: the first fragment did not arrive; inbound: other fragments did not arrive
	DropICMPError         // ICMP error that is damaged, matches no flow or rule, or is about another ICMP error
	DropProtocol          // protocol without ports that another host already uses with the same remote address, or ICMPv6 message that must not leave its link

	// Drops that the gateway counts, before or after the engine.
	DropVirtioHeader  // the virtio-net header contradicts its packet
	DropTooBig        // larger than the MTU to its peer and must not be fragmented; see TooBig
	DropTUNWrite      // the kernel refused the packet
	DropLocalQueue    // the queue of the in-process endpoint is full
	DropLocalSource   // sent to the address of a gateway, or to the connection check, by a host that is not a gateway
	DropLocalRate     // inbound: the peer exceeded its limit for the in-process endpoint
	DropLocalPort     // inbound: the in-process endpoint does not listen on that UDP port
	DropLocalProtocol // inbound: the in-process endpoint does not support the protocol or does not answer the message
	DropTunnelSend    // outbound: the sealed message could not be sent
	DropNoMandate     // outbound: this gateway may not send, because another one may be active
	DropTunnelForged  // inbound: the message does not authenticate under the key of its session
	DropTunnelReplay  // inbound: the message was received before, or is older than the replay window
	DropTunnelSession // inbound: the message belongs to no current session; the peer is not known

	DropTunnelShort    // inbound: a data message below 32 octets; the peer is not known
	DropTunnelType     // inbound: no known message type, or a handshake of a wrong length; the peer is not known
	DropTunnelQueue    // outbound: waited for a session too long, or newer packets filled the queue
	DropTunnelSource   // inbound: the source address cannot be a peer's gateway, see fabric.Site; the peer is not known
	DropHandshakeQueue // inbound: a handshake message over a rate limit, or its queue was full; the peer is not known

	DropReceiveQueue     // inbound: the queue of the peer, or of messages without a peer, was full
	DropSocketBuffer     // inbound: dropped by the kernel because the UDP socket was full; the peer is not known
	DropHandshakeKey     // inbound: a handshake message for another public key; the peer is not known
	DropHandshakeRefused // inbound: a handshake message that is replayed, comes from an unknown key, or answers no handshake of ours

	numDrops
)

// drops holds the label and the explanation of each reason, in the order of the constants.
var drops = [numDrops]struct{ label, text string }{
	DropNone:              {"none", "not dropped"},
	DropMalformed:         {"malformed", "not a complete and well-formed IP packet"},
	DropBadChecksum:       {"bad_checksum", "a checksum is wrong"},
	DropFragment:          {"fragment", "tiny, overlapping, repeated or oversized fragment, or another fragment of such a datagram"},
	DropNoPeer:            {"no_peer", "no peer has this address"},
	DropPeerDown:          {"peer_down", "the peer has no WireGuard session"},
	DropSource:            {"source", "the source address is not allowed"},
	DropDestination:       {"destination", "the destination is neither in the PodCIDR as this peer sees it nor mapped"},
	DropNoMapping:         {"no_mapping", "nothing is mapped to this address of the ExternalCIDR"},
	DropNoFlow:            {"no_flow", "the packet belongs to no flow and cannot begin one"},
	DropPortsExhausted:    {"ports_exhausted", "no port is free at the NAPT address of this peer"},
	DropFlowTableFull:     {"flow_table_full", "the limit of flows is reached and there is no half-open flow to evict"},
	DropHostQuota:         {"host_quota", "the host has reached its limit of flows and has no half-open one to evict"},
	DropFlowClash:         {"flow_clash", "another flow already has this tuple"},
	DropFragmentStoreFull: {"fragment_store_full", "the fragment store is full"},
	DropFragmentTimeout:   {"fragment_timeout", "the datagram was not complete before the timeout"},
	DropICMPError:         {"icmp_error", "the ICMP error quotes no packet of a known flow or rule"},
	DropProtocol:          {"protocol", "the protocol has no ports, and another host already uses it with the same remote address; or the ICMP message may not leave its link, or is neither an error nor a query"},
	DropVirtioHeader:      {"virtio_header", "the virtio-net header contradicts its packet"},
	DropTooBig:            {"too_big", "larger than the MTU to its peer, and must not be fragmented"},
	DropTUNWrite:          {"tun_write", "the kernel refused the packet"},
	DropLocalQueue:        {"local_queue", "the queue of the in-process endpoint is full"},
	DropLocalSource:       {"local_source", "a host that is not a gateway sent a message to the connection check or to a gateway's own address"},
	DropLocalRate:         {"local_rate", "the peer exceeded its rate of packets to the in-process endpoint"},
	DropLocalPort:         {"local_port", "the in-process endpoint does not listen on this UDP port"},
	DropLocalProtocol:     {"local_protocol", "the in-process endpoint does not support this protocol or does not answer this kind of message"},
	DropTunnelSend:        {"tunnel_send", "the encrypted message could not be sent"},
	DropNoMandate:         {"no_mandate", "this gateway may not send, because another one may be active"},
	DropTunnelForged:      {"tunnel_forged", "the message does not authenticate under the key of its session"},
	DropTunnelReplay:      {"tunnel_replay", "the message was received before, or is older than the replay window"},
	DropTunnelSession:     {"tunnel_session", "the message belongs to no current session"},
	DropTunnelShort:       {"tunnel_short", "the data message is too short"},
	DropTunnelType:        {"tunnel_type", "not a WireGuard message, or a handshake of a wrong length"},
	DropTunnelQueue:       {"tunnel_queue", "the packet waited for a session too long, or newer ones replaced it"},
	DropTunnelSource:      {"tunnel_source", "the message comes from an address that no peer's gateway can have"},
	DropHandshakeQueue:    {"handshake_queue", "the source exceeded its rate of handshakes without a cookie, or the queue is full"},
	DropReceiveQueue:      {"receive_queue", "the peer exceeded its share of the decryption queue, or too many messages belong to no peer"},
	DropSocketBuffer:      {"socket_buffer", "the kernel's buffer of the UDP socket was full"},
	DropHandshakeKey:      {"handshake_key", "the handshake is for another public key than that of this gateway"},
	DropHandshakeRefused:  {"handshake_refused", "the handshake is from an unknown key, replayed, or answers no handshake of this gateway"},
}

// Drops returns every reason except DropNone, in the order of the constants.
func Drops() []Drop {
	all := make([]Drop, 0, numDrops-1)
	for d := DropNone + 1; d < numDrops; d++ {
		all = append(all, d)
	}
	return all
}

// String returns the reason in snake_case, the value of the metrics label reason.
func (d Drop) String() string {
	if d >= numDrops {
		return "unknown"
	}
	return drops[d].label
}

// Explain returns the reason as half a sentence for people.
func (d Drop) Explain() string {
	if d >= numDrops {
		return "unknown reason"
	}
	return drops[d].text
}
