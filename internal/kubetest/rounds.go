package kubetest

import (
	"flag"
	"strconv"
)

// Rounds calls run once for each round of `go test -count`, with the flag set to 1. Tests use fixed
// names, so each round needs new API servers. It returns the worst exit code. It is for a TestMain;
// run starts the servers and calls testing.M.Run.
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
