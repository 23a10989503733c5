// Package diff compares what is wanted with what is there.
package diff

// Of returns what has to be added, replaced and removed to turn have into want. Elements are
// matched by key; a matched element that differs in any other field is to be replaced, and the
// result holds its wanted form. The results keep the order of the inputs, so that a plan prints the
// same every time. When a key occurs more than once in one input, its last element counts.
func Of[K, V comparable](have, want []V, key func(V) K) (add, replace, remove []V) {
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
			continue // done, or the last element with this key is yet to come
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
