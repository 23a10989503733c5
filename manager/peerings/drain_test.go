package peerings

import (
	"testing"
	"time"
)

func TestTunnelStaysWhileServicesAreDrained(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	for _, step := range [][]struct {
		after  time.Duration
		shared bool
		left   time.Duration
	}{
		{{0, false, drainTime}, {drainTime - time.Second, false, time.Second}, {drainTime, false, 0}}, // there were no services, or they were withdrawn at once
		{{0, true, drainPatience}, {time.Second, true, drainPatience - time.Second}, {2 * time.Second, false, drainTime}, {2*time.Second + drainTime, false, 0}},
		{{0, false, drainTime}, {time.Second, true, drainPatience - time.Second}, {2 * time.Second, false, drainTime}},                                            // the cache was outdated at first
		{{0, true, drainPatience}, {drainPatience - time.Second, true, time.Second}, {drainPatience - time.Second, false, time.Second}, {drainPatience, true, 0}}, // the peer does not answer
	} {
		var d drain
		for _, s := range step {
			var left time.Duration
			if d, left = d.update(at.Add(s.after), s.shared); left != s.left {
				t.Errorf("%v: after %v %v is left, want %v", step, s.after, left, s.left)
			}
		}
	}
}
