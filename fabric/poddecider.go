package fabric

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// A PodDecider computes the state of a gateway that is a Pod for successive PodNetworks. If only a
// few nodes joined, left or changed, and they are independent of other nodes, it adds and removes
// only the objects of these nodes. Any other change requires a complete computation. With thousands
// of nodes, this takes a hundred times as long. The zero value is ready. Only one goroutine may use
// it, and callers must not modify the result.
type PodDecider struct {
	made     bool
	peers    []*GatewayPeer
	inUse    map[string]TunnelSet
	mtus     [3]int // mtu, tunnels, underlayMTU
	in       PodNetwork
	state    kernel.State
	problems []Problem

	sources []netip.Addr // in the filter, sorted
	used    prefixSet    // all addresses and networks of nodes, pods and peers
	own     []netip.Prefix
}

// GatewayPodFor is a faster form of the function GatewayPodFor.
func (m *PodDecider) GatewayPodFor(peers []*GatewayPeer, inUse map[string]TunnelSet, mtu, tunnels, underlayMTU int, in PodNetwork) (kernel.State, []Problem) {
	mtus := [3]int{mtu, tunnels, underlayMTU}
	if m.made && mtus == m.mtus && m.samePeers(peers, inUse) &&
		in.Pod == m.in.Pod && in.Node == m.in.Node && in.Trusted == m.in.Trusted && slices.Equal(in.Pods, m.in.Pods) && m.applyNodeChanges(in) {
		return m.state, m.problems
	}
	d := decidePod(peers, inUse, mtu, tunnels, underlayMTU, in)
	*m = PodDecider{made: true, peers: peers, inUse: maps.Clone(inUse), mtus: mtus, in: in, state: d.node, problems: SortProblems(d.problems), sources: d.outer}
	for i := range peers {
		m.own = append(m.own, peers[i].Local.Pod)
	}
	slices.SortFunc(m.own, netip.Prefix.Compare)
	m.own = slices.Compact(m.own)
	used := usedBy([]netip.Addr{in.Pod}, d.refused)
	for _, p := range in.Pods {
		used = append(used, usedBy([]netip.Addr{p.Addr}, nil)...)
	}
	for _, n := range in.Nodes {
		used = append(used, n.prefixes()...)
	}
	m.used.fill(used)
	return m.state, m.problems
}

// samePeers reports whether the peers are unchanged, apart from values on which GatewayPodFor does
// not depend, such as endpoints and keys.
func (m *PodDecider) samePeers(peers []*GatewayPeer, inUse map[string]TunnelSet) bool {
	return len(peers) == len(m.peers) && (sameList(peers, m.peers) || slices.EqualFunc(peers, m.peers, func(a, b *GatewayPeer) bool {
		return a == b || a.ID == b.ID && a.AllowedIPs == b.AllowedIPs && a.Local.Pod == b.Local.Pod && a.Origin == b.Origin
	})) && maps.Equal(inUse, m.inUse)
}

// sameList reports whether two lists share the same memory.
func sameList[T any](a, b []T) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

func (n ClusterNode) equal(other ClusterNode) bool {
	return n.Name == other.Name && n.Created == other.Created && slices.Equal(n.Addrs, other.Addrs) &&
		slices.Equal(n.PodCIDRs, other.PodCIDRs) && slices.Equal(n.Sources, other.Sources) && slices.Equal(n.Routes, other.Routes)
}

// maxChangedNodes is the maximum number of changed nodes in an incremental update.
const maxChangedNodes = 32

// applyNodeChanges applies added, removed and changed nodes to the state. If it returns false, the
// state is invalid and must be computed again.
func (m *PodDecider) applyNodeChanges(in PodNetwork) bool {
	if sameList(in.Nodes, m.in.Nodes) {
		return true
	}
	var removed, added []ClusterNode
	for i, j := 0, 0; i < len(m.in.Nodes) || j < len(in.Nodes); {
		switch {
		case j == len(in.Nodes) || i < len(m.in.Nodes) && m.in.Nodes[i].Name < in.Nodes[j].Name:
			removed = append(removed, m.in.Nodes[i])
			i++
		case i == len(m.in.Nodes) || in.Nodes[j].Name < m.in.Nodes[i].Name:
			added = append(added, in.Nodes[j])
			j++
		default:
			if !m.in.Nodes[i].equal(in.Nodes[j]) {
				removed, added = append(removed, m.in.Nodes[i]), append(added, in.Nodes[j])
			}
			i, j = i+1, j+1
		}
		if len(removed)+len(added) > maxChangedNodes {
			return false
		}
	}
	change := podChange{}
	for _, n := range removed {
		for _, p := range n.prefixes() {
			m.used.remove(p)
		}
		if !m.independent(n) {
			return false
		}
		change.add(n, m.in.Trusted, false)
	}
	for _, n := range added {
		if !m.independent(n) {
			return false
		}
		for _, p := range n.prefixes() {
			m.used.add(p)
		}
		change.add(n, m.in.Trusted, true)
	}
	m.in = in
	if len(change.obsolete)+len(change.problems) > 0 {
		var left []Problem // problems that still exist
		for _, p := range m.problems {
			if !slices.Contains(change.obsolete, p) {
				left = append(left, p)
			}
		}
		m.problems = SortProblems(append(left, change.problems...))
	}
	m.state.FDB = change.fdb.apply(m.state.FDB, compareFDB)
	m.state.Neighbors = change.neighbors.apply(m.state.Neighbors, compareNeighbors)
	m.state.Routes = change.routes.apply(m.state.Routes, kernel.Route.Compare)
	m.sources = change.sources.apply(m.sources, netip.Addr.Compare)
	m.state.Filters = []kernel.Filter{m.state.Filters[0].WithSet("nodes", kernel.AddressElements(m.sources))}
	return true
}

// prefixes returns all addresses and networks of a node.
func (n ClusterNode) prefixes() []netip.Prefix {
	return usedBy(slices.Concat(n.Addrs, n.Sources), n.PodCIDRs)
}

func usedBy(addrs []netip.Addr, networks []netip.Prefix) (all []netip.Prefix) {
	for _, a := range addrs {
		if a.IsValid() {
			all = append(all, hostPrefix(a))
		}
	}
	for _, p := range networks {
		if p.IsValid() {
			all = append(all, p.Masked())
		}
	}
	return all
}

// independent reports whether the objects of a node can be added or removed while all other objects
// stay the same. This requires that the node shares no address or network with another node, a pod
// or a peer, and that the state does not depend on the node's pods and routes. m.used must not
// contain the node.
func (m *PodDecider) independent(n ClusterNode) bool {
	if n.Name == "" || n.Name == m.in.Node || m.routed(n) || slices.ContainsFunc(m.in.Pods, func(p NodePod) bool { return p.Node == n.Name }) {
		return false
	}
	return !slices.ContainsFunc(n.prefixes(), func(p netip.Prefix) bool {
		_, named := slices.BinarySearchFunc(m.own, p, netip.Prefix.Compare)
		return named || m.used.overlaps(p)
	})
}

// routed reports whether the gateway's node has a route to the node n or via n.
func (m *PodDecider) routed(n ClusterNode) bool {
	at := slices.IndexFunc(m.in.Nodes, func(own ClusterNode) bool { return own.Name == m.in.Node })
	return at >= 0 && slices.ContainsFunc(m.in.Nodes[at].Routes, func(r NodeRoute) bool {
		return slices.Contains(n.Addrs, r.Via) || slices.ContainsFunc(n.prefixes(), r.Network.Overlaps)
	})
}

// A podChange collects the objects that independent nodes add to the state, and those to remove.
type podChange struct {
	fdb       listChange[kernel.FDBEntry]
	neighbors listChange[kernel.Neighbor]
	routes    listChange[kernel.Route]
	sources   listChange[netip.Addr]

	problems, obsolete []Problem // problems about added nodes, and about removed nodes
}

func (c *podChange) add(n ClusterNode, trusted, added bool) {
	d := nodeDecision{nodes: []ClusterNode{n}, trusted: trusted, overlay: make(map[string]netip.Addr, 1)}
	d.node.Devices = []kernel.Device{{Name: kernel.OverlayDevice}}
	d.toNodes(PodNetwork{})
	d.addPods(nil, nil)
	d.finishRoutes()
	for _, p := range d.problems {
		switch {
		case p.Origin.Name != n.Name: // a problem about the gateway's own node is not about n
		case added:
			c.problems = append(c.problems, p)
		default:
			c.obsolete = append(c.obsolete, p)
		}
	}
	c.fdb.note(added, d.node.FDB...)
	c.neighbors.note(added, d.node.Neighbors...)
	c.routes.note(added, d.node.Routes...)
	c.sources.note(added, sortedIPv4(d.outerSources(PodNetwork{}))...)
}

// A listChange holds the elements to add to a sorted list, and to remove from it.
type listChange[T comparable] struct{ added, removed []T }

func (c *listChange[T]) note(added bool, all ...T) {
	if added {
		c.added = append(c.added, all...)
	} else {
		c.removed = append(c.removed, all...)
	}
}

// apply returns a new list with the change applied. It does not modify list.
func (c *listChange[T]) apply(list []T, compare func(a, b T) int) []T {
	if len(c.added)+len(c.removed) == 0 {
		return list
	}
	slices.SortFunc(c.added, compare)
	slices.SortFunc(c.removed, compare)
	now := make([]T, 0, len(list)+len(c.added))
	from := 0
	upTo := func(v T) {
		at, _ := slices.BinarySearchFunc(list[from:], v, compare)
		now, from = append(now, list[from:from+at]...), from+at
	}
	added := c.added
	for _, v := range c.removed {
		for len(added) > 0 && compare(added[0], v) < 0 {
			upTo(added[0])
			now, added = append(now, added[0]), added[1:]
		}
		upTo(v)
		if from < len(list) && compare(list[from], v) == 0 {
			from++
		}
	}
	for _, v := range added {
		upTo(v)
		now = append(now, v)
	}
	return append(now, list[from:]...)
}

// A prefixSet is a multiset of networks and addresses, which may overlap.
type prefixSet struct {
	sorted  []netip.Prefix
	lengths [2][129]int // number of networks by prefix length, of IPv4 and IPv6
}

func (s *prefixSet) fill(all []netip.Prefix) {
	*s = prefixSet{sorted: slices.SortedFunc(slices.Values(all), netip.Prefix.Compare)}
	for _, p := range s.sorted {
		*s.length(p, p.Bits())++
	}
}

func (s *prefixSet) length(p netip.Prefix, bits int) *int {
	return &s.lengths[p.Addr().BitLen()/128][bits]
}

func (s *prefixSet) add(p netip.Prefix) {
	at, _ := slices.BinarySearchFunc(s.sorted, p, netip.Prefix.Compare)
	s.sorted = slices.Insert(s.sorted, at, p)
	*s.length(p, p.Bits())++
}

// remove removes p once. It must be in the set.
func (s *prefixSet) remove(p netip.Prefix) {
	at, _ := slices.BinarySearchFunc(s.sorted, p, netip.Prefix.Compare)
	s.sorted = slices.Delete(s.sorted, at, at+1)
	*s.length(p, p.Bits())--
}

// overlaps reports whether any network of the set contains p or lies in it.
func (s *prefixSet) overlaps(p netip.Prefix) bool {
	at, found := slices.BinarySearchFunc(s.sorted, p, netip.Prefix.Compare)
	if found || at < len(s.sorted) && p.Overlaps(s.sorted[at]) { // networks inside p sort right after it
		return true
	}
	for bits := range p.Bits() {
		if *s.length(p, bits) > 0 {
			around, _ := p.Addr().Prefix(bits)
			if _, found := slices.BinarySearchFunc(s.sorted, around, netip.Prefix.Compare); found {
				return true
			}
		}
	}
	return false
}
