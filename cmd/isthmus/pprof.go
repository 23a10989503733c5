package main

import (
	"log/slog"
	"net/http"
	"net/http/pprof"
	"net/netip"

	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/httpserve"
)

// checkProfileAddress accepts only a loopback address.
func checkProfileAddress(a string) error {
	if a == "" {
		return nil
	}
	if addr, err := netip.ParseAddrPort(a); err != nil || !addr.Addr().IsLoopback() {
		return cli.Usage("--pprof-address %q: want a loopback address and a port such as 127.0.0.1:6060, because a profile exposes the whole process", a)
	}
	return nil
}

// serveProfiles serves profiles at an address that checkProfileAddress has accepted, until the
// returned servers are closed.
func serveProfiles(address string, log *slog.Logger) (*httpserve.Servers, error) {
	servers := httpserve.New(log)
	addr, err := servers.ListenPrivate("--pprof-address", address, nil, profiles())
	if err != nil {
		return nil, err
	}
	if addr != nil {
		log.Info("profiles", "address", addr)
	}
	servers.Serve()
	return servers, nil
}

func profiles() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	return mux
}
