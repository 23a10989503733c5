package exchange

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// releaseInterval is the interval between two calls of sweep.
const releaseInterval = 5 * time.Minute

// reasonReleased is the reason of the Event about networks that are released because no object
// names their peer.
const reasonReleased = "NetworksReleased"

// Releases ends holds of released networks after fabric.ReleaseHold. It also releases the networks
// of peers that vanished without un-peering, if no object has named the peer for ipam.UnusedGrace.
// The IPAM state stores when each of these periods began, so a restart of the manager does not
// reset them.
type Releases struct {
	Cache  client.Reader
	Peers  peers.Peers
	Store  *ipamstore.Store
	Events events.EventRecorder
	Log    *slog.Logger
}

// Run calls sweep every releaseInterval until ctx ends.
func (r *Releases) Run(ctx context.Context) error {
	tick := time.NewTicker(releaseInterval)
	defer tick.Stop()
	for {
		if err := r.sweep(ctx); err != nil && ctx.Err() == nil {
			r.Log.Warn("cannot read or write the IPAM state; released networks stay held", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sweep ends expired holds, and releases the networks of peers without objects.
func (r *Releases) sweep(ctx context.Context) error {
	named, err := r.namedIDs(ctx)
	if err != nil {
		return err
	}
	now, err := r.Store.Now(ctx)
	if err != nil {
		return err
	}
	var abandoned []string
	state, err := r.Store.Update(ctx, func(b ipam.State) (next ipam.State, err error) {
		next, abandoned = b.Age(now, func(id string) bool { return named[id] })
		return next, nil
	})
	if err != nil {
		return fmt.Errorf("released networks: %w", err)
	}
	for _, id := range abandoned {
		about := &corev1.ObjectReference{APIVersion: isthmus.GroupVersion.String(), Kind: "NetworkAllocation", Name: fabric.AllocationName(id)}
		networks, free := state.NetworksOf(id), now.Add(fabric.ReleaseHold).UTC().Format(time.RFC3339)
		r.Log.Warn("released the networks of a peer that no object has named for a day", "peer", id, "networks", networks, "heldUntil", free)
		r.Events.Eventf(about, nil, corev1.EventTypeWarning, reasonReleased, "ReleaseNetworks",
			"cluster %s: networks %v released, because no Peering, ForeignCluster, NetworkConfig or TunnelEndpoint has named the cluster for %v; nodes refuse them, and no other cluster gets them, until %s",
			id, networks, ipam.UnusedGrace, free)
	}
	return nil
}

// namedIDs returns the IDs of all clusters that some object of a peering names.
func (r *Releases) namedIDs(ctx context.Context) (map[string]bool, error) {
	var (
		peerings  isthmus.PeeringList
		configs   v1alpha1.NetworkConfigList
		endpoints v1alpha1.TunnelEndpointList
		foreign   peers.ForeignClusterList
	)
	lists := []client.ObjectList{&peerings, &configs, &endpoints}
	if r.Peers.ForeignClusters {
		lists = append(lists, &foreign)
	}
	for _, list := range lists {
		if err := r.Cache.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return nil, fmt.Errorf("%T: %w", list, err)
		}
	}
	named := make(map[string]bool)
	for i := range peerings.Items {
		named[peerings.Items[i].Spec.Cluster.ClusterID] = true
	}
	for i := range foreign.Items {
		named[foreign.Items[i].Spec.ClusterIdentity.ClusterID] = true
	}
	for i := range configs.Items {
		labels := configs.Items[i].Labels
		named[labels[v1alpha1.LabelOriginID]], named[labels[v1alpha1.LabelRemoteID]] = true, true
	}
	for i := range endpoints.Items {
		named[endpoints.Items[i].Labels[v1alpha1.LabelClusterID]] = true
		named[endpoints.Items[i].Spec.ClusterIdentity.ClusterID] = true
	}
	return named, nil
}
