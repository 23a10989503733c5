package fabric

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
)

// ParseKey reads a WireGuard key as wg(8) prints it: 32 bytes in standard base64, 44 characters.
// The error does not repeat the text, which may be secret.
func ParseKey(s string) (key [32]byte, err error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(s)
	switch {
	case err != nil || strings.ContainsAny(s, "\r\n"): // the decoder would skip line ends
		return key, fmt.Errorf("is not base64; want 32 bytes in 44 base64 characters")
	case len(raw) != len(key):
		return key, fmt.Errorf("has %d bytes; want 32 bytes in 44 base64 characters", len(raw))
	}
	if key = [32]byte(raw); key == ([32]byte{}) {
		return key, fmt.Errorf("is all zero; want a key")
	}
	return key, nil
}

// checkPublicKey returns the reason why a WireGuard public key is invalid, or "". The result of a
// key exchange with a key of low order is public (RFC 7748, section 6.1). A value that is not below
// the field's prime is a second encoding of another key. No key generator makes such a value. If it
// were valid, two peers could use the same key.
func checkPublicKey(key [32]byte) string {
	switch {
	case key == [32]byte{}:
		return "is all zero; want a WireGuard public key"
	case !canonical(key):
		return "is not an X25519 public key, because it is 2^255-19 or more; want the output of wg pubkey"
	case slices.Contains(lowOrder, key):
		return "is a point of low order, so it keeps nothing secret; want the output of wg pubkey"
	}
	return ""
}

// canonical reports whether a key is below 2^255-19, the field's prime. The bytes are in
// little-endian order.
func canonical(key [32]byte) bool {
	prime := bytes.Repeat([]byte{0xff}, len(key))
	prime[0], prime[31] = 0xed, 0x7f
	slices.Reverse(prime)
	slices.Reverse(key[:])
	return bytes.Compare(key[:], prime) < 0
}

// lowOrder holds the points of low order of Curve25519 and its twist, except zero, as canonical
// u-coordinates: 1, the two points of order 8, and -1.
var lowOrder = [][32]byte{
	{1},
	{0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a,
		0xda, 0x09, 0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00},
	{0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef, 0x5b,
		0x04, 0x44, 0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f, 0x11, 0x57},
	{0xec, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff,
		0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f},
}
