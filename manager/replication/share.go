package replication

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// maxServicesAnswer takes the place of maxAnswer for PeerServices. A list has up to 16 objects,
// each with at most 2,500 endpoints.
const maxServicesAnswer = 16 << 20

// coalesce is the time for which a sharer collects changes before it writes them.
const coalesce = 200 * time.Millisecond

// concurrentWrites is the number of objects that a sharer writes concurrently. An importer's API
// server permits some ten concurrent requests from all exporters together.
const concurrentWrites = 4

// Sharing is the progress of the export of services to a peer.
type Sharing struct {
	// Condition is empty while nothing is exported and the peer has nothing of ours.
	Condition Condition
	// Withdrawn is true if the peer has no PeerServices of ours, for example because it does not
	// serve the kind.
	Withdrawn bool
	// Refused lists services that the peer does not serve as we export them.
	Refused []isthmus.RefusedService
	// Behind is the time at which the peer began to lack some of our exports, or zero if it has all
	// of them.
	Behind time.Time
}

func (s Sharing) equal(o Sharing) bool {
	return s.Condition == o.Condition && s.Withdrawn == o.Withdrawn && slices.Equal(s.Refused, o.Refused)
}

// Share sets the PeerServices that a peer should have, by object name. The Replicator keeps want,
// which must not be changed afterwards. Until the first call for a peer, its PeerServices stay
// unchanged. Only one goroutine may call Share.
func (r *Replicator) Share(id string, want map[string]isthmus.PeerServicesSpec) {
	r.mu.Lock()
	before := r.shares[id]
	r.mu.Unlock()
	same := maps.EqualFunc(before, want, isthmus.PeerServicesSpec.Equal) // the comparison takes long, so it is made without r.mu
	r.mu.Lock()
	defer r.mu.Unlock()
	if !same {
		r.setBehind(id, true)
	}
	r.shares[id] = want
	if w := r.workers[id]; w != nil {
		wake(w.share)
	}
}

// Sharing returns the progress of the export to a peer. It returns false before the first check of
// the peer.
func (r *Replicator) Sharing(id string) (Sharing, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.sharings[id]
	s.Behind = r.behind[id]
	return s, ok
}

// setBehind records whether a peer lacks some of our exports, and since when. The caller holds
// r.mu.
func (r *Replicator) setBehind(id string, lacks bool) {
	switch {
	case !lacks:
		delete(r.behind, id)
	case r.behind[id].IsZero():
		r.behind[id] = r.opts.Now()
	}
}

// A sharer makes the PeerServices at one peer equal to those passed to Share, over one link. It
// runs beside its worker, so that frequent changes of services do not delay NetworkConfigs. With
// Options.Withdraw, it ends once the peer has no PeerServices of ours.
type sharer struct {
	w    *worker
	link *link

	have   map[string]*isthmus.PeerServices
	listed bool
	over   bool // with Options.Withdraw: the peer has no PeerServices of ours left
	tries  backoff
	retry  <-chan time.Time
}

func (s *sharer) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	changes, finished := make(chan change), make(chan struct{})
	go func() {
		defer close(finished)
		p := s.w.pace()
		p.max = 2 * p.max // the sharer never gives up on a peer without the CRD, so the pauses may get longer
		p.follow(ctx, s.link.servicesFeed(), &backoff{}, deliver(ctx, changes))
	}()
	defer func() {
		cancel()
		<-finished
	}()
	var soon <-chan time.Time
	for !s.over {
		select {
		case <-ctx.Done():
			return
		case c := <-changes:
			s.take(c)
		case <-s.w.share:
		case <-s.retry:
			s.retry = nil
		case <-soon:
			soon = nil
			s.sync(ctx)
			continue
		}
		if soon == nil {
			soon = time.After(coalesce)
		}
	}
}

// take applies a change from the peer's API server.
func (s *sharer) take(c change) {
	keep := func(o client.Object) {
		if p, ok := o.(*isthmus.PeerServices); ok && len(s.have) < maxListed {
			p.ManagedFields = nil
			s.have[p.Name] = p
		}
	}
	switch {
	case c.err != nil:
		s.fail(c.err, true)
	case c.full:
		s.have, s.listed = make(map[string]*isthmus.PeerServices, len(c.all)), true
		for _, o := range c.all {
			keep(o)
		}
	case c.deleted:
		delete(s.have, c.object.GetName())
	default:
		keep(c.object)
	}
}

// fail reports the cause of a failed request. The worker handles errors that break the link.
func (s *sharer) fail(err error, reading bool) {
	reason, text := diagnose(err)
	switch {
	case breaks(reason):
		return
	case reading && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err)):
		s.listed = false
		sharing, lacks := Sharing{Withdrawn: true}, len(s.wanted()) > 0
		if lacks {
			sharing.Condition = Condition{metav1.ConditionFalse, isthmus.ReasonNotSupported, fmt.Sprintf(
				"%s %s; the peer does not share services; run `isthmus install --services` and `isthmus peer --services` there, with a current Isthmus", s.link, text)}
		}
		s.report(sharing, lacks)
	default:
		sharing := s.seen()
		sharing.Condition = failure(s.link.String(), err)
		s.report(sharing, true)
	}
}

func (s *sharer) wanted() map[string]isthmus.PeerServicesSpec {
	s.w.r.mu.Lock()
	defer s.w.r.mu.Unlock()
	return s.w.r.shares[s.w.peer.ID]
}

// sync writes the objects at the peer that differ from those passed to Share.
func (s *sharer) sync(ctx context.Context) {
	s.w.r.mu.Lock()
	want, known := s.w.r.shares[s.w.peer.ID]
	s.w.r.mu.Unlock()
	if !s.listed || !known && !s.w.r.opts.Withdraw {
		return
	}
	var failed error
	for _, name := range slices.Sorted(maps.Keys(s.have)) {
		if _, wanted := want[name]; !wanted && s.have[name].DeletionTimestamp.IsZero() {
			if err := s.remove(ctx, s.have[name]); err != nil {
				failed = err
			}
		}
	}
	if err := s.writeAll(ctx, want); err != nil {
		failed = err
	}
	switch {
	case ctx.Err() != nil:
		return
	case failed == nil:
		s.tries.reset()
		sharing := s.seen()
		if n := services(want); len(want) > 0 {
			sharing.Condition = Condition{metav1.ConditionTrue, isthmus.ReasonShared, fmt.Sprintf("the peer has our %s", n)}
		}
		s.report(sharing, false)
		return
	case !apierrors.IsConflict(failed) && !apierrors.IsAlreadyExists(failed): // after these two errors, the watch will bring the present object
		s.fail(failed, false)
	}
	s.retry = time.After(s.tries.next(s.w.r.pace))
}

func services(want map[string]isthmus.PeerServicesSpec) string {
	n := 0
	for _, spec := range want {
		n += len(spec.Services)
	}
	if n == 1 {
		return "1 exported service"
	}
	return fmt.Sprintf("%d exported services", n)
}

// writeAll writes the objects at the peer that differ from want. It writes several concurrently,
// because the peer may be far away.
func (s *sharer) writeAll(ctx context.Context, want map[string]isthmus.PeerServicesSpec) (failed error) {
	type result struct {
		made *isthmus.PeerServices
		err  error
	}
	var differ []string
	for name, spec := range want {
		if have := s.have[name]; have == nil || have.DeletionTimestamp.IsZero() && !have.Spec.Equal(spec) { // an object that is being deleted is recreated once it is gone
			differ = append(differ, name)
		}
	}
	slices.Sort(differ)
	results, turns := make([]result, len(differ)), make(chan struct{}, concurrentWrites)
	var group sync.WaitGroup
	for i, name := range differ {
		turns <- struct{}{}
		group.Go(func() {
			defer func() { <-turns }()
			results[i].made, results[i].err = s.write(ctx, s.have[name], name, want[name])
		})
	}
	group.Wait()
	for i, name := range differ {
		if failed = cmp.Or(results[i].err, failed); results[i].err == nil {
			results[i].made.ManagedFields = nil
			s.have[name] = results[i].made
		}
	}
	return failed
}

// write creates or updates an object at the peer.
func (s *sharer) write(ctx context.Context, have *isthmus.PeerServices, name string, spec isthmus.PeerServicesSpec) (*isthmus.PeerServices, error) {
	ctx, cancel := context.WithTimeout(ctx, s.w.r.pace.request)
	defer cancel()
	var made isthmus.PeerServices
	if have == nil {
		have = &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: s.link.namespace, Name: name}, Spec: spec}
		return &made, s.link.services(http.MethodPost).Body(have).Do(ctx).Into(&made)
	}
	put := func() error {
		have = have.DeepCopy()
		have.Spec = spec
		return s.link.services(http.MethodPut).Name(name).Body(have).Do(ctx).Into(&made)
	}
	err := put()
	if apierrors.IsConflict(err) { // the peer has written the status meanwhile, so our version is outdated
		have = new(isthmus.PeerServices)
		if err := s.link.services(http.MethodGet).Name(name).Do(ctx).Into(have); err != nil || !have.DeletionTimestamp.IsZero() {
			return have, err
		}
		err = put()
	}
	return &made, err
}

func (s *sharer) remove(ctx context.Context, o *isthmus.PeerServices) error {
	ctx, cancel := context.WithTimeout(ctx, s.w.r.pace.request)
	defer cancel()
	err := s.link.services(http.MethodDelete).Name(o.Name).Body(metav1.NewPreconditionDeleteOptions(string(o.UID))).Do(ctx).Error()
	if err == nil || apierrors.IsNotFound(err) {
		delete(s.have, o.Name)
		return nil
	}
	return err
}

// seen returns Withdrawn and Refused of the Sharing, according to the objects at the peer. A
// refusal counts only if it is about the present content of its object.
func (s *sharer) seen() (sharing Sharing) {
	sharing.Withdrawn = s.listed && len(s.have) == 0
	for _, name := range slices.Sorted(maps.Keys(s.have)) {
		if o := s.have[name]; o.Status.ObservedGeneration == o.Generation {
			for _, refused := range o.Status.Refused[:min(len(o.Status.Refused), isthmus.MaxExportedServices)] {
				refused.Reason, refused.Message = quote(refused.Reason), quote(refused.Message)
				sharing.Refused = append(sharing.Refused, refused)
			}
		}
	}
	return sharing
}

// report stores the Sharing of a sharer, and triggers Changed if the Sharing is new.
func (s *sharer) report(sharing Sharing, lacks bool) {
	r, id := s.w.r, s.w.peer.ID
	if r.opts.Withdraw { // with Options.Withdraw, nobody reads the Sharing
		s.over = sharing.Withdrawn
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers[id] != s.w { // the worker was dismissed in the meantime
		return
	}
	r.setBehind(id, lacks)
	before, known := r.sharings[id]
	r.sharings[id] = sharing
	if known && before.equal(sharing) {
		return
	}
	r.news[id] = struct{}{}
	wake(r.wakeup)
}

// services prepares a request for the PeerServices at the peer.
func (l *link) services(verb string) *rest.Request {
	return l.peerServices.Verb(verb).Namespace(l.namespace).Resource("peerservices").MaxRetries(0)
}

// servicesFeed returns a feed of the PeerServices in the tenant namespace at the peer. Only this
// manager writes PeerServices there.
func (l *link) servicesFeed() feed {
	return feed{
		list: func(ctx context.Context, o metav1.ListOptions) ([]client.Object, metav1.ListInterface, error) {
			var list isthmus.PeerServicesList
			err := l.services(http.MethodGet).VersionedParams(&o, parameters).Do(ctx).Into(&list)
			all := make([]client.Object, 0, min(len(list.Items), maxListed))
			for i := range list.Items[:min(len(list.Items), maxListed)] { // the server may ignore the limit of the list
				all = append(all, &list.Items[i])
			}
			return all, &list, err
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return l.services(http.MethodGet).VersionedParams(&o, parameters).Watch(ctx)
		},
	}
}
