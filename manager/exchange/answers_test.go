package exchange

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// answering is a cluster with the reconcilers of Answers and a real Store. The test plays the rest
// of the manager, and the peers.
type answering struct {
	*managertest.World
	events *events.FakeRecorder
	facts  *stubFacts
	store  *ipamstore.Store
	nodes  *RefusalGate
	mgr    ctrl.Manager
}

// stubFacts returns the Facts that the test sets.
type stubFacts struct {
	mu      sync.Mutex
	facts   facts.Facts
	changed chan event.GenericEvent
}

func (f *stubFacts) Facts(context.Context) (facts.Facts, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.facts, nil
}

func (f *stubFacts) change(change func(*facts.Facts)) {
	f.mu.Lock()
	change(&f.facts)
	f.mu.Unlock()
	f.changed <- event.GenericEvent{Object: new(metav1.PartialObjectMetadata)}
}

// newAnswering starts the reconcilers in a cluster with the PodCIDR 10.244.0.0/16.
func newAnswering(t *testing.T) *answering {
	t.Helper()
	w := managertest.Make(t, "ans")
	a := &answering{
		World: w,
		facts: &stubFacts{changed: make(chan event.GenericEvent, 16), facts: facts.Facts{
			Cluster: w.Self, PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16"), Nodes: []netip.Addr{netip.MustParseAddr("172.30.0.1")},
			Endpoint: "198.51.100.1", Port: 5871, PublicKey: managertest.Key(1),
		}},
	}
	t.Cleanup(a.cleanUp)
	a.start()
	return a
}

// start starts a manager. After a.Stop, it starts another one.
func (a *answering) start() {
	a.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	log := slog.New(slog.NewTextHandler(testLog{a.T}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	a.mgr = a.Manager(false)
	ended := make(chan error, 1)
	go func() { ended <- a.mgr.Start(ctx) }()
	a.Stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			a.T.Error(err)
		}
	})
	if !a.mgr.GetCache().WaitForCacheSync(ctx) {
		a.T.Fatal("caches are not filled")
	}
	a.store = ipamstore.New(a.mgr.GetClient(), a.mgr.GetAPIReader(), a.Self.ClusterID, log)
	a.OK(a.store.Load(ctx))
	a.events = events.NewFakeRecorder(100)
	a.nodes = &RefusalGate{Cache: a.mgr.GetCache(), Namespace: a.System, Events: a.events, Log: log, Patience: time.Hour}
	a.store.Observe(a.nodes.Observe)
	_, err := a.nodes.Reconcile(ctx, ctrl.Request{})
	a.OK(err)
	a.OK(a.nodes.SetupWithManager(a.mgr))
	a.configure(nil, nil)
	a.OK((&Answers{
		Client: a.mgr.GetClient(), Peers: peers.Peers{Reader: a.mgr.GetCache(), Self: a.Self.ClusterID}, Facts: a.facts, Store: a.store, RefusalGate: a.nodes,
		FactsChanged: a.facts.changed, Log: log,
	}).SetupWithManager(a.mgr))
}

// testLog writes to the log of the test.
type testLog struct{ T *testing.T }

func (l testLog) Write(line []byte) (int, error) {
	l.T.Log(string(bytes.TrimSpace(line)))
	return len(line), nil
}

// configure writes the networks of the Facts into the IPAM state. If pools is nil, Liqo's pools are
// used.
func (a *answering) configure(pools, reserved []netip.Prefix) {
	a.T.Helper()
	f, _ := a.facts.Facts(a.Ctx)
	_, err := a.store.Update(a.Ctx, func(b ipam.State) (ipam.State, error) {
		next, _ := b.Configure(ipam.Config{PodCIDR: f.PodCIDR, ServiceCIDR: f.ServiceCIDR, ExternalCIDR: f.ExternalCIDR,
			Pools: pools, Reserved: reserved, Nodes: f.Nodes})
		return next, nil
	})
	a.OK(err)
}

// cleanUp deletes all objects from which the next test could rebuild the IPAM state.
func (a *answering) cleanUp() {
	a.World.CleanUp()
	var mappings v1alpha1.NatMappingList
	a.OK(managertest.Client.List(a.Ctx, &mappings))
	for i := range mappings.Items {
		a.Drop(&mappings.Items[i])
	}
	a.DropState()
}

// A partner is a peer that exchanges NetworkConfigs with us.
type partner struct {
	*managertest.Remote
	a   *answering
	key byte // differs between partners
}

// partner creates a peer and its Peering, with the finalizer that package peerings would add.
func (a *answering) partner(name string, key byte, change ...func(*isthmus.Peering)) *partner {
	a.T.Helper()
	r := a.Describe(name)
	for _, f := range change {
		f(r.Peering)
	}
	controllerutil.AddFinalizer(r.Peering, isthmus.FinalizerPeering)
	a.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: r.NS}})
	a.Create(r.Peering)
	return &partner{Remote: r, a: a, key: key}
}

// claim returns the NetworkConfig that the partner's replicator would create here.
func (p *partner) claim(pod, external string) *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.NS, Name: p.a.Self.UniqueName(), Labels: map[string]string{
			v1alpha1.LabelReplication: "false", v1alpha1.LabelReplicated: "true",
			v1alpha1.LabelOriginID: p.Cluster.ClusterID, v1alpha1.LabelRemoteID: p.a.Self.ClusterID,
		}},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: p.a.Self, PodCIDR: pod, ExternalCIDR: external,
			EndpointIP: fmt.Sprintf("192.0.2.%d", p.key), BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: managertest.KeyText(p.key), v1alpha1.ConfigPort: "5871"},
		},
	}
}

// answered reports whether the partner got an answer with networks. A condition NotPeered does not
// count; it may appear before the cache has the Peering.
func (p *partner) answered() bool {
	nc := p.copied()
	return nc != nil && nc.Status.Processed
}

// claims creates the NetworkConfig that claim returns.
func (p *partner) claims(pod, external string) *partner {
	p.a.T.Helper()
	p.a.Create(p.claim(pod, external))
	return p
}

// copied returns the partner's NetworkConfig as stored, or nil if there is none.
func (p *partner) copied() *v1alpha1.NetworkConfig {
	p.a.T.Helper()
	nc, err := controllers.Found(p.a.Ctx, managertest.Client, client.ObjectKey{Namespace: p.NS, Name: p.a.Self.UniqueName()}, new(v1alpha1.NetworkConfig))
	p.a.OK(err)
	return nc
}

// edit changes an object, and tries again after a conflict.
func edit[T client.Object](a *answering, o T, change func(T)) {
	a.T.Helper()
	a.Until("the object can be written", func() bool {
		a.OK(managertest.Client.Get(a.Ctx, client.ObjectKeyFromObject(o), o))
		change(o)
		err := managertest.Client.Update(a.Ctx, o)
		if err != nil && !isConflict(err) {
			a.T.Fatal(err)
		}
		return err == nil
	})
}

// editStatus changes the status of an object, and tries again after a conflict.
func editStatus[T client.Object](a *answering, o T, change func(T)) {
	a.T.Helper()
	a.Until("the status can be written", func() bool {
		a.OK(managertest.Client.Get(a.Ctx, client.ObjectKeyFromObject(o), o))
		change(o)
		err := managertest.Client.Status().Update(a.Ctx, o)
		if err != nil && !isConflict(err) {
			a.T.Fatal(err)
		}
		return err == nil
	})
}

// accepted returns the NAT fields of an accepted NetworkConfig. For a refused one it returns the
// condition as "reason: message", and the NAT fields in parentheses if there are any.
func accepted(nc *v1alpha1.NetworkConfig) string {
	if nc == nil {
		return "no NetworkConfig"
	}
	c := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
	switch {
	case c == nil || c.ObservedGeneration != nc.Generation:
		return "no answer"
	case nc.Status.Processed && c.Status == metav1.ConditionTrue:
		return fmt.Sprintf("%s %s", nc.Status.PodCIDRNAT, nc.Status.ExternalCIDRNAT)
	case nc.Status.Processed:
		return fmt.Sprintf("%s: %s (%s %s)", c.Reason, c.Message, nc.Status.PodCIDRNAT, nc.Status.ExternalCIDRNAT)
	}
	return c.Reason + ": " + c.Message
}

// untilAccepted waits until accepted returns want.
func (p *partner) untilAccepted(want string) {
	p.a.T.Helper()
	defer func() {
		if p.a.T.Failed() {
			p.a.T.Logf("%s: is   %s\nwant %s", p.Cluster.ClusterID, accepted(p.copied()), want)
		}
	}()
	p.a.Until("the answer is "+want, func() bool { return accepted(p.copied()) == want })
}

// publish creates our NetworkConfig for the partner, as the NetworkConfigReconciler would.
func (p *partner) publish() *partner {
	p.a.T.Helper()
	var peering isthmus.Peering
	p.a.OK(managertest.Client.Get(p.a.Ctx, client.ObjectKeyFromObject(p.Peering), &peering))
	facts, _ := p.a.facts.Facts(p.a.Ctx)
	spec, problems := NetworkConfigFor(facts, peers.From(&peering))
	if len(problems) > 0 {
		p.a.T.Fatal(problems)
	}
	nc := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: p.NS, Name: p.Cluster.UniqueName()}}
	p.a.OK(setOriginal(nc, peers.From(&peering), spec, managertest.Client.Scheme()))
	p.a.Create(nc)
	return p
}

// answer writes the partner's answer into our NetworkConfig, as the replicator would.
func (p *partner) answer(podNAT, externalNAT string) *partner {
	p.a.T.Helper()
	editStatus(p.a, p.Original(), func(nc *v1alpha1.NetworkConfig) {
		nc.Status = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: podNAT, ExternalCIDRNAT: externalNAT}
	})
	return p
}

// joined waits for the TunnelEndpoint and returns it.
func (p *partner) joined() *v1alpha1.TunnelEndpoint {
	p.a.T.Helper()
	p.a.Until("the TunnelEndpoint is there", func() bool { te := p.Endpoint(); return te != nil && te.DeletionTimestamp.IsZero() })
	return p.Endpoint()
}

// mappings returns the NatMappings for the partner.
func (p *partner) mappings() (all []v1alpha1.NatMapping) {
	p.a.T.Helper()
	var list v1alpha1.NatMappingList
	p.a.OK(managertest.Client.List(p.a.Ctx, &list))
	for _, nm := range list.Items {
		if nm.Spec.ClusterID == p.Cluster.ClusterID {
			all = append(all, nm)
		}
	}
	return all
}

func (p *partner) allocated() bool {
	_, ok := p.a.store.State().AllocationOf(p.Cluster.ClusterID)
	return ok
}

// versions returns the resourceVersions of all objects that the reconcilers write.
func (a *answering) versions() map[string]string {
	a.T.Helper()
	all := make(map[string]string)
	note := func(kind string, o client.Object) {
		all[kind+" "+o.GetNamespace()+"/"+o.GetName()] = o.GetResourceVersion()
	}
	var configs v1alpha1.NetworkConfigList
	a.OK(managertest.Client.List(a.Ctx, &configs))
	for i := range configs.Items {
		note("NetworkConfig", &configs.Items[i])
	}
	var endpoints v1alpha1.TunnelEndpointList
	a.OK(managertest.Client.List(a.Ctx, &endpoints))
	for i := range endpoints.Items {
		note("TunnelEndpoint", &endpoints.Items[i])
	}
	var mappings v1alpha1.NatMappingList
	a.OK(managertest.Client.List(a.Ctx, &mappings))
	for i := range mappings.Items {
		note("NatMapping", &mappings.Items[i])
	}
	var allocations isthmus.NetworkAllocationList
	a.OK(managertest.Client.List(a.Ctx, &allocations))
	for i := range allocations.Items {
		note("NetworkAllocation", &allocations.Items[i])
	}
	return all
}
