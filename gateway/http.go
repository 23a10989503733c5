package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
)

// maxFlows is the largest number of flows in one response of /status.
const maxFlows = 10_000

// listen opens the configured addresses at once, so that a wrong address makes the gateway fail
// at its start.
func (g *gateway) listen(c Config) error {
	g.servers = httpserve.New(g.log)
	for _, s := range []struct {
		what, address string
		handler       http.Handler
	}{
		{"metrics address", c.MetricsAddress, g.metricsHandler()},
		{"status address", c.StatusAddress, g.statusHandler()},
	} {
		if _, err := g.servers.ListenPrivate(s.what, s.address, nil, s.handler); err != nil {
			g.servers.Close()
			return err
		}
	}
	if c.StatusAddress != "" {
		if err := g.servers.ListenOwner("capture", CaptureSocket, g.captureHandler()); err != nil {
			g.log.Warn("captures are off: another process in this network namespace owns the capture socket", "error", err)
		}
	}
	return nil
}

func (g *gateway) scrapeHandler() http.Handler {
	return promhttp.HandlerFor(g.metrics, promhttp.HandlerOpts{DisableCompression: true})
}

func (g *gateway) metricsHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", g.scrapeHandler())
	// A gateway is alive if it answers. An unreachable peer must not get the process killed.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	// A gateway is ready if its TUN, socket, routes and packet filter exist.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := g.unready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// unready returns the reason why the data plane carries no packets, or nil. A problem of one peer
// does not count.
func (g *gateway) unready() error {
	switch now := g.current(); {
	case !now.ready:
		return errors.New("starting")
	case errors.Is(now.applyErr, rtnl.ErrFilter): // then put has removed the overlay
		return fmt.Errorf("no traffic of peers is carried: %w", now.applyErr)
	}
	return nil
}

func (g *gateway) statusHandler() http.Handler {
	mux := http.NewServeMux()
	// On this address metrics need no token: a client that may read the status may read them, too.
	mux.Handle("GET /metrics", g.scrapeHandler())
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
		writeJSON(w, g.status(flows))
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
		steps, err := Trace(g.engine, q, g.tunnels[0].Now())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		peers := g.status(0).Peers
		for i := range steps {
			for _, p := range peers {
				if p.ID != steps[i].Peer {
					continue
				}
				if steps[i].PeerName = p.Name; !v1alpha1.Carries(p.Reason) {
					steps[i].PeerDown = p.Reason + ": " + p.Message
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
	_ = e.Encode(v) // an error means that the client has left
}
