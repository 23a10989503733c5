package natengine

import (
	"sync/atomic"

	"github.com/isthmus-net/isthmus/packet"
)

// Lookahead loads the flows of a batch of packets into the caches before the engine processes the
// packets one by one. If there are more flows than the caches hold, each lookup waits for memory
// twice: first for its slot in the index, then for the entry. With Lookahead, all lookups of a
// batch wait at the same time. Lookahead does not affect verdicts.
//
// The gateway uses Lookahead for packets from the tunnel. Packets from the TUN device do not come
// in batches, because the gateway reads them one at a time into the same buffer. Bulk traffic comes
// from the device as superpackets, so one lookup serves many segments.
//
// A Lookahead is scratch for one goroutine; the zero value is ready to use. For each batch
// call Begin. If that returns true, call Add with each packet and then Fetch.
type Lookahead struct {
	rules  *ruleTable
	dir    Direction
	n      int
	wanted [lookaheadMax]wanted
}

// wanted is one pending lookup. It records the slot at which the search begins and, once the slots
// are in the cache, the entry that the search will find.
type wanted struct {
	table *flowTable
	slots *slots
	first *uint64
	tag   uint32
	entry *entry
}

const (
	// lookaheadMax is the size of a batch of wireguard-go. Lookahead ignores packets beyond it.
	lookaheadMax = 128

	// Lookahead takes 25 to 30 ns per packet. With lookaheadFrom flows or more, it saves more than
	// that. The entries and the index are then several times larger than a second-level cache of 1
	// MiB (BenchmarkNAPTHit, 2026-11).
	lookaheadFrom = 1 << 15
)

// Begin starts a batch of one direction. It returns false if there are so few flows that Lookahead
// would save no time.
func (l *Lookahead) Begin(e *Engine, dir Direction) bool {
	if e.total.Load() < lookaheadFrom {
		return false
	}
	l.rules, l.dir, l.n = e.rules.Load(), dir, 0
	return true
}

// Add records the lookup that the engine will make for packet v, if it will make one. v must not
// have been translated.
func (l *Lookahead) Add(v *packet.View) {
	if l.n == len(l.wanted) || !v.HasPorts() {
		return
	}
	var k key
	nearPort, farPort := v.SrcPort(), v.DstPort()
	if l.dir == Outbound {
		k.near, k.remote = source(v), destination(v)
	} else {
		k.near, k.remote = destination(v), source(v)
		nearPort, farPort = farPort, nearPort
	}
	k.word = wordOf(l.dir, v.Proto(), nearPort, farPort)
	r := l.rules.flowsOf(&k, v.Is4(), l.dir)
	if r == nil {
		return
	}
	t := &r.peer.flows
	h := k.hash(&t.keys)
	if s := t.index[l.dir].slots[h>>shardShift].Load(); s != nil {
		w := &l.wanted[l.n]
		w.table, w.slots, w.tag = t, s, uint32(h)
		w.first = &s.list[s.home(w.tag)]
		l.n++
	}
}

// flowsOf returns the remote of the peer that may have a flow with tuple k. It returns nil if no
// peer has the remote address, or if our end is mapped 1:1 and needs no flow.
func (t *ruleTable) flowsOf(k *key, is4 bool, dir Direction) *remote {
	if is4 {
		r := t.remotes4.lookup(uint32(k.remote.lo))
		if r == nil || dir == Outbound && r.out.maps(uint32(k.near.lo)) || dir == Inbound && r.in.maps(uint32(k.near.lo)) {
			return nil
		}
		return r
	}
	r := t.remotes6.lookup(k.remote)
	if r == nil || dir == Outbound && r.out6.maps(k.near) || dir == Inbound && r.in6.maps(k.near) {
		return nil
	}
	return r
}

// Fetch loads the table entries for the added packets into the cache. Each loop's loads are
// independent of each other, so the processor overlaps them. Prefetch instructions were not faster.
func (l *Lookahead) Fetch() {
	batch := l.wanted[:l.n]
	for i := range batch {
		atomic.LoadUint64(batch[i].first)
	}
	for i := range batch {
		w := &batch[i]
		w.entry = w.table.candidate(w.slots, w.tag)
	}
	for i := range batch {
		if f := batch[i].entry; f != nil {
			f.seq.Load()
		}
	}
	clear(batch) // otherwise l could keep the tables of a removed peer in memory
	l.rules, l.n = nil, 0
}

// candidate returns the first entry in s whose hash has tag as its lower half, or nil. The caller
// has selected s by the upper bits of the hash.
func (t *flowTable) candidate(s *slots, tag uint32) *entry {
	for at := s.home(tag); ; at = s.nextSlot(at) {
		slot := atomic.LoadUint64(&s.list[at])
		if slot == 0 {
			return nil
		}
		if uint32(slot>>32) == tag && uint32(slot) != 0 {
			return t.entry(uint32(slot) - 1)
		}
	}
}
