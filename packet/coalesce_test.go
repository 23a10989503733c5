package packet_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// whole returns the packet that the TUN receives for a run, without the virtio header.
func whole(r *packet.Run) []byte {
	return slices.Concat(append([][]byte{r.View.Bytes()}, r.Tail...)...)
}

// coalesce adds copies of the packets and returns the runs.
func coalesce(t testing.TB, c *packet.Coalescer, packets ...[]byte) []packet.Run {
	t.Helper()
	c.Reset()
	for _, p := range packets {
		if err := c.Add(slices.Clone(p)); err != nil {
			t.Fatalf("%v\n%s", err, hex.Dump(p))
		}
	}
	return c.Runs()
}

// expand returns the packets that a network card makes of a run. It also checks the run with
// the reference.
func expand(t testing.TB, r *packet.Run) [][]byte {
	t.Helper()
	b := whole(r)
	if r.View.Len() != len(b) || r.Segments != len(r.Tail)+1 {
		t.Fatalf("Len %d of %d octets, %d segments with a tail of %d", r.View.Len(), len(b), r.Segments, len(r.Tail))
	}
	if r.Segments == 1 {
		if r.Header != (packet.VirtioHeader{}) || r.View.Checksum() == packet.ChecksumPartial {
			t.Fatalf("single packet with %+v", r.Header)
		}
		return [][]byte{b}
	}
	packettest.Check(t, b, packettest.PartialChecksum())
	v := parse(t, b, r.Header.ChecksumState())
	size, err := r.Header.Validate(v)
	if err != nil || size == 0 || int(r.Header.HdrLen) != v.PayloadOffset() || r.View.Checksum() != packet.ChecksumPartial {
		t.Fatalf("%v: %+v\n%s", err, r.Header, hex.Dump(b))
	}
	out := packettest.Segments(b, size)
	if len(out) != r.Segments {
		t.Fatalf("%d segments come out of a run of %d", len(out), r.Segments)
	}
	return out
}

func TestCoalesceUndoesSegment(t *testing.T) {
	rng := newRand(13)
	c := packet.Coalescer{UDP: true}
	for range 2000 {
		h := randIP(rng, rng.IntN(2) == 0)
		h.Options, h.Extensions = nil, nil
		n := 2 + rng.IntN(40)
		size := 1 + rng.IntN(1400)
		data := random(rng, size*(n-1)+1+rng.IntN(size))
		var body packettest.Body = packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: data}
		kind := uint8(5)
		if rng.IntN(2) == 0 {
			flags := [...]uint8{packettest.ACK, packettest.ACK | packettest.PSH, packettest.ACK | packettest.ECE}[rng.IntN(3)]
			body = packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Seq: rng.Uint32(), Ack: rng.Uint32(), Flags: flags, Window: word(rng),
				Options: timestamps[:rng.IntN(2)*12], Data: data}
			kind = 1
			if h.Src.Is6() {
				kind = 4
			}
		}
		super := packettest.Partial(packettest.Build(h, body))
		runs := coalesce(t, &c, segments(t, super, size)...)
		if len(runs) != 1 {
			t.Fatalf("%d runs of %d segments", len(runs), n)
		}
		expand(t, &runs[0])
		got, want := runs[0].Header, packet.VirtioHeader{Flags: 1, GSOType: kind, HdrLen: uint16(runs[0].View.PayloadOffset()), GSOSize: uint16(size),
			CsumStart: uint16(runs[0].View.TransportOffset()), CsumOffset: 16}
		if kind == 5 {
			want.CsumOffset = 6
		}
		if b := whole(&runs[0]); !bytes.Equal(b, super) && !sameButZero(b, super, &runs[0].View) || got != want {
			t.Fatalf("got %+v\n%swant %+v\n%s", got, hex.Dump(b[:80]), want, hex.Dump(super[:80]))
		}
	}
}

// Every packet that was added must leave, and the packets of each flow must keep their order.
// Packets of different flows may change places.
func TestCoalesceKeepsEveryPacketAndTheOrderOfEachFlow(t *testing.T) {
	rng := newRand(14)
	c := packet.Coalescer{UDP: true}
	type state struct {
		seq uint32
		id  uint16
	}
	joined := 0
	for range 600 {
		flows := make([]state, 1+rng.IntN(80))
		var packets [][]byte
		for range 128 {
			n := rng.IntN(len(flows))
			f := &flows[n]
			h := header(n%3 == 0, n, f.id)
			size := 100
			if rng.IntN(8) == 0 {
				size = rng.IntN(140)
			}
			flags := uint8(packettest.ACK)
			switch rng.IntN(16) {
			case 0:
				flags = uint8(rng.Uint32())
			case 1:
				f.seq += 17
			case 2:
				h.TTL = 9
			case 3:
				f.id += 3
				h.ID = f.id
			case 4:
				h.Options, h.Extensions = []byte{1, 1, 1, 1}, []packettest.Extension{{Kind: 60}}
			}
			var body packettest.Body = packettest.TCP{SrcPort: 5, DstPort: uint16(n), Seq: f.seq, Flags: flags, Window: uint16(rng.IntN(20) / 19), Data: random(rng, size)}
			if n%4 == 0 {
				body = packettest.UDP{SrcPort: 5, DstPort: uint16(n), Data: random(rng, size), NoChecksum: rng.IntN(16) == 0}
			}
			b := packettest.Build(h, body)
			switch rng.IntN(30) {
			case 0:
				b[len(b)-1] ^= 1 // makes the checksum wrong
			case 1:
				if h.Options == nil {
					b = packettest.Fragments(b, 64, 3)[rng.IntN(2)%len(packettest.Fragments(b, 64, 3))]
				}
			}
			f.seq += uint32(size)
			f.id++
			packets = append(packets, b)
		}
		type flow struct {
			src      string
			dst      uint16
			ports    bool
			tcp      bool
			fragment bool
		}
		perFlow := map[flow][][]byte{}
		key := func(b []byte) flow {
			p := packettest.MustDecode(b)
			if p.FragmentOffset > 0 {
				return flow{src: p.Src.String(), fragment: true}
			}
			return flow{src: p.Src.String(), dst: p.DstPort, ports: true, tcp: p.Proto == 6}
		}
		for _, b := range packets {
			perFlow[key(b)] = append(perFlow[key(b)], b)
		}
		for _, r := range coalesce(t, &c, packets...) {
			for _, b := range expand(t, &r) {
				k := key(b)
				if len(perFlow[k]) == 0 || !sameSegment(b, perFlow[k][0]) {
					t.Fatalf("out of order, changed or added\n%s", hex.Dump(b))
				}
				perFlow[k] = perFlow[k][1:]
			}
			joined += r.Segments - 1
		}
		for k, left := range perFlow {
			if len(left) > 0 {
				t.Fatalf("%v lost %d packets", k, len(left))
			}
		}
	}
	if joined < 1000 {
		t.Errorf("only %d packets were joined", joined)
	}
}

// sameSegment compares packets. The identification of IPv4 packets with DF may differ:
// segmentation counts it up, and it has no meaning with DF (RFC 6864). The reference has
// verified the checksums of got.
func sameSegment(got, want []byte) bool {
	if bytes.Equal(got, want) {
		return true
	}
	p, err := packettest.Decode(got)
	if err != nil || !p.Src.Is4() || !p.DF || len(got) != len(want) {
		return false
	}
	a, b := slices.Clone(got), slices.Clone(want)
	for _, x := range [][]byte{a, b} {
		copy(x[4:6], []byte{0, 0})
		copy(x[10:12], []byte{0, 0})
	}
	return bytes.Equal(a, b)
}

// step describes a packet of one flow. Zero fields are those of an ordinary next segment.
type step struct {
	ip    func(*packettest.IP)
	tcp   func(*packettest.TCP)
	bytes func([]byte) []byte
	size  int // octets of data; 0 means 100, a negative value none
}

// flowPackets builds the packets of a flow. Sequence numbers and identifications advance like
// those of a sender.
func flowPackets(h packettest.IP, steps []step) [][]byte {
	seq := uint32(1000)
	var out [][]byte
	for i, s := range steps {
		size := max(0, s.size)
		if s.size == 0 {
			size = 100
		}
		ip := h
		ip.ID += uint16(i)
		body := packettest.TCP{SrcPort: 1, DstPort: 2, Seq: seq, Ack: 9, Flags: packettest.ACK, Window: 500, Options: timestamps, Data: bytes.Repeat([]byte{byte(i)}, size)}
		seq += uint32(size)
		if s.ip != nil {
			s.ip(&ip)
		}
		if s.tcp != nil {
			s.tcp(&body)
		}
		b := packettest.Build(ip, body)
		if s.bytes != nil {
			b = s.bytes(b)
		}
		out = append(out, b)
	}
	return out
}

func TestCoalesceStopsWhereTheKernelDoes(t *testing.T) {
	ip := func(f func(*packettest.IP)) step { return step{ip: f} }
	tcp := func(f func(*packettest.TCP)) step { return step{tcp: f} }
	flags := func(n uint8) step { return tcp(func(s *packettest.TCP) { s.Flags = n }) }
	plain := step{}
	router := ip(func(h *packettest.IP) {
		h.Options, h.Extensions = []byte{148, 4, 0, 0}, []packettest.Extension{{Kind: 60}}
	})
	shift := tcp(func(s *packettest.TCP) { s.Seq += 5 })
	for _, c := range []struct {
		name   string
		v6, v4 bool // if only one is set, the case is for this family only
		steps  []step
		want   []int // number of segments of each run
	}{
		{"plain", true, true, []step{plain, plain, plain}, []int{3}},
		{"short segment ends a run", true, true, []step{plain, plain, {size: 99}, plain, plain}, []int{3, 2}},
		{"longer segment starts another", true, true, []step{plain, plain, {size: 101}, {size: 101}}, []int{2, 2}},
		{"PSH ends a run", true, true, []step{plain, flags(packettest.ACK | packettest.PSH), plain, plain}, []int{2, 2}},
		{"PSH on the first packet", true, true, []step{flags(packettest.ACK | packettest.PSH), plain, plain}, []int{1, 2}},
		{"pure ACK stays alone and closes", true, true, []step{plain, {size: -1}, plain, plain}, []int{1, 1, 2}},
		{"FIN", true, true, []step{plain, flags(packettest.ACK | packettest.FIN), plain}, []int{1, 1, 1}},
		{"SYN", true, true, []step{plain, flags(packettest.ACK | packettest.SYN), plain}, []int{1, 1, 1}},
		{"RST", true, true, []step{plain, flags(packettest.ACK | packettest.RST), plain}, []int{1, 1, 1}},
		{"URG", true, true, []step{plain, flags(packettest.ACK | packettest.URG), plain}, []int{1, 1, 1}},
		{"CWR", true, true, []step{plain, flags(packettest.ACK | packettest.CWR), plain}, []int{1, 1, 1}},
		{"no ACK", true, true, []step{plain, flags(0), plain}, []int{1, 1, 1}},
		{"ECE on one", true, true, []step{plain, flags(packettest.ACK | packettest.ECE), plain}, []int{1, 1, 1}},
		{"ECE on all", true, true, []step{flags(packettest.ACK | packettest.ECE), flags(packettest.ACK | packettest.ECE)}, []int{2}},
		{"gap", true, true, []step{plain, shift, plain}, []int{1, 1, 1}},
		{"acknowledgement", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.Ack++ }), plain}, []int{1, 1, 1}},
		{"window", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.Window++ }), plain}, []int{1, 1, 1}},
		{"urgent pointer", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.Urgent++ }), plain}, []int{1, 1, 1}},
		{"timestamp", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.Options = slices.Concat(s.Options[:11], []byte{99}) }), plain}, []int{1, 1, 1}},
		{"fewer options", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.Options = nil }), plain}, []int{1, 1, 1}},
		{"other port is another flow", true, true, []step{plain, tcp(func(s *packettest.TCP) { s.DstPort++; s.Seq -= 100 }), tcp(func(s *packettest.TCP) { s.Seq -= 100 })}, nil},
		{"TTL", true, true, []step{plain, ip(func(h *packettest.IP) { h.TTL = 63 }), plain}, []int{1, 1, 1}},
		{"type of service", true, true, []step{plain, ip(func(h *packettest.IP) { h.TOS = 4 }), plain}, []int{1, 1, 1}},
		{"flow label", true, false, []step{plain, ip(func(h *packettest.IP) { h.FlowLabel = 4 }), plain}, []int{1, 1, 1}},
		{"extension header", true, false, []step{plain, ip(func(h *packettest.IP) { h.Extensions = []packettest.Extension{{Kind: 60}} }), plain}, []int{1, 1, 1}},
		{"options", false, true, []step{plain, ip(func(h *packettest.IP) { h.Options = []byte{1, 1, 1, 1} }), plain}, []int{1, 1, 1}},
		{"options on all", false, true, []step{router, router}, []int{1, 1}},
		{"extension header on all", true, false, []step{router, router}, []int{1, 1}},
		{"DF on one", false, true, []step{plain, ip(func(h *packettest.IP) { h.DF = false }), plain}, []int{1, 1, 1}},
		{"DF on none", false, true, []step{ip(func(h *packettest.IP) { h.DF = false }), ip(func(h *packettest.IP) { h.DF = false })}, []int{2}},
		{"identification jumps", false, true, []step{plain, ip(func(h *packettest.IP) { h.ID = 99 }), plain}, []int{1, 1, 1}},
		{"identification fixed with DF", false, true, []step{plain, ip(func(h *packettest.IP) { h.ID-- }), ip(func(h *packettest.IP) { h.ID -= 2 })}, []int{3}},
		{"identification fixed, then not", false, true, []step{plain, ip(func(h *packettest.IP) { h.ID-- }), ip(func(h *packettest.IP) { h.ID-- })}, []int{2, 1}},
		{"identification counts, then not", false, true, []step{plain, plain, ip(func(h *packettest.IP) { h.ID -= 2 })}, []int{2, 1}},
		{"identification fixed without DF", false, true, []step{ip(func(h *packettest.IP) { h.DF = false }), ip(func(h *packettest.IP) { h.DF = false; h.ID-- })}, []int{1, 1}},
		{"wrong transport checksum", true, true, []step{plain, plain, {bytes: func(b []byte) []byte { b[len(b)-1] ^= 1; return b }}, plain, plain}, []int{2, 1, 2}},
		{"wrong checksum in the first", true, true, []step{{bytes: func(b []byte) []byte { b[len(b)-1] ^= 1; return b }}, plain, plain}, []int{1, 2}},
		{"wrong header checksum", false, true, []step{plain, {bytes: func(b []byte) []byte { b[10] ^= 1; return b }}, plain, plain}, []int{1, 1, 2}},
		{"fragment between", true, true, []step{plain, plain, {bytes: func(b []byte) []byte { return packettest.Fragments(b, 64, 3)[1] }},
			tcp(func(s *packettest.TCP) { s.Seq -= 100 })}, []int{2, 1, 1}},
	} {
		for _, v6 := range []bool{false, true} {
			if v6 && !c.v6 || !v6 && !c.v4 {
				continue
			}
			h := ip4()
			h.DF, h.ID = true, 40
			if v6 {
				h = ip6()
			}
			packets := flowPackets(h, c.steps)
			var co packet.Coalescer
			runs := coalesce(t, &co, packets...)
			var got []int
			var out [][]byte
			for i := range runs {
				got = append(got, runs[i].Segments)
				out = append(out, expand(t, &runs[i])...)
			}
			if c.want == nil {
				continue // another test checks the order between flows
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%s, IPv6 %t: runs of %v, want %v", c.name, v6, got, c.want)
			}
			for i := range packets {
				if i >= len(out) || !sameSegment(out[i], packets[i]) {
					t.Errorf("%s, IPv6 %t: packet %d differs", c.name, v6, i)
					break
				}
			}
		}
	}
}

func TestCoalesceKeepsInterleavedFlowsOpen(t *testing.T) {
	var packets [][]byte
	for i := range 4 {
		for flow := range 30 {
			packets = append(packets, benchTCP(flow%2 == 0, flow, uint32(1+i*500), uint16(i), packettest.ACK, 500))
		}
	}
	var c packet.Coalescer
	runs := coalesce(t, &c, packets...)
	if len(runs) != 30 {
		t.Fatalf("%d runs", len(runs))
	}
	for i := range runs {
		if out := expand(t, &runs[i]); len(out) != 4 || !bytes.Equal(out[0], packets[i]) {
			t.Errorf("run %d: %d segments", i, len(out))
		}
	}
}

// The two flows have equal tags: bit 4 of the source address and bit 0 of the destination port
// affect the same bit of the tag.
func TestCoalesceSeparatesFlowsWithEqualTags(t *testing.T) {
	h, s := ip4(), packettest.TCP{SrcPort: 5, DstPort: 80, Seq: 1, Flags: packettest.ACK, Data: make([]byte, 10)}
	h.DF, h.Src = true, addr("10.1.0.1")
	one := packettest.Build(h, s)
	s.Seq = 11
	h.ID = 1
	two := packettest.Build(h, s)
	h.Src, s.DstPort = addr("10.1.0.17"), 81
	twin := packettest.Build(h, s)
	var c packet.Coalescer
	runs := coalesce(t, &c, one, twin, two)
	if len(runs) != 2 || !bytes.Equal(whole(&runs[1]), twin) {
		t.Fatalf("%d runs", len(runs))
	}
	if out := expand(t, &runs[0]); len(out) != 2 || !bytes.Equal(out[1], two) {
		t.Errorf("%x", out)
	}
}

func TestCoalesceKeepsEveryPacketOfMoreFlowsThanFit(t *testing.T) {
	var packets [][]byte
	for i := range 2 {
		for flow := range 200 {
			packets = append(packets, benchTCP(false, flow, uint32(1+i*50), uint16(i), packettest.ACK, 50))
		}
	}
	var c packet.Coalescer
	total := 0
	for _, r := range coalesce(t, &c, packets...) {
		total += len(expand(t, &r))
	}
	if total != 400 {
		t.Errorf("%d packets of 400", total)
	}
}

func TestCoalesceStopsAtSixtyFourKilobytes(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		var packets [][]byte
		for i := range 60 {
			packets = append(packets, benchTCP(v6, 0, uint32(1+i*1368), uint16(i), packettest.ACK, 1368))
		}
		var c packet.Coalescer
		runs := coalesce(t, &c, packets...)
		if len(runs) != 2 || runs[0].View.Len() > 65535 || runs[0].View.Len() < 65535-1368 {
			t.Errorf("%d runs, the first of %d octets", len(runs), runs[0].View.Len())
		}
		for i := range runs {
			expand(t, &runs[i])
		}
	}
}

func TestCoalesceJoinsUDPOnlyIfEnabled(t *testing.T) {
	datagrams := func(n, size int) (out [][]byte) {
		for i := range n {
			h := ip4()
			h.ID = uint16(i)
			out = append(out, packettest.Build(h, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, size)}))
		}
		return out
	}
	var c packet.Coalescer
	if runs := coalesce(t, &c, datagrams(3, 100)...); len(runs) != 3 {
		t.Errorf("switched off: %d runs", len(runs))
	}
	c.UDP = true
	runs := coalesce(t, &c, datagrams(70, 100)...)
	if len(runs) != 2 || runs[0].Segments != 64 || runs[0].Header.GSOType != packet.GSOUDPL4 {
		t.Errorf("switched on: %d runs, the first of %d", len(runs), runs[0].Segments)
	}
	none := packettest.Build(ip4(), packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 9), NoChecksum: true})
	if runs := coalesce(t, &c, none, none, none); len(runs) != 3 {
		t.Errorf("without checksum: %d runs", len(runs))
	}
	if runs := coalesce(t, &c, datagrams(3, 0)...); len(runs) != 3 {
		t.Errorf("without data: %d runs", len(runs))
	}
}

func TestRewritingARunRewritesItsSegments(t *testing.T) {
	rng := newRand(15)
	for _, v6 := range []bool{false, true} {
		var packets, want [][]byte
		for i := range 10 {
			packets = append(packets, benchTCP(v6, 0, uint32(1+i*100), uint16(i), packettest.ACK, 100))
		}
		var c packet.Coalescer
		runs := coalesce(t, &c, packets...)
		to := rewriting{randAddr(rng, v6), randAddr(rng, v6), 1234, 4321, 0}
		to.apply(&runs[0].View)
		if !runs[0].View.ValidChecksums() {
			t.Error("partial checksum of the run called wrong")
		}
		before := whole(&runs[0])
		runs[0].View.CompleteChecksum() // does nothing, because it cannot see the other segments
		if !bytes.Equal(whole(&runs[0]), before) {
			t.Error("checksum of a run completed out of its first packet")
		}
		for _, p := range packets {
			to.apply(parse(t, p, packet.ChecksumComplete))
			want = append(want, p)
		}
		for i, got := range expand(t, &runs[0]) {
			if !bytes.Equal(got, want[i]) {
				t.Fatalf("segment %d\n%swant\n%s", i, hex.Dump(got), hex.Dump(want[i]))
			}
		}
		var s packet.Segmenter
		if err := s.Reset(&runs[0].View, 100); !errors.Is(err, packet.ErrGSO) {
			t.Errorf("head of a run given to the segmenter: %v", err)
		}
	}
}

func TestCoalescerRefusesUnparsablePackets(t *testing.T) {
	var c packet.Coalescer
	good := benchTCP(false, 0, 1, 1, packettest.ACK, 10)
	if err := c.Add(good[:30]); !errors.Is(err, packet.ErrTruncated) || len(c.Runs()) != 0 {
		t.Errorf("%v, %d runs", err, len(c.Runs()))
	}
	if err := c.Add(good); err != nil || len(c.Runs()) != 1 {
		t.Errorf("%v, %d runs", err, len(c.Runs()))
	}
}

func TestCoalescerStartsNewRunsAfterRuns(t *testing.T) {
	var c packet.Coalescer
	for i := range 4 {
		if err := c.Add(benchTCP(false, 0, uint32(1+i*10), uint16(i), packettest.ACK, 10)); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			c.Runs()
		}
	}
	runs := c.Runs()
	if len(runs) != 2 {
		t.Fatalf("%d runs", len(runs))
	}
	for i := range runs {
		if out := expand(t, &runs[i]); binary.BigEndian.Uint32(out[0][24:]) != uint32(1+i*20) {
			t.Errorf("run %d starts with %x", i, out[0])
		}
	}
}

func TestCoalescerStartsNewRunsAfterReset(t *testing.T) {
	var c packet.Coalescer
	one, two := benchTCP(false, 0, 1, 1, packettest.ACK, 10), benchTCP(false, 0, 11, 2, packettest.ACK, 10)
	coalesce(t, &c, one)
	if runs := coalesce(t, &c, two); len(runs) != 1 || runs[0].Segments != 1 {
		t.Error("a packet joined a run of the batch before")
	}
}

func TestCoalescingDoesNotAllocate(t *testing.T) {
	c := packet.Coalescer{UDP: true}
	var packets, spare [][]byte
	for i := range 128 {
		flow := i % 5
		packets = append(packets, benchTCP(flow == 0, flow, uint32(1+i/5*100), uint16(i/5), packettest.ACK, 100))
		spare = append(spare, make([]byte, len(packets[i])))
	}
	if n := testing.AllocsPerRun(100, func() {
		c.Reset()
		for i, p := range packets {
			copy(spare[i], p)
			if c.Add(spare[i]) != nil {
				t.Fatal("add")
			}
		}
		if len(c.Runs()) != 5 {
			t.Fatal("runs")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
