// Command overlay measures what the packet filter of the route agents costs: the same traffic
// between a pod and a remote pod, through the VXLAN between two nodes, with the table "inet
// isthmus" and without it, in the same namespaces and interleaved; and how long it takes until
// packets flow again after a change, with many nodes and peers.
//
//	go run ./benchmarks/overlay -rounds 5
//
// The nodes have what fabric.NodeFor decides, applied by internal/kernel/rtnl as the route agent
// does it; no agent runs, which would repair what is left out on purpose. The filter asks the
// kernel for connection tracking, which most nodes have anyway because of kube-proxy or the CNI: so
// there are two pairs of columns, on nodes that track nothing else and on nodes that do.
//
// Figures are medians with the smallest and the largest, ratios are formed round by round. It needs
// root, iproute2 and nft.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 && os.Args[1] == "load" {
		if err := load.Main(os.Args[2:]); err != nil {
			log.Fatal(err)
		}
		return
	}
	rounds := flag.Int("rounds", 5, "rounds; each measures every variant once")
	d := flag.Duration("duration", time.Second, "duration of one load")
	only := flag.String("only", "", "traffic or convergence; empty: both")
	flag.Parse()
	if *only != "" && *only != "traffic" && *only != "convergence" {
		log.Fatalf("-only %s: want traffic or convergence", *only)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	text, err := run(ctx, *rounds, *d, *only)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\n%s; %d interleaved rounds, %v a load. Median [smallest - largest].\n%s", measure.Where(), *rounds, *d, text)
}

func run(ctx context.Context, rounds int, d time.Duration, only string) (text string, err error) {
	c, err := newCluster(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if only != "convergence" {
		text, err = c.measureTraffic(ctx, rounds, d)
	}
	if err == nil && only != "traffic" {
		var more string
		more, err = c.measureConvergence(rounds)
		text += more
	}
	return text, err
}

// A variant is the nodes of one column.
type variant struct {
	filter bool
	tracks bool // somebody else on the nodes has the kernel track connections
}

// variants, in the order of the columns: each pair is compared.
var variants = []variant{{false, false}, {true, false}, {false, true}, {true, true}}

func (v variant) String() string {
	return map[variant]string{
		{false, false}: "without the filter", {true, false}: "with it",
		{false, true}: "nodes that track connections, without", {true, true}: "with it",
	}[v]
}

// figures are the rows of the table of traffic.
var figures = []string{
	"TCP 1 stream, Gbit/s",
	"TCP 4 streams, Gbit/s",
	"TCP 4 streams, CPU of the machine, s/Gbit",
	"UDP 64 B flooded, received, kpps",
	"CPU of a UDP packet of 64 B from pod to gateway, ns",
	"CPU of a UDP packet of 64 B from gateway to pod, ns",
	"round trip p50, us",
	"round trip p99, us",
}

func (c *cluster) measureTraffic(ctx context.Context, rounds int, d time.Duration) (string, error) {
	stop, err := c.listen(ctx)
	if err != nil {
		return "", err
	}
	defer stop()
	samples := make(map[variant][][]float64) // by variant, figure and round
	for _, v := range variants {
		samples[v] = make([][]float64, len(figures))
	}
	for round := range rounds {
		for i := range variants {
			v := variants[(i+round)%len(variants)] // what comes after what is not always the same
			got, err := c.traffic(ctx, v, d)
			if err != nil {
				return "", fmt.Errorf("%v: %w", v, err)
			}
			for f := range figures {
				samples[v][f] = append(samples[v][f], got[f])
			}
			log.Printf("round %d/%d  %-38s %.2f", round+1, rounds, v, got)
		}
	}
	var b strings.Builder
	b.WriteString("\n| |")
	for i, v := range variants {
		fmt.Fprintf(&b, " %v |", v)
		if i%2 == 1 {
			b.WriteString(" ratio |")
		}
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(variants)*3/2) + "\n")
	for f, name := range figures {
		fmt.Fprintf(&b, "| %s |", name)
		for i := 0; i < len(variants); i += 2 {
			b.WriteString(compared(samples[variants[i]][f], samples[variants[i+1]][f]))
		}
		b.WriteString("\n")
	}
	return b.String(), nil
}

// compared are three columns: both, and the ratio of the second to the first.
func compared(without, with []float64) string {
	ratios := slices.Clone(with)
	for i := range ratios {
		ratios[i] /= without[i]
	}
	return fmt.Sprintf(" %s | %s | **%s** |", spread(without), spread(with), spread(ratios))
}

func spread(v []float64) string {
	digits := 2
	if m := measure.Median(v); m >= 100 {
		digits = 0
	} else if m < 0.1 {
		digits = 4
	}
	text := func(f float64) string { return strconv.FormatFloat(f, 'f', digits, 64) }
	return fmt.Sprintf("%s [%s - %s]", text(measure.Median(v)), text(slices.Min(v)), text(slices.Max(v)))
}

// traffic measures a variant once; what it returns is in the order of figures.
func (c *cluster) traffic(ctx context.Context, v variant, d time.Duration) (got []float64, err error) {
	if err := c.become(ctx, v); err != nil {
		return nil, err
	}
	ms := strconv.Itoa(int(d.Milliseconds()))
	run := func(args ...string) (res load.Result) {
		if err == nil {
			res, err = load.Run(ctx, c.pod.Host, c.self, args...)
		}
		return res
	}
	run("tcp", remotePod.String(), "1", "300") // warm-up
	one := run("tcp", remotePod.String(), "1", ms)
	before := busySeconds()
	four := run("tcp", remotePod.String(), "4", ms)
	busy := busySeconds() - before
	flood := run("udp", remotePod.String(), "64", ms, "0")
	rtt := run("rtt", remotePod.String(), ms)
	if err != nil {
		return nil, err
	}
	out, err := load.PerPacket(c.pod.Host, c.pod.Addr, remotePod, c.far, netip.AddrPortFrom(remotePod, load.DiscardPort), standIn(gatewayNodes[0]))
	if err != nil {
		return nil, err
	}
	in, err := load.PerPacket(c.far, remotePod, c.pod.Addr, c.pod.Host, netip.AddrPortFrom(c.pod.Addr, load.DiscardPort), podDevice)
	if err != nil {
		return nil, err
	}
	gbit := func(r load.Result) float64 { return float64(r.Bytes) * 8 / r.Seconds / 1e9 }
	return []float64{gbit(one), gbit(four), busy / (float64(four.Bytes) * 8 / 1e9),
		float64(flood.Packets) / flood.Seconds / 1e3, out, in, rtt.P50, rtt.P99}, nil
}
