//go:build race

package bind

// raceEnabled reports that sync.Pool discards some of its values, so that counts of
// allocations mean nothing.
const raceEnabled = true
