package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// recorded returns three rounds of some benchmarks from saved output of `go test`.
func recorded(t *testing.T) results {
	t.Helper()
	r := results{}
	for file, pkg := range map[string]string{"packet.txt": "packet", "datapath.txt": "gateway/datapath", "tun.txt": "gateway/tun"} {
		f, err := os.Open(filepath.Join("testdata", file))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := r.read(pkg, f); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestReadGroupsFiguresByUnitAndRound(t *testing.T) {
	got := recorded(t)[[2]string{"gateway/datapath", "Gateways/superpacket"}]
	want := map[string][]float64{
		"ns/op": {88838, 79076, 80452}, "MB/s": {699.48, 785.83, 772.39}, "cpu-ns/packet": {2009, 1784, 1820}, "ns/packet": {1974, 1757, 1788},
		"runs/op": {1.291, 1.306, 1.306}, "B/op": {19861, 1653, 1661}, "allocs/op": {49, 48, 48},
	}
	if !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestReadIgnoresLinesThatAreNotResults(t *testing.T) {
	r := results{}
	text := "goos: linux\nBenchmarkA\n--- SKIP: BenchmarkA\nBenchmarkB-2 fails here\nPASS\nok x 1.2s\n"
	if err := r.read("p", strings.NewReader(text)); err != nil || len(r) != 0 {
		t.Errorf("%v, error %v: want nothing", r, err)
	}
	if err := r.read("p", strings.NewReader("BenchmarkC-2 100 fast ns/op\n")); err == nil || !strings.Contains(err.Error(), `BenchmarkC-2: "fast" is no figure`) {
		t.Errorf("error %v", err)
	}
}

// The expected values were computed by hand from the files in testdata.
func TestTableConvertsAllFiguresToOneUnit(t *testing.T) {
	text := table(recorded(t), "somewhere", 3)
	row := map[string][]string{}
	for line := range strings.Lines(text) {
		if cells := strings.Split(strings.TrimSuffix(line, " |\n"), " | "); strings.HasPrefix(line, "| ") && len(cells) > 3 {
			row[strings.TrimPrefix(cells[0], "| ")] = cells
		}
	}
	for name, want := range map[string][]string{
		// 6.067 ns for a superpacket of 45 packets are 0.135 ns per packet. 4154 ns for a packet of
		// 1380 octets on the complete path are 0.3763 ns/bit.
		"parse":     {"**0.13** [0.13 - 0.14]", "7417", "< 0.1 %", "0"},
		"segment":   {"**53** [53 - 54]", "19", "1.3 %", "0"},
		"in memory": {"**1820** [1784 - 2009]", "0.55", "44 %", "1.1"},
		"real TUN":  {"**4154** [4059 - 4739]", "0.24", "100 %", "1.1"},
	} {
		if got := row[name]; len(got) < 6 || !slices.Equal(got[2:6], want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	for name, want := range map[string][]string{
		"coalesce":  {"**14** [13 - 14]", "74", "1.0 %", "0"},
		"in memory": {"**1334** [1182 - 1479]", "0.75", "100 %", "3"},
	} {
		if got := row[name]; len(got) < 4 || !slices.Equal(got[len(got)-4:], want) {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	if !strings.HasPrefix(text, "somewhere; 3 interleaved rounds.") {
		t.Errorf("no machine in %q", text[:50])
	}
}

func TestMissingListsBenchmarksWithoutFigures(t *testing.T) {
	missing := recorded(t).missing()
	if !slices.Contains(missing, "packet: BenchmarkParse/UDP4") || slices.Contains(missing, "packet: BenchmarkParse/TCP4") {
		t.Errorf("%q", missing)
	}
}

// If somebody renames a benchmark, this test must fail, because otherwise the table would only have
// a gap.
func TestStepsNameExistingBenchmarks(t *testing.T) {
	for _, s := range steps {
		for _, from := range []source{s.super, s.single} {
			if from.absent() {
				continue
			}
			name, _, _ := strings.Cut(from.bench, "/")
			files, err := filepath.Glob(filepath.Join("../..", from.pkg, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			if !slices.ContainsFunc(files, func(f string) bool {
				text, err := os.ReadFile(f)
				return err == nil && strings.Contains(string(text), "func Benchmark"+name+"(")
			}) {
				t.Errorf("%s: %s has no Benchmark%s", s.name, from.pkg, name)
			}
		}
	}
}

func TestPatternMatchesWholeBenchmarkNames(t *testing.T) {
	got := pattern("gateway/bind")
	want := `^BenchmarkLoopback$/^size=1452$/^batch=45$|^BenchmarkLoopback$/^size=96$/^batch=45$|^BenchmarkLoopback$/^size=1452$/^batch=1$|^BenchmarkLoopback$/^size=96$/^batch=1$`
	if got != want {
		t.Errorf("%s", got)
	}
	for _, p := range packages() {
		if _, err := regexp.Compile(pattern(p)); err != nil {
			t.Error(err)
		}
	}
}
