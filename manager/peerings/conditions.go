package peerings

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// A condition is a condition of a Peering without its type and time.
type condition struct {
	status          metav1.ConditionStatus
	reason, message string
}

func yes(reason, message string) condition {
	return condition{metav1.ConditionTrue, reason, message}
}

func no(reason, format string, args ...any) condition {
	return condition{metav1.ConditionFalse, reason, fmt.Sprintf(format, args...)}
}

var unknown = condition{metav1.ConditionUnknown, isthmus.ReasonUnknown, "not checked yet"}

// peeringState has all inputs of a Peering's status.
type peeringState struct {
	peering  *isthmus.Peering
	self     v1alpha1.ClusterIdentity
	conflict string   // the reason why the Peering is ignored, or ""
	lacking  []string // reasons why we cannot publish our NetworkConfig
	overlaps []string // overlaps of the peer's networks here with networks that this cluster got later
	tenant   string   // the problem of the tenant namespace, or ""
	ending   bool     // the tenant namespace is being deleted

	identity, published condition                // from the replicator
	unreadable          condition                // status False if the API server here rejects the peer's answer; otherwise zero
	original            *v1alpha1.NetworkConfig  // ours; nil if there is none
	copies              []v1alpha1.NetworkConfig // NetworkConfigs of the peer; at most two are read
	endpoint            *v1alpha1.TunnelEndpoint // nil if there is none
	silent              string                   // the result of Liveness.Silent: the reason why no gateway is active, or ""
	waiting             string                   // objects that the deletion of the Peering waits for

	services servicesState
	key      keyState
	rotates  bool // whether our key rotates and peers get the next key

	allocation   ipam.Allocation     // allocation of the peer; zero: none
	translations [2]ipam.Translation // explanation of the peer's networks here; zero: the claim is refused
	unstored     *metav1.Condition   // condition Accepted of the peer's NetworkConfig, if the API server drops conditions; nil: it stores them, or we have not answered yet
	keyOwner     string              // the peer that owns a key in this peer's NetworkConfig, if we refuse the NetworkConfig because of that
}

// steps has the conditions on which Ready depends, in the order in which they become true.
var steps = []string{
	isthmus.ConditionIdentity, isthmus.ConditionPublished, isthmus.ConditionAnswered,
	isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected,
}

// statusFor computes the status of a Peering. Apart from times, it depends only on s.
func statusFor(s peeringState) isthmus.PeeringStatus {
	old := &s.peering.Status
	conditions := conditionsFor(s)
	status := isthmus.PeeringStatus{
		ObservedGeneration: s.peering.Generation,
		Conditions:         append([]metav1.Condition(nil), old.Conditions...),
	}
	for _, step := range append([]string{isthmus.ConditionReady}, steps...) {
		v := conditions[step]
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: step, Status: v.status, Reason: v.reason, Message: fit(v.message, maxMessage), ObservedGeneration: s.peering.Generation,
		})
	}
	if v := servicesCondition(s); v == nil {
		meta.RemoveStatusCondition(&status.Conditions, isthmus.ConditionServicesShared)
	} else {
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: isthmus.ConditionServicesShared, Status: v.status, Reason: v.reason, Message: fit(v.message, maxMessage), ObservedGeneration: s.peering.Generation,
		})
	}
	if s.conflict != "" {
		return status // the objects in the namespace belong to another Peering
	}
	if s.original != nil {
		status.Local = networksOf(s.original)
	}
	if len(s.copies) == 1 {
		status.Remote = remoteNetworks(s)
		status.Endpoint = endpointText(s.copies[0].Spec.EndpointIP, s.copies[0].Spec.BackendConfig)
	}
	status.PostQuantum = s.postQuantum()
	status.Keys = s.keys(old.Keys, metav1.Now())
	if s.endpoint != nil {
		status.Endpoint = endpointText(s.endpoint.Spec.EndpointIP, s.endpoint.Spec.BackendConfig)
		if s.silent == "" {
			status.Latency = s.endpoint.Status.Connection.Latency.Value
		}
	}
	return status
}

// remoteNetworks returns the peer's networks from our answer. If there is no answer, it returns
// those of the TunnelEndpoint.
func remoteNetworks(s peeringState) isthmus.Networks {
	n := networksOf(&s.copies[0])
	if te := s.endpoint; te != nil && n.PodCIDRSeen == "" {
		return isthmus.Networks{
			PodCIDR: te.Spec.RemotePodCIDR, PodCIDRSeen: seen(te.Spec.RemotePodCIDR, te.Spec.RemoteNATPodCIDR),
			ExternalCIDR: te.Spec.RemoteExternalCIDR, ExternalCIDRSeen: seen(te.Spec.RemoteExternalCIDR, te.Spec.RemoteNATExternalCIDR),
		}
	}
	n.PodCIDRWhy, n.ExternalCIDRWhy = s.reasonFor(0, n.PodCIDRSeen), s.reasonFor(1, n.ExternalCIDRSeen)
	return n
}

// conditionsFor computes Ready and the conditions in steps, by type.
func conditionsFor(s peeringState) map[string]condition {
	conditions := make(map[string]condition)
	if s.conflict != "" {
		for _, step := range steps {
			conditions[step] = condition{metav1.ConditionUnknown, isthmus.ReasonConflict, "this Peering is ignored, because it conflicts with another one"}
		}
		conditions[isthmus.ConditionReady] = no(isthmus.ReasonConflict, "%s", s.conflict)
		return conditions
	}
	conditions[isthmus.ConditionIdentity] = identityCondition(s)
	conditions[isthmus.ConditionPublished] = publishedCondition(s)
	conditions[isthmus.ConditionAnswered] = answeredCondition(s)
	conditions[isthmus.ConditionPeerConfig] = peerConfigCondition(s)
	conditions[isthmus.ConditionTunnelEndpoint] = tunnelEndpointCondition(s)
	conditions[isthmus.ConditionConnected] = connectedCondition(s)
	conditions[isthmus.ConditionReady] = readyCondition(s, conditions)
	return conditions
}

func readyCondition(s peeringState, conditions map[string]condition) condition {
	if !s.peering.DeletionTimestamp.IsZero() {
		return no(isthmus.ReasonUnpeering, "waiting for %s", cmp.Or(s.waiting, "the remaining objects to be removed"))
	}
	apart := "" // the reason why the clusters cannot exchange changes, or ""
	for _, step := range steps {
		v := conditions[step]
		switch {
		case v.status == metav1.ConditionTrue:
		case apart != "" && step == isthmus.ConditionPublished:
		case v.status == metav1.ConditionUnknown && (step == isthmus.ConditionIdentity || step == isthmus.ConditionPublished) && carries(conditions) &&
			meta.IsStatusConditionTrue(s.peering.Status.Conditions, isthmus.ConditionReady): // the replicator has not checked again yet, so Ready stays True
		case step == isthmus.ConditionIdentity && v.reason == isthmus.ReasonUnreachable && carries(conditions):
			apart = v.message
		case len(s.lacking) > 0: // a problem of our setup may be the cause of the other problems
			return no(isthmus.ReasonLocalSetup, "%s", strings.Join(s.lacking, "; "))
		case v.reason == isthmus.ReasonGatewaySilent:
			return v
		case step == isthmus.ConditionAnswered && v.reason == isthmus.ReasonPeerWithdrew: // the condition PeerConfigAccepted has more details
		default:
			return no(v.reason, "%s: %s", step, v.message)
		}
	}
	if len(s.overlaps) > 0 {
		return no(isthmus.ReasonOverlap, "%s", s.refused(s.peerName()+" has networks that overlap addresses of this cluster: ", strings.Join(s.overlaps, "; "),
			"remove the overlap, or give the peer other networks: isthmus unpeer "+s.peering.Name+", then isthmus peer"))
	}
	if v := conditions[isthmus.ConditionConnected]; v.reason == v1alpha1.CauseNarrowPath {
		return v
	}
	if apart != "" {
		return yes(isthmus.ReasonUnreachable, "traffic flows, but the clusters cannot exchange changes: "+apart)
	}
	return yes(isthmus.ReasonConnected, "traffic can flow")
}

// carries reports whether the tunnel carries packets as both sides agreed. It ignores whether the
// API servers are reachable.
func carries(conditions map[string]condition) bool {
	return conditions[isthmus.ConditionTunnelEndpoint].status == metav1.ConditionTrue && conditions[isthmus.ConditionConnected].status == metav1.ConditionTrue
}

// identityCondition computes the condition IdentityReady. If the peer's API server is reached in
// band and does not answer, the message explains the state of the tunnel.
func identityCondition(s peeringState) condition {
	connected := connectedCondition(s)
	if !s.peering.Spec.InBand || s.identity.reason != isthmus.ReasonUnreachable {
		return s.identity
	}
	if len(s.copies) == 1 && s.copies[0].Spec.BackendConfig[v1alpha1.ConfigInBand] != "true" { // the TunnelEndpoint may be older than this NetworkConfig
		return no(isthmus.ReasonUnreachable, "spec.inBand: the peer's NetworkConfig does not confirm that its Peering has spec.inBand, too (Liqo never does), so our gateway does not connect the managers; run `isthmus peer --in-band` for both clusters, or remove spec.inBand")
	}
	if connected.status == metav1.ConditionTrue {
		return s.identity
	}
	const again = "run `isthmus peer --in-band` for both clusters again, which copies the change"
	if s.endpoint == nil && s.withdrew() {
		return no(isthmus.ReasonTunnelDown, "the peer has un-peered, which closed the tunnel to its API server; run isthmus unpeer %s, or `isthmus peer --in-band` for both clusters again", s.peering.Name)
	}
	if s.published.status == metav1.ConditionFalse {
		return no(isthmus.ReasonTunnelDown, "our NetworkConfig has changed, but the tunnel that carries changes to the peer is down (%s); if it does not recover, "+again, connected.message)
	}
	return no(isthmus.ReasonTunnelDown, "the peer's API server is reached through the tunnel, which is down (%s); if a gateway's address or key has changed since, "+again, connected.message)
}

func publishedCondition(s peeringState) condition {
	switch {
	case s.original != nil && s.original.DeletionTimestamp.IsZero():
		return s.published
	case len(s.lacking) > 0:
		return no(isthmus.ReasonPublishing, "nothing to publish yet: %s", strings.Join(s.lacking, "; "))
	case s.original != nil:
		return no(isthmus.ReasonPublishing, "our NetworkConfig is being deleted")
	}
	return no(isthmus.ReasonPublishing, "our NetworkConfig is not written yet")
}

// answeredCondition evaluates the peer's answer, which the replicator copied back. The message of
// the condition may quote the peer.
func answeredCondition(s peeringState) condition {
	original := s.original
	switch {
	case original == nil:
		return no(isthmus.ReasonWaitingAnswer, "our NetworkConfig is not written yet")
	case s.unreadable.status == metav1.ConditionFalse:
		return no(s.unreadable.reason, "%s", s.refusedByPeer("answers", s.unreadable.message, "the peer's manager must answer with networks of the same length"))
	}
	accepted := meta.FindStatusCondition(original.Status.Conditions, v1alpha1.ConditionAccepted)
	switch n := networksOf(original); {
	case accepted != nil && accepted.Status == metav1.ConditionFalse:
		reason := knownReason(accepted.Reason)
		return no(reason, "%s", s.refusedByPeer("refuses", accepted.Message, s.remedyAtPeer(reason)))
	case !original.Status.Processed:
		return no(isthmus.ReasonWaitingAnswer, "the peer has not answered our NetworkConfig yet")
	case s.withdrew():
		return condition{metav1.ConditionUnknown, isthmus.ReasonPeerWithdrew,
			fmt.Sprintf("the peer mapped our PodCIDR %s to %s before it un-peered", n.PodCIDR, n.PodCIDRSeen)}
	default:
		return yes(isthmus.ReasonAnswered, fmt.Sprintf("the peer maps our PodCIDR %s to %s", n.PodCIDR, n.PodCIDRSeen))
	}
}

func peerConfigCondition(s peeringState) condition {
	switch {
	case len(s.copies) > 1:
		return no(isthmus.ReasonAmbiguous, "%s", s.refused(s.peerName(), " has more than one NetworkConfig in namespace "+s.peering.Spec.TenantNamespace.Local,
			s.remedyHere(&s.copies[0], v1alpha1.ReasonAmbiguous)))
	case len(s.copies) == 1 && s.copies[0].DeletionTimestamp.IsZero():
		return acceptedCondition(s)
	case s.tenant != "": // no NetworkConfig can arrive here
		return no(isthmus.ReasonWaitingPeer, "%s", s.tenant)
	case s.withdrew():
		return no(isthmus.ReasonPeerWithdrew, "%s has deleted its NetworkConfig in namespace %s: it un-peered, or its tenant namespace was deleted; run isthmus unpeer %s, or isthmus peer for both clusters",
			s.peerName(), s.peering.Spec.TenantNamespace.Local, s.peering.Name)
	}
	return no(isthmus.ReasonWaitingPeer, "the peer has not published its NetworkConfig in namespace %s yet", s.peering.Spec.TenantNamespace.Local)
}

func acceptedCondition(s peeringState) condition {
	nc := &s.copies[0]
	accepted := cmp.Or(meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted), s.unstored)
	switch {
	case accepted == nil:
		return no(isthmus.ReasonWaitingAnswer, "the peer's NetworkConfig is not answered yet")
	case accepted.Status != metav1.ConditionTrue || !nc.Status.Processed:
		reason := knownReason(accepted.Reason) // under Liqo's RBAC, the peer may have written the reason itself
		return no(reason, "%s", s.refusedPeer(nc, reason, accepted.Message))
	case accepted.ObservedGeneration != nc.Generation && !s.inForceAsSeen(nc):
		return no(isthmus.ReasonWaitingAnswer, "the peer's NetworkConfig has changed; the new version is not answered yet")
	default:
		return yes(isthmus.ReasonAnswered, s.standingText())
	}
}

// inForceAsSeen reports whether the answer in a copy fits the present claim and the networks
// allocated for the peer. An answer to an older claim does not fit.
func (s peeringState) inForceAsSeen(nc *v1alpha1.NetworkConfig) bool {
	pod, external, answered := fabric.SeenBy(nc)
	return answered && s.allocation == ipam.Allocation{Pod: pod, External: external}
}

// withdrew reports whether the peer's NetworkConfig existed here and is now deleted or being
// deleted.
func (s peeringState) withdrew() bool {
	return len(s.copies) == 1 && !s.copies[0].DeletionTimestamp.IsZero() || len(s.copies) == 0 && hadPeerConfig(s.peering)
}

// hadPeerConfig reports whether a NetworkConfig of the peer has ever existed, which the condition
// PeerConfigAccepted records.
func hadPeerConfig(p *isthmus.Peering) bool {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionPeerConfig)
	if c == nil {
		return false
	}
	switch c.Reason {
	case isthmus.ReasonWaitingPeer, isthmus.ReasonUnknown, isthmus.ReasonConflict:
		return false
	}
	return true
}

func tunnelEndpointCondition(s peeringState) condition {
	if s.original == nil || len(s.copies) != 1 || !s.original.Status.Processed || !s.copies[0].Status.Processed {
		if s.endpoint != nil {
			return no(isthmus.ReasonWaiting, "the TunnelEndpoint still has the previous networks; waiting for the exchange of NetworkConfigs")
		}
		return no(isthmus.ReasonWaiting, "waiting for the exchange of NetworkConfigs")
	}
	want, problems := fabric.TunnelEndpointFor(s.original, &s.copies[0], s.peering.Spec.Cluster)
	switch {
	case len(problems) > 0:
		return no(isthmus.ReasonInvalid, "%s", s.refused("our NetworkConfig and that of "+s.peerName()+" contradict each other: ", problems[0].Error(),
			fmt.Sprintf("set spec.overrides of the Peerings, or isthmus unpeer %s", s.peering.Name)))
	case s.endpoint == nil:
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint is not written yet")
	case !s.endpoint.DeletionTimestamp.IsZero():
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint is being deleted")
	case !equality.Semantic.DeepEqual(s.endpoint.Spec, want):
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint does not have the agreed networks yet")
	}
	return yes(isthmus.ReasonAgreed, "both sides agree")
}

// silentCauses are the causes that only mean that no packet arrives.
var silentCauses = []string{v1alpha1.CauseConnecting, v1alpha1.CauseNoAnswer, v1alpha1.CausePeerSilent}

func connectedCondition(s peeringState) condition {
	te := s.endpoint
	if te == nil {
		return no(isthmus.ReasonWaiting, "there is no TunnelEndpoint yet")
	}
	if s.silent != "" { // the status of the TunnelEndpoint is outdated
		return condition{metav1.ConditionUnknown, isthmus.ReasonGatewaySilent, s.silent}
	}
	if s.key.required && s.key.use == "" {
		return no(isthmus.ReasonNoKey, "spec.postQuantum is Required, and there is no preshared key: %s; the tunnel stays down until there is one", s.key.why())
	}
	endpoint := endpointText(te.Spec.EndpointIP, te.Spec.BackendConfig)
	accepted := meta.FindStatusCondition(te.Status.Conditions, v1alpha1.ConditionAccepted)
	because := reasonOf(&te.Status)
	switch c := te.Status.Connection; {
	case accepted != nil && accepted.Status == metav1.ConditionFalse:
		return no(isthmus.ReasonInvalid, "%s", sentence(fmt.Sprintf("the gateway refuses TunnelEndpoint %s/%s of %s: ", te.Namespace, te.Name, s.peerName()),
			accepted.Message, "it carries no traffic for this peer; run isthmus unpeer "+s.peering.Name+", or un-peer the other peer with the same value"))
	case because != nil && because.Reason == v1alpha1.CauseWrongKey && s.missedKey():
		return no(because.Reason, "%s; the key of our gateway rotated, and %s had no session with the new one when the rotation ended", because.Message, s.peerName())
	case s.missedKey() && s.published.status != metav1.ConditionTrue && (because == nil || slices.Contains(silentCauses, because.Reason)):
		return no(isthmus.ReasonKeyMissed, "the key of our gateway rotated, and %s did not use the new one when the rotation ended; the tunnel is down until its manager reads our NetworkConfig", s.peerName())
	case because != nil:
		return condition{because.Status, because.Reason, because.Message}
	case c.Status == v1alpha1.Connected && s.key.required && exchange.PresharedIn(te) == "":
		return no(isthmus.ReasonNoKey, "spec.postQuantum is Required, but the gateway reports a session without a preshared key; if the problem lasts longer than three minutes, upgrade the gateways, because older versions use no preshared key")
	case c.Status == v1alpha1.Connected && s.key.fieldsProblem() != "":
		return yes(isthmus.ReasonConnected, "the gateway receives answers from the peer; "+s.key.fieldsProblem())
	case c.Status == v1alpha1.Connected:
		return yes(isthmus.ReasonConnected, "the gateway receives answers from the peer")
	case c.Status == v1alpha1.Connecting:
		return no(isthmus.ReasonConnecting, "the gateway waits for the peer at %s", endpoint)
	case c.Status == v1alpha1.ConnectionError:
		return no(isthmus.ReasonLost, "the gateway receives no answers from %s at %s: %s", s.peerName(), endpoint, plain(c.StatusMessage))
	}
	return no(isthmus.ReasonNoGateway, "no gateway has written a status of the TunnelEndpoint yet")
}

// reasonOf returns the condition with the reason why the tunnel is not connected or is limited. It
// returns nil if the gateway reports no reason. A gateway of an older version only writes
// status.connection and leaves an existing condition unchanged. So the condition counts only if its
// message equals that of status.connection.
func reasonOf(status *v1alpha1.TunnelEndpointStatus) *metav1.Condition {
	c := meta.FindStatusCondition(status.Conditions, v1alpha1.ConditionConnected)
	if c == nil || !slices.Contains(v1alpha1.Causes, c.Reason) || c.Reason == v1alpha1.CauseConnected ||
		(c.Status == metav1.ConditionTrue) != v1alpha1.Carries(c.Reason) || c.Message != status.Connection.StatusMessage {
		return nil
	}
	return c
}

// networksOf returns the networks of the sender of nc, and the networks in the receiver's answer.
func networksOf(nc *v1alpha1.NetworkConfig) isthmus.Networks {
	n := isthmus.Networks{PodCIDR: nc.Spec.PodCIDR, ExternalCIDR: nc.Spec.ExternalCIDR}
	if nc.Status.Processed {
		n.PodCIDRSeen, n.ExternalCIDRSeen = seen(n.PodCIDR, nc.Status.PodCIDRNAT), seen(n.ExternalCIDR, nc.Status.ExternalCIDRNAT)
	}
	return n
}

func seen(own, nat string) string {
	if nat == v1alpha1.None {
		return own
	}
	return nat
}

func endpointText(host string, config v1alpha1.BackendConfig) string {
	return net.JoinHostPort(host, config[v1alpha1.ConfigPort])
}

// plain makes text from another cluster safe to use in a message. It also shortens the text.
func plain(s string) string {
	const limit = 500
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
	if runes := []rune(s); len(runes) > limit {
		s = string(runes[:limit]) + "..."
	}
	return s
}
