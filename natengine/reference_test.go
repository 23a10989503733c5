package natengine_test

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// reference is a second implementation of the engine, slow and simple, with maps and netip. It was
// written from docs/liqo-v0.md (section 7) and the RFCs, and shares no line with the engine. For
// each packet it computes the expected outcome. Where the engine may choose the port of a new NAPT
// flow, the reference checks that the port is allowed, and then uses the same port.
type reference struct {
	self        []netip.Addr
	timeouts    natengine.Timeouts
	peers       []natengine.Peer
	flows       []*refFlow                    // in the order of opening; an expired flow stays until sweep removes it
	room        func(*refFlow) natengine.Drop // DropNone if the bounds admit one more flow; nil for no bounds
	expired     func(*refFlow)                // called with each expired flow; may be nil
	random      bool                          // Config.RandomPorts
	justEvicted []*refFlow                    // flows that were evicted for the flow being opened
}

type refFlow struct {
	peer                  string
	endpoint              bool
	proto                 uint8
	query                 refQuery
	local, mapped, remote netip.AddrPort
	seen                  time.Duration
	acked, finished       map[natengine.Direction]bool
	reset                 bool
	settled               bool // the flow was established at some time
}

// refQuery distinguishes the ICMP queries of one identifier by the type of the request and by
// the direction in which the request went.
type refQuery struct {
	request uint8
	asker   natengine.Direction
}

// noQuery belongs to ICMP messages that never match a flow.
var noQuery = refQuery{request: 255}

var requests = map[uint8]uint8{0: 8, 8: 8, 14: 13, 13: 13, 16: 15, 15: 15, 18: 17, 17: 17, 129: 128, 128: 128}

// queryOf returns the ICMP query that a packet of direction dir belongs to, or zero for a packet of
// another protocol.
func queryOf(p packettest.Packet, dir natengine.Direction) refQuery {
	switch {
	case !isICMP(p):
		return refQuery{}
	case !isQuery(p):
		return noQuery
	case isRequest(p):
		return refQuery{requests[p.Type], dir}
	}
	return refQuery{requests[p.Type], natengine.Inbound + natengine.Outbound - dir}
}

// outcome is the expected result for a packet.
type outcome struct {
	action natengine.Action
	drop   natengine.Drop
	near   netip.Addr // our end, rewritten
	port   int        // its port, -1 for unchanged
	opened *refFlow   // the NAPT flow that the packet opened; its port is still unknown
	// For ICMP errors: our end in the quoted packet.
	quoted     netip.Addr
	quotedPort int
}

func dropped(d natengine.Drop) outcome { return outcome{action: natengine.Discard, drop: d} }

// bitsOf returns an address as a string of 0 and 1.
func bitsOf(a netip.Addr) string {
	s := ""
	for _, b := range a.AsSlice() {
		s += fmt.Sprintf("%08b", b)
	}
	return s
}

// moved returns the address with the network bits of to and the host bits of a.
func moved(a netip.Addr, to netip.Prefix) netip.Addr {
	s := bitsOf(to.Addr())[:to.Bits()] + bitsOf(a)[to.Bits():]
	var b []byte
	for i := 0; i < len(s); i += 8 {
		n := 0
		for _, c := range s[i : i+8] {
			n = n*2 + int(c-'0')
		}
		b = append(b, byte(n))
	}
	addr, _ := netip.AddrFromSlice(b)
	return addr
}

// networkOf returns the prefix map for the family of a. ok is false if there is none.
func networkOf(p natengine.Peer, a netip.Addr) (natengine.Remap, bool) {
	for _, m := range p.Pods {
		if m.From.Addr().Is4() == a.Is4() {
			return m, true
		}
	}
	return natengine.Remap{}, false
}

// isPod reports whether a is a pod of prefix in. The network address is not a pod, because it
// belongs to NAPT, unless it is the only address of the prefix.
func isPod(a netip.Addr, in netip.Prefix) bool {
	return in.Contains(a) && (a != in.Addr() || in.IsSingleIP())
}

func within(a netip.Addr, list []netip.Prefix) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// impossible reports whether a must not be a source (RFC 1812, section 5.3.7).
// docs/liqo-v0.md, sections 9 and 10, allows 240.0.0.0/4 and 169.254.0.0/16.
func impossible(a netip.Addr) bool {
	if a.Is4() {
		b := a.As4()
		return b[0] == 0 || b[0] == 127 || b[0] >= 224 && b[0] < 240 || b == [4]byte{255, 255, 255, 255}
	}
	return a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() || a.IsLinkLocalUnicast() || a.Is4In6()
}

// offLimits reports whether a is impossible or belongs to the metadata service of a cloud.
func offLimits(a netip.Addr) bool {
	return impossible(a) || a.Is4() && a.IsLinkLocalUnicast() || a == netip.MustParseAddr("fd20:ce::254") ||
		netip.MustParsePrefix("fd00:ec2::/32").Contains(a)
}

func (r *reference) isSelf(a netip.Addr) bool { return slices.Contains(r.self, a) }

func (r *reference) peerOf(a netip.Addr) (p natengine.Peer, pods, ok bool) {
	for _, p := range r.peers {
		if within(a, p.RemotePods) || within(a, p.RemoteExternal) {
			return p, within(a, p.RemotePods), true
		}
	}
	return natengine.Peer{}, false, false
}

func isICMP(p packettest.Packet) bool {
	return p.Proto == 1 && p.Src.Is4() || p.Proto == 58 && p.Src.Is6()
}

func isError(p packettest.Packet) bool {
	if p.Src.Is6() {
		return isICMP(p) && p.Type < 128
	}
	return isICMP(p) && slices.Contains([]uint8{3, 4, 5, 11, 12}, p.Type)
}

func isQuery(p packettest.Packet) bool {
	if p.Src.Is6() {
		return isICMP(p) && (p.Type == 128 || p.Type == 129)
	}
	return isICMP(p) && slices.Contains([]uint8{0, 8, 13, 14, 15, 16, 17, 18}, p.Type)
}

func isRequest(p packettest.Packet) bool {
	return isQuery(p) && (p.Type == 8 || p.Type == 13 || p.Type == 15 || p.Type == 17 || p.Type == 128)
}

// hasPorts reports whether p has a port or identifier, by which NAPT distinguishes hosts: TCP, UDP
// and ICMP.
func hasPorts(p packettest.Packet) bool { return p.Proto == 6 || p.Proto == 17 || isICMP(p) }

// tuple returns our end and the peer's end of a packet.
func tuple(p packettest.Packet, dir natengine.Direction) (near, remote netip.AddrPort) {
	src, dst := netip.AddrPortFrom(p.Src, p.SrcPort), netip.AddrPortFrom(p.Dst, p.DstPort)
	near, remote = src, dst
	if dir == natengine.Inbound {
		near, remote = dst, src
	}
	if isQuery(p) {
		near = netip.AddrPortFrom(near.Addr(), p.ICMPID)
	}
	return near, remote
}

func (r *reference) alive(f *refFlow, now time.Duration) bool { return now-f.seen <= r.lifetime(f) }

func (r *reference) lifetime(f *refFlow) time.Duration {
	switch f.proto {
	case 6:
		switch {
		case f.established():
			return r.timeouts.TCPEstablished
		case r.timeouts.TCPClosing > 0 && (f.reset || f.finished[natengine.Outbound] || f.finished[natengine.Inbound]):
			return r.timeouts.TCPClosing
		}
		return r.timeouts.TCPTransitory
	case 17:
		return r.timeouts.UDP
	case 1, 58:
		return r.timeouts.ICMP
	}
	return r.timeouts.Generic
}

func (f *refFlow) established() bool {
	both := func(m map[natengine.Direction]bool) bool { return m[natengine.Outbound] && m[natengine.Inbound] }
	return both(f.acked) && !both(f.finished) && !f.reset
}

// end returns our end of the flow, as packets of direction dir match it.
func (f *refFlow) end(dir natengine.Direction) netip.AddrPort {
	if dir == natengine.Inbound {
		return f.mapped
	}
	return f.local
}

// find returns the flow whose tuple packets of direction dir match, or nil.
func (r *reference) find(peer string, proto uint8, query refQuery, dir natengine.Direction, near, remote netip.AddrPort, now time.Duration) *refFlow {
	for _, f := range r.flows {
		if f.peer == peer && f.proto == proto && f.query == query && f.end(dir) == near && f.remote == remote && r.alive(f, now) {
			return f
		}
	}
	return nil
}

// pass forwards a packet of a flow and updates the flow's state.
func (r *reference) pass(f *refFlow, dir natengine.Direction, p packettest.Packet, now time.Duration) outcome {
	if f.proto == 6 {
		syn, ack, rst, fin := p.Flags&packettest.SYN != 0, p.Flags&packettest.ACK != 0, p.Flags&packettest.RST != 0, p.Flags&packettest.FIN != 0
		if !rst || f.established() { // a RST starts the transitory timeout, and later RSTs do not prolong it
			f.seen = now
		}
		switch {
		case rst:
			f.reset = true
		case syn && !ack && !f.established():
			f.acked, f.finished, f.reset = map[natengine.Direction]bool{}, map[natengine.Direction]bool{}, false
		default:
			f.reset = false
			f.acked[dir] = f.acked[dir] || ack
			f.finished[dir] = f.finished[dir] || fin
		}
	} else {
		f.seen = now
		f.acked[dir] = true
	}
	f.settled = f.settled || f.established()
	end := f.end(natengine.Inbound + natengine.Outbound - dir)
	o := outcome{action: natengine.Forward, near: end.Addr(), port: int(end.Port())}
	if dir == natengine.Inbound && r.isSelf(end.Addr()) {
		o.action = natengine.Deliver
	}
	return o
}

// open adds the flow that a packet of direction dir opens, if there is room. If another flow has
// the tuple of the new flow's replies, open returns clash.
func (r *reference) open(f *refFlow, dir natengine.Direction, clash natengine.Drop, now time.Duration) natengine.Drop {
	tuples := []natengine.Direction{dir}
	if clash != natengine.DropNone {
		tuples = append(tuples, natengine.Inbound+natengine.Outbound-dir)
	}
	for _, by := range tuples {
		for _, g := range slices.Clone(r.flows) {
			switch {
			case g.peer != f.peer || g.proto != f.proto || g.query != f.query || g.remote != f.remote || g.end(by) != f.end(by):
			case r.alive(g, now):
				return clash
			default:
				r.end(g)
			}
		}
	}
	if r.room != nil {
		if drop := r.room(f); drop != natengine.DropNone {
			return drop
		}
	}
	f.acked, f.finished = map[natengine.Direction]bool{}, map[natengine.Direction]bool{}
	r.flows = append(r.flows, f)
	return natengine.DropNone
}

// end removes a flow that has expired.
func (r *reference) end(f *refFlow) {
	r.flows = slices.DeleteFunc(r.flows, func(g *refFlow) bool { return g == f })
	if r.expired != nil {
		r.expired(f)
	}
}

// sweep removes all expired flows, so that their ports become free.
func (r *reference) sweep(now time.Duration) {
	for _, f := range slices.Clone(r.flows) {
		if !r.alive(f, now) {
			r.end(f)
		}
	}
}

func cannotBegin(p packettest.Packet) natengine.Drop {
	switch {
	case p.Proto == 6 && p.Flags&packettest.RST != 0:
		return natengine.DropNoFlow
	case isICMP(p) && !isQuery(p):
		return natengine.DropProtocol
	case isICMP(p) && !isRequest(p):
		return natengine.DropNoFlow
	}
	return natengine.DropNone
}

func (r *reference) outbound(p packettest.Packet, now time.Duration) outcome {
	peer, _, ok := r.peerOf(p.Dst)
	switch {
	case !ok:
		return dropped(natengine.DropNoPeer)
	case impossible(p.Src):
		return dropped(natengine.DropSource)
	case offLimits(p.Dst):
		return dropped(natengine.DropDestination)
	case isError(p):
		return r.outboundError(peer, p, now)
	}
	m, haveMap := networkOf(peer, p.Src)
	near, remote := tuple(p, natengine.Outbound)
	endpoint := slices.ContainsFunc(peer.Endpoints, func(e natengine.Endpoint) bool { return e.Real == p.Src })
	pod := haveMap && isPod(p.Src, m.From) && !r.isSelf(p.Src)
	if pod && !endpoint && !m.From.IsSingleIP() {
		return outcome{action: natengine.Forward, near: moved(p.Src, m.To), port: -1}
	}
	if f := r.find(peer.ID, p.Proto, queryOf(p, natengine.Outbound), natengine.Outbound, near, remote, now); f != nil {
		return r.pass(f, natengine.Outbound, p, now)
	}
	if pod {
		seen := moved(p.Src, m.To)
		if m.From.IsSingleIP() && r.find(peer.ID, p.Proto, queryOf(p, natengine.Outbound), natengine.Inbound, netip.AddrPortFrom(seen, near.Port()), remote, now) != nil {
			return dropped(natengine.DropFlowClash)
		}
		return outcome{action: natengine.Forward, near: seen, port: -1}
	}
	if !haveMap {
		return dropped(natengine.DropSource)
	}
	if d := cannotBegin(p); d != natengine.DropNone {
		return dropped(d)
	}
	if endpoint && p.Proto == 6 && (p.Flags&packettest.SYN == 0 || p.Flags&packettest.ACK != 0) {
		return dropped(natengine.DropNoFlow)
	}
	f := &refFlow{peer: peer.ID, proto: p.Proto, query: queryOf(p, natengine.Outbound), local: near, mapped: netip.AddrPortFrom(m.To.Addr(), 0), remote: remote, seen: now}
	clash := natengine.DropNone
	if !hasPorts(p) { // only the remote address distinguishes the flows
		clash = natengine.DropProtocol
	}
	if d := r.open(f, natengine.Outbound, clash, now); d != natengine.DropNone {
		return dropped(d)
	}
	o := r.pass(f, natengine.Outbound, p, now)
	if hasPorts(p) {
		o.opened = f
	}
	return o
}

// learn records the port that the engine chose for a new NAPT flow. It returns an error if the
// port is not allowed.
func (r *reference) learn(f *refFlow, port uint16) error {
	f.mapped = netip.AddrPortFrom(f.mapped.Addr(), port)
	want := f.local.Port()
	icmp := f.proto == 1 || f.proto == 58
	taken := false
	for _, g := range slices.Concat(r.flows, r.justEvicted) {
		gone := slices.Contains(r.justEvicted, g) // the port of an evicted flow may be in use or free
		if g == f || g.endpoint || g.peer != f.peer || g.proto != f.proto || g.mapped.Addr() != f.mapped.Addr() {
			continue
		}
		if g.local == f.local && g.mapped != f.mapped && !gone {
			return fmt.Errorf("%v is at %v towards %v and at %v towards %v: mapping depends on the endpoint", f.local, g.mapped, g.remote, f.mapped, f.remote)
		}
		if g.local == f.local && g.mapped == f.mapped {
			return nil // the port of an existing mapping is correct, because the mapping is endpoint-independent
		}
		if g.mapped == f.mapped && !gone {
			return fmt.Errorf("%v and %v share %v", f.local, g.local, g.mapped)
		}
		if g.mapped.Port() == want {
			taken = true
		}
	}
	switch {
	case !r.random && !taken && port != want && (want != 0 || icmp):
		return fmt.Errorf("%v got port %d although its own was free", f.local, port)
	case !icmp && (want < 1024) != (port < 1024): // no test uses up a whole range
		return fmt.Errorf("%v got port %d of the other range", f.local, port)
	case !icmp && want%2 != port%2:
		return fmt.Errorf("%v got port %d of the other parity", f.local, port)
	case !icmp && port == 0:
		return errors.New("port 0 given out")
	}
	return nil
}

func (r *reference) inbound(p packettest.Packet, now time.Duration) outcome {
	peer, pods, ok := r.peerOf(p.Src)
	switch {
	case !ok:
		return dropped(natengine.DropNoPeer)
	case offLimits(p.Src):
		return dropped(natengine.DropSource)
	case isError(p):
		return r.inboundError(peer, p, now)
	}
	m, haveMap := networkOf(peer, p.Dst)
	near, remote := tuple(p, natengine.Inbound)
	pod := haveMap && isPod(p.Dst, m.To)
	if pod && (offLimits(moved(p.Dst, m.From)) || r.isSelf(moved(p.Dst, m.From))) {
		return dropped(natengine.DropDestination)
	}
	if pod && !m.From.IsSingleIP() {
		r.leave(peer, p, moved(p.Dst, m.From), now)
		return outcome{action: natengine.Forward, near: moved(p.Dst, m.From), port: -1}
	}
	real := netip.Addr{}
	for _, e := range peer.Endpoints {
		if e.Seen == p.Dst {
			real = e.Real
		}
	}
	napt := haveMap && p.Dst == m.To.Addr()
	switch {
	case real.IsValid(), napt:
	case within(p.Dst, peer.External):
		return dropped(natengine.DropNoMapping)
	default:
		return dropped(natengine.DropDestination)
	}
	if f := r.find(peer.ID, p.Proto, queryOf(p, natengine.Inbound), natengine.Inbound, near, remote, now); f != nil {
		return r.pass(f, natengine.Inbound, p, now)
	}
	if pod {
		r.leave(peer, p, moved(p.Dst, m.From), now)
		return outcome{action: natengine.Forward, near: moved(p.Dst, m.From), port: -1}
	}
	if !real.IsValid() || !pods {
		return dropped(natengine.DropNoFlow)
	}
	if d := cannotBegin(p); d != natengine.DropNone {
		return dropped(d)
	}
	f := &refFlow{peer: peer.ID, endpoint: true, proto: p.Proto, query: queryOf(p, natengine.Inbound), mapped: near, remote: remote, seen: now}
	f.local = netip.AddrPortFrom(real, near.Port())
	if d := r.open(f, natengine.Inbound, natengine.DropFlowClash, now); d != natengine.DropNone {
		return dropped(d)
	}
	return r.pass(f, natengine.Inbound, p, now)
}

// leave ends the flow of a client to the mapped address of pod, if the client's packet p to the
// pod's own address has the same ports.
func (r *reference) leave(peer natengine.Peer, p packettest.Packet, pod netip.Addr, now time.Duration) {
	near, remote := tuple(p, natengine.Inbound)
	f := r.find(peer.ID, p.Proto, queryOf(p, natengine.Inbound), natengine.Outbound, netip.AddrPortFrom(pod, near.Port()), remote, now)
	switch {
	case f == nil, cannotBegin(p) != natengine.DropNone:
	case p.Proto == 6 && f.established() && p.Flags&(packettest.SYN|packettest.ACK) != packettest.SYN:
	default:
		r.end(f)
	}
}

// quotedTuple returns the tuple of a quoted packet, as packets of direction dir match it. ok
// is false if the quote ends before the ports.
func quotedTuple(q packettest.Packet, dir natengine.Direction) (near, remote netip.AddrPort, ok bool) {
	switch {
	case q.FragmentOffset > 0:
		return near, remote, false
	case isICMP(q):
		ok = isQuery(q) && len(q.Transport) >= 6
	case q.Proto == 6 || q.Proto == 17:
		ok = len(q.Transport) >= 4
	default:
		ok = true
	}
	near, remote = tuple(q, dir)
	return near, remote, ok
}

func (r *reference) readQuote(p packettest.Packet) (q packettest.Packet, d natengine.Drop) {
	if p.Type == 5 && p.Src.Is4() || p.More {
		return q, natengine.DropICMPError
	}
	q, err := packettest.DecodeQuote(p.Data)
	if isICMP(q) && len(q.Transport) > 0 {
		q.Type = q.Transport[0] // DecodeQuote requires the whole header
	}
	if err != nil || len(q.Transport) > 0 && isError(q) || q.Src.Is4() != p.Src.Is4() {
		return q, natengine.DropICMPError
	}
	return q, natengine.DropNone
}

// inboundError returns the outcome for an error about a packet that we sent.
func (r *reference) inboundError(peer natengine.Peer, p packettest.Packet, now time.Duration) outcome {
	q, d := r.readQuote(p)
	if d != natengine.DropNone {
		return dropped(d)
	}
	if of, _, ok := r.peerOf(q.Dst); q.Src != p.Dst || !ok || of.ID != peer.ID {
		return dropped(natengine.DropICMPError)
	}
	m, haveMap := networkOf(peer, p.Dst)
	pod := haveMap && isPod(q.Src, m.To)
	if !pod || m.From.IsSingleIP() {
		near, remote, ok := quotedTuple(q, natengine.Outbound)
		if f := r.find(peer.ID, q.Proto, queryOf(q, natengine.Outbound), natengine.Inbound, near, remote, now); ok && f != nil {
			o := outcome{action: natengine.Forward, near: f.local.Addr(), port: -1, quoted: f.local.Addr(), quotedPort: int(f.local.Port())}
			if r.isSelf(f.local.Addr()) {
				o.action = natengine.Deliver
			}
			return o
		}
	}
	if pod {
		a := moved(q.Src, m.From)
		if offLimits(a) || r.isSelf(a) {
			return dropped(natengine.DropDestination)
		}
		return outcome{action: natengine.Forward, near: a, port: -1, quoted: a, quotedPort: -1}
	}
	seen := slices.ContainsFunc(peer.Endpoints, func(e natengine.Endpoint) bool { return e.Seen == q.Src })
	switch {
	case seen, haveMap && q.Src == m.To.Addr():
		return dropped(natengine.DropICMPError)
	case within(q.Src, peer.External):
		return dropped(natengine.DropNoMapping)
	}
	return dropped(natengine.DropDestination)
}

// outboundError returns the outcome for an error about a packet that the peer sent.
func (r *reference) outboundError(peer natengine.Peer, p packettest.Packet, now time.Duration) outcome {
	q, d := r.readQuote(p)
	if d != natengine.DropNone {
		return dropped(d)
	}
	if q.Src != p.Dst {
		return dropped(natengine.DropICMPError)
	}
	m, haveMap := networkOf(peer, q.Dst)
	endpoint := slices.ContainsFunc(peer.Endpoints, func(e natengine.Endpoint) bool { return e.Real == q.Dst })
	pod := haveMap && isPod(q.Dst, m.From)
	o := outcome{action: natengine.Forward, port: -1, quotedPort: -1}
	if !pod || endpoint || m.From.IsSingleIP() {
		near, remote, ok := quotedTuple(q, natengine.Inbound)
		if f := r.find(peer.ID, q.Proto, queryOf(q, natengine.Inbound), natengine.Outbound, near, remote, now); ok && f != nil {
			o.quoted, o.quotedPort = f.mapped.Addr(), int(f.mapped.Port())
		}
	}
	if !o.quoted.IsValid() {
		if !pod {
			return dropped(natengine.DropICMPError)
		}
		o.quoted = moved(q.Dst, m.To)
	}
	switch {
	case p.Src == q.Dst: // the destination host itself sent the error
		o.near = o.quoted
	case haveMap && isPod(p.Src, m.From) && !r.isSelf(p.Src):
		o.near = moved(p.Src, m.To)
	case haveMap:
		o.near = m.To.Addr()
	default:
		return dropped(natengine.DropSource)
	}
	return o
}

// judge compares the engine's result with the expected outcome. It checks the verdict and our end,
// and that nothing else has changed.
func (r *reference) judge(dir natengine.Direction, in, out []byte, v natengine.Verdict, now time.Duration) error {
	p := packettest.MustDecode(in)
	var want outcome
	if dir == natengine.Outbound {
		want = r.outbound(p, now)
	} else {
		want = r.inbound(p, now)
	}
	if v.Action != want.action || v.Drop != want.drop {
		return fmt.Errorf("engine says %v/%v, reference %v/%v", v.Action, v.Drop, want.action, want.drop)
	}
	if want.action == natengine.Discard {
		if !bytes.Equal(in, out) {
			return errors.New("a discarded packet was changed")
		}
		return nil
	}
	got, err := packettest.Decode(out)
	if err != nil {
		return err
	}
	if err := packettest.ValidChecksums()(got); err != nil {
		return err
	}
	end, far := tuple(got, dir)
	before, farBefore := tuple(p, dir)
	if far != farBefore {
		return fmt.Errorf("the remote end changed from %v to %v", farBefore, far)
	}
	if want.opened != nil {
		if err := r.learn(want.opened, end.Port()); err != nil {
			return err
		}
		want.port = int(end.Port())
	}
	if want.port == -1 || !hasPorts(p) {
		want.port = int(before.Port())
	}
	if have := netip.AddrPortFrom(want.near, uint16(want.port)); end != have {
		return fmt.Errorf("our end is %v, reference says %v", end, have)
	}
	if want.quoted.IsValid() {
		if err := want.judgeQuote(dir, p, got); err != nil {
			return err
		}
	}
	return unchanged(p, got, in, out, want.quoted.IsValid())
}

func (o outcome) judgeQuote(dir natengine.Direction, before, after packettest.Packet) error {
	was, err := packettest.DecodeQuote(before.Data)
	if err != nil {
		return err
	}
	q, err := packettest.DecodeQuote(after.Data)
	if err != nil {
		return err
	}
	back := natengine.Inbound + natengine.Outbound - dir // the quoted packet went the other way
	oldEnd, oldFar := tuple(was, back)
	end, far := tuple(q, back)
	if far != oldFar {
		return fmt.Errorf("the remote end of the quote changed from %v to %v", oldFar, far)
	}
	port := uint16(o.quotedPort)
	if o.quotedPort == -1 || !hasPorts(was) {
		port = oldEnd.Port()
	}
	if want := netip.AddrPortFrom(o.quoted, port); end != want {
		return fmt.Errorf("our end in the quote is %v, reference says %v", end, want)
	}
	return packettest.HeaderChecksum()(q)
}

// unchanged checks that only addresses, ports and checksums have changed.
func unchanged(p, got packettest.Packet, in, out []byte, isError bool) error {
	if len(in) != len(out) {
		return fmt.Errorf("length changed from %d to %d", len(in), len(out))
	}
	mayChange := map[int]bool{}
	span := func(at, n int) {
		for i := range n {
			mayChange[at+i] = true
		}
	}
	header := func(at int, p packettest.Packet) {
		if p.Src.Is4() {
			span(at+10, 10) // checksum and addresses
		} else {
			span(at+8, 32)
		}
		t := at + p.TransportOffset
		if p.FragmentOffset > 0 {
			return
		}
		switch {
		case p.Proto == 6:
			span(t, 4)
			span(t+16, 2)
		case p.Proto == 17:
			span(t, 4)
			span(t+6, 2)
		case isICMP(p):
			span(t+2, 2)
			if isQuery(p) {
				span(t+4, 2)
			}
		}
	}
	header(0, p)
	if isError {
		q, err := packettest.DecodeQuote(p.Data)
		if err != nil {
			return err
		}
		header(len(in)-len(p.Data), q)
	}
	for i := range in {
		if in[i] != out[i] && !mayChange[i] {
			return fmt.Errorf("octet %d changed", i)
		}
	}
	return nil
}
