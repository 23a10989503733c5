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

// A check decides whether Isthmus became slower, on a machine whose speed drifts. For each figure
// it divides the median of Isthmus by the median of a reference, which the same run has measured.
// Ratios of single rounds would vary more, because the reference varies more than Isthmus. A figure
// is worse only when
//
//   - this ratio is worse than in each recorded run, by more than the figure's margin, and
//   - a rank test of the single rounds against all recorded rounds is significant at 1 %.
//
// Record runs at different hours (-record), so that the recording includes the drift of the
// machine.

// reference is the peer by whose figures a check divides: the baseline, on as many processors as
// Isthmus uses. On more processors, the baseline's CPU time depends on whether an idle processor is
// free at each hand-over of a packet. The spread of its CPU per Gbit is then 6.4 % instead of 3.9
// %.
const reference = "the same, GOMAXPROCS=1"

const (
	minRounds       = 3    // fewest rounds after which a check can pass
	minRecordedRuns = 3    // fewest recorded runs for which a figure's own margin applies
	minMargin       = 0.50 // minimum margin with fewer recorded runs than minRecordedRuns
	significant     = 0.01 // significance level of the rank test, for one figure
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
	peer           string
	figure         figure
	current        float64   // ratio of the medians in this run
	recorded       []float64 // the ratio of each recorded run
	limit          float64   // the worst ratio that is still acceptable
	worseThanLimit bool
	p              float64 // probability that rounds as bad as these occur by chance
}

// worse reports whether there is a regression.
func (f finding) worse() bool { return f.worseThanLimit && f.p <= significant }

func (f finding) String() string {
	return fmt.Sprintf("%s, %s: %.2fx of %s; recorded were %.2fx to %.2fx, and %.2fx would still do (p = %.4f)",
		f.peer, f.figure.name, f.current, reference, slices.Min(f.recorded), slices.Max(f.recorded), f.limit, f.p)
}

// compare compares all figures of Isthmus that both the run and the recording contain.
func compare(all []sample, was recording) (findings []finding) {
	for _, p := range peers {
		if !strings.HasPrefix(p.name, "isthmus") {
			continue
		}
		for _, f := range figures {
			current, rounds := ratioOfMedians(all, p.name, f)
			found := finding{peer: p.name, figure: f, current: current}
			var recordedRounds []float64
			for _, r := range was.Runs {
				if ratio, rounds := ratioOfMedians(r.Samples, p.name, f); rounds != nil {
					found.recorded = append(found.recorded, ratio)
					recordedRounds = append(recordedRounds, rounds...)
				}
			}
			if rounds == nil || found.recorded == nil || f.margin == 0 {
				continue
			}
			margin := f.margin
			if len(found.recorded) < minRecordedRuns {
				margin = max(margin, minMargin)
			}
			if f.largerIsBetter {
				found.limit = slices.Min(found.recorded) / (1 + margin)
				found.worseThanLimit, found.p = current < found.limit, rankTest(recordedRounds, rounds)
			} else {
				found.limit = slices.Max(found.recorded) * (1 + margin)
				found.worseThanLimit, found.p = current > found.limit, rankTest(rounds, recordedRounds)
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

// inLimits reports whether a check can pass now: no figure is worse than its limit. If it returns
// false, the caller measures more rounds.
func inLimits(findings []finding) bool {
	return !slices.ContainsFunc(findings, func(f finding) bool { return f.worseThanLimit })
}

// checkFindings returns an error that names every figure that became worse. It writes inconclusive
// findings to w.
func checkFindings(w io.Writer, findings []finding) error {
	if len(findings) == 0 {
		return errors.New("the recorded runs contain none of the measured figures")
	}
	var errs []error
	for _, f := range findings {
		switch {
		case f.worse():
			errs = append(errs, errors.New(f.String()))
		case f.worseThanLimit:
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
