package packet

// A packet may exceed the MTU of its path. Split fragments it if the sender allows that; otherwise
// TooBig writes the ICMP error for the sender.

const (
	dontFragment = 0x4000 // mask in the word of flags and fragment offset
	moreFollow   = 0x2000
	offsetMask   = 0x1fff

	// maxError4 and maxError6 are the maximum sizes of an ICMP error (RFC 1812, section
	// 4.3.2.3; RFC 4443, section 2.4c).
	maxError4 = 576
	maxError6 = 1280

	// MaxTooBig is the size in octets of the largest error that TooBig writes.
	MaxTooBig = maxError6

	minMTU4 = ipv4Len + 40 + 8 // RFC 791: the largest header and eight octets of data
	minMTU6 = 1280             // RFC 8200, section 5
)

// DontFragment reports whether only the sender may fragment this packet: IPv6, or IPv4 with
// DF.
func (v *View) DontFragment() bool { return !v.is4 || be.Uint16(v.b[6:8])&dontFragment != 0 }

// Split cuts an IPv4 packet, which may already be a fragment, into fragments of at most mtu
// octets. It follows RFC 791, section 3.2 and Linux (net/ipv4/ip_output.c, ip_do_fragment).
// Offsets are multiples of 8, the identification is kept, and options without the copy bit
// become no-operations in all fragments but the first. A whole packet whose identification is
// 0 gets id, because the identification of fragments must differ from packet to packet (RFC
// 6864, section 4.1).
//
// The fragments are new memory, and the packet stays unchanged. The result is nil for a packet
// with DontFragment or a partial checksum, and for an mtu below 68. A packet that fits becomes
// one fragment.
func (v *View) Split(mtu int, id uint16) [][]byte {
	if v.DontFragment() || v.csum == ChecksumPartial || mtu < minMTU4 {
		return nil
	}
	header := int(v.transport)
	data := v.b[header:]
	size := len(data)
	if header+size > mtu {
		size = (mtu - header) &^ 7
	}
	word := be.Uint16(v.b[6:8])
	whole := word&(moreFollow|offsetMask) == 0
	n := max(1, (len(data)+size-1)/max(size, 1))
	fragments := make([][]byte, 0, n)
	memory := make([]byte, 0, n*header+len(data))
	for i := range n {
		piece := data[i*size : min((i+1)*size, len(data))]
		start := len(memory)
		memory = append(append(memory, v.b[:header]...), piece...)
		f := memory[start:len(memory):len(memory)]
		be.PutUint16(f[2:4], uint16(len(f)))
		if whole && n > 1 && be.Uint16(f[4:6]) == 0 {
			be.PutUint16(f[4:6], id)
		}
		place := word + uint16(i*size/8)
		if i < n-1 {
			place |= moreFollow
		}
		be.PutUint16(f[6:8], place)
		if i > 0 {
			uncopied(f[ipv4Len:header])
		}
		be.PutUint16(f[10:12], 0)
		be.PutUint16(f[10:12], Checksum(f[:header], 0))
		fragments = append(fragments, f)
	}
	return fragments
}

// uncopied turns the options that only the first fragment carries into no-operations. Parse has
// checked their lengths.
func uncopied(o []byte) {
	for len(o) > 0 && o[0] != 0 {
		size := 1
		if o[0] != 1 {
			size = int(o[1])
		}
		if o[0]&0x80 == 0 {
			for i := range size {
				o[i] = 1
			}
		}
		o = o[size:]
	}
}

// TooBig writes an ICMP error to dst, which has room for MaxTooBig octets. The error requests
// smaller packets from the sender of this packet: fragmentation needed with the next-hop MTU
// (RFC 1191, section 4) or packet too big. mtu is raised to at least 68 in IPv4 and 1280 in
// IPv6. The error quotes as much of the packet as fits into 576 octets (RFC 1812, section
// 4.3.2.3) or 1280 (RFC 4443, section 2.4c). Its source is the destination of the packet, the
// one address from which the sender certainly accepts packets.
//
// The result is the length of the error, or 0 if none may be sent (RFC 1812, section 4.3.2.7; RFC
// 4443, section 2.4e). No error may be sent about an ICMP error, about an IPv4 fragment other than
// the first, or if an address is not that of a single host. TooBig must not be called for the View
// of a Run with several packets.
func (v *View) TooBig(dst []byte, mtu int) int {
	if v.IsICMPError() || !v.singleHosts() {
		return 0
	}
	if !v.is4 {
		return v.tooBig6(dst, mtu)
	}
	if v.fragOff != 0 {
		return 0
	}
	quote := v.b[:min(len(v.b), maxError4-ipv4Len-icmpLen)]
	b := dst[:ipv4Len+icmpLen+len(quote)]
	clear(b[:ipv4Len+icmpLen])
	b[0], b[1] = 0x45, 0xc0 // internetwork control (RFC 1812, section 4.3.2.5)
	be.PutUint16(b[2:4], uint16(len(b)))
	be.PutUint16(b[6:8], dontFragment) // with DF, the identification 0 is allowed (RFC 6864)
	b[8], b[9] = 64, ICMP
	copy(b[12:16], v.b[16:20])
	copy(b[16:20], v.b[12:16])
	be.PutUint16(b[10:12], Checksum(b[:ipv4Len], 0))
	m := b[ipv4Len:]
	m[0], m[1] = 3, 4
	be.PutUint16(m[6:8], uint16(min(max(mtu, minMTU4), maxPacket)))
	copy(m[icmpLen:], quote)
	be.PutUint16(m[icmpSumOffset:], Checksum(m, 0))
	return len(b)
}

func (v *View) tooBig6(dst []byte, mtu int) int {
	quote := v.b[:min(len(v.b), maxError6-ipv6Len-icmpLen)]
	b := dst[:ipv6Len+icmpLen+len(quote)]
	clear(b[:ipv6Len+icmpLen])
	b[0] = 0x60
	be.PutUint16(b[4:6], uint16(len(b)-ipv6Len))
	b[6], b[7] = ICMPv6, 64
	copy(b[8:24], v.b[24:40])
	copy(b[24:40], v.b[8:24])
	m := b[ipv6Len:]
	m[0] = 2
	be.PutUint32(m[4:8], uint32(max(mtu, minMTU6)))
	copy(m[icmpLen:], quote)
	be.PutUint16(m[icmpSumOffset:], Checksum(m, pseudoAddrs(b[8:40])+uint64(len(m))+uint64(ICMPv6)))
	return len(b)
}

// singleHosts reports whether each address can belong to one host. Such an address is not in
// 0.0.0.0/8 or 127.0.0.0/8, and is not multicast, limited broadcast, :: or ::1.
func (v *View) singleHosts() bool {
	if v.is4 {
		for _, a := range [2]uint32{v.Src4(), v.Dst4()} {
			if a>>24 == 0 || a>>24 == 127 || a>>28 == 0xe || a == 0xffffffff {
				return false
			}
		}
		return true
	}
	src, dst := v.Src(), v.Dst()
	return !src.IsUnspecified() && !src.IsLoopback() && !src.IsMulticast() && !dst.IsUnspecified() && !dst.IsLoopback() && !dst.IsMulticast()
}
