package datapath_test

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// The constants of the WireGuard paper ("WireGuard: Next Generation Kernel Network Tunnel", NDSS
// 2017, revision of 2020), section 6. They are copied from the paper and not from wireguard-go.
const (
	rekeyAfterMessages  = 1 << 60             // 2^60
	rejectAfterMessages = 1<<64 - 1<<13 - 1   // 2^64 - 2^13 - 1
	rekeyAfterTime      = 120 * time.Second   // section 6.1
	rejectAfterTime     = 180 * time.Second   // section 6.1
	rekeyAttemptTime    = 90 * time.Second    // section 6.4
	rekeyTimeout        = 5 * time.Second     // section 6.4
	keepaliveTimeout    = 10 * time.Second    // section 6.5
	mostJitter          = time.Second/3 + 1e6 // section 6.1, in whole milliseconds
)

// wantMessages fails the test unless an end has sent messages of a kind exactly at the given times
// after begin, to the millisecond.
func wantMessages(t *testing.T, e *end, what string, kind func([]byte) bool, begin time.Time, at ...time.Duration) {
	t.Helper()
	synctest.Wait()
	var have []time.Duration
	for _, m := range e.wire.messages(kind) {
		have = append(have, m.at.Sub(begin))
	}
	ok := len(have) == len(at)
	for i := range have {
		ok = ok && have[i] >= at[i] && have[i] < at[i]+time.Millisecond
	}
	if !ok {
		t.Errorf("%s at %v: want %v", what, have, at)
	}
}

// sleepUntil sleeps until d has passed since begin.
func sleepUntil(begin time.Time, d time.Duration) { time.Sleep(time.Until(begin.Add(d))) }

func TestAPassiveKeepaliveAnswersDataAfterTenSeconds(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		time.Sleep(20 * time.Second) // let the timers of the handshake end
		b.wire.forget()
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(60 * time.Second)
		wantMessages(t, b, "keepalives of a receiver", keepalives, begin, keepaliveTimeout)
		wantMessages(t, a, "handshakes", initiations, begin)
		wantMessages(t, b, "handshakes", initiations, begin)
		b.wants(t, 1)
	})
}

func TestDataReplacesAKeepalive(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(5 * time.Second)
		b.send(t, 2)
		time.Sleep(60 * time.Second)
		wantMessages(t, b, "keepalives of b", keepalives, begin)
		wantMessages(t, a, "keepalives of a", keepalives, begin, 5*time.Second+keepaliveTimeout)
	})
}

func TestFurtherDataIsAnsweredByASecondKeepalive(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(3 * time.Second)
		a.send(t, 2)
		time.Sleep(60 * time.Second)
		wantMessages(t, b, "keepalives", keepalives, begin, keepaliveTimeout, 2*keepaliveTimeout)
	})
}

func TestAKeepaliveIsNotAnswered(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := time.Now()
		a.Keepalive(b.key.public)
		time.Sleep(60 * time.Second)
		wantMessages(t, b, "messages", everything, begin)
	})
}

func TestTheInitiatorRekeysWhenItSendsAfter120Seconds(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := datapath.Created(a.session())
		for _, at := range []int{119, 120, 121} {
			sleepUntil(begin, time.Duration(at)*time.Second)
			a.send(t, uint32(at))
			synctest.Wait()
			b.send(t, uint32(at)) // so that the age of the session is a's only reason to rekey
			synctest.Wait()
		}
		old := a.session()
		time.Sleep(time.Second)
		wantMessages(t, a, "initiations", initiations, begin, 121*time.Second)
		wantMessages(t, b, "initiations", initiations, begin)
		a.wants(t, 119, 120, 121)
		b.wants(t, 119, 120, 121)
		if !datapath.Initiator(a.session()) || datapath.Initiator(b.session()) || old == nil {
			t.Error("the roles have changed")
		}
	})
}

func TestTheResponderNeverRekeysByTime(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := time.Now()
		time.Sleep(rekeyAfterTime + time.Second)
		for n := range uint32(8) { // a does not send anything until it must answer
			b.send(t, n)
			time.Sleep(time.Second)
		}
		wantMessages(t, b, "initiations", initiations, begin)
		wantMessages(t, a, "initiations", initiations, begin)
	})
}

func TestAReceivingInitiatorRekeysOnceAfter165Seconds(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := datapath.Created(a.session())
		sleepUntil(begin, rejectAfterTime-keepaliveTimeout-rekeyTimeout)
		b.send(t, 1)
		sleepUntil(begin, 166*time.Second)
		wantMessages(t, a, "initiations at 165 s", initiations, begin)
		a.wire.dropAll(initiations)
		b.send(t, 2)
		synctest.Wait()
		wantMessages(t, a, "initiations", initiations, begin, 166*time.Second)
		a.Rest(b.key.public) // no repetition of the initiation
		for n := range uint32(7) {
			time.Sleep(time.Second)
			b.send(t, n)
		}
		wantMessages(t, a, "initiations", initiations, begin, 166*time.Second)
	})
}

func TestARekeyHappensBeforeTheNoncesRunOut(t *testing.T) {
	for _, role := range []string{"initiator", "responder"} {
		t.Run(role, func(t *testing.T) {
			inPair(t, func(t *testing.T, _ *pair, a, b *end) {
				if role == "responder" {
					a, b = b, a
				}
				time.Sleep(2 * rekeyTimeout) // long enough after the last handshake
				datapath.SetNonce(a.session(), rekeyAfterMessages-1)
				begin := time.Now()
				a.send(t, 1) // uses the nonce 2^60 - 1
				wantMessages(t, a, "initiations", initiations, begin)
				a.send(t, 2)
				wantMessages(t, a, "initiations", initiations, begin, 0)
				b.wants(t, 1, 2)
			})
		})
	}
}

func TestNothingIsSealedWithTheLastNonces(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		time.Sleep(2 * rekeyTimeout)
		old := a.session()
		datapath.SetNonce(old, rejectAfterMessages-2)
		a.send(t, 1, 2, 3, 4, 5)
		time.Sleep(time.Second)
		if a.session() == old {
			t.Error("no other session")
		}
		b.wants(t, 1, 2, 3, 4, 5)
		if n, what := a.allDrops(); n != 0 {
			t.Errorf("dropped:%s", what)
		}
		a.Keepalive(b.key.public) // the device uses the same counter
		synctest.Wait()
		under := map[string][]uint64{}
		for _, m := range a.wire.messages(anyData) {
			under[string(m.b[4:8])] = append(under[string(m.b[4:8])], counter(m.b))
		}
		for index, list := range under {
			for _, c := range list {
				if c >= rejectAfterMessages {
					t.Errorf("nonce %d under index %x: want less than %d", c, index, uint64(rejectAfterMessages))
				}
			}
		}
		if len(under) != 2 {
			t.Errorf("messages under %d sessions: want 2", len(under))
		}
	})
}

// Answers are sent to the source of the last message. So the device drops a
// message if no gateway of a peer can be at its source address. The message does not change the
// peer's endpoint, regardless of its content.
func TestMessagesFromRefusedSourcesAreDropped(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		s := p.stranger(t, "192.0.2.9")
		before := b.Stats()
		b.SetSources(func(addr netip.Addr) bool { return addr != netip.MustParseAddr("192.0.2.9") })
		b.sendFrom(t, s, datapath.SealWith(a.session(), 100, numbered(b.to, podOf(1), 7, 100)))
		b.wants(t)
		if n := b.drops(natengine.Inbound, natengine.DropTunnelSource); n != 1 {
			t.Errorf("%d counted: want 1", n)
		}
		for key, stats := range b.Stats() {
			if stats.Endpoint != before[key].Endpoint {
				t.Errorf("the peer is at %v, and was at %v", stats.Endpoint, before[key].Endpoint)
			}
		}
		b.SetSources(func(netip.Addr) bool { return true }) // the cached result must no longer be used
		b.sendFrom(t, s, datapath.SealWith(a.session(), 101, numbered(b.to, podOf(1), 8, 100)))
		b.wants(t, 8)
	})
}

func TestNothingIsAcceptedWithTheLastNonces(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		s := p.stranger(t, "192.0.2.9")
		packet := numbered(b.to, podOf(1), 7, 100)
		b.sendFrom(t, s, datapath.SealWith(a.session(), rejectAfterMessages-1, packet))
		b.wants(t, 7)
		for _, n := range []uint64{rejectAfterMessages, 1<<64 - 1} {
			b.sendFrom(t, s, datapath.SealWith(a.session(), n, packet))
		}
		b.wants(t)
		if n := b.drops(natengine.Inbound, natengine.DropTunnelReplay); n != 2 {
			t.Errorf("%d counted as replayed: want 2", n)
		}
	})
}

func TestNothingIsSealedOrAcceptedAfter180Seconds(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		begin := datapath.Created(b.session())
		a.wire.dropAll(initiations)
		b.wire.dropAll(initiations)
		sleepUntil(begin, rejectAfterTime-time.Microsecond)
		b.send(t, 1)
		synctest.Wait()
		a.wants(t, 1)
		late := datapath.SealWith(b.session(), 1000, numbered(a.to, podOf(0), 2, 100))
		sleepUntil(datapath.Created(a.session()), rejectAfterTime)
		a.sendFrom(t, p.stranger(t, "192.0.2.9"), late)
		a.wants(t)
		if n := a.drops(natengine.Inbound, natengine.DropTunnelSession); n != 1 {
			t.Errorf("%d counted for a session that has ended: want 1", n)
		}
		b.wire.forget()
		b.send(t, 3)
		wantMessages(t, b, "data", anyData, begin)
		wantMessages(t, b, "initiations", initiations, begin, rejectAfterTime)
		a.wire.dropAll(nil)
		b.wire.dropAll(nil)
		time.Sleep(rekeyTimeout + mostJitter)
		a.wants(t, 3)
	})
}

func TestAHandshakeStartsAfter15SecondsWithoutAnAnswer(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		time.Sleep(keepaliveTimeout)
		b.wire.dropAll(everything)
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(7 * time.Second)
		a.send(t, 2) // the time counts from the first packet
		time.Sleep(keepaliveTimeout + rekeyTimeout + mostJitter - 7*time.Second)
		synctest.Wait()
		list := a.wire.messages(initiations)
		if len(list) != 1 {
			t.Fatalf("%d initiations: want 1", len(list))
		}
		if at := list[0].at.Sub(begin); at < keepaliveTimeout+rekeyTimeout || at > keepaliveTimeout+rekeyTimeout+mostJitter {
			t.Errorf("an initiation at %v: want 15 s and at most a third of a second", at)
		}
	})
}

func TestNoHandshakeBeginsWhileThePeerAnswers(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		begin := time.Now()
		for n := range uint32(100) {
			a.send(t, n) // b answers with keepalives
			time.Sleep(time.Second)
		}
		wantMessages(t, a, "initiations", initiations, begin)
		wantMessages(t, b, "initiations", initiations, begin)
	})
}

func TestInitiationsAreRepeatedEveryFiveSecondsFor90Seconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newPair(t, orderedKeys(true)).ends[0]
		a.wire.dropAll(everything)
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		list := a.wire.messages(initiations)
		for i, m := range list {
			if i == 0 {
				if m.at != begin {
					t.Errorf("the first initiation after %v: want it at once", m.at.Sub(begin))
				}
				continue
			}
			if d := m.at.Sub(list[i-1].at); d < rekeyTimeout || d > rekeyTimeout+mostJitter {
				t.Errorf("initiation %d came %v after the one before: want 5 s and at most a third", i, d)
			}
		}
		// wireguard-go, like Linux, counts 90/5 attempts, and makes two more.
		if last := list[len(list)-1].at.Sub(begin); last < rekeyAttemptTime || last > rekeyAttemptTime+2*(rekeyTimeout+mostJitter)+2*time.Second {
			t.Errorf("the last initiation after %v: want about 90 s", last)
		}
		if n := a.drops(natengine.Outbound, natengine.DropTunnelQueue); n != 1 {
			t.Errorf("%d waiting packets dropped: want 1", n)
		}
	})
}

// Packets that wait for a session cause at most five handshakes in addition to one per
// REKEY_TIMEOUT.
func TestWaitingPacketsStartFewHandshakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newPair(t, orderedKeys(true)).ends[0]
		a.wire.dropAll(everything)
		for n := range uint32(900) {
			a.send(t, n)
			a.Handshake(a.other.key.public)
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		// Allow one initiation every five seconds, the five additional ones, and one more at each
		// end of the 90 seconds.
		if n := len(a.wire.messages(initiations)); n < 15 || n > 90/5+5+2 {
			t.Errorf("%d initiations in 90 s; want 15 to 25", n)
		}
	})
}

func TestTheResponderSendsNothingBeforeTheSessionIsConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		a.wire.dropAll(anyData)
		begin := time.Now()
		a.Handshake(b.key.public)
		time.Sleep(time.Millisecond)
		b.send(t, 1)
		synctest.Wait()
		if !b.Unconfirmed(a.key.public) {
			t.Fatal("b has no session to be confirmed")
		}
		wantMessages(t, b, "data of the responder", anyData, begin)
		wantMessages(t, a, "confirmations of the initiator", keepalives, begin, 0)
		a.wire.dropAll(nil)
		a.send(t, 2)
		b.wants(t, 2)
		a.wants(t, 1) // the packet that had waited
	})
}

func TestSessionKeysAreErasedAfter540Seconds(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		time.Sleep(166 * time.Second)
		a.wire.dropAll(initiations)
		b.wire.dropAll(initiations)
		a.send(t, 1)
		b.send(t, 2) // its age makes b rekey, which fails
		synctest.Wait()
		keys := weak.Make(a.session())
		time.Sleep(3*rejectAfterTime - 167*time.Second)
		if a.session() == nil {
			t.Error("the key was gone before 540 s")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if a.session() != nil || b.session() != nil {
			t.Error("a key is left after 540 s")
		}
		for range 5 {
			runtime.GC()
		}
		if keys.Value() != nil {
			t.Error("the key is still referenced")
		}
	})
}

// --- changes of peers and keys

func TestAPeerWithOurOwnKeyIsRefusedUntilOurKeyChanges(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		ours, other := a.key, numberedKey(9)
		if err := a.SetKeys(b.key.private, [32]byte{}); err != nil { // a gets the key of its own peer
			t.Fatal(err)
		}
		a.send(t, 1)
		time.Sleep(time.Second)
		if n := a.drops(natengine.Outbound, natengine.DropPeerDown); n != 1 {
			t.Errorf("%d counted as for a peer that is not there: want 1", n)
		}
		err := a.SetPeers([]datapath.Peer{{State: a.engine.Peers()[0], Key: b.key.public, Endpoint: b.place}})
		if err == nil {
			t.Error("a peer with our own key was taken")
		}
		if err := a.SetKeys(other.private, [32]byte{}); err != nil {
			t.Fatal(err)
		}
		for _, key := range []key{other, ours} { // the second time, the peer already exists
			if err := a.SetKeys(key.private, [32]byte{}); err != nil {
				t.Fatal(err)
			}
			a.setPeer(t, b.key, b.place)
			b.setPeer(t, key, a.place)
			a.send(t, 2)
			time.Sleep(10 * time.Second)
			b.wants(t, 2)
		}
	})
}

func TestTwoPeersWithOneKeyAreAnError(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		c := p.third(t)
		err := b.SetPeers([]datapath.Peer{{State: b.state(t, "0"), Key: a.key.public}, {State: b.state(t, "2"), Key: a.key.public}})
		if err == nil || err.Error() != "peer 2: its public key is that of peer 0" {
			t.Errorf("error %v", err)
		}
		a.send(t, 1)
		b.wants(t, 1)
		c.send(t, 2)
		b.wants(t)
	})
}

func TestHandshakesWithAnInvalidKeyAreNotRetriedForever(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a := p.ends[0]
		a.setPeer(t, key{public: [32]byte{1}}, a.other.place) // a point of low order
		a.send(t, 1)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := a.drops(natengine.Outbound, natengine.DropTunnelQueue); n != 1 {
			t.Errorf("%d waiting packets dropped: want 1", n)
		}
		if n := a.Requested(key{public: [32]byte{1}}.public); n != 0 {
			t.Error("a handshake is still tried")
		}
	})
}

func TestPeersReconnectAfterAKeyChangeOfEitherSide(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		for i, e := range []*end{a, b, a} {
			e.key = numberedKey(uint32(20 + i))
			if err := e.SetKeys(e.key.private, [32]byte{}); err != nil {
				t.Fatal(err)
			}
			e.send(t, 1, 2) // sent before the other end knows the new key
			time.Sleep(time.Second)
			e.other.setPeer(t, e.key, e.place)
			e.other.send(t, 3, 4)
			time.Sleep(2*rekeyTimeout + time.Second)
			e.other.wants(t, 1, 2)
			e.wants(t, 3, 4)
			// These are handshakes under a key that the other end did not know yet.
			refused := e.drops(natengine.Inbound, natengine.DropHandshakeRefused)
			if n, what := e.allDrops(); n != refused {
				t.Errorf("dropped:%s", what)
			}
		}
	})
}

func TestPeersReconnectAfterAGatewayRestart(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		a.send(t, 1)
		b.wants(t, 1)
		time.Sleep(20 * time.Second)
		b.Close()
		a.send(t, 2) // lost, because b is closed
		time.Sleep(time.Second)
		back := p.newEnd(t, 1, 0, b.key, a.key)
		back.other, a.other = a, back
		a.send(t, 3) // under a session that b no longer has
		time.Sleep(time.Millisecond)
		if n := back.drops(natengine.Inbound, natengine.DropTunnelSession); n != 1 {
			t.Errorf("%d counted for a session that is gone: want 1", n)
		}
		back.send(t, 4, 5)
		time.Sleep(time.Second)
		a.send(t, 6)
		a.wants(t, 4, 5)
		back.wants(t, 6)
	})
}

func TestAPeerMayRoam(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		for i, port := range []uint16{6000, 6001} {
			if err := a.SetPort(port); err != nil {
				t.Fatal(err)
			}
			a.send(t, 1)
			b.wants(t, 1)
			b.send(t, 2)
			a.wants(t, 2)
			if at := b.Stats()[a.key.public].Endpoint; at.Port() != port {
				t.Errorf("change %d: the peer is at %s", i, at)
			}
		}
		s := p.stranger(t, "192.0.2.40") // the peer's new address
		b.sendFrom(t, s, a.Seal(b.key.public, numbered(podOf(0), a.to, 3, 100)))
		if at := b.Stats()[a.key.public].Endpoint; at.Addr().String() != "192.0.2.40" {
			t.Errorf("the peer is at %s: want 192.0.2.40", at)
		}
	})
}

func TestPacketsOfARemovedPeerAreCountedAndItCanReturn(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		peer := datapath.Peer{State: a.engine.Peers()[0], Key: b.key.public, Endpoint: b.place}
		a.setPeers(t)
		a.send(t, 1)
		b.send(t, 2)
		synctest.Wait()
		if n := a.drops(natengine.Outbound, natengine.DropPeerDown); n != 1 {
			t.Errorf("%d counted for a peer that is not there: want 1", n)
		}
		if n := a.drops(natengine.Inbound, natengine.DropTunnelSession); n != 1 {
			t.Errorf("%d counted for a session that is not there: want 1", n)
		}
		if len(a.Stats()) != 0 {
			t.Error("the removed peer is still reported")
		}
		b.wire.dropAll(everything)
		a.setPeers(t, peer)
		a.send(t, 3, 4)
		synctest.Wait()
		a.setPeers(t) // remove the peer while packets 3 and 4 wait
		time.Sleep(2 * time.Second)
		if n := a.drops(natengine.Outbound, natengine.DropTunnelQueue); n != 2 || a.Waiting() {
			t.Errorf("%d counted of those that waited: want 2", n)
		}
		b.wire.dropAll(nil)
		a.setPeers(t, peer)
		a.send(t, 5, 6)
		time.Sleep(rekeyTimeout + time.Second)
		b.wants(t, 5, 6)
		a.wants(t)
	})
}

// --- traffic across rekeys

// stream sends packets in bursts, in both directions at the same time. All must arrive in order. It
// calls rekey, which makes a new session, once per rekeyInterval packets. It calls beside for each
// end during each burst.
func stream(t *testing.T, p *pair, packets, rekeyInterval int, rekey func(), beside func(e *end)) {
	var next [2]uint32
	for i, e := range p.ends {
		e.on = func(number uint32) {
			if number != next[i] && !t.Failed() {
				t.Errorf("end %d received packet %d: want %d", i, number, next[i])
			}
			next[i]++
		}
	}
	templates := [2][]byte{}
	for i, e := range p.ends {
		templates[i] = plain(numbered(e.from, e.to, 0, 100))
	}
	const burst = 400 // fits the queue of the link
	for at := 0; at < packets; at += burst {
		var senders sync.WaitGroup
		for i, e := range p.ends {
			senders.Go(func() { beside(e) })
			senders.Go(func() {
				b := slices.Clone(templates[i])
				for n := at; n < min(at+burst, packets); n++ {
					binary.BigEndian.PutUint32(b[10+28:], uint32(n))
					if !e.link.Inject(b) {
						t.Errorf("end %d: no room for packet %d in the queue of the link", i, n)
					}
				}
			})
		}
		if at/rekeyInterval != (at+burst)/rekeyInterval {
			rekey()
		}
		senders.Wait()
		time.Sleep(time.Millisecond)
	}
	time.Sleep(time.Second)
	synctest.Wait()
	for i, e := range p.ends {
		if n := next[i]; n != uint32(packets) {
			t.Errorf("end %d received %d packets: want %d", i, n, packets)
		}
		if n, what := e.allDrops(); n != 0 {
			t.Errorf("end %d dropped:%s", i, what)
		}
	}
}

func TestAMillionPacketsArriveInOrderDuringRekeys(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		packets := 500_000 // in each direction
		if testing.Short() || raceEnabled {
			packets = 50_000
		}
		sessions := map[uint32]bool{}
		a.wire.see = func(m []byte) {
			if anyData(m) {
				sessions[binary.LittleEndian.Uint32(m[4:])] = true
			}
		}
		b.wire.see = func([]byte) {}
		stream(t, p, packets, packets/5, func() {
			time.Sleep(rekeyTimeout)
			a.Handshake(b.key.public) // while both sides send
		}, func(*end) {})
		if len(sessions) < 4 {
			t.Errorf("%d sessions: want more", len(sessions))
		}
	})
}

func TestNoNonceIsUsedTwice(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		var all [2]nonces
		for i, e := range p.ends {
			all[i].seen = map[[12]byte]bool{}
			e.wire.see = all[i].see
		}
		packets := 60_000
		if testing.Short() || raceEnabled {
			packets = 20_000
		}
		stream(t, p, packets, packets/5, func() {
			time.Sleep(rekeyTimeout)
			b.Handshake(a.key.public)
		}, func(e *end) {
			for range 500 { // the device uses the same counter
				e.Keepalive(e.other.key.public)
			}
		})
		for i := range all {
			if n := all[i].repeated.Load(); n != 0 {
				t.Errorf("end %d used %d nonces again", i, n)
			}
			if len(all[i].seen) < packets*5/4 {
				t.Errorf("end %d sent %d messages: too few were keepalives", i, len(all[i].seen))
			}
		}
	})
}

// --- closing

func TestCloseAtAnyTimeLeaksNoGoroutine(t *testing.T) {
	for _, during := range []string{"nothing", "a handshake", "data that waits", "traffic", "a change of the port"} {
		t.Run(during, func(t *testing.T) {
			for range 5 {
				synctest.Test(t, func(t *testing.T) { // fails if a goroutine is left
					p := newPair(t, orderedKeys(true))
					a, b := p.ends[0], p.ends[1]
					var busy sync.WaitGroup
					switch during {
					case "a handshake":
						a.Handshake(b.key.public)
						b.Handshake(a.key.public)
					case "data that waits":
						a.wire.dropAll(everything)
						a.send(t, 1, 2, 3)
						time.Sleep(7 * time.Second)
					case "traffic", "a change of the port":
						p.meet(t)
						for _, e := range p.ends {
							busy.Go(func() {
								for n := range uint32(5000) {
									e.link.Inject(plain(numbered(e.from, e.to, n, 100)))
								}
							})
						}
					}
					if during == "a change of the port" {
						busy.Go(func() {
							for port := range uint16(20) {
								_ = a.SetPort(7000 + port) // fails if the tunnel was closed in the meantime
							}
						})
					}
					a.Close()
					b.Close()
					busy.Wait()
					select {
					case <-a.Wait():
					default:
						t.Error("the tunnel has not ended")
					}
				})
			}
		})
	}
}

func TestChangingTheListenPortDoesNotHang(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		done := make(chan struct{})
		var busy sync.WaitGroup
		for _, e := range p.ends {
			busy.Go(func() {
				for n := uint32(0); ; n++ {
					e.link.Inject(plain(numbered(e.from, e.to, n, 100)))
					e.Keepalive(e.other.key.public)
					select {
					case <-done:
						return
					case <-time.After(time.Microsecond):
					}
				}
			})
		}
		for i := range uint16(50) {
			for _, e := range p.ends {
				if err := e.SetPort(7000 + i); err != nil {
					t.Error(err)
				}
			}
			a.setPeers(t, datapath.Peer{State: a.state(t, "1"), Key: b.key.public, Endpoint: netip.AddrPortFrom(b.place.Addr(), 7000+i)})
			a.Stats()
			time.Sleep(time.Millisecond)
		}
		close(done)
		busy.Wait()
		time.Sleep(time.Second)
		a.mu.Lock()
		a.got = nil
		a.mu.Unlock()
		b.send(t, 7)
		a.wants(t, 7)
	})
}

// --- replaced peers

// The timers of a removed peer are stopped before the device deletes the peer.
func TestTimersOfAPeerEndBeforeTheDeviceForgetsIt(t *testing.T) {
	p := newPair(t, orderedKeys(true))
	a, key := p.ends[0], p.ends[1].key.public
	acting := a.Hold(key) // as if the function of a timer were running
	removed := make(chan error)
	go func() { removed <- a.SetPeers(nil) }()
	for a.Peers() > 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	if !a.HasPeer(key) {
		t.Error("the device forgot the peer while a timer of it acts")
	}
	acting.Release()
	if err := <-removed; err != nil || a.HasPeer(key) {
		t.Errorf("not removed: %v", err)
	}
}

// While a peer is replaced by another peer with the same key, some inbound goroutines may use the
// old peer and some the new peer. Together they must accept each counter only once.
func TestReplacingAPeerKeepsItsReplayWindow(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		before := a.Replay(b.key.public)
		renamed := a.rules
		renamed.ID = "renamed"
		if err := a.engine.SetPeers([]natengine.Peer{renamed}); err != nil {
			t.Fatal(err)
		}
		a.setPeer(t, b.key, b.place)
		after := a.Replay(b.key.public)
		if !datapath.SameLock(before, after) {
			t.Fatal("the new peer guards the windows by another lock")
		}
		var passed atomic.Int64
		var group sync.WaitGroup
		const counters = 2000
		for _, r := range []datapath.Replay{before, after} {
			group.Go(func() {
				for n := range uint64(counters) {
					if r.First(1000 + n) {
						passed.Add(1)
					}
				}
			})
		}
		group.Wait()
		if n := passed.Load(); n != counters {
			t.Errorf("%d messages passed, want one for each of %d counters", n, counters)
		}
	})
}

// The first packet after an increase of the MTU is sent with the new MTU, even though the outbound
// goroutine was already waiting for a packet.
func TestLargerMTUAppliesToTheFirstPacketAfterTheChange(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		synctest.Wait() // until the goroutine waits for a packet
		a.SetMTU(3000)
		a.link.SetMTU(3000)
		if !a.link.Inject(plain(numbered(a.from, a.to, 1, 2900))) {
			t.Fatal("no room in the queue of the link")
		}
		b.wants(t, 1)
		if n := a.drops(natengine.Outbound, natengine.DropTooBig); n != 0 {
			t.Errorf("%d packets were too big", n)
		}
	})
}

// While another gateway of the peer's cluster takes over in an orderly way, the previous gateway
// still accepts the messages sent to it.
func TestASessionStaysCurrentUntilTheNextIsConfirmed(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		next := p.sibling(t)
		b.send(t, 100) // a learns b's address under the session
		synctest.Wait()
		a.wants(t, 100)
		time.Sleep(rekeyTimeout + time.Second)
		a.wire.mu.Lock()
		a.wire.delay = 20 * time.Millisecond // delays the response
		a.wire.mu.Unlock()
		next.Handshake(a.key.public)
		for n := range uint32(30) {
			a.send(t, n)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		b.mu.Lock()
		before := len(b.got)
		b.mu.Unlock()
		next.mu.Lock()
		after := len(next.got)
		next.mu.Unlock()
		if before+after != 30 || before < 20 || after == 0 {
			t.Errorf("%d packets arrived at the previous gateway and %d at the next one; want 30 together", before, after)
		}
	})
}

// A peer has really moved, but its confirmation was lost. Messages are sent to its previous
// address only for a limited time.
func TestASessionFollowsAMovedPeerAfterASecond(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		next := p.sibling(t)
		b.send(t, 100)
		synctest.Wait()
		time.Sleep(rekeyTimeout + time.Second)
		next.wire.dropAll(anyData)
		next.Handshake(a.key.public)
		time.Sleep(100 * time.Millisecond)
		a.send(t, 1)
		time.Sleep(time.Second)
		a.send(t, 2)
		b.wants(t, 1)
	})
}
