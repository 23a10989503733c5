package exchange

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// tunnelEndpointReconciler joins the two NetworkConfigs of each peering into one TunnelEndpoint,
// which the gateway and the route agents apply. It deletes the TunnelEndpoint when either side
// withdraws its NetworkConfig. Requests are named by the tenant namespace and the cluster ID of the
// peer.
//
// It makes no partial changes: while the two NetworkConfigs disagree, the TunnelEndpoint stays
// unchanged. The gateway writes the status of the TunnelEndpoint.
type tunnelEndpointReconciler struct {
	Client      client.Client
	Peers       peers.Peers
	Facts       facts.Reader
	Store       *ipamstore.Store
	RefusalGate *RefusalGate
	Log         *slog.Logger

	queue    queue.Queue
	answers  pace
	gateways pace
}

// SetupWithManager makes mgr call Reconcile for each peer whose inputs changed. Call AddIndexes
// first. The Facts need no watch: a relevant change also changes a NetworkConfig or its condition.
func (r *tunnelEndpointReconciler) SetupWithManager(mgr ctrl.Manager) error {
	r.answers.interval, r.gateways.interval = answerInterval, gatewayInterval
	b := ctrl.NewControllerManagedBy(mgr).Named("tunnelendpoint").
		WithOptions(controller.Options{MaxConcurrentReconciles: controllers.Workers}).
		Watches(&v1alpha1.NetworkConfig{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return exchangeOf(o, o.GetLabels()[v1alpha1.LabelOriginID], o.GetLabels()[v1alpha1.LabelRemoteID])
		})).
		Watches(&v1alpha1.TunnelEndpoint{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return exchangeOf(o, o.GetLabels()[v1alpha1.LabelClusterID], o.(*v1alpha1.TunnelEndpoint).Spec.ClusterIdentity.ClusterID)
		}), builder.WithPredicates(notStatusAlone)).
		Watches(&v1alpha1.NatMapping{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.exchangesWith(ctx, o.(*v1alpha1.NatMapping).Spec.ClusterID)
		})).
		WatchesRawSource(r.queue.Source()).
		WatchesRawSource(source.Channel(r.Store.Subscribe(), handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			if o.GetName() == "" {
				return everyExchange(r.Peers, r.Log)(ctx, o)
			}
			if peer, err := r.Peers.ByID(ctx, o.GetName()); err == nil { // the NetworkAllocation of the peer may have been edited
				return []reconcile.Request{exchangeWith(peer)}
			}
			return nil
		})))
	return r.Peers.Watch(b, func(p peers.Peer) []reconcile.Request { return []reconcile.Request{exchangeWith(p)} }).Complete(controllers.Noted("tunnelendpoint", r))
}

// exchangesWith returns a request for the peer in every namespace with a NetworkConfig for it,
// including namespaces without a Peering.
func (r *tunnelEndpointReconciler) exchangesWith(ctx context.Context, id string) (all []reconcile.Request) {
	var list v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &list, client.MatchingFields{indexReceiver: id}, client.UnsafeDisableDeepCopy); err != nil {
		r.Log.Error("cannot list NetworkConfigs; a change of a NatMapping waits for the next event", "error", err)
	}
	for i := range list.Items {
		all = append(all, exchangeOf(&list.Items[i], id)...)
	}
	return all
}

// Reconcile creates, corrects or deletes the TunnelEndpoint of one peer.
func (r *tunnelEndpointReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	after, err := r.reconcile(ctx, req)
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is outdated
	case apierrors.IsInvalid(err):
		return ctrl.Result{}, reconcile.TerminalError(fmt.Errorf("exchange with %s in %s: %w", req.Name, req.Namespace, err))
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("exchange with %s in %s: %w", req.Name, req.Namespace, err)
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

// An exchange holds all objects about one peer in one namespace.
type exchange struct {
	id        string
	peer      peers.Peer                // zero if the namespace belongs to no peer
	wanted    bool                      // whether the tunnel must exist: the namespace belongs to a peer that is not leaving, or that is still draining
	elsewhere bool                      // whether the cluster is a peer in another namespace
	originals []v1alpha1.NetworkConfig  // labelled as ours; first the one with the right name
	copies    []v1alpha1.NetworkConfig  // from the peer, oldest first
	endpoints []v1alpha1.TunnelEndpoint // for the peer
}

func (r *tunnelEndpointReconciler) gather(ctx context.Context, req ctrl.Request) (*exchange, error) {
	x := &exchange{id: req.Name}
	peer, err := r.Peers.ByID(ctx, x.id)
	switch {
	case errors.Is(err, peers.ErrNoPeer):
	case err != nil:
		return nil, err
	case peer.LocalNamespace != req.Namespace:
		x.elsewhere = true
	default:
		x.peer, x.wanted = peer, !peer.Leaving || peer.Draining
	}
	var list v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &list, client.InNamespace(req.Namespace), client.MatchingFields{indexReceiver: x.id}); err != nil {
		return nil, fmt.Errorf("our NetworkConfigs: %w", err)
	}
	x.originals = list.Items
	slices.SortFunc(x.originals, func(a, b v1alpha1.NetworkConfig) int {
		if x.peer.Cluster.ClusterID != "" {
			if right := x.peer.Cluster.UniqueName(); a.Name == right || b.Name == right {
				return compareBool(b.Name == right, a.Name == right)
			}
		}
		return controllers.CompareAge(&a, &b)
	})
	if x.copies, err = CopiesOf(ctx, r.Client, req.Namespace, x.id); err != nil {
		return nil, err
	}
	var endpoints v1alpha1.TunnelEndpointList
	if err := r.Client.List(ctx, &endpoints, client.InNamespace(req.Namespace), client.MatchingLabels{v1alpha1.LabelClusterID: x.id}); err != nil {
		return nil, fmt.Errorf("TunnelEndpoints: %w", err)
	}
	x.endpoints = endpoints.Items
	return x, nil
}

// reconcile returns the time after which it must be called again, or zero if it must wait for the
// next event.
func (r *tunnelEndpointReconciler) reconcile(ctx context.Context, req ctrl.Request) (after time.Duration, err error) {
	x, err := r.gather(ctx, req)
	if err != nil {
		return 0, err
	}
	if !x.wanted {
		if after = x.peer.NeedsTunnel(x.original(), time.Now()); after == 0 {
			return 0, r.end(ctx, x)
		}
	}
	switch {
	case x.peer.Leaving:
		return after, r.shut(ctx, x)
	case !x.peer.Begun():
		return 0, nil
	}
	return 0, r.join(ctx, x)
}

// join creates or corrects the TunnelEndpoint if both sides agree, and deletes it if one side has
// withdrawn its NetworkConfig.
func (r *tunnelEndpointReconciler) join(ctx context.Context, x *exchange) error {
	live := slices.DeleteFunc(slices.Clone(x.copies), func(nc v1alpha1.NetworkConfig) bool { return !alive(nc) })
	original := x.original()
	if len(live) == 0 || original != nil && !alive(*original) {
		// One of the NetworkConfigs is missing or being deleted. The Peering still exists, so if
		// ours is missing, it was deleted by mistake. The peer's networks stay allocated.
		if err := r.deleteEndpoints(ctx, x); err != nil {
			return err
		}
	}
	for i := range x.copies {
		if !alive(x.copies[i]) {
			if err := r.removeFinalizer(ctx, &x.copies[i]); err != nil {
				return err
			}
		}
	}
	for i := range x.originals {
		if !alive(x.originals[i]) {
			if err := r.removeFinalizer(ctx, &x.originals[i]); err != nil {
				return err
			}
		}
	}
	if original == nil || !alive(*original) {
		return nil
	}
	if err := r.hold(ctx, original); err != nil {
		return err
	}
	original = withoutOldAnswer(original)
	if len(live) != 1 {
		return nil
	}
	copied := &live[0]
	if err := r.reclaim(ctx, x.peer, copied); err != nil {
		return err
	}
	original, wait := r.paced(x.id, original)
	if wait > 0 { // the new answer has to wait, even if the previous one no longer works
		r.queue.Add(exchangeWith(x.peer), wait)
	}
	spec, err := r.decide(ctx, x, original, copied)
	if err != nil || spec == nil {
		return err
	}
	if !r.RefusalGate.refused(x.id, &r.queue, exchangeWith(x.peer)) {
		return nil // the answer must not be used yet; under Liqo's RBAC, the peer may have written it itself
	}
	if ready, err := r.mapped(ctx, x.id, original); err != nil || !ready {
		return err
	}
	if err := r.hold(ctx, copied); err != nil {
		return err
	}
	return r.write(ctx, x.peer, original, copied, *spec)
}

// original returns our NetworkConfig, or nil.
func (x *exchange) original() *v1alpha1.NetworkConfig {
	if len(x.originals) == 0 || x.originals[0].Name != x.peer.Cluster.UniqueName() {
		return nil
	}
	return &x.originals[0]
}

// decide returns the TunnelEndpoint that should exist. It returns nil if the present TunnelEndpoint
// should stay: an object has not arrived yet, or there is a problem that a condition reports.
//
// The peer may write both NetworkConfigs and, under Liqo's RBAC, their status. So decide compares
// our networks in our NetworkConfig, and our answer in the peer's, with our own state. If they
// differ, it returns nil, because our reconcilers are about to revert the edit.
//
// A refusal is often about the networks alone, such as a network in spec.overrides that is not
// free. In this case the tunnel keeps its networks, but gets the rest of the claim, such as a new
// endpoint or key.
func (r *tunnelEndpointReconciler) decide(ctx context.Context, x *exchange, original, copied *v1alpha1.NetworkConfig) (*v1alpha1.TunnelEndpointSpec, error) {
	peer := x.peer
	facts, err := r.Facts.Facts(ctx)
	if err != nil {
		return nil, err
	}
	if original.Spec.PodCIDR != facts.PodCIDR.String() || original.Spec.ExternalCIDR != facts.ExternalCIDR.String() {
		return nil, nil
	}
	accepted := meta.FindStatusCondition(copied.Status.Conditions, v1alpha1.ConditionAccepted)
	if accepted != nil && accepted.ObservedGeneration != copied.Generation {
		return nil, nil // the present claim is not answered yet
	}
	if !answerInForce(r.Store.State(), copied) {
		return nil, nil
	}
	_, refusals, err := Validator{Reader: r.Client, Peers: r.Peers, Facts: r.Facts, Store: r.Store}.validate(ctx, peer, copied)
	if err != nil || len(refusals) > 0 {
		return nil, err
	}
	spec, problems := fabric.TunnelEndpointFor(original, copied, peer.Cluster)
	for _, p := range problems {
		r.Log.Debug("no TunnelEndpoint yet", "peer", peer.Cluster.ClusterID, "problem", p.Error())
	}
	if len(problems) > 0 {
		return nil, nil
	}
	refused := accepted != nil && accepted.Status != metav1.ConditionTrue
	if refused && !slices.ContainsFunc(x.endpoints, func(te v1alpha1.TunnelEndpoint) bool { return sameRemote(te.Spec, spec) }) {
		return nil, nil
	}
	return &spec, nil
}

// sameRemote reports whether both specs have the same networks of the peer, both original and
// translated ones.
func sameRemote(a, b v1alpha1.TunnelEndpointSpec) bool {
	return a.RemotePodCIDR == b.RemotePodCIDR && a.RemoteNATPodCIDR == b.RemoteNATPodCIDR &&
		a.RemoteExternalCIDR == b.RemoteExternalCIDR && a.RemoteNATExternalCIDR == b.RemoteNATExternalCIDR
}

// mapped stores the answer of the peer in the IPAM state. It returns true once the matching
// NatMapping exists, so that the gateway never sees a TunnelEndpoint without a NatMapping.
func (r *tunnelEndpointReconciler) mapped(ctx context.Context, id string, original *v1alpha1.NetworkConfig) (bool, error) {
	pod, external, ok := fabric.SeenBy(original)
	if !ok {
		return false, nil
	}
	var was ipam.Allocation
	state, err := r.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
		was = b.AnswerOf(id)
		if peer, err := r.Peers.ByID(ctx, id); errors.Is(err, peers.ErrNoPeer) || err == nil && peer.Leaving {
			return b, errNotWanted
		} else if err != nil {
			return b, err
		}
		if _, allocated := b.AllocationOf(id); !allocated {
			return b, errNotWanted // the peer was released in the meantime
		}
		return b.Answered(id, pod, external), nil
	})
	if errors.Is(err, errNotWanted) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("record the peer's answer: %w", err)
	}
	if answer := state.AnswerOf(id); complete(was) && answer != was && r.answers.record(id, time.Now()) {
		r.Log.Warn("peer changes its answer too often; processing one change a minute", "peer", id, "answer", answer)
	}
	want, ok := state.NatMapping(id)
	if !ok {
		return false, nil
	}
	mappings, err := natMappingsOf(ctx, r.Client, id)
	return slices.ContainsFunc(mappings, func(nm v1alpha1.NatMapping) bool {
		return nm.DeletionTimestamp.IsZero() && nm.Spec.PodCIDR == want.PodCIDR && nm.Spec.ExternalCIDR == want.ExternalCIDR
	}), err
}

// inBand reports whether both sides have configured their managers to use the tunnel. The peer has
// to agree, because our API server is then open to every host with the address of the peer's
// gateway. In a Liqo cluster, every node has that address.
func inBand(peer peers.Peer, copied *v1alpha1.NetworkConfig) bool {
	return peer.InBand && copied.Spec.BackendConfig[v1alpha1.ConfigInBand] == "true"
}

// write creates or corrects the TunnelEndpoint.
func (r *tunnelEndpointReconciler) write(ctx context.Context, peer peers.Peer, original, copied *v1alpha1.NetworkConfig, spec v1alpha1.TunnelEndpointSpec) error {
	facts, err := r.Facts.Facts(ctx)
	if err != nil {
		return err
	}
	name := types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}
	var current v1alpha1.TunnelEndpoint
	err = r.Client.Get(ctx, name, &current)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("TunnelEndpoint %s: %w", name, err)
	}
	gvk, gvkErr := apiutil.GVKForObject(peer.Owner, r.Client.Scheme())
	if gvkErr != nil {
		return gvkErr
	}
	want := current.DeepCopy()
	want.Namespace, want.Name, want.Spec = name.Namespace, name.Name, spec
	if want.Labels == nil {
		want.Labels = make(map[string]string)
	}
	want.Labels[v1alpha1.LabelClusterID] = peer.Cluster.ClusterID
	if delete(want.Annotations, isthmus.AnnotationPostQuantum); peer.KeyRequired {
		metav1.SetMetaDataAnnotation(&want.ObjectMeta, isthmus.AnnotationPostQuantum, string(isthmus.PostQuantumRequired))
	}
	if delete(want.Annotations, isthmus.AnnotationInBand); inBand(peer, copied) {
		metav1.SetMetaDataAnnotation(&want.ObjectMeta, isthmus.AnnotationInBand, "true")
	}
	remember(want, proves(copied.Spec.BackendConfig, facts.Keys, r.Peers.Self, peer.Cluster.ClusterID))
	want.OwnerReferences = []metav1.OwnerReference{ // as in Liqo's objects
		{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NetworkConfig", Name: original.Name, UID: original.UID},
		*metav1.NewControllerRef(peer.Owner, gvk),
	}
	moves := !sameGateway(current.Spec, spec)
	if wait := r.gateways.delay(peer.Cluster.ClusterID, time.Now()); moves && wait > 0 {
		r.queue.Add(exchangeWith(peer), wait)
		return nil
	}
	switch {
	case apierrors.IsNotFound(err):
		if err = r.Client.Create(ctx, want); err == nil {
			r.Log.Info("TunnelEndpoint created", "peer", peer.Cluster.ClusterID, "namespace", name.Namespace, "name", name.Name)
		}
	case !current.DeletionTimestamp.IsZero():
		return nil // the TunnelEndpoint is recreated once the deleted object is gone
	case equality.Semantic.DeepEqual(&current, want):
		return nil
	default:
		if err = r.Client.Patch(ctx, want, client.MergeFromWithOptions(&current, client.MergeFromWithOptimisticLock{})); err == nil {
			r.Log.Info("TunnelEndpoint changed", "peer", peer.Cluster.ClusterID, "namespace", name.Namespace, "name", name.Name)
		}
	}
	if err != nil {
		return fmt.Errorf("TunnelEndpoint %s: %w", name, err)
	}
	if moves {
		r.gateways.record(peer.Cluster.ClusterID, time.Now())
	}
	return nil
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// PresharedIn returns the ID of the exchange whose preshared key all present sessions use, as the
// gateway reports it. It returns "" if a session uses another key or none.
func PresharedIn(te *v1alpha1.TunnelEndpoint) string {
	if te == nil {
		return ""
	}
	return te.Status.Connection.PeerConfiguration[v1alpha1.ConfigPreshared]
}
