package bind

import (
	"testing"

	"golang.zx2c4.com/wireguard/conn"
)

func TestABatchIsTakenApart(t *testing.T) {
	type place struct{ conn.Endpoint }
	here, there := new(place), new(place)
	var b Batch
	add := func(text string, segment int, from *place) { b.Received(copy(b.Space(), text), segment, from) }
	for range 2 { // the second time in the memory of the first
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

// Received messages stay in place while more are received, because they wait in the memory of a batch.
func TestMessagesStayUntilReset(t *testing.T) {
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
