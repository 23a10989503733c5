package gateway

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
)

func TestMTUFitsThePathToEachPeer(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	for _, tc := range []struct {
		name   string
		ways   []underlay
		last   int
		tunnel int
		peers  []int
	}{
		{"no peers", nil, 0, 1440, nil},
		{"one peer", []underlay{{addr: v4, mtu: 1500}}, 0, 1440, []int{1440}},
		{"one peer over IPv6", []underlay{{addr: v6, mtu: 1500, ipv6: true}}, 0, 1420, []int{1420}},
		{"a smaller MTU is rounded down to a multiple of 16", []underlay{{addr: v4, mtu: 1500}, {addr: v6, mtu: 1500}}, 0, 1440, []int{1440, 1408}},
		{"the largest MTU is not rounded", []underlay{{addr: v4, mtu: 1400}, {addr: v4, mtu: 1300}, {addr: v4, mtu: 1400}}, 0, 1340, []int{1340, 1232, 1340}},
		{"jumbo frames", []underlay{{addr: v4, mtu: 9001}, {addr: v4, mtu: 1500}}, 0, 8940, []int{8940, 1440}},
		{"loopback", []underlay{{addr: v4, mtu: 65536}}, 0, 8940, []int{8940}},
		{"small path MTU", []underlay{{addr: v4, mtu: 1280}}, 0, 1220, []int{1220}},
		{"small path MTU with IPv6 inside", []underlay{{addr: v4, mtu: 1280, ipv6: true}}, 0, 1280, []int{1280}},
		{"small path MTU beside a large one", []underlay{{addr: v4, mtu: 1280, ipv6: true}, {addr: v4, mtu: 1500}}, 0, 1440, []int{1280, 1440}},
		{"path MTU below the minimum", []underlay{{addr: v4, mtu: 400}, {addr: v4, mtu: 1500}}, 0, 1440, []int{1200, 1440}},
		{"one path was never known", []underlay{{addr: v4, mtu: 9001}, {}}, 0, 8940, []int{8940, 1440}},
		{"no path was ever known", []underlay{{}, {}}, 0, 1440, []int{1440, 1440}},
		{"one path is no longer known", []underlay{{addr: v4, mtu: 1500}, {last: 1328}}, 1440, 1440, []int{1440, 1328}},
		{"no path is known any longer", []underlay{{last: 8940}, {last: 1440}}, 8940, 8940, []int{8940, 1440}},
		{"all peers removed", nil, 8940, 8940, nil},
	} {
		if tunnel, each := autoMTUs(tc.ways, tc.last); tunnel != tc.tunnel || !slices.Equal(each, tc.peers) {
			t.Errorf("%s: %d %v, want %d %v", tc.name, tunnel, each, tc.tunnel, tc.peers)
		}
	}
	if mssFor(1440) != 1400 {
		t.Error(mssFor(1440))
	}
}

// The padded packet in a WireGuard message never exceeds the MTU of the path to its peer,
// regardless of the MTUs of other peers.
func TestPaddedPacketsFitThePath(t *testing.T) {
	v4 := netip.MustParseAddr("192.0.2.1")
	for mtu := minAutoMTU + overhead4; mtu <= 1600; mtu++ {
		tunnel, each := autoMTUs([]underlay{{addr: v4, mtu: mtu}, {addr: v4, mtu: 1500}}, 0)
		for i, way := range []int{mtu, 1500} {
			for size := each[i] - padding; size <= each[i]; size++ {
				padded := min((size+padding-1)/padding*padding, tunnel) // calculatePaddingSize in wireguard-go's device/send.go
				if padded+overhead4 > way {
					t.Fatalf("ways of %d and 1500: a packet of %d for peer %d takes %d", mtu, size, i, padded+overhead4)
				}
			}
		}
	}
}

func TestMTUBelowTheIPv6MinimumIsRefusedWithIPv6(t *testing.T) {
	peer := func(prefix string) []*fabric.GatewayPeer {
		p := netip.MustParsePrefix(prefix)
		return []*fabric.GatewayPeer{{ID: "b", AllowedIPs: [2]netip.Prefix{p, p}, Origin: fabric.Origin{Kind: "TunnelEndpoint", Name: "b"}}}
	}
	for _, tc := range []struct {
		mtu    int
		prefix string
		want   string
	}{
		{0, "fd00::/48", ""}, {1280, "fd00::/48", ""}, {576, "10.0.0.0/8", ""},
		{1279, "fd00::/48", "mtu: is 1279; want at least 1280, because the networks of cluster b are IPv6 (TunnelEndpoint b)"},
	} {
		got := ""
		if err := checkMTU(tc.mtu, peer(tc.prefix)); err != nil {
			got = err.Error()
		}
		if got != tc.want {
			t.Errorf("%d, %s: %q, want %q", tc.mtu, tc.prefix, got, tc.want)
		}
	}
}
