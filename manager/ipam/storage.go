package ipam

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// Spec returns the State, except its nodes, in Liqo's format. Fields are never nil. Liqo's prefixes
// stay empty, because they follow from the other fields.
func (b State) Spec() v1alpha1.IpamStorageSpec {
	return b.part(slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Keys(b.endpoints)))
}

// Delta returns the Specs of two States, for a comparison. If both States have the same own
// networks, Delta leaves out the entries of peers that do not differ. If one State was made from
// the other by changes of a few peers, the cost then depends only on these peers.
func Delta(before, after State) (have, want v1alpha1.IpamStorageSpec) {
	if !before.own.sameNetworks(after.own) {
		return before.Spec(), after.Spec()
	}
	ids, ips := after.Changed(before), make(map[netip.Addr]struct{})
	for _, id := range ids {
		for _, b := range []State{before, after} {
			if p := b.peers[id]; p != nil {
				for ip := range p.endpoints {
					ips[ip] = struct{}{}
				}
			}
		}
	}
	addrs := slices.Collect(maps.Keys(ips))
	return before.part(ids, addrs), after.part(ids, addrs)
}

// part returns the Spec with only the given peers and endpoints. ips must include all endpoints of
// the peers.
func (b State) part(ids []string, ips []netip.Addr) v1alpha1.IpamStorageSpec {
	spec := v1alpha1.IpamStorageSpec{
		Prefixes:              map[string][]byte{},
		Pools:                 texts(b.own.Pools),
		ReservedSubnets:       texts(b.own.Reserved),
		ClusterSubnets:        make(map[string]v1alpha1.Subnets, len(ids)),
		ExternalCIDR:          text(b.own.ExternalCIDR),
		EndpointMappings:      make(map[string]v1alpha1.EndpointMapping, len(ips)+1),
		PodCIDR:               text(b.own.PodCIDR),
		ServiceCIDR:           text(b.own.ServiceCIDR),
		NatMappingsConfigured: make(map[string]v1alpha1.ConfiguredCluster),
	}
	for _, ip := range ips {
		e := b.endpoints[ip]
		if e == nil {
			continue
		}
		spec.EndpointMappings[ip.String()] = v1alpha1.EndpointMapping{
			ExternalCIDROriginalIP: e.addr.String(),
			ClusterMappings:        make(map[string]v1alpha1.ClusterMapping),
		}
	}
	gateway := v1alpha1.EndpointMapping{
		ExternalCIDROriginalIP: firstHost(b.own.ExternalCIDR).String(),
		ClusterMappings:        make(map[string]v1alpha1.ClusterMapping),
	}
	for _, p := range b.peers {
		if p.externalSeen.IsValid() { // the gateway's own address is mapped for every peer that has answered
			spec.EndpointMappings[gatewayAddr(b.own.ExternalCIDR).String()] = gateway
			break
		}
	}
	for _, id := range ids {
		p := b.peers[id]
		if p == nil {
			continue
		}
		spec.ClusterSubnets[id] = v1alpha1.Subnets{
			LocalNATPodCIDR:      nat(p.podSeen, b.own.PodCIDR),
			RemotePodCIDR:        text(p.Pod),
			LocalNATExternalCIDR: nat(p.externalSeen, b.own.ExternalCIDR),
			RemoteExternalCIDR:   text(p.External),
		}
		if !p.externalSeen.IsValid() {
			continue
		}
		gateway.ClusterMappings[id] = v1alpha1.ClusterMapping{ExternalCIDRNattedIP: move(firstHost(b.own.ExternalCIDR), p.externalSeen).String()}
		spec.NatMappingsConfigured[id] = v1alpha1.ConfiguredCluster{}
		for ip := range p.endpoints {
			spec.EndpointMappings[ip.String()].ClusterMappings[id] = v1alpha1.ClusterMapping{
				ExternalCIDRNattedIP: move(b.endpoints[ip].addr, p.externalSeen).String(),
			}
		}
	}
	return spec
}

func text(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return p.String()
}

func texts(list []netip.Prefix) []string {
	out := make([]string, len(list))
	for i, p := range list {
		out[i] = p.String()
	}
	return out
}

func nat(seen, own netip.Prefix) string {
	if seen == own && own.IsValid() {
		return v1alpha1.None
	}
	return text(seen)
}

// Read makes a State from the spec of an IpamStorage that Liqo, or the method State.Spec, has
// written. The error names the first invalid field, in alphabetical order. Read ignores values that
// follow from other fields: prefixes, natMappingsConfigured, and the mappings of the gateway's own
// address. The spec has no nodes, so the caller has to call Configure.
func Read(spec *v1alpha1.IpamStorageSpec) (State, error) {
	if n := len(spec.ClusterSubnets); n > MaxPeers {
		return State{}, fmt.Errorf("spec.clusterSubnets: has %d peers; want at most %d", n, MaxPeers)
	}
	if n := len(spec.EndpointMappings); n > MaxEndpoints {
		return State{}, fmt.Errorf("spec.endpointMappings: has %d endpoints; want at most %d", n, MaxEndpoints)
	}
	var (
		b State
		r reader
	)
	b.own.Pools = r.list("spec.pools", spec.Pools)
	b.own.Reserved = r.list("spec.reservedSubnets", spec.ReservedSubnets)
	slices.SortFunc(b.own.Reserved, netip.Prefix.Compare)
	b.own.Reserved = slices.Compact(b.own.Reserved)
	b.own.PodCIDR = r.optional("spec.podCIDR", spec.PodCIDR)
	b.own.ServiceCIDR = r.optional("spec.serviceCIDR", spec.ServiceCIDR)
	b.own.ExternalCIDR = r.optional("spec.externalCIDR", spec.ExternalCIDR)
	if r.err != nil {
		return State{}, r.err
	}
	b.peers = r.peers(spec.ClusterSubnets, &b.own)
	b.endpoints = r.endpoints(spec.EndpointMappings, b.own.ExternalCIDR, b.peers)
	if r.err != nil {
		return State{}, r.err
	}
	b.fill()
	b.readdress(b.own.ExternalCIDR, b.own.PodCIDR)
	return b, nil
}

// A reader parses stored values and records the first error. After an error, its results must not
// be used.
type reader struct{ err error }

func (r *reader) fail(field, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %s", field, fmt.Sprintf(format, args...))
	}
}

// quote quotes input that may be long.
func quote(s string) string {
	if len(s) > 100 {
		s = s[:100] + "..."
	}
	return strconv.Quote(s)
}

func (r *reader) prefix(field, value string) netip.Prefix {
	p, err := netip.ParsePrefix(value)
	if err != nil || p != p.Masked() || p.String() != value {
		r.fail(field, "%s is not a network in canonical CIDR notation, such as 10.244.0.0/16", quote(value))
		return netip.Prefix{}
	}
	return p
}

// list parses networks. It never returns nil, which Configure would replace with defaultPools.
func (r *reader) list(field string, values []string) []netip.Prefix {
	out := []netip.Prefix{}
	for i, v := range values {
		out = append(out, r.prefix(fmt.Sprintf("%s[%d]", field, i), v))
	}
	return out
}

func (r *reader) optional(field, value string) netip.Prefix {
	if value == "" {
		return netip.Prefix{}
	}
	return r.prefix(field, value)
}

// network parses an optional network, and checks that pods can have its addresses.
func (r *reader) network(field, value string) netip.Prefix {
	p := r.optional(field, value)
	if p.IsValid() {
		if wrong := fabric.CheckNetwork(p); wrong != "" {
			r.fail(field, "%s", wrong)
		}
	}
	return p
}

// answer parses value, the network by which a peer represents one of our networks. Our network is
// original.
func (r *reader) answer(field, value string, original netip.Prefix, originalField string) netip.Prefix {
	if value == "" {
		return netip.Prefix{}
	}
	if !original.IsValid() {
		r.fail(field, "is %s, but %s is empty; want both or none", quote(value), originalField)
		return netip.Prefix{}
	}
	if value == v1alpha1.None {
		value = original.String()
	}
	p := r.network(field, value)
	if r.err == nil && !fits(p, original) {
		r.fail(field, "%v does not have the family and length of %s, %v; want a %s", p, originalField, original, length(original))
	}
	return p
}

func (r *reader) peers(subnets map[string]v1alpha1.Subnets, own *Config) map[string]*account {
	peers := make(map[string]*account, len(subnets))
	var allocated tree
	for _, id := range slices.Sorted(maps.Keys(subnets)) {
		s, field := subnets[id], "spec.clusterSubnets["+quote(id)+"]"
		if wrong := fabric.CheckClusterID(id); wrong != "" {
			r.fail(field, "the key %s", wrong)
		}
		p := &account{
			Allocation: Allocation{
				Pod:      r.network(field+".remotePodCIDR", s.RemotePodCIDR),
				External: r.network(field+".remoteExternalCIDR", s.RemoteExternalCIDR),
			},
			podSeen:      r.answer(field+".localNATPodCIDR", s.LocalNATPodCIDR, own.PodCIDR, "spec.podCIDR"),
			externalSeen: r.answer(field+".localNATExternalCIDR", s.LocalNATExternalCIDR, own.ExternalCIDR, "spec.externalCIDR"),
		}
		if p.Pod.IsValid() != p.External.IsValid() || p.Pod.Addr().BitLen() != p.External.Addr().BitLen() {
			r.fail(field+".remoteExternalCIDR", "is %s, but remotePodCIDR is %s; want both of one family, or none",
				quote(s.RemoteExternalCIDR), quote(s.RemotePodCIDR))
		}
		for _, n := range []struct {
			field  string
			prefix netip.Prefix
		}{{".remotePodCIDR", p.Pod}, {".remoteExternalCIDR", p.External}} {
			if n.prefix.IsValid() && allocated.overlaps(n.prefix) {
				r.fail(field+n.field, "%v overlaps another network of a peer; want networks that do not overlap", n.prefix)
			}
			allocated = allocated.with(n.prefix)
		}
		if r.err != nil {
			return peers
		}
		peers[id] = p
	}
	return peers
}

// endpoints parses the mappings, and adds them to their peers.
func (r *reader) endpoints(mappings map[string]v1alpha1.EndpointMapping, external netip.Prefix, peers map[string]*account) map[netip.Addr]*endpoint {
	endpoints := make(map[netip.Addr]*endpoint, len(mappings))
	owners := make(map[netip.Addr]string, len(mappings))
	for _, key := range slices.Sorted(maps.Keys(mappings)) {
		m, field := mappings[key], "spec.endpointMappings["+quote(key)+"]"
		if !external.IsValid() {
			r.fail(field, "is mapped, but spec.externalCIDR is empty; want a network to map it to")
			return endpoints
		}
		ip := r.addr(field, key)
		addr := r.addr(field+".ExternalCIDROriginalIP", m.ExternalCIDROriginalIP)
		if r.err != nil {
			return endpoints
		}
		gateway := ip == gatewayAddr(external)
		switch first := firstHost(external); {
		case gateway && addr != first:
			r.fail(field+".ExternalCIDROriginalIP", "%v is not the first host of spec.externalCIDR; want %v", addr, first)
		case gateway:
			continue // derived from the answers
		case !external.Contains(addr) || addr == external.Addr() || addr == first || addr == lastAddr(external):
			r.fail(field+".ExternalCIDROriginalIP", "%v cannot be the address of an endpoint; want an address in %v, except its first two and its last", addr, external)
		case owners[addr] != "":
			r.fail(field+".ExternalCIDROriginalIP", "%v is already the address of endpoint %s; want another address", addr, owners[addr])
		}
		if err := (&State{own: Config{ExternalCIDR: external}}).checkEndpoint(ip); err != nil {
			r.fail(field, "%v", err)
		}
		if ip.BitLen() != external.Addr().BitLen() {
			r.fail(field, "is not of the family of spec.externalCIDR, %v", external)
		}
		owners[addr] = key
		for _, id := range slices.Sorted(maps.Keys(m.ClusterMappings)) {
			field := field + ".clusterMappings[" + quote(id) + "]"
			p := peers[id]
			if p == nil || !p.externalSeen.IsValid() {
				r.fail(field, "there is no spec.clusterSubnets[%s].localNATExternalCIDR; set it, or remove this entry", quote(id))
				return endpoints
			}
			natted := r.addr(field+".ExternalCIDRNattedIP", m.ClusterMappings[id].ExternalCIDRNattedIP)
			if want := move(addr, p.externalSeen); r.err == nil && natted != want {
				r.fail(field+".ExternalCIDRNattedIP", "%v is not the translation of %v into %v; want %v", natted, addr, p.externalSeen, want)
			}
			p.endpoints = withRequesters(p.endpoints, ip, nil)
		}
		if r.err != nil {
			return endpoints
		}
		endpoints[ip] = &endpoint{addr: addr}
	}
	return endpoints
}

func (r *reader) addr(field, value string) netip.Addr {
	a, err := netip.ParseAddr(value)
	if err != nil || a.Zone() != "" || a.Is4In6() || a.String() != value {
		r.fail(field, "%s is not an IP address in canonical notation, such as 10.0.0.1", quote(value))
		return netip.Addr{}
	}
	return a
}
