package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// NetworkConfigSpec describes the network of a cluster to a peer. The sender writes it. In the
// receiver's cluster, the sender's replicator writes it.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.podCIDR) || !isCIDR(self.externalCIDR) || !(cidr(self.podCIDR).containsIP(cidr(self.externalCIDR).ip()) || cidr(self.externalCIDR).containsIP(cidr(self.podCIDR).ip()))",message="podCIDR and externalCIDR must not overlap",fieldPath=".externalCIDR",reason=FieldValueInvalid
type NetworkConfigSpec struct {
	// RemoteCluster is the receiver of this object. The copy in the receiver's cluster therefore
	// names the cluster in which it is.
	RemoteCluster ClusterIdentity `json:"cluster"`
	// PodCIDR is the network of the sender's pods.
	PodCIDR CIDR `json:"podCIDR"`
	// The sender makes endpoints reachable that are not its pods. ExternalCIDR is the network whose
	// addresses stand for these endpoints.
	ExternalCIDR CIDR `json:"externalCIDR"`
	// EndpointIP is the IP address or the DNS name of the sender's gateway.
	EndpointIP EndpointHost `json:"endpointIP"`
	// BackendType is the tunnel driver, wireguard.
	BackendType BackendType `json:"backendType"`
	// BackendConfig holds the public key and the port of the sender's gateway.
	BackendConfig BackendConfig `json:"backend_config"`
}

// NetworkConfigStatus is the receiver's answer. The receiver writes it into the copy, and the
// sender's replicator copies it to the original.
// +kubebuilder:validation:XValidation:rule="!self.processed || (has(self.podCIDRNAT) && has(self.externalCIDRNAT))",message="podCIDRNAT and externalCIDRNAT must be set if processed is true; None means that the network is not remapped",reason=FieldValueRequired
type NetworkConfigStatus struct {
	// Processed is true when the receiver has answered. Both NAT fields are set at the same time.
	// +kubebuilder:default=false
	Processed bool `json:"processed"`
	// PodCIDRNAT is the network that the receiver uses for the sender's pods, or None if it uses
	// spec.podCIDR itself. It has the prefix length of spec.podCIDR.
	// +optional
	PodCIDRNAT NATCIDR `json:"podCIDRNAT,omitempty"`
	// ExternalCIDRNAT is the network that the receiver uses for spec.externalCIDR, or None if it
	// uses spec.externalCIDR itself. It has the prefix length of spec.externalCIDR.
	// +optional
	ExternalCIDRNAT NATCIDR `json:"externalCIDRNAT,omitempty"`
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

// NetworkConfig carries the network parameters of one cluster to another. Each side of a peering
// has two: its own (label liqo.io/replication "true"), and the copy of the peer's.
//
// The CEL rules of this kind compare the prefix lengths of the NAT networks in status with spec
// only when a write changes these networks. So if the sender publishes new networks, an old answer
// that does not match them is no error.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=networkconfigs,categories=liqo
// +kubebuilder:printcolumn:name="Peering Cluster",type=string,JSONPath=`.spec.cluster.clusterName`
// +kubebuilder:printcolumn:name="Endpoint IP",type=string,priority=1,JSONPath=`.spec.endpointIP`
// +kubebuilder:printcolumn:name="VPN Backend",type=string,priority=1,JSONPath=`.spec.backendType`
// +kubebuilder:printcolumn:name="Processed",type=string,JSONPath=`.status.processed`
// +kubebuilder:printcolumn:name="Local",type=string,JSONPath=`.metadata.labels.liqo\.io/replication`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="!has(self.status) || !has(self.status.podCIDRNAT) || (has(oldSelf.status) && has(oldSelf.status.podCIDRNAT) && oldSelf.status.podCIDRNAT == self.status.podCIDRNAT) || !isCIDR(self.status.podCIDRNAT) || !isCIDR(self.spec.podCIDR) || (cidr(self.status.podCIDRNAT).prefixLength() == cidr(self.spec.podCIDR).prefixLength() && cidr(self.status.podCIDRNAT).ip().family() == cidr(self.spec.podCIDR).ip().family())",message="podCIDRNAT must have the address family and prefix length of spec.podCIDR",fieldPath=".status.podCIDRNAT",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.status) || !has(self.status.externalCIDRNAT) || (has(oldSelf.status) && has(oldSelf.status.externalCIDRNAT) && oldSelf.status.externalCIDRNAT == self.status.externalCIDRNAT) || !isCIDR(self.status.externalCIDRNAT) || !isCIDR(self.spec.externalCIDR) || (cidr(self.status.externalCIDRNAT).prefixLength() == cidr(self.spec.externalCIDR).prefixLength() && cidr(self.status.externalCIDRNAT).ip().family() == cidr(self.spec.externalCIDR).ip().family())",message="externalCIDRNAT must have the address family and prefix length of spec.externalCIDR",fieldPath=".status.externalCIDRNAT",reason=FieldValueInvalid
type NetworkConfig struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the sender.
	Spec NetworkConfigSpec `json:"spec"`
	// Status is written by the receiver.
	// +optional
	Status NetworkConfigStatus `json:"status,omitzero"`
}

// NetworkConfigList is a list of NetworkConfigs.
//
// +kubebuilder:object:root=true
type NetworkConfigList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []NetworkConfig `json:"items"`
}
