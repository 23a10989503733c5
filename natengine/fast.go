package natengine

import (
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Outbound decides about a packet to the tunnel. If it forwards the packet, it translates the
// source in place to the address under which the peer sees it. A discarded packet is not
// changed. now comes from a monotonic clock, read once per batch.
//
// This function handles the common case, a pod that is mapped 1:1 over IPv4; outbound6 does the
// same for IPv6. All other packets go to outbound, which is slower and handles every packet.
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
				e.connects(v, r, Outbound, addr4(src))
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if !v.IsFragment() {
			if verdict, ok := e.forwardKnown(v, r, Outbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
				return verdict
			}
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// Inbound decides about a packet from the tunnel. If it forwards the packet, it replaces the
// destination in place: the peer's address for our host becomes the host's local address. Inbound
// does not check which peer's key decrypted the packet; InboundFrom does.
func (e *Engine) Inbound(v *packet.View, now time.Duration) Verdict {
	return e.InboundFrom(nil, v, now)
}

// InboundFrom is Inbound for a packet that was decrypted with the key of peer p. InboundFrom drops
// the packet as DropSource if the source is not an address of p. Source and destination are looked
// up in the same rule table. So even while a change moves a range from one peer to another, each
// packet is handled by either the old or the new rules.
//
// A fragment is held until its datagram is complete. Then v becomes the datagram, in memory
// that the caller owns, and is forwarded. An IPv6 datagram larger than 1,280 octets leaves in
// fragments of that size: v is the first, and Verdict.Released returns the others.
func (e *Engine) InboundFrom(p *PeerState, v *packet.View, now time.Duration) Verdict {
	t := e.rules.Load()
	if !v.Is4() {
		return e.inbound6(p, v, t, now)
	}
	r := t.remotes4.lookup(v.Src4())
	if p != nil && !r.belongsTo(p) {
		return e.spoofed(v, p)
	}
	if r != nil && !v.IsFragment() {
		dst, m := v.Dst4(), &r.in
		if m.maps(dst) && !v.IsICMPError() {
			if m.from != m.to {
				v.SetDst4(dst&^m.mask | m.to)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				e.connects(v, r, Inbound, addr4(dst))
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.forwardKnown(v, r, Inbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// belongsTo reports whether r belongs to peer p. r may be nil.
func (r *remote) belongsTo(p *PeerState) bool { return r != nil && r.peer == p }

// spoofed drops a packet from peer p whose source is not an address of p.
func (e *Engine) spoofed(v *packet.View, p *PeerState) Verdict {
	e.Count(p, Inbound, DropSource)
	e.refused(v, p, Inbound, DropSource)
	return Verdict{Action: Discard, Drop: DropSource, Peer: p}
}

// maps reports whether a is mapped: it is inside the prefix and is not the prefix's network
// address, which belongs to NAPT.
func (m *map4) maps(a uint32) bool { return a&m.mask == m.from && a != m.from }

// outbound6 handles the common case of Outbound over IPv6. It leaves ICMPv6 messages other
// than echoes to the general path, because some types must not leave their link.
func (e *Engine) outbound6(v *packet.View, t *ruleTable, now time.Duration) Verdict {
	src, dst := source6(v), destination6(v)
	r := t.remotes6.lookup(dst)
	if r != nil && !v.IsFragment() {
		if m := &r.out6; m.maps(src) && (v.Proto() != packet.ICMPv6 || v.IsICMPQuery()) {
			if m.from != m.to {
				v.SetSrc6(m.to.hi|src.hi&^m.mask.hi, m.to.lo|src.lo&^m.mask.lo)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				e.connects(v, r, Outbound, src)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if !v.IsFragment() {
			if verdict, ok := e.forwardKnown(v, r, Outbound, src, dst, tickOf(now)); ok {
				return verdict
			}
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// inbound6 handles the common case of Inbound over IPv6; see outbound6.
func (e *Engine) inbound6(p *PeerState, v *packet.View, t *ruleTable, now time.Duration) Verdict {
	src, dst := source6(v), destination6(v)
	r := t.remotes6.lookup(src)
	if p != nil && !r.belongsTo(p) {
		return e.spoofed(v, p)
	}
	if r != nil && !v.IsFragment() {
		if m := &r.in6; m.maps(dst) && (v.Proto() != packet.ICMPv6 || v.IsICMPQuery()) {
			if m.from != m.to {
				v.SetDst6(m.to.hi|dst.hi&^m.mask.hi, m.to.lo|dst.lo&^m.mask.lo)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				e.connects(v, r, Inbound, dst)
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.forwardKnown(v, r, Inbound, src, dst, tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// map6 is a 1:1 map of IPv6 for the fast path. noMap6 matches no address, because its mask is 0 and
// its from is 1. Rules that need the general path have noMap6.
type map6 struct{ mask, from, to addr }

var noMap6 = map6{from: addr{lo: 1}}

// maps reports whether a is mapped: it is inside the prefix and is not the prefix's network
// address, which belongs to NAPT.
func (m *map6) maps(a addr) bool {
	return a.hi&m.mask.hi == m.from.hi && a.lo&m.mask.lo == m.from.lo && a != m.from
}

// forwardKnown handles a whole TCP or UDP packet of an existing flow. It checks no rule, because a
// change of the rules ends the flows that the new rules do not permit. It handles neither fragments
// nor rules that must check each address (guarded).
func (e *Engine) forwardKnown(v *packet.View, r *remote, dir Direction, src, dst addr, now tick) (Verdict, bool) {
	if !v.HasPorts() || r.guarded {
		return Verdict{}, false
	}
	// k and f are filled in place, because copying a struct right after its words were stored
	// stalls the processor for longer than a hash takes.
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
