package manager

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// A world is one cluster with the reconcilers of our side and stand-ins for what is not ours: the
// replicator, the IPAM state, the answers and the gateway.
type world struct {
	t      *testing.T
	other  client.Client // of another API server than that of all tests
	ctx    context.Context
	prefix string // of the names of everything in it
	system string // the install namespace
	self   v1alpha1.ClusterIdentity
	stub   *stubReplicator
	ipam   *stubStore
	events *events.FakeRecorder
	stop   func()
}

// api goes straight to the API server.
func (w *world) api() client.Client {
	if w.other != nil {
		return w.other
	}
	return testClient
}

// stubReplicator says what a test wants it to say.
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

func (r *stubReplicator) say(id string, s replication.State) {
	r.mu.Lock()
	r.states[id] = s
	r.mu.Unlock()
	r.changed <- event.GenericEvent{Object: &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: id}}}
}

// forget is what a replicator is like that was just started.
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

// A stubStore keeps a State in memory.
type stubStore struct {
	mu    sync.Mutex
	state ipam.State
}

func (b *stubStore) Update(_ context.Context, f func(ipam.State) (ipam.State, error)) (ipam.State, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	state, err := f(b.state)
	if err == nil {
		b.state = state
	}
	return b.state, err
}

func (b *stubStore) Now(context.Context) (time.Time, error) { return time.Now(), nil }

func (b *stubStore) State() ipam.State {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state
}

// newWorld starts the reconcilers. Our PodCIDR is a /16.
func newWorld(t *testing.T, foreignClusters bool) *world {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	prefix := fmt.Sprintf("own-%06x", rand.N(1<<24))
	w := &world{
		t: t, prefix: prefix, system: prefix + "-system",
		self:   v1alpha1.ClusterIdentity{ClusterID: prefix + "-self", ClusterName: prefix + "-self"},
		stub:   &stubReplicator{states: make(map[string]replication.State), changed: make(chan event.GenericEvent, 1024)},
		ipam:   &stubStore{},
		events: events.NewFakeRecorder(10_000),
	}
	var cancel func()
	w.ctx, cancel = context.WithCancel(context.Background())
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.system}})

	scheme, err := newScheme()
	w.ok(err)
	log := slog.New(slog.DiscardHandler)
	mgr, err := ctrl.NewManager(testConfig, ctrl.Options{
		Scheme: scheme, Cache: cacheOptions(w.system), Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: config.Controller{SkipNameValidation: ptr.To(true)},
	})
	w.ok(err)
	w.ok(prepare(w.ctx, mgr, present{foreignClusters: foreignClusters, serviceCIDRs: servesServiceCIDRs}))
	w.ok(addExchangeIndexes(mgr.GetFieldIndexer()))
	peers := peers.Peers{Reader: mgr.GetCache(), Self: w.self.ClusterID, ForeignClusters: foreignClusters}
	own := &FactsKeeper{
		Cache: mgr.GetCache(), Direct: mgr.GetAPIReader(), Store: w.ipam, Cluster: w.self, Namespace: w.system, Log: log,
		StateChanged: make(chan event.GenericEvent), Events: w.events, ServiceCIDRs: servesServiceCIDRs,
		Plan: AddressPlan{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16")},
	}
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(w.ctx) }()
	if !mgr.GetCache().WaitForCacheSync(w.ctx) {
		t.Fatal("caches are not filled")
	}
	_, err = own.Reconcile(w.ctx, ctrl.Request{})
	w.ok(err)
	for _, r := range []interface{ SetupWithManager(ctrl.Manager) error }{
		own,
		&feeder{Peers: peers, Replicator: w.stub},
		&NetworkConfigReconciler{Client: mgr.GetClient(), Peers: peers, Facts: own, FactsChanged: own.Subscribe(), Log: log},
		&PeeringReconciler{Client: mgr.GetClient(), Peers: peers, Facts: own, Store: w.ipam, Replicator: w.stub,
			Liveness:     NewLiveness(mgr.GetAPIReader(), w.system, log),
			FactsChanged: own.Subscribe(), PeerChanged: w.stub.changed, Events: w.events, Log: log},
	} {
		w.ok(r.SetupWithManager(mgr))
	}
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(w.cleanUp)
	return w
}

// cleanUp ends the manager and removes what the test made, finalizers or not.
func (w *world) cleanUp() {
	w.stop()
	w.ctx = context.Background()
	var peerings isthmus.PeeringList
	w.ok(w.api().List(w.ctx, &peerings))
	for i := range peerings.Items {
		if o := &peerings.Items[i]; strings.HasPrefix(o.Name, w.prefix) {
			w.drop(o)
		}
	}
	var configs v1alpha1.NetworkConfigList
	w.ok(w.api().List(w.ctx, &configs))
	for i := range configs.Items {
		if o := &configs.Items[i]; strings.HasPrefix(o.Namespace, w.prefix) {
			w.drop(o)
		}
	}
	var endpoints v1alpha1.TunnelEndpointList // the IPAM state of the next test would be rebuilt from them
	w.ok(w.api().List(w.ctx, &endpoints))
	for i := range endpoints.Items {
		if o := &endpoints.Items[i]; strings.HasPrefix(o.Namespace, w.prefix) {
			w.drop(o)
		}
	}
	var namespaces corev1.NamespaceList
	w.ok(w.api().List(w.ctx, &namespaces))
	for i := range namespaces.Items {
		if o := &namespaces.Items[i]; strings.HasPrefix(o.Name, w.prefix) {
			w.ok(client.IgnoreNotFound(w.api().Delete(w.ctx, o)))
		}
	}
}

// dropState deletes the IPAM state and what nodes refuse: networks that a test released would be held in the next one.
func (w *world) dropState() {
	w.t.Helper()
	for _, kind := range []client.Object{&v1alpha1.IpamStorage{}, &isthmus.NetworkAllocation{}} {
		w.ok(testClient.DeleteAllOf(context.Background(), kind))
	}
}

func (w *world) drop(o client.Object) {
	w.t.Helper()
	w.ok(client.IgnoreNotFound(w.api().Delete(w.ctx, o)))
	w.ok(client.IgnoreNotFound(w.api().Patch(w.ctx, o, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`)))))
}

func (w *world) ok(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(o client.Object) {
	w.t.Helper()
	w.ok(w.api().Create(w.ctx, o))
}

// until waits for something to become true.
func (w *world) until(what string, f func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(time.Minute); !f(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("still not: %s", what)
		}
	}
}

// always fails if something is not true at any moment of a short while.
func (w *world) always(what string, f func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(700 * time.Millisecond); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if !f() {
			w.t.Fatalf("not any more: %s", what)
		}
	}
}

// gateway makes what the gateway would: the key Secret, and the Service with the annotation of the
// active one.
func (w *world) gateway(nodeIP string) {
	w.t.Helper()
	w.gatewayWith(nodeIP, someKey)
}

func (w *world) gatewayWith(nodeIP, key string) {
	w.t.Helper()
	w.create(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.system, Name: keyring.SecretName, Labels: map[string]string{v1alpha1.LabelKey: "wireguard"}},
		Data:       map[string][]byte{"publicKey": []byte(key), "privateKey": []byte("not ours to read")},
	})
	w.create(&corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.system, Name: "isthmus-gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"},
			Annotations: map[string]string{v1alpha1.AnnotationGatewayNodeIP: nodeIP}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "wireguard", Port: 5871, Protocol: corev1.ProtocolUDP}}},
	})
}

// A remote is a peer cluster as a test sees it: it writes what the peer, its replicator, the
// answering half of our manager and our gateway would write.
type remote struct {
	w       *world
	cluster v1alpha1.ClusterIdentity
	peering *isthmus.Peering
	ns      string
}

// peer makes a Peering with a cluster, and its tenant namespace.
func (w *world) peer(name string) *remote {
	w.t.Helper()
	r := w.describe(name)
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.ns}})
	w.create(r.peering)
	return r
}

func (w *world) describe(name string) *remote {
	c := v1alpha1.ClusterIdentity{ClusterID: w.prefix + "." + name, ClusterName: w.prefix + "-" + name}
	ns := w.prefix + "-tenant-" + name
	return &remote{w: w, cluster: c, ns: ns, peering: &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: w.prefix + "-" + name},
		Spec:       isthmus.PeeringSpec{Cluster: c, TenantNamespace: isthmus.TenantNamespace{Local: ns, Remote: "tenant-at-" + name}},
	}}
}

// status returns the Peering's status now.
func (r *remote) status() isthmus.PeeringStatus {
	var p isthmus.Peering
	if err := r.w.api().Get(r.w.ctx, client.ObjectKeyFromObject(r.peering), &p); err != nil {
		return isthmus.PeeringStatus{}
	}
	return p.Status
}

// is reports whether a condition has a reason.
func (r *remote) is(condition, reason string) bool {
	c := meta.FindStatusCondition(r.status().Conditions, condition)
	return c != nil && c.Reason == reason
}

func (r *remote) untilIs(condition, reason string) {
	r.w.t.Helper()
	defer func() {
		if r.w.t.Failed() {
			r.w.t.Logf("%+v", r.status())
		}
	}()
	r.w.until(condition+" is "+reason, func() bool { return r.is(condition, reason) })
}

func (r *remote) message(condition string) string {
	if c := meta.FindStatusCondition(r.status().Conditions, condition); c != nil {
		return c.Message
	}
	return ""
}

func (r *remote) key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.ns, Name: r.cluster.UniqueName()}
}

// original returns our NetworkConfig for the peer, nil when there is none.
func (r *remote) original() *v1alpha1.NetworkConfig {
	r.w.t.Helper()
	nc, err := controllers.Found(r.w.ctx, r.w.api(), r.key(), new(v1alpha1.NetworkConfig))
	r.w.ok(err)
	return nc
}

func (r *remote) endpoint() *v1alpha1.TunnelEndpoint {
	r.w.t.Helper()
	te, err := controllers.Found(r.w.ctx, r.w.api(), r.key(), new(v1alpha1.TunnelEndpoint))
	r.w.ok(err)
	return te
}

func (r *remote) untilPublished() *v1alpha1.NetworkConfig {
	r.w.t.Helper()
	r.w.until("our NetworkConfig is there", func() bool { return r.original() != nil })
	return r.original()
}

// theirs is the peer's NetworkConfig: pods in a /18 that overlaps ours.
func (r *remote) theirs() *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: r.w.self.UniqueName(), Labels: map[string]string{
			v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true",
			v1alpha1.LabelOriginID: r.cluster.ClusterID, v1alpha1.LabelRemoteID: r.w.self.ClusterID,
		}},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: r.w.self, PodCIDR: "10.244.64.0/18", ExternalCIDR: "10.60.0.0/18",
			EndpointIP: "198.51.100.2", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPort: "31000", v1alpha1.ConfigPublicKey: anotherKey},
		},
	}
}

var replicated = replication.State{
	Identity:  replication.Condition{Status: metav1.ConditionTrue, Reason: isthmus.ReasonIdentityAccepted, Message: "https://b accepts us"},
	Published: replication.Condition{Status: metav1.ConditionTrue, Reason: isthmus.ReasonUpToDate, Message: "https://b has it"},
}

// join does everything that others do until the peering is ready.
func (r *remote) join() {
	r.w.t.Helper()
	nc := r.untilPublished()
	controllerutil.AddFinalizer(nc, v1alpha1.FinalizerReplicator)
	r.w.ok(r.w.api().Update(r.w.ctx, nc))
	r.w.stub.say(r.cluster.ClusterID, replicated)
	nc.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: "10.70.0.0/16", ExternalCIDRNAT: v1alpha1.None}
	r.w.ok(r.w.api().Status().Update(r.w.ctx, nc))
	theirs := r.theirs()
	r.w.create(theirs)
	theirs.Status = v1alpha1.NetworkConfigStatus{
		Processed: true, PodCIDRNAT: "10.246.0.0/18", ExternalCIDRNAT: v1alpha1.None,
		Conditions: []metav1.Condition{{Type: v1alpha1.ConditionAccepted, Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered, ObservedGeneration: theirs.Generation, LastTransitionTime: metav1.Now()}},
	}
	r.w.ok(r.w.api().Status().Update(r.w.ctx, theirs))
	spec, problems := fabric.TunnelEndpointFor(nc, theirs, r.cluster)
	if len(problems) > 0 {
		r.w.t.Fatal(problems)
	}
	te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: r.ns, Name: r.key().Name}, Spec: spec}
	r.w.create(te)
	te.Status.Connection = v1alpha1.Connection{Status: v1alpha1.Connected, Latency: v1alpha1.ConnectionLatency{Value: "7ms"}}
	r.w.ok(r.w.api().Status().Update(r.w.ctx, te))
	r.untilIs(isthmus.ConditionReady, isthmus.ReasonConnected)
}
