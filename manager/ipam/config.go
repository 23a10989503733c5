package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/fabric"
)

// special are the special-purpose ranges, which no peer can have.
var special = fabric.SpecialRanges()

// A Conflict is an overlap that arose after a network was allocated, because this cluster has
// changed or somebody has edited an object.
type Conflict struct {
	Peer    string       // the peer for which Prefix is used here; empty: Prefix is ours
	Network string       // "PodCIDR", "ServiceCIDR" or "ExternalCIDR"
	Prefix  netip.Prefix // zero: no ExternalCIDR could be chosen
	With    string       // the overlapping network, such as "our ServiceCIDR"
	Other   netip.Prefix
}

// String returns a sentence for people.
func (c Conflict) String() string {
	if !c.Prefix.IsValid() {
		return "no ExternalCIDR: " + c.With
	}
	whose := "our " + c.Network
	if c.Peer != "" {
		whose = c.Network + " of peer " + c.Peer
	}
	return fmt.Sprintf("%s, %v here, overlaps %s, %v", whose, c.Prefix, c.With, c.Other)
}

// Configure sets the current configuration of this cluster. It may be called at any time. Allocated
// networks stay unchanged, and so does an ExternalCIDR that Configure chose and that peers may use.
// The returned conflicts are those of Conflicts.
//
// If the ExternalCIDR changes to one of the same length, mapped endpoints keep their host bits;
// otherwise they get new addresses. A peer's answer that does not fit our new networks is
// forgotten. If the PodCIDR changes, all answers for the PodCIDR are forgotten, so a peer cannot
// reach the new PodCIDR until it answers again.
func (b State) Configure(c Config) (State, []Conflict) {
	if c.Pools == nil {
		c.Pools = defaultPools()
	}
	own := Config{
		PodCIDR:      c.PodCIDR.Masked(),
		ServiceCIDR:  c.ServiceCIDR.Masked(),
		ExternalCIDR: c.ExternalCIDR.Masked(),
		Pools:        networks(c.Pools),
		Reserved:     networks(c.Reserved),
		Services:     networks(c.Services),
		Nodes:        slices.Clone(c.Nodes),
		Reached:      MergeReached(slices.Clone(c.Reached)),
		Agreed:       networks(c.Agreed),
	}
	slices.SortFunc(own.Reserved, netip.Prefix.Compare)
	own.Reserved = slices.Compact(own.Reserved)
	slices.SortFunc(own.Nodes, netip.Addr.Compare)
	own.Nodes = slices.Compact(own.Nodes)

	was, pods := b.own.ExternalCIDR, b.own.PodCIDR
	if !own.ExternalCIDR.IsValid() && (b.inUse() || slices.Contains(own.Agreed, was)) {
		own.ExternalCIDR = was // peers may know the previous network
	}
	own.Agreed = slices.DeleteFunc(own.Agreed, func(p netip.Prefix) bool { return p == own.PodCIDR || p == own.ExternalCIDR })
	slices.SortFunc(own.Agreed, netip.Prefix.Compare)
	own.Agreed = slices.Compact(own.Agreed)
	if own.ExternalCIDR.IsValid() && own.Equal(b.own) {
		return b, b.Conflicts()
	}
	b.own = own
	b.fill()
	if !own.ExternalCIDR.IsValid() {
		b.own.ExternalCIDR = b.chooseExternal(was)
		b.taken = b.taken.with(b.own.ExternalCIDR)
	}
	b.readdress(was, pods)
	return b, b.Conflicts()
}

func networks(list []netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(list))
	for _, p := range list {
		if p.IsValid() {
			out = append(out, p.Masked())
		}
	}
	return out
}

// fill computes the trees of networks from the rest of the State.
func (b *State) fill() {
	b.taken, b.nodes = tree{}, tree{}
	for o := range b.obstacles {
		if o.node {
			b.nodes = b.nodes.with(o.prefix)
		} else {
			b.taken = b.taken.with(o.prefix)
		}
	}
	for _, p := range b.peers {
		b.taken = b.taken.with(p.Pod).with(p.External)
	}
}

// largestExternal is the prefix length of an IPv4 ExternalCIDR that we choose ourselves, unless the
// PodCIDR is smaller. It has room for 4,093 endpoints. Every peer has to find a free network of
// that length, so ours is smaller than Liqo's, which is as large as the PodCIDR.
const largestExternal = 20

// inUse reports whether there is a peer that has not left.
func (b *State) inUse() bool {
	for _, p := range b.peers {
		if p.released.IsZero() {
			return true
		}
	}
	return false
}

// chooseExternal picks our ExternalCIDR. It keeps the previous one if nothing overlaps it.
func (b *State) chooseExternal(was netip.Prefix) netip.Prefix {
	pod := b.own.PodCIDR
	if was.IsValid() && (!pod.IsValid() || was.Addr().BitLen() == pod.Addr().BitLen() && b.free(was)) {
		return was
	}
	if !pod.IsValid() {
		return netip.Prefix{}
	}
	chosen, _ := b.allocate(externalLike(pod))
	return chosen
}

// externalLike returns some network with the length that the ExternalCIDR gets for the given
// PodCIDR.
func externalLike(pod netip.Prefix) netip.Prefix {
	if pod.Addr().Is4() && pod.Bits() < largestExternal {
		return netip.PrefixFrom(pod.Addr(), largestExternal)
	}
	return pod
}

// readdress adapts mapped addresses and the peers' answers to a change of our own networks from
// oldExternal and oldPods.
func (b *State) readdress(oldExternal, oldPods netip.Prefix) {
	external := b.own.ExternalCIDR
	peers := make(map[string]*account, len(b.peers))
	endpoints := make(map[netip.Addr]*endpoint)
	b.addresses = tree{}.with(host(external.Addr())).with(host(firstHost(external))).with(host(lastAddr(external)))

	for _, real := range slices.SortedFunc(maps.Keys(b.endpoints), netip.Addr.Compare) {
		e := *b.endpoints[real]
		e.peers = 0
		switch {
		case external == oldExternal:
		case !external.IsValid() || external.Addr().BitLen() != real.BitLen() || external.Contains(real):
			continue
		case external.Bits() == oldExternal.Bits():
			e.addr = move(e.addr, external)
		default:
			addr, ok := b.addresses.lowest(external)
			if !ok {
				continue
			}
			e.addr = addr
		}
		b.addresses = b.addresses.with(host(e.addr))
		endpoints[real] = &e
	}
	for id, old := range b.peers {
		p := *old
		if b.own.PodCIDR != oldPods || !fits(p.podSeen, b.own.PodCIDR) {
			p.podSeen = netip.Prefix{}
		}
		if p.externalSeen.IsValid() && !fits(p.externalSeen, external) {
			p.externalSeen = netip.Prefix{}
		}
		p.endpoints = nil
		for real, callers := range old.endpoints {
			if e := endpoints[real]; e != nil && p.externalSeen.IsValid() {
				p.endpoints = withRequesters(p.endpoints, real, callers)
				e.peers++
			}
		}
		if p.empty() {
			continue
		}
		if external == oldExternal && p.podSeen == old.podSeen && p.externalSeen == old.externalSeen && len(p.endpoints) == len(old.endpoints) {
			peers[id] = old // the unchanged account, so that Changed does not name the peer
		} else {
			peers[id] = &p
		}
	}
	for real, e := range endpoints {
		if e.peers == 0 {
			b.addresses = b.addresses.without(host(e.addr))
			delete(endpoints, real)
		}
	}
	b.peers, b.endpoints = peers, endpoints
}

// An obstacle is a network or address that no peer's network may overlap.
type obstacle struct {
	name string // ends with "of " or "by " if owner is set
	// owner is the owner, such as "node n1", for messages in this cluster. Messages to a peer use
	// anonymous instead, because they must not disclose our nodes and our other peers.
	owner, anonymous string
	prefix           netip.Prefix
	node             bool // whether it belongs to a node and changes with the cluster's nodes
	previous         bool // whether it is a previous network of ours
}

// obstacles yields all obstacles except the networks of peers.
func (b *State) obstacles(yield func(obstacle) bool) {
	all := func(name string, prefixes ...netip.Prefix) bool {
		for _, p := range prefixes {
			if p.IsValid() && !yield(obstacle{name: name, prefix: p}) {
				return false
			}
		}
		return true
	}
	if !all("our PodCIDR", b.own.PodCIDR) || !all("our ServiceCIDR", b.own.ServiceCIDR) || !all("our ExternalCIDR", b.own.ExternalCIDR) ||
		!all("a reserved network", b.own.Reserved...) || !all("a special range", special...) {
		return
	}
	for _, p := range b.own.Agreed {
		if !yield(obstacle{name: "a previous network of this cluster that a peer still uses", prefix: p, previous: true}) {
			return
		}
	}
	for _, addr := range b.own.Nodes {
		if addr.IsValid() && !yield(obstacle{name: "the address of a node or an API server", prefix: host(addr), node: true}) {
			return
		}
	}
	for _, r := range b.own.Reached {
		o := obstacle{name: "a network of ", owner: "node " + r.Node, anonymous: "a node", prefix: r.Prefix, node: true}
		if r.Resolver {
			o.name = "a DNS server of "
		}
		if r.Prefix.IsValid() && !yield(o) {
			return
		}
	}
}

// Conflicts returns all present overlaps: first those of our own networks, then at most one for
// each network of a peer, sorted by peer.
func (b State) Conflicts() []Conflict {
	var conflicts []Conflict
	own := b.own
	if !own.ExternalCIDR.IsValid() && own.PodCIDR.IsValid() {
		conflicts = append(conflicts, Conflict{Network: "ExternalCIDR",
			With: fmt.Sprintf("no %s is free in %v", length(externalLike(own.PodCIDR)), b.own.Pools)})
	}
	ours := []Conflict{{Network: "PodCIDR", Prefix: own.PodCIDR}, {Network: "ServiceCIDR", Prefix: own.ServiceCIDR}, {Network: "ExternalCIDR", Prefix: own.ExternalCIDR}}
	for i, n := range ours {
		for o := range b.obstacles {
			// An overlap of two of our networks is reported for the later one in ours.
			itself := slices.ContainsFunc(ours[i:], func(c Conflict) bool { return "our "+c.Network == o.name })
			// Nodes inside the PodCIDR are normal: clouds allocate both from one network.
			if !itself && !o.previous && n.Prefix.Overlaps(o.prefix) && (!o.node || n.Network == "ExternalCIDR") {
				n.With, n.Other = o.name+o.owner, o.prefix
				conflicts = append(conflicts, n)
			}
		}
	}
	for _, id := range b.Peers() {
		conflicts = append(conflicts, b.ConflictsOf(id)...)
	}
	return conflicts
}

// ConflictsOf returns the conflicts of one peer's networks.
func (b State) ConflictsOf(id string) (conflicts []Conflict) {
	p, known := b.peers[id]
	if !known {
		return nil
	}
	for _, n := range []Conflict{{Peer: id, Network: "PodCIDR", Prefix: p.Pod}, {Peer: id, Network: "ExternalCIDR", Prefix: p.External}} {
		if !n.Prefix.IsValid() || b.taken.alone(n.Prefix) && !b.nodes.overlaps(n.Prefix) {
			continue
		}
		by := b.holder(n.Prefix, id)
		n.With, n.Other = by.name+by.owner, by.prefix
		conflicts = append(conflicts, n)
	}
	return conflicts
}

// holder returns the first obstacle or network that overlaps p. It ignores the networks of the peer
// whose ID is except.
func (b *State) holder(p netip.Prefix, except string) obstacle {
	for o := range b.obstacles {
		if o.prefix.Overlaps(p) {
			return o
		}
	}
	for _, r := range b.replaced {
		if r.id != except && r.network.Overlaps(p) {
			return heldObstacle(r.id, r.network, r.released)
		}
	}
	for _, id := range b.Peers() {
		found := obstacle{owner: "peer " + id, anonymous: "another peer"}
		if other := b.peers[id]; id != except && !other.released.IsZero() {
			for _, network := range []netip.Prefix{other.Pod, other.External} {
				if network.Overlaps(p) {
					return heldObstacle(id, network, other.released)
				}
			}
		} else if id == except {
			continue
		} else if other.Pod.Overlaps(p) {
			found.name, found.prefix = "the network used for the pods of ", other.Pod
			return found
		} else if other.External.Overlaps(p) {
			found.name, found.prefix = "the network used for the ExternalCIDR of ", other.External
			return found
		}
	}
	return obstacle{name: "nothing"}
}

func host(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// lastAddr returns the broadcast address of p.
func lastAddr(p netip.Prefix) netip.Addr {
	if !p.IsValid() {
		return netip.Addr{}
	}
	ones := netip.IPv6Unspecified().AsSlice()
	for i := range ones {
		ones[i] = 0xff
	}
	if p.Addr().Is4() {
		return move(netip.AddrFrom4([4]byte(ones[:4])), p)
	}
	return move(netip.AddrFrom16([16]byte(ones)), p)
}

func length(p netip.Prefix) string { return fmt.Sprintf("/%d", p.Bits()) }
