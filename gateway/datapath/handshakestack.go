package datapath

import "sync"

// A handshakeStack holds handshake messages for the device. It returns the newest first. When it
// is full, it drops the oldest.
//
// Under overload, a first-in first-out queue would be full of messages that are too old. A peer
// that gets no answer starts a new handshake after RekeyTimeout, and then an answer to its earlier
// initiation is worthless. If the device needed longer than RekeyTimeout for a full queue, all its
// answers would be worthless, and no peer would ever connect.
//
// Methods may be called concurrently.
type handshakeStack struct {
	ready chan struct{} // holds a token after a push

	mu    sync.Mutex
	ring  []handshake
	first int // index of the oldest message
	n     int
}

func newHandshakeStack(size int) *handshakeStack {
	return &handshakeStack{ready: make(chan struct{}, 1), ring: make([]handshake, size)}
}

// push adds a message. If the stack is full, push drops the oldest one. If at least 1/cookieShare of
// the stack is in use, push drops a message whose sender has not proven its address, instead of
// adding it. So such a message never displaces another one. If push dropped a message, it returns
// that message and true.
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

// pop removes and returns the newest message, if there is one.
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
