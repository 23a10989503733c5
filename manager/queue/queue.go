// Package queue lets others than its watches add to the queue of a controller.
package queue

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// A Queue is that of one controller. The controller may reconcile before it hands the queue over; what is
// added by then is added later. Its zero value is ready for use, by several goroutines.
type Queue struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request] // nil: not handed over yet
	early []reconcile.Request
}

// Source hands over the queue of the controller that watches it.
func (q *Queue) Source() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.queue = queue
		for _, r := range q.early {
			queue.Add(r)
		}
		q.early = nil
		return nil
	})
}

// Add adds a request after a while, and does not wait.
func (q *Queue) Add(r reconcile.Request, after time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.queue == nil {
		q.early = append(q.early, r)
		return
	}
	q.queue.AddAfter(r, after)
}
