// Package health evaluates the state of a cluster and its peerings, and finds the fault to repair
// first. Its input is the data that package inspect has read. Its output is a list of hops, each
// with a state, a reason and a remedy. It accesses neither an API server nor a clock.
//
//	Components, Holder, Nodes, Peerings ─► Hops ─► FirstBroken
//	Hops of both sides ─► Between ─► Diagnosis
package health

import (
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// HopState is the result of checking a hop.
type HopState string

const (
	Works   HopState = "works"
	Broken  HopState = "broken"
	Waits   HopState = "waits"   // an earlier hop is broken
	Unknown HopState = "unknown" // no object shows the state, or reading it is forbidden
	// Limited means that the hop works, but not fully. Later hops do not wait for it.
	Limited HopState = "limited"
)

// A Hop is a component, or a step of a peering, that must work before packets go both ways.
// `isthmus status` and `isthmus diagnose` use the same hops.
type Hop struct {
	Cluster string   `json:"cluster"`
	Peering string   `json:"peering,omitempty"` // empty: the hop belongs to the cluster, and all peerings need it
	Name    string   `json:"hop"`
	State   HopState `json:"state"`
	Reason  string   `json:"reason,omitempty"` // reason of the condition from which the hop was made
	// Text describes the state and, if it is broken, the remedy.
	Text string `json:"text"`
	// Source is the object from which the state was read. Since is when the author of that object
	// noticed the state, or nil if the time is unknown.
	Source string       `json:"source"`
	Since  *metav1.Time `json:"since,omitempty"`

	// FollowsGateway is true for a failure that the lack of an active gateway could explain: a
	// failure of the path to the gateway, or of agents that run but are not ready.
	FollowsGateway bool `json:"-"`
}

// NoneActive reports whether a hop of the gateway shows that no gateway is active.
func NoneActive(h *Hop) bool {
	return h.Name == HopGateway && (h.State == Broken || h.State == Waits) && !slices.Contains([]string{reasonSeveralActive, reasonNoneMarked, reasonServices}, h.Reason)
}

// ExcuseByGateway changes the state of broken hops with FollowsGateway. While no gateway is active,
// it changes them to Waits. Within AgentsLag after a takeover, it changes them to Unknown, because
// agents may not have noticed the new gateway.
func ExcuseByGateway(hops []Hop, gateway *Hop, now time.Time) {
	for i := range hops {
		switch h := &hops[i]; {
		case !h.FollowsGateway || h.State != Broken:
		case NoneActive(gateway):
			h.State, h.Text = Waits, "no active gateway can be reached; last known: "+h.Text
		case gateway.State == Works && gateway.Since != nil && now.Sub(gateway.Since.Time) < AgentsLag:
			h.State = Unknown
			h.Text = fmt.Sprintf("a gateway has been active only since %s, and route agents may not have noticed it yet; last known: %s",
				gateway.Since.UTC().Format(time.RFC3339), h.Text)
		}
	}
}

// Names of the hops of a cluster. StepNames has those of a peering.
const (
	HopManager = "manager"
	HopGateway = "gateway"
	HopStandby = "standby" // only if there should be a standby, and no gateway could take over
	HopNodes   = "nodes"   // only if a node is not ready
	HopAgents  = "route agents"
	HopKernels = "node problems" // only if an agent reports a problem
	HopRights  = "rights"        // rights of the ServiceAccounts of the three components
	HopClocks  = "clocks"        // only if a clock differs from the API server's
)

// LeaseHop evaluates a component by the Lease that the component renews.
func LeaseHop(cluster, name, lease string, h Holder, remedy string) Hop {
	hop := Hop{Cluster: cluster, Name: name, State: Works, Source: lease, Since: h.Since}
	switch {
	case h.Name != "":
		hop.Text = safetext.Of(h.Name) + " is active"
	case h.Absent && name == HopGateway: // the gateway is configured by files, or another program is the gateway
		hop.State, hop.Text = Unknown, h.Problem+", so no gateway of this cluster was ever elected; "+remedy
	default:
		hop.State, hop.Text = Broken, "no "+name+" is active: "+h.Problem+"; "+remedy
		// The manager writes the same reason into Peerings, usually earlier; see UpdateGateway.
		if name == HopGateway {
			hop.Reason = isthmus.ReasonGatewaySilent
		}
	}
	return hop
}

// UpdateGateway makes the gateway's hop broken if a Peering reports that no gateway is active. The
// manager notices earlier than this program that nobody renews the gateways' Lease, because the
// manager reads the Lease every few seconds, by a single clock.
func UpdateGateway(hops []Hop, p *isthmus.Peering) {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	if c == nil || c.Reason != isthmus.ReasonGatewaySilent {
		return
	}
	for i := range hops {
		if h := &hops[i]; h.Name == HopManager && h.State == Broken {
			return // without a manager the Peering is stale
		}
	}
	for i := range hops {
		if h := &hops[i]; h.Name == HopGateway && h.State == Works {
			h.State, h.Reason, h.Text, h.Since = Broken, safetext.Of(c.Reason), safetext.Cut(c.Message, safetext.Message), &c.LastTransitionTime
			h.Source = "condition Connected of Peering " + p.Name
			ExcuseByGateway(hops, h, time.Time{})
		}
	}
}

// StepNames maps the conditions of a Peering to the names of their hops.
var StepNames = map[string]string{
	isthmus.ConditionIdentity: "identity", isthmus.ConditionPublished: "publishing", isthmus.ConditionAnswered: "answer",
	isthmus.ConditionPeerConfig: "peer's networks", isthmus.ConditionTunnelEndpoint: "agreement", isthmus.ConditionConnected: "tunnel",
	isthmus.ConditionReady: "peering",
}

// followsWithdrawal are the reasons that our tunnel reports after the peer removed the tunnel. The
// peer removes it if our NetworkConfig is missing there.
var followsWithdrawal = []string{v1alpha1.CausePeerSilent, v1alpha1.CauseNoAnswer}

// followsSetup are the reasons that a Peering has when the peer lacks an object of its setup. Such
// an object is the tenant namespace, which contains the ServiceAccount of our identity.
var followsSetup = slices.Concat(isthmus.WaitReasons, followsWithdrawal, []string{
	isthmus.ReasonUnauthorized, isthmus.ReasonForbidden, isthmus.ReasonNamespaceGone, isthmus.ReasonPeerWithdrew, v1alpha1.ReasonNotPeered,
})

// PeeringHops returns the hops of one Peering, made from its conditions. clusterHops are the hops
// of the cluster itself. Without an active manager, all conditions are stale; without an active
// gateway, the tunnel's condition is stale.
func PeeringHops(cluster string, p *isthmus.Peering, clusterHops []Hop) (hops []Hop) {
	var manager, gateway *Hop
	for i := range clusterHops {
		switch {
		case clusterHops[i].Name == HopManager && clusterHops[i].State == Broken:
			manager = &clusterHops[i]
		case clusterHops[i].Name == HopGateway && clusterHops[i].State == Broken:
			gateway = &clusterHops[i]
		}
	}
	broken, refused, left := false, false, false
	ready := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady)
	lacking := ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == isthmus.ReasonLocalSetup
	for _, step := range append(slices.Clone(Steps), isthmus.ConditionReady) {
		hop := Hop{Cluster: cluster, Peering: p.Name, Name: StepNames[step], State: Works, Source: "condition " + step + " of Peering " + p.Name}
		condition := meta.FindStatusCondition(p.Status.Conditions, step)
		if condition == nil || max(condition.ObservedGeneration, p.Status.ObservedGeneration) < p.Generation {
			hop.State, hop.Text = Unknown, "the manager has not checked it yet"
			if manager != nil {
				hop.State = Waits
			}
		} else {
			hop.Reason, hop.Text, hop.Since = safetext.Of(condition.Reason), safetext.Cut(condition.Message, safetext.Message), &condition.LastTransitionTime
			switch {
			case manager != nil:
				hop.State, hop.Reason, hop.Text = Unknown, "", "no manager is active; last known: "+hop.Reason+": "+hop.Text
			case gateway != nil && (step == isthmus.ConditionConnected || step == isthmus.ConditionReady):
				hop.State, hop.Text = Waits, "unknown while no gateway is active"
			case isthmus.Limited(condition):
				if hop.State = Limited; step == isthmus.ConditionReady { // Ready only repeats an earlier condition
					continue
				}
			case condition.Status == metav1.ConditionTrue:
			case lacking && step != isthmus.ConditionReady: // only Ready has the cause; the faults of other conditions may be its consequences
				hop.State = Waits
			case step == isthmus.ConditionReady && broken: // Ready only repeats an earlier condition
				continue
			case condition.Status == metav1.ConditionUnknown || condition.Reason == isthmus.ReasonConnecting || broken && slices.Contains(isthmus.WaitReasons, condition.Reason):
				hop.State = Waits
				if !broken {
					hop.State = Unknown
				}
			case refused && step == isthmus.ConditionConnected && slices.Contains(followsWithdrawal, condition.Reason):
				hop.State = Waits
			case left && condition.Reason == isthmus.ReasonPeerWithdrew: // the same fault as NotPeered
				hop.State = Waits
			default:
				hop.State, broken = Broken, true
				left = left || condition.Reason == v1alpha1.ReasonNotPeered
				refused = refused || step == isthmus.ConditionPublished
			}
		}
		hops = append(hops, hop)
	}
	return hops
}

// FirstBroken returns the broken hop to repair first, or nil. Of the two hops of a tunnel, it
// returns the hop with the more specific reason. Faults of single nodes and faults of names come
// last, because no other hop depends on them.
func FirstBroken(hops []Hop) *Hop {
	var first *Hop
	for i := range hops {
		h := &hops[i]
		if h.State != Broken {
			continue
		}
		if first == nil || ranksLast(first) && !ranksLast(h) ||
			first.Name == h.Name && h.Name == StepNames[isthmus.ConditionConnected] && specificity(h.Reason) > specificity(first.Reason) {
			first = h
		}
	}
	return first
}

// OfNodes reports whether a hop is about single nodes.
func OfNodes(h *Hop) bool { return h.Name == HopNodes || h.Name == HopAgents || h.Name == HopKernels }

func ranksLast(h *Hop) bool { return OfNodes(h) || h.Name == HopNames }

// specificity ranks the reasons of a broken tunnel; the most specific reason ranks highest. The
// least specific reason is that a side receives nothing.
func specificity(reason string) int {
	return slices.Index([]string{
		isthmus.ReasonLost, v1alpha1.CauseNoAnswer, v1alpha1.CausePeerSilent, v1alpha1.CauseProbeUnanswered, v1alpha1.CauseAnswersLost,
		v1alpha1.CauseRangesDisagree, v1alpha1.CauseWrongKey, v1alpha1.CauseSendError, v1alpha1.CauseEndpointName, v1alpha1.CauseNotApplied, v1alpha1.CausePathMTU,
		isthmus.ReasonKeyMissed,
	}, reason)
}

// Steps are the conditions of a Peering in the order in which they become true.
var Steps = []string{
	isthmus.ConditionIdentity, isthmus.ConditionPublished, isthmus.ConditionAnswered,
	isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected,
}

// Names of the hops of services. They are last, because packets do not depend on them.
const (
	HopNames    = "names"    // hop of a cluster with services on
	HopServices = "services" // hop of a peering with services on
)
