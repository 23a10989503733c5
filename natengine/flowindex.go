package natengine

import (
	"sync/atomic"
)

// index finds entries by the hash of one of their tuples. It is a hash table with open addressing
// and linear probing. Its sixteen shards grow one at a time, so an insert copies at most a
// sixteenth of the table.
type index struct {
	slots   [shards]atomic.Pointer[slots]
	_       [64]byte
	filling [shards]filling // used only by writers
	_       [64]byte
}

const (
	shardShift = 60
	shards     = 1 << (64 - shardShift)
	minSlots   = 32
)

// filling counts the slots of a shard that are in use.
type filling struct {
	live   int // slots in use
	filled int // slots in use or with a tombstone
}

// slots is an array of (low 32 bits of the hash) << 32 | (index of the entry + 1). A search ends at
// an empty slot, 0, but continues after a tombstone. A flow never moves to another slot of the same
// array, so a search without the lock cannot miss the flow. All accesses are atomic, with two
// exceptions: reads by the holder of mu, and accesses to an array that is not yet published. A
// plain store takes a tenth of the time of an atomic one, and most stores are copies into arrays
// that are not yet published.
type slots struct{ list []uint64 }

const tombstone = 1 << 32

// A tag is the low 32 bits of a hash. home returns the slot at which the search for a tag begins.
// nextSlot returns the slot that follows. A higher tag has a higher home, so an array can be copied
// into a larger one sequentially.
func (s *slots) home(tag uint32) uint { return uint(uint64(tag) * uint64(len(s.list)) >> 32) }

func (s *slots) nextSlot(at uint) uint {
	if at++; at < uint(len(s.list)) {
		return at
	}
	return 0
}

func (s *slots) before(at uint) uint {
	if at == 0 {
		at = uint(len(s.list))
	}
	return at - 1
}

// insert adds entry i, whose hash is h. The caller holds mu.
func (x *index) insert(h uint64, i uint32) {
	s, fill := x.room(h>>shardShift), &x.filling[h>>shardShift]
	tag := uint32(h)
	for at := s.home(tag); ; at = s.nextSlot(at) {
		slot := s.list[at]
		if uint32(slot) != 0 {
			continue
		}
		if slot == 0 {
			fill.filled++
		}
		fill.live++
		atomic.StoreUint64(&s.list[at], uint64(tag)<<32|uint64(i+1))
		return
	}
}

// room returns the slots of a shard, and makes sure that at most three quarters are filled after
// one more entry. If necessary, it copies the slots into a new array. The new array is larger,
// unless leaving out the tombstones makes enough room. Sizes are 2^n and 3*2^n.
func (x *index) room(shard uint64) *slots {
	old, fill := x.slots[shard].Load(), &x.filling[shard]
	if old != nil && (fill.filled+1)*4 <= len(old.list)*3 {
		return old
	}
	size := minSlots
	if old != nil {
		size = len(old.list)
		if fill.live*8 > size*5 {
			if size&(size-1) == 0 {
				size += size / 2
			} else {
				size += size / 3
			}
		}
	}
	young := &slots{make([]uint64, size)}
	if old != nil {
		for _, slot := range old.list {
			if uint32(slot) == 0 {
				continue
			}
			at := young.home(uint32(slot >> 32))
			for young.list[at] != 0 {
				at = young.nextSlot(at)
			}
			young.list[at] = slot
		}
	}
	fill.filled = fill.live
	x.slots[shard].Store(young)
	return young
}

// remove deletes entry i, which was inserted with hash h. The caller holds mu.
func (x *index) remove(h uint64, i uint32) {
	s, fill := x.slots[h>>shardShift].Load(), &x.filling[h>>shardShift]
	want := h<<32 | uint64(i+1)
	at := s.home(uint32(h))
	for s.list[at] != want {
		at = s.nextSlot(at)
	}
	fill.live--
	atomic.StoreUint64(&s.list[at], tombstone)
	// A tombstone before an empty slot is unnecessary, because no search needs to continue
	// there.
	for s.list[s.nextSlot(at)] == 0 && s.list[at] == tombstone {
		atomic.StoreUint64(&s.list[at], 0)
		fill.filled--
		at = s.before(at)
	}
}
