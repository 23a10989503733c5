package natengine

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// benchPeers6 returns n peers that all have the same IPv6 PodCIDR; see benchPeers.
func benchPeers6(n int) []Peer {
	var peers []Peer
	for i := range n {
		remote := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, byte(i >> 8), byte(i)}), 56)
		external := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x11, byte(i >> 8), byte(i)}), 112)
		peers = append(peers, Peer{
			ID:         fmt.Sprintf("peer-%03d", i),
			RemotePods: []netip.Prefix{remote}, RemoteExternal: []netip.Prefix{external},
			Pods:      []Remap{{pfx("fd00:10:244::/56"), pfx("fd00:10:246::/56")}},
			External:  []netip.Prefix{pfx("fd00:10:247::/112")},
			Endpoints: []Endpoint{{ip("100::a9fe:1"), ip("fd00:10:247::1")}},
			MSS:       1340,
		})
	}
	return peers
}

// BenchmarkPrefixMap6 is BenchmarkPrefixMap over IPv6.
func BenchmarkPrefixMap6(b *testing.B) {
	benchPrefixMap(b, benchPeers6, ip("fd00:10:244::3:4"), ip("fd00:10:246::3:4"), func(peer, _ int) netip.Addr {
		return netip.AddrFrom16([16]byte{0xfd, 0, 0, 0x10, byte(peer >> 8), byte(peer), 15: 9})
	})
}

// BenchmarkNAPTHit6 measures a packet of a known IPv6 flow. There are few flows, so no lookup
// waits for memory.
func BenchmarkNAPTHit6(b *testing.B) {
	e := benchEngine(b, Config{}, benchPeers6(1))
	there := packettest.Build(packettest.IP{Src: ip("fd01::1"), Dst: ip("fd00:10::9")}, packettest.UDP{SrcPort: 4000, DstPort: 53})
	back := packettest.Build(packettest.IP{Src: ip("fd00:10::9"), Dst: ip("fd00:10:246::")}, packettest.UDP{SrcPort: 53, DstPort: 4000})
	var v packet.View
	for dir, pkt := range [directions][]byte{there, back} {
		parse(b, &v, pkt)
		src, dst := v.Src(), v.Dst()
		b.Run(Direction(dir).String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if Direction(dir) == Outbound {
					v.SetSrc(src)
					e.Outbound(&v, 0)
				} else {
					v.SetDst(dst)
					e.Inbound(&v, 0)
				}
			}
		})
	}
}
