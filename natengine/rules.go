package natengine

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/gaissmai/bart"

	"github.com/isthmus-net/isthmus/packet"
)

// Peer holds the rules for one peer. The notation is that of docs/liqo-v0.md, section 7: we are
// cluster A, and the peer is cluster B. Prefixes must be masked. They may be IPv4 or IPv6.
type Peer struct {
	ID             string
	RemotePods     []netip.Prefix // Pb@A: the peer's pods as we see them; destinations outbound, sources inbound
	RemoteExternal []netip.Prefix // Xb@A: the peer's external networks as we see them; packets from there open no flow (section 7.3)
	Pods           []Remap        // Pa -> Pa@B, at most one per family; To's network address is the NAPT address
	External       []netip.Prefix // Xa@B: our external networks as the peer sees them; they contain every Endpoint.Seen
	Endpoints      []Endpoint     // mapped endpoints; the peer reaches no other address in External
	MSS            uint16         // upper bound for the MSS of SYNs in both directions over IPv4; the bound over IPv6 is 20 less; 0 = no bound
	MTU            uint16         // largest IP packet towards the peer in octets, see PeerState.MTU; 0 = no bound
	// Gateway is the address of the peer's gateway in RemoteExternal. Behind NAPT the peer
	// cannot distinguish our nodes from our gateway, so only the in-process endpoint may open
	// TCP connections to this address. If Gateway is zero, every host may.
	Gateway netip.Addr
}

// sameFlows reports whether p and q permit the same flows and translate fragments alike. It
// ignores the MSS and the MTU.
func (p Peer) sameFlows(q Peer) bool {
	return p.ID == q.ID && slices.Equal(p.RemotePods, q.RemotePods) &&
		slices.Equal(p.RemoteExternal, q.RemoteExternal) && slices.Equal(p.Pods, q.Pods) &&
		slices.Equal(p.External, q.External) && slices.Equal(p.Endpoints, q.Endpoints) && p.Gateway == q.Gateway
}

// ruleTable holds the rules of all peers in a form for fast lookup. Once a table is published, it
// is immutable. The next table shares the unchanged rules with it.
type ruleTable struct {
	remotes4 remotes4
	remotes6 remotes6
	rules    []*rule    // sorted by peer ID
	taken    *bart.Lite // remote prefixes of all peers
}

// remote returns the entry of the network that contains a, or nil if no peer has that address.
func (t *ruleTable) remote(a netip.Addr) *remote {
	if a.Is4() {
		a4 := a.As4()
		return t.remotes4.lookup(binary.BigEndian.Uint32(a4[:]))
	}
	return t.remotes6.lookup(addrOf(a))
}

// remote is an entry of a rule table, for addresses of one peer. The engine looks up the
// destination of an outbound packet and the source of an inbound one. A remote has copies of the
// rule's fields that the fast path reads. The copies for IPv4 are in one cache line.
type remote struct {
	out, in   map4
	mss       uint16
	pods      bool // the address is in RemotePods, not in RemoteExternal
	guarded   bool // copy of rule.guarded
	peer      *PeerState
	rule      *rule
	out6, in6 map6
	_         [48]byte // pads the struct to three cache lines, so that the allocator aligns it to a cache line
}

// map4 is a 1:1 map of IPv4. noMap4 matches no address, because its mask is 0 and its from is 1.
// Rules that need the general path have noMap4.
type map4 struct{ mask, from, to uint32 }

var noMap4 = map4{from: 1}

// rule is the compiled form of one Peer.
type rule struct {
	peer      *PeerState
	spec      Peer
	self      [2]addr   // by family: address of the in-process endpoint; it is not a pod, even if the PodCIDR contains the address
	pods      [2]podMap // by family
	external  []prefix
	seen      map[addr]addr     // Endpoint.Seen -> Endpoint.Real
	targets   map[addr]struct{} // Endpoint.Real
	endpoints map[addr]struct{} // each Endpoint.Real in Pods.From; a flow translates packets of these pods if there is one, otherwise the map does; see endReplaced
	remotes   []remotePrefix
	gateway   [2]addr // by family: Endpoint.Seen of the in-process endpoint
	theirs    addr    // Peer.Gateway; zero if there is none

	// If guarded is true, each address must be checked, because a prefix contains the in-process
	// endpoint or special-purpose addresses. For example, a /1 does.
	guarded bool
	has6    bool // the peer has an IPv6 network
}

type remotePrefix struct {
	prefix
	pods bool
}

// podMap is the 1:1 map of our pods for one family. It also determines the NAPT address.
type podMap struct {
	ok       bool
	from, to prefix

	// If single is true, the prefix has only one address, which is the NAPT address and also the
	// pod's address. A packet of a flow is then translated by the flow, and any other packet by the
	// map.
	single bool
}

// natAddr returns the NAPT address: the network address of Pa@B (docs/liqo-v0.md, section 7.2).
// NAPT gives this source address to packets of hosts that are not pods.
func (m *podMap) natAddr() addr { return m.to.net }

// mapOut returns the address under which the peer sees our pod with address a. It does not map the
// network address of the prefix. Replies to this address would look like replies to a NAPT flow, so
// NAPT translates it.
func (m *podMap) mapOut(a addr) (addr, bool) {
	if !m.ok || !m.from.contains(a) || a == m.from.net && !m.single {
		return addr{}, false
	}
	return m.to.move(a), true
}

// mapIn is the reverse of mapOut.
func (m *podMap) mapIn(a addr) (addr, bool) {
	if !m.ok || !m.to.contains(a) || a == m.to.net && !m.single {
		return addr{}, false
	}
	return m.from.move(a), true
}

func (r *rule) isExternal(a addr) bool {
	for _, p := range r.external {
		if p.contains(a) {
			return true
		}
	}
	return false
}

// isRemote reports whether the address a belongs to the peer, and whether it belongs to the peer's
// pods.
func (r *rule) isRemote(a addr) (remote, pods bool) {
	for _, p := range r.remotes { // the prefixes never overlap
		if p.contains(a) {
			return true, p.pods
		}
	}
	return false, false
}

// guardsGateway reports whether r forbids a TCP connection because it goes to the peer's gateway
// and does not come from our gateway. Only a gateway may connect to a gateway.
func (r *rule) guardsGateway(proto uint8, local, peer addr) bool {
	return peer == r.theirs && proto == packet.TCP && local != r.self[local.family()]
}

// permits reports whether r allows a flow of this kind, protocol and addresses.
func (r *rule) permits(kind flowKind, proto uint8, local, mapped, peer addr) bool {
	known, pods := r.isRemote(peer)
	if !known {
		return false
	}
	m := &r.pods[peer.family()]
	if kind == endpointFlow {
		at, ok := r.seen[mapped]
		return ok && at == local && pods
	}
	_, pod := m.mapOut(local)
	return m.ok && mapped == m.natAddr() && (!pod || local == r.self[local.family()]) && !r.guardsGateway(proto, local, peer)
}

// compile builds the rule table for all peers. The function state returns the PeerState of an ID.
// The error names every peer and rule at fault.
func compile(peers []Peer, self [2]addr, state func(id string) *PeerState) (*ruleTable, error) {
	var errs []error
	ids := map[string]bool{}
	t := &ruleTable{taken: new(bart.Lite)}
	for i, p := range peers {
		if p.ID == "" {
			errs = append(errs, errors.New("peer without ID"))
			continue
		}
		for _, err := range p.check(self) {
			errs = append(errs, fmt.Errorf("peer %s: %w", p.ID, err))
		}
		if ids[p.ID] {
			errs = append(errs, fmt.Errorf("peer %s: appears twice", p.ID))
		}
		ids[p.ID] = true
		for _, remote := range slices.Concat(p.RemotePods, p.RemoteExternal) {
			if checkPrefix(remote) != nil {
				continue // already reported by check
			}
			if t.taken.OverlapsPrefix(remote) {
				errs = append(errs, fmt.Errorf("peer %s: remote network %v overlaps %s", p.ID, remote, owner(peers[:i+1], remote)))
			}
			t.taken.Insert(remote)
		}
	}
	if n := t.taken.Size4(); n >= deeper {
		errs = append(errs, fmt.Errorf("%d IPv4 networks of peers are too many", n))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	t.remotes4.remotes = make([]*remote, 1)
	t.rules = make([]*rule, len(peers))
	for i, p := range peers {
		t.rules[i] = newRule(p, state(p.ID), self)
		t.add4(t.rules[i])
	}
	if len(t.remotes4.nodes) > deeper {
		return nil, fmt.Errorf("the IPv4 networks of peers need more than %d nodes of the lookup table, because those longer than /16 are in too many different /16 networks", deeper)
	}
	slices.SortFunc(t.rules, func(a, b *rule) int { return cmp.Compare(a.spec.ID, b.spec.ID) })
	t.add6()
	return t, nil
}

// p is a network of the last of the peers. owner describes the first network in peers that overlaps
// p, for an error about p.
func owner(peers []Peer, p netip.Prefix) string {
	for _, other := range peers {
		for _, net := range slices.Concat(other.RemotePods, other.RemoteExternal) {
			if net.Overlaps(p) {
				return fmt.Sprintf("%v of peer %s", net, other.ID)
			}
		}
	}
	return "another"
}

// find returns the index of a peer's rule in t.rules, or the index at which to insert it.
func (t *ruleTable) find(id string) (at int, found bool) {
	return slices.BinarySearchFunc(t.rules, id, func(r *rule, id string) int { return cmp.Compare(r.spec.ID, id) })
}

// specs returns the rules of all peers after a change: with the rules in changed, and without those
// of the peers in removed.
func (t *ruleTable) specs(changed []Peer, removed []string) []Peer {
	out := make(map[string]bool, len(changed)+len(removed))
	for _, id := range removed {
		out[id] = true
	}
	for i := range changed {
		out[changed[i].ID] = true
	}
	all := make([]Peer, 0, len(t.rules)+len(changed))
	for _, r := range t.rules {
		if !out[r.spec.ID] {
			all = append(all, r.spec)
		}
	}
	return append(all, changed...)
}

// changedCopy returns a copy of t after a change: with the rules in changed, and without those of
// the peers in removed. The copy equals the table that compile would build from all peers. Apart
// from copies of memory and the IPv6 networks, the time depends only on the size of the change. If
// the rules have an error, or remotes4 needs a new table, changedCopy returns nil. The caller must
// then call compile.
func (t *ruleTable) changedCopy(changed []Peer, removed []string, self [2]addr, state func(id string) *PeerState) *ruleTable {
	next := *t
	var out []*rule
	ids := make(map[string]bool, len(changed)+len(removed))
	remove := func(id string) {
		if at, found := t.find(id); found && !ids[id] {
			out = append(out, t.rules[at])
		}
		ids[id] = true
	}
	for _, id := range removed {
		remove(id)
	}
	for i := range changed {
		if p := &changed[i]; p.ID == "" || ids[p.ID] || len(p.check(self)) > 0 {
			return nil
		}
		remove(changed[i].ID)
	}
	for _, r := range out { // removed before the new networks are added, because a network may move from one peer to another
		for _, net := range r.remotePrefixes() {
			next.taken = next.taken.DeletePersist(net)
		}
	}
	networks := 0
	for i := range changed {
		for _, net := range slices.Concat(changed[i].RemotePods, changed[i].RemoteExternal) {
			networks++
			if next.taken.OverlapsPrefix(net) {
				return nil
			}
			next.taken = next.taken.InsertPersist(net)
		}
	}
	if next.taken.Size4() >= deeper || !next.remotes4.unshare(networks) {
		return nil
	}
	next.rules = slices.Clone(t.rules)
	six := false
	for _, r := range out {
		for _, net := range r.remotePrefixes() {
			if net.Addr().Is4() {
				next.remotes4.remove(net)
			} else {
				six = true
			}
		}
		at, _ := next.find(r.spec.ID)
		next.rules = slices.Delete(next.rules, at, at+1)
	}
	for i := range changed {
		r := newRule(changed[i], state(changed[i].ID), self)
		six = next.add4(r) || six
		at, _ := next.find(r.spec.ID)
		next.rules = slices.Insert(next.rules, at, r)
	}
	if six {
		next.add6()
	}
	return &next
}

func checkPrefix(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return errors.New("invalid prefix")
	case p.Addr().Is4In6():
		return fmt.Errorf("%v is IPv4 written as IPv6", p)
	case p != p.Masked():
		return fmt.Errorf("%v has host bits set", p)
	case p.Bits() == 0:
		return fmt.Errorf("%v contains all addresses", p)
	case p.Addr().Is6() && p.Overlaps(netip.MustParsePrefix("::ffff:0:0/96")):
		return fmt.Errorf("%v contains IPv4-mapped addresses", p)
	}
	return nil
}

// check returns the contradictions within the rules of one peer.
func (p Peer) check(self [2]addr) (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, c := range []struct {
		name string
		list []netip.Prefix
	}{{"remote pods", p.RemotePods}, {"remote external", p.RemoteExternal}, {"external", p.External}} {
		for _, net := range c.list {
			if err := checkPrefix(net); err != nil {
				fail("%s: %w", c.name, err)
			}
		}
	}
	var family [2]bool
	for _, m := range p.Pods {
		if err := m.check(); err != nil {
			fail("pods: %w", err)
			continue
		}
		if f := addrOf(m.To.Addr()).family(); family[f] {
			fail("pods: %v is the second remap of its address family; want one for each family", m)
		} else {
			family[f] = true
		}
		for _, x := range p.External {
			if m.To.Overlaps(x) {
				fail("external: %v overlaps the pods as the peer sees them, %v", x, m.To)
			}
		}
	}
	if p.MTU != 0 && p.MTU < 68 {
		fail("MTU %d: want 0 for none, or at least 68 (RFC 791)", p.MTU)
	}
	if six := func(p netip.Prefix) bool { return p.Addr().Is6() }; p.MTU != 0 && p.MTU < 1280 &&
		(slices.ContainsFunc(p.RemotePods, six) || slices.ContainsFunc(p.RemoteExternal, six)) {
		fail("MTU %d: want at least 1280 for IPv6 (RFC 8200, section 5)", p.MTU)
	}
	at := map[netip.Addr]netip.Addr{}
	for _, e := range p.Endpoints {
		if err := p.checkEndpoint(e, self); err != nil {
			fail("endpoint %v: %w", e, err)
			continue
		}
		if other, ok := at[e.Seen]; ok && other != e.Real {
			fail("endpoint %v: %v is already the address of another endpoint", e, other)
		}
		at[e.Seen] = e.Real
	}
	if p.MSS != 0 && p.MSS < 88 { // the minimum of Linux, TCP_MIN_MSS
		fail("MSS %d is too small", p.MSS)
	}
	return errs
}

func (p Peer) checkEndpoint(e Endpoint, self [2]addr) error {
	switch {
	case !e.Real.IsValid() || !e.Seen.IsValid():
		return errors.New("an address is missing")
	case e.Real.Is4() != e.Seen.Is4():
		return errors.New("mixes address families")
	case e.Real.Zone() != "" || e.Real.Is4In6() || e.Seen.Is4In6():
		return errors.New("an address has a zone or is IPv4 written as IPv6")
	case addrOf(e.Real) != self[addrOf(e.Real).family()] && unreachable(addrOf(e.Real), e.Real.Is4()):
		return fmt.Errorf("%v is not an address that a peer may reach", e.Real)
	}
	for _, x := range p.External {
		if x.Contains(e.Seen) {
			return nil
		}
	}
	return fmt.Errorf("%v is not in the external networks", e.Seen)
}

func newRule(p Peer, peer *PeerState, self [2]addr) *rule {
	p.RemotePods, p.RemoteExternal = slices.Clone(p.RemotePods), slices.Clone(p.RemoteExternal)
	p.Pods, p.External, p.Endpoints = slices.Clone(p.Pods), slices.Clone(p.External), slices.Clone(p.Endpoints)
	r := &rule{peer: peer, spec: p, self: self, seen: map[addr]addr{}, targets: map[addr]struct{}{}, endpoints: map[addr]struct{}{}}
	for _, m := range p.Pods {
		from := prefixOf(m.From)
		r.pods[from.net.family()] = podMap{ok: true, from: from, to: prefixOf(m.To), single: m.From.IsSingleIP()}
		r.guarded = r.guarded || reachesSpecial(m.From) || from.contains(self[from.net.family()])
	}
	for _, x := range p.External {
		r.external = append(r.external, prefixOf(x))
	}
	for _, e := range p.Endpoints {
		at := addrOf(e.Real)
		r.seen[addrOf(e.Seen)] = at
		r.targets[at] = struct{}{}
		if at == self[at.family()] {
			r.gateway[at.family()] = addrOf(e.Seen)
		}
		if m := &r.pods[at.family()]; m.ok && m.from.contains(at) {
			r.endpoints[at] = struct{}{}
		}
	}
	for _, net := range p.RemotePods {
		r.remotes = append(r.remotes, remotePrefix{prefixOf(net), true})
		r.guarded = r.guarded || reachesSpecial(net)
	}
	for _, net := range p.RemoteExternal {
		r.remotes = append(r.remotes, remotePrefix{prefixOf(net), false})
		r.guarded = r.guarded || reachesSpecial(net)
	}
	if p.Gateway.IsValid() {
		r.theirs = addrOf(p.Gateway)
	}
	r.has6 = slices.ContainsFunc(r.remotePrefixes(), func(net netip.Prefix) bool { return net.Addr().Is6() })
	return r
}

// remotePrefixes returns the networks of the peer.
func (r *rule) remotePrefixes() []netip.Prefix {
	return slices.Concat(r.spec.RemotePods, r.spec.RemoteExternal)
}

// add4 adds the IPv4 networks of r. It returns true if r also has IPv6 networks.
func (t *ruleTable) add4(r *rule) (six bool) {
	r.eachNetwork(func(net netip.Prefix, to *remote) {
		if net.Addr().Is4() {
			t.remotes4.insert(net, to)
		} else {
			six = true
		}
	})
	return six
}

// add6 builds the IPv6 table anew from all rules, because hash tables of remotes6 cannot grow.
func (t *ruleTable) add6() {
	var six []remote6
	for _, r := range t.rules {
		if r.has6 {
			r.eachNetwork(func(net netip.Prefix, to *remote) {
				if net.Addr().Is6() {
					six = append(six, remote6{net, to})
				}
			})
		}
	}
	t.remotes6 = newRemotes6(six)
}

// eachNetwork calls insert with each network of the peer, and with the entry for its addresses.
func (r *rule) eachNetwork(insert func(netip.Prefix, *remote)) {
	base := remote{out: noMap4, in: noMap4, out6: noMap6, in6: noMap6, mss: r.spec.MSS, guarded: r.guarded, peer: r.peer, rule: r}
	general := r.guarded || len(r.endpoints) > 0 // the fast path must not use a 1:1 map
	if m := &r.pods[0]; m.ok && !general {       // a /32 needs no check here: its only address is the network address, which maps never accepts
		mask, from, to := uint32(m.from.mask.lo), uint32(m.from.net.lo), uint32(m.to.net.lo)
		base.in, base.out = map4{mask, to, from}, map4{mask, from, to}
	}
	if m := &r.pods[1]; m.ok && !general {
		base.in6, base.out6 = map6{m.from.mask, m.to.net, m.from.net}, map6{m.from.mask, m.from.net, m.to.net}
	}
	pods := base
	pods.pods = true
	for _, net := range r.spec.RemotePods {
		insert(net, &pods)
	}
	for _, net := range r.spec.RemoteExternal {
		insert(net, &base)
	}
}
