package natengine

import (
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Stats is a snapshot for metrics and status. The engine reads the numbers one after the other, so
// they may contradict each other.
type Stats struct {
	Flows, MaxFlows int
	Bytes           int         // memory of flow tables, NAPT mappings and held fragments
	NoPeerDrops     [2][]uint64 // by direction and Drop: dropped packets whose peer was unknown
	Peers           []PeerStats // sorted by ID
}

// PeerStats is one peer's part of Stats.
type PeerStats struct {
	ID              string
	Down            bool
	Flows, MaxFlows int
	MaxFlowsPerHost int
	HalfOpen        int // half-open flows at the last Sweep; they may be evicted at a bound
	Hosts           int // hosts with a flow: our hosts behind the NAPT address, and the peer's hosts with flows to mapped endpoints
	HostsAtQuota    int // hosts that have reached MaxFlowsPerHost
	Mappings        int // ports and ICMP ids in use at the NAPT addresses
	Ports           [6]PortUse
	FragmentSets    int // incomplete datagrams, in both directions
	FragmentBytes   int // octets of held fragments, in both directions
	Bytes           int // octets of memory

	MTU int // largest packet towards the peer in octets, 0 for no bound
	// Numbers of packets so far that were too big. ErrorsSent were answered by an ICMP error,
	// ErrorsLimited were not answered because of the rate limit, and Fragmented were cut into
	// fragments.
	ErrorsSent, ErrorsLimited, Fragmented uint64
	// Numbers of flows so far: opened (Created), ended as FlowExpired or FlowReplaced (Expired),
	// ended as FlowEvicted (Evicted), and ended as FlowPurged (Purged).
	Created, Expired, Evicted, Purged uint64
}

// PortUse counts the ports, or ICMP identifiers, in use at a NAPT address.
type PortUse struct {
	Family, Protocol string // "ipv4" or "ipv6"; "tcp", "udp" or "icmp"
	Used, Max        int
}

// PortLimits returns a PortUse for each protocol, with only Protocol and Max set. The limits
// are the same for both families.
func PortLimits() []PortUse {
	return []PortUse{{Protocol: "tcp", Max: tcpPorts.limit()}, {Protocol: "udp", Max: udpPorts.limit()}, {Protocol: "icmp", Max: icmpIDs.limit()}}
}

// portUse returns the use of ports of all families and classes. The caller holds the table's
// mutex.
func (n *napt) portUse() (uses [6]PortUse) {
	for i := range uses {
		family, class := i/int(noPorts), portClass(i%int(noPorts))
		uses[i] = PortUse{[2]string{"ipv4", "ipv6"}[family], [noPorts]string{"tcp", "udp", "icmp"}[class], n.ports[family][class].inUse(), class.limit()}
	}
	return uses
}

// Config returns the configuration in force, with defaults in place of zero fields.
func (e *Engine) Config() Config { return e.config }

// Peers returns the peers in force, sorted by ID.
func (e *Engine) Peers() []*PeerState {
	rules := e.rules.Load().rules
	peers := make([]*PeerState, len(rules))
	for i, r := range rules {
		peers[i] = r.peer
	}
	return peers
}

// Peer returns the peer in force with this ID, or nil if there is none.
func (e *Engine) Peer(id string) *PeerState {
	t := e.rules.Load()
	if at, found := t.find(id); found {
		return t.rules[at].peer
	}
	return nil
}

// NoPeerDrops returns the number of dropped packets whose peer was unknown. It takes no lock.
func (e *Engine) NoPeerDrops(dir Direction, d Drop) uint64 { return e.noPeer[dir][d].Load() }

// Stats takes a snapshot. It holds each peer's lock for microseconds.
func (e *Engine) Stats() Stats {
	s := Stats{MaxFlows: e.config.MaxFlows}
	for dir := range e.noPeer {
		s.NoPeerDrops[dir] = make([]uint64, numDrops)
		for d := range e.noPeer[dir] {
			s.NoPeerDrops[dir][d] = e.noPeer[dir][d].Load()
		}
	}
	peers := e.Peers()
	s.Peers = make([]PeerStats, 0, len(peers))
	for _, p := range peers {
		ps := p.Stats()
		s.Flows += ps.Flows
		s.Bytes += ps.Bytes
		s.Peers = append(s.Peers, ps)
	}
	return s
}

// Stats takes a snapshot of one peer.
func (p *PeerState) Stats() PeerStats {
	t := &p.flows
	s := PeerStats{
		ID: p.id, Down: p.Down(), Flows: int(t.live.Load()), MaxFlows: int(p.quota.Load()), HalfOpen: int(t.halfOpen.Load()),
		MTU: p.MTU(), ErrorsSent: p.path.errorsSent.Load(), ErrorsLimited: p.path.errorsLimited.Load(), Fragmented: p.path.fragmented.Load(),
		Created: t.created.Load(), Expired: t.expired.Load(), Evicted: t.evicted.Load(), Purged: t.purged.Load(),
	}
	for dir := range p.fragments {
		sets, bytes := p.fragments[dir].stats()
		s.FragmentSets += sets
		s.FragmentBytes += bytes
	}
	t.mu.Lock()
	s.Mappings, s.Ports, s.Bytes = t.napt.live, t.napt.portUse(), t.bytes()+s.FragmentBytes
	s.MaxFlowsPerHost = int(t.hosts[naptFlow].quota)
	for kind := range t.hosts {
		s.Hosts += t.hosts[kind].live
		s.HostsAtQuota += t.hosts[kind].full
	}
	t.mu.Unlock()
	return s
}

// FlowInfo describes one flow, for the status.
type FlowInfo struct {
	Peer       string
	Kind       string // "napt": opened from our side; "endpoint": opened by the peer
	Proto      uint8
	Query      uint8          // type of the request of an ICMP query, 0 for other protocols
	Local      netip.AddrPort // our end; the port is the identifier of an ICMP query, 0 for protocols without ports
	Mapped     netip.AddrPort // our end as the peer sees it
	Remote     netip.AddrPort // the peer's end as we see it; the port is 0 for an ICMP query
	State      string         // "half-open", "established", "closing"
	Idle, Left time.Duration  // time since the last packet, and time until the timeout, both as of the last Sweep
}

// Flows returns up to limit flows, peer by peer. The order of a peer's flows is undefined. Flows
// takes no lock, so a flow that begins or ends during the call may be missing.
func (e *Engine) Flows(limit int) []FlowInfo {
	now := tick(e.swept.Load())
	var flows []FlowInfo
	for _, p := range e.Peers() {
		slab := p.flows.slab.Load()
		if slab == nil {
			continue
		}
		for _, c := range *slab {
			for i := range c.entries {
				if len(flows) >= limit {
					return flows
				}
				if f, ok := c.entries[i].info(&e.lifetimes, now); ok {
					f.Peer = p.id
					flows = append(flows, f)
				}
			}
		}
	}
	return flows
}

// info returns a consistent copy of the entry. It returns false for an entry that is not in
// use or is being written.
func (e *entry) info(l *lifetimes, now tick) (FlowInfo, bool) {
	seq, word := e.seq.Load(), e.word.Load()
	if word&stateLive == 0 || seq&1 != 0 {
		return FlowInfo{}, false
	}
	out, in, seen := e.keyAt(Outbound), e.keyAt(Inbound), tick(e.seen.Load())
	if e.seq.Load() != seq {
		return FlowInfo{}, false
	}
	idle := max(now.since(seen), 0)
	f := FlowInfo{
		Kind: "napt", Proto: protoOf(word), State: "established",
		Local:  netip.AddrPortFrom(out.near.netip(), out.nearPort(Outbound)),
		Mapped: netip.AddrPortFrom(in.near.netip(), in.nearPort(Inbound)),
		Remote: netip.AddrPortFrom(out.remote.netip(), out.remotePort()),
		Idle:   duration(idle), Left: duration(max(l.of(word)-idle, 0)),
	}
	if classOf(f.Proto, f.Local.Addr().Is4()) == icmpIDs {
		f.Query, f.Remote = uint8(f.Remote.Port()), netip.AddrPortFrom(f.Remote.Addr(), 0)
	}
	if kindOf(word) == endpointFlow {
		f.Kind = "endpoint"
	}
	if halfOpen(word) {
		f.State = "half-open"
		if protoOf(word) == packet.TCP && word&(stateFin|stateRst) != 0 {
			f.State = "closing"
		}
	}
	return f, true
}
