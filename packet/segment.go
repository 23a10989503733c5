package packet

// Segmenter cuts one superpacket into the packets that a network card would send (the kernel's
// tcp_gso_segment, __udp_gso_segment and inet_gso_segment). TCP sequence numbers advance, FIN
// and PSH stay in the last segment and CWR in the first, the IPv4 identification counts up,
// and every checksum is complete. The Segmenter returns segments one by one, so a caller that
// runs out of room can continue later. The zero value has no segments.
//
// A Segmenter borrows the bytes of the view until Remaining is 0. It overwrites these bytes,
// because it builds each segment in place. It must not be used concurrently.
type Segmenter struct {
	b         []byte
	template  []byte // all headers of the superpacket
	size      int    // transport data in each segment but the last
	transport int
	next      int // offset of the data of the next segment
	left      int // number of segments that Next has not returned
	seq       uint32
	id        uint16
	flags     uint8
	is4       bool
	tcp       bool

	ipSum        uint64 // sum of the IPv4 header without length, identification and checksum
	transportSum uint64 // sum of pseudo-header and transport header without lengths, sequence number, flags and checksum
}

// Reset starts the segmentation of another superpacket. v is a parsed TCP or UDP packet with a
// partial checksum, and may have been rewritten. gsoSize is the result of VirtioHeader.Validate and
// must be at least 1. Data of at most gsoSize octets becomes one segment. If Reset fails, it
// returns ErrGSO, and s has no segments.
//
// Reset ignores the value of the partial checksum. Every segment has its own length, so its
// pseudo-header sum is computed from the addresses.
func (s *Segmenter) Reset(v *View, gsoSize int) error {
	s.left = 0
	if gsoSize < 1 || !v.segmentable() {
		return ErrGSO
	}
	*s = Segmenter{
		b: v.b, template: append(s.template[:0], v.b[:v.payload]...), size: gsoSize, transport: int(v.transport), next: int(v.payload),
		is4: v.is4, tcp: v.proto == TCP,
	}
	s.left = max(1, (len(s.b)-s.next+gsoSize-1)/gsoSize)
	if s.is4 {
		ip := s.b[:s.transport]
		s.id = be.Uint16(ip[4:6])
		s.ipSum = uint64(be.Uint16(ip[0:2])) + uint64(sum16(ip[6:10])) + uint64(sum16(ip[12:]))
	}
	t := s.template[s.transport:]
	s.transportSum = v.pseudoSum(0)
	if s.tcp {
		s.seq = be.Uint32(t[4:8])
		s.flags = t[13]
		s.transportSum += uint64(sum16(t[:4])) + uint64(sum16(t[8:12])) + uint64(t[12])<<8 + uint64(be.Uint16(t[14:16])) +
			uint64(sum16(t[18:]))
	} else {
		s.transportSum += uint64(be.Uint32(t[:4]))
	}
	return nil
}

// Remaining returns the number of segments that Next has not yet returned.
func (s *Segmenter) Remaining() int { return s.left }

// Next returns the next segment, a complete IP packet, or nil after the last one. The segment
// is a part of the view's bytes, and its headers overwrite data of the previous segment. So a
// segment is valid only until the next call.
func (s *Segmenter) Next() []byte {
	if s.left == 0 {
		return nil
	}
	header, end := len(s.template), min(s.next+s.size, len(s.b))
	p := s.b[s.next-header : end : end]
	copy(p, s.template)
	if s.is4 {
		be.PutUint16(p[2:4], uint16(len(p)))
		be.PutUint16(p[4:6], s.id)
		be.PutUint16(p[10:12], ^fold(s.ipSum+uint64(len(p))+uint64(s.id)))
		s.id++
	} else {
		be.PutUint16(p[4:6], uint16(len(p)-ipv6Len))
	}

	t := p[s.transport:]
	length := uint64(len(t))
	sum := s.transportSum + length + uint64(sum16(t[header-s.transport:]))
	if s.tcp {
		flags := s.flags
		if s.left > 1 {
			flags &^= TCPFin | TCPPsh
		}
		be.PutUint32(t[4:8], s.seq)
		t[13] = flags
		be.PutUint16(t[16:18], ^fold(sum+uint64(s.seq)+uint64(flags)))
		s.seq += uint32(end - s.next)
		s.flags &^= TCPCwr
	} else {
		be.PutUint16(t[4:6], uint16(length))
		check := ^fold(sum + length)
		if check == 0 {
			check = 0xffff // a zero in the packet would mean "no checksum" (RFC 768)
		}
		be.PutUint16(t[6:8], check)
	}
	s.next = end
	s.left--
	return p
}
