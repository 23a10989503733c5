// Package manager is the control plane of one cluster. It is elected, fills the cache that all read, runs the
// controllers of the packages below it, and serves their metrics:
//
//	manager ─► peerings ─► exchange ─┬► facts ─┐
//	                                 └► peers ─┴► controllers
//
// Package facts finds out what this cluster is, and package peers whom it is to be joined with. Package exchange
// publishes NetworkConfigs, answers those of the peers, and makes the TunnelEndpoints and NatMappings that
// gateways and route agents apply. Package peerings reports on all that in the statuses of Peerings. The
// others (ipam, ipamstore, ipamrpc, queue, replication, services) import none of these.
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

// component is the name of the Lease and the reporter of Events.
const component = "isthmus-manager"

// renewDeadline is how long a leader goes on without its Lease; controller-runtime's.
const renewDeadline = 10 * time.Second

// lookForKinds is the interval of the check whether Liqo was installed, which takes a few small requests.
const lookForKinds = 30 * time.Second

// refusalPatience is the Patience of the RefusalGate. Agents refuse within a tenth of a second, and of
// thousands the last one has said so within two.
const refusalPatience = 5 * time.Second

// Options say what Run runs.
type Options struct {
	// Kubeconfig is the path of a kubeconfig of this cluster; empty means the service account of
	// the Pod that we run in.
	Kubeconfig string
	// Namespace is where the gateway's Service and Secret are, and our Lease.
	Namespace string
	// Cluster is this cluster. What is empty is found out, see identify.
	Cluster v1alpha1.ClusterIdentity
	// Plan is what a person said about the networks of this cluster.
	Plan facts.AddressPlan
	// LeaderElect lets several managers run, of which one works.
	LeaderElect bool
	// Name is that of this manager among them, such as its Pod's, for people.
	Name string
	// Instance tells it from others that are called the same, such as the UID of its Pod: one that
	// was killed and started again as the same instance goes on at once. Empty: another one at each
	// start, which waits until the Lease of the one before is over.
	Instance string
	// Version is what isthmus_build_info says.
	Version string
	// IPAM is Liqo's gRPC service; without an Address there is none.
	IPAM ipamrpc.Options
	// IPAMService is a Service without a selector, and the EndpointSlice of its name, which lead to the
	// IPAM of the manager that works, at PodIP. Empty: somebody else sees to it.
	IPAMService string
	PodIP       netip.Addr
	// Services shares Services with peers that agree to it. It needs the kinds of the Multi-Cluster
	// Services API and further rights.
	Services bool
	// MetricsAddress and HealthAddress are TCP addresses to listen on, such as ":5876"; empty means
	// not to.
	// The registry of metrics is that of the process: of several managers in one process only one
	// can have a MetricsAddress.
	MetricsAddress, HealthAddress string
	// MetricsSecure guards what is at MetricsAddress; nil: anybody may read.
	MetricsSecure *httpserve.Secure
	Log           *slog.Logger
}

// errAgain ends a run whose cluster has got another set of kinds since.
var errAgain = errors.New("ForeignClusters, ServiceCIDRs or the kinds of shared services have come or gone")

// lostLease is the text of controller-runtime's error, which has no name.
const lostLease = "leader election lost"

// Run is the manager until ctx ends. It waits for an API server that does not answer. When the
// lease is lost, mostly because the API server was away for ten seconds, all work is given up and
// it stands for election again.
func Run(ctx context.Context, o Options) error {
	logToSlog(o.Log)
	cfg, err := restConfig(o.Kubeconfig)
	if err != nil {
		return fmt.Errorf("way to the API server: %w", err)
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
			time.Sleep(time.Second) // what was on its way ends, and listeners close
		}
		o.Log.Warn("restarting the controllers", "reason", err)
	}
}

var logOnce sync.Once

// logToSlog sends what the Kubernetes libraries log to log: of the whole process, and the first one
// for good, since they have no other way.
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
	cfg.QPS = -1 // the API server has its own fairness; a burst of peerings must not wait for ours
	cfg.UserAgent = component
	cfg.WarningHandler = rest.NoWarnings{} // each of Liqo's finalizers is worth one, for the lack of a slash
	return cfg, nil
}

// leaseClient returns what the election alone uses: thousands of requests may be on their way when peers
// come or a manager starts among them, and a Lease that is not renewed in time ends all work. done
// closes its connection.
func leaseClient(cfg *rest.Config) (leases coordination.LeasesGetter, done func(), err error) {
	cfg = rest.AddUserAgent(rest.CopyConfig(cfg), "leader-election")
	cfg.Timeout = renewDeadline / 2
	cfg.QPS, cfg.Burst = 5, 10
	cfg.NextProtos = []string{"http/1.1"} // one of HTTP/2 would be shared with all other requests, and outlives a network that is away
	web, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, nil, err
	}
	client, err := coordination.NewForConfigAndClient(cfg, web)
	return client, func() { utilnet.CloseIdleConnectionsFor(web.Transport) }, err
}

// runOnce runs the manager for the kinds that the cluster has now.
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
	look := func(ctx context.Context) (present, error) { return whatIsThere(ctx, kinds, direct, o.Services) }
	var has present
	absent := 0
	if err := untilAnswered(ctx, o.Log, func() (err error) {
		if o.Cluster, err = identify(ctx, direct, o.Namespace, o.Cluster); err != nil {
			return err
		}
		if has, err = look(ctx); err != nil || has.foreignClusters {
			return err
		}
		absent++
		return doubtAbsence(ctx, direct, absent)
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
		Metrics:                             metricsserver.Options{BindAddress: "0"},             // none: listen has bounds
		Controller:                          config.Controller{SkipNameValidation: ptr.To(true)}, // errAgain makes them anew
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
		collector := &collector{peers: mgr.GetCache(), store: l.store, expired: &l.expiry.expired, leads: l.leads}
		for _, c := range []prometheus.Collector{metric.Build(o.Version), collector} {
			if err := metrics.Registry.Register(c); err != nil {
				return fmt.Errorf("metrics: %w", err)
			}
			defer metrics.Registry.Unregister(c)
		}
	}
	if err := errors.Join(
		mgr.Add(runtimemanager.RunnableFunc(l.lead)),
		mgr.Add(runtimemanager.RunnableFunc(func(ctx context.Context) error {
			watchKinds(ctx, look, has, lookForKinds, func() { cancel(errAgain) })
			return nil
		})),
	); err != nil {
		return err
	}
	servers, err := listen(o, mgr, l.waits)
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

// leaseLock is the managers' Lease, nil without an election. done ends its client.
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

func newLeader(o Options, cfg *rest.Config, mgr ctrl.Manager, has present) (*leader, error) {
	l := &leader{
		Options: o, mgr: mgr,
		client: client.WithFieldOwner(mgr.GetClient(), component),
		peers:  peers.Peers{Reader: mgr.GetCache(), Self: o.Cluster.ClusterID, ForeignClusters: has.foreignClusters},
		config: cfg,
		leads:  new(atomic.Pointer[leading]),
		waits:  new(atomic.Pointer[string]),
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

// A leader is the part of a manager that only one at a time has.
type leader struct {
	Options
	mgr      ctrl.Manager
	client   client.Client
	peers    peers.Peers
	store    *ipamstore.Store
	expiry   *expiry
	leads    *atomic.Pointer[leading]
	waits    *atomic.Pointer[string] // why this leader has not begun its work; nil inside: it has, or does not lead
	config   *rest.Config
	services bool // present.serviceCIDRs
	shared   bool // present.sharedServices
}

// lead works until ctx ends. Controllers start after the IPAM state has been read and our
// own networks are in them: an answer given earlier could give away what is in use.
func (l *leader) lead(ctx context.Context) error {
	own := &facts.Keeper{
		Cache: l.mgr.GetCache(), Direct: l.mgr.GetAPIReader(), Store: l.store,
		Cluster: l.Cluster, Namespace: l.Namespace, Plan: l.Plan, ServiceCIDRs: l.services, StateChanged: l.store.Subscribe(),
		Events: l.mgr.GetEventRecorder(component), Log: l.Log,
	}
	gate := &exchange.RefusalGate{Cache: l.mgr.GetCache(), Namespace: l.Namespace, Events: l.mgr.GetEventRecorder(component), Log: l.Log, Patience: refusalPatience}
	l.store.Observe(gate.Observe)
	l.waits.Store(ptr.To("it has not read the cluster yet"))
	if !untilDone(ctx, l.Log, func() error {
		err := l.begin(ctx, own, gate)
		if err != nil {
			l.waits.Store(ptr.To(kubeerr.Plain("the API server", err).Error()))
		}
		return err
	}) {
		return nil
	}
	l.waits.Store(nil)
	replicator := replication.New(replication.Options{
		ClusterID: l.Cluster.ClusterID, Client: l.client, Cache: l.mgr.GetCache(), Config: l.config, Log: l.Log,
		Services: l.shared, Withdraw: !l.Options.Services, InBand: l.dialInBand,
	})
	liveness := peerings.NewLiveness(l.mgr.GetAPIReader(), l.Namespace, l.Log)
	keys := &exchange.KeyStore{Client: l.client, Direct: l.mgr.GetAPIReader(), Namespace: l.Namespace, Peers: l.peers, Log: l.Log}
	if err := errors.Join(l.mgr.Add(replicator), l.mgr.Add(liveness), l.mgr.Add(keys)); err != nil {
		return err
	}
	if l.IPAM.Address != "" {
		service := l.IPAM
		service.What = l.expiry.what
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
	l.leads.Store(&leading{gate, replicator, shared})
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

// begin reads the IPAM state, puts our own networks into it, and learns which networks nodes refuse.
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

// untilDone calls f until it succeeds, with growing pauses. It is false when ctx ended before that.
func untilDone(ctx context.Context, log *slog.Logger, f func() error) bool {
	for pause := 250 * time.Millisecond; ; pause = min(2*pause, 10*time.Second) {
		err := f()
		if err == nil {
			return true
		}
		log.Error("cannot start yet; retrying", "error", err, "in", pause.String())
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// untilAnswered is untilDone, but gives up when the API server answers and its answer is not going
// to change.
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

// identify completes the identity of this cluster. The manager needs a name, too: it becomes a part
// of object names.
func identify(ctx context.Context, reader client.Reader, namespace string, said v1alpha1.ClusterIdentity) (v1alpha1.ClusterIdentity, error) {
	id, err := owncluster.Identify(ctx, reader, namespace, said)
	if err == nil && id.ClusterName == "" {
		err = fmt.Errorf("%w: no name; want --cluster-name, or `isthmus install --cluster-name`", owncluster.ErrUnknown)
	}
	return id, err
}
