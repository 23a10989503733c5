package rtnl

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// MTUTo returns the MTU of the path to addr. It is the MTU of the route, configured or learned from
// a router, or else the MTU of the link. links caches the MTUs of links by index.
func (k *Kernel) MTUTo(addr netip.Addr, links map[int]int) (int, error) {
	route, err := k.routeTo(addr)
	if err != nil {
		return 0, err
	}
	if route.MTU > 0 {
		return route.MTU, nil
	}
	if index := route.LinkIndex; links[index] == 0 {
		l, err := k.handles[kernel.Host].LinkByIndex(index)
		if err != nil {
			return 0, fmt.Errorf("link of the route to %s: %w", addr, err)
		}
		links[index] = l.Attrs().MTU
	}
	return links[route.LinkIndex], nil
}

// DeviceTo returns the name of the device that leads to addr. names caches names by index.
func (k *Kernel) DeviceTo(addr netip.Addr, names map[int]string) (string, error) {
	route, err := k.routeTo(addr)
	if err != nil {
		return "", err
	}
	if index := route.LinkIndex; names[index] == "" {
		l, err := k.handles[kernel.Host].LinkByIndex(index)
		if err != nil {
			return "", fmt.Errorf("link of the route to %s: %w", addr, err)
		}
		names[index] = l.Attrs().Name
	}
	return names[route.LinkIndex], nil
}

// KindTo returns the name and the kind of the device that leads to addr. Kinds are those of ip(8).
// The kind of a hardware device is empty.
func (k *Kernel) KindTo(addr netip.Addr) (name, kind string, err error) {
	route, err := k.routeTo(addr)
	if err != nil {
		return "", "", err
	}
	l, err := k.handles[kernel.Host].LinkByIndex(route.LinkIndex)
	if err != nil {
		return "", "", fmt.Errorf("link of the route to %s: %w", addr, err)
	}
	return l.Attrs().Name, l.Type(), nil
}

// Uplinks returns the ports of a bridge that lead to other nodes rather than to pods. It decides by
// the kind of the port: tunnels, hardware, and veth devices whose other end is not in another
// network namespace.
func (k *Kernel) Uplinks(bridge string) (all []string, err error) {
	h := k.handles[kernel.Host]
	l, err := h.LinkByName(bridge)
	if err != nil {
		return nil, fmt.Errorf("bridge %s: %w", bridge, err)
	}
	links, err := untilWhole(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("ports of bridge %s: %w", bridge, err)
	}
	for _, port := range links {
		a := port.Attrs()
		if a.MasterIndex != l.Attrs().Index {
			continue
		}
		switch port.Type() {
		case "vxlan", "geneve", "gretap", "ip6gretap", "device", "vlan", "bond", "openvswitch":
		case "veth":
			if a.NetNsID >= 0 {
				continue // the port leads to a pod
			}
		default:
			continue
		}
		all = append(all, a.Name)
	}
	return all, nil
}

func (k *Kernel) routeTo(addr netip.Addr) (r netlink.Route, err error) {
	routes, err := k.handles[kernel.Host].RouteGet(addr.AsSlice())
	if err != nil {
		return r, fmt.Errorf("route to %s: %w", addr, err)
	}
	if len(routes) == 0 {
		return r, fmt.Errorf("route to %s: none", addr)
	}
	k.memory.addRelevant(kernel.Host, false, routes[0].LinkIndex)
	return routes[0], nil
}

// DeviceOf returns the name and the MTU of the device with an address.
func (k *Kernel) DeviceOf(addr netip.Addr) (string, int, error) {
	addrs, err := k.handles[kernel.Host].AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return "", 0, fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addrs {
		if prefixOf(a.IPNet).Addr() == addr {
			l, err := k.handles[kernel.Host].LinkByIndex(a.LinkIndex)
			if err != nil {
				return "", 0, fmt.Errorf("device of %v: %w", addr, err)
			}
			k.memory.addRelevant(kernel.Host, false, a.LinkIndex)
			return l.Attrs().Name, l.Attrs().MTU, nil
		}
	}
	return "", 0, fmt.Errorf("no device here has %v, the InternalIP of our Node; want the agent in the host's network namespace", addr)
}
