package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// refuse returns the refusal of a request. field names the refused field: of the Peering if it
// starts with spec.overrides, and of the NetworkConfig otherwise. It may be empty.
func refuse(reason, field, format string, args ...any) *fabric.Refusal {
	return &fabric.Refusal{Reason: reason, Problem: fabric.Problem{Field: field, Message: fmt.Sprintf(format, args...)}}
}

// A Request is a request for networks that represent a peer's claimed networks here.
type Request struct {
	ID            string
	Pod, External netip.Prefix // the claimed networks, as the peer's own cluster uses them
	// WantPod and WantExternal are the networks that represent Pod and External here according to
	// spec.overrides of our Peering. Zero means that any network will do.
	WantPod, WantExternal netip.Prefix
	// Allowed are networks outside of private space that may be used unchanged.
	Allowed []netip.Prefix
	// AlwaysRemap is true if neither network may be used unchanged.
	AlwaysRemap bool
	// Now is the present time. Networks that a present peer loses by this request are held,
	// starting at Now. If Now is zero, they are free at once. For a peer that had left, the hold
	// continues from the time when it left.
	Now time.Time
	// Consented is true if an administrator has agreed to this claim. The peer may then get addresses
	// that it did not have before.
	Consented bool
}

// private is the private space of RFC 1918, 6598 and 4193, which any peer may use. A peer with
// another network would get traffic meant for hosts of the Internet.
var private = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("fc00::/7"),
}

// outside returns a clause with the rule that forbids using p unchanged even if p is free. It
// returns "" if no rule does.
func outside(p netip.Prefix, allowed []netip.Prefix) string {
	if !slices.ContainsFunc(slices.Concat(private, allowed), func(n netip.Prefix) bool { return contains(n, p) }) {
		return "is neither in private space (RFC 1918, 6598 and 4193) nor among spec.claims.allowed of the receiver's Peering"
	}
	for _, m := range metadata {
		if m.Overlaps(p) {
			return fmt.Sprintf("overlaps %v, which clouds use for metadata services", m)
		}
	}
	return ""
}

var metadata = fabric.MetadataRanges()

func contains(n, p netip.Prefix) bool {
	return n.IsValid() && n.Bits() <= p.Bits() && n.Contains(p.Addr())
}

// An Allocation has the networks that this cluster uses for a peer. A network that is not remapped
// equals the claimed network.
type Allocation struct{ Pod, External netip.Prefix }

// AllocationOf returns the networks of the peer. It returns false if the peer has none or has left.
func (b State) AllocationOf(id string) (Allocation, bool) {
	if p := b.peers[id]; p != nil && p.Pod.IsValid() && p.released.IsZero() {
		return p.Allocation, true
	}
	return Allocation{}, false
}

// UsedForAnother reports whether addr is inside a present or held network of a peer other than id.
func (b State) UsedForAnother(id string, addr netip.Addr) bool {
	for other, p := range b.peers {
		if other != id && (p.Pod.Contains(addr) || p.External.Contains(addr)) {
			return true
		}
	}
	return slices.ContainsFunc(b.replaced, func(r replaced) bool { return r.id != id && r.network.Contains(addr) })
}

// Allocate allocates both networks of the peer. If it cannot, it returns the unchanged State and a
// *fabric.Refusal.
//
//   - A returning peer gets its previous networks as far as they are free and permitted.
//   - Current networks stay if they have the claim's family and length and no override demands
//     others. They stay even after a change of the claim, because both clusters use them.
//   - A network held for another peer is not free. A network held for this peer is free.
func (b State) Allocate(c Request) (State, Allocation, error) {
	held, released := b, c.Now
	if p := b.peers[c.ID]; p != nil && !p.released.IsZero() {
		released = p.released
		b = b.Release(c.ID)
	}
	next, g, err := b.allocateFor(c)
	if err != nil {
		return held, g, err
	}
	if had := held.peers[c.ID]; had != nil {
		next.holdReplaced(c.ID, g, had.Allocation, released)
		if refusal := next.tooManyHeld(c.ID, held.replaced); refusal != nil {
			return held, Allocation{}, refusal
		}
	}
	return next, g, nil
}

// allocateFor implements Allocate for a peer that has not left.
func (b State) allocateFor(c Request) (State, Allocation, error) {
	old := b.peers[c.ID]
	if old == nil {
		old = new(account)
		if len(b.peers) >= MaxPeers {
			return b, Allocation{}, refuse(v1alpha1.ReasonExhausted, "", "no room for more than %d peers, including those that left within %v", MaxPeers, fabric.ReleaseHold)
		}
	}
	if refusal := check(c); refusal != nil {
		return b, Allocation{}, refusal
	}
	placements := [2]placement{
		{field: "podCIDR", claim: c.Pod, want: c.WantPod, had: old.Pod},
		{field: "externalCIDR", claim: c.External, want: c.WantExternal, had: old.External},
	}
	if previous, ok := b.PreviousOf(c.ID); ok && !old.Pod.IsValid() {
		placements[0].previous, placements[1].previous = previous.Pod, previous.External
	}
	for i := range placements {
		placements[i].remap, placements[i].outside = c.AlwaysRemap, outside(placements[i].claim, c.Allowed)
	}

	// Kept networks are placed first and overrides second. Otherwise another allocation could occupy
	// the network that an override demands.
	changed := b
	changed.replaced = slices.DeleteFunc(slices.Clone(b.replaced), func(r replaced) bool { return r.id == c.ID })
	for i := range placements {
		if placements[i].stays() {
			placements[i].got = placements[i].had
		} else {
			changed.taken = changed.taken.without(placements[i].had)
		}
	}
	if placements[0].got.IsValid() && placements[1].got.IsValid() {
		if !old.unused.IsZero() { // the peer is in use again
			p := *old
			p.unused = time.Time{}
			b = b.withPeer(c.ID, &p)
		}
		return b, old.Allocation, nil
	}
	// changed gets p before the new networks are chosen, because the refusal of one network may
	// name the other network of the same peer. p may still change, because no other State has it
	// yet.
	p := *old
	p.unused = time.Time{}
	p.Allocation = Allocation{Pod: placements[0].got, External: placements[1].got}
	changed = changed.withPeer(c.ID, &p)
	changed.forget(c.ID)
	for _, place := range []func(*State, *placement) *fabric.Refusal{(*State).placeWanted, (*State).placePrevious, (*State).placeAny} {
		for i := range placements {
			if placements[i].got.IsValid() {
				continue
			}
			if refusal := place(&changed, &placements[i]); refusal != nil {
				return b, Allocation{}, refusal
			}
			changed.taken = changed.taken.with(placements[i].got)
			p.Allocation = Allocation{Pod: placements[0].got, External: placements[1].got}
		}
	}
	for _, a := range placements {
		if !c.Consented && a.needsConsent() && !b.overlapsOwn(a.had) {
			return b, Allocation{}, refuse(v1alpha1.ReasonConsent, "spec."+a.field,
				"is now %v; the receiver still uses %v for the previous network, and needs consent to use %v: want podCIDR %v and externalCIDR %v in spec.claims.consent of the receiver's Peering",
				a.claim, a.had, a.got, c.Pod, c.External)
		}
	}
	changed.replaced = b.replaced
	return changed, p.Allocation, nil
}

// A placement is one network of a claim while Allocate runs.
type placement struct {
	field     string
	claim     netip.Prefix
	want, had netip.Prefix // the network that an override demands, and the current network; zero: none
	previous  netip.Prefix // the network that the peer had here when it left; zero: none
	remap     bool         // the Peering forbids using the claimed network unchanged
	outside   string       // another reason not to use the claimed network unchanged; or ""
	got       netip.Prefix
}

// needsConsent reports whether a change of the peer's own claim would give it addresses that it did
// not have before. No consent is needed for a change that an option of our Peering causes.
func (a *placement) needsConsent() bool {
	byUs := a.want.IsValid() || a.remap && a.had == a.claim
	return a.had.IsValid() && !byUs && !contains(a.had, a.got)
}

// overlapsOwn reports whether a peer's current network overlaps a network of this cluster, because
// somebody edited the IPAM state or the cluster has changed. Such a network cannot stay, so its
// replacement needs no consent.
func (b *State) overlapsOwn(had netip.Prefix) bool {
	return had.Overlaps(b.own.PodCIDR) || had.Overlaps(b.own.ServiceCIDR) || had.Overlaps(b.own.ExternalCIDR)
}

func (a *placement) stays() bool {
	if a.want.IsValid() {
		return a.had == a.want
	}
	if a.remap && a.had == a.claim {
		return false
	}
	return a.had.IsValid() && a.had.Addr().BitLen() == a.claim.Addr().BitLen() && a.had.Bits() == a.claim.Bits()
}

// placeWanted assigns the network that an override demands, if any.
func (b *State) placeWanted(a *placement) *fabric.Refusal {
	if !a.want.IsValid() {
		return nil
	}
	if !b.free(a.want) {
		name, prefix := b.obstacleFor(a.want)
		return refuse(v1alpha1.ReasonCIDRConflict, "spec.overrides."+a.field, "%v overlaps %s, %v; want a network that is free", a.want, name, prefix)
	}
	a.got = a.want
	return nil
}

// placePrevious gives a returning peer the network that it had before. A Liqo peer keeps using the
// networks of the first answer that it got.
func (b *State) placePrevious(a *placement) *fabric.Refusal {
	unchanged := a.previous == a.claim
	if a.previous.IsValid() && fits(a.previous, a.claim) && b.free(a.previous) && !(unchanged && (a.remap || a.outside != "")) {
		a.got = a.previous
	}
	return nil
}

// obstacleFor returns the obstacle that holder finds, for the text of a refusal. The refused peer
// reads that text, so the name must not disclose our other peers.
func (b *State) obstacleFor(p netip.Prefix) (name string, prefix netip.Prefix) {
	by := b.holder(p, "")
	return by.name + by.anonymous, by.prefix
}

// placeAny keeps the claimed network if it is free and permitted; otherwise it allocates one. A
// claimed network that covers a pool is remapped if possible, because otherwise the pool would have
// no free network.
func (b *State) placeAny(a *placement) *fabric.Refusal {
	unchanged := b.free(a.claim) && !a.remap && a.outside == ""
	if unchanged && !b.coversPool(a.claim) {
		a.got = a.claim
		return nil
	}
	found, ok := b.allocate(a.claim)
	if !ok && !unchanged {
		why := a.outside
		switch {
		case !b.free(a.claim):
			name, prefix := b.obstacleFor(a.claim)
			why = fmt.Sprintf("overlaps %s, %v", name, prefix)
		case a.remap:
			why = "must be remapped (spec.claims.alwaysRemap of the receiver's Peering)"
		}
		return refuse(v1alpha1.ReasonExhausted, "spec."+a.field,
			"%v %s, and no %s is free in the pools %v; want a network that overlaps nothing, or a larger pool%s",
			a.claim, why, length(a.claim), b.own.Pools, b.freeSoon(a.claim))
	}
	if a.got = found; !ok {
		a.got = a.claim
	}
	return nil
}

func (b *State) free(p netip.Prefix) bool {
	return !b.taken.overlaps(p) && !b.nodes.overlaps(p) && !slices.ContainsFunc(b.replaced, func(r replaced) bool { return r.network.Overlaps(p) })
}

// barred returns the networks that no peer gets, apart from those in b.taken. Unlike b.taken, they
// do not split free blocks; see tree.fit.
func (b *State) barred() tree {
	barred := b.nodes
	for _, r := range b.replaced {
		barred = barred.with(r.network)
	}
	return barred
}

func (b *State) coversPool(p netip.Prefix) bool {
	for _, pool := range b.own.Pools {
		if p.Overlaps(pool) && p.Bits() <= pool.Bits() {
			return true
		}
	}
	return false
}

// allocate finds a free network in the pools that has the family and length of p, but is not p. It
// prefers networks that no former peer had.
func (b *State) allocate(p netip.Prefix) (netip.Prefix, bool) {
	taken := b.taken
	if b.free(p) {
		taken = taken.with(p)
	}
	barred := b.barred()
	for _, m := range metadata {
		barred = barred.with(m)
	}
	shunned := barred
	for _, f := range b.departed {
		shunned = shunned.with(f.Pod).with(f.Ext)
	}
	for _, avoid := range []tree{shunned, barred} {
		for _, pool := range b.own.Pools {
			if pool.Addr().BitLen() != p.Addr().BitLen() {
				continue
			}
			if found, ok := taken.fit(pool, p.Bits(), avoid); ok {
				return found, true
			}
		}
		if len(b.departed) == 0 {
			break
		}
	}
	return netip.Prefix{}, false
}

// check validates a claim without regard to other networks.
func check(c Request) *fabric.Refusal {
	invalid := func(field, format string, args ...any) *fabric.Refusal {
		return refuse(v1alpha1.ReasonInvalid, field, format, args...)
	}
	if wrong := fabric.CheckClusterID(c.ID); wrong != "" {
		return invalid("cluster ID", "%s", wrong)
	}
	for _, n := range []struct {
		field       string
		claim, want netip.Prefix
	}{{"podCIDR", c.Pod, c.WantPod}, {"externalCIDR", c.External, c.WantExternal}} {
		if wrong := fabric.CheckNetwork(n.claim); wrong != "" {
			return invalid("spec."+n.field, "%s", wrong)
		}
		if n.want == (netip.Prefix{}) {
			continue
		}
		if wrong := fabric.CheckNetwork(n.want); wrong != "" {
			return invalid("spec.overrides."+n.field, "%s", wrong)
		}
		if !fits(n.want, n.claim) {
			return invalid("spec.overrides."+n.field, "%v does not have the family and length of the peer's %s, %v; want a %s",
				n.want, n.field, n.claim, length(n.claim))
		}
	}
	switch {
	case c.Pod.Addr().BitLen() != c.External.Addr().BitLen():
		return invalid("spec.externalCIDR", "%v is not of the same family as spec.podCIDR, %v; want networks of one family", c.External, c.Pod)
	case c.Pod.Overlaps(c.External):
		return invalid("spec.externalCIDR", "%v overlaps spec.podCIDR, %v; want networks that do not overlap", c.External, c.Pod)
	}
	return nil
}
