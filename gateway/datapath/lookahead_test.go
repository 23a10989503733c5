package datapath_test

import (
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// manyFlows opens so many flows that Write uses its lookahead: 1,000 for each of 40 nodes. The
// ports are all different, so NAPT keeps them.
func manyFlows(t testing.TB, e *natengine.Engine) (nodes int) {
	t.Helper()
	const n = 40
	var v packet.View
	for i := range n * 1000 {
		p := udp4(at(node(i%n), portOf(i%n, i/n)), at(podB, 53), nil)
		if err := v.Parse(p, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		if verdict := e.Outbound(&v, 0); verdict.Action != natengine.Forward || v.SrcPort() != portOf(i%n, i/n) {
			t.Fatalf("flow %d: %v %v, port %d", i, verdict.Action, verdict.Drop, v.SrcPort())
		}
	}
	return n
}

func node(i int) netip.Addr { return netip.AddrFrom4([4]byte{172, 16, 1, byte(i)}) }

func portOf(node, i int) uint16 { return uint16(1024 + 1000*node + i) }

// If there are enough flows for lookahead, each packet of a batch still finds its own flow.
func TestWriteTranslatesABatchOfManyFlows(t *testing.T) {
	link := newScript()
	e := newEngine(t)
	d := newDevice(t, link, e, datapath.Options{})
	nodes := manyFlows(t, e)
	natIP := netip.MustParseAddr("10.71.0.0")
	var packets [][]byte
	for i := range 128 {
		packets = append(packets, udp4(at(podB, 53), at(natIP, portOf(i%nodes, 7*i%1000)), random(100)))
	}
	if _, err := d.Write(behindOffset(packets...), offset); err != nil {
		t.Fatal(err)
	}
	if len(link.written) != len(packets) {
		t.Fatalf("%d packets written: want %d", len(link.written), len(packets))
	}
	for i, w := range link.written {
		p := w[packet.VirtioHeaderLen:]
		checkPacket(t, p, podB, node(i%nodes))
		if got, want := header.UDP(header.IPv4(p).Payload()).DestinationPort(), portOf(i%nodes, 7*i%1000); got != want {
			t.Errorf("packet %d: port %d, want %d", i, got, want)
		}
	}
}

func TestLookaheadOfWriteDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool allocate")
	}
	link := newScript()
	link.discard = true
	e := newEngine(t)
	d := newDevice(t, link, e, datapath.Options{})
	nodes := manyFlows(t, e)
	var packets [][]byte
	for i := range 128 {
		packets = append(packets, udp4(at(podB, 53), at(netip.MustParseAddr("10.71.0.0"), portOf(i%nodes, i)), random(100)))
	}
	batch := newInBatch(packets...)
	if n := testing.AllocsPerRun(100, func() {
		batch.restore()
		if _, err := d.Write(batch.bufs, offset); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations per Write: want 0", n)
	}
}
