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

// pace has the intervals and bounds of workers.
type pace struct {
	request  time.Duration // bound of one request other than a watch
	watch    time.Duration // how long one watch lasts at most, if the server does not end it before
	ask      time.Duration // how often it is asked meanwhile whether it still takes our identity; 0: never
	settled  time.Duration // a watch that lasted so long ends a series of failures
	min, max time.Duration // pause after the first failure in a series, and after any
	renew    time.Duration // least time between two attempts to renew a token
	// authority is how often the certificate authority is read that the peer publishes.
	authority time.Duration

	// turns bounds the requests of all workers that wait for an answer together, where they go to one
	// API server; nil: nothing does.
	turns chan struct{}
}

// usual is the pace outside of tests. A watch lasts as long as the server lets it, mostly half an hour
// to an hour. An API server does not end the watches of an identity that it no longer accepts, and
// one that is gone without a word ends nothing either: one small request a minute notices both, at a
// tenth of what a new watch costs both sides.
var usual = pace{
	request: 10 * time.Second, watch: 2 * time.Hour, ask: 45 * time.Second, settled: 10 * time.Second,
	min: 500 * time.Millisecond, max: 30 * time.Second, renew: 10 * time.Second, authority: time.Hour,
}

// ownTurns is how many of all workers ask our own API server at a time. It has a queue for each client,
// mostly of some hundred requests, and refuses what does not find room in it (429): a manager that
// starts among a thousand peers lists and watches as many Secrets.
const ownTurns = 16

// own is the pace of all workers together at our own API server, whose right to say who we are nobody
// doubts.
func (p pace) own() pace {
	p.ask = 0
	p.turns = make(chan struct{}, ownTurns)
	return p
}

// turn waits until one more request may be sent, and returns what to call when it was answered. One
// without an answer holds up the others for no longer than a request may take. It fails when ctx ends
// first.
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

// backoff counts the failures of a series. The zero value has seen none.
type backoff struct{ failures int }

// next returns the pause after one more failure: twice the last one, at most max, and at random up
// to half of it less, so that many workers do not come back together.
func (b *backoff) next(p pace) time.Duration {
	d := p.max
	if b.failures < 20 { // 2^20 times anything is more than max
		d = min(p.max, p.min<<b.failures)
		b.failures++
	}
	return d - rand.N(d/2+1)
}

func (b *backoff) reset() { b.failures = 0 }

// A change is what follow found: an error, or all objects that there are, or one that changed.
type change struct {
	err    error
	full   bool
	all    []client.Object // with full
	more   bool            // with full: there are more objects than these
	object client.Object   // without full
	gone   bool            // object was deleted
}

// A feed lists and watches some objects of an API server.
type feed struct {
	list  func(ctx context.Context, o metav1.ListOptions) (all []client.Object, meta metav1.ListInterface, err error)
	watch func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
}

// maxListed bounds the objects of a feed that follow looks at. Where all is well there is one.
const maxListed = 64

// follow tells emit what a feed has and how that changes, until ctx is done. It lists, watches from
// there on, and lists again after anything that may have lost an event. While it runs, b belongs to
// it.
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

// watchOnce watches from version on and moves it along. It reports whether the next watch can begin
// there at once, because this one ended in good order and not suspiciously soon.
func (p pace) watchOnce(ctx context.Context, f feed, version *string, b *backoff, emit func(change)) bool {
	answered, err := p.turn(ctx)
	if err != nil {
		return false
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	ctx, cancel := context.WithTimeout(ctx, p.watch) // in case the server does not end it
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
	if p.ask > 0 {
		asking.Go(func() { p.keepAsking(ctx, f, refused) })
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
		case !ok: // nothing that a server of ours would send
			emit(change{err: errors.New("the watch sent something that is no object")})
			return false
		case e.Type != watch.Bookmark:
			emit(change{object: object, gone: e.Type == watch.Deleted})
		}
		*version = object.GetResourceVersion()
	}
}

// keepAsking lists once in a while, out of the server's memory, until that fails or ctx is done.
func (p pace) keepAsking(ctx context.Context, f feed, refused chan<- error) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(p.ask - rand.N(p.ask/4)):
		}
		asked, cancel := context.WithTimeout(ctx, p.request)
		_, _, err := f.list(asked, metav1.ListOptions{Limit: 1, ResourceVersion: "0"})
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
