package path

import (
	"context"
	"io"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/capture"
)

// BenchmarkCapture measures the cost of a capture at the sender: without a capture, with a filter
// for another pod, with all headers, and with all octets. Each capture has a reader. The benchmark
// logs the number of packets that were lost because the reader was too slow. Compare only figures
// of one run, and repeat the whole run:
//
//	for i in 1 2 3 4 5 6; do go test -run '^$' -bench Capture -benchtime 1s ./benchmarks/path; done
func BenchmarkCapture(b *testing.B) {
	for _, size := range []int{64, segment + 40, segments*segment + 40} {
		l := load{size: size, nat: "pod", flows: 1, peers: 1}
		for _, c := range []struct {
			name string
			set  func(*capture.Options) // nil: no capture
		}{
			{"off", nil},
			{"other-pod", func(o *capture.Options) { o.Ends[0] = netip.AddrPortFrom(pod.Next(), 0) }},
			{"headers", func(*capture.Options) {}},
			{"whole", func(o *capture.Options) { o.Snap = capture.MaxSnap }},
		} {
			b.Run(l.String()+"/capture="+c.name, func(b *testing.B) {
				run(b, l, func(from *gateway) {
					if c.set != nil {
						captureAll(b, from, c.set)
					}
				})
			})
		}
	}
}

func captureAll(b *testing.B, from *gateway, set func(*capture.Options)) {
	o := capture.DefaultOptions()
	o.Packets, o.Bytes, o.Duration = capture.MaxPackets, capture.MaxBytes, capture.MaxDuration
	set(&o)
	c := capture.New(o, "benchmark", nil)
	done := make(chan error, 1)
	go func() { done <- c.WriteTo(context.Background(), io.Discard, func() error { return nil }) }()
	from.tunnel.SetCapture(c)
	b.Cleanup(func() {
		from.tunnel.SetCapture(nil)
		c.End("benchmark")
		if err := <-done; err != nil {
			b.Error(err)
		}
		if s := c.Summary(); s.Missed > 0 {
			b.Logf("missed %.0f %% of what was to be captured", 100*float64(s.Missed)/float64(s.Missed+uint64(s.Packets)))
		}
	})
}
