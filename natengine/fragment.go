package natengine

import (
	"sync"

	"github.com/isthmus-net/isthmus/packet"
)

// # Inbound
//
// The engine holds every fragment from a peer until its datagram is complete, even if a 1:1 map
// applies. The node behind the gateway reassembles for all peers and pods in one small memory
// (nf_defrag, by default 4 MiB and 30 s). So it must never receive an incomplete datagram from a
// peer. A complete datagram is joined, filtered and translated like an unfragmented packet.
//
//	IPv4   leaves as one packet without DF; the kernel fragments it again if a link requires it
//	IPv6   leaves in fragments of 1,280 octets, because no router may fragment it
//
// # Outbound
//
// Later fragments have no ports. A 1:1 map needs no ports, so the engine translates each fragment
// as it arrives. If no 1:1 map applies, the decision about the first fragment applies to the whole
// datagram. The engine stores this decision until all octets of the datagram have passed. Later
// fragments that arrive before the first one are copied and held. Outbound fragments are not
// reassembled, because the receiver does that. The peer's gateway has bounds of its own against
// floods of fragments from our pods.
//
// # Both directions
//
// The engine forwards each octet of a datagram only once, and all octets in the same flow. So a
// fragment cannot overwrite a header that was already checked. The rules for both families are
// those of Linux's reassembly (net/ipv4/inet_fragment.c):
//
//	a fragment whose octets have all arrived     is a duplicate and is dropped
//	a fragment that overlaps others in part,     invalidates the datagram: this fragment, the held
//	  contradicts the known end, or is a           fragments and all later ones are dropped until
//	  second, different first fragment             the entry expires (RFC 5722, section 4)
//
// A datagram may reuse an identification while fragments of an earlier datagram are missing. The
// engine then drops the new datagram, so that it is not mixed with the earlier one (RFC 4963). Two
// of our hosts behind the NAPT address may also use the same identification, because the engine
// does not rewrite it. The engine then forwards the earlier datagram, and drops the later one.
// Outbound fragments under a 1:1 map are not compared with each other: the map needs no port, and
// the receiver reassembles the datagram.

// fragmentStore holds the incomplete datagrams of one peer and direction. Config sets bounds on
// datagrams, octets and fragments. At the bound on datagrams or octets, the oldest datagram is
// evicted, and DropFragmentStoreFull counts each of its held fragments. If new datagrams were
// refused instead, a flood of incomplete datagrams could block the store. Eviction does little
// harm, because a datagram without lost fragments needs its entry only for milliseconds. One source
// may use a quarter of the store. If it needs more, its own oldest datagram is evicted, so that a
// flood from one host does not displace the datagrams of other hosts.
type fragmentStore struct {
	mu         sync.Mutex
	rule       *rule                        // outbound: the rule on which the stored decisions are based
	sets       map[fragmentKey]*fragmentSet // by key before translation
	after      map[fragmentKey]*fragmentSet // outbound: forwarded datagrams, by key after translation
	hosts      map[addr]*fragmentHost
	all        fragmentList
	bytes      int
	countDrops func(d Drop, n int) // counts held fragments that are dropped

	// Entries for reuse, so that a datagram whose fragments arrive in order allocates nothing.
	idleSets  []*fragmentSet
	idleHosts []*fragmentHost
}

// One source may use 1/hostShare of the store.
const hostShare = 4

// fragmentKey identifies a datagram. For IPv4 the key includes the protocol (RFC 791), for IPv6 it
// does not (RFC 8200).
type fragmentKey struct {
	src, dst addr
	id       uint32
	proto    uint8
}

// fragmentHost records how much of the store one source uses.
type fragmentHost struct {
	own   fragmentList
	sets  int
	bytes int
}

// fragmentList is a list of datagrams, oldest first. Each datagram is in two lists: one of all
// datagrams (ofAll) and one of its source (ofHost).
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

// minMTU6 is the size of the largest IPv6 packet that every link accepts (RFC 8200, section
// 5).
const minMTU6 = 1280

// join holds an inbound fragment until its datagram is complete, and then processes the
// datagram like any packet. A dropped datagram is counted once for each fragment.
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
		s.countDrops(verdict.Drop, len(fragments)-1)
	}
	return verdict
}

// joined translates the datagram of these fragments. Unless the datagram is dropped, c.v
// becomes the datagram or its first new fragment.
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
			return c.refuse(DropFragment) // the headers do not fit into one fragment
		}
		if rest := pieces[1:]; len(rest) > 0 {
			verdict.released = &rest
		}
	}
	*c.v = w
	return verdict
}

// join stores v. If v was the last missing fragment, join returns all fragments of the datagram in
// arbitrary order: v itself, and copies of the others, which the caller owns. If fragments are
// still missing, join returns nil. It then holds a copy of v, unless it drops v.
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

// fragment records an outbound fragment. If the packet is the first fragment, done is false, and
// the caller must find its flow and call firstFragment. Any other fragment is forwarded if the
// stored decision permits it, held if there is no decision yet, or refused. In these cases, done is
// true.
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

// The packet is the first fragment of an outbound datagram, and must not have been translated.
// firstFragment stores the decision on this datagram. It translates the fragments that waited for
// the decision, and returns them. The returned drop may differ from the argument: if another
// datagram already has the key that this one would have after translation, this one is dropped.
func (c *translation) firstFragment(to addr, drop Drop) (*[][]byte, Drop) {
	s := &c.r.peer.fragments[Outbound]
	held, drop := s.decide(c.v, c.r.rule, to, drop)
	if len(held) == 0 {
		return nil, drop
	}
	if drop != DropNone {
		s.countDrops(drop, len(held))
		return nil, drop
	}
	var w packet.View
	for _, b := range held {
		if w.Parse(b, packet.ChecksumComplete) == nil { // always succeeds: the fragment parsed when it arrived
			c.e.forward(&w, c.r, c.dir, to, samePort)
		}
	}
	released := held // only this copy escapes to the heap; &held would allocate held for every first fragment
	return &released, DropNone
}

// decision returns the stored decision on the datagram of v.
func (s *fragmentStore) decision(v *packet.View) (to addr, decided bool, drop Drop) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if set := s.sets[fragmentKeyOf(v)]; set != nil && (v.LaterFragment() || set.drop == DropFragment) {
		return set.to, set.decided, set.drop
	}
	return addr{}, false, DropNone
}

// Rule r applies to fragment v. admit records v, and returns the decision on its datagram. If there
// is no decision yet, admit holds a copy of v, unless v is the first fragment.
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

// decide stores the decision on the datagram of v and returns the fragments that waited for it. It
// stores nothing if the entry of the datagram is gone, because of an eviction or a new rule.
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

// While the caller used r from its rule table, another rule may have replaced r. outdated returns
// true if the new rule permits other flows than r. The caller must then not store a decision based
// on r.
func (s *fragmentStore) outdated(r *rule) bool {
	return s.rule != r && (s.rule == nil || !s.rule.spec.sameFlows(r.spec))
}

// hold keeps a copy of v until the other fragments arrive. It reports false if there is no room.
func (s *fragmentStore) hold(set *fragmentSet, v *packet.View, e *Engine) bool {
	n, limit := v.Len(), e.config.MaxFragmentBytes
	if len(set.held) >= e.config.MaxFragmentsPerSet || n > limit {
		return false
	}
	// If the source has no other datagram, this one may exceed the bound for one source.
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

// release removes the held fragments from a datagram and returns them.
func (s *fragmentStore) release(set *fragmentSet) (held [][]byte) {
	held, set.held = set.held, nil
	for _, b := range held {
		s.bytes -= len(b)
		set.host.bytes -= len(b)
	}
	return held
}

// finish removes the entry of a decided datagram once all its octets have passed.
func (s *fragmentStore) finish(set *fragmentSet) {
	if set.decided && set.total != 0 && len(set.seen) == 1 && set.seen[0] == (span{0, uint16((set.total + 7) / 8)}) {
		s.remove(set, DropNone)
	}
}

// spoil drops a datagram whose fragments contradict each other. Its entry stays, so that later
// fragments are dropped too.
func (s *fragmentStore) spoil(set *fragmentSet) {
	s.countDrops(DropFragment, len(s.release(set)))
	set.decided, set.drop = true, DropFragment
}

// set returns the entry for a datagram, and makes one if necessary.
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

// pop removes and returns the last element of a list, or returns a new one if the list is
// empty.
func pop[T any](list *[]*T) *T {
	n := len(*list)
	if n == 0 {
		return new(T)
	}
	last := (*list)[n-1]
	*list = (*list)[:n-1]
	return last
}

// remove deletes an entry. It counts each fragment that the entry still held as a drop for the
// given reason.
func (s *fragmentStore) remove(set *fragmentSet, reason Drop) {
	s.countDrops(reason, len(s.release(set)))
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

// expire removes the entries that are too old. The list is in order of creation.
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

// setRule makes r the rule for further decisions. If flowsDiffer is true, it drops all incomplete
// datagrams, because their decisions may be based on the previous rule.
func (s *fragmentStore) setRule(r *rule, flowsDiffer bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rule = r
	for flowsDiffer && s.all.oldest != nil {
		s.remove(s.all.oldest, DropFragmentTimeout)
	}
}

func (s *fragmentStore) stats() (sets, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sets), s.bytes
}
