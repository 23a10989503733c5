package ipam

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// errNoConfiguration means that a peer has no networks here, or has not answered yet.
var errNoConfiguration = errors.New("has no network configuration yet")

// MapEndpoint returns the address by which the peer reaches our endpoint ip. A repeated call
// returns the same address.
//
// A pod's address is translated into the network that the peer uses for our pods, without state.
// Any other endpoint gets an address of our ExternalCIDR, the same for all peers. The peer sees
// that address in its own network for our ExternalCIDR.
//
// The endpoint may have any address except in our own ExternalCIDR and in special-purpose ranges,
// where nothing can be reached. An address in a peer's network is valid: this is how a cluster
// makes pods of a third cluster reachable.
func (b State) MapEndpoint(id string, ip netip.Addr) (State, netip.Addr, error) {
	p := b.peers[id]
	if err := b.checkEndpoint(ip); err != nil {
		return b, netip.Addr{}, err
	}
	switch inPods := b.own.PodCIDR.Contains(ip); {
	case p == nil || inPods && !p.podSeen.IsValid() || !inPods && !p.externalSeen.IsValid():
		return b, netip.Addr{}, fmt.Errorf("cluster %q %w", id, errNoConfiguration)
	case inPods:
		return b, move(ip, p.podSeen), nil
	case ip.BitLen() != p.externalSeen.Addr().BitLen():
		return b, netip.Addr{}, fmt.Errorf("endpoint %v: is not of the family of our ExternalCIDR, %v", ip, b.own.ExternalCIDR)
	case ip == gatewayAddr(b.own.ExternalCIDR):
		return b, move(firstHost(b.own.ExternalCIDR), p.externalSeen), nil
	}

	if _, mapped := p.endpoints[ip]; !mapped && len(p.endpoints) >= MaxEndpointsPerPeer {
		return b, netip.Addr{}, refuse(v1alpha1.ReasonExhausted, "", "endpoint %v: %d endpoints are already mapped for cluster %q, and its NetworkAllocation has no room for more", ip, MaxEndpointsPerPeer, id)
	}
	if e := b.endpoints[ip]; e != nil {
		return b.mapTo(id, ip, e.addr), move(e.addr, p.externalSeen), nil
	}
	if len(b.endpoints) >= MaxEndpoints-1 {
		return b, netip.Addr{}, refuse(v1alpha1.ReasonExhausted, "", "endpoint %v: %d endpoints are already mapped, and there is no room for more", ip, MaxEndpoints)
	}
	addr, ok := b.addresses.lowest(b.own.ExternalCIDR)
	if !ok {
		return b, netip.Addr{}, refuse(v1alpha1.ReasonExhausted, "", "endpoint %v: no address is free in our ExternalCIDR, %v", ip, b.own.ExternalCIDR)
	}
	return b.mapTo(id, ip, addr), move(addr, p.externalSeen), nil
}

// Mapped reports whether the endpoint is mapped for the peer to an address of our ExternalCIDR. The
// gateway's own address does not count.
func (b State) Mapped(id string, ip netip.Addr) bool {
	p := b.peers[id]
	if p == nil {
		return false
	}
	_, mapped := p.endpoints[ip]
	return mapped
}

// KnowsNodes reports whether Configure has been called with nodes. Until then, Guarded cannot
// recognize nodes, because no object stores their addresses. Every cluster has nodes, so a list
// without nodes means that Configure has not received them yet.
func (b State) KnowsNodes() bool { return len(b.own.Nodes) > 0 }

// Guarded returns a clause with the kind of a guarded endpoint, such as "is an address of a node".
// It returns "" for any other endpoint. Nodes, Services, API servers and endpoints of other peers
// are guarded: they may be mapped for a peer only if an administrator allows it.
func (b State) Guarded(ip netip.Addr) string {
	switch {
	case b.IsNode(ip):
		return "is an address of a node"
	case b.ServicesAt(ip).IsValid():
		return fmt.Sprintf("is a Service, in %v", b.ServicesAt(ip))
	}
	if id, network := b.PeerAt(ip); id != "" {
		return fmt.Sprintf("is in %v, a network of cluster %q", network, id)
	}
	return ""
}

// IsNode reports whether a node or an API server has the address.
func (b State) IsNode(ip netip.Addr) bool {
	_, node := slices.BinarySearchFunc(b.own.Nodes, ip, netip.Addr.Compare)
	return node
}

// ServicesAt returns the network of our Services that contains the address, or the zero value if
// none does.
func (b State) ServicesAt(ip netip.Addr) netip.Prefix {
	for _, network := range append([]netip.Prefix{b.own.ServiceCIDR}, b.own.Services...) {
		if network.Contains(ip) {
			return network
		}
	}
	return netip.Prefix{}
}

// PeerAt returns the peer with a network here that contains the address, and that network. It
// returns zero values if there is none.
func (b State) PeerAt(ip netip.Addr) (id string, network netip.Prefix) {
	for id, p := range b.peers {
		for _, network := range []netip.Prefix{p.Pod, p.External} {
			if network.Contains(ip) {
				return id, network
			}
		}
	}
	return "", netip.Prefix{}
}

// RestoreEndpoint restores a mapping of a lost IPAM state. remote is the address, in the peer's
// network for our ExternalCIDR, by which the peer reaches the endpoint ip. The State is unchanged
// if the endpoint already has another address, or if another endpoint has that address.
func (b State) RestoreEndpoint(id string, ip, remote netip.Addr) State {
	p := b.peers[id]
	if p == nil || !p.externalSeen.Contains(remote) || b.checkEndpoint(ip) != nil || ip.BitLen() != remote.BitLen() || len(b.endpoints) >= MaxEndpoints-1 {
		return b
	}
	addr := move(remote, b.own.ExternalCIDR)
	if e := b.endpoints[ip]; e != nil && e.addr != addr || e == nil && b.addresses.overlaps(host(addr)) {
		return b
	}
	return b.mapTo(id, ip, addr)
}

// mapTo maps the endpoint for the peer to addr, which must be free or belong to that endpoint
// already.
func (b State) mapTo(id string, ip, addr netip.Addr) State {
	p := *b.peers[id]
	if _, mapped := p.endpoints[ip]; mapped {
		return b
	}
	next := endpoint{addr: addr}
	if e := b.endpoints[ip]; e != nil {
		next = *e
	} else {
		b.addresses = b.addresses.with(host(addr))
	}
	next.peers++
	endpoints := make(map[netip.Addr]*endpoint, len(b.endpoints)+1)
	maps.Copy(endpoints, b.endpoints)
	endpoints[ip] = &next
	b.endpoints = endpoints
	p.endpoints = withRequesters(maps.Clone(p.endpoints), ip, nil)
	return b.withPeer(id, &p)
}

// UnmapEndpoint undoes MapEndpoint for one peer. If no other peer uses the endpoint, its address is
// free at once. UnmapEndpoint ignores an endpoint that is not mapped, and the gateway's own
// address.
func (b State) UnmapEndpoint(id string, ip netip.Addr) State {
	p := b.peers[id]
	if p == nil {
		return b
	}
	if _, mapped := p.endpoints[ip]; !mapped {
		return b
	}
	changed := *p
	changed.endpoints = maps.Clone(p.endpoints)
	delete(changed.endpoints, ip)
	b.endpoints = maps.Clone(b.endpoints)
	b.drop(ip)
	return b.withPeer(id, &changed)
}

// unmapAll removes a peer from all endpoints that are mapped for the peer. It leaves p unchanged.
func (b State) unmapAll(p *account) State {
	if len(p.endpoints) == 0 {
		return b
	}
	b.endpoints = maps.Clone(b.endpoints)
	for ip := range p.endpoints {
		b.drop(ip)
	}
	return b
}

// drop removes one peer from an endpoint. It changes b.endpoints in place, so no other State may
// share that map.
func (b *State) drop(ip netip.Addr) {
	e := *b.endpoints[ip]
	if e.peers--; e.peers > 0 {
		b.endpoints[ip] = &e
		return
	}
	delete(b.endpoints, ip)
	b.addresses = b.addresses.without(host(e.addr))
}

// HomePodIP returns the address here of a pod that has the address ip in the peer's cluster.
func (b State) HomePodIP(id string, ip netip.Addr) (netip.Addr, error) {
	allocation, ok := b.AllocationOf(id)
	switch {
	case !ok:
		return netip.Addr{}, fmt.Errorf("cluster %q %w", id, errNoConfiguration)
	case !ip.IsValid() || ip.Zone() != "" || ip.BitLen() != allocation.Pod.Addr().BitLen():
		return netip.Addr{}, fmt.Errorf("pod %v: is not of the family of the network for the pods of cluster %q, %v", ip, id, allocation.Pod)
	}
	return move(ip, allocation.Pod), nil
}

// NatMapping returns the spec of the peer's NatMapping. It returns false until the peer both has
// networks here and has answered.
func (b State) NatMapping(id string) (v1alpha1.NatMappingSpec, bool) {
	p := b.peers[id]
	if p == nil || !p.Pod.IsValid() || !p.externalSeen.IsValid() {
		return v1alpha1.NatMappingSpec{}, false
	}
	mappings := make(v1alpha1.EndpointMap, len(p.endpoints)+1)
	mappings[gatewayAddr(b.own.ExternalCIDR).String()] = move(firstHost(b.own.ExternalCIDR), p.externalSeen).String()
	for ip := range p.endpoints {
		mappings[ip.String()] = move(b.endpoints[ip].addr, p.externalSeen).String()
	}
	return v1alpha1.NatMappingSpec{
		ClusterID:       id,
		PodCIDR:         p.Pod.String(),
		ExternalCIDR:    p.externalSeen.String(),
		ClusterMappings: mappings,
	}, true
}

// checkEndpoint explains why an endpoint cannot be mapped, or returns nil.
func (b *State) checkEndpoint(ip netip.Addr) error {
	const want = "want an address that is reachable from our pod network"
	switch {
	case !ip.IsValid() || ip.Zone() != "" || ip.Is4In6():
		return fmt.Errorf("endpoint %v: is not a plain IP address (no zone, not IPv4-mapped); %s", ip, want)
	case b.own.ExternalCIDR.Contains(ip):
		return fmt.Errorf("endpoint %v: is in our ExternalCIDR, %v, to whose addresses endpoints are mapped; %s", ip, b.own.ExternalCIDR, want)
	case ip == gatewayAddr(b.own.ExternalCIDR):
		return nil
	}
	for _, s := range slices.Concat(special, metadata) {
		if s.Contains(ip) {
			return fmt.Errorf("endpoint %v: is in the special range %v; %s", ip, s, want)
		}
	}
	return nil
}

// gatewayAddr returns the gateway's own address in the family of our ExternalCIDR.
func gatewayAddr(external netip.Prefix) netip.Addr {
	if external.IsValid() && !external.Addr().Is4() {
		return fabric.GatewayAddr6
	}
	return fabric.GatewayAddr
}

// firstHost returns the address that represents the gateway in the connection check.
func firstHost(external netip.Prefix) netip.Addr {
	if !external.IsValid() {
		return netip.Addr{}
	}
	return fabric.FirstHost(external)
}

// withRequesters adds a mapping and its requesters to m, which may be nil.
func withRequesters(m map[netip.Addr][]string, ip netip.Addr, callers []string) map[netip.Addr][]string {
	if m == nil {
		m = make(map[netip.Addr][]string)
	}
	m[ip] = callers
	return m
}
