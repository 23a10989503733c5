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
	// DiscardPort is the destination port of PerPacket's datagrams.
	DiscardPort = 9

	datagramLen = 64 // octets of payload
	warmUp      = 5_000
	packets     = 100_000
)

// PerPacket opens a Flow with these arguments and returns its CPU time per datagram, in ns.
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

// StayOnOneProcessor binds the calling thread to one processor. Call it in lab.Host.Do, because the
// thread must not run other code afterwards, and threads of Do are not reused.
func StayOnOneProcessor() error {
	var cpus unix.CPUSet
	cpus.Set(0)
	return os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &cpus))
}

// A Flow sends datagrams from one host to another. Links between namespaces deliver packets in the
// sender's softirq. So the kernel does all work for a datagram, until its arrival, within the send
// call, on one thread and one processor. Other load on the machine affects the CPU time only
// through the caches. Nobody reads the datagrams, so no process wakes up.
type Flow struct {
	fd           int
	unread       net.PacketConn
	to           *lab.Host
	device       string
	before, sent uint64
}

// OpenFlow opens a Flow. It also opens a socket at the address listen, the destination of the
// datagrams as they arrive at device. If device carries an overlay, listen is the destination of
// the outer datagrams.
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

// Send sends n datagrams and returns the CPU time per datagram, in ns. Any thread in any
// namespace may call it.
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

// Close returns an error if fewer or more datagrams arrived than were sent.
func (f *Flow) Close() error {
	f.close()
	after, err := received(f.to, f.device)
	if got := after - f.before; err == nil && (got < f.sent*99/100 || got > f.sent*101/100) {
		err = fmt.Errorf("%d of %d packets arrived at %s of %s", got, f.sent, f.device, f.to)
	}
	return err
}

func (f *Flow) close() {
	_ = unix.Close(f.fd) // closing an unopened socket fails harmlessly
	_ = f.unread.Close()
}

// received returns the number of packets that a device has received.
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

// threadTime returns the CPU time of this thread, in ns.
func threadTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(os.NewSyscallError("clock_gettime", err)) // every Linux kernel has this clock
	}
	return t.Nano()
}
