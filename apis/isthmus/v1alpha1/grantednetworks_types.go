package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// GrantedNetworksSpec is what a share of the peers have. The manager writes it.
type GrantedNetworksSpec struct {
	// Peers has the networks that stand for each peer's here, by clusterID: the one of its pods and
	// the one of its mapped endpoints. Released networks are among them for 24 hours.
	// +kubebuilder:validation:MaxProperties=4096
	// +kubebuilder:validation:XValidation:rule="self.all(c, c.size() > 0 && c.size() <= 63)",message="keys must be clusterIDs of 1 to 63 characters",reason=FieldValueInvalid
	// +optional
	Peers map[string]PeerNetworks `json:"peers,omitempty"`
}

// PeerNetworks are the networks of one peer: those that it has, and those that it had and that are held
// for a day.
// +kubebuilder:validation:MaxItems=16
// +listType=atomic
type PeerNetworks []GrantedNetwork

// GrantedNetwork is a network of a peer. A pattern checks it, because there may be too many for a CEL
// rule; readers do not take what it lets through for a network.
// +kubebuilder:validation:MaxLength=43
// +kubebuilder:validation:Pattern=`^[0-9A-Fa-f:.]+/[0-9]{1,3}$`
type GrantedNetwork = string

// GrantedNetworks has those of the books of the IPAM (IpamStorage) that nodes refuse when there is no
// way for them, for a share of the peers each. There are at most 64, and a peer's is found by a hash
// of its clusterID. Thousands of nodes read them in the place of the books, so that a grant costs
// them one short object. They are a copy: the books count, and say in their annotation
// isthmus.net/granted what all shares together have to be.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:path=grantednetworks,singular=grantednetworks,scope=Cluster,categories=isthmus
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GrantedNetworks struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the manager.
	Spec GrantedNetworksSpec `json:"spec"`
}

// GrantedNetworksList is a list of GrantedNetworks.
//
// +kubebuilder:object:root=true
type GrantedNetworksList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GrantedNetworks `json:"items"`
}
