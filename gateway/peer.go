package gateway

import (
	"net/netip"
	"reflect"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// A peer is what the control loop knows of one peer. The loop alone makes and replaces it, as a
// value; what is published in current is never modified. What runs beside the loop keeps its own
// account of a peer and is asked for it by view: the engine, the ends of the tunnels, the
// connection checks, the resolver.
type peer struct {
	*fabric.GatewayPeer                  // as it should be; never modified, and another one when something of it changes
	session             session          // in the first tunnel, as seen from outside
	further             []session        // in the further ones; never modified, and nil for a peer with one tunnel
	at                  netip.AddrPort   // where it is configured to be; zero: not known
	refused             bool             // it must not be sent to where it was before
	asked               netip.Addr       // of which the kernel was asked how large packets may be; zero: of none
	kernel              int              // what it said: MTU of the way, octets; 0: there is none
	way                 int              // largest packet that fits the way to it, by what the kernel knows, octets
	mtu                 int              // largest packet towards it: less where the path drops such packets
	inUse               fabric.TunnelSet // tunnels that carry flows; empty: the first one
	forgotten           bool             // the tunnels have to be told where it is again
	preshared           datapath.PresharedKeys
	keyed               time.Time // when it got another one; zero: it has had this one from the start
	rekeyed             time.Time // when a handshake was last begun for that
	state               *natengine.PeerState
}

// session is what a peer's WireGuard session looks like from outside.
type session struct {
	key      [32]byte  // the peer's, of a further tunnel
	since    time.Time // configured
	received uint64
	heard    time.Time // when received last grew
	down     bool
	asserted time.Time      // when its endpoint was last set again
	stats    datapath.Stats // at the last look
}

// after returns the session a moment later. Both now and the handshake have monotonic clock readings, so a
// step of the wall clock changes no age. A peer that is heard is not down, because no message is accepted
// under a session of that age.
func (s session) after(stats datapath.Stats, now time.Time) session {
	s.stats = stats
	if stats.Received != s.received {
		s.received, s.heard = stats.Received, now
	}
	if stats.Handshake.IsZero() {
		s.down = now.Sub(s.since) > sessionFirst
	} else {
		s.down = now.Sub(stats.Handshake) > sessionGone
	}
	return s
}

// sessions returns the sessions in all tunnels, that in the first one first.
func (p *peer) sessions(yield func(tunnel int, s *session) bool) {
	if !yield(0, &p.session) {
		return
	}
	for i := range p.further {
		if !yield(i+1, &p.further[i]) {
			return
		}
	}
}

// down reports whether the peer has had no session for long, in any tunnel.
func (p *peer) down() bool {
	for _, s := range p.sessions {
		if !s.down {
			return false
		}
	}
	return true
}

// heard returns when something authentic last came from the peer, in any tunnel; zero: never.
func (p *peer) heard() (last time.Time) {
	for _, s := range p.sessions {
		if s.heard.After(last) {
			last = s.heard
		}
	}
	return last
}

// look updates the sessions by the stats of each tunnel.
func (p *peer) look(stats []map[[32]byte]datapath.Stats, now time.Time) {
	p.session = p.session.after(stats[0][p.PublicKey], now)
	if len(p.Tunnels) == 0 {
		p.further = nil
		return
	}
	was := p.further
	p.further = make([]session, len(p.Tunnels))
	for i := range p.further {
		key := p.Tunnels[i].PublicKey
		s := session{key: key, since: now}
		if i < len(was) && was[i].key == key {
			s = was[i]
		}
		p.further[i] = s.after(stats[i+1][key], now)
	}
}

// wanted are the peers as they should be. The slice is the caller's.
func (c current) wanted() []*fabric.GatewayPeer {
	all := make([]*fabric.GatewayPeer, len(c.peers))
	for i, p := range c.peers {
		all[i] = p.GatewayPeer
	}
	return all
}

// A survey is what there should be, beside what is in force, and what of it is different. What nobody
// changed costs a comparison.
type survey struct {
	peers  []peer // sorted by ID
	tunnel int    // MTU of the tunnel, octets
	all    bool   // whatever is the same is to be made true again, too
	ruled  []int  // peers with other rules for the engine
	other  []int  // peers of which tunnels and connection checks have to know something else
	gone   []peer // as they were
	routed bool   // other networks lead to other tunnels
}

// survey looks where peers are and how large packets to them may be, see measure, and compares. At the
// start, after a failure and with another key, nothing is taken to be as it was.
func (g *gateway) survey(c Config, want []*fabric.GatewayPeer, ways bool) survey {
	all := g.now.generation == 0 || g.now.applyErr != nil || c.PrivateKey != g.now.config.PrivateKey || c.NextKey != g.now.config.NextKey
	s := survey{peers: make([]peer, len(want)), all: all}
	now, old := time.Now(), g.now.peers
	before := make([]int, len(want)) // where they are in old, -1: nowhere
	j := 0
	for i, w := range want {
		for ; j < len(old) && old[j].ID < w.ID; j++ {
			s.gone = append(s.gone, old[j])
		}
		p := &s.peers[i]
		if before[i] = -1; j < len(old) && old[j].ID == w.ID {
			*p, before[i] = old[j], j
			j++
		}
		if p.GatewayPeer == nil || p.PublicKey != w.PublicKey {
			p.session = session{since: now}
		}
		p.GatewayPeer, p.inUse, p.forgotten = w, g.working(w.ID, now), false
		p.preshared = c.Preshared[w.ID]
	}
	s.gone = append(s.gone, old[j:]...)
	g.resolver.locate(s.peers)
	s.tunnel = g.measure(c, s.peers, ways || all)
	s.routed = all || len(s.gone) > 0 || s.tunnel != g.now.mtu
	for i := range s.peers {
		p, was := &s.peers[i], peer{}
		if before[i] >= 0 {
			was = old[before[i]]
		}
		is := was.GatewayPeer == p.GatewayPeer
		if p.mtu != was.mtu || !is && (was.GatewayPeer == nil || !reflect.DeepEqual(p.Rules, was.Rules)) {
			s.ruled = append(s.ruled, i)
		}
		if p.preshared.Key != was.preshared.Key && was.state != nil {
			p.keyed = now
		}
		if all || !is || p.at != was.at || p.refused != was.refused || p.way != was.way || p.preshared != was.preshared || was.forgotten {
			s.other = append(s.other, i)
		}
		s.routed = s.routed || p.inUse != was.inUse || !is && (was.GatewayPeer == nil || p.AllowedIPs != was.AllowedIPs || p.Local != was.Local || p.Origin != was.Origin)
		if was.mtu != 0 && p.mtu != was.mtu {
			g.log.Info("MTU towards a peer changed", "peer", p.ID, "from", was.mtu, "to", p.mtu)
		}
	}
	return s
}

// setRules gives the engine the rules of a survey.
func (g *gateway) setRules(s *survey) error {
	rules := func(i int) natengine.Peer { return rulesFor(s.peers[i].GatewayPeer, s.peers[i].mtu) }
	if s.all {
		all := make([]natengine.Peer, len(s.peers))
		for i := range all {
			all[i] = rules(i)
		}
		if err := g.engine.SetPeers(all); err != nil {
			return err
		}
	} else if len(s.ruled)+len(s.gone) > 0 {
		changed, gone := make([]natengine.Peer, len(s.ruled)), make([]string, len(s.gone))
		for i, at := range s.ruled {
			changed[i] = rules(at)
		}
		for i := range s.gone {
			gone[i] = s.gone[i].ID
		}
		if err := g.engine.Change(changed, gone); err != nil {
			return err
		}
	}
	for i := range s.peers {
		if p := &s.peers[i]; p.state == nil {
			p.state = g.engine.Peer(p.ID)
		}
	}
	return nil
}

// view is a peer with what those beside the loop know of it now. Status and metrics are made of it.
type view struct {
	*peer
	tunnels    []tunnelView // to it, in order
	nat        natengine.PeerStats
	translated bool           // nat is known: the engine is the first to forget a peer that is removed
	resolved   netip.AddrPort // address of the configured endpoint
	unresolved error          // why there is none, or an old one
	alone      bool           // no other peer is without an answer
}

// tunnelView is one tunnel to a peer.
type tunnelView struct {
	key   [32]byte // the peer's
	check CheckResult
	stats datapath.Stats
	inUse bool // the kernel gives it its share of the flows
}

// leading returns the tunnel by which the peer is described: the first one that carries flows.
func (v *view) leading() *tunnelView {
	for i := range v.tunnels {
		if v.tunnels[i].inUse {
			return &v.tunnels[i]
		}
	}
	return &v.tunnels[0]
}

// presharedID is the ID of the preshared key that protects all sessions with the peer; empty: one has none, or there are no
// sessions.
func (v *view) presharedID() (id string) {
	for _, e := range v.tunnels {
		switch of := e.stats.PresharedID; {
		case e.stats.Handshake.IsZero() || time.Since(e.stats.Handshake) > sessionGone: // a tunnel that a firewall blocks
		case of == "" || id != "" && of != id:
			return ""
		default:
			id = of
		}
	}
	return id
}

// lags reports whether the peer has no session with the next key, in a tunnel that has any session.
func (v *view) lags(next [][32]byte) bool {
	moved := false
	for i, e := range v.tunnels {
		switch {
		case e.stats.Handshake.IsZero() || time.Since(e.stats.Handshake) > sessionGone: // a tunnel that a firewall blocks
		case e.stats.Own != next[i]:
			return true
		default:
			moved = true
		}
	}
	return !moved
}

// octets are those of WireGuard messages in all tunnels.
func (v *view) octets() (received, sent uint64) {
	for _, e := range v.tunnels {
		received += e.stats.Received
		sent += e.stats.Sent
	}
	return received, sent
}

// views looks at the peers of now. stats are the engine's.
func (g *gateway) views(now current, stats natengine.Stats) []view {
	views, at := make([]view, len(now.peers)), make(map[string]int, len(now.peers))
	for i := range now.peers {
		p := &now.peers[i]
		v := view{peer: p, tunnels: make([]tunnelView, 0, 1+len(p.Tunnels))}
		v.resolved, v.unresolved = g.resolver.endpoint(p.ID)
		views[i], at[p.ID] = v, i
	}
	for i, e := range g.ends {
		tunnel := e.Stats()
		for k := range views {
			v := &views[k]
			if theirs, ok := theirEnd(v.GatewayPeer, i); ok {
				v.tunnels = append(v.tunnels, tunnelView{theirs.PublicKey, e.observe(v.ID), tunnel[theirs.PublicKey], v.inUse.Has(i) || i == 0 && v.inUse == 0})
			}
		}
	}
	lost := 0
	for i := range views {
		if views[i].leading().check.State != Connected {
			lost++
		}
	}
	for i := range views {
		views[i].alone = lost == 0 || lost == 1 && views[i].leading().check.State != Connected
	}
	for _, s := range stats.Peers {
		if i, ok := at[s.ID]; ok {
			views[i].nat, views[i].translated = s, true
		}
	}
	return views
}
