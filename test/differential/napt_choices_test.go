package differential

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/natengine"
)

// The tests of this file assert further deliberate differences, in port translation and
// connection tracking. Random conversations (talks_test.go) avoid these cases.
//
//   - NAPT port: the engine gives an inside port one outside port for all destinations, and
//     no other inside port gets it (RFC 4787, REQ-1 and 3). The kernel gives two hosts the
//     same port towards different destinations. If necessary it gives one host two ports,
//     also for a reopened connection.
//   - Range of a replaced port: the engine distinguishes ports below 1024 from the others.
//     The kernel distinguishes 1-511, 600-1023 and the others.
//   - TCP windows: conntrack tracks sequence numbers and does not translate segments
//     outside the window. Nor does it translate a SYN ACK that is repeated after a
//     simultaneous open. The engine translates every segment of a known flow.
//   - A refused connection: conntrack removes it after the RST. The engine keeps it for the
//     transitory timeout (RFC 6146, section 3.5.2.2), so that an ICMP error about the RST
//     is still translated.
//   - Packets that may not begin a flow: the engine drops them. The kernel forwards them
//     untranslated, with the node's own address.
//   - Redirects: the engine drops all. The kernel drops only those about flows that it translates.
//   - Atomic fragments of IPv6 (RFC 6946): the engine does not change them, conntrack
//     removes the fragment header.
//   - SCTP: the kernel translates its ports. The engine does not know them, and lets only
//     one host at a time use a destination.

func tcpSegmentOf(src, dst netip.AddrPort, seq, ackno uint32, flags uint8, data string) []byte {
	return ip(header{flags: flagDF}, src.Addr(), dst.Addr(), protoTCP,
		tcp(src.Addr(), dst.Addr(), src.Port(), dst.Port(), seq, ackno, flags, nil, []byte(data)))
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// fromNode sends the first packet of a node's flow through both translators and returns the
// port that each chose.
func (x *exchange) fromNode(b []byte) (f flow, engine, kernel uint16) {
	x.Helper()
	f = x.sendNAPT(A, b)
	return f, sourcePort(f.engine), sourcePort(f.kernel)
}

func TestEngineUsesOneNAPTPortForAllDestinations(t *testing.T) {
	x := bothRemapped(t)
	opens := func(node, pod int, seq uint32) (flow, uint16, uint16) {
		return x.fromNode(tcpSegmentOf(at(x.plan.node(A, node), 5000), at(x.plan.podSeen(B, pod), 80), seq, 0, syn, ""))
	}
	first, e11, k11 := opens(1, 1, 100)
	_, e22, k22 := opens(2, 2, 100)
	_, e12, k12 := opens(1, 2, 100)
	if e11 != 5000 || e12 != 5000 || e22 == 5000 {
		t.Errorf("engine: node 1 has ports %d and %d, node 2 has %d; want 5000 for node 1 alone", e11, e12, e22)
	}
	if k11 != 5000 || k22 != 5000 || k12 == 5000 {
		t.Errorf("the kernel was expected to give port 5000 to both nodes, and node 1 a second one: %d and %d, %d", k11, k12, k22)
	}

	x.reply(B, first, func(b []byte) [][]byte {
		return one(tcpSegmentOf(at(destination(b), 80), at(source(b), sourcePort(b)), 1, 101, rst|ack, ""))
	})
	if _, e, k := opens(1, 1, 1e6); e != 5000 || k == 5000 {
		t.Errorf("reopened from port %d (engine, want 5000) and %d (kernel, expected not to be)", e, k)
	}
}

func TestEngineReplacesAnOccupiedPortWithinItsRange(t *testing.T) {
	for port, kernel := range map[uint16][2]uint16{
		80: {1, 511}, 511: {1, 511}, 512: {600, 1023}, 700: {600, 1023}, 1023: {600, 1023}, 1024: {1024, 65535}, 6000: {1024, 65535},
	} {
		x := bothRemapped(t) // a new exchange, so that earlier mappings do not affect the choice of a port
		dst := x.plan.podSeen(B, 1)
		for n := range 8 {
			src := x.plan.node(A, 20+n)
			_, e, k := x.fromNode(ip(header{}, src, dst, protoUDP, udp(src, dst, port, 9, nil)))
			if e < 1024 != (port < 1024) || e == port != (n == 0) {
				t.Errorf("port %d of host %d became %d in the engine", port, n, e)
			}
			if k == port != (n == 0) || n > 0 && (k < kernel[0] || k > kernel[1]) {
				t.Errorf("port %d of host %d became %d in the kernel, expected one of %v", port, n, k, kernel)
			}
		}
	}
}

func TestEngineIgnoresTCPWindows(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 5)
	from, to := at(src, x.freshPort()), at(dst, 80)
	got := x.send(A, tcpSegmentOf(from, to, 100, 0, syn, ""))[0]
	me, you := at(destination(got), 80), at(source(got), sourcePort(got))
	x.send(B, tcpSegmentOf(me, you, 500, 101, syn|ack, ""))
	x.send(A, tcpSegmentOf(from, to, 101, 501, ack, ""))
	for name, b := range map[string][]byte{
		"data far ahead":            tcpSegmentOf(from, to, 101+(1<<30), 501, psh|ack, "tomorrow's news"),
		"acknowledgement far ahead": tcpSegmentOf(from, to, 101, 501+(1<<30), ack, ""),
		"RST out of sequence":       tcpSegmentOf(from, to, 101+(1<<20), 0, rst, ""),
	} {
		t.Run(name, func(t *testing.T) {
			run := x.in(t)
			run.checkUntranslated(A, b)
			_, want := reference(x.plan, A, b)
			run.checkEngineOnly(A, b, want)
		})
	}
	// None of these segments has ended the connection.
	x.send(A, tcpSegmentOf(from, to, 101, 501, psh|ack, "GET / HTTP/1.1"))
}

func TestEngineTranslatesARepeatedSynAckAfterASimultaneousOpen(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.pods(A, 6)
	from, to := at(src, x.freshPort()), at(dst, 80)
	got := x.send(A, tcpSegmentOf(from, to, 100, 0, syn, ""))[0]
	me, you := at(destination(got), 80), at(source(got), sourcePort(got))
	x.send(B, tcpSegmentOf(me, you, 500, 0, syn, ""))
	b := tcpSegmentOf(from, to, 100, 501, syn|ack, "")
	x.send(A, b)
	x.send(B, tcpSegmentOf(me, you, 501, 101, ack, ""))
	x.checkUntranslated(A, b)
	_, want := reference(x.plan, A, b)
	x.checkEngineOnly(A, b, want)
}

func TestEngineKeepsARefusedConnectionForTheTransitoryTimeout(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.plan.node(A, 3), x.plan.podSeen(B, 7)
	f := x.sendNAPT(A, tcpSegmentOf(at(src, x.freshPort()), at(dst, 80), 100, 0, syn, ""))
	refusal := x.reply(B, f, func(b []byte) [][]byte {
		return one(tcpSegmentOf(at(destination(b), 80), at(source(b), sourcePort(b)), 0, 101, rst|ack, ""))
	})
	b := icmpAbout(refusal, src, unreachable, 1, 0, 8)
	x.checkUntranslated(A, b)
	if o := x.engines.send(t, A, b); len(o.out) != 1 || source(o.out[0]) != x.plan.natIP(A) {
		t.Errorf("engine, dropped %v\n%s", o.drops, dump(o.out))
	}
}

func TestEngineDropsPacketsThatCannotBeginAFlow(t *testing.T) {
	x := bothRemapped(t)
	src, dst := x.plan.node(A, 4), x.plan.podSeen(B, 8)
	for name, c := range map[string]struct {
		b    []byte
		want natengine.Drop
	}{
		"RST":                        {tcpSegmentOf(at(src, x.freshPort()), at(dst, 80), 1, 0, rst, ""), natengine.DropNoFlow},
		"echo reply":                 {ip(header{}, src, dst, protoICMP, icmp(echoReply, 0, uint32(x.freshPort())<<16, nil)), natengine.DropNoFlow},
		"ICMP of an unassigned type": {ip(header{}, src, dst, protoICMP, icmp(200, 0, 0, nil)), natengine.DropProtocol},
		"ICMP error about a packet that was not sent": {icmpAbout(ip(header{}, dst, src, protoUDP, udp(dst, src, 1, 2, nil)), src, unreachable, 3, 0, 8), natengine.DropICMPError},
	} {
		t.Run(name, func(t *testing.T) {
			run := x.in(t)
			run.checkUntranslated(A, c.b)
			if o := x.engines.send(t, A, c.b); !slices.Equal(o.drops, []natengine.Drop{c.want}) {
				t.Errorf("engine: dropped %v, want %v\n%s", o.drops, c.want, dump(o.out))
			}
		})
	}
}

func TestEngineRefusesATupleThatTheEndpointUsesItself(t *testing.T) {
	x := bothRemapped(t)
	pod, endpoint := x.plan.pod(A, 9), x.plan.endpoint(B)
	dst := x.plan.podSeen(A, 9)
	x.sendNAPT(B, ip(header{}, endpoint, dst, protoUDP, udp(endpoint, dst, 53, 5000, nil)))
	b := ip(header{}, pod, x.plan.mapped(B), protoUDP, udp(pod, x.plan.mapped(B), 5000, 53, nil))
	if o := x.engines.send(t, A, b); !slices.Equal(o.drops, []natengine.Drop{natengine.DropFlowClash}) {
		t.Errorf("engine: dropped %v\n%s", o.drops, dump(o.out))
	}
	if _, out := x.kernel.send(t, A, b); len(out) != 1 || destination(out[0]) != endpoint || sourcePort(out[0]) == 5000 {
		t.Errorf("the kernel was expected to change the port of the other cluster's pod\n%s", dump(out))
	}
}

func TestEngineDoesNotTranslateSCTPPorts(t *testing.T) {
	x := bothRemapped(t)
	dst := x.plan.podSeen(B, 9)
	init := sctp(5000, 36412, 0, []byte{1, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 5})
	x.sendNAPT(A, ip(header{}, x.plan.node(A, 5), dst, protoSCTP, init))
	b := ip(header{}, x.plan.node(A, 6), dst, protoSCTP, init)
	if o := x.engines.send(t, A, b); !slices.Equal(o.drops, []natengine.Drop{natengine.DropProtocol}) {
		t.Errorf("engine: dropped %v\n%s", o.drops, dump(o.out))
	}
	if _, out := x.kernel.send(t, A, b); len(out) != 1 || source(out[0]) != x.plan.natIP(A) || sourcePort(out[0]) == 5000 {
		t.Errorf("the kernel was expected to change the port\n%s", dump(out))
	}
}

func TestEngineRefusesRedirectsOfUntranslatedFlows(t *testing.T) {
	x := newExchange(t, plans[0], statefulRules)
	src, dst := x.pods(A, 12)
	arrived := x.send(A, ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, nil)))[0]
	b := icmpAbout(arrived, destination(arrived), redirect, 1, number(x.plan.node(B, 1)), -1)
	x.checkUntranslated(B, b)
	if o := x.engines.send(t, B, b); !slices.Equal(o.drops, []natengine.Drop{natengine.DropICMPError}) {
		t.Errorf("engine: dropped %v\n%s", o.drops, dump(o.out))
	}
}

func TestEngineKeepsAtomicFragments(t *testing.T) {
	p := plans6[2].plan()
	k, engines := newKernel6(t, p.six(), rules6), newEngines6(t, p.six())
	for _, src := range []netip.Addr{p.pod(A, 1), p.node(A, 1)} {
		dst := p.podSeen(B, 1)
		whole := ip(header{id: 1}, src, dst, protoUDP, udp(src, dst, 5000, 53, []byte("alone")))
		atomic := fragment(whole)[0]
		if len(atomic) != len(whole)+8 {
			t.Fatalf("no atomic fragment: % x", atomic)
		}
		o := engines.send(t, A, atomic)
		if len(o.out) != 1 || len(o.out[0]) != len(atomic) {
			t.Errorf("%v: engine, dropped %v\n%s", src, o.drops, dump(o.out))
			continue
		}
		// If the datagram fits into one packet, the kernel reassembles it and has no reason to
		// fragment it again.
		k.pods[B].Drain(t)
		k.pods[A].Send(t, atomic)
		got := receive(t, k.pods[B], patience)
		if len(got) != len(whole) || !bytes.Equal(segment(got), segment(o.out[0])) {
			t.Errorf("%v: the kernel was expected to take the header away\nkernel:\n%sengine:\n%s", src, dump(one(got)), dump(o.out))
		}
	}
}

// In the following tests, both translators behave alike.

func TestEngineAndKernelKeepEchoesWithTheSameIdentifierApart(t *testing.T) {
	x := bothRemapped(t)
	pod, endpoint := x.plan.pod(A, 10), x.plan.endpoint(B)
	x.send(A, ip(header{}, pod, x.plan.mapped(B), protoICMP, icmp(echoRequest, 0, 77<<16, nil)))
	dst := x.plan.podSeen(A, 10)
	f := x.sendNAPT(B, ip(header{}, endpoint, dst, protoICMP, icmp(echoRequest, 0, 77<<16, nil)))
	for _, b := range [][]byte{f.engine, f.kernel} {
		if source(b) != x.plan.natIP(B) {
			t.Errorf("begun by the endpoint, it is from %v:\n%s", source(b), dump(one(b)))
		}
	}
	x.send(B, ip(header{}, endpoint, dst, protoICMP, icmp(echoReply, 0, 77<<16, nil)))
}

func TestEngineAndKernelServeOnlyOneHostPerPortlessProtocol(t *testing.T) {
	x := bothRemapped(t)
	dst := x.plan.podSeen(B, 10)
	x.sendNAPT(A, ip(header{}, x.plan.node(A, 7), dst, protoTest, []byte("first come")))
	x.sendDropped(A, natengine.DropProtocol, ip(header{}, x.plan.node(A, 8), dst, protoTest, []byte("first served")))
}
