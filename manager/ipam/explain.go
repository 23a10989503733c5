package ipam

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// A Translation is one network of a peer, with the reason for its translation here.
type Translation struct {
	Claim netip.Prefix // as the peer's own cluster uses it
	Here  netip.Prefix // as this cluster uses it; equal to Claim if not remapped
	Why   string       // a clause, such as "it overlaps our PodCIDR, 10.244.0.0/16"
}

// Explain returns the two networks that the peer has for the request, or would get with consent,
// each with its reason. The network of the pods is first. The error is the one that Allocate
// returns. The State does not change.
func (b State) Explain(c Request) (both [2]Translation, err error) {
	c.Consented = true
	next, got, err := b.Allocate(c)
	if err != nil {
		return both, err
	}
	others := next.Release(c.ID)
	others.replaced = slices.DeleteFunc(slices.Clone(others.replaced), func(r replaced) bool { return r.id == c.ID })
	both[0] = Translation{c.Pod, got.Pod, others.reasonFor(c, "podCIDR", c.Pod, got.Pod, c.WantPod)}
	both[1] = Translation{c.External, got.External, others.reasonFor(c, "externalCIDR", c.External, got.External, c.WantExternal)}
	if both[1].Why == givenBefore && c.External.Overlaps(got.Pod) {
		both[1].Why = fmt.Sprintf("it overlaps %v, which is used for its podCIDR here", got.Pod)
	}
	return both, nil
}

// givenBefore is the reason for a remapped network if the original reason for the remapping no
// longer exists.
const givenBefore = "another network was allocated earlier"

// reasonFor returns the reason why this cluster uses the network here for the claimed network. b is
// the State without the peer's own networks. An allocation outlives its reason, so the original
// reason may no longer exist.
func (b *State) reasonFor(c Request, field string, claim, here, want netip.Prefix) string {
	forbidden, overlaps := outside(claim, c.Allowed), ""
	if !b.free(claim) {
		by := b.holder(claim, "")
		overlaps = fmt.Sprintf("overlaps %s%s, %v", by.name, by.owner, by.prefix)
	}
	switch {
	case want.IsValid():
		return "spec.overrides." + field + " of the Peering sets it"
	case here == claim && overlaps != "":
		return "it was allocated earlier; now it " + overlaps
	case here == claim && forbidden != "":
		return "it was allocated earlier"
	case here == claim:
		return space(claim, c.Allowed) + ", and overlaps nothing here"
	case overlaps != "":
		return "it " + overlaps
	case c.AlwaysRemap:
		return "spec.claims.alwaysRemap of the Peering is true"
	case forbidden != "":
		return "it " + strings.TrimSuffix(forbidden, " of the receiver's Peering")
	case b.coversPool(claim):
		return "it is as large as a pool, and would leave nothing to allocate from"
	}
	return givenBefore
}

// space returns a clause with the rule that permits using a network unchanged.
func space(claim netip.Prefix, allowed []netip.Prefix) string {
	if i := slices.IndexFunc(private, func(n netip.Prefix) bool { return contains(n, claim) }); i >= 0 {
		rfc := 1918
		switch n := private[i]; {
		case n.Addr().Is6():
			rfc = 4193
		case n.Addr() == netip.AddrFrom4([4]byte{100, 64, 0, 0}):
			rfc = 6598
		}
		return fmt.Sprintf("it is in private space (RFC %d)", rfc)
	}
	i := slices.IndexFunc(allowed, func(n netip.Prefix) bool { return contains(n, claim) })
	return fmt.Sprintf("it is in %v of spec.claims.allowed", allowed[i])
}
