package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// A peerTable holds the peers of a tunnel. It is immutable after it is published.
type peerTable struct {
	byState  map[*natengine.PeerState]*peer   // peers of the current identity
	siblings map[*natengine.PeerState][]*peer // peers of the next identity, and retired peers
	byDevice map[*device.Peer]*peer           // all peers
	addrs    map[*peer]netip.Addr             // configured endpoint address of each peer
	byAddr   map[netip.Addr]*addrSigns        // records of unexplained messages (signs.go), by configured endpoint address
}

func newPeerTable(peers int) *peerTable {
	return &peerTable{
		byState:  make(map[*natengine.PeerState]*peer, peers),
		siblings: make(map[*natengine.PeerState][]*peer),
		byDevice: make(map[*device.Peer]*peer, peers),
		addrs:    make(map[*peer]netip.Addr, peers),
	}
}

// A Peer is the configuration of one peer of the tunnel. State refers to the corresponding peer of
// the engine. A zero Endpoint keeps the present endpoint. If Refused is set, nothing may be sent to
// the last configured endpoint. A peer that has not roamed from there then gets nothing until it
// has sent something, from any address.
type Peer struct {
	State    *natengine.PeerState
	Key      [32]byte
	Endpoint netip.AddrPort
	Refused  bool
	// Gateway holds the two addresses of the peer's gateway inside the tunnel: the source of its
	// requests, and the address from which it answers. A Port accepts messages only from these.
	Gateway   [2]netip.Addr
	Streams   bool // allow Streams between this gateway and the peer's
	Preshared PresharedKeys
}

// SetPeers replaces the peers. Call it after each change of the engine's rules. The engine's rules
// determine which addresses a peer may use, so a range moves from one peer to another in one step.
// A peer that stays keeps its sessions. Its endpoint is set only if Endpoint has changed since the
// last call, because the peer may have roamed.
func (t *Tunnel) SetPeers(peers []Peer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	return t.set(newPeerTable(len(peers)), peers)
}

// Change adds or updates the given peers, and removes the peers with the given states. For
// everything else see SetPeers.
func (t *Tunnel) Change(changed []Peer, removed []*natengine.PeerState) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || len(changed)+len(removed) == 0 {
		return nil
	}
	old := t.peers.Load()
	same := !slices.ContainsFunc(removed, func(s *natengine.PeerState) bool { return old.byState[s] != nil })
	for _, want := range changed {
		p := old.byState[want.State]
		same = same && p != nil && p.key == want.Key && old.addrs[p] == want.Endpoint.Addr().Unmap()
	}
	if same {
		for _, want := range changed {
			t.place(old, want)
		}
		return nil
	}
	table := old.clone()
	for _, want := range changed {
		removed = append(removed, want.State)
	}
	for _, state := range removed {
		if p := table.byState[state]; p != nil {
			for _, q := range append(table.siblings[state], p) {
				delete(table.byDevice, q.dev)
			}
			delete(table.byState, state)
			delete(table.siblings, state)
			delete(table.addrs, p)
		}
	}
	return t.set(table, changed)
}

// set adds peers to a table and publishes the table. The caller holds t.mu.
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
		table.byState[want.State], table.byDevice[p.dev], table.addrs[p] = p, p, want.Endpoint.Addr().Unmap()
		for _, q := range old.siblings[want.State] {
			if q.retired.Load() && !q.stopped { // member stops a retired peer whose key is in use again
				table.byDevice[q.dev], table.siblings[want.State] = q, append(slices.Clone(table.siblings[want.State]), q)
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
				table.byDevice[q.dev], table.siblings[want.State] = q, append(slices.Clone(table.siblings[want.State]), q)
			}
		}
		t.place(table, want)
		table.limitRetired(want.State)
	}
	table.byAddr = signsByAddr(table.addrs, old.byAddr)
	t.publish(table)
	for _, p := range fresh {
		if t.up {
			p.dev.Start() // only now, so that the peer is in the table when its first message arrives
			if table.hasRetired(p) {
				p.initiation.arm(0)
			}
		}
	}
	t.recheckSoon()
	return errors.Join(errs...)
}

// member returns the peer of an identity for a configuration, and reports whether that peer is new.
// The caller holds t.mu.
func (t *Tunnel) member(table, old *peerTable, id *identity, want Peer) (p *peer, isNew bool, err error) {
	key := device.NoisePublicKey(want.Key)
	if key == *id.public.Load() {
		return nil, false, errors.New("its public key is the key of this gateway")
	}
	dev := id.dev.LookupPeer(key)
	// The former key of a retired peer is in use again, by the same or another peer.
	if p = old.byDevice[dev]; p != nil && p.retired.Load() {
		delete(table.byDevice, dev)
		table.removeSibling(p)
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
			delete(t.endpoints, key)
		}
	}
	if p != nil && p.state == want.State {
		return p, false, nil
	}
	return newPeer(id, want.State, key, dev, p), true, nil
}

// hasRetired reports whether a peer has retired predecessors, which have former keys.
func (t *peerTable) hasRetired(p *peer) bool {
	return slices.ContainsFunc(t.siblings[p.state], func(q *peer) bool { return q.retired.Load() })
}

// place sets the endpoint of a peer, the addresses of its gateway and its preshared keys. The
// caller holds t.mu.
func (t *Tunnel) place(table *peerTable, want Peer) {
	was, placed := t.endpoints[want.Key]
	for _, p := range append([]*peer{table.byState[want.State]}, table.siblings[want.State]...) {
		p.gateway.Store(&want.Gateway)
		p.streams.Store(want.Streams)
		if !p.retired.Load() {
			p.preshared.set(want.Preshared)
		}
		switch {
		case want.Endpoint.IsValid() && was != want.Endpoint:
			p.dev.SetEndpointFromPacket(t.wire.Endpoint(want.Endpoint))
			p.sessionEndpoint.Store(nil)
			t.endpoints[want.Key] = want.Endpoint
		case placed && want.Refused:
			clearEndpoint(p.dev, was)
			p.sessionEndpoint.Store(nil)
			delete(t.endpoints, want.Key)
		}
	}
}

// clearEndpoint removes the endpoint of a peer from the device if it is the configured one. If the
// peer has roamed, it keeps its new endpoint, because it has authenticated itself there.
func clearEndpoint(dev *device.Peer, configured netip.AddrPort) {
	if at, ok := endpointOf(dev).(interface{ AddrPort() netip.AddrPort }); ok && at.AddrPort() == configured {
		dev.SetEndpointFromPacket(nil)
	}
}

// publish makes a table the current one, and stops the peers that are not in it.
func (t *Tunnel) publish(table *peerTable) {
	old := t.peers.Swap(table)
	for dev, p := range old.byDevice {
		now := table.byDevice[dev]
		if now == p {
			continue
		}
		// Stop the peer before it is removed: if a timer started a handshake with a removed peer,
		// the index would stay in the device's table for ever.
		p.stop()
		if now != nil {
			continue
		}
		if p.identity.dev.LookupPeer(p.key) == dev {
			p.identity.dev.RemovePeer(p.key)
		}
		heir := table.byState[p.state]
		if heir == nil || heir.key != p.key {
			delete(t.endpoints, p.key)
		}
		if heir != nil { // add the counters of p to its successor's, so that they never decrease
			heir.received0.Add(p.octetsReceived())
			heir.sent0.Add(p.octetsSent())
		}
	}
}
