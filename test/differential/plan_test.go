// Package differential sends the same packets through two translators and compares the octets
// that come out. One is the kernel: NETMAP and conntrack in four network namespaces. The other
// is a pair of natengine engines.
//
//	pod A ── lan │ gateway A │ wan ───────────── wan │ gateway B │ lan ── pod B
//	  raw socket    nft nat        raw socket          nft nat      raw socket
//
// Packets enter and leave by AF_PACKET sockets, so no IP stack of a pod takes part. The tests
// compare the packets between the gateways, where a real fabric has the tunnel, and the
// packets that arrive. They also check every packet independently: its addresses by the table
// in docs/liqo-v0.md, section 7.2, and its checksums with gopacket.
//
// Where the engine deliberately differs from the kernel, choices_test.go names the difference and
// asserts the behaviour of both.
package differential

import (
	"encoding/binary"
	"net/netip"
)

// A side is one of the two clusters.
type side int

const (
	A side = iota
	B
)

func (s side) other() side    { return 1 - s }
func (s side) String() string { return [...]string{"A", "B"}[s] }

// A plan holds the networks of both clusters. The index is the cluster that owns the network.
// A network in podsSeen or extSeen is the same network as the other cluster sees it (Pa@B); it
// equals the original if the other cluster did not remap it.
type plan struct {
	name     string
	pods     [2]netip.Prefix
	podsSeen [2]netip.Prefix
	ext      [2]netip.Prefix
	extSeen  [2]netip.Prefix
}

// plans has all four combinations of remapping, and a plan in which both sides are remapped to the
// same range. Other plans have masks of different lengths, and masks that do not end at an octet.
var plans = []plan{
	newPlan("none remapped", "10.1.0.0/16", "", "10.2.0.0/16", ""),
	newPlan("A remapped", "10.244.0.0/16", "10.246.0.0/16", "10.50.0.0/16", ""),
	newPlan("B remapped", "10.50.0.0/16", "", "10.244.0.0/16", "10.246.0.0/16"),
	newPlan("both remapped", "10.244.0.0/16", "10.246.0.0/16", "10.244.0.0/16", "10.245.0.0/16"),
	newPlan("same range on both sides", "10.244.0.0/16", "10.246.0.0/16", "10.244.0.0/16", "10.246.0.0/16"),
	newPlan("unequal masks", "10.244.0.0/16", "10.200.0.0/16", "10.244.16.0/20", "10.100.32.0/20"),
	newPlan("masks off the octets", "10.128.0.0/9", "11.0.0.0/9", "10.200.7.64/27", "192.168.255.224/27"),
	newPlan("smallest and largest", "64.0.0.0/2", "128.0.0.0/2", "192.168.4.8/30", "10.255.255.252/30"),
}

func newPlan(name, podsA, seenA, podsB, seenB string) plan {
	prefix := func(s, otherwise string) netip.Prefix {
		if s == "" {
			s = otherwise
		}
		return netip.MustParsePrefix(s).Masked()
	}
	return plan{
		name:     name,
		pods:     [2]netip.Prefix{prefix(podsA, ""), prefix(podsB, "")},
		podsSeen: [2]netip.Prefix{prefix(seenA, podsA), prefix(seenB, podsB)},
		// Both clusters have the same ExternalCIDR, and B has remapped that of A.
		ext:     [2]netip.Prefix{prefix("198.18.1.0/24", ""), prefix("198.18.1.0/24", "")},
		extSeen: [2]netip.Prefix{prefix("198.18.7.0/24", ""), prefix("198.18.1.0/24", "")},
	}
}

// pod returns the n-th pod of a cluster, counted from 1. Larger numbers wrap around at the end
// of the prefix and never result in the network address.
func (p plan) pod(s side, n int) netip.Addr {
	hosts := uint64(1)<<min(32, p.pods[s].Addr().BitLen()-p.pods[s].Bits()) - 1
	return nth(p.pods[s], uint32((uint64(n)-1)%hosts+1))
}

// podSeen returns the address under which the other cluster sees pod n.
func (p plan) podSeen(s side, n int) netip.Addr { return move(p.pod(s, n), p.pods[s], p.podsSeen[s]) }

// natIP returns the address under which the other cluster sees all hosts of the cluster that
// are not pods.
func (p plan) natIP(s side) netip.Addr { return p.podsSeen[s].Addr() }

// node and endpoint return addresses that are in no prefix of any plan. mapped returns the
// address under which the other cluster reaches endpoint.
func (p plan) node(s side, n int) netip.Addr {
	if p.v6() {
		return nth(netip.MustParsePrefix("fc00:1::/64"), uint32(s)<<7|uint32(n))
	}
	return nth(netip.MustParsePrefix("192.0.2.0/24"), uint32(s)<<7|uint32(n))
}
func (p plan) endpoint(s side) netip.Addr {
	if p.v6() {
		return plan6{}.endpoint(s)
	}
	return nth(netip.MustParsePrefix("203.0.113.0/24"), 10+uint32(s))
}
func (p plan) mapped(s side) netip.Addr {
	if p.v6() {
		return p.six().mapped(s)
	}
	return nth(p.extSeen[s], 5)
}

func (p plan) v6() bool { return p.pods[A].Addr().Is6() }

// six returns the plan in the form for IPv6 rules.
func (p plan) six() plan6 { return plan6{p.name, p.pods, p.podsSeen, p.extSeen} }

// plan returns the plan in the form for IPv4.
func (p plan6) plan() plan { return plan{p.name, p.pods, p.podsSeen, p.ext, p.ext} }

// move translates an address from one prefix to another of the same length, bit by bit.
func move(addr netip.Addr, from, to netip.Prefix) netip.Addr {
	if !from.Contains(addr) || from.Bits() != to.Bits() {
		panic("move: " + addr.String() + " " + from.String() + " " + to.String())
	}
	in, net := addr.AsSlice(), to.Addr().AsSlice()
	for bit := range to.Bits() {
		mask := byte(0x80) >> (bit % 8)
		in[bit/8] = in[bit/8]&^mask | net[bit/8]&mask
	}
	out, _ := netip.AddrFromSlice(in)
	return out
}

// nth returns the n-th address after the network address.
func nth(p netip.Prefix, n uint32) netip.Addr {
	b := p.Addr().AsSlice()
	low := b[len(b)-4:]
	binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)+n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// number returns the last 32 bits of an address.
func number(a netip.Addr) uint32 {
	b := a.AsSlice()
	return binary.BigEndian.Uint32(b[len(b)-4:])
}

func address(n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}
