// Package rtnetlink is what all users of rtnetlink(7) here share beside the library that adds and removes objects: events
// that say "compare again", and what counts as success.
package rtnetlink

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Subscribe returns a netlink socket of the calling thread's namespace that gets the events of the groups
// (unix.RTNLGRP_*). A Read returns one or more messages, or unix.ENOBUFS when some were lost; Close ends it.
func Subscribe(groups ...int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	for _, g := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, g); err != nil {
			unix.Close(fd)
			return nil, err
		}
	}
	return os.NewFile(uintptr(fd), "netlink"), nil
}

// IgnoreGone returns nil for the errors of removing what is not there: that is success.
func IgnoreGone(err error) error {
	for _, e := range []error{unix.ESRCH, unix.ENOENT, unix.ENODEV, unix.EADDRNOTAVAIL} {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
