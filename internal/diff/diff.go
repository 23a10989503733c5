// Package diff compares a desired state with the actual one.
package diff

import "slices"

// maxDiffering is the maximum number of different elements for which Of compares without hashing.
// Up to this number, Of walks through both lists side by side, so a change among thousands of
// elements costs microseconds.
const maxDiffering = 64

// Of returns the elements to add, replace and remove in order to turn have into want. Elements are
// matched by key. If matched elements differ, replace has the element of want. The results keep the
// order of the inputs, so that a plan prints the same every time. If a key occurs more than once in
// one input, its last element counts.
//
// If have and want are the same slice, Of returns at once.
func Of[K, V comparable](have, want []V, key func(V) K) (add, replace, remove []V) {
	if len(have) == len(want) && (len(have) == 0 || &have[0] == &want[0]) {
		return nil, nil, nil
	}
	old, wanted := differing(have, want)
	switch {
	case len(old)+len(wanted) == 0:
		return nil, nil, nil
	case len(old)+len(wanted) > maxDiffering:
		return compareAll(have, want, key)
	}
	var keys []K
	for _, v := range slices.Concat(old, wanted) {
		if k := key(v); !slices.Contains(keys, k) {
			keys = append(keys, k)
		}
	}
	if countKeys(have, keys, key) != len(old) || countKeys(want, keys, key) != len(wanted) {
		// A further element of have or want has the same key as an element of old or wanted, so all
		// elements must be compared.
		return compareAll(have, want, key)
	}
	return compareAll(old, wanted, key)
}

// differing walks through both lists side by side. It returns the elements that do not match. If
// there are more than maxDiffering, the result is incomplete.
func differing[V comparable](have, want []V) (old, wanted []V) {
	i, j := 0, 0
walk:
	for i < len(have) && j < len(want) && len(old)+len(wanted) <= maxDiffering {
		if have[i] == want[j] {
			i, j = i+1, j+1
			continue
		}
		for d := 1; d <= maxDiffering; d++ {
			if j+d < len(want) && want[j+d] == have[i] {
				wanted, j = append(wanted, want[j:j+d]...), j+d
				continue walk
			}
			if i+d < len(have) && have[i+d] == want[j] {
				old, i = append(old, have[i:i+d]...), i+d
				continue walk
			}
		}
		old, wanted = append(old, have[i]), append(wanted, want[j])
		i, j = i+1, j+1
	}
	return append(old, have[i:]...), append(wanted, want[j:]...)
}

// countKeys returns the number of elements of list whose key is in keys.
func countKeys[K, V comparable](list []V, keys []K, key func(V) K) (n int) {
	for _, v := range list {
		// There are usually one or two keys, for which this is faster than a map.
		if slices.Contains(keys, key(v)) {
			n++
		}
	}
	return n
}

// compareAll returns the same result as Of. It compares all elements through maps.
func compareAll[K, V comparable](have, want []V, key func(V) K) (add, replace, remove []V) {
	old := make(map[K]V, len(have))
	for _, v := range have {
		old[key(v)] = v
	}
	wanted := make(map[K]V, len(want))
	for _, v := range want {
		wanted[key(v)] = v
	}
	for _, v := range want {
		k := key(v)
		if last, open := wanted[k]; !open || last != v {
			continue // already handled, or the last element with this key comes later
		}
		switch was, ok := old[k]; {
		case !ok:
			add = append(add, v)
		case was != v:
			replace = append(replace, v)
		}
		delete(wanted, k)
		delete(old, k)
	}
	for _, v := range have {
		k := key(v)
		if last, open := old[k]; open && last == v {
			remove = append(remove, v)
			delete(old, k)
		}
	}
	return add, replace, remove
}
