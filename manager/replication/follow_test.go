package replication

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// A script is an API server for follow. It runs in a synctest bubble.
type script struct {
	lists, checks, watches int       // numbers of requests; checks counts lists from the server's cache
	version                string    // the resourceVersion from which the last watch began
	away                   time.Time // the server does not answer before this time
	revoked                time.Time // the server rejects our identity after this time; zero: never
	more                   bool
	watching               func(ctx context.Context, w *watch.FakeWatcher, o metav1.ListOptions)
}

func (s *script) feed() feed {
	return feed{
		list: func(_ context.Context, o metav1.ListOptions) ([]client.Object, metav1.ListInterface, error) {
			if o.ResourceVersion == "0" {
				s.checks++
			} else {
				s.lists++
			}
			if !s.revoked.IsZero() && time.Now().After(s.revoked) {
				return nil, nil, apierrors.NewUnauthorized("who are you")
			}
			list := &v1alpha1.NetworkConfigList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}
			if s.more {
				list.Continue = "more"
			}
			return nil, list, s.down()
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			s.watches++
			s.version = o.ResourceVersion
			if err := s.down(); err != nil {
				return nil, err
			}
			w := watch.NewFakeWithOptions(watch.FakeOptions{})
			go func() {
				s.watching(ctx, w, o)
				w.Stop()
			}()
			return w, nil
		},
	}
}

func (s *script) down() error {
	if time.Now().Before(s.away) {
		return errors.New("away")
	}
	return nil
}

// life is the time after which the server ends a watch.
const life = 40 * time.Minute

// untilEnd is a watch without events, which the server ends after life.
func untilEnd(ctx context.Context, _ *watch.FakeWatcher, _ metav1.ListOptions) {
	select {
	case <-ctx.Done():
	case <-time.After(life):
	}
}

// during runs follow for a time, and returns the changes that it emitted.
func (s *script) during(t *testing.T, d time.Duration) (all []change) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defaultPace.follow(ctx, s.feed(), &backoff{}, func(c change) { all = append(all, c) })
	}()
	time.Sleep(d)
	cancel()
	<-done
	return all
}

func TestIdleFollowSendsOneWatchAndOneRequestAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{watching: untilEnd}
		all := s.during(t, 2*life-time.Minute)
		if s.lists != 1 || s.watches != 2 || s.checks < 79*60/45 || s.checks > 79*60*4/3/45+1 || len(all) != 1 {
			t.Errorf("%d lists, %d watches, %d questions, %d changes in 79 minutes", s.lists, s.watches, s.checks, len(all))
		}
	})
}

// A server does not end the watch of an identity that it no longer accepts.
func TestFollowDetectsARevokedIdentityWithinAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{watching: untilEnd, revoked: time.Now().Add(10 * time.Minute)}
		all := s.during(t, 11*time.Minute)
		if len(all) < 2 || !apierrors.IsUnauthorized(all[1].err) {
			t.Errorf("a minute later: %+v", all)
		}
		s = &script{watching: untilEnd}
		if all := s.during(t, 10*time.Minute); len(all) != 1 {
			t.Errorf("nothing is revoked: %+v", all)
		}
	})
}

func TestFollowRetriesAnUnreachablePeerTwiceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{watching: untilEnd, away: time.Now().Add(time.Hour)}
		s.during(t, time.Hour)
		if s.lists < 120 || s.lists > 260 || s.watches > 0 {
			t.Errorf("%d lists, %d watches in an hour", s.lists, s.watches)
		}
		s = &script{watching: untilEnd, away: time.Now().Add(time.Hour)}
		all := s.during(t, time.Hour+31*time.Second)
		if last := all[len(all)-1]; last.err != nil || !last.full {
			t.Errorf("half a minute after it is back: %+v", last)
		}
	})
}

func TestFollowContinuesFromBookmarksAndListsAgainIfTheyHaveExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		object := func(version string) *v1alpha1.NetworkConfig {
			return &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Name: "n", ResourceVersion: version}}
		}
		s := &script{}
		s.watching = func(ctx context.Context, w *watch.FakeWatcher, o metav1.ListOptions) {
			switch s.watches {
			case 1:
				w.Add(object("11"))
				w.Action(watch.Bookmark, object("20"))
			case 2:
				w.Delete(object("21"))
			case 3:
				e := apierrors.NewResourceExpired("too old")
				w.Error(&e.ErrStatus)
				return
			}
			untilEnd(ctx, w, o)
			switch want := map[int]string{1: "10", 2: "20", 3: "21", 4: "10"}[s.watches]; {
			case want != "" && s.version != want:
				t.Errorf("watch %d began at %s, want %s", s.watches, s.version, want)
			}
		}
		all := s.during(t, 4*life-time.Minute)
		if s.lists != 2 || len(all) != 4 || !all[0].full || all[1].deleted || !all[2].deleted || !all[3].full {
			t.Errorf("%d lists, changes %+v", s.lists, all)
		}
	})
}

func TestFollowLimitsRestartsOfShortWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{watching: func(context.Context, *watch.FakeWatcher, metav1.ListOptions) {}}
		s.during(t, time.Hour)
		if s.lists+s.watches > 600 {
			t.Errorf("%d lists, %d watches in an hour", s.lists, s.watches)
		}
		s = &script{watching: untilEnd, more: true}
		if s.during(t, time.Hour); s.lists > 300 || s.watches > 0 {
			t.Errorf("with too many objects: %d lists, %d watches in an hour", s.lists, s.watches)
		}
	})
}

func TestFollowEndsAnOverdueWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &script{watching: func(ctx context.Context, _ *watch.FakeWatcher, _ metav1.ListOptions) { <-ctx.Done() }}
		s.during(t, 24*time.Hour)
		if s.watches < 9 {
			t.Errorf("%d watches in a day", s.watches)
		}
	})
}

// A thousand workers start at the same time. Their requests take turns, because an API server
// rejects more than it has room for.
func TestConcurrentRequestsToOurAPIServerAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const workers = 1000
		var mu sync.Mutex
		waiting, most, watching := 0, 0, 0
		follow := func(ctx context.Context) {
			mu.Lock()
			waiting++
			most = max(most, waiting)
			mu.Unlock()
			select {
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
			mu.Lock()
			waiting--
			mu.Unlock()
		}
		pace := defaultPace.own()
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		for i := range workers {
			s := &script{watching: untilEnd}
			f := s.feed()
			group.Go(func() {
				pace.follow(ctx, feed{
					list: func(ctx context.Context, o metav1.ListOptions) ([]client.Object, metav1.ListInterface, error) {
						follow(ctx)
						return f.list(ctx, o)
					},
					watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
						if i < ownTurns { // like a server that accepts a connection but never answers
							<-ctx.Done()
							return nil, ctx.Err()
						}
						follow(ctx)
						mu.Lock()
						watching++
						mu.Unlock()
						return f.watch(ctx, o)
					},
				}, &backoff{}, func(change) {})
			})
		}
		time.Sleep(2*workers/ownTurns*10*time.Millisecond + 2*defaultPace.request)
		cancel()
		group.Wait()
		if most > ownTurns || watching != workers-ownTurns {
			t.Errorf("%d requests at a time, %d watches; want at most %d, and %d", most, watching, ownTurns, workers-ownTurns)
		}
	})
}

func TestBackoffDoublesUpToTheMaximumAndIsRandom(t *testing.T) {
	var b backoff
	seen := map[time.Duration]bool{}
	want := defaultPace.min
	for range 1000 {
		d := b.next(defaultPace)
		if d > want || d < want/2 {
			t.Fatalf("pause %v, want at most %v and at least half of it", d, want)
		}
		seen[d] = true
		want = min(2*want, defaultPace.max)
	}
	if len(seen) < 900 {
		t.Errorf("%d different pauses of 1000", len(seen))
	}
	b.reset()
	if d := b.next(defaultPace); d > defaultPace.min {
		t.Errorf("first pause %v", d)
	}
}
