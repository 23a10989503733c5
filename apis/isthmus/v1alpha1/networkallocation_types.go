package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocatedNetwork is a network of a peer in CIDR notation. A pattern checks it, because there may be too
// many for a CEL rule; readers refuse what it lets through and is no network.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:Pattern=`^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
type AllocatedNetwork = string

// NetworkAllocationSpec is what nodes refuse for one cluster. The manager writes it. It is atomic so that
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
	// Phase is Allocated as long as the peer has networks, Released while they are only held for it, and
	// Freed afterwards. The object of our own cluster has none.
	// +kubebuilder:validation:Enum=Allocated;Released;Freed
	// +optional
	Phase AllocationPhase `json:"phase,omitempty"`
	// Networks are those that stand for the peer's here: that of its pods, that of its mapped endpoints,
	// and those that are held for a day after their release. Every node refuses packets for them outside
	// of the tunnel.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Networks []AllocatedNetwork `json:"networks,omitempty"`
	// Freed are networks that were the peer's, the latest last. Nodes need not refuse one any more, unless
	// another object has named it, or this one with a higher revision.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Freed []FreedNetwork `json:"freed,omitempty"`
	// Own are the networks of our own cluster, in the object of its ID.
	// +optional
	Own *OwnNetworks `json:"own,omitempty"`
}

// AllocationPhase is where the networks of a peer are in their life.
type AllocationPhase string

// Phases of a NetworkAllocation.
const (
	AllocationAllocated AllocationPhase = "Allocated"
	AllocationReleased  AllocationPhase = "Released"
	AllocationFreed     AllocationPhase = "Freed"
)

// FreedNetwork is a network that a peer has given up.
type FreedNetwork struct {
	Network AllocatedNetwork `json:"network"`
	// Revision is the one in which it was freed.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
}

// OwnNetworks are those of our own pods, Services and mapped endpoints.
type OwnNetworks struct {
	// +optional
	PodCIDR AllocatedNetwork `json:"podCIDR,omitempty"`
	// +optional
	ServiceCIDR AllocatedNetwork `json:"serviceCIDR,omitempty"`
	// +optional
	ExternalCIDR AllocatedNetwork `json:"externalCIDR,omitempty"`
}

// NetworkAllocation says which networks stand for one cluster here. The manager writes it before it tells
// the peer of a network, and route agents refuse what it names. A network goes when each object that has
// named it has freed it with a higher revision. An object that is missing or old takes nothing back.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=networkallocations,singular=networkallocation,scope=Cluster,categories=isthmus
// +kubebuilder:printcolumn:name="Cluster",type=string,JSONPath=`.spec.clusterID`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.spec.phase`
// +kubebuilder:printcolumn:name="Networks",type=string,JSONPath=`.spec.networks`
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
