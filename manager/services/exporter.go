package services

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// An exporter passes the exports of this cluster to the Replicator. It passes all exports for one
// peer together.
type exporter struct {
	*Controller
	complete bool // whether each export has been checked once; only Reconcile uses it
}

// pause is the time between two runs of the exporter or the answerer. The first of many changes
// takes effect at once, and the rest together after the pause.
const pause = 50 * time.Millisecond

// allExports is the name of the only request of the exporter.
const allExports = "exports"

func (e *exporter) setup(mgr ctrl.Manager) error {
	all := []reconcile.Request{{NamespacedName: Key{Name: allExports}}}
	everything := handler.EnqueueRequestsFromMapFunc(func(context.Context, client.Object) []reconcile.Request { return all })
	return ctrl.NewControllerManagedBy(mgr).Named("exports").
		WatchesRawSource(source.Kind[client.Object](e.Cache, &isthmus.Peering{}, everything, peeringChanged)).
		WatchesRawSource(e.exported.Source()).
		Complete(e)
}

// Reconcile passes the exports to the Replicator.
func (e *exporter) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	peerings, err := e.Peerings(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	pods, err := e.Pods(ctx)
	if err != nil || !pods.IsValid() {
		return ctrl.Result{RequeueAfter: time.Second}, err
	}
	// The first loop withdraws services from leaving peers, because that must not wait until all
	// exports are known.
	for _, p := range peerings {
		if !p.DeletionTimestamp.IsZero() {
			e.Share(p.Spec.Cluster.ClusterID, nil)
		}
	}
	var list mcs.ServiceExportList
	if !e.objects.WaitForCacheSync(ctx) {
		return ctrl.Result{}, nil
	}
	if err := e.objects.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return ctrl.Result{}, fmt.Errorf("ServiceExports: %w", err)
	}
	for i := range list.Items { // just after a start, some exports are not checked yet; without them in the list, the peers would lose these services
		if s := &list.Items[i]; !e.complete && s.DeletionTimestamp.IsZero() && !e.board.checked(client.ObjectKeyFromObject(s)) {
			return ctrl.Result{RequeueAfter: 2 * pause}, nil
		}
	}
	e.complete = true
	exports := e.board.exports()
	for i := range exports {
		exports[i], _ = forPeers(exports[i], pods)
	}
	for _, p := range peerings {
		var theirs []isthmus.ExportedService
		for _, s := range exports {
			if p.DeletionTimestamp.IsZero() && permits(p.Spec.Services.Export, s.Namespace) {
				theirs = append(theirs, s)
			}
		}
		shards, omitted := shardsOf(theirs)
		for _, key := range e.board.setOmitted(p.Spec.Cluster.ClusterID, omitted) {
			e.again.Add(request(key.Namespace, key.Name), 0)
		}
		e.Share(p.Spec.Cluster.ClusterID, shards)
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	}
	return ctrl.Result{}, nil
}

// An answerer writes the list of refused services into the status of PeerServices.
type answerer struct{ *Controller }

func (a *answerer) setup(mgr ctrl.Manager) error {
	same := handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}}
	})
	return ctrl.NewControllerManagedBy(mgr).Named("peerservices").
		WatchesRawSource(source.Kind[client.Object](a.objects, &isthmus.PeerServices{}, same)).
		WatchesRawSource(a.answers.Source()).
		Complete(a)
}

// Reconcile writes the status of one PeerServices.
func (a *answerer) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	select { // most services of an object change together, so the pause lets one write cover them
	case <-time.After(pause):
	case <-ctx.Done():
		return ctrl.Result{}, nil
	}
	var object isthmus.PeerServices
	if err := a.objects.Get(ctx, req.NamespacedName, &object); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	peerings, err := a.Peerings(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	at := slices.IndexFunc(peerings, func(p *isthmus.Peering) bool { return p.Spec.TenantNamespace.Local == req.Namespace })
	if at < 0 {
		return ctrl.Result{}, nil
	}
	status := isthmus.PeerServicesStatus{ObservedGeneration: object.Generation}
	for _, s := range object.Spec.Services {
		key := Key{Namespace: s.Namespace, Name: s.Name}
		o, checked := a.board.outcome(key, peerings[at].Spec.Cluster.ClusterID)
		if shard := ShardOf(key); shard != object.Name { // such a service never gets an outcome, because a reconcile reads only the object named by ShardOf
			o = outcome{refusals: []Refusal{{RefusedShard, "the service belongs in PeerServices " + shard}}}
		} else if !checked {
			return ctrl.Result{}, nil // a.answers gets this request again when the service has been reconciled
		}
		if len(o.refusals) == 0 {
			continue
		}
		refused := isthmus.RefusedService{Namespace: s.Namespace, Name: s.Name}
		var reasons, messages []string
		for _, r := range o.refusals {
			reasons, messages = append(reasons, r.Reason), append(messages, r.Message)
		}
		refused.Reason, refused.Message = strings.Join(reasons, ","), fit(strings.Join(messages, "; "), maxRefusal)
		status.Refused = append(status.Refused, refused)
	}
	if equality.Semantic.DeepEqual(status, object.Status) {
		return ctrl.Result{}, nil
	}
	want := object.DeepCopy()
	want.Status = status
	err = a.Client.Status().Patch(ctx, want, client.MergeFromWithOptions(&object, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return ctrl.Result{RequeueAfter: 2 * pause}, nil
	}
	return ctrl.Result{}, client.IgnoreNotFound(err)
}
