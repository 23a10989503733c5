package check

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// minAutoMTU is the size that the gateway expects every path to carry, in octets.
const minAutoMTU = 1200

// bravoPath is bravoPeer with bounds for the search.
var bravoPath = func(p Peer) Peer { p.BaseMTU, p.MaxMTU = minAutoMTU, 1440; return p }(bravoPeer)

// path is a path that silently drops packets larger than limit octets, and a share of all packets
// at random.
type path struct {
	limit int
	loss  float64
	rng   *rand.Rand
}

func (p *path) passes(size int) bool { return size <= p.limit && p.rng.Float64() >= p.loss }

// drive runs a search for the duration d. It returns the time after which the size in force stayed
// at want, and the number of messages sent.
func drive(s *pathSearch, p *path, now *time.Time, d time.Duration, want int) (after time.Duration, messages int) {
	begin, since := *now, *now
	for end := now.Add(d); now.Before(end); *now = now.Add(pathLook) {
		s.evaluate(*now, 20*time.Millisecond)
		for _, probe := range s.next(*now, interval) {
			messages++
			if p.passes(probe.size) {
				s.answer(probe.at)
			}
		}
		if s.Bytes != want {
			since = now.Add(pathLook)
		}
	}
	return since.Sub(begin), messages
}

// The search ends with the largest size that the path carries and that is possible: a multiple of
// WireGuard's padding, or the ceiling.
func TestPathSearchFindsThePathMTU(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		ceiling := 1200 + rng.IntN(400)
		if rng.IntN(4) == 0 {
			ceiling = 1200 + rng.IntN(7740)
		}
		limit := 1200 + rng.IntN(ceiling+100-1200)
		want := min(limit-limit%padding, ceiling)
		if limit >= ceiling {
			want = ceiling
		}
		var s pathSearch
		now := time.Now()
		p := &path{limit, 0, rng}
		s.limit(minAutoMTU, ceiling, now)
		s.begin(now)
		after, _ := drive(&s, p, &now, 20*time.Second, want)
		if s.Bytes != want || s.State != PathSearchComplete || after > 8*time.Second {
			t.Fatalf("ceiling %d, path limit %d: %+v after %v, want %d", ceiling, limit, s.PathMTU, after, want)
		}
		if p.limit = ceiling; want < ceiling { // the path is repaired
			if after, _ := drive(&s, p, &now, time.Minute, ceiling); s.Bytes != ceiling || after > pathRaise+2*time.Second {
				t.Fatalf("ceiling %d, path took %d: %+v after %v, want all of it", ceiling, limit, s.PathMTU, after)
			}
		}
	}
}

func TestPathSearchDetectsABlackHoleWithinSeconds(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	worst := time.Duration(0)
	for range 1000 {
		var s pathSearch
		now := time.Now()
		p := &path{1440, 0, rng}
		s.limit(minAutoMTU, 1440, now)
		s.begin(now)
		drive(&s, p, &now, 10*time.Second+time.Duration(rng.IntN(16))*pathLook, 1440)
		p.limit = 1200 + rng.IntN(240)
		begin := now
		for s.Bytes > p.limit {
			drive(&s, p, &now, pathLook, 0)
			if now.Sub(begin) > 10*time.Second {
				t.Fatalf("path limit %d: %+v after ten seconds", p.limit, s.PathMTU)
			}
		}
		worst = max(worst, now.Sub(begin))
	}
	if worst > 4*time.Second {
		t.Errorf("up to %v", worst)
	}
}

// A path that loses a tenth of all packets is not mistaken for one that drops large packets.
func TestPathSearchSurvivesLoss(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	lowered := 0
	for range 200 {
		var s pathSearch
		now := time.Now()
		p := &path{1440, 0.1, rng}
		s.limit(minAutoMTU, 1440, now)
		s.begin(now)
		for range 10 { // ten minutes in total
			if drive(&s, p, &now, time.Minute, 1440); s.Bytes != 1440 {
				lowered++
			}
		}
	}
	if lowered > 10 {
		t.Errorf("%d of 2000 minutes ended with a smaller size", lowered)
	}
}

func TestPathSearchReportsThatTheBaseSizeDoesNotPass(t *testing.T) {
	var s pathSearch
	now := time.Now()
	p := &path{1000, 0, rand.New(rand.NewPCG(7, 8))}
	s.limit(minAutoMTU, 1440, now)
	s.begin(now)
	drive(&s, p, &now, 10*time.Second, 0)
	if s.State != PathError || s.Bytes != minAutoMTU {
		t.Errorf("%+v", s.PathMTU)
	}
	p.limit = 1340
	drive(&s, p, &now, 40*time.Second, 0)
	if s.State != PathSearchComplete || s.Bytes != 1328 {
		t.Errorf("afterwards %+v", s.PathMTU)
	}
	s.end()
	if drive(&s, p, &now, 40*time.Second, 0); s.Bytes != 1328 || s.State != PathDisabled {
		t.Errorf("without a peer %+v", s.PathMTU)
	}
}

// If the base size is also the ceiling, no larger size can be probed. When the path is repaired,
// the search must leave the state PathError nevertheless.
func TestPathSearchRecoversFromAnErrorAtTheBaseSize(t *testing.T) {
	var s pathSearch
	now := time.Now()
	p := &path{1000, 0, rand.New(rand.NewPCG(1, 2))}
	s.limit(1200, 1200, now)
	s.begin(now)
	drive(&s, p, &now, 20*time.Second, 1200)
	if s.State != PathError {
		t.Fatalf("%+v, want %s", s.PathMTU, PathError)
	}
	p.limit = 1500
	drive(&s, p, &now, pathRetry+2*time.Second, 1200)
	if s.State != PathSearchComplete || s.Bytes != 1200 {
		t.Errorf("%+v after it has healed, want %s", s.PathMTU, PathSearchComplete)
	}
}

func TestPathSearchDoesNotMistakeAnOutageForABlackHole(t *testing.T) {
	var s pathSearch
	now := time.Now()
	p := &path{1440, 0, rand.New(rand.NewPCG(9, 10))}
	s.limit(minAutoMTU, 1440, now)
	s.begin(now)
	drive(&s, p, &now, 10*time.Second, 0)
	p.limit = -1
	for range 20 {
		if drive(&s, p, &now, 500*time.Millisecond, 0); s.Bytes != 1440 {
			t.Fatalf("%+v", s.PathMTU)
		}
	}
}

// A confirmation takes one message of the size in force and one small message per interval. A peer
// that does not answer gets none.
func TestPathSearchSendsFewProbes(t *testing.T) {
	var s pathSearch
	now := time.Now()
	p := &path{1440, 0, rand.New(rand.NewPCG(11, 12))}
	s.limit(minAutoMTU, 1440, now)
	if _, n := drive(&s, p, &now, time.Minute, 0); n != 0 {
		t.Errorf("%d messages to a peer that does not answer", n)
	}
	s.begin(now)
	if _, n := drive(&s, p, &now, 10*time.Second, 0); n > 30 {
		t.Errorf("%d messages at the beginning", n)
	}
	if _, n := drive(&s, p, &now, time.Minute, 0); n < 50 || n > 62 {
		t.Errorf("%d messages in a minute", n)
	}
}

// A Liqo gateway answers the probes, because they are PINGs. An Isthmus gateway answers them, too,
// and the probes must not exceed its rate limit for PINGs.
func TestPathSearchWorksWithLiqoAndIsthmus(t *testing.T) {
	for _, peer := range []string{"Liqo", "Isthmus"} {
		t.Run(peer, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				limit, changes := 1340, 0
				l := &liqo{delay: 7 * time.Millisecond}
				receive := func(b []byte) { l.receive(b, bravoPeer.Probe, 0) }
				if peer == "Isthmus" {
					us := Peer{ID: "a", Probe: netip.MustParseAddrPort("10.71.0.1:12345"), Allowed: [2]netip.Prefix{netip.MustParsePrefix("10.70.0.0/16"), netip.MustParsePrefix("10.71.0.0/16")}}
					there := newSocket(func(b []byte, to netip.AddrPort, _ int) {
						if to.Addr() == netip.MustParseAddr("10.70.0.0") {
							l.socket.in <- datagram{b, bravoPeer.Probe}
						}
					})
					// The limiters simulate the rate limit of a datapath.Port for each sender.
					arrived := make(map[netip.AddrPort]*rate.Limiter)
					limit := func(from netip.AddrPort) {
						if arrived[from] == nil {
							arrived[from] = rate.NewLimiter(datapath.MessageRate, datapath.MessageBurst)
						}
						if !arrived[from].Allow() {
							t.Errorf("%v exceeds the rate limit of a gateway", from)
						}
					}
					other := Start(there, Options{Log: quiet})
					defer other.Close()
					other.Set([]Peer{us})
					receive = func(b []byte) {
						limit(netip.MustParseAddrPort("10.70.0.0:12345"))
						there.in <- datagram{b, netip.MustParseAddrPort("10.70.0.0:12345")}
					}
				}
				l.socket = newSocket(func(b []byte, _ netip.AddrPort, size int) {
					mu.Lock()
					defer mu.Unlock()
					if size <= limit {
						receive(b)
					}
				})
				c := Start(l.socket, Options{Log: quiet, PathChanged: func() { changes++ }})
				defer c.Close()
				c.Set([]Peer{bravoPath})
				wants := func(bytes int, state PathState) {
					t.Helper()
					synctest.Wait()
					r := c.Observe(bravo)
					if r.Path.Bytes != bytes || r.Path.State != state || r.Loss != 0 || r.State != Connected {
						t.Errorf("%+v, want %d %s", r, bytes, state)
					}
					if n := c.NarrowPaths(); (bytes == 1440) != (len(n) == 0) || bytes != 1440 && n[bravo] != bytes {
						t.Errorf("narrow paths %v", n)
					}
				}
				time.Sleep(10 * time.Second)
				wants(1328, PathSearchComplete)
				mu.Lock()
				limit = 1500
				mu.Unlock()
				time.Sleep(pathRaise)
				wants(1440, PathSearchComplete)
				mu.Lock()
				limit = 1250
				mu.Unlock()
				time.Sleep(10 * time.Second)
				wants(1248, PathSearchComplete)
				if changes < 3 {
					t.Errorf("PathChanged was called %d times", changes)
				}
				for reason, n := range c.Rejected() {
					if n != 0 {
						t.Errorf("%d messages were rejected: %s", n, reason)
					}
				}
			})
		})
	}
}

// An answer to a probe of the path MTU counts like an answer to any other PING. So the peer
// counts as lost only at the usual time after its last answer of either kind.
func TestPathProbeAnswersKeepThePeerConnected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &liqo{delay: 7 * time.Millisecond}
		deaf := false
		var mu sync.Mutex
		l.socket = newSocket(func(b []byte, to netip.AddrPort, size int) {
			mu.Lock()
			defer mu.Unlock()
			if size > 0 || !deaf {
				l.receive(b, to, size)
			}
		})
		c := Start(l.socket, Options{Log: quiet, PathChanged: func() {}})
		defer c.Close()
		c.Set([]Peer{bravoPath})
		state := func() State { synctest.Wait(); return c.Observe(bravo).State }
		time.Sleep(10 * time.Second)
		mu.Lock()
		deaf = true
		mu.Unlock()
		if time.Sleep(time.Minute); state() != Connected {
			t.Errorf("%s although probes are answered", state())
		}
		l.set(true)
		if time.Sleep((threshold - 2) * interval); state() != Connected {
			t.Errorf("%s so soon after the last answer", state())
		}
		if time.Sleep(4 * time.Second); state() != Disconnected {
			t.Errorf("%s long after the last answer", state())
		}
	})
}
