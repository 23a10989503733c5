package datapath

import (
	"time"

	"golang.zx2c4.com/wireguard/device"
)

// A plain WireGuard peer changes from our current to our next key at a moment that we cannot
// observe. At that moment its sessions with the former key end, and the peer starts a handshake
// only when it has something to send. So a peer that only responds to packets falls silent. While
// our key rotates, the tunnel therefore starts handshakes with silent peers itself, using the next
// key. A peer that still has only the former key refuses such a handshake, and its session
// continues.

const (
	// laggardSilence is the time without an answer to data after which a peer counts as silent. It
	// is longer than most round trips, but short enough that connections to a peer that only
	// responds are interrupted only briefly.
	laggardSilence = 250 * time.Millisecond
	// laggardInterval is the interval at which silent peers are searched while our key rotates. At
	// most laggardsAtOnce of them get a handshake in one interval: 100 in a second take 2 % of a
	// processor.
	laggardInterval = 100 * time.Millisecond
	laggardsAtOnce  = 10
	// laggardPause is the minimum time between two handshakes with a peer. The time grows with each
	// attempt, up to RekeyTimeout, because a new handshake ends the previous one, and the answer to
	// that one may take long.
	laggardPause = time.Second
)

// lookForLaggards starts handshakes with silent peers, using the next key. It runs again after
// laggardInterval until the rotation ends.
func (t *Tunnel) lookForLaggards() {
	t.mu.Lock()
	next := t.ids.Load().next
	if t.closed || next == nil {
		t.mu.Unlock()
		return
	}
	table := t.peers.Load()
	laggards := table.laggards(next, time.Now())
	t.laggards.Reset(laggardInterval)
	t.mu.Unlock()
	for _, p := range laggards {
		p.introduce(table)
	}
}

// laggards returns at most laggardsAtOnce peers of the next identity, id. Each of them has no
// session with that identity yet, and its session with the current identity is silent. The caller
// holds t.mu.
func (t *peerTable) laggards(id *identity, now time.Time) (all []*peer) {
	for state, others := range t.siblings {
		p := t.byState[state]
		if p == nil { // the current identity has no such peer, because its public key is one of ours
			continue
		}
		since := p.unanswered.Load()
		silent := since != 0 && time.Duration(p.t.stamp(now)-since) >= laggardSilence
		for _, q := range others {
			if q.identity != id || q.retired.Load() {
				continue
			}
			if !silent {
				q.introductions = 0
				continue
			}
			pause := min(time.Duration(max(1, q.introductions))*laggardPause, device.RekeyTimeout)
			if len(all) == laggardsAtOnce || q.sendingKeypair(now) != nil || now.Sub(q.introduced) < pause {
				continue
			}
			q.introduced = now
			q.introductions++
			all = append(all, q)
		}
	}
	return all
}

// introduce starts a handshake, even if the last one was started less than RekeyTimeout ago. The
// device does not repeat this handshake.
func (p *peer) introduce(table *peerTable) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return
	}
	p.follow(table)
	p.forgetInitiation()
	_ = p.dev.SendHandshakeInitiation(false) // the device logs an error itself
	(*peerRetransmit.ptr(p.dev)).Del()
}

// forgetInitiation lets the device start a handshake even if the last one was started less than
// RekeyTimeout ago.
func (p *peer) forgetInitiation() {
	mu := peerHandshakeMu.ptr(p.dev)
	mu.Lock()
	defer mu.Unlock()
	*peerInitiated.ptr(p.dev) = time.Time{}
}
