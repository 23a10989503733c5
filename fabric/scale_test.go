package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// manyPeers returns the intent of an agent in a cluster with n peers, whose gateways are Pods.
func manyPeers(n int) NodeIntent {
	in := NodeIntent{Self: "n1", OnlyPods: true, Trusted: true, Allocations: Allocations{OwnPods: []netip.Prefix{pfx("10.244.0.0/16")}}, Gateway: ip("10.244.2.254"),
		Nodes:    []ClusterNode{{Name: "n1", Addrs: []netip.Addr{ip("172.30.1.11")}, PodCIDRs: []netip.Prefix{pfx("10.244.1.0/24")}}},
		Gateways: []GatewayPod{{Addr: ip("10.244.2.254"), Host: ip("172.30.1.12")}, {Addr: ip("10.244.3.254"), Host: ip("172.30.1.13")}}}
	for i := range n {
		in.Allocated = append(in.Allocated, netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24),
			netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24))
	}
	in.Sort()
	return in
}

// BenchmarkAllocate measures the agent's computation when networks are allocated to one more peer.
func BenchmarkAllocate(b *testing.B) {
	for _, n := range []int{10, 1000, 4096} {
		b.Run(fmt.Sprintf("%d", n), func(b *testing.B) {
			have, _ := NodeFor(manyPeers(n))
			in := manyPeers(n + 1)
			for b.Loop() {
				want, _ := NodeFor(in)
				if plan := kernel.PlanFor(have, want); len(plan) != 5 { // two networks in two tables, and in the filter
					b.Fatalf("%d changes", len(plan))
				}
			}
		})
	}
}

// BenchmarkNodeAdded measures the computation of a gateway in a Pod when a node joins, and when it
// leaves again.
func BenchmarkNodeAdded(b *testing.B) {
	for _, nodes := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprintf("%d", nodes), func(b *testing.B) {
			in := PodNetwork{Pod: ip("10.128.0.250"), Node: "n0", Trusted: true}
			for i := range nodes {
				in.Nodes = append(in.Nodes, ClusterNode{Name: fmt.Sprintf("n%d", i), Addrs: []netip.Addr{netip.AddrFrom4([4]byte{172, 30, byte(i >> 8), byte(i)})},
					PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + i>>8), byte(i), 0}), 24)}})
			}
			var peers []*GatewayPeer
			for _, p := range manyPeers(1000).Allocated {
				peers = append(peers, &GatewayPeer{AllowedIPs: [2]netip.Prefix{p, {}}})
			}
			more := in
			more.Nodes = append(slices.Clone(in.Nodes), ClusterNode{Name: "new", Addrs: []netip.Addr{ip("172.31.0.1")}, PodCIDRs: []netip.Prefix{pfx("10.200.0.0/24")}})
			slices.SortFunc(in.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
			slices.SortFunc(more.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
			var d PodDecider
			have, _ := d.GatewayPodFor(peers, nil, 1340, 1, 1400, in)
			for b.Loop() {
				for _, now := range []PodNetwork{more, in} { // the node joins, then leaves
					want, _ := d.GatewayPodFor(peers, nil, 1340, 1, 1400, now)
					if plan := kernel.PlanFor(have, want); len(plan) != 6 { // filter, FDB, neighbour, and three routes
						b.Fatalf("%d changes", len(plan))
					}
					have = want
				}
			}
		})
	}
}
