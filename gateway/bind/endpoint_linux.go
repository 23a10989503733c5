package bind

import (
	"encoding/binary"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
)

// endpoint is the remote address of a peer, together with the local address at which the last
// datagram from it arrived. Replies leave from this local address, because a NAT or firewall in
// front of the peer expects it. There is one shared value for each remote address. It is immutable
// except for cleared and refused.
type endpoint struct {
	dst     netip.AddrPort
	src     netip.Addr // zero: the kernel chooses
	cleared atomic.Bool
	// refused is the time at which the kernel last refused to segment for this endpoint, or nil if
	// it never did.
	refused atomic.Pointer[time.Time]

	name    [unix.SizeofSockaddrInet6]byte // dst as a sockaddr
	nameLen uint32
	info    [pktinfoSpace]byte // src as a control message
	infoLen int
}

var _ conn.Endpoint = (*endpoint)(nil)

// pktinfoSpace is the size of the larger of IP_PKTINFO and IPV6_PKTINFO as a control message
// on a 64-bit machine.
const pktinfoSpace = 40

func newEndpoint(dst netip.AddrPort, src netip.Addr) *endpoint {
	e := &endpoint{dst: dst, src: src}
	if dst.Addr().Is4() {
		sa := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: dst.Addr().As4()}
		binary.BigEndian.PutUint16(asBytes(&sa.Port), dst.Port())
		e.nameLen = uint32(copy(e.name[:], asBytes(&sa)))
		if src.IsValid() {
			info := unix.Inet4Pktinfo{Spec_dst: src.As4()}
			e.infoLen = putControl(e.info[:], unix.IPPROTO_IP, unix.IP_PKTINFO, asBytes(&info))
		}
		return e
	}
	sa := unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: dst.Addr().As16(), Scope_id: zoneID(dst.Addr())}
	binary.BigEndian.PutUint16(asBytes(&sa.Port), dst.Port())
	e.nameLen = uint32(copy(e.name[:], asBytes(&sa)))
	if src.IsValid() {
		info := unix.Inet6Pktinfo{Addr: src.As16(), Ifindex: zoneID(src)}
		e.infoLen = putControl(e.info[:], unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, asBytes(&info))
	}
	return e
}

// ClearSrc implements conn.Endpoint. The device calls it when a handshake gets no answer,
// because the host may have lost the local address.
func (e *endpoint) ClearSrc() { e.cleared.Store(true) }

// SrcIP implements conn.Endpoint. It returns the zero Addr if no local address is set.
func (e *endpoint) SrcIP() netip.Addr {
	if e.cleared.Load() {
		return netip.Addr{}
	}
	return e.src
}

// segmentAgain is the delay after which UDP_SEGMENT is tried again for an endpoint. The route
// may have changed by then.
const segmentAgain = 10 * time.Second

// segments reports whether the kernel may segment datagrams to e.
func (e *endpoint) segments() bool {
	at := e.refused.Load()
	return at == nil || time.Since(*at) >= segmentAgain
}

// refuse records that the kernel just refused to segment for e.
func (e *endpoint) refuse() {
	now := time.Now()
	e.refused.Store(&now)
}

// AddrPort returns the remote address.
func (e *endpoint) AddrPort() netip.AddrPort { return e.dst }

// SrcToString implements conn.Endpoint.
func (e *endpoint) SrcToString() string { return e.SrcIP().String() }

// DstIP implements conn.Endpoint.
func (e *endpoint) DstIP() netip.Addr { return e.dst.Addr() }

// DstToString implements conn.Endpoint.
func (e *endpoint) DstToString() string { return e.dst.String() }

// DstToBytes implements conn.Endpoint. Cookies depend on the result, so it is the true
// remote address and port.
func (e *endpoint) DstToBytes() []byte {
	b, _ := e.dst.MarshalBinary() // never fails
	return b
}

// putControl writes a control message to b and returns its size.
func putControl(b []byte, level, kind int32, data []byte) int {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = level, kind
	h.SetLen(unix.CmsgLen(len(data)))
	copy(b[unix.CmsgLen(0):], data)
	return unix.CmsgSpace(len(data))
}

func asBytes[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}
