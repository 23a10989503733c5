package keyring

import (
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"github.com/isthmus-net/isthmus/fabric"
)

// proofLabel is what the hash of a proof is for.
const proofLabel = "isthmus-key-proof-v1"

// Prove shows to a peer that the cluster that publishes n tunnels has their private keys. Public keys are public, so a
// cluster that is told one may claim it at a third cluster. The proof is a MAC under what X25519 makes of each private key and the public key
// of the peer, over both cluster IDs: only who has those private keys can make it, or the peer itself, for which it is. It is
// the same each time. It is empty where the peer's key is none.
func Prove(private [32]byte, n int, self, peer string, peerKey [32]byte) string {
	keys := fabric.PublicKeys(private, n)
	shared := make([][]byte, n)
	for i := range shared {
		if shared[i] = exchanged(fabric.TunnelKey(private, i), peerKey); shared[i] == nil {
			return ""
		}
	}
	return base64.StdEncoding.EncodeToString(proof(shared, self, peer, keys))
}

// Proves reports whether a proof shows that a peer has the private keys of what it claims. private is the one of ours for whose
// public key the peer made it.
func Proves(text string, private [32]byte, self, peer string, keys [][32]byte) bool {
	given, err := base64.StdEncoding.DecodeString(text)
	if err != nil || len(given) != sha256.Size {
		return false
	}
	shared := make([][]byte, len(keys))
	for i, key := range keys {
		if shared[i] = exchanged(private, key); shared[i] == nil {
			return false
		}
	}
	return hmac.Equal(given, proof(shared, peer, self, keys))
}

// proof is the MAC of the keys of a cluster for a receiver.
func proof(shared [][]byte, sender, receiver string, keys [][32]byte) []byte {
	var secret []byte
	for _, s := range shared {
		secret = append(secret, s...)
	}
	mac := hmac.New(sha256.New, secret)
	mac.Write([]byte(proofLabel))
	for _, id := range []string{sender, receiver} {
		mac.Write(binary.BigEndian.AppendUint32(nil, uint32(len(id))))
		mac.Write([]byte(id))
	}
	for _, key := range keys {
		mac.Write(key[:])
	}
	return mac.Sum(nil)
}

// exchanged is X25519 of two keys; nil: the public one leaves nothing secret.
func exchanged(private, public [32]byte) []byte {
	ours, err := ecdh.X25519().NewPrivateKey(private[:])
	if err != nil {
		return nil
	}
	theirs, err := ecdh.X25519().NewPublicKey(public[:])
	if err != nil {
		return nil
	}
	shared, err := ours.ECDH(theirs)
	if err != nil {
		return nil
	}
	return shared
}
