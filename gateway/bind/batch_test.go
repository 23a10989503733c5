package bind

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"golang.zx2c4.com/wireguard/conn"
)

func TestABatchIsSplitIntoMessages(t *testing.T) {
	type place struct{ conn.Endpoint }
	here, there := new(place), new(place)
	var b Batch
	add := func(text string, segment int, from *place) { b.Received(copy(b.Space(), text), segment, from) }
	for range 2 { // the second iteration reuses the memory of the first
		add("aabbc", 2, here)
		add("ddd", 0, there)
		add("eeff", 2, there)
		add("g", 8, here)
		for i, want := range []struct {
			text string
			from *place
		}{{"aa", here}, {"bb", here}, {"c", here}, {"ddd", there}, {"ee", there}, {"ff", there}, {"g", here}} {
			if b.Empty() {
				t.Fatalf("empty before message %d", i)
			}
			m, from := b.Next()
			if string(m) != want.text || from != want.from || cap(m) != len(m) {
				t.Errorf("message %d: %q from %p with room for %d, want %+v", i, m, from, cap(m), want)
			}
		}
		if m, from := b.Next(); !b.Empty() || m != nil || from != nil {
			t.Errorf("%q after the last", m)
		}
		b.Reset()
	}
}

// Received messages must stay in place while more are received, because they wait in the
// memory of a batch.
func TestReceivedMessagesStayUnchangedUntilReset(t *testing.T) {
	var b Batch
	var taken [][]byte
	for i := 0; b.Space() != nil; i++ {
		b.Received(copy(b.Space(), []byte{byte(i), byte(i >> 8)}), 0, nil)
		m, _ := b.Next()
		taken = append(taken, m)
	}
	for i, m := range taken {
		if len(m) != 2 || m[0] != byte(i) || m[1] != byte(i>>8) {
			t.Fatalf("message %d is %x", i, m)
		}
	}
	if b.Reset(); b.Space() == nil {
		t.Error("no room after Reset")
	}
	n := 0
	for ; b.Space() != nil; n++ {
		b.Received(0, 0, nil)
	}
	if n > slabLen/slabAlign {
		t.Errorf("%d empty datagrams in one batch", n)
	}
}

// The next messages reuse the memory of messages that were not kept. Kept messages do not
// change.
func TestBatchReusesTheMemoryOfDiscardedMessages(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var b Batch
	var kept [][]byte
	octets, n := 0, byte(0)
	for round := range 1000 {
		for range 1 + rng.IntN(10) {
			space := b.Space()
			if space == nil {
				t.Fatalf("round %d: no room, though %d octets are kept", round, octets)
			}
			size, segment := rng.IntN(3000), 0
			if rng.IntN(2) == 0 {
				segment = 1 + rng.IntN(1500)
			}
			for i := range size {
				if segment == 0 && i == 0 || segment > 0 && i%segment == 0 {
					n++
				}
				space[i] = n
			}
			b.Received(size, segment, nil)
		}
		for !b.Empty() {
			m, _ := b.Next()
			if len(m) > 0 && rng.IntN(50) == 0 {
				m = b.Keep(m)
				kept, octets = append(kept, m), octets+len(m)
			}
		}
		b.Pack()
		for i, m := range kept {
			if bytes.Count(m, m[:1]) != len(m) || cap(m) != len(m) {
				t.Fatalf("round %d: message %d has changed", round, i)
			}
		}
		if b.used > octets+2*slabAlign*len(kept) {
			t.Fatalf("round %d: %d octets are used by %d messages of %d octets", round, b.used, len(kept), octets)
		}
		if octets > slabLen/4 {
			b.Reset()
			kept, octets = nil, 0
		}
	}
}
