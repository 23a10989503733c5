package fabric

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// Whatever a Decider decided before, it decides as one that knows nothing.
func TestADeciderDecidesAsANewOne(t *testing.T) {
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
			in.Granted = append(slices.Clone(in.Granted), networks(1+rng.IntN(2))...)
		case 1:
			if len(in.Granted) > 0 {
				at := rng.IntN(len(in.Granted))
				in.Granted = slices.Delete(slices.Clone(in.Granted), at, at+1)
			}
		case 2:
			in.Granted = networks(rng.IntN(5))
		case 3:
			in.Doubtful = networks(rng.IntN(3))
		case 4:
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

// However objects change, come and go, what is read one by one is what is read at once.
func TestSharesAreWhatAllOfThemSay(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var s Shares
	objects := make(map[int]isthmus.GrantedNetworks)
	version := 0
	for step := range 2000 {
		for range rng.IntN(3) {
			name := rng.IntN(6)
			if rng.IntN(4) == 0 {
				delete(objects, name)
				continue
			}
			version++
			o := isthmus.GrantedNetworks{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(name), UID: "u", ResourceVersion: fmt.Sprint(version)}}
			if rng.IntN(10) == 0 {
				o.ResourceVersion = "" // nobody says that it is another
			}
			o.Spec.Peers = make(map[string]isthmus.PeerNetworks)
			for range rng.IntN(4) {
				o.Spec.Peers[fmt.Sprint(rng.IntN(9))] = isthmus.PeerNetworks{fmt.Sprintf("10.%d.0.0/16", rng.IntN(5)), []string{"11.1.0.0/16", "nonsense", "fd00::/64"}[rng.IntN(3)]}
			}
			objects[name] = o
		}
		var all []isthmus.GrantedNetworks
		for _, o := range objects { // in any order
			all = append(all, o)
		}
		got, id, problems := s.Read(all)
		want, wantProblems := GrantedInShares(all)
		slices.SortFunc(want, netip.Prefix.Compare)
		if want = slices.Compact(want); !slices.Equal(got, want) || id != GrantsID(want) || !reflect.DeepEqual(SortProblems(problems), SortProblems(wantProblems)) {
			t.Fatalf("step %d: %v, %s, %v; want %v, %s, %v", step, got, id, problems, want, GrantsID(want), wantProblems)
		}
	}
}
