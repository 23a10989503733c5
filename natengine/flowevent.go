package natengine

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// FlowChange is the kind of change that a FlowEvent reports.
type FlowChange uint8

const (
	FlowOpened  FlowChange = iota // a flow has begun
	FlowClosed                    // a flow has ended
	FlowRefused                   // a packet was discarded: no rule permits it, or a bound is reached
)

// String returns "opened", "closed" or "refused".
func (c FlowChange) String() string { return [...]string{"opened", "closed", "refused"}[c] }

// FlowEnd is the reason why a flow has ended.
type FlowEnd uint8

const (
	FlowExpired  FlowEnd = iota // idle for too long
	FlowEvicted                 // half-open, and evicted at a bound
	FlowPurged                  // not permitted by new rules
	FlowReplaced                // its client now uses the pod's own address
)

// String returns "expired", "evicted", "purged" or "replaced".
func (f FlowEnd) String() string { return [...]string{"expired", "evicted", "purged", "replaced"}[f] }

// FlowEvent reports a flow that was opened, closed or refused.
//
// Pods that are mapped 1:1 have no flows. For these pods, the engine reports only the SYNs of TCP
// connections, as FlowOpened with Kind "pod".
type FlowEvent struct {
	Change    FlowChange
	Direction Direction  // of the packet that opened the flow or was refused; unused for FlowClosed
	Peer      *PeerState // nil if no peer has the address
	Kind      string     // "napt", "endpoint" or "pod"; "" for FlowRefused
	Proto     uint8
	Local     netip.AddrPort // our end; for FlowRefused, before translation
	Mapped    netip.AddrPort // our end as the peer sees it; zero for FlowRefused
	Remote    netip.AddrPort // the peer's end
	Drop      Drop           // for FlowRefused
	End       FlowEnd        // for FlowClosed
	Lasted    time.Duration  // for FlowClosed: time from the first packet to the last, accurate to 0.13 s
}

// flowEvents are the receivers of an engine's flow events.
type flowEvents struct {
	observer  atomic.Pointer[observer]    // nil: no observer
	followers atomic.Pointer[[]*follower] // nil: no followers
}

type observer struct {
	f      func(FlowEvent)
	sample uint64
	others atomic.Uint64 // number of events that belong to no flow of the table
}

// Observe makes the engine call f with the events of one in n flows, from now on. A nil f ends the
// calls. If the engine has reported the opening of a flow, it also reports the closing. f is called
// on the packet path with locks held, so it must neither block nor call the engine. A packet of a
// known flow, or of a pod that is mapped 1:1, costs no more than without an observer.
func (e *Engine) Observe(f func(FlowEvent), n int) {
	if f == nil {
		e.events.observer.Store(nil)
		return
	}
	e.events.observer.Store(&observer{f: f, sample: uint64(max(n, 1))})
}

// sampled counts an event that belongs to no flow of the table, and reports whether the event
// is in the sample.
func (o *observer) sampled() bool { return o.others.Add(1)%o.sample == 0 }

// report reports a change of a flow in the table to the observer. The caller holds mu.
func (t *flowTable) report(i uint32, change FlowChange, dir Direction, end FlowEnd) {
	o := t.events.observer.Load()
	if o == nil {
		return
	}
	e := t.entry(i)
	if e.hash(Outbound, &t.keys)%o.sample != 0 {
		return
	}
	out, in, word := e.keyAt(Outbound), e.keyAt(Inbound), e.word.Load()
	ev := FlowEvent{
		Change: change, Direction: dir, Peer: t.peer, Kind: "napt", Proto: protoOf(word), End: end,
		Local:  netip.AddrPortFrom(out.near.netip(), out.nearPort(Outbound)),
		Mapped: netip.AddrPortFrom(in.near.netip(), in.nearPort(Inbound)),
		Remote: netip.AddrPortFrom(out.remote.netip(), out.remotePort()),
	}
	if classOf(ev.Proto, out.near.is4()) == icmpIDs {
		ev.Remote = netip.AddrPortFrom(ev.Remote.Addr(), 0)
	}
	if kindOf(word) == endpointFlow {
		ev.Kind = "endpoint"
	}
	if change == FlowClosed {
		ev.Lasted = duration(max(tick(e.seen.Load()).since(t.side(i).opened), 0))
	}
	o.f(ev)
}

// refused reports a discarded packet to the observer. v must not have been translated.
func (e *Engine) refused(v *packet.View, p *PeerState, dir Direction, d Drop) {
	o := e.events.observer.Load()
	if o == nil || !o.sampled() {
		return
	}
	t := TupleOf(v, dir)
	ev := FlowEvent{Change: FlowRefused, Direction: dir, Peer: p, Proto: t.Proto, Local: t.Src, Remote: t.Dst, Drop: d}
	if dir == Inbound {
		ev.Local, ev.Remote = t.Dst, t.Src
	}
	o.f(ev)
}

// connects clamps the MSS of a SYN from or to a pod and reports the connection to the observer. The
// SYN has been translated 1:1, without a flow. near is our end before the translation. If the peer
// has no MSS bound, the fast path does not look for SYNs, so no connection is reported.
func (e *Engine) connects(v *packet.View, r *remote, dir Direction, near addr) {
	v.ClampMSS(mssFor(r.mss, v.Is4()))
	o := e.events.observer.Load()
	if o == nil || v.TCPFlags()&packet.TCPAck != 0 || !o.sampled() {
		return
	}
	t := TupleOf(v, dir)
	ev := FlowEvent{Direction: dir, Peer: r.peer, Kind: "pod", Proto: t.Proto, Mapped: t.Src, Remote: t.Dst}
	ev.Local = netip.AddrPortFrom(near.netip(), t.Src.Port())
	if dir == Inbound {
		ev.Local, ev.Remote = t.Dst, t.Src
		ev.Mapped = netip.AddrPortFrom(near.netip(), t.Dst.Port())
	}
	o.f(ev)
}
