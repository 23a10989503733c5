package kubetest

import (
	"math/rand/v2"
	"net/netip"
)

// Address returns a loopback address of this host, with a port. Another process practically never
// has the same: the address is one of 2^24, and the kernel assigns no port below its range for
// clients. By contrast, another process could take a port that is free now before the test uses it.
func Address(port uint16) string {
	n := rand.Uint32()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), port).String()
}
