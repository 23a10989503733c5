//go:build race

package bind

// raceEnabled: sync.Pool then throws away part of what it is given, so that allocations say
// nothing.
const raceEnabled = true
