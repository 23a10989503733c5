package natengine_test

import (
	"bytes"
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestRFC5508_REQ1_QueriesAndTheirResponsesPass(t *testing.T) {
	for name, kind := range map[string]struct{ request, response uint8 }{
		"echo": {8, 0}, "timestamp": {13, 14}, "information": {15, 16}, "address mask": {17, 18},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, natengine.Config{})
			b.out(icmp(node2, theirPod, kind.request, 0, 0, 7, 0, 1)) // so that the identifier must change
			p := b.out(icmp(node1, theirPod, kind.request, 0, 0, 7, 0, 1))
			want(t, p.Src.String(), natAddress)
			b.refuse(natengine.Inbound, icmp(theirPod, natAddress, kind.request, 0, byte(p.ICMPID>>8), byte(p.ICMPID), 0, 1), natengine.DropNoFlow)
			p = b.in(icmp(theirPod, natAddress, kind.response, 0, byte(p.ICMPID>>8), byte(p.ICMPID), 0, 1))
			want(t, destination(p), node1+":7")

			p = b.out(icmp("10.244.1.1", theirPod, kind.request, 0, 0, 7, 0, 1)) // from a pod, mapped 1:1
			want(t, source(p), "10.61.1.1:7")
			want(t, destination(b.in(icmp(theirPod, "10.61.1.1", kind.response, 0, 0, 7, 0, 1))), "10.244.1.1:7")
		})
	}
}

func TestRFC5508_REQ1a_IdentifierIsExternalHostIndependent(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(ping(node1, theirPod, 7))
	first := b.out(ping(node2, theirPod, 7)).ICMPID
	for _, to := range []string{theirOther, "10.72.8.9"} {
		if id := b.out(ping(node2, to, 7)).ICMPID; id != first {
			t.Errorf("identifier %d towards %s, %d before", id, to, first)
		}
		want(t, destination(b.in(pong(to, natAddress, first))), node2+":7")
	}
}

func TestRFC5508_REQ2_QueryLastsSixtySeconds(t *testing.T) {
	checkLasts(t, natengine.Config{}, time.Minute, func(b *box) []byte {
		return pong(theirPod, natAddress, b.out(ping(node1, theirPod, 7)).ICMPID)
	})
}

func TestRFC5508_REQ2a_TimerIsConfigurable(t *testing.T) {
	checkLasts(t, natengine.Config{Timeouts: natengine.Timeouts{ICMP: 90 * time.Second}}, 90*time.Second, func(b *box) []byte {
		return pong(theirPod, natAddress, b.out(ping(node1, theirPod, 7)).ICMPID)
	})
}

// quotation returns a box and a packet that node1 sent through it, as the peer receives the packet.
func quotation(t *testing.T) (b *box, sent []byte) {
	b = newBox(t, natengine.Config{})
	b.out(datagram(node2+":4000", theirPod+":53"))
	return b, datagram(source(b.out(datagram(node1+":4000", theirPod+":53", 'x'))), theirPod+":53", 'x')
}

func TestRFC5508_REQ3_WrongICMPChecksumIsDropped(t *testing.T) {
	b, sent := quotation(t)
	raw := about(theirPod, natAddress, 3, 3, sent)
	b.in(raw)
	raw[22] ^= 1
	b.refuse(natengine.Inbound, raw, natengine.DropBadChecksum)
	raw = about("10.244.1.1", theirPod, 3, 3, datagram(theirPod+":53", "10.244.1.1:4000"))
	b.out(raw)
	raw[22] ^= 1
	b.refuse(natengine.Outbound, raw, natengine.DropBadChecksum)
}

func TestRFC5508_REQ3a_WrongEmbeddedHeaderChecksumIsDropped(t *testing.T) {
	b, sent := quotation(t)
	sent[10] ^= 1
	b.refuse(natengine.Inbound, about(theirPod, natAddress, 3, 3, sent), natengine.DropBadChecksum)
}

func TestRFC5508_REQ3b_OptionsOfTheEmbeddedHeaderAreSkipped(t *testing.T) {
	b, sent := quotation(t)
	p := packettest.MustDecode(sent)
	for octets := 4; octets <= 40; octets += 4 {
		quote := packettest.Build(packettest.IP{Src: p.Src, Dst: p.Dst, Options: bytes.Repeat([]byte{1}, octets)},
			packettest.UDP{SrcPort: p.SrcPort, DstPort: p.DstPort})
		e := b.in(about(theirPod, natAddress, 3, 3, quote))
		q, err := packettest.DecodeQuote(e.Data)
		if err != nil || packettest.HeaderChecksum()(q) != nil {
			t.Fatalf("%d octets of options: %v, %v", octets, err, packettest.HeaderChecksum()(q))
		}
		want(t, source(q), node1+":4000")
	}
}

func TestRFC5508_REQ3c_EmbeddedTransportChecksumIsNotValidated(t *testing.T) {
	b, sent := quotation(t)
	sent[len(sent)-1] ^= 1 // data that the checksum covers
	q, err := packettest.DecodeQuote(b.in(about(theirPod, natAddress, 3, 3, sent)).Data)
	if err != nil {
		t.Fatal(err)
	}
	want(t, source(q), node1+":4000")
}

func TestRFC5508_REQ3d_ExtensionsAreNotPartOfTheEmbeddedPacket(t *testing.T) {
	b, sent := quotation(t)
	extension := []byte{0x20, 0, 0, 0, 0, 8, 1, 1, 0, 1, 0x21, 1} // an MPLS label stack (RFC 4950)
	sum := packettest.InternetChecksum(extension)
	extension[2], extension[3] = byte(sum>>8), byte(sum)
	p := b.in(packettest.Build(packettest.IP{Src: netip.MustParseAddr(theirPod), Dst: netip.MustParseAddr(natAddress)},
		packettest.ICMPError{Type: 11, Quote: sent, Extension: extension}))
	original := datagram(node1+":4000", theirPod+":53", 'x')
	if !bytes.Equal(p.Data[:len(sent)], original) { // the checksum of the embedded packet ignores padding and extension
		t.Errorf("embedded\n%x, want\n%x", p.Data[:len(sent)], original)
	}
	if !bytes.Equal(p.Data[len(sent):128], make([]byte, 128-len(sent))) || !bytes.Equal(p.Data[128:], extension) {
		t.Errorf("padding or extension changed: %x", p.Data[len(sent):])
	}
}

func TestRFC5508_REQ4_InboundErrorIsTranslatedOrDropped(t *testing.T) {
	b, sent := quotation(t)
	before := b.stats()
	for _, quote := range [][]byte{
		datagram(natAddress+":4001", theirPod+":53"),                                                      // the mapping does not exist
		datagram(natAddress+":4000", theirOther+":53"),                                                    // the mapping exists, but no packet went to this destination
		datagram(ourEndpoint+":80", theirPod+":4000"),                                                     // the mapped endpoint has sent nothing
		packettest.Fragments(datagram(natAddress+":4000", theirPod+":53", make([]byte, 64)...), 32, 1)[1], // a fragment without ports
	} {
		b.refuse(natengine.Inbound, about(theirPod, packettest.MustDecode(quote).Src.String(), 3, 3, quote), natengine.DropICMPError)
	}
	for _, kind := range []struct{ kind, code uint8 }{{3, 0}, {3, 3}, {3, 4}, {3, 13}, {11, 0}, {11, 1}, {12, 0}, {12, 1}} {
		p := b.in(about(theirOther, natAddress, kind.kind, kind.code, sent))
		q, err := packettest.DecodeQuote(p.Data)
		if err != nil {
			t.Fatal(err)
		}
		want(t, source(q), node1+":4000") // REQ-4a: the embedded packet is as it was sent
		want(t, destination(q), theirPod+":53")
		if p.Type != kind.kind || p.Code != kind.code { // REQ-4b
			t.Errorf("type %d, code %d became %d, %d", kind.kind, kind.code, p.Type, p.Code)
		}
		want(t, p.Dst.String(), q.Src.String()) // REQ-4c
		want(t, p.Src.String(), theirOther)
	}
	b.refuse(natengine.Inbound, about(theirOther, "10.61.1.1", 3, 3, sent), natengine.DropICMPError) // the outer destination differs from the source of the embedded packet
	if s := b.stats(); s.Flows != before.Flows || s.Mappings != before.Mappings {
		t.Errorf("an error opened or ended something: %+v", s)
	}
}

func TestRFC5508_REQ5_OutboundErrorIsTranslatedOrDropped(t *testing.T) {
	b, _ := quotation(t)
	b.in(datagram(theirPod+":7000", ourEndpoint+":80"))
	for _, quote := range []string{node1 + ":4001", node2 + ":9", "192.168.7.7:81"} { // no inbound packet went to these ends
		to := netip.MustParseAddrPort(quote).Addr().String()
		b.refuse(natengine.Outbound, about(to, theirPod, 3, 3, datagram(theirPod+":7000", quote)), natengine.DropICMPError)
	}
	b.refuse(natengine.Outbound, about("10.244.1.1", theirOther, 3, 3, datagram(theirPod+":7000", "10.244.1.1:9")), natengine.DropICMPError)
	for _, c := range []struct{ from, quoted, seen string }{
		{node1, node1 + ":4000", ""},                           // behind NAPT
		{"192.168.7.7", "192.168.7.7:80", ourEndpoint + ":80"}, // a mapped endpoint
		{"10.244.1.1", "10.244.1.1:9", "10.61.1.1:9"},          // a pod
	} {
		remote := theirPod + ":7000"
		if c.seen == "" {
			remote, c.seen = theirPod+":53", source(b.out(datagram(node1+":4000", theirPod+":53")))
		}
		p := b.out(about(c.from, theirPod, 3, 3, datagram(remote, c.quoted)))
		q, err := packettest.DecodeQuote(p.Data)
		if err != nil || p.Type != 3 || p.Code != 3 {
			t.Fatalf("type %d, code %d, %v", p.Type, p.Code, err)
		}
		want(t, destination(q), c.seen)
		want(t, source(q), remote)
		want(t, p.Src.String(), q.Dst.String())
	}
}

// A traceroute through a gateway then shows a different address for each hop.
func TestRFC5508_REQ5c_ErrorOfAnIntermediateNodeHasItsMappedOrTheNAPTAddress(t *testing.T) {
	b := newBox(t, natengine.Config{})
	probe := datagram(theirPod+":40000", "10.244.1.1:33434")
	for router, shown := range map[string]string{
		"10.244.9.9":   "10.61.9.9", // a pod, which has a mapping
		"192.168.1.1":  natAddress,
		"169.254.0.2":  natAddress,
		"10.244.0.0":   natAddress,
		"198.51.100.7": natAddress,
	} {
		want(t, b.out(about(router, theirPod, 11, 0, probe)).Src.String(), shown)
	}
}

func TestRFC5508_REQ6_ErrorsNeitherRefreshNorEndAQuery(t *testing.T) {
	checkLasts(t, natengine.Config{}, time.Minute, func(b *box) []byte {
		id := b.out(ping(node1, theirPod, 7)).ICMPID
		b.wait(30 * time.Second)
		for kind := range uint8(13) {
			_, _ = b.judge(natengine.Inbound, about(theirPod, natAddress, kind, 0, ping(natAddress, theirPod, id)))
		}
		b.wait(-30 * time.Second) // back to the time of the request, from which the timeout counts
		return pong(theirPod, natAddress, id)
	})
}

// See REQ-9 of RFC 4787.
func TestRFC5508_REQ7_HairpinIsRefused(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.refuse(natengine.Outbound, ping("10.244.1.1", "10.61.1.2", 7), natengine.DropNoPeer)
	b.refuse(natengine.Outbound, about("10.244.1.2", "10.61.1.1", 3, 3, datagram("10.61.1.1:9", "10.244.1.2:80")), natengine.DropNoPeer)
}

// The packets are those of pods, mapped 1:1.
func TestRFC5508_REQ10a_UnreachableTimeExceededAndEchoPassInBothDirections(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for _, kind := range []uint8{3, 11} {
		p := b.in(about(theirPod, "10.61.1.1", kind, 1, datagram("10.61.1.1:4000", theirPod+":53")))
		want(t, p.Dst.String(), "10.244.1.1")
		p = b.out(about("10.244.1.1", theirPod, kind, 1, datagram(theirPod+":53", "10.244.1.1:4000")))
		want(t, p.Src.String(), "10.61.1.1")
	}
	want(t, source(b.out(ping("10.244.1.1", theirPod, 9))), "10.61.1.1:9")
	want(t, destination(b.in(ping(theirPod, "10.61.1.1", 9))), "10.244.1.1:9") // the peer may ping a pod
}

func TestRFC5508_REQ10b_ParameterProblemPassesAndRedirectDoesNot(t *testing.T) {
	b, sent := quotation(t)
	raw := packettest.Build(packettest.IP{Src: netip.MustParseAddr(theirPod), Dst: netip.MustParseAddr(natAddress)},
		packettest.ICMPError{Type: 12, Rest: 20 << 24, Quote: sent})
	p := b.in(raw)
	if p.Transport[4] != 20 { // IPv4 to IPv4: every field stays at its offset
		t.Errorf("pointer %d", p.Transport[4])
	}
	b.refuse(natengine.Inbound, about(theirPod, natAddress, 5, 1, sent), natengine.DropICMPError)
	b.refuse(natengine.Outbound, about("10.244.1.1", theirPod, 5, 1, datagram(theirPod+":53", "10.244.1.1:4000")), natengine.DropICMPError)
}

// Messages that are neither query nor error, such as router discovery, have no field by which
// NAPT could find their host.
func TestRFC5508_REQ11_OtherMessagesNeedA1To1Map(t *testing.T) {
	b := newBox(t, natengine.Config{})
	for _, kind := range []uint8{1, 2, 6, 9, 10, 19, 30, 40, 42, 253} {
		b.refuse(natengine.Outbound, icmp(node1, theirPod, kind, 0, 0, 0, 0, 0), natengine.DropProtocol)
		b.refuse(natengine.Inbound, icmp(theirPod, natAddress, kind, 0, 0, 0, 0, 0), natengine.DropNoFlow)
		want(t, b.out(icmp("10.244.1.1", theirPod, kind, 0, 0, 0, 0, 0)).Src.String(), "10.61.1.1")
	}
}

// A query with identifier 0 opens a flow. A message without identifier has the same tuple, but must
// not match that flow.
func TestRFC5508_REQ11_OtherMessagesMatchNoFlow(t *testing.T) {
	for _, c := range []struct {
		name, node, nat, peer string
		request, reply        uint8
		others                []uint8 // types of messages that open no flow
	}{
		{"IPv4", node1, natAddress, theirPod, 8, 0, []uint8{1, 2, 6, 7, 9, 10, 14, 16, 18, 19, 30, 37, 40, 41, 42, 43, 253, 254, 255}},
		{"IPv6", "fd01::1", "fd00:61::", "fd00:71::5", 128, 129, []uint8{138, 139, 140, 144, 145, 150, 154, 155, 160, 161, 200, 254, 255}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t, natengine.Config{})
			want(t, source(b.out(query(c.node, c.peer, c.request, 0))), netip.AddrPortFrom(netip.MustParseAddr(c.nat), 0).String())
			for _, kind := range c.others {
				b.refuse(natengine.Inbound, query(c.peer, c.nat, kind, 0), natengine.DropNoFlow)
				reason := natengine.DropProtocol
				if kind == 14 || kind == 16 || kind == 18 { // replies in IPv4
					reason = natengine.DropNoFlow
				}
				b.refuse(natengine.Outbound, query(c.node, c.peer, kind, 0), reason)
			}
			b.refuse(natengine.Inbound, query(c.peer, c.nat, c.request, 0), natengine.DropNoFlow)
			b.refuse(natengine.Outbound, query(c.node, c.peer, c.reply, 0), natengine.DropNoFlow)
			want(t, b.in(query(c.peer, c.nat, c.reply, 0)).Dst.String(), c.node)
			if n := b.stats().Flows; n != 1 {
				t.Errorf("%d flows, want the one of the echo", n)
			}
		})
	}
}

// The engine must distinguish queries with the same identifier by their type and by the side that
// sends the request. It must do so even for two queries of one host, which both keep the
// identifier.
func TestRFC5508_REQ1_AReplyMatchesOnlyItsOwnRequest(t *testing.T) {
	b := newBox(t, natengine.Config{})
	b.out(ping(node2, theirPod, 7)) // so that the identifier must change
	id := b.out(ping(node1, theirPod, 7)).ICMPID
	b.refuse(natengine.Inbound, query(theirPod, natAddress, 14, id), natengine.DropNoFlow)
	if other := b.out(query(node1, theirPod, 13, 7)).ICMPID; other != id {
		t.Errorf("identifier %d of a timestamp request, %d of an echo", other, id)
	}
	want(t, destination(b.in(query(theirPod, natAddress, 14, id))), node1+":7")
	want(t, destination(b.in(pong(theirPod, natAddress, id))), node1+":7")
	b.refuse(natengine.Inbound, query(theirPod, natAddress, 18, id), natengine.DropNoFlow)

	// A mapped endpoint receives a request and sends another request with the same identifier.
	const endpoint = "192.168.7.7"
	want(t, destination(b.in(ping(theirPod, ourEndpoint, 9))), endpoint+":9")
	b.refuse(natengine.Outbound, query(endpoint, theirPod, 14, 9), natengine.DropNoFlow)
	want(t, source(b.out(ping(endpoint, theirPod, 9))), natAddress+":9")
	want(t, source(b.out(pong(endpoint, theirPod, 9))), ourEndpoint+":9")
	want(t, destination(b.in(pong(theirPod, natAddress, 9))), endpoint+":9")
	b.refuse(natengine.Inbound, pong(theirPod, ourEndpoint, 9), natengine.DropNoFlow)

	// Errors about the two queries must match the query that they quote.
	for seen, quoted := range map[string][]byte{natAddress: ping(natAddress, theirPod, 9), ourEndpoint: pong(ourEndpoint, theirPod, 9)} {
		p := b.in(about(theirPod, seen, 3, 1, quoted))
		q, err := packettest.DecodeQuote(p.Data)
		if err != nil {
			t.Fatal(err)
		}
		want(t, source(q), endpoint+":9")
	}
	b.refuse(natengine.Inbound, about(theirPod, ourEndpoint, 3, 1, ping(ourEndpoint, theirPod, 9)), natengine.DropICMPError)
}
