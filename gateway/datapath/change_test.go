package datapath

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// silentLink is a Link that never has a packet.
type silentLink struct{ Link }

func (silentLink) MTU() int     { return 1440 }
func (silentLink) Wake()        {}
func (silentLink) Close() error { return nil }

// After any changes, additions and removals of peers, an incrementally updated tunnel must equal
// a new one that gets all peers at once.
func TestIncrementalTunnelChangesEqualAFullConfiguration(t *testing.T) {
	rng := rand.New(rand.NewPCG(14, 2))
	engine := natengine.New(natengine.Config{})
	var rules []natengine.Peer
	for i := range 12 {
		rules = append(rules, natengine.Peer{ID: fmt.Sprint("peer", i), RemotePods: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i), 0, 0}), 16)}})
	}
	if err := engine.SetPeers(rules); err != nil {
		t.Fatal(err)
	}
	states := engine.Peers()
	open := func() *Tunnel {
		tunnel := New(silentLink{}, bind.New(), engine, nil, Options{})
		t.Cleanup(func() { _ = tunnel.Close() })
		return tunnel
	}
	says := func(tunnel *Tunnel) (all []string) {
		table := tunnel.peers.Load()
		for state, p := range table.byState {
			if table.byDevice[p.dev] != p || p.state != state || tunnel.current().dev.LookupPeer(p.key) != p.dev || p.stopped {
				t.Fatalf("%s is not what it is", state.ID())
			}
			at := netip.AddrPort{}
			if e, ok := endpointOf(p.dev).(interface{ AddrPort() netip.AddrPort }); ok {
				at = e.AddrPort()
			}
			all = append(all, fmt.Sprint(state.ID(), p.key[0], table.addrs[p], at, tunnel.endpoints[p.key]))
		}
		places := slices.SortedFunc(maps.Keys(table.byAddr), netip.Addr.Compare)
		return append(slices.Sorted(slices.Values(all)), fmt.Sprint(places, len(table.byDevice), len(table.addrs), len(tunnel.endpoints)))
	}
	tunnel, now := open(), make(map[*natengine.PeerState]Peer)
	keys := rng.Perm(20)
	for step := range 400 {
		var changed []Peer
		var removed []*natengine.PeerState
		if rng.IntN(3) == 0 {
			rng.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] }) // move keys between peers
		}
		for i, state := range states {
			was, is := now[state]
			switch next := (Peer{State: state, Key: [32]byte{byte(1 + keys[i])}, Endpoint: was.Endpoint}); {
			case rng.IntN(6) == 0:
				if is {
					removed = append(removed, state)
				}
				delete(now, state)
			case rng.IntN(3) == 0 || is && was.Key != next.Key:
				if !was.Endpoint.IsValid() || rng.IntN(3) == 0 {
					next.Endpoint = netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(rng.IntN(5))}), uint16(1+rng.IntN(3)))
				}
				now[state] = next
				changed = append(changed, next)
			}
		}
		before := tunnel.peers.Load()
		peersBefore := len(before.byState)
		if err := tunnel.Change(changed, removed); err != nil {
			t.Fatal(err)
		}
		if len(before.byState) != peersBefore {
			t.Fatalf("step %d: a table has changed that was published", step)
		}
		reference := open()
		if err := reference.SetPeers(slices.Collect(maps.Values(now))); err != nil {
			t.Fatal(err)
		}
		if got, want := says(tunnel), says(reference); !slices.Equal(got, want) {
			t.Fatalf("step %d: %q\nwant %q", step, got, want)
		}
		_ = reference.Close()
	}
}
