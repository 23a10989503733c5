//go:build race

package tun

// raceEnabled: sync.Pool then throws away part of what it is given, so that allocations say
// nothing.
const raceEnabled = true
