package natengine

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// datagram is a UDP datagram of 4000 octets in fragments; its content tells whether they were put together right.
func datagram(src, dst string, id uint32) (whole []byte, fragments [][]byte) {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	data := make([]byte, 4000)
	for i := range data {
		data[i] = byte(i * 7)
	}
	whole = packettest.Build(packettest.IP{Src: s.Addr(), Dst: d.Addr()}, packettest.UDP{SrcPort: s.Port(), DstPort: d.Port(), Data: data})
	return whole, packettest.Fragments(whole, 1480, id)
}

// reassembled puts fragments together and returns the datagram, checksum verified.
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

// sendAll sends fragments in the given order and returns what left, held ones in their place.
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

func TestFragmentsOfNAPTFollowTheFirstInAnyOrder(t *testing.T) { // RFC 4787, REQ-14
	for _, family := range []struct{ node, remote, nat string }{
		{"192.168.1.1:4000", "10.71.0.5:53", "10.246.0.0"}, {"[fd01::1]:4000", "[fd71::5]:53", "fd46::"},
	} {
		p := peerB()
		p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
		p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
		for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
			e := newEngine(t, Config{}, p)
			out(t, e, udp("192.168.9.9:4000", "10.71.0.5:53"), 0) // takes port 4000
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
			// And back, to the node.
			nat := netip.AddrPortFrom(first.Src, first.SrcPort)
			_, fragments = datagram(family.remote, nat.String(), 78)
			left, _ = sendAll(t, e, Inbound, fragments, order, 0)
			if got := reassembled(t, left); netip.AddrPortFrom(got.Dst, got.DstPort) != port(family.node) {
				t.Errorf("came back to %v:%d", got.Dst, got.DstPort)
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
	for _, i := range []int{1, 0, 2} {
		_, v := send(t, e, Inbound, fragments[i], 0)
		if want := map[int]Action{0: Deliver, 1: Hold, 2: Deliver}[i]; v.Action != want {
			t.Errorf("fragment %d: %v", i, v.Action)
		}
	}
}

func TestFragmentsShareTheFateOfTheFirst(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.71.0.5:53", "10.246.0.0:4000", 77) // no flow
	if _, v := send(t, e, Inbound, fragments[1], 0); v.Action != Hold {
		t.Fatal(v.Action, v.Drop)
	}
	for _, i := range []int{0, 2} {
		if _, v := send(t, e, Inbound, fragments[i], 0); v.Drop != DropNoFlow {
			t.Errorf("fragment %d: %v %v", i, v.Action, v.Drop)
		}
	}
	if n := e.Peers()[0].Drops(Inbound, DropNoFlow); n != 3 {
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

func TestFragmentsOfEqualIDAreKeptApart(t *testing.T) {
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

func TestIdentificationMayBeUsedAgain(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	for _, src := range []string{"192.168.1.1:4000", "192.168.1.1:5000", "192.168.1.1:4000"} {
		_, fragments := datagram(src, "10.71.0.5:53", 77)
		left, _ := sendAll(t, e, Outbound, fragments, []int{0, 1}, 0) // the last never comes
		if p := packettest.MustDecode(left[0]); p.SrcPort != port(src).Port() {
			t.Errorf("port %d", p.SrcPort)
		}
	}
}

func TestDuplicateFirstFragmentBeginsAgain(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	left, held := sendAll(t, e, Outbound, fragments, []int{0, 2, 0, 1}, 0)
	if len(left) != 4 || held != 0 {
		t.Errorf("%d left, %d held", len(left), held)
	}
}

func TestOneDatagramCannotTakeAllOctets(t *testing.T) {
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
	// The first alone goes on; the receiver times out too.
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
	lost := b.Drops(Outbound, DropFragmentStoreFull) + b.Drops(Outbound, DropFragmentTimeout)
	if sent != forwarded+lost || lost == 0 || forwarded == 0 {
		t.Errorf("%d sent, %d forwarded, %d counted as lost", sent, forwarded, lost)
	}
	if s := e.Stats().Peers[0]; s.FragmentBytes != 0 {
		t.Errorf("%+v", s)
	}
	_, fragments := datagram("192.168.1.1:4000", "10.73.0.5:53", 1) // towards the other peer all is well
	sendAll(t, e, Outbound, fragments, []int{2, 1, 0}, 0)
}

func TestTooManyFragmentsOfOneDatagram(t *testing.T) {
	e := newEngine(t, Config{MaxFragmentsPerSet: 1}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	sendAll(t, e, Outbound, fragments, []int{1}, 0)
	refused(t, e, Outbound, fragments[2], 0, DropFragmentStoreFull)
}

func TestHeldFragmentIsACopy(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("192.168.1.1:4000", "10.71.0.5:53", 77)
	borrowed := bytes.Clone(fragments[1])
	var v packet.View
	parse(t, &v, borrowed)
	e.Outbound(&v, 0)
	clear(borrowed) // the caller uses its buffer again
	left, _ := sendAll(t, e, Outbound, fragments, []int{0, 2}, 0)
	reassembled(t, left)
}

func TestRuleChangeForgetsFragments(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, fragments := datagram("10.71.0.5:53", "10.247.0.9:80", 77)
	sendAll(t, e, Inbound, fragments, []int{0}, 0)
	changed := peerB()
	changed.Endpoints[1].Real = ip("192.168.7.8")
	if err := e.SetPeers([]Peer{changed}); err != nil {
		t.Fatal(err)
	}
	if _, v := send(t, e, Inbound, fragments[1], 0); v.Action != Hold {
		t.Errorf("%v: a fragment followed a rule that is gone", v.Action)
	}
}
