package main

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// samples are the figures of one benchmark by unit, one for each round.
type samples map[string][]float64

// results are the samples of all benchmarks, by package folder and benchmark name.
type results map[[2]string]samples

var processors = regexp.MustCompile(`-\d+$`) // the GOMAXPROCS suffix of a benchmark name

// read adds the figures that `go test -bench` has printed for a package.
func (r results) read(pkg string, output io.Reader) error {
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		// A line has a name, a count, then pairs of figure and unit. The line of a failed benchmark
		// has only its name.
		if len(f) < 4 || len(f)%2 != 0 || !strings.HasPrefix(f[0], "Benchmark") {
			continue
		}
		key := [2]string{pkg, processors.ReplaceAllString(strings.TrimPrefix(f[0], "Benchmark"), "")}
		if r[key] == nil {
			r[key] = samples{}
		}
		for i := 2; i < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			if err != nil {
				return fmt.Errorf("%s: %s: %q is no figure", pkg, f[0], f[i])
			}
			r[key][f[i+1]] = append(r[key][f[i+1]], v)
		}
	}
	return lines.Err()
}

// nanoseconds returns the cost of one packet in each round; nil if the benchmark has not run.
func (r results) nanoseconds(s source) []float64 { return r.scaled(s, s.unit, s.share) }

// scaled returns the figures of one unit, each multiplied by share.
func (r results) scaled(s source, unit string, share float64) []float64 {
	v := slices.Clone(r[[2]string{s.pkg, s.bench}][unit])
	for i := range v {
		v[i] *= share
	}
	return v
}

// missing returns the benchmarks of the steps without a figure: renamed, failed or skipped.
func (r results) missing() (names []string) {
	for _, s := range steps {
		for _, from := range []source{s.super, s.single} {
			if !from.absent() && len(r.nanoseconds(from)) == 0 {
				names = append(names, from.pkg+": Benchmark"+from.bench)
			}
		}
	}
	return names
}

// table formats the ladder as Markdown.
func table(r results, where string, rounds int) string {
	columns := []func(step) source{func(s step) source { return s.super }, func(s step) source { return s.single }}
	var whole [2]float64
	for i, column := range columns {
		for _, s := range steps {
			if v := r.nanoseconds(column(s)); len(v) > 0 && !s.aside {
				whole[i] = measure.Median(v)
			}
		}
	}
	var t strings.Builder
	fmt.Fprintf(&t, `%s; %d interleaved rounds.

Nanoseconds of CPU per packet, median [smallest - largest]; millions of packets a second that one core does of it; its share of the
whole way, which is the last row with a figure in that column; allocations per packet, in memory mostly the test network's. *Superpacket*: of a
TCP superpacket of %d packets of 1,420 octets (1,380 of payload), what it costs once divided among them. *Single*: UDP packets of 64 octets
that arrive many at a time.

| step | what it does | superpacket, ns | M/s | share | allocs | single, ns | M/s | share | allocs |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
`, where, rounds, segments)
	for _, s := range steps {
		fmt.Fprintf(&t, "| %s | %s |", s.name, s.what)
		for i, column := range columns {
			v := r.nanoseconds(column(s))
			if len(v) == 0 {
				t.WriteString(" | | | |")
				continue
			}
			m, share := measure.Median(v), ""
			if !s.aside {
				share = percent(m / whole[i])
			}
			allocs := measure.Median(r.scaled(column(s), "allocs/op", column(s).allocs))
			fmt.Fprintf(&t, " **%s** [%s - %s] | %s | %s | %s |",
				digits(m), digits(slices.Min(v)), digits(slices.Max(v)), digits(1000/m), share, strings.TrimSuffix(fmt.Sprintf("%.1f", allocs), ".0"))
		}
		t.WriteString("\n")
	}
	return t.String()
}

func percent(share float64) string {
	switch {
	case share < 0.001:
		return "< 0.1 %"
	case share < 0.1:
		return fmt.Sprintf("%.1f %%", 100*share)
	default:
		return fmt.Sprintf("%.0f %%", 100*share)
	}
}

// digits prints the significant digits of a figure: two for small values, the integer part for
// large ones.
func digits(v float64) string {
	switch {
	case v < 1:
		return fmt.Sprintf("%.2f", v)
	case v < 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.0f", v)
	}
}
