package main

import (
	"context"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// veth uses no tunnel: the underlay's router has routes to the PodCIDRs, and the nodes use their
// default route. Its figures are the upper limit of this machine.
func veth(_ context.Context, b *bench) (*running, error) {
	r := &running{target: b.nodes[1].pod.Addr}
	for _, n := range b.nodes {
		route := netlink.Route{Dst: ipNet(n.cidr), Gw: n.underlay.AsSlice()}
		if err := b.lab.Underlay.Do(func() error { return netlink.RouteReplace(&route) }); err != nil {
			return r, err
		}
		r.cleanup = append(r.cleanup, func() error {
			return b.lab.Underlay.Do(func() error { return netlink.RouteDel(&route) })
		})
	}
	return r, nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
