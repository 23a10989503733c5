package diff

import (
	"math/rand/v2"
	"slices"
	"testing"
)

type pair struct{ k, v int }

func key(p pair) int { return p.k }

func TestDiffKeepsTheInputOrder(t *testing.T) {
	have := []pair{{1, 1}, {2, 1}, {3, 1}}
	want := []pair{{5, 1}, {2, 2}, {3, 1}, {4, 1}}
	add, replace, remove := Of(have, want, key)
	if !slices.Equal(add, []pair{{5, 1}, {4, 1}}) || !slices.Equal(replace, []pair{{2, 2}}) || !slices.Equal(remove, []pair{{1, 1}}) {
		t.Fatalf("add %v, replace %v, remove %v", add, replace, remove)
	}
}

func TestDiffIsEmptyForEqualInputs(t *testing.T) {
	same := []pair{{1, 1}, {2, 2}}
	if add, replace, remove := Of(same, same, key); len(add)+len(replace)+len(remove) != 0 {
		t.Fatalf("add %v, replace %v, remove %v", add, replace, remove)
	}
}

// Elements at the beginning and the end that are equal in both lists are skipped only if that does
// not change the result.
func TestDiffComparesAllElements(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 50_000 {
		have := make([]pair, rng.IntN(8))
		for i := range have {
			have[i] = pair{rng.IntN(6), rng.IntN(2)}
		}
		want := slices.Clone(have)
		for range rng.IntN(3) {
			at := rng.IntN(len(want) + 1)
			if rng.IntN(2) == 0 || at == len(want) {
				want = slices.Insert(want, at, pair{rng.IntN(6), rng.IntN(2)})
			} else {
				want = slices.Delete(want, at, at+1)
			}
		}
		add, replace, remove := Of(have, want, key)
		wantAdd, wantReplace, wantRemove := compareAll(have, want, key)
		if !slices.Equal(add, wantAdd) || !slices.Equal(replace, wantReplace) || !slices.Equal(remove, wantRemove) {
			t.Fatalf("have %v, want %v: add %v, replace %v, remove %v; by all elements %v, %v, %v", have, want, add, replace, remove, wantAdd, wantReplace, wantRemove)
		}
	}
}

// The result, applied to a map in the obvious way, turns have into want.
func TestDiffTurnsHaveIntoWant(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	list := func() []pair {
		l := make([]pair, rng.IntN(8))
		for i := range l {
			l[i] = pair{rng.IntN(6), rng.IntN(3)}
		}
		return l
	}
	asMap := func(l []pair) map[int]int {
		m := map[int]int{}
		for _, p := range l {
			m[p.k] = p.v
		}
		return m
	}
	for range 10_000 {
		have, want := list(), list()
		add, replace, remove := Of(have, want, key)
		got := asMap(have)
		for _, p := range add {
			if _, ok := got[p.k]; ok {
				t.Fatalf("have %v, want %v: adds %v, which is there", have, want, p)
			}
			got[p.k] = p.v
		}
		for _, p := range replace {
			if v, ok := got[p.k]; !ok || v == p.v {
				t.Fatalf("have %v, want %v: replaces %v for nothing", have, want, p)
			}
			got[p.k] = p.v
		}
		for _, p := range remove {
			if _, ok := got[p.k]; !ok {
				t.Fatalf("have %v, want %v: removes %v twice", have, want, p)
			}
			delete(got, p.k)
		}
		wanted := asMap(want)
		if len(got) != len(wanted) {
			t.Fatalf("have %v, want %v: got %v", have, want, got)
		}
		for k, v := range wanted {
			if got[k] != v {
				t.Fatalf("have %v, want %v: got %v", have, want, got)
			}
		}
	}
}
