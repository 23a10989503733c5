package services

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A Peer is an exporting cluster.
type Peer struct {
	ID      string   // clusterID
	Cluster string   // the cluster's name in DNS, as clusterNames returns it
	Import  []string // namespaces into which its services are imported
	Pods    Remap    // zero: the clusters have not agreed on networks yet
	Down    bool     // whether the tunnel to it is down
}

// An Export is the contribution of one cluster to a service.
type Export struct {
	ID      string
	Cluster string
	// Since is the time when the export began. The oldest export wins a conflict.
	Since   isthmus.UTCTime
	Service isthmus.ExportedService
	// Addresses maps the address of each usable endpoint in Service to its address in this cluster.
	// For exports of this cluster the two addresses are equal.
	Addresses map[string]netip.Addr
	// Nodes has the value of Own.Nodes.
	Nodes map[string]string
	Down  bool
}

// ownExport returns the contribution of this cluster.
func ownExport(id, cluster string, own Own) Export {
	x := Export{ID: id, Cluster: cluster, Since: own.Service.Since, Service: own.Service, Nodes: own.Nodes, Addresses: make(map[string]netip.Addr)}
	for _, subset := range own.Service.Subsets {
		for _, e := range subset.Endpoints {
			if addr, err := netip.ParseAddr(e.Address); err == nil {
				x.Addresses[e.Address] = addr
			}
		}
	}
	return x
}

// Reasons for refusals in the status of PeerServices. Besides these, the status has the reasons in
// conflictReasons.
const (
	RefusedShard     = "WrongShard"        // the service is in the wrong object
	RefusedInvalid   = "Invalid"           // a name, port or type is invalid
	RefusedReserved  = "NamespaceReserved" // nothing may be imported into the namespace
	RefusedConsent   = "NotImported"       // the Peering here does not import into the namespace
	RefusedNamespace = "NamespaceMissing"  // the namespace does not exist here
	RefusedNetworks  = "NetworksPending"   // the clusters have not agreed on networks yet
	RefusedAddress   = "ForeignAddress"    // endpoints outside of the peer's PodCIDR; the others are served
	RefusedMetadata  = "InvalidMetadata"   // labels or annotations that this cluster rejects; the service is served
	RefusedForeign   = "ForeignObject"     // a foreign object has the name of one of ours
	RefusedFailed    = "NotWritten"        // the API server of the importing cluster rejects an object of ours
)

// A Refusal is one line of the status of PeerServices.
type Refusal struct{ Reason, Message string }

// Namespaces describes the namespaces of this cluster.
type Namespaces interface {
	// Reserved reports whether no service may be imported into the namespace.
	Reserved(name string) bool
	// Exists reports whether the namespace exists.
	Exists(name string) bool
}

// Accept checks one service in the PeerServices named shard. It returns false if no part of the
// service is served here. refusals has the reasons, or lists the parts of the service that are not
// served.
func (p Peer) Accept(shard string, s isthmus.ExportedService, where Namespaces, now time.Time) (x Export, refusals []Refusal, ok bool) {
	refuse := func(reason, format string, args ...any) {
		refusals = append(refusals, Refusal{reason, fmt.Sprintf(format, args...)})
	}
	switch problem := invalid(s); {
	case problem != "":
		refuse(RefusedInvalid, "%s", problem)
	case ShardOf(Key{Namespace: s.Namespace, Name: s.Name}) != shard:
		refuse(RefusedShard, "the service belongs in PeerServices %s", ShardOf(Key{Namespace: s.Namespace, Name: s.Name}))
	case where.Reserved(s.Namespace):
		refuse(RefusedReserved, "services are never imported into this namespace")
	case !permits(p.Import, s.Namespace):
		refuse(RefusedConsent, "the Peering does not import services into this namespace")
	case !where.Exists(s.Namespace):
		refuse(RefusedNamespace, "the importing cluster has no such namespace")
	case !p.Pods.From.IsValid():
		refuse(RefusedNetworks, "the clusters have not agreed on networks yet")
	}
	if len(refusals) > 0 {
		return Export{}, refusals, false
	}
	x = Export{ID: p.ID, Cluster: p.Cluster, Since: s.Since, Service: s, Down: p.Down, Addresses: make(map[string]netip.Addr)}
	x.Since = min(x.Since, isthmus.UTCTimeOf(now))
	foreign := 0
	for _, subset := range s.Subsets {
		for _, e := range subset.Endpoints {
			if addr, err := netip.ParseAddr(e.Address); err != nil {
				foreign++
			} else if moved, inside := p.Pods.Map(addr); !inside {
				foreign++
			} else {
				x.Addresses[e.Address] = moved
			}
		}
	}
	if foreign > 0 {
		refuse(RefusedAddress, "%d endpoints are outside the PodCIDR of the exporting cluster", foreign)
	}
	x.Service.Labels, x.Service.Annotations = permittedMetadata(s.Labels, true), permittedMetadata(s.Annotations, false)
	dropped := len(s.Labels) + len(s.Annotations) - len(x.Service.Labels) - len(x.Service.Annotations)
	if dropped > 0 {
		refuse(RefusedMetadata, "%d labels or annotations were dropped", dropped)
	}
	return x, refusals, true
}

// permittedMetadata returns those exported labels or annotations that our objects may have, or nil
// if there are none.
func permittedMetadata(m map[string]isthmus.MetadataValue, labels bool) map[string]isthmus.MetadataValue {
	kept := maps.Clone(m)
	maps.DeleteFunc(kept, func(k string, v isthmus.MetadataValue) bool {
		return reservedKey(k) || labels && len(validation.IsValidLabelValue(string(v))) > 0
	})
	if len(kept) == 0 {
		return nil
	}
	return kept
}

// reservedKey reports whether a peer must not set the key: it is not valid for a label, or has a
// meaning to us or to the Multi-Cluster Services API.
func reservedKey(key string) bool {
	if len(validation.IsQualifiedName(key)) > 0 || key == "app.kubernetes.io/managed-by" {
		return true
	}
	domain, _, found := strings.Cut(key, "/")
	return found && slices.ContainsFunc([]string{"isthmus.net", "liqo.io", "multicluster.kubernetes.io", "multicluster.x-k8s.io"}, func(d string) bool {
		return domain == d || strings.HasSuffix(domain, "."+d)
	})
}

func dnsLabel(name string) bool { return len(validation.IsDNS1123Label(name)) == 0 }

// invalid returns the reason if a service is invalid; otherwise "". The API server validates the
// same fields, unless its CRD is older or was edited.
func invalid(s isthmus.ExportedService) string {
	if !dnsLabel(s.Namespace) || !dnsLabel(s.Name) {
		return "namespace and name have to be DNS labels"
	}
	if s.Type != string(mcs.ClusterSetIP) && s.Type != string(mcs.Headless) {
		return "type has to be ClusterSetIP or Headless"
	}
	if s.Type == string(mcs.ClusterSetIP) && len(s.Ports) == 0 {
		return "a service of type ClusterSetIP must have a port"
	}
	if len(s.Ports) > maxPorts || len(s.Subsets) > isthmus.MaxSubsets || count(s) > isthmus.MaxExportedEndpoints {
		return "more ports, subsets or endpoints than the CRD PeerServices allows"
	}
	if s.SessionAffinity != "" && s.SessionAffinity != "None" && s.SessionAffinity != "ClientIP" || s.SessionAffinitySeconds < 0 || s.SessionAffinitySeconds > 86400 {
		return "sessionAffinity has to be None or ClientIP, for at most 86400 seconds"
	}
	if s.InternalTrafficPolicy != "" && s.InternalTrafficPolicy != "Cluster" && s.InternalTrafficPolicy != "Local" {
		return "internalTrafficPolicy has to be Cluster or Local"
	}
	for i, p := range s.Ports {
		switch {
		case p.Port < 1 || p.Port > 65535 || p.Name != "" && !dnsLabel(p.Name) || p.Name == "" && len(s.Ports) > 1:
			return "a port has no valid number or name"
		case p.Protocol != "TCP" && p.Protocol != "UDP" && p.Protocol != "SCTP":
			return "a protocol has to be TCP, UDP or SCTP"
		case p.AppProtocol != "" && len(validation.IsQualifiedName(p.AppProtocol)) > 0:
			return "appProtocol must be a qualified name"
		case slices.ContainsFunc(s.Ports[:i], func(q isthmus.ExportedPort) bool {
			return q.Name == p.Name || q.Protocol == p.Protocol && q.Port == p.Port
		}):
			return "two ports have the same name or number"
		}
	}
	for _, subset := range s.Subsets {
		for i, t := range subset.Targets {
			if t.Port < 1 || t.Port > 65535 || t.Name != "" && !dnsLabel(t.Name) ||
				slices.ContainsFunc(subset.Targets[:i], func(u isthmus.TargetPort) bool { return u.Name == t.Name }) {
				return "a target port has no valid number or name"
			}
		}
		for _, e := range subset.Endpoints {
			if e.Hostname != "" && !dnsLabel(e.Hostname) || len(validation.IsValidLabelValue(e.Zone)) > 0 {
				return "hostname must be a DNS label, and zone a label value"
			}
		}
	}
	return ""
}
