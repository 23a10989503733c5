package kube

import (
	"context"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// further watches some kinds of objects while they are needed.
type further struct {
	*nodeWatch
	kinds  map[client.Object]cache.ByObject
	notify signal

	stop context.CancelFunc // nil: not wanted. Only see uses it

	got     *objects // nil: not known. Guarded by mu, like the next field
	refused bool     // the API server forbids us to read them, perhaps only for now
}

func (w *nodeWatch) further(kinds map[client.Object]cache.ByObject, notify signal) *further {
	return &further{nodeWatch: w, kinds: kinds, notify: notify}
}

// want starts or stops the watch.
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
	got, err := f.open(ctx, f.kinds, waiting) // the API server may not know these kinds
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

// known returns the watched objects, or nil until they have been read.
func (f *further) known() (got *objects, refused bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.got, f.refused
}
