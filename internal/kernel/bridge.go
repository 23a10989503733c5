package kernel

import (
	"net/netip"
)

// Bridge is a table of nftables that keeps the pods on a bridge of our node off the overlay's port of
// gateways that are Pods. What a bridge carries from one port to another no Filter sees (only where
// br_netfilter hands it over), and a pod there may say that it is a node. What comes by an uplink comes
// from other nodes, of which each keeps its own pods off. The lists are as in Filter.
//
// It is optional: without it a Filter takes nothing that a bridge has carried.
type Bridge struct {
	Gateways string // addresses of gateways that are Pods, IPv4
	Uplinks  string // ports of bridges that lead to other nodes
}

// BridgeFor makes a Bridge.
func BridgeFor(gateways []netip.Addr, uplinks []string) Bridge {
	return Bridge{addresses(gateways), devices(uplinks)}
}

// BridgeChains are the chains. A tag of 802.1p (a VLAN without a number) hides a packet from the rule
// for addresses only when it is in another tag: Linux takes off one before a bridge sees the frame, and
// all of them where it arrives. Nobody has a use for two of which the outer is such a one.
var BridgeChains = []FilterChain{
	{Name: "prerouting", Hook: "prerouting", Drops: "bridged_overlay_port", Rules: []FilterRule{
		{InSet{InDevice, "uplinks"}, DoAccept},
		{toGateways, toOverlay, DoDrop},
		{VLANTag, IsPriorityTag, DoDrop},
		{ServiceTag, IsPriorityTag, DoDrop},
	}},
}

// Sets are the sets, always the same but for their elements.
func (b Bridge) Sets() []FilterSet {
	return []FilterSet{
		{"gateways", "ipv4_addr", false, 0, b.Gateways},
		{"uplinks", "ifname", false, 0, b.Uplinks},
	}
}

// WithSet returns the Bridge with other elements in the set of a name.
func (b Bridge) WithSet(name, elements string) Bridge {
	*map[string]*string{"gateways": &b.Gateways, "uplinks": &b.Uplinks}[name] = elements
	return b
}

func (b Bridge) command(remove bool, _ string) string {
	return nftCommand(remove, "bridge", b.Sets(), BridgeChains)
}
