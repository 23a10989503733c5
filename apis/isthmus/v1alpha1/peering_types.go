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

// PeeringSpec names the cluster to join and how to reach its API server. A person or `isthmus peer`
// writes it.
type PeeringSpec struct {
	// Cluster is the peer. It is set once: another cluster is another Peering.
	// +kubebuilder:validation:XValidation:rule="self.clusterID == oldSelf.clusterID && self.clusterName == oldSelf.clusterName",message="cluster is immutable",reason=FieldValueInvalid
	Cluster net.ClusterIdentity `json:"cluster"`
	// TenantNamespace is where the objects of this peering live on each side.
	TenantNamespace TenantNamespace `json:"tenantNamespace"`
	// IdentitySecretName is the Secret in the local tenant namespace with our identity at the peer:
	// a kubeconfig under the key kubeconfig, or Liqo's certificate (private-key, certificate,
	// apiServerUrl, apiServerCa).
	// +kubebuilder:default=isthmus-identity
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	// +optional
	IdentitySecretName string `json:"identitySecretName,omitempty"`
	// Overrides replace what the manager would choose by itself.
	// +optional
	Overrides Overrides `json:"overrides,omitzero"`
	// Claims say which of the networks that the peer claims it may have here.
	// +optional
	Claims Claims `json:"claims,omitzero"`
	// Services say which services the clusters share. A manager without --services ignores them.
	// +optional
	Services Services `json:"services,omitzero"`
	// PostQuantum says what to do without a preshared key from ML-KEM-768. Such a key protects
	// today's traffic against future quantum computers. Two clusters with Isthmus agree on one by
	// themselves.
	// +kubebuilder:default=Preferred
	// +optional
	PostQuantum PostQuantum `json:"postQuantum,omitempty"`
	// InBand lets the managers of the two clusters reach each other's API servers through the
	// tunnel. Our manager uses the tunnel, and our gateway passes connections of the peer's gateway
	// to our API server. Both Peerings need it. `isthmus peer --in-band` writes it.
	// +optional
	InBand bool `json:"inBand,omitempty"`
}

// PostQuantum is Preferred, to use a preshared key if the peer supports it, or Required, to keep
// the tunnel down without one.
// +kubebuilder:validation:Enum=Preferred;Required
type PostQuantum string

// The values of PostQuantum.
const (
	PostQuantumPreferred PostQuantum = "Preferred"
	PostQuantumRequired  PostQuantum = "Required"
)

// Services name namespaces whose services are shared with a peer. Both clusters have to agree: one
// exports what the other one imports. Without names nothing is shared. `isthmus peer --services`
// writes them.
type Services struct {
	// Export are the namespaces whose exported services the peer gets; * stands for all.
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	// +optional
	Export []ServiceNamespace `json:"export,omitempty"`
	// Import are the namespaces into which the peer's services are imported; * stands for all.
	// +kubebuilder:validation:MaxItems=256
	// +listType=set
	// +optional
	Import []ServiceNamespace `json:"import,omitempty"`
}

// ServiceNamespace is the name of a namespace, or * for all.
// +kubebuilder:validation:MinLength=1
// +kubebuilder:validation:MaxLength=63
// +kubebuilder:validation:Pattern=`^([a-z0-9]([a-z0-9-]*[a-z0-9])?|\*)$`
type ServiceNamespace = string

// Claims restrict the networks that a peer gets here for those that it advertises. Without them a
// network in private space (RFC 1918, 6598 and 4193) that overlaps nothing of this cluster is used
// unchanged, and any other one is remapped into the pools.
type Claims struct {
	// Allowed are networks outside of private space that the peer may have unchanged, with all
	// that is inside them.
	// +kubebuilder:validation:MaxItems=16
	// +listType=set
	// +optional
	Allowed []net.CIDR `json:"allowed,omitempty"`
	// AlwaysRemap demands that neither network of the peer is used here unchanged.
	// +optional
	AlwaysRemap bool `json:"alwaysRemap,omitempty"`
	// Consent is the claim to which an administrator has agreed. It is needed if a changed claim
	// would give the peer addresses here that it has not had. Until then the present networks stay
	// in force. `isthmus peer NAME --consent` writes it.
	// +optional
	Consent *Consent `json:"consent,omitempty"`
}

// Consent names a claim as the peer's NetworkConfig has it.
type Consent struct {
	// PodCIDR is spec.podCIDR of the NetworkConfig.
	PodCIDR net.CIDR `json:"podCIDR"`
	// ExternalCIDR is spec.externalCIDR of the NetworkConfig.
	ExternalCIDR net.CIDR `json:"externalCIDR"`
}

// TenantNamespace names the namespaces of a peering.
type TenantNamespace struct {
	// Local is the namespace here, of which the peer may use the NetworkConfigs and nothing else.
	// It is set once.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="tenantNamespace.local is immutable",reason=FieldValueInvalid
	Local Namespace `json:"local"`
	// Remote is the namespace at the peer. It is set once: our NetworkConfig in the previous one
	// would stay there.
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="tenantNamespace.remote is immutable",reason=FieldValueInvalid
	Remote Namespace `json:"remote"`
}

// Overrides replace values that the manager cannot detect in some networks. Each is optional.
type Overrides struct {
	// Address is where this peer reaches our gateway, instead of what the gateway's Service says.
	// +optional
	Address *net.EndpointHost `json:"address,omitempty"`
	// Port is the UDP port there.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Port int32 `json:"port,omitempty"`
	// PodCIDR is the network to use here for the peer's pods, of the length of its PodCIDR, instead
	// of one that the IPAM picks.
	// +optional
	PodCIDR *net.CIDR `json:"podCIDR,omitempty"`
	// ExternalCIDR is the same for the peer's ExternalCIDR.
	// +optional
	ExternalCIDR *net.CIDR `json:"externalCIDR,omitempty"`
}

// PeeringStatus is the state of a peering. The manager writes it.
type PeeringStatus struct {
	// ObservedGeneration is the metadata.generation that the rest is about.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// Conditions are Ready, IdentityReady, Published, Answered, PeerConfigAccepted,
	// TunnelEndpointReady and Connected.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`
	// Local are our networks, and as the peer sees them.
	// +optional
	Local Networks `json:"local,omitzero"`
	// Remote are the peer's networks, and as we see them. While a changed claim waits for consent they
	// are those in force.
	// +optional
	Remote Networks `json:"remote,omitzero"`
	// Endpoint is where the peer's gateway is reached, address and port.
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

// PostQuantumStatus names the preshared key of the tunnel.
type PostQuantumStatus struct {
	// Key is ML-KEM-768 when all sessions with the peer were made with a preshared key, else none.
	// +kubebuilder:validation:MaxLength=32
	// +optional
	Key string `json:"key,omitempty"`
	// Why says why there is none, or why no next one can be made.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Why string `json:"why,omitempty"`
}

// KeysStatus names the WireGuard public keys of the present sessions by their first 12 characters.
type KeysStatus struct {
	// Ours is the key of this cluster's gateway in the present session, or in the last one.
	// +kubebuilder:validation:MaxLength=12
	// +optional
	Ours string `json:"ours,omitempty"`
	// OursSince is when the sessions began to use it.
	// +optional
	OursSince *metav1.Time `json:"oursSince,omitempty"`
	// Theirs is the key of the peer's gateway.
	// +kubebuilder:validation:MaxLength=12
	// +optional
	Theirs string `json:"theirs,omitempty"`
	// TheirsSince is when it became known.
	// +optional
	TheirsSince *metav1.Time `json:"theirsSince,omitempty"`
	// Lags says that the key of this cluster rotates, and that the peer has no session with the next one yet.
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
	// PodCIDR is the network of its pods.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	PodCIDR string `json:"podCIDR,omitempty"`
	// PodCIDRSeen is the network that the other side uses for it; equal to podCIDR when it is not
	// remapped.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	PodCIDRSeen string `json:"podCIDRSeen,omitempty"`
	// PodCIDRWhy says why podCIDRSeen equals podCIDR, or why it differs. Only the peer's networks
	// have it, because we do not know the peer's reasons for ours.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	PodCIDRWhy string `json:"podCIDRWhy,omitempty"`
	// ExternalCIDR is the network for its endpoints that are no pods.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	ExternalCIDR string `json:"externalCIDR,omitempty"`
	// ExternalCIDRSeen is the network that the other side uses for that.
	// +kubebuilder:validation:MaxLength=43
	// +optional
	ExternalCIDRSeen string `json:"externalCIDRSeen,omitempty"`
	// ExternalCIDRWhy is to externalCIDRSeen what podCIDRWhy is to podCIDRSeen.
	// +kubebuilder:validation:MaxLength=512
	// +optional
	ExternalCIDRWhy string `json:"externalCIDRWhy,omitempty"`
}

// Peering joins this cluster with another one, which has a Peering for this one.
//
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

	// Spec is what people, or `isthmus peer`, want.
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
