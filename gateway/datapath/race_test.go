//go:build race

package datapath_test

// raceEnabled: sync.Pool then throws away part of what it is given, so that allocations say
// nothing.
const raceEnabled = true
