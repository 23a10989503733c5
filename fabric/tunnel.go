package fabric

import (
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// MaxTunnels is the maximum number of tunnels between two gateways.
const MaxTunnels = 16

// A TunnelEnd is one end of one of several tunnels between the same two gateways. Each tunnel has
// its own key and UDP port, and therefore its own sessions, goroutines and socket at both ends, so
// that several cores share the work.
//
// Liqo has only tunnel 0. Tunnel i of one side connects to tunnel i of the other side, so the side
// with fewer tunnels determines how many are used.
type TunnelEnd struct {
	PublicKey [32]byte // WireGuard, never all zero
	Port      uint16   // UDP, never 0
}

// TunnelKey returns the WireGuard private key of tunnel i of a gateway. private is the gateway's
// key and the key of tunnel 0. The other keys are derived from it (HKDF with SHA-256, RFC 5869), so
// that only one secret must be stored, shared between replicas and rotated.
func TunnelKey(private [32]byte, i int) [32]byte {
	if i == 0 {
		return private
	}
	b, err := hkdf.Key(sha256.New, private[:], nil, fmt.Sprintf("isthmus tunnel %d", i), len(private))
	if err != nil {
		panic(err) // impossible: fails only for keys longer than 255 hashes
	}
	key := [32]byte(b)
	key[0] &= 248 // RFC 7748, section 5
	key[31] = key[31]&127 | 64
	return key
}

// PublicKeys returns the WireGuard public keys of the first n tunnels of the gateway with the given
// private key.
func PublicKeys(private [32]byte, n int) [][32]byte {
	keys := make([][32]byte, n)
	for i := range keys {
		key := TunnelKey(private, i)
		k, err := ecdh.X25519().NewPrivateKey(key[:])
		if err != nil {
			panic(err) // impossible: fails only for keys of another length
		}
		keys[i] = [32]byte(k.PublicKey().Bytes())
	}
	return keys
}

// FormatTunnels formats the additional tunnels of a gateway for the key v1alpha1.ConfigTunnels. It
// returns "" if there are none; the caller then omits the key.
func FormatTunnels(further []TunnelEnd) string {
	entries := make([]string, len(further))
	for i, t := range further {
		entries[i] = strconv.Itoa(int(t.Port)) + ":" + base64.StdEncoding.EncodeToString(t.PublicKey[:])
	}
	return strings.Join(entries, ",")
}

// ParseTunnels accepts exactly the output of FormatTunnels, so that each list has only one
// spelling. It does not look for conflicts between tunnels, because the list omits tunnel 0;
// report.tunnels does. The error names the invalid tunnel.
func ParseTunnels(s string) ([]TunnelEnd, error) {
	const want = "want PORT:PUBLICKEY, separated by commas"
	if s == "" {
		return nil, errors.New("is empty; " + want + ", or remove the field")
	}
	if n := strings.Count(s, ",") + 1; n >= MaxTunnels { // checked before memory for the list is allocated
		return nil, tooManyTunnels(n)
	}
	var further []TunnelEnd
	for entry := range strings.SplitSeq(s, ",") {
		i := len(further) + 1
		portText, keyText, found := strings.Cut(entry, ":")
		if !found {
			return nil, fmt.Errorf("tunnel %d is %s; "+want, i, quote(entry))
		}
		port, ok := parsePort(portText)
		if !ok {
			return nil, fmt.Errorf("tunnel %d has port %s; want a UDP port from 1 to 65535", i, quote(portText))
		}
		key, err := ParseKey(keyText)
		if err != nil {
			return nil, fmt.Errorf("tunnel %d has a key that %w", i, err)
		}
		further = append(further, TunnelEnd{key, port})
	}
	return further, nil
}

func tooManyTunnels(n int) error {
	return fmt.Errorf("has %d tunnels besides the first; want at most %d", n, MaxTunnels-1)
}

func parsePort(s string) (uint16, bool) {
	port, err := strconv.ParseUint(s, 10, 16)
	return uint16(port), err == nil && port != 0 && strconv.FormatUint(port, 10) == s
}

const tunnelsField = "spec.backend_config." + v1alpha1.ConfigTunnels

// allTunnels returns all tunnels of a gateway in order, starting with tunnel 0.
func allTunnels(key [32]byte, port uint16, further []TunnelEnd) []TunnelEnd {
	return append([]TunnelEnd{{key, port}}, further...)
}

// tunnels checks the additional tunnels of a gateway. The key and the port of a tunnel must differ
// from those of all other tunnels, including tunnel 0, because each tunnel needs its own sessions
// and its own socket.
func (r *report) tunnels(at place, key [32]byte, port uint16, further []TunnelEnd) {
	if len(further) >= MaxTunnels {
		r.addAt(at, "%v", tooManyTunnels(len(further)))
		return
	}
	all := allTunnels(key, port, further)
	for i, t := range all {
		if i == 0 {
			continue
		}
		if t.Port == 0 {
			r.addAt(at, "tunnel %d has port 0; want a UDP port from 1 to 65535", i)
		}
		if wrong := checkPublicKey(t.PublicKey); wrong != "" {
			r.addAt(at, "tunnel %d has a key that %s", i, wrong)
		}
		for j, other := range all[:i] {
			if t.Port == other.Port && t.Port != 0 {
				r.addAt(at, "tunnel %d has port %d, which tunnel %d has; want a different port for each tunnel", i, t.Port, j)
			}
			if t.PublicKey == other.PublicKey && t.PublicKey != ([32]byte{}) {
				r.addAt(at, "tunnel %d has the public key of tunnel %d; want a different key for each tunnel", i, j)
			}
		}
	}
}
