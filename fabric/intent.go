package fabric

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// GatewayAddr is the gateway's own address inside its cluster. Liqo assigns it to its tunnel device
// and lists it in a NatMapping as the endpoint 169.254.0.1. It never travels through the tunnel: a
// peer uses the first host of Xa@B instead.
var GatewayAddr = netip.AddrFrom4([4]byte{169, 254, 0, 1})

// GatewayAddr6 is GatewayAddr for peers with IPv6 networks. Liqo has no such peers. The address is
// in the discard-only prefix (RFC 6666). So no pod can have it, and if a packet leaks, the first
// router drops it.
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

// FirstHost returns the address after the network address of p. In an ExternalCIDR, this is the
// address at which a gateway answers the connection check. The result is the zero Addr if p is
// absent or has no address for a host.
func FirstHost(p netip.Prefix) netip.Addr {
	first := p.Masked().Addr().Next()
	if !p.Contains(first) {
		return netip.Addr{}
	}
	return first
}

// Networks are the two networks of one cluster, each in two forms: the form in its own cluster, and
// the form that the other side of a peering uses.
type Networks struct {
	Pod     netip.Prefix // PodCIDR in its own cluster
	PodSeen netip.Prefix // the PodCIDR as the other side sees it; equals Pod when not remapped

	External     netip.Prefix // ExternalCIDR: its addresses stand for endpoints that are not pods
	ExternalSeen netip.Prefix // the ExternalCIDR as the other side sees it; equals External when not remapped
}

// Mapping makes one endpoint of our cluster reachable from a peer.
type Mapping struct {
	Real netip.Addr // the endpoint, as our cluster reaches it
	Seen netip.Addr // the address within Xa@B by which the peer reaches it
}

// Peer is everything that we know about one remote cluster. PeerFrom makes it.
type Peer struct {
	ID   string // cluster ID of the remote cluster; a Kubernetes label value
	Name string // display name; may be empty

	Local  Networks // our networks: Pod = Pa, PodSeen = Pa@B, External = Xa, ExternalSeen = Xa@B
	Remote Networks // the peer's networks: Pod = Pb, PodSeen = Pb@A, External = Xb, ExternalSeen = Xb@A

	Endpoint  string   // of the peer's gateway: IP address or DNS name, without port
	Port      uint16   // UDP, never 0
	PublicKey [32]byte // WireGuard, never all zero

	// Tunnels are the peer's ends of additional tunnels, if any. Tunnels[0] is tunnel 1; PublicKey
	// and Port belong to tunnel 0.
	Tunnels []TunnelEnd

	InBand bool // the managers of both clusters connect through the tunnel
	// InBandLeaving restricts InBand to our manager, because the peering is ending.
	InBandLeaving bool

	Mappings []Mapping // endpoints of ours that the peer may reach; Attach sets it

	Origin         Origin // the object from which this peer was read
	MappingsOrigin Origin // the object from which Mappings were read; zero if there is none

	// Created is the creation time of the object in seconds since 1970, 0 if unknown. Of two
	// conflicting peers GatewayFor keeps the older, so that a new peer cannot displace an older one
	// by claiming its networks or its key.
	Created int64
}

// A MappingSet holds the mappings of one NatMapping object.
type MappingSet struct {
	ID       string    // cluster ID of the peer that may use the mappings
	Mappings []Mapping // in any order
	Origin   Origin    // the object from which the mappings were read
}

// Waiting names a set of mappings whose peer does not exist yet. That is no Problem: the NatMapping
// of a new peering usually exists before its TunnelEndpoint.
type Waiting struct {
	ID     string // cluster ID of the missing peer
	Origin Origin // the object with the mappings
}

// Intent is the complete snapshot from which GatewayFor computes a Gateway. A peer that is not in
// the snapshot is removed. The zero Intent results in a gateway without peers.
type Intent struct {
	ClusterID   string     // our own cluster; empty when unknown
	ClusterName string     // for display
	PublicKey   [32]byte   // our own WireGuard public key; all zero when unknown
	FurtherKeys [][32]byte // public keys of our additional tunnels, in use or not; nil when unknown
	Peers       []Peer     // in any order
	Waiting     []Waiting  // in any order; see Attach
	Site        Site       // our cluster's addresses; GatewayFor adds the networks of the accepted peers
}

// Attach assigns the mappings in sets to the peers with the same cluster ID. It returns copies of
// the peers in the same order. waiting names the sets whose peer does not exist. problems has a
// Problem for each duplicate set. If there are several sets for one cluster, Attach uses the set
// whose Origin sorts first. If several peers have the same cluster ID, each gets the set;
// GatewayFor accepts only one of these peers.
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
				fmt.Sprintf("cluster %s already has its mappings in %s; want one NatMapping for each cluster", quote(s.ID), first.Origin)})
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

// Origin names the object from which a value was read, for messages. Fields that do not apply are
// empty.
type Origin struct {
	File      string // base name, only when read from a file
	Kind      string // "TunnelEndpoint"
	Namespace string // empty for cluster-scoped kinds
	Name      string
}

// String returns "peers.yaml: TunnelEndpoint tenant/name", without empty parts.
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

// Problem is the refusal of a value in an object. It implements error, and is comparable with ==.
type Problem struct {
	Origin  Origin // the object at fault
	Field   string // JSON path within the object, "spec.remotePodCIDR"; may be empty
	Message string // the value found and the value expected
}

// Error returns "file: Kind namespace/name: field: message", without empty parts.
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
