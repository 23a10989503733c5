package packet_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// cornerAddr returns an IPv6 address whose words often cause carries in a sum of 64-bit words.
func cornerAddr(rng *rand.Rand) (hi, lo uint64, a netip.Addr) {
	corner := func() uint64 {
		if rng.IntN(3) == 0 {
			return rng.Uint64()
		}
		return [...]uint64{0, 1, 0xffff, 1 << 32, 0xffffffff00000000, 1 << 63, ^uint64(1), ^uint64(0)}[rng.IntN(8)]
	}
	hi, lo = corner(), corner()
	var b [16]byte
	binary.BigEndian.PutUint64(b[:8], hi)
	binary.BigEndian.PutUint64(b[8:], lo)
	return hi, lo, netip.AddrFrom16(b)
}

func TestIPv6AddressesRoundTripAsTwoWords(t *testing.T) {
	rng := newRand(6)
	bodies := []packettest.Body{
		packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.ACK, Data: []byte("abc")},
		packettest.UDP{SrcPort: 1, DstPort: 2, Data: []byte("abc")},
		packettest.UDP{SrcPort: 1, DstPort: 2, NoChecksum: true},
		packettest.Echo{ID: 7},
		packettest.Raw{Proto: 50, Data: make([]byte, 8)},
	}
	for range 20_000 {
		_, _, src := cornerAddr(rng)
		_, _, dst := cornerAddr(rng)
		b := packettest.Build(packettest.IP{Src: src, Dst: dst}, bodies[rng.IntN(len(bodies))])
		state := packet.ChecksumComplete
		hasSum := b[6] == packet.TCP || b[6] == packet.UDP && (b[46] != 0 || b[47] != 0)
		if hasSum && rng.IntN(2) == 0 {
			b, state = packettest.Partial(b), packet.ChecksumPartial
		}
		v := parse(t, b, state)
		srcHi, srcLo, newSrc := cornerAddr(rng)
		dstHi, dstLo, newDst := cornerAddr(rng)
		v.SetSrc6(srcHi, srcLo)
		v.SetDst6(dstHi, dstLo)
		packettest.Check(t, b, validIn(state), packettest.Src(newSrc), packettest.Dst(newDst))
		if hi, lo := v.Src6(); hi != srcHi || lo != srcLo || v.Src() != newSrc {
			t.Fatalf("source %x %x %v, want %v", hi, lo, v.Src(), newSrc)
		}
		if hi, lo := v.Dst6(); hi != dstHi || lo != dstLo || v.Dst() != newDst {
			t.Fatalf("destination %x %x %v, want %v", hi, lo, v.Dst(), newDst)
		}
		if t.Failed() {
			t.Fatalf("%v > %v to %v > %v", src, dst, newSrc, newDst)
		}
	}
}
