package rtnl

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// Networks returns the networks that the process's network namespace reaches without us: all its
// addresses, and the destinations of all routes in the main table, of any type. Networks may occur
// several times and inside each other. Networks has its own socket, and may be called concurrently
// with any other function.
func Networks() (all []netip.Prefix, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	strict, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer strict.Close()
	_ = strict.SetStrictCheck(true) // then the kernel (Linux 4.20 and later) leaves out other tables, which may have thousands of routes
	links, err := untilWhole(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("links: %w", err)
	}
	ours := make(map[int]bool) // indices of our devices
	for _, l := range links {
		if kernel.OwnsDevice(l.Attrs().Name) {
			ours[l.Attrs().Index] = true
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		addrs, err := untilWhole(func() ([]netlink.Addr, error) { return h.AddrList(nil, family) })
		if err != nil && !withoutFamily(family, err) {
			return nil, fmt.Errorf("addresses: %w", err)
		}
		for _, a := range addrs {
			if addr := prefixOf(a.IPNet).Addr(); addr.IsValid() && !ours[a.LinkIndex] {
				all = append(all, netip.PrefixFrom(addr, addr.BitLen()))
			}
		}
		for _, table := range []int{unix.RT_TABLE_MAIN, unix.RT_TABLE_LOCAL} {
			routes, err := untilWhole(func() ([]netip.Prefix, error) { return routed(strict, family, table, ours) })
			if err != nil && !withoutFamily(family, err) && !errors.Is(err, unix.ENOENT) { // ENOENT: the table does not exist
				return nil, fmt.Errorf("routes: %w", err)
			}
			all = append(all, routes...)
		}
	}
	return all, nil
}

// Addresses returns the IPv4 addresses of the process's network namespace, except the addresses of
// our devices. Like Networks, it may be called concurrently with any other function.
func Addresses() (all []netip.Addr, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	addrs, err := untilWhole(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addrs {
		if addr := prefixOf(a.IPNet).Addr(); addr.IsValid() && !kernel.OwnsDevice(a.Label) {
			all = append(all, addr)
		}
	}
	return all, nil
}

// routed returns the foreign destinations in one of the kernel's tables. It leaves out broadcast
// routes. The destinations in the local table are the node's addresses, and networks in which every
// address is the node's.
func routed(h *netlink.Handle, family, table int, ours map[int]bool) (all []netip.Prefix, err error) {
	err = h.RouteListFilteredIter(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
		own := r.Protocol == kernel.GatewayProtocol || r.Protocol == kernel.NodeProtocol || ours[r.LinkIndex]
		if !own && r.Dst != nil && (table == unix.RT_TABLE_MAIN || r.Type == unix.RTN_LOCAL) {
			all = append(all, prefixOf(r.Dst))
		}
		return true
	})
	return all, err
}

// Routes returns the foreign IPv4 routes of the main table that lead through exactly one other
// host: the network and the next hop. Of several routes to a network, it returns the one with the
// lowest metric, because the kernel uses that route. Routes for a single type of service are left
// out. Like Networks, it may be called concurrently with any other function.
func Routes() ([]kernel.Route, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	_ = h.SetStrictCheck(true) // as in Networks
	found, err := untilWhole(func() (all []netlink.Route, err error) {
		err = h.RouteListFilteredIter(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			if own := r.Protocol == kernel.GatewayProtocol || r.Protocol == kernel.NodeProtocol; r.Dst != nil && r.Tos == 0 && !own {
				all = append(all, r)
			}
			return true
		})
		return all, err
	})
	best := make(map[netip.Prefix]netlink.Route)
	for _, r := range found {
		if was, has := best[prefixOf(r.Dst)]; !has || r.Priority < was.Priority {
			best[prefixOf(r.Dst)] = r
		}
	}
	var all []kernel.Route
	for network, r := range best {
		if via, _ := netip.AddrFromSlice(r.Gw); via.Unmap().Is4() && r.Type == unix.RTN_UNICAST {
			all = append(all, kernel.Route{Prefix: network, Via: via.Unmap()})
		}
	}
	return all, err
}

// untilWhole calls list until the kernel reports that nothing changed during the dump. After five
// interrupted dumps it returns the union of their results.
func untilWhole[T any](list func() ([]T, error)) (all []T, err error) {
	for range 5 {
		found, err := list()
		if err == nil {
			return found, nil
		}
		if all = append(all, found...); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, err
		}
	}
	return all, nil
}

// WatchNetworks calls notify whenever the result of Networks may have changed, until ctx ends.
func (k *Kernel) WatchNetworks(ctx context.Context, notify func()) error {
	f, err := subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, // the link group, too: routes that disappear with a link cause no message
		unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink events of networks: %w", err)
	}
	k.listen(ctx, f, reachesOthers, notify)
	return nil
}

// reachesOthers returns false if all events are about our own routes. There may be thousands of
// these.
func reachesOthers(b []byte) bool {
	messages, err := syscall.ParseNetlinkMessage(b)
	return err != nil || slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool {
		route := m.Header.Type == unix.RTM_NEWROUTE || m.Header.Type == unix.RTM_DELROUTE
		return !route || len(m.Data) < unix.SizeofRtMsg || m.Data[5] != kernel.NodeProtocol && m.Data[5] != kernel.GatewayProtocol // whether the protocol (octet 5 of struct rtmsg) is foreign
	})
}

// Counters returns the index of a device, and how many packets the device has received and sent
// since it was made.
func Counters(device string) (index int, received, sent uint64, err error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return 0, 0, 0, fmt.Errorf("%s: %w", device, err)
	}
	if s := link.Attrs().Statistics; s != nil {
		received, sent = s.RxPackets, s.TxPackets
	}
	return link.Attrs().Index, received, sent, nil
}
