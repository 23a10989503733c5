package main

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/gateway"
	"github.com/isthmus-net/isthmus/gateway/flowsync"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// front serves HTTP for a replica, whether the replica is active or a standby.
type front struct {
	replica *kube.Gateway
	flows   *flowsync.Keeper
	own     *prometheus.Registry // metrics of the replica
	idle    *prometheus.Registry // metrics of the process while no gateway runs; a running gateway registers its own process metrics

	mu      sync.RWMutex // held for reading while a request uses the running gateway
	running *gateway.Running
}

// set replaces the running gateway; nil means that none runs. set waits for the requests that still
// use the previous gateway.
func (f *front) set(r *gateway.Running) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running = r
}

// yield makes the running gateway relay packets from nodes to its successor. It does nothing if no
// gateway runs.
func (f *front) yield() {
	f.mu.RLock()
	defer f.mu.RUnlock()
	if f.running != nil {
		f.running.Yield()
	}
}

// serve starts the servers. The caller ends them with stop.
func (f *front) serve(metricsAddr string, secure *httpserve.Secure, statusAddr string, log *slog.Logger) (stop func(), err error) {
	servers := httpserve.New(log)
	for _, l := range []struct {
		flag, address string
		secure        *httpserve.Secure
		handler       http.Handler
	}{{"--metrics-address", metricsAddr, secure, f.metrics(secure)}, {"--status-address", statusAddr, nil, f.private()}} {
		if _, err := servers.ListenPrivate(l.flag, l.address, l.secure, l.handler); err != nil {
			servers.Close()
			return nil, err
		}
	}
	if statusAddr != "" {
		if err := servers.ListenOwner("capture", gateway.CaptureSocket, http.HandlerFunc(f.capture)); err != nil {
			log.Warn("captures are off: another process in this network namespace owns the capture socket", "error", err)
		}
	}
	servers.Serve()
	return servers.Close, nil
}

// private returns the handler at the status address. A client that may read the status may also
// read the metrics.
func (f *front) private() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", f.withRunning(f.scrape))
	mux.HandleFunc("/", f.withRunning(f.status))
	return mux
}

func (f *front) scrape(w http.ResponseWriter, r *http.Request) {
	all := gateway.Gatherers{f.own, f.idle}
	if f.running != nil {
		all[1] = f.running.Gatherer()
	}
	promhttp.HandlerFor(all, promhttp.HandlerOpts{DisableCompression: true}).ServeHTTP(w, r)
}

// capture serves a capture. It does not hold the lock during the capture, because set would have to
// wait.
func (f *front) capture(w http.ResponseWriter, r *http.Request) {
	f.mu.RLock()
	running := f.running
	f.mu.RUnlock()
	if running == nil {
		f.withRunning(f.status)(w, r)
		return
	}
	running.CaptureHandler().ServeHTTP(w, r)
}

func (f *front) metrics(secure *httpserve.Secure) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", secure.Guarded(f.withRunning(f.scrape)))
	// The process is alive if it answers. It must not be killed because a peer or the API
	// server is unavailable.
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	// An active replica is ready if its data plane runs. A standby is ready if it could become
	// active and has copied the flows.
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		pod, self := f.replica.Active()
		f.mu.RLock()
		running := f.running != nil
		err := f.replica.Ready()
		if running {
			err = errors.Join(err, f.running.Ready())
		}
		f.mu.RUnlock()
		text, ready := f.readiness(pod, self, running, err)
		if !ready {
			http.Error(w, text, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, text)
	})
	return mux
}

// readiness returns the text of /readyz, and whether the replica is ready. err is a problem of the
// replica or of its data plane.
func (f *front) readiness(pod string, self, running bool, err error) (text string, ready bool) {
	switch {
	case err != nil:
		return err.Error(), false
	case running:
		return "ok, active", true
	case self:
		return "becoming active", false
	case pod == "":
		return "no gateway is active", false
	}
	if err := f.flows.Ready(); err != nil {
		return err.Error(), false
	}
	return "ok, standby for " + pod, true
}

// withRunning returns a handler that runs handler with the lock held for reading. The response is
// sent only after the lock is released, so that a slow client does not delay set.
func (f *front) withRunning(handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		answer := answer{header: w.Header(), code: http.StatusOK}
		f.mu.RLock()
		handler(&answer, r)
		f.mu.RUnlock()
		w.WriteHeader(answer.code)
		_, _ = answer.body.WriteTo(w) // fails only if the client has closed the connection
	}
}

// answer is an http.ResponseWriter that stores the response.
type answer struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(b []byte) (int, error) { return a.body.Write(b) }

func (f *front) status(w http.ResponseWriter, r *http.Request) {
	if f.running == nil {
		pod, _ := f.replica.Active()
		flows := f.flows.State()
		reason := fmt.Sprintf("this gateway is a standby; the active one is Pod %s; %d of its NAT flows are copied here, and the copy was complete %.1f s ago", pod, flows.Copied, flows.Age.Seconds())
		if pod == "" {
			reason = "no gateway is active yet"
		}
		if err := f.replica.Ready(); err != nil {
			reason = "this gateway waits: " + err.Error()
		}
		http.Error(w, reason, http.StatusServiceUnavailable)
		return
	}
	f.running.StatusHandler().ServeHTTP(w, r)
}
