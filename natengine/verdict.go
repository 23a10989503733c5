package natengine

// Direction says which way a packet crosses the gateway.
type Direction uint8

const (
	Outbound Direction = iota // from the cluster towards the tunnel
	Inbound                   // from the tunnel towards the cluster
	directions
)

// String is "outbound" or "inbound", the value of the metrics label direction.
func (d Direction) String() string {
	if d == Outbound {
		return "outbound"
	}
	return "inbound"
}

// Action is what the caller must do with a packet after the engine has processed it.
type Action uint8

const (
	Discard Action = iota // drop it; Verdict.Drop says why and has been counted
	Forward               // send it on: outbound into the tunnel of Verdict.Peer, inbound to the TUN
	Deliver               // inbound only: hand it to the in-process endpoint (Config.Self4, Self6)
	Hold                  // a fragment was copied and waits for others of its datagram; it is not lost
)

// String is the action in lower case.
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

// Verdict is the engine's answer for one packet.
type Verdict struct {
	Action Action
	Drop   Drop       // the reason, only with Discard
	Peer   *PeerState // nil when no peer has the address

	released *[][]byte // rare, so a pointer: a Verdict of three words is returned in registers
}

// Released returns further fragments of the packet's datagram, which take the same Action after it.
// Outbound they had waited for the first fragment. Inbound they are the rest of an IPv6 datagram
// that was joined and cut again. Each is a whole, rewritten IP packet that the caller owns.
func (v Verdict) Released() [][]byte {
	if v.released == nil {
		return nil
	}
	return *v.released
}

// Drop is the reason why a packet was not forwarded. The list is closed: a new reason is a new
// constant here, with its metrics label and its sentence below.
type Drop uint8

const (
	DropNone Drop = iota

	// The bytes.
	DropMalformed   // not a whole, parseable IP packet
	DropBadChecksum // a checksum that has to be right is wrong
	DropFragment    // tiny first fragment, fragment that overlaps another or comes again, beyond 65,535 octets

	// Rules: default deny.
	DropNoPeer      // outbound: no peer has the destination; inbound: no peer has the source
	DropPeerDown    // the peer has no WireGuard session
	DropSource      // outbound: martian source; inbound: source that no packet of a peer may have
	DropDestination // inbound: neither in the PodCIDR as the peer sees it nor a mapped address
	DropNoMapping   // inbound: address of the ExternalCIDR to which nothing is mapped (for this source)
	DropNoFlow      // to the NAPT address without a known flow, or a packet that cannot begin a flow (TCP RST, ICMP reply, TCP of a mapped endpoint but for SYN)

	// State and its bounds.
	DropPortsExhausted    // no free port or ICMP id towards this peer, and none of a half-open flow
	DropFlowTableFull     // flow bound reached and nothing may be evicted
	DropHostQuota         // flow bound of one host reached and none of its flows may be evicted
	DropFlowClash         // the tuple belongs to another flow already
	DropFragmentStoreFull // fragment bound reached
	DropFragmentTimeout   // held, but the rest of its datagram (outbound: the first fragment) never arrived
	DropICMPError         // ICMP error that quotes no known flow or rule, is damaged, or is about an error
	DropProtocol          // NAPT of a protocol without ports, when the remote address is taken or the type is link-local

	// Counted by the gateway around the engine.
	DropVirtioHeader  // virtio-net header contradicts its packet
	DropTooBig        // larger than the MTU towards its peer and not to be fragmented; its sender gets an ICMP error, see TooBig
	DropTUNWrite      // the kernel refused the packet
	DropLocalQueue    // queue of the in-process endpoint is full
	DropLocalSource   // a message or connection to the in-process endpoint of a gateway that is not from a gateway
	DropLocalRate     // inbound: the peer exceeded its limit for the in-process endpoint
	DropLocalPort     // inbound: nobody listens on that UDP port of the in-process endpoint
	DropLocalProtocol // inbound: the in-process endpoint neither speaks the protocol nor answers such a message
	DropTunnelSend    // outbound: the sealed message could not be sent
	DropNoMandate     // outbound: another gateway may be active
	DropTunnelForged  // inbound: the message does not authenticate under the key of its session
	DropTunnelReplay  // inbound: the message was received before, or is older than the replay window
	DropTunnelSession // inbound: the message belongs to no current session; the peer is not known

	DropTunnelShort    // inbound: a data message below 32 octets; the peer is not known
	DropTunnelType     // inbound: no known message type, or a handshake of a wrong length; the peer is not known
	DropTunnelQueue    // outbound: dropped from the queue for its peer's session, by its bound on packets, octets or age
	DropTunnelSource   // inbound: a message from an address that no peer's gateway can have, see fabric.Site; the peer is not known
	DropHandshakeQueue // inbound: a handshake message beyond its budget or queue; the peer is not known

	DropReceiveQueue     // inbound: a data message for which the queue of its peer, or without a peer, was full
	DropSocketBuffer     // inbound: a message that the kernel dropped because the UDP socket was full; the peer is not known
	DropHandshakeKey     // inbound: a handshake message that was made for another public key; the peer is not known
	DropHandshakeRefused // inbound: a handshake message for our key that is a replay, has an unknown key, or answers none of ours

	numDrops
)

// drops holds label and explanation of each reason, in the order of the constants.
var drops = [numDrops]struct{ label, text string }{
	DropNone:              {"none", "not dropped"},
	DropMalformed:         {"malformed", "not a complete and well-formed IP packet"},
	DropBadChecksum:       {"bad_checksum", "a checksum is wrong"},
	DropFragment:          {"fragment", "tiny, overlapping, repeated or oversized fragment, or another fragment of such a datagram"},
	DropNoPeer:            {"no_peer", "no peer has this address"},
	DropPeerDown:          {"peer_down", "the peer has no WireGuard session"},
	DropSource:            {"source", "the source address is not allowed"},
	DropDestination:       {"destination", "the destination is not in the PodCIDR as this peer sees it, nor mapped"},
	DropNoMapping:         {"no_mapping", "nothing is mapped to this address of the ExternalCIDR"},
	DropNoFlow:            {"no_flow", "the packet belongs to no flow and cannot begin one"},
	DropPortsExhausted:    {"ports_exhausted", "no port is free at the NAPT address of this peer"},
	DropFlowTableFull:     {"flow_table_full", "the limit of flows is reached and there is no half-open flow to evict"},
	DropHostQuota:         {"host_quota", "the host has reached its limit of flows and has no half-open one to evict"},
	DropFlowClash:         {"flow_clash", "another flow already has this tuple"},
	DropFragmentStoreFull: {"fragment_store_full", "the fragment store is full"},
	DropFragmentTimeout:   {"fragment_timeout", "the datagram was not complete before the timeout"},
	DropICMPError:         {"icmp_error", "the ICMP error quotes no packet of a known flow or rule"},
	DropProtocol:          {"protocol", "the protocol has no ports, and another host uses it with the same remote address"},
	DropVirtioHeader:      {"virtio_header", "the virtio-net header contradicts its packet"},
	DropTooBig:            {"too_big", "larger than the MTU to its peer, and must not be fragmented"},
	DropTUNWrite:          {"tun_write", "the kernel refused the packet"},
	DropLocalQueue:        {"local_queue", "the queue of the in-process endpoint is full"},
	DropLocalSource:       {"local_source", "a message of the connection check, or a connection to a gateway's own address, from a host that is not a gateway"},
	DropLocalRate:         {"local_rate", "the peer exceeded its rate of packets to the in-process endpoint"},
	DropLocalPort:         {"local_port", "the in-process endpoint does not listen on this UDP port"},
	DropLocalProtocol:     {"local_protocol", "the in-process endpoint does not speak this protocol or does not answer this kind of message"},
	DropTunnelSend:        {"tunnel_send", "the sealed message could not be sent"},
	DropNoMandate:         {"no_mandate", "this gateway has no mandate to send: another one may be active"},
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
	DropHandshakeKey:      {"handshake_key", "the handshake was made for another public key than ours"},
	DropHandshakeRefused:  {"handshake_refused", "the handshake is from an unknown key, replayed, or answers no handshake of ours"},
}

// Drops lists every reason, without DropNone, in the order of the constants.
func Drops() []Drop {
	all := make([]Drop, 0, numDrops-1)
	for d := DropNone + 1; d < numDrops; d++ {
		all = append(all, d)
	}
	return all
}

// String is the reason in snake_case, the value of the metrics label reason.
func (d Drop) String() string {
	if d >= numDrops {
		return "unknown"
	}
	return drops[d].label
}

// Explain is the reason as half a sentence for people.
func (d Drop) Explain() string {
	if d >= numDrops {
		return "unknown reason"
	}
	return drops[d].text
}
