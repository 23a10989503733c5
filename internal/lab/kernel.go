package lab

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A KernelUse counts the kernel's objects for WireGuard and NAT in all network namespaces of a
// gateway. A gateway of Isthmus has none.
type KernelUse struct {
	Namespaces int
	WireGuard  int // number of devices
	NATChains  int // number of nftables chains of type nat
}

// GatewayKernel counts the objects of KernelUse in the network namespaces of a running gateway.
func (l *Lab) GatewayKernel(c *Cluster) (KernelUse, error) {
	pid, ok := l.GatewayProcess(c)
	if !ok {
		return KernelUse{}, fmt.Errorf("the gateway of cluster %s does not run", c)
	}
	use, err := kernelUse(pid)
	if err != nil {
		return use, fmt.Errorf("gateway of cluster %s: %w", c, err)
	}
	return use, nil
}

func kernelUse(pid int) (use KernelUse, err error) {
	paths := []string{fmt.Sprintf("/proc/%d/ns/net", pid)}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid)) // the TUN device's namespace has no name: find it by the gateway's file descriptors
	if err != nil {
		return use, err
	}
	for _, path := range files {
		if what, err := os.Readlink(path); err == nil && strings.HasPrefix(what, "net:[") {
			paths = append(paths, path)
		}
	}
	known := map[uint64]bool{}
	for _, path := range paths {
		fd, err := netns.GetFromPath(path)
		if err != nil {
			return use, err
		}
		if err := errors.Join(use.add(fd, known), fd.Close()); err != nil {
			return use, fmt.Errorf("%s: %w", path, err)
		}
	}
	use.Namespaces = len(known)
	return use, nil
}

// add counts the objects of a namespace, unless the namespace is already in known.
func (u *KernelUse) add(fd netns.NsHandle, known map[uint64]bool) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(fd), &st); err != nil || known[st.Ino] {
		return err
	}
	known[st.Ino] = true
	h, err := netlink.NewHandleAt(fd)
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := h.LinkList()
	if err != nil {
		return err
	}
	for _, link := range links {
		if link.Type() == "wireguard" {
			u.WireGuard++
		}
	}
	conn, err := nftables.New(nftables.WithNetNSFd(int(fd)))
	if err != nil {
		return err
	}
	chains, err := conn.ListChains()
	if err != nil {
		return err
	}
	for _, chain := range chains {
		if chain.Type == nftables.ChainTypeNAT {
			u.NATChains++
		}
	}
	return nil
}
