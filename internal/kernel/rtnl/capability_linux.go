package rtnl

import (
	"errors"

	"golang.org/x/sys/unix"
)

// MayChange returns an error if the process lacks CAP_NET_ADMIN. Reading does not need the
// capability, so without this check its absence would only show at the first change.
func MayChange() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // two sets of 32 capabilities each
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return nil //nolint:nilerr // a sandbox that refuses capget(2) also refuses changes, and Apply reports that
	}
	if sets[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("the process lacks CAP_NET_ADMIN, which it needs to change routes and rules; " +
			"add it to the container (securityContext.capabilities.add: NET_ADMIN), and check whether an admission policy or the runtime removes it")
	}
	return nil
}
