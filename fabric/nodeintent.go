package fabric

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NodeIntent is the complete snapshot from which a node of a cluster knows what it has to do. Lists
// are in any order.
type NodeIntent struct {
	Self string // name of our node
	// UnderlayMTU is the smallest MTU of the paths of outer packets, in octets; 0 means 1500.
	UnderlayMTU int
	// UnderlayDevices are those with our node's address and those by which it reaches other nodes,
	// as far as they are known.
	UnderlayDevices []string
	// Routes are those of our node.
	Routes []NodeRoute
	// Bridges are those by which gateways' Pods are reached, and Uplinks the ports of these that lead to
	// other nodes. Bridged says that our node keeps pods on them off the gateways.
	Bridges, Uplinks []string
	Bridged          bool
	Nodes            []ClusterNode
	Pods             []NodePod
	Gateways         []GatewayPod
	// OnlyPods says that all gateways are Pods with networks of their own. What a node has to know of
	// nodes then is itself, and of pods its own.
	OnlyPods bool
	// Gateway is the address of the active gateway, which reports it in one place for all peers. It is
	// set only with OnlyPods. All peers' networks are then behind it, so Tunnels may be missing. If it is
	// zero, each Tunnel has the address of its gateway.
	Gateway netip.Addr
	// Trusted says, where OnlyPods, that the pods of our node are where its podCIDRs say; Pods need not
	// be known then, else those of our node. See Trust.
	Trusted bool
	Tunnels []Tunnel
	// Allocations are what the NetworkAllocations say.
	Allocations
	// Allocated are the networks of peers that a node refuses: those that objects name, and those that they
	// have named and not freed. The agent, which remembers them, fills them in.
	Allocated []netip.Prefix
}

// Trust finds out whether the pods of a node are where its podCIDRs say, and leaves out the Pods that
// matter to nobody then: all of them, so that one that comes or goes changes nothing, or those of
// other nodes.
func (in *NodeIntent) Trust(self string) {
	in.Trusted = podCIDRsHold(in.Nodes, self, in.Pods)
	in.Pods = slices.DeleteFunc(slices.Clone(in.Pods), func(p NodePod) bool { return in.Trusted || p.Node != self })
}

// Sort sorts all lists by their content, so that equal intents are reflect.DeepEqual.
func (in *NodeIntent) Sort() {
	slices.SortFunc(in.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(in.Pods, func(a, b NodePod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(in.Gateways, func(a, b GatewayPod) int { return cmp.Or(a.Addr.Compare(b.Addr), a.Host.Compare(b.Host)) })
	slices.SortFunc(in.Tunnels, func(a, b Tunnel) int { return a.Peer.Origin.compare(b.Peer.Origin) })
	for _, networks := range [][]netip.Prefix{in.Allocated, in.Own, in.OwnPods} {
		if !slices.IsSortedFunc(networks, netip.Prefix.Compare) { // one that is may be somebody else's, too
			slices.SortFunc(networks, netip.Prefix.Compare)
		}
	}
}

// ClusterNode is one node of our own cluster.
type ClusterNode struct {
	Name     string
	Addrs    []netip.Addr   // InternalIPs, the node's first choice first
	PodCIDRs []netip.Prefix // networks of which the node gives addresses to its pods, if it has such
	Sources  []netip.Addr   // others from which its packets to a Pod may come, as its agent says
	Routes   []NodeRoute    // as its agent says; of the gateway's node alone
	Created  int64          // seconds since 1970; of two nodes that contradict each other the older is kept
}

func olderNode(a, b ClusterNode) int {
	return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
}

// Underlay is the address between which the overlay runs: the first of IPv4, zero if there is none.
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
	Node    string // where it runs; empty: nowhere yet
	Created int64  // seconds since 1970; of two pods with one address the younger has it
}

// A GatewayPod is one replica of our gateway, active or not.
type GatewayPod struct {
	Addr        netip.Addr // of the Pod
	Host        netip.Addr // of its node, behind which a CNI may hide it
	HostNetwork bool       // it has no network of its own, and its node forwards for it
}

// A Tunnel is a peer and the gateway by which it is reached.
type Tunnel struct {
	Peer    Peer
	Gateway netip.Addr // status.gatewayIP, that of a GatewayPod or an InternalIP of a node; zero: no gateway is active yet
}

// TunnelFrom reads a TunnelEndpoint as PeerFrom does, and where its gateway is. With any problem
// the tunnel is zero.
func TunnelFrom(te *v1alpha1.TunnelEndpoint, o Origin) (Tunnel, []Problem) {
	peer, problems := PeerFrom(te, o)
	r := report{origin: o, problems: problems}
	var gateway netip.Addr
	if s := te.Status.GatewayIP; s != "" {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() {
			r.add("status.gatewayIP", "%s is no address; want that of the active gateway", quote(s))
		}
		gateway = a
	}
	if len(r.problems) > 0 {
		return Tunnel{}, SortProblems(r.problems)
	}
	return Tunnel{peer, gateway}, nil
}

// Ways are the gateways with networks of their own that tunnels name: one, but for moments.
func (in *NodeIntent) Ways() (ways []GatewayPod) {
	for _, g := range in.Gateways {
		named := in.Gateway == g.Addr || !in.Gateway.IsValid() && slices.ContainsFunc(in.Tunnels, func(t Tunnel) bool { return t.Gateway == g.Addr })
		if named && g.Addr.Is4() && !g.HostNetwork && !slices.Contains(ways, g) {
			ways = append(ways, g)
		}
	}
	return ways
}

// Carriers are the addresses to which outer packets of our node go, and those of other nodes at which it
// is looked how they are reached: gateways' Pods and their nodes, or the nodes that our own talks to.
func (in *NodeIntent) Carriers() (outer, nodes []netip.Addr) {
	at := slices.IndexFunc(in.Nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	if at < 0 {
		return nil, nil
	}
	own := in.Nodes[at].Addrs
	for _, g := range in.Ways() {
		outer = append(outer, g.Addr)
		if g.Host.Is4() && !slices.Contains(own, g.Host) {
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
	if !in.OnlyPods && slices.ContainsFunc(in.Tunnels, here) { // it delivers to all
		for _, n := range in.Nodes {
			if a := n.Underlay(); a.IsValid() && n.Name != in.Self && !slices.Contains(own, a) {
				nodes, outer = append(nodes, a), append(outer, a)
			}
		}
	}
	return outer, nodes
}

// Elsewhere is an address that only a pod of another node can have, as far as that is known, where a
// gateway is a Pod; zero: none.
func (in *NodeIntent) Elsewhere() netip.Addr {
	at := slices.IndexFunc(in.Nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	if at < 0 || !in.OnlyPods {
		return netip.Addr{}
	}
	for _, p := range validOf(in.OwnPods) {
		if p.Addr().Is4() {
			for _, rest := range without(p, in.Nodes[at].PodCIDRs) {
				return lastButOne(rest)
			}
		}
	}
	return netip.Addr{}
}

// PodNetworks are the networks of our pods, by the NetworkAllocations and by what tunnels name.
func (in *NodeIntent) PodNetworks() []netip.Prefix {
	all := slices.Clone(in.OwnPods)
	for _, t := range in.Tunnels {
		if !slices.Contains(all, t.Peer.Local.Pod) {
			all = append(all, t.Peer.Local.Pod)
		}
	}
	return all
}

// InOrder reports whether networks are as Refused returns them: each once, sorted, without bits of hosts.
func InOrder(networks []netip.Prefix) bool {
	for i, p := range networks {
		if !withoutHost(p) || i > 0 && networks[i-1].Compare(p) >= 0 {
			return false
		}
	}
	return true
}

// withoutHost reports whether p is p.Masked(), of thousands at a time.
func withoutHost(p netip.Prefix) bool {
	if p.IsValid() && p.Addr().Is4() {
		a := p.Addr().As4()
		return binary.BigEndian.Uint32(a[:])<<p.Bits() == 0
	}
	return p == p.Masked()
}

// Refused are all networks of peers, whether there is a way to them or not. The list may be that of the
// intent and is not to be changed.
func (in *NodeIntent) Refused() []netip.Prefix {
	odd := func(p netip.Prefix) bool { return !p.IsValid() || p.Overlaps(overlayNetwork) }
	if len(in.Tunnels) == 0 && InOrder(in.Allocated) && !slices.ContainsFunc(in.Allocated, odd) {
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

// without returns the networks of p that are in none of the taken.
func without(p netip.Prefix, taken []netip.Prefix) []netip.Prefix {
	overlaps := func(t netip.Prefix) bool { return t.Overlaps(p) }
	if !slices.ContainsFunc(taken, overlaps) {
		return []netip.Prefix{p}
	}
	if slices.ContainsFunc(taken, func(t netip.Prefix) bool { return overlaps(t) && t.Bits() <= p.Bits() }) {
		return nil
	}
	upper := p.Addr().As4()
	upper[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	return append(without(netip.PrefixFrom(p.Addr(), p.Bits()+1), taken), without(netip.PrefixFrom(netip.AddrFrom4(upper), p.Bits()+1), taken)...)
}

// lastButOne is the address before the last of a network, or the last where there are only two, IPv4.
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

// podCIDRsHold reports whether the cluster's pods have addresses of the podCIDRs of their nodes.
// Some CNIs have an address management of their own, and these networks then mean nothing. Whoever
// may write the status of one node's Pods must not decide it for others: all pods of our node, and
// those of half of the nodes with pods, have to be where they should.
func podCIDRsHold(nodes []ClusterNode, self string, pods []NodePod) bool {
	networks := make(map[string][]netip.Prefix, len(nodes))
	for _, n := range nodes {
		networks[n.Name] = n.PodCIDRs
	}
	holds := make(map[string]bool, len(nodes))
	for _, p := range pods {
		of, known := networks[p.Node]
		if !known || !p.Addr.Is4() {
			continue
		}
		inside := slices.ContainsFunc(of, func(n netip.Prefix) bool { return n.Contains(p.Addr) })
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
