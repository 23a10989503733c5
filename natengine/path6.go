package natengine

import (
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// outbound6 is Outbound's common case over IPv6. It is longer than that of IPv4 by the second word of each address, and has to
// leave ICMPv6 to the general path, but for echoes: some of it must not leave its link.
func (e *Engine) outbound6(v *packet.View, t *ruleTable, now time.Duration) Verdict {
	src, dst := source6(v), destination6(v)
	r := t.remotes6.lookup(dst)
	if r != nil {
		if m := &r.out6; m.maps(src) && (v.Proto() != packet.ICMPv6 || v.IsICMPQuery()) {
			if m.from != m.to {
				v.SetSrc6(m.to.hi|src.hi&^m.mask.hi, m.to.lo|src.lo&^m.mask.lo)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(mssFor(r.mss, false))
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Outbound, src, dst, tickOf(now)); ok {
			return verdict
		}
	}
	return e.outbound(v, r, tickOf(now), nil)
}

// inbound6 is Inbound's common case over IPv6; see outbound6.
func (e *Engine) inbound6(v *packet.View, t *ruleTable, now time.Duration) Verdict {
	src, dst := source6(v), destination6(v)
	r := t.remotes6.lookup(src)
	if r != nil {
		if m := &r.in6; m.maps(dst) && (v.Proto() != packet.ICMPv6 || v.IsICMPQuery()) {
			if m.from != m.to {
				v.SetDst6(m.to.hi|dst.hi&^m.mask.hi, m.to.lo|dst.lo&^m.mask.lo)
			}
			if r.mss != 0 && v.TCPFlags()&packet.TCPSyn != 0 {
				v.ClampMSS(mssFor(r.mss, false))
			}
			return Verdict{Action: Forward, Peer: r.peer}
		}
		if verdict, ok := e.known(v, r, Inbound, src, dst, tickOf(now)); ok {
			return verdict
		}
	}
	return e.inbound(v, r, tickOf(now), nil)
}

// map6 is a 1:1 map of IPv6 for the fast path. One that must not be used there matches no address: mask 0, from not.
type map6 struct{ mask, from, to addr }

var noMap6 = map6{from: addr{lo: 1}}

// maps reports whether a is mapped: in the prefix, and not its network address, which belongs to NAPT.
func (m *map6) maps(a addr) bool {
	return a.hi&m.mask.hi == m.from.hi && a.lo&m.mask.lo == m.from.lo && a != m.from
}

func source6(v *packet.View) addr {
	hi, lo := v.Src6()
	return addr{hi, lo}
}

func destination6(v *packet.View) addr {
	hi, lo := v.Dst6()
	return addr{hi, lo}
}
