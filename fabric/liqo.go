package fabric

import (
	"encoding/base64"
	"net/netip"
	"slices"
	"strconv"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// Only this file converts values to the form of Liqo's objects, and back: CIDRs as text, "None" for
// a network that is not remapped, and the map of strings called backend_config.

// places names the fields from which the values of a Peer were read.
type places struct {
	id, name                                                     place
	localPod, localPodSeen, localExternal, localExternalSeen     place
	remotePod, remotePodSeen, remoteExternal, remoteExternalSeen place
	endpoint, backendType, port, publicKey, tunnels              place
	localAnswer, remoteAnswer                                    place // only in NetworkConfigs
}

// gatewayIn sets the places of the remote gateway's values to fields of the object o.
// TunnelEndpoint and NetworkConfig have the same fields for the gateway.
func (at *places) gatewayIn(o Origin) {
	at.endpoint, at.backendType = placeIn(o, "spec.endpointIP"), placeIn(o, "spec.backendType")
	at.port, at.publicKey = placeIn(o, "spec.backend_config.port"), placeIn(o, "spec.backend_config.publicKey")
	at.tunnels = placeIn(o, tunnelsField)
}

func placesInTunnelEndpoint(o Origin) places {
	at := places{
		id:                 placeIn(o, "spec.clusterIdentity.clusterID"),
		name:               placeIn(o, "spec.clusterIdentity.clusterName"),
		localPod:           placeIn(o, "spec.localPodCIDR"),
		localPodSeen:       placeIn(o, "spec.localNATPodCIDR"),
		localExternal:      placeIn(o, "spec.localExternalCIDR"),
		localExternalSeen:  placeIn(o, "spec.localNATExternalCIDR"),
		remotePod:          placeIn(o, "spec.remotePodCIDR"),
		remotePodSeen:      placeIn(o, "spec.remoteNATPodCIDR"),
		remoteExternal:     placeIn(o, "spec.remoteExternalCIDR"),
		remoteExternalSeen: placeIn(o, "spec.remoteNATExternalCIDR"),
	}
	at.gatewayIn(o)
	return at
}

// PeerFrom reads a TunnelEndpoint, except its status. It checks all values on which the gateway
// relies, and reports all problems at once. If there are problems, the returned peer is zero. o
// names the object in messages.
func PeerFrom(te *v1alpha1.TunnelEndpoint, o Origin) (Peer, []Problem) {
	spec, at := &te.Spec, placesInTunnelEndpoint(o)
	var r report
	p := Peer{
		ID:       spec.ClusterIdentity.ClusterID,
		Name:     spec.ClusterIdentity.ClusterName,
		Endpoint: spec.EndpointIP,
		InBand:   te.Annotations[isthmus.AnnotationInBand] == "true" || te.Annotations[isthmus.AnnotationInBand] == isthmus.InBandLeaving,
		Origin:   o,

		InBandLeaving: te.Annotations[isthmus.AnnotationInBand] == isthmus.InBandLeaving,
	}
	if !te.CreationTimestamp.IsZero() {
		p.Created = te.CreationTimestamp.Unix()
	}
	p.Local.Pod, p.Local.PodSeen = r.remapped(at.localPod, spec.LocalPodCIDR, at.localPodSeen, spec.LocalNATPodCIDR)
	p.Local.External, p.Local.ExternalSeen = r.remapped(at.localExternal, spec.LocalExternalCIDR, at.localExternalSeen, spec.LocalNATExternalCIDR)
	p.Remote.Pod, p.Remote.PodSeen = r.remapped(at.remotePod, spec.RemotePodCIDR, at.remotePodSeen, spec.RemoteNATPodCIDR)
	p.Remote.External, p.Remote.ExternalSeen = r.remapped(at.remoteExternal, spec.RemoteExternalCIDR, at.remoteExternalSeen, spec.RemoteNATExternalCIDR)
	p.Port, p.PublicKey, p.Tunnels = r.backend(at, spec.BackendType, spec.BackendConfig)
	return r.checked(p, at)
}

// specOf is the inverse of PeerFrom. p must be valid.
func specOf(p Peer) v1alpha1.TunnelEndpointSpec {
	return v1alpha1.TunnelEndpointSpec{
		ClusterIdentity:       v1alpha1.ClusterIdentity{ClusterID: p.ID, ClusterName: p.Name},
		LocalPodCIDR:          p.Local.Pod.String(),
		LocalNATPodCIDR:       natText(p.Local.Pod, p.Local.PodSeen),
		LocalExternalCIDR:     p.Local.External.String(),
		LocalNATExternalCIDR:  natText(p.Local.External, p.Local.ExternalSeen),
		RemotePodCIDR:         p.Remote.Pod.String(),
		RemoteNATPodCIDR:      natText(p.Remote.Pod, p.Remote.PodSeen),
		RemoteExternalCIDR:    p.Remote.External.String(),
		RemoteNATExternalCIDR: natText(p.Remote.External, p.Remote.ExternalSeen),
		EndpointIP:            p.Endpoint,
		BackendType:           v1alpha1.BackendWireGuard,
		BackendConfig:         backendConfig(p.Port, p.PublicKey, p.Tunnels),
	}
}

// NetworkConfigFor is the inverse of ClaimFrom. recipient is the cluster to which the spec is
// addressed.
func NetworkConfigFor(c Claim, recipient v1alpha1.ClusterIdentity) v1alpha1.NetworkConfigSpec {
	return v1alpha1.NetworkConfigSpec{
		RemoteCluster: recipient,
		PodCIDR:       c.Pod.String(),
		ExternalCIDR:  c.External.String(),
		EndpointIP:    c.Endpoint,
		BackendType:   v1alpha1.BackendWireGuard,
		BackendConfig: backendConfig(c.Port, c.PublicKey, c.Tunnels),
	}
}

func backendConfig(port uint16, key [32]byte, further []TunnelEnd) v1alpha1.BackendConfig {
	config := v1alpha1.BackendConfig{
		v1alpha1.ConfigPublicKey: base64.StdEncoding.EncodeToString(key[:]),
		v1alpha1.ConfigPort:      strconv.Itoa(int(port)),
	}
	if len(further) > 0 {
		config[v1alpha1.ConfigTunnels] = FormatTunnels(further)
	}
	return config
}

// AnswerFor returns our answer to a claim if we use podSeen and externalSeen for its networks. The
// answer consists of the values of the NAT fields in the status of the NetworkConfig. The value is
// the literal None for a network that we use unchanged.
func AnswerFor(c Claim, podSeen, externalSeen netip.Prefix) (podCIDRNAT, externalCIDRNAT string) {
	return natText(c.Pod, podSeen), natText(c.External, externalSeen)
}

func natText(own, seen netip.Prefix) string {
	if own == seen {
		return v1alpha1.None
	}
	return seen.String()
}

// SeenBy reads the receiver's answer from a NetworkConfig: the networks that the receiver uses for
// the sender's PodCIDR and ExternalCIDR. ok is false if there is no answer, or if it is invalid.
func SeenBy(nc *v1alpha1.NetworkConfig) (pod, external netip.Prefix, ok bool) {
	if !nc.Status.Processed {
		return pod, external, false
	}
	var r report // only the number of problems matters
	var p, e pair
	p.own, p.seen = r.remapped(place{}, nc.Spec.PodCIDR, place{}, nc.Status.PodCIDRNAT)
	e.own, e.seen = r.remapped(place{}, nc.Spec.ExternalCIDR, place{}, nc.Status.ExternalCIDRNAT)
	if len(r.problems) > 0 || !r.checkNetwork(p) || !r.checkNetwork(e) || p.seen.Overlaps(e.seen) {
		return netip.Prefix{}, netip.Prefix{}, false
	}
	return p.seen, e.seen, true
}

// MappingsFrom reads a NatMapping. It returns the valid entries, sorted by the address that the
// peer uses, and a Problem for each other entry. If the cluster ID or the ExternalCIDR is invalid,
// no entry is valid. MappingsFrom does not detect an outdated spec.externalCIDR; GatewayFor checks
// the addresses.
func MappingsFrom(nm *v1alpha1.NatMapping, o Origin) (clusterID string, mappings []Mapping, problems []Problem) {
	r := report{origin: o}
	if wrong := CheckClusterID(nm.Spec.ClusterID); wrong != "" {
		r.add("spec.clusterID", "%s", wrong)
	}
	if pod, ok := r.cidr(r.at("spec.podCIDR"), nm.Spec.PodCIDR); ok {
		r.checkPrefix(r.at("spec.podCIDR"), pod)
	}
	at := r.at("spec.externalCIDR")
	external, ok := r.cidr(at, nm.Spec.ExternalCIDR)
	if ok = ok && r.checkPrefix(at, external); !ok || len(r.problems) > 0 {
		return "", nil, SortProblems(r.problems)
	}
	for real, seen := range nm.Spec.ClusterMappings {
		field := "spec.clusterMappings[" + quote(real) + "]"
		m := Mapping{r.addr(field, "key", real), r.addr(field, "value", seen)}
		if !m.Real.IsValid() || !m.Seen.IsValid() {
			continue
		}
		if !external.Contains(m.Seen) {
			r.add(field, "%v is outside spec.externalCIDR, %v; want an address inside", m.Seen, external)
			continue
		}
		if wrong := checkReal(m.Real); wrong != "" {
			r.add(field, "key: %s", wrong)
			continue
		}
		mappings = append(mappings, m)
	}
	slices.SortFunc(mappings, Mapping.compare)
	return nm.Spec.ClusterID, mappings, SortProblems(r.problems)
}

// checked checks the peer p, which was just read. It returns p if reading and checking found no
// problems. Otherwise it returns all problems.
func (r *report) checked(p Peer, at places) (Peer, []Problem) {
	type field struct {
		origin Origin
		path   string
	}
	unread := make(map[field]bool, len(r.problems)) // fields that could not be read: they are zero in p, and check would report them again
	for _, problem := range r.problems {
		unread[field{problem.Origin, problem.Field}] = true
	}
	for _, problem := range p.check(at) {
		if !unread[field{problem.Origin, problem.Field}] {
			r.problems = append(r.problems, problem)
		}
	}
	if len(r.problems) > 0 {
		return Peer{}, SortProblems(r.problems)
	}
	return p, nil
}

// remapped reads a CIDR and the network that the other side uses for it.
func (r *report) remapped(at place, value string, natAt place, nat string) (own, seen netip.Prefix) {
	own, _ = r.cidr(at, value)
	switch nat {
	case v1alpha1.None:
		return own, own
	case "": // as in Liqo: an incomplete answer must not count as None
		r.addAt(natAt, "is empty; want a CIDR or \"None\"")
		return own, netip.Prefix{}
	}
	seen, _ = r.cidr(natAt, nat)
	return own, seen
}

func (r *report) cidr(at place, value string) (netip.Prefix, bool) {
	if value == "" {
		r.addAt(at, "is empty; want a CIDR such as 10.244.0.0/16")
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(value)
	switch {
	case err != nil:
		r.addAt(at, "%s is not a CIDR; want an address, a slash and a length, such as 10.244.0.0/16", quote(value))
	case p != p.Masked():
		r.addAt(at, "%s has host bits set; want %v", quote(value), p.Masked())
	case p.String() != value:
		r.addAt(at, "%s is not in canonical form; want %v", quote(value), p)
	default:
		return p, true
	}
	return netip.Prefix{}, false
}

func (r *report) addr(field, which, value string) netip.Addr {
	addr, err := netip.ParseAddr(value)
	if err != nil || addr.Zone() != "" || addr.Is4In6() {
		r.add(field, "%s %s is not an IP address; want one such as 10.0.0.1", which, quote(value))
		return netip.Addr{}
	}
	return addr
}

// backend reads the port, the public key and the additional tunnels of a gateway. Liqo has no
// additional tunnels.
func (r *report) backend(at places, backendType string, config v1alpha1.BackendConfig) (port uint16, key [32]byte, further []TunnelEnd) {
	if backendType != v1alpha1.BackendWireGuard {
		r.addAt(at.backendType, "is %s; want %q", quote(backendType), v1alpha1.BackendWireGuard)
	}
	switch value, ok := config[v1alpha1.ConfigPort]; {
	case !ok:
		r.addAt(at.port, "is absent; want a UDP port from 1 to 65535")
	default:
		if port, ok = parsePort(value); !ok {
			r.addAt(at.port, "is %s; want a UDP port from 1 to 65535", quote(value))
			port = 0
		}
	}
	var err error
	switch value, ok := config[v1alpha1.ConfigPublicKey]; {
	case !ok:
		r.addAt(at.publicKey, "is absent; want a WireGuard public key in base64")
	default:
		if key, err = ParseKey(value); err != nil {
			r.addAt(at.publicKey, "%v", err)
		}
	}
	if value, ok := config[v1alpha1.ConfigTunnels]; ok {
		if further, err = ParseTunnels(value); err != nil {
			r.addAt(at.tunnels, "%v", err)
		}
	}
	return port, key, further
}
