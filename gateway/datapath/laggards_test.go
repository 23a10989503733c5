package datapath

import (
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/noise"
)

// A thousand peers that fall silent at once are no storm of handshakes, and each has its turn.
func TestSilentPeersAreServedInTurn(t *testing.T) {
	const peers, minutes = 300, 2
	tunnel, own, _ := benchTunnel(t, PresharedKeys{}, peers)
	if err := tunnel.SetKeys([32]byte(own.Bytes()), [32]byte(noise.NewKey().Bytes())); err != nil {
		t.Fatal(err)
	}
	tunnel.mu.Lock() // the tunnel itself does not look meanwhile
	defer tunnel.mu.Unlock()
	table, next := tunnel.peers.Load(), tunnel.ids.Load().next
	for _, p := range table.byState {
		p.unanswered.Store(1)
	}
	turns, last := make(map[*peer]int), make(map[*peer]time.Time)
	now := time.Now().Add(time.Second)
	for range minutes * time.Minute / laggardLook {
		now = now.Add(laggardLook)
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
		if turns[p] < 10*minutes { // one in five seconds if there is room
			t.Errorf("a peer had %d turns in %d minutes", turns[p], minutes)
		}
	}
}

// A peer that the current identity refuses, since its key is our next one, is nobody's laggard.
func TestAPeerWithoutACurrentIdentityIsNotALaggard(t *testing.T) {
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

// peers are those of an identity.
func (id *identity) peers(table *peerTable) (all []*peer) {
	for _, p := range table.byDevice {
		if p.of == id {
			all = append(all, p)
		}
	}
	return all
}
