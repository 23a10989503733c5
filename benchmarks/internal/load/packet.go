package load

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/lab"
)

const (
	// DiscardPort is the port that datagrams of PerPacket are for.
	DiscardPort = 9

	datagramLen = 64 // octets of payload
	warmUp      = 5_000
	packets     = 100_000
)

// PerPacket is the CPU time of one datagram from its system call in a host to its arrival by a
// device of another one, in ns. All of it happens inside that call, on one thread and one
// processor: links between namespaces hand packets on in the softirq of whoever sent them. What
// others do on the machine meanwhile costs caches, but is not counted. Nobody reads the datagrams,
// so that nobody has to be woken; listen is where a socket takes them, as they arrive: at an overlay
// they are inside others.
func PerPacket(from *lab.Host, src, dst netip.Addr, to *lab.Host, listen netip.AddrPort, device string) (ns float64, err error) {
	unread, err := to.ListenPacket("udp4", listen.String())
	if err != nil {
		return 0, err
	}
	defer unread.Close()
	before, err := received(to, device)
	if err != nil {
		return 0, err
	}
	err = from.Do(func() error {
		var cpus unix.CPUSet
		cpus.Set(0)
		if err := unix.SchedSetaffinity(0, &cpus); err != nil { // of this thread, which ends with the function
			return os.NewSyscallError("sched_setaffinity", err)
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("socket", err)
		}
		defer unix.Close(fd)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: src.As4()}); err != nil {
			return os.NewSyscallError("bind", err)
		}
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: dst.As4(), Port: DiscardPort}); err != nil {
			return os.NewSyscallError("connect", err)
		}
		b := make([]byte, datagramLen)
		var start int64
		for i := range warmUp + packets {
			if i == warmUp {
				start = threadTime()
			}
			if _, err := unix.Write(fd, b); err != nil {
				return os.NewSyscallError("write", err)
			}
		}
		ns = float64(threadTime()-start) / packets
		return nil
	})
	if err != nil {
		return 0, err
	}
	after, err := received(to, device)
	if got := after - before; err == nil && (got < (warmUp+packets)*99/100 || got > (warmUp+packets)*101/100) {
		err = fmt.Errorf("%d of %d packets arrived at %s of %s", got, warmUp+packets, device, to)
	}
	return ns, err
}

// received is how many packets came by a device.
func received(h *lab.Host, device string) (n uint64, err error) {
	err = h.Do(func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return fmt.Errorf("%s of %s: %w", device, h, err)
		}
		n = link.Attrs().Statistics.RxPackets
		return nil
	})
	return n, err
}

// threadTime is the CPU time of this thread, in ns.
func threadTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(os.NewSyscallError("clock_gettime", err)) // there is no Linux without
	}
	return t.Nano()
}
