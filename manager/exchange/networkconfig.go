package exchange

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// NetworkConfigReconciler keeps one NetworkConfig for each peer: the original, which describes this
// cluster's network to the peer. Requests are named by the cluster ID of the peer.
type NetworkConfigReconciler struct {
	Client client.Client
	Peers  peers.Peers
	Facts  facts.Reader
	// FactsChanged gets a value after every change of the Facts.
	FactsChanged <-chan event.GenericEvent
	// Keys stores preshared keys. If it is nil, peers are offered no preshared key.
	Keys *KeyStore
	Log  *slog.Logger

	proofs sync.Map // cluster ID → proof
}

// SetupWithManager makes mgr call Reconcile for each peer whose inputs changed, and for all peers
// when the Facts change.
func (r *NetworkConfigReconciler) SetupWithManager(mgr ctrl.Manager) error {
	b := ctrl.NewControllerManagedBy(mgr).Named("networkconfig").
		WithOptions(controller.Options{MaxConcurrentReconciles: controllers.Workers}).
		Watches(&v1alpha1.NetworkConfig{}, handler.EnqueueRequestsFromMapFunc(r.peerOf)).
		Watches(&v1alpha1.TunnelEndpoint{}, handler.EnqueueRequestsFromMapFunc(r.peerOf), builder.WithPredicates(presharedChanged)).
		WatchesMetadata(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(r.peerIn)).
		WatchesRawSource(source.Channel(r.FactsChanged, handler.EnqueueRequestsFromMapFunc(r.everyPeer)))
	if r.Keys != nil {
		b = b.WatchesRawSource(r.Keys.again.Source())
	}
	return r.Peers.Watch(b, func(p peers.Peer) []reconcile.Request {
		return []reconcile.Request{controllers.RequestFor(p.Cluster.ClusterID)}
	}).Complete(controllers.Noted("networkconfig", r))
}

// peerOf returns the request for the peer that a NetworkConfig belongs to. It uses only the
// namespace: somebody may have changed the labels, and a copy may have the name of our original.
func (r *NetworkConfigReconciler) peerOf(ctx context.Context, o client.Object) []reconcile.Request {
	return r.peerInNamespace(ctx, o.GetNamespace())
}

// presharedChanged drops updates of a TunnelEndpoint that do not change the preshared key of its
// sessions.
var presharedChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	return PresharedIn(e.ObjectOld.(*v1alpha1.TunnelEndpoint)) != PresharedIn(e.ObjectNew.(*v1alpha1.TunnelEndpoint))
}}

func (r *NetworkConfigReconciler) peerIn(ctx context.Context, namespace client.Object) []reconcile.Request {
	return r.peerInNamespace(ctx, namespace.GetName())
}

func (r *NetworkConfigReconciler) peerInNamespace(ctx context.Context, namespace string) []reconcile.Request {
	peer, err := r.Peers.ByNamespace(ctx, namespace)
	if err != nil {
		return nil
	}
	return []reconcile.Request{controllers.RequestFor(peer.Cluster.ClusterID)}
}

func (r *NetworkConfigReconciler) everyPeer(ctx context.Context, _ client.Object) (all []reconcile.Request) {
	peers, err := r.Peers.List(ctx)
	if err != nil {
		r.Log.Error("cannot list the peers; new networks of this cluster wait for the next event", "error", err)
	}
	for _, peer := range peers {
		all = append(all, controllers.RequestFor(peer.Cluster.ClusterID))
	}
	return all
}

// Reconcile creates, corrects or deletes the original for the peer.
func (r *NetworkConfigReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	peer, err := r.Peers.ByID(ctx, req.Name)
	if errors.Is(err, peers.ErrNoPeer) {
		r.proofs.Delete(req.Name)
		return ctrl.Result{}, r.Keys.Forget(ctx, req.Name) // the garbage collector and other controllers delete everything else
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("peer %s: %w", req.Name, err)
	}
	current, others, err := r.originals(ctx, peer)
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("peer %s: %w", req.Name, err)
	}
	for i := range others {
		r.Log.Info("deleted an additional NetworkConfig for the same peer", "peer", req.Name, "namespace", peer.LocalNamespace, "name", others[i].Name)
		err = errors.Join(err, r.remove(ctx, &others[i]))
	}
	err = errors.Join(err, r.free(ctx, peer, current))
	switch {
	case err != nil:
	case peer.Leaving && !peer.Draining && current != nil:
		err = r.remove(ctx, current)
	case peer.Begun():
		err = r.publish(ctx, peer, current)
	}
	if apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is outdated
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("peer %s: NetworkConfig %s/%s: %w", req.Name, peer.LocalNamespace, peer.Cluster.UniqueName(), err)
	}
	return ctrl.Result{}, nil
}

// free removes foreign finalizers from our original, and from copies that are being deleted.
// Otherwise a finalizer that no controller here removes, for example one that the peer added, would
// block the end of the peering.
func (r *NetworkConfigReconciler) free(ctx context.Context, peer peers.Peer, original *v1alpha1.NetworkConfig) error {
	var copies v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &copies, client.InNamespace(peer.LocalNamespace), client.Limit(maxRefused),
		client.MatchingLabels{v1alpha1.LabelOriginID: peer.Cluster.ClusterID}); err != nil {
		return fmt.Errorf("NetworkConfigs of the peer in %s: %w", peer.LocalNamespace, err)
	}
	var all []*v1alpha1.NetworkConfig
	if original != nil && notOurs(original, peer) == "" {
		all = append(all, original)
	}
	for i := range copies.Items {
		if !copies.Items[i].DeletionTimestamp.IsZero() {
			all = append(all, &copies.Items[i])
		}
	}
	var errs error
	for _, nc := range all {
		if !slices.ContainsFunc(nc.Finalizers, foreignFinalizer) {
			continue
		}
		before := nc.DeepCopy()
		nc.Finalizers = slices.DeleteFunc(nc.Finalizers, foreignFinalizer)
		err := r.Client.Patch(ctx, nc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		if errs = errors.Join(errs, client.IgnoreNotFound(err)); err == nil {
			r.Log.Warn("removed foreign finalizers", "namespace", nc.Namespace, "name", nc.Name, "had", before.Finalizers)
		}
	}
	return errs
}

// foreignFinalizer reports whether a finalizer of a NetworkConfig belongs neither to us nor to the
// garbage collector. Liqo's finalizers have the same names as ours.
func foreignFinalizer(name string) bool {
	return !slices.Contains([]string{v1alpha1.FinalizerReplicator, v1alpha1.FinalizerTunnelEndpointCreator,
		metav1.FinalizerDeleteDependents, metav1.FinalizerOrphanDependents}, name)
}

// originals returns the original for the peer, or nil, and other objects that are labelled as our
// original. The original has a fixed name, which the copy inherits.
func (r *NetworkConfigReconciler) originals(ctx context.Context, peer peers.Peer) (current *v1alpha1.NetworkConfig, others []v1alpha1.NetworkConfig, err error) {
	current = new(v1alpha1.NetworkConfig)
	name := types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}
	switch err := r.Client.Get(ctx, name, current); {
	case apierrors.IsNotFound(err):
		current = nil
	case err != nil:
		return nil, nil, fmt.Errorf("NetworkConfig %s: %w", name, err)
	}
	var list v1alpha1.NetworkConfigList
	if err := r.Client.List(ctx, &list, client.InNamespace(peer.LocalNamespace), client.MatchingLabels{
		v1alpha1.LabelReplication: "true", v1alpha1.LabelRemoteID: peer.Cluster.ClusterID,
	}); err != nil {
		return nil, nil, fmt.Errorf("NetworkConfigs in %s: %w", peer.LocalNamespace, err)
	}
	others = slices.DeleteFunc(list.Items, func(nc v1alpha1.NetworkConfig) bool { return nc.Name == name.Name })
	return current, others, nil
}

// publish writes the original, once all values in it are known.
func (r *NetworkConfigReconciler) publish(ctx context.Context, peer peers.Peer, current *v1alpha1.NetworkConfig) error {
	switch {
	case current == nil:
	case !current.DeletionTimestamp.IsZero(), notOurs(current, peer) != "":
		return nil // the original is recreated once the deleted object is gone
	case current.Annotations[isthmus.AnnotationUnanswered] != "":
		return r.withdraw(ctx, current) // an old answer is withdrawn even while the Facts are incomplete
	}
	facts, err := r.Facts.Facts(ctx)
	if err != nil {
		return err
	}
	spec, problems := NetworkConfigFor(facts, peer)
	if len(problems) > 0 {
		return nil // the status of the Peering reports the problems
	}
	if err := r.prove(ctx, peer, facts, &spec); err != nil {
		return err
	}
	keys := r.agree(ctx, peer, current, &spec)
	return errors.Join(r.publishSpec(ctx, peer, current, spec), keys)
}

// publishSpec creates or corrects the original.
func (r *NetworkConfigReconciler) publishSpec(ctx context.Context, peer peers.Peer, current *v1alpha1.NetworkConfig, spec v1alpha1.NetworkConfigSpec) error {
	if current != nil {
		want := current.DeepCopy()
		if err := setOriginal(want, peer, spec, r.Client.Scheme()); err != nil {
			return err
		}
		if equality.Semantic.DeepEqual(current, want) {
			return nil
		}
		if spec.PodCIDR != current.Spec.PodCIDR || spec.ExternalCIDR != current.Spec.ExternalCIDR {
			if !peer.Replicated() {
				// Liqo's replicator copies back any answer that it finds, even one to our previous networks.
				// Only a new NetworkConfig gets a new answer.
				r.Log.Info("NetworkConfig recreated, because our networks have changed", "peer", peer.Cluster.ClusterID, "namespace", want.Namespace, "name", want.Name)
				return r.remove(ctx, current)
			}
			metav1.SetMetaDataAnnotation(&want.ObjectMeta, isthmus.AnnotationUnanswered, "true")
		}
		err := r.Client.Patch(ctx, want, client.MergeFrom(current))
		if err == nil {
			r.Log.Info("NetworkConfig corrected", "peer", peer.Cluster.ClusterID, "namespace", want.Namespace, "name", want.Name)
		}
		return err
	}
	if problem, err := peers.NamespaceProblem(ctx, r.Client, peer.LocalNamespace); problem != "" || err != nil {
		return err
	}
	want := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}}
	if err := setOriginal(want, peer, spec, r.Client.Scheme()); err != nil {
		return err
	}
	err := r.Client.Create(ctx, want)
	if err == nil {
		r.Log.Info("NetworkConfig created", "peer", peer.Cluster.ClusterID, "namespace", want.Namespace, "name", want.Name)
	}
	return err
}

// withdraw removes an answer to our previous networks from our NetworkConfig, and then the
// annotation that marks that answer. The replicator then copies back an answer to the new networks.
func (r *NetworkConfigReconciler) withdraw(ctx context.Context, current *v1alpha1.NetworkConfig) error {
	if !equality.Semantic.DeepEqual(current.Status, v1alpha1.NetworkConfigStatus{}) {
		before := current.DeepCopy()
		current.Status = v1alpha1.NetworkConfigStatus{}
		if err := r.Client.Status().Patch(ctx, current, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return err
		}
	}
	before := current.DeepCopy()
	delete(current.Annotations, isthmus.AnnotationUnanswered)
	return r.Client.Patch(ctx, current, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// OriginalFor returns our NetworkConfig for a peer, without an answer to our previous networks. It
// returns nil if there is none. If an object with the name of our NetworkConfig is not ours,
// problem has the reason; otherwise problem is "".
func OriginalFor(ctx context.Context, reader client.Reader, peer peers.Peer) (nc *v1alpha1.NetworkConfig, problem string, err error) {
	name := types.NamespacedName{Namespace: peer.LocalNamespace, Name: peer.Cluster.UniqueName()}
	if nc, err = controllers.Found(ctx, reader, name, new(v1alpha1.NetworkConfig)); nc == nil || err != nil {
		return nil, "", err
	}
	if problem = notOurs(nc, peer); problem != "" {
		return nil, problem, nil
	}
	return withoutOldAnswer(nc), "", nil
}

// withoutOldAnswer returns our NetworkConfig without an answer to our previous networks.
func withoutOldAnswer(nc *v1alpha1.NetworkConfig) *v1alpha1.NetworkConfig {
	if nc.Annotations[isthmus.AnnotationUnanswered] == "" {
		return nc
	}
	nc = nc.DeepCopy()
	nc.Status = v1alpha1.NetworkConfigStatus{}
	return nc
}

// setOriginal sets all fields that an original for the peer needs. Other fields stay unchanged.
func setOriginal(nc *v1alpha1.NetworkConfig, peer peers.Peer, spec v1alpha1.NetworkConfigSpec, scheme *runtime.Scheme) error {
	nc.Spec = spec
	if nc.Labels == nil {
		nc.Labels = make(map[string]string)
	}
	maps.Copy(nc.Labels, map[string]string{
		v1alpha1.LabelReplication: "true",
		v1alpha1.LabelRemoteID:    peer.Cluster.ClusterID,
		v1alpha1.LabelOwnership:   v1alpha1.OwnershipNetworkConfigCreator,
	})
	delete(nc.Labels, v1alpha1.LabelOriginID)
	delete(nc.Labels, v1alpha1.LabelReplicated)
	if metav1.IsControlledBy(nc, peer.Owner) {
		return nil
	}
	nc.OwnerReferences = nil // the owners are from an earlier Peering, or another writer set them
	return controllerutil.SetControllerReference(peer.Owner, nc, scheme)
}

// notOurs explains why the object with the name of our original is not ours. It returns "" if the
// object is ours. The peer may create objects in its tenant namespace, even with that name.
func notOurs(nc *v1alpha1.NetworkConfig, peer peers.Peer) string {
	if origin, ok := nc.Labels[v1alpha1.LabelOriginID]; ok && !metav1.IsControlledBy(nc, peer.Owner) {
		return fmt.Sprintf("NetworkConfig %s/%s has the name of our NetworkConfig, but is from cluster %q (label %s); delete it",
			nc.Namespace, nc.Name, origin, v1alpha1.LabelOriginID)
	}
	return ""
}

func (r *NetworkConfigReconciler) remove(ctx context.Context, nc *v1alpha1.NetworkConfig) error {
	if !nc.DeletionTimestamp.IsZero() {
		return nil
	}
	return client.IgnoreNotFound(r.Client.Delete(ctx, nc, client.Preconditions{UID: &nc.UID}))
}

// NetworkConfigFor decides the spec that this cluster publishes to a peer. If the spec cannot be
// decided yet, problems has the reasons, as sentences.
func NetworkConfigFor(f facts.Facts, p peers.Peer) (spec v1alpha1.NetworkConfigSpec, problems []string) {
	endpoint, port := f.Endpoint, f.Port
	if p.Overrides.Address != nil {
		endpoint = *p.Overrides.Address
	}
	port = cmp.Or(uint16(p.Overrides.Port), port)
	problems = slices.Clone(f.Missing)
	if endpoint == "" || port == 0 {
		problems = append(problems, cmp.Or(f.NoEndpoint, "the gateway's Service has no address or port"))
	}
	if len(problems) > 0 {
		return spec, problems
	}
	spec = fabric.NetworkConfigFor(fabric.Claim{
		Pod: f.PodCIDR, External: f.ExternalCIDR, Endpoint: endpoint, Port: port, PublicKey: f.PublicKey, Tunnels: f.TunnelsAt(uint16(p.Overrides.Port)),
	}, p.Cluster)
	if p.InBand {
		spec.BackendConfig[v1alpha1.ConfigInBand] = "true"
	}
	_, wrong := fabric.ClaimFrom(&v1alpha1.NetworkConfig{Spec: spec}, fabric.Origin{})
	for _, problem := range wrong {
		problems = append(problems, "our NetworkConfig would be invalid: "+problem.Error())
	}
	return spec, problems
}
