package gateway

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/metric"
	"github.com/isthmus-net/isthmus/natengine"
)

// metrics are the gateway's Prometheus series. Most are read from live counters at each scrape, so
// that a peer's series vanish with the peer. "Receive" and "inbound" mean from the tunnel,
// "transmit" and "outbound" towards it. The label peer is the cluster ID; isthmus_peer_info has the
// peer's name.
//
// There may be a thousand peers, so the number of series for each is kept small. A series of
// drops, events or results appears with its first count. Port series exist only for the address
// families of the peer. The round trips of all peers share one histogram. To add a metric, add a
// family below and a line in ofGateway or ofPeer.
type metrics struct {
	registry *prometheus.Registry // series of the Go process, and of metrics that are not read from elsewhere
	gateway  *gateway

	rtt     prometheus.Histogram
	repairs prometheus.Counter
}

var (
	familyGeneration = gauge("config_generation", "Configurations applied since the start.")
	familyReloadOK   = gauge("config_last_reload_successful", "1 if the newest configuration is in force, 0 if it is invalid and an older one stays in force.")
	familyReloadTime = gauge("config_last_reload_success_timestamp_seconds", "When a configuration was last applied.")
	familyApplied    = gauge("config_applied", "1 if the whole configuration in force is applied, 0 if a part is being retried.")
	familyMTU        = gauge("tunnel_mtu_bytes", "MTU of the tunnel device: the largest of all peers.")
	familySessions   = gauge("nat_sessions", "Current NAT flows.")
	familyLimit      = gauge("nat_sessions_limit", "Limit of NAT flows.")
	familyNATBytes   = gauge("nat_memory_bytes", "Memory of NAT flows and of fragments that wait for the rest of their datagrams.")
	familyRejected   = counter("probe_rejected_total", "Messages of the connection check that were ignored, by reason.", "reason")
	familyFiltered   = counter("filter_drops_total", "Packets that the packet filter of the gateway's Pod dropped, by reason, since its table was made.", "reason")
	familyKernel     = counter("kernel_ip_drops_total", "Packets that the kernel dropped in the network namespace of the TUN, by reason. In a Pod this includes messages of the tunnel and of the overlay.", "reason")
	familySegments   = counter("udp_segmentation_refused_total", "Sends that the kernel refused to segment (UDP_SEGMENT, EIO): the route has no checksum offload, or uses IPsec. Messages were then sent one by one.")
	familyDrops      = counter("drops_total", "Packets dropped, by reason; peer is empty when no peer has the address.", "direction", "peer", "reason")

	familyInfo       = gauge("peer_info", "Always 1; the labels have the name and the ID of the peer.", "peer", "name")
	familyUp         = gauge("peer_up", "1 if the peer answers the connection check.", "peer")
	familyReason     = gauge("peer_reason", "1 for the reason why packets do not pass in both directions, or why they pass only with a smaller MTU (NarrowPath); no series without a problem.", "peer", "reason")
	familyRxBytes    = counter("peer_receive_bytes_total", "Octets of IP packets from the peer.", "peer")
	familyRxPackets  = counter("peer_receive_packets_total", "IP packets from the peer.", "peer")
	familyTxBytes    = counter("peer_transmit_bytes_total", "Octets of IP packets to the peer.", "peer")
	familyTxPackets  = counter("peer_transmit_packets_total", "IP packets to the peer.", "peer")
	familyWgRx       = counter("peer_wireguard_receive_bytes_total", "Octets of WireGuard messages from the peer, in all tunnels.", "peer")
	familyWgTx       = counter("peer_wireguard_transmit_bytes_total", "Octets of WireGuard messages to the peer, in all tunnels.", "peer")
	familyTunnelUp   = gauge("peer_tunnel_up", "1 if the tunnel carries its share of the flows to the peer. Peers with one tunnel have no such series.", "peer", "tunnel")
	familyTunnelRx   = counter("peer_tunnel_receive_bytes_total", "Octets of WireGuard messages from the peer in one of several tunnels.", "peer", "tunnel")
	familyTunnelTx   = counter("peer_tunnel_transmit_bytes_total", "Octets of WireGuard messages to the peer in one of several tunnels.", "peer", "tunnel")
	familyHandshake  = gauge("peer_last_handshake_timestamp_seconds", "When the current WireGuard session began; no series before the first one.", "peer")
	familyRTT        = gauge("peer_probe_rtt_last_seconds", "Round trip time of the last answered probe, while the peer answers.", "peer")
	familyLoss       = gauge("peer_probe_loss_ratio", "Fraction of the last minute's probes that were not answered, 0 to 1.", "peer")
	familyPeerMTU    = gauge("peer_mtu_bytes", "Largest IP packet that is sent to the peer.", "peer")
	familyPathMTU    = gauge("peer_path_mtu_bytes", "Largest IP packet in the tunnel that probes have shown to arrive at the peer; less than isthmus_peer_expected_mtu_bytes if the path silently drops larger ones.", "peer")
	familyKernelMTU  = gauge("peer_expected_mtu_bytes", "Largest IP packet in the tunnel that should arrive at the peer, according to the kernel's path MTU.", "peer")
	familyTooBig     = counter("peer_too_big_total", "Packets larger than isthmus_peer_mtu_bytes: fragmented; dropped with an ICMP error to the sender (reported); or dropped without one, because of its rate limit (rate_limited).", "peer", "result")
	familyPeerFlows  = gauge("peer_nat_sessions", "NAT flows of the peer.", "peer")
	familyPeerLimit  = gauge("peer_nat_sessions_limit", "Limit of NAT flows of the peer.", "peer")
	familyFlowEvents = counter("peer_nat_session_events_total", "NAT flows created, expired, evicted because the limit was reached, and purged because new rules do not permit them.", "event", "peer")

	familyInBandConns   = gauge("peer_in_band_connections", "Connections between managers and API servers in the tunnel: from our manager to the peer's API server (ours), or from the peer's manager to our API server (theirs).", "peer", "side")
	familyInBandRx      = counter("peer_in_band_receive_bytes_total", "Octets from the peer in connections between managers and API servers in the tunnel.", "peer")
	familyInBandTx      = counter("peer_in_band_transmit_bytes_total", "Octets to the peer in connections between managers and API servers in the tunnel.", "peer")
	familyInBandRefused = counter("peer_in_band_refused_total", "Connections between managers and API servers in the tunnel that were refused, by reason: too many, or too many a second (connections); our API server cannot be reached (api_server); the peer's gateway refuses (peer); the tunnel is down (tunnel).", "peer", "reason")
	familyInBandUnknown = counter("in_band_strangers_total", "Refused connections to the gateway's port for the manager: the client lacks the gateways' key, or its request is invalid.")

	familyRTTs    = families.Histogram("probe_rtt_seconds", "Round trips of the connection check, of all peers.")
	familyRepairs = counter("kernel_changes_total", "Links, routes, rules, neighbours and sysctls set because they were missing or different.")
)

func newMetrics(g *gateway) *metrics {
	m := &metrics{
		registry: prometheus.NewRegistry(),
		gateway:  g,
		rtt: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    familyRTTs.Name,
			Help:    familyRTTs.Help,
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 15), // 0.1 ms to 1.6 s
		}),
		repairs: prometheus.NewCounter(familyRepairs.Options()),
	}
	m.registry.MustRegister(metric.Build(g.version), m.rtt, m.repairs, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// observeRTT records the round-trip time of one answered PING.
func (m *metrics) observeRTT(_ string, rtt time.Duration) { m.rtt.Observe(rtt.Seconds()) }

// Gather implements prometheus.Gatherer. It blocks no other goroutine for long: it reads an
// immutable value that the control loop publishes, and counters under the lock of at most one
// peer at a time.
func (m *metrics) Gather() ([]*dto.MetricFamily, error) {
	return Gatherers{prometheus.GathererFunc(m.scrapeFamilies), m.registry}.Gather()
}

// scrapeFamilies returns the series that are computed at each scrape.
func (m *metrics) scrapeFamilies() ([]*dto.MetricFamily, error) {
	s := scrape{families: make(map[*family]*dto.MetricFamily)}
	now, stats := m.gateway.current(), m.gateway.engine.Stats()
	m.ofGateway(&s, now, stats)
	m.gateway.inBand.observe(&s)
	at := time.Now()
	for _, v := range m.gateway.views(now, stats) {
		ofPeer(&s, &v)
		if cause := m.gateway.causeOf(&v, now.applyErr, at); cause.Reason != v1alpha1.CauseConnected {
			s.add(familyReason, 1, labelled("peer", v.ID).with("reason", cause.Reason))
		}
	}
	return slices.Collect(maps.Values(s.families)), nil
}

// ofGateway adds the series of the gateway as a whole.
func (m *metrics) ofGateway(s *scrape, now current, stats natengine.Stats) {
	g := m.gateway
	s.add(familyGeneration, float64(now.generation), nil)
	s.add(familyReloadOK, truth(now.configErr == nil), nil)
	s.add(familyApplied, truth(now.applyErr == nil), nil)
	if !now.reloaded.IsZero() {
		s.add(familyReloadTime, seconds(now.reloaded), nil)
	}
	s.add(familyMTU, float64(now.mtu), nil)
	addBounds(s, g.engine.Config(), stats)
	for _, d := range directions {
		for _, reason := range natengine.Drops() {
			s.count(familyDrops, noPeerDrops(stats, d, reason), nil, "peer", "", "direction", d.String(), "reason", reason.String())
		}
	}
	refused := uint64(0)
	for _, e := range g.tunnels {
		refused += e.wire.SegmentationRefused()
	}
	s.count(familySegments, refused, nil)
	if g.podNetwork { // on a host, the route agent reports the filter
		if dropped, err := rtnl.Dropped(); err == nil { // after an error the series is left out
			for reason, n := range dropped {
				s.count(familyFiltered, n, nil, "reason", reason)
			}
		}
	}
	_ = g.host.Inside(func() error { // after an error the series is left out
		dropped, err := rtnl.DroppedByIP()
		for reason, n := range dropped {
			s.count(familyKernel, n, nil, "reason", reason)
		}
		return err
	})
	for reason, n := range g.tunnels[0].checker.Rejected() {
		s.count(familyRejected, n, nil, "reason", reason)
	}
}

// ofPeer adds the series of one peer.
func ofPeer(s *scrape, p *view) {
	peer, first := labelled("peer", p.ID), p.primary()
	s.add(familyInfo, 1, peer.with("name", p.Name))
	s.add(familyUp, truth(first.check.State == check.Connected), peer)
	s.add(familyLoss, first.check.Loss, peer)
	if first.check.State == check.Connected {
		s.add(familyRTT, first.check.RTT.Seconds(), peer)
	}
	if path := p.tunnels[0].check.Path; !path.Confirmed.IsZero() || path.Narrow() {
		s.add(familyPathMTU, float64(path.Bytes), peer)
		s.add(familyKernelMTU, float64(path.Ceiling), peer)
	}
	if p.translated {
		addUse(s, peer, p.Local.Pod.Addr().Is4(), p.nat)
		s.add(familyPeerMTU, float64(p.nat.MTU), peer)
		s.count(familyTooBig, p.nat.Fragmented, peer, "result", "fragmented")
		s.count(familyTooBig, p.nat.ErrorsSent, peer, "result", "reported")
		s.count(familyTooBig, p.nat.ErrorsLimited, peer, "result", "rate_limited")
		s.count(familyFlowEvents, p.nat.Created, peer, "event", "created")
		s.count(familyFlowEvents, p.nat.Expired, peer, "event", "expired")
		s.count(familyFlowEvents, p.nat.Evicted, peer, "event", "evicted")
		s.count(familyFlowEvents, p.nat.Purged, peer, "event", "purged")
	}
	if len(p.tunnels) > 1 {
		for i, e := range p.tunnels {
			tunnel := peer.with("tunnel", strconv.Itoa(i))
			s.add(familyTunnelUp, truth(e.inUse), tunnel)
			s.add(familyTunnelRx, float64(e.stats.Received), tunnel)
			s.add(familyTunnelTx, float64(e.stats.Sent), tunnel)
		}
	}
	received, sent := p.octets()
	s.add(familyWgRx, float64(received), peer)
	s.add(familyWgTx, float64(sent), peer)
	if h := first.stats.Handshake; !h.IsZero() {
		s.add(familyHandshake, seconds(h), peer)
	}

	state := p.state
	if state == nil {
		return
	}
	packets, bytes := state.Traffic(natengine.Inbound)
	s.add(familyRxPackets, float64(packets), peer)
	s.add(familyRxBytes, float64(bytes), peer)
	packets, bytes = state.Traffic(natengine.Outbound)
	s.add(familyTxPackets, float64(packets), peer)
	s.add(familyTxBytes, float64(bytes), peer)
	for _, d := range directions {
		for _, reason := range natengine.Drops() {
			if n := state.Drops(d, reason); n > 0 {
				s.count(familyDrops, n, peer, "direction", d.String(), "reason", reason.String())
			}
		}
	}
}

var directions = []natengine.Direction{natengine.Outbound, natengine.Inbound}

// noPeerDrops returns the number of packets dropped for a reason in a direction that belong to no
// peer.
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
