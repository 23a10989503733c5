package datapath

import (
	"time"

	"golang.zx2c4.com/wireguard/device"
)

// A plain WireGuard peer replaces our key by the next one at one moment. Its sessions with the former key end then, and it
// begins no handshake until it has something to send: a peer that only answers falls silent. So while our key rotates, the
// tunnel itself begins handshakes with the next key with silent peers. A peer that still has the former key refuses them, and its
// session lasts.

const (
	// laggardSilence is how long a peer may leave data unanswered. It is longer than most round trips, and the loss of a
	// peer that only answers is hardly longer.
	laggardSilence = 250 * time.Millisecond
	// laggardLook is how often silent peers are looked for while the key rotates, and laggardsAtOnce how many of them get
	// a handshake then: 100 in a second take two hundredths of a processor.
	laggardLook    = 100 * time.Millisecond
	laggardsAtOnce = 10
	// laggardPause is the least time between two handshakes with a peer. It grows up to RekeyTimeout, because a handshake
	// ends the one before, whose answer may take long.
	laggardPause = time.Second
)

// lookForLaggards begins handshakes with the next key, and runs again until the rotation ends.
func (t *Tunnel) lookForLaggards() {
	t.mu.Lock()
	next := t.ids.Load().next
	if t.closed || next == nil {
		t.mu.Unlock()
		return
	}
	table := t.peers.Load()
	laggards := table.laggards(next, time.Now())
	t.laggards.Reset(laggardLook)
	t.mu.Unlock()
	for _, p := range laggards {
		p.introduce(table)
	}
}

// laggards returns peers of the next identity that have no session and whose current session is
// silent. The caller holds t.mu.
func (t *peerTable) laggards(next *identity, now time.Time) (all []*peer) {
	for state, others := range t.also {
		p := t.byState[state]
		if p == nil { // its own public key is our next key
			continue
		}
		since := p.unanswered.Load()
		silent := since != 0 && time.Duration(p.t.at(now)-since) >= laggardSilence
		for _, q := range others {
			if q.of != next || q.retired.Load() {
				continue
			}
			if !silent {
				q.introductions = 0
				continue
			}
			pause := min(time.Duration(max(1, q.introductions))*laggardPause, device.RekeyTimeout)
			if len(all) == laggardsAtOnce || q.sending(now) != nil || now.Sub(q.introduced) < pause {
				continue
			}
			q.introduced = now
			q.introductions++
			all = append(all, q)
		}
	}
	return all
}

// introduce begins a handshake, even within RekeyTimeout of the last one. The device does not repeat it.
func (p *peer) introduce(table *peerTable) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return
	}
	p.follow(table)
	p.forgetInitiation()
	_ = p.dev.SendHandshakeInitiation(false) // the device has logged why not
	(*peerRetransmit.of(p.dev)).Del()
}

// forgetInitiation lets the device begin a handshake within RekeyTimeout of the last one.
func (p *peer) forgetInitiation() {
	mu := peerHandshakeMu.of(p.dev)
	mu.Lock()
	defer mu.Unlock()
	*peerInitiated.of(p.dev) = time.Time{}
}
