package gateway

import (
	"runtime/debug"
	"testing"
)

func TestGarbageIsBoundedForLargeHeaps(t *testing.T) {
	for _, tc := range []struct {
		live uint64
		want int
	}{{0, 100}, {5 << 20, 100}, {24 << 20, 100}, {48 << 20, 50}, {150 << 20, 16}, {240 << 20, 10}, {8 << 30, 10}} {
		if got := gcPercent(tc.live); got != tc.want {
			t.Errorf("%d MiB: %d %%, want %d", tc.live>>20, got, tc.want)
		}
	}
}

func TestGCTargetFollowsTheHeap(t *testing.T) {
	t.Setenv("GOGC", "")
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	var c collector
	big := make([]byte, 160<<20)
	debug.FreeOSMemory() // runs a garbage collection
	c.adjust()
	set := debug.SetGCPercent(100)
	if set > 15 || set < minGCPercent {
		t.Errorf("%d %% with %d MiB in use", set, len(big)>>20)
	}
	clear(big[:1])
	debug.FreeOSMemory()
	c.adjust()
	// Memory of earlier tests may still be in use.
	if now := debug.SetGCPercent(100); now < 2*set {
		t.Errorf("GOGC is %d after the memory was released, and was %d before", now, set)
	}
	t.Setenv("GOGC", "50")
	c.percent = 10
	c.adjust()
	if set := debug.SetGCPercent(100); set != 100 {
		t.Errorf("set to %d %% although GOGC is set", set)
	}
}
