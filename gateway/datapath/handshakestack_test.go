package datapath

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// peersHandshake returns message number n of a peer.
func peersHandshake(peer, n int) (m handshake) {
	m.n = 8
	binary.BigEndian.PutUint32(m.b[:], uint32(peer))
	binary.BigEndian.PutUint32(m.b[4:], uint32(n))
	return m
}

func (m *handshake) numbers() (peer, n int) {
	return int(binary.BigEndian.Uint32(m.b[:])), int(binary.BigEndian.Uint32(m.b[4:]))
}

// 4,000 peers each start a handshake every five seconds until one is answered in time. The device
// answers only 50 a second, as on a processor that is busy with other work. At least nine of ten
// answers must be in time, and every peer must connect.
func TestHandshakesSucceedUnderOverload(t *testing.T) {
	const (
		peers  = 4000
		every  = 5 * time.Second // RekeyTimeout
		answer = 20 * time.Millisecond
	)
	rng := rand.New(rand.NewPCG(1, 2))
	type one struct {
		next time.Duration
		n    int
		done bool
	}
	all := make([]one, peers)
	for i := range all {
		all[i].next = time.Duration(rng.Int64N(int64(every)))
	}
	s, answered, connected := newHandshakeStack(knownHandshakes), 0, 0
	for now := time.Duration(0); connected < peers && now < 5*time.Minute; now += answer {
		for i := range all {
			if p := &all[i]; !p.done && p.next <= now {
				p.n++
				p.next = now + every + time.Duration(rng.Int64N(int64(every/15))) // jitter
				s.push(peersHandshake(i, p.n))
			}
		}
		m, ok := s.pop()
		if !ok {
			continue
		}
		answered++
		if peer, n := m.numbers(); all[peer].n == n && !all[peer].done {
			all[peer].done = true
			connected++
		}
	}
	if connected < peers || connected < answered*9/10 {
		t.Errorf("%d of %d peers connected, by %d answers", connected, peers, answered)
	}
}

// countingWire counts the sent messages.
type countingWire struct {
	Wire
	sent int
}

func (w *countingWire) Send(bufs [][]byte, _ conn.Endpoint) error {
	w.sent += len(bufs)
	return nil
}

// A handshake that the device may process waits for at most one cookie to be sent, even if a flood
// needs many cookies.
func TestAHandshakeWaitsForAtMostOneCookie(t *testing.T) {
	wire := &countingWire{Wire: bind.New()}
	tunnel := New(silentLink{}, wire, natengine.New(natengine.Config{}), nil, Options{})
	defer tunnel.Close()
	h, from := tunnel.current().bind, wire.Endpoint(netip.MustParseAddrPort("192.0.2.66:1"))
	initiation := handshake{from: from, n: device.MessageInitiationSize}
	initiation.b[0] = device.MessageInitiationType
	h.known.push(initiation)
	initiation.unproven = true
	for range 10 {
		h.others.push(initiation)
	}
	bufs := make([][]byte, handshakeBatch)
	for i := range bufs {
		bufs[i] = make([]byte, device.MessageInitiationSize)
	}
	n, err := h.receive(nil, bufs, make([]int, len(bufs)), make([]conn.Endpoint, len(bufs)))
	if n != 1 || err != nil || wire.sent > 1 {
		t.Errorf("the device got %d messages after %d cookies (%v): want 1 after 1", n, wire.sent, err)
	}
}

func TestAHandshakeStackIsBoundedAndDropsTheOldest(t *testing.T) {
	s := newHandshakeStack(8)
	unproven := handshake{unproven: true}
	for i := range 8 / cookieShare {
		if _, dropped := s.push(unproven); dropped {
			t.Fatalf("unproven message %d was dropped", i)
		}
	}
	if lost, dropped := s.push(unproven); !dropped || !lost.unproven {
		t.Error("unproven messages use more than their share of places")
	}
	for n := range 10 {
		lost, dropped := s.push(peersHandshake(1, n))
		if full := n >= 6; dropped != full || dropped && lost.unproven != (n < 8) {
			t.Errorf("message %d: dropped %v, unproven %v", n, dropped, lost.unproven)
		}
	}
	for n := 9; n >= 2; n-- {
		m, ok := s.pop()
		if _, got := m.numbers(); !ok || got != n {
			t.Fatalf("message %d came, want %d", got, n)
		}
	}
	if _, ok := s.pop(); ok {
		t.Error("a message more")
	}
}
