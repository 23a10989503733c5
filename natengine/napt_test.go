package natengine

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// peerB returns the default peer of these tests. It sees our 10.244.0.0/16 as 10.246.0.0/16,
// so the NAPT address is 10.246.0.0.
func peerB() Peer {
	return Peer{
		ID: "b", RemotePods: pfxs("10.71.0.0/16"), RemoteExternal: pfxs("10.72.0.0/16"),
		Pods: []Remap{{pfx("10.244.0.0/16"), pfx("10.246.0.0/16")}}, External: pfxs("10.247.0.0/16"),
		Endpoints: []Endpoint{{ip("169.254.0.1"), ip("10.247.0.1")}, {ip("192.168.7.7"), ip("10.247.0.9")}},
	}
}

// peerC returns a second peer that sees us under the same ranges as peer b.
func peerC() Peer {
	p := peerB()
	p.ID, p.RemotePods, p.RemoteExternal = "c", pfxs("10.73.0.0/16"), pfxs("10.74.0.0/16")
	return p
}

func newEngine(t testing.TB, c Config, peers ...Peer) *Engine {
	t.Helper()
	e := New(c)
	if err := e.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	return e
}

// at returns the tick after the given number of seconds.
func at(seconds int) tick { return tickOf(time.Duration(seconds) * time.Second) }

func udp(src, dst string, data ...byte) []byte {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return packettest.Build(packettest.IP{Src: s.Addr(), Dst: d.Addr()}, packettest.UDP{SrcPort: s.Port(), DstPort: d.Port(), Data: data})
}

func tcp(src, dst string, flags uint8) []byte {
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	return packettest.Build(packettest.IP{Src: s.Addr(), Dst: d.Addr()}, packettest.TCP{SrcPort: s.Port(), DstPort: d.Port(), Flags: flags})
}

// out sends a packet to the tunnel, which must pass, and returns its source and destination after
// translation. in does that for a packet from the tunnel.
func out(t testing.TB, e *Engine, b []byte, now tick) (src, dst netip.AddrPort) {
	t.Helper()
	return pass(t, e, Outbound, b, now)
}

func in(t testing.TB, e *Engine, b []byte, now tick) (src, dst netip.AddrPort) {
	t.Helper()
	return pass(t, e, Inbound, b, now)
}

func pass(t testing.TB, e *Engine, dir Direction, b []byte, now tick) (src, dst netip.AddrPort) {
	t.Helper()
	got, v := send(t, e, dir, b, now)
	if v.Action != Forward && v.Action != Deliver {
		t.Fatalf("%v packet: %v, %v", dir, v.Action, v.Drop)
	}
	packettest.Check(t, got, packettest.ValidChecksums())
	p := packettest.MustDecode(got)
	return netip.AddrPortFrom(p.Src, p.SrcPort), netip.AddrPortFrom(p.Dst, p.DstPort)
}

// refused sends a packet that must not pass. The packet must stay unchanged, and the drop must
// be counted.
func refused(t testing.TB, e *Engine, dir Direction, b []byte, now tick, want Drop) {
	t.Helper()
	count := func() uint64 {
		n := e.noPeer[dir][want].Load()
		for _, p := range e.Peers() {
			n += p.Drops(dir, want)
		}
		return n
	}
	before := count()
	got, v := send(t, e, dir, b, now)
	if v.Action != Discard || v.Drop != want {
		t.Fatalf("%v packet: %v, %v; want %v", dir, v.Action, v.Drop, want)
	}
	if string(got) != string(b) {
		t.Errorf("a refused packet was changed")
	}
	if n := count(); n != before+1 {
		t.Errorf("counter of %v went from %d to %d", want, before, n)
	}
}

func port(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func wantEnd(t testing.TB, got netip.AddrPort, want string) {
	t.Helper()
	if got != port(want) {
		t.Errorf("got %v, want %s", got, want)
	}
}

func TestNAPTKeepsPortAcrossRuleChange(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	other, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0)
	changed := peerB()
	changed.Endpoints = changed.Endpoints[:1]
	changed.MSS = 1200
	if err := e.SetPeers([]Peer{peerC(), changed}); err != nil {
		t.Fatal(err)
	}
	if again, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0); again != other {
		t.Errorf("%v became %v", other, again)
	}
	_, dst := in(t, e, udp("10.71.0.5:53", other.String()), 0)
	wantEnd(t, dst, "192.168.1.2:4000")
}

func TestRuleChangeEndsForbiddenFlows(t *testing.T) {
	e := newEngine(t, Config{}, peerB(), peerC())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0) // NAPT flow; ends because the NAPT address changes
	in(t, e, udp("10.71.0.5:99", "10.247.0.9:80"), 0)     // endpoint flow; ends because the endpoint is removed
	in(t, e, udp("10.71.0.5:99", "10.247.0.1:80"), 0)     // continues
	out(t, e, udp("192.168.1.1:4000", "10.73.0.5:53"), 0) // ends because its peer is removed
	changed := peerB()
	changed.Pods[0].To = pfx("10.248.0.0/16")
	changed.Endpoints[1].Real = ip("192.168.7.8")
	if err := e.SetPeers([]Peer{changed}); err != nil {
		t.Fatal(err)
	}
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.246.0.0:4000"), 0, DropDestination)
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.248.0.0:4000"), 0, DropNoFlow)
	src, _ := out(t, e, udp("192.168.7.7:80", "10.71.0.5:99"), 0)
	wantEnd(t, src, "10.248.0.0:80")
	src, _ = out(t, e, udp("169.254.0.1:80", "10.71.0.5:99"), 0)
	wantEnd(t, src, "10.247.0.1:80")
	refused(t, e, Outbound, udp("192.168.1.1:4000", "10.73.0.5:53"), 0, DropNoPeer)
	if s := e.Stats(); s.Flows != 2 || s.Peers[0].Purged != 2 {
		t.Errorf("%+v", s)
	}
}

// A goroutine that has loaded the old table may use it after the new rules are published.
func TestAPacketInFlightCannotBypassNewRules(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	old := e.rules.Load()
	changed := peerB()
	changed.Endpoints = nil
	if err := e.SetPeers([]Peer{changed}); err != nil {
		t.Fatal(err)
	}
	var v packet.View
	parse(t, &v, udp("10.71.0.5:53", "10.247.0.9:80"))
	r := old.remote(v.Src())
	if verdict := e.inbound(&v, r, 0, nil); verdict.Drop != DropNoFlow {
		t.Errorf("%v %v", verdict.Action, verdict.Drop)
	}
}

// A client can reach a mapped pod by the pod's own address and by the mapped one. At the pod,
// packets to either address have the same tuple if they come from the same port.
func TestMappedPodRepliesFromTheAddressThatTheClientUsedLast(t *testing.T) {
	p := peerSix()
	p.Endpoints = append(p.Endpoints, Endpoint{ip("10.244.3.3"), ip("10.247.0.33")}, Endpoint{ip("fd44::3"), ip("fd47::33")})
	segment := func(flags uint8) func(from, to string) []byte {
		return func(from, to string) []byte { return tcp(from, to, flags) }
	}
	datagram := func(from, to string) []byte { return udp(from, to) }
	echo := func(reply bool) func(from, to string) []byte {
		return func(from, to string) []byte {
			return packettest.Build(packettest.IP{Src: port(from).Addr(), Dst: port(to).Addr()}, packettest.Echo{ID: 80, Reply: reply})
		}
	}
	unported := func(from, to string) []byte {
		return packettest.Build(packettest.IP{Src: port(from).Addr(), Dst: port(to).Addr()}, packettest.Raw{Proto: 47, Data: []byte("GRE")})
	}
	const syn, ack, fin, rst = packettest.SYN, packettest.ACK, packettest.FIN, packettest.RST
	const direct, mapped = true, false
	for _, family := range []struct{ client, pod, own, other string }{
		{"10.71.0.5:4000", "10.244.3.3:80", "10.246.3.3:80", "10.247.0.33:80"},
		{"[fd71::5]:4000", "[fd44::3]:80", "[fd46::3]:80", "[fd47::33]:80"},
	} {
		type step struct {
			to     bool // destination: direct or mapped
			packet func(from, to string) []byte
		}
		for name, c := range map[string]struct {
			steps  []step
			answer func(from, to string) []byte
			from   bool
		}{
			"datagram":               {[]step{{mapped, datagram}, {direct, datagram}}, datagram, direct},
			"datagram, back again":   {[]step{{mapped, datagram}, {direct, datagram}, {mapped, datagram}}, datagram, mapped},
			"echo":                   {[]step{{mapped, echo(false)}, {direct, echo(false)}}, echo(true), direct},
			"echo reply":             {[]step{{mapped, echo(false)}, {direct, echo(true)}}, echo(true), mapped},
			"protocol without ports": {[]step{{mapped, unported}, {direct, unported}}, unported, direct},
			"SYN":                    {[]step{{mapped, segment(syn)}, {direct, segment(syn)}}, segment(syn | ack), direct},
			"segment after a SYN to the other address": {[]step{{mapped, segment(syn)}, {direct, segment(ack)}}, segment(ack), direct},
			"reset": {[]step{{mapped, segment(syn)}, {direct, segment(rst)}}, segment(syn | ack), mapped},
			"late segment of an established connection": {[]step{{mapped, segment(ack)}, {direct, segment(ack | fin)}, {direct, segment(syn | ack)}}, segment(ack), mapped},
			"SYN after an established connection":       {[]step{{mapped, segment(ack)}, {direct, segment(syn)}}, segment(ack), direct},
			"after both FINs":                           {[]step{{mapped, segment(ack | fin)}, {direct, segment(ack)}}, segment(ack | fin), direct},
		} {
			t.Run(family.client+" "+name, func(t *testing.T) {
				e := newEngine(t, Config{}, p)
				for _, s := range c.steps {
					to := family.other
					if s.to == direct {
						to = family.own
					}
					b := s.packet(family.client, to)
					if got, v := send(t, e, Inbound, b, 0); v.Action != Forward || packettest.MustDecode(got).Dst != port(family.pod).Addr() {
						t.Fatalf("%v, %v", v.Action, v.Drop)
					}
					if s.to == mapped { // the pod answers, so that a connection is established
						send(t, e, Outbound, c.answer(family.pod, family.client), 0)
					}
				}
				want := family.other
				if c.from == direct {
					want = family.own
				}
				got, _ := send(t, e, Outbound, c.answer(family.pod, family.client), 0)
				if src := packettest.MustDecode(got).Src; src != port(want).Addr() {
					t.Errorf("the answer is from %v, want %s", src, want)
				}
				// Another client, and the same client with another port, must not be affected.
				other := strings.Replace(family.client, "4000", "4001", 1)
				in(t, e, udp(other, family.other), 0)
				send(t, e, Inbound, c.steps[0].packet(family.client, family.own), 0)
				src, _ := out(t, e, udp(family.pod, other), 0)
				wantEnd(t, src, family.other)
				e.checkTables(t)
			})
		}
	}
}

func TestEachProtocolAndPeerHasItsOwnPorts(t *testing.T) {
	e := newEngine(t, Config{}, peerB(), peerC())
	for _, b := range [][]byte{
		udp("192.168.1.1:4000", "10.71.0.5:53"), tcp("192.168.1.2:4000", "10.71.0.5:53", packettest.SYN), udp("192.168.1.3:4000", "10.73.0.5:53"),
	} {
		src, _ := out(t, e, b, 0)
		wantEnd(t, src, "10.246.0.0:4000")
	}
}

func TestICMPQueriesShareTheNAPTAddressByIdentifier(t *testing.T) { // RFC 5508, REQ-1
	e := newEngine(t, Config{}, peerB())
	ids := map[uint16]string{}
	for _, host := range []string{"192.168.1.1", "192.168.1.2", "192.168.1.3"} {
		got, v := send(t, e, Outbound, packettest.Build(packettest.IP{Src: ip(host), Dst: ip("10.71.0.5")}, packettest.Echo{ID: 0}), 0)
		if v.Action != Forward {
			t.Fatal(v.Drop)
		}
		packettest.Check(t, got, packettest.ValidChecksums())
		ids[packettest.MustDecode(got).ICMPID] = host
	}
	if len(ids) != 3 || ids[0] != "192.168.1.1" {
		t.Fatalf("identifiers %v", ids)
	}
	for id, host := range ids {
		got, v := send(t, e, Inbound, packettest.Build(packettest.IP{Src: ip("10.71.0.5"), Dst: ip("10.246.0.0")}, packettest.Echo{ID: id, Seq: 1, Reply: true}), 0)
		if v.Action != Forward {
			t.Fatal(v.Drop)
		}
		packettest.Check(t, got, packettest.Dst(ip(host)), packettest.ICMPID(0), packettest.ValidChecksums())
	}
	request := packettest.Build(packettest.IP{Src: ip("10.71.0.5"), Dst: ip("10.246.0.0")}, packettest.Echo{ID: 0})
	refused(t, e, Inbound, request, 0, DropNoFlow)
}

func TestProtocolWithoutPortsServesOneHostPerRemoteAddress(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	gre := func(src, dst string) []byte {
		return packettest.Build(packettest.IP{Src: ip(src), Dst: ip(dst)}, packettest.Raw{Proto: 47, Data: []byte("gre")})
	}
	out(t, e, gre("192.168.1.1", "10.71.0.5"), 0)
	refused(t, e, Outbound, gre("192.168.1.2", "10.71.0.5"), 0, DropProtocol)
	out(t, e, gre("192.168.1.2", "10.71.0.6"), 0)
	if _, dst := in(t, e, gre("10.71.0.5", "10.246.0.0"), 0); dst.Addr() != ip("192.168.1.1") {
		t.Error(dst)
	}
	later := at(301)
	out(t, e, gre("192.168.1.2", "10.71.0.5"), later) // the flow of the other host has expired, even without a sweep
	if _, dst := in(t, e, gre("10.71.0.5", "10.246.0.0"), later); dst.Addr() != ip("192.168.1.2") {
		t.Error(dst)
	}
}

// allAnswered makes all flows of the first peer established.
func allAnswered(e *Engine) {
	e.Peers()[0].flows.each(func(_ uint32, f *entry, _ uint64) { f.word.Or(stateSeen) })
}

// A pod of ours that forges sources can take all ports, because it looks like many hosts. But none
// of its flows is ever answered.
func TestNewMappingTakesThePortOfTheOldestHalfOpenFlow(t *testing.T) {
	e := newEngine(t, Config{}, peer46(), peerC())
	answered := established(t, e, "192.168.1.1:4000", "10.71.0.5:443", 0)
	spoken, _ := out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	in(t, e, udp("10.71.0.5:53", spoken.String()), 0)
	out(t, e, tcp("192.168.1.1:4001", "10.71.0.5:443", packettest.SYN), 0) // half-open, of another class
	out(t, e, udp("[fd01::1]:4000", "[fd71::5]:53"), 0)                    // of another family
	in(t, e, udp("10.71.0.5:4000", "10.247.0.9:80"), 0)                    // without a port at the NAPT address; like the two flows above, older than the flood
	b := e.Peers()[0]
	var v packet.View
	tmpl := udp("192.168.1.1:4000", "10.71.0.5:53")
	flood := func(n int) {
		t.Helper()
		for i := range n {
			parse(t, &v, append([]byte(nil), tmpl...))
			v.SetSrc4(0xc0a90000 + uint32(i))
			v.SetSrcPort(uint16(1024 + i*7%60_000))
			if verdict := e.Outbound(&v, 0); verdict.Action != Forward {
				t.Fatalf("forged source %d: %v", i, verdict.Drop)
			}
		}
	}
	flood(70_000)
	if used := b.flows.napt.ports[0][udpPorts].inUse(); used != 1<<16-firstUserPort {
		t.Fatalf("%d ports in use: this is no test", used)
	}
	evicted := b.Stats().Evicted
	src, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0)
	if _, dst := in(t, e, udp("10.71.0.5:53", src.String()), 0); dst != port("192.168.1.2:4000") {
		t.Errorf("the reply goes to %v", dst)
	}
	if n := b.Stats().Evicted - evicted; n != 1 {
		t.Errorf("%d flows were evicted for one port", n)
	}
	flood(70_000)
	for _, answer := range [][]byte{tcp("10.71.0.5:443", answered.String(), packettest.ACK), udp("10.71.0.5:53", spoken.String()), udp("10.71.0.5:53", src.String()),
		tcp("10.71.0.5:443", "10.246.0.0:4001", packettest.SYN|packettest.ACK), udp("[fd71::5]:53", "[fd46::]:4000")} {
		in(t, e, answer, 0)
	}
	endpoint, _ := out(t, e, udp("192.168.7.7:80", "10.71.0.5:4000"), 0)
	wantEnd(t, endpoint, "10.247.0.9:80")
	e.checkTables(t)
	// An inside host with a well-known port may get a port of either range. One with a user port
	// must get a user port.
	low, _ := out(t, e, udp("192.168.1.3:53", "10.71.0.5:53"), 0)
	wantEnd(t, low, "10.246.0.0:53")
	allAnswered(e)
	refused(t, e, Outbound, udp("192.168.1.4:4000", "10.71.0.5:53"), 0, DropPortsExhausted)
}

// The port of a mapping with several flows becomes free when all of these flows have ended.
func TestEvictionContinuesUntilAPortIsFree(t *testing.T) {
	e := newEngine(t, Config{MaxFlowsPerHost: 1 << 20}, peerB())
	var v packet.View
	tmpl := udp("192.168.1.1:4000", "10.71.0.5:53")
	for i := firstUserPort; i < 1<<16; i++ {
		for dst := range uint32(1 + 3/(i-firstUserPort+1)) { // the oldest mapping has four flows
			parse(t, &v, append([]byte(nil), tmpl...))
			v.SetSrcPort(uint16(i))
			v.SetDst4(0x0a470005 + dst)
			e.Outbound(&v, 0)
		}
	}
	src, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0)
	if s := e.Stats().Peers[0]; src.Port() != firstUserPort || s.Evicted != 4 {
		t.Errorf("port %d, %d evicted", src.Port(), s.Evicted)
	}
	e.checkTables(t)
}

func TestPortExhaustionAffectsOnlyNewFlowsAndEnds(t *testing.T) {
	e := newEngine(t, Config{MaxFlowsPerHost: 1 << 20}, peerB())
	var v packet.View
	b := udp("192.168.1.1:4000", "10.71.0.5:53")
	open := func(host, p int, now tick) Drop {
		pkt := append([]byte(nil), b...)
		parse(t, &v, pkt)
		v.SetSrc4(0xc0a80000 + uint32(host))
		v.SetSrcPort(uint16(p))
		return e.Outbound(&v, duration(int32(now))).Drop
	}
	for p := 1; p < 1<<16; p++ {
		if d := open(1, p, 0); d != DropNone {
			t.Fatalf("port %d: %v", p, d)
		}
	}
	allAnswered(e)
	e.checkTables(t)
	if used := e.Peers()[0].flows.napt.ports[0][udpPorts]; used.inUse() != 1<<16-1 || used.has(0) {
		t.Errorf("%d ports in use, 0 among them: %v", used.inUse(), used.has(0))
	}
	if d := open(2, 4000, 0); d != DropPortsExhausted {
		t.Errorf("one too many: %v", d)
	}
	if d := open(2, 80, 0); d != DropPortsExhausted {
		t.Errorf("one too many: %v", d)
	}
	if d := open(1, 4000, 0); d != DropNone {
		t.Errorf("an established flow: %v", d)
	}
	out(t, e, tcp("192.168.1.2:4000", "10.71.0.5:53", packettest.SYN), 0) // TCP has its own ports
	for p := 1; p < 1<<16; p += 2 {
		open(1, p, at(200))
	}
	now := at(301)
	e.Sweep(duration(int32(now)))
	if d := open(2, 4000, now); d != DropNone {
		t.Errorf("after half of the flows expired: %v", d)
	}
	if n := e.Stats().Peers[0].Mappings; n != 1<<15+1 {
		t.Errorf("%d mappings", n)
	}
}

func TestWellKnownPortGetsAUserPortWhenItsRangeIsFull(t *testing.T) {
	var s portSet
	for p := uint16(1); p < 1024; p++ {
		s.take(p)
	}
	if p, ok := s.choose(80, tcpPorts, false); !ok || p < 1024 {
		t.Error(p, ok)
	}
	for p := 1024; p < 1<<16; p++ {
		s.take(uint16(p))
	}
	s.put(80)
	if p, ok := s.choose(4000, tcpPorts, false); ok {
		t.Errorf("a user port became %d", p)
	}
	if p, ok := s.choose(443, tcpPorts, false); !ok || p != 80 {
		t.Error(p, ok)
	}
}

// Exactly one port is free, and a search from any start must find it.
func TestScanFindsEveryFreePort(t *testing.T) {
	for free := range 300 {
		var s portSet
		for i := range s.taken {
			s.taken[i] = ^uint64(0)
		}
		s.taken[free/64] &^= 1 << (free % 64)
		for first := range uint32(300) {
			last := first + uint32(free)%130
			p, ok := s.scan(first, last, allPorts)
			if want := uint32(free) >= first && uint32(free) <= last; ok != want || ok && p != uint16(free) {
				t.Fatalf("free %d, range %d-%d: %d %v", free, first, last, p, ok)
			}
		}
	}
}

func TestMappedEndpointRepliesFromItsMappedAddress(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	_, dst := in(t, e, tcp("10.71.0.5:5000", "10.247.0.9:80", packettest.SYN), 0)
	wantEnd(t, dst, "192.168.7.7:80")
	src, _ := out(t, e, tcp("192.168.7.7:80", "10.71.0.5:5000", packettest.SYN|packettest.ACK), 0)
	wantEnd(t, src, "10.247.0.9:80")
	src, _ = out(t, e, tcp("192.168.7.7:81", "10.71.0.5:5000", packettest.SYN), 0) // a flow that the endpoint itself opens
	wantEnd(t, src, "10.246.0.0:81")
	refused(t, e, Inbound, tcp("10.71.0.5:5000", "10.247.0.8:80", packettest.SYN), 0, DropNoMapping)
	refused(t, e, Inbound, tcp("10.72.0.5:5000", "10.247.0.9:80", packettest.SYN), 0, DropNoFlow) // from RemoteExternal
	refused(t, e, Inbound, tcp("10.71.0.5:5001", "10.247.0.9:80", packettest.RST), 0, DropNoFlow)
}

func TestMappedPodRepliesFromTheAddressThatTheClientUsed(t *testing.T) {
	p := peerB()
	p.Endpoints = append(p.Endpoints, Endpoint{ip("10.244.3.3"), ip("10.247.0.33")})
	e := newEngine(t, Config{}, p)
	in(t, e, udp("10.71.0.5:1", "10.247.0.33:80"), 0)
	in(t, e, udp("10.71.0.5:2", "10.246.3.3:80"), 0)
	src, _ := out(t, e, udp("10.244.3.3:80", "10.71.0.5:1"), 0)
	wantEnd(t, src, "10.247.0.33:80")
	src, _ = out(t, e, udp("10.244.3.3:80", "10.71.0.5:2"), 0)
	wantEnd(t, src, "10.246.3.3:80")
}

func TestFlowWithTheTupleOfAnotherFlowIsRefused(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.7.7:80", "10.71.0.5:5000"), 0) // opened by the endpoint itself
	refused(t, e, Inbound, udp("10.71.0.5:5000", "10.247.0.9:80"), 0, DropFlowClash)
	later := at(301)
	in(t, e, udp("10.71.0.5:5000", "10.247.0.9:80"), later)
}

// established opens a TCP connection from host to peer b and returns our end as the peer sees
// it.
func established(t testing.TB, e *Engine, src, dst string, now tick) netip.AddrPort {
	t.Helper()
	seen, _ := out(t, e, tcp(src, dst, packettest.SYN), now)
	in(t, e, tcp(dst, seen.String(), packettest.SYN|packettest.ACK), now)
	out(t, e, tcp(src, dst, packettest.ACK), now)
	return seen
}

func TestTCPFlowsEndAfterTheTimeoutOfTheirState(t *testing.T) { // RFC 5382, REQ-5; RFC 6146, section 3.5.2.2; RFC 7857, section 2
	const src, dst = "192.168.1.1:4000", "10.71.0.5:80"
	ack, fin, rst := uint8(packettest.ACK), uint8(packettest.ACK|packettest.FIN), uint8(packettest.RST)
	for _, c := range []struct {
		name     string
		prepare  func(e *Engine, seen string)
		lifetime tick
	}{
		{"half-open", nil, 240},
		{"established", func(e *Engine, seen string) { established(t, e, src, dst, 0) }, 7440},
		{"half-closed stays", func(e *Engine, seen string) { established(t, e, src, dst, 0); out(t, e, tcp(src, dst, fin), 0) }, 7440},
		{"closed", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			in(t, e, tcp(dst, seen, fin), 0)
		}, 240},
		{"reset", func(e *Engine, seen string) { established(t, e, src, dst, 0); in(t, e, tcp(dst, seen, rst), 0) }, 240},
		{"reset, then continued", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, rst), 0)
			out(t, e, tcp(src, dst, ack), 0)
		}, 7440},
		{"reset does not refresh", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, rst), 0)
			in(t, e, tcp(dst, seen, rst), at(200))
		}, 240},
		{"reset of an idle connection starts the transitory timeout", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, rst), at(7000))
		}, 7240},
		{"reopened", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			in(t, e, tcp(dst, seen, fin), 0)
			established(t, e, src, dst, 0)
		}, 7440},
		{"simultaneous open", func(e *Engine, seen string) {
			in(t, e, tcp(dst, seen, packettest.SYN), 0)
			out(t, e, tcp(src, dst, packettest.SYN|packettest.ACK), 0)
			in(t, e, tcp(dst, seen, packettest.SYN|packettest.ACK), 0)
		}, 7440},
		{"simultaneous open is half-open until both have acknowledged", func(e *Engine, seen string) {
			in(t, e, tcp(dst, seen, packettest.SYN), 0)
			out(t, e, tcp(src, dst, packettest.SYN|packettest.ACK), 0)
		}, 240},
		{"simultaneous open with a repeated SYN", func(e *Engine, seen string) {
			in(t, e, tcp(dst, seen, packettest.SYN), 0)
			out(t, e, tcp(src, dst, packettest.SYN|packettest.ACK), 0)
			in(t, e, tcp(dst, seen, packettest.SYN), 0)
			in(t, e, tcp(dst, seen, packettest.SYN|packettest.ACK), 0)
			out(t, e, tcp(src, dst, ack), 0)
		}, 7440},
		{"a repeated SYN refreshes", func(e *Engine, seen string) { out(t, e, tcp(src, dst, packettest.SYN), at(100)) }, 340},
		{"a SYN-ACK without an answer is half-open", func(e *Engine, seen string) {
			in(t, e, tcp(dst, seen, packettest.SYN|packettest.ACK), 0)
			in(t, e, tcp(dst, seen, packettest.SYN|packettest.ACK), 0)
		}, 240},
		{"a refused connection is not refreshed by the refusal", func(e *Engine, seen string) { in(t, e, tcp(dst, seen, rst|ack), at(100)) }, 240},
		{"a refused connection that is retried", func(e *Engine, seen string) {
			in(t, e, tcp(dst, seen, rst|ack), 0)
			established(t, e, src, dst, at(10))
		}, 7450},
		{"data of the other direction after a FIN", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, fin), 0)
			out(t, e, tcp(src, dst, ack), at(7000))
			in(t, e, tcp(dst, seen, fin), at(7001)) // a retransmission
		}, 14441},
		{"closed, then the last ACK", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			in(t, e, tcp(dst, seen, fin), 0)
			out(t, e, tcp(src, dst, ack), at(1))
		}, 241},
		{"reset after a FIN, then continued", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			out(t, e, tcp(src, dst, rst), 0)
			in(t, e, tcp(dst, seen, ack), 0)
		}, 7440},
		{"reset after a close stays closed", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			in(t, e, tcp(dst, seen, fin), 0)
			in(t, e, tcp(dst, seen, rst), at(100))
			out(t, e, tcp(src, dst, ack), at(100))
		}, 340},
		{"reopened by the other side", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			out(t, e, tcp(src, dst, fin), 0)
			in(t, e, tcp(dst, seen, fin), 0)
			in(t, e, tcp(dst, seen, packettest.SYN), at(1))
			out(t, e, tcp(src, dst, packettest.SYN|packettest.ACK), at(1))
			in(t, e, tcp(dst, seen, ack), at(1))
		}, 7441},
		{"reopened and not answered", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, rst), 0)
			out(t, e, tcp(src, dst, packettest.SYN), at(100))
		}, 340},
		{"a SYN into a connection changes nothing", func(e *Engine, seen string) {
			established(t, e, src, dst, 0)
			in(t, e, tcp(dst, seen, packettest.SYN), 0)
		}, 7440},
	} {
		t.Run(c.name, func(t *testing.T) {
			for late := range 2 {
				e := newEngine(t, Config{}, peerB())
				seen, _ := out(t, e, tcp(src, dst, packettest.SYN), 0)
				if c.prepare != nil {
					c.prepare(e, seen.String())
				}
				now := tick(time.Duration(c.lifetime)*time.Second>>tickShift) - 4
				if late == 1 {
					now += 8
				}
				e.Sweep(duration(int32(now)))
				if n := e.Stats().Flows; n != 1-late {
					t.Errorf("%d flows after %v", n, duration(int32(now)))
				}
			}
		})
	}
}

// An answer could make the peer give up a simultaneous open. Without one, the peer sends its SYN
// again, and the open succeeds (RFC 5382, REQ-4).
func TestUnsolicitedSYNIsDroppedSilently(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	refused(t, e, Inbound, tcp("10.71.0.5:80", "10.246.0.0:4000", packettest.SYN), 0, DropNoFlow)
	out(t, e, tcp("192.168.1.1:4000", "10.71.0.5:80", packettest.SYN), at(1))
	_, dst := in(t, e, tcp("10.71.0.5:80", "10.246.0.0:4000", packettest.SYN), at(2))
	wantEnd(t, dst, "192.168.1.1:4000")
}

// After a restart of the engine, the next segment of the inside host opens the flow again. The flow
// gets the same port if that is free.
func TestConnectionContinuesAfterItsFlowIsLost(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	refused(t, e, Inbound, tcp("10.71.0.5:80", "10.246.0.0:4000", packettest.ACK), 0, DropNoFlow)
	refused(t, e, Outbound, tcp("192.168.1.1:4000", "10.71.0.5:80", packettest.RST|packettest.ACK), 0, DropNoFlow)
	src, _ := out(t, e, tcp("192.168.1.1:4000", "10.71.0.5:80", packettest.ACK|packettest.PSH), 0)
	wantEnd(t, src, "10.246.0.0:4000")
	in(t, e, tcp("10.71.0.5:80", "10.246.0.0:4000", packettest.ACK), 0)
	if f := e.Flows(2); len(f) != 1 || f[0].State != "established" {
		t.Errorf("%+v", f)
	}
}

// After the loss of the flow, the endpoint's next segment must not leave with the NAPT address as
// its source. The client would answer that with a RST to the NAPT address, and NAPT would translate
// the RST into one that ends the endpoint's connection.
func TestMappedEndpointKeepsItsConnectionAfterTheFlowIsLost(t *testing.T) {
	const client, seen, real = "10.71.0.5:4000", "10.247.0.9:80", "192.168.7.7:80"
	for _, flags := range []uint8{packettest.ACK, packettest.ACK | packettest.PSH, packettest.SYN | packettest.ACK, packettest.FIN | packettest.ACK, 0} {
		e := newEngine(t, Config{}, peerB()) // a new engine without the flow
		refused(t, e, Outbound, tcp(real, client, flags), 0, DropNoFlow)
		if s := e.Stats(); s.Flows != 0 {
			t.Fatalf("flags %#x: %d flows", flags, s.Flows)
		}
		in(t, e, tcp(client, seen, packettest.ACK), 0) // the next segment of the client
		src, _ := out(t, e, tcp(real, client, flags), 0)
		wantEnd(t, src, seen)
	}
	e := newEngine(t, Config{}, peerB())
	src, _ := out(t, e, tcp("192.168.7.7:4000", "10.71.0.5:443", packettest.SYN), 0) // a new connection of the endpoint
	wantEnd(t, src, "10.246.0.0:4000")
	out(t, e, tcp("192.168.7.8:4001", "10.71.0.5:443", packettest.ACK), 0) // another host continues its connection
	src, _ = out(t, e, udp("192.168.7.7:53", "10.71.0.5:4000"), 0)
	wantEnd(t, src, "10.246.0.0:53")
}

func TestIdleFlowsEndAfterTheirTimeout(t *testing.T) { // RFC 4787, REQ-5; RFC 5508, REQ-2
	for _, c := range []struct {
		b        []byte
		lifetime tick
	}{
		{udp("192.168.1.1:4000", "10.71.0.5:53"), 300},
		{packettest.Build(packettest.IP{Src: ip("192.168.1.1"), Dst: ip("10.71.0.5")}, packettest.Echo{ID: 1}), 60},
		{packettest.Build(packettest.IP{Src: ip("192.168.1.1"), Dst: ip("10.71.0.5")}, packettest.Raw{Proto: 47}), 300},
	} {
		e := newEngine(t, Config{}, peerB())
		edge := tick(time.Duration(c.lifetime) * time.Second >> tickShift)
		out(t, e, c.b, 0)
		out(t, e, c.b, edge/2) // refreshes the flow
		e.Sweep(duration(int32(edge + edge/2 - 4)))
		if e.Stats().Flows != 1 {
			t.Errorf("lifetime %d: ended too early", c.lifetime)
		}
		e.Sweep(duration(int32(edge + edge/2 + 4)))
		if s := e.Stats(); s.Flows != 0 || s.Peers[0].Mappings != 0 || s.Peers[0].Expired != 1 {
			t.Errorf("lifetime %d: %+v", c.lifetime, s)
		}
	}
}

func TestExpiredFlowEndsBeforeTheSweep(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.246.0.0:4000"), at(301), DropNoFlow)
	refused(t, e, Inbound, fault("10.71.0.1", "10.246.0.0", udp("10.246.0.0:4000", "10.71.0.5:53"), 28), at(301), DropICMPError)
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), at(301)) // opens the flow again
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:4000"), at(301))
	if s := e.Stats().Peers[0]; s.Flows != 1 || s.Created != 2 || s.Expired != 1 {
		t.Errorf("%+v", s)
	}
	e.checkTables(t)
}

func TestFlowBoundEvictsTheOldestHalfOpenFlow(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 4}, peerB())
	kept := established(t, e, "192.168.1.9:9", "10.71.0.5:80", 0)
	for i := 1; i <= 3; i++ {
		out(t, e, udp(fmt.Sprintf("192.168.1.%d:4000", i), "10.71.0.5:53"), 0)
	}
	out(t, e, udp("192.168.1.4:4000", "10.71.0.5:53"), 0)
	if s := e.Stats(); s.Flows != 4 || s.Peers[0].Evicted != 1 {
		t.Errorf("%+v", s)
	}
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.246.0.0:4000"), 0, DropNoFlow) // the evicted flow was that of 192.168.1.1
	_, dst := in(t, e, tcp("10.71.0.5:80", kept.String(), packettest.ACK), 0)
	wantEnd(t, dst, "192.168.1.9:9")
}

func TestEstablishedFlowsAreNeverEvicted(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 2}, peerB())
	for i := 1; i <= 2; i++ {
		src := fmt.Sprintf("192.168.1.%d:4000", i)
		seen, _ := out(t, e, udp(src, "10.71.0.5:53"), 0)
		in(t, e, udp("10.71.0.5:53", seen.String()), 0)
	}
	before := e.Stats().Peers[0].Mappings
	refused(t, e, Outbound, udp("192.168.1.3:4000", "10.71.0.5:53"), 0, DropFlowTableFull)
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.247.0.9:53"), 0, DropFlowTableFull)
	if s := e.Stats().Peers[0]; s.Flows != 2 || s.Mappings != before {
		t.Errorf("%+v", s)
	}
}

func TestClosedConnectionsMayBeEvicted(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 1}, peerB())
	seen := established(t, e, "192.168.1.1:4000", "10.71.0.5:80", 0)
	refused(t, e, Outbound, udp("192.168.1.3:4000", "10.71.0.5:53"), 0, DropFlowTableFull)
	in(t, e, tcp("10.71.0.5:80", seen.String(), packettest.RST), 0)
	e.Sweep(0) // puts the connection back into the queue
	out(t, e, udp("192.168.1.3:4000", "10.71.0.5:53"), 0)
}

func TestFloodOfOnePeerDoesNotAffectOtherPeers(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 1000}, peerB(), peerC())
	seen := established(t, e, "192.168.1.1:4000", "10.71.0.5:80", 0)
	var v packet.View
	flood := udp("10.73.0.5:53", "10.247.0.9:80")
	for i := range 20_000 { // peer c opens flows to a mapped endpoint
		parse(t, &v, append([]byte(nil), flood...))
		v.SetSrc4(0x0a490000 + uint32(i))
		if verdict := e.Inbound(&v, 0); verdict.Action != Forward {
			t.Fatal(verdict.Drop)
		}
	}
	s := e.Stats()
	if s.Peers[1].Flows != 500 || s.Peers[1].Evicted != 19_500 || s.Peers[0].Evicted != 0 {
		t.Errorf("%+v", s)
	}
	_, dst := in(t, e, tcp("10.71.0.5:80", seen.String(), packettest.ACK), 0)
	wantEnd(t, dst, "192.168.1.1:4000")
	for i := range 400 {
		out(t, e, udp(fmt.Sprintf("192.168.2.%d:%d", i/100, 1000+i), "10.71.0.5:53"), 0)
	}
	if e.Stats().Flows > 1000 {
		t.Error("more than MaxFlows")
	}
}

func TestPortIsFreeAgainAfterItsLastFlow(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	out(t, e, udp("192.168.1.1:4000", "10.71.0.6:53"), at(200))
	e.Sweep(duration(int32(at(301))))
	if src, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.6:53"), at(301)); src.Port() == 4000 {
		t.Error("port 4000 was allocated although a flow uses it")
	}
	e.Sweep(duration(int32(at(700))))
	src, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.6:53"), at(700))
	wantEnd(t, src, "10.246.0.0:4000")
}

func TestReplacementPortHasTheSameParity(t *testing.T) { // RFC 4787, REQ-4
	for _, want := range []uint16{0, 80, 443, 1024, 5060, 5061, 65535} {
		var s portSet
		s.take(want)
		for range 100 {
			p, ok := s.choose(want, udpPorts, false)
			if !ok || p == want || p == 0 || p%2 != want%2 || rangeOf(p) != rangeOf(want) {
				t.Fatalf("%d instead of %d, %v", p, want, ok)
			}
		}
	}
}

// Ports are taken one by one: first those of the same parity, then the others, and for a
// well-known port finally the user ports.
func TestChooseFindsEveryFreePort(t *testing.T) {
	for _, c := range []struct {
		want   uint16
		class  portClass
		random bool
		ports  int
		same   int // number of ports with the same range and parity
	}{
		{80, tcpPorts, false, 65535, 511}, {443, udpPorts, true, 65535, 512}, {5060, udpPorts, false, 64512, 32256},
		{65535, tcpPorts, true, 64512, 32256}, {0, udpPorts, false, 65535, 511}, {0, icmpIDs, false, 65536, 0}, {7, icmpIDs, true, 65536, 0},
	} {
		var s portSet
		for n := range c.ports {
			p, ok := s.choose(c.want, c.class, c.random)
			if !ok || s.has(p) || p == 0 && c.class != icmpIDs {
				t.Fatalf("%+v: port %d is %d, %v", c, n, p, ok)
			}
			if same := p%2 == c.want%2 && rangeOf(p) == rangeOf(c.want); c.same > 0 && same != (n < c.same) {
				t.Fatalf("%+v: port %d is %d", c, n, p)
			}
			s.take(p)
		}
		if p, ok := s.choose(c.want, c.class, c.random); ok {
			t.Errorf("%+v: one more, %d", c, p)
		}
		if s.inUse() != c.ports {
			t.Errorf("%+v: %d in use", c, s.inUse())
		}
	}
}

func TestRandomPortsOptionRandomizesEveryPort(t *testing.T) { // RFC 6056
	e := newEngine(t, Config{RandomPorts: true}, peerB())
	kept, seen := 0, map[uint16]bool{}
	for i := 1; i <= 50; i++ {
		src, _ := out(t, e, udp(fmt.Sprintf("192.168.1.%d:40000", i), "10.71.0.5:53"), 0)
		again, _ := out(t, e, udp(fmt.Sprintf("192.168.1.%d:40000", i), "10.71.0.6:53"), 0) // the mapping does not change
		wantEnd(t, again, src.String())
		if src.Port() == 40000 {
			kept++
		}
		if seen[src.Port()] || src.Port() < 1024 || src.Port()%2 != 0 {
			t.Errorf("port %d", src.Port())
		}
		seen[src.Port()] = true
	}
	if kept > 2 {
		t.Errorf("%d of 50 kept their port", kept)
	}
	for i := 1; i <= 50; i++ {
		b := packettest.Build(packettest.IP{Src: netip.MustParseAddr(fmt.Sprintf("192.168.1.%d", i)), Dst: ip("10.71.0.5")}, packettest.Echo{ID: 1})
		got, _ := send(t, e, Outbound, b, 0)
		if packettest.MustDecode(got).ICMPID == 1 {
			kept++
		}
	}
	if kept > 4 {
		t.Errorf("%d of 100 kept their port or identifier", kept)
	}
}

// BenchmarkChoosePort measures the worst cases under the table's mutex: a search for the last
// free port, and a search when no port is free.
func BenchmarkChoosePort(b *testing.B) {
	for _, free := range []int{1, 0} {
		b.Run(fmt.Sprintf("free=%d", free), func(b *testing.B) {
			var s portSet
			for p := 1; p < 1<<16-free; p++ {
				s.take(uint16(p))
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, ok := s.choose(40000, udpPorts, true); ok != (free > 0) {
					b.Fatal("wrong")
				}
			}
		})
	}
}
