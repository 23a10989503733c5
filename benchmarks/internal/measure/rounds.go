package measure

import (
	"fmt"
	"log"
	"slices"
	"strconv"
	"strings"
)

// Samples are figures, indexed by variant, figure and round.
type Samples [][][]float64

// Rounds measures every variant once per round. Each round starts with a different variant, so that
// no variant always follows the same one. measureOne measures a variant and must always return the
// same number of figures.
func Rounds(rounds int, variants []string, measureOne func(variant int) ([]float64, error)) (Samples, error) {
	s := make(Samples, len(variants))
	for round := range rounds {
		for i := range variants {
			index := (i + round) % len(variants)
			got, err := measureOne(index)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", variants[index], err)
			}
			if s[index] == nil {
				s[index] = make([][]float64, len(got))
			}
			for figure, v := range got {
				s[index][figure] = append(s[index][figure], v)
			}
			log.Printf("round %d/%d  %-40s %.2f", round+1, rounds, variants[index], got)
		}
	}
	return s, nil
}

// Pairs returns a table with a row for each figure. For each pair of consecutive variants, the
// row has both values and the ratio of the second to the first.
func (s Samples) Pairs(variants, figures []string) string {
	var b strings.Builder
	b.WriteString("\n| |")
	for i, name := range variants {
		b.WriteString(" " + name + " |")
		if i%2 == 1 {
			b.WriteString(" ratio |")
		}
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(variants)*3/2) + "\n")
	for f, name := range figures {
		b.WriteString("| " + name + " |")
		for i := 0; i < len(variants); i += 2 {
			b.WriteString(Compared(s[i][f], s[i+1][f]))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// Compared returns three cells: two figures, and the ratio of the second to the first.
func Compared(base, v []float64) string {
	return fmt.Sprintf(" %s | %s | **%s** |", Spread(base), Spread(v), Spread(Ratios(v, base)))
}

// Ratios returns the ratios of v to base, round by round.
func Ratios(v, base []float64) []float64 {
	ratios := slices.Clone(v)
	for round := range ratios {
		ratios[round] /= base[round]
	}
	return ratios
}

// Spread returns the median of v with its minimum and maximum, with at least three digits.
func Spread(v []float64) string {
	digits := 2
	if m := Median(v); m >= 100 {
		digits = 0
	} else if m < 0.1 {
		digits = 4
	}
	text := func(f float64) string { return strconv.FormatFloat(f, 'f', digits, 64) }
	return fmt.Sprintf("%s [%s - %s]", text(Median(v)), text(slices.Min(v)), text(slices.Max(v)))
}
