package gateway

import (
	"net/netip"
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
	*fabric.GatewayPeer                  // as it should be, with MTU and MSS in its rules; never modified
	session             session          // in the first tunnel, as seen from outside
	way                 int              // largest packet that fits the way to it, by what the kernel knows, octets
	mtu                 int              // largest packet towards it: less where the path drops such packets
	inUse               fabric.TunnelSet // further tunnels that carry flows
	state               *natengine.PeerState
}

// session is what a peer's WireGuard session looks like from outside.
type session struct {
	since    time.Time // configured
	received uint64
	heard    time.Time // when received last grew
	down     bool
	asserted time.Time      // when its endpoint was last set again
	stats    datapath.Stats // at the last look
}

// after is the session a moment later.
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

// byID are the peers by their cluster ID.
func byID(peers []peer) map[string]*peer {
	all := make(map[string]*peer, len(peers))
	for i := range peers {
		all[peers[i].ID] = &peers[i]
	}
	return all
}

// wanted are the peers as they should be. The slice is the caller's.
func (c current) wanted() []fabric.GatewayPeer {
	all := make([]fabric.GatewayPeer, len(c.peers))
	for i, p := range c.peers {
		all[i] = *p.GatewayPeer
	}
	return all
}

// view is a peer with what those beside the loop know of it now. Status and metrics are made of it.
type view struct {
	*peer
	tunnels    []tunnelView // of the tunnels to it, the first one first
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
		tunnel, checks := e.Stats(), e.checker.results()
		for k := range views {
			v := &views[k]
			if theirs, ok := theirEnd(v.GatewayPeer, i); ok {
				v.tunnels = append(v.tunnels, tunnelView{theirs.PublicKey, checks[v.ID], tunnel[theirs.PublicKey], i == 0 || v.inUse.Has(i)})
			}
		}
	}
	lost := 0
	for i := range views {
		if views[i].tunnels[0].check.State != Connected {
			lost++
		}
	}
	for i := range views {
		views[i].alone = lost == 0 || lost == 1 && views[i].tunnels[0].check.State != Connected
	}
	for _, s := range stats.Peers {
		if i, ok := at[s.ID]; ok {
			views[i].nat, views[i].translated = s, true
		}
	}
	return views
}
