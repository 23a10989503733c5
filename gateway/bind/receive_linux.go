package bind

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxEndpoints bounds the cache of remote addresses, because spoofed sources must not fill the
// memory. A gateway has a few addresses per peer. When the cache is full, it is emptied.
const maxEndpoints = 4096

// maxReceive is the number of messages at which a receive call stops. Messages of one batch can be
// coalesced for the pods. With half of this value one TCP stream was a tenth slower; with twice the
// value it was no faster.
const maxReceive = 384

// overflowSpace is the length of the control message of SO_RXQ_OVFL on a 64-bit machine.
const overflowSpace = 24

// remote is a remote address together with the local address at which its datagrams arrive.
type remote struct {
	dst netip.AddrPort
	src netip.Addr
}

// receiver is the scratch memory of the one goroutine that receives from a socket.
type receiver struct {
	header  unix.Msghdr
	iovec   unix.Iovec
	name    [unix.SizeofSockaddrInet6]byte
	control [pktinfoSpace + gsoSpace + overflowSpace]byte
	n       int
	errno   unix.Errno
	try     func(fd uintptr)
	wait    func(fd uintptr) bool
	lost    uint32 // number of dropped datagrams that the kernel last reported

	endpoints map[remote]*endpoint
	last      *endpoint // endpoint of the previous datagram; cached, because consecutive datagrams mostly have the same source
	lastName  [unix.SizeofSockaddrInet6]byte
	lastInfo  [16]byte
}

func (in *receiver) init() {
	in.iovec.SetLen(MaxDatagram)
	in.header.Name = &in.name[0]
	in.header.Iov = &in.iovec
	in.header.SetIovlen(1)
	in.header.Control = &in.control[0]
	in.endpoints = make(map[remote]*endpoint)
	in.try = func(fd uintptr) { in.recvmsg(fd) }
	in.wait = func(fd uintptr) bool { // receive before each wait, because the poller is edge triggered
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

// receive appends available datagrams to a batch. If mayBlock is true, it waits for the first
// datagram. Otherwise it may append none.
func (s *socket) receive(b *Batch, mayBlock bool) error {
	in := &s.in
	b.More = true
	for messages := 0; messages < maxReceive; {
		space := b.Space()
		if space == nil {
			return nil
		}
		in.iovec.Base = &space[0]
		var err error
		if first := messages == 0; first && mayBlock {
			err = s.raw.Read(in.wait)
		} else if err = s.raw.Control(in.try); in.errno == unix.EAGAIN || !first && (err != nil || in.errno != 0) {
			b.More = false
			return nil //nolint:nilerr // no datagram is available, or the next call will get the same error
		}
		switch {
		case err != nil:
			return net.ErrClosed
		case in.errno != 0:
			return in.errno
		}
		c := in.controls()
		// Add empty datagrams too, so that they are counted.
		b.Received(in.n, c.segment, in.endpoint(c.source))
		if c.overflow {
			b.Lost += uint64(c.lost - in.lost) // both counters wrap
			in.lost = c.lost
		}
		if messages++; c.segment > 0 {
			messages += (in.n - 1) / c.segment
		}
	}
	return nil
}

// controls holds the values of the control messages.
type controls struct {
	segment  int    // size of a segment, 0 for none
	source   []byte // the local address in PKTINFO
	lost     uint32 // datagrams that the socket has dropped since it was opened
	overflow bool   // lost is set; the kernel sends no count while it is 0
}

// controls parses the control messages of the datagram just received.
func (in *receiver) controls() (c controls) {
	b := in.control[:in.header.Controllen]
	for len(b) >= unix.SizeofCmsghdr {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		if h.Len < unix.SizeofCmsghdr || h.Len > uint64(len(b)) {
			break
		}
		data := b[unix.CmsgLen(0):h.Len]
		switch {
		case h.Level == unix.IPPROTO_UDP && h.Type == unix.UDP_GRO && len(data) >= 4:
			c.segment = int(binary.NativeEndian.Uint32(data))
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			c.source = data[4:8] // the field ipi_spec_dst
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			c.source = data[:16]
		case h.Level == unix.SOL_SOCKET && h.Type == unix.SO_RXQ_OVFL && len(data) >= 4:
			c.lost, c.overflow = binary.NativeEndian.Uint32(data), true
		}
		b = b[min(unix.CmsgSpace(len(data)), len(b)):]
	}
	return c
}

// endpoint returns the shared endpoint for the sender of the datagram just received. source is
// the local address in PKTINFO.
func (in *receiver) endpoint(source []byte) *endpoint {
	name := in.name[:in.header.Namelen]
	if e := in.last; e != nil && string(name) == string(in.lastName[:len(name)]) &&
		string(source) == string(in.lastInfo[:len(source)]) && !e.cleared.Load() {
		return e
	}
	r := remote{dst: addrPort(name), src: localAddr(name, source)}
	e := in.endpoints[r]
	if e == nil || e.cleared.Load() { // a cleared endpoint is replaced when its address sends again
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

func addrPort(name []byte) netip.AddrPort {
	port := binary.BigEndian.Uint16(name[2:])
	if binary.NativeEndian.Uint16(name) == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(name[4:8])), port)
	}
	return netip.AddrPortFrom(withZone(netip.AddrFrom16([16]byte(name[8:24])), name), port)
}

// localAddr returns the local address of a PKTINFO, in the zone of the remote address.
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

// withZone adds the scope of a sockaddr_in6 to a link-local address. It writes the scope as a
// number, because no person reads it.
func withZone(a netip.Addr, name []byte) netip.Addr {
	if scope := binary.NativeEndian.Uint32(name[24:]); scope != 0 && a.IsLinkLocalUnicast() {
		return a.WithZone(strconv.FormatUint(uint64(scope), 10))
	}
	return a
}

// zoneID returns the interface index of an address's zone. It returns 0 if the address has no zone
// or the interface does not exist.
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
