package datapath_test

import (
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
)

// BenchmarkHandshakeRefused measures the inbound goroutine's work for one initiation of a flood.
// The initiation is for another key (key), exceeds the budget of its source (budget), or exceeds it
// while the device asks for cookies, and carries a wrong one (cookie).
func BenchmarkHandshakeRefused(b *testing.B) {
	// The tunnel is not up, so nothing takes messages from the queue.
	d := newDevice(b, newScript(), newEngine(b), datapath.Options{})
	r := datapath.NewReceiver(d)
	from := (&memlink.Bind{}).Endpoint(netip.MustParseAddrPort("192.0.2.66:1"))
	for _, name := range []string{"key", "budget", "cookie"} {
		var public [32]byte
		if name == "key" {
			public[0] = 1
		}
		flood := make([][]byte, 64)
		for i := range flood {
			if flood[i] = initiationFor(public, uint32(i)); name == "cookie" {
				flood[i][147] = 1
			}
		}
		if name == "cookie" {
			d.AskForCookies()
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.Receive(flood, from)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(flood)), "ns/message")
		})
	}
}
