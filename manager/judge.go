package manager

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// A judge finds out whether the claim of a peer may be taken. It looks at what we hold true
// ourselves: in Liqo's RBAC the peer may write any status.
type judge struct {
	Reader client.Reader
	Peers  Peers
	Facts  FactsReader
	Books  interface{ Book() ipam.Book }
}

func (j judge) judge(ctx context.Context, peer Peer, nc *v1alpha1.NetworkConfig) (fabric.Claim, []fabric.Refusal, error) {
	claim, problems := fabric.ClaimFrom(nc, fabric.Origin{})
	if id := nc.Spec.RemoteCluster.ClusterID; id != j.Peers.Self {
		problems = append(problems, fabric.Problem{Field: "spec.cluster.clusterID", Message: fmt.Sprintf("is %q; want %s, the receiver", id, j.Peers.Self)})
	}
	if len(problems) > 0 {
		var refusals []fabric.Refusal
		for _, p := range problems {
			refusals = append(refusals, fabric.Refusal{Reason: v1alpha1.ReasonInvalid, Problem: p})
		}
		return claim, refusals, nil
	}
	facts, err := j.Facts.Facts(ctx)
	if err != nil {
		return claim, nil, err
	}
	receiver := fabric.Receiver{
		PublicKey: facts.PublicKey, Pod: facts.PodCIDR, Service: facts.ServiceCIDR, External: facts.ExternalCIDR,
		Nodes: facts.Nodes, APIServers: facts.APIServers,
		Endpoint: facts.Endpoint, Port: cmp.Or(uint16(peer.Overrides.Port), facts.Port),
		Tunnels: furtherTunnels(facts, peer),
	}
	if peer.Overrides.Address != nil {
		receiver.Endpoint = *peer.Overrides.Address
	}
	var others fabric.Neighbours
	if addr, err := netip.ParseAddr(claim.Endpoint); err == nil {
		others.EndpointTunnelled = j.Books.Book().UsedForAnother(peer.Cluster.ClusterID, addr)
	}
	if others.TakenKeys, err = j.takenKeys(ctx, peer, nc, claim); err != nil {
		return claim, nil, err
	}
	return claim, fabric.CheckClaim(claim, receiver, others), nil
}

// takenKeys returns the keys of a claim that another peer has: not who says so first, because
// public keys are public, but whose tunnel has it, or else whose claim was accepted with it. A peer
// that lists among its own what is another's already is the one that is refused. Only when two
// tunnels have a key, by an edit or from before, it is the older one's, as in fabric.GatewayFor.
func (j judge) takenKeys(ctx context.Context, peer Peer, nc *v1alpha1.NetworkConfig, claim fabric.Claim) (taken [][32]byte, err error) {
	for _, key := range claim.Keys() {
		var list v1alpha1.TunnelEndpointList
		if err := j.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: keyText(key)}); err != nil {
			return nil, fmt.Errorf("TunnelEndpoints with the same key: %w", err)
		}
		var another bool
		if len(list.Items) > 0 {
			first := slices.MinFunc(list.Items, func(a, b v1alpha1.TunnelEndpoint) int { return compareAge(&a, &b) })
			another = first.Namespace != peer.LocalNamespace
		} else if another, err = j.acceptedBefore(ctx, nc, keyText(key)); err != nil {
			return nil, err
		}
		if another {
			taken = append(taken, key)
		}
	}
	return taken, nil
}

// acceptedBefore reports whether the claim of another peer was accepted with a key that nobody has a
// tunnel for, before the given one was. The conditions in the NetworkConfigs say so, which a restart
// finds again. Of two that were accepted at once the older one counts.
func (j judge) acceptedBefore(ctx context.Context, nc *v1alpha1.NetworkConfig, key string) (bool, error) {
	var list v1alpha1.NetworkConfigList
	if err := j.Reader.List(ctx, &list, client.MatchingFields{indexPublicKey: key}, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("NetworkConfigs with the same key: %w", err)
	}
	mine := standing(nc)
	for i := range list.Items {
		other := &list.Items[i]
		theirs := standing(other)
		if other.Namespace == nc.Namespace || theirs == 0 || theirs < mine || theirs == mine && compareAge(other, nc) > 0 {
			continue
		}
		_, stranger, err := sender(ctx, j.Peers, other.Namespace, other.Labels[v1alpha1.LabelOriginID])
		if err != nil || stranger == nil {
			return err == nil, err
		}
	}
	return false, nil
}

// standing is 2 for a copy whose present content we accepted, 1 for a copy whose earlier content we
// accepted, and 0 for all others. A copy that is edited to list the key of another peer thereby ranks
// behind that peer. Where the API server stores no conditions, an answered copy is only known to have been
// accepted once.
func standing(nc *v1alpha1.NetworkConfig) int {
	accepted := meta.FindStatusCondition(nc.Status.Conditions, v1alpha1.ConditionAccepted)
	switch {
	case alive(*nc) && accepted == nil && nc.Status.Processed:
		return 1
	case !alive(*nc) || accepted == nil || accepted.Status != metav1.ConditionTrue:
		return 0
	case accepted.ObservedGeneration != nc.Generation:
		return 1
	}
	return 2
}
