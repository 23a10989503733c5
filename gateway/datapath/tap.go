package datapath

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// SetCapture makes the tunnel show packets to c, from the next batch on. If c is nil, the tunnel
// shows no more packets. The goroutines of the data path call c, which never blocks them.
func (t *Tunnel) SetCapture(c *capture.Capture) {
	if c == nil {
		t.capture.Store(nil)
		return
	}
	t.capture.Store(&captured{c, t.Port()})
	t.link.Wake() // the outbound goroutine may be waiting for the first packet of a batch
}

// captured is a capture, and the UDP port for the headers that it generates. The port is queried
// when the capture starts. A later query could deadlock, because SetPort may hold the lock while it
// waits for the calling goroutine.
type captured struct {
	*capture.Capture
	port uint16
}

const (
	// tapHead is the room for the headers of a packet before NAT. A complete ICMP error fits,
	// because NAT also changes the packet that it quotes.
	tapHead = 2048
	// tapWhole is the maximum size of packets that are traced completely, not only by their
	// headers.
	tapWhole = 2048
)

// tap shows the packets of one goroutine to a capture. It owns its scratch memory. While no capture
// runs, call only its methods begin and active.
type tap struct {
	t   *Tunnel
	dir natengine.Direction
	to  *captured // the capture for the current batch; nil: none

	head     [tapHead]byte // the first octets of the packet before NAT
	kept     int
	size     int // length of the packet or run before NAT
	checksum packet.ChecksumState
	before   natengine.Tuple
	headers  int  // octets of headers in the packet
	fragment bool // the packet is a fragment; inbound, NAT may turn it into the complete datagram
	wanted   bool // the capture selects the last packet that passed the engine, and therefore its segments

	view   packet.View
	small  [tapHead]byte
	latest struct {
		commentKey
		comment string
	}
	last struct { // cached result of wantsEnds, because consecutive packets often belong to one flow
		to     *captured
		tuple  natengine.Tuple
		wanted bool
	}
}

// begin loads the capture. It is called once per batch.
func (p *tap) begin() { p.to = p.t.capture.Load() }

// active reports whether a capture is running.
func (p *tap) active() bool { return p.to != nil }

// saveHeaders saves the headers of a packet or run before the engine changes them.
func (p *tap) saveHeaders(v *packet.View) {
	b := v.Bytes()
	p.headers = headersOf(v)
	keep := p.headers
	if p.fragment = v.IsFragment(); p.fragment || v.IsICMPError() {
		keep = len(b)
	}
	p.kept = copy(p.head[:], b[:min(keep, len(b))])
	p.size, p.checksum, p.before = v.Len(), v.Checksum(), natengine.TupleOf(v, p.dir)
}

// showTranslated shows a packet before and after the engine. segments is the number of packets in
// the tunnel that carry it. tail holds the payloads of the second and later packets of a run.
func (p *tap) showTranslated(v *packet.View, verdict natengine.Verdict, drop natengine.Drop, segments int, tail [][]byte, now time.Duration) {
	c := p.to
	after := p.before
	if verdict.Action == natengine.Forward || verdict.Action == natengine.Deliver {
		after = natengine.TupleOf(v, p.dir)
	}
	p.wanted = c.WantsPeer(verdict.Peer) && (!c.Narrow() || c.WantsEnds(p.before) || c.WantsEnds(after))
	if !p.wanted || !c.WantsDrop(drop) {
		return
	}
	comment := p.comment(verdict, drop, after, segments, now)
	body := v.Bytes()
	if c.Wants(capture.BeforeNAT, p.dir, verdict.Peer, drop) {
		keep := p.keep(p.headers)
		head := p.head[:min(p.kept, keep)]
		rest := body[min(len(head), len(body)):]
		if p.fragment && p.dir == natengine.Inbound {
			rest = nil // body is the complete datagram now
		}
		p.add(capture.BeforeNAT, p.size, comment, keep, head, rest, tail)
	}
	if (verdict.Action == natengine.Forward || verdict.Action == natengine.Deliver) && c.Wants(capture.AfterNAT, p.dir, verdict.Peer, drop) {
		p.add(capture.AfterNAT, v.Len(), comment, p.keep(p.headers), body, nil, tail)
	}
}

// keep returns how many octets to capture of a packet whose headers have the given length.
func (p *tap) keep(headers int) int {
	if p.to.Snap > 0 {
		return p.to.Snap
	}
	return headers
}

// add captures the first keep octets of a packet, which is the concatenation of head, rest and
// tail.
func (p *tap) add(place capture.Place, size int, comment string, keep int, head, rest []byte, tail [][]byte) {
	var parts [2 + 64][]byte
	n := 0
	take := func(b []byte) {
		if b = b[:min(len(b), keep)]; len(b) > 0 && n < len(parts) {
			parts[n] = b
			n++
			keep -= len(b)
		}
	}
	take(head)
	take(rest)
	for _, b := range tail {
		take(b)
	}
	p.to.Add(place, p.dir, size, comment, parts[:n]...)
}

// comment returns the result of newComment. It calls newComment only once for consecutive packets
// of a flow.
func (p *tap) comment(verdict natengine.Verdict, drop natengine.Drop, after natengine.Tuple, segments int, now time.Duration) string {
	if verdict.Action == natengine.Hold || len(verdict.Released()) > 0 {
		return p.newComment(verdict, drop, after, segments, now)
	}
	same := commentKey{p.to, verdict.Peer, p.before, after, drop, segments, int64(now / time.Second)}
	if p.latest.commentKey != same {
		p.latest.commentKey, p.latest.comment = same, p.newComment(verdict, drop, after, segments, now)
	}
	return p.latest.comment
}

// commentKey is the input of the method newComment, and the cache key of the method comment. It
// includes the current second, because rules may change.
type commentKey struct {
	to            *captured
	peer          *natengine.PeerState
	before, after natengine.Tuple
	drop          natengine.Drop
	segments      int
	second        int64
}

// newComment returns the comment of a packet: its peer, and the rule that rewrote the packet or the
// reason why it was dropped.
func (p *tap) newComment(verdict natengine.Verdict, drop natengine.Drop, after natengine.Tuple, segments int, now time.Duration) string {
	var b strings.Builder
	if verdict.Peer != nil {
		fmt.Fprintf(&b, "peer %s", p.to.PeerName(verdict.Peer))
	} else {
		b.WriteString("no peer")
	}
	if rule := p.rule(now); rule != "" {
		fmt.Fprintf(&b, "; %s", rule)
	}
	if after.Src != p.before.Src {
		fmt.Fprintf(&b, "; source %s becomes %s", endText(p.before.Src), endText(after.Src))
	}
	if after.Dst != p.before.Dst {
		fmt.Fprintf(&b, "; destination %s becomes %s", endText(p.before.Dst), endText(after.Dst))
	}
	if segments > 1 {
		fmt.Fprintf(&b, "; superpacket of %d segments", segments)
	}
	switch {
	case drop != natengine.DropNone:
		b.WriteString("; " + dropText(drop))
	case verdict.Action == natengine.Hold:
		b.WriteString("; a fragment that waits for the rest of its datagram")
	case verdict.Action == natengine.Deliver:
		b.WriteString("; for the gateway itself")
	}
	if n := len(verdict.Released()); n > 0 {
		fmt.Fprintf(&b, "; %d more fragments of its datagram are forwarded", n)
	}
	return b.String()
}

func dropText(d natengine.Drop) string { return "dropped: " + d.String() + ": " + d.Explain() }

func endText(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}

// rule returns a description of the rule with which the engine handled the packet.
func (p *tap) rule(now time.Duration) string {
	trace, ok := p.trace(p.head[:p.kept], p.checksum, now)
	switch {
	case !ok:
		return ""
	case trace.Flow == "known":
		return trace.Rule + ", flow in the table"
	}
	return trace.Rule
}

// trace returns the engine's trace of a packet. b is the beginning of the packet: its headers, or
// the whole packet. trace adapts the lengths in the headers to the length of b.
func (p *tap) trace(b []byte, checksum packet.ChecksumState, now time.Duration) (natengine.Trace, bool) {
	small := p.small[:copy(p.small[:], b)]
	if !shorten(small) || p.view.Parse(small, checksum) != nil {
		return natengine.Trace{}, false
	}
	return p.t.engine.Trace(&p.view, p.dir, now), true
}

// shorten turns the beginning of a packet into a valid, shorter packet. It returns false if the
// beginning is too short.
func shorten(b []byte) bool {
	udp := -1
	switch {
	case len(b) >= 20 && b[0]>>4 == 4:
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		if b[9] == packet.UDP && binary.BigEndian.Uint16(b[6:])&0x1fff == 0 {
			udp = int(b[0]&15) * 4
		}
	case len(b) >= 40 && b[0]>>4 == 6:
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
		if b[6] == packet.UDP {
			udp = 40
		}
	default:
		return false
	}
	if udp >= 0 && len(b) >= udp+8 {
		binary.BigEndian.PutUint16(b[udp+4:], uint16(len(b)-udp))
	}
	return true
}

// headersOf returns the length of the headers of a packet, in octets. For an ICMP error it includes
// the headers of the quoted packet without their options.
func headersOf(v *packet.View) int {
	n := v.PayloadOffset()
	if v.IsICMPError() {
		if n += 20 + 8; !v.Is4() {
			n += 20
		}
	}
	return min(n, len(v.Bytes()))
}

// showDropped shows a packet that was dropped outside the engine.
func (p *tap) showDropped(place capture.Place, peer *natengine.PeerState, b []byte, why natengine.Drop) {
	p.showPacket(place, peer, b, why, dropText(why))
}

// showPacket shows a packet b with the given comment. If b does not parse, showPacket captures at
// most the length of an IP header.
func (p *tap) showPacket(place capture.Place, peer *natengine.PeerState, b []byte, drop natengine.Drop, comment string) {
	c := p.to
	if !c.Wants(place, p.dir, peer, drop) {
		return
	}
	headers := min(len(b), 20)
	if p.view.Parse(b, packet.ChecksumComplete) == nil {
		if headers = headersOf(&p.view); c.Narrow() && !c.WantsEnds(natengine.TupleOf(&p.view, p.dir)) {
			return
		}
	} else if c.Narrow() {
		return
	}
	if peer != nil {
		comment = "peer " + c.PeerName(peer) + "; " + comment
	}
	p.add(place, len(b), comment, p.keep(headers), b, nil, nil)
}

// showInner shows an outbound packet in the form that the tunnel carries, and reports whether the
// capture selects it. translated is true if the packet is a segment or fragment of the last packet
// that passed the engine, or that packet itself. If the capture selected that packet, showInner
// does not check addresses and ports again.
func (p *tap) showInner(peer *natengine.PeerState, b []byte, translated bool) bool {
	headers, wanted := p.wantsInner(peer, b, translated && p.wanted, 0)
	if wanted {
		p.addInner(peer, b, headers)
	}
	return wanted
}

// wantsInner reports whether the capture selects a packet inside the tunnel, and returns the length
// of its headers. If known is true, the capture selects the packet's ends, and wantsInner does not
// check them.
func (p *tap) wantsInner(peer *natengine.PeerState, b []byte, known bool, now time.Duration) (headers int, wanted bool) {
	c := p.to
	if !c.WantsPeer(peer) || !c.WantsDrop(natengine.DropNone) || p.view.Parse(b, packet.ChecksumComplete) != nil {
		return 0, false
	}
	headers = headersOf(&p.view)
	return headers, known || !c.Narrow() || p.wantsEnds(b, now)
}

func (p *tap) addInner(peer *natengine.PeerState, b []byte, headers int) {
	if !p.to.Wants(capture.Tunnel, p.dir, peer, natengine.DropNone) {
		return
	}
	preposition := "from"
	if p.dir == natengine.Outbound {
		preposition = "to"
	}
	p.add(capture.Tunnel, len(b), preposition+" peer "+p.to.PeerName(peer), p.keep(headers), b, nil, nil)
}

// wantsEnds reports whether the capture selects the addresses and ports that the parsed packet has
// before or after NAT.
func (p *tap) wantsEnds(b []byte, now time.Duration) bool {
	c, v := p.to, &p.view
	tuple := natengine.TupleOf(v, p.dir)
	if c.WantsEnds(tuple) {
		return true
	}
	remote := tuple.Src
	if p.dir == natengine.Outbound {
		remote = tuple.Dst
	}
	if p.dir == natengine.Outbound || !v.IsICMPError() && !c.WantsRemote(tuple.Proto, remote) {
		return false // an outbound packet has already passed NAT
	}
	if p.last.to == c && p.last.tuple == tuple {
		return p.last.wanted
	}
	keep := v.PayloadOffset()
	if v.IsICMPError() {
		keep = len(b)
	}
	trace, ok := p.trace(b[:min(keep, tapWhole)], v.Checksum(), now)
	wanted := ok && c.WantsEnds(trace.After)
	p.last.to, p.last.tuple, p.last.wanted = c, tuple, wanted
	return wanted
}

// showOuter shows a WireGuard message. Of a data message it captures only the header, because its
// packet is captured inside the tunnel.
func (p *tap) showOuter(peer *natengine.PeerState, m []byte, endpoint conn.Endpoint, drop natengine.Drop) {
	if p.to.Wants(capture.Underlay, p.dir, peer, drop) {
		p.to.message(p.dir, p.nameOf(peer), m, endpoint, drop)
	}
}

func (p *tap) nameOf(peer *natengine.PeerState) string {
	if peer == nil {
		return ""
	}
	return p.to.PeerName(peer)
}

// handshake shows a handshake message, received or sent. Anybody can send one with the index of
// any peer, so a received message is attributed to the peer that is configured at its source
// address.
func (c *captured) handshake(t *Tunnel, dir natengine.Direction, m []byte, endpoint conn.Endpoint, drop natengine.Drop) {
	if c.Narrow() {
		return
	}
	var peer *natengine.PeerState
	table := t.peers.Load()
	if to := t.peerOf(m); dir == natengine.Outbound && to != nil {
		peer = to.state
	} else if table.byAddr[endpoint.DstIP().Unmap()] != nil { // search all peers only for a configured address, so that a flood from unknown sources costs little
		for p, addr := range table.addrs {
			if addr == endpoint.DstIP().Unmap() {
				peer = p.state
				break
			}
		}
	}
	if !c.Wants(capture.Underlay, dir, peer, drop) {
		return
	}
	name := ""
	if peer != nil {
		name = c.PeerName(peer)
	}
	c.message(dir, name, m, endpoint, drop)
}

var messageNames = map[uint32]string{
	device.MessageInitiationType: "handshake initiation", device.MessageResponseType: "handshake response",
	device.MessageCookieReplyType: "cookie reply", device.MessageTransportType: "data",
}

// message captures a WireGuard message, with generated IP and UDP headers before it.
func (c *captured) message(dir natengine.Direction, peer string, m []byte, endpoint conn.Endpoint, drop natengine.Drop) {
	if endpoint == nil {
		return
	}
	kind := uint32(0)
	if len(m) >= 4 {
		kind = binary.LittleEndian.Uint32(m)
	}
	var comment string
	switch {
	case messageNames[kind] == "":
		comment = "not a WireGuard message"
	case kind == device.MessageTransportType && len(m) == headerLen+tagLen:
		comment = "keepalive"
	default:
		comment = messageNames[kind]
	}
	if peer != "" {
		comment = "peer " + peer + "; " + comment
	}
	if kind == device.MessageTransportType && len(m) >= headerLen {
		var b [64]byte
		text := append(b[:0], ", session "...)
		text = hex.AppendEncode(text, []byte{m[7], m[6], m[5], m[4]})
		text = strconv.AppendUint(append(text, ", counter "...), binary.LittleEndian.Uint64(m[8:]), 10)
		comment += string(text)
	}
	if drop != natengine.DropNone {
		comment += "; " + dropText(drop)
	}
	body, tail := m, []byte(nil)
	if len(m) == 0 || len(m) != handshakeLen(kind) {
		// The octets after the header may already be decrypted, so they are replaced.
		body, tail = m[:min(len(m), headerLen)], noContent[:min(len(m)-min(len(m), headerLen), len(noContent))]
	}
	remote := netip.AddrPortFrom(endpoint.DstIP().Unmap(), 0)
	if e, ok := endpoint.(interface{ AddrPort() netip.AddrPort }); ok {
		remote = netip.AddrPortFrom(remote.Addr(), e.AddrPort().Port())
	}
	local := netip.AddrPortFrom(endpoint.SrcIP().Unmap(), c.port)
	src, dst := local, remote
	if dir == natengine.Inbound {
		src, dst = remote, local
	}
	var head [48]byte
	h := udpHeader(head[:0], src, dst, m)
	c.Add(capture.Underlay, dir, len(h)+len(m), comment, h, body, tail)
}

// noContent replaces the content of a data message. It has the length of a tag, because Wireshark
// calls a shorter message malformed.
var noContent [tagLen]byte
