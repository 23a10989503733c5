package natengine

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Tuple holds both ends of a packet. Ports are 0 for protocols without ports. For an ICMP
// query, the port of our end is the identifier.
type Tuple struct {
	Proto    uint8
	Src, Dst netip.AddrPort
}

// String returns the tuple as "udp 10.0.0.1:53 > 10.0.0.2:40000". It omits ports that are 0.
func (t Tuple) String() string {
	return protoName(t.Proto) + " " + endName(t.Src) + " > " + endName(t.Dst)
}

func endName(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}

func protoName(p uint8) string {
	switch p {
	case packet.ICMP:
		return "icmp"
	case packet.TCP:
		return "tcp"
	case packet.UDP:
		return "udp"
	case packet.ICMPv6:
		return "icmpv6"
	case packet.SCTP:
		return "sctp"
	}
	return fmt.Sprintf("proto %d", p)
}

// Trace describes the engine's decision about a packet, and the reasons, for people.
type Trace struct {
	Direction Direction
	Peer      string // "" if no peer has the address
	Rule      string // "prefix map 10.244.0.0/16 -> 10.246.0.0/16"; "" if no rule was reached
	Flow      string // "known", "new", or "" where no flow is needed
	Before    Tuple
	After     Tuple // equal to Before when the packet is not forwarded
	Action    Action
	Drop      Drop
}

// String returns the trace with one line per fact.
func (t Trace) String() string {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s"+format+"\n", append([]any{name}, args...)...)
	}
	line("packet", "%v, %v", t.Before, t.Direction)
	if t.Peer != "" {
		line("peer", "%s", t.Peer)
	}
	if t.Rule != "" {
		line("rule", "%s", t.Rule)
	}
	if t.Flow != "" {
		line("flow", "%s", t.Flow)
	}
	switch t.Action {
	case Discard:
		line("drop", "%v: %s", t.Drop, t.Drop.Explain())
	case Hold:
		line("hold", "a fragment that waits for the rest of its datagram")
	default:
		line(t.Action.String(), "%v", t.After)
	}
	return b.String()
}

// Trace returns the decision that Outbound or Inbound would make about the packet. It works on a
// copy and always takes the general path. It changes neither the packet nor a flow, a counter or a
// port. If a new NAPT flow cannot keep its port, the port in After is only an example. v must be a
// single packet, not the View of a packet.Run with several packets.
func (e *Engine) Trace(v *packet.View, dir Direction, now time.Duration) Trace {
	tr := Trace{Direction: dir, Before: TupleOf(v, dir)}
	tr.After = tr.Before
	var w packet.View
	if err := w.Parse(append([]byte(nil), v.Bytes()...), v.Checksum()); err != nil {
		tr.Drop = DropMalformed
		return tr
	}
	far, judge := w.Dst(), e.outbound
	if dir == Inbound {
		far, judge = w.Src(), e.inbound
	}
	r := e.rules.Load().remote(far)
	if r != nil {
		tr.Peer = r.peer.ID()
	}
	verdict := judge(&w, r, tickOf(now), &tr)
	tr.Action, tr.Drop = verdict.Action, verdict.Drop
	if tr.Action == Forward || tr.Action == Deliver {
		tr.After = TupleOf(&w, dir)
	} else if tr.Action == Discard {
		tr.Flow = strings.TrimPrefix(tr.Flow, "new")
	}
	return tr
}

// TupleOf returns the ends of a packet that crosses the gateway in direction dir.
func TupleOf(v *packet.View, dir Direction) Tuple {
	src, dst := v.SrcPort(), v.DstPort()
	if dir == Outbound {
		src += v.ICMPID() // at most one of the two is not 0
	} else {
		dst += v.ICMPID()
	}
	return Tuple{v.Proto(), netip.AddrPortFrom(v.Src(), src), netip.AddrPortFrom(v.Dst(), dst)}
}

// The general path calls the following methods to record the rule that it applied. They do nothing
// on a nil Trace.

func (t *Trace) prefixMap(r *rule, family int) {
	if t != nil {
		t.Rule = "prefix map " + r.remap(family).String()
	}
}

func (t *Trace) prefixMapIn(r *rule, family int) {
	if t != nil {
		t.Rule = "prefix map " + r.remap(family).Reverse().String()
	}
}

func (r *rule) remap(family int) Remap {
	for _, m := range r.spec.Pods {
		if addrOf(m.From.Addr()).family() == family {
			return m
		}
	}
	return Remap{}
}

func (t *Trace) known(f *match) {
	if t != nil {
		t.Flow = "known"
		out, in := f.keyAt(Outbound), f.keyAt(Inbound)
		t.describe(f.kind(), out.near, in.near)
	}
}

func (t *Trace) describe(kind flowKind, local, mapped addr) {
	if kind == endpointFlow {
		t.Rule = "endpoint " + Endpoint{Real: local.netip(), Seen: mapped.netip()}.String()
	} else {
		t.Rule = fmt.Sprintf("NAPT %v -> %v", local.netip(), mapped.netip())
	}
}

// preview is enter for a trace: it returns the same result and changes nothing. It ignores the
// expired flows in stale. The caller holds mu.
func (o *opening) preview(t *flowTable, room room, quota int64, stale []uint32) (match, Drop) {
	o.tr.Flow = "new"
	o.tr.describe(o.kind, o.local, o.mapped)
	hosts := &t.hosts[o.kind]
	h := hosts.find(o.owner)
	flows, ofHost := t.live.Load()-int64(len(stale)), uint32(0)
	if h != 0 {
		ofHost = hosts.at(h).flows
		for _, i := range stale {
			if t.side(i).host == h && kindOf(t.entry(i).word.Load()) == o.kind {
				ofHost--
			}
		}
	}
	evicts := ofHost >= hosts.quota
	if evicts && !t.evictable(hosts.at(h), allWaiting, stale) {
		return match{}, DropHostQuota
	}
	port := o.k.nearPort(o.dir)
	if o.kind == naptFlow && o.class != noPorts {
		var ok bool
		if port, ok = t.napt.preview(h, port, o.class, o.local.family()); !ok {
			if evicts = t.evictable(nil, waitingFor(o.class, o.local.family(), o.k.nearPort(o.dir)), stale); !evicts {
				return match{}, DropPortsExhausted
			}
			port = o.k.nearPort(o.dir) // only an example: a real packet would get the port that the eviction frees
		}
	}
	if !evicts && (room != roomFree || flows >= quota) && (room == roomElsewhere && flows < quota || !t.evictable(nil, allWaiting, stale)) {
		return match{}, DropFlowTableFull
	}
	return match{word: uint64(port) << nearShift[1-o.dir], other: o.other}, DropNone
}
