package gateway

import (
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/natengine"
)

// engineConfig returns the configuration of the engine: c.NAT plus the gateway's own addresses.
func engineConfig(c Config) natengine.Config {
	e := c.NAT
	e.Self4, e.Self6 = fabric.GatewayAddr, fabric.GatewayAddr6
	e.Router4, e.Router6 = fabric.HopGateway4, fabric.Router6
	return e
}

// running implements flowsync.Flows for the flows and tunnels of a running gateway.
type running struct {
	*natengine.Engine
	tunnels []*tunnelEnd
}

// Adopt implements flowsync.Flows.
func (r running) Adopt(peer string, f natengine.Flow) (opened bool, drop natengine.Drop) {
	return r.Engine.Adopt(peer, f, r.tunnels[0].Now())
}

// Inject implements flowsync.Flows.
func (r running) Inject(tunnel int, p []byte) { r.tunnels[min(tunnel, len(r.tunnels)-1)].Inject(p) }

// The bounds of the NAT engine, and the use of each. Every bound has a series of its own, so that
// an alert can compare use and bound.
var (
	familyPeerHalfOpen  = gauge("peer_nat_sessions_half_open", "Half-open NAT flows of the peer, which are evicted first when a limit is reached.", "peer")
	familyHosts         = gauge("peer_nat_hosts", "Hosts with NAT flows: hosts of this cluster with NAPT flows, and hosts of the peer with flows to mapped endpoints.", "peer")
	familyHostsFull     = gauge("peer_nat_hosts_at_limit", "Hosts that have reached their limit of NAT flows.", "peer")
	familyHostLimit     = gauge("peer_nat_host_sessions_limit", "Limit of NAT flows of one host with the peer.", "peer")
	familyPorts         = gauge("peer_nat_ports", "Ports, or ICMP identifiers, in use at the NAPT address.", "family", "peer", "protocol")
	familyPortsLimit    = gauge("nat_ports_limit", "Limit of ports, or ICMP identifiers, of a NAPT address.", "protocol")
	familyFragments     = gauge("peer_nat_fragmented_datagrams", "Fragmented datagrams that wait for missing fragments, both directions.", "peer")
	familyFragmentBytes = gauge("peer_nat_fragment_bytes", "Octets of fragments held until their datagram is complete, both directions.", "peer")
	familyFragmentLimit = gauge("nat_fragmented_datagrams_limit", "Limit of fragmented datagrams of one peer that wait for missing fragments, both directions.")
	familyFragmentRoom  = gauge("nat_fragment_bytes_limit", "Limit of the octets of fragments that are held for one peer, both directions.")
	familyFragmentsEach = gauge("nat_datagram_fragments_limit", "Limit of held fragments of one datagram.")
	familyErrorsLimit   = gauge("nat_icmp_errors_per_second_limit", "Limit of ICMP errors that the gateway sends, per peer.")
	familyTimeout       = gauge("nat_timeout_seconds", "How long a NAT flow, or a held fragment, lasts without a packet.", "of")
)

// addBounds adds the bounds that apply to all peers, and the use of those that apply to the whole
// engine.
func addBounds(s *scrape, c natengine.Config, stats natengine.Stats) {
	s.add(familySessions, float64(stats.Flows), nil)
	s.add(familyLimit, float64(stats.MaxFlows), nil)
	s.add(familyNATBytes, float64(stats.Bytes), nil)
	s.add(familyFragmentLimit, float64(2*c.MaxFragmentSets), nil)
	s.add(familyFragmentRoom, float64(2*c.MaxFragmentBytes), nil)
	s.add(familyFragmentsEach, float64(c.MaxFragmentsPerSet), nil)
	s.add(familyErrorsLimit, float64(c.MaxErrorsPerSecond), nil)
	for _, p := range natengine.PortLimits() {
		s.add(familyPortsLimit, float64(p.Max), labelled("protocol", p.Protocol))
	}
	for _, t := range []struct {
		kind string
		d    time.Duration
	}{
		{"udp", c.Timeouts.UDP}, {"tcp_established", c.Timeouts.TCPEstablished}, {"tcp_transitory", c.Timeouts.TCPTransitory},
		{"tcp_closing", c.Timeouts.TCPClosing}, {"icmp", c.Timeouts.ICMP}, {"generic", c.Timeouts.Generic}, {"fragment", c.Timeouts.Fragment},
	} {
		s.add(familyTimeout, t.d.Seconds(), labelled("of", t.kind))
	}
}

// addUse adds one peer's use of its bounds. Ports are counted only for the address family of the
// peer's networks.
func addUse(s *scrape, peer labels, is4 bool, use natengine.PeerStats) {
	s.add(familyPeerFlows, float64(use.Flows), peer)
	s.add(familyPeerLimit, float64(use.MaxFlows), peer)
	s.add(familyPeerHalfOpen, float64(use.HalfOpen), peer)
	s.add(familyHosts, float64(use.Hosts), peer)
	s.add(familyHostsFull, float64(use.HostsAtQuota), peer)
	s.add(familyHostLimit, float64(use.MaxFlowsPerHost), peer)
	for _, p := range use.Ports {
		if p.Family == "ipv4" == is4 {
			s.add(familyPorts, float64(p.Used), peer.with("family", p.Family, "protocol", p.Protocol))
		}
	}
	s.add(familyFragments, float64(use.FragmentSets), peer)
	s.add(familyFragmentBytes, float64(use.FragmentBytes), peer)
}
