// Command cluster measures what it costs that the gateway is a Pod: the same traffic between pods of
// two peered clusters, with gateways in Pods (as `isthmus install` makes them) and with gateways in
// the network of their nodes (--host-network), in one run and interleaved; between pods on the nodes
// of the active gateways, and between pods on others.
//
//	go run ./benchmarks/cluster -rounds 5
//
// Each cluster has an API server, a manager, gateways and route agents of its own (package fleet): two
// pairs of clusters that share nothing but the machine. Figures are medians with the smallest and the
// largest, ratios are formed round by round. It needs root and the programs that `make deps` builds.
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
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/testbin"
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
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	text, err := run(ctx, *rounds, *d)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\n%s; %d interleaved rounds, %v a load. Median [smallest - largest].\n%s", measure.Where(), *rounds, *d, text)
}

// A variant is where the gateways are, and where the pods.
type variant struct {
	inPods bool // the gateways are Pods
	beside bool // the pods are on the nodes of the active gateways
}

// variants, in the order of the columns: each pair is compared.
var variants = []variant{{false, true}, {true, true}, {false, false}, {true, false}}

func (v variant) String() string {
	where, pods := "host network", "other nodes"
	if v.inPods {
		where = "Pods"
	}
	if v.beside {
		pods = "the gateway's node"
	}
	return where + ", pods on " + pods
}

var figures = []string{
	"TCP 1 stream, Gbit/s", "TCP 4 streams, Gbit/s", "CPU of the machine, s/Gbit", "UDP 64 B flooded, received, kpps", "round trip p50, us", "round trip p99, us",
}

// A path is the two pods of a variant.
type path struct {
	from *lab.Pod
	to   netip.Addr // as from sees it
}

func run(ctx context.Context, rounds int, d time.Duration) (text string, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "isthmus-benchmark-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program, err := testbin.Isthmus(dir)
	if err != nil {
		return "", err
	}
	kube, err := kubetest.Build(ctx, os.Stderr)
	if err != nil {
		return "", err
	}
	spec := lab.Spec{Name: lab.UniqueName("cluster")}
	for i := range 4 {
		c := lab.ClusterSpec{Nodes: 2, PodsPerNode: 1}
		if i < 2 {
			c.GatewayPods = 2
		}
		spec.Clusters = append(spec.Clusters, c)
	}
	f, err := fleet.Up(ctx, fleet.Options{Binary: program, Kube: kube, Spec: spec, Progress: os.Stderr})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Down()) }()
	paths, stop, err := connect(ctx, f, self)
	defer stop()
	if err != nil {
		return "", err
	}
	samples := make(map[variant][][]float64, len(variants)) // by variant, figure and round
	for round := range rounds {
		for i := range variants {
			v := variants[(i+round)%len(variants)] // what comes after what is not always the same
			got, err := traffic(ctx, paths[v], self, d)
			if err != nil {
				return "", fmt.Errorf("%v: %w", v, err)
			}
			if samples[v] == nil {
				samples[v] = make([][]float64, len(figures))
			}
			for i := range figures {
				samples[v][i] = append(samples[v][i], got[i])
			}
			log.Printf("round %d/%d  %-40s %.2f", round+1, rounds, v, got)
		}
	}
	return table(samples), nil
}

// connect peers the clusters in pairs and starts what answers; stop ends that, also after an error.
func connect(ctx context.Context, f *fleet.Fleet, self string) (paths map[variant]path, stop func(), err error) {
	var servers []*os.Process
	stop = func() {
		for _, p := range servers {
			_ = p.Kill()
			_, _ = p.Wait()
		}
	}
	paths = make(map[variant]path, len(variants))
	for i, pair := range [][2]*fleet.Cluster{{f.Clusters[0], f.Clusters[1]}, {f.Clusters[2], f.Clusters[3]}} {
		if out, err := f.Isthmus(ctx, "peer", "--context", pair[0].Name, "--remote-context", pair[1].Name); err != nil {
			return nil, stop, fmt.Errorf("isthmus peer: %w\n%s", err, out)
		}
		var active [2]int
		for i, c := range pair {
			if active[i], err = c.ActiveGateway(ctx); err != nil {
				return nil, stop, err
			}
		}
		for _, beside := range []bool{true, false} {
			node := active
			if !beside {
				node = [2]int{1 - active[0], 1 - active[1]}
			}
			to := pair[1].Pods[node[1]]
			seen, err := pair[0].Seen(ctx, pair[1], to.Addr)
			if err != nil {
				return nil, stop, err
			}
			for _, what := range []string{"sink", "echo"} {
				p, err := load.Start(ctx, to.Host, nil, self, "load", what)
				if err != nil {
					return nil, stop, err
				}
				servers = append(servers, p)
			}
			paths[variant{i == 0, beside}] = path{pair[0].Pods[node[0]], seen}
		}
	}
	return paths, stop, nil
}

// traffic measures a variant once; what it returns is in the order of figures.
func traffic(ctx context.Context, p path, self string, d time.Duration) (got []float64, err error) {
	to, ms := p.to.String(), strconv.Itoa(int(d.Milliseconds()))
	run := func(args ...string) (res load.Result) {
		if err == nil {
			res, err = load.Run(ctx, p.from.Host, self, args...)
		}
		return res
	}
	run("tcp", to, "1", "300") // warm-up
	one := run("tcp", to, "1", ms)
	before, failed := busy()
	err = errors.Join(err, failed)
	four := run("tcp", to, "4", ms)
	after, failed := busy()
	err = errors.Join(err, failed)
	flood := run("udp", to, "64", ms, "0")
	rtt := run("rtt", to, ms)
	if err != nil {
		return nil, err
	}
	gbit := func(r load.Result) float64 { return float64(r.Bytes) * 8 / r.Seconds / 1e9 }
	return []float64{gbit(one), gbit(four), (after - before) / (float64(four.Bytes) * 8 / 1e9), float64(flood.Packets) / flood.Seconds / 1e3, rtt.P50, rtt.P99}, nil
}

// busy is how many seconds all processors have worked since the machine booted (proc_stat(5)).
func busy() (float64, error) {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(text), "\n")
	ticks := 0.0
	for i, field := range strings.Fields(line)[1:] {
		n, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		if idle := i == 3 || i == 4; !idle && i < 8 { // guests are in user time already
			ticks += n
		}
	}
	return ticks / 100, nil
}

func table(samples map[variant][][]float64) string {
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
			host, pod := samples[variants[i]][f], samples[variants[i+1]][f]
			ratios := slices.Clone(pod)
			for i := range ratios {
				ratios[i] /= host[i]
			}
			fmt.Fprintf(&b, " %s | %s | **%s** |", spread(host), spread(pod), spread(ratios))
		}
		b.WriteString("\n")
	}
	return b.String()
}

func spread(v []float64) string {
	return fmt.Sprintf("%.2f [%.2f - %.2f]", measure.Median(v), slices.Min(v), slices.Max(v))
}
