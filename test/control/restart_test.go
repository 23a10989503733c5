package control

import (
	"context"
	"flag"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

var long = flag.Bool("long", false, "run the tests of this package at full length")

// A moment is a step of peering or un-peering that is visible in the API of one of the clusters.
type moment struct {
	name string
	at   func(a, b *site) *site // the cluster where the step is visible
	list client.ObjectList      // the kind to watch there
	is   func(watch.EventType, client.Object) bool
}

func atA(a, _ *site) *site { return a }
func atB(_, b *site) *site { return b }

// ours reports whether a NetworkConfig is the one that its cluster publishes. theirs reports
// whether it is the peer's copy.
func ours(o client.Object) bool   { return o.GetLabels()[v1alpha1.LabelReplication] == "true" }
func theirs(o client.Object) bool { return o.GetLabels()[v1alpha1.LabelOriginID] != "" }

func seen(is func(client.Object) bool) func(watch.EventType, client.Object) bool {
	return func(e watch.EventType, o client.Object) bool { return e != watch.Deleted && is(o) }
}

func deleted(is func(client.Object) bool) func(watch.EventType, client.Object) bool {
	return func(e watch.EventType, o client.Object) bool { return e == watch.Deleted && is(o) }
}

// leaves matches the first event of a deletion. For an object without finalizers, that is the
// removal itself.
func leaves(is func(client.Object) bool) func(watch.EventType, client.Object) bool {
	return func(e watch.EventType, o client.Object) bool { return is(o) && (e == watch.Deleted || going(o)) }
}

func whatever(client.Object) bool { return true }

func holds(finalizer string) func(client.Object) bool {
	return func(o client.Object) bool { return slices.Contains(o.GetFinalizers(), finalizer) }
}

func going(o client.Object) bool { return o.GetDeletionTimestamp() != nil }

func both(all ...func(client.Object) bool) func(client.Object) bool {
	return func(o client.Object) bool {
		return !slices.ContainsFunc(all, func(is func(client.Object) bool) bool { return !is(o) })
	}
}

func answered(o client.Object) bool { return o.(*v1alpha1.NetworkConfig).Status.Processed }

func ready(o client.Object) bool {
	return slices.ContainsFunc(o.(*isthmus.Peering).Status.Conditions, func(c metav1.Condition) bool {
		return c.Type == isthmus.ConditionReady && c.Status == metav1.ConditionTrue
	})
}

var joining = []moment{
	{"Peering created", atA, &isthmus.PeeringList{}, seen(whatever)},
	{"finalizer of the Peering", atA, &isthmus.PeeringList{}, seen(holds(isthmus.FinalizerPeering))},
	{"original created", atA, &v1alpha1.NetworkConfigList{}, seen(ours)},
	{"finalizer of the replicator", atA, &v1alpha1.NetworkConfigList{}, seen(both(ours, holds(v1alpha1.FinalizerReplicator)))},
	{"copy created", atB, &v1alpha1.NetworkConfigList{}, seen(theirs)},
	{"networks granted", atA, &v1alpha1.IpamStorageList{}, seen(func(o client.Object) bool { return len(o.(*v1alpha1.IpamStorage).Spec.ClusterSubnets) > 0 })},
	{"copy answered", atB, &v1alpha1.NetworkConfigList{}, seen(both(theirs, answered))},
	{"answer brought back", atA, &v1alpha1.NetworkConfigList{}, seen(both(ours, answered))},
	{"answer in the IPAM state", atA, &v1alpha1.IpamStorageList{}, seen(func(o client.Object) bool { return len(o.(*v1alpha1.IpamStorage).Spec.NatMappingsConfigured) > 0 })},
	{"NatMapping created", atA, &v1alpha1.NatMappingList{}, seen(whatever)},
	{"finalizer of the copy", atA, &v1alpha1.NetworkConfigList{}, seen(both(theirs, holds(v1alpha1.FinalizerTunnelEndpointCreator)))},
	{"TunnelEndpoint created", atA, &v1alpha1.TunnelEndpointList{}, seen(whatever)},
	{"ready", atA, &isthmus.PeeringList{}, seen(ready)},
}

var parting = []moment{
	{"Peering deleted", atA, &isthmus.PeeringList{}, seen(going)},
	{"TunnelEndpoint gone", atA, &v1alpha1.TunnelEndpointList{}, deleted(whatever)},
	{"original deleted", atA, &v1alpha1.NetworkConfigList{}, leaves(ours)},
	{"copy deleted", atB, &v1alpha1.NetworkConfigList{}, leaves(theirs)},
	{"copy gone", atB, &v1alpha1.NetworkConfigList{}, deleted(theirs)},
	{"networks released", atA, &isthmus.NetworkAllocationList{}, seen(func(o client.Object) bool { return o.(*isthmus.NetworkAllocation).Spec.ReleasedAt != "" })},
	{"NatMapping gone", atA, &v1alpha1.NatMappingList{}, deleted(whatever)},
	{"finalizer of the replicator removed", atA, &v1alpha1.NetworkConfigList{}, func(e watch.EventType, o client.Object) bool {
		return ours(o) && going(o) && (e == watch.Deleted || !holds(v1alpha1.FinalizerReplicator)(o)) // if it was the last finalizer, the object is already gone
	}},
	{"original gone", atA, &v1alpha1.NetworkConfigList{}, deleted(ours)},
	{"Peering gone", atA, &isthmus.PeeringList{}, deleted(whatever)},
}

// await starts a watch for the moment and returns. As soon as the moment comes, the watch calls do.
// The returned function waits for that call, and reports whether the moment has come.
func (m moment) await(t *testing.T, a, b *site, do func()) func() bool {
	t.Helper()
	at := m.at(a, b)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	// Begin the watch with the present state, because an older watch could report events of the
	// previous peering.
	now := m.list.DeepCopyObject().(client.ObjectList)
	if err := at.client.List(ctx, now); err != nil {
		t.Fatal(err)
	}
	w, err := at.client.Watch(ctx, m.list, &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: now.GetResourceVersion()}})
	if err != nil {
		t.Fatal(err)
	}
	came := make(chan bool, 1)
	go func() {
		defer cancel()
		defer w.Stop()
		for e := range w.ResultChan() {
			if o, ok := e.Object.(client.Object); ok && m.is(e.Type, o) {
				do()
				came <- true
				return
			}
		}
		came <- false
	}()
	return func() bool { return <-came }
}

// TestPeeringCompletesWhenAManagerIsKilledAtAnyStep kills a manager at each step of peering and
// un-peering, on each side, and restarts it. The result must be the same as without the kill.
func TestPeeringCompletesWhenAManagerIsKilledAtAnyStep(t *testing.T) {
	t.Parallel()
	sites := newSites(t, "10.244.0.0/16", "10.244.128.0/20")
	a, b := sites[0], sites[1]
	a.startManager()
	b.startManager()
	peer(t, a, b)
	waitAgreed(t, a, b)
	disjoin(a, b)
	a.waitClean()
	b.waitClean()

	empty := map[*site]v1alpha1.IpamStorageSpec{a: a.ipamStorage(), b: b.ipamStorage()}
	rejoin(a, b)
	waitAgreed(t, a, b)
	full := map[*site]v1alpha1.IpamStorageSpec{a: a.ipamStorage(), b: b.ipamStorage()}
	disjoin(a, b)
	a.waitClean()
	b.waitClean()

	kill := func(t *testing.T, m moment, victim *site, act func()) {
		t.Helper()
		came := m.await(t, a, b, func() { victim.killHard() })
		act()
		if !came() {
			t.Fatalf("%s: did not come", m.name)
		}
		victim.restartManager()
	}
	for i := range max(len(joining), len(parting)) {
		for _, victim := range sites {
			var names []string
			for _, moments := range [][]moment{joining, parting} {
				if i < len(moments) {
					names = append(names, moments[i].name)
				}
			}
			t.Run(victim.name+" killed at "+strings.Join(names, " and "), func(t *testing.T) {
				reportTo(t, sites...)
				began := time.Now()
				join := func() { a.join(b, isthmus.Overrides{}); b.join(a, isthmus.Overrides{}) }
				if i < len(joining) {
					kill(t, joining[i], victim, join)
				} else {
					join()
				}
				waitAgreed(t, a, b)
				joined := time.Since(began)
				for _, s := range sites {
					if got := s.ipamStorage(); !equality.Semantic.DeepEqual(got, full[s]) {
						t.Errorf("IpamStorage of %s:\n%+v\nwithout the kill:\n%+v", s.name, got, full[s])
					}
				}
				began = time.Now()
				part := func() { a.part(b); b.part(a) }
				if i < len(parting) {
					kill(t, parting[i], victim, part)
				} else {
					part()
				}
				for _, s := range sites {
					s.waitClean()
					if got := s.ipamStorage(); !equality.Semantic.DeepEqual(got, empty[s]) {
						t.Errorf("IpamStorage of %s:\n%+v\nat the start:\n%+v", s.name, got, empty[s])
					}
				}
				t.Logf("joined after %v, parted after %v", joined.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
			})
		}
	}
}
