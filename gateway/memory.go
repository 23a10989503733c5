package gateway

import (
	"os"
	"runtime/debug"
	measures "runtime/metrics"
)

// The garbage collector lets a heap grow to twice what is in use before it collects. A gateway
// makes little garbage, but with a million flows, whose tables it never has to look into, twice is
// 100 MiB more for nothing. So what may lie about is bounded, which costs a collection every few
// seconds where there is much, and changes nothing where there is little.
const (
	maxGarbage   = 24 << 20
	minGCPercent = 10
)

// collector keeps the garbage collector's target. The zero value is ready; it is used by one
// goroutine.
type collector struct {
	percent int
	sample  [1]measures.Sample
}

// adjust sets the target for the heap as the last collection left it, unless the environment has
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

// gcPercent is the GOGC for so much memory in use.
func gcPercent(live uint64) int {
	return int(min(100, max(minGCPercent, 100*maxGarbage/max(live, 1))))
}
