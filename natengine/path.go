package natengine

import (
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Outbound judges a packet on its way to the tunnel and, when it is to be forwarded, rewrites it in place: the source of
// ours becomes what the peer knows it by. The packet is untouched when it is discarded. now comes from a monotonic clock,
// read once per batch.
//
// What stands here is the common case, a pod that is mapped 1:1 over IPv4, and that over IPv6 is outbound6; everything
// else goes to outbound, which would do the same.
func (e *Engine) Outbound(v *packet.View, now time.Duration) Verdict {
	t := e.rules.Load()
	if !v.Is4() {
		return e.outbound6(v, t, now)
	}
	r := t.remotes4.lookup(v.Dst4())
	if r != nil {
		src, m := v.Src4(), &r.out
		if m.maps(src) && !v.IsICMPError() {
			if m.from != m.to {
				v.SetSrc4(src&^m.mask | m.to)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(r.mss)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Outbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
			return verdict
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// Inbound judges a packet that came out of the tunnel and rewrites its destination, which the peer knows, to the address
// that it has here. See Outbound.
func (e *Engine) Inbound(v *packet.View, now time.Duration) Verdict {
	t := e.rules.Load()
	if !v.Is4() {
		return e.inbound6(v, t, now)
	}
	r := t.remotes4.lookup(v.Src4())
	if r != nil {
		dst, m := v.Dst4(), &r.in
		if m.maps(dst) && !v.IsICMPError() {
			if m.from != m.to {
				v.SetDst4(dst&^m.mask | m.to)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(r.mss)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Inbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// maps reports whether a is mapped: in the prefix, and not its network address, which belongs to NAPT.
func (m *map4) maps(a uint32) bool { return a&m.mask == m.from && a != m.from }

// known is the shortcut for a whole TCP or UDP packet of a flow that is there: the rules let it be opened, and
// would have ended it since if they did not permit it any more, so that there is nothing else to ask but where each
// address has to be asked for.
func (e *Engine) known(v *packet.View, r *remote, dir Direction, src, dst addr, now tick) (Verdict, bool) {
	if _, _, _, fragment := v.Fragment(); fragment || !v.HasPorts() || r.guarded {
		return Verdict{}, false
	}
	// Key and match are filled in place: copying a struct whose words were just stored stalls until they have left the
	// store buffer, which takes longer than a hash.
	var k key
	nearPort, farPort := v.SrcPort(), v.DstPort()
	if dir == Outbound {
		k.near, k.remote = src, dst
	} else {
		k.near, k.remote = dst, src
		nearPort, farPort = farPort, nearPort
	}
	k.word = wordOf(dir, v.Proto(), nearPort, farPort)
	var f match
	if !r.peer.flows.search(dir, &k, &f) || f.expired(&e.lifetimes, now) {
		return Verdict{}, false
	}
	r.peer.flows.touch(&f, v, dir, now)
	port := samePort
	if p := f.otherPort(dir); p != nearPort {
		port = int(p)
	}
	return e.forward(v, r, dir, f.other, port), true
}

// outbound is the general path, r the remote of the destination or nil. tr is nil, or a trace: then v is a copy and nothing else may change.
func (e *Engine) outbound(v *packet.View, r *remote, now tick, tr *Trace) Verdict {
	src, dst := source(v), destination(v)
	switch {
	case r == nil:
		return e.refuse(nil, Outbound, DropNoPeer, tr)
	case martian(src, v.Is4()):
		return e.refuse(r, Outbound, DropSource, tr)
	case r.rule.guarded && unreachable(dst, v.Is4()):
		return e.refuse(r, Outbound, DropDestination, tr)
	case v.IsICMPError():
		return e.outboundError(v, r, src, dst, now, tr)
	case linkScope(v):
		return e.refuse(r, Outbound, DropProtocol, tr)
	}
	m := &r.rule.pods[src.family()]
	seen, pod := m.mapOut(src)
	pod = pod && src != e.self[src.family()]
	if pod && !m.single && !r.rule.isEndpoint(src) {
		tr.prefixMap(r.rule, src.family())
		return e.forward(v, r, Outbound, seen, samePort)
	}
	if _, _, _, is := v.Fragment(); is {
		if verdict, done := e.fragment(v, r, Outbound, now, tr); done {
			return verdict
		}
	}
	to, port, drop := e.flowOut(v, r, m, src, dst, seen, pod, now, tr)
	return e.place(v, r, Outbound, to, port, drop, tr)
}

// flowOut finds or opens the flow of an outbound packet: the reply of a mapped endpoint leaves as the peer addressed it,
// a pod without a flow by the prefix map, everything else from the NAPT address.
func (e *Engine) flowOut(v *packet.View, r *remote, m *podMap, src, dst, seen addr, pod bool, now tick, tr *Trace) (addr, int, Drop) {
	flows := &r.peer.flows
	k := packetKey(v, Outbound, src, dst)
	if f, ok := flows.find(Outbound, &k); ok && !f.expired(&e.lifetimes, now) {
		tr.known(&f)
		if tr == nil {
			flows.touch(&f, v, Outbound, now)
		}
		return f.other, int(f.otherPort(Outbound)), DropNone
	}
	if pod {
		// Where the pod's own address is the NAPT address, a flow may have taken this very tuple.
		if m.single {
			back := keyOf(Inbound, seen, dst, v.Proto(), k.nearPort(Outbound), k.remotePort())
			if f, ok := flows.find(Inbound, &back); ok && !f.expired(&e.lifetimes, now) {
				return addr{}, samePort, DropFlowClash
			}
		}
		tr.prefixMap(r.rule, src.family())
		return seen, samePort, DropNone
	}
	if !m.ok {
		return addr{}, samePort, DropSource // no address of this family under which the peer would know us
	}
	if drop := begins(v); drop != DropNone {
		return addr{}, samePort, drop
	}
	f, drop := e.open(r.rule, naptFlow, Outbound, &k, m.natAddr(), now, tr)
	if drop != DropNone {
		return addr{}, samePort, drop
	}
	if tr == nil {
		flows.touch(&f, v, Outbound, now)
	}
	return f.other, int(f.otherPort(Outbound)), DropNone
}

// inbound is the general path; see outbound.
func (e *Engine) inbound(v *packet.View, r *remote, now tick, tr *Trace) Verdict {
	src, dst := source(v), destination(v)
	switch {
	case r == nil:
		return e.refuse(nil, Inbound, DropNoPeer, tr)
	case r.rule.guarded && unreachable(src, v.Is4()):
		return e.refuse(r, Inbound, DropSource, tr)
	case v.IsICMPError():
		return e.inboundError(v, r, dst, now, tr)
	case linkScope(v):
		return e.refuse(r, Inbound, DropProtocol, tr)
	}
	m := &r.rule.pods[dst.family()]
	local, pod := m.mapIn(dst)
	if pod && e.offLimits(local, v.Is4()) {
		return e.refuse(r, Inbound, DropDestination, tr)
	}
	if pod && !m.single {
		tr.prefixMapIn(r.rule, dst.family())
		return e.forward(v, r, Inbound, local, samePort)
	}
	endpoint, mapped := r.rule.seen[dst]
	switch {
	case mapped, m.ok && dst == m.natAddr():
	case r.rule.isExternal(dst):
		return e.refuse(r, Inbound, DropNoMapping, tr)
	default:
		return e.refuse(r, Inbound, DropDestination, tr)
	}
	if _, _, _, is := v.Fragment(); is {
		if verdict, done := e.fragment(v, r, Inbound, now, tr); done {
			return verdict
		}
	}
	if !mapped {
		endpoint = addr{}
	}
	to, port, drop := e.flowIn(v, r, src, dst, endpoint, local, pod, now, tr)
	return e.place(v, r, Inbound, to, port, drop, tr)
}

// offLimits reports whether a prefix map must not lead to a: the in-process endpoint is reached as a mapped one only.
func (e *Engine) offLimits(a addr, is4 bool) bool {
	return unreachable(a, is4) || a == e.self[a.family()]
}

// flowIn finds the flow of an inbound packet to the NAPT address or to a mapped one, or opens one to a mapped endpoint,
// which only the pods of the peer may do (facts 7.3).
func (e *Engine) flowIn(v *packet.View, r *remote, src, dst, endpoint, local addr, pod bool, now tick, tr *Trace) (addr, int, Drop) {
	k := packetKey(v, Inbound, dst, src)
	if f, ok := r.peer.flows.find(Inbound, &k); ok && !f.expired(&e.lifetimes, now) {
		if f.kind() == naptFlow && isRequest(v) {
			return addr{}, samePort, DropNoFlow // an echo request is no answer to one
		}
		tr.known(&f)
		if tr == nil {
			r.peer.flows.touch(&f, v, Inbound, now)
		}
		return f.other, int(f.otherPort(Inbound)), DropNone
	}
	if pod { // the prefix is this one address
		tr.prefixMapIn(r.rule, dst.family())
		return local, samePort, DropNone
	}
	if endpoint == (addr{}) || !r.pods {
		return addr{}, samePort, DropNoFlow
	}
	if drop := begins(v); drop != DropNone {
		return addr{}, samePort, drop
	}
	f, drop := e.open(r.rule, endpointFlow, Inbound, &k, endpoint, now, tr)
	if drop != DropNone {
		return addr{}, samePort, drop
	}
	if tr == nil {
		r.peer.flows.touch(&f, v, Inbound, now)
	}
	return f.other, int(f.otherPort(Inbound)), DropNone
}

// place ends the general path: it rewrites the packet to the address and port that were found, or refuses it, and tells
// the other fragments of the same datagram.
func (e *Engine) place(v *packet.View, r *remote, dir Direction, to addr, port int, drop Drop, tr *Trace) Verdict {
	var released *[][]byte
	if _, _, _, is := v.Fragment(); is && tr == nil {
		released, drop = e.firstFragment(v, r, dir, to, drop)
	}
	if drop != DropNone {
		return e.refuse(r, dir, drop, tr)
	}
	verdict := e.forward(v, r, dir, to, port)
	verdict.released = released
	return verdict
}

// samePort leaves the port as it is.
const samePort = -1

// forward rewrites our end of the packet.
func (e *Engine) forward(v *packet.View, r *remote, dir Direction, to addr, port int) Verdict {
	if v.Is4() {
		if dir == Outbound {
			v.SetSrc4(uint32(to.lo))
		} else {
			v.SetDst4(uint32(to.lo))
		}
	} else if dir == Outbound {
		v.SetSrc6(to.hi, to.lo)
	} else {
		v.SetDst6(to.hi, to.lo)
	}
	if port != samePort {
		setPort(v, dir, uint16(port))
	}
	if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
		v.ClampMSS(mssFor(r.mss, v.Is4()))
	}
	if dir == Inbound && to == e.self[to.family()] {
		return Verdict{Action: Deliver, Peer: r.peer}
	}
	return Verdict{Action: Forward, Peer: r.peer}
}

// setPort writes our port of a packet, or the identifier of an ICMP query.
func setPort(v *packet.View, dir Direction, port uint16) {
	switch {
	case !v.HasPorts():
		v.SetICMPID(port)
	case dir == Outbound:
		v.SetSrcPort(port)
	default:
		v.SetDstPort(port)
	}
}

// mssFor is the bound for a family: IPv6 has a header of 20 octets more.
func mssFor(mss uint16, is4 bool) uint16 {
	if is4 {
		return mss
	}
	return mss - 20
}

// linkScope reports ICMPv6 that never leaves a link: multicast listener and neighbour discovery (RFC 4890, section
// 4.3.3). Its addresses are in its body too, so it could only be forwarded half rewritten.
func linkScope(v *packet.View) bool {
	if v.Is4() || v.Proto() != packet.ICMPv6 {
		return false
	}
	t := v.ICMPType()
	return t >= 130 && t <= 137 || t >= 141 && t <= 143 || t >= 148 && t <= 149 || t >= 151 && t <= 153
}

func source(v *packet.View) addr {
	if v.Is4() {
		return addr4(v.Src4())
	}
	return source6(v)
}

func destination(v *packet.View) addr {
	if v.Is4() {
		return addr4(v.Dst4())
	}
	return destination6(v)
}

func (r *rule) isEndpoint(a addr) bool {
	if len(r.endpoints) == 0 {
		return false
	}
	_, ok := r.endpoints[a]
	return ok
}
