package bind

import (
	"testing"

	"golang.zx2c4.com/wireguard/conn"
)

func TestABatchIsTakenApart(t *testing.T) {
	type place struct{ conn.Endpoint }
	here, there := new(place), new(place)
	var b Batch
	for range 2 { // the second time in the memory of the first
		b.Add([]byte("aabbc"), 2, here)
		b.Add([]byte("ddd"), 0, there)
		b.Add([]byte("eeff"), 2, there)
		b.Add([]byte("g"), 8, here)
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
	}
}
