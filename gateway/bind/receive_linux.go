package bind

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

// maxEndpoints bounds the memory of remote addresses: spoofed sources must not
// fill it. A gateway has a few per peer; when it is full it is begun anew.
const maxEndpoints = 4096

// maxReceive is how many datagrams a call takes before it looks for more. The
// device queues up to 1024 batches for a peer, whatever is in them, at 64 KiB for
// each packet: under a flood that the TUN cannot take, batches of 128 made a gateway
// half as large again (434 to 538 MiB) as batches of 64 (319 and 321), and 32 took
// from bulk TCP.
const maxReceive = 64

// remote names a remote end and the local address that it talks to.
type remote struct {
	dst netip.AddrPort
	src netip.Addr
}

// receiver is the scratch of the one goroutine that receives from a socket.
type receiver struct {
	header  unix.Msghdr
	iovec   unix.Iovec
	name    [unix.SizeofSockaddrInet6]byte
	control [pktinfoSpace + gsoSpace]byte
	n       int
	errno   unix.Errno
	try     func(fd uintptr)
	wait    func(fd uintptr) bool

	// What was received, and what of it no call has had place for yet. It is not
	// received into the device's buffers at once, because a datagram that GRO has put
	// together would leave all 64 KiB of a buffer in memory for one segment's use.
	scratch []byte
	rest    []byte
	segment int
	source  *endpoint

	endpoints map[remote]*endpoint
	last      *endpoint // most datagrams come from where the one before came from
	lastName  [unix.SizeofSockaddrInet6]byte
	lastInfo  [16]byte
}

func (in *receiver) init() {
	in.scratch = make([]byte, 65535) // more than any UDP payload
	in.iovec.Base = &in.scratch[0]
	in.iovec.SetLen(len(in.scratch))
	in.header.Name = &in.name[0]
	in.header.Iov = &in.iovec
	in.header.SetIovlen(1)
	in.header.Control = &in.control[0]
	in.endpoints = make(map[remote]*endpoint)
	in.try = func(fd uintptr) { in.recvmsg(fd) }
	in.wait = func(fd uintptr) bool { // the poller is edge triggered: try before each wait
		in.recvmsg(fd)
		return in.errno != unix.EAGAIN
	}
}

func (in *receiver) recvmsg(fd uintptr) {
	for {
		in.header.Namelen = uint32(len(in.name))
		in.header.SetControllen(len(in.control))
		n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&in.header)), 0)
		in.n, in.errno = int(n), errno
		if errno != unix.EINTR {
			return
		}
	}
}

// receive is the socket's conn.ReceiveFunc. It waits for the first datagram and
// takes what else is there already. A datagram that was put together by UDP_GRO
// is cut into its segments; those without place are for the next call.
func (s *socket) receive(packets [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
	in := &s.in
	n := in.take(packets, sizes, eps)
	for n < min(maxReceive, len(packets)) {
		var err error
		if n == 0 {
			err = s.raw.Read(in.wait)
		} else {
			err = s.raw.Control(in.try)
		}
		if n > 0 && (err != nil || in.errno != 0) {
			return n, nil //nolint:nilerr // no more for now, or an error that the next call will meet too
		}
		switch {
		case err != nil:
			return 0, net.ErrClosed
		case in.errno != 0:
			return 0, in.errno
		}
		segment, source := in.controls()
		in.rest, in.segment, in.source = in.scratch[:in.n], segment, in.endpoint(source)
		n += in.take(packets[n:], sizes[n:], eps[n:])
	}
	return n, nil
}

// take copies segments into packets and returns how many.
func (in *receiver) take(packets [][]byte, sizes []int, eps []conn.Endpoint) int {
	n := 0
	for ; len(in.rest) > 0 && n < len(packets); n++ {
		size := len(in.rest)
		if in.segment > 0 {
			size = min(size, in.segment)
		}
		sizes[n], eps[n] = copy(packets[n], in.rest[:size]), in.source
		in.rest = in.rest[size:]
	}
	return n
}

// controls reads the control messages: the size of a segment, 0 for none, and
// the PKTINFO with the local address.
func (in *receiver) controls() (segment int, source []byte) {
	b := in.control[:in.header.Controllen]
	for len(b) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		if h.Len < unix.SizeofCmsghdr || h.Len > uint64(len(b)) {
			break
		}
		data := b[unix.CmsgLen(0):h.Len]
		switch {
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4:
			segment = int(binary.NativeEndian.Uint32(data))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			source = data[4:8] // ipi_spec_dst
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			source = data[:16]
		}
		b = b[min(unix.CmsgSpace(len(data)), len(b)):]
	}
	return segment, source
}

// endpoint returns the value for the sender of the datagram just received.
func (in *receiver) endpoint(source []byte) *endpoint {
	name := in.name[:in.header.Namelen]
	if e := in.last; e != nil && string(name) == string(in.lastName[:len(name)]) &&
		string(source) == string(in.lastInfo[:len(source)]) && !e.cleared.Load() {
		return e
	}
	r := remote{dst: addrPort(name), src: localAddr(name, source)}
	e := in.endpoints[r]
	if e == nil || e.cleared.Load() { // cleared, and now there is news from the same place
		if len(in.endpoints) >= maxEndpoints {
			clear(in.endpoints)
		}
		e = newEndpoint(r.dst, r.src)
		in.endpoints[r] = e
	}
	in.last = e
	copy(in.lastName[:], name)
	copy(in.lastInfo[:], source)
	return e
}

// addrPort reads a sockaddr.
func addrPort(name []byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(name[2:])
	if binary.NativeEndian.Uint16(name) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	}
	return netip.AddrPortFrom(withZone(netip.AddrFrom16([16]byte(name[8:24])), name), port)
}

// localAddr is the local address of the PKTINFO, in the zone of the remote one.
func localAddr(name, source []byte) netip.Addr {
	a, ok := netip.AddrFromSlice(source)
	if !ok || a.IsUnspecified() {
		return netip.Addr{}
	}
	if a.Is6() {
		return withZone(a, name)
	}
	return a
}

// withZone adds the scope of a sockaddr_in6 to a link-local address. Zones are
// numbers here, since nobody has to read them.
func withZone(a netip.Addr, name []byte) netip.Addr {
	if scope := binary.NativeEndian.Uint32(name[24:]); scope != 0 && a.IsLinkLocalUnicast() {
		return a.WithZone(strconv.FormatUint(uint64(scope), 10))
	}
	return a
}

// zoneID is the interface index of an address's zone, 0 for none or an unknown one.
func zoneID(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	if n, err := strconv.ParseUint(a.Zone(), 10, 32); err == nil {
		return uint32(n)
	}
	if i, err := net.InterfaceByName(a.Zone()); err == nil {
		return uint32(i.Index)
	}
	return 0
}
