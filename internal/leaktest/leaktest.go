// Package leaktest is goleak with longer timeouts. goleak waits half a second, but on a busy
// machine goroutines may need longer to end.
package leaktest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

const patience = time.Minute

// Find is goleak.Find. The error names the remaining goroutines.
func Find(options ...goleak.Option) error {
	err := goleak.Find(options...)
	for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
		err = goleak.Find(options...)
	}
	return err
}

// Main is goleak.VerifyTestMain. It runs the tests of a package, fails if goroutines remain, and
// exits.
func Main(m *testing.M) { goleak.VerifyTestMain(waiting{m}) }

type waiting struct{ *testing.M }

func (m waiting) Run() int {
	code := m.M.Run()
	_ = Find() // only waits: goleak checks again and reports
	return code
}
