package peerings

import (
	"cmp"
	"context"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/exchange"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// keyState is the state of the preshared key of a Peering.
type keyState struct {
	required bool
	use      string // ID of the exchange that made the key in use; "": no key is in use
	progress postquantum.Progress
	problem  error // the reason why no key is stored
}

func (r *Reconciler) gatherKey(ctx context.Context, s *peeringState, peer peers.Peer) {
	s.key.required = peer.KeyRequired
	if r.Keys == nil || s.original == nil {
		return
	}
	state, err := r.Keys.State(ctx, peer.Cluster.ClusterID)
	if s.key.use = state.Use.ID; err == nil && len(s.copies) == 1 {
		// The new state is discarded: the reconciler of the NetworkConfig takes the same step and stores
		// it.
		_, s.key.progress, err = exchange.StepOf(state, r.Peers.Self, s.original.Spec.BackendConfig, peer.Cluster.ClusterID, s.copies[0].Spec.BackendConfig,
			postquantum.FieldsIn(s.original.Spec.BackendConfig))
	}
	s.key.problem = cmp.Or(err, r.Keys.Problem(peer.Cluster.ClusterID))
}

// why returns the reason why no session uses a preshared key.
func (k keyState) why() string {
	if k.problem != nil {
		return plain(k.problem.Error())
	}
	switch k.progress {
	case postquantum.NotOffers:
		return "the peer does not exchange preshared keys, because it runs Liqo or an older Isthmus"
	case postquantum.Malformed:
		return "the peer publishes neither an ML-KEM key nor an answer to one"
	case postquantum.Other:
		return "the peer has not answered our current key yet"
	case postquantum.Altered:
		return "the peer's message has a wrong tag, because it was changed or belongs to another exchange"
	case postquantum.Changed:
		return "the peer has replaced an answer that was in use, so the exchange starts again"
	case postquantum.Agreed:
		return "the key is agreed, but the gateways have no session with it yet"
	}
	return "waiting for the peer"
}

// fieldsProblem returns the reason why no new key replaces the key in use, if the peer publishes
// invalid fields. Otherwise it returns "".
func (k keyState) fieldsProblem() string {
	switch k.progress {
	case postquantum.Malformed, postquantum.Altered:
		return "no new preshared key: " + k.why()
	}
	return ""
}

// postQuantum returns the gateway's report about the sessions with the peer. Without an active
// gateway, the state is unknown.
func (s *peeringState) postQuantum() isthmus.PostQuantumStatus {
	switch {
	case s.endpoint == nil || s.silent != "":
		return isthmus.PostQuantumStatus{}
	case exchange.PresharedIn(s.endpoint) != "":
		return isthmus.PostQuantumStatus{Key: isthmus.KeyMLKEM, Why: fit(s.key.fieldsProblem(), 1024)}
	}
	return isthmus.PostQuantumStatus{Key: isthmus.KeyNone, Why: fit(s.key.why(), 1024)}
}
