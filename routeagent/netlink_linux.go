package routeagent

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/rtnetlink"
)

// kernel makes a fabric.Node true in the network namespace of the process. The
// kernel itself is the only memory of what is there. One goroutine uses it.
type kernel struct {
	log  *slog.Logger
	lock *net.UnixListener // one agent per network namespace
	nl   *netlink.Handle
	wg   sync.WaitGroup // reader of events
}

// lockName is an abstract Unix address. Those belong to a network namespace and
// vanish with the process.
const lockName = "@isthmus.net/route-agent"

// mainTable is where the route to the overlay's network is, among foreign ones.
const mainTable = unix.RT_TABLE_MAIN

// openKernel takes the lock of the namespace. The caller calls close.
func openKernel(log *slog.Logger) (*kernel, error) {
	lock, err := net.ListenUnix("unix", &net.UnixAddr{Name: lockName, Net: "unix"})
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, errors.New("another isthmus route agent runs in this network namespace")
	}
	if err != nil {
		return nil, fmt.Errorf("lock of the network namespace: %w", err)
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return &kernel{log: log, lock: lock, nl: nl}, nil
}

// close waits for the readers of events, whose ctx has to be done.
func (k *kernel) close() {
	k.wg.Wait()
	k.nl.Close()
	k.lock.Close()
}

// events calls notify whenever something changed that may concern us, until ctx
// ends. An event means no more than "compare again", so that a lost one is only
// a delay.
func (k *kernel) events(ctx context.Context, notify func()) error {
	f, err := rtnetlink.Subscribe(unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
		unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV4_NETCONF)
	if err != nil {
		return fmt.Errorf("netlink events: %w", err)
	}
	k.wg.Go(func() { <-ctx.Done(); f.Close() })
	k.wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, err := f.Read(buf)
			switch {
			case errors.Is(err, os.ErrClosed):
				return
			case errors.Is(err, unix.ENOBUFS): // events were lost
				notify()
			case err != nil:
				k.log.Warn("netlink events ended, comparing at intervals only", "error", err)
				return
			case concerns(buf[:n]):
				notify()
			}
		}
	})
	return nil
}

// concerns leaves out what a busy node has most of: foreign routes and permanent
// coming and going of neighbours. In doubt it says yes.
func concerns(b []byte) bool {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return true
	}
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			// struct rtmsg: the table is its fifth octet and says 252 ("see the
			// attribute") above 255; the protocol is the next.
			if len(m.Data) < unix.SizeofRtMsg || m.Data[4] == unix.RT_TABLE_COMPAT || m.Data[5] == fabric.NodeProtocol {
				return true
			}
		case unix.RTM_NEWNEIGH:
			// struct ndmsg: the state is at 8. Entries of ours are permanent.
			if len(m.Data) < unix.SizeofNdMsg || binary.NativeEndian.Uint16(m.Data[8:])&unix.NUD_PERMANENT != 0 {
				return true
			}
		default:
			return true
		}
	}
	return false
}

// underlayMTU is the MTU of the device with that address.
func (k *kernel) underlayMTU(addr netip.Addr) (int, error) {
	addrs, err := k.nl.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return 0, fmt.Errorf("addresses: %w", err)
	}
	for _, a := range addrs {
		if prefixOf(a.IPNet).Addr() == addr {
			l, err := k.nl.LinkByIndex(a.LinkIndex)
			if err != nil {
				return 0, fmt.Errorf("device of %v: %w", addr, err)
			}
			return l.Attrs().MTU, nil
		}
	}
	return 0, fmt.Errorf("no device here has %v, the InternalIP of our Node; want the agent in the host's network namespace", addr)
}

// forwards says what is wrong when the node does not forward packets at all.
// That is the owner's to change, or the CNI's.
func forwards() error {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return err
	}
	if v := string(bytes.TrimSpace(b)); v != "1" {
		return fmt.Errorf("net.ipv4.ip_forward is %s: the node does not forward packets of pods; want 1", v)
	}
	return nil
}

// apply makes want true and returns the changes that succeeded. It goes on after
// a failure and returns all of them.
func (k *kernel) apply(want fabric.Node) (plan, error) {
	have, err := k.have(want)
	for range 5 { // a dump is interrupted when something changes meanwhile, as it does on a busy node
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
		have, err = k.have(want)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's state: %w", err)
	}
	var done plan
	var errs []error
	for _, o := range planFor(have, want) {
		if err := k.do(o); err != nil {
			if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
				err = fmt.Errorf("%w (the process needs CAP_NET_ADMIN)", err)
			}
			errs = append(errs, fmt.Errorf("%s: %w", o.command(), err))
			continue
		}
		done = append(done, o)
	}
	return done, errors.Join(errs...)
}

// have reads what is there of our own. want is only asked which values of
// /proc/sys to read.
func (k *kernel) have(want fabric.Node) (fabric.Node, error) {
	var n fabric.Node
	index := 0
	l, err := k.nl.LinkByName(fabric.OverlayDevice)
	switch {
	case errors.As(err, &netlink.LinkNotFoundError{}):
	case err != nil:
		return n, fmt.Errorf("link %s: %w", fabric.OverlayDevice, err)
	default:
		index = l.Attrs().Index
		if err := k.haveOn(&n, l); err != nil {
			return n, err
		}
		n.Sysctls = haveSysctls(want.Sysctls)
	}
	if err := k.haveRoutes(&n, index); err != nil {
		return n, err
	}
	return n, k.haveRules(&n)
}

// haveOn reads the overlay device and what hangs on it.
func (k *kernel) haveOn(n *fabric.Node, l netlink.Link) error {
	a := l.Attrs()
	var device fabric.Device // of another kind, or with a default destination: zero, which nobody wants
	if v, ok := l.(*netlink.Vxlan); ok && v.VtepDevIndex == 0 && v.Group == nil && !v.FlowBased {
		local, _ := netip.AddrFromSlice(v.SrcAddr)
		device = fabric.Device{ID: uint32(v.VxlanId), Port: uint16(v.Port), Local: local.Unmap(), Learning: v.Learning}
	}
	n.Devices = []fabric.Device{device}
	n.Links = []fabric.Link{{MAC: macOf(a.HardwareAddr), MTU: a.MTU, Up: a.Flags&net.FlagUp != 0}}

	addrs, err := k.nl.AddrList(l, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("addresses of %s: %w", a.Name, err)
	}
	for _, addr := range addrs {
		n.Addresses = append(n.Addresses, fabric.Address{Prefix: prefixOf(addr.IPNet)})
	}
	neighbors, err := k.nl.NeighList(a.Index, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("neighbours of %s: %w", a.Name, err)
	}
	for _, e := range neighbors {
		if addr, ok := netip.AddrFromSlice(e.IP); ok && e.State&netlink.NUD_PERMANENT != 0 {
			n.Neighbors = append(n.Neighbors, fabric.Neighbor{Addr: addr.Unmap(), MAC: macOf(e.HardwareAddr)})
		}
	}
	entries, err := k.nl.NeighList(a.Index, unix.AF_BRIDGE)
	if err != nil {
		return fmt.Errorf("forwarding database of %s: %w", a.Name, err)
	}
	for _, e := range entries {
		node, _ := netip.AddrFromSlice(e.IP)
		n.FDB = append(n.FDB, fabric.FDBEntry{MAC: macOf(e.HardwareAddr), Node: node.Unmap()})
	}
	return nil
}

// haveRoutes reads our routes of both tables; index is that of the overlay device.
func (k *kernel) haveRoutes(n *fabric.Node, index int) error {
	all := &netlink.Route{Table: unix.RT_TABLE_UNSPEC, Protocol: fabric.NodeProtocol}
	routes, err := k.nl.RouteListFiltered(netlink.FAMILY_V4, all, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return fmt.Errorf("routes: %w", err)
	}
	for _, r := range routes {
		if r.Table != fabric.NodeTable && r.Table != mainTable {
			continue
		}
		have := fabric.Route{Prefix: prefixOf(r.Dst), Table: r.Table, Metric: r.Priority}
		if r.Dst == nil {
			have.Prefix = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		}
		if via, ok := netip.AddrFromSlice(r.Gw); ok {
			have.Via = via.Unmap()
		}
		switch {
		case r.Type == unix.RTN_UNREACHABLE:
			have.Kind = fabric.Unreachable
		case r.Type == unix.RTN_THROW:
			have.Kind = fabric.Throw
		case r.LinkIndex != index || r.Type != unix.RTN_UNICAST: // changed by somebody
			have.Kind, have.Via = fabric.ViaOverlay, netip.Addr{}
		case !have.Via.IsValid():
			have.Kind = fabric.OnOverlay
		}
		n.Routes = append(n.Routes, have)
	}
	return nil
}

func (k *kernel) haveRules(n *fabric.Node) error {
	rules, err := k.nl.RuleList(netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("policy rules: %w", err)
	}
	for _, r := range rules {
		if r.Protocol != fabric.NodeProtocol {
			continue
		}
		n.Rules = append(n.Rules, fabric.Rule{Priority: r.Priority, In: r.IifName, From: prefixOf(r.Src), To: prefixOf(r.Dst), Table: r.Table})
	}
	return nil
}

// haveSysctls reads the values. In an unprivileged container /proc/sys cannot be
// written; a value that serves as it is then counts as the wanted one.
func haveSysctls(want []fabric.Sysctl) (have []fabric.Sysctl) {
	for _, s := range want {
		path := "/proc/sys/" + s.Path
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it is written, and that error tells
		}
		value := string(bytes.TrimSpace(b))
		if value != s.Value && filepath.Base(s.Path) == "rp_filter" && unix.Access(path, unix.W_OK) != nil && !strict(value) {
			value = s.Value
		}
		have = append(have, fabric.Sysctl{Path: s.Path, Value: value})
	}
	return have
}

// strict says whether reverse path filtering is strict on a device with that
// value: the kernel takes the larger of the device's and that of all.
func strict(value string) bool {
	b, err := os.ReadFile("/proc/sys/net/ipv4/conf/all/rp_filter")
	return err != nil || max(value, string(bytes.TrimSpace(b))) == "1"
}

// do carries out one change. Adding what is there and removing what is gone is
// success.
func (k *kernel) do(o op) error {
	switch v := o.object.(type) {
	case fabric.Device:
		return k.doDevice(o.remove, v)
	case fabric.Sysctl:
		return os.WriteFile("/proc/sys/"+v.Path, []byte(v.Value), 0)
	case fabric.Route:
		return k.doRoute(o.remove, v)
	case fabric.Rule:
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table, r.Protocol = netlink.FAMILY_V4, v.Priority, v.Table, fabric.NodeProtocol
		r.IifName, r.Src, r.Dst = v.In, ipNet(v.From), ipNet(v.To)
		if o.remove {
			return rtnetlink.IgnoreGone(k.nl.RuleDel(r))
		}
		return there(k.nl.RuleAdd(r))
	}

	l, err := k.nl.LinkByName(fabric.OverlayDevice)
	if err != nil {
		if o.remove && errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil // it went with the device
		}
		return err
	}
	switch v := o.object.(type) {
	case fabric.Link:
		return errors.Join(k.nl.LinkSetHardwareAddr(l, v.MAC[:]), k.nl.LinkSetMTU(l, v.MTU), k.nl.LinkSetUp(l))
	case fabric.Address:
		if o.remove {
			return rtnetlink.IgnoreGone(k.nl.AddrDel(l, &netlink.Addr{IPNet: ipNet(v.Prefix)}))
		}
		return k.nl.AddrReplace(l, &netlink.Addr{IPNet: ipNet(v.Prefix), Flags: unix.IFA_F_NOPREFIXROUTE})
	case fabric.FDBEntry:
		return k.doNeigh(o.remove, &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF,
			State: netlink.NUD_PERMANENT, HardwareAddr: v.MAC[:], IP: v.Node.AsSlice()})
	case fabric.Neighbor:
		return k.doNeigh(o.remove, &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: netlink.FAMILY_V4,
			State: netlink.NUD_PERMANENT, HardwareAddr: v.MAC[:], IP: v.Addr.AsSlice()})
	}
	return fmt.Errorf("no such object: %T", o.object)
}

func (k *kernel) doDevice(remove bool, v fabric.Device) error {
	if remove {
		l, err := k.nl.LinkByName(fabric.OverlayDevice)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err != nil {
			return err
		}
		return rtnetlink.IgnoreGone(k.nl.LinkDel(l))
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = fabric.OverlayDevice
	return k.nl.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: int(v.ID), Port: int(v.Port), SrcAddr: v.Local.AsSlice(), Learning: v.Learning})
}

func (k *kernel) doRoute(remove bool, v fabric.Route) error {
	r := &netlink.Route{Dst: ipNet(v.Prefix), Table: v.Table, Priority: v.Metric, Protocol: fabric.NodeProtocol,
		Family: netlink.FAMILY_V4, Scope: netlink.SCOPE_UNIVERSE}
	switch v.Kind {
	case fabric.Unreachable:
		r.Type = unix.RTN_UNREACHABLE
	case fabric.Throw:
		r.Type = unix.RTN_THROW
	default:
		if remove && v.Kind == fabric.ViaOverlay && !v.Via.IsValid() {
			break // somebody's with our protocol: whatever its next hop is
		}
		l, err := k.nl.LinkByName(fabric.OverlayDevice)
		if remove && errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil // it went with the device
		}
		if err != nil {
			return err
		}
		r.LinkIndex = l.Attrs().Index
		if v.Kind == fabric.OnOverlay {
			r.Scope = netlink.SCOPE_LINK
		} else {
			r.Gw, r.Flags = v.Via.AsSlice(), int(netlink.FLAG_ONLINK)
		}
	}
	if remove {
		return rtnetlink.IgnoreGone(k.nl.RouteDel(r))
	}
	return k.nl.RouteReplace(r)
}

func (k *kernel) doNeigh(remove bool, n *netlink.Neigh) error {
	if remove {
		return rtnetlink.IgnoreGone(k.nl.NeighDel(n))
	}
	return k.nl.NeighSet(n)
}

func there(err error) error {
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

func macOf(a net.HardwareAddr) (m fabric.MAC) {
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
