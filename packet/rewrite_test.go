package packet_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestChecksumMatchesReferenceAtEveryLength(t *testing.T) {
	rng := newRand(3)
	for n := range 600 {
		for _, b := range [][]byte{random(rng, n), make([]byte, n), bytes.Repeat([]byte{0xff}, n)} {
			if got, want := packet.Checksum(b, 0), packettest.InternetChecksum(b); got != want {
				t.Fatalf("%d octets: %#04x, want %#04x", n, got, want)
			}
			before := random(rng, 2*rng.IntN(8))
			sum := uint64(^packettest.InternetChecksum(before))
			if got, want := packet.Checksum(b, sum), packettest.InternetChecksum(before, b); got != want {
				t.Fatalf("%d octets behind %x: %#04x, want %#04x", n, before, got, want)
			}
		}
	}
	big := bytes.Repeat([]byte{0xff}, 1<<20)
	if got := packet.Checksum(big, 1<<48-1); got != 0 {
		t.Errorf("a megabyte of ones: %#04x, want 0", got)
	}
}

func TestChecksumPropagatesEveryCarry(t *testing.T) {
	ones := bytes.Repeat([]byte{0xff}, 16)
	for _, b := range [][]byte{
		append(slices.Clone(ones), 1, 0, 0, 0, 0, 0, 0, 0), // the sum of 64-bit words is all ones before the carry is added
		append(slices.Clone(ones), 0, 0, 0, 0, 0, 0, 0, 1),
	} {
		if got, want := packet.Checksum(b, 0), packettest.InternetChecksum(b); got != want {
			t.Errorf("% x: %#04x, want %#04x", b, got, want)
		}
	}
	for shift := range 48 {
		for _, base := range []uint64{0, 0xffff, 0x1ffff, 0xffffffff, 0x1ffffffff, 1<<48 - 1} {
			for _, sum := range []uint64{base, base + 1<<shift, base - 1<<shift, 1<<shift - 1} {
				sum &= 1<<48 - 1
				want := ^uint16(sum % 0xffff)
				if sum > 0 && sum%0xffff == 0 {
					want = 0
				}
				if got := packet.Checksum(nil, sum); got != want {
					t.Errorf("%#x: %#04x, want %#04x", sum, got, want)
				}
			}
		}
	}
}

// rewriting is one change to a packet, together with the values that undo it.
type rewriting struct {
	src, dst         netip.Addr
	srcPort, dstPort uint16
	id               uint16
}

func (r rewriting) apply(v *packet.View) (undo rewriting) {
	undo = rewriting{v.Src(), v.Dst(), v.SrcPort(), v.DstPort(), v.ICMPID()}
	v.SetSrc(r.src)
	v.SetDst(r.dst)
	v.SetSrcPort(r.srcPort)
	v.SetDstPort(r.dstPort)
	v.SetICMPID(r.id)
	return undo
}

// After any rewriting, the reference must find all checksums correct in all three states,
// nothing else may have changed, and the reverse rewriting must restore the octets. This is
// the most important test of the package.
func TestRewritingKeepsChecksumsAndCanBeUndone(t *testing.T) {
	rng := newRand(4)
	var v packet.View
	seen := map[packet.ChecksumState]int{}
	for range 50_000 {
		b, state := sample(rng)
		before := slices.Clone(b)
		if err := v.Parse(b, state); err != nil {
			t.Fatal(err)
		}
		seen[v.Checksum()]++
		r := rewriting{randAddr(rng, !v.Is4()), randAddr(rng, !v.Is4()), word(rng), word(rng), word(rng)}
		undo := r.apply(&v)

		checks := []packettest.Checker{validIn(state), packettest.Src(r.src), packettest.Dst(r.dst)}
		if v.HasPorts() {
			checks = append(checks, packettest.Ports(r.srcPort, r.dstPort))
		}
		if v.IsICMPQuery() {
			checks = append(checks, packettest.ICMPID(r.id))
		}
		packettest.Check(t, b, checks...)
		if t.Failed() {
			t.Fatalf("before\n%s", hex.Dump(before))
		}
		undo.apply(&v)
		if !sameButZero(b, before, &v) {
			t.Fatalf("not undone\n%swant\n%s", hex.Dump(b), hex.Dump(before))
		}
	}
	for _, state := range []packet.ChecksumState{packet.ChecksumComplete, packet.ChecksumPartial, packet.ChecksumAbsent} {
		if seen[state] < 1000 {
			t.Errorf("state %d occurred only %d times", state, seen[state])
		}
	}
}

// sameButZero compares packets. Partial checksums of 0 and 0xffff count as equal, because both are
// zero in ones' complement.
func sameButZero(a, b []byte, v *packet.View) bool {
	if bytes.Equal(a, b) {
		return true
	}
	if v.Checksum() != packet.ChecksumPartial {
		return false
	}
	a, b = slices.Clone(a), slices.Clone(b)
	at := v.TransportOffset() + 16
	if v.Proto() == packet.UDP {
		at = v.TransportOffset() + 6
	}
	for _, p := range [][]byte{a, b} {
		binary.BigEndian.PutUint16(p[at:], binary.BigEndian.Uint16(p[at:])%0xffff)
	}
	return bytes.Equal(a, b)
}

// An incremental update must produce exactly the octets of a full computation. A verifier that
// sums accepts both 0 and 0xffff. But the kernel never writes 0xffff in an IPv4 header (RFC
// 1624, section 3), and in UDP 0 means "no checksum".
func TestIncrementalChecksumsEqualAFullComputation(t *testing.T) {
	rng := newRand(5)
	var v packet.View
	zeroes := 0
	for range 30_000 {
		h, body := randIP(rng, rng.IntN(2) == 0), randBody(rng)
		to := h
		to.Src, to.Dst = randAddr(rng, h.Src.Is6()), randAddr(rng, h.Src.Is6())
		if udp, ok := body.(packettest.UDP); ok && !udp.NoChecksum { // half of the sums become corner values
			b := packettest.Build(to, udp)
			p := packettest.MustDecode(b)
			check := binary.BigEndian.Uint16(p.Transport[6:])
			udp.DstPort = ^packettest.InternetChecksum(binary.BigEndian.AppendUint16(nil, udp.DstPort), binary.BigEndian.AppendUint16(nil, check))
			body = udp
		}
		got, want := packettest.Build(h, body), packettest.Build(to, body)
		if err := v.Parse(got, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		v.SetDst(to.Dst)
		v.SetSrc(to.Src)
		if !bytes.Equal(got, want) {
			t.Fatalf("got\n%swant\n%s", hex.Dump(got), hex.Dump(want))
		}
		if p := packettest.MustDecode(got); p.Proto == 17 && binary.BigEndian.Uint16(p.Transport[6:]) == 0xffff {
			zeroes++
		}
	}
	if zeroes < 100 {
		t.Errorf("the UDP checksum 0xffff occurred only %d times", zeroes)
	}
}

// Many pairs of old and new word are tested with every special checksum value (RFC 1624,
// equation 3).
func TestPortUpdateIsCorrectForEveryChecksum(t *testing.T) {
	var v packet.View
	b := packettest.Build(ip4(), packettest.TCP{SrcPort: 1, DstPort: 2})
	for old := range 1 << 16 { // the checksum takes each value once
		new := []uint16{0, 1, 0x8000, 0xffff, ^uint16(old)}[old%5]
		copy(b, packettest.Build(ip4(), packettest.TCP{SrcPort: uint16(old), DstPort: 2}))
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		v.SetSrcPort(new)
		if want := packettest.Build(ip4(), packettest.TCP{SrcPort: new, DstPort: 2}); !bytes.Equal(b, want) {
			t.Fatalf("%#04x to %#04x: got %x want %x", old, new, b, want)
		}
	}
}

func TestPartialChecksumChangesOnlyWithAddresses(t *testing.T) {
	b := packettest.Partial(packettest.Build(ip4(), packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.SYN, Options: []byte{2, 4, 5, 180}}))
	v := parse(t, b, packet.ChecksumPartial)
	field := func() uint16 { return binary.BigEndian.Uint16(b[36:]) }
	start := field()
	v.SetSrcPort(40000)
	v.SetDstPort(40001)
	if !v.ClampMSS(1000) || field() != start {
		t.Errorf("checksum %#04x became %#04x by a change that the pseudo-header does not cover", start, field())
	}
	v.SetSrc(addr("10.99.0.1"))
	if field() == start {
		t.Error("checksum did not follow the address")
	}
	packettest.Check(t, b, packettest.PartialChecksum(), packettest.Ports(40000, 40001))
}

// The transport checksum in a first fragment covers the whole datagram. So the test cuts a
// datagram, rewrites each fragment, joins them and verifies the checksum.
func TestRewrittenFragmentsJoinToAValidDatagram(t *testing.T) {
	rng := newRand(6)
	for range 2000 {
		v6 := rng.IntN(2) == 0
		h := randIP(rng, v6)
		h.DF = false
		h.Options, h.Extensions = nil, nil
		body := []packettest.Body{
			packettest.TCP{SrcPort: 5, DstPort: 6, Data: random(rng, 200)},
			packettest.UDP{SrcPort: 5, DstPort: 6, Data: random(rng, 200)},
			packettest.Echo{ID: 5, Data: random(rng, 200)},
		}[rng.IntN(3)]
		src, dst, id := randAddr(rng, v6), randAddr(rng, v6), word(rng)
		var data []byte
		for _, f := range packettest.Fragments(packettest.Build(h, body), 8*(3+rng.IntN(10)), 1) {
			v := parse(t, f, packet.ChecksumComplete)
			rewriting{src, dst, id, 6, id}.apply(v)
			packettest.Check(t, f, packettest.ValidChecksums(), packettest.Src(src), packettest.Dst(dst))
			data = append(data, f[v.TransportOffset():]...)
		}
		h.Src, h.Dst = src, dst
		switch b := body.(type) {
		case packettest.TCP:
			b.SrcPort = id
			body = b
		case packettest.UDP:
			b.SrcPort = id
			body = b
		case packettest.Echo:
			b.ID = id
			body = b
		}
		if want := packettest.MustDecode(packettest.Build(h, body)).Transport; !bytes.Equal(data, want) {
			t.Fatalf("got\n%swant\n%s", hex.Dump(data), hex.Dump(want))
		}
	}
}

func TestSettersIgnoreMissingFields(t *testing.T) {
	for _, b := range [][]byte{
		packettest.Build(ip4(), packettest.Raw{Proto: 132, Data: make([]byte, 12)}),
		packettest.Fragments(packettest.Build(ip4(), packettest.UDP{Data: make([]byte, 40)}), 24, 1)[1],
		packettest.Build(ip4(), packettest.ICMPError{Type: 3, Quote: make([]byte, 28)}),
	} {
		before := slices.Clone(b)
		v := parse(t, b, packet.ChecksumComplete)
		v.SetSrcPort(1)
		v.SetDstPort(2)
		v.SetICMPID(3)
		v.CompleteChecksum()
		if v.ClampMSS(100) || !bytes.Equal(b, before) {
			t.Errorf("changed\n%s", hex.Dump(b))
		}
	}
}

func TestAddressOfTheOtherFamilyPanicsBeforeAnyWrite(t *testing.T) {
	for _, c := range []struct {
		b []byte
		a netip.Addr
	}{{packettest.Build(ip4(), packettest.UDP{}), addr("fd00::1")}, {packettest.Build(ip6(), packettest.UDP{}), addr("10.0.0.1")}} {
		before := slices.Clone(c.b)
		v := parse(t, c.b, packet.ChecksumComplete)
		for _, set := range []func(netip.Addr){v.SetSrc, v.SetDst} {
			func() {
				defer func() {
					if recover() == nil || !bytes.Equal(c.b, before) {
						t.Errorf("%v written into %x", c.a, before)
					}
				}()
				set(c.a)
			}()
		}
	}
}

func TestCompleteChecksumCompletesAPartialChecksum(t *testing.T) {
	rng := newRand(7)
	for range 5000 {
		v6 := rng.IntN(2) == 0
		h := randIP(rng, v6)
		var body packettest.Body = packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: random(rng, rng.IntN(100))}
		if rng.IntN(2) == 0 {
			body = packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Flags: packettest.ACK, Data: random(rng, rng.IntN(100))}
		}
		b := packettest.Partial(packettest.Build(h, body))
		v := parse(t, b, packet.ChecksumPartial)
		h.Src = randAddr(rng, v6)
		v.SetSrc(h.Src)
		v.CompleteChecksum()
		if want := packettest.Build(h, body); !bytes.Equal(b, want) || v.Checksum() != packet.ChecksumComplete {
			t.Fatalf("got\n%swant\n%s", hex.Dump(b), hex.Dump(want))
		}
		v.CompleteChecksum() // a second call changes nothing
		packettest.Check(t, b, packettest.ValidChecksums())
	}
}

func TestCompletedUDPChecksumIsNeverZero(t *testing.T) {
	u := packettest.UDP{SrcPort: 1, DstPort: 2, Data: []byte{0, 0}}
	b := packettest.Build(ip4(), u)
	u.Data = b[26:28] // makes the sum 0xffff and the checksum 0
	b = packettest.Partial(packettest.Build(ip4(), u))
	parse(t, b, packet.ChecksumPartial).CompleteChecksum()
	if got := binary.BigEndian.Uint16(b[26:]); got != 0xffff {
		t.Errorf("checksum %#04x", got)
	}
}

func TestClampMSSLowersOnlyLargerMSSOptions(t *testing.T) {
	const syn, synAck = packettest.SYN, packettest.SYN | packettest.ACK
	for _, c := range []struct {
		name    string
		flags   uint8
		options []byte
		mss     uint16
		want    []byte // options after the call; nil: unchanged
	}{
		{"lowered", syn, []byte{2, 4, 5, 180}, 1360, []byte{2, 4, 5, 80}},
		{"lowered in SYN ACK", synAck, []byte{2, 4, 5, 180}, 1360, []byte{2, 4, 5, 80}},
		{"never raised", syn, []byte{2, 4, 5, 80}, 1361, nil},
		{"equal", syn, []byte{2, 4, 5, 80}, 1360, nil},
		{"no SYN", packettest.ACK, []byte{2, 4, 5, 180}, 1360, nil},
		{"no limit", syn, []byte{2, 4, 5, 180}, 0, nil},
		{"no MSS option", syn, []byte{1, 1, 4, 2}, 1360, nil},
		{"no options", syn, nil, 1360, nil},
		{"at an odd offset", syn, []byte{1, 2, 4, 5, 180, 1, 4, 2}, 1360, []byte{1, 2, 4, 5, 80, 1, 4, 2}},
		{"after other options", syn, []byte{4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7, 2, 4, 255, 255}, 1360,
			[]byte{4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7, 2, 4, 5, 80}},
		{"both of two options", syn, []byte{2, 4, 5, 180, 2, 4, 5, 181}, 1360, []byte{2, 4, 5, 80, 2, 4, 5, 80}},
		{"not after the end of options", syn, []byte{0, 2, 4, 5, 180, 0, 0, 0}, 1360, nil},
		{"option of wrong length", syn, []byte{2, 3, 5, 1, 1, 1, 1, 1}, 100, nil},
		{"after a malformed option", syn, []byte{8, 1, 2, 4, 5, 180, 1, 1}, 1360, nil},
		{"after an option that exceeds the header", syn, []byte{8, 9, 2, 4, 5, 180, 1, 1}, 1360, nil},
		{"cut off", syn, []byte{1, 1, 1, 2}, 1360, nil},
		{"cut off in its value", syn, []byte{1, 2, 4, 5}, 1360, nil},
	} {
		for _, h := range []packettest.IP{ip4(), ip6()} {
			b := packettest.Build(h, packettest.TCP{SrcPort: 1, DstPort: 2, Flags: c.flags, Options: c.options, Data: []byte("x")})
			want := c.options
			if c.want != nil {
				want = c.want
			}
			if got := parse(t, b, packet.ChecksumComplete).ClampMSS(c.mss); got != (c.want != nil) {
				t.Errorf("%s: %t", c.name, got)
			}
			if p := packettest.MustDecode(b); !bytes.Equal(p.TCPOptions, want) {
				t.Errorf("%s: %v, want %v", c.name, p.TCPOptions, want)
			}
			packettest.Check(t, b, packettest.ValidChecksums())
		}
	}
}

func TestRewritingDoesNotAllocate(t *testing.T) {
	for _, b := range [][]byte{benchTCP(false, 0, 1, 1, packettest.SYN, 100), benchTCP(true, 0, 1, 1, packettest.SYN, 100)} {
		var v packet.View
		bad := slices.Clone(b[:30])
		a := packettest.MustDecode(b).Dst
		if n := testing.AllocsPerRun(1000, func() {
			if v.Parse(bad, packet.ChecksumComplete) == nil || v.Parse(b, packet.ChecksumComplete) != nil {
				t.Fatal("parse")
			}
			v.SetSrc(a)
			v.SetDst(v.Src())
			v.SetSrcPort(v.SrcPort() + 1)
			v.ClampMSS(1000)
			v.ValidChecksums()
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// The whole message becomes zero. This is the one sum that an incremental update cannot
// distinguish from 0xffff.
func TestSetICMPIDKeepsTheChecksumOfAnAllZeroEchoReply(t *testing.T) {
	for _, data := range [][]byte{nil, make([]byte, 5)} {
		b := packettest.Build(ip4(), packettest.Echo{Reply: true, ID: 7, Data: data})
		parse(t, b, packet.ChecksumComplete).SetICMPID(0)
		packettest.Check(t, b, packettest.ICMPID(0), packettest.ValidChecksums())
		parse(t, b, packet.ChecksumComplete).SetICMPID(7)
		packettest.Check(t, b, packettest.ICMPID(7), packettest.ValidChecksums())
	}
}

// The checksums of UDP-Lite and DCCP cover the pseudo-header and a part of the packet that the
// header specifies. Here this part is the first octets, or everything.
func TestRewriteKeepsTheChecksumOfUDPLiteAndDCCP(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for _, h := range []packettest.IP{ip4(), ip6()} {
		for _, proto := range []uint8{packet.UDPLite, packet.DCCP} {
			for _, covered := range []int{16, 57} {
				data := make([]byte, 57)
				for i := range data {
					data[i] = byte(rng.Uint32())
				}
				coverage := covered % 57 // 0 means everything
				if proto == packet.UDPLite {
					data[4], data[5] = 0, byte(coverage)
				} else {
					data[4], data[5] = 3, byte(coverage/4+1-3)&15 // the data offset is 3 words
					if coverage == 0 {
						data[5] = 0
					}
				}
				data[6], data[7] = 0, 0
				sum := packettest.InternetChecksum(pseudo(h.Src, h.Dst, proto, len(data)), data[:covered])
				data[6], data[7] = byte(sum>>8), byte(sum)
				b := packettest.Build(h, packettest.Raw{Proto: proto, Data: data})
				v := parse(t, b, packet.ChecksumComplete)
				if !v.ValidChecksums() {
					t.Fatalf("protocol %d, %d octets covered: not valid as built", proto, covered)
				}
				src, dst := h.Dst, h.Src.Next()
				v.SetSrc(src)
				v.SetDst(dst)
				got := b[v.TransportOffset():]
				if packettest.InternetChecksum(pseudo(src, dst, proto, len(data)), got[:covered]) != 0 || !v.ValidChecksums() {
					t.Errorf("protocol %d, %d octets covered: the checksum did not follow", proto, covered)
				}
			}
		}
	}
}

func pseudo(src, dst netip.Addr, proto uint8, size int) []byte {
	b := append(src.AsSlice(), dst.AsSlice()...)
	if src.Is4() {
		return append(b, 0, proto, byte(size>>8), byte(size))
	}
	return append(b, 0, 0, byte(size>>8), byte(size), 0, 0, 0, proto)
}
