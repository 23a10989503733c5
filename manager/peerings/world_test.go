package peerings

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// A world is one cluster with the reconcilers of this package. The test plays the replicator, the
// IPAM state, the answers and the gateway.
type world struct {
	*managertest.World
	stub   *stubReplicator
	ipam   *managertest.Store
	events *events.FakeRecorder
}

// A remote is a peer of a world.
type remote struct {
	*managertest.Remote
	w *world
}

// peer creates a Peering with a cluster, and its tenant namespace.
func (w *world) peer(name string) *remote { return &remote{w.Peer(name), w} }

// describe returns the same peer without creating objects.
func (w *world) describe(name string) *remote { return &remote{w.Describe(name), w} }

// stubReplicator returns the states that a test sets.
type stubReplicator struct {
	mu      sync.Mutex
	peers   []replication.Target
	states  map[string]replication.State
	changed chan event.GenericEvent
}

func (r *stubReplicator) Set(peers []replication.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.peers = peers
}

func (r *stubReplicator) State(id string) (replication.State, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s, ok := r.states[id]
	return s, ok
}

func (r *stubReplicator) report(id string, s replication.State) {
	r.mu.Lock()
	r.states[id] = s
	r.mu.Unlock()
	r.changed <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: id}}}
}

// forget removes the state of a peer, as in a replicator that has just started.
func (r *stubReplicator) forget(id string) {
	r.mu.Lock()
	delete(r.states, id)
	r.mu.Unlock()
	r.changed <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: id}}}
}

func (r *stubReplicator) has(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.peers {
		if p.ID == id {
			return true
		}
	}
	return false
}

// newWorld starts the reconcilers. Our PodCIDR is a /16.
func newWorld(t *testing.T, foreignClusters bool) *world {
	t.Helper()
	w := &world{
		World:  managertest.Make(t, "own"),
		stub:   &stubReplicator{states: make(map[string]replication.State), changed: make(chan event.GenericEvent, 1024)},
		ipam:   &managertest.Store{},
		events: events.NewFakeRecorder(10_000),
	}
	var cancel func()
	w.Ctx, cancel = context.WithCancel(context.Background())
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.System}})

	log := slog.New(slog.DiscardHandler)
	mgr := w.Manager(foreignClusters)
	w.OK(exchange.AddIndexes(mgr.GetFieldIndexer()))
	peers := peers.Peers{Reader: mgr.GetCache(), Self: w.Self.ClusterID, ForeignClusters: foreignClusters}
	own := &facts.Keeper{
		Cache: mgr.GetCache(), Direct: mgr.GetAPIReader(), Store: w.ipam, Cluster: w.Self, Namespace: w.System, Log: log,
		StateChanged: make(chan event.GenericEvent), Events: w.events, ServiceCIDRs: managertest.ServesServiceCIDRs,
		Plan: facts.AddressPlan{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16")},
	}
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(w.Ctx) }()
	if !mgr.GetCache().WaitForCacheSync(w.Ctx) {
		t.Fatal("caches are not filled")
	}
	_, err := own.Reconcile(w.Ctx, ctrl.Request{})
	w.OK(err)
	for _, r := range []interface{ SetupWithManager(ctrl.Manager) error }{
		own,
		&Feeder{Peers: peers, Replicator: w.stub},
		&exchange.NetworkConfigReconciler{Client: mgr.GetClient(), Peers: peers, Facts: own, FactsChanged: own.Subscribe(), Log: log},
		&Reconciler{Client: mgr.GetClient(), Peers: peers, Facts: own, Store: w.ipam, Replicator: w.stub,
			Liveness:     NewLiveness(mgr.GetAPIReader(), w.System, log),
			FactsChanged: own.Subscribe(), PeerChanged: w.stub.changed, Events: w.events, Log: log},
	} {
		w.OK(r.SetupWithManager(mgr))
	}
	w.Stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(w.CleanUp)
	return w
}

var replicated = replication.State{
	Identity:  replication.Condition{Status: metav1.ConditionTrue, Reason: isthmus.ReasonIdentityAccepted, Message: "https://b accepts us"},
	Published: replication.Condition{Status: metav1.ConditionTrue, Reason: isthmus.ReasonUpToDate, Message: "https://b has it"},
}

// join writes all objects and states that other components would write until the peering is ready.
func (r *remote) join() {
	r.w.T.Helper()
	nc := r.UntilPublished()
	controllerutil.AddFinalizer(nc, v1alpha1.FinalizerReplicator)
	r.w.OK(r.w.API().Update(r.w.Ctx, nc))
	r.w.stub.report(r.Cluster.ClusterID, replicated)
	nc.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: "10.70.0.0/16", ExternalCIDRNAT: v1alpha1.None}
	r.w.OK(r.w.API().Status().Update(r.w.Ctx, nc))
	theirs := r.Theirs()
	r.w.Create(theirs)
	theirs.Status = v1alpha1.NetworkConfigStatus{
		Processed: true, PodCIDRNAT: "10.246.0.0/18", ExternalCIDRNAT: v1alpha1.None,
		Conditions: []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered, ObservedGeneration: theirs.Generation, LastTransitionTime: metav1.Now()}},
	}
	r.w.OK(r.w.API().Status().Update(r.w.Ctx, theirs))
	spec, problems := fabric.TunnelEndpointFor(nc, theirs, r.Cluster)
	if len(problems) > 0 {
		r.w.T.Fatal(problems)
	}
	te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: r.NS, Name: r.Key().Name}, Spec: spec}
	r.w.Create(te)
	te.Status.Connection = v1alpha1.Connection{Status: v1alpha1.Connected, Latency: v1alpha1.ConnectionLatency{Value: "7ms"}}
	r.w.OK(r.w.API().Status().Update(r.w.Ctx, te))
	r.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
}
