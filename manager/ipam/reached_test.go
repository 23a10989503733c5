package ipam

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// No allocation overlaps a network that nodes reach. Existing allocations stay when nodes reach
// more.
func TestAllocationsAvoidNetworksReachedByNodes(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 1))
	for range 60 {
		c := ours()
		c.ExternalCIDR = netip.Prefix{}
		for range 1 + rng.IntN(12) {
			c.Reached = append(c.Reached, Reached{Prefix: randNetwork(rng, 32), Node: "n1"})
		}
		b, _ := State{}.Configure(c)
		if !b.Own().ExternalCIDR.IsValid() || slices.ContainsFunc(c.Reached, func(r Reached) bool { return r.Prefix.Overlaps(b.Own().ExternalCIDR) }) {
			t.Fatalf("ExternalCIDR %v beside %v", b.Own().ExternalCIDR, c.Reached)
		}
		var had Allocation
		for i := range 12 {
			r := claim(string(rune('a'+i)), randNetwork(rng, 24).String(), randNetwork(rng, 24).String())
			next, g, err := b.Allocate(r)
			if err != nil {
				continue
			}
			for _, reached := range c.Reached {
				if g.Pod.Overlaps(reached.Prefix) || g.External.Overlaps(reached.Prefix) {
					t.Fatalf("%+v got %v, and a node reaches %v", r, g, reached.Prefix)
				}
			}
			if b = next; i == 0 {
				had = g
			}
		}
		c.Reached = append(c.Reached, Reached{Prefix: netip.MustParsePrefix("0.0.0.0/1"), Node: "n2"})
		b, _ = b.Configure(c)
		if now, _ := b.AllocationOf("a"); now != had {
			t.Fatalf("a has %v, had %v", now, had)
		}
	}
}

func TestMergeReachedKeepsTheWidestNetworks(t *testing.T) {
	got := MergeReached([]Reached{
		{pfx("192.168.7.53/32"), "n1", true}, {pfx("10.9.0.0/16"), "n2", false}, {pfx("192.168.7.0/24"), "n3", false}, {pfx("10.9.0.0/16"), "n1", false},
		{pfx("192.168.8.53/32"), "n2", true}, {pfx("192.168.8.53/32"), "n3", false}, {pfx("10.10.0.0/16"), "n1", false}, {pfx("fd00::/48"), "n1", false},
	})
	want := []Reached{{pfx("10.9.0.0/16"), "n1", false}, {pfx("10.10.0.0/16"), "n1", false}, {pfx("192.168.7.0/24"), "n3", false}, {pfx("192.168.8.53/32"), "n3", false},
		{pfx("fd00::/48"), "n1", false}}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}
