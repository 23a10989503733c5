package facts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

const (
	retryFacts = 30 * time.Second
	// apiServerInterval is the interval at which the addresses of API servers are read again, because
	// nothing watches them.
	apiServerInterval = time.Minute
	// reportPatience bounds the time that a starting manager waits for the reports of all nodes before
	// it allocates networks to new peers. Agents that start together with the manager report within a
	// second or two. Nodes without an agent, such as virtual nodes, never report.
	reportPatience = 10 * time.Second
)

// reportGap is the delay after a changed report. Reports within this time are read together.
// Thousands arrive when the agents start, and a node may change its report as often as it likes.
const reportGap = 500 * time.Millisecond

// A requestQueue is the queue of a controller.
type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// reasonIgnored is the reason of the Event about an ignored report.
const reasonIgnored = "Ignored"

// An AddressPlan is the administrator's configuration of this cluster's networks. If a prefix is
// zero, the Keeper detects the network.
type AddressPlan struct {
	PodCIDR, ServiceCIDR, ExternalCIDR netip.Prefix
	Pools, Reserved                    []netip.Prefix
}

// A Keeper keeps the Facts of this cluster. Whenever the sources of the Facts change, it gathers
// the Facts, writes the networks into the IPAM state, and notifies subscribers. Its methods may be
// called concurrently.
type Keeper struct {
	Cache  client.Reader // has Services, Secrets, Nodes, NodeNetworks and TunnelEndpoints
	Direct client.Reader // reads from the API server itself, for objects that are read once
	Store  interface {   // the methods of ipamstore.Store that the Keeper needs
		Update(context.Context, func(ipam.State) (ipam.State, error)) (ipam.State, error)
	}
	Cluster   v1alpha1.ClusterIdentity
	Namespace string // namespace of the gateway's Service and Secret
	Plan      AddressPlan
	// ServiceCIDRs is true if the API server serves the kind ServiceCIDR. Cache must then have
	// these objects.
	ServiceCIDRs bool
	// StateChanged gets the events of the Store.
	StateChanged <-chan event.GenericEvent
	Events       events.EventRecorder
	Log          *slog.Logger

	began       time.Time // when gather first ran
	mu          sync.Mutex
	facts       Facts
	known       bool
	detected    detected
	podsIn      netip.Prefix // the last PodCIDR in which checkPodCIDR found a Pod
	servers     []netip.Addr // addresses of API servers as last read
	serversRead time.Time
	conflicts   []ipam.Conflict
	subscribers []chan event.GenericEvent
}

// Facts returns the Facts that were gathered last.
func (k *Keeper) Facts(context.Context) (Facts, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.known {
		return Facts{}, errors.New("the networks and the endpoint of this cluster have not been determined yet")
	}
	return k.facts, nil
}

// Subscribe returns a channel that gets a value after the Facts change. One value may stand for
// several changes.
func (k *Keeper) Subscribe() <-chan event.GenericEvent {
	k.mu.Lock()
	defer k.mu.Unlock()
	c := make(chan event.GenericEvent, 1)
	k.subscribers = append(k.subscribers, c)
	return c
}

// SetupWithManager makes mgr call Reconcile after every change of the Facts' sources.
func (k *Keeper) SetupWithManager(mgr ctrl.Manager) error {
	something := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request {
		return []reconcile.Request{controllers.RequestFor("own")}
	})
	later := func(q requestQueue) { q.AddAfter(controllers.RequestFor("own"), reportGap) }
	c := ctrl.NewControllerManagedBy(mgr).Named("own")
	if k.ServiceCIDRs {
		c.Watches(&networkingv1.ServiceCIDR{}, something, builder.WithPredicates(predicate.GenerationChangedPredicate{}))
	}
	return c.
		Watches(&corev1.Service{}, something).
		Watches(&corev1.Secret{}, something).
		Watches(&corev1.Node{}, something, builder.WithPredicates(addressesChanged)).
		Watches(&isthmus.NodeNetworks{}, handler.Funcs{
			CreateFunc: func(_ context.Context, _ event.CreateEvent, q requestQueue) { later(q) },
			UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q requestQueue) { later(q) },
			DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q requestQueue) { later(q) },
		}, builder.WithPredicates(networksChanged)).
		WatchesRawSource(source.Channel(k.StateChanged, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, peer client.Object) []reconcile.Request {
			if peer.GetName() != "" {
				return nil // an allocation of a peer does not change our networks
			}
			return []reconcile.Request{controllers.RequestFor("own")}
		}))).
		Complete(controllers.Noted("own", k))
}

// addressesChanged drops heartbeats of Nodes. The Keeper reads only a Node's addresses and pod
// networks.
var addressesChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*corev1.Node), e.ObjectNew.(*corev1.Node)
	return !slices.Equal(before.Status.Addresses, after.Status.Addresses) || !slices.Equal(before.Spec.PodCIDRs, after.Spec.PodCIDRs)
}}

// networksChanged drops updates of fields that only the RefusalGate reads.
var networksChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	before, after := e.ObjectOld.(*isthmus.NodeNetworks).Spec, e.ObjectNew.(*isthmus.NodeNetworks).Spec
	return !slices.Equal(before.Networks, after.Networks) || !slices.Equal(before.Resolvers, after.Resolvers)
}}

// Reconcile gathers the Facts.
func (k *Keeper) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	facts, err := k.gather(ctx)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("networks and endpoint of this cluster: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.known && reflect.DeepEqual(k.facts, facts) {
		return k.nextCheck(), nil
	}
	if facts.FewerTunnels != "" && (!k.known || k.facts.FewerTunnels != facts.FewerTunnels) {
		k.Log.Warn("publishing fewer tunnels than the gateway has", "published", 1+len(facts.Tunnels), "reason", facts.FewerTunnels)
	}
	if !k.known || !slices.Equal(k.facts.Missing, facts.Missing) || k.facts.NoEndpoint != facts.NoEndpoint {
		for _, missing := range slices.Concat(facts.Missing, nonEmpty(facts.NoEndpoint)) {
			k.Log.Warn("cannot publish this cluster's networks or endpoint yet", "missing", missing)
		}
	}
	k.reportIgnored(facts.Ignored)
	k.facts, k.known = facts, true
	k.Log.Info("networks and endpoint of this cluster", "podCIDR", facts.PodCIDR, "serviceCIDR", facts.ServiceCIDR, "moreServices", facts.MoreServices, "externalCIDR", facts.ExternalCIDR,
		"endpoint", facts.Endpoint, "port", facts.Port, "tunnels", 1+len(facts.Tunnels), "nodes", len(facts.Nodes), "reached", len(facts.Reached))
	for _, c := range k.subscribers {
		select {
		case c <- event.GenericEvent{}:
		default: // the channel holds a value that nobody has read yet, so it covers this change
		}
	}
	return k.nextCheck(), nil
}

// reportIgnored records an Event about each part of a report that was not ignored before. The Event
// refers to the object of the node. Kubernetes counts Events that differ only in their note as one
// Event, so an Event on a common object would not show every node.
func (k *Keeper) reportIgnored(now []fabric.Problem) {
	for _, p := range now {
		if slices.Contains(k.facts.Ignored, p) {
			continue
		}
		k.Log.Warn("ignored part of a node's report", "problem", p.Error())
		about := &corev1.ObjectReference{APIVersion: isthmus.GroupVersion.String(), Kind: p.Origin.Kind, Namespace: p.Origin.Namespace, Name: p.Origin.Name}
		k.Events.Eventf(about, nil, corev1.EventTypeWarning, reasonIgnored, "ReadReport", "%s: %s", p.Field, p.Message)
	}
}

// nextCheck returns the time after which sources without a watch are read again.
func (k *Keeper) nextCheck() ctrl.Result {
	if k.facts.Awaiting {
		return ctrl.Result{RequeueAfter: time.Second}
	}
	if k.facts.PodCIDR.IsValid() && k.facts.ServiceCIDR.IsValid() {
		return ctrl.Result{RequeueAfter: apiServerInterval}
	}
	return ctrl.Result{RequeueAfter: retryFacts}
}

func (k *Keeper) gather(ctx context.Context) (Facts, error) {
	f := Facts{Cluster: k.Cluster}
	if err := k.networks(ctx, &f); err != nil {
		return f, err
	}
	var services corev1.ServiceList
	if err := k.Cache.List(ctx, &services, client.InNamespace(k.Namespace), client.MatchingLabels{v1alpha1.LabelGateway: "true"}); err != nil {
		return f, fmt.Errorf("services of the gateway: %w", err)
	}
	var nodes corev1.NodeList
	if err := k.Cache.List(ctx, &nodes); err != nil {
		return f, fmt.Errorf("nodes: %w", err)
	}
	f.Nodes = NodeAddresses(nodes.Items)
	err := k.reports(ctx, &f, nodes.Items)
	if err != nil {
		return f, err
	}
	if err := k.checkPodCIDR(ctx, &f, nodes.Items); err != nil {
		return f, err
	}
	if f.APIServers, err = k.apiServers(ctx); err != nil {
		return f, err
	}
	var ports []uint16
	if f.Endpoint, ports, f.NoEndpoint = endpointOf(k.Namespace, services.Items, nodes.Items); len(ports) > 0 {
		f.Port = ports[0]
	}

	var secret corev1.Secret
	name := types.NamespacedName{Namespace: k.Namespace, Name: keyring.SecretName}
	switch err := k.Cache.Get(ctx, name, &secret); {
	case apierrors.IsNotFound(err):
		f.Missing = append(f.Missing, fmt.Sprintf("Secret %s: not found; the gateway creates it", name))
	case err != nil:
		return f, fmt.Errorf("key of the gateway: %w", err)
	default:
		field, further := keyring.Public(secret.Data)
		key, err := keyring.Key(secret.Data, field)
		if err != nil {
			f.Missing = append(f.Missing, fmt.Sprintf("Secret %s: data.%s %v", name, field, err))
		}
		f.PublicKey = key
		if ring, _, err := keyring.Read(secret.Data); err == nil {
			f.Keys = keyring.Ring{Private: ring.Private, Next: ring.Next}
		}
		if f.Port != 0 && err == nil {
			f.Tunnels, f.FewerTunnels = tunnelsOf(&secret, further, key, ports[1:])
		}
	}
	agreed, err := k.agreed(ctx)
	if err != nil {
		return f, err
	}
	return f, k.configure(ctx, &f, agreed)
}

// agreed returns our networks that TunnelEndpoints name. The Keeper does not watch TunnelEndpoints,
// but reads them at least once per apiServerInterval. So a previous network becomes free at most
// that long after the last peer has stopped using it.
func (k *Keeper) agreed(ctx context.Context) (all []netip.Prefix, err error) {
	var tunnels v1alpha1.TunnelEndpointList
	if err := k.Cache.List(ctx, &tunnels, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("TunnelEndpoints: %w", err)
	}
	for i := range tunnels.Items {
		spec := &tunnels.Items[i].Spec
		for _, text := range []string{spec.LocalPodCIDR, spec.LocalExternalCIDR} {
			if p, err := netip.ParsePrefix(text); err == nil {
				all = append(all, p)
			}
		}
	}
	return all, nil
}

// configure writes our networks into the IPAM state, and reads the chosen ExternalCIDR from it.
func (k *Keeper) configure(ctx context.Context, f *Facts, agreed []netip.Prefix) error {
	if !f.PodCIDR.IsValid() || !f.ServiceCIDR.IsValid() || f.PodCIDR.Overlaps(f.ServiceCIDR) {
		return nil // the IPAM must not be configured with only one of the networks
	}
	n := k.Plan
	config := ipam.Config{
		PodCIDR: f.PodCIDR, ServiceCIDR: f.ServiceCIDR, ExternalCIDR: n.ExternalCIDR,
		Pools: n.Pools, Reserved: slices.Concat(n.Reserved, f.MoreServices), Services: f.MoreServices, Nodes: slices.Concat(f.Nodes, f.APIServers), Reached: f.Reached, Agreed: agreed,
	}
	var (
		conflicts []ipam.Conflict
		ended     []netip.Prefix
	)
	state, err := k.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
		b, conflicts = b.Configure(config)
		if b, ended = b.Yield(); len(ended) > 0 {
			conflicts = b.Conflicts()
		}
		return b, nil
	})
	if err != nil {
		return fmt.Errorf("configure the IPAM: %w", err)
	}
	if len(ended) > 0 {
		k.Log.Warn("freed networks of removed peers, because they overlap this cluster", "networks", ended)
	}
	if !slices.Equal(conflicts, k.conflicts) {
		for _, c := range conflicts {
			k.Log.Warn("networks overlap; the allocation stays until you unpeer and peer again", "conflict", c.String())
		}
		k.conflicts = conflicts
	}
	if f.ExternalCIDR = state.Own().ExternalCIDR; !f.ExternalCIDR.IsValid() {
		f.Missing = append(f.Missing, fmt.Sprintf("ExternalCIDR: the pools have no free /%d; set --pools or --external-cidr", max(20, f.PodCIDR.Bits())))
	}
	return nil
}

// reports reads the networks that nodes report. For a node without a report, it uses the podCIDRs
// of the Node; see unreported.
func (k *Keeper) reports(ctx context.Context, f *Facts, nodes []corev1.Node) error {
	if k.began.IsZero() {
		k.began = time.Now()
	}
	var reports isthmus.NodeNetworksList
	if err := k.Cache.List(ctx, &reports, client.InNamespace(k.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("reports of nodes: %w", err)
	}
	reported := make(map[string]bool, len(reports.Items))
	for i := range reports.Items {
		r := &reports.Items[i]
		n, problems := fabric.NodeNetworksFrom(r)
		for _, p := range n.Networks {
			f.Reached = append(f.Reached, ipam.Reached{Prefix: p, Node: r.Name})
		}
		for _, a := range n.Resolvers {
			f.Reached = append(f.Reached, ipam.Reached{Prefix: netip.PrefixFrom(a, a.BitLen()), Node: r.Name, Resolver: true})
		}
		f.Ignored = append(f.Ignored, problems...)
		reported[r.Name] = true
	}
	reached, wide := unreported(nodes, reported, f.PodCIDR)
	f.Reached, f.Ignored = append(f.Reached, reached...), append(f.Ignored, wide...)
	f.Reached, f.Ignored = ipam.MergeReached(f.Reached), fabric.SortProblems(f.Ignored)
	f.Awaiting = time.Since(k.began) < reportPatience && slices.ContainsFunc(nodes, func(n corev1.Node) bool { return !reported[n.Name] })
	return nil
}

// unreported returns the pod networks of nodes whose agent has not reported, except those that
// overlap the PodCIDR. Such a node may have no agent, so nothing else shows that its pod network is
// in use. The result wide has networks that are too wide for pods. They are ignored, as in a node's
// report, so peers may get networks that overlap them.
func unreported(nodes []corev1.Node, reported map[string]bool, podCIDR netip.Prefix) (all []ipam.Reached, wide []fabric.Problem) {
	for i := range nodes {
		name := nodes[i].Name
		for _, text := range nodes[i].Spec.PodCIDRs {
			p, err := netip.ParsePrefix(text)
			switch {
			case err != nil || reported[name] || !podCIDR.IsValid() || p.Addr().Is4() != podCIDR.Addr().Is4():
			case p.Bits() < fabric.WidestNodeNetwork:
				wide = append(wide, fabric.Problem{Origin: fabric.Origin{Kind: "Node", Name: name}, Field: "spec.podCIDRs", Message: fmt.Sprintf(
					"%v is ignored, so peers may get overlapping networks; want a network of length /%d or longer", p, fabric.WidestNodeNetwork)})
			case !podCIDR.Overlaps(p):
				all = append(all, ipam.Reached{Prefix: p.Masked(), Node: name})
			}
		}
	}
	return all, wide
}

// NodeAddresses returns the IP addresses of all nodes, sorted.
func NodeAddresses(nodes []corev1.Node) (all []netip.Addr) {
	for i := range nodes {
		for _, a := range nodes[i].Status.Addresses {
			if addr, err := netip.ParseAddr(a.Address); err == nil { // host names are not addresses
				all = append(all, addr.Unmap())
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

func nonEmpty(s string) []string {
	if s == "" {
		return nil
	}
	return []string{s}
}
