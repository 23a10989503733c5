package packet

import (
	"encoding/binary"
	"math/bits"
)

var (
	be = binary.BigEndian
	le = binary.LittleEndian
)

// ChecksumState is the state of a packet's transport checksum field.
type ChecksumState uint8

const (
	// ChecksumComplete: the field holds a finished Internet checksum.
	ChecksumComplete ChecksumState = iota
	// ChecksumPartial: the field holds the folded sum of the pseudo-header, not inverted. The
	// sender of the packet adds the rest (virtio NEEDS_CSUM, the kernel's CHECKSUM_PARTIAL).
	// Addresses are part of that sum, ports are not.
	ChecksumPartial
	// ChecksumAbsent: the packet contains no checksum that a rewrite must update. It is a later
	// fragment, UDP without a checksum (RFC 768; RFC 6935 for IPv6), or of a protocol that
	// View.Parse does not examine. One of these is SCTP, whose checksum does not cover addresses.
	ChecksumAbsent
)

// Checksum returns the Internet checksum (RFC 1071) of b, inverted, as the checksum field
// holds it. sum is the unfolded sum of the octets before b, in big-endian 16-bit or 32-bit
// words, and is below 1<<48. An odd last octet is padded with zero.
func Checksum(b []byte, sum uint64) uint16 { return ^fold(sum + uint64(sum16(b))) }

// sum16 returns the folded ones'-complement sum of b, not inverted. It adds little-endian 64-bit
// words and swaps the octets of the result, which gives the sum of big-endian words (RFC 1071,
// section 2). Two chains of additions run in parallel, because each addition must wait for the
// carry of the previous one in its chain.
func sum16(b []byte) uint16 {
	var s0, s1, carries, c uint64
	for len(b) >= 128 {
		p, q := b[:64:64], b[64:128:128]
		s0, c = bits.Add64(s0, le.Uint64(p[0:]), 0)
		s0, c = bits.Add64(s0, le.Uint64(p[8:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[16:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[24:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[32:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[40:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[48:]), c)
		s0, c = bits.Add64(s0, le.Uint64(p[56:]), c)
		carries += c
		s1, c = bits.Add64(s1, le.Uint64(q[0:]), 0)
		s1, c = bits.Add64(s1, le.Uint64(q[8:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[16:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[24:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[32:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[40:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[48:]), c)
		s1, c = bits.Add64(s1, le.Uint64(q[56:]), c)
		carries += c
		b = b[128:]
	}
	for len(b) >= 32 {
		s0, c = bits.Add64(s0, le.Uint64(b[0:8]), 0)
		s0, c = bits.Add64(s0, le.Uint64(b[8:16]), c)
		s0, c = bits.Add64(s0, le.Uint64(b[16:24]), c)
		s0, c = bits.Add64(s0, le.Uint64(b[24:32]), c)
		carries += c
		b = b[32:]
	}
	for len(b) >= 8 {
		s0, c = bits.Add64(s0, le.Uint64(b), 0)
		carries += c
		b = b[8:]
	}
	var rest uint64 // the remaining octets, at most 7
	if len(b) >= 4 {
		rest = uint64(le.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 2 {
		rest += uint64(le.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		rest += uint64(b[0])
	}
	s0, c = bits.Add64(s0, s1, 0)
	carries += c
	s0, c = bits.Add64(s0, rest, 0)
	carries += c
	s0, c = bits.Add64(s0, carries, 0)
	s0 += c // cannot overflow: after a carry, s0 is less than carries, which is small
	return bits.ReverseBytes16(fold(s0))
}

// sumHeader4 is sum16 for an IPv4 header. It is faster for a header without options.
func sumHeader4(h []byte) uint16 {
	if len(h) != ipv4Len {
		return sum16(h)
	}
	return fold(uint64(be.Uint32(h[0:4])) + uint64(be.Uint32(h[4:8])) + uint64(be.Uint32(h[8:12])) + uint64(be.Uint32(h[12:16])) +
		uint64(be.Uint32(h[16:20])))
}

// fold reduces a sum to 16 bits with end-around carry. The result is 0 only if sum is 0. In each
// step, fold adds the number to a copy with swapped halves. The upper half of the result is then
// the sum of both halves, including the carry out of the lower half.
func fold(sum uint64) uint16 {
	sum += bits.RotateLeft64(sum, 32)
	half := uint32(sum >> 32)
	half += bits.RotateLeft32(half, 16)
	return uint16(half >> 16)
}

// delta32 and delta16 return the value to add to a sum when a field is replaced: ~m + m' of RFC
// 1624, equation 3. If the field starts at an odd offset of the summed octets, the octets of both
// arguments of delta16 must be swapped.
func delta32(old, new uint32) uint64 { return uint64(^old) + uint64(new) }
func delta16(old, new uint16) uint64 { return uint64(^old) + uint64(new) }

// delta128 is delta32 for an address of 128 bits. It reduces the result to 33 bits, so that adding
// it to another sum does not overflow.
func delta128(oldHi, oldLo, newHi, newLo uint64) uint64 {
	sum, c := bits.Add64(^oldHi, newHi, 0)
	sum, c = bits.Add64(sum, ^oldLo, c)
	sum, c = bits.Add64(sum, newLo, c)
	return sum>>32 + sum&0xffffffff + c // end-around carry, as in fold
}

// updated applies a delta to a finished checksum (RFC 1624, equation 3).
func updated(sum uint16, delta uint64) uint16 { return ^fold(uint64(^sum) + delta) }

// pseudoAddrs returns the sum of b, the two addresses of an IP header: 8 octets for IPv4, 32 for
// IPv6.
func pseudoAddrs(b []byte) uint64 {
	var sum uint64
	for ; len(b) >= 4; b = b[4:] {
		sum += uint64(be.Uint32(b))
	}
	return sum
}
