package v1alpha1

import (
	"crypto/sha256"
	"encoding/hex"
	"strconv"
)

// UniqueName returns the name of the cluster in object names: clusterName, a dash and the first six
// hexadecimal digits of the SHA-256 of clusterID. A NetworkConfig, original or copy, has the unique
// name of its receiver as name. A TunnelEndpoint has the unique name of the peer.
func (c ClusterIdentity) UniqueName() string {
	sum := sha256.Sum256([]byte(c.ClusterID))
	return c.ClusterName + "-" + hex.EncodeToString(sum[:])[:6]
}

// TenantNamespace returns the name that Liqo gives to the namespace of a peering with the cluster.
func (c ClusterIdentity) TenantNamespace() string { return "liqo-tenant-" + c.UniqueName() }

// Labels of a tenant namespace.
const (
	// LabelTenantClusterID is the clusterID of the peer.
	LabelTenantClusterID = "discovery.liqo.io/cluster-id"
	// LabelTenantNamespace is "true".
	LabelTenantNamespace = "discovery.liqo.io/tenant-namespace"
)

// ConditionAccepted is True on the copy of a NetworkConfig if the receiver accepts its content.
// Otherwise the message names the refused field. The status is copied to the original, so the
// sender sees the condition there.
const ConditionAccepted = "Accepted"

// Reasons of ConditionAccepted. Only the first has the status True.
const (
	ReasonAnswered     = "Answered"      // the status has the answer
	ReasonNotPeered    = "NotPeered"     // no Peering or ForeignCluster here names the sender
	ReasonWrongOrigin  = "WrongOrigin"   // the labels name one cluster, but the namespace belongs to another
	ReasonInvalid      = "Invalid"       // a value is invalid
	ReasonKeyConflict  = "KeyConflict"   // the public key belongs to us or to another peer
	ReasonEndpoint     = "BadEndpoint"   // the gateway's address is reserved, or inside a network of ours or of a peer
	ReasonExhausted    = "Exhausted"     // the pools have no free network of that length
	ReasonConsent      = "ConsentNeeded" // the advertised networks changed and would get new addresses; an administrator has to agree
	ReasonCIDRConflict = "CIDRConflict"  // the network that spec.overrides of the Peering demands is not free
	ReasonAmbiguous    = "Ambiguous"     // the sender has more than one NetworkConfig here
)

// ConditionConnected is True on a TunnelEndpoint if the peer answers. Otherwise its reason states
// why not. Liqo sets no conditions; it reports the state only in status.connection. If
// status.connection.status is Error, status.connection.statusMessage has the same text as the
// message of the condition.
const ConditionConnected = "Connected"

// Reasons of ConditionConnected. Only Connected and NarrowPath have the status True.
const (
	CauseConnected    = "Connected"    // the peer answers
	CauseConnecting   = "Connecting"   // configured less than ten seconds ago, and no answer yet
	CauseNotApplied   = "NotApplied"   // the kernel of the gateway's node refuses a part of the peer's configuration
	CauseEndpointName = "EndpointName" // the DNS name of the peer's gateway resolves to no permitted address
	CauseSendError    = "SendError"    // the kernel cannot send to the peer; the message has its error
	CauseWrongKey     = "WrongKey"     // handshakes come from the peer's address, but one cluster has a wrong public key of the other, or a clock was set back
	CauseAnswersLost  = "AnswersLost"  // the peer's handshakes arrive here, but our answers do not reach the peer
	CauseNoAnswer     = "NoAnswer"     // the peer never answered

	CausePeerSilent      = "PeerSilent"      // the peer answered before, but no longer does
	CauseRangesDisagree  = "RangesDisagree"  // the peer's packets arrive, but their addresses are outside the agreed networks
	CauseProbeUnanswered = "ProbeUnanswered" // the peer's packets arrive, but no answers to the connection check
	CauseNarrowPath      = "NarrowPath"      // the path loses packets of the full MTU, so the gateway sends smaller ones; the condition is True
	CausePathMTU         = "PathMTU"         // the path loses even packets of the smallest permitted MTU
)

// Causes are the reasons of ConditionConnected.
var Causes = []string{CauseConnected, CauseConnecting, CauseNotApplied, CauseEndpointName, CauseSendError, CauseWrongKey, CauseAnswersLost,
	CauseNoAnswer, CausePeerSilent, CauseRangesDisagree, CauseProbeUnanswered, CauseNarrowPath, CausePathMTU}

// Carries reports whether ConditionConnected is True for a cause. True means that the peer receives
// our packets, and that its answers arrive here.
func Carries(cause string) bool { return cause == CauseConnected || cause == CauseNarrowPath }

// None in a NAT field means that the network is not remapped. An empty field cannot mean this: Liqo
// copies the field from the status of a NetworkConfig into its TunnelEndpoint, and Liqo's gateway
// rejects a TunnelEndpoint with an empty NAT field.
const None = "None"

// BackendWireGuard is the only backendType.
const BackendWireGuard = "wireguard"

// Keys of backend_config and of status.connection.peerConfiguration.
const (
	// ConfigPublicKey holds a WireGuard public key: 32 octets in base64.
	ConfigPublicKey = "publicKey"
	// ConfigPort holds the UDP port of the gateway, in decimal.
	ConfigPort = "port"
	// If a gateway has more than one tunnel, ConfigTunnels holds the additional ones: at most 15
	// entries PORT:PUBLICKEY, in order and separated by commas. publicKey and port describe the
	// first tunnel. Liqo has no such key and ignores it (backend_config only).
	ConfigTunnels = "tunnels"
	// ConfigInBand is "true" if the sender's Peering has spec.inBand. If both sides publish "true",
	// the sender's manager uses the tunnel, and the sender's gateway lets the receiver's manager
	// through. Liqo has no such key (NetworkConfig only).
	ConfigInBand = "inBand"
	// ConfigKeyProof proves to the receiver that the sender has the private keys of its tunnels. If
	// two peers publish the same public key, the receiver accepts the peer that has a proof. Liqo
	// has no such key (NetworkConfig only).
	ConfigKeyProof = "keyProof"
	// ConfigEndpointIP holds the address to which the endpoint was resolved (peerConfiguration
	// only).
	ConfigEndpointIP = "endpointIP"
	// ConfigAllowedIPs holds the networks that this cluster uses for the peer's PodCIDR and
	// ExternalCIDR, separated by a comma and a blank (peerConfiguration only).
	ConfigAllowedIPs = "allowedIPs"
	// ConfigPreshared names the key exchange that made the preshared key of the present sessions
	// with the peer. It is absent if a session has no preshared key. Liqo has no such key
	// (peerConfiguration only).
	ConfigPreshared = "preshared"
	// ConfigOwnKey holds our public key in the present session with the peer. While it differs from
	// ConfigPublicKey of our NetworkConfig, the peer has not moved to our new key. Liqo has no such
	// key (peerConfiguration only).
	ConfigOwnKey = "ownPublicKey"
)

// TunnelPortName returns the name of the port for tunnel i in the Service of the gateway. For
// tunnel 0, it is wireguard, as in Liqo. The next names are wireguard-1, wireguard-2 and so on.
func TunnelPortName(i int) string {
	if i == 0 {
		return BackendWireGuard
	}
	return BackendWireGuard + "-" + strconv.Itoa(i)
}

// Labels of NetworkConfigs. The original exists in the cluster that it describes, the copy in the
// cluster to which it is addressed.
const (
	// LabelReplication is "true" on an original, which has to be replicated, and "false" on a copy.
	LabelReplication = "liqo.io/replication"
	// LabelRemoteID is the clusterID of the receiver, on original and copy.
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
	// components of Liqo use it to find the TunnelEndpoint.
	LabelClusterID = "clusterID"
	// LabelNatMapping is "true" on NatMappings.
	LabelNatMapping = "net.liqo.io/natmapping"
	// LabelIpamStorage is "true" on the IpamStorage.
	LabelIpamStorage = "net.liqo.io/ipamstorage"
	// LabelKey is "wireguard" on the Secret with the key of the gateways.
	LabelKey = "net.liqo.io/key"
	// LabelGateway is "true" on the Service of the gateway. On a gateway's Pod it is GatewayActive
	// or GatewayStandby.
	LabelGateway = "net.liqo.io/gateway"
	// GatewayActive is the value of LabelGateway on the Pod of the active gateway. The Service
	// selects this Pod.
	GatewayActive = "active"
	// GatewayStandby is the value of LabelGateway on the Pods of gateways that wait to take over.
	GatewayStandby = "standby"
	// LabelShadowPod is "true" on Pods that run in another cluster.
	LabelShadowPod = "liqo.io/shadowPod"
)

// Annotations.
const (
	// AnnotationGatewayNodeIP on the Service of the gateway is the address of the node where the
	// active gateway runs.
	AnnotationGatewayNodeIP = "net.liqo.io/gatewayNodeIP"
	// AnnotationOverrideAddress on the Service of the gateway replaces the address that is
	// published to peers.
	AnnotationOverrideAddress = "liqo.io/override-address"
	// AnnotationOverridePort on the Service of the gateway replaces the port that is published to
	// peers.
	AnnotationOverridePort = "liqo.io/override-port"
)

// Finalizers.
const (
	// FinalizerReplicator is set on original NetworkConfigs (and on ForeignClusters) until the copy
	// is deleted.
	FinalizerReplicator = "crdReplicator.liqo.io"
	// FinalizerTunnelEndpointCreator is set on both NetworkConfigs of a peering.
	FinalizerTunnelEndpointCreator = "tunnelendpointcreator.net.liqo.io"
	// FinalizerGateway is set on TunnelEndpoints.
	FinalizerGateway = "liqo-gateway.net.liqo.io"
)
