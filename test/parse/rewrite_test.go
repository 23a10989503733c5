package parse

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// Package packet rewrites addresses and ports in place with incremental checksums. gopacket
// changes its layers and serialises the packet again with full checksums. The results must be
// equal.
func TestRewrittenPacketsEqualThoseThatGopacketSerialises(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 5))
	done := map[string]int{}
	for range 60_000 {
		h := header(rng)
		h.Options, h.Extensions = nil, nil
		if h.Src.Is4() && rng.IntN(3) == 0 {
			h.Options = []byte{148, 4, 0, 0, 7, 7, 4, 0, 0, 0, 0, 0}
		}
		b := packettest.Build(h, body(rng))
		want, kind := serialised(b, change{}, nil)
		if !bytes.Equal(want, b) {
			continue // gopacket cannot rebuild it: inconsistent TCP options, unknown protocols
		}
		var v packet.View
		if v.Parse(b, packet.ChecksumComplete) != nil || v.Checksum() == packet.ChecksumAbsent && kind[5:] != "other" {
			continue
		}
		c := change{src: like(rng, h.Src), dst: like(rng, h.Dst), srcPort: word(rng), dstPort: word(rng), id: word(rng)}
		want, _ = serialised(b, c, &v)
		v.SetSrc(c.src)
		v.SetDst(c.dst)
		v.SetSrcPort(c.srcPort)
		v.SetDstPort(c.dstPort)
		v.SetICMPID(c.id)
		if !bytes.Equal(v.Bytes(), want) {
			t.Fatalf("%s: rewritten\n%sgopacket\n%s", kind, hex.Dump(head(v.Bytes())), hex.Dump(head(want)))
		}
		done[kind]++
	}
	t.Log(done)
	for _, family := range []string{"IPv4", "IPv6"} {
		for _, kind := range []string{"TCP", "UDP", "ICMP"} {
			if done[family+" "+kind] < 500 {
				t.Errorf("only %d of %s %s", done[family+" "+kind], family, kind)
			}
		}
	}
}

func like(rng *rand.Rand, a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.AddrFrom4([4]byte(random(rng, 4)))
	}
	return netip.AddrFrom16([16]byte(random(rng, 16)))
}

type change struct {
	src, dst             netip.Addr // new addresses; zero: change nothing
	srcPort, dstPort, id uint16
}

// serialised decodes b with gopacket, applies the change and serialises the packet. v reports
// the fields that b has; it may be nil for an empty change.
func serialised(b []byte, c change, v *packet.View) ([]byte, string) {
	var list []gopacket.SerializableLayer
	var network gopacket.NetworkLayer
	var f feedback
	var body []byte
	var proto layers.IPProtocol
	kind := "IPv4"
	if b[0]>>4 == 4 {
		ip := &layers.IPv4{}
		if ip.DecodeFromBytes(slices.Clone(b), &f) != nil {
			return nil, ""
		}
		if v != nil {
			ip.SrcIP, ip.DstIP = c.src.AsSlice(), c.dst.AsSlice()
		}
		list, network, body, proto = append(list, ip), ip, ip.Payload, ip.Protocol
	} else {
		ip := &layers.IPv6{}
		if ip.DecodeFromBytes(slices.Clone(b), &f) != nil {
			return nil, ""
		}
		if v != nil {
			ip.SrcIP, ip.DstIP = c.src.AsSlice(), c.dst.AsSlice()
		}
		list, network, body, proto = append(list, ip), ip, ip.Payload, ip.NextHeader
		kind = "IPv6"
	}
	switch {
	case proto == layers.IPProtocolTCP:
		tcp := &layers.TCP{}
		if tcp.DecodeFromBytes(body, &f) != nil {
			return nil, ""
		}
		if v != nil {
			tcp.SrcPort, tcp.DstPort = layers.TCPPort(c.srcPort), layers.TCPPort(c.dstPort)
		}
		if tcp.SetNetworkLayerForChecksum(network) != nil {
			return nil, ""
		}
		list = append(list, tcp, gopacket.Payload(tcp.Payload))
		kind += " TCP"
	case proto == layers.IPProtocolUDP:
		udp := &layers.UDP{}
		if udp.DecodeFromBytes(body, &f) != nil || udp.SetNetworkLayerForChecksum(network) != nil {
			return nil, ""
		}
		if v != nil {
			udp.SrcPort, udp.DstPort = layers.UDPPort(c.srcPort), layers.UDPPort(c.dstPort)
		}
		list = append(list, udp, gopacket.Payload(udp.Payload))
		kind += " UDP"
	case proto == layers.IPProtocolICMPv4 && kind == "IPv4":
		icmp := &layers.ICMPv4{}
		if icmp.DecodeFromBytes(body, &f) != nil {
			return nil, ""
		}
		if v != nil && v.IsICMPQuery() {
			icmp.Id = c.id
		}
		list = append(list, icmp, gopacket.Payload(icmp.Payload))
		kind += " ICMP"
	case proto == layers.IPProtocolICMPv6 && kind == "IPv6":
		icmp := &layers.ICMPv6{}
		if icmp.DecodeFromBytes(body, &f) != nil || icmp.SetNetworkLayerForChecksum(network) != nil {
			return nil, ""
		}
		data := slices.Clone(icmp.Payload)
		if v != nil && v.IsICMPQuery() {
			data[0], data[1] = byte(c.id>>8), byte(c.id)
		}
		list = append(list, icmp, gopacket.Payload(data))
		kind += " ICMP"
	case proto == 33, proto == layers.IPProtocolUDPLite: // these have a checksum that gopacket does not know
		return nil, ""
	default:
		list = append(list, gopacket.Payload(body))
		kind += " other"
	}
	buffer := gopacket.NewSerializeBuffer()
	if gopacket.SerializeLayers(buffer, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, list...) != nil {
		return nil, ""
	}
	return slices.Clone(buffer.Bytes()), kind
}

// Random packets pass through the engine. gopacket must find all checksums correct, and only
// addresses and ports of our side may have changed.
func TestTranslatedPacketsHaveChecksumsThatGopacketVerifies(t *testing.T) {
	prefix := netip.MustParsePrefix
	e := natengine.New(natengine.Config{})
	if err := e.SetPeers([]natengine.Peer{{
		ID: "b", RemotePods: []netip.Prefix{prefix("10.71.0.0/18"), prefix("fd71::/64")},
		Pods: []natengine.Remap{
			{From: prefix("10.244.0.0/20"), To: prefix("10.246.16.0/20")}, {From: prefix("fd44::/64"), To: prefix("fd46::/64")},
		},
		External: []netip.Prefix{prefix("10.247.0.0/24")}, MSS: 1300,
	}}); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(5, 5))
	verified := 0
	for range 60_000 {
		h := header(rng)
		outbound := rng.IntN(2) == 0
		ends := pick(rng, [2]string{"10.244.1.1", "10.71.0.5"}, [2]string{"192.168.1.1", "10.71.0.5"})
		if h.Src.Is6() {
			ends = pick(rng, [2]string{"fd44::5", "fd71::5"}, [2]string{"fd01::1", "fd71::5"})
		}
		if !outbound {
			ends = pick(rng, [2]string{"10.71.0.5", "10.246.17.1"}, [2]string{"10.71.0.5", "10.246.16.0"})
			if h.Src.Is6() {
				ends = [2]string{"fd71::5", "fd46::5"}
			}
		}
		h.Src, h.Dst = netip.MustParseAddr(ends[0]), netip.MustParseAddr(ends[1])
		in := packettest.Build(h, body(rng))
		before := read(in)
		if before.err != nil || len(before.strict) > 0 || checksums(in, before) != nil {
			continue
		}
		var v packet.View
		b := slices.Clone(in)
		if err := v.Parse(b, packet.ChecksumComplete); err != nil {
			t.Fatal(err)
		}
		process := e.Outbound
		if !outbound {
			process = e.Inbound
		}
		if process(&v, time.Second).Action != natengine.Forward {
			if !bytes.Equal(b, in) {
				t.Fatal("the packet was changed, although it is not forwarded")
			}
			continue
		}
		after := read(b)
		if err := checksums(b, after); err != nil {
			t.Fatalf("%v\n%s%s", err, hex.Dump(head(in)), hex.Dump(head(b)))
		}
		want, got := before.facts, after.facts
		if outbound {
			want.Src, want.SrcPort = got.Src, got.SrcPort
		} else {
			want.Dst, want.DstPort = got.Dst, got.DstPort
		}
		want.Query = got.Query
		if got != want || len(b) != len(in) {
			t.Fatalf("%+v\nbecame %+v", before.facts, got)
		}
		verified++
	}
	if verified < 20_000 {
		t.Errorf("only %d packets", verified)
	}
}

// checksums returns an error that names the first checksum that gopacket finds wrong. p may be
// incomplete, because checksums decodes the layers again.
func checksums(b []byte, p *theirs) error {
	check := func(name string, l interface {
		VerifyChecksum() (error, gopacket.ChecksumVerificationResult)
	}) error {
		err, result := l.VerifyChecksum()
		if err == nil && !result.Valid {
			err = fmt.Errorf("%s checksum %#04x, gopacket wants %#04x", name, result.Actual, result.Correct)
		}
		return err
	}
	var f feedback
	var network gopacket.NetworkLayer
	v4 := b[0]>>4 == 4
	if v4 {
		ip := &layers.IPv4{}
		if err := ip.DecodeFromBytes(b, &f); err != nil {
			return err
		}
		if err := check("IPv4", ip); err != nil {
			return err
		}
		network = ip
	} else {
		network = &layers.IPv6{SrcIP: p.Src.AsSlice(), DstIP: p.Dst.AsSlice()}
	}
	if p.Fragment {
		return nil
	}
	t := b[p.Transport:]
	switch proto := layers.IPProtocol(p.Proto); {
	case proto == layers.IPProtocolTCP:
		var l layers.TCP
		if err := l.DecodeFromBytes(t, &f); err != nil {
			return err
		}
		_ = l.SetNetworkLayerForChecksum(network)
		return check("TCP", &l)
	case proto == layers.IPProtocolUDP:
		var l layers.UDP
		if err := l.DecodeFromBytes(t, &f); err != nil {
			return err
		}
		_ = l.SetNetworkLayerForChecksum(network)
		return check("UDP", &l)
	case proto == layers.IPProtocolICMPv4 && v4:
		var l layers.ICMPv4
		if err := l.DecodeFromBytes(t, &f); err != nil {
			return err
		}
		return check("ICMP", &l)
	case proto == layers.IPProtocolICMPv6 && !v4:
		var l layers.ICMPv6
		if err := l.DecodeFromBytes(t, &f); err != nil {
			return err
		}
		_ = l.SetNetworkLayerForChecksum(network)
		return check("ICMPv6", &l)
	}
	return nil
}
