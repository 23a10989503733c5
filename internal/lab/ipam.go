package lab

import (
	"fmt"
	"net/netip"
)

// pools are the networks from which Liqo's IPAM allocates, in its order.
var pools = []netip.Prefix{
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
}

// reservedNetworks returns the networks that a cluster never allocates for a peer.
func reservedNetworks(own ...netip.Prefix) []netip.Prefix {
	return append([]netip.Prefix{serviceNetwork, underlayNetwork, onPremNetwork}, own...)
}

// remap chooses the network that a cluster uses for a peer's network, as Liqo v0.9.4 does. It is
// the peer's own network if that overlaps no other, and otherwise the network that allocate finds.
func remap(taken []netip.Prefix, network netip.Prefix) (netip.Prefix, error) {
	if !overlapsAny(network, taken) {
		return network, nil
	}
	return allocate(taken, network.Bits())
}

// allocate finds a free network of the given length as Liqo's allocator does. It searches the pools
// in order. In the first pool with enough room, it uses the smallest sufficient free block. If
// there are several, it uses the one with the lowest address.
func allocate(taken []netip.Prefix, length int) (netip.Prefix, error) {
	for _, pool := range pools {
		if best := smallestFree(pool, taken, length); best.IsValid() {
			return netip.PrefixFrom(best.Addr(), length), nil
		}
	}
	return netip.Prefix{}, fmt.Errorf("no free /%d in %v", length, pools)
}

// smallestFree returns the smallest free block inside block that has room for a network of the
// given length.
func smallestFree(block netip.Prefix, taken []netip.Prefix, length int) netip.Prefix {
	if block.Bits() > length {
		return netip.Prefix{}
	}
	if !overlapsAny(block, taken) {
		return block
	}
	half := netip.PrefixFrom(block.Addr(), block.Bits()+1)
	if half.Bits() > 32 {
		return netip.Prefix{}
	}
	low := smallestFree(half, taken, length)
	high := smallestFree(netip.PrefixFrom(offset(block.Addr(), 1<<(32-half.Bits())), half.Bits()), taken, length)
	if !low.IsValid() || high.IsValid() && high.Bits() > low.Bits() {
		return high
	}
	return low
}

func overlapsAny(p netip.Prefix, others []netip.Prefix) bool {
	for _, o := range others {
		if p.Overlaps(o) {
			return true
		}
	}
	return false
}
