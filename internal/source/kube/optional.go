package kube

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// caches opens the caches of a nodeWatch.
type caches struct {
	config  *rest.Config
	log     *slog.Logger
	look    signal
	waiting func(error)
	group   sync.WaitGroup
}

// open starts a cache that ends with ctx. It retries until the API server answers.
func (c *caches) open(ctx context.Context, kinds map[client.Object]cache.ByObject, waiting func(error)) (o *objects, err error) {
	err = retry(ctx, waiting, func() (err error) { // newObjects needs the API server, because it reads the list of served kinds
		o, err = newObjects(c.config, kinds, c.log)
		return err
	})
	if err == nil {
		c.group.Go(func() { _ = o.Start(ctx) }) // Start ends only with ctx
	}
	return o, err
}

// optionalObjects watches some kinds of objects, but only while they are needed.
type optionalObjects struct {
	*caches
	kinds  map[client.Object]cache.ByObject
	notify signal
	stop   context.CancelFunc // nil: not watching

	mu      sync.Mutex // guards the fields below
	got     *objects   // nil: not read yet
	refused bool       // the API server forbids reading, perhaps only for now
}

func (c *caches) optional(kinds map[client.Object]cache.ByObject, notify signal) *optionalObjects {
	return &optionalObjects{caches: c, kinds: kinds, notify: notify}
}

// want starts the watch if wanted is true, and stops it otherwise. Only one goroutine may call it.
func (o *optionalObjects) want(ctx context.Context, wanted bool) {
	switch {
	case !wanted && o.stop != nil:
		o.stop()
		o.stop = nil
		o.mu.Lock()
		o.got, o.refused = nil, false
		o.mu.Unlock()
	case wanted && o.stop == nil:
		var watching context.Context
		watching, o.stop = context.WithCancel(ctx)
		o.group.Go(func() { o.watch(watching) })
	}
}

// watch watches until ctx ends.
func (o *optionalObjects) watch(ctx context.Context) {
	waiting := func(err error) {
		o.waiting(err)
		o.mu.Lock()
		o.refused = true
		o.mu.Unlock()
		o.look.set()
	}
	got, err := o.open(ctx, o.kinds, waiting) // may take long, because the API server may not serve these kinds yet
	if err != nil {
		return // ctx has ended
	}
	if got.watch(ctx, o.notify.set, waiting, slices.Collect(maps.Keys(o.kinds))...) != nil {
		return // ctx has ended
	}
	o.mu.Lock()
	if ctx.Err() == nil {
		o.got, o.refused = got, false
	}
	o.mu.Unlock()
	o.notify.set()
}

// known returns the watched objects, or nil until they have been read. refused reports whether
// the API server forbids reading them.
func (o *optionalObjects) known() (got *objects, refused bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.got, o.refused
}
