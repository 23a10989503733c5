package fabric

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// A PodNetwork has the nodes and pods that a gateway needs if it is a Pod. Such a gateway delivers
// packets through the overlay itself. The zero value is for a gateway with the host's network.
type PodNetwork struct {
	Pod   netip.Addr // address of the gateway's Pod, IPv4
	Node  string     // name of the Pod's Node; packets for endpoints outside of the cluster go through this Node
	Nodes []ClusterNode
	Pods  []NodePod // the pods outside their node's podCIDRs
	// Trusted is true if pods have addresses from their node's podCIDRs (see podCIDRsHold). A Pod
	// with an address from another node's podCIDRs is then ignored.
	Trusted bool
}

// GatewayMAC returns the MAC address of the overlay device of a gateway that is a Pod. Nodes
// compute it with OverlayMAC, from a name that no Node can have.
func GatewayMAC(pod netip.Addr) kernel.MAC { return OverlayMAC("gateway " + pod.String()) }

// GatewayPodFor computes the kernel state of a gateway that is a Pod: packets from the overlay go
// to the TUNs, and packets from a TUN go through the overlay to the node of their pod.
//
//	eth0 ═ VXLAN ═ isthmus.vxlan ─ table 4200 ─► isthmus0 (TUN)
//	                     ◄──────── table 4201 ───────┘
//
// inUse and tunnels are as in GatewayHostFor. mtu is the MTU of the TUNs. underlayMTU is the MTU of
// the device with the Pod's address. The Pod forwards no other packets, and refuses its own packets
// to peers. The next hops of its routes through the overlay are the nodes' underlay addresses. The
// Pod accepts outer packets only from these addresses of nodes:
//   - their InternalIPs,
//   - the pod addresses that a node's agent reports as its own, because a CNI may masquerade
//     packets from a node to pods,
//   - and, if pods have addresses of podCIDRs, the first two addresses of each podCIDR, which
//     no pod has.
//
// A PodDecider computes the same state incrementally, for successive PodNetworks.
func GatewayPodFor(peers []*GatewayPeer, inUse map[string]TunnelSet, mtu, tunnels, underlayMTU int, in PodNetwork) (kernel.State, []Problem) {
	d := decidePod(peers, inUse, mtu, tunnels, underlayMTU, in)
	return d.node, SortProblems(d.problems)
}

func decidePod(peers []*GatewayPeer, inUse map[string]TunnelSet, mtu, tunnels, underlayMTU int, in PodNetwork) *nodeDecision {
	if underlayMTU == 0 {
		underlayMTU = defaultUnderlay
	}
	const dev = kernel.OverlayDevice
	d := &nodeDecision{nodes: slices.Clone(in.Nodes), trusted: in.Trusted, overlay: make(map[string]netip.Addr, len(in.Nodes))}
	d.node.Routes = make([]kernel.Route, 0, 6*len(peers)+3*len(in.Nodes)+len(in.Pods)+3)
	remotes, own := make([]netip.Prefix, 0, 2*len(peers)), make([]netip.Prefix, 0, len(peers)+len(in.Nodes))
	for _, p := range peers {
		own = append(own, p.Local.Pod)
		for i, prefix := range p.AllowedIPs {
			if prefix.Addr().Is6() {
				d.problem(p.Origin, remoteField(p, i), "%v is IPv6, which the overlay does not carry to a gateway that is a Pod; want IPv4, or a gateway with --host-network", prefix)
				continue
			}
			remotes = append(remotes, prefix)
			d.route(kernel.Route{Prefix: prefix, Dev: inUse[p.ID].devs(), Table: kernel.GatewayTable})
			d.route(kernel.Route{Prefix: prefix, Type: kernel.Unreachable, Table: kernel.RefuseTable, Metric: kernel.UnreachableMetric})
			d.route(kernel.Route{Prefix: prefix, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
		}
	}
	everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	d.route(kernel.Route{Prefix: everything, Type: kernel.Unreachable, Table: kernel.GatewayTable, Metric: kernel.UnreachableMetric})
	d.route(kernel.Route{Prefix: everything, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
	d.rule(kernel.Rule{Priority: kernel.OverlayRulePriority, Iif: dev, Table: kernel.GatewayTable})
	d.rule(kernel.Rule{Priority: kernel.RefuseRulePriority, Table: kernel.RefuseTable})

	s := &d.node
	s.Devices = []kernel.Device{{Name: dev, VXLAN: kernel.VXLAN{ID: kernel.OverlayID, Port: kernel.OverlayPort, Local: in.Pod}}}
	s.Links = []kernel.Link{{Name: dev, MAC: GatewayMAC(in.Pod), MTU: min(max(underlayMTU-overlayOverhead, minOverlayMTU), 65535-overlayOverhead), Up: true}}
	devices := []string{dev}
	for i := range tunnels {
		name := TunName(i)
		devices = append(devices, name)
		s.Links = append(s.Links, kernel.Link{Name: name, MTU: mtu, Up: true})
		d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, Iif: name, Table: kernel.NodeTable})
	}
	for _, name := range devices {
		for _, v := range [][2]string{{"forwarding", "1"}, {"rp_filter", "2"}, {"send_redirects", "0"}} {
			s.Settings = append(s.Settings, kernel.Setting{Path: "net/ipv4/conf/" + name + "/" + v[0], Value: v[1]})
		}
		s.Settings = append(s.Settings, kernel.Setting{Path: "net/ipv6/conf/" + name + "/addr_gen_mode", Value: "1"})
	}
	if tunnels > 1 { // if the hash did not include ports, all flows between two pods would take the same tunnel
		s.Settings = append(s.Settings, kernel.Setting{Path: "net/ipv4/fib_multipath_hash_policy", Value: "1", Optional: true})
	}

	d.refused = remotes
	d.dropRemoteAddrs()
	d.dropPodAddrs(in.Pod)
	d.toNodes(in)
	d.addPods(in.Pods, own)
	if at := slices.IndexFunc(d.nodes, func(n ClusterNode) bool { return n.Name == in.Node }); at >= 0 {
		d.addRoutes(d.nodes[at].Routes, own)
	}
	d.outer = sortedIPv4(d.outerSources(in))
	s.Filters = []kernel.Filter{kernel.FilterFor(kernel.FilterSets{Pod: true, Remote: remotes}).WithSet("nodes", kernel.AddressElements(d.outer))}
	for i := range s.Rules {
		s.Rules[i].Protocol = kernel.GatewayProtocol
	}
	d.finishRoutes()
	d.sort()
	return d
}

// finishRoutes turns routes that were made for a node into routes of a gateway in a Pod.
func (d *nodeDecision) finishRoutes() {
	s := &d.node
	for i := range s.Routes {
		r := &s.Routes[i]
		if r.Protocol = kernel.GatewayProtocol; r.Type == kernel.Throw { // refuse the packet instead: the next table would send it to eth0
			r.Type, r.Metric = kernel.Unreachable, kernel.UnreachableMetric
		}
	}
	s.Routes = firstOfEach(s.Routes) // two routes conflict if a node and a pod have the same address
}

// sortedIPv4 returns the IPv4 addresses of the list all, sorted and without duplicates. It works in
// place.
func sortedIPv4(all []netip.Addr) []netip.Addr {
	all = slices.DeleteFunc(all, func(a netip.Addr) bool { return !a.Is4() })
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// firstOfEach removes each route that conflicts with an earlier one. It is fast, because there may
// be many routes.
func firstOfEach(routes []kernel.Route) []kernel.Route {
	type key struct {
		addr          [16]byte
		bits          uint8
		table, metric uint32
	}
	seen := make(map[key]struct{}, len(routes))
	return slices.DeleteFunc(routes, func(r kernel.Route) bool {
		k := key{r.Prefix.Addr().As16(), uint8(r.Prefix.Bits()), uint32(r.Table), uint32(r.Metric)}
		before := len(seen)
		seen[k] = struct{}{}
		return len(seen) == before
	})
}

// dropPodAddrs removes the addresses of nodes that belong to pods: the address of our own Pod and,
// if Trusted is true, addresses inside another node's podCIDRs. Otherwise somebody with write
// access to the status of one Node could divert packets for another Node's pods.
func (d *nodeDecision) dropPodAddrs(own netip.Addr) {
	var pods prefixIndex // by node
	for i, n := range d.nodes {
		for _, p := range n.PodCIDRs {
			if d.trusted {
				pods.add(p, i)
			}
		}
	}
	for i, n := range d.nodes {
		d.nodes[i].Addrs = slices.DeleteFunc(slices.Clone(n.Addrs), func(a netip.Addr) bool {
			at := pods.find(a, func(other int) bool { return d.nodes[other].Name != n.Name })
			switch o := (Origin{Kind: "Node", Name: n.Name}); {
			case a == own:
				d.problem(o, "status.addresses", "%v is the address of the gateway's Pod; want another address", a)
			case at >= 0:
				d.problem(o, "status.addresses", "%v is in the pods' network of Node %s; want an address outside", a, d.nodes[at].Name)
			default:
				return false
			}
			return true
		})
	}
}

// toNodes adds neighbours and FDB entries for the nodes, and routes to their addresses. Of two
// nodes with the same address the older keeps it. Packets for other addresses, such as mapped
// endpoints, go to our own node.
func (d *nodeDecision) toNodes(in PodNetwork) {
	slices.SortFunc(d.nodes, olderNode)
	const dev = kernel.OverlayDevice
	taken := make(map[netip.Addr]string)
	for _, n := range d.nodes {
		o, hop := Origin{Kind: "Node", Name: n.Name}, n.Underlay()
		if !hop.IsValid() {
			d.problem(o, "status.addresses", "has no IPv4 InternalIP; want one, because the overlay between nodes runs over IPv4")
			continue
		}
		if first, clash := taken[hop]; clash {
			d.problem(o, "status.addresses", "%v is also an address of Node %s; want a different address", hop, first)
			continue
		}
		d.overlay[n.Name] = hop
		mac := OverlayMAC(n.Name)
		d.node.FDB = append(d.node.FDB, kernel.FDBEntry{Dev: dev, MAC: mac, Dst: hop})
		d.node.Neighbors = append(d.node.Neighbors, kernel.Neighbor{Dev: dev, Addr: hop, MAC: mac})
		for _, a := range n.Addrs {
			if _, has := taken[a]; !has && a.Is4() {
				taken[a] = n.Name
				d.viaOverlay(netip.PrefixFrom(a, 32), hop)
			}
		}
	}
	if hop, ok := d.overlay[in.Node]; ok {
		d.viaOverlay(netip.PrefixFrom(netip.IPv4Unspecified(), 0), hop)
	} else {
		d.problem(Origin{Kind: "Node", Name: in.Node}, "", "does not exist, or has no address; want the name of the Node on which the gateway's Pod runs")
	}
}

// outerSources returns the source addresses of nodes' outer packets. A node's agent reports some of
// them. If such an address is known to belong to a pod, another node or a peer, outerSources
// ignores it.
func (d *nodeDecision) outerSources(in PodNetwork) (all []netip.Addr) {
	pods := make(map[netip.Addr]bool, len(in.Pods))
	for _, p := range in.Pods {
		pods[p.Addr] = true
	}
	var taken prefixIndex // by node
	for i, n := range d.nodes {
		for _, a := range n.Addrs {
			taken.add(netip.PrefixFrom(a, a.BitLen()), i)
		}
		for _, p := range n.PodCIDRs {
			if d.trusted {
				taken.add(p, i)
			}
		}
	}
	remote := newPrefixIndex(d.refused)
	for _, n := range d.nodes {
		if _, ok := d.overlay[n.Name]; !ok {
			continue
		}
		all = append(all, n.Addrs...)
		for _, a := range n.Sources {
			at := taken.find(a, func(other int) bool { return d.nodes[other].Name != n.Name })
			if at < 0 && a != in.Pod && !pods[a] && remote.find(a, nil) < 0 {
				all = append(all, a)
			}
		}
		for _, p := range n.PodCIDRs {
			if d.trusted && p.IsValid() && p.Addr().Is4() && p.Bits() < 31 {
				all = append(all, p.Masked().Addr(), p.Masked().Addr().Next())
			}
		}
	}
	return all
}

// GatewayPodLeft returns the state that a gateway leaves in its Pod when it stops or is no longer
// active: the routes and rules that refuse packets for its peers.
func GatewayPodLeft(peers []*GatewayPeer) (left kernel.State) {
	s, _ := GatewayPodFor(peers, nil, 0, 0, 0, PodNetwork{})
	for _, r := range s.Routes {
		if r.Table == kernel.RefuseTable {
			left.Routes = append(left.Routes, r)
		}
	}
	for _, r := range s.Rules {
		if r.Table == kernel.RefuseTable {
			left.Rules = append(left.Rules, r)
		}
	}
	return left
}
