package kube

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/statefile"
)

// The files of a state directory. Except for othersFile, they exist only while this replica is
// active, so a standby that restarts has no snapshot to use. leaseFile is written last: if it
// exists, the others are complete.
const (
	keyFile       = "gateway-key.json" // the only file of the snapshot with a secret
	objectsFile   = "gateway-objects.json"
	locationsFile = "gateway-places.json"
	leaseFile     = "gateway-lease.json"
	othersFile    = "gateway-others.json" // not part of the snapshot: standbys keep it, too; it contains a secret

	// snapshotVersion is the version of all files. Since version 2, the addresses of our own
	// cluster have their own file. A gateway that finds another version reports it and waits
	// for the API server.
	snapshotVersion = 2
	objectsLimit    = 16 << 20 // octets; a thousand peers with the maximum number of mappings need five MiB
	smallLimit      = 4 << 10
)

const (
	// noteInterval is the interval at which the active replica renews leaseFile, which marks it as
	// active. If only the locations of nodes and pods have changed, they are written at this
	// interval, too, because with thousands of nodes their file is a megabyte long. writeGap is the
	// minimum time between two rounds of writing, because a peer may change its objects often.
	noteInterval = 30 * time.Second
	writeGap     = time.Second

	// snapshotLife is how long after the last renewal a restarted replica may use its snapshot.
	// The kubelet waits at most five minutes before it restarts a container.
	snapshotLife = 10 * time.Minute
)

// savedKey has the private keys and preshared keys that belong to savedObjects.
type savedKey struct {
	Version    int    `json:"version"`
	PrivateKey string `json:"privateKey"`
	Next       string `json:"nextPrivateKey,omitempty"` // next private key during a rotation; empty: no rotation
	Gateways   string `json:"gatewayKey,omitempty"`     // empty: the same as PrivateKey
	// Since and NextSince are the fields of keyring.Ring with these names.
	Since     time.Time `json:"since,omitzero"`
	NextSince time.Time `json:"nextSince,omitzero"`
	Published bool      `json:"published,omitempty"`
	// Preshared has the peers' preshared keys, by cluster ID.
	Preshared map[string]PresharedKey `json:"preshared,omitempty"`
}

// savedObjects has the objects as the API server last sent them. A new version of the program
// evaluates them again.
type savedObjects struct {
	Version         int                       `json:"version"`
	Read            time.Time                 `json:"read"` // when the objects were read from the API server
	Cluster         v1alpha1.ClusterIdentity  `json:"cluster"`
	PublicKey       string                    `json:"publicKey"` // public key of the private key in use
	TunnelEndpoints []v1alpha1.TunnelEndpoint `json:"tunnelEndpoints"`
	NatMappings     []v1alpha1.NatMapping     `json:"natMappings"`

	locations savedLocations          // saved in its own file
	preshared map[string]PresharedKey // saved in the file with the private key
	keys      keyring.Ring            // saved in the file with the private key
}

// savedLocations has the addresses of our own cluster, from its Nodes and Pods.
type savedLocations struct {
	Version    int               `json:"version"`
	Site       fabric.Site       `json:"site"`                // addresses that no peer's gateway can have
	PodNetwork fabric.PodNetwork `json:"podNetwork,omitzero"` // nodes and pods to deliver to
}

// savedLease identifies the active replica.
type savedLease struct {
	Version   int       `json:"version"`
	Namespace string    `json:"namespace"` // namespace of the Lease
	Pod       string    `json:"pod"`
	Renewed   time.Time `json:"renewed"` // last contact with the API server
	Active    time.Time `json:"active"`  // when this file was written
}

// savedOthers is the state with which a restarted replica exchanges questions with the other
// gateways. Standbys save it, too: without an API server, the active gateway needs their
// answers.
type savedOthers struct {
	Version int    `json:"version"`
	Key     string `json:"key"` // result of questionKey, in base64
	acquaintance
}

// savedFrom copies the fields that package fabric reads. The caller sets locations.
func savedFrom(cluster v1alpha1.ClusterIdentity, private [32]byte, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) savedObjects {
	s := savedObjects{Version: snapshotVersion, Cluster: cluster, PublicKey: base64.StdEncoding.EncodeToString(publicKey(private)), locations: savedLocations{Version: snapshotVersion}}
	meta := func(m *metav1.ObjectMeta) metav1.ObjectMeta {
		kept := metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, CreationTimestamp: m.CreationTimestamp}
		for _, name := range []string{isthmus.AnnotationPostQuantum, isthmus.AnnotationInBand} {
			if value := m.Annotations[name]; value != "" {
				metav1.SetMetaDataAnnotation(&kept, name, value)
			}
		}
		return kept
	}
	for i := range endpoints {
		if te := &endpoints[i]; te.DeletionTimestamp.IsZero() {
			s.TunnelEndpoints = append(s.TunnelEndpoints, v1alpha1.TunnelEndpoint{ObjectMeta: meta(&te.ObjectMeta), Spec: te.Spec})
		}
	}
	for i := range mappings {
		if nm := &mappings[i]; nm.DeletionTimestamp.IsZero() {
			s.NatMappings = append(s.NatMappings, v1alpha1.NatMapping{ObjectMeta: meta(&nm.ObjectMeta), Spec: nm.Spec})
		}
	}
	slices.SortFunc(s.TunnelEndpoints, func(a, b v1alpha1.TunnelEndpoint) int { // caches list in random order
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(s.NatMappings, func(a, b v1alpha1.NatMapping) int { return cmp.Compare(a.Name, b.Name) })
	return s
}

// remembered is the snapshot that this replica saved before a restart, when it was active.
type remembered struct {
	objects  savedObjects
	snapshot Snapshot  // result of evaluating objects
	renewed  time.Time // last contact with the API server before the restart
}

// remember reads the snapshot in a state directory. It returns nil without an error if this
// replica was not the active one, or was active too long ago.
func remember(o GatewayOptions, now time.Time) (*remembered, error) {
	var lease savedLease
	err := statefile.Read(o.StateDirectory, leaseFile, smallLimit, &lease)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = wantVersion(leaseFile, lease.Version)
	}
	age := now.Sub(lease.Active)
	switch {
	case err != nil:
		return nil, err
	case lease.Namespace != o.Namespace || lease.Pod != o.Pod:
		o.Log.Info("snapshot not used: it belongs to another replica", "pod", lease.Namespace+"/"+lease.Pod)
		return nil, nil
	case age < 0 || age > snapshotLife:
		o.Log.Info("snapshot not used: it is too old, and another replica may be active", "active", lease.Active, "longest", snapshotLife)
		return nil, nil
	}
	var key savedKey
	var objects savedObjects
	if err := statefile.Read(o.StateDirectory, keyFile, objectsLimit, &key); err != nil {
		return nil, err
	}
	if err := statefile.Read(o.StateDirectory, objectsFile, objectsLimit, &objects); err != nil {
		return nil, err
	}
	if err := statefile.Read(o.StateDirectory, locationsFile, objectsLimit, &objects.locations); err != nil {
		return nil, err
	}
	if err := errors.Join(wantVersion(keyFile, key.Version), wantVersion(objectsFile, objects.Version), wantVersion(locationsFile, objects.locations.Version)); err != nil {
		return nil, err
	}
	nodes := objects.locations.PodNetwork.Nodes // sorted by name below, as later code requires
	slices.SortStableFunc(nodes, func(a, b fabric.ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
	objects.locations.PodNetwork.Nodes = slices.CompactFunc(nodes, func(a, b fabric.ClusterNode) bool { return a.Name == b.Name })
	private, err := fabric.ParseKey(key.PrivateKey)
	if err != nil {
		return nil, fmt.Errorf("%s: privateKey %w", keyFile, err)
	}
	if have := base64.StdEncoding.EncodeToString(publicKey(private)); have != objects.PublicKey {
		return nil, fmt.Errorf("%s: publicKey is %q; want %q, that of %s", objectsFile, objects.PublicKey, have, keyFile)
	}
	if wrong := fabric.CheckClusterID(objects.Cluster.ClusterID); wrong != "" {
		return nil, fmt.Errorf("%s: cluster.clusterID: %s", objectsFile, wrong)
	}
	if id := o.Cluster.ClusterID; id != "" && id != objects.Cluster.ClusterID {
		return nil, fmt.Errorf("%s: cluster.clusterID is %q; want our %q", objectsFile, objects.Cluster.ClusterID, id)
	}
	objects.preshared, objects.keys = key.Preshared, keyring.Ring{Private: private, Gateways: private,
		Since: key.Since, NextSince: key.NextSince, Published: key.Published}
	for _, field := range []struct {
		text string
		key  *[32]byte
	}{{key.Next, &objects.keys.Next}, {key.Gateways, &objects.keys.Gateways}} {
		if field.text == "" {
			continue
		}
		if *field.key, err = fabric.ParseKey(field.text); err != nil {
			return nil, fmt.Errorf("%s: %w", keyFile, err)
		}
	}
	usable, preshared, lacking := requirePreshared(objects.TunnelEndpoints, key.Preshared)
	gw, problems := gatewayFor(objects.Cluster, private, objects.locations.Site, usable, objects.NatMappings)
	snapshot := Snapshot{Gateway: gw, Problems: fabric.SortProblems(append(problems, lacking...)), Keys: objects.keys, Preshared: preshared}
	if o.Node != "" { // the Pod has another address if its sandbox was recreated
		snapshot.PodNetwork = objects.locations.PodNetwork
		snapshot.PodNetwork.Pod, snapshot.PodNetwork.Node = o.PodIP, o.Node
	}
	return &remembered{objects, snapshot, lease.Renewed}, nil
}

func wantVersion(file string, version int) error {
	if version != snapshotVersion {
		return fmt.Errorf("%s: version %d; want %d", file, version, snapshotVersion)
	}
	return nil
}

// rememberOthers reads the file that keepOthers writes. If the file is invalid, this replica
// learns about the other gateways from the API server instead.
func rememberOthers(directory string) (key []byte, known acquaintance, err error) {
	var s savedOthers
	if err := statefile.Read(directory, othersFile, smallLimit, &s); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return nil, known, err
	}
	if err := wantVersion(othersFile, s.Version); err != nil {
		return nil, known, err
	}
	if key, err = base64.StdEncoding.DecodeString(s.Key); err != nil || len(key) != sha256.Size {
		return nil, known, fmt.Errorf("%s: key: want %d octets in base64", othersFile, sha256.Size)
	}
	return key, s.acquaintance, nil
}

// Forget removes a gateway's files from a state directory, the private key first.
func Forget(directory string) error {
	return errors.Join(forgetSnapshot(directory), statefile.Remove(directory, othersFile))
}

// forgetSnapshot removes the files that only the active replica keeps.
func forgetSnapshot(directory string) error {
	if err := statefile.Remove(directory, keyFile, leaseFile, objectsFile, locationsFile); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	return nil
}

// keeper keeps a state directory up to date. It writes in its own goroutine, because a slow
// disk must not delay the election or a change. Without a directory it does nothing.
type keeper struct {
	o       GatewayOptions
	changed signal // there is something to write
	failed  func() // called when err changes

	mu   sync.Mutex
	want savedObjects
	keys keyring.Ring // keys of the objects in want; zero: nothing to save yet
	err  error        // reason why the directory is out of date; nil: it is up to date

	// Only the goroutine of run uses the fields below.
	others  savedOthers  // content of the file as last written
	have    savedObjects // content of the files as last written; Version 0: not written
	renewed time.Time    // last contact with the API server before a restart
	noted   time.Time    // when savedLease was written
	placed  time.Time    // when savedLocations was written
	kept    bool         // files of the snapshot may exist
}

func newKeeper(o GatewayOptions, failed func()) *keeper {
	return &keeper{o: o, changed: newSignal(), failed: failed, kept: o.StateDirectory != ""}
}

// put sets the objects to save, as the API server last sent them.
func (k *keeper) put(want savedObjects, keys keyring.Ring) {
	want.keys = keys
	k.mu.Lock()
	k.want, k.keys = want, keys
	k.mu.Unlock()
	k.changed.set()
}

// adopt registers the existing files as written. If put has already set newer objects, they stay.
// Call adopt before run.
func (k *keeper) adopt(r *remembered) {
	k.have, k.renewed = r.objects, r.renewed
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.keys.Private == ([32]byte{}) {
		k.want, k.keys = r.objects, r.snapshot.Keys
	}
}

// problem returns the reason why the directory is out of date, or nil.
func (k *keeper) problem() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err
}

// problems returns the result of problem as a fabric.Problem that names the directory.
func (k *keeper) problems() []fabric.Problem {
	if err := k.problem(); err != nil {
		return []fabric.Problem{{Origin: fabric.Origin{Kind: "Snapshot", Name: k.o.StateDirectory}, Message: err.Error()}}
	}
	return nil
}

// setError records the result of a write. A nil error means that the directory is up to date.
func (k *keeper) setError(err error) {
	k.mu.Lock()
	before := k.err
	k.err = err
	k.mu.Unlock()
	if (before == nil) != (err == nil) || err != nil && before.Error() != err.Error() {
		k.failed()
	}
}

// run writes until ctx ends.
func (k *keeper) run(ctx context.Context, e *election) {
	if k.o.StateDirectory == "" {
		return
	}
	tick := time.NewTicker(noteInterval)
	defer tick.Stop()
	for {
		k.keepOthers(e.acquaintance())
		if k.round(e.holder(), e.lastContact(), time.Now()) {
			select {
			case <-ctx.Done():
			case <-time.After(writeGap):
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-k.changed:
		}
	}
}

// keepOthers saves the state about the other gateways if it has changed.
func (k *keeper) keepOthers(known acquaintance) {
	k.mu.Lock()
	shared := k.keys.Gateways
	k.mu.Unlock()
	if shared == ([32]byte{}) {
		return
	}
	want := savedOthers{snapshotVersion, base64.StdEncoding.EncodeToString(questionKey(shared)), known}
	if reflect.DeepEqual(want, k.others) {
		return
	}
	k.others = want // set even if the write fails: keepOthers tries again after the next change, and round reports problems with the directory
	if err := statefile.Write(k.o.StateDirectory, othersFile, smallLimit, want); err != nil {
		k.o.Log.Warn("cannot save the state of other gateways", "file", othersFile, "error", err)
	}
}

// round writes the files that differ, or removes them if another replica is active. It returns
// false if there is nothing to do. An empty holder means that the active replica is unknown.
func (k *keeper) round(holder string, renewed, now time.Time) bool {
	k.mu.Lock()
	want, keys := k.want, k.keys
	k.mu.Unlock()
	switch {
	case holder == "" || keys.Private == ([32]byte{}):
		return false
	case holder != k.o.Pod:
		return k.forget()
	}
	if renewed.IsZero() {
		renewed = k.renewed
	}
	locations := want.locations
	want.Read, want.locations = k.have.Read, k.have.locations
	same := reflect.DeepEqual(want, k.have)
	const early = noteInterval - writeGap // tolerates ticks that come early
	moved := (!same || now.Sub(k.placed) >= early) && !reflect.DeepEqual(locations, k.have.locations)
	if same && !moved && now.Sub(k.noted) < early {
		return false
	}
	k.kept = true
	var err error
	if moved { // locations first: if this write fails, the other files stay as they are
		if err = statefile.Write(k.o.StateDirectory, locationsFile, objectsLimit, locations); err == nil {
			want.locations, k.placed = locations, now
		}
	}
	if !same && err == nil {
		want.Read = now
		key := savedKey{Version: snapshotVersion, PrivateKey: string(keyring.Text(keys.Private)), Preshared: want.preshared,
			Since: keys.Since, NextSince: keys.NextSince, Published: keys.Published}
		if keys.Next != ([32]byte{}) {
			key.Next = string(keyring.Text(keys.Next))
		}
		if keys.Gateways != keys.Private {
			key.Gateways = string(keyring.Text(keys.Gateways))
		}
		if err = statefile.Write(k.o.StateDirectory, keyFile, objectsLimit, key); err == nil {
			err = statefile.Write(k.o.StateDirectory, objectsFile, objectsLimit, want)
		}
	}
	if err == nil {
		lease := savedLease{snapshotVersion, k.o.Namespace, k.o.Pod, renewed, now}
		err = statefile.Write(k.o.StateDirectory, leaseFile, smallLimit, lease)
	}
	if err != nil {
		k.setError(fmt.Errorf("not written: %w", err))
		return true
	}
	k.have, k.noted = want, now
	k.setError(nil)
	return true
}

// forget removes the files of a replica that is no longer active.
func (k *keeper) forget() bool {
	if !k.kept {
		return false
	}
	err := forgetSnapshot(k.o.StateDirectory)
	k.setError(err)
	k.kept, k.have = err != nil, savedObjects{}
	return true
}

// reason describes how old the snapshot is, for the log and the status. since is the time at
// which this replica began to use it.
func (r *remembered) reason(since time.Time) error {
	return fmt.Errorf("the API server does not answer; this gateway has run since %s with the snapshot of %s; the API server last answered at %s",
		since.UTC().Format(time.RFC3339), r.objects.Read.UTC().Format(time.RFC3339), r.renewed.UTC().Format(time.RFC3339))
}
