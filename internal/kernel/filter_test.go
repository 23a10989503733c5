package kernel

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestAroundListsEveryBlockThatOverlapsARemoteNetwork(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var all []netip.Prefix
		for range rng.IntN(8) {
			var b [16]byte
			b[0], b[1] = byte(rng.IntN(8))<<5, byte(rng.IntN(4))<<6 // few values, so that some networks are adjacent or overlap
			addr := netip.AddrFrom4([4]byte(b[:4]))
			if rng.IntN(4) == 0 {
				addr = netip.AddrFrom16(b)
			}
			all = append(all, netip.PrefixFrom(addr, rng.IntN(33))) // not masked: the address has host bits
		}
		var want []string
		for i := range 1 << 16 {
			p := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(i >> 8), byte(i)}), 16)
			if slices.ContainsFunc(all, p.Overlaps) {
				want = append(want, p.Addr().String())
			}
		}
		if got := RemoteOf(all).Around; got != strings.Join(want, " ") {
			t.Fatalf("%v: %.300s; want %.300s", all, got, want)
		}
	}
}
