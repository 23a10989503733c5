package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A column of the table: one figure of a sample.
type column struct {
	name   string
	format string
	of     func(sample) float64
}

var columns = []column{
	{"TCP 1 stream, Gbit/s", "%.2f", func(s sample) float64 { return s.TCP1 }},
	{"TCP 4 streams, Gbit/s", "%.2f", func(s sample) float64 { return s.TCP4 }},
	{"gateway CPU, s/Gbit", "%.3f", func(s sample) float64 { return s.CPU }},
	{"UDP 64 B flooded, kpps", "%.0f", func(s sample) float64 { return s.Flood }},
	{"gateway CPU flooded, us/packet", "%.1f", func(s sample) float64 { return s.FloodC }},
	{"gateway CPU at 20 kpps, us/packet", "%.1f", func(s sample) float64 { return s.Paced }},
	{"RTT p50, us", "%.0f", func(s sample) float64 { return s.P50 }},
	{"RTT p99, us", "%.0f", func(s sample) float64 { return s.P99 }},
	{"peak memory, MiB", "%.0f", func(s sample) float64 { return s.RSS }},
}

// describe says where and how it was measured, so that a figure can be read
// later.
func describe(mtu, rounds int, d time.Duration) string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	cpu := "unknown CPU"
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, rest, ok := strings.Cut(string(info), "model name\t: "); ok {
			cpu, _, _ = strings.Cut(rest, "\n")
		}
	}
	commit, err := exec.Command("git", "describe", "--always", "--dirty").Output()
	if err != nil {
		commit = []byte("unknown")
	}
	return fmt.Sprintf("%s, %d CPUs, Linux %s, %s, commit %s, %s; underlay MTU %d, %d interleaved rounds, %v a load",
		cpu, runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), runtime.Version(), strings.TrimSpace(string(commit)),
		time.Now().UTC().Format("2006-01-02"), mtu, rounds, d)
}

// report prints the table and, with a folder, writes it there beside all
// samples.
func report(all []sample, where, out string) error {
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
	for _, c := range columns {
		fmt.Fprintf(&t, "| %s |", c.name)
		for _, n := range names {
			v := valuesOf(all, n, c)
			if slices.Max(v) == 0 {
				t.WriteString(" - |")
				continue
			}
			fmt.Fprintf(&t, " "+c.format+" ["+c.format+" - "+c.format+"]", median(v), slices.Min(v), slices.Max(v))
			if base := valuesOf(all, baseline, c); n != baseline && len(base) == len(v) && slices.Min(base) > 0 {
				for i := range v {
					v[i] /= base[i]
				}
				fmt.Fprintf(&t, "<br>**%.2fx** [%.2f - %.2f]", median(v), slices.Min(v), slices.Max(v))
			}
			t.WriteString(" |")
		}
		t.WriteString("\n")
	}
	fmt.Print("\n" + t.String())
	if out == "" {
		return nil
	}
	samples, err := json.MarshalIndent(map[string]any{"where": where, "samples": all}, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(out, "compare.json"), append(samples, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "compare.md"), []byte(t.String()), 0o644)
}

// valuesOf are the figures of one peer in the order of the rounds.
func valuesOf(all []sample, peer string, c column) []float64 {
	var v []float64
	for _, s := range all {
		if s.Peer == peer {
			v = append(v, c.of(s))
		}
	}
	return v
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
