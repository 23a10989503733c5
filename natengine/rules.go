package natengine

import "net/netip"

// A Remap translates one prefix onto another of the same length: the network bits change, the host bits stay. It is
// netfilter's NETMAP. From and To may be equal (identity).
type Remap struct{ From, To netip.Prefix }

// Map translates addr; false when addr is outside From or the remap is not well formed.
func (r Remap) Map(addr netip.Addr) (netip.Addr, bool) { return addr, r.From.Contains(addr) }

// Reverse is the translation that undoes r.
func (r Remap) Reverse() Remap { return Remap{From: r.To, To: r.From} }

// Endpoint is one entry of a Liqo NatMapping: an address of ours that is not one of the peer's view of our pods, and
// the address under which the peer reaches it.
type Endpoint struct{ Real, Seen netip.Addr }

// Peer holds the rules for one peer. Prefixes are masked, of either family.
type Peer struct {
	ID             string
	RemotePods     []netip.Prefix // Pb@A: destinations outbound, sources inbound
	RemoteExternal []netip.Prefix // Xb@A: the same, but its sources begin no flow (facts 7.3)
	Pods           []Remap        // Pa -> Pa@B, at most one per family; the network address of To is the NAPT address
	External       []netip.Prefix // Xa@B
	Endpoints      []Endpoint     // real address -> address inside External
	MSS            uint16         // upper bound for the MSS of IPv4 SYNs both ways (IPv6: 20 less); 0 = leave alone
}
