package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// To rotate a key without loss, both sides make the new session before the old one ends:
//
//	side that rotates   answers to its current and its next key, until the caller promotes the next
//	its peer            keeps the sessions with the former key until one with the new key exists
//
// Each key of ours is an identity with a device of its own, because a device has only one static
// key. All identities share the socket. The mac1 of a handshake message depends on the receiver's
// public key, so it shows to which identity the message belongs. Any other message belongs to the
// device that has chosen its receiver index. The probability that two devices choose the same index
// is 2^-32.
//
// So one peer of the engine may correspond to several peers here: one of each identity, and retired
// ones. The one with the newest session encrypts.

// An identity is one static key of ours, with the device that uses it.
type identity struct {
	t    *Tunnel
	dev  *device.Device
	bind *handshakes

	public  atomic.Pointer[device.NoisePublicKey]
	private atomic.Pointer[device.NoisePrivateKey]
	checker atomic.Pointer[device.CookieChecker] // recognizes messages made for our public key
}

// identities are the identities of a tunnel. next is nil unless a key rotates.
type identities struct{ current, next *identity }

// newIdentity returns an identity without a key.
func newIdentity(t *Tunnel) *identity {
	id := &identity{t: t}
	id.private.Store(new(device.NoisePrivateKey))
	id.setPublic(device.NoisePublicKey{})
	id.bind = newHandshakes(id)
	id.dev = device.NewDevice(newNoPackets(), id.bind, t.logger())
	return id
}

func (id *identity) setPublic(key device.NoisePublicKey) {
	checker := new(device.CookieChecker)
	checker.Init(key)
	id.public.Store(&key)
	id.checker.Store(checker)
}

// setPrivate changes the key, which ends all sessions. The caller holds t.mu.
func (id *identity) setPrivate(private, public [32]byte) error {
	if err := id.dev.SetPrivateKey(private); err != nil {
		return fmt.Errorf("private key: %w", err)
	}
	own := device.NoisePrivateKey(private)
	id.private.Store(&own)
	id.setPublic(public)
	return nil
}

// up starts the device's processing of messages.
func (id *identity) up(port uint16) error {
	if err := id.dev.IpcSet(fmt.Sprintf("listen_port=%d\n", port)); err != nil {
		return err
	}
	return id.dev.Up()
}

func (t *Tunnel) current() *identity { return t.ids.Load().current }

// all returns the existing identities, the current one first.
func (i *identities) all() []*identity {
	if i.next == nil {
		return []*identity{i.current}
	}
	return []*identity{i.current, i.next}
}

// lookup searches all identities for a receiver index. Its results are those of the function
// lookup.
func (t *Tunnel) lookup(index uint32) (*device.Peer, *device.Keypair) {
	ids := t.ids.Load()
	dev, k := lookup(ids.current.dev, index)
	if k == nil && ids.next != nil {
		if d, k := lookup(ids.next.dev, index); d != nil {
			return d, k
		}
	}
	return dev, k
}

// identityOf returns the identity for whose public key a handshake message was made. If there is
// none, it returns the current identity, which will refuse the message.
func (t *Tunnel) identityOf(m []byte) *identity {
	ids := t.ids.Load()
	if ids.next == nil {
		return ids.current
	}
	if m[0] == device.MessageCookieReplyType {
		if dev, _ := lookup(ids.next.dev, binary.LittleEndian.Uint32(m[4:])); dev != nil {
			return ids.next
		}
	} else if !ids.current.checker.Load().CheckMAC1(m) && ids.next.checker.Load().CheckMAC1(m) {
		return ids.next
	}
	return ids.current
}

// peerOf returns the peer for which a device made a handshake message, or nil if the peer is
// unknown.
func (t *Tunnel) peerOf(m []byte) *peer {
	for _, id := range t.ids.Load().all() {
		if p := id.bind.peerOf(m); p != nil {
			return p
		}
	}
	return nil
}

// SetKeys sets our current and next private keys. The tunnel answers to both; a zero next means
// that there is no next key. When next becomes the current key, its sessions stay, and those of
// the former key end. Any other new current key ends all sessions. Calling SetKeys again with the
// same keys changes nothing.
func (t *Tunnel) SetKeys(private, next [32]byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	return t.setKeys(private, next)
}

// NextKey returns the next private key, to which the tunnel answers as well, or zero if there is
// none.
func (t *Tunnel) NextKey() [32]byte {
	if next := t.ids.Load().next; next != nil {
		return *next.private.Load()
	}
	return [32]byte{}
}

func (t *Tunnel) setKeys(private, next [32]byte) error {
	ids := *t.ids.Load()
	if next == private {
		next = [32]byte{}
	}
	if *ids.current.private.Load() != private {
		if ids.next != nil && *ids.next.private.Load() == private {
			t.promote()
		} else if err := t.replace(private); err != nil {
			return err
		}
		ids = *t.ids.Load()
	}
	if ids.next != nil && *ids.next.private.Load() == next {
		return nil
	}
	t.withdraw()
	if next == ([32]byte{}) {
		return nil
	}
	return t.prepare(next)
}

// replace sets another private key for the current identity. The caller holds t.mu.
func (t *Tunnel) replace(private [32]byte) error {
	public, err := curve25519.X25519(private[:], curve25519.Basepoint)
	if err != nil {
		return fmt.Errorf("private key: %w", err)
	}
	t.withdraw()
	// If a peer has our own public key, SetPrivateKey removes that peer. Meanwhile SetPrivateKey
	// holds the lock of the device's key and waits for the timers of the peer. These timers may
	// wait for the same lock. So remove such a peer first, to avoid the deadlock.
	own := t.current()
	t.filterPeers(func(p *peer) bool { return !p.retired.Load() && p.key != device.NoisePublicKey(public) })
	return own.setPrivate(private, [32]byte(public))
}

// prepare adds the next identity, with all current peers. The caller holds t.mu.
func (t *Tunnel) prepare(private [32]byte) error {
	public, err := curve25519.X25519(private[:], curve25519.Basepoint)
	if err != nil {
		return fmt.Errorf("next private key: %w", err)
	}
	id := newIdentity(t)
	if err := id.setPrivate(private, [32]byte(public)); err != nil {
		id.dev.Close()
		return err
	}
	if t.up {
		if err := id.up(t.port); err != nil {
			id.dev.Close()
			return fmt.Errorf("next private key: %w", err)
		}
	}
	t.ids.Store(&identities{t.current(), id})
	table := t.peers.Load().clone()
	for state, p := range table.byState {
		q, err := newTwin(id, p)
		if err != nil {
			t.options.Logger.Errorf("peer %s: %v", state.ID(), err)
			continue
		}
		table.byDevice[q.dev], table.siblings[state] = q, append(slices.Clone(table.siblings[state]), q)
	}
	t.publish(table)
	for _, p := range table.byDevice {
		if p.identity == id && t.up {
			p.dev.Start()
		}
	}
	if t.laggards == nil {
		t.laggards = time.AfterFunc(laggardInterval, t.lookForLaggards)
	} else {
		t.laggards.Reset(laggardInterval)
	}
	return nil
}

// newTwin returns the peer of the next identity that corresponds to p of the current identity.
// The caller holds t.mu.
func newTwin(id *identity, p *peer) (*peer, error) {
	if p.key == *id.public.Load() {
		return nil, errors.New("its public key is the next key of this gateway")
	}
	dev, err := id.dev.NewPeer(p.key)
	if err != nil {
		return nil, err
	}
	q := newPeer(id, p.state, p.key, dev, nil)
	q.gateway.Store(p.gateway.Load())
	q.preshared.set(p.preshared.current())
	if e := endpointOf(p.dev); e != nil {
		dev.SetEndpointFromPacket(e)
	}
	return q, nil
}

// withdraw closes the next identity. The caller holds t.mu.
func (t *Tunnel) withdraw() {
	ids := t.ids.Load()
	if ids.next == nil {
		return
	}
	t.filterPeers(func(p *peer) bool { return p.identity != ids.next })
	t.ids.Store(&identities{current: ids.current})
	ids.next.dev.Close()
}

// promote makes the next identity the current one, and closes the former one. The caller holds
// t.mu.
func (t *Tunnel) promote() {
	ids := t.ids.Load()
	old := t.peers.Load()
	table := newPeerTable(len(old.byState))
	for state, all := range old.siblings {
		for _, p := range all {
			switch {
			case p.identity == ids.current:
				continue
			case !p.retired.Load():
				table.byState[state], table.addrs[p] = p, old.addrs[old.byState[state]]
			default:
				table.siblings[state] = append(table.siblings[state], p)
			}
			table.byDevice[p.dev] = p
		}
	}
	table.byAddr = signsByAddr(table.addrs, old.byAddr)
	t.publish(table)
	t.ids.Store(&identities{current: ids.next})
	ids.current.dev.Close()
	t.recheckSoon()
}

// filterPeers removes from the table all peers for which valid returns false. The caller holds
// t.mu.
func (t *Tunnel) filterPeers(valid func(p *peer) bool) {
	table := t.peers.Load().clone()
	for dev, p := range table.byDevice {
		if valid(p) {
			continue
		}
		delete(table.byDevice, dev)
		if table.byState[p.state] == p {
			delete(table.byState, p.state)
			delete(table.addrs, p)
		}
		table.removeSibling(p)
	}
	t.publish(table)
}

// clone returns a copy of the table. The caller may modify the copy, except for the slices in
// siblings.
func (t *peerTable) clone() *peerTable {
	return &peerTable{byState: maps.Clone(t.byState), siblings: maps.Clone(t.siblings), byDevice: maps.Clone(t.byDevice),
		addrs: maps.Clone(t.addrs), byAddr: t.byAddr}
}

// removeSibling removes a peer from t.siblings.
func (t *peerTable) removeSibling(p *peer) {
	rest := slices.DeleteFunc(slices.Clone(t.siblings[p.state]), func(q *peer) bool { return q == p })
	if t.siblings[p.state] = rest; len(rest) == 0 {
		delete(t.siblings, p.state)
	}
}

// livePeers returns the peers for one engine peer that are not retired, and so may start
// handshakes. The caller owns the slice.
func (t *peerTable) livePeers(state *natengine.PeerState) []*peer {
	p := t.byState[state]
	if p == nil {
		return nil
	}
	all := []*peer{p}
	for _, q := range t.siblings[state] {
		if !q.retired.Load() {
			all = append(all, q)
		}
	}
	return all
}

// newestSession returns the newest session that can encrypt for a peer, and the peer of the table
// that has this session. The keypair is nil if no session can encrypt for p.
func (t *peerTable) newestSession(p *peer, now time.Time) (*peer, *device.Keypair) {
	k := p.sendingKeypair(now)
	if len(t.siblings) == 0 {
		return p, k
	}
	via := p
	consider := func(q *peer) {
		other := q.sendingKeypair(now)
		if other != nil && (k == nil || keypairCreated.ptr(other).After(*keypairCreated.ptr(k))) {
			via, k = q, other
		}
	}
	if main := t.byState[p.state]; main != nil && main != p {
		consider(main)
	}
	for _, q := range t.siblings[p.state] {
		consider(q)
	}
	return via, k
}

// Several peers may correspond to the same engine peer. follow copies to p the endpoint of the one
// with the newest session.
func (p *peer) follow(table *peerTable) {
	if len(table.siblings) == 0 {
		return
	}
	if via, k := table.newestSession(p, time.Now()); via != p && k != nil {
		if e := endpointOf(via.dev); e != nil {
			p.dev.SetEndpointFromPacket(e)
		}
	}
}

// current returns the keys of the last call of set.
func (s *preshared) current() PresharedKeys {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys
}

func (id *identity) key() [32]byte { return *id.public.Load() }

// Several peers may correspond to the same engine peer as p. latestPeer returns the one with the
// newest session.
func (t *peerTable) latestPeer(p *peer, now time.Time) *peer {
	if len(t.siblings) == 0 {
		return p
	}
	for _, q := range append([]*peer{t.byState[p.state]}, t.siblings[p.state]...) {
		if q != nil && q.session(now).After(p.session(now)) {
			p = q
		}
	}
	return p
}

// octetsReceived returns how many octets of WireGuard messages came from a peer. This includes
// octets counted for older entries that p has replaced, for example an entry with an older key.
func (p *peer) octetsReceived() uint64 { return p.received0.Load() + peerReceived.ptr(p.dev).Load() }

// octetsSent is the counterpart of octetsReceived for messages to a peer.
func (p *peer) octetsSent() uint64 { return p.sent0.Load() + peerSent.ptr(p.dev).Load() }
