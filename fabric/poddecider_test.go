package fabric

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
)

// A PodDecider with any history computes the same as a new one: with independent nodes, and with
// nodes that conflict with each other, with pods and with peers.
func TestAPodDeciderDoesNotDependOnItsHistory(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	followed, anew := 0, 0
	for round := range 60 {
		crowded := 256 // number of networks that the nodes share; few cause conflicts
		if round%3 == 0 {
			crowded = 6
		}
		addr := func(first int) netip.Addr {
			return netip.AddrFrom4([4]byte{byte(first), byte(rng.IntN(2)), byte(rng.IntN(crowded)), byte(rng.IntN(4))})
		}
		addrs := func(first, most int) (all []netip.Addr) {
			for range rng.IntN(most + 1) {
				all = append(all, addr(first))
			}
			return all
		}
		node := func(i int) ClusterNode {
			n := ClusterNode{Name: fmt.Sprintf("n%02d", i), Created: int64(rng.IntN(3)), Addrs: append(addrs(172, 1), addr(172))}
			for range 1 + rng.IntN(2) {
				n.PodCIDRs = append(n.PodCIDRs, netip.PrefixFrom(addr(10), 22+rng.IntN(10)))
			}
			n.Sources = addrs(10, 2)
			n.Sources = append(n.Sources, n.PodCIDRs[0].Masked().Addr())
			switch hop := ip("172.9.9.9"); i {
			case 0:
				n.Routes = []NodeRoute{{pfx("198.18.7.0/24"), hop}}
			case 1:
				n.Addrs = append(n.Addrs, hop)
			}
			switch rng.IntN(20) {
			case 0:
				n.Addrs = nil
			case 1:
				n.Addrs = append(n.Addrs, ip("fd00::7"), netip.Addr{})
			case 2:
				n.PodCIDRs = append(n.PodCIDRs, pfx("fd00::/120"), netip.Prefix{})
			case 3:
				n.Addrs = append(n.Addrs, addr(10))
			case 4:
				n.Addrs = append(n.Addrs, addr(100))
			}
			return n
		}
		var peers []*GatewayPeer
		for i := range 5 {
			peers = append(peers, &GatewayPeer{ID: fmt.Sprint(i), Local: Networks{Pod: pfx("10.0.0.0/15")},
				AllowedIPs: [2]netip.Prefix{netip.PrefixFrom(addr(100), 24).Masked(), netip.PrefixFrom(addr(101), 24).Masked()}})
		}
		if rng.IntN(4) == 0 {
			peers[0].Local.Pod = netip.PrefixFrom(addr(10), 24).Masked()
		}
		var d PodDecider
		in := PodNetwork{Pod: addr(10), Node: "n00", Trusted: rng.IntN(3) > 0}
		mtu := 1340
		inUse := map[string]TunnelSet{}
		another := func() *GatewayPeer { // replaces a peer by a copy, and returns the copy
			i := rng.IntN(5)
			p := *peers[i]
			peers = slices.Clone(peers)
			peers[i] = &p
			return peers[i]
		}
		for step := range 150 {
			switch rng.IntN(40) {
			case 0:
				another().AllowedIPs[0] = netip.PrefixFrom(addr(100), 24).Masked()
			case 1:
				in.Trusted = !in.Trusted
			case 2:
				in.Pods = append(slices.Clone(in.Pods), NodePod{Name: "d/p", Addr: addr(10), Node: fmt.Sprintf("n%02d", rng.IntN(30)), Created: 1})
			case 3:
				in.Pods = nil
			case 4:
				in.Pod = addr(10)
			case 5:
				mtu++
			case 6:
				another().Port++
			case 7:
				p := another()
				p.Origin.Name, p.AllowedIPs[1] = fmt.Sprint(step), pfx("fd00:9::/64") // IPv6, which causes a Problem
			case 8:
				inUse[peers[rng.IntN(5)].ID]++
			default:
				in.Nodes = slices.Clone(in.Nodes)
				for range 1 + rng.IntN(3) {
					n := node(rng.IntN(30))
					at, has := slices.BinarySearchFunc(in.Nodes, n, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
					switch {
					case !has:
						in.Nodes = slices.Insert(in.Nodes, at, n)
					case rng.IntN(2) == 0:
						in.Nodes = slices.Delete(in.Nodes, at, at+1)
					default:
						in.Nodes[at] = n
					}
				}
			}
			rules := d.state.Rules
			got, problems := d.GatewayPodFor(peers, inUse, mtu, 2, 1400, in)
			if sameList(rules, got.Rules) {
				followed++
			} else {
				anew++
			}
			want, wantProblems := GatewayPodFor(peers, inUse, mtu, 2, 1400, in)
			if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(problems, wantProblems) {
				t.Fatalf("round %d, step %d: of %+v\n%v\n%v\nwant\n%v\n%v", round, step, in, got, problems, want, wantProblems)
			}
		}
	}
	if followed < 1000 || anew < 1000 {
		t.Errorf("%d times a change was followed, %d times all was decided anew; want 1000 of each", followed, anew)
	}
}
