package datapath

import (
	"bytes"
	"time"
)

// What a peer without a session may have waiting. A first flight of TCP, or a burst of datagrams in
// one superpacket, fits.
const (
	maxStaged      = 128       // packets
	maxStagedBytes = 256 << 10 // octets
	stagedTimeout  = 10 * time.Second
)

// staging holds packets for a peer until it has a session. The oldest gives way. The zero value is
// empty.
type staging struct {
	ring  [][]byte // packets from first on, in order
	times []time.Duration
	bytes int
}

// push keeps a copy of p and says how many packets gave way.
func (s *staging) push(p []byte, now time.Duration) (gone int) {
	for len(s.ring) > 0 && (len(s.ring) == maxStaged || s.bytes+len(p) > maxStagedBytes) {
		s.drop()
		gone++
	}
	s.ring = append(s.ring, bytes.Clone(p))
	s.times = append(s.times, now)
	s.bytes += len(p)
	return gone
}

// expire drops what has waited for too long and says how many packets that were.
func (s *staging) expire(now time.Duration) (gone int) {
	for len(s.ring) > 0 && now-s.times[0] >= stagedTimeout {
		s.drop()
		gone++
	}
	return gone
}

// drop forgets the oldest packet; there has to be one.
func (s *staging) drop() {
	s.bytes -= len(s.ring[0])
	s.ring[0] = nil
	s.ring, s.times = s.ring[1:], s.times[1:]
	if len(s.ring) == 0 {
		*s = staging{}
	}
}
