package natengine

import (
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Outbound decides about a packet to the tunnel and, if it is forwarded, translates its source in
// place into the address by which the peer knows it. A discarded packet is not changed. now comes
// from a monotonic clock, read once per batch.
//
// This function has the common case, a pod that is mapped 1:1 over IPv4; outbound6 has the same for
// IPv6. All other packets go to outbound, which would also handle these.
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
			if verdict, ok := e.known(v, r, Outbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
				return verdict
			}
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// Inbound decides about a packet from the tunnel and, if it is forwarded, translates its
// destination in place from the address that the peer uses to the one it has here. See Outbound. It
// does not ask whose key decrypted the packet: InboundFrom does.
func (e *Engine) Inbound(v *packet.View, now time.Duration) Verdict {
	return e.InboundFrom(nil, v, now)
}

// InboundFrom is Inbound for a packet that the key of peer p decrypted. A source that is no address
// of p is dropped as DropSource. One rule table decides about the source and the rest, so no packet
// meets half of a change that moves a range from one peer to another.
//
// A fragment is held until its datagram is complete. Then v becomes the datagram and is forwarded,
// in memory that the caller owns. An IPv6 datagram larger than 1,280 octets leaves in fragments of
// that size: v is the first, and Verdict.Released has the others.
func (e *Engine) InboundFrom(p *PeerState, v *packet.View, now time.Duration) Verdict {
	t := e.rules.Load()
	if !v.Is4() {
		return e.inbound6(p, v, t, now)
	}
	r := t.remotes4.lookup(v.Src4())
	if p != nil && !r.of(p) {
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
		if verdict, ok := e.known(v, r, Inbound, addr4(v.Src4()), addr4(v.Dst4()), tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// of reports whether r, nil for none, is of peer p.
func (r *remote) of(p *PeerState) bool { return r != nil && r.peer == p }

// spoofed drops a packet of p whose source is no address of p.
func (e *Engine) spoofed(v *packet.View, p *PeerState) Verdict {
	e.Count(p, Inbound, DropSource)
	e.refused(v, p, Inbound, DropSource)
	return Verdict{Action: Discard, Drop: DropSource, Peer: p}
}

// maps reports whether a is mapped: in the prefix, and not its network address, which belongs to
// NAPT.
func (m *map4) maps(a uint32) bool { return a&m.mask == m.from && a != m.from }

// outbound6 is Outbound's common case over IPv6. It leaves ICMPv6 other than echoes to the general
// path, because some types must not leave their link.
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
			if verdict, ok := e.known(v, r, Outbound, src, dst, tickOf(now)); ok {
				return verdict
			}
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// inbound6 is Inbound's common case over IPv6; see outbound6.
func (e *Engine) inbound6(p *PeerState, v *packet.View, t *ruleTable, now time.Duration) Verdict {
	src, dst := source6(v), destination6(v)
	r := t.remotes6.lookup(src)
	if p != nil && !r.of(p) {
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
		if verdict, ok := e.known(v, r, Inbound, src, dst, tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// map6 is a 1:1 map of IPv6 for the fast path. A map that the fast path must not use matches no
// address: its mask is 0 and its from is not.
type map6 struct{ mask, from, to addr }

var noMap6 = map6{from: addr{lo: 1}}

// maps reports whether a is mapped: in the prefix, and not its network address, which belongs to
// NAPT.
func (m *map6) maps(a addr) bool {
	return a.hi&m.mask.hi == m.from.hi && a.lo&m.mask.lo == m.from.lo && a != m.from
}

// known is the shortcut for a whole TCP or UDP packet of an existing flow. It checks no rule again:
// the rules permit the flow, or their change would have ended it. Rules that have to check every
// address (guarded) do not use it. Not for fragments.
func (e *Engine) known(v *packet.View, r *remote, dir Direction, src, dst addr, now tick) (Verdict, bool) {
	if !v.HasPorts() || r.guarded {
		return Verdict{}, false
	}
	// Key and match are filled in place: copying a struct whose words were just stored stalls until
	// they have left the store buffer, which takes longer than a hash.
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
