//go:build race

package datapath_test

// raceEnabled is true under the race detector. There, sync.Pool drops a part of the values put
// into it, so counts of allocations are meaningless.
const raceEnabled = true
