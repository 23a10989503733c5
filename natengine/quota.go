package natengine

import (
	"hash/maphash"
	"math"
	"slices"
	"unsafe"
)

// hostTable counts the flows of each host of one peer and orders them for eviction. The table for
// NAPT flows has our hosts, and the table for flows to mapped endpoints has the peer's hosts. A
// host without a flow is not in the table. The flow table's mutex guards all fields.
type hostTable struct {
	flows   *flowTable
	kind    flowKind
	seed    maphash.Seed
	hosts   pool[host]
	chains  chains
	live    int
	free    uint32
	quota   uint32 // maximum number of flows of a host
	full    int    // number of counted hosts that have reached the quota
	counted uint32 // the hosts with numbers up to this one are counted; math.MaxUint32: all hosts; see setHostQuota
}

// A host has a list of its flows: first the flows in the eviction queue, oldest first, then all
// others. A host does not store its address: the first flow has it.
type host struct {
	flows  uint32
	head   uint32 // first flow of the list; its link prev is the last flow
	queued uint32 // last flow in the eviction queue, 0 for none
	next   uint32 // next number in the chain or in the free list
}

func (t *hostTable) at(number uint32) *host     { return t.hosts.at(number) }
func (t *hostTable) next(number uint32) *uint32 { return &t.at(number).next }
func (t *hostTable) hash(number uint32) uint64  { return t.hashOf(t.addr(number)) }

func (t *hostTable) hashOf(a addr) uint64 {
	return maphash.Bytes(t.seed, unsafe.Slice((*byte)(unsafe.Pointer(&a)), unsafe.Sizeof(a)))
}

func (t *hostTable) addr(number uint32) addr {
	return t.flows.entry(t.at(number).head - 1).owner(t.kind)
}

// owner returns the address of the host whose quota counts a flow: our end of a NAPT flow, the
// peer's end of a flow to a mapped endpoint.
func (e *entry) owner(kind flowKind) addr {
	of := &e.near[Outbound]
	if kind == endpointFlow {
		of = &e.remote
	}
	return addr{of[0].Load(), of[1].Load()}
}

// find returns the number of the host with address a, or 0 if it has no flow.
func (t *hostTable) find(a addr) uint32 {
	i := t.chains.firstNumber(t.hashOf(a))
	for i != 0 && t.addr(i) != a {
		i = t.at(i).next
	}
	return i
}

// hold adds one to the number of a host's flows. The caller must check the quota. Before the table
// looks up another host, the caller must enter the flow into the host's list or call release.
func (t *hostTable) hold(a addr) (number uint32) {
	if number = t.find(a); number == 0 {
		if number = t.free; number != 0 {
			t.free = t.at(number).next
		} else {
			number = t.hosts.add()
		}
		t.chains.insert(t, number, t.hashOf(a))
		t.live++
	}
	h := t.at(number)
	if h.flows++; h.flows == t.quota && number <= t.counted {
		t.full++
	}
	return number
}

// release subtracts one from the number of flows of the host with address a. The flow must already
// have left the host's list.
func (t *hostTable) release(number uint32, a addr) {
	h := t.at(number)
	if h.flows == t.quota && number <= t.counted {
		t.full--
	}
	if h.flows--; h.flows > 0 {
		return
	}
	t.chains.remove(t, number, t.hashOf(a))
	*h = host{next: t.free}
	t.free = number
	t.live--
}

func (t *hostTable) link(i uint32) *link { return t.flows.link(i, queueOfHost) }

// enter adds flow i to the list of its host. If queued is true, the flow becomes the last one in
// the eviction queue. Otherwise it becomes the last one in the whole list.
func (t *hostTable) enter(h *host, i uint32, queued bool) {
	l, number := t.link(i), i+1
	after := h.queued
	switch {
	case h.head == 0:
		*l = link{prev: number}
		h.head = number
	case queued && after == 0:
		first := t.link(h.head - 1)
		*l = link{prev: first.prev, next: h.head}
		first.prev, h.head = number, number
	default:
		first := t.link(h.head - 1)
		if !queued {
			after = first.prev
		}
		before := t.link(after - 1)
		*l = link{prev: after, next: before.next}
		before.next = number
		if l.next != 0 {
			first = t.link(l.next - 1)
		}
		first.prev = number
	}
	if queued {
		h.queued = number
	}
}

// detach removes a flow from the list of its host.
func (t *hostTable) detach(h *host, i uint32) {
	l, number := *t.link(i), i+1
	if h.queued == number {
		if h.queued = l.prev; h.head == number {
			h.queued = 0
		}
	}
	if h.head == number {
		if h.head = l.next; l.next != 0 {
			t.link(l.next - 1).prev = l.prev
		}
		return
	}
	t.link(l.prev - 1).next = l.next
	if l.next == 0 {
		l.next = h.head
	}
	t.link(l.next - 1).prev = l.prev
}

// setQuota sets the quota for new flows. The caller must then call count until it returns
// false.
func (t *hostTable) setQuota(quota uint32) {
	if quota != t.quota {
		t.quota, t.full, t.counted = quota, 0, 0
	}
}

// count examines the next hostsAtOnce hosts, and counts those that have reached the quota. It
// returns true if hosts remain to be examined. After setQuota, it begins with the first host again.
func (t *hostTable) count() (more bool) {
	for range hostsAtOnce {
		if t.counted >= t.hosts.used {
			t.counted = math.MaxUint32
			return false
		}
		if t.counted++; t.at(t.counted).flows >= t.quota {
			t.full++
		}
	}
	return true
}

// hostsAtOnce is the number of hosts that one call of count examines. New flows of the peer wait
// during that call, for about 30 µs.
const hostsAtOnce = 1 << 13

func (t *hostTable) bytes() int {
	return t.hosts.bytes() + t.chains.bytes()
}

// A half-open flow is in two eviction queues, each ordered by age. One is a queue of its peer, with
// the flows that have ports of the same class, family and range. The other is the queue of its
// host. A flow enters both queues when it is opened, or when a sweep finds it closed. It leaves
// both when it ends, or when a sweep or an eviction finds it established. The bit stateQueued is
// set while the flow is in its queues.
const (
	queueOfPeer = iota
	queueOfHost
	queues
)

type queue struct{ head, tail uint32 }

// For each family, a peer has one queue for ICMP queries, and one for each range of the TCP and UDP
// ports at the NAPT address. The last queue is for flows without such a port. flowTable.order shows
// which of two flows in different queues has waited longer.
const (
	withoutPort   = 4 * int(noPorts)
	waitingQueues = withoutPort + 1
)

// waitingSet is a set of queues of a peer, one bit each.
type waitingSet uint32

const allWaiting waitingSet = 1<<waitingQueues - 1

func waitingIn(class portClass, family int, r portRange) int {
	if class == icmpIDs {
		r = wellKnown // identifiers have no ranges
	}
	return (family*int(noPorts)+int(class))*2 + int(r)
}

// portSet.choose may pick a port for an inside port. waitingFor returns the queues with the flows
// that occupy such ports.
func waitingFor(class portClass, family int, port uint16) waitingSet {
	set := waitingSet(1) << waitingIn(class, family, user)
	if rangeOf(port) == wellKnown {
		set |= 1 << waitingIn(class, family, wellKnown)
	}
	return set
}

// queueFor returns the peer's queue for an existing flow. The caller holds mu.
func (t *flowTable) queueFor(e *entry, word uint64) *queue {
	local := addr{e.near[Outbound][0].Load(), e.near[Outbound][1].Load()}
	class := classOf(protoOf(word), local.is4())
	if kindOf(word) != naptFlow || class == noPorts {
		return &t.waiting[withoutPort]
	}
	return &t.waiting[waitingIn(class, local.family(), rangeOf(uint16(word>>nearShift[Inbound])))]
}

// longestWaiting returns the index in heads of the flow that has waited longest, or -1 if all
// queues are empty. Each element of heads is the first flow of a queue, or 0 if the queue is empty.
// The caller holds mu.
func (t *flowTable) longestWaiting(heads *[waitingQueues]uint32) int {
	found := -1
	for i, at := range heads {
		if at != 0 && (found < 0 || int32(*t.order(at - 1)-*t.order(heads[found] - 1)) < 0) {
			found = i
		}
	}
	return found
}

// heads returns the flows among which longestWaiting chooses. If h is nil, these are the first
// flows of the peer's queues in set. Otherwise it is the first flow in the queue of host h. The
// caller holds mu.
func (t *flowTable) heads(h *host, set waitingSet) (heads [waitingQueues]uint32) {
	if h != nil {
		if h.queued != 0 {
			heads[0] = h.head
		}
		return heads
	}
	for i := range t.waiting {
		if set>>i&1 != 0 {
			heads[i] = t.waiting[i].head
		}
	}
	return heads
}

type link struct{ prev, next uint32 }

func (t *flowTable) link(i uint32, which int) *link { return &t.side(i).links[which] }

// hostOf returns the host of a flow. The caller holds mu.
func (t *flowTable) hostOf(i uint32, word uint64) (*hostTable, *host) {
	hosts := &t.hosts[kindOf(word)]
	return hosts, hosts.at(t.side(i).host)
}

// enqueue appends a flow to its two queues; the flow must be in neither. If the flow is new,
// stateQueued is already set, and enqueue also adds it to the list of its host. The caller
// holds mu.
func (t *flowTable) enqueue(i uint32, isNew bool) {
	e := t.entry(i)
	word := e.word.Load()
	q := t.queueFor(e, word)
	hosts, h := t.hostOf(i, word)
	*t.order(i) = t.entered
	t.entered++
	if !isNew {
		hosts.detach(h, i)
	}
	hosts.enter(h, i, true)
	*t.link(i, queueOfPeer) = link{prev: q.tail}
	if q.tail == 0 {
		q.head = i + 1
	} else {
		t.link(q.tail-1, queueOfPeer).next = i + 1
	}
	q.tail = i + 1
	if !isNew {
		e.word.Or(stateQueued)
		t.follow(i, false)
	}
}

// dequeue removes a flow from its queues, if it is in them. If the flow ends, dequeue also
// removes it from the list of its host. The caller holds mu.
func (t *flowTable) dequeue(i uint32, ended bool) {
	e := t.entry(i)
	word := e.word.Load()
	queued := word&stateQueued != 0
	if hosts, h := t.hostOf(i, word); queued || ended {
		if hosts.detach(h, i); !ended {
			hosts.enter(h, i, false)
		}
	}
	if !queued {
		return
	}
	e.word.And(^uint64(stateQueued))
	q, l := t.queueFor(e, word), *t.link(i, queueOfPeer)
	if l.prev == 0 {
		q.head = l.next
	} else {
		t.link(l.prev-1, queueOfPeer).next = l.next
	}
	if l.next == 0 {
		q.tail = l.prev
	} else {
		t.link(l.next-1, queueOfPeer).prev = l.prev
	}
	if !ended {
		t.follow(i, false)
	}
}

// requeue enqueues a flow that is half-open, such as a closed connection, and dequeues one that is
// not. The caller holds mu.
func (t *flowTable) requeue(i uint32, word uint64) {
	switch queued := word&stateQueued != 0; {
	case halfOpen(word) && !queued:
		t.enqueue(i, false)
	case !halfOpen(word) && queued:
		t.dequeue(i, false)
	}
}

// evictSteps bounds the work of one eviction. An eviction may find queued flows that have become
// established in the meantime. It dequeues these flows and continues. There are few, because sweeps
// dequeue most of them.
const evictSteps = 32

// evict removes the oldest half-open flow of host h, or of the peer if h is nil. The caller
// holds mu.
func (t *flowTable) evict(h *host) bool { return t.evictFrom(h, allWaiting) }

// evictPort removes the peer's oldest half-open flow with a port that portSet.choose may pick for
// the given inside port. This port is then free, unless other flows share it. The caller holds mu.
func (t *flowTable) evictPort(class portClass, family int, port uint16) bool {
	return t.evictFrom(nil, waitingFor(class, family, port))
}

func (t *flowTable) evictFrom(h *host, set waitingSet) bool {
	for range evictSteps {
		heads := t.heads(h, set)
		at := t.longestWaiting(&heads)
		if at < 0 {
			return false
		}
		head := heads[at]
		if halfOpen(t.entry(head - 1).word.Load()) {
			t.remove(head-1, FlowEvicted)
			t.evicted.Add(1)
			return true
		}
		t.dequeue(head-1, false)
	}
	return false
}

// evictable reports whether evictFrom would find a flow to evict after the flows in stale were
// removed. The caller holds mu.
func (t *flowTable) evictable(h *host, set waitingSet, stale []uint32) bool {
	which := queueOfPeer
	if h != nil {
		which = queueOfHost
	}
	heads := t.heads(h, set)
	for range evictSteps + len(stale) {
		i := t.longestWaiting(&heads)
		if i < 0 {
			break
		}
		at := heads[i]
		word := t.entry(at - 1).word.Load()
		if word&stateQueued == 0 {
			break
		}
		if halfOpen(word) && !slices.Contains(stale, at-1) {
			return true
		}
		heads[i] = t.link(at-1, which).next
	}
	return false
}

// quotas returns three numbers of flows: the equal share of each of n peers, the maximum for a
// peer, and the maximum for a host.
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

// Bounds of the default for MaxFlowsPerHost. The upper bound is a quarter of the ports of a
// protocol, so that no host can take all ports.
const (
	minHostQuota = 1 << 10
	maxHostQuota = 1 << 14
)

// room states how a new flow gets an entry.
type room uint8

const (
	roomFree      room = iota // MaxFlows is not reached: no eviction is needed
	roomElsewhere             // evict a flow of a peer that has more than its equal share of MaxFlows
	roomOwn                   // evict a flow of the same peer
)

// reserve counts a new flow of p against MaxFlows. If the flow is not opened, the caller must undo
// the count. With dryRun, reserve counts nothing.
func (e *Engine) reserve(p *PeerState, dryRun bool) room {
	n := e.total.Load() + 1
	if !dryRun {
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

// p has fewer flows than its equal share. displace makes room for a flow of p: it ends a half-open
// flow of a peer that exceeds its share. With dryRun, it only reports whether there is such a flow.
// The caller must hold no peer's mu, because displace locks the mu of another peer.
func (e *Engine) displace(p *PeerState, dryRun bool) bool {
	share := e.share.Load()
	rules := e.rules.Load().rules
	// A flood usually continues, so the peer that yielded last is tried first.
	first := int(e.yielded.Load())
	for i := range rules {
		at := (first + i) % len(rules)
		if other := rules[at].peer; other != p && other.flows.live.Load() > share && other.flows.yield(dryRun) {
			if !dryRun {
				e.yielded.Store(uint32(at))
			}
			return true
		}
	}
	return false
}

// yield ends the oldest half-open flow, to make room for a flow of another peer. With dryRun, it
// only reports whether there is such a flow.
func (t *flowTable) yield(dryRun bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if dryRun {
		return t.evictable(nil, allWaiting, nil)
	}
	return t.evict(nil)
}

// setHostQuota sets the quota of hosts, which applies immediately. It then counts the hosts that
// have reached the quota. It counts in steps, because new flows need the lock. After each step, it
// releases the lock and calls pause.
func (p *PeerState) setHostQuota(quota uint32, pause func()) {
	t := &p.flows
	for kind := range t.hosts {
		hosts := &t.hosts[kind]
		t.mu.Lock()
		hosts.setQuota(quota)
		for hosts.count() {
			t.mu.Unlock()
			pause()
			t.mu.Lock()
		}
		t.mu.Unlock()
	}
}
