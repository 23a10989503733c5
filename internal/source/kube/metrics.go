package kube

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/metric"
)

// gatewayMetrics has the metrics of the gateway's Kubernetes side. A standby exports them, too.
type gatewayMetrics struct {
	g         *Gateway
	takeovers *prometheus.CounterVec
	writes    *prometheus.CounterVec
	refused   *prometheus.CounterVec
	rotation  atomic.Pointer[rotationState] // written by the active replica in each round; nil: no round yet
}

var families metric.Catalogue

// Families returns the metrics of a gateway's Kubernetes side, by name.
func Families() []*metric.Family { return families.Families() }

var (
	familyActive    = families.Gauge("gateway_active", "1 if this gateway is active and may send to peers.")
	familyContact   = families.Gauge("gateway_lease_contact_timestamp_seconds", "When the Lease was last read or written; no series before the first time.")
	familySourceOK  = families.Gauge("gateway_source_ok", "1 if key and objects are valid, 0 if an older configuration stays in force or there is none yet.")
	familyMemory    = families.Gauge("gateway_from_snapshot", "1 if this gateway runs with the snapshot in its state directory, because the API server does not answer.")
	familyLeftOut   = families.Gauge("gateway_left_out_objects", "Objects that are ignored, in whole or in part, because they are invalid.", "kind")
	familyTakeovers = families.Counter("gateway_takeovers_total", "How often this gateway became active, by reason: Released (the previous one shut down or gave up its votes), NotHeard (the nodes that vote no longer heard the previous one), Expired (the Lease of the previous one expired), NoneActive, Resumed (after a restart), or Unknown.", "reason")
	familyEpoch     = families.Gauge("gateway_epoch", "Epoch of the active gateway, as known to this gateway; each takeover increases it.")
	familySince     = families.Gauge("gateway_active_since_timestamp_seconds", "When this gateway became active. A standby has no series.")
	familyWrites    = families.Counter("gateway_api_writes_total", "Writes to the API server, by kind of object and by result.", "kind", "result")
	familyStandbys  = families.Gauge("gateway_standbys", "Other gateways that answer the active one. Where nodes vote, isthmus_gateway_voters_heard shows whether they can take over. A standby, and a gateway without another Pod, has no series.")
	familyVoters    = families.Gauge("gateway_voters", "Nodes that vote on which gateway is active; 0: the Lease decides.")
	familyVotes     = families.Gauge("gateway_voters_heard", "Nodes that vote and have answered this gateway within 0.9 s.")
	familyKeyAge    = families.Gauge("gateway_key_age_seconds", "Age of the WireGuard private key. Only of the active gateway.")
	familyRotating  = families.Gauge("gateway_key_rotation_age_seconds", "Age of the current rotation of the key; 0: there is none. Only of the active gateway.")
	familyLaggards  = families.Gauge("gateway_key_laggards", "Peers without a session with the next key, while the key rotates. Only of the active gateway.")
	familyRefused   = families.Counter("gateway_questions_refused_total", "Datagrams between gateways (UDP 5870) that were refused, by reason; unread means that the kernel dropped them in a flood.", "reason")
)

func newGatewayMetrics(g *Gateway) *gatewayMetrics {
	m := &gatewayMetrics{
		g:         g,
		takeovers: prometheus.NewCounterVec(familyTakeovers.Options(), familyTakeovers.Labels),
		writes:    prometheus.NewCounterVec(familyWrites.Options(), familyWrites.Labels),
		refused:   prometheus.NewCounterVec(familyRefused.Options(), familyRefused.Labels),
	}
	for _, reason := range isthmus.TakeoverReasons { // the series start at 0, because Prometheus sees no increase in a series that starts at 1
		m.takeovers.WithLabelValues(reason)
	}
	return m
}

// Collector returns the metrics of this replica.
func (g *Gateway) Collector() prometheus.Collector { return g.metrics }

// Describe implements prometheus.Collector.
func (m *gatewayMetrics) Describe(out chan<- *prometheus.Desc) { families.Describe(out) }

// Collect implements prometheus.Collector.
func (m *gatewayMetrics) Collect(out chan<- prometheus.Metric) {
	truth := map[bool]float64{true: 1}
	_, active := m.g.Active()
	out <- familyActive.Sample(truth[active && m.g.MaySend()]) // a holder that lost its votes still counts as active, but may not send
	m.g.mu.Lock()
	e, w := m.g.election, m.g.desired
	m.g.mu.Unlock()
	if e != nil {
		if n, others := e.standbys(time.Now()); active && others {
			out <- familyStandbys.Sample(float64(n))
		}
		out <- familyEpoch.Sample(float64(e.lastTransition()))
		if m, ok := e.mandate(); ok && !m.Since.IsZero() {
			out <- familySince.Sample(float64(m.Since.UnixMilli()) / 1000)
		}
		if at := e.lastContact(); !at.IsZero() {
			out <- familyContact.Sample(float64(at.UnixMilli()) / 1000)
		}
	}
	if e != nil && e.votes != nil {
		voters, answering := e.voters()
		out <- familyVoters.Sample(float64(voters))
		out <- familyVotes.Sample(float64(answering))
	}
	if r := m.rotation.Load(); r != nil && active {
		rotating := 0.0
		if r.ring.Next != ([32]byte{}) && !r.ring.NextSince.IsZero() {
			rotating = max(time.Since(r.ring.NextSince).Seconds(), 0.001)
		}
		if !r.ring.Since.IsZero() {
			out <- familyKeyAge.Sample(time.Since(r.ring.Since).Seconds())
		}
		out <- familyRotating.Sample(rotating)
		out <- familyLaggards.Sample(float64(len(r.lagging)))
	}
	out <- familySourceOK.Sample(truth[w.valid && w.err == nil])
	out <- familyMemory.Sample(truth[w.remembered != nil])
	objects := map[string]map[string]bool{"TunnelEndpoint": {}, "NatMapping": {}, "Secret": {}, "Snapshot": {}}
	for _, p := range w.snapshot.Problems {
		objects[p.Origin.Kind][p.Origin.Namespace+"/"+p.Origin.Name] = true
	}
	for kind, names := range objects {
		out <- familyLeftOut.Sample(float64(len(names)), kind)
	}
	m.takeovers.Collect(out)
	m.writes.Collect(out)
	m.refused.Collect(out)
}
