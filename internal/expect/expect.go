// Package expect has common checks of tests: that there is no error, and that a condition becomes
// true.
package expect

import (
	"testing"
	"time"
)

// Patience is the timeout for an expected event on a busy machine.
const Patience = 90 * time.Second

// NoError ends the test on an error.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually waits until f returns nil. It ends the test after Patience. event describes the event
// in the error.
func Eventually(t testing.TB, event string, f func() error) {
	t.Helper()
	err := f()
	for deadline := time.Now().Add(Patience); err != nil; err = f() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not come within %v: %v", event, Patience, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
