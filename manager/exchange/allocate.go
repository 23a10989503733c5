package exchange

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// errNotWanted aborts an update of the IPAM state because the peer has left in the meantime.
var errNotWanted = errors.New("the peering is being taken down")

// errTooEarly means that a new peer has to wait until the nodes have reported; see Facts.Awaiting.
// A change of the Facts causes a new request.
var errTooEarly = errors.New("waiting until all nodes have reported the networks that they reach")

// If the pools have room for fewer than fewLeft further peers, each allocation logs a warning.
const fewLeft = 16

// decide validates the claim of a peer and allocates its networks.
func (r *answerReconciler) decide(ctx context.Context, peer peers.Peer, nc *v1alpha1.NetworkConfig) (ipam.Allocation, fabric.Claim, []fabric.Refusal, error) {
	var allocation ipam.Allocation
	v := Validator{Reader: r.Client, Peers: r.Peers, Facts: r.Facts, Store: r.Store}
	claim, refusals, err := v.validate(ctx, peer, nc)
	if err != nil || len(refusals) > 0 {
		return allocation, claim, refusals, err
	}
	id := peer.Cluster.ClusterID
	if facts, err := r.Facts.Facts(ctx); err != nil {
		return allocation, claim, nil, err
	} else if _, has := r.Store.State().AllocationOf(id); facts.Awaiting && !has {
		return allocation, claim, nil, errTooEarly
	}
	request, wrong := requestFrom(peer, claim)
	if wrong != nil {
		return allocation, claim, []fabric.Refusal{{Reason: v1alpha1.ReasonCIDRConflict, Problem: *wrong}}, nil //nolint:nilerr // err is nil here
	}
	before := r.Store.State()
	after, err := r.Store.Update(ctx, func(b ipam.State) (ipam.State, error) {
		// An allocation made after the peer has left would never be released. So the peer is read
		// inside Update, which does not run at the same time as a release.
		if now, err := r.Peers.ByID(ctx, id); errors.Is(err, peers.ErrNoPeer) || err == nil && (!now.Begun() || now.LocalNamespace != peer.LocalNamespace) {
			return b, errNotWanted
		} else if err != nil {
			return b, err
		}
		gateways := func(p netip.Prefix) ([]netip.Addr, error) { return gatewaysIn(ctx, r.Client, peer, claim, p) }
		next, got, inside, err := allocateClearOf(b, request, gateways)
		if had, has := b.AllocationOf(id); err == nil && has && got != had { // the previous networks are held from now on
			if request.Now, err = r.Store.Now(ctx); err == nil {
				next, got, inside, err = allocateClearOf(b, request, gateways)
				next, _ = next.Yield()
			}
		}
		if err != nil {
			return b, err
		}
		if refusals = fabric.CheckAllocation(claim, got.Pod, got.External, inside); len(refusals) > 0 {
			return b, nil
		}
		allocation = got
		return next, nil
	})
	var refusal *fabric.Refusal
	if errors.As(err, &refusal) {
		return allocation, claim, []fabric.Refusal{*refusal}, nil
	}
	if _, had := before.AllocationOf(id); err == nil && !had && after.Left() < fewLeft {
		r.Log.Warn("address pools are almost exhausted; add pools with --pools", "peersLeft", after.Left(), "pools", after.Own().Pools)
	}
	return allocation, claim, refusals, err
}

// requestFrom builds the IPAM request for a claim, with the options of the Peering.
func requestFrom(peer peers.Peer, claim fabric.Claim) (r ipam.Request, wrong *fabric.Problem) {
	r = ipam.Request{ID: peer.Cluster.ClusterID, Pod: claim.Pod, External: claim.External, AlwaysRemap: peer.Claims.AlwaysRemap}
	read := func(field, text string) (p netip.Prefix) {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			wrong = &fabric.Problem{Field: field, Message: "of the receiver's Peering is not a CIDR"}
		}
		return p
	}
	if o := peer.Overrides.PodCIDR; o != nil {
		r.WantPod = read("spec.overrides.podCIDR", *o)
	}
	if o := peer.Overrides.ExternalCIDR; o != nil {
		r.WantExternal = read("spec.overrides.externalCIDR", *o)
	}
	for _, text := range peer.Claims.Allowed {
		r.Allowed = append(r.Allowed, read("spec.claims.allowed", text))
	}
	if c := peer.Claims.Consent; c != nil {
		r.Consented = c.PodCIDR == claim.Pod.String() && c.ExternalCIDR == claim.External.String()
	}
	return r, wrong
}

// TranslationsOf returns the networks that represent a peer's claim here, or that would represent
// it after consent, each with its reason. For an invalid claim it returns zero values, because a
// condition of the NetworkConfig has the error.
func TranslationsOf(state ipam.State, peer peers.Peer, nc *v1alpha1.NetworkConfig) (translations [2]ipam.Translation) {
	if claim, problems := fabric.ClaimFrom(nc, fabric.Origin{}); len(problems) == 0 {
		if request, wrong := requestFrom(peer, claim); wrong == nil {
			translations, _ = state.Explain(request)
		}
	}
	return translations
}

// allocateClearOf allocates networks for a claim. It avoids networks that contain the gateway of a
// peer, because packets to that gateway would be routed into a tunnel. Existing allocations do not
// change, even if they contain a gateway. inside has the addresses of the gateways that the peer's
// existing networks contain.
func allocateClearOf(b ipam.State, request ipam.Request, gateways func(netip.Prefix) ([]netip.Addr, error)) (next ipam.State, allocation ipam.Allocation, inside []netip.Addr, err error) {
	var avoid []netip.Addr
	for {
		trial := b
		if len(avoid) > 0 {
			own := b.Own()
			own.Nodes = append(own.Nodes, avoid...)
			trial, _ = b.Configure(own)
		}
		if next, allocation, err = trial.Allocate(request); err != nil {
			return b, ipam.Allocation{}, nil, err
		}
		inside = nil
		for _, p := range []netip.Prefix{allocation.Pod, allocation.External} {
			found, err := gateways(p)
			if err != nil {
				return b, ipam.Allocation{}, nil, err
			}
			inside = append(inside, found...)
		}
		fresh := slices.DeleteFunc(slices.Clone(inside), func(a netip.Addr) bool { return slices.Contains(avoid, a) })
		if len(fresh) == 0 {
			if len(avoid) > 0 {
				next, _ = next.Configure(b.Own())
			}
			return next, allocation, inside, nil
		}
		avoid = append(avoid, fresh...)
	}
}

// gatewaysIn returns the addresses of peers' gateways that are inside p, including the gateway of
// the claim itself.
func gatewaysIn(ctx context.Context, reader client.Reader, peer peers.Peer, claim fabric.Claim, p netip.Prefix) (found []netip.Addr, err error) {
	var list v1alpha1.TunnelEndpointList
	if err := reader.List(ctx, &list, client.MatchingFields{indexGatewayIn: p.String()}); err != nil {
		return nil, fmt.Errorf("gateways in %v: %w", p, err)
	}
	for i := range list.Items {
		if list.Items[i].Namespace == peer.LocalNamespace {
			continue // claim.Endpoint has the present address of this peer's gateway
		}
		if addr, err := netip.ParseAddr(list.Items[i].Spec.EndpointIP); err == nil {
			found = append(found, addr)
		}
	}
	if addr, err := netip.ParseAddr(claim.Endpoint); err == nil && p.Contains(addr) {
		found = append(found, addr)
	}
	return found, nil
}
