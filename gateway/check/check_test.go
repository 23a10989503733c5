package check

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// socket is a Port in memory. It works inside a synctest bubble.
type socket struct {
	in     chan datagram
	out    func(b []byte, to netip.AddrPort, size int) // receives the messages that the Monitor sends
	closed chan struct{}
}

type datagram struct {
	b    []byte
	from netip.AddrPort
}

func newSocket(out func([]byte, netip.AddrPort, int)) *socket {
	return &socket{in: make(chan datagram, 100), out: out, closed: make(chan struct{})}
}

func (s *socket) Receive() ([]byte, netip.AddrPort, error) {
	select {
	case d := <-s.in:
		return d.b, d.from, nil
	case <-s.closed:
		return nil, netip.AddrPort{}, net.ErrClosed
	}
}

func (s *socket) Send(b []byte, to netip.AddrPort, size int) error {
	s.out(append([]byte(nil), b...), to, size)
	return nil
}

func (s *socket) Close() { close(s.closed) }

var quiet = slog.New(slog.DiscardHandler)

const bravo = "22222222-0000-4000-8000-000000000000"

var bravoPeer = Peer{
	ID:      bravo,
	Probe:   netip.MustParseAddrPort("10.247.0.1:12345"),
	Allowed: [2]netip.Prefix{netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.247.0.0/16")},
}

// liqo answers PINGs as a real Liqo gateway does: it decodes the JSON object with a time.Time,
// changes the type and encodes it again.
type liqo struct {
	mu     sync.Mutex
	silent bool
	delay  time.Duration
	pings  []message
	pongs  []message
	socket *socket
}

func (l *liqo) receive(b []byte, to netip.AddrPort, _ int) {
	var m struct {
		ClusterID string    `json:"clusterID"`
		MsgType   string    `json:"msgType"`
		TimeStamp time.Time `json:"timeStamp"`
	}
	if err := json.Unmarshal(b, &m); err != nil {
		panic(err)
	}
	var raw message
	json.Unmarshal(b, &raw)
	l.mu.Lock()
	defer l.mu.Unlock()
	if m.MsgType == "PONG" {
		l.pongs = append(l.pongs, raw)
		return
	}
	l.pings = append(l.pings, raw)
	if l.silent {
		return
	}
	m.MsgType = "PONG"
	answer, _ := json.Marshal(m)
	time.AfterFunc(l.delay, func() { l.socket.in <- datagram{answer, to} })
}

// pinged returns the number of received PINGs.
func (l *liqo) pinged() int { l.mu.Lock(); defer l.mu.Unlock(); return len(l.pings) }

func (l *liqo) set(silent bool) { l.mu.Lock(); l.silent = silent; l.mu.Unlock() }

// bubble runs a test with a Monitor, one peer that answers, and a simulated clock.
func bubble(t *testing.T, test func(c *Monitor, l *liqo, result func() Result)) {
	bubbleWith(t, false, test)
}

// bubbleWith is like bubble. If silent is true, the peer does not answer the first PINGs.
func bubbleWith(t *testing.T, silent bool, test func(c *Monitor, l *liqo, result func() Result)) {
	synctest.Test(t, func(t *testing.T) {
		l := &liqo{delay: 7 * time.Millisecond, silent: silent}
		l.socket = newSocket(l.receive)
		c := Start(l.socket, Options{Log: quiet})
		defer c.Close()
		c.Set([]Peer{bravoPeer})
		test(c, l, func() Result { synctest.Wait(); return c.Observe(bravo) })
	})
}

func TestCheckSendsLiqosMessageEveryTwoSeconds(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		begin := time.Now()
		time.Sleep(20*time.Second + time.Millisecond)
		synctest.Wait()
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := len(l.pings); n != 11 { // the first PING is sent at once
			t.Errorf("%d PINGs in 20 s", n)
		}
		for i, p := range l.pings {
			at, err := time.Parse(time.RFC3339Nano, p.Timestamp)
			if p.ClusterID != bravo || p.MsgType != "PING" || err != nil || !at.Equal(begin.Add(time.Duration(i)*2*time.Second)) {
				t.Errorf("%+v, %v", p, err)
			}
		}
	})
	text, _ := json.Marshal(message{"id", "PING", "t"})
	if string(text) != `{"clusterID":"id","msgType":"PING","timeStamp":"t"}` {
		t.Errorf("%s", text)
	}
}

func TestCheckStateFollowsTheAnswers(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		if r := result(); r.State != Connecting || r.RTT != 0 {
			t.Errorf("at first: %+v", r)
		}
		time.Sleep(10 * time.Millisecond)
		if r := result(); r.State != Connected {
			t.Errorf("after the first answer: %+v", r)
		}
		time.Sleep(2 * time.Second)
		if r := result(); r.State != Connected || r.RTT != 7*time.Millisecond || r.Loss != 0 {
			t.Errorf("after an answer: %+v", r)
		}
		l.set(true) // the last answer arrived at 2.007 s
		time.Sleep(9 * time.Second)
		if r := result(); r.State != Connected {
			t.Errorf("after 9 s of silence: %+v", r)
		}
		time.Sleep(2 * time.Second)
		if r := result(); r.State != Disconnected || r.RTT != 0 {
			t.Errorf("after 11 s of silence: %+v", r)
		}
		l.set(false)
		time.Sleep(2 * time.Second)
		if r := result(); r.State != Connected {
			t.Errorf("2 s after it is back: %+v", r)
		}
	})
}

func TestCheckGivesUpConnectingAfterTenSeconds(t *testing.T) {
	bubbleWith(t, true, func(c *Monitor, l *liqo, result func() Result) {
		time.Sleep(10 * time.Second)
		if r := result(); r.State != Connecting {
			t.Errorf("after 10 s: %+v", r)
		}
		time.Sleep(1100 * time.Millisecond)
		if r := result(); r.State != Disconnected || r.Loss != 1 {
			t.Errorf("after 11 s: %+v", r)
		}
	})
}

func TestCheckMeasuresLossOverOneMinute(t *testing.T) {
	bubbleWith(t, true, func(c *Monitor, l *liqo, result func() Result) {
		time.Sleep(4*time.Second + time.Millisecond) // three PINGs are unanswered; the last one is too recent to count
		if r := result(); r.Loss != 1 || r.Sent != 2 {
			t.Errorf("%+v", r)
		}
		l.set(false)
		time.Sleep(54*time.Second + 10*time.Millisecond) // 27 answered
		if r := result(); r.Sent != 30 || r.Loss != 0.1 {
			t.Errorf("%+v", r)
		}
		time.Sleep(6 * time.Second)
		if r := result(); r.Loss != 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestCheckRestartsOnlyForAChangedPeer(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		time.Sleep(3 * time.Second)
		c.Set([]Peer{bravoPeer, {ID: "other"}})
		if r := result(); r.State != Connected {
			t.Errorf("unchanged: %+v", r)
		}
		other := bravoPeer
		other.Allowed[0] = netip.MustParsePrefix("10.99.0.0/16")
		c.Set([]Peer{other})
		if r := result(); r.State != Connecting || r.Sent != 0 {
			t.Errorf("changed: %+v", r)
		}
		c.Set(nil)
		if r := result(); r != (Result{}) {
			t.Errorf("%+v for no peer", r)
		}
	})
}

// If the gateway of a connected peer moves, the peer stays connected. If there is no answer at the
// new address, it counts as lost after the usual time.
func TestCheckKeepsTheStateOfAConnectedPeerThatMoves(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		time.Sleep(2500 * time.Millisecond)
		moved := bravoPeer
		moved.Endpoint, moved.Port = "192.0.2.9", 31000
		l.set(true)
		pings := l.pinged()
		c.Set([]Peer{moved})
		if r := result(); r.State != Connected || l.pinged() != pings+1 {
			t.Errorf("at once, after %d more PINGs: %+v", l.pinged()-pings, r)
		}
		time.Sleep((threshold + 1) * interval)
		if r := result(); r.State != Disconnected {
			t.Errorf("after %v without an answer: %+v", threshold*interval, r)
		}
		moved.Endpoint = bravoPeer.Endpoint
		c.Set([]Peer{moved})
		if r := result(); r.State != Connecting || r.Sent != 0 {
			t.Errorf("moved while it was lost: %+v", r)
		}
	})
}

func TestCheckEchoesTheContentsOfAPing(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		// The source (the sender's NAPT address), the cluster ID and the clock are up to the
		// sender.
		from := netip.MustParseAddrPort("10.246.0.0:33333")
		for _, stamp := range []string{"2001-02-03T04:05:06.070000001+02:00", "2999-01-01T00:00:00Z"} {
			l.socket.in <- datagram{[]byte(`{"clusterID":"me","msgType":"PING","timeStamp":"` + stamp + `","more":1}`), from}
			synctest.Wait()
			l.mu.Lock()
			if len(l.pongs) != 1 || l.pongs[0] != (message{"me", "PONG", stamp}) {
				t.Errorf("%+v", l.pongs)
			}
			l.pongs = nil
			l.mu.Unlock()
		}
	})
}

func TestCheckIgnoresAndCountsHostileMessages(t *testing.T) {
	now := func() string { return time.Now().UTC().Format(time.RFC3339Nano) }
	for _, tc := range []struct {
		name string
		text func(l *liqo) string
		from string
		want rejection
	}{
		{"too long", func(*liqo) string { return `{"clusterID":"` + strings.Repeat("x", MaxMessage) + `"}` }, "10.247.0.1:12345", rejectOversize},
		{"grows when encoded", func(*liqo) string {
			return `{"clusterID":"` + strings.Repeat("<", 400) + `","msgType":"PING","timeStamp":"` + now() + `"}`
		}, "10.246.0.0:1", rejectOversize},
		{"no JSON", func(*liqo) string { return "\x00\x01{" }, "10.247.0.1:12345", rejectMalformed},
		{"empty", func(*liqo) string { return "" }, "10.247.0.1:12345", rejectMalformed},
		{"array", func(*liqo) string { return "[1]" }, "10.247.0.1:12345", rejectMalformed},
		{"deeply nested", func(*liqo) string { return strings.Repeat("[", MaxMessage) }, "10.247.0.1:12345", rejectMalformed},
		{"many members", func(*liqo) string {
			return `{` + strings.Repeat(`"x":1,`, 60) + `"msgType":"PING","timeStamp":"` + now() + `"}`
		}, "10.246.0.0:1", rejectMalformed},
		{"wrong type of field", func(*liqo) string { return `{"clusterID":1,"msgType":"PONG","timeStamp":"` + now() + `"}` }, "10.247.0.1:12345", rejectMalformed},
		{"invalid time", func(*liqo) string { return `{"clusterID":"` + bravo + `","msgType":"PONG","timeStamp":"noon"}` }, "10.247.0.1:12345", rejectMalformed},
		{"unknown type", func(*liqo) string {
			return `{"clusterID":"` + bravo + `","msgType":"PUNG","timeStamp":"` + now() + `"}`
		}, "10.247.0.1:12345", rejectType},
		{"PING from a pod", func(*liqo) string { return `{"clusterID":"x","msgType":"PING","timeStamp":"` + now() + `"}` }, "10.246.0.9:1", rejectSource},
		{"PING from no peer", func(*liqo) string { return `{"clusterID":"x","msgType":"PING","timeStamp":"` + now() + `"}` }, "10.99.0.0:1", rejectSource},
		{"PONG for no peer", func(*liqo) string { return `{"clusterID":"x","msgType":"PONG","timeStamp":"` + now() + `"}` }, "10.247.0.1:12345", rejectPeer},
		{"PONG from another peer", func(l *liqo) string { return l.pong(-1) }, "10.249.0.1:12345", rejectSource},
		{"PONG from a pod", func(l *liqo) string { return l.pong(-1) }, "10.246.0.9:12345", rejectSource},
		{"PONG with a time in the future", func(*liqo) string {
			return fmt.Sprintf(`{"clusterID":%q,"msgType":"PONG","timeStamp":%q}`, bravo, time.Now().Add(time.Hour).Format(time.RFC3339Nano))
		}, "10.247.0.1:12345", rejectTimestamp},
		{"PONG with a time in the past", func(*liqo) string {
			return fmt.Sprintf(`{"clusterID":%q,"msgType":"PONG","timeStamp":%q}`, bravo, time.Now().Add(-time.Hour).Format(time.RFC3339Nano))
		}, "10.247.0.1:12345", rejectTimestamp},
		{"PONG repeated", func(l *liqo) string { return l.pong(0) }, "10.247.0.1:12345", rejectTimestamp},
	} {
		bubble(t, func(c *Monitor, l *liqo, result func() Result) {
			time.Sleep(3 * time.Second)
			l.set(true)
			time.Sleep(2 * time.Second)
			before := result()
			text := tc.text(l)
			l.socket.in <- datagram{[]byte(text), netip.MustParseAddrPort(tc.from)}
			synctest.Wait()
			for r := range reasons {
				want := uint64(0)
				if rejection(r) == tc.want {
					want = 1
				}
				if got := c.rejected[r].Load(); got != want {
					t.Errorf("%s: rejected as %s: %d, want %d", tc.name, reasons[r], got, want)
				}
			}
			if after := result(); after != before {
				t.Errorf("%s: %+v became %+v", tc.name, before, after)
			}
			if l.mu.Lock(); len(l.pongs) != 0 {
				t.Errorf("%s: answered", tc.name)
			}
			l.mu.Unlock()
		})
	}
}

// pong returns the answer to the ith PING; -1 is the last one.
func (l *liqo) pong(i int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i < 0 {
		i += len(l.pings)
	}
	m := l.pings[i]
	m.MsgType = "PONG"
	b, _ := json.Marshal(m)
	return string(b)
}

func FuzzCheckMessage(f *testing.F) {
	f.Add([]byte(`{"clusterID":"`+bravo+`","msgType":"PING","timeStamp":"2026-01-01T00:00:00Z"}`), true)
	f.Add([]byte(`{"clusterID":"`+bravo+`","msgType":"PONG","timeStamp":"2026-01-01T00:00:00.000000001Z"}`), false)
	f.Fuzz(func(t *testing.T, b []byte, probe bool) {
		sent := 0
		s := newSocket(func(out []byte, _ netip.AddrPort, _ int) {
			sent++
			var m message
			if err := json.Unmarshal(out, &m); err != nil || m.MsgType != "PONG" || len(out) > MaxMessage {
				t.Errorf("sent %q, %v", out, err)
			}
		})
		c := &Monitor{port: s, o: Options{Log: quiet}, peers: map[string]*peerState{}, bySource: map[netip.Addr]*peerState{}}
		c.Set([]Peer{bravoPeer})
		from := netip.MustParseAddrPort("10.246.0.0:9")
		if probe {
			from = bravoPeer.Probe
		}
		c.message(b, from)
		rejected := uint64(0)
		for r := range c.rejected {
			rejected += c.rejected[r].Load()
		}
		if rejected+uint64(sent) != 1 {
			t.Errorf("%q: answered %d, rejected %d", b, sent, rejected)
		}
		if c.Observe(bravo).State != Connecting {
			t.Error("believed")
		}
	})
}

// Each of a thousand peers is pinged once per interval, and many are never pinged at the same time.
func TestCheckSpreadsItsPingsOverTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const peers = 1000
		var mu sync.Mutex
		at := make(map[netip.AddrPort][]time.Time)
		var all []time.Time
		c := Start(newSocket(func(_ []byte, to netip.AddrPort, _ int) {
			mu.Lock()
			defer mu.Unlock()
			at[to] = append(at[to], time.Now())
			all = append(all, time.Now())
		}), Options{Log: quiet})
		defer c.Close()
		begin := time.Now()
		c.Set(manyPeers(peers))
		stats := make(map[[32]byte]datapath.Stats)
		for _, p := range manyPeers(peers) {
			stats[p.Key] = datapath.Stats{Endpoint: p.Probe, Handshake: begin}
		}
		c.Sessions(stats, begin)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		for to, times := range at {
			if first := times[0].Sub(begin); first > time.Second/2 {
				t.Errorf("%v was pinged for the first time after %v", to, first)
			}
			for i, now := range times[1:] {
				if d := now.Sub(times[i]); d < interval/2 || i > 0 && d != interval || d > 2*interval {
					t.Fatalf("%v was pinged %v after the last time", to, d)
				}
			}
			if n := len(times); n < 9 || n > 11 {
				t.Errorf("%v was pinged %d times in 20 s", to, n)
			}
		}
		if len(at) != peers {
			t.Errorf("%d peers were pinged", len(at))
		}
		most, same := 0, 0
		for i, now := range all {
			if same++; i > 0 && now != all[i-1] {
				same = 1
			}
			most = max(most, same)
		}
		if most > burst+2*peers/slots {
			t.Errorf("%d PINGs at one moment", most)
		}
	})
}

// After any changes, additions and removals of peers, an incrementally updated Monitor must have
// the same peers as a new one that gets all of them at once. Each peer must have exactly one
// turn.
func TestIncrementalCheckChangesEqualAFullConfiguration(t *testing.T) {
	rng := rand.New(rand.NewPCG(14, 3))
	fresh := func() *Monitor {
		return &Monitor{o: Options{Log: quiet}, peers: make(map[string]*peerState), bySource: make(map[netip.Addr]*peerState)}
	}
	peerOf := func(i int) Peer {
		p := manyPeers(i + 1)[i]
		p.Port = uint16(rng.IntN(2))
		p.BaseMTU, p.MaxMTU = minAutoMTU, 1400+rng.IntN(2)
		p.Allowed[0] = netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(rng.IntN(3)*100 + i), 0, 0}), 16)
		return p
	}
	c, now := fresh(), make(map[string]Peer)
	for step := range 2000 {
		var changed []Peer
		var gone []string
		for i := range 20 {
			switch rng.IntN(10) {
			case 0:
				gone = append(gone, fmt.Sprint(i)) // there may be no peer with this number
				delete(now, fmt.Sprint(i))
			case 1:
				p := peerOf(i)
				changed, now[p.ID] = append(changed, p), p
			case 2:
				if p, is := now[fmt.Sprint(i)]; is {
					changed = append(changed, p)
				}
			}
		}
		before := maps.Clone(c.peers)
		c.Change(changed, gone)
		reference := fresh()
		reference.Set(slices.Collect(maps.Values(now)))
		if len(c.peers) != len(reference.peers) || len(c.bySource) != len(reference.bySource) {
			t.Fatalf("step %d: %d peers at %d addresses, want %d at %d", step, len(c.peers), len(c.bySource), len(reference.peers), len(reference.bySource))
		}
		inSlots := 0
		for slot, all := range c.slots {
			inSlots += len(all)
			for _, p := range all {
				if p.slot != slot || c.peers[p.ID] != p {
					t.Fatalf("step %d: peer %s in turn %d is not a peer of the Monitor", step, p.ID, slot)
				}
			}
		}
		for id, p := range c.peers {
			if p.Peer != reference.peers[id].Peer || c.bySource[p.Allowed[0].Addr()] != p {
				t.Fatalf("step %d: %+v, want %+v", step, p.Peer, reference.peers[id].Peer)
			}
			if p.path.base != p.BaseMTU || p.path.Ceiling != p.MaxMTU {
				t.Fatalf("step %d: the search of peer %s has the bounds %d and %d, want %d and %d", step, id, p.path.base, p.path.Ceiling, p.BaseMTU, p.MaxMTU)
			}
			if was := before[id]; was != nil && was != p {
				if was.BaseMTU, was.MaxMTU = p.BaseMTU, p.MaxMTU; was.Peer == p.Peer {
					t.Fatalf("step %d: peer %s has begun anew", step, id)
				}
			}
		}
		if inSlots != len(c.peers) {
			t.Fatalf("step %d: %d peers in turns of %d", step, inSlots, len(c.peers))
		}
	}
}

// A gateway that takes over sends no PING before the nodes use it.
func TestCheckSendsNoPingUntilHoldIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent atomic.Int64
		released := make(chan struct{})
		c := Start(newSocket(func([]byte, netip.AddrPort, int) { sent.Add(1) }), Options{Log: quiet, Hold: released})
		defer c.Close()
		c.Set(manyPeers(100))
		time.Sleep(3 * interval)
		synctest.Wait()
		if n := sent.Load(); n != 0 {
			t.Errorf("%d PINGs while they are held", n)
		}
		close(released)
		time.Sleep(3 * interval)
		synctest.Wait()
		if n := sent.Load(); n < 100 {
			t.Errorf("%d PINGs of 100 peers afterwards", n)
		}
	})
}

func manyPeers(n int) (peers []Peer) {
	for i := range n {
		peers = append(peers, Peer{
			ID: fmt.Sprint(i), Key: [32]byte{byte(i), byte(i >> 8), 1},
			Probe: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), 12345),
		})
	}
	return peers
}

// Four thousand peers come back at the same time, and half of the handshakes in the first twenty
// seconds get lost. The lost handshakes must be repeated at the rate of first handshakes, not at
// the rate for peers that are away for long.
func TestLostHandshakesAreRetriedSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := Start(newSocket(func([]byte, netip.AddrPort, int) {}), Options{Log: quiet})
		defer c.Close()
		peers := manyPeers(4000)
		c.Set(peers)
		stats := make(map[[32]byte]datapath.Stats)
		for _, p := range peers {
			stats[p.Key] = datapath.Stats{Endpoint: p.Probe}
		}
		rng := rand.New(rand.NewPCG(1, 2))
		dead := peers[:300] // no gateway answers for these
		back, begin := 0, time.Now()
		try := func(keys [][32]byte) {
			for _, key := range keys {
				if i := int(key[0]) | int(key[1])<<8; i >= len(dead) && (time.Since(begin) > 20*time.Second || rng.IntN(2) == 0) {
					stats[key] = datapath.Stats{Endpoint: peers[i].Probe, Handshake: time.Now()}
					back++
				}
			}
		}
		for back < len(peers)-len(dead) {
			time.Sleep(time.Second)
			synctest.Wait()
			keys, _ := c.Sessions(stats, time.Now())
			if len(keys) > fastRate+slowRate {
				t.Fatalf("%d handshakes in a second", len(keys))
			}
			if try(keys); time.Since(begin) > 10*time.Minute {
				t.Fatalf("%d are back", back)
			}
		}
		if took := time.Since(begin); took > 40*time.Second {
			t.Errorf("all are back after %v", took)
		} else {
			t.Log(took)
		}
		// Only dead peers are left now, so few handshakes are started.
		for range 120 {
			time.Sleep(time.Second)
			for key, s := range stats {
				if !s.Handshake.IsZero() {
					s.Handshake = time.Now()
					stats[key] = s
				}
			}
			keys, _ := c.Sessions(stats, time.Now())
			if d := time.Since(begin); d > 3*time.Minute && len(keys) > slowRate {
				t.Fatalf("%d handshakes in a second with peers that are dead", len(keys))
			}
		}
		synctest.Wait()
	})
}

// A peer without a session gets no PINGs, which would be lost anyway. It gets a handshake every
// five seconds. If there are many such peers, they share 20 handshakes a second, and wireguard-go
// must start no others. A peer that has a session again is pinged at once.
func TestCheckLimitsHandshakesWithAbsentPeers(t *testing.T) {
	for _, tc := range []struct {
		peers int
		pause time.Duration
		rests bool
	}{{3, 5 * time.Second, false}, {100, 5 * time.Second, false}, {1000, 50 * time.Second, true}} {
		synctest.Test(t, func(t *testing.T) {
			var sent atomic.Int64
			c := Start(newSocket(func([]byte, netip.AddrPort, int) { sent.Add(1) }), Options{Log: quiet})
			defer c.Close()
			peers := manyPeers(tc.peers + 2)
			c.Set(peers)
			here, nowhere := peers[tc.peers], peers[tc.peers+1]
			stats := make(map[[32]byte]datapath.Stats)
			for _, p := range peers {
				stats[p.Key] = datapath.Stats{Endpoint: p.Probe}
			}
			stats[nowhere.Key] = datapath.Stats{}
			begin := time.Now()
			tried, rested := make(map[[32]byte]time.Time), make(map[[32]byte]int)
			for range 300 {
				before := sent.Load()
				time.Sleep(time.Second)
				synctest.Wait()
				now := time.Now()
				if n := sent.Load() - before; now.Sub(begin) > 10*time.Second && n > 1 {
					t.Fatalf("%d PINGs in a second", n)
				}
				stats[here.Key] = datapath.Stats{Endpoint: here.Probe, Handshake: now.Add(-2 * time.Minute)}
				try, rest := c.Sessions(stats, now)
				if len(try) > fastRate || len(try) > slowRate && now.Sub(begin) > 5*time.Second {
					t.Fatalf("%d handshakes in a second", len(try))
				}
				for _, key := range try {
					if d := now.Sub(tried[key]); !tried[key].IsZero() && (d < tc.pause || d > tc.pause*2+time.Second) {
						t.Fatalf("%d peers: a handshake %v after the last", tc.peers, d)
					}
					tried[key] = now
				}
				for _, key := range rest {
					if d := now.Sub(tried[key]); rested[key] > 0 && (d < handshakePatience || d >= 5*time.Second) {
						t.Fatalf("a handshake was stopped after %v", d)
					}
					rested[key]++
				}
			}
			if len(tried) != tc.peers || !tried[here.Key].IsZero() || !tried[nowhere.Key].IsZero() {
				t.Errorf("handshakes with %d of %d peers", len(tried), tc.peers)
			}
			if tc.rests != (len(rested) == tc.peers) || !tc.rests && len(rested) != 0 {
				t.Errorf("%d of %d handshakes were stopped", len(rested), tc.peers)
			}
			if r := c.Observe(peers[0].ID); r.State != Disconnected || r.Loss != 1 || r.Sent < 29 {
				t.Errorf("%+v", r)
			}
			before := sent.Load()
			stats[peers[0].Key] = datapath.Stats{Endpoint: peers[0].Probe, Handshake: time.Now()}
			c.Sessions(stats, time.Now())
			synctest.Wait()
			if n := sent.Load() - before; n != 1 {
				t.Errorf("%d PINGs to a peer that is back", n)
			}
		})
	}
}

// Anybody can forge data under an unknown session. So such data starts a handshake only if the peer
// does not answer under our session.
func TestUnknownSessionDataStartsAHandshakeOnlyWithASilentPeer(t *testing.T) {
	bubble(t, func(c *Monitor, l *liqo, result func() Result) {
		var begun []time.Time
		c.o.Handshake = func(key [32]byte) {
			if key != bravoPeer.Key {
				t.Error("a handshake with another peer")
			}
			begun = append(begun, time.Now())
		}
		time.Sleep(500 * time.Millisecond)
		rtt := result().RTT
		c.TestSession(bravoPeer.Key)
		time.Sleep(time.Second)
		if synctest.Wait(); len(begun) != 0 {
			t.Error("a handshake, though the peer answers")
		}
		l.set(true)
		at := time.Now()
		c.TestSession(bravoPeer.Key)
		c.TestSession([32]byte{1}) // the key of no peer
		time.Sleep(time.Second)
		synctest.Wait()
		if want := []time.Time{at.Add(testPatience + rtt)}; !slices.Equal(begun, want) {
			t.Errorf("handshakes at %v; want %v", begun, want)
		}
	})
}
