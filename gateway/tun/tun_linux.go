// Package tun opens a Linux TUN interface that carries superpackets.
//
//	kernel ── ndo_start_xmit ──► queue ── read(2) ──► Device.Read ──► datapath
//	kernel ◄─ netif_rx ◄──────── writev(2) ◄───────── Device.Write ◄─ datapath
//
// The descriptor is opened with IFF_VNET_HDR: a legacy virtio-net header of ten octets
// precedes each packet (drivers/net/tun.c, include/linux/virtio_net.h). With the offloads
// enabled, the kernel passes TCP superpackets of up to 64 KiB whose checksum field holds only
// the pseudo-header sum. It also accepts such packets. For forwarded traffic hdr_len of that
// header is unreliable; package packet recomputes it.
//
// A reader waits in the runtime's poller, never in poll(2). A blocking system call would occupy one
// of the Go scheduler's processors (Ps) until the runtime retakes it.
//
// Package gateway opens a Device for each tunnel and owns it. Package datapath reads from it
// in one goroutine and writes to it in any number of goroutines.
package tun

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/packet"
)

// clonePath is the device file from which TUN interfaces are made.
const clonePath = "/dev/net/tun"

// maxIOVecs is UIO_MAXIOV (include/uapi/linux/uio.h), the maximum for writev(2).
const maxIOVecs = 1024

// Errors of Open, for errors.Is. The text suggests a remedy.
var (
	// ErrNoTUN: /dev/net/tun is missing or has no driver.
	ErrNoTUN = errors.New("no TUN driver: " + clonePath + " is missing (load the module tun, or mount the device into the container)")
	// ErrOpenDenied: the process may not open /dev/net/tun.
	ErrOpenDenied = errors.New("opening " + clonePath + " is not permitted (the container's device rules must allow c 10:200 rwm)")
	// ErrNetAdmin: the process opened the device but may not create an interface.
	ErrNetAdmin = errors.New("making a TUN interface is not permitted (CAP_NET_ADMIN in the user namespace that owns the network namespace is missing)")
)

// Options select features of the kernel for Open. The zero value is the default.
type Options struct {
	// USO lets the kernel pass UDP superpackets (Linux 6.2 and later). A sender, local or behind
	// this host, makes them with UDP_SEGMENT. See TrustsUSO.
	USO bool
}

// TrustsUSO reports whether this kernel is known to handle UDP superpackets from a TUN
// correctly, above all when it sends them into VXLAN. Older kernels have broken VXLAN with
// these packets. The result is true from Linux 6.18, the oldest version on which the scripts
// of test/ have passed with USO.
func TrustsUSO() bool {
	var name unix.Utsname
	return unix.Uname(&name) == nil && trustsUSO(unix.ByteSliceToString(name.Release[:]))
}

func trustsUSO(release string) bool {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n != 2 {
		return false
	}
	return major > 6 || major == 6 && minor >= 18
}

// Offloads lists the kinds of unfinished packets that the kernel passes to Read. The kernel always
// accepts superpackets from Write.
type Offloads struct {
	Checksum   bool // TUN_F_CSUM: partial transport checksum
	TSO4, TSO6 bool // TUN_F_TSO4, TUN_F_TSO6: TCP superpackets
	USO4, USO6 bool // TUN_F_USO4, TUN_F_USO6: UDP superpackets (Linux 6.2)
}

// Device is a TUN interface. It implements datapath.Link: one reader, any number of concurrent
// writers.
type Device struct {
	name     string
	file     *os.File
	raw      syscall.RawConn
	control  *controlSocket
	offloads Offloads

	woken  atomic.Bool // the reader has not yet handled a Wake
	closed atomic.Bool

	// State of the one reader. The callbacks are made once, because a closure per call would be
	// one allocation per packet.
	readBuf   []byte
	readN     int
	readErrno unix.Errno
	readWait  func(fd uintptr) bool
	readOnce  func(fd uintptr)

	writers sync.Pool // values are *writer
}

var _ datapath.Link = (*Device)(nil)

// Open creates an interface with the given MTU, in octets, in the network namespace of the calling
// thread. The interface stays in this namespace, even if another thread uses the Device later. name
// has at most 15 octets; the kernel replaces a "%d" in it. Open disables multicast and does not
// bring the interface up. Close removes the interface.
func Open(name string, mtu int, o Options) (*Device, error) {
	d, err := open(name, mtu, o)
	if err != nil {
		return nil, fmt.Errorf("tun %s: %w", name, err)
	}
	return d, nil
}

func open(name string, mtu int, o Options) (*Device, error) {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return nil, fmt.Errorf("interface name of %d octets, at most %d fit: %w", len(name), unix.IFNAMSIZ-1, err)
	}
	fd, err := unix.Open(clonePath, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, openError(err)
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		unix.Close(fd)
		return nil, setIffError(err)
	}
	// A persistent interface may still have the header length that its last owner set.
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, packet.VirtioHeaderLen); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("TUNSETVNETHDRSZ %d: %w", packet.VirtioHeaderLen, err)
	}
	offloads, err := probeOffloads(fd, o)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	control, err := newControlSocket(ifr.Name())
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	if err := errors.Join(control.setMTU(mtu), control.noMulticast()); err != nil {
		unix.Close(fd)
		return nil, errors.Join(err, control.close())
	}

	// Add the descriptor to the poller only now: before TUNSETIFF it reports an error condition.
	file := os.NewFile(uintptr(fd), clonePath)
	raw, err := file.SyscallConn()
	if err == nil {
		err = file.SetReadDeadline(time.Time{}) // proves that the poller handles the descriptor
	}
	if err != nil {
		file.Close()
		return nil, errors.Join(fmt.Errorf("runtime poller: %w", err), control.close())
	}
	d := &Device{name: ifr.Name(), file: file, raw: raw, control: control, offloads: offloads}
	d.readWait = func(fd uintptr) bool {
		// The poller is edge triggered, and a wait discards an earlier edge. So this callback
		// tries to read after each wake-up and before each wait.
		d.read(fd)
		return d.readErrno != unix.EAGAIN
	}
	d.readOnce = d.read
	d.writers.New = func() any { return newWriter() }
	return d, nil
}

// openError adds the cause to an error from opening /dev/net/tun.
func openError(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO), errors.Is(err, unix.ENOTDIR):
		return fmt.Errorf("%w: %w", ErrNoTUN, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%w: %w", ErrOpenDenied, err)
	}
	return fmt.Errorf("open %s: %w", clonePath, err)
}

// setIffError adds the cause to an error from TUNSETIFF.
func setIffError(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w: %w", ErrNetAdmin, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("TUNSETIFF: another process has the interface open: %w", err)
	}
	return fmt.Errorf("TUNSETIFF: %w", err)
}

// probeOffloads enables as many offloads as the kernel accepts. It does not enable TUN_F_TSO_ECN.
// So the kernel itself segments superpackets with CWR, which only the first segment may have.
func probeOffloads(fd int, o Options) (Offloads, error) {
	const tcp = unix.TUN_F_CSUM | unix.TUN_F_TSO4 | unix.TUN_F_TSO6
	type attempt struct {
		flags int
		means Offloads
	}
	attempts := []attempt{
		{tcp | unix.TUN_F_USO4 | unix.TUN_F_USO6, Offloads{true, true, true, true, true}},
		{tcp, Offloads{Checksum: true, TSO4: true, TSO6: true}},
		{unix.TUN_F_CSUM, Offloads{Checksum: true}},
		{0, Offloads{}},
	}
	if !o.USO {
		attempts = attempts[1:]
	}
	var err error
	for _, a := range attempts {
		if err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, a.flags); err == nil {
			return a.means, nil
		}
	}
	return Offloads{}, fmt.Errorf("TUNSETOFFLOAD: %w", err)
}

// Read reads one packet into p, after its virtio header; see datapath.Link. Only one goroutine
// may read.
func (d *Device) Read(p []byte, mayBlock bool) (int, error) {
	if len(p) == 0 {
		return 0, fmt.Errorf("tun %s: read: %w", d.name, unix.EINVAL)
	}
	d.readBuf = p
	var err error
	if mayBlock {
		err = d.raw.Read(d.readWait)
	} else {
		// This read bypasses the poller and its deadline. Otherwise a deadline that Wake has set
		// would hide a waiting packet, and a read that does not block would use up the deadline.
		err = d.raw.Control(d.readOnce)
	}
	d.readBuf = nil
	switch {
	case err == nil && d.readErrno == 0:
		return d.readN, nil
	case d.closed.Load():
		return 0, os.ErrClosed
	case errors.Is(err, os.ErrDeadlineExceeded):
		// This order loses no wake-up. If Wake was called before the Store, the caller now finds
		// what was published before that Wake. If Wake is called after the Store, it sets a new
		// deadline.
		if err := d.file.SetReadDeadline(time.Time{}); err != nil {
			if d.closed.Load() {
				return 0, os.ErrClosed
			}
			return 0, fmt.Errorf("tun %s: clear deadline: %w", d.name, err)
		}
		d.woken.Store(false)
		return 0, datapath.ErrWoken
	case err != nil:
		return 0, fmt.Errorf("tun %s: read: %w", d.name, err)
	case d.readErrno == unix.EAGAIN:
		return 0, datapath.ErrAgain
	}
	return 0, fmt.Errorf("tun %s: read: %w", d.name, d.readErrno) // EBADFD: the interface was deleted
}

// read does one nonblocking read(2). It uses a raw system call, because the call cannot block.
// This saves two bookkeeping steps of the scheduler per packet.
func (d *Device) read(fd uintptr) {
	for {
		n, _, errno := unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&d.readBuf[0])), uintptr(len(d.readBuf)))
		if errno != unix.EINTR {
			d.readN, d.readErrno = int(n), errno
			return
		}
	}
}

// Wake makes a waiting Read return ErrWoken; see datapath.Link.
func (d *Device) Wake() {
	if !d.woken.Swap(true) {
		// The only possible error is that the file is closed, and then Read has already ended.
		_ = d.file.SetReadDeadline(time.Unix(1, 0))
	}
}

// A writer is the scratch memory of one Write: the vector and the callback that uses it.
type writer struct {
	iovecs []unix.Iovec
	n      int
	errno  unix.Errno
	writev func(fd uintptr)
}

func newWriter() *writer {
	w := &writer{iovecs: make([]unix.Iovec, 0, 130)} // room for a run of 128 packets with its header; append makes room for a longer run
	w.writev = func(fd uintptr) {
		for {
			n, _, errno := unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&w.iovecs[0])), uintptr(len(w.iovecs)))
			if errno != unix.EINTR {
				w.n, w.errno = int(n), errno
				return
			}
		}
	}
	return w
}

// Write passes one packet to the kernel with one writev(2); see datapath.Link. The kernel
// processes the packet up to the end of its own receive path before Write returns. EINVAL
// means that the virtio header does not match the packet, EIO that the interface is down.
func (d *Device) Write(bufs [][]byte) error {
	w := d.writers.Get().(*writer)
	defer d.writers.Put(w)
	iovecs, total := w.iovecs[:0], 0
	for _, b := range bufs {
		if len(b) == 0 {
			continue
		}
		v := unix.Iovec{Base: &b[0]}
		v.SetLen(len(b))
		iovecs = append(iovecs, v)
		total += len(b)
	}
	if len(iovecs) == 0 || len(iovecs) > maxIOVecs {
		return unix.EINVAL
	}
	w.iovecs = iovecs
	// Use Control, because RawConn.Write holds a lock for the whole call, and several goroutines
	// write.
	err := d.raw.Control(w.writev)
	clear(iovecs) // the pool must not keep packets alive
	switch {
	case err != nil && d.closed.Load():
		return os.ErrClosed
	case err != nil:
		return err
	case w.errno != 0:
		return w.errno
	case w.n != total:
		return unix.EMSGSIZE // the kernel has truncated the packet
	}
	return nil
}

// Name returns the interface name at the time of Open.
func (d *Device) Name() string { return d.name }

// Offloads returns the offloads that Open has enabled.
func (d *Device) Offloads() Offloads { return d.offloads }

// MTU returns the interface's MTU in octets, or 0 if the interface no longer exists. It
// queries the kernel.
func (d *Device) MTU() int {
	mtu, err := d.control.mtu()
	if err != nil {
		return 0
	}
	return mtu
}

// SetMTU sets the interface's MTU in octets (68 to 65521, drivers/net/tun.c).
func (d *Device) SetMTU(mtu int) error {
	if err := d.control.setMTU(mtu); err != nil {
		return fmt.Errorf("tun %s: %w", d.name, err)
	}
	return nil
}

// Close removes the interface unless it is persistent, and makes Read and Write return
// os.ErrClosed. Further calls do nothing.
func (d *Device) Close() error {
	if d.closed.Swap(true) {
		return nil
	}
	return errors.Join(d.file.Close(), d.control.close())
}
