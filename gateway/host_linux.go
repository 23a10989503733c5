package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/rtnetlink"
)

// host holds the gateway's namespace and makes a hostState true in it and in
// the namespace of the process. The kernel is its only memory of what is there.
// One goroutine uses it; namespacePath may be called from any.
type host struct {
	log   *slog.Logger
	netns *os.File          // the gateway's namespace; it lives as long as this or the TUN is open
	lock  *net.UnixListener // one gateway per host namespace
	inner *netlink.Handle   // its socket stays in the gateway's namespace
	outer *netlink.Handle
	wg    sync.WaitGroup // readers of events

	tunnels int // how many TUNs of ours are in the gateway's namespace

	indexes map[string]int // of our links, during one apply
}

// lockName is an abstract Unix address. Those belong to a network namespace and
// vanish with the process, which is just how long the veth and the rules are
// one gateway's.
const lockName = "@isthmus.net/gateway"

var errOther = errors.New("another isthmus gateway")

// openHost takes the lock of the host's namespace and makes the gateway's, still
// empty. The caller closes it with close.
func openHost(log *slog.Logger) (_ *host, err error) {
	h := &host{log: log}
	defer func() {
		if err != nil {
			h.release()
		}
	}()
	if h.lock, err = net.ListenUnix("unix", &net.UnixAddr{Name: lockName, Net: "unix"}); err != nil {
		if errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("%w%s runs in this network namespace", errOther, lockOwner())
		}
		return nil, fmt.Errorf("lock of the network namespace: %w", err)
	}
	if h.netns, err = newNamespace(); err != nil {
		return nil, fmt.Errorf("network namespace: %w", explain(err, "CAP_SYS_ADMIN"))
	}
	if h.outer, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	err = h.inside(func() (err error) {
		h.inner, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("netlink in the gateway's namespace: %w", explain(err, "CAP_SYS_ADMIN"))
	}
	return h, nil
}

// lockOwner names the process that holds the lock, for the error message.
func lockOwner() string {
	c, err := net.Dial("unix", lockName)
	if err != nil {
		return ""
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return ""
	}
	var cred *unix.Ucred
	failed := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if failed != nil || err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", cred.Pid)
}

// explain adds what is missing to a refusal.
func explain(err error, capability string) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (the process needs %s)", err, capability)
	}
	return err
}

// namespacePath is the gateway's namespace for `nsenter --net=`.
func (h *host) namespacePath() string {
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), h.netns.Fd())
}

// inside runs fn on a thread that is in the gateway's namespace. Sockets and
// devices that fn makes stay there and may be used from any thread later.
func (h *host) inside(fn func() error) error {
	return onDyingThread(func() error {
		if err := unix.Setns(int(h.netns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("setns: %w", err)
		}
		return fn()
	})
}

func newNamespace() (*os.File, error) {
	var f *os.File
	err := onDyingThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		f, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return f, err
}

// onDyingThread runs fn on an OS thread of its own that ends with it, so that no
// other goroutine ever runs in a namespace it did not ask for. The main thread
// is spared: it cannot end, and /proc/PID/ns/net shows its namespace as that of
// the whole process.
func onDyingThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if unix.Gettid() != unix.Getpid() {
			done <- fn()
			return
		}
		// While this goroutine holds the main thread, the next one cannot get it.
		err := onDyingThread(fn)
		runtime.UnlockOSThread()
		done <- err
	}()
	return <-done
}

// events calls notify whenever something changed in either namespace that may
// concern us, until ctx ends. An event means no more than "compare again", so
// that a lost one is only a delay.
func (h *host) events(ctx context.Context, notify func()) error {
	common := []int{unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE}
	outer, err := rtnetlink.Subscribe(append([]int{unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE}, common...)...)
	if err != nil {
		return fmt.Errorf("netlink events: %w", err)
	}
	var inner *os.File
	err = h.inside(func() (err error) {
		inner, err = rtnetlink.Subscribe(append([]int{unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR}, common...)...)
		return err
	})
	if err != nil {
		outer.Close()
		return fmt.Errorf("netlink events of the gateway's namespace: %w", err)
	}
	for _, f := range []*os.File{outer, inner} {
		h.wg.Go(func() { <-ctx.Done(); f.Close() })
		h.wg.Go(func() {
			buf := make([]byte, 1<<16)
			for {
				switch _, err := f.Read(buf); {
				case errors.Is(err, os.ErrClosed):
					return
				case err != nil && !errors.Is(err, unix.ENOBUFS): // ENOBUFS: events were lost
					h.log.Warn("netlink events ended, comparing at intervals only", "error", err)
					return
				}
				notify()
			}
		})
	}
	return nil
}

// apply makes want true and returns what it changed. It goes on after a failure
// and returns all of them.
func (h *host) apply(want hostState) (plan, error) {
	have, err := h.have(want)
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's state: %w", err)
	}
	p := planHost(have, want)
	h.indexes = make(map[string]int)
	var errs []error
	for _, o := range p {
		if err := h.do(o); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", o.command(h.namespacePath()), explain(err, "CAP_NET_ADMIN")))
		}
	}
	return p, errors.Join(errs...)
}

// clear removes everything that is ours but the namespace, which goes with
// release when the TUN in it is closed too.
func (h *host) clear() error {
	_, err := h.apply(hostState{})
	return err
}

func (h *host) release() {
	h.wg.Wait()
	if h.inner != nil {
		h.inner.Close()
	}
	if h.outer != nil {
		h.outer.Close()
	}
	if h.netns != nil {
		h.netns.Close()
	}
	if h.lock != nil {
		h.lock.Close()
	}
}

// handle is the netlink socket of a side.
func (h *host) handle(s side) *netlink.Handle {
	if s == gatewaySide {
		return h.inner
	}
	return h.outer
}

// have reads what is there of our own. want is only asked which values of
// /proc/sys to read.
func (h *host) have(want hostState) (hostState, error) {
	var s hostState
	var errs []error
	collect := func(err error) { errs = append(errs, err) }

	ends := make(map[string]*netlink.LinkAttrs)
	ours := []link{{side: hostSide, name: VethHost}, {side: gatewaySide, name: VethGateway}}
	for i := range h.tunnels {
		ours = append(ours, link{side: gatewaySide, name: tunName(i)})
	}
	for _, l := range ours {
		found, err := h.handle(l.side).LinkByName(l.name)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err != nil {
			collect(fmt.Errorf("link %s: %w", l.name, err))
			continue
		}
		a := found.Attrs()
		ends[l.name] = a
		l.mtu, l.up = a.MTU, a.Flags&net.FlagUp != 0
		if !isTun(l.name) {
			l.mac = a.HardwareAddr.String()
		}
		s.links = append(s.links, l)
		collect(h.haveOn(&s, l, a.Index))
	}
	if a, b := ends[VethHost], ends[VethGateway]; a != nil && b != nil && a.ParentIndex == b.Index && b.ParentIndex == a.Index {
		s.veth = []veth{{}}
	}
	collect(h.haveRoutes(&s, gatewaySide, mainTable))
	collect(h.haveRoutes(&s, hostSide, RouteTable)) // last, so that it is removed first
	collect(h.haveRules(&s))
	collect(h.haveSysctls(&s, want.sysctls))
	return s, errors.Join(errs...)
}

// haveOn reads the addresses and permanent neighbours of one of our links. On
// the host's end there are no addresses of ours.
func (h *host) haveOn(s *hostState, l link, index int) error {
	neighbors, err := h.handle(l.side).NeighList(index, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("neighbours of %s: %w", l.name, err)
	}
	for _, n := range neighbors {
		if a, ok := netip.AddrFromSlice(n.IP); ok && n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr != nil {
			s.neighbors = append(s.neighbors, neighbor{l.side, l.name, a.Unmap(), n.HardwareAddr.String()})
		}
	}
	if l.name != VethGateway {
		return nil
	}
	addrs, err := h.inner.AddrList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("addresses of %s: %w", l.name, err)
	}
	for _, a := range addrs {
		s.addresses = append(s.addresses, address{l.side, l.name, prefixOf(a.IPNet)})
	}
	return nil
}

func (h *host) haveRoutes(s *hostState, where side, table int) error {
	type hop struct {
		at, link int // indices: of the route, of the device
		shared   bool
	}
	names := make(map[int]string)
	name := func(index int) string {
		if _, ok := names[index]; !ok {
			if l, err := h.handle(where).LinkByIndex(index); err == nil {
				names[index] = l.Attrs().Name
			}
		}
		return names[index]
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		var hops []hop
		// One by one: with a thousand peers a list of them is a MiB of garbage.
		err := h.handle(where).RouteListFilteredIter(family, &netlink.Route{Table: table}, netlink.RT_FILTER_TABLE, func(r netlink.Route) bool {
			if int(r.Protocol) != RouteProtocol {
				return true
			}
			have := route{side: where, prefix: prefixOf(r.Dst), table: r.Table, metric: r.Priority}
			if r.Dst == nil {
				have.prefix = netip.PrefixFrom(unspecified(family), 0)
			}
			if a, ok := netip.AddrFromSlice(r.Gw); ok {
				have.via = a.Unmap()
			}
			switch at := len(s.routes); {
			case r.Type == unix.RTN_UNREACHABLE:
				have.unreachable = true
			case len(r.MultiPath) > 0:
				for _, m := range r.MultiPath {
					hops = append(hops, hop{at, m.LinkIndex, true})
				}
			default:
				hops = append(hops, hop{at, r.LinkIndex, false})
			}
			s.routes = append(s.routes, have)
			return true
		})
		if err != nil {
			if family == netlink.FAMILY_V6 && errors.Is(err, unix.EOPNOTSUPP) {
				continue // a kernel without IPv6
			}
			return fmt.Errorf("routes: %w", err)
		}
		for _, p := range hops { // not in between: the dump has the socket
			if r := &s.routes[p.at]; p.shared {
				r.share(name(p.link))
			} else {
				r.link = name(p.link)
			}
		}
	}
	return nil
}

func (h *host) haveRules(s *hostState) error {
	for family, name := range map[int]string{netlink.FAMILY_V4: "ip", netlink.FAMILY_V6: "ip -6"} {
		rules, err := h.outer.RuleList(family)
		if err != nil {
			if family == netlink.FAMILY_V6 && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT)) {
				continue
			}
			return fmt.Errorf("policy rules: %w", err)
		}
		for _, r := range rules {
			if r.Protocol == RouteProtocol && r.Priority == RulePriority {
				s.rules = append(s.rules, rule{name, r.Priority, r.Table})
			}
		}
	}
	return nil
}

func (h *host) haveSysctls(s *hostState, want []sysctl) error {
	read := func(where side) {
		for _, c := range want {
			if c.side != where {
				continue
			}
			if withoutIPv6(c.path) {
				s.sysctls = append(s.sysctls, c) // nothing to switch off
				continue
			}
			// A value that cannot be read is written, and that error tells.
			if b, err := os.ReadFile("/proc/sys/" + c.path); err == nil {
				c.value = string(bytes.TrimSpace(b))
				s.sysctls = append(s.sysctls, c)
			}
		}
	}
	read(hostSide)
	return h.inside(func() error {
		read(gatewaySide)
		return nil
	})
}

// withoutIPv6 reports that a sysctl of IPv6 has nothing to act on: the kernel
// has no IPv6, or has taken it from a device with an MTU below 1280
// (addrconf_notify in net/ipv6/addrconf.c).
func withoutIPv6(path string) bool {
	rest, ok := strings.CutPrefix(path, "net/ipv6/conf/")
	if !ok {
		return false
	}
	device, _, _ := strings.Cut(rest, "/")
	_, without := os.Stat("/proc/sys/net/ipv6/conf/" + device)
	_, err := os.Stat("/proc/sys/net/ipv4/conf/" + device)
	return without != nil && err == nil
}

// do carries out one change. Adding what is there and removing what is gone is
// success.
func (h *host) do(o op) error {
	switch v := o.object.(type) {
	case veth:
		l := netlink.NewVeth(netlink.NewLinkAttrs())
		l.Name, l.PeerName = VethHost, VethGateway
		l.HardwareAddr, l.PeerHardwareAddr = hardware(macHost), hardware(macGateway)
		l.PeerNamespace = netlink.NsFd(h.netns.Fd())
		return h.outer.LinkAdd(l)
	case link:
		return h.doLink(o.verb, v)
	case sysctl:
		write := func() error {
			if withoutIPv6(v.path) {
				return nil
			}
			return os.WriteFile("/proc/sys/"+v.path, []byte(v.value), 0)
		}
		if v.side == gatewaySide {
			return h.inside(write)
		}
		return write()
	case address:
		index, err := h.index(v.side, v.link)
		if err != nil {
			return err
		}
		l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
		a := &netlink.Addr{IPNet: ipNet(v.prefix)}
		if o.verb == remove {
			return rtnetlink.IgnoreGone(h.handle(v.side).AddrDel(l, a))
		}
		if v.prefix.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD // nobody else is on this link, and a tentative address is no source
		}
		return h.handle(v.side).AddrReplace(l, a)
	case neighbor:
		index, err := h.index(v.side, v.link)
		if err != nil {
			return err
		}
		n := &netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: v.addr.AsSlice(), HardwareAddr: hardware(v.mac)}
		if o.verb == remove {
			return rtnetlink.IgnoreGone(h.handle(v.side).NeighDel(n))
		}
		return h.handle(v.side).NeighSet(n)
	case route:
		return h.doRoute(o.verb, v)
	case rule:
		r := netlink.NewRule()
		r.Priority, r.Table, r.Protocol = v.priority, v.table, RouteProtocol
		if r.Family = netlink.FAMILY_V4; v.family != "ip" {
			r.Family = netlink.FAMILY_V6
		}
		if o.verb == remove {
			return rtnetlink.IgnoreGone(h.outer.RuleDel(r))
		}
		if err := h.outer.RuleAdd(r); !errors.Is(err, unix.EEXIST) {
			return err
		}
		return nil
	}
	return fmt.Errorf("no such object: %T", o.object)
}

func (h *host) doLink(what verb, v link) error {
	l, err := h.handle(v.side).LinkByName(v.name)
	if what == remove {
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			return nil
		}
		if err != nil {
			return err
		}
		return rtnetlink.IgnoreGone(h.handle(v.side).LinkDel(l))
	}
	if err != nil {
		return err
	}
	if l.Attrs().MTU != v.mtu {
		if err := h.handle(v.side).LinkSetMTU(l, v.mtu); err != nil {
			return err
		}
	}
	if v.mac != "" && l.Attrs().HardwareAddr.String() != v.mac {
		if err := h.handle(v.side).LinkSetHardwareAddr(l, hardware(v.mac)); err != nil {
			return err
		}
	}
	if v.up {
		return h.handle(v.side).LinkSetUp(l)
	}
	return nil
}

func (h *host) doRoute(what verb, v route) error {
	r := &netlink.Route{Dst: ipNet(v.prefix), Table: v.table, Priority: v.metric, Protocol: RouteProtocol,
		Family: netlink.FAMILY_V4, Scope: netlink.SCOPE_UNIVERSE}
	if v.prefix.Addr().Is6() {
		r.Family = netlink.FAMILY_V6
	}
	switch {
	case v.unreachable:
		r.Type = unix.RTN_UNREACHABLE
	case v.more != 0:
		if v.prefix.Addr().Is4() {
			r.Scope = netlink.SCOPE_LINK
		}
		for _, name := range v.shared() {
			index, err := h.index(v.side, name)
			if err != nil {
				return err
			}
			hop := &netlink.NexthopInfo{LinkIndex: index}
			if v.prefix.Addr().Is6() {
				hop.Gw = hopTun6.AsSlice()
			}
			r.MultiPath = append(r.MultiPath, hop)
		}
	default:
		index, err := h.index(v.side, v.link)
		if err != nil {
			if what == remove {
				return nil // went with its link
			}
			return err
		}
		r.LinkIndex = index
		if v.via.IsValid() {
			r.Gw = v.via.AsSlice()
			if v.via.Is4() {
				r.Flags = int(netlink.FLAG_ONLINK)
			}
		} else if v.prefix.Addr().Is4() {
			r.Scope = netlink.SCOPE_LINK
		}
	}
	if what == remove {
		return rtnetlink.IgnoreGone(h.handle(v.side).RouteDel(r))
	}
	return h.handle(v.side).RouteReplace(r)
}

func (h *host) index(s side, name string) (int, error) {
	if i, ok := h.indexes[name]; ok { // the plan makes links before it uses them
		return i, nil
	}
	l, err := h.handle(s).LinkByName(name)
	if err != nil {
		return 0, err
	}
	h.indexes[name] = l.Attrs().Index
	return l.Attrs().Index, nil
}

// underlayMTU is the MTU on the way to addr: what the route says (set or
// learned from a router), else the link's, which links remembers by its index.
func (h *host) underlayMTU(addr netip.Addr, links map[int]int) (int, error) {
	routes, err := h.outer.RouteGet(addr.AsSlice())
	if err != nil {
		return 0, fmt.Errorf("route to %s: %w", addr, err)
	}
	if len(routes) == 0 {
		return 0, fmt.Errorf("route to %s: none", addr)
	}
	if routes[0].MTU > 0 {
		return routes[0].MTU, nil
	}
	index := routes[0].LinkIndex
	if links[index] == 0 {
		l, err := h.outer.LinkByIndex(index)
		if err != nil {
			return 0, fmt.Errorf("link of the route to %s: %w", addr, err)
		}
		links[index] = l.Attrs().MTU
	}
	return links[index], nil
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
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func unspecified(family int) netip.Addr {
	if family == netlink.FAMILY_V6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

func hardware(mac string) net.HardwareAddr {
	a, _ := net.ParseMAC(mac)
	return a
}
