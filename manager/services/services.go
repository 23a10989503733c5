// Package services shares Services with peers through the standard objects of the Kubernetes
// Multi-Cluster Services API:
//
//	exporter                                            importer
//	ServiceExport + Service + EndpointSlices            ServiceImport, derived Service, EndpointSlices
//	        │ exportOf                                          ▲ Merge, of all clusters' exports
//	        ▼                                                   │
//	ExportedService ── shardsOf, package replication ──► PeerServices ── Peer.Accept
//
// Pure functions make the decisions, without a client or a clock. A Controller reads their inputs
// and writes their results. It owns the ServiceImports, Services and EndpointSlices with
// LabelService, the status of PeerServices, and the conditions of ServiceExports. The manager runs
// the Controller, and package peerings reads its Imports.
//
// Peers are not trusted. A peer sends the addresses that its pods have in its own cluster, and the
// importer translates them into the network that it uses for that peer. An address outside of the
// peer's PodCIDR never gets into a slice.
package services

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Labels and annotations of the importer's objects.
const (
	// LabelService marks our ServiceImports, Services and EndpointSlices. Its value is the name of the
	// multi-cluster service. Objects without this label are never changed.
	LabelService = isthmus.LabelService
	// ManagedBy is the value of endpointslice.kubernetes.io/managed-by on our slices.
	ManagedBy = "isthmus.net"
	// AnnotationDerived on a ServiceImport has the name of its derived Service in this cluster.
	AnnotationDerived = "multicluster.kubernetes.io/derived-service"
)

// A Key is the namespace and name of a service.
type Key = types.NamespacedName

// ShardOf returns the name of the PeerServices that contains a service. Exporter and importer both
// compute it.
func ShardOf(k Key) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(k.Namespace + "/" + k.Name))
	return shardName(int(h.Sum32() % isthmus.PeerServicesShards))
}

func shardName(n int) string { return fmt.Sprintf("%s%d", isthmus.PeerServicesPrefix, n) }

// derivedPrefix is the prefix of the names of our Services and EndpointSlices. We write no Service
// or EndpointSlice with another name.
const derivedPrefix = "derived-"

// DerivedName returns the name of the Service that represents a multi-cluster service here. Its
// digest is long enough that nobody can find another service with the same digest.
func DerivedName(k Key) string { return derivedPrefix + digest(16, k.Namespace, k.Name) }

// digest returns n characters that are valid in any name, and that differ for different parts.
func digest(n int, parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return strings.ToLower(base32.HexEncoding.WithPadding(base32.NoPadding).EncodeToString(h.Sum(nil)))[:n]
}

// permits reports whether a namespace list in a Peering contains the namespace.
func permits(list []string, namespace string) bool {
	return slices.Contains(list, "*") || slices.Contains(list, namespace)
}

// systemNamespaces lists the namespaces from and into which no service is shared.
var systemNamespaces = []string{"kube-system", "kube-public", "kube-node-lease"}

// A Remap translates the addresses of a peer's pods into the network that we use for them, like
// NETMAP: the network bits change, and the host bits stay. Both networks have the same length.
type Remap struct{ From, To netip.Prefix }

// Map returns the address in To of a pod with an address in From. It returns false for any other
// address.
func (r Remap) Map(addr netip.Addr) (netip.Addr, bool) {
	if !r.From.IsValid() || !r.To.IsValid() || r.From.Bits() != r.To.Bits() || r.From.Addr().BitLen() != r.To.Addr().BitLen() || !r.From.Contains(addr) {
		return netip.Addr{}, false
	}
	host, network := addr.AsSlice(), r.To.Masked().Addr().AsSlice()
	for i := range network {
		mask := byte(0xff) // of the host bits
		switch left := r.To.Bits() - 8*i; {
		case left >= 8:
			mask = 0
		case left > 0:
			mask >>= left
		}
		network[i] |= host[i] & mask
	}
	moved, ok := netip.AddrFromSlice(network)
	return moved, ok
}

// hostnameOf returns a hostname for an endpoint that has none. It uses the endpoint's address in
// the exporting cluster, which stays the same if this cluster uses another network for the peer.
func hostnameOf(addr netip.Addr) string {
	return strings.NewReplacer(".", "-", ":", "-").Replace(addr.StringExpanded())
}

// importType returns the ServiceImport type of an ExportedService.
func importType(s isthmus.ExportedService) mcs.ServiceImportType {
	if s.Type == string(mcs.Headless) {
		return mcs.Headless
	}
	return mcs.ClusterSetIP
}
