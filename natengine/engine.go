package natengine

import (
	"hash/maphash"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Config sets the engine's bounds. The zero value means the defaults, which the package comment lists.
type Config struct {
	Self4, Self6       netip.Addr // the in-process endpoint; 169.254.0.1 (Liqo's tunnel address) and none
	MaxFlows           int        // over all peers
	MaxFlowsPerPeer    int        // 0: an equal share of MaxFlows for each peer
	MaxFragmentSets    int        // datagrams of which fragments are remembered, per peer and direction
	MaxFragmentBytes   int        // octets held, per peer and direction
	MaxFragmentsPerSet int        // fragments held of one datagram
	Timeouts           Timeouts
}

// Timeouts are how long a flow, or a held fragment, lasts without a packet. They are kept to about 0.13 s. Fragment is
// brought into 2-30 s (RFC 6146, section 3.4).
type Timeouts struct {
	UDP            time.Duration // RFC 4787, REQ-5
	TCPEstablished time.Duration // RFC 5382, REQ-5
	TCPTransitory  time.Duration // half-open, closed or reset; RFC 5382, REQ-5
	ICMP           time.Duration // RFC 5508, REQ-2
	Generic        time.Duration // other protocols
	Fragment       time.Duration
}

const (
	defaultMaxFlows           = 1 << 20
	defaultMaxFragmentSets    = 256
	defaultMaxFragmentBytes   = 1 << 20
	defaultMaxFragmentsPerSet = 64
)

func (c Config) withDefaults() Config {
	number := func(p *int, n int) {
		if *p <= 0 {
			*p = n
		}
	}
	period := func(p *time.Duration, d time.Duration) {
		if *p <= 0 {
			*p = d
		}
	}
	if !c.Self4.IsValid() {
		c.Self4 = netip.AddrFrom4([4]byte{169, 254, 0, 1})
	}
	number(&c.MaxFlows, defaultMaxFlows)
	c.MaxFlows = min(c.MaxFlows, 1<<30)
	number(&c.MaxFragmentSets, defaultMaxFragmentSets)
	number(&c.MaxFragmentBytes, defaultMaxFragmentBytes)
	number(&c.MaxFragmentsPerSet, defaultMaxFragmentsPerSet)
	period(&c.Timeouts.UDP, 5*time.Minute)
	period(&c.Timeouts.TCPEstablished, 2*time.Hour+4*time.Minute)
	period(&c.Timeouts.TCPTransitory, 4*time.Minute)
	period(&c.Timeouts.ICMP, time.Minute)
	period(&c.Timeouts.Generic, 5*time.Minute)
	period(&c.Timeouts.Fragment, 5*time.Second)
	c.Timeouts.Fragment = min(max(c.Timeouts.Fragment, 2*time.Second), 30*time.Second)
	return c
}

// Engine translates packets. Outbound and Inbound may be called from any number of goroutines, with each other and with
// all other methods. Time is what the caller says, from any epoch; no clock is read.
type Engine struct {
	rules     atomic.Pointer[ruleTable]
	config    Config
	lifetimes lifetimes
	self      [2]addr // by family; the zero addr is nobody's
	seed      maphash.Seed
	total     atomic.Int64 // flows of all peers
	swept     atomic.Uint32
	noPeer    [directions][numDrops]atomic.Uint64

	mu    sync.Mutex // SetPeers
	peers map[string]*PeerState
}

// New makes an engine without peers: it drops everything.
func New(c Config) *Engine {
	c = c.withDefaults()
	t := c.Timeouts
	e := &Engine{
		config: c,
		lifetimes: lifetimes{
			udp: ticks(t.UDP), established: ticks(t.TCPEstablished), transitory: ticks(t.TCPTransitory),
			icmp: ticks(t.ICMP), generic: ticks(t.Generic), fragment: ticks(t.Fragment),
		},
		seed:  maphash.MakeSeed(),
		peers: map[string]*PeerState{},
	}
	e.self[0] = addrOf(c.Self4)
	if c.Self6.IsValid() {
		e.self[1] = addrOf(c.Self6)
	}
	empty, _ := compile(nil, e.self, nil)
	e.rules.Store(empty)
	return e
}

// SetPeers replaces all rules by one atomic swap: a packet sees the old rules or the new ones. On a contradiction
// (networks of two peers that overlap, masks of different length, an address mapped twice) it changes nothing and returns
// an error that names every peer and rule at fault. Flows that the new rules would not let be opened end here; the others
// stay, with their ports. peers is copied.
func (e *Engine) SetPeers(peers []Peer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	states := make(map[string]*PeerState, len(peers))
	table, err := compile(peers, e.self, func(id string) *PeerState {
		p := e.peers[id]
		if p == nil {
			p = newPeerState(id, e.seed, &e.total)
		}
		states[id] = p
		return p
	})
	if err != nil {
		return err
	}
	quota := e.config.MaxFlowsPerPeer
	if quota <= 0 {
		quota = e.config.MaxFlows / max(len(peers), 1)
	}
	for _, r := range table.rules {
		r.peer.quota.Store(int64(max(quota, 1)))
	}
	// First every PeerState learns its new rule, then the table is published: a packet under way with the old table
	// cannot open a flow that the new one does not permit.
	for id, p := range e.peers {
		if states[id] == nil {
			p.setRule(nil)
		}
	}
	for _, r := range table.rules {
		r.peer.setRule(r)
	}
	e.rules.Store(table)
	e.peers = states
	return nil
}

// setRule makes r the rule for new flows and ends those that it does not permit, all of them when r is nil.
func (p *PeerState) setRule(r *rule) {
	t := &p.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	old := p.rule
	p.rule = r
	if old == nil || r != nil && old.spec.equal(r.spec) {
		return
	}
	t.each(func(i uint32, f *entry, word uint64) {
		out, in := f.keyAt(Outbound), f.keyAt(Inbound)
		if r == nil || !r.permits(kindOf(word), out.near, in.near, out.remote) {
			t.remove(i)
			t.purged.Add(1)
		}
	})
	for dir := range p.fragments { // what was decided about fragments may not hold any more
		p.fragments[dir].clear()
	}
}

// Outbound judges a packet on its way to the tunnel and, when it is to be forwarded, rewrites it in place: the source of
// ours becomes what the peer knows it by. The packet is untouched when it is discarded. now comes from a monotonic clock,
// read once per batch.
//
// What stands here is the common case, a pod that is mapped 1:1 over IPv4; everything else goes to outbound, which would
// do the same.
func (e *Engine) Outbound(v *packet.View, now time.Duration) Verdict {
	t := e.rules.Load()
	if !v.Is4() {
		return e.outbound(v, t.remote(v.Dst()), tickOf(now), nil)
	}
	r := t.remotes4.lookup(v.Dst4())
	if r != nil {
		src, m := v.Src4(), &r.out
		if src&m.mask == m.from && src != m.from && !v.IsICMPError() {
			if m.from != m.to {
				v.SetSrc4(src&^m.mask | m.to)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(r.mss)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Outbound, tickOf(now)); ok {
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
		return e.inbound(v, t.remote(v.Src()), tickOf(now), nil)
	}
	r := t.remotes4.lookup(v.Src4())
	if r != nil {
		dst, m := v.Dst4(), &r.in
		if dst&m.mask == m.from && dst != m.from && !v.IsICMPError() {
			if m.from != m.to {
				v.SetDst4(dst&^m.mask | m.to)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(r.mss)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Inbound, tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// known is the shortcut for a whole TCP or UDP packet over IPv4 of a flow that is there: the rules let it be opened, and
// would have ended it since if they did not permit it any more, so that there is nothing else to ask.
func (e *Engine) known(v *packet.View, r *remote, dir Direction, now tick) (Verdict, bool) {
	if _, _, _, fragment := v.Fragment(); fragment || !v.HasPorts() {
		return Verdict{}, false
	}
	near, far := v.Src4(), v.Dst4()
	nearPort, farPort := v.SrcPort(), v.DstPort()
	if dir == Inbound {
		near, far, nearPort, farPort = far, near, farPort, nearPort
	}
	k := keyOf(dir, addr4(near), addr4(far), v.Proto(), nearPort, farPort)
	f, ok := r.peer.flows.find(dir, &k)
	if !ok || f.expired(&e.lifetimes, now) {
		return Verdict{}, false
	}
	f.touch(v, dir, now)
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
	if v.LaterFragment() {
		return e.laterFragment(v, r, Outbound, now, tr)
	}
	to, port, drop := e.flowOut(v, r, m, src, dst, seen, pod, now, tr)
	return e.place(v, r, Outbound, to, port, drop, now, tr)
}

// flowOut finds or opens the flow of an outbound packet: the reply of a mapped endpoint leaves as the peer addressed it,
// a pod without a flow by the prefix map, everything else from the NAPT address.
func (e *Engine) flowOut(v *packet.View, r *remote, m *podMap, src, dst, seen addr, pod bool, now tick, tr *Trace) (addr, int, Drop) {
	flows := &r.peer.flows
	k := packetKey(v, Outbound, src, dst)
	if f, ok := flows.find(Outbound, &k); ok && !f.expired(&e.lifetimes, now) {
		tr.known(&f)
		if tr == nil {
			f.touch(v, Outbound, now)
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
		f.touch(v, Outbound, now)
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
	if v.LaterFragment() {
		return e.laterFragment(v, r, Inbound, now, tr)
	}
	if !mapped {
		endpoint = addr{}
	}
	to, port, drop := e.flowIn(v, r, src, dst, endpoint, local, pod, now, tr)
	return e.place(v, r, Inbound, to, port, drop, now, tr)
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
			f.touch(v, Inbound, now)
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
		f.touch(v, Inbound, now)
	}
	return f.other, int(f.otherPort(Inbound)), DropNone
}

// open adds a flow that a packet of direction dir begins: k is its tuple and other what our end becomes. It returns the
// flow, which another packet may have opened in the meantime.
func (e *Engine) open(r *rule, kind flowKind, dir Direction, k *key, other addr, now tick, tr *Trace) (match, Drop) {
	t := &r.peer.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	local, mapped := k.near, other
	if kind == endpointFlow {
		local, mapped = other, k.near
	}
	if current := r.peer.rule; current != r && (current == nil || !current.permits(kind, local, mapped, k.remote)) {
		return match{}, DropNoFlow // the rules have just changed
	}
	if f, ok := t.find(dir, k); ok {
		if !f.expired(&e.lifetimes, now) {
			tr.known(&f)
			return f, DropNone
		}
		t.expire(&f, tr)
	}
	proto, port, remotePort := protoOf(k.word), k.nearPort(dir), k.remotePort()
	class := classOf(proto, k.near.is4())
	if kind == endpointFlow || class == noPorts {
		// The other tuple could be taken: by a flow that the endpoint itself began, or behind the NAPT address by
		// another host that uses the same protocol towards the same remote address.
		back := keyOf(1-dir, other, k.remote, proto, port, remotePort)
		if f, ok := t.find(1-dir, &back); ok {
			if !f.expired(&e.lifetimes, now) {
				if kind == endpointFlow {
					return match{}, DropFlowClash
				}
				return match{}, DropProtocol
			}
			t.expire(&f, tr)
		}
	}
	full := t.live.Load() >= r.peer.quota.Load() || e.total.Load() >= int64(e.config.MaxFlows)
	if tr != nil {
		return t.preview(kind, k, other, class, full, tr)
	}
	var mapping uint32
	mappedPort := port
	if kind == naptFlow && class != noPorts {
		var ok bool
		if mapping, mappedPort, ok = t.napt.hold(local, port, class); !ok {
			return match{}, DropPortsExhausted
		}
	}
	if full && !t.evict() {
		if mapping != 0 {
			t.napt.release(mapping)
		}
		return match{}, DropFlowTableFull
	}
	word := uint64(port)<<nearShift[Outbound] | uint64(mappedPort)<<nearShift[Inbound] |
		uint64(remotePort)<<remoteShift | uint64(proto)<<protoShift | stateLive
	if kind == endpointFlow {
		word |= stateEndpoint
	}
	f := t.insert(local, mapped, k.remote, word, mapping, now)
	f.other = other
	return f, DropNone
}

// expire removes a flow that is in the way though its time is over.
func (t *flowTable) expire(f *match, tr *Trace) {
	if tr == nil {
		t.remove(f.index)
		t.expired.Add(1)
	}
}

// place ends the general path: it rewrites the packet to the address and port that were found, or refuses it, and tells
// the other fragments of the same datagram.
func (e *Engine) place(v *packet.View, r *remote, dir Direction, to addr, port int, drop Drop, now tick, tr *Trace) Verdict {
	var released [][]byte
	if _, _, _, is := v.Fragment(); is && tr == nil {
		released = e.firstFragment(v, r, dir, to, drop, now)
	}
	if drop != DropNone {
		return e.refuse(r, dir, drop, tr)
	}
	verdict := e.forward(v, r, dir, to, port)
	verdict.Released = released
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
		v.SetSrc(to.netip())
	} else {
		v.SetDst(to.netip())
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

// begins tells whether a packet may open a flow: a TCP segment without RST (also in mid-connection, so that
// connections survive the loss of the table when their port can be kept), an ICMP request, anything of other protocols.
func begins(v *packet.View) Drop {
	switch classOf(v.Proto(), v.Is4()) {
	case tcpPorts:
		if v.TCPFlags()&packet.TCPRst != 0 {
			return DropNoFlow
		}
	case icmpIDs:
		if !v.IsICMPQuery() {
			return DropProtocol
		}
		if !isRequest(v) {
			return DropNoFlow
		}
	}
	return DropNone
}

// isRequest reports whether the packet is an ICMP query that asks: echo, timestamp, information, address mask.
func isRequest(v *packet.View) bool {
	if !v.IsICMPQuery() {
		return false
	}
	switch v.ICMPType() {
	case 8, 13, 15, 17:
		return v.Is4()
	case 128:
		return !v.Is4()
	}
	return false
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
	return addrOf(v.Src())
}

func destination(v *packet.View) addr {
	if v.Is4() {
		return addr4(v.Dst4())
	}
	return addrOf(v.Dst())
}

func (r *rule) isEndpoint(a addr) bool {
	if len(r.endpoints) == 0 {
		return false
	}
	_, ok := r.endpoints[a]
	return ok
}

// refuse discards a packet and counts it, unless it is only traced. r is nil when no peer is known.
func (e *Engine) refuse(r *remote, dir Direction, d Drop, tr *Trace) Verdict {
	var p *PeerState
	if r != nil {
		p = r.peer
	}
	if tr == nil {
		e.Count(p, dir, d)
	}
	return Verdict{Drop: d, Peer: p}
}

// Count adds one to a drop counter. The engine counts what it discards; the gateway counts its own drops here, with a
// nil peer when none is known.
func (e *Engine) Count(p *PeerState, dir Direction, d Drop) {
	if p == nil {
		e.noPeer[dir][d].Add(1)
		return
	}
	p.drops[dir][d].Add(1)
}

// Sweep ends expired flows and gives up fragments that wait in vain. Call it about once a second, from one goroutine.
func (e *Engine) Sweep(now time.Duration) {
	at := tickOf(now)
	e.swept.Store(uint32(at))
	for _, r := range e.rules.Load().rules {
		r.peer.flows.sweep(&e.lifetimes, at)
		for dir := range r.peer.fragments {
			r.peer.fragments[dir].sweep(at, e.lifetimes.fragment)
		}
	}
}
