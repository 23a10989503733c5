package bind

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxEndpoints bounds the memory of remote addresses: spoofed sources must not fill it. A gateway
// has a few per peer; when it is full it is begun anew.
const maxEndpoints = 4096

const (
	// maxReceive messages, or slabLen octets, are received before anything is done with them. What
	// is received together is joined to larger packets for the pods: with half of this, one TCP
	// stream was a tenth slower; with twice, no faster.
	maxReceive = 384
	slabLen    = 512<<10 + maxDatagram

	maxDatagram = 65535 // more than any UDP payload
	slabAlign   = 64    // of a datagram: a cache line
)

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

	slab []byte // all that one call receives, one datagram behind the other

	endpoints map[remote]*endpoint
	last      *endpoint // most datagrams come from where the one before came from
	lastName  [unix.SizeofSockaddrInet6]byte
	lastInfo  [16]byte
}

func (in *receiver) init() {
	in.slab = make([]byte, slabLen)
	in.iovec.SetLen(maxDatagram)
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

// receive fills an empty batch, in memory that the next call uses again. It waits for the first
// datagram and takes what else is there already.
func (s *socket) receive(b *Batch) error {
	in := &s.in
	for used, messages := 0, 0; messages < maxReceive && used+maxDatagram <= len(in.slab); {
		in.iovec.Base = &in.slab[used]
		var err error
		if messages == 0 {
			err = s.raw.Read(in.wait)
		} else {
			err = s.raw.Control(in.try)
		}
		if messages > 0 && (err != nil || in.errno != 0) {
			return nil //nolint:nilerr // no more for now, or an error that the next call will meet too
		}
		switch {
		case err != nil:
			return net.ErrClosed
		case in.errno != 0:
			return in.errno
		}
		segment, source := in.controls()
		end := used + in.n
		b.Add(in.slab[used:end:end], segment, in.endpoint(source)) // an empty one too: somebody has to count it
		if messages++; segment > 0 {
			messages += (in.n - 1) / segment
		}
		used = (end + slabAlign - 1) &^ (slabAlign - 1)
	}
	return nil
}

// controls reads the control messages: the size of a segment, 0 for none, and the PKTINFO with the
// local address.
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

// withZone adds the scope of a sockaddr_in6 to a link-local address. Zones are numbers here, since
// nobody has to read them.
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
