// Package differential sends the same packets through two judges: the kernel's NETMAP and conntrack
// in four network namespaces, and two engines of natengine, and wants the same bytes out of both.
//
//	pod A ── lan │ gateway A │ wan ───────────── wan │ gateway B │ lan ── pod B
//	  raw socket    nft nat        raw socket          nft nat      raw socket
//
// Packets enter and leave by AF_PACKET sockets, so no IP stack of a pod takes part. Both stages are
// compared: what is on the wire between the gateways (inside the tunnel, in real life) and what
// arrives. A third, slower judge looks at every packet too: addresses by the table of section 7.2
// of docs/liqo-v0.md, checksums by gopacket.
//
// Where the engine differs from the kernel on purpose, choices_test.go names the choice and asserts
// both sides of it.
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

// A plan says who has which addresses. Index is the cluster that owns the network; seen is the same
// network as the other cluster sees it (Pa@B), equal to it where the other cluster did not remap.
type plan struct {
	name     string
	pods     [2]netip.Prefix
	podsSeen [2]netip.Prefix
	ext      [2]netip.Prefix
	extSeen  [2]netip.Prefix
}

// plans: all four combinations of who is remapped, identical choices on both sides, unequal masks,
// masks off the octets.
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
		// Both clusters have the same ExternalCIDR, and B remapped A's.
		ext:     [2]netip.Prefix{prefix("198.18.1.0/24", ""), prefix("198.18.1.0/24", "")},
		extSeen: [2]netip.Prefix{prefix("198.18.7.0/24", ""), prefix("198.18.1.0/24", "")},
	}
}

// pod is the n-th pod of a cluster, n from 1. Numbers beyond the prefix wrap around, never onto the
// network address.
func (p plan) pod(s side, n int) netip.Addr {
	hosts := uint64(1)<<min(32, p.pods[s].Addr().BitLen()-p.pods[s].Bits()) - 1
	return nth(p.pods[s], uint32((uint64(n)-1)%hosts+1))
}

// podSeen is the same pod under the address the other cluster uses.
func (p plan) podSeen(s side, n int) netip.Addr { return move(p.pod(s, n), p.pods[s], p.podsSeen[s]) }

// natIP is the address under which everything in the cluster that is not a pod appears to the other
// cluster.
func (p plan) natIP(s side) netip.Addr { return p.podsSeen[s].Addr() }

// node and endpoint are in no prefix of any plan. mapped is the address under which the other
// cluster reaches endpoint.
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

// six is the same plan for the rules of IPv6.
func (p plan) six() plan6 { return plan6{p.name, p.pods, p.podsSeen, p.extSeen} }

// plan is the same one as it is for IPv4.
func (p plan6) plan() plan { return plan{p.name, p.pods, p.podsSeen, p.ext, p.ext} }

// move carries an address over from one prefix to another of the same length, one bit after the
// other.
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

// nth is the n-th address after the network's.
func nth(p netip.Prefix, n uint32) netip.Addr {
	b := p.Addr().AsSlice()
	low := b[len(b)-4:]
	binary.BigEndian.PutUint32(low, binary.BigEndian.Uint32(low)+n)
	a, _ := netip.AddrFromSlice(b)
	return a
}

// number is the last 32 bits.
func number(a netip.Addr) uint32 {
	b := a.AsSlice()
	return binary.BigEndian.Uint32(b[len(b)-4:])
}

func address(n uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}
