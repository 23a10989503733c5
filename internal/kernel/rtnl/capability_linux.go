package rtnl

import (
	"errors"

	"golang.org/x/sys/unix"
)

// MayChange returns an error if the process lacks CAP_NET_ADMIN. Reading does not need it, so
// without this check the lack would only show once something has to be changed.
func MayChange() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // capabilities 0 to 31, and the rest
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return nil //nolint:nilerr // a sandbox without capget(2) will refuse changes, which tells
	}
	if sets[0].Effective&(1<<unix.CAP_NET_ADMIN) == 0 {
		return errors.New("the process lacks CAP_NET_ADMIN, which it needs to change routes and rules; " +
			"add it to the container (securityContext.capabilities.add: NET_ADMIN), and check whether an admission policy or the runtime removes it")
	}
	return nil
}
