package gateway

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// prefixes are networks behind the first tunnel alone.
func prefixes(texts ...string) (all []remote) {
	for _, t := range texts {
		all = append(all, remote{prefix: netip.MustParsePrefix(t)})
	}
	return all
}

// shared are the same networks behind further tunnels too.
func shared(networks []remote, tunnels ...int) []remote {
	networks = slices.Clone(networks)
	for i := range networks {
		for _, t := range tunnels {
			networks[i].more = networks[i].more.with(t)
		}
	}
	return networks
}

// fresh is what a new namespace with open TUNs has.
func fresh(more ...string) hostState {
	s := hostState{links: []link{{side: gatewaySide, name: TunName, mtu: defaultMTU}}}
	for _, name := range more {
		s.links = append(s.links, link{side: gatewaySide, name: name, mtu: defaultMTU})
	}
	return s
}

// golden compares with testdata/NAME; -update is not offered, because a plan is
// short enough to be changed by hand, with thought.
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

func TestPlanPrintsTheCommandsAnOperatorCouldType(t *testing.T) {
	one, two := prefixes("10.246.0.0/16", "10.247.0.0/16"), prefixes("10.246.0.0/16", "10.247.0.0/16", "fd00:1::/48")
	for _, tc := range []struct {
		file       string
		have, want hostState
	}{
		{"plan-fresh.txt", fresh(), wantHost(one, 1440, 1)},
		{"plan-ipv6-peer.txt", wantHost(one, 1440, 1), wantHost(two, 1440, 1)},
		{"plan-peer-removed.txt", wantHost(one, 1440, 1), wantHost(nil, 1440, 1)},
		{"plan-mtu.txt", wantHost(nil, 1440, 1), wantHost(nil, 1380, 1)},
		{"plan-veth-lost.txt", wantHost(one, 1440, 1).without(hostSide, VethHost).without(gatewaySide, VethGateway).lost(), wantHost(one, 1440, 1)},
		{"plan-leftover.txt", leftover(one), wantHost(one, 1440, 1)},
		{"plan-teardown.txt", wantHost(one, 1440, 1), hostState{}},
		{"plan-tunnels-fresh.txt", fresh("isthmus1", "isthmus2"), wantHost(shared(two, 2), 1440, 3)},
		{"plan-tunnel-found.txt", wantHost(two, 1440, 3), wantHost(shared(two, 1, 2), 1440, 3)},
		{"plan-tunnel-lost.txt", wantHost(shared(two, 1, 2), 1440, 3), wantHost(shared(two, 2), 1440, 3)},
	} {
		golden(t, tc.file, planHost(tc.have, tc.want).Commands("/proc/1/fd/9"))
	}
}

func (s hostState) lost() hostState { s.veth = nil; return s }

// leftover is what a killed gateway leaves: rules, routes without a device, and
// for a moment the host's end of its veth with what hangs on it.
func leftover(remote []remote) hostState {
	s := wantHost(remote, 1440, 1)
	have := fresh()
	have.links = append(have.links, link{side: hostSide, name: VethHost, mtu: 1440, mac: macHost, up: true})
	have.rules = s.rules
	have.routes = deleted(s.routes, func(r route) bool { return r.side == gatewaySide })
	have.neighbors = deleted(s.neighbors, func(n neighbor) bool { return n.side == gatewaySide })
	have.sysctls = deleted(s.sysctls, func(c sysctl) bool { return c.side == gatewaySide })
	return have
}

func TestPlanForWhatIsThereIsEmpty(t *testing.T) {
	for _, remotes := range [][]remote{nil, prefixes("10.1.0.0/16"), prefixes("10.1.0.0/16", "fd00:1::/48"), shared(prefixes("10.1.0.0/16"), 1)} {
		if p := planHost(wantHost(remotes, 1400, 2), wantHost(remotes, 1400, 2)); len(p) != 0 {
			t.Errorf("%v:\n%s", remotes, p.Commands("NS"))
		}
	}
	if p := planHost(hostState{}, hostState{}); len(p) != 0 {
		t.Errorf("nothing:\n%s", p.Commands("NS"))
	}
}

func TestPlanDoesNotDependOnTheOrderOfPrefixes(t *testing.T) {
	remote := prefixes("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", "fd00:1::/48")
	want := planHost(fresh(), wantHost(remote, 1440, 1)).Commands("NS")
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		rng.Shuffle(len(remote), func(i, j int) { remote[i], remote[j] = remote[j], remote[i] })
		if got := planHost(fresh(), wantHost(remote, 1440, 1)).Commands("NS"); got != want {
			t.Fatalf("%v:\n%s", remote, got)
		}
	}
}

// Whatever part is missing, the plan brings exactly that back.
func TestPlanRestoresAnySingleLoss(t *testing.T) {
	want := wantHost(shared(prefixes("10.1.0.0/16", "fd00:1::/48"), 1), 1440, 2)
	check := func(what string, have hostState, contains string) {
		p := planHost(have, want)
		if len(p) != 1 || !strings.Contains(p.Commands("NS"), contains) {
			t.Errorf("without %s:\n%s", what, p.Commands("NS"))
		}
	}
	for i, r := range want.routes {
		have := want
		have.routes = slices.Delete(slices.Clone(want.routes), i, i+1)
		check(r.prefix.String(), have, "route replace")
	}
	for i := range want.neighbors {
		have := want
		have.neighbors = slices.Delete(slices.Clone(want.neighbors), i, i+1)
		check("neighbour", have, "nud permanent")
	}
	for i := range want.rules {
		have := want
		have.rules = slices.Delete(slices.Clone(want.rules), i, i+1)
		check("rule", have, "rule add")
	}
	for i := range want.sysctls {
		have := want
		have.sysctls = slices.Clone(want.sysctls)
		have.sysctls[i].value = "7"
		check("sysctl", have, "sysctl -w")
	}
}

// A remote prefix is routed inside before the host sends anything there, and the
// host stops before the inside does: else packets would circle between the two.
func TestPlanNeverLeavesTheHostRouteAlone(t *testing.T) {
	in := func(p plan, v verb, s side) int {
		return slices.IndexFunc(p, func(o op) bool {
			r, ok := o.object.(route)
			return ok && o.verb == v && r.side == s && r.prefix == netip.MustParsePrefix("10.1.0.0/16") && !r.unreachable
		})
	}
	with, without := wantHost(prefixes("10.1.0.0/16"), 1440, 1), wantHost(nil, 1440, 1)
	if p := planHost(without, with); in(p, add, gatewaySide) > in(p, add, hostSide) {
		t.Errorf("added:\n%s", p.Commands("NS"))
	}
	if p := planHost(with, without); in(p, remove, hostSide) > in(p, remove, gatewaySide) {
		t.Errorf("removed:\n%s", p.Commands("NS"))
	}
}
