package kernel

import (
	"bytes"
	"net/netip"
	"slices"
)

// Filter is a table of nftables that keeps others out of the overlay. Its chains are those of a node
// or those of a gateway's Pod, always the same; what differs is the addresses in its sets, each
// sorted and separated by spaces, so that filters are comparable.
type Filter struct {
	Pod       bool   // that of a gateway's Pod
	Nodes     string // addresses from which packets of the overlay come, IPv4: those of nodes and gateways
	Remote    Remote // networks of peers
	Own       string // addresses of our node at which a peer may be given it as a mapped endpoint, IPv4
	Elsewhere string // networks in which pods of other nodes are, and none of ours, IPv4
	Pods      string // networks of all pods of the cluster, IPv4
	Underlay  string // devices by which our node reaches the others
	Bridges   string // of which a Bridge keeps pods off gateways, and by which other nodes reach these
	// Gateways are IPv4 addresses of gateways that are Pods. A node forwards their packets to and from
	// the overlay of other nodes.
	Gateways string
}

// Remote is networks of peers, as the sets of a Filter have them.
type Remote struct {
	Networks  string // IPv4
	Networks6 string // IPv6
	// Around are the networks of length 16 that have an address of Networks in them, without the
	// length: an address that is in none of these is in none of those.
	Around string
}

// RemoteOf makes a Remote of networks in any order.
func RemoteOf(all []netip.Prefix) Remote {
	all = inOrder(all)
	return Remote{Networks: networksOf(all, netip.Addr.Is4), Networks6: networksOf(all, netip.Addr.Is6), Around: around(all)}
}

// around goes through the networks of length 16 of each network, which is one where it is longer.
func around(sorted []netip.Prefix) string {
	var text []byte
	next := 0 // before it all are said
	for _, p := range sorted {
		if !p.IsValid() || !p.Addr().Is4() {
			continue
		}
		b := p.Masked().Addr().As4()
		first := int(b[0])<<8 | int(b[1])
		for next = max(next, first); next < first+1<<max(16-p.Bits(), 0); next++ {
			text = append(netip.AddrFrom4([4]byte{byte(next >> 8), byte(next)}).AppendTo(text), ' ')
		}
	}
	return string(bytes.TrimSuffix(text, []byte{' '}))
}

// FilterSets is what a Filter is made of, in any order.
type FilterSets struct {
	Pod                  bool // that of a gateway's Pod, which needs Nodes and Remote alone
	Nodes, Own, Gateways []netip.Addr
	Remote               []netip.Prefix
	Elsewhere, Pods      []netip.Prefix
	Underlay, Bridges    []string
}

// FilterFor makes a Filter. Networks inside others are left out, and so is IPv6, which the overlay
// does not carry, but for networks of peers: nothing for them leaves either.
func FilterFor(s FilterSets) Filter {
	return Filter{
		Pod: s.Pod, Nodes: addresses(s.Nodes), Own: addresses(s.Own), Gateways: addresses(s.Gateways),
		Remote: RemoteOf(s.Remote), Elsewhere: NetworkElements(s.Elsewhere), Pods: NetworkElements(s.Pods),
		Underlay: devices(s.Underlay), Bridges: devices(s.Bridges),
	}
}

// NetworkElements are those of IPv4 as a Filter and a SourceNAT have them.
func NetworkElements(all []netip.Prefix) string { return networksOf(inOrder(all), netip.Addr.Is4) }

func inOrder(all []netip.Prefix) []netip.Prefix {
	if slices.IsSortedFunc(all, netip.Prefix.Compare) {
		return all
	}
	return slices.SortedFunc(slices.Values(all), netip.Prefix.Compare)
}

func networksOf(sorted []netip.Prefix, family func(netip.Addr) bool) string {
	var last netip.Prefix
	text := make([]byte, 0, len("255.255.255.255/32 ")*len(sorted))
	for _, p := range sorted { // a network sorts before those inside
		if family(p.Addr()) && !(last.IsValid() && last.Overlaps(p)) {
			last = p
			text = append(p.AppendTo(text), ' ')
		}
	}
	return string(bytes.TrimSuffix(text, []byte{' '}))
}

func addresses(all []netip.Addr) string {
	all = slices.DeleteFunc(slices.SortedFunc(slices.Values(all), netip.Addr.Compare), func(a netip.Addr) bool { return !a.Is4() })
	return AddressElements(slices.Compact(all))
}

// AddressElements are those of a set of addresses of IPv4, which are sorted.
func AddressElements(sorted []netip.Addr) string {
	text := make([]byte, 0, len("255.255.255.255 ")*len(sorted))
	for _, a := range sorted {
		text = append(a.AppendTo(text), ' ')
	}
	return string(bytes.TrimSuffix(text, []byte{' '}))
}

// FilterTable is the name of our tables: a Filter's family is inet, a SourceNAT's ip and a Bridge's
// bridge.
const FilterTable = "isthmus"

// FilterPriority is that of the chains with a hook, but prerouting: before foreign rules,
// which may still drop what these let pass. TranslationPriority is that of prerouting: after the
// connections are known (-200) and before others change destinations (-100). RawPriority is before
// the connections are known.
const (
	FilterPriority      = -1
	TranslationPriority = -150
	RawPriority         = -300
)

// A FilterChain is a chain of the table.
type FilterChain struct {
	Name, Hook string // without a hook others jump to it
	NAT        bool   // it translates
	// Drops is the reason for which its rules drop, each of which counts what it drops; empty: none does.
	Drops string
	Rules []FilterRule
}

// Priority is that of a chain with a hook.
func (c FilterChain) Priority() int {
	switch {
	case c.Name == "raw":
		return RawPriority
	case c.Hook == "prerouting":
		return TranslationPriority
	case c.NAT:
		return SourceNATPriority
	}
	return FilterPriority
}

// Kind is the type of a chain with a hook, as nft(8) has it.
func (c FilterChain) Kind() string {
	if c.NAT {
		return "nat"
	}
	return "filter"
}

// FilterChains are those of a node.
//
// What claims to be of the overlay is believed only when it comes from another node of the cluster,
// by the device that leads to that node: a pod or an underlay host with an ordinary UDP socket
// could otherwise send anything as anybody. No packet that is forwarded goes to the overlay's port,
// whether its source is translated later or not, and whether it comes from a pod of ours or of a
// peer. The gateway is the exception where it is a Pod; it has a filter of its own (PodFilterChains). To it go
// packets of other nodes, and none that came by the device of a pod: the CNI may hide a pod behind
// its node's address, and the gateway would believe it. What came by a bridge between nodes has been
// looked at by its port (Bridge), unless it was for another address then.
//
// The devices of ours that packets of peers come by are those of the overlay and of a gateway in
// this namespace (isthmus.host, or the TUNs isthmus0 and so on).
//
// What a peer sends is for pods and for mapped endpoints. To the node itself only answers come in,
// and what is for an address of its own outside the pods' networks, which a packet from a peer can
// only have when somebody mapped it. That is looked at before others change the destination, too:
// the ports of Services (NodePort) and of pods (hostPort) are at all addresses of a node, and lead
// on to pods, nodes and hosts outside that no peer may reach.
//
// Inside the overlay one end of a packet is a peer's and the other is not, unless it answers what was
// sent to a NodePort of the gateway's node, which puts its own address in the place of the peer's. What has a peer's
// source came out of the gateway: its node would otherwise carry there what a pod of its own made
// up.
//
// A pod of ours may say that it is anybody, and most CNIs carry that. What has a peer's source came
// out of the gateway, or over another node that brought it from there, and by no device of a pod,
// which is one end of a veth pair or a bridge. Nor does what is for a peer and has the source of a
// pod of another node: that may come from its node, to a NodePort here that leads to a peer. A source
// that no pod has (a container outside of Kubernetes has one) must have its route through the device
// that the packet came by. Otherwise one pod could send as thousands of hosts, take all of the
// gateway's NAPT ports towards a peer, and have the answers leave in the clear.
//
// Whatever leads a packet for a peer elsewhere (a foreign rule before ours, a route that a redirect
// made, somebody who took our routes away), it leaves by a device of ours or not at all. Within the
// node, by lo, it may go.
//
// A gateway that is a Pod answers the probes of agents (package overlay) with ICMP errors, which its
// node forwards. What they quote came inside VXLAN, so that the node knows no connection of it: the
// errors would be invalid, and kube-proxy drops what is. They belong to no connection on purpose, but
// at the node that they are for, which does know. No other error is: those from inside the tunnel are
// for pods, and come by the overlay.
//
// What most packets are comes first: each rule before costs a packet some 50 ns. Most are for no peer
// and from none, and the kernel searches a set of networks as a tree: 150 ns with ten peers, 300 with
// a thousand. So remote16, which it finds an address in by a hash, is asked before remote.
var FilterChains = []FilterChain{
	{Name: "remote", Drops: "peer_to_node", Rules: []FilterRule{
		{IsAnswer, DoAccept},
		{toOwn, DoAccept},
		{DoDrop},
	}},
	{Name: "translated", Drops: "peer_to_node", Rules: []FilterRule{
		{IsAnswer, DoAccept},
		{IsNotLocal, DoAccept},
		{toOwn, DoAccept},
		{DoDrop},
	}},
	{Name: "overlay", Drops: "overlay_stranger", Rules: []FilterRule{
		{NotFrom(OverlayDevice), DoAccept},
		{fromRemote, NotInSet(toRemote), DoAccept},
		{NotInSet(fromRemote), toRemote, DoAccept},
		{IsAnswer, DoAccept},
		{DoDrop},
	}},
	{Name: "bydevice", Drops: "forged_source", Rules: []FilterRule{
		{byUnderlay, DoAccept},
		{FromKind("veth"), DoDrop},
		{FromKind("bridge"), DoDrop},
		{DoAccept},
	}},
	{Name: "nopod", Rules: []FilterRule{
		{HasReturnPath, DoAccept},
		{Jump("bydevice")},
	}},
	{Name: "forged", Drops: "forged_source", Rules: []FilterRule{
		{To(OverlayDevice), DoDrop},
		{Jump("bydevice")},
	}},
	clearChain,
	{Name: "bridged", Drops: "overlay_port", Rules: []FilterRule{
		{IsTranslated, DoDrop},
		{DoAccept},
	}},
	{Name: "outer", Drops: "overlay_port", Rules: []FilterRule{
		{fromGateways, HasReturnPath, DoAccept},
		{toGateways, HasReturnPath, InSet{InDevice, "bridges"}, Jump("bridged")},
		{toGateways, HasReturnPath, Jump("bydevice")},
		{DoDrop},
	}},
	{Name: "answers", Rules: []FilterRule{
		{fromOurs, DoReturn},
		{IsLocal, DoReturn},
		{ICMPHead{11, 0}, DoNotTrack}, // time exceeded in transit
		{ICMPHead{3, 0}, DoNotTrack},  // no way to the network
		{ICMPHead{3, 1}, DoNotTrack},  // no way to the host
	}},
	{Name: "raw", Hook: "prerouting", Rules: []FilterRule{
		{IsICMP, fromGateways, HasReturnPath, Jump("answers")},
	}},
	{Name: "prerouting", Hook: "prerouting", Rules: []FilterRule{
		{fromOurs, Jump("translated")},
	}},
	inputChain,
	{Name: "forward", Hook: "forward", Rules: []FilterRule{
		{toOverlay, Jump("outer")},
		{fromOurs, Jump("overlay")},
		{fromNearRemote, fromRemote, Jump("forged")},
		{toNearRemote, InSet{Source, "elsewhere"}, toRemote, Jump("bydevice")},
		{toNearRemote, NotInSet{Source, "pods"}, toRemote, Jump("nopod")},
	}},
	leavingChain,
}

// PodFilterChains are those in the network of a gateway's Pod, under the names of a node's. Nothing is
// translated there, nothing of the overlay forwarded, and no peer has business with the Pod itself: so
// no rule asks for a connection, and without one that does the kernel does not track them. It would
// cost each packet of the overlay, of the tunnel and between them, and a flow through the gateway would
// have an entry in a table that is bounded for the whole machine.
var PodFilterChains = []FilterChain{
	{Name: "remote", Drops: "peer_to_node", Rules: []FilterRule{{DoDrop}}},
	{Name: "overlay", Drops: "overlay_stranger", Rules: []FilterRule{
		{NotFrom(OverlayDevice), DoAccept},
		{NotInSet(fromRemote), toRemote, DoAccept},
		{DoDrop},
	}},
	{Name: "forged", Drops: "forged_source", Rules: []FilterRule{{DoDrop}}},
	clearChain,
	{Name: "outer", Drops: "overlay_port", Rules: []FilterRule{{DoDrop}}},
	inputChain,
	{Name: "forward", Hook: "forward", Rules: []FilterRule{
		{toOverlay, Jump("outer")},
		{fromOurs, Jump("overlay")},
		{fromNearRemote, fromRemote, Jump("forged")},
	}},
	leavingChain,
}

// Chains both have.
var (
	clearChain = FilterChain{Name: "clear", Drops: "in_the_clear", Rules: []FilterRule{
		{toOurs, DoAccept},
		{To("lo"), DoAccept},
		{toRemote, DoDrop},
		{toRemote6, DoDrop},
	}}
	inputChain = FilterChain{Name: "input", Hook: "input", Drops: "overlay_source", Rules: []FilterRule{
		{toOverlay, InSet{Source, "nodes"}, HasReturnPath, DoAccept},
		{toOverlay, DoDrop},
		{fromOurs, Jump("remote")},
	}}
	leavingChain = FilterChain{Name: "leaving", Hook: "postrouting", Rules: []FilterRule{
		{toNearRemote, Jump("clear")},
		{toRemote6, Jump("clear")},
	}}
)

// Chains are the chains, those before that are jumped to.
func (f Filter) Chains() []FilterChain {
	if f.Pod {
		return PodFilterChains
	}
	return FilterChains
}

// DropReasons are the reasons for which rules of a Filter and of a Bridge drop, each with a sentence.
var DropReasons = []struct{ Reason, Explain string }{
	{"in_the_clear", "it is for a peer and would leave by a device that is not ours"},
	{"forged_source", "a pod sends with the address of a peer or of another node's pod, or to a peer with an address that its device does not lead to"},
	{"peer_to_node", "a peer sends to the node itself, or to a NodePort or hostPort"},
	{"overlay_source", "its sender to the overlay's port is not a node or gateway, or it came by another device than that leads there"},
	{"overlay_port", "a pod or a peer sends to the overlay's port"},
	{"bridged_overlay_port", "a pod on a bridge sends to a gateway's overlay port, possibly with VLAN tags"},
	{"overlay_stranger", "in the overlay, neither or both of its addresses belong to peers"},
}

// A FilterSet is a set of the table, as nft(8) takes it.
type FilterSet struct {
	Name, Type string
	Interval   bool   // of networks, not addresses
	Size       uint32 // at most so many elements; 0: as many as there are
	Elements   string // separated by spaces
}

// len16 is how many networks of length 16 there are. Linux has a faster hash for a set of which it
// knows the size: 1 MiB here, for 60 ns of each packet.
const len16 = 1 << 16

// Sets are the sets, always the same but for their elements.
func (f Filter) Sets() []FilterSet {
	return []FilterSet{
		{"nodes", "ipv4_addr", false, 0, f.Nodes},
		{"remote", "ipv4_addr", true, 0, f.Remote.Networks},
		{"remote16", "ipv4_addr", false, len16, f.Remote.Around},
		{"remote6", "ipv6_addr", true, 0, f.Remote.Networks6},
		{"own", "ipv4_addr", false, 0, f.Own},
		{"elsewhere", "ipv4_addr", true, 0, f.Elsewhere},
		{"pods", "ipv4_addr", true, 0, f.Pods},
		{"underlay", "ifname", false, 0, f.Underlay},
		{"bridges", "ifname", false, 0, f.Bridges},
		{"gateways", "ipv4_addr", false, 0, f.Gateways},
	}
}

// set is the field for the set of a name.
func (f *Filter) set(name string) *string {
	return map[string]*string{"nodes": &f.Nodes, "remote": &f.Remote.Networks, "remote16": &f.Remote.Around, "remote6": &f.Remote.Networks6, "own": &f.Own, "elsewhere": &f.Elsewhere, "pods": &f.Pods, "underlay": &f.Underlay, "bridges": &f.Bridges, "gateways": &f.Gateways}[name]
}

// WithSet returns the Filter with other elements in the set of a name.
func (f Filter) WithSet(name, elements string) Filter {
	*f.set(name) = elements
	return f
}

func (f Filter) command(remove bool, _ string) string {
	return nftCommand(remove, "inet", f.Sets(), f.Chains())
}
