package natengine

import (
	"hash/maphash"
	"slices"
	"unsafe"
)

// hostTable counts the flows of each host of one peer and remembers which of them may be evicted: the hosts inside for
// NAPT flows, those of the peer for flows to mapped endpoints. A host is known as long as it has a flow. Used with the
// flow table's mutex.
type hostTable struct {
	seed   maphash.Seed
	hosts  pool[host]
	chains chains
	live   int
	free   uint32
	quota  uint32 // flows that a host may have
	full   int    // hosts that have as many
}

type host struct {
	addr  addr
	flows uint32
	next  uint32 // in its chain, or in the free list
	queue queue  // its part of the flow table's queue
}

func (t *hostTable) hashOf(a addr) uint64 {
	return maphash.Bytes(t.seed, unsafe.Slice((*byte)(unsafe.Pointer(&a)), unsafe.Sizeof(a)))
}

func (t *hostTable) hash(number uint32) uint64  { return t.hashOf(t.at(number).addr) }
func (t *hostTable) next(number uint32) *uint32 { return &t.at(number).next }
func (t *hostTable) at(number uint32) *host     { return t.hosts.at(number) }

// find returns the number of a host, 0 when it has no flow.
func (t *hostTable) find(a addr) uint32 {
	i := t.chains.first(t.hashOf(a))
	for i != 0 && t.at(i).addr != a {
		i = t.at(i).next
	}
	return i
}

// hold gives a host one more flow. The caller sees to the quota.
func (t *hostTable) hold(a addr) (number uint32) {
	if number = t.find(a); number == 0 {
		number = t.add(a)
	}
	h := t.at(number)
	if h.flows++; h.flows == t.quota {
		t.full++
	}
	return number
}

func (t *hostTable) add(a addr) uint32 {
	i := t.free
	if i != 0 {
		t.free = t.at(i).next
	} else {
		i = t.hosts.add()
	}
	t.at(i).addr = a
	t.chains.insert(t, i)
	t.live++
	return i
}

// release takes a flow from a host. Its queue no longer has the flow.
func (t *hostTable) release(number uint32) {
	h := t.at(number)
	if h.flows == t.quota {
		t.full--
	}
	if h.flows--; h.flows > 0 {
		return
	}
	t.chains.remove(t, number)
	*h = host{next: t.free}
	t.free = number
	t.live--
}

// setQuota takes effect for new flows.
func (t *hostTable) setQuota(quota uint32) {
	if quota == t.quota {
		return
	}
	t.quota, t.full = quota, 0
	for i := range t.hosts.used {
		if t.at(i+1).flows >= quota {
			t.full++
		}
	}
}

func (t *hostTable) bytes() int {
	return t.hosts.bytes() + t.chains.bytes()
}

// A half-open flow waits for its eviction in two queues, oldest first: that of its peer and that of its host. It enters
// both when it is opened, or found closed by a sweep, and leaves them when it ends or is met, by a sweep or an eviction,
// after it was established. stateQueued says that it is in them.
const (
	queueOfPeer = iota
	queueOfHost
	queues
)

type queue struct{ head, tail uint32 }

type link struct{ prev, next uint32 }

func (t *flowTable) link(i uint32, which int) *link { return &t.side(i).links[which] }

// queuesOf returns the queues for a flow. With mu.
func (t *flowTable) queuesOf(i uint32, word uint64) [queues]*queue {
	return [queues]*queue{&t.queue, &t.hosts[kindOf(word)].at(t.side(i).host).queue}
}

// enqueue puts a flow, which is in neither, at the end of its queues. With mu.
func (t *flowTable) enqueue(i uint32) {
	e := t.entry(i)
	for which, q := range t.queuesOf(i, e.word.Load()) {
		*t.link(i, which) = link{prev: q.tail}
		if q.tail == 0 {
			q.head = i + 1
		} else {
			t.link(q.tail-1, which).next = i + 1
		}
		q.tail = i + 1
	}
	e.word.Or(stateQueued)
}

// dequeue takes a flow off its queues, if it is there. With mu.
func (t *flowTable) dequeue(i uint32) {
	e := t.entry(i)
	word := e.word.Load()
	if word&stateQueued == 0 {
		return
	}
	e.word.And(^uint64(stateQueued))
	for which, q := range t.queuesOf(i, word) {
		l := *t.link(i, which)
		if l.prev == 0 {
			q.head = l.next
		} else {
			t.link(l.prev-1, which).next = l.next
		}
		if l.next == 0 {
			q.tail = l.prev
		} else {
			t.link(l.next-1, which).prev = l.prev
		}
	}
}

// evictSteps bounds the work of one eviction. Flows that were established since they were queued are taken off as they
// are met; as each is met once, and sweeps take off most of them, the first few are enough.
const evictSteps = 32

// evict removes the oldest half-open flow of a queue. With mu.
func (t *flowTable) evict(q *queue) bool {
	for range evictSteps {
		if q.head == 0 {
			return false
		}
		i := q.head - 1
		if halfOpen(t.entry(i).word.Load()) {
			t.remove(i)
			t.evicted.Add(1)
			return true
		}
		t.dequeue(i)
	}
	return false
}

// evictable reports whether evict would find something when the flows of late are gone. With mu.
func (t *flowTable) evictable(q *queue, which int, late []uint32) bool {
	at := q.head
	for n := 0; n < evictSteps && at != 0; n++ {
		if halfOpen(t.entry(at-1).word.Load()) && !slices.Contains(late, at-1) {
			return true
		}
		at = t.link(at-1, which).next
	}
	return false
}

// quotas says how many flows each of n peers is assured of, and how many a peer and a host may have.
func (c *Config) quotas(n int) (share, peer, host int) {
	share = max(c.MaxFlows/max(n, 1), 1)
	peer = share
	if c.MaxFlowsPerPeer > 0 {
		peer = min(c.MaxFlowsPerPeer, c.MaxFlows)
	}
	host = c.MaxFlowsPerHost
	if host <= 0 {
		host = min(max(peer/4, minHostQuota), maxHostQuota)
	}
	return share, peer, min(host, peer)
}

// Bounds of the default for MaxFlowsPerHost. The upper one is a quarter of the ports of a protocol, so that no host can
// take all of them from the others.
const (
	minHostQuota = 1 << 10
	maxHostQuota = 1 << 14
)

// room says where the place of a new flow comes from.
type room uint8

const (
	roomFree      room = iota // MaxFlows is not reached
	roomElsewhere             // from a peer that has more than its equal share of MaxFlows
	roomOwn                   // from the peer itself
)

// reserve takes one of MaxFlows for a new flow of p, to be given back when it is not opened. dry takes nothing.
func (e *Engine) reserve(p *PeerState, dry bool) room {
	n := e.total.Load() + 1
	if !dry {
		n = e.total.Add(1)
	}
	switch {
	case n <= int64(e.config.MaxFlows):
		return roomFree
	case p.flows.live.Load() < e.share.Load():
		return roomElsewhere
	}
	return roomOwn
}

// displace ends a half-open flow of a peer that has more than its share in favour of p, which has less. dry ends nothing.
// Without any mu, as two peers' would be needed.
func (e *Engine) displace(p *PeerState, dry bool) bool {
	share := e.share.Load()
	rules := e.rules.Load().rules
	first := int(e.yielded.Load()) // a flood goes on for a while: the peer that gave way last is asked first
	for i := range rules {
		at := (first + i) % len(rules)
		if other := rules[at].peer; other != p && other.flows.live.Load() > share && other.flows.yield(dry) {
			if !dry {
				e.yielded.Store(uint32(at))
			}
			return true
		}
	}
	return false
}

// yield ends the oldest half-open flow for another peer's sake.
func (t *flowTable) yield(dry bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if dry {
		return t.evictable(&t.queue, queueOfPeer, nil)
	}
	return t.evict(&t.queue)
}

func (p *PeerState) setHostQuota(quota uint32) {
	t := &p.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	for kind := range t.hosts {
		t.hosts[kind].setQuota(quota)
	}
}
