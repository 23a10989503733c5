// Package httpserve runs the HTTP servers of a component. Timeouts and a limit on connections
// keep slow and idle clients from using up resources. At shutdown, requests in progress get one
// more second.
package httpserve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Servers are the HTTP servers of one component. They are not safe for concurrent use.
type Servers struct {
	log *slog.Logger
	all []server
	wg  sync.WaitGroup
}

type server struct {
	what     string
	listener net.Listener
	http     *http.Server
}

// New returns Servers without a server. Errors of running servers are logged to log.
func New(log *slog.Logger) *Servers { return &Servers{log: log} }

// Listen opens a socket for a handler that needs no authorization, and returns the socket's
// address. With an empty address it opens none and returns nil. label is the name of the server in
// errors. Connections wait until Serve accepts them.
func (s *Servers) Listen(label, address string, handler http.Handler) (net.Addr, error) {
	return s.listen(label, address, nil, handler)
}

// ListenPrivate is Listen for a handler that needs authorization. It uses secure.TLS. It does not
// apply secure.Guarded: handler must do that itself. If secure is nil, ListenPrivate logs a warning
// unless the address is a loopback address.
func (s *Servers) ListenPrivate(label, address string, secure *Secure, handler http.Handler) (net.Addr, error) {
	if secure != nil {
		return s.listen(label, address, secure.TLS, handler)
	}
	addr, err := s.listen(label, address, nil, handler)
	if tcp, ok := addr.(*net.TCPAddr); ok && !tcp.IP.IsLoopback() {
		s.log.Warn("this address has no access control; use a loopback address, or --metrics-secure for metrics",
			"server", label, "address", address)
	}
	return addr, err
}

func (s *Servers) listen(label, address string, secure *tls.Config, handler http.Handler) (net.Addr, error) {
	if address == "" {
		return nil, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", label, err)
	}
	addr := l.Addr()
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	s.serve(label, l, handler)
	return addr, nil
}

// serve adds a server for a listener. Serve starts it.
func (s *Servers) serve(label string, l net.Listener, handler http.Handler) {
	one := server{label, l, &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second, // includes the TLS handshake
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    1 << 14,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}}
	(&bound{limit: maxConnections}).bind(one.http)
	s.all = append(s.all, one)
}

// Serve starts all servers, each in its own goroutine. They run until Close.
func (s *Servers) Serve() {
	for _, one := range s.all {
		s.wg.Go(func() {
			if err := one.http.Serve(one.listener); !errors.Is(err, http.ErrServerClosed) {
				s.log.Error("HTTP server ended", "server", one.what, "error", err)
			}
		})
	}
}

// Close gives requests in progress one second to complete, and returns when all goroutines of Serve
// have ended. It may be called more than once, and without Serve.
func (s *Servers) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, one := range s.all {
		if one.http.Shutdown(ctx) != nil {
			_ = one.http.Close()
		}
		_ = one.listener.Close() // Shutdown does not close a listener that Serve has not used yet
	}
	s.wg.Wait()
}
