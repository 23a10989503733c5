package v1alpha1

import (
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// NatMappingSpec lists the endpoints outside of our PodCIDR that one peer may reach. The manager
// writes it.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.externalCIDR) || self.clusterMappings.all(e, !isIP(self.clusterMappings[e]) || cidr(self.externalCIDR).containsIP(self.clusterMappings[e]))",message="the values of clusterMappings must be addresses in externalCIDR",fieldPath=".clusterMappings",reason=FieldValueInvalid
type NatMappingSpec struct {
	// ClusterID is the ID of the peer.
	ClusterID ClusterID `json:"clusterID"`
	// PodCIDR is the network that this cluster uses for the peer's pods. Only packets from this
	// network may use the mappings.
	PodCIDR CIDR `json:"podCIDR"`
	// ExternalCIDR is the network that the peer uses for our ExternalCIDR.
	ExternalCIDR CIDR `json:"externalCIDR"`
	// ClusterMappings maps the real address of each endpoint to the address in externalCIDR by
	// which the peer reaches the endpoint. The gateway's tunnel address, 169.254.0.1, is always in
	// the map. No other link-local address is permitted.
	ClusterMappings EndpointMap `json:"clusterMappings"`
}

// EndpointMap maps addresses of endpoints to addresses in the ExternalCIDR.
// +kubebuilder:validation:MaxProperties=16384
// +kubebuilder:validation:XValidation:rule="self.all(e, isIP(e) && (ip(e).isGlobalUnicast() && !e.startsWith('0.') || e == '169.254.0.1'))",message="keys must be unicast IP addresses, not unspecified, not loopback, and not link-local except 169.254.0.1",reason=FieldValueInvalid
// +kubebuilder:object:generate=false
type EndpointMap map[string]IPAddress

// DeepCopy returns a copy that shares no memory with the original.
func (in EndpointMap) DeepCopy() EndpointMap { return maps.Clone(in) }

// NatMappingStatus has only Conditions, which Liqo lacks.
type NatMappingStatus struct {
	// Conditions describe the state of this object in this cluster. Liqo has none.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +patchStrategy=merge
	// +patchMergeKey=type
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:XValidation:rule="self.all(c, c.lastTransitionTime.getFullYear() > 0)",message="lastTransitionTime must be a time, such as 2026-11-27T12:00:00Z",reason=FieldValueInvalid
	Conditions []metav1.Condition `json:"conditions,omitempty" patchStrategy:"merge" patchMergeKey:"type"`
}

// NatMapping makes endpoints outside of the PodCIDR reachable for one peer, such as the gateway's
// own tunnel address, external hosts, and pods of third clusters. It never leaves its cluster.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=natmappings,scope=Cluster,categories=liqo
type NatMapping struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the manager.
	Spec NatMappingSpec `json:"spec"`
	// Status is written by the gateway.
	// +optional
	Status NatMappingStatus `json:"status,omitzero"`
}

// NatMappingList is a list of NatMappings.
//
// +kubebuilder:object:root=true
type NatMappingList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NatMapping `json:"items"`
}
