package datapath

import (
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

const (
	// retiredGrace is how long sessions with a peer's former key outlive the first session with its
	// new key: as long as packets may be on their way.
	retiredGrace = 10 * time.Second
	// retiredMost is how long they live without such a session: the time of three handshakes. A
	// longer time would hide a wrong key, and keep the session of somebody who stole the key.
	retiredMost = 15 * time.Second
	// maxRetired is how many peers with former keys a peer may have: two for each identity.
	maxRetired = 4
	// retiredLook is the interval at which retired peers are checked.
	retiredLook = time.Second
)

// retire keeps the sessions of a peer whose key was replaced, but lets it begin no new ones,
// because somebody may have stolen the former key. It returns false if there is no session to keep.
// The caller holds t.mu.
func (p *peer) retire() bool {
	k := peerKeypairs.of(p.dev)
	if k.Current() == nil && keypairsNext.of(k).Load() == nil {
		return false
	}
	mu := peerHandshakeMu.of(p.dev)
	mu.Lock()
	clear(peerStatic.of(p.dev)[:]) // without it the device neither begins nor answers handshakes
	mu.Unlock()
	(*peerRetransmit.of(p.dev)).Del()
	p.retiredAt = time.Now()
	p.retired.Store(true)
	return true
}

// retireFor adds the peers that have former keys of want to the table, and begins handshakes with
// the new key. The caller holds t.mu.
func (t *Tunnel) retireFor(table, old *peerTable, fresh *peer) {
	was := old.byState[fresh.state]
	if was == nil || was.key == fresh.key {
		return
	}
	// The peer with the former key knows the current address.
	if e := endpointOf(was.dev); e != nil {
		fresh.dev.SetEndpointFromPacket(e)
		if at, ok := t.places[was.key]; ok {
			t.places[fresh.key] = at
		}
	}
	for _, p := range old.living(fresh.state) {
		if table.byDevice[p.dev] == nil && p.retire() {
			table.byDevice[p.dev], table.also[fresh.state] = p, append(slices.Clone(table.also[fresh.state]), p)
		}
	}
	if t.sweep == nil {
		t.sweep = time.AfterFunc(retiredLook, t.sweepRetired)
	} else {
		t.sweep.Reset(retiredLook)
	}
}

// limitRetired removes the oldest of too many retired peers from a table. The caller holds t.mu.
func (t *peerTable) limitRetired(state *natengine.PeerState) {
	retired := 0
	for _, p := range slices.Backward(t.also[state]) {
		if !p.retired.Load() {
			continue
		}
		if retired++; retired > maxRetired {
			delete(t.byDevice, p.dev)
			t.without(p)
		}
	}
}

// sweepRetired removes retired peers that are not needed any more.
func (t *Tunnel) sweepRetired() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	now, left := time.Now(), false
	table := t.peers.Load()
	needed := func(p *peer) bool {
		if now.Sub(p.retiredAt) >= retiredMost {
			return false
		}
		k := peerKeypairs.of(p.dev)
		current, next := k.Current(), keypairsNext.of(k).Load()
		if (current == nil || !fresh(current, now)) && (next == nil || !fresh(next, now)) {
			return false
		}
		for _, q := range table.living(p.state) {
			if q.sending(now) != nil && p.replaced.IsZero() {
				p.replaced = now
			}
		}
		return p.replaced.IsZero() || now.Sub(p.replaced) < retiredGrace
	}
	gone := make(map[*peer]bool)
	for _, all := range table.also {
		for _, p := range all {
			switch {
			case !p.retired.Load():
			case needed(p):
				left = true
			default:
				gone[p] = true
			}
		}
	}
	if len(gone) > 0 {
		t.keep(func(p *peer) bool { return !gone[p] })
	}
	if left {
		t.sweep.Reset(retiredLook)
	}
}
