package natengine

import (
	"hash/maphash"
	"sync/atomic"
)

// PeerState is the engine's state of one peer: flows, held fragments and counters. Each peer ID has
// one PeerState, which survives rule changes until the peer is removed. All methods may be called
// concurrently.
type PeerState struct {
	id    string
	down  atomic.Bool
	path  path         // next to the field down, because the caller reads both for each packet
	quota atomic.Int64 // maximum number of flows
	rule  *rule        // the newest rule, which every new flow must satisfy; guarded by flows.mu

	flows     flowTable
	fragments [directions]fragmentStore
	drops     [directions][numDrops]atomic.Uint64
	traffic   [directions]traffic
}

// traffic counts the forwarded packets of one direction. It has its own cache line, so that
// the two directions do not slow each other down.
type traffic struct {
	_              [64]byte
	packets, bytes atomic.Uint64
}

func newPeerState(id string, c *Config, seed maphash.Seed, total *atomic.Int64) *PeerState {
	p := &PeerState{id: id}
	p.flows.keys, p.flows.napt.seed, p.flows.total = newHashKeys(), seed, total
	p.flows.napt.random = c.RandomPorts
	for kind := range p.flows.hosts {
		p.flows.hosts[kind].flows, p.flows.hosts[kind].kind, p.flows.hosts[kind].seed = &p.flows, flowKind(kind), seed
	}
	for dir := range p.fragments {
		p.fragments[dir].countDrops = func(d Drop, n int) { p.drops[dir][d].Add(uint64(n)) }
	}
	return p
}

// ID returns the peer's cluster ID.
func (p *PeerState) ID() string { return p.id }

// Drops returns the number of packets that were dropped for reason d since the peer was added.
func (p *PeerState) Drops(dir Direction, d Drop) uint64 { return p.drops[dir][d].Load() }

// CountTraffic adds forwarded packets, and their octets without tunnel overhead, to the
// counters. The caller calls it once per batch.
func (p *PeerState) CountTraffic(dir Direction, packets, bytes int) {
	t := &p.traffic[dir]
	t.packets.Add(uint64(packets))
	t.bytes.Add(uint64(bytes))
}

// Traffic returns the sums over all calls of CountTraffic.
func (p *PeerState) Traffic(dir Direction) (packets, bytes uint64) {
	t := &p.traffic[dir]
	return t.packets.Load(), t.bytes.Load()
}

// SetDown records whether the peer has been without a WireGuard session for too long. The engine
// still translates packets to a peer that is down. The caller must drop them and count
// DropPeerDown.
func (p *PeerState) SetDown(down bool) { p.down.Store(down) }

// Down returns the last value that was passed to SetDown.
func (p *PeerState) Down() bool { return p.down.Load() }
