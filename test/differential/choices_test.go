package differential

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/natengine"
)

// The tests of this file assert where the engine deliberately differs from the kernel. Each test
// asserts the behaviour of both, so that it fails if either changes.
//
//   - TTL: the kernel decrements it at each hop. The engine leaves this to the kernel on
//     either side of its TUN.
//   - NAPT port: each translator chooses its own (napt_test.go compares all other octets).
//   - Fragments: conntrack reassembles a datagram and fragments it again. The engine
//     translates outbound fragments as they arrive, in their order and sizes. So does a
//     kernel without conntrack, and then the octets are equal. Inbound, the engine joins
//     the datagram.
//   - ICMP errors: if the quote ends after the TCP checksum but within the TCP header, the
//     kernel leaves the checksum unchanged, and the engine updates it.
//   - ICMP errors: the kernel translates only those that quote a known flow and at least
//     eight octets of the transport header. For a 1:1 map the engine requires neither.
//   - ICMP errors from a router on the path: the kernel shows the receiver of the packet as
//     the sender of the error. The engine shows a pod with its own address and a node with
//     the NAPT address, so that a traceroute can distinguish them.
//   - Packets that conntrack calls invalid (no connection, wrong checksum): the kernel
//     forwards them untranslated, with an address that the other side cannot answer. The
//     engine translates every packet that has a 1:1 rule, and drops the others.
//   - The network address of the PodCIDR is the NAPT address, and is never mapped 1:1.

// reference performs a 1:1 translation: it replaces the addresses and computes every checksum
// from all octets.
func reference(p plan, from side, b []byte) (wire, out []byte) {
	to := from.other()
	wire = slices.Clone(b)
	copy(wire[12:], move(source(b), p.pods[from], p.podsSeen[from]).AsSlice())
	seal(wire)
	out = slices.Clone(wire)
	copy(out[16:], move(destination(b), p.podsSeen[to], p.pods[to]).AsSlice())
	seal(out)
	return wire, out
}

// checkUntranslated checks that the kernel forwards packet b unchanged except for its TTL.
func (x *exchange) checkUntranslated(from side, b []byte) {
	x.Helper()
	_, out := x.kernel.send(x.T, from, b)
	if len(out) != 1 || !bytes.Equal(countUp(out[0], hopsToPod), b) {
		x.Errorf("%v: the kernel was expected to forward the packet as it is\nsent:\n%sgot:\n%s", from, dump(one(b)), dump(out))
	}
}

// checkEngineOnly checks that the engines translate packet b to want. It does not test the kernel.
func (x *exchange) checkEngineOnly(from side, b, want []byte) {
	x.Helper()
	o := x.engines.send(x.T, from, b)
	if len(o.out) != 1 || !bytes.Equal(o.out[0], want) {
		x.Errorf("%v: engine, dropped %v\ngot:\n%swant:\n%s", from, o.drops, dump(o.out), dump(one(want)))
	}
}

// bothRemapped returns an exchange in which both sides see the other under different ranges.
// So an untranslated packet still has a route to the other side's pod.
func bothRemapped(t *testing.T) *exchange { return newExchange(t, plans[3], statefulRules) }

func TestOnlyTheKernelDecrementsTheTTL(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 1)
	b := ip(header{ttl: 9}, src, dst, protoUDP, udp(src, dst, 1, 2, nil))
	_, out := x.kernel.send(x.T, A, b)
	if o := x.engines.send(x.T, A, b); len(out) != 1 || len(o.out) != 1 || out[0][8] != 7 || o.out[0][8] != 9 {
		t.Errorf("TTL 9 became %d in the kernel (want 7), %d in the engine (want 9)", out[0][8], o.out[0][8])
	}
}

func TestEngineJoinsOnlyInboundFragments(t *testing.T) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			x := newExchange(t, p, statelessRules)
			for _, from := range []side{A, B} {
				for _, d := range x.datagrams(from, 2) {
					f := fragment(d, 40, 1400, 1408, 2800)
					for _, order := range [][]int{{0, 1, 2, 3, 4}, {4, 3, 2, 1, 0}, {2, 0, 4, 1, 3}} {
						var sent [][]byte
						for _, i := range order {
							sent = append(sent, f[i])
						}
						o := x.engines.send(x.T, from, sent...)
						wire, out := x.kernel.send(x.T, from, sent...)
						whole, ok := reassemble(counted(out, hopsToPod))
						if !equal(o.wire, counted(wire, hopsToWire)) || !ok || !equal(o.out, one(whole)) {
							t.Errorf("%v, order %v: engine:\n%skernel without conntrack:\n%s", from, order, dump(o.out), dump(out))
						}
					}
				}
			}
		})
	}
}

func counted(packets [][]byte, hops uint8) (up [][]byte) {
	for _, b := range packets {
		up = append(up, countUp(b, hops))
	}
	return up
}

func TestEngineTranslatesICMPErrorsWithoutAKnownFlow(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 3)
	sent := ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("a flow of yesterday")))
	_, arrived := reference(x.plan, A, sent)
	e := icmpAbout(arrived, destination(arrived), unreachable, 3, 0, -1)
	x.checkUntranslated(B, e)
	x.checkEngineOnly(B, e, icmpAboutSeen(sent, unreachable, 3, 0, -1))
}

func TestEngineTranslatesICMPErrorsThatQuoteOnlyTheIPHeader(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 4)
	sent := ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("question")))
	arrived := x.send(A, sent)[0]
	for _, quote := range []int{0, 3, 4, 7} {
		e := icmpAbout(arrived, destination(arrived), unreachable, 3, 0, quote)
		if quote < 4 { // the quote has no ports, by which the engine could find a flow
			x.checkUntranslated(B, e)
		} else if out := x.kernel.drops(x.T, B, e); len(out) > 0 { // the flow can be found, but the kernel does not translate so short a quote
			x.Errorf("a quote of %d octets: the kernel was expected to drop the error:\n%s", quote, dump(out))
		}
		x.checkEngineOnly(B, e, icmpAboutSeen(sent, unreachable, 3, 0, quote))
	}
}

func TestEngineUpdatesAQuotedTCPChecksumIfPresent(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 4)
	sent := ip(header{}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 80, 1, 0, syn, nil, nil))
	arrived := x.send(A, sent)[0]
	for _, quote := range []int{18, 19} {
		e := icmpAbout(arrived, destination(arrived), unreachable, 3, 0, quote)
		want := icmpAboutSeen(sent, unreachable, 3, 0, quote)
		if o := x.engines.send(x.T, B, e); len(o.out) != 1 || !bytes.Equal(segment(o.out[0]), segment(want)) {
			t.Errorf("a quote of %d octets: engine, dropped %v\n%swant\n%s", quote, o.drops, dump(o.out), dump(one(want)))
		}
		_, out := x.kernel.send(x.T, B, e)
		if len(out) != 1 {
			t.Fatalf("a quote of %d octets: the kernel was expected to translate the error:\n%s", quote, dump(out))
		}
		sum := func(b []byte) []byte { return segment(segment(b)[8:])[16:18] }
		if !bytes.Equal(sum(out[0]), sum(e)) || bytes.Equal(sum(out[0]), sum(want)) {
			t.Errorf("a quote of %d octets: the kernel was expected to leave the checksum as it was:\n%s", quote, dump(out))
		}
	}
}

// icmpAboutSeen returns the error that A's pod must receive. It quotes the packet as the pod sent
// it, and comes from the address to which the pod sent it.
func icmpAboutSeen(sent []byte, kind, code uint8, rest uint32, quote int) []byte {
	return icmpAbout(sent, destination(sent), kind, code, rest, quote)
}

func TestEngineKeepsTheSenderOfAnICMPErrorVisible(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 11)
	sent := ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("question")))
	arrived := x.send(A, sent)[0]
	for reporter, want := range map[netip.Addr]netip.Addr{
		x.plan.node(B, 1): x.plan.natIP(B),
		x.plan.pod(B, 99): x.plan.podSeen(B, 99),
	} {
		e := icmpAbout(arrived, reporter, timeExceeded, 0, 0, 8)
		x.checkEngineOnly(B, e, icmpAbout(sent, want, timeExceeded, 0, 0, 8))
		if _, out := x.kernel.send(x.T, B, e); len(out) != 1 || source(out[0]) != dst {
			t.Errorf("the kernel was expected to show %v as the sender:\n%s", dst, dump(out))
		}
	}
}

func TestEngineTranslatesPacketsThatConntrackCallsInvalid(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 5)
	for name, b := range map[string][]byte{
		"RST of no connection":         ip(header{}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 80, 1, 0, rst, nil, nil)),
		"no flags":                     ip(header{}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 80, 1, 0, 0, nil, nil)),
		"echo reply without a request": ip(header{}, src, dst, protoICMP, icmp(echoReply, 0, uint32(x.freshPort())<<16, nil)),
		"SYN and FIN":                  ip(header{}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 80, 1, 0, syn|fin, nil, nil)),
		"ICMP of an unassigned type":   ip(header{}, src, dst, protoICMP, icmp(200, 0, 0, []byte("?"))),
	} {
		t.Run(name, func(t *testing.T) {
			run := x.in(t)
			_, want := reference(x.plan, A, b)
			run.checkUntranslated(A, b)
			run.checkEngineOnly(A, b, want)
		})
	}
}

func TestEngineKeepsAWrongTransportChecksumWrong(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 6)
	for _, proto := range []uint8{protoUDP, protoTCP} {
		s := udp(src, dst, x.freshPort(), 53, []byte("damaged on the way"))
		if proto == protoTCP {
			s = tcp(src, dst, x.freshPort(), 80, 1, 0, syn, nil, nil)
		}
		b := ip(header{}, src, dst, proto, s)
		at := headerLen(b) + map[uint8]int{protoUDP: 6, protoTCP: 16}[proto]
		right := binary.BigEndian.Uint16(b[at:])
		binary.BigEndian.PutUint16(b[at:], right^0x0100)
		x.checkUntranslated(A, b)
		_, want := reference(x.plan, A, b)
		o := x.engines.send(x.T, A, b)
		if len(o.out) != 1 {
			t.Fatalf("protocol %d: dropped for %v", proto, o.drops)
		}
		got := o.out[0]
		if binary.BigEndian.Uint16(got[at:]) == binary.BigEndian.Uint16(want[at:]) {
			t.Errorf("protocol %d: the engine made a wrong checksum right", proto)
		}
		copy(got[at:at+2], want[at:])
		if !bytes.Equal(got, want) {
			t.Errorf("protocol %d: differs in more than the checksum\ngot:\n%swant:\n%s", proto, dump(one(got)), dump(one(want)))
		}
	}
}

func TestEngineUsesTheNetworkAddressOnlyForNAPT(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.plan.pod(A, 7), x.plan.natIP(B)
	b := ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil))
	_, out := x.kernel.send(x.T, A, b)
	if len(out) != 1 || destination(out[0]) != x.plan.pods[B].Addr() {
		t.Errorf("the kernel was expected to map it like any other address:\n%s", dump(out))
	}
	if o := x.engines.send(x.T, A, b); len(o.out) > 0 || !slices.Equal(o.drops, []natengine.Drop{natengine.DropNoFlow}) {
		t.Errorf("to the NAPT address without a flow: %v\n%s", o.drops, dump(o.out))
	}

	// The network address is not a pod as a source either. Both translators show the NAPT address,
	// each with its own port.
	src, dst = x.plan.pods[A].Addr(), x.plan.podSeen(B, 7)
	x.sendNAPT(A, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))
}

// The engine refuses the following packets. The kernel refuses them too, except for the ICMP
// error with a wrong checksum, which it forwards untranslated.

func TestEngineAndKernelRefuseUnmappedExternalAddresses(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.plan.pod(A, 8), nth(x.plan.extSeen[B], 99)
	x.sendDropped(A, natengine.DropNoMapping, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))
}

func TestPacketToNoPeerDoesNotEnterTheTunnel(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.plan.pod(A, 9), address(0x08080808)
	x.sendDropped(A, natengine.DropNoPeer, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))
}

func TestEngineAndKernelRefuseRedirects(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 12)
	arrived := x.send(A, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))[0]
	x.sendDropped(B, natengine.DropICMPError, icmpAbout(arrived, destination(arrived), redirect, 1, number(x.plan.node(B, 1)), -1))
}

func TestICMPErrorWithAWrongChecksumIsRefusedByTheEngine(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 10)
	arrived := x.send(A, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))[0]
	e := icmpAbout(arrived, destination(arrived), unreachable, 3, 0, -1)
	e[headerLen(e)+2] ^= 1
	if o := x.engines.send(x.T, B, e); len(o.out) > 0 {
		t.Errorf("RFC 5508 REQ-3: let through\n%s", dump(o.out))
	}
	x.checkUntranslated(B, e)
}
