// Package controllers has the code that all controllers of the manager share: the number of
// concurrent reconciles, the retry delay, the naming of requests, and the metric of the last
// success. All packages of the manager may import it, so it imports none of these packages.
package controllers

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

	"github.com/isthmus-net/isthmus/internal/metric"
)

const (
	Workers = 16                     // concurrent reconciles of a controller, so that a slow write delays only a few peers
	Soon    = 100 * time.Millisecond // the delay of a retry after a read from an outdated cache
)

// RequestFor returns the request whose name is the cluster ID id.
func RequestFor(id string) reconcile.Request {
	var r reconcile.Request
	r.Name = id
	return r
}

var families metric.Catalogue

// Families returns the metrics of controllers, by name.
func Families() []*metric.Family { return families.Families() }

var familyReconciled = families.Gauge("manager_reconcile_success_timestamp_seconds", "When a controller last completed a reconciliation; no series before the first time.", "controller")

// Reconciled has the time of each controller's last success. It is registered once per process,
// like the metrics of controller-runtime.
var Reconciled = prometheus.NewGaugeVec(prometheus.GaugeOpts(familyReconciled.Options()), familyReconciled.Labels)

// Noted wraps a reconciler, so that Reconciled has the time of its last success.
func Noted(name string, r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		result, err := r.Reconcile(ctx, request)
		if err == nil {
			Reconciled.WithLabelValues(name).SetToCurrentTime()
		}
		return result, err
	})
}

// CompareAge orders objects by age, the oldest first, and objects of the same age by UID.
func CompareAge(a, b client.Object) int {
	at, bt := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(at.Compare(bt.Time), cmp.Compare(a.GetUID(), b.GetUID()))
}

// Found reads the named object and returns it, or nil if the object does not exist.
func Found[T client.Object](ctx context.Context, reader client.Reader, name types.NamespacedName, into T) (T, error) {
	var none T
	switch err := reader.Get(ctx, name, into); {
	case apierrors.IsNotFound(err):
		return none, nil
	case err != nil:
		return none, fmt.Errorf("%T %s: %w", into, name, err)
	}
	return into, nil
}
