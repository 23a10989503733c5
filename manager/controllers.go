package manager

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	workers = 16                     // per controller: a slow write holds up a few peers, not all
	soon    = 100 * time.Millisecond // when the cache was behind what we know
)

// requestFor names what is reconciled by the ID of a cluster.
func requestFor(id string) reconcile.Request {
	var r reconcile.Request
	r.Name = id
	return r
}

// reconciled is of the process, as are the metrics of controller-runtime beside which it stands.
var reconciled = prometheus.NewGaugeVec(prometheus.GaugeOpts(familyReconciled.Options()), familyReconciled.Labels)

// noted is a reconciler whose successes are seen in the metrics.
func noted(name string, r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		result, err := r.Reconcile(ctx, request)
		if err == nil {
			reconciled.WithLabelValues(name).SetToCurrentTime()
		}
		return result, err
	})
}

// compareAge is negative when a comes before b: the older first, of the same age the one with the
// smaller UID.
func compareAge(a, b client.Object) int {
	at, bt := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(at.Compare(bt.Time), cmp.Compare(a.GetUID(), b.GetUID()))
}

// found reads an object; nil when there is none.
func found[T client.Object](ctx context.Context, reader client.Reader, name types.NamespacedName, into T) (T, error) {
	var none T
	switch err := reader.Get(ctx, name, into); {
	case apierrors.IsNotFound(err):
		return none, nil
	case err != nil:
		return none, fmt.Errorf("%T %s: %w", into, name, err)
	}
	return into, nil
}
