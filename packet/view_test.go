package packet_test

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestPacketImportsOnlyTheStandardLibrary(t *testing.T) {
	const module = "github.com/isthmus-net/isthmus"
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", module+"/packet").Output()
	if err != nil {
		t.Skipf("go list: %v", err)
	}
	for dep := range strings.FieldsSeq(string(out)) {
		if dep != module+"/packet" {
			t.Errorf("packet must stay pure, yet it imports %s", dep)
		}
	}
}

func TestParseAgreesWithReference(t *testing.T) {
	rng := newRand(1)
	var v packet.View
	for range 20_000 {
		b, state := sample(rng)
		want := packettest.MustDecode(b)
		longer := append(slices.Clone(b), random(rng, rng.IntN(20))...)
		if err := v.Parse(longer, state); err != nil {
			t.Fatalf("%v\n%s", err, hex.Dump(b))
		}
		agrees(t, &v, want, b)
		if v.Len() != len(b) || len(v.Bytes()) != len(b) || cap(v.Bytes()) != len(b) {
			t.Fatalf("Len %d, Bytes %d of %d, want %d", v.Len(), len(v.Bytes()), cap(v.Bytes()), len(b))
		}
		if !v.ValidChecksums() {
			t.Fatalf("checksums of a right packet called wrong\n%s", hex.Dump(b))
		}
	}
}

// agrees compares all fields of a view with the reference.
func agrees(t *testing.T, v *packet.View, want packettest.Packet, b []byte) {
	t.Helper()
	off, more, id, ok := v.Fragment()
	checks := []struct {
		what       string
		have, want any
	}{
		{"Is4", v.Is4(), want.Src.Is4()},
		{"Src", v.Src(), want.Src},
		{"Dst", v.Dst(), want.Dst},
		{"TTL", v.TTL(), want.TTL},
		{"Proto", v.Proto(), want.Proto},
		{"TransportOffset", v.TransportOffset(), want.TransportOffset},
		{"fragment offset", off, want.FragmentOffset},
		{"more fragments", more, want.More},
		{"fragment identification", id, want.FragmentID},
		{"is a fragment", ok, want.More || want.FragmentOffset > 0},
		{"LaterFragment", v.LaterFragment(), want.FragmentOffset > 0},
		{"HasPorts", v.HasPorts(), (want.Proto == 6 || want.Proto == 17) && want.FragmentOffset == 0},
		{"SrcPort", v.SrcPort(), want.SrcPort},
		{"DstPort", v.DstPort(), want.DstPort},
		{"TCPFlags", v.TCPFlags(), want.Flags},
		{"ICMPType", v.ICMPType(), want.Type},
		{"PayloadOffset", v.PayloadOffset(), want.TransportOffset + len(want.Transport) - len(want.Data)},
	}
	if v.IsICMPQuery() {
		checks = append(checks, struct {
			what       string
			have, want any
		}{"ICMPID", v.ICMPID(), want.ICMPID})
	}
	if v.Is4() {
		src, dst := want.Src.As4(), want.Dst.As4()
		if v.Src4() != binary.BigEndian.Uint32(src[:]) || v.Dst4() != binary.BigEndian.Uint32(dst[:]) {
			t.Errorf("Src4 %x Dst4 %x, want %v %v", v.Src4(), v.Dst4(), want.Src, want.Dst)
		}
	}
	for _, c := range checks {
		if c.have != c.want {
			t.Fatalf("%s is %v, want %v\n%s", c.what, c.have, c.want, hex.Dump(b))
		}
	}
}

func TestParseGoldenIPv4TCPWithOptions(t *testing.T) {
	b := unhex(t, `
		46 00 00 30   # version 4, header of 6 words, total length 48
		1c 46 40 00   # identification, DF
		40 06 00 00   # TTL 64, TCP, header checksum not looked at
		0a 01 00 05   # 10.1.0.5
		0a 02 00 09   # 10.2.0.9
		94 04 00 00   # router alert
		9c 40 00 50   # ports 40000, 80
		00 00 00 01   # sequence number
		00 00 00 00   # acknowledgement
		60 02 fa f0   # header of 6 words, SYN, window 64240
		00 00 00 00   # checksum not looked at
		02 04 05 b4   # MSS 1460
	`)
	v := parse(t, append(b, "trailing octets"...), packet.ChecksumComplete)
	if v.Len() != 48 || v.TransportOffset() != 24 || v.PayloadOffset() != 48 || v.SrcPort() != 40000 || v.DstPort() != 80 ||
		v.TCPFlags() != packet.TCPSyn || v.Src() != addr("10.1.0.5") || v.Dst() != addr("10.2.0.9") || v.TTL() != 64 {
		t.Errorf("%+v", v)
	}
}

func TestParseGoldenIPv6FragmentAfterHopByHopOptions(t *testing.T) {
	b := unhex(t, `
		60 00 00 00                                      # version 6
		00 20 00 40                                      # payload 32, hop-by-hop next, hop limit 64
		fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 01  # fd00::1
		fd 00 00 00 00 00 00 00 00 00 00 00 00 00 00 02  # fd00::2
		2c 00 05 02 00 00 01 00                          # hop-by-hop: fragment next, router alert
		11 00 00 01 de ad be ef                          # fragment: UDP, offset 0, more, identification
		13 88 00 35 00 28 12 34                          # UDP 5000 to 53, length 40 of the whole datagram
		00 01 02 03 04 05 06 07                          # its first octets
	`)
	v := parse(t, b, packet.ChecksumComplete)
	off, more, id, ok := v.Fragment()
	if off != 0 || !more || id != 0xdeadbeef || !ok || v.Proto() != packet.UDP || v.DstPort() != 53 || v.TransportOffset() != 56 {
		t.Errorf("%d %t %x %t %+v", off, more, id, ok, v)
	}
}

func TestAtomicFragmentIsAWholePacket(t *testing.T) {
	b := packettest.Build(packettest.IP{Src: addr("fd00::1"), Dst: addr("fd00::2"), Extensions: []packettest.Extension{{Kind: 44, Data: []byte{0, 0, 0, 0, 0, 9}}}},
		packettest.UDP{SrcPort: 7, DstPort: 8, Data: []byte("x")})
	v := parse(t, b, packet.ChecksumComplete)
	if _, _, id, ok := v.Fragment(); ok || id != 9 || v.SrcPort() != 7 || v.Checksum() != packet.ChecksumComplete || !v.ValidChecksums() {
		t.Errorf("%+v", v)
	}
}

func TestFragmentLenCountsFromTheFragmentHeader(t *testing.T) {
	for _, h := range []packettest.IP{ip4(), ip6()} {
		h.Options = []byte{1, 1, 1, 1}
		if h.Src.Is6() {
			h.Extensions = []packettest.Extension{{Kind: 0, Data: []byte{1, 12, 13: 0}}, {Kind: 60}}
		}
		b := packettest.Build(h, packettest.UDP{Data: make([]byte, 92)})
		if n := parse(t, b, packet.ChecksumComplete).FragmentLen(); n != 0 {
			t.Errorf("%d octets of a whole packet", n)
		}
		for i, f := range packettest.Fragments(b, 48, 7) {
			if n := parse(t, f, packet.ChecksumComplete).FragmentLen(); n != []int{48, 48, 4}[i] {
				t.Errorf("fragment %d: %d octets", i, n)
			}
		}
	}
	h := ip6() // options after the fragment header belong to the fragmented part
	h.Extensions = []packettest.Extension{{Kind: 44, Data: []byte{0, 1}}, {Kind: 60}, {Kind: 60}}
	if n := parse(t, packettest.Build(h, packettest.UDP{Data: make([]byte, 8)}), packet.ChecksumComplete).FragmentLen(); n != 32 {
		t.Errorf("%d octets, want 32", n)
	}
}

func TestChecksumIsAbsentForProtocolsWithoutOne(t *testing.T) {
	for _, c := range []struct {
		name string
		b    []byte
		want packet.ChecksumState
	}{
		{"UDP over IPv4 without checksum", packettest.Build(ip4(), packettest.UDP{NoChecksum: true}), packet.ChecksumAbsent},
		{"UDP over IPv6 without checksum", packettest.Build(ip6(), packettest.UDP{NoChecksum: true}), packet.ChecksumAbsent},
		{"SCTP", packettest.Build(ip4(), packettest.Raw{Proto: 132, Data: make([]byte, 12)}), packet.ChecksumAbsent},
		{"later fragment", packettest.Fragments(packettest.Build(ip4(), packettest.UDP{Data: make([]byte, 40)}), 24, 1)[1], packet.ChecksumAbsent},
		{"ICMPv6 in IPv4", packettest.Build(ip4(), packettest.Raw{Proto: 58, Data: make([]byte, 12)}), packet.ChecksumAbsent},
		{"ICMP in IPv6", packettest.Build(ip6(), packettest.Raw{Proto: 1, Data: make([]byte, 12)}), packet.ChecksumAbsent},
		{"first fragment", packettest.Fragments(packettest.Build(ip4(), packettest.UDP{Data: make([]byte, 40)}), 24, 1)[0], packet.ChecksumComplete},
		{"UDP", packettest.Build(ip4(), packettest.UDP{}), packet.ChecksumComplete},
		{"ICMP", packettest.Build(ip4(), packettest.Echo{}), packet.ChecksumComplete},
	} {
		if got := parse(t, c.b, packet.ChecksumComplete).Checksum(); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
	partial := packettest.Partial(packettest.Build(ip4(), packettest.UDP{}))
	partial[26], partial[27] = 0, 0 // a sum of zero is a valid partial checksum
	if parse(t, partial, packet.ChecksumPartial).Checksum() != packet.ChecksumPartial {
		t.Error("partial checksum 0 was parsed as absent")
	}
}

func ip4() packettest.IP { return packettest.IP{Src: addr("10.1.0.5"), Dst: addr("10.2.0.9")} }
func ip6() packettest.IP { return packettest.IP{Src: addr("fd00:1::5"), Dst: addr("fd00:2::9")} }

func TestParseRefusesMalformedPackets(t *testing.T) {
	tcp := packettest.Build(ip4(), packettest.TCP{SrcPort: 1, DstPort: 2, Options: timestamps, Data: make([]byte, 40)})
	udp := packettest.Build(ip4(), packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 40)})
	udp6 := packettest.Build(ip6(), packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 40)})
	echo := packettest.Build(ip4(), packettest.Echo{Data: make([]byte, 8)})
	with := func(b []byte, at int, octets ...byte) []byte {
		b = slices.Clone(b)
		copy(b[at:], octets)
		return b
	}
	cut := func(b []byte, n int) []byte { // a shorter packet, which is not truncated
		b = slices.Clone(b[:n])
		if b[0]>>4 == 4 {
			binary.BigEndian.PutUint16(b[2:], uint16(n))
		} else {
			binary.BigEndian.PutUint16(b[4:], uint16(n-40))
		}
		return b
	}
	options := func(o ...byte) []byte {
		h := ip4()
		h.Options = o
		return packettest.Build(h, packettest.UDP{})
	}
	extensions := func(e ...packettest.Extension) []byte {
		h := ip6()
		h.Extensions = e
		return packettest.Build(h, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 40)})
	}
	kind := func(k uint8, data ...byte) packettest.Extension { return packettest.Extension{Kind: k, Data: data} }
	many := slices.Repeat([]packettest.Extension{kind(60)}, 9)

	for _, c := range []struct {
		name string
		b    []byte
		csum packet.ChecksumState
		want packet.Error
	}{
		{"empty", nil, 0, packet.ErrTruncated},
		{"version 5", with(udp, 0, 0x55), 0, packet.ErrVersion},
		{"half an IPv4 header", udp[:19], 0, packet.ErrTruncated},
		{"half an IPv6 header", udp6[:39], 0, packet.ErrTruncated},
		{"IPv4 shorter than it says", udp[:len(udp)-1], 0, packet.ErrTruncated},
		{"IPv6 shorter than it says", udp6[:len(udp6)-1], 0, packet.ErrTruncated},
		{"header of four words", with(udp, 0, 0x44), 0, packet.ErrHeaderLength},
		{"total length below header", with(udp, 2, 0, 19), 0, packet.ErrTotalLength},
		{"option without length", options(7, 0), 0, packet.ErrOption},
		{"option of length 1", options(7, 1, 0, 0), 0, packet.ErrOption},
		{"option beyond header", options(7, 5, 0, 0), 0, packet.ErrOption},
		{"option cut after its type", options(1, 1, 1, 7), 0, packet.ErrOption},
		{"loose source route", options(131, 7, 4, 10, 0, 0, 1, 0), 0, packet.ErrSourceRoute},
		{"strict source route after NOP", options(1, 137, 7, 4, 10, 0, 0, 1), 0, packet.ErrSourceRoute},
		{"routing header with segments left", extensions(kind(43, 0, 1)), 0, packet.ErrSourceRoute},
		{"hop-by-hop not first", extensions(kind(60), kind(0)), 0, packet.ErrExtensionHeader},
		{"two fragment headers", extensions(kind(44), kind(44)), 0, packet.ErrExtensionHeader},
		{"nine extension headers", extensions(many...), 0, packet.ErrExtensionHeader},
		{"extension header beyond packet", with(extensions(kind(60)), 41, 200), 0, packet.ErrExtensionHeader},
		{"extension header cut", cut(extensions(kind(60)), 46), 0, packet.ErrExtensionHeader},
		{"authentication header of 8 octets", with(extensions(kind(51)), 41, 0), 0, packet.ErrExtensionHeader},
		{"no UDP header", cut(udp, 27), 0, packet.ErrTransportHeader},
		{"UDP length below 8", with(udp, 24, 0, 7), 0, packet.ErrTransportHeader},
		{"UDP length beyond packet", with(udp, 24, 0, 49), 0, packet.ErrTransportHeader},
		{"UDP length 0 in IPv6", with(udp6, 44, 0, 0), 0, packet.ErrTransportHeader},
		{"no TCP header", cut(tcp, 39), 0, packet.ErrTransportHeader},
		{"TCP header of four words", with(tcp, 32, 0x40), 0, packet.ErrTransportHeader},
		{"TCP header beyond packet", with(cut(tcp, 44), 32, 0x70), 0, packet.ErrTransportHeader},
		{"no ICMP header", cut(echo, 27), 0, packet.ErrTransportHeader},
		{"first fragment with 8 octets of TCP", packettest.Fragments(tcp, 8, 1)[0], 0, packet.ErrTinyFragment},
		{"first fragment without TCP options", packettest.Fragments(tcp, 24, 1)[0], 0, packet.ErrTinyFragment},
		{"first fragment without data", with(cut(udp, 20), 6, 0x20, 0), 0, packet.ErrTinyFragment},
		{"first IPv6 fragment cut in the chain", cut(extensions(kind(44, 0, 1), kind(60, make([]byte, 14)...)), 56), 0, packet.ErrTinyFragment},
		{"fragment over TCP ports", packettest.Fragments(tcp, 8, 1)[1], 0, packet.ErrTinyFragment},
		{"fragment over TCP checksum", packettest.Fragments(tcp, 16, 1)[1], 0, packet.ErrTinyFragment},
		{"fragment beyond 65535", with(udp, 6, 0x1f, 0xff), 0, packet.ErrFragmentRange},
		{"IPv6 fragment beyond 65535", extensions(kind(44, 0xff, 0xf8)), 0, packet.ErrFragmentRange},
		{"empty later fragment", with(cut(udp, 20), 6, 0, 4), 0, packet.ErrFragmentRange},
		{"middle fragment of odd length", with(cut(udp, 41), 6, 0x20, 4), 0, packet.ErrFragmentRange},
		{"first IPv6 fragment of odd length", cut(extensions(kind(44, 0, 1)), 40+8+8+7), 0, packet.ErrFragmentRange},
		{"partial first fragment", packettest.Fragments(udp, 24, 1)[0], packet.ChecksumPartial, packet.ErrPartialChecksum},
		{"partial later fragment", packettest.Fragments(udp, 24, 1)[1], packet.ChecksumPartial, packet.ErrPartialChecksum},
		{"partial ICMP", echo, packet.ChecksumPartial, packet.ErrPartialChecksum},
		{"partial unknown protocol", packettest.Build(ip4(), packettest.Raw{Proto: 200}), packet.ChecksumPartial, packet.ErrPartialChecksum},
	} {
		var v packet.View
		if err := v.Parse(c.b, c.csum); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v\n%s", c.name, err, c.want, hex.Dump(c.b))
		}
	}
}

func TestParseAcceptsTheLargestPackets(t *testing.T) {
	for _, b := range [][]byte{
		packettest.Build(ip4(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 65535-40)}),
		packettest.Build(ip6(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 65535-20)}),
	} {
		if v := parse(t, b, packet.ChecksumComplete); v.Len() != len(b) || !v.ValidChecksums() {
			t.Errorf("Len %d, want %d", v.Len(), len(b))
		}
	}
	// Fragments that end at the maximum length of a datagram (n is 0), or one octet beyond (n is
	// 1).
	h6 := ip6()
	h6.Extensions = []packettest.Extension{{Kind: 44, Data: []byte{0xff, 0xf8, 0, 0, 0, 1}}}
	for n := range 2 {
		f := packettest.Build(ip4(), packettest.Raw{Proto: 17, Data: make([]byte, 11+n)})
		f[6], f[7] = 0x1f, 0xfc                                                        // 20 + 65504 + 11 = 65535
		f6 := packettest.Build(h6, packettest.Raw{Proto: 17, Data: make([]byte, 7+n)}) // 65528 + 7 = 65535
		for _, b := range [][]byte{f, f6} {
			var v packet.View
			if err := v.Parse(b, packet.ChecksumComplete); (err == nil) != (n == 0) {
				t.Errorf("%d octets beyond: %v", n, err)
			}
		}
	}
}

func TestParseAcceptsOptions(t *testing.T) {
	for _, o := range [][]byte{{7, 2, 7, 2}, {1, 1, 7, 2}, {7, 4, 0, 0}, {0, 131, 1, 1}, {7, 3, 0, 0, 131, 1, 0, 0}} {
		h := ip4()
		h.Options = o
		if v := parse(t, packettest.Build(h, packettest.UDP{DstPort: 9}), packet.ChecksumComplete); v.DstPort() != 9 {
			t.Errorf("% x: %+v", o, v)
		}
	}
}

// The sum of the pseudo-header is zero, so the field may be 0 or 0xffff, which are both zero in
// ones' complement.
func TestPartialChecksumMayBeZeroOrFFFF(t *testing.T) {
	h, s := ip4(), packettest.TCP{SrcPort: 1, DstPort: 2}
	sum := ^packettest.InternetChecksum(h.Src.AsSlice(), []byte{10, 2, 0, 0, 0, 6, 0, 20})
	h.Dst = netip.AddrFrom4([4]byte{10, 2, byte(^sum >> 8), byte(^sum)})
	b := packettest.Partial(packettest.Build(h, s))
	for _, field := range []uint16{0, 0xffff, 1, 0xfffe} {
		binary.BigEndian.PutUint16(b[36:], field)
		if parse(t, b, packet.ChecksumPartial).ValidChecksums() != (field == 0 || field == 0xffff) {
			t.Errorf("%#04x misjudged", field)
		}
	}
}

func TestChecksumDoesNotCoverTheUDPSurplusArea(t *testing.T) {
	b := packettest.Build(ip4(), packettest.UDP{SrcPort: 1, DstPort: 2, Data: []byte("abc")})
	b = append(b, 1, 2, 3, 4, 5) // the surplus area of RFC 9868
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], packettest.InternetChecksum(b[:20]))
	v := parse(t, b, packet.ChecksumComplete)
	if !v.ValidChecksums() {
		t.Error("surplus area was summed")
	}
	v.SetDst(addr("10.9.9.9"))
	packettest.Check(t, b, packettest.ValidChecksums())
}

func TestValidChecksumsDetectsEveryWrongBit(t *testing.T) {
	rng := newRand(2)
	for range 300 {
		b, state := sample(rng)
		p := packettest.MustDecode(b)
		var v packet.View
		for i := range b {
			bad := slices.Clone(b)
			bad[i] ^= 1 << rng.IntN(8)
			if v.Parse(bad, state) != nil {
				continue
			}
			want := validIn(state)
			q, err := packettest.Decode(bad)
			if err != nil || q.Proto != p.Proto || v.Checksum() == packet.ChecksumAbsent {
				continue
			}
			if got := v.ValidChecksums(); got != (want(q) == nil) {
				t.Fatalf("octet %d: %t, reference says %v\n%s", i, got, want(q), hex.Dump(bad))
			}
		}
	}
}

func TestEveryErrorHasAText(t *testing.T) {
	seen := map[string]bool{}
	for e := packet.ErrTruncated; e <= packet.ErrJoin; e++ {
		if seen[e.Error()] || e.Error() == packet.Error(0).Error() {
			t.Errorf("%d: %q", e, e)
		}
		seen[e.Error()] = true
	}
	if packet.Error(255).Error() != packet.Error(0).Error() {
		t.Error("unknown error has a text of its own")
	}
}
