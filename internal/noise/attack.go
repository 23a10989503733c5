package noise

import (
	"crypto/cipher"
	"crypto/ecdh"
	"encoding/binary"
	"errors"
)

// An Attacker has recorded a handshake, and has a quantum computer, which computes X25519 private
// keys from public keys. So it has the static keys of both sides and the initiator's ephemeral key.
// It does not have the preshared key, which is in no message.
type Attacker struct {
	InitiatorKey, EphemeralKey, ResponderKey *ecdh.PrivateKey
	Initiation, Response                     []byte
}

// Recorded decrypts recorded data messages of both directions.
type Recorded struct{ toResponder, toInitiator cipher.AEAD }

// Keys derives the keys of the session from the recorded handshake. certain reports whether the
// recorded response proves that the keys are right.
func (a Attacker) Keys() (r Recorded, certain bool) {
	theirs, err := ecdh.X25519().NewPublicKey(a.Response[12:44])
	if err != nil {
		panic(err)
	}
	h := &Handshake{own: a.InitiatorKey, ephemeral: a.EphemeralKey}
	h.chain = hashed([]byte("Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s"))
	h.hash = hashed(h.chain, []byte("WireGuard v1 zx2c4 Jason@zx2c4.com"))
	h.mix(a.ResponderKey.PublicKey().Bytes())
	h.chain = expand(h.chain, a.Initiation[8:40], 1)
	h.mix(a.Initiation[8:40])
	h.chain = expand(h.chain, shared(a.ResponderKey, a.EphemeralKey.PublicKey()), 2)[:32]
	h.mix(a.Initiation[40:88])
	h.chain = expand(h.chain, shared(a.ResponderKey, a.InitiatorKey.PublicKey()), 2)[:32]
	h.mix(a.Initiation[88:116])
	h.chain = expand(h.chain, a.Response[12:44], 1)
	h.mix(a.Response[12:44])
	h.chain = expand(h.chain, shared(a.EphemeralKey, theirs), 1)
	h.chain = expand(h.chain, shared(a.InitiatorKey, theirs), 1)
	keys := expand(h.chain, make([]byte, 32), 3)
	h.mix(keys[32:64])
	_, err = aead(keys[64:]).Open(nil, make([]byte, 12), a.Response[44:60], h.hash)
	keys = expand(keys[:32], nil, 2)
	return Recorded{aead(keys[:32]), aead(keys[32:])}, err == nil
}

// Open decrypts a recorded data message.
func (r Recorded) Open(m []byte) ([]byte, error) {
	if len(m) < HeaderLen+TagLen || m[0] != DataType {
		return nil, errors.New("no data message")
	}
	var nonce [12]byte
	binary.LittleEndian.PutUint64(nonce[4:], binary.LittleEndian.Uint64(m[8:]))
	if b, err := r.toResponder.Open(nil, nonce[:], m[HeaderLen:], nil); err == nil {
		return b, nil
	}
	return r.toInitiator.Open(nil, nonce[:], m[HeaderLen:], nil)
}
