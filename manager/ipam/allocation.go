package ipam

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// Clusters returns the sorted IDs of all clusters that have an entry: peers, clusters with held
// networks, and former peers whose networks are remembered.
func (b State) Clusters() []string {
	ids := slices.Collect(maps.Keys(b.peers))
	for _, r := range b.replaced {
		ids = append(ids, r.id)
	}
	for _, f := range b.departed {
		ids = append(ids, f.ID)
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

// Allocation returns the entry of a cluster as its NetworkAllocation stores it, without revisions
// and freed networks.
func (b State) Allocation(id string) isthmus.NetworkAllocationSpec {
	spec := isthmus.NetworkAllocationSpec{ClusterID: id, Networks: texts(b.NetworksOf(id))}
	for _, r := range b.replaced {
		if r.id == id {
			spec.Held = append(spec.Held, isthmus.HeldNetwork{Network: r.network.String(), ReleasedAt: isthmus.UTCTimeOf(r.released)})
		}
	}
	if had, away := b.PreviousOf(id); away {
		spec.Previous = pairOf(had.Pod, had.External)
	}
	p := b.peers[id]
	if p == nil {
		return spec
	}
	spec.ReleasedAt, spec.UnusedSince = timeOf(p.released), timeOf(p.unused)
	spec.Seen = pairOf(p.podSeen, p.externalSeen)
	spec.Local = pairOf(b.own.answered(p))
	for _, ip := range slices.SortedFunc(maps.Keys(p.endpoints), netip.Addr.Compare) {
		spec.Endpoints = append(spec.Endpoints, isthmus.MappedEndpoint{
			IP: ip.String(), Address: b.endpoints[ip].addr.String(), Requesters: p.endpoints[ip], Target: b.endpoints[ip].kind,
		})
	}
	return spec
}

func pairOf(pod, external netip.Prefix) *isthmus.NetworkPair {
	if !pod.IsValid() && !external.IsValid() {
		return nil
	}
	return &isthmus.NetworkPair{PodCIDR: text(pod), ExternalCIDR: text(external)}
}

// answered returns our PodCIDR and our ExternalCIDR, each only if the peer has answered for it.
func (c Config) answered(p *account) (pod, external netip.Prefix) {
	if p.podSeen.IsValid() {
		pod = c.PodCIDR
	}
	if p.externalSeen.IsValid() {
		external = c.ExternalCIDR
	}
	return pod, external
}

func timeOf(t time.Time) isthmus.UTCTime {
	if t.IsZero() {
		return ""
	}
	return isthmus.UTCTimeOf(t)
}

// Networks returns the networks of a Config as the NetworkAllocation of our own cluster stores
// them.
func (c Config) Networks() isthmus.OwnNetworks {
	return isthmus.OwnNetworks{PodCIDR: text(c.PodCIDR), ServiceCIDR: text(c.ServiceCIDR), ExternalCIDR: text(c.ExternalCIDR),
		Pools: texts(c.Pools), Reserved: texts(c.Reserved)}
}

// ConfigFrom parses the result of Networks.
func ConfigFrom(own *isthmus.OwnNetworks) (Config, error) {
	var r reader
	c := Config{PodCIDR: r.optional("spec.own.podCIDR", own.PodCIDR), ServiceCIDR: r.optional("spec.own.serviceCIDR", own.ServiceCIDR),
		ExternalCIDR: r.optional("spec.own.externalCIDR", own.ExternalCIDR), Pools: r.list("spec.own.pools", own.Pools), Reserved: r.list("spec.own.reserved", own.Reserved)}
	return c, r.err
}

// FromAllocations restores the State from NetworkAllocations. If two of them contradict each other,
// the first one wins. Invalid entries and mappings are left out, and the errors name them.
//
// A manager may have stopped while it wrote a change of our own networks. FromAllocations adapts
// objects that still name our previous networks, as Configure would have done.
func FromAllocations(own Config, all []isthmus.NetworkAllocationSpec) (State, []error) {
	b := State{own: own, peers: make(map[string]*account, len(all)), endpoints: make(map[netip.Addr]*endpoint)}
	var (
		wrong  []error
		taken  tree
		owners = make(map[netip.Addr]netip.Addr) // address → endpoint
	)
	for i := range all {
		spec := &all[i]
		r := reader{}
		p, local, held := r.entry(spec, own)
		for _, n := range []netip.Prefix{p.Pod, p.External} {
			if n.IsValid() && taken.overlaps(n) {
				r.fail("spec.networks", "%v overlaps another network of a peer; want networks that do not overlap", n)
			}
			taken = taken.with(n)
		}
		if len(b.peers) >= MaxPeers {
			r.fail("spec", "there are %d peers already, and no room for more", MaxPeers)
		}
		if r.err != nil {
			taken = taken.without(p.Pod).without(p.External)
			wrong = append(wrong, fmt.Errorf("cluster %s: %w", quote(spec.ClusterID), r.err))
			continue
		}
		b.replaced = append(b.replaced, held...)
		for j := range spec.Endpoints {
			if err := b.restore(p, &spec.Endpoints[j], local, owners); err != nil {
				wrong = append(wrong, fmt.Errorf("cluster %s: spec.endpoints[%d]: %w", quote(spec.ClusterID), j, err))
			}
		}
		if !p.empty() {
			b.peers[spec.ClusterID] = p
		}
	}
	slices.SortFunc(b.replaced, replaced.compare)
	b.replaced = slices.Compact(b.replaced)
	for _, spec := range slices.SortedStableFunc(slices.Values(all), func(x, y isthmus.NetworkAllocationSpec) int { return cmp.Compare(x.Revision, y.Revision) }) {
		if p := b.peers[spec.ClusterID]; (p == nil || !p.Pod.IsValid()) && spec.Previous != nil && fabric.CheckClusterID(spec.ClusterID) == "" {
			var r reader
			had := Allocation{Pod: r.network("spec.previous.podCIDR", spec.Previous.PodCIDR), External: r.network("spec.previous.externalCIDR", spec.Previous.ExternalCIDR)}
			if r.err == nil {
				b.remember(spec.ClusterID, had)
			}
		}
	}
	b.fill()
	b.readdress(own.ExternalCIDR, own.PodCIDR)
	return b, wrong
}

// entry parses the entry of one cluster. local is our ExternalCIDR at the time when the entry was
// written. It contains the addresses of the entry's mapped endpoints.
func (r *reader) entry(spec *isthmus.NetworkAllocationSpec, own Config) (p *account, local netip.Prefix, held []replaced) {
	if wrong := fabric.CheckClusterID(spec.ClusterID); wrong != "" {
		r.fail("spec.clusterID", "%s", wrong)
	}
	p = new(account)
	has := slices.DeleteFunc(slices.Clone(spec.Networks), func(n string) bool {
		return slices.ContainsFunc(spec.Held, func(h isthmus.HeldNetwork) bool { return h.Network == n })
	})
	switch len(has) {
	case 0:
	case 2:
		p.Allocation = Allocation{Pod: r.network("spec.networks", has[0]), External: r.network("spec.networks", has[1])}
	default:
		r.fail("spec.networks", "has %d networks that are not in spec.held; want two, for pods and for mapped endpoints, or none", len(has))
	}
	if p.Pod.IsValid() != p.External.IsValid() || p.Pod.Addr().BitLen() != p.External.Addr().BitLen() || p.Pod.Overlaps(p.External) {
		r.fail("spec.networks", "has %q; want two networks of one family that do not overlap", has)
	}
	for _, h := range spec.Held {
		n := r.network("spec.held", h.Network)
		if !n.IsValid() {
			r.fail("spec.held", "has an entry without a network")
		}
		if !contains(p.Pod, n) && !contains(p.External, n) && len(held) < maxHeldPerPeer {
			held = append(held, replaced{spec.ClusterID, n, r.time("spec.held", h.ReleasedAt)})
		}
	}
	if spec.ReleasedAt != "" && p.Pod.IsValid() {
		p.released = r.time("spec.releasedAt", spec.ReleasedAt)
		return p, local, held
	}
	if spec.UnusedSince != "" {
		p.unused = r.time("spec.unusedSince", spec.UnusedSince)
	}
	if spec.Seen != nil { // readdress drops answers that do not fit our networks
		p.podSeen, p.externalSeen = r.network("spec.seen.podCIDR", spec.Seen.PodCIDR), r.network("spec.seen.externalCIDR", spec.Seen.ExternalCIDR)
	}
	local = own.ExternalCIDR
	if l := spec.Local; l != nil {
		if l.PodCIDR != "" && r.network("spec.local.podCIDR", l.PodCIDR) != own.PodCIDR {
			p.podSeen = netip.Prefix{}
		}
		if l.ExternalCIDR != "" {
			local = r.network("spec.local.externalCIDR", l.ExternalCIDR)
		}
	}
	return p, local, held
}

// restore maps the endpoint m for the peer p. m.Address is in local. restore changes the maps of b
// in place, so no other State may share them.
func (b *State) restore(p *account, m *isthmus.MappedEndpoint, local netip.Prefix, owners map[netip.Addr]netip.Addr) error {
	external := b.own.ExternalCIDR
	if !p.externalSeen.IsValid() || external.IsValid() && !fits(p.externalSeen, external) {
		return nil // the peer has left or has not answered, so it cannot use the mapping
	}
	ip, err := netip.ParseAddr(m.IP)
	if err == nil {
		err = b.checkEndpoint(ip)
	}
	addr, bad := netip.ParseAddr(m.Address)
	if local != external && fits(local, external) && local.Contains(addr) {
		addr = move(addr, external)
	}
	owner, owned := owners[addr]
	switch {
	case err != nil:
		return err
	case ip.BitLen() != external.Addr().BitLen() || ip == gatewayAddr(external):
		return fmt.Errorf("%v cannot be mapped into our ExternalCIDR, %v", ip, external)
	case bad != nil || !external.Contains(addr) || addr == external.Addr() || addr == firstHost(external) || addr == lastAddr(external):
		return fmt.Errorf("%s cannot be the address of an endpoint; want an address in %v, except its first two and its last", quote(m.Address), external)
	case owned && owner != ip, !owned && b.endpoints[ip] != nil:
		return fmt.Errorf("%v is already mapped to another address than %v, or that address belongs to another endpoint", ip, addr)
	case !owned && len(b.endpoints) >= MaxEndpoints-1:
		return fmt.Errorf("%d endpoints are already mapped, and there is no room for more", MaxEndpoints)
	}
	owners[addr] = ip
	if b.endpoints[ip] == nil {
		b.endpoints[ip] = &endpoint{addr: addr, kind: m.Target}
	}
	var by []string
	for _, caller := range m.Requesters {
		by = withCaller(by, caller)
	}
	p.endpoints = withRequesters(p.endpoints, ip, by)
	return nil
}

func (r *reader) time(field string, value isthmus.UTCTime) time.Time {
	t, err := time.Parse(time.RFC3339, value)
	if err != nil {
		r.fail(field, "%s is not a time; want one such as 2026-11-27T12:00:00Z", quote(value))
	}
	return stored(t)
}
