// Command peers measures the cost of live peers on a gateway: at rest, when one peer is changed,
// added or removed, when all reconnect, and during scrapes of its metrics.
//
//	go run ./benchmarks/peers -peers 10,100,1000,4000
//
// The real gateway runs as a separate process in its own network namespace. This program simulates
// the peers in another namespace. Each peer has its own address, key, WireGuard session and
// connection check. Like Liqo, a peer answers every PING and sends one every two seconds. The peers
// start no handshake and do no path MTU discovery. The configuration does not come from an API
// server; benchmarks/agents measures that part. The program reads the gateway's status once a
// second, as happens in a cluster. The command needs root and iproute2.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// beGatewayArg is the argument that makes this program the gateway process.
const beGatewayArg = "be-gateway"

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 && os.Args[1] == beGatewayArg {
		if err := beGateway(); err != nil {
			log.Fatal(err)
		}
		return
	}
	text := flag.String("peers", "10,100,1000,4000", "numbers of peers, from 2 to 4095")
	rest := flag.Duration("rest", 30*time.Second, "how long to measure at rest")
	only := flag.String("only", "", "parts to measure besides the start, separated by commas: rest, scrape, change, back; empty: all")
	profiles := flag.String("profiles", "", "existing directory for profiles of the gateway, at rest and while peers change; empty: none")
	flag.Parse()
	var numbers []int
	for s := range strings.SplitSeq(*text, ",") {
		n, err := strconv.Atoi(s)
		if err != nil || n < 2 || n >= maxPeers {
			log.Fatalf("-peers %q: want numbers from 2 to %d", *text, maxPeers-1)
		}
		numbers = append(numbers, n)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, numbers, *rest, *profiles, *only); err != nil {
		log.Fatal(err)
	}
}

// A bench is a lab with a crowd of peers.
type bench struct {
	*lab.Lab
	crowd *crowd
	rows  []string // names of the table's rows, in order
	cells map[string][]string
	only  string // parts to measure, separated by commas; empty: all
}

// measures reports whether the selection includes a part.
func (b *bench) measures(part string) bool {
	return b.only == "" || slices.Contains(strings.Split(b.only, ","), part)
}

func run(ctx context.Context, numbers []int, rest time.Duration, profiles, only string) (err error) {
	l, err := lab.Up(ctx, lab.Spec{Name: lab.UniqueName("peers"), Clusters: []lab.ClusterSpec{{PodCIDR: localPods, Nodes: 1, PodsPerNode: 1}}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	if out, err := l.Underlay.Command(ctx, "ip", "route", "add", "local", endpoints.String(), "dev", "lo").CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	b := &bench{Lab: l, cells: make(map[string][]string), only: only}
	if b.crowd, err = newCrowd(l.Underlay); err != nil {
		return err
	}
	living, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.crowd.run(living)
	}()
	defer func() { end(); <-done }()
	for _, n := range numbers {
		if err := b.measure(ctx, n, rest, profiles); err != nil {
			return fmt.Errorf("%d peers: %w", n, err)
		}
	}
	fmt.Printf("\n%s.\n\n| |", measure.Where())
	for _, n := range numbers {
		fmt.Printf(" %d peers |", n)
	}
	fmt.Print("\n|---|" + strings.Repeat("---|", len(numbers)) + "\n")
	for _, row := range b.rows {
		fmt.Printf("| %s | %s |\n", row, strings.Join(b.cells[row], " | "))
	}
	return nil
}

// addCell adds a cell to a row of the table.
func (b *bench) addCell(n int, row, format string, v ...any) {
	if !slices.Contains(b.rows, row) {
		b.rows = append(b.rows, row)
	}
	cell := fmt.Sprintf(format, v...)
	b.cells[row] = append(b.cells[row], cell)
	log.Printf("%5d peers  %s: %s", n, row, cell)
}

// start starts a gateway process with n peers, of which the first moved use their second port.
func (b *bench) start(ctx context.Context, n, moved int) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := b.Clusters[0].Gateway().Command(context.Background(), self, beGatewayArg)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{stdin: in, forced: make(chan struct{}, 16), pid: cmd.Process.Pid}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if lines.Text() == appliedLine {
				p.forced <- struct{}{}
			}
		}
	}()
	p.end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if err := p.apply(ctx, command{Peers: n, Moved: moved}); err != nil {
		p.end()
		return nil, err
	}
	return p, nil
}

// maxRuns is the maximum number of runs of a single change. One run could not distinguish the cost
// of the change from the cost at rest.
const maxRuns = 20

// settle is the wait after a change. It is long enough for all periodic work, which runs once a
// second.
const settle = time.Second

func (b *bench) measure(ctx context.Context, n int, rest time.Duration, profiles string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	b.crowd.reset(0)
	began := time.Now()
	p, err := b.start(ctx, n, 0)
	if err != nil {
		return err
	}
	defer func() { p.end() }()
	half, all, err := b.crowd.wait(ctx, n)
	if err != nil {
		return err
	}
	b.addCell(n, "all connect at a start: half of them after, s", "%.1f", half.Sub(began).Seconds())
	b.addCell(n, "all connect at a start: all after, s", "%.1f", all.Sub(began).Seconds())
	b.addCell(n, "all connect at a start: CPU, s", "%.2f", measure.CPU(p.pid).Seconds())

	if err := sleep(ctx, 15*time.Second); err != nil { // wait for crossed handshakes, path MTU discovery and garbage collection
		return err
	}
	profile := func(what string, d time.Duration) error {
		if profiles == "" {
			return nil
		}
		return p.apply(ctx, command{Profile: filepath.Join(profiles, fmt.Sprintf("%s-%d", what, n)), Seconds: int(d.Seconds())})
	}
	if b.measures("rest") {
		if err := profile("rest", rest); err != nil {
			return err
		}
		before, from, answers := measure.CPU(p.pid), time.Now(), answeredPings.Load()
		if err := sleep(ctx, rest); err != nil {
			return err
		}
		took := time.Since(from).Seconds()
		b.addCell(n, "at rest: CPU, of a core", "%.2f %%", 100*(measure.CPU(p.pid)-before).Seconds()/took)
		b.addCell(n, "at rest: PINGs of ours that are answered, of those to be sent", "%.1f %%", 100*float64(answeredPings.Load()-answers)/took*pingInterval.Seconds()/float64(n))
		b.addCell(n, "resident memory, MiB", "%d", measure.Memory(p.pid, "VmRSS")>>20)
	}

	client := b.Clusters[0].Gateway().Client()
	scrape := func() (int64, error) {
		r, err := client.Get("http://" + metricsAddress + "/metrics")
		if err != nil {
			return 0, err
		}
		defer r.Body.Close()
		return io.Copy(io.Discard, r.Body)
	}
	if b.measures("scrape") {
		var octets int64
		cost, err := p.cost(ctx, maxRuns, func(int) (err error) { octets, err = scrape(); return err })
		if err != nil {
			return err
		}
		b.addCell(n, "a scrape: CPU, ms", "%s", cost)
		b.addCell(n, "a scrape: octets", "%d", octets)
	}

	moved := 0
	if b.measures("change") {
		times := min(maxRuns, n) // a peer can move only once: a second move changes nothing and is never reported as applied
		if err := profile("change", time.Duration(times)*2*settle); err != nil {
			return err
		}
		took := 0.0
		cost, err := p.cost(ctx, times, func(i int) error {
			begin := time.Now()
			b.crowd.move(i)
			moved = i + 1
			if err := p.apply(ctx, command{Peers: n, Moved: moved}); err != nil {
				return err
			}
			took += time.Since(begin).Seconds() / float64(times)
			return sleep(ctx, settle)
		})
		if err != nil {
			return err
		}
		b.addCell(n, "a peer's endpoint changes: CPU, ms", "%s", cost)
		b.addCell(n, "a peer's endpoint changes: in force after, s", "%.3f", took)
		if err := profile("come", maxRuns*3*settle); err != nil {
			return err
		}
		took = 0
		cost, err = p.cost(ctx, maxRuns, func(int) error {
			b.crowd.forget(n)
			begin := time.Now()
			if err := p.apply(ctx, command{Peers: n + 1, Moved: moved}); err != nil {
				return err
			}
			for !b.crowd.has(n) {
				if err := sleep(ctx, 5*time.Millisecond); err != nil {
					return err
				}
			}
			took += time.Since(begin).Seconds() / maxRuns
			if err := sleep(ctx, settle); err != nil {
				return err
			}
			if err := p.apply(ctx, command{Peers: n, Moved: moved}); err != nil {
				return err
			}
			return sleep(ctx, settle)
		})
		if err != nil {
			return err
		}
		b.addCell(n, "a peer comes and goes: CPU, ms", "%s", cost)
		b.addCell(n, "a peer comes: connected after, s", "%.2f", took)
	}
	if !b.measures("back") {
		return nil
	}
	for _, how := range []struct {
		name  string
		pause time.Duration // between scrapes; negative: none
	}{{"nobody scrapes", -1}, {"a scrape each second", time.Second}, {"one scrape after the other", 0}} {
		p.end()
		b.crowd.reset(moved)
		began := time.Now()
		if p, err = b.start(ctx, n, moved); err != nil {
			return err
		}
		over, quiet := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for how.pause >= 0 && over.Err() == nil {
				_, _ = scrape()
				_ = sleep(over, how.pause)
			}
		}()
		_, all, err := b.crowd.wait(ctx, n)
		quiet()
		<-ended
		if err != nil {
			return err
		}
		b.addCell(n, "all come back, "+how.name+", s", "%.1f", all.Sub(began).Seconds())
	}
	return nil
}

// cost returns the CPU time of do in ms, with its standard error. It subtracts the CPU time that
// the process would have used at rest. Before each run it measures the CPU time at rest again,
// because that changes with the machine's load.
func (p *process) cost(ctx context.Context, times int, do func(i int) error) (string, error) {
	var costs []float64
	for i := range times {
		before, from := measure.CPU(p.pid), time.Now()
		if err := sleep(ctx, settle); err != nil {
			return "", err
		}
		idle := (measure.CPU(p.pid) - before).Seconds() / time.Since(from).Seconds()
		before, from = measure.CPU(p.pid), time.Now()
		if err := do(i); err != nil {
			return "", err
		}
		costs = append(costs, 1000*((measure.CPU(p.pid)-before).Seconds()-idle*time.Since(from).Seconds()))
	}
	mean, squares := 0.0, 0.0
	for _, c := range costs {
		mean += c / float64(times)
	}
	for _, c := range costs {
		squares += (c - mean) * (c - mean)
	}
	return fmt.Sprintf("%.1f ± %.1f", mean, math.Sqrt(squares/float64(times-1)/float64(times))), ctx.Err()
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}
