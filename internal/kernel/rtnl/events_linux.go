package rtnl

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// groups of netlink events that can concern an owner.
var groups = []int{unix.RTNLGRP_LINK, unix.RTNLGRP_NEIGH, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_ROUTE,
	unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_NETCONF}

// Events calls notify whenever something changed that may concern the owner, until ctx ends. An
// event means no more than "compare again", so that a lost one is only a delay.
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
		k.listen(ctx, f, func(b []byte) bool { return concerns(b, k.owner.Protocol) }, notify)
	}
	if k.owner.Filter {
		f, err := subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
		if errors.Is(err, unix.EPROTONOSUPPORT) {
			return nil // a kernel without; making the filter tells
		}
		if err != nil {
			return fmt.Errorf("nftables events: %w", err)
		}
		// Others change their tables often. A message about a rule, a set or a chain names its
		// table.
		k.listen(ctx, f, func(b []byte) bool { return bytes.Contains(b, []byte(kernel.FilterTable+"\x00")) }, notify)
	}
	return nil
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
}

// subscribe returns a netlink socket of the calling thread's namespace that gets the events. A Read
// returns one or more messages, or unix.ENOBUFS when some were lost; Close ends it.
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

// concerns leaves out what a busy node has most of: foreign routes and neighbours that come and go.
// In doubt it says yes.
func concerns(b []byte, protocol int) bool {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return true
	}
	for _, m := range messages {
		switch m.Header.Type {
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			// struct rtmsg: the table is its fifth octet and says 252 ("see the attribute") above
			// 255; the protocol is the next.
			if len(m.Data) < unix.SizeofRtMsg || m.Data[4] == unix.RT_TABLE_COMPAT || int(m.Data[5]) == protocol {
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
