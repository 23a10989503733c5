package kube

import (
	"context"
	"net/netip"
	"net/url"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// site is where this cluster is, as its objects say.
func (g *Gateway) site(ctx context.Context) (fabric.Site, error) {
	return siteOf(ctx, g.objects, g.o.Config.Host, g.places.site())
}

// siteOf is where a cluster is: its nodes, the networks in the books of the IPAM, and the API servers, one
// of which is at host.
func siteOf(ctx context.Context, reader client.Reader, host string, site fabric.Site) (fabric.Site, error) {
	var (
		books   v1alpha1.IpamStorageList
		servers discoveryv1.EndpointSliceList
	)
	for _, list := range []client.ObjectList{&books, &servers} {
		if err := reader.List(ctx, list, client.UnsafeDisableDeepCopy); err != nil {
			return site, err
		}
	}
	for i := range books.Items {
		spec := &books.Items[i].Spec
		for _, n := range []struct {
			text, what string
			relay      bool
		}{
			{spec.PodCIDR, "our PodCIDR", true}, {spec.ServiceCIDR, "our ServiceCIDR", false}, {spec.ExternalCIDR, "our ExternalCIDR", false},
		} {
			if p, err := netip.ParsePrefix(n.text); err == nil { // empty until the manager knows it
				site.Networks = append(site.Networks, fabric.SiteNetwork{Prefix: p, What: n.what, Relay: n.relay})
			}
		}
	}
	return site.With(slices.DeleteFunc(apiServers(host, servers.Items), func(a netip.Addr) bool { return site.Relays[a.Unmap().WithZone("")] }), "an API server of ours"), nil
}

// nodesSite is where nodes are.
func nodesSite(addrs []netip.Addr) fabric.Site { return fabric.Site{}.WithRelays(addrs, nodeOfOurs) }

const nodeOfOurs = "a node of ours"

// apiServers are the addresses at which API servers are reached: by this process, and those behind
// their Service.
func apiServers(host string, lists []discoveryv1.EndpointSlice) (all []netip.Addr) {
	if u, err := url.Parse(host); err == nil {
		if addr, err := netip.ParseAddr(u.Hostname()); err == nil { // it may be a name
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

// nodeAddrs are the addresses of all types: a peer's gateway is no more at an external one.
func nodeAddrs(node *corev1.Node) (all []netip.Addr) {
	for _, a := range node.Status.Addresses {
		all = appendAddrs(all, a.Address)
	}
	return all
}

func appendAddrs(all []netip.Addr, texts ...string) []netip.Addr {
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil { // host names are not
			all = append(all, addr)
		}
	}
	return all
}

// slimNetworks keeps what site reads of the books.
func slimNetworks(o any) (any, error) {
	if b, ok := o.(*v1alpha1.IpamStorage); ok {
		return &v1alpha1.IpamStorage{ObjectMeta: slimMeta(b.ObjectMeta), Spec: v1alpha1.IpamStorageSpec{
			PodCIDR: b.Spec.PodCIDR, ServiceCIDR: b.Spec.ServiceCIDR, ExternalCIDR: b.Spec.ExternalCIDR}}, nil
	}
	return o, nil
}
