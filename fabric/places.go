package fabric

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
)

// PodPlaces tracks the nodes and pods of a cluster for a gateway that is a Pod. Such a gateway
// needs only the pods outside their node's podCIDRs, and PodPlaces lists these pods separately. The
// time for an update does not depend on the size of the cluster. The zero value is an empty
// cluster. A PodPlaces is not safe for concurrent use.
type PodPlaces struct {
	Self string // name of the gateway's node; must not change after the first call

	nodes   map[string]ClusterNode
	sources map[string][]netip.Addr         // ClusterNode.Sources, by node
	routes  []NodeRoute                     // ClusterNode.Routes, of Self
	sorted  []ClusterNode                   // by name; nil until the first call of Network
	pods    map[string]map[string][]NodePod // by node and ID
	outside map[string]map[string][]NodePod // the pods outside their node's podCIDRs
	counts  map[string]tally                // by node
	seen    int                             // number of known nodes with IPv4 pods
	holding int                             // number of these nodes on which all pods are inside the node's podCIDRs

	owners map[netip.Addr]Owner // see Owner; nil: the next call of Owner builds it
}

// An Owner is the pod that has an address. If Pod is empty, it is the node that has the address.
type Owner struct {
	Pod  string // namespace/name
	Node string // the pod's node, or the node itself
}

// Owner returns the pod or the node with an address, according to the API server. The result is
// only for display; do not base decisions on it. It is zero if no pod or node has the address, or
// if more than one has it. The first call builds an index, which SetPod keeps up to date.
func (p *PodPlaces) Owner(addr netip.Addr) Owner {
	if p.owners == nil {
		p.owners = make(map[netip.Addr]Owner)
		for _, n := range p.nodes {
			for _, a := range n.Addrs {
				p.addOwner(a, Owner{Node: n.Name})
			}
		}
		for node, all := range p.sources {
			for _, a := range all {
				p.addOwner(a, Owner{Node: node})
			}
		}
		for node, all := range p.pods {
			for id, pods := range all {
				for _, pod := range pods {
					p.addOwner(pod.Addr, Owner{id, node})
				}
			}
		}
	}
	return p.owners[addr]
}

// addOwner adds an address to the index. If the address already has an owner, addOwner replaces it
// by the zero Owner.
func (p *PodPlaces) addOwner(addr netip.Addr, o Owner) {
	if other, has := p.owners[addr]; has && other != o {
		o = Owner{}
	}
	p.owners[addr] = o
}

// removeOwner removes a pod's addresses from the index. If an address had several owners, it
// discards the index, because the index does not store the remaining owners.
func (p *PodPlaces) removeOwner(o Owner, pods []NodePod) {
	for _, pod := range pods {
		if now, has := p.owners[pod.Addr]; now == o {
			delete(p.owners, pod.Addr)
		} else if has {
			p.owners = nil
			return
		}
	}
}

// A tally counts the IPv4 addresses of a node's pods inside and outside its podCIDRs.
type tally struct{ inside, outside int }

// SetNode sets the state of a node, and reports whether it changed. It ignores Sources and Routes,
// which SetSources and SetRoutes set.
func (p *PodPlaces) SetNode(n ClusterNode) bool {
	was, known := p.nodes[n.Name]
	if known && was.Created == n.Created && slices.Equal(was.Addrs, n.Addrs) && slices.Equal(was.PodCIDRs, n.PodCIDRs) {
		return false
	}
	if p.nodes == nil {
		p.nodes = make(map[string]ClusterNode)
	}
	p.replace(n.Name, func() { p.nodes[n.Name] = n })
	return true
}

// RemoveNode removes a node, and reports whether it was known.
func (p *PodPlaces) RemoveNode(name string) bool {
	if _, known := p.nodes[name]; !known {
		return false
	}
	p.replace(name, func() { delete(p.nodes, name) })
	return true
}

// SetSources sets additional source addresses of a node's outer packets, and reports whether they
// changed. The node need not be known yet.
func (p *PodPlaces) SetSources(node string, all []netip.Addr) bool {
	if slices.Equal(p.sources[node], all) {
		return false
	}
	if p.sources == nil {
		p.sources = make(map[string][]netip.Addr)
	}
	if p.sources[node] = all; len(all) == 0 {
		delete(p.sources, node)
	}
	p.owners = nil
	p.updateSorted(node)
	return true
}

// SetRoutes sets the routes of the gateway's node, and reports whether they changed. It ignores the
// routes of other nodes.
func (p *PodPlaces) SetRoutes(node string, all []NodeRoute) bool {
	if node != p.Self || slices.Equal(p.routes, all) {
		return false
	}
	p.routes = all
	p.updateSorted(node)
	return true
}

// updateSorted replaces, inserts or removes a node in p.sorted. It makes a new list, because
// callers of Network use the old one.
func (p *PodPlaces) updateSorted(name string) {
	if p.sorted == nil {
		return
	}
	at, was := slices.BinarySearchFunc(p.sorted, name, func(n ClusterNode, name string) int { return cmp.Compare(n.Name, name) })
	var now []ClusterNode
	n, found := p.nodes[name]
	if found {
		n.Sources = p.sources[name]
		if name == p.Self {
			n.Routes = p.routes
		}
		now = []ClusterNode{n}
	}
	rest := p.sorted[at:]
	if was {
		rest = rest[1:]
	}
	p.sorted = slices.Concat(p.sorted[:at], now, rest)
}

// replace calls f to change a node, and counts the node's pods again.
func (p *PodPlaces) replace(name string, f func()) {
	p.owners = nil
	all := p.pods[name]
	p.count(name, tally{})
	delete(p.counts, name)
	delete(p.outside, name)
	f()
	p.updateSorted(name)
	for id, pods := range all {
		p.add(name, id, pods)
	}
}

// SetPod sets the addresses of a pod on a node; a deleted pod has none. id identifies the pod, such
// as namespace/name. previous is the name of the pod's previous node, or empty. SetPod reports
// whether the result of Network may have changed.
func (p *PodPlaces) SetPod(id, previous, node string, pods []NodePod) bool {
	trusted := p.trusted()
	changed := false
	for _, name := range []string{previous, node} {
		old, had := p.pods[name][id]
		if !had || name == node && slices.Equal(old, pods) {
			continue
		}
		now := p.counts[name]
		for _, pod := range old {
			if pod.Addr.Is4() && p.inside(pod) {
				now.inside--
			} else if pod.Addr.Is4() {
				now.outside--
			}
		}
		p.count(name, now)
		p.removeOwner(Owner{id, name}, old)
		_, outside := p.outside[name][id]
		changed = changed || outside
		remove(p.outside, name, id)
		remove(p.pods, name, id)
	}
	if _, has := p.pods[node][id]; !has && len(pods) > 0 {
		if p.pods == nil {
			p.pods, p.outside, p.counts = make(map[string]map[string][]NodePod), make(map[string]map[string][]NodePod), make(map[string]tally)
		}
		put(p.pods, node, id, pods)
		p.add(node, id, pods)
		if p.owners != nil {
			for _, pod := range pods {
				p.addOwner(pod.Addr, Owner{id, node})
			}
		}
		_, outside := p.outside[node][id]
		changed = changed || outside
	}
	return changed || trusted != p.trusted()
}

// add counts the addresses of a pod, and adds those outside its node's podCIDRs to p.outside.
func (p *PodPlaces) add(node, id string, pods []NodePod) {
	now, outside := p.counts[node], false
	for _, pod := range pods {
		inside := p.inside(pod)
		outside = outside || !inside
		if pod.Addr.Is4() && inside {
			now.inside++
		} else if pod.Addr.Is4() {
			now.outside++
		}
	}
	p.count(node, now)
	if outside {
		put(p.outside, node, id, slices.DeleteFunc(slices.Clone(pods), p.inside))
	}
}

func (p *PodPlaces) inside(pod NodePod) bool {
	return slices.ContainsFunc(p.nodes[pod.Node].PodCIDRs, func(c netip.Prefix) bool { return c.Contains(pod.Addr) })
}

// count replaces the tally of a node, and updates p.seen and p.holding.
func (p *PodPlaces) count(name string, now tally) {
	if _, known := p.nodes[name]; known {
		was := p.counts[name]
		p.seen += sign(now.inside+now.outside) - sign(was.inside+was.outside)
		p.holding += holds(now) - holds(was)
	}
	if p.counts != nil {
		p.counts[name] = now
	}
}

func sign(n int) int { return min(n, 1) }

func holds(c tally) int {
	if c.inside > 0 && c.outside == 0 {
		return 1
	}
	return 0
}

// trusted returns the same result as podCIDRsHold, but does not read all pods.
func (p *PodPlaces) trusted() bool {
	_, known := p.nodes[p.Self]
	return known && holds(p.counts[p.Self]) == 1 && 2*p.holding >= p.seen
}

// Network returns the PodNetwork of a gateway whose Pod has the given address. The lists are sorted
// by content. Callers must not modify the lists.
func (p *PodPlaces) Network(pod netip.Addr) PodNetwork {
	if p.sorted == nil {
		p.sorted = slices.SortedFunc(maps.Values(p.nodes), func(a, b ClusterNode) int { return cmp.Compare(a.Name, b.Name) })
		for i := range p.sorted {
			p.sorted[i].Sources = p.sources[p.sorted[i].Name]
			if p.sorted[i].Name == p.Self {
				p.sorted[i].Routes = p.routes
			}
		}
	}
	n := PodNetwork{Pod: pod, Node: p.Self, Nodes: p.sorted, Trusted: p.trusted()}
	for _, byNode := range p.outside {
		for _, pods := range byNode {
			n.Pods = append(n.Pods, pods...)
		}
	}
	in := NodeIntent{Pods: n.Pods}
	in.Sort()
	return n
}

func put(all map[string]map[string][]NodePod, node, id string, pods []NodePod) {
	if all[node] == nil {
		all[node] = make(map[string][]NodePod)
	}
	all[node][id] = pods
}

func remove(all map[string]map[string][]NodePod, node, id string) {
	if delete(all[node], id); len(all[node]) == 0 {
		delete(all, node)
	}
}
