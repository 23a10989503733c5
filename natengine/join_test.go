package natengine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// joinEnds has a datagram of a peer for each kind of destination.
var joinEnds = []struct{ name, src, dst string }{
	{"pod", "10.71.0.5:4000", "10.246.1.1:53"},
	{"pod, IPv6", "[fd71::5]:4000", "[fd46::7]:53"},
	{"flow of a node", "10.71.0.5:53", "10.246.0.0:4000"},
	{"flow of a node, IPv6", "[fd71::5]:53", "[fd46::]:4000"},
	{"mapped endpoint", "10.71.0.5:4000", "10.247.0.9:80"},
}

func joinEngine(t testing.TB, c Config) *Engine {
	e := newEngine(t, c, peer46(), peerC())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	out(t, e, udp("[fd01::1]:4000", "[fd71::5]:53"), 0)
	return e
}

// received returns the datagram that left for the node, in one packet or in consecutive
// fragments. It fails if a fragment is missing.
func received(t testing.TB, verdict Verdict, first []byte) (p packettest.Packet, transport []byte) {
	t.Helper()
	packets := slices.Concat([][]byte{first}, verdict.Released())
	for i, b := range packets {
		packettest.Check(t, b, packettest.HeaderChecksum())
		q := packettest.MustDecode(b)
		if i == 0 {
			p = q
		}
		if q.FragmentOffset != len(transport) || q.More != (i < len(packets)-1) || q.Dst != p.Dst || q.FragmentID != p.FragmentID {
			t.Fatalf("piece %d of %d: %+v", i, len(packets), q)
		}
		if q.More && (len(b) > 1280 || q.Src.Is4()) {
			t.Fatalf("a fragment of %d octets", len(b))
		}
		transport = append(transport, q.Transport...)
	}
	return p, transport
}

// Fragments of any size in any order must give the same result as the whole datagram. No
// packet may leave before the last fragment arrives.
func TestInboundFragmentsAreJoinedToTheDatagram(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 1))
	for n := range 1500 {
		ends := joinEnds[n%len(joinEnds)]
		e := joinEngine(t, Config{})
		s, d := netip.MustParseAddrPort(ends.src), netip.MustParseAddrPort(ends.dst)
		data := make([]byte, 100+rng.IntN(6000))
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		whole := packettest.Build(packettest.IP{Src: s.Addr(), Dst: d.Addr(), ID: 77}, packettest.UDP{SrcPort: s.Port(), DstPort: d.Port(), Data: data})
		fragments := packettest.Fragments(whole, max(8*(1+rng.IntN(100)), (len(data)/200+1)*8), 77)
		if len(fragments) < 2 {
			continue
		}
		rng.Shuffle(len(fragments), func(i, j int) { fragments[i], fragments[j] = fragments[j], fragments[i] })
		for _, f := range fragments[1:] {
			if b, v := send(t, e, Inbound, f, 0); v.Action != Hold || !bytes.Equal(b, f) {
				t.Fatalf("%s: %v, %v", ends.name, v.Action, v.Drop)
			}
		}
		b, v := send(t, e, Inbound, fragments[0], 0)
		if v.Action != Forward {
			t.Fatalf("%s, %d fragments: %v, %v", ends.name, len(fragments), v.Action, v.Drop)
		}
		p, transport := received(t, v, b)
		want, _ := send(t, e, Inbound, whole, 0)
		q := packettest.MustDecode(want)
		if p.Dst != q.Dst || p.Src != q.Src || !bytes.Equal(transport, q.Transport) || p.Src.Is4() && !bytes.Equal(b, want) {
			t.Fatalf("%s: %v and %d octets, want %v and %d", ends.name, p.Dst, len(transport), q.Dst, len(q.Transport))
		}
		if s := e.Stats().Peers[0]; s.FragmentSets != 0 || s.FragmentBytes != 0 {
			t.Fatalf("left over: %+v", s)
		}
	}
}

func TestJoinedDatagramMayBeFragmentedAgain(t *testing.T) {
	e := joinEngine(t, Config{})
	_, fragments := datagram("10.71.0.5:4000", "10.246.1.1:53", 77)
	for _, f := range fragments {
		f[6] |= 0x40 // DF
		sumHeader(f)
	}
	left, _ := sendAll(t, e, Inbound, fragments, []int{0, 1, 2}, 0)
	if len(left) != 1 || left[0][6] != 0 || left[0][7] != 0 {
		t.Errorf("%d packets, flags %x", len(left), left[0][6:8])
	}
	packettest.Check(t, left[0], packettest.ValidChecksums())
}

// Incomplete datagrams to pods, to a mapped endpoint and to the NAPT address flood the store. None
// of their fragments may leave, the store must stay within its bounds, and each fragment must be
// counted. Datagrams of another pod of the same peer, and of another peer, must still arrive.
func TestNodeReceivesNoIncompleteDatagramFromAPeer(t *testing.T) {
	for name, parts := range map[string][]int{"only the first": {0}, "only the last": {2}, "the middle missing": {0, 2}, "only the middle": {1}} {
		for _, spoofs := range []bool{false, true} { // the flood comes from one pod, or from the peer's gateway with forged sources
			{
				e := newEngine(t, Config{}, peerB(), peerC())
				sent := uint64(0)
				for i := range 6000 {
					now := tickOf(time.Duration(i) * time.Millisecond)
					src := "10.71.66.66:4000"
					if spoofs {
						src = fmt.Sprintf("10.71.%d.%d:4000", 64+i/250%100, 1+i%250)
					}
					dst := []string{"10.246.1.1:53", "10.247.0.9:80", "10.246.0.0:4000"}[i%3]
					_, fragments := datagram(src, dst, uint32(i))
					for _, part := range parts {
						sent++
						if _, v := send(t, e, Inbound, fragments[part], now); v.Action != Hold {
							t.Fatalf("%s: %v, %v", name, v.Action, v.Drop)
						}
					}
					if i%400 != 0 {
						continue
					}
					if s := e.Stats().Peers[0]; s.FragmentSets > defaultMaxFragmentSets || s.FragmentBytes > defaultMaxFragmentBytes {
						t.Fatalf("%s: %+v", name, s)
					}
					for _, src := range []string{"10.71.0.5:4000", "10.73.0.5:4000"} { // from a pod of the same peer and from one of another peer
						_, mine := datagram(src, "10.246.1.1:53", uint32(i))
						left, held := sendAll(t, e, Inbound, mine, []int{2, 0, 1}, now)
						if held != 2 || len(left) != 1 {
							t.Fatalf("%s: %d held, %d left", name, held, len(left))
						}
						reassembled(t, left)
					}
				}
				e.Sweep(duration(int32(at(3600))))
				p := e.Peers()[0]
				if n := p.Drops(Inbound, DropFragmentStoreFull) + p.Drops(Inbound, DropFragmentTimeout); n != sent {
					t.Errorf("%s: %d fragments, %d counted", name, sent, n)
				}
				if s := e.Stats().Peers[0]; s.FragmentSets != 0 || s.FragmentBytes != 0 {
					t.Errorf("%s: left over: %+v", name, s)
				}
			}
		}
	}
}

func TestContradictoryInboundFragmentsEndTheDatagram(t *testing.T) { // RFC 5722, RFC 8200, section 4.5
	for _, ends := range joinEnds[:2] {
		whole, _ := datagram(ends.src, ends.dst, 0)
		part := func(off, size int, more bool) []byte { return pieceOf(whole, off, size, more, 77) }
		other, _ := datagram(ends.src[:len(ends.src)-4]+"4001", ends.dst, 0)
		for name, last := range map[string][]byte{
			"overlap":                         part(72, 80, true),
			"fragment that covers all others": part(0, 400, true),
			"fragment beyond the end":         part(320, 80, true),
			"second last fragment":            part(160, 79, false),
			"second first fragment":           pieceOf(other, 0, 80, true, 77),
			"last fragment before the end":    part(240, 8, false),
		} {
			e := joinEngine(t, Config{})
			for _, b := range [][]byte{part(0, 80, true), part(240, 80, false)} {
				if _, v := send(t, e, Inbound, b, 0); v.Action != Hold {
					t.Fatal(v.Action, v.Drop)
				}
			}
			if b, v := send(t, e, Inbound, last, 0); v.Drop != DropFragment || !bytes.Equal(b, last) {
				t.Errorf("%s, %s: %v, %v", ends.name, name, v.Action, v.Drop)
			}
			refused(t, e, Inbound, part(80, 160, true), 0, DropFragment) // without the contradiction, this fragment would complete the datagram
			if n := e.Peers()[0].Drops(Inbound, DropFragment); n != 4 {
				t.Errorf("%s, %s: %d drops for four fragments", ends.name, name, n)
			}
			if s := e.Stats().Peers[0]; s.FragmentBytes != 0 {
				t.Errorf("%s, %s: %+v", ends.name, name, s)
			}
		}
		e := joinEngine(t, Config{})
		for _, b := range [][]byte{part(0, 80, true), part(240, 80, false)} {
			send(t, e, Inbound, b, 0)
			refused(t, e, Inbound, b, 0, DropFragment) // a duplicate
		}
	}
}

func TestInboundFragmentsBeyondTheBoundOfADatagramAreDropped(t *testing.T) {
	e := joinEngine(t, Config{MaxFragmentsPerSet: 2})
	whole, _ := datagram("10.71.0.5:4000", "10.246.1.1:53", 0)
	for n := range 3 {
		b := pieceOf(whole, n*160, 80, true, 77)
		if n < 2 {
			send(t, e, Inbound, b, 0)
		} else {
			refused(t, e, Inbound, b, 0, DropFragmentStoreFull)
		}
	}
}

// With the default bounds, a datagram of the maximum size must pass even when the smallest path MTU
// has cut it.
func TestLargestDatagramIsJoined(t *testing.T) {
	e := joinEngine(t, Config{})
	whole := packettest.Build(packettest.IP{Src: ip("10.71.0.5"), Dst: ip("10.246.1.1")}, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 65535-28)})
	var fragments [][]byte
	for _, f := range packettest.Fragments(whole, 1424, 7) { // from a pod with an MTU of 1,450, fragmented again for a peer with an MTU of 576
		var v packet.View
		parse(t, &v, f)
		fragments = append(fragments, v.Split(576, 0)...)
	}
	var left []byte
	for i, f := range fragments {
		b, v := send(t, e, Inbound, f, 0)
		if want := [2]Action{Hold, Forward}[(i+1)/len(fragments)]; v.Action != want {
			t.Fatalf("fragment %d of %d: %v, %v", i, len(fragments), v.Action, v.Drop)
		}
		left = b
	}
	packettest.Check(t, left, packettest.ValidChecksums(), packettest.Dst(ip("10.244.1.1")))
}

// Two datagrams must be refused: one with a header that does not fit a fragment of 1,280
// octets, and one with a false length in its UDP header.
func TestAnUndeliverableInboundDatagramIsRefused(t *testing.T) {
	e := joinEngine(t, Config{})
	h := packettest.IP{Src: ip("fd71::5"), Dst: ip("fd46::7"), Extensions: []packettest.Extension{{Kind: 60, Data: make([]byte, 1502)}}}
	long := packettest.Fragments(packettest.Build(h, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 1000)}), 504, 7)
	lie := packettest.Fragments(udp("10.71.0.5:4000", "10.246.1.1:53", make([]byte, 200)...), 104, 7)
	lie[0][25] += 40
	for _, c := range []struct {
		fragments [][]byte
		want      Drop
	}{{long, DropFragment}, {lie, DropMalformed}} {
		n := len(c.fragments)
		for _, f := range c.fragments[:n-1] {
			send(t, e, Inbound, f, 0)
		}
		if _, v := send(t, e, Inbound, c.fragments[n-1], 0); v.Drop != c.want {
			t.Errorf("%v, %v; want %v", v.Action, v.Drop, c.want)
		}
		if got := e.Peers()[0].Drops(Inbound, c.want); got != uint64(n) {
			t.Errorf("%d drops for %d fragments", got, n)
		}
	}
}

func TestHeldInboundFragmentIsACopy(t *testing.T) {
	e := joinEngine(t, Config{})
	_, fragments := datagram("10.71.0.5:4000", "10.246.1.1:53", 77)
	for _, i := range []int{2, 0} {
		borrowed := bytes.Clone(fragments[i])
		var v packet.View
		parse(t, &v, borrowed)
		e.Inbound(&v, 0)
		clear(borrowed) // the caller reuses its buffer
	}
	left, _ := sendAll(t, e, Inbound, fragments, []int{1}, 0)
	reassembled(t, left)
}

func TestTraceOfAnInboundFragmentChangesNothing(t *testing.T) {
	e := joinEngine(t, Config{})
	_, fragments := datagram("10.71.0.5:4000", "10.246.1.1:53", 77)
	var v packet.View
	parse(t, &v, fragments[0])
	if tr := e.Trace(&v, Inbound, 0); tr.Action != Hold {
		t.Error(tr)
	}
	if s := e.Stats().Peers[0]; s.FragmentSets != 0 {
		t.Errorf("%+v", s)
	}
}
