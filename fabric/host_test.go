package fabric

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// hostState returns the desired state of a gateway with the given number of tunnels and one peer
// for every two networks. All peers use the same tunnels.
func hostState(mtu, tunnels int, inUse TunnelSet, networks ...string) kernel.State {
	var peers []*GatewayPeer
	sets := make(map[string]TunnelSet)
	for pair := range slices.Chunk(networks, 2) {
		peers = append(peers, &GatewayPeer{ID: pair[0], AllowedIPs: [2]netip.Prefix{pfx(pair[0]), pfx(pair[1])}})
		sets[pair[0]] = inUse
	}
	return GatewayHostFor(peers, sets, mtu, tunnels)
}

var (
	four  = []string{"10.246.0.0/16", "10.247.0.0/16"}
	mixed = append(four, "fd00:1::/48", "fd00:2::/56")
)

// fresh returns the state of a new namespace with the given number of open TUNs.
func fresh(tunnels int) (s kernel.State) {
	for i := range tunnels {
		s.Links = append(s.Links, kernel.Link{In: kernel.Inner, Name: TunName(i), MTU: 1420})
	}
	return s
}

// removeObjects returns s without the objects for which unwanted returns true.
func removeObjects(s kernel.State, unwanted func(in kernel.Namespace, dev string) bool) kernel.State {
	s.Devices = slices.DeleteFunc(slices.Clone(s.Devices), func(v kernel.Device) bool { return unwanted(v.In, v.Name) })
	s.Settings = slices.DeleteFunc(slices.Clone(s.Settings), func(v kernel.Setting) bool {
		return slices.ContainsFunc(strings.Split(v.Path, "/"), func(part string) bool { return unwanted(v.In, part) })
	})
	s.Links = slices.DeleteFunc(slices.Clone(s.Links), func(v kernel.Link) bool { return unwanted(v.In, v.Name) })
	s.Addresses = slices.DeleteFunc(slices.Clone(s.Addresses), func(v kernel.Address) bool { return unwanted(v.In, v.Dev) })
	s.Neighbors = slices.DeleteFunc(slices.Clone(s.Neighbors), func(v kernel.Neighbor) bool { return unwanted(v.In, v.Dev) })
	s.Routes = slices.DeleteFunc(slices.Clone(s.Routes), func(v kernel.Route) bool { return unwanted(v.In, v.Dev) })
	return s
}

func isVeth(_ kernel.Namespace, dev string) bool {
	return dev == kernel.VethHost || dev == kernel.VethGateway
}

// leftover returns the state that a killed gateway leaves: rules, routes without a device, and for
// a moment the host's end of its veth with the objects on it.
func leftover(networks ...string) kernel.State {
	have := removeObjects(hostState(1440, 1, 0, networks...), func(in kernel.Namespace, _ string) bool { return in == kernel.Inner })
	have.Devices = []kernel.Device{{Name: kernel.VethHost}}
	have.Links = append(have.Links, fresh(1).Links...)
	return have
}

// golden compares got with testdata/NAME. There is no flag that updates the files: a plan is short
// enough to be edited by hand.
func golden(t *testing.T, name, got string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	if got != string(b) {
		t.Errorf("%s: got\n%s\nwant\n%s", name, got, b)
	}
}

func TestPlanPrintsShellCommands(t *testing.T) {
	one := hostState(1440, 1, 0, four...)
	for _, tc := range []struct {
		file       string
		have, want kernel.State
	}{
		{"plan-fresh.txt", fresh(1), one},
		{"plan-ipv6-peer.txt", one, hostState(1440, 1, 0, mixed...)},
		{"plan-peer-removed.txt", one, hostState(1440, 1, 0)},
		{"plan-mtu.txt", hostState(1440, 1, 0), hostState(1380, 1, 0)},
		{"plan-veth-lost.txt", removeObjects(one, isVeth), one},
		{"plan-leftover.txt", leftover(four...), one},
		{"plan-teardown.txt", one, kernel.State{}},
		{"plan-tunnels-fresh.txt", fresh(3), hostState(1440, 3, 0b101, mixed...)},
		{"plan-tunnel-found.txt", hostState(1440, 3, 0, mixed...), hostState(1440, 3, 0b111, mixed...)},
		{"plan-tunnel-lost.txt", hostState(1440, 3, 0b111, mixed...), hostState(1440, 3, 0b101, mixed...)},
		{"plan-first-tunnel-lost.txt", hostState(1440, 3, 0b111, mixed...), hostState(1440, 3, 0b110, mixed...)},
	} {
		golden(t, tc.file, kernel.PlanFor(tc.have, tc.want).Commands("/proc/1/fd/9"))
	}
}

// A gateway that stops leaves the same objects as a killed one, without the routes through its
// veth. Without peers it leaves nothing.
func TestStoppedGatewayHostLeavesOnlyUnreachableRoutes(t *testing.T) {
	peers := []*GatewayPeer{{ID: "b", AllowedIPs: [2]netip.Prefix{pfx("10.246.0.0/16"), pfx("fd00:1::/48")}}}
	const want = `ip route replace unreachable 10.246.0.0/16 table 4200 metric 420000 proto 71
ip -6 route replace unreachable fd00:1::/48 table 4200 metric 420000 proto 71
ip rule add priority 420 lookup 4200 protocol 71
ip -6 rule add priority 420 lookup 4200 protocol 71
`
	left := GatewayHostLeft(peers)
	if got := left.String(); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	// A stop only removes objects. A refusing route that had to be added would come too late.
	if p := kernel.AdditionsFor(GatewayHostFor(peers, nil, 1440, 1), left); len(p) > 0 {
		t.Errorf("\n%s", p.Commands("NS"))
	}
	if got := GatewayHostLeft(nil).String(); got != "" {
		t.Errorf("without peers\n%s", got)
	}
}

func TestGatewayHostIsIdempotent(t *testing.T) {
	for _, networks := range [][]string{nil, four, mixed} {
		for _, inUse := range []TunnelSet{0, 0b11, 0b10} {
			s := hostState(1400, 2, inUse, networks...)
			if p := kernel.PlanFor(s, hostState(1400, 2, inUse, networks...)); len(p) != 0 {
				t.Errorf("%v:\n%s", networks, p.Commands("NS"))
			}
		}
	}
}

func TestGatewayHostDoesNotDependOnTheOrderOfPeers(t *testing.T) {
	pairs := [][]string{{"10.1.0.0/16", "10.9.0.0/16"}, {"10.2.0.0/16", "10.8.0.0/16"}, {"fd00:1::/48", "10.3.0.0/16"}}
	want := kernel.PlanFor(fresh(1), hostState(1440, 1, 0, slices.Concat(pairs...)...)).Commands("NS")
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		rng.Shuffle(len(pairs), func(i, j int) { pairs[i], pairs[j] = pairs[j], pairs[i] })
		if got := kernel.PlanFor(fresh(1), hostState(1440, 1, 0, slices.Concat(pairs...)...)).Commands("NS"); got != want {
			t.Fatalf("%v:\n%s", pairs, got)
		}
	}
}

// After the loss of any single object, the plan adds exactly the objects that are missing.
func TestPlanRestoresAnySingleMissingObject(t *testing.T) {
	want := hostState(1440, 2, 0b10, mixed...)
	check := func(what any, have kernel.State, contains string) {
		p := kernel.PlanFor(have, want)
		if len(p) != 1 || !strings.Contains(p.Commands("NS"), contains) {
			t.Errorf("without %v:\n%s", what, p.Commands("NS"))
		}
	}
	for i, r := range want.Routes {
		have := want
		have.Routes = slices.Delete(slices.Clone(want.Routes), i, i+1)
		check(r.Prefix, have, "route replace")
	}
	for i, n := range want.Neighbors {
		have := want
		have.Neighbors = slices.Delete(slices.Clone(want.Neighbors), i, i+1)
		check(n, have, "nud permanent")
	}
	for i, r := range want.Rules {
		have := want
		have.Rules = slices.Delete(slices.Clone(want.Rules), i, i+1)
		check(r, have, "rule add")
	}
	for i, s := range want.Settings {
		have := want
		have.Settings = slices.Clone(want.Settings)
		have.Settings[i].Value = "7"
		check(s, have, "sysctl -w")
	}
}

// A remote prefix is routed inside the gateway before the host routes it there, and the host
// removes its route first. Otherwise packets would circle between the two namespaces.
func TestHostRouteNeverExistsWithoutTheInnerRoute(t *testing.T) {
	at := func(p kernel.Plan, remove bool, in kernel.Namespace) int {
		return slices.IndexFunc(p, func(o kernel.Op) bool {
			r, ok := o.Object.(kernel.Route)
			return ok && o.Remove == remove && r.In == in && r.Prefix == pfx(four[0]) && r.Type == kernel.Unicast
		})
	}
	with, without := hostState(1440, 1, 0, four...), hostState(1440, 1, 0)
	if p := kernel.PlanFor(without, with); at(p, false, kernel.Inner) < 0 || at(p, false, kernel.Inner) > at(p, false, kernel.Host) {
		t.Errorf("added:\n%s", p.Commands("NS"))
	}
	if p := kernel.PlanFor(with, without); at(p, true, kernel.Host) < 0 || at(p, true, kernel.Host) > at(p, true, kernel.Inner) {
		t.Errorf("removed:\n%s", p.Commands("NS"))
	}
}
