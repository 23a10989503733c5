package datapath_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

var self = netip.MustParseAddr("169.254.0.1")

// rules returns our rules for a peer that uses 10.71.0.0/16 itself and also sees our pods in that
// range.
func rules(id string) natengine.Peer {
	return natengine.Peer{
		ID:             id,
		RemotePods:     []netip.Prefix{netip.MustParsePrefix("10.71.0.0/16")},
		RemoteExternal: []netip.Prefix{netip.MustParsePrefix("10.90.0.0/20")},
		Pods:           []natengine.Remap{{From: netip.MustParsePrefix("10.244.0.0/16"), To: netip.MustParsePrefix("10.71.0.0/16")}},
		External:       []netip.Prefix{netip.MustParsePrefix("10.90.0.0/24")},
		Endpoints:      []natengine.Endpoint{{Real: self, Seen: netip.MustParseAddr("10.90.0.1")}},
		MSS:            1380,
	}
}

func newEngine(t testing.TB, peers ...natengine.Peer) *natengine.Engine {
	t.Helper()
	if len(peers) == 0 {
		peers = []natengine.Peer{rules("b")}
	}
	e := natengine.New(natengine.Config{Self4: self})
	if err := e.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	return e
}

func newDevice(t testing.TB, link datapath.Link, e *natengine.Engine, o datapath.Options) *datapath.Tunnel {
	t.Helper()
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(link, bind.New(), e, local, o)
	t.Cleanup(func() { d.Close() })
	return d
}

// listen opens the port of the connection check in an endpoint.
func listen(t testing.TB, local *datapath.Local) *datapath.Port {
	t.Helper()
	port, err := local.Listen(12345, 1024)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(port.Close)
	return port
}

// setGateway adds the engine's peer to the tunnel, with its gateway at the given address.
func setGateway(t testing.TB, d *datapath.Tunnel, e *natengine.Engine, gateway netip.Addr) {
	t.Helper()
	if err := d.SetPeers([]datapath.Peer{{State: e.Peers()[0], Key: newKey(9).public, Gateway: [2]netip.Addr{gateway}}}); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, d *datapath.Tunnel, b *buffers) int {
	t.Helper()
	n, err := d.Read(b.bufs, b.sizes, offset)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return n
}

// drops returns the number of packets that the engine has dropped, for peer "b" and for no peer
// together.
func drops(e *natengine.Engine, dir natengine.Direction, d natengine.Drop) uint64 {
	n := e.Stats().NoPeerDrops[dir][d]
	for _, p := range e.Peers() {
		n += p.Drops(dir, d)
	}
	return n
}

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func random(n int) []byte {
	rng := rand.NewChaCha8([32]byte{byte(n)})
	b := make([]byte, n)
	rng.Read(b)
	return b
}

// --- outbound

func TestReadSegmentsASuperpacketAfterTranslatingIt(t *testing.T) {
	payload := random(10*1380 + 100)
	e := newEngine(t)
	d := newDevice(t, newScript(super4(at(podA, 4000), at(podB, 80), 1000, 1380, payload)), e, datapath.Options{})
	b := newBuffers(128, 2048)
	n := read(t, d, b)
	if n != 11 {
		t.Fatalf("%d segments: want 11", n)
	}
	var got []byte
	total := 0
	for i := range n {
		p := b.packet(i)
		checkPacket(t, p, podASee, podB)
		total += len(p)
		h := header.TCP(header.IPv4(p).Payload())
		if want := uint32(1000 + 1380*i); h.SequenceNumber() != want {
			t.Errorf("segment %d: sequence %d: want %d", i, h.SequenceNumber(), want)
		}
		got = append(got, h.Payload()...)
	}
	if !bytes.Equal(got, payload) {
		t.Error("payload differs")
	}
	if packets, octets := e.Peers()[0].Traffic(natengine.Outbound); packets != 11 || octets != uint64(total) {
		t.Errorf("traffic %d packets, %d octets: want 11, %d", packets, octets, total)
	}
}

func TestReadContinuesALargeSuperpacketInTheNextBatch(t *testing.T) {
	payload := random(60_000)
	script := newScript(
		super4(at(podA, 4000), at(podB, 80), 0, 300, payload), // is cut into 200 segments
		plain(udp4(at(podA, 5), at(podB, 6), []byte("after"))),
	)
	d := newDevice(t, script, newEngine(t), datapath.Options{})
	b := newBuffers(128, 2048)
	var got []byte
	counts := []int{}
	last := 0
	for range 2 {
		n := read(t, d, b)
		counts = append(counts, n)
		for i := range n {
			checkPacket(t, b.packet(i), podASee, podB)
			if h := header.IPv4(b.packet(i)); h.TransportProtocol() == header.TCPProtocolNumber {
				got = append(got, header.TCP(h.Payload()).Payload()...)
			} else {
				last++
			}
		}
	}
	if counts[0] != 128 || counts[1] != 73 || last != 1 {
		t.Errorf("batches %v, %d packets after it: want [128 73], 1", counts, last)
	}
	if !bytes.Equal(got, payload) {
		t.Error("payload differs")
	}
}

func TestReadCollectsSinglePacketsUntilTheLinkHasNoMore(t *testing.T) {
	var packets [][]byte
	for i := range 5 {
		packets = append(packets, plain(udp4(at(podA, 4000), at(podB, 80), random(i+1))))
	}
	d := newDevice(t, newScript(packets...), newEngine(t), datapath.Options{})
	b := newBuffers(128, 2048)
	if n := read(t, d, b); n != 5 {
		t.Fatalf("%d packets in the batch: want 5", n)
	}
	for i := range 5 {
		checkPacket(t, b.packet(i), podASee, podB)
		if got := len(b.packet(i)); got != 28+i+1 {
			t.Errorf("packet %d has %d octets: want %d, the order must be kept", i, got, 28+i+1)
		}
	}
}

func TestReadStopsAtAFullBatch(t *testing.T) {
	single := plain(udp4(at(podA, 4000), at(podB, 80), []byte("x")))
	d := newDevice(t, newScript(single, single, single, single, single), newEngine(t), datapath.Options{})
	b := newBuffers(2, 2048)
	for i, want := range []int{2, 2, 1} {
		if n := read(t, d, b); n != want {
			t.Errorf("batch %d has %d: want %d", i, n, want)
		}
	}
}

func TestReadCompletesAPartialChecksum(t *testing.T) {
	p := super4(at(podA, 4000), at(podB, 80), 0, 0, random(100))
	p[1] = 0 // GSO type none; the flag NEEDS_CSUM stays
	d := newDevice(t, newScript(p), newEngine(t), datapath.Options{})
	b := newBuffers(8, 2048)
	if n := read(t, d, b); n != 1 {
		t.Fatalf("%d packets: want 1", n)
	}
	checkPacket(t, b.packet(0), podASee, podB)
}

// A pod may have a tunnel of its own, with VXLAN or IPIP. Then its kernel leaves the checksum of
// the inner packet incomplete, and a TUN with TUN_F_CSUM gets such packets.
func TestReadCompletesTheInnerChecksumOfATunnelledPacket(t *testing.T) {
	inner := packettest.IP{Src: netip.MustParseAddr("192.168.1.1"), Dst: netip.MustParseAddr("192.168.1.2"), TTL: 64}
	tcp := packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.ACK, Data: random(101)}
	outer := packettest.IP{Src: podA, Dst: podB, TTL: 64}
	vxlan := append(make([]byte, 8+14), packettest.Partial(packettest.Build(inner, tcp))...)
	for _, tc := range []struct {
		name  string
		b     []byte
		inner int // offset of the inner IP packet
	}{
		{"VXLAN", packettest.Build(outer, packettest.UDP{SrcPort: 5, DstPort: 4789, NoChecksum: true, Data: vxlan}), 20 + 8 + 8 + 14},
		{"IPIP", packettest.Build(outer, packettest.Raw{Proto: 4, Data: vxlan[8+14:]}), 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d := newDevice(t, newScript(virtio(packet.VirtioNeedsCsum, 0, 0, 0, tc.inner+20, 16, tc.b)), newEngine(t), datapath.Options{})
			b := newBuffers(8, 2048)
			if n := read(t, d, b); n != 1 {
				t.Fatalf("%d packets: want 1", n)
			}
			packettest.Check(t, b.packet(0), packettest.Src(podASee), packettest.Dst(podB), packettest.ValidChecksums())
			packettest.Check(t, b.packet(0)[tc.inner:], packettest.Data(tcp.Data), packettest.ValidChecksums())
		})
	}
}

func TestReadCountsDroppedPacketsAndContinues(t *testing.T) {
	good := plain(udp4(at(podA, 4000), at(podB, 80), []byte("good")))
	udp := func(dst netip.Addr, size int) []byte { return plain(udp4(at(podA, 1), at(dst, 2), random(size))) }
	mangle := func(f func(p []byte)) []byte {
		p := super4(at(podA, 4000), at(podB, 80), 0, 1000, random(3000))
		f(p)
		return p
	}
	for _, tc := range []struct {
		name string
		p    []byte
		want natengine.Drop
	}{
		{"short virtio header", []byte{0, 0, 0}, natengine.DropVirtioHeader},
		{"no packet", plain(nil), natengine.DropMalformed},
		{"cut short", plain(udp4(at(podA, 1), at(podB, 2), random(50))[:40]), natengine.DropMalformed},
		{"superpacket without GSO size", mangle(func(p []byte) { p[4], p[5] = 0, 0 }), natengine.DropVirtioHeader},
		{"superpacket of IPv6 type", mangle(func(p []byte) { p[1] = 4 }), natengine.DropVirtioHeader},
		{"checksum elsewhere", mangle(func(p []byte) { p[6] = 60 }), natengine.DropVirtioHeader},
		{"no peer", udp(netip.MustParseAddr("10.99.0.1"), 4), natengine.DropNoPeer},
		{"larger than a buffer", udp(podB, 2100), natengine.DropTooBig},
		{"segments larger than a buffer", super4(at(podA, 4000), at(podB, 80), 0, 2500, random(6000)), natengine.DropTooBig},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			d := newDevice(t, newScript(tc.p, good), e, datapath.Options{})
			b := newBuffers(8, 2048)
			if n := read(t, d, b); n != 1 || !bytes.HasSuffix(b.packet(0), []byte("good")) {
				t.Errorf("%d packets: want the good one alone", n)
			}
			if got := drops(e, natengine.Outbound, tc.want); got != 1 {
				t.Errorf("%s counted %d times: want 1", tc.want, got)
			}
		})
	}
}

func TestReadDropsPacketsForADownPeerExceptTheGatewaysOwn(t *testing.T) {
	e := newEngine(t)
	e.Peers()[0].SetDown(true)
	link := newScript(plain(udp4(at(podA, 4000), at(podB, 80), []byte("x"))))
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(link, bind.New(), e, local, datapath.Options{})
	defer d.Close()
	c := listen(t, local)
	if err := c.Send([]byte("ping"), netip.MustParseAddrPort("10.90.0.1:12345"), 0); err != nil {
		t.Fatal(err)
	}
	b := newBuffers(8, 2048)
	if n := read(t, d, b); n != 1 || !bytes.HasSuffix(b.packet(0), []byte("ping")) {
		t.Fatalf("%d packets: want the endpoint's alone", n)
	}
	// The source is not a pod, so it is translated to the network address of the remapped PodCIDR.
	checkPacket(t, b.packet(0), netip.MustParseAddr("10.71.0.0"), netip.MustParseAddr("10.90.0.1"))
	if got := drops(e, natengine.Outbound, natengine.DropPeerDown); got != 1 {
		t.Errorf("peer_down counted %d times: want 1", got)
	}
}

func TestReadReleasesHeldFragmentsAfterTheFirst(t *testing.T) {
	// A node's address is translated with its port, so later fragments wait for the first one. There
	// are more fragments than fit into one batch.
	frags := fragments(ip4(nodeA, podB, header.UDPProtocolNumber, 77, udpPart(at(nodeA, 3000), at(podB, 80), random(6*512-8))), 512)
	if len(frags) != 6 {
		t.Fatalf("%d fragments", len(frags))
	}
	link := newScript()
	for _, i := range []int{3, 1, 5, 2, 4, 0} {
		link.add(plain(frags[i]))
	}
	e := newEngine(t)
	d := newDevice(t, link, e, datapath.Options{})
	b := newBuffers(4, 2048)
	var order []uint16
	for _, want := range []int{4, 2} {
		n := read(t, d, b)
		if n != want {
			t.Fatalf("batch of %d: want %d", n, want)
		}
		for i := range n {
			checkPacket(t, b.packet(i), netip.MustParseAddr("10.71.0.0"), podB)
			order = append(order, header.IPv4(b.packet(i)).FragmentOffset()/512)
		}
	}
	if order[0] != 0 {
		t.Errorf("order %v: want the first fragment first", order)
	}
	if packets, _ := e.Peers()[0].Traffic(natengine.Outbound); packets != 6 {
		t.Errorf("%d packets counted: want 6", packets)
	}
}

func TestReadReturnsPacketsOfTheLocalEndpoint(t *testing.T) {
	link := newScript()
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(link, bind.New(), newEngine(t), local, datapath.Options{})
	defer d.Close()
	c := listen(t, local)
	b := newBuffers(128, 2048)
	got := make(chan int)
	go func() {
		n, _ := d.Read(b.bufs, b.sizes, offset)
		got <- n
	}()
	time.Sleep(10 * time.Millisecond)
	if err := c.Send([]byte("hello"), netip.MustParseAddrPort("10.71.3.4:9"), 0); err != nil {
		t.Fatal(err)
	}
	select {
	case n := <-got:
		if n != 1 || !bytes.HasSuffix(b.packet(0), []byte("hello")) {
			t.Errorf("%d packets", n)
		}
	case <-time.After(time.Minute):
		t.Fatal("the endpoint's packet did not wake the reader")
	}
}

// The engine must get the time after Read has waited for a packet, not the time before.
func TestReadPassesTheArrivalTimeToTheEngine(t *testing.T) {
	synctest.Test(t, readAsksForTheTimeAfterEachWait)
}

func readAsksForTheTimeAfterEachWait(t *testing.T) {
	e := newEngine(t)
	link := newScript(plain(udp4(at(podA, 1), at(netip.MustParseAddr("10.99.0.1"), 2), []byte("for no peer"))))
	d := newDevice(t, link, e, datapath.Options{})
	go func() { // by now Read has dropped the first packet and waits again
		time.Sleep(300 * time.Millisecond)
		link.add(plain(udp4(at(nodeA, 3000), at(podB, 80), []byte("begins a flow"))))
		link.Wake()
	}()
	b := newBuffers(8, 2048)
	if n := read(t, d, b); n != 1 {
		t.Fatalf("%d packets: want 1", n)
	}
	e.Sweep(d.Now())
	if flows := e.Flows(1); len(flows) != 1 || flows[0].Idle > 200*time.Millisecond {
		t.Errorf("flows %+v: want one that was just used", flows)
	}
}

func TestEndpointQueueIsBoundedAndDoesNotStarveTheLink(t *testing.T) {
	e := newEngine(t)
	link := newScript(plain(udp4(at(podA, 4000), at(podB, 80), []byte("from the link"))))
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(link, bind.New(), e, local, datapath.Options{})
	defer d.Close()
	c := listen(t, local)
	const sent = datapath.TurnsEach + 44
	for range sent {
		c.Send([]byte("x"), netip.MustParseAddrPort("10.71.3.4:9"), 0)
	}
	if got := drops(e, natengine.Outbound, natengine.DropLocalQueue); got != 44 {
		t.Errorf("local_queue counted %d times: want 44", got)
	}
	b := newBuffers(128, 2048)
	n := read(t, d, b)
	if !bytes.HasSuffix(b.packet(n-1), []byte("from the link")) {
		t.Errorf("batch of %d without the link's packet", n)
	}
	total := n
	for total < datapath.TurnsEach+1 {
		total += read(t, d, b)
	}
}

// --- inbound

// segments returns a stream of TCP packets to podA, as the peer's gateway sends them, and their
// payload.
func segments(n, mss int) (packets [][]byte, payload []byte) {
	payload = random(n * mss)
	for i := range n {
		packets = append(packets, tcp4(at(podB, 80), at(podASee, 4000), uint32(1000+i*mss), header.TCPFlagAck, payload[i*mss:(i+1)*mss]))
	}
	return packets, payload
}

func TestWriteHandsARunToTheLinkAsOneSuperpacket(t *testing.T) {
	packets, payload := segments(20, 1380)
	e := newEngine(t)
	link := newScript()
	d := newDevice(t, link, e, datapath.Options{})
	if n, err := d.Write(behindOffset(packets...), offset); n != 20 || err != nil {
		t.Fatalf("%d, %v", n, err)
	}
	if len(link.written) != 1 {
		t.Fatalf("%d packets written: want 1", len(link.written))
	}
	w := link.written[0]
	if w[0] != 1 || w[1] != 1 || int(w[4])|int(w[5])<<8 != 1380 {
		t.Errorf("virtio header % x: want NEEDS_CSUM, TCPv4, 1380", w[:10])
	}
	p := w[10:]
	h := header.IPv4(p)
	if int(h.TotalLength()) != len(p) || !h.IsChecksumValid() || h.DestinationAddress() != addrOf(podA) {
		t.Errorf("IP header of the superpacket: % x", p[:20])
	}
	want := header.PseudoHeaderChecksum(header.TCPProtocolNumber, addrOf(podB), addrOf(podA), uint16(len(p)-20))
	if got := header.TCP(p[20:]).Checksum(); got != want {
		t.Errorf("partial checksum %#x: want the pseudo-header's %#x", got, want)
	}
	if !bytes.Equal(p[40:], payload) {
		t.Error("payload differs")
	}
	if packets, octets := e.Peers()[0].Traffic(natengine.Inbound); packets != 20 || octets != 20*1420 {
		t.Errorf("traffic %d packets, %d octets: want 20, %d", packets, octets, 20*1420)
	}
}

func TestWriteJoinsUDPDatagramsOnlyIfEnabled(t *testing.T) {
	for _, on := range []bool{false, true} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			link := newScript()
			d := newDevice(t, link, newEngine(t), datapath.Options{CoalesceUDP: on})
			var packets [][]byte
			for range 10 {
				packets = append(packets, udp4(at(podB, 80), at(podASee, 4000), random(500)))
			}
			if _, err := d.Write(behindOffset(packets...), offset); err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{false: 10, true: 1}[on]; len(link.written) != want {
				t.Errorf("%d packets written: want %d", len(link.written), want)
			}
			if !on {
				for _, w := range link.written {
					if !bytes.Equal(w[:10], make([]byte, 10)) {
						t.Errorf("virtio header % x: want zeros", w[:10])
					}
					checkPacket(t, w[10:], podB, podA)
				}
			}
		})
	}
}

// If the kernel accepts no UDP superpackets, none of their datagrams is lost, and Write makes no
// more superpackets.
func TestWriteSplitsUDPSuperpacketsThatTheLinkRefuses(t *testing.T) {
	link := newScript()
	link.refuseUDP = true
	e := newEngine(t)
	d := newDevice(t, link, e, datapath.Options{CoalesceUDP: true})
	var packets [][]byte
	for range 10 {
		packets = append(packets, udp4(at(podB, 80), at(podASee, 4000), random(500)))
	}
	for range 2 {
		if _, err := d.Write(behindOffset(packets...), offset); err != nil {
			t.Fatal(err)
		}
	}
	if len(link.written) != 20 || link.refused != 1 {
		t.Errorf("%d packets written, %d superpackets refused; want 20, 1", len(link.written), link.refused)
	}
	for i, w := range link.written {
		if !bytes.Equal(w[:10], make([]byte, 10)) {
			t.Errorf("virtio header % x: want zeros", w[:10])
		}
		checkPacket(t, w[10:], podB, podA)
		if want := packets[i%10][28:]; !bytes.Equal(w[10+28:], want) {
			t.Errorf("packet %d: payload differs", i)
		}
	}
	if n := drops(e, natengine.Inbound, natengine.DropTUNWrite); n != 0 {
		t.Errorf("%d drops", n)
	}

	// With any other error the packets of the run are lost, and each is counted.
	link = newScript()
	link.fail = syscall.EIO
	d = newDevice(t, link, e, datapath.Options{CoalesceUDP: true})
	if _, err := d.Write(behindOffset(packets...), offset); err != nil {
		t.Fatal(err)
	}
	if n := drops(e, natengine.Inbound, natengine.DropTUNWrite); n != 10 {
		t.Errorf("%d drops; want 10", n)
	}
}

func TestWriteAnswersPingsToTheEndpoint(t *testing.T) {
	e := newEngine(t)
	link := newScript()
	d := newDevice(t, link, e, datapath.Options{})
	seen := netip.MustParseAddr("10.90.0.1")
	if _, err := d.Write(behindOffset(echo4(podB, seen, 5, 1)), offset); err != nil {
		t.Fatal(err)
	}
	b := newBuffers(8, 2048)
	if n := read(t, d, b); n != 1 {
		t.Fatalf("%d packets: want the reply", n)
	}
	checkPacket(t, b.packet(0), seen, podB)
	if h := header.ICMPv4(header.IPv4(b.packet(0)).Payload()); h.Type() != header.ICMPv4EchoReply || h.Ident() != 5 {
		t.Errorf("ICMP type %d id %d: want a reply with id 5", h.Type(), h.Ident())
	}
	if len(link.written) != 0 {
		t.Error("a packet to the endpoint reached the link")
	}
}

func TestWriteDeliversEachDatagramOfARunSeparately(t *testing.T) {
	link := newScript()
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t)
	d := datapath.New(link, bind.New(), e, local, datapath.Options{CoalesceUDP: true})
	defer d.Close()
	setGateway(t, d, e, podB)
	c := listen(t, local)
	var packets [][]byte
	for i := range 5 {
		packets = append(packets, udp4(at(podB, 12345), at(netip.MustParseAddr("10.90.0.1"), 12345), bytes.Repeat([]byte{byte(i)}, 100)))
	}
	if _, err := d.Write(behindOffset(packets...), offset); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		p, from, err := c.Receive()
		if err != nil {
			t.Fatal(err)
		}
		if len(p) != 100 || p[0] != byte(i) || from != at(podB, 12345) {
			t.Errorf("datagram %d: %d octets of %d from %v", i, len(p), p[0], from)
		}
	}
}

func TestWriteCountsDroppedPackets(t *testing.T) {
	good := udp4(at(podB, 80), at(podASee, 4000), []byte("good"))
	for _, tc := range []struct {
		name string
		p    []byte
		want natengine.Drop
	}{
		{"malformed", good[:25], natengine.DropMalformed},
		{"tiny fragment", fragments(tcp4(at(podB, 80), at(podASee, 4000), 1, header.TCPFlagAck, random(64)), 16)[0], natengine.DropFragment},
		{"node address", udp4(at(podB, 80), at(nodeA, 22), []byte("x")), natengine.DropDestination},
		{"foreign source", udp4(at(nodeA, 80), at(podASee, 22), []byte("x")), natengine.DropNoPeer},
		{"unmapped", udp4(at(podB, 80), at(netip.MustParseAddr("10.90.0.9"), 22), []byte("x")), natengine.DropNoMapping},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e := newEngine(t)
			link := newScript()
			d := newDevice(t, link, e, datapath.Options{})
			if _, err := d.Write(behindOffset(tc.p, good), offset); err != nil {
				t.Fatal(err)
			}
			if len(link.written) != 1 || !bytes.HasSuffix(link.written[0], []byte("good")) {
				t.Errorf("%d packets written: want the good one alone", len(link.written))
			}
			if got := drops(e, natengine.Inbound, tc.want); got != 1 {
				t.Errorf("%s counted %d times: want 1", tc.want, got)
			}
		})
	}
}

func TestWriteCountsPacketsThatTheLinkRefuses(t *testing.T) {
	e := newEngine(t)
	link := newScript()
	d := newDevice(t, link, e, datapath.Options{})
	p := udp4(at(podB, 80), at(podASee, 4000), []byte("x"))
	link.fail = unix.EINVAL
	if _, err := d.Write(behindOffset(p), offset); err != nil {
		t.Errorf("%v: a refused packet is no error", err)
	}
	link.fail = os.ErrClosed
	if _, err := d.Write(behindOffset(p), offset); !errors.Is(err, os.ErrClosed) {
		t.Errorf("%v: want os.ErrClosed", err)
	}
	if got := e.Peers()[0].Drops(natengine.Inbound, natengine.DropTUNWrite); got != 2 {
		t.Errorf("tun_write counted %d times: want 2", got)
	}
}

func TestWriteJoinsFragments(t *testing.T) {
	// These are replies to the NAPT address, whose fragments arrive in reverse order.
	e := newEngine(t)
	link := newScript(plain(udp4(at(nodeA, 3000), at(podB, 80), []byte("request"))))
	d := newDevice(t, link, e, datapath.Options{})
	b := newBuffers(8, 2048)
	read(t, d, b)
	request := header.IPv4(b.packet(0))
	mapped := at(netip.MustParseAddr("10.71.0.0"), header.UDP(request.Payload()).SourcePort())
	frags := fragments(udp4(at(podB, 80), mapped, random(3*512-8)), 512)
	if _, err := d.Write(behindOffset(frags[2], frags[1], frags[0]), offset); err != nil {
		t.Fatal(err)
	}
	if len(link.written) != 1 {
		t.Fatalf("%d packets written: want one datagram", len(link.written))
	}
	w := link.written[0]
	if checkPacket(t, w[10:], podB, nodeA); len(w) != 10+20+3*512 || header.IPv4(w[10:]).More() || header.IPv4(w[10:]).Flags()&header.IPv4FlagDontFragment != 0 {
		t.Errorf("%d octets, flags %#x", len(w), header.IPv4(w[10:]).Flags())
	}
	if _, octets := e.Peers()[0].Traffic(natengine.Inbound); octets != 20+3*512 {
		t.Errorf("%d octets counted", octets)
	}
}

// --- start and end

func TestCloseEndsReadWriteAndSockets(t *testing.T) {
	link := newScript()
	local, err := datapath.NewLocal(self, netip.MustParseAddr("fe80::1"), 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := datapath.New(link, bind.New(), newEngine(t), local, datapath.Options{})
	c := listen(t, local)
	ended := make(chan error, 2)
	go func() {
		b := newBuffers(8, 2048)
		_, err := d.Read(b.bufs, b.sizes, offset)
		ended <- err
	}()
	go func() { _, _, err := c.Receive(); ended <- err }()
	time.Sleep(10 * time.Millisecond)
	for range 2 {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
	for range 2 {
		select {
		case err := <-ended:
			if !errors.Is(err, os.ErrClosed) && !errors.Is(err, net.ErrClosed) {
				t.Errorf("%v: want closed", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("Close did not end Read or Receive")
		}
	}
	d.SetMTU(1300) // must not panic
	if _, err := local.Listen(1, 1); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Listen after Close: %v: want net.ErrClosed", err)
	}
	if err := c.Send([]byte("x"), netip.MustParseAddrPort("10.71.3.4:9"), 0); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Send after Close: %v: want net.ErrClosed", err)
	}
}

// Close is called while receiving goroutines may still be writing.
func TestCloseDuringWriteAndRead(t *testing.T) {
	for range 50 {
		link := newScript()
		local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
		if err != nil {
			t.Fatal(err)
		}
		d := datapath.New(link, bind.New(), newEngine(t), local, datapath.Options{})
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				for j := range 20 {
					d.Write(behindOffset(echo4(podB, netip.MustParseAddr("10.90.0.1"), uint16(i), uint16(j))), offset)
				}
			})
		}
		wg.Go(func() {
			b := newBuffers(8, 2048)
			for {
				if _, err := d.Read(b.bufs, b.sizes, offset); err != nil {
					return
				}
			}
		})
		time.Sleep(200 * time.Microsecond)
		d.Close()
		wg.Wait()
	}
}

func TestLocalEndpointCarriesIPv6(t *testing.T) {
	local, err := datapath.NewLocal(self, self6, 1420)
	if err != nil {
		t.Fatal(err)
	}
	e := natengine.New(natengine.Config{Self4: self, Self6: self6})
	if err := e.SetPeers([]natengine.Peer{{
		ID:             "b",
		RemotePods:     []netip.Prefix{netip.MustParsePrefix("fd00:b::/64")},
		RemoteExternal: []netip.Prefix{netip.MustParsePrefix("fd00:bb::/64")},
		Pods:           []natengine.Remap{{From: netip.MustParsePrefix("fd00:a::/64"), To: netip.MustParsePrefix("fd00:c::/64")}},
		External:       []netip.Prefix{netip.MustParsePrefix("fd00:cc::/64")},
		Endpoints:      []natengine.Endpoint{{Real: self6, Seen: netip.MustParseAddr("fd00:cc::1")}},
	}}); err != nil {
		t.Fatal(err)
	}
	d := datapath.New(newScript(), bind.New(), e, local, datapath.Options{})
	defer d.Close()
	c := listen(t, local)
	if err := c.Send([]byte("six"), netip.MustParseAddrPort("[fd00:bb::1]:12345"), 0); err != nil {
		t.Fatal(err)
	}
	b := newBuffers(8, 2048)
	if n := read(t, d, b); n != 1 {
		t.Fatalf("%d packets: want 1", n)
	}
	h := header.IPv6(b.packet(0))
	if h.SourceAddress() != addrOf(netip.MustParseAddr("fd00:c::")) || !bytes.HasSuffix(h, []byte("six")) {
		t.Errorf("source %v: want the NAPT address fd00:c::", h.SourceAddress())
	}
}

func TestNewLocalRefusesWrongAddressFamilies(t *testing.T) {
	for _, a := range [][2]netip.Addr{
		{{}, {}},
		{netip.MustParseAddr("fd00::1"), {}},
		{{}, self},
	} {
		if l, err := datapath.NewLocal(a[0], a[1], 1420); err == nil {
			l.Close()
			t.Errorf("%v: want an error", a)
		}
	}
}
