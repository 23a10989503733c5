package natengine

import (
	"sync"

	"github.com/isthmus-net/isthmus/packet"
)

// # Inbound
//
// A peer's fragments are held until their datagram is complete, whatever rule applies to it. The
// node behind the gateway reassembles in one small memory for all peers and pods (nf_defrag, 4 MiB
// and 30 s by default), so it must never see an incomplete datagram of a peer. A complete datagram
// is joined, filtered and translated like an unfragmented packet.
//
//	IPv4   leaves as one packet without DF, which the kernel cuts again where a link needs it
//	IPv6   leaves in fragments of 1,280 octets, since no router may cut it
//
// # Outbound
//
// Later fragments have no ports. A 1:1 map needs none and translates each fragment as it arrives.
// Where a flow decides, the first fragment decides for its datagram. The decision is stored until
// all octets of the datagram have passed. Later fragments that arrive before the first one are
// copied and held. Outbound fragments are not reassembled: the receiver does that, and the peer's
// gateway bounds our pods.
//
// # Both
//
// Each octet of a datagram passes once, and all of them in one flow, so a fragment cannot overwrite
// a header that was checked. The rules are those of Linux's reassembly (net/ipv4/inet_fragment.c),
// for both families:
//
//	only octets that came before             a duplicate, dropped
//	overlaps in part, ends elsewhere than    ends the datagram: its held, present and later fragments
//	  the last fragment said, or is another    are dropped until it expires (RFC 5722, section 4)
//	  first fragment
//
// A datagram that reuses an identification while fragments of the earlier one are missing is
// dropped, not mixed with it (RFC 4963). Outbound, two hosts behind the NAPT address may use the
// same identification, which is not rewritten. Then the earlier datagram passes and the other is
// dropped. Outbound fragments under a 1:1 map are not compared: the map needs no port, and the
// receiver reassembles.

// fragmentStore holds the incomplete datagrams of one peer and direction. Config has its three
// bounds. At a bound the oldest datagram is evicted, and DropFragmentStoreFull counts each of its
// held fragments. Refusing new datagrams instead would let a flood of incomplete ones block the
// store; a datagram whose fragments arrive needs its entry only for milliseconds. One source may
// use a quarter of the store. At that bound its own oldest datagram is evicted, so that a flood of
// one host does not displace the datagrams of others.
type fragmentStore struct {
	mu    sync.Mutex
	rule  *rule                        // outbound: the rule that made the decisions here
	sets  map[fragmentKey]*fragmentSet // by key before translation
	after map[fragmentKey]*fragmentSet // outbound: forwarded datagrams, by key after translation
	hosts map[addr]*fragmentHost
	all   fragmentList
	bytes int
	lost  func(d Drop, n int) // counts held fragments that are dropped

	// Entries for reuse, so that a datagram whose fragments come in order costs no garbage.
	idleSets  []*fragmentSet
	idleHosts []*fragmentHost
}

// hostShare is the part of the store that one source may take, as a divisor.
const hostShare = 4

// fragmentKey identifies a datagram. The protocol is part of it in IPv4 (RFC 791), not in IPv6 (RFC
// 8200).
type fragmentKey struct {
	src, dst addr
	id       uint32
	proto    uint8
}

// fragmentHost is the part of the store that one source has.
type fragmentHost struct {
	own   fragmentList
	sets  int
	bytes int
}

// fragmentList is a list of datagrams, oldest first; kind says which of their links it uses.
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

// minMTU6 is the largest packet of IPv6 that every link takes (RFC 8200, section 5).
const minMTU6 = 1280

// join holds an inbound fragment until its datagram is complete, and then handles the datagram like
// any packet. A drop is counted once for each fragment.
func (c *translation) join() Verdict {
	if _, _, _, drop := c.reach(); drop != DropNone {
		return c.refuse(drop)
	}
	hold := Verdict{Action: Hold, Peer: c.r.peer}
	if c.tr != nil {
		return hold
	}
	s := &c.r.peer.fragments[Inbound]
	fragments, drop := s.join(c.v, c.now, c.e)
	switch {
	case drop != DropNone:
		return c.refuse(drop)
	case fragments == nil:
		return hold
	}
	verdict := c.joined(fragments)
	if verdict.Action == Discard {
		s.lost(verdict.Drop, len(fragments)-1)
	}
	return verdict
}

// joined translates the datagram of these fragments. The packet becomes the datagram or its first
// fragment, unless it is dropped.
func (c *translation) joined(fragments [][]byte) Verdict {
	whole, err := packet.Join(fragments)
	if err != nil {
		return c.refuse(DropFragment)
	}
	var w packet.View
	if w.Parse(whole, packet.ChecksumComplete) != nil {
		return c.refuse(DropMalformed)
	}
	verdict := c.e.inbound(&w, c.r, c.now, nil)
	if verdict.Action == Discard {
		return verdict
	}
	if verdict.Action == Forward && !w.Is4() {
		_, _, id, _ := c.v.Fragment()
		pieces := w.Split6(minMTU6, id)
		if len(pieces) == 0 || w.Parse(pieces[0], packet.ChecksumComplete) != nil {
			return c.refuse(DropFragment) // headers that no fragment can hold
		}
		if rest := pieces[1:]; len(rest) > 0 {
			verdict.released = &rest
		}
	}
	*c.v = w
	return verdict
}

// join stores v. If v was the last missing fragment, it returns all fragments of the datagram in no
// order: v and copies of the others, owned by the caller. Nil means that v was copied and is held.
func (s *fragmentStore) join(v *packet.View, now tick, e *Engine) (fragments [][]byte, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.set(fragmentKeyOf(v), now, e)
	f := set.fit(v)
	switch {
	case f.kind == contradiction:
		s.spoil(set)
		return nil, DropFragment
	case f.kind == duplicate:
		return nil, DropFragment
	case set.completes(f):
		fragments = append(s.release(set), v.Bytes())
		s.remove(set, DropNone)
		return fragments, DropNone
	case !s.hold(set, v, e):
		return nil, DropFragmentStoreFull
	}
	set.enter(v, f)
	return nil, DropNone
}

// fragment records an outbound fragment. done: nothing is left to do, because the fragment follows
// the first one, waits for it, or is refused. Otherwise it is the first fragment, and the caller
// finds its flow and calls firstFragment.
func (c *translation) fragment() (verdict Verdict, done bool) {
	s := &c.r.peer.fragments[Outbound]
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

// firstFragment stores the decision on the datagram of which the packet is the first outbound
// fragment, not yet translated. It returns the fragments that waited for it, translated. The
// returned drop may differ from the given one: another datagram may occupy the key after
// translation.
func (c *translation) firstFragment(to addr, drop Drop) (*[][]byte, Drop) {
	s := &c.r.peer.fragments[Outbound]
	held, drop := s.decide(c.v, c.r.rule, to, drop)
	if len(held) == 0 {
		return nil, drop
	}
	if drop != DropNone {
		s.lost(drop, len(held))
		return nil, drop
	}
	var w packet.View
	for _, b := range held {
		if w.Parse(b, packet.ChecksumComplete) == nil { // it parsed when it arrived
			c.e.forward(&w, c.r, c.dir, to, samePort)
		}
	}
	released := held // the pointer moves it to the heap; held stays on the stack for all first fragments
	return &released, DropNone
}

// decision returns what was decided about the datagram of v.
func (s *fragmentStore) decision(v *packet.View) (to addr, decided bool, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[fragmentKeyOf(v)]; set != nil && (v.LaterFragment() || set.drop == DropFragment) {
		return set.to, set.decided, set.drop
	}
	return addr{}, false, DropNone
}

// admit records v, to which rule r applies, and returns the decision on its datagram. Without a
// decision it copies and holds a later fragment.
func (s *fragmentStore) admit(v *packet.View, r *rule, now tick, e *Engine) (to addr, decided bool, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.outdated(r) {
		return addr{}, false, DropNoFlow
	}
	set := s.set(fragmentKeyOf(v), now, e)
	f := set.fit(v)
	switch {
	case f.kind == contradiction:
		s.spoil(set)
		return addr{}, true, DropFragment
	case f.kind == duplicate:
		return addr{}, true, DropFragment
	case len(set.seen) > e.config.MaxFragmentsPerSet:
		return addr{}, false, DropFragmentStoreFull
	case v.LaterFragment() && !set.decided && !s.hold(set, v, e):
		return addr{}, false, DropFragmentStoreFull
	}
	set.enter(v, f)
	to, decided, drop = set.to, set.decided, set.drop
	s.finish(set)
	return to, decided, drop
}

// decide stores the decision on the datagram of v and returns the fragments that waited for it.
// The datagram's entry may be gone: it was evicted, or its rule was removed.
func (s *fragmentStore) decide(v *packet.View, r *rule, to addr, drop Drop) (held [][]byte, _ Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	set := s.sets[fragmentKeyOf(v)]
	if set == nil || set.decided || s.outdated(r) {
		return nil, drop
	}
	if drop == DropNone {
		after := set.key
		after.src = to
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

// outdated reports whether rule r has just been replaced by one that permits other flows. A
// decision by r must then not be stored.
func (s *fragmentStore) outdated(r *rule) bool {
	return s.rule != r && (s.rule == nil || !s.rule.spec.sameFlows(r.spec))
}

// hold copies v until other fragments arrive. It reports false if there is no room.
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

// release takes the held fragments out of a datagram and returns them.
func (s *fragmentStore) release(set *fragmentSet) (held [][]byte) {
	held, set.held = set.held, nil
	for _, b := range held {
		s.bytes -= len(b)
		set.host.bytes -= len(b)
	}
	return held
}

// finish removes a decided datagram of which every octet has passed.
func (s *fragmentStore) finish(set *fragmentSet) {
	if set.decided && set.total != 0 && len(set.seen) == 1 && set.seen[0] == (span{0, uint16((set.total + 7) / 8)}) {
		s.remove(set, DropNone)
	}
}

// spoil drops a datagram whose fragments contradict each other. Its entry stays, so that later
// fragments are dropped too.
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

// remove removes an entry and counts the fragments that it still held.
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

// expire removes the entries that are too old; they are in the order of their creation.
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

// setRule makes r the rule for further decisions, and forgets those of a rule that differs.
// Inbound, no decision is made before a datagram is complete, so only removing the peer has an
// effect.
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
