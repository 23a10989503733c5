package peerings

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// The message of a refusal is one line with three parts: the requester and the request, with object
// and field; the networks in force in the meantime; the remedy. The request may quote the peer, and
// is shortened if the line is too long.

const (
	// maxMessage bounds the message of a condition, in octets. An Event's note may have 1024
	// octets, which include the name of the condition. The note about Ready also includes the name
	// of another condition.
	maxMessage = 1000
	maxRefusal = maxMessage - len(isthmus.ConditionTunnelEndpoint+": ")
	// maxWhy bounds status.remote.podCIDRWhy and externalCIDRWhy, in octets.
	maxWhy = 512
)

// fit shortens a text to the given number of octets.
func fit(s string, octets int) string {
	if len(s) <= octets {
		return s
	}
	return strings.ToValidUTF8(s[:max(0, octets-3)], "") + "..."
}

// peerName returns the peer's name and ID.
func (s *peeringState) peerName() string {
	c := s.peering.Spec.Cluster
	return fmt.Sprintf("%s (%s)", c.ClusterName, c.ClusterID)
}

// refused returns the message of our refusal of the peer.
func (s *peeringState) refused(requester, request, remedy string) string {
	tail := s.inForce()
	if remedy != "" {
		tail += "; " + remedy
	}
	return sentence(requester, request, tail)
}

// refusedByPeer returns the message of the peer's refusal of our networks.
func (s *peeringState) refusedByPeer(verb, request, remedy string) string {
	tail := "no networks are in force"
	if te := s.endpoint; te != nil && te.DeletionTimestamp.IsZero() {
		tail = fmt.Sprintf("in force: our podCIDR %s, our externalCIDR %s", asSeen(te.Spec.LocalPodCIDR, te.Spec.LocalNATPodCIDR),
			asSeen(te.Spec.LocalExternalCIDR, te.Spec.LocalNATExternalCIDR))
	}
	requester := fmt.Sprintf("%s %s our NetworkConfig %s/%s: ", s.peerName(), verb, s.original.Namespace, s.original.Name)
	return sentence(requester, request, tail+"; "+remedy)
}

// sentence joins the three parts of a message. It shortens request if the message would be too
// long.
func sentence(requester, request, tail string) string {
	return requester + fit(plain(request), maxRefusal-len(requester)-len("; ")-len(tail)) + "; " + tail
}

// inForce describes the peer's networks that are in force here.
func (s *peeringState) inForce() string {
	if te := s.endpoint; te != nil && te.DeletionTimestamp.IsZero() {
		return fmt.Sprintf("in force: its podCIDR %s, its externalCIDR %s", asSeen(te.Spec.RemotePodCIDR, te.Spec.RemoteNATPodCIDR),
			asSeen(te.Spec.RemoteExternalCIDR, te.Spec.RemoteNATExternalCIDR))
	}
	if s.allocation != (ipam.Allocation{}) {
		return fmt.Sprintf("no networks are in force; %v and %v are reserved for it here", s.allocation.Pod, s.allocation.External)
	}
	return "no networks are in force"
}

func asSeen(own, nat string) string { return own + " " + as(own, nat) }

func as(own, nat string) string {
	if nat == v1alpha1.None || nat == own {
		return "unchanged"
	}
	return "as " + nat
}

// standingText describes how this cluster translates the peer's networks, with the reasons.
func (s *peeringState) standingText() string {
	names, texts := [2]string{"podCIDR", "externalCIDR"}, [2]string{}
	n := networksOf(&s.copies[0])
	for i, seen := range [2][2]string{{n.PodCIDR, n.PodCIDRSeen}, {n.ExternalCIDR, n.ExternalCIDRSeen}} {
		texts[i] = "its " + names[i] + " " + asSeen(seen[0], seen[1])
		if why := s.reasonFor(i, seen[1]); why != "" {
			texts[i] += ", because " + why
		}
	}
	return "used here: " + strings.Join(texts[:], "; ")
}

// reasonFor returns the reason for the translation of a network of the peer. i is 0 for the PodCIDR
// and 1 for the ExternalCIDR. It returns "" if the IPAM state has changed since the answer.
func (s *peeringState) reasonFor(i int, seen string) string {
	if here := s.translations[i].Here; !here.IsValid() || here.String() != seen {
		return ""
	}
	return fit(s.translations[i].Why, maxWhy)
}

// refusedPeer returns a message with the reason why we refuse the NetworkConfig of the peer.
func (s *peeringState) refusedPeer(nc *v1alpha1.NetworkConfig, reason, problem string) string {
	what := fmt.Sprintf("%s requests in NetworkConfig %s/%s: ", s.peerName(), nc.Namespace, nc.Name)
	if changes := s.changes(nc); reason == v1alpha1.ReasonConsent && changes != "" {
		problem = changes
	}
	if s.keyOwner != "" && reason == v1alpha1.ReasonKeyConflict {
		problem += "; " + s.keyOwner
	}
	return s.refused(what, problem, s.remedyHere(nc, reason))
}

// changes describes each claimed network that differs from the network in force, and how this
// cluster would translate it.
func (s *peeringState) changes(nc *v1alpha1.NetworkConfig) string {
	had := [2]string{}
	if s.endpoint != nil {
		had = [2]string{s.endpoint.Spec.RemotePodCIDR, s.endpoint.Spec.RemoteExternalCIDR}
	}
	var all []string
	for i, n := range [2][2]string{{"spec.podCIDR", nc.Spec.PodCIDR}, {"spec.externalCIDR", nc.Spec.ExternalCIDR}} {
		would := s.translations[i]
		if had[i] == n[1] || !would.Here.IsValid() {
			continue
		}
		text := n[0] + " " + n[1]
		if had[i] != "" {
			text += " (until now " + had[i] + ")"
		}
		all = append(all, fmt.Sprintf("%s, which this cluster would use %s, because %s", text, as(would.Claim.String(), would.Here.String()), would.Why))
	}
	return strings.Join(all, "; ")
}

// remedyHere returns the remedy if we refuse the peer.
func (s *peeringState) remedyHere(nc *v1alpha1.NetworkConfig, reason string) string {
	peering, peer := s.peering.Name, s.peering.Spec.Cluster.ClusterName
	switch reason {
	case v1alpha1.ReasonConsent:
		return fmt.Sprintf("to agree: isthmus peer %s --consent %s,%s", peering, nc.Spec.PodCIDR, nc.Spec.ExternalCIDR)
	case v1alpha1.ReasonKeyConflict:
		return peer + " has to replace the key of its gateway: isthmus rotate-key --now there, or, if it runs Liqo, delete its Secret wireguard-pubkey and restart its gateway and its network manager"
	case v1alpha1.ReasonEndpoint:
		return fmt.Sprintf("%s has to publish another address: annotation %s of its gateway's Service, or spec.overrides.address of its Peering with us",
			peer, v1alpha1.AnnotationOverrideAddress)
	case v1alpha1.ReasonExhausted:
		return fmt.Sprintf("enlarge the pools (isthmus manager --pools), set spec.overrides of Peering %s, or un-peer another cluster", peering)
	case v1alpha1.ReasonCIDRConflict:
		return fmt.Sprintf("correct spec.overrides of Peering %s, or reserve the network (isthmus manager --reserved)", peering)
	case v1alpha1.ReasonAmbiguous:
		return "delete all but one of them"
	}
	return fmt.Sprintf("%s has to correct that field; to end the peering, run isthmus unpeer %s", peer, peering)
}

// remedyAtPeer returns the remedy if the peer refuses us.
func (s *peeringState) remedyAtPeer(reason string) string {
	peering, peer := s.peering.Name, s.peering.Spec.Cluster.ClusterName
	switch reason {
	case v1alpha1.ReasonConsent:
		return fmt.Sprintf("an administrator of %s has to agree: isthmus peer %s --consent %s,%s", peer, s.self.ClusterName, s.original.Spec.PodCIDR, s.original.Spec.ExternalCIDR)
	case v1alpha1.ReasonKeyConflict:
		return "replace the key of our gateway (isthmus rotate-key --now), or at " + peer + " un-peer the cluster that has the same key"
	case v1alpha1.ReasonEndpoint:
		return fmt.Sprintf("publish another address: annotation %s of our gateway's Service, or spec.overrides.address of Peering %s",
			v1alpha1.AnnotationOverrideAddress, peering)
	case v1alpha1.ReasonExhausted:
		return fmt.Sprintf("%s has to enlarge its pools (isthmus manager --pools), or to un-peer another cluster", peer)
	case v1alpha1.ReasonCIDRConflict:
		return fmt.Sprintf("%s has to correct spec.overrides of its Peering with us, or to reserve the network (isthmus manager --reserved)", peer)
	case v1alpha1.ReasonAmbiguous:
		return fmt.Sprintf("%s has to delete all but one of our NetworkConfigs in namespace %s", peer, s.peering.Spec.TenantNamespace.Remote)
	case v1alpha1.ReasonNotPeered, v1alpha1.ReasonWrongOrigin:
		return fmt.Sprintf("run isthmus peer for both clusters, or isthmus unpeer %s", peering)
	}
	return "correct the source of that field in this cluster, or run isthmus unpeer " + peering
}

// knownReason returns the reason of the peer's refusal if it is one of the defined reasons. Other
// reasons are replaced, because the reason becomes the label of a metric.
func knownReason(reason string) string {
	switch reason {
	case v1alpha1.ReasonNotPeered, v1alpha1.ReasonWrongOrigin, v1alpha1.ReasonKeyConflict, v1alpha1.ReasonEndpoint, v1alpha1.ReasonExhausted,
		v1alpha1.ReasonConsent, v1alpha1.ReasonCIDRConflict, v1alpha1.ReasonAmbiguous:
		return reason
	}
	return v1alpha1.ReasonInvalid
}

// aboutPeer adds the peer's name to a problem that the replicator found.
func (s *peeringState) aboutPeer(v condition) condition {
	if v.status == metav1.ConditionFalse && v.reason != isthmus.ReasonPublishing && s.peering.DeletionTimestamp.IsZero() {
		v.message = s.refused(s.peerName()+": ", v.message, "")
	}
	return v
}

// evaluateClaim evaluates the peer's claim with the IPAM state.
func (r *Reconciler) evaluateClaim(ctx context.Context, s *peeringState, peer peers.Peer) error {
	state := r.Store.State()
	s.allocation, _ = state.AllocationOf(peer.Cluster.ClusterID)
	if len(s.copies) != 1 {
		return nil
	}
	nc := &s.copies[0]
	s.translations = exchange.TranslationsOf(state, peer, nc)
	accepted := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
	if accepted == nil {
		var err error
		if s.unstored, err = (exchange.Validator{Reader: r.Client, Peers: r.Peers, Facts: r.Facts, Store: r.Store}).Unstored(ctx, peer, nc); err != nil {
			return err
		}
		accepted = s.unstored
	}
	if accepted == nil || accepted.Reason != v1alpha1.ReasonKeyConflict {
		return nil
	}
	var err error
	s.keyOwner, err = exchange.KeyOwner(ctx, r.Client, nc)
	return err
}

// overlapText describes an overlap with a network of the peer. If the overlap is with an address of
// a Node, the text names the Node.
func overlapText(ctx context.Context, reader client.Reader, c ipam.Conflict) (string, error) {
	if !c.Other.IsSingleIP() {
		return c.String(), nil
	}
	var nodes corev1.NodeList
	if err := reader.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("nodes: %w", err)
	}
	for i := range nodes.Items {
		if slices.Contains(facts.NodeAddresses(nodes.Items[i:i+1]), c.Other.Addr()) {
			return fmt.Sprintf("%s (status.addresses of Node %s)", c, nodes.Items[i].Name), nil
		}
	}
	return c.String(), nil
}
