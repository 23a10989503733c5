package services

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Own is an export of this cluster.
type Own struct {
	Service isthmus.ExportedService
	// Nodes maps the address of each endpoint to its node. It is not sent to peers.
	Nodes map[string]string
}

// Invalid is the reason why a ServiceExport exports nothing. Reason is a reason of the condition
// Valid.
type Invalid struct {
	Reason  mcs.ServiceExportConditionReason
	Message string
}

// reasonTooMany is the reason of exports beyond maxExports. The Multi-Cluster Services API has no
// reason for this.
const reasonTooMany mcs.ServiceExportConditionReason = "TooManyExports"

// exportOf computes the export of a ServiceExport from its Service and the Service's
// EndpointSlices. svc is nil if there is no such Service.
func exportOf(export *mcs.ServiceExport, svc *corev1.Service, endpoints []*discoveryv1.EndpointSlice) (Own, *Invalid) {
	switch {
	case svc == nil:
		return Own{}, &Invalid{mcs.ServiceExportReasonNoService, "there is no Service of this name"}
	case svc.Spec.Type == corev1.ServiceTypeExternalName:
		return Own{}, &Invalid{mcs.ServiceExportReasonInvalidServiceType, "a Service of type ExternalName has no endpoints to share"}
	case svc.Labels[LabelService] != "":
		return Own{}, &Invalid{mcs.ServiceExportReasonInvalidServiceType, "the Service itself represents an imported service"}
	}
	s := isthmus.ExportedService{
		Namespace: export.Namespace, Name: export.Name, Since: isthmus.UTCTimeOf(export.CreationTimestamp.Time),
		Type:                  string(mcs.ClusterSetIP),
		InternalTrafficPolicy: string(ptr.Deref(svc.Spec.InternalTrafficPolicy, "")),
		TrafficDistribution:   ptr.Deref(svc.Spec.TrafficDistribution, ""),
		Labels:                permittedMetadata(exported(export.Spec.ExportedLabels), true),
		Annotations:           permittedMetadata(exported(export.Spec.ExportedAnnotations), false),
	}
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		s.Type = string(mcs.Headless)
	} else if s.SessionAffinity = string(svc.Spec.SessionAffinity); svc.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		if c := svc.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil {
			s.SessionAffinitySeconds = ptr.Deref(c.ClientIP.TimeoutSeconds, 0)
		}
	}
	for _, p := range svc.Spec.Ports {
		s.Ports = append(s.Ports, isthmus.ExportedPort{
			Name: p.Name, Protocol: string(cmp.Or(p.Protocol, corev1.ProtocolTCP)), Port: p.Port, AppProtocol: ptr.Deref(p.AppProtocol, ""),
		})
	}
	own := Own{Nodes: make(map[string]string)}
	s.Subsets = subsetsOf(endpoints, own.Nodes)
	own.Service = s
	return own, nil
}

func exported(m map[string]string) map[string]isthmus.MetadataValue {
	if len(m) == 0 {
		return nil
	}
	all := make(map[string]isthmus.MetadataValue, len(m))
	for k, v := range m {
		all[k] = isthmus.MetadataValue(v)
	}
	return all
}

// subsetsOf groups endpoints by the ports on which they listen. The result is sorted, so that it is
// the same for the same endpoints. An address in several slices counts once, and is ready if it is
// ready in any of these slices.
func subsetsOf(endpoints []*discoveryv1.EndpointSlice, nodes map[string]string) []isthmus.EndpointSubset {
	groups := make(map[string]*isthmus.EndpointSubset)
	index := make(map[string]map[string]int) // index of an address in its group, by group and address
	for _, slice := range endpoints {
		if slice.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		targets := targetsOf(slice.Ports)
		id := fmt.Sprint(targets)
		g := groups[id]
		if g == nil {
			g = &isthmus.EndpointSubset{Targets: targets}
			groups[id], index[id] = g, make(map[string]int)
		}
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			if len(e.Addresses) == 0 { // consumers use only the first address
				continue
			}
			made := isthmus.ExportedEndpoint{
				Address: e.Addresses[0], Hostname: ptr.Deref(e.Hostname, ""), Zone: ptr.Deref(e.Zone, ""),
				Ready: ptr.Deref(e.Conditions.Ready, true), Terminating: ptr.Deref(e.Conditions.Terminating, false),
			}
			made.Serving = ptr.Deref(e.Conditions.Serving, made.Ready)
			if e.NodeName != nil {
				nodes[made.Address] = *e.NodeName
			}
			if at, twice := index[id][made.Address]; !twice {
				index[id][made.Address] = len(g.Endpoints)
				g.Endpoints = append(g.Endpoints, made)
			} else if made.Ready && !g.Endpoints[at].Ready {
				g.Endpoints[at] = made
			}
		}
	}
	var all []isthmus.EndpointSubset
	for _, id := range slices.Sorted(maps.Keys(groups)) {
		g := groups[id]
		slices.SortFunc(g.Endpoints, func(a, b isthmus.ExportedEndpoint) int { return strings.Compare(a.Address, b.Address) })
		if len(g.Endpoints) > 0 {
			all = append(all, *g)
		}
	}
	return all
}

func targetsOf(ports []discoveryv1.EndpointPort) (all []isthmus.TargetPort) {
	for _, p := range ports {
		if p.Port != nil {
			all = append(all, isthmus.TargetPort{Name: ptr.Deref(p.Name, ""), Port: *p.Port})
		}
	}
	slices.SortFunc(all, func(a, b isthmus.TargetPort) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), cmp.Compare(a.Port, b.Port))
	})
	return all
}

// LeftOut counts the endpoints that forPeers omits.
type LeftOut struct {
	NoPod   int // endpoints outside of the PodCIDR, such as Pods on the host network
	TooMany int // endpoints beyond the bounds of PeerServices
}

// bounded drops all values that the CRD of PeerServices rejects. Otherwise the peer's API server
// would reject the other services of the shard as well. The values come from ServiceExports and
// EndpointSlices, for which the API server does not check these bounds.
func bounded(s isthmus.ExportedService) isthmus.ExportedService {
	s.Ports = s.Ports[:min(len(s.Ports), maxPorts)]
	s.Labels, s.Annotations = boundedMetadata(s.Labels), boundedMetadata(s.Annotations)
	switch s.TrafficDistribution {
	case "", corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode:
	default:
		s.TrafficDistribution = ""
	}
	return s
}

const (
	maxPorts    = 64
	maxMetadata = 16
	maxValue    = 512
	maxZone     = 63
)

func boundedMetadata(m map[string]isthmus.MetadataValue) map[string]isthmus.MetadataValue {
	var kept map[string]isthmus.MetadataValue
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if len(m[k]) > maxValue || len(kept) == maxMetadata {
			continue
		}
		if kept == nil {
			kept = make(map[string]isthmus.MetadataValue)
		}
		kept[k] = m[k]
	}
	return kept
}

func boundedTargets(targets []isthmus.TargetPort) []isthmus.TargetPort {
	kept := slices.DeleteFunc(slices.Clone(targets), func(t isthmus.TargetPort) bool { return t.Port < 1 || t.Port > 65535 })
	return kept[:min(len(kept), maxPorts)]
}

// forPeers returns the export with only those endpoints that peers can reach, which are those in
// our PodCIDR. It counts the endpoints that it omits.
func forPeers(s isthmus.ExportedService, pods netip.Prefix) (isthmus.ExportedService, LeftOut) {
	s = bounded(s)
	var left LeftOut
	room := isthmus.MaxExportedEndpoints
	var subsets []isthmus.EndpointSubset
	for _, subset := range s.Subsets {
		kept := isthmus.EndpointSubset{Targets: boundedTargets(subset.Targets)}
		for _, e := range subset.Endpoints {
			switch addr, err := netip.ParseAddr(e.Address); {
			case err != nil || !pods.Contains(addr):
				left.NoPod++
			case room == 0 || len(subsets) == isthmus.MaxSubsets:
				left.TooMany++
			default:
				room--
				if len(e.Zone) > maxZone {
					e.Zone = ""
				}
				kept.Endpoints = append(kept.Endpoints, e)
			}
		}
		if len(kept.Endpoints) > 0 {
			subsets = append(subsets, kept)
		}
	}
	s.Subsets = subsets
	return s, left
}

// count returns the number of endpoints of a service.
func count(s isthmus.ExportedService) (n int) {
	for _, subset := range s.Subsets {
		n += len(subset.Endpoints)
	}
	return n
}

// maxOctets bounds a shard, in octets of JSON. etcd accepts requests of 1.5 MiB.
const maxOctets = 1 << 20

// octets returns an upper bound of the size of s as JSON. A character of a label or an annotation
// may take six octets.
func octets(s isthmus.ExportedService) int {
	n := 600
	for _, m := range []map[string]isthmus.MetadataValue{s.Labels, s.Annotations} {
		for k, v := range m {
			n += 8 + 6*(len(k)+len(v))
		}
	}
	for _, p := range s.Ports {
		n += 70 + len(p.Name) + 6*len(p.AppProtocol)
	}
	for _, subset := range s.Subsets {
		n += 32
		for _, t := range subset.Targets {
			n += 32 + len(t.Name)
		}
		for _, e := range subset.Endpoints {
			n += 90 + len(e.Address) + len(e.Hostname) + 6*len(e.Zone)
		}
	}
	return n
}

// part returns the fraction of a shard that a service takes up.
func part(s isthmus.ExportedService) float64 {
	return max(1./isthmus.MaxExportedServices, float64(count(s))/isthmus.MaxExportedEndpoints, float64(octets(s))/maxOctets)
}

// share is the fraction of a shard that each namespace may use before shardsOf places exports
// beyond that fraction.
const share = 1. / 4

// shardsOf distributes exports over PeerServices. The keys of shards are object names. The number
// of services, endpoints and octets in each shard is bounded. Older exports are placed first, but
// exports beyond the share of their namespace come after all others. omitted lists the exports for
// which there was no room.
func shardsOf(exports []isthmus.ExportedService) (shards map[string]isthmus.PeerServicesSpec, omitted []Key) {
	byAge := slices.Clone(exports)
	slices.SortFunc(byAge, func(a, b isthmus.ExportedService) int {
		return cmp.Or(strings.Compare(a.Since, b.Since), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	taken := make(map[Key]float64) // fraction taken, by shard and namespace
	var fair, late []isthmus.ExportedService
	for _, s := range byAge {
		key := Key{Namespace: s.Namespace, Name: ShardOf(Key{Namespace: s.Namespace, Name: s.Name})}
		if taken[key] += part(s); taken[key] > share {
			late = append(late, s)
		} else {
			fair = append(fair, s)
		}
	}
	shards = make(map[string]isthmus.PeerServicesSpec)
	endpoints, size := make(map[string]int), make(map[string]int)
	for _, s := range slices.Concat(fair, late) {
		key := Key{Namespace: s.Namespace, Name: s.Name}
		name := ShardOf(key)
		spec, n := shards[name], octets(s)
		if len(spec.Services) == isthmus.MaxExportedServices || endpoints[name]+count(s) > isthmus.MaxExportedEndpoints || size[name]+n > maxOctets {
			omitted = append(omitted, key)
			continue
		}
		endpoints[name] += count(s)
		size[name] += n
		spec.Services = append(spec.Services, s)
		shards[name] = spec
	}
	for _, spec := range shards {
		slices.SortFunc(spec.Services, func(a, b isthmus.ExportedService) int {
			return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
		})
	}
	return shards, omitted
}

// conditionOf returns a condition of a ServiceExport, without its time.
func conditionOf(t mcs.ServiceExportConditionType, status metav1.ConditionStatus, reason mcs.ServiceExportConditionReason, message string) metav1.Condition {
	return metav1.Condition{Type: string(t), Status: status, Reason: string(reason), Message: message}
}
