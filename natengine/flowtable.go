package natengine

import (
	"math"
	"sync"
	"sync/atomic"
	"unsafe"
)

// flowTable holds the flows of one peer. Writers hold mu. Readers take no lock: an index never
// moves a slot within an array and replaces an array as a whole, and a chunk of entries stays at
// its address.
type flowTable struct {
	keys   hashKeys
	total  *atomic.Int64 // flows of all peers
	peer   *PeerState    // the peer that owns the flows
	events *flowEvents
	index  [directions]index
	slab   atomic.Pointer[[]chunk]

	_ [64]byte // separates the fields that new flows write from the cache lines that lookups read

	mu      sync.Mutex
	live    atomic.Int64         // entries in use; changed under mu
	used    uint32               // number of entries that were ever in use
	free    uint32               // head of the list of entries that were used before, as index + 1; linked by side.links
	waiting [waitingQueues]queue // half-open flows of the peer
	entered uint32               // number of flows that have entered a queue; wraps
	hosts   [2]hostTable         // by flowKind: our hosts with NAPT flows, the peer's hosts with endpoint flows
	napt    napt

	created, expired, evicted, purged atomic.Uint64
	halfOpen                          atomic.Int64 // counted by the last sweep
}

const (
	chunkBits = 8
	chunkSize = 1 << chunkBits
)

// chunk holds 256 entries. The fields that only writers need are in separate arrays, so that a hit
// touches one cache line. A chunk takes 23 KiB, which is affordable even for a thousand peers with
// one or two flows each. When chunks could grow, every hit took 1 to 2 ns longer.
type chunk struct {
	entries *[chunkSize]entry
	sides   *[chunkSize]side
	orders  *[chunkSize]uint32 // see flowTable.order; separate, so that the array of sides fills a size class of the allocator
	sweep   *sweepState
}

// sweepState records when a chunk must be swept next. A sweep skips chunks that have not
// changed and in which no flow can have expired.
type sweepState struct {
	// due is one of the constants below, or dueAt | the tick at which the first flow may expire.
	due      atomic.Uint64
	halfOpen int // half-open flows at the last sweep; used only by the sweeper
}

const (
	dueNow   = iota // a flow has changed
	dueAfter        // a sweep is in progress, and no flow has changed since it began
	dueNever        // the chunk has no flow
	dueAt    = 1 << 32
)

// changed makes the next sweep examine the chunk of entry i.
func (t *flowTable) changed(i uint32) {
	slab := *t.slab.Load()
	if due := &slab[i>>chunkBits].sweep.due; due.Load() != dueNow {
		due.Store(dueNow)
	}
}

// side holds the fields of an entry that only writers need.
type side struct {
	host   uint32 // number in hosts
	opened tick
	links  [queues]link // neighbours in the eviction queues, as index + 1; the first also serves the free list
}

func (t *flowTable) entry(i uint32) *entry {
	slab := *t.slab.Load()
	return &slab[i>>chunkBits].entries[i%chunkSize]
}

func (t *flowTable) side(i uint32) *side {
	slab := *t.slab.Load()
	return &slab[i>>chunkBits].sides[i%chunkSize]
}

// order returns a pointer to the sequence number of a flow in its queues: the value of
// flowTable.entered when it was enqueued.
func (t *flowTable) order(i uint32) *uint32 {
	slab := *t.slab.Load()
	return &slab[i>>chunkBits].orders[i%chunkSize]
}

// find looks up the flow with key k. The caller need not hold mu. If another goroutine inserts or
// removes the flow at that moment, find may or may not return it.
func (t *flowTable) find(dir Direction, k *key) (m match, ok bool) {
	ok = t.search(dir, k, &m)
	return m, ok
}

// search is find, but writes the flow to m, because a struct of this size is not returned in
// registers.
func (t *flowTable) search(dir Direction, k *key, m *match) bool {
	h := k.hash(&t.keys)
	s := t.index[dir].slots[h>>shardShift].Load()
	if s == nil {
		return false
	}
	tag := uint32(h)
	for at := s.home(tag); ; at = s.nextSlot(at) {
		slot := atomic.LoadUint64(&s.list[at])
		if uint32(slot>>32) != tag || uint32(slot) == 0 {
			if slot == 0 {
				return false
			}
			continue
		}
		m.index = uint32(slot) - 1
		m.entry = t.entry(m.index)
		if m.read(dir, k) {
			return true
		}
	}
}

// read reports whether k is a key of m.entry. If so, it copies the word and the other address of
// the entry into m.
func (m *match) read(dir Direction, k *key) bool {
	e := m.entry
	seq, word := e.seq.Load(), e.word.Load()
	if seq&1 != 0 || (word^k.word)&matchMask[dir] != 0 || word&stateLive == 0 {
		return false
	}
	near, other := &e.near[dir], &e.near[1-dir]
	if near[1].Load() != k.near.lo || e.remote[1].Load() != k.remote.lo ||
		near[0].Load() != k.near.hi || e.remote[0].Load() != k.remote.hi {
		return false
	}
	m.word, m.other.hi, m.other.lo = word, other[0].Load(), other[1].Load()
	return e.seq.Load() == seq
}

// keyAt returns the key of a live entry. The caller holds mu.
func (e *entry) keyAt(dir Direction) key {
	return key{
		near:   addr{e.near[dir][0].Load(), e.near[dir][1].Load()},
		remote: addr{e.remote[0].Load(), e.remote[1].Load()},
		word:   e.word.Load() & matchMask[dir],
	}
}

// hash returns the hash of the entry's key, without making the key. The caller holds mu.
func (e *entry) hash(dir Direction, keys *hashKeys) uint64 {
	near, word := &e.near[dir], e.word.Load()&matchMask[dir]
	return keys.hash(near[0].Load(), near[1].Load(), e.remote[0].Load(), e.remote[1].Load(), word)
}

// insert adds a flow. Neither of its tuples may be in the table. The caller must already have
// counted the flow for its host, for its port at the NAPT address, and in total. The caller holds
// mu.
func (t *flowTable) insert(local, mapped, remote addr, word uint64, host uint32, now tick) match {
	i, fresh := t.allocate()
	e := t.entry(i)
	word |= stateQueued // set here, because enqueue would need one more atomic exchange
	if !fresh {         // no reader can find a fresh entry
		e.seq.Add(1)
	}
	set(&e.near[Outbound], local)
	set(&e.near[Inbound], mapped)
	set(&e.remote, remote)
	e.seen.Store(uint32(now))
	e.word.Store(word)
	if !fresh {
		e.seq.Add(1)
	}
	*t.side(i) = side{host: host, opened: now}
	t.changed(i)
	t.enqueue(i, true)
	for dir := range t.index {
		t.index[dir].insert(e.hash(Direction(dir), &t.keys), i)
	}
	t.live.Add(1)
	t.created.Add(1)
	t.follow(i, false)
	return match{entry: e, index: i, word: word}
}

// set writes only the words that differ. An atomic store takes as long as twenty loads, and the
// upper words of IPv4 addresses and the NAPT address rarely change.
func set(words *[2]atomic.Uint64, a addr) {
	if words[0].Load() != a.hi {
		words[0].Store(a.hi)
	}
	if words[1].Load() != a.lo {
		words[1].Store(a.lo)
	}
}

// allocate returns an unused entry. fresh is true if the entry was never used before. The caller
// holds mu.
func (t *flowTable) allocate() (i uint32, fresh bool) {
	if t.free != 0 {
		i = t.free - 1
		t.free = t.side(i).links[0].next
		return i, false
	}
	i = t.used
	t.used++
	if i%chunkSize == 0 {
		t.addChunk()
	}
	return i, true
}

// addChunk makes room for another 256 entries. Readers may keep the old slice header, because its
// elements never change.
func (t *flowTable) addChunk() {
	var slab []chunk
	if p := t.slab.Load(); p != nil {
		slab = *p
	}
	slab = append(slab, chunk{new([chunkSize]entry), new([chunkSize]side), new([chunkSize]uint32), new(sweepState)})
	t.slab.Store(&slab)
}

// remove deletes a live flow, releases its port and reports the reason to the observer. The caller
// holds mu.
func (t *flowTable) remove(i uint32, reason FlowEnd) {
	t.report(i, FlowClosed, Outbound, reason)
	t.follow(i, true)
	e, s := t.entry(i), t.side(i)
	t.dequeue(i, true)
	for dir := range t.index {
		t.index[dir].remove(e.hash(Direction(dir), &t.keys), i)
	}
	word := e.word.Load()
	e.seq.Add(1)
	e.word.Store(0)
	e.seq.Add(1)
	t.changed(i)
	kind, local := kindOf(word), addr{e.near[Outbound][0].Load(), e.near[Outbound][1].Load()}
	if class := classOf(protoOf(word), local.is4()); kind == naptFlow && class != noPorts {
		t.napt.release(s.host, uint16(word>>nearShift[Outbound]), class, local.family())
	}
	t.hosts[kind].release(s.host, e.owner(kind))
	*s = side{links: [queues]link{{next: t.free}}}
	t.free = i + 1
	t.live.Add(-1)
	t.total.Add(-1)
}

// purgeStep is the number of flows that purge may end before it releases the lock. This takes about
// 50 microseconds.
const purgeStep = 32

// purge ends the flows that rule r does not permit, or all flows if r is nil. It reads flows
// without the lock. It takes the lock only to end flows, at most purgeStep at a time, so a new flow
// waits for no more than one step. After each step, purge releases the lock and calls pause. r must
// already be the rule for new flows.
func (t *flowTable) purge(r *rule, pause func()) {
	slab := t.slab.Load()
	if slab == nil {
		return
	}
	for c, chunk := range *slab {
		for first := 0; first < chunkSize; first += purgeStep {
			t.purgeSome(uint32(c<<chunkBits|first), chunk.entries[first:first+purgeStep], r)
			pause()
		}
	}
}

// purgeSome purges the given entries of the table; first is the index of entries[0].
func (t *flowTable) purgeSome(first uint32, entries []entry, r *rule) {
	locked := false
	for n := range entries {
		e := &entries[n]
		if e.matches(r) {
			continue
		}
		if !locked {
			t.mu.Lock()
			defer t.mu.Unlock()
			locked = true
		}
		if !e.matches(r) { // before we took the lock, the flow may have ended, or another flow may have got the entry
			t.remove(first+uint32(n), FlowPurged)
			t.purged.Add(1)
		}
	}
}

// matches returns false if the entry has a flow that rule r does not permit; a nil rule permits
// none. If the caller does not hold mu, it may also return false for an entry that is being
// written.
func (e *entry) matches(r *rule) bool {
	seq, word := e.seq.Load(), e.word.Load()
	switch {
	case seq&1 != 0:
		return false
	case word&stateLive == 0:
		return true
	case r == nil:
		return false
	}
	out, in := e.keyAt(Outbound), e.keyAt(Inbound)
	return r.permits(kindOf(word), protoOf(word), out.near, in.near, out.remote) && e.seq.Load() == seq
}

// sweepStep counts the work of a sweep since its last pause.
type sweepStep struct {
	work  int // entries examined, plus sweepRemovals for each entry removed
	pause func()
}

const (
	sweepWork     = 1 << 14
	sweepRemovals = 100
)

// sweep removes expired flows and returns their number. It reads a chunk only if the chunk has
// changed or one of its flows may have expired. It reads without the lock. It takes the lock only
// for a chunk with flows to remove or requeue, so a new flow never waits for more than one chunk.
func (t *flowTable) sweep(l *lifetimes, now tick, step *sweepStep) (removed int) {
	slab := t.slab.Load()
	if slab == nil {
		return 0
	}
	halfOpens := 0
	for c, chunk := range *slab {
		s := chunk.sweep
		if due := s.due.Load(); due == dueNever || due >= dueAt && now.since(tick(uint32(due))) < 0 {
			halfOpens += s.halfOpen
			continue
		}
		s.due.Store(dueAfter)
		half, expired, next := t.sweepChunk(uint32(c), chunk.entries, l, now)
		s.due.CompareAndSwap(dueAfter, next)
		s.halfOpen = half
		halfOpens += half
		removed += expired
		if step.work += chunkSize + expired*sweepRemovals; step.work >= sweepWork {
			step.work = 0
			step.pause()
		}
	}
	t.halfOpen.Store(int64(halfOpens))
	t.expired.Add(uint64(removed))
	return removed
}

// sweepChunk sweeps one chunk. due is the new value for sweepState.due.
func (t *flowTable) sweepChunk(c uint32, entries *[chunkSize]entry, l *lifetimes, now tick) (halfOpens, removed int, due uint64) {
	locked := false
	left := int32(math.MaxInt32) // ticks until the first flow of the chunk may expire
	for n := range entries {
		e := &entries[n]
		word := e.word.Load()
		if word&stateLive == 0 {
			continue
		}
		half := halfOpen(word)
		queued := word&stateQueued != 0
		remaining := l.of(word) - now.since(tick(e.seen.Load()))
		late := remaining < 0
		if !late {
			left = min(left, remaining)
			if half {
				halfOpens++
			}
			if half == queued {
				continue
			}
		}
		if !locked {
			t.mu.Lock()
			defer t.mu.Unlock()
			locked = true
		}
		// Check again. Before we took the lock, a packet may have refreshed the flow, or another
		// flow may have got the entry.
		i := c<<chunkBits | uint32(n)
		word = e.word.Load()
		if word&stateLive == 0 {
			continue
		}
		remaining = l.of(word) - now.since(tick(e.seen.Load()))
		left = min(left, max(remaining, 0))
		if remaining < 0 {
			t.remove(i, FlowExpired)
			removed++
		} else {
			t.requeue(i, word)
		}
	}
	if left == math.MaxInt32 {
		return halfOpens, removed, dueNever
	}
	return halfOpens, removed, dueAt | uint64(uint32(now)+uint32(left)+1)
}

// bytes returns the memory of the table. The caller holds mu.
func (t *flowTable) bytes() int {
	n := t.napt.bytes() + t.hosts[naptFlow].bytes() + t.hosts[endpointFlow].bytes()
	if slab := t.slab.Load(); slab != nil {
		each := chunkSize*(unsafe.Sizeof(entry{})+unsafe.Sizeof(side{})+unsafe.Sizeof(t.entered)) + unsafe.Sizeof(sweepState{})
		n += len(*slab)*int(each) + cap(*slab)*int(unsafe.Sizeof(chunk{}))
	}
	for dir := range t.index {
		for i := range t.index[dir].slots {
			if s := t.index[dir].slots[i].Load(); s != nil {
				n += len(s.list) * 8
			}
		}
	}
	return n
}
