package datapath_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// inUnconnectedPair runs a test in a bubble, with two gateways that have no session.
func inUnconnectedPair(t *testing.T, test func(t *testing.T, a, b *end)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		test(t, p.ends[0], p.ends[1])
	})
}

func (e *end) signs() datapath.Signs {
	synctest.Wait()
	return e.Signs(e.engine.Peers()[0])
}

func TestBothSidesDetectAWrongKey(t *testing.T) {
	inUnconnectedPair(t, func(t *testing.T, a, b *end) {
		b.setPeer(t, numberedKey(9), a.place) // b has a wrong key for a
		begin := time.Now()
		a.Handshake(b.key.public)
		b.Handshake(numberedKey(9).public)
		time.Sleep(4 * time.Second)
		if s := b.signs(); s.Refused.Before(begin) || !s.OtherKey.IsZero() || !s.Answered.IsZero() {
			t.Errorf("the side with a wrong key of the peer sees %+v; want a handshake that is refused", s)
		}
		if s := a.signs(); s.OtherKey.Before(begin) || !s.Refused.IsZero() || !s.Answered.IsZero() {
			t.Errorf("the side whose key the peer has wrong sees %+v; want a handshake for another key", s)
		}

		b.setPeer(t, a.key, a.place)
		a.Handshake(b.key.public)
		b.Handshake(a.key.public)
		time.Sleep(20 * time.Second)
		for _, e := range []*end{a, b} {
			if s := e.signs(); e.session() == nil || !s.Refused.IsZero() || !s.OtherKey.IsZero() {
				t.Errorf("after the key was mended: session %v, %+v", e.session() != nil, s)
			}
		}
	})
}

func TestAnsweredHandshakesAreNotCountedAsRefused(t *testing.T) {
	inUnconnectedPair(t, func(t *testing.T, a, b *end) {
		b.wire.dropAll(everything) // the answers do not arrive
		for range 4 {
			a.Handshake(b.key.public)
			time.Sleep(6 * time.Second)
		}
		if s := b.signs(); s.Answered.IsZero() || !s.Refused.IsZero() || !s.OtherKey.IsZero() {
			t.Errorf("the side whose answers are lost sees %+v", s)
		}
		if s := a.signs(); s != (datapath.Signs{}) {
			t.Errorf("the side that hears nothing sees %+v", s)
		}
	})
}

func TestSignsIncludeKernelSendErrors(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, _ *end) {
		if s := a.signs(); s.Unsent != nil {
			t.Fatalf("before: %v", s.Unsent)
		}
		a.wire.mu.Lock()
		a.wire.refuse = everything
		a.wire.mu.Unlock()
		a.send(t, 1)
		if s := a.signs(); !errors.Is(s.Unsent, unix.EMSGSIZE) || s.UnsentAt.IsZero() {
			t.Errorf("data: %+v", s)
		}
	})
	inUnconnectedPair(t, func(t *testing.T, a, b *end) {
		a.wire.refuse = everything
		a.Handshake(b.key.public)
		if s := a.signs(); !errors.Is(s.Unsent, unix.EMSGSIZE) {
			t.Errorf("a handshake: %+v", s)
		}
	})
}

func TestSignsIncludeDataOfAnEarlierSession(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		b.setPeers(t)
		b.setPeer(t, numberedKey(9), a.place) // a does not know that its key at b has changed
		a.send(t, 1)
		if s := b.signs(); s.Earlier.IsZero() || s != (datapath.Signs{Earlier: s.Earlier}) {
			t.Errorf("after data of the old session: %+v", s)
		}
		b.setPeer(t, a.key, a.place)
		b.Handshake(a.key.public)
		time.Sleep(time.Second)
		if s := b.signs(); b.session() == nil || !s.Earlier.IsZero() {
			t.Errorf("after a new session: %v, %+v", b.session() != nil, s)
		}
	})
}

// A Service with externalTrafficPolicy: Cluster replaces the source of each message by an address
// of a node.
func TestRelayedHandshakesAreReportedSeparately(t *testing.T) {
	inUnconnectedPair(t, func(t *testing.T, a, b *end) {
		elsewhere, other := netip.MustParseAddrPort("192.0.2.77:5871"), numberedKey(9)
		b.SetRelays(func(addr netip.Addr) bool { return addr == a.place.Addr() })
		begin := time.Now()
		b.setPeer(t, a.key, elsewhere)
		a.setPeer(t, other, b.place)
		a.Handshake(other.public)
		time.Sleep(4 * time.Second)
		if s := b.signs(); s.RelayedOtherKey.Before(begin) || s != (datapath.Signs{RelayedOtherKey: s.RelayedOtherKey}) {
			t.Errorf("a handshake for another key: %+v", s)
		}

		begin = time.Now()
		b.setPeer(t, other, elsewhere)
		a.setPeer(t, b.key, b.place)
		a.Handshake(b.key.public)
		time.Sleep(4 * time.Second)
		if s := b.signs(); s.RelayedRefused.Before(begin) || !s.Refused.IsZero() || !s.Answered.IsZero() {
			t.Errorf("a handshake from another key: %+v", s)
		}

		b.setPeer(t, a.key, elsewhere)
		a.Handshake(b.key.public)
		time.Sleep(20 * time.Second)
		if s := b.signs(); b.session() == nil || !s.RelayedRefused.IsZero() || !s.RelayedOtherKey.IsZero() {
			t.Errorf("after the key was mended: session %v, %+v", b.session() != nil, s)
		}
	})
}

func TestSignsIgnoreHandshakesFromOtherAddresses(t *testing.T) {
	inUnconnectedPair(t, func(t *testing.T, a, b *end) {
		b.setPeer(t, a.key, netip.MustParseAddrPort("192.0.2.77:5871")) // b has another address for a
		other := numberedKey(9)
		a.setPeer(t, other, b.place)
		a.Handshake(other.public)
		time.Sleep(4 * time.Second)
		if s := b.signs(); s != (datapath.Signs{}) {
			t.Errorf("handshakes from an address of no peer: %+v", s)
		}
	})
}

// A peer may still use its session with another gateway of ours, although that gateway no longer
// exists.
func TestDataOfAnUnknownSessionFromAPeersAddressIsReported(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		other := p.sibling(t)
		var reported []time.Time
		b.OnUnknownSession(func(key [32]byte) {
			if key != a.key.public {
				t.Error("another peer is doubted")
			}
			reported = append(reported, time.Now())
		})
		time.Sleep(rekeyTimeout + time.Second)
		other.Handshake(a.key.public)
		time.Sleep(time.Second)
		other.Close()
		b.send(t, 1) // under the earlier session, which a still accepts
		synctest.Wait()
		a.wants(t, 1)
		begin := time.Now()
		for n := range uint32(8) {
			a.send(t, n)
			time.Sleep(time.Second)
		}
		b.wants(t)
		if want := []time.Time{begin, begin.Add(5 * time.Second)}; !slices.Equal(reported, want) {
			t.Errorf("reported at %v; want %v", reported, want)
		}
	})
}

func TestSignsIgnoreForgedDataFromOtherAddresses(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		reported := 0
		b.OnUnknownSession(func([32]byte) { reported++ })
		forged := make([]byte, 64)
		forged[0] = 4
		b.sendFrom(t, p.stranger(t, "192.0.2.9"), forged)             // from an address without a peer
		b.sendFrom(t, p.stranger(t, a.place.Addr().String()), forged) // from the peer's address, but another port
		if reported != 0 {
			t.Errorf("reported %d times", reported)
		}
	})
}

// A gateway that has just started, and has nothing to send, starts a handshake as soon as its
// peer sends data.
func TestDataOfAPeerStartsAHandshakeAfterARestart(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		time.Sleep(rekeyTimeout)
		b.Close()
		again := p.newEnd(t, 1, 0, b.key, a.key)
		again.other, a.other = a, again
		begin := time.Now()
		a.send(t, 1)
		time.Sleep(10 * time.Millisecond)
		a.send(t, 2)
		again.wants(t, 2)
		if list := again.wire.messages(initiations); len(list) != 1 || list[0].at != begin {
			t.Errorf("initiations: %v; want one at %v", list, begin)
		}
	})
}
