package kernel

import (
	"bytes"
	"net/netip"
	"slices"
)

// Filter is an nftables table that keeps foreign packets out of the overlay. There are two fixed
// lists of chains: one for a node, and one for a gateway's Pod. Filters with the same chains differ
// only in the elements of their sets. Each field for a set is one text with all elements, sorted
// and separated by spaces, so that Filters are comparable.
type Filter struct {
	Pod       bool   // the filter is for a gateway's Pod
	Nodes     string // IPv4 addresses of nodes and gateways, from which overlay packets may come
	Remote    Remote // networks of peers
	Own       string // IPv4 addresses of our node that a peer may use as mapped endpoints
	Elsewhere string // IPv4 networks that contain pods of other nodes but none of ours
	Pods      string // IPv4 networks of all pods of the cluster
	Underlay  string // devices by which our node reaches the other nodes
	Bridges   string // bridges through which other nodes reach gateways, and whose pods a Bridge keeps away from gateways
	// Gateways are IPv4 addresses of gateways that are Pods. A node forwards overlay packets
	// between them and other nodes.
	Gateways string
}

// Remote has the networks of peers in the form of a Filter's sets.
type Remote struct {
	Networks  string // IPv4
	Networks6 string // IPv6
	// Around has the first address of each /16 network that overlaps Networks. If an address is in
	// none of these /16 networks, it is not in Networks either.
	Around string
}

// RemoteOf makes a Remote from networks in any order.
func RemoteOf(all []netip.Prefix) Remote {
	all = inOrder(all)
	return Remote{Networks: networksOf(all, netip.Addr.Is4), Networks6: networksOf(all, netip.Addr.Is6), Around: covering16(all)}
}

// covering16 returns the /16 networks that cover each network.
func covering16(sorted []netip.Prefix) string {
	var text []byte
	next := 0 // number of the next /16 network to consider
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

// FilterSets has the inputs of FilterFor, in any order.
type FilterSets struct {
	Pod                  bool // for a gateway's Pod, which only needs Nodes and Remote
	Nodes, Own, Gateways []netip.Addr
	Remote               []netip.Prefix
	Elsewhere, Pods      []netip.Prefix
	Underlay, Bridges    []string
}

// FilterFor makes a Filter. It leaves out networks that are inside other networks. Of the IPv6
// networks, it keeps only those of peers, because no packet for a peer may leave in the clear. The
// overlay does not carry IPv6, so the other sets need none.
func FilterFor(s FilterSets) Filter {
	return Filter{
		Pod: s.Pod, Nodes: addresses(s.Nodes), Own: addresses(s.Own), Gateways: addresses(s.Gateways),
		Remote: RemoteOf(s.Remote), Elsewhere: networkElements(s.Elsewhere), Pods: networkElements(s.Pods),
		Underlay: devices(s.Underlay), Bridges: devices(s.Bridges),
	}
}

// networkElements returns the IPv4 networks as elements of a Filter or a SourceNAT.
func networkElements(all []netip.Prefix) string { return networksOf(inOrder(all), netip.Addr.Is4) }

func inOrder(all []netip.Prefix) []netip.Prefix {
	if slices.IsSortedFunc(all, netip.Prefix.Compare) {
		return all
	}
	return slices.SortedFunc(slices.Values(all), netip.Prefix.Compare)
}

func networksOf(sorted []netip.Prefix, family func(netip.Addr) bool) string {
	var last netip.Prefix
	text := make([]byte, 0, len("255.255.255.255/32 ")*len(sorted))
	for _, p := range sorted { // in this order, a network precedes the networks inside it
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

// AddressElements returns sorted IPv4 addresses as elements of a set.
func AddressElements(sorted []netip.Addr) string {
	text := make([]byte, 0, len("255.255.255.255 ")*len(sorted))
	for _, a := range sorted {
		text = append(a.AppendTo(text), ' ')
	}
	return string(bytes.TrimSuffix(text, []byte{' '}))
}

// FilterTable is the name of our tables. The family of a Filter is inet, that of a SourceNAT is ip,
// and that of a Bridge is bridge.
const FilterTable = "isthmus"

// FilterPriority is the priority of all our chains with a hook, except prerouting. Our chains come
// before foreign chains, which may still drop packets that our chains accept. TranslationPriority
// is the priority of prerouting: after conntrack (-200), and before foreign rules translate
// destinations (-100). RawPriority is the priority of chains that must see packets before
// conntrack.
const (
	FilterPriority      = -1
	TranslationPriority = -150
	RawPriority         = -300
)

// A FilterChain is a chain of one of our tables.
type FilterChain struct {
	Name, Hook string // empty hook: other chains jump to it
	NAT        bool   // it translates addresses
	// Drops is the reason for which the chain's rules drop packets. It is empty if no rule drops
	// packets. Each rule counts the packets that it drops.
	Drops string
	Rules []FilterRule
}

// Priority returns the priority of a chain with a hook.
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

// Kind returns the type of a chain with a hook in nft(8).
func (c FilterChain) Kind() string {
	if c.NAT {
		return "nat"
	}
	return "filter"
}

// FilterChains are the chains of a node.
//
// Overlay packets must come from another node of the cluster, by the device that leads to that
// node. Otherwise a pod or an underlay host with an ordinary UDP socket could send packets with any
// inner source address. No forwarded packet may go to the overlay port, whether it comes from a pod
// of ours or from a peer, and even if its source is translated later. The exception is a gateway
// that is a Pod, which has its own filter (PodFilterChains). It receives packets of other nodes,
// but none from the device of a pod: the CNI may replace the source of a pod's packet by the node's
// address, and the gateway would trust that address. The table Bridge has checked packets from a
// bridge between nodes at their bridge port, unless their destination was translated later.
//
// Packets of peers arrive by our own devices: the overlay's device, and the devices of a gateway in
// this namespace (isthmus.host, or the TUNs isthmus0 and so on).
//
// A peer may send to pods and to mapped endpoints. The node itself accepts only two kinds of
// packets from peers: answers, and packets to its own addresses outside of the pods' networks. Such
// an address gets packets from peers only if it is a mapped endpoint. The rules make this check
// twice. The first check precedes foreign rules that translate the destination. Otherwise the ports
// of Services (NodePort) and of pods (hostPort), which exist at all addresses of a node, would lead
// to pods, nodes and hosts that a peer may not reach.
//
// Inside the overlay, exactly one address of a packet belongs to a peer. The exception is an answer
// to a packet for a NodePort of the gateway's node: it has no address of a peer, because that node
// has replaced the peer's address by its own. Packets with a peer's source come from the gateway.
// If one of the node's own pods forges such a source, the gateway's node must not forward the
// packet.
//
// A pod of ours may forge its source address, and most CNIs forward such packets. A packet with a
// peer's source must come from the gateway, or from another node that forwards it for the gateway.
// It must not come from the device of a pod, which is one end of a veth pair or a bridge. The same
// holds for a packet to a peer if the packet's source is a pod of another node. Such a packet may
// come from that other node, because it may have been sent to a NodePort of our node that leads to
// a peer. The source of a packet to a peer may also be an address that no pod has, such as that of
// a container outside of Kubernetes. Then the packet must come from the device to which the route
// to that address leads. Otherwise one pod could send as thousands of hosts, use up all of the
// gateway's NAPT ports towards a peer, and make the answers leave in the clear.
//
// A packet for a peer leaves by one of our devices or not at all, even if another rule or route
// sends it elsewhere: a foreign rule before ours, a route from a redirect, or the default route
// after the loss of our routes. It may leave by lo, within the node.
//
// A gateway that is a Pod responds to the probes of agents (package overlay) with ICMP errors,
// which its node forwards. The errors quote packets that arrived inside VXLAN, so the node tracks
// no connection for them. Conntrack would mark the errors as invalid, and kube-proxy drops invalid
// packets. Therefore the errors are not tracked, except at their destination node, which has the
// connection. No other ICMP errors are affected: errors from inside the tunnel are for pods, and
// arrive by the overlay.
//
// The most common matches come first, because each rule costs a packet some 50 ns. Most packets are
// neither for a peer nor from one. The kernel searches a set of networks as a tree, in 150 ns with
// ten peers and in 300 ns with a thousand. Therefore remote16, which is a hash, is matched before
// remote.
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
		{ICMPHead{3, 0}, DoNotTrack},  // network unreachable
		{ICMPHead{3, 1}, DoNotTrack},  // host unreachable
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

// PodFilterChains are the chains in the network namespace of a gateway's Pod. They have the names
// of a node's chains. That namespace translates nothing and forwards no overlay packets, and peers
// may not send to the Pod itself. Therefore no rule matches connections, and the kernel does not
// track any. Tracking would cost time for every packet of the overlay and of the tunnel. Each flow
// through the gateway would also take an entry in a table that is limited for the whole machine.
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

// Chains that nodes and gateways' Pods share.
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

// Chains returns the chains. A chain comes before those that jump to it.
func (f Filter) Chains() []FilterChain {
	if f.Pod {
		return PodFilterChains
	}
	return FilterChains
}

// DropReasons are the reasons for which rules of a Filter and of a Bridge drop packets, each with
// an explanation for users.
var DropReasons = []struct{ Reason, Explain string }{
	{"in_the_clear", "a packet for a peer would leave the node outside the tunnel"},
	{"forged_source", "a pod sends from an address of a peer or of another node's pod, or sends to a peer from an address that the node does not route to this pod"},
	{"peer_to_node", "a peer sends to the node itself, or to a NodePort or hostPort"},
	{"overlay_source", "the source of a packet to the overlay's port is neither a node nor a gateway, or is not reachable through the device on which the packet arrived"},
	{"overlay_port", "a pod or a peer sends to the overlay's port"},
	{"bridged_overlay_port", "a pod on a bridge sends to a gateway's overlay port, possibly with VLAN tags"},
	{"overlay_stranger", "both addresses of a packet in the overlay belong to peers, or neither does"},
}

// A FilterSet is a set of a table. The fields have the terms of nft(8).
type FilterSet struct {
	Name, Type string
	Interval   bool   // the elements are networks rather than addresses
	Size       uint32 // maximum number of elements; 0: unlimited
	Elements   string // separated by spaces
}

// len16 is the number of all /16 networks of IPv4. Linux has a faster hash for a set of known size:
// it takes 1 MiB here, and saves each packet 60 ns.
const len16 = 1 << 16

// Sets returns the sets of the table. Only their elements differ between Filters.
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

// set returns a pointer to the field that has the elements of the named set.
func (f *Filter) set(name string) *string {
	return map[string]*string{"nodes": &f.Nodes, "remote": &f.Remote.Networks, "remote16": &f.Remote.Around, "remote6": &f.Remote.Networks6, "own": &f.Own, "elsewhere": &f.Elsewhere, "pods": &f.Pods, "underlay": &f.Underlay, "bridges": &f.Bridges, "gateways": &f.Gateways}[name]
}

// WithSet returns the Filter with other elements in the named set.
func (f Filter) WithSet(name, elements string) Filter {
	*f.set(name) = elements
	return f
}

func (f Filter) command(remove bool, _ string) string {
	return nftCommand(remove, "inet", f.Sets(), f.Chains())
}
