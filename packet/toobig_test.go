package packet_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// reassemble joins the fragments of one datagram in a slow and simple way. It fails on a gap
// or an overlap.
func reassemble(t testing.TB, fragments [][]byte) (first packettest.Packet, data []byte, more bool) {
	t.Helper()
	more = true
	for i, f := range fragments {
		packettest.Check(t, f, packettest.HeaderChecksum())
		p := packettest.MustDecode(f)
		if i == 0 {
			first = p
		} else if p.Src != first.Src || p.Dst != first.Dst || p.ID != first.ID || p.Proto != first.Proto || p.TTL != first.TTL || p.TOS != first.TOS {
			t.Errorf("fragment %d: the header differs from that of the first", i)
		}
		if p.FragmentOffset != first.FragmentOffset+len(data) {
			t.Errorf("fragment %d begins at %d, want %d", i, p.FragmentOffset, first.FragmentOffset+len(data))
		}
		if i < len(fragments)-1 && (!p.More || len(p.Transport)%8 != 0) {
			t.Errorf("fragment %d of %d: more %t, %d octets of data", i, len(fragments), p.More, len(p.Transport))
		}
		more = p.More
		whole := f[p.TransportOffset:] // the length field of UDP is that of the whole datagram
		data = append(data, whole...)
	}
	return first, data, more
}

func TestJoinUndoesSplit(t *testing.T) {
	rng := newRand(20)
	for range 3000 {
		h := randIP(rng, false)
		h.DF = false
		body := packettest.Raw{Proto: 253, Data: random(rng, rng.IntN(3000))}
		whole := packettest.Build(h, body)
		before := slices.Clone(whole)
		mtu := 68 + rng.IntN(1500)
		pieces := parse(t, whole, packet.ChecksumComplete).Split(mtu, 77)
		if !bytes.Equal(whole, before) {
			t.Fatal("the packet changed")
		}
		if len(whole) <= mtu && (len(pieces) != 1 || !bytes.Equal(pieces[0], whole)) {
			t.Fatalf("a packet of %d octets at an MTU of %d became %d fragments", len(whole), mtu, len(pieces))
		}
		if len(whole) <= mtu {
			continue
		}
		first, data, more := reassemble(t, pieces)
		if !bytes.Equal(data, body.Data) || more {
			t.Fatalf("%d of %d octets, more %t", len(data), len(body.Data), more)
		}
		id := h.ID
		if id == 0 {
			id = 77 // RFC 6864: the identification of fragments must be unique
		}
		if first.ID != id || first.Src != h.Src || first.Dst != h.Dst || first.TTL != h.TTL || first.TOS != h.TOS {
			t.Fatalf("%+v", first)
		}
		for _, f := range pieces {
			if len(f) > mtu {
				t.Fatalf("a fragment of %d octets, MTU %d", len(f), mtu)
			}
		}
		// Fragments of fragments must join to the same packet.
		if mtu < 300 {
			continue
		}
		var again [][]byte
		for _, f := range pieces {
			again = append(again, parse(t, f, packet.ChecksumComplete).Split(mtu-200, 78)...)
		}
		if other, data, more := reassemble(t, again); !bytes.Equal(data, body.Data) || more || other.ID != id {
			t.Fatalf("split twice: %d of %d octets, more %t, identification %d", len(data), len(body.Data), more, other.ID)
		}
	}
}

func TestSplitOfAFragmentKeepsItsOffset(t *testing.T) {
	h := ip4()
	h.DF, h.ID = false, 0 // the other fragments also have the identification 0
	middle := packettest.Fragments(packettest.Build(h, packettest.Raw{Proto: 253, Data: make([]byte, 3000)}), 1000, 0)[1]
	first, data, more := reassemble(t, parse(t, middle, packet.ChecksumComplete).Split(500, 77))
	if first.FragmentOffset != 1000 || len(data) != 1000 || !more || first.ID != 0 {
		t.Errorf("offset %d, %d octets, more %t, identification %d", first.FragmentOffset, len(data), more, first.ID)
	}
}

// Options with the copy bit must be in every fragment. In later fragments the other options
// must be no-operations (RFC 791, section 3.1).
func TestSplitCopiesOptionsByTheirCopyBit(t *testing.T) {
	h := ip4()
	h.DF = false
	h.Options = []byte{7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0, 0} // record route, no-operation, router alert (copied), end
	pieces := parse(t, packettest.Build(h, packettest.Raw{Proto: 253, Data: make([]byte, 200)}), packet.ChecksumComplete).Split(100, 1)
	if len(pieces) != 4 {
		t.Fatalf("%d fragments", len(pieces))
	}
	for i, f := range pieces {
		want := append(bytes.Clone(h.Options), 0, 0, 0)
		if i > 0 {
			want = []byte{1, 1, 1, 1, 1, 1, 1, 1, 148, 4, 0, 0, 0, 0, 0, 0}
		}
		if got := packettest.MustDecode(f).Options; !bytes.Equal(got, want) {
			t.Errorf("fragment %d has options %v, want %v", i, got, want)
		}
	}
}

func TestSplitRefusesPacketsThatOnlyTheSenderMayFragment(t *testing.T) {
	whole := ip4()
	whole.DF = false
	big := packettest.Build(whole, packettest.UDP{Data: make([]byte, 1000)})
	whole.DF = true
	for name, v := range map[string]*packet.View{
		"DF":               parse(t, packettest.Build(whole, packettest.UDP{Data: make([]byte, 1000)}), packet.ChecksumComplete),
		"IPv6":             parse(t, packettest.Build(ip6(), packettest.UDP{Data: make([]byte, 1000)}), packet.ChecksumComplete),
		"partial checksum": parse(t, packettest.Partial(big), packet.ChecksumPartial),
	} {
		if got := v.Split(500, 1); got != nil {
			t.Errorf("%s: %d fragments", name, len(got))
		}
	}
	if got := parse(t, big, packet.ChecksumComplete).Split(67, 1); got != nil {
		t.Errorf("MTU 67: %d fragments", len(got))
	}
}

func TestTooBigMatchesGoldenErrors(t *testing.T) {
	b := packettest.Build(packettest.IP{Src: addr("10.1.0.5"), Dst: addr("10.2.0.9"), DF: true, TOS: 0x28, ID: 0x1234, TTL: 63},
		packettest.UDP{SrcPort: 40000, DstPort: 53, Data: make([]byte, 4)})
	dst := make([]byte, packet.MaxTooBig)
	n := parse(t, b, packet.ChecksumComplete).TooBig(dst, 1328)
	want := append(unhex(t, `
		45 c0 00 3c   # internetwork control, length 60
		00 00 40 00   # identification 0, DF
		40 01 25 f1   # TTL 64, ICMP, checksum
		0a 02 00 09   # from the destination 10.2.0.9
		0a 01 00 05   # to the sender 10.1.0.5
		03 04 0b fa   # destination unreachable, fragmentation needed, checksum
		00 00 05 30   # MTU 1328
	`), b...)
	if !bytes.Equal(dst[:n], want) {
		t.Errorf("got\n%swant\n%s", hex.Dump(dst[:n]), hex.Dump(want))
	}
	packettest.Check(t, dst[:n], packettest.ValidChecksums())
}

// The error must quote as much of the packet as fits 576 octets (RFC 1812, section 4.3.2.3) or
// 1280 (RFC 4443, section 2.4c). It must not contain a next-hop MTU below the minimum for
// hosts.
func TestTooBigErrorHasABoundedQuoteAndMTU(t *testing.T) {
	rng := newRand(21)
	dst := bytes.Repeat([]byte{0xee}, packet.MaxTooBig)
	for range 3000 {
		six := rng.IntN(2) == 0
		h := randIP(rng, six)
		h.Src, h.Dst = addr("10.1.0.5"), addr("10.2.0.9")
		outer, most, floor := 20, 576, 68
		if six {
			h.Src, h.Dst = addr("fd00:1::5"), addr("fd00:2::9")
			outer, most, floor = 40, 1280, 1280
		}
		b := packettest.Build(h, packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: random(rng, rng.IntN(1500))})
		mtu := rng.IntN(1600)
		got := dst[:parse(t, b, packet.ChecksumComplete).TooBig(dst, mtu)]
		kind, code := uint8(3), uint8(4)
		if six {
			kind, code = 2, 0
		}
		packettest.Check(t, got, packettest.ValidChecksums(), packettest.Src(h.Dst), packettest.Dst(h.Src), packettest.ICMPType(kind, code))
		if quote := got[outer+8:]; !bytes.HasPrefix(b, quote) || len(got) != min(most, outer+8+len(b)) {
			t.Fatalf("%d octets about a packet of %d", len(got), len(b))
		}
		gotMTU := int(got[outer+6])<<8 | int(got[outer+7])
		if gotMTU != max(mtu, floor) || got[outer+4] != 0 || got[outer+5] != 0 {
			t.Fatalf("the error has next-hop MTU %d for MTU %d", gotMTU, mtu)
		}
	}
}

func TestTooBigIsNotSentWhereForbidden(t *testing.T) { // RFC 1812, section 4.3.2.7; RFC 4443, section 2.4e
	u := packettest.UDP{Data: make([]byte, 100)}
	from := func(src, dst string) []byte {
		return packettest.Build(packettest.IP{Src: addr(src), Dst: addr(dst)}, u)
	}
	good, good6 := from("10.1.0.5", "10.2.0.9"), from("fd00:1::5", "fd00:2::9")
	for name, b := range map[string][]byte{
		"ICMP error":          packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: good}),
		"ICMPv6 error":        packettest.Build(ip6(), packettest.ICMPError{Type: 1, Quote: good6}),
		"later fragment":      packettest.Fragments(good, 64, 1)[1],
		"to multicast":        from("10.1.0.5", "224.0.0.9"),
		"to broadcast":        from("10.1.0.5", "255.255.255.255"),
		"from multicast":      from("239.1.0.5", "10.2.0.9"),
		"from 0.0.0.0":        from("0.0.0.0", "10.2.0.9"),
		"from network 0":      from("0.1.2.3", "10.2.0.9"),
		"from loopback":       from("127.0.0.1", "10.2.0.9"),
		"from ::":             from("::", "fd00:2::9"),
		"from IPv6 loopback":  from("::1", "fd00:2::9"),
		"to IPv6 multicast":   from("fd00:1::5", "ff0e::1"),
		"from IPv6 multicast": from("ff0e::1", "fd00:2::9"),
		"to ::":               from("fd00:1::5", "::"),
	} {
		if n := parse(t, b, packet.ChecksumComplete).TooBig(make([]byte, packet.MaxTooBig), 100); n != 0 {
			t.Errorf("%s: an error of %d octets", name, n)
		}
	}
	if n := parse(t, packettest.Fragments(good, 64, 1)[0], packet.ChecksumComplete).TooBig(make([]byte, packet.MaxTooBig), 100); n == 0 {
		t.Error("first fragment: no error")
	}
}

func TestTooBigDoesNotAllocate(t *testing.T) {
	v := parse(t, packettest.Build(ip6(), packettest.UDP{Data: make([]byte, 1500)}), packet.ChecksumComplete)
	dst := make([]byte, packet.MaxTooBig)
	if n := testing.AllocsPerRun(100, func() { v.TooBig(dst, 1300) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzTooBig checks that every packet that parses can be split or answered. The results must
// parse, fit, and be correct by the reference.
func FuzzTooBig(f *testing.F) {
	rng := newRand(24)
	for range 40 {
		f.Add(packettest.Build(randIP(rng, rng.IntN(2) == 0), randBody(rng)), uint16(rng.IntN(200)), uint16(rng.Uint32()))
	}
	f.Add(packettest.Fragments(packettest.Build(ip4(), packettest.UDP{Data: make([]byte, 300)}), 96, 0)[1], uint16(68), uint16(1))
	f.Fuzz(func(t *testing.T, b []byte, mtu, id uint16) {
		var v packet.View
		if v.Parse(b, packet.ChecksumComplete) != nil {
			return
		}
		whole := slices.Clone(v.Bytes())
		pieces := v.Split(int(mtu), id)
		if (pieces == nil) != (v.DontFragment() || mtu < 68) {
			t.Fatalf("DF %t, MTU %d: %d fragments", v.DontFragment(), mtu, len(pieces))
		}
		octets := 0
		for _, p := range pieces {
			var w packet.View
			if err := w.Parse(p, packet.ChecksumComplete); err != nil && len(pieces) == 1 {
				t.Fatal(err)
			}
			if len(p) > int(mtu) {
				t.Fatalf("%d octets, MTU %d", len(p), mtu)
			}
			octets += len(p) - v.TransportOffset()
		}
		if pieces != nil && octets != len(whole)-v.TransportOffset() {
			t.Fatalf("%d octets of data, %d in fragments", len(whole)-v.TransportOffset(), octets)
		}
		dst := make([]byte, packet.MaxTooBig)
		if n := v.TooBig(dst, int(mtu)); n > 0 {
			packettest.Check(t, dst[:n], packettest.ValidChecksums(), packettest.Src(v.Dst()), packettest.Dst(v.Src()))
			var w packet.View
			var q packet.Quote
			if err := w.Parse(dst[:n], packet.ChecksumComplete); err != nil {
				t.Fatal(err)
			}
			if err := w.Quote(&q); err != nil && !errors.Is(err, packet.ErrHeaderChecksum) { // the packet's own header checksum was already wrong
				t.Fatal(err)
			}
		}
		if !bytes.Equal(whole, v.Bytes()) {
			t.Fatal("the packet changed")
		}
	})
}
