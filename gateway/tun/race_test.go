//go:build race

package tun

// raceEnabled reports that sync.Pool discards some of its values, so that counts of
// allocations mean nothing.
const raceEnabled = true
