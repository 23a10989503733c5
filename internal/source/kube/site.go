package kube

import (
	"context"
	"net/netip"
	"net/url"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// site is where this cluster is, as its objects say.
func (g *Gateway) site(ctx context.Context) (fabric.Site, error) {
	return siteOf(ctx, g.objects, g.o.Config.Host)
}

// siteOf is where a cluster is: the networks in the books of the IPAM, the nodes, and the API servers,
// one of which is at host.
func siteOf(ctx context.Context, reader client.Reader, host string) (fabric.Site, error) {
	var (
		site    fabric.Site
		books   v1alpha1.IpamStorageList
		nodes   corev1.NodeList
		servers discoveryv1.EndpointSliceList
	)
	for _, list := range []client.ObjectList{&books, &nodes, &servers} {
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
	return site.With(apiServers(host, servers.Items), "an API server of ours").WithRelays(nodeAddrs(nodes.Items), "a node of ours"), nil
}

// apiServers are the addresses at which API servers are reached: by this process, and those behind
// their Service.
func apiServers(host string, slices []discoveryv1.EndpointSlice) (all []netip.Addr) {
	if u, err := url.Parse(host); err == nil {
		if addr, err := netip.ParseAddr(u.Hostname()); err == nil { // it may be a name
			all = append(all, addr)
		}
	}
	for i := range slices {
		for _, e := range slices[i].Endpoints {
			all = appendAddrs(all, e.Addresses...)
		}
	}
	return all
}

// nodeAddrs are the addresses of all types: a peer's gateway is no more at an external one.
func nodeAddrs(nodes []corev1.Node) (all []netip.Addr) {
	for i := range nodes {
		for _, a := range nodes[i].Status.Addresses {
			all = appendAddrs(all, a.Address)
		}
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
