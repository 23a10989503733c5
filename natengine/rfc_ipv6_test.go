package natengine_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// The RFCs are about IPv4, but NAPT66 must fulfil the same requirements.
func TestNATRequirementsHoldForIPv6(t *testing.T) {
	const host1, host2, nat = "[fd00:9::1]", "[fd00:9::2]", "[fd00:61::]"
	const pod, other = "[fd00:71::5]", "[fd00:71:0:ff::6]"
	bare := func(a string) string { return a[1 : len(a)-1] }
	dest := func(p packettest.Packet) string { return netip.AddrPortFrom(p.Dst, p.DstPort).String() }

	t.Run("RFC 4787, REQ-1, 2, 3, 8: mapping and filtering", func(t *testing.T) {
		b := newBox(t, natengine.Config{})
		want(t, source(b.out(datagram(host1+":4000", pod+":53"))), nat+":4000")
		seen := source(b.out(datagram(host2+":4000", pod+":53")))
		if seen == nat+":4000" {
			t.Error("a port is overloaded")
		}
		want(t, source(b.out(datagram(host2+":4000", other+":54"))), seen)
		want(t, dest(b.in(datagram(other+":54", seen))), host2+":4000")
		b.refuse(natengine.Inbound, datagram(other+":53", seen), natengine.DropNoFlow)
	})
	t.Run("RFC 4787, REQ-5c", func(t *testing.T) {
		checkLasts(t, natengine.Config{}, 5*time.Minute, func(b *box) []byte {
			return datagram(pod+":53", source(b.out(datagram(host1+":4000", pod+":53"))))
		})
	})
	t.Run("RFC 5382, REQ-5", func(t *testing.T) {
		checkLasts(t, natengine.Config{}, established, func(b *box) []byte {
			return segment(pod+":80", b.connect(host1+":4000", pod+":80"), ack)
		})
	})
	t.Run("RFC 5508, REQ-1 and 2", func(t *testing.T) {
		checkLasts(t, natengine.Config{}, time.Minute, func(b *box) []byte {
			b.out(ping(bare(host2), bare(pod), 7))
			return pong(bare(pod), bare(nat), b.out(ping(bare(host1), bare(pod), 7)).ICMPID)
		})
	})
	t.Run("RFC 5508, REQ-4: every error", func(t *testing.T) {
		b := newBox(t, natengine.Config{})
		b.out(datagram(host2+":4000", pod+":53"))
		seen := source(b.out(datagram(host1+":4000", pod+":53")))
		for kind := uint8(1); kind <= 4; kind++ {
			for code := range uint8(8) {
				p := b.in(about(bare(other), bare(nat), kind, code, datagram(seen, pod+":53")))
				q, err := packettest.DecodeQuote(p.Data)
				if err != nil || p.Type != kind || p.Code != code {
					t.Fatalf("type %d, code %d: %d, %d, %v", kind, code, p.Type, p.Code, err)
				}
				want(t, source(q), host1+":4000")
				want(t, p.Dst.String(), bare(host1))
			}
		}
	})
	t.Run("RFC 4787, REQ-9: hairpin", func(t *testing.T) {
		b := newBox(t, natengine.Config{})
		b.refuse(natengine.Outbound, datagram("[fd00:a::1]:9", "[fd00:61::2]:80"), natengine.DropNoPeer)
	})
	t.Run("RFC 4787, REQ-14: fragments", func(t *testing.T) {
		b := newBox(t, natengine.Config{})
		b.out(datagram(host2+":4000", pod+":53"))
		whole := datagram(host1+":4000", pod+":53", make([]byte, 3000)...)
		f := packettest.Fragments(whole, 1000, 5)
		src, transport := b.outFragments([][]byte{f[2], f[0], f[3], f[1]})
		p := b.out(whole)
		if src != p.Src || string(transport) != string(p.Transport) {
			t.Error("the fragments form another datagram than the whole packet")
		}
	})
}
