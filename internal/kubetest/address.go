package kubetest

import (
	"math/rand/v2"
	"net/netip"
)

// Address returns a loopback address of this host, with the given port. The port must be below
// those that the kernel assigns. A collision is practically impossible, because the address is one
// of 2^24. By contrast, another process could take a port that is free now before the test uses it.
func Address(port uint16) string {
	n := rand.Uint32()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), port).String()
}
