package differential

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
)

// Sources that are not pods share one address, with ports that each translator chooses. The
// results must be equal apart from that port. So the tests replace the engine's port by the
// kernel's, recompute the checksums, and compare octets. Replies must arrive at the sender
// with equal octets, without any replacement.

// A flow holds each translator's version of the first packet of a NAPT flow, as the receiver
// sees it.
type flow struct{ engine, kernel []byte }

// sendNAPT sends packets of a source that is not a pod to the other side through both
// translators.
func (x *exchange) sendNAPT(from side, packets ...[]byte) flow {
	x.Helper()
	o := x.engines.send(x.T, from, packets...)
	if len(o.wire) != len(packets) || len(o.out) == 0 || len(o.drops) > 0 {
		x.Fatalf("%v: %d of %d packets went into the tunnel, %d came out, dropped: %v\n%s", from, len(o.wire), len(packets), len(o.out), o.drops, dump(packets))
	}
	kernelWire, kernelOut := x.kernel.send(x.T, from, packets...)
	x.sameButPort(from, "on the wire", o.wire, kernelWire, hopsToWire, true)
	f := x.sameButPort(from, "at the destination", o.out, kernelOut, hopsToPod, true)
	if natIP := x.plan.natIP(from); source(f.engine) != natIP || source(f.kernel) != natIP {
		x.Fatalf("%v: appears as %v (engine) and %v (kernel), want %v", from, source(f.engine), source(f.kernel), natIP)
	}
	for _, b := range slices.Concat(o.wire, o.out) {
		x.checkSums(b)
	}
	return f
}

// reply sends the receiver's reply through each translator. The packets that arrive at the
// sender must be equal.
func (x *exchange) reply(to side, f flow, build func(arrived []byte) [][]byte) []byte {
	x.Helper()
	o := x.engines.send(x.T, to, build(f.engine)...)
	wire, out := x.kernel.send(x.T, to, build(f.kernel)...)
	if b := build(f.engine)[0]; !isError(b) { // not for ICMP errors, because portsAt does not find the port in the quote
		x.sameButPort(to, "reply on the wire", o.wire, wire, hopsToWire, false)
	}
	if len(o.out) == 0 {
		x.Fatalf("%v: no reply came out of the engines, dropped: %v\n%s", to, o.drops, dump(build(f.engine)))
	}
	x.checkSame(to, "reply at the sender", o.out, out, hopsToPod)
	for _, b := range o.out {
		x.checkSums(b)
	}
	back, _ := reassemble(o.out)
	return back
}

func isError(b []byte) bool {
	if proto(b) == protoICMP6 {
		return !isFragment(b) && segment(b)[0] < 128
	}
	return proto(b) == protoICMP && !isFragment(b) && segment(b)[0] != echoReply && segment(b)[0] != echoRequest
}

// sameButPort compares two datagrams, in which only the source port may differ, or the
// destination port if sourceSide is false. It returns the two datagrams.
func (x *exchange) sameButPort(from side, where string, engine, kernel [][]byte, hops uint8, sourceSide bool) flow {
	x.Helper()
	e, ok := reassemble(engine)
	k, okKernel := reassemble(kernel)
	if !ok || !okKernel {
		x.Fatalf("%v, %s: no whole datagram\nengine:\n%skernel:\n%s", from, where, dump(engine), dump(kernel))
	}
	k = countUp(k, hops)
	masked := e
	if b := e[9]; b == protoUDP || b == protoTCP || b == protoICMP {
		at, dst := portsAt(k)
		if !sourceSide {
			at = dst
		}
		masked = withPort(e, sourceSide, uint16(k[at])<<8|uint16(k[at+1]))
	}
	if !bytes.Equal(masked, k) {
		x.Fatalf("%v, %s: engine and kernel differ in more than the port\nengine:\n%skernel:\n%s", from, where, dump([][]byte{e}), dump([][]byte{k}))
	}
	return flow{e, k}
}

func one(b []byte) [][]byte { return [][]byte{b} }

func TestNodesReachPodsAndEndpointsLikeKernelSNAT(t *testing.T) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			x := newExchange(t, p, statefulRules)
			for _, c := range naptCases {
				t.Run(c.name, func(t *testing.T) {
					for _, from := range []side{A, B} {
						run := x.in(t)
						// The node sends to a pod of the other side, then to that side's mapped
						// endpoint.
						c.run(run, from, p.node(from, 1), p.podSeen(from.other(), 3))
						c.run(run, from, p.node(from, 2), p.mapped(from.other()))
						// A host that is mapped for the peer may also begin flows itself, like any
						// other host (docs/liqo-v0.md, section 7.4).
						c.run(run, from, p.endpoint(from), p.podSeen(from.other(), 4))
					}
				})
			}
		})
	}
}

var naptCases = []struct {
	name string
	run  func(x *exchange, from side, src, dst netip.Addr)
}{
	{"UDP", func(x *exchange, from side, src, dst netip.Addr) {
		port := x.freshPort()
		for range 3 {
			f := x.sendNAPT(from, ip(header{}, src, dst, protoUDP, udp(src, dst, port, 53, []byte("question"))))
			x.reply(from.other(), f, func(b []byte) [][]byte { return one(answer(b, []byte("answer"))) })
		}
	}},
	{"UDP without a checksum", func(x *exchange, from side, src, dst netip.Addr) {
		s := udp(src, dst, x.freshPort(), 53, []byte("question"))
		s[6], s[7] = 0, 0
		x.sendNAPT(from, ip(header{}, src, dst, protoUDP, s))
	}},
	{"TCP", func(x *exchange, from side, src, dst netip.Addr) {
		port := x.freshPort()
		say := func(seq, ackno uint32, flags uint8, data string) flow {
			return x.sendNAPT(from, ip(header{flags: flagDF}, src, dst, protoTCP, tcp(src, dst, port, 80, seq, ackno, flags, nil, []byte(data))))
		}
		f := say(100, 0, syn, "")
		hear := func(seq, ackno uint32, flags uint8, data string) {
			x.reply(from.other(), f, func(b []byte) [][]byte {
				me, you := destination(b), source(b)
				return one(ip(header{flags: flagDF}, me, you, protoTCP, tcp(me, you, 80, sourcePort(b), seq, ackno, flags, nil, []byte(data))))
			})
		}
		hear(500, 101, syn|ack, "")
		say(101, 501, ack, "")
		say(101, 501, psh|ack, "hello")
		hear(501, 106, psh|ack, "good bye")
		hear(509, 106, fin|ack, "")
		say(106, 510, fin|ack, "")
		hear(510, 107, ack, "")
	}},
	{"ICMP echo", func(x *exchange, from side, src, dst netip.Addr) {
		id := uint32(x.freshPort()) << 16
		for seq := range uint32(2) {
			f := x.sendNAPT(from, ip(header{}, src, dst, protoICMP, icmp(echoRequest, 0, id|seq, []byte("ping"))))
			x.reply(from.other(), f, func(b []byte) [][]byte { return one(answer(b, []byte("ping"))) })
		}
	}},
	{"ICMP errors come back with the sender's port", func(x *exchange, from side, src, dst netip.Addr) {
		for _, b := range [][]byte{
			ip(header{}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, []byte("question"))),
			ip(header{}, src, dst, protoTCP, tcp(src, dst, x.freshPort(), 53, 1, 0, syn, nil, nil)),
			ip(header{}, src, dst, protoICMP, icmp(echoRequest, 0, uint32(x.freshPort())<<16, []byte("ping"))),
		} {
			f := x.sendNAPT(from, b)
			for _, quote := range []int{8, -1} {
				back := x.reply(from.other(), f, func(b []byte) [][]byte {
					return one(icmpAbout(b, destination(b), unreachable, fragmentationNeeded, 1300, quote))
				})
				if inner := segment(back)[8:]; !bytes.HasPrefix(b, inner) {
					x.Errorf("the error quotes\n% x, sent was\n% x", inner, b)
				}
			}
		}
	}},
	{"fragments in order", func(x *exchange, from side, src, dst netip.Addr) {
		d := ip(header{id: x.freshPort()}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, make([]byte, 3000)))
		f := x.sendNAPT(from, fragment(d, 1000, 2000)...)
		x.reply(from.other(), f, func(b []byte) [][]byte { return fragment(answer(b, make([]byte, 2000)), 1000) })
	}},
	{"fragments out of order", func(x *exchange, from side, src, dst netip.Addr) {
		d := ip(header{id: x.freshPort()}, src, dst, protoUDP, udp(src, dst, x.freshPort(), 53, make([]byte, 3000)))
		p := fragment(d, 1000, 2000)
		f := x.sendNAPT(from, p[2], p[0], p[1])
		x.reply(from.other(), f, func(b []byte) [][]byte {
			r := fragment(answer(b, make([]byte, 2400)), 800, 1600)
			return [][]byte{r[1], r[2], r[0]}
		})
	}},
}

func TestTwoNodesWithTheSamePortAreKeptApart(t *testing.T) {
	x := newExchange(t, plans[3], statefulRules)
	dst := x.plan.podSeen(B, 3)
	var flows []flow
	for n := range 4 {
		src := x.plan.node(A, 10+n)
		flows = append(flows, x.sendNAPT(A, ip(header{}, src, dst, protoUDP, udp(src, dst, 5353, 53, []byte("question")))))
	}
	for _, ports := range [][]uint16{portsOf(flows, func(f flow) []byte { return f.engine }), portsOf(flows, func(f flow) []byte { return f.kernel })} {
		if slices.Sort(ports); len(slices.Compact(ports)) != len(flows) {
			t.Errorf("ports are shared: %v", ports)
		}
	}
	for n, f := range flows {
		back := x.reply(B, f, func(b []byte) [][]byte { return one(answer(b, []byte("answer"))) })
		if want := x.plan.node(A, 10+n); destination(back) != want {
			t.Errorf("the reply went to %v, want %v", destination(back), want)
		}
	}
}

func portsOf(flows []flow, of func(flow) []byte) (ports []uint16) {
	for _, f := range flows {
		ports = append(ports, sourcePort(of(f)))
	}
	return ports
}
