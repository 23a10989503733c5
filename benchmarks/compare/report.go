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

// A figure of a sample is a row of the table.
type figure struct {
	name   string
	format string
	more   bool    // is better
	margin float64 // by which a ratio may be worse than the worst that was recorded; zero: it is not checked
	of     func(sample) float64
}

// Margins, as ratios to -check's reference moved by themselves in five runs of two hours on a
// machine with other work (2026-11). CPU time for the same bulk is what moves least; small packets
// cost more where threads find their processor taken. Throughput and round trips say who got the
// processor, so that only a factor of two is worth an alarm; their tails say nothing in a few
// rounds.
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

// describe says where and how a run was measured, so that its figures mean something later.
func describe(mtu, rounds int, d time.Duration) string {
	return fmt.Sprintf("%s; underlay MTU %d, TCP by %s, %d interleaved rounds, %v a load", measure.Where(), mtu, congestionControl(), rounds, d)
}

// congestionControl is the kernel's, which the pods' namespaces inherit: BBR paces where CUBIC
// fills queues.
func congestionControl() string {
	name, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	if err != nil {
		return "unknown control"
	}
	return strings.TrimSpace(string(name))
}

// report prints the table and, with a folder, writes it there beside a plot and all samples,
// instead of those of earlier runs. The names say so when the MTU of the underlay is unusual.
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

// ratios are those of a peer's figure to the baseline's, round by round; nil when there is nothing
// to divide by.
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

// valuesOf are the figures of one peer in the order of the rounds.
func valuesOf(all []sample, peer string, f figure) []float64 {
	var v []float64
	for _, s := range all {
		if s.Peer == peer {
			v = append(v, f.of(s))
		}
	}
	return v
}
