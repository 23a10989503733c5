package packet

import "net/netip"

// Quote reads and rewrites, in place, the packet that an ICMP error quotes. Each setter updates
// three checksums, as Linux does in net/netfilter/nf_nat_proto.c: that of the quoted IPv4 header,
// that of the quoted transport header, and that of the error itself. The transport checksum is
// updated if the quote contains all of it and the protocol is TCP, UDP (unless the checksum is 0),
// UDP-Lite, DCCP or ICMP. If the quote contains only the first octet of the checksum, that octet is
// left unchanged, because its new value depends on the missing octet. Linux differs in one case: it
// leaves the checksum unchanged if the quote ends within the TCP header. Octets after the quote,
// such as RFC 4884 extensions, never change.
//
// A Quote borrows the bytes of its View and is valid until the next Parse. It must not be used
// concurrently.
type Quote struct {
	b         []byte // ICMP message of the error, from its type octet
	transport int    // offset in b of the quoted transport header, or of the end of the quote if it has none
	end       int    // offset in b of the end of the quote
	proto     uint8
	is4       bool
	later     bool // quoted packet is a fragment other than the first
	readable  bool // the upper-layer protocol was found, and the quote contains the start of its header
}

// quoted is the offset of the quoted packet in an ICMP error.
const quoted = icmpLen

// Quote parses the packet that this ICMP error quotes. It is lenient, because the quote may be
// truncated anywhere after the IP header. It verifies the checksum of the ICMP error and that
// of the quoted IPv4 header (RFC 5508, REQ-3), but not the quoted transport checksum. The
// error is ErrQuote if v is not an ICMP error, is a fragment of one, or quotes no whole IP
// header of its own family. Otherwise it is ErrICMPChecksum or ErrHeaderChecksum. After an
// error q holds nothing useful.
func (v *View) Quote(q *Quote) error {
	if !v.IsICMPError() || v.more {
		return ErrQuote
	}
	if !v.validTransport() {
		return ErrICMPChecksum
	}
	*q = Quote{b: v.b[v.transport:], is4: v.is4}
	q.end = q.extent()
	if q.is4 {
		return q.parse4()
	}
	return q.parse6()
}

// minExtended is the minimum length of the original datagram field if extensions follow (RFC 4884,
// section 3). A smaller length is ignored, because senders older than RFC 4884 may not have set the
// length octet to zero.
const minExtended = 128

// extent returns the offset of the end of the original datagram field. If extensions follow, RFC
// 4884 defines a length for this field, in 32-bit words for IPv4 and 64-bit words for IPv6. Only
// some ICMP types have the length field.
func (q *Quote) extent() int {
	size := 0
	switch kind := q.b[0]; {
	case q.is4 && (kind == 3 || kind == 11 || kind == 12):
		size = int(q.b[5]) * 4
	case !q.is4 && (kind == 1 || kind == 3):
		size = int(q.b[4]) * 8
	}
	if size < minExtended || quoted+size > len(q.b) {
		return len(q.b)
	}
	return quoted + size
}

func (q *Quote) parse4() error {
	p := q.b[quoted:q.end]
	if len(p) < ipv4Len || p[0]>>4 != 4 {
		return ErrQuote
	}
	header, total := int(p[0]&15)*4, int(be.Uint16(p[2:4]))
	if header < ipv4Len || header > len(p) || total < header {
		return ErrQuote
	}
	if sumHeader4(p[:header]) != 0xffff {
		return ErrHeaderChecksum
	}
	q.end = min(q.end, quoted+total) // exclude padding
	q.transport = quoted + header
	q.proto = p[9]
	q.later = be.Uint16(p[6:8])&0x1fff != 0
	q.readable = !q.later
	return nil
}

func (q *Quote) parse6() error {
	p := q.b[quoted:q.end]
	if len(p) < ipv6Len || p[0]>>4 != 6 {
		return ErrQuote
	}
	q.end = min(q.end, quoted+ipv6Len+int(be.Uint16(p[4:6])))
	q.transport = quoted + ipv6Len
	q.proto = p[6]
	for n := 0; isExtension(q.proto); n++ {
		e := q.b[q.transport:q.end]
		size, ok := wholeExtension(q.proto, e)
		if n == maxExtensions || !ok {
			return nil // the quote ends within the extension headers: only the addresses are usable
		}
		q.transport += size
		if q.proto == fragmentHeader && be.Uint16(e[2:4])&0xfff8 != 0 {
			q.later = true
			q.proto = e[0]
			return nil
		}
		q.proto = e[0]
	}
	q.readable = true
	return nil
}

// has reports whether the quote contains the first n octets of the transport header.
func (q *Quote) has(n int) bool { return q.readable && q.end-q.transport >= n }

// Is4 reports whether the quoted packet is IPv4. Its family is always that of the error.
func (q *Quote) Is4() bool { return q.is4 }

// Src returns the source address of the quoted packet.
func (q *Quote) Src() netip.Addr {
	if q.is4 {
		return netip.AddrFrom4([4]byte(q.b[quoted+12:]))
	}
	return netip.AddrFrom16([16]byte(q.b[quoted+8:]))
}

// Dst returns the destination address of the quoted packet.
func (q *Quote) Dst() netip.Addr {
	if q.is4 {
		return netip.AddrFrom4([4]byte(q.b[quoted+16:]))
	}
	return netip.AddrFrom16([16]byte(q.b[quoted+24:]))
}

// Proto returns the upper-layer protocol of the quoted packet. If the quote ends within the
// IPv6 extension headers, it returns the kind of the incomplete header.
func (q *Quote) Proto() uint8 { return q.proto }

// LaterFragment reports whether the quoted packet is a fragment other than the first.
func (q *Quote) LaterFragment() bool { return q.later }

// HasPorts reports whether the quoted packet is TCP or UDP and the quote contains both ports.
func (q *Quote) HasPorts() bool { return (q.proto == TCP || q.proto == UDP) && q.has(4) }

// SrcPort returns the source port of the quoted packet, or 0 unless HasPorts.
func (q *Quote) SrcPort() uint16 {
	if !q.HasPorts() {
		return 0
	}
	return be.Uint16(q.b[q.transport:])
}

// DstPort returns the destination port of the quoted packet, or 0 unless HasPorts.
func (q *Quote) DstPort() uint16 {
	if !q.HasPorts() {
		return 0
	}
	return be.Uint16(q.b[q.transport+2:])
}

// IsICMPQuery reports whether the quoted packet is an ICMP query and the quote is long enough to
// contain its identifier.
func (q *Quote) IsICMPQuery() bool {
	return q.isICMP() && q.has(6) && queryType(q.is4, q.b[q.transport])
}

// IsICMPError reports whether the quoted packet is itself an ICMP error. No error may be sent
// about an ICMP error (RFC 1122, section 3.2.2).
func (q *Quote) IsICMPError() bool {
	return q.isICMP() && q.has(1) && errorType(q.is4, q.b[q.transport])
}

func (q *Quote) isICMP() bool { return q.is4 && q.proto == ICMP || !q.is4 && q.proto == ICMPv6 }

// ICMPType returns the type of the quoted ICMP query, or 0 unless IsICMPQuery.
func (q *Quote) ICMPType() uint8 {
	if !q.IsICMPQuery() {
		return 0
	}
	return q.b[q.transport]
}

// ICMPID returns the identifier of the quoted ICMP query, or 0 unless IsICMPQuery.
func (q *Quote) ICMPID() uint16 {
	if !q.IsICMPQuery() {
		return 0
	}
	return be.Uint16(q.b[q.transport+4:])
}

// SetSrc rewrites the source address of the quoted packet. The address must be of the packet's
// family, as for View.SetSrc.
func (q *Quote) SetSrc(a netip.Addr) { q.setAddr(quoted+12, quoted+8, a) }

// SetDst rewrites the destination address of the quoted packet. The address must be of the
// packet's family.
func (q *Quote) SetDst(a netip.Addr) { q.setAddr(quoted+16, quoted+24, a) }

func (q *Quote) setAddr(at4, at6 int, a netip.Addr) {
	var delta uint64
	if q.is4 {
		a4 := a.As4()
		field := q.b[at4 : at4+4]
		new := be.Uint32(a4[:])
		delta = delta32(be.Uint32(field), new)
		be.PutUint32(field, new)
		check := quoted + 10
		q.put(check, updated(be.Uint16(q.b[check:]), delta))
	} else {
		if !a.Is6() {
			panic("packet: IPv4 address for an IPv6 packet")
		}
		a16 := a.As16()
		delta = replaced16(q.b[at6:at6+16], &a16)
	}
	q.errorChanged(delta)
	if !(q.is4 && q.proto == ICMP) { // ICMP for IPv4 has no pseudo-header
		q.transportChanged(delta)
	}
}

// SetSrcPort rewrites the source port of the quoted packet. It does nothing unless HasPorts.
func (q *Quote) SetSrcPort(port uint16) {
	if q.HasPorts() {
		q.setWord(q.transport, port)
	}
}

// SetDstPort rewrites the destination port of the quoted packet. It does nothing unless HasPorts.
func (q *Quote) SetDstPort(port uint16) {
	if q.HasPorts() {
		q.setWord(q.transport+2, port)
	}
}

// SetICMPID rewrites the identifier of the quoted ICMP query. It does nothing unless IsICMPQuery.
func (q *Quote) SetICMPID(id uint16) {
	if q.IsICMPQuery() {
		q.setWord(q.transport+4, id)
	}
}

func (q *Quote) setWord(at int, new uint16) {
	delta := delta16(be.Uint16(q.b[at:]), new)
	q.put(at, new)
	q.transportChanged(delta)
}

// transportChanged updates the quoted transport checksum if the quote contains it.
func (q *Quote) transportChanged(delta uint64) {
	at := q.transport
	switch {
	case q.proto == TCP && q.has(tcpSumOffset+2):
		at += tcpSumOffset
	case q.proto == UDP && q.has(udpLen):
		at += udpSumOffset
		if be.Uint16(q.b[at:]) == 0 {
			return
		}
	case (q.proto == UDPLite || q.proto == DCCP) && q.has(udpLen): // checksum at the same offset as in UDP
		at += udpSumOffset
	case q.isICMP() && q.has(icmpSumOffset+2):
		at += icmpSumOffset
	default:
		return
	}
	sum := updated(be.Uint16(q.b[at:]), delta)
	if sum == 0 && (q.proto == UDP || q.proto == UDPLite) {
		sum = 0xffff
	}
	q.put(at, sum)
}

// put writes one word of the quoted packet and updates the checksum of the error. The word
// must be at an even offset of the error.
func (q *Quote) put(at int, new uint16) {
	field := q.b[at : at+2]
	delta := delta16(be.Uint16(field), new)
	be.PutUint16(field, new)
	q.errorChanged(delta)
}

func (q *Quote) errorChanged(delta uint64) {
	field := q.b[icmpSumOffset : icmpSumOffset+2]
	be.PutUint16(field, updated(be.Uint16(field), delta))
}
