package main

import (
	"net/http"
	"net/http/pprof"
	"net/netip"

	"github.com/isthmus-net/isthmus/internal/cli"
)

// checkProfileAddress accepts nothing but a loopback address.
func checkProfileAddress(a string) error {
	if a == "" {
		return nil
	}
	if at, err := netip.ParseAddrPort(a); err != nil || !at.Addr().IsLoopback() {
		return cli.Usage("--pprof-address %q: want a loopback address and a port such as 127.0.0.1:6060, since a profile tells everything", a)
	}
	return nil
}

// profiles is the handler of /debug/pprof.
func profiles() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	return mux
}
