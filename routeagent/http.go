package routeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/httpserve"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/metric"
)

// Status is the JSON of /status.
type Status struct {
	Node     string    `json:"node"`
	Version  string    `json:"version"`
	Ready    bool      `json:"ready"`            // the state is applied and the overlay works
	Error    string    `json:"error,omitempty"`  // reason why the node is not ready
	Applied  time.Time `json:"applied,omitzero"` // time at which the state was last applied completely
	Problems []string  `json:"problems"`         // invalid objects, and features that foreign rules break
	Commands string    `json:"commands"`         // the desired state as commands, one per line

	// Dropped is how many packets the packet filter of the node has dropped, by reason
	// (kernel.DropReasons).
	Dropped map[string]uint64 `json:"dropped,omitempty"`
	Overlay *OverlayStatus    `json:"overlay,omitempty"` // path to the active gateway; absent if there is none
}

// ready returns nil if the desired state is applied.
func (s state) ready() error {
	if s.err == nil && s.revision == 0 {
		return errors.New("waiting for Nodes, Pods and NetworkAllocations")
	}
	return s.err
}

// ready returns nil unless there is a known reason why pods of the node might not reach peers.
func (a *agent) ready() error {
	if err := a.current().ready(); err != nil {
		return err
	}
	if o := a.lastOverlay(); o.Broken {
		return errors.New(o.problem())
	}
	return nil
}

func (a *agent) status() Status {
	now := a.current()
	s := Status{Node: a.opts.Node, Version: a.opts.Version, Ready: true, Applied: now.applied,
		Problems: make([]string, 0, len(now.problems)), Commands: now.node.String()}
	if err := a.ready(); err != nil {
		s.Ready, s.Error = false, err.Error()
	}
	if o := a.lastOverlay(); o.Gateway.IsValid() {
		s.Overlay = &o
		if !o.Broken && o.Back.Broken { // packets only from the gateway are lost: not a failure of the node, because the peers may be the cause
			s.Problems = append(s.Problems, o.problem())
		}
	}
	report := a.lastReport()
	for _, p := range slices.Concat(now.problems, report.problems) {
		s.Problems = append(s.Problems, p.Error())
	}
	for _, l := range now.limits {
		s.Problems = append(s.Problems, l.Reason+": "+l.Message)
	}
	if report.err != nil { // this does not make the node unready, because traffic does not depend on the report
		s.Problems = append(s.Problems, kubeerr.Plain("the API server", report.err).Error())
	}
	var err error
	if s.Dropped, err = rtnl.Dropped(); err != nil {
		s.Problems = append(s.Problems, fmt.Sprintf("cannot read what the packet filter has dropped: %v", err))
	}
	return s
}

// listen opens the sockets, so that an invalid address is an error at the start. The servers run
// until they are closed.
func (a *agent) listen() (*httpserve.Servers, error) {
	metrics, status := http.NewServeMux(), http.NewServeMux()
	scrape := promhttp.HandlerFor(a.metrics.registry, promhttp.HandlerOpts{})
	metrics.Handle("GET /metrics", a.opts.MetricsSecure.Guarded(scrape))
	status.Handle("GET /metrics", scrape) // without a token, because any client of this address may read the metrics
	metrics.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	metrics.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := a.ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	status.HandleFunc("GET /status", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		_ = e.Encode(a.status()) // fails only if the client has closed the connection
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

// startedSocket returns the name of the abstract Unix socket to which Started connects, to query
// the agent of a Pod.
func startedSocket(pod string) string { return "isthmus-route-agent-" + pod }

// serveStarted answers the queries of Started, until the returned servers are closed.
func (a *agent) serveStarted() (*httpserve.Servers, error) {
	s := httpserve.New(a.log)
	if a.opts.Pod == "" {
		return s, nil
	}
	err := s.ListenOwner("started", startedSocket(a.opts.Pod), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !a.manages.Load() {
			if err := a.canFollow(); err != nil {
				http.Error(w, "another agent runs on this node, and "+err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		fmt.Fprintln(w, "ok")
	}))
	if err != nil {
		return nil, fmt.Errorf("socket for the Pod's startup probe: %w", err)
	}
	s.Serve()
	return s, nil
}

// As soon as this agent reports that it has started, Kubernetes stops the running agent. canFollow
// returns nil if this agent could then take over, and otherwise the reason why not. It changes no
// kernel objects, so it cannot find reasons that only a change would show.
func (a *agent) canFollow() error {
	a.mu.Lock()
	var in fabric.NodeIntent
	known := a.intent != nil
	if known {
		in = *a.intent
	}
	a.mu.Unlock()
	if !known {
		return errors.New("this agent has not read its configuration yet")
	}
	in.Self = a.opts.Node
	if !slices.ContainsFunc(in.Nodes, func(n fabric.ClusterNode) bool { return n.Name == in.Self }) {
		return fmt.Errorf("this agent does not find its Node, %q", in.Self)
	}
	if a.opts.StateDirectory != "" {
		if _, err := readSnapshot(a.opts.StateDirectory); errors.Is(err, fs.ErrPermission) { // writing the next snapshot repairs any other error
			return fmt.Errorf("this agent is not allowed to read the state directory: %w", err)
		}
	}
	node, _ := fabric.NodeFor(in)
	if err := rtnl.Look(kernel.RouteAgent, node, a.log); err != nil {
		return fmt.Errorf("this agent cannot read the kernel's state: %w", err)
	}
	return nil
}

// Started returns nil if the agent of a Pod in this network namespace is active, or is ready to
// take over from the active agent. An agent is ready if it has read its configuration and can read
// the kernel's state. Startup probes call Started. They cannot use /readyz, because during an
// upgrade the older agent still serves it.
func Started(ctx context.Context, pod string) error {
	if pod == "" {
		return errors.New("$POD_UID is not set; want the UID of this Pod")
	}
	c, err := httpserve.DialOwner(ctx, startedSocket(pod)) // in the network namespace of this thread
	if err != nil {
		return err
	}
	defer c.Close()
	web := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return c, nil }}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := web.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if err != nil {
		return err
	}
	return errors.New(strings.TrimSpace(string(b)))
}

// metrics collects the agent's Prometheus series.
type metrics struct {
	registry *prometheus.Registry
	agent    *agent
	repaired prometheus.Counter
	errors   prometheus.Counter
}

var families metric.Catalogue

// Families returns the metrics of a route agent, by name.
func Families() []*metric.Family { return families.Families() }

var (
	familyReady    = families.Gauge("route_agent_ready", "1 if the desired state is applied.")
	familyApplied  = families.Gauge("route_agent_last_apply_timestamp_seconds", "When the desired state was last applied completely; no series before the first time.")
	familyProblems = families.Gauge("route_agent_problems", "Problems that the agent reports, such as API objects that are refused in whole or in part, and features that rules of other programs break.")
	familyOverlay  = families.Gauge("route_agent_overlay_up", "1 if the gateway is reached through the overlay, 0 if packets get lost there in at least one direction although the underlay works; no series while this is unknown.", "gateway")
	familyObjects  = families.Gauge("route_agent_objects", "Desired kernel objects, by kind.", "kind")
	familyRepaired = families.Counter("route_agent_drift_repaired_total", "Kernel objects set or removed because another program had changed them.")
	familyDropped  = families.Counter("filter_drops_total", "Packets that the packet filter of the node dropped, by reason, since its table was made.", "reason")
	familyARP      = families.Counter("node_arp_failures_total", "Counters of the ARP table of the node's kernel, which all network namespaces share, by reason: unanswered (addresses without an answer, such as an address of the PodCIDR that no pod has), no_room (packets dropped because too many waited for the same address) or table_full (packets dropped because the table was full).", "reason")
	familyRefused  = families.Counter("route_agent_asks_refused_total", "Datagrams to the node's vote (UDP 4801) that were refused, by reason; unread means that the kernel dropped them in a flood. No series where nodes do not vote.", "reason")
	familyErrors   = families.Counter("route_agent_apply_errors_total", "Attempts to apply the desired state that failed, in whole or in part.")
)

func newMetrics(a *agent) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		agent:    a,
		repaired: prometheus.NewCounter(familyRepaired.Options()),
		errors:   prometheus.NewCounter(familyErrors.Options()),
	}
	m.registry.MustRegister(metric.Build(a.opts.Version), m, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) { families.Describe(out) }

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	now := m.agent.current()
	ready := 0.0
	if m.agent.ready() == nil {
		ready = 1
	}
	out <- familyReady.Sample(ready)
	if !now.applied.IsZero() {
		out <- familyApplied.Sample(float64(now.applied.UnixMilli()) / 1000)
	}
	o := m.agent.lastOverlay()
	if o.Broken {
		out <- familyOverlay.Sample(0, o.Gateway.String())
	} else if !o.Answered.IsZero() {
		out <- familyOverlay.Sample(1, o.Gateway.String())
	}
	problems := len(now.problems) + len(now.limits) + len(m.agent.lastReport().problems)
	if !o.Broken && o.Back.Broken {
		problems++
	}
	out <- familyProblems.Sample(float64(problems))
	for kind, n := range map[string]int{
		"device": len(now.node.Devices), "fdb": len(now.node.FDB), "neighbor": len(now.node.Neighbors),
		"route": len(now.node.Routes), "rule": len(now.node.Rules),
	} {
		out <- familyObjects.Sample(float64(n), kind)
	}
	if dropped, err := rtnl.Dropped(); err == nil { // after an error the series is missing
		for reason, n := range dropped {
			out <- familyDropped.Sample(float64(n), reason)
		}
	}
	if n, err := rtnl.Neighbors(); err == nil { // after an error the series is missing
		out <- familyARP.Sample(float64(n.Unanswered), "unanswered")
		out <- familyARP.Sample(float64(n.NoRoom), "no_room")
		out <- familyARP.Sample(float64(n.TableFull), "table_full")
	}
	if v := m.agent.opts.Voter; v != nil {
		read, unread := v.Refused()
		out <- familyRefused.Sample(float64(read), "invalid")
		out <- familyRefused.Sample(float64(unread), "unread")
	}
	m.repaired.Collect(out)
	m.errors.Collect(out)
}
