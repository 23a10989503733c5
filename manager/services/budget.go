package services

import (
	"context"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/controller/priorityqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// The budget of one peer, in tokens. A reconcile of a service costs one token, plus one for each
// hundred endpoints, because an EndpointSlice with some hundred endpoints may have to be written.
const (
	tokensPerSecond = 100
	tokensInTurn    = 500 // a peer that has spent this many tokens queues behind all other peers
	// tokensBurst is enough for all services that a peer can have.
	tokensBurst = isthmus.PeerServicesShards * (isthmus.MaxExportedServices + isthmus.MaxExportedEndpoints/100)

	behindOthers = handler.LowPriority - 1                     // priority of the services of a peer that has spent tokensInTurn: below LowPriority, which all services have when a manager starts
	tokensPause  = tokensBurst / tokensPerSecond * time.Second // the delay of a service whose peer has no tokens left
)

// budgets bounds the work that each peer can cause by changes of its PeerServices. The keys are
// tenant namespaces. Only one goroutine may use the map.
type budgets map[string]*rate.Limiter

// charge spends the tokens for a changed service, and returns the options to enqueue the service
// with.
func (b budgets) charge(tenant string, s *isthmus.ExportedService, now time.Time) (o priorityqueue.AddOpts) {
	left := b[tenant]
	if left == nil {
		left = rate.NewLimiter(tokensPerSecond, tokensBurst)
		b[tenant] = left
	}
	if left.TokensAt(now) < tokensBurst-tokensInTurn {
		o.Priority = ptr.To(behindOthers)
	}
	if !left.AllowN(now, 1+count(*s)/100) {
		o.After = tokensPause
	}
	return o
}

// differing enqueues the services that differ between two versions of PeerServices, and charges the
// peer for them.
func differing(b budgets) handler.TypedFuncs[*isthmus.PeerServices, reconcile.Request] {
	type workQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	add := func(q workQueue, tenant string, all ...*isthmus.ExportedService) {
		for _, s := range all {
			q.(priorityqueue.PriorityQueue[reconcile.Request]).AddWithOpts(b.charge(tenant, s, time.Now()), requestFor(*s))
		}
	}
	each := func(p *isthmus.PeerServices) (all []*isthmus.ExportedService) {
		for i := range p.Spec.Services {
			all = append(all, &p.Spec.Services[i])
		}
		return all
	}
	return handler.TypedFuncs[*isthmus.PeerServices, reconcile.Request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*isthmus.PeerServices], q workQueue) {
			add(q, e.Object.Namespace, each(e.Object)...)
		},
		UpdateFunc: func(_ context.Context, e event.TypedUpdateEvent[*isthmus.PeerServices], q workQueue) {
			before := make(map[Key]*isthmus.ExportedService)
			for _, s := range each(e.ObjectOld) {
				before[Key{Namespace: s.Namespace, Name: s.Name}] = s
			}
			for _, s := range each(e.ObjectNew) {
				k := Key{Namespace: s.Namespace, Name: s.Name}
				if was := before[k]; was == nil || !was.Equal(s) {
					add(q, e.ObjectNew.Namespace, s)
				}
				delete(before, k)
			}
			for _, removed := range before {
				add(q, e.ObjectNew.Namespace, removed)
			}
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*isthmus.PeerServices], q workQueue) {
			add(q, e.Object.Namespace, each(e.Object)...)
		},
	}
}
