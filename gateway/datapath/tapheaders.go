package datapath

import (
	"encoding/binary"
	"net/netip"

	"github.com/isthmus-net/isthmus/packet"
)

// udpHeader appends the IP and UDP headers of a datagram to b. An unknown address becomes the
// unspecified address.
func udpHeader(b []byte, src, dst netip.AddrPort, data []byte) []byte {
	be := binary.BigEndian
	size := 8 + len(data)
	if src.Addr().Is4() || dst.Addr().Is4() {
		s, d := as4(src.Addr()), as4(dst.Addr())
		b = append(b, 0x45, 0, 0, 0, 0, 0, 0, 0, 64, packet.UDP, 0, 0)
		be.PutUint16(b[2:], uint16(20+size))
		b = append(append(b, s[:]...), d[:]...)
		be.PutUint16(b[10:], ^fold(sum(0, b)))
		b = be.AppendUint16(b, src.Port())
		b = be.AppendUint16(b, dst.Port())
		b = be.AppendUint16(b, uint16(size))
		return append(b, 0, 0) // no checksum, which IPv4 allows
	}
	s, d := as16(src.Addr()), as16(dst.Addr())
	b = append(b, 0x60, 0, 0, 0, 0, 0, packet.UDP, 64)
	be.PutUint16(b[4:], uint16(size))
	b = append(append(b, s[:]...), d[:]...)
	b = be.AppendUint16(b, src.Port())
	b = be.AppendUint16(b, dst.Port())
	b = be.AppendUint16(b, uint16(size))
	check := ^fold(sum(sum(uint32(packet.UDP)+uint32(size), b[8:]), data))
	if check == 0 {
		check = 0xffff
	}
	return be.AppendUint16(b, check)
}

func as4(a netip.Addr) (b [4]byte) {
	if a.Is4() {
		b = a.As4()
	}
	return b
}

func as16(a netip.Addr) (b [16]byte) {
	if a.IsValid() {
		b = a.As16()
	}
	return b
}

// sum returns n plus the sum of the 16-bit words of b (RFC 1071).
func sum(n uint32, b []byte) uint32 {
	for ; len(b) >= 2; b = b[2:] {
		n += uint32(b[0])<<8 | uint32(b[1])
	}
	if len(b) == 1 {
		n += uint32(b[0]) << 8
	}
	return n
}

func fold(n uint32) uint16 {
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return uint16(n)
}
