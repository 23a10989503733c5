package kubetest

import (
	"math/rand/v2"
	"net/netip"
)

// Address returns a loopback address of this host with a port. A collision is practically
// impossible: the port is below those that the kernel assigns, and the address is one of 2^24. In
// contrast, a port that is currently free could be taken before the test uses it.
func Address(port uint16) string {
	n := rand.Uint32()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), port).String()
}
