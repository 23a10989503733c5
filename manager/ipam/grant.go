package ipam

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

var (
	// ErrExhausted is in every Refusal for want of a free network or address, or
	// because a bound of the Book is reached.
	ErrExhausted = errors.New("exhausted")
	// ErrTaken is in the Refusal of a wanted network that overlaps another one.
	ErrTaken = errors.New("taken")
)

// A Refusal says why a claim got nothing, in the words of a condition.
type Refusal struct {
	Reason  string // one of the reasons of v1alpha1.ConditionAccepted
	Field   string // of the NetworkConfig, or of the Peering for a wanted network: "spec.podCIDR"
	Message string // what was found, and what is wanted
	err     error
}

func (r *Refusal) Error() string {
	if r.Field == "" {
		return r.Message
	}
	return r.Field + ": " + r.Message
}

// Unwrap returns ErrExhausted, ErrTaken or nil.
func (r *Refusal) Unwrap() error { return r.err }

// A Claim is what a peer says about its networks.
type Claim struct {
	ID            string
	Pod, External netip.Prefix // as the peer has them
	// WantPod and WantExternal are the networks that have to stand for them
	// here; zero: any.
	WantPod, WantExternal netip.Prefix
}

// A Grant are the networks that stand for those of a peer here: equal to what it
// claimed when they are not remapped.
type Grant struct{ Pod, External netip.Prefix }

// GrantOf returns the networks of the peer.
func (b Book) GrantOf(id string) (Grant, bool) {
	if p := b.peers[id]; p != nil && p.Pod.IsValid() {
		return p.Grant, true
	}
	return Grant{}, false
}

// UsedForAnother reports whether addr is inside a network that some peer other
// than id has here.
func (b Book) UsedForAnother(id string, addr netip.Addr) bool {
	for other, p := range b.peers {
		if other != id && (p.Pod.Contains(addr) || p.External.Contains(addr)) {
			return true
		}
	}
	return false
}

// Grant gives the peer its two networks, or none: the error is a *Refusal, and
// the Book is the same as before. Networks that it has already stay as long as
// they have the family and length of the claim and nothing else is wanted, even
// if the claim itself is another one: they are in use on both sides.
func (b Book) Grant(c Claim) (Book, Grant, error) {
	old := b.peers[c.ID]
	if old == nil {
		old = new(peer)
		if len(b.peers) >= MaxPeers {
			return b, Grant{}, &Refusal{v1alpha1.ReasonExhausted, "", fmt.Sprintf("there are %d peers already, and no room for more", MaxPeers), ErrExhausted}
		}
	}
	if refusal := check(c); refusal != nil {
		return b, Grant{}, refusal
	}
	asks := [2]ask{
		{field: "podCIDR", claim: c.Pod, want: c.WantPod, had: old.Pod},
		{field: "externalCIDR", claim: c.External, want: c.WantExternal, had: old.External},
	}

	// What stays keeps its place, then the wanted networks get theirs, so that
	// nothing is allocated where one of them has to go.
	changed := b
	for i := range asks {
		if asks[i].stays() {
			asks[i].got = asks[i].had
		} else {
			changed.taken = changed.taken.without(asks[i].had)
		}
	}
	if asks[0].got.IsValid() && asks[1].got.IsValid() {
		return b, old.Grant, nil
	}
	p := *old
	p.Grant = Grant{Pod: asks[0].got, External: asks[1].got} // for messages; nobody else has it yet
	changed = changed.withPeer(c.ID, &p)
	for _, place := range []func(*Book, *ask) *Refusal{(*Book).placeWanted, (*Book).placeAny} {
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
	return changed, p.Grant, nil
}

// An ask is one network of a claim on its way through Grant.
type ask struct {
	field     string
	claim     netip.Prefix
	want, had netip.Prefix // zero: none
	got       netip.Prefix
}

func (a *ask) stays() bool {
	if a.want.IsValid() {
		return a.had == a.want
	}
	return a.had.IsValid() && a.had.Addr().BitLen() == a.claim.Addr().BitLen() && a.had.Bits() == a.claim.Bits()
}

// placeWanted puts the network where it has to be, if that is said.
func (b *Book) placeWanted(a *ask) *Refusal {
	if !a.want.IsValid() {
		return nil
	}
	if !b.free(a.want) {
		name, prefix := b.inTheWay(a.want)
		return &Refusal{v1alpha1.ReasonCIDRConflict, "spec.overrides." + a.field,
			fmt.Sprintf("%v overlaps %s, %v; want a network that is free", a.want, name, prefix), ErrTaken}
	}
	a.got = a.want
	return nil
}

// inTheWay is holder for a refusal, which the refused peer reads: who our other
// peers are is none of its business.
func (b *Book) inTheWay(p netip.Prefix) (name string, prefix netip.Prefix) {
	name, peer, prefix := b.holder(p, "")
	if peer != "" {
		name += "another peer"
	}
	return name, prefix
}

// placeAny leaves the network where it is if that is free, or allocates one. A
// network as large as a pool is moved if possible: it would leave nothing to
// allocate from.
func (b *Book) placeAny(a *ask) *Refusal {
	free := b.free(a.claim)
	if free && !b.coversPool(a.claim) {
		a.got = a.claim
		return nil
	}
	found, ok := b.allocate(a.claim)
	if !ok && !free {
		name, prefix := b.inTheWay(a.claim)
		return &Refusal{v1alpha1.ReasonExhausted, "spec." + a.field,
			fmt.Sprintf("%v overlaps %s, %v, and no %s is free in the pools %v; want a network that overlaps nothing, or a larger pool",
				a.claim, name, prefix, length(a.claim), b.own.Pools), ErrExhausted}
	}
	if a.got = found; !ok {
		a.got = a.claim
	}
	return nil
}

func (b *Book) free(p netip.Prefix) bool { return !b.taken.overlaps(p) && !b.nodes.overlaps(p) }

func (b *Book) coversPool(p netip.Prefix) bool {
	for _, pool := range b.own.Pools {
		if p.Overlaps(pool) && p.Bits() <= pool.Bits() {
			return true
		}
	}
	return false
}

// allocate finds a free network of the family and length of p in the pools.
func (b *Book) allocate(p netip.Prefix) (netip.Prefix, bool) {
	for _, pool := range b.own.Pools {
		if pool.Addr().BitLen() != p.Addr().BitLen() {
			continue
		}
		if found, ok := b.taken.fit(pool, p.Bits(), b.nodes); ok {
			return found, true
		}
	}
	return netip.Prefix{}, false
}

// check says what is wrong with a claim by itself.
func check(c Claim) *Refusal {
	invalid := func(field, format string, args ...any) *Refusal {
		return &Refusal{Reason: v1alpha1.ReasonInvalid, Field: field, Message: fmt.Sprintf(format, args...)}
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
