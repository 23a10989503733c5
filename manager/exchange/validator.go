package exchange

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// A Validator validates the claims of peers. It trusts only this cluster's own state, because under
// Liqo's RBAC a peer may write any status.
type Validator struct {
	Reader client.Reader
	Peers  peers.Peers
	Facts  facts.Reader
	Store  interface{ State() ipam.State }
}

func (v Validator) validate(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig) (fabric.Claim, []fabric.Refusal, error) {
	claim, problems := fabric.ClaimFrom(nc, fabric.Origin{})
	if id := nc.Spec.RemoteCluster.ClusterID; id != v.Peers.Self {
		problems = append(problems, fabric.Problem{Field: "spec.cluster.clusterID", Message: fmt.Sprintf("is %q; want %s, the ID of the receiver", id, v.Peers.Self)})
	}
	if len(problems) > 0 {
		var refusals []fabric.Refusal
		for _, p := range problems {
			refusals = append(refusals, fabric.Refusal{Reason: v1alpha1.ReasonInvalid, Problem: p})
		}
		return claim, refusals, nil
	}
	facts, err := v.Facts.Facts(ctx)
	if err != nil {
		return claim, nil, err
	}
	receiver := fabric.Receiver{
		PublicKey: facts.PublicKey, Pod: facts.PodCIDR, Service: facts.ServiceCIDR, External: facts.ExternalCIDR,
		Nodes: facts.Nodes, APIServers: facts.APIServers,
		Endpoint: facts.Endpoint, Port: cmp.Or(uint16(peer.Overrides.Port), facts.Port),
		Tunnels: facts.TunnelsAt(uint16(peer.Overrides.Port)),
	}
	if peer.Overrides.Address != nil {
		receiver.Endpoint = *peer.Overrides.Address
	}
	var others fabric.Neighbours
	if addr, err := netip.ParseAddr(claim.Endpoint); err == nil {
		others.EndpointTunnelled = v.Store.State().UsedForAnother(peer.Cluster.ClusterID, addr)
	}
	if others.TakenKeys, err = v.takenKeys(ctx, peer, nc, claim); err != nil {
		return claim, nil, err
	}
	return claim, fabric.CheckClaim(claim, receiver, others), nil
}

// Unstored returns the condition Accepted for a copy whose conditions the API server drops, because
// Liqo's CRD has none. It derives the decision of the answerReconciler: the claim is refused, or
// the answer in the status is in force. It returns nil for a copy that is not answered yet.
func (v Validator) Unstored(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig) (*metav1.Condition, error) {
	claim, refusals, err := v.validate(ctx, peer, nc)
	if err != nil {
		return nil, err
	}
	if len(refusals) == 0 {
		var refusal *fabric.Refusal
		if request, wrong := requestFrom(peer, claim); wrong != nil {
			refusals = append(refusals, fabric.Refusal{Reason: v1alpha1.ReasonCIDRConflict, Problem: *wrong})
		} else if _, _, err := v.Store.State().Allocate(request); errors.As(err, &refusal) {
			refusals = append(refusals, *refusal)
		}
	}
	switch {
	case len(refusals) > 0:
		return &metav1.Condition{Status: metav1.ConditionFalse, Reason: refusals[0].Reason, Message: textOf(refusals)}, nil
	case answerInForce(v.Store.State(), nc):
		return &metav1.Condition{Status: metav1.ConditionTrue, Reason: v1alpha1.ReasonAnswered, ObservedGeneration: nc.Generation}, nil
	}
	return nil, nil
}
