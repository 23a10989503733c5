package kernel

import (
	"net/netip"
)

// Bridge is an nftables table that keeps pods on a bridge of our node from sending to the overlay
// port of gateways that are Pods. Without br_netfilter, a Filter does not see packets between two
// ports of a bridge, so a pod could send to the gateway as if it were a node. Packets from an
// uplink come from other nodes, each of which filters its own pods. The lists have the form of a
// Filter's lists.
//
// A Bridge is optional: without it, a Filter drops packets for gateways if they came over a bridge.
type Bridge struct {
	Gateways string // IPv4 addresses of gateways that are Pods
	Uplinks  string // bridge ports that lead to other nodes
}

// BridgeFor makes a Bridge from lists in any order.
func BridgeFor(gateways []netip.Addr, uplinks []string) Bridge {
	return Bridge{addresses(gateways), devices(uplinks)}
}

// BridgeChains are the chains of a Bridge. The last two rules drop frames in which a priority tag
// (a VLAN tag with ID 0, 802.1p) follows a tag that Linux has already removed. The rule for
// gateways cannot see the addresses behind such a second tag, but the destination removes both tags
// and accepts the packet. No legitimate sender needs such frames.
var BridgeChains = []FilterChain{
	{Name: "prerouting", Hook: "prerouting", Drops: "bridged_overlay_port", Rules: []FilterRule{
		{InSet{InDevice, "uplinks"}, DoAccept},
		{toGateways, toOverlay, DoDrop},
		{VLANTag, IsPriorityTag, DoDrop},
		{ServiceTag, IsPriorityTag, DoDrop},
	}},
}

// Sets returns the sets of the table. Only their elements differ between Bridges.
func (b Bridge) Sets() []FilterSet {
	return []FilterSet{
		{"gateways", "ipv4_addr", false, 0, b.Gateways},
		{"uplinks", "ifname", false, 0, b.Uplinks},
	}
}

// WithSet returns the Bridge with other elements in the named set.
func (b Bridge) WithSet(name, elements string) Bridge {
	*map[string]*string{"gateways": &b.Gateways, "uplinks": &b.Uplinks}[name] = elements
	return b
}

func (b Bridge) command(remove bool, _ string) string {
	return nftCommand(remove, "bridge", b.Sets(), BridgeChains)
}
