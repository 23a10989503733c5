// Package peerings reports the state of each Peering in its status and in Events. It also removes
// the objects of a deleted Peering in this order: shared services, TunnelEndpoint, NetworkConfig
// and its copy at the peer, networks, finalizer. It watches the gateway's Lease, because without an
// active gateway the status of a tunnel is outdated.
//
// The package owns the status and the finalizer of Peerings, and reads the objects of package
// exchange. The manager runs its controllers.
package peerings

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/replication"
	"github.com/isthmus-net/isthmus/manager/services"
)

// reasonLeftBehind is the reason of the Event about objects that a forced un-peering leaves at the
// peer.
const reasonLeftBehind = "LeftBehind"

// A stateStore is the part of ipamstore.Store that the removal of a Peering needs.
type stateStore interface {
	State() ipam.State
	Now(context.Context) (time.Time, error)
	Update(context.Context, func(ipam.State) (ipam.State, error)) (ipam.State, error)
}

// A Reconciler reports the state of each Peering in its status, and removes the objects of deleted
// Peerings, as the package comment describes.
type Reconciler struct {
	Client client.Client
	Peers  peers.Peers
	Facts  facts.Reader
	Store  stateStore
	// Replicator reports the progress of our NetworkConfigs; see replication.Replicator.
	Replicator interface {
		State(id string) (replication.State, bool)
	}
	Liveness *Liveness
	// FactsChanged gets a value after every change of the Facts. PeerChanged gets a peer's cluster ID
	// after every change of that peer's State in the replicator.
	FactsChanged, PeerChanged <-chan event.GenericEvent
	Events                    events.EventRecorder
	Log                       *slog.Logger
	// Services is the controller that shares Services. It is nil if sharing is off or impossible;
	// in the latter case, ServicesLacking has the reason.
	Services        *services.Controller
	ServicesLacking string
	// Keys stores preshared keys. If it is nil, peers are offered no preshared key.
	Keys *exchange.KeyStore

	drains drains
}

// SetupWithManager makes mgr call Reconcile for each Peering whose inputs changed.
func (r *Reconciler) SetupWithManager(mgr ctrl.Manager) error {
	inNamespace := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
		return r.peerings(ctx, client.MatchingFields{peers.IndexTenantNamespace: o.GetNamespace()})
	})
	everyPeering := handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, _ client.Object) []reconcile.Request {
		return r.peerings(ctx)
	})
	b := ctrl.NewControllerManagedBy(mgr).Named("peering")
	if r.Services != nil {
		b = b.WatchesRawSource(r.Services.Imported().Source())
	}
	return b.
		WithOptions(controller.Options{MaxConcurrentReconciles: controllers.Workers}).
		Watches(&isthmus.Peering{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (all []reconcile.Request) {
			for _, peering := range r.Peers.Neighbours(ctx, o.(*isthmus.Peering)) {
				all = append(all, controllers.RequestFor(peering.Name))
			}
			return all
			// Our own status writes count as well: a status that was computed from an outdated object has to
			// be computed again.
		})).
		Watches(&v1alpha1.NetworkConfig{}, inNamespace).
		Watches(&v1alpha1.TunnelEndpoint{}, inNamespace).
		WatchesMetadata(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.peerings(ctx, client.MatchingFields{peers.IndexTenantNamespace: o.GetName()})
		})).
		WatchesRawSource(source.Channel(r.PeerChanged, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return r.peerings(ctx, client.MatchingFields{peers.IndexClusterID: o.GetName()})
		}))).
		WatchesRawSource(source.Channel(r.FactsChanged, everyPeering)).
		WatchesRawSource(source.Channel(r.Liveness.Changed(), everyPeering)).
		Complete(controllers.Noted("peering", r))
}

func (r *Reconciler) peerings(ctx context.Context, which ...client.ListOption) (all []reconcile.Request) {
	var list isthmus.PeeringList
	if err := r.Client.List(ctx, &list, which...); err != nil {
		r.Log.Error("cannot list Peerings; a change waits for the next event", "error", err)
	}
	for i := range list.Items {
		all = append(all, controllers.RequestFor(list.Items[i].Name))
	}
	return all
}

// Reconcile updates the status of one Peering, and continues its removal if it is deleted.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	after, err := r.reconcile(ctx, req.Name)
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is outdated
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("peering %s: %w", req.Name, err)
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

// reconcile returns the time after which it must be called again, or zero if it must wait for the
// next event.
func (r *Reconciler) reconcile(ctx context.Context, name string) (after time.Duration, err error) {
	var peering isthmus.Peering
	if err := r.Client.Get(ctx, types.NamespacedName{Name: name}, &peering); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	leaving := !peering.DeletionTimestamp.IsZero()
	switch has := controllerutil.ContainsFinalizer(&peering, isthmus.FinalizerPeering); {
	case leaving && !has:
		return 0, nil // other controllers remove the remaining finalizers
	case !leaving && !has:
		before := peering.DeepCopy()
		controllerutil.AddFinalizer(&peering, isthmus.FinalizerPeering)
		if err := r.Client.Patch(ctx, &peering, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return 0, err
		}
	}
	state, err := r.gather(ctx, &peering)
	if err != nil {
		return 0, err
	}
	if leaving {
		if after, err = r.drain(ctx, &state); err != nil {
			return 0, err
		}
		if after == 0 {
			done, err := r.leave(ctx, &state)
			if done || err != nil {
				return 0, err
			}
			if peer := peers.From(&peering); peer.InBand {
				after = peer.InBandLeft(time.Now())
			}
		}
	} else if err := r.force(ctx, &state, time.Now()); err != nil {
		return 0, err
	}
	return after, r.write(ctx, state)
}

func (r *Reconciler) gather(ctx context.Context, peering *isthmus.Peering) (s peeringState, err error) {
	peer := peers.From(peering)
	s = peeringState{peering: peering, identity: unknown, published: unknown, silent: r.Liveness.Silent()}
	if s.conflict, err = r.Peers.Conflict(ctx, peering); s.conflict != "" || err != nil {
		return s, err
	}
	facts, err := r.Facts.Facts(ctx)
	if err != nil {
		return s, err
	}
	s.self, s.rotates = facts.Cluster, rotates(facts)
	_, s.lacking = exchange.NetworkConfigFor(facts, peer)
	for _, c := range r.Store.State().ConflictsOf(peer.Cluster.ClusterID) {
		text, err := overlapText(ctx, r.Client, c)
		if err != nil {
			return s, err
		}
		s.overlaps = append(s.overlaps, text)
	}
	if problem, err := peers.NamespaceProblem(ctx, r.Client, peer.LocalNamespace); err != nil {
		return s, err
	} else if problem != "" {
		s.tenant, s.lacking = problem, append([]string{problem}, s.lacking...)
	}
	if s.ending, err = peers.NamespaceEnding(ctx, r.Client, peer.LocalNamespace); err != nil {
		return s, err
	}
	name := types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}
	original, problem, err := exchange.OriginalFor(ctx, r.Client, peer)
	if err != nil {
		return s, err
	}
	if s.original = original; problem != "" {
		s.lacking = append(s.lacking, problem)
	}
	if s.endpoint, err = controllers.Found(ctx, r.Client, name, new(v1alpha1.TunnelEndpoint)); err != nil {
		return s, err
	}
	var copies v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &copies, client.InNamespace(peer.LocalNamespace), client.Limit(2),
		client.MatchingLabels{v1alpha1.LabelOriginID: peer.Cluster.ClusterID}); err != nil {
		return s, fmt.Errorf("NetworkConfigs in %s: %w", peer.LocalNamespace, err)
	}
	s.copies = copies.Items
	if err := r.evaluateClaim(ctx, &s, peer); err != nil {
		return s, err
	}
	r.gatherServices(ctx, &s)
	r.gatherKey(ctx, &s, peer)
	state, checked := r.Replicator.State(peer.Cluster.ClusterID)
	if !checked { // after a restart, the last status stays until the replicator has checked the peer
		s.identity, s.published = storedCondition(peering, isthmus.ConditionIdentity), storedCondition(peering, isthmus.ConditionPublished)
		return s, nil
	}
	s.identity, s.published = s.aboutPeer(conditionOf(state.Identity, unknown)), s.aboutPeer(conditionOf(state.Published, unknown))
	s.unreadable = conditionOf(state.Answered, condition{})
	return s, nil
}

// storedCondition returns a condition from the stored status.
func storedCondition(peering *isthmus.Peering, conditionType string) condition {
	c := meta.FindStatusCondition(peering.Status.Conditions, conditionType)
	if c == nil || c.Reason == isthmus.ReasonConflict { // a Peering in conflict was not checked
		return unknown
	}
	return condition{c.Status, c.Reason, c.Message}
}

// leave continues the removal of a Peering as far as possible. done is true if no object is left.
// NetworkConfigReconciler deletes our NetworkConfig.
func (r *Reconciler) leave(ctx context.Context, s *peeringState) (done bool, err error) {
	if s.conflict == "" {
		peer, began := peers.From(s.peering), time.Now()
		still := peer.NeedsTunnel(s.original, began)
		if s.endpoint != nil && s.endpoint.DeletionTimestamp.IsZero() && still == 0 {
			if err := r.Client.Delete(ctx, s.endpoint, client.Preconditions{UID: &s.endpoint.UID}); client.IgnoreNotFound(err) != nil {
				return false, fmt.Errorf("TunnelEndpoint %s/%s: %w", s.endpoint.Namespace, s.endpoint.Name, err)
			}
		}
		if err := r.force(ctx, s, began); err != nil {
			return false, err
		}
		if s.waiting = waitingFor(*s, began); s.waiting != "" {
			return false, nil
		}
		if peer.InBand {
			if err := r.deleteCopies(ctx, peer); err != nil {
				return false, err
			}
		}
		// Usually package exchange has released the networks already. It has not if the peer got
		// networks before our NetworkConfig existed.
		now, err := r.Store.Now(ctx)
		if err != nil {
			return false, err
		}
		if _, err := r.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
			return b.Part(s.peering.Spec.Cluster.ClusterID, now), nil
		}); err != nil {
			return false, fmt.Errorf("release the networks of the peer: %w", err)
		}
	}
	before := s.peering.DeepCopy()
	controllerutil.RemoveFinalizer(s.peering, isthmus.FinalizerPeering)
	err = r.Client.Patch(ctx, s.peering, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if err = client.IgnoreNotFound(err); err == nil {
		r.Log.Info("peering taken down", "peering", s.peering.Name, "peer", s.peering.Spec.Cluster.ClusterID)
	}
	return true, err
}

// deleteCopies deletes the NetworkConfigs here of a peer that was reached in band. The peer's
// manager can no longer reach these objects.
func (r *Reconciler) deleteCopies(ctx context.Context, peer peers.Peer) error {
	copies, err := exchange.CopiesOf(ctx, r.Client, peer.LocalNamespace, peer.Cluster.ClusterID)
	if err != nil {
		return err
	}
	for i := range copies {
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, &copies[i])); err != nil {
			return fmt.Errorf("NetworkConfig %s/%s: %w", copies[i].Namespace, copies[i].Name, err)
		}
	}
	return nil
}

// force ends the wait for the peer, and reports the objects that stay at the peer. It does so only
// if an administrator forces the un-peering, if the tunnel to the peer's API server has to close,
// or if the tenant namespace, which has our identity at the peer, is being deleted.
func (r *Reconciler) force(ctx context.Context, s *peeringState, now time.Time) error {
	nc := s.original
	if nc == nil || nc.DeletionTimestamp.IsZero() || !controllerutil.ContainsFinalizer(nc, v1alpha1.FinalizerReplicator) {
		return nil
	}
	const unpeeringForced = "un-peering was forced"
	var why string
	switch peer := peers.From(s.peering); {
	case peer.Leaving && peer.Forced:
		why = unpeeringForced
	case s.ending:
		why = "namespace " + nc.Namespace + " is being deleted, and our identity at the peer with it"
	case peer.Abandoned(now):
		why = fmt.Sprintf("the peer's API server is reached only through the tunnel, which closes %v after the Peering was deleted", peers.InBandPatience)
	default:
		return nil
	}
	before := nc.DeepCopy()
	controllerutil.RemoveFinalizer(nc, v1alpha1.FinalizerReplicator)
	if err := r.Client.Patch(ctx, nc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("NetworkConfig %s/%s: %w", nc.Namespace, nc.Name, err)
	}
	if why == unpeeringForced && s.peering.Annotations[isthmus.AnnotationForce] == isthmus.ForceCarried {
		return nil // no object stays at the peer
	}
	left := fmt.Sprintf("%s: NetworkConfig %s/%s may stay at the peer, cluster %s (%s)",
		why, s.peering.Spec.TenantNamespace.Remote, nc.Name, s.peering.Spec.Cluster.ClusterID, s.peerProblem())
	left = fit(left, 1024) // the limit of an Event's note
	r.Log.Warn(left, "peering", s.peering.Name)
	r.Events.Eventf(s.peering, nil, corev1.EventTypeWarning, reasonLeftBehind, "ForceUnpeer", "%s", left)
	return nil
}

// peerProblem returns the replicator's last problem with the peer's API server, as a clause.
func (s *peeringState) peerProblem() string {
	if s.identity.status != metav1.ConditionTrue {
		return s.identity.message
	}
	return s.published.message
}

// waitingFor lists the objects that must be gone before the Peering's finalizer is removed, or
// returns "".
func waitingFor(s peeringState, now time.Time) string {
	var all []string
	peer := peers.From(s.peering)
	if te := s.endpoint; te != nil {
		what := fmt.Sprintf("TunnelEndpoint %s/%s to be deleted", te.Namespace, te.Name)
		if len(te.Finalizers) > 0 {
			what += fmt.Sprintf(" (finalizers %s)", strings.Join(te.Finalizers, ", "))
		}
		all = append(all, what)
	}
	switch nc := s.original; {
	case nc == nil:
	case controllerutil.ContainsFinalizer(nc, v1alpha1.FinalizerReplicator):
		suffix := ""
		if peer.InBand {
			suffix = fmt.Sprintf("; the wait also ends when the tunnel is closed, at %s", peer.Left.Add(peers.InBandPatience).UTC().Format(time.TimeOnly+"Z"))
		}
		all = append(all, fmt.Sprintf("the peer's API server to delete NetworkConfig %s/%s there (%s); the annotation %s=true of the Peering, as set by `isthmus unpeer --force`, ends the wait and leaves it there%s",
			s.peering.Spec.TenantNamespace.Remote, nc.Name, s.peerProblem(), isthmus.AnnotationForce, suffix))
	default:
		all = append(all, fmt.Sprintf("NetworkConfig %s/%s to be deleted", nc.Namespace, nc.Name))
	}
	if s.services.left && !peer.Abandoned(now) && !s.ending {
		all = append(all, fmt.Sprintf("the peer's API server to delete our PeerServices in namespace %s there", s.peering.Spec.TenantNamespace.Remote))
	}
	return strings.Join(all, "; ")
}

// write updates the status if it differs, and records an Event for each transition.
func (r *Reconciler) write(ctx context.Context, s peeringState) error {
	want := s.peering.DeepCopy()
	want.Status = statusFor(s)
	if equality.Semantic.DeepEqual(want.Status, s.peering.Status) {
		return nil
	}
	// The patch has an optimistic lock, because conditions depend on their previous state and must
	// not be computed from an outdated status.
	if err := r.Client.Status().Patch(ctx, want, client.MergeFromWithOptions(s.peering, client.MergeFromWithOptimisticLock{})); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.announce(s.peering, want)
	return nil
}

// announce records Events that people should see: Ready changes, a condition is no longer True, or
// the peer's claim needs consent.
//
// A peer can change its NetworkConfig as often as it likes, and must not fill our API server with
// Events. Kubernetes counts Events that differ only in their note as one Event. So the Events refer
// to the Peering without its resourceVersion, and the peer never chooses their reason.
func (r *Reconciler) announce(before, after *isthmus.Peering) {
	about := &corev1.ObjectReference{APIVersion: isthmus.GroupVersion.String(), Kind: "Peering", Name: after.Name, UID: after.UID}
	for i := range after.Status.Conditions {
		c := &after.Status.Conditions[i]
		old := meta.FindStatusCondition(before.Status.Conditions, c.Type)
		wasTrue, isTrue := old != nil && old.Status == metav1.ConditionTrue, c.Status == metav1.ConditionTrue
		ready := c.Type == isthmus.ConditionReady
		reason := eventReason(c)
		switch {
		case !after.DeletionTimestamp.IsZero():
			if ready && (old == nil || old.Reason != c.Reason) { // only Ready matters during the removal
				r.Log.Info("peering is taken down", "peering", after.Name, "message", c.Message)
				r.Events.Eventf(about, nil, corev1.EventTypeNormal, reason, c.Type, "%s", c.Message)
			}
		case ready && isTrue && !wasTrue:
			r.Log.Info("peering ready", "peering", after.Name, "message", c.Message)
			r.Events.Eventf(about, nil, corev1.EventTypeNormal, reason, c.Type, "%s", c.Message)
		case !ready && isTrue && isthmus.Limited(c) && (old == nil || old.Reason != c.Reason):
			r.Log.Warn("peering works, but with limits", "peering", after.Name, "reason", c.Reason, "message", c.Message)
			r.Events.Eventf(about, nil, corev1.EventTypeWarning, reason, c.Type, "%s", c.Message)
		case !ready && isTrue && wasTrue && isthmus.Limited(old) && old.Reason != c.Reason:
			r.Log.Info("peering works without limits again", "peering", after.Name, "was", old.Reason)
			r.Events.Eventf(about, nil, corev1.EventTypeNormal, reason, c.Type, "%s has ended: %s", old.Reason, c.Message)
		case !isTrue && wasTrue && !ready && slices.Contains(isthmus.WaitReasons, c.Reason): // another condition, for which this one waits, already has an Event
		case !isTrue && wasTrue, ready && old != nil && !isTrue && eventReason(old) != reason,
			c.Type == isthmus.ConditionPeerConfig && c.Reason == v1alpha1.ReasonConsent && old != nil && old.Message != c.Message:
			r.Log.Warn("peering has a problem", "peering", after.Name, "condition", c.Type, "reason", c.Reason, "message", c.Message)
			r.Events.Eventf(about, nil, corev1.EventTypeWarning, reason, c.Type, "%s: %s", c.Type, c.Message)
		}
	}
}

// eventReason returns the reason of the Event about a condition that is not True. Ready repeats the
// reason of another condition, which has its own Event.
func eventReason(c *metav1.Condition) string {
	switch c.Type {
	case isthmus.ConditionAnswered:
		return "NotAnswered"
	case isthmus.ConditionReady:
		if !slices.Contains([]string{isthmus.ReasonConnected, isthmus.ReasonUnpeering, isthmus.ReasonConflict, isthmus.ReasonOverlap, isthmus.ReasonLocalSetup, isthmus.ReasonGatewaySilent}, c.Reason) {
			return "NotReady"
		}
	}
	return c.Reason
}

// conditionOf converts a condition of the replicator. If c is empty, it returns fallback.
func conditionOf(c replication.Condition, fallback condition) condition {
	if c.Status == "" {
		return fallback
	}
	return condition{c.Status, c.Reason, c.Message}
}
