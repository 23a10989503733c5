package fabric

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// addTunnels adds rules and routes for the networks of peers. It returns in local the networks of
// those peers whose gateway is on our node, and in own our PodCIDRs according to the tunnels of
// these peers.
func (d *nodeDecision) addTunnels(tunnels []Tunnel) (own, local []netip.Prefix) {
	peers := make([]Peer, len(tunnels))
	gateways := make(map[Origin]netip.Addr, len(tunnels))
	for i, t := range tunnels {
		peers[i] = t.Peer
		gateways[t.Peer.Origin] = t.Gateway
	}
	byAddr := make(map[netip.Addr]ClusterNode, len(d.nodes))
	for _, n := range d.nodes {
		for _, a := range n.Addrs {
			if _, taken := byAddr[a]; !taken {
				byAddr[a] = n
			}
		}
	}

	kept, problems := GatewayFor(Intent{Peers: peers})
	d.problems = append(d.problems, problems...)
	var strangers []netip.Addr
	for _, p := range kept.Peers {
		gateway := gateways[p.Origin]
		if !gateway.IsValid() {
			continue // no gateway yet
		}
		if g, ok := d.gateways[gateway]; ok {
			d.toPod(p, g)
			continue
		}
		if !d.carries(p) {
			continue
		}
		if d.onlyPods { // RefuseTable refuses packets for this peer; one Problem for each gateway is enough
			if !slices.Contains(strangers, gateway) {
				strangers = append(strangers, gateway)
				d.problem(p.Origin, "status.gatewayIP", "%v is not the address of a gateway Pod; want that of the active one", gateway)
			}
			continue
		}
		node, known := byAddr[gateway]
		if !known {
			d.problem(p.Origin, "status.gatewayIP", "%v is not the InternalIP of a node; want that of the node with the active gateway", gateway)
		}
		if known && node.Name == d.self.Name {
			own = append(own, p.Local.Pod)
			for _, prefix := range p.AllowedIPs {
				local = append(local, prefix)
				d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, From: prefix, Table: kernel.NodeTable})
			}
			continue
		}
		via, reachable := d.overlay[node.Name] // if the node is unknown, its name is empty, and reachable is false
		for _, prefix := range p.AllowedIPs {
			d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, To: prefix, Table: kernel.NodeTable})
			if reachable && len(d.node.Devices) > 0 {
				d.route(kernel.Route{Prefix: prefix, Via: via, Src: d.self.Underlay(), Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
			}
			d.route(kernel.Route{Prefix: prefix, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
		}
	}
	return own, local
}

// toPod adds the routes to a peer whose gateway is a Pod. Packets of the node itself get the node's
// underlay address as source. The gateway's overlay has a route to that address, and no pod has it,
// so replies reach the node.
func (d *nodeDecision) toPod(p *GatewayPeer, g GatewayPod) {
	for i, prefix := range p.AllowedIPs {
		if prefix.Addr().Is6() {
			d.problem(p.Origin, remoteField(p, i), "%v is IPv6, which the overlay does not carry to a gateway that is a Pod; want IPv4, or a gateway with --host-network", prefix)
			continue
		}
		if !d.onlyPods {
			d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, To: prefix, Table: kernel.NodeTable})
		} else if !slices.ContainsFunc(d.node.Rules, func(r kernel.Rule) bool { return r.Priority == kernel.NodeRulePriority }) {
			d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, Table: kernel.NodeTable})
		}
		if len(d.node.Devices) > 0 {
			d.route(kernel.Route{Prefix: prefix, Via: g.Addr, Src: d.self.Underlay(), Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
		}
		d.route(kernel.Route{Prefix: prefix, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
	}
}

// remoteField returns the field of the TunnelEndpoint that contains p.AllowedIPs[i].
func remoteField(p *GatewayPeer, i int) string {
	if own := [2]netip.Prefix{p.Remote.Pod, p.Remote.External}[i]; own != p.AllowedIPs[i] {
		return [2]string{"spec.remoteNATPodCIDR", "spec.remoteNATExternalCIDR"}[i]
	}
	return [2]string{"spec.remotePodCIDR", "spec.remoteExternalCIDR"}[i]
}

// carries reports whether the overlay can carry the networks of a peer.
func (d *nodeDecision) carries(p *GatewayPeer) bool {
	before := len(d.problems)
	for i, prefix := range p.AllowedIPs {
		field := remoteField(p, i)
		switch {
		case prefix.Overlaps(overlayNetwork):
			d.problem(p.Origin, field, "%v overlaps %v, the overlay between the nodes; want a network outside", prefix, overlayNetwork)
		case prefix.Addr().Is6() && len(d.nodes) > 1:
			d.problem(p.Origin, field, "%v is IPv6, which the overlay between nodes does not carry; only pods on the gateway's node reach it", prefix)
		case prefix.Addr().Is6():
			return false // with only one node, there is no overlay
		}
	}
	return len(d.problems) == before
}

// A gateway delivers packets of a peer as soon as it has read the TunnelEndpoint. A moment later,
// it writes its own address to the status. Until then, addTunnels adds no rules for the peer, and
// the CNI's routes would send the packets to other nodes, unencrypted. So guard refuses packets
// from a gateway on our node while the TunnelEndpoint of the peer does not name that gateway. If no
// TunnelEndpoint names a gateway on our node, one rule per family covers all peers.
func (d *nodeDecision) guard(local []netip.Prefix) {
	if len(local) == 0 {
		for _, everything := range everythingOf(d.refused) {
			d.rule(kernel.Rule{V6: everything.Addr().Is6(), Priority: kernel.GuardRulePriority, Iif: kernel.VethHost, Table: kernel.GuardTable})
		}
		return
	}
	for _, p := range d.refused {
		if !slices.Contains(local, p) {
			d.rule(kernel.Rule{V6: p.Addr().Is6(), Priority: kernel.GuardRulePriority, Iif: kernel.VethHost, From: p, Table: kernel.GuardTable})
		}
	}
}

// addPods adds the routes from the gateway's node to pods on other nodes: one for each podCIDR, and
// one for each pod outside its node's podCIDRs. A CNI that ignores podCIDRs has many such pods. If
// d.trusted is true, addPods ignores a Pod with an address from another node's podCIDRs. Otherwise
// somebody with write access to the status of one node's Pods could divert packets of peers for
// pods of other nodes.
//
// Packets of a peer to any other address in own, our PodCIDRs, are refused, because the default
// route could take such a packet out of the cluster.
func (d *nodeDecision) addPods(pods []NodePod, own []netip.Prefix) {
	type network struct {
		prefix netip.Prefix
		node   string
	}
	var networks []network // disjoint, sorted
	find := func(p netip.Prefix) (at int, overlapped string, overlaps bool) {
		at, _ = slices.BinarySearchFunc(networks, p, func(n network, p netip.Prefix) int { return n.prefix.Addr().Compare(p.Addr()) })
		for i := max(at-1, 0); i <= at && i < len(networks); i++ { // the networks are disjoint, so only the two neighbours can overlap
			if networks[i].prefix.Overlaps(p) {
				return at, networks[i].node, true
			}
		}
		return at, "", false
	}
	for _, n := range d.nodes { // first check all networks at once: there may be thousands, and they hardly ever overlap
		for _, p := range n.PodCIDRs {
			if p.IsValid() && p.Addr().Is4() {
				networks = append(networks, network{p.Masked(), n.Name})
			}
		}
	}
	slices.SortFunc(networks, func(a, b network) int { return a.prefix.Compare(b.prefix) })
	disjoint := true
	for i := 1; i < len(networks); i++ {
		disjoint = disjoint && !networks[i-1].prefix.Overlaps(networks[i].prefix)
	}
	if !disjoint {
		networks = nil // some networks overlap: check them one by one below; of two that overlap, the older node keeps its network
	}
	isNode := make(map[netip.Addr]bool, len(d.nodes))
	byName := make(map[string]int, len(d.nodes))
	for i, n := range d.nodes {
		byName[n.Name] = i
		for _, a := range n.Addrs {
			isNode[a] = true
		}
		for _, p := range n.PodCIDRs {
			if !p.IsValid() || !p.Addr().Is4() {
				continue
			}
			p = p.Masked()
			var at int
			var other string
			var overlaps bool
			if !disjoint {
				at, other, overlaps = find(p)
			}
			if overlaps && other != n.Name {
				d.problem(Origin{Kind: "Node", Name: n.Name}, "spec.podCIDRs", "%v overlaps a network of Node %s; want networks that do not overlap", p, other)
			}
			if overlaps {
				continue
			}
			if !disjoint {
				networks = slices.Insert(networks, at, network{p, n.Name})
			}
			if via, ok := d.overlay[n.Name]; ok && n.Name != d.self.Name && len(d.node.Devices) > 0 {
				d.viaOverlay(p, via)
			}
			if n.Name == d.self.Name {
				d.route(kernel.Route{Prefix: p, Type: kernel.Throw, Table: kernel.NodeTable})
				continue
			}
			own = append(own, p) // packets of peers must not bypass the overlay
		}
	}
	d.addRest(own)
	pods = slices.DeleteFunc(slices.Clone(pods), func(p NodePod) bool {
		if !d.trusted || !p.Addr.Is4() || p.Node == "" || isNode[p.Addr] {
			return false
		}
		_, owner, covered := find(netip.PrefixFrom(p.Addr, 32))
		own, known := byName[p.Node]
		if !covered || owner == p.Node || known && slices.ContainsFunc(d.nodes[own].PodCIDRs, func(n netip.Prefix) bool { return n.Contains(p.Addr) }) {
			return false
		}
		namespace, name, _ := strings.Cut(p.Name, "/")
		d.problem(Origin{Kind: "Pod", Namespace: namespace, Name: name}, "status.podIPs",
			"is %v on Node %s, but that address is in the podCIDRs of Node %s, so it is ignored; want an address of its own Node", p.Addr, p.Node, owner)
		return true
	})
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
			d.viaOverlay(host, via)
		case covered && owner != d.self.Name, p.Node == d.self.Name:
			d.route(kernel.Route{Prefix: host, Type: kernel.Throw, Table: kernel.NodeTable})
		}
	}
}

// addRest refuses packets of peers to those addresses in the networks of our pods for which there
// is no other route. Packets to addresses of nodes go through the overlay, and the destination
// node's filter checks them. They are replies to packets that the node has sent or masqueraded, or
// packets for mapped endpoints on the node.
func (d *nodeDecision) addRest(own []netip.Prefix) {
	slices.SortFunc(own, netip.Prefix.Compare)
	own = slices.DeleteFunc(slices.Compact(own), func(p netip.Prefix) bool { return !p.Addr().Is4() })
	for _, p := range own {
		d.route(kernel.Route{Prefix: p, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
	}
	for _, n := range d.nodes {
		via, reachable := d.overlay[n.Name]
		if !reachable || n.Name == d.self.Name || len(d.node.Devices) == 0 {
			continue
		}
		for _, a := range n.Addrs {
			if a.Is4() && !slices.Contains(d.self.Addrs, a) {
				d.viaOverlay(hostPrefix(a), via)
			}
		}
	}
}

// The main table of the gateway's node may route packets for a mapped endpoint via another node.
// addRoutes sends such packets through the overlay. Otherwise strict reverse path filtering would
// drop the replies: they come through the overlay, but the route to their source would use another
// device. Routes into networks of pods, peers or the overlay are ignored, because no mapped
// endpoint is there.
func (d *nodeDecision) addRoutes(routes []NodeRoute, own []netip.Prefix) {
	if len(routes) == 0 {
		return
	}
	taken := slices.Concat(own, d.refused, []netip.Prefix{overlayNetwork})
	hops := make(map[netip.Addr]netip.Addr)
	for _, n := range d.nodes {
		taken = append(taken, validOf(n.PodCIDRs)...)
		if hop, ok := d.overlay[n.Name]; ok && n.Name != d.self.Name {
			for _, a := range n.Addrs {
				hops[a] = hop
			}
		}
	}
	for _, r := range routes {
		if hop, ok := hops[r.Via]; ok && !slices.ContainsFunc(taken, r.Network.Overlaps) {
			d.viaOverlay(r.Network, hop)
		}
	}
}

// viaOverlay adds the route to a network behind another node.
func (d *nodeDecision) viaOverlay(prefix netip.Prefix, node netip.Addr) {
	d.route(kernel.Route{Prefix: prefix, Via: node, Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
}
