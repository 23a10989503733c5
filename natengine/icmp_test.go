package natengine

import (
	"fmt"
	"testing"

	"github.com/isthmus-net/isthmus/packet/packettest"
)

// fault returns an ICMP error that quotes at most cut octets of a packet.
func fault(src, dst string, quoted []byte, cut int) []byte {
	return packettest.Build(packettest.IP{Src: ip(src), Dst: ip(dst)}, packettest.ICMPError{Type: 3, Code: 4, Rest: 1300, Quote: quoted[:min(cut, len(quoted))]})
}

// passFault sends an error that must pass. It returns the outer and the quoted addresses in
// one line.
func passFault(t testing.TB, e *Engine, dir Direction, b []byte, now tick) string {
	t.Helper()
	got, v := send(t, e, dir, b, now)
	if v.Action == Discard {
		t.Fatalf("%v: %v", dir, v.Drop)
	}
	packettest.Check(t, got, packettest.ValidChecksums(), packettest.ICMPType(3, 4))
	p := packettest.MustDecode(got)
	q, err := packettest.DecodeQuote(p.Data)
	if err != nil {
		t.Fatal(err)
	}
	if err := packettest.HeaderChecksum()(q); err != nil {
		t.Error(err)
	}
	s := fmt.Sprintf("%v > %v [%v:%d > %v:%d]", p.Src, p.Dst, q.Src, q.SrcPort, q.Dst, q.DstPort)
	if v.Action == Deliver {
		s += " delivered"
	}
	return s
}

func TestICMPErrorsAreTranslatedByTheQuotedPacket(t *testing.T) { // RFC 5508, REQ-4 and 5
	pod := peerB()
	pod.Endpoints = append(pod.Endpoints, Endpoint{ip("10.244.3.3"), ip("10.247.0.33")})
	for _, c := range []struct {
		name     string
		before   func(t *testing.T, e *Engine) // opens the flow
		dir      Direction
		src, dst string
		from, to string // ends of the quoted packet
		want     string
	}{
		{
			"prefix map, about a packet of a pod", nil, Inbound, "10.71.0.1", "10.246.1.1", "10.246.1.1:4000", "10.71.0.5:80",
			"10.71.0.1 > 10.244.1.1 [10.244.1.1:4000 > 10.71.0.5:80]",
		},
		{
			"prefix map, by the pod itself", nil, Outbound, "10.244.1.1", "10.71.0.5", "10.71.0.5:80", "10.244.1.1:4000",
			"10.246.1.1 > 10.71.0.5 [10.71.0.5:80 > 10.246.1.1:4000]",
		},
		{
			"prefix map, by a router", nil, Outbound, "192.168.0.254", "10.71.0.5", "10.71.0.5:80", "10.244.1.1:4000",
			"10.246.0.0 > 10.71.0.5 [10.71.0.5:80 > 10.246.1.1:4000]",
		},
		{
			"prefix map, by another pod", nil, Outbound, "10.244.9.9", "10.71.0.5", "10.71.0.5:80", "10.244.1.1:4000",
			"10.246.9.9 > 10.71.0.5 [10.71.0.5:80 > 10.246.1.1:4000]",
		},
		{
			"NAPT, about a packet of a node", func(t *testing.T, e *Engine) { out(t, e, udp("192.168.1.1:4000", "10.71.0.5:80"), 0) },
			Inbound, "10.71.0.1", "10.246.0.0", "10.246.0.0:4000", "10.71.0.5:80",
			"10.71.0.1 > 192.168.1.1 [192.168.1.1:4000 > 10.71.0.5:80]",
		},
		{
			"NAPT, by the node", func(t *testing.T, e *Engine) { out(t, e, udp("192.168.1.1:4000", "10.71.0.5:80"), 0) },
			Outbound, "192.168.1.1", "10.71.0.5", "10.71.0.5:80", "192.168.1.1:4000",
			"10.246.0.0 > 10.71.0.5 [10.71.0.5:80 > 10.246.0.0:4000]",
		},
		{
			"NAPT, about the probe of the gateway", func(t *testing.T, e *Engine) { out(t, e, udp("169.254.0.1:12345", "10.72.0.1:12345"), 0) },
			Inbound, "10.71.0.0", "10.246.0.0", "10.246.0.0:12345", "10.72.0.1:12345",
			"10.71.0.0 > 169.254.0.1 [169.254.0.1:12345 > 10.72.0.1:12345] delivered",
		},
		{
			"mapped endpoint, by itself", func(t *testing.T, e *Engine) { in(t, e, udp("10.71.0.5:80", "10.247.0.9:4000"), 0) },
			Outbound, "192.168.7.7", "10.71.0.5", "10.71.0.5:80", "192.168.7.7:4000",
			"10.247.0.9 > 10.71.0.5 [10.71.0.5:80 > 10.247.0.9:4000]",
		},
		{
			"mapped endpoint, by a router", func(t *testing.T, e *Engine) { in(t, e, udp("10.71.0.5:80", "10.247.0.9:4000"), 0) },
			Outbound, "192.168.0.254", "10.71.0.5", "10.71.0.5:80", "192.168.7.7:4000",
			"10.246.0.0 > 10.71.0.5 [10.71.0.5:80 > 10.247.0.9:4000]",
		},
		{
			"mapped endpoint, about its reply", func(t *testing.T, e *Engine) { in(t, e, udp("10.71.0.5:80", "10.247.0.9:4000"), 0) },
			Inbound, "10.71.0.1", "10.247.0.9", "10.247.0.9:4000", "10.71.0.5:80",
			"10.71.0.1 > 192.168.7.7 [192.168.7.7:4000 > 10.71.0.5:80]",
		},
		{
			"mapped pod, addressed as endpoint", func(t *testing.T, e *Engine) { in(t, e, udp("10.71.0.5:80", "10.247.0.33:4000"), 0) },
			Outbound, "10.244.3.3", "10.71.0.5", "10.71.0.5:80", "10.244.3.3:4000",
			"10.247.0.33 > 10.71.0.5 [10.71.0.5:80 > 10.247.0.33:4000]",
		},
		{
			"mapped pod, addressed as pod", nil, Outbound, "10.244.3.3", "10.71.0.5", "10.71.0.5:80", "10.244.3.3:4000",
			"10.246.3.3 > 10.71.0.5 [10.71.0.5:80 > 10.246.3.3:4000]",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, cut := range []int{28, 60, 1000} { // eight octets of transport header, some more, and the whole packet
				e := newEngine(t, Config{}, pod)
				if c.before != nil {
					c.before(t, e)
				}
				quoted := udp(c.from, c.to, make([]byte, 100)...)
				if got := passFault(t, e, c.dir, fault(c.src, c.dst, quoted, cut), 0); got != c.want {
					t.Errorf("cut at %d:\n got %s\nwant %s", cut, got, c.want)
				}
			}
		})
	}
}

func TestICMPErrorsWithoutMatchAreDropped(t *testing.T) { // RFC 5508, REQ-3 to 6
	e := newEngine(t, Config{}, peerB(), peerC())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:80"), 0)
	flow := udp("10.246.0.0:4000", "10.71.0.5:80")
	damaged := fault("10.71.0.1", "10.246.0.0", flow, 28)
	damaged[len(damaged)-1] ^= 1
	redirect := packettest.Build(packettest.IP{Src: ip("10.71.0.1"), Dst: ip("10.246.0.0")}, packettest.ICMPError{Type: 5, Quote: flow})
	aboutError := fault("10.71.0.1", "10.246.1.1", fault("10.246.1.1", "10.71.0.5", udp("10.71.0.5:80", "10.246.1.1:1"), 28), 100)
	for _, c := range []struct {
		name string
		dir  Direction
		b    []byte
		want Drop
	}{
		{"unknown port", Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4001", "10.71.0.5:80"), 28), DropICMPError},
		{"unknown remote", Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4000", "10.71.0.6:80"), 28), DropICMPError},
		{"cut before the ports", Inbound, fault("10.71.0.1", "10.246.0.0", flow, 22), DropICMPError},
		{"cut within the header", Inbound, fault("10.71.0.1", "10.246.0.0", flow, 19), DropICMPError},
		{"about a packet to another peer", Inbound, fault("10.71.0.1", "10.246.1.1", udp("10.246.1.1:4000", "10.73.0.5:80"), 28), DropICMPError},
		{"not to the quoted sender", Inbound, fault("10.71.0.1", "10.246.1.2", udp("10.246.1.1:4000", "10.71.0.5:80"), 28), DropICMPError},
		{"wrong checksum", Inbound, damaged, DropBadChecksum},
		{"redirect", Inbound, redirect, DropICMPError},
		{"about an error", Inbound, aboutError, DropICMPError},
		{"to an unmapped address", Inbound, fault("10.71.0.1", "10.247.0.50", udp("10.247.0.50:4000", "10.71.0.5:80"), 28), DropNoMapping},
		{"to a local address", Inbound, fault("10.71.0.1", "192.168.1.1", udp("192.168.1.1:4000", "10.71.0.5:80"), 28), DropDestination},
		{"unknown node", Outbound, fault("192.168.1.2", "10.71.0.5", udp("10.71.0.5:80", "192.168.1.2:4000"), 28), DropICMPError},
		{"not to the quoted sender", Outbound, fault("10.244.1.1", "10.71.0.5", udp("10.71.0.6:80", "10.244.1.1:4000"), 28), DropICMPError},
	} {
		t.Run(c.name, func(t *testing.T) { refused(t, e, c.dir, c.b, 0, c.want) })
	}
}

func TestICMPErrorsNeitherOpenRefreshNorEndFlows(t *testing.T) { // RFC 4787, REQ-12; RFC 5508, REQ-6; RFC 7857
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:80"), 0)
	b := fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4000", "10.71.0.5:80"), 28)
	passFault(t, e, Inbound, b, at(200))
	in(t, e, udp("10.71.0.5:80", "10.246.0.0:4000"), at(200)) // the flow still exists
	out(t, e, udp("192.168.1.1:4001", "10.71.0.5:80"), at(200))
	passFault(t, e, Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4001", "10.71.0.5:80"), 28), at(400))
	refused(t, e, Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4001", "10.71.0.5:80"), 28), at(502), DropICMPError)
	if s := e.Stats().Peers[0]; s.Created != 2 {
		t.Errorf("%+v", s)
	}
}

// A pod of B traces the route to a host of ours. Our node must appear with the NAPT address,
// because the peer knows no other address for it. An RFC 4884 extension must not change.
func TestTimeExceededFromANodeComesFromTheNAPTAddress(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	b := packettest.Build(packettest.IP{Src: ip("192.168.0.254"), Dst: ip("10.71.0.5")},
		packettest.ICMPError{Type: 11, Quote: udp("10.71.0.5:33434", "10.244.1.1:33434"), Extension: []byte{0x20, 0, 0xdf, 0xff, 0, 4, 1, 1}})
	got, v := send(t, e, Outbound, b, 0)
	if v.Action != Forward {
		t.Fatal(v.Drop)
	}
	packettest.Check(t, got, packettest.Src(ip("10.246.0.0")), packettest.ICMPType(11, 0), packettest.ValidChecksums())
	if tail := got[len(got)-8:]; string(tail) != string(b[len(b)-8:]) {
		t.Errorf("the extension changed to %x", tail)
	}
}

// The kernel of the gateway's namespace is a hop too. The peer must see it under the address at
// which it checks the gateway.
func TestTimeExceededFromTheGatewayComesFromItsMappedAddress(t *testing.T) {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	p.External = append(p.External, pfx("fd47::/64"))
	c := Config{Router4: ip("169.254.100.1"), Router6: ip("100::a9fe:6401"), Self6: ip("fd69::1")}
	without := p
	p.Endpoints = append(p.Endpoints, Endpoint{ip("fd69::1"), ip("fd47::1")})
	without.Endpoints = nil
	for _, x := range []struct {
		p                       Peer
		router, to, about, want string
		kind                    uint8
	}{
		{p, "169.254.100.1", "10.71.0.5", "10.244.1.1", "10.247.0.1", 11},
		{p, "100::a9fe:6401", "fd71::5", "fd44::1", "fd47::1", 3},
		{p, "169.254.100.2", "10.71.0.5", "10.244.1.1", "10.246.0.0", 11},
		{without, "169.254.100.1", "10.71.0.5", "10.244.1.1", "10.246.0.0", 11},
		{without, "100::a9fe:6401", "fd71::5", "fd44::1", "fd46::", 3},
	} {
		quoted := packettest.Build(packettest.IP{Src: ip(x.to), Dst: ip(x.about)}, packettest.UDP{SrcPort: 33434, DstPort: 33435})
		b := packettest.Build(packettest.IP{Src: ip(x.router), Dst: ip(x.to)}, packettest.ICMPError{Type: x.kind, Quote: quoted})
		got, v := send(t, newEngine(t, c, x.p), Outbound, b, 0)
		if v.Action != Forward {
			t.Fatal(v.Drop)
		}
		packettest.Check(t, got, packettest.Src(ip(x.want)), packettest.ICMPType(x.kind, 0), packettest.ValidChecksums())
	}
}

func TestICMPv6ErrorsAreTranslated(t *testing.T) {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	e := newEngine(t, Config{}, p)
	out(t, e, udp("[fd01::1]:4000", "[fd71::5]:80"), 0)
	for _, c := range []struct{ at, want string }{{"[fd46::]:4000", "fd01::1"}, {"[fd46::7]:4000", "fd44::7"}} {
		quoted := udp(c.at, "[fd71::5]:80")
		b := packettest.Build(packettest.IP{Src: ip("fd71::1"), Dst: port(c.at).Addr()}, packettest.ICMPError{Type: 2, Rest: 1280, Quote: quoted})
		got, v := send(t, e, Inbound, b, 0)
		if v.Action != Forward {
			t.Fatal(v.Drop)
		}
		packettest.Check(t, got, packettest.Dst(ip(c.want)), packettest.ICMPType(2, 0), packettest.ValidChecksums())
		if q, _ := packettest.DecodeQuote(packettest.MustDecode(got).Data); q.Src != ip(c.want) || q.SrcPort != 4000 {
			t.Errorf("quote from %v:%d", q.Src, q.SrcPort)
		}
	}
}

func TestNeighbourDiscoveryDoesNotPass(t *testing.T) {
	p := peerB()
	p.RemotePods = append(p.RemotePods, pfx("fd71::/64"))
	p.Pods = append(p.Pods, Remap{pfx("fd44::/64"), pfx("fd46::/64")})
	e := newEngine(t, Config{}, p)
	for _, kind := range []byte{130, 133, 134, 135, 136, 137, 143} {
		b := packettest.Build(packettest.IP{Src: ip("fd44::1"), Dst: ip("fd71::5")}, packettest.ICMPError{Type: kind, Quote: make([]byte, 16)})
		refused(t, e, Outbound, b, 0, DropProtocol)
		b = packettest.Build(packettest.IP{Src: ip("fd71::5"), Dst: ip("fd46::1")}, packettest.ICMPError{Type: kind, Quote: make([]byte, 16)})
		refused(t, e, Inbound, b, 0, DropProtocol)
	}
}
