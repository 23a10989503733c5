package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// Namespace is the name of a Kubernetes namespace.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`
type Namespace = string

// PeeringSpec names the cluster to join, and states how to reach its API server. A person or
// `isthmus peer` writes it.
type PeeringSpec struct {
	// Cluster is the peer. It cannot be changed: another cluster needs another Peering.
	// +kubebuilder:validation:XValidation:rule="self.clusterID == oldSelf.clusterID && self.clusterName == oldSelf.clusterName",message="cluster is immutable",reason=FieldValueInvalid
	Cluster net.ClusterIdentity `json:"cluster"`
	// TenantNamespace names the namespaces, here and at the peer, that hold the objects of this
	// peering.
	TenantNamespace TenantNamespace `json:"tenantNamespace"`
	// IdentitySecretName is the Secret in the local tenant namespace with our identity at the peer:
	// a kubeconfig under the key kubeconfig, or Liqo's certificate (private-key, certificate,
	// apiServerUrl, apiServerCa).
	// +kubebuilder:default=isthmus-identity
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	IdentitySecretName string `json:"identitySecretName,omitempty"`
	// Overrides replace values that the manager would otherwise choose.
	// +optional
	Overrides Overrides `json:"overrides,omitzero"`
	// Claims decide which of the networks that the peer advertises are used unchanged in this
	// cluster, and which are remapped.
	// +optional
	Claims Claims `json:"claims,omitzero"`
	// Services name the services that the clusters share. A manager without --services ignores
	// them.
	// +optional
	Services Services `json:"services,omitzero"`
	// PostQuantum states whether the tunnel may run without a preshared key from ML-KEM-768. Such a
	// key protects traffic that is recorded today against future quantum computers. Two clusters
	// with Isthmus agree on a key automatically.
	// +kubebuilder:default=Preferred
	// +optional
	PostQuantum PostQuantum `json:"postQuantum,omitempty"`
	// InBand lets the managers of the two clusters reach each other's API servers through the
	// tunnel. Our manager uses the tunnel, and our gateway forwards connections from the peer's
	// gateway to our API server. The Peerings of both clusters must set inBand. `isthmus peer
	// --in-band` sets it in both.
	// +optional
	InBand bool `json:"inBand,omitempty"`
}

// PostQuantum is Preferred or Required. With Preferred, the tunnel uses a preshared key if the peer
// supports it. With Required, the tunnel is down while there is no preshared key.
// +kubebuilder:validation:Enum=Preferred;Required
type PostQuantum string

// The values of PostQuantum.
const (
	PostQuantumPreferred PostQuantum = "Preferred"
	PostQuantumRequired  PostQuantum = "Required"
)

// Services name namespaces whose services are shared with a peer. A service is shared only if one
// cluster exports its namespace and the other cluster imports this namespace. If no namespaces are
// named, nothing is shared. `isthmus peer --services` writes the namespaces.
type Services struct {
	// Export are namespaces; * stands for all. The peer gets their services that have a
	// ServiceExport.
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	// +optional
	Export []ServiceNamespace `json:"export,omitempty"`
	// Import are the namespaces into which the peer's services are imported; * stands for all
	// namespaces.
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	// +optional
	Import []ServiceNamespace `json:"import,omitempty"`
}

// ServiceNamespace is the name of a namespace, or * for all namespaces.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^([a-z0-9]([a-z0-9-]*[a-z0-9])?|\*)$`
type ServiceNamespace = string

// Claims restrict which of the networks that a peer advertises are used unchanged in this cluster.
// Without restrictions, a network is used unchanged if it is in private space (RFC 1918, 6598 and
// 4193) and overlaps nothing of this cluster. Any other network is remapped into the pools.
type Claims struct {
	// Allowed are networks outside of private space. A network of the peer that is inside one of
	// these may be used unchanged, like a network in private space.
	// +kubebuilder:validation:MaxItems=16
	// +listType=set
	// +optional
	Allowed []net.CIDR `json:"allowed,omitempty"`
	// If AlwaysRemap is true, both networks of the peer are remapped.
	// +optional
	AlwaysRemap bool `json:"alwaysRemap,omitempty"`
	// Consent names the advertised networks to which an administrator has agreed. If the peer
	// changes its networks and would get new addresses in this cluster, the administrator must
	// agree. Until then, the previous networks stay in force. `isthmus peer NAME --consent` writes
	// it.
	// +optional
	Consent *Consent `json:"consent,omitempty"`
}

// Consent names the networks that a peer advertises in its NetworkConfig.
type Consent struct {
	// PodCIDR is spec.podCIDR of the NetworkConfig.
	PodCIDR net.CIDR `json:"podCIDR"`
	// ExternalCIDR is spec.externalCIDR of the NetworkConfig.
	ExternalCIDR net.CIDR `json:"externalCIDR"`
}

// TenantNamespace names the namespaces of a peering.
type TenantNamespace struct {
	// Local is the namespace in this cluster. The peer's identity has no rights outside of this
	// namespace. The name cannot be changed.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="tenantNamespace.local is immutable",reason=FieldValueInvalid
	Local Namespace `json:"local"`
	// Remote is the namespace at the peer. The name cannot be changed, because our NetworkConfig
	// would stay in the previous namespace.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="tenantNamespace.remote is immutable",reason=FieldValueInvalid
	Remote Namespace `json:"remote"`
}

// Overrides replace values that the manager otherwise detects or chooses, for example because it
// cannot detect the correct value. Each override is optional.
type Overrides struct {
	// Address is the address of our gateway that is published to this peer, instead of the address
	// of the gateway's Service.
	// +optional
	Address *net.EndpointHost `json:"address,omitempty"`
	// Port is the UDP port of our gateway that is published to this peer, instead of the port of
	// the gateway's Service.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Port int32 `json:"port,omitempty"`
	// PodCIDR is the network to use in this cluster for the peer's pods, instead of one that the
	// IPAM chooses. It must have the prefix length of the peer's PodCIDR.
	// +optional
	PodCIDR *net.CIDR `json:"podCIDR,omitempty"`
	// ExternalCIDR is the network to use in this cluster for the peer's ExternalCIDR, instead of
	// one that the IPAM chooses. It must have the prefix length of the peer's ExternalCIDR.
	// +optional
	ExternalCIDR *net.CIDR `json:"externalCIDR,omitempty"`
}

// PeeringStatus is the state of a peering. The manager writes it.
type PeeringStatus struct {
	// ObservedGeneration is the metadata.generation to which the rest of the status refers.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions are Ready, IdentityReady, Published, Answered, PeerConfigAccepted,
	// TunnelEndpointReady, Connected and, if services are shared, ServicesShared.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`
	// Local are our networks, and the networks that the peer uses for them.
	// +optional
	Local Networks `json:"local,omitzero"`
	// Remote are the peer's networks, and the networks that we use for them. While changed networks
	// wait for consent, remote has the networks that are still in use.
	// +optional
	Remote Networks `json:"remote,omitzero"`
	// Endpoint is the address and the port of the peer's gateway.
	// +kubebuilder:validation:MaxLength=263
	// +optional
	Endpoint string `json:"endpoint,omitempty"`
	// Latency is the round trip time to the peer's gateway, as in the TunnelEndpoint.
	// +kubebuilder:validation:MaxLength=32
	// +optional
	Latency string `json:"latency,omitempty"`
	// PostQuantum is the tunnel's protection against future quantum computers.
	// +optional
	PostQuantum PostQuantumStatus `json:"postQuantum,omitzero"`
	// Keys are the WireGuard keys of the present sessions.
	// +optional
	Keys KeysStatus `json:"keys,omitzero"`
}

// PostQuantumStatus describes the preshared key of the tunnel.
type PostQuantumStatus struct {
	// Key is ML-KEM-768 if all sessions with the peer use a preshared key. Otherwise it is none.
	// +kubebuilder:validation:MaxLength=32
	// +optional
	Key string `json:"key,omitempty"`
	// Why explains why there is no preshared key, or why no new key replaces the present one.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Why string `json:"why,omitempty"`
}

// KeysStatus has the first 12 characters of the WireGuard public keys of the present sessions.
type KeysStatus struct {
	// Ours is the key of this cluster's gateway in the present session, or in the last one.
	// +kubebuilder:validation:MaxLength=12
	// +optional
	Ours string `json:"ours,omitempty"`
	// OursSince is the time at which the sessions began to use the key in ours.
	// +optional
	OursSince *metav1.Time `json:"oursSince,omitempty"`
	// Theirs is the key of the peer's gateway.
	// +kubebuilder:validation:MaxLength=12
	// +optional
	Theirs string `json:"theirs,omitempty"`
	// TheirsSince is the time at which the manager wrote the key in theirs to the TunnelEndpoint.
	// +optional
	TheirsSince *metav1.Time `json:"theirsSince,omitempty"`
	// During a rotation of this cluster's key, lags is true until the peer has a session with the
	// new key.
	// +optional
	Lags bool `json:"lags,omitempty"`
}

// The values of PostQuantumStatus.Key.
const (
	KeyMLKEM = "ML-KEM-768"
	KeyNone  = "none"
)

// Networks are the two networks of one cluster. A field is empty until both sides have agreed on
// it.
type Networks struct {
	// PodCIDR is the network of the cluster's pods.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	PodCIDR string `json:"podCIDR,omitempty"`
	// PodCIDRSeen is the network that the other side uses for podCIDR; the two are equal if podCIDR
	// is not remapped.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	PodCIDRSeen string `json:"podCIDRSeen,omitempty"`
	// PodCIDRWhy explains why podCIDR is remapped, or why it is used unchanged. It is set only for
	// the peer's networks, because the peer does not publish its reasons for our networks.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	PodCIDRWhy string `json:"podCIDRWhy,omitempty"`
	// ExternalCIDR is the network whose addresses stand for endpoints of the cluster that are not
	// pods.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	ExternalCIDR string `json:"externalCIDR,omitempty"`
	// ExternalCIDRSeen is the network that the other side uses for externalCIDR; the two are equal
	// if externalCIDR is not remapped.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	ExternalCIDRSeen string `json:"externalCIDRSeen,omitempty"`
	// ExternalCIDRWhy explains why externalCIDR is remapped, or why it is used unchanged. It is set
	// only for the peer's networks.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	ExternalCIDRWhy string `json:"externalCIDRWhy,omitempty"`
}

// Peering joins this cluster with another cluster, which has a Peering for this cluster.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=peerings,scope=Cluster,categories=isthmus,shortName=peer
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.cluster.clusterName`
// +kubebuilder:printcolumn:name="Their pods here",type=string,JSONPath=`.status.remote.podCIDRSeen`
// +kubebuilder:printcolumn:name="Our pods there",type=string,JSONPath=`.status.local.podCIDRSeen`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Latency",type=string,JSONPath=`.status.latency`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Endpoint",type=string,priority=1,JSONPath=`.status.endpoint`
// +kubebuilder:printcolumn:name="Cluster ID",type=string,priority=1,JSONPath=`.spec.cluster.clusterID`
// +kubebuilder:printcolumn:name="Post-quantum",type=string,priority=1,JSONPath=`.status.postQuantum.key`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.conditions[?(@.type=="Ready")].message`
type Peering struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by users or `isthmus peer`.
	Spec PeeringSpec `json:"spec"`
	// Status is written by the manager.
	// +optional
	Status PeeringStatus `json:"status,omitzero"`
}

// PeeringList is a list of Peerings.
//
// +kubebuilder:object:root=true
type PeeringList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Peering `json:"items"`
}
