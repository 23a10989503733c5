// Package packettest builds and checks IP packets. It is an independent reference for tests of
// code that rewrites, cuts or joins packets. It is slow and simple, so that a reader can check
// it by eye. It shares no line with package packet.
//
//	b := packettest.Build(packettest.IP{Src: a, Dst: b}, packettest.TCP{SrcPort: 40000, DstPort: 80, Flags: packettest.ACK, Data: data})
//	packettest.Check(t, b, packettest.Src(a), packettest.Ports(40000, 80), packettest.ValidChecksums())
package packettest

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// TCP flags.
const (
	FIN = 0x01
	SYN = 0x02
	RST = 0x04
	PSH = 0x08
	ACK = 0x10
	URG = 0x20
	ECE = 0x40
	CWR = 0x80
)

// IP is the IP header of a packet to build. The family is that of Src. Zero fields have the
// usual values: TTL 64, no options, not a fragment.
type IP struct {
	Src, Dst   netip.Addr
	TTL        uint8       // hop limit; 0 means 64
	TOS        uint8       // type of service or traffic class
	ID         uint16      // IPv4 identification
	DF         bool        // IPv4 do not fragment
	FlowLabel  uint32      // IPv6
	Options    []byte      // IPv4; padded with zeros to a multiple of 4
	Extensions []Extension // IPv6, in order
}

// Extension is an IPv6 extension header: Kind 0 hop-by-hop, 43 routing, 44 fragment, 51
// authentication, 60 destination options. Data is the part after the next header and length
// octets. It is padded to the multiple that the kind requires.
type Extension struct {
	Kind uint8
	Data []byte
}

// Body is the content of an IP packet: TCP, UDP, Echo, ICMPError or Raw.
type Body interface {
	// build returns the protocol number and the octets, with a correct checksum for these
	// addresses.
	build(src, dst netip.Addr) (proto uint8, b []byte)
}

// TCP is a TCP segment.
type TCP struct {
	SrcPort, DstPort uint16
	Seq, Ack         uint32
	Flags            uint8
	Window           uint16
	Urgent           uint16
	Options          []byte // padded with zeros to a multiple of 4
	Data             []byte
}

// UDP is a UDP datagram.
type UDP struct {
	SrcPort, DstPort uint16
	NoChecksum       bool // set the checksum field to 0
	Data             []byte
}

// Echo is an ICMP or, between IPv6 addresses, ICMPv6 echo request or reply.
type Echo struct {
	Reply   bool
	ID, Seq uint16
	Data    []byte
}

// ICMPError is an ICMP or ICMPv6 error. Rest is the second word of its header (MTU, pointer, RFC
// 4884 length). If Extension is set, Build pads the quote with zeros to at least 128 octets, adds
// the RFC 4884 length to Rest, and appends the extension.
type ICMPError struct {
	Type, Code uint8
	Rest       uint32
	Quote      []byte
	Extension  []byte
}

// Raw is a body of any other protocol.
type Raw struct {
	Proto uint8
	Data  []byte
}

// Build returns the packet, with complete and correct checksums.
func Build(h IP, body Body) []byte {
	proto, data := body.build(h.Src, h.Dst)
	if h.Src.Is4() != h.Dst.Is4() {
		panic("packettest: addresses of two families")
	}
	ttl := h.TTL
	if ttl == 0 {
		ttl = 64
	}
	if h.Src.Is4() {
		options := padded(h.Options, 4, 0)
		b := []byte{byte(0x40 + (20+len(options))/4), h.TOS}
		b = binary.BigEndian.AppendUint16(b, uint16(20+len(options)+len(data)))
		b = binary.BigEndian.AppendUint16(b, h.ID)
		if h.DF {
			b = append(b, 0x40, 0)
		} else {
			b = append(b, 0, 0)
		}
		b = append(b, ttl, proto, 0, 0)
		b = append(b, h.Src.AsSlice()...)
		b = append(b, h.Dst.AsSlice()...)
		b = append(b, options...)
		binary.BigEndian.PutUint16(b[10:], InternetChecksum(b))
		return append(b, data...)
	}

	var chain []byte
	first := proto
	for i, e := range h.Extensions {
		next := proto
		if i == 0 {
			first = e.Kind
		}
		if i+1 < len(h.Extensions) {
			next = h.Extensions[i+1].Kind
		}
		chain = append(chain, extension(e, next)...)
	}
	b := binary.BigEndian.AppendUint32(nil, 6<<28|uint32(h.TOS)<<20|h.FlowLabel&0xfffff)
	b = binary.BigEndian.AppendUint16(b, uint16(len(chain)+len(data)))
	b = append(b, first, ttl)
	b = append(b, h.Src.AsSlice()...)
	b = append(b, h.Dst.AsSlice()...)
	b = append(b, chain...)
	return append(b, data...)
}

func extension(e Extension, next uint8) []byte {
	switch e.Kind {
	case 44: // reserved octet, offset and flags, identification: always 8 octets
		b := append([]byte{next, 0}, e.Data...)
		for len(b) < 8 {
			b = append(b, 0)
		}
		return b[:8]
	case 51: // length in 4-octet units less 2; a multiple of 8 octets in IPv6
		b := padded(append([]byte{next, 0}, e.Data...), 8, 0)
		if len(b) < 16 {
			b = append(b, make([]byte, 16-len(b))...)
		}
		b[1] = byte(len(b)/4 - 2)
		return b
	}
	b := padded(append([]byte{next, 0}, e.Data...), 8, 0)
	b[1] = byte(len(b)/8 - 1)
	return b
}

func (s TCP) build(src, dst netip.Addr) (uint8, []byte) {
	options := padded(s.Options, 4, 0)
	b := binary.BigEndian.AppendUint16(nil, s.SrcPort)
	b = binary.BigEndian.AppendUint16(b, s.DstPort)
	b = binary.BigEndian.AppendUint32(b, s.Seq)
	b = binary.BigEndian.AppendUint32(b, s.Ack)
	b = append(b, byte((20+len(options))/4<<4), s.Flags)
	b = binary.BigEndian.AppendUint16(b, s.Window)
	b = append(b, 0, 0)
	b = binary.BigEndian.AppendUint16(b, s.Urgent)
	b = append(b, options...)
	b = append(b, s.Data...)
	binary.BigEndian.PutUint16(b[16:], InternetChecksum(pseudoHeader(src, dst, 6, len(b)), b))
	return 6, b
}

func (d UDP) build(src, dst netip.Addr) (uint8, []byte) {
	b := binary.BigEndian.AppendUint16(nil, d.SrcPort)
	b = binary.BigEndian.AppendUint16(b, d.DstPort)
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(d.Data)))
	b = append(b, 0, 0)
	b = append(b, d.Data...)
	if !d.NoChecksum {
		sum := InternetChecksum(pseudoHeader(src, dst, 17, len(b)), b)
		if sum == 0 {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(b[6:], sum)
	}
	return 17, b
}

func (e Echo) build(src, dst netip.Addr) (uint8, []byte) {
	kind := byte(8)
	if e.Reply {
		kind = 0
	}
	if src.Is6() {
		kind = 128
		if e.Reply {
			kind = 129
		}
	}
	b := []byte{kind, 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, e.ID)
	b = binary.BigEndian.AppendUint16(b, e.Seq)
	return icmp(src, dst, append(b, e.Data...))
}

func (e ICMPError) build(src, dst netip.Addr) (uint8, []byte) {
	quote, rest := e.Quote, e.Rest
	if e.Extension != nil {
		quote = padded(quote, 8, 128)
		if src.Is6() {
			rest |= uint32(len(quote)/8) << 24
		} else {
			rest |= uint32(len(quote)/4) << 16
		}
	}
	b := []byte{e.Type, e.Code, 0, 0}
	b = binary.BigEndian.AppendUint32(b, rest)
	b = append(b, quote...)
	return icmp(src, dst, append(b, e.Extension...))
}

func icmp(src, dst netip.Addr, b []byte) (uint8, []byte) {
	if src.Is6() {
		binary.BigEndian.PutUint16(b[2:], InternetChecksum(pseudoHeader(src, dst, 58, len(b)), b))
		return 58, b
	}
	binary.BigEndian.PutUint16(b[2:], InternetChecksum(b))
	return 1, b
}

func (r Raw) build(netip.Addr, netip.Addr) (uint8, []byte) { return r.Proto, r.Data }

// padded returns a copy of b. It pads the copy with zeros to a multiple of unit octets, and to at
// least minimum octets.
func padded(b []byte, unit, minimum int) []byte {
	out := append([]byte(nil), b...)
	for len(out)%unit != 0 || len(out) < minimum {
		out = append(out, 0)
	}
	return out
}

// Partial returns a copy of a TCP or UDP packet with a partial checksum: the sum of the
// pseudo-header, not inverted.
func Partial(b []byte) []byte {
	p := MustDecode(b)
	out := append([]byte(nil), b...)
	sum := ^InternetChecksum(pseudoHeader(p.Src, p.Dst, p.Proto, len(p.Transport)))
	switch p.Proto {
	case 6:
		binary.BigEndian.PutUint16(out[p.TransportOffset+16:], sum)
	case 17:
		binary.BigEndian.PutUint16(out[p.TransportOffset+6:], sum)
	default:
		panic("packettest: no partial checksum for this protocol")
	}
	return out
}

// Fragments cuts a packet into fragments whose data is at most size octets, a multiple of 8.
// An IPv6 packet gets a fragment header after all other extension headers. Every IPv4 fragment
// gets all options.
func Fragments(b []byte, size int, id uint32) [][]byte {
	if size <= 0 || size%8 != 0 {
		panic("packettest: fragment size is not a multiple of 8")
	}
	p := MustDecode(b)
	data := b[p.TransportOffset:]
	var out [][]byte
	for off := 0; off == 0 || off < len(data); off += size {
		piece, more := data[off:], 0
		if len(piece) > size {
			piece, more = piece[:size], 1
		}
		if p.Src.Is4() {
			f := append([]byte(nil), b[:p.TransportOffset]...)
			binary.BigEndian.PutUint16(f[2:], uint16(len(f)+len(piece)))
			binary.BigEndian.PutUint16(f[4:], uint16(id))
			binary.BigEndian.PutUint16(f[6:], uint16(more<<13|off/8))
			f[10], f[11] = 0, 0
			binary.BigEndian.PutUint16(f[10:], InternetChecksum(f))
			out = append(out, append(f, piece...))
			continue
		}
		f := append([]byte(nil), b[:p.TransportOffset]...)
		f[p.nextHeaderAt] = 44
		f = append(f, p.Proto, 0)
		f = binary.BigEndian.AppendUint16(f, uint16(off|more))
		f = binary.BigEndian.AppendUint32(f, id)
		f = append(f, piece...)
		binary.BigEndian.PutUint16(f[4:], uint16(len(f)-40))
		out = append(out, f)
	}
	return out
}

// Segments cuts a TCP or UDP superpacket as a network card would. TCP sequence numbers
// advance, FIN and PSH stay in the last segment and CWR in the first, the IPv4 identification
// counts up, and all checksums are complete.
func Segments(super []byte, size int) [][]byte {
	p := MustDecode(super)
	if p.Proto != 6 && p.Proto != 17 {
		panic(fmt.Sprintf("packettest: cannot segment protocol %d", p.Proto))
	}
	at := p.TransportOffset
	header := super[:len(super)-len(p.Data)]
	var out [][]byte
	for off := 0; off == 0 || off < len(p.Data); off += size {
		s := append([]byte(nil), header...)
		s = append(s, p.Data[off:min(off+size, len(p.Data))]...)
		if s[0]>>4 == 4 {
			binary.BigEndian.PutUint16(s[2:], uint16(len(s)))
			binary.BigEndian.PutUint16(s[4:], p.ID+uint16(len(out)))
			s[10], s[11] = 0, 0
			binary.BigEndian.PutUint16(s[10:], InternetChecksum(s[:at]))
		} else {
			binary.BigEndian.PutUint16(s[4:], uint16(len(s)-40))
		}
		t := s[at:]
		pseudo := pseudoHeader(p.Src, p.Dst, p.Proto, len(t))
		if p.Proto == 6 {
			binary.BigEndian.PutUint32(t[4:], p.Seq+uint32(off))
			if off > 0 {
				t[13] &^= CWR
			}
			if off+size < len(p.Data) {
				t[13] &^= FIN | PSH
			}
			t[16], t[17] = 0, 0
			binary.BigEndian.PutUint16(t[16:], InternetChecksum(pseudo, t))
		} else {
			binary.BigEndian.PutUint16(t[4:], uint16(len(t)))
			t[6], t[7] = 0, 0
			sum := InternetChecksum(pseudo, t)
			if sum == 0 {
				sum = 0xffff
			}
			binary.BigEndian.PutUint16(t[6:], sum)
		}
		out = append(out, s)
	}
	return out
}
