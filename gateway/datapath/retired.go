package datapath

import (
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
)

const (
	// retiredGrace is the time for which sessions with a peer's former key continue after the first
	// session with its new key. Packets may be on their way for that long.
	retiredGrace = 10 * time.Second
	// retiredMost is the time for which sessions with a former key continue if no session is made
	// with the new key. It is enough for three handshakes. A longer time would hide a wrong key,
	// and would keep alive the session of somebody who stole the former key.
	retiredMost = 15 * time.Second
	// maxRetired is the maximum number of retired peers that a peer may have: two for each
	// identity.
	maxRetired = 4
	// retiredInterval is the interval at which retired peers are checked.
	retiredInterval = time.Second
)

// retire retires a peer whose key was replaced. Its sessions stay, but it can make no new ones,
// because somebody may have stolen the former key. retire returns false if there is no session to
// keep. The caller holds t.mu.
func (p *peer) retire() bool {
	k := peerKeypairs.ptr(p.dev)
	if k.Current() == nil && keypairsNext.ptr(k).Load() == nil {
		return false
	}
	mu := peerHandshakeMu.ptr(p.dev)
	mu.Lock()
	clear(peerStatic.ptr(p.dev)[:]) // without this value the device neither starts nor answers handshakes
	mu.Unlock()
	(*peerRetransmit.ptr(p.dev)).Del()
	p.retiredAt = time.Now()
	p.retired.Store(true)
	return true
}

// retireFor retires the predecessors of a new peer, which have former keys, and adds them to the
// table. The caller holds t.mu.
func (t *Tunnel) retireFor(table, old *peerTable, fresh *peer) {
	was := old.byState[fresh.state]
	if was == nil || was.key == fresh.key {
		return
	}
	// The predecessor has the peer's current endpoint, because the peer may have roamed.
	if e := endpointOf(was.dev); e != nil {
		fresh.dev.SetEndpointFromPacket(e)
		if at, ok := t.endpoints[was.key]; ok {
			t.endpoints[fresh.key] = at
		}
	}
	for _, p := range old.livePeers(fresh.state) {
		if table.byDevice[p.dev] == nil && p.retire() {
			table.byDevice[p.dev], table.siblings[fresh.state] = p, append(slices.Clone(table.siblings[fresh.state]), p)
		}
	}
	if t.sweep == nil {
		t.sweep = time.AfterFunc(retiredInterval, t.sweepRetired)
	} else {
		t.sweep.Reset(retiredInterval)
	}
}

// limitRetired removes the oldest retired peers from the table if one engine peer has more than
// maxRetired. The caller holds t.mu.
func (t *peerTable) limitRetired(state *natengine.PeerState) {
	retired := 0
	for _, p := range slices.Backward(t.siblings[state]) {
		if !p.retired.Load() {
			continue
		}
		if retired++; retired > maxRetired {
			delete(t.byDevice, p.dev)
			t.removeSibling(p)
		}
	}
}

// sweepRetired removes retired peers that are no longer needed. It runs again after retiredInterval
// while any are left.
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
		k := peerKeypairs.ptr(p.dev)
		current, next := k.Current(), keypairsNext.ptr(k).Load()
		if (current == nil || !isFresh(current, now)) && (next == nil || !isFresh(next, now)) {
			return false
		}
		for _, q := range table.livePeers(p.state) {
			if q.sendingKeypair(now) != nil && p.replaced.IsZero() {
				p.replaced = now
			}
		}
		return p.replaced.IsZero() || now.Sub(p.replaced) < retiredGrace
	}
	removed := make(map[*peer]bool)
	for _, all := range table.siblings {
		for _, p := range all {
			switch {
			case !p.retired.Load():
			case needed(p):
				left = true
			default:
				removed[p] = true
			}
		}
	}
	if len(removed) > 0 {
		t.filterPeers(func(p *peer) bool { return !removed[p] })
	}
	if left {
		t.sweep.Reset(retiredInterval)
	}
}
