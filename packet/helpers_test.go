package packet_test

import (
	"encoding/hex"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// unhex decodes a golden packet: hex digits, with a comment after # on each line.
func unhex(t testing.TB, text string) []byte {
	t.Helper()
	var digits strings.Builder
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		digits.WriteString(strings.Join(strings.Fields(line), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func parse(t testing.TB, b []byte, csum packet.ChecksumState) *packet.View {
	t.Helper()
	v := new(packet.View)
	if err := v.Parse(b, csum); err != nil {
		t.Fatalf("%v\n%s", err, hex.Dump(b))
	}
	return v
}

func newRand(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 0x15742)) }

func random(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// word returns a random word. Corner values are much more frequent than by chance, because
// errors in checksums occur at 0 and 0xffff.
func word(rng *rand.Rand) uint16 {
	switch rng.IntN(4) {
	case 0:
		return [...]uint16{0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff}[rng.IntN(6)]
	}
	return uint16(rng.Uint32())
}

func randAddr(rng *rand.Rand, v6 bool) netip.Addr {
	if v6 {
		var a [16]byte
		for i := 0; i < 16; i += 2 {
			w := word(rng)
			a[i], a[i+1] = byte(w>>8), byte(w)
		}
		return netip.AddrFrom16(a)
	}
	x, y := word(rng), word(rng)
	return netip.AddrFrom4([4]byte{byte(x >> 8), byte(x), byte(y >> 8), byte(y)})
}

func randIP(rng *rand.Rand, v6 bool) packettest.IP {
	h := packettest.IP{
		Src: randAddr(rng, v6), Dst: randAddr(rng, v6), TTL: uint8(1 + rng.IntN(255)), TOS: uint8(rng.Uint32()),
		ID: word(rng), DF: rng.IntN(2) == 0, FlowLabel: rng.Uint32() & 0xfffff,
	}
	if rng.IntN(3) == 0 {
		if v6 {
			for _, kind := range []uint8{0, 60, 43, 51, 60} {
				if rng.IntN(2) == 0 {
					e := packettest.Extension{Kind: kind, Data: random(rng, rng.IntN(30))}
					if kind == 43 {
						e.Data = append([]byte{4, 0}, e.Data...) // no segments left
					}
					h.Extensions = append(h.Extensions, e)
				}
			}
		} else {
			h.Options = [][]byte{{1, 1, 1, 1}, {7, 7, 4, 0, 0, 0, 0}, {148, 4, 0, 0}, {1, 68, 6, 5, 0, 0, 0}, {0, 255, 255, 255}}[rng.IntN(5)]
		}
	}
	return h
}

func randBody(rng *rand.Rand) packettest.Body {
	data := random(rng, rng.IntN(80))
	switch rng.IntN(7) {
	case 0, 1:
		return packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Seq: rng.Uint32(), Ack: rng.Uint32(), Flags: uint8(rng.Uint32()),
			Window: word(rng), Urgent: word(rng), Options: []byte{1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8}[:rng.IntN(2)*12], Data: data}
	case 2, 3:
		return packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: data}
	case 4:
		return packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: data, NoChecksum: true}
	case 5:
		return packettest.Echo{Reply: rng.IntN(2) == 0, ID: word(rng), Seq: word(rng), Data: data}
	}
	return packettest.Raw{Proto: [...]uint8{47, 50, 59, 132, 200}[rng.IntN(5)], Data: data}
}

// sample returns a random packet in one of the three checksum states.
func sample(rng *rand.Rand) ([]byte, packet.ChecksumState) {
	b := packettest.Build(randIP(rng, rng.IntN(2) == 0), randBody(rng))
	p := packettest.MustDecode(b)
	if rng.IntN(3) == 0 && (p.Proto == 6 || p.Proto == 17) {
		return packettest.Partial(b), packet.ChecksumPartial
	}
	if rng.IntN(4) == 0 {
		fragments := packettest.Fragments(b, 64, rng.Uint32()) // the first fragment contains the whole transport header, with options
		if len(p.Transport) == 0 {
			return b, packet.ChecksumComplete
		}
		return fragments[rng.IntN(len(fragments))], packet.ChecksumComplete
	}
	return b, packet.ChecksumComplete
}

func validIn(state packet.ChecksumState) packettest.Checker {
	if state == packet.ChecksumPartial {
		return packettest.PartialChecksum()
	}
	return packettest.ValidChecksums()
}
