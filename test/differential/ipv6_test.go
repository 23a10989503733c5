package differential

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// plan6 is a plan for IPv6. It translates addresses bit by bit, as text, so that it shares no
// code with the engine.
type plan6 struct {
	name           string
	pods, podsSeen [2]netip.Prefix
	ext            [2]netip.Prefix // as the other side sees it; nodes and endpoints are in no prefix
}

var plans6 = []plan6{
	newPlan6("none remapped", "fd00:1::/48", "fd00:1::/48", "fd00:2::/64", "fd00:2::/64"),
	newPlan6("A remapped", "fd00:10:244::/56", "fd00:10:246::/56", "fd00:50::/64", "fd00:50::/64"),
	newPlan6("same range on both sides", "fd00:10:244::/56", "fd00:10:246::/56", "fd00:10:244::/56", "fd00:10:246::/56"),
	newPlan6("unequal lengths", "fd00:10:244::/48", "2001:db8:ffff::/48", "fd00:10:244:1::/64", "fdff:ffff:ffff:ffff::/64"),
	newPlan6("lengths off the words", "fd00:8000::/17", "fdaa:8000::/17", "fd00:9::fff0:0/109", "fd00:7::8:0/109"),
	newPlan6("longest", "fd00::1:0/112", "fd99::ffff:0/112", "fd00:9::4/126", "fd00:7::fc/126"),
}

func newPlan6(name, podsA, seenA, podsB, seenB string) plan6 {
	p := netip.MustParsePrefix
	return plan6{
		name: name, pods: [2]netip.Prefix{p(podsA), p(podsB)}, podsSeen: [2]netip.Prefix{p(seenA), p(seenB)},
		ext: [2]netip.Prefix{p("fc00:a::/112"), p("fc00:b::/112")},
	}
}

func (p plan6) node(s side) netip.Addr { return netip.MustParseAddr(fmt.Sprintf("fc00:1::%d", s+1)) }
func (p plan6) endpoint(s side) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fc00:e::%d", s+1))
}
func (p plan6) mapped(s side) netip.Addr { return p.ext[s].Addr().Next().Next() }

// pod returns a random pod of a side, and the address under which the other side sees it.
func (p plan6) pod(rng *rand.Rand, s side) (own, seen netip.Addr) {
	for {
		host := ""
		for range 128 - p.pods[s].Bits() {
			host += fmt.Sprint(rng.IntN(2))
		}
		own, seen = joined(p.pods[s], host), joined(p.podsSeen[s], host)
		if own != p.pods[s].Addr() { // the network address is not a pod
			return own, seen
		}
	}
}

// joined returns the address with the network bits of p and the given host bits.
func joined(p netip.Prefix, host string) netip.Addr {
	net := ""
	for _, b := range p.Addr().AsSlice() {
		net += fmt.Sprintf("%08b", b)
	}
	text := net[:p.Bits()] + host
	var b [16]byte
	for i, c := range text {
		if c == '1' {
			b[i/8] |= 0x80 >> (i % 8)
		}
	}
	return netip.AddrFrom16(b)
}

// newKernel6 is newKernel for IPv6.
func newKernel6(t *testing.T, p plan6, rules func(plan6, side) string) *kernel {
	hosts.Need(t, "nft")
	k := &kernel{}
	var pods, gateways [2]*hosts.Host
	for _, s := range []side{A, B} {
		pods[s], gateways[s] = hosts.New(t, "pod"+s.String()), hosts.New(t, "gw"+s.String())
		gateways[s].IPv6()
		hosts.Veth(gateways[s], "lan", pods[s], "eth0", 1500)
	}
	hosts.Veth(gateways[A], "wan", gateways[B], "wan", 1500)
	mac := func(h *hosts.Host, dev string) net.HardwareAddr { return h.Link(dev).Attrs().HardwareAddr }
	for _, s := range []side{A, B} {
		g := gateways[s]
		lan, wan := netip.MustParseAddr("fe80::1"), netip.MustParseAddr("fe80::2")
		g.Neighbour(lan, mac(pods[s], "eth0"), "lan")
		g.Neighbour(wan, mac(gateways[s.other()], "wan"), "wan")
		g.Route(netip.MustParsePrefix("::/0"), lan, "lan")
		for _, remote := range []netip.Prefix{p.podsSeen[s.other()], p.ext[s.other()]} {
			g.Route(remote, wan, "wan")
		}
		g.Run(rules(p, s), "nft", "-f", "-")
		remember(g)
		k.pods[s] = pods[s].Raw6("eth0", mac(g, "lan"))
		k.wire[s] = g.Raw6("wan", nil)
	}
	return k
}

// rules6 returns the rules of statefulRules for IPv6.
func rules6(p plan6, s side) string {
	r := s.other()
	var post, pre string
	remote := fmt.Sprintf("{ %s, %s }", p.podsSeen[r], p.ext[r])
	if p.pods[s] != p.podsSeen[s] {
		post = fmt.Sprintf(`oifname "wan" ip6 daddr %s ip6 saddr %s snat ip6 prefix to ip6 saddr map { %[2]s : %[3]s }`,
			remote, p.pods[s], p.podsSeen[s])
		pre = fmt.Sprintf(`iifname "wan" ip6 saddr %s ip6 daddr %s dnat ip6 prefix to ip6 daddr map { %[2]s : %[3]s }`,
			p.podsSeen[r], p.podsSeen[s], p.pods[s])
	}
	return fmt.Sprintf(`table ip6 oracle {
  chain post {
    type nat hook postrouting priority srcnat; policy accept;
    %s
    oifname "wan" ip6 daddr %s ip6 saddr != %s snat to %s
  }
  chain pre {
    type nat hook prerouting priority dstnat; policy accept;
    %s
    iifname "wan" ip6 saddr %s ip6 daddr %s dnat to %s
  }
}
`, post, remote, p.pods[s], p.podsSeen[s].Addr(), pre, p.podsSeen[r], p.mapped(s), p.endpoint(s))
}

// stateless6 returns the rules of statelessRules for IPv6.
func stateless6(p plan6, s side) string {
	r := s.other()
	set := func(field string, from, to netip.Prefix) string {
		host := joined(netip.PrefixFrom(netip.IPv6Unspecified(), from.Bits()), strings.Repeat("1", 128-from.Bits()))
		return fmt.Sprintf("ip6 %[1]s %[2]s ip6 %[1]s set ip6 %[1]s & %[3]s | %[4]s", field, from, host, to.Addr())
	}
	if p.pods[s] == p.podsSeen[s] {
		return "table ip6 oracle {}\n"
	}
	return fmt.Sprintf(`table ip6 oracle {
  chain post {
    type filter hook postrouting priority srcnat; policy accept;
    oifname "wan" ip6 daddr %s %s
  }
  chain pre {
    type filter hook prerouting priority raw; policy accept;
    iifname "wan" ip6 saddr %s %s
  }
}
`, p.podsSeen[r], set("saddr", p.pods[s], p.podsSeen[s]), p.podsSeen[r], set("daddr", p.podsSeen[s], p.pods[s]))
}

func newEngines6(t *testing.T, p plan6) *engines {
	return enginesOf(t, p.pods, p.podsSeen, p.ext, p.endpoint, p.mapped)
}

// exchange6 is an exchange over IPv6.
type exchange6 struct {
	plan    plan6
	kernel  *kernel
	engines *engines
	port    uint16 // last port used; a new one for each flow, so that conntrack never sees a flow twice
}

// send sends a packet to the other side through both translators and returns the packet that
// arrived. Both must produce the same octets, in the tunnel and at the end. The addresses must
// be those of the table in docs/liqo-v0.md, section 7.2.
func (x *exchange6) send(t *testing.T, from side, b []byte, wireSrc, arrivedDst netip.Addr) []byte {
	t.Helper()
	o, wire, out := x.sendBoth(t, from, b)
	if len(o.out) != 1 {
		t.Fatalf("%v: engine %d packets, drops %v\n%s", from, len(o.out), o.drops, head(b))
	}
	if !bytes.Equal(o.wire[0], wire) || !bytes.Equal(o.out[0], out) {
		t.Fatalf("%v: engine and kernel differ\nsent\n%swire, engine\n%swire, kernel\n%send, engine\n%send, kernel\n%s", from,
			head(b), head(o.wire[0]), head(wire), head(o.out[0]), head(out))
	}
	packettest.Check(t, wire, packettest.Src(wireSrc), packettest.Dst(packettest.MustDecode(b).Dst), packettest.ValidChecksums())
	packettest.Check(t, out, packettest.Src(wireSrc), packettest.Dst(arrivedDst), packettest.ValidChecksums())
	return out
}

// sendFragments is send for a datagram in fragments, which the inbound engine joins and
// fragments again.
func (x *exchange6) sendFragments(t *testing.T, from side, fragments [][]byte, wireSrc, arrivedDst netip.Addr) {
	t.Helper()
	var engine, kernel [][]byte
	for _, f := range fragments {
		o, wire, out := x.sendBoth(t, from, f)
		if len(o.wire) != 1 || !bytes.Equal(o.wire[0], wire) {
			t.Fatalf("%v: engine and kernel differ on the wire, drops %v\nsent\n%skernel\n%s", from, o.drops, head(f), head(wire))
		}
		packettest.Check(t, wire, packettest.Src(wireSrc))
		engine, kernel = append(engine, o.out...), append(kernel, out)
	}
	got, want := wholeOf(t, engine), wholeOf(t, kernel)
	if !bytes.Equal(got, want) {
		t.Fatalf("%v: engine and kernel differ at the end\nengine\n%skernel\n%s", from, head(got), head(want))
	}
	packettest.Check(t, got, packettest.Src(wireSrc), packettest.Dst(arrivedDst), packettest.ValidChecksums())
}

func wholeOf(t *testing.T, packets [][]byte) []byte {
	t.Helper()
	if len(packets) == 1 {
		return packets[0]
	}
	whole, err := packet.Join(packets)
	if err != nil {
		t.Fatalf("%d packets: %v", len(packets), err)
	}
	return whole
}

// sendBoth sends a packet to the other side through both translators. It returns the kernel's
// packets with the TTL that they had before the kernel decremented it.
func (x *exchange6) sendBoth(t *testing.T, from side, b []byte) (o outcome, wire, out []byte) {
	t.Helper()
	o = x.engines.send(t, from, b)
	to := from.other()
	x.kernel.wire[to].Drain(t)
	x.kernel.pods[to].Drain(t)
	x.kernel.pods[from].Send(t, b)
	wire, out = unicast(t, x.kernel.wire[to]), unicast(t, x.kernel.pods[to])
	if wire == nil || out == nil {
		t.Fatalf("%v: kernel %d octets on the wire, %d at the end\n%s", from, len(wire), len(out), head(b))
	}
	wire[7] += hopsToWire
	out[7] += hopsToPod
	return o, wire, out
}

// head returns the first octets of a packet as text; the rest cannot differ.
func head(b []byte) string { return hex.Dump(b[:min(len(b), 160)]) }

// unicast returns the next packet that is not multicast of the kernel itself.
func unicast(t *testing.T, r *hosts.Raw) []byte {
	t.Helper()
	for {
		b := r.Receive(t, patience)
		if b == nil || b[24] != 0xff {
			return b
		}
	}
}

func TestEngineEqualsKernelOverIPv6(t *testing.T) {
	for i, p := range plans6 {
		t.Run(p.name, func(t *testing.T) {
			x := &exchange6{p, newKernel6(t, p, rules6), newEngines6(t, p), 1024}
			for round := range randomRounds {
				rng := rand.New(rand.NewPCG(uint64(i), uint64(round)))
				if !t.Run(fmt.Sprint(round), func(t *testing.T) { x.sendRandom(t, rng) }) && !testing.Verbose() {
					t.Fatal("the other rounds of this plan would say the same")
				}
			}
		})
	}
}

// Outbound prefix maps must leave fragments as they are, like a kernel that only routes. Inbound,
// the engine joins fragments, so only the datagrams must be equal.
func TestEngineEqualsKernelOnFragmentsOverIPv6(t *testing.T) {
	for i, p := range plans6 {
		t.Run(p.name, func(t *testing.T) {
			x := &exchange6{p, newKernel6(t, p, stateless6), newEngines6(t, p), 1024}
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for round := range 20 {
				from := side(rng.IntN(2))
				src, shown := p.pod(rng, from)
				local, dst := p.pod(rng, from.other())
				h := packettest.IP{Src: src, Dst: dst, TTL: 64, Extensions: slices.DeleteFunc(extensions(rng), func(e packettest.Extension) bool {
					return e.Kind == 51 // nftables finds no checksum after this header; conntrack's NAT and the engine do
				})}
				var body packettest.Body = packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 2000+rng.IntN(2000))}
				if round%2 == 0 {
					body = packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.ACK, Data: make([]byte, 2000+rng.IntN(2000))}
				}
				x.sendFragments(t, from, packettest.Fragments(packettest.Build(h, body), 8*(20+rng.IntN(100)), rng.Uint32()), shown, local)
			}
		})
	}
}

// sendRandom sends one packet between two pods, from a node or to a mapped endpoint. Sometimes a
// reply and an ICMP error follow.
func (x *exchange6) sendRandom(t *testing.T, rng *rand.Rand) {
	from := side(rng.IntN(2))
	to := from.other()
	src, shown := x.plan.pod(rng, from)
	local, dst := x.plan.pod(rng, to)
	if rng.IntN(3) == 0 {
		src, shown = x.plan.node(from), x.plan.podsSeen[from].Addr()
	}
	if rng.IntN(3) == 0 {
		local, dst = x.plan.endpoint(to), x.plan.mapped(to)
	}
	x.port++
	header := func(src, dst netip.Addr) packettest.IP {
		return packettest.IP{
			Src: src, Dst: dst, TTL: uint8(3 + rng.IntN(253)), TOS: uint8(rng.Uint32()), FlowLabel: rng.Uint32() & 0xfffff,
			Extensions: extensions(rng),
		}
	}
	data := make([]byte, []int{0, 1, 2, 7, rng.IntN(1300)}[rng.IntN(5)])
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	remotePort := uint16(1 + rng.IntN(65535))
	var body, answer packettest.Body
	switch rng.IntN(5) {
	case 0:
		body = packettest.UDP{SrcPort: x.port, DstPort: remotePort, Data: data}
		answer = packettest.UDP{SrcPort: remotePort, DstPort: x.port, Data: data}
	case 1, 2:
		options := [][]byte{nil, {2, 4, 0x05, 0xb4}, {1, 3, 3, 7, 4, 2, 1, 1}}[rng.IntN(3)]
		body = packettest.TCP{SrcPort: x.port, DstPort: remotePort, Seq: rng.Uint32(), Flags: packettest.SYN, Window: 1000, Options: options}
	case 3:
		body = packettest.Echo{ID: x.port, Seq: 1, Data: data}
		answer = packettest.Echo{ID: x.port, Seq: 1, Reply: true, Data: data}
	default:
		if shown == x.plan.podsSeen[from].Addr() || dst == x.plan.mapped(to) { // with these addresses, each pair of hosts has only one flow
			body = packettest.UDP{SrcPort: x.port, DstPort: remotePort, Data: data}
			break
		}
		body = packettest.Raw{Proto: []uint8{50, 89, 4, 253}[rng.IntN(4)], Data: append(data, 1, 2, 3, 4, 5, 6, 7, 8)}
	}
	arrived := x.send(t, from, packettest.Build(header(src, dst), body), shown, local)
	if answer != nil && rng.IntN(2) == 0 {
		x.send(t, to, packettest.Build(header(local, shown), answer), dst, src)
	}
	if rng.IntN(2) == 0 {
		kind := uint8(1 + rng.IntN(4))
		quote := arrived[:min(len(arrived), 1232)]
		if transport := packettest.MustDecode(arrived).TransportOffset; rng.IntN(2) == 0 {
			quote = arrived[:transport+8]
		}
		fault := packettest.ICMPError{Type: kind, Code: uint8(rng.IntN(2)), Rest: 1280, Quote: quote}
		x.send(t, to, packettest.Build(header(local, shown), fault), dst, src)
	}
}

// extensions returns random extension headers that a router must forward unchanged.
func extensions(rng *rand.Rand) (some []packettest.Extension) {
	if rng.IntN(3) > 0 {
		return nil
	}
	for _, e := range []packettest.Extension{
		{Kind: 0, Data: []byte{1, 4, 0, 0, 0, 0}},
		{Kind: 60, Data: []byte{1, 12, 13: 0}},
		{Kind: 43, Data: []byte{4, 0, 5: 0}},
		{Kind: 51, Data: []byte{0, 0, 0, 0, 1, 2, 21: 255}},
		{Kind: 60, Data: []byte{1, 4, 0, 0, 0, 0}},
	} {
		if rng.IntN(3) == 0 {
			some = append(some, e)
		}
	}
	return slices.Clip(some)
}
