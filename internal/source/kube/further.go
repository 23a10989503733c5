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
	err = retry(ctx, waiting, func() (err error) { // newObjects asks the API server for the kinds
		o, err = newObjects(c.config, kinds, c.log)
		return err
	})
	if err == nil {
		c.group.Go(func() { _ = o.Start(ctx) }) // it ends only with ctx
	}
	return o, err
}

// further watches some kinds of objects, but only while they are needed.
type further struct {
	*caches
	kinds  map[client.Object]cache.ByObject
	notify signal
	stop   context.CancelFunc // nil: not watching

	mu      sync.Mutex // guards the fields below
	got     *objects   // nil: not read yet
	refused bool       // the API server forbids reading, perhaps only for now
}

func (c *caches) further(kinds map[client.Object]cache.ByObject, notify signal) *further {
	return &further{caches: c, kinds: kinds, notify: notify}
}

// want starts or stops the watch. Only one goroutine may call it.
func (f *further) want(ctx context.Context, wanted bool) {
	switch {
	case !wanted && f.stop != nil:
		f.stop()
		f.stop = nil
		f.mu.Lock()
		f.got, f.refused = nil, false
		f.mu.Unlock()
	case wanted && f.stop == nil:
		var watching context.Context
		watching, f.stop = context.WithCancel(ctx)
		f.group.Go(func() { f.watch(watching) })
	}
}

// watch watches until ctx ends.
func (f *further) watch(ctx context.Context) {
	waiting := func(err error) {
		f.waiting(err)
		f.mu.Lock()
		f.refused = true
		f.mu.Unlock()
		f.look.set()
	}
	got, err := f.open(ctx, f.kinds, waiting) // perhaps the API server does not serve these kinds
	if err != nil {
		return // ctx has ended
	}
	if got.watch(ctx, f.notify.set, waiting, slices.Collect(maps.Keys(f.kinds))...) != nil {
		return // ctx has ended
	}
	f.mu.Lock()
	if ctx.Err() == nil {
		f.got, f.refused = got, false
	}
	f.mu.Unlock()
	f.notify.set()
}

// known returns the watched objects, or nil until they have been read. refused reports whether
// the API server forbids reading them.
func (f *further) known() (got *objects, refused bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got, f.refused
}
