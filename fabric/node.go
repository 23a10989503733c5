package fabric

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

const (
	// overlayOverhead is what VXLAN adds over IPv4: 20 IP, 8 UDP, 8 VXLAN, 14 Ethernet. WireGuard
	// adds 60, so a packet that fits a tunnel over the same underlay always fits the overlay.
	overlayOverhead = 50
	defaultUnderlay = 1500
	minOverlayMTU   = 576 // RFC 791; on a smaller underlay the outer packets are fragmented
)

// overlayNetwork holds the overlay addresses of the nodes. It is class E, which Linux routes like
// any other and hardly anybody else uses.
var overlayNetwork = netip.MustParsePrefix("240.0.0.0/8")

// NodeIntent is the complete snapshot from which a node of a cluster knows what it has to do. Lists
// are in any order.
type NodeIntent struct {
	Self string // name of our node
	// UnderlayMTU is the least of the ways that outer packets take, in octets; 0 means 1500.
	UnderlayMTU int
	// UnderlayDevices are those with our node's address and those by which it reaches other nodes,
	// as far as they are known.
	UnderlayDevices []string
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
	// Gateway is the address of the active gateway where OnlyPods, as it says itself in one place for
	// all peers: all granted networks are behind it, and the Tunnels need not be known. Zero: each
	// Tunnel says where its gateway is.
	Gateway netip.Addr
	// Trusted says, where OnlyPods, that the pods of our node are where its podCIDRs say; Pods need not
	// be known then, else those of our node. See Trust.
	Trusted bool
	Tunnels []Tunnel
	// Granted are the networks that peers have here by the books of the IPAM, from the grant to the
	// end of un-peering; nil: there are no books.
	Granted []netip.Prefix
	// Doubtful are networks that a copy of the books names and the books may not, see RefusedInDoubt.
	Doubtful []netip.Prefix
	// Edition is that of these books: a network that was granted is taken back by books of a higher
	// one that lack it, and by nothing else. 0: they have none.
	Edition int64
	// Own are the networks of our own pods and Services by the same books, as far as they are
	// known; OwnPods is that of the pods alone.
	Own     []netip.Prefix
	OwnPods []netip.Prefix
}

// Trust finds out whether the pods of a node are where its podCIDRs say, and leaves out the Pods that
// matter to nobody then: all of them, so that one that comes or goes changes nothing, or those of
// other nodes.
func (in *NodeIntent) Trust(self string) {
	in.Trusted = podCIDRsHold(in.Nodes, self, in.Pods)
	in.Pods = slices.DeleteFunc(slices.Clone(in.Pods), func(p NodePod) bool { return in.Trusted || p.Node != self })
}

// Sort brings the lists into an order that depends on nothing but what is in them, so that equal
// intents are reflect.DeepEqual.
func (in *NodeIntent) Sort() {
	slices.SortFunc(in.Nodes, func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(in.Pods, func(a, b NodePod) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Created, b.Created), cmp.Compare(a.Name, b.Name))
	})
	slices.SortFunc(in.Gateways, func(a, b GatewayPod) int { return cmp.Or(a.Addr.Compare(b.Addr), a.Host.Compare(b.Host)) })
	slices.SortFunc(in.Tunnels, func(a, b Tunnel) int { return a.Peer.Origin.compare(b.Peer.Origin) })
	slices.SortFunc(in.Granted, netip.Prefix.Compare)
	slices.SortFunc(in.Doubtful, netip.Prefix.Compare)
	slices.SortFunc(in.Own, netip.Prefix.Compare)
	slices.SortFunc(in.OwnPods, netip.Prefix.Compare)
}

// ClusterNode is one node of our own cluster.
type ClusterNode struct {
	Name     string
	Addrs    []netip.Addr   // InternalIPs, the node's first choice first
	PodCIDRs []netip.Prefix // networks of which the node gives addresses to its pods, if it has such
	Sources  []netip.Addr   // others from which its packets to a Pod may come, as its agent says
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

// GrantedIn returns the networks that the books of the IPAM give to peers. They are the manager's
// alone, unlike what peers write about themselves, and name a network from before it is told to
// anybody to after the last trace of a peering is gone.
func GrantedIn(books *v1alpha1.IpamStorage) ([]netip.Prefix, []Problem) {
	var granted []netip.Prefix
	r := report{origin: Origin{Kind: "IpamStorage", Name: books.Name}}
	for _, id := range slices.Sorted(maps.Keys(books.Spec.ClusterSubnets)) {
		subnets := books.Spec.ClusterSubnets[id]
		for _, f := range []struct{ name, text string }{{"remotePodCIDR", subnets.RemotePodCIDR}, {"remoteExternalCIDR", subnets.RemoteExternalCIDR}} {
			if f.text == "" {
				continue // not known yet
			}
			p, err := netip.ParsePrefix(f.text)
			if err != nil || p.Bits() == 0 {
				r.add("spec.clusterSubnets."+id+"."+f.name, "%s is no network; want CIDR notation", quote(f.text))
				continue
			}
			granted = append(granted, p.Masked())
		}
	}
	return granted, r.problems
}

// editionAhead is how far ahead of the clock an edition may be, for clocks that differ.
const editionAhead = 24 * time.Hour

// EditionOf returns the edition of the books of the IPAM with these annotations, 0 if they have none
// that counts at that time.
func EditionOf(annotations map[string]string, now time.Time) int64 {
	n, err := strconv.ParseInt(annotations[isthmus.AnnotationEdition], 10, 64)
	if err != nil {
		return 0
	}
	return Edition(n, now)
}

// Edition returns an edition that was read, or 0 when it does not count. The manager's are times in
// milliseconds, or little above; one far ahead of the clock is somebody's slip or malice, and no later
// edition would be above it for as long.
func Edition(n int64, now time.Time) int64 {
	if n < 0 || n > now.Add(editionAhead).UnixMilli() {
		return 0
	}
	return n
}

// OwnIn returns the networks of our own pods and Services in the books of the IPAM, and those of
// the pods alone.
func OwnIn(books *v1alpha1.IpamStorage) (own, pods []netip.Prefix) {
	if p, err := netip.ParsePrefix(books.Spec.PodCIDR); err == nil {
		own, pods = append(own, p.Masked()), append(pods, p.Masked())
	}
	if p, err := netip.ParsePrefix(books.Spec.ServiceCIDR); err == nil {
		own = append(own, p.Masked())
	}
	return own, pods
}

// gatewayHop is the next hop of a node's routes to a gateway that is a Pod. It stands for whichever
// is the active one, by its MAC address: a gateway that moves changes one neighbour, and no route,
// however many peers there are. The address is nobody's (RFC 7600, section 4.8) and never in a
// packet.
var gatewayHop = netip.AddrFrom4([4]byte{192, 0, 0, 8})

// OverlayMAC is the MAC address of a node's overlay device, so that the others know it without
// asking: 0x66, which is a locally administered unicast address, and five octets of a hash. Liqo
// has the same with another hash.
func OverlayMAC(node string) kernel.MAC {
	sum := sha256.Sum256([]byte("isthmus-" + node))
	return kernel.MAC{0x66, sum[0], sum[1], sum[2], sum[3], sum[4]}
}

// OverlayAddr is a node's address in the overlay, as in Liqo: 240 and the last three octets of the
// node's IPv4 address.
func OverlayAddr(node netip.Addr) netip.Addr {
	a := node.As4()
	a[0] = overlayNetwork.Addr().As4()[0]
	return netip.AddrFrom4(a)
}

// NodeFor decides what our node has to be.
//
// Where the gateway is a Pod with a network of its own, all nodes are the same: packets for a remote
// network go through the overlay to the Pod, and come out of it for the node's own pods.
//
// Where it has the host's network, packets for a remote network go from a node without the gateway
// through the overlay to the gateway's node. On the gateway's node packets from a remote network go through the overlay to the
// pod's node: the way its answers come, so that neither strict rp_filter nor a cloud's
// anti-spoofing sees an address where it does not expect it. Traffic within the cluster is not
// touched.
//
// Packets for a network of a peer leave on these ways only. Where there is none (no gateway yet,
// IPv6 on another node, a peer that GatewayFor refuses) they are refused, from the grant of the
// network on, and so is what a peer may send to pods that the overlay does not reach.
//
// Which peers count is decided by GatewayFor, as in the gateway. A node's address in a network of a
// peer is not believed. Of two nodes with one overlay address the older one has it. When our node
// is not among in.Nodes, the State only refuses, and one Problem says so.
func NodeFor(in NodeIntent) (kernel.State, []Problem) {
	nodes := slices.SortedFunc(slices.Values(in.Nodes), olderNode)
	at := slices.IndexFunc(nodes, func(n ClusterNode) bool { return n.Name == in.Self })
	d := nodeDecision{nodes: nodes, slim: in.OnlyPods, one: in.OnlyPods && in.Gateway.IsValid()}
	d.refuse(in.Refused(), in.RefusedInDoubt())
	if at < 0 {
		d.problem(Origin{Kind: "Node", Name: in.Self}, "", "is not there; want the name of the Node on which the agent runs")
		return d.node, d.problems
	}
	d.disbelieve()
	d.self = nodes[at]
	d.believe(in)
	d.findOverlays()
	if own, ok := d.overlay[in.Self]; ok {
		d.addOverlay(own, in.UnderlayMTU)
	}
	if d.slim {
		nodes = nodes[at : at+1]
	}
	d.trusted = d.slim && in.Trusted || podCIDRsHold(nodes, in.Self, in.Pods)
	ownPods := in.PodNetworks()
	d.addFilter(ownPods, in)
	d.addSourceNAT(in, ownPods)
	d.nameStrangers(in, ownPods)
	var own, here []netip.Prefix
	if d.one {
		d.toGateway(in.Gateway)
	} else {
		own, here = d.addTunnels(in.Tunnels)
	}
	if len(here) > 0 {
		d.addPods(in.Pods, own)
	}
	d.guard(here)
	d.sort()
	return d.node, SortProblems(d.problems)
}

type nodeDecision struct {
	self     ClusterNode
	slim     bool                      // no gateway has a host's network: other nodes do not matter
	one      bool                      // one gateway has all peers
	gateways map[netip.Addr]GatewayPod // those with a network of their own that a tunnel names
	nodes    []ClusterNode             // the oldest first
	refused  []netip.Prefix            // networks of peers
	trusted  bool                      // pods are where the podCIDRs of nodes say
	overlay  map[string]netip.Addr     // overlay addresses by name of the node
	node     kernel.State
	problems []Problem
}

func (d *nodeDecision) problem(o Origin, field, format string, args ...any) {
	d.problems = append(d.problems, Problem{o, field, fmt.Sprintf(format, args...)})
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

// PodNetworks are the networks of our pods, by the books and by what tunnels name.
func (in *NodeIntent) PodNetworks() []netip.Prefix {
	all := slices.Clone(in.OwnPods)
	for _, t := range in.Tunnels {
		if !slices.Contains(all, t.Peer.Local.Pod) {
			all = append(all, t.Peer.Local.Pod)
		}
	}
	return all
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

// Refused are all networks of peers, whether there is a way to them or not.
func (in *NodeIntent) Refused() []netip.Prefix {
	all := slices.Clone(in.Granted)
	for _, t := range in.Tunnels {
		all = append(all, t.Peer.Remote.PodSeen, t.Peer.Remote.ExternalSeen)
	}
	all = slices.DeleteFunc(all, func(p netip.Prefix) bool { return !p.IsValid() || p.Overlaps(overlayNetwork) })
	for i := range all {
		all[i] = all[i].Masked()
	}
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// RefusedInDoubt are those of the Doubtful that may be a new peer's, as far as our node knows: they are
// refused while they are among them, and nothing remembers them. Whoever may write the copy must not
// cut nodes off with it.
func (in *NodeIntent) RefusedInDoubt() []netip.Prefix {
	if len(in.Doubtful) == 0 {
		return nil
	}
	taken := slices.Concat(in.Own, in.OwnPods)
	host := func(a netip.Addr) {
		if a.IsValid() {
			taken = append(taken, hostPrefix(a))
		}
	}
	for _, n := range in.Nodes {
		taken = append(taken, n.PodCIDRs...)
		for _, a := range n.Addrs {
			host(a)
		}
	}
	for _, g := range in.Gateways {
		host(g.Addr)
		host(g.Host)
	}
	granted := in.Refused()
	all := slices.DeleteFunc(slices.Clone(in.Doubtful), func(p netip.Prefix) bool {
		_, known := slices.BinarySearchFunc(granted, p, netip.Prefix.Compare)
		return known || CheckNetwork(p) != "" || p.Overlaps(overlayNetwork) || slices.ContainsFunc(taken, p.Overlaps)
	})
	slices.SortFunc(all, netip.Prefix.Compare)
	return slices.Compact(all)
}

// refuse adds the routes that are asked when no other of ours leads anywhere.
func (d *nodeDecision) refuse(networks, doubtful []netip.Prefix) {
	d.refused = networks
	d.node = refusingState(networks, doubtful)
}

// RefusingState is the part of every node's State that refuses the networks.
func RefusingState(networks []netip.Prefix) kernel.State { return refusingState(networks, nil) }

func refusingState(networks, doubtful []netip.Prefix) (s kernel.State) {
	var families [2]bool
	for at, p := range slices.Concat(networks, doubtful) {
		metric := kernel.UnreachableMetric
		if at >= len(networks) {
			metric = kernel.DoubtfulMetric
		}
		s.Routes = append(s.Routes, kernel.Route{Prefix: p, Type: kernel.Unreachable, Table: kernel.RefuseTable,
			Metric: metric, Protocol: kernel.NodeProtocol})
		if i := p.Addr().BitLen() / 128; !families[i] {
			families[i] = true
			s.Rules = append(s.Rules, kernel.Rule{V6: i == 1, Priority: kernel.RefuseRulePriority, Table: kernel.RefuseTable, Protocol: kernel.NodeProtocol})
		}
	}
	return s
}

// disbelieve leaves out addresses of nodes that are in networks of peers. Who can write the status
// of one Node must not make the others send there without the tunnel.
func (d *nodeDecision) disbelieve() {
	remote := newPrefixIndex(d.refused)
	for i, n := range d.nodes {
		d.nodes[i].Addrs = slices.DeleteFunc(slices.Clone(n.Addrs), func(a netip.Addr) bool {
			at := remote.find(a, nil)
			if at >= 0 {
				d.problem(Origin{Kind: "Node", Name: n.Name}, "status.addresses", "%v is in %v, a network of a peer; want an address outside", a, d.refused[at])
			}
			return at >= 0
		})
	}
}

// believe takes the gateways that are not where only a peer can be.
func (d *nodeDecision) believe(in NodeIntent) {
	d.gateways = make(map[netip.Addr]GatewayPod)
	for _, g := range in.Ways() {
		if at := slices.IndexFunc(d.refused, func(p netip.Prefix) bool { return p.Contains(g.Addr) }); at >= 0 {
			d.problem(Origin{Kind: "Pod", Name: "of the gateway"}, "status.podIP", "%v is in %v, a network of a peer; want an address outside", g.Addr, d.refused[at])
			continue
		}
		d.gateways[g.Addr] = g
	}
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

// addOverlay adds our overlay device, and the ways to gateways and, where one of them has a host's
// network, to every other node.
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
		{Path: "net/ipv4/conf/" + dev + "/rp_filter", Value: "2"}, // a pod of another node comes by it before we know where that pod is
	}
	for addr := range d.gateways {
		mac := GatewayMAC(addr)
		s.FDB = append(s.FDB, kernel.FDBEntry{Dev: dev, MAC: mac, Dst: addr})
		if d.one {
			addr = gatewayHop
		}
		s.Neighbors = append(s.Neighbors, kernel.Neighbor{Dev: dev, Addr: addr, MAC: mac})
	}
	if d.slim { // nothing goes back to the gateway that came from it
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

// addFilter keeps others out of the overlay, and peers from our node itself. ownPods are the networks
// of the cluster's pods.
func (d *nodeDecision) addFilter(ownPods []netip.Prefix, in NodeIntent) {
	var nodes, own, gateways []netip.Addr
	var elsewhere []netip.Prefix
	pods := slices.Clone(ownPods)
	for _, n := range d.nodes {
		pods = append(pods, n.PodCIDRs...)
		if n.Name == d.self.Name {
			continue
		}
		if _, ok := d.overlay[n.Name]; ok && !d.slim {
			nodes = append(nodes, n.Underlay())
		}
		for _, p := range n.PodCIDRs {
			ours := slices.ContainsFunc(d.self.PodCIDRs, func(own netip.Prefix) bool { return own.IsValid() && own.Overlaps(p) })
			if d.trusted && p.IsValid() && !ours {
				elsewhere = append(elsewhere, p.Masked())
			}
		}
	}
	for addr, g := range d.gateways {
		gateways, nodes = append(gateways, addr), append(nodes, addr)
		if g.Host.IsValid() && !slices.Contains(d.self.Addrs, g.Host) {
			nodes = append(nodes, g.Host)
		}
	}
	for _, p := range ownPods {
		if d.slim && d.trusted && p.Addr().Is4() {
			elsewhere = append(elsewhere, without(p.Masked(), d.self.PodCIDRs)...)
		}
	}
	slices.SortFunc(elsewhere, netip.Prefix.Compare)
	elsewhere = slices.Compact(elsewhere)
	for _, a := range d.self.Addrs {
		if !slices.ContainsFunc(pods, func(p netip.Prefix) bool { return p.Contains(a) }) {
			own = append(own, a)
		}
	}
	s := kernel.FilterSets{Nodes: nodes, Gateways: gateways, Remote: d.refused, Own: own, Elsewhere: elsewhere, Underlay: in.UnderlayDevices}
	if len(in.Bridges) > 0 {
		d.node.Bridges = []kernel.Bridge{kernel.BridgeFor(gateways, in.Uplinks)}
	}
	if in.Bridged && len(in.Uplinks) > 0 {
		s.Bridges = in.Bridges
	}
	d.node.Filters = []kernel.Filter{kernel.FilterFor(s)}
}

// addSourceNAT lets pods keep their addresses towards peers, whatever their CNI masquerades, and has
// FORWARD of iptables let them pass.
func (d *nodeDecision) addSourceNAT(in NodeIntent, ownPods []netip.Prefix) {
	if len(d.node.Devices) == 0 {
		return // no packet leaves for a peer
	}
	s := kernel.SourceNATSets{Remote: d.refused, Underlay: in.UnderlayDevices, Self: d.self.Underlay()}
	s.Pods = validOf(ownPods)
	for _, n := range d.nodes {
		s.Pods = append(s.Pods, validOf(n.PodCIDRs)...)
	}
	if d.trusted {
		s.Local = validOf(d.self.PodCIDRs)
	} else {
		for _, p := range in.Pods {
			if p.Node == d.self.Name && !slices.Contains(d.self.Addrs, p.Addr) {
				s.Local = append(s.Local, hostPrefix(p.Addr))
			}
		}
	}
	s.Pods = append(s.Pods, s.Local...)
	d.node.SourceNAT = []kernel.SourceNAT{kernel.SourceNATFor(s)}
	d.node.Accepts = []kernel.Accept{{}}
}

// nameStrangers says when pods of our node are in none of the networks by which peers know our pods:
// they come as strangers, by the gateway's address.
func (d *nodeDecision) nameStrangers(in NodeIntent, ownPods []netip.Prefix) {
	if len(d.node.Devices) == 0 || len(ownPods) == 0 {
		return
	}
	known := func(p netip.Prefix) bool { return insideAny(p, ownPods) }
	stranger := ""
	if d.trusted { // the pods themselves may not be told
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
	d.problem(Origin{Kind: "Node", Name: d.self.Name}, "", "has pods outside of %s, by which peers know our pods, %s: peers do not reach these, and see the gateway's address in the place of theirs; want a PodCIDR of the installation (--pod-cidr) with all pods in it",
		strings.Join(slices.Compact(names), ", "), stranger)
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

// addTunnels adds rules and routes for the remote networks; here are those of which the gateway is
// on our node, and own are the PodCIDRs of our cluster, by what their tunnels say.
func (d *nodeDecision) addTunnels(tunnels []Tunnel) (own, here []netip.Prefix) {
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
	for i := range kept.Peers {
		p := &kept.Peers[i]
		gateway := gateways[p.Origin]
		if !gateway.IsValid() {
			continue // nowhere to go yet
		}
		if g, ok := d.gateways[gateway]; ok {
			d.toPod(p, g)
			continue
		}
		if !d.carries(p) {
			continue
		}
		if d.slim { // the table that is asked last refuses it; all tunnels of a gateway say the same
			if !slices.Contains(strangers, gateway) {
				strangers = append(strangers, gateway)
				d.problem(p.Origin, "status.gatewayIP", "%v is no address of a Pod of the gateway; want that of the active one", gateway)
			}
			continue
		}
		where, known := byAddr[gateway]
		if !known {
			d.problem(p.Origin, "status.gatewayIP", "%v is no node's InternalIP; want that of the node with the active gateway", gateway)
		}
		if known && where.Name == d.self.Name {
			own = append(own, p.Local.Pod)
			for _, prefix := range p.AllowedIPs {
				here = append(here, prefix)
				d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, From: prefix, Table: kernel.NodeTable})
			}
			continue
		}
		via, reachable := d.overlay[where.Name] // no node has the empty name
		for _, prefix := range p.AllowedIPs {
			d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, To: prefix, Table: kernel.NodeTable})
			if reachable && len(d.node.Devices) > 0 {
				d.route(kernel.Route{Prefix: prefix, Via: via, Src: d.self.Underlay(), Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
			}
			d.route(kernel.Route{Prefix: prefix, Type: kernel.Unreachable, Table: kernel.NodeTable, Metric: kernel.UnreachableMetric})
		}
	}
	return own, here
}

// toPod leads to a peer whose gateway is a Pod. The source of what the node itself sends is an
// address of the node that the gateway knows, and answers to which are for no pod.
func (d *nodeDecision) toPod(p *GatewayPeer, g GatewayPod) {
	for i, prefix := range p.AllowedIPs {
		if prefix.Addr().Is6() {
			d.problem(p.Origin, remoteField(p, i), "%v is IPv6, which the overlay does not carry to a gateway that is a Pod; want IPv4, or a gateway with --host-network", prefix)
			continue
		}
		if !d.slim {
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

// toGateway leads to all networks of peers by the one gateway. It refuses what it does not carry, and
// what has no route here, because the gateway is not known or its device is gone, is refused by the
// table that is asked last.
func (d *nodeDecision) toGateway(gateway netip.Addr) {
	if _, known := d.gateways[gateway]; !known {
		d.problem(Origin{Kind: "Service", Name: "of the gateway"}, "metadata.annotations", "%v is no address of a Pod of the gateway; want that of the active one", gateway)
		return
	}
	if len(d.node.Devices) == 0 {
		return
	}
	for _, p := range d.refused {
		if p.Addr().Is6() {
			d.problem(Origin{Kind: "IpamStorage"}, "spec.clusterSubnets", "%v is IPv6, which the overlay does not carry to a gateway that is a Pod; want IPv4, or a gateway with --host-network", p)
			continue
		}
		d.route(kernel.Route{Prefix: p, Via: gatewayHop, Src: d.self.Underlay(), Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
	}
	if len(d.node.Routes) > 0 {
		d.rule(kernel.Rule{Priority: kernel.NodeRulePriority, Table: kernel.NodeTable})
	}
}

// guard refuses what comes out of a gateway on our node for a peer of which we do not know yet that
// its gateway is here: it delivers from its TunnelEndpoint on, and says where it is a moment later.
// Without the rules of addTunnels its packets would go to other nodes by the CNI's routes, in the
// clear. While no gateway is known to be here, one rule for each family does it for all peers.
func (d *nodeDecision) guard(here []netip.Prefix) {
	var families [2]bool
	for _, p := range d.refused {
		six := p.Addr().Is6()
		if i := p.Addr().BitLen() / 128; !families[i] {
			families[i] = true
			everything := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
			if six {
				everything = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
			}
			d.route(kernel.Route{Prefix: everything, Type: kernel.Unreachable, Table: kernel.GuardTable, Metric: kernel.UnreachableMetric})
			if len(here) == 0 {
				d.rule(kernel.Rule{V6: six, Priority: kernel.GuardRulePriority, Iif: kernel.VethHost, Table: kernel.GuardTable})
			}
		}
		if len(here) > 0 && !slices.Contains(here, p) {
			d.rule(kernel.Rule{V6: six, Priority: kernel.GuardRulePriority, Iif: kernel.VethHost, From: p, Table: kernel.GuardTable})
		}
	}
}

// remoteField is the field of a TunnelEndpoint that a network of AllowedIPs is in.
func remoteField(p *GatewayPeer, i int) string {
	if own := [2]netip.Prefix{p.Remote.Pod, p.Remote.External}[i]; own != p.AllowedIPs[i] {
		return [2]string{"spec.remoteNATPodCIDR", "spec.remoteNATExternalCIDR"}[i]
	}
	return [2]string{"spec.remotePodCIDR", "spec.remoteExternalCIDR"}[i]
}

// carries says whether the overlay can carry the networks of a peer.
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
			return false // nothing to carry
		}
	}
	return len(d.problems) == before
}

// addPods adds the routes to pods on other nodes, for the rules of the gateway's node: one for the
// network of each node, and one for each pod that is not where these networks say. A CNI with an
// address management of its own has many such; where there is none, a Pod with an address of
// another node's network is not believed: who may write the status of its own node's Pods would get
// what peers send to others.
//
// What a peer sends to an address of own, our PodCIDRs, that is none of these is refused: by the
// default route it may reach somebody outside of the cluster.
func (d *nodeDecision) addPods(pods []NodePod, own []netip.Prefix) {
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
	for _, n := range d.nodes { // thousands, which hardly ever overlap
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
		networks = nil // one after the other: the older node has it
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
				d.problem(Origin{Kind: "Node", Name: n.Name}, "spec.podCIDRs", "%v overlaps a network of Node %s; want one of its own", p, other)
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
			own = append(own, p) // what comes from a peer does not go there beside the overlay
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
			"is %v on Node %s, but that address is of the podCIDRs of Node %s; it is not believed, want one of its own Node", p.Addr, p.Node, owner)
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

// addRest refuses what is left of the networks of our pods. Nodes get what is for their own addresses
// by the overlay, where their filter looks at it: answers to what they sent themselves, or for
// others, and what is for them as mapped endpoints.
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

// viaOverlay adds the route to a network behind another node.
func (d *nodeDecision) viaOverlay(prefix netip.Prefix, node netip.Addr) {
	d.route(kernel.Route{Prefix: prefix, Via: node, Dev: kernel.OverlayDevice, Table: kernel.NodeTable})
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
	slices.SortFunc(d.node.FDB, func(a, b kernel.FDBEntry) int { return a.Dst.Compare(b.Dst) })
	slices.SortFunc(d.node.Neighbors, func(a, b kernel.Neighbor) int { return a.Addr.Compare(b.Addr) })
	slices.SortFunc(d.node.Routes, kernel.Route.Compare)
	slices.SortStableFunc(d.node.Rules, func(a, b kernel.Rule) int {
		return cmp.Or(cmp.Compare(a.Priority, b.Priority), a.From.Compare(b.From), a.To.Compare(b.To), cmp.Compare(a.Iif, b.Iif))
	})
}
