package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// ErrNoPeer says that nobody wants to be joined with a cluster.
var ErrNoPeer = errors.New("no peering with this cluster")

// A Peer is a cluster that we are to be joined with, whoever said so: a Peering
// or, under Liqo's control plane, a ForeignCluster.
type Peer struct {
	Cluster v1alpha1.ClusterIdentity
	// LocalNamespace is the tenant namespace here; RemoteNamespace is the one at
	// the peer.
	LocalNamespace, RemoteNamespace string
	// Overrides are those of the Peering.
	Overrides isthmus.Overrides
	// IdentitySecret is the name of the Secret in LocalNamespace with which to
	// speak to the peer; empty when Liqo's crd-replicator does that.
	IdentitySecret string
	// Leaving says that the peering is being taken down. Nothing new is made for
	// it. Forced says that nobody waits for the peer any more.
	Leaving, Forced bool
	// Owner is the Peering or the ForeignCluster.
	Owner client.Object
}

// Replicated reports whether we carry the NetworkConfig to the peer ourselves.
func (p Peer) Replicated() bool { return p.IdentitySecret != "" }

// Peers finds the peers of this cluster. It reads a cache with the indexes that
// addIndexes makes; its methods may be called concurrently.
type Peers struct{ Reader client.Reader }

// ByID returns the peer with the given cluster ID, or ErrNoPeer.
func (p Peers) ByID(ctx context.Context, id string) (Peer, error) {
	return p.one(ctx, indexClusterID, id)
}

// ByNamespace returns the peer whose tenant namespace here is the given one, or
// ErrNoPeer.
func (p Peers) ByNamespace(ctx context.Context, namespace string) (Peer, error) {
	return p.one(ctx, indexTenantNamespace, namespace)
}

// one returns the oldest Peering with the given value of an index.
func (p Peers) one(ctx context.Context, index, value string) (Peer, error) {
	var list isthmus.PeeringList
	if err := p.Reader.List(ctx, &list, client.MatchingFields{index: value}); err != nil {
		return Peer{}, fmt.Errorf("peerings with %s %q: %w", index, value, err)
	}
	if len(list.Items) == 0 {
		return Peer{}, fmt.Errorf("%q: %w", value, ErrNoPeer)
	}
	return peerFrom(&list.Items[oldest(list.Items)]), nil
}

// oldest returns the index of the Peering that is right when several are for the
// same cluster or namespace: of the same age, the one with the smaller UID.
func oldest(items []isthmus.Peering) (best int) {
	for i := range items {
		a, b := &items[i], &items[best]
		if cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.UID, b.UID)) < 0 {
			best = i
		}
	}
	return best
}

func peerFrom(p *isthmus.Peering) Peer {
	return Peer{
		Cluster:         p.Spec.Cluster,
		LocalNamespace:  p.Spec.TenantNamespace.Local,
		RemoteNamespace: p.Spec.TenantNamespace.Remote,
		Overrides:       p.Spec.Overrides,
		IdentitySecret:  cmp.Or(p.Spec.IdentitySecretName, isthmus.DefaultIdentitySecret),
		Leaving:         !p.DeletionTimestamp.IsZero(),
		Forced:          p.Annotations[isthmus.AnnotationForce] == "true",
		Owner:           p,
	}
}
