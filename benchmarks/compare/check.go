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

// A check decides whether Isthmus became slower, on a machine whose speed drifts. It compares
// ratios to a reference that the same run has measured. It uses the ratio of the two medians of a
// run, because the reference varies more than Isthmus. A figure is worse only when
//
//   - this ratio exceeds the worst of all recorded runs by more than the figure's margin, and
//   - a rank test of the single rounds against all recorded rounds is significant at 1 %.
//
// Runs at different hours, added with -record, show the check the drift of the machine itself.

// reference is the peer whose figures are the divisor: the baseline restricted to the number of
// processors that Isthmus uses. On more processors, the baseline's CPU time depends on whether an
// idle processor is free at each hand-over of a packet. The spread of its CPU per Gbit is then
// 6.4 % instead of 3.9 %.
const reference = "the same, GOMAXPROCS=1"

const (
	fewest      = 3    // fewest rounds after which a check can pass
	fewestRuns  = 3    // fewest recorded runs for which a figure's own margin applies
	untried     = 0.50 // minimum margin with fewer recorded runs
	significant = 0.01 // probability of such a difference by chance, for one figure
)

// A recording is the file of earlier runs.
type recording struct {
	Runs []measured `json:"runs"`
}

// measured is one recorded run.
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

// record appends a run to a file, and creates the file if necessary.
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

// A finding is the result of the check for one figure of one peer.
type finding struct {
	peer   string
	figure figure
	now    float64   // ratio of the medians
	then   []float64 // the ratio of each recorded run
	limit  float64   // the worst ratio that is still acceptable
	beyond bool      // now is worse than limit
	p      float64   // probability that rounds as bad as these occur by chance
}

// worse reports whether there is a regression.
func (f finding) worse() bool { return f.beyond && f.p <= significant }

func (f finding) String() string {
	return fmt.Sprintf("%s, %s: %.2fx of %s; recorded were %.2fx to %.2fx, and %.2fx would still do (p = %.4f)",
		f.peer, f.figure.name, f.now, reference, slices.Min(f.then), slices.Max(f.then), f.limit, f.p)
}

// compare compares all figures of Isthmus that both the run and the recording contain.
func compare(all []sample, was recording) (findings []finding) {
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

// ratioOfMedians divides the median of a peer's figure by the reference's median. rounds are the
// single rounds divided by the same reference median. Both are empty if the run lacks either
// peer.
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

// inLimits reports whether a check can pass now: no figure exceeds its limit. Otherwise the
// caller measures more rounds.
func inLimits(findings []finding) bool {
	return !slices.ContainsFunc(findings, func(f finding) bool { return f.beyond })
}

// checkFindings returns an error that names every figure that became worse. It writes inconclusive
// findings to w.
func checkFindings(w io.Writer, findings []finding) error {
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

// rounds returns the number of measured rounds.
func rounds(all []sample) (n int) {
	for _, s := range all {
		n = max(n, s.Round+1)
	}
	return n
}
