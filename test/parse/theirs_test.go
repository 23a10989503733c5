package parse

import (
	"net/netip"
	"slices"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// facts holds the values that both parsers report for a packet that they accept.
type facts struct {
	Length, TTL        int
	Src, Dst           netip.Addr
	Offset             int
	More, Fragment     bool
	ID                 uint32 // identification of a fragment
	FragmentLen        int
	Proto              uint8
	Transport, Payload int
	SrcPort, DstPort   uint16
	TCPFlags           uint8
	Type               uint8 // ICMP type
	Query              uint16
}

// theirs holds the values that gopacket reports for a packet. Where gopacket is stricter or
// more lenient than packet.View, it holds the name of the difference from the table in
// parse_test.go.
type theirs struct {
	facts
	err     error    // gopacket refuses the packet
	strict  []string // gopacket accepts the packet, package packet must refuse it
	lenient []string // gopacket refuses the packet, package packet accepts it
}

func (p *theirs) refuse(why string) {
	if !slices.Contains(p.strict, why) {
		p.strict = append(p.strict, why)
	}
}

func (p *theirs) allow(why string) {
	if !slices.Contains(p.lenient, why) {
		p.lenient = append(p.lenient, why)
	}
}

// feedback records that gopacket found fewer octets than a length field states. gopacket
// continues nevertheless.
type feedback struct{ truncated bool }

func (f *feedback) SetTruncated() { f.truncated = true }

func read(b []byte) *theirs {
	p := &theirs{}
	switch {
	case len(b) > 0 && b[0]>>4 == 4:
		p.read4(b)
	case len(b) > 0 && b[0]>>4 == 6:
		p.read6(b)
	default:
		p.err = gopacket.UnsupportedLayerType(0)
	}
	return p
}

func (p *theirs) read4(b []byte) {
	var f feedback
	var ip layers.IPv4
	if p.err = ip.DecodeFromBytes(b, &f); p.err != nil {
		return
	}
	if b[2] == 0 && b[3] == 0 {
		p.refuse(lengthZero)
	}
	if f.truncated {
		p.refuse(truncated)
	}
	for _, o := range ip.Options {
		if o.OptionType == 131 || o.OptionType == 137 {
			p.refuse(sourceRoute)
		}
	}
	p.Length, p.TTL = int(ip.Length), int(ip.TTL)
	p.Src, p.Dst = netip.AddrFrom4([4]byte(ip.SrcIP)), netip.AddrFrom4([4]byte(ip.DstIP))
	p.Offset, p.More, p.ID = int(ip.FragOffset)*8, ip.Flags&layers.IPv4MoreFragments != 0, uint32(ip.Id)
	p.Transport = len(ip.Contents)
	p.fragment(len(ip.Payload), len(ip.Contents)+p.Offset+len(ip.Payload))
	p.transport(ip.Protocol, ip.Payload, true)
}

func (p *theirs) read6(b []byte) {
	var f feedback
	var ip layers.IPv6
	p.err = ip.DecodeFromBytes(b, &f)
	if len(b) < 40 {
		return
	}
	body := b[40:]
	if f.truncated && len(body) < int(ip.Length) {
		p.err = nil
		p.refuse(truncated)
		return
	}
	body = body[:ip.Length]
	switch hopByHop := ip.NextHeader == layers.IPProtocolIPv6HopByHop; {
	case hopByHop && ip.Length == 0:
		if p.err == nil {
			p.refuse(jumbogram)
		}
		return
	case p.err != nil && hopByHop:
		p.err = nil
		p.allow(options) // if the header is not whole, walk detects that
	case p.err != nil && ip.Length == 0:
		p.err = nil
		p.allow(noPayload)
	case p.err != nil:
		return
	}
	p.Length, p.TTL = 40+int(ip.Length), int(ip.HopLimit)
	p.Src, p.Dst = netip.AddrFrom16([16]byte(ip.SrcIP)), netip.AddrFrom16([16]byte(ip.DstIP))
	p.walk(ip.NextHeader, body)
}

// walk decodes the extension headers with gopacket.
func (p *theirs) walk(next layers.IPProtocol, body []byte) {
	all := len(body)
	fragmented := false
	for n := 0; ; n++ {
		var f feedback
		var rest []byte
		before := next
		switch next {
		case layers.IPProtocolIPv6HopByHop, layers.IPProtocolIPv6Destination:
			var h layers.IPv6ExtensionSkipper
			if p.err = h.DecodeFromBytes(body, &f); p.err != nil {
				return
			}
			var d layers.IPv6Destination
			if d.DecodeFromBytes(body, &f) != nil {
				p.allow(options)
			}
			if next == layers.IPProtocolIPv6HopByHop && n > 0 {
				p.refuse(headerOrder)
			}
			rest, next = h.Payload, h.NextHeader
		case layers.IPProtocolIPv6Routing:
			r, ok := gopacket.NewPacket(body, layers.LayerTypeIPv6Routing, gopacket.DecodeOptions{Lazy: true, NoCopy: true}).
				Layer(layers.LayerTypeIPv6Routing).(*layers.IPv6Routing)
			if !ok {
				p.err = gopacket.UnsupportedLayerType(layers.LayerTypeIPv6Routing)
				return
			}
			if r.SegmentsLeft > 0 {
				p.refuse(sourceRoute)
			}
			rest, next = r.LayerPayload(), r.NextHeader
		case layers.IPProtocolAH:
			var h layers.IPSecAH
			if p.err = h.DecodeFromBytes(body, &f); p.err != nil {
				return
			}
			rest, next = h.Payload, h.NextHeader
		case layers.IPProtocolIPv6Fragment:
			var h layers.IPv6Fragment
			if p.err = h.DecodeFromBytes(body, &f); p.err != nil {
				return
			}
			if fragmented {
				p.refuse(twoFragments)
			}
			fragmented = true
			p.Offset, p.More, p.ID = int(h.FragmentOffset)*8, h.MoreFragments, h.Identification
			rest, next = h.Payload, h.NextHeader
			p.fragment(len(rest), all-len(rest)-8+p.Offset+len(rest))
		default:
			p.Transport = 40 + all - len(body)
			p.transport(next, body, false)
			return
		}
		if n >= 8 {
			p.refuse(headerCount)
		}
		body = rest
		if before == layers.IPProtocolIPv6Fragment && p.Offset > 0 {
			p.Transport = 40 + all - len(body)
			p.transport(next, body, false)
			return
		}
	}
}

// fragment checks the position of a fragment of size octets. end is the minimum length field
// of the reassembled datagram.
func (p *theirs) fragment(size, end int) {
	if p.Offset == 0 && !p.More {
		return
	}
	p.Fragment, p.FragmentLen = true, size
	switch {
	case size == 0 && p.Offset == 0:
		p.refuse(emptyFirst)
	case size == 0, p.More && size%8 != 0, end > 65535:
		p.refuse(fragmentRange)
	}
}

// transport decodes the upper-layer header t, unless it is in another fragment.
func (p *theirs) transport(proto layers.IPProtocol, t []byte, v4 bool) {
	p.Proto, p.Payload = uint8(proto), p.Transport
	if p.Offset > 0 {
		if proto == layers.IPProtocolTCP && p.Offset < 20 {
			p.refuse(overTCP)
		}
		return
	}
	var f feedback
	switch {
	case proto == layers.IPProtocolTCP:
		var tcp layers.TCP
		if p.err = tcp.DecodeFromBytes(t, &f); p.err != nil {
			return
		}
		p.SrcPort, p.DstPort = uint16(tcp.SrcPort), uint16(tcp.DstPort)
		for i, set := range []bool{tcp.FIN, tcp.SYN, tcp.RST, tcp.PSH, tcp.ACK, tcp.URG, tcp.ECE, tcp.CWR} {
			if set {
				p.TCPFlags |= 1 << i
			}
		}
		p.Payload += len(tcp.Contents)
	case proto == layers.IPProtocolUDP:
		var udp layers.UDP
		if p.err = udp.DecodeFromBytes(t, &f); p.err != nil {
			return
		}
		if udp.Length == 0 || f.truncated && !p.More {
			p.refuse(udpLength)
		}
		p.SrcPort, p.DstPort = uint16(udp.SrcPort), uint16(udp.DstPort)
		p.Payload += len(udp.Contents)
	case proto == layers.IPProtocolICMPv4 && v4:
		var icmp layers.ICMPv4
		if p.err = icmp.DecodeFromBytes(t, &f); p.err != nil {
			return
		}
		p.Type = icmp.TypeCode.Type()
		if slices.Contains([]uint8{0, 8, 13, 14, 15, 16, 17, 18}, p.Type) {
			p.Query = icmp.Id
		}
		p.Payload += 8
	case proto == layers.IPProtocolICMPv6 && !v4:
		var icmp layers.ICMPv6
		if p.err = icmp.DecodeFromBytes(t, &f); p.err != nil {
			return
		}
		if len(t) < 8 {
			p.refuse(shorter(p.More, shortICMPv6))
			return
		}
		p.Type = icmp.TypeCode.Type()
		var echo layers.ICMPv6Echo
		if (p.Type == 128 || p.Type == 129) && echo.DecodeFromBytes(icmp.Payload, &f) == nil {
			p.Query = echo.Identifier
		}
		p.Payload += 8
	case proto == layers.IPProtocolUDPLite, proto == 33:
		switch {
		case len(t) < 8:
			p.refuse(shorter(p.More, coverage))
		case !covered(proto, t, p.More):
			p.refuse(coverage)
		}
	}
}

// shorter returns the name of the difference for a transport header that is cut off.
func shorter(more bool, whole string) string {
	if more {
		return tinyFirst
	}
	return whole
}

// covered reports whether UDP-Lite (RFC 3828, section 3.1) or DCCP (RFC 4340, section 5.1)
// have a valid checksum coverage. gopacket does not check the coverage or does not know the
// protocol.
func covered(proto layers.IPProtocol, t []byte, more bool) bool {
	octets := int(t[4])<<8 | int(t[5])
	if proto == 33 {
		header, words := int(t[4])*4, int(t[5]&15)
		if header < 12 {
			return false
		}
		octets = header + (words-1)*4
		if words == 0 {
			octets = max(len(t), header)
		}
	} else if octets == 0 {
		octets = len(t)
	}
	return octets >= 8 && (octets <= len(t) || more)
}
