package rtnl

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// groups are the netlink multicast groups whose events can concern the objects of an owner.
var groups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF}

// Events calls notify whenever a change may concern the objects of k's owner, until ctx ends. An
// event only means "compare again", so losing one only causes a delay. After this call, Apply reads
// the kernel's objects only if another program has changed them, or if the last read is older than
// rereadInterval.
func (k *Kernel) Events(ctx context.Context, notify func()) error {
	for in := range k.handles {
		if k.handles[in] == nil {
			continue
		}
		var f *os.File
		err := k.do(kernel.Namespace(in), func() (err error) {
			f, err = subscribe(unix.NETLINK_ROUTE, groups...)
			return err
		})
		if err != nil {
			return fmt.Errorf("netlink events: %w", err)
		}
		k.listen(ctx, f, func(b []byte) bool {
			stale, wakes := k.concerns(kernel.Namespace(in), b)
			if stale {
				k.memory.stale.Store(true)
			}
			return stale || wakes
		}, notify)
	}
	if k.owner.Filter {
		f, err := subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			return nil // the kernel has no nftables; Apply reports that when it makes the filter
		}
		if err != nil {
			return fmt.Errorf("nftables events: %w", err)
		}
		k.listen(ctx, f, func(b []byte) bool {
			ours := k.concernsFilter(b)
			if ours {
				k.memory.filter.Store(true)
			}
			return ours
		}, notify)
	}
	k.memory.stale.Store(true) // the last read may be outdated already
	k.memory.following.Store(true)
	return nil
}

// concernsFilter reports whether nftables events may concern our tables or a chain for forwarded
// packets. Other programs change their tables often. A message about a rule, set or chain names its
// table. A message about a chain or a rule also names the chain.
func (k *Kernel) concernsFilter(b []byte) bool {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return true
	}
	// struct nfgenmsg ends with the low 16 bits of the generation, in network order
	// (nf_tables_api.c).
	if !slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool {
		return len(m.Data) < nl.SizeofNfgenmsg || !k.memory.committed(binary.BigEndian.Uint16(m.Data[2:]))
	}) {
		return false // all messages are about our own transactions
	}
	if bytes.Contains(b, []byte(kernel.FilterTable+"\x00")) {
		return true
	}
	if !k.owner.NAT {
		return false
	}
	if names := k.memory.chains.Load(); names != nil && slices.ContainsFunc(*names, func(name []byte) bool { return bytes.Contains(b, name) }) {
		return true
	}
	return slices.ContainsFunc(messages, func(m syscall.NetlinkMessage) bool { // a new chain with a hook, which is rare
		if m.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWCHAIN {
			return false
		}
		_, base := rawAttribute(&m, nl.SizeofNfgenmsg, unix.NFTA_CHAIN_HOOK)
		return base
	})
}

func (k *Kernel) listen(ctx context.Context, f *os.File, concerns func([]byte) bool, notify func()) {
	k.wg.Go(func() { <-ctx.Done(); f.Close() })
	k.wg.Go(func() { k.read(f, concerns, notify) })
}

func (k *Kernel) read(f *os.File, concerns func([]byte) bool, notify func()) {
	buf := make([]byte, 1<<16)
	for {
		n, err := f.Read(buf)
		switch {
		case errors.Is(err, os.ErrClosed):
			k.memory.following.Store(false)
			return
		case errors.Is(err, unix.ENOBUFS): // the socket overflowed, and events were lost
			k.memory.stale.Store(true)
			k.memory.filter.Store(true)
			notify()
		case err != nil:
			k.memory.following.Store(false)
			k.log.Warn("netlink events stopped; comparing only at intervals", "error", err)
			return
		case concerns(buf[:n]):
			notify()
		}
	}
}

// subscribe returns a netlink socket of the calling thread's namespace that receives the events of
// the groups. A Read returns one or more messages, or unix.ENOBUFS if some were lost. Close
// unblocks Read.
func subscribe(protocol int, groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err != nil {
		return nil, err
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	for _, g := range groups {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g)
		}
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// concerns classifies route netlink events. stale reports whether the events make our copy of the
// owner's objects stale. wakes reports whether the events require a comparison for another reason:
// devices on paths to other nodes, addresses, or settings of all devices have changed. concerns
// ignores the most frequent events of a busy node: events about devices, routes and neighbours of
// pods, and events of our own changes. If an event cannot be interpreted, both results are true.
func (k *Kernel) concerns(in kernel.Namespace, b []byte) (stale, wakes bool) {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return true, true
	}
	for i := range messages {
		m := &messages[i]
		if k.memory.isOurs(in, m.Header.Pid) {
			continue
		}
		s, w := k.concernsOne(in, m)
		stale, wakes = stale || s, wakes || w
	}
	return stale, wakes
}

func (k *Kernel) concernsOne(in kernel.Namespace, m *syscall.NetlinkMessage) (stale, wakes bool) {
	switch m.Header.Type {
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		// struct rtmsg: the table is its fifth octet, or 252 ("see the attribute") for tables above
		// 255; the protocol is the next octet. A foreign route may have replaced a route of ours.
		if len(m.Data) < unix.SizeofRtMsg || int(m.Data[5]) == k.owner.Protocol {
			return true, true
		}
		if m.Data[4] != unix.RT_TABLE_COMPAT {
			return false, false
		}
		table, ok := attribute(m, unix.SizeofRtMsg, unix.RTA_TABLE)
		return !ok || slices.Contains(k.owner.Tables[in], int(table)), true
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		// struct ndmsg: the index is at offset 4, the state at 8. Our entries are permanent.
		if len(m.Data) < unix.SizeofNdMsg {
			return true, true
		}
		index := int(int32(binary.NativeEndian.Uint32(m.Data[4:])))
		_, ours := k.memory.device(in, index)
		if ours && k.wroteNeighbor(in, index, m) {
			return false, false
		}
		permanent := m.Header.Type == unix.RTM_DELNEIGH || binary.NativeEndian.Uint16(m.Data[8:])&unix.NUD_PERMANENT != 0
		return ours && permanent, ours && permanent
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		// struct ifinfomsg: the index is at offset 4.
		if len(m.Data) < unix.SizeofIfInfomsg {
			return true, true
		}
		if name, ok := text(m, unix.SizeofIfInfomsg, unix.IFLA_IFNAME); !ok || strings.HasPrefix(name, kernel.TunPrefix) {
			return true, true
		}
		// Routes disappear with their device, without separate events.
		concerns, _ := k.memory.device(in, int(int32(binary.NativeEndian.Uint32(m.Data[4:]))))
		return concerns, concerns
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		// struct ifaddrmsg: the scope is at offset 3, the index at 4. Routes disappear with the
		// address that is their source, without separate events.
		if len(m.Data) < unix.SizeofIfAddrmsg {
			return true, true
		}
		_, ours := k.memory.device(in, int(int32(binary.NativeEndian.Uint32(m.Data[4:]))))
		around := m.Data[3] != unix.RT_SCOPE_LINK
		return ours || around, ours || around
	case unix.RTM_NEWNETCONF, unix.RTM_DELNETCONF:
		// struct netconfmsg is the family, padded to four octets; an index below 1 means all
		// devices.
		index, ok := attribute(m, 4, netconfIndex)
		_, ours := k.memory.device(in, int(int32(index)))
		return false, !ok || int32(index) < 1 || ours
	}
	return true, true
}

// wroteNeighbor reports whether an event contains the value that we wrote to a neighbour.
func (k *Kernel) wroteNeighbor(in kernel.Namespace, index int, m *syscall.NetlinkMessage) bool {
	to, _ := rawAttribute(m, unix.SizeofNdMsg, unix.NDA_DST)
	lladdr, _ := rawAttribute(m, unix.SizeofNdMsg, unix.NDA_LLADDR)
	addr, _ := netip.AddrFromSlice(to)
	entry, value := neighborOf(index, int(m.Data[0]), macOf(lladdr), addr)
	if m.Header.Type == unix.RTM_DELNEIGH {
		value = neighborValue{}
	}
	return k.memory.wrote(in, entry, value)
}

// netconfIndex is NETCONFA_IFINDEX of include/uapi/linux/netconf.h.
const netconfIndex = 1

// attribute returns the first attribute of a type as a number. header is the length of the
// message's header.
func attribute(m *syscall.NetlinkMessage, header int, kind uint16) (uint32, bool) {
	v, ok := rawAttribute(m, header, kind)
	if !ok || len(v) < 4 {
		return 0, false
	}
	return binary.NativeEndian.Uint32(v), true
}

func text(m *syscall.NetlinkMessage, header int, kind uint16) (string, bool) {
	v, ok := rawAttribute(m, header, kind)
	return string(bytes.TrimRight(v, "\x00")), ok
}

func rawAttribute(m *syscall.NetlinkMessage, header int, kind uint16) ([]byte, bool) {
	for b := m.Data[min(header, len(m.Data)):]; len(b) >= unix.SizeofRtAttr; {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofRtAttr || length > len(b) {
			return nil, false
		}
		if binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED == kind {
			return b[unix.SizeofRtAttr:length], true
		}
		b = b[min((length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1), len(b)):]
	}
	return nil, false
}
