package fabric

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// Everything the route agent owns in a node's kernel. Anything else is foreign.
// None of these is Liqo's (liqo.vxlan, 18952, 4879) nor the gateway's (4200, 71),
// so that all three can be on one node.
const (
	OverlayDevice = "isthmus.vxlan" // VXLAN between the nodes of one cluster
	OverlayID     = 4200            // its VNI
	OverlayPort   = 4800            // its UDP port

	NodeTable    = 4201 // routes to remote networks, or to pods on other nodes
	NodeProtocol = 72   // RTA_PROTOCOL and FRA_PROTOCOL of everything the agent adds

	// What comes out of the overlay goes into the gateway, if there is one here,
	// and never back into the overlay: two nodes that disagree for a moment about
	// where the gateway is do not play ping-pong.
	OverlayRulePriority = 4198
	// The agent's rules come before the gateway's, 4200, because a gateway that was
	// killed leaves routes behind that refuse traffic. They are right until another
	// gateway is active on another node; from then on they must not be asked.
	NodeRulePriority = 4199

	// GatewayTable is gateway.RouteTable, which leads to the gateway on its node.
	GatewayTable = 4200

	mainTable = 254
	// unreachableMetric is worse than that of every route with a device. The
	// routes without one outlive the device: traffic for a peer is then refused
	// instead of leaving by the default route in the clear.
	unreachableMetric = 420000

	// overlayOverhead is what VXLAN adds over IPv4: 20 IP, 8 UDP, 8 VXLAN, 14
	// Ethernet. WireGuard adds 60, so a packet that fits a tunnel over the same
	// underlay always fits the overlay.
	overlayOverhead = 50
	defaultUnderlay = 1500
	minOverlayMTU   = 576 // RFC 791; on a smaller underlay the outer packets are fragmented
)

// overlayNetwork holds the overlay addresses of the nodes. It is class E, which
// Linux routes like any other and hardly anybody else uses.
var overlayNetwork = netip.MustParsePrefix("240.0.0.0/8")

// NodeIntent is the complete snapshot from which a node of a cluster knows what
// it has to do. Lists are in any order.
type NodeIntent struct {
	Self string // name of our node
	// UnderlayMTU is that of the device with our node's address, in octets; 0 means 1500.
	UnderlayMTU int
	Nodes       []ClusterNode
	Pods        []NodePod
	Tunnels     []Tunnel
}

// Sort brings the lists into an order that depends on nothing but what is in
// them, so that equal intents are reflect.DeepEqual.
func (in *NodeIntent) Sort() {
	slices.SortFunc(in.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(in.Pods, func(a, b NodePod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Created, b.Created))
	})
	slices.SortFunc(in.Tunnels, func(a, b Tunnel) int { return a.Peer.Origin.compare(b.Peer.Origin) })
}

// ClusterNode is one node of our own cluster.
type ClusterNode struct {
	Name     string
	Addrs    []netip.Addr   // InternalIPs, the node's first choice first
	PodCIDRs []netip.Prefix // networks of which the node gives addresses to its pods, if it has such
	Created  int64          // seconds since 1970; of two nodes that contradict each other the older is kept
}

// Underlay is the address between which the overlay runs: the first of IPv4, zero
// if there is none.
func (n ClusterNode) Underlay() netip.Addr {
	for _, a := range n.Addrs {
		if a.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// NodePod is one address of a pod with a network of its own (not the host's).
type NodePod struct {
	Addr    netip.Addr
	Node    string // where it runs; empty: nowhere yet
	Created int64  // seconds since 1970; of two pods with one address the younger has it
}

// A Tunnel is a peer and the node by which it is reached.
type Tunnel struct {
	Peer    Peer
	Gateway netip.Addr // status.gatewayIP, an InternalIP of a node; zero: no gateway is active yet
}

// TunnelFrom reads a TunnelEndpoint as PeerFrom does, and where its gateway is.
// With any problem the tunnel is zero.
func TunnelFrom(te *v1alpha1.TunnelEndpoint, o Origin) (Tunnel, []Problem) {
	peer, problems := PeerFrom(te, o)
	r := report{origin: o, problems: problems}
	var gateway netip.Addr
	if s := te.Status.GatewayIP; s != "" {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() {
			r.add("status.gatewayIP", "%s is no address; want the InternalIP of the node with the active gateway", quote(s))
		}
		gateway = a
	}
	if len(r.problems) > 0 {
		return Tunnel{}, SortProblems(r.problems)
	}
	return Tunnel{peer, gateway}, nil
}

// MAC is an Ethernet address.
type MAC [6]byte

// String returns six hexadecimal octets with colons.
func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// OverlayMAC is the MAC address of a node's overlay device, so that the others
// know it without asking: 0x66, which is a locally administered unicast address,
// and five octets of a hash. Liqo has the same with another hash.
func OverlayMAC(node string) MAC {
	sum := sha256.Sum256([]byte("isthmus-" + node))
	return MAC{0x66, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// OverlayAddr is a node's address in the overlay, as in Liqo: 240 and the last
// three octets of the node's IPv4 address.
func OverlayAddr(node netip.Addr) netip.Addr {
	a := node.As4()
	a[0] = overlayNetwork.Addr().As4()[0]
	return netip.AddrFrom4(a)
}

// Node is what the route agent of one node has to make true, complete and
// sorted: what is not in it has to go. The order of the fields is the order in
// which to add.
type Node struct {
	Devices   []Device // none or one
	Sysctls   []Sysctl
	Links     []Link // none or one
	Addresses []Address
	FDB       []FDBEntry
	Neighbors []Neighbor
	Routes    []Route
	Rules     []Rule
}

// The kinds of kernel objects. Each is a comparable value, so "the same" is ==.
type (
	// Device is the overlay device with what the kernel does not let change.
	Device struct {
		ID       uint32
		Port     uint16
		Local    netip.Addr
		Learning bool
	}
	// Link is what can be changed of the overlay device.
	Link struct {
		MAC MAC
		MTU int
		Up  bool
	}
	// Sysctl is a value in the file below /proc/sys.
	Sysctl struct{ Path, Value string }
	// Address is one of the overlay device.
	Address struct{ Prefix netip.Prefix }
	// FDBEntry says behind which node a MAC address is.
	FDBEntry struct {
		MAC  MAC
		Node netip.Addr
	}
	// Neighbor says which MAC address an overlay address has.
	Neighbor struct {
		Addr netip.Addr
		MAC  MAC
	}
	// Route is one of the table, or of the main table, with NodeProtocol.
	Route struct {
		Prefix netip.Prefix
		Kind   RouteKind
		Via    netip.Addr // ViaOverlay only
		Table  int
		Metric int
	}
	// Rule is an IPv4 policy rule. Zero fields do not select.
	Rule struct {
		Priority int
		In       string // device that the packet came by
		From, To netip.Prefix
		Table    int
	}
)

// RouteKind says what a Route does with a packet.
type RouteKind uint8

// The kinds of routes.
const (
	ViaOverlay  RouteKind = iota // to the node Via
	OnOverlay                    // whoever has the address is in the overlay
	Unreachable                  // the sender is told so
	Throw                        // the next rule is asked
)

// NodeFor decides what our node has to be.
//
// On a node without the gateway, packets for a remote network go through the
// overlay to the gateway's node. On the gateway's node packets from a remote
// network go through the overlay to the pod's node: the way its answers come, so
// that neither strict rp_filter nor a cloud's anti-spoofing sees an address where
// it does not expect it. Traffic within the cluster is not touched.
//
// Which peers count is decided by GatewayFor, as in the gateway. A network that
// contains a node is refused, since the overlay's own packets would go into the
// overlay. Of two nodes with one overlay address the older one has it. When our
// node is not among in.Nodes, the Node is zero and the only Problem says so.
func NodeFor(in NodeIntent) (Node, []Problem) {
	nodes := slices.SortedFunc(slices.Values(in.Nodes), func(a, b ClusterNode) int {
		return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
	})
	at := slices.IndexFunc(nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	if at < 0 {
		return Node{}, []Problem{{Origin{Kind: "Node", Name: in.Self}, "", "is not there; want the name of the Node on which the agent runs"}}
	}
	d := nodeDecision{self: nodes[at], nodes: nodes}
	d.findOverlays()
	if own, ok := d.overlay[in.Self]; ok {
		d.addOverlay(own, in.UnderlayMTU)
	}
	if d.addTunnels(in.Tunnels) {
		d.addPods(in.Pods)
	}
	d.node.sort()
	return d.node, SortProblems(d.problems)
}

type nodeDecision struct {
	self     ClusterNode
	nodes    []ClusterNode         // the oldest first
	overlay  map[string]netip.Addr // overlay addresses by name of the node
	node     Node
	problems []Problem
}

func (d *nodeDecision) problem(o Origin, field, format string, args ...any) {
	d.problems = append(d.problems, Problem{o, field, fmt.Sprintf(format, args...)})
}

// findOverlays gives nodes their overlay addresses.
func (d *nodeDecision) findOverlays() {
	d.overlay = make(map[string]netip.Addr, len(d.nodes))
	taken := make(map[netip.Addr]ClusterNode, len(d.nodes))
	for _, n := range d.nodes {
		o, addr := Origin{Kind: "Node", Name: n.Name}, n.Underlay()
		if !addr.IsValid() {
			d.problem(o, "status.addresses", "has no InternalIP of IPv4; want one, because the overlay between nodes runs over IPv4")
			continue
		}
		overlay := OverlayAddr(addr)
		if host := overlay.As4(); host == [4]byte{240, 0, 0, 0} || host == [4]byte{240, 255, 255, 255} {
			d.problem(o, "status.addresses", "%v would have %v in the overlay, which no host can have; want another address", addr, overlay)
			continue
		}
		if first, clash := taken[overlay]; clash {
			d.problem(o, "status.addresses", "%v and %v of Node %s would both have %v in the overlay; want addresses that differ in the last three octets",
				addr, first.Underlay(), first.Name, overlay)
			continue
		}
		taken[overlay] = n
		d.overlay[n.Name] = overlay
	}
}

// addOverlay adds our overlay device and the way to every other node.
func (d *nodeDecision) addOverlay(own netip.Addr, underlayMTU int) {
	if underlayMTU == 0 {
		underlayMTU = defaultUnderlay
	}
	mtu := min(max(underlayMTU-overlayOverhead, minOverlayMTU), 65535-overlayOverhead)
	s := &d.node
	s.Devices = []Device{{ID: OverlayID, Port: OverlayPort, Local: d.self.Underlay()}}
	s.Links = []Link{{MAC: OverlayMAC(d.self.Name), MTU: mtu, Up: true}}
	s.Sysctls = []Sysctl{
		{"net/ipv4/conf/" + OverlayDevice + "/forwarding", "1"},
		{"net/ipv4/conf/" + OverlayDevice + "/rp_filter", "2"}, // a pod of another node comes by it before we know where that pod is
	}
	s.Addresses = []Address{{netip.PrefixFrom(own, overlayNetwork.Bits())}}
	s.Routes = append(s.Routes, Route{Prefix: overlayNetwork, Kind: OnOverlay, Table: mainTable})
	s.Rules = append(s.Rules, Rule{Priority: OverlayRulePriority, In: OverlayDevice, Table: GatewayTable})
	for _, n := range d.nodes {
		if addr, ok := d.overlay[n.Name]; ok && n.Name != d.self.Name {
			mac := OverlayMAC(n.Name)
			s.FDB = append(s.FDB, FDBEntry{mac, n.Underlay()})
			s.Neighbors = append(s.Neighbors, Neighbor{addr, mac})
		}
	}
}

// addTunnels adds rules and routes for the remote networks; here says that a
// gateway is on our node.
func (d *nodeDecision) addTunnels(tunnels []Tunnel) (here bool) {
	peers := make([]Peer, len(tunnels))
	gateways := make(map[Origin]netip.Addr, len(tunnels))
	for i, t := range tunnels {
		peers[i] = t.Peer
		gateways[t.Peer.Origin] = t.Gateway
	}
	byAddr := make(map[netip.Addr]ClusterNode, len(d.nodes))
	var addrs []netip.Addr
	for _, n := range d.nodes {
		for _, a := range n.Addrs {
			if _, taken := byAddr[a]; !taken {
				byAddr[a] = n
				addrs = append(addrs, a)
			}
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)

	kept, problems := GatewayFor(Intent{Peers: peers}, 0)
	d.problems = append(d.problems, problems...)
	for i := range kept.Peers {
		p := &kept.Peers[i]
		gateway := gateways[p.Origin]
		if !gateway.IsValid() {
			continue // as Liqo's agent: nothing before there is a gateway
		}
		if !d.carries(p, addrs, byAddr) {
			continue
		}
		where, known := byAddr[gateway]
		if !known {
			d.problem(p.Origin, "status.gatewayIP", "%v is no node's InternalIP; want that of the node with the active gateway", gateway)
		}
		if known && where.Name == d.self.Name {
			here = true
			for _, prefix := range p.AllowedIPs {
				d.node.Rules = append(d.node.Rules, Rule{Priority: NodeRulePriority, From: prefix, Table: NodeTable})
			}
			continue
		}
		via, reachable := d.overlay[where.Name]
		for _, prefix := range p.AllowedIPs {
			d.node.Rules = append(d.node.Rules, Rule{Priority: NodeRulePriority, To: prefix, Table: NodeTable})
			if reachable && len(d.node.Devices) > 0 {
				d.node.Routes = append(d.node.Routes, Route{Prefix: prefix, Kind: ViaOverlay, Via: via, Table: NodeTable})
			}
			d.node.Routes = append(d.node.Routes, Route{Prefix: prefix, Kind: Unreachable, Table: NodeTable, Metric: unreachableMetric})
		}
	}
	return here
}

// carries says whether the overlay can carry the networks of a peer. addrs are
// those of all nodes, sorted.
func (d *nodeDecision) carries(p *GatewayPeer, addrs []netip.Addr, nodes map[netip.Addr]ClusterNode) bool {
	before := len(d.problems)
	for i, prefix := range p.AllowedIPs {
		field := [2]string{"spec.remotePodCIDR", "spec.remoteExternalCIDR"}[i]
		if own := [2]netip.Prefix{p.Remote.Pod, p.Remote.External}[i]; own != prefix {
			field = [2]string{"spec.remoteNATPodCIDR", "spec.remoteNATExternalCIDR"}[i]
		}
		first, _ := slices.BinarySearchFunc(addrs, prefix.Addr(), netip.Addr.Compare)
		switch {
		case first < len(addrs) && prefix.Contains(addrs[first]):
			d.problem(p.Origin, field, "%v contains %v, the address of Node %s; want a network without nodes", prefix, addrs[first], nodes[addrs[first]].Name)
		case prefix.Overlaps(overlayNetwork):
			d.problem(p.Origin, field, "%v overlaps %v, the overlay between the nodes; want a network outside", prefix, overlayNetwork)
		case prefix.Addr().Is6() && len(d.nodes) > 1:
			d.problem(p.Origin, field, "%v is IPv6, which the overlay between nodes does not carry; only pods on the gateway's node reach it", prefix)
		case prefix.Addr().Is6():
			return false // nothing to carry
		}
	}
	return len(d.problems) == before
}

// addPods adds the routes to pods on other nodes, for the rules of the gateway's
// node: one for the network of each node, and one for each pod that is not where
// these networks say. A CNI with an address management of its own has many such.
func (d *nodeDecision) addPods(pods []NodePod) {
	type network struct {
		prefix netip.Prefix
		node   string
	}
	var networks []network // disjoint, sorted
	find := func(p netip.Prefix) (at int, overlapped string, overlaps bool) {
		at, _ = slices.BinarySearchFunc(networks, p, func(n network, p netip.Prefix) int { return n.prefix.Addr().Compare(p.Addr()) })
		for i := max(at-1, 0); i <= at && i < len(networks); i++ { // disjoint prefixes: both neighbours are enough
			if networks[i].prefix.Overlaps(p) {
				return at, networks[i].node, true
			}
		}
		return at, "", false
	}
	isNode := make(map[netip.Addr]bool, len(d.nodes))
	for _, n := range d.nodes {
		for _, a := range n.Addrs {
			isNode[a] = true
		}
		for _, p := range n.PodCIDRs {
			if !p.IsValid() || !p.Addr().Is4() {
				continue
			}
			p = p.Masked()
			at, other, overlaps := find(p)
			if overlaps && other != n.Name {
				d.problem(Origin{Kind: "Node", Name: n.Name}, "spec.podCIDRs", "%v overlaps a network of Node %s; want one of its own", p, other)
			}
			if overlaps {
				continue
			}
			networks = slices.Insert(networks, at, network{p, n.Name})
			if via, ok := d.overlay[n.Name]; ok && n.Name != d.self.Name && len(d.node.Devices) > 0 {
				d.node.Routes = append(d.node.Routes, Route{Prefix: p, Kind: ViaOverlay, Via: via, Table: NodeTable})
			}
		}
	}
	pods = slices.SortedFunc(slices.Values(pods), func(a, b NodePod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(b.Created, a.Created), cmp.Compare(a.Node, b.Node))
	})
	pods = slices.CompactFunc(pods, func(a, b NodePod) bool { return a.Addr == b.Addr })
	for _, p := range pods {
		if !p.Addr.Is4() || p.Node == "" || isNode[p.Addr] {
			continue
		}
		host := netip.PrefixFrom(p.Addr, 32)
		_, owner, covered := find(host)
		via, reachable := d.overlay[p.Node]
		reachable = reachable && p.Node != d.self.Name && len(d.node.Devices) > 0
		switch {
		case covered && owner == p.Node:
		case reachable:
			d.node.Routes = append(d.node.Routes, Route{Prefix: host, Kind: ViaOverlay, Via: via, Table: NodeTable})
		case covered && owner != d.self.Name:
			d.node.Routes = append(d.node.Routes, Route{Prefix: host, Kind: Throw, Table: NodeTable})
		}
	}
}

func (n *Node) sort() {
	slices.SortFunc(n.FDB, func(a, b FDBEntry) int { return a.Node.Compare(b.Node) })
	slices.SortFunc(n.Neighbors, func(a, b Neighbor) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(n.Routes, func(a, b Route) int {
		return cmp.Or(cmp.Compare(a.Table, b.Table), a.Prefix.Compare(b.Prefix), cmp.Compare(a.Metric, b.Metric))
	})
	slices.SortFunc(n.Rules, func(a, b Rule) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), a.From.Compare(b.From), a.To.Compare(b.To), cmp.Compare(a.In, b.In))
	})
}

// String prints the node as commands that an operator could type, in the order
// in which to type them.
func (n Node) String() string {
	var b strings.Builder
	line := func(command string) { b.WriteString(command + "\n") }
	for _, v := range n.Devices {
		line(v.Add())
	}
	for _, v := range n.Sysctls {
		line(v.Add())
	}
	for _, v := range n.Links {
		line(v.Add())
	}
	for _, v := range n.Addresses {
		line(v.Add())
	}
	for _, v := range n.FDB {
		line(v.Add())
	}
	for _, v := range n.Neighbors {
		line(v.Add())
	}
	for _, v := range n.Routes {
		line(v.Add())
	}
	for _, v := range n.Rules {
		line(v.Add())
	}
	return b.String()
}

// Add returns the command that makes the device.
func (d Device) Add() string {
	learning := "nolearning"
	if d.Learning {
		learning = "learning"
	}
	return fmt.Sprintf("ip link add %s type vxlan id %d local %v dstport %d %s", OverlayDevice, d.ID, d.Local, d.Port, learning)
}

// Del returns the command that removes the device, and all that hangs on it.
func (d Device) Del() string { return "ip link del " + OverlayDevice }

// Add returns the command that sets the link.
func (l Link) Add() string {
	state := "down"
	if l.Up {
		state = "up"
	}
	return fmt.Sprintf("ip link set %s address %v mtu %d %s", OverlayDevice, l.MAC, l.MTU, state)
}

// Del returns "": the link goes with the device.
func (l Link) Del() string { return "" }

// Add returns the command that sets the value.
func (s Sysctl) Add() string { return "sysctl -w " + s.Path + "=" + s.Value }

// Del returns "": a value has no absence.
func (s Sysctl) Del() string { return "" }

// Add returns the command that adds the address. The route to its network is
// among the routes, where it can be told from a foreign one.
func (a Address) Add() string {
	return fmt.Sprintf("ip addr replace %v dev %s noprefixroute", a.Prefix, OverlayDevice)
}

// Del returns the command that removes the address.
func (a Address) Del() string { return fmt.Sprintf("ip addr del %v dev %s", a.Prefix, OverlayDevice) }

// Add returns the command that adds the entry.
func (f FDBEntry) Add() string {
	return fmt.Sprintf("bridge fdb replace %v dev %s dst %v self permanent", f.MAC, OverlayDevice, f.Node)
}

// Del returns the command that removes the entry.
func (f FDBEntry) Del() string {
	return fmt.Sprintf("bridge fdb del %v dev %s dst %v self", f.MAC, OverlayDevice, f.Node)
}

// Add returns the command that adds the neighbour.
func (n Neighbor) Add() string {
	return fmt.Sprintf("ip neigh replace %v lladdr %v dev %s nud permanent", n.Addr, n.MAC, OverlayDevice)
}

// Del returns the command that removes the neighbour.
func (n Neighbor) Del() string { return fmt.Sprintf("ip neigh del %v dev %s", n.Addr, OverlayDevice) }

// Add returns the command that adds the route.
func (r Route) Add() string { return r.command("replace") }

// Del returns the command that removes the route.
func (r Route) Del() string { return r.command("del") }

func (r Route) command(verb string) string {
	c := "ip route " + verb + " "
	switch r.Kind {
	case ViaOverlay:
		c += fmt.Sprintf("%v via %v dev %s onlink", r.Prefix, r.Via, OverlayDevice)
	case OnOverlay:
		c += fmt.Sprintf("%v dev %s", r.Prefix, OverlayDevice)
	case Unreachable:
		c += fmt.Sprintf("unreachable %v", r.Prefix)
	case Throw:
		c += fmt.Sprintf("throw %v", r.Prefix)
	}
	if r.Table != mainTable {
		c += fmt.Sprintf(" table %d", r.Table)
	}
	if r.Metric != 0 {
		c += fmt.Sprintf(" metric %d", r.Metric)
	}
	return c + fmt.Sprintf(" proto %d", NodeProtocol)
}

// Add returns the command that adds the rule.
func (r Rule) Add() string { return r.command("add") }

// Del returns the command that removes the rule.
func (r Rule) Del() string { return r.command("del") }

func (r Rule) command(verb string) string {
	c := fmt.Sprintf("ip rule %s priority %d", verb, r.Priority)
	if r.From.IsValid() {
		c += fmt.Sprintf(" from %v", r.From)
	}
	if r.To.IsValid() {
		c += fmt.Sprintf(" to %v", r.To)
	}
	if r.In != "" {
		c += " iif " + r.In
	}
	return c + fmt.Sprintf(" lookup %d protocol %d", r.Table, NodeProtocol)
}
