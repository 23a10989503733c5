package load

import (
	"context"
	"net/netip"
	"strconv"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// TrafficFigures are the names of Traffic's results.
var TrafficFigures = []string{
	"TCP 1 stream, Gbit/s",
	"TCP 4 streams, Gbit/s",
	"TCP 4 streams, CPU of the machine, s/Gbit",
	"UDP 64 B flooded, received, kpps",
	"round trip p50, us",
	"round trip p99, us",
}

// Traffic measures TrafficFigures from a host to an address that runs a sink and an echo server.
// Each load lasts d. self is the path of this program, which must call Main if its first argument
// is "load".
func Traffic(ctx context.Context, from *lab.Host, self string, to netip.Addr, d time.Duration) ([]float64, error) {
	ms := strconv.Itoa(int(d.Milliseconds()))
	var err error
	run := func(args ...string) (res Result) {
		if err == nil {
			res, err = Run(ctx, from, self, args...)
		}
		return res
	}
	run("tcp", to.String(), "1", "300") // warm-up
	one := run("tcp", to.String(), "1", ms)
	before, failed := measure.Busy()
	if failed != nil {
		return nil, failed
	}
	four := run("tcp", to.String(), "4", ms)
	after, failed := measure.Busy()
	if failed != nil {
		return nil, failed
	}
	flood := run("udp", to.String(), "64", ms, "0")
	rtt := run("rtt", to.String(), ms)
	if err != nil {
		return nil, err
	}
	gbit := func(r Result) float64 { return float64(r.Bytes) * 8 / r.Seconds / 1e9 }
	return []float64{gbit(one), gbit(four), (after - before) / (float64(four.Bytes) * 8 / 1e9),
		float64(flood.Packets) / flood.Seconds / 1e3, rtt.P50, rtt.P99}, nil
}
