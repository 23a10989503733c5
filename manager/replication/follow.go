package replication

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// A pace has the intervals and limits of workers.
type pace struct {
	request  time.Duration // timeout of a request other than a watch
	watch    time.Duration // maximum duration of a watch; the server may end it earlier
	check    time.Duration // during a watch: interval of the requests that check our identity; 0: none
	settled  time.Duration // a watch that lasts this long ends a series of failures
	min, max time.Duration // pause after the first failure in a series, and maximum pause
	renew    time.Duration // minimum time between two attempts to renew a token
	// authority is the interval of reads of the certificate authority that the peer publishes.
	authority time.Duration

	// turns limits the concurrent requests of all workers to one API server. It holds one element
	// for each request that waits for a response. A nil channel means no limit.
	turns chan struct{}
}

// defaultPace is the pace outside of tests. A watch lasts as long as the server permits, usually
// between half an hour and an hour. An API server does not end the watches of an identity that it
// no longer accepts, and a server that disappears does not end any watch. A small request about
// every 40 seconds detects both cases. Such a request costs both sides a tenth of a new watch.
var defaultPace = pace{
	request: 10 * time.Second, watch: 2 * time.Hour, check: 45 * time.Second, settled: 10 * time.Second,
	min: 500 * time.Millisecond, max: 30 * time.Second, renew: 10 * time.Second, authority: time.Hour,
}

// ownTurns limits the concurrent requests of all workers to our own API server. That server queues
// some hundred requests for each client, and rejects further requests with 429. A manager that
// starts with a thousand peers lists and watches a thousand Secrets.
const ownTurns = 16

// own returns the pace at our own API server, which all workers share. Our identity needs no checks
// there.
func (p pace) own() pace {
	p.check = 0
	p.turns = make(chan struct{}, ownTurns)
	return p
}

// turn waits until another request may be sent. The caller must call answered when it has the
// response. A request without a response occupies its turn until its timeout. turn returns an error
// if ctx ends first.
func (p pace) turn(ctx context.Context) (answered func(), err error) {
	if p.turns == nil {
		return func() {}, nil
	}
	select {
	case p.turns <- struct{}{}:
		done := sync.OnceFunc(func() { <-p.turns })
		late := time.AfterFunc(p.request, done)
		return func() { late.Stop(); done() }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// A backoff counts the failures in a series. The zero value has counted none.
type backoff struct{ failures int }

// next counts a failure and returns the pause after it: twice the previous pause, at most max,
// minus a random part of up to one half. Because of the random part, many workers do not retry at
// the same time.
func (b *backoff) next(p pace) time.Duration {
	d := p.max
	if b.failures < 20 { // min<<20 exceeds any max
		d = min(p.max, p.min<<b.failures)
		b.failures++
	}
	return d - rand.N(d/2+1)
}

func (b *backoff) reset() { b.failures = 0 }

// A change is one result of follow: an error, the complete list of objects, or one changed object.
type change struct {
	err     error
	full    bool
	all     []client.Object // if full: all objects
	more    bool            // if full: the list was truncated
	object  client.Object   // if not full: the changed object
	deleted bool            // if not full: whether object was deleted
}

// A feed lists and watches objects of an API server.
type feed struct {
	list  func(ctx context.Context, o metav1.ListOptions) (all []client.Object, meta metav1.ListInterface, err error)
	watch func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
}

// maxListed bounds the number of objects that follow reads from a feed. Normally there is one.
const maxListed = 64

// follow passes the objects of a feed and their changes to emit, until ctx is done. It lists the
// objects and watches from the list's version on. It lists again whenever it may have missed an
// event. Only follow may use b while it runs.
func (p pace) follow(ctx context.Context, f feed, b *backoff, emit func(change)) {
	for ctx.Err() == nil {
		c, version := p.list(ctx, f)
		if ctx.Err() != nil {
			return
		}
		emit(c)
		if c.err == nil && !c.more {
			for p.watchOnce(ctx, f, &version, b, emit) {
			}
		}
		select {
		case <-time.After(b.next(p)):
		case <-ctx.Done():
		}
	}
}

func (p pace) list(ctx context.Context, f feed) (c change, version string) {
	answered, err := p.turn(ctx)
	if err != nil {
		return change{err: err}, ""
	}
	defer answered()
	ctx, cancel := context.WithTimeout(ctx, p.request)
	defer cancel()
	all, meta, err := f.list(ctx, metav1.ListOptions{Limit: maxListed})
	if err != nil {
		return change{err: err}, ""
	}
	return change{full: true, all: all, more: meta.GetContinue() != ""}, meta.GetResourceVersion()
}

// watchOnce watches from version on, and advances version. It reports whether another watch may
// follow at once, because this watch ended without an error and not too soon.
func (p pace) watchOnce(ctx context.Context, f feed, version *string, b *backoff, emit func(change)) bool {
	answered, err := p.turn(ctx)
	if err != nil {
		return false
	}
	var checks sync.WaitGroup
	defer checks.Wait()
	ctx, cancel := context.WithTimeout(ctx, p.watch) // in case the server never ends the watch
	defer cancel()
	began := time.Now()
	defer func() {
		if time.Since(began) >= p.settled {
			b.reset()
		}
	}()
	w, err := f.watch(ctx, metav1.ListOptions{ResourceVersion: *version, AllowWatchBookmarks: true})
	answered()
	if err != nil {
		if !expired(err) {
			emit(change{err: err})
		}
		return false
	}
	defer w.Stop()
	refused := make(chan error, 1)
	if p.check > 0 {
		checks.Go(func() { p.checkRegularly(ctx, f, refused) })
	}
	for {
		var e watch.Event
		select {
		case err := <-refused:
			emit(change{err: err})
			return false
		case next, open := <-w.ResultChan():
			if !open {
				return ctx.Err() == nil && time.Since(began) >= p.settled
			}
			e = next
		}
		object, ok := e.Object.(client.Object)
		switch {
		case e.Type == watch.Error:
			if err := apierrors.FromObject(e.Object); !expired(err) {
				emit(change{err: err})
			}
			return false
		case !ok: // no correct API server sends such an object
			emit(change{err: errors.New("the watch sent something that is not an object")})
			return false
		case e.Type != watch.Bookmark:
			emit(change{object: object, deleted: e.Type == watch.Deleted})
		}
		*version = object.GetResourceVersion()
	}
}

// checkRegularly sends a list request at intervals. The server answers from its cache.
// checkRegularly ends when a request fails or ctx is done.
func (p pace) checkRegularly(ctx context.Context, f feed, refused chan<- error) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(p.check - rand.N(p.check/4)):
		}
		requestCtx, cancel := context.WithTimeout(ctx, p.request)
		_, _, err := f.list(requestCtx, metav1.ListOptions{Limit: 1, ResourceVersion: "0"})
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				refused <- err
			}
			return
		}
	}
}

func expired(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }
