// Package exchange implements the exchange of NetworkConfigs with the peers. It publishes our
// NetworkConfigs, answers the peers' NetworkConfigs with networks from the IPAM, and agrees on
// preshared keys. From the NetworkConfigs of both sides it makes the TunnelEndpoint and the
// NatMapping of each peer. A RefusalGate withholds an answer until all nodes refuse packets to the
// networks in the answer, so that no packet leaves in the clear. Releases frees the networks of a
// peer that has left.
//
// The package owns NetworkConfigs, TunnelEndpoints, NatMappings and the Secret of preshared keys.
// The manager runs its controllers. Package peerings uses this package to explain why two clusters
// have not agreed, and deletes TunnelEndpoints when a Peering is deleted.
package exchange

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// Answers are the reconcilers that turn the NetworkConfigs of both sides of each peering into
// answers, TunnelEndpoints and NatMappings:
//
//	copy ─ answerReconciler ─► status of the copy, allocation in the IPAM state ─┐
//	original with the peer's answer ─────────────────────────────────────────────┴─ tunnelEndpointReconciler ─► TunnelEndpoint
//	                                        answer in the IPAM state ─ natMappingReconciler ─► NatMapping ────────────┘ (exists first)
//
// All fields except FactsChanged may be shared with other controllers. The Store must be loaded.
type Answers struct {
	Client      client.Client
	Peers       peers.Peers
	Facts       facts.Reader
	Store       *ipamstore.Store
	RefusalGate *RefusalGate // must observe the Store
	// FactsChanged gets a value after every change of the Facts.
	FactsChanged <-chan event.GenericEvent
	Log          *slog.Logger
}

// SetupWithManager makes mgr run the three reconcilers. It adds the indexes that they need to mgr's
// cache.
func (a *Answers) SetupWithManager(mgr ctrl.Manager) error {
	if err := AddIndexes(mgr.GetFieldIndexer()); err != nil {
		return fmt.Errorf("indexes: %w", err)
	}
	return errors.Join(
		(&answerReconciler{Client: a.Client, Peers: a.Peers, Facts: a.Facts, Store: a.Store, RefusalGate: a.RefusalGate, FactsChanged: a.FactsChanged, Log: a.Log}).SetupWithManager(mgr),
		(&tunnelEndpointReconciler{Client: a.Client, Peers: a.Peers, Facts: a.Facts, Store: a.Store, RefusalGate: a.RefusalGate, Log: a.Log}).SetupWithManager(mgr),
		(&natMappingReconciler{Client: a.Client, Store: a.Store, Log: a.Log}).SetupWithManager(mgr),
	)
}

// maxCopies bounds the number of NetworkConfigs that are read for one sender. A correct sender has
// one. If a peer creates thousands, the reconciler handles 64 at a time.
const maxCopies = 64

// CopiesOf returns the NetworkConfigs of a sender in a namespace, oldest first, at most maxCopies.
func CopiesOf(ctx context.Context, reader client.Reader, namespace, origin string) ([]v1alpha1.NetworkConfig, error) {
	var list v1alpha1.NetworkConfigList
	if err := reader.List(ctx, &list, client.InNamespace(namespace), client.MatchingFields{indexOrigin: origin}, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("NetworkConfigs of the peer: %w", err)
	}
	slices.SortFunc(list.Items, func(a, b v1alpha1.NetworkConfig) int { return controllers.CompareAge(&a, &b) })
	copies := make([]v1alpha1.NetworkConfig, min(len(list.Items), maxCopies))
	for i := range copies {
		list.Items[i].DeepCopyInto(&copies[i])
	}
	return copies, nil
}

func alive(nc v1alpha1.NetworkConfig) bool { return nc.DeletionTimestamp.IsZero() }

// exchangeWith returns the request for a peer.
func exchangeWith(p peers.Peer) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Namespace: p.LocalNamespace, Name: p.Cluster.ClusterID}}
}

// exchangeOf returns the requests for the clusters with the given IDs in the namespace of o.
func exchangeOf(o client.Object, ids ...string) (all []reconcile.Request) {
	for _, id := range ids {
		if id != "" {
			all = append(all, reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: id}})
		}
	}
	return all
}

// everyExchange returns a map function that returns the requests for all peers.
func everyExchange(peers peers.Peers, log *slog.Logger) handler.MapFunc {
	return func(ctx context.Context, _ client.Object) (all []reconcile.Request) {
		list, err := peers.List(ctx)
		if err != nil {
			log.Error("cannot list the peers; new networks of this cluster wait for the next event", "error", err)
		}
		for _, peer := range list {
			all = append(all, exchangeWith(peer))
		}
		return all
	}
}

// notStatusAlone drops updates that only changed the status.
var notStatusAlone = predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
	a, b := e.ObjectOld, e.ObjectNew
	return a.GetGeneration() != b.GetGeneration() || a.GetUID() != b.GetUID() ||
		a.GetDeletionTimestamp().IsZero() != b.GetDeletionTimestamp().IsZero() ||
		!maps.Equal(a.GetLabels(), b.GetLabels()) || !slices.Equal(a.GetFinalizers(), b.GetFinalizers()) ||
		!equality.Semantic.DeepEqual(a.GetOwnerReferences(), b.GetOwnerReferences()) || !maps.Equal(a.GetAnnotations(), b.GetAnnotations())
}}
