package differential

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

var long = flag.Bool("long", false, "thirty seeds of random conversations instead of two")

// talkSteps is the number of steps per plan and seed. Each step is one or two datagrams, or a
// packet and ICMP errors about it.
const talkSteps = 1200

// The test interleaves many whole conversations at random. They come from pods and from nodes, and
// from hosts that use the same ports. Packets may be fragmented, repeated, reordered and answered
// by ICMP errors. The results of the two translators may differ only in the NAPT port. The test
// learns each translator's port from the first packet of a flow. The port must then stay the same,
// and the test replaces it before it compares octets.
func TestEngineEqualsKernelOnRandomConversations(t *testing.T) {
	all := slices.Clone(plans)
	for _, p := range plans6 {
		all = append(all, p.plan())
	}
	seen, worlds := map[string]int{}, 0
	for i, p := range all {
		for seed := range map[bool]int{false: 2, true: 30}[*long] {
			t.Run(fmt.Sprintf("%s/%s/%d", map[bool]string{false: "IPv4", true: "IPv6"}[p.v6()], p.name, seed), func(t *testing.T) {
				w := newWorld(t, p, rand.New(rand.NewPCG(uint64(i), uint64(seed))), seen)
				for w.steps < talkSteps {
					w.step()
				}
				worlds++
			})
		}
	}
	if worlds < 2*len(all) { // a test failed, or -run selected only some of the tests
		return
	}
	// Every outcome must have occurred, because otherwise a change of the generator could make the
	// test empty.
	for _, what := range []string{
		"TCP SYN", "TCP SYNACK", "TCP ACK", "TCP PSHACK", "TCP FINACK", "TCP RSTACK", "UDP asks", "UDP answers", "echo asks",
		"echo answers", "other asks", "other answers", "pod", "pod to endpoint", "node", "node to endpoint", "endpoint",
		"endpoint to endpoint", "fragmented", "port changed", "reopened", "error 3", "error 4", "error 11", "error 12",
		"IPv6 error 1", "IPv6 error 2", "IPv6 error 3", "IPv6 error 4", "redirect", "address that is not mapped", "address of no peer",
	} {
		if seen[what] < 100 {
			t.Errorf("%s: occurred only %d times", what, seen[what])
		}
	}
	t.Logf("%v", seen)
}

// A world is a set of interleaved talks.
type world struct {
	*exchange
	rng   *rand.Rand
	talks []*talk
	ids   uint16
	steps int
	seen  map[string]int // number of occurrences of each outcome, over all worlds

	inside map[end]netip.AddrPort // the inside end to which the engine has allocated a NAPT port
	mapped map[end]uint16         // the NAPT port that the engine has allocated to an inside end
}

// An end is one end of a flow: its own address and port, or those at the NAPT address.
type end struct {
	proto uint8
	side  side
	at    netip.AddrPort
}

// A talk is one flow and the packets of its ends. Forward is the direction from the client to
// the server.
type talk struct {
	name   string
	proto  uint8
	side   side           // side of the client
	client netip.AddrPort // the client's own address and port
	server netip.AddrPort // the server as the client addresses it; for echo both ports are the identifier
	napt   bool           // the client is not a pod
	tcp    tcpTalk
	opens  int            // the value of tcp.opens that was last handled
	opened bool           // the first packet has set seen and own
	own    netip.Addr     // the server's own address
	seen   [judges]uint16 // the client's port as the server sees it
}

func (c *talk) String() string {
	return fmt.Sprintf("%s of %v, protocol %d, %v -> %v, seen from ports %v, connections %d, state %d", c.name, c.side, c.proto, c.client, c.server, c.seen, c.tcp.opens, c.tcp.state)
}

const (
	byEngine = iota
	byKernel
	judges
)

func newWorld(t *testing.T, p plan, rng *rand.Rand, seen map[string]int) *world {
	w := &world{rng: rng, seen: seen, inside: map[end]netip.AddrPort{}, mapped: map[end]uint16{}}
	if p.v6() {
		w.exchange = &exchange{T: t, plan: p, kernel: newKernel6(t, p.six(), rules6), engines: newEngines6(t, p.six())}
	} else {
		w.exchange = newExchange(t, p, statefulRules)
	}
	known := map[string]bool{}
	for len(w.talks) < 60 {
		from := side(rng.IntN(2))
		to := from.other()
		c := &talk{side: from, proto: []uint8{protoTCP, protoTCP, protoTCP, protoUDP, protoUDP, protoICMP, protoTest}[rng.IntN(7)]}
		n := 1 + rng.IntN(4)
		var src netip.Addr
		switch rng.IntN(7) {
		case 0, 1, 2:
			src, c.name = p.pod(from, n), "pod"
		case 6:
			src, c.napt, c.name = p.endpoint(from), true, "endpoint"
		default:
			src, c.napt, c.name = p.node(from, n), true, "node"
		}
		dst := p.podSeen(to, 1+rng.IntN(4))
		if rng.IntN(4) == 0 {
			dst = p.mapped(to)
			c.name += " to endpoint"
		}
		// Few client ports, so that hosts compete for them, from all ranges that the engine or
		// the kernel distinguishes.
		sport := []uint16{5000, 5001, 40000, 65535, 1024, 1023, 600, 80}[rng.IntN(8)]
		dport := []uint16{53, 443, 8080}[rng.IntN(3)]
		switch c.proto {
		case protoICMP:
			if src == p.endpoint(from) {
				sport += 7 // no other host may use this identifier towards the endpoint: a deliberate difference
			}
			if dport = sport; p.v6() {
				c.proto = protoICMP6
			}
		case protoTest:
			// Only addresses distinguish these flows, so each host has its own protocol.
			sport, dport = 0, 0
			if c.proto += uint8(rng.IntN(2)); c.napt {
				c.proto = 200 + uint8(n) + uint8(from)<<4
				if src == p.endpoint(from) {
					c.proto += 8
				}
			}
		}
		c.client, c.server = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
		if key := fmt.Sprint(from, c.proto, c.client, c.server); !known[key] {
			known[key] = true
			w.talks = append(w.talks, c)
		}
	}
	return w
}

func (w *world) step() {
	w.steps++
	c := w.talks[w.rng.IntN(len(w.talks))]
	if c.proto == protoTCP {
		for _, s := range c.tcp.step(w.rng) {
			if c.opens != c.tcp.opens {
				if c.opens = c.tcp.opens; c.opens > 1 {
					w.seen["reopened"]++
				}
				c.opened = false // the kernel may choose another port now, the engine may not
			}
			w.count(c, flagNames(s.flags))
			w.sendDatagram(c, s.from == client, func(src, dst netip.AddrPort) []byte {
				return tcp(src.Addr(), dst.Addr(), src.Port(), dst.Port(), s.seq, s.ack, s.flags, s.options, s.data)
			})
		}
		return
	}
	forward := !c.opened || w.rng.IntN(2) == 0
	data := make([]byte, []int{0, 1, 8, w.rng.IntN(1400), w.rng.IntN(1400), w.rng.IntN(5000)}[w.rng.IntN(6)])
	for i := range data {
		data[i] = byte(w.rng.Uint32())
	}
	bare, sequence := w.rng.IntN(8) == 0 && !w.plan.v6(), w.rng.Uint32N(1<<16)
	w.count(c, map[bool]string{true: "asks", false: "answers"}[forward])
	w.sendDatagram(c, forward, func(src, dst netip.AddrPort) []byte {
		switch c.proto {
		case protoUDP:
			s := udp(src.Addr(), dst.Addr(), src.Port(), dst.Port(), data)
			if bare {
				s[6], s[7] = 0, 0
			}
			return s
		case protoICMP:
			if forward {
				return icmp(echoRequest, 0, uint32(src.Port())<<16|sequence, data)
			}
			return icmp(echoReply, 0, uint32(dst.Port())<<16|sequence, data)
		case protoICMP6:
			if forward {
				return icmp6(src.Addr(), dst.Addr(), 128, 0, uint32(src.Port())<<16|sequence, data)
			}
			return icmp6(src.Addr(), dst.Addr(), 129, 0, uint32(dst.Port())<<16|sequence, data)
		}
		return append([]byte{1, 2, 3, 4}, data...)
	})
}

func (w *world) count(c *talk, what string) {
	proto := map[uint8]string{protoTCP: "TCP", protoUDP: "UDP", protoICMP: "echo", protoICMP6: "echo"}[c.proto]
	if proto == "" {
		proto = "other"
	}
	w.seen[proto+" "+what]++
	w.seen[c.name]++
}

func flagNames(flags uint8) (s string) {
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK"} {
		if flags>>i&1 != 0 {
			s += name
		}
	}
	return s
}

// sendDatagram sends one datagram of a talk, whole or in fragments. Sometimes it also sends an ICMP
// error about the datagram.
func (w *world) sendDatagram(c *talk, forward bool, build func(src, dst netip.AddrPort) []byte) {
	w.Helper()
	w.ids++
	h := header{tos: byte(w.rng.Uint32()), ttl: byte(5 + w.rng.IntN(250)), id: w.ids}
	if w.rng.IntN(2) == 0 {
		h.flags = flagDF
	}
	if w.rng.IntN(10) == 0 {
		h.options = []byte{148, 4, 0, 0}
	}
	var sent [judges][]byte
	for j := range sent {
		src, dst := c.client, c.server
		if !forward {
			seen := w.plan.natIP(c.side)
			if !c.napt {
				seen = move(c.client.Addr(), w.plan.pods[c.side], w.plan.podsSeen[c.side])
			}
			src, dst = netip.AddrPortFrom(c.own, c.server.Port()), netip.AddrPortFrom(seen, c.seen[j])
		}
		s := build(src, dst)
		if len(s) > 1440 {
			h.flags, h.options = 0, nil
		}
		sent[j] = ip(h, src.Addr(), dst.Addr(), c.proto, s)
	}
	cut := one
	if n := len(segment(sent[0])); n > 1440 || n > 64 && h.flags == 0 && h.options == nil && w.rng.IntN(5) == 0 {
		// Both translators get the same fragments in the same order.
		seed := w.rng.Uint64()
		cut = func(b []byte) [][]byte {
			f := randomFragments(rand.New(rand.NewPCG(seed, 0)), b)
			if len(f) == 1 { // an atomic fragment in IPv6: a deliberate difference
				return one(b)
			}
			return f
		}
		w.seen["fragmented"]++
	}
	arrived := w.carry(c, forward, sent, cut)
	if w.Failed() {
		return
	}
	if c.proto == protoTCP && c.tcp.state == tcpReset {
		return // the kernel removes a refused connection at once: a deliberate difference
	}
	if w.rng.IntN(20) == 0 && !w.plan.v6() {
		w.sendRefused(c, forward, arrived)
	}
	if w.rng.IntN(4) == 0 {
		w.sendError(c, forward, sent, arrived)
	}
}

// carry sends a datagram from one end of a talk to the other through both translators, and
// returns the packets that arrived.
func (w *world) carry(c *talk, forward bool, sent [judges][]byte, cut func([]byte) [][]byte) (arrived [judges][]byte) {
	w.Helper()
	from := c.side
	if !forward {
		from = from.other()
	}
	o := w.engines.send(w.T, from, cut(sent[byEngine])...)
	var wire, out [judges][][]byte
	wire[byEngine], out[byEngine] = o.wire, o.out
	wire[byKernel], out[byKernel] = w.kernel.send(w.T, from, cut(sent[byKernel])...)
	fail := func(format string, args ...any) {
		w.Helper()
		w.Fatalf("step %d, %v\n%s\nsent:\n%sdropped by engines: %v\nengine:\n%skernel:\n%s",
			w.steps, c, fmt.Sprintf(format, args...), dump(cut(sent[byEngine])), o.drops, dump(out[byEngine]), dump(out[byKernel]))
	}
	var onWire [judges][]byte
	for j, hops := range [judges][2]uint8{byEngine: {}, byKernel: {hopsToWire, hopsToPod}} {
		var ok, okWire bool
		onWire[j], okWire = reassemble(wire[j])
		arrived[j], ok = reassemble(out[j])
		if !ok || !okWire {
			fail("no whole datagram from judge %d", j)
		}
		onWire[j], arrived[j] = countUp(onWire[j], hops[0]), countUp(arrived[j], hops[1])
	}
	if forward && !isError(arrived[byEngine]) && !c.opened {
		for j := range c.seen {
			c.seen[j] = 0
			if c.client.Port() != 0 {
				c.seen[j] = sourcePort(arrived[j])
			}
		}
		c.own = destination(arrived[byEngine])
		c.opened = true
		w.checkPort(c)
	}
	for stage, got := range [][judges][]byte{onWire, arrived} {
		if k := w.repaint(c, got[byKernel]); !bytes.Equal(got[byEngine], k) {
			fail("engine and kernel differ, stage %d\nengine:\n%skernel with the engine's port:\n%s", stage, dump(one(got[byEngine])), dump(one(k)))
		}
		w.checkSums(got[byEngine])
	}
	return arrived
}

// sendError sends an ICMP error about a datagram from its receiver to its sender. It quotes all of
// the datagram or a part.
func (w *world) sendError(c *talk, forward bool, sent, arrived [judges][]byte) {
	w.Helper()
	type fault struct {
		kind, code uint8
		rest       uint32
	}
	faults := []fault{
		{unreachable, uint8(w.rng.IntN(16)), w.rng.Uint32N(1 << 16)},
		{timeExceeded, uint8(w.rng.IntN(2)), 0},
		{parameterProblem, uint8(w.rng.IntN(3)), w.rng.Uint32N(256) << 24},
		{4, 0, 0}, // source quench
	}
	if w.plan.v6() { // RFC 4443: unreachable, too big, time exceeded, parameter problem
		faults = []fault{{1, uint8(w.rng.IntN(8)), 0}, {2, 0, 1280 + w.rng.Uint32N(1<<16)}, {3, uint8(w.rng.IntN(2)), 0}, {4, uint8(w.rng.IntN(3)), w.rng.Uint32N(1 << 10)}}
	}
	e := faults[w.rng.IntN(4)]
	n := len(segment(arrived[byEngine]))
	if n < 8 { // conntrack requires a quote of this length
		return
	}
	quote := min(8+w.rng.IntN(n-7), 1400)
	if c.proto == protoTCP && quote > 16 && quote < 20 {
		quote = 16 // a longer quote contains the checksum, or half of it, which the kernel does not update
	}
	var errs [judges][]byte
	for j, b := range arrived {
		errs[j] = icmpAbout(b, destination(b), e.kind, e.code, e.rest, quote)
	}
	w.seen[fmt.Sprint(map[bool]string{true: "IPv6 "}[w.plan.v6()], "error ", e.kind)]++
	back := w.carry(c, !forward, errs, one)
	if w.Failed() {
		return
	}
	// The error that arrives must quote the packet that was sent.
	for j, b := range back {
		inner := segment(b)[8:]
		if !bytes.HasPrefix(sent[j], inner) {
			w.Fatalf("step %d: the error from judge %d quotes\n%swhat was sent is\n%s", w.steps, j, dump(one(inner)), dump(one(sent[j])))
		}
	}
}

// sendRefused makes the receiver of a datagram send a packet that both translators must drop.
func (w *world) sendRefused(c *talk, forward bool, arrived [judges][]byte) {
	w.Helper()
	from := c.side
	if forward {
		from = from.other()
	}
	p, to := w.plan, from.other()
	pod := p.pod(from, 3)
	what := []struct {
		name string
		b    func(arrived []byte) []byte
	}{
		{"redirect", func(b []byte) []byte {
			return icmpAbout(b, destination(b), redirect, 1, number(p.node(from, 9)), -1)
		}},
		{"address that is not mapped", func([]byte) []byte {
			dst := nth(p.extSeen[to], 77)
			return ip(header{id: 0xfffd}, pod, dst, protoUDP, udp(pod, dst, 5000, 53, nil))
		}},
		{"address of no peer", func([]byte) []byte {
			dst := address(0x08080808)
			return ip(header{id: 0xfffd}, pod, dst, protoUDP, udp(pod, dst, 5000, 53, nil))
		}},
	}[w.rng.IntN(3)]
	translated := c.napt || c.own != c.server.Addr() || p.pods[c.side] != p.podsSeen[c.side]
	if what.name == "redirect" && (len(segment(arrived[byEngine])) > 1400 || !translated) { // a deliberate difference
		return
	}
	w.seen[what.name]++
	if o := w.engines.send(w.T, from, what.b(arrived[byEngine])); len(o.out) > 0 || len(o.drops) == 0 {
		w.Fatalf("step %d, %s: the engine let through\n%s", w.steps, what.name, dump(o.out))
	}
	dst := p.podSeen(to, 1)
	after := ip(header{id: 0xfffe}, p.pod(from, 1), dst, protoUDP, udp(p.pod(from, 1), dst, 7, 7, nil))
	if out := w.kernel.injectRefused(w.T, from, what.b(arrived[byKernel]), after); len(out) > 0 {
		w.Fatalf("step %d, %s: the kernel let through\n%s", w.steps, what.name, dump(out))
	}
}

// checkPort checks the engine's port by RFC 4787, REQ-1 and 3. An inside end has one port for
// all destinations, and no other inside end has it. The port equals the inside port if that
// was free.
func (w *world) checkPort(c *talk) {
	w.Helper()
	if !c.napt {
		if c.seen != [judges]uint16{c.client.Port(), c.client.Port()} {
			w.Fatalf("port %d of a pod is seen as %v", c.client.Port(), c.seen)
		}
		return
	}
	if c.client.Port() == 0 {
		return
	}
	inside := end{c.proto, c.side, c.client}
	outside := end{c.proto, c.side, netip.AddrPortFrom(w.plan.natIP(c.side), c.seen[byEngine])}
	if port, ok := w.mapped[inside]; ok && port != c.seen[byEngine] {
		w.Errorf("%v has ports %d and %d: not endpoint-independent", c, port, c.seen[byEngine])
	}
	owner, taken := w.inside[outside]
	if taken && owner != c.client {
		w.Errorf("%v and %v share port %d", owner, c.client, c.seen[byEngine])
	}
	same := outside
	same.at = netip.AddrPortFrom(same.at.Addr(), c.client.Port())
	if _, taken := w.inside[same]; c.seen[byEngine] != c.client.Port() && !taken {
		w.Errorf("%v: its own port was free", c)
	}
	if c.seen[byEngine] != c.client.Port() {
		w.seen["port changed"]++
	}
	w.mapped[inside], w.inside[outside] = c.seen[byEngine], c.client
}

// repaint returns b, a packet of talk c, with the kernel's NAPT port replaced by the engine's,
// both in the header and in the quote of an ICMP error. It updates the checksums that b
// contains.
func (w *world) repaint(c *talk, b []byte) []byte {
	if !c.napt || c.seen[byEngine] == c.seen[byKernel] {
		return b
	}
	nat := w.plan.natIP(c.side)
	if !isError(b) {
		if source(b) == nat {
			return withPort(b, true, c.seen[byEngine])
		}
		if destination(b) == nat {
			return withPort(b, false, c.seen[byEngine])
		}
		return b
	}
	b = slices.Clone(b)
	inner := segment(b)[8:]
	at, dst := portsAt(inner)
	switch nat {
	case source(inner):
	case destination(inner):
		at = dst
	default:
		return b
	}
	old := binary.BigEndian.Uint16(inner[at:])
	binary.BigEndian.PutUint16(inner[at:], c.seen[byEngine])
	sum, reach := headerLen(inner)+checksumAt[c.proto], 8
	if c.proto == protoTCP {
		reach = 20
	}
	if len(inner) >= headerLen(inner)+reach {
		// RFC 1624, equation 3. A UDP checksum of zero does not change.
		if was := binary.BigEndian.Uint16(inner[sum:]); c.proto != protoUDP || was != 0 {
			is := uint32(^was) + uint32(^old) + uint32(c.seen[byEngine])
			is = is&0xffff + is>>16
			is = ^(is&0xffff + is>>16) & 0xffff
			if c.proto == protoUDP && is == 0 {
				is = 0xffff
			}
			binary.BigEndian.PutUint16(inner[sum:], uint16(is))
		}
	}
	sealTransport(segment(b), source(b), destination(b), proto(b))
	return b
}
