// Command overlay measures the cost of the route agents' packet filter. It sends the same traffic
// between a pod and a remote pod, through the VXLAN between two nodes, with the table "inet
// isthmus" and without it, interleaved in the same namespaces. It also measures the time until
// packets flow again after a change, with many nodes and peers.
//
//	go run ./benchmarks/overlay -rounds 5
//
// The nodes have the configuration of fabric.NodeFor, applied by internal/kernel/rtnl as in the
// route agent. No route agent runs, because it would restore the filter in the variant without it.
// The filter uses the kernel's connection tracking, which kube-proxy or the CNI enables on most
// nodes anyway. Therefore there are two pairs of columns: nodes with and without other users of
// connection tracking.
//
// Figures are medians with minimum and maximum; ratios are computed for each round. The command
// needs root, iproute2 and nft.
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

type variant struct {
	filter bool
	tracks bool // another user on the nodes enables connection tracking
}

// variants are the columns of the table, which compares the first with the second and the third
// with the fourth.
var variants = []variant{{false, false}, {true, false}, {false, true}, {true, true}}

func (v variant) String() string {
	return map[variant]string{
		{false, false}: "without the filter", {true, false}: "with it",
		{false, true}: "nodes that track connections, without", {true, true}: "with it",
	}[v]
}

// figures are the rows of the traffic table.
var figures = append(slices.Clone(load.TrafficFigures),
	"CPU of a UDP packet of 64 B from pod to gateway, ns",
	"CPU of a UDP packet of 64 B from gateway to pod, ns",
)

func (c *cluster) measureTraffic(ctx context.Context, rounds int, d time.Duration) (string, error) {
	stop, err := c.listen(ctx)
	if err != nil {
		return "", err
	}
	defer stop()
	var names []string
	for _, v := range variants {
		names = append(names, v.String())
	}
	samples, err := measure.Rounds(rounds, names, func(i int) ([]float64, error) { return c.traffic(ctx, variants[i], d) })
	if err != nil {
		return "", err
	}
	return samples.Pairs(names, figures), nil
}

// traffic measures a variant once. It returns the values in the order of figures.
func (c *cluster) traffic(ctx context.Context, v variant, d time.Duration) ([]float64, error) {
	if err := c.configure(ctx, v); err != nil {
		return nil, err
	}
	got, err := load.Traffic(ctx, c.pod.Host, c.self, remotePod, d)
	if err != nil {
		return nil, err
	}
	out, err := load.PerPacket(c.pod.Host, c.pod.Addr, remotePod, c.far, netip.AddrPortFrom(remotePod, load.DiscardPort), standIn(gatewayNodes[0]))
	if err != nil {
		return nil, err
	}
	in, err := load.PerPacket(c.far, remotePod, c.pod.Addr, c.pod.Host, netip.AddrPortFrom(c.pod.Addr, load.DiscardPort), podDevice)
	return append(got, out, in), err
}
