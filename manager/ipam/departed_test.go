package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A Liqo peer keeps the first answer that it got, so its networks here must not change.
func TestAReturningPeerGetsItsNetworksBack(t *testing.T) {
	b, had := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	b = b.Release("b")
	b, other := allocate(t, b, claim("c", "10.244.0.0/16", "10.245.0.0/16"))
	if other.Pod.Overlaps(had.Pod) || other.Pod.Overlaps(had.External) || other.External.Overlaps(had.Pod) || other.External.Overlaps(had.External) {
		t.Errorf("c has %v, though there is more than what b had, %v", other, had)
	}
	b = restarted(t, b)
	b, again := allocate(t, b, claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	if again != had {
		t.Errorf("b has %v, before it left it had %v", again, had)
	}
	if _, away := b.PreviousOf("b"); away || b.Allocation("b").Previous != nil {
		t.Errorf("b is back and still remembered: %v", b.Allocation("b").Previous)
	}
}

// restarted returns the State as a restarted manager reads it from the NetworkAllocations.
func restarted(t testing.TB, b State) State {
	t.Helper()
	networks := b.own.Networks()
	own, err := ConfigFrom(&networks)
	if err != nil {
		t.Fatal(err)
	}
	var all []isthmus.NetworkAllocationSpec
	for _, id := range b.Clusters() {
		spec := b.Allocation(id)
		spec.Revision = int64(slices.IndexFunc(b.departed, func(f departed) bool { return f.ID == id }))
		all = append(all, spec)
	}
	read, wrong := FromAllocations(own, all)
	if wrong != nil {
		t.Fatal(wrong)
	}
	return read
}

func TestReturningPeerGetsPreviousNetworksOnlyIfFreeAndPermitted(t *testing.T) {
	b, had := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.50.0.0/16"))
	left := b.Release("b")

	taken, _ := allocate(t, left, claim("c", had.Pod.String(), "10.51.0.0/16")) // c claims b's former network, which is free
	if g, _ := taken.AllocationOf("c"); g.Pod != had.Pod {
		t.Fatalf("a free claim is not used unchanged: %v", g)
	}
	_, again := allocate(t, taken, claim("b", "10.244.0.0/16", "10.50.0.0/16"))
	if again.Pod.Overlaps(had.Pod) || again.External != had.External {
		t.Errorf("b has %v; want another network for pods, and %v", again, had.External)
	}

	remap := claim("b", "10.244.0.0/16", "10.50.0.0/16")
	remap.AlwaysRemap = true
	if _, g := allocate(t, left, remap); g.Pod != had.Pod || g.External == had.External {
		t.Errorf("with alwaysRemap: %v", g)
	}
	request := claim("b", "10.244.0.0/16", "10.50.0.0/16")
	request.WantPod = pfx("10.60.0.0/16")
	if _, g := allocate(t, left, request); g.Pod != request.WantPod {
		t.Errorf("with an override: %v", g)
	}
	if _, g := allocate(t, left, claim("b", "10.244.0.0/18", "10.50.0.0/16")); g.Pod.Bits() != 18 {
		t.Errorf("another length: %v", g)
	}
}

func TestNetworksOfFormerPeersAreReusedBeforeExhaustion(t *testing.T) {
	c := ours()
	c.Pools, c.ExternalCIDR = append(c.Pools, pfx("10.246.0.0/15")), pfx("10.245.0.0/16")
	b, had := allocate(t, configured(t, c), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	_, g := allocate(t, b.Release("b"), claim("c", "10.244.0.0/16", "10.245.0.0/16"))
	if g != had {
		t.Errorf("c has %v; want what b had, %v, since there is nothing else", g, had)
	}
}

func TestOldestFormerPeersAreForgottenFirst(t *testing.T) {
	b := configured(t, ours())
	for i := range maxDeparted + 10 {
		id := fmt.Sprintf("%063d", i)
		b, _ = allocate(t, b, claim(id, "fd00::/64", "fd01::/64"))
		b = b.Release(id)
	}
	if _, known := b.PreviousOf(fmt.Sprintf("%063d", 9)); known || len(b.departed) != maxDeparted {
		t.Errorf("%d are remembered, the tenth among them: %v; want the latest %d", len(b.departed), known, maxDeparted)
	}
	if _, known := b.PreviousOf(fmt.Sprintf("%063d", 10)); !known {
		t.Error("the eleventh is forgotten")
	}
	if again := restarted(t, b); !slices.Equal(again.departed, b.departed) {
		t.Errorf("after a restart: %d, the first %v", len(again.departed), again.departed[0])
	}
}

func TestAllocationAvoidsMetadataServices(t *testing.T) {
	c := ours()
	c.Pools, c.ExternalCIDR = append(c.Pools, pfx("100.100.0.0/16")), pfx("10.245.0.0/16")
	b := configured(t, c)
	for i := range 1000 {
		next, g, err := b.Allocate(claim(fmt.Sprint("peer-", i), "10.244.0.0/24", "10.245.0.0/24"))
		if err != nil {
			break
		}
		if g.Pod.Contains(addr("100.100.100.200")) || g.External.Contains(addr("100.100.100.200")) {
			t.Fatalf("peer %d has %v", i, g)
		}
		b = next
	}
	if n := len(b.Peers()); n != 127 { // the ServiceCIDR occupies one of 256 networks
		t.Errorf("%d peers have networks; want 127", n)
	}
}

// Left equals the number of further peers with the same claim that Allocate accepts.
func TestLeftReturnsTheNumberOfFurtherAllocations(t *testing.T) {
	for _, c := range []Config{
		ours(),
		{PodCIDR: pfx("10.0.0.0/14"), ServiceCIDR: pfx("10.96.0.0/12")},
		{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12"), ExternalCIDR: pfx("10.245.0.0/16")},
		{PodCIDR: pfx("10.244.0.0/16"), ServiceCIDR: pfx("10.96.0.0/12"), Nodes: []netip.Addr{addr("10.3.0.1"), addr("10.7.0.1"), addr("172.18.0.9")}},
	} {
		b := configured(t, c)
		claimed := claim("", c.PodCIDR.String(), b.Own().ExternalCIDR.String())
		left, n := b.Left(), 0
		for ; ; n++ {
			claimed.ID = fmt.Sprint("peer-", n)
			next, _, err := b.Allocate(claimed)
			if err != nil {
				break
			}
			b = next
		}
		if float64(n) > left || float64(n) < 0.97*left {
			t.Errorf("%v and %v: %v are left by Left, %d got networks", c.PodCIDR, claimed.External, left, n)
		}
		if b.Left() > left/20 {
			t.Errorf("%v: nobody gets anything, and %v are left by Left", c.PodCIDR, b.Left())
		}
	}
	if n := (State{}).Left(); n != 0 {
		t.Errorf("%v are left of nothing", n)
	}
}

func TestAThousandPeersWithTheSamePodCIDRGetNetworks(t *testing.T) {
	c := ours()
	for _, pool := range strings.Fields("10.0.0.0/8 172.16.0.0/12 100.64.0.0/10 11.0.0.0/8 21.0.0.0/8 22.0.0.0/8 26.0.0.0/8") {
		c.Pools = append(c.Pools, pfx(pool))
	}
	b := configured(t, c)
	for i := range 1000 {
		b, _ = allocate(t, b, claim(fmt.Sprint("peer-", i), "10.244.0.0/16", "10.245.0.0/20"))
	}
	if n := len(b.Peers()); n != 1000 || b.Left() < 1 {
		t.Errorf("%d peers, %v left", n, b.Left())
	}
}
