// Package ipamstore stores the State of package ipam in one NetworkAllocation for each cluster.
// They survive a restart, and people can read them. Route agents and gateways read the same
// objects. The manager that leads owns the Store; all controllers change the State through Update.
//
//	Load ──► State ──► Update ──► NetworkAllocations ──► IpamStorage ──► freed networks ──► State
//	          ▲                        │ conflict: somebody else wrote
//	          └──────── read again ◄───┘
//
// The IpamStorage is a copy in Liqo's format for Liqo's components. It is read once, to import the
// state of a Liqo, if there is no NetworkAllocation of our own cluster. It is written after each
// allocation. A changed resourceVersion shows a manager that another one has allocated something
// meanwhile.
//
// A write of another manager is accepted if its stateRevision is higher than ours and it removes no
// network without freeing it. Anything else, such as an edit, a deletion or an older backup, is
// overwritten.
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

// errNotLoaded means that Load has to succeed first.
var errNotLoaded = errors.New("the IPAM state is not loaded yet")

// errUnread means that the writes of another manager have to be read first.
var errUnread = apierrors.NewConflict(schema.GroupResource{Group: v1alpha1.GroupVersion.Group, Resource: "ipamstorages"}, "", errors.New("another manager has written"))

// errNotAllocated means that Refresh has to be called again.
var errNotAllocated = errors.New("NetworkAllocations do not have the IPAM state yet")

// A Store stores one State. Its methods may be called concurrently.
type Store struct {
	client client.Client
	reader client.Reader
	log    *slog.Logger

	now func(context.Context) (time.Time, error) // implements Now

	state atomic.Pointer[ipam.State]

	mu          sync.Mutex // one update at a time
	loaded      bool
	object      *v1alpha1.IpamStorage // as last read; nil if it does not exist
	synced      bool                  // object has the State and its version is current; its spec need not be
	self        string                // ID of our own cluster, whose NetworkAllocation has our own networks
	allocations map[string]allocation // by name, as last read or written
	session     int64                 // resourceVersion of the IpamStorage when we began to write
	read        int64                 // session for which all objects were read; if it is not session, read first
	allocated   bool                  // all allocations match the State
	revision    int64                 // the highest one read or written
	subscribers []chan event.GenericEvent
	observers   []Observer

	queueMu sync.Mutex
	queue   []*update // updates that wait for mu, or are in progress
}

// An update is one call of Update. Only the goroutine that holds Store.mu may use fields other than
// f.
type update struct {
	f     func(ipam.State) (ipam.State, error)
	done  bool // state and err are set
	state ipam.State
	err   error
}

// New makes a Store for the cluster with the given ID. c writes, and may read from a cache. reader
// reads from the API server itself.
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
// that is missing or invalid, it rebuilds the State from TunnelEndpoints, NetworkConfigs and
// NatMappings. It may be called again after an error.
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
		} // a previous leader has written meanwhile, and its allocations count
	}
}

// Update changes the State by f, writes the difference and returns the new State, or the old one
// and an error. If another process has written meanwhile, Update calls f again, so f must be pure.
// If f fails, Update writes nothing and returns f's error unchanged. It does not write if nothing
// changes.
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
		return state, err // it may be about our ctx, so the other callers try by themselves
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
// NetworkAllocation, and overwrites changes that are not accepted. Otherwise only the next Update
// would notice.
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

// Subscribe returns a channel with an event after every change. The name of its object is the ID of
// the peer whose networks, answer or mappings changed. An empty name stands for our own networks or
// all peers. Events of one peer that nobody has received yet become one event. A Store never waits
// for a subscriber.
func (s *Store) Subscribe() <-chan event.GenericEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := make(chan event.GenericEvent, 2*ipam.MaxPeers)
	s.subscribers = append(s.subscribers, ch)
	return ch
}

// An Observer gets a State and the resourceVersions of the peers' NetworkAllocations.
type Observer func(state ipam.State, version func(id string) int64)

// NotWritten is the resourceVersion of an allocation that is not written yet. No agent reports it.
const NotWritten = math.MaxInt64

// Observe calls f with the current State, and then with every State that was written, in order:
// others may have read any of them. f must be fast, and must not call the Store.
func (s *Store) Observe(f Observer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.State(), s.versionOf)
	s.observers = append(s.observers, f)
}

// write applies f to the State, without holds that somebody ended by hand, and writes the result.
func (s *Store) write(ctx context.Context, f func(ipam.State) (ipam.State, error)) (ipam.State, error) {
	for {
		state := s.State()
		next, err := f(s.freedByHand(state))
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
// Conflict, NotFound or AlreadyExists if one of them is not as last read.
func (s *Store) put(ctx context.Context, state ipam.State) error {
	if s.read != s.session {
		return errUnread
	}
	clusters := s.unallocated(state)
	s.allocated = false // until all is written
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
		s.object.Spec, s.synced = state.Spec(), false // it does not equal the State of the Store
		return err
	default:
		s.log.Warn("cannot write NetworkAllocations; nodes refuse released networks until then", "error", err)
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
		// The response has no spec, which would be as long as all peers together.
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

// Metadata returns an empty IpamStorage, for its metadata only. A cache needs no more than its
// version, and the spec, with 300 octets for each peer, changes with every new peer.
func Metadata() *metav1.PartialObjectMetadata {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("IpamStorage"))
	return m
}

// reread adopts the writes of other managers. It ignores all other changes, which write then
// reverts.
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
			s.log.Warn("IpamStorage was changed or deleted by somebody else; writing it again, because it is only a copy; use isthmus unpeer, or edit NetworkAllocations",
				"name", s.object.Name, "change", string(change[:min(len(change), 1000)]))
		}
	}
	return nil
}

// ipamStorage is the name of the IpamStorage if no Liqo left one. It is fixed, so that only one of
// two managers can create it.
const ipamStorage = "ipamstorage-isthmus"

// takeOver begins a session by writing the IpamStorage; object is the result of find. From then on,
// a manager with an earlier session cannot allocate: its next write of the IpamStorage conflicts.
// So everything allocated before can be read now. The error is a conflict if another manager was
// faster.
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

// find returns the oldest IpamStorage, or nil. One that is being deleted counts until it is gone:
// nobody can create another one with its name before, and it can still be written.
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

// blank reports whether the spec never stored anything.
func blank(spec *v1alpha1.IpamStorageSpec) bool {
	return len(spec.ClusterSubnets) == 0 && len(spec.EndpointMappings) == 0 && spec.PodCIDR == "" && spec.ServiceCIDR == "" && spec.ExternalCIDR == ""
}

// versionOf returns the resourceVersion of a peer's NetworkAllocation, or NotWritten if that lacks
// networks of the peer in the State.
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

// publish replaces the State. It notifies all observers, because versions may have changed, and
// subscribers of the peers that changed.
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

// send never blocks: it takes back the events that nobody has received yet and merges them with the
// new ones. Only one goroutine may send to ch.
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
