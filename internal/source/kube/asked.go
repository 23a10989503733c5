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

// ask reads what peers ask for, if that may be something else than before.
func (g *Gateway) ask(ctx context.Context, cluster v1alpha1.ClusterIdentity, ring keyring.Ring) error {
	private := ring.Private
	keys := g.preshared.read(ctx, g.o.Namespace)
	if !g.asking.Swap(false) && private == g.asked.private && maps.Equal(keys, g.asked.secret) {
		return nil
	}
	var endpoints v1alpha1.TunnelEndpointList
	var mappings v1alpha1.NatMappingList
	err := errors.Join(g.objects.List(ctx, &endpoints, client.UnsafeDisableDeepCopy), g.objects.List(ctx, &mappings, client.UnsafeDisableDeepCopy))
	if err != nil {
		g.asking.Store(true)
		return err
	}
	usable, preshared, lacking := demand(endpoints.Items, keys)
	g.asked = askedFor(&g.decider, cluster, private, usable, mappings.Items)
	g.asked.secret, g.asked.preshared, g.asked.problems = keys, preshared, fabric.SortProblems(append(g.asked.problems, lacking...))
	if g.o.StateDirectory != "" {
		g.asked.saved = savedFrom(cluster, private, endpoints.Items, mappings.Items)
		g.asked.saved.preshared = keys
	}
	return nil
}

// asked is what the objects of peers ask for, wherever our own cluster is.
type asked struct {
	private  [32]byte
	gateway  fabric.Gateway // for a cluster that is nowhere
	problems []fabric.Problem
	saved    savedObjects // without places

	secret, preshared map[string]PresharedKey // as the Secret has them, and as handshakes may use them

	ours, networks []fabric.SiteNetwork // of the last site, and with those of peers
}

// gatewayFor has it decided what the objects ask for. What is wrong is left out; each problem names
// the object and the field.
func gatewayFor(cluster v1alpha1.ClusterIdentity, private [32]byte, site fabric.Site, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) (fabric.Gateway, []fabric.Problem) {
	a := askedFor(new(fabric.GatewayDecider), cluster, private, endpoints, mappings)
	return a.at(site), a.problems
}

// askedFor decides with d, for which what stays the same costs a comparison.
func askedFor(d *fabric.GatewayDecider, cluster v1alpha1.ClusterIdentity, private [32]byte, endpoints []v1alpha1.TunnelEndpoint, mappings []v1alpha1.NatMapping) asked {
	keys := fabric.PublicKeys(private, fabric.MaxTunnels)
	in := fabric.Intent{ClusterID: cluster.ClusterID, ClusterName: cluster.ClusterName, PublicKey: keys[0], FurtherKeys: keys[1:]}
	var peers []fabric.Peer
	var sets []fabric.MappingSet
	var problems []fabric.Problem
	for i := range endpoints {
		te := &endpoints[i]
		if !te.DeletionTimestamp.IsZero() {
			continue // somebody's finalizer holds it; we are done with it
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
	return asked{private: private, gateway: gw, problems: fabric.SortProblems(append(problems, wrong...))}
}

// at is the gateway of a cluster that is at site, to which peers add networks and nothing else.
func (a *asked) at(site fabric.Site) fabric.Gateway {
	if a.networks == nil || !slices.Equal(site.Networks, a.ours) { // else the same list again, which is soon compared
		a.ours, a.networks = site.Networks, slices.Concat(site.Networks, a.gateway.Site.Networks)
	}
	gw := a.gateway
	gw.Site = fabric.Site{Networks: a.networks, Addrs: site.Addrs, Relays: site.Relays}
	return gw
}

func originOf(te *v1alpha1.TunnelEndpoint) fabric.Origin {
	return fabric.Origin{Kind: "TunnelEndpoint", Namespace: te.Namespace, Name: te.Name}
}
