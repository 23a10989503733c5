package exchange

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// natMappingPrefix is the prefix of the names of NatMappings.
const natMappingPrefix = "natmapping-"

// natMappingReconciler keeps one NatMapping for each peer with an answer in the IPAM state, and
// deletes all others. Requests are named by the cluster ID of the peer.
type natMappingReconciler struct {
	Client client.Client
	Store  *ipamstore.Store
	Log    *slog.Logger
}

// SetupWithManager makes mgr call Reconcile for each peer whose mappings changed in the IPAM state
// or in the API. Call AddIndexes first.
func (r *natMappingReconciler) SetupWithManager(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).Named("natmapping").
		WithOptions(controller.Options{MaxConcurrentReconciles: controllers.Workers}).
		Watches(&v1alpha1.NatMapping{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			return mappedFor(append(valueOf(o, v1alpha1.LabelClusterID), o.(*v1alpha1.NatMapping).Spec.ClusterID)...)
		})).
		WatchesRawSource(source.Channel(r.Store.Subscribe(), handler.EnqueueRequestsFromMapFunc(r.changed))).
		WatchesRawSource(source.Func(func(ctx context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
			for _, request := range r.changed(ctx, new(v1alpha1.NatMapping)) { // changes before the start caused no event, so all peers are checked
				q.Add(request)
			}
			return nil
		})).
		Complete(controllers.Noted("natmapping", r))
}

// changed returns the request for the peer that an IPAM event names, or requests for all peers if
// the event names none.
func (r *natMappingReconciler) changed(ctx context.Context, o client.Object) []reconcile.Request {
	if id := o.GetName(); id != "" {
		return mappedFor(id)
	}
	ids := r.Store.State().Peers()
	var list v1alpha1.NatMappingList
	if err := r.Client.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		r.Log.Error("cannot list NatMappings; those of removed peers wait for the next event", "error", err)
	}
	for i := range list.Items {
		ids = append(ids, list.Items[i].Spec.ClusterID)
	}
	return mappedFor(ids...)
}

func mappedFor(ids ...string) (all []reconcile.Request) {
	for _, id := range ids {
		all = append(all, controllers.RequestFor(id))
	}
	return all
}

// Reconcile creates, corrects or deletes the NatMapping of one peer.
func (r *natMappingReconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	err := r.reconcile(ctx, req.Name)
	switch {
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err):
		return ctrl.Result{RequeueAfter: controllers.Soon}, nil // the cache is outdated
	case apierrors.IsInvalid(err):
		return ctrl.Result{}, reconcile.TerminalError(fmt.Errorf("NatMapping of %s: %w", req.Name, err))
	case err != nil:
		return ctrl.Result{}, fmt.Errorf("NatMapping of %s: %w", req.Name, err)
	}
	return ctrl.Result{}, nil
}

func (r *natMappingReconciler) reconcile(ctx context.Context, id string) error {
	all, err := natMappingsOf(ctx, r.Client, id)
	if err != nil {
		return err
	}
	spec, wanted := r.Store.State().NatMapping(id)
	kept := -1
	for i := range all {
		if wanted && all[i].DeletionTimestamp.IsZero() && (kept < 0 || all[i].Name == natMappingName(id)) {
			kept = i
		}
	}
	for i := range all {
		if i == kept {
			continue
		}
		if err := r.remove(ctx, &all[i]); err != nil {
			return err
		}
	}
	switch {
	case !wanted:
		return nil
	case kept < 0:
		return r.create(ctx, id, spec)
	}
	want := all[kept].DeepCopy()
	if want.Labels == nil {
		want.Labels = make(map[string]string)
	}
	want.Labels[v1alpha1.LabelClusterID], want.Labels[v1alpha1.LabelNatMapping] = id, "true"
	want.Spec = spec
	if equality.Semantic.DeepEqual(&all[kept], want) {
		return nil
	}
	if err := r.Client.Patch(ctx, want, client.MergeFrom(&all[kept])); err != nil {
		return fmt.Errorf("%s: %w", want.Name, err)
	}
	return nil
}

// create creates the NatMapping of a peer. Its name looks generated, as Liqo's names do, but is
// derived from the cluster ID, so that an outdated cache cannot cause a second NatMapping.
func (r *natMappingReconciler) create(ctx context.Context, id string, spec v1alpha1.NatMappingSpec) error {
	nm := &v1alpha1.NatMapping{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: natMappingPrefix,
			Name:         natMappingName(id),
			Labels:       map[string]string{v1alpha1.LabelClusterID: id, v1alpha1.LabelNatMapping: "true"},
		},
		Spec: spec,
	}
	if err := r.Client.Create(ctx, nm); err != nil {
		return err
	}
	r.Log.Info("NatMapping created", "peer", id, "name", nm.Name)
	return nil
}

// remove removes the label of a NatMapping before it deletes the object, as Liqo does. Watches that
// select by the label then see a deletion even while finalizers hold the object.
func (r *natMappingReconciler) remove(ctx context.Context, nm *v1alpha1.NatMapping) error {
	if _, labelled := nm.Labels[v1alpha1.LabelNatMapping]; labelled {
		before := nm.DeepCopy()
		delete(nm.Labels, v1alpha1.LabelNatMapping)
		if err := r.Client.Patch(ctx, nm, client.MergeFrom(before)); err != nil {
			return client.IgnoreNotFound(err)
		}
	}
	if !nm.DeletionTimestamp.IsZero() {
		return nil
	}
	if err := r.Client.Delete(ctx, nm, client.Preconditions{UID: &nm.UID}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("%s: %w", nm.Name, err)
	}
	r.Log.Info("NatMapping deleted", "peer", nm.Spec.ClusterID, "name", nm.Name)
	return nil
}

func natMappingName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return natMappingPrefix + hex.EncodeToString(sum[:5])
}

// natMappingsOf returns the NatMappings for a peer, oldest first. If somebody edited a NatMapping
// so that its label and its spec name different peers, the object's name decides.
func natMappingsOf(ctx context.Context, reader client.Reader, id string) ([]v1alpha1.NatMapping, error) {
	var list v1alpha1.NatMappingList
	if err := reader.List(ctx, &list, client.MatchingFields{indexMappedFor: id}); err != nil {
		return nil, fmt.Errorf("NatMappings: %w", err)
	}
	list.Items = slices.DeleteFunc(list.Items, func(nm v1alpha1.NatMapping) bool {
		return nm.Name != natMappingName(id) && slices.ContainsFunc(append(valueOf(&nm, v1alpha1.LabelClusterID), nm.Spec.ClusterID),
			func(other string) bool { return nm.Name == natMappingName(other) })
	})
	slices.SortFunc(list.Items, func(a, b v1alpha1.NatMapping) int { return controllers.CompareAge(&a, &b) })
	return list.Items, nil
}
