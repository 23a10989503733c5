package packet

import "slices"

// Join reassembles the fragments of one datagram, in any order. They must be whole IP packets that
// Parse accepts, with the same family, source, destination and identification. The result is new
// memory, and the fragments stay unchanged. The result has the header of the first fragment (RFC
// 791, section 3.2; RFC 8200, section 4.5), in IPv6 without the fragment header. In IPv4 DF is
// cleared, because a fragmented datagram may be fragmented again. Join returns ErrJoin if the
// fragments leave a gap or overlap, if the datagram exceeds the length field, or if some fragments
// use ECN and others do not.
//
// ECN follows Linux (net/ipv4/inet_fragment.c, ip_frag_ecn_table) and RFC 3168, section 5.3: a
// congestion mark on one fragment marks the datagram.
func Join(fragments [][]byte) ([]byte, error) {
	parts := make([]part, len(fragments))
	var first View // after the loop: the first fragment
	for i, b := range fragments {
		if err := first.Parse(b, ChecksumComplete); err != nil {
			return nil, ErrJoin
		}
		parts[i] = part{off: int(first.fragOff), more: first.more, b: b, data: first.b[len(first.b)-first.FragmentLen():]}
	}
	slices.SortFunc(parts, func(a, b part) int { return a.off - b.off })
	size, marks := 0, uint8(0)
	for i, p := range parts {
		if p.off != size || p.more != (i < len(parts)-1) || len(p.data) == 0 {
			return nil, ErrJoin
		}
		size += len(p.data)
		marks |= 1 << ecn(p.b)
	}
	if len(parts) == 0 || marks&(1<<notECT) != 0 && marks != 1<<notECT {
		return nil, ErrJoin
	}
	_ = first.Parse(parts[0].b, ChecksumComplete) // cannot fail: it was parsed above
	header, kindAt := first.headerOfDatagram()
	length := header + size
	if first.is4 && length > maxPacket || !first.is4 && length-ipv6Len > maxPacket {
		return nil, ErrJoin
	}
	whole := append(make([]byte, 0, length), first.b[:header]...)
	for _, p := range parts {
		whole = append(whole, p.data...)
	}
	if first.is4 {
		be.PutUint16(whole[2:4], uint16(length))
		be.PutUint16(whole[6:8], 0)
	} else {
		be.PutUint16(whole[4:6], uint16(length-ipv6Len))
		whole[kindAt] = first.b[header] // the Next Header field of the fragment header
	}
	if marks&(1<<congestion) != 0 {
		setCongestion(whole)
	}
	if first.is4 {
		be.PutUint16(whole[10:12], 0)
		be.PutUint16(whole[10:12], Checksum(whole[:header], 0))
	}
	return whole, nil
}

// part is a fragment of a datagram that is being joined.
type part struct {
	off     int // offset in octets
	more    bool
	b, data []byte // the packet, and its part of the datagram
}

// headerOfDatagram returns the length of the headers before the fragmented part, without the
// fragment header of IPv6. For IPv6 it also returns the offset of the Next Header field that names
// the fragment header.
func (v *View) headerOfDatagram() (length, kindAt int) {
	if v.is4 {
		return int(v.transport), 0
	}
	length, kindAt = ipv6Len, 6
	for kind := v.b[kindAt]; kind != fragmentHeader; kind = v.b[kindAt] {
		length, kindAt = length+extensionLen(kind, v.b[length:]), length
	}
	return length, kindAt
}

// ECN codepoints (RFC 3168, section 5).
const (
	notECT     = 0
	congestion = 3
)

func ecn(b []byte) uint8 {
	if b[0]>>4 == 4 {
		return b[1] & 3
	}
	return b[1] >> 4 & 3
}

func setCongestion(b []byte) {
	if b[0]>>4 == 4 {
		b[1] |= congestion
	} else {
		b[1] |= congestion << 4
	}
}

// minCut is the smallest payload of a fragment of Split6. Each fragment repeats the headers, so
// small payloads after long headers would multiply the number of octets to send.
const minCut = 512

// Split6 cuts an IPv6 packet into fragments of at most mtu octets with this identification
// (RFC 8200, section 4.5). A packet that fits becomes one fragment. The fragments are new
// memory, and the packet stays unchanged. The result is nil for IPv4, for a fragment, for a
// partial checksum, and for an mtu below 1280. It is also nil if the headers do not fit the
// first fragment (RFC 7112), or leave less than minCut for the payload.
func (v *View) Split6(mtu int, id uint32) [][]byte {
	if v.is4 || v.more || v.fragOff != 0 || v.csum == ChecksumPartial || mtu < minMTU6 {
		return nil
	}
	if len(v.b) <= mtu {
		return [][]byte{slices.Clone(v.b)}
	}
	header, kindAt := v.unfragmentable()
	size := (mtu - header - fragmentHeaderLen) &^ 7
	if size < minCut || int(v.payload) > header+size {
		return nil
	}
	data := v.b[header:]
	n := (len(data) + size - 1) / size
	fragments := make([][]byte, 0, n)
	memory := make([]byte, 0, n*(header+fragmentHeaderLen)+len(data))
	for off := 0; off < len(data); off += size {
		piece := data[off:min(off+size, len(data))]
		word := uint16(off)
		if off+size < len(data) {
			word |= 1
		}
		start := len(memory)
		memory = append(append(memory, v.b[:header]...), v.b[kindAt], 0)
		memory = be.AppendUint16(memory, word)
		memory = be.AppendUint32(memory, id)
		memory = append(memory, piece...)
		f := memory[start:len(memory):len(memory)]
		f[kindAt] = fragmentHeader
		be.PutUint16(f[4:6], uint16(len(f)-ipv6Len))
		fragments = append(fragments, f)
	}
	return fragments
}

const fragmentHeaderLen = 8

// unfragmentable returns the length of the headers that each fragment repeats, and the offset of
// the Next Header field of the last one. These are the IPv6 header and the extension headers up to
// the routing header or, without one, the hop-by-hop header (RFC 8200, section 4.5).
func (v *View) unfragmentable() (length, kindAt int) {
	length, kindAt = ipv6Len, 6
	for at, field := ipv6Len, 6; isExtension(v.b[field]); {
		kind := v.b[field]
		field, at = at, at+extensionLen(kind, v.b[at:])
		if kind == routing || kind == hopByHop {
			length, kindAt = at, field
		}
	}
	return length, kindAt
}
