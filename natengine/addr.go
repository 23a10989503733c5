package natengine

import (
	"encoding/binary"
	"net/netip"
)

// addr is an address in two words: an IPv6 address, or an IPv4 address in its mapped form
// (::ffff:0:0/96). No rule accepts an IPv4-mapped IPv6 address, so the two families cannot be
// confused. Only the IPv4 fast path uses another form, uint32.
type addr struct{ hi, lo uint64 }

const mapped4 = 0xffff << 32

func addr4(a uint32) addr { return addr{0, mapped4 | uint64(a)} }

func addrOf(a netip.Addr) addr {
	b := a.As16()
	return addr{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (a addr) is4() bool { return a.hi == 0 && a.lo>>32 == 0xffff }

// family returns the index for arrays of per-family values: 0 for IPv4, 1 for IPv6.
func (a addr) family() int {
	if a.is4() {
		return 0
	}
	return 1
}

func (a addr) netip() netip.Addr {
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], a.hi)
	binary.BigEndian.PutUint64(b[8:], a.lo)
	return netip.AddrFrom16(b).Unmap()
}

// prefix is a network: its address and its mask, each in the two words of an addr. The zero prefix
// contains every address, so it cannot stand for a missing prefix.
type prefix struct{ net, mask addr }

func prefixOf(p netip.Prefix) prefix {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	mask := addr{^uint64(0) << (64 - min(n, 64)), ^uint64(0) << (128 - max(n, 64))}
	return prefix{addrOf(p.Addr()), mask}
}

func (p prefix) contains(a addr) bool {
	return a.hi&p.mask.hi == p.net.hi && a.lo&p.mask.lo == p.net.lo
}

// move returns the address with the network bits of p and the host bits of a.
func (p prefix) move(a addr) addr {
	return addr{p.net.hi | a.hi&^p.mask.hi, p.net.lo | a.lo&^p.mask.lo}
}

// martian reports whether the address a is forbidden as the source of a packet in the fabric (RFC
// 1812, section 5.3.7, RFC 6890). Forbidden are unspecified, loopback, multicast and limited
// broadcast addresses, IPv6 link-local addresses and IPv4 addresses written as IPv6. 240.0.0.0/4 is
// allowed, because nodes have overlay addresses in 240.0.0.0/8 (docs/liqo-v0.md, section 10).
// 169.254.0.0/16 is allowed too: it is the network between the node and the gateway namespace
// (docs/liqo-v0.md, section 2.2).
func martian(a addr, is4 bool) bool {
	if is4 {
		b := uint32(a.lo)
		return b>>24 == 0 || b>>24 == 127 || b>>28 == 0xe || b == 0xffffffff
	}
	switch {
	case a.hi>>56 == 0xff, a.hi>>54 == 0xfe80>>6: // multicast, link-local
		return true
	case a.hi == 0: // ::, ::1, mapped IPv4
		return a.lo <= 1 || a.lo>>32 == 0xffff
	}
	return false
}

// unreachable reports whether the address a is forbidden as the destination of a peer's packets.
// Forbidden are martians, and the addresses of clouds' metadata services, which hand out the
// credentials of the machine. Metadata services use IPv4 link-local addresses, and over IPv6
// fd00:ec2::/32 at Amazon and fd20:ce::254 at Google (2026-11). The in-process endpoint may have a
// forbidden address (169.254.0.1 in Liqo), so the caller must exempt it.
func unreachable(a addr, is4 bool) bool {
	if martian(a, is4) {
		return true
	}
	if is4 {
		return uint32(a.lo)>>16 == 0xa9fe
	}
	return a.hi>>32 == 0xfd000ec2 || a == addr{0xfd2000ce << 32, 0x254}
}

// specials are the networks whose addresses martian or unreachable forbids. If a prefix of a rule
// overlaps one of them, compile marks the rule as guarded.
var specials = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("::/127"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
	netip.MustParsePrefix("fd00:ec2::/32"), netip.MustParsePrefix("fd20:ce::254/128"),
}

func reachesSpecial(p netip.Prefix) bool {
	for _, s := range specials {
		if s.Overlaps(p) {
			return true
		}
	}
	return false
}
