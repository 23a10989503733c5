package services

import (
	"context"
	"sync"

	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// A Queue is that of one controller, for others to add to. Its zero value takes what is added before the
// controller starts.
type Queue struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
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

// add asks for a reconcile. It does not wait.
func (q *Queue) add(namespace, name string) {
	r := reconcile.Request{NamespacedName: Key{Namespace: namespace, Name: name}}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.queue == nil {
		q.early = append(q.early, r)
		return
	}
	q.queue.Add(r)
}
