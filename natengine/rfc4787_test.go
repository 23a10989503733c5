package natengine_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestRFC4787_REQ1_MappingIsEndpointIndependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(datagram(node1+":4000", theirPod+":53")) // occupies port 4000, so that the next flow gets another port
	first := source(b.out(datagram(node2+":4000", theirPod+":53")))
	for _, to := range []string{theirPod + ":54", theirOther + ":53", "10.72.8.9:1"} {
		want(t, source(b.out(datagram(node2+":4000", to))), first)
		want(t, destination(b.in(datagram(to, first))), node2+":4000")
	}
}

func TestRFC4787_REQ2_AHostAlwaysHasTheSameAddress(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for i := range 50 {
		from := fmt.Sprintf("192.168.1.%d:%d", 1+i%3, 1000+i)
		for _, raw := range [][]byte{datagram(from, theirPod+":53"), segment(from, theirOther+":80", packettest.SYN)} {
			want(t, b.out(raw).Src.String(), natAddress)
		}
	}
}

func TestRFC4787_REQ3_NoPortIsOverloaded(t *testing.T) {
	b := newBox(t, natengine.Config{})
	owner := map[string]string{}
	for host := range 250 {
		from := fmt.Sprintf("192.168.1.%d:4000", host)
		seen := source(b.out(datagram(from, fmt.Sprintf("10.71.128.%d:53", host)))) // a flow to another destination must not share the port
		if other := owner[seen]; other != "" {
			t.Fatalf("%s is %s and %s", seen, other, from)
		}
		owner[seen] = from
	}
	for host := range 250 {
		for seen, from := range owner {
			if from == fmt.Sprintf("192.168.1.%d:4000", host) {
				want(t, destination(b.in(datagram(fmt.Sprintf("10.71.128.%d:53", host), seen))), from)
			}
		}
	}
}

func TestRFC4787_REQ3a_PortStaysInItsRange(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for host := range 250 {
		for _, port := range []uint16{1, 1023, 1024, 65535} {
			p := b.out(datagram(fmt.Sprintf("192.168.1.%d:%d", host, port), theirPod+":53"))
			if (p.SrcPort < 1024) != (port < 1024) || p.SrcPort == 0 || host == 0 && p.SrcPort != port {
				t.Errorf("port %d of host %d became %d", port, host, p.SrcPort)
			}
		}
	}
}

func TestRFC4787_REQ4_ParityIsPreserved(t *testing.T) {
	for _, c := range []natengine.Config{{}, {RandomPorts: true}} {
		b := newBox(t, c)
		for host := range 250 {
			for _, port := range []uint16{90, 91, 4000, 4001} {
				p := b.out(datagram(fmt.Sprintf("192.168.1.%d:%d", host, port), theirPod+":53"))
				if p.SrcPort%2 != port%2 || (p.SrcPort < 1024) != (port < 1024) {
					t.Errorf("port %d became %d", port, p.SrcPort)
				}
			}
		}
	}
}

func TestRFC4787_REQ5_MappingLastsTwoMinutesAtLeast(t *testing.T) {
	for _, port := range []string{":53", ":123", ":40000"} { // REQ-5a allows shorter times for some ports, which the engine does not use
		b := newBox(t, natengine.Config{})
		seen := source(b.out(datagram(node1+":4000", theirPod+port)))
		b.wait(119 * time.Second)
		b.e.Sweep(b.now)
		want(t, destination(b.in(datagram(theirPod+port, seen))), node1+":4000")
	}
}

func TestRFC4787_REQ5b_TimerIsConfigurable(t *testing.T) {
	c := natengine.Config{Timeouts: natengine.Timeouts{UDP: 33 * time.Second}}
	checkLasts(t, c, 33*time.Second, func(b *box) []byte {
		return datagram(theirPod+":53", source(b.out(datagram(node1+":4000", theirPod+":53"))))
	})
}

func TestRFC4787_REQ5c_DefaultIsFiveMinutes(t *testing.T) {
	checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
		return datagram(theirPod+":53", source(b.out(datagram(node1+":4000", theirPod+":53"))))
	})
}

func TestRFC4787_REQ6_OutboundPacketsRefreshTheMapping(t *testing.T) {
	checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
		seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
		for range 10 {
			b.wait(299 * time.Second)
			want(t, source(b.out(datagram(node1+":4000", theirPod+":53"))), seen)
		}
		return datagram(theirPod+":53", seen)
	})
}

func TestRFC4787_REQ6a_InboundPacketsRefreshTheMapping(t *testing.T) {
	checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
		seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
		for range 10 {
			b.wait(299 * time.Second)
			b.in(datagram(theirPod+":53", seen))
		}
		return datagram(theirPod+":53", seen)
	})
}

// Our nodes have addresses that the peer's pods also have in their own cluster, and the peer
// sees us under the same range under which we see it.
func TestRFC4787_REQ7_BothSidesMayUseTheSameAddresses(t *testing.T) {
	b := newBox(t, natengine.Config{})
	prefix := netip.MustParsePrefix
	err := b.e.SetPeers([]natengine.Peer{{
		ID: "b", RemotePods: []netip.Prefix{prefix("10.71.0.0/16")},
		Pods: []natengine.Remap{{From: prefix("10.244.0.0/16"), To: prefix("10.71.0.0/16")}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	want(t, source(b.out(datagram("10.244.1.1:53", "10.71.1.1:53"))), "10.71.1.1:53") // the same address and port at both ends
	want(t, destination(b.in(datagram("10.71.1.1:53", "10.71.1.1:53"))), "10.244.1.1:53")
	want(t, source(b.out(datagram("10.71.1.1:9", "10.71.1.1:9"))), "10.71.0.0:9") // from a node that has the address of a remote pod
	want(t, destination(b.in(datagram("10.71.1.1:9", "10.71.0.0:9"))), "10.71.1.1:9")
}

// The behaviour is stricter than the RFC recommends; docs/nat.md explains the reason.
func TestRFC4787_REQ8_FilteringIsAddressAndPortDependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	want(t, destination(b.in(datagram(theirPod+":53", seen))), node1+":4000")
	b.refuse(natengine.Inbound, datagram(theirPod+":54", seen), natengine.DropNoFlow)
	b.refuse(natengine.Inbound, datagram(theirOther+":53", seen), natengine.DropNoFlow)
	b.refuse(natengine.Inbound, datagram("10.73.0.1:53", seen), natengine.DropNoPeer)
	b.out(datagram(node1+":4000", theirOther+":54")) // an outbound packet permits replies from its destination
	want(t, destination(b.in(datagram(theirOther+":54", seen))), node1+":4000")
}

// The addresses under which a peer sees us are valid only at that peer. On our side they belong to
// no host. So a packet to such an address, or from such an address out of the tunnel, must be
// dropped.
func TestRFC4787_REQ9_HairpinIsRefused(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	for _, from := range []string{"10.244.1.1:9", node2 + ":9"} {
		b.refuse(natengine.Outbound, datagram(from, "10.61.1.2:80"), natengine.DropNoPeer)
		b.refuse(natengine.Outbound, datagram(from, ourEndpoint+":80"), natengine.DropNoPeer)
		b.refuse(natengine.Outbound, datagram(from, seen), natengine.DropNoPeer)
	}
	b.refuse(natengine.Inbound, datagram("10.61.1.1:9", "10.61.1.2:80"), natengine.DropNoPeer)
}

func TestRFC4787_REQ10_PayloadsAreNotInspected(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(datagram(node2+":5060", "10.71.128.5:5060"))
	data := []byte("INVITE sip:b@10.71.128.5 SIP/2.0\r\nVia: SIP/2.0/UDP 192.168.1.1:5060\r\nContact: <sip:a@192.168.1.1:5060>\r\n\r\nc=IN IP4 192.168.1.1\r\n")
	for _, port := range []string{":53", ":69", ":500", ":5060"} {
		if p := b.out(datagram(node1+":5060", theirPod+port, data...)); !slices.Equal(p.Data, data) {
			t.Errorf("to port %s the data became %q", port, p.Data)
		}
	}
	if n := b.stats().Flows; n != 5 { // addresses in the payload open no flow
		t.Errorf("%d flows", n)
	}
}

// Four hosts must be mapped and filtered alike: the first host with a port, a host that must get
// another port, a host that opens its flow when the table is full, and a host after a change of the
// rules.
func TestRFC4787_REQ11_BehaviorIsTheSameUnderAllConditions(t *testing.T) {
	b := newBox(t, natengine.Config{MaxFlows: 64})
	classify := func(host string) {
		t.Helper()
		seen := source(b.out(datagram(host+":4000", theirPod+":53")))
		for _, to := range []string{theirPod + ":54", theirOther + ":53"} {
			b.refuse(natengine.Inbound, datagram(to, seen), natengine.DropNoFlow)
			want(t, source(b.out(datagram(host+":4000", to))), seen)
			want(t, destination(b.in(datagram(to, seen))), host+":4000")
		}
	}
	classify(node1)
	classify(node2)
	for i := range 200 { // many half-open flows: each new one evicts an older one
		b.out(datagram(fmt.Sprintf("192.168.2.%d:4000", i), theirPod+":53"))
	}
	if b.stats().Evicted == 0 {
		t.Fatal("the table is not full")
	}
	classify("192.168.1.3")
	b.e.Sweep(b.now)
	classify("192.168.1.4")
	b.wait(time.Hour)
	classify(node1)
}

func TestRFC4787_REQ12_ICMPDoesNotEndAMapping(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	sent := datagram(seen, theirPod+":53")
	for kind := range 256 {
		for code := range 16 {
			_, _ = b.judge(natengine.Inbound, icmp(theirPod, natAddress, uint8(kind), uint8(code), append(make([]byte, 4), sent...)...))
			_, _ = b.judge(natengine.Outbound, icmp(node1, theirPod, uint8(kind), uint8(code), append(make([]byte, 4), datagram(theirPod+":53", node1+":4000")...)...))
		}
	}
	want(t, destination(b.in(datagram(theirPod+":53", seen))), node1+":4000")
	want(t, source(b.out(datagram(node1+":4000", theirOther+":9"))), seen)
}

// The errors come from the pod, from other pods and from the peer's NAPT address, behind which
// its routers are. An address that does not belong to the peer is refused.
func TestRFC4787_REQ12a_ErrorsFromAnyAddressOfThePeerPass(t *testing.T) {
	b := newBox(t, natengine.Config{})
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	for _, from := range []string{theirPod, theirOther, "10.71.128.0", "10.72.8.77"} {
		p := b.in(about(from, natAddress, 3, 1, datagram(seen, theirPod+":53")))
		want(t, p.Src.String(), from)
		want(t, p.Dst.String(), node1)
	}
	b.refuse(natengine.Inbound, about("192.0.2.1", natAddress, 3, 1, datagram(seen, theirPod+":53")), natengine.DropNoPeer)
}

func TestRFC4787_REQ12b_DestinationUnreachableIsTranslated(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(datagram(node2+":4000", theirPod+":53"))
	seen := source(b.out(datagram(node1+":4000", theirPod+":53")))
	for code := range uint8(16) {
		p := b.in(about(theirPod, natAddress, 3, code, datagram(seen, theirPod+":53")[:28]))
		q, err := packettest.DecodeQuote(p.Data)
		if err != nil || p.Type != 3 || p.Code != code {
			t.Errorf("code %d: type %d, code %d, %v", code, p.Type, p.Code, err)
		}
		want(t, p.Dst.String(), node1)
		want(t, source(q), node1+":4000")
		want(t, destination(q), theirPod+":53")
	}
}

// tooBig sends a packet of 1400 octets. It returns the packet and its translation. gateway/datapath
// compares the size of a translated packet with the path MTU.
func tooBig(b *box, from string, df bool) (sent []byte, v packet.View) {
	b.Helper()
	f, to := netip.MustParseAddrPort(from), netip.MustParseAddrPort(theirPod+":53")
	sent = packettest.Build(packettest.IP{Src: f.Addr(), Dst: to.Addr(), DF: df},
		packettest.UDP{SrcPort: f.Port(), DstPort: to.Port(), Data: bytes.Repeat([]byte("data"), 343)})
	if err := v.Parse(slices.Clone(sent), packet.ChecksumComplete); err != nil {
		b.Fatal(err)
	}
	if verdict := b.e.Outbound(&v, b.now); verdict.Action != natengine.Forward {
		b.Fatal(verdict.Drop)
	}
	return sent, v
}

func TestRFC4787_REQ13_TooBigWithDFIsAnswered(t *testing.T) {
	for _, from := range []string{"10.244.1.1:4000", node1 + ":4000"} {
		b := newBox(t, natengine.Config{})
		b.out(datagram(node2+":4000", theirPod+":53")) // so that the port must change
		sent, v := tooBig(b, from, true)
		answer, action := b.e.TooBig(&v, 1399, make([]byte, packet.MaxTooBig), b.now)
		if action != natengine.Forward {
			t.Fatal(action)
		}
		packettest.Check(t, answer, packettest.ValidChecksums(), packettest.ICMPType(3, 4))
		p := packettest.MustDecode(answer)
		want(t, p.Dst.String(), netip.MustParseAddrPort(from).Addr().String())
		if mtu := int(p.Transport[6])<<8 | int(p.Transport[7]); mtu != 1399 {
			t.Errorf("next-hop MTU %d", mtu)
		}
		if len(p.Data) < 28 || !bytes.Equal(p.Data, sent[:len(p.Data)]) {
			t.Errorf("it quotes\n%x of\n%x", p.Data, sent)
		}
	}
}

func TestRFC4787_REQ13a_TooBigWithoutDFIsFragmentedInOrder(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(datagram(node2+":4000", theirPod+":53"))
	_, v := tooBig(b, node1+":4000", false)
	var whole []byte
	for i, f := range v.Split(600, 1) {
		packettest.Check(t, f, packettest.ValidChecksums(), packettest.Src(netip.MustParseAddr(natAddress)))
		p := packettest.MustDecode(f)
		if len(f) > 600 || p.FragmentOffset != len(whole) || p.More != (i < 2) {
			t.Errorf("fragment %d: %d octets at %d, more %v", i, len(f), p.FragmentOffset, p.More)
		}
		whole = append(whole, p.Transport...)
	}
	if !bytes.Equal(whole, v.Bytes()[20:]) {
		t.Error("the fragments are not the packet")
	}
}

func TestRFC4787_REQ14_FragmentsMayArriveInAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 3000)
	for i := range data {
		data[i] = byte(i)
	}
	b := newBox(t, natengine.Config{})
	b.out(datagram(node2+":4000", theirPod+":53")) // so that the port must change
	for id := range uint32(50) {
		fragments := packettest.Fragments(datagram(node1+":4000", theirPod+":53", data...), 8*(1+rng.IntN(100)), id)
		switch id {
		case 0: // in order
		case 1:
			slices.Reverse(fragments)
		default:
			rng.Shuffle(len(fragments), func(i, j int) { fragments[i], fragments[j] = fragments[j], fragments[i] })
		}
		if len(fragments) > 60 {
			continue // the number of held fragments of one datagram is bounded
		}
		src, transport := b.outFragments(fragments)
		whole := b.out(datagram(node1+":4000", theirPod+":53", data...))
		if src != whole.Src || !slices.Equal(transport, whole.Transport) {
			t.Fatalf("%d fragments of datagram %d form another datagram than the whole packet", len(fragments), id)
		}
	}
}

func TestRFC4787_REQ14a_FragmentFloodDoesNotAffectOtherTraffic(t *testing.T) {
	b := newBox(t, natengine.Config{})
	flood := packettest.Fragments(datagram(node2+":4000", theirPod+":53", make([]byte, 1400)...), 1200, 0)[1]
	for id := range 20_000 { // later fragments, whose first fragments never arrive
		flood[4], flood[5] = byte(id>>8), byte(id)
		flood[10], flood[11] = 0, 0
		sum := packettest.InternetChecksum(flood[:20])
		flood[10], flood[11] = byte(sum>>8), byte(sum)
		_, _ = b.judge(natengine.Outbound, flood)
		if id%1000 == 0 {
			b.out(datagram(node1+":4000", theirPod+":53"))
			src, transport := b.outFragments(packettest.Fragments(datagram(node1+":4000", theirPod+":53", make([]byte, 2000)...), 800, 70_000))
			want(t, src.String(), natAddress)
			if len(transport) != 2008 {
				t.Fatalf("%d octets", len(transport))
			}
		}
	}
	if s := b.stats(); s.FragmentSets > 256 || s.FragmentBytes > 1<<20 {
		t.Errorf("%d datagrams, %d octets", s.FragmentSets, s.FragmentBytes)
	}
}
