package parse

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// quoted holds the facts that both parsers report about a packet quoted in an ICMP error.
type quoted struct {
	Src, Dst         netip.Addr
	Proto            uint8
	Later            bool
	Ports            bool
	SrcPort, DstPort uint16
	Error            bool
	Query            bool
	ID               uint16
}

// Both parsers must decode the same fields from quoted packets, which are cut at random
// offsets.
func TestParsersAgreeOnQuotedPackets(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 5))
	read, ports, refused := 0, 0, 0
	for range 150_000 {
		inner := generate(rng)
		inner = inner[:rng.IntN(len(inner)+1)]
		if rng.IntN(4) == 0 {
			inner = mutate(rng, inner)
		}
		if len(inner) >= 20 && inner[0]>>4 == 4 && int(inner[0]&15)*4 <= len(inner) && inner[0]&15 >= 5 {
			inner[10], inner[11] = 0, 0
			binary.BigEndian.PutUint16(inner[10:], packettest.InternetChecksum(inner[:inner[0]&15*4]))
		}
		h, kind := packettest.IP{Src: b4, Dst: a4}, uint8(11)
		if six := len(inner) > 0 && inner[0]>>4 == 6; six != (rng.IntN(10) == 0) {
			h, kind = packettest.IP{Src: b6, Dst: a6}, 3
		}
		b := packettest.Build(h, packettest.ICMPError{Type: kind, Quote: inner})
		var v packet.View
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		var q packet.Quote
		err := v.Quote(&q)
		want, ok := readQuote(inner, h.Src.Is4())
		if ok != (err == nil) {
			t.Fatalf("we say %v, gopacket %t\n%s", err, ok, hex.Dump(inner))
		}
		if err != nil {
			refused++
			continue
		}
		got := quoted{
			Src: q.Src(), Dst: q.Dst(), Proto: q.Proto(), Later: q.LaterFragment(), Ports: q.HasPorts(), SrcPort: q.SrcPort(), DstPort: q.DstPort(),
			Error: q.IsICMPError(), Query: q.IsICMPQuery(), ID: q.ICMPID(),
		}
		if got != want {
			t.Fatalf("we say    %+v\ngopacket   %+v\n%s", got, want, hex.Dump(inner))
		}
		read++
		if got.Ports {
			ports++
		}
	}
	t.Logf("%d read, %d with ports, %d refused", read, ports, refused)
	if read < 20_000 || ports < 5000 || refused < 5000 {
		t.Error("not much of a test")
	}
}

// readQuote decodes a quoted packet with gopacket. The IP header must be whole. After the header,
// readQuote decodes the fields that are present.
func readQuote(b []byte, v4 bool) (q quoted, ok bool) {
	var f feedback
	var next layers.IPProtocol
	var body []byte
	if v4 {
		var ip layers.IPv4
		err := ip.DecodeFromBytes(b, &f)
		// Package packet refuses a quote with a total length of 0, which gopacket accepts. In a
		// quote, package packet does not parse options. gopacket refuses some options, before it
		// decodes the addresses, so padding replaces all options for a second attempt.
		if ip.Contents == nil || b[0]>>4 != 4 || b[2] == 0 && b[3] == 0 {
			return q, false
		}
		if err != nil {
			plain := append([]byte(nil), b...)
			for i := 20; i < len(ip.Contents); i++ {
				plain[i] = 1
			}
			if ip.DecodeFromBytes(plain, &f) != nil {
				return q, false
			}
		}
		q.Src, q.Dst = netip.AddrFrom4([4]byte(ip.SrcIP)), netip.AddrFrom4([4]byte(ip.DstIP))
		q.Later, next, body = ip.FragOffset != 0, ip.Protocol, ip.Payload
	} else {
		var ip layers.IPv6
		_ = ip.DecodeFromBytes(b, &f) // ignores errors about the part after the header
		if len(b) < 40 || ip.Version != 6 {
			return q, false
		}
		q.Src, q.Dst = netip.AddrFrom16([16]byte(ip.SrcIP)), netip.AddrFrom16([16]byte(ip.DstIP))
		body = b[40:]
		body = body[:min(len(body), int(ip.Length))]
		next, body, q.Later = chain(ip.NextHeader, body)
	}
	q.Proto = uint8(next)
	icmp := next == layers.IPProtocolICMPv4 && v4 || next == layers.IPProtocolICMPv6 && !v4
	switch {
	case q.Later:
	case (next == layers.IPProtocolTCP || next == layers.IPProtocolUDP) && len(body) >= 4:
		q.Ports = true
		q.SrcPort, q.DstPort = binary.BigEndian.Uint16(body), binary.BigEndian.Uint16(body[2:])
	case icmp && len(body) > 0:
		query := v4 && (body[0] == 0 || body[0] == 8 || body[0] >= 13 && body[0] <= 18) || !v4 && (body[0] == 128 || body[0] == 129)
		if query && len(body) >= 6 {
			q.Query, q.ID = true, binary.BigEndian.Uint16(body[4:])
		}
		q.Error = v4 && (body[0] >= 3 && body[0] <= 5 || body[0] == 11 || body[0] == 12) || !v4 && body[0] < 128
	}
	return q, true
}

// chain skips the extension headers that are completely in the quote. If the quote ends within one,
// next is that header, and there is no body.
func chain(next layers.IPProtocol, body []byte) (layers.IPProtocol, []byte, bool) {
	for n := 0; ; n++ {
		var f feedback
		switch next {
		case layers.IPProtocolIPv6HopByHop, layers.IPProtocolIPv6Destination, layers.IPProtocolIPv6Routing:
			var h layers.IPv6ExtensionSkipper
			if n == 8 || h.DecodeFromBytes(body, &f) != nil {
				return next, nil, false
			}
			next, body = h.NextHeader, h.Payload
		case layers.IPProtocolAH:
			var h layers.IPSecAH
			if n == 8 || h.DecodeFromBytes(body, &f) != nil {
				return next, nil, false
			}
			next, body = h.NextHeader, h.Payload
		case layers.IPProtocolIPv6Fragment:
			var h layers.IPv6Fragment
			if n == 8 || h.DecodeFromBytes(body, &f) != nil {
				return next, nil, false
			}
			if next, body = h.NextHeader, h.Payload; h.FragmentOffset != 0 {
				return next, nil, true
			}
		default:
			return next, body, false
		}
	}
}
