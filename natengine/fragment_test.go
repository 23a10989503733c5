package natengine

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// datagram returns a UDP datagram of 4000 octets, whole and in fragments. Its content shows
// whether the fragments were joined correctly.
func datagram(src, dst string, id uint32) (whole []byte, fragments [][]byte) {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	data := make([]byte, 4000)
	for i := range data {
		data[i] = byte(i * 7)
	}
	whole = packettest.Build(packettest.IP{Src: s.Addr(), Dst: d.Addr()}, packettest.UDP{SrcPort: s.Port(), DstPort: d.Port(), Data: data})
	return whole, packettest.Fragments(whole, 1480, id)
}

// reassembled joins fragments, verifies the checksum and returns the datagram.
func reassembled(t testing.TB, fragments [][]byte) packettest.Packet {
	t.Helper()
	var payload [8000]byte
	size := 0
	var first packettest.Packet
	for _, f := range fragments {
		packettest.Check(t, f, packettest.HeaderChecksum())
		p := packettest.MustDecode(f)
		body := p.Transport
		copy(payload[p.FragmentOffset:], body)
		size = max(size, p.FragmentOffset+len(body))
		if p.FragmentOffset == 0 {
			first = p
		}
	}
	if size != 4008 || !first.Src.IsValid() {
		t.Fatalf("%d octets in %d fragments", size, len(fragments))
	}
	sum := packettest.InternetChecksum(pseudo(first, size), payload[:size])
	if sum != 0 {
		t.Errorf("UDP checksum off by %#x", sum)
	}
	return first
}

func pseudo(p packettest.Packet, size int) []byte {
	b := append(p.Src.AsSlice(), p.Dst.AsSlice()...)
	if p.Src.Is4() {
		return append(b, 0, 17, byte(size>>8), byte(size))
	}
	return append(b, 0, 0, byte(size>>8), byte(size), 0, 0, 0, 17)
}

// sendAll sends fragments in the given order. It returns the packets that left, in order,
// including released ones, and the number of fragments that were held.
func sendAll(t testing.TB, e *Engine, dir Direction, fragments [][]byte, order []int, now tick) (left [][]byte, held int) {
	t.Helper()
	for _, i := range order {
		b, v := send(t, e, dir, fragments[i], now)
		switch v.Action {
		case Forward, Deliver:
			left = append(left, b)
			left = append(left, v.Released()...)
		case Hold:
			held++
			if len(v.Released()) > 0 {
				t.Error("a held fragment released others")
			}
		default:
			t.Fatalf("fragment %d: %v", i, v.Drop)
		}
	}
	return left, held
}

func TestFragmentsBehindNAPTPassInAnyOrder(t *testing.T) { // RFC 4787, REQ-14
	for _, family := range []struct{ node, remote, nat string }{
		{"192.168.1.1:4000", "10.71.0.5:53", "10.246.0.0"}, {"[fd01::1]:4000", "[fd71::5]:53", "fd46::"},
	} {
		p := peerB()
		p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
		p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
		for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
			e := newEngine(t, Config{}, p)
			out(t, e, udp("192.168.9.9:4000", "10.71.0.5:53"), 0) // occupies port 4000
			_, fragments := datagram(family.node, family.remote, 77)
			left, held := sendAll(t, e, Outbound, fragments, order, 0)
			first := reassembled(t, left)
			if first.Src != ip(family.nat) {
				t.Errorf("source %v", first.Src)
			}
			for _, f := range left {
				packettest.Check(t, f, packettest.Src(ip(family.nat)))
			}
			if want := bytes.IndexByte([]byte{byte(order[0]), byte(order[1]), byte(order[2])}, 0); held != want {
				t.Errorf("order %v: %d held", order, held)
			}
			// The reply goes back to the node.
			nat := netip.AddrPortFrom(first.Src, first.SrcPort)
			_, fragments = datagram(family.remote, nat.String(), 78)
			left, _ = sendAll(t, e, Inbound, fragments, order, 0)
			if got := reassembled(t, left); netip.AddrPortFrom(got.Dst, got.DstPort) != port(family.node) {
				t.Errorf("the reply went to %v:%d", got.Dst, got.DstPort)
			}
			if s := e.Stats().Peers[0]; s.FragmentBytes != 0 || first.Src.Is4() && s.FragmentSets != 0 {
				t.Errorf("left over: %+v", s)
			}
		}
	}
}

func TestFragmentsOfPrefixMapNeedNoState(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.244.1.1:4000", "10.71.0.5:53", 77)
	left, held := sendAll(t, e, Outbound, fragments, []int{2, 1, 0}, 0)
	if first := reassembled(t, left); first.Src != ip("10.246.1.1") || held != 0 {
		t.Error(first.Src, held)
	}
	if s := e.Stats().Peers[0]; s.FragmentSets != 0 {
		t.Errorf("%+v", s)
	}
}

func TestFragmentsToTheInProcessEndpointAreDelivered(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.71.0.5:4000", "10.247.0.1:53", 77)
	for n, i := range []int{1, 0, 2} {
		b, v := send(t, e, Inbound, fragments[i], 0)
		if want := [...]Action{Hold, Hold, Deliver}[n]; v.Action != want || len(v.Released()) > 0 {
			t.Errorf("fragment %d: %v", i, v.Action)
		}
		if n == 2 && reassembled(t, [][]byte{b}).Dst != ip("169.254.0.1") {
			t.Errorf("%x", b[:40])
		}
	}
}

func TestFragmentsAreDroppedIfTheFirstIsDropped(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.71.0.5:53", "10.246.0.0:4000", 77) // there is no flow
	for n, i := range []int{1, 0, 2} {
		if b, v := send(t, e, Inbound, fragments[i], 0); n < 2 && v.Action != Hold || n == 2 && v.Drop != DropNoFlow || !bytes.Equal(b, fragments[i]) {
			t.Errorf("fragment %d: %v %v", i, v.Action, v.Drop)
		}
	}
	if n := e.Peers()[0].Drops(Inbound, DropNoFlow); n != 3 {
		t.Errorf("%d drops counted for three fragments", n)
	}
	// Outbound, the decision about the first fragment applies to the datagram.
	p := peerB()
	p.Pods = nil
	e = newEngine(t, Config{}, p)
	_, fragments = datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	if _, v := send(t, e, Outbound, fragments[1], 0); v.Action != Hold {
		t.Fatal(v.Action, v.Drop)
	}
	for _, i := range []int{0, 2} {
		if _, v := send(t, e, Outbound, fragments[i], 0); v.Drop != DropSource {
			t.Errorf("fragment %d: %v %v", i, v.Action, v.Drop)
		}
	}
	if n := e.Peers()[0].Drops(Outbound, DropSource); n != 3 {
		t.Errorf("%d drops counted for three fragments", n)
	}
}

func TestFragmentsToUnmappedAddressesAreNotHeld(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.71.0.5:53", "10.247.0.77:4000", 77)
	refused(t, e, Inbound, fragments[1], 0, DropNoMapping)
	_, fragments = datagram("10.71.0.5:53", "10.1.1.1:4000", 77)
	refused(t, e, Inbound, fragments[1], 0, DropDestination)
}

func TestFragmentsWithEqualIDAndOtherAddressesAreKeptApart(t *testing.T) {
	e := newEngine(t, Config{}, peerB(), peerC())
	sources := []string{"192.168.1.1:4000", "192.168.1.2:4000"}
	var all [][]byte
	for _, src := range sources {
		for _, dst := range []string{"10.71.0.5:53", "10.73.0.5:53"} {
			_, fragments := datagram(src, dst, 77)
			left, _ := sendAll(t, e, Outbound, fragments, []int{0}, 0)
			all = append(all, left...)
			left, _ = sendAll(t, e, Outbound, fragments, []int{2, 1}, 0)
			reassembled(t, append(left, all[len(all)-1]))
		}
	}
}

func TestIdentificationCanBeReusedAfterItsDatagram(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	for i, src := range []string{"192.168.1.1:4000", "192.168.1.1:5000"} { // complete datagrams
		_, fragments := datagram(src, "10.71.0.5:53", 77)
		left, _ := sendAll(t, e, Outbound, fragments, [][]int{{0, 1, 2}, {2, 1, 0}}[i], 0)
		if p := reassembled(t, left); p.SrcPort != port(src).Port() {
			t.Errorf("port %d", p.SrcPort)
		}
	}
	for i, src := range []string{"192.168.1.1:4000", "192.168.1.1:5000"} { // datagrams that time out
		_, fragments := datagram(src, "10.71.0.5:53", 77)
		sendAll(t, e, Outbound, fragments, []int{0, 1}, at(10*i))
	}
}

// The second first fragment may belong to another datagram that reuses the identification too
// early (RFC 4963). It may also be an attempt to put two flows into one datagram. Later
// fragments could belong to either, so none may pass.
func TestSecondFirstFragmentWithOtherPortsEndsTheDatagram(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, one := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	_, other := datagram("192.168.1.1:5000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, one, []int{0}, 0)
	refused(t, e, Outbound, other[0], 0, DropFragment)
	for _, b := range [][]byte{one[0], one[1], other[2]} {
		refused(t, e, Outbound, b, at(4), DropFragment)
	}
	if flows := e.Flows(9); len(flows) != 1 || flows[0].Local.Port() != 4000 {
		t.Errorf("the refused fragment opened a flow: %+v", flows)
	}
	left, _ := sendAll(t, e, Outbound, other, []int{1, 0, 2}, at(6))
	reassembled(t, left)
}

// Behind the NAPT address the receiver cannot distinguish the fragments of two hosts.
func TestFragmentsOfTwoHostsAreNotMixed(t *testing.T) {
	e := newEngine(t, Config{}, peer46())
	_, one := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	_, other := datagram("192.168.1.2:4000", "10.71.0.5:53", 77)
	left, _ := sendAll(t, e, Outbound, one, []int{0}, 0)
	if _, v := send(t, e, Outbound, other[2], 0); v.Action != Hold {
		t.Error(v.Action, v.Drop)
	}
	_, v := send(t, e, Outbound, other[0], 0)
	if n := e.Peers()[0].Drops(Outbound, DropFragment); v.Drop != DropFragment || n != 2 {
		t.Errorf("%v %v, %d counted", v.Action, v.Drop, n)
	}
	refused(t, e, Outbound, other[1], 0, DropFragment)
	more, _ := sendAll(t, e, Outbound, one, []int{2, 1}, 0)
	reassembled(t, append(left, more...))
	_, other = datagram("192.168.1.3:4000", "10.71.0.5:53", 77) // the identification is free again
	left, _ = sendAll(t, e, Outbound, other, []int{2, 0, 1}, 0)
	reassembled(t, left)

	// Inbound datagrams to the NAPT address and to a mapped address may go to the same host. That
	// host must receive only complete datagrams.
	out(t, e, udp("192.168.7.7:4444", "10.71.0.5:53"), 0)
	_, one = datagram("10.71.0.5:53", "10.246.0.0:4444", 78)
	_, other = datagram("10.71.0.5:53", "10.247.0.9:80", 78)
	sendAll(t, e, Inbound, one, []int{0, 2}, 0)
	left, _ = sendAll(t, e, Inbound, other, []int{0, 2, 1}, 0)
	if p := reassembled(t, left); p.DstPort != 80 {
		t.Error(p.DstPort)
	}
	left, _ = sendAll(t, e, Inbound, one, []int{1}, 0)
	if p := reassembled(t, left); p.DstPort != 4444 {
		t.Error(p.DstPort)
	}
}

func TestDuplicateFragmentIsDropped(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	var left [][]byte
	for _, i := range []int{2, 0, 1} {
		b, v := send(t, e, Outbound, fragments[i], 0)
		if v.Action == Forward {
			left = append(append(left, b), v.Released()...)
		}
		if i != 1 { // fragment 1 completes the datagram, whose entry is then removed
			refused(t, e, Outbound, fragments[i], 0, DropFragment)
		}
	}
	reassembled(t, left)
}

// piece returns a fragment with octets [off, off+size) of a UDP datagram from a node to a pod
// of the peer.
func piece(v6 bool, off, size int, more bool) []byte {
	src, dst := "192.168.1.1:4000", "10.71.0.5:53"
	if v6 {
		src, dst = "[fd01::1]:4000", "[fd71::5]:53"
	}
	whole, _ := datagram(src, dst, 0)
	return pieceOf(whole, off, size, more, 77)
}

func peer46() Peer {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	return p
}

func TestContradictoryOutboundFragmentsEndTheDatagram(t *testing.T) { // RFC 5722, section 4; RFC 8200, section 4.5
	type part struct {
		off, size int
		more      bool
	}
	first := part{0, 80, true}
	for _, c := range []struct {
		name  string
		parts []part // the last one contradicts the others
	}{
		{"overlap of the UDP header and more", []part{{8, 80, true}, first}},
		{"overlap by one unit at the end", []part{first, {80, 80, true}, {152, 80, true}}},
		{"overlap at the beginning", []part{first, {88, 80, true}, {80, 16, true}}},
		{"fragment that covers all others", []part{first, {160, 8, true}, {80, 200, true}}},
		{"fragment that overlaps two others", []part{first, {160, 80, true}, {72, 96, true}}},
		{"longer first fragment", []part{first, {0, 88, true}}},
		{"fragment beyond the end", []part{first, {160, 7, false}, {168, 8, true}}},
		{"last fragment repeated with the More bit", []part{first, {160, 8, false}, {160, 8, true}}},
		{"second last fragment, later", []part{first, {160, 7, false}, {160, 8, false}}},
		{"second last fragment, earlier", []part{first, {160, 80, false}, {120, 8, false}}},
		{"last fragment where more must follow", []part{first, {160, 80, true}, {200, 40, false}}},
		{"last fragment before all others", []part{{160, 80, true}, {80, 8, false}}},
	} {
		for _, v6 := range []bool{false, true} {
			e := newEngine(t, Config{}, peer46())
			held := 0
			for i, p := range c.parts {
				b := piece(v6, p.off, p.size, p.more)
				_, v := send(t, e, Outbound, b, 0)
				if last := i == len(c.parts)-1; last != (v.Drop == DropFragment) {
					t.Fatalf("%s, IPv6 %t: part %d: %v %v", c.name, v6, i, v.Action, v.Drop)
				}
				if v.Action == Hold {
					held++
				}
			}
			refused(t, e, Outbound, piece(v6, 800, 80, true), 0, DropFragment)
			refused(t, e, Outbound, piece(v6, 0, 80, true), 0, DropFragment)
			s, n := e.Stats().Peers[0], e.Peers()[0].Drops(Outbound, DropFragment)
			if s.FragmentBytes != 0 || n != uint64(held+3) {
				t.Errorf("%s, IPv6 %t: %d octets held; %d drops, %d had been held", c.name, v6, s.FragmentBytes, n, held)
			}
		}
	}
}

// This fragment has the same octets as the last one, but its More bit says that further fragments
// follow. It is not a duplicate, so no further fragment of the datagram may pass.
func TestRepeatedLastFragmentWithTheMoreBitEndsTheDatagram(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, lies := range []bool{false, true} {
			e := newEngine(t, Config{}, peer46())
			send(t, e, Outbound, piece(v6, 0, 80, true), 0)
			send(t, e, Outbound, piece(v6, 160, 8, false), 0)
			refused(t, e, Outbound, piece(v6, 160, 8, lies), 0, DropFragment)
			if _, v := send(t, e, Outbound, piece(v6, 80, 80, true), 0); (v.Action == Forward) == lies {
				t.Errorf("IPv6 %t, more follow %t: the missing part: %v %v", v6, lies, v.Action, v.Drop)
			}
		}
	}
}

// If a fragment could overwrite the header, a receiver that prefers later fragments would use
// another port than the one that the engine checked. The fragment header does not name TCP, so the
// check of RFC 3128 does not apply.
func TestTransportHeaderAfterIPv6OptionsCannotBeOverwritten(t *testing.T) {
	e := newEngine(t, Config{}, peer46())
	src, dst := ip("fd01::1"), ip("fd71::5")
	options := []byte{6, 0, 1, 4, 0, 0, 0, 0} // next header TCP, then a PadN option
	tcp := packettest.Build(packettest.IP{Src: src, Dst: dst}, packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.SYN, Data: make([]byte, 76)})[40:]
	fragment := func(word byte, data []byte) []byte {
		header := []packettest.Extension{{Kind: 44, Data: []byte{0, word, 0, 0, 0, 77}}}
		return packettest.Build(packettest.IP{Src: src, Dst: dst, Extensions: header}, packettest.Raw{Proto: 60, Data: data})
	}
	over := fragment(8, tcp[:16])
	for n, order := range [][]string{{"first", "over"}, {"over", "first"}} {
		for i, name := range order {
			b := over
			if name == "first" {
				b = fragment(1, append(options, tcp[:24]...))
			}
			_, v := send(t, e, Outbound, b, at(10*n))
			if i == 1 && v.Drop != DropFragment || i == 0 && v.Action == Discard {
				t.Errorf("%v: %v %v", order, v.Action, v.Drop)
			}
		}
	}
}

func TestFragmentStoreForgetsACompleteIPv6DatagramWithOptions(t *testing.T) {
	e := newEngine(t, Config{}, peer46())
	for id, behind := range []bool{false, true} {
		h := packettest.IP{Src: ip("fd01::1"), Dst: ip("fd71::5"), Extensions: []packettest.Extension{{Kind: 60, Data: []byte{1, 4, 0, 0, 0, 0}}}}
		whole := packettest.Build(h, packettest.UDP{SrcPort: 4000, DstPort: 53, Data: make([]byte, 4000)})
		fragments := packettest.Fragments(whole, 1400, uint32(id))
		if behind { // the fragment header precedes the options
			fragments = nil
			for off, size := 0, len(whole)-40; off < size; off += 1400 {
				fragments = append(fragments, pieceOf(whole, off, min(1400, size-off), off+1400 < size, uint32(id)))
			}
		}
		for _, order := range [][]int{{0, 1, 2}, {2, 0, 1}} {
			left, _ := sendAll(t, e, Outbound, fragments, order, 0)
			if s := e.Stats().Peers[0]; len(left) != 3 || s.FragmentSets != 0 {
				t.Errorf("behind %t: %d left, %d datagrams remembered", behind, len(left), s.FragmentSets)
			}
		}
	}
}

// Random pieces of datagrams are sent, most of them invalid. A table of octets checks the
// packets that leave.
func TestEachOctetOfADatagramPassesOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	whole, spoilt := 0, 0
	for range 3000 {
		v6 := rng.IntN(2) == 0
		e := newEngine(t, Config{}, peer46())
		var passed [512]bool
		sent, forwarded := 0, 0
		size := 1 + rng.IntN(300)
		note := func(b []byte) {
			p := packettest.MustDecode(b)
			forwarded++
			for i := range p.Transport {
				if passed[p.FragmentOffset+i] {
					t.Fatalf("octet %d passed twice", p.FragmentOffset+i)
				}
				passed[p.FragmentOffset+i] = true
			}
		}
		for range 12 {
			off := rng.IntN((size+7)/8) * 8
			n := min(8*(1+rng.IntN(6)), size-off)
			more := off+n < size
			if rng.IntN(40) == 0 && n%8 == 0 {
				more = !more
			}
			if off == 0 && n < 8 || off == 0 && !more {
				continue // not a fragment
			}
			b, v := send(t, e, Outbound, piece(v6, off, n, more), 0)
			sent++
			if v.Action == Forward {
				note(b)
				for _, r := range v.Released() {
					note(r)
				}
				if e.Stats().Peers[0].FragmentSets == 0 { // the datagram is complete, and the next piece belongs to a new one
					whole++
					break
				}
			}
		}
		e.Sweep(duration(int32(at(60))))
		b := e.Peers()[0]
		bad := int(b.Drops(Outbound, DropFragment))
		if lost := int(b.Drops(Outbound, DropFragmentTimeout)); sent != forwarded+bad+lost {
			t.Fatalf("%d sent, %d forwarded, %d refused, %d timed out", sent, forwarded, bad, lost)
		}
		if bad > 0 {
			spoilt++
		}
	}
	if whole < 20 || spoilt < 100 {
		t.Errorf("%d datagrams arrived whole, %d had refused pieces: too few for a test", whole, spoilt)
	}
}

func TestFragmentFloodOfOneHostLeavesRoomForOtherHosts(t *testing.T) {
	for _, order := range [][]int{{0}, {1}} { // first fragments without later ones, and later ones without the first
		e := newEngine(t, Config{}, peerB())
		_, mine := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
		left, _ := sendAll(t, e, Outbound, mine, []int{2}, 0)
		for id := range uint32(5000) {
			_, flood := datagram("192.168.6.6:4000", "10.71.0.5:53", id)
			sendAll(t, e, Outbound, flood, order, 0)
		}
		more, _ := sendAll(t, e, Outbound, mine, []int{0, 1}, 0)
		reassembled(t, append(left, more...))
		if s := e.Stats().Peers[0]; s.FragmentSets > defaultMaxFragmentSets/hostShare || s.FragmentBytes > defaultMaxFragmentBytes/hostShare {
			t.Errorf("one host has %d datagrams, %d octets", s.FragmentSets, s.FragmentBytes)
		}
	}
}

func TestHeldFragmentsOfOneHostLeaveRoomForOtherHosts(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentBytes: 40_000}, peerB())
	_, mine := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, mine, []int{1, 2}, 0)
	for id := range uint32(50) { // within the host's share of datagrams
		_, flood := datagram("192.168.6.6:4000", "10.71.0.5:53", id)
		sendAll(t, e, Outbound, flood, []int{1}, 0)
	}
	if s := e.Stats().Peers[0]; s.FragmentBytes > 10_000+len(mine[1])+len(mine[2]) {
		t.Errorf("%d octets held", s.FragmentBytes)
	}
	left, _ := sendAll(t, e, Outbound, mine, []int{0}, 0)
	reassembled(t, left)
	// A single datagram that is larger than the share is still held.
	e = newEngine(t, Config{MaxFragmentBytes: 10_000}, peerB())
	left, held := sendAll(t, e, Outbound, mine, []int{2, 1, 0}, 0)
	if reassembled(t, left); held != 2 {
		t.Errorf("%d held", held)
	}
}

// Fragments arrive concurrently, and the rules change. Each fragment must be forwarded or counted
// once, and nothing may remain in the store.
func TestConcurrentFragmentsAreForwardedOrCountedDuringRuleChanges(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentSets: 16, MaxFragmentBytes: 30_000, MaxFragmentsPerSet: 4}, peer46())
	changed := peer46()
	changed.Endpoints = changed.Endpoints[:1]
	const workers, rounds = 4, 400
	var sent, forwarded atomic.Int64
	var wg sync.WaitGroup
	for n := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(n)))
			var v packet.View
			for range rounds {
				dir, src, dst := Outbound, "192.168.1.1:4000", "10.71.0.5:53"
				if rng.IntN(2) == 0 {
					dir, src, dst = Inbound, "10.71.0.5:4000", "10.247.0.9:80"
				}
				_, fragments := datagram(src, dst, uint32(rng.IntN(30)))
				for _, i := range rng.Perm(3) {
					parse(t, &v, fragments[i])
					judge := e.Outbound
					if dir == Inbound {
						judge = e.Inbound
					}
					sent.Add(1)
					if verdict := judge(&v, 0); verdict.Action == Forward {
						if dir == Inbound {
							forwarded.Add(int64(len(fragments))) // joined to a datagram
						} else {
							forwarded.Add(1 + int64(len(verdict.Released())))
						}
					}
				}
			}
		})
	}
	for n := range 100 {
		if err := e.SetPeers([]Peer{[]Peer{peer46(), changed}[n%2]}); err != nil {
			t.Error(err)
		}
		e.Sweep(0)
	}
	wg.Wait()
	e.Sweep(duration(int32(at(60))))
	lost := int64(0)
	p := e.Peers()[0]
	for _, d := range Drops() {
		lost += int64(p.Drops(Outbound, d) + p.Drops(Inbound, d))
	}
	if sent.Load() != forwarded.Load()+lost {
		t.Errorf("%d sent, %d forwarded, %d counted", sent.Load(), forwarded.Load(), lost)
	}
	if s := e.Stats().Peers[0]; s.FragmentSets != 0 || s.FragmentBytes != 0 {
		t.Errorf("left over: %+v", s)
	}
	for dir := range p.fragments {
		s := &p.fragments[dir]
		if len(s.hosts) != 0 || len(s.after) != 0 || s.all != (fragmentList{}) || len(s.idleSets) > 16 || len(s.idleHosts) > 16 {
			t.Errorf("%d hosts, %d and %d idle entries", len(s.hosts), len(s.idleSets), len(s.idleHosts))
		}
	}
}

func TestFragmentsInOrderDoNotAllocate(t *testing.T) {
	e := newEngine(t, Config{}, peer46())
	for _, src := range []string{"192.168.1.1:4000", "[fd01::1]:4000"} {
		dst := "10.71.0.5:53"
		if src[0] == '[' {
			dst = "[fd71::5]:53"
		}
		_, fragments := datagram(src, dst, 77)
		var v packet.View
		scratch := make([]byte, 1600)
		pass := func() {
			for _, f := range fragments {
				parse(t, &v, scratch[:copy(scratch, f)])
				if e.Outbound(&v, 0).Action != Forward {
					t.Fatal("not forwarded")
				}
			}
		}
		pass()
		if n := testing.AllocsPerRun(1000, pass); n != 0 {
			t.Errorf("%s: %v allocations", src, n)
		}
	}
}

// otherNATAddress returns peer b with another NAPT address.
func otherNATAddress() Peer {
	p := peerB()
	p.Pods = []Remap{{pfx("10.244.0.0/16"), pfx("10.248.0.0/16")}}
	return p
}

// The engine may load the old rules for a packet just before new ones replace them.
func TestFragmentsAreTranslatedByTheNewRule(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	old := e.rules.Load().remote(ip("10.71.0.5"))
	judge := func(b []byte) Verdict {
		var v packet.View
		parse(t, &v, bytes.Clone(b))
		return e.outbound(&v, old, 0, nil)
	}
	if err := e.SetPeers([]Peer{peerB()}); err != nil { // the same rules as before
		t.Fatal(err)
	}
	if v := judge(fragments[0]); v.Action != Forward {
		t.Errorf("%v %v", v.Action, v.Drop)
	}
	if err := e.SetPeers([]Peer{otherNATAddress()}); err != nil {
		t.Fatal(err)
	}
	for _, b := range fragments {
		if v := judge(b); v.Drop != DropNoFlow {
			t.Errorf("%v %v", v.Action, v.Drop)
		}
	}
	if s := e.Stats().Peers[0]; s.FragmentSets != 0 {
		t.Errorf("%+v", s)
	}
	// A first fragment with an old decision arrives late. Other fragments of its datagram
	// already wait under the new rules.
	send(t, e, Outbound, fragments[1], 0)
	var v packet.View
	parse(t, &v, fragments[0])
	if held, _ := old.peer.fragments[Outbound].decide(&v, old.rule, addrOf(ip("10.246.0.0")), DropNone); held != nil {
		t.Error("an old decision was carried out")
	}
	left, _ := sendAll(t, e, Outbound, fragments, []int{0, 2}, 0)
	if p := reassembled(t, left); p.Src != ip("10.248.0.0") {
		t.Error(p.Src)
	}
	if err := e.SetPeers(nil); err != nil {
		t.Fatal(err)
	}
	if v := judge(fragments[0]); v.Drop != DropNoFlow {
		t.Errorf("the peer is gone: %v %v", v.Action, v.Drop)
	}
}

func TestDatagramLargerThanTheFragmentStoreIsDropped(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentBytes: 2000}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, fragments, []int{1}, 0)
	if _, v := send(t, e, Outbound, fragments[2], 0); v.Drop != DropFragmentStoreFull {
		t.Errorf("%v %v", v.Action, v.Drop)
	}
	if s := e.Stats().Peers[0]; s.FragmentBytes != 0 || s.FragmentSets != 0 {
		t.Errorf("%+v", s)
	}
	if n := e.Peers()[0].Drops(Outbound, DropFragmentStoreFull); n != 2 {
		t.Errorf("%d counted for the fragment that was held and the one that was not", n)
	}
}

func TestHeldFragmentsTimeOut(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, fragments, []int{1, 2}, 0)
	e.Sweep(duration(int32(at(4))))
	if s := e.Stats().Peers[0]; s.FragmentSets != 1 || s.FragmentBytes == 0 {
		t.Errorf("%+v", s)
	}
	e.Sweep(duration(int32(at(6))))
	if s := e.Stats().Peers[0]; s.FragmentSets != 0 || s.FragmentBytes != 0 {
		t.Errorf("%+v", s)
	}
	if n := e.Peers()[0].Drops(Outbound, DropFragmentTimeout); n != 2 {
		t.Errorf("%d counted", n)
	}
	// The first fragment alone passes; the receiver's own timeout drops it.
	left, _ := sendAll(t, e, Outbound, fragments, []int{0}, at(6))
	if len(left) != 1 {
		t.Errorf("%d fragments", len(left))
	}
}

func TestFragmentStoreIsBounded(t *testing.T) { // RFC 4787, REQ-14; RFC 6146, section 3.4
	c := Config{MaxFragmentSets: 10, MaxFragmentBytes: 20_000, MaxFragmentsPerSet: 3}
	e := newEngine(t, c, peerB(), peerC())
	rng := rand.New(rand.NewPCG(5, 6))
	sent, forwarded := uint64(0), uint64(0)
	for range 3000 {
		_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", uint32(rng.IntN(60)))
		_, v := send(t, e, Outbound, fragments[rng.IntN(3)], 0)
		sent++
		if v.Action == Forward {
			forwarded += 1 + uint64(len(v.Released()))
		}
		if s := e.Stats().Peers[0]; s.FragmentSets > 10 || s.FragmentBytes > 20_000 {
			t.Fatalf("%+v", s)
		}
	}
	e.Sweep(duration(int32(at(60))))
	b := e.Peers()[0]
	lost := b.Drops(Outbound, DropFragmentStoreFull) + b.Drops(Outbound, DropFragmentTimeout) + b.Drops(Outbound, DropFragment)
	if sent != forwarded+lost || lost == 0 || forwarded == 0 {
		t.Errorf("%d sent, %d forwarded, %d counted as lost", sent, forwarded, lost)
	}
	if s := e.Stats().Peers[0]; s.FragmentBytes != 0 {
		t.Errorf("%+v", s)
	}
	_, fragments := datagram("192.168.1.1:4000", "10.73.0.5:53", 1) // traffic to the other peer is not affected
	sendAll(t, e, Outbound, fragments, []int{2, 1, 0}, 0)
}

func TestFragmentsBeyondTheBoundOfADatagramAreDropped(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentsPerSet: 1}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, fragments, []int{1}, 0)
	refused(t, e, Outbound, fragments[2], 0, DropFragmentStoreFull)
}

func TestDatagramWithTooManyGapsIsDropped(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentsPerSet: 3}, peerB())
	for n := range 4 { // the first fragment and three after gaps
		if _, v := send(t, e, Outbound, piece(false, n*160, 80, true), 0); v.Action != Forward {
			t.Fatal(n, v.Action, v.Drop)
		}
	}
	refused(t, e, Outbound, piece(false, 800, 80, true), 0, DropFragmentStoreFull)
}

func TestHeldOutboundFragmentIsACopy(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	borrowed := bytes.Clone(fragments[1])
	var v packet.View
	parse(t, &v, borrowed)
	e.Outbound(&v, 0)
	clear(borrowed) // the caller reuses its buffer
	left, _ := sendAll(t, e, Outbound, fragments, []int{0, 2}, 0)
	reassembled(t, left)
}

func TestRuleChangeForgetsOutboundFragments(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, fragments, []int{0}, 0)
	if err := e.SetPeers([]Peer{otherNATAddress()}); err != nil {
		t.Fatal(err)
	}
	if _, v := send(t, e, Outbound, fragments[1], 0); v.Action != Hold {
		t.Errorf("%v: a fragment followed a rule that is gone", v.Action)
	}
}
