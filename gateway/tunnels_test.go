package gateway

import (
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// withTwoTunnels returns a gateway with two tunnels to one peer, and that peer.
func withTwoTunnels(t *testing.T) (*loop, *peer) {
	t.Helper()
	g := newChangingLoop(t)
	g.applyConfig(t, Config{MTU: 1440, PrivateKey: key(40), Gateway: decided(t, fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000", Peers: []fabric.Peer{twoTunnels(crowdOf(1)[0])}})}, true)
	if len(g.now.peers) != 1 || len(g.now.peers[0].Tunnels) != 1 {
		t.Fatalf("%+v; want a peer with a further tunnel", g.now.peers)
	}
	return g, &g.now.peers[0]
}

func twoTunnels(p fabric.Peer) fabric.Peer {
	p.Tunnels = []fabric.TunnelEnd{{PublicKey: key(77), Port: p.Port + 1}}
	return p
}

// Each tunnel, including the first one, carries flows only while its connection check is
// answered.
func TestFlowsUseTunnelsThatAnswer(t *testing.T) {
	g, p := withTwoTunnels(t)
	now := time.Now()
	for _, tc := range []struct {
		name          string
		first, second check.State
		answered      time.Duration // time since the last answer in the first tunnel
		want          fabric.TunnelSet
	}{
		{"no tunnel answers any more", check.Disconnected, check.Disconnected, time.Hour, 0},
		{"no tunnel has answered yet", check.Connecting, check.Connecting, time.Hour, 0},
		{"only the first answers", check.Connected, check.Disconnected, 0, 0},
		{"both answer", check.Connected, check.Connected, time.Second, 0b11},
		{"only the second answers", check.Disconnected, check.Connected, time.Hour, 0b10},
		{"the second answers before the first", check.Connecting, check.Connected, time.Hour, 0b10},
		{"the first is silent for three intervals", check.Connected, check.Connected, 6 * time.Second, 0b10},
	} {
		g.tunnels[0].observe = func(string) check.Result { return check.Result{State: tc.first, Answered: now.Add(-tc.answered)} }
		g.tunnels[1].observe = func(string) check.Result { return check.Result{State: tc.second} }
		if got := g.workingTunnels(p.ID, now); got != tc.want {
			t.Errorf("%s: flows are in the tunnels %b; want %b", tc.name, got, tc.want)
		}
		p.inUse = tc.want
		v := g.views(g.current(), g.engine.Stats())[0]
		want := tc.first
		if tc.want != 0 && !tc.want.Has(0) {
			want = tc.second
		}
		if got := v.primary().check.State; got != want {
			t.Errorf("%s: the peer is %s; want %s", tc.name, got, want)
		}
	}
}

// A peer counts as down, so that its packets are dropped, only when no tunnel has had a session
// for some time.
func TestAPeerIsDownOnlyWithoutASessionInAllTunnels(t *testing.T) {
	_, p := withTwoTunnels(t)
	begin := time.Now()
	p.session.since = begin
	stats := func(first, second datapath.Stats) []map[[32]byte]datapath.Stats {
		return []map[[32]byte]datapath.Stats{{p.PublicKey: first}, {p.Tunnels[0].PublicKey: second}}
	}
	fresh := func(at time.Time, received uint64) datapath.Stats {
		return datapath.Stats{Handshake: at, Received: received}
	}
	p.updateSessions(stats(datapath.Stats{}, datapath.Stats{}), begin)

	at := begin.Add(time.Minute)
	p.updateSessions(stats(datapath.Stats{}, fresh(at, 1)), at)
	if p.down() || !p.lastHeard().Equal(at) {
		t.Errorf("with a session in the second tunnel alone: down %v, heard %v", p.down(), p.lastHeard().Sub(begin))
	}
	at = begin.Add(time.Hour)
	p.updateSessions(stats(fresh(at, 1), fresh(begin.Add(time.Minute), 1)), at)
	if p.down() || !p.lastHeard().Equal(at) {
		t.Errorf("with a session in the first tunnel alone: down %v, heard %v", p.down(), p.lastHeard().Sub(begin))
	}
	p.updateSessions(stats(fresh(at, 1), fresh(begin.Add(time.Minute), 1)), at.Add(check.SessionGone+time.Second))
	if !p.down() || !p.lastHeard().Equal(at) {
		t.Errorf("without a session in any tunnel: down %v, heard %v", p.down(), p.lastHeard().Sub(begin))
	}
}

// If a peer has roamed in two tunnels and is heard in one of them, that tunnel keeps its endpoint
// while the other one is silent.
func TestSilentTunnelDoesNotResetTheEndpointOfAnother(t *testing.T) {
	g, p := withTwoTunnels(t)
	at := netip.MustParseAddrPort("198.51.100.7:4000") // the address to which both tunnels have roamed
	for i, e := range g.tunnels {
		theirs, _ := theirEnd(p.GatewayPeer, i)
		if err := e.Change([]datapath.Peer{{State: p.state, Key: theirs.PublicKey, Endpoint: at}}, nil); err != nil {
			t.Fatal(err)
		}
	}
	now := time.Now()
	p.further = []session{{key: p.Tunnels[0].PublicKey, since: now, heard: now}}
	g.tick(now)
	p = &g.now.peers[0]
	if !p.session.asserted.Equal(now) || !p.further[0].asserted.IsZero() {
		t.Errorf("asserted: the first tunnel at %v, the second at %v; want only the first, which is silent", p.session.asserted, p.further[0].asserted)
	}
}
