package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// NodeNetwork is a network of any prefix length that a node reaches.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:XValidation:rule="isCIDR(self) && string(cidr(self).masked()) == self",message="must be a network in canonical CIDR notation",reason=FieldValueInvalid
type NodeNetwork = string

// NodeNetworksSpec lists the networks that a node reaches without Isthmus. It also reports for
// which networks of peers the node refuses packets outside of the tunnel. The node's route agent
// writes it.
type NodeNetworksSpec struct {
	// Networks are the addresses of the node, the networks on its links and the destinations of its
	// routes, IPv4 and IPv6. Default routes and the networks of the cluster's own pods and Services
	// are left out. If there are too many networks of one family, they are merged into wider
	// networks.
	// +kubebuilder:validation:MaxItems=512
	// +listType=atomic
	// +optional
	Networks []NodeNetwork `json:"networks,omitempty"`
	// Resolvers are the DNS servers that the node uses.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Resolvers []net.IPAddress `json:"resolvers,omitempty"`
	// RefusedResourceVersion reports for which networks of peers the node refuses packets: for all
	// networks that a NetworkAllocation named at this resourceVersion or an earlier one. Before the
	// manager publishes a new network to the peer, every node must report the version of the
	// network's NetworkAllocation, or a later one. The manager does not wait for nodes that report
	// no version. The comparison relies on resourceVersions that increase within one kind;
	// Kubernetes guarantees this since 1.35, and etcd always did.
	// +kubebuilder:validation:Minimum=1
	// +optional
	RefusedResourceVersion int64 `json:"refusedResourceVersion,omitempty"`
	// BrokenOverlay is set while probes through the overlay fail between this node and the gateway,
	// in one direction or both, although probes through the underlay succeed.
	// +optional
	BrokenOverlay *BrokenOverlay `json:"brokenOverlay,omitempty"`
	// OverlaySources are addresses of the node in pod networks, such as the addresses of a CNI's
	// devices. The node may use them as source addresses of packets to a gateway that is a Pod.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	OverlaySources []net.IPAddress `json:"overlaySources,omitempty"`
	// Routes are the node's routes whose next hop is another host. If that host is a node of the
	// cluster, a gateway on this node sends packets for mapped endpoints behind the route through
	// the overlay to that host. Requests and answers then take the same path. Strict reverse path
	// filters demand this.
	// +kubebuilder:validation:MaxItems=128
	// +listType=atomic
	// +optional
	Routes []NodeRoute `json:"routes,omitempty"`
	// Problems are the known faults of the node. Because of such a fault, pods of this node and
	// peers may not reach each other, or peers may see an address other than that of the pod.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Problems []NodeProblem `json:"problems,omitempty"`
}

// BrokenOverlay describes a path through the overlay that carries no packets.
type BrokenOverlay struct {
	// Gateway is the address of the gateway at the other end.
	Gateway net.IPAddress `json:"gateway"`
	// Since is the time at which the first of the failed probes was sent.
	Since UTCTime `json:"since"`
	// Back is true if packets of the node reach the gateway, but packets of the gateway do not
	// reach the node.
	// +optional
	Back bool `json:"back,omitempty"`
}

// NodeRoute is an IPv4 route of a node's main table.
type NodeRoute struct {
	// Network is the destination of the route.
	Network NodeNetwork `json:"network"`
	// Via is the next hop.
	Via net.IPAddress `json:"via"`
}

// NodeProblem is a fault or a limit of a node.
type NodeProblem struct {
	// Reason is PodsMasqueraded, ForwardingRefused, ForwardingUncertain, GatewayOutOfReach,
	// GatewayUnguarded, SnapshotNotKept, NodeDoesNotVote or Refused. Refused means that the node
	// refuses a value in an object.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Reason string `json:"reason"`
	// Message describes the effect, the cause and the remedy.
	// +kubebuilder:validation:MaxLength=512
	Message string `json:"message"`
}

// NodeNetworks lists the networks that one node of the cluster reaches without Isthmus. Its name is
// the name of the Node. No peer gets a network that overlaps one of these networks. A false report
// gives peers no access: its networks only reduce the networks that peers may use, and its routes
// affect only packets that the gateway would deliver to that node anyway.
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
