package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// kernel is a handle for a namespace, with a netlink socket inside the namespace.
type kernel struct {
	host *Host
	ns   netns.NsHandle
	nl   *netlink.Handle
}

// newKernel creates the host's namespace with loopback up, IPv6 off, and the given settings below
// /proc/sys/net.
func newKernel(h *Host, settings map[string]string) (*kernel, error) {
	k := &kernel{host: h, ns: netns.None()}
	err := onOwnThread(func() (err error) {
		if k.ns, err = netns.NewNamed(h.Netns()); err != nil {
			return fmt.Errorf("create: %w", err)
		}
		for _, c := range []string{"all", "default", "lo"} {
			// Switch IPv6 off, because router solicitations and duplicate address detection would
			// add packets to captures and counters.
			err := setSysctl("ipv6/conf/"+c+"/disable_ipv6", "1")
			if err != nil && !errors.Is(err, fs.ErrNotExist) { // the kernel has no IPv6
				return err
			}
		}
		for name, value := range settings {
			if err := setSysctl(name, value); err != nil {
				return err
			}
		}
		k.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err == nil {
		err = k.up("lo")
	}
	if err != nil {
		k.close()
		return nil, fmt.Errorf("namespace %s: %w", h.Netns(), err)
	}
	return k, nil
}

// openKernel opens the existing namespace of a host.
func openKernel(h *Host) (*kernel, error) {
	ns, err := netns.GetFromPath(filepath.Join(netnsDir, h.Netns()))
	if err != nil {
		return nil, fmt.Errorf("namespace %s: %w", h.Netns(), err)
	}
	k := &kernel{host: h, ns: ns}
	if k.nl, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		k.close()
		return nil, fmt.Errorf("namespace %s: %w", h.Netns(), err)
	}
	return k, nil
}

func (k *kernel) close() {
	if k.nl != nil {
		k.nl.Close()
	}
	if k.ns.IsOpen() {
		_ = k.ns.Close() // a close error is harmless: nothing was written to the descriptor
	}
}

// uplink is the name of every host's device towards the rest of the lab.
const uplink = "eth0"

// veth connects two namespaces by a pair of devices. It creates one device with the given name in
// k, and the other, named uplink, directly in remote. So the caller's namespace never has either
// device.
func (k *kernel) veth(name string, mtu int, remote *kernel) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	link := netlink.NewVeth(attrs)
	link.PeerName, link.PeerMTU, link.PeerNamespace = uplink, uint32(mtu), netlink.NsFd(remote.ns)
	if err := k.nl.LinkAdd(link); err != nil {
		return fmt.Errorf("%s: add veth %s to %s of %s: %w", k.host.Name, name, uplink, remote.host.Name, err)
	}
	return errors.Join(k.up(name), remote.up(uplink))
}

func (k *kernel) bridge(name string, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	if err := k.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("%s: add bridge %s: %w", k.host.Name, name, err)
	}
	return k.up(name)
}

func (k *kernel) setMaster(name, bridge string) error {
	link, err := k.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", k.host.Name, name, err)
	}
	master, err := k.nl.LinkByName(bridge)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", k.host.Name, bridge, err)
	}
	if err := k.nl.LinkSetMaster(link, master); err != nil {
		return fmt.Errorf("%s: put %s into %s: %w", k.host.Name, name, bridge, err)
	}
	return nil
}

func (k *kernel) up(name string) error {
	link, err := k.nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", k.host.Name, name, err)
	}
	if err := k.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s: set %s up: %w", k.host.Name, name, err)
	}
	return nil
}

func (k *kernel) address(dev string, addr netip.Prefix) error {
	link, err := k.nl.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", k.host.Name, dev, err)
	}
	if err := k.nl.AddrAdd(link, &netlink.Addr{IPNet: ipNet(addr)}); err != nil {
		return fmt.Errorf("%s: add %v to %s: %w", k.host.Name, addr, dev, err)
	}
	return nil
}

// route sets the route to a network through dev. via is the next hop, or zero if there is none.
func (k *kernel) route(to netip.Prefix, via netip.Addr, dev string) error {
	link, err := k.nl.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("%s: %s: %w", k.host.Name, dev, err)
	}
	r := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to)}
	if via.IsValid() {
		r.Gw = via.AsSlice()
	} else {
		r.Scope = netlink.SCOPE_LINK
	}
	if err := k.nl.RouteReplace(r); err != nil {
		return fmt.Errorf("%s: route %v via %v dev %s: %w", k.host.Name, to, via, dev, err)
	}
	return nil
}

var everywhere = netip.MustParsePrefix("0.0.0.0/0")

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// removeNamespace removes a namespace's name. The kernel removes the namespace and its devices
// after the last process has left it.
func removeNamespace(path string) error {
	// EINVAL means that no namespace is mounted there, as after a reboot or a crash in newKernel.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, fs.ErrNotExist) {
		return &os.PathError{Op: "unmount", Path: path, Err: err}
	}
	err := os.Remove(path)
	if errors.Is(err, unix.EBUSY) {
		err = onOwnThread(func() error { return removeCovered(path) })
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeCovered removes a namespace's name after ip-netns(8) has hidden its mount. If ip-netns(8)
// finds no mount point at /run/netns, it binds the directory to itself, which hides the mounts
// inside. The calling thread removes the upper mount in its own mount namespace. When it then
// unlinks the name, the kernel unmounts the namespace in all mount namespaces (Linux 3.18 and
// later).
func removeCovered(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return &os.PathError{Op: "make mounts private", Path: "/", Err: err}
	}
	for {
		switch err := unix.Unmount(filepath.Dir(path), unix.MNT_DETACH); {
		case errors.Is(err, unix.EINVAL): // the directory is no longer a mount point, because all upper mounts are removed
			_ = unix.Unmount(path, unix.MNT_DETACH) // after an error, os.Remove reports the reason
			return os.Remove(path)
		case err != nil:
			return &os.PathError{Op: "unmount", Path: filepath.Dir(path), Err: err}
		}
	}
}

// newNamespace moves the calling thread into a new unnamed namespace.
func newNamespace() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	return nil
}
