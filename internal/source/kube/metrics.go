package kube

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// gatewayMetrics are the series of the gateway's Kubernetes side. They are there on a standby, too.
type gatewayMetrics struct {
	g         *Gateway
	takeovers prometheus.Counter
	writes    *prometheus.CounterVec
}

var (
	descActive   = prometheus.NewDesc("isthmus_gateway_active", "1 if this replica is the active one.", nil, nil)
	descContact  = prometheus.NewDesc("isthmus_gateway_lease_contact_timestamp_seconds", "When the Lease was last read or written; 0: never.", nil, nil)
	descSourceOK = prometheus.NewDesc("isthmus_gateway_source_ok", "1 if key and objects can be used, 0 if an older configuration stays in force or there is none yet.", nil, nil)
	descMemory   = prometheus.NewDesc("isthmus_gateway_from_snapshot", "1 if this replica carries on with the snapshot of its state directory, because the API server does not answer.", nil, nil)
	descLeftOut  = prometheus.NewDesc("isthmus_gateway_left_out_objects", "Objects of which something is wrong, and is left out.", []string{"kind"}, nil)
)

func newGatewayMetrics(g *Gateway) *gatewayMetrics {
	return &gatewayMetrics{
		g: g,
		takeovers: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isthmus_gateway_takeovers_total", Help: "How often this replica became the active one."}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "isthmus_gateway_api_writes_total", Help: "Writes to the API server, by kind of object and by result."}, []string{"kind", "result"}),
	}
}

// Collector returns the metrics of this replica.
func (g *Gateway) Collector() prometheus.Collector { return g.metrics }

// Describe implements prometheus.Collector.
func (m *gatewayMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descActive, descContact, descSourceOK, descMemory, descLeftOut} {
		ch <- d
	}
	m.takeovers.Describe(ch)
	m.writes.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *gatewayMetrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	truth := map[bool]float64{true: 1}
	_, active := m.g.Active()
	gauge(descActive, truth[active])
	m.g.mu.Lock()
	e, w := m.g.election, m.g.wish
	m.g.mu.Unlock()
	var contact time.Time
	if e != nil {
		contact = e.lastContact()
	}
	if contact.IsZero() {
		contact = time.UnixMilli(0)
	}
	gauge(descContact, float64(contact.UnixMilli())/1000)
	gauge(descSourceOK, truth[w.valid && w.err == nil])
	gauge(descMemory, truth[w.remembered != nil])
	objects := map[string]map[string]bool{"TunnelEndpoint": {}, "NatMapping": {}, "Secret": {}, "Snapshot": {}}
	for _, p := range w.snapshot.Problems {
		objects[p.Origin.Kind][p.Origin.Namespace+"/"+p.Origin.Name] = true
	}
	for kind, names := range objects {
		gauge(descLeftOut, float64(len(names)), kind)
	}
	m.takeovers.Collect(ch)
	m.writes.Collect(ch)
}
