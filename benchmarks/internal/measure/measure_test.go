package measure

import (
	"slices"
	"testing"
)

func TestMedianDoesNotReorderItsInput(t *testing.T) {
	for _, c := range []struct {
		v    []float64
		want float64
	}{{[]float64{7}, 7}, {[]float64{9, 1}, 5}, {[]float64{3, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}} {
		was := slices.Clone(c.v)
		if got := Median(c.v); got != c.want || !slices.Equal(c.v, was) {
			t.Errorf("Median(%v) = %v, want %v; %v afterwards", was, got, c.want, c.v)
		}
	}
}
