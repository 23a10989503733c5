package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// StoredCIDR is a network in the IPAM state, or empty if the network is not known. The schema
// checks only the notation, because reserved networks may be of any kind and length. The IPAM
// checks whether the network is plausible.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="self.size() == 0 || (isCIDR(self) && string(cidr(self).masked()) == self)",message="must be empty or a network in canonical CIDR notation",reason=FieldValueInvalid
type StoredCIDR = string

// StoredNATCIDR is the answer of a peer in the IPAM state: a network, None, or empty if the peer
// has not answered.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="self.size() == 0 || self == 'None' || (isCIDR(self) && string(cidr(self).masked()) == self)",message="must be empty, None or a network in canonical CIDR notation",reason=FieldValueInvalid
type StoredNATCIDR = string

// ListedCIDR is a network in a list of the IPAM state.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network in canonical CIDR notation",reason=FieldValueInvalid
type ListedCIDR = string

// StoredIP is an IP address in the IPAM state. A pattern checks it, because there may be too many
// addresses for a CEL rule.
// +kubebuilder:validation:MaxLength=45
// +kubebuilder:validation:Pattern=`^((25[0-5]|(2[0-4]|1[0-9]|[1-9]|)[0-9])([.](25[0-5]|(2[0-4]|1[0-9]|[1-9]|)[0-9])){3}|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$`
type StoredIP = string

// Subnets are the networks exchanged with one peer. The two remote fields have the networks that
// this cluster uses, remapped or not. The two local fields have the peer's answer.
type Subnets struct {
	// LocalNATPodCIDR is the network that the peer uses for our pods. It is None if the peer uses
	// our PodCIDR unchanged, and empty if the peer has not answered.
	LocalNATPodCIDR StoredNATCIDR `json:"localNATPodCIDR"`
	// RemotePodCIDR is the network that this cluster uses for the peer's pods.
	RemotePodCIDR StoredCIDR `json:"remotePodCIDR"`
	// LocalNATExternalCIDR is the network that the peer uses for our ExternalCIDR. It is None if
	// the peer uses our ExternalCIDR unchanged, and empty if the peer has not answered.
	LocalNATExternalCIDR StoredNATCIDR `json:"localNATExternalCIDR"`
	// RemoteExternalCIDR is the network that this cluster uses for the peer's ExternalCIDR.
	RemoteExternalCIDR StoredCIDR `json:"remoteExternalCIDR"`
}

// ClusterMapping has the address of a mapped endpoint for one peer.
type ClusterMapping struct {
	// ExternalCIDRNattedIP is the address by which the peer reaches the endpoint.
	ExternalCIDRNattedIP StoredIP `json:"ExternalCIDRNattedIP"`
}

// EndpointMapping is an endpoint that has an address in our ExternalCIDR.
type EndpointMapping struct {
	// ExternalCIDROriginalIP is the endpoint's address in our ExternalCIDR.
	ExternalCIDROriginalIP StoredIP `json:"ExternalCIDROriginalIP"`
	// ClusterMappings has an entry for each peer that may reach the endpoint. The keys are the
	// clusterIDs of the peers.
	// +kubebuilder:validation:MaxProperties=4096
	ClusterMappings map[string]ClusterMapping `json:"clusterMappings"`
}

// ConfiguredCluster marks a peer whose NatMapping was initialised.
type ConfiguredCluster struct{}

// IpamStorageSpec is the whole state of the IPAM. Liqo creates it with empty maps, lists and
// strings, and then replaces one field at a time by JSON patches. Such a patch fails if the field
// does not exist, so no field may be omitted.
type IpamStorageSpec struct {
	// Prefixes is the state of Liqo's allocator, keyed by prefix. The values are Go gobs, which
	// only Liqo can use. The schema does not limit their length, because a gob grows with each
	// allocated address.
	// +kubebuilder:validation:MaxProperties=16384
	// +kubebuilder:validation:XValidation:rule="self.all(p, p.size() <= 64)",message="keys must be prefixes of at most 64 characters",reason=FieldValueInvalid
	Prefixes map[string][]byte `json:"prefixes"`
	// Pools are the networks from which the IPAM allocates, in this order.
	// +kubebuilder:validation:MaxItems=1024
	Pools []ListedCIDR `json:"pools"`
	// ReservedSubnets are networks that are never used for peers.
	// +kubebuilder:validation:MaxItems=1024
	ReservedSubnets []ListedCIDR `json:"reservedSubnets"`
	// ClusterSubnets are the networks exchanged with each peer. The keys are the clusterIDs of the
	// peers.
	// +kubebuilder:validation:MaxProperties=4096
	// +kubebuilder:validation:XValidation:rule="self.all(c, c.size() > 0 && c.size() <= 63)",message="keys must be clusterIDs of 1 to 63 characters",reason=FieldValueInvalid
	ClusterSubnets map[string]Subnets `json:"clusterSubnets"`
	// ExternalCIDR is our own ExternalCIDR.
	ExternalCIDR StoredCIDR `json:"externalCIDR"`
	// EndpointMappings are the endpoints that have an address in our ExternalCIDR. The keys are the
	// endpoints' own addresses.
	// +kubebuilder:validation:MaxProperties=16384
	// +kubebuilder:validation:XValidation:rule="self.all(e, isIP(e))",message="keys must be IP addresses",reason=FieldValueInvalid
	EndpointMappings map[string]EndpointMapping `json:"endpointMappings"`
	// PodCIDR is the network of our pods.
	PodCIDR StoredCIDR `json:"podCIDR"`
	// ServiceCIDR is the network of our Services.
	ServiceCIDR StoredCIDR `json:"serviceCIDR"`
	// NatMappingsConfigured has an entry for each peer whose NatMapping was initialised. The keys
	// are the clusterIDs of the peers. Liqo leaves entries behind when a peering ends.
	// +kubebuilder:validation:MaxProperties=16384
	// +kubebuilder:validation:XValidation:rule="self.all(c, c.size() > 0 && c.size() <= 63)",message="keys must be clusterIDs of 1 to 63 characters",reason=FieldValueInvalid
	NatMappingsConfigured map[string]ConfiguredCluster `json:"natMappingsConfigured"`
}

// IpamStorage holds the IPAM state. It is the only object of its kind in a cluster, and has no
// status.
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=ipamstorages,scope=Cluster,categories=liqo
type IpamStorage struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the manager.
	Spec IpamStorageSpec `json:"spec"`
}

// IpamStorageList is a list of IpamStorages.
//
// +kubebuilder:object:root=true
type IpamStorageList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []IpamStorage `json:"items"`
}
