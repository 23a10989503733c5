package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// sourceAllowed is a slow version of the rule in outerSources for an address that an agent reports:
// it reads all nodes.
func sourceAllowed(d *nodeDecision, in PodNetwork, n ClusterNode, a netip.Addr) bool {
	holds := func(p netip.Prefix) bool { return p.Contains(a) }
	for _, other := range d.nodes {
		if other.Name != n.Name && (slices.Contains(other.Addrs, a) || d.trusted && slices.ContainsFunc(other.PodCIDRs, holds)) {
			return false
		}
	}
	return a != in.Pod && !slices.ContainsFunc(d.refused, holds) && !slices.ContainsFunc(in.Pods, func(p NodePod) bool { return p.Addr == a })
}

func TestReportedSourcesOfOtherOwnersAreIgnored(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 14))
	addr := func() netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(random.IntN(4)), byte(random.IntN(4)), byte(random.IntN(8))})
	}
	addrs := func() (all []netip.Addr) {
		for range random.IntN(3) {
			all = append(all, addr())
		}
		return all
	}
	allowed, refused := 0, 0
	for range 500 {
		d := nodeDecision{trusted: random.IntN(2) == 0, overlay: make(map[string]netip.Addr)}
		in := PodNetwork{Pod: addr(), Pods: []NodePod{{Addr: addr()}, {Addr: addr()}}}
		for range random.IntN(3) {
			d.refused = append(d.refused, netip.PrefixFrom(addr(), 24+random.IntN(9)))
		}
		for i := range 5 {
			n := ClusterNode{Name: fmt.Sprint("n", i), Addrs: addrs(), Sources: addrs()}
			if random.IntN(2) == 0 {
				n.PodCIDRs = []netip.Prefix{netip.PrefixFrom(addr(), 24+random.IntN(9)).Masked()}
			}
			if d.nodes = append(d.nodes, n); random.IntN(4) > 0 {
				d.overlay[n.Name] = addr()
			}
		}
		var want []netip.Addr
		for _, n := range d.nodes {
			if _, ok := d.overlay[n.Name]; !ok {
				continue
			}
			want = append(want, n.Addrs...)
			for _, a := range n.Sources {
				if sourceAllowed(&d, in, n, a) {
					want, allowed = append(want, a), allowed+1
				} else {
					refused++
				}
			}
			for _, p := range n.PodCIDRs {
				if d.trusted && p.Bits() < 31 {
					want = append(want, p.Addr(), p.Addr().Next())
				}
			}
		}
		if got := d.outerSources(in); !slices.Equal(got, want) {
			t.Fatalf("%+v\n%+v\nouterSources: %v\nwant          %v", d, in, got, want)
		}
	}
	if allowed < 100 || refused < 100 {
		t.Errorf("%d sources were allowed, %d refused; want 100 of each", allowed, refused)
	}
}

// BenchmarkOuterSources measures a cluster with flannel, where each node reports flannel.1 and
// cni0.
func BenchmarkOuterSources(b *testing.B) {
	d := nodeDecision{trusted: true, overlay: make(map[string]netip.Addr)}
	for i := range 5000 {
		at := func(first, last byte) netip.Addr { return netip.AddrFrom4([4]byte{first, byte(i >> 8), byte(i), last}) }
		n := ClusterNode{Name: fmt.Sprint("n", i), Addrs: []netip.Addr{at(172, 1)}, Sources: []netip.Addr{at(10, 0), at(10, 1)}, PodCIDRs: []netip.Prefix{netip.PrefixFrom(at(10, 0), 24)}}
		d.nodes, d.overlay[n.Name] = append(d.nodes, n), at(240, 1)
	}
	for b.Loop() {
		d.outerSources(PodNetwork{})
	}
}
