package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// GatewayAddr is the gateway's own address inside its cluster: what Liqo gives its tunnel device
// and calls the endpoint 169.254.0.1 in a NatMapping. It never travels through the tunnel; there it
// is the first host of Xa@B.
var GatewayAddr = netip.AddrFrom4([4]byte{169, 254, 0, 1})

// GatewayAddr6 is GatewayAddr for peers whose networks are IPv6, which Liqo does not have. It lies
// in the discard-only prefix (RFC 6666), because no pod can have such an address and a packet that
// leaks dies at the first router.
var GatewayAddr6 = netip.MustParseAddr("100::a9fe:1")

// gatewayAddrFor returns the gateway's own address in the family of p.
func gatewayAddrFor(p netip.Prefix) netip.Addr {
	if p.Addr().Is4() {
		return GatewayAddr
	}
	return GatewayAddr6
}

// ProbePort is the UDP port of the connection check, fixed by Liqo since v0.6.
const ProbePort = 12345

// FirstHost returns the address after the network address of p: the address at which a gateway
// answers the connection check within an ExternalCIDR. It is the zero Addr when p is absent or has
// no room for a host.
func FirstHost(p netip.Prefix) netip.Addr {
	first := p.Masked().Addr().Next()
	if !p.Contains(first) {
		return netip.Addr{}
	}
	return first
}

// Networks are the two networks of one cluster, each as it is there and as the other side of a
// peering sees it.
type Networks struct {
	Pod     netip.Prefix // PodCIDR, as in its own cluster
	PodSeen netip.Prefix // the PodCIDR as the other side sees it; equals Pod when not remapped

	External     netip.Prefix // ExternalCIDR: addresses that stand for endpoints that are no pods
	ExternalSeen netip.Prefix // the ExternalCIDR as the other side sees it; equals External when not remapped
}

// Mapping makes one endpoint of our cluster reachable from a peer.
type Mapping struct {
	Real netip.Addr // the endpoint e, as our cluster reaches it
	Seen netip.Addr // the address within Xa@B by which the peer reaches it
}

// Peer is what we know of one remote cluster. PeerFrom makes it.
type Peer struct {
	ID   string // cluster ID of the remote cluster; a Kubernetes label value
	Name string // its name for people; may be empty

	Local  Networks // ours: Pod = Pa, PodSeen = Pa@B, External = Xa, ExternalSeen = Xa@B
	Remote Networks // the peer's: Pod = Pb, PodSeen = Pb@A, External = Xb, ExternalSeen = Xb@A

	Endpoint  string   // where its gateway is reached: IP address or DNS name, without port
	Port      uint16   // UDP, never 0
	PublicKey [32]byte // WireGuard, never all zero

	// Tunnels are the ends of the further tunnels, if any: its first element is tunnel 1.
	Tunnels []TunnelEnd

	InBand bool // the managers of both clusters go through the tunnel
	// InBandLeaving says that our manager alone still does, for the peering ends.
	InBandLeaving bool

	Mappings []Mapping // endpoints of ours that the peer may reach; Attach fills it in

	Origin         Origin // the object this peer was read from
	MappingsOrigin Origin // the object Mappings were read from; zero when there is none

	// Created is the creation time of the object in seconds since 1970, 0 when unknown. Of two
	// peers that contradict each other the older one is kept, so that a newcomer cannot displace a
	// peer by claiming what is its.
	Created int64
}

// A MappingSet holds the mappings of one NatMapping object.
type MappingSet struct {
	ID       string    // cluster ID of the peer that may use them
	Mappings []Mapping // in any order
	Origin   Origin    // the object they were read from
}

// Waiting names a set of mappings whose peer is not there (yet). That is no Problem: in Kubernetes
// the NatMapping of a new peering usually comes first.
type Waiting struct {
	ID     string // cluster ID of the missing peer
	Origin Origin // the object that waits for it
}

// Intent is the complete snapshot of what is wanted: a peer that is not in it is not wanted any
// more. The zero Intent is a gateway without peers.
type Intent struct {
	ClusterID   string     // our own cluster; empty when unknown
	ClusterName string     // for people
	PublicKey   [32]byte   // our own WireGuard public key; all zero when unknown
	FurtherKeys [][32]byte // the public keys of our further tunnels, also of those that are not in use; nil when unknown
	Peers       []Peer     // in any order
	Waiting     []Waiting  // in any order; see Attach
	Site        Site       // where our cluster is, as far as peers do not say it
}

// Attach gives every peer the mappings made for its cluster ID. It returns new peers in the order
// of the given ones, the sets whose peer is missing, and a Problem for every further set of a
// cluster that has one already (the set whose Origin sorts first is used). Peers that share a
// cluster ID all get the set; GatewayFor will refuse all but one of them.
func Attach(peers []Peer, sets []MappingSet) (attached []Peer, waiting []Waiting, problems []Problem) {
	sets = slices.SortedFunc(slices.Values(sets), func(a, b MappingSet) int {
		return cmp.Or(a.Origin.compare(b.Origin), cmp.Compare(a.ID, b.ID),
			slices.CompareFunc(a.Mappings, b.Mappings, Mapping.compare))
	})
	known := make(map[string]bool, len(peers))
	for _, p := range peers {
		known[p.ID] = true
	}
	byID := make(map[string]MappingSet, len(sets))
	for _, s := range sets {
		if first, taken := byID[s.ID]; taken {
			problems = append(problems, Problem{s.Origin, "spec.clusterID",
				fmt.Sprintf("cluster %s has its mappings in %s already; want one NatMapping for each cluster", quote(s.ID), first.Origin)})
			continue
		}
		byID[s.ID] = s
		if !known[s.ID] {
			waiting = append(waiting, Waiting{s.ID, s.Origin})
		}
	}
	attached = slices.Clone(peers)
	for i := range attached {
		p := &attached[i]
		p.Mappings, p.MappingsOrigin = nil, Origin{}
		if s, ok := byID[p.ID]; ok {
			p.Mappings, p.MappingsOrigin = slices.SortedFunc(slices.Values(s.Mappings), Mapping.compare), s.Origin
		}
	}
	return attached, waiting, problems
}

func (m Mapping) compare(o Mapping) int {
	return cmp.Or(m.Seen.Compare(o.Seen), m.Real.Compare(o.Real))
}

// Origin says which object something was read from, for messages. Fields that do not apply are
// empty.
type Origin struct {
	File      string // base name, only when read from a file
	Kind      string // "TunnelEndpoint"
	Namespace string // empty for cluster-scoped kinds
	Name      string
}

// String returns "peers.yaml: TunnelEndpoint tenant/name", less what is empty.
func (o Origin) String() string {
	object := o.Name
	switch {
	case o.Namespace != "" && o.Name != "":
		object = o.Namespace + "/" + o.Name
	case o.Namespace != "":
		object = o.Namespace
	}
	object = strings.TrimSpace(o.Kind + " " + object)
	if o.File == "" || object == "" {
		return o.File + object
	}
	return o.File + ": " + object
}

func (o Origin) compare(p Origin) int {
	return cmp.Or(cmp.Compare(o.File, p.File), cmp.Compare(o.Kind, p.Kind),
		cmp.Compare(o.Namespace, p.Namespace), cmp.Compare(o.Name, p.Name))
}

// Problem is a refusal. It is an error, so that several can be joined by errors.Join; being
// comparable, two of them are the same when they are ==.
type Problem struct {
	Origin  Origin // the object that has it
	Field   string // JSON path within the object, "spec.remotePodCIDR"; may be empty
	Message string // what was found and what is wanted
}

// Error returns "file: Kind namespace/name: field: message", less what is empty.
func (p Problem) Error() string {
	parts := make([]string, 0, 3)
	for _, s := range []string{p.Origin.String(), p.Field, p.Message} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	return strings.Join(parts, ": ")
}

// SortProblems sorts problems by origin, field and message, and removes equal ones. It works in
// place and returns the shortened slice.
func SortProblems(problems []Problem) []Problem {
	slices.SortFunc(problems, func(a, b Problem) int {
		return cmp.Or(a.Origin.compare(b.Origin), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Message, b.Message))
	})
	return slices.Compact(problems)
}
