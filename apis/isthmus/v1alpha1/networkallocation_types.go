package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocatedNetwork is a network of a peer in CIDR notation. A pattern checks it, because there may
// be too many networks for a CEL rule. Readers parse it and refuse invalid networks that match the
// pattern.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:Pattern=`^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
type AllocatedNetwork = string

// NetworkAllocationSpec is the IPAM state of one cluster. The manager writes it. Nodes read networks,
// networksSince, freed and own; the manager reads the rest when it starts. It is atomic so that
// managedFields, which thousands of nodes read, do not list its fields.
// +structType=atomic
type NetworkAllocationSpec struct {
	// ClusterID is the ID of the cluster. It is also the object's name, if it is a valid name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// Revision grows with each change of the networks, over all objects. An object with a lower
	// revision than before is an older version of itself. A revision is at least the time of the
	// change in milliseconds since 1970; agents ignore a revision that is over a day ahead.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// Networks are the networks that our cluster uses for the peer: first that for its pods, then
	// that for its mapped endpoints, then the held ones. Every node refuses packets for them
	// outside of the tunnel.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Networks []AllocatedNetwork `json:"networks,omitempty"`
	// NetworksSince is the version that first named these networks; absent: the resourceVersion of
	// this object. With it, nodes need not report again when only other fields change.
	// +optional
	NetworksSince *NetworksSince `json:"networksSince,omitempty"`
	// Freed are former networks of the peer, the latest last. Nodes stop refusing a freed network,
	// unless another object names it, or this object names it with a higher revision.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Freed []FreedNetwork `json:"freed,omitempty"`
	// Own are the networks of our own cluster. Only the object with our own cluster ID has them.
	// +optional
	Own *OwnNetworks `json:"own,omitempty"`

	// Session is the number of the manager that wrote this object. Each manager that begins to
	// write takes a higher number. A manager adopts changes of a later session. It overwrites other
	// foreign changes, except those of freed: it keeps added entries, and ends the hold of a network
	// that somebody moved from networks to freed with a higher revision. 0: no manager has written
	// this object.
	// +kubebuilder:validation:Minimum=1
	// +optional
	Session int64 `json:"session,omitempty"`
	// ReleasedAt is when the peer left. Its networks are held for a day from then on.
	// +optional
	ReleasedAt UTCTime `json:"releasedAt,omitempty"`
	// UnusedSince is when the last object of a peering that names the peer disappeared.
	// +optional
	UnusedSince UTCTime `json:"unusedSince,omitempty"`
	// Held are the released networks of the peer that nodes still refuse.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Held []HeldNetwork `json:"held,omitempty"`
	// Previous are the networks that the peer had when it left. They are recorded when the hold
	// ends. If the peer returns, it gets them again while they are free.
	// +optional
	Previous *NetworkPair `json:"previous,omitempty"`
	// Seen are the networks that the peer uses for our PodCIDR and our ExternalCIDR, from its
	// answer.
	// +optional
	Seen *NetworkPair `json:"seen,omitempty"`
	// Local are our networks to which seen corresponds, and which contain the addresses of
	// endpoints. They differ from own while a change of our networks is being written.
	// +optional
	Local *NetworkPair `json:"local,omitempty"`
	// Endpoints are the endpoints that are mapped for the peer, sorted by address.
	// +kubebuilder:validation:MaxItems=4096
	// +listType=atomic
	// +optional
	Endpoints []MappedEndpoint `json:"endpoints,omitempty"`
}

// NetworksSince is the resourceVersion at which an object first named its networks. It is valid
// only with the object's own revision and UID: an older manager changes networks without updating
// it, and a backup may contain the values of another object.
type NetworksSince struct {
	// +kubebuilder:validation:Minimum=1
	ResourceVersion int64 `json:"resourceVersion"`
	// Revision is spec.revision.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// UID is metadata.uid.
	// +kubebuilder:validation:MaxLength=128
	UID string `json:"uid"`
}

// FreedNetwork is a former network of a peer that nodes need not refuse.
type FreedNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// Revision is the revision in which the network was freed.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
}

// HeldNetwork is a released network that nodes refuse for a day.
type HeldNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// ReleasedAt is when the network was released.
	ReleasedAt UTCTime `json:"releasedAt"`
}

// NetworkPair is a network for pods and one for mapped endpoints. Either may be absent.
type NetworkPair struct {
	// +optional
	PodCIDR AllocatedNetwork `json:"podCIDR,omitempty"`
	// +optional
	ExternalCIDR AllocatedNetwork `json:"externalCIDR,omitempty"`
}

// MappedEndpoint is an endpoint of ours that a peer reaches by an address of our ExternalCIDR.
type MappedEndpoint struct {
	// IP is the address of the endpoint in our cluster.
	// +kubebuilder:validation:MaxLength=39
	IP string `json:"ip"`
	// Address is the address in our ExternalCIDR that peers use for the endpoint, the same for all
	// peers.
	// +kubebuilder:validation:MaxLength=39
	Address string `json:"address"`
	// Requesters are the clients of the IPAM that requested the mapping; none: not known.
	// +kubebuilder:validation:MaxItems=4096
	// +kubebuilder:validation:items:MaxLength=256
	// +listType=atomic
	// +optional
	Requesters []string `json:"requesters,omitempty"`
	// Target is the kind of the endpoint at the time of the mapping, such as "pod"; empty: not
	// known.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	Target string `json:"target,omitempty"`
}

// OwnNetworks are the networks of our own pods, Services and mapped endpoints, and the pools for
// peers.
type OwnNetworks struct {
	// +optional
	PodCIDR AllocatedNetwork `json:"podCIDR,omitempty"`
	// +optional
	ServiceCIDR AllocatedNetwork `json:"serviceCIDR,omitempty"`
	// +optional
	ExternalCIDR AllocatedNetwork `json:"externalCIDR,omitempty"`
	// Pools are the networks to allocate from, in this order.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=atomic
	// +optional
	Pools []AllocatedNetwork `json:"pools,omitempty"`
	// Reserved are networks that no peer gets.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=atomic
	// +optional
	Reserved []AllocatedNetwork `json:"reserved,omitempty"`
}

// NetworkAllocation has the networks that our cluster uses for one other cluster, and everything
// else that the IPAM stores about that cluster. The manager writes it before it publishes a network
// to the peer. Route agents refuse packets for its networks outside of the tunnel, until each
// object that has named the network has freed it with a higher revision. A missing or old object
// frees nothing.
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=networkallocations,singular=networkallocation,scope=Cluster,categories=isthmus
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Networks",type=string,JSONPath=`.spec.networks`
// +kubebuilder:printcolumn:name="Released",type=date,JSONPath=`.spec.releasedAt`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NetworkAllocation struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the manager.
	Spec NetworkAllocationSpec `json:"spec"`
}

// NetworkAllocationList is a list of NetworkAllocations.
//
// +kubebuilder:object:root=true
type NetworkAllocationList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NetworkAllocation `json:"items"`
}
