package kubetest

import (
	"math/rand/v2"
	"net/netip"
)

// Address is one of this host with a port, below those that the kernel gives away, on which nobody
// listens and to which nobody else comes: one of 2^24 loopback addresses. A port that is free now
// may be taken before the test has it.
func Address(port uint16) string {
	n := rand.Uint32()
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, byte(n >> 16), byte(n >> 8), byte(n)}), port).String()
}
