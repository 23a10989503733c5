package exchange

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/queue"
)

// answerReconciler answers the NetworkConfigs of the peers. It validates the claim in a
// NetworkConfig, allocates networks for the claim in the IPAM state, and writes the answer into the
// status of the NetworkConfig. A request has the tenant namespace as namespace, and the cluster ID
// in the label liqo.io/originID as name.
//
// A refusal is a condition, not an error. A change of the Facts, the Peering, the IPAM state or
// another peer causes a new request, because it may end the refusal.
type answerReconciler struct {
	Client      client.Client
	Peers       peers.Peers
	Facts       facts.Reader
	Store       *ipamstore.Store
	RefusalGate *RefusalGate
	// FactsChanged gets a value after every change of the Facts.
	FactsChanged <-chan event.GenericEvent
	Log          *slog.Logger

	queue     queue.Queue
	waiting   requests // requests that wait for a free network or address, keyed by forRoom
	claimants requests // all requests, keyed by the public keys in their NetworkConfig

	// pruned is true if the API server drops conditions. It does so if Liqo's CRD of NetworkConfigs
	// is installed, because that CRD has no conditions.
	pruned atomic.Bool
}

// SetupWithManager makes mgr call Reconcile for each peer whose inputs changed. Call AddIndexes
// first.
func (r *answerReconciler) SetupWithManager(mgr ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(mgr).Named("answer").
		WithOptions(controller.Options{MaxConcurrentReconciles: controllers.Workers}).
		Watches(&v1alpha1.NetworkConfig{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			origin := o.GetLabels()[v1alpha1.LabelOriginID]
			if origin == "" {
				return nil
			}
			return append(r.claimantsOf(o.(*v1alpha1.NetworkConfig).Spec.BackendConfig), exchangeOf(o, origin)...)
		})).
		Watches(&v1alpha1.TunnelEndpoint{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return append(r.claimantsOf(o.(*v1alpha1.TunnelEndpoint).Spec.BackendConfig), r.waiting.with(forRoom)...)
		}), builder.WithPredicates(notStatusAlone)).
		WatchesRawSource(r.queue.Source()).
		WatchesRawSource(source.Channel(r.FactsChanged, handler.EnqueueRequestsFromMapFunc(everyExchange(r.Peers, r.Log)))).
		WatchesRawSource(source.Channel(r.Store.Subscribe(), handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			if o.GetName() == "" {
				return everyExchange(r.Peers, r.Log)(ctx, o)
			}
			all := r.waiting.with(forRoom)
			if peer, err := r.Peers.ByID(ctx, o.GetName()); err == nil { // the NetworkAllocation of the peer may have been edited
				all = append(all, exchangeWith(peer))
			}
			return all
		})))
	return r.Peers.Watch(b, func(p peers.Peer) []reconcile.Request { return []reconcile.Request{exchangeWith(p)} }).Complete(controllers.Noted("answer", r))
}

// claimantsOf returns the requests whose NetworkConfig lists a key in config. A change of config
// may change the peer to which such a key belongs.
func (r *answerReconciler) claimantsOf(config v1alpha1.BackendConfig) (all []reconcile.Request) {
	for _, key := range publicKeysOf(config) {
		all = append(all, r.claimants.with(key)...)
	}
	return all
}

// Reconcile answers the NetworkConfigs of one sender in one namespace.
func (r *answerReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	err := r.reconcile(ctx, req)
	switch {
	case apierrors.IsConflict(err):
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is outdated
	case apierrors.IsInvalid(err):
		// A retry would fail in the same way. An edit of the object causes a new request.
		return ctrl.Result{}, reconcile.TerminalError(fmt.Errorf("NetworkConfig of %s in %s: %w", req.Name, req.Namespace, err))
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("NetworkConfig of %s in %s: %w", req.Name, req.Namespace, err)
	}
	return ctrl.Result{}, nil
}

func (r *answerReconciler) reconcile(ctx context.Context, req ctrl.Request) error {
	copies, err := CopiesOf(ctx, r.Client, req.Namespace, req.Name)
	copies = slices.DeleteFunc(copies, func(nc v1alpha1.NetworkConfig) bool { return !alive(nc) })
	r.waiting.remove(req)
	r.claimants.remove(req)
	if err != nil || len(copies) == 0 {
		return err
	}
	peer, refusal, err := sender(ctx, r.Peers, req.Namespace, req.Name)
	switch {
	case err != nil:
		return err
	case refusal != nil:
		return r.refuseStranger(ctx, copies, *refusal)
	case !peer.Begun():
		return nil
	case len(copies) > 1:
		return r.refuse(ctx, copies, fabric.Refusal{Reason: v1alpha1.ReasonAmbiguous, Problem: fabric.Problem{
			Message: fmt.Sprintf("there is more than one NetworkConfig of this cluster in namespace %s; want one", req.Namespace)}})
	}
	nc := &copies[0]
	// The request is registered first, so that a release of networks or keys during the decision
	// causes another request.
	r.waiting.add(req, forRoom)
	r.claimants.add(req, publicKeysOf(nc.Spec.BackendConfig)...)
	allocation, claim, refusals, err := r.decide(ctx, peer, nc)
	switch {
	case errors.Is(err, errNotWanted), errors.Is(err, errTooEarly):
		return nil
	case err != nil:
		return err
	case len(refusals) > 0:
		if !slices.ContainsFunc(refusals, isTransient) {
			r.waiting.remove(req)
		}
		return r.refuse(ctx, copies, refusals...)
	}
	r.waiting.remove(req)
	if !answerInForce(r.Store.State(), nc) && !r.RefusalGate.refused(req.Name, &r.queue, req) {
		return nil
	}
	answer := v1alpha1.NetworkConfigStatus{Processed: true}
	answer.PodCIDRNAT, answer.ExternalCIDRNAT = fabric.AnswerFor(claim, allocation.Pod, allocation.External)
	return r.write(ctx, nc, answer, metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered,
		Message: fmt.Sprintf("the receiver uses %v for podCIDR and %v for externalCIDR", allocation.Pod, allocation.External)})
}

// isTransient reports whether a change of the IPAM state may end the refusal.
func isTransient(r fabric.Refusal) bool {
	switch r.Reason {
	case v1alpha1.ReasonExhausted, v1alpha1.ReasonCIDRConflict, v1alpha1.ReasonEndpoint:
		return true
	}
	return false
}

// sender returns the peer that may send NetworkConfigs with this origin to the namespace. It
// returns a refusal if there is no such peer.
func sender(ctx context.Context, all peers.Peers, namespace, origin string) (peers.Peer, *fabric.Refusal, error) {
	const field = "metadata.labels[" + v1alpha1.LabelOriginID + "]"
	refusal := func(reason, format string, args ...any) *fabric.Refusal {
		return &fabric.Refusal{Reason: reason, Problem: fabric.Problem{Field: field, Message: fmt.Sprintf(format, args...)}}
	}
	peer, err := all.ByNamespace(ctx, namespace)
	switch {
	case errors.Is(err, peers.ErrNoPeer):
		return peers.Peer{}, refusal(v1alpha1.ReasonNotPeered, "no Peering here is for cluster %s and namespace %s", origin, namespace), nil
	case err != nil:
		return peers.Peer{}, nil, err
	case peer.Cluster.ClusterID != origin:
		return peers.Peer{}, refusal(v1alpha1.ReasonWrongOrigin, "is %q, but namespace %s is for cluster %s", origin, namespace, peer.Cluster.ClusterID), nil
	case peer.Leaving && !peer.Draining:
		return peers.Peer{}, refusal(v1alpha1.ReasonNotPeered, "the peering with cluster %s is being taken down here", origin), nil
	}
	return peer, nil, nil
}

// maxRefused bounds the number of objects in one namespace that get a condition with the reason of
// their refusal. A peer can fill its namespace, and must not cause unbounded writes.
const maxRefused = 16

// refuseStranger refuses the NetworkConfigs in a namespace that is not their origin's tenant
// namespace. It writes nothing if the namespace has more than maxRefused NetworkConfigs.
func (r *answerReconciler) refuseStranger(ctx context.Context, copies []v1alpha1.NetworkConfig, refusal fabric.Refusal) error {
	var list v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &list, client.InNamespace(copies[0].Namespace), client.Limit(maxRefused+1), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("count the other NetworkConfigs: %w", err)
	}
	if len(list.Items) > maxRefused {
		return nil
	}
	return r.refuse(ctx, copies, refusal)
}

// refuse writes the reasons into the conditions of the oldest maxRefused copies. An earlier answer
// stays as long as it is correct.
func (r *answerReconciler) refuse(ctx context.Context, copies []v1alpha1.NetworkConfig, refusals ...fabric.Refusal) (err error) {
	condition := metav1.Condition{Status: metav1.ConditionFalse, Reason: refusals[0].Reason, Message: textOf(refusals)}
	for i := range copies[:min(len(copies), maxRefused)] {
		nc := &copies[i]
		var answer v1alpha1.NetworkConfigStatus
		switch condition.Reason {
		case v1alpha1.ReasonNotPeered, v1alpha1.ReasonWrongOrigin: // no peer belongs to the namespace, so there is no answer to keep
		default:
			if answerInForce(r.Store.State(), nc) {
				answer = v1alpha1.NetworkConfigStatus{Processed: true, PodCIDRNAT: nc.Status.PodCIDRNAT, ExternalCIDRNAT: nc.Status.ExternalCIDRNAT}
			}
		}
		err = errors.Join(err, r.write(ctx, nc, answer, condition))
	}
	return err
}

// textOf returns the messages of refusals.
func textOf(refusals []fabric.Refusal) string {
	messages := make([]string, len(refusals))
	for i := range refusals {
		messages[i] = refusals[i].Error()
	}
	return strings.Join(messages, "; ")
}

// answerInForce reports whether the status of a copy still answers the sender's claim with the
// networks that the sender has in the IPAM state.
func answerInForce(b ipam.State, nc *v1alpha1.NetworkConfig) bool {
	allocation, allocated := b.AllocationOf(nc.Labels[v1alpha1.LabelOriginID])
	pod, external, answered := fabric.SeenBy(nc)
	return allocated && answered && allocation == ipam.Allocation{Pod: pod, External: external}
}

// write updates the status of a copy if that changes the stored status. We own the whole status, so
// conditions that the sender wrote into it are removed.
func (r *answerReconciler) write(ctx context.Context, nc *v1alpha1.NetworkConfig, answer v1alpha1.NetworkConfigStatus, accepted metav1.Condition) error {
	if old := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted); old != nil {
		answer.Conditions = []metav1.Condition{*old}
	}
	accepted.Type, accepted.ObservedGeneration = v1alpha1.ConditionAccepted, nc.Generation
	meta.SetStatusCondition(&answer.Conditions, accepted)
	stored := answer
	if r.pruned.Load() {
		stored.Conditions = nil
	}
	if equality.Semantic.DeepEqual(nc.Status, stored) {
		return nil
	}
	want := nc.DeepCopy()
	want.Status = answer
	// The patch has an optimistic lock, because the answer is only correct for the spec that was read.
	if err := r.Client.Status().Patch(ctx, want, client.MergeFromWithOptions(nc, client.MergeFromWithOptimisticLock{})); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.pruned.Store(len(want.Status.Conditions) == 0)
	level := slog.LevelInfo
	if accepted.Status != metav1.ConditionTrue {
		level = slog.LevelWarn
	}
	r.Log.Log(ctx, level, "NetworkConfig of a peer answered", "peer", nc.Labels[v1alpha1.LabelOriginID], "namespace", nc.Namespace, "name", nc.Name,
		"reason", accepted.Reason, "message", accepted.Message)
	return nil
}
