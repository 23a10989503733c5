package ipam

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

var noon = time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)

func nobody(string) bool { return false }

func TestReleasedNetworksAreHeldForADay(t *testing.T) {
	b, had := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.50.0.0/16"))
	b = b.Answered("b", pfx("10.1.0.0/16"), pfx("10.2.0.0/16"))
	b, _, err := b.MapEndpoint("b", addr("198.51.100.7"))
	if err != nil {
		t.Fatal(err)
	}
	left := b.Part("b", noon)
	if _, has := left.AllocationOf("b"); has || left.ReleasedAt("b") != noon || takesBack(left, b) {
		t.Errorf("has %v, released at %v, taken back %v", has, left.ReleasedAt("b"), takesBack(left, b))
	}
	if _, mapped := left.NatMapping("b"); mapped || left.Mapped("b", addr("198.51.100.7")) || left.inUse() {
		t.Error("something of the peer is left beside its networks")
	}
	if again := left.Answered("b", pfx("10.1.0.0/16"), pfx("10.2.0.0/16")).Part("b", noon.Add(time.Hour)); len(again.Changed(left)) > 0 {
		t.Error("a peer that has left answers, or leaves once more")
	}
	left = restarted(t, left)

	// Another cluster does not get held networks; the same cluster does.
	_, other := allocate(t, left, claim("c", had.Pod.String(), "10.50.0.0/16"))
	for _, p := range []netip.Prefix{other.Pod, other.External} {
		if p.Overlaps(had.Pod) || p.Overlaps(had.External) {
			t.Errorf("c has %v of what is held, %v", other, had)
		}
	}
	wanted := claim("c", had.Pod.String(), "10.51.0.0/16")
	wanted.WantPod = had.Pod
	if _, _, err := left.Allocate(wanted); err == nil || !strings.Contains(err.Error(), "is held until 2026-11-26T12:00:00Z, because it was released by another peer, "+had.Pod.String()) {
		t.Errorf("an override: %v", err)
	}
	back, again := allocate(t, left, claim("b", "10.244.0.0/16", "10.50.0.0/16"))
	if again != had || !back.ReleasedAt("b").IsZero() || takesBack(back, left) || back.Allocation("b").ReleasedAt != "" {
		t.Errorf("b has %v again, had %v; noted %v", again, had, back.Allocation("b").ReleasedAt)
	}

	early, _ := left.Age(noon.Add(fabric.ReleaseHold-time.Second), nobody)
	if takesBack(early, left) {
		t.Error("a hold ends early")
	}
	over, _ := left.Age(noon.Add(fabric.ReleaseHold), nobody)
	if !takesBack(over, left) || len(over.NetworksOf("b")) > 0 || over.Allocation("b").ReleasedAt != "" {
		t.Errorf("after a day: %+v", over.Allocation("b"))
	}
	if _, g := allocate(t, over, claim("c", "10.50.0.0/16", "10.51.0.0/16")); g.External != pfx("10.51.0.0/16") || g.Pod != pfx("10.50.0.0/16") {
		t.Errorf("after a day c has %v", g)
	}
	if previous, _ := over.PreviousOf("b"); previous != had {
		t.Errorf("after a day b is remembered with %v", previous)
	}
}

func TestNetworksThatAPeerReplacesAreHeld(t *testing.T) {
	b, had := allocate(t, configured(t, ours()), claim("b", "10.50.0.0/16", "10.51.0.0/16"))
	shorter := claim("b", "10.50.0.0/17", "10.51.0.0/16") // inside its previous network
	shorter.Now = noon
	b, got := allocate(t, b, shorter)
	if want := []netip.Prefix{pfx("10.50.0.0/17"), had.External, had.Pod}; !slices.Equal(b.NetworksOf("b"), want) {
		t.Errorf("nodes refuse %v; want %v", b.NetworksOf("b"), want)
	}
	if len(b.ConflictsOf("b")) > 0 {
		t.Errorf("a peer is in its own way: %v", b.ConflictsOf("b"))
	}
	b = restarted(t, b)
	if _, g := allocate(t, b, claim("c", "10.50.128.0/17", "10.52.0.0/16")); g.Pod.Overlaps(had.Pod) {
		t.Errorf("c has %v of %v", g, had)
	}
	if same, g := allocate(t, b, shorter); g != got || len(same.Changed(b)) > 0 {
		t.Errorf("the same claim changes %v", same.Changed(b))
	}
	if back, g := allocate(t, b, claim("b", "10.50.0.0/16", "10.51.0.0/16")); g != had || len(back.NetworksOf("b")) != 2 {
		t.Errorf("the first claim again: %v, nodes refuse %v", g, back.NetworksOf("b"))
	}
	// The hold of the peer's previous networks counts from the time when it left, not from its return.
	other := claim("b", "10.60.0.0/17", "10.51.0.0/16")
	other.Now = noon.Add(time.Hour)
	back, _ := allocate(t, b.Part("b", noon), other)
	if got := back.replaced; !slices.Contains(got, replaced{"b", pfx("10.50.0.0/16"), noon}) {
		t.Errorf("held: %v", got)
	}
	over, _ := back.Age(noon.Add(25*time.Hour), func(string) bool { return true })
	if len(over.NetworksOf("b")) != 2 || !takesBack(over, back) {
		t.Errorf("after a day nodes refuse %v", over.NetworksOf("b"))
	}

	for i := range 20 { // a refusal with its reason ends this loop
		c := claim("d", fmt.Sprintf("10.%d.0.0/%d", 70+i, 16+i%2), "10.200.0.0/24")
		c.Now = noon
		next, _, err := b.Allocate(c)
		if err != nil {
			if i < maxReplacedPerPeer || !strings.Contains(err.Error(), "held") {
				t.Errorf("%d: %v", i, err)
			}
			return
		}
		if b = next; len(b.NetworksOf("d")) > 16 {
			t.Fatal("more networks than a share may have")
		}
	}
	t.Error("no bound")
}

// A network of ours begins to overlap a peer's network. An administrator deletes the peering and
// makes it again, as the condition Ready advises. Nodes stop refusing the peer's network at once.
func TestPeerNetworksThatOverlapOursAreNotHeld(t *testing.T) {
	peered, had := allocate(t, configured(t, ours()), claim("b", "10.50.0.0/16", "10.51.0.0/16"))
	for name, change := range map[string]func(*Config){
		"a node":                     func(c *Config) { c.Nodes = []netip.Addr{addr("10.49.0.1"), addr("10.50.3.4"), addr("192.0.2.1")} },
		"the PodCIDR":                func(c *Config) { c.PodCIDR = pfx("10.50.128.0/17") },
		"Services of another subnet": func(c *Config) { c.Reserved = []netip.Prefix{pfx("10.32.0.0/11")} },
	} {
		c := ours()
		change(&c)
		external := []netip.Prefix{had.External}
		if name == "Services of another subnet" {
			external = nil // the reserved network overlaps both networks of the peer
		}
		conflict, _ := peered.Configure(c)
		if same, ended := conflict.Yield(); len(ended) > 0 || len(same.Changed(conflict)) > 0 || len(conflict.ConflictsOf("b")) == 0 {
			t.Errorf("%s: a peer that is there yields %v", name, ended)
		}
		left := conflict.Part("b", noon)
		if got := left.NetworksOf("b"); !slices.Equal(got, external) || !takesBack(left, conflict) {
			t.Errorf("%s: nodes refuse %v after un-peering; want %v", name, got, external)
		}
		left, _ = restarted(t, left).Configure(c)
		again := claim("b", "10.50.0.0/16", "10.51.0.0/16")
		again.Now = noon.Add(time.Minute)
		back, g := allocate(t, left, again)
		if got := back.NetworksOf("b"); g.Pod.Overlaps(had.Pod) || slices.Contains(got, had.Pod) || len(external) > 0 && len(got) != 2 {
			t.Errorf("%s: peered again b has %v, and nodes refuse %v", name, g, got)
		}

		// The peer got another network without leaving, or had left before the change.
		other := claim("b", "10.60.0.0/16", "10.51.0.0/16")
		other.WantPod, other.Now = pfx("10.60.0.0/16"), noon
		moved, _ := allocate(t, peered, other)
		for when, b := range map[string]State{"it has others": moved, "it left": peered.Part("b", noon)} {
			changed, _ := b.Configure(c)
			for _, next := range []func() State{
				func() State { b, _ := changed.Yield(); return b },
				func() State { b, _ := changed.Age(noon, func(string) bool { return true }); return b },
			} {
				if b := next(); slices.Contains(b.NetworksOf("b"), had.Pod) || !takesBack(b, changed) {
					t.Errorf("%s, %s: nodes refuse %v", name, when, b.NetworksOf("b"))
				}
			}
		}
	}
	// A network that nodes reach is foreign and does not end the hold.
	c := ours()
	c.Reached = []Reached{{Prefix: had.Pod, Node: "n1"}}
	left, _ := peered.Part("b", noon).Configure(c)
	if same, ended := left.Yield(); len(ended) > 0 || len(same.NetworksOf("b")) != 2 {
		t.Errorf("a network that a node reaches: %v", ended)
	}
}

func TestExhaustionErrorNamesWhenAHeldNetworkBecomesFree(t *testing.T) {
	c := ours()
	c.Pools, c.ExternalCIDR = []netip.Prefix{pfx("10.246.0.0/15")}, pfx("10.245.0.0/16")
	b, _ := allocate(t, configured(t, c), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	_, _, err := b.Part("b", noon).Allocate(claim("c", "10.244.0.0/16", "10.50.0.0/16"))
	if !exhausted(err) || !strings.Contains(err.Error(), "10.246.0.0/16 was released and is free at 2026-11-26T12:00:00Z, 1 more later") {
		t.Errorf("%v", err)
	}
}

func TestUnreferencedPeersAreReleasedAfterADay(t *testing.T) {
	b, had := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	named := func(id string) bool { return id == "b" }
	if same, _ := b.Age(noon, named); len(same.Changed(b)) > 0 {
		t.Error("a peer that is named changes")
	}
	b, _ = b.Age(noon, nobody)
	b = restarted(t, b) // a restart does not reset the time
	if again, _ := b.Age(noon.Add(time.Hour), nobody); len(again.Changed(b)) > 0 {
		t.Error("the time begins anew")
	}
	if back, _ := b.Age(noon.Add(time.Hour), named); back.Allocation("b").UnusedSince != "" {
		t.Errorf("named again: %v", back.Allocation("b").UnusedSince)
	}
	// The peer gets its networks again at the moment when they would be released.
	back, _ := allocate(t, b, claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	if _, abandoned := back.Age(noon.Add(UnusedGrace), nobody); len(abandoned) > 0 {
		t.Error("a peer that has just got its networks is released")
	}
	b, abandoned := b.Age(noon.Add(UnusedGrace), nobody)
	if !slices.Equal(abandoned, []string{"b"}) || b.ReleasedAt("b") != noon.Add(UnusedGrace) || !slices.Equal(b.NetworksOf("b"), []netip.Prefix{had.Pod, had.External}) {
		t.Errorf("released %v at %v, nodes refuse %v", abandoned, b.ReleasedAt("b"), b.NetworksOf("b"))
	}
	if b, _ = b.Age(noon.Add(UnusedGrace+fabric.ReleaseHold), nobody); len(b.Peers()) > 0 {
		t.Errorf("left: %v", b.Peers())
	}
}

// If an API server's clock was ahead, holds must neither last longer nor end early.
func TestReleaseTimesInTheFutureCountAsNow(t *testing.T) {
	b, _ := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	b = b.Part("b", noon.AddDate(10, 0, 0))
	if b, _ = b.Age(noon, nobody); b.ReleasedAt("b") != noon {
		t.Errorf("released at %v", b.ReleasedAt("b"))
	}
}

// A peer that replaces its networks again and again reaches its own bound long before the total
// bound.
func TestReplacementsByOnePeerLeaveRoomForOthers(t *testing.T) {
	b := configured(t, ours())
	change := func(id string, i, bits int, now time.Time) error {
		c := claim(id, fmt.Sprintf("10.%d.0.0/%d", i, bits), fmt.Sprintf("10.%d.128.0/24", i))
		c.Now = now
		next, _, err := b.Allocate(c)
		b = next
		return err
	}
	for i := range 20 {
		var err error
		for bits := 17; bits <= 17+maxReplacedPerPeer && err == nil; bits++ {
			err = change(fmt.Sprint("hostile-", i), 20+i, bits, noon.Add(time.Duration(bits)*time.Minute))
		}
		if err != nil {
			t.Fatal(err)
		}
		const when = "change them after 2026-11-26T12:18:00Z" // when the first of its own networks becomes free
		if err := change(fmt.Sprint("hostile-", i), 20+i, 28, noon.Add(time.Hour)); !exhausted(err) || !strings.Contains(err.Error(), when) {
			t.Fatalf("%v; want %s", err, when)
		}
	}
	for bits := 17; bits <= 18; bits++ {
		if err := change("honest", 60, bits, noon); err != nil {
			t.Errorf("another peer: %v", err)
		}
	}

	b.replaced = nil
	for i := range maxReplaced {
		n := netip.MustParsePrefix(fmt.Sprintf("fd00:1111:2222:3333:4444:5555:%x:0/112", 0x1000+i))
		b.replaced = append(b.replaced, replaced{fmt.Sprintf("%063d", i), n, noon.Add(time.Duration(i) * time.Second)})
	}
	if again := restarted(t, b); len(again.replaced) != maxReplaced {
		t.Errorf("read again %d", len(again.replaced))
	}
	if err := change("honest", 60, 19, noon); !exhausted(err) || !strings.Contains(err.Error(), "change them after 2026-11-26T12:00:00Z") {
		t.Errorf("beyond the bound of all: %v", err)
	}
	// A hold does not end if there is no room to keep the other network held.
	left, _ := allocate(t, b, claim("left", "10.70.0.0/16", "10.71.0.0/16"))
	c := ours()
	c.Nodes = []netip.Addr{addr("10.70.0.1")}
	left, _ = left.Part("left", noon).Configure(c)
	if same, ended := left.Yield(); len(ended) > 0 || len(same.NetworksOf("left")) != 2 {
		t.Errorf("without room ends %v", ended)
	}
}

func TestInvalidAllocationsAreLeftOut(t *testing.T) {
	b, _ := allocate(t, configured(t, ours()), claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	good, at := b.Allocation("b"), isthmus.UTCTimeOf(noon)
	seen := &isthmus.NetworkPair{PodCIDR: "10.1.0.0/16", ExternalCIDR: "10.2.0.0/16"}
	for name, tc := range map[string]struct {
		spec isthmus.NetworkAllocationSpec
		want string
	}{
		"no cluster":          {isthmus.NetworkAllocationSpec{}, "spec.clusterID"},
		"one network":         {isthmus.NetworkAllocationSpec{ClusterID: "c", Networks: []string{"10.66.0.0/16"}}, "spec.networks: has 1"},
		"of two families":     {isthmus.NetworkAllocationSpec{ClusterID: "c", Networks: []string{"10.66.0.0/16", "fd00::/64"}}, "one family"},
		"nothing for pods":    {isthmus.NetworkAllocationSpec{ClusterID: "c", Networks: []string{"169.254.0.0/16", "10.66.0.0/16"}}, "spec.networks"},
		"another's":           {isthmus.NetworkAllocationSpec{ClusterID: "c", Networks: []string{good.Networks[0], "10.66.0.0/16"}}, "overlaps another"},
		"nothing held":        {isthmus.NetworkAllocationSpec{ClusterID: "c", Held: []isthmus.HeldNetwork{{Network: "x", ReleasedAt: at}}}, "spec.held"},
		"a time":              {isthmus.NetworkAllocationSpec{ClusterID: "c", UnusedSince: "2026-11-28T24:00:00Z"}, "spec.unusedSince"},
		"an answer":           {isthmus.NetworkAllocationSpec{ClusterID: "c", Seen: &isthmus.NetworkPair{PodCIDR: "x"}}, "spec.seen"},
		"an endpoint":         {isthmus.NetworkAllocationSpec{ClusterID: "c", Seen: seen, Endpoints: []isthmus.MappedEndpoint{{IP: "x", Address: "10.245.0.9"}}}, "spec.endpoints[0]"},
		"an address":          {isthmus.NetworkAllocationSpec{ClusterID: "c", Seen: seen, Endpoints: []isthmus.MappedEndpoint{{IP: "198.51.100.7", Address: "10.9.0.9"}}}, "cannot be the address of an endpoint"},
		"an address of two":   {isthmus.NetworkAllocationSpec{ClusterID: "c", Seen: seen, Endpoints: []isthmus.MappedEndpoint{{IP: "198.51.100.7", Address: "10.245.0.9"}, {IP: "198.51.100.8", Address: "10.245.0.9"}}}, "another endpoint"},
		"two addresses of it": {isthmus.NetworkAllocationSpec{ClusterID: "c", Seen: seen, Endpoints: []isthmus.MappedEndpoint{{IP: "198.51.100.7", Address: "10.245.0.8"}, {IP: "198.51.100.7", Address: "10.245.0.9"}}}, "another address"},
	} {
		read, wrong := FromAllocations(b.own, []isthmus.NetworkAllocationSpec{good, tc.spec})
		if len(wrong) != 1 || !strings.Contains(wrong[0].Error(), tc.want) {
			t.Errorf("%s: %v; want %s", name, wrong, tc.want)
		}
		if _, has := read.AllocationOf("c"); has || !slices.Equal(read.NetworksOf("b"), b.NetworksOf("b")) {
			t.Errorf("%s: c has networks: %v; b has %v", name, has, read.NetworksOf("b"))
		}
		checkState(t, read)
	}
}

// While peers join and leave at random, no other cluster gets an address that is held. Nodes refuse
// a network for at least a day after its release. Restarts change nothing.
func TestNoAddressIsAllocatedToAnotherClusterWithinADay(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 39))
		b := configured(t, ours())
		now, last := noon, map[netip.Prefix]time.Time{} // when each network was last in use
		owner := map[netip.Prefix]string{}
		for range 120 {
			now = now.Add(time.Duration(rng.IntN(4*3600)) * time.Second)
			id, before := fmt.Sprint("peer-", rng.IntN(8)), b
			switch rng.IntN(5) {
			case 0:
				b = b.Part(id, now)
			case 1:
				b, _ = b.Age(now, func(string) bool { return true })
			case 2:
				b = restarted(t, b)
			default:
				r := Request{ID: id, Pod: randNetwork(rng, 18), External: randNetwork(rng, 18), Allowed: everywhere, Consented: true, Now: now}
				if next, _, err := b.Allocate(r); err == nil {
					b = next
				}
			}
			for id := range before.peers { // networks in use until now
				if g, has := before.AllocationOf(id); has {
					for _, p := range []netip.Prefix{g.Pod, g.External} {
						last[p], owner[p] = now, id
					}
				}
			}
			for id := range b.peers {
				g, has := b.AllocationOf(id)
				for p, at := range last {
					if has && owner[p] != id && now.Sub(at) < fabric.ReleaseHold && (p.Overlaps(g.Pod) || p.Overlaps(g.External)) {
						t.Fatalf("seed %d: %s has %v, and %s had %v until %v ago", seed, id, g, owner[p], p, now.Sub(at))
					}
				}
			}
			var refused []netip.Prefix
			for _, id := range append(b.Peers(), slices.Collect(func(yield func(string) bool) {
				for _, r := range b.replaced {
					if !yield(r.id) {
						return
					}
				}
			})...) {
				refused = append(refused, b.NetworksOf(id)...)
			}
			for p, at := range last {
				if now.Sub(at) < fabric.ReleaseHold-time.Second && !slices.ContainsFunc(refused, func(r netip.Prefix) bool { return contains(r, p) }) {
					t.Fatalf("seed %d: nodes do not refuse %v, which %s had until %v ago", seed, p, owner[p], now.Sub(at))
				}
			}
		}
	}
}

// The State has lost networks that nodes still refuse for a peer. Regain holds them for that peer,
// even if the peer now has a part of one of them. It does not hold networks of other peers or of
// this cluster.
func TestLostNetworksAreHeldForTheirPeer(t *testing.T) {
	b, _ := allocate(t, configured(t, ours()), claim("b", "10.66.0.0/17", "10.67.0.0/20"))
	b, _ = allocate(t, b, claim("c", "10.68.0.0/16", "10.69.0.0/20"))
	b, left := b.Regain("b", []netip.Prefix{pfx("10.66.0.0/16"), pfx("10.68.128.0/20"), pfx("10.96.0.0/16"), {}}, noon)
	if want := []netip.Prefix{pfx("10.68.128.0/20"), pfx("10.96.0.0/16"), {}}; !slices.Equal(left, want) {
		t.Errorf("not held: %v; want %v", left, want)
	}
	if has := b.NetworksOf("b"); !slices.Contains(has, pfx("10.66.0.0/16")) || len(has) != 3 {
		t.Errorf("b has %v", has)
	}
	if _, left = b.Regain("c", []netip.Prefix{pfx("10.66.0.0/15")}, noon); len(left) != 1 {
		t.Error("c gets what is held for b")
	}
	b, left = b.Regain("gone", []netip.Prefix{pfx("10.70.0.0/16"), pfx("10.71.0.0/20"), pfx("10.72.0.0/16")}, noon)
	if len(left) > 0 || b.ReleasedAt("gone") != noon || len(b.NetworksOf("gone")) != 3 {
		t.Errorf("of a peer that is not known: %v, left %v", b.NetworksOf("gone"), left)
	}
	if back, g := allocate(t, b, claim("gone", "10.244.0.0/16", "10.245.0.0/20")); g.Pod != pfx("10.70.0.0/16") || len(back.NetworksOf("gone")) != 3 {
		t.Errorf("it comes back and gets %v", g)
	}
}

// takesBack reports whether nodes may stop refusing some network of a peer that they refused
// before.
func takesBack(current, since State) bool {
	return slices.ContainsFunc(current.Changed(since), func(id string) bool {
		now := current.NetworksOf(id)
		return slices.ContainsFunc(since.NetworksOf(id), func(was netip.Prefix) bool { return !slices.Contains(now, was) })
	})
}

// A NetworkAllocation lists 32 networks at most, even if somebody wrote more into it.
func TestNetworksHeldForAPeerFitIntoItsObject(t *testing.T) {
	b, _ := allocate(t, configured(t, ours()), claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	var lost []netip.Prefix
	for i := range 40 {
		lost = append(lost, pfx(fmt.Sprintf("10.66.%d.0/24", i)))
	}
	held, left := b.Regain("b", lost, noon)
	if n := len(held.NetworksOf("b")); n != 32 || len(left) != 10 {
		t.Errorf("%d networks, and %d are left", n, len(left))
	}
	spec := held.Allocation("b")
	for _, p := range left {
		spec.Held = append(spec.Held, isthmus.HeldNetwork{Network: p.String(), ReleasedAt: isthmus.UTCTimeOf(noon)})
	}
	spec.Networks = append(spec.Networks[:2:2], texts(lost)...)
	read, wrong := FromAllocations(b.Own(), []isthmus.NetworkAllocationSpec{spec})
	if n := len(read.NetworksOf("b")); n != 32 || len(wrong) > 0 {
		t.Errorf("an object with more than it may have: %d networks, %v", n, wrong)
	}
	if held, left = read.Regain("c", lost[30:], noon); len(held.NetworksOf("c")) != 10 || len(left) > 0 {
		t.Errorf("another peer has %v, left are %v", held.NetworksOf("c"), left)
	}
}
