package manager

import (
	"cmp"
	"fmt"
	"net"
	"strings"
	"unicode"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// A verdict is a condition without its type and time.
type verdict struct {
	status          metav1.ConditionStatus
	reason, message string
}

func yes(reason, message string) verdict {
	return verdict{metav1.ConditionTrue, reason, message}
}

func no(reason, format string, args ...any) verdict {
	return verdict{metav1.ConditionFalse, reason, fmt.Sprintf(format, args...)}
}

var unknown = verdict{metav1.ConditionUnknown, isthmus.ReasonUnknown, "not looked at yet"}

// peeringState is everything that the status of a Peering is made from.
type peeringState struct {
	peering  *isthmus.Peering
	conflict string   // why nobody is joined because of it, or ""
	lacking  []string // what keeps us from publishing
	overlaps []string // of the peer's networks, as used here, with something of ours that came later
	ending   bool     // the tenant namespace is being deleted

	identity, published verdict                  // from the replicator
	unreadable          verdict                  // False when the API server here does not take the peer's answer; else zero
	original            *v1alpha1.NetworkConfig  // ours, nil when there is none
	copies              []v1alpha1.NetworkConfig // the peer's; two stand for many
	endpoint            *v1alpha1.TunnelEndpoint // nil when there is none
	silent              string                   // since when no gateway is at work; empty while one is
	waiting             string                   // what a Peering that is being deleted waits for
}

// steps are the conditions in the order in which they become true, without Ready.
var steps = []string{
	isthmus.ConditionIdentity, isthmus.ConditionPublished, isthmus.ConditionAnswered,
	isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected,
}

// statusFor decides the status of a Peering. Times apart, it is a function of s.
func statusFor(s peeringState) isthmus.PeeringStatus {
	old := &s.peering.Status
	verdicts := verdictsFor(s)
	status := isthmus.PeeringStatus{
		ObservedGeneration: s.peering.Generation,
		Conditions:         append([]metav1.Condition(nil), old.Conditions...),
	}
	for _, step := range append([]string{isthmus.ConditionReady}, steps...) {
		v := verdicts[step]
		meta.SetStatusCondition(&status.Conditions, metav1.Condition{
			Type: step, Status: v.status, Reason: v.reason, Message: v.message, ObservedGeneration: s.peering.Generation,
		})
	}
	if s.conflict != "" {
		return status // what lies in the namespace is another Peering's
	}
	if s.original != nil {
		status.Local = networksOf(s.original)
	}
	if len(s.copies) == 1 {
		status.Remote = networksOf(&s.copies[0])
		status.Endpoint = endpointText(s.copies[0].Spec.EndpointIP, s.copies[0].Spec.BackendConfig)
	}
	if s.endpoint != nil {
		status.Endpoint = endpointText(s.endpoint.Spec.EndpointIP, s.endpoint.Spec.BackendConfig)
		if s.silent == "" {
			status.Latency = s.endpoint.Status.Connection.Latency.Value
		}
	}
	return status
}

// verdictsFor decides the conditions, by their types.
func verdictsFor(s peeringState) map[string]verdict {
	verdicts := make(map[string]verdict)
	if s.conflict != "" {
		for _, step := range steps {
			verdicts[step] = verdict{metav1.ConditionUnknown, isthmus.ReasonConflict, "nothing is done for this Peering"}
		}
		verdicts[isthmus.ConditionReady] = no(isthmus.ReasonConflict, "%s", s.conflict)
		return verdicts
	}
	verdicts[isthmus.ConditionIdentity] = s.identity
	verdicts[isthmus.ConditionPublished] = publishedVerdict(s)
	verdicts[isthmus.ConditionAnswered] = answeredVerdict(s)
	verdicts[isthmus.ConditionPeerConfig] = peerConfigVerdict(s)
	verdicts[isthmus.ConditionTunnelEndpoint] = tunnelEndpointVerdict(s)
	verdicts[isthmus.ConditionConnected] = connectedVerdict(s)
	verdicts[isthmus.ConditionReady] = readyVerdict(s, verdicts)
	return verdicts
}

func readyVerdict(s peeringState, verdicts map[string]verdict) verdict {
	if !s.peering.DeletionTimestamp.IsZero() {
		return no(isthmus.ReasonUnpeering, "waiting for %s", cmp.Or(s.waiting, "the rest to be removed"))
	}
	for _, step := range steps {
		v := verdicts[step]
		switch {
		case v.status == metav1.ConditionTrue:
		case len(s.lacking) > 0: // the first cause; without it the others may be fine
			return no(isthmus.ReasonLocalSetup, "%s", strings.Join(s.lacking, "; "))
		case v.reason == isthmus.ReasonGatewaySilent:
			return v
		default:
			return no(isthmus.ReasonNotReady, "%s: %s", step, v.message)
		}
	}
	if len(s.overlaps) > 0 {
		return no(isthmus.ReasonOverlap, "%s; un-peer and peer again for other networks", strings.Join(s.overlaps, "; "))
	}
	return yes(isthmus.ReasonConnected, "traffic can flow")
}

func publishedVerdict(s peeringState) verdict {
	switch {
	case s.original != nil && s.original.DeletionTimestamp.IsZero():
		return s.published
	case len(s.lacking) > 0:
		return no(isthmus.ReasonPublishing, "there is nothing to publish yet: %s", strings.Join(s.lacking, "; "))
	case s.original != nil:
		return no(isthmus.ReasonPublishing, "our NetworkConfig is being deleted")
	}
	return no(isthmus.ReasonPublishing, "our NetworkConfig is not written yet")
}

// answeredVerdict reads the answer that the peer wrote and the replicator brought back. Its words
// are the peer's.
func answeredVerdict(s peeringState) verdict {
	original := s.original
	switch {
	case original == nil:
		return no(isthmus.ReasonWaitingAnswer, "our NetworkConfig is not written yet")
	case s.unreadable.status == metav1.ConditionFalse:
		return s.unreadable
	}
	accepted := meta.FindStatusCondition(original.Status.Conditions, v1alpha1.ConditionAccepted)
	switch n := networksOf(original); {
	case accepted != nil && accepted.Status == metav1.ConditionFalse:
		return no(cmp.Or(accepted.Reason, v1alpha1.ReasonInvalid), "the peer refuses our NetworkConfig: %s", plain(accepted.Message))
	case !original.Status.Processed:
		return no(isthmus.ReasonWaitingAnswer, "the peer has not answered our NetworkConfig yet")
	default:
		return yes(isthmus.ReasonAnswered, fmt.Sprintf("the peer sees our pods %s as %s", n.PodCIDR, n.PodCIDRSeen))
	}
}

func peerConfigVerdict(s peeringState) verdict {
	switch {
	case len(s.copies) > 1:
		return no(isthmus.ReasonAmbiguous, "there is more than one NetworkConfig of the peer in namespace %s; one has to go", s.peering.Spec.TenantNamespace.Local)
	case len(s.copies) == 1 && s.copies[0].DeletionTimestamp.IsZero():
		return acceptedVerdict(&s.copies[0])
	case len(s.copies) == 1 || hadPeerConfig(s.peering):
		return no(isthmus.ReasonPeerWithdrew, "the peer has deleted its NetworkConfig here: it does not want to be joined any more")
	}
	return no(isthmus.ReasonWaitingPeer, "the peer has not published its NetworkConfig in namespace %s yet", s.peering.Spec.TenantNamespace.Local)
}

func acceptedVerdict(nc *v1alpha1.NetworkConfig) verdict {
	accepted := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
	switch n := networksOf(nc); {
	case accepted == nil:
		return no(isthmus.ReasonWaitingAnswer, "the NetworkConfig of the peer is here and not answered yet")
	case accepted.Status != metav1.ConditionTrue || !nc.Status.Processed:
		return no(cmp.Or(accepted.Reason, v1alpha1.ReasonInvalid), "the NetworkConfig of the peer is refused: %s", plain(accepted.Message))
	default:
		return yes(isthmus.ReasonAnswered, fmt.Sprintf("the peer's pods %s are %s here", n.PodCIDR, n.PodCIDRSeen))
	}
}

// hadPeerConfig reports whether a NetworkConfig of the peer was seen before: the condition
// remembers it.
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

func tunnelEndpointVerdict(s peeringState) verdict {
	if s.original == nil || len(s.copies) != 1 || !s.original.Status.Processed || !s.copies[0].Status.Processed {
		if s.endpoint != nil {
			return no(isthmus.ReasonWaiting, "the TunnelEndpoint is what was agreed upon before; waiting for the exchange of NetworkConfigs")
		}
		return no(isthmus.ReasonWaiting, "waiting for the exchange of NetworkConfigs")
	}
	want, problems := fabric.TunnelEndpointFor(s.original, &s.copies[0], s.peering.Spec.Cluster)
	switch {
	case len(problems) > 0:
		return no(isthmus.ReasonInvalid, "%s", problems[0].Error())
	case s.endpoint == nil:
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint is not written yet")
	case !s.endpoint.DeletionTimestamp.IsZero():
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint is being deleted")
	case !equality.Semantic.DeepEqual(s.endpoint.Spec, want):
		return no(isthmus.ReasonWaiting, "the TunnelEndpoint is not what both sides agreed upon yet")
	}
	return yes(isthmus.ReasonAgreed, "both sides agree")
}

func connectedVerdict(s peeringState) verdict {
	te := s.endpoint
	if te == nil {
		return no(isthmus.ReasonWaiting, "there is no TunnelEndpoint yet")
	}
	if s.silent != "" { // whatever the TunnelEndpoint says, it is from before
		return verdict{metav1.ConditionUnknown, isthmus.ReasonGatewaySilent, s.silent}
	}
	switch c := te.Status.Connection; c.Status {
	case v1alpha1.Connected:
		return yes(isthmus.ReasonConnected, "the gateway hears the peer")
	case v1alpha1.Connecting:
		return no(isthmus.ReasonConnecting, "the gateway waits for the peer at %s", endpointText(te.Spec.EndpointIP, te.Spec.BackendConfig))
	case v1alpha1.ConnectionError:
		return no(isthmus.ReasonLost, "the gateway does not hear the peer at %s: %s",
			endpointText(te.Spec.EndpointIP, te.Spec.BackendConfig), plain(c.StatusMessage))
	}
	return no(isthmus.ReasonNoGateway, "no gateway has taken up the TunnelEndpoint yet")
}

// networksOf returns the networks of the sender of nc, and as the receiver has answered.
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

// plain returns words of another cluster such that they fit into a message.
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
