package lab

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Forget removes the state that a reboot of the node would remove: devices and policy rules that
// were added to it. The node's processes must have ended. The lab's own objects stay.
func (n *Node) Forget() error {
	var err error
	for range 5 { // repeat: devices of ending namespaces may disappear between list and removal
		if err = n.Do(forget); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", n.Name, err)
	}
	return nil
}

// forget implements Forget in the calling thread's namespace.
func forget() error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		if name := l.Attrs().Name; name == "lo" || name == uplink || name == "lan" { // lan leads to the server
			continue
		}
		var notFound netlink.LinkNotFoundError
		if err := netlink.LinkDel(l); err != nil && !errors.As(err, &notFound) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("device %s: %w", l.Attrs().Name, err)
		}
	}
	rules, err := netlink.RuleList(netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, r := range rules {
		if r.Table == unix.RT_TABLE_DEFAULT || r.Table == unix.RT_TABLE_MAIN || r.Table == unix.RT_TABLE_LOCAL {
			continue
		}
		if err := netlink.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("rule %v: %w", r, err)
		}
	}
	return nil
}
