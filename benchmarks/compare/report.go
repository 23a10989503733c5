package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// A figure is one measured quantity: a row of the table.
type figure struct {
	name           string
	format         string
	largerIsBetter bool
	margin         float64 // tolerated excess over the worst recorded ratio; zero: not checked
	value          func(sample) float64
}

// The margins come from five runs of two hours with the same code, on a machine with other work
// (2026-11). A margin covers the drift of the ratio between a figure and the reference's figure.
// CPU time for bulk traffic drifts least. Small packets cost more when their threads must wait for
// a processor. Throughput and round trips depend on the scheduling of processes, so only a factor
// of two is an alarm. Tail latencies are not checked, because a few rounds do not determine them.
const (
	steady   = 0.12
	wakeful  = 0.25
	memory   = 0.50
	unsteady = 1.00
)

var figures = []figure{
	{"TCP 1 stream, Gbit/s", "%.2f", true, unsteady, func(s sample) float64 { return s.TCP1 }},
	{"TCP 4 streams, Gbit/s", "%.2f", true, unsteady, func(s sample) float64 { return s.TCP4 }},
	{"TCP both ways, Gbit/s", "%.2f", true, unsteady, func(s sample) float64 { return s.TCP2 }},
	{"gateway CPU, s/Gbit", "%.3f", false, steady, func(s sample) float64 { return s.CPU }},
	{"UDP 64 B without loss, kpps", "%.0f", true, unsteady, func(s sample) float64 { return s.Rate }},
	{"UDP 64 B flooded, kpps", "%.0f", true, unsteady, func(s sample) float64 { return s.Flood }},
	{"gateway CPU flooded, us/packet", "%.1f", false, unsteady, func(s sample) float64 { return s.FloodC }},
	{"gateway CPU at 20 kpps, us/packet", "%.1f", false, wakeful, func(s sample) float64 { return s.Paced }},
	{"RTT p50, us", "%.0f", false, unsteady, func(s sample) float64 { return s.P50 }},
	{"RTT p90, us", "%.0f", false, 0, func(s sample) float64 { return s.P90 }},
	{"RTT p99, us", "%.0f", false, 0, func(s sample) float64 { return s.P99 }},
	{"RTT p99.9, us", "%.0f", false, 0, func(s sample) float64 { return s.P999 }},
	{"peak memory, MiB", "%.0f", false, memory, func(s sample) float64 { return s.RSS }},
}

// describe returns the machine, the versions and the settings of a run, so that later runs can be
// compared with it.
func describe(mtu, rounds int, d time.Duration) string {
	return fmt.Sprintf("%s; underlay MTU %d, TCP by %s, %d interleaved rounds, %v a load", measure.Where(), mtu, congestionControl(), rounds, d)
}

// congestionControl returns the kernel's TCP congestion control, which the pods' namespaces
// inherit. It affects the figures, because BBR paces its packets and CUBIC fills queues.
func congestionControl() string {
	name, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		return "unknown control"
	}
	return strings.TrimSpace(string(name))
}

// report prints the table. If out is set, it also writes the table, a plot and all samples into
// that folder, replacing those of earlier runs. File names contain the underlay's MTU if that is
// unusual.
func report(all []sample, where string, mtu int, out string) error {
	var names []string
	for _, p := range peers {
		if slices.ContainsFunc(all, func(s sample) bool { return s.Peer == p.name }) {
			names = append(names, p.name)
		}
	}
	var t strings.Builder
	fmt.Fprintf(&t, "%s.\n\nMedian [smallest - largest]; then the ratio to %s, formed round by round, with its own median and spread.\n\n| |", where, baseline)
	for _, n := range names {
		fmt.Fprintf(&t, " %s |", n)
	}
	t.WriteString("\n|---|" + strings.Repeat("---|", len(names)) + "\n")
	for _, f := range figures {
		fmt.Fprintf(&t, "| %s |", f.name)
		for _, n := range names {
			v := valuesOf(all, n, f)
			if slices.Max(v) == 0 {
				t.WriteString(" - |")
				continue
			}
			fmt.Fprintf(&t, " "+f.format+" ["+f.format+" - "+f.format+"]", measure.Median(v), slices.Min(v), slices.Max(v))
			if r := ratios(all, n, f); n != baseline && r != nil {
				fmt.Fprintf(&t, "<br>**%.2fx** [%.2f - %.2f]", measure.Median(r), slices.Min(r), slices.Max(r))
			}
			t.WriteString(" |")
		}
		t.WriteString("\n")
	}
	fmt.Print("\n" + t.String())
	if out == "" {
		return nil
	}
	name := "compare"
	if mtu != 1500 {
		name = fmt.Sprintf("compare-mtu%d", mtu)
	}
	file := filepath.Join(out, name+".json")
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := record(file, measured{where, all}); err != nil {
		return err
	}
	for suffix, content := range map[string][]byte{".md": []byte(t.String()), ".svg": plot(all, names, where)} {
		if err := os.WriteFile(filepath.Join(out, name+suffix), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// ratios divides a peer's figure by the baseline's, round by round. It returns nil if either is
// missing.
func ratios(all []sample, peer string, f figure) []float64 {
	v, base := valuesOf(all, peer, f), valuesOf(all, baseline, f)
	if len(v) == 0 || len(base) != len(v) || slices.Min(base) <= 0 {
		return nil
	}
	for i := range v {
		v[i] /= base[i]
	}
	return v
}

// valuesOf returns a figure of one peer in the order of the rounds.
func valuesOf(all []sample, peer string, f figure) []float64 {
	var v []float64
	for _, s := range all {
		if s.Peer == peer {
			v = append(v, f.value(s))
		}
	}
	return v
}
