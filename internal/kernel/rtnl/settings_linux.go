package rtnl

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
)

// haveSettings reads the current values of the wanted settings. A setting that cannot be read is
// missing from the result. Apply then writes it, and reports the error of the write.
func (k *Kernel) haveSettings(s *kernel.State, in kernel.Namespace, want []kernel.Setting) error {
	return k.do(in, func() error {
		for _, v := range want {
			if v.In != in {
				continue
			}
			if withoutIPv6(v.Path) {
				s.Settings = append(s.Settings, v) // counts as applied, because the setting has no effect without IPv6
			} else if b, err := os.ReadFile("/proc/sys/" + v.Path); err == nil {
				v.Value = string(bytes.TrimSpace(b))
				s.Settings = append(s.Settings, v)
			}
		}
		return nil
	})
}

// withoutIPv6 reports whether an IPv6 setting has no effect: the kernel has no IPv6, or has removed
// it from a device with an MTU below 1280 (addrconf_notify in net/ipv6/addrconf.c).
func withoutIPv6(path string) bool {
	rest, ok := strings.CutPrefix(path, "net/ipv6/conf/")
	if !ok {
		return false
	}
	device, _, _ := strings.Cut(rest, "/")
	_, without := os.Stat("/proc/sys/net/ipv6/conf/" + device)
	_, err := os.Stat("/proc/sys/net/ipv4/conf/" + device)
	return without != nil && err == nil
}

// devconf has the numbers of IPv4 settings of a device (include/uapi/linux/ip.h).
var devconf = map[string]int{"forwarding": 1, "send_redirects": 6, "rp_filter": 8}

// set writes a setting in the namespace of the calling thread. It sets properties of a device
// through netlink, because /proc/sys is read-only in an unprivileged container.
func (k *Kernel) set(v kernel.Setting) error {
	if withoutIPv6(v.Path) {
		return nil
	}
	parts := strings.Split(v.Path, "/")
	number, err := strconv.Atoi(v.Value)
	if len(parts) != 5 || parts[2] != "conf" || parts[3] == "all" || err != nil {
		return ignoreOptional(v, k.write(v))
	}
	spec := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	switch {
	case parts[1] == "ipv4" && devconf[parts[4]] != 0:
		spec.AddRtAttr(unix.AF_INET, nil).AddRtAttr(inetConf, nil).AddRtAttr(devconf[parts[4]], nl.Uint32Attr(uint32(number)))
	case parts[1] == "ipv6" && parts[4] == "addr_gen_mode":
		spec.AddRtAttr(unix.AF_INET6, nil).AddRtAttr(inet6AddrGenMode, nl.Uint8Attr(uint8(number)))
	default:
		return ignoreOptional(v, k.write(v))
	}
	index, err := k.dev(v.In, parts[3])
	if err != nil {
		return err
	}
	m := nl.NewIfInfomsg(unix.AF_UNSPEC)
	m.Index = int32(index)
	req := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	req.AddData(m)
	req.AddData(spec)
	_, err = req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// write writes a file below /proc/sys. In an unprivileged container, /proc/sys is read-only to
// protect the node. For the Inner namespace, write then mounts its own procfs, whose net directory
// belongs to the thread's namespace. The mount needs CAP_SYS_ADMIN, as does making the Inner
// namespace.
func (k *Kernel) write(v kernel.Setting) error {
	err := os.WriteFile("/proc/sys/"+v.Path, []byte(v.Value), 0)
	if v.In != kernel.Inner || k.inner == nil || !errors.Is(err, unix.EROFS) {
		return err
	}
	proc, own := ownProc()
	if own != nil {
		return fmt.Errorf("%w, and cannot mount another procfs: %w; want CAP_SYS_ADMIN and Linux 5.2 or later", err, own)
	}
	defer unix.Close(proc)
	fd, err := unix.Openat(proc, "sys/"+v.Path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("%s in the mounted procfs: %w", v.Path, err)
	}
	f := os.NewFile(uintptr(fd), v.Path)
	defer f.Close()
	_, err = f.WriteString(v.Value)
	return err
}

// ownProc mounts a new procfs, which disappears when fd is closed.
func ownProc() (fd int, err error) {
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, os.NewSyscallError("fsopen", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, os.NewSyscallError("fsconfig", err)
	}
	fd, err = unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	return fd, os.NewSyscallError("fsmount", err)
}

// errUnwritable means that an optional setting could not be written.
var errUnwritable = errors.New("is not writable here")

func ignoreOptional(v kernel.Setting, err error) error {
	if v.Optional && (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOENT)) {
		return errUnwritable
	}
	return err
}
