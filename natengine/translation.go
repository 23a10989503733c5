package natengine

import "github.com/isthmus-net/isthmus/packet"

// translation holds the state of one packet on the general path. It lives on the stack of
// outbound or inbound.
type translation struct {
	e    *Engine
	v    *packet.View
	r    *remote // the entry for far; nil if no peer has that address
	dir  Direction
	now  tick
	near addr   // our end of the packet before translation
	far  addr   // the peer's end
	tr   *Trace // the trace to fill, or nil; with a trace, v is a copy, and only v and tr may change
}

// outbound is the general path of a packet to the tunnel. r is the remote of its destination, or
// nil. If tr is not nil, v must be a copy, and outbound changes only tr and v.
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

// flowOut finds or opens the flow of an outbound packet and returns its new source. podSeen is the
// address to which the prefix map translates the source, or zero if the source is not a pod. A
// reply of a mapped endpoint gets the address that the peer used. A packet of a pod without a flow
// gets podSeen. Every other packet gets the NAPT address.
func (c *translation) flowOut(m *podMap, podSeen addr) (to addr, port int, drop Drop) {
	k, ok := c.key()
	if ok {
		if f, ok := c.find(&k); ok {
			return c.follow(&f)
		}
	}
	if c.r.rule.guardsGateway(c.v.Proto(), c.near, c.far) {
		return addr{}, samePort, DropLocalSource
	}
	if podSeen != (addr{}) {
		// If the pod's address is also the NAPT address, a NAPT flow may already have this
		// tuple.
		if m.single && ok {
			back := keyOf(Inbound, podSeen, c.far, c.v.Proto(), k.nearPort(Outbound), k.remotePort())
			if f, ok := c.r.peer.flows.find(Inbound, &back); ok && !f.expired(&c.e.lifetimes, c.now) {
				return addr{}, samePort, DropFlowClash
			}
		}
		c.tr.prefixMap(c.r.rule, c.near.family())
		return podSeen, samePort, DropNone
	}
	if !m.ok {
		return addr{}, samePort, DropSource // the peer reaches no pods of ours in this family, so there is no NAPT address
	}
	if c.midConnection() && c.r.rule.isTarget(c.near) {
		return addr{}, samePort, DropNoFlow // the flow no longer exists; the client would not accept the NAPT address as the source
	}
	return c.begin(naptFlow, &k, m.natAddr())
}

// midConnection reports whether the packet is a TCP segment other than the SYN that opens a
// connection.
func (c *translation) midConnection() bool {
	return c.v.Proto() == packet.TCP && c.v.TCPFlags()&(packet.TCPSyn|packet.TCPAck) != packet.TCPSyn
}

// inbound is the general path of a packet from the tunnel. r is the remote of its source, or nil.
// tr has the same meaning as for outbound.
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
		c.endReplaced(local)
		tr.prefixMapIn(r.rule, c.near.family())
		return c.pass(local)
	}
	return c.place(c.flowIn(local, endpoint))
}

// reach finds the target of an inbound packet: a pod to which the prefix map leads, or a mapped
// endpoint. If the destination is the NAPT address, it returns no target and no drop, because such
// a packet needs a flow.
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

// offLimits reports whether the address a is forbidden as the result of a prefix map. The
// in-process endpoint is reachable only as a mapped endpoint.
func (e *Engine) offLimits(a addr, is4 bool) bool {
	return unreachable(a, is4) || a == e.self[a.family()]
}

// flowIn finds or opens the flow of an inbound packet and returns its new destination. pod and
// endpoint are the results of reach, or zero. Packets to a pod need no flow. Only the pods of the
// peer may open a flow to an endpoint (docs/liqo-v0.md, section 7.3).
func (c *translation) flowIn(pod, endpoint addr) (to addr, port int, drop Drop) {
	k, ok := c.key()
	if ok {
		if f, ok := c.find(&k); ok {
			return c.follow(&f)
		}
	}
	if pod != (addr{}) {
		c.endReplaced(pod)
		c.tr.prefixMapIn(c.r.rule, c.near.family())
		return pod, samePort, DropNone
	}
	if endpoint == (addr{}) || !c.r.pods {
		return addr{}, samePort, DropNoFlow
	}
	return c.begin(endpointFlow, &k, endpoint)
}

// A client of the peer may reach the pod by the prefix map, and also as a mapped endpoint. At the
// pod, packets to both addresses have the same tuple, so an answer of the pod does not show which
// address the client used. Therefore an answer gets the address that the client used last as its
// source. endReplaced ends a flow to the mapped endpoint if its client now reaches the pod by the
// prefix map, from the same port. Only a packet that may open a flow ends another flow. A TCP
// segment after the first SYN ends only a half-open flow, because it may be a late segment of an
// earlier connection.
func (c *translation) endReplaced(pod addr) {
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

// key returns the key of the packet. ok is false for an ICMP message other than a query, because it
// has no identifier and matches no flow.
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

// find returns the flow with key k, unless it has expired.
func (c *translation) find(k *key) (match, bool) {
	f, ok := c.r.peer.flows.find(c.dir, k)
	return f, ok && !f.expired(&c.e.lifetimes, c.now)
}

// follow records the packet in flow f and returns the new address and port of our end.
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

// begin opens a flow for the packet, and returns the address and port that replace our end. The
// address is other. If the packet may not open a flow, begin returns the reason to drop the packet.
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
// it. If the packet is an outbound first fragment, place also stores the decision for the other
// fragments of the datagram.
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

// refuse discards the packet. It counts and reports the drop, unless the packet is only
// traced.
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

// forward rewrites our end of the packet to a new address and port.
func (c *translation) forward(to addr, port int) Verdict {
	return c.e.forward(c.v, c.r, c.dir, to, port)
}

// pass rewrites our end of a packet that needs no flow.
func (c *translation) pass(to addr) Verdict {
	verdict := c.forward(to, samePort)
	if c.tr == nil && c.r.mss != 0 && c.v.TCPFlags()&packet.TCPSyn != 0 {
		c.e.connects(c.v, c.r, c.dir, c.near) // clamps the MSS again, to the same value
	}
	return verdict
}

// samePort is the port argument that leaves the port unchanged.
const samePort = -1

// forward rewrites our end of v to a new address and port, and clamps the MSS of a SYN.
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

// setPort writes the port of our end, or the identifier of an ICMP query.
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

// mssFor returns the MSS bound for a family: the IPv6 header is 20 octets longer than that of
// IPv4.
func mssFor(mss uint16, is4 bool) uint16 {
	if is4 {
		return mss
	}
	return mss - 20
}

// linkScope reports whether v is an ICMPv6 message that never leaves its link: multicast listener
// or neighbour discovery (RFC 4890, section 4.3.3). The body of such a message also contains
// addresses, which the engine does not translate.
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

// isTarget reports whether a is the real address of a mapped endpoint.
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
