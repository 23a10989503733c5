package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NodeNetwork is a network of any prefix length that a node reaches.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network in canonical CIDR notation",reason=FieldValueInvalid
type NodeNetwork = string

// NodeNetworksSpec lists the networks that a node reaches without Isthmus, and states up to which
// version the node refuses networks of peers. The node's route agent writes it.
type NodeNetworksSpec struct {
	// Networks are the addresses of the node, the networks on its links and the destinations of its
	// routes, IPv4 and IPv6, without default routes and without the networks of the cluster's own
	// pods and Services. If a family has too many, they are merged into wider networks.
	// +kubebuilder:validation:MaxItems=512
	// +listType=atomic
	// +optional
	Networks []NodeNetwork `json:"networks,omitempty"`
	// Resolvers are the DNS servers that the node uses.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Resolvers []net.IPAddress `json:"resolvers,omitempty"`
	// RefusedResourceVersion is the highest resourceVersion at which a NetworkAllocation that the
	// node has read first named its networks. The node refuses all networks that were named up to
	// this version. The manager publishes a network once every node that reports a version has
	// reached the version that named the network. This requires increasing resourceVersions within
	// one kind. Kubernetes guarantees these since 1.35, and etcd always did.
	// +kubebuilder:validation:Minimum=1
	// +optional
	RefusedResourceVersion int64 `json:"refusedResourceVersion,omitempty"`
	// BrokenOverlay is set while probes of the gateway through the overlay fail, in either direction,
	// although probes through the underlay succeed.
	// +optional
	BrokenOverlay *BrokenOverlay `json:"brokenOverlay,omitempty"`
	// OverlaySources are addresses of the node that lie in pod networks, such as those of a CNI's devices.
	// The node's packets to a gateway that is a Pod may have them as their source.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	OverlaySources []net.IPAddress `json:"overlaySources,omitempty"`
	// Routes are the node's routes with another host as next hop. If that host is a node of the
	// cluster, a gateway on this node sends packets for a mapped endpoint through the overlay to
	// that host. Answers then take the same path, as strict reverse path filters demand.
	// +kubebuilder:validation:MaxItems=128
	// +listType=atomic
	// +optional
	Routes []NodeRoute `json:"routes,omitempty"`
	// Problems are the known faults of the node. Because of a fault, pods of this node and peers do
	// not reach each other, or peers see another address than the pod's.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Problems []NodeProblem `json:"problems,omitempty"`
}

// BrokenOverlay is a path through the overlay that carries no packets.
type BrokenOverlay struct {
	// Gateway is the address of the gateway at the other end.
	Gateway net.IPAddress `json:"gateway"`
	// Since is when the first of the failed probes was sent.
	Since UTCTime `json:"since"`
	// Back is true if packets of the node reach the gateway, but packets of the gateway do not
	// reach the node.
	// +optional
	Back bool `json:"back,omitempty"`
}

// NodeRoute is an IPv4 route of a node's main table.
type NodeRoute struct {
	Network NodeNetwork `json:"network"`
	// Via is the next hop.
	Via net.IPAddress `json:"via"`
}

// NodeProblem is a fault or a limit of a node.
type NodeProblem struct {
	// Reason is PodsMasqueraded, ForwardingRefused, ForwardingUncertain, GatewayOutOfReach, GatewayUnguarded, SnapshotNotKept,
	// NodeDoesNotVote, or Refused for a value of an object.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Reason string `json:"reason"`
	// Message describes the effect, the cause and the remedy.
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message"`
}

// NodeNetworks lists the networks that one node of the cluster reaches without Isthmus; it has the
// name of the Node. No peer gets a network that overlaps one of them. A report can only shrink what
// peers may use: its routes affect only packets that the gateway would deliver to that node anyway.
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=nodenetworks,singular=nodenetworks,scope=Namespaced,categories=isthmus
// +kubebuilder:printcolumn:name="Networks",type=string,JSONPath=`.spec.networks`
// +kubebuilder:printcolumn:name="Resolvers",type=string,JSONPath=`.spec.resolvers`
// +kubebuilder:printcolumn:name="Problems",type=string,JSONPath=`.spec.problems[*].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type NodeNetworks struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the route agent of the node.
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
