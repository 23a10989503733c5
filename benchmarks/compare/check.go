package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// A check says whether Isthmus became slower, on a machine whose speed drifts. It compares ratios
// to the reference of the same run, and takes the ratio of the medians of a run, since the
// reference is the less steady of the two. A figure is worse only when
//
//   - this ratio is beyond the worst of all recorded runs by the figure's margin, and
//   - a rank test of the single rounds against all recorded ones says so at 1 %.
//
// Runs of different hours, which -record adds, tell the check how far the machine drifts by itself.

// reference is what the check divides by: the baseline on as many processors as Isthmus takes. With
// more of them its CPU time depends on whether a processor is idle when a packet is handed over
// (spread of the ratio of CPU per Gbit 6.4 % for 3.9).
const reference = "the same, GOMAXPROCS=1"

const (
	fewest      = 3    // rounds before a check may end well
	fewestRuns  = 3    // that have to be recorded for the margins of figures to count
	untried     = 0.50 // the least margin before
	significant = 0.01 // probability of a difference like that by chance, one figure alone
)

// A recording is what is kept of runs.
type recording struct {
	Runs []measured `json:"runs"`
}

// measured is one run.
type measured struct {
	Where   string   `json:"where"`
	Samples []sample `json:"samples"`
}

func readRecording(file string) (was recording, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return was, err
	}
	if err := json.Unmarshal(text, &was); err != nil {
		return was, fmt.Errorf("%s: %w", file, err)
	}
	return was, nil
}

// record adds a run to a file, and makes the file if there is none.
func record(file string, m measured) error {
	was, err := readRecording(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	was.Runs = append(was.Runs, m)
	text, err := json.MarshalIndent(was, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(text, '\n'), 0o644)
}

// A finding is what the check says of one figure of one peer.
type finding struct {
	peer   string
	figure figure
	now    float64   // ratio of the medians
	then   []float64 // the same of each recorded run
	limit  float64   // the worst ratio that still does
	beyond bool      // now is worse than limit
	p      float64   // probability of rounds as bad as these by chance
}

// worse says whether there is a regression.
func (f finding) worse() bool { return f.beyond && f.p <= significant }

func (f finding) String() string {
	return fmt.Sprintf("%s, %s: %.2fx of %s; recorded were %.2fx to %.2fx, and %.2fx would still do (p = %.4f)",
		f.peer, f.figure.name, f.now, reference, slices.Min(f.then), slices.Max(f.then), f.limit, f.p)
}

// judge compares all figures of Isthmus that are in both.
func judge(all []sample, was recording) (findings []finding) {
	for _, p := range peers {
		if !strings.HasPrefix(p.name, "isthmus") {
			continue
		}
		for _, f := range figures {
			now, rounds := ratioOfMedians(all, p.name, f)
			found := finding{peer: p.name, figure: f, now: now}
			var recordedRounds []float64
			for _, r := range was.Runs {
				if ratio, rounds := ratioOfMedians(r.Samples, p.name, f); rounds != nil {
					found.then = append(found.then, ratio)
					recordedRounds = append(recordedRounds, rounds...)
				}
			}
			if rounds == nil || found.then == nil || f.margin == 0 {
				continue
			}
			margin := f.margin
			if len(found.then) < fewestRuns {
				margin = max(margin, untried)
			}
			if f.more {
				found.limit = slices.Min(found.then) / (1 + margin)
				found.beyond, found.p = now < found.limit, rankTest(recordedRounds, rounds)
			} else {
				found.limit = slices.Max(found.then) * (1 + margin)
				found.beyond, found.p = now > found.limit, rankTest(rounds, recordedRounds)
			}
			findings = append(findings, found)
		}
	}
	return findings
}

// ratioOfMedians is that of a peer's figure to the reference's, and the ratio of each round's
// figure to the same median of the reference. There are none where the run has not measured both.
func ratioOfMedians(all []sample, peer string, f figure) (ratio float64, rounds []float64) {
	v, base := valuesOf(all, peer, f), valuesOf(all, reference, f)
	if len(v) == 0 || len(base) == 0 || slices.Min(base) <= 0 {
		return 0, nil
	}
	middle := measure.Median(base)
	for _, x := range v {
		rounds = append(rounds, x/middle)
	}
	return measure.Median(rounds), rounds
}

// inLimits says whether a check can end: nothing is beyond its limit. Otherwise more rounds decide.
func inLimits(findings []finding) bool {
	return !slices.ContainsFunc(findings, func(f finding) bool { return f.beyond })
}

// verdict is an error that names every figure that became worse. It writes what is not clear to w.
func verdict(w io.Writer, findings []finding) error {
	if len(findings) == 0 {
		return errors.New("the recorded runs have nothing to compare with")
	}
	var errs []error
	for _, f := range findings {
		switch {
		case f.worse():
			errs = append(errs, errors.New(f.String()))
		case f.beyond:
			fmt.Fprintf(w, "not clear: %v\n", f)
		}
	}
	fmt.Fprintf(w, "%d ratios compared, %d worse\n", len(findings), len(errs))
	return errors.Join(errs...)
}

// rounds is how many rounds there are samples of.
func rounds(all []sample) (n int) {
	for _, s := range all {
		n = max(n, s.Round+1)
	}
	return n
}
