// Package ipamstore keeps the Book of package ipam in the one IpamStorage of the cluster, where
// people can read it and a restart finds it again.
//
//	Load ──► Book ──► Update ──► merge patch of what differs ──► IpamStorage
//	          ▲                        │ conflict: somebody else wrote
//	          └──────── read again ◄───┘
//
// What nodes refuse the Store writes into one NetworkAllocation for each cluster, which route agents read:
// what is added is there before it is in the IpamStorage, what is freed goes after it.
//
// The object has the last word, because another manager may have written it. An object that cannot
// be read has no say: the Book stays and replaces it. So it is with one that lacks networks of peers which
// no NetworkAllocation has freed: an edit, a deletion or an older backup frees nothing.
package ipamstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// ErrNotLoaded says that Load has to succeed first.
var ErrNotLoaded = errors.New("the IPAM's books are not loaded yet")

// errNotAllocated says that Refresh has to be called again.
var errNotAllocated = errors.New("NetworkAllocations are not yet what the IPAM's books say")

// A Store keeps one Book. Its methods may be called concurrently.
type Store struct {
	client client.Client
	reader client.Reader
	log    *slog.Logger

	now func(context.Context) (time.Time, error) // what Now returns

	book atomic.Pointer[ipam.Book]

	mu          sync.Mutex // one update at a time
	loaded      bool
	object      *v1alpha1.IpamStorage // as read last; nil when there is none
	synced      bool                  // object has what Book says, and its version is current, though its spec may not be
	self        string                // our own cluster ID; empty: not known, and agents are not told our own networks
	allocations map[string]allocation // NetworkAllocations by name, as read or written last
	allocated   bool                  // these have what Book says
	revision    int64                 // the highest that was read or written
	subscribers []chan event.GenericEvent
	observers   []Observer

	queueMu sync.Mutex
	queue   []*update // that wait for mu, or for the goroutine that has it
}

// An update is one call of Update. All but f belongs to the goroutine that holds Store.mu.
type update struct {
	f    func(ipam.Book) (ipam.Book, error)
	done bool // and book and err are the result
	book ipam.Book
	err  error
}

// New makes a Store. c writes; it may read from a cache. reader reads from the API server itself.
func New(c client.Client, reader client.Reader, log *slog.Logger) *Store {
	s := &Store{client: c, reader: reader, log: log, now: func(context.Context) (time.Time, error) { return time.Now(), nil }}
	s.book.Store(new(ipam.Book))
	return s
}

// WithCluster has the Store say in the NetworkAllocation of our own cluster which networks are ours. It is
// called before Load.
func (s *Store) WithCluster(clusterID string) { s.self = clusterID }

// WithClock sets the clock of the Store, such as the API server's. It is called before Load. The default
// is this machine's clock.
func (s *Store) WithClock(now func(context.Context) (time.Time, error)) { s.now = now }

// Now returns the time for releasing networks and for ending holds.
func (s *Store) Now(ctx context.Context) (time.Time, error) { return s.now(ctx) }

// ObjectName is the name of the IpamStorage; empty: there is none.
func (s *Store) ObjectName() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.object == nil {
		return ""
	}
	return s.object.Name
}

// Book returns the Book as it is now; the zero Book before Load.
func (s *Store) Book() ipam.Book { return *s.book.Load() }

// Load reads the books; of several objects the oldest counts. When there are none, or they are
// empty or cannot be read, Load rebuilds the Book from the objects that were made from it:
// TunnelEndpoints, NetworkConfigs and NatMappings. It may be called again after an error.
func (s *Store) Load(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		book, err := s.readAll(ctx)
		if err != nil {
			return err
		}
		switch err := s.put(ctx, book); {
		case err == nil:
			s.publish(book)
			s.loaded = true
			return nil
		case !stale(err) || ctx.Err() != nil:
			return err
		} // somebody, such as the leader before, has written since: what was granted there counts
	}
}

// readAll reads the object and the NetworkAllocations, and makes the Book with which to begin.
func (s *Store) readAll(ctx context.Context) (book ipam.Book, err error) {
	object, err := s.find(ctx)
	if err != nil {
		return book, err
	}
	lost := object == nil || blank(&object.Spec)
	if !lost {
		if book, err = s.read(object); err != nil {
			s.log.Error("IpamStorage makes no sense and is made anew from the objects of the peerings", "name", object.Name, "err", err)
			lost = true
		}
	}
	if lost {
		if book, err = s.rebuild(ctx); err != nil {
			return book, fmt.Errorf("rebuild the IPAM's books: %w", err)
		}
		if object != nil {
			book = s.withNotes(book, object)
		}
	} else if book, err = s.withTunnels(ctx, book); err != nil {
		return book, fmt.Errorf("compare the IPAM's books with the TunnelEndpoints: %w", err)
	}
	s.object, s.synced = object, false
	if err := s.readAllocations(ctx); err != nil {
		return book, err
	}
	return s.withAllocations(ctx, book)
}

// Update changes the Book by f, writes what differs and returns the new Book, or the old one and an
// error. Update calls f again when another process wrote meanwhile, so f should do nothing but
// compute. It returns f's error as it is and then writes nothing. Nor does it write when nothing
// changes.
//
// The first of the updates that come during a write writes all of them together: the API server
// takes longer for an object the more peers are in it, and a patch of many entries costs it no more
// than one of a single entry.
func (s *Store) Update(ctx context.Context, f func(ipam.Book) (ipam.Book, error)) (ipam.Book, error) {
	u := &update{f: f}
	s.queueMu.Lock()
	s.queue = append(s.queue, u)
	s.queueMu.Unlock()

	s.mu.Lock()
	defer s.mu.Unlock()
	if u.done {
		return u.book, u.err
	}
	s.queueMu.Lock()
	s.queue = slices.DeleteFunc(s.queue, func(o *update) bool { return o == u })
	together := append([]*update{u}, s.queue...)
	s.queueMu.Unlock()
	if !s.loaded {
		return s.Book(), ErrNotLoaded
	}
	book, err := s.write(ctx, func(b ipam.Book) (ipam.Book, error) {
		for _, u := range together {
			var next ipam.Book
			if next, u.err = u.f(b); u.err == nil {
				b = next
			}
		}
		return b, nil
	})
	if err != nil {
		return book, err // it may be about our ctx: the others try for themselves
	}
	for _, u := range together {
		u.done, u.book = true, book
	}
	s.queueMu.Lock()
	s.queue = slices.DeleteFunc(s.queue, func(o *update) bool { return o.done })
	s.queueMu.Unlock()
	return u.book, u.err
}

// Refresh looks whether somebody else has changed or deleted the object or a NetworkAllocation, which otherwise
// shows with the next Update. What they wrote counts if it can be read. Otherwise, or if the object is gone,
// Refresh writes it again.
func (s *Store) Refresh(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.loaded {
		return ErrNotLoaded
	}
	before := s.allocations
	unchanged, err := s.sameAllocations(ctx)
	if err != nil {
		return err
	}
	if s.object != nil {
		seen := metadata()
		err := s.client.Get(ctx, client.ObjectKeyFromObject(s.object), seen)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("IpamStorage %s: %w", s.object.Name, err)
		}
		same := err == nil && seen.ResourceVersion == s.object.ResourceVersion
		switch {
		case same && unchanged && s.allocated:
			return nil
		case same:
			err = s.readAllocations(ctx)
		default:
			err = s.reread(ctx)
		}
		if err != nil {
			return err
		}
	}
	_, err = s.write(ctx, func(b ipam.Book) (ipam.Book, error) { return s.freedByHand(b, before), nil })
	if err == nil && !s.allocated {
		return errNotAllocated // nothing else would bring us back
	}
	return err
}

// Subscribe returns a channel with an event after every change. The name of its object is the ID of
// the peer whose networks, answer or mappings changed, or empty when more did: our own networks, or
// all. Events of one peer that nobody has received yet become one event. A Store never waits for a
// subscriber.
func (s *Store) Subscribe() <-chan event.GenericEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := make(chan event.GenericEvent, 2*ipam.MaxPeers)
	s.subscribers = append(s.subscribers, ch)
	return ch
}

// An Observer gets a Book, and with it the resourceVersions of the peers' NetworkAllocations.
type Observer func(book ipam.Book, version func(id string) int64)

// NotWritten is a resourceVersion that no agent reports: that of an allocation which is still to be written.
const NotWritten = math.MaxInt64

// Observe calls f with the Book as it is, and then after each write, one after the other and
// without leaving a Book out: each is what others may have read. f must not take long, or call the
// Store.
func (s *Store) Observe(f Observer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.Book(), s.versionOf)
	s.observers = append(s.observers, f)
}

// write brings the object to what f makes of the Book.
func (s *Store) write(ctx context.Context, f func(ipam.Book) (ipam.Book, error)) (ipam.Book, error) {
	for {
		book := s.Book()
		next, err := f(book)
		if err != nil {
			return book, err
		}
		err = s.put(ctx, next)
		switch {
		case err == nil:
			s.publish(next)
			return next, nil
		case !stale(err) || ctx.Err() != nil:
			return book, err
		}
		if err := s.reread(ctx); err != nil {
			return s.Book(), err
		}
	}
}

// put makes the NetworkAllocations and the object say what the Book says. The API server answers Conflict,
// NotFound or AlreadyExists when one is no longer what was read last.
func (s *Store) put(ctx context.Context, book ipam.Book) error {
	clusters := s.unallocated(book)
	s.allocated = false // until all of it is done
	if err := s.allocate(ctx, book, clusters, true); err != nil {
		return err
	}
	if err := s.putBooks(ctx, book); err != nil {
		return err
	}
	switch err := s.allocate(ctx, book, clusters, false); {
	case err == nil:
		s.allocated = true
	case stale(err): // somebody may have freed what we name
		s.object.Spec, s.synced = book.Spec(), false // it is not what Book says
		return err
	default:
		s.log.Warn("nodes refuse networks that no peer has any more, until this can be written", "err", err)
		// The books are written, and Refresh follows.
	}
	return nil
}

// putBooks makes the object say what the Book says.
func (s *Store) putBooks(ctx context.Context, book ipam.Book) error {
	kept := map[string]string{isthmus.AnnotationMappings: book.Notes(), isthmus.AnnotationFormer: book.Formers()}
	kept[isthmus.AnnotationReleased] = book.Releases(len(kept[isthmus.AnnotationMappings]) + len(kept[isthmus.AnnotationFormer]))
	if s.object == nil {
		object := &v1alpha1.IpamStorage{
			ObjectMeta: metav1.ObjectMeta{GenerateName: "ipamstorage-", Labels: map[string]string{v1alpha1.LabelIpamStorage: "true"}},
			Spec:       book.Spec(),
		}
		maps.DeleteFunc(kept, func(_, text string) bool { return text == "" })
		object.Annotations = kept
		if err := s.client.Create(ctx, object); err != nil {
			return fmt.Errorf("create IpamStorage: %w", err)
		}
		s.object, s.synced = object, true
		return nil
	}
	var have, want v1alpha1.IpamStorageSpec
	if s.synced {
		have, want = ipam.Delta(s.Book(), book)
	} else {
		have, want = s.object.Spec, book.Spec()
	}
	annotations := make(map[string]any)
	for name, want := range kept {
		switch have := s.object.Annotations[name]; {
		case have == want:
		case want == "":
			annotations[name] = nil
		default:
			annotations[name] = want
		}
	}
	if patch := patchOf(s.object.ResourceVersion, diff(&have, &want), annotations); patch != nil {
		// The answer comes without the spec, which would be as long as all peers together.
		answer := metadata()
		answer.Name = s.object.Name
		if err := s.client.Patch(ctx, answer, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return fmt.Errorf("patch IpamStorage %s: %w", s.object.Name, err)
		}
		s.object.ObjectMeta = answer.ObjectMeta
	}
	s.synced = true
	return nil
}

// metadata is that of an IpamStorage.
func metadata() *metav1.PartialObjectMetadata {
	m := new(metav1.PartialObjectMetadata)
	m.SetGroupVersionKind(v1alpha1.GroupVersion.WithKind("IpamStorage"))
	return m
}

// reread adopts what somebody else has written.
func (s *Store) reread(ctx context.Context) error {
	object, err := s.find(ctx)
	if err != nil {
		return err
	}
	allocations := s.allocations
	if err := s.readAllocations(ctx); err != nil {
		return err
	}
	before := s.Book()
	known := s.synced // and so does the log
	s.object, s.synced = object, false
	if object == nil {
		s.log.Warn("IpamStorage was deleted and is made again")
		return nil
	}
	if blank(&object.Spec) {
		s.log.Warn("IpamStorage was emptied and is filled again", "name", object.Name)
		return nil
	}
	book, err := s.read(object)
	if err != nil {
		s.log.Error("IpamStorage was changed by someone else, makes no sense now and is written again as it was", "name", object.Name, "err", err)
		return nil
	}
	if s.loaded && !s.takenBack(before, book, allocations) {
		s.log.Error("IpamStorage was changed by someone else, lacks networks that peers have and is written again as it was; want isthmus unpeer instead of an edit", "name", object.Name)
		return nil
	}
	if was := before.Own(); len(was.Nodes)+len(was.Reached)+len(was.Services) > 0 { // the object does not keep them
		own := book.Own()
		own.Nodes, own.Reached, own.Services = was.Nodes, was.Reached, was.Services
		book, _ = book.Configure(own)
	}
	if was := before.Spec(); known {
		if change := patchOf(object.ResourceVersion, diff(&was, &object.Spec), nil); change != nil {
			s.log.Info("IpamStorage was changed by someone else", "name", object.Name, "change", string(change[:min(len(change), 1000)]))
		}
	}
	s.publish(book)
	return nil
}

// read makes a Book of an object.
func (s *Store) read(object *v1alpha1.IpamStorage) (ipam.Book, error) {
	book, err := ipam.Read(&object.Spec)
	if err != nil {
		return book, err
	}
	return s.withNotes(book, object), nil
}

// withNotes adds who asked for mappings, and what peers had that have left. An annotation that
// cannot be read is as good as none: the networks are in the spec.
func (s *Store) withNotes(book ipam.Book, object *v1alpha1.IpamStorage) ipam.Book {
	for _, a := range []struct {
		name, lost string
		with       func(ipam.Book, string) (ipam.Book, error)
	}{
		{isthmus.AnnotationMappings, "so that nobody knows who asked for mappings", ipam.Book.WithNotes},
		{isthmus.AnnotationFormer, "so that peers that come back may get other networks than before", ipam.Book.WithFormers},
		{isthmus.AnnotationReleased, "so that networks of peers that have left are held for longer than they have to be",
			func(b ipam.Book, _ string) (ipam.Book, error) { return b.WithReleases(object.Annotations) }},
	} {
		noted, err := a.with(book, object.Annotations[a.name])
		if err != nil {
			s.log.Error("IpamStorage has an annotation that makes no sense, "+a.lost, "name", object.Name, "annotation", a.name, "err", err)
		}
		book = noted
	}
	return book
}

// find returns the oldest IpamStorage, or nil.
func (s *Store) find(ctx context.Context) (*v1alpha1.IpamStorage, error) {
	var list v1alpha1.IpamStorageList
	if err := s.reader.List(ctx, &list, client.MatchingLabels{v1alpha1.LabelIpamStorage: "true"}); err != nil {
		return nil, fmt.Errorf("list IpamStorages: %w", err)
	}
	items := slices.DeleteFunc(list.Items, func(o v1alpha1.IpamStorage) bool { return !o.DeletionTimestamp.IsZero() })
	if len(items) == 0 {
		return nil, nil
	}
	slices.SortFunc(items, func(a, b v1alpha1.IpamStorage) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID))
	})
	for _, other := range items[1:] {
		s.log.Warn("there is more than one IpamStorage, and only the oldest counts", "counts", items[0].Name, "ignored", other.Name)
	}
	return &items[0], nil
}

// blank reports whether nothing was ever kept in the spec.
func blank(spec *v1alpha1.IpamStorageSpec) bool {
	return len(spec.ClusterSubnets) == 0 && len(spec.EndpointMappings) == 0 && spec.PodCIDR == "" && spec.ServiceCIDR == "" && spec.ExternalCIDR == ""
}

// versionOf is the resourceVersion of a peer's NetworkAllocation, or NotWritten where that does not name what
// the peer has in the Book.
func (s *Store) versionOf(id string) int64 {
	a := s.allocations[fabric.AllocationName(id)]
	g, _ := s.Book().GrantOf(id)
	for _, p := range []netip.Prefix{g.Pod, g.External} {
		if p.IsValid() && !slices.Contains(a.spec.Networks, p.String()) {
			return NotWritten
		}
	}
	return fabric.Version(a.version)
}

// publish makes next the Book, and tells the observers, since NetworkAllocations may be others, and the
// subscribers which peers changed.
func (s *Store) publish(next ipam.Book) {
	was := s.book.Swap(&next)
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

// send never blocks: it takes back what nobody has received yet and joins it with what is new. Only
// one goroutine sends.
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
