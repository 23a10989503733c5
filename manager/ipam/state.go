// Package ipam allocates networks for peers, and addresses of the ExternalCIDR for endpoints that
// are not pods. Its State is a value without client, clock or lock: the same requests in the same
// order always get the same results.
//
//	Config  ─ Configure ─┐                      ┌─ Allocation ─► NetworkAllocations
//	Request ─ Allocate ──┼─► State (immutable) ─┼─ Spec ─► IpamStorage, for Liqo's components
//	answer  ─ Answered ──┤                      ├─ NatMapping
//	FromAllocations ─────┘                      └─ HomePodIP, AllocationOf, ...
//
// Read makes a State from the IpamStorage of an earlier Liqo installation.
//
// The choices are Liqo's (docs/liqo-v0.md, section 5): a network that overlaps nothing is used
// unchanged. Any other network is replaced by a free network of the same length, from the smallest
// sufficient free block of the first pool that has such a block. In contrast to Liqo, the networks
// of this cluster may change at any time, and the state is readable text instead of an allocator's
// memory.
package ipam

import (
	"cmp"
	"maps"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// Bounds of a State, which follow from the objects that store it.
const (
	// MaxPeers bounds the peers of a State. A peer takes 305 octets in the IpamStorage, and etcd
	// accepts 1.5 MiB (TestNumberOfPeersIsLimitedBySizeOfTheObject).
	MaxPeers = 4096
	// MaxEndpoints bounds the mapped endpoints of a State, including the gateway's own.
	MaxEndpoints = 16384
	// MaxEndpointsPerPeer bounds the endpoints mapped for one peer. Its NetworkAllocation lists
	// them, each in at most 150 octets besides the names of callers.
	MaxEndpointsPerPeer = 4096
)

// Config has the networks and addresses of a State's own cluster. A zero prefix is not known yet.
// Host bits of a prefix are ignored.
type Config struct {
	PodCIDR, ServiceCIDR netip.Prefix
	// ExternalCIDR is the network for our endpoints that are not pods. If it is zero, Configure keeps
	// the network that it chose before. Otherwise it chooses one once PodCIDR is known, with the
	// length of PodCIDR but no larger than /20.
	ExternalCIDR netip.Prefix
	// Pools are the networks to allocate from, in this order. If Pools is nil, defaultPools is
	// used. Reserved are networks that no peer gets.
	Pools, Reserved []netip.Prefix
	// Services are networks of Services besides ServiceCIDR. They are also in Reserved, and Spec
	// stores them only there.
	Services []netip.Prefix
	// Nodes are addresses that no peer's network may contain, including those of API servers. Spec
	// contains neither Nodes nor Reached nor Agreed, because they change with the cluster.
	Nodes []netip.Addr
	// Reached lists the networks that nodes reach without us.
	Reached []Reached
	// Agreed are our networks that TunnelEndpoints name. Configure removes our present networks
	// from Agreed. The rest are previous networks of ours, which some peer still uses.
	Agreed []netip.Prefix
}

// A Reached is a network that a node can reach without us, so that no peer may get it.
type Reached struct {
	Prefix   netip.Prefix
	Node     string // one of the nodes that report it
	Resolver bool   // whether it is the address of a DNS server that the node uses
}

// MergeReached sorts the networks that nodes reach and removes each network inside another one. It
// works in place.
func MergeReached(all []Reached) []Reached {
	slices.SortFunc(all, func(a, b Reached) int { // a network sorts before those inside it
		c := a.Prefix.Compare(b.Prefix)
		if c == 0 && a.Resolver != b.Resolver {
			if c = 1; b.Resolver {
				c = -1
			}
		}
		return cmp.Or(c, cmp.Compare(a.Node, b.Node))
	})
	out := all[:0]
	for _, r := range all {
		if len(out) == 0 || !contains(out[len(out)-1].Prefix, r.Prefix) {
			out = append(out, r)
		}
	}
	return out
}

// Equal reports whether both have the same values in the same order.
func (c Config) Equal(other Config) bool {
	return c.sameNetworks(other) && slices.Equal(c.Services, other.Services) && slices.Equal(c.Nodes, other.Nodes) &&
		slices.Equal(c.Reached, other.Reached) && slices.Equal(c.Agreed, other.Agreed)
}

func (c Config) sameNetworks(other Config) bool {
	return c.PodCIDR == other.PodCIDR && c.ServiceCIDR == other.ServiceCIDR && c.ExternalCIDR == other.ExternalCIDR &&
		slices.Equal(c.Pools, other.Pools) && slices.Equal(c.Reserved, other.Reserved)
}

// defaultPools returns Liqo's pools in their order, and after them the space of RFC 6598 as a
// reserve.
func defaultPools() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("100.64.0.0/10"),
	}
}

// A State is the IPAM state: all allocations and holds. It is immutable: methods return a new
// State, so the old one may be read concurrently and kept for comparison. The zero State is empty
// and has no pools.
type State struct {
	own       Config
	peers     map[string]*account      // neither the map nor its accounts change once a State has them
	endpoints map[netip.Addr]*endpoint // by real address, without the gateway's own
	taken     tree                     // all networks that a peer cannot get, including the networks that peers have
	nodes     tree                     // addresses of nodes, and the networks that nodes reach
	departed  []departed               // peers that have left; immutable
	replaced  []replaced               // held networks of peers that now have others; immutable
	addresses tree                     // addresses of the ExternalCIDR that are in use or unusable
}

// An account is the IPAM state of one peer. Allocation is zero until the peer has claimed networks.
// podSeen and externalSeen are zero until the peer has answered.
type account struct {
	Allocation
	released              time.Time    // when the peer left and its hold began; zero: the peer has not left
	unused                time.Time    // since when no object names the peer; zero: some object does, or nobody has checked
	podSeen, externalSeen netip.Prefix // the networks that represent our PodCIDR and ExternalCIDR at the peer
	// endpoints has the requesters of each endpoint that is mapped for the peer, by the endpoint's
	// real address. The requesters are sorted; the list is empty if they are not known. The
	// gateway's own address is left out.
	endpoints map[netip.Addr][]string
}

// empty reports whether the account has nothing to store.
func (p *account) empty() bool {
	return !p.Pod.IsValid() && !p.podSeen.IsValid() && !p.externalSeen.IsValid()
}

// An endpoint is the address in our ExternalCIDR that a mapped endpoint got.
type endpoint struct {
	addr  netip.Addr
	peers int    // number of peers for which it is mapped
	kind  string // kind when it was requested, as passed to AddRequester; empty: unknown
}

// Own returns the Config in effect, with pools and ExternalCIDR filled in.
func (b State) Own() Config {
	c := b.own
	c.Pools, c.Reserved, c.Services = slices.Clone(c.Pools), slices.Clone(c.Reserved), slices.Clone(c.Services)
	c.Nodes, c.Reached, c.Agreed = slices.Clone(c.Nodes), slices.Clone(c.Reached), slices.Clone(c.Agreed)
	return c
}

// Peers returns the sorted IDs of all peers that have answered or have networks, including peers
// that left and whose two networks are held.
func (b State) Peers() []string { return slices.Sorted(maps.Keys(b.peers)) }

// Answered records the peer's answer: the networks that represent our PodCIDR and ExternalCIDR at
// the peer. If the peer does not remap our networks, these are our networks themselves. From the
// first answer on, the gateway's own address is mapped to the first host of the ExternalCIDR, for
// the connection check.
//
// If a prefix is zero or does not fit our network, the previous value stays. A prefix does not fit
// if it has another family or length, or if pods cannot have its addresses. Answers may overlap any
// network here, because only the peer uses them.
func (b State) Answered(id string, podSeen, externalSeen netip.Prefix) State {
	old := b.peers[id]
	if old == nil {
		if fabric.CheckClusterID(id) != "" || len(b.peers) >= MaxPeers {
			return b
		}
		old = new(account)
	}
	if !old.released.IsZero() {
		return b
	}
	p := *old
	if fits(podSeen, b.own.PodCIDR) {
		p.podSeen = podSeen
	}
	if fits(externalSeen, b.own.ExternalCIDR) {
		p.externalSeen = externalSeen
	}
	if p.podSeen == old.podSeen && p.externalSeen == old.externalSeen {
		return b
	}
	return b.withPeer(id, &p)
}

// AnswerOf returns the networks that represent our PodCIDR and ExternalCIDR at the peer. They are
// zero until the peer has answered.
func (b State) AnswerOf(id string) (seen Allocation) {
	if p := b.peers[id]; p != nil {
		seen = Allocation{Pod: p.podSeen, External: p.externalSeen}
	}
	return seen
}

// fits reports whether the network p can represent the network original: both have the same family
// and length, and pods can have the addresses of p.
func fits(p, original netip.Prefix) bool {
	return original.IsValid() && fabric.CheckNetwork(p) == "" && p.Addr().BitLen() == original.Addr().BitLen() && p.Bits() == original.Bits()
}

// Release removes a peer with its answer and its mappings. The peer's networks are free at once. A
// peer that returns gets them again if they are still free. Release does nothing for an unknown
// peer. For a peer that leaves, callers call Part first.
func (b State) Release(id string) State {
	p := b.peers[id]
	if p == nil {
		return b
	}
	b = b.unmapAll(p)
	b.taken = b.taken.without(p.Pod).without(p.External)
	b.peers = maps.Clone(b.peers)
	delete(b.peers, id)
	b.remember(id, p.Allocation)
	return b
}

// withPeer returns the State with p as the account of the peer. The caller updates the trees of
// networks.
func (b State) withPeer(id string, p *account) State {
	peers := make(map[string]*account, len(b.peers)+1)
	maps.Copy(peers, b.peers)
	peers[id] = p
	b.peers = peers
	return b
}

// Changed returns the sorted IDs of the peers whose networks, answers or mappings differ from those
// in the older State. It is fast if this State was made from the older one. For States of different
// origin, it may also return peers that do not differ.
func (b State) Changed(since State) []string {
	var changed []string
	for id, p := range b.peers {
		if since.peers[id] != p {
			changed = append(changed, id)
		}
	}
	for id := range since.peers {
		if b.peers[id] == nil {
			changed = append(changed, id)
		}
	}
	if !slices.Equal(b.replaced, since.replaced) {
		for _, r := range slices.Concat(b.replaced, since.replaced) {
			changed = append(changed, r.id)
		}
	}
	slices.Sort(changed)
	return slices.Compact(changed)
}

// PoolUsage is the usage of a pool, in addresses.
type PoolUsage struct {
	Pool       netip.Prefix
	Free, Used float64
}

// Usage returns the usage of the pools, in their order. Addresses that no peer can get count as
// used, including those of the cluster's own networks.
func (b State) Usage() []PoolUsage {
	usage := make([]PoolUsage, len(b.own.Pools))
	for i, pool := range b.own.Pools {
		used := b.taken.used(pool)
		usage[i] = PoolUsage{Pool: pool, Free: size(pool) - used, Used: used}
	}
	return usage
}

// Left returns the number of further peers for which the pools have room at present, if each has
// networks as long as ours. It returns 0 while our own networks are unknown.
func (b State) Left() float64 {
	pod, external := b.own.PodCIDR, b.own.ExternalCIDR
	if !pod.IsValid() || !external.IsValid() {
		return 0
	}
	pods, externals, barred := 0.0, 0.0, b.barred()
	for _, pool := range b.own.Pools {
		if pool.Addr().BitLen() == pod.Addr().BitLen() {
			pods += b.taken.room(pool, pod.Bits(), barred)
			externals += b.taken.room(pool, external.Bits(), barred)
		}
	}
	both := max(pods*size(pod), externals*size(external)) / (size(pod) + size(external))
	return math.Floor(min(pods, externals, both, float64(MaxPeers-len(b.peers))))
}
