package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// AllocatedNetwork is a network in CIDR notation. A pattern checks it, because there may
// be too many networks for a CEL rule. Readers parse it and refuse invalid networks that match the
// pattern.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:Pattern=`^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
type AllocatedNetwork = string

// NetworkAllocationSpec is the IPAM state of one cluster. The manager writes it. Nodes read
// networks, networksSince, freed and own; the manager reads the other fields when it starts. The
// spec is atomic. Otherwise managedFields would list each field of the spec, and thousands of nodes
// read the object.
// +structType=atomic
type NetworkAllocationSpec struct {
	// ClusterID is the ID of the cluster. It is also the object's name, if it is a valid name.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	ClusterID string `json:"clusterID"`
	// Revision is a number that grows with each change of networks in any NetworkAllocation. A
	// revision is at least the time of the change in milliseconds since 1970. Route agents ignore a
	// revision that is more than a day in the future. If the revision of an object decreases, the
	// object was restored from an older version.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// Networks are the networks that our cluster uses for the peer, in this order: the network for
	// the peer's pods, the network for the peer's mapped endpoints, and the networks in held. Every
	// node refuses packets for them outside of the tunnel.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Networks []AllocatedNetwork `json:"networks,omitempty"`
	// NetworksSince has the resourceVersion at which this object first named its present networks.
	// If it is absent, the resourceVersion of the object itself counts. Because of this field,
	// nodes need not report again after a change of other fields.
	// +optional
	NetworksSince *NetworksSince `json:"networksSince,omitempty"`
	// Freed are former networks of the peer, the latest last. Nodes stop refusing packets for a
	// freed network, unless another object has the network in networks, or this object has it there
	// again with a higher revision.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Freed []FreedNetwork `json:"freed,omitempty"`
	// Own are the networks of our own cluster. Only the object with our own cluster ID has them.
	// +optional
	Own *OwnNetworks `json:"own,omitempty"`

	// Session is the number of the manager that wrote this object, or 0 if none has written it.
	// Each manager that begins to write takes a higher number. If another writer changes the object
	// and sets a higher session, the manager adopts the change. It overwrites any other change,
	// with two exceptions. If entries were added to freed, it keeps them. If a network was moved
	// from networks to freed with a higher revision, it ends the hold of that network.
	// +kubebuilder:validation:Minimum=1
	// +optional
	Session int64 `json:"session,omitempty"`
	// ReleasedAt is the time at which the peer left. From then on its networks are held for a day.
	// +optional
	ReleasedAt UTCTime `json:"releasedAt,omitempty"`
	// UnusedSince is the time since which no object in this cluster names the peer. It is absent
	// while an object names the peer.
	// +optional
	UnusedSince UTCTime `json:"unusedSince,omitempty"`
	// Held are the released networks of the peer for which nodes still refuse packets.
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	// +optional
	Held []HeldNetwork `json:"held,omitempty"`
	// Previous are the networks that the peer had when it left. They are recorded when the hold
	// ends. A peer that returns gets them again if they are still free.
	// +optional
	Previous *NetworkPair `json:"previous,omitempty"`
	// Seen are the networks that the peer uses for our PodCIDR and our ExternalCIDR, from its
	// answer.
	// +optional
	Seen *NetworkPair `json:"seen,omitempty"`
	// Local are our PodCIDR and ExternalCIDR at the time of the answer: the networks in seen
	// represent them. The addresses in endpoints are in the ExternalCIDR of local. Local differs
	// from own only while a change of our networks is being written.
	// +optional
	Local *NetworkPair `json:"local,omitempty"`
	// Endpoints are the endpoints that are mapped for the peer, sorted by address.
	// +kubebuilder:validation:MaxItems=4096
	// +listType=atomic
	// +optional
	Endpoints []MappedEndpoint `json:"endpoints,omitempty"`
}

// NetworksSince is the resourceVersion at which an object first named its networks. It is valid
// only if revision and uid match the object. They may not match, because an older version of the
// manager changes networks and leaves networksSince as it was, and because a backup may contain the
// values of another object.
type NetworksSince struct {
	// ResourceVersion is the resourceVersion of the object when it first named its present networks.
	// +kubebuilder:validation:Minimum=1
	ResourceVersion int64 `json:"resourceVersion"`
	// Revision must equal spec.revision of the object.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
	// UID must equal metadata.uid of the object.
	// +kubebuilder:validation:MaxLength=128
	UID string `json:"uid"`
}

// FreedNetwork is a former network of a peer. Nodes no longer have to refuse packets for it.
type FreedNetwork struct {
	// Network is the freed network.
	Network AllocatedNetwork `json:"network"`
	// Revision is the revision in which the network was freed.
	// +kubebuilder:validation:Minimum=1
	Revision int64 `json:"revision"`
}

// HeldNetwork is a released network. Nodes refuse packets for it for a day.
type HeldNetwork struct {
	// Network is the released network.
	Network AllocatedNetwork `json:"network"`
	// ReleasedAt is the time at which the network was released.
	ReleasedAt UTCTime `json:"releasedAt"`
}

// NetworkPair is a network for pods and a network for mapped endpoints. Either may be absent.
type NetworkPair struct {
	// PodCIDR is the network for pods.
	// +optional
	PodCIDR AllocatedNetwork `json:"podCIDR,omitempty"`
	// ExternalCIDR is the network for mapped endpoints.
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
	// Requesters are the names of the IPAM clients that requested the mapping. The list is empty if
	// the clients are not known.
	// +kubebuilder:validation:MaxItems=4096
	// +kubebuilder:validation:items:MaxLength=256
	// +listType=atomic
	// +optional
	Requesters []string `json:"requesters,omitempty"`
	// Target is the kind of object that had the endpoint's address when the mapping was made: pod,
	// service, node or "peer CLUSTERID". It is empty if no such object was found.
	// +kubebuilder:validation:MaxLength=256
	// +optional
	Target string `json:"target,omitempty"`
}

// OwnNetworks are the networks of our own pods, Services and mapped endpoints, and the pools for
// peers.
type OwnNetworks struct {
	// PodCIDR is the network of our pods.
	// +optional
	PodCIDR AllocatedNetwork `json:"podCIDR,omitempty"`
	// ServiceCIDR is the network of our Services.
	// +optional
	ServiceCIDR AllocatedNetwork `json:"serviceCIDR,omitempty"`
	// ExternalCIDR is the network whose addresses stand for our mapped endpoints.
	// +optional
	ExternalCIDR AllocatedNetwork `json:"externalCIDR,omitempty"`
	// Pools are the networks from which the manager allocates networks for peers, in this order.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=atomic
	// +optional
	Pools []AllocatedNetwork `json:"pools,omitempty"`
	// Reserved are networks that the manager allocates to no peer.
	// +kubebuilder:validation:MaxItems=1024
	// +listType=atomic
	// +optional
	Reserved []AllocatedNetwork `json:"reserved,omitempty"`
}

// NetworkAllocation has the networks that our cluster uses for one other cluster, and everything
// else that the IPAM stores about that cluster. The manager writes it before it publishes a network
// to the peer. Route agents refuse packets for these networks outside of the tunnel. They stop
// refusing packets for a network when each object that named the network has it in freed with a
// higher revision. If an object is deleted or an older version is restored, no network is freed.
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
