package parse

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"

	"github.com/isthmus-net/isthmus/packet/packettest"
)

func random(rng *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func octet(rng *rand.Rand) uint8 { return uint8(rng.Uint32()) }

func word(rng *rand.Rand) uint16 { return uint16(rng.Uint32()) }

func pick[T any](rng *rand.Rand, list ...T) T { return list[rng.IntN(len(list))] }

// header returns a random IP header of a random family. Most of the headers are legal.
func header(rng *rand.Rand) packettest.IP {
	h := packettest.IP{TTL: uint8(1 + rng.IntN(255)), TOS: octet(rng), ID: word(rng), DF: rng.IntN(2) == 0, FlowLabel: rng.Uint32()}
	if rng.IntN(2) == 0 {
		h.Src, h.Dst = netip.AddrFrom4([4]byte(random(rng, 4))), netip.AddrFrom4([4]byte(random(rng, 4)))
		if rng.IntN(3) == 0 {
			h.Options = pick(rng, []byte{1, 1, 1}, []byte{7, 7, 4, 0, 0, 0, 0}, []byte{148, 4, 0, 0}, []byte{0, 131, 3, 4},
				[]byte{68, 8, 5, 0, 0, 0, 0, 0}, random(rng, 8))
		}
		return h
	}
	h.Src, h.Dst = netip.AddrFrom16([16]byte(random(rng, 16))), netip.AddrFrom16([16]byte(random(rng, 16)))
	if rng.IntN(2) == 0 {
		return h
	}
	for range rng.IntN(4) + rng.IntN(40)/39*7 {
		kind := pick[uint8](rng, 43, 51, 60, 60, 60)
		if len(h.Extensions) == 0 && rng.IntN(2) == 0 || rng.IntN(30) == 0 {
			kind = 0
		}
		if rng.IntN(30) == 0 {
			kind = 44
		}
		n := rng.IntN(3)
		data := append([]byte{1, byte(4 + 8*n)}, make([]byte, 4+8*n)...) // PadN
		switch {
		case kind == 43:
			data = append([]byte{pick[byte](rng, 0, 2, 4), byte(rng.IntN(8) / 7)}, make([]byte, 4+8*n)...)
		case kind == 44:
			data = []byte{0, byte(rng.IntN(2)), 0, 0, 0, 7}
		case rng.IntN(12) == 0:
			data = random(rng, 6+8*n)
		}
		h.Extensions = append(h.Extensions, packettest.Extension{Kind: kind, Data: data})
	}
	return h
}

func body(rng *rand.Rand) packettest.Body {
	data := random(rng, rng.IntN(64))
	switch rng.IntN(7) {
	case 0, 1:
		return packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Seq: rng.Uint32(), Flags: octet(rng), Window: word(rng),
			Options: random(rng, rng.IntN(41)), Data: data}
	case 2, 3:
		return packettest.UDP{SrcPort: word(rng), DstPort: word(rng), Data: data}
	case 4:
		return packettest.Echo{Reply: rng.IntN(2) == 0, ID: word(rng), Seq: word(rng), Data: data}
	case 5:
		return packettest.ICMPError{Type: uint8(rng.IntN(20)), Code: uint8(rng.IntN(16)), Rest: rng.Uint32(), Quote: data}
	}
	return packettest.Raw{Proto: pick[uint8](rng, 33, 136, 132, 47, 50, 51, 59, 4, 41, 1, 58, octet(rng)), Data: data}
}

// generate returns a random packet or a fragment of one.
func generate(rng *rand.Rand) []byte {
	b := packettest.Build(header(rng), body(rng))
	if rng.IntN(4) > 0 {
		return b
	}
	return fragment(rng, b)
}

// fragment returns a fragment of the part after the IP header. Some of the fragments are
// invalid.
func fragment(rng *rand.Rand, b []byte) []byte {
	at := 40
	if b[0]>>4 == 4 {
		at = int(b[0]&15) * 4
	}
	off := pick(rng, 0, 0, 8, 16, 24, 8*rng.IntN(8192))
	data := b[at:]
	data = data[min(off, len(data)):]
	data = data[:rng.IntN(len(data)+1)]
	more := rng.IntN(2)
	if rng.IntN(4) > 0 && more == 1 {
		data = data[:len(data)&^7]
	}
	f := append([]byte(nil), b[:at]...)
	if b[0]>>4 == 4 {
		binary.BigEndian.PutUint16(f[2:], uint16(at+len(data)))
		binary.BigEndian.PutUint16(f[6:], uint16(more<<13|off/8))
		return append(f, data...)
	}
	next := f[6]
	f[6] = 44
	f = append(f, next, 0)
	f = binary.BigEndian.AppendUint16(f, uint16(off|more))
	f = binary.BigEndian.AppendUint32(f, rng.Uint32())
	binary.BigEndian.PutUint16(f[4:], uint16(8+len(data)))
	return append(f, data...)
}

// mutate returns a copy of a packet with one small change.
func mutate(rng *rand.Rand, b []byte) []byte {
	b = append([]byte(nil), b...)
	if len(b) == 0 {
		return b
	}
	switch rng.IntN(6) {
	case 0: // flip a bit in the headers
		b[rng.IntN(min(len(b), 64))] ^= 1 << rng.IntN(8)
	case 1:
		b[rng.IntN(len(b))] = byte(rng.Uint32())
	case 2:
		b = b[:rng.IntN(len(b)+1)]
	case 3: // shorten the packet and correct its length field
		b = b[:rng.IntN(len(b)+1)]
		if len(b) >= 40 && b[0]>>4 == 6 {
			binary.BigEndian.PutUint16(b[4:], uint16(len(b)-40))
		} else if len(b) >= 20 && b[0]>>4 == 4 {
			binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
		}
	case 4:
		b = append(b, random(rng, 1+rng.IntN(20))...)
	case 5: // change an important field
		at := pick(rng, 0, 2, 3, 4, 5, 6, 7, 9, 20, 21, 24, 25, 32, 40, 41, 42, 43)
		b[at%len(b)] = pick[byte](rng, 0, 1, 2, 4, 6, 8, 17, 43, 44, 51, 58, 60, 255)
	}
	return b
}
