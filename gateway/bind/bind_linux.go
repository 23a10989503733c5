// Package bind is the UDP side of a tunnel on Linux.
//
// One sendmsg(2) with UDP_SEGMENT sends many datagrams of one size without copying them into one
// buffer. Received datagrams are stored one after the other in a Batch. The kernel may have joined
// some of them (UDP_GRO). The data path processes them in the Batch without a copy. All datagrams
// of one remote address share one endpoint value.
//
//	datapath ── Send ───► sendmsg, UDP_SEGMENT ──► socket ══ peer
//	datapath ◄─ Batch ─── recvmsg, UDP_GRO ◄────── socket ══ peer
package bind

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

const (
	// sendBuffer and receiveBuffer are the sizes of the socket buffers, in octets. sendBuffer is
	// the size that wireguard-go requests. Messages of all peers wait in one receive buffer, in
	// order of arrival. So its size bounds the time that a message waits behind those of other
	// peers. The receive buffer holds some ten thousand small messages. The receiver drains it into
	// per-peer queues much faster than it decrypts. A size above net.core.{r,w}mem_max requires
	// CAP_NET_ADMIN.
	sendBuffer    = 7 << 20
	receiveBuffer = 4 << 20

	// maxSegments is UDP_MAX_SEGMENTS of older kernels (include/linux/udp.h): the maximum
	// number of datagrams in one sendmsg.
	maxSegments = 64

	// maxPayload is the largest UDP payload over IPv4.
	maxPayload = 65535 - 20 - 8
)

// Bind is a pair of UDP sockets, IPv4 and IPv6, on one port. All methods may be used concurrently.
// The zero value is ready.
type Bind struct {
	// Gate, if not nil, is called right before each system call that sends. While Gate returns
	// false, Send fails with ErrShut. Set it before the first Listen. It is called
	// concurrently.
	Gate func() bool

	mu     sync.RWMutex // guards v4 and v6; senders lock it for reading
	v4, v6 *socket
	ignore bool // see IgnorePath

	refused atomic.Uint64 // see SegmentationRefused
}

// ErrShut is the error of Send when Gate returns false.
var ErrShut = errors.New("this gateway may not send, because another one may be active")

// New returns a closed Bind.
func New() *Bind { return new(Bind) }

// Listen binds port, or a free port if port is 0. It binds both address families, or one if the
// machine has only that one. If the port is occupied, the error is syscall.EADDRINUSE. Each
// returned function receives from one socket: it appends the available datagrams to a Batch. If
// mayBlock is true and no datagram is available, the function waits for one. Each of the functions
// may be called by only one goroutine. After Close the functions return net.ErrClosed.
func (b *Bind) Listen(port uint16) ([]func(b *Batch, mayBlock bool) error, uint16, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.v4 != nil || b.v6 != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	const attempts = 100 // attempts to find a port that is free in both families
	for try := 1; ; try++ {
		v4, v6, actual, err := b.openBoth(port)
		if err == nil {
			b.v4, b.v6 = v4, v6
			if b.ignore {
				_ = v4.ignorePath(true) // best effort: a caller that needs the setting also calls IgnorePath
			}
			var receive []func(*Batch, bool) error
			for _, s := range []*socket{v4, v6} {
				if s != nil {
					receive = append(receive, s.receive)
				}
			}
			return receive, actual, nil
		}
		if port != 0 || try == attempts || !errors.Is(err, unix.EADDRINUSE) {
			return nil, 0, err
		}
	}
}

func (b *Bind) openBoth(port uint16) (v4, v6 *socket, actual uint16, err error) {
	v4, err = b.open("udp4", port)
	if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil, 0, err
	}
	if v4 != nil {
		port = v4.port()
	}
	v6, err = b.open("udp6", port)
	switch {
	case err == nil:
		port = v6.port()
	case v4 == nil || !errors.Is(err, unix.EAFNOSUPPORT):
		return nil, nil, 0, errors.Join(err, v4.close())
	}
	return v4, v6, port, nil
}

// Close closes the sockets. Listen may be called again.
func (b *Bind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	err := errors.Join(b.v4.close(), b.v6.close())
	b.v4, b.v6 = nil, nil
	return err
}

// IgnorePath makes IPv4 datagrams leave unfragmented and without DF, regardless of the kernel's
// path MTU. The kernel also ignores ICMP errors about these datagrams. The default is false. The
// gateway uses IgnorePath if the reported MTU of a path is implausibly small. If the path really
// has this MTU, routers fragment the datagrams, and they still arrive.
func (b *Bind) IgnorePath(ignore bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ignore == ignore || b.v4 == nil {
		b.ignore = ignore
		return nil
	}
	err := b.v4.ignorePath(ignore)
	if err == nil {
		b.ignore = ignore
	}
	return err
}

// SegmentationRefused returns the number of calls with UDP_SEGMENT that the kernel refused
// because the device of the route cannot segment. Their datagrams were then sent one by one.
func (b *Bind) SegmentationRefused() uint64 { return b.refused.Load() }

// Endpoint returns the endpoint of a remote address. The kernel chooses the local address.
func (b *Bind) Endpoint(addr netip.AddrPort) conn.Endpoint { return newEndpoint(addr, netip.Addr{}) }

// Send sends datagrams to an Endpoint, in order, and continues after an error. The function Unsent
// reads the number of datagrams that were not sent from the error. Send blocks while the socket's
// buffer is full.
func (b *Bind) Send(bufs [][]byte, ep conn.Endpoint) error {
	e, ok := ep.(*endpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	b.mu.RLock()
	s := b.v4
	if e.dst.Addr().Is6() {
		s = b.v6
	}
	b.mu.RUnlock()
	if s == nil {
		return unix.EAFNOSUPPORT
	}
	return s.send(bufs, e)
}

// socket is the IPv4 or the IPv6 socket of a Bind.
type socket struct {
	conn    *net.UDPConn
	raw     syscall.RawConn
	refused *atomic.Uint64 // Bind.refused

	senders sync.Pool // values are *sender
	in      receiver
}

func (b *Bind) open(network string, port uint16) (*socket, error) {
	lc := net.ListenConfig{Control: prepare}
	c, err := lc.ListenPacket(context.Background(), network, ":"+strconv.Itoa(int(port)))
	if err != nil {
		return nil, err
	}
	s := &socket{conn: c.(*net.UDPConn), refused: &b.refused}
	if s.raw, err = s.conn.SyscallConn(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	s.senders.New = func() any { return newSender(b.Gate) }
	s.in.init()
	return s, nil
}

// prepare sets the options of a socket before it is bound.
func prepare(network, _ string, c syscall.RawConn) error {
	var err error
	control := c.Control(func(fd uintptr) {
		set := func(level, option, value int) error { return unix.SetsockoptInt(int(fd), level, option, value) }
		for _, option := range []int{unix.SO_RCVBUF, unix.SO_RCVBUFFORCE} {
			_ = set(unix.SOL_SOCKET, option, receiveBuffer) // as large as the kernel permits
		}
		for _, option := range []int{unix.SO_SNDBUF, unix.SO_SNDBUFFORCE} {
			_ = set(unix.SOL_SOCKET, option, sendBuffer)
		}
		_ = set(unix.SOL_SOCKET, unix.SO_RXQ_OVFL, 1) // report dropped datagrams; Linux 2.6.33
		_ = set(unix.IPPROTO_UDP, unix.UDP_GRO, 1)    // Linux 5.0; without it datagrams are received one by one
		if network == "udp6" {
			err = errors.Join(set(unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1), set(unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1))
		} else {
			err = set(unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
	})
	return errors.Join(control, err)
}

// ignorePath sets the socket option of Bind.IgnorePath. It does nothing on a nil socket.
func (s *socket) ignorePath(ignore bool) (err error) {
	if s == nil {
		return nil
	}
	mode := unix.IP_PMTUDISC_WANT
	if ignore {
		mode = unix.IP_PMTUDISC_OMIT
	}
	control := s.raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, mode) })
	return errors.Join(control, os.NewSyscallError("IP_MTU_DISCOVER", err))
}

func (s *socket) port() uint16 { return s.conn.LocalAddr().(*net.UDPAddr).AddrPort().Port() }

func (s *socket) close() error {
	if s == nil {
		return nil
	}
	return s.conn.Close()
}
