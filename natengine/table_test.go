package natengine

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// checkIndex compares an index with the expected entries. A search must find every expected entry,
// the index must have no other entry, and the counters of each shard must be correct.
func checkIndex(t *testing.T, x *index, want map[uint32]uint64) {
	t.Helper()
	for i, h := range want {
		s := x.slots[h>>shardShift].Load()
		at := s.home(uint32(h))
		for s.list[at] != h<<32|uint64(i+1) {
			if s.list[at] == 0 {
				t.Fatalf("entry %d with hash %#x is not found", i, h)
			}
			at = s.nextSlot(at)
		}
	}
	live := 0
	for shard := range x.slots {
		s, fill := x.slots[shard].Load(), x.filling[shard]
		if s == nil {
			continue
		}
		used, filled := 0, 0
		for at := range s.list {
			slot := s.list[at]
			if slot != 0 {
				filled++
			}
			if uint32(slot) != 0 {
				used++
			}
		}
		if used != fill.live || filled != fill.filled {
			t.Fatalf("shard %d counts %+v, has %d of which %d live", shard, fill, filled, used)
		}
		if filled*4 > len(s.list)*3 {
			t.Fatalf("shard %d: %d of %d slots are filled", shard, filled, len(s.list))
		}
		live += used
	}
	if live != len(want) {
		t.Fatalf("%d slots for %d entries", live, len(want))
	}
}

// Entries are inserted and removed at random. Many hashes start at the same slot, or at the
// last slots of an array, so that searches wrap around its end.
func TestIndexFindsEveryEntry(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var x index
		want := map[uint32]uint64{}
		var order []uint32 // keys of want
		next := uint32(0)
		for step := range 4000 {
			if grows := step/1000%2 == 0; len(order) == 0 || rng.IntN(4) == 0 != grows {
				h := rng.Uint64() &^ (7 << shardShift) // two shards
				switch rng.IntN(4) {
				case 0:
					h |= 0xffff_ff00
				case 1:
					h &^= 0xffff_fff0
				}
				x.insert(h, next)
				want[next] = h
				order = append(order, next)
				next++
			} else {
				n := rng.IntN(len(order))
				i := order[n]
				order[n] = order[len(order)-1]
				order = order[:len(order)-1]
				x.remove(want[i], i)
				delete(want, i)
			}
			if step%50 == 0 {
				checkIndex(t, &x, want)
			}
		}
		checkIndex(t, &x, want)
	}
}

// The package comment computes the memory per flow with these loads. An index that only grows is at
// least half full. When flows come and go, tombstones may make the index grow once more, so its
// load may fall to 5/12.
func TestIndexIsAtLeastFiveTwelfthsFull(t *testing.T) {
	var x index
	const n = 50_000
	rng := rand.New(rand.NewPCG(5, 6))
	var hashes [n]uint64
	size := func() int { return len(x.slots[0].Load().list) }
	for i := range uint32(n) {
		hashes[i] = rng.Uint64() >> 4 // all in the first shard
		x.insert(hashes[i], i)
		if live := x.filling[0].live; size() > minSlots && live*2 < size()-2 {
			t.Fatalf("%d entries in %d slots", live, size())
		}
	}
	for range 10 * n {
		i := rng.Uint32N(n)
		x.remove(hashes[i], i)
		hashes[i] = rng.Uint64() >> 4
		x.insert(hashes[i], i)
	}
	if n*12 < size()*5 {
		t.Errorf("%d entries in %d slots after inserts and removals", n, size())
	}
}

// Tuples that collide in one table must not collide in another.
func TestEachTableHasItsOwnHashKeys(t *testing.T) {
	k := key{near: addr4(0xac100001), remote: addr4(0x0a000007), word: wordOf(Outbound, 17, 4000, 53)}
	seen := map[uint64]bool{}
	for range 100 {
		keys := newHashKeys()
		seen[k.hash(&keys)] = true
	}
	if len(seen) != 100 {
		t.Errorf("%d hashes of one tuple in 100 tables", len(seen))
	}
}

// Each bit of a tuple of either family is changed. Both the shard and the tag must change, and
// on average half of the bits.
func TestHashDependsOnEveryBit(t *testing.T) {
	keys := newHashKeys()
	for _, k := range []key{
		{near: addr4(0xac100001), remote: addr4(0x0a000007), word: wordOf(Outbound, 17, 4000, 53)},
		{near: addrOf(ip("fd00:c::1")), remote: addrOf(ip("fd00:b::1")), word: wordOf(Inbound, 6, 443, 4000)},
	} {
		h := k.hash(&keys)
		differ, n := 0, 0
		for bit := range 64 {
			for field := range 5 {
				other := k
				*[]*uint64{&other.near.hi, &other.near.lo, &other.remote.hi, &other.remote.lo, &other.word}[field] ^= 1 << bit
				g := other.hash(&keys)
				if g == h {
					t.Errorf("bit %d of word %d does not matter", bit, field)
				}
				for b := h ^ g; b != 0; b &= b - 1 {
					differ++
				}
				n++
			}
		}
		if mean := float64(differ) / float64(n); mean < 28 || mean > 36 {
			t.Errorf("%.1f bits of 64 change on average", mean)
		}
	}
}

// A sweep in steps must end the same flows as a sweep without pauses. During the pauses,
// packets open flows of the same peer and refresh flows that the sweep has not reached, and
// the rules change.
func TestSweepHoldsNoLockDuringPauses(t *testing.T) {
	const flows, early = 60_000, 20_000
	e := newEngine(t, Config{MaxFlowsPerHost: flows + 1000}, benchPeers(1)[0])
	fill(t, e, flows, spread)
	later := 200 * time.Second
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	packetOf := func(i int, now time.Duration) {
		copy(pkt, tmpl)
		spread(i).write(pkt)
		if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := e.Outbound(&v, now); verdict.Action != Forward {
			t.Fatalf("flow %d: %v", i, verdict.Drop)
		}
	}
	for i := range early {
		packetOf(i, later) // refreshes a flow that the sweep has not reached
	}
	pauses := 0
	e.SweepInSteps(301*time.Second, func() {
		pauses++
		packetOf(flows+pauses, 301*time.Second)
		if pauses == 3 {
			p := benchPeers(1)[0]
			p.MTU = 1400
			if err := e.SetPeers([]Peer{p}); err != nil {
				t.Fatal(err)
			}
		}
	})
	if s := e.Stats().Peers[0]; s.Flows != early+pauses || s.Expired != flows-early {
		t.Errorf("%d flows after %d pauses, %d expired", s.Flows, pauses, s.Expired)
	}
	if least := (flows - early) * sweepRemovals / sweepWork / 4; pauses < least {
		t.Errorf("%d pauses, want at least %d", pauses, least)
	}
	e.checkTables(t)
}
