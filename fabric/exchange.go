package fabric

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// A Claim is the parsed and valid content of a NetworkConfig: the networks, the gateway and the
// keys of the sender. ClaimFrom makes it.
type Claim struct {
	Pod       netip.Prefix // Pb, the sender's PodCIDR
	External  netip.Prefix // Xb, the sender's ExternalCIDR
	Endpoint  string       // of the sender's gateway: IP address or DNS name
	Port      uint16       // UDP
	PublicKey [32]byte     // WireGuard
	Tunnels   []TunnelEnd  // additional tunnels; nil if none
	Origin    Origin
}

// Keys returns the public keys of all tunnels, in order, starting with tunnel 0.
func (c Claim) Keys() [][32]byte {
	keys := make([][32]byte, 0, 1+len(c.Tunnels))
	for _, t := range allTunnels(c.PublicKey, c.Port, c.Tunnels) {
		keys = append(keys, t.PublicKey)
	}
	return keys
}

// ClaimFrom reads the spec of a NetworkConfig, apart from the receiver (spec.cluster). It repeats
// the checks of the CRD, because an object may be older than these checks. It reports all problems
// at once; if there are any, the claim is zero. o names the object in messages.
func ClaimFrom(nc *v1alpha1.NetworkConfig, o Origin) (Claim, []Problem) {
	spec := &nc.Spec
	r := report{origin: o}
	c := Claim{Endpoint: spec.EndpointIP, Origin: o}
	pod, external := r.at("spec.podCIDR"), r.at("spec.externalCIDR")
	var podOK, externalOK bool
	if c.Pod, podOK = r.cidr(pod, spec.PodCIDR); podOK {
		podOK = r.checkPrefix(pod, c.Pod)
	}
	if c.External, externalOK = r.cidr(external, spec.ExternalCIDR); externalOK {
		externalOK = r.checkPrefix(external, c.External)
	}
	switch {
	case !podOK || !externalOK:
	case c.Pod.Addr().Is4() != c.External.Addr().Is4():
		r.addAt(external, "%v is %s, but %s is %v; want networks of one family", c.External, family(c.External), pod.label, c.Pod)
	default:
		r.apart(external, c.External, pod, c.Pod)
	}
	var at places
	at.gatewayIn(o)
	if wrong := checkEndpoint(c.Endpoint); wrong != "" {
		r.addAt(at.endpoint, "%s", wrong)
	}
	c.Port, c.PublicKey, c.Tunnels = r.backend(at, spec.BackendType, spec.BackendConfig)
	if wrong := checkPublicKey(c.PublicKey); wrong != "" && c.PublicKey != ([32]byte{}) { // the method backend has already reported a zero key
		r.addAt(at.publicKey, "%s", wrong)
	}
	r.tunnels(at.tunnels, c.PublicKey, c.Port, c.Tunnels)
	if len(r.problems) > 0 {
		return Claim{}, SortProblems(r.problems)
	}
	return c, nil
}

// A Receiver holds our own values. A peer's claim must not conflict with them. A zero field is
// unknown, so nothing conflicts with it.
type Receiver struct {
	PublicKey              [32]byte
	Pod, Service, External netip.Prefix
	Nodes, APIServers      []netip.Addr
	Endpoint               string // as published to this peer
	Port                   uint16
	Tunnels                []TunnelEnd // additional tunnels, as published to this peer
}

// site returns a Site with the receiver's addresses. The peer reads its descriptions.
func (r Receiver) site() Site {
	return Site{Networks: []SiteNetwork{
		{Prefix: r.Pod, What: "the receiver's PodCIDR; want an address outside"},
		{Prefix: r.Service, What: "the receiver's ServiceCIDR; want an address outside"},
		{Prefix: r.External, What: "the receiver's ExternalCIDR; want an address outside"},
	}}.With(r.APIServers, "an API server of the receiver; want the address of the sender's gateway").
		With(r.Nodes, "a node of the receiver; want the address of the sender's gateway")
}

// Neighbours lists the conflicts of a claim with our other peers.
type Neighbours struct {
	TakenKeys         [][32]byte // public keys of the claim, for any of its tunnels, that another peer already has
	EndpointTunnelled bool       // the endpoint is inside a network that we use for another peer
}

// A Refusal is a Problem with its reason for the condition Accepted.
type Refusal struct {
	Reason string // one of the reasons of v1alpha1.ConditionAccepted
	Problem
}

// CheckClaim returns the reasons to refuse a peer's claim. The peer reads the messages, so the
// messages reveal nothing about other peers.
func CheckClaim(c Claim, receiver Receiver, neighbours Neighbours) (refusals []Refusal) {
	refuse := func(reason, field, format string, args ...any) {
		refusals = append(refusals, Refusal{reason, Problem{c.Origin, field, fmt.Sprintf(format, args...)}})
	}
	const keyField, endpointField = "spec.backend_config.publicKey", "spec.endpointIP"
	ours, theirs := allTunnels(receiver.PublicKey, receiver.Port, receiver.Tunnels), allTunnels(c.PublicKey, c.Port, c.Tunnels)
	ourKey := func(key [32]byte) bool {
		return slices.ContainsFunc(ours, func(t TunnelEnd) bool { return t.PublicKey == key })
	}
	ourPort := func(t TunnelEnd) bool {
		return slices.ContainsFunc(ours, func(our TunnelEnd) bool { return our.Port == t.Port })
	}
	switch {
	case ourKey(c.PublicKey):
		refuse(v1alpha1.ReasonKeyConflict, keyField, "is the public key of the receiver itself; want that of the sender's gateway")
	case slices.Contains(neighbours.TakenKeys, c.PublicKey):
		refuse(v1alpha1.ReasonKeyConflict, keyField, "is the key of another peer of the receiver; want a different key for each cluster")
	}
	for i, t := range c.Tunnels {
		switch {
		case ourKey(t.PublicKey):
			refuse(v1alpha1.ReasonKeyConflict, tunnelsField, "tunnel %d has a public key of the receiver itself; want one of the sender's gateway", i+1)
		case slices.Contains(neighbours.TakenKeys, t.PublicKey):
			refuse(v1alpha1.ReasonKeyConflict, tunnelsField, "tunnel %d has the key of another peer of the receiver; want different keys for each cluster", i+1)
		}
	}
	if i := slices.IndexFunc(theirs, ourPort); i >= 0 && sameHost(c.Endpoint, receiver.Endpoint) {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%s is the gateway of the receiver itself; want that of the sender",
			quote(hostPort(c.Endpoint, theirs[i].Port)))
		return refusals
	}
	addr, err := netip.ParseAddr(c.Endpoint)
	if err != nil {
		return refusals // a DNS name: the gateway checks the addresses that it resolves to
	}
	if wrong := receiver.site().CheckEndpoint(addr); wrong != "" {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%s", wrong)
	}
	if neighbours.EndpointTunnelled {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%v is inside a network that the receiver reaches through a tunnel; want an address outside", addr)
	}
	return refusals
}

// CheckAllocation returns the reasons why we cannot use podSeen and externalSeen for the networks
// of a claim. The caller has checked that the IPAM state allows them. gateways has the addresses of
// peers' gateways that are inside podSeen or externalSeen.
func CheckAllocation(c Claim, podSeen, externalSeen netip.Prefix, gateways []netip.Addr) (refusals []Refusal) {
	fields := map[netip.Prefix]string{podSeen: "spec.podCIDR", externalSeen: "spec.externalCIDR"}
	for _, seen := range []netip.Prefix{podSeen, externalSeen} {
		if addr, err := netip.ParseAddr(c.Endpoint); err == nil && seen.Contains(addr) {
			// If a network behind a tunnel contained the gateway of a peer, the tunnel's own UDP
			// packets would be routed into the tunnel.
			refusals = append(refusals, Refusal{v1alpha1.ReasonEndpoint, Problem{c.Origin, "spec.endpointIP",
				fmt.Sprintf("%v is inside %v, which the receiver uses for %s; want an address outside, or reserve that network at the receiver",
					addr, seen, fields[seen])}})
			continue
		}
		for _, addr := range gateways {
			if seen.Contains(addr) {
				refusals = append(refusals, Refusal{v1alpha1.ReasonCIDRConflict, Problem{c.Origin, fields[seen],
					fmt.Sprintf("the receiver would use %v for it, which contains a peer's gateway; reserve that network at the receiver", seen)}})
				break
			}
		}
	}
	return refusals
}

// sameHost compares two endpoints as a resolver does: it ignores case and a trailing dot.
func sameHost(a, b string) bool {
	return a != "" && strings.EqualFold(strings.TrimSuffix(a, "."), strings.TrimSuffix(b, "."))
}

// TunnelEndpointFor joins the two NetworkConfigs of a peering. original is our NetworkConfig, with
// the peer's answer in its status. copied is the peer's NetworkConfig, with our answer. peer is the
// remote cluster. The result is a spec that PeerFrom accepts, or problems that name the fields of
// the NetworkConfigs.
func TunnelEndpointFor(original, copied *v1alpha1.NetworkConfig, peer v1alpha1.ClusterIdentity) (v1alpha1.TunnelEndpointSpec, []Problem) {
	at := placesInExchange(originOf(original), originOf(copied))
	var r report
	if !original.Status.Processed {
		r.addAt(at.localAnswer, "is false; want true: the peer has not answered yet")
	}
	if !copied.Status.Processed {
		r.addAt(at.remoteAnswer, "is false; want true: this cluster has not answered yet")
	}
	if id := original.Spec.RemoteCluster.ClusterID; id != peer.ClusterID {
		r.addAt(at.id, "is %s; want %s, the ID of the peer", quote(id), quote(peer.ClusterID))
	}
	if len(r.problems) > 0 {
		return v1alpha1.TunnelEndpointSpec{}, SortProblems(r.problems)
	}
	p := Peer{ID: peer.ClusterID, Name: peer.ClusterName, Endpoint: copied.Spec.EndpointIP}
	p.Local.Pod, p.Local.PodSeen = r.remapped(at.localPod, original.Spec.PodCIDR, at.localPodSeen, original.Status.PodCIDRNAT)
	p.Local.External, p.Local.ExternalSeen = r.remapped(at.localExternal, original.Spec.ExternalCIDR, at.localExternalSeen, original.Status.ExternalCIDRNAT)
	p.Remote.Pod, p.Remote.PodSeen = r.remapped(at.remotePod, copied.Spec.PodCIDR, at.remotePodSeen, copied.Status.PodCIDRNAT)
	p.Remote.External, p.Remote.ExternalSeen = r.remapped(at.remoteExternal, copied.Spec.ExternalCIDR, at.remoteExternalSeen, copied.Status.ExternalCIDRNAT)
	p.Port, p.PublicKey, p.Tunnels = r.backend(at, copied.Spec.BackendType, copied.Spec.BackendConfig)
	p, problems := r.checked(p, at)
	if len(problems) > 0 {
		return v1alpha1.TunnelEndpointSpec{}, problems
	}
	return specOf(p), nil
}

func originOf(nc *v1alpha1.NetworkConfig) Origin {
	return Origin{Kind: "NetworkConfig", Namespace: nc.Namespace, Name: nc.Name}
}

// placesInExchange returns the places of a Peer's values in our NetworkConfig and in the peer's.
func placesInExchange(ours, theirs Origin) places {
	at := places{
		id:                 placeIn(ours, "spec.cluster.clusterID"),
		name:               placeIn(ours, "spec.cluster.clusterName"),
		localAnswer:        placeIn(ours, "status.processed"),
		localPod:           place{ours, "spec.podCIDR", "our PodCIDR"},
		localPodSeen:       place{ours, "status.podCIDRNAT", "our PodCIDR as the peer uses it"},
		localExternal:      place{ours, "spec.externalCIDR", "our ExternalCIDR"},
		localExternalSeen:  place{ours, "status.externalCIDRNAT", "our ExternalCIDR as the peer uses it"},
		remoteAnswer:       placeIn(theirs, "status.processed"),
		remotePod:          place{theirs, "spec.podCIDR", "the peer's PodCIDR"},
		remotePodSeen:      place{theirs, "status.podCIDRNAT", "the peer's PodCIDR as used here"},
		remoteExternal:     place{theirs, "spec.externalCIDR", "the peer's ExternalCIDR"},
		remoteExternalSeen: place{theirs, "status.externalCIDRNAT", "the peer's ExternalCIDR as used here"},
	}
	at.gatewayIn(theirs)
	return at
}
