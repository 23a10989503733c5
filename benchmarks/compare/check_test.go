package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
)

// samples returns n rounds of the reference and of Isthmus with the given throughput and memory.
func samples(n int, tcp, memory float64) (all []sample) {
	for i := range n {
		wobble := 1 + float64(i%3)/20
		all = append(all,
			sample{Peer: reference, Round: i, TCP1: 2 * wobble, RSS: 300},
			sample{Peer: "isthmus without USO", Round: i, TCP1: tcp * wobble, RSS: memory * wobble})
	}
	return all
}

func TestCheckNamesRegressions(t *testing.T) {
	was := recording{[]measured{{"in the morning", samples(5, 3, 60)}, {"in the evening", samples(5, 2.8, 64)}}}
	for name, c := range map[string]struct {
		current []sample
		want    []string // substrings of the error; none: no error
	}{
		"the same":               {samples(5, 3, 60), nil},
		"better":                 {samples(5, 5, 30), nil},
		"within the margin":      {samples(5, 1.6, 85), nil},
		"less throughput":        {samples(5, 1.3, 60), []string{"isthmus without USO, TCP 1 stream, Gbit/s: 0.65x of " + reference + "; recorded were 1.40x to 1.50x, and 0.70x would"}},
		"none at all":            {samples(5, 0, 60), []string{"isthmus without USO, TCP 1 stream, Gbit/s: 0.00x"}},
		"more memory":            {samples(5, 3, 120), []string{"isthmus without USO, peak memory, MiB: 0.42x", "recorded were 0.21x to 0.22x"}},
		"both":                   {samples(5, 1.3, 120), []string{"isthmus without USO, TCP 1 stream", "isthmus without USO, peak memory"}},
		"too few to be clear":    {samples(1, 1.3, 120), nil},
		"nothing to compare for": {samples(5, 3, 60)[:1], []string{"contain none of the measured figures"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkFindings(io.Discard, compare(c.current, was))
			if (err == nil) != (c.want == nil) {
				t.Fatalf("error %v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %v: want %q in it", err, w)
				}
			}
		})
	}
}

// If every figure is within its limit, a check passes early. If a figure is not, the check measures
// more rounds.
func TestExceededLimitTriggersMoreRounds(t *testing.T) {
	was := recording{[]measured{{"here", samples(5, 3, 60)}}}
	for _, c := range []struct {
		tcp, memory float64
		want        bool
	}{{3, 60, true}, {3, 120, false}, {1.3, 60, false}} {
		if got := inLimits(compare(samples(3, c.tcp, c.memory), was)); got != c.want {
			t.Errorf("throughput %v, memory %v: %t", c.tcp, c.memory, got)
		}
	}
}

func TestCheckIgnoresTailLatencies(t *testing.T) {
	was := []sample{{Peer: reference, P99: 100, P999: 100}, {Peer: "isthmus without USO", P99: 100, P999: 100}}
	current := []sample{{Peer: reference, P99: 100, P999: 100}, {Peer: "isthmus without USO", P99: 900, P999: 900}}
	if findings := compare(current, recording{[]measured{{"here", was}}}); len(findings) != 0 {
		t.Errorf("%v", findings)
	}
}

// The drift of ratios cannot be estimated from a single run.
func TestCheckUsesMarginsOnlyAfterThreeRecordedRuns(t *testing.T) {
	run := func(cpu float64) (all []sample) {
		for i := range 5 {
			all = append(all, sample{Peer: reference, Round: i, CPU: 0.5}, sample{Peer: "isthmus without USO", Round: i, CPU: cpu})
		}
		return all
	}
	var was recording
	for n := 1; n <= 4; n++ {
		was.Runs = append(was.Runs, measured{"here", run(0.3)})
		if err := checkFindings(io.Discard, compare(run(0.3*1.2), was)); (err != nil) != (n >= minRecordedRuns) {
			t.Errorf("a fifth more CPU than in %d runs: %v", n, err)
		}
	}
}

// The simulated machine behaves like the one on which the limits were measured: each run has its
// own base level for the reference and for Isthmus, and each round adds noise. The check must
// rarely report an unchanged speed as worse. If the CPU time grows by 25 %, a single figure must
// detect that in about every second check; a gateway has several figures. If it grows by 40 %, the
// figure must detect that nearly always.
func TestCheckDistinguishesDriftFromRegression(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	run := func(n int, slower float64) (all []sample) {
		base, own := 0.40*(1+rng.NormFloat64()*0.03), 0.28*slower*(1+rng.NormFloat64()*0.02)
		for i := range n {
			all = append(all, sample{Peer: reference, Round: i, CPU: base * (1 + rng.NormFloat64()*0.03)},
				sample{Peer: "isthmus without USO", Round: i, CPU: own * (1 + rng.NormFloat64()*0.03)})
		}
		return all
	}
	const checks = 300
	alarms, quarters, fifths := 0, 0, 0
	for range checks {
		var was recording
		for range 4 {
			was.Runs = append(was.Runs, measured{"here", run(3, 1)})
		}
		for _, c := range []struct {
			slower float64
			count  *int
		}{{1, &alarms}, {1.25, &quarters}, {1.4, &fifths}} {
			all := run(9, c.slower)
			if early := all[:2*minRounds]; inLimits(compare(early, was)) {
				all = early
			}
			if checkFindings(io.Discard, compare(all, was)) != nil {
				*c.count++
			}
		}
	}
	if alarms > checks/100 || quarters < checks/2 || fifths < checks*90/100 {
		t.Errorf("of %d checks %d cried wolf; of as many regressions by a quarter %d were seen, by two fifths %d", checks, alarms, quarters, fifths)
	}
}

func TestRecordAppendsRuns(t *testing.T) {
	file := filepath.Join(t.TempDir(), "compare.json")
	for i := range 2 {
		if err := record(file, measured{fmt.Sprint("run ", i), samples(2+i, 3, 60)}); err != nil {
			t.Fatal(err)
		}
	}
	was, err := readRecording(file)
	if err != nil || len(was.Runs) != 2 || was.Runs[1].Where != "run 1" || rounds(was.Runs[1].Samples) != 3 || was.Runs[0].Samples[1].TCP1 != 3 {
		t.Errorf("%+v, error %v", was, err)
	}
}
