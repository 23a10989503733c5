package keyring

import (
	"crypto/ecdh"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"

	"github.com/isthmus-net/isthmus/fabric"
)

// proofLabel keeps the hashes of proofs different from hashes for other purposes.
const proofLabel = "isthmus-key-proof-v1"

// Prove returns a proof for one peer that our cluster has the private keys of its n tunnels.
// Without a proof, a cluster that learns our public keys could publish them to a third cluster as
// its own. The proof is a MAC over both cluster IDs. The key of the MAC is derived by X25519 from
// each private key and the peer's public key. So only we and the peer can compute it. The same
// input gives the same proof. The proof is empty if the peer's key is invalid.
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

// Proves reports whether text proves that a peer has the private keys of its published public
// keys. private is our private key. The peer made the proof for our public key.
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

// proof returns the MAC over a cluster's keys, for one receiver.
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

// exchanged returns the X25519 result of two keys. It returns nil for a public key of low
// order, because then anybody could predict the result.
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
