package kube

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// site has the addresses that no peer's gateway may have.
var site = fabric.Site{
	Networks: []fabric.SiteNetwork{{Prefix: netip.MustParsePrefix("10.244.0.0/16"), What: "our PodCIDR"}},
	Addrs:    map[netip.Addr]string{netip.MustParseAddr("172.30.1.11"): "a node of ours"},
}

var noon = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// saved returns options with a state directory as the active replica pod-1 left it at noon, and
// the Snapshot that was in force then.
func saved(t *testing.T) (GatewayOptions, Snapshot) {
	t.Helper()
	o := GatewayOptions{Namespace: "home", Pod: "pod-1", StateDirectory: filepath.Join(t.TempDir(), "state"), Log: quiet}
	private := keyring.New()
	endpoints, mappings := []v1alpha1.TunnelEndpoint{endpoint(2), endpoint(1)}, []v1alpha1.NatMapping{natMapping(1, map[string]string{"10.7.7.7": "10.245.0.9"})}
	endpoints[1].Spec.RemoteNATPodCIDR = "10.102.0.0/20" // overlaps with a network of the other peer, so one of the two peers is refused
	deleted := endpoint(3)
	deleted.DeletionTimestamp = new(metav1.Now())
	k := newKeeper(o, func() {})
	want := savedFrom(self, private, append(endpoints, deleted), mappings)
	want.locations.Site = site
	k.put(want, ringOf(private))
	if !k.round("pod-1", noon.Add(-time.Second), noon) || k.problem() != nil {
		t.Fatal(k.problem())
	}
	gw, problems := gatewayFor(self, private, site, endpoints, mappings)
	return o, Snapshot{Gateway: gw, Problems: problems, Keys: ringOf(private)}
}

func TestARestoredSnapshotGivesTheSameDecision(t *testing.T) {
	o, want := saved(t)
	known, err := remember(o, noon.Add(time.Minute))
	if err != nil || known == nil || !reflect.DeepEqual(known.snapshot, want) || len(want.Problems) == 0 || len(want.Gateway.Peers) != 1 {
		t.Fatalf("%+v, %v; want %+v", known, err, want)
	}
	if !known.renewed.Equal(noon.Add(-time.Second)) || !known.objects.Read.Equal(noon) {
		t.Errorf("renewed %v, read %v", known.renewed, known.objects.Read)
	}
	entries, err := os.ReadDir(o.StateDirectory)
	if err != nil || len(entries) != 4 {
		t.Errorf("%v, %v; want four files", entries, err)
	}
	secret := base64.StdEncoding.EncodeToString(want.Keys.Private[:])
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(o.StateDirectory, e.Name()))
		info, _ := e.Info()
		if err != nil || info.Mode() != 0o600 || strings.Contains(string(text), secret) != (e.Name() == keyFile) {
			t.Errorf("%s: mode %v, %v: %s", e.Name(), info.Mode(), err, text)
		}
	}
}

func TestOnlyARecentlyActiveGatewayUsesItsSnapshot(t *testing.T) {
	o, _ := saved(t)
	for _, tc := range []struct {
		name string
		o    func(*GatewayOptions)
		at   time.Time
		want bool
	}{
		{"now", func(*GatewayOptions) {}, noon, true},
		{"as late as it may", func(*GatewayOptions) {}, noon.Add(snapshotLife), true},
		{"too late", func(*GatewayOptions) {}, noon.Add(snapshotLife + 1), false},
		{"before it was written", func(*GatewayOptions) {}, noon.Add(-1), false},
		{"another Pod", func(o *GatewayOptions) { o.Pod = "pod-2" }, noon, false},
		{"another installation", func(o *GatewayOptions) { o.Namespace = "elsewhere" }, noon, false},
		{"another directory", func(o *GatewayOptions) { o.StateDirectory = t.TempDir() }, noon, false},
	} {
		o := o
		tc.o(&o)
		if known, err := remember(o, tc.at); err != nil || (known != nil) != tc.want {
			t.Errorf("%s: %v, %v; want %v", tc.name, known, err, tc.want)
		}
	}
	other := o
	other.Cluster = v1alpha1.ClusterIdentity{ClusterID: "id-other"}
	if known, err := remember(other, noon); known != nil || err == nil || !strings.Contains(err.Error(), `cluster.clusterID is "id-self"; want our "id-other"`) {
		t.Errorf("another cluster: %v, %v", known, err)
	}
}

func TestAStandbyRemembersOtherGateways(t *testing.T) {
	o, _ := saved(t)
	key, known, err := rememberOthers(o.StateDirectory)
	if key != nil || len(known.Others) > 0 || err != nil {
		t.Errorf("of nothing: %v, %+v, %v", key, known, err)
	}
	k := newKeeper(o, func() {})
	want := acquaintance{Transition: 7, Others: map[string]netip.Addr{"pod-2": netip.MustParseAddr("10.0.0.2")}}
	if k.keepOthers(want); len(k.others.Key) > 0 {
		t.Error("kept without a key")
	}
	private := keyring.New()
	k.put(savedFrom(self, private, nil, nil), ringOf(private))
	k.keepOthers(want)
	k.round("pod-1", noon, noon)
	k.round("pod-2", noon, noon)
	if key, known, err = rememberOthers(o.StateDirectory); !bytes.Equal(key, questionKey(private)) || !reflect.DeepEqual(known, want) || err != nil {
		t.Errorf("%v, %+v, %v; want %+v", key, known, err, want)
	}
	file := filepath.Join(o.StateDirectory, othersFile)
	if err := os.WriteFile(file, []byte(`{"version": 2, "key": "AAAA"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if key, _, err := rememberOthers(o.StateDirectory); key != nil || err == nil || !strings.Contains(err.Error(), "want 32 octets in base64") {
		t.Errorf("a damaged one: %v, %v", key, err)
	}
	if err := Forget(o.StateDirectory); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(o.StateDirectory); len(entries) > 0 || err != nil {
		t.Errorf("after the cleanup: %v, %v", entries, err)
	}
}

func TestAStandbyRemovesTheSnapshotOfAnActiveGateway(t *testing.T) {
	o, _ := saved(t)
	k := newKeeper(o, func() {})
	if k.round("pod-2", noon, noon) {
		t.Error("removed before everything was read: there may be nothing else")
	}
	private := keyring.New()
	k.put(savedFrom(self, private, nil, nil), ringOf(private))
	if k.round("", noon, noon) {
		t.Error("changed while nobody knows who is active")
	}
	steps := []struct {
		holder string
		after  time.Duration
		want   bool
	}{
		{"pod-1", 0, true},
		{"pod-1", time.Second, false},
		{"pod-1", noteInterval, true}, // only renews the time
		{"pod-2", noteInterval, true},
		{"pod-2", noteInterval, false},
		{"pod-1", noteInterval, true},
	}
	for i, s := range steps {
		if did := k.round(s.holder, noon, noon.Add(s.after)); did != s.want || k.problem() != nil {
			t.Fatalf("step %d: %v, %v; want %v", i, did, k.problem(), s.want)
		}
		entries, err := os.ReadDir(o.StateDirectory)
		if want := map[string]int{"pod-1": 4, "pod-2": 0}[s.holder]; err != nil || len(entries) != want {
			t.Errorf("step %d: %v, %v; want %d files", i, entries, err, want)
		}
	}
	if known, err := remember(o, noon.Add(noteInterval)); err != nil || known == nil || known.snapshot.Keys.Private != private {
		t.Errorf("%+v, %v", known, err)
	}
}

// The locations of nodes take a megabyte in a large cluster. They are written together with a
// change of the peers' objects, and otherwise every noteInterval.
func TestNodeLocationsAreStoredWithPeersOrAtTheInterval(t *testing.T) {
	o, _ := saved(t)
	k := newKeeper(o, func() {})
	private := keyring.New()
	at := noon
	for i, s := range []struct {
		after       time.Duration
		peers, node string
		want        string // peer and node in the files afterwards
		changes     bool
	}{
		{0, "1", "a", "1 a", true},
		{2 * time.Second, "1", "b", "1 a", false},
		{2 * time.Second, "2", "b", "2 b", true},
		{2 * time.Second, "2", "c", "2 b", false},
		{noteInterval, "2", "c", "2 c", true},
		{2 * time.Second, "3", "c", "3 c", true},
		{noteInterval, "3", "c", "3 c", true}, // only renews the time
	} {
		te := endpoint(1)
		te.Name = s.peers
		want := savedFrom(self, private, []v1alpha1.TunnelEndpoint{te}, nil)
		want.locations.PodNetwork.Node = s.node
		k.put(want, ringOf(private))
		at = at.Add(s.after)
		if did := k.round("pod-1", at, at); did != s.changes || k.problem() != nil {
			t.Fatalf("step %d: written: %v, %v", i, did, k.problem())
		}
		known, err := remember(o, at)
		if err != nil {
			t.Fatal(err)
		}
		if got := known.objects.TunnelEndpoints[0].Name + " " + known.objects.locations.PodNetwork.Node; got != s.want {
			t.Errorf("step %d: %s is kept; want %s", i, got, s.want)
		}
	}
}

// Later code finds a changed node by binary search, in the order of names.
func TestNodesOfASnapshotAreSortedAndUnique(t *testing.T) {
	o, _ := saved(t)
	o.Node = "n2"
	k := newKeeper(o, func() {})
	private := keyring.New()
	want := savedFrom(self, private, nil, nil)
	for _, name := range []string{"n3", "n1", "n3", "n2", "n1"} {
		want.locations.PodNetwork.Nodes = append(want.locations.PodNetwork.Nodes, fabric.ClusterNode{Name: name})
	}
	k.put(want, ringOf(private))
	k.round("pod-1", noon, noon)
	known, err := remember(o, noon)
	if err != nil {
		t.Fatal(err)
	}
	if nodes := known.snapshot.PodNetwork.Nodes; len(nodes) != 3 || nodes[0].Name != "n1" || nodes[1].Name != "n2" || nodes[2].Name != "n3" {
		t.Errorf("%v", nodes)
	}
}

func TestAReadOnlyStateDirectoryIsReported(t *testing.T) {
	o, _ := saved(t)
	o.StateDirectory = filepath.Join(o.StateDirectory, leaseFile, "below a file")
	reports := 0
	k := newKeeper(o, func() { reports++ })
	private := keyring.New()
	k.put(savedFrom(self, private, nil, nil), ringOf(private))
	for range 2 {
		k.round("pod-1", noon, noon)
	}
	if p := k.problems(); len(p) != 1 || reports != 1 || !strings.Contains(p[0].Error(), "Snapshot "+o.StateDirectory+": not written: ") || !strings.Contains(p[0].Error(), "not a directory") {
		t.Errorf("told %d times: %v", reports, p)
	}
}

// damages are ways in which a file can differ from a valid one; edit changes its JSON.
var damages = []struct {
	file, want string
	damage     func(text []byte) []byte
}{
	{leaseFile, "version 1; want 2", edit("version", 1)},
	{leaseFile, "unexpected end of JSON input", func([]byte) []byte { return nil }},
	{leaseFile, "larger than 4096 octets", func(b []byte) []byte { return append(b, strings.Repeat(" ", 4096)...) }},
	{keyFile, "version 0; want 2", edit("version", nil)},
	{keyFile, "privateKey", edit("privateKey", "nonsense")},
	{keyFile, "that of gateway-key.json", edit("privateKey", base64.StdEncoding.EncodeToString(append([]byte{8}, make([]byte, 31)...)))},
	{objectsFile, "that of gateway-key.json", edit("publicKey", keyText(7))},
	{objectsFile, "version 9; want 2", edit("version", 9)},
	{objectsFile, "cannot unmarshal", edit("tunnelEndpoints", "none")},
	{objectsFile, "cannot unmarshal", edit("natMappings", []int{1})},
	{objectsFile, "cluster.clusterID: ", edit("cluster", map[string]string{"clusterID": "a b"})},
	{locationsFile, "version 9; want 2", edit("version", 9)},
	{locationsFile, "cannot unmarshal", edit("podNetwork", "none")},
	{objectsFile, "unexpected end of JSON input", func(b []byte) []byte { return b[:len(b)/2] }},
	{objectsFile, "larger than 16777216 octets", func(b []byte) []byte { return append(b, strings.Repeat(" ", objectsLimit)...) }},
}

func edit(field string, value any) func([]byte) []byte {
	return func(text []byte) []byte {
		var all map[string]any
		if err := json.Unmarshal(text, &all); err != nil {
			panic(err)
		}
		all[field] = value
		text, err := json.Marshal(all)
		if err != nil {
			panic(err)
		}
		return text
	}
}

func TestADamagedSnapshotIsRefused(t *testing.T) {
	for _, d := range damages {
		o, _ := saved(t)
		path := filepath.Join(o.StateDirectory, d.file)
		text, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(path, d.damage(text), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		if known, err := remember(o, noon); known != nil || err == nil || !strings.Contains(err.Error(), d.want) || !strings.Contains(err.Error(), d.file) {
			t.Errorf("%s: %v, %v; want %q", d.file, known, err, d.want)
		}
	}
	for _, name := range []string{keyFile, objectsFile, locationsFile} { // not the lease file: without it there is no snapshot, and no error
		o, _ := saved(t)
		if err := os.Remove(filepath.Join(o.StateDirectory, name)); err != nil {
			t.Fatal(err)
		}
		if known, err := remember(o, noon); known != nil || err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v, %v", name, known, err)
		}
	}
}

// Saved objects are evaluated by the same code as objects of the API server. Whatever the file
// contains, remember returns a snapshot or an error.
func FuzzSnapshot(f *testing.F) {
	private := [32]byte{8, 1}
	text, err := json.Marshal(savedFrom(self, private, []v1alpha1.TunnelEndpoint{endpoint(1), endpoint(2)}, []v1alpha1.NatMapping{natMapping(1, map[string]string{"10.7.7.7": "10.245.0.9"})}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, text []byte) {
		var s savedObjects
		if json.Unmarshal(text, &s) != nil {
			return
		}
		gw, problems := gatewayFor(s.Cluster, private, site, s.TunnelEndpoints, s.NatMappings)
		again, problemsAgain := gatewayFor(s.Cluster, private, site, s.TunnelEndpoints, s.NatMappings)
		if !reflect.DeepEqual(gw, again) || !reflect.DeepEqual(problems, problemsAgain) {
			t.Errorf("decided differently:\n%+v\n%+v", gw, again)
		}
	})
}

// serves waits until a replica begins to serve (want) or stops.
func serves(t *testing.T, r *testReplica, want bool) {
	t.Helper()
	select {
	case got := <-r.serving:
		if got != want {
			t.Fatalf("serves: %v; want %v", got, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("serves: not %v within a minute: %v", want, r.Ready())
	}
}

// testCarryingOn starts replicas while the API server is unavailable. s has the CRDs.
func testCarryingOn(t *testing.T, s *apiServer) {
	begin := func(t *testing.T, namespace string) (GatewayOptions, *apiPath) {
		t.Helper()
		s.namespace(t, namespace)
		te := endpoint(7)
		te.Namespace, te.CreationTimestamp, te.Generation = namespace, metav1.Time{}, 0
		s.create(t, &te)
		t.Cleanup(func() { _ = s.client.Delete(context.Background(), &te) })
		path, config := newAPIPath(t, s)
		return GatewayOptions{Config: config, Namespace: namespace, Pod: "p", Cluster: self, StateDirectory: t.TempDir()}, path
	}
	files := func(t *testing.T, o GatewayOptions, n int) {
		t.Helper()
		within(t, fmt.Sprintf("%d files", n), func() error {
			entries, err := os.ReadDir(o.StateDirectory)
			entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return e.Name() == othersFile }) // ignore the file that a standby has, too
			if len(entries) != n {
				return fmt.Errorf("%v, %w", entries, err)
			}
			return err
		})
	}
	holder := func(t *testing.T, namespace, name string) {
		t.Helper()
		within(t, "the Lease of "+name, func() error {
			var lease coordinationv1.Lease
			if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: isthmus.LeaseGateway}, &lease); err != nil || holderOf(&lease) != name {
				return fmt.Errorf("it is that of %q, %w", holderOf(&lease), err)
			}
			return nil
		})
	}
	delivered := func(t *testing.T, r *testReplica) (Snapshot, error) {
		t.Helper()
		type delivery struct {
			s   Snapshot
			err error
		}
		got := make(chan delivery, 10)
		go r.Snapshots(t.Context(), func(s Snapshot, err error) { got <- delivery{s, err} })
		first := <-got
		if first.err != nil {
			t.Errorf("the first delivery is not to be used: %v", first.err)
		}
		return first.s, (<-got).err
	}

	t.Run("it uses its snapshot until the API server is back", func(t *testing.T) {
		o, path := begin(t, "carries")
		r := start(t, o)
		serves(t, r, true)
		files(t, o, 4)
		r.mu.Lock()
		before := r.desired.snapshot
		r.mu.Unlock()
		path.cut()
		r.stop() // without a connection the replica cannot release the Lease
		files(t, o, 4)

		for range 2 { // several restarts in a row
			r = start(t, o)
			serves(t, r, true)
			s, why := delivered(t, r)
			if !reflect.DeepEqual(s, before) || len(s.Gateway.Peers) != 1 {
				t.Errorf("carries on with %+v\nwant %+v", s, before)
			}
			if ready := r.Ready(); why == nil || ready == nil || !strings.Contains(why.Error(), "this gateway has run since ") || !strings.Contains(ready.Error(), why.Error()) {
				t.Errorf("it says %v, ready: %v", why, ready)
			}
			r.stop()
		}
		r = start(t, o)
		serves(t, r, true)
		path.mend()
		within(t, "ready", r.Ready)
		holder(t, "carries", "p")
		if _, active := r.Active(); !active || len(r.serving) > 0 {
			t.Error("it was not active all the time")
		}
		r.mu.Lock()
		after := r.desired
		r.mu.Unlock()
		if after.err != nil || after.remembered != nil || !reflect.DeepEqual(after.snapshot, before) {
			t.Errorf("afterwards %+v", after)
		}
		r.stop()
		holder(t, "carries", "")
		files(t, o, 0)
	})

	t.Run("it yields to a successor as soon as it can read the Lease", func(t *testing.T) {
		o, path := begin(t, "gives-way")
		r := start(t, o)
		serves(t, r, true)
		files(t, o, 4)
		path.cut()
		r.stop()
		successor := start(t, GatewayOptions{Config: s.config, Namespace: "gives-way", Pod: "q", Cluster: self})
		serves(t, successor, true)
		r = start(t, o)
		serves(t, r, true) // both replicas are active until the connection is restored
		path.mend()
		serves(t, r, false)
		files(t, o, 0)
		holder(t, "gives-way", "q")
		r.stop()

		// A standby keeps no snapshot.
		r = start(t, o)
		within(t, "ready", r.Ready)
		path.cut()
		r.stop()
		files(t, o, 0)
		if known, err := remember(r.o, time.Now()); known != nil || err != nil {
			t.Errorf("a standby remembers %+v, %v", known, err)
		}
	})

	t.Run("a replica that can read the Lease does not use its snapshot", func(t *testing.T) {
		o, path := begin(t, "reads")
		r := start(t, o)
		serves(t, r, true)
		files(t, o, 4)
		path.cut()
		r.stop()
		successor := start(t, GatewayOptions{Config: s.config, Namespace: "reads", Pod: "q", Cluster: self})
		serves(t, successor, true)
		path.mend()
		r = start(t, o)
		within(t, "ready", r.Ready)
		files(t, o, 0)
		within(t, "the holder of the Lease", func() error {
			if pod, active := r.Active(); pod != "q" || active {
				return fmt.Errorf("active is %q", pod)
			}
			return nil
		})
		if n := len(r.serving); n > 0 {
			t.Errorf("it has served %d times", n)
		}
	})

	t.Run("a damaged snapshot is reported, ignored and replaced", func(t *testing.T) {
		o, path := begin(t, "damaged")
		r := start(t, o)
		serves(t, r, true)
		files(t, o, 4)
		path.cut()
		r.stop()
		if err := os.WriteFile(filepath.Join(o.StateDirectory, objectsFile), []byte("{}"), 0o600); err != nil {
			t.Fatal(err)
		}
		r = start(t, o)
		within(t, "reason", func() error {
			if err := r.Ready(); err == nil || !strings.Contains(err.Error(), objectsFile+": version 0; want 2") || !strings.Contains(err.Error(), "connection refused") {
				return fmt.Errorf("it says %w", err)
			}
			return nil
		})
		if _, active := r.Active(); active || len(r.serving) > 0 {
			t.Error("active by a damaged snapshot")
		}
		path.mend()
		serves(t, r, true)
		within(t, "a good one", func() error {
			if known, err := remember(r.o, time.Now()); known == nil {
				return fmt.Errorf("%v, %w", known, err)
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.desired.snapshot.Problems) > 0 {
				return errors.New(r.desired.snapshot.Problems[0].Error())
			}
			return nil
		})
	})
}
