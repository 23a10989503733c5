package keyring_test

import (
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
)

func TestOnlyTheHolderOfAPrivateKeyCanProveIt(t *testing.T) {
	private, peer, other := keyring.New(), keyring.New(), keyring.New()
	keys, peerKey := fabric.PublicKeys(private, 3), fabric.PublicKeys(peer, 1)[0]
	text := keyring.Prove(private, 3, "a", "b", peerKey)
	if !keyring.Proves(text, peer, "b", "a", keys) {
		t.Fatal("the proof is not believed")
	}
	if text != keyring.Prove(private, 3, "a", "b", peerKey) {
		t.Error("a proof changes, and with it the object")
	}
	for name, accepted := range map[string]bool{
		"of another cluster":               keyring.Proves(text, peer, "b", "c", keys),
		"for another cluster":              keyring.Proves(text, peer, "c", "a", keys),
		"the sender's own, sent back":      keyring.Proves(text, private, "a", "b", fabric.PublicKeys(peer, 3)),
		"of one key less":                  keyring.Proves(text, peer, "b", "a", keys[:2]),
		"of none":                          keyring.Proves(text, peer, "b", "a", nil),
		"of a key in another place":        keyring.Proves(text, peer, "b", "a", [][32]byte{keys[1], keys[0], keys[2]}),
		"by another private key":           keyring.Proves(keyring.Prove(other, 3, "a", "b", peerKey), peer, "b", "a", keys),
		"for another public key":           keyring.Proves(keyring.Prove(private, 3, "a", "b", fabric.PublicKeys(other, 1)[0]), peer, "b", "a", keys),
		"cut":                              keyring.Proves(text[:40], peer, "b", "a", keys),
		"absent":                           keyring.Proves("", peer, "b", "a", keys),
		"for a key that leaves no secrets": keyring.Prove(private, 3, "a", "b", [32]byte{1}) != "",
		"of a key that leaves no secrets":  keyring.Proves(text, peer, "b", "a", [][32]byte{{1}}),
	} {
		if accepted {
			t.Errorf("a proof %s is believed", name)
		}
	}
}
