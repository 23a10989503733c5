package kernel_test

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
	. "github.com/isthmus-net/isthmus/internal/kernel" //nolint:revive // nearly every line uses the package
)

var (
	localPods      = netip.MustParsePrefix("10.64.0.0/14")
	remotePods     = netip.MustParsePrefix("10.246.0.0/16")
	remoteExternal = netip.MustParsePrefix("10.250.16.0/20")
)

// node returns the desired state of the second of three nodes, with the gateway at the given
// address.
func node(t *testing.T, gateway string) State {
	t.Helper()
	in := fabric.NodeIntent{Self: "n2"}
	for i, name := range []string{"n1", "n2", "n3"} {
		b := byte(i + 1)
		in.Nodes = append(in.Nodes, fabric.ClusterNode{Name: name, Addrs: []netip.Addr{netip.AddrFrom4([4]byte{172, 30, 1, b})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 64, b, 0}), 24)}})
	}
	in.Tunnels = []fabric.Tunnel{{Gateway: netip.MustParseAddr(gateway), Peer: fabric.Peer{
		ID: "b", Endpoint: "192.0.2.1", Port: 5871, PublicKey: [32]byte{9},
		Local: fabric.Networks{Pod: localPods, PodSeen: localPods,
			External: netip.MustParsePrefix("10.84.0.0/14"), ExternalSeen: netip.MustParsePrefix("10.84.0.0/14")},
		Remote: fabric.Networks{Pod: remotePods, PodSeen: remotePods, External: remoteExternal, ExternalSeen: remoteExternal},
	}}}
	n, problems := fabric.NodeFor(in)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return n
}

func TestPlanIsEmptyForEqualStatesAndCompleteForAnEmptyOne(t *testing.T) {
	for _, gateway := range []string{"172.30.1.1", "172.30.1.2"} {
		n := node(t, gateway)
		if p := PlanFor(n, n); len(p) > 0 {
			t.Errorf("for itself:\n%s", p.Commands(""))
		}
		if got := PlanFor(State{}, n).Commands(""); got != n.String() {
			t.Errorf("for nothing:\n%s\nwant\n%s", got, n)
		}
	}
}

func TestPlanRemovesRulesAndRoutesBeforeDevices(t *testing.T) {
	p := PlanFor(node(t, "172.30.1.1"), State{})
	order := []string{"ip rule del", "ip route del", "ip link del", "iptables-nft", "nft"} // objects on a device disappear with it
	at := 0
	for line := range strings.Lines(p.Commands("")) {
		for at < len(order) && !strings.HasPrefix(line, order[at]) {
			at++
		}
		if at == len(order) {
			t.Fatalf("%sis out of order in\n%s", line, p.Commands(""))
		}
	}
	if at != len(order)-1 {
		t.Errorf("incomplete:\n%s", p.Commands(""))
	}
}

// When the gateway moves to our node or away from it, all additions come before all removals, and
// no other object changes.
func TestPlanAddsBeforeItRemovesWhenTheGatewayMoves(t *testing.T) {
	without, with := node(t, "172.30.1.1"), node(t, "172.30.1.2")
	for _, p := range []Plan{PlanFor(without, with), PlanFor(with, without)} {
		first := slices.IndexFunc(p, func(o Op) bool { return o.Remove })
		last := len(p) - 1
		for last >= 0 && p[last].Remove {
			last--
		}
		if first <= last || strings.Contains(p.Commands(""), "ip link") || strings.Contains(p.Commands(""), "240.0.0.0/8") {
			t.Errorf("\n%s", p.Commands(""))
		}
	}
	other := node(t, "172.30.1.3") // if the gateway moves between two other nodes, two routes are replaced in place
	if p := PlanFor(without, other); len(p) != 2 || strings.Count(p.Commands(""), "ip route replace") != 2 {
		t.Errorf("\n%s", p.Commands(""))
	}
}

func TestPlanRecreatesAnUnchangeableDevice(t *testing.T) {
	want := node(t, "172.30.1.1")
	have := node(t, "172.30.1.1")
	have.Devices = []Device{{Name: OverlayDevice, VXLAN: VXLAN{ID: 7, Port: 4801, Local: want.Devices[0].VXLAN.Local, Learning: true}}}
	p := PlanFor(have, want)
	got := p.Commands("")
	if !strings.HasPrefix(got, "ip link del isthmus.vxlan\nip link add isthmus.vxlan type vxlan id 4200 ") {
		t.Errorf("\n%s", got)
	}
	for _, again := range []string{"ip addr replace 240.30.1.2/8", "ip neigh replace 240.30.1.3", "bridge fdb replace", "ip route replace 10.246.0.0/16 via"} {
		if !strings.Contains(got, again) {
			t.Errorf("no %q, which went with the device, in\n%s", again, got)
		}
	}
	for _, stays := range []string{"unreachable", "ip rule"} {
		if strings.Contains(got, stays) {
			t.Errorf("%q, which stayed, in\n%s", stays, got)
		}
	}
}

// With returns the state that a complete read of the kernel would return after the additions.
func TestWithEqualsAReadAfterTheAdditions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	routes := func(n int) (all []Route) {
		seen := make(map[Route]bool)
		for range n {
			r := Route{In: Namespace(rng.IntN(2)), Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(rng.IntN(6)), 0, 0}), 16), Table: NodeTable + rng.IntN(2), Metric: rng.IntN(2)}
			if !seen[r] {
				seen[r] = true
				r.Dev = []string{"a", "b"}[rng.IntN(2)]
				all = append(all, r)
			}
		}
		return all
	}
	for range 2000 {
		have, want := State{Routes: routes(12)}, State{Routes: routes(6)}
		if rng.IntN(2) == 0 {
			slices.SortFunc(have.Routes, Route.Compare)
		}
		now, ok := have.With(AdditionsFor(have, want))
		if !ok || !slices.IsSortedFunc(now.Routes, Route.Compare) {
			t.Fatalf("%v, %v", now.Routes, ok)
		}
		key := func(r Route) Route { r.Dev = ""; return r }
		expected := make(map[Route]Route)
		for _, r := range slices.Concat(have.Routes, want.Routes) {
			expected[key(r)] = r
		}
		got := make(map[Route]Route)
		for _, r := range now.Routes {
			got[key(r)] = r
		}
		if len(got) != len(now.Routes) || !maps.Equal(got, expected) {
			t.Fatalf("%v with %v is %v", have.Routes, want.Routes, now.Routes)
		}
	}
}
