package datapath

import "sync"

// handshakeStack holds handshake messages for the device. It hands out the newest first and, when it is full,
// drops the oldest. Under overload a queue would be full of messages that came too late: a peer that got no
// answer within RekeyTimeout begins anew, and the answer to its earlier initiation is worthless. If the
// device needed longer than that for a full queue, it would do worthless work only, and no peer would ever
// connect. Methods may be called concurrently.
type handshakeStack struct {
	ready chan struct{} // holds a token after a push

	mu    sync.Mutex
	ring  []handshake
	first int // index of the oldest
	n     int
}

func newHandshakeStack(most int) *handshakeStack {
	return &handshakeStack{ready: make(chan struct{}, 1), ring: make([]handshake, most)}
}

// push adds a message. If the stack is full, the oldest one is dropped. An unproven message
// displaces none, and only a part of the places is open to it. dropped reports whether push dropped
// a message, which lost describes.
func (s *handshakeStack) push(m handshake) (lost handshake, dropped bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.unproven && s.n >= len(s.ring)/cookieShare {
		return m, true
	}
	if s.n == len(s.ring) {
		lost, dropped = s.ring[s.first], true
		s.first = (s.first + 1) % len(s.ring)
		s.n--
	}
	s.ring[(s.first+s.n)%len(s.ring)] = m
	s.n++
	select {
	case s.ready <- struct{}{}:
	default:
	}
	return lost, dropped
}

// pop returns the newest message, if there is one.
func (s *handshakeStack) pop() (m handshake, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n == 0 {
		return m, false
	}
	s.n--
	at := (s.first + s.n) % len(s.ring)
	m, s.ring[at].from = s.ring[at], nil
	return m, true
}
