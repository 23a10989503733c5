// Command packets measures the cost of a forwarded packet on a node with a route agent, with 0 to
// 10,000 peers. It measures packets to an address outside of all peers, and packets to a peer
// through the overlay.
//
//	go run ./benchmarks/packets -rounds 5
//
// The program makes a cluster for each number of peers. On its first node, it applies the
// configuration of fabric.NodeFor for gateways in Pods: routes, and packet filter sets for two
// networks of each peer. One more cluster has no such configuration. The nodes of all clusters
// track connections and masquerade. A figure is the CPU time, on one processor, from a pod's send
// call to the arrival of the packet, including the time in the pod's own namespace. The clusters
// take turns of a thousand packets, so that other load on the machine affects all of them alike.
// Ratios are computed for each round. The command needs root and iproute2.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var localPods = netip.MustParsePrefix("10.244.0.0/16")

func main() {
	log.SetFlags(0)
	rounds := flag.Int("rounds", 5, "rounds; each measures every number of peers once")
	text := flag.String("peers", "0,10,100,1000,4000,10000", "numbers of peers; the first is the baseline")
	flag.Parse()
	var numbers []int
	for s := range strings.SplitSeq(*text, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 0 || n > 16384 {
			log.Fatalf("-peers %q: want numbers from 0 to 16384", *text)
		}
		numbers = append(numbers, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	table, err := run(ctx, *rounds, numbers)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\n%s; %d interleaved rounds. ns of CPU for a packet, median [smallest - largest], and the ratio to the baseline.\n%s", measure.Where(), *rounds, table)
}

const (
	turn  = 1000 // packets of one cluster in a turn, after a few that are not counted
	turns = 100  // per round
)

// A row of the table is one cluster with a number of peers, or without a route agent.
type row struct {
	*lab.Cluster
	name    string
	flows   []*load.Flow // by kind of packet; nil: this row sends none of that kind
	samples [][]float64  // by kind and round
}

var kinds = []string{"for no peer", "to a peer"}

func run(ctx context.Context, rounds int, numbers []int) (table string, err error) {
	spec := lab.Spec{Name: lab.UniqueName("packets"), Clusters: lab.Clusters(len(numbers) + 1)}
	for i := range spec.Clusters {
		c := &spec.Clusters[i]
		c.PodCIDR, c.Nodes, c.PodsPerNode = localPods, 2, 1
	}
	l, err := lab.Up(ctx, spec)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	var rows []*row
	for i, c := range l.Clusters {
		r := &row{Cluster: c, name: "no agent", flows: make([]*load.Flow, len(kinds)), samples: make([][]float64, len(kinds))}
		peers := 0
		if i < len(numbers) {
			peers, r.name = numbers[i], strconv.Itoa(numbers[i])
			k, err := r.configure(peers)
			if err != nil {
				return "", fmt.Errorf("%d peers: %w", peers, err)
			}
			defer k.Close()
		}
		for kind := range kinds {
			if kind == 1 && peers == 0 {
				continue
			}
			f, err := r.open(kind)
			if err != nil {
				return "", fmt.Errorf("%s, %s: %w", r.name, kinds[kind], err)
			}
			defer func() { err = errors.Join(err, f.Close()) }()
			r.flows[kind] = f
		}
		rows = append(rows, r)
	}
	err = rows[0].Nodes[0].Do(func() error { // Do ends with its thread, as StayOnOneProcessor requires
		if err := load.StayOnOneProcessor(); err != nil {
			return err
		}
		for round := range rounds {
			for kind := range kinds {
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := measureRound(rows, kind); err != nil {
					return err
				}
			}
			log.Printf("round %d/%d", round+1, rounds)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	return tableOf(rows), nil
}

// measureRound adds one sample to each row.
func measureRound(rows []*row, kind int) error {
	sums := make([]float64, len(rows))
	for index := range turns {
		for i := range rows {
			i := (i + index) % len(rows)
			f := rows[i].flows[kind]
			if f == nil {
				continue
			}
			if _, err := f.Send(turn / 10); err != nil {
				return err
			}
			ns, err := f.Send(turn)
			if err != nil {
				return err
			}
			sums[i] += ns / turns
		}
	}
	for i, r := range rows {
		if r.flows[kind] != nil {
			r.samples[kind] = append(r.samples[kind], sums[i])
		}
	}
	return nil
}

// tableOf formats the table. It compares all rows with the first row that has samples.
func tableOf(rows []*row) string {
	var b strings.Builder
	b.WriteString("\n| peers |")
	for _, kind := range kinds {
		fmt.Fprintf(&b, " %s | ratio |", kind)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|---|", len(kinds)) + "\n")
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |", r.name)
		for kind := range kinds {
			if len(r.samples[kind]) == 0 {
				b.WriteString(" | |")
				continue
			}
			base := rows[slices.IndexFunc(rows, func(r *row) bool { return len(r.samples[kind]) > 0 })].samples[kind]
			fmt.Fprintf(&b, " %s | **%s** |", measure.Spread(r.samples[kind]), measure.Spread(measure.Ratios(r.samples[kind], base)))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// remote returns the networks of a peer.
func remote(i int) (pod, external netip.Prefix) {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24), netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24)
}

// gateway returns the pod that stands for the gateway Pod, on the second node.
func (r *row) gateway() *lab.Pod { return r.Pods[len(r.Pods)-1] }

// configure configures the first node for the given number of peers.
func (r *row) configure(peers int) (k *rtnl.Kernel, err error) {
	self := r.Nodes[0]
	in := fabric.NodeIntent{
		Self: self.Name, OnlyPods: true, Trusted: true, Allocations: fabric.Allocations{OwnPods: []netip.Prefix{localPods}}, UnderlayDevices: []string{"eth0"},
		Nodes:    []fabric.ClusterNode{{Name: self.Name, Addrs: []netip.Addr{self.Addr}, PodCIDRs: []netip.Prefix{self.PodCIDR}}},
		Gateways: []fabric.GatewayPod{{Addr: r.gateway().Addr, Host: r.Nodes[1].Addr}},
		Gateway:  r.gateway().Addr,
	}
	for i := range peers {
		pod, external := remote(i)
		in.Allocated = append(in.Allocated, pod, external)
	}
	want, problems := fabric.NodeFor(in)
	if len(problems) > 0 {
		return nil, problems[0]
	}
	err = self.Do(func() error {
		if k, err = rtnl.Open(kernel.RouteAgent, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
		_, err := k.Apply(want)
		return err
	})
	return k, err
}

func (r *row) open(kind int) (*load.Flow, error) {
	pod := r.Pods[0]
	if kind == 0 {
		return load.OpenFlow(pod.Host, pod.Addr, r.OnPrem.Addr, r.OnPrem.Host, netip.AddrPortFrom(r.OnPrem.Addr, load.DiscardPort), "eth0")
	}
	to, _ := remote(5)
	gateway := r.gateway()
	return load.OpenFlow(pod.Host, pod.Addr, to.Addr().Next(), gateway.Host, netip.AddrPortFrom(gateway.Addr, kernel.OverlayPort), "eth0")
}
