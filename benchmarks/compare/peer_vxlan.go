package main

import (
	"context"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// vxlan is the kernel's VXLAN between the two nodes, unencrypted, as CNIs use it between the
// nodes of one cluster.
func vxlan(_ context.Context, b *bench) (*running, error) {
	r := &running{target: b.nodes[1].pod.Addr}
	for i := range b.nodes {
		own, other := b.nodes[i], b.nodes[1-i]
		err := own.host.Do(func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.MTU = "vxlan.bench", b.mtu-50 // outer IPv4, UDP, VXLAN and inner Ethernet
			return netlink.LinkAdd(&netlink.Vxlan{
				LinkAttrs: attrs, VxlanId: 71, Port: 4789, SrcAddr: own.underlay.AsSlice(), Group: other.underlay.AsSlice(),
			})
		})
		if err != nil {
			return r, err
		}
		r.cleanup = append(r.cleanup, func() error {
			return own.host.Do(func() error {
				return netlink.LinkDel(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "vxlan.bench"}})
			})
		})
		addr := netip.AddrFrom4([4]byte{169, 254, 71, byte(1 + i)})
		if err := own.host.Do(func() error {
			link, err := netlink.LinkByName("vxlan.bench")
			if err != nil {
				return err
			}
			return netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(addr, 24))})
		}); err != nil {
			return r, err
		}
		if err := own.routeVia(other.cidr, "vxlan.bench", netip.AddrFrom4([4]byte{169, 254, 71, byte(2 - i)})); err != nil {
			return r, err
		}
	}
	return r, nil
}
