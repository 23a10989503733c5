package main

// rankTest is the one-sided exact test of Mann and Whitney (Wilcoxon's rank sum): the probability
// that values of x would lie as high above those of y as they do if both came from the same source.
// Equal values count for y, so that ties make it no smaller than it is. It is 1 when one of both is
// empty.
func rankTest(x, y []float64) float64 {
	above := 0 // pairs in which x is the larger: the statistic U
	for _, a := range x {
		for _, b := range y {
			if a > b {
				above++
			}
		}
	}
	// orders[m][u] is in how many orders of n x and m y exactly u pairs have the x above the y, n
	// growing: the largest of all is either an x, above every y, or a y, above none.
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
