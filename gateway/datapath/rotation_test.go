package datapath_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// rotatingEnd is an end whose key rotates.
type rotatingEnd struct {
	*end
	now, next key
}

func (r *rotatingEnd) set(t testing.TB, now, next key) {
	t.Helper()
	if err := r.SetKeys(now.private, next.private); err != nil {
		t.Fatal(err)
	}
	r.now, r.next = now, next
	r.WithoutFinalizers()
}

// learn gives an end the new key of its peer.
func (e *end) learn(t testing.TB, k key) {
	t.Helper()
	if err := e.Change([]datapath.Peer{{State: e.engine.Peers()[0], Key: k.public, Endpoint: e.other.place}}, nil); err != nil {
		t.Fatal(err)
	}
	e.WithoutFinalizers()
}

// ownKey returns our public key in the session with a peer, given the peer's current key.
func (e *end) ownKey(k key) [32]byte { return e.Stats()[k.public].Own }

// steps runs actions at their times, for the duration d, while both ends send a packet every 10 ms.
// All packets must arrive.
func steps(t *testing.T, a, b *end, d time.Duration, actions map[time.Duration]func()) {
	t.Helper()
	const step = 10 * time.Millisecond
	var want []uint32
	for now := time.Duration(0); now < d; now += step {
		if f := actions[now]; f != nil {
			f()
		}
		n := uint32(now / step)
		want = append(want, n)
		a.send(t, n)
		b.send(t, n)
		time.Sleep(step)
	}
	time.Sleep(time.Second)
	for i, e := range []*end{a, b} {
		synctest.Wait()
		e.mu.Lock()
		got := slices.Clone(e.got)
		e.got = nil
		e.mu.Unlock()
		if !slices.IsSorted(got) {
			slices.Sort(got)
		}
		if !slices.Equal(got, want) {
			t.Errorf("end %d: %d of %d packets came", i, len(got), len(want))
		}
		refused := e.drops(natengine.Inbound, natengine.DropHandshakeRefused) + e.drops(natengine.Inbound, natengine.DropHandshakeKey)
		if n, what := e.allDrops(); n > refused {
			t.Errorf("end %d dropped %s", i, what)
		}
	}
}

// One side rotates its key. The other side learns the next key earlier or later, also in the
// middle of a handshake. No packet is lost.
func TestARotationLosesNoPacket(t *testing.T) {
	for _, at := range []time.Duration{time.Second, 100 * time.Second, 119990 * time.Millisecond, 121 * time.Second} {
		for _, later := range []time.Duration{0, 500 * time.Millisecond, 70 * time.Second} {
			for _, lower := range []bool{true, false} {
				t.Run(fmt.Sprint(at, later, lower), func(t *testing.T) {
					inPair(t, func(t *testing.T, _ *pair, a, b *end) {
						if !lower {
							a, b = b, a
						}
						r, next := &rotatingEnd{end: a, now: a.key}, numberedKey(7)
						steps(t, a, b, at+later+40*time.Second, map[time.Duration]func(){
							at: func() { r.set(t, a.key, next) },
							at + later + 10*time.Millisecond: func() {
								if a.ownKey(b.key) != a.key.public {
									t.Error("the session before is not of the previous key")
								}
								b.learn(t, next)
							},
							at + later + 10*time.Second: func() {
								if a.ownKey(b.key) != next.public {
									t.Error("the peer has not moved")
								}
								r.set(t, next, key{})
							},
						})
						if a.ownKey(b.key) != next.public || a.Peers() != 1 || b.Peers() != 1 {
							t.Errorf("in the end %d and %d peers of devices", a.Peers(), b.Peers())
						}
					})
				})
			}
		}
	}
}

// Both sides rotate at the same time and learn each other's next key in any order.
func TestSimultaneousRotationsOfBothSidesSucceed(t *testing.T) {
	for _, order := range [][2]time.Duration{{0, 0}, {0, 300}, {300, 0}, {0, 15000}, {15000, 0}} {
		t.Run(fmt.Sprint(order), func(t *testing.T) {
			inPair(t, func(t *testing.T, _ *pair, a, b *end) {
				ra, rb := &rotatingEnd{end: a, now: a.key}, &rotatingEnd{end: b, now: b.key}
				nextA, nextB := numberedKey(7), numberedKey(8)
				steps(t, a, b, 60*time.Second, map[time.Duration]func(){
					time.Second:                           func() { ra.set(t, a.key, nextA); rb.set(t, b.key, nextB) },
					2*time.Second + order[0]*1e6:          func() { b.learn(t, nextA) },
					2*time.Second + order[1]*1e6 + 10*1e6: func() { a.learn(t, nextB) },
					32 * time.Second:                      func() { ra.set(t, nextA, key{}) },
					33 * time.Second:                      func() { rb.set(t, nextB, key{}) },
				})
				if a.ownKey(nextB) != nextA.public || b.ownKey(nextA) != nextB.public {
					t.Error("the session is not of both new keys")
				}
			})
		})
	}
}

// A rotation starts every 20 seconds. The next key becomes current some time after the peer has
// learned it.
func TestConsecutiveRotationsLoseNoPacket(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		ra, rb := &rotatingEnd{end: a, now: a.key}, &rotatingEnd{end: b, now: b.key}
		actions := make(map[time.Duration]func())
		for i := range uint32(15) {
			at := 20 * time.Second * time.Duration(i)
			for j, r := range []*rotatingEnd{ra, rb} {
				other := []*rotatingEnd{ra, rb}[1-j]
				next := numberedKey(100 + 2*i + uint32(j))
				actions[at+time.Duration(j)*7*time.Second] = func() { r.set(t, r.now, next) }
				actions[at+time.Duration(j)*7*time.Second+300*time.Millisecond] = func() { other.learn(t, next) }
				actions[at+time.Duration(j)*7*time.Second+12*time.Second] = func() { r.set(t, next, key{}) }
			}
		}
		steps(t, a, b, 320*time.Second, actions)
	})
}

// A key that is replaced without a rotation stops working at once. A previous key makes no session
// with a peer that has learned the new one.
func TestAPreviousKeyMakesNoSession(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		next := numberedKey(7)
		b.learn(t, next) // a still has only the previous key
		before := b.Stats()[next.public].Handshake
		for range 3 {
			a.Handshake(b.key.public)
			time.Sleep(6 * time.Second)
		}
		if got := b.Stats()[next.public].Handshake; got.After(before) {
			t.Error("the previous key made a session")
		}
		if err := a.SetKeys(next.private, [32]byte{}); err != nil {
			t.Fatal(err)
		}
		a.WithoutFinalizers()
		time.Sleep(8 * time.Second)
		a.send(t, 1)
		b.send(t, 2)
		time.Sleep(time.Second)
		a.wants(t, 2)
		b.wants(t, 1)
	})
}

// A rotation is given up, and the peer is set back to the previous key.
func TestARotationCanBeReverted(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		next := numberedKey(7)
		if err := a.SetKeys(a.key.private, next.private); err != nil {
			t.Fatal(err)
		}
		a.WithoutFinalizers()
		b.learn(t, next)
		time.Sleep(time.Second)
		b.learn(t, a.key)
		time.Sleep(time.Second)
		if err := a.SetKeys(a.key.private, [32]byte{}); err != nil {
			t.Fatal(err)
		}
		a.send(t, 1)
		b.send(t, 2)
		time.Sleep(6 * time.Second)
		a.wants(t, 2)
		b.wants(t, 1)
	})
}

// The octets counted for a peer never decrease while keys change.
func TestOctetCountersOfAPeerNeverDecrease(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		next := numberedKey(7)
		r := &rotatingEnd{end: a, now: a.key}
		var last datapath.Stats
		look := func() {
			t.Helper()
			s := a.Stats()[b.key.public]
			if s.Received < last.Received || s.Sent < last.Sent {
				t.Errorf("%d and %d octets after %d and %d", s.Received, s.Sent, last.Received, last.Sent)
			}
			last = s
		}
		steps(t, a, b, 30*time.Second, map[time.Duration]func(){
			5 * time.Second:  func() { look(); r.set(t, a.key, next); look() },
			6 * time.Second:  func() { b.learn(t, next) },
			15 * time.Second: func() { look(); r.set(t, next, key{}); look() },
			29 * time.Second: look,
		})
	})
}

const wireGuardLatency, wireGuardStep = 15 * time.Millisecond, 10 * time.Millisecond

// A plain WireGuard peer can only remove its previous peer and add the new one. It loses packets
// that are in flight, and packets that arrive until its next packet has made a session: a
// responder may not use a session before the initiator does (section 5.4.3).
func TestRotationCostsAWireGuardGoPeerOneHandshake(t *testing.T) {
	rotateBesideWireGuardGo(t, false, 4*wireGuardLatency)
}

// A plain WireGuard peer that only answers starts no handshake. It also loses the packets that
// arrive until the gateway notices its silence.
func TestRotationReachesAPassiveWireGuardGoPeer(t *testing.T) {
	rotateBesideWireGuardGo(t, true, datapath.LaggardSilence+datapath.LaggardInterval+4*wireGuardLatency)
}

// rotateBesideWireGuardGo rotates the key of a gateway whose peer runs wireguard-go. The gateway
// sends a packet in each step. The peer either answers each packet or sends packets by itself.
// Packets may be lost for at most maxLoss.
func rotateBesideWireGuardGo(t *testing.T, answers bool, maxLoss time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		keys := orderedKeys(true)
		p := newPair(t, keys)
		a, b := p.ends[0], p.ends[1]
		b.Close()
		theirs := &wire{Bind: p.network.Bind(b.place.Addr()), delay: wireGuardLatency}
		a.wire.delay = wireGuardLatency
		packets := &packets{in: make(chan []byte, 10), events: make(chan tun.Event)}
		send := func(n uint32) { packets.in <- numbered(a.to, podOf(0), n, 100) }
		if answers {
			packets.answer = send
		}
		dev := device.NewDevice(packets, theirs, device.NewLogger(device.LogLevelSilent, ""))
		defer dev.Close()
		know := func(previous, public [32]byte) {
			text := fmt.Sprintf("public_key=%x\nendpoint=%s\nallowed_ip=%s\n", public, a.place, pairPlan[0].seen)
			if previous != ([32]byte{}) {
				text = fmt.Sprintf("public_key=%x\nremove=true\n", previous) + text
			}
			if err := dev.IpcSet(text); err != nil {
				t.Error(err)
			}
			datapath.WithoutFinalizers(dev.LookupPeer(public))
		}
		if err := dev.IpcSet(fmt.Sprintf("private_key=%x\nlisten_port=%d\n", keys[1].private, b.place.Port())); err != nil {
			t.Fatal(err)
		}
		know([32]byte{}, keys[0].public)
		if err := dev.Up(); err != nil {
			t.Fatal(err)
		}
		next := numberedKey(7)
		r := &rotatingEnd{end: a, now: a.key}
		const all = 4000
		for n := range uint32(all) {
			switch n {
			case 500:
				r.set(t, a.key, next)
			case 1000:
				know(a.key.public, next.public)
			case 3000:
				r.set(t, next, key{})
			}
			a.send(t, n)
			if !answers {
				send(n)
			}
			time.Sleep(wireGuardStep)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		packets.mu.Lock()
		defer packets.mu.Unlock()
		a.mu.Lock()
		defer a.mu.Unlock()
		for way, got := range map[string]int{"from": len(a.got), "to": len(packets.got)} {
			if lost := all - got; lost < 0 || lost > int(maxLoss/wireGuardStep)+1 {
				t.Errorf("%d packets %s the peer lost: want %d at most", lost, way, maxLoss/wireGuardStep+1)
			}
		}
	})
}

// A peer that answers, or has nothing to answer, gets no handshake with the next key. A silent
// peer gets such handshakes at growing intervals.
func TestOnlySilentPeersGetHandshakesWithTheNextKey(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		r, next := &rotatingEnd{end: a, now: a.key}, numberedKey(7)
		b.on = func(n uint32) { b.send(t, n) }
		r.set(t, a.key, next)
		time.Sleep(20 * time.Second)
		talk := func(d time.Duration) (handshakes int) {
			a.wire.forget()
			for range d / (10 * time.Millisecond) {
				a.send(t, 1)
				time.Sleep(10 * time.Millisecond)
			}
			synctest.Wait()
			return len(a.wire.messages(initiations))
		}
		if n := talk(30 * time.Second); n > 0 {
			t.Errorf("%d handshakes with a peer that answers", n)
		}
		b.wire.dropAll(everything)
		// Handshakes are due after 0.25, 1.25, 3.25 and 6.25 s, each up to 0.1 s later.
		if n := talk(10 * time.Second); n != 4 {
			t.Errorf("%d handshakes with a silent peer in 10 s", n)
		}
		b.wire.dropAll(nil)
		talk(time.Second)
		if n := talk(20 * time.Second); n > 0 {
			t.Errorf("%d handshakes with a peer that answers again", n)
		}
	})
}

// A gateway that was prepared during a rotation answers to the next key from its first moment,
// because a peer may know only that key.
func TestANewActiveGatewayAcceptsTheNextKeyAtOnce(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		next := numberedKey(7)
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		b.setPeers(t, datapath.Peer{State: b.engine.Peers()[0], Key: next.public, Endpoint: a.place})
		a.prepare(t, &p.network, pairPlan[0].wan6)
		if err := a.SetKeys(a.key.private, next.private); err != nil {
			t.Fatal(err)
		}
		a.setPeer(t, b.key, b.place)
		if err := a.Up(a.key.private, a.place.Port()); err != nil {
			t.Fatal(err)
		}
		a.WithoutFinalizers()
		if a.NextKey() != next.private {
			t.Error("the next key is gone")
		}
		time.Sleep(6 * time.Second) // the interval after which b starts a handshake again
		b.send(t, 1)
		time.Sleep(time.Second)
		a.wants(t, 1)
	})
}

// Data sent under the previous key, just before the peer changes to the next one, is answered only
// under the next key. The previous session must not count the missing answer as silence and start a
// handshake.
func TestUnansweredDataOfAReplacedSessionStartsNoHandshake(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		r, next := &rotatingEnd{end: a, now: a.key}, numberedKey(7)
		r.set(t, a.key, next)
		a.send(t, 1)
		time.Sleep(10 * time.Millisecond)
		b.learn(t, next)
		time.Sleep(time.Second)
		if b.wants(t, 1); a.ownKey(b.key) != next.public {
			t.Fatal("the peer has not moved")
		}
		a.wire.forget()
		time.Sleep(30 * time.Second)
		if n := len(a.wire.messages(initiations)); n > 0 {
			t.Errorf("%d initiations, and the peer has a session", n)
		}
	})
}
