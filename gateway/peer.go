package gateway

import (
	"net/netip"
	"reflect"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// A peer is the control loop's state of one peer. Only the loop creates peers. The loop never
// modifies a peer, but replaces it by a modified copy, because after publish other goroutines read
// the peers. The engine, the tunnels, the connection checks and the resolver have data of their own
// about a peer; a view joins all of it.
type peer struct {
	*fabric.GatewayPeer                  // desired state; replaced when it changes, never modified
	session             session          // in tunnel 0
	further             []session        // in additional tunnels, nil if none; never modified
	at                  netip.AddrPort   // address of its configured endpoint; zero: unknown
	refused             bool             // the resolver gave up the address in use, so no more packets may be sent there
	queried             netip.Addr       // address to which the kernel's path MTU was last queried; zero: none
	kernel              int              // path MTU that this query returned, in octets; 0: no route
	pathInner           int              // largest packet in the tunnel that the kernel's path MTU allows, in octets
	mtu                 int              // largest packet to the peer; less than pathInner if the path silently drops larger ones
	inUse               fabric.TunnelSet // tunnels that carry flows; empty: tunnel 0
	forgotten           bool             // the loop has called Forget for it in the tunnels, so its endpoint must be set again
	preshared           datapath.PresharedKeys
	keyed               time.Time // when the preshared key last changed; zero: never
	rekeyed             time.Time // when a new preshared key last started a handshake
	state               *natengine.PeerState
}

// A session is the control loop's state of a peer's WireGuard session in one tunnel.
type session struct {
	key      [32]byte  // the peer's public key; set only for additional tunnels
	since    time.Time // when the peer was configured
	received uint64
	heard    time.Time // when received last increased
	down     bool
	asserted time.Time      // when the loop last reset the endpoint to the configured one
	stats    datapath.Stats // at the last update
}

// updatedFrom returns the session, updated from stats. Both now and the time of the handshake have
// monotonic clock readings, so a step of the wall clock does not change an age. down depends on the
// age of the handshake and not on heard, because WireGuard accepts no messages of a session older
// than check.SessionGone.
func (s session) updatedFrom(stats datapath.Stats, now time.Time) session {
	s.stats = stats
	if stats.Received != s.received {
		s.received, s.heard = stats.Received, now
	}
	if stats.Handshake.IsZero() {
		s.down = now.Sub(s.since) > sessionFirst
	} else {
		s.down = now.Sub(stats.Handshake) > check.SessionGone
	}
	return s
}

// sessions yields the sessions in all tunnels, in order.
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

// down reports whether the peer has had no session in any tunnel for some time.
func (p *peer) down() bool {
	for _, s := range p.sessions {
		if !s.down {
			return false
		}
	}
	return true
}

// lastHeard returns the time when an authenticated message last came from the peer in any tunnel,
// or zero if none came.
func (p *peer) lastHeard() (last time.Time) {
	for _, s := range p.sessions {
		if s.heard.After(last) {
			last = s.heard
		}
	}
	return last
}

// updateSessions updates the sessions of the peer. stats holds, for each tunnel, the stats by
// public key.
func (p *peer) updateSessions(stats []map[[32]byte]datapath.Stats, now time.Time) {
	p.session = p.session.updatedFrom(stats[0][p.PublicKey], now)
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
		p.further[i] = s.updatedFrom(stats[i+1][key], now)
	}
}

// wantedPeers returns the desired state of all peers. The caller owns the slice.
func (c current) wantedPeers() []*fabric.GatewayPeer {
	all := make([]*fabric.GatewayPeer, len(c.peers))
	for i, p := range c.peers {
		all[i] = p.GatewayPeer
	}
	return all
}

// A survey is the new state of all peers, with the differences from the state in force. For a
// peer that has not changed, computing these takes one comparison.
type survey struct {
	peers   []peer // sorted by ID
	tunnel  int    // MTU of the tunnel, octets
	all     bool   // apply everything again, changed or not
	ruled   []int  // indexes of peers whose rules for the engine have changed
	other   []int  // indexes of peers that have changed for tunnels and connection checks
	removed []peer // removed peers, in their last state
	routed  bool   // the routes to the tunnels have changed
}

// survey determines the address of each peer and the MTU towards it, and compares the result with
// the state in force. At the start, after a failure and after a change of the private key,
// everything counts as changed. remeasure makes measure query the route to every peer.
func (l *loop) survey(c Config, want []*fabric.GatewayPeer, remeasure bool) survey {
	all := l.now.generation == 0 || l.now.applyErr != nil || c.PrivateKey != l.now.config.PrivateKey || c.NextKey != l.now.config.NextKey
	s := survey{peers: make([]peer, len(want)), all: all}
	now, old := time.Now(), l.now.peers
	before := make([]int, len(want)) // index of the peer in old; -1: a new peer
	j := 0
	for i, w := range want {
		for ; j < len(old) && old[j].ID < w.ID; j++ {
			s.removed = append(s.removed, old[j])
		}
		p := &s.peers[i]
		if before[i] = -1; j < len(old) && old[j].ID == w.ID {
			*p, before[i] = old[j], j
			j++
		}
		if p.GatewayPeer == nil || p.PublicKey != w.PublicKey {
			p.session = session{since: now}
		}
		p.GatewayPeer, p.inUse, p.forgotten = w, l.workingTunnels(w.ID, now), false
		p.preshared = c.Preshared[w.ID]
	}
	s.removed = append(s.removed, old[j:]...)
	l.resolver.locate(s.peers)
	s.tunnel = l.measure(c, s.peers, remeasure || all)
	s.routed = all || len(s.removed) > 0 || s.tunnel != l.now.mtu
	for i := range s.peers {
		p, was := &s.peers[i], peer{}
		if before[i] >= 0 {
			was = old[before[i]]
		}
		same := was.GatewayPeer == p.GatewayPeer
		if p.mtu != was.mtu || !same && (was.GatewayPeer == nil || !reflect.DeepEqual(p.Rules, was.Rules)) {
			s.ruled = append(s.ruled, i)
		}
		if p.preshared.Key != was.preshared.Key && was.state != nil {
			p.keyed = now
		}
		if all || !same || p.at != was.at || p.refused != was.refused || p.pathInner != was.pathInner || p.preshared != was.preshared || was.forgotten {
			s.other = append(s.other, i)
		}
		s.routed = s.routed || p.inUse != was.inUse || !same && (was.GatewayPeer == nil || p.AllowedIPs != was.AllowedIPs || p.Local != was.Local || p.Origin != was.Origin)
		if was.mtu != 0 && p.mtu != was.mtu {
			l.log.Info("MTU towards a peer changed", "peer", p.ID, "from", was.mtu, "to", p.mtu)
		}
	}
	return s
}

// setRules passes the rules of a survey to the engine.
func (l *loop) setRules(s *survey) error {
	rules := func(i int) natengine.Peer { return rulesFor(s.peers[i].GatewayPeer, s.peers[i].mtu) }
	if s.all {
		all := make([]natengine.Peer, len(s.peers))
		for i := range all {
			all[i] = rules(i)
		}
		if err := l.engine.SetPeers(all); err != nil {
			return err
		}
	} else if len(s.ruled)+len(s.removed) > 0 {
		changed, removed := make([]natengine.Peer, len(s.ruled)), make([]string, len(s.removed))
		for i, at := range s.ruled {
			changed[i] = rules(at)
		}
		for i := range s.removed {
			removed[i] = s.removed[i].ID
		}
		if err := l.engine.Change(changed, removed); err != nil {
			return err
		}
	}
	for i := range s.peers {
		if p := &s.peers[i]; p.state == nil {
			p.state = l.engine.Peer(p.ID)
		}
	}
	return nil
}

// A view joins a peer with the current data of the engine, tunnels, connection checks and
// resolver. Status and metrics are made from views.
type view struct {
	*peer
	tunnels    []tunnelView // all tunnels to the peer, in order
	nat        natengine.PeerStats
	translated bool           // nat is valid; false if the engine has already deleted the peer
	resolved   netip.AddrPort // address of the configured endpoint
	unresolved error          // reason why resolved is missing or outdated; nil if it is up to date
	alone      bool           // every other peer is connected
}

// A tunnelView is the current state of one tunnel to a peer.
type tunnelView struct {
	key   [32]byte // the peer's public key
	check check.Result
	stats datapath.Stats
	inUse bool // it carries a share of the flows
}

// primary returns the first tunnel that carries flows. Its state is shown as the state of the peer.
func (v *view) primary() *tunnelView {
	for i := range v.tunnels {
		if v.tunnels[i].inUse {
			return &v.tunnels[i]
		}
	}
	return &v.tunnels[0]
}

// presharedID returns the ID of the preshared key that protects all sessions with the peer. It is
// empty if a session has no preshared key, if the sessions' keys differ, or if there is no
// session.
func (v *view) presharedID() (id string) {
	for _, e := range v.tunnels {
		switch current := e.stats.PresharedID; {
		// A tunnel without a session does not count: a firewall may block it.
		case e.stats.Handshake.IsZero() || time.Since(e.stats.Handshake) > check.SessionGone:
		case current == "" || id != "" && current != id:
			return ""
		default:
			id = current
		}
	}
	return id
}

// lags reports whether the peer does not use our next key yet: a session uses an older key, or
// there is no session. next has our next key for each tunnel.
func (v *view) lags(next [][32]byte) bool {
	moved := false
	for i, e := range v.tunnels {
		switch {
		// A tunnel without a session does not count: a firewall may block it.
		case e.stats.Handshake.IsZero() || time.Since(e.stats.Handshake) > check.SessionGone:
		case e.stats.Own != next[i]:
			return true
		default:
			moved = true
		}
	}
	return !moved
}

// octets returns the octets of WireGuard messages exchanged with the peer, in all tunnels.
func (v *view) octets() (received, sent uint64) {
	for _, e := range v.tunnels {
		received += e.stats.Received
		sent += e.stats.Sent
	}
	return received, sent
}

// views returns a view of each peer in the state now, in the same order. stats are the engine's
// statistics.
func (g *gateway) views(now current, stats natengine.Stats) []view {
	views, at := make([]view, len(now.peers)), make(map[string]int, len(now.peers))
	for i := range now.peers {
		p := &now.peers[i]
		v := view{peer: p, tunnels: make([]tunnelView, 0, 1+len(p.Tunnels))}
		v.resolved, v.unresolved = g.resolver.endpoint(p.ID)
		views[i], at[p.ID] = v, i
	}
	for i, e := range g.tunnels {
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
		if views[i].primary().check.State != check.Connected {
			lost++
		}
	}
	for i := range views {
		views[i].alone = lost == 0 || lost == 1 && views[i].primary().check.State != check.Connected
	}
	for _, s := range stats.Peers {
		if i, ok := at[s.ID]; ok {
			views[i].nat, views[i].translated = s, true
		}
	}
	return views
}
