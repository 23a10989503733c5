package datapath

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/noise"
)

// If hundreds of peers fall silent at once, they do not cause a burst of handshakes, and each peer
// gets its turn.
func TestSilentPeersGetHandshakesInTurn(t *testing.T) {
	const peers, minutes = 300, 2
	tunnel, own, _ := benchTunnel(t, PresharedKeys{}, peers)
	if err := tunnel.SetKeys([32]byte(own.Bytes()), [32]byte(noise.NewKey().Bytes())); err != nil {
		t.Fatal(err)
	}
	tunnel.mu.Lock() // keeps lookForLaggards from running
	defer tunnel.mu.Unlock()
	table, next := tunnel.peers.Load(), tunnel.ids.Load().next
	for _, p := range table.byState {
		p.unanswered.Store(1)
	}
	turns, last := make(map[*peer]int), make(map[*peer]time.Time)
	now := time.Now().Add(time.Second)
	for range minutes * time.Minute / laggardInterval {
		now = now.Add(laggardInterval)
		all := table.laggards(next, now)
		if len(all) > laggardsAtOnce {
			t.Fatalf("%d handshakes at once", len(all))
		}
		for _, p := range all {
			if since := now.Sub(last[p]); since < laggardPause {
				t.Fatalf("two handshakes with one peer within %v", since)
			}
			last[p] = now
			turns[p]++
		}
	}
	for _, p := range next.peers(table) {
		if turns[p] < 10*minutes { // without laggardsAtOnce, a peer would have one turn in five seconds: 12 a minute
			t.Errorf("a peer had %d turns in %d minutes", turns[p], minutes)
		}
	}
}

// A peer without a counterpart in the current identity, because its public key is one of ours,
// does not count as a laggard.
func TestPeerWithOnlyTheNextIdentityIsNotALaggard(t *testing.T) {
	tunnel, own, _ := benchTunnel(t, PresharedKeys{}, 1)
	if err := tunnel.SetKeys([32]byte(own.Bytes()), [32]byte(noise.NewKey().Bytes())); err != nil {
		t.Fatal(err)
	}
	tunnel.mu.Lock()
	defer tunnel.mu.Unlock()
	table := tunnel.peers.Load().clone()
	clear(table.byState)
	if all := table.laggards(tunnel.ids.Load().next, time.Now()); len(all) != 0 {
		t.Errorf("%d laggards", len(all))
	}
}

// peers returns the peers of an identity.
func (id *identity) peers(table *peerTable) (all []*peer) {
	for _, p := range table.byDevice {
		if p.identity == id {
			all = append(all, p)
		}
	}
	return all
}
