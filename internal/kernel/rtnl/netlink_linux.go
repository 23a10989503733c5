package rtnl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// readObjects reads the owner's objects. It uses want only to choose the values of /proc/sys to
// read, and the links to read in addition to the owner's devices.
func (k *Kernel) readObjects(want kernel.State) (kernel.State, error) {
	places := slices.Clone(k.owner.Devices)
	for _, l := range want.Links {
		if p := (kernel.Place{In: l.In, Name: l.Name}); !slices.Contains(places, p) {
			places = append(places, p)
		}
	}
	var s kernel.State
	var errs []error
	k.index = make(map[kernel.Place]int, len(places))
	found := make(map[kernel.Place]netlink.Link, len(places))
	for _, p := range places {
		l, err := k.handles[p.In].LinkByName(p.Name)
		switch {
		case errors.As(err, &netlink.LinkNotFoundError{}):
		case err != nil:
			errs = append(errs, fmt.Errorf("link %s: %w", p.Name, err))
		default:
			found[p], k.index[p] = l, l.Attrs().Index
			k.memory.addRelevant(p.In, true, l.Attrs().Index)
			errs = append(errs, k.haveOn(&s, p, l))
		}
	}
	for _, p := range k.owner.Devices {
		if l, ok := found[p]; ok {
			if d, ok := device(p, l, found); ok {
				s.Devices = append(s.Devices, d)
			}
		}
	}
	for in, h := range k.handles {
		if h != nil {
			errs = append(errs, k.haveRoutes(&s, kernel.Namespace(in)), k.haveSettings(&s, kernel.Namespace(in), want.Settings))
		}
	}
	errs = append(errs, k.haveRules(&s))
	if k.owner.Filter {
		have := k.haveTables()
		s.Filters, s.SourceNAT, s.Bridges = have.filters, have.sourceNAT, have.bridges
	}
	if k.owner.NAT {
		k.lookForward() // read again, because a table that disappears with its process changes no generation and causes no event
		k.lookLegacy()
	}
	return s, errors.Join(errs...)
}

// device returns the immutable properties of a link. It returns false for the inner end of a pair.
func device(p kernel.Place, l netlink.Link, found map[kernel.Place]netlink.Link) (kernel.Device, bool) {
	d := kernel.Device{In: p.In, Name: p.Name}
	switch l := l.(type) {
	case *netlink.Vxlan:
		if l.VtepDevIndex == 0 && l.Group == nil && !l.FlowBased { // our device has no default destination: other devices count as foreign
			local, _ := netip.AddrFromSlice(l.SrcAddr)
			d.VXLAN = kernel.VXLAN{ID: uint32(l.VxlanId), Port: uint16(l.Port), Local: local.Unmap(), Learning: l.Learning, UDPChecksum: l.UDPCSum}
		}
	case *netlink.Veth:
		for q, other := range found {
			if q.In != p.In && other.Attrs().Index == l.ParentIndex && other.Attrs().ParentIndex == l.Index {
				d.Peer = q.Name
				return d, p.In == kernel.Host
			}
		}
	}
	return d, true
}

// haveOn reads a link and the objects on it, and adds them to s.
func (k *Kernel) haveOn(s *kernel.State, p kernel.Place, l netlink.Link) error {
	a, h := l.Attrs(), k.handles[p.In]
	s.Links = append(s.Links, kernel.Link{In: p.In, Name: p.Name, MAC: macOf(a.HardwareAddr), MTU: a.MTU, Up: a.Flags&net.FlagUp != 0})
	addrs, err := h.AddrList(l, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("addresses of %s: %w", p.Name, err)
	}
	for _, addr := range addrs {
		if prefix := prefixOf(addr.IPNet); !prefix.Addr().Is6() || !prefix.Addr().IsLinkLocalUnicast() { // skip addresses that the kernel adds
			s.Addresses = append(s.Addresses, kernel.Address{In: p.In, Dev: p.Name, Prefix: prefix})
		}
	}
	neighbors, err := h.NeighList(a.Index, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("neighbours of %s: %w", p.Name, err)
	}
	for _, n := range neighbors {
		if addr, ok := netip.AddrFromSlice(n.IP); ok && n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr != nil {
			s.Neighbors = append(s.Neighbors, kernel.Neighbor{In: p.In, Dev: p.Name, Addr: addr.Unmap(), MAC: macOf(n.HardwareAddr)})
		}
	}
	if l.Type() != "vxlan" {
		return nil
	}
	entries, err := h.NeighList(a.Index, unix.AF_BRIDGE)
	if err != nil {
		return fmt.Errorf("forwarding database of %s: %w", p.Name, err)
	}
	for _, e := range entries {
		dst, _ := netip.AddrFromSlice(e.IP)
		s.FDB = append(s.FDB, kernel.FDBEntry{In: p.In, Dev: p.Name, MAC: macOf(e.HardwareAddr), Dst: dst.Unmap()})
	}
	return nil
}

// routeTypes maps our route types to the kernel's numbers. If another program has changed the type
// of our route, the route is read without a device, so it differs from the wanted route.
var routeTypes = map[kernel.RouteType]int{kernel.Unicast: unix.RTN_UNICAST, kernel.Unreachable: unix.RTN_UNREACHABLE, kernel.Throw: unix.RTN_THROW}

func (k *Kernel) haveRoutes(s *kernel.State, in kernel.Namespace) error {
	type hop struct{ at, dev int } // index of the route, index of the device
	var hops []hop
	names := make(map[int]string)
	for p, index := range k.index {
		if p.In == in {
			names[index] = p.Name
		}
	}
	ours := &netlink.Route{Table: unix.RT_TABLE_UNSPEC, Protocol: netlink.RouteProtocol(k.owner.Protocol)}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// Routes are read one by one, because a list for a thousand peers would be a MiB of
		// garbage.
		err := k.handles[in].RouteListFilteredIter(family, ours, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL, func(r netlink.Route) bool {
			if int(r.Protocol) != k.owner.Protocol || !slices.Contains(k.owner.Tables[in], r.Table) {
				return true
			}
			have := kernel.Route{In: in, Prefix: prefixOf(r.Dst), Table: r.Table, Metric: r.Priority, Protocol: int(r.Protocol)}
			for t, number := range routeTypes {
				if r.Type == number {
					have.Type = t
				}
			}
			if r.Dst == nil {
				have.Prefix = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
				if family == netlink.FAMILY_V6 {
					have.Prefix = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
				}
			}
			gw := r.Gw
			for _, m := range r.MultiPath {
				hops, gw = append(hops, hop{len(s.Routes), m.LinkIndex}), m.Gw
			}
			if len(r.MultiPath) == 0 && r.Type == unix.RTN_UNICAST {
				hops = append(hops, hop{len(s.Routes), r.LinkIndex})
			}
			if via, ok := netip.AddrFromSlice(gw); ok {
				have.Via = via.Unmap()
			}
			if src, ok := netip.AddrFromSlice(r.Src); ok {
				have.Src = src.Unmap()
			}
			s.Routes = append(s.Routes, have)
			return true
		})
		if err != nil && !withoutFamily(family, err) {
			return fmt.Errorf("routes: %w", err)
		}
	}
	for _, p := range hops { // after the dump, because these queries use the same socket
		if names[p.dev] == "" {
			if l, err := k.handles[in].LinkByIndex(p.dev); err == nil {
				names[p.dev] = l.Attrs().Name
			}
		}
		if r := &s.Routes[p.at]; r.Dev == "" {
			r.Dev = names[p.dev]
		} else {
			r.Dev = kernel.Devs(append(strings.Fields(r.Dev), names[p.dev])...)
		}
	}
	return nil
}

func (k *Kernel) haveRules(s *kernel.State) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := k.handles[kernel.Host].RuleList(family)
		if withoutFamily(family, err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("policy rules: %w", err)
		}
		for _, r := range rules {
			if int(r.Protocol) == k.owner.Protocol {
				s.Rules = append(s.Rules, kernel.Rule{V6: family == netlink.FAMILY_V6, Priority: r.Priority, Iif: r.IifName,
					From: prefixOf(r.Src), To: prefixOf(r.Dst), Table: r.Table, Protocol: k.owner.Protocol})
			}
		}
	}
	return nil
}

// withoutFamily reports whether err means that the kernel has no IPv6.
func withoutFamily(family int, err error) bool {
	return family == netlink.FAMILY_V6 && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT))
}

// change executes one operation. It also succeeds if an object to be added exists already, or an
// object to be removed does not exist.
func (k *Kernel) change(o kernel.Op) (err error) {
	if o.Remove {
		defer func() { err = ignore(err, unix.ESRCH, unix.ENOENT, unix.ENODEV, unix.EADDRNOTAVAIL) }()
	}
	switch v := o.Object.(type) {
	case kernel.Filter:
		return k.changeFilter(o.Remove, v)
	case kernel.Bridge:
		return k.changeBridge(o.Remove, v)
	case kernel.SourceNAT:
		return k.changeSourceNAT(o.Remove, v)
	case kernel.Accept:
		return k.changeAccept(o.Remove, v)
	case kernel.Device:
		return k.changeDevice(o.Remove, v)
	case kernel.Setting:
		return k.do(v.In, func() error { return k.set(v) })
	case kernel.Link:
		return k.changeLink(v)
	case kernel.Address:
		index, err := k.dev(v.In, v.Dev)
		if err != nil {
			return err
		}
		l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
		a := &netlink.Addr{IPNet: ipNet(v.Prefix)}
		if o.Remove {
			return k.handles[v.In].AddrDel(l, a)
		}
		a.Flags = unix.IFA_F_NOPREFIXROUTE
		if v.Prefix.Addr().Is6() {
			a.Flags |= unix.IFA_F_NODAD // no duplicate address detection: our links have no other hosts, and it would delay the use of the address as source
		}
		return k.handles[v.In].AddrReplace(l, a)
	case kernel.FDBEntry:
		return k.changeNeigh(o.Remove, v.In, v.Dev, &netlink.Neigh{Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, HardwareAddr: v.MAC[:], IP: v.Dst.AsSlice()})
	case kernel.Neighbor:
		return k.changeNeigh(o.Remove, v.In, v.Dev, &netlink.Neigh{HardwareAddr: v.MAC[:], IP: v.Addr.AsSlice()})
	case kernel.Route:
		return k.changeRoute(o.Remove, v)
	case kernel.Rule:
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table, r.Protocol = netlink.FAMILY_V4, v.Priority, v.Table, uint8(v.Protocol)
		if v.V6 {
			r.Family = netlink.FAMILY_V6
		}
		r.IifName, r.Src, r.Dst = v.Iif, ipNet(v.From), ipNet(v.To)
		if o.Remove {
			return k.handles[kernel.Host].RuleDel(r)
		}
		return ignore(k.handles[kernel.Host].RuleAdd(r), unix.EEXIST)
	}
	return fmt.Errorf("no such object: %T", o.Object)
}

// Attributes of include/uapi/linux/if_link.h.
const (
	inetConf         = 1 // IFLA_INET_CONF
	inet6AddrGenMode = 8 // IFLA_INET6_ADDR_GEN_MODE
)

func (k *Kernel) changeDevice(remove bool, v kernel.Device) error {
	p := kernel.Place{In: v.In, Name: v.Name}
	if remove {
		index := k.index[p]
		delete(k.index, p)
		delete(k.index, kernel.Place{In: kernel.Inner, Name: v.Peer})
		return k.handles[v.In].LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}})
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = v.Name
	if v.Peer != "" {
		return k.handles[v.In].LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: v.Peer, PeerNamespace: netlink.NsFd(k.inner.Fd())})
	}
	return k.do(v.In, func() error { return addVXLAN(v) })
}

// addVXLAN makes a VXLAN device in the namespace of the calling thread. Package netlink (v1.3.1)
// cannot switch off the outer checksum, which the kernel computes by default.
func addVXLAN(v kernel.Device) error {
	bit := func(on bool) []byte {
		if on {
			return []byte{1}
		}
		return []byte{0}
	}
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("vxlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_VXLAN_ID, nl.Uint32Attr(v.VXLAN.ID))
	if v.VXLAN.Local.IsValid() {
		data.AddRtAttr(nl.IFLA_VXLAN_LOCAL, v.VXLAN.Local.AsSlice())
	}
	data.AddRtAttr(nl.IFLA_VXLAN_PORT, binary.BigEndian.AppendUint16(nil, v.VXLAN.Port))
	data.AddRtAttr(nl.IFLA_VXLAN_LEARNING, bit(v.VXLAN.Learning))
	data.AddRtAttr(nl.IFLA_VXLAN_UDP_CSUM, bit(v.VXLAN.UDPChecksum))
	req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(v.Name)))
	req.AddData(info)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// changeLink changes a link. It brings the device up last.
func (k *Kernel) changeLink(v kernel.Link) error {
	index, err := k.dev(v.In, v.Name)
	if err != nil {
		return err
	}
	l, h := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, k.handles[v.In]
	if v.MAC != (kernel.MAC{}) {
		err = h.LinkSetHardwareAddr(l, v.MAC[:])
	}
	return errors.Join(err, h.LinkSetMTU(l, v.MTU), h.LinkSetUp(l))
}

// neighborOf returns the identity and the value of an entry. For an entry of a forwarding database,
// addr is the destination.
func neighborOf(index, family int, mac kernel.MAC, addr netip.Addr) (neighbor, neighborValue) {
	if family == unix.AF_BRIDGE {
		return neighbor{index: index, mac: mac}, neighborValue{present: true, mac: mac, dst: addr}
	}
	return neighbor{index: index, addr: addr}, neighborValue{present: true, mac: mac}
}

func (k *Kernel) changeNeigh(remove bool, in kernel.Namespace, dev string, n *netlink.Neigh) (err error) {
	if n.LinkIndex, err = k.dev(in, dev); err != nil {
		return err
	}
	n.State = netlink.NUD_PERMANENT
	addr, _ := netip.AddrFromSlice(n.IP)
	entry, value := neighborOf(n.LinkIndex, n.Family, macOf(n.HardwareAddr), addr)
	if remove {
		k.memory.write(in, entry, neighborValue{})
		return k.handles[in].NeighDel(n)
	}
	k.memory.write(in, entry, value)
	return k.handles[in].NeighSet(n)
}

func (k *Kernel) changeRoute(remove bool, v kernel.Route) error {
	r := &netlink.Route{Dst: ipNet(v.Prefix), Table: v.Table, Priority: v.Metric, Protocol: netlink.RouteProtocol(v.Protocol),
		Type: routeTypes[v.Type], Family: nl.GetIPFamily(v.Prefix.Addr().AsSlice()), Src: v.Src.AsSlice()}
	if remove { // remove the route regardless of its next hop
		r.Scope = netlink.SCOPE_NOWHERE
		if v.Type == kernel.Unicast && v.Dev == "" {
			r.Type = 0 // any type; see routeTypes
		}
		return k.handles[v.In].RouteDel(r)
	}
	if v.Type == kernel.Unicast && !v.Via.IsValid() && v.Prefix.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	var hops []*netlink.NexthopInfo
	for _, name := range strings.Fields(v.Dev) {
		index, err := k.dev(v.In, name)
		if err != nil {
			return err
		}
		hop := &netlink.NexthopInfo{LinkIndex: index, Gw: v.Via.AsSlice()}
		if v.Via.Is4() {
			hop.Flags = int(netlink.FLAG_ONLINK)
		}
		hops = append(hops, hop)
	}
	if len(hops) == 1 {
		r.LinkIndex, r.Gw, r.Flags = hops[0].LinkIndex, hops[0].Gw, hops[0].Flags
	} else {
		r.MultiPath = hops
	}
	return k.handles[v.In].RouteReplace(r)
}

// dev returns the index of a device. A plan makes devices before it uses them, and removes them
// last.
func (k *Kernel) dev(in kernel.Namespace, name string) (int, error) {
	p := kernel.Place{In: in, Name: name}
	if index, ok := k.index[p]; ok {
		return index, nil
	}
	l, err := k.handles[in].LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return 0, unix.ENODEV
	}
	if err != nil {
		return 0, err
	}
	k.index[p] = l.Attrs().Index
	k.memory.addRelevant(in, true, k.index[p])
	return k.index[p], nil
}

// ignore returns nil if err is one of the errors that count as success.
func ignore(err error, successes ...error) error {
	if slices.ContainsFunc(successes, func(success error) bool { return errors.Is(err, success) }) {
		return nil
	}
	return err
}

func macOf(a net.HardwareAddr) (m kernel.MAC) {
	copy(m[:], a)
	return m
}

func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones)
}

func ipNet(p netip.Prefix) *net.IPNet {
	if !p.IsValid() {
		return nil
	}
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
