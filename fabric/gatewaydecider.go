package fabric

import (
	"cmp"
	"slices"
)

// A GatewayDecider computes the result of GatewayFor for successive Intents. While no two peers
// conflict, it computes only the peers that have changed since the last Intent. The zero value is
// ready. Only one goroutine may use it, and callers must not modify the result.
type GatewayDecider struct {
	in     Intent // the last Intent, without Peers
	kept   keeper
	peers  map[string]*decidedPeer // by peer ID; nil: there was no Intent yet, or two of its peers conflict
	gw     Gateway
	faulty int    // number of peers with Problems
	intent uint64 // number of the last Intent, from 1
}

// A decidedPeer is the cached decision about a peer that conflicts with no other peer.
type decidedPeer struct {
	peer     Peer
	kept     bool
	problems []Problem
	intent   uint64 // number of the last Intent that contained the peer
}

// GatewayFor is a faster form of the function GatewayFor.
func (d *GatewayDecider) GatewayFor(in Intent) (Gateway, []Problem) {
	peers := in.Peers
	in.Peers = nil
	if d.peers == nil || in.ClusterID != d.in.ClusterID || in.PublicKey != d.in.PublicKey || !slices.Equal(in.FurtherKeys, d.in.FurtherKeys) {
		d.peers, d.kept, d.gw, d.faulty, d.in = make(map[string]*decidedPeer, len(peers)), newKeeper(in), Gateway{}, 0, in
		d.gw.Site = d.kept.site(in.Site)
	}
	if !d.decide(peers, in.Site) {
		d.peers = nil
		in.Peers = peers
		return GatewayFor(in)
	}
	d.in = in
	d.gw.ClusterID, d.gw.ClusterName, d.gw.Waiting = in.ClusterID, in.ClusterName, sortedWaiting(in.Waiting)
	var problems []Problem
	if d.faulty > 0 {
		for _, p := range d.peers {
			problems = append(problems, p.problems...)
		}
	}
	return d.gw, SortProblems(problems)
}

// decide applies new peers and a new Site to the result. It returns false if two peers conflict;
// the result is then invalid.
func (d *GatewayDecider) decide(peers []Peer, site Site) bool {
	d.intent++
	var changed []*Peer
	for i := range peers {
		p := &peers[i]
		was := d.peers[p.ID]
		if was == nil {
			was = new(decidedPeer)
			d.peers[p.ID] = was
		}
		if was.intent == d.intent {
			return false
		}
		if fresh := was.intent == 0; fresh || !was.peer.equal(p) {
			changed = append(changed, p)
		}
		was.intent = d.intent
	}
	var removed []*decidedPeer
	if len(d.peers) > len(peers) {
		for id, p := range d.peers {
			if p.intent != d.intent {
				removed = append(removed, p)
				delete(d.peers, id)
			}
		}
	}
	if len(changed)+len(removed) == 0 {
		if !site.Equal(d.in.Site) {
			d.gw.Site = d.kept.site(site)
		}
		return true
	}
	networks := false // whether networks of peers have changed
	out := make(map[string]bool, len(changed)+len(removed))
	forget := func(p *decidedPeer) {
		if len(p.problems) > 0 {
			d.faulty--
		}
		if p.kept {
			out[p.peer.ID] = true
			d.kept.drop(&p.peer)
		}
	}
	for _, p := range removed {
		forget(p)
		networks = networks || p.kept
	}
	for _, p := range changed { // all drops come before all checks, because a network may move from one peer to another
		forget(d.peers[p.ID])
	}
	var in []*GatewayPeer
	for _, now := range changed {
		p := d.peers[now.ID]
		before := *p
		p.peer, p.kept = *now, false
		if p.problems = p.peer.check(placesInTunnelEndpoint(p.peer.Origin)); len(p.problems) == 0 {
			if len(d.kept.check(&p.peer)) > 0 {
				return false
			}
			d.kept.keep(&p.peer)
			p.kept = true
			endpoints, problems := endpointsFor(&p.peer)
			p.problems = problems
			in = append(in, gatewayPeer(&p.peer, endpoints))
		}
		if len(p.problems) > 0 {
			d.faulty++
		}
		networks = networks || p.kept != before.kept || p.peer.Local != before.peer.Local || p.peer.Remote != before.peer.Remote
	}
	d.gw.Peers = merged(d.gw.Peers, out, in)
	if networks || !site.Equal(d.in.Site) {
		d.gw.Site = d.kept.site(site)
	}
	return true
}

// equal reports whether all fields of p and q are equal.
func (p *Peer) equal(q *Peer) bool {
	return p.ID == q.ID && p.Name == q.Name && p.Local == q.Local && p.Remote == q.Remote && p.Endpoint == q.Endpoint && p.Port == q.Port && p.InBand == q.InBand && p.InBandLeaving == q.InBandLeaving &&
		p.PublicKey == q.PublicKey && slices.Equal(p.Tunnels, q.Tunnels) && slices.Equal(p.Mappings, q.Mappings) &&
		p.Origin == q.Origin && p.MappingsOrigin == q.MappingsOrigin && p.Created == q.Created
}

// merged returns a copy of peers, sorted by ID. The copy lacks the peers whose IDs are in removed,
// and has the peers in added.
func merged(peers []*GatewayPeer, removed map[string]bool, added []*GatewayPeer) []*GatewayPeer {
	all := slices.Grow([]*GatewayPeer(nil), len(peers)-len(removed)+len(added))
	slices.SortFunc(added, func(a, b *GatewayPeer) int { return cmp.Compare(a.ID, b.ID) })
	for _, p := range peers {
		if removed[p.ID] {
			continue
		}
		for len(added) > 0 && added[0].ID < p.ID {
			all, added = append(all, added[0]), added[1:]
		}
		all = append(all, p)
	}
	return append(all, added...)
}
