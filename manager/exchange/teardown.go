package exchange

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// shut withdraws the access of a leaving peer's manager to our API server. The tunnel itself stays,
// because our manager or clients still use it.
func (r *tunnelEndpointReconciler) shut(ctx context.Context, x *exchange) error {
	for i := range x.endpoints {
		te := &x.endpoints[i]
		if now := te.Annotations[isthmus.AnnotationInBand]; now == "" || now == isthmus.InBandLeaving || !te.DeletionTimestamp.IsZero() {
			continue
		}
		before := te.DeepCopy()
		te.Annotations[isthmus.AnnotationInBand] = isthmus.InBandLeaving
		if err := client.IgnoreNotFound(r.Client.Patch(ctx, te, client.MergeFrom(before))); err != nil {
			return fmt.Errorf("TunnelEndpoint %s/%s: %w", te.Namespace, te.Name, err)
		}
	}
	return nil
}

// end removes all objects for a cluster that is not a peer in this namespace. Gateways and route
// agents have finalizers on the TunnelEndpoint. So a network of the cluster is only released after
// gateways and route agents have stopped using it.
func (r *tunnelEndpointReconciler) end(ctx context.Context, x *exchange) error {
	if err := r.deleteEndpoints(ctx, x); err != nil {
		return err
	}
	for i := range x.copies {
		if err := r.removeFinalizer(ctx, &x.copies[i]); err != nil {
			return err
		}
	}
	if len(x.endpoints) > 0 || slices.ContainsFunc(x.originals, alive) {
		return nil // NetworkConfigReconciler deletes the originals
	}
	if !x.elsewhere {
		if released, err := r.release(ctx, x); err != nil || !released {
			return err
		}
		r.answers.forget(x.id)
		r.gateways.forget(x.id)
	}
	for i := range x.originals {
		if err := r.removeFinalizer(ctx, &x.originals[i]); err != nil {
			return err
		}
	}
	return nil
}

// deleteEndpoints deletes the TunnelEndpoints of a peer.
func (r *tunnelEndpointReconciler) deleteEndpoints(ctx context.Context, x *exchange) error {
	for i := range x.endpoints {
		te := &x.endpoints[i]
		if !te.DeletionTimestamp.IsZero() {
			continue
		}
		if err := client.IgnoreNotFound(r.Client.Delete(ctx, te, client.Preconditions{UID: &te.UID})); err != nil {
			return fmt.Errorf("TunnelEndpoint %s/%s: %w", te.Namespace, te.Name, err)
		}
		r.Log.Info("TunnelEndpoint deleted", "peer", x.id, "namespace", te.Namespace, "name", te.Name)
	}
	return nil
}

// release releases the networks of a peer, which puts them on hold. It returns false while the
// NatMapping exists. The NatMapping is deleted after the IPAM state has changed.
func (r *tunnelEndpointReconciler) release(ctx context.Context, x *exchange) (released bool, err error) {
	now, err := r.Store.Now(ctx)
	if err != nil {
		return false, err
	}
	if _, err := r.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
		switch peer, err := r.Peers.ByID(ctx, x.id); {
		case err == nil && !peer.Leaving:
			return b, errWantedAgain
		case err != nil && !errors.Is(err, peers.ErrNoPeer):
			return b, err
		}
		return b.Part(x.id, now), nil
	}); errors.Is(err, errWantedAgain) {
		return false, nil // there is a new Peering; its event causes another request
	} else if err != nil {
		return false, fmt.Errorf("release the networks of the peer: %w", err)
	}
	mappings, err := natMappingsOf(ctx, r.Client, x.id)
	return len(mappings) == 0, err
}

var errWantedAgain = errors.New("there is a new peering with the cluster")

// hold adds our finalizer to a NetworkConfig, so that it stays until everything that was made from
// it is gone.
func (r *tunnelEndpointReconciler) hold(ctx context.Context, nc *v1alpha1.NetworkConfig) error {
	return r.finalizer(ctx, nc, controllerutil.AddFinalizer)
}

// removeFinalizer removes the finalizer that hold adds.
func (r *tunnelEndpointReconciler) removeFinalizer(ctx context.Context, nc *v1alpha1.NetworkConfig) error {
	return r.finalizer(ctx, nc, controllerutil.RemoveFinalizer)
}

func (r *tunnelEndpointReconciler) finalizer(ctx context.Context, nc *v1alpha1.NetworkConfig, change func(client.Object, string) bool) error {
	before := nc.DeepCopy()
	if !change(nc, v1alpha1.FinalizerTunnelEndpointCreator) {
		return nil
	}
	// The patch has an optimistic lock: it replaces the list of finalizers, and other controllers have
	// finalizers in that list, too.
	if err := r.Client.Patch(ctx, nc, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizer of NetworkConfig %s/%s: %w", nc.Namespace, nc.Name, err)
	}
	return nil
}
