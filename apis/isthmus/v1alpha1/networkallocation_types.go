package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocatedNetwork is a network of a peer in CIDR notation. A pattern checks it, because there may be too
// many for a CEL rule; readers refuse what it lets through and is no network.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:Pattern=`^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
type AllocatedNetwork = string

// NetworkAllocationSpec is all that is kept of one cluster. The manager writes it. Nodes read networks,
// networksSince, freed and own; the manager reads the rest when it starts. It is atomic so that
// managedFields, which thousands of nodes read, do not list its fields.
// +structType=atomic
type NetworkAllocationSpec struct {
	// ClusterID is the cluster. It is the object's name too where a name can be it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// Revision grows with each change of the networks, over all objects. An object with a lower revision
	// than one that was read before is an older one. It is at least the time of the change in
	// milliseconds; one more than a day ahead counts as none.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// Networks are those that stand for the peer's here: first that of its pods, then that of its mapped
	// endpoints, then those of held. Every node refuses packets for them outside of the tunnel.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Networks []AllocatedNetwork `json:"networks,omitempty"`
	// NetworksSince is since when this object names these networks; absent: since its resourceVersion. So
	// nodes report nothing when only the rest of the object changes.
	// +optional
	NetworksSince *NetworksSince `json:"networksSince,omitempty"`
	// Freed are networks that were the peer's, the latest last. Nodes need not refuse one any more, unless
	// another object has named it, or this one with a higher revision.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Freed []FreedNetwork `json:"freed,omitempty"`
	// Own are the networks of our own cluster, in the object of its ID.
	// +optional
	Own *OwnNetworks `json:"own,omitempty"`

	// Session is that of the manager that wrote this. It grows with each manager that begins to write. A
	// manager takes over what a later session has written, and overwrites any other change. 0: no manager
	// has written this.
	// +kubebuilder:validation:Minimum=1
	// +optional
	Session int64 `json:"session,omitempty"`
	// ReleasedAt is when the peer left. Its networks are held for a day from then on.
	// +optional
	ReleasedAt UTCTime `json:"releasedAt,omitempty"`
	// UnusedSince is since when no object of a peering names the peer.
	// +optional
	UnusedSince UTCTime `json:"unusedSince,omitempty"`
	// Held are those of networks that the peer has no more.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Held []HeldNetwork `json:"held,omitempty"`
	// Previous are the networks that the peer had when it left, after the hold. It has them again when it
	// comes back and they are free.
	// +optional
	Previous *NetworkPair `json:"previous,omitempty"`
	// Seen is how the peer sees our PodCIDR and our ExternalCIDR: its answer.
	// +optional
	Seen *NetworkPair `json:"seen,omitempty"`
	// Local are our networks for which seen stands, and in which the addresses of endpoints are. They differ from
	// own while a change of ours is being written.
	// +optional
	Local *NetworkPair `json:"local,omitempty"`
	// Endpoints are those that are mapped for the peer, by address.
	// +kubebuilder:validation:MaxItems=4096
	// +listType=atomic
	// +optional
	Endpoints []MappedEndpoint `json:"endpoints,omitempty"`
}

// NetworksSince is the resourceVersion with which an object first named its networks. It counts only with
// the revision and the UID that the object has, since an older manager changes networks and leaves it, and
// a backup has that of another object.
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

// FreedNetwork is a network that a peer has given up.
type FreedNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// Revision is the one in which it was freed.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
}

// HeldNetwork is a network that a peer has given up, and that nodes refuse for a day.
type HeldNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// ReleasedAt is when the peer gave it up.
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
	// IP is the endpoint.
	// +kubebuilder:validation:MaxLength=39
	IP string `json:"ip"`
	// Address stands for it, and is the same for all peers.
	// +kubebuilder:validation:MaxLength=39
	Address string `json:"address"`
	// Requesters are the callers of the IPAM that asked for it; none: not known.
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

// OwnNetworks are those of our own pods, Services and mapped endpoints, and what peers get networks from.
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

// NetworkAllocation says which networks stand for one cluster here, and is all that the manager keeps of it.
// The manager writes it before it tells the peer of a network, and route agents refuse what it names. A
// network goes when each object that has named it has freed it with a higher revision. An object that is
// missing or old takes nothing back.
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
