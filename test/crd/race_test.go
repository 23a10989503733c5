//go:build race

package crd

// raceEnabled reports whether the race detector is on. It makes the interpreter of the rules a
// hundred times slower.
const raceEnabled = true
