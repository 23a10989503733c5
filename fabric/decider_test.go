package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// A Decider with any history computes the same as a new one.
func TestADeciderDoesNotDependOnItsHistory(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var d Decider
	in := manyPeers(20)
	networks := func(n int) (all []netip.Prefix) {
		for range n {
			all = append(all, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(4)), byte(rng.IntN(8)), 0}), 20+rng.IntN(5)).Masked())
		}
		if rng.IntN(8) == 0 {
			all = append(all, pfx("fd00:1::/64"))
		}
		return all
	}
	for step := range 2000 {
		switch rng.IntN(10) {
		case 0:
			in.Allocated = append(slices.Clone(in.Allocated), networks(1+rng.IntN(2))...)
		case 1:
			if len(in.Allocated) > 0 {
				at := rng.IntN(len(in.Allocated))
				in.Allocated = slices.Delete(slices.Clone(in.Allocated), at, at+1)
			}
		case 2:
			in.Allocated = networks(rng.IntN(5))
		case 3, 4:
			in.Gateway = []netip.Addr{{}, ip("10.244.2.254"), ip("10.244.3.254"), ip("10.244.9.9")}[rng.IntN(4)]
		case 5:
			in.Nodes = slices.Clone(in.Nodes)
			in.Nodes[0].Addrs = []netip.Addr{ip([]string{"172.30.1.11", "172.30.1.99", "10.1.2.3"}[rng.IntN(3)])}
		case 6:
			in.Self = []string{"n1", "n1", "n7"}[rng.IntN(3)]
		case 7:
			in.OnlyPods = rng.IntN(3) > 0
		case 8:
			in.UnderlayMTU, in.UnderlayDevices = 1400+rng.IntN(3), []string{fmt.Sprintf("eth%d", rng.IntN(2))}
		case 9:
			in.Bridges = []string{"cni0"}[:rng.IntN(2)]
		}
		if rng.IntN(2) == 0 {
			in.Sort()
		}
		got, problems := d.NodeFor(in)
		want, wantProblems := NodeFor(in)
		if !slices.IsSortedFunc(got.Routes, kernel.Route.Compare) {
			t.Fatalf("step %d: routes are in no order:\n%v", step, got)
		}
		if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(problems, wantProblems) {
			t.Fatalf("step %d: of %+v\n%v\nwant\n%v", step, in, got, want)
		}
	}
}
