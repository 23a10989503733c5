package datapath_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

func TestStagingKeepsTheNewestWithinItsBounds(t *testing.T) {
	for _, tc := range []struct {
		name         string
		pushed, size int
		kept         int
	}{
		{"few", 3, 100, 3},
		{"packets", datapath.MaxStaged + 7, 100, datapath.MaxStaged},
		{"octets", 10, datapath.MaxStagedBytes / 4, 4},
		{"the largest", 6, 65535, 4},
		{"larger than all", 2, datapath.MaxStagedBytes + 1, 1}, // does not occur in practice; staging may keep one such packet
	} {
		t.Run(tc.name, func(t *testing.T) {
			var s datapath.Staging
			dropped, last := 0, 0
			for i := range tc.pushed {
				p := make([]byte, tc.size)
				p[0], p[1] = byte(i), byte(i>>8)
				dropped += s.Push(p, time.Duration(i))
				p[0], p[1] = 0xff, 0xff // staging must have made a copy
				last = i
			}
			if dropped != tc.pushed-tc.kept {
				t.Errorf("%d dropped to make room: want %d", dropped, tc.pushed-tc.kept)
			}
			if n, octets := s.Len(); n != tc.kept || octets != tc.kept*tc.size {
				t.Errorf("%d packets, %d octets: want %d, %d", n, octets, tc.kept, tc.kept*tc.size)
			}
			for i := last - tc.kept + 1; i <= last; i++ {
				if p := s.Oldest(); int(p[0])|int(p[1])<<8 != i {
					t.Fatalf("packet %d: want %d", int(p[0])|int(p[1])<<8, i)
				}
				s.Drop()
			}
			if !s.Empty() {
				t.Error("something is left")
			}
		})
	}
}

func TestStagingDropsPacketsAfterTenSeconds(t *testing.T) {
	var s datapath.Staging
	for i := range 5 {
		s.Push([]byte{byte(i)}, time.Duration(i)*time.Second)
	}
	for _, tc := range []struct {
		at         time.Duration
		gone, left int
	}{{9999 * time.Millisecond, 0, 5}, {10 * time.Second, 1, 4}, {12500 * time.Millisecond, 2, 2}, {time.Hour, 2, 0}} {
		if dropped := s.Expire(tc.at); dropped != tc.gone {
			t.Errorf("at %v %d expired: want %d", tc.at, dropped, tc.gone)
		}
		if n, _ := s.Len(); n != tc.left {
			t.Errorf("at %v %d are left: want %d", tc.at, n, tc.left)
		}
	}
	if !s.Empty() {
		t.Error("something is left")
	}
}

func TestWaitingPacketsAreSentInOrderOrCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		a.wire.dropAll(everything)
		const sent = datapath.MaxStaged + 20
		var want []uint32
		for n := range uint32(sent) {
			a.send(t, n)
			if n >= 20 {
				want = append(want, n)
			}
		}
		time.Sleep(4 * time.Second)
		if n := a.drops(natengine.Outbound, natengine.DropTunnelQueue); n != 20 {
			t.Errorf("%d dropped to make room: want 20", n)
		}
		a.wire.dropAll(nil)
		time.Sleep(2 * time.Second)
		a.send(t, sent)
		b.wants(t, append(want, sent)...)
		if a.Waiting() {
			t.Error("packets are still waiting")
		}
	})
}

func TestWaitingPacketsAreDroppedAfterTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		a.wire.dropAll(everything)
		a.send(t, 1, 2)
		time.Sleep(6 * time.Second)
		a.send(t, 3)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if n := a.drops(natengine.Outbound, natengine.DropTunnelQueue); n != 2 || !a.Waiting() {
			t.Errorf("%d waiting packets dropped after 12 s: want 2", n)
		}
		a.wire.dropAll(nil)
		time.Sleep(4 * time.Second)
		b.wants(t, 3)
		if n, what := a.allDrops(); n != 2 || a.Waiting() {
			t.Errorf("dropped:%s: want 2", what)
		}
	})
}

// Packets that wait for one peer do not slow down packets for another peer. They are checked only
// after an event of their own peer.
func TestPacketsWaitingForOnePeerDoNotDelayAnother(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		c := p.third(t)
		c.Close()
		b.setPeers(t, datapath.Peer{State: b.state(t, "0"), Key: a.key.public})
		b.setPeers(t, datapath.Peer{State: b.state(t, "0"), Key: a.key.public},
			datapath.Peer{State: b.state(t, "2"), Key: c.key.public, Endpoint: c.place})
		var want []uint32
		for n := range uint32(200) {
			b.link.Inject(plain(numbered(b.from, podOf(2), n, 100)))
			b.send(t, n)
			want = append(want, n)
			time.Sleep(time.Millisecond)
		}
		a.wants(t, want...)
		back := p.newEnd(t, 2, 1, c.key, b.key)
		back.Handshake(b.key.public) // makes the session while b is busy
		var got []uint32
		for n := uint32(200); n < 1200; n++ {
			b.send(t, n)
			time.Sleep(100 * time.Microsecond)
		}
		synctest.Wait()
		got = slices.Clone(back.got)
		if len(got) != datapath.MaxStaged || !slices.IsSorted(got) || got[len(got)-1] != 199 {
			t.Errorf("%d of those that waited came, %v: want %d, in order", len(got), got, datapath.MaxStaged)
		}
	})
}

// The packets that waited are sent in one batch. The wire refuses some of them. The refused packets
// are counted, and the others arrive.
func TestOnlyRefusedMessagesCountAsUnsent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		a.wire.mu.Lock()
		a.wire.refuse = func(m []byte) bool { return data(m) && counter(m)%3 == 1 }
		a.wire.mu.Unlock()
		a.send(t, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
		time.Sleep(time.Second)
		b.wants(t, 1, 2, 4, 5, 7, 8) // the first message is a keepalive
		if n := a.drops(natengine.Outbound, natengine.DropTunnelSend); n != 4 {
			t.Errorf("%d messages are counted as not sent: want the 4 that were refused", n)
		}
	})
}
