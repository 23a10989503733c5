// Package ipamstore stores the State of package ipam in one NetworkAllocation for each cluster.
// These objects survive a restart, and people can read them. Route agents and gateways read the
// same objects. The manager that leads owns the Store; all controllers change the State through
// Update.
//
//	Load ──► State ──► Update ──► NetworkAllocations ──► IpamStorage ──► freed networks ──► State
//	          ▲                        │ conflict: somebody else wrote
//	          └──────── read again ◄───┘
//
// The IpamStorage is a copy in Liqo's format, for Liqo's components. The Store writes it after each
// allocation. The Store reads it only to import the state of a Liqo installation, if our own
// cluster has no NetworkAllocation yet. If the resourceVersion of the IpamStorage has changed,
// another manager has allocated networks.
//
// Each manager that becomes the leader begins a session, with a number higher than all earlier
// ones. The Store accepts a write of another manager if the session of that manager is higher than
// ours, and if each network that the write removes is listed as freed. The Store overwrites any
// other change, such as an edit, a deletion or an older backup. The comment of
// NetworkAllocationSpec.Session lists two exceptions.
package ipamstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// errNotLoaded means that no call of Load has succeeded yet.
var errNotLoaded = errors.New("the IPAM state is not loaded yet")

// errUnread means that another manager has written, and that its writes must be read first.
var errUnread = apierrors.NewConflict(schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "ipamstorages"}, "", errors.New("another manager has changed the IPAM state"))

// errNotAllocated means that NetworkAllocations lack a part of the State, so Refresh must be called
// again.
var errNotAllocated = errors.New("the IPAM state is not written into NetworkAllocations yet")

// A Store stores one State. Its methods may be called concurrently.
type Store struct {
	client client.Client
	reader client.Reader
	log    *slog.Logger

	now func(context.Context) (time.Time, error) // implements the method Now

	state atomic.Pointer[ipam.State]

	mu          sync.Mutex // held during an update
	loaded      bool
	object      *v1alpha1.IpamStorage // as last read; nil if it does not exist
	synced      bool                  // the IpamStorage has the State, and object has its current resourceVersion, but perhaps an outdated spec
	self        string                // ID of our own cluster, whose NetworkAllocation has our own networks
	allocations map[string]allocation // by name, as last read or written
	session     int64                 // resourceVersion of the IpamStorage when this manager began to write
	read        int64                 // value of session when all objects were last read; if session differs, all objects must be read first
	allocated   bool                  // whether all NetworkAllocations match the State
	revision    int64                 // the highest revision read or written
	subscribers []chan event.GenericEvent
	observers   []Observer

	queueMu sync.Mutex
	queue   []*update // updates that wait for mu, or are in progress
}

// An update is one call of Update. Fields other than f belong to the goroutine that holds Store.mu.
type update struct {
	f     func(ipam.State) (ipam.State, error)
	done  bool // state and err are set
	state ipam.State
	err   error
}

// New makes a Store for the cluster with the given ID. c writes, and may read from a cache. reader
// must read from the API server itself.
func New(c client.Client, reader client.Reader, clusterID string, log *slog.Logger) *Store {
	s := &Store{client: c, reader: reader, self: clusterID, log: log, now: func(context.Context) (time.Time, error) { return time.Now(), nil }}
	s.state.Store(new(ipam.State))
	return s
}

// WithClock sets the clock of the Store, such as the API server's. Call it before Load. The default
// is this machine's clock.
func (s *Store) WithClock(now func(context.Context) (time.Time, error)) { s.now = now }

// Now returns the time to use for releases and holds.
func (s *Store) Now(ctx context.Context) (time.Time, error) { return s.now(ctx) }

// State returns the current State; before Load it is zero.
func (s *Store) State() ipam.State { return *s.state.Load() }

// Load reads the NetworkAllocations. If our own cluster has none, Load imports the IpamStorage. If
// the IpamStorage is missing or invalid, Load rebuilds the State from TunnelEndpoints,
// NetworkConfigs and NatMappings. Load may be called again after an error.
func (s *Store) Load(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		object, err := s.find(ctx)
		if err == nil {
			err = s.takeOver(ctx, object)
		}
		if err != nil && !stale(err) {
			return err
		}
		if err != nil {
			continue // another manager was faster
		}
		state, err := s.readAll(ctx)
		if err != nil {
			return err
		}
		s.read = s.session
		switch err := s.put(ctx, state); {
		case err == nil:
			s.publish(state)
			s.loaded = true
			return nil
		case !stale(err) || ctx.Err() != nil:
			return err
		} // a previous leader has written in the meantime, and its allocations count
	}
}

// Update applies f to the State, writes the difference and returns the new State. On an error it
// returns the old State. If another process has written in the meantime, Update calls f again, so f
// must be pure. If f fails, Update writes nothing and returns f's error unchanged. It does not
// write if nothing changes.
//
// The first of several updates that arrive during a write writes them all together, because a patch
// of many entries costs the API server no more than a patch of one.
func (s *Store) Update(ctx context.Context, f func(ipam.State) (ipam.State, error)) (ipam.State, error) {
	u := &update{f: f}
	s.queueMu.Lock()
	s.queue = append(s.queue, u)
	s.queueMu.Unlock()

	s.mu.Lock()
	defer s.mu.Unlock()
	if u.done {
		return u.state, u.err
	}
	s.queueMu.Lock()
	s.queue = slices.DeleteFunc(s.queue, func(o *update) bool { return o == u })
	together := append([]*update{u}, s.queue...)
	s.queueMu.Unlock()
	if !s.loaded {
		return s.State(), errNotLoaded
	}
	state, err := s.write(ctx, func(b ipam.State) (ipam.State, error) {
		for _, u := range together {
			var next ipam.State
			if next, u.err = u.f(b); u.err == nil {
				b = next
			}
		}
		return b, nil
	})
	if err != nil {
		return state, err // the error may be about this caller's ctx, so the other callers write their updates themselves
	}
	for _, u := range together {
		u.done, u.state = true, state
	}
	s.queueMu.Lock()
	s.queue = slices.DeleteFunc(s.queue, func(o *update) bool { return o.done })
	s.queueMu.Unlock()
	return u.state, u.err
}

// Refresh checks whether another program has changed or deleted the IpamStorage or a
// NetworkAllocation, and overwrites changes that are not accepted. Without Refresh, only the next
// Update would detect such changes.
func (s *Store) Refresh(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.loaded {
		return errNotLoaded
	}
	unchanged, err := s.sameAllocations(ctx)
	if err != nil {
		return err
	}
	if s.object != nil {
		seen := Metadata()
		err := s.client.Get(ctx, client.ObjectKeyFromObject(s.object), seen)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("IpamStorage %s: %w", s.object.Name, err)
		}
		if err == nil && seen.ResourceVersion == s.object.ResourceVersion && unchanged && s.allocated && s.synced {
			return nil
		}
		if err := s.reread(ctx); err != nil {
			return err
		}
	}
	_, err = s.write(ctx, func(b ipam.State) (ipam.State, error) { return b, nil })
	if err == nil && !s.allocated {
		return errNotAllocated // no event would trigger another Refresh
	}
	return err
}

// Subscribe returns a channel with an event after every change. The name of the event's object is
// the ID of the peer whose networks, answer or mappings changed. An empty name stands for our own
// networks or for all peers. Pending events of one peer are merged. A Store never waits for a
// subscriber.
func (s *Store) Subscribe() <-chan event.GenericEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := make(chan event.GenericEvent, 2*ipam.MaxPeers)
	s.subscribers = append(s.subscribers, ch)
	return ch
}

// An Observer is called with a State. version returns the resourceVersion of a peer's
// NetworkAllocation.
type Observer func(state ipam.State, version func(id string) int64)

// NotWritten is the resourceVersion of an allocation that is not written yet. No agent ever reports
// it.
const NotWritten = math.MaxInt64

// Observe calls f with the current State, and then with every State that was written, in order:
// other processes may have read any of these States. f must be fast, and must not call the Store.
func (s *Store) Observe(f Observer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.State(), s.versionOf)
	s.observers = append(s.observers, f)
}

// write applies f to the State and writes the result. Before that, it removes from the State the
// holds that somebody ended by hand.
func (s *Store) write(ctx context.Context, f func(ipam.State) (ipam.State, error)) (ipam.State, error) {
	for {
		state := s.State()
		next, err := f(s.freedManually(state))
		if err != nil {
			return state, err
		}
		err = s.put(ctx, next)
		switch {
		case err == nil:
			s.publish(next)
			return next, nil
		case !stale(err) || ctx.Err() != nil:
			return state, err
		}
		if err := s.reread(ctx); err != nil {
			return s.State(), err
		}
	}
}

// put writes the State into the NetworkAllocations and the IpamStorage. The API server answers
// Conflict, NotFound or AlreadyExists if one of these objects is not as last read.
func (s *Store) put(ctx context.Context, state ipam.State) error {
	if s.read != s.session {
		return errUnread
	}
	clusters := s.unallocated(state)
	s.allocated = false // until all objects are written
	if err := s.allocate(ctx, state, clusters, true); err != nil {
		return err
	}
	if err := s.mirror(ctx, state); err != nil {
		return err
	}
	switch err := s.allocate(ctx, state, clusters, false); {
	case err == nil:
		s.allocated = true
		for name, a := range s.allocations {
			a.pending = false
			s.allocations[name] = a
		}
	case stale(err): // somebody may have freed a network of the State
		s.object.Spec, s.synced = state.Spec(), false // the IpamStorage has this state, but the Store does not
		return err
	default:
		s.log.Warn("cannot write NetworkAllocations; nodes refuse released networks until a write succeeds", "error", err)
		// The next Refresh tries again.
	}
	return nil
}

// mirror writes the State into the IpamStorage.
func (s *Store) mirror(ctx context.Context, state ipam.State) error {
	var have, want v1alpha1.IpamStorageSpec
	if s.synced {
		have, want = ipam.Delta(s.State(), state)
	} else {
		have, want = s.object.Spec, state.Spec()
	}
	if patch := patchOf(s.object.ResourceVersion, diff(&have, &want)); patch != nil {
		// PartialObjectMetadata makes the API server answer without the spec, which has all peers.
		answer := Metadata()
		answer.Name = s.object.Name
		if err := s.client.Patch(ctx, answer, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return fmt.Errorf("patch IpamStorage %s: %w", s.object.Name, err)
		}
		s.object.ObjectMeta = answer.ObjectMeta
	}
	s.synced = true
	return nil
}

// Metadata returns an empty IpamStorage that has metadata only. A cache needs only the version of
// the IpamStorage. The spec has 305 octets for each peer, and changes with every new peer.
func Metadata() *metav1.PartialObjectMetadata {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("IpamStorage"))
	return m
}

// reread adopts the writes of other managers. It ignores all other changes, which the method write
// then reverts.
func (s *Store) reread(ctx context.Context) error {
	object, err := s.find(ctx)
	if err != nil {
		return err
	}
	if object != nil && object.ResourceVersion == s.object.ResourceVersion && s.read == s.session {
		return s.readAllocations(ctx) // no other manager has written, so nothing is adopted
	}
	session, before, known := s.read, s.allocations, s.synced
	if err := s.takeOver(ctx, object); err != nil {
		if stale(err) {
			err = nil // another manager was faster; write tries again
		}
		return err
	}
	if err := s.readAllocations(ctx); err != nil {
		return err
	}
	s.read = s.session
	state := s.State()
	if next := s.adopt(state, session, before); next != nil {
		s.publish(*next)
	} else if was := state.Spec(); known { // the State is known, so the change can be logged
		if change := patchOf("", diff(&was, &s.object.Spec)); change != nil {
			s.log.Warn("another client has changed or deleted the IpamStorage, which is only a copy of the IPAM state; writing it again; use isthmus unpeer, or edit NetworkAllocations",
				"name", s.object.Name, "change", string(change[:min(len(change), 1000)]))
		}
	}
	return nil
}

// ipamStorage is the name of the IpamStorage if no Liqo installation left one. The name is fixed,
// so that only one of two managers can create it.
const ipamStorage = "ipamstorage-isthmus"

// takeOver begins a session by writing the IpamStorage. object is the result of find. From then on,
// a manager with an earlier session cannot allocate, because its next write of the IpamStorage
// conflicts. So the manager with the new session can read all earlier allocations. takeOver returns
// a conflict if another manager was faster.
func (s *Store) takeOver(ctx context.Context, object *v1alpha1.IpamStorage) (err error) {
	if object == nil {
		object = &v1alpha1.IpamStorage{ObjectMeta: metav1.ObjectMeta{Name: ipamStorage, GenerateName: "ipamstorage-", Labels: map[string]string{v1alpha1.LabelIpamStorage: "true"}}, Spec: ipam.State{}.Spec()}
		err = s.client.Create(ctx, object)
	} else {
		answer := Metadata()
		answer.Name = object.Name
		err = s.client.Patch(ctx, answer, client.RawPatch(types.MergePatchType, fmt.Appendf(nil,
			`{"metadata":{"resourceVersion":%[1]q,"managedFields":[{}],"labels":{%[2]q:"true"},"annotations":{%[3]q:%[1]q}}}`,
			object.ResourceVersion, v1alpha1.LabelIpamStorage, isthmus.AnnotationTakenOver)))
		object.ObjectMeta = answer.ObjectMeta
	}
	if stale(err) {
		select {
		case <-ctx.Done():
		case <-time.After(rand.N(100 * time.Millisecond)): // let the other manager finish its work
		}
	}
	if err != nil {
		return fmt.Errorf("begin to write the IpamStorage: %w", err)
	}
	s.object, s.synced, s.session = object, false, fabric.Version(object.ResourceVersion)
	return nil
}

// find returns the oldest IpamStorage, or nil. It also returns an IpamStorage that is being
// deleted: until the deletion ends, that object can still be written, and no other object can have
// its name.
func (s *Store) find(ctx context.Context) (*v1alpha1.IpamStorage, error) {
	var list v1alpha1.IpamStorageList
	if err := s.reader.List(ctx, &list); err != nil {
		return nil, fmt.Errorf("list IpamStorages: %w", err)
	}
	items := slices.DeleteFunc(list.Items, func(o v1alpha1.IpamStorage) bool {
		return o.Labels[v1alpha1.LabelIpamStorage] != "true" && o.Name != ipamStorage
	})
	if len(items) == 0 {
		return nil, nil
	}
	slices.SortFunc(items, func(a, b v1alpha1.IpamStorage) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	if going := &items[0]; !going.DeletionTimestamp.IsZero() {
		s.log.Warn("IpamStorage is being deleted; it is created again when its finalizers are gone",
			"name", going.Name, "finalizers", going.Finalizers)
	}
	for _, other := range items[1:] {
		s.log.Warn("more than one IpamStorage exists; only the oldest is used", "used", items[0].Name, "ignored", other.Name)
	}
	return &items[0], nil
}

// blank reports whether the spec holds no state yet.
func blank(spec *v1alpha1.IpamStorageSpec) bool {
	return len(spec.ClusterSubnets) == 0 && len(spec.EndpointMappings) == 0 && spec.PodCIDR == "" && spec.ServiceCIDR == "" && spec.ExternalCIDR == ""
}

// versionOf returns the resourceVersion of a peer's NetworkAllocation. It returns NotWritten if the
// object lacks a network that the peer has in the State.
func (s *Store) versionOf(id string) int64 {
	a := s.allocations[fabric.AllocationName(id)]
	g, _ := s.State().AllocationOf(id)
	for _, p := range []netip.Prefix{g.Pod, g.External} {
		if p.IsValid() && !slices.Contains(a.spec.Networks, p.String()) {
			return NotWritten
		}
	}
	return a.since
}

// publish replaces the State. It notifies all observers, because versions may have changed. It
// notifies subscribers only of the peers that changed.
func (s *Store) publish(next ipam.State) {
	was := s.state.Swap(&next)
	for _, f := range s.observers {
		f(next, s.versionOf)
	}
	names := next.Changed(*was)
	if !next.Own().Equal(was.Own()) {
		names = []string{""}
	}
	if len(names) == 0 {
		return
	}
	for _, ch := range s.subscribers {
		send(ch, names)
	}
}

// send sends an event for each name, and never blocks. It takes unread events out of ch, and merges
// them with the new ones. Only one goroutine may send to ch.
func send(ch chan event.GenericEvent, names []string) {
	pending := make(map[string]bool)
	for waiting := true; waiting; {
		select {
		case e := <-ch:
			if name := e.Object.GetName(); !pending[name] {
				pending[name] = true
				names = append(names, name)
			}
		default:
			waiting = false
		}
	}
	if len(names) > cap(ch) || slices.Contains(names, "") {
		names = []string{""}
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		ch <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}}
	}
}
