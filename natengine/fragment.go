package natengine

import (
	"sync"

	"github.com/isthmus-net/isthmus/packet"
)

// Later fragments have no ports. A 1:1 map needs none and translates each fragment as it comes; where a flow decides, the
// first fragment decides for its datagram. What it decided is remembered until all octets of the datagram went by; later
// fragments that come before it are copied and held. Nothing is reassembled: that is the receiver's business.

// fragmentStore remembers datagrams of one peer and direction. Its three bounds are in Config; at a bound the oldest
// datagram gives way, with DropFragmentStoreFull for each of its held fragments, because a datagram whose fragments do
// arrive needs its entry for milliseconds and a flood of ones that do not would block a store that refuses new ones.
type fragmentStore struct {
	mu             sync.Mutex
	sets           map[fragmentKey]*fragmentSet
	oldest, newest *fragmentSet
	bytes          int
	lost           func(d Drop, n int) // counts held fragments that are given up
}

// fragmentKey is what tells datagrams apart: RFC 791 has the protocol in it, RFC 8200 has not. The addresses are those
// before translation.
type fragmentKey struct {
	src, dst addr
	id       uint32
	proto    uint8
}

type fragmentSet struct {
	key        fragmentKey
	born       tick
	decided    bool
	to         addr // our end, written to every fragment
	drop       Drop // or why every fragment is dropped
	held       [][]byte
	got, total int // octets that went by; of the whole datagram, 0 while the last fragment is missing
	prev, next *fragmentSet
}

func fragmentKeyOf(v *packet.View) fragmentKey {
	_, _, id, _ := v.Fragment()
	k := fragmentKey{src: source(v), dst: destination(v), id: id}
	if v.Is4() {
		k.proto = v.Proto()
	}
	return k
}

// firstFragment tells the store what becomes of a datagram, of which v is the first fragment as it came, and returns the
// fragments that were waiting, translated.
func (e *Engine) firstFragment(v *packet.View, r *remote, dir Direction, to addr, drop Drop, now tick) [][]byte {
	held := r.peer.fragments[dir].decide(v, to, drop, now, e)
	if drop != DropNone {
		r.peer.fragments[dir].lost(drop, len(held))
		return nil
	}
	var w packet.View
	for _, b := range held {
		if w.Parse(b, packet.ChecksumComplete) == nil { // it did when it came
			e.forward(&w, r, dir, to, samePort)
		}
	}
	return held
}

// laterFragment does with a fragment what the first of its datagram said, or holds it.
func (e *Engine) laterFragment(v *packet.View, r *remote, dir Direction, now tick, tr *Trace) Verdict {
	s := &r.peer.fragments[dir]
	if tr != nil {
		to, drop, decided := s.decision(v)
		switch {
		case !decided:
			return Verdict{Action: Hold, Peer: r.peer}
		case drop != DropNone:
			return Verdict{Drop: drop, Peer: r.peer}
		}
		tr.Rule = "as the first fragment of its datagram"
		return e.forward(v, r, dir, to, samePort)
	}
	to, drop, held := s.follow(v, now, e)
	switch {
	case drop != DropNone:
		return e.refuse(r, dir, drop, nil)
	case held:
		return Verdict{Action: Hold, Peer: r.peer}
	}
	return e.forward(v, r, dir, to, samePort)
}

func (s *fragmentStore) decision(v *packet.View) (to addr, drop Drop, decided bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[fragmentKeyOf(v)]; set != nil {
		return set.to, set.drop, set.decided
	}
	return addr{}, DropNone, false
}

// decide enters the decision for the datagram of v and returns the fragments that waited for it.
func (s *fragmentStore) decide(v *packet.View, to addr, drop Drop, now tick, e *Engine) (held [][]byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.set(fragmentKeyOf(v), now, e)
	if set.decided { // the identification is used again
		set.got, set.total = 0, 0
	}
	set.decided, set.to, set.drop = true, to, drop
	held, set.held = set.held, nil
	for _, b := range held {
		s.bytes -= len(b)
	}
	s.passed(set, v)
	return held
}

// follow returns the decision about the datagram of v, or copies v to wait for it.
func (s *fragmentStore) follow(v *packet.View, now tick, e *Engine) (to addr, drop Drop, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.set(fragmentKeyOf(v), now, e)
	if set.decided {
		to, drop = set.to, set.drop
		s.passed(set, v)
		return to, drop, false
	}
	if len(set.held) >= e.config.MaxFragmentsPerSet || v.Len() > e.config.MaxFragmentBytes {
		return addr{}, DropFragmentStoreFull, false
	}
	for s.bytes+v.Len() > e.config.MaxFragmentBytes {
		victim := s.oldest
		s.remove(victim, DropFragmentStoreFull)
		if victim == set {
			return addr{}, DropFragmentStoreFull, false
		}
	}
	s.bytes += v.Len()
	set.held = append(set.held, append([]byte(nil), v.Bytes()...))
	s.passed(set, v)
	return addr{}, DropNone, true
}

// passed notes the octets of a fragment. When all of a decided datagram went by its entry goes. Duplicates may make that
// too early, and IPv6 headers ahead of the transport header too late: either costs a timeout, not a wrong translation.
func (s *fragmentStore) passed(set *fragmentSet, v *packet.View) {
	off, more, _, _ := v.Fragment()
	size := v.Len() - v.TransportOffset()
	set.got += size
	if !more {
		set.total = off + size
	}
	if set.decided && set.total != 0 && set.got >= set.total {
		s.remove(set, DropNone)
	}
}

// set returns the entry for a datagram, made if need be.
func (s *fragmentStore) set(k fragmentKey, now tick, e *Engine) *fragmentSet {
	s.expire(now, e.lifetimes.fragment)
	if set := s.sets[k]; set != nil {
		return set
	}
	if s.sets == nil {
		s.sets = map[fragmentKey]*fragmentSet{}
	}
	if len(s.sets) >= e.config.MaxFragmentSets {
		s.remove(s.oldest, DropFragmentStoreFull)
	}
	set := &fragmentSet{key: k, born: now, prev: s.newest}
	if s.newest == nil {
		s.oldest = set
	} else {
		s.newest.next = set
	}
	s.newest = set
	s.sets[k] = set
	return set
}

// remove gives up an entry and counts what it still held.
func (s *fragmentStore) remove(set *fragmentSet, why Drop) {
	for _, b := range set.held {
		s.bytes -= len(b)
	}
	s.lost(why, len(set.held))
	if set.prev == nil {
		s.oldest = set.next
	} else {
		set.prev.next = set.next
	}
	if set.next == nil {
		s.newest = set.prev
	} else {
		set.next.prev = set.prev
	}
	delete(s.sets, set.key)
}

// expire gives up what is too old; entries are in the order of their birth.
func (s *fragmentStore) expire(now tick, lifetime int32) {
	for s.oldest != nil && now.since(s.oldest.born) > lifetime {
		s.remove(s.oldest, DropFragmentTimeout)
	}
}

func (s *fragmentStore) sweep(now tick, lifetime int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire(now, lifetime)
}

// clear forgets everything, after a change of rules.
func (s *fragmentStore) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.oldest != nil {
		s.remove(s.oldest, DropFragmentTimeout)
	}
}

func (s *fragmentStore) stats() (sets, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sets), s.bytes
}
