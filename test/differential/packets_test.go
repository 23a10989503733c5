package differential

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"slices"
)

// These functions build packets octet by octet. They compute checksums completely and word by
// word. They share no code with the packages under test.

const (
	protoICMP  = 1
	protoTCP   = 6
	protoUDP   = 17
	protoSCTP  = 132
	protoICMP6 = 58

	protoFragment, protoDestinationOptions = 44, 60 // IPv6 extension headers

	protoTest = 253 // RFC 3692: for experiments; no implementation knows its header

	echoReply, unreachable, redirect, echoRequest, timeExceeded, parameterProblem = 0, 3, 5, 8, 11, 12
	fragmentationNeeded                                                           = 4 // a code of the type unreachable

	fin, syn, rst, psh, ack = 1, 2, 4, 8, 16

	flagDF, flagMF = 0x4000, 0x2000
)

// header holds the fields of an IPv4 header that a test may choose. Zero values mean TTL 64
// and ID 0x1234.
type header struct {
	tos, ttl uint8
	id       uint16
	flags    uint16 // flags and fragment offset
	options  []byte
}

// ip returns a packet with the given transport segment, whose checksum must already be
// correct.
func ip(h header, src, dst netip.Addr, proto uint8, segment []byte) []byte {
	if h.ttl == 0 {
		h.ttl = 64
	}
	if src.Is6() {
		return ip6(h, src, dst, proto, segment)
	}
	if h.id == 0 {
		h.id = 0x1234
	}
	options := append(slices.Clone(h.options), make([]byte, (4-len(h.options)%4)%4)...)
	b := make([]byte, 20, 20+len(options)+len(segment))
	b = append(append(b, options...), segment...)
	b[0] = 0x40 | uint8(20+len(options))/4
	b[1] = h.tos
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[4:], h.id)
	binary.BigEndian.PutUint16(b[6:], h.flags)
	b[8], b[9] = h.ttl, proto
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	sealHeader(b)
	return b
}

// ip6 builds the IPv6 equivalent of ip: h.options become destination options, and the
// identification becomes the flow label.
func ip6(h header, src, dst netip.Addr, proto uint8, segment []byte) []byte {
	var options []byte
	next := proto
	if h.options != nil {
		options, next = []byte{proto, 0, 1, 4, 0, 0, 0, 0}, protoDestinationOptions
	}
	b := make([]byte, 40, 48+len(segment))
	b = append(append(b, options...), segment...)
	binary.BigEndian.PutUint32(b, 6<<28|uint32(h.tos)<<20|uint32(h.id))
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
	b[6], b[7] = next, h.ttl
	copy(b[8:], src.AsSlice())
	copy(b[24:], dst.AsSlice())
	return b
}

func udp(src, dst netip.Addr, sport, dport uint16, data []byte) []byte {
	b := make([]byte, 8, 8+len(data))
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(data)))
	b = append(b, data...)
	sealTransport(b, src, dst, protoUDP)
	return b
}

func tcp(src, dst netip.Addr, sport, dport uint16, seq, ackno uint32, flags uint8, options, data []byte) []byte {
	b := make([]byte, 20, 20+len(options)+len(data))
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint32(b[4:], seq)
	binary.BigEndian.PutUint32(b[8:], ackno)
	b[12], b[13] = uint8(20+len(options))/4<<4, flags
	binary.BigEndian.PutUint16(b[14:], 64000)
	b = append(append(b, options...), data...)
	sealTransport(b, src, dst, protoTCP)
	return b
}

// icmp returns an ICMP message. rest is the four octets after the checksum (identifier and
// sequence number, or unused and MTU).
func icmp(kind, code uint8, rest uint32, body []byte) []byte {
	b := make([]byte, 8, 8+len(body))
	b[0], b[1] = kind, code
	binary.BigEndian.PutUint32(b[4:], rest)
	b = append(b, body...)
	sealTransport(b, netip.Addr{}, netip.Addr{}, protoICMP)
	return b
}

// icmp6 returns an ICMPv6 message, whose checksum also covers the addresses.
func icmp6(src, dst netip.Addr, kind, code uint8, rest uint32, body []byte) []byte {
	b := icmp(kind, code, rest, body)
	sealTransport(b, src, dst, protoICMP6)
	return b
}

func sctp(sport, dport uint16, tag uint32, chunk []byte) []byte {
	b := make([]byte, 12, 12+len(chunk))
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint32(b[4:], tag)
	b = append(b, chunk...)
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// icmpAbout returns an ICMP error about packet b, sent by src to the sender of b. It quotes
// this many octets of b's payload; -1 means all.
func icmpAbout(b []byte, src netip.Addr, kind, code uint8, rest uint32, quote int) []byte {
	n := headerLen(b) + quote
	if quote < 0 || n > len(b) {
		n = len(b)
	}
	h := header{tos: 0xc0, id: 0x7777}
	if isV6(b) {
		return ip(h, src, source(b), protoICMP6, icmp6(src, source(b), kind, code, rest, b[:n]))
	}
	return ip(h, src, source(b), protoICMP, icmp(kind, code, rest, b[:n]))
}

// Functions that read packets.

func isV6(b []byte) bool      { return b[0]>>4 == 6 }
func headerLen(b []byte) int  { n, _ := walk(b); return n }
func proto(b []byte) uint8    { _, proto := walk(b); return proto }
func segment(b []byte) []byte { return b[headerLen(b):] }

func ttl(b []byte) uint8 {
	if isV6(b) {
		return b[7]
	}
	return b[8]
}

func source(b []byte) netip.Addr {
	if isV6(b) {
		return netip.AddrFrom16([16]byte(b[8:24]))
	}
	return netip.AddrFrom4([4]byte(b[12:16]))
}

func destination(b []byte) netip.Addr {
	if isV6(b) {
		return netip.AddrFrom16([16]byte(b[24:40]))
	}
	return netip.AddrFrom4([4]byte(b[16:20]))
}

// walk returns the offset of the transport header and its protocol.
func walk(b []byte) (n int, proto uint8) {
	if !isV6(b) {
		return int(b[0]&15) * 4, b[9]
	}
	n, proto = 40, b[6]
	for proto == protoFragment || proto == protoDestinationOptions {
		n, proto = n+8, b[n] // all extension headers built here have this size
	}
	return n, proto
}

// fragmentWord returns the IPv4 flags and fragment offset in units of 8 octets. For IPv6 it
// returns the equivalent of the fragment header, which must follow the fixed header.
func fragmentWord(b []byte) uint16 {
	if !isV6(b) {
		return binary.BigEndian.Uint16(b[6:])
	}
	if b[6] != protoFragment {
		return 0
	}
	word := binary.BigEndian.Uint16(b[42:])
	return word>>3 | word&1<<13
}

func isFragment(b []byte) bool { return fragmentWord(b)&(flagMF|0x1fff) != 0 }

// portsAt returns the offsets of the ports. For an ICMP query both are the offset of the
// identifier.
func portsAt(b []byte) (src, dst int) {
	h := headerLen(b)
	if p := proto(b); p == protoICMP || p == protoICMP6 {
		return h + 4, h + 4
	}
	return h, h + 2
}

func sourcePort(b []byte) uint16 {
	at, _ := portsAt(b)
	return binary.BigEndian.Uint16(b[at:])
}

// withPort returns b with another source or destination port and recomputed checksums.
func withPort(b []byte, sourceSide bool, port uint16) []byte {
	b = slices.Clone(b)
	at, dst := portsAt(b)
	if !sourceSide {
		at = dst
	}
	binary.BigEndian.PutUint16(b[at:], port)
	seal(b)
	return b
}

// Functions that compute checksums.

// seal computes the header checksum and, for a whole datagram, the transport checksum. A UDP
// checksum of 0 is not changed.
func seal(b []byte) {
	sealHeader(b)
	if s := segment(b); !isFragment(b) && (proto(b) != protoUDP || binary.BigEndian.Uint16(s[6:]) != 0) {
		sealTransport(s, source(b), destination(b), proto(b))
	}
}

func sealHeader(b []byte) {
	if isV6(b) {
		return
	}
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], internetSum(b[:headerLen(b)]))
}

var checksumAt = map[uint8]int{protoUDP: 6, protoTCP: 16, protoICMP: 2, protoICMP6: 2}

func sealTransport(s []byte, src, dst netip.Addr, proto uint8) {
	at, ok := checksumAt[proto]
	if !ok {
		return
	}
	s[at], s[at+1] = 0, 0
	sum := internetSum(append(pseudo(s, src, dst, proto), s...))
	if proto == protoUDP && sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(s[at:], sum)
}

func pseudo(s []byte, src, dst netip.Addr, proto uint8) []byte {
	if proto == protoICMP {
		return nil
	}
	p := append(src.AsSlice(), dst.AsSlice()...)
	if src.Is6() { // the fields have other offsets in IPv6, which does not affect the sum
		p = append(p, 0, 0, 0, 0)
	}
	return append(p, 0, proto, uint8(len(s)>>8), uint8(len(s)))
}

// internetSum computes the checksum as RFC 1071 describes it.
func internetSum(b []byte) uint16 {
	var sum uint32
	for len(b) > 1 {
		sum += uint32(b[0])<<8 | uint32(b[1])
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// partial returns b with a partial checksum, as a TUN with offloads delivers it: the field
// holds the sum of the pseudo-header, folded and not inverted. It returns nil if b cannot have
// a partial checksum.
func partial(b []byte) []byte {
	at := map[uint8]int{protoUDP: 6, protoTCP: 16}[b[9]]
	if at == 0 || isFragment(b) || b[9] == protoUDP && binary.BigEndian.Uint16(segment(b)[6:]) == 0 {
		return nil
	}
	b = slices.Clone(b)
	s := segment(b)
	binary.BigEndian.PutUint16(s[at:], ^internetSum(pseudo(s, source(b), destination(b), b[9])))
	return b
}

// countUp returns b with the TTL that it had before hops decrements.
func countUp(b []byte, hops uint8) []byte {
	b = slices.Clone(b)
	if isV6(b) {
		b[7] += hops
		return b
	}
	b[8] += hops
	sealHeader(b)
	return b
}

// Functions that cut and join datagrams.

// fragment cuts a datagram after the given numbers of payload octets (multiples of 8,
// ascending). It copies only options with the copy bit to later fragments.
func fragment(b []byte, cuts ...int) (fragments [][]byte) {
	payload, from := segment(b), 0
	for _, to := range append(cuts, len(payload)) {
		if isV6(b) {
			word := uint16(from)
			if to < len(payload) {
				word |= 1
			}
			f := append(slices.Clone(b[:40]), b[6], 0, byte(word>>8), byte(word))
			f = append(f, 0x55, 0x55, b[2], b[3]) // the flow label of the datagram becomes the identification
			f = append(f, payload[from:to]...)
			f[6] = protoFragment
			binary.BigEndian.PutUint16(f[4:], uint16(len(f)-40))
			fragments, from = append(fragments, f), to
			continue
		}
		f := append(slices.Clone(b[:headerLen(b)]), payload[from:to]...)
		binary.BigEndian.PutUint16(f[2:], uint16(len(f)))
		word := fragmentWord(b) | uint16(from/8)
		if to < len(payload) {
			word |= flagMF
		}
		binary.BigEndian.PutUint16(f[6:], word)
		sealHeader(f)
		fragments = append(fragments, f)
		from = to
	}
	return fragments
}

// reassemble joins the fragments of one datagram, in any order. A packet that is not a
// fragment is returned unchanged.
func reassemble(packets [][]byte) (datagram []byte, whole bool) {
	if len(packets) == 0 {
		return nil, false
	}
	if len(packets) == 1 && !isFragment(packets[0]) {
		return packets[0], true
	}
	parts := slices.SortedFunc(slices.Values(packets), func(a, b []byte) int {
		return int(fragmentWord(a)&0x1fff) - int(fragmentWord(b)&0x1fff)
	})
	var payload []byte
	for i, p := range parts {
		if int(fragmentWord(p)&0x1fff)*8 != len(payload) {
			return nil, false
		}
		payload = append(payload, segment(p)...)
		if last := fragmentWord(p)&flagMF == 0; last != (i == len(parts)-1) {
			return nil, false
		}
	}
	if isV6(parts[0]) {
		datagram = append(slices.Clone(parts[0][:40]), payload...)
		binary.BigEndian.PutUint16(datagram[4:], uint16(len(payload)))
		datagram[6] = proto(parts[0])
		return datagram, true
	}
	datagram = append(slices.Clone(parts[0][:headerLen(parts[0])]), payload...)
	binary.BigEndian.PutUint16(datagram[2:], uint16(len(datagram)))
	binary.BigEndian.PutUint16(datagram[6:], fragmentWord(parts[0])&flagDF)
	sealHeader(datagram)
	return datagram, true
}
