package main

import (
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"time"
)

// checkProfileAddress accepts nothing but a loopback address.
func checkProfileAddress(a string) error {
	if a == "" {
		return nil
	}
	if at, err := netip.ParseAddrPort(a); err != nil || !at.Addr().IsLoopback() {
		return usage("--pprof-address %q: want a loopback address and a port such as 127.0.0.1:6060, since a profile tells everything", a)
	}
	return nil
}

// serveProfiles answers /debug/pprof on address, unless that is empty, until stop
// is called.
func serveProfiles(address string, log *slog.Logger) (stop func(), err error) {
	if address == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	log.Info("profiles", "address", l.Addr().String())
	go func() { _ = s.Serve(l) }()
	return func() { _ = s.Close() }, nil
}
