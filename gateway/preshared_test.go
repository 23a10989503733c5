package gateway

import (
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// A changed preshared key is set in all tunnels of its peer, and in those of no other peer.
func TestAPresharedKeyReachesAllTunnelsOfItsPeer(t *testing.T) {
	g := newChangingLoop(t)
	in := fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000"}
	for _, p := range crowdOf(3) {
		k := p.PublicKey
		k[15] = 1
		p.Tunnels = []fabric.TunnelEnd{{PublicKey: k, Port: 6000}}
		in.Peers = append(in.Peers, p)
	}
	c := Config{MTU: 1440, PrivateKey: key(40), Tunnels: 2}
	c.Gateway, _ = fabric.GatewayFor(in)
	g.applyConfig(t, c, false)
	g.applyConfig(t, c, false)
	if g.now.applyErr != nil || len(g.now.peers) != 3 {
		t.Fatalf("%d peers: want 3; %v", len(g.now.peers), g.now.applyErr)
	}
	first, second := datapath.PresharedKeys{Key: [32]byte{1}}, datapath.PresharedKeys{Key: [32]byte{2}, Previous: [32]byte{1}, Changing: true}
	for _, keys := range []datapath.PresharedKeys{first, second, {}} {
		c.Preshared = map[string]datapath.PresharedKeys{g.now.peers[1].ID: keys}
		s := g.survey(c, c.Gateway.Peers, false)
		if !slices.Equal(s.other, []int{1}) || len(s.ruled) > 0 {
			t.Errorf("peers %v have something else, and %v other rules: want one peer, and no rules", s.other, s.ruled)
		}
		for i := range g.tunnels {
			if got := tunnelPeers(i, s.peers, s.other); len(got) != 1 || got[0].Preshared != keys {
				t.Errorf("tunnel %d did not get the keys, but %d peers", i, len(got))
			}
		}
		g.applyConfig(t, c, false)
		if s := g.survey(c, c.Gateway.Peers, false); len(s.other) > 0 {
			t.Errorf("unchanged keys were set again for peers %v", s.other)
		}
	}
}
