package kube

import (
	"context"
	"errors"
	"maps"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

// evaluate evaluates the peers' objects, if they may have changed.
func (r *refresher) evaluate(ctx context.Context, ring keyring.Ring) error {
	private := ring.Private
	keys := r.preshared.read(ctx, r.o.Namespace)
	if !r.objectsChanged.Swap(false) && private == r.requested.private && maps.Equal(keys, r.requested.secret) {
		return nil
	}
	var endpoints v1alpha1.TunnelEndpointList
	var mappings v1alpha1.NatMappingList
	err := errors.Join(r.objects.List(ctx, &endpoints, client.UnsafeDisableDeepCopy), r.objects.List(ctx, &mappings, client.UnsafeDisableDeepCopy))
	if err != nil {
		r.objectsChanged.Store(true)
		return err
	}
	usable, preshared, lacking := requirePreshared(endpoints.Items, keys)
	r.requested = requestedFor(&r.decider, r.cluster, private, usable, mappings.Items)
	r.requested.secret, r.requested.preshared, r.requested.problems = keys, preshared, fabric.SortProblems(append(r.requested.problems, lacking...))
	if r.o.StateDirectory != "" {
		r.requested.saved = savedFrom(r.cluster, private, endpoints.Items, mappings.Items)
		r.requested.saved.preshared = keys
	}
	return nil
}

// requested is the configuration that the peers' objects request. It does not depend on the
// addresses of our own cluster.
type requested struct {
	private  [32]byte
	gateway  fabric.Gateway // result of GatewayFor for an empty Site
	problems []fabric.Problem
	saved    savedObjects // its locations are not set

	secret, preshared map[string]PresharedKey // the keys in the Secret, and the keys that requirePreshared returned

	ours, networks []fabric.SiteNetwork // networks of the last Site, without and with the networks of peers
}

// gatewayFor returns the configuration that the objects request. It leaves out invalid objects.
// Each problem names the object and the field.
func gatewayFor(cluster v1alpha1.ClusterIdentity, private [32]byte, site fabric.Site, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) (fabric.Gateway, []fabric.Problem) {
	a := requestedFor(new(fabric.GatewayDecider), cluster, private, endpoints, mappings)
	return a.atSite(site), a.problems
}

// requestedFor is like gatewayFor, for an empty Site. For objects that have not changed, d reuses
// its last result.
func requestedFor(d *fabric.GatewayDecider, cluster v1alpha1.ClusterIdentity, private [32]byte, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) requested {
	keys := fabric.PublicKeys(private, fabric.MaxTunnels)
	in := fabric.Intent{ClusterID: cluster.ClusterID, ClusterName: cluster.ClusterName, PublicKey: keys[0], FurtherKeys: keys[1:]}
	var peers []fabric.Peer
	var sets []fabric.MappingSet
	var problems []fabric.Problem
	for i := range endpoints {
		te := &endpoints[i]
		if !te.DeletionTimestamp.IsZero() {
			continue // only a finalizer keeps the object; the gateway no longer uses it
		}
		peer, wrong := fabric.PeerFrom(te, originOf(te))
		problems = append(problems, wrong...)
		if len(wrong) == 0 {
			peers = append(peers, peer)
		}
	}
	for i := range mappings {
		nm := &mappings[i]
		if !nm.DeletionTimestamp.IsZero() {
			continue
		}
		origin := fabric.Origin{Kind: "NatMapping", Name: nm.Name}
		id, found, wrong := fabric.MappingsFrom(nm, origin)
		problems = append(problems, wrong...)
		if id != "" {
			sets = append(sets, fabric.MappingSet{ID: id, Mappings: found, Origin: origin})
		}
	}
	var wrong []fabric.Problem
	in.Peers, in.Waiting, wrong = fabric.Attach(peers, sets)
	problems = append(problems, wrong...)
	gw, wrong := d.GatewayFor(in)
	return requested{private: private, gateway: gw, problems: fabric.SortProblems(append(problems, wrong...))}
}

// atSite returns the gateway's configuration at a Site, to which it adds the networks of peers.
func (a *requested) atSite(site fabric.Site) fabric.Gateway {
	if a.networks == nil || !slices.Equal(site.Networks, a.ours) { // if nothing has changed, keep the previous slice, because slices with the same memory are quick to compare
		a.ours, a.networks = site.Networks, slices.Concat(site.Networks, a.gateway.Site.Networks)
	}
	gw := a.gateway
	gw.Site = fabric.Site{Networks: a.networks, Addrs: site.Addrs, Relays: site.Relays}
	return gw
}

func originOf(te *v1alpha1.TunnelEndpoint) fabric.Origin {
	return fabric.Origin{Kind: "TunnelEndpoint", Namespace: te.Namespace, Name: te.Name}
}
