package fabric

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

const (
	// overlayOverhead is the size of the headers that VXLAN adds over IPv4, in octets: 20 IP, 8
	// UDP, 8 VXLAN, 14 Ethernet. WireGuard adds 60, so a packet that fits a tunnel over the same
	// underlay always fits the overlay.
	overlayOverhead = 50
	defaultUnderlay = 1500
	minOverlayMTU   = 576 // RFC 791; on a smaller underlay the outer packets are fragmented
)

// overlayNetwork holds the overlay addresses of the nodes. It is class E, which Linux routes like
// any other network, and which is hardly used elsewhere.
var overlayNetwork = netip.MustParsePrefix("240.0.0.0/8")

// gatewayHop is the next hop of a node's routes to a gateway that is a Pod. Its neighbour entry has
// the MAC address of the active gateway, so a failover changes only this entry. The routes stay,
// however many peers there are. It is the IPv4 dummy address (RFC 7600, section 4.8), which no
// packet has.
var gatewayHop = netip.AddrFrom4([4]byte{192, 0, 0, 8})

// OverlayMAC returns the MAC address of a node's overlay device: 0x66, which marks a locally
// administered unicast address, and five octets of a hash of the node's name. Other nodes compute
// this address themselves, so they need no ARP. Liqo does the same with another hash.
func OverlayMAC(node string) kernel.MAC {
	sum := sha256.Sum256([]byte("isthmus-" + node))
	return kernel.MAC{0x66, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// OverlayAddr returns a node's address in the overlay, as in Liqo: 240 and the last three octets of
// the node's IPv4 address.
func OverlayAddr(node netip.Addr) netip.Addr {
	a := node.As4()
	a[0] = overlayNetwork.Addr().As4()[0]
	return netip.AddrFrom4(a)
}

// NodeFor computes the desired kernel state of our node.
//
// If the gateway is a Pod with its own network, each node sends packets for peers through the
// overlay to that Pod. The Pod sends packets from peers through the overlay to the node of the
// destination pod.
//
// If the gateway uses the host's network, the other nodes send packets for peers through the
// overlay to the gateway's node. That node sends packets from peers through the overlay to the node
// of the destination pod.
//
// Requests and answers take the same path, so strict rp_filter and a cloud's anti-spoofing do not
// drop them. Traffic within the cluster does not change. Packets for a peer's network never take
// another path. As soon as the network is allocated, the node refuses packets for which it has no
// path. A path is missing if there is no gateway yet, if GatewayFor refuses the peer, or if IPv6
// packets would need the overlay, which does not carry IPv6. The gateway's node also refuses
// packets from peers to pods that the overlay does not reach.
//
// GatewayFor decides which peers are valid, as in the gateway. If the address of a node lies inside
// a peer's network, NodeFor ignores this address. If two nodes have the same overlay address, the
// older one keeps it. If our node is not among in.Nodes, the State only refuses packets, and a
// Problem reports that.
func NodeFor(in NodeIntent) (kernel.State, []Problem) { return new(Decider).NodeFor(in) }

// A Decider computes the state for successive intents. There may be thousands of routes for
// networks of peers, so a Decider reuses them until these networks change. The zero value is ready.
// Only one goroutine may use it, and callers must not modify the result.
type Decider struct {
	refused []netip.Prefix
	src     netip.Addr     // source of the routes to the gateway; zero: no such routes
	made    bool           // routes were computed for refused and src
	routes  []kernel.Route // in the order of Route.Compare
	remote  kernel.Remote  // the networks in refused, as sets of the filter
}

// NodeFor is a faster form of the function NodeFor.
func (m *Decider) NodeFor(in NodeIntent) (kernel.State, []Problem) {
	nodes := slices.SortedFunc(slices.Values(in.Nodes), olderNode)
	at := slices.IndexFunc(nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	d := nodeDecision{nodes: nodes, onlyPods: in.OnlyPods, oneGateway: in.OnlyPods && in.Gateway.IsValid(), refused: in.Refused()}
	if at < 0 {
		d.problem(Origin{Kind: "Node", Name: in.Self}, "", "does not exist; want the name of the Node on which the agent runs")
		return RefusingState(d.refused), d.problems
	}
	d.node.Rules = refusingRules(d.refused)
	m.setRefused(d.refused)
	d.remote = m.remote
	d.dropRemoteAddrs()
	d.self = nodes[at]
	d.selectGateways(in)
	d.findOverlays()
	if own, ok := d.overlay[in.Self]; ok {
		d.addOverlay(own, in.UnderlayMTU)
	}
	if d.onlyPods {
		nodes = nodes[at : at+1]
	}
	d.trusted = d.onlyPods && in.Trusted || podCIDRsHold(nodes, in.Self, in.Pods)
	ownPods := in.PodNetworks()
	d.addFilter(ownPods, in)
	d.addSourceNAT(in, ownPods)
	d.nameStrangers(in, ownPods)
	var own, local []netip.Prefix
	if d.oneGateway {
		d.toGateway(in.Gateway)
	} else {
		own, local = d.addTunnels(in.Tunnels)
	}
	if len(local) > 0 {
		d.addPods(in.Pods, own)
		d.addRoutes(in.Routes, own)
	}
	d.guard(local)
	if routes := m.peers(d.refused, d.src); len(d.node.Routes) == 0 {
		d.sort()
		d.node.Routes = routes // already sorted
	} else {
		d.node.Routes = append(d.node.Routes, routes...)
		d.sort()
	}
	return d.node, SortProblems(d.problems)
}

// setRefused discards the cached routes if the refused networks have changed.
func (m *Decider) setRefused(refused []netip.Prefix) {
	if !m.made || !slices.Equal(refused, m.refused) {
		*m = Decider{refused: refused, remote: kernel.RemoteOf(refused)}
	}
}

// peers returns the routes for all networks of peers: routes to the gateway, if src is valid, and
// routes that refuse packets. It caches the result.
func (m *Decider) peers(refused []netip.Prefix, src netip.Addr) []kernel.Route {
	if m.made && src == m.src {
		return m.routes
	}
	m.made, m.src = true, src
	m.routes = make([]kernel.Route, 0, 2*len(refused)+2)
	for _, p := range refused {
		if src.IsValid() && p.Addr().Is4() {
			m.routes = append(m.routes, kernel.Route{Prefix: p, Via: gatewayHop, Src: src, Dev: kernel.OverlayDevice, Table: kernel.NodeTable, Protocol: kernel.NodeProtocol})
		}
	}
	m.routes = appendRefusing(m.routes, refused)
	for _, everything := range everythingOf(refused) {
		m.routes = append(m.routes, kernel.Route{Prefix: everything, Type: kernel.Unreachable, Table: kernel.GuardTable, Metric: kernel.UnreachableMetric, Protocol: kernel.NodeProtocol})
	}
	return m.routes
}

// everythingOf returns 0.0.0.0/0 if any of the networks is IPv4, and ::/0 if any of them is IPv6.
func everythingOf(networks []netip.Prefix) (all []netip.Prefix) {
	for _, none := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		sameFamily := func(p netip.Prefix) bool { return p.Addr().BitLen() == none.BitLen() }
		if slices.ContainsFunc(networks, sameFamily) {
			all = append(all, netip.PrefixFrom(none, 0))
		}
	}
	return all
}

type nodeDecision struct {
	self       ClusterNode
	onlyPods   bool                      // all gateways are Pods, so other nodes do not matter
	oneGateway bool                      // one gateway serves all peers
	senders    []GatewayPod              // see NodeIntent.Senders
	gateways   map[netip.Addr]GatewayPod // see NodeIntent.nextHops
	nodes      []ClusterNode             // sorted by age, oldest first
	refused    []netip.Prefix            // networks of peers
	remote     kernel.Remote             // the networks in refused, as sets of the filter
	src        netip.Addr                // source of the routes to the one gateway; zero: no such routes
	trusted    bool                      // see podCIDRsHold
	overlay    map[string]netip.Addr     // overlay addresses by name of the node
	outer      []netip.Addr              // for a gateway in a Pod: source addresses of nodes, sorted; the gateway accepts outer packets only from these
	node       kernel.State
	problems   []Problem
}

func (d *nodeDecision) problem(o Origin, field, format string, args ...any) {
	d.problems = append(d.problems, Problem{o, field, fmt.Sprintf(format, args...)})
}

// RefusingState returns the routes and rules that refuse packets for networks. Every node's State
// has them. networks must be sorted.
func RefusingState(networks []netip.Prefix) kernel.State {
	return kernel.State{Routes: appendRefusing(nil, networks), Rules: refusingRules(networks)}
}

// appendRefusing appends a route for each network, in the order of networks. The route refuses a
// packet if no other route of ours matches.
func appendRefusing(all []kernel.Route, networks []netip.Prefix) []kernel.Route {
	for _, p := range networks {
		all = append(all, kernel.Route{Prefix: p, Type: kernel.Unreachable, Table: kernel.RefuseTable, Metric: kernel.UnreachableMetric, Protocol: kernel.NodeProtocol})
	}
	return all
}

func refusingRules(networks []netip.Prefix) (all []kernel.Rule) {
	for _, everything := range everythingOf(networks) {
		all = append(all, kernel.Rule{V6: everything.Addr().Is6(), Priority: kernel.RefuseRulePriority, Table: kernel.RefuseTable, Protocol: kernel.NodeProtocol})
	}
	return all
}

// dropRemoteAddrs removes the addresses of nodes that lie in networks of peers. Otherwise somebody
// with write access to the status of one Node could make other nodes send packets for a peer to
// such an address, outside the tunnel.
func (d *nodeDecision) dropRemoteAddrs() {
	find := func(a netip.Addr) int {
		return slices.IndexFunc(d.refused, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	if len(d.nodes) > 16 { // for fewer nodes, the index costs more than it saves
		remote := newPrefixIndex(d.refused)
		find = func(a netip.Addr) int { return remote.find(a, nil) }
	}
	for i, n := range d.nodes {
		d.nodes[i].Addrs = slices.DeleteFunc(slices.Clone(n.Addrs), func(a netip.Addr) bool {
			at := find(a)
			if at >= 0 {
				d.problem(Origin{Kind: "Node", Name: n.Name}, "status.addresses", "%v is in %v, a network of a peer; want an address outside", a, d.refused[at])
			}
			return at >= 0
		})
	}
}

// selectGateways keeps gateways whose address is outside every peer's network.
func (d *nodeDecision) selectGateways(in NodeIntent) {
	d.gateways = make(map[netip.Addr]GatewayPod)
	nextHops := in.nextHops()
	for _, g := range in.Senders() {
		if at := slices.IndexFunc(d.refused, func(p netip.Prefix) bool { return p.Contains(g.Addr) }); at >= 0 {
			d.problem(Origin{Kind: "Pod", Name: "of the gateway"}, "status.podIP", "%v is in %v, a network of a peer; want an address outside", g.Addr, d.refused[at])
			continue
		}
		d.senders = append(d.senders, g)
		if slices.Contains(nextHops, g) {
			d.gateways[g.Addr] = g
		}
	}
}

// findOverlays computes the overlay addresses of nodes. If two nodes have the same overlay address,
// the older node keeps it.
func (d *nodeDecision) findOverlays() {
	d.overlay = make(map[string]netip.Addr, len(d.nodes))
	taken := make(map[netip.Addr]ClusterNode, len(d.nodes))
	for _, n := range d.nodes {
		o, addr := Origin{Kind: "Node", Name: n.Name}, n.Underlay()
		if !addr.IsValid() {
			d.problem(o, "status.addresses", "has no IPv4 InternalIP; want one, because the overlay between nodes runs over IPv4")
			continue
		}
		overlay := OverlayAddr(addr)
		if host := overlay.As4(); host == [4]byte{240, 0, 0, 0} || host == [4]byte{240, 255, 255, 255} {
			d.problem(o, "status.addresses", "%v maps to the overlay address %v, which is not a valid address of a host; want another InternalIP", addr, overlay)
			continue
		}
		if first, clash := taken[overlay]; clash {
			d.problem(o, "status.addresses", "%v and %v of Node %s map to the same overlay address, %v; want addresses that differ in the last three octets",
				addr, first.Underlay(), first.Name, overlay)
			continue
		}
		taken[overlay] = n
		d.overlay[n.Name] = overlay
	}
}

// addOverlay adds our overlay device, with neighbours and FDB entries for gateways. If a gateway
// uses its host's network, it also adds entries for every other node.
func (d *nodeDecision) addOverlay(own netip.Addr, underlayMTU int) {
	if underlayMTU == 0 {
		underlayMTU = defaultUnderlay
	}
	mtu := min(max(underlayMTU-overlayOverhead, minOverlayMTU), 65535-overlayOverhead)
	s := &d.node
	const dev = kernel.OverlayDevice
	s.Devices = []kernel.Device{{Name: dev, VXLAN: kernel.VXLAN{ID: kernel.OverlayID, Port: kernel.OverlayPort, Local: d.self.Underlay()}}}
	s.Links = []kernel.Link{{Name: dev, MAC: OverlayMAC(d.self.Name), MTU: mtu, Up: true}}
	s.Settings = []kernel.Setting{
		{Path: "net/ipv4/conf/" + dev + "/forwarding", Value: "1"},
		{Path: "net/ipv4/conf/" + dev + "/rp_filter", Value: "2"}, // packets of a new pod may arrive before the route to it exists
	}
	for addr := range d.gateways {
		mac := GatewayMAC(addr)
		s.FDB = append(s.FDB, kernel.FDBEntry{Dev: dev, MAC: mac, Dst: addr})
		if d.oneGateway {
			addr = gatewayHop
		}
		s.Neighbors = append(s.Neighbors, kernel.Neighbor{Dev: dev, Addr: addr, MAC: mac})
	}
	if d.onlyPods { // refuse packets from the gateway that would go back to the gateway
		d.rule(kernel.Rule{Priority: kernel.OverlayRulePriority, Iif: dev, Table: kernel.RefuseTable})
		return
	}
	s.Addresses = []kernel.Address{{Dev: dev, Prefix: netip.PrefixFrom(own, overlayNetwork.Bits())}}
	d.route(kernel.Route{Prefix: overlayNetwork, Dev: dev, Table: kernel.MainTable})
	d.rule(kernel.Rule{Priority: kernel.OverlayRulePriority, Iif: dev, Table: kernel.GatewayTable})
	for _, n := range d.nodes {
		if addr, ok := d.overlay[n.Name]; ok && n.Name != d.self.Name {
			mac := OverlayMAC(n.Name)
			s.FDB = append(s.FDB, kernel.FDBEntry{Dev: dev, MAC: mac, Dst: n.Underlay()})
			s.Neighbors = append(s.Neighbors, kernel.Neighbor{Dev: dev, Addr: addr, MAC: mac})
		}
	}
}

// addFilter adds the packet filter, which keeps foreign hosts out of the overlay, and peers away
// from our node itself. ownPods are the networks of the cluster's pods.
func (d *nodeDecision) addFilter(ownPods []netip.Prefix, in NodeIntent) {
	var nodes, own, gateways []netip.Addr
	var elsewhere []netip.Prefix
	pods := slices.Clone(ownPods)
	for _, n := range d.nodes {
		pods = append(pods, n.PodCIDRs...)
		if n.Name == d.self.Name {
			continue
		}
		if _, ok := d.overlay[n.Name]; ok && !d.onlyPods {
			nodes = append(nodes, n.Underlay())
		}
		for _, p := range n.PodCIDRs {
			ours := slices.ContainsFunc(d.self.PodCIDRs, func(own netip.Prefix) bool { return own.IsValid() && own.Overlaps(p) })
			if d.trusted && p.IsValid() && !ours {
				elsewhere = append(elsewhere, p.Masked())
			}
		}
	}
	for _, g := range d.senders {
		gateways, nodes = append(gateways, g.Addr), append(nodes, g.Addr)
		if g.Host.IsValid() && !slices.Contains(d.self.Addrs, g.Host) {
			nodes = append(nodes, g.Host)
		}
	}
	for _, p := range ownPods {
		if d.onlyPods && d.trusted && p.Addr().Is4() {
			elsewhere = append(elsewhere, subtract(p.Masked(), d.self.PodCIDRs)...)
		}
	}
	slices.SortFunc(elsewhere, netip.Prefix.Compare)
	elsewhere = slices.Compact(elsewhere)
	for _, a := range d.self.Addrs {
		if !slices.ContainsFunc(pods, func(p netip.Prefix) bool { return p.Contains(a) }) {
			own = append(own, a)
		}
	}
	s := kernel.FilterSets{Nodes: nodes, Gateways: gateways, Own: own, Elsewhere: elsewhere, Pods: d.podNetworks(in, ownPods), Underlay: in.UnderlayDevices}
	if len(in.Bridges) > 0 {
		d.node.Bridges = []kernel.Bridge{kernel.BridgeFor(gateways, in.Uplinks)}
	}
	if in.Bridged && len(in.Uplinks) > 0 {
		s.Bridges = in.Bridges
	}
	filter := kernel.FilterFor(s)
	filter.Remote = d.remote
	d.node.Filters = []kernel.Filter{filter}
}

// Some CNIs would masquerade packets of pods to peers. addSourceNAT adds rules that preserve the
// source addresses of these packets. It also adds rules that accept packets of pods and of our
// node's gateways in foreign forward chains; see kernel.Accept.
func (d *nodeDecision) addSourceNAT(in NodeIntent, ownPods []netip.Prefix) {
	if len(d.node.Devices) == 0 {
		return // no packet leaves for a peer
	}
	s := kernel.SourceNATSets{Local: d.localPods(in), Pods: d.podNetworks(in, ownPods), Underlay: in.UnderlayDevices, Self: d.self.Underlay()}
	d.node.SourceNAT = []kernel.SourceNAT{kernel.SourceNATFor(s).WithSet("remote", d.remote.Networks)}
	var local, remote []netip.Addr // gateways on our node, and gateways on other nodes, active or not
	for _, g := range in.Gateways {
		switch {
		case g.HostNetwork:
		case slices.Contains(d.self.Addrs, g.Host):
			local = append(local, g.Addr)
		default:
			remote = append(remote, g.Addr)
		}
	}
	d.node.Accepts = []kernel.Accept{kernel.AcceptFor(local, remote)}
}

// localPods returns the networks of our node's own pods: the podCIDRs of our node if they are
// trusted, otherwise each pod's address.
func (d *nodeDecision) localPods(in NodeIntent) (local []netip.Prefix) {
	if d.trusted {
		return validOf(d.self.PodCIDRs)
	}
	for _, p := range in.Pods {
		if p.Node == d.self.Name && !slices.Contains(d.self.Addrs, p.Addr) {
			local = append(local, hostPrefix(p.Addr))
		}
	}
	return local
}

// podNetworks returns all networks that are known to contain pods of the cluster.
func (d *nodeDecision) podNetworks(in NodeIntent, ownPods []netip.Prefix) []netip.Prefix {
	all := append(validOf(ownPods), d.localPods(in)...)
	for _, n := range d.nodes {
		all = append(all, validOf(n.PodCIDRs)...)
	}
	return all
}

// Only the networks in ownPods are mapped 1:1. If a pod of our node has an address outside of them,
// peers see the gateway's address instead. nameStrangers reports such pods.
func (d *nodeDecision) nameStrangers(in NodeIntent, ownPods []netip.Prefix) {
	if len(d.node.Devices) == 0 || len(ownPods) == 0 {
		return
	}
	known := func(p netip.Prefix) bool { return insideAny(p, ownPods) }
	stranger := ""
	if d.trusted { // in.Pods may then be empty, so check the podCIDRs
		for _, p := range validOf(d.self.PodCIDRs) {
			if p.Addr().Is4() && !known(p) {
				stranger = "those of " + p.String()
			}
		}
	}
	first := NodePod{}
	for _, p := range in.Pods {
		ofNode := func(n ClusterNode) bool { return slices.Contains(n.Addrs, p.Addr) }
		if p.Node == d.self.Name && p.Addr.Is4() && !known(hostPrefix(p.Addr)) && !slices.ContainsFunc(in.Nodes, ofNode) &&
			(!first.Addr.IsValid() || p.Addr.Less(first.Addr)) {
			first = p
			stranger = fmt.Sprintf("such as %s with %v", cmp.Or(p.Name, "one"), p.Addr)
		}
	}
	if stranger == "" {
		return
	}
	names := make([]string, len(ownPods))
	for i, p := range ownPods {
		names[i] = p.String()
	}
	slices.Sort(names)
	d.problem(Origin{Kind: "Node", Name: d.self.Name}, "", "has pods outside %s, the PodCIDR of the installation (%s): peers cannot reach these pods, and see the gateway's address instead of theirs; want a PodCIDR (--pod-cidr) that contains all pods",
		strings.Join(slices.Compact(names), ", "), stranger)
}

// toGateway sends packets for all networks of peers to the only active gateway. If that gateway is
// unknown or our node has no overlay device, toGateway adds no route. The routes in RefuseTable
// then refuse the packets.
func (d *nodeDecision) toGateway(gateway netip.Addr) {
	if _, known := d.gateways[gateway]; !known {
		d.problem(Origin{Kind: "Service", Name: "of the gateway"}, "metadata.annotations", "%v is not the address of a gateway Pod; want that of the active one", gateway)
		return
	}
	if len(d.node.Devices) == 0 {
		return
	}
	for _, p := range d.refused {
		if p.Addr().Is6() {
			d.problem(Origin{Kind: "NetworkAllocation"}, "spec.networks", "%v is IPv6, which the overlay does not carry to a gateway that is a Pod; want IPv4, or a gateway with --host-network", p)
		}
	}
	d.src = d.self.Underlay()
	if len(d.refused) > 0 {
		d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, Table: kernel.NodeTable})
	}
}

func (d *nodeDecision) route(r kernel.Route) {
	r.Protocol = kernel.NodeProtocol
	d.node.Routes = append(d.node.Routes, r)
}

func (d *nodeDecision) rule(r kernel.Rule) {
	r.Protocol = kernel.NodeProtocol
	d.node.Rules = append(d.node.Rules, r)
}

func (d *nodeDecision) sort() {
	slices.SortFunc(d.node.FDB, compareFDB)
	slices.SortFunc(d.node.Neighbors, compareNeighbors)
	slices.SortFunc(d.node.Routes, kernel.Route.Compare)
	slices.SortStableFunc(d.node.Rules, func(a, b kernel.Rule) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), a.From.Compare(b.From), a.To.Compare(b.To), cmp.Compare(a.Iif, b.Iif))
	})
}

func compareFDB(a, b kernel.FDBEntry) int { return a.Dst.Compare(b.Dst) }

func compareNeighbors(a, b kernel.Neighbor) int { return a.Addr.Compare(b.Addr) }
