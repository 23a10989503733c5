package ipamstore

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// killed is the client of a manager that is killed after some number of writes.
type killed struct {
	client.Client
	writes int // writes left until the manager is killed
}

func (k *killed) write() error {
	if k.writes--; k.writes < 0 {
		return errors.New("killed")
	}
	return nil
}

func (k *killed) Create(ctx context.Context, o client.Object, opts ...client.CreateOption) error {
	if err := k.write(); err != nil {
		return err
	}
	return k.Client.Create(ctx, o, opts...)
}

func (k *killed) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	if err := k.write(); err != nil {
		return err
	}
	return k.Client.Patch(ctx, o, p, opts...)
}

// A change of our own networks changes the objects of all peers. If a manager is killed in the
// middle, the next one completes the change: no mapping is lost, and no answer is applied to a
// network that it was not about.
func TestNetworkChangeIsCompletedAfterTheManagerWasKilled(t *testing.T) {
	external, pods, both := ours, ours, ours
	external.ExternalCIDR, pods.PodCIDR = pfx("172.20.0.0/16"), pfx("172.24.0.0/16")
	both.ExternalCIDR, both.PodCIDR = external.ExternalCIDR, pods.PodCIDR
	peers := []string{"b", "c", "z"} // the object of "us", our own cluster, is written between theirs
	for what, next := range map[string]ipam.Config{"ExternalCIDR": external, "PodCIDR": pods, "both": both} {
		for writes := 0; ; writes++ {
			when := fmt.Sprintf("%s, killed after %d writes", what, writes)
			h := fresh(t)
			for i, id := range peers {
				h.allocate(claim(id, fmt.Sprintf("10.%d.0.0/16", 60+i), fmt.Sprintf("10.%d.0.0/20", 70+i)))
				h.answered(id, fmt.Sprintf("10.%d.0.0/16", 80+i), fmt.Sprintf("10.%d.0.0/16", 90+i))
				for last := range 2 + i {
					h.mapEndpoint(id, fmt.Sprintf("198.51.100.%d", 9-last))
				}
			}
			want, _ := h.State().Configure(next)
			k := &killed{h.client, writes}
			h.client = k
			_, _ = h.Update(t.Context(), func(b ipam.State) (ipam.State, error) { b, _ = b.Configure(next); return b, nil })
			again := loaded(t)
			got := again.update(func(b ipam.State) ipam.State { b, _ = b.Configure(next); return b })
			for _, id := range peers {
				if got, want := got.Allocation(id), want.Allocation(id); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %s has\n%+v\nwant\n%+v", when, id, got, want)
				}
			}
			if k.writes >= 0 {
				break
			}
			if writes > 20 {
				t.Fatal("a change is never done")
			}
		}
	}
}

// Nodes report only networks. So other changes of an object must not change the version that nodes
// report, even if the manager restarts.
func TestAnswersAndMappingsDoNotChangeTheReportedVersion(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	version := h.versionOf("b")
	same := func(what string) {
		t.Helper()
		if nodes, object := allocations(t).Version, allocationOf(t, "b"); nodes != version || fabric.Version(object.ResourceVersion) == version {
			t.Errorf("%s: nodes report %d of %s; want %d", what, nodes, object.ResourceVersion, version)
		}
		if got := h.versionOf("b"); got != version {
			t.Errorf("%s: the manager waits for %d; want %d", what, got, version)
		}
	}
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	same("an answer")
	h.mapEndpoint("b", "198.51.100.7")
	same("a mapping")
	h.update(func(b ipam.State) ipam.State { return b.Part("b", time.Now()) })
	same("it leaves")
	h = loaded(t)
	same("another manager")
	patched(t, "b", `{"spec":{"networksSince":{"resourceVersion":1}}}`)
	refresh(t, h)
	same("an edit")
	h.update(func(b ipam.State) ipam.State { return b.Release("b") })
	h.allocate(claim("b", "10.66.0.0/16", "10.65.0.0/20"))
	o := allocationOf(t, "b")
	if now := h.versionOf("b"); now != fabric.Version(o.ResourceVersion) || now != allocations(t).Version {
		t.Errorf("another network has version %d in %s", now, o.ResourceVersion)
	}
	// This is the object's content after the API server's own state was restored from a backup.
	o.Spec.NetworksSince = &isthmus.NetworksSince{ResourceVersion: 9_000_000_000, Revision: o.Spec.Revision, UID: string(o.UID)}
	if got := fabric.NamedSince(string(o.UID), o.ResourceVersion, &o.Spec); got != fabric.Version(o.ResourceVersion) {
		t.Errorf("a version of the future is %d", got)
	}
	known := allocation{uid: o.UID, since: 9_000_000_000, spec: o.Spec} // read before the API server's own state was restored
	if got := known.sinceWith(&o); got != fabric.Version(o.ResourceVersion) {
		t.Errorf("a version that was known before a restore is %d", got)
	}
}

// An older manager changes the networks and the revision of an object but not its networksSince
// field. A backup restores the content of an object with a new UID. In both cases nodes must report
// again.
func TestVersionChangesWithTheRevisionAndTheUID(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	h.answered("b", "10.246.0.0/16", "10.247.0.0/16")
	named := allocationOf(t, "b").Spec
	if since := named.NetworksSince; since == nil || since.ResourceVersion != h.versionOf("b") {
		t.Fatalf("networks are named since %+v", since)
	}
	reported := func(what string, managers ...*harness) {
		t.Helper()
		version := fabric.Version(allocationOf(t, "b").ResourceVersion)
		if got := allocations(t).Version; got != version {
			t.Errorf("%s: nodes report %d; want %d", what, got, version)
		}
		for _, m := range append(managers, loaded(t)) {
			refresh(t, m)
			if got := m.versionOf("b"); got != version {
				t.Errorf("%s: a manager waits for %d; want %d", what, got, version)
			}
		}
	}
	patched(t, "b", fmt.Sprintf(`{"spec":{"networks":["10.64.0.0/16","10.65.0.0/20","10.66.0.0/16"],"held":[{"network":"10.66.0.0/16","releasedAt":%q}],"revision":%d}}`,
		isthmus.UTCTimeOf(time.Now()), named.Revision+1))
	reported("an older manager")
	h = loaded(t)
	h.answered("b", "10.246.0.0/16", "10.248.0.0/16")
	o := allocationOf(t, "b")
	if err := testClient.Delete(t.Context(), &o); err != nil {
		t.Fatal(err)
	}
	backup := o
	backup.UID, backup.ResourceVersion = "", ""
	if err := testClient.Create(t.Context(), &backup); err != nil {
		t.Fatal(err)
	}
	reported("a backup", h)
}

// Somebody frees a network by hand, and the manager writes the object before it reads that change.
func TestHoldEndedByHandIsNotWrittenAgain(t *testing.T) {
	h := fresh(t)
	shorter := claim("c", "10.66.0.0/16", "10.67.0.0/20")
	h.allocate(shorter)
	shorter.Pod, shorter.Now = pfx("10.66.0.0/17"), time.Now()
	h.allocate(shorter)
	want(t, "another network", "10.66.0.0/17", "10.67.0.0/20", "10.66.0.0/16")
	now := time.Now().UnixMilli() + 1000
	patched(t, "c", fmt.Sprintf(`{"spec":{"networks":["10.66.0.0/17","10.67.0.0/20"],"held":null,"revision":%[1]d,"freed":[{"network":"10.66.0.0/16","revision":%[1]d}]}}`, now))
	h.answered("c", "10.246.0.0/16", "10.247.0.0/16")
	want(t, "an answer", "10.66.0.0/17", "10.67.0.0/20")
	refresh(t, h)
	want(t, "a look", "10.66.0.0/17", "10.67.0.0/20")
}

// Somebody's finalizer delays the deletion of an IpamStorage. The Store writes it until it is gone,
// and then creates another one.
func TestDelayedDeletionOfTheIpamStorageDoesNotBlockUpdates(t *testing.T) {
	h := fresh(t)
	h.allocate(claim("b", "10.64.0.0/16", "10.65.0.0/20"))
	const finalizer = "test.isthmus.net/keep"
	edit(t, func(o *v1alpha1.IpamStorage) { o.Finalizers = []string{finalizer} })
	going := object(t)
	t.Cleanup(func() {
		_ = testClient.Patch(context.Background(), going, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`)))
	})
	if err := testClient.Delete(t.Context(), going); err != nil {
		t.Fatal(err)
	}
	refresh(t, h)
	h.allocate(claim("c", "10.66.0.0/16", "10.67.0.0/20"))
	another := loaded(t)
	another.allocate(claim("d", "10.68.0.0/16", "10.69.0.0/20"))
	if o := another.agree(); o.Name != going.Name || o.DeletionTimestamp == nil {
		t.Errorf("%s is written", o.Name)
	}
	for _, h := range []*harness{h, another} {
		if !strings.Contains(h.logged(), `msg="IpamStorage is being deleted`) || !strings.Contains(h.logged(), finalizer) {
			t.Errorf("it said %s", h.logged())
		}
	}
	edit(t, func(o *v1alpha1.IpamStorage) { o.Finalizers = nil })
	refresh(t, another)
	another.allocate(claim("e", "10.70.0.0/16", "10.71.0.0/20"))
	if o := another.agree(); o.DeletionTimestamp != nil || o.UID == going.UID {
		t.Errorf("%s is there still", o.Name)
	}
	if g := []string{"b", "c", "d", "e"}; len(another.State().Peers()) != len(g) {
		t.Errorf("peers are %v", another.State().Peers())
	}
}
