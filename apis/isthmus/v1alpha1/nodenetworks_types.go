package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NodeNetwork is a network that a node reaches, of any length.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network in canonical CIDR notation",reason=FieldValueInvalid
type NodeNetwork = string

// NodeNetworksSpec is what a node reaches without Isthmus, and what it refuses. The route agent of
// the node writes it.
type NodeNetworksSpec struct {
	// Networks are the addresses of the node, the networks on its links and the destinations of its
	// routes, IPv4 and IPv6, without default routes and without what belongs to the cluster's own
	// pods and Services. Where there are too many of a family, wider networks stand for them.
	// +kubebuilder:validation:MaxItems=512
	// +listType=atomic
	// +optional
	Networks []NodeNetwork `json:"networks,omitempty"`
	// Resolvers are the DNS servers that the node asks.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Resolvers []net.IPAddress `json:"resolvers,omitempty"`
	// RefusedResourceVersion is the highest resourceVersion with which a NetworkAllocation that the node has read
	// named its networks first. The node refuses what was named up to that one. The manager tells nobody of a
	// network before all nodes that report one have reached that of the network. So resource versions of one kind have to be
	// numbers that rise. Kubernetes promises that since 1.35; with etcd they always were.
	// +kubebuilder:validation:Minimum=1
	// +optional
	RefusedResourceVersion int64 `json:"refusedResourceVersion,omitempty"`
	// BrokenOverlay is there while packets of the node do not reach the gateway through the overlay,
	// or do not come back, though others do by the underlay.
	// +optional
	BrokenOverlay *BrokenOverlay `json:"brokenOverlay,omitempty"`
	// OverlaySources are addresses of the node among those of pods, such as a CNI's devices have. Its
	// packets to a gateway that is a Pod may come from them.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	OverlaySources []net.IPAddress `json:"overlaySources,omitempty"`
	// Routes are the node's routes by another host. Where that is a node of the cluster, a gateway on this node
	// sends there through the overlay what is for a mapped endpoint: the answers take the same way, as strict
	// reverse path filters demand.
	// +kubebuilder:validation:MaxItems=128
	// +listType=atomic
	// +optional
	Routes []NodeRoute `json:"routes,omitempty"`
	// Problems are what keeps pods of this node from reaching peers, from being reached, or from
	// being known by their addresses, as far as the agent sees it.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Problems []NodeProblem `json:"problems,omitempty"`
}

// BrokenOverlay is a way that carries nothing.
type BrokenOverlay struct {
	// Gateway is the address of the gateway at the other end.
	Gateway net.IPAddress `json:"gateway"`
	// Since is when the first of the probes was sent that say so.
	Since UTCTime `json:"since"`
	// Back is true where packets of the node reach the gateway, and those from there do not arrive.
	// +optional
	Back bool `json:"back,omitempty"`
}

// NodeRoute is a route of a node's main table, of IPv4.
type NodeRoute struct {
	Network NodeNetwork `json:"network"`
	// Via is the next hop.
	Via net.IPAddress `json:"via"`
}

// NodeProblem is something that does not work on a node, or less well than elsewhere.
type NodeProblem struct {
	// Reason is PodsMasqueraded, ForwardingRefused, ForwardingUncertain, GatewayOutOfReach, GatewayUnguarded, SnapshotNotKept,
	// NodeDoesNotVote or, of something that an object says, Refused.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Reason string `json:"reason"`
	// Message says what it costs, why, and what to do.
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message"`
}

// NodeNetworks says what one node of the cluster reaches without Isthmus; its name is that of the
// Node. No peer gets a network that overlaps one of these. A report takes from peers and gives nothing to
// anybody; its routes are those of packets that its own node gets from the gateway anyway.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=nodenetworks,singular=nodenetworks,scope=Namespaced,categories=isthmus
// +kubebuilder:printcolumn:name="Networks",type=string,JSONPath=`.spec.networks`
// +kubebuilder:printcolumn:name="Resolvers",type=string,JSONPath=`.spec.resolvers`
// +kubebuilder:printcolumn:name="Problems",type=string,JSONPath=`.spec.problems[*].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeNetworks struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is what the node reaches.
	Spec NodeNetworksSpec `json:"spec"`
}

// NodeNetworksList is a list of NodeNetworks.
//
// +kubebuilder:object:root=true
type NodeNetworksList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NodeNetworks `json:"items"`
}
