package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

func pfx(s string) netip.Prefix {
	if s == "" {
		return netip.Prefix{}
	}
	return netip.MustParsePrefix(s)
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// ours is the configuration of a cluster that kubeadm and flannel made, with the ExternalCIDR that
// Liqo chooses for it.
func ours() Config {
	return Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12"), ExternalCIDR: pfx("10.245.0.0/16")}
}

func configured(t *testing.T, c Config) State {
	t.Helper()
	b, conflicts := State{}.Configure(c)
	if len(conflicts) > 0 {
		t.Fatalf("%+v: conflicts: %v", c, conflicts)
	}
	return b
}

// claim returns a request with consent, in which any network is allowed.
func claim(id, pod, external string) Request {
	return Request{ID: id, Pod: pfx(pod), External: pfx(external), Allowed: everywhere, Consented: true}
}

var everywhere = []netip.Prefix{pfx("0.0.0.0/0"), pfx("::/0")}

func allocate(t *testing.T, b State, c Request) (State, Allocation) {
	t.Helper()
	b, g, err := b.Allocate(c)
	if err != nil {
		t.Fatalf("%+v: %v", c, err)
	}
	return b, g
}

// The expected networks are the recorded ones of docs/liqo-v0.md, section 5.
func TestAllocateReturnsTheNetworksRecordedFromLiqo(t *testing.T) {
	for _, tc := range []struct {
		name   string
		config Config
		claims [][2]string
		want   string // our ExternalCIDR, then the pod and external network of each peer
	}{
		{"identical clusters", ours(), [][2]string{{"10.244.0.0/16", "10.245.0.0/16"}, {"10.244.0.0/16", "10.245.0.0/16"}},
			"10.245.0.0/16 10.246.0.0/16 10.247.0.0/16 10.240.0.0/16 10.241.0.0/16"},
		{"another PodCIDR", Config{PodCIDR: pfx("10.200.0.0/20"), ServiceCIDR: pfx("10.96.0.0/12")}, [][2]string{{"10.200.0.0/20", "10.200.16.0/20"}},
			"10.200.16.0/20 10.200.32.0/20 10.200.48.0/20"},
		{"nothing overlaps, in a pool and outside of all", ours(), [][2]string{{"10.50.0.0/16", "10.51.0.0/16"}, {"100.64.0.0/18", "192.0.2.0/24"}},
			"10.245.0.0/16 10.50.0.0/16 10.51.0.0/16 100.64.0.0/18 192.0.2.0/24"},
		{"a mask of its own", ours(), [][2]string{{"10.244.128.0/20", "10.245.0.0/24"}}, "10.245.0.0/16 10.246.0.0/20 10.246.16.0/24"},
		{"a whole pool is remapped if possible", ours(), [][2]string{{"192.168.0.0/16", "192.0.2.0/24"}}, "10.245.0.0/16 10.246.0.0/16 192.0.2.0/24"},
		{"and used whole if not", Config{PodCIDR: pfx("10.0.0.0/9"), ServiceCIDR: pfx("10.128.0.0/9"), ExternalCIDR: pfx("172.16.0.0/12"), Pools: defaultPools()[:3]},
			[][2]string{{"192.168.0.0/16", "100.64.0.0/16"}}, "172.16.0.0/12 192.168.0.0/16 100.64.0.0/16"},
		{"pools in their order", Config{PodCIDR: pfx("10.0.0.0/16"), ServiceCIDR: pfx("10.1.0.0/16"), ExternalCIDR: pfx("192.168.0.0/16"), Pools: append([]netip.Prefix{pfx("10.0.0.0/15")}, defaultPools()[1:]...)},
			[][2]string{{"10.0.0.0/16", "10.1.0.0/16"}}, "192.168.0.0/16 172.16.0.0/16 172.17.0.0/16"},
		{"an ExternalCIDR of our own length", Config{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12")},
			[][2]string{{"10.244.0.0/16", "10.245.0.0/20"}, {"10.244.0.0/16", "10.245.0.0/20"}}, "10.245.0.0/20 10.246.0.0/16 10.245.16.0/20 10.247.0.0/16 10.245.32.0/20"},
		{"IPv6 used unchanged", ours(), [][2]string{{"fd01::/48", "fd02::/64"}}, "10.245.0.0/16 fd01::/48 fd02::/64"},
		{"IPv6 with a pool", Config{PodCIDR: pfx("fd01::/48"), ServiceCIDR: pfx("fd03::/112"), Pools: []netip.Prefix{pfx("fd10::/16")}},
			[][2]string{{"fd01::/48", "fd10::/48"}}, "fd10::/48 fd10:0:1::/48 fd10:0:2::/48"},
	} {
		b := configured(t, tc.config)
		got := []string{b.Own().ExternalCIDR.String()}
		for i, c := range tc.claims {
			var g Allocation
			b, g = allocate(t, b, claim(fmt.Sprint("peer-", i), c[0], c[1]))
			got = append(got, g.Pod.String(), g.External.String())
		}
		if strings.Join(got, " ") != tc.want {
			t.Errorf("%s:\n got: %s\nwant: %s", tc.name, strings.Join(got, " "), tc.want)
		}
	}
}

func TestAllocateAvoidsNodesWithoutChangingOtherAllocations(t *testing.T) {
	c := ours()
	for i := range 20 {
		c.Nodes = append(c.Nodes, netip.AddrFrom4([4]byte{10, 0, byte(i), 7}))
	}
	b := configured(t, c)
	if got := b.Own().ExternalCIDR; got != pfx("10.245.0.0/16") {
		t.Errorf("ExternalCIDR %v", got)
	}
	c.Nodes = []netip.Addr{addr("10.246.3.4"), addr("10.247.0.1")}
	b = configured(t, c)
	b, g := allocate(t, b, claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	if g != (Allocation{pfx("10.240.0.0/16"), pfx("10.241.0.0/16")}) {
		t.Errorf("with nodes in 10.246 and 10.247: %v", g)
	}
	_, g = allocate(t, b, claim("c", "10.246.0.0/16", "10.250.0.0/16"))
	if g.Pod == pfx("10.246.0.0/16") || g.External != pfx("10.250.0.0/16") {
		t.Errorf("a network with a node in it: %v", g)
	}
}

func TestAllocateKeepsNetworksWhileFamilyAndLengthFit(t *testing.T) {
	b, first := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	again, g := allocate(t, b, claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	if g != first || len(again.Changed(b)) > 0 {
		t.Errorf("the same claim: %v, changed %v", g, again.Changed(b))
	}
	if _, g = allocate(t, b, claim("b", "10.50.0.0/16", "10.51.0.0/16")); g != first {
		t.Errorf("other networks of the same length: %v, want %v as before", g, first)
	}
	longer, g := allocate(t, b, claim("b", "10.50.0.0/18", "10.51.0.0/16"))
	if g.Pod != pfx("10.50.0.0/18") || g.External != first.External {
		t.Errorf("a longer PodCIDR: %v", g)
	}
	if _, g = allocate(t, longer, claim("c", "10.246.0.0/16", "10.52.0.0/16")); g.Pod != pfx("10.246.0.0/16") {
		t.Errorf("what was given up is not free: %v", g)
	}
	if _, g = allocate(t, b, claim("b", "fd01::/64", "fd02::/64")); g.Pod != pfx("fd01::/64") {
		t.Errorf("another family: %v", g)
	}
}

func TestAllocateUsesTheNetworksOfOverrides(t *testing.T) {
	b := configured(t, ours())
	want := claim("b", "10.244.0.0/16", "10.60.0.0/16")
	want.WantPod, want.WantExternal = pfx("10.60.0.0/16"), pfx("203.0.0.0/16") // WantPod is the claimed ExternalCIDR, which would otherwise stay unchanged
	b, g := allocate(t, b, want)
	if g != (Allocation{want.WantPod, want.WantExternal}) {
		t.Fatalf("got %v", g)
	}
	if _, g = allocate(t, b, claim("b", "10.244.0.0/16", "10.60.0.0/16")); g.Pod != want.WantPod {
		t.Errorf("no wish any more, yet it moved: %v", g)
	}
	want.WantPod = pfx("10.61.0.0/16")
	if _, g = allocate(t, b, want); g != (Allocation{want.WantPod, want.WantExternal}) {
		t.Errorf("another wish: %v", g)
	}

	for name, tc := range map[string]struct{ want, reason, message string }{
		"ours":          {"10.96.0.0/16", v1alpha1.ReasonCIDRConflict, "our ServiceCIDR, 10.96.0.0/12"},
		"of a peer":     {"10.60.0.0/16", v1alpha1.ReasonCIDRConflict, "the pods of another peer, 10.60.0.0/16"},
		"special":       {"169.254.0.0/16", v1alpha1.ReasonInvalid, "overlaps 169.254.0.0/16 (link-local)"},
		"other length":  {"10.70.0.0/17", v1alpha1.ReasonInvalid, "want a /16"},
		"other family":  {"fd00::/16", v1alpha1.ReasonInvalid, "family"},
		"host bits set": {"10.70.0.1/16", v1alpha1.ReasonInvalid, "want 10.70.0.0/16"},
	} {
		c := claim("c", "10.244.0.0/16", "10.245.0.0/16")
		c.WantPod = pfx(tc.want)
		next, g, err := b.Allocate(c)
		var refusal *fabric.Refusal
		if !errors.As(err, &refusal) || refusal.Reason != tc.reason || refusal.Field != "spec.overrides.podCIDR" ||
			!strings.Contains(refusal.Message, tc.message) {
			t.Errorf("%s: %#v", name, err)
		}
		if g != (Allocation{}) || len(next.Changed(b)) > 0 {
			t.Errorf("%s: half applied: %v", name, g)
		}
	}
}

func TestAllocateRefusesInvalidRequests(t *testing.T) {
	b := configured(t, ours())
	for _, tc := range []struct{ id, pod, external, field string }{
		{"b", "0.0.0.0/0", "10.245.0.0/16", "spec.podCIDR"},
		{"b", "10.244.0.1/16", "10.245.0.0/16", "spec.podCIDR"},
		{"b", "127.0.0.0/16", "10.245.0.0/16", "spec.podCIDR"},
		{"b", "10.244.0.0/16", "169.254.0.0/24", "spec.externalCIDR"},
		{"b", "10.244.0.0/16", "224.0.0.0/8", "spec.externalCIDR"},
		{"b", "10.244.0.0/31", "10.245.0.0/16", "spec.podCIDR"},
		{"b", "10.244.0.0/16", "", "spec.externalCIDR"},
		{"b", "10.244.0.0/16", "10.244.128.0/24", "spec.externalCIDR"},
		{"b", "10.244.0.0/16", "fd00::/64", "spec.externalCIDR"},
		{"b", "::ffff:10.244.0.0/112", "fd00::/64", "spec.podCIDR"},
		{"", "10.244.0.0/16", "10.245.0.0/16", "cluster ID"},
		{strings.Repeat("x", 1<<20), "10.244.0.0/16", "10.245.0.0/16", "cluster ID"},
	} {
		next, g, err := b.Allocate(claim(tc.id, tc.pod, tc.external))
		var refusal *fabric.Refusal
		if !errors.As(err, &refusal) || refusal.Field != tc.field || refusal.Reason != v1alpha1.ReasonInvalid || len(err.Error()) > 500 {
			t.Errorf("%.20q %s %s: %v", tc.id, tc.pod, tc.external, err)
		}
		if g != (Allocation{}) || len(next.Peers()) > 0 {
			t.Errorf("%.20q %s %s: applied", tc.id, tc.pod, tc.external)
		}
	}
}

func exhausted(err error) bool {
	var refusal *fabric.Refusal
	return errors.As(err, &refusal) && refusal.Reason == v1alpha1.ReasonExhausted
}

func TestExhaustedPoolsRefuseUntilAPeerIsReleased(t *testing.T) {
	c := ours()
	c.Pools = []netip.Prefix{pfx("172.20.0.0/14")} // room for four networks
	c.ExternalCIDR = pfx("10.245.0.0/16")
	b := configured(t, c)
	b, _ = allocate(t, b, claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	b, _ = allocate(t, b, claim("c", "10.244.0.0/16", "10.100.0.0/16"))
	before := b.Spec()
	next, g, err := b.Allocate(claim("d", "10.50.0.0/16", "10.245.0.0/16"))
	var refusal *fabric.Refusal
	if !errors.As(err, &refusal) || refusal.Reason != v1alpha1.ReasonExhausted || refusal.Field != "spec.externalCIDR" {
		t.Fatalf("got %v %v", g, err)
	}
	if !reflect.DeepEqual(next.Spec(), before) {
		t.Errorf("half applied: %+v", next.Spec())
	}
	if usage := b.Usage(); len(usage) != 1 || usage[0] != (PoolUsage{c.Pools[0], 0, 4 << 16}) {
		t.Errorf("usage %v", usage)
	}
	if _, g, err = b.Release("c").Allocate(claim("d", "10.50.0.0/16", "10.245.0.0/16")); err != nil || g != (Allocation{pfx("10.50.0.0/16"), pfx("172.22.0.0/16")}) {
		t.Errorf("after a release: %v %v", g, err)
	}
	c.Pools = append(c.Pools, pfx("172.24.0.0/16"))
	larger, _ := b.Configure(c)
	if _, g, err = larger.Allocate(claim("d", "10.50.0.0/16", "10.245.0.0/16")); err != nil || g.External != pfx("172.24.0.0/16") {
		t.Errorf("after another pool: %v %v", g, err)
	}
}

// The API server takes requests of 3 MiB, and etcd values of 1.5 MiB.
func TestNumberOfPeersIsLimitedBySizeOfTheObject(t *testing.T) {
	full := configured(t, ours()).Spec()
	for i := range MaxPeers {
		network := func(first byte) string { return fmt.Sprintf("%d.%d.%d.0/24", first, i>>8, i&0xff) }
		full.ClusterSubnets[fmt.Sprintf("%08x-0000-4000-8000-000000000000", i)] = v1alpha1.Subnets{
			RemotePodCIDR: network(11), RemoteExternalCIDR: network(12), LocalNATPodCIDR: "100.127.0.0/16", LocalNATExternalCIDR: "100.126.0.0/16",
		}
	}
	b, err := Read(&full)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Allocate(claim("one-more", "10.50.0.0/24", "10.51.0.0/24")); !exhausted(err) {
		t.Errorf("got %v", err)
	}
	if n := len(b.Answered("one-more", pfx("10.1.0.0/16"), pfx("10.2.0.0/16")).Peers()); n != MaxPeers {
		t.Errorf("%d peers by an answer", n)
	}
	spec := b.Spec()
	if _, err := Read(&spec); err != nil {
		t.Error(err)
	}
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d octets, %.0f for each peer", len(text), float64(len(text))/MaxPeers)
	if n := len(text) + 64<<10; n > 3<<19 {
		t.Errorf("%d octets for %d peers; want at most 1.5 MiB, with room for annotations", n, MaxPeers)
	}
}

func TestConfigureReportsConflictsAndKeepsAllocations(t *testing.T) {
	b, before := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.50.0.0/16"))
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"PodCIDR":     {func(c *Config) { c.PodCIDR = pfx("10.246.0.0/17") }, "PodCIDR of peer b, 10.246.0.0/16 here, overlaps our PodCIDR, 10.246.0.0/17"},
		"ServiceCIDR": {func(c *Config) { c.ServiceCIDR = pfx("10.50.4.0/24") }, "ExternalCIDR of peer b, 10.50.0.0/16 here, overlaps our ServiceCIDR, 10.50.4.0/24"},
		"reserved":    {func(c *Config) { c.Reserved = []netip.Prefix{pfx("10.246.0.0/24")} }, "PodCIDR of peer b, 10.246.0.0/16 here, overlaps a reserved network, 10.246.0.0/24"},
		"node":        {func(c *Config) { c.Nodes = []netip.Addr{addr("10.50.0.9")} }, "ExternalCIDR of peer b, 10.50.0.0/16 here, overlaps the address of a node or an API server, 10.50.0.9/32"},
		"network of a node": {func(c *Config) { c.Reached = []Reached{{Prefix: pfx("10.246.16.0/20"), Node: "n1"}} },
			"PodCIDR of peer b, 10.246.0.0/16 here, overlaps a network of node n1, 10.246.16.0/20"},
		"around us": {func(c *Config) { c.Reached = []Reached{{Prefix: pfx("10.240.0.0/14"), Node: "n1"}} }, ""},
		"DNS server": {func(c *Config) { c.Reached = []Reached{{Prefix: pfx("10.50.0.53/32"), Node: "n1", Resolver: true}} },
			"ExternalCIDR of peer b, 10.50.0.0/16 here, overlaps a DNS server of node n1, 10.50.0.53/32"},
		"ours":    {func(c *Config) { c.ServiceCIDR = pfx("10.245.4.0/24") }, "our ExternalCIDR, 10.245.0.0/16 here, overlaps our ServiceCIDR, 10.245.4.0/24"},
		"pools":   {func(c *Config) { c.Pools = []netip.Prefix{} }, ""},
		"nothing": {func(*Config) {}, ""},
	} {
		c := ours()
		tc.change(&c)
		changed, conflicts := b.Configure(c)
		var got []string
		for _, c := range conflicts {
			got = append(got, c.String())
		}
		if strings.Join(got, "; ") != tc.want {
			t.Errorf("%s:\n got: %s\nwant: %s", name, strings.Join(got, "; "), tc.want)
		}
		if g, _ := changed.AllocationOf("b"); g != before || changed.Own().ExternalCIDR != pfx("10.245.0.0/16") {
			t.Errorf("%s: renumbered: %v, ExternalCIDR %v", name, g, changed.Own().ExternalCIDR)
		}
		if back, conflicts := changed.Configure(ours()); len(conflicts) > 0 || !same(back, b) {
			t.Errorf("%s and back is not what it was: %v", name, conflicts)
		}
	}
}

func TestExternalCIDRChangesOnlyIfItConflicts(t *testing.T) {
	b := configured(t, ours())
	for _, c := range []Config{
		{PodCIDR: pfx("10.200.0.0/16"), ServiceCIDR: pfx("10.245.0.0/16")},   // covers the ExternalCIDR
		{PodCIDR: pfx("fd00::/64"), Pools: []netip.Prefix{pfx("fd10::/48")}}, // pools of another family
	} {
		moved := configured(t, c)
		if next, conflicts := b.Configure(c); len(conflicts) > 0 || next.Own().ExternalCIDR != moved.Own().ExternalCIDR {
			t.Errorf("%v: %v, want %v; %v", c, next.Own().ExternalCIDR, moved.Own().ExternalCIDR, conflicts)
		}
	}
	if next, _ := b.Configure(Config{PodCIDR: pfx("10.244.0.0/18")}); next.Own().ExternalCIDR != pfx("10.245.0.0/16") {
		t.Errorf("it is in nobody's way, and has become %v", next.Own().ExternalCIDR)
	}
	none, conflicts := State{}.Configure(Config{PodCIDR: pfx("fd00::/48")})
	if none.Own().ExternalCIDR.IsValid() || len(conflicts) != 1 || !strings.Contains(conflicts[0].String(), "no ExternalCIDR: no /48 is free") {
		t.Errorf("no IPv6 pool: %v, %v", none.Own(), conflicts)
	}
	if early, conflicts := (State{}).Configure(Config{}); len(conflicts) > 0 || early.Own().ExternalCIDR.IsValid() {
		t.Errorf("nothing known: %v", conflicts)
	}
}

func TestConfigureIgnoresTheOrderOfReservedNetworksAndNodes(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	c := ours()
	for range 20 {
		c.Reserved = append(c.Reserved, randNetwork(rng, 24))
		c.Nodes = append(c.Nodes, netip.AddrFrom4([4]byte{10, byte(rng.Uint32()), 1, 1}))
	}
	b, _ := State{}.Configure(c)
	rng.Shuffle(20, func(i, j int) {
		c.Reserved[i], c.Reserved[j] = c.Reserved[j], c.Reserved[i]
		c.Nodes[i], c.Nodes[j] = c.Nodes[j], c.Nodes[i]
	})
	if other, _ := (State{}).Configure(c); !same(b, other) {
		t.Error("the order of reserved networks or nodes shows")
	}
	three := []Request{claim("b", "10.244.0.0/16", "10.245.0.0/16"), claim("c", "10.244.0.0/20", "10.9.0.0/24"), claim("d", "100.64.0.0/11", "10.10.0.0/16")}
	for _, c := range three {
		b, _ = allocate(t, b, c)
	}
	x, y := b.Release("b").Release("d"), b.Release("d").Release("b")
	if !same(x, y) {
		t.Error("the order of releases shows")
	}
}

// The test runs random sequences of all operations of a State.
func TestRandomOperationsKeepTheStateValid(t *testing.T) {
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 2))
		config := randConfig(rng, 24)
		b, _ := State{}.Configure(config)
		var replay func(State) State
		for range 150 {
			id := fmt.Sprint("peer-", rng.IntN(12))
			ip := netip.AddrFrom4([4]byte{198, 18, 0, byte(rng.IntN(40))})
			before, spec := b, b.Spec()
			switch rng.IntN(10) {
			case 0:
				replay = func(b State) State { return b.Release(id) }
			case 1:
				next := randConfig(rng, 24)
				replay = func(b State) State { b, _ = b.Configure(next); return b }
			case 2, 3:
				pod, external := randNetwork(rng, 24), randNetwork(rng, 24)
				if own := b.own; rng.IntN(2) == 0 && own.PodCIDR.IsValid() && own.ExternalCIDR.IsValid() {
					pod, external = netip.PrefixFrom(pod.Addr(), own.PodCIDR.Bits()).Masked(), netip.PrefixFrom(external.Addr(), own.ExternalCIDR.Bits()).Masked()
				}
				replay = func(b State) State { return b.Answered(id, pod, external) }
			case 4, 5:
				replay = func(b State) State { b, _, _ = b.MapEndpoint(id, ip); return b }
			case 6:
				replay = func(b State) State { return b.UnmapEndpoint(id, ip) }
			default:
				c := Request{ID: id, Pod: randNetwork(rng, 24), External: randNetwork(rng, 24)}
				if rng.IntN(5) == 0 {
					c.WantPod = netip.PrefixFrom(randNetwork(rng, 24).Addr(), c.Pod.Bits()).Masked()
				}
				replay = func(b State) State {
					had, _ := b.AllocationOf(c.ID)
					next, g, err := b.Allocate(c)
					if err == nil && g != had {
						checkAllocation(t, b, c, had, g)
					}
					return next
				}
			}
			b = replay(before)
			if !same(b, replay(before)) {
				t.Fatalf("seed %d: the same question has two answers", seed)
			}
			if !reflect.DeepEqual(before.Spec(), spec) {
				t.Fatalf("seed %d: an older State changed", seed)
			}
			checkState(t, b)
			if have, want := Delta(before, b); reflect.DeepEqual(have, want) != reflect.DeepEqual(spec, b.Spec()) || len(want.ClusterSubnets) > len(b.peers) {
				t.Errorf("Delta has %+v and %+v for\n%+v and\n%+v", have, want, spec, b.Spec())
			}
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
	}
}

// checkAllocation checks each new network against all others, with simple code.
func checkAllocation(t *testing.T, b State, c Request, had, got Allocation) {
	t.Helper()
	if got.Pod.Bits() != c.Pod.Bits() || got.External.Bits() != c.External.Bits() || got.Pod.Overlaps(got.External) {
		t.Errorf("%+v got %v", c, got)
	}
	for _, n := range []struct{ had, got netip.Prefix }{{had.Pod, got.Pod}, {had.External, got.External}} {
		if n.had == n.got {
			continue
		}
		for id := range b.peers {
			if g, _ := b.AllocationOf(id); id != c.ID && (g.Pod.Overlaps(n.got) || g.External.Overlaps(n.got)) {
				t.Errorf("%v of %s overlaps %v of %s", n.got, c.ID, g, id)
			}
		}
		for _, p := range append([]netip.Prefix{b.own.PodCIDR, b.own.ServiceCIDR, b.own.ExternalCIDR}, append(b.own.Reserved, special...)...) {
			if p.Overlaps(n.got) {
				t.Errorf("%v of %s overlaps %v", n.got, c.ID, p)
			}
		}
	}
}

// checkState checks the networks in the State's text, and that the text represents the whole State.
func checkState(t *testing.T, b State) {
	t.Helper()
	spec := b.Spec()
	back, err := Read(&spec)
	if err != nil {
		t.Errorf("what Spec writes, Read refuses: %v", err)
		return
	}
	back.own.Nodes, back.own.Reached = b.own.Nodes, b.own.Reached
	back.fill()
	if again := restarted(t, b); true {
		again.own.Nodes, again.own.Reached = b.own.Nodes, b.own.Reached
		if again.fill(); !same(b, again) || !reflect.DeepEqual(b.Clusters(), again.Clusters()) {
			t.Errorf("FromAllocations makes another State:\n%+v\n%+v", spec, again.Spec())
		}
		for _, id := range b.Clusters() {
			if !reflect.DeepEqual(b.Allocation(id), again.Allocation(id)) {
				t.Errorf("%+v\nbecomes\n%+v", b.Allocation(id), again.Allocation(id))
			}
		}
	}
	if !same(b, back) {
		t.Errorf("Read(Spec(b)) is another State:\n%+v\n%+v", spec, back.Spec())
	}
	for _, id := range b.Peers() {
		nm, ok := b.NatMapping(id)
		if s := spec.ClusterSubnets[id]; ok != (s.RemotePodCIDR != "" && s.LocalNATExternalCIDR != "") {
			t.Errorf("NatMapping of %s: %v, but %+v", id, ok, s)
		}
		values := make(map[string]bool)
		for _, seen := range nm.ClusterMappings {
			if values[seen] || !pfx(nm.ExternalCIDR).Contains(addr(seen)) {
				t.Errorf("NatMapping of %s: %s is used twice or outside of %s", id, seen, nm.ExternalCIDR)
			}
			values[seen] = true
		}
	}
}

// same compares all parts of two States, including the shape of the trees, which depends only on
// their contents.
func same(a, b State) bool {
	if !reflect.DeepEqual(a.Spec(), b.Spec()) || !slices.Equal(a.own.Nodes, b.own.Nodes) {
		return false
	}
	for _, trees := range [][2]tree{{a.taken, b.taken}, {a.nodes, b.nodes}, {a.addresses, b.addresses}} {
		if !reflect.DeepEqual(trees[0], trees[1]) {
			return false
		}
	}
	return reflect.DeepEqual(a.endpoints, b.endpoints) || len(a.endpoints)+len(b.endpoints) == 0
}

func TestChangedReturnsOnlyChangedPeers(t *testing.T) {
	b := configured(t, ours())
	for _, id := range []string{"b", "c", "d"} {
		b, _ = allocate(t, b, claim(id, "10.244.0.0/16", "10.245.0.0/16"))
		b = b.Answered(id, pfx("10.1.0.0/16"), pfx("10.2.0.0/16"))
	}
	next, _, err := b.MapEndpoint("c", addr("198.51.100.1"))
	if err != nil {
		t.Fatal(err)
	}
	next, _ = allocate(t, next.Release("b"), claim("e", "10.9.0.0/16", "10.8.0.0/16"))
	if got := next.Changed(b); !slices.Equal(got, []string{"b", "c", "e"}) {
		t.Errorf("changed: %v", got)
	}
	if again, _ := next.Configure(next.Own()); len(again.Changed(next)) > 0 {
		t.Errorf("the same configuration changed %v", again.Changed(next))
	}
}

func TestAPeerWithoutNetworksHasNoConflicts(t *testing.T) {
	if got := (State{}).ConflictsOf("nobody"); got != nil {
		t.Errorf("%v", got)
	}
}
