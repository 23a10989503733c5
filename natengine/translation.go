package natengine

import "github.com/isthmus-net/isthmus/packet"

// translation is the work on one packet of the general path. It lives on the stack of outbound or
// inbound.
type translation struct {
	e    *Engine
	v    *packet.View
	r    *remote // of far; nil when no peer has it
	dir  Direction
	now  tick
	near addr   // our end of the packet as it came
	far  addr   // the peer's end
	tr   *Trace // nil, or a trace: then v is a copy and nothing else may change
}

// outbound is the general path of a packet to the tunnel, r the remote of its destination or nil.
// With a trace v has to be a copy, and nothing else changes.
func (e *Engine) outbound(v *packet.View, r *remote, now tick, tr *Trace) Verdict {
	c := translation{e: e, v: v, r: r, dir: Outbound, now: now, near: source(v), far: destination(v), tr: tr}
	src := c.near
	switch {
	case r == nil:
		return c.refuse(DropNoPeer)
	case martian(src, v.Is4()):
		return c.refuse(DropSource)
	case r.rule.guarded && unreachable(c.far, v.Is4()):
		return c.refuse(DropDestination)
	case v.IsICMPError():
		return c.outboundError()
	case linkScope(v):
		return c.refuse(DropProtocol)
	}
	m := &r.rule.pods[src.family()]
	seen, pod := m.mapOut(src)
	pod = pod && src != e.self[src.family()]
	if pod && !m.single && !r.rule.isEndpoint(src) {
		tr.prefixMap(r.rule, src.family())
		return c.pass(seen)
	}
	if v.IsFragment() {
		if verdict, done := c.fragment(); done {
			return verdict
		}
	}
	if !pod {
		seen = addr{}
	}
	return c.place(c.flowOut(m, seen))
}

// flowOut finds or opens the flow of an outbound packet. The reply of a mapped endpoint leaves from
// the address that the peer used, a pod without a flow from seen, its address by the prefix map,
// and everything else from the NAPT address. seen is zero if the source is no pod.
func (c *translation) flowOut(m *podMap, seen addr) (to addr, port int, drop Drop) {
	k, ok := c.key()
	if ok {
		if f, ok := c.find(&k); ok {
			return c.follow(&f)
		}
	}
	if c.r.rule.keeps(c.v.Proto(), c.near, c.far) {
		return addr{}, samePort, DropLocalSource
	}
	if seen != (addr{}) {
		// Where the pod's own address is the NAPT address, a flow may have taken this very tuple.
		if m.single && ok {
			back := keyOf(Inbound, seen, c.far, c.v.Proto(), k.nearPort(Outbound), k.remotePort())
			if f, ok := c.r.peer.flows.find(Inbound, &back); ok && !f.expired(&c.e.lifetimes, c.now) {
				return addr{}, samePort, DropFlowClash
			}
		}
		c.tr.prefixMap(c.r.rule, c.near.family())
		return seen, samePort, DropNone
	}
	if !m.ok {
		return addr{}, samePort, DropSource // the peer has no address of this family for us
	}
	if c.midConnection() && c.r.rule.isTarget(c.near) {
		return addr{}, samePort, DropNoFlow // NAPT would change the source that the client knows
	}
	return c.begin(naptFlow, &k, m.natAddr())
}

// midConnection reports whether the packet is a TCP segment other than a SYN without ACK.
func (c *translation) midConnection() bool {
	return c.v.Proto() == packet.TCP && c.v.TCPFlags()&(packet.TCPSyn|packet.TCPAck) != packet.TCPSyn
}

// inbound is the general path of a packet out of the tunnel, r the remote of its source or nil; see
// outbound.
func (e *Engine) inbound(v *packet.View, r *remote, now tick, tr *Trace) Verdict {
	c := translation{e: e, v: v, r: r, dir: Inbound, now: now, near: destination(v), far: source(v), tr: tr}
	switch {
	case r == nil:
		return c.refuse(DropNoPeer)
	case r.rule.guarded && unreachable(c.far, v.Is4()):
		return c.refuse(DropSource)
	case v.IsFragment():
		return c.join()
	case v.IsICMPError():
		return c.inboundError()
	case linkScope(v):
		return c.refuse(DropProtocol)
	}
	local, pod, endpoint, drop := c.reach()
	if drop != DropNone {
		return c.refuse(drop)
	}
	if pod && !r.rule.pods[c.near.family()].single {
		c.turn(local)
		tr.prefixMapIn(r.rule, c.near.family())
		return c.pass(local)
	}
	return c.place(c.flowIn(local, endpoint))
}

// reach finds the target of an inbound packet: the pod by the prefix map, or the mapped endpoint.
// It finds neither at the NAPT address, which only flows can use.
func (c *translation) reach() (local addr, pod bool, endpoint addr, drop Drop) {
	r, dst := c.r.rule, c.near
	m := &r.pods[dst.family()]
	local, pod = m.mapIn(dst)
	endpoint, mapped := r.seen[dst]
	switch {
	case pod && c.e.offLimits(local, c.v.Is4()):
		drop = DropDestination
	case pod && !m.single, mapped, m.ok && dst == m.natAddr():
	case r.isExternal(dst):
		drop = DropNoMapping
	default:
		drop = DropDestination
	}
	return local, pod, endpoint, drop
}

// offLimits reports whether a prefix map must not lead to a. The in-process endpoint is reachable
// only as a mapped one.
func (e *Engine) offLimits(a addr, is4 bool) bool {
	return unreachable(a, is4) || a == e.self[a.family()]
}

// flowIn finds the flow of an inbound packet to the NAPT address or to a mapped one. pod is that of
// a prefix of one address, zero for other prefixes; it gets a packet without a flow. endpoint is
// zero where nothing is mapped; only the pods of the peer may open a flow to it (docs/liqo-v0.md,
// section 7.3).
func (c *translation) flowIn(pod, endpoint addr) (to addr, port int, drop Drop) {
	k, ok := c.key()
	if ok {
		if f, ok := c.find(&k); ok {
			return c.follow(&f)
		}
	}
	if pod != (addr{}) {
		c.turn(pod)
		c.tr.prefixMapIn(c.r.rule, c.near.family())
		return pod, samePort, DropNone
	}
	if endpoint == (addr{}) || !c.r.pods {
		return addr{}, samePort, DropNoFlow
	}
	return c.begin(endpointFlow, &k, endpoint)
}

// turn ends the flow of a client that has used a mapped address of a pod and now, from the same
// port, uses the pod's own one. To the pod both are one tuple, so its answer does not show which
// one it is for; it leaves from the address that the client used last. A packet that could open no
// flow ends none. Nor does a segment other than a SYN end the flow of an established connection: it
// is a late one of an earlier connection.
func (c *translation) turn(pod addr) {
	if c.tr != nil || !c.r.rule.isEndpoint(pod) || begins(c.v) != DropNone {
		return
	}
	k, _ := c.key()
	back := keyOf(Outbound, pod, c.far, c.v.Proto(), k.nearPort(Inbound), k.remotePort())
	t := &c.r.peer.flows
	f, ok := t.find(Outbound, &back)
	if !ok || f.expired(&c.e.lifetimes, c.now) || c.midConnection() && !halfOpen(f.word) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f, ok = t.find(Outbound, &back); ok {
		t.remove(f.index, FlowReplaced)
		t.expired.Add(1)
	}
}

// key returns the key of the packet. ok is false for an ICMP message that is no query: it has no
// identifier that could name a flow.
func (c *translation) key() (k key, ok bool) {
	v := c.v
	var nearPort, remotePort uint16
	switch classOf(v.Proto(), v.Is4()) {
	case icmpIDs:
		if !v.IsICMPQuery() {
			return key{}, false
		}
		nearPort, remotePort = v.ICMPID(), queryPort(v.ICMPType(), c.dir)
	case tcpPorts, udpPorts:
		nearPort, remotePort = v.SrcPort(), v.DstPort()
		if c.dir == Inbound {
			nearPort, remotePort = remotePort, nearPort
		}
	}
	return keyOf(c.dir, c.near, c.far, v.Proto(), nearPort, remotePort), true
}

// find returns the flow that the packet belongs to.
func (c *translation) find(k *key) (match, bool) {
	f, ok := c.r.peer.flows.find(c.dir, k)
	return f, ok && !f.expired(&c.e.lifetimes, c.now)
}

// follow records the packet in its flow and returns what our end becomes.
func (c *translation) follow(f *match) (to addr, port int, drop Drop) {
	c.tr.known(f)
	return c.touch(f)
}

func (c *translation) touch(f *match) (to addr, port int, drop Drop) {
	if c.tr == nil {
		c.r.peer.flows.touch(f, c.v, c.dir, c.now)
	}
	return f.other, int(f.otherPort(c.dir)), DropNone
}

// begin opens the flow of a packet that may open one; our end becomes other.
func (c *translation) begin(kind flowKind, k *key, other addr) (to addr, port int, drop Drop) {
	if drop := begins(c.v); drop != DropNone {
		return addr{}, samePort, drop
	}
	f, drop := c.open(kind, k, other)
	if drop != DropNone {
		return addr{}, samePort, drop
	}
	return c.touch(&f)
}

// place ends the general path: it rewrites the packet to the chosen address and port, or refuses
// it. Outbound, it passes the decision to the other fragments of the datagram.
func (c *translation) place(to addr, port int, drop Drop) Verdict {
	var released *[][]byte
	if c.tr == nil && c.v.IsFragment() {
		released, drop = c.firstFragment(to, drop)
	}
	if drop != DropNone {
		return c.refuse(drop)
	}
	verdict := c.forward(to, port)
	verdict.released = released
	return verdict
}

// refuse discards the packet and counts it, unless it is only traced.
func (c *translation) refuse(d Drop) Verdict {
	var p *PeerState
	if c.r != nil {
		p = c.r.peer
	}
	if c.tr == nil {
		c.e.Count(p, c.dir, d)
		c.e.refused(c.v, p, c.dir, d)
	}
	return Verdict{Drop: d, Peer: p}
}

// forward rewrites our end of the packet.
func (c *translation) forward(to addr, port int) Verdict {
	return c.e.forward(c.v, c.r, c.dir, to, port)
}

// pass rewrites our end of a packet that belongs to no flow.
func (c *translation) pass(to addr) Verdict {
	verdict := c.forward(to, samePort)
	if c.tr == nil && c.r.mss != 0 && c.v.TCPFlags()&packet.TCPSyn != 0 {
		c.e.connects(c.v, c.r, c.dir, c.near) // connects bounds the MSS again, to the same value
	}
	return verdict
}

// samePort leaves the port unchanged.
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

// linkScope reports ICMPv6 that never leaves a link: multicast listener and neighbour discovery
// (RFC 4890, section 4.3.3). Its body contains addresses too, which forwarding would not translate.
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

// isTarget reports whether the peer reaches a as a mapped endpoint.
func (r *rule) isTarget(a addr) bool {
	_, ok := r.targets[a]
	return ok
}

func source6(v *packet.View) addr {
	hi, lo := v.Src6()
	return addr{hi, lo}
}

func destination6(v *packet.View) addr {
	hi, lo := v.Dst6()
	return addr{hi, lo}
}
