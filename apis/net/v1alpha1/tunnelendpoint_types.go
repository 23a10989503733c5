package v1alpha1

import (
	"maps"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TunnelEndpointSpec is the configuration of the gateway and the route agents for one peer: the two
// networks of each side, the networks that the other side uses for them, and the address of the
// peer's gateway. The manager writes it.
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.localPodCIDR) || !isCIDR(self.localExternalCIDR) || !(cidr(self.localPodCIDR).containsIP(cidr(self.localExternalCIDR).ip()) || cidr(self.localExternalCIDR).containsIP(cidr(self.localPodCIDR).ip()))",message="localPodCIDR and localExternalCIDR must not overlap",fieldPath=".localExternalCIDR",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!isCIDR(self.remotePodCIDR) || !isCIDR(self.remoteExternalCIDR) || !(cidr(self.remotePodCIDR).containsIP(cidr(self.remoteExternalCIDR).ip()) || cidr(self.remoteExternalCIDR).containsIP(cidr(self.remotePodCIDR).ip()))",message="remotePodCIDR and remoteExternalCIDR must not overlap",fieldPath=".remoteExternalCIDR",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.localNATPodCIDR) || !isCIDR(self.localNATPodCIDR) || !isCIDR(self.localPodCIDR) || (cidr(self.localNATPodCIDR).prefixLength() == cidr(self.localPodCIDR).prefixLength() && cidr(self.localNATPodCIDR).ip().family() == cidr(self.localPodCIDR).ip().family())",message="localNATPodCIDR must have the address family and prefix length of localPodCIDR",fieldPath=".localNATPodCIDR",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.localNATExternalCIDR) || !isCIDR(self.localNATExternalCIDR) || !isCIDR(self.localExternalCIDR) || (cidr(self.localNATExternalCIDR).prefixLength() == cidr(self.localExternalCIDR).prefixLength() && cidr(self.localNATExternalCIDR).ip().family() == cidr(self.localExternalCIDR).ip().family())",message="localNATExternalCIDR must have the address family and prefix length of localExternalCIDR",fieldPath=".localNATExternalCIDR",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.remoteNATPodCIDR) || !isCIDR(self.remoteNATPodCIDR) || !isCIDR(self.remotePodCIDR) || (cidr(self.remoteNATPodCIDR).prefixLength() == cidr(self.remotePodCIDR).prefixLength() && cidr(self.remoteNATPodCIDR).ip().family() == cidr(self.remotePodCIDR).ip().family())",message="remoteNATPodCIDR must have the address family and prefix length of remotePodCIDR",fieldPath=".remoteNATPodCIDR",reason=FieldValueInvalid
// +kubebuilder:validation:XValidation:rule="!has(self.remoteNATExternalCIDR) || !isCIDR(self.remoteNATExternalCIDR) || !isCIDR(self.remoteExternalCIDR) || (cidr(self.remoteNATExternalCIDR).prefixLength() == cidr(self.remoteExternalCIDR).prefixLength() && cidr(self.remoteNATExternalCIDR).ip().family() == cidr(self.remoteExternalCIDR).ip().family())",message="remoteNATExternalCIDR must have the address family and prefix length of remoteExternalCIDR",fieldPath=".remoteNATExternalCIDR",reason=FieldValueInvalid
type TunnelEndpointSpec struct {
	// ClusterIdentity identifies the peer.
	ClusterIdentity ClusterIdentity `json:"clusterIdentity"`
	// LocalPodCIDR is the network of our pods.
	LocalPodCIDR CIDR `json:"localPodCIDR"`
	// LocalNATPodCIDR is the network that the peer uses for our pods, or None if it uses
	// localPodCIDR itself. It has the prefix length of localPodCIDR.
	// +optional
	// +kubebuilder:default="None"
	LocalNATPodCIDR NATCIDR `json:"localNATPodCIDR"`
	// LocalExternalCIDR is the network whose addresses stand for our mapped endpoints.
	LocalExternalCIDR CIDR `json:"localExternalCIDR"`
	// LocalNATExternalCIDR is the network that the peer uses for localExternalCIDR, or None if it
	// uses localExternalCIDR itself.
	// +optional
	// +kubebuilder:default="None"
	LocalNATExternalCIDR NATCIDR `json:"localNATExternalCIDR"`
	// RemotePodCIDR is the network of the peer's pods in the peer's own cluster.
	RemotePodCIDR CIDR `json:"remotePodCIDR"`
	// RemoteNATPodCIDR is the network that this cluster uses for the peer's pods, or None if it
	// uses remotePodCIDR itself.
	// +optional
	// +kubebuilder:default="None"
	RemoteNATPodCIDR NATCIDR `json:"remoteNATPodCIDR"`
	// RemoteExternalCIDR is the network whose addresses stand for the peer's mapped endpoints, in
	// the peer's own cluster.
	RemoteExternalCIDR CIDR `json:"remoteExternalCIDR"`
	// RemoteNATExternalCIDR is the network that this cluster uses for remoteExternalCIDR, or None
	// if it uses remoteExternalCIDR itself.
	// +optional
	// +kubebuilder:default="None"
	RemoteNATExternalCIDR NATCIDR `json:"remoteNATExternalCIDR"`
	// EndpointIP is the IP address or the DNS name of the peer's gateway.
	EndpointIP EndpointHost `json:"endpointIP"`
	// BackendType is the tunnel driver, wireguard.
	BackendType BackendType `json:"backendType"`
	// BackendConfig holds the public key and the port of the peer's gateway.
	BackendConfig BackendConfig `json:"backend_config"`
}

// ConnectionStatus is the state of the tunnel to a peer. Liqo's virtual nodes are ready only while
// the state is Connected.
// +kubebuilder:validation:Enum=Connected;Connecting;Error
type ConnectionStatus string

// The states of a tunnel, and the statusMessage that Liqo writes for the first two states.
const (
	// Connected: the peer answers the connection check.
	Connected ConnectionStatus = "Connected"
	// Connecting: the peer was just configured and has not answered yet.
	Connecting ConnectionStatus = "Connecting"
	// ConnectionError: the peer has not answered for ten seconds, or the gateway could not apply
	// its configuration.
	ConnectionError ConnectionStatus = "Error"

	// ConnectedMessage is the statusMessage of Connected.
	ConnectedMessage = "VPN connection established"
	// ConnectingMessage is the statusMessage of Connecting.
	ConnectingMessage = "Waiting VPN connection to be established"

	// LatencyUnknown is the latency value while there is no measurement.
	LatencyUnknown = "N/A"
)

// ConnectionLatency is the last measured round-trip time to the peer.
type ConnectionLatency struct {
	// Value is N/A or a whole number of milliseconds, such as 7ms. Below one millisecond, it is a
	// whole number of microseconds, such as 690μs. The letter is the Greek mu, U+03BC; the micro
	// sign U+00B5 is accepted too. The number is negative if the clock was set back between ping
	// and pong.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="self.matches('^(N/A|-?[0-9]+(s|ms|[μµ]s))$')",message="must be N/A or a whole number of ms or μs",reason=FieldValueInvalid
	Value string `json:"value,omitempty"`
	// Timestamp is the time of the measurement. It is absent if there is none.
	// +optional
	// +kubebuilder:validation:XValidation:rule="self.getFullYear() > 0",message="must be a time, such as 2026-11-27T12:00:00Z",reason=FieldValueInvalid
	Timestamp *metav1.Time `json:"timestamp,omitempty"`
}

// PeerConfiguration holds the parameters that the gateway passed to the tunnel driver.
// +kubebuilder:validation:MaxProperties=16
// +kubebuilder:validation:XValidation:rule="self.all(k, k.size() > 0 && k.size() <= 63)",message="keys must have 1 to 63 characters",reason=FieldValueInvalid
// +kubebuilder:object:generate=false
type PeerConfiguration map[string]ConfigValue

// DeepCopy returns a copy that shares no memory with the original.
func (in PeerConfiguration) DeepCopy() PeerConfiguration { return maps.Clone(in) }

// Connection is the state of the tunnel to the peer.
type Connection struct {
	// Status is Connected, Connecting or Error.
	// +optional
	Status ConnectionStatus `json:"status,omitempty"`
	// StatusMessage explains the status to users.
	// +optional
	// +kubebuilder:validation:MaxLength=32768
	StatusMessage string `json:"statusMessage,omitempty"`
	// PeerConfiguration holds the parameters that the gateway passed to the tunnel driver:
	// endpointIP (as resolved), port, publicKey and allowedIPs.
	// +optional
	PeerConfiguration PeerConfiguration `json:"peerConfiguration,omitempty"`
	// Latency is the last measured round-trip time.
	// +optional
	Latency ConnectionLatency `json:"latency,omitzero"`
}

// TunnelEndpointStatus is written by the active gateway.
type TunnelEndpointStatus struct {
	// GatewayIP is the IP address of the active gateway's Pod. If the Pod uses the host network,
	// that is an address of its node, and route agents send packets for the peer to that node.
	// +optional
	GatewayIP IPAddress `json:"gatewayIP,omitempty"`
	// VethIFaceIndex is the index of the interface through which the gateway's node reaches the
	// gateway.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	VethIFaceIndex int `json:"vethIFaceIndex,omitempty"`
	// VethIFaceName is the name of the interface through which the gateway's node reaches the
	// gateway.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	VethIFaceName string `json:"vethIFaceName,omitempty"`
	// VethIP is the next hop that the gateway's node uses for packets to the gateway.
	// +optional
	VethIP IPAddress `json:"vethIP,omitempty"`
	// TunnelIFaceIndex is the index of the tunnel interface. Liqo v0.9.4 never writes it.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=2147483647
	TunnelIFaceIndex int `json:"tunnelIFaceIndex,omitempty"`
	// TunnelIFaceName is the name of the tunnel interface. Liqo v0.9.4 never writes it.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	TunnelIFaceName string `json:"tunnelIFaceName,omitempty"`
	// Connection is the state of the tunnel.
	// +optional
	Connection Connection `json:"connection,omitzero"`
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

// TunnelEndpoint combines the NetworkConfigs of both sides of a peering, each with the other's
// answer. The gateway applies it. It is not replicated to the peer.
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:path=tunnelendpoints,categories=liqo
// +kubebuilder:printcolumn:name="Peering Cluster",type=string,JSONPath=`.spec.clusterIdentity.clusterName`
// +kubebuilder:printcolumn:name="Endpoint IP",type=string,priority=1,JSONPath=`.spec.endpointIP`
// +kubebuilder:printcolumn:name="Backend type",type=string,JSONPath=`.spec.backendType`
// +kubebuilder:printcolumn:name="Latency",type=string,priority=1,JSONPath=`.status.connection.latency.value`
// +kubebuilder:printcolumn:name="Connection status",type=string,JSONPath=`.status.connection.status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type TunnelEndpoint struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// Spec is written by the manager.
	Spec TunnelEndpointSpec `json:"spec"`
	// Status is written by the active gateway.
	// +optional
	Status TunnelEndpointStatus `json:"status,omitzero"`
}

// TunnelEndpointList is a list of TunnelEndpoints.
//
// +kubebuilder:object:root=true
type TunnelEndpointList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []TunnelEndpoint `json:"items"`
}
