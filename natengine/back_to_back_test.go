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

var gatewayAddr = netip.MustParseAddr("169.254.0.1")

// side is one cluster of a pair: its networks, the ranges to which the other side remaps these
// networks, and the engine of its gateway.
type side struct {
	pods, podsSeen, external, externalSeen netip.Prefix
	endpoints                              []natengine.Endpoint
	engine                                 *natengine.Engine
}

func (s *side) String() string {
	return fmt.Sprintf("pods %v seen as %v, external %v", s.pods, s.podsSeen, s.externalSeen)
}

// join derives the rules of each side from the other's networks, as in docs/liqo-v0.md,
// section 7.1.
func join(t testing.TB, a, b *side) {
	t.Helper()
	rules := func(own, other *side, id string) natengine.Peer {
		return natengine.Peer{
			ID:         id,
			RemotePods: []netip.Prefix{other.podsSeen}, RemoteExternal: []netip.Prefix{other.externalSeen},
			Pods:     []natengine.Remap{{From: own.pods, To: own.podsSeen}},
			External: []netip.Prefix{own.externalSeen}, Endpoints: own.endpoints,
		}
	}
	for _, s := range []struct{ own, other *side }{{a, b}, {b, a}} {
		s.own.engine = natengine.New(natengine.Config{})
		if err := s.own.engine.SetPeers([]natengine.Peer{rules(s.own, s.other, "other")}); err != nil {
			t.Fatal(err)
		}
	}
}

// cross sends a packet from one side to the other. It returns the packet as it arrives, or nil
// if one of the engines dropped it.
func cross(t testing.TB, from, to *side, b []byte) []byte {
	t.Helper()
	b = bytes.Clone(b)
	var v packet.View
	if err := v.Parse(b, packet.ChecksumComplete); err != nil {
		t.Fatal(err)
	}
	if trace := from.engine.Trace(&v, natengine.Outbound, 0); from.engine.Outbound(&v, 0).Action != natengine.Forward {
		t.Log(trace)
		return nil
	}
	packettest.Check(t, v.Bytes(), packettest.ValidChecksums())
	trace := to.engine.Trace(&v, natengine.Inbound, 0)
	if verdict := to.engine.Inbound(&v, 0); verdict.Action != natengine.Forward && verdict.Action != natengine.Deliver {
		t.Log(trace)
		return nil
	}
	packettest.Check(t, v.Bytes(), packettest.ValidChecksums())
	return v.Bytes()
}

// Requests pass through two gateways, and replies return. The reply must arrive at the socket that
// sent the request, and its source must be the destination of the request. The test covers all
// masks, the four combinations of remapping, and two sides that use the same range.
func TestReplyTranslationUndoesRequestTranslation(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	tried := 0
	for _, is4 := range []bool{true, false} {
		w := &world{rng: rng, is4: is4}
		longest := 32
		if !is4 {
			longest = 128
		}
		for bits := 1; bits <= longest; bits++ {
			for combination := range 5 {
				bitsB := 1 + rng.IntN(longest)
				a, b := newSide(w, bits), newSide(w, bitsB)
				if combination&1 != 0 {
					a.podsSeen = w.disjoint(bits, a.externalSeen, netip.Prefix{})
				}
				if combination&2 != 0 {
					b.podsSeen = w.disjoint(bitsB, b.externalSeen, netip.Prefix{})
				}
				if combination == 4 { // identical clusters that remap each other to the same range
					b = newSide(w, bits)
					b.pods = a.pods
					a.podsSeen = w.disjoint(bits, a.externalSeen, b.externalSeen)
					b.podsSeen = a.podsSeen
				}
				if a.podsSeen.Overlaps(a.externalSeen) || b.podsSeen.Overlaps(b.externalSeen) {
					continue // networks that IPAM would never allocate
				}
				tried++
				join(t, a, b)
				talk(t, w, a, b)
			}
		}
	}
	if tried < 700 {
		t.Errorf("only %d pairs tried", tried)
	}
}

func newSide(w *world, bits int) *side {
	s := &side{pods: w.prefix(bits)}
	s.podsSeen = s.pods
	s.external = w.disjoint(max(bits, 8), s.pods, netip.Prefix{})
	s.externalSeen = s.external
	return s
}

// disjoint returns a random prefix that overlaps neither p nor q. If it finds none, it returns any
// prefix.
func (w *world) disjoint(bits int, p, q netip.Prefix) netip.Prefix {
	r := w.prefix(bits)
	for range 100 {
		if !r.Overlaps(p) && !r.Overlaps(q) {
			break
		}
		r = w.prefix(bits)
	}
	return r
}

// talk sends packets from a pod and from a node of a to a pod of b, and the replies.
func talk(t *testing.T, w *world, a, b *side) {
	client, server := w.in(a.pods), w.in(b.pods)
	node := w.prefix(client.BitLen()).Addr()
	for _, from := range []netip.Addr{client, node} {
		to := moved(server, b.podsSeen)
		if impossible(from) || offLimits(to) || offLimits(server) || offLimits(from) || offLimits(moved(from, a.podsSeen)) {
			continue
		}
		if !isPod(from, a.pods) && offLimits(a.podsSeen.Addr()) {
			continue // 0.0.0.0/1 has no usable NAPT address
		}
		if to == b.podsSeen.Addr() && !b.podsSeen.IsSingleIP() {
			continue // the network address is not a pod
		}
		for _, c := range []struct {
			name           string
			request, reply packettest.Body
		}{
			{"udp", packettest.UDP{SrcPort: 40000, DstPort: 53, Data: []byte("?")}, packettest.UDP{SrcPort: 53, DstPort: 40000, Data: []byte("!")}},
			{"tcp", packettest.TCP{SrcPort: 40001, DstPort: 80, Flags: packettest.SYN}, packettest.TCP{SrcPort: 80, DstPort: 40001, Flags: packettest.SYN | packettest.ACK}},
			{"echo", packettest.Echo{ID: 7}, packettest.Echo{ID: 7, Reply: true}},
			{"same ports", packettest.UDP{SrcPort: 5000, DstPort: 5000}, packettest.UDP{SrcPort: 5000, DstPort: 5000}},
		} {
			what := fmt.Sprintf("%s from %v to %v, a %v, b %v", c.name, from, to, a, b)
			arrived := cross(t, a, b, packettest.Build(packettest.IP{Src: from, Dst: to}, c.request))
			if arrived == nil {
				t.Fatalf("request lost: %s", what)
			}
			p := packettest.MustDecode(arrived)
			if p.Dst != server {
				t.Fatalf("arrived at %v, not %v: %s", p.Dst, server, what)
			}
			answer := replyTo(c.reply, p)
			back := cross(t, b, a, packettest.Build(packettest.IP{Src: server, Dst: p.Src}, answer))
			if back == nil {
				t.Fatalf("reply lost: %s", what)
			}
			packettest.Check(t, back, packettest.Src(to), packettest.Dst(from))
			want := packettest.MustDecode(packettest.Build(packettest.IP{Src: to, Dst: from}, c.reply))
			if got := packettest.MustDecode(back); got.SrcPort != want.SrcPort || got.DstPort != want.DstPort || got.ICMPID != want.ICMPID {
				t.Fatalf("the ports of the reply are %d and %d: %s", got.SrcPort, got.DstPort, what)
			}
		}
	}
}

// replyTo returns body with the ports, or the identifier, of a reply to request.
func replyTo(body packettest.Body, request packettest.Packet) packettest.Body {
	switch b := body.(type) {
	case packettest.UDP:
		b.SrcPort, b.DstPort = request.DstPort, request.SrcPort
		return b
	case packettest.TCP:
		b.SrcPort, b.DstPort = request.DstPort, request.SrcPort
		return b
	case packettest.Echo:
		b.ID = request.ICMPID
		return b
	}
	return body
}

// twins returns two clusters with the same PodCIDR that remap each other to the same range
// (docs/liqo-v0.md, section 7.2).
func twins(t testing.TB) (a, b *side) {
	make := func() *side {
		return &side{
			pods: netip.MustParsePrefix("10.244.0.0/16"), podsSeen: netip.MustParsePrefix("10.246.0.0/16"),
			external: netip.MustParsePrefix("10.245.0.0/16"), externalSeen: netip.MustParsePrefix("10.247.0.0/16"),
			endpoints: []natengine.Endpoint{
				{Real: gatewayAddr, Seen: netip.MustParseAddr("10.247.0.1")},
				{Real: netip.MustParseAddr("192.168.7.7"), Seen: netip.MustParseAddr("10.247.0.9")},
			},
		}
	}
	a, b = make(), make()
	join(t, a, b)
	return a, b
}

// This is the capture in docs/liqo-v0.md, section 7.2: pod 10.244.1.10 of A pings 10.246.1.20.
func TestEnginesTranslateLikeLiqo(t *testing.T) {
	a, b := twins(t)
	ping := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.244.1.10"), Dst: netip.MustParseAddr("10.246.1.20")}, packettest.Echo{ID: 1})
	packettest.Check(t, cross(t, a, b, ping), packettest.Src(netip.MustParseAddr("10.246.1.10")), packettest.Dst(netip.MustParseAddr("10.244.1.20")))
}

// Pod 10.244.1.1 of A sends to pod 10.244.1.1 of B. In the tunnel, source and destination are
// the same address and port.
func TestPacketWithEqualSourceAndDestinationPassesTheTunnel(t *testing.T) {
	a, b := twins(t)
	in := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.244.1.1"), Dst: netip.MustParseAddr("10.246.1.1")}, packettest.UDP{SrcPort: 500, DstPort: 500})
	packettest.Check(t, cross(t, a, b, in), packettest.Src(netip.MustParseAddr("10.246.1.1")), packettest.Dst(netip.MustParseAddr("10.244.1.1")), packettest.Ports(500, 500))
}

// This is the connection check of docs/liqo-v0.md, section 8, in both directions at once. Each
// side's in-process endpoint answers the other's probe.
func TestGatewayConnectionCheckSucceedsInBothDirections(t *testing.T) {
	a, b := twins(t)
	target := netip.MustParseAddr("10.247.0.1")
	for _, s := range []struct{ from, to *side }{{a, b}, {b, a}} {
		probe := packettest.Build(packettest.IP{Src: gatewayAddr, Dst: target}, packettest.UDP{SrcPort: 12345, DstPort: 12345, Data: []byte("PING")})
		arrived := cross(t, s.from, s.to, probe)
		packettest.Check(t, arrived, packettest.Src(netip.MustParseAddr("10.246.0.0")), packettest.Dst(gatewayAddr), packettest.Ports(12345, 12345))
		answer := packettest.Build(packettest.IP{Src: gatewayAddr, Dst: netip.MustParseAddr("10.246.0.0")}, packettest.UDP{SrcPort: 12345, DstPort: 12345, Data: []byte("PONG")})
		packettest.Check(t, cross(t, s.to, s.from, answer), packettest.Src(target), packettest.Dst(gatewayAddr), packettest.Ports(12345, 12345))
	}
}

// A packet to the in-process endpoint must not be written to the TUN.
func TestPingOfTheInProcessEndpointIsDelivered(t *testing.T) {
	a, _ := twins(t)
	in := packettest.Build(packettest.IP{Src: netip.MustParseAddr("10.246.3.4"), Dst: netip.MustParseAddr("10.247.0.1")}, packettest.Echo{ID: 1})
	var v packet.View
	if err := v.Parse(in, packet.ChecksumComplete); err != nil {
		t.Fatal(err)
	}
	if verdict := a.engine.Inbound(&v, 0); verdict.Action != natengine.Deliver {
		t.Fatal(verdict)
	}
}

// Cluster A maps a pod of C as an endpoint for B (docs/liqo-v0.md, section 7.4). A packet from B's
// tunnel must enter C's tunnel with source and destination translated. For the reply and for an
// ICMP error, both translations must be undone.
func TestPacketsToAThirdClusterAreTranslatedTwice(t *testing.T) {
	e := natengine.New(natengine.Config{})
	addr, prefixes := netip.MustParseAddr, func(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s)} }
	pods := netip.MustParsePrefix("10.244.0.0/16")
	err := e.SetPeers([]natengine.Peer{
		{
			ID: "b", RemotePods: prefixes("10.71.0.0/16"), RemoteExternal: prefixes("10.72.0.0/16"),
			Pods: []natengine.Remap{{From: pods, To: netip.MustParsePrefix("10.81.0.0/16")}}, External: prefixes("10.82.0.0/16"),
			Endpoints: []natengine.Endpoint{{Real: addr("10.91.5.5"), Seen: addr("10.82.0.5")}},
		},
		{
			ID: "c", RemotePods: prefixes("10.91.0.0/16"), RemoteExternal: prefixes("10.92.0.0/16"),
			Pods: []natengine.Remap{{From: pods, To: netip.MustParsePrefix("10.101.0.0/16")}}, External: prefixes("10.102.0.0/16"),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	step := func(dir natengine.Direction, b []byte, src, dst string) []byte {
		t.Helper()
		var v packet.View
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		call := e.Outbound
		if dir == natengine.Inbound {
			call = e.Inbound
		}
		if verdict := call(&v, 0); verdict.Action != natengine.Forward {
			t.Fatalf("%v: %v", dir, verdict.Drop)
		}
		packettest.Check(t, v.Bytes(), packettest.Src(addr(src)), packettest.Dst(addr(dst)), packettest.ValidChecksums())
		return v.Bytes()
	}
	b := packettest.Build(packettest.IP{Src: addr("10.71.1.1"), Dst: addr("10.82.0.5")}, packettest.TCP{SrcPort: 4000, DstPort: 80, Flags: packettest.SYN})
	b = step(natengine.Inbound, b, "10.71.1.1", "10.91.5.5")
	b = step(natengine.Outbound, b, "10.101.0.0", "10.91.5.5")
	sent := bytes.Clone(b)
	b = packettest.Build(packettest.IP{Src: addr("10.91.5.5"), Dst: addr("10.101.0.0")}, packettest.TCP{SrcPort: 80, DstPort: 4000, Flags: packettest.SYN | packettest.ACK})
	b = step(natengine.Inbound, b, "10.91.5.5", "10.71.1.1")
	step(natengine.Outbound, b, "10.82.0.5", "10.71.1.1")

	b = packettest.Build(packettest.IP{Src: addr("10.91.5.5"), Dst: addr("10.101.0.0")}, packettest.ICMPError{Type: 3, Code: 3, Quote: sent[:28]})
	b = step(natengine.Inbound, b, "10.91.5.5", "10.71.1.1")
	b = step(natengine.Outbound, b, "10.82.0.5", "10.71.1.1")
	q, err := packettest.DecodeQuote(packettest.MustDecode(b).Data)
	if err != nil || q.Src != addr("10.71.1.1") || q.Dst != addr("10.82.0.5") || q.SrcPort != 4000 || q.DstPort != 80 {
		t.Errorf("the quote shows %v:%d > %v:%d, %v", q.Src, q.SrcPort, q.Dst, q.DstPort, err)
	}
}
