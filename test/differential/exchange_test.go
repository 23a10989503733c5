package differential

import (
	"bytes"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/isthmus-net/isthmus/natengine"
)

// An exchange sends packets between A and B through both translators: the kernel and the
// engines.
type exchange struct {
	*testing.T
	plan    plan
	kernel  *kernel
	engines *engines
	port    *uint16 // the last used port; each flow gets a new one, so that conntrack never sees a flow twice
}

func newExchange(t *testing.T, p plan, rules func(plan, side) string) *exchange {
	port := uint16(1024)
	return &exchange{T: t, plan: p, kernel: newKernel(t, p, rules), engines: newEngines(t, p), port: &port}
}

// in returns the same exchange for a subtest.
func (x *exchange) in(t *testing.T) *exchange {
	sub := *x
	sub.T = t
	return &sub
}

// freshPort returns a port that no flow of this exchange has used.
func (x *exchange) freshPort() uint16 {
	*x.port++
	return *x.port
}

// pods returns the addresses for a packet between the n-th pods: src is the sender's own
// address, dst is the receiver as the sender sees it.
func (x *exchange) pods(from side, n int) (src, dst netip.Addr) {
	return x.plan.pod(from, n), x.plan.podSeen(from.other(), n)
}

// send sends packets of one sender to the other side through both translators, and returns the
// packets that arrived. Both must produce the same octets, in the tunnel and at the end. If there
// are several packets or fragments, send compares only the datagrams, because the translators cut
// them differently: conntrack reassembles a datagram and fragments it again, and the engine
// translates outbound fragments as they arrive and joins inbound ones.
func (x *exchange) send(from side, packets ...[]byte) (arrived [][]byte) {
	x.Helper()
	o := x.engines.send(x.T, from, packets...)
	if len(o.wire) != len(packets) || len(o.drops) > 0 {
		x.Fatalf("%v: %d of %d packets went into the tunnel, dropped: %v\n%s", from, len(o.wire), len(packets), o.drops, dump(packets))
	}
	wire, out := x.kernel.send(x.T, from, packets...)
	x.checkSame(from, "on the wire", o.wire, wire, hopsToWire)
	x.checkSame(from, "at the destination", o.out, out, hopsToPod)
	if len(packets) == 1 {
		x.checkAddresses(from, packets[0], o.wire[0], o.out[0])
		if p := partial(packets[0]); p != nil {
			unfinished := x.engines.sendPartial(x.T, from, p)
			if !equal(unfinished.wire, o.wire) || !equal(unfinished.out, o.out) {
				x.Errorf("%v: the same packet with a partial checksum came out differently\ncomplete:\n%spartial:\n%s", from, dump(o.out), dump(unfinished.out))
			}
		}
	}
	for _, b := range slices.Concat(o.wire, o.out) {
		x.checkSums(b)
	}
	return o.out
}

// checkSame compares the results of the engines and of the kernel for one datagram, after it has
// restored the TTL that the kernel decremented.
func (x *exchange) checkSame(from side, where string, engine, kernel [][]byte, hops uint8) {
	x.Helper()
	k, ok := reassemble(kernel)
	if !ok {
		x.Fatalf("%v, %s: the kernel let through no whole datagram, the engine did\nkernel:\n%sengine:\n%s", from, where, dump(kernel), dump(engine))
	}
	e, ok := reassemble(engine)
	if !ok {
		x.Fatalf("%v, %s: no whole datagram came out of the engine:\n%s", from, where, dump(engine))
	}
	if k = countUp(k, hops); !bytes.Equal(e, k) {
		x.Fatalf("%v, %s: engine and kernel differ\nengine:\n%skernel:\n%s", from, where, dump([][]byte{e}), dump([][]byte{k}))
	}
}

// sendDropped sends packets that neither translator may forward.
func (x *exchange) sendDropped(from side, want natengine.Drop, packets ...[]byte) {
	x.Helper()
	if o := x.engines.send(x.T, from, packets...); len(o.out) > 0 || len(o.drops) == 0 || o.drops[0] != want {
		x.Errorf("%v: engine let through %d packets, dropped for %v, want %v", from, len(o.out), o.drops, want)
	}
	if out := x.kernel.drops(x.T, from, packets...); len(out) > 0 {
		x.Errorf("%v: the kernel let through\n%s", from, dump(out))
	}
}

// checkAddresses checks the addresses by docs/liqo-v0.md, section 7.2. In the tunnel, the
// source is the address that the receiver sees and the destination is the address that the
// sender sees. At the end, the destination is the receiver's own address.
func (x *exchange) checkAddresses(from side, sent, wire, out []byte) {
	x.Helper()
	p, to := x.plan, from.other()
	src, dst := source(sent), destination(sent)
	wantSrc := p.natIP(from)
	switch {
	case src == p.endpoint(from) && source(wire) == p.mapped(from): // a reply; only flow state distinguishes it from a new flow
		wantSrc = p.mapped(from)
	case p.pods[from].Contains(src) && src != p.pods[from].Addr():
		wantSrc = move(src, p.pods[from], p.podsSeen[from])
	}
	arrives := destination(out)
	var wantDst netip.Addr
	switch {
	case dst == p.mapped(to):
		wantDst = p.endpoint(to)
	case dst == p.natIP(to): // a reply to a source that is not a pod; its test checks the address
		wantDst = arrives
	default:
		wantDst = move(dst, p.podsSeen[to], p.pods[to])
	}
	if source(wire) != wantSrc || destination(wire) != dst {
		x.Errorf("%v: in the tunnel %v -> %v, want %v -> %v", from, source(wire), destination(wire), wantSrc, dst)
	}
	if source(out) != wantSrc || arrives != wantDst {
		x.Errorf("%v: at the destination %v -> %v, want %v -> %v", from, source(out), arrives, wantSrc, wantDst)
	}
}

// checkSums verifies all checksums of a packet with gopacket, including that of a quoted IPv4
// header. Transport checksums of single fragments cannot be verified, so same compares the
// datagram.
func (x *exchange) checkSums(b []byte) {
	x.Helper()
	if isV6(b) {
		x.checkSums6(b)
		return
	}
	parsed := gopacket.NewPacket(b, layers.LayerTypeIPv4, gopacket.DecodeOptions{SkipDecodeRecovery: true})
	header, ok := parsed.Layer(layers.LayerTypeIPv4).(*layers.IPv4)
	if !ok {
		x.Fatalf("gopacket sees no IPv4 header in % x", b)
	}
	x.checkSum(header, b)
	if isFragment(b) {
		return
	}
	// Only the layer directly above IP: for protocol 4, gopacket would also decode the random
	// payload as a packet.
	switch l := parsed.Layers()[min(1, len(parsed.Layers())-1)].(type) {
	case *layers.UDP:
		x.must(l.SetNetworkLayerForChecksum(header))
		x.checkSum(l, b)
	case *layers.TCP:
		x.must(l.SetNetworkLayerForChecksum(header))
		x.checkSum(l, b)
	case *layers.ICMPv4:
		x.checkSum(l, b)
		if isError(b) {
			quoted := gopacket.NewPacket(l.LayerPayload(), layers.LayerTypeIPv4, gopacket.NoCopy)
			if inner, ok := quoted.Layer(layers.LayerTypeIPv4).(*layers.IPv4); ok {
				x.checkSum(inner, b)
			} else {
				x.Errorf("gopacket sees no quoted IPv4 header in % x", b)
			}
		}
	}
}

// checkSums6 is checkSums for IPv6, which has fewer checksums.
func (x *exchange) checkSums6(b []byte) {
	x.Helper()
	parsed := gopacket.NewPacket(b, layers.LayerTypeIPv6, gopacket.DecodeOptions{SkipDecodeRecovery: true})
	header, ok := parsed.Layer(layers.LayerTypeIPv6).(*layers.IPv6)
	if !ok {
		x.Fatalf("gopacket sees no IPv6 header in % x", b)
	}
	for _, l := range parsed.Layers() {
		switch l := l.(type) {
		case *layers.UDP:
			x.must(l.SetNetworkLayerForChecksum(header))
			x.checkSum(l, b)
		case *layers.TCP:
			x.must(l.SetNetworkLayerForChecksum(header))
			x.checkSum(l, b)
		case *layers.ICMPv6:
			x.must(l.SetNetworkLayerForChecksum(header))
			x.checkSum(l, b)
			return // the quoted packet is not whole
		}
	}
}

func (x *exchange) checkSum(layer interface {
	gopacket.Layer
	VerifyChecksum() (error, gopacket.ChecksumVerificationResult)
}, b []byte) {
	x.Helper()
	if err, sum := layer.VerifyChecksum(); err != nil || !sum.Valid {
		x.Errorf("%v checksum is %#x, gopacket wants %#x (%v): % x", layer.LayerType(), sum.Actual, sum.Correct, err, b)
	}
}

func (x *exchange) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

func equal(a, b [][]byte) bool { return slices.EqualFunc(a, b, bytes.Equal) }

// dump returns packets as text: a line of addresses and a line of hex digits for each.
func dump(packets [][]byte) string {
	var s strings.Builder
	for _, b := range packets {
		if len(b) < 20 || isV6(b) && len(b) < 40 {
			fmt.Fprintf(&s, "  % x\n", b)
			continue
		}
		fmt.Fprintf(&s, "  %v -> %v protocol %d, %d octets, ttl %d, fragment %#04x\n    % x\n    % x\n",
			source(b), destination(b), proto(b), len(b), ttl(b), fragmentWord(b), b[:headerLen(b)], segment(b)[:min(64, len(segment(b)))])
	}
	return s.String()
}
