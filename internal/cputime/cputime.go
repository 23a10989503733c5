// Package cputime measures the processor time of tests and benchmarks. Other programs on the machine
// change it less than they change elapsed time.
package cputime

import (
	"syscall"
	"testing"
	"time"
)

// Used returns the processor time of this process so far, user and system, of all goroutines and of
// garbage collection.
func Used(t testing.TB) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
