package gateway

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/crypto/curve25519"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/packet"
)

// newChangingLoop returns a gateway without a kernel, with a second tunnel and no configuration
// yet. Its connection checks never get an answer.
func newChangingLoop(t *testing.T) *loop {
	g := newTestLoop(t)
	second := &tunnelEnd{
		Tunnel:  g.tunnels[0].Beside(memlink.NewLink("mem1", 1440), bind.New(), nil, nil),
		checker: check.Start(make(silent), check.Options{Log: quiet}),
		wire:    bind.New(),
	}
	second.observe = second.checker.Observe
	g.tunnels = append(g.tunnels, second)
	g.tunnels[0].wire = bind.New()
	g.now = current{}
	return g
}

// applyConfig applies a configuration as accept, reapply and put do, but without a kernel.
func (l *loop) applyConfig(t *testing.T, c Config, remeasure bool) kernel.State {
	t.Helper()
	want := l.cutTunnels(c.Gateway.Peers, l.now.peers)
	l.resolver.set(want, c.Gateway.Site)
	s := l.survey(c, want, remeasure)
	if err := l.setRules(&s); err != nil {
		t.Fatal(err)
	}
	l.now.config = c
	errs := l.applyTunnels(c, &s)
	objects, _, err := l.objectsFor(&s)
	l.now.peers, l.now.mtu, l.now.applyErr = s.peers, s.tunnel, errors.Join(append(errs, err)...)
	l.now.generation++
	l.publish()
	return objects
}

// lines returns all that can be observed of a gateway, as sorted lines.
func (l *loop) lines(t *testing.T, objects kernel.State) (all []string) {
	t.Helper()
	add := func(v ...any) { all = append(all, fmt.Sprint(v...)) }
	add("tunnel ", l.now.mtu, " peers ", len(l.engine.Peers()))
	add("objects ", objects)
	for _, p := range l.now.peers {
		add("peer ", p.ID, p.Name, " at ", p.at, p.refused, " MTU ", p.pathInner, p.mtu, p.state.MTU(), " in use ", p.inUse, " state ", l.engine.Peer(p.ID) == p.state)
		b, err := TraceQuery{Src: netip.MustParseAddrPort("10.244.1.1:1"), Dst: netip.AddrPortFrom(p.AllowedIPs[0].Addr().Next(), 2), Protocol: "udp"}.packet()
		if err != nil {
			t.Fatal(err)
		}
		var v packet.View
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := l.engine.Outbound(&v, time.Second); verdict.Peer != nil {
			add("packet to ", p.ID, " goes to ", verdict.Peer.ID(), verdict.Action, fmt.Sprintf(" as %x", b))
		}
	}
	kept := make(map[[32]byte]bool) // keys of peers whose address is unknown: their endpoints stay as they were
	for _, p := range l.now.peers {
		kept[p.PublicKey] = !p.at.IsValid() && !p.refused
		for _, e := range p.Tunnels {
			kept[e.PublicKey] = kept[p.PublicKey]
		}
	}
	for i, e := range l.tunnels {
		for key, s := range e.Stats() {
			if kept[key] {
				s.Endpoint = netip.AddrPort{}
			}
			add("tunnel ", i, key, " leads to ", s.Endpoint)
		}
		for _, p := range e.checker.Peers() {
			add("check ", i, p, e.checker.Observe(p.ID).Path.Ceiling)
		}
	}
	slices.Sort(all)
	return all
}

// After any changes of peers, of their addresses and of the paths to them, an incrementally
// updated gateway must equal a new one that gets the whole configuration at once. The comparison
// covers tunnels, rules, connection checks, routes, and the reported error.
func TestIncrementalPeerChangesEqualAFullConfiguration(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	privates := [2]Key{key(40), key(48)} // the second one is also the key of a peer
	theirs, err := curve25519.X25519(privates[1][:], curve25519.Basepoint)
	if err != nil {
		t.Fatal(err)
	}
	var (
		base      = crowdOf(12)
		peers     = make(map[int]fabric.Peer)
		connected = make(map[string]bool) // peers that answer in the additional tunnel
		mtus      = make(map[netip.Addr]int)
		nowhere   fabric.Site
		c         = Config{MTU: 1440, PrivateKey: privates[0]}
		failed    int
		happened  = make(map[string]int)
	)
	mtuTo := func(a netip.Addr, _ map[int]int) (int, error) { return 1500 - mtus[a], nil }
	base[3].PublicKey = [32]byte(theirs)
	g := newChangingLoop(t)
	g.mtuTo = mtuTo
	for step := range 900 {
		remeasure := false
		for range rng.IntN(4) {
			i := rng.IntN(len(base))
			p, found := peers[i]
			if found && rng.IntN(6) == 0 {
				delete(peers, i)
				continue
			}
			if !found {
				p = base[i]
			}
			switch rng.IntN(11) {
			case 0:
				p.Name = fmt.Sprint("x", rng.IntN(3))
			case 1:
				p.PublicKey[9] ^= 1
			case 2:
				p.Endpoint = fmt.Sprintf("192.0.2.%d", 1+rng.IntN(5))
			case 3:
				p.Port = uint16(5000 + rng.IntN(3))
			case 4:
				p.Tunnels = nil
				if rng.IntN(3) > 0 {
					k := p.PublicKey
					k[15] = byte(1 + rng.IntN(2))
					p.Tunnels = []fabric.TunnelEnd{{PublicKey: k, Port: uint16(6000 + rng.IntN(2))}}
				}
			case 5: // swap keys or networks with another peer
				j := rng.IntN(len(base))
				if q, found := peers[j]; found && j != i {
					if rng.IntN(2) == 0 {
						p.PublicKey, q.PublicKey, p.Tunnels, q.Tunnels = q.PublicKey, p.PublicKey, q.Tunnels, p.Tunnels
						base[i].PublicKey, base[j].PublicKey = base[j].PublicKey, base[i].PublicKey
					} else {
						p.Remote, q.Remote = q.Remote, p.Remote
						base[i].Remote, base[j].Remote = base[j].Remote, base[i].Remote
					}
					peers[j] = q
				}
			case 6:
				c.MTU = []int{1440, 1400, 0, 0, 0}[rng.IntN(5)]
			case 7: // the kernel's path MTUs change
				mtus[netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + rng.IntN(5))})] = rng.IntN(3) * 100
				remeasure = true
			case 8:
				nowhere = fabric.Site{}
				if rng.IntN(2) == 0 {
					nowhere = nowhere.With([]netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + rng.IntN(5))})}, "a node of ours")
				}
			case 9:
				connected[p.ID] = !connected[p.ID]
			case 10:
				p.Local.PodSeen = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(200 + rng.IntN(3)), 0, 0}), 16)
			}
			peers[i] = p
		}
		switch rng.IntN(60) {
		case 0, 1, 2:
			if g.now.applyErr == nil {
				c.PrivateKey = privates[1]
			}
		case 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14:
			c.PrivateKey = privates[0]
		}
		in := fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000"}
		for _, p := range peers { // in random order
			in.Peers = append(in.Peers, p)
		}
		c.Gateway, _ = fabric.GatewayFor(in)
		c.Gateway.Site = nowhere
		if want := c.Gateway.Peers; len(want) > 1 && rng.IntN(8) == 0 { // two peers with one key, of which the tunnels refuse one
			p := *want[0]
			p.PublicKey = want[1].PublicKey
			c.Gateway.Peers = slices.Clone(want)
			c.Gateway.Peers[0] = &p
		}
		g.now.peers = slices.Clone(g.now.peers)
		for i := range g.now.peers {
			p := &g.now.peers[i]
			// As in tick, the tunnels forget the endpoint of a peer that has roamed.
			if g.tunnels[0].Stats()[p.PublicKey].Endpoint.IsValid() && rng.IntN(20) == 0 {
				if err := g.tunnels[0].Change([]datapath.Peer{{State: p.state, Key: p.PublicKey, Endpoint: netip.MustParseAddrPort("198.51.100.1:9")}}, nil); err != nil && g.now.applyErr == nil {
					t.Fatal(err)
				}
				p.forgotten = true
				happened["forgotten"]++
			}
		}
		if c.MTU == 0 && g.now.config.MTU == 0 && remeasure {
			happened["ways"]++
		}

		ref := newChangingLoop(t) // the new gateway; it shares only resolved addresses and measured MTUs
		ref.resolver, ref.mtuTo = g.resolver, mtuTo
		ref.now.mtu, ref.now.peers = g.now.mtu, slices.Clone(g.now.peers)
		for i := range ref.now.peers {
			ref.now.peers[i].state = nil
		}
		checks := g.tunnels[1].checker.Peers()
		ref.tunnels[1].checker.Change(checks, nil)
		for _, e := range []*tunnelEnd{g.tunnels[1], ref.tunnels[1]} {
			states := make(map[string]check.State)
			for _, p := range checks {
				if states[p.ID] = check.Connecting; connected[p.ID] {
					states[p.ID] = check.Connected
				}
			}
			e.setStates(states)
		}
		if rng.IntN(4) == 0 { // the Site changes earlier than the rest, as if a lookup were refused in between
			g.resolver.set(g.now.wantedPeers(), fabric.Site{})
		}
		objects := g.applyConfig(t, c, remeasure)
		wantObjects := ref.applyConfig(t, c, remeasure)
		for _, p := range g.now.peers {
			if p.refused {
				happened["refused"]++
			}
			if p.inUse != 0 {
				happened["in use"]++
			}
		}
		if g.now.applyErr != nil && c.PrivateKey == privates[1] {
			happened["a peer with our key"]++
		}
		if got, want := g.now.applyErr, ref.now.applyErr; (got == nil) != (want == nil) { // for two peers with one key, the error may name either
			t.Fatalf("step %d: not applied: %v; want %v", step, got, want)
		}
		if g.now.applyErr != nil {
			failed++
		} else if got, want := g.lines(t, objects), ref.lines(t, wantObjects); !slices.Equal(got, want) {
			t.Fatalf("step %d: only of the change:\n%s\nonly of all:\n%s", step, linesWithout(got, want), linesWithout(want, got))
		}
		ref.closeTunnels()
		ref.tunnels, ref.resolver = nil, newResolver(nil, func() {}, quiet)
	}
	for _, what := range []string{"forgotten", "ways", "refused", "in use", "a peer with our key"} {
		if happened[what] < 20 {
			t.Errorf("%s: %d times are too few to say anything", what, happened[what])
		}
	}
	if failed < 50 || failed > 450 {
		t.Errorf("%d of 900 configurations could not be applied: too few or too many to say anything", failed)
	}
}

// linesWithout returns the lines of a that are not in b.
func linesWithout(a, b []string) (all []string) {
	for _, s := range a {
		if !slices.Contains(b, s) {
			all = append(all, s+"\n")
		}
	}
	return all
}

// If the rules for peers with new paths are refused, the next comparison measures the paths
// again.
func TestPathMTUsAreMeasuredAgainAfterRulesWereRefused(t *testing.T) {
	for _, remeasure := range []bool{true, false} {
		g := newTestLoop(t, alphaBravo, charlie)
		g.now.config.MTU = 1440
		p := *g.now.peers[1].GatewayPeer
		p.Rules = g.now.peers[0].Rules // the engine refuses the same rules for two peers
		p.Rules.ID = p.ID
		g.now.peers[1].GatewayPeer = &p
		g.now.applyErr = errors.New("of the time before")
		g.reapply(remeasure)
		if g.now.applyErr == nil {
			t.Fatal("the rules are not refused")
		}
		if g.remeasure.Load() != remeasure {
			t.Errorf("ways %v: asked for again: %v", remeasure, !remeasure)
		}
	}
}
