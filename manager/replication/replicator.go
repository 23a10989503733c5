// Package replication replicates our NetworkConfigs to the API servers of the peers, and their
// answers back, as Liqo's crd-replicator does:
//
//	         here                                            at the peer
//	original UniqueName(peer) ── spec; labels at creation ──► copy UniqueName(peer)
//	in LocalNamespace         ◄──────── status ─────── in RemoteNamespace
//
// Each peer has its own worker, a goroutine that owns all state of this peer. So one peer cannot
// delay another. The worker receives events about three objects: the identity Secret, which it
// watches by name; the copies at the peer; and the original in the manager's cache. An event only
// triggers a comparison of the original and the copies.
//
//	Secret ──follow──► worker ──► link (client of the peer's API server) ──follow──► worker: plan, do, State
//
// Peers are not trusted. The client bounds the size, rate and duration of responses of a peer's API
// server, and follows no redirects. The CRD of this cluster validates the peer's answer.
//
// The package owns the copies at the peers, and the status and a finalizer of our NetworkConfigs.
// The manager runs the Replicator. Package peerings sets the peers and reads the States, and
// package services sets the exports.
package replication

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// A Target is a peer to replicate to. If the Target of a peer changes, Set replaces the peer's
// worker.
type Target struct {
	ID              string                   // clusterID of the peer
	Cluster         v1alpha1.ClusterIdentity // identity of the peer; its UniqueName is the name of the original
	LocalNamespace  string                   // tenant namespace here, with the original and the identity Secret
	RemoteNamespace string                   // tenant namespace at the peer, with the copy
	IdentitySecret  string                   // empty: Liqo's crd-replicator does the replication
	InBand          bool                     // whether the peer's API server is reached through the tunnel
}

// A Condition is one part of a State. Its message changes only if its cause changes.
type Condition struct {
	Status  metav1.ConditionStatus // empty: unknown
	Reason  string
	Message string
}

// A State is the progress of the replication to a peer. The reasons of its conditions are constants
// of package apis/isthmus/v1alpha1.
type State struct {
	// Identity is ConditionIdentity: whether the peer's API server accepts our identity.
	Identity Condition
	// Published is ConditionPublished: whether the copy at the peer equals the original. While the
	// peer does not answer, Published keeps its last value, unless the original changes: then it
	// becomes False. While the original is being deleted, the message has the reason why the
	// deletion waits.
	Published Condition
	// Answered is empty, or False with ReasonInvalid if the API server here rejects the peer's answer.
	// In that case the original keeps its last valid status.
	Answered Condition
	// Life has the expiry and renewal times of the identity.
	Life Life
}

// Life has the times of an identity. A zero time means unknown or never.
type Life struct {
	Expires time.Time // expiry of the token or the certificate, whichever is first
	Renewal time.Time // next renewal of the token
}

// Options are the options of a Replicator. ClusterID, Client, Cache and Config are required.
type Options struct {
	// ClusterID is the ID of our own cluster.
	ClusterID string
	// Client writes finalizers and statuses of the originals.
	Client client.Client
	// Cache has the NetworkConfigs. The Replicator reads and watches it; the caller runs it.
	Cache cache.Cache
	// Config is the configuration for our own API server. Workers use it to list and watch their
	// identity Secrets, each by its name, and to patch a Secret when they renew the token.
	Config *rest.Config
	Log    *slog.Logger
	// Services makes workers export services; see Share.
	Services bool
	// Withdraw makes workers delete earlier exports. It must not be set together with Services.
	Withdraw bool
	// InBand connects to the API server of a peer through the tunnel. If it is nil, the tunnel is
	// never used.
	InBand func(ctx context.Context, peer string) (net.Conn, error)
	// Now is the clock for the age of tokens. The default is time.Now.
	Now func() time.Time
}

// A Replicator replicates to any number of peers. Its methods may be called concurrently, except
// Share.
type Replicator struct {
	opts    Options
	pace    pace // for requests to each peer
	own     pace // for requests of all workers to our own API server
	secrets corev1client.SecretsGetter
	pool    pool
	changed chan event.GenericEvent

	mu       sync.Mutex
	peers    map[string]Target // as passed to Set
	workers  map[string]*worker
	ending   map[string]*worker // the last stopped worker of each peer, while it is still running
	byHome   map[string]*worker // by LocalNamespace
	ctx      context.Context    // context of Start; nil while Start is not running
	running  sync.WaitGroup
	states   map[string]State
	shares   map[string]map[string]isthmus.PeerServicesSpec // as passed to Share, by cluster ID
	sharings map[string]Sharing                             // by cluster ID; the field Behind is not set
	behind   map[string]time.Time                           // Sharing.Behind by cluster ID
	news     map[string]struct{}                            // cluster IDs of changes that Changed has not sent yet
	wakeup   chan struct{}
}

// New returns a Replicator without peers. It does nothing before Start is called.
func New(o Options) *Replicator {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Replicator{
		opts: o, pace: defaultPace, own: defaultPace.own(), pool: pool{inBand: o.InBand},
		changed: make(chan event.GenericEvent),
		peers:   map[string]Target{}, workers: map[string]*worker{}, ending: map[string]*worker{}, byHome: map[string]*worker{},
		states: map[string]State{}, shares: map[string]map[string]isthmus.PeerServicesSpec{}, sharings: map[string]Sharing{}, behind: map[string]time.Time{},
		news: map[string]struct{}{}, wakeup: make(chan struct{}, 1),
	}
}

// NeedLeaderElection makes the manager start the Replicator on the leader only.
func (r *Replicator) NeedLeaderElection() bool { return true }

// Start replicates until ctx is done, and returns when all workers have ended. It may be called
// once.
func (r *Replicator) Start(ctx context.Context) error {
	config := rest.CopyConfig(r.opts.Config)
	config.QPS = -1                                  // no limit here: ownTurns limits concurrency, and workers back off after failures
	config.ContentType = runtime.ContentTypeProtobuf // costs half as much processor time as JSON
	core, err := corev1client.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("client for identity Secrets: %w", err)
	}
	r.secrets = core
	informer, err := r.opts.Cache.GetInformer(ctx, &v1alpha1.NetworkConfig{})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch NetworkConfigs: %w", err)
	}
	registration, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    r.observe,
		UpdateFunc: func(_, object any) { r.observe(object) },
		DeleteFunc: r.observe,
	})
	if err != nil {
		return fmt.Errorf("watch NetworkConfigs: %w", err)
	}
	defer informer.RemoveEventHandler(registration) //nolint:errcheck // the informer may have ended
	if !r.opts.Cache.WaitForCacheSync(ctx) {        // with an incomplete cache, a worker would delete the copy of an original that is not cached yet
		return nil
	}

	r.mu.Lock()
	r.ctx = ctx
	for _, p := range r.peers {
		r.startWorker(p)
	}
	r.mu.Unlock()
	r.notify(ctx)

	r.mu.Lock()
	r.ctx = nil // no further workers may start
	r.mu.Unlock()
	r.running.Wait()
	return nil
}

func (r *Replicator) observe(object any) {
	if tombstone, ok := object.(toolscache.DeletedFinalStateUnknown); ok {
		object = tombstone.Obj
	}
	if o, ok := object.(client.Object); ok {
		r.enqueue(o.GetNamespace(), o.GetName())
	}
}

// Set sets the list of all peers. It may be called at any time and returns at once. It stops the
// worker of a peer that is no longer in the list or has changed; the objects at that peer stay.
// Peers without an identity Secret are ignored. If several peers have the same ID or the same local
// namespace, all but the first are ignored.
func (r *Replicator) Set(peers []Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	want, homes := make(map[string]Target, len(peers)), make(map[string]bool, len(peers))
	for _, p := range peers {
		if _, twice := want[p.ID]; p.IdentitySecret == "" || twice || homes[p.LocalNamespace] {
			continue
		}
		want[p.ID], homes[p.LocalNamespace] = p, true
	}
	for id, p := range r.peers {
		if want[id] != p {
			r.dismiss(id)
		}
	}
	for id, p := range want {
		if r.workers[id] == nil && r.ctx != nil {
			r.startWorker(p)
		}
	}
	r.peers = want
}

// startWorker starts the worker of a peer, once the previous worker with the same ID has ended. The
// caller holds r.mu.
func (r *Replicator) startWorker(p Target) {
	ctx, cancel := context.WithCancel(r.ctx)
	w := newWorker(r, p, cancel)
	before := r.ending[p.ID]
	r.workers[p.ID], r.byHome[p.LocalNamespace] = w, w
	r.running.Go(func() {
		if before != nil {
			<-before.done
		}
		w.run(ctx)
		close(w.done)
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.ending[p.ID] == w {
			delete(r.ending, p.ID)
		}
	})
}

// dismiss stops the worker of a peer. The caller holds r.mu.
func (r *Replicator) dismiss(id string) {
	delete(r.states, id)
	delete(r.sharings, id)
	delete(r.behind, id)
	w := r.workers[id]
	if w == nil {
		return
	}
	w.cancel()
	delete(r.workers, id)
	if r.byHome[w.peer.LocalNamespace] == w {
		delete(r.byHome, w.peer.LocalNamespace)
	}
	r.ending[id] = w
}

// State returns the progress of the replication to a peer. It returns false before the worker's
// first report, and for peers that Set ignored.
func (r *Replicator) State(id string) (State, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.states[id]
	return s, ok
}

// Lives returns the Life of each identity that expires, by cluster ID.
func (r *Replicator) Lives() map[string]Life {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make(map[string]Life)
	for id, s := range r.states {
		if !s.Life.Expires.IsZero() {
			all[id] = s.Life
		}
	}
	return all
}

// Changed returns a channel with an event for each peer whose State or Sharing changed. The name of
// the event's object is the cluster ID. Pending events of one peer are merged. All calls return the
// same channel, which is never closed.
func (r *Replicator) Changed() <-chan event.GenericEvent { return r.changed }

// enqueue makes a worker compare again after a change of a NetworkConfig here. The Replicator's own
// watch of the cache calls it.
func (r *Replicator) enqueue(namespace, name string) {
	r.mu.Lock()
	w := r.byHome[namespace]
	r.mu.Unlock()
	if w != nil && w.name == name {
		wake(w.wake)
	}
}

// report stores the State of a worker, and triggers Changed if the State is new. It returns the
// previous State.
func (r *Replicator) report(w *worker, s State) (before State, changed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.workers[w.peer.ID] != w { // the worker was dismissed in the meantime
		return State{}, false
	}
	before, known := r.states[w.peer.ID]
	if known && before == s {
		return before, false
	}
	r.states[w.peer.ID] = s
	r.news[w.peer.ID] = struct{}{}
	wake(r.wakeup)
	return before, true
}

// notify sends events to Changed until ctx is done. Workers never wait for the reader of Changed.
func (r *Replicator) notify(ctx context.Context) {
	for {
		r.mu.Lock()
		news := r.news
		r.news = map[string]struct{}{}
		r.mu.Unlock()
		for id := range news {
			select {
			case r.changed <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: id}}}:
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-r.wakeup:
		case <-ctx.Done():
			return
		}
	}
}

// wake wakes the reader of wakeup. The channel must have room for one value.
func wake(wakeup chan<- struct{}) {
	select {
	case wakeup <- struct{}{}:
	default: // the reader has not read the previous value yet
	}
}
