package kubetest

import (
	"flag"
	"strconv"
)

// Rounds runs all tests of a package as often as `go test -count` requests, by one call of run
// per round with that flag set to 1. Tests use fixed names, so each round needs new API servers:
// run starts the servers and calls testing.M.Run. Rounds is for a TestMain. It returns the worst
// exit code.
func Rounds(run func() int) (code int) {
	flag.Parse()
	f := flag.Lookup("test.count")
	rounds, err := strconv.Atoi(f.Value.String())
	if err != nil || f.Value.Set("1") != nil {
		panic(err) // the flag of package testing is a number
	}
	for range rounds {
		code = max(code, run())
	}
	return code
}
