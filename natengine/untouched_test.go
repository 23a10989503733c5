package natengine_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// In the IP header, the engine must change only one address and the checksum. All other fields must
// stay: type of service with DSCP and ECN, total length, identification, DF, TTL and options, and
// in IPv6 traffic class, flow label, hop limit and extension headers. This must hold for 1:1 maps
// and for NAPT, in both directions and families. The TTL stays because the kernels on either side
// decrement it.
func TestIPHeaderFieldsAreUnchanged(t *testing.T) {
	rng := rand.New(rand.NewPCG(36, 37))
	for _, is4 := range []bool{true, false} {
		a, b := errorPair(t, is4, false)
		podA, _, nodeA := hosts(is4, a.pods)
		podB, _, _ := hosts(is4, b.pods)
		for n := range 2000 {
			from := podA
			if n%2 == 0 {
				from = nodeA
			}
			h := packettest.IP{Src: from, Dst: moved(podB, b.podsSeen), TTL: uint8(1 + rng.IntN(255)), TOS: uint8(rng.Uint32()),
				ID: uint16(rng.Uint32()), DF: rng.IntN(2) == 0, FlowLabel: rng.Uint32() & 0xfffff}
			if rng.IntN(2) == 0 {
				h.Options = []byte{7, 7, 4, 1, 2, 3, 4, 1, 68, 8, 5, 0, 9, 8, 7, 6, 148, 4, 0, 0}
				h.Extensions = []packettest.Extension{{Kind: 0, Data: []byte{5, 2, 0, 0, 1, 0}}, {Kind: 60, Data: make([]byte, 14)}}
			}
			body := packettest.UDP{SrcPort: uint16(40000 + rng.IntN(9)), DstPort: 53, Data: []byte("?")}
			sent := packettest.Build(h, body)
			arrived := cross(t, a, b, sent)
			if arrived == nil {
				t.Fatalf("lost %x", sent)
			}
			sameHeader(t, sent, arrived)

			p := packettest.MustDecode(arrived)
			back := h
			back.Src, back.Dst = podB, p.Src
			reply := packettest.Build(back, packettest.UDP{SrcPort: 53, DstPort: p.SrcPort, Data: []byte("!")})
			if arrived = cross(t, b, a, reply); arrived == nil {
				t.Fatalf("lost %x", reply)
			}
			sameHeader(t, reply, arrived)
		}
	}
}

// sameHeader checks that the IP headers are equal except for addresses and checksum.
func sameHeader(t *testing.T, a, b []byte) {
	t.Helper()
	a, b = bytes.Clone(a), bytes.Clone(b)
	end := packettest.MustDecode(a).TransportOffset
	for _, h := range [][]byte{a, b} {
		if h[0]>>4 == 4 {
			clear(h[10:20])
		} else {
			clear(h[8:40])
		}
	}
	if !bytes.Equal(a[:end], b[:end]) {
		t.Fatalf("the header\n%x became\n%x", a[:end], b[:end])
	}
}

// The engine also forwards packets with a TTL of 0 or 1. The kernel that receives the packet
// next drops it and sends the ICMP error.
func TestEngineIgnoresTheTTL(t *testing.T) {
	a, b := errorPair(t, true, false)
	podA, _, _ := hosts(true, a.pods)
	podB, _, _ := hosts(true, b.pods)
	for ttl := range 3 {
		sent := packettest.Build(packettest.IP{Src: podA, Dst: moved(podB, b.podsSeen), TTL: 9}, packettest.UDP{SrcPort: 1, DstPort: 2})
		sent[8] = byte(ttl)
		sent[10], sent[11] = 0, 0
		sum := packettest.InternetChecksum(sent[:20])
		sent[10], sent[11] = byte(sum>>8), byte(sum)
		if got := cross(t, a, b, sent); got == nil || got[8] != byte(ttl) {
			t.Errorf("TTL %d: %x", ttl, got)
		}
	}
}

// ICMP messages that are neither query nor error have no identifier for NAPT. They must pass
// unchanged between pods, and must not pass from a node.
func TestOtherICMPMessagesPassOnlyBetweenPods(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		a, b := errorPair(t, is4, false)
		podA, _, nodeA := hosts(is4, a.pods)
		podB, _, _ := hosts(is4, b.pods)
		kinds := []uint8{1, 2, 6, 9, 10, 19, 30, 40, 42, 253, 255}
		if !is4 {
			kinds = []uint8{138, 139, 140, 144, 150, 160, 161, 200, 255}
		}
		for _, kind := range kinds {
			for _, from := range []struct {
				name string
				pod  bool
			}{{"pod", true}, {"node", false}} {
				src := nodeA
				if from.pod {
					src = podA
				}
				sent := packettest.Build(packettest.IP{Src: src, Dst: moved(podB, b.podsSeen)}, packettest.ICMPError{Type: kind, Code: 1, Rest: 77, Quote: []byte("data")})
				var v packet.View
				if err := v.Parse(bytes.Clone(sent), packet.ChecksumComplete); err != nil {
					t.Fatal(err)
				}
				verdict := a.engine.Outbound(&v, 0)
				want := fmt.Sprint(natengine.Discard, natengine.DropProtocol)
				if from.pod {
					want = fmt.Sprint(natengine.Forward, natengine.DropNone)
				}
				if got := fmt.Sprint(verdict.Action, verdict.Drop); got != want {
					t.Errorf("type %d from a %s: %s, want %s", kind, from.name, got, want)
				}
				packettest.Check(t, v.Bytes(), packettest.ValidChecksums(), packettest.ICMPType(kind, 1))
			}
		}
	}
}
