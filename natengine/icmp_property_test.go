package natengine_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A fault is a kind of ICMP error. extensible means that RFC 4884 defines a length of the
// quote for it.
type fault struct {
	kind, codes uint8
	extensible  bool
}

var (
	faults4 = []fault{{3, 16, true}, {4, 1, false}, {11, 2, true}, {12, 3, true}}
	faults6 = []fault{{1, 8, true}, {2, 1, false}, {3, 2, true}, {4, 3, false}, {99, 5, false}} // 99: an unknown type, but an error by its number
)

// errorPair joins two clusters of one family. Pods and a node of b talk to a pod, a node and a
// mapped address of a.
func errorPair(t *testing.T, is4, alike bool) (a, b *side) {
	pre := netip.MustParsePrefix
	a = &side{pods: pre("10.244.0.0/16"), podsSeen: pre("10.246.0.0/16"), external: pre("10.245.0.0/16"), externalSeen: pre("10.247.0.0/16")}
	b = &side{pods: pre("10.244.16.0/20"), podsSeen: pre("10.71.32.0/20"), external: pre("10.245.3.0/24"), externalSeen: pre("10.72.3.0/24")}
	real, seen := netip.MustParseAddr("192.168.7.7"), netip.MustParseAddr("10.247.0.9")
	if !is4 {
		a = &side{pods: pre("fd44::/64"), podsSeen: pre("fd46::/64"), external: pre("fd45::/64"), externalSeen: pre("fd47::/64")}
		b = &side{pods: pre("fd44::/56"), podsSeen: pre("fd71::/56"), external: pre("fd45:1::/96"), externalSeen: pre("fd72:1::/96")}
		real, seen = netip.MustParseAddr("fd01::7"), netip.MustParseAddr("fd47::9")
	}
	if alike { // both sides use the same range
		b.pods, b.podsSeen = a.pods, a.podsSeen
	}
	a.endpoints = []natengine.Endpoint{{Real: real, Seen: seen}}
	join(t, a, b)
	return a, b
}

func hosts(is4 bool, pods netip.Prefix) (pod, other, node netip.Addr) {
	pod = pods.Addr().Next().Next().Next()
	node = netip.MustParseAddr("192.168.0.3")
	if !is4 {
		node = netip.MustParseAddr("fd01::3")
	}
	return pod, pod.Next(), node
}

// b sends a packet of any kind to a, and a host on the path or at the end answers with an ICMP
// error of any type. b must receive that error with unchanged type, code, pointer and extensions.
// The error must quote exactly the octets that b sent: the gateways must have undone all their
// translations. It must not open, refresh or end a flow.
func TestICMPErrorsQuoteTheSendersOwnPacket(t *testing.T) {
	rng := rand.New(rand.NewPCG(30, 31))
	tried := map[string]int{}
	for n := range 4000 {
		is4, alike := rng.IntN(2) == 0, rng.IntN(3) == 0
		a, b := errorPair(t, is4, alike)
		podA, otherA, nodeA := hosts(is4, a.pods)
		podB, _, nodeB := hosts(is4, b.pods)
		kind := rng.IntN(4)
		from, to, end := podB, moved(podA, a.podsSeen), podA
		h, body := build(rng, is4)
		switch kind {
		case 1: // to a mapped address
			to, end = a.endpoints[0].Seen, a.endpoints[0].Real
		case 2: // from a node whose port another node already has
			from = nodeB
			rival(t, b, a, h, body, nodeB.Next(), to)
		case 3: // the reply to a node of a whose port another node already had
			end = nodeA
			rival(t, a, b, h, body, nodeA.Next(), moved(podB, b.podsSeen))
			h.Src, h.Dst = nodeA, moved(podB, b.podsSeen)
			request := packettest.MustDecode(cross(t, a, b, packettest.Build(h, body)))
			to, body = request.Src, replyTo(body, request)
			if echo, ok := body.(packettest.Echo); ok {
				echo.Reply = true
				body = echo
			}
		}
		stateless := kind == 0
		h.Src, h.Dst = from, to
		sent := packettest.Build(h, body)
		arrived := cross(t, b, a, sent)
		if arrived == nil {
			t.Fatalf("%d: packet lost: %x", n, sent)
		}
		p := packettest.MustDecode(arrived)
		if p.Dst != end {
			t.Fatalf("%d: arrived at %v, want %v", n, p.Dst, end)
		}

		least := p.TransportOffset + 8
		if stateless {
			least = p.TransportOffset // a prefix map needs only the addresses
		}
		cut := min(least+rng.IntN(60), len(arrived))
		if rng.IntN(3) == 0 {
			cut = len(arrived)
		}
		list := faults4
		if !is4 {
			list = faults6
		}
		f := list[rng.IntN(len(list))]
		fault := packettest.ICMPError{Type: f.kind, Code: uint8(rng.IntN(int(f.codes))), Rest: rng.Uint32(), Quote: arrived[:cut]}
		// RFC 4884 uses this octet for the length of the quote. Values that stand for less than
		// 128 octets are noise from older senders.
		shift, noise := 16, rng.Uint32N(32)
		if !is4 {
			shift, noise = 24, rng.Uint32N(16)
		}
		var behind []byte
		extension := []byte{0x20, 0, 0xab, 0xcd, 0, 8, 1, 1, 1, 2, 3, 4}
		if f.extensible {
			if cut < p.TransportOffset+8 { // otherwise the padding would read as ports that are 0
				cut = min(p.TransportOffset+8, len(arrived))
				fault.Quote = arrived[:cut]
			}
			fault.Rest = fault.Rest&^(0xff<<shift) | noise<<shift
			switch rng.IntN(3) {
			case 0: // with RFC 4884 extensions
				fault.Rest &^= 0xff << shift
				fault.Extension, behind = extension, extension
			case 1: // with extensions after 128 octets but without a length, as before RFC 4884
				if cut < 128 {
					fault.Rest &^= 0xff << shift
					fault.Quote = append(append(bytes.Clone(arrived[:cut]), make([]byte, 128-cut)...), extension...)
				}
			}
		}
		reporter := []netip.Addr{end, otherA, nodeA}[rng.IntN(3)]
		message := packettest.Build(packettest.IP{Src: reporter, Dst: p.Src, TOS: 0xc0, TTL: 60}, fault)

		before := [2]string{fmt.Sprint(a.engine.Flows(9)), fmt.Sprint(b.engine.Flows(9))}
		got := cross(t, a, b, message)
		what := fmt.Sprintf("%d: type %d code %d from %v about %v > %v cut at %d of %d", n, fault.Type, fault.Code, reporter, from, to, cut, len(arrived))
		if got == nil {
			t.Fatalf("%s: lost\n%x", what, message)
		}
		if after := [2]string{fmt.Sprint(a.engine.Flows(9)), fmt.Sprint(b.engine.Flows(9))}; after != before {
			t.Fatalf("%s: flows were\n%v, are\n%v", what, before, after)
		}
		packettest.Check(t, got, packettest.Dst(from), packettest.ICMPType(fault.Type, fault.Code), packettest.ValidChecksums())
		in, out := packettest.MustDecode(message), packettest.MustDecode(got)
		if (reporter == end) != (out.Src == to) || out.TTL != in.TTL || out.TOS != in.TOS || len(got) != len(message) {
			t.Fatalf("%s: from %v, TTL %d", what, out.Src, out.TTL)
		}
		if !bytes.Equal(out.Transport[4:8], in.Transport[4:8]) {
			t.Fatalf("%s: the word behind the checksum is %x, was %x", what, out.Transport[4:8], in.Transport[4:8])
		}
		quoted, want := bytes.Clone(out.Data[:cut]), bytes.Clone(sent[:cut])
		if field, whole := sumField(p); field > 0 && cut < whole { // the quote ends within the checksummed part, so no gateway can update the checksum
			clear(quoted[min(field, cut):])
			clear(want[min(field, cut):])
		}
		if !bytes.Equal(quoted, want) {
			t.Fatalf("%s: quotes\n%x\nof\n%x", what, quoted, want)
		}
		if !bytes.HasSuffix(out.Data, behind) {
			t.Fatalf("%s: the extension changed", what)
		}
		tried[fmt.Sprintf("IPv4 %t, kind %d, type %d", is4, kind, fault.Type)]++
	}
	if len(tried) < 4*(len(faults4)+len(faults6)) {
		t.Errorf("only %d cases: %v", len(tried), tried)
	}
}

// sumField returns the offset of the transport checksum, 0 for none. whole is the number of
// octets that a quote must contain for the checksum to be updated.
func sumField(p packettest.Packet) (field, whole int) {
	if p.FragmentOffset > 0 {
		return 0, 0
	}
	switch p.Proto {
	case packet.TCP:
		return p.TransportOffset + 16, p.TransportOffset + 18
	case packet.UDP:
		return p.TransportOffset + 6, p.TransportOffset + 8
	case packet.ICMP, packet.ICMPv6:
		return p.TransportOffset + 2, p.TransportOffset + 4
	}
	return 0, 0
}

// rival opens a flow of another host, which occupies the port at the NAPT address that the next
// packet would get. For a protocol without ports it does nothing, because only one host can use
// such a protocol.
func rival(t *testing.T, from, to *side, h packettest.IP, body packettest.Body, src, dst netip.Addr) {
	t.Helper()
	if _, ok := body.(packettest.Raw); ok {
		return
	}
	h.Src, h.Dst = src, dst
	if cross(t, from, to, packettest.Build(h, body)) == nil {
		t.Fatal("the packet of the rival is lost")
	}
}

// build returns the header and body of a random packet that an error may answer. The header
// has no addresses.
func build(rng *rand.Rand, is4 bool) (packettest.IP, packettest.Body) {
	h := packettest.IP{TTL: 55, TOS: uint8(rng.Uint32()), ID: uint16(rng.Uint32()), FlowLabel: rng.Uint32()}
	if rng.IntN(3) == 0 {
		if is4 {
			h.Options = []byte{7, 7, 4, 0, 0, 0, 0, 1, 148, 4, 0, 0}[:4*(1+rng.IntN(3))]
			if len(h.Options) < 8 {
				h.Options = []byte{148, 4, 0, 0}
			}
		} else {
			h.Extensions = []packettest.Extension{{Kind: 0, Data: make([]byte, 6)}, {Kind: 60, Data: make([]byte, 14)}}[:1+rng.IntN(2)]
		}
	}
	data := make([]byte, 130+rng.IntN(100))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	port := func() uint16 { return uint16(1024 + rng.IntN(60000)) }
	switch rng.IntN(5) {
	case 0:
		return h, packettest.TCP{SrcPort: port(), DstPort: port(), Seq: rng.Uint32(), Flags: packettest.ACK, Data: data}
	case 1:
		return h, packettest.UDP{SrcPort: port(), DstPort: port(), Data: data}
	case 2:
		return h, packettest.UDP{SrcPort: port(), DstPort: port(), NoChecksum: is4, Data: data}
	case 3:
		return h, packettest.Echo{ID: port(), Seq: port(), Data: data}
	}
	return h, packettest.Raw{Proto: 132, Data: data}
}

// A single wrong bit anywhere in the message must be detected.
func TestDamagedICMPErrorsAreDropped(t *testing.T) { // RFC 5508, REQ-3
	rng := rand.New(rand.NewPCG(32, 33))
	for range 3000 {
		is4 := rng.IntN(2) == 0
		a, b := errorPair(t, is4, false)
		podA, _, _ := hosts(is4, a.pods)
		podB, _, _ := hosts(is4, b.pods)
		h, body := build(rng, is4)
		h.Src, h.Dst = podB, moved(podA, a.podsSeen)
		arrived := cross(t, b, a, packettest.Build(h, body))
		p := packettest.MustDecode(arrived)
		f := packettest.ICMPError{Type: 3, Code: 1, Quote: arrived}
		if !is4 {
			f.Type = 1
		}
		message := packettest.Build(packettest.IP{Src: podA, Dst: p.Src}, f)
		at := packettest.MustDecode(message).TransportOffset
		bit := rng.IntN(8 * (len(message) - at - 1)) // not in the type, because a changed type makes another kind of message
		message[at+1+bit/8] ^= 1 << (bit % 8)
		var v packet.View
		if err := v.Parse(message, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := a.engine.Outbound(&v, 0); verdict.Drop != natengine.DropBadChecksum {
			t.Fatalf("bit %d: %v %v", bit, verdict.Action, verdict.Drop)
		}
	}
}

// No message that is an error by the RFCs needs to be fragmented, and a fragment of an error
// cannot be translated.
func TestFragmentedICMPErrorsAreDropped(t *testing.T) {
	for _, is4 := range []bool{true, false} {
		a, b := errorPair(t, is4, false)
		podA, _, _ := hosts(is4, a.pods)
		podB, _, _ := hosts(is4, b.pods)
		rng := rand.New(rand.NewPCG(34, 35))
		h, body := build(rng, is4)
		h.Src, h.Dst = podB, moved(podA, a.podsSeen)
		arrived := cross(t, b, a, packettest.Build(h, body))
		f := packettest.ICMPError{Type: 3, Code: 1, Quote: arrived}
		if !is4 {
			f.Type = 1
		}
		message := packettest.Build(packettest.IP{Src: podA, Dst: packettest.MustDecode(arrived).Src}, f)
		var v packet.View
		if err := v.Parse(packettest.Fragments(message, 104, 1)[0], packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := a.engine.Outbound(&v, 0); verdict.Drop != natengine.DropICMPError {
			t.Errorf("%v %v", verdict.Action, verdict.Drop)
		}
	}
}
