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

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
)

// books has the Store look at its object when somebody else may have written or deleted it. Most
// events are of our own writes; a second is given to them, so that a hundred peers coming at once
// are not a hundred looks.
type books struct{ store *ipamstore.Store }

// SetupWithManager makes mgr call Reconcile a second after the IpamStorage changed.
func (b *books) SetupWithManager(mgr ctrl.Manager) error {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	later := func(q queue) { q.AddAfter(requestFor("books"), time.Second) }
	return ctrl.NewControllerManagedBy(mgr).Named("books").
		Watches(&v1alpha1.IpamStorage{}, handler.Funcs{
			UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q queue) { later(q) },
			DeleteFunc: func(_ context.Context, _ event.TypedDeleteEvent[client.Object], q queue) { later(q) },
		}).
		Complete(noted("books", b))
}

// Reconcile has the Store look.
func (b *books) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	return ctrl.Result{}, b.store.Refresh(ctx)
}
