package main

import (
	"math"
	"math/rand/v2"
	"testing"
)

// pairs returns samples of n and m distinct values whose statistic U is u.
func pairs(n, m, u int) (x, y []float64) {
	for j := range m {
		y = append(y, float64(j))
	}
	for range n {
		above := min(u, m)
		u -= above
		x = append(x, float64(above)-0.5)
	}
	return x, y
}

// The critical values come from statistics textbooks, for a one-sided test at 1 %. Each is the
// largest significant U, where U counts the pairs against the expected order.
func TestRankTestMatchesPublishedCriticalValues(t *testing.T) {
	for _, c := range []struct{ n, m, critical int }{
		{3, 7, 0}, {3, 10, 1}, {4, 5, 0}, {4, 10, 3}, {5, 5, 1}, {5, 8, 4}, {5, 10, 6}, {6, 6, 3}, {7, 9, 9}, {8, 8, 9}, {9, 10, 16}, {10, 10, 19},
		{10, 19, 44}, {10, 20, 47}, {20, 20, 114},
	} {
		if p := rankTest(pairs(c.n, c.m, c.n*c.m-c.critical)); p > 0.01 {
			t.Errorf("%d and %d, U = %d: p = %.4f, want 0.01 or less", c.n, c.m, c.critical, p)
		}
		if p := rankTest(pairs(c.n, c.m, c.n*c.m-c.critical-1)); p <= 0.01 {
			t.Errorf("%d and %d, U = %d: p = %.4f, want more than 0.01", c.n, c.m, c.critical+1, p)
		}
	}
}

// The reference enumerates every way to divide the values into x and y.
func TestRankTestMatchesExhaustiveCount(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		n, m := rng.IntN(6), rng.IntN(6)
		all := make([]float64, n+m)
		for i := range all {
			all[i] = rng.Float64()
		}
		u := func(chosen uint) (u int) {
			for i, a := range all {
				for j, b := range all {
					if chosen>>i&1 == 1 && chosen>>j&1 == 0 && a > b {
						u++
					}
				}
			}
			return u
		}
		count := func(chosen uint) (k int) {
			for ; chosen != 0; chosen &= chosen - 1 {
				k++
			}
			return k
		}
		first := uint(1)<<n - 1
		var atLeast, total float64
		for chosen := range uint(1) << (n + m) {
			if count(chosen) == n {
				total++
				if u(chosen) >= u(first) {
					atLeast++
				}
			}
		}
		if got := rankTest(all[:n], all[n:]); math.Abs(got-atLeast/total) > 1e-12 {
			t.Fatalf("%v and %v: %v, want %v", all[:n], all[n:], got, atLeast/total)
		}
	}
}

func TestRankTestFindsNoDifferenceBetweenEqualValues(t *testing.T) {
	if p := rankTest([]float64{1, 1, 1, 1}, []float64{1, 1, 1, 1, 1}); p != 1 {
		t.Errorf("p = %v", p)
	}
}
