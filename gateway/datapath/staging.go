package datapath

import (
	"bytes"
	"time"
)

// Limits of the packets that wait for a peer's session. They leave room for the first flight of a
// TCP connection, or for a burst of datagrams in one superpacket.
const (
	maxStaged      = 128       // packets
	maxStagedBytes = 256 << 10 // octets
	stagedTimeout  = 10 * time.Second
)

// staging holds packets for a peer until there is a session. When it is full, it drops the oldest
// packets. The zero value is empty.
type staging struct {
	ring  [][]byte // packets, the oldest first
	times []time.Duration
	bytes int
}

// push adds a copy of p and returns the number of packets that it dropped to make room.
func (s *staging) push(p []byte, now time.Duration) (dropped int) {
	for len(s.ring) > 0 && (len(s.ring) == maxStaged || s.bytes+len(p) > maxStagedBytes) {
		s.drop()
		dropped++
	}
	s.ring = append(s.ring, bytes.Clone(p))
	s.times = append(s.times, now)
	s.bytes += len(p)
	return dropped
}

// expire drops packets that have waited too long, and returns their number.
func (s *staging) expire(now time.Duration) (dropped int) {
	for len(s.ring) > 0 && now-s.times[0] >= stagedTimeout {
		s.drop()
		dropped++
	}
	return dropped
}

// drop drops the oldest packet. There must be one.
func (s *staging) drop() {
	s.bytes -= len(s.ring[0])
	s.ring[0] = nil
	s.ring, s.times = s.ring[1:], s.times[1:]
	if len(s.ring) == 0 {
		*s = staging{}
	}
}
