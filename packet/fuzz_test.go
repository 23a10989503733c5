package packet_test

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// addSeeds adds packets of every kind, so that the fuzzer need not discover their formats.
func addSeeds(f *testing.F, add func(b []byte, partial bool)) {
	f.Helper()
	rng := newRand(16)
	for range 60 {
		b, state := sample(rng)
		add(b, state == packet.ChecksumPartial)
	}
	for _, h := range []packettest.IP{ip4(), ip6()} {
		add(packettest.Build(h, packettest.TCP{Flags: packettest.SYN, Options: []byte{1, 2, 4, 5, 180, 3, 3, 7}}), false)
		kind := uint8(3)
		if h.Src.Is6() {
			kind = 1
		}
		add(packettest.Build(h, packettest.ICMPError{Type: kind, Quote: packettest.Build(h, packettest.UDP{Data: make([]byte, 40)})}), false)
	}
}

func other(a netip.Addr) netip.Addr {
	if a.Is4() {
		return addr("10.70.255.255")
	}
	return addr("fd70::ffff:0:ffff")
}

// FuzzParse checks that a parsed packet lies within its bytes. A rewriting must keep valid
// checksums valid, and undoing it must restore the octets.
func FuzzParse(f *testing.F) {
	addSeeds(f, func(b []byte, partial bool) { f.Add(b, partial, uint16(40000)) })
	f.Fuzz(func(t *testing.T, b []byte, partial bool, port uint16) {
		state := packet.ChecksumComplete
		if partial {
			state = packet.ChecksumPartial
		}
		var v packet.View
		if v.Parse(b, state) != nil {
			return
		}
		if v.Len() > len(b) || v.Len() != len(v.Bytes()) || v.TransportOffset() > v.PayloadOffset() || v.PayloadOffset() > v.Len() {
			t.Fatalf("%+v of %d octets", v, len(b))
		}
		off, more, _, ok := v.Fragment()
		if off+v.Len()-v.TransportOffset() > 65535 || ok != (off > 0 || more) || ok && v.Checksum() == packet.ChecksumPartial {
			t.Fatalf("fragment %d %t %t", off, more, ok)
		}
		valid := v.ValidChecksums()
		before := slices.Clone(v.Bytes())
		if p, err := packettest.Decode(before); err == nil {
			if want := validIn(v.Checksum())(p) == nil; v.Checksum() != packet.ChecksumAbsent && valid != want {
				t.Fatalf("ValidChecksums %t, reference %t", valid, want)
			}
		} else {
			t.Fatalf("reference cannot read it: %v", err)
		}
		undo := rewriting{other(v.Src()), other(v.Dst()), port, ^port, port}.apply(&v)
		if v.ValidChecksums() != valid {
			t.Fatalf("checksums were right: %t, now %t", valid, !valid)
		}
		clamped := slices.Clone(v.Bytes())
		if v.ClampMSS(port) == bytes.Equal(clamped, v.Bytes()) || v.ValidChecksums() != valid {
			t.Fatal("ClampMSS")
		}
		copy(v.Bytes(), clamped)
		undo.apply(&v)
		if valid && !sameNumber(v.Bytes(), before) {
			t.Fatalf("not undone\n%x\n%x", v.Bytes(), before)
		}
		v.CompleteChecksum()
		if v.ValidChecksums() != valid {
			t.Fatalf("CompleteChecksum: right %t, was %t", !valid, valid)
		}
	})
}

// sameNumber compares packets. In checksum fields 0 and 0xffff count as equal, because both are
// zero in ones' complement, and an update writes only one of them.
func sameNumber(a, b []byte) bool {
	p := packettest.MustDecode(b)
	fields := []int{}
	if p.Src.Is4() {
		fields = append(fields, 10)
	}
	if p.FragmentOffset == 0 {
		if off, ok := map[uint8]int{6: 16, 17: 6, 1: 2, 58: 2, 33: 6, 136: 6}[p.Proto]; ok && len(b) >= p.TransportOffset+off+2 {
			fields = append(fields, p.TransportOffset+off)
		}
	}
	a, b = slices.Clone(a), slices.Clone(b)
	for _, x := range [][]byte{a, b} {
		for _, at := range fields {
			binary.BigEndian.PutUint16(x[at:], binary.BigEndian.Uint16(x[at:])%0xffff)
		}
	}
	return bytes.Equal(a, b)
}

// FuzzQuote checks that a translation keeps the ICMP checksum and the quoted header checksum
// correct and changes nothing after the quoted packet. The reverse translation must restore
// the octets.
func FuzzQuote(f *testing.F) {
	addSeeds(f, func(b []byte, _ bool) {
		f.Add(b, uint16(40000), uint16(64))
		f.Add(b, uint16(0), uint16(28))
	})
	f.Fuzz(func(t *testing.T, inner []byte, port, cut uint16) {
		if len(inner) == 0 || len(inner) > 60000 {
			return
		}
		h, e := ip4(), packettest.ICMPError{Type: 3, Code: 4, Quote: inner[:min(len(inner), int(cut))], Rest: uint32(cut) << 16}
		if inner[0]>>4 == 6 {
			h, e.Type, e.Rest = ip6(), 1, uint32(cut)<<24
		}
		b := packettest.Build(h, e)
		var v packet.View
		var q packet.Quote
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if v.Quote(&q) != nil {
			return
		}
		before := slices.Clone(b)
		src, dst, ports, id := q.Src(), q.Dst(), [2]uint16{q.SrcPort(), q.DstPort()}, q.ICMPID()
		to := other(src)
		q.SetSrc(to)
		q.SetDst(to)
		q.SetSrcPort(port)
		q.SetDstPort(port)
		q.SetICMPID(port)
		if q.Src() != to || q.Dst() != to || q.HasPorts() && (q.SrcPort() != port || q.DstPort() != port) || q.IsICMPQuery() && q.ICMPID() != port {
			t.Fatalf("%+v", q)
		}
		packettest.Check(t, b, packettest.ValidChecksums(), func(p packettest.Packet) error {
			inner := p.Data
			if inner[0]>>4 == 4 && packettest.InternetChecksum(inner[:int(inner[0]&15)*4]) != 0 {
				t.Error("quoted header checksum")
			}
			return nil
		})
		q.SetICMPID(id)
		q.SetDstPort(ports[1])
		q.SetSrcPort(ports[0])
		q.SetDst(dst)
		q.SetSrc(src)
		if !bytes.Equal(b, before) && !equalUpToZeros(b, before) {
			t.Fatalf("not undone\n%x\n%x", b, before)
		}
	})
}

// equalUpToZeros compares messages. At most four words may differ, and these must be 0 in one
// message and 0xffff in the other: both are zero in ones' complement, and an update of a checksum
// writes only one of them.
func equalUpToZeros(a, b []byte) bool {
	differ := 0
	for i := 0; i+1 < len(a); i += 2 {
		x, y := binary.BigEndian.Uint16(a[i:]), binary.BigEndian.Uint16(b[i:])
		if x != y {
			differ++
			if x%0xffff != y%0xffff {
				return false
			}
		}
	}
	return differ <= 4
}

// FuzzVirtioHeader checks that a packet that Validate accepts can be sent: after its checksum
// is completed, or as segments with all of its data.
func FuzzVirtioHeader(f *testing.F) {
	addSeeds(f, func(b []byte, partial bool) {
		h := make([]byte, packet.VirtioHeaderLen)
		p := packettest.MustDecode(b)
		if partial {
			x := packet.VirtioHeader{Flags: 1, GSOType: 1, GSOSize: 9, CsumStart: uint16(p.TransportOffset), CsumOffset: 16}
			if p.Proto == 17 {
				x.CsumOffset, x.GSOType = 6, 5
			} else if p.Src.Is6() {
				x.GSOType = 4
			}
			x.Encode(h)
		}
		f.Add(append(h, b...))
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		var h packet.VirtioHeader
		if err := h.Decode(b); err != nil {
			if len(b) >= packet.VirtioHeaderLen {
				t.Fatal(err)
			}
			return
		}
		again := make([]byte, packet.VirtioHeaderLen)
		h.Encode(again)
		if !bytes.Equal(again, b[:packet.VirtioHeaderLen]) {
			t.Fatalf("% x became % x", b[:packet.VirtioHeaderLen], again)
		}
		var v packet.View
		if v.Parse(b[packet.VirtioHeaderLen:], h.ChecksumState()) != nil {
			return
		}
		size, err := h.Validate(&v)
		if err != nil {
			return
		}
		if size == 0 {
			right := v.ValidChecksums()
			v.CompleteChecksum()
			if v.Checksum() == packet.ChecksumPartial || v.ValidChecksums() != right {
				t.Fatal("not completed")
			}
			return
		}
		if size != int(h.GSOSize) {
			t.Fatalf("size %d", size)
		}
		if v.Len() > 10000 || v.Len()/size > 100 { // skip large packets, because the reference is slow
			return
		}
		checkSegments(t, &v, size)
	})
}

func checkSegments(t *testing.T, v *packet.View, size int) {
	t.Helper()
	want := packettest.Segments(v.Bytes(), size)
	var s packet.Segmenter
	if err := s.Reset(parse(t, slices.Clone(v.Bytes()), packet.ChecksumPartial), size); err != nil {
		t.Fatal(err)
	}
	for i, w := range want {
		if s.Remaining() != len(want)-i {
			t.Fatalf("%d remain of %d", s.Remaining(), len(want)-i)
		}
		if p := s.Next(); !bytes.Equal(p, w) {
			t.Fatalf("segment %d\n%x\nwant\n%x", i, p, w)
		}
	}
	if s.Remaining() != 0 {
		t.Fatal("more than the reference")
	}
}

// FuzzSegment checks that the segments equal those of the reference. If they can be coalesced,
// they must form the superpacket again.
func FuzzSegment(f *testing.F) {
	rng := newRand(17)
	for range 40 {
		f.Add(randSuper(rng, rng.IntN(2000)), uint16(1+rng.IntN(1500)))
	}
	f.Fuzz(func(t *testing.T, b []byte, size uint16) {
		var v packet.View
		var s packet.Segmenter
		if len(b) > 10000 || v.Parse(b, packet.ChecksumPartial) != nil || s.Reset(&v, int(size)) != nil || s.Remaining() > 100 {
			return
		}
		checkSegments(t, &v, int(size))

		if err := s.Reset(parse(t, slices.Clone(b), packet.ChecksumPartial), int(size)); err != nil {
			t.Fatal(err)
		}
		n := s.Remaining()
		c := packet.Coalescer{UDP: true}
		for s.Remaining() > 0 {
			if err := c.Add(slices.Clone(s.Next())); err != nil {
				t.Fatal(err)
			}
		}
		plain := v.TransportOffset() == 40 || v.Is4() && v.TransportOffset() == 20
		joins := v.Proto() == packet.UDP && n <= 64 || v.Proto() == packet.TCP && v.TCPFlags()&^(packet.TCPPsh|packet.TCPEce) == packet.TCPAck
		runs := c.Runs()
		if !plain || !joins || n < 2 || v.Len() > 65535 {
			return
		}
		if len(runs) != 1 {
			t.Fatalf("%d runs of %d segments", len(runs), n)
		}
		got := whole(&runs[0])
		at := v.TransportOffset() + 16
		if v.Proto() == packet.UDP {
			at = v.TransportOffset() + 6
		}
		want := slices.Clone(v.Bytes())
		for _, x := range [][]byte{got, want} { // Segment reads neither the header checksum nor the partial checksum
			if v.Is4() {
				copy(x[10:12], []byte{0, 0})
			}
			copy(x[at:], []byte{0, 0})
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("got\n%x\nwant\n%x", got, want)
		}
	})
}

// FuzzCoalesce adds a batch of packets from the input. A length precedes each packet; its top
// bit requests correct checksums, which a fuzzer would hardly find. Every packet that parses
// must leave again, either unchanged or as a segment that the reference makes of a valid run.
func FuzzCoalesce(f *testing.F) {
	rng := newRand(18)
	pack := func(packets ...[]byte) (out []byte) {
		for _, p := range packets {
			out = append(binary.BigEndian.AppendUint16(out, uint16(len(p)|0x8000)), p...)
		}
		return out
	}
	for range 10 {
		f.Add(pack(packettest.Segments(randSuper(rng, 400), 100)...))
		a, b := packettest.Segments(randSuper(rng, 300), 100), packettest.Segments(randSuper(rng, 300), 100)
		f.Add(pack(a[0], b[0], a[1], b[1], a[2], b[2]))
	}
	h := ip4()
	h.DF = true
	f.Add(pack(flowPackets(h, make([]step, 6))...))
	f.Add(pack(flowPackets(ip6(), make([]step, 6))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := packet.Coalescer{UDP: true}
		var added [][]byte
		for len(b) > 2 {
			n := min(int(binary.BigEndian.Uint16(b)&0x7fff), len(b)-2)
			p := slices.Clone(b[2 : 2+n])
			if b[0]&0x80 != 0 {
				repair(p)
			}
			b = b[2+n:]
			var v packet.View
			err := v.Parse(p, packet.ChecksumComplete)
			if got := c.Add(p); (got == nil) != (err == nil) {
				t.Fatalf("Add returned %v, Parse %v", got, err)
			}
			if err == nil {
				added = append(added, slices.Clone(p[:v.Len()]))
			}
		}
		leaves := 0
		for i := range c.Runs() {
			r := &c.Runs()[i]
			for _, out := range expand(t, r) {
				at := slices.IndexFunc(added, func(p []byte) bool { return sameSegment(out, p) || r.Segments > 1 && equalInMeaning(out, p) })
				if at < 0 {
					t.Fatalf("no packet that was added can have become: %x", out)
				}
				added = slices.Delete(added, at, at+1)
				leaves++
			}
		}
		if len(added) > 0 {
			t.Fatalf("%d lost", len(added))
		}
	})
}

// repair corrects the checksums of a TCP or UDP packet.
func repair(b []byte) {
	p, err := packettest.Decode(b)
	if err != nil || p.FragmentOffset > 0 || len(p.Data) == 0 || p.Proto != 6 && p.Proto != 17 {
		return
	}
	fixed := packettest.Segments(b, len(p.Data))
	copy(b, fixed[0])
}

// equalInMeaning compares a segment of a run with a packet. In checksum fields 0 and 0xffff count
// as equal, because both are zero in ones' complement, and an update writes only one of them.
func equalInMeaning(got, want []byte) bool {
	return len(got) == len(want) && (sameNumber(got, want) || sameSegment(zeroSums(got), zeroSums(want)))
}

func zeroSums(b []byte) []byte {
	b = slices.Clone(b)
	at := packettest.MustDecode(b).TransportOffset + 16
	if packettest.MustDecode(b).Proto == 17 {
		at -= 10
	}
	copy(b[at:], []byte{0, 0})
	return b
}
