package packet_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestVirtioHeaderMatchesAGoldenHeader(t *testing.T) {
	b := unhex(t, `
		01      # NEEDS_CSUM
		81      # TCPv4 with ECN
		42 00   # hdr_len 66
		50 05   # gso_size 1360
		22 00   # csum_start 34
		10 00   # csum_offset 16
	`)
	want := packet.VirtioHeader{Flags: 1, GSOType: 0x81, HdrLen: 66, GSOSize: 1360, CsumStart: 34, CsumOffset: 16}
	var h packet.VirtioHeader
	if err := h.Decode(append(b, "packet"...)); err != nil || h != want {
		t.Errorf("%v %+v", err, h)
	}
	out := bytes.Repeat([]byte{0xee}, 12)
	h.Encode(out)
	if !bytes.Equal(out, append(b, 0xee, 0xee)) {
		t.Errorf("% x", out)
	}
	if err := h.Decode(b[:9]); !errors.Is(err, packet.ErrVirtioHeader) {
		t.Errorf("nine octets: %v", err)
	}
	if h.ChecksumState() != packet.ChecksumPartial || (packet.VirtioHeader{Flags: 2}).ChecksumState() != packet.ChecksumComplete {
		t.Error("checksum state")
	}
}

func TestVirtioValidateChecksEveryField(t *testing.T) {
	const needs = packet.VirtioNeedsCsum
	tcp := func(h packettest.IP, flags uint8, data int) []byte {
		return packettest.Partial(packettest.Build(h, packettest.TCP{SrcPort: 1, DstPort: 2, Flags: flags, Options: timestamps, Data: make([]byte, data)}))
	}
	udp := func(h packettest.IP, data int) []byte {
		return packettest.Partial(packettest.Build(h, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, data)}))
	}
	complete := packettest.Build(ip4(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 3000)})
	surplus := udp(ip4(), 3000)
	surplus[24], surplus[25] = 0, 100
	for _, c := range []struct {
		name string
		h    packet.VirtioHeader
		b    []byte
		size int
		err  error
	}{
		{"zero header", packet.VirtioHeader{}, complete, 0, nil},
		{"checksum verified", packet.VirtioHeader{Flags: packet.VirtioDataValid}, complete, 0, nil},
		{"gso_size without a type is ignored", packet.VirtioHeader{GSOSize: 9}, complete, 0, nil},
		{"partial TCP", packet.VirtioHeader{Flags: needs, CsumStart: 20, CsumOffset: 16}, tcp(ip4(), packettest.SYN, 0), 0, nil},
		{"partial UDP over IPv6", packet.VirtioHeader{Flags: needs, CsumStart: 40, CsumOffset: 6}, udp(ip6(), 10), 0, nil},
		{"TCPv4 superpacket", packet.VirtioHeader{needs, 1, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 1000, nil},
		{"hdr_len is ignored", packet.VirtioHeader{needs, 1, 60000, 1000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 1000, nil},
		{"ECN bit", packet.VirtioHeader{needs, 0x81, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK|packettest.CWR, 3000), 1000, nil},
		{"TCPv6 superpacket", packet.VirtioHeader{needs, 4, 72, 1, 40, 16}, tcp(ip6(), packettest.ACK, 3000), 1, nil},
		{"UDP superpacket", packet.VirtioHeader{needs, 5, 28, 1400, 20, 6}, udp(ip4(), 3000), 1400, nil},
		{"UDP superpacket over IPv6", packet.VirtioHeader{needs, 5, 48, 1400, 40, 6}, udp(ip6(), 3000), 1400, nil},
		{"data that fits one segment", packet.VirtioHeader{needs, 1, 52, 3000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 0, nil},
		{"no data", packet.VirtioHeader{needs, 1, 52, 3000, 20, 16}, tcp(ip4(), packettest.ACK, 0), 0, nil},

		{"unknown flag", packet.VirtioHeader{Flags: 4}, complete, 0, packet.ErrVirtioHeader},
		{"csum_start not at the transport header", packet.VirtioHeader{Flags: needs, CsumStart: 24, CsumOffset: 16}, tcp(ip4(), packettest.SYN, 0), 0, packet.ErrVirtioHeader},
		{"csum_offset of UDP for TCP", packet.VirtioHeader{Flags: needs, CsumStart: 20, CsumOffset: 6}, tcp(ip4(), packettest.SYN, 0), 0, packet.ErrVirtioHeader},
		{"wrong offsets with the correct sum", packet.VirtioHeader{Flags: needs, CsumStart: 30, CsumOffset: 6}, tcp(ip4(), packettest.SYN, 0), 0, packet.ErrVirtioHeader},
		{"offset that wraps", packet.VirtioHeader{Flags: needs, CsumStart: 20, CsumOffset: 0xfff0}, tcp(ip4(), packettest.SYN, 0), 0, packet.ErrVirtioHeader},
		{"ECN alone", packet.VirtioHeader{needs, 0x80, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 0, packet.ErrVirtioHeader},
		{"UDP with ECN", packet.VirtioHeader{needs, 0x85, 28, 1400, 20, 6}, udp(ip4(), 3000), 0, packet.ErrVirtioHeader},
		{"UFO", packet.VirtioHeader{needs, 3, 28, 1400, 20, 6}, udp(ip4(), 3000), 0, packet.ErrVirtioHeader},
		{"unknown type", packet.VirtioHeader{needs, 6, 28, 1400, 20, 6}, udp(ip4(), 3000), 0, packet.ErrVirtioHeader},
		{"TCPv6 for IPv4", packet.VirtioHeader{needs, 4, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 0, packet.ErrVirtioHeader},
		{"TCPv4 for IPv6", packet.VirtioHeader{needs, 1, 72, 1000, 40, 16}, tcp(ip6(), packettest.ACK, 3000), 0, packet.ErrVirtioHeader},
		{"TCP for UDP", packet.VirtioHeader{needs, 1, 28, 1000, 20, 6}, udp(ip4(), 3000), 0, packet.ErrVirtioHeader},
		{"UDP for TCP", packet.VirtioHeader{needs, 5, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 0, packet.ErrVirtioHeader},
		{"gso_size 0", packet.VirtioHeader{needs, 1, 52, 0, 20, 16}, tcp(ip4(), packettest.ACK, 3000), 0, packet.ErrVirtioHeader},
		{"complete superpacket", packet.VirtioHeader{0, 1, 40, 1000, 20, 16}, complete, 0, packet.ErrVirtioHeader},
		{"SYN superpacket", packet.VirtioHeader{needs, 1, 52, 1000, 20, 16}, tcp(ip4(), packettest.SYN, 3000), 0, packet.ErrGSO},
		{"RST superpacket", packet.VirtioHeader{needs, 1, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK|packettest.RST, 3000), 0, packet.ErrGSO},
		{"URG superpacket", packet.VirtioHeader{needs, 1, 52, 1000, 20, 16}, tcp(ip4(), packettest.ACK|packettest.URG, 3000), 0, packet.ErrGSO},
		{"UDP superpacket with a surplus area", packet.VirtioHeader{needs, 5, 28, 1000, 20, 6}, surplus, 0, packet.ErrGSO},
	} {
		v := parse(t, c.b, c.h.ChecksumState())
		if size, err := c.h.Validate(v); size != c.size || !errors.Is(err, c.err) {
			t.Errorf("%s: %d %v, want %d %v", c.name, size, err, c.size, c.err)
		}
	}
	v := parse(t, complete, packet.ChecksumComplete)
	if _, err := (packet.VirtioHeader{Flags: needs, CsumStart: 20, CsumOffset: 16}).Validate(v); !errors.Is(err, packet.ErrVirtioHeader) {
		t.Errorf("view parsed as complete: %v", err)
	}
}

func TestFinishInnerRefusesPacketsWithoutAnInnerPartialChecksum(t *testing.T) {
	const needs = packet.VirtioNeedsCsum
	ipip := packettest.Build(ip4(), packettest.Raw{Proto: 4, Data: make([]byte, 40)})
	udp := packettest.Build(ip4(), packettest.UDP{SrcPort: 5, DstPort: 4789, Data: make([]byte, 80)})
	tcp := packettest.Build(ip4(), packettest.TCP{Flags: packettest.ACK, Data: make([]byte, 80)})
	inner := packet.VirtioHeader{Flags: needs, CsumStart: 70, CsumOffset: 16}
	for _, c := range []struct {
		name string
		h    packet.VirtioHeader
		b    []byte
	}{
		{"no checksum requested", packet.VirtioHeader{CsumStart: 40, CsumOffset: 16}, ipip},
		{"unknown flag", packet.VirtioHeader{Flags: needs | 4, CsumStart: 40, CsumOffset: 16}, ipip},
		{"superpacket", packet.VirtioHeader{Flags: needs, GSOType: packet.GSOTCPv4, CsumStart: 40, CsumOffset: 16}, ipip},
		{"in the IP header", packet.VirtioHeader{Flags: needs, CsumStart: 10}, ipip},
		{"beyond the end", packet.VirtioHeader{Flags: needs, CsumStart: 40, CsumOffset: 19}, ipip},
		{"far beyond the end", packet.VirtioHeader{Flags: needs, CsumStart: 0xffff, CsumOffset: 0xffff}, ipip},
		{"in the UDP header", packet.VirtioHeader{Flags: needs, CsumStart: 24, CsumOffset: 6}, udp},
		{"TCP", inner, tcp},
		{"fragment", inner, packettest.Fragments(udp, 80, 7)[0]},
		{"not a packet", inner, udp[:90]},
	} {
		before := bytes.Clone(c.b)
		if err := c.h.FinishInner(c.b); !errors.Is(err, packet.ErrVirtioHeader) || !bytes.Equal(c.b, before) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if err := inner.FinishInner(udp); err != nil {
		t.Errorf("behind the UDP header: %v", err)
	}
}
