package natengine

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/isthmus-net/isthmus/packet"
)

// Later fragments have no ports. A 1:1 map needs none and translates each fragment as it comes;
// where a flow decides, the first fragment decides for its datagram. What it decided is remembered
// until all octets of the datagram went by; later fragments that come before it are copied and
// held. Nothing is reassembled: that is the receiver's business.
//
// Where a flow decides, each octet of a datagram passes once, and all of them in one flow, so that
// nothing can be put over a header that was judged. The rules are those of Linux's reassembly
// (net/ipv4/inet_fragment.c), for both families:
//
//	a fragment of octets that went by already       is a duplicate and dropped
//	one that overlaps in part, ends elsewhere than   ends the datagram: what is held, this and what may still come is
//	  the last fragment said, or is another first      dropped until its time is over (RFC 5722, section 4)
//	  fragment of the same identification
//
// So a datagram that uses an identification again while fragments of the one before are missing is
// lost, not mixed with it (RFC 4963). The same holds for one that only looks so behind us, because
// two hosts share an address there: the datagram that was first goes on, the other is dropped,
// since the identification is not rewritten. Fragments that a 1:1 map translates are not compared:
// the map looks at no port, and the receiver reassembles.

// fragmentStore remembers datagrams of one peer and direction. Its three bounds are in Config; at a
// bound the oldest datagram gives way, with DropFragmentStoreFull for each of its held fragments,
// because a datagram whose fragments do arrive needs its entry for milliseconds and a flood of ones
// that do not would block a store that refuses new ones. One source may take a quarter; at that it
// is its own oldest datagram that gives way, so that a flood of one host does not reach the
// others'.
type fragmentStore struct {
	mu    sync.Mutex
	rule  *rule                        // by which the decisions here were made
	sets  map[fragmentKey]*fragmentSet // by what they are when they come,
	after map[fragmentKey]*fragmentSet // and those that go on by what they are then
	hosts map[addr]*fragmentHost
	all   fragmentList
	bytes int
	lost  func(d Drop, n int) // counts held fragments that are given up

	// Entries to be used again, so that a datagram whose fragments come in order costs no garbage.
	idleSets  []*fragmentSet
	idleHosts []*fragmentHost
}

// hostShare is the part of the store that one source may take, as a divisor.
const hostShare = 4

// fragmentKey is what tells datagrams apart: RFC 791 has the protocol in it, RFC 8200 has not.
type fragmentKey struct {
	src, dst addr
	id       uint32
	proto    uint8
}

type fragmentSet struct {
	key     fragmentKey // before translation
	after   fragmentKey // and behind it, once decided
	host    *fragmentHost
	born    tick
	decided bool
	to      addr   // our end, written to every fragment
	drop    Drop   // or why every fragment is dropped
	first   uint64 // the octets of the first fragment that have the ports and, mostly, the checksum
	held    [][]byte
	seen    []span // what went by, in order, not adjacent
	total   int    // octets of the whole datagram, 0 while the last fragment is missing
	links   [2]links
}

// span is a part of a datagram, in units of 8 octets.
type span struct{ from, to uint16 }

// fragmentHost is the part of the store that one source has.
type fragmentHost struct {
	own   fragmentList
	sets  int
	bytes int
}

// fragmentList is a list of datagrams in the order of their birth; kind says which of their links
// it uses.
type fragmentList struct {
	oldest, newest *fragmentSet
}

type links struct{ prev, next *fragmentSet }

const (
	ofAll = iota
	ofHost
)

func (l *fragmentList) push(set *fragmentSet, kind int) {
	set.links[kind] = links{prev: l.newest}
	if l.newest == nil {
		l.oldest = set
	} else {
		l.newest.links[kind].next = set
	}
	l.newest = set
}

func (l *fragmentList) unlink(set *fragmentSet, kind int) {
	at := set.links[kind]
	if at.prev == nil {
		l.oldest = at.next
	} else {
		at.prev.links[kind].next = at.next
	}
	if at.next == nil {
		l.newest = at.prev
	} else {
		at.next.links[kind].prev = at.prev
	}
}

func fragmentKeyOf(v *packet.View) fragmentKey {
	_, _, id, _ := v.Fragment()
	k := fragmentKey{src: source(v), dst: destination(v), id: id}
	if v.Is4() {
		k.proto = v.Proto()
	}
	return k
}

// fragment enters a fragment in its datagram. done says that there is no more to do: it follows the
// first one, waits for it, or is refused. Otherwise it is the first and its flow has to be found;
// firstFragment then tells the others.
func (c *crossing) fragment() (verdict Verdict, done bool) {
	s := &c.r.peer.fragments[c.dir]
	var to addr
	var drop Drop
	var decided bool
	if c.tr == nil {
		to, decided, drop = s.admit(c.v, c.r.rule, c.now, c.e)
	} else if to, decided, drop = s.decision(c.v); decided && drop == DropNone && c.v.LaterFragment() {
		c.tr.Rule = "as the first fragment of its datagram"
	}
	switch {
	case drop != DropNone:
		return c.refuse(drop), true
	case !c.v.LaterFragment():
		return Verdict{}, false
	case !decided:
		return Verdict{Action: Hold, Peer: c.r.peer}, true
	}
	return c.forward(to, samePort), true
}

// firstFragment tells the store what becomes of the datagram of which the packet is the first
// fragment, as it came, and returns the fragments that were waiting, translated. The datagram may
// have to be dropped after all.
func (c *crossing) firstFragment(to addr, drop Drop) (*[][]byte, Drop) {
	s := &c.r.peer.fragments[c.dir]
	held, drop := s.decide(c.v, c.r.rule, c.dir, to, drop)
	if len(held) == 0 {
		return nil, drop
	}
	if drop != DropNone {
		s.lost(drop, len(held))
		return nil, drop
	}
	var w packet.View
	for _, b := range held {
		if w.Parse(b, packet.ChecksumComplete) == nil { // it did when it came
			c.e.forward(&w, c.r, c.dir, to, samePort)
		}
	}
	released := held // the pointer makes it escape, and held is for every first fragment
	return &released, DropNone
}

// decision is what was decided about the datagram of v.
func (s *fragmentStore) decision(v *packet.View) (to addr, decided bool, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[fragmentKeyOf(v)]; set != nil && (v.LaterFragment() || set.drop == DropFragment) {
		return set.to, set.decided, set.drop
	}
	return addr{}, false, DropNone
}

// admit enters v, judged by rule r, and returns what is decided about its datagram. A later
// fragment is copied when nothing is.
func (s *fragmentStore) admit(v *packet.View, r *rule, now tick, e *Engine) (to addr, decided bool, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outdated(r) {
		return addr{}, false, DropNoFlow
	}
	set := s.set(fragmentKeyOf(v), now, e)
	if set.drop == DropFragment {
		return addr{}, true, DropFragment
	}
	off, more, _, _ := v.Fragment()
	end := off + v.FragmentLen()
	part := span{uint16(off / 8), uint16((end + 7) / 8)}
	at, kind := set.place(part)
	switch {
	case set.contradicts(v, end, more), kind == overlap:
		s.spoil(set)
		return addr{}, true, DropFragment
	case kind == duplicate:
		return addr{}, true, DropFragment
	case len(set.seen) > e.config.MaxFragmentsPerSet:
		return addr{}, false, DropFragmentStoreFull
	case off > 0 && !set.decided && !s.hold(set, v, e):
		return addr{}, false, DropFragmentStoreFull
	}
	set.cover(at, part)
	if off == 0 {
		set.first = firstOctets(v)
	}
	if !more {
		set.total = end
	}
	to, decided, drop = set.to, set.decided, set.drop
	s.finish(set)
	return to, decided, drop
}

// decide enters what becomes of the datagram of v and returns the fragments that waited for it.
// There may be nothing to enter any more: the datagram gave way, or the rule did.
func (s *fragmentStore) decide(v *packet.View, r *rule, dir Direction, to addr, drop Drop) (held [][]byte, _ Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.sets[fragmentKeyOf(v)]
	if set == nil || set.decided || s.outdated(r) {
		return nil, drop
	}
	if drop == DropNone {
		after := set.key
		if dir == Outbound {
			after.src = to
		} else {
			after.dst = to
		}
		if s.after[after] == nil {
			s.after[after], set.after = set, after
		} else {
			drop = DropFragment
		}
	}
	set.decided, set.to, set.drop = true, to, drop
	held = s.release(set)
	s.finish(set)
	return held, drop
}

// outdated reports that a packet was judged by a rule which has just been replaced by a different
// one: what is decided by it must not be remembered.
func (s *fragmentStore) outdated(r *rule) bool {
	return s.rule != r && (s.rule == nil || !s.rule.spec.equal(r.spec))
}

// contradicts reports whether v, which ends at end, cannot be a part of the same datagram as what
// went by.
func (set *fragmentSet) contradicts(v *packet.View, end int, more bool) bool {
	reached := 0
	if n := len(set.seen); n > 0 {
		reached = int(set.seen[n-1].to) * 8
	}
	switch off, _, _, _ := v.Fragment(); {
	case more && set.total != 0 && end >= set.total, // goes on behind the end
		!more && set.total != 0 && end != set.total, // two ends
		!more && set.total == 0 && end <= reached:   // ends where it was seen to go on
		return true
	case off == 0 && len(set.seen) > 0 && set.seen[0].from == 0:
		return set.first != firstOctets(v)
	}
	return false
}

// firstOctets tells the first fragments of two datagrams apart.
func firstOctets(v *packet.View) uint64 {
	var b [8]byte
	copy(b[:], v.Bytes()[v.TransportOffset():])
	return binary.BigEndian.Uint64(b[:])
}

type placement uint8

const (
	fresh placement = iota
	duplicate
	overlap
)

// place finds where part belongs among the octets that went by.
func (set *fragmentSet) place(part span) (at int, kind placement) {
	for at < len(set.seen) && set.seen[at].to <= part.from {
		at++
	}
	switch {
	case at == len(set.seen) || part.to <= set.seen[at].from:
		return at, fresh
	case set.seen[at].from <= part.from && part.to <= set.seen[at].to:
		return at, duplicate
	}
	return at, overlap
}

// cover notes that part went by, which place has found to be fresh.
func (set *fragmentSet) cover(at int, part span) {
	left := at > 0 && set.seen[at-1].to == part.from
	right := at < len(set.seen) && set.seen[at].from == part.to
	switch {
	case left && right:
		set.seen[at-1].to = set.seen[at].to
		set.seen = slices.Delete(set.seen, at, at+1)
	case left:
		set.seen[at-1].to = part.to
	case right:
		set.seen[at].from = part.from
	default:
		set.seen = slices.Insert(set.seen, at, part)
	}
}

// hold copies v to wait for the first fragment; false when there is no room.
func (s *fragmentStore) hold(set *fragmentSet, v *packet.View, e *Engine) bool {
	n, limit := v.Len(), e.config.MaxFragmentBytes
	if len(set.held) >= e.config.MaxFragmentsPerSet || n > limit {
		return false
	}
	// A datagram may be larger than the share of its source: then it is the only one.
	for victim := set.host.own.oldest; victim != nil && set.host.bytes+n > limit/hostShare; {
		next := victim.links[ofHost].next
		if victim != set {
			s.remove(victim, DropFragmentStoreFull)
		}
		victim = next
	}
	for s.bytes+n > limit {
		victim := s.all.oldest
		s.remove(victim, DropFragmentStoreFull)
		if victim == set {
			return false
		}
	}
	s.bytes += n
	set.host.bytes += n
	set.held = append(set.held, append([]byte(nil), v.Bytes()...))
	return true
}

// release takes what a datagram holds.
func (s *fragmentStore) release(set *fragmentSet) (held [][]byte) {
	held, set.held = set.held, nil
	for _, b := range held {
		s.bytes -= len(b)
		set.host.bytes -= len(b)
	}
	return held
}

// finish forgets a decided datagram that went by as a whole.
func (s *fragmentStore) finish(set *fragmentSet) {
	if set.decided && set.total != 0 && len(set.seen) == 1 && set.seen[0] == (span{0, uint16((set.total + 7) / 8)}) {
		s.remove(set, DropNone)
	}
}

// spoil gives up a datagram that contradicts itself, and stays so that what comes later is dropped
// too.
func (s *fragmentStore) spoil(set *fragmentSet) {
	s.lost(DropFragment, len(s.release(set)))
	set.decided, set.drop = true, DropFragment
}

// set returns the entry for a datagram, made if need be.
func (s *fragmentStore) set(k fragmentKey, now tick, e *Engine) *fragmentSet {
	s.expire(now, e.lifetimes.fragment)
	if set := s.sets[k]; set != nil {
		return set
	}
	if s.sets == nil {
		s.sets = map[fragmentKey]*fragmentSet{}
		s.after = map[fragmentKey]*fragmentSet{}
		s.hosts = map[addr]*fragmentHost{}
	}
	limit := e.config.MaxFragmentSets
	if h := s.hosts[k.src]; h != nil && h.sets >= max(limit/hostShare, 1) {
		s.remove(h.own.oldest, DropFragmentStoreFull)
	}
	if len(s.sets) >= limit {
		s.remove(s.all.oldest, DropFragmentStoreFull)
	}
	h := s.hosts[k.src]
	if h == nil {
		h = pop(&s.idleHosts)
		s.hosts[k.src] = h
	}
	set := pop(&s.idleSets)
	*set = fragmentSet{key: k, host: h, born: now, seen: set.seen[:0]}
	s.all.push(set, ofAll)
	h.own.push(set, ofHost)
	h.sets++
	s.sets[k] = set
	return set
}

// pop takes the last of a list, or makes a new one.
func pop[T any](list *[]*T) *T {
	n := len(*list)
	if n == 0 {
		return new(T)
	}
	last := (*list)[n-1]
	*list = (*list)[:n-1]
	return last
}

// remove gives up an entry and counts what it still held.
func (s *fragmentStore) remove(set *fragmentSet, why Drop) {
	s.lost(why, len(s.release(set)))
	h := set.host
	s.all.unlink(set, ofAll)
	h.own.unlink(set, ofHost)
	delete(s.sets, set.key)
	if s.after[set.after] == set {
		delete(s.after, set.after)
	}
	s.idleSets = append(s.idleSets, set)
	if h.sets--; h.sets == 0 {
		delete(s.hosts, set.key.src)
		s.idleHosts = append(s.idleHosts, h)
	}
}

// expire gives up what is too old; entries are in the order of their birth.
func (s *fragmentStore) expire(now tick, lifetime int32) {
	for s.all.oldest != nil && now.since(s.all.oldest.born) > lifetime {
		s.remove(s.all.oldest, DropFragmentTimeout)
	}
}

func (s *fragmentStore) sweep(now tick, lifetime int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.expire(now, lifetime)
}

// setRule makes r the rule for what is decided from now on. What was decided by one that differs is
// forgotten.
func (s *fragmentStore) setRule(r *rule, differs bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rule = r
	for differs && s.all.oldest != nil {
		s.remove(s.all.oldest, DropFragmentTimeout)
	}
}

func (s *fragmentStore) stats() (sets, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sets), s.bytes
}
