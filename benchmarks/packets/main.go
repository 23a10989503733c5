// Command packets measures what a packet costs that a node with a route agent forwards, with 0 to
// 10,000 peers: one that is for no peer, and one that goes to a peer by the overlay.
//
//	go run ./benchmarks/packets -rounds 5
//
// The node has what fabric.NodeFor decides for gateways that are Pods: routes and the sets of the
// packet filter for two networks of each peer. Figures are CPU time from the system call of a pod to
// the arrival, on one processor, which includes the pod's own part; all sizes are measured in each
// round, in another order, and the ratios are formed round by round. It needs root and iproute2.
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

// A node is that of the measured route agent.
type node struct {
	*lab.Cluster
	kernel *rtnl.Kernel
}

func run(ctx context.Context, rounds int, numbers []int) (table string, err error) {
	l, err := lab.Up(ctx, lab.Spec{Name: lab.UniqueName("packets"), Clusters: []lab.ClusterSpec{{PodCIDR: localPods, Nodes: 2, PodsPerNode: 1}}})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	n := &node{Cluster: l.Clusters[0]}
	err = n.Nodes[0].Do(func() (err error) {
		n.kernel, err = rtnl.Open(kernel.RouteAgent, slog.New(slog.DiscardHandler))
		return err
	})
	if err != nil {
		return "", err
	}
	defer n.kernel.Close()
	kinds := []string{"for no peer", "to a peer"}
	samples := make([][][]float64, len(kinds)) // by kind, number and round
	for kind := range kinds {
		samples[kind] = make([][]float64, len(numbers))
		for i := range numbers {
			samples[kind][i] = make([]float64, rounds)
		}
	}
	for round := range rounds {
		for i := range numbers {
			i := (i + round) % len(numbers)
			if err := n.become(numbers[i]); err != nil {
				return "", fmt.Errorf("%d peers: %w", numbers[i], err)
			}
			for kind := range kinds {
				if numbers[i] == 0 && kind == 1 {
					continue
				}
				ns, err := n.packet(kind)
				if err != nil {
					return "", fmt.Errorf("%d peers, %s: %w", numbers[i], kinds[kind], err)
				}
				samples[kind][i][round] = ns
				log.Printf("round %d/%d  %5d peers  %-11s  %.0f ns", round+1, rounds, numbers[i], kinds[kind], ns)
			}
		}
	}
	var b strings.Builder
	b.WriteString("\n| peers |")
	for _, kind := range kinds {
		fmt.Fprintf(&b, " %s | ratio |", kind)
	}
	b.WriteString("\n|---|" + strings.Repeat("---|---|", len(kinds)) + "\n")
	for i, number := range numbers {
		fmt.Fprintf(&b, "| %d |", number)
		for kind := range kinds {
			base := samples[kind][0]
			if base[0] == 0 { // with no peers nothing goes to one
				base = samples[kind][min(1, len(numbers)-1)]
			}
			if samples[kind][i][0] == 0 {
				b.WriteString(" | |")
				continue
			}
			ratios := slices.Clone(samples[kind][i])
			for r := range ratios {
				ratios[r] /= base[r]
			}
			fmt.Fprintf(&b, " %s | **%s** |", spread(samples[kind][i], 0), spread(ratios, 3))
		}
		b.WriteString("\n")
	}
	return b.String(), nil
}

func spread(v []float64, digits int) string {
	return fmt.Sprintf("%.*f [%.*f - %.*f]", digits, measure.Median(v), digits, slices.Min(v), digits, slices.Max(v))
}

// remote are the networks of a peer.
func remote(i int) (pod, external netip.Prefix) {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + i>>8), byte(i), 0}), 24), netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24)
}

// gateway is where the gateway's Pod would be: the pod on the second node.
func (n *node) gateway() *lab.Pod { return n.Pods[len(n.Pods)-1] }

// become makes the first node what it is with so many peers.
func (n *node) become(peers int) error {
	self := n.Nodes[0]
	in := fabric.NodeIntent{
		Self: self.Name, OnlyPods: true, Trusted: true, Granted: []netip.Prefix{}, OwnPods: []netip.Prefix{localPods}, UnderlayDevices: []string{"eth0"},
		Nodes:    []fabric.ClusterNode{{Name: self.Name, Addrs: []netip.Addr{self.Addr}, PodCIDRs: []netip.Prefix{self.PodCIDR}}},
		Gateways: []fabric.GatewayPod{{Addr: n.gateway().Addr, Host: n.Nodes[1].Addr}},
		Gateway:  n.gateway().Addr,
	}
	for i := range peers {
		pod, external := remote(i)
		in.Granted = append(in.Granted, pod, external)
	}
	want, problems := fabric.NodeFor(in)
	if len(problems) > 0 {
		return problems[0]
	}
	return self.Do(func() error {
		_, err := n.kernel.Apply(want)
		return err
	})
}

// packet measures one kind.
func (n *node) packet(kind int) (float64, error) {
	pod := n.Pods[0]
	if kind == 0 {
		return load.PerPacket(pod.Host, pod.Addr, n.OnPrem.Addr, n.OnPrem.Host, netip.AddrPortFrom(n.OnPrem.Addr, load.DiscardPort), "eth0")
	}
	to, _ := remote(5)
	gateway := n.gateway()
	return load.PerPacket(pod.Host, pod.Addr, to.Addr().Next(), gateway.Host, netip.AddrPortFrom(gateway.Addr, kernel.OverlayPort), "eth0")
}
