package kubetest

import (
	"flag"
	"strconv"
)

// Rounds runs all tests of a package as often as `go test -count` requests, for a TestMain. It sets
// that flag to 1 and calls run once per round. Tests use fixed names, so each round needs new API
// servers: run must start the servers and call testing.M.Run. Rounds returns the highest exit code.
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
