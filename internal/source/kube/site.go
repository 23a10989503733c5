package kube

import (
	"context"
	"net/netip"
	"net/url"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// site returns the addresses and networks of this cluster, as its objects define them.
func (g *Gateway) site(ctx context.Context) (fabric.Site, error) {
	return siteOf(ctx, g.objects, g.o.Config.Host, g.locations.site())
}

// siteOf takes a Site with the addresses of the nodes, and adds the networks in the
// NetworkAllocations and the addresses of the API servers. host is the URL of one API server.
func siteOf(ctx context.Context, reader client.Reader, host string, site fabric.Site) (fabric.Site, error) {
	var (
		allocations isthmus.NetworkAllocationList
		servers     discoveryv1.EndpointSliceList
	)
	for _, list := range []client.ObjectList{&allocations, &servers} {
		if err := reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return site, err
		}
	}
	own := fabric.OwnIn(allocations.Items, time.Now())
	for _, n := range []struct {
		text, what string
		relay      bool
	}{
		{own.PodCIDR, "our PodCIDR", true}, {own.ServiceCIDR, "our ServiceCIDR", false}, {own.ExternalCIDR, "our ExternalCIDR", false},
	} {
		if p, err := netip.ParsePrefix(n.text); err == nil { // empty until the manager has found out the network
			site.Networks = append(site.Networks, fabric.SiteNetwork{Prefix: p, What: n.what, Relay: n.relay})
		}
	}
	return site.With(slices.DeleteFunc(apiServers(host, servers.Items), func(a netip.Addr) bool { return site.Relays[a.Unmap().WithZone("")] }), "an API server of ours"), nil
}

// nodesSite returns a Site with the addresses of nodes.
func nodesSite(addrs []netip.Addr) fabric.Site { return fabric.Site{}.WithRelays(addrs, ownNode) }

const ownNode = "a node of ours"

// apiServers returns the addresses of the API servers: the address in the URL host, which this
// process uses, and the endpoints of the API servers' Service, which are in lists.
func apiServers(host string, lists []discoveryv1.EndpointSlice) (all []netip.Addr) {
	if u, err := url.Parse(host); err == nil {
		if addr, err := netip.ParseAddr(u.Hostname()); err == nil { // skips a host name
			all = append(all, addr)
		}
	}
	for i := range lists {
		for _, e := range lists[i].Endpoints {
			all = appendAddrs(all, e.Addresses...)
		}
	}
	return all
}

// nodeAddrs returns the addresses of all types, including external ones: a peer's gateway
// cannot have any of them.
func nodeAddrs(node *corev1.Node) (all []netip.Addr) {
	for _, a := range node.Status.Addresses {
		all = appendAddrs(all, a.Address)
	}
	return all
}

func appendAddrs(all []netip.Addr, texts ...string) []netip.Addr {
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil { // skips host names
			all = append(all, addr)
		}
	}
	return all
}

// slimOwn drops the fields of a NetworkAllocation that site does not read.
func slimOwn(o any) (any, error) {
	if n, ok := o.(*isthmus.NetworkAllocation); ok {
		slim := &isthmus.NetworkAllocation{ObjectMeta: slimMeta(n.ObjectMeta)}
		if slim.Spec.Own = n.Spec.Own; n.Spec.Own != nil {
			slim.Spec.Revision = n.Spec.Revision
		}
		return slim, nil
	}
	return o, nil
}
