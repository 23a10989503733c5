package services

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/queue"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// Patience is the time for which a tunnel may be disconnected before its endpoints become unready.
// A gateway reports a lost connection only after ten seconds of silence. Patience therefore matters
// only for a tunnel that has just started.
const Patience = 3 * time.Second

// A Replicator writes PeerServices to the peers; see replication.Replicator.
type Replicator interface {
	Share(id string, want map[string]isthmus.PeerServicesSpec)
	Sharing(id string) (replication.Sharing, bool)
}

// Options are the options of a Controller. All are required.
type Options struct {
	Config    *rest.Config // of our own API server
	Client    client.Client
	Cache     cache.Cache // the manager's cache, with Peerings, TunnelEndpoints and the metadata of Namespaces
	Self      net.ClusterIdentity
	Namespace string // the installation namespace
	// Peerings returns all Peerings except those that conflict with an older one.
	Peerings func(context.Context) ([]*isthmus.Peering, error)
	// Pods returns the PodCIDR of this cluster, or an invalid prefix if it is not known yet.
	Pods func(context.Context) (netip.Prefix, error)
	Replicator
	// PeerChanged gets a value with the peer's cluster ID after every change of a Sharing.
	PeerChanged <-chan event.GenericEvent
	Log         *slog.Logger
}

// A Controller shares Services with peers. Each reconcile handles one service: it applies the
// result of Merge, and writes the conditions of the ServiceExport. An exporter passes exports to
// the Replicator, and an answerer writes the statuses of PeerServices.
type Controller struct {
	Options
	objects cache.Cache // has Services, ServiceExports, ServiceImports, PeerServices, and our EndpointSlices
	sources *sources
	board   *board

	again    queue.Queue // services to reconcile again
	exported queue.Queue // the queue of the exporter
	answers  queue.Queue // the queue of the answerer: PeerServices whose status may have changed
	imported queue.Queue // peers whose Imports changed

	mu   sync.Mutex
	down map[string]time.Time // since when each disconnected tunnel is disconnected, by cluster ID
}

// New returns a Controller, which does nothing before SetupWithManager is called.
func New(o Options) (*Controller, error) {
	c := &Controller{
		Options: o, board: newBoard(), down: make(map[string]time.Time),
	}
	ours, err := labels.NewRequirement(LabelService, selection.Exists, nil)
	if err != nil {
		return nil, err
	}
	c.objects, err = cache.New(o.Config, cache.Options{
		Scheme: o.Client.Scheme(), Mapper: o.Client.RESTMapper(), DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&discoveryv1.EndpointSlice{}: {Label: labels.NewSelector().Add(*ours)},
			&corev1.Service{}: {Field: fields.Everything(), Transform: func(o any) (any, error) {
				if s, ok := o.(*corev1.Service); ok {
					s.ManagedFields, s.Annotations = nil, nil
				}
				return o, nil
			}},
		},
	})
	if err != nil {
		return nil, fmt.Errorf("cache of Services: %w", err)
	}
	c.sources, err = newSources(o.Config, func(k Key) { c.again.Add(request(k.Namespace, k.Name), 0) })
	return c, err
}

// Imported returns a queue that gets the name of a Peering after each change of its Imports.
func (c *Controller) Imported() *queue.Queue { return &c.imported }

// Imports summarises the imports from a peer.
func (c *Controller) Imports(id string) Imports { return c.board.imports(id) }

// Checked reports whether all services that a peer exports to us have been checked. tenant is the
// peer's tenant namespace. Just after a start, some services are not checked yet.
func (c *Controller) Checked(ctx context.Context, id, tenant string) bool {
	var list isthmus.PeerServicesList
	if err := c.objects.List(ctx, &list, client.InNamespace(tenant), client.UnsafeDisableDeepCopy); err != nil {
		return false // the cache has not started yet
	}
	for i := range list.Items {
		for _, s := range list.Items[i].Spec.Services {
			key := Key{Namespace: s.Namespace, Name: s.Name}
			if _, checked := c.board.outcome(key, id); !checked && ShardOf(key) == list.Items[i].Name { // a service in the wrong object never gets an outcome
				return false
			}
		}
	}
	return true
}

// Exports returns the number of valid exports of this cluster.
func (c *Controller) Exports() int { return len(c.board.exports()) }

// Reconcile creates, corrects or deletes the objects of one service according to its exports.
func (c *Controller) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	after, err := c.reconcile(ctx, req.NamespacedName)
	switch {
	case again(err):
		return ctrl.Result{RequeueAfter: 100 * time.Millisecond}, nil // the cache is outdated
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("service %s: %w", req.NamespacedName, err)
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

// A gathered has all inputs of a service.
type gathered struct {
	key       Key
	export    *mcs.ServiceExport // nil: this cluster does not export it
	invalid   *Invalid           // the reason why export is invalid; nil: it is valid
	ownExport *Export
	outcomes  map[string]outcome // of the peers' exports, by cluster ID
	exports   []Export           // all valid exports, including the one of this cluster
	wait      bool               // the endpoints of our Service are not known yet
	after     time.Duration      // when to reconcile again; zero: on the next event
	peerings  []*isthmus.Peering
}

// recheckInterval is the interval at which a service is reconciled again while it waits for a
// change that causes no event, such as the deletion of a foreign EndpointSlice that has the name of
// one of ours.
const recheckInterval = time.Minute

// again reports whether an error means that the cache was outdated.
func again(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }

// refused records, for each exporting peer, that this cluster does not serve its export.
func (g *gathered) refused(why Refusal) {
	for id, o := range g.outcomes {
		o.served, o.endpoints = false, 0
		o.refusals = append(o.refusals, why)
		g.outcomes[id] = o
	}
}

func (c *Controller) reconcile(ctx context.Context, key Key) (time.Duration, error) {
	g, err := c.gather(ctx, key)
	if err != nil || g.wait {
		return 0, err
	}
	have, err := c.read(ctx, key)
	if err != nil {
		return 0, err
	}
	foreign := have.foreign()
	var merged Merged
	switch {
	case foreign != "":
		g.refused(Refusal{RefusedForeign, foreign})
		err = c.remove(ctx, have.ours()) // nothing else would update or remove the objects later
	case len(g.exports) == 0:
		err = c.remove(ctx, have)
	default:
		merged = Merge(key, g.exports)
		for _, x := range g.exports {
			if o, ok := g.outcomes[x.ID]; ok {
				for _, conflict := range merged.Conflicts {
					o.refusals = append(o.refusals, Refusal{string(conflict.Reason), fit(conflict.What, maxRefusal/2) + ": not all clusters export the same"})
				}
				g.outcomes[x.ID] = o
			}
		}
		err = c.apply(ctx, have, merged)
		if other := errForeign(""); errors.As(err, &other) {
			g.refused(Refusal{RefusedForeign, other.Error()})
			g.after, err = recheckInterval, nil // no event reports the deletion of the foreign object
		} else if err != nil && !again(err) {
			g.refused(Refusal{RefusedFailed, "the importing cluster cannot write the service; see the log of its manager"})
		}
	}
	for _, id := range c.board.setOutcomes(key, g.outcomes) {
		for _, p := range g.peerings {
			if p.Spec.Cluster.ClusterID == id {
				c.answers.Add(request(p.Spec.TenantNamespace.Local, ShardOf(key)), 0)
				c.imported.Add(request("", p.Name), peersPause)
			}
		}
	}
	if err != nil {
		return 0, err
	}
	if g.export != nil && foreign == "" { // otherwise another implementation writes the conditions
		err = c.condition(ctx, g, merged)
	}
	return g.after, err
}

// gather reads all inputs of a service.
func (c *Controller) gather(ctx context.Context, key Key) (g gathered, err error) {
	g = gathered{key: key, outcomes: make(map[string]outcome)}
	if g.peerings, err = c.Peerings(ctx); err != nil {
		return g, err
	}
	slices.SortFunc(g.peerings, func(a, b *isthmus.Peering) int { // the names that clusterNames chooses depend on the order by age
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	clusters := []net.ClusterIdentity{c.Self}
	for _, p := range g.peerings {
		clusters = append(clusters, p.Spec.Cluster)
	}
	names := clusterNames(clusters)
	where := namespaces{c, ctx, g.peerings}
	if err := c.gatherOwn(ctx, &g, names[c.Self.ClusterID], where); err != nil || g.wait {
		return g, err
	}
	now := time.Now()
	shard := ShardOf(key)
	for _, p := range g.peerings {
		var object isthmus.PeerServices
		err := c.objects.Get(ctx, Key{Namespace: p.Spec.TenantNamespace.Local, Name: shard}, &object, client.UnsafeDisableDeepCopy)
		if apierrors.IsNotFound(err) || !p.DeletionTimestamp.IsZero() {
			continue
		} else if err != nil {
			return g, fmt.Errorf("PeerServices %s/%s: %w", p.Spec.TenantNamespace.Local, shard, err)
		}
		at := slices.IndexFunc(object.Spec.Services, func(s isthmus.ExportedService) bool { return s.Namespace == key.Namespace && s.Name == key.Name })
		if at < 0 {
			continue
		}
		peer, left, err := c.peer(ctx, p, names[p.Spec.Cluster.ClusterID], now)
		if err != nil {
			return g, err
		}
		if left > 0 && (g.after == 0 || left < g.after) {
			g.after = left
		}
		x, refusals, ok := peer.Accept(shard, object.Spec.Services[at], where, now)
		g.outcomes[peer.ID] = outcome{ok, len(x.Addresses), refusals}
		if ok {
			g.exports = append(g.exports, x)
		}
	}
	return g, nil
}

// gatherOwn reads the export of this cluster.
func (c *Controller) gatherOwn(ctx context.Context, g *gathered, name string, where namespaces) error {
	var export mcs.ServiceExport
	err := c.objects.Get(ctx, g.key, &export)
	if apierrors.IsNotFound(err) || err == nil && !export.DeletionTimestamp.IsZero() {
		c.sources.forget(g.key)
		if c.board.dropOwn(g.key) {
			c.exported.Add(request("", allExports), 0)
		}
		return nil
	} else if err != nil {
		return fmt.Errorf("read ServiceExport %s: %w", g.key, err)
	}
	g.export = &export
	var svc *corev1.Service
	var found corev1.Service
	if err := c.objects.Get(ctx, g.key, &found); err == nil {
		svc = &found
	} else if !apierrors.IsNotFound(err) {
		return fmt.Errorf("read Service %s: %w", g.key, err)
	}
	var endpoints []*discoveryv1.EndpointSlice
	var many *Invalid
	if svc != nil && !c.sources.room(g.key) {
		many = &Invalid{reasonTooMany, fmt.Sprintf("the namespace already has %d exported ServiceExports, which is the limit", maxExports)}
		svc, g.after = nil, recheckInterval
	}
	// Without a Service or room for a watch, no slices are watched. The name of a ServiceExport
	// without a Service may even be invalid as a label value.
	if svc == nil {
		c.sources.forget(g.key)
	} else if endpoints, g.wait = c.sources.slices(g.key); g.wait {
		return nil
	}
	own, invalid := exportOf(&export, svc, endpoints)
	if many != nil {
		invalid = many
	}
	if invalid == nil && where.Reserved(g.key.Namespace) {
		invalid = &Invalid{mcs.ServiceExportReasonInvalidServiceType, "services of this namespace are never shared"}
	}
	if g.invalid = invalid; invalid != nil {
		c.board.setOwn(g.key, nil)
	} else {
		c.board.setOwn(g.key, &own.Service)
		x := ownExport(c.Self.ClusterID, name, own)
		g.ownExport = &x
		g.exports = append(g.exports, x)
	}
	c.exported.Add(request("", allExports), 0)
	return nil
}

// peer describes an exporting cluster. left is the time after which its tunnel counts as down. left
// is zero if the tunnel is connected or already counts as down.
func (c *Controller) peer(ctx context.Context, p *isthmus.Peering, name string, now time.Time) (peer Peer, left time.Duration, err error) {
	id := p.Spec.Cluster.ClusterID
	peer = Peer{ID: id, Cluster: name, Import: p.Spec.Services.Import}
	var te net.TunnelEndpoint
	err = c.Cache.Get(ctx, Key{Namespace: p.Spec.TenantNamespace.Local, Name: p.Spec.Cluster.UniqueName()}, &te)
	switch {
	case apierrors.IsNotFound(err), err == nil && !te.DeletionTimestamp.IsZero():
		return peer, 0, nil
	case err != nil:
		return peer, 0, fmt.Errorf("TunnelEndpoint of %s: %w", id, err)
	}
	if sound, problems := fabric.PeerFrom(&te, fabric.Origin{}); len(problems) == 0 {
		peer.Pods = Remap{From: sound.Remote.Pod, To: sound.Remote.PodSeen}
		if !peer.Pods.To.IsValid() {
			peer.Pods.To = peer.Pods.From
		}
	}

	c.mu.Lock()
	defer c.mu.Unlock()
	connected := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	if connected == nil || connected.Status == metav1.ConditionTrue {
		delete(c.down, id)
		return peer, 0, nil
	}
	since, known := c.down[id]
	if !known {
		since = connected.LastTransitionTime.Time // this time survives a restart of the manager
		c.down[id] = since
	}
	// A gateway that counts as silent has been silent for longer than Patience.
	if left = since.Add(Patience).Sub(now); left <= 0 || connected.Reason == isthmus.ReasonGatewaySilent {
		peer.Down, left = true, 0
	}
	return peer, left, nil
}
