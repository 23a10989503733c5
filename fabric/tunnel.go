package fabric

import (
	"crypto/hkdf"
	"crypto/sha256"
	"fmt"
)

// MaxTunnels is the most tunnels that join two gateways.
const MaxTunnels = 16

// A TunnelEnd is one end of one of several tunnels between the same two gateways. Each has a key and a UDP port of its own, so
// that it has sessions, goroutines and sockets of its own at both ends, and with them cores.
//
// The first tunnel of a gateway is the one that Liqo knows. The others follow in the order of its list, and the i-th of one
// side is joined with the i-th of the other: a side that has fewer, or knows nothing of it, gets as many as it has.
type TunnelEnd struct {
	PublicKey [32]byte // WireGuard, never all zero
	Port      uint16   // UDP, never 0
}

// TunnelKey is the WireGuard private key of tunnel i of the gateway with the given private key, which is that of tunnel 0.
// The others are derived from it (HKDF with SHA-256, RFC 5869), so that there is still one secret to keep, to share between
// replicas and to replace.
func TunnelKey(private [32]byte, i int) [32]byte {
	if i == 0 {
		return private
	}
	b, err := hkdf.Key(sha256.New, private[:], nil, fmt.Sprintf("isthmus tunnel %d", i), len(private))
	if err != nil {
		panic(err) // longer than 255 hashes, which the type excludes
	}
	key := [32]byte(b)
	key[0] &= 248 // RFC 7748, section 5
	key[31] = key[31]&127 | 64
	return key
}
