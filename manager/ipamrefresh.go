package manager

import (
	"context"
	"time"

	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// ipamRefresher refreshes the Store after a change of its objects, because another program may have
// made the change. Most changes are our own. A delay of one second merges their events, so that a
// hundred new peers do not cause a hundred refreshes.
type ipamRefresher struct {
	store *ipamstore.Store
}

// SetupWithManager makes mgr call Reconcile a second after the IpamStorage or a NetworkAllocation
// changed.
func (r *ipamRefresher) SetupWithManager(mgr ctrl.Manager) error {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	later := func(q queue) { q.AddAfter(controllers.RequestFor("ipamstate"), time.Second) }
	changes := handler.Funcs{
		UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q queue) { later(q) },
		DeleteFunc: func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { later(q) },
	}
	allocations := changes // a creation counts as well, because a user may create a NetworkAllocation with any name
	allocations.CreateFunc = func(_ context.Context, _ event.CreateEvent, q queue) { later(q) }
	return ctrl.NewControllerManagedBy(mgr).Named("ipamstate").WatchesMetadata(&v1alpha1.IpamStorage{}, changes).
		Watches(&isthmus.NetworkAllocation{}, allocations).Complete(controllers.Noted("ipamstate", r))
}

// Reconcile refreshes the Store.
func (r *ipamRefresher) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	return ctrl.Result{}, r.store.Refresh(ctx)
}
