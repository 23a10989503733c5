package main

// rankTest is the exact one-sided test of Mann and Whitney (Wilcoxon's rank sum test). The result
// is the p-value: if x and y had the same distribution, the probability that samples of x are at
// least as far above those of y as these. A tie counts as a pair in which y is larger, so ties can
// only increase the result. The result is 1 if x or y is empty.
func rankTest(x, y []float64) float64 {
	above := 0 // number of pairs in which x is larger: the statistic U
	for _, a := range x {
		for _, b := range y {
			if a > b {
				above++
			}
		}
	}
	// orders[m][u] is the number of orders of n x and m y in which exactly u pairs have x above y.
	// The recurrence removes the largest of all values. If it is an x, it is above all m y and
	// contributes m pairs. If it is a y, it contributes none.
	n, m := len(x), len(y)
	orders := make([][]float64, m+1)
	for j := range orders {
		orders[j] = make([]float64, n*m+1)
		orders[j][0] = 1
	}
	for range n {
		for j := 1; j <= m; j++ {
			next := make([]float64, n*m+1)
			for u := range next {
				next[u] = orders[j-1][u]
				if u >= j {
					next[u] += orders[j][u-j]
				}
			}
			orders[j] = next
		}
	}
	var atLeast, all float64
	for u, count := range orders[m] {
		all += count
		if u >= above {
			atLeast += count
		}
	}
	return atLeast / all
}
