package gateway

import (
	"os"
	"runtime/debug"
	measures "runtime/metrics"
)

// By default the heap grows to twice its live size before the garbage collector runs. A gateway
// makes little garbage, but with a million flows twice the live size would waste 100 MiB. So the
// amount of garbage is capped. The flow tables hold no pointers for the collector to follow, so
// with a large heap a collection every few seconds is cheap. A small heap is unaffected.
const (
	maxGarbage   = 24 << 20
	minGCPercent = 10
)

// A collector adjusts the garbage collector's target (GOGC). The zero value is ready for use by
// one goroutine.
type collector struct {
	percent int
	sample  [1]measures.Sample
}

// adjust sets the target according to the size of the heap after the last collection. If the
// environment variable GOGC is set, adjust does nothing.
func (c *collector) adjust() {
	if os.Getenv("GOGC") != "" {
		return
	}
	c.sample[0].Name = "/gc/heap/live:bytes"
	measures.Read(c.sample[:])
	percent := gcPercent(c.sample[0].Value.Uint64())
	if c.percent == 0 {
		c.percent = 100
	}
	// Ignore small changes, because each one stops the world.
	if percent != c.percent && (percent*4 < c.percent*3 || percent*3 > c.percent*4 || percent == 100) {
		debug.SetGCPercent(percent)
		c.percent = percent
	}
}

// gcPercent returns the value of GOGC for a heap of which live octets are reachable.
func gcPercent(live uint64) int {
	return int(min(100, max(minGCPercent, 100*maxGarbage/max(live, 1))))
}
