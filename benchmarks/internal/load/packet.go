package load

import (
	"errors"
	"fmt"
	"net"
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

// PerPacket is the CPU time of one datagram of a Flow, in ns.
func PerPacket(from *lab.Host, src, dst netip.Addr, to *lab.Host, listen netip.AddrPort, device string) (ns float64, err error) {
	f, err := OpenFlow(from, src, dst, to, listen, device)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	err = from.Do(func() error {
		if err := StayOnOneProcessor(); err != nil {
			return err
		}
		if _, err := f.Send(warmUp); err != nil {
			return err
		}
		ns, err = f.Send(packets)
		return err
	})
	return ns, err
}

// StayOnOneProcessor binds the calling thread, which has to end with what it does, as those of
// lab.Host.Do do.
func StayOnOneProcessor() error {
	var cpus unix.CPUSet
	cpus.Set(0)
	return os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &cpus))
}

// A Flow is datagrams from one host to another. All that happens to one, from its system call to its
// arrival, happens inside that call, on one thread and one processor: links between namespaces hand
// packets on in the softirq of whoever sent them. What others do on the machine meanwhile costs
// caches, but is not counted. Nobody reads the datagrams, so that nobody has to be woken.
type Flow struct {
	fd           int
	unread       net.PacketConn
	to           *lab.Host
	device       string
	before, sent uint64
}

// OpenFlow makes one. listen is where a socket takes the datagrams, as they arrive by the device: at an
// overlay they are inside others.
func OpenFlow(from *lab.Host, src, dst netip.Addr, to *lab.Host, listen netip.AddrPort, device string) (f *Flow, err error) {
	f = &Flow{fd: -1, to: to, device: device}
	if f.before, err = received(to, device); err != nil {
		return nil, err
	}
	if f.unread, err = to.ListenPacket("udp4", listen.String()); err != nil {
		return nil, err
	}
	err = from.Do(func() (err error) {
		if f.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return os.NewSyscallError("socket", err)
		}
		if err := unix.Bind(f.fd, &unix.SockaddrInet4{Addr: src.As4()}); err != nil {
			return os.NewSyscallError("bind", err)
		}
		return os.NewSyscallError("connect", unix.Connect(f.fd, &unix.SockaddrInet4{Addr: dst.As4(), Port: DiscardPort}))
	})
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// Send sends n datagrams, from any namespace, and returns the CPU time of one, in ns.
func (f *Flow) Send(n int) (ns float64, err error) {
	b := make([]byte, datagramLen)
	start := threadTime()
	for range n {
		if _, err := unix.Write(f.fd, b); err != nil {
			return 0, os.NewSyscallError("write", err)
		}
	}
	f.sent += uint64(n)
	return float64(threadTime()-start) / float64(n), nil
}

// Close returns an error when not as many arrived as were sent.
func (f *Flow) Close() error {
	f.close()
	after, err := received(f.to, f.device)
	if got := after - f.before; err == nil && (got < f.sent*99/100 || got > f.sent*101/100) {
		err = fmt.Errorf("%d of %d packets arrived at %s of %s", got, f.sent, f.device, f.to)
	}
	return err
}

func (f *Flow) close() {
	_ = unix.Close(f.fd) // of none it is an error that tells nothing
	_ = f.unread.Close()
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
