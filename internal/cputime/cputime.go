// Package cputime measures the processor time of tests and benchmarks. Other load on the machine
// affects elapsed time more than processor time.
package cputime

import (
	"syscall"
	"testing"
	"time"
)

// Used returns the processor time of this process so far: user and system time of all goroutines
// and of the garbage collector.
func Used(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
