// Package health says what works in a cluster and with its peers, and what to mend first: facts that
// package peering has read go in, hops with a state, a reason and a remedy come out. It reads neither
// API server nor clock.
//
//	Components, Holder, Nodes, Peerings ─► Hops ─► FirstBroken
//	Hops of both sides ─► Between ─► Diagnosis
package health

import (
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// HopState is what was found out about a hop.
type HopState string

const (
	Works   HopState = "works"
	Broken  HopState = "broken"
	Waits   HopState = "waits"   // for a hop before it, which is broken
	Unknown HopState = "unknown" // nobody has said, or nobody may be asked
	// Limited: it works, and less than it should. Nothing after it waits for it.
	Limited HopState = "limited"
)

// A Hop is one thing that has to work so that packets go both ways. `isthmus status` and `isthmus
// diagnose` judge by the same hops.
type Hop struct {
	Cluster string   `json:"cluster"`
	Peering string   `json:"peering,omitempty"` // empty: of the cluster, for all peerings
	Name    string   `json:"hop"`
	State   HopState `json:"state"`
	Reason  string   `json:"reason,omitempty"` // of the condition that says so
	// Text is what was seen, and what to do where it is broken.
	Text string `json:"text"`
	// Source is who says so, and Since is since when, if that is known.
	Source string       `json:"source"`
	Since  *metav1.Time `json:"since,omitempty"`

	// FollowsGateway: only the way to the gateway is broken, which follows where no gateway is active.
	FollowsGateway bool `json:"-"`
}

// NoneAtWork reports whether a hop of the gateway says that none is at work.
func NoneAtWork(h *Hop) bool {
	return h.Name == HopGateway && (h.State == Broken || h.State == Waits) && !slices.Contains([]string{reasonSeveralActive, reasonNoneMarked, reasonServices}, h.Reason)
}

// WithoutGateway has the hops wait that are broken because no gateway is active.
func WithoutGateway(hops []Hop) {
	for i := range hops {
		if h := &hops[i]; h.FollowsGateway && h.State == Broken {
			h.State, h.Text = Waits, "the gateway is not reached, because none is active"
		}
	}
}

// Names of the hops of a cluster; those of a peering are the types of its conditions.
const (
	HopManager = "manager"
	HopGateway = "gateway"
	HopStandby = "standby" // only where there should be one, and none could take over
	HopNodes   = "nodes"   // only where one is not ready
	HopAgents  = "route agents"
	HopKernels = "node problems" // only where an agent says that something is not as it should be
	HopRights  = "rights"        // of the ServiceAccounts of the three
	HopClocks  = "clocks"        // only where one differs from the API server's
)

// LeaseHop judges a component by the Lease that it renews.
func LeaseHop(cluster, name, lease string, h Holder, remedy string) Hop {
	hop := Hop{Cluster: cluster, Name: name, State: Works, Source: lease, Since: h.since}
	switch {
	case h.Name != "":
		hop.Text = safetext.Of(h.Name) + " is active"
	case h.Absent && name == HopGateway: // it is configured by files, or not ours
		hop.State, hop.Text = Unknown, h.Problem+", so that no gateway of this cluster was ever elected; "+remedy
	default:
		hop.State, hop.Text = Broken, "no "+name+" is active: "+h.Problem+"; "+remedy
		if name == HopGateway { // the word that the manager has for it, which knows it earlier
			hop.Reason = isthmus.ReasonGatewaySilent
		}
	}
	return hop
}

// Heed takes over from a Peering what the manager knows of the gateways: it looks at their Lease
// every few seconds and by one clock, and knows earlier that nobody renews it.
func Heed(own []Hop, p *isthmus.Peering) {
	c := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionConnected)
	if c == nil || c.Reason != isthmus.ReasonGatewaySilent {
		return
	}
	for i := range own {
		if h := &own[i]; h.Name == HopManager && h.State == Broken {
			return // then it is a memory
		}
	}
	for i := range own {
		if h := &own[i]; h.Name == HopGateway && h.State == Works {
			h.State, h.Reason, h.Text, h.Since = Broken, safetext.Of(c.Reason), safetext.Cut(c.Message, safetext.Message), &c.LastTransitionTime
			h.Source = "condition Connected of Peering " + p.Name
			WithoutGateway(own)
		}
	}
}

// StepNames are the conditions of a Peering as hops.
var StepNames = map[string]string{
	isthmus.ConditionIdentity: "identity", isthmus.ConditionPublished: "publishing", isthmus.ConditionAnswered: "answer",
	isthmus.ConditionPeerConfig: "peer's networks", isthmus.ConditionTunnelEndpoint: "agreement", isthmus.ConditionConnected: "tunnel",
	isthmus.ConditionReady: "peering",
}

// followsWithdrawal are the reasons of a tunnel that a peer has taken down because it has no
// NetworkConfig of ours any more.
var followsWithdrawal = []string{v1alpha1.CausePeerSilent, v1alpha1.CauseNoAnswer}

// followsSetup are the reasons of a Peering whose peer lacks something, such as the tenant namespace with the
// account of our identity.
var followsSetup = slices.Concat(isthmus.WaitReasons, followsWithdrawal, []string{
	isthmus.ReasonUnauthorized, isthmus.ReasonForbidden, isthmus.ReasonNamespaceGone, isthmus.ReasonPeerWithdrew, v1alpha1.ReasonNotPeered,
})

// PeeringHops are those of one Peering, by its conditions. before are the cluster's: where the
// manager is gone, what a condition says is a memory, and where no gateway is active, what that of
// the tunnel says.
func PeeringHops(cluster string, p *isthmus.Peering, before []Hop) (hops []Hop) {
	var manager, gateway *Hop
	for i := range before {
		switch {
		case before[i].Name == HopManager && before[i].State == Broken:
			manager = &before[i]
		case before[i].Name == HopGateway && before[i].State == Broken:
			gateway = &before[i]
		}
	}
	broken, refused, left := false, false, false
	ready := meta.FindStatusCondition(p.Status.Conditions, isthmus.ConditionReady)
	lacking := ready != nil && ready.Status == metav1.ConditionFalse && ready.Reason == isthmus.ReasonLocalSetup
	for _, step := range append(slices.Clone(Steps), isthmus.ConditionReady) {
		hop := Hop{Cluster: cluster, Peering: p.Name, Name: StepNames[step], State: Works, Source: "condition " + step + " of Peering " + p.Name}
		condition := meta.FindStatusCondition(p.Status.Conditions, step)
		if condition == nil || max(condition.ObservedGeneration, p.Status.ObservedGeneration) < p.Generation {
			hop.State, hop.Text = Unknown, "the manager has not looked at it yet"
			if manager != nil {
				hop.State = Waits
			}
		} else {
			hop.Reason, hop.Text, hop.Since = safetext.Of(condition.Reason), safetext.Cut(condition.Message, safetext.Message), &condition.LastTransitionTime
			switch {
			case manager != nil:
				hop.State, hop.Text = Unknown, "nobody keeps it up to date; it was: "+hop.Reason+": "+hop.Text
			case gateway != nil && (step == isthmus.ConditionConnected || step == isthmus.ConditionReady):
				hop.State, hop.Text = Waits, "no gateway is active, so that nobody knows"
			case isthmus.Limited(condition):
				if hop.State = Limited; step == isthmus.ConditionReady { // it repeats what is said already
					continue
				}
			case condition.Status == metav1.ConditionTrue:
			case lacking && step != isthmus.ConditionReady: // Ready says what this cluster lacks, and the rest may follow from that
				hop.State = Waits
			case step == isthmus.ConditionReady && broken: // it repeats what is said already
				continue
			case condition.Status == metav1.ConditionUnknown || condition.Reason == isthmus.ReasonConnecting || broken && slices.Contains(isthmus.WaitReasons, condition.Reason):
				hop.State = Waits
				if !broken {
					hop.State = Unknown
				}
			case refused && step == isthmus.ConditionConnected && slices.Contains(followsWithdrawal, condition.Reason):
				hop.State = Waits
			case left && condition.Reason == isthmus.ReasonPeerWithdrew: // the same in other words
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

// FirstBroken is the first hop that is broken, nil for none: the one to act on. Where several say
// something of the tunnels between two clusters, it is the one that knows most. What is broken on
// some nodes only comes last, and so do names: they break nothing else.
func FirstBroken(hops []Hop) *Hop {
	var first *Hop
	for i := range hops {
		h := &hops[i]
		if h.State != Broken {
			continue
		}
		if first == nil || comesLast(first) && !comesLast(h) ||
			first.Name == h.Name && h.Name == StepNames[isthmus.ConditionConnected] && telling(h.Reason) > telling(first.Reason) {
			first = h
		}
	}
	return first
}

// OfNodes reports whether a hop is about nodes one by one.
func OfNodes(h *Hop) bool { return h.Name == HopNodes || h.Name == HopAgents || h.Name == HopKernels }

func comesLast(h *Hop) bool { return OfNodes(h) || h.Name == HopNames }

// telling is how much a reason of the tunnel says about what to mend: whoever hears nothing knows
// least.
func telling(reason string) int {
	return slices.Index([]string{
		isthmus.ReasonLost, v1alpha1.CauseNoAnswer, v1alpha1.CausePeerSilent, v1alpha1.CauseProbeUnanswered, v1alpha1.CauseAnswersLost,
		v1alpha1.CauseRangesDisagree, v1alpha1.CauseWrongKey, v1alpha1.CauseSendError, v1alpha1.CauseEndpointName, v1alpha1.CauseNotApplied, v1alpha1.CausePathMTU,
		isthmus.ReasonKeyMissed,
	}, reason)
}

// Steps are the conditions in the order in which they become true.
var Steps = []string{
	isthmus.ConditionIdentity, isthmus.ConditionPublished, isthmus.ConditionAnswered,
	isthmus.ConditionPeerConfig, isthmus.ConditionTunnelEndpoint, isthmus.ConditionConnected,
}

// Names of the hops of services. They come after all others: packets need none of them.
const (
	HopNames    = "names"    // of a cluster, where services are on
	HopServices = "services" // of a peering, where services are on
)
