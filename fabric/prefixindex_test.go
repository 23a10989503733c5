package fabric

import (
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestAPrefixIndexEqualsALinearSearch(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	addr := func() netip.Addr {
		if rng.IntN(4) == 0 {
			return netip.AddrFrom16([16]byte{0xfd, 15: byte(rng.IntN(8))})
		}
		return netip.AddrFrom4([4]byte{10, 0, byte(rng.IntN(2)), byte(rng.IntN(8))})
	}
	for range 5000 {
		list := make([]netip.Prefix, rng.IntN(6))
		for i := range list {
			a := addr()
			list[i] = netip.PrefixFrom(a, a.BitLen()-rng.IntN(11))
		}
		x, a, odd := newPrefixIndex(list), addr(), func(i int) bool { return i%2 == 1 }
		want := map[bool]bool{}
		for i, p := range list {
			if p.Contains(a) {
				want[false] = true
				want[true] = want[true] || odd(i)
			}
		}
		all, some := x.find(a, nil), x.find(a, odd)
		if (all >= 0) != want[false] || (some >= 0) != want[true] {
			t.Fatalf("%v in %v: found %d and, odd, %d; want %v", a, list, all, some, want)
		}
		for _, i := range []int{all, some} {
			if i >= 0 && !list[i].Contains(a) {
				t.Fatalf("%v in %v: %d", a, list, i)
			}
		}
		for i, p := range list { // find the widest network that contains the address
			if all >= 0 && p.Contains(a) && p.Bits() < list[all].Bits() {
				t.Fatalf("%v in %v: %d, though %d is wider", a, list, all, i)
			}
		}
	}
}
