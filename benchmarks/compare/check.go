package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/benchmarks/internal/measure"
)

// tolerance is by how much the median of a ratio may be worse than the worst that
// was recorded. The machine is another one every time; ratios move less than
// times, but they do move.
const tolerance = 1.15

// check compares the ratios of Isthmus to the baseline with those recorded in a
// compare.json. The error names every figure that became worse.
func check(all []sample, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var was recording
	if err := json.Unmarshal(text, &was); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	var errs []error
	compared := 0
	for _, p := range peers {
		if !strings.HasPrefix(p.name, "isthmus") {
			continue
		}
		for _, f := range figures {
			now, then := ratios(all, p.name, f), ratios(was.Samples, p.name, f)
			if now == nil || then == nil || strings.HasPrefix(f.name, "RTT p9") { // tails are noise here
				continue
			}
			compared++
			if worst, ok := acceptable(f, measure.Median(now), then); !ok {
				errs = append(errs, fmt.Errorf("%s, %s: %.2fx of %s; recorded were %.2fx to %.2fx, and %.2fx would still do",
					p.name, f.name, measure.Median(now), baseline, slices.Min(then), slices.Max(then), worst))
			}
		}
	}
	if compared == 0 {
		return fmt.Errorf("%s has nothing to compare with", file)
	}
	fmt.Printf("\n%d ratios compared with %s, %d worse\n", compared, file, len(errs))
	return errors.Join(errs...)
}

// acceptable returns the worst ratio that is no regression, and whether now is one.
func acceptable(f figure, now float64, then []float64) (worst float64, ok bool) {
	if f.more {
		worst = slices.Min(then) / tolerance
		return worst, now >= worst
	}
	worst = slices.Max(then) * tolerance
	return worst, now <= worst
}
