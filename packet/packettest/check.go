package packettest

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"testing"
)

// InternetChecksum computes the checksum of RFC 1071 in the simplest way, over the
// concatenated parts. Every part but the last must have an even length.
func InternetChecksum(parts ...[]byte) uint16 {
	sum := 0
	for _, part := range parts {
		for i, octet := range part {
			if i%2 == 0 {
				sum += int(octet) * 256
			} else {
				sum += int(octet)
			}
			if sum > 0xffff {
				sum -= 0xffff
			}
		}
	}
	return uint16(0xffff - sum)
}

func pseudoHeader(src, dst netip.Addr, proto uint8, length int) []byte {
	b := append(src.AsSlice(), dst.AsSlice()...)
	if src.Is4() {
		b = append(b, 0, proto)
		return binary.BigEndian.AppendUint16(b, uint16(length))
	}
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	return append(b, 0, 0, 0, proto)
}

// Packet is a decoded packet.
type Packet struct {
	Src, Dst   netip.Addr
	TTL, TOS   uint8
	ID         uint16 // IPv4 identification
	DF         bool
	FlowLabel  uint32
	Options    []byte // IPv4 options
	Extensions []Extension

	FragmentOffset int
	More           bool
	FragmentID     uint32

	Proto           uint8
	TransportOffset int
	Transport       []byte // transport header and data, or the data of a later fragment

	// Fields of TCP and UDP.
	SrcPort, DstPort uint16
	Seq, Ack         uint32
	Flags            uint8
	Window, Urgent   uint16
	TCPOptions       []byte
	// Fields of ICMP.
	Type, Code uint8
	ICMPID     uint16
	// Data is the part after the TCP, UDP or 8-octet ICMP header.
	Data []byte

	header       []byte // the IPv4 header, or nil
	nextHeaderAt int    // IPv6: offset of the field that names the upper-layer protocol
}

// MustDecode decodes a whole packet. It panics if Decode fails.
func MustDecode(b []byte) Packet {
	p, err := Decode(b)
	if err != nil {
		panic(fmt.Sprintf("packettest: %v\n%s", err, hex.Dump(b)))
	}
	return p
}

// Decode decodes one IP packet. The length of b must be that in the IP header.
func Decode(b []byte) (p Packet, err error) {
	defer func() {
		if r := recover(); r != nil { // an index beyond the end of the packet
			err = fmt.Errorf("cut off: %v", r)
		}
	}()
	switch b[0] >> 4 {
	case 4:
		if total := int(b[2])*256 + int(b[3]); total != len(b) {
			return p, fmt.Errorf("IPv4 total length %d of %d octets", total, len(b))
		}
	case 6:
		if payload := int(b[4])*256 + int(b[5]); payload != len(b)-40 {
			return p, fmt.Errorf("IPv6 payload length %d of %d octets", payload, len(b)-40)
		}
	default:
		return p, fmt.Errorf("IP version %d", b[0]>>4)
	}
	p.decodeIP(b)
	if p.FragmentOffset == 0 {
		p.decodeTransport()
	}
	return p, nil
}

// DecodeQuote decodes a packet that an ICMP error quotes. The quote may be truncated or
// followed by padding. Transport fields that the quote does not contain are zero.
func DecodeQuote(b []byte) (p Packet, err error) {
	defer func() {
		if r := recover(); r != nil && (b[0]>>4 == 4 || len(b) < 40) { // the IP header or the extension headers are incomplete
			err = fmt.Errorf("quote cut off: %v", r)
		}
	}()
	total := int(b[2])*256 + int(b[3])
	if b[0]>>4 == 6 {
		total = int(b[4])*256 + int(b[5]) + 40
	}
	end := min(total, len(b))
	p.decodeIP(b[:end:end])
	if p.FragmentOffset == 0 {
		func() {
			defer func() { _ = recover() }() // fields beyond the end of the quote stay zero
			p.decodeTransport()
		}()
	}
	return p, nil
}

func (p *Packet) decodeIP(b []byte) {
	if b[0]>>4 == 4 {
		length := int(b[0]&15) * 4
		p.header = b[:length]
		p.TOS, p.TTL, p.Proto = b[1], b[8], b[9]
		p.ID = uint16(b[4])*256 + uint16(b[5])
		p.FragmentID = uint32(p.ID)
		p.DF = b[6]&0x40 != 0
		p.More = b[6]&0x20 != 0
		p.FragmentOffset = (int(b[6]&0x1f)*256 + int(b[7])) * 8
		p.Src, p.Dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		p.Options = b[20:length]
		p.TransportOffset = length
	} else {
		p.TOS = b[0]<<4 | b[1]>>4
		p.FlowLabel = uint32(b[1]&15)<<16 | uint32(b[2])<<8 | uint32(b[3])
		p.TTL = b[7]
		p.Src, p.Dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		next, at := b[6], 40
		p.nextHeaderAt = 6
		for p.FragmentOffset == 0 && (next == 0 || next == 43 || next == 44 || next == 51 || next == 60) {
			length := (int(b[at+1]) + 1) * 8
			switch next {
			case 44:
				length = 8
				word := int(b[at+2])*256 + int(b[at+3])
				p.FragmentOffset, p.More = word&^7, word&1 != 0
				p.FragmentID = binary.BigEndian.Uint32(b[at+4 : at+8])
			case 51:
				length = (int(b[at+1]) + 2) * 4
			}
			p.Extensions = append(p.Extensions, Extension{Kind: next, Data: b[at+2 : at+length]})
			p.nextHeaderAt = at
			next = b[at]
			at += length
		}
		p.Proto = next
		p.TransportOffset = at
	}
	p.Transport = b[p.TransportOffset:]
	p.Data = p.Transport
}

func (p *Packet) decodeTransport() {
	t := p.Transport
	switch {
	case p.Proto == 6:
		p.SrcPort, p.DstPort = uint16(t[0])*256+uint16(t[1]), uint16(t[2])*256+uint16(t[3])
		p.Seq = binary.BigEndian.Uint32(t[4:8])
		p.Ack = binary.BigEndian.Uint32(t[8:12])
		p.Flags = t[13]
		p.Window, p.Urgent = uint16(t[14])*256+uint16(t[15]), uint16(t[18])*256+uint16(t[19])
		length := int(t[12]>>4) * 4
		p.TCPOptions = t[20:length]
		p.Data = t[length:]
	case p.Proto == 17:
		p.SrcPort, p.DstPort = uint16(t[0])*256+uint16(t[1]), uint16(t[2])*256+uint16(t[3])
		p.Data = t[8:]
		if length := int(t[4])*256 + int(t[5]); !p.More {
			p.Transport = t[:length]
			p.Data = t[8:length]
		}
	case p.Proto == 1 && p.Src.Is4(), p.Proto == 58 && p.Src.Is6():
		p.Type, p.Code = t[0], t[1]
		p.ICMPID = uint16(t[4])*256 + uint16(t[5])
		p.Data = t[8:]
	}
}

// A Checker checks one property of a packet. It returns an error if the packet does not have
// the property.
type Checker func(p Packet) error

// Check applies the checkers and reports each failure together with the packet.
func Check(t testing.TB, b []byte, checks ...Checker) {
	t.Helper()
	p, err := Decode(b)
	if err == nil {
		err = all(p, checks)
	}
	if err != nil {
		t.Errorf("%v\n%s", err, hex.Dump(b))
	}
}

func all(p Packet, checks []Checker) error {
	var failed []error
	for _, check := range checks {
		failed = append(failed, check(p))
	}
	return errors.Join(failed...)
}

// Src checks the source address.
func Src(a netip.Addr) Checker {
	return func(p Packet) error { return same("source", p.Src, a) }
}

// Dst checks the destination address.
func Dst(a netip.Addr) Checker {
	return func(p Packet) error { return same("destination", p.Dst, a) }
}

// Ports checks both ports.
func Ports(src, dst uint16) Checker {
	return func(p Packet) error {
		return errors.Join(same("source port", p.SrcPort, src), same("destination port", p.DstPort, dst))
	}
}

// Proto checks the upper-layer protocol.
func Proto(n uint8) Checker {
	return func(p Packet) error { return same("protocol", p.Proto, n) }
}

// TTL checks the time to live or hop limit.
func TTL(n uint8) Checker {
	return func(p Packet) error { return same("TTL", p.TTL, n) }
}

// Flags checks that the TCP flags are exactly n.
func Flags(n uint8) Checker {
	return func(p Packet) error { return same("TCP flags", p.Flags, n) }
}

// ICMPID checks the identifier of an ICMP query.
func ICMPID(n uint16) Checker {
	return func(p Packet) error { return same("ICMP identifier", p.ICMPID, n) }
}

// ICMPType checks the type and code.
func ICMPType(kind, code uint8) Checker {
	return func(p Packet) error {
		return errors.Join(same("ICMP type", p.Type, kind), same("ICMP code", p.Code, code))
	}
}

// Data checks the data after the transport header.
func Data(want []byte) Checker {
	return func(p Packet) error {
		if !bytes.Equal(p.Data, want) {
			return fmt.Errorf("data\n%swant\n%s", hex.Dump(p.Data), hex.Dump(want))
		}
		return nil
	}
}

func same[T comparable](what string, have, want T) error {
	if have != want {
		return fmt.Errorf("%s is %v, want %v", what, have, want)
	}
	return nil
}

// ValidChecksums checks that the IPv4 header checksum and the complete transport checksum are
// correct. UDP may have no checksum. For a fragment it checks only the header.
func ValidChecksums() Checker {
	return func(p Packet) error { return p.validChecksums(false) }
}

// PartialChecksum checks that the IPv4 header checksum is correct and that the transport
// checksum field holds the sum of the pseudo-header.
func PartialChecksum() Checker {
	return func(p Packet) error { return p.validChecksums(true) }
}

// HeaderChecksum checks the IPv4 header checksum. It is the only checksum that a truncated
// quote still contains.
func HeaderChecksum() Checker {
	return func(p Packet) error {
		if p.header != nil {
			if sum := InternetChecksum(p.header); sum != 0 {
				return fmt.Errorf("IPv4 header checksum off by %#04x", sum)
			}
		}
		return nil
	}
}

func (p Packet) validChecksums(partial bool) error {
	if err := HeaderChecksum()(p); err != nil {
		return err
	}
	if p.More || p.FragmentOffset > 0 {
		return nil
	}
	pseudo := pseudoHeader(p.Src, p.Dst, p.Proto, len(p.Transport))
	var field int
	switch {
	case p.Proto == 6:
		field = 16
	case p.Proto == 17:
		field = 6
		if !partial && p.Transport[6] == 0 && p.Transport[7] == 0 {
			return nil
		}
	case p.Proto == 136: // UDP-Lite: octets 4 and 5 hold the coverage, 0 for everything
		field = 6
		if n := uint16(p.Transport[4])*256 + uint16(p.Transport[5]); n > 0 {
			p.Transport = p.Transport[:n]
		}
	case p.Proto == 33: // DCCP: octets 4 and 5 hold header length and coverage, in words
		field = 6
		if n := p.Transport[5] % 16; n > 0 {
			p.Transport = p.Transport[:4*int(p.Transport[4])+4*int(n)-4]
		}
	case p.Proto == 1 && p.Src.Is4():
		field, pseudo = 2, nil
	case p.Proto == 58 && p.Src.Is6():
		field = 2
	default:
		return nil
	}
	have := uint16(p.Transport[field])*256 + uint16(p.Transport[field+1])
	if partial {
		want := ^InternetChecksum(pseudo)
		if have%0xffff != want%0xffff { // 0 and 0xffff are the same number in ones' complement
			return fmt.Errorf("partial checksum %#04x, want %#04x", have, want)
		}
		return nil
	}
	if sum := InternetChecksum(pseudo, p.Transport); sum != 0 {
		return fmt.Errorf("transport checksum %#04x is off by %#04x", have, sum)
	}
	return nil
}

// Quote applies checkers to the packet that an ICMP error quotes. Fields that the quote does
// not contain are zero. ValidChecksums works only for a packet that is quoted whole.
func Quote(checks ...Checker) Checker {
	return func(p Packet) error {
		q, err := DecodeQuote(p.Data)
		if err == nil {
			err = all(q, checks)
		}
		if err != nil {
			return fmt.Errorf("quoted packet: %w", err)
		}
		return nil
	}
}
