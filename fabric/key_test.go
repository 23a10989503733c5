package fabric

import (
	"crypto/ecdh"
	"encoding/base64"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// libraryAccepts reports whether the standard library accepts a key. The library refuses keys of
// low order.
func libraryAccepts(t *testing.T, key [32]byte) bool {
	t.Helper()
	private, err := ecdh.X25519().NewPrivateKey(slices.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	public, err := ecdh.X25519().NewPublicKey(key[:])
	if err != nil {
		t.Fatal(err)
	}
	_, err = private.ECDH(public)
	return err == nil
}

func TestWeakPublicKeysAreRefused(t *testing.T) {
	high := func(key [32]byte) [32]byte { key[31] |= 0x80; return key }
	prime := lowOrder[3]
	prime[0]++
	above := prime
	above[0]++
	for _, low := range slices.Concat(lowOrder, [][32]byte{{}, prime, above}) {
		for _, key := range [][32]byte{low, high(low)} {
			if libraryAccepts(t, key) {
				t.Errorf("%x is not of low order", key)
			}
			if checkPublicKey(key) == "" {
				t.Errorf("%x is taken", key)
			}
		}
	}
	for _, private := range []byte{1, 2, 77} {
		for _, key := range PublicKeys([32]byte{private}, MaxTunnels) {
			if wrong := checkPublicKey(key); wrong != "" {
				t.Errorf("%x %s", key, wrong)
			}
			if checkPublicKey(high(key)) == "" {
				t.Errorf("another way to write %x is taken", key)
			}
		}
	}
	// No accepted key is of low order, even near the bounds of the field.
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		key := slices.Concat(lowOrder, [][32]byte{prime, above, {}})[rng.IntN(7)]
		key[rng.IntN(32)] ^= 1 << rng.IntN(8)
		if checkPublicKey(key) == "" && !libraryAccepts(t, key) {
			t.Errorf("%x is taken", key)
		}
	}
}

func TestLowOrderKeysAreRefusedInEveryField(t *testing.T) {
	low := base64.StdEncoding.EncodeToString(lowOrder[1][:])
	for config, field := range map[string]string{v1alpha1.ConfigPublicKey: "spec.backend_config.publicKey", v1alpha1.ConfigTunnels: "spec.backend_config.tunnels"} {
		text := low
		if config == v1alpha1.ConfigTunnels {
			text = "5900:" + low
		}
		te := endpointB()
		te.Spec.BackendConfig[config] = text
		_, problems := PeerFrom(te, Origin{})
		nc := fromBravo()
		nc.Spec.BackendConfig[config] = text
		_, more := ClaimFrom(nc, Origin{})
		for _, found := range [][]Problem{problems, more} {
			if len(found) != 1 || found[0].Field != field || !strings.Contains(found[0].Message, "a point of low order") {
				t.Errorf("%s: %v", config, found)
			}
		}
	}
}
