// Package queue adds requests to the queue of a controller from code outside of the controller's
// watches.
package queue

import (
	"context"
	"sync"
	"time"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// A Queue is the queue of one controller. Requests added before the controller has started wait for
// its start. The zero value is ready for use. Its methods may be called concurrently.
type Queue struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request] // nil: the controller has not started
	early []reconcile.Request
}

// Source returns a source for the controller to watch. When the controller starts the source, q
// gets the controller's queue.
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

// Add adds a request after a delay. It does not block.
func (q *Queue) Add(r reconcile.Request, after time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.queue == nil {
		q.early = append(q.early, r)
		return
	}
	q.queue.AddAfter(r, after)
}
