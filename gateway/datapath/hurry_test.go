package datapath_test

import (
	"testing"
	"testing/synctest"
	"time"
)

// The first handshakes of a gateway that has just become active get lost while a Service still
// sends to the previous gateway. If packets wait, the gateway repeats the handshake soon. The
// device by itself would repeat it only after five seconds.
func TestALostHandshakeIsRetriedSoonForWaitingPackets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		a.wire.dropAll(initiations)
		start := time.Now()
		time.AfterFunc(1500*time.Millisecond, func() { a.wire.dropAll(nil) })
		for n := uint32(1); a.session() == nil && time.Since(start) < 10*time.Second; n++ {
			a.send(t, n)
			time.Sleep(100 * time.Millisecond)
			synctest.Wait()
		}
		if took := time.Since(start); took > 2500*time.Millisecond {
			t.Errorf("there is a session after %v; want one within a second of when messages arrive", took)
		}
		if n := len(b.wire.messages(initiations)); n > 0 {
			t.Errorf("the peer began %d handshakes", n)
		}
	})
}

// A gateway that doubts its session starts a handshake, no matter how recent the last one is.
func TestHandshakeNowIgnoresTheRekeyTimeout(t *testing.T) {
	inPair(t, func(t *testing.T, _ *pair, a, b *end) {
		first := a.session()
		time.Sleep(100 * time.Millisecond) // a peer accepts one initiation in 20 ms
		a.Handshake(b.key.public)
		synctest.Wait()
		if a.session() != first {
			t.Error("Handshake began one within the device's pause")
		}
		a.HandshakeNow(b.key.public)
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		if s := a.session(); s == nil || s == first {
			t.Error("HandshakeNow made no new session")
		}
	})
}
