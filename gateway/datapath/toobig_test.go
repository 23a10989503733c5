package datapath_test

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

const smallMTU = 1328

func smallPeer() natengine.Peer {
	p := rules("b")
	p.MTU = smallMTU
	return p
}

// withoutDF clears DF in a packet with a virtio header.
func withoutDF(p []byte) []byte {
	h := header.IPv4(p[packet.VirtioHeaderLen:])
	h.SetFlagsFragmentOffset(0, 0)
	h.SetChecksum(0)
	h.SetChecksum(^h.CalculateChecksum())
	return p
}

// reassembled reassembles the fragments of one datagram.
func reassembled(t *testing.T, fragments [][]byte) []byte {
	t.Helper()
	whole := bytes.Clone(fragments[0])
	for i, f := range fragments {
		h := header.IPv4(f)
		if len(f) > smallMTU || !h.IsChecksumValid() || h.More() != (i < len(fragments)-1) || int(h.FragmentOffset()) != len(whole)-20 && i > 0 {
			t.Fatalf("fragment %d of %d: %d octets, offset %d, more %t", i, len(fragments), len(f), h.FragmentOffset(), h.More())
		}
		if i > 0 {
			whole = append(whole, h.Payload()...)
		}
	}
	h := header.IPv4(whole)
	h.SetTotalLength(uint16(len(whole)))
	h.SetFlagsFragmentOffset(0, 0)
	h.SetChecksum(0)
	h.SetChecksum(^h.CalculateChecksum())
	return whole
}

func TestReadAnswersAPacketThatIsTooBigForItsPeer(t *testing.T) {
	fits := plain(udp4(at(podA, 4000), at(podB, 80), random(smallMTU-28)))
	for _, c := range []struct {
		name  string
		p     []byte
		quote int // length in the IP header that the ICMP error quotes
	}{
		{"packet", plain(udp4(at(podA, 4000), at(podB, 80), random(smallMTU-27))), smallMTU + 1},
		{"superpacket", super4(at(podA, 4000), at(podB, 80), 7, smallMTU-39, random(5000)), smallMTU + 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newEngine(t, smallPeer())
			link := newScript(c.p, fits, fits)
			d := newDevice(t, link, e, datapath.Options{})
			b := newBuffers(1, 2048)
			for range 2 { // the second round checks that nothing of the superpacket is left over
				if n := read(t, d, b); n != 1 || len(b.packet(0)) != smallMTU {
					t.Fatalf("%d packets, the first of %d octets", n, len(b.packet(0)))
				}
			}
			if len(link.written) != 1 {
				t.Fatalf("%d packets to the link", len(link.written))
			}
			answer := link.written[0]
			if !bytes.Equal(answer[:packet.VirtioHeaderLen], make([]byte, packet.VirtioHeaderLen)) {
				t.Errorf("virtio header %x", answer[:packet.VirtioHeaderLen])
			}
			answer = answer[packet.VirtioHeaderLen:]
			packettest.Check(t, answer, packettest.ValidChecksums(), packettest.Src(podB), packettest.Dst(podA), packettest.ICMPType(3, 4),
				packettest.Quote(packettest.HeaderChecksum(), packettest.Src(podA), packettest.Dst(podB), packettest.Ports(4000, 80)))
			icmp := header.ICMPv4(header.IPv4(answer).Payload())
			if icmp.MTU() != smallMTU || int(header.IPv4(icmp.Payload()).TotalLength()) != c.quote {
				t.Errorf("MTU %d about a packet of %d", icmp.MTU(), header.IPv4(icmp.Payload()).TotalLength())
			}
			if n := drops(e, natengine.Outbound, natengine.DropTooBig); n != 1 {
				t.Errorf("%d counted as too big", n)
			}
			if s := e.Stats().Peers[0]; s.ErrorsSent != 1 || s.Fragmented != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

func TestReadFragmentsLargePacketsIfAllowed(t *testing.T) {
	payload := random(4000)
	e := newEngine(t, smallPeer())
	link := newScript(withoutDF(plain(udp4(at(podA, 4000), at(podB, 80), payload))), plain(udp4(at(podA, 1), at(podB, 2), []byte("after"))))
	d := newDevice(t, link, e, datapath.Options{})
	b := newBuffers(2, 2048) // too few buffers, so the other fragments come in the next batch
	var got [][]byte
	for range 3 {
		n := read(t, d, b)
		for i := range n {
			got = append(got, bytes.Clone(b.packet(i)))
		}
	}
	if len(got) != 5 || !bytes.HasSuffix(got[4], []byte("after")) {
		t.Fatalf("%d packets", len(got))
	}
	whole := reassembled(t, got[:4])
	checkPacket(t, whole, podASee, podB)
	if !bytes.HasSuffix(whole, payload) || header.IPv4(whole).ID() != 9 {
		t.Error("the datagram differs")
	}
	s := e.Stats().Peers[0]
	packets, octets := e.Peers()[0].Traffic(natengine.Outbound)
	if s.Fragmented != 1 || s.ErrorsSent != 0 || packets != 5 || octets != uint64(4028+3*20+33) || len(link.written) != 0 {
		t.Errorf("%d fragmented, %d told, %d packets, %d octets", s.Fragmented, s.ErrorsSent, packets, octets)
	}
}

func TestReadFragmentsTheSegmentsOfASuperpacket(t *testing.T) {
	payload := random(3*1400 + 100)
	d := newDevice(t, newScript(withoutDF(super4(at(podA, 4000), at(podB, 80), 0, 1400, payload))), newEngine(t, smallPeer()), datapath.Options{})
	b := newBuffers(16, 2048)
	if n := read(t, d, b); n != 7 {
		t.Fatalf("%d packets, want 3 of two fragments and one whole", n)
	}
	var got []byte
	for i := range 3 {
		whole := reassembled(t, [][]byte{b.packet(2 * i), b.packet(2*i + 1)})
		checkPacket(t, whole, podASee, podB)
		if header.IPv4(whole).ID() == 0 {
			t.Error("fragments without an identification")
		}
		got = append(got, header.TCP(header.IPv4(whole).Payload()).Payload()...)
	}
	if got = append(got, header.TCP(header.IPv4(b.packet(6)).Payload()).Payload()...); !bytes.Equal(got, payload) {
		t.Error("payload differs")
	}
}

// If a peer has no MTU or a larger one, the size of the buffers limits packets.
func TestBufferSizeLimitsPacketsWithoutAPeerMTU(t *testing.T) {
	for _, mtu := range []uint16{0, 1500} {
		p := rules("b")
		p.MTU = mtu
		link := newScript(plain(udp4(at(podA, 4000), at(podB, 80), random(1400))), plain(udp4(at(podA, 1), at(podB, 2), nil)))
		d := newDevice(t, link, newEngine(t, p), datapath.Options{})
		if n := read(t, d, newBuffers(1, offset+1400+31)); n != 1 || len(link.written) != 1 {
			t.Fatalf("MTU %d: %d packets, %d answers", mtu, n, len(link.written))
		}
		if gotMTU := header.ICMPv4(header.IPv4(link.written[0][packet.VirtioHeaderLen:]).Payload()).MTU(); gotMTU != 1400 {
			t.Errorf("MTU %d: told %d, want 1400", mtu, gotMTU)
		}
	}
}

// A fragment that the engine held is fragmented again if it is too big for the peer.
func TestReleasedFragmentsAreFragmentedAgain(t *testing.T) {
	whole := withoutDF(plain(udp4(at(nodeA, 4000), at(podB, 80), random(2800))))[packet.VirtioHeaderLen:]
	pieces := fragments(whole, 1400)
	d := newDevice(t, newScript(plain(pieces[2]), plain(pieces[1]), plain(pieces[0])), newEngine(t, smallPeer()), datapath.Options{})
	b := newBuffers(16, 2048)
	if n := read(t, d, b); n != 5 {
		t.Fatalf("%d fragments, want 5", n)
	}
	order := []int{0, 1, 3, 4, 2} // the first fragment is forwarded first, the others in order of arrival
	var sorted [][]byte
	for _, i := range order {
		sorted = append(sorted, b.packet(i))
	}
	checkPacket(t, reassembled(t, sorted), netip.MustParseAddr("10.71.0.0"), podB)
}

// The in-process endpoint knows only the tunnel's MTU. Its packets that exceed the peer's MTU are
// fragmented.
func TestPacketsOfTheLocalEndpointAreFragmented(t *testing.T) {
	p := smallPeer()
	p.MTU = 500
	e, link := newEngine(t, p), newScript()
	d := newDevice(t, link, e, datapath.Options{})
	request := packettest.Build(packettest.IP{Src: podB, Dst: netip.MustParseAddr("10.90.0.1"), TTL: 64},
		packettest.Echo{ID: 5, Seq: 1, Data: random(1000)})
	if _, err := d.Write(behindOffset(request), offset); err != nil {
		t.Fatal(err)
	}
	if n := read(t, d, newBuffers(16, 2048)); n != 3 { // gVisor does not set DF
		t.Fatalf("%d packets", n)
	}
	if len(link.written) != 0 {
		t.Error("an answer went to the link")
	}
}

// For a flood of packets that are too big, only as many ICMP errors are written to the link as
// the rate limit allows.
func TestTooBigErrorsAboutAFloodAreLimited(t *testing.T) {
	big := plain(udp4(at(podA, 4000), at(podB, 80), random(1400)))
	var flood [][]byte
	for range 1000 {
		flood = append(flood, big)
	}
	e := newEngine(t, smallPeer())
	link := newScript(append(flood, plain(udp4(at(podA, 1), at(podB, 2), nil)))...)
	d := newDevice(t, link, e, datapath.Options{})
	start := time.Now()
	read(t, d, newBuffers(8, 2048))
	most := 101 + int(time.Since(start)/time.Millisecond)
	if n := len(link.written); n < 50 || n > most || drops(e, natengine.Outbound, natengine.DropTooBig) != 1000 {
		t.Errorf("%d errors, at most %d are allowed", n, most)
	}
}

// With IPv6, only the sender may fragment a packet. So the endpoint gets the ICMP error, and the
// link does not.
func TestLocalEndpointGetsTooBigErrorsOverIPv6(t *testing.T) {
	pre, self6 := netip.MustParsePrefix, netip.MustParseAddr("fd69::1")
	e := natengine.New(natengine.Config{Self4: self, Self6: self6})
	if err := e.SetPeers([]natengine.Peer{{
		ID: "b", RemotePods: []netip.Prefix{pre("fd71::/64")}, Pods: []natengine.Remap{{From: pre("fd44::/64"), To: pre("fd46::/64")}},
		External: []netip.Prefix{pre("fd47::/64")}, Endpoints: []natengine.Endpoint{{Real: self6, Seen: netip.MustParseAddr("fd47::1")}}, MTU: smallMTU,
	}}); err != nil {
		t.Fatal(err)
	}
	local, err := datapath.NewLocal(netip.Addr{}, self6, 1420)
	if err != nil {
		t.Fatal(err)
	}
	link := newScript()
	d := datapath.New(link, bind.New(), e, local, datapath.Options{})
	defer d.Close()
	port, to := listen(t, local), netip.MustParseAddrPort("[fd71::5]:12345")
	b := newBuffers(16, 2048)
	_ = port.Send(random(1350), to, 0)
	_ = port.Send([]byte("small"), to, 0)
	if n := read(t, d, b); n != 1 || !bytes.HasSuffix(b.packet(0), []byte("small")) {
		t.Fatalf("%d packets", n)
	}
	if s := e.Stats().Peers[0]; s.ErrorsSent != 1 || len(link.written) != 0 {
		t.Errorf("told %d, %d packets to the link", s.ErrorsSent, len(link.written))
	}
}
