package packet

import (
	"math/bits"
	"net/netip"
)

// SetSrc rewrites the source address and updates all checksums. If the address is not of the
// packet's family, it panics before it writes anything.
func (v *View) SetSrc(a netip.Addr) {
	if v.is4 {
		a4 := a.As4()
		v.SetSrc4(be.Uint32(a4[:]))
		return
	}
	v.set16(8, a)
}

// SetDst rewrites the destination address; see SetSrc.
func (v *View) SetDst(a netip.Addr) {
	if v.is4 {
		a4 := a.As4()
		v.SetDst4(be.Uint32(a4[:]))
		return
	}
	v.set16(24, a)
}

// SetSrc4 rewrites the IPv4 source address, in host order. Call it only for an IPv4 packet.
func (v *View) SetSrc4(a uint32) {
	b := v.b[:ipv4Len:ipv4Len]
	delta := delta32(be.Uint32(b[12:16]), a)
	be.PutUint32(b[12:16], a)
	be.PutUint16(b[10:12], updated(be.Uint16(b[10:12]), delta))
	if v.pseudo {
		v.addressChanged(delta)
	}
}

// SetDst4 rewrites the IPv4 destination address, in host order. Call it only for an IPv4 packet.
func (v *View) SetDst4(a uint32) {
	b := v.b[:ipv4Len:ipv4Len]
	delta := delta32(be.Uint32(b[16:20]), a)
	be.PutUint32(b[16:20], a)
	be.PutUint16(b[10:12], updated(be.Uint16(b[10:12]), delta))
	if v.pseudo {
		v.addressChanged(delta)
	}
}

// SetSrc6 rewrites the IPv6 source address, as two words in host order. Call it only for an IPv6
// packet.
func (v *View) SetSrc6(hi, lo uint64) { v.set6(v.b[8:24:24], hi, lo) }

// SetDst6 rewrites the IPv6 destination address, as two words in host order. Call it only for an
// IPv6 packet.
func (v *View) SetDst6(hi, lo uint64) { v.set6(v.b[24:40:40], hi, lo) }

func (v *View) set6(field []byte, hi, lo uint64) {
	delta := delta128(be.Uint64(field[0:8]), be.Uint64(field[8:16]), hi, lo)
	be.PutUint64(field[0:8], hi)
	be.PutUint64(field[8:16], lo)
	if v.pseudo {
		v.addressChanged(delta)
	}
}

func (v *View) set16(at int, a netip.Addr) {
	if !a.Is6() {
		panic("packet: IPv4 address for an IPv6 packet")
	}
	new := a.As16()
	v.set6(v.b[at:at+16], be.Uint64(new[:8]), be.Uint64(new[8:]))
}

// replaced16 writes an IPv6 address over field and returns the delta for the checksums that cover
// it.
func replaced16(field []byte, a *[16]byte) uint64 {
	hi, lo := be.Uint64(a[:8]), be.Uint64(a[8:])
	delta := delta128(be.Uint64(field[:8]), be.Uint64(field[8:]), hi, lo)
	copy(field, a[:])
	return delta
}

// addressChanged updates a checksum that covers the pseudo-header. In a first fragment the
// checksum also covers octets of later fragments, but the update needs none of these.
func (v *View) addressChanged(delta uint64) {
	field := v.b[v.sum : v.sum+2]
	switch sum := be.Uint16(field); v.csum {
	case ChecksumPartial: // plain pseudo-header sum; the kernel adds the rest
		be.PutUint16(field, fold(uint64(sum)+delta))
	case ChecksumComplete:
		sum = updated(sum, delta)
		if sum == 0 && (v.proto == UDP || v.proto == UDPLite) {
			sum = 0xffff // a zero in the packet would mean "no checksum" (RFC 768, RFC 3828)
		}
		be.PutUint16(field, sum)
		if sum == 0 && v.icmp && sum16(v.b[v.transport:]) == 0 {
			// All octets of the message are zero, so it is an ICMPv4 echo reply. Its checksum must
			// be 0xffff, but RFC 1624, equation 3 yields 0.
			be.PutUint16(field, 0xffff)
		}
	}
}

// contentChanged updates a complete checksum after a change of the transport header. A partial
// checksum covers only the pseudo-header and does not change.
func (v *View) contentChanged(delta uint64) {
	if v.csum == ChecksumComplete {
		v.addressChanged(delta)
	}
}

// SetSrcPort rewrites the source port. It does nothing unless HasPorts.
func (v *View) SetSrcPort(port uint16) {
	if v.ports {
		v.setWord(int(v.transport), port)
	}
}

// SetDstPort rewrites the destination port. It does nothing unless HasPorts.
func (v *View) SetDstPort(port uint16) {
	if v.ports {
		v.setWord(int(v.transport)+2, port)
	}
}

// SetICMPID rewrites the identifier of an ICMP query. It does nothing unless IsICMPQuery.
func (v *View) SetICMPID(id uint16) {
	if v.IsICMPQuery() {
		v.setWord(int(v.transport)+4, id)
	}
}

func (v *View) setWord(at int, new uint16) {
	field := v.b[at : at+2]
	delta := delta16(be.Uint16(field), new)
	be.PutUint16(field, new)
	v.contentChanged(delta)
}

// ClampMSS lowers the MSS options of a TCP SYN to mss and reports whether it changed anything. It
// never raises or adds an option: a SYN without the option means an MSS of 536 (RFC 9293, section
// 3.7.1). If there are several MSS options, it lowers all of them, because receivers use the last.
// A malformed option ends the search. An mss of 0 means no limit.
func (v *View) ClampMSS(mss uint16) bool {
	if mss == 0 || v.TCPFlags()&TCPSyn == 0 {
		return false
	}
	changed := false
	for at, end := int(v.transport)+tcpLen, int(v.payload); at < end; {
		kind := v.b[at]
		if kind == 0 { // end of options
			break
		}
		if kind == 1 { // no operation
			at++
			continue
		}
		if at+2 > end {
			break
		}
		size := int(v.b[at+1])
		if size < 2 || at+size > end {
			break
		}
		if kind == 2 && size == 4 {
			if old := be.Uint16(v.b[at+2:]); old > mss {
				be.PutUint16(v.b[at+2:], mss)
				new := mss
				if (at-int(v.transport))%2 != 0 { // at an odd offset; see delta16
					old, new = bits.ReverseBytes16(old), bits.ReverseBytes16(new)
				}
				v.contentChanged(delta16(old, new))
				changed = true
			}
		}
		at += size
	}
	return changed
}

// CompleteChecksum completes a partial checksum, for a packet that is sent without segmentation. It
// does nothing to a packet with another checksum state. It also does nothing to the View of a Run
// with several packets, because the View does not contain all of their data.
func (v *View) CompleteChecksum() {
	if v.csum != ChecksumPartial || int(v.length) != len(v.b) {
		return
	}
	// The field holds the pseudo-header sum, so the sum over all octets includes it.
	sum := Checksum(v.covered(), 0)
	if sum == 0 && v.proto == UDP {
		sum = 0xffff
	}
	be.PutUint16(v.b[v.sum:], sum)
	v.csum = ChecksumComplete
}

// covered returns the octets of the packet that the transport checksum covers.
func (v *View) covered() []byte {
	t := v.b[v.transport:]
	switch v.proto { // Parse has checked the length fields
	case UDP:
		return t[:be.Uint16(t[4:6])]
	case UDPLite, DCCP:
		return t[:v.coverage(t)]
	}
	return t
}

// pseudoSum returns the sum of the pseudo-header for a transport packet of the given length
// (RFC 9293, section 3.1; RFC 8200, section 8.1).
func (v *View) pseudoSum(length int) uint64 {
	sum := uint64(v.proto) + uint64(length)
	if v.is4 {
		return sum + pseudoAddrs(v.b[12:20])
	}
	return sum + pseudoAddrs(v.b[8:40])
}

// ValidChecksums verifies the IPv4 header checksum and the transport checksum. A partial transport
// checksum is compared with the sum of the pseudo-header. For a fragment it verifies only the
// header.
func (v *View) ValidChecksums() bool {
	if v.is4 && sumHeader4(v.b[:int(v.b[0]&15)*4]) != 0xffff {
		return false
	}
	if v.sum == 0 || v.csum == ChecksumAbsent || v.more {
		return true
	}
	return v.validTransport()
}

func (v *View) validTransport() bool {
	if v.csum == ChecksumPartial {
		size := int(v.length) - int(v.transport)
		if v.proto == UDP {
			size = int(be.Uint16(v.b[v.transport+4:]))
		}
		// 0 and 0xffff are the same number in ones' complement.
		return be.Uint16(v.b[v.sum:])%0xffff == fold(v.pseudoSum(size))%0xffff
	}
	if int(v.length) != len(v.b) {
		return false
	}
	t := v.covered()
	var sum uint64
	switch {
	case v.proto == UDPLite || v.proto == DCCP: // the pseudo-header has the whole length (RFC 3828, section 3.1; RFC 4340, section 9.1)
		sum = v.pseudoSum(len(v.b) - int(v.transport))
	case v.pseudo:
		sum = v.pseudoSum(len(t))
	}
	return Checksum(t, sum) == 0
}
