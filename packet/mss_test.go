package packet_test

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// clamped returns the options that ClampMSS must produce. It was written only from RFC 9293,
// section 3.1: it first lists the options and then lowers those of kind 2 and length 4.
func clamped(options []byte, mss int) []byte {
	type option struct{ at, kind, length int }
	var list []option
	for at := 0; at < len(options); {
		kind := int(options[at])
		if kind == 0 {
			break
		}
		length := 1
		if kind != 1 {
			if at == len(options)-1 {
				break
			}
			length = int(options[at+1])
			if length < 2 || length > len(options)-at {
				break
			}
		}
		list = append(list, option{at, kind, length})
		at += length
	}
	out := bytes.Clone(options)
	for _, o := range list {
		if o.kind == 2 && o.length == 4 && int(out[o.at+2])*256+int(out[o.at+3]) > mss {
			out[o.at+2], out[o.at+3] = byte(mss/256), byte(mss%256)
		}
	}
	return out
}

// randOptions returns up to 40 octets of well-formed options in any order. The MSS occurs at
// any offset, not at all, once or twice. Sometimes the options are cut off or contain a random
// octet.
func randOptions(rng *rand.Rand) []byte {
	var o []byte
	for range rng.IntN(9) {
		switch rng.IntN(8) {
		case 0, 1:
			o = append(o, 1)
		case 2, 3:
			mss := word(rng)
			o = append(o, 2, 4, byte(mss>>8), byte(mss))
		case 4:
			o = append(o, 3, 3, 7)
		case 5:
			o = append(o, 4, 2)
		case 6:
			o = append(append(o, 8, 10), random(rng, 8)...)
		case 7:
			if rng.IntN(4) == 0 {
				o = append(o, 0)
			}
			o = append(append(o, byte(rng.Uint32()), byte(rng.IntN(6))), random(rng, rng.IntN(4))...)
		}
	}
	if rng.IntN(4) == 0 && len(o) > 0 {
		o[rng.IntN(len(o))] = byte(rng.Uint32())
	}
	return o[:min(len(o), 40)]
}

func TestClampMSSAgreesWithASlowParser(t *testing.T) {
	rng := newRand(23)
	changed := 0
	for range 200_000 {
		h := ip4()
		if rng.IntN(2) == 0 {
			h = ip6()
		}
		flags := []uint8{packettest.SYN, packettest.SYN | packettest.ACK, packettest.SYN | packettest.ECE | packettest.CWR}[rng.IntN(3)]
		b := packettest.Build(h, packettest.TCP{SrcPort: word(rng), DstPort: word(rng), Seq: rng.Uint32(), Flags: flags, Options: randOptions(rng), Data: random(rng, rng.IntN(4))})
		mss := max(word(rng), 1)
		whole := slices.Clone(b)
		before := packettest.MustDecode(slices.Clone(b))
		want := clamped(before.TCPOptions, int(mss))
		if got := parse(t, b, packet.ChecksumComplete).ClampMSS(mss); got != !bytes.Equal(want, before.TCPOptions) {
			t.Fatalf("returned %t\n%s", got, hex.Dump(whole))
		}
		after := packettest.MustDecode(b)
		if !bytes.Equal(after.TCPOptions, want) {
			t.Fatalf("MSS %d: options %v became %v, want %v", mss, before.TCPOptions, after.TCPOptions, want)
		}
		if !bytes.Equal(want, before.TCPOptions) {
			changed++
		}
		packettest.Check(t, b, packettest.ValidChecksums())
		// Only the options and the checksum may have changed.
		at := before.TransportOffset
		copy(whole[at+20:], want)
		copy(whole[at+16:at+18], b[at+16:at+18])
		if !bytes.Equal(b, whole) || t.Failed() {
			t.Fatalf("more changed\n%s%s", hex.Dump(b), hex.Dump(whole))
		}
	}
	if changed < 20_000 {
		t.Errorf("only %d SYNs were changed", changed)
	}
}

func TestClampMSSKeepsAPartialChecksum(t *testing.T) {
	b := packettest.Partial(packettest.Build(ip4(), packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.SYN, Options: []byte{1, 2, 4, 5, 180, 0, 0, 0}}))
	v := parse(t, b, packet.ChecksumPartial)
	if !v.ClampMSS(1000) {
		t.Error("not lowered")
	}
	packettest.Check(t, b, packettest.PartialChecksum())
	v.CompleteChecksum()
	packettest.Check(t, b, packettest.ValidChecksums())
}
