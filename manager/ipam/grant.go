package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// refuse makes the error of a request that gets nothing; field is of the NetworkConfig, or of the
// Peering for a wanted network.
func refuse(reason, field, format string, args ...any) *fabric.Refusal {
	return &fabric.Refusal{Reason: reason, Problem: fabric.Problem{Field: field, Message: fmt.Sprintf(format, args...)}}
}

// A Request asks for networks for a peer: those that stand for the claimed ones here.
type Request struct {
	ID            string
	Pod, External netip.Prefix // as the peer has them
	// WantPod and WantExternal are the networks that have to stand for them here; zero: any.
	WantPod, WantExternal netip.Prefix
	// Allowed are networks outside of private space that may be used as they are.
	Allowed []netip.Prefix
	// AlwaysRemap: neither network may be used as it is.
	AlwaysRemap bool
	// Now is the present time. Networks that the peer has and does not get again are held from then on;
	// zero: they are free at once.
	Now time.Time
	// Consented is true if an administrator has agreed to this claim, so the peer may get new
	// addresses for it.
	Consented bool
}

// private is what anybody may use: RFC 1918, 6598 and 4193. A peer with another network would
// get traffic for hosts of the Internet.
var private = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("100.64.0.0/10"), netip.MustParsePrefix("fc00::/7"),
}

// outside says what forbids to use p as it is wherever it is free, or "".
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

// A Grant has the networks of a peer as this cluster sees them. They equal the claimed ones unless
// they are remapped.
type Grant struct{ Pod, External netip.Prefix }

// GrantOf returns the networks of the peer; false: it has none, or has left.
func (b State) GrantOf(id string) (Grant, bool) {
	if p := b.peers[id]; p != nil && p.Pod.IsValid() && p.released.IsZero() {
		return p.Grant, true
	}
	return Grant{}, false
}

// UsedForAnother reports whether addr is inside a network that some peer other than id has here.
func (b State) UsedForAnother(id string, addr netip.Addr) bool {
	for other, p := range b.peers {
		if other != id && (p.Pod.Contains(addr) || p.External.Contains(addr)) {
			return true
		}
	}
	return slices.ContainsFunc(b.replaced, func(r replaced) bool { return r.id != id && r.network.Contains(addr) })
}

// Grant allocates the peer its two networks, or none: the error is a *fabric.Refusal, and the State
// is unchanged. A returning peer gets its former networks as far as they are free and permitted.
// Its current networks stay if they have the claim's family and length and no override demands
// others, even if the claim has changed, because both sides use them. A network that is held for
// another peer is not free; one that is held for this peer is.
func (b State) Grant(c Request) (State, Grant, error) {
	held, at := b, c.Now
	if p := b.peers[c.ID]; p != nil && !p.released.IsZero() {
		at = p.released
		b = b.Release(c.ID)
	}
	next, g, err := b.grant(c)
	if err != nil {
		return held, g, err
	}
	if had := held.peers[c.ID]; had != nil {
		next.hold(c.ID, g, had.Grant, at)
		if refusal := next.tooManyHeld(c.ID, held.replaced); refusal != nil {
			return held, Grant{}, refusal
		}
	}
	return next, g, nil
}

// grant is Grant for a peer that has not left.
func (b State) grant(c Request) (State, Grant, error) {
	old := b.peers[c.ID]
	if old == nil {
		old = new(account)
		if len(b.peers) >= MaxPeers {
			return b, Grant{}, refuse(v1alpha1.ReasonExhausted, "", "no room for more than %d peers, including those that left within %v", MaxPeers, fabric.ReleaseHold)
		}
	}
	if refusal := check(c); refusal != nil {
		return b, Grant{}, refusal
	}
	asks := [2]ask{
		{field: "podCIDR", claim: c.Pod, want: c.WantPod, had: old.Pod},
		{field: "externalCIDR", claim: c.External, want: c.WantExternal, had: old.External},
	}
	if before, left := b.FormerOf(c.ID); left && !old.Pod.IsValid() {
		asks[0].before, asks[1].before = before.Pod, before.External
	}
	for i := range asks {
		asks[i].remap, asks[i].outside = c.AlwaysRemap, outside(asks[i].claim, c.Allowed)
	}

	// What stays keeps its place, then the wanted networks get theirs, so that nothing is allocated
	// where one of them has to go.
	changed := b
	changed.replaced = slices.DeleteFunc(slices.Clone(b.replaced), func(r replaced) bool { return r.id == c.ID })
	for i := range asks {
		if asks[i].stays() {
			asks[i].got = asks[i].had
		} else {
			changed.taken = changed.taken.without(asks[i].had)
		}
	}
	if asks[0].got.IsValid() && asks[1].got.IsValid() {
		if !old.unused.IsZero() { // somebody uses them again
			p := *old
			p.unused = time.Time{}
			b = b.withPeer(c.ID, &p)
		}
		return b, old.Grant, nil
	}
	p := *old
	p.unused = time.Time{}
	p.Grant = Grant{Pod: asks[0].got, External: asks[1].got} // for messages; nobody else has it yet
	changed = changed.withPeer(c.ID, &p)
	changed.forget(c.ID)
	for _, place := range []func(*State, *ask) *fabric.Refusal{(*State).placeWanted, (*State).placeBefore, (*State).placeAny} {
		for i := range asks {
			if asks[i].got.IsValid() {
				continue
			}
			if refusal := place(&changed, &asks[i]); refusal != nil {
				return b, Grant{}, refusal
			}
			changed.taken = changed.taken.with(asks[i].got)
			p.Grant = Grant{Pod: asks[0].got, External: asks[1].got}
		}
	}
	for _, a := range asks {
		if !c.Consented && a.needsConsent() && !b.isOurs(a.had) {
			return b, Grant{}, refuse(v1alpha1.ReasonConsent, "spec."+a.field,
				"is %v now; the receiver would use %v; it uses %v until spec.claims.consent of its Peering has podCIDR %v and externalCIDR %v",
				a.claim, a.got, a.had, c.Pod, c.External)
		}
	}
	changed.replaced = b.replaced
	return changed, p.Grant, nil
}

// An ask is one network of a claim on its way through Grant.
type ask struct {
	field     string
	claim     netip.Prefix
	want, had netip.Prefix // zero: none
	before    netip.Prefix // that it had when it left; zero: none
	remap     bool         // it may not be used as it is: the Peering says so
	outside   string       // why it may not be used as it is, else; or ""
	got       netip.Prefix
}

// needsConsent reports whether the peer would get addresses that it has not had, by a change of its
// own claim. What a person here demands, they have agreed to.
func (a *ask) needsConsent() bool {
	byUs := a.want.IsValid() || a.remap && a.had == a.claim
	return a.had.IsValid() && !byUs && !contains(a.had, a.got)
}

// isOurs reports whether what a peer is said to have overlaps a network of this cluster, by an edit
// of the IPAM state or because the cluster has changed. It cannot stay, so that nothing waits for
// consent to another one.
func (b *State) isOurs(had netip.Prefix) bool {
	return had.Overlaps(b.own.PodCIDR) || had.Overlaps(b.own.ServiceCIDR) || had.Overlaps(b.own.ExternalCIDR)
}

func (a *ask) stays() bool {
	if a.want.IsValid() {
		return a.had == a.want
	}
	if a.remap && a.had == a.claim {
		return false
	}
	return a.had.IsValid() && a.had.Addr().BitLen() == a.claim.Addr().BitLen() && a.had.Bits() == a.claim.Bits()
}

// placeWanted puts the network where it has to be, if that is said.
func (b *State) placeWanted(a *ask) *fabric.Refusal {
	if !a.want.IsValid() {
		return nil
	}
	if !b.free(a.want) {
		name, prefix := b.inTheWay(a.want)
		return refuse(v1alpha1.ReasonCIDRConflict, "spec.overrides."+a.field, "%v overlaps %s, %v; want a network that is free", a.want, name, prefix)
	}
	a.got = a.want
	return nil
}

// placeBefore puts the network of a peer that comes back where it was. A Liqo that answered to that
// keeps to it.
func (b *State) placeBefore(a *ask) *fabric.Refusal {
	asItIs := a.before == a.claim
	if a.before.IsValid() && fits(a.before, a.claim) && b.free(a.before) && !(asItIs && (a.remap || a.outside != "")) {
		a.got = a.before
	}
	return nil
}

// inTheWay is holder for a refusal, which the refused peer reads: who our other peers are is none
// of its business.
func (b *State) inTheWay(p netip.Prefix) (name string, prefix netip.Prefix) {
	by := b.holder(p, "")
	return by.name + by.anonymous, by.prefix
}

// placeAny leaves the network where it is if that is free and permitted, or allocates one. A
// network as large as a pool is moved if possible: it would leave nothing to allocate from.
func (b *State) placeAny(a *ask) *fabric.Refusal {
	asItIs := b.free(a.claim) && !a.remap && a.outside == ""
	if asItIs && !b.coversPool(a.claim) {
		a.got = a.claim
		return nil
	}
	found, ok := b.allocate(a.claim)
	if !ok && !asItIs {
		why := a.outside
		switch {
		case !b.free(a.claim):
			name, prefix := b.inTheWay(a.claim)
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

// barred returns the networks, besides the taken ones, that no peer gets. They do not split free blocks.
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

// allocate finds a free network of the family and length of p in the pools, another one than p, and
// one that no former peer had if there is any.
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
	for _, f := range b.formers {
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
		if len(b.formers) == 0 {
			break
		}
	}
	return netip.Prefix{}, false
}

// check says what is wrong with a claim by itself.
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
		return invalid("spec.externalCIDR", "%v overlaps spec.podCIDR, %v; want a network of its own", c.External, c.Pod)
	}
	return nil
}
