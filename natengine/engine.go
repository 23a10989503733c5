package natengine

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/packet"
)

// Timeouts end flows that are idle. Zero means the default.
type Timeouts struct {
	UDP, TCPEstablished, TCPTransitory, ICMP, Generic, Fragment time.Duration
}

// Config bounds the engine. Zero values mean the defaults in the package comment.
type Config struct {
	Self4, Self6       netip.Addr // the in-process endpoint
	MaxFlows           int        // over all peers, 1<<20
	MaxFlowsPerPeer    int        // MaxFlows divided by the number of peers
	MaxFragmentSets    int        // per peer and direction
	MaxFragmentBytes   int        // held octets per peer and direction
	MaxFragmentsPerSet int        // held fragments of one datagram
	Timeouts           Timeouts
}

// Engine translates packets.
type Engine struct {
	noPeer [directions][numDrops]atomic.Uint64
}

// PeerState is what the engine keeps about one peer; stable for one peer ID across rule changes.
type PeerState struct {
	id   string
	down atomic.Bool
}

func New(Config) *Engine                                                       { return &Engine{} }
func (e *Engine) SetPeers([]Peer) error                                        { return nil }
func (e *Engine) Outbound(v *packet.View, now time.Duration) Verdict           { return Verdict{} }
func (e *Engine) Inbound(v *packet.View, now time.Duration) Verdict            { return Verdict{} }
func (e *Engine) Sweep(now time.Duration)                                      {}
func (e *Engine) Count(p *PeerState, dir Direction, d Drop)                    {}
func (e *Engine) Trace(v *packet.View, dir Direction, now time.Duration) Trace { return Trace{} }
func (e *Engine) Stats() Stats                                                 { return Stats{} }
func (e *Engine) Peers() []*PeerState                                          { return nil }
func (e *Engine) Flows(max int) []FlowInfo                                     { return nil }

func (p *PeerState) ID() string                                     { return p.id }
func (p *PeerState) Drops(dir Direction, d Drop) uint64             { return 0 }
func (p *PeerState) CountTraffic(dir Direction, packets, bytes int) {}
func (p *PeerState) Traffic(dir Direction) (packets, bytes uint64)  { return 0, 0 }
func (p *PeerState) SetDown(down bool)                              { p.down.Store(down) }
func (p *PeerState) Down() bool                                     { return p.down.Load() }
func (p *PeerState) Stats() PeerStats                               { return PeerStats{} }

// Tuple names a packet's ends; the port of an ICMP query is its id, 0 where there is none.
type Tuple struct {
	Proto    uint8
	Src, Dst netip.AddrPort
}

// Trace says what the engine would do with a packet and why.
type Trace struct {
	Direction     Direction
	Peer          string // "" when no peer has the address
	Rule          string // in words: "prefix map 10.244.0.0/16 -> 10.246.0.0/16"
	Flow          string // "" (stateless), "known" or "new"
	Before, After Tuple  // After is the zero value when the packet is dropped
	Action        Action
	Drop          Drop
}

// Stats is a snapshot for metrics and status.
type Stats struct {
	Flows, MaxFlows int
	Bytes           int // memory of flow tables, NAPT mappings and held fragments
	NoPeerDrops     [2][]uint64
	Peers           []PeerStats // sorted by ID
}

// PeerStats is the share of one peer.
type PeerStats struct {
	ID                                string
	Down                              bool
	Flows, MaxFlows                   int
	HalfOpen                          int // flows that may be evicted when the bound is reached
	Mappings                          int // ports and ICMP ids in use at the NAPT addresses
	FragmentSets, FragmentBytes       int
	Bytes                             int    // memory
	Created, Expired, Evicted, Purged uint64 // flows since start
}

// FlowInfo is one flow for the status.
type FlowInfo struct {
	Peer                  string
	Kind                  string // "napt" or "endpoint"
	Proto                 uint8
	Local, Mapped, Remote netip.AddrPort // our end as it is, as the peer sees it, and the peer's end as we see it
	State                 string         // "half-open", "established", "closing"
	Idle, Left            time.Duration  // since the last packet, until it expires, at the last Sweep
}
