package packet

import "net/netip"

// View is one parsed IP packet over borrowed bytes. It is small and meant to be reused: keep
// one per goroutine and Parse into it. If the packet does not have a transport field (see
// HasPorts, IsICMPQuery and others), the field's getter returns zero and its setter does
// nothing. A View must not be used concurrently.
type View struct {
	b         []byte // the packet; in a Run only its first packet
	length    uint32 // of the whole packet or run, IPv6 header included: at most 65575
	fragID    uint32
	fragOff   uint16 // offset of the fragment in octets
	transport uint16 // offset of the transport header or, in a later fragment, of the data
	payload   uint16 // offset of the data after the transport header
	sum       uint16 // offset of the transport checksum, 0 if there is none
	proto     uint8
	csum      ChecksumState
	is4       bool
	more      bool // more fragments follow
	ports     bool // TCP or UDP, and the header is in this packet
	icmp      bool // ICMP or ICMPv6, and the header is in this packet
	pseudo    bool // the transport checksum covers the addresses: TCP, UDP, ICMPv6
}

// Parse validates all lengths of the complete IP packet at the start of b: IPv4 with options,
// IPv6 with extension headers, and the transport header of TCP, UDP, ICMP and ICMPv6. Other
// protocols are opaque. b may be longer than the packet; the view ends with the packet. csum
// comes from the virtio header: ChecksumComplete or ChecksumPartial. If the packet has no
// checksum, the view has ChecksumAbsent instead.
//
// v keeps b until the next Parse. After an error (always of type Error) v holds nothing useful.
// Parse verifies no checksum: the kernel does that in both directions, and an incremental update
// keeps a wrong checksum wrong. Parse refuses a source route. With a source route, the IP header
// does not contain the final destination. But NAT must translate that destination, and the
// pseudo-header contains it. A source route would also bypass the rules of the gateway (RFC 5095,
// RFC 7126).
func (v *View) Parse(b []byte, csum ChecksumState) error {
	if len(b) == 0 {
		return ErrTruncated
	}
	switch b[0] >> 4 {
	case 4:
		if err := v.parse4(b, csum); err != 0 {
			return err
		}
		return nil
	case 6:
		if err := v.parse6(b, csum); err != 0 {
			return err
		}
		return nil
	}
	return ErrVersion
}

func (v *View) parse4(b []byte, csum ChecksumState) Error {
	if len(b) < ipv4Len {
		return ErrTruncated
	}
	header := int(b[0]&15) * 4
	total := int(be.Uint16(b[2:4]))
	switch {
	case header < ipv4Len:
		return ErrHeaderLength
	case total < header:
		return ErrTotalLength
	case total > len(b):
		return ErrTruncated
	}
	if header > ipv4Len {
		if err := options4(b[ipv4Len:header]); err != 0 {
			return err
		}
	}
	v.b = b[:total:total]
	v.length = uint32(total)
	v.is4 = true
	v.proto = b[9]
	v.transport = uint16(header)
	v.fragID = uint32(be.Uint16(b[4:6]))
	v.fragOff, v.more = 0, false
	if word := be.Uint16(b[6:8]); word&0x3fff != 0 {
		if err := v.fragment(int(word&0x1fff)*8, word&0x2000 != 0, header); err != 0 {
			return err
		}
	}
	return v.parseTransport(csum)
}

// options4 checks IPv4 options (RFC 791, section 3.1). An option is a type, a length and data,
// except that types 0 (end of list) and 1 (no operation) are single octets.
func options4(o []byte) Error {
	for len(o) > 0 && o[0] != 0 {
		if o[0] == 1 {
			o = o[1:]
			continue
		}
		if len(o) < 2 || o[1] < 2 || int(o[1]) > len(o) {
			return ErrOption
		}
		if o[0] == 131 || o[0] == 137 { // loose and strict source route
			return ErrSourceRoute
		}
		o = o[o[1]:]
	}
	return 0
}

// fragment records the offset of a fragment and checks its place in the datagram. headers is the
// number of header octets before the fragmented part that count in the length field of the
// reassembled datagram. The length of every fragment but the last must be a multiple of 8 (RFC 791,
// RFC 8200).
func (v *View) fragment(off int, more bool, headers int) Error {
	size := len(v.b) - int(v.transport)
	v.fragOff, v.more = uint16(off), more
	switch {
	case size == 0 && off == 0:
		return ErrTinyFragment
	case size == 0, more && size%8 != 0, headers+off+size > maxPacket:
		return ErrFragmentRange
	}
	return 0
}

// parseTransport checks the transport header and finds its checksum field.
func (v *View) parseTransport(csum ChecksumState) Error {
	v.payload = v.transport
	v.sum, v.ports, v.icmp, v.pseudo = 0, false, false, false
	if v.fragOff != 0 {
		return v.laterFragment(csum)
	}
	t := v.b[v.transport:]
	switch v.proto {
	case TCP:
		if len(t) < tcpLen {
			return v.shortTransport()
		}
		header := int(t[12]>>4) * 4
		if header < tcpLen {
			return ErrTransportHeader
		}
		if header > len(t) {
			return v.shortTransport()
		}
		v.payload += uint16(header)
		v.sum = v.transport + tcpSumOffset
		v.ports, v.pseudo = true, true
	case UDP:
		if len(t) < udpLen {
			return v.shortTransport()
		}
		// The UDP length may be less than the length of the IP payload. The rest is then the
		// surplus area of RFC 9868, which the checksum does not cover. In a first fragment the UDP
		// length is that of the whole datagram.
		if size := int(be.Uint16(t[4:6])); size < udpLen || size > len(t) && !v.more {
			return ErrTransportHeader
		}
		v.payload += udpLen
		v.ports = true
		if csum == ChecksumComplete && be.Uint16(t[udpSumOffset:]) == 0 {
			csum = ChecksumAbsent
		} else {
			v.sum = v.transport + udpSumOffset
			v.pseudo = true
		}
	default:
		return v.parseOther(t, csum)
	}
	if csum == ChecksumPartial && v.more {
		return ErrPartialChecksum
	}
	v.csum = csum
	return 0
}

func (v *View) laterFragment(csum ChecksumState) Error {
	if csum == ChecksumPartial {
		return ErrPartialChecksum
	}
	if v.proto == TCP && v.fragOff < tcpLen { // would overwrite ports or flags that were already checked
		return ErrTinyFragment
	}
	v.csum = ChecksumAbsent
	return 0
}

func (v *View) parseOther(t []byte, csum ChecksumState) Error {
	if csum == ChecksumPartial {
		return ErrPartialChecksum
	}
	// ICMP of the other family has no meaning and stays opaque.
	if v.is4 && v.proto == ICMP || !v.is4 && v.proto == ICMPv6 {
		if len(t) < icmpLen {
			return v.shortTransport()
		}
		v.payload += icmpLen
		v.sum = v.transport + icmpSumOffset
		v.icmp, v.pseudo = true, !v.is4
		v.csum = csum
		return 0
	}
	// UDP-Lite (RFC 3828) and DCCP (RFC 4340) have their checksum at the same offset as UDP. It
	// covers the pseudo-header and the part of the packet that the header specifies. Otherwise
	// the two protocols are opaque.
	if v.proto == UDPLite || v.proto == DCCP {
		if len(t) < udpLen {
			return v.shortTransport()
		}
		if size := v.coverage(t); size < udpLen || size > len(t) && !v.more {
			return ErrTransportHeader
		}
		v.sum = v.transport + udpSumOffset
		v.pseudo = true
		v.csum = csum
		return 0
	}
	v.csum = ChecksumAbsent
	return 0
}

// coverage returns the number of octets of t that the checksum of UDP-Lite or DCCP covers, or
// 0 if the header contradicts itself.
func (v *View) coverage(t []byte) int {
	if v.proto == UDPLite {
		if size := int(be.Uint16(t[4:6])); size != 0 {
			return size
		}
		return len(t)
	}
	header, more := int(t[4]), int(t[5]&15)
	switch {
	case header < 3: // shorter than the shortest generic header
		return 0
	case more == 0:
		return max(len(t), header*4)
	}
	return (header + more - 1) * 4
}

func (v *View) shortTransport() Error {
	if v.more {
		return ErrTinyFragment
	}
	return ErrTransportHeader
}

// Bytes returns the packet: the first Len() octets of the slice that was parsed. For the View of a
// Run it returns only the first packet.
func (v *View) Bytes() []byte { return v.b }

// Len returns the length of the packet or run in octets, IP header included.
func (v *View) Len() int { return int(v.length) }

// Is4 reports whether the packet is IPv4. Otherwise it is IPv6.
func (v *View) Is4() bool { return v.is4 }

// Src returns the source address.
func (v *View) Src() netip.Addr {
	if v.is4 {
		return netip.AddrFrom4([4]byte(v.b[12:16]))
	}
	return netip.AddrFrom16([16]byte(v.b[8:24]))
}

// Dst returns the destination address.
func (v *View) Dst() netip.Addr {
	if v.is4 {
		return netip.AddrFrom4([4]byte(v.b[16:20]))
	}
	return netip.AddrFrom16([16]byte(v.b[24:40]))
}

// Src4 returns the IPv4 source address in host order. Call it only for an IPv4 packet.
func (v *View) Src4() uint32 { return be.Uint32(v.b[12:16]) }

// Dst4 returns the IPv4 destination address in host order. Call it only for an IPv4 packet.
func (v *View) Dst4() uint32 { return be.Uint32(v.b[16:20]) }

// Src6 returns the IPv6 source address as two words in host order. Call it only for an IPv6 packet.
func (v *View) Src6() (hi, lo uint64) { return be.Uint64(v.b[8:16]), be.Uint64(v.b[16:24]) }

// Dst6 returns the IPv6 destination address as two words in host order. Call it only for an IPv6
// packet.
func (v *View) Dst6() (hi, lo uint64) { return be.Uint64(v.b[24:32]), be.Uint64(v.b[32:40]) }

// TTL returns the time to live or hop limit.
func (v *View) TTL() uint8 {
	if v.is4 {
		return v.b[8]
	}
	return v.b[7]
}

// Proto returns the upper-layer protocol, which follows any IPv6 extension headers. For a
// later fragment it returns the value in the IP header or fragment header.
func (v *View) Proto() uint8 { return v.proto }

// Fragment returns the position of a fragment in its datagram: off is its offset in octets, more
// reports whether others follow, and id is the identification (16 bits in IPv4). The last result is
// false for a whole packet. An IPv6 atomic fragment (RFC 6946) counts as a whole packet, because
// its id is of no use to a NAT.
func (v *View) Fragment() (off int, more bool, id uint32, ok bool) {
	return int(v.fragOff), v.more, v.fragID, v.more || v.fragOff != 0
}

// IsFragment reports whether the packet is only a part of a datagram; see Fragment.
func (v *View) IsFragment() bool { return v.more || v.fragOff != 0 }

// LaterFragment reports whether the packet is a fragment other than the first. Such a fragment
// has no transport header.
func (v *View) LaterFragment() bool { return v.fragOff != 0 }

// FragmentLen returns how many octets of its datagram a fragment carries. In the datagram they
// begin at the offset that Fragment returns. In an IPv6 fragment they begin after the fragment
// header, and include further extension headers. It returns 0 for a whole packet.
func (v *View) FragmentLen() int {
	at := int(v.transport)
	switch {
	case !v.more && v.fragOff == 0:
		return 0
	case !v.is4 && v.fragOff == 0:
		kind := v.b[6]
		for at = ipv6Len; kind != fragmentHeader; {
			kind, at = v.b[at], at+extensionLen(kind, v.b[at:])
		}
		at += extensionLen(fragmentHeader, nil)
	}
	return len(v.b) - at
}

// TransportOffset returns the offset of the transport header or, in a later fragment, of the
// data.
func (v *View) TransportOffset() int { return int(v.transport) }

// PayloadOffset returns the offset of the data after the TCP header (with options), UDP header
// or ICMP header (8 octets). For other protocols and later fragments it returns
// TransportOffset.
func (v *View) PayloadOffset() int { return int(v.payload) }

// HasPorts reports whether the packet is TCP or UDP and contains the transport header.
func (v *View) HasPorts() bool { return v.ports }

// SrcPort returns the source port, or 0 unless HasPorts.
func (v *View) SrcPort() uint16 {
	if !v.ports {
		return 0
	}
	return be.Uint16(v.b[v.transport:])
}

// DstPort returns the destination port, or 0 unless HasPorts.
func (v *View) DstPort() uint16 {
	if !v.ports {
		return 0
	}
	return be.Uint16(v.b[v.transport+2:])
}

// TCPFlags returns the flags (TCPFin and others), or 0 if the packet contains no TCP header.
func (v *View) TCPFlags() uint8 {
	if !v.ports || v.proto != TCP {
		return 0
	}
	return v.b[v.transport+13]
}

// ICMPType returns the type of an ICMP or ICMPv6 message, or 0 if the packet contains no ICMP
// header.
func (v *View) ICMPType() uint8 {
	if !v.icmp {
		return 0
	}
	return v.b[v.transport]
}

// ICMPID returns the identifier of an ICMP query, or 0 unless IsICMPQuery.
func (v *View) ICMPID() uint16 {
	if !v.IsICMPQuery() {
		return 0
	}
	return be.Uint16(v.b[v.transport+4:])
}

// IsICMPQuery reports whether the packet is an ICMP request or reply with an identifier: echo
// and, in IPv4, timestamp, information and address mask.
func (v *View) IsICMPQuery() bool { return v.icmp && queryType(v.is4, v.b[v.transport]) }

// IsICMPError reports whether the packet is an ICMP error, which quotes a packet. Errors are
// types 3, 4, 5, 11 and 12 in IPv4, and all types below 128 in IPv6 (RFC 4443, section 2.1).
func (v *View) IsICMPError() bool { return v.icmp && errorType(v.is4, v.b[v.transport]) }

func queryType(is4 bool, kind uint8) bool {
	if !is4 {
		return kind == 128 || kind == 129
	}
	switch kind {
	case 0, 8, 13, 14, 15, 16, 17, 18:
		return true
	}
	return false
}

func errorType(is4 bool, kind uint8) bool {
	if !is4 {
		return kind < 128
	}
	switch kind {
	case 3, 4, 5, 11, 12:
		return true
	}
	return false
}

// Checksum returns the state of the transport checksum field.
func (v *View) Checksum() ChecksumState { return v.csum }
