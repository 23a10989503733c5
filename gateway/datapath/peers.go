package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// peerTable is never modified after it was published.
type peerTable struct {
	byState  map[*natengine.PeerState]*peer   // of the current identity
	also     map[*natengine.PeerState][]*peer // of the next one, and retired ones
	byDevice map[*device.Peer]*peer           // all
	at       map[*peer]netip.Addr             // where each is configured
	byAddr   map[netip.Addr]*place            // what is there
}

func newPeerTable(peers int) *peerTable {
	return &peerTable{
		byState:  make(map[*natengine.PeerState]*peer, peers),
		also:     make(map[*natengine.PeerState][]*peer),
		byDevice: make(map[*device.Peer]*peer, peers),
		at:       make(map[*peer]netip.Addr, peers),
	}
}

// A Peer is a peer of the engine, its public key, and where it is; the zero AddrPort leaves that as
// it is, unless Refused says that nothing may be sent to where it was set to be: then nothing is
// sent to the peer until it has sent something, wherever from.
type Peer struct {
	State    *natengine.PeerState
	Key      [32]byte
	Endpoint netip.AddrPort
	Refused  bool
	// Gateway holds the two addresses of the peer's gateway inside the tunnel: the source of its messages,
	// and the address at which it answers. The Port accepts messages only from these.
	Gateway   [2]netip.Addr
	Streams   bool // the peer's gateway may use the Streams, and we those of the peer
	Preshared PresharedKeys
}

// SetPeers replaces the peers. Call it after each change of the engine's: what a peer may send is
// what the engine's rules say, so a range that moves from one to another does so in one step there.
// A peer that stays keeps its sessions; where it is, is set when Endpoint is another than the last
// time, since a peer may roam.
func (t *Tunnel) SetPeers(peers []Peer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	return t.set(newPeerTable(len(peers)), peers)
}

// Change is SetPeers with all peers that there are, but for those that changed, new ones among them, and
// those that are gone.
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

// set adds peers to a table, which is in force then. With t.mu.
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
			p.dev.Start() // only now, so that its first message finds it in the table
			if table.replaces(p) {
				p.initiation.arm(0)
			}
		}
	}
	t.lookSoon()
	return errors.Join(errs...)
}

// member returns the peer of an identity that a Peer is, and whether it is new. With t.mu.
func (t *Tunnel) member(table, old *peerTable, id *identity, want Peer) (p *peer, isNew bool, err error) {
	key := device.NoisePublicKey(want.Key)
	if key == *id.public.Load() {
		return nil, false, errors.New("its public key is our own")
	}
	dev := id.dev.LookupPeer(key)
	if p = old.byDevice[dev]; p != nil && p.retired.Load() { // it has its former key again, or somebody else has
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

// replaces reports whether a peer has retired ones.
func (t *peerTable) replaces(p *peer) bool {
	return slices.ContainsFunc(t.also[p.state], func(q *peer) bool { return q.retired.Load() })
}

// place sets the endpoint of a peer and the addresses of its gateway. With t.mu.
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

// leave makes the device forget where a peer is, if that is where it was set to be: where it has
// roamed to, it has shown by its key.
func leave(dev *device.Peer, was netip.AddrPort) {
	if at, ok := endpointOf(dev).(interface{ AddrPort() netip.AddrPort }); ok && at.AddrPort() == was {
		dev.SetEndpointFromPacket(nil)
	}
}

// publish replaces the table, and ends what is not in it any more.
func (t *Tunnel) publish(table *peerTable) {
	old := t.peers.Swap(table)
	for dev, p := range old.byDevice {
		now := table.byDevice[dev]
		if now == p {
			continue
		}
		p.stop() // first: a timer that began a handshake with a removed peer would leave its index in the device's table for ever
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
		if heir != nil { // what is counted for a peer never becomes less
			heir.received0.Add(p.octetsReceived())
			heir.sent0.Add(p.octetsSent())
		}
	}
}
