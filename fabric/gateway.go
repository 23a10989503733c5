package fabric

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/natengine"
)

// Gateway is the complete desired state of a gateway: a peer that is not in Peers must be removed.
// GatewayFor makes it. It is read-only.
type Gateway struct {
	ClusterID, ClusterName string         // our own cluster, for display
	Peers                  []*GatewayPeer // sorted by ID
	Waiting                []Waiting      // mappings without a peer, sorted; only for display
	Site                   Site           // includes our networks and the networks of all peers: the gateway of a peer cannot be inside one of these
}

// GatewayPeer is the configuration of a gateway for one peer.
type GatewayPeer struct {
	ID, Name  string
	Local     Networks // our networks, and the networks that the peer uses for them
	Remote    Networks // the peer's networks, and the networks that we use for them
	PublicKey [32]byte
	Endpoint  string // IP address or DNS name
	Port      uint16
	Tunnels   []TunnelEnd // additional tunnels, which share all other fields; nil if none

	// If InBand is true, the peer's gateway can reach our API server, and our manager can reach the
	// peer's API server.
	InBand bool
	// If InBandLeaving is true, only our manager can use InBand, because the peering is ending.
	InBandLeaving bool

	// AllowedIPs are exactly Pb@A and Xb@A, in this order (docs/liqo-v0.md, section 6.2). They
	// overlap with no AllowedIPs of another peer.
	AllowedIPs [2]netip.Prefix

	// Rules are the peer's rules for the NAT engine. The gateway adds MTU and MSS, which depend on
	// the path to the peer. natengine.Engine.SetPeers accepts the rules of all peers of one Gateway
	// together.
	Rules natengine.Peer

	// Probe is the destination of the connection check's PINGs: the first host of Xb@A, UDP port
	// 12345 (docs/liqo-v0.md, section 8).
	Probe netip.AddrPort

	Origin Origin // the object from which this peer was read
}

// GatewayFor computes the desired state of the gateway. Problems are sorted.
//
// A peer is refused if it is invalid or conflicts with an accepted peer. Peers conflict if they
// have the same cluster ID or the same public key. They also conflict if a network of one peer, as
// we see it, overlaps a network of the other peer or one of our own networks in the TunnelEndpoint
// of the other peer. Our own networks can differ between peers during a change, because each peer
// answers the change separately. Of two conflicting peers, GatewayFor accepts the older one. If
// both are equally old, GatewayFor accepts the one whose ID sorts first, or, if the IDs are equal,
// whose origin sorts first. If a mapping is invalid, GatewayFor omits only that mapping, so that
// the peer's pods stay connected.
//
// The gateway's own address is always mapped to the first host of Xa@B, with or without a
// NatMapping for it: the peer sends its connection check there and nowhere else. A NatMapping may
// map 169.254.0.1 to another address if it is left from an earlier peering. GatewayFor refuses such
// an entry, because the peer's check would get no answer.
func GatewayFor(in Intent) (Gateway, []Problem) {
	var (
		gw       = Gateway{ClusterID: in.ClusterID, ClusterName: in.ClusterName}
		problems []Problem
		kept     = newKeeper(in)
	)
	peers := slices.Clone(in.Peers)
	slices.SortFunc(peers, byAge)
	for i := range peers {
		p := &peers[i]
		wrong := p.check(placesInTunnelEndpoint(p.Origin))
		if len(wrong) == 0 {
			wrong = kept.check(p)
		}
		if len(wrong) > 0 {
			problems = append(problems, wrong...)
			continue
		}
		kept.keep(p)
		endpoints, wrong := endpointsFor(p)
		problems = append(problems, wrong...)
		gw.Peers = append(gw.Peers, gatewayPeer(p, endpoints))
	}
	slices.SortFunc(gw.Peers, func(a, b *GatewayPeer) int { return cmp.Compare(a.ID, b.ID) })
	gw.Site, gw.Waiting = kept.site(in.Site), sortedWaiting(in.Waiting)
	return gw, SortProblems(problems)
}

func sortedWaiting(all []Waiting) []Waiting {
	return slices.SortedFunc(slices.Values(all), func(a, b Waiting) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), a.Origin.compare(b.Origin))
	})
}

func gatewayPeer(p *Peer, endpoints []natengine.Endpoint) *GatewayPeer {
	return &GatewayPeer{
		ID:        p.ID,
		Name:      p.Name,
		Local:     p.Local,
		Remote:    p.Remote,
		PublicKey: p.PublicKey,
		Endpoint:  p.Endpoint,
		Port:      p.Port,
		Tunnels:   slices.Clone(p.Tunnels),
		InBand:    p.InBand, InBandLeaving: p.InBandLeaving,
		AllowedIPs: [2]netip.Prefix{p.Remote.PodSeen, p.Remote.ExternalSeen},
		Rules: natengine.Peer{
			ID:             p.ID,
			RemotePods:     []netip.Prefix{p.Remote.PodSeen},
			RemoteExternal: []netip.Prefix{p.Remote.ExternalSeen},
			Pods:           []natengine.Remap{{From: p.Local.Pod, To: p.Local.PodSeen}},
			External:       []netip.Prefix{p.Local.ExternalSeen},
			Endpoints:      endpoints,
			Gateway:        FirstHost(p.Remote.ExternalSeen),
		},
		Probe:  netip.AddrPortFrom(FirstHost(p.Remote.ExternalSeen), ProbePort),
		Origin: p.Origin,
	}
}

// byAge defines the order of peers: of two conflicting peers, GatewayFor accepts the first one.
// Only identical peers are equal in this order.
func byAge(a, b Peer) int {
	order := cmp.Or(
		cmp.Compare(a.Created, b.Created), // 0 (unknown) counts as oldest: the object was written by hand
		cmp.Compare(a.ID, b.ID),
		a.Origin.compare(b.Origin),
	)
	if order == 0 { // the same object twice, perhaps with different contents
		order = cmp.Compare(fmt.Sprintf("%+v", a), fmt.Sprintf("%+v", b))
	}
	return order
}

// endpointsFor returns the engine's endpoints for a peer, sorted by the address that the peer sees:
// the endpoints in the peer's mappings, and the gateway's own address.
func endpointsFor(p *Peer) ([]natengine.Endpoint, []Problem) {
	var (
		r        = report{origin: p.MappingsOrigin}
		external = p.Local.ExternalSeen
		self     = Mapping{gatewayAddrFor(external), FirstHost(external)}
		real     = make(map[netip.Addr]int, len(p.Mappings))
		seen     = make(map[netip.Addr]int, len(p.Mappings))
	)
	mappings := slices.SortedFunc(slices.Values(p.Mappings), Mapping.compare)
	mappings = slices.Compact(mappings)
	for _, m := range mappings {
		real[m.Real]++
		seen[m.Seen]++
	}
	endpoints := make([]natengine.Endpoint, 0, len(mappings)+1)
	endpoints = append(endpoints, natengine.Endpoint{Real: self.Real, Seen: self.Seen})
	for _, m := range mappings {
		field := "spec.clusterMappings[" + quote(m.Real.String()) + "]"
		switch {
		case m == self:
			// endpoints already contains the gateway's own address
		case !m.Real.IsValid() || !m.Seen.IsValid():
			r.add(field, "has no address; want an endpoint and the address at which cluster %s sees it", quote(p.ID))
		case !external.Contains(m.Seen):
			r.add(field, "%v is outside %v, our ExternalCIDR as cluster %s sees it (%s); want an address inside", m.Seen, external, quote(p.ID), p.Origin)
		case m.Real.Is4() != m.Seen.Is4():
			r.add(field, "%v and %v are of different families; want addresses of one family", m.Real, m.Seen)
		case m.Real == self.Real:
			r.add(field, "%v is not the address of the connection check of cluster %s; want %v, the first host of %v", m.Seen, quote(p.ID), self.Seen, external)
		case m.Seen == self.Seen:
			r.add(field, "%v is the gateway's own address, the first host of %v; want another address", m.Seen, external)
		case checkReal(m.Real) != "":
			r.add(field, "%s", checkReal(m.Real))
		case seen[m.Seen] > 1:
			r.add(field, "%v is mapped to %d endpoints; want an address for each", m.Seen, seen[m.Seen])
		case real[m.Real] > 1:
			r.add(field, "has %d addresses, one of them %v; want one address for each endpoint", real[m.Real], m.Seen)
		default:
			endpoints = append(endpoints, natengine.Endpoint{Real: m.Real, Seen: m.Seen})
		}
	}
	slices.SortFunc(endpoints, func(a, b natengine.Endpoint) int { return a.Seen.Compare(b.Seen) })
	return endpoints, r.problems
}

// A keeper holds the accepted peers, and finds conflicts of other peers with them.
type keeper struct {
	id        string        // our own cluster ID
	own       [][32]byte    // our own public keys
	local     []*ownNetwork // our own networks, sorted; there are more than two only while our networks change
	ids       map[string]*Peer
	keys      map[[32]byte]*Peer // of all tunnels
	nets      []*peerNetwork     // disjoint, sorted by address
	endpoints []*peerEndpoint    // sorted by address; peers behind the same NAT share an address
}

func newKeeper(in Intent) keeper {
	return keeper{id: in.ClusterID, own: append([][32]byte{in.PublicKey}, in.FurtherKeys...), ids: map[string]*Peer{}, keys: map[[32]byte]*Peer{}}
}

// An ownNetwork is our PodCIDR or ExternalCIDR according to the TunnelEndpoint of at least one
// peer.
type ownNetwork struct {
	prefix netip.Prefix
	pods   bool
	peers  int   // number of peers with this network
	peer   *Peer // the first of these peers
}

func ownNetworksOf(p *Peer) [2]ownNetwork {
	return [2]ownNetwork{{p.Local.Pod, true, 1, p}, {p.Local.External, false, 1, p}}
}

func (l *ownNetwork) compare(m ownNetwork) int {
	switch order := l.prefix.Compare(m.prefix); {
	case order != 0 || l.pods == m.pods:
		return order
	case l.pods:
		return -1
	}
	return 1
}

// name returns the description of l in a Site.
func (l *ownNetwork) name() string {
	if l.pods {
		return "our PodCIDR"
	}
	return "our ExternalCIDR"
}

// A peerEndpoint is the endpoint of a peer's gateway. If the endpoint is a DNS name, the peer has
// no peerEndpoint.
type peerEndpoint struct {
	addr netip.Addr
	peer *Peer
}

// A peerNetwork is a network that we use for a peer.
type peerNetwork struct {
	prefix netip.Prefix
	field  string
	peer   *Peer
}

func (k *keeper) keep(p *Peer) {
	for _, l := range ownNetworksOf(p) {
		if at, has := slices.BinarySearchFunc(k.local, l, (*ownNetwork).compare); has {
			k.local[at].peers++
		} else {
			k.local = slices.Insert(k.local, at, &l)
		}
	}
	k.ids[p.ID] = p
	for _, t := range allTunnels(p.PublicKey, p.Port, p.Tunnels) {
		k.keys[t.PublicKey] = p
	}
	_, _, pod, external := p.pairs(placesInTunnelEndpoint(p.Origin))
	for _, n := range []pair{pod, external} {
		at, _ := k.find(n.seen)
		k.nets = slices.Insert(k.nets, at, &peerNetwork{n.seen, n.at().field, p})
	}
	if addr, err := netip.ParseAddr(p.Endpoint); err == nil {
		at := k.endpointAt(addr)
		k.endpoints = slices.Insert(k.endpoints, at, &peerEndpoint{addr, p})
	}
}

// drop removes an accepted peer.
func (k *keeper) drop(p *Peer) {
	for _, l := range ownNetworksOf(p) {
		at, _ := slices.BinarySearchFunc(k.local, l, (*ownNetwork).compare)
		if k.local[at].peers--; k.local[at].peers == 0 {
			k.local = slices.Delete(k.local, at, at+1)
		}
	}
	delete(k.ids, p.ID)
	for _, t := range allTunnels(p.PublicKey, p.Port, p.Tunnels) {
		delete(k.keys, t.PublicKey)
	}
	for _, n := range []netip.Prefix{p.Remote.PodSeen, p.Remote.ExternalSeen} {
		at, _ := k.find(n)
		k.nets = slices.Delete(k.nets, at, at+1)
	}
	if addr, err := netip.ParseAddr(p.Endpoint); err == nil {
		at := k.endpointAt(addr)
		for k.endpoints[at].peer != p {
			at++
		}
		k.endpoints = slices.Delete(k.endpoints, at, at+1)
	}
}

// site returns a copy of s with our own networks and those of accepted peers, in which no endpoint
// may be. The host routes the networks of peers into the tunnel, so the tunnel's own packets to such
// an endpoint would enter the tunnel.
func (k *keeper) site(s Site) Site {
	s.Networks = append(slices.Grow([]SiteNetwork(nil), len(s.Networks)+len(k.local)+len(k.nets)), s.Networks...)
	for _, l := range k.local {
		s.Networks = append(s.Networks, SiteNetwork{Prefix: l.prefix, What: l.name(), Relay: l.pods})
	}
	for _, n := range k.nets {
		s.Networks = append(s.Networks, SiteNetwork{Prefix: n.prefix, What: "which is reached through the tunnel itself"})
	}
	return s
}

// endpointAt returns the index in k.endpoints of the first address that is at least addr.
func (k *keeper) endpointAt(addr netip.Addr) int {
	at, _ := slices.BinarySearchFunc(k.endpoints, addr, func(g *peerEndpoint, a netip.Addr) int { return g.addr.Compare(a) })
	return at
}

// find returns the index of prefix in k.nets, or the index at which to insert it. overlapped is a
// network in k.nets that overlaps prefix, or nil.
func (k *keeper) find(prefix netip.Prefix) (at int, overlapped *peerNetwork) {
	at, _ = slices.BinarySearchFunc(k.nets, prefix, func(o *peerNetwork, p netip.Prefix) int {
		return o.prefix.Addr().Compare(p.Addr())
	})
	// Two prefixes overlap only if one contains the other. k.nets are disjoint, so prefix can
	// overlap only its two neighbours.
	for i := max(at-1, 0); i <= at && i < len(k.nets); i++ {
		if k.nets[i].prefix.Overlaps(prefix) {
			return at, k.nets[i]
		}
	}
	return at, nil
}

// check returns the conflicts of a valid peer with accepted peers and with our own cluster.
func (k *keeper) check(p *Peer) []Problem {
	at := placesInTunnelEndpoint(p.Origin)
	var r report
	if p.ID == k.id {
		r.addAt(at.id, "%s is our own cluster ID; want the ID of the remote cluster", quote(p.ID))
	}
	if other := k.ids[p.ID]; other != nil {
		r.addAt(at.id, "%s is also the cluster ID in %s; want one TunnelEndpoint for each cluster", quote(p.ID), other.Origin)
	}
	if slices.Contains(k.own, p.PublicKey) {
		r.addAt(at.publicKey, "is our own public key; want that of cluster %s", quote(p.ID))
	}
	if other := k.keys[p.PublicKey]; other != nil {
		r.addAt(at.publicKey, "is also the key of cluster %s (%s); want a different key for each cluster", quote(other.ID), other.Origin)
	}
	for i, t := range p.Tunnels {
		if slices.Contains(k.own, t.PublicKey) {
			r.addAt(at.tunnels, "tunnel %d has our own public key; want one of cluster %s", i+1, quote(p.ID))
		}
		if other := k.keys[t.PublicKey]; other != nil {
			r.addAt(at.tunnels, "tunnel %d has a key of cluster %s (%s); want different keys for each cluster", i+1, quote(other.ID), other.Origin)
		}
	}
	localPod, localExternal, remotePod, remoteExternal := p.pairs(at)
	// If networks of two peers overlapped, packets for one peer could go into the tunnel of the
	// other.
	for _, n := range []pair{localPod, localExternal} {
		if _, other := k.find(n.own); other != nil {
			r.addAt(n.ownAt, "%v overlaps %v of cluster %s (%s: %s); want a network that no peer has here",
				n.own, other.prefix, quote(other.peer.ID), other.peer.Origin, other.field)
		}
	}
	for _, n := range []pair{remotePod, remoteExternal} {
		for _, l := range k.local {
			if n.seen.Overlaps(l.prefix) && l.prefix != p.Local.Pod && l.prefix != p.Local.External { // Peer.check has already compared n with p.Local
				r.addAt(n.at(), "%v overlaps %v, which is %s for cluster %s (%s); want networks that do not overlap",
					n.seen, l.prefix, l.name(), quote(l.peer.ID), l.peer.Origin)
			}
		}
		if _, other := k.find(n.seen); other != nil {
			r.addAt(n.at(), "%v overlaps %v of cluster %s (%s: %s); want a network that no other peer has here",
				n.seen, other.prefix, quote(other.peer.ID), other.peer.Origin, other.field)
		}
		// If the network contained another peer's gateway, the UDP packets of that peer's tunnel
		// would be routed into this peer's tunnel.
		if i := k.endpointAt(n.seen.Addr()); i < len(k.endpoints) && n.seen.Contains(k.endpoints[i].addr) {
			g := k.endpoints[i]
			r.addAt(n.at(), "%v contains %v, the gateway of cluster %s (%s: spec.endpointIP); want a network without gateways of peers",
				n.seen, g.addr, quote(g.peer.ID), g.peer.Origin)
		}
	}
	if addr, err := netip.ParseAddr(p.Endpoint); err == nil {
		if _, other := k.find(netip.PrefixFrom(addr, addr.BitLen())); other != nil {
			r.addAt(at.endpoint, "%v is inside %v of cluster %s (%s: %s), which is reached through a tunnel; want an address outside",
				addr, other.prefix, quote(other.peer.ID), other.peer.Origin, other.field)
		}
	}
	return r.problems
}

// String prints the gateway as a plan: the WireGuard peers as wg(8) commands, the host routes, and
// the address translation in words. Two Gateways print the same text if and only if applying
// them has the same effect.
func (g Gateway) String() string {
	var b strings.Builder
	for _, p := range g.Peers {
		b.WriteString(p.String())
	}
	for _, w := range g.Waiting {
		fmt.Fprintf(&b, "waiting: %s has mappings for cluster %s, which is not a peer yet\n", w.Origin, quote(w.ID))
	}
	return b.String()
}

// String prints one peer in the form of Gateway.String.
func (p GatewayPeer) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "peer %s (%s)\n", p.ID, p.Name)
	fmt.Fprintf(&b, "  wg set peer %s endpoint %s allowed-ips %v,%v\n", base64.StdEncoding.EncodeToString(p.PublicKey[:]),
		hostPort(p.Endpoint, p.Port), p.AllowedIPs[0], p.AllowedIPs[1])
	for i, t := range p.Tunnels {
		fmt.Fprintf(&b, "  wg set peer %s endpoint %s tunnel %d\n", base64.StdEncoding.EncodeToString(t.PublicKey[:]), hostPort(p.Endpoint, t.Port), i+1)
	}
	for _, prefix := range p.AllowedIPs {
		fmt.Fprintf(&b, "  route %v\n", prefix)
	}
	for _, m := range p.Rules.Pods {
		if m.From == m.To {
			fmt.Fprintf(&b, "  out source %v unchanged\n", m.From)
		} else {
			fmt.Fprintf(&b, "  out source %v -> %v\n", m.From, m.To)
		}
		fmt.Fprintf(&b, "  out source other -> %v with ports\n", m.To.Addr())
	}
	for _, m := range p.Rules.Pods {
		if m.From == m.To {
			fmt.Fprintf(&b, "  in destination %v unchanged\n", m.To)
		} else {
			fmt.Fprintf(&b, "  in destination %v -> %v\n", m.To, m.From)
		}
	}
	for _, e := range p.Rules.Endpoints {
		fmt.Fprintf(&b, "  in destination %v -> %v\n", e.Seen, e.Real)
	}
	for _, prefix := range p.Rules.External {
		fmt.Fprintf(&b, "  in destination other of %v drop\n", prefix)
	}
	fmt.Fprintf(&b, "  probe %v\n", p.Probe)
	return b.String()
}

// hostPort replaces net.JoinHostPort, because this package must not import net.
func hostPort(host string, port uint16) string {
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return host + ":" + strconv.Itoa(int(port))
}
