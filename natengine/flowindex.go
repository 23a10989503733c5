package natengine

import (
	"sync/atomic"
)

// index finds entries by the hash of one tuple: open addressing with linear probing, in shards that
// grow one at a time so that no insert waits for more than a sixteenth of the table to be copied.
type index struct {
	slots   [shards]atomic.Pointer[slots]
	_       [64]byte
	filling [shards]filling // only for writers
	_       [64]byte
}

const (
	shardShift = 60
	shards     = 1 << (64 - shardShift)
	minSlots   = 32
)

// filling is how full the slots of a shard are.
type filling struct {
	live   int // slots in use
	filled int // slots in use or with a tombstone
}

// slots is an array of (low 32 bits of the hash) << 32 | (number of the entry + 1). A search ends
// at an empty slot, 0, but goes on after a tombstone. A slot's flow never moves within an array, so
// a search without lock cannot miss it. Slots are accessed atomically, except for reads with mu and
// in an array that is not yet published: a plain store takes a tenth of the time, and most stores
// are copies.
type slots struct{ list []uint64 }

const tombstone = 1 << 32

// home returns where the search for a tag begins; after returns the next place. Higher tags have
// higher places, so an array is copied into a larger one from one end to the other.
func (s *slots) home(tag uint32) uint { return uint(uint64(tag) * uint64(len(s.list)) >> 32) }

func (s *slots) after(at uint) uint {
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

// insert enters entry i under hash h. With mu.
func (x *index) insert(h uint64, i uint32) {
	s, fill := x.room(h>>shardShift), &x.filling[h>>shardShift]
	tag := uint32(h)
	for at := s.home(tag); ; at = s.after(at) {
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

// room returns the slots of a shard, at most three quarters filled, with room for one more entry.
// If need be it copies them into a larger array, or into one of the same size, which only drops the
// tombstones. Sizes are 2^n and 3*2^n.
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
				at = young.after(at)
			}
			young.list[at] = slot
		}
	}
	fill.filled = fill.live
	x.slots[shard].Store(young)
	return young
}

// remove removes entry i, which was inserted under hash h. With mu.
func (x *index) remove(h uint64, i uint32) {
	s, fill := x.slots[h>>shardShift].Load(), &x.filling[h>>shardShift]
	want := h<<32 | uint64(i+1)
	at := s.home(uint32(h))
	for s.list[at] != want {
		at = s.after(at)
	}
	fill.live--
	atomic.StoreUint64(&s.list[at], tombstone)
	// Tombstones before an empty slot are needless, because nothing lies behind them.
	for s.list[s.after(at)] == 0 && s.list[at] == tombstone {
		atomic.StoreUint64(&s.list[at], 0)
		fill.filled--
		at = s.before(at)
	}
}
