package natengine

import "testing"

// CheckTables is checkTables for the tests outside the package.
func (e *Engine) CheckTables(t testing.TB) { e.checkTables(t) }
