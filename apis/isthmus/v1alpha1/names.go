package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// FinalizerPeering keeps a Peering until all objects that the manager made for it are deleted, here
// and at the peer.
const FinalizerPeering = "isthmus.net/peering"

// AnnotationForce with the value "true" applies to a Peering that is being deleted. The manager
// then no longer waits for the peer. Our objects at the peer stay in place, and an Event names
// them.
const AnnotationForce = "isthmus.net/force-unpeer"

// ForceCarried is the other value of AnnotationForce. If the managers reach each other only through
// the tunnel, `isthmus unpeer` sets it in both clusters. The command itself then removes the
// objects that each manager made in the other cluster.
const ForceCarried = "carried"

// AnnotationDrained is set to "true" on a Peering that is being deleted. The manager sets it after
// clients have had time to stop using the shared services. Until then, the tunnel stays.
const AnnotationDrained = "isthmus.net/drained"

// AnnotationUnanswered is "true" on our NetworkConfig while its status still has the peer's answer
// to our previous networks. The write that publishes new networks also sets the annotation. So no
// reader applies the old answer to the new networks.
const AnnotationUnanswered = "isthmus.net/unanswered"

// AnnotationPostQuantum is "Required" on a TunnelEndpoint whose Peering demands a preshared key
// (spec.postQuantum). A gateway without such a key carries no packets of that peer.
const AnnotationPostQuantum = "isthmus.net/post-quantum"

// AnnotationInBand is "true" on a TunnelEndpoint if the Peerings of both clusters have spec.inBand.
// While our Peering is being deleted, the value is InBandLeaving: only our manager may connect
// through the tunnel, to delete its objects at the peer.
const (
	AnnotationInBand = "isthmus.net/in-band"
	InBandLeaving    = "leaving"
)

// AnnotationKeyProved on a TunnelEndpoint lists public keys, separated by spaces. The peer has
// proved that it has the private keys. A new proof must name our current key. An accepted proof
// stays valid after a rotation of our key.
const AnnotationKeyProved = "isthmus.net/key-proved"

// InBandServer is the server in the kubeconfig of an identity if spec.inBand is set. It is the URL
// of the peer's API server inside the peer's own cluster.
const InBandServer = "https://kubernetes.default.svc"

// LeaseGateway is the name of the Lease whose holder is the active gateway. The Lease lasts 7 s and
// is renewed every 2 s.
const LeaseGateway = "isthmus-gateway"

// `isthmus peer` writes these annotations on a Peering to identify the peer, because any cluster
// can use the ID and name of another cluster. The manager refuses a cluster that does not match the
// annotations.
const (
	// AnnotationPeerUID is the UID of the namespace kube-system in the peer.
	AnnotationPeerUID = "isthmus.net/peer-uid"
	// ConfigMapRootCA is the ConfigMap in which Kubernetes publishes, in each namespace, the
	// certificates of its API server.
	ConfigMapRootCA = "kube-root-ca.crt"
	// AnnotationPeerAuthority is a hash of the certificates that verify the peer's API server, or
	// "system" if the certificates of the operating system verify it.
	AnnotationPeerAuthority = "isthmus.net/peer-authority"
)

// AnnotationVoters on the Lease of the gateways lists the nodes that vote on which gateway is
// active. The value is JSON with two fields: version is a number that grows with each change;
// voters maps the names of Nodes to their addresses. If there are no voters, the holder of the
// Lease is active.
const AnnotationVoters = "isthmus.net/voters"

// AnnotationVotes on the Service of the gateway has the data that a node needs in order to vote.
// The value is JSON with two fields: epoch is the number of the takeover that made the gateway
// active; key is the Ed25519 public key, in base64, that verifies the signatures of gateways.
const AnnotationVotes = "isthmus.net/votes"

// AnnotationGateways on the Service of the gateway has the addresses of the Pods of the active
// gateways, separated by commas; at present there is only one. Route agents use this address
// instead of the status of each TunnelEndpoint. They ignore the address of a Pod with hostNetwork,
// and one that belongs to no gateway Pod.
const AnnotationGateways = "isthmus.net/gateways"

// AnnotationTakenOver on the IpamStorage is the resourceVersion at which the current manager began
// to write. When the annotation is set, the next write of the previous manager fails with a
// conflict, so that the previous manager reads the state again.
const AnnotationTakenOver = "isthmus.net/taken-over-at"

// AnnotationTokenAudiences on a tenant namespace lists the audiences for which the peer may renew
// its token, separated by commas.
const AnnotationTokenAudiences = "isthmus.net/token-audiences"

// LabelService marks the ServiceImports, Services and EndpointSlices that the manager creates for
// shared services. Its value is the name of the shared service.
const LabelService = "isthmus.net/service"

// PeerServicesPrefix is the beginning of the names of PeerServices: services-0 to services-15.
const PeerServicesPrefix = "services-"

// EventApplied is the reason of an Event on the Pod of a gateway or a route agent. It reports the
// end of a fault that an earlier Event reported.
const EventApplied = "Applied"

// EventActive is the reason of an Event on the Pod of a gateway. The gateway reports that it became
// active, and why.
const EventActive = "Active"

// EventCannotTakeOver is the reason of an Event on the Pod of a standby gateway. The gateway
// reports that it receives no messages from nodes whose votes it needs.
const EventCannotTakeOver = "StandbyCannotTakeOver"

// DefaultIdentitySecret is the default name of the Secret with the manager's identity at the peer's
// API server. The Secret is in the local tenant namespace.
const DefaultIdentitySecret = "isthmus-identity"

// SecretKubeconfig is the key of an identity Secret that holds a kubeconfig. A Secret without this
// key must have Liqo's keys: private-key, certificate, apiServerUrl, apiServerCa.
const SecretKubeconfig = "kubeconfig"

// Condition types of a Peering, in the order in which they become true. The first reconcile sets
// all of them, some perhaps to Unknown.
const (
	// ConditionReady summarises the other conditions: traffic can flow.
	ConditionReady = "Ready"
	// ConditionIdentity: the peer's API server accepts our identity.
	ConditionIdentity = "IdentityReady"
	// ConditionPublished: the peer has our current NetworkConfig.
	ConditionPublished = "Published"
	// ConditionAnswered: the peer has answered our NetworkConfig. The status of our NetworkConfig
	// has our networks as the peer sees them.
	ConditionAnswered = "Answered"
	// ConditionPeerConfig: we have accepted and answered the peer's NetworkConfig.
	ConditionPeerConfig = "PeerConfigAccepted"
	// ConditionTunnelEndpoint: the TunnelEndpoint has the networks on which both sides agreed.
	ConditionTunnelEndpoint = "TunnelEndpointReady"
	// ConditionConnected: the gateway receives answers from the peer.
	ConditionConnected = "Connected"
	// ConditionServicesShared: services are shared with the peer according to spec.services. The
	// Peering has this condition only if the manager runs with --services and spec.services names
	// namespaces. Ready does not depend on it.
	ConditionServicesShared = "ServicesShared"
)

// Reasons of the conditions of a Peering. If a NetworkConfig is refused, ConditionPeerConfig or
// ConditionAnswered has the reason of the NetworkConfig's condition Accepted (see package
// net/v1alpha1).
//
// Ready has either its own reason or the reason of the first condition that is not true. The
// message of Ready names that condition.
const (
	// all conditions but ServicesShared
	ReasonConflict = "Conflict" // another Peering is for the same cluster or namespace
	ReasonUnknown  = "Unknown"  // the manager has not checked the condition yet

	// Ready: the reason of another condition, or one of these
	ReasonConnected  = "Connected"  // all conditions are true
	ReasonUnpeering  = "Unpeering"  // the Peering is being deleted; the message names the remaining steps
	ReasonOverlap    = "Overlap"    // a network of the peer overlaps an address or network that this cluster got later, such as a node's
	ReasonLocalSetup = "LocalSetup" // this cluster lacks a tenant namespace, a key, a gateway Service or a PodCIDR

	// IdentityReady
	ReasonIdentityAccepted = "Accepted"      // the peer's API server answers
	ReasonSecretMissing    = "SecretMissing" // the Secret does not exist, or the manager may not read it
	ReasonSecretInvalid    = "SecretInvalid" // the Secret has neither a kubeconfig nor an identity in Liqo's format
	ReasonNotRenewed       = "NotRenewed"    // our token is not renewed and will expire, for the reason in the message; the condition is True, because the server still answers
	ReasonUnauthorized     = "Unauthorized"  // the identity is revoked or expired
	ReasonUnreachable      = "Unreachable"   // the peer's API server does not answer; while traffic flows, Ready is True with this reason
	ReasonTunnelDown       = "TunnelDown"    // spec.inBand: the tunnel that leads to the peer's API server is down; the message has the remedy

	// Published
	ReasonUpToDate = "UpToDate" // the peer has our current NetworkConfig

	ReasonForbidden     = "Forbidden"     // the peer's RBAC or quota refuses us
	ReasonRefusedByPeer = "RefusedByPeer" // the peer's API server rejects our object as invalid
	ReasonNamespaceGone = "NamespaceGone" // the peer has no tenant namespace for us
	ReasonPublishing    = "Publishing"    // our NetworkConfig has not reached the peer yet

	// Answered, PeerConfigAccepted: the reason for which a NetworkConfig is refused (see below), or one of these
	ReasonAnswered      = "Answered"         // the NetworkConfig is answered, and the answer is in use
	ReasonWaitingAnswer = "WaitingForAnswer" // the other side has not answered yet
	ReasonWaitingPeer   = "WaitingForPeer"   // the peer has not published anything here yet
	ReasonPeerWithdrew  = "PeerWithdrew"     // the peer deleted its NetworkConfig: it un-peered
	ReasonAmbiguous     = "Ambiguous"        // the peer has more than one NetworkConfig here

	// TunnelEndpointReady
	ReasonAgreed  = "Agreed"  // both sides have answered
	ReasonInvalid = "Invalid" // the answers of the two sides contradict each other
	ReasonWaiting = "Waiting" // one side has not answered yet

	// Connected: the reasons of the condition Connected of a TunnelEndpoint, or one of these
	ReasonConnecting    = "Connecting"     // configured moments ago; no answer yet
	ReasonNoGateway     = "NoGateway"      // no gateway has written a status yet
	ReasonGatewaySilent = "GatewaySilent"  // no gateway is active, so the state of the tunnel is unknown
	ReasonLost          = "ConnectionLost" // the tunnel is down, and the gateway reports no reason (gateways of Liqo never report one)
	ReasonKeyMissed     = "KeyMissed"      // the tunnel is down, because the peer has not received the NetworkConfig with our new key
	ReasonNoKey         = "NoPresharedKey" // the tunnel is down, because spec.postQuantum is Required and there is no preshared key

	// ServicesShared: LocalSetup, Forbidden, RefusedByPeer, NamespaceGone, or one of these
	ReasonShared        = "Shared"        // each cluster has all services that the other cluster exports to it
	ReasonPartlyRefused = "PartlyRefused" // some services are not served or served only in part; the condition is True
	ReasonSharing       = "Sharing"       // sharing is not complete yet
	ReasonNotSupported  = "NotSupported"  // the peer does not accept services
)

// WaitReasons are reasons of conditions. A condition with such a reason only waits for an earlier
// condition.
var WaitReasons = []string{
	ReasonUnknown, ReasonPublishing, ReasonWaitingAnswer, ReasonWaitingPeer, ReasonWaiting, ReasonConnecting, ReasonNoGateway,
}

// Limited reports whether a condition is true, but its reason means a restriction or a risk.
func Limited(c *metav1.Condition) bool {
	return c.Status == metav1.ConditionTrue && (c.Reason == net.CauseNarrowPath || c.Reason == ReasonNotRenewed || c.Reason == ReasonUnreachable)
}
