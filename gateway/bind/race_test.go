//go:build race

package bind

// raceEnabled is true under the race detector. sync.Pool then discards some of its values, so
// that counts of allocations mean nothing.
const raceEnabled = true
