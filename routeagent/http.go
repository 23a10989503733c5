package routeagent

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/internal/httpserve"
)

// Status is the JSON of /status.
type Status struct {
	Node     string    `json:"node"`
	Version  string    `json:"version"`
	Ready    bool      `json:"ready"`            // all that is wanted is there
	Error    string    `json:"error,omitempty"`  // why not
	Applied  time.Time `json:"applied,omitzero"` // when all was last there
	Problems []string  `json:"problems"`         // objects that were refused, or parts of them
	Commands string    `json:"commands"`         // what should be, as commands, one a line
}

func (a *agent) status() Status {
	now := a.current()
	s := Status{Node: a.opts.Node, Version: a.opts.Version, Ready: now.revision > 0 && now.err == nil, Applied: now.applied,
		Problems: make([]string, 0, len(now.problems)), Commands: now.node.String()}
	switch {
	case now.err != nil:
		s.Error = now.err.Error()
	case now.revision == 0:
		s.Error = "waiting for Nodes, Pods and TunnelEndpoints"
	}
	told := a.lastTold()
	for _, p := range slices.Concat(now.problems, told.problems) {
		s.Problems = append(s.Problems, p.Error())
	}
	if told.err != nil { // no reason to be unready: traffic does not depend on it
		s.Problems = append(s.Problems, told.err.Error())
	}
	return s
}

// listen opens the sockets, so that a wrong address is an error at the start, and answers until
// close.
func (a *agent) listen() (*httpserve.Servers, error) {
	metrics, status := http.NewServeMux(), http.NewServeMux()
	metrics.Handle("GET /metrics", a.opts.MetricsSecure.Guarded(promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{})))
	metrics.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	metrics.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if s := a.status(); !s.Ready {
			http.Error(w, s.Error, http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	status.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		_ = e.Encode(a.status()) // an error here is the client's
	})

	s := httpserve.New(a.log)
	for _, l := range []struct {
		what, address string
		secure        *httpserve.Secure
		handler       http.Handler
	}{{"metrics address", a.opts.MetricsAddress, a.opts.MetricsSecure, metrics}, {"status address", a.opts.StatusAddress, nil, status}} {
		if _, err := s.ListenPrivate(l.what, l.address, l.secure, l.handler); err != nil {
			s.Close()
			return nil, err
		}
	}
	s.Serve()
	return s, nil
}

// metrics are the agent's Prometheus series.
type metrics struct {
	registry *prometheus.Registry
	agent    *agent
	repaired prometheus.Counter
	errors   prometheus.Counter
}

var (
	descBuild    = desc("build_info", "Always 1; the labels say what runs.", "version", "goversion")
	descReady    = desc("route_agent_ready", "1 if all that is wanted is there.")
	descApplied  = desc("route_agent_last_apply_timestamp_seconds", "When all that is wanted was last there.")
	descProblems = desc("route_agent_problems", "Objects, or parts of them, that were refused.")
	descObjects  = desc("route_agent_objects", "Kernel objects that are wanted, by kind.", "kind")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("isthmus_"+name, help, labels, nil)
}

func newMetrics(a *agent) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		agent:    a,
		repaired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isthmus_route_agent_drift_repaired_total",
			Help: "Kernel objects set or removed because somebody else had changed them.",
		}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isthmus_route_agent_apply_errors_total",
			Help: "Comparisons after which not all was as wanted.",
		}),
	}
	m.registry.MustRegister(m, m.repaired, m.errors, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	now := m.agent.current()
	ready, applied := 0.0, 0.0
	if now.revision > 0 && now.err == nil {
		ready = 1
	}
	if !now.applied.IsZero() {
		applied = float64(now.applied.UnixMilli()) / 1000
	}
	gauge(descBuild, 1, m.agent.opts.Version, runtime.Version())
	gauge(descReady, ready)
	gauge(descApplied, applied)
	gauge(descProblems, float64(len(now.problems)+len(m.agent.lastTold().problems)))
	gauge(descObjects, float64(len(now.node.Devices)), "device")
	gauge(descObjects, float64(len(now.node.FDB)), "fdb")
	gauge(descObjects, float64(len(now.node.Neighbors)), "neighbor")
	gauge(descObjects, float64(len(now.node.Routes)), "route")
	gauge(descObjects, float64(len(now.node.Rules)), "rule")
}
