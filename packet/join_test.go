package packet_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// randomDatagram returns a whole UDP datagram, sometimes with options or extension headers.
func randomDatagram(rng *rand.Rand, limit int) []byte {
	h := packettest.IP{Src: netip.MustParseAddr("10.71.0.5"), Dst: netip.MustParseAddr("10.244.1.1"), ID: uint16(rng.Uint32()), TTL: 9}
	h.TOS = uint8(rng.IntN(64)) << 2
	if rng.IntN(2) == 0 {
		h.Src, h.Dst, h.FlowLabel = netip.MustParseAddr("fd71::5"), netip.MustParseAddr("fd44::1"), 77
		kinds := []packettest.Extension{{Kind: 0, Data: []byte{1, 4, 0, 0, 0, 0}}, {Kind: 60, Data: make([]byte, 14)}, {Kind: 43, Data: []byte{4, 0, 0, 0, 0, 0}}}
		h.Extensions = kinds[:rng.IntN(4)]
	} else if rng.IntN(2) == 0 {
		h.Options = []byte{148, 4, 0, 0, 7, 7, 4, 0, 0, 0, 0, 0}
	}
	data := make([]byte, rng.IntN(limit))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	return packettest.Build(h, packettest.UDP{SrcPort: 4000, DstPort: 53, Data: data})
}

// Fragments of any size in any order must be joined to the original datagram.
func TestJoinUndoesFragmentation(t *testing.T) {
	rng := rand.New(rand.NewPCG(41, 1))
	for range 3000 {
		whole := randomDatagram(rng, 5000)
		fragments := packettest.Fragments(whole, 8*(1+rng.IntN(200)), rng.Uint32())
		if len(fragments) < 2 {
			continue
		}
		id := packettest.MustDecode(fragments[0]).FragmentID
		rng.Shuffle(len(fragments), func(i, j int) { fragments[i], fragments[j] = fragments[j], fragments[i] })
		got, err := packet.Join(fragments)
		if whole[0]>>4 == 4 { // the joined datagram keeps the identification of its fragments
			binary.BigEndian.PutUint16(whole[4:], uint16(id))
			sumHeader4(whole)
		}
		var v packet.View
		if v.Parse(fragments[0], packet.ChecksumComplete) != nil {
			continue // the first fragment is too small for its headers
		}
		if err != nil {
			if !slices.ContainsFunc(fragments, func(f []byte) bool { return v.Parse(f, packet.ChecksumComplete) != nil }) {
				t.Fatalf("%d fragments of %x: %v", len(fragments), whole[:60], err)
			}
			continue
		}
		if !bytes.Equal(got, whole) {
			t.Fatalf("%d fragments make\n%x\nwant\n%x", len(fragments), got[:min(len(got), 80)], whole[:80])
		}
		packettest.Check(t, got, packettest.ValidChecksums())
	}
}

func sumHeader4(b []byte) {
	h := b[:int(b[0]&15)*4]
	h[10], h[11] = 0, 0
	binary.BigEndian.PutUint16(h[10:], packettest.InternetChecksum(h))
}

func TestJoinRefusesFragmentsThatFormNoDatagram(t *testing.T) {
	whole := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.71.0.5"), Dst: netip.MustParseAddr("10.244.1.1")}, packettest.UDP{Data: make([]byte, 100)})
	cut := func(size int) [][]byte { return packettest.Fragments(whole, size, 7) }
	marked := func(b []byte, ecn byte) []byte {
		b = slices.Clone(b)
		b[1] = b[1]&^3 | ecn
		sumHeader4(b)
		return b
	}
	f := cut(48)
	for name, fragments := range map[string][][]byte{
		"no fragments":                nil,
		"a whole packet":              {whole},
		"the first missing":           f[1:],
		"the last missing":            f[:2],
		"the middle missing":          {f[0], f[2]},
		"one fragment twice":          {f[0], f[1], f[1], f[2]},
		"overlap":                     {f[0], cut(40)[1], f[2]},
		"invalid packet":              {f[0], {1, 2, 3}},
		"with and without ECN":        {marked(f[0], 1), f[1], f[2]},
		"congestion mark without ECN": {marked(f[0], 3), f[1], f[2]},
	} {
		if got, err := packet.Join(fragments); got != nil || !errors.Is(err, packet.ErrJoin) {
			t.Errorf("%s: %d octets, %v", name, len(got), err)
		}
	}
	got, err := packet.Join([][]byte{marked(f[0], 1), marked(f[1], 3), marked(f[2], 2)})
	if err != nil || got[1]&3 != 3 {
		t.Errorf("congestion is lost: %v", err)
	}
	packettest.Check(t, got, packettest.HeaderChecksum())
}

// Each fragment fits its own length field: the first one has options, the others have none.
// The datagram exceeds the length field.
func TestJoinRefusesDatagramsAboveTheMaximumLength(t *testing.T) {
	h := packettest.IP{Src: netip.MustParseAddr("10.71.0.5"), Dst: netip.MustParseAddr("10.244.1.1")}
	whole := packettest.Build(h, packettest.Raw{Proto: 200, Data: make([]byte, 65515)})
	h.Options = []byte{148, 4, 0, 0}
	long := packettest.Build(h, packettest.Raw{Proto: 200, Data: make([]byte, 32000)})
	fragments := packettest.Fragments(whole, 16000, 7)
	if got, err := packet.Join(fragments); err != nil || len(got) != 65535 {
		t.Fatal(len(got), err)
	}
	fragments[0] = packettest.Fragments(long, 16000, 7)[0]
	if got, err := packet.Join(fragments); got != nil || !errors.Is(err, packet.ErrJoin) {
		t.Errorf("%d octets, %v", len(got), err)
	}
}

func TestJoinUndoesSplit6(t *testing.T) {
	rng := rand.New(rand.NewPCG(41, 2))
	split := 0
	for range 2000 {
		whole := randomDatagram(rng, 20_000)
		var v packet.View
		if err := v.Parse(whole, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		mtu, id := 1280+rng.IntN(300), rng.Uint32()
		before := bytes.Clone(whole)
		fragments := v.Split6(mtu, id)
		if v.Is4() {
			if fragments != nil {
				t.Fatal("IPv4 was cut")
			}
			continue
		}
		if len(fragments) == 1 {
			if len(whole) > mtu || !bytes.Equal(fragments[0], whole) {
				t.Fatal("one fragment, and not the packet")
			}
			continue
		}
		split++
		for i, f := range fragments {
			p := packettest.MustDecode(f)
			if len(f) > mtu || p.FragmentID != id || p.More != (i < len(fragments)-1) || p.Src != v.Src() || p.Dst != v.Dst() {
				t.Fatalf("fragment %d: %d octets, %+v", i, len(f), p)
			}
		}
		if got, err := packet.Join(fragments); err != nil || !bytes.Equal(got, whole) || !bytes.Equal(before, whole) {
			t.Fatalf("%v\n%x\nwant\n%x", err, got[:80], whole[:80])
		}
	}
	if split < 100 {
		t.Errorf("%d packets were cut", split)
	}
}

func TestSplit6RefusesHeadersThatLeaveNoRoom(t *testing.T) {
	for name, extensions := range map[string][]packettest.Extension{
		"headers leave too little room in each fragment": {{Kind: 0, Data: slices.Concat([]byte{1, 196}, make([]byte, 196), []byte{1, 198}, make([]byte, 198), []byte{1, 198}, make([]byte, 198), []byte{1, 196}, make([]byte, 196))}},
		"headers exceed the first fragment":              {{Kind: 60, Data: make([]byte, 1502)}},
	} {
		h := packettest.IP{Src: netip.MustParseAddr("fd71::5"), Dst: netip.MustParseAddr("fd44::1"), Extensions: extensions}
		var v packet.View
		if err := v.Parse(packettest.Build(h, packettest.UDP{Data: make([]byte, 3000)}), packet.ChecksumComplete); err != nil {
			t.Fatal(name, err)
		}
		if f := v.Split6(1280, 1); f != nil {
			t.Errorf("%s: %d fragments", name, len(f))
		}
	}
}

// FuzzJoin decodes fragments from the input and compares Join with a receiver that has a table
// of octets. Both must agree whether the fragments form a datagram, and on its content.
func FuzzJoin(f *testing.F) {
	whole := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.71.0.5"), Dst: netip.MustParseAddr("10.244.1.1")}, packettest.UDP{Data: make([]byte, 100)})
	six := packettest.Build(packettest.IP{Src: netip.MustParseAddr("fd71::5"), Dst: netip.MustParseAddr("fd44::1")}, packettest.UDP{Data: make([]byte, 100)})
	encode := func(fragments [][]byte) (data []byte) {
		for _, b := range fragments {
			data = append(binary.BigEndian.AppendUint16(data, uint16(len(b))), b...)
		}
		return data
	}
	for _, b := range [][]byte{whole, six} {
		cut := packettest.Fragments(b, 48, 7)
		f.Add(encode(cut))
		slices.Reverse(cut)
		f.Add(encode(cut))
		f.Add(encode(cut[1:]))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var fragments [][]byte
		for len(data) > 2 {
			n := min(int(binary.BigEndian.Uint16(data)), len(data)-2)
			fragments, data = append(fragments, slices.Clone(data[2:2+n])), data[2+n:]
		}
		before := fmt.Sprint(fragments)
		got, err := packet.Join(fragments)
		if fmt.Sprint(fragments) != before {
			t.Fatal("a fragment was changed")
		}
		want, ok := slowJoin(fragments)
		if ok != (err == nil) {
			t.Fatalf("Join returned %v, the table of octets %t", err, ok)
		}
		if err != nil {
			return
		}
		var v packet.View
		if v.Parse(got, packet.ChecksumComplete) != nil {
			return // a header that contradicts the datagram
		}
		if p := packettest.MustDecode(got); v.IsFragment() || len(got) < len(want) || !bytes.Equal(got[len(got)-len(want):], want) || p.FragmentOffset != 0 {
			t.Fatalf("%x\nwant at the end\n%x", got, want)
		}
	})
}

// slowJoin returns the fragmented part of the datagram, or reports that the fragments do not
// form a datagram.
func slowJoin(fragments [][]byte) (data []byte, ok bool) {
	const room = 1 << 17
	var octets [room]byte
	var there [room]bool
	end, firstHeader := -1, 0
	var six bool
	var ecn [4]bool
	for _, b := range fragments {
		var v packet.View
		if v.Parse(b, packet.ChecksumComplete) != nil {
			return nil, false
		}
		off, more, _, isFragment := v.Fragment()
		if !isFragment {
			return nil, false
		}
		b = v.Bytes()
		at := int(b[0]&15) * 4
		mark := b[1] & 3
		if six = b[0]>>4 == 6; six {
			at, mark = 40, b[1]>>4&3
			for kind := b[6]; ; {
				next, size := b[at], (int(b[at+1])+1)*8
				if kind == 44 {
					size = 8
				} else if kind == 51 {
					size = (int(b[at+1]) + 2) * 4
				}
				at += size
				if kind == 44 {
					break
				}
				kind = next
			}
		}
		ecn[mark] = true
		if off == 0 {
			if firstHeader = at; six {
				firstHeader = at - 8 - 40
			}
		}
		for i, x := range b[at:] {
			if there[off+i] {
				return nil, false
			}
			octets[off+i], there[off+i] = x, true
		}
		if !more {
			if end >= 0 {
				return nil, false
			}
			end = off + len(b) - at
		}
	}
	if end < 0 || slices.Contains(there[:end], false) || slices.Contains(there[end:], true) || firstHeader+end > 65535 ||
		ecn[0] && (ecn[1] || ecn[2] || ecn[3]) {
		return nil, false
	}
	return octets[:end], true
}
