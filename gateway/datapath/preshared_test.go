package datapath_test

import (
	"bytes"
	"crypto/ecdh"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/natengine"
)

// preshare sets an end's preshared keys for the other end.
func (e *end) preshare(t testing.TB, keys datapath.PresharedKeys) {
	t.Helper()
	if err := e.Change([]datapath.Peer{{State: e.engine.Peers()[0], Key: e.other.key.public, Preshared: keys}}, nil); err != nil {
		t.Fatal(err)
	}
}

// preshared reports whether the session of an end was made with the current preshared key.
func (e *end) preshared() bool { return e.Stats()[e.other.key.public].Preshared }

// Two gateways change their preshared key up to a minute apart, under traffic in both directions.
// No packet is lost, and at most one handshake fails. At the end, the session has the new key, and
// a handshake with the previous key fails.
func TestAPresharedKeyChangesWithoutLoss(t *testing.T) {
	none, first, second := [32]byte{}, [32]byte{1}, [32]byte{2}
	for _, change := range [][2][32]byte{{none, first}, {first, second}, {first, none}} {
		previous, key := change[0], change[1]
		for _, later := range []time.Duration{-45 * time.Second, -4 * time.Second, 0, 4 * time.Second, 45 * time.Second} {
			for _, at := range []time.Duration{time.Second, 100 * time.Second, 119 * time.Second, 121 * time.Second} {
				t.Run(fmt.Sprintf("from %x to %x, second end %v later, at %v", previous[:1], key[:1], later, at), func(t *testing.T) {
					inPair(t, func(t *testing.T, _ *pair, a, b *end) {
						if previous != none {
							for _, e := range []*end{a, b} {
								e.preshare(t, datapath.PresharedKeys{Key: previous})
							}
							time.Sleep(130 * time.Second)
							a.Handshake(b.key.public)
							time.Sleep(time.Second)
						}
						changes(t, a, b, datapath.PresharedKeys{Key: key, Previous: previous, Changing: true}, at, later)
					})
				})
			}
		}
	}
}

func changes(t *testing.T, a, b *end, keys datapath.PresharedKeys, at, later time.Duration) {
	const step = 100 * time.Millisecond
	atA, atB := at+max(0, -later), at+max(0, later)
	var want []uint32
	for now := time.Duration(0); now < 8*time.Minute; now += step {
		if now == atA {
			a.preshare(t, keys)
		}
		if now == atB {
			b.preshare(t, keys)
		}
		n := uint32(now / step)
		want = append(want, n)
		a.send(t, n)
		b.send(t, n)
		time.Sleep(step)
	}
	time.Sleep(time.Second)
	a.wants(t, want...)
	b.wants(t, want...)
	for i, e := range []*end{a, b} {
		if got, want := e.preshared(), keys.Key != [32]byte{}; got != want {
			t.Errorf("the session of end %d is reported with the preshared key: %v, want %v", i, got, want)
		}
		refused := e.drops(natengine.Inbound, natengine.DropHandshakeRefused)
		if n, what := e.allDrops(); n > refused || refused > 1 {
			t.Errorf("end %d dropped %s: want one handshake at most", i, what)
		}
	}
	before := a.session()
	b.preshare(t, datapath.PresharedKeys{Key: keys.Previous})
	a.Handshake(b.key.public)
	time.Sleep(4 * time.Second)
	if synctest.Wait(); a.session() != before {
		t.Error("a handshake with the previous key made a session")
	}
}

// Two managers make one key exchange after the other, late, at random times, and with crashes
// between storing and publishing. Packets pass in both directions. None is lost, and at the end
// the session has the last key.
func TestPresharedKeyExchangesLoseNoPacket(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inPair(t, func(t *testing.T, _ *pair, a, b *end) { exchanges(t, a, b, rand.New(rand.NewPCG(28, seed))) })
		})
	}
}

// exchanging is an end with its manager: the state that the manager stores, and the data that it
// has published and read.
type exchanging struct {
	*end
	id              postquantum.Identity
	state           postquantum.State
	published, read postquantum.Fields
}

// step makes the manager do one step of the exchange. The gateway gets the resulting keys even if
// publish is false.
func (x *exchanging) step(t *testing.T, other *exchanging, publish bool) postquantum.Progress {
	next, progress, err := x.state.Step(x.id, other.id, x.read, x.published)
	if err != nil {
		t.Fatal(err)
	}
	if x.state = next; publish {
		x.published = next.Fields()
	}
	x.preshare(t, datapath.PresharedKeys{Key: next.Use.Secret, Previous: next.Previous.Secret, Changing: true})
	return progress
}

func exchanges(t *testing.T, a, b *end, rng *rand.Rand) {
	const step, long, last = 100 * time.Millisecond, 25 * time.Minute, 10 * time.Minute
	sides := []*exchanging{{end: a, id: postquantum.Identity{ClusterID: "a"}}, {end: b, id: postquantum.Identity{ClusterID: "b"}}}
	var want []uint32
	var made int
	var changed time.Duration
	for now := time.Duration(0); now < long; now += step {
		x, other := sides[0], sides[1]
		if rng.IntN(2) == 0 {
			x, other = other, x
		}
		crashing := now < long-last
		switch n := rng.IntN(300); {
		case n < 4:
			x.read = other.published
		case n < 8:
			was := x.state.Use
			if x.step(t, other, n > 5 || !crashing); x.state.Use != was {
				made, changed = made+1, now
			}
		case n == 8 && crashing && rng.IntN(3) == 0:
			x.id.Keys = [][32]byte{{byte(rng.IntN(256))}} // as after a change of the WireGuard key
		}
		number := uint32(now / step)
		want = append(want, number)
		a.send(t, number)
		b.send(t, number)
		time.Sleep(step)
	}
	time.Sleep(time.Second)
	a.wants(t, want...)
	b.wants(t, want...)
	if sides[0].state.Use != sides[1].state.Use || made < 2 || !a.preshared() || !b.preshared() {
		t.Errorf("%d changes of keys, the last one %v before the end; same key %v, sessions with it %v and %v", made, long-changed, sides[0].state.Use == sides[1].state.Use, a.preshared(), b.preshared())
	}
}

// The side that gets a new preshared key first receives one more response with the previous key.
// Once both sides have the new key, two handshakes are enough to use it, even if the two sides
// start them in turn.
func TestAlternatingHandshakesAdoptANewPresharedKey(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		keys := shareFirst(t, a, b)
		a.preshare(t, keys)
		a.Handshake(b.key.public)
		time.Sleep(6 * time.Second)
		b.preshare(t, keys)
		for _, e := range []*end{b, a} {
			e.Handshake(e.other.key.public)
			time.Sleep(6 * time.Second)
		}
		if synctest.Wait(); !a.preshared() || !b.preshared() {
			t.Errorf("the session has the new preshared key: %v and %v", a.preshared(), b.preshared())
		}
	})
}

// The new key is also used if both sides always start handshakes at the same moment.
func TestSimultaneousHandshakesAdoptANewPresharedKey(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		keys := shareFirst(t, a, b)
		for _, e := range []*end{a, b} {
			e.preshare(t, keys)
			e.wire.mu.Lock()
			e.wire.delay = 20 * time.Millisecond
			e.wire.mu.Unlock()
		}
		for range 2 {
			a.Handshake(b.key.public)
			b.Handshake(a.key.public)
			time.Sleep(6 * time.Second)
		}
		if synctest.Wait(); !a.preshared() || !b.preshared() {
			t.Errorf("the session has the new preshared key: %v and %v", a.preshared(), b.preshared())
		}
	})
}

// shareFirst sets a preshared key at both ends and makes a session with it. It returns the keys
// for a change to a second one.
func shareFirst(t *testing.T, a, b *end) datapath.PresharedKeys {
	t.Helper()
	first, second := [32]byte{1}, [32]byte{2}
	for _, e := range []*end{a, b} {
		e.preshare(t, datapath.PresharedKeys{Key: first})
	}
	time.Sleep(6 * time.Second)
	a.Handshake(b.key.public)
	time.Sleep(6 * time.Second)
	if synctest.Wait(); !a.preshared() || !b.preshared() {
		t.Fatal("there is no session with the first preshared key")
	}
	return datapath.PresharedKeys{Key: second, Previous: first, Changing: true}
}

// If only one side has the preshared key, no new session is made, and the existing session is not
// reported as protected.
func TestPresharedKeyOfOnlyOneSideMakesNoSession(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		before := a.session()
		a.preshare(t, datapath.PresharedKeys{Key: [32]byte{1}})
		time.Sleep(10 * time.Second)
		a.Handshake(b.key.public)
		time.Sleep(4 * time.Second)
		if synctest.Wait(); a.session() != before {
			t.Error("there is a session")
		}
		if a.preshared() || b.preshared() {
			t.Error("a session without preshared key is reported with one")
		}
	})
}

// A session made before the preshared key was set is not reported as protected. The next session
// is.
func TestASessionReportsItsPresharedKey(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		for _, e := range []*end{a, b} {
			e.preshare(t, datapath.PresharedKeys{Key: [32]byte{1}})
		}
		if a.preshared() || b.preshared() {
			t.Fatal("the earlier session is reported with the preshared key")
		}
		time.Sleep(10 * time.Second)
		a.Handshake(b.key.public)
		time.Sleep(time.Second)
		if synctest.Wait(); !a.preshared() || !b.preshared() {
			t.Error("the session is not reported with the preshared key")
		}
	})
}

// A quantum attacker records all messages between two sides and can compute all X25519 private
// keys. With these keys the attacker decrypts every message of a session without a preshared key,
// and no message of a session with one. The gateway's status shows which sessions have one.
// TestPresharedKeysAreExchangedAndUsed in test/fleet checks this for a whole peering.
func TestQuantumAttackerDecryptsNoSessionWithAPresharedKey(t *testing.T) {
	for _, agreed := range []bool{false, true} {
		for _, changing := range []bool{false, true} {
			t.Run(fmt.Sprintf("preshared key %v, changing %v", agreed, changing), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { recorded(t, agreed, changing) })
			})
		}
	}
}

// agreedUpon returns the key that a complete exchange between two sides yields.
func agreedUpon(t *testing.T, keys ...[32]byte) [32]byte {
	t.Helper()
	var ids [2]postquantum.Identity
	var states [2]postquantum.State
	for i, key := range keys {
		ids[i] = postquantum.Identity{ClusterID: fmt.Sprint(i), Keys: [][32]byte{key}}
	}
	for i := range 4 {
		me, other := i%2, 1-i%2
		next, _, err := states[me].Step(ids[me], ids[other], states[other].Fields(), states[me].Fields())
		if err != nil {
			t.Fatal(err)
		}
		states[me] = next
	}
	if key := states[0].Use; key != states[1].Use || key == (postquantum.Key{}) {
		t.Fatal("the two sides have not agreed on a key")
	}
	return states[0].Use.Secret
}

func recorded(t *testing.T, agreed, changing bool) {
	p := newPair(t, orderedKeys(true))
	a := p.ends[0]
	_ = p.ends[1].Close()
	static, err := ecdh.X25519().NewPrivateKey(a.key.private[:])
	if err != nil {
		t.Fatal(err)
	}
	far, there := noise.NewKey(), p.stranger(t, "192.0.2.7")
	public := [32]byte(far.PublicKey().Bytes())
	var psk [32]byte
	if agreed {
		psk = agreedUpon(t, a.key.public, public)
	}
	a.setPeers(t, datapath.Peer{
		State: a.engine.Peers()[0], Key: public, Endpoint: netip.MustParseAddrPort("192.0.2.7:9999"),
		Preshared: datapath.PresharedKeys{Key: psk, Changing: changing},
	})
	time.Sleep(2 * time.Second)

	initiation, h := noise.Initiate(far, static.PublicKey(), time.Now())
	h.Preshared = psk
	a.sendFrom(t, there, initiation)
	time.Sleep(time.Second)
	answers := a.wire.messages(func(m []byte) bool { return m[0] == noise.ResponseType })
	if len(answers) != 1 {
		t.Fatalf("%d responses: want 1", len(answers))
	}
	session, err := h.Finish(answers[0].b)
	if err != nil {
		t.Fatal(err)
	}
	const packets = 20
	var capture [][]byte
	for n := range uint32(packets) {
		m := session.SealPadded(numbered(podOf(1), podOf(0), n, 100))
		capture = append(capture, append([]byte(nil), m...))
		a.sendFrom(t, there, m)
		a.send(t, n)
		time.Sleep(time.Millisecond)
	}
	if a.wants(t, upTo(packets)...); t.Failed() {
		return
	}
	for _, m := range a.wire.messages(data) {
		if _, err := session.Open(m.b); err != nil {
			t.Fatalf("the peer itself cannot open a message: %v", err)
		}
		capture = append(capture, m.b)
	}
	if len(capture) != 2*packets {
		t.Fatalf("%d messages were recorded: want %d", len(capture), 2*packets)
	}

	attacker := noise.Attacker{InitiatorKey: far, EphemeralKey: h.Ephemeral(), ResponderKey: static, Initiation: initiation, Response: answers[0].b}
	keys, certain := attacker.Keys()
	opened := 0
	for _, m := range capture {
		if _, err := keys.Open(m); err == nil {
			opened++
		}
	}
	safe, want := a.Stats()[public].Preshared, len(capture)
	if safe {
		want = 0
	}
	if safe != agreed || opened != want || certain == safe {
		t.Errorf("the attacker opens %d of %d messages, certain %v; the session is reported with a preshared key: %v", opened, len(capture), certain, safe)
	}
}

func upTo(n uint32) (all []uint32) {
	for i := range n {
		all = append(all, i)
	}
	return all
}

func TestPresharedKeysAreNotPrinted(t *testing.T) {
	keys := datapath.PresharedKeys{Key: [32]byte{211, 212}, Previous: [32]byte{213}, Changing: true}
	var out bytes.Buffer
	fmt.Fprintf(&out, "%v %+v %#v %v %+v", keys, keys, keys, []datapath.PresharedKeys{keys}, datapath.Peer{Preshared: keys})
	noTime := &slog.HandlerOptions{ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{} // the digits of the time could look like those of a key
		}
		return a
	}}
	slog.New(slog.NewJSONHandler(&out, noTime)).Info("peer", "preshared", keys)
	slog.New(slog.NewTextHandler(&out, noTime)).Info("peer", "preshared", keys)
	if s := out.String(); strings.Contains(s, "211") || strings.Contains(s, "0xd3") || strings.Count(s, "(preshared keys)") != 7 {
		t.Errorf("preshared keys are printed: %s", s)
	}
}
