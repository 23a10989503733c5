package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// After any sequence of changes, the results equal those computed from lists of all nodes and pods.
// A change that is not reported does not affect the result of Network.
func TestPodPlacesEqualAListOfAllNodesAndPods(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	own := ip("10.244.0.250")
	for round := range 300 {
		p := PodPlaces{Self: "n0"}
		nodes, pods, was := map[string]ClusterNode{}, map[string][]NodePod{}, map[string]string{}
		sources := map[string][]netip.Addr{}
		last, kept, reported := PodNetwork{}, []ClusterNode(nil), true
		for step := range 60 {
			name := fmt.Sprintf("n%d", rng.IntN(4))
			id := fmt.Sprintf("default/p%d", rng.IntN(8))
			var changed bool
			switch rng.IntN(7) {
			case 6:
				var all []netip.Addr
				for range rng.IntN(2) {
					all = append(all, netip.AddrFrom4([4]byte{192, 168, 0, byte(rng.IntN(3))}))
				}
				sources[name], changed = all, p.SetSources(name, all)
			case 0:
				n := ClusterNode{Name: name, Created: int64(rng.IntN(2)), Addrs: []netip.Addr{netip.AddrFrom4([4]byte{172, 30, 0, name[1]})}}
				if rng.IntN(4) > 0 {
					n.PodCIDRs = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 244, name[1] - '0', 0}), 24), pfx("fd00::/64")}
				}
				nodes[name], changed = n, p.SetNode(n)
			case 1:
				delete(nodes, name)
				changed = p.RemoveNode(name)
			case 2:
				changed = p.SetPod(id, was[id], "", nil)
				delete(pods, id)
				delete(was, id)
			default:
				var now []NodePod
				for range 1 + rng.IntN(2) {
					a := netip.AddrFrom4([4]byte{10, 244, name[1] - '0', byte(rng.IntN(3))})
					switch rng.IntN(8) {
					case 0:
						a = netip.AddrFrom4([4]byte{10, 244, 9, byte(rng.IntN(3))})
					case 1:
						a = netip.MustParseAddr("fd01::1")
					}
					now = append(now, NodePod{Name: id, Addr: a, Node: name, Created: 1})
				}
				changed = p.SetPod(id, was[id], name, now)
				pods[id], was[id] = now, name
			}
			want := PodNetwork{Pod: own, Node: "n0"}
			for _, n := range nodes {
				n.Sources = sources[n.Name]
				want.Nodes = append(want.Nodes, n)
			}
			for _, of := range pods {
				want.Pods = append(want.Pods, of...)
			}
			for _, a := range append(addrsOf(want), ip("10.9.9.9")) {
				if rng.IntN(4) == 0 { // sometimes, so that the index is built at different times
					if got, want := p.Owner(a), ownerIn(want, a); got != want {
						t.Fatalf("round %d, step %d: %v is of %+v, want %+v", round, step, a, got, want)
					}
				}
			}
			want = sorted(want)
			if len(want.Pods) == 0 {
				want.Pods = nil
			}
			got := p.Network(own)
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("round %d, step %d: got\n%+v\nwant\n%+v", round, step, got, want)
			}
			if reported = reported || changed; !reported && !reflect.DeepEqual(got, last) {
				t.Fatalf("round %d, step %d: nothing was reported, yet\n%+v\nis now\n%+v", round, step, last, got)
			}
			if !reflect.DeepEqual(last.Nodes, kept) {
				t.Fatalf("round %d, step %d: an earlier result was modified to %+v", round, step, last.Nodes)
			}
			last, kept, reported = got, slices.Clone(got.Nodes), false
		}
	}
}

func addrsOf(n PodNetwork) (all []netip.Addr) {
	for _, pod := range n.Pods {
		all = append(all, pod.Addr)
	}
	for _, node := range n.Nodes {
		all = append(all, node.Addrs...)
	}
	return all
}

// ownerIn computes the result of PodPlaces.Owner from lists of all nodes and pods.
func ownerIn(n PodNetwork, addr netip.Addr) (o Owner) {
	of := map[Owner]bool{}
	for _, pod := range n.Pods {
		if pod.Addr == addr {
			of[Owner{pod.Name, pod.Node}] = true
		}
	}
	for _, node := range n.Nodes {
		if slices.Contains(node.Addrs, addr) {
			of[Owner{Node: node.Name}] = true
		}
	}
	for o = range of {
		if len(of) > 1 {
			return Owner{}
		}
	}
	return o
}

func TestPodPlacesReturnAdditionalSourcesOfANode(t *testing.T) {
	p := PodPlaces{Self: "n0"}
	from := []netip.Addr{netip.MustParseAddr("10.244.9.64")}
	if !p.SetSources("n1", from) || p.SetSources("n1", from) {
		t.Error("a change was not reported, or an unchanged value was")
	}
	p.SetNode(ClusterNode{Name: "n0"})
	p.SetNode(ClusterNode{Name: "n1"})
	if n := p.Network(netip.Addr{}); n.Nodes[0].Sources != nil || !slices.Equal(n.Nodes[1].Sources, from) {
		t.Errorf("%+v", n.Nodes)
	}
	if !p.SetSources("n1", nil) {
		t.Error("the removal of sources was not reported")
	}
	if n := p.Network(netip.Addr{}); n.Nodes[1].Sources != nil {
		t.Errorf("%+v", n.Nodes)
	}
}

func TestPodPlacesReturnOnlyTheRoutesOfTheirOwnNode(t *testing.T) {
	p := PodPlaces{Self: "n0"}
	p.SetNode(ClusterNode{Name: "n0"})
	p.SetNode(ClusterNode{Name: "n1"})
	routes := []NodeRoute{{pfx("198.18.7.0/24"), ip("172.30.1.12")}}
	if p.SetRoutes("n1", routes) || !p.SetRoutes("n0", routes) || p.SetRoutes("n0", routes) {
		t.Error("a change was not reported, or an unchanged value was")
	}
	for range 2 {
		if n := p.Network(netip.Addr{}); !slices.Equal(n.Nodes[0].Routes, routes) || n.Nodes[1].Routes != nil {
			t.Errorf("%+v", n.Nodes)
		}
		p.RemoveNode("n0")
		p.SetNode(ClusterNode{Name: "n0"})
	}
	if !p.SetRoutes("n0", nil) || p.Network(netip.Addr{}).Nodes[0].Routes != nil {
		t.Error("the removal of routes was not reported")
	}
}
