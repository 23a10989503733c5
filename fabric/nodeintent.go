package fabric

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NodeIntent is the complete snapshot from which NodeFor computes the state of a node. Its lists
// may have any order.
type NodeIntent struct {
	Self string // name of our node
	// UnderlayMTU is the smallest MTU, in octets, among the paths of outer packets. 0 means that it
	// is unknown; NodeFor then uses 1500.
	UnderlayMTU int
	// UnderlayDevices are the device with our node's address, and the devices that lead to other
	// nodes, as far as known.
	UnderlayDevices []string
	// Routes are the routes of our node whose next hop is another host.
	Routes []NodeRoute
	// Bridges are the bridges through which our node reaches gateways' Pods. Uplinks are the ports
	// of these bridges that lead to other nodes. Bridged is true if our kernel.Bridge is in place.
	// It drops packets from pods on these bridges to the gateways' overlay port.
	Bridges, Uplinks []string
	Bridged          bool
	Nodes            []ClusterNode
	Pods             []NodePod
	Gateways         []GatewayPod
	// OnlyPods is true if all gateways are Pods with their own network. Then Nodes and Pods need to
	// contain only our node and its pods.
	OnlyPods bool
	// Gateway is the address of the active gateway, if one gateway serves all peers and has
	// published its address. It is set only with OnlyPods. All peers' networks are then behind this
	// gateway, so Tunnels may be empty. If Gateway is zero, each Tunnel has the address of its
	// gateway.
	Gateway netip.Addr
	// Trusted is true if OnlyPods is set and the pods of our node have addresses from its podCIDRs.
	// If Trusted is true, Pods may be empty. Otherwise Pods must contain the pods of our node. See
	// Trust.
	Trusted bool
	Tunnels []Tunnel
	// Allocations is the content of the NetworkAllocations.
	Allocations
	// Allocated are the networks of peers for which a node refuses packets: the networks that
	// NetworkAllocations name, and networks that they named earlier and have not freed. The agent
	// sets the field, because only the agent stores the earlier networks.
	Allocated []netip.Prefix
}

// Trust sets Trusted, and removes the Pods that do not affect our node, which has the name self. If
// Trusted is true, it removes all Pods, so a new or deleted pod does not change the intent.
// Otherwise it keeps only the Pods of our node.
func (in *NodeIntent) Trust(self string) {
	in.Trusted = podCIDRsHold(in.Nodes, self, in.Pods)
	in.Pods = slices.DeleteFunc(slices.Clone(in.Pods), func(p NodePod) bool { return in.Trusted || p.Node != self })
}

// Sort sorts all lists by their content, so that reflect.DeepEqual reports equal intents as equal.
func (in *NodeIntent) Sort() {
	slices.SortFunc(in.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(in.Pods, func(a, b NodePod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(in.Gateways, func(a, b GatewayPod) int { return cmp.Or(a.Addr.Compare(b.Addr), a.Host.Compare(b.Host)) })
	slices.SortFunc(in.Tunnels, func(a, b Tunnel) int { return a.Peer.Origin.compare(b.Peer.Origin) })
	for _, networks := range [][]netip.Prefix{in.Allocated, in.Own, in.OwnPods} {
		if !slices.IsSortedFunc(networks, netip.Prefix.Compare) { // do not write to a sorted list, because other goroutines may use it
			slices.SortFunc(networks, netip.Prefix.Compare)
		}
	}
}

// ClusterNode is one node of our own cluster.
type ClusterNode struct {
	Name     string
	Addrs    []netip.Addr   // InternalIPs, in the order of the Node
	PodCIDRs []netip.Prefix // networks from which the node's pods get addresses; may be empty
	Sources  []netip.Addr   // additional source addresses of the node's packets to a Pod, reported by the node's agent
	Routes   []NodeRoute    // routes of the node, reported by the node's agent; only for the gateway's node
	Created  int64          // seconds since 1970; of two conflicting nodes the older is kept
}

func olderNode(a, b ClusterNode) int {
	return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
}

// Underlay returns the node's outer address in the overlay: its first IPv4 address, or zero.
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
	Name    string // namespace/name
	Addr    netip.Addr
	Node    string // the pod's node; empty until the pod is scheduled
	Created int64  // seconds since 1970; of two pods with the same address, the younger one counts
}

// A GatewayPod is one replica of our gateway, active or not.
type GatewayPod struct {
	Addr        netip.Addr // of the Pod
	Host        netip.Addr // address of the Pod's node; a CNI may use it as the source of the Pod's packets
	HostNetwork bool       // the gateway uses its node's network
}

// A Tunnel is a peer, and the gateway through which it is reached.
type Tunnel struct {
	Peer Peer
	// Gateway is status.gatewayIP: the address of a GatewayPod or an InternalIP of a node. It is
	// zero while no gateway is active.
	Gateway netip.Addr
}

// TunnelFrom reads the spec of a TunnelEndpoint as PeerFrom does, and the gateway's address from
// the status. If there are problems, the tunnel is zero.
func TunnelFrom(te *v1alpha1.TunnelEndpoint, o Origin) (Tunnel, []Problem) {
	peer, problems := PeerFrom(te, o)
	r := report{origin: o, problems: problems}
	var gateway netip.Addr
	if s := te.Status.GatewayIP; s != "" {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() {
			r.add("status.gatewayIP", "%s is not an address; want that of the active gateway", quote(s))
		}
		gateway = a
	}
	if len(r.problems) > 0 {
		return Tunnel{}, SortProblems(r.problems)
	}
	return Tunnel{peer, gateway}, nil
}

// Senders returns the gateways that are Pods with their own network, active or not. Our node
// accepts outer packets from all of them, because after a failover the previous gateway still
// delivers packets from peers for a moment.
func (in *NodeIntent) Senders() (all []GatewayPod) {
	for _, g := range in.Gateways {
		if g.Addr.Is4() && !g.HostNetwork && !slices.Contains(all, g) {
			all = append(all, g)
		}
	}
	return all
}

// nextHops returns those Senders that in.Gateway or a tunnel names. Our node sends outer packets to
// these gateways. During a failover, there may be several for a moment.
func (in *NodeIntent) nextHops() []GatewayPod {
	return slices.DeleteFunc(in.Senders(), func(g GatewayPod) bool {
		if in.Gateway.IsValid() {
			return in.Gateway != g.Addr
		}
		return !slices.ContainsFunc(in.Tunnels, func(t Tunnel) bool { return t.Gateway == g.Addr })
	})
}

// Carriers returns two lists of addresses. outer has the destinations of our node's outer packets;
// the agent determines the MTU of the paths to them. nodes has addresses of nodes; the devices that
// lead to them are the underlay devices. If all gateways are Pods, outer has the addresses of
// active gateways' Pods, and nodes has the nodes of all gateways. Otherwise both lists also have
// the nodes with which our node exchanges outer packets.
func (in *NodeIntent) Carriers() (outer, nodes []netip.Addr) {
	at := slices.IndexFunc(in.Nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	if at < 0 {
		return nil, nil
	}
	own := in.Nodes[at].Addrs
	for _, g := range in.nextHops() {
		outer = append(outer, g.Addr)
	}
	for _, g := range in.Senders() {
		if g.Host.Is4() && !slices.Contains(own, g.Host) && !slices.Contains(nodes, g.Host) {
			nodes = append(nodes, g.Host)
		}
	}
	for _, t := range in.Tunnels {
		named := slices.ContainsFunc(in.Gateways, func(g GatewayPod) bool { return g.Addr == t.Gateway && !g.HostNetwork })
		if !in.OnlyPods && t.Gateway.Is4() && !named && !slices.Contains(own, t.Gateway) && !slices.Contains(nodes, t.Gateway) {
			nodes, outer = append(nodes, t.Gateway), append(outer, t.Gateway)
		}
	}
	here := func(t Tunnel) bool { return t.Gateway.IsValid() && slices.Contains(own, t.Gateway) }
	if !in.OnlyPods && slices.ContainsFunc(in.Tunnels, here) { // our node delivers packets to all other nodes
		for _, n := range in.Nodes {
			if a := n.Underlay(); a.IsValid() && n.Name != in.Self && !slices.Contains(own, a) {
				nodes, outer = append(nodes, a), append(outer, a)
			}
		}
	}
	return outer, nodes
}

// RemotePodAddr returns an address that only a pod of another node can have, as far as known. It
// returns zero if there is no such address, or if OnlyPods is false.
func (in *NodeIntent) RemotePodAddr() netip.Addr {
	at := slices.IndexFunc(in.Nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	if at < 0 || !in.OnlyPods {
		return netip.Addr{}
	}
	for _, p := range validOf(in.OwnPods) {
		if p.Addr().Is4() {
			for _, rest := range subtract(p, in.Nodes[at].PodCIDRs) {
				return lastButOne(rest)
			}
		}
	}
	return netip.Addr{}
}

// PodNetworks returns the networks of our pods that NetworkAllocations or tunnels name.
func (in *NodeIntent) PodNetworks() []netip.Prefix {
	all := slices.Clone(in.OwnPods)
	for _, t := range in.Tunnels {
		if !slices.Contains(all, t.Peer.Local.Pod) {
			all = append(all, t.Peer.Local.Pod)
		}
	}
	return all
}

// inOrder reports whether networks have the form of Refused's result: sorted, without duplicates,
// without host bits.
func inOrder(networks []netip.Prefix) bool {
	for i, p := range networks {
		if !withoutHost(p) || i > 0 && networks[i-1].Compare(p) >= 0 {
			return false
		}
	}
	return true
}

// withoutHost reports whether p equals p.Masked(). It is fast enough for thousands of networks.
func withoutHost(p netip.Prefix) bool {
	if p.IsValid() && p.Addr().Is4() {
		a := p.Addr().As4()
		return binary.BigEndian.Uint32(a[:])<<p.Bits() == 0
	}
	return p == p.Masked()
}

// Refused returns all networks of peers, with or without a path to them. Callers must not modify
// the result, which may be in.Allocated.
func (in *NodeIntent) Refused() []netip.Prefix {
	odd := func(p netip.Prefix) bool { return !p.IsValid() || p.Overlaps(overlayNetwork) }
	if len(in.Tunnels) == 0 && inOrder(in.Allocated) && !slices.ContainsFunc(in.Allocated, odd) {
		return in.Allocated
	}
	all := slices.Clone(in.Allocated)
	for _, t := range in.Tunnels {
		all = append(all, t.Peer.Remote.PodSeen, t.Peer.Remote.ExternalSeen)
	}
	all = slices.DeleteFunc(all, odd)
	for i := range all {
		all[i] = all[i].Masked()
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

func validOf(networks []netip.Prefix) (valid []netip.Prefix) {
	for _, p := range networks {
		if p.IsValid() {
			valid = append(valid, p.Masked())
		}
	}
	return valid
}

// subtract returns the addresses of the IPv4 network p that are in no network of the list taken, as
// a list of networks.
func subtract(p netip.Prefix, taken []netip.Prefix) []netip.Prefix {
	overlaps := func(t netip.Prefix) bool { return t.Overlaps(p) }
	if !slices.ContainsFunc(taken, overlaps) {
		return []netip.Prefix{p}
	}
	if slices.ContainsFunc(taken, func(t netip.Prefix) bool { return overlaps(t) && t.Bits() <= p.Bits() }) {
		return nil
	}
	upper := p.Addr().As4()
	upper[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return append(subtract(netip.PrefixFrom(p.Addr(), p.Bits()+1), taken), subtract(netip.PrefixFrom(netip.AddrFrom4(upper), p.Bits()+1), taken)...)
}

// lastButOne returns the second-to-last address of an IPv4 network. If the network has at most two
// addresses, it returns the last.
func lastButOne(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		a[i/8] |= 0x80 >> (i % 8)
	}
	if last := netip.AddrFrom4(a); p.Bits() < 31 {
		return last.Prev()
	}
	return netip.AddrFrom4(a)
}

// podCIDRsHold reports whether the cluster's pods have addresses from the podCIDRs of their nodes.
// Some CNIs ignore the podCIDRs when they assign addresses. A node matches if the addresses of all
// its pods are in its podCIDRs. The result is true if our node matches, and at least half of the
// nodes with pods match. So if the other nodes are alike, somebody with write access to the status
// of one node's Pods cannot change the result for them.
func podCIDRsHold(nodes []ClusterNode, self string, pods []NodePod) bool {
	networks := make(map[string][]netip.Prefix, len(nodes))
	for _, n := range nodes {
		networks[n.Name] = n.PodCIDRs
	}
	holds := make(map[string]bool, len(nodes))
	for _, p := range pods {
		podCIDRs, known := networks[p.Node]
		if !known || !p.Addr.Is4() {
			continue
		}
		inside := slices.ContainsFunc(podCIDRs, func(n netip.Prefix) bool { return n.Contains(p.Addr) })
		if was, seen := holds[p.Node]; !seen || was {
			holds[p.Node] = inside
		}
	}
	good := 0
	for _, ok := range holds {
		if ok {
			good++
		}
	}
	return holds[self] && 2*good >= len(holds)
}
