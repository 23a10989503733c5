package packet_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// randSuper returns a TCP or UDP superpacket with a partial checksum.
func randSuper(rng *rand.Rand, data int) []byte {
	h := randIP(rng, rng.IntN(2) == 0)
	if rng.IntN(2) == 0 {
		return packettest.Partial(packettest.Build(h, packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: random(rng, data)}))
	}
	flags := uint8(rng.Uint32()) &^ (packettest.SYN | packettest.RST | packettest.URG)
	return packettest.Partial(packettest.Build(h, packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Seq: rng.Uint32() | 0xffff0000, Ack: rng.Uint32(),
		Flags: flags, Window: word(rng), Urgent: word(rng), Options: timestamps[:rng.IntN(2)*12], Data: random(rng, data)}))
}

func segments(t testing.TB, super []byte, size int) [][]byte {
	t.Helper()
	var s packet.Segmenter
	if err := s.Reset(parse(t, slices.Clone(super), packet.ChecksumPartial), size); err != nil {
		t.Fatal(err)
	}
	var out [][]byte
	for left := s.Remaining(); left > 0; left-- {
		if s.Remaining() != left {
			t.Fatalf("%d remain, want %d", s.Remaining(), left)
		}
		out = append(out, slices.Clone(s.Next()))
	}
	if s.Remaining() != 0 || s.Next() != nil {
		t.Fatal("Next returned more segments than Remaining")
	}
	return out
}

func TestSegmentsEqualThoseOfTheReference(t *testing.T) {
	rng := newRand(10)
	for i := range 3000 {
		data := rng.IntN(1 + [...]int{4, 100, 3000}[rng.IntN(3)])
		if i%500 == 0 {
			data = 60000
		}
		super := randSuper(rng, data)
		size := 1 + rng.IntN(max(1, data))
		if data > 1000 {
			size = max(size, 200)
		}
		got, want := segments(t, super, size), packettest.Segments(super, size)
		if len(got) != len(want) {
			t.Fatalf("%d segments, want %d", len(got), len(want))
		}
		for i := range got {
			packettest.Check(t, got[i], packettest.ValidChecksums())
			if !bytes.Equal(got[i], want[i]) {
				t.Fatalf("segment %d of %d\n%swant\n%s", i, len(got), hex.Dump(got[i]), hex.Dump(want[i]))
			}
		}
	}
}

func TestSegmentsHaveTheirOwnFlagsSequenceNumbersAndIDs(t *testing.T) {
	super := packettest.Partial(packettest.Build(packettest.IP{Src: addr("10.0.0.1"), Dst: addr("10.0.0.2"), ID: 0xffff}, packettest.TCP{
		Seq: 0xfffffffe, Flags: packettest.ACK | packettest.PSH | packettest.FIN | packettest.CWR | packettest.ECE, Data: make([]byte, 25)}))
	got := segments(t, super, 10)
	for i, want := range []struct {
		seq   uint32
		id    uint16
		flags uint8
		data  int
	}{
		{0xfffffffe, 0xffff, packettest.ACK | packettest.CWR | packettest.ECE, 10},
		{8, 0, packettest.ACK | packettest.ECE, 10},
		{18, 1, packettest.ACK | packettest.ECE | packettest.PSH | packettest.FIN, 5},
	} {
		p := packettest.MustDecode(got[i])
		if p.Seq != want.seq || p.ID != want.id || p.Flags != want.flags || len(p.Data) != want.data {
			t.Errorf("segment %d: seq %#x id %#x flags %#x data %d, want %+v", i, p.Seq, p.ID, p.Flags, len(p.Data), want)
		}
	}
}

func TestSegmentUDPChecksumIsNeverZero(t *testing.T) {
	u := packettest.UDP{SrcPort: 1, DstPort: 2, Data: []byte{0, 0}}
	sum := packettest.Build(ip4(), u)[26:28]
	u.Data = append(slices.Clone(sum), sum...) // the sum of each datagram is 0xffff
	for _, s := range segments(t, packettest.Partial(packettest.Build(ip4(), u)), 2) {
		if s[26] != 0xff || s[27] != 0xff {
			t.Errorf("checksum % x", s[26:28])
		}
	}
}

// The owner of a segment may change it, for example encrypt it in place. The other segments
// must still be correct.
func TestOverwritingASegmentDoesNotAffectLaterOnes(t *testing.T) {
	rng := newRand(11)
	for range 200 {
		super := randSuper(rng, 1000)
		size := 1 + rng.IntN(200) // may be smaller than the headers
		want := packettest.Segments(super, size)
		var s packet.Segmenter
		if err := s.Reset(parse(t, super, packet.ChecksumPartial), size); err != nil {
			t.Fatal(err)
		}
		for i, w := range want {
			p := s.Next()
			if !bytes.Equal(p, w) || cap(p) != len(p) {
				t.Fatalf("segment %d of %d of %d octets:\n%swant\n%s", i, len(want), size, hex.Dump(p), hex.Dump(w))
			}
			copy(p, bytes.Repeat([]byte{0xee}, len(p)))
		}
	}
}

func TestSegmenterRefusesPacketsThatAreNotSuperpackets(t *testing.T) {
	partial := packettest.Partial(packettest.Build(ip4(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 100)}))
	complete := packettest.Build(ip4(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 100)})
	syn := packettest.Partial(packettest.Build(ip4(), packettest.TCP{Flags: packettest.SYN, Data: make([]byte, 100)}))
	var s packet.Segmenter
	for _, c := range []struct {
		name string
		v    *packet.View
		size int
	}{
		{"size 0", parse(t, partial, packet.ChecksumPartial), 0},
		{"negative size", parse(t, partial, packet.ChecksumPartial), -1},
		{"complete checksum", parse(t, complete, packet.ChecksumComplete), 10},
		{"SYN", parse(t, syn, packet.ChecksumPartial), 10},
		{"ICMP", parse(t, packettest.Build(ip4(), packettest.Echo{}), packet.ChecksumComplete), 10},
	} {
		if err := s.Reset(parse(t, partial, packet.ChecksumPartial), 10); err != nil {
			t.Fatal(err)
		}
		if err := s.Reset(c.v, c.size); !errors.Is(err, packet.ErrGSO) || s.Remaining() != 0 || s.Next() != nil {
			t.Errorf("%s: %v, %d remain", c.name, err, s.Remaining())
		}
	}
}

func TestSegmentingDoesNotAllocate(t *testing.T) {
	super := randSuper(newRand(12), 20000)
	var v packet.View
	var s packet.Segmenter
	work := make([]byte, len(super))
	if n := testing.AllocsPerRun(100, func() {
		copy(work, super)
		if v.Parse(work, packet.ChecksumPartial) != nil || s.Reset(&v, 1400) != nil {
			t.Fatal("reset")
		}
		for s.Remaining() > 0 {
			s.Next()
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
