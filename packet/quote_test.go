package packet_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestQuoteTranslatesAGoldenFragmentationNeededError(t *testing.T) {
	b := unhex(t, `
		45 00 00 38   # outer: version 4, length 56
		00 01 00 00
		40 01 66 bc   # TTL 64, ICMP
		0a 02 00 01   # from the router 10.2.0.1
		0a 01 00 05   # to 10.1.0.5
		03 04 5a f2   # destination unreachable, fragmentation needed, checksum
		00 00 05 78   # MTU 1400
		45 00 05 dc   # quoted: length 1500
		12 34 40 00   # DF
		3f 06 0f d8   # TTL 63, TCP, header checksum
		0a 01 00 05   # 10.1.0.5
		0a 02 00 09   # 10.2.0.9
		9c 40 00 50   # ports 40000, 80
		00 00 00 01   # sequence number; the quote ends here
	`)
	packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.HeaderChecksum()))
	v := parse(t, b, packet.ChecksumComplete)
	var q packet.Quote
	if err := v.Quote(&q); err != nil {
		t.Fatal(err)
	}
	if !q.Is4() || q.Src() != addr("10.1.0.5") || q.Dst() != addr("10.2.0.9") || q.Proto() != packet.TCP || !q.HasPorts() ||
		q.SrcPort() != 40000 || q.DstPort() != 80 || q.IsICMPQuery() || q.IsICMPError() || q.LaterFragment() {
		t.Errorf("%+v", q)
	}
	q.SetSrc(addr("10.70.0.5"))
	q.SetSrcPort(1024)
	v.SetDst(addr("10.70.0.5"))
	packettest.Check(t, b, packettest.ValidChecksums(), packettest.Dst(addr("10.70.0.5")),
		packettest.Quote(packettest.HeaderChecksum(), packettest.Src(addr("10.70.0.5")), packettest.Proto(6)))
	if want := unhex(t, "0400 0050 00000001"); !bytes.Equal(b[48:], want) {
		t.Errorf("quoted TCP header % x, want % x", b[48:], want)
	}
}

// quoteCase returns an ICMP error that quotes at most cut octets of a packet.
func quoteCase(h packettest.IP, body packettest.Body, cut int, extension []byte) []byte {
	inner := packettest.Build(h, body)
	if cut < len(inner) {
		inner = inner[:cut]
	}
	e := packettest.ICMPError{Type: 3, Code: 1, Quote: inner, Extension: extension}
	outer := packettest.IP{Src: addr("10.2.0.1"), Dst: addr("10.1.0.5")}
	if h.Src.Is6() {
		e.Type, e.Code = 1, 0
		outer.Src, outer.Dst = addr("fd00:2::1"), addr("fd00:1::5")
	}
	return packettest.Build(outer, e)
}

// The translated error must equal the error about the translated packet, as in the kernel's
// nf_nat. The quoted transport checksum must be updated only if the quote contains its field,
// and for TCP only if it contains all 20 octets of the header.
func TestTranslatedQuoteEqualsAnErrorAboutTheTranslatedPacket(t *testing.T) {
	rng := newRand(8)
	for range 20_000 {
		v6 := rng.IntN(2) == 0
		h, body := randIP(rng, v6), randBody(rng)
		whole := packettest.Build(h, body)
		p := packettest.MustDecode(whole)
		header := p.TransportOffset
		cut := []int{header, header + 4, header + 6, header + 8, header + 12, header + 16 + rng.IntN(4), header + 20, len(whole), header + rng.IntN(40)}[rng.IntN(9)]
		var extension []byte
		if rng.IntN(3) == 0 {
			extension = append([]byte{0x20, 0, 0, 0}, random(rng, 8)...)
			cut = len(whole) // only a whole packet may be followed by padding (RFC 4884, section 4)
		}
		got := quoteCase(h, body, cut, extension)
		v := parse(t, got, packet.ChecksumComplete)
		var q packet.Quote
		if err := v.Quote(&q); err != nil {
			t.Fatalf("%v\n%s", err, hex.Dump(got))
		}

		have := min(cut, len(whole)) - header // quoted octets from the transport header on
		to, toBody := h, body
		to.Src, to.Dst = randAddr(rng, v6), randAddr(rng, v6)
		q.SetSrc(to.Src)
		q.SetDst(to.Dst)
		port, id := word(rng), word(rng)
		q.SetSrcPort(port)
		q.SetDstPort(^port)
		q.SetICMPID(id)
		field, follows := 0, false
		switch b := body.(type) {
		case packettest.TCP:
			b.SrcPort, b.DstPort = port, ^port
			toBody, field, follows = b, 16, have >= 18
		case packettest.UDP:
			b.SrcPort, b.DstPort = port, ^port
			toBody, field, follows = b, 6, have >= 8
		case packettest.Echo:
			if have >= 6 {
				b.ID = id
			}
			toBody, field, follows = b, 2, have >= 4
		}
		want := quoteCase(to, toBody, cut, extension)
		if have < 4 && q.HasPorts() {
			t.Fatal("ports beyond the quote")
		}
		outer := 20
		if v6 {
			outer = 40
		}
		if field > 0 && have > 0 && !follows { // the quoted part of the old checksum must not change
			at := outer + 8 + header
			from, till := at+min(field, have), at+min(field+2, have)
			copy(want[from:till], whole[header+min(field, have):])
		}
		if q.HasPorts() != (have >= 4 && (p.Proto == 6 || p.Proto == 17)) || q.Proto() != p.Proto {
			t.Fatalf("HasPorts %t of %d octets of protocol %d", q.HasPorts(), have, p.Proto)
		}
		if !q.HasPorts() { // fewer than 4 octets: the ports must not change
			copy(want[outer+8+header:outer+8+header+have], whole[header:])
			if p.Proto == 1 || p.Proto == 58 {
				copy(want[outer+8+header:], got[outer+8+header:outer+8+header+have])
			}
		}
		want[outer+2], want[outer+3] = 0, 0
		resum(want, outer)
		if !bytes.Equal(got, want) {
			t.Fatalf("%d octets of transport\ngot\n%swant\n%s", have, hex.Dump(got), hex.Dump(want))
		}
		packettest.Check(t, got, packettest.ValidChecksums(), packettest.Quote(packettest.HeaderChecksum(), packettest.Src(to.Src), packettest.Dst(to.Dst)))
		if have >= len(whole)-header {
			packettest.Check(t, got, packettest.Quote(packettest.ValidChecksums()))
		}
		if extension != nil && !bytes.HasSuffix(got, extension) {
			t.Fatal("RFC 4884 extension touched")
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// resum recomputes the ICMP checksum of the error.
func resum(b []byte, at int) {
	p := packettest.MustDecode(b)
	var pseudo []byte
	if p.Src.Is6() {
		pseudo = append(p.Src.AsSlice(), p.Dst.AsSlice()...)
		pseudo = binary.BigEndian.AppendUint32(pseudo, uint32(len(p.Transport)))
		pseudo = append(pseudo, 0, 0, 0, 58)
	}
	binary.BigEndian.PutUint16(b[at+2:], packettest.InternetChecksum(pseudo, p.Transport))
}

func TestQuoteTranslationCanBeUndone(t *testing.T) {
	rng := newRand(9)
	for range 5000 {
		v6 := rng.IntN(2) == 0
		b := quoteCase(randIP(rng, v6), randBody(rng), 20+rng.IntN(150), nil)
		before := slices.Clone(b)
		var q packet.Quote
		v := parse(t, b, packet.ChecksumComplete)
		if v.Quote(&q) != nil {
			continue // the quote ends within the IP header
		}
		src, dst, ports, id := q.Src(), q.Dst(), [2]uint16{q.SrcPort(), q.DstPort()}, q.ICMPID()
		set := func(s, d netip.Addr, p [2]uint16, i uint16) {
			q.SetSrc(s)
			q.SetSrcPort(p[0])
			q.SetDst(d)
			q.SetDstPort(p[1])
			q.SetICMPID(i)
		}
		set(randAddr(rng, v6), randAddr(rng, v6), [2]uint16{word(rng), word(rng)}, word(rng))
		packettest.Check(t, b, packettest.ValidChecksums())
		set(src, dst, ports, id)
		if !bytes.Equal(b, before) {
			t.Fatalf("not undone\n%swant\n%s", hex.Dump(b), hex.Dump(before))
		}
	}
}

func TestQuoteHasPortsOnlyForAFirstFragment(t *testing.T) {
	for _, h := range []packettest.IP{ip4(), ip6()} {
		fragments := packettest.Fragments(packettest.Build(h, packettest.UDP{SrcPort: 7, DstPort: 8, Data: make([]byte, 64)}), 32, 5)
		for i, f := range fragments {
			e := packettest.ICMPError{Type: 11, Code: 1, Quote: f}
			if h.Src.Is6() {
				e.Type = 3
			}
			b := packettest.Build(h, e)
			v := parse(t, b, packet.ChecksumComplete)
			var q packet.Quote
			if err := v.Quote(&q); err != nil {
				t.Fatal(err)
			}
			if q.LaterFragment() != (i > 0) || q.HasPorts() != (i == 0) || q.Proto() != packet.UDP {
				t.Errorf("fragment %d: later %t ports %t", i, q.LaterFragment(), q.HasPorts())
			}
			to := addr("10.77.0.1")
			if h.Src.Is6() {
				to = addr("fd77::1")
			}
			q.SetSrcPort(9)
			q.SetSrc(to)
			packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.HeaderChecksum(), packettest.Src(to)))
		}
	}
}

func TestQuoteReportsTheQuotedICMPType(t *testing.T) {
	for _, h := range []packettest.IP{ip4(), ip6()} {
		kind := uint8(3)
		if h.Src.Is6() {
			kind = 1
		}
		wrap := func(inner []byte) packet.Quote {
			var q packet.Quote
			if err := parse(t, packettest.Build(h, packettest.ICMPError{Type: kind, Quote: inner}), packet.ChecksumComplete).Quote(&q); err != nil {
				t.Fatal(err)
			}
			return q
		}
		echo := wrap(packettest.Build(h, packettest.Echo{ID: 77}))
		if !echo.IsICMPQuery() || echo.IsICMPError() || echo.ICMPID() != 77 || echo.HasPorts() {
			t.Errorf("echo: %+v", echo)
		}
		fault := wrap(packettest.Build(h, packettest.ICMPError{Type: kind, Quote: packettest.Build(h, packettest.UDP{})}))
		if fault.IsICMPQuery() || !fault.IsICMPError() || fault.ICMPID() != 0 {
			t.Errorf("error about an error: %+v", fault)
		}
	}
}

func TestQuoteRefusesMalformedErrors(t *testing.T) {
	inner := packettest.Build(ip4(), packettest.UDP{SrcPort: 1, DstPort: 2})
	inner6 := packettest.Build(ip6(), packettest.UDP{SrcPort: 1, DstPort: 2})
	broken := slices.Clone(inner)
	broken[8]--
	short := slices.Clone(inner)
	short[3] = 19
	wrongSum := packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: inner})
	wrongSum[22] ^= 1
	wrongSum6 := packettest.Build(ip6(), packettest.ICMPError{Type: 1, Quote: inner6})
	wrongSum6[8] ^= 1 // the checksum covers the pseudo-header
	for _, c := range []struct {
		name string
		b    []byte
		want packet.Error
	}{
		{"no ICMP", inner, packet.ErrQuote},
		{"echo", packettest.Build(ip4(), packettest.Echo{}), packet.ErrQuote},
		{"first fragment of an error", packettest.Fragments(packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: inner}), 24, 1)[0], packet.ErrQuote},
		{"wrong checksum", wrongSum, packet.ErrICMPChecksum},
		{"wrong ICMPv6 checksum", wrongSum6, packet.ErrICMPChecksum},
		{"quoted header with wrong checksum", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: broken}), packet.ErrHeaderChecksum},
		{"quoted header cut", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: inner[:19]}), packet.ErrQuote},
		{"quoted IPv6 header cut", packettest.Build(ip6(), packettest.ICMPError{Type: 1, Quote: inner6[:39]}), packet.ErrQuote},
		{"nothing quoted", packettest.Build(ip4(), packettest.ICMPError{Type: 11}), packet.ErrQuote},
		{"IPv6 quoted in IPv4", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: inner6}), packet.ErrQuote},
		{"IPv4 quoted in IPv6", packettest.Build(ip6(), packettest.ICMPError{Type: 1, Quote: append(inner, make([]byte, 20)...)}), packet.ErrQuote},
		{"quoted header of four words", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: append([]byte{0x44}, inner[1:]...)}), packet.ErrQuote},
		{"quoted options cut", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: append([]byte{0x4f}, inner[1:]...)}), packet.ErrQuote},
		{"quoted total length below header", packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: short}), packet.ErrQuote},
	} {
		var q packet.Quote
		if err := parse(t, c.b, packet.ChecksumComplete).Quote(&q); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestQuoteDoesNotAllocate(t *testing.T) {
	b := quoteCase(ip6(), packettest.UDP{SrcPort: 1, DstPort: 2}, 100, nil)
	var v packet.View
	var q packet.Quote
	a := addr("fd00::9")
	if n := testing.AllocsPerRun(1000, func() {
		if v.Parse(b, packet.ChecksumComplete) != nil || v.Quote(&q) != nil {
			t.Fatal("parse")
		}
		q.SetSrc(a)
		q.SetDst(q.Src())
		q.SetSrcPort(q.DstPort())
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// For the types that have the length octet of RFC 4884, the quote must end at that length. Here
// that length ends within a TCP header that follows extension headers. The TCP checksum field then
// belongs to an extension and must not change. In other types the octet is part of an MTU or a
// pointer.
func TestQuoteEndsAtTheRFC4884Length(t *testing.T) {
	for _, c := range []struct {
		kind uint8
		ends bool
	}{{1, true}, {3, true}, {2, false}, {4, false}} {
		h := ip6()
		h.Extensions = []packettest.Extension{{Kind: 60, Data: make([]byte, 78)}} // so that the TCP header begins at octet 120
		b := quoteWithLength(h, c.kind, 16)
		if touched := quotedChecksumTouched(t, b); touched == c.ends {
			t.Errorf("type %d: the TCP checksum behind 128 octets was rewritten: %t", c.kind, touched)
		}
	}
}

// A length below 128 octets must be ignored, because the octet was unused before RFC 4884.
func TestQuoteLengthBelow128OctetsIsIgnored(t *testing.T) {
	for _, kind := range []uint8{3, 11, 12} {
		if !quotedChecksumTouched(t, quoteWithLength(ip4(), kind, 7)) {
			t.Errorf("IPv4 type %d: length 28 ends the quote", kind)
		}
	}
	for _, kind := range []uint8{1, 3} {
		if !quotedChecksumTouched(t, quoteWithLength(ip6(), kind, 6)) {
			t.Errorf("IPv6 type %d: length 48 ends the quote", kind)
		}
	}
}

// quoteWithLength returns an ICMP error that has a length octet and quotes a TCP segment with
// 40 octets of data.
func quoteWithLength(h packettest.IP, kind uint8, words uint32) []byte {
	inner := packettest.Build(h, packettest.TCP{SrcPort: 7, DstPort: 8, Data: make([]byte, 40)})
	shift := 16
	if h.Src.Is6() {
		shift = 24
	}
	h.Extensions = nil
	return packettest.Build(h, packettest.ICMPError{Type: kind, Rest: words << shift, Quote: inner})
}

// quotedChecksumTouched rewrites the quoted source port and reports whether the quoted TCP
// checksum was updated.
func quotedChecksumTouched(t *testing.T, b []byte) bool {
	t.Helper()
	before := slices.Clone(b)
	var q packet.Quote
	if err := parse(t, b, packet.ChecksumComplete).Quote(&q); err != nil {
		t.Fatal(err)
	}
	q.SetSrcPort(9)
	packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.Ports(9, 8)))
	behindPorts := len(b) - (20 + 40) + 4 // offset of the octets after the ports of the TCP segment, which ends the message
	return !bytes.Equal(b[behindPorts:], before[behindPorts:])
}

// A length beyond the end of the message must be ignored, so the quote extends to the end.
func TestQuoteLengthBeyondTheMessageIsIgnored(t *testing.T) {
	inner := packettest.Build(ip4(), packettest.TCP{SrcPort: 7, DstPort: 8})
	for _, words := range []uint32{10, 11, 255} { // 10 is exactly the whole message
		b := packettest.Build(ip4(), packettest.ICMPError{Type: 3, Rest: words << 16, Quote: inner})
		var q packet.Quote
		if err := parse(t, b, packet.ChecksumComplete).Quote(&q); err != nil {
			t.Fatal(err)
		}
		q.SetSrcPort(9)
		packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.Ports(9, 8), packettest.ValidChecksums()))
	}
}

// The length field of the quoted packet determines its end. Octets after that end are padding, even
// at the offset of the checksum.
func TestQuoteEndsWhereTheQuotedPacketEnds(t *testing.T) {
	h6 := ip6()
	for _, inner := range [][]byte{
		packettest.Build(ip4(), packettest.Raw{Proto: 17, Data: []byte{0, 7, 0, 8}}),
		packettest.Build(h6, packettest.Raw{Proto: 17, Data: []byte{0, 7, 0, 8}}),
	} {
		h, e := ip4(), packettest.ICMPError{Type: 3, Quote: append(inner, 1, 2, 3, 4, 5, 6, 7, 8)}
		if inner[0]>>4 == 6 {
			h, e.Type = h6, 1
		}
		b := packettest.Build(h, e)
		var q packet.Quote
		if err := parse(t, b, packet.ChecksumComplete).Quote(&q); err != nil {
			t.Fatal(err)
		}
		q.SetSrcPort(99)
		packettest.Check(t, b, packettest.ValidChecksums())
		if want := []byte{0, 99, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8}; !bytes.HasSuffix(b, want) {
			t.Errorf("% x, want % x at the end", b, want)
		}
	}
}

// A quoted UDP checksum that becomes zero must be written as 0xffff. A quoted UDP checksum of zero
// must not change.
func TestQuotedUDPChecksumNeverBecomesZero(t *testing.T) {
	for _, h := range []packettest.IP{ip4(), ip6()} {
		kind := uint8(3)
		if h.Src.Is6() {
			kind = 1
		}
		u := packettest.UDP{SrcPort: 1, DstPort: 2, Data: []byte("x")}
		check := binary.BigEndian.Uint16(packettest.MustDecode(packettest.Build(h, u)).Transport[6:])
		zero := u.SrcPort + check // adding the checksum to a word that it covers makes the sum 0xffff
		for _, none := range []bool{false, true} {
			u.NoChecksum = none
			b := packettest.Build(h, packettest.ICMPError{Type: kind, Quote: packettest.Build(h, u)})
			var q packet.Quote
			if err := parse(t, b, packet.ChecksumComplete).Quote(&q); err != nil {
				t.Fatal(err)
			}
			q.SetSrcPort(zero)
			inner, _ := packettest.DecodeQuote(packettest.MustDecode(b).Data)
			if got := binary.BigEndian.Uint16(inner.Transport[6:]); none && got != 0 || !none && got != 0xffff {
				t.Errorf("checksum %#04x, none %t", got, none)
			}
			packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.ValidChecksums()))
		}
	}
}

// In UDP-Lite and DCCP the checksum covers the pseudo-header and is at the same offset as in
// UDP.
func TestQuotedChecksumOfUDPLiteAndDCCPIsUpdated(t *testing.T) {
	rng := newRand(22)
	for range 2000 {
		h, e, v6 := ip4(), packettest.ICMPError{Type: 3, Code: 4}, rng.IntN(2) == 0
		if v6 {
			h, e.Type, e.Code = ip6(), 2, 0
		}
		proto, data := packet.UDPLite, random(rng, 40)
		data[4], data[5] = 0, []byte{0, 8, 20, 40}[rng.IntN(4)]
		if rng.IntN(2) == 0 {
			proto, data[4], data[5] = packet.DCCP, 3, byte(rng.IntN(4))
		}
		covered := len(data)
		switch {
		case proto == packet.UDPLite && data[5] > 0:
			covered = int(data[5])
		case proto == packet.DCCP && data[5] > 0:
			covered = 4 * (3 + int(data[5]) - 1)
		}
		data[6], data[7] = 0, 0
		sum := packettest.InternetChecksum(pseudo(h.Src, h.Dst, proto, len(data)), data[:covered])
		if sum == 0 {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(data[6:], sum)
		e.Quote = packettest.Build(h, packettest.Raw{Proto: proto, Data: data})
		b := packettest.Build(h, e)
		var q packet.Quote
		if err := parse(t, b, packet.ChecksumComplete).Quote(&q); err != nil {
			t.Fatal(err)
		}
		src, dst := randAddr(rng, v6), randAddr(rng, v6)
		q.SetSrc(src)
		q.SetDst(dst)
		packettest.Check(t, b, packettest.ValidChecksums(), packettest.Quote(packettest.ValidChecksums(), packettest.Src(src), packettest.Dst(dst)))
		if t.Failed() {
			t.FailNow()
		}
	}
}
