package services

import (
	"context"
	"errors"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	runtimemanager "sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// SetupWithManager makes mgr run the Controller.
func (c *Controller) SetupWithManager(mgr ctrl.Manager) error {
	if err := errors.Join(
		c.objects.IndexField(context.Background(), &discoveryv1.EndpointSlice{}, indexService, func(o client.Object) []string { return []string{o.GetLabels()[LabelService]} }),
		mgr.Add(runtimemanager.RunnableFunc(c.objects.Start)),
		mgr.Add(runtimemanager.RunnableFunc(func(ctx context.Context) error {
			c.sources.run(ctx)
			return nil
		})),
	); err != nil {
		return err
	}
	same := handler.TypedEnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
		return []reconcile.Request{{NamespacedName: client.ObjectKeyFromObject(o)}}
	})
	byLabel := func(_ context.Context, o client.Object) []reconcile.Request {
		if name := o.GetLabels()[LabelService]; name != "" {
			return []reconcile.Request{{NamespacedName: Key{Namespace: o.GetNamespace(), Name: name}}}
		}
		return nil
	}
	err := ctrl.NewControllerManagedBy(mgr).Named("services").
		WithOptions(controller.Options{MaxConcurrentReconciles: 8}).
		WatchesRawSource(source.Kind[client.Object](c.objects, &mcs.ServiceExport{}, same)).
		WatchesRawSource(source.Kind[client.Object](c.objects, &mcs.ServiceImport{}, same)).
		WatchesRawSource(source.Kind[client.Object](c.objects, &corev1.Service{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			if requests := byLabel(ctx, o); len(requests) > 0 {
				return requests
			}
			k := client.ObjectKeyFromObject(o)
			all := c.displaced(k)
			if c.exports(ctx, k) {
				all = append(all, reconcile.Request{NamespacedName: k})
			}
			return all
		}))).
		WatchesRawSource(source.Kind[client.Object](c.objects, &discoveryv1.EndpointSlice{}, handler.EnqueueRequestsFromMapFunc(byLabel))).
		WatchesRawSource(source.Kind(c.objects, &isthmus.PeerServices{}, differing(budgets{}))).
		WatchesRawSource(source.Kind[client.Object](c.Cache, &net.TunnelEndpoint{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return c.offeredBy(ctx, o.GetNamespace())
		}), predicate.GenerationChangedPredicate{})). // ignores status updates, such as those of the latency
		WatchesRawSource(source.Kind[client.Object](c.Cache, &isthmus.Peering{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) []reconcile.Request {
			return append(c.known(), c.offeredBy(ctx, o.(*isthmus.Peering).Spec.TenantNamespace.Local)...)
		}), peeringChanged)).
		WatchesMetadata(&corev1.Namespace{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (all []reconcile.Request) {
			for _, r := range c.offeredBy(ctx, "") {
				if r.Namespace == o.GetName() {
					all = append(all, r)
				}
			}
			return all
		})).
		WatchesRawSource(c.again.Source()).
		WatchesRawSource(source.Channel(c.PeerChanged, handler.Funcs{
			GenericFunc: func(_ context.Context, _ event.GenericEvent, q workqueue.TypedRateLimitingInterface[reconcile.Request]) {
				for _, k := range c.board.ownKeys() { // the conditions of exports depend on the peers' answers
					q.(priorityqueue.PriorityQueue[reconcile.Request]).AddWithOpts(priorityqueue.AddOpts{After: peersPause, Priority: ptr.To(behindOthers)}, request(k.Namespace, k.Name))
				}
			},
		})).
		Complete(c)
	if err != nil {
		return err
	}
	return errors.Join((&exporter{Controller: c}).setup(mgr), (&answerer{c}).setup(mgr))
}

// peersPause is the delay after which conditions are updated when peers' answers or exports have
// changed. A peer may change its answers and exports all the time, and must not cause more frequent
// checks of other services and Peerings.
const peersPause = time.Second

// peeringChanged drops updates that do not affect services, such as those of the latency.
var peeringChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	a, b := e.ObjectOld.(*isthmus.Peering), e.ObjectNew.(*isthmus.Peering)
	was, is := meta.FindStatusCondition(a.Status.Conditions, isthmus.ConditionConnected), meta.FindStatusCondition(b.Status.Conditions, isthmus.ConditionConnected)
	return a.Generation != b.Generation || a.UID != b.UID || a.DeletionTimestamp.IsZero() != b.DeletionTimestamp.IsZero() ||
		(was == nil) != (is == nil) || was != nil && (was.Status != is.Status || was.Reason != is.Reason)
}}

// exports reports whether a ServiceExport with this name exists.
func (c *Controller) exports(ctx context.Context, k Key) bool {
	return c.objects.Get(ctx, k, &mcs.ServiceExport{}) == nil
}

// known returns requests for all services on the board.
func (c *Controller) known() (all []reconcile.Request) {
	for _, k := range c.board.keys() {
		all = append(all, reconcile.Request{NamespacedName: k})
	}
	return all
}

// offeredBy returns requests for the services that the peer with the tenant namespace exports to
// us. If tenant is "", it returns requests for the services of all peers.
func (c *Controller) offeredBy(ctx context.Context, tenant string) (all []reconcile.Request) {
	var list isthmus.PeerServicesList
	if err := c.objects.List(ctx, &list, client.InNamespace(tenant), client.UnsafeDisableDeepCopy); err != nil {
		c.Log.Error("cannot list imported services; a change waits for the next event", "error", err)
	}
	for i := range list.Items {
		for _, s := range list.Items[i].Spec.Services {
			all = append(all, requestFor(s))
		}
	}
	return all
}

// displaced returns the request for the service whose derived Service has the given name. It does
// not use LabelService, because a foreign Service with that name lacks the label.
func (c *Controller) displaced(k Key) (all []reconcile.Request) {
	if !strings.HasPrefix(k.Name, derivedPrefix) {
		return nil
	}
	for _, service := range c.board.keys() {
		if service.Namespace == k.Namespace && DerivedName(service) == k.Name {
			all = append(all, reconcile.Request{NamespacedName: service})
		}
	}
	return all
}

func requestFor(s isthmus.ExportedService) reconcile.Request { return request(s.Namespace, s.Name) }

func request(namespace, name string) reconcile.Request {
	return reconcile.Request{NamespacedName: Key{Namespace: namespace, Name: name}}
}
