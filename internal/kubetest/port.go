package kubetest

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// A reservation keeps a free TCP port for the API server, so that no other process can take the
// port before the first start or during a restart. It is a bound socket that never listens. The
// server binds the same port with SO_REUSEPORT (--permit-port-sharing) and receives all
// connections.
type reservation struct {
	fd     int
	number uint16
}

func reserve(host netip.Addr) (r *reservation, err error) {
	family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: host.As16()})
	if host.Is4() {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Addr: host.As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return nil, err
	}
	if err := unix.Bind(fd, sa); err != nil {
		return nil, err
	}
	if sa, err = unix.Getsockname(fd); err != nil {
		return nil, err
	}
	if sa, ok := sa.(*unix.SockaddrInet4); ok {
		return &reservation{fd, uint16(sa.Port)}, nil
	}
	return &reservation{fd, uint16(sa.(*unix.SockaddrInet6).Port)}, nil
}

func (r *reservation) release() { unix.Close(r.fd) }
