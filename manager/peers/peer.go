// Package peers lists the clusters to peer with, from Peerings or, under Liqo's control plane, from
// ForeignClusters. It decides which of several objects for one cluster is used, and how long to
// wait for a leaving peer. It only reads, and only from the manager's cache.
package peers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
)

// InBandPatience bounds two times after the deletion of an in-band Peering: the time for which the
// tunnel stays open for the managers, and the time for which we wait for the peer.
const InBandPatience = 30 * time.Second

// ErrNoPeer means that no Peering and no ForeignCluster requests a peering with the cluster.
var ErrNoPeer = errors.New("no peering with this cluster")

// A Peer is a cluster to peer with, according to a Peering or, under Liqo's control plane, a
// ForeignCluster.
type Peer struct {
	Cluster v1alpha1.ClusterIdentity
	// LocalNamespace is the tenant namespace here; RemoteNamespace is the one at the peer.
	LocalNamespace, RemoteNamespace string
	// Overrides and Claims are the fields of the Peering with these names.
	Overrides isthmus.Overrides
	Claims    isthmus.Claims
	// KeyRequired is true if the tunnel must stay down without a preshared key.
	KeyRequired bool
	// InBand is true if the managers reach each other's API servers through the tunnel.
	InBand bool
	// IdentitySecret is the name of the Secret in LocalNamespace with our identity at the peer. It
	// is empty if Liqo's crd-replicator copies the objects.
	IdentitySecret string
	// Leaving is true while the peering is taken down: no new objects are made for the peer. Forced
	// is true if the teardown does not wait for the peer.
	Leaving, Forced bool
	// Left is the time when Leaving became true.
	Left time.Time
	// Draining is true for a leaving peer while clients of shared services may still use the tunnel.
	// All objects of the peering then stay for some seconds; see package peerings.
	Draining bool
	// Owner is the Peering or the ForeignCluster.
	Owner client.Object
}

// Replicated reports whether this manager replicates the NetworkConfig to the peer.
func (p Peer) Replicated() bool { return p.IdentitySecret != "" }

// InBandLeft returns the remaining time for which we wait for a peer that leaves in band. After
// that time the tunnel closes, and with it the only path to the peer's API server.
func (p Peer) InBandLeft(now time.Time) time.Duration {
	return min(max(p.Left.Add(InBandPatience).Sub(now), 0), InBandPatience)
}

// Abandoned reports whether we have stopped waiting for a leaving peer.
func (p Peer) Abandoned(now time.Time) bool {
	return p.Leaving && (p.Forced || p.InBand && p.InBandLeft(now) == 0)
}

// Begun reports whether objects may be made for the peer. A Peering must have its finalizer first,
// because the finalizer ensures that these objects are removed.
func (p Peer) Begun() bool {
	if _, ours := p.Owner.(*isthmus.Peering); ours && !controllerutil.ContainsFinalizer(p.Owner, isthmus.FinalizerPeering) {
		return false
	}
	return !p.Leaving
}

// NeedsTunnel returns the remaining time for which the tunnel to a leaving peer stays open, so that
// we can delete our NetworkConfig at the peer. The time is bounded: otherwise a peer that refuses
// the deletion could keep the tunnel open.
func (p Peer) NeedsTunnel(original *v1alpha1.NetworkConfig, now time.Time) time.Duration {
	if !p.InBand || !p.Leaving || p.Forced || original == nil || !controllerutil.ContainsFinalizer(original, v1alpha1.FinalizerReplicator) {
		return 0
	}
	return p.InBandLeft(now)
}

// Peers finds the peers of this cluster. It reads from a cache with the indexes that AddIndexes
// adds. Its methods may be called concurrently.
//
// A Peering is ignored if an older Peering names the same cluster or tenant namespace, or if it
// names this cluster itself. Of two Peerings with the same age, the one with the smaller UID
// counts. Any Peering takes precedence over a ForeignCluster.
type Peers struct {
	Reader client.Reader
	// Self is the ID of this cluster.
	Self string
	// ForeignClusters is true if this cluster serves the kind ForeignCluster. Peers then reads
	// these objects, too.
	ForeignClusters bool
}

// ByID returns the peer with the given cluster ID, or ErrNoPeer.
func (p Peers) ByID(ctx context.Context, id string) (Peer, error) {
	return p.find(ctx, IndexClusterID, id)
}

// ByNamespace returns the peer with the given tenant namespace in this cluster, or ErrNoPeer.
func (p Peers) ByNamespace(ctx context.Context, namespace string) (Peer, error) {
	return p.find(ctx, IndexTenantNamespace, namespace)
}

// List returns all peers, sorted by cluster ID. The result shares memory with the cache, so the
// caller must not change it.
func (p Peers) List(ctx context.Context) ([]Peer, error) {
	byID := make(map[string]Peer)
	var peerings isthmus.PeeringList
	if err := p.Reader.List(ctx, &peerings, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("peerings: %w", err)
	}
	ids, namespaces := make(map[string]bool), make(map[string]bool)
	byAge := make([]*isthmus.Peering, len(peerings.Items))
	for i := range peerings.Items {
		byAge[i] = &peerings.Items[i]
	}
	slices.SortFunc(byAge, func(a, b *isthmus.Peering) int { return controllers.CompareAge(a, b) })
	for _, peering := range byAge {
		peer := From(peering)
		id, ns := peer.Cluster.ClusterID, peer.LocalNamespace
		if id != p.Self && !ids[id] && !namespaces[ns] {
			byID[id] = peer
		}
		ids[id], namespaces[ns] = true, true
	}
	if p.ForeignClusters {
		var list ForeignClusterList
		if err := p.Reader.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("foreign clusters: %w", err)
		}
		slices.SortFunc(list.Items, func(a, b ForeignCluster) int { return controllers.CompareAge(&a, &b) })
		for i := range list.Items {
			peer, ok := peerFromForeign(&list.Items[i])
			id, ns := peer.Cluster.ClusterID, peer.LocalNamespace
			if ok && id != p.Self && !ids[id] && !namespaces[ns] {
				byID[id] = peer
			}
			ids[id], namespaces[ns] = true, true
		}
	}
	return slices.SortedFunc(maps.Values(byID), func(a, b Peer) int { return cmp.Compare(a.Cluster.ClusterID, b.Cluster.ClusterID) }), nil
}

// find finds a peer by the value of an index.
func (p Peers) find(ctx context.Context, index, value string) (Peer, error) {
	none := fmt.Errorf("%q: %w", value, ErrNoPeer)
	var list isthmus.PeeringList
	if err := p.Reader.List(ctx, &list, client.MatchingFields{index: value}); err != nil {
		return Peer{}, fmt.Errorf("peerings with %s %q: %w", index, value, err)
	}
	if len(list.Items) > 0 {
		first := oldest(list.Items)
		conflict, err := p.Conflict(ctx, first)
		switch {
		case err != nil:
			return Peer{}, err
		case conflict != "":
			return Peer{}, none
		}
		return From(first), nil
	}
	if !p.ForeignClusters {
		return Peer{}, none
	}
	return p.findForeign(ctx, index, value)
}

// Conflict returns the reason why a Peering is ignored, or "".
func (p Peers) Conflict(ctx context.Context, peering *isthmus.Peering) (string, error) {
	id, ns := peering.Spec.Cluster.ClusterID, peering.Spec.TenantNamespace.Local
	if id == p.Self {
		return fmt.Sprintf("spec.cluster.clusterID: %s is this cluster itself; want the ID of another cluster", id), nil
	}
	for _, same := range []struct{ index, value, what string }{
		{IndexClusterID, id, "is for the same cluster"},
		{IndexTenantNamespace, ns, "has the same tenant namespace " + ns},
	} {
		var list isthmus.PeeringList
		if err := p.Reader.List(ctx, &list, client.MatchingFields{same.index: same.value}); err != nil {
			return "", fmt.Errorf("peerings with %s %q: %w", same.index, same.value, err)
		}
		if len(list.Items) == 0 {
			continue
		}
		if first := oldest(list.Items); controllers.CompareAge(first, peering) < 0 {
			return fmt.Sprintf("Peering %s is older and %s; delete one of them", first.Name, same.what), nil
		}
	}
	return "", nil
}

// Neighbours returns the Peerings that a change of the given Peering may affect: all Peerings for
// the same cluster or tenant namespace, including the given one.
func (p Peers) Neighbours(ctx context.Context, peering *isthmus.Peering) []*isthmus.Peering {
	found := []*isthmus.Peering{peering}
	for index, value := range map[string]string{
		IndexClusterID:       peering.Spec.Cluster.ClusterID,
		IndexTenantNamespace: peering.Spec.TenantNamespace.Local,
	} {
		var list isthmus.PeeringList
		if err := p.Reader.List(ctx, &list, client.MatchingFields{index: value}); err != nil {
			continue // without the index nothing works, and other code reports the error
		}
		for i := range list.Items {
			if list.Items[i].UID != peering.UID {
				found = append(found, &list.Items[i])
			}
		}
	}
	return found
}

// Peerings returns the Peerings that are not ignored. The caller must not change them.
func (p Peers) Peerings(ctx context.Context) (all []*isthmus.Peering, err error) {
	peers, err := p.List(ctx)
	for _, peer := range peers {
		if peering, ok := peer.Owner.(*isthmus.Peering); ok {
			all = append(all, peering)
		}
	}
	return all, err
}

// Watch makes b reconcile the given requests when a peer appears, disappears or changes. Changes of
// its status alone do not count.
func (p Peers) Watch(b *builder.Builder, requests func(Peer) []reconcile.Request) *builder.Builder {
	b = b.Watches(&isthmus.Peering{}, handler.EnqueueRequestsFromMapFunc(func(ctx context.Context, o client.Object) (all []reconcile.Request) {
		for _, peering := range p.Neighbours(ctx, o.(*isthmus.Peering)) {
			all = append(all, requests(From(peering))...)
		}
		return all
	}), builder.WithPredicates(peeringChanged))
	if p.ForeignClusters {
		b = b.Watches(&ForeignCluster{}, handler.EnqueueRequestsFromMapFunc(func(_ context.Context, o client.Object) []reconcile.Request {
			peer, ok := peerFromForeign(o.(*ForeignCluster))
			if !ok {
				return nil
			}
			return requests(peer)
		}))
	}
	return b
}

// peeringChanged drops updates that only changed the status.
var peeringChanged = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	a, b := e.ObjectOld, e.ObjectNew
	return a.GetGeneration() != b.GetGeneration() || a.GetUID() != b.GetUID() ||
		a.GetDeletionTimestamp().IsZero() != b.GetDeletionTimestamp().IsZero() ||
		!slices.Equal(a.GetFinalizers(), b.GetFinalizers()) || !maps.Equal(a.GetAnnotations(), b.GetAnnotations())
}}

// oldest returns the Peering that counts if several name the same cluster or namespace. items must
// not be empty.
func oldest(items []isthmus.Peering) *isthmus.Peering {
	best := &items[0]
	for i := range items {
		if controllers.CompareAge(&items[i], best) < 0 {
			best = &items[i]
		}
	}
	return best
}

// From returns the peer of a Peering.
func From(p *isthmus.Peering) Peer {
	var left time.Time
	if p.DeletionTimestamp != nil {
		left = p.DeletionTimestamp.Time
	}
	return Peer{
		Cluster:         p.Spec.Cluster,
		LocalNamespace:  p.Spec.TenantNamespace.Local,
		RemoteNamespace: p.Spec.TenantNamespace.Remote,
		Overrides:       p.Spec.Overrides,
		Claims:          p.Spec.Claims,
		KeyRequired:     p.Spec.PostQuantum == isthmus.PostQuantumRequired,
		InBand:          p.Spec.InBand,
		IdentitySecret:  cmp.Or(p.Spec.IdentitySecretName, isthmus.DefaultIdentitySecret),
		Leaving:         !p.DeletionTimestamp.IsZero(),
		Left:            left,
		Forced:          p.Annotations[isthmus.AnnotationForce] == "true" || p.Annotations[isthmus.AnnotationForce] == isthmus.ForceCarried,
		Draining:        draining(p),
		Owner:           p,
	}
}

// draining reports whether a deleted Peering keeps its tunnel for clients of shared services.
func draining(p *isthmus.Peering) bool {
	shares := len(p.Spec.Services.Export)+len(p.Spec.Services.Import) > 0
	return !p.DeletionTimestamp.IsZero() && shares && p.Annotations[isthmus.AnnotationDrained] != "true" &&
		p.Annotations[isthmus.AnnotationForce] != "true"
}
