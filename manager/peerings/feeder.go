package peerings

import (
	"context"
	"time"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/isthmus-net/isthmus/manager/controllers"
	"github.com/isthmus-net/isthmus/manager/peers"
	"github.com/isthmus-net/isthmus/manager/replication"
)

// feederPause is the minimum time between two lists of all peers.
const feederPause = 50 * time.Millisecond

// A Feeder passes the list of all peers to the replicator. It always passes the whole list, so one
// request stands for any number of changes. A peer stays in the list until its Peering no longer
// exists, because the replicator has to delete our NetworkConfig at the peer.
type Feeder struct {
	Peers      peers.Peers
	Replicator interface{ Set([]replication.Target) }
}

// SetupWithManager makes mgr call Reconcile when a peer appears, changes or disappears.
func (f *Feeder) SetupWithManager(mgr ctrl.Manager) error {
	all := []reconcile.Request{controllers.RequestFor("peers")}
	return f.Peers.Watch(ctrl.NewControllerManagedBy(mgr).Named("peers"), func(peers.Peer) []reconcile.Request { return all }).Complete(controllers.Noted("peers", f))
}

// Reconcile passes the peers.
func (f *Feeder) Reconcile(ctx context.Context, _ ctrl.Request) (ctrl.Result, error) {
	peers, err := f.Peers.List(ctx)
	if err != nil {
		return ctrl.Result{}, err
	}
	var ours []replication.Target
	for _, p := range peers {
		if p.Replicated() {
			ours = append(ours, replication.Target{
				ID: p.Cluster.ClusterID, Cluster: p.Cluster,
				LocalNamespace: p.LocalNamespace, RemoteNamespace: p.RemoteNamespace, IdentitySecret: p.IdentitySecret, InBand: p.InBand,
			})
		}
	}
	f.Replicator.Set(ours)
	// The first of many changes takes effect at once, and the rest together after the pause. Otherwise
	// each change would cost a list of all peers.
	select {
	case <-time.After(feederPause):
	case <-ctx.Done():
	}
	return ctrl.Result{}, nil
}
