package fabric

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// A Claim is what a cluster says about itself in its NetworkConfig, read and
// sound by itself. ClaimFrom makes it.
type Claim struct {
	Pod       netip.Prefix // Pb, the sender's PodCIDR
	External  netip.Prefix // Xb, its ExternalCIDR
	Endpoint  string       // where its gateway is reached: IP address or DNS name
	Port      uint16       // UDP
	PublicKey [32]byte     // WireGuard
	Tunnels   []TunnelEnd  // the further ones; nil: none
	Origin    Origin
}

// ClaimFrom reads the spec of a NetworkConfig, but for whom it is addressed to. It
// asks again for everything that the CRD asks for, because an object may be older
// than the rules, and reports all that is wrong at once; with any problem the claim
// is zero. o names the object in messages.
func ClaimFrom(nc *v1alpha1.NetworkConfig, o Origin) (Claim, []Problem) {
	const podField, externalField = "spec.podCIDR", "spec.externalCIDR"
	spec := &nc.Spec
	r := report{origin: o}
	c := Claim{Endpoint: spec.EndpointIP, Origin: o}
	var podOK, externalOK bool
	if c.Pod, podOK = r.cidr(podField, spec.PodCIDR); podOK {
		podOK = r.prefix(podField, c.Pod)
	}
	if c.External, externalOK = r.cidr(externalField, spec.ExternalCIDR); externalOK {
		externalOK = r.prefix(externalField, c.External)
	}
	switch {
	case !podOK || !externalOK:
	case c.Pod.Addr().Is4() != c.External.Addr().Is4():
		r.add(externalField, "%v is %s, but %s is %v; want networks of one family", c.External, family(c.External), podField, c.Pod)
	default:
		r.apart(externalField, c.External, podField, c.Pod)
	}
	if wrong := checkEndpoint(c.Endpoint); wrong != "" {
		r.add("spec.endpointIP", "%s", wrong)
	}
	if spec.BackendType != v1alpha1.BackendWireGuard {
		r.add("spec.backendType", "is %s; want %q", quote(spec.BackendType), v1alpha1.BackendWireGuard)
	}
	c.Port = r.port("spec.backend_config.port", spec.BackendConfig)
	c.PublicKey = r.key("spec.backend_config.publicKey", spec.BackendConfig)
	c.Tunnels = r.furtherTunnels(spec.BackendConfig)
	r.tunnels(c.PublicKey, c.Port, c.Tunnels)
	if len(r.problems) > 0 {
		return Claim{}, SortProblems(r.problems)
	}
	return c, nil
}

// Own is our own side as far as the claim of a peer must not touch it. What is
// zero is not known and collides with nothing.
type Own struct {
	PublicKey              [32]byte
	Pod, Service, External netip.Prefix
	Nodes                  []netip.Addr
	Endpoint               string // as published to this peer
	Port                   uint16
	Tunnels                []TunnelEnd // the further ones, as published to this peer
}

// Neighbours is what a claim meets among our other peers.
type Neighbours struct {
	KeyTaken          bool // another peer has the public key, for whichever tunnel, and had it first
	EndpointTunnelled bool // the endpoint is inside a network in use here for another peer
}

// A Refusal is a Problem with the reason that the condition Accepted gives for it.
type Refusal struct {
	Reason string // one of the reasons of v1alpha1.ConditionAccepted
	Problem
}

// CheckClaim says why the claim of a peer cannot be taken here. The messages go to
// the peer, so they tell nothing about other peers.
func CheckClaim(c Claim, own Own, others Neighbours) (refusals []Refusal) {
	refuse := func(reason, field, format string, args ...any) {
		refusals = append(refusals, Refusal{reason, Problem{c.Origin, field, fmt.Sprintf(format, args...)}})
	}
	const keyField, endpointField = "spec.backend_config.publicKey", "spec.endpointIP"
	ours, theirs := ends(own.PublicKey, own.Port, own.Tunnels), ends(c.PublicKey, c.Port, c.Tunnels)
	ourKey := func(key [32]byte) bool {
		return slices.ContainsFunc(ours, func(t TunnelEnd) bool { return t.PublicKey == key })
	}
	ourPort := func(t TunnelEnd) bool {
		return slices.ContainsFunc(ours, func(our TunnelEnd) bool { return our.Port == t.Port })
	}
	switch {
	case ourKey(c.PublicKey):
		refuse(v1alpha1.ReasonKeyConflict, keyField, "is the public key of the receiver itself; want that of the sender's gateway")
	case others.KeyTaken:
		refuse(v1alpha1.ReasonKeyConflict, keyField, "is the key of another peer of the receiver; want a key for each cluster")
	}
	for i, t := range c.Tunnels {
		if ourKey(t.PublicKey) {
			refuse(v1alpha1.ReasonKeyConflict, tunnelsField, "tunnel %d has a public key of the receiver itself; want one of the sender's gateway", i+1)
		}
	}
	if i := slices.IndexFunc(theirs, ourPort); i >= 0 && sameHost(c.Endpoint, own.Endpoint) {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%s is the gateway of the receiver itself; want that of the sender",
			quote(hostPort(c.Endpoint, theirs[i].Port)))
		return refusals
	}
	addr, err := netip.ParseAddr(c.Endpoint)
	if err != nil {
		return refusals // the gateway looks at what the name resolves to
	}
	for _, n := range []struct {
		prefix netip.Prefix
		what   string
	}{{own.Pod, "the receiver's PodCIDR"}, {own.Service, "the receiver's ServiceCIDR"}, {own.External, "the receiver's ExternalCIDR"}} {
		if n.prefix.Contains(addr) {
			refuse(v1alpha1.ReasonEndpoint, endpointField, "%v is inside %v, %s; want an address outside", addr, n.prefix, n.what)
		}
	}
	if slices.Contains(own.Nodes, addr) {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%v is a node of the receiver; want the address of the sender's gateway", addr)
	}
	if others.EndpointTunnelled {
		refuse(v1alpha1.ReasonEndpoint, endpointField, "%v is inside a network that the receiver reaches through a tunnel; want an address outside", addr)
	}
	return refusals
}

// CheckGrant says why two networks cannot be used here for the sender of a claim,
// sound as they may be in the books. gateways are the endpoints of our peers that
// lie in one of them.
func CheckGrant(c Claim, podSeen, externalSeen netip.Prefix, gateways []netip.Addr) (refusals []Refusal) {
	fields := map[netip.Prefix]string{podSeen: "spec.podCIDR", externalSeen: "spec.externalCIDR"}
	for _, seen := range []netip.Prefix{podSeen, externalSeen} {
		if addr, err := netip.ParseAddr(c.Endpoint); err == nil && seen.Contains(addr) {
			// The tunnel's own UDP packets would be routed into the tunnel.
			refusals = append(refusals, Refusal{v1alpha1.ReasonEndpoint, Problem{c.Origin, "spec.endpointIP",
				fmt.Sprintf("%v is inside %v, which the receiver uses for %s; want an address outside, or another network reserved at the receiver",
					addr, seen, fields[seen])}})
			continue
		}
		for _, addr := range gateways {
			if seen.Contains(addr) {
				refusals = append(refusals, Refusal{v1alpha1.ReasonCIDRConflict, Problem{c.Origin, fields[seen],
					fmt.Sprintf("the receiver would use %v for it, and a gateway of a peer is in there; the receiver has to reserve that network", seen)}})
				break
			}
		}
	}
	return refusals
}

// sameHost reports whether two endpoints are the same text for resolvers.
func sameHost(a, b string) bool {
	return a != "" && strings.EqualFold(strings.TrimSuffix(a, "."), strings.TrimSuffix(b, "."))
}

// AnswerFor returns what the status of the sender's NetworkConfig says when we use
// podSeen and externalSeen for its networks: the NAT fields, with None spelled out
// for a network that is used as it is.
func AnswerFor(c Claim, podSeen, externalSeen netip.Prefix) (podCIDRNAT, externalCIDRNAT string) {
	return natText(c.Pod, podSeen), natText(c.External, externalSeen)
}

func natText(own, seen netip.Prefix) string {
	if own == seen {
		return v1alpha1.None
	}
	return seen.String()
}

// SeenBy reads an answer of another cluster: the networks that it uses for the two
// of the sender. It is false where the answer is absent or makes no sense.
func SeenBy(nc *v1alpha1.NetworkConfig) (pod, external netip.Prefix, ok bool) {
	if !nc.Status.Processed {
		return pod, external, false
	}
	var r report
	var p Networks
	p.Pod, p.PodSeen = r.networks("spec.podCIDR", nc.Spec.PodCIDR, "status.podCIDRNAT", nc.Status.PodCIDRNAT)
	p.External, p.ExternalSeen = r.networks("spec.externalCIDR", nc.Spec.ExternalCIDR, "status.externalCIDRNAT", nc.Status.ExternalCIDRNAT)
	sound := len(r.problems) == 0 &&
		r.network(pair{p.Pod, p.PodSeen, "spec.podCIDR", "status.podCIDRNAT"}) &&
		r.network(pair{p.External, p.ExternalSeen, "spec.externalCIDR", "status.externalCIDRNAT"}) &&
		!p.PodSeen.Overlaps(p.ExternalSeen)
	if !sound {
		return netip.Prefix{}, netip.Prefix{}, false
	}
	return p.PodSeen, p.ExternalSeen, true
}

// TunnelEndpointFor joins the two NetworkConfigs of a peering: original is ours
// with the peer's answer in its status, copied is the peer's with our answer. The
// result is one that PeerFrom takes, or there are problems, which name the fields
// of the NetworkConfigs. peer is the remote cluster.
func TunnelEndpointFor(original, copied *v1alpha1.NetworkConfig, peer v1alpha1.ClusterIdentity) (v1alpha1.TunnelEndpointSpec, []Problem) {
	ours, theirs := originOf(original), originOf(copied)
	var problems []Problem
	for _, side := range []struct {
		nc     *v1alpha1.NetworkConfig
		origin Origin
		whose  string
	}{{original, ours, "the peer's answer"}, {copied, theirs, "our answer"}} {
		if !side.nc.Status.Processed {
			problems = append(problems, Problem{side.origin, "status.processed", "is false; want " + side.whose})
		}
	}
	if id := original.Spec.RemoteCluster.ClusterID; id != peer.ClusterID {
		problems = append(problems, Problem{ours, "spec.cluster.clusterID", fmt.Sprintf("is %s; want %s, the peer", quote(id), quote(peer.ClusterID))})
	}
	if len(problems) > 0 {
		return v1alpha1.TunnelEndpointSpec{}, SortProblems(problems)
	}
	spec := v1alpha1.TunnelEndpointSpec{
		ClusterIdentity:       peer,
		LocalPodCIDR:          original.Spec.PodCIDR,
		LocalNATPodCIDR:       original.Status.PodCIDRNAT,
		LocalExternalCIDR:     original.Spec.ExternalCIDR,
		LocalNATExternalCIDR:  original.Status.ExternalCIDRNAT,
		RemotePodCIDR:         copied.Spec.PodCIDR,
		RemoteNATPodCIDR:      copied.Status.PodCIDRNAT,
		RemoteExternalCIDR:    copied.Spec.ExternalCIDR,
		RemoteNATExternalCIDR: copied.Status.ExternalCIDRNAT,
		EndpointIP:            copied.Spec.EndpointIP,
		BackendType:           copied.Spec.BackendType,
		BackendConfig:         make(v1alpha1.BackendConfig, 3),
	}
	for _, key := range []string{v1alpha1.ConfigPublicKey, v1alpha1.ConfigPort, v1alpha1.ConfigTunnels} { // Liqo has no others
		if value, ok := copied.Spec.BackendConfig[key]; ok {
			spec.BackendConfig[key] = value
		}
	}
	_, wrong := PeerFrom(&v1alpha1.TunnelEndpoint{Spec: spec}, Origin{})
	for _, p := range wrong {
		problems = append(problems, traceBack(p, ours, theirs))
	}
	if len(problems) > 0 {
		return v1alpha1.TunnelEndpointSpec{}, SortProblems(problems)
	}
	return spec, nil
}

func originOf(nc *v1alpha1.NetworkConfig) Origin {
	return Origin{Kind: "NetworkConfig", Namespace: nc.Namespace, Name: nc.Name}
}

// cameFrom tells from which field of which NetworkConfig a field of a
// TunnelEndpoint is.
var cameFrom = map[string]struct {
	ours  bool
	field string
}{
	"spec.clusterIdentity.clusterID":   {true, "spec.cluster.clusterID"},
	"spec.clusterIdentity.clusterName": {true, "spec.cluster.clusterName"},
	"spec.localPodCIDR":                {true, "spec.podCIDR"},
	"spec.localNATPodCIDR":             {true, "status.podCIDRNAT"},
	"spec.localExternalCIDR":           {true, "spec.externalCIDR"},
	"spec.localNATExternalCIDR":        {true, "status.externalCIDRNAT"},
	"spec.remotePodCIDR":               {false, "spec.podCIDR"},
	"spec.remoteNATPodCIDR":            {false, "status.podCIDRNAT"},
	"spec.remoteExternalCIDR":          {false, "spec.externalCIDR"},
	"spec.remoteNATExternalCIDR":       {false, "status.externalCIDRNAT"},
}

// fieldWords puts the fields that messages of PeerFrom mention into words.
var fieldWords = strings.NewReplacer(
	"spec.localPodCIDR", "our PodCIDR",
	"spec.localNATPodCIDR", "our PodCIDR as the peer answered it",
	"spec.localExternalCIDR", "our ExternalCIDR",
	"spec.localNATExternalCIDR", "our ExternalCIDR as the peer answered it",
	"spec.remotePodCIDR", "the peer's PodCIDR",
	"spec.remoteNATPodCIDR", "the peer's PodCIDR as used here",
	"spec.remoteExternalCIDR", "the peer's ExternalCIDR",
	"spec.remoteNATExternalCIDR", "the peer's ExternalCIDR as used here",
)

// traceBack turns a problem of a TunnelEndpoint into one of the NetworkConfig that
// it comes from.
func traceBack(p Problem, ours, theirs Origin) Problem {
	p.Origin, p.Message = theirs, fieldWords.Replace(p.Message)
	if from, ok := cameFrom[p.Field]; ok {
		p.Field = from.field
		if from.ours {
			p.Origin = ours
		}
	}
	return p
}
