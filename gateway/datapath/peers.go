package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// peerTable is immutable once it is published.
type peerTable struct {
	byState  map[*natengine.PeerState]*peer   // of the current identity
	also     map[*natengine.PeerState][]*peer // peers of the next identity, and retired ones
	byDevice map[*device.Peer]*peer           // all peers
	at       map[*peer]netip.Addr             // configured address of each peer
	byAddr   map[netip.Addr]*place            // places by address
}

func newPeerTable(peers int) *peerTable {
	return &peerTable{
		byState:  make(map[*natengine.PeerState]*peer, peers),
		also:     make(map[*natengine.PeerState][]*peer),
		byDevice: make(map[*device.Peer]*peer, peers),
		at:       make(map[*peer]netip.Addr, peers),
	}
}

// A Peer is a peer of the engine, its public key, and its endpoint. The zero AddrPort keeps the
// endpoint. With Refused, nothing may be sent to the endpoint that was set before: the tunnel sends
// nothing to the peer until the peer has sent something, from any address.
type Peer struct {
	State    *natengine.PeerState
	Key      [32]byte
	Endpoint netip.AddrPort
	Refused  bool
	// Gateway holds the two addresses of the peer's gateway inside the tunnel: the source of its messages,
	// and the address at which it answers. The Port accepts messages only from these.
	Gateway   [2]netip.Addr
	Streams   bool // this gateway and the peer's may use each other's Streams
	Preshared PresharedKeys
}

// SetPeers replaces the peers. Call it after each change of the engine's rules, which decide what a
// peer may send: a range that moves between two peers moves there in one step. A peer that stays
// keeps its sessions. Its endpoint is set only if Endpoint has changed since the last call, because
// the peer may have roamed.
func (t *Tunnel) SetPeers(peers []Peer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	return t.set(newPeerTable(len(peers)), peers)
}

// Change updates the peers as SetPeers does. It takes only the changed and new peers, and those to
// remove.
func (t *Tunnel) Change(changed []Peer, gone []*natengine.PeerState) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(changed)+len(gone) == 0 {
		return nil
	}
	old := t.peers.Load()
	same := !slices.ContainsFunc(gone, func(s *natengine.PeerState) bool { return old.byState[s] != nil })
	for _, want := range changed {
		p := old.byState[want.State]
		same = same && p != nil && p.key == want.Key && old.at[p] == want.Endpoint.Addr().Unmap()
	}
	if same {
		for _, want := range changed {
			t.place(old, want)
		}
		return nil
	}
	table := old.clone()
	for _, want := range changed {
		gone = append(gone, want.State)
	}
	for _, state := range gone {
		if p := table.byState[state]; p != nil {
			for _, q := range append(table.also[state], p) {
				delete(table.byDevice, q.dev)
			}
			delete(table.byState, state)
			delete(table.also, state)
			delete(table.at, p)
		}
	}
	return t.set(table, changed)
}

// set adds peers to a table, which then comes into force. The caller holds t.mu.
func (t *Tunnel) set(table *peerTable, peers []Peer) error {
	old, ids := t.peers.Load(), t.ids.Load()
	var errs []error
	var fresh []*peer
	for _, want := range peers {
		p, isNew, err := t.member(table, old, ids.current, want)
		if err != nil {
			errs = append(errs, fmt.Errorf("peer %s: %w", want.State.ID(), err))
			continue
		}
		if isNew {
			fresh = append(fresh, p)
		}
		table.byState[want.State], table.byDevice[p.dev], table.at[p] = p, p, want.Endpoint.Addr().Unmap()
		for _, q := range old.also[want.State] {
			if q.retired.Load() && !q.stopped { // see member
				table.byDevice[q.dev], table.also[want.State] = q, append(slices.Clone(table.also[want.State]), q)
			}
		}
		t.retireFor(table, old, p)
		if ids.next != nil {
			q, isNew, err := t.member(table, old, ids.next, want)
			switch {
			case err != nil:
				errs = append(errs, fmt.Errorf("peer %s: %w", want.State.ID(), err))
			case isNew:
				fresh = append(fresh, q)
				q.dev.SetEndpointFromPacket(endpointOf(p.dev))
				fallthrough
			default:
				table.byDevice[q.dev], table.also[want.State] = q, append(slices.Clone(table.also[want.State]), q)
			}
		}
		t.place(table, want)
		table.limitRetired(want.State)
	}
	table.byAddr = placesOf(table.at, old.byAddr)
	t.publish(table)
	for _, p := range fresh {
		if t.up {
			p.dev.Start() // only now, so that its first message finds the peer in the table
			if table.replaces(p) {
				p.initiation.arm(0)
			}
		}
	}
	t.lookSoon()
	return errors.Join(errs...)
}

// member returns the identity's peer for a Peer, and whether it is new. The caller holds t.mu.
func (t *Tunnel) member(table, old *peerTable, id *identity, want Peer) (p *peer, isNew bool, err error) {
	key := device.NoisePublicKey(want.Key)
	if key == *id.public.Load() {
		return nil, false, errors.New("its public key is our own")
	}
	dev := id.dev.LookupPeer(key)
	// the former key is in use again, by this peer or by another one
	if p = old.byDevice[dev]; p != nil && p.retired.Load() {
		delete(table.byDevice, dev)
		table.without(p)
		p.stop()
		id.dev.RemovePeer(key)
		dev, p = nil, nil
	}
	if q := table.byDevice[dev]; q != nil {
		return nil, false, fmt.Errorf("its public key is that of peer %s", q.state.ID())
	}
	if dev == nil {
		if dev, err = id.dev.NewPeer(key); err != nil {
			return nil, false, err
		}
		if id == t.current() {
			delete(t.places, key)
		}
	}
	if p != nil && p.state == want.State {
		return p, false, nil
	}
	return newPeer(id, want.State, key, dev, p), true, nil
}

// replaces reports whether a peer has retired predecessors.
func (t *peerTable) replaces(p *peer) bool {
	return slices.ContainsFunc(t.also[p.state], func(q *peer) bool { return q.retired.Load() })
}

// place sets the endpoint of a peer and the addresses of its gateway. The caller holds t.mu.
func (t *Tunnel) place(table *peerTable, want Peer) {
	was, placed := t.places[want.Key]
	for _, p := range append([]*peer{table.byState[want.State]}, table.also[want.State]...) {
		p.gateway.Store(&want.Gateway)
		p.streams.Store(want.Streams)
		if !p.retired.Load() {
			p.preshared.set(want.Preshared)
		}
		switch {
		case want.Endpoint.IsValid() && was != want.Endpoint:
			p.dev.SetEndpointFromPacket(t.wire.Endpoint(want.Endpoint))
			p.seat.Store(nil)
			t.places[want.Key] = want.Endpoint
		case placed && want.Refused:
			leave(p.dev, was)
			p.seat.Store(nil)
			delete(t.places, want.Key)
		}
	}
}

// leave makes the device forget the configured endpoint of a peer. If the peer has roamed, it has
// proved its new endpoint by its key, and keeps it.
func leave(dev *device.Peer, was netip.AddrPort) {
	if at, ok := endpointOf(dev).(interface{ AddrPort() netip.AddrPort }); ok && at.AddrPort() == was {
		dev.SetEndpointFromPacket(nil)
	}
}

// publish puts a table into force, and ends the peers that it lacks.
func (t *Tunnel) publish(table *peerTable) {
	old := t.peers.Swap(table)
	for dev, p := range old.byDevice {
		now := table.byDevice[dev]
		if now == p {
			continue
		}
		// before the removal: a timer that began a handshake with a removed peer would leave its
		// index in the device's table for ever
		p.stop()
		if now != nil {
			continue
		}
		if p.of.dev.LookupPeer(p.key) == dev {
			p.of.dev.RemovePeer(p.key)
		}
		heir := table.byState[p.state]
		if heir == nil || heir.key != p.key {
			delete(t.places, p.key)
		}
		if heir != nil { // the counters of a peer never decrease
			heir.received0.Add(p.octetsReceived())
			heir.sent0.Add(p.octetsSent())
		}
	}
}
