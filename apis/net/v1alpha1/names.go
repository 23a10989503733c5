package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
)

// UniqueName is the name of the cluster in object names: clusterName, a dash and the first six
// hexadecimal digits of the SHA-256 of clusterID. A NetworkConfig, original and copy, has the
// unique name of the receiver, a TunnelEndpoint that of the peer.
func (c ClusterIdentity) UniqueName() string {
	sum := sha256.Sum256([]byte(c.ClusterID))
	return c.ClusterName + "-" + hex.EncodeToString(sum[:])[:6]
}

// TenantNamespace is the name that Liqo gives to the namespace of a peering with the cluster.
func (c ClusterIdentity) TenantNamespace() string { return "liqo-tenant-" + c.UniqueName() }

// Labels of a tenant namespace.
const (
	// LabelTenantClusterID is the clusterID of the peer.
	LabelTenantClusterID = "discovery.liqo.io/cluster-id"
	// LabelTenantNamespace is "true".
	LabelTenantNamespace = "discovery.liqo.io/tenant-namespace"
)

// ConditionAccepted is the condition of a NetworkConfig's copy: whether the receiver accepts its
// content. It travels back to the original with the status, so the sender sees the reason of a
// refusal. The message names the field.
const ConditionAccepted = "Accepted"

// Reasons of ConditionAccepted. Only the first one belongs to True.
const (
	ReasonAnswered     = "Answered"      // the status has the answer
	ReasonNotPeered    = "NotPeered"     // no Peering or ForeignCluster here names the sender
	ReasonWrongOrigin  = "WrongOrigin"   // the labels name a cluster other than the namespace's
	ReasonInvalid      = "Invalid"       // a value is invalid
	ReasonKeyConflict  = "KeyConflict"   // the public key belongs to us or to another peer
	ReasonEndpoint     = "BadEndpoint"   // the gateway's address is reserved, or inside a network of ours or of a peer
	ReasonExhausted    = "Exhausted"     // the pools have no free network of that length
	ReasonConsent      = "ConsentNeeded" // the claim changed and takes new addresses; an administrator has to agree
	ReasonCIDRConflict = "CIDRConflict"  // the network that spec.overrides of the Peering demands is not free
	ReasonAmbiguous    = "Ambiguous"     // the sender has more than one NetworkConfig here
)

// ConditionConnected is the condition of a TunnelEndpoint that the active gateway writes: whether
// the peer answers, and if not, why. Liqo has no such condition. status.connection has the same in
// Liqo's words; its message is that of the condition if the status is Error.
const ConditionConnected = "Connected"

// Reasons of ConditionConnected. Only the first one belongs to True.
const (
	CauseConnected    = "Connected"    // the peer answers
	CauseConnecting   = "Connecting"   // configured less than ten seconds ago, and no answer yet
	CauseNotApplied   = "NotApplied"   // the kernel of the gateway's node refuses a part of the peer's configuration
	CauseEndpointName = "EndpointName" // the DNS name of its gateway resolves to no permitted address
	CauseSendError    = "SendError"    // the kernel cannot send to the peer; the message has its error
	CauseWrongKey     = "WrongKey"     // handshakes from its address use another key than its own, or than ours
	CauseAnswersLost  = "AnswersLost"  // its handshakes arrive here, our answers do not arrive there
	CauseNoAnswer     = "NoAnswer"     // the peer never answered

	CausePeerSilent      = "PeerSilent"      // the peer answered before, but no longer does
	CauseRangesDisagree  = "RangesDisagree"  // its packets arrive, but their addresses are outside the agreed networks
	CauseProbeUnanswered = "ProbeUnanswered" // its packets arrive, but no answers to the connection check
	CauseNarrowPath      = "NarrowPath"      // True: the path loses packets of the full MTU, so the gateway sends smaller ones
	CausePathMTU         = "PathMTU"         // the path loses packets even of the smallest permitted MTU
)

// Causes are the reasons of ConditionConnected.
var Causes = []string{CauseConnected, CauseConnecting, CauseNotApplied, CauseEndpointName, CauseSendError, CauseWrongKey, CauseAnswersLost,
	CauseNoAnswer, CausePeerSilent, CauseRangesDisagree, CauseProbeUnanswered, CauseNarrowPath, CausePathMTU}

// Carries reports whether packets go to a peer and come back, as its cause says: whether the
// condition is True.
func Carries(cause string) bool { return cause == CauseConnected || cause == CauseNarrowPath }

// None stands in a NAT field for "this network is not remapped". It has to be spelled out: a Liqo
// copies what it finds in the status of a NetworkConfig into its TunnelEndpoint, and its gateway
// rejects one whose NAT field is empty.
const None = "None"

// BackendWireGuard is the only backendType.
const BackendWireGuard = "wireguard"

// Keys of backend_config and of status.connection.peerConfiguration.
const (
	// ConfigPublicKey holds a WireGuard public key, base64 of 32 octets.
	ConfigPublicKey = "publicKey"
	// ConfigPort holds the UDP port of the gateway, decimal.
	ConfigPort = "port"
	// ConfigTunnels holds the further tunnels of a gateway that has more than the one which
	// publicKey and port describe: PORT:PUBLICKEY for each, in their order and separated by commas,
	// at most 15. Liqo has no such key and ignores it (backend_config only).
	ConfigTunnels = "tunnels"
	// ConfigInBand is "true" if the sender's Peering has spec.inBand: its manager wants to use the
	// tunnel, and its gateway lets the receiver's manager through. Liqo has no such key
	// (NetworkConfig only).
	ConfigInBand = "inBand"
	// ConfigKeyProof proves to the receiver that the sender has the private keys of its tunnels. If
	// two peers claim one key, it decides which of them has it. Liqo has no such key (NetworkConfig
	// only).
	ConfigKeyProof = "keyProof"
	// ConfigEndpointIP holds the address that the endpoint resolved to (peerConfiguration only).
	ConfigEndpointIP = "endpointIP"
	// ConfigAllowedIPs holds PodCIDR and ExternalCIDR of the peer as seen here, separated by a
	// comma and a blank (peerConfiguration only).
	ConfigAllowedIPs = "allowedIPs"
	// ConfigPreshared names the exchange whose preshared key protects the present sessions with the
	// peer. It is absent if a session has none. Liqo has no such key (peerConfiguration only).
	ConfigPreshared = "preshared"
	// ConfigOwnKey holds our public key in the present session with the peer. While it differs from
	// ConfigPublicKey of our NetworkConfig, the peer has not moved to our new key. Liqo has no such
	// key (peerConfiguration only).
	ConfigOwnKey = "ownPublicKey"
)

// TunnelPortName is the name of the port for tunnel i in the Service of the gateway: wireguard as
// in Liqo, then wireguard-1, wireguard-2 and so on.
func TunnelPortName(i int) string {
	if i == 0 {
		return BackendWireGuard
	}
	return BackendWireGuard + "-" + strconv.Itoa(i)
}

// Labels of NetworkConfigs. The original lies in the cluster it describes, the copy in the cluster
// it is addressed to.
const (
	// LabelReplication is "true" on an original, which is to be replicated, and "false" on a copy.
	LabelReplication = "liqo.io/replication"
	// LabelRemoteID is the clusterID of the receiver, on both.
	LabelRemoteID = "liqo.io/remoteID"
	// LabelOriginID is the clusterID of the sender, on the copy only.
	LabelOriginID = "liqo.io/originID"
	// LabelReplicated is "true" on the copy only.
	LabelReplicated = "liqo.io/replicated"
	// LabelOwnership is OwnershipNetworkConfigCreator on the original; the replicator removes it
	// from the copy.
	LabelOwnership = "liqo.io/ownership"
	// OwnershipNetworkConfigCreator is the value of LabelOwnership.
	OwnershipNetworkConfigCreator = "netcfgCreator"
)

// Labels of the other objects of the network fabric.
const (
	// LabelClusterID is the clusterID of the peer, on TunnelEndpoints and NatMappings. Other
	// components of Liqo find the TunnelEndpoint by it.
	LabelClusterID = "clusterID"
	// LabelNatMapping is "true" on NatMappings.
	LabelNatMapping = "net.liqo.io/natmapping"
	// LabelIpamStorage is "true" on the IpamStorage.
	LabelIpamStorage = "net.liqo.io/ipamstorage"
	// LabelKey is "wireguard" on the Secret with the key of the gateways.
	LabelKey = "net.liqo.io/key"
	// LabelGateway is "true" on the Service of the gateway, and GatewayActive or GatewayStandby on
	// its Pods.
	LabelGateway = "net.liqo.io/gateway"
	// GatewayActive marks the Pod that the Service selects.
	GatewayActive = "active"
	// GatewayStandby marks the Pods that wait.
	GatewayStandby = "standby"
	// LabelShadowPod is "true" on Pods that run in another cluster.
	LabelShadowPod = "liqo.io/shadowPod"
)

// Annotations.
const (
	// AnnotationGatewayNodeIP, on the Service of the gateway, is the address of the node where the
	// active gateway runs.
	AnnotationGatewayNodeIP = "net.liqo.io/gatewayNodeIP"
	// AnnotationOverrideAddress, on the Service of the gateway, replaces the address that is
	// published to peers.
	AnnotationOverrideAddress = "liqo.io/override-address"
	// AnnotationOverridePort, on the Service of the gateway, replaces the port that is published to
	// peers.
	AnnotationOverridePort = "liqo.io/override-port"
)

// Finalizers.
const (
	// FinalizerReplicator is set on original NetworkConfigs (and on ForeignClusters) until the copy
	// is gone.
	FinalizerReplicator = "crdReplicator.liqo.io"
	// FinalizerTunnelEndpointCreator is set on both NetworkConfigs of a peering.
	FinalizerTunnelEndpointCreator = "tunnelendpointcreator.net.liqo.io"
	// FinalizerGateway is set on TunnelEndpoints.
	FinalizerGateway = "liqo-gateway.net.liqo.io"
)
