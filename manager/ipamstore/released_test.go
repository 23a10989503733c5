package ipamstore

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// NetworkAllocations name held networks until the manager ends the hold and frees them.
func TestAgentsReadHeldNetworksUntilTheManagerEndsTheHold(t *testing.T) {
	noon := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	h := fresh(t)
	had := h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	shorter := claim("c", "10.66.0.0/16", "10.67.0.0/20")
	h.allocate(shorter)
	shorter.Pod, shorter.Now = pfx("10.66.0.0/17"), noon
	h.allocate(shorter)
	revision := allocations(t).Revision
	h.update(func(b ipam.State) ipam.State { return b.Part("b", noon) })
	h.agree()
	b, c := allocationOf(t, "b").Spec, allocationOf(t, "c").Spec
	if now := allocations(t).Revision; b.ReleasedAt != isthmus.UTCTimeOf(noon) || len(c.Held) != 1 || c.Held[0].Network != "10.66.0.0/16" || c.Held[0].ReleasedAt != isthmus.UTCTimeOf(noon) || now != revision {
		t.Errorf("%+v, %+v; revision %d was %d", b, c, now, revision)
	}
	all := []string{"10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/17", "10.67.0.0/20", "10.66.0.0/16"}
	agents := func(when string) {
		t.Helper()
		want(t, when, slices.Clone(all)...)
	}
	agents("released")
	again := loaded(t) // the manager restarts
	if methods, _, _ := again.sent(); !slices.Equal(methods, []string{"GET", "PATCH"}) {
		t.Errorf("a restart sends %v", methods)
	}
	agents("after a restart")
	age := func(now time.Time) {
		t.Helper()
		again.update(func(b ipam.State) ipam.State { b, _ = b.Age(now, func(string) bool { return true }); return b })
	}
	age(noon.Add(fabric.ReleaseHold - time.Second))
	agents("before the end")
	if now := allocations(t).Revision; now != revision {
		t.Errorf("revision %d was %d, and nothing was freed", now, revision)
	}

	// Somebody removes the time of the release. The networks stay held, and the Store writes the time
	// again.
	patched(t, "b", `{"spec":{"releasedAt":null}}`)
	refresh(t, again)
	if got := again.State().NetworksOf("b"); !slices.Equal(got, []netip.Prefix{had.Pod, had.External}) || allocationOf(t, "b").Spec.ReleasedAt == "" {
		t.Errorf("without the time: %v", got)
	}

	age(noon.Add(fabric.ReleaseHold))
	all = []string{"10.66.0.0/17", "10.67.0.0/20"}
	agents("after a day")
	again.agree()
	if b, c := allocationOf(t, "b").Spec, allocationOf(t, "c").Spec; b.ReleasedAt != "" || len(c.Held) > 0 {
		t.Errorf("after a day: %+v, %+v", b, c)
	}
	for _, f := range allocations(t).Freed {
		if f.Revision <= revision {
			t.Errorf("%v is freed with a revision that is not above %d", f, revision)
		}
	}
	if freed := texts(allocations(t).Freed); !slices.Equal(freed, []string{"10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/16"}) {
		t.Errorf("freed are %v", freed)
	}
}

// All CRDs and objects are deleted, and a manager starts without any state. Agents keep refusing
// the networks that they know, because no object frees them.
func TestRecreatedIPAMStateFreesNoNetworks(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	before := allocations(t).Revision
	for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &isthmus.NetworkAllocation{}} {
		if err := testClient.DeleteAllOf(t.Context(), kind); err != nil {
			t.Fatal(err)
		}
	}
	again := loaded(t)
	if now := allocations(t); len(now.Freed) > 0 || len(now.Named) > 0 {
		t.Errorf("%+v", now)
	}
	again.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	again.update(func(b ipam.State) ipam.State { return b.Release("b") })
	if now := allocations(t); len(now.Freed) != 2 || now.Freed[0].Revision <= before {
		t.Errorf("revision %d, and freed are %v", before, now.Freed)
	}
}

// An administrator ends a hold in the NetworkAllocation. A network that a peer uses stays, and so
// does a network that an object with an older revision frees.
func TestAHoldEndsWhenSomebodyFreesTheNetwork(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.allocate(claim("c", "10.66.0.0/16", "10.67.0.0/20"))
	h.update(func(b ipam.State) ipam.State { return b.Part("b", time.Now()) })
	free := func(id string, revision int64) {
		t.Helper()
		o := allocationOf(t, id)
		for _, n := range o.Spec.Networks {
			o.Spec.Freed = append(o.Spec.Freed, isthmus.FreedNetwork{Network: n, Revision: revision})
		}
		o.Spec.Networks, o.Spec.Revision = nil, revision
		if err := testClient.Update(t.Context(), &o); err != nil {
			t.Fatal(err)
		}
		refresh(t, h)
	}
	free("b", 7)
	want(t, "an older object", "10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/16", "10.67.0.0/20")
	free("c", time.Now().UnixMilli()+1)
	want(t, "a peer that has it", "10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/16", "10.67.0.0/20")
	free("b", time.Now().UnixMilli()+1)
	want(t, "freed", "10.66.0.0/16", "10.67.0.0/20")
	if left := h.State().NetworksOf("b"); len(left) > 0 || len(h.agree().Spec.ClusterSubnets) != 1 {
		t.Errorf("b has %v", left)
	}
}

// The NetworkAllocations still name the held networks after the IpamStorage is deleted.
func TestHeldNetworksSurviveDeletionOfTheIpamStorage(t *testing.T) {
	h := fresh(t)
	had := h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.update(func(b ipam.State) ipam.State { return b.Part("b", time.Now()) })
	if err := testClient.DeleteAllOf(t.Context(), &v1alpha1.IpamStorage{}); err != nil {
		t.Fatal(err)
	}
	again := loaded(t)
	want(t, "rebuilt", "10.64.0.0/16", "10.65.0.0/20")
	if again.State().ReleasedAt("b").IsZero() {
		t.Error("the networks are not held")
	}
	again.update(func(b ipam.State) ipam.State { b, _ = b.Configure(ours); return b })
	if g := again.allocate(claim("c", "10.64.0.0/16", "10.67.0.0/20")); g.Pod.Overlaps(had.Pod) {
		t.Errorf("c has %v of %v", g, had)
	}
	if g := again.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20")); g != had {
		t.Errorf("b has %v, had %v", g, had)
	}
}

func TestStoreUsesTheConfiguredClock(t *testing.T) {
	s := New(nil, nil, "", nil)
	if now, err := s.Now(t.Context()); err != nil || time.Since(now).Abs() > time.Hour {
		t.Errorf("%v, %v", now, err)
	}
	noon := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	s.WithClock(func(context.Context) (time.Time, error) { return noon, nil })
	if now, err := s.Now(t.Context()); err != nil || now != noon {
		t.Errorf("%v, %v", now, err)
	}
}
