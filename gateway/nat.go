package gateway

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

// engineConfig adds to the bounds of a configuration the addresses that are the gateway's.
func engineConfig(c Config) natengine.Config {
	e := c.NAT
	e.Self4, e.Self6 = fabric.GatewayAddr, fabric.GatewayAddr6
	e.Router4, e.Router6 = fabric.HopGateway4, fabric.Router6
	return e
}

// Bounds of the NAT engine and how much of them is used. Each bound has a series, so that an alert
// can compare the two.
var (
	descPeerHalfOpen  = desc("peer_nat_sessions_half_open", "NAT flows of the peer that may be evicted at a limit.", "peer")
	descHosts         = desc("peer_nat_hosts", "Hosts with NAT flows: ours with NAPT flows, the peer's with flows to mapped endpoints.", "peer")
	descHostsFull     = desc("peer_nat_hosts_at_limit", "Hosts that have as many NAT flows as a host may have.", "peer")
	descHostLimit     = desc("peer_nat_host_sessions_limit", "NAT flows that one host may have with the peer.", "peer")
	descPorts         = desc("peer_nat_ports", "Ports, or ICMP identifiers, in use at the NAPT address.", "peer", "family", "protocol")
	descPortsLimit    = desc("nat_ports_limit", "Ports, or ICMP identifiers, that a NAPT address has.", "protocol")
	descFragments     = desc("peer_nat_fragmented_datagrams", "Fragmented datagrams under way, both directions.", "peer")
	descFragmentBytes = desc("peer_nat_fragment_bytes", "Octets of held fragments, both directions.", "peer")
	descFragmentLimit = desc("nat_fragmented_datagrams_limit", "Fragmented datagrams that there may be of one peer, both directions.")
	descFragmentRoom  = desc("nat_fragment_bytes_limit", "Octets of held fragments that there may be of one peer, both directions.")
	descFragmentsEach = desc("nat_datagram_fragments_limit", "Fragments that are held of one datagram.")
	descErrorsLimit   = desc("nat_icmp_errors_per_second_limit", "ICMP errors of the gateway's own, per peer.")
	descTimeout       = desc("nat_timeout_seconds", "How long a NAT flow, or a held fragment, lasts without a packet.", "of")
)

// collectBounds gives what all peers have in common.
func collectBounds(gauge func(d *prometheus.Desc, v float64, labels ...string), c natengine.Config, s natengine.Stats) {
	gauge(descSessions, float64(s.Flows))
	gauge(descLimit, float64(s.MaxFlows))
	gauge(descNATBytes, float64(s.Bytes))
	gauge(descFragmentLimit, float64(2*c.MaxFragmentSets))
	gauge(descFragmentRoom, float64(2*c.MaxFragmentBytes))
	gauge(descFragmentsEach, float64(c.MaxFragmentsPerSet))
	gauge(descErrorsLimit, float64(c.MaxErrorsPerSecond))
	for _, p := range natengine.PortLimits() {
		gauge(descPortsLimit, float64(p.Max), p.Protocol)
	}
	for _, t := range []struct {
		of string
		d  time.Duration
	}{
		{"udp", c.Timeouts.UDP}, {"tcp_established", c.Timeouts.TCPEstablished}, {"tcp_transitory", c.Timeouts.TCPTransitory},
		{"tcp_closing", c.Timeouts.TCPClosing}, {"icmp", c.Timeouts.ICMP}, {"generic", c.Timeouts.Generic}, {"fragment", c.Timeouts.Fragment},
	} {
		gauge(descTimeout, t.d.Seconds(), t.of)
	}
}

// collectUse gives what one peer uses of its bounds.
func collectUse(gauge func(d *prometheus.Desc, v float64, labels ...string), id string, s natengine.PeerStats) {
	gauge(descPeerFlows, float64(s.Flows), id)
	gauge(descPeerLimit, float64(s.MaxFlows), id)
	gauge(descPeerHalfOpen, float64(s.HalfOpen), id)
	gauge(descHosts, float64(s.Hosts), id)
	gauge(descHostsFull, float64(s.HostsAtQuota), id)
	gauge(descHostLimit, float64(s.MaxFlowsPerHost), id)
	for _, p := range s.Ports {
		gauge(descPorts, float64(p.Used), id, p.Family, p.Protocol)
	}
	gauge(descFragments, float64(s.FragmentSets), id)
	gauge(descFragmentBytes, float64(s.FragmentBytes), id)
}
