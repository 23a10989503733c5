package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"sort"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kernel"
)

// Bounds of a report. The CRD has the same bounds.
const (
	maxNodeNetworks = 256 // of each family
	maxResolvers    = 16
	maxNodeSources  = 16
	maxNodeRoutes   = 128
	maxNodeProblems = 16
	maxNodeProblem  = 512 // characters

	// No peer may get a network that a node reports. WidestNodeNetwork is the shortest prefix
	// length for which this applies. A route to a wider network is a default route in disguise (VPN
	// clients split it into 0.0.0.0/1 and 128.0.0.0/1), or a node's attempt to block all peers.
	WidestNodeNetwork = 8
)

// NodeNetworks is a node's report of the networks that the node reaches without the tunnel. No peer
// may get one of these networks.
type NodeNetworks struct {
	Networks  []netip.Prefix // disjoint, sorted
	Resolvers []netip.Addr   // DNS servers, sorted
	Refused   int64          // the node refuses packets for every network that a NetworkAllocation named at this resourceVersion or an earlier one; 0: unknown
	Sources   []netip.Addr   // addresses, besides InternalIPs, that packets of the node to a gateway's Pod may have as source; sorted
	Routes    []NodeRoute    // sorted
	Problems  []kernel.Limit // faults that affect traffic between pods of the node and peers

	BrokenOverlay BrokenOverlay // zero: as far as known, the overlay to the gateway works
}

// NodeRoute is an IPv4 route via another host in the main table of a node.
type NodeRoute struct {
	Network netip.Prefix
	Via     netip.Addr
}

// BrokenOverlay reports that the overlay loses packets between a node and a gateway.
type BrokenOverlay struct {
	Gateway netip.Addr
	Since   time.Time // in whole seconds, as the API stores it
	Back    bool      // true: only packets from the gateway to the node are lost
}

// NodeNetworksOf makes the report of a node from its networks and resolvers. own has the networks
// of the cluster's own pods and Services. The report leaves out networks inside own: no peer gets
// them anyway, and there may be thousands of routes into them. The report has at most 256 networks
// of each address family. If there are more, NodeNetworksOf merges them into wider networks, which
// cover all of them.
func NodeNetworksOf(node string, have, own []netip.Prefix, resolvers []netip.Addr) (n NodeNetworks, problems []Problem) {
	own = mergeNetworks(slices.Clone(own))
	ignored := slices.Concat(own, SpecialRanges())
	var v4, v6 []netip.Prefix
	for _, p := range have {
		p = p.Masked()
		switch {
		case !p.IsValid() || p.Bits() == 0 || insideAny(p, ignored):
		case p.Bits() < WidestNodeNetwork:
			problems = append(problems, Problem{Origin{Kind: "Node", Name: node}, "", fmt.Sprintf(
				"its route to %v is wider than a /%d, so it is ignored like a default route, and peers may get overlapping networks", p, WidestNodeNetwork)})
		case p.Addr().Is4():
			v4 = append(v4, p)
		default:
			v6 = append(v6, p)
		}
	}
	n.Networks = slices.Concat(limitNetworks(maxNodeNetworks, v4), limitNetworks(maxNodeNetworks, v6))
	for _, addr := range resolvers {
		if !insideAny(hostPrefix(addr), ignored) {
			n.Resolvers = append(n.Resolvers, addr)
		}
	}
	slices.SortFunc(n.Resolvers, netip.Addr.Compare)
	n.Resolvers = slices.Compact(n.Resolvers)
	n.Resolvers = n.Resolvers[:min(len(n.Resolvers), maxResolvers)]
	return n, SortProblems(problems)
}

// NodeNetworksFrom reads a report. A node can write anything into its own report. Networks that are
// invalid or wider than WidestNodeNetwork are therefore ignored. One Problem reports all ignored
// networks.
func NodeNetworksFrom(from *isthmus.NodeNetworks) (n NodeNetworks, problems []Problem) {
	r := report{origin: Origin{Kind: "NodeNetworks", Namespace: from.Namespace, Name: from.Name}}
	wrong, first := 0, ""
	for _, text := range from.Spec.Networks {
		p, err := netip.ParsePrefix(text)
		if err != nil || p.Bits() < WidestNodeNetwork {
			if wrong++; wrong == 1 {
				first = text
			}
			continue
		}
		n.Networks = append(n.Networks, p.Masked())
	}
	if wrong > 0 {
		r.add("spec.networks", "node %s reports %s and %d more that are not networks of length /%d or longer; they are ignored, and peers may get overlapping networks",
			quote(from.Name), quote(first), wrong-1, WidestNodeNetwork)
	}
	for _, text := range from.Spec.Resolvers {
		if addr, err := netip.ParseAddr(text); err == nil {
			n.Resolvers = append(n.Resolvers, addr.Unmap().WithZone(""))
		}
	}
	return n, r.problems
}

// Spec returns the report in the form of the API. It cuts Problems to the bounds of the CRD.
func (n NodeNetworks) Spec() (spec isthmus.NodeNetworksSpec) {
	for _, p := range n.Networks {
		spec.Networks = append(spec.Networks, p.String())
	}
	for _, addr := range n.Resolvers {
		spec.Resolvers = append(spec.Resolvers, addr.String())
	}
	spec.RefusedResourceVersion = n.Refused
	if o := n.BrokenOverlay; o.Gateway.IsValid() {
		spec.BrokenOverlay = &isthmus.BrokenOverlay{Gateway: o.Gateway.String(), Since: isthmus.UTCTimeOf(o.Since), Back: o.Back}
	}
	for _, addr := range n.Sources {
		spec.OverlaySources = append(spec.OverlaySources, addr.String())
	}
	for _, r := range n.Routes {
		spec.Routes = append(spec.Routes, isthmus.NodeRoute{Network: r.Network.String(), Via: r.Via.String()})
	}
	for _, p := range n.Problems[:min(len(n.Problems), maxNodeProblems)] {
		message := []rune(p.Message)
		spec.Problems = append(spec.Problems, isthmus.NodeProblem{Reason: p.Reason, Message: string(message[:min(len(message), maxNodeProblem)])})
	}
	return spec
}

// Equal reports whether all fields except Refused are equal.
func (n NodeNetworks) Equal(other NodeNetworks) bool {
	return n.BrokenOverlay == other.BrokenOverlay && slices.Equal(n.Networks, other.Networks) && slices.Equal(n.Resolvers, other.Resolvers) && slices.Equal(n.Problems, other.Problems) && slices.Equal(n.Sources, other.Sources) && slices.Equal(n.Routes, other.Routes)
}

// OverlaySourcesOf returns the addresses of a node that lie in pods' networks, at most 16. With
// some CNIs, the node's packets to a Pod have one of these addresses as source, instead of the
// InternalIP.
func OverlaySourcesOf(addrs []netip.Addr, pods []netip.Prefix) (all []netip.Addr) {
	for _, a := range addrs {
		if a.Is4() && insideAny(hostPrefix(a), pods) {
			all = append(all, a)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	all = slices.Compact(all)
	return all[:min(len(all), maxNodeSources)]
}

// OverlaySourcesFrom reads the overlay sources of a report, and ignores invalid addresses.
func OverlaySourcesFrom(from *isthmus.NodeNetworks) (all []netip.Addr) {
	for _, text := range from.Spec.OverlaySources {
		if addr, err := netip.ParseAddr(text); err == nil && addr.Is4() {
			all = append(all, addr)
		}
	}
	return all
}

// NodeRoutesOf returns the routes of a node through which it may reach mapped endpoints. own has
// the networks of the cluster's pods and Services. NodeRoutesOf leaves out routes into own, because
// a CNI may have thousands of them. It returns at most 128 routes. If there are more, it prefers
// routes via an address in nodes. It leaves out routes via the next hop of a default route first,
// because that next hop is hardly ever a node.
func NodeRoutesOf(have []kernel.Route, own []netip.Prefix, nodes []netip.Addr) (all []NodeRoute) {
	const byNode, byAnother, byRouter = 0, 1, 2
	ranks := make(map[netip.Addr]int)
	rank := func(r NodeRoute) int {
		if n, known := ranks[r.Via]; known {
			return n
		}
		return byAnother
	}
	for _, r := range have {
		switch {
		case r.Prefix.IsValid() && r.Prefix.Bits() == 0:
			ranks[r.Via] = byRouter
		case r.Prefix.IsValid() && r.Prefix.Addr().Is4() && r.Prefix.Bits() >= WidestNodeNetwork && r.Via.Is4() && !insideAny(r.Prefix, own):
			all = append(all, NodeRoute{r.Prefix.Masked(), r.Via})
		}
	}
	for _, a := range nodes {
		ranks[a] = byNode
	}
	order := func(a, b NodeRoute) int { return cmp.Or(a.Network.Compare(b.Network), a.Via.Compare(b.Via)) }
	slices.SortFunc(all, func(a, b NodeRoute) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), order(a, b)) })
	all = slices.Compact(all)
	all = all[:min(len(all), maxNodeRoutes)]
	slices.SortFunc(all, order)
	return all
}

// NodeRoutesFrom reads the routes of a report, and ignores invalid routes.
func NodeRoutesFrom(from *isthmus.NodeNetworks) []NodeRoute {
	var all []kernel.Route
	for _, r := range from.Spec.Routes {
		network, err := netip.ParsePrefix(r.Network)
		via, wrong := netip.ParseAddr(r.Via)
		if err == nil && wrong == nil {
			all = append(all, kernel.Route{Prefix: network, Via: via})
		}
	}
	return NodeRoutesOf(all, nil, nil)
}

// limitNetworks merges networks of one family until at most limit are left. It chooses the greatest
// prefix length for which at most limit networks are left, and shortens all longer prefixes to this
// length. limit must be at least the number of networks of length WidestNodeNetwork in a family.
func limitNetworks(limit int, networks []netip.Prefix) []netip.Prefix {
	merged := mergeNetworks(networks)
	if len(merged) <= limit {
		return merged
	}
	longest := merged[0].Addr().BitLen()
	cut := func(bits int) []netip.Prefix {
		short := make([]netip.Prefix, len(merged))
		for i, p := range merged {
			short[i] = netip.PrefixFrom(p.Addr(), min(p.Bits(), bits)).Masked()
		}
		return mergeNetworks(short)
	}
	// Shorter prefixes never result in more networks, so a binary search finds the length.
	steps := sort.Search(longest-WidestNodeNetwork, func(i int) bool { return len(cut(longest-i)) <= limit })
	return cut(longest - steps)
}

// mergeNetworks sorts networks, and removes each network that is inside another one. If both halves
// of a network are in the list, it joins them, unless the result would be wider than
// WidestNodeNetwork. It works in place.
func mergeNetworks(networks []netip.Prefix) []netip.Prefix {
	slices.SortFunc(networks, netip.Prefix.Compare) // in this order, a network precedes the networks inside it
	out := networks[:0]
	for _, p := range networks {
		if len(out) > 0 && contains(out[len(out)-1], p) {
			continue
		}
		out = append(out, p)
		for len(out) > 1 {
			a, b := out[len(out)-2], out[len(out)-1]
			if a.Bits() != b.Bits() || a.Bits() <= WidestNodeNetwork {
				break
			}
			parent := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
			if !parent.Contains(b.Addr()) {
				break
			}
			out = append(out[:len(out)-2], parent)
		}
	}
	return out
}

func insideAny(p netip.Prefix, networks []netip.Prefix) bool {
	return slices.ContainsFunc(networks, func(n netip.Prefix) bool { return contains(n, p) })
}

func contains(n, p netip.Prefix) bool { return n.Bits() <= p.Bits() && n.Contains(p.Addr()) }

func hostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
