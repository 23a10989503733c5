package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocatedNetwork is a network of a peer in CIDR notation. A pattern checks it, because there may be too
// many for a CEL rule; readers refuse other text that matches it.
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
	// Revision grows with each change of the networks, over all objects. An object with a lower revision
	// than before is an older version of it. A revision is at least the time of the change in
	// milliseconds; agents ignore one that is over a day ahead.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// Networks stand for the peer's networks here: first that of its pods, then that of its mapped
	// endpoints, then the held ones. Every node refuses packets for them outside of the tunnel.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Networks []AllocatedNetwork `json:"networks,omitempty"`
	// NetworksSince is the version that first named these networks; absent: the resourceVersion of this
	// object. So nodes report nothing when only other fields change.
	// +optional
	NetworksSince *NetworksSince `json:"networksSince,omitempty"`
	// Freed are former networks of the peer, the latest last. Nodes stop refusing such a network,
	// unless another object names it, or this one names it with a higher revision.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Freed []FreedNetwork `json:"freed,omitempty"`
	// Own are the networks of our own cluster, in the object of its ID.
	// +optional
	Own *OwnNetworks `json:"own,omitempty"`

	// Session is the number of the manager that wrote this object; each manager that begins to write has a
	// higher one. A manager takes over the changes of a later session, and overwrites any other change. 0: no
	// manager has written this object.
	// +kubebuilder:validation:Minimum=1
	// +optional
	Session int64 `json:"session,omitempty"`
	// ReleasedAt is when the peer left. Its networks are held for a day from then on.
	// +optional
	ReleasedAt UTCTime `json:"releasedAt,omitempty"`
	// UnusedSince is when the last object of a peering that names the peer disappeared.
	// +optional
	UnusedSince UTCTime `json:"unusedSince,omitempty"`
	// Held are the networks that the peer no longer has.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Held []HeldNetwork `json:"held,omitempty"`
	// Previous are the networks that the peer had when it left, after the hold. If the peer comes back, it
	// gets them again while they are free.
	// +optional
	Previous *NetworkPair `json:"previous,omitempty"`
	// Seen is how the peer sees our PodCIDR and our ExternalCIDR: its answer.
	// +optional
	Seen *NetworkPair `json:"seen,omitempty"`
	// Local are our networks that seen stands for, and that contain the addresses of endpoints. They differ from own
	// while a change of our networks is being written.
	// +optional
	Local *NetworkPair `json:"local,omitempty"`
	// Endpoints are the endpoints that are mapped for the peer, sorted by address.
	// +kubebuilder:validation:MaxItems=4096
	// +listType=atomic
	// +optional
	Endpoints []MappedEndpoint `json:"endpoints,omitempty"`
}

// NetworksSince is the resourceVersion at which an object first named its networks. It counts only
// if revision and UID are the object's: an older manager changes networks without changing it, and
// a backup may contain another object's.
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
	// Revision is the revision in which it was freed.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
}

// HeldNetwork is a released network that nodes refuse for a day.
type HeldNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// ReleasedAt is when it was released.
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
	// IP is the address of the endpoint.
	// +kubebuilder:validation:MaxLength=39
	IP string `json:"ip"`
	// Address is the address that peers use for it, the same for all of them.
	// +kubebuilder:validation:MaxLength=39
	Address string `json:"address"`
	// Requesters are the callers of the IPAM that requested the mapping; none: not known.
	// +kubebuilder:validation:MaxItems=4096
	// +kubebuilder:validation:items:MaxLength=256
	// +listType=atomic
	// +optional
	Requesters []string `json:"requesters,omitempty"`
	// Target is what the endpoint was when it was mapped, such as "pod"; empty: not known.
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

// NetworkAllocation has the networks that stand for one cluster here, and everything else that the
// IPAM stores about that cluster. The manager writes it before it publishes a network to the peer.
// Route agents refuse packets for its networks outside of the tunnel, until each object that has
// named the network has freed it with a higher revision. A missing or old object frees nothing.
//
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
