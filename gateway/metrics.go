package gateway

import (
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/isthmus-net/isthmus/natengine"
)

// metrics are the gateway's Prometheus series. Nearly all are read from where they are counted when
// somebody asks, so that a peer's series vanish with it. "Receive" and "inbound" are from the
// tunnel, "transmit" and "outbound" towards it. The label peer is the cluster ID; isthmus_peer_info
// has its name.
type metrics struct {
	registry *prometheus.Registry
	gateway  *gateway

	rtt     *prometheus.HistogramVec
	repairs prometheus.Counter

	mu    sync.Mutex
	known map[string]bool // peers with a histogram
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("isthmus_"+name, help, labels, nil)
}

var (
	descBuild      = desc("build_info", "Always 1; the labels say what runs.", "version", "goversion")
	descGeneration = desc("config_generation", "Configurations put into force since the start.")
	descReloadOK   = desc("config_last_reload_successful", "1 if the newest configuration is in force, 0 if an older one is because the newest is unusable.")
	descReloadTime = desc("config_last_reload_success_timestamp_seconds", "When a configuration was last put into force.")
	descApplied    = desc("config_applied", "1 if all of the configuration in force could be made true, 0 if some of it is being tried again.")
	descMTU        = desc("tunnel_mtu_bytes", "MTU of the tunnel device: the largest of all peers.")
	descSessions   = desc("nat_sessions", "NAT flows.")
	descLimit      = desc("nat_sessions_limit", "NAT flows that there may be.")
	descNATBytes   = desc("nat_memory_bytes", "Memory of NAT flows and held fragments.")
	descRejected   = desc("probe_rejected_total", "Messages of the connection check that were ignored.", "reason")
	descDrops      = desc("drops_total", "Packets dropped, by reason; peer is empty when no peer has the address.", "peer", "direction", "reason")

	descInfo       = desc("peer_info", "Always 1; the name of the peer.", "peer", "name")
	descUp         = desc("peer_up", "1 if the peer answers the connection check.", "peer")
	descRxBytes    = desc("peer_receive_bytes_total", "Octets of IP packets from the peer.", "peer")
	descRxPackets  = desc("peer_receive_packets_total", "IP packets from the peer.", "peer")
	descTxBytes    = desc("peer_transmit_bytes_total", "Octets of IP packets to the peer.", "peer")
	descTxPackets  = desc("peer_transmit_packets_total", "IP packets to the peer.", "peer")
	descWgRx       = desc("peer_wireguard_receive_bytes_total", "Octets of WireGuard messages from the peer, in all tunnels.", "peer")
	descWgTx       = desc("peer_wireguard_transmit_bytes_total", "Octets of WireGuard messages to the peer, in all tunnels.", "peer")
	descTunnelUp   = desc("peer_tunnel_up", "1 if a further tunnel to the peer works and carries its share of the flows.", "peer", "tunnel")
	descTunnelRx   = desc("peer_tunnel_receive_bytes_total", "Octets of WireGuard messages from the peer in a further tunnel.", "peer", "tunnel")
	descTunnelTx   = desc("peer_tunnel_transmit_bytes_total", "Octets of WireGuard messages to the peer in a further tunnel.", "peer", "tunnel")
	descHandshake  = desc("peer_last_handshake_timestamp_seconds", "When the present WireGuard session began; 0 if there was none yet.", "peer")
	descLoss       = desc("peer_probe_loss_ratio", "Share of the probes of the last minute that were not answered, 0 to 1.", "peer")
	descPeerMTU    = desc("peer_mtu_bytes", "Largest IP packet that is sent to the peer.", "peer")
	descTooBig     = desc("peer_too_big_total", "Packets larger than that: fragmented, or dropped and the sender told, or untold because of the rate limit.", "peer", "result")
	descPeerFlows  = desc("peer_nat_sessions", "NAT flows of the peer.", "peer")
	descPeerLimit  = desc("peer_nat_sessions_limit", "NAT flows that the peer may have.", "peer")
	descFlowEvents = desc("peer_nat_session_events_total", "NAT flows created, expired, evicted because the limit was reached, and purged because new rules do not permit them.", "peer", "event")
)

func newMetrics(g *gateway) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		gateway:  g,
		rtt: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "isthmus_peer_probe_rtt_seconds",
			Help:    "Round trip of the connection check.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15), // 0.1 ms to 1.6 s
		}, []string{"peer"}),
		repairs: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "isthmus_kernel_changes_total",
			Help: "Links, routes, rules, neighbours and sysctls set because they were missing or different.",
		}),
		known: make(map[string]bool),
	}
	m.registry.MustRegister(m, m.rtt, m.repairs, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// observeRTT counts an answer of the connection check.
func (m *metrics) observeRTT(peer string, rtt time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known[peer] { // an answer may come just after its peer went
		m.rtt.WithLabelValues(peer).Observe(rtt.Seconds())
	}
}

// keep removes the histograms of peers that are no more.
func (m *metrics) keep(peers []peer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	old := m.known
	m.known = make(map[string]bool, len(peers))
	for _, p := range peers {
		m.known[p.ID] = true
	}
	for id := range old {
		if !m.known[id] {
			m.rtt.DeleteLabelValues(id)
		}
	}
}

// Describe implements prometheus.Collector. It is empty, which makes the collector an unchecked
// one: the reasons come from the engine's closed list.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	g := m.gateway
	now := g.current()

	gauge(descBuild, 1, g.version, runtime.Version())
	gauge(descGeneration, float64(now.generation))
	gauge(descReloadOK, truth(now.configErr == nil))
	gauge(descApplied, truth(now.applyErr == nil))
	if !now.reloaded.IsZero() {
		gauge(descReloadTime, seconds(now.reloaded))
	}
	gauge(descMTU, float64(now.mtu))

	stats := g.engine.Stats()
	collectBounds(gauge, g.engine.Config(), stats)
	for _, d := range directions {
		for _, reason := range natengine.Drops() {
			counter(descDrops, noPeerDrops(stats, d, reason), "", d.String(), reason.String())
		}
	}
	for r, reason := range rejections {
		counter(descRejected, g.ends[0].checker.rejected[r].Load(), reason)
	}

	for _, p := range g.views(now, stats) {
		first := p.tunnels[0]
		gauge(descInfo, 1, p.ID, p.Name)
		gauge(descUp, truth(first.check.State == Connected), p.ID)
		gauge(descLoss, first.check.Loss, p.ID)
		if p.translated {
			collectUse(gauge, p.ID, p.nat)
			gauge(descPeerMTU, float64(p.nat.MTU), p.ID)
			counter(descTooBig, p.nat.Fragmented, p.ID, "fragmented")
			counter(descTooBig, p.nat.Told, p.ID, "told")
			counter(descTooBig, p.nat.Silent, p.ID, "untold")
			counter(descFlowEvents, p.nat.Created, p.ID, "created")
			counter(descFlowEvents, p.nat.Expired, p.ID, "expired")
			counter(descFlowEvents, p.nat.Evicted, p.ID, "evicted")
			counter(descFlowEvents, p.nat.Purged, p.ID, "purged")
		}
		for i, e := range p.tunnels[1:] {
			tunnel := strconv.Itoa(i + 1)
			gauge(descTunnelUp, truth(e.inUse), p.ID, tunnel)
			counter(descTunnelRx, e.stats.Received, p.ID, tunnel)
			counter(descTunnelTx, e.stats.Sent, p.ID, tunnel)
		}
		received, sent := p.octets()
		counter(descWgRx, received, p.ID)
		counter(descWgTx, sent, p.ID)
		handshake := 0.0
		if !first.stats.Handshake.IsZero() {
			handshake = seconds(first.stats.Handshake)
		}
		gauge(descHandshake, handshake, p.ID)

		state := p.state
		if state == nil {
			continue
		}
		packets, bytes := state.Traffic(natengine.Inbound)
		counter(descRxPackets, packets, p.ID)
		counter(descRxBytes, bytes, p.ID)
		packets, bytes = state.Traffic(natengine.Outbound)
		counter(descTxPackets, packets, p.ID)
		counter(descTxBytes, bytes, p.ID)
		for _, d := range directions {
			for _, reason := range natengine.Drops() {
				counter(descDrops, state.Drops(d, reason), p.ID, d.String(), reason.String())
			}
		}
	}
}

var directions = []natengine.Direction{natengine.Outbound, natengine.Inbound}

// noPeerDrops counts the packets that belong to no peer.
func noPeerDrops(s natengine.Stats, d natengine.Direction, reason natengine.Drop) uint64 {
	if int(reason) >= len(s.NoPeerDrops[d]) {
		return 0
	}
	return s.NoPeerDrops[d][reason]
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func seconds(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
