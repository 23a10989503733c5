package gateway

import (
	"os"
	"runtime/debug"
	measures "runtime/metrics"
)

// The garbage collector lets a heap grow to twice its live size before it collects. A gateway makes
// little garbage. But with a million flows, twice the live size wastes 100 MiB, although the
// collector need not scan their tables. So we cap uncollected garbage. A large heap then costs a
// collection every few seconds; a small one is unaffected.
const (
	maxGarbage   = 24 << 20
	minGCPercent = 10
)

// collector sets the garbage collector's target. The zero value is ready; one goroutine uses it.
type collector struct {
	percent int
	sample  [1]measures.Sample
}

// adjust sets the target by the heap's size after the last collection, unless the environment sets
// one (GOGC).
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
	if percent != c.percent && (percent*4 < c.percent*3 || percent*3 > c.percent*4 || percent == 100) { // each change stops the world
		debug.SetGCPercent(percent)
		c.percent = percent
	}
}

// gcPercent returns the GOGC for a live heap of that size.
func gcPercent(live uint64) int {
	return int(min(100, max(minGCPercent, 100*maxGarbage/max(live, 1))))
}
