package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// maxFlows bounds the flows of one answer of /status.
const maxFlows = 10_000

// server is one HTTP listener.
type server struct {
	what     string
	listener net.Listener
	http     *http.Server
}

// listen opens the sockets of the configuration, so that a wrong address is an
// error at the start.
func (g *gateway) listen(c Config) error {
	for _, s := range []struct {
		what, address string
		handler       http.Handler
	}{
		{"metrics", c.MetricsAddress, g.metricsHandler()},
		{"status", c.StatusAddress, g.statusHandler()},
	} {
		if s.address == "" {
			continue
		}
		l, err := net.Listen("tcp", s.address)
		if err != nil {
			g.closeServers()
			return fmt.Errorf("%s address: %w", s.what, err)
		}
		g.servers = append(g.servers, &server{s.what, l, &http.Server{
			Handler:           s.handler,
			ReadHeaderTimeout: 5 * time.Second,
			ReadTimeout:       10 * time.Second,
			WriteTimeout:      30 * time.Second,
			IdleTimeout:       time.Minute,
			MaxHeaderBytes:    1 << 14,
			ErrorLog:          slog.NewLogLogger(g.log.Handler(), slog.LevelDebug),
		}})
	}
	return nil
}

// serve answers until closeServers.
func (g *gateway) serve() {
	for _, s := range g.servers {
		g.wg.Go(func() {
			if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
				g.log.Error("HTTP server ended", "server", s.what, "error", err)
			}
		})
	}
}

// closeServers gives requests under way a moment.
func (g *gateway) closeServers() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range g.servers {
		if s.http.Shutdown(ctx) != nil {
			s.http.Close()
		}
		s.listener.Close() // Shutdown knows it only if Serve was called
	}
}

func (g *gateway) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(g.metrics.registry, promhttp.HandlerOpts{}))
	// Alive: it answers. A peer that is away must not get the process killed.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	// Ready: TUN, socket and routes are there.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !g.current().ready {
			http.Error(w, "starting", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

func (g *gateway) statusHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) {
		flows := 0
		if s := r.FormValue("flows"); s != "" {
			n, err := strconv.Atoi(s)
			if err != nil || n < 0 || n > maxFlows {
				http.Error(w, fmt.Sprintf("flows: %q; want a number from 0 to %d", s, maxFlows), http.StatusBadRequest)
				return
			}
			flows = n
		}
		s, err := g.status(flows)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		writeJSON(w, s)
	})
	mux.HandleFunc("GET /trace", func(w http.ResponseWriter, r *http.Request) {
		q := TraceQuery{Protocol: r.FormValue("protocol"), Direction: r.FormValue("direction")}
		var errs [2]error
		q.Src, errs[0] = ParseTraceAddr(r.FormValue("src"))
		q.Dst, errs[1] = ParseTraceAddr(r.FormValue("dst"))
		if err := errors.Join(errs[:]...); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		steps, err := Trace(g.engine, q, g.ends[0].path.Now())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		for i := range steps {
			for _, p := range g.current().gateway.Peers {
				if p.ID == steps[i].Peer {
					steps[i].PeerName = p.Name
				}
			}
		}
		writeJSON(w, steps)
	})
	return mux
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(v) // an error here is the client's
}
