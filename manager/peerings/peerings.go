// Package peerings reports the state of each Peering in its status and in Events, and takes a Peering that is deleted
// down in the right order: shared services, TunnelEndpoint, NetworkConfig and its copy at the peer, networks,
// finalizer. It watches the gateway's Lease, without which the state of a tunnel is stale.
//
// It owns the status and the finalizer of Peerings, and reads the objects of package exchange. The manager runs its
// controllers.
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

// reasonLeftBehind is that of the Event about what a forced un-peering leaves.
const reasonLeftBehind = "LeftBehind"

// A stateStore is the part of ipamstore.Store that the removal of a Peering needs.
type stateStore interface {
	State() ipam.State
	Now(context.Context) (time.Time, error)
	Update(context.Context, func(ipam.State) (ipam.State, error)) (ipam.State, error)
}

// A Reconciler tells the story of each Peering in its status, and takes a Peering that is
// deleted down in the right order: shared services, TunnelEndpoint, NetworkConfig and its copy at the
// peer, networks of the IPAM, finalizer.
type Reconciler struct {
	Client client.Client
	Peers  peers.Peers
	Facts  facts.Reader
	Store  stateStore
	// Replicator knows how far our NetworkConfigs have come; see replication.Replicator.
	Replicator interface {
		State(id string) (replication.State, bool)
	}
	Liveness *Liveness
	// FactsChanged receives a value after every change of the Facts. PeerChanged receives the
	// cluster ID after every change of a State of the replicator.
	FactsChanged, PeerChanged <-chan event.GenericEvent
	Events                    events.EventRecorder
	Log                       *slog.Logger
	// Services shares Services; nil: it is off, or, with ServicesLacking, cannot.
	Services        *services.Controller
	ServicesLacking string
	// Keys are preshared keys; nil: peers are offered none.
	Keys *exchange.KeyStore

	drains drains
}

// SetupWithManager makes mgr call Reconcile for each Peering that something happened to.
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
		})). // also after our own writes: a status that was compared with an old one has to be compared again
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

// Reconcile brings the status of one Peering up to date and goes on with its removal if that is
// wanted.
func (r *Reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	after, err := r.reconcile(ctx, req.Name)
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is behind
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("peering %s: %w", req.Name, err)
	}
	return ctrl.Result{RequeueAfter: after}, nil
}

// reconcile returns after which time it has to be called again; zero: an event calls it.
func (r *Reconciler) reconcile(ctx context.Context, name string) (after time.Duration, err error) {
	var peering isthmus.Peering
	if err := r.Client.Get(ctx, types.NamespacedName{Name: name}, &peering); err != nil {
		return 0, client.IgnoreNotFound(err)
	}
	leaving := !peering.DeletionTimestamp.IsZero()
	switch has := controllerutil.ContainsFinalizer(&peering, isthmus.FinalizerPeering); {
	case leaving && !has:
		return 0, nil // others' finalizers
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
	if err := r.weigh(ctx, &s, peer); err != nil {
		return s, err
	}
	r.gatherServices(ctx, &s)
	r.gatherKey(ctx, &s, peer)
	state, looked := r.Replicator.State(peer.Cluster.ClusterID)
	if !looked { // what the manager before us saw holds until we have looked: a restart is no news
		s.identity, s.published = told(peering, isthmus.ConditionIdentity), told(peering, isthmus.ConditionPublished)
		return s, nil
	}
	s.identity, s.published = s.aboutPeer(verdictOf(state.Identity, unknown)), s.aboutPeer(verdictOf(state.Published, unknown))
	s.unreadable = verdictOf(state.Answered, verdict{})
	return s, nil
}

// told returns what the status says already.
func told(peering *isthmus.Peering, condition string) verdict {
	c := meta.FindStatusCondition(peering.Status.Conditions, condition)
	if c == nil || c.Reason == isthmus.ReasonConflict { // there was one, and what it hid was not looked at
		return unknown
	}
	return verdict{c.Status, c.Reason, c.Message}
}

// leave goes on with the removal of a Peering, as far as it goes now; done says that nothing is
// left. The NetworkConfig is deleted by its own reconciler.
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
		// Where our NetworkConfig never came to be, the peer's may have got networks.
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

// deleteCopies deletes what a peer that is left in band has here. Its manager is not let through any more, and may be
// taking leave itself.
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

// force ends the wait for the peer, if that is wanted, and says what stays there. It is wanted too
// when somebody deletes the tenant namespace: our identity at the peer goes with it, and with the
// identity the way to delete anything there. The same is true when the tunnel of a peer that is left in band ends.
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
		why = fmt.Sprintf("the peer's API server is reached through the tunnel alone, which closes %v after the Peering was deleted", peers.InBandPatience)
	default:
		return nil
	}
	before := nc.DeepCopy()
	controllerutil.RemoveFinalizer(nc, v1alpha1.FinalizerReplicator)
	if err := r.Client.Patch(ctx, nc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("NetworkConfig %s/%s: %w", nc.Namespace, nc.Name, err)
	}
	if why == unpeeringForced && s.peering.Annotations[isthmus.AnnotationForce] == isthmus.ForceCarried {
		return nil // nothing stays there
	}
	left := fmt.Sprintf("%s: NetworkConfig %s/%s may stay at the peer, cluster %s (%s)",
		why, s.peering.Spec.TenantNamespace.Remote, nc.Name, s.peering.Spec.Cluster.ClusterID, s.peerSays())
	left = fit(left, 1024) // an Event takes no more
	r.Log.Warn(left, "peering", s.peering.Name)
	r.Events.Eventf(s.peering, nil, corev1.EventTypeWarning, reasonLeftBehind, "ForceUnpeer", "%s", left)
	return nil
}

// peerSays is what is known about the way to the peer's API server.
func (s *peeringState) peerSays() string {
	if s.identity.status != metav1.ConditionTrue {
		return s.identity.message
	}
	return s.published.message
}

// waitingFor says what has to be gone before a Peering can go, or "".
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
		ends := ""
		if peer.InBand {
			ends = fmt.Sprintf(", and so does the end of the tunnel at %s", peer.Left.Add(peers.InBandPatience).UTC().Format(time.TimeOnly+"Z"))
		}
		all = append(all, fmt.Sprintf("the peer's API server to delete NetworkConfig %s/%s there (%s); the annotation %s=true ends the wait and leaves it there%s",
			s.peering.Spec.TenantNamespace.Remote, nc.Name, s.peerSays(), isthmus.AnnotationForce, ends))
	default:
		all = append(all, fmt.Sprintf("NetworkConfig %s/%s to be deleted", nc.Namespace, nc.Name))
	}
	if s.services.left && !peer.Abandoned(now) && !s.ending {
		all = append(all, fmt.Sprintf("the peer's API server to delete our PeerServices in namespace %s there", s.peering.Spec.TenantNamespace.Remote))
	}
	return strings.Join(all, "; ")
}

// write writes the status if it differs, and an Event for each transition.
func (r *Reconciler) write(ctx context.Context, s peeringState) error {
	want := s.peering.DeepCopy()
	want.Status = statusFor(s)
	if equality.Semantic.DeepEqual(want.Status, s.peering.Status) {
		return nil
	}
	// The lock, because the conditions remember what was there before: they must not be computed
	// from an old status.
	if err := r.Client.Status().Patch(ctx, want, client.MergeFromWithOptions(s.peering, client.MergeFromWithOptimisticLock{})); err != nil {
		return client.IgnoreNotFound(err)
	}
	r.announce(s.peering, want)
	return nil
}

// announce makes Events of what a person may want to hear of: Ready changes, something that was
// fine is not any more, or the peer claims what somebody has to agree to.
//
// A peer can change its NetworkConfig as often as it likes. So that this does not fill our API
// server, Events that differ in nothing but their words become one that is counted: they refer to
// the Peering without its version, and their reason is never one that the peer chose.
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
			if ready && (old == nil || old.Reason != c.Reason) { // all else is meant to end
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
			r.Events.Eventf(about, nil, corev1.EventTypeNormal, reason, c.Type, "%s is over: %s", old.Reason, c.Message)
		case !isTrue && wasTrue && !ready && slices.Contains(isthmus.WaitReasons, c.Reason): // the Event of what it waits for is enough
		case !isTrue && wasTrue, ready && old != nil && !isTrue && eventReason(old) != reason,
			c.Type == isthmus.ConditionPeerConfig && c.Reason == v1alpha1.ReasonConsent && old != nil && old.Message != c.Message:
			r.Log.Warn("peering has a problem", "peering", after.Name, "condition", c.Type, "reason", c.Reason, "message", c.Message)
			r.Events.Eventf(about, nil, corev1.EventTypeWarning, reason, c.Type, "%s: %s", c.Type, c.Message)
		}
	}
}

// eventReason is the reason of the Event about a condition that is not true. Ready has that of
// another condition as its own, which has an Event of its own.
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

// verdictOf reads what the replicator says, or returns silent when it says nothing.
func verdictOf(c replication.Condition, silent verdict) verdict {
	if c.Status == "" {
		return silent
	}
	return verdict{c.Status, c.Reason, c.Message}
}
