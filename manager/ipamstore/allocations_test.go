package ipamstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// allocations returns all NetworkAllocations as agents read them.
func allocations(t *testing.T) fabric.Allocations {
	t.Helper()
	var list isthmus.NetworkAllocationList
	if err := testClient.List(t.Context(), &list); err != nil {
		t.Fatal(err)
	}
	all, problems := fabric.AllocationsFrom(list.Items, time.Now())
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return all
}

// allocationOf returns the NetworkAllocation of a cluster.
func allocationOf(t *testing.T, id string) isthmus.NetworkAllocation {
	t.Helper()
	var o isthmus.NetworkAllocation
	if err := testClient.Get(t.Context(), client.ObjectKey{Name: fabric.AllocationName(id)}, &o); err != nil {
		t.Fatal(err)
	}
	return o
}

// texts returns the networks of a list as strings.
func texts(list []fabric.Allocation) (networks []string) {
	for _, a := range list {
		networks = append(networks, a.Network.String())
	}
	slices.Sort(networks)
	return networks
}

func want(t *testing.T, when string, networks ...string) {
	t.Helper()
	slices.Sort(networks)
	if got := texts(allocations(t).Named); !slices.Equal(got, networks) {
		t.Errorf("%s: agents read %v; want %v", when, got, networks)
	}
}

func allocate(t *testing.T, s *Store, id, pod, external string) {
	t.Helper()
	if _, err := s.Update(t.Context(), func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(claim(id, pod, external))
		return b, err
	}); err != nil {
		t.Fatal(err)
	}
}

func refresh(t *testing.T, h *harness) {
	t.Helper()
	if err := h.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func patched(t *testing.T, id, patch string) {
	t.Helper()
	o := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: id}}
	if err := testClient.Patch(t.Context(), o, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
		t.Fatal(err)
	}
}

func TestNetworkAllocationsContainTheState(t *testing.T) {
	h := fresh(t)
	want(t, "no peers")
	if all := allocations(t); len(all.OwnPods) != 1 || all.OwnPods[0] != ours.PodCIDR || len(all.Own) != 2 || all.Own[1] != ours.ServiceCIDR || all.Revision == 0 {
		t.Errorf("of our own networks agents read %+v", all)
	}
	allocate(t, h.Store, "b", "10.64.0.0/16", "10.65.0.0/20")
	want(t, "one peer", "10.64.0.0/16", "10.65.0.0/20")
	allocate(t, h.Store, "Cluster_C", "10.66.0.0/16", "10.67.0.0/20") // an ID that is not a valid object name
	want(t, "two", "10.64.0.0/16", "10.65.0.0/20", "10.66.0.0/16", "10.67.0.0/20")
	if o := allocationOf(t, "Cluster_C"); o.Spec.ClusterID != "Cluster_C" || o.Spec.ReleasedAt != "" || len(o.Spec.Freed) > 0 {
		t.Errorf("%+v", o.Spec)
	}
	h.update(func(b ipam.State) ipam.State { return b.Part("b", time.Now()) })
	was := allocationOf(t, "b").Spec
	if was.ReleasedAt == "" || len(was.Networks) != 2 {
		t.Errorf("a peer has left: %+v", was)
	}
	h.update(func(b ipam.State) ipam.State { return b.Release("b") })
	want(t, "its networks are free", "10.66.0.0/16", "10.67.0.0/20")
	is := allocationOf(t, "b").Spec
	if is.ReleasedAt != "" || is.Previous == nil || len(is.Freed) != 2 || is.Freed[0].Network != "10.64.0.0/16" || is.Freed[0].Revision != is.Revision || is.Revision <= was.Revision {
		t.Errorf("freed: %+v after %+v", is, was)
	}

	// Every deletion, edit or additional object is corrected, and networks that an object should not
	// have named are freed.
	name := fabric.AllocationName("Cluster_C")
	if err := testClient.Delete(t.Context(), &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
		t.Fatal(err)
	}
	refresh(t, h)
	want(t, "an object was deleted", "10.66.0.0/16", "10.67.0.0/20")
	for _, patch := range []string{`{"spec":{"networks":null,"freed":[{"network":"10.66.0.0/16","revision":9000000000000}]}}`,
		`{"spec":{"networks":["10.66.0.0/16","10.99.0.0/16"],"clusterID":"x","own":{"podCIDR":"10.0.0.0/8"}}}`, `{"spec":{"revision":9000000000000000,"session":9000000000000000,"releasedAt":"2026-11-25T12:00:00Z"}}`} {
		patched(t, name, patch)
		refresh(t, h)
		want(t, patch, "10.66.0.0/16", "10.67.0.0/20")
		o := allocationOf(t, "Cluster_C").Spec
		if o.ClusterID != "Cluster_C" || o.Own != nil || o.ReleasedAt != "" || fabric.Revision(o.Revision, time.Now()) == 0 {
			t.Errorf("%s: %+v", patch, o)
		}
	}
	stray := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "stray"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "Cluster_C", Revision: 1, Networks: []string{"10.98.0.0/16"}}}
	if err := testClient.Create(t.Context(), stray); err != nil {
		t.Fatal(err)
	}
	refresh(t, h)
	want(t, "another object", "10.66.0.0/16", "10.67.0.0/20")
	if freed := texts(allocations(t).Freed); !slices.Contains(freed, "10.98.0.0/16") || !slices.Contains(freed, "10.99.0.0/16") {
		t.Errorf("freed are %v", freed)
	}
	restored := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "lost"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "restored", Revision: 7,
		Freed: []isthmus.FreedNetwork{{Network: "10.97.0.0/16", Revision: 7}}}} // as docs/lifecycle.md tells administrators to write it
	if err := testClient.Create(t.Context(), restored); err != nil {
		t.Fatal(err)
	}
	refresh(t, h)
	if o := allocationOf(t, "lost").Spec; len(o.Freed) != 1 || o.Freed[0].Revision != 7 {
		t.Errorf("a person frees what no object names: %+v", o)
	}
	patched(t, name, `{"spec":{"freed":[{"network":"10.66.0.0/16","revision":9000000000000},{"network":"10.95.0.0/16","revision":7}]}}`)
	refresh(t, h)
	if o := allocationOf(t, "Cluster_C").Spec; len(o.Freed) != 1 || o.Freed[0].Network != "10.95.0.0/16" {
		t.Errorf("freed with a revision that does not count yet, and will: %+v", o)
	}
	h.sent()
	refresh(t, h)
	if methods, _, _ := h.sent(); slices.Contains(methods, http.MethodPatch) {
		t.Errorf("nothing has changed, and it sends %v", methods)
	}

	// The first manager still believes that it leads. It must apply its change to the State that the
	// other manager wrote.
	another := loaded(t)
	another.allocate(claim("d", "10.68.0.0/16", "10.69.0.0/20"))
	another.update(func(b ipam.State) ipam.State { return b.Release("Cluster_C") })
	allocate(t, h.Store, "e", "10.70.0.0/16", "10.71.0.0/20")
	want(t, "after another manager", "10.68.0.0/16", "10.69.0.0/20", "10.70.0.0/16", "10.71.0.0/20")
	if _, has := h.State().AllocationOf("Cluster_C"); has {
		t.Error("what another manager has released is back")
	}
}

// Agents stop refusing a network when they read a higher revision. So each change of a cluster's
// networks must increase the revision, also after older objects were restored.
func TestRevisionIncreasesOnlyWhenNetworksChange(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16"))
	last := allocationOf(t, "b").Spec.Revision
	step := func(what string, higher bool, do func()) {
		t.Helper()
		do()
		now := allocationOf(t, "b").Spec.Revision
		if higher && now <= last || !higher && now != last {
			t.Errorf("%s: revision %d after %d; want higher: %v", what, now, last, higher)
		}
		last = now
	}
	release := func(id string) { h.update(func(b ipam.State) ipam.State { return b.Release(id) }) }
	step("an answer", false, func() { h.answered("b", "10.246.0.0/16", "10.247.0.0/16") })
	step("a mapping", false, func() { h.mapEndpoint("b", "198.51.100.7") })
	step("another peer", false, func() { h.allocate(claim("c", "10.244.0.0/16", "10.245.0.0/16")) })
	old, before := h.agree(), allocationOf(t, "b")
	step("it leaves", false, func() { h.update(func(b ipam.State) ipam.State { return b.Part("b", time.Now()) }) })
	step("its networks are free", true, func() { release("b") })
	step("nothing to release", false, func() { release("b") })
	step("an allocation again", true, func() { h.allocate(claim("b", "10.244.0.0/16", "10.245.0.0/16")) })
	step("another network", true, func() {
		h.update(func(b ipam.State) ipam.State {
			r := claim("b", "10.244.0.0/16", "10.245.0.0/16")
			r.WantPod = pfx("10.66.0.0/16")
			b, _, err := b.Allocate(r)
			if err != nil {
				t.Error(err)
			}
			return b
		})
	})
	restore := func() {
		edit(t, func(o *v1alpha1.IpamStorage) { o.Spec = old.Spec })
		o := allocationOf(t, "b")
		o.Spec = before.Spec
		if err := testClient.Update(t.Context(), &o); err != nil {
			t.Fatal(err)
		}
	}
	step("older objects, restored", true, func() { restore(); refresh(t, h) })
	if g, _ := h.State().AllocationOf("b"); g.Pod != pfx("10.66.0.0/16") {
		t.Errorf("b has %v of older objects", g)
	}
	step("all are deleted", true, func() {
		for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &isthmus.NetworkAllocation{}} {
			if err := testClient.DeleteAllOf(t.Context(), kind); err != nil {
				t.Fatal(err)
			}
		}
		refresh(t, h)
	})
	step("another manager", false, func() { h = loaded(t) })
	step("older objects, and a manager that knows no others", true, func() {
		restore()
		h = loaded(t)
		release("b")
	})
}

// The clock was a month ahead, and is correct again.
func TestRevisionsIncreaseWhenTheClockIsSetBack(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_000)
	for last, want := range map[int64]int64{0: now.UnixMilli(), now.UnixMilli(): now.UnixMilli() + 1, now.Add(time.Hour).UnixMilli(): now.Add(time.Hour).UnixMilli() + 1,
		now.Add(720 * time.Hour).UnixMilli(): now.UnixMilli()} {
		if got := nextRevision(last, now); got != want {
			t.Errorf("after %d: %d; want %d", last, got, want)
		}
	}
}

// stopping is a client whose writes to some objects fail, as if the manager were killed before
// them.
type stopping struct {
	client.Client
	target string // part of the Go type and the name of an object; "": no write fails
	err    error  // the error of such a write; nil: some error
}

func (s *stopping) fails(o client.Object) error {
	if s.target != "" && strings.Contains(fmt.Sprintf("%T %s", o, o.GetName()), s.target) {
		return cmp.Or(s.err, errors.New("stopped"))
	}
	return nil
}

func (s *stopping) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if err := s.fails(o); err != nil {
		return err
	}
	return s.Client.Create(ctx, o, opts...)
}

func (s *stopping) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	if err := s.fails(o); err != nil {
		return err
	}
	return s.Client.Patch(ctx, o, p, opts...)
}

// A NetworkAllocation has a new network before the IpamStorage has it, and a freed network leaves
// the IpamStorage first. So nodes refuse all networks of the IpamStorage, wherever a manager is
// stopped.
func TestNodesRefuseAllStoredNetworksWhereverAManagerStops(t *testing.T) {
	h := fresh(t)
	s := &stopping{Client: h.client}
	h.client = s
	if _, err := h.Update(t.Context(), func(b ipam.State) (ipam.State, error) { b, _ = b.Configure(ours); return b, nil }); err != nil {
		t.Fatal(err)
	}
	whole := func(when string) {
		t.Helper()
		named := texts(allocations(t).Named)
		var storages v1alpha1.IpamStorageList
		if err := testClient.List(t.Context(), &storages); err != nil {
			t.Fatal(err)
		}
		for _, id := range slices.Sorted(maps.Keys(storages.Items[0].Spec.ClusterSubnets)) {
			if p := storages.Items[0].Spec.ClusterSubnets[id].RemotePodCIDR; !slices.Contains(named, p) {
				t.Errorf("%s: %s has %v, and nodes refuse %v", when, id, p, named)
			}
		}
	}
	change := func(f func(ipam.State) (ipam.State, error)) {
		t.Helper()
		for _, at := range []string{"NetworkAllocation", "PartialObjectMetadata"} {
			s.target = at
			if _, err := h.Update(t.Context(), f); err == nil && at == "PartialObjectMetadata" {
				t.Error("written all the same")
			}
			whole("stopped at " + at)
		}
		s.target = ""
		if _, err := h.Update(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		whole("done")
	}
	change(func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
		return b, err
	})
	want(t, "granted", "10.64.0.0/16", "10.65.0.0/20")
	change(func(b ipam.State) (ipam.State, error) { // another network replaces the first one
		b, _, err := b.Release("b").Allocate(ipam.Request{ID: "b", Pod: pfx("10.80.0.0/16"), External: pfx("10.81.0.0/20"), WantPod: pfx("10.80.0.0/16"), WantExternal: pfx("10.81.0.0/20")})
		return b, err
	})
	want(t, "another network", "10.80.0.0/16", "10.81.0.0/20")
	s.target = "NetworkAllocation" // the State has freed the networks, but nodes cannot read that yet
	if _, err := h.Update(t.Context(), func(b ipam.State) (ipam.State, error) { return b.Release("b"), nil }); err != nil {
		t.Fatal(err)
	}
	want(t, "not freed yet", "10.80.0.0/16", "10.81.0.0/20")
	if err := h.Refresh(t.Context()); err == nil {
		t.Error("a refresh that cannot write it is content, and nobody tries again")
	}
	s.target = ""
	if err := h.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(t, "after a refresh")
}

// Somebody empties a NetworkAllocation. Its version is NotWritten until it names the peer's
// networks again.
func TestVersionIsNotWrittenUntilTheObjectHasTheNetworks(t *testing.T) {
	h := fresh(t)
	allocate(t, h.Store, "b", "10.64.0.0/16", "10.65.0.0/20")
	version := h.versionOf("b")
	if h.answered("b", "10.244.0.0/16", "10.245.0.0/16"); h.versionOf("b") != version {
		t.Error("an answer has nodes report again before the peer gets its tunnel")
	}
	another := loaded(t) // an allocation to read, so that Refresh publishes a State
	allocate(t, another.Store, "c", "10.66.0.0/16", "10.67.0.0/20")
	patched(t, "b", `{"spec":{"networks":null}}`)
	var seen []int64
	h.Observe(func(_ ipam.State, version func(string) int64) { seen = append(seen, version("b")) })
	refresh(t, h)
	o := allocationOf(t, "b")
	if seen = seen[1:]; len(seen) < 2 || seen[0] != NotWritten || seen[len(seen)-1] != fabric.Version(o.ResourceVersion) || len(o.Spec.Networks) != 2 {
		t.Errorf("versions were %v; %s has %v", seen, o.ResourceVersion, o.Spec.Networks)
	}
}

// Somebody fills the object of a peer with networks. The allocated networks replace some of them
// before the IpamStorage is written, and the rest are freed.
func TestFullNetworkAllocationDoesNotBlockAnAllocation(t *testing.T) {
	h := fresh(t)
	s := &stopping{Client: h.client, target: "PartialObjectMetadata"} // the kind of the IpamStorage
	h.client = s
	full := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "b", Revision: 1}}
	for i := range maxNetworks {
		full.Spec.Networks = append(full.Spec.Networks, fmt.Sprintf("10.99.%d.0/24", i))
	}
	if err := testClient.Create(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	give := func(b ipam.State) (ipam.State, error) {
		b, _, err := b.Allocate(claim("b", "10.64.0.0/16", "10.65.0.0/16"))
		return b, err
	}
	if _, err := h.Update(t.Context(), give); err == nil {
		t.Error("written all the same")
	}
	if named := allocationOf(t, "b").Spec.Networks; len(named) != maxNetworks || !slices.Equal(named[:2], []string{"10.64.0.0/16", "10.65.0.0/16"}) {
		t.Errorf("before the IpamStorage it names %v", named)
	}
	s.target = ""
	if _, err := h.Update(t.Context(), give); err != nil {
		t.Fatal(err)
	}
	want(t, "granted", "10.64.0.0/16", "10.65.0.0/16")
	freed := texts(allocations(t).Freed)
	if slices.Sort(full.Spec.Networks); !slices.Equal(freed, full.Spec.Networks) {
		t.Errorf("freed are %v", freed)
	}
	patched(t, "b", fmt.Sprintf(`{"spec":{"networks":["%s"]}}`, strings.Join(full.Spec.Networks, `","`)))
	refresh(t, h)
	want(t, "a look", "10.64.0.0/16", "10.65.0.0/16")
	if freed := len(allocationOf(t, "b").Spec.Freed); freed != maxNetworks {
		t.Errorf("%d are freed", freed)
	}
}

// unread is a reader without an answer from the API server.
type unread struct{ client.Reader }

func (unread) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return errors.New("no answer")
}

// The IpamStorage is written, but the write of a NetworkAllocation conflicts, and that object
// cannot be read again. The State stays unchanged, and the next write restores the IpamStorage.
func TestIpamStorageIsRestoredAfterAnotherObjectConflicted(t *testing.T) {
	h := fresh(t)
	allocate(t, h.Store, "b", "10.64.0.0/16", "10.65.0.0/16")
	s, reader := &stopping{Client: h.client, target: "NetworkAllocation b", err: apierrors.NewConflict(schema.GroupResource{}, "b", nil)}, h.reader
	h.client, h.reader = s, unread{reader}
	if _, err := h.Update(t.Context(), func(b ipam.State) (ipam.State, error) { return b.Release("b"), nil }); err == nil {
		t.Error("written all the same")
	}
	if _, has := object(t).Spec.ClusterSubnets["b"]; has {
		t.Error("the IpamStorage is not written")
	}
	s.target, h.reader = "", reader
	h.update(func(b ipam.State) ipam.State { return b })
	_, has := h.State().AllocationOf("b")
	if _, written := object(t).Spec.ClusterSubnets["b"]; !has || !written {
		t.Errorf("the State has it: %v, the IpamStorage: %v", has, written)
	}
	want(t, "afterwards", "10.64.0.0/16", "10.65.0.0/16")
}

// An object that cannot be written does not prevent writes of other objects.
func TestFailedWriteOfOneObjectDoesNotBlockOthers(t *testing.T) {
	h := fresh(t)
	s := &stopping{Client: h.client, target: "NetworkAllocation b"}
	h.client = s
	if _, err := h.Update(t.Context(), func(state ipam.State) (ipam.State, error) {
		state, _, err := state.Allocate(claim("b", "10.64.0.0/16", "10.65.0.0/16"))
		if err == nil {
			state, _, err = state.Allocate(claim("c", "10.66.0.0/16", "10.67.0.0/16"))
		}
		return state, err
	}); err == nil || !strings.Contains(err.Error(), "NetworkAllocation b: stopped") {
		t.Error(err)
	}
	want(t, "one cannot be written", "10.66.0.0/16", "10.67.0.0/16")
}
