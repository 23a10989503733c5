package natengine

import (
	"fmt"
	"net/netip"
)

// A Remap translates one prefix onto another of the same length: the network bits change, the host
// bits stay. It is netfilter's NETMAP. From and To may be equal (identity).
type Remap struct{ From, To netip.Prefix }

// Map translates the address a. It returns false if a is outside From or r is not well formed.
func (r Remap) Map(a netip.Addr) (netip.Addr, bool) {
	if r.check() != nil || !r.From.Contains(a) {
		return netip.Addr{}, false
	}
	return prefixOf(r.To).move(addrOf(a)).netip(), true
}

// Reverse returns the translation that undoes r.
func (r Remap) Reverse() Remap { return Remap{From: r.To, To: r.From} }

// String returns the remap as text, such as "10.244.0.0/16 -> 10.246.0.0/16".
func (r Remap) String() string { return r.From.String() + " -> " + r.To.String() }

func (r Remap) check() error {
	switch {
	case checkPrefix(r.From) != nil:
		return checkPrefix(r.From)
	case checkPrefix(r.To) != nil:
		return checkPrefix(r.To)
	case r.From.Addr().Is4() != r.To.Addr().Is4():
		return fmt.Errorf("%v mixes address families", r)
	case r.From.Bits() != r.To.Bits():
		return fmt.Errorf("%v has masks of different length", r)
	}
	return nil
}

// Endpoint is one entry of a Liqo NatMapping (docs/liqo-v0.md, section 6.3). Real is an address of
// our side. Seen is the address in Peer.External at which the peer reaches the endpoint.
type Endpoint struct{ Real, Seen netip.Addr }

// String returns the endpoint as text, in the direction of the peer's packets.
func (e Endpoint) String() string { return e.Seen.String() + " -> " + e.Real.String() }
