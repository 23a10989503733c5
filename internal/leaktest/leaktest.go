// Package leaktest is goleak with more patience. On a busy machine, ending goroutines take longer
// than the half second that goleak allows.
package leaktest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

const patience = time.Minute

// Find is goleak.Find: an error names the goroutines that are left.
func Find(options ...goleak.Option) error {
	err := goleak.Find(options...)
	for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
		err = goleak.Find(options...)
	}
	return err
}

// Main is goleak.VerifyTestMain: it runs the tests of a package, fails when goroutines are left,
// and ends the process.
func Main(m *testing.M) { goleak.VerifyTestMain(waiting{m}) }

type waiting struct{ *testing.M }

func (m waiting) Run() int {
	code := m.M.Run()
	_ = Find() // goleak looks again and reports
	return code
}
