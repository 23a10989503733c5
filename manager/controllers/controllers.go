// Package controllers has what the controllers of the manager share: how many requests each works on at a
// time, when it tries again, how requests are named, and the metric of its last success. All packages of
// the manager may use it; it uses none of them.
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
	Workers = 16                     // per controller: a slow write holds up a few peers, not all
	Soon    = 100 * time.Millisecond // when the cache was behind what we know
)

// RequestFor names what is reconciled by the ID of a cluster.
func RequestFor(id string) reconcile.Request {
	var r reconcile.Request
	r.Name = id
	return r
}

var families metric.Catalogue

// Families are the metrics of controllers, by name.
func Families() []*metric.Family { return families.Families() }

var familyReconciled = families.Gauge("manager_reconcile_success_timestamp_seconds", "When a controller last completed a reconciliation; no series before the first time.", "controller")

// Reconciled is of the process, as are the metrics of controller-runtime beside which it stands.
var Reconciled = prometheus.NewGaugeVec(prometheus.GaugeOpts(familyReconciled.Options()), familyReconciled.Labels)

// Noted is a reconciler whose successes are seen in the metrics.
func Noted(name string, r reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		result, err := r.Reconcile(ctx, request)
		if err == nil {
			Reconciled.WithLabelValues(name).SetToCurrentTime()
		}
		return result, err
	})
}

// CompareAge is negative when a comes before b: the older first, of the same age the one with the
// smaller UID.
func CompareAge(a, b client.Object) int {
	at, bt := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(at.Compare(bt.Time), cmp.Compare(a.GetUID(), b.GetUID()))
}

// Found reads an object; nil when there is none.
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
