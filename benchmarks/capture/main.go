// Command capture measures the cost of a packet capture and of the flow log. It sends the same
// traffic between two pods of two clusters in all variants: with capture and flow log off, and with
// each of them on. The variants are interleaved in one run.
//
//	go run ./benchmarks/capture -isthmus bin/isthmus -rounds 7 -write docs/capture.md
//
// The capture runs on the sender's gateway and its output is discarded. The flow log runs on both
// gateways. The variant "off" appears twice, so that the table shows the measurement noise. The
// command needs root. It prints the table. With -write, it replaces the table in a page.
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
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// The marks in a page, between which write puts the table.
const begin, end = "<!-- measured by go run ./benchmarks/capture -->\n", "<!-- end of what was measured -->\n"

// A variant is a setting of capture and flow log, and a row of the table.
type variant struct {
	name    string
	flowLog bool
	capture []string // arguments of `isthmus capture`; nil: no capture
}

var variants = []variant{
	{name: "off"},
	{name: "off, again"},
	{name: "capture of another pod", capture: []string{"192.0.2.1"}},
	{name: "capture of everything, headers", capture: []string{}},
	{name: "capture of everything, whole packets", capture: []string{"--snaplen", "65535"}},
	{name: "flow log", flowLog: true},
}

// figures are the columns: the load and its unit.
var figures = []string{"TCP, 4 streams, Gbit/s", "UDP of 64 octets, kpps"}

func main() {
	log.SetFlags(0)
	if len(os.Args) > 1 && os.Args[1] == "load" {
		if err := load.Main(os.Args[2:]); err != nil {
			log.Fatal(err)
		}
		return
	}
	binary := flag.String("isthmus", "bin/isthmus", "path of isthmus")
	rounds := flag.Int("rounds", 7, "rounds; each measures every variant once")
	d := flag.Duration("duration", 1500*time.Millisecond, "duration of one load")
	page := flag.String("write", "", "page to write the table to; empty: print it")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	table, err := run(ctx, *binary, *rounds, *d)
	if err == nil && *page == "" {
		_, err = fmt.Print(table)
	} else if err == nil {
		err = write(*page, table)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, binary string, rounds int, d time.Duration) (table string, err error) {
	busy, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "", err
	}
	if binary, err = filepath.Abs(binary); err != nil {
		return "", err
	}
	l, err := lab.Up(ctx, lab.Spec{Name: "capture" + strconv.Itoa(os.Getpid()), Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: netip.MustParsePrefix("10.64.0.0/14"), Nodes: 1, PodsPerNode: 1},
		{Name: "b", PodCIDR: netip.MustParsePrefix("10.80.0.0/16"), Nodes: 1, PodsPerNode: 1},
	}})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, l.Down()) }()
	if err := l.JoinAll(); err != nil {
		return "", err
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	sink, err := load.Start(ctx, l.Clusters[1].Pods[0].Host, nil, self, "load", "sink")
	if err != nil {
		return "", err
	}
	defer func() {
		_ = sink.Kill()
		_, _ = sink.Wait()
	}()
	var names []string
	for _, v := range variants {
		names = append(names, v.name)
	}
	got, err := measure.Rounds(rounds, names, func(i int) ([]float64, error) { return measureOne(ctx, l, variants[i], self, binary, d) })
	if err != nil {
		return "", err
	}
	fields := strings.Fields(string(busy))
	return fmt.Sprintf("%s; load %s when it began. %d interleaved rounds, %v a load: median [smallest - largest], and the ratio to \"off\" of the same round.\n\n%s",
		measure.Where(), strings.Join(fields[:3], " "), rounds, d, tableOf(got)), nil
}

// measureOne starts the gateways with the settings of a variant, measures, and stops them.
func measureOne(ctx context.Context, l *lab.Lab, v variant, self, binary string, d time.Duration) (got []float64, err error) {
	a, b := l.Clusters[0], l.Clusters[1]
	if v.flowLog {
		for _, c := range l.Clusters {
			undo, failed := setFlowLog(filepath.Join(c.ConfigDir, "gateway.yaml"))
			if failed != nil {
				return nil, failed
			}
			defer func() { err = errors.Join(err, undo()) }()
		}
	}
	if err := l.StartGateways(ctx, binary); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.StopGateways()) }()
	target, err := l.Seen(a, b, b.Pods[0].Addr)
	if err != nil {
		return nil, err
	}
	ms := strconv.Itoa(int(d.Milliseconds()))
	from := a.Pods[0].Host
	for range 2 { // the first run only opens the connections
		if _, err = load.Run(ctx, from, self, "tcp", target.String(), "1", "100"); err == nil {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	if v.capture != nil {
		stop, failed := startCapture(ctx, a, binary, v.capture)
		if failed != nil {
			return nil, failed
		}
		defer func() { err = errors.Join(err, stop()) }()
	}
	tcp, err := load.Run(ctx, from, self, "tcp", target.String(), "4", ms)
	if err != nil {
		return nil, err
	}
	udp, err := load.Run(ctx, from, self, "udp", target.String(), "64", ms, "0")
	if err != nil {
		return nil, err
	}
	return []float64{float64(tcp.Bytes) * 8 / 1e9 / tcp.Seconds, float64(udp.Packets) / 1e3 / udp.Seconds}, nil
}

// setFlowLog enables the flow log in a gateway's configuration, which takes effect at its next
// start.
func setFlowLog(config string) (undo func() error, err error) {
	text, err := os.ReadFile(config)
	if err != nil {
		return nil, err
	}
	name := filepath.Join(os.TempDir(), fmt.Sprintf("isthmus-flows-%d.json", os.Getpid()))
	err = os.WriteFile(config, append(slices.Clip(text), "flowLog: "+name+"\n"...), 0o600)
	return func() error { return errors.Join(os.WriteFile(config, text, 0o600), os.RemoveAll(name)) }, err
}

// startCapture starts a capture and returns when the gateway has confirmed it.
func startCapture(ctx context.Context, c *lab.Cluster, binary string, args []string) (stop func() error, err error) {
	cmd := c.Gateway().Command(ctx, binary, append([]string{"capture", "-w", "-", "--duration", "1h", "--packets", "100000000", "--bytes", "17179869184"}, args...)...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	head := make([]byte, 4) // the file header arrives as soon as the capture has started
	if _, err := out.Read(head); err != nil {
		return nil, errors.Join(fmt.Errorf("the capture did not begin: %w", err), cmd.Wait())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<20)
		for {
			if _, err := out.Read(b); err != nil {
				return
			}
		}
	}()
	return func() error {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			return err
		}
		<-done
		return cmd.Wait()
	}, nil
}

// tableOf formats the table. It compares all variants with the first.
func tableOf(got measure.Samples) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| | %s |\n|---|%s\n", strings.Join(figures, " | "), strings.Repeat("---|", len(figures)))
	for i, v := range variants {
		fmt.Fprintf(&b, "| %s |", v.name)
		for f := range figures {
			fmt.Fprintf(&b, " %s, %s |", measure.Spread(got[i][f]), measure.Spread(measure.Ratios(got[i][f], got[0][f])))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// write puts the table between the marks of the page.
func write(page, table string) error {
	text, err := os.ReadFile(page)
	if err != nil {
		return err
	}
	before, rest, ok1 := strings.Cut(string(text), begin)
	_, after, ok2 := strings.Cut(rest, end)
	if !ok1 || !ok2 {
		return fmt.Errorf("%s has no %s%s", page, begin, end)
	}
	return os.WriteFile(page, []byte(before+begin+table+end+after), 0o600)
}
