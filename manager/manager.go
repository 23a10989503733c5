// Package manager is the control plane of one cluster. It takes part in leader election, fills the
// shared cache, runs the controllers of the packages below it, and serves their metrics.
// cmd/isthmus calls Run:
//
//	manager ─► peerings ─► exchange ─┬► facts ─┐
//	                                 └► peers ─┴► controllers
//
// Package facts determines this cluster's networks, gateway and keys. Package peers lists its
// peers. Package exchange publishes NetworkConfigs, answers those of the peers, and makes the
// TunnelEndpoints and NatMappings that gateways and route agents apply. Package peerings reports
// the result in the statuses of Peerings. The packages ipam, ipamstore, ipamrpc, queue, replication
// and services import no package of this diagram.
package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/discovery"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	runtimemanager "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peerings"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// component is the name of the Lease, and of the reporter of Events.
const component = "isthmus-manager"

// renewDeadline is the time for which a leader continues without renewing its Lease. It equals
// controller-runtime's default.
const renewDeadline = 10 * time.Second

// kindsInterval is the interval at which watchKinds checks the served kinds. A check is a few small
// requests.
const kindsInterval = 30 * time.Second

// refusalPatience is the Patience of the RefusalGate. An agent refuses new networks within a tenth
// of a second. With thousands of nodes, the last report arrives within two seconds.
const refusalPatience = 5 * time.Second

// Options are the options of Run.
type Options struct {
	// Kubeconfig is the path of a kubeconfig of this cluster. By default, the manager uses the
	// service account of its Pod.
	Kubeconfig string
	// Namespace is the namespace of the gateway's Service and Secret, and of our Lease.
	Namespace string
	// Cluster is the identity of this cluster. Empty fields are detected; see identify.
	Cluster v1alpha1.ClusterIdentity
	// Plan is the administrator's configuration of this cluster's networks.
	Plan facts.AddressPlan
	// LeaderElect is true if several managers may run. One of them leads.
	LeaderElect bool
	// Name identifies this manager to people, such as the name of its Pod.
	Name string
	// Instance is unique among managers, such as the UID of the Pod. A manager that restarts with
	// the same Instance leads again at once. If it is empty, the manager uses a new Instance for
	// each start, and waits until the previous Lease has expired.
	Instance string
	// Version is the version that the metric isthmus_build_info shows.
	Version string
	// IPAM configures Liqo's gRPC service; it is off without an Address.
	IPAM ipamrpc.Options
	// IPAMService is the name of a Service without a selector, and of its EndpointSlice. While this
	// manager leads, it points both to PodIP. If IPAMService is empty, the manager writes neither.
	IPAMService string
	PodIP       netip.Addr
	// Services enables the sharing of Services with peers that share Services as well. It needs the
	// CRDs of the Multi-Cluster Services API and further permissions.
	Services bool
	// MetricsAddress and HealthAddress are TCP addresses to listen on, such as ":5876"; empty means
	// off. Metrics are registered once per process, so only one of several managers in a process
	// may have a MetricsAddress.
	MetricsAddress, HealthAddress string
	// MetricsSecure protects MetricsAddress. If it is nil, anybody may read the metrics.
	MetricsSecure *httpserve.Secure
	Log           *slog.Logger
}

// errAgain ends a run because the kinds that the cluster serves have changed. Run then starts
// another run.
var errAgain = errors.New("a kind was installed or removed: ForeignCluster, ServiceCIDR or a kind of shared services")

// lostLease is the text of an error that controller-runtime does not export.
const lostLease = "leader election lost"

// Run runs the manager until ctx ends. It waits for an API server that does not answer. If it loses
// the Lease, usually because the API server was unreachable for ten seconds, it stops all
// controllers and takes part in the election again.
func Run(ctx context.Context, o Options) error {
	logToSlog(o.Log)
	cfg, err := restConfig(o.Kubeconfig)
	if err != nil {
		return fmt.Errorf("path to the API server: %w", err)
	}
	if o.Instance == "" {
		o.Instance = string(uuid.NewUUID())
	}
	for {
		err := runOnce(ctx, o, cfg)
		lost := err != nil && err.Error() == lostLease
		if !lost && !errors.Is(err, errAgain) || ctx.Err() != nil {
			return err
		}
		if lost {
			time.Sleep(time.Second) // gives requests time to end and listeners time to close
		}
		o.Log.Warn("restarting the controllers", "reason", err)
	}
}

var logOnce sync.Once

// logToSlog directs the logs of the Kubernetes libraries to log. These libraries have one log per
// process, so only the first call has an effect.
func logToSlog(log *slog.Logger) {
	logOnce.Do(func() {
		ctrl.SetLogger(logr.FromSlogHandler(log.Handler()))
		klog.SetSlogLogger(log)
	})
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	cfg, err := owncluster.RESTConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	cfg.QPS = -1 // the API server limits clients itself; a limit here would only delay bursts of peerings
	cfg.UserAgent = component
	cfg.WarningHandler = rest.NoWarnings{} // Liqo's finalizers have no slash, so each causes a warning
	return cfg, nil
}

// leaseClient returns a client that only the election uses. When a manager starts, thousands of
// other requests may wait, and all work ends if the Lease is not renewed in time. done closes the
// client's connections.
func leaseClient(cfg *rest.Config) (leases coordination.LeasesGetter, done func(), err error) {
	cfg = rest.AddUserAgent(rest.CopyConfig(cfg), "leader-election")
	cfg.Timeout = renewDeadline / 2
	cfg.QPS, cfg.Burst = 5, 10
	// An HTTP/2 connection would be shared with all other requests, and would outlive a network
	// failure.
	cfg.NextProtos = []string{"http/1.1"}
	web, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, nil, err
	}
	client, err := coordination.NewForConfigAndClient(cfg, web)
	return client, func() { utilnet.CloseIdleConnectionsFor(web.Transport) }, err
}

// runOnce runs the manager until ctx ends or the set of kinds that the cluster serves changes.
func runOnce(ctx context.Context, o Options, cfg *rest.Config) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	scheme, err := newScheme()
	if err != nil {
		return err
	}
	direct, err := client.New(cfg, client.Options{Scheme: scheme})
	if err != nil {
		return err
	}
	kinds, err := discovery.NewDiscoveryClientForConfig(cfg)
	if err != nil {
		return err
	}
	detect := func(ctx context.Context) (optionalKinds, error) { return servedKinds(ctx, kinds, direct, o.Services) }
	var has optionalKinds
	absent := 0
	if err := untilAnswered(ctx, o.Log, func() (err error) {
		if o.Cluster, err = identify(ctx, direct, o.Namespace, o.Cluster); err != nil {
			return err
		}
		if has, err = detect(ctx); err != nil || has.foreignClusters {
			return err
		}
		absent++
		return checkAbsence(ctx, direct, absent)
	}); err != nil || ctx.Err() != nil {
		return err
	}
	o.Log.Info("manager starts", "clusterID", o.Cluster.ClusterID, "clusterName", o.Cluster.ClusterName, "foreignClusters", has.foreignClusters)
	if o.Services && !has.sharedServices {
		o.Log.Error("services are not shared: " + servicesLacking)
	}

	lock, done, err := leaseLock(o, cfg)
	if err != nil {
		return err
	}
	defer done()
	mgr, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme:                              scheme,
		Cache:                               cacheOptions(o.Namespace),
		Logger:                              logr.FromSlogHandler(o.Log.Handler()),
		LeaderElection:                      o.LeaderElect,
		LeaderElectionID:                    component,
		LeaderElectionNamespace:             o.Namespace,
		LeaderElectionReleaseOnCancel:       true,
		LeaderElectionResourceLockInterface: lock,
		RenewDeadline:                       ptr.To(renewDeadline),
		GracefulShutdownTimeout:             ptr.To(10 * time.Second),
		Metrics:                             metricsserver.Options{BindAddress: "0"},             // off, because listen serves the metrics with limits
		Controller:                          config.Controller{SkipNameValidation: ptr.To(true)}, // a run after errAgain starts controllers with the same names
	})
	if err != nil {
		return installFirst(err)
	}
	if err := prepare(ctx, mgr, has); err != nil {
		return err
	}
	l, err := newLeader(o, cfg, mgr, has)
	if err != nil {
		return err
	}
	if o.MetricsAddress != "" {
		collector := &collector{peers: mgr.GetCache(), store: l.store, expired: &l.expiry.expired, leading: l.leading}
		for _, c := range []prometheus.Collector{metric.Build(o.Version), collector} {
			if err := metrics.Registry.Register(c); err != nil {
				return fmt.Errorf("metrics: %w", err)
			}
			defer metrics.Registry.Unregister(c)
		}
	}
	if err := errors.Join(
		mgr.Add(runtimemanager.RunnableFunc(l.run)),
		mgr.Add(runtimemanager.RunnableFunc(func(ctx context.Context) error {
			watchKinds(ctx, detect, has, kindsInterval, func() { cancel(errAgain) })
			return nil
		})),
	); err != nil {
		return err
	}
	servers, err := listen(o, mgr, l.waitReason)
	if err != nil {
		return err
	}
	defer servers.Close()
	if err := mgr.Start(ctx); err != nil {
		return err
	}
	if errors.Is(context.Cause(ctx), errAgain) {
		return errAgain
	}
	return nil
}

// leaseLock returns the managers' Lease, or nil without an election. done closes its client.
func leaseLock(o Options, cfg *rest.Config) (lock resourcelock.Interface, done func(), err error) {
	if !o.LeaderElect {
		return nil, func() {}, nil
	}
	leases, done, err := leaseClient(cfg)
	if err != nil {
		return nil, nil, err
	}
	return &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: o.Namespace, Name: component},
		Client:     leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: cmp.Or(o.Name, component) + "_" + o.Instance},
	}, done, nil
}

func newLeader(o Options, cfg *rest.Config, mgr ctrl.Manager, has optionalKinds) (*leader, error) {
	l := &leader{
		Options: o, mgr: mgr,
		client:     client.WithFieldOwner(mgr.GetClient(), component),
		peers:      peers.Peers{Reader: mgr.GetCache(), Self: o.Cluster.ClusterID, ForeignClusters: has.foreignClusters},
		config:     cfg,
		leading:    new(atomic.Pointer[leading]),
		waitReason: new(atomic.Pointer[string]),
	}
	l.store = ipamstore.New(l.client, mgr.GetAPIReader(), o.Cluster.ClusterID, o.Log)
	l.services = has.serviceCIDRs
	l.shared = has.sharedServices
	clock, err := serverClock(cfg)
	if err != nil {
		return nil, err
	}
	l.store.WithClock(clock)
	l.expiry = newExpiry(mgr.GetAPIReader(), l.store, o.Log)
	return l, nil
}

// A leader is the part of a manager that runs only while the manager leads.
type leader struct {
	Options
	mgr        ctrl.Manager
	client     client.Client
	peers      peers.Peers
	store      *ipamstore.Store
	expiry     *expiry
	leading    *atomic.Pointer[leading]
	waitReason *atomic.Pointer[string] // the reason why this leader cannot begin its work; a nil pointer: it works, or does not lead
	config     *rest.Config
	services   bool // value of optionalKinds.serviceCIDRs
	shared     bool // value of optionalKinds.sharedServices
}

// run works until ctx ends. It starts the controllers only after the IPAM state has been read and
// contains our own networks. Otherwise an answer to a peer could allocate a network that is in use.
func (l *leader) run(ctx context.Context) error {
	own := &facts.Keeper{
		Cache: l.mgr.GetCache(), Direct: l.mgr.GetAPIReader(), Store: l.store,
		Cluster: l.Cluster, Namespace: l.Namespace, Plan: l.Plan, ServiceCIDRs: l.services, StateChanged: l.store.Subscribe(),
		Events: l.mgr.GetEventRecorder(component), Log: l.Log,
	}
	gate := &exchange.RefusalGate{Cache: l.mgr.GetCache(), Namespace: l.Namespace, Events: l.mgr.GetEventRecorder(component), Log: l.Log, Patience: refusalPatience}
	l.store.Observe(gate.Observe)
	l.waitReason.Store(ptr.To("it has not read the cluster yet"))
	if !untilDone(ctx, l.Log, func() error {
		err := l.begin(ctx, own, gate)
		if err != nil {
			l.waitReason.Store(ptr.To(kubeerr.Plain("the API server", err).Error()))
		}
		return err
	}) {
		return nil
	}
	l.waitReason.Store(nil)
	replicator := replication.New(replication.Options{
		ClusterID: l.Cluster.ClusterID, Client: l.client, Cache: l.mgr.GetCache(), Config: l.config, Log: l.Log,
		Services: l.shared, Withdraw: !l.Options.Services, InBand: l.dialInBand,
	})
	liveness := peerings.NewLiveness(l.mgr.GetAPIReader(), l.Namespace, l.Log)
	keys := &exchange.KeyStore{Client: l.client, Direct: l.mgr.GetAPIReader(), Namespace: l.Namespace, Peers: l.peers, Log: l.Log}
	if err := errors.Join(l.mgr.Add(replicator), l.mgr.Add(liveness)); err != nil {
		return err
	}
	if l.IPAM.Address != "" {
		service := l.IPAM
		service.OwnerKind = l.expiry.ownerKind
		if err := l.mgr.Add(runtimemanager.RunnableFunc(func(ctx context.Context) error {
			return ipamrpc.Serve(ctx, service, l.store, l.Log)
		})); err != nil {
			return err
		}
	}
	if l.IPAMService != "" {
		s := &ipamService{l.client, l.mgr.GetAPIReader(), l.Namespace, l.IPAMService, l.PodIP, l.Log}
		if err := l.mgr.Add(runtimemanager.RunnableFunc(s.run)); err != nil {
			return err
		}
	}
	peering := &peerings.Reconciler{
		Client: l.client, Peers: l.peers, Facts: own, Store: l.store, Replicator: replicator, Liveness: liveness,
		FactsChanged: own.Subscribe(), PeerChanged: replicator.Changed(), Keys: keys,
		Events: l.mgr.GetEventRecorder(component), Log: l.Log,
	}
	shared, err := l.shareServices(own, replicator, peering)
	if err != nil {
		return fmt.Errorf("services: %w", err)
	}
	l.leading.Store(&leading{gate, replicator, shared})
	releases := &exchange.Releases{Cache: l.mgr.GetCache(), Peers: l.peers, Store: l.store, Events: l.mgr.GetEventRecorder(component), Log: l.Log}
	for _, run := range []runtimemanager.RunnableFunc{l.expiry.run, releases.Run} {
		if err := l.mgr.Add(run); err != nil {
			return err
		}
	}
	for _, r := range []interface{ SetupWithManager(ctrl.Manager) error }{
		own,
		gate,
		&ipamRefresher{l.store},
		&peerings.Feeder{Peers: l.peers, Replicator: replicator},
		&exchange.Answers{Client: l.client, Peers: l.peers, Facts: own, Store: l.store, RefusalGate: gate, FactsChanged: own.Subscribe(), Log: l.Log},
		&exchange.NetworkConfigReconciler{Client: l.client, Peers: l.peers, Facts: own, FactsChanged: own.Subscribe(), Keys: keys, Log: l.Log},
		keys,
		peering,
	} {
		if err := r.SetupWithManager(l.mgr); err != nil {
			return fmt.Errorf("%T: %w", r, err)
		}
	}
	l.Log.Info("manager is the leader and runs its controllers")
	<-ctx.Done()
	return nil
}

// begin loads the IPAM state, adds our own networks, and reads which networks nodes refuse.
func (l *leader) begin(ctx context.Context, own *facts.Keeper, gate *exchange.RefusalGate) error {
	if err := l.store.Load(ctx); err != nil {
		return fmt.Errorf("IPAM state: %w", err)
	}
	if _, err := own.Reconcile(ctx, ctrl.Request{}); err != nil {
		return err
	}
	_, err := gate.Reconcile(ctx, ctrl.Request{})
	return err
}

// untilDone calls f until it succeeds, with increasing pauses. It returns false if ctx ends first.
func untilDone(ctx context.Context, log *slog.Logger, f func() error) bool {
	for pause := 250 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		err := f()
		if err == nil {
			return true
		}
		log.Error("the manager cannot start yet; retrying", "error", err, "in", pause.String())
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// untilAnswered calls f like untilDone, but gives up if the API server answers with an error that a
// retry would not change.
func untilAnswered(ctx context.Context, log *slog.Logger, f func() error) error {
	var final error
	untilDone(ctx, log, func() error {
		err := f()
		if errors.Is(err, owncluster.ErrUnknown) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
			final = err
			return nil
		}
		return err
	})
	return final
}

// identify completes the identity of this cluster. The manager needs a name, because names of
// objects contain it.
func identify(ctx context.Context, reader client.Reader, namespace string, configured v1alpha1.ClusterIdentity) (v1alpha1.ClusterIdentity, error) {
	id, err := owncluster.Identify(ctx, reader, namespace, configured)
	if err == nil && id.ClusterName == "" {
		err = fmt.Errorf("%w: no name; want --cluster-name, or `isthmus install --cluster-name`", owncluster.ErrUnknown)
	}
	return id, err
}
