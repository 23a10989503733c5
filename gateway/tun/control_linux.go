package tun

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// A controlSocket reads and sets properties of one interface. It belongs to the network
// namespace in which it was created, so it reaches the interface from any thread.
type controlSocket struct {
	mu   sync.Mutex // guards fd against use after close
	fd   int        // -1 when closed
	name string
}

func newControlSocket(name string) (*controlSocket, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return &controlSocket{fd: fd, name: name}, nil
}

func (c *controlSocket) ioctl(request uint, value uint32) (uint32, error) {
	ifr, err := unix.NewIfreq(c.name)
	if err != nil {
		return 0, err
	}
	ifr.SetUint32(value)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return 0, unix.EBADF
	}
	if err := unix.IoctlIfreq(c.fd, request, ifr); err != nil {
		return 0, err
	}
	return ifr.Uint32(), nil
}

func (c *controlSocket) mtu() (int, error) {
	mtu, err := c.ioctl(unix.SIOCGIFMTU, 0)
	if err != nil {
		return 0, fmt.Errorf("SIOCGIFMTU: %w", err)
	}
	return int(mtu), nil
}

func (c *controlSocket) setMTU(mtu int) error {
	if mtu < 0 || mtu > 1<<16 {
		return fmt.Errorf("MTU %d: %w", mtu, unix.EINVAL)
	}
	if _, err := c.ioctl(unix.SIOCSIFMTU, uint32(mtu)); err != nil {
		return fmt.Errorf("SIOCSIFMTU %d: %w", mtu, err)
	}
	return nil
}

// noMulticast disables multicast on the interface. Otherwise an IPv6 router would report its
// group memberships on this interface, although nobody listens.
func (c *controlSocket) noMulticast() error {
	flags, err := c.ioctl(unix.SIOCGIFFLAGS, 0)
	if err != nil {
		return fmt.Errorf("SIOCGIFFLAGS: %w", err)
	}
	if _, err := c.ioctl(unix.SIOCSIFFLAGS, flags&^unix.IFF_MULTICAST); err != nil {
		return fmt.Errorf("SIOCSIFFLAGS: %w", err)
	}
	return nil
}

func (c *controlSocket) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fd < 0 {
		return nil
	}
	err := unix.Close(c.fd)
	c.fd = -1
	return err
}
