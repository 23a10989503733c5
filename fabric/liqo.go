package fabric

import (
	"net/netip"
	"slices"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// PeerFrom reads a TunnelEndpoint. It asks for everything the gateway relies
// upon and reports all that is wrong at once; with any problem the peer is zero.
// The status of the object is not looked at. o names the object in messages.
func PeerFrom(te *v1alpha1.TunnelEndpoint, o Origin) (Peer, []Problem) {
	spec := &te.Spec
	r := report{origin: o}
	p := Peer{
		ID:       spec.ClusterIdentity.ClusterID,
		Name:     spec.ClusterIdentity.ClusterName,
		Endpoint: spec.EndpointIP,
		Origin:   o,
	}
	if !te.CreationTimestamp.IsZero() {
		p.Created = te.CreationTimestamp.Unix()
	}
	p.Local.Pod, p.Local.PodSeen = r.networks("spec.localPodCIDR", spec.LocalPodCIDR, "spec.localNATPodCIDR", spec.LocalNATPodCIDR)
	p.Local.External, p.Local.ExternalSeen = r.networks("spec.localExternalCIDR", spec.LocalExternalCIDR, "spec.localNATExternalCIDR", spec.LocalNATExternalCIDR)
	p.Remote.Pod, p.Remote.PodSeen = r.networks("spec.remotePodCIDR", spec.RemotePodCIDR, "spec.remoteNATPodCIDR", spec.RemoteNATPodCIDR)
	p.Remote.External, p.Remote.ExternalSeen = r.networks("spec.remoteExternalCIDR", spec.RemoteExternalCIDR, "spec.remoteNATExternalCIDR", spec.RemoteNATExternalCIDR)
	if spec.BackendType != v1alpha1.BackendWireGuard {
		r.add("spec.backendType", "is %s; want %q", quote(spec.BackendType), v1alpha1.BackendWireGuard)
	}
	p.Port = r.port("spec.backend_config.port", spec.BackendConfig)
	p.PublicKey = r.key("spec.backend_config.publicKey", spec.BackendConfig)
	p.Tunnels = r.furtherTunnels(spec.BackendConfig)

	// What could not be read is zero now and check would report it again.
	unread := make(map[string]bool, len(r.problems))
	for _, problem := range r.problems {
		unread[problem.Field] = true
	}
	for _, problem := range p.check() {
		if !unread[problem.Field] {
			r.problems = append(r.problems, problem)
		}
	}
	if len(r.problems) > 0 {
		return Peer{}, SortProblems(r.problems)
	}
	return p, nil
}

// MappingsFrom reads a NatMapping. The result holds the entries that are sound,
// sorted by the address seen; each other entry has a Problem. Without a usable
// cluster ID or ExternalCIDR no entry is sound. Whether spec.externalCIDR is
// still the one of the peer is not known here; GatewayFor sees to it.
func MappingsFrom(nm *v1alpha1.NatMapping, o Origin) (clusterID string, mappings []Mapping, problems []Problem) {
	r := report{origin: o}
	if wrong := CheckClusterID(nm.Spec.ClusterID); wrong != "" {
		r.add("spec.clusterID", "%s", wrong)
	}
	if pod, ok := r.cidr("spec.podCIDR", nm.Spec.PodCIDR); ok {
		r.prefix("spec.podCIDR", pod)
	}
	external, ok := r.cidr("spec.externalCIDR", nm.Spec.ExternalCIDR)
	if ok = ok && r.prefix("spec.externalCIDR", external); !ok || len(r.problems) > 0 {
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

// networks reads a CIDR and how the other side remapped it.
func (r *report) networks(field, value, natField, nat string) (own, seen netip.Prefix) {
	own, _ = r.cidr(field, value)
	switch nat {
	case v1alpha1.None:
		return own, own
	case "": // not the same: a real gateway refuses it, so that an answer half written is not taken for one
		r.add(natField, "is empty; want a CIDR or \"None\"")
		return own, netip.Prefix{}
	}
	seen, _ = r.cidr(natField, nat)
	return own, seen
}

func (r *report) cidr(field, value string) (netip.Prefix, bool) {
	if value == "" {
		r.add(field, "is empty; want a CIDR such as 10.244.0.0/16")
		return netip.Prefix{}, false
	}
	p, err := netip.ParsePrefix(value)
	if err != nil {
		r.add(field, "%s is not a CIDR; want an address, a slash and a length, such as 10.244.0.0/16", quote(value))
		return netip.Prefix{}, false
	}
	if p != p.Masked() {
		r.add(field, "%s has host bits set; want %v", quote(value), p.Masked())
		return netip.Prefix{}, false
	}
	if p.String() != value {
		r.add(field, "%s is not in canonical form; want %v", quote(value), p)
		return netip.Prefix{}, false
	}
	return p, true
}

func (r *report) addr(field, which, value string) netip.Addr {
	addr, err := netip.ParseAddr(value)
	if err != nil || addr.Zone() != "" || addr.Is4In6() {
		r.add(field, "%s %s is not an IP address; want one such as 10.0.0.1", which, quote(value))
		return netip.Addr{}
	}
	return addr
}

func (r *report) port(field string, config v1alpha1.BackendConfig) uint16 {
	value, ok := config[v1alpha1.ConfigPort]
	if !ok {
		r.add(field, "is absent; want a UDP port from 1 to 65535")
		return 0
	}
	port, ok := parsePort(value)
	if !ok {
		r.add(field, "is %s; want a UDP port from 1 to 65535", quote(value))
		return 0
	}
	return port
}

// furtherTunnels reads what a Liqo does not write.
func (r *report) furtherTunnels(config v1alpha1.BackendConfig) []TunnelEnd {
	value, ok := config[v1alpha1.ConfigTunnels]
	if !ok {
		return nil
	}
	further, err := ParseTunnels(value)
	if err != nil {
		r.add(tunnelsField, "%v", err)
	}
	return further
}

func (r *report) key(field string, config v1alpha1.BackendConfig) (key [32]byte) {
	value, ok := config[v1alpha1.ConfigPublicKey]
	if !ok {
		r.add(field, "is absent; want a WireGuard public key in base64")
		return key
	}
	key, err := ParseKey(value)
	if err != nil {
		r.add(field, "%v", err)
	}
	return key
}
