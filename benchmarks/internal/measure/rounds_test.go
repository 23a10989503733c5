package measure

import (
	"slices"
	"testing"
)

func TestEachRoundMeasuresAllVariantsInRotatedOrder(t *testing.T) {
	var order []int
	s, err := Rounds(3, []string{"a", "b"}, func(variant int) ([]float64, error) {
		order = append(order, variant)
		return []float64{float64(len(order)), float64(100 * (variant + 1))}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []int{0, 1, 1, 0, 0, 1}; !slices.Equal(order, want) {
		t.Errorf("in the order %v, want %v", order, want)
	}
	const want = "\n| | a | b | ratio |\n|---|---|---|---|\n| x | 4.00 [1.00 - 5.00] | 3.00 [2.00 - 6.00] | **1.20 [0.75 - 2.00]** |\n| y | 100 [100 - 100] | 200 [200 - 200] | **2.00 [2.00 - 2.00]** |\n"
	if got := s.Pairs([]string{"a", "b"}, []string{"x", "y"}); got != want {
		t.Errorf("%s\nwant%s", got, want)
	}
}
