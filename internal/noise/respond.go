package noise

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/binary"
	"errors"

	"golang.org/x/crypto/blake2s"
)

// Respond reads an initiation that was sent to the owner of the private key. It returns the
// response and the session. index becomes the responder's index of the session.
func Respond(private *ecdh.PrivateKey, m []byte, index uint32) (response []byte, s *Session, err error) {
	if len(m) != InitiationLen || m[0] != InitiationType {
		return nil, nil, errors.New("no initiation")
	}
	chain := hashed([]byte("Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s"))
	hash := hashed(hashed(chain, []byte("WireGuard v1 zx2c4 Jason@zx2c4.com")), private.PublicKey().Bytes())
	mix := func(b []byte) { hash = hashed(hash, b) }

	ephemeral, err := ecdh.X25519().NewPublicKey(m[8:40])
	if err != nil {
		return nil, nil, err
	}
	chain = expand(chain, m[8:40], 1)
	mix(m[8:40])
	secret, err := private.ECDH(ephemeral)
	if err != nil {
		return nil, nil, err
	}
	keys := expand(chain, secret, 2)
	static, err := aead(keys[32:]).Open(nil, make([]byte, 12), m[40:88], hash)
	if err != nil {
		return nil, nil, err
	}
	mix(m[40:88])
	peer, err := ecdh.X25519().NewPublicKey(static)
	if err != nil {
		return nil, nil, err
	}
	if secret, err = private.ECDH(peer); err != nil {
		return nil, nil, err
	}
	keys = expand(keys[:32], secret, 2)
	if _, err = aead(keys[32:]).Open(nil, make([]byte, 12), m[88:116], hash); err != nil {
		return nil, nil, err
	}
	mix(m[88:116])

	mine, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	response = make([]byte, 8, ResponseLen)
	response[0] = ResponseType
	binary.LittleEndian.PutUint32(response[4:], index)
	response = append(response, m[4:8]...)
	response = append(response, mine.PublicKey().Bytes()...)
	chain = expand(keys[:32], mine.PublicKey().Bytes(), 1)
	mix(mine.PublicKey().Bytes())
	for _, public := range []*ecdh.PublicKey{ephemeral, peer} {
		if secret, err = mine.ECDH(public); err != nil {
			return nil, nil, err
		}
		chain = expand(chain, secret, 1)
	}
	keys = expand(chain, make([]byte, 32), 3) // mix in zeros, which means no preshared key
	mix(keys[32:64])
	response = append(response, aead(keys[64:]).Seal(nil, make([]byte, 12), nil, hash)...)
	mac, err := blake2s.New128(hashed([]byte("mac1----"), static))
	if err != nil {
		return nil, nil, err
	}
	mac.Write(response)
	response = append(mac.Sum(response), make([]byte, 16)...)
	keys = expand(keys[:32], nil, 2)
	return response, &Session{index: binary.LittleEndian.Uint32(m[4:]), receive: aead(keys[:32]), send: aead(keys[32:])}, nil
}

// Open decrypts a data message. The result includes the padding.
func (s *Session) Open(m []byte) ([]byte, error) {
	var nonce [12]byte
	copy(nonce[4:], m[8:HeaderLen])
	return s.receive.Open(nil, nonce[:], m[HeaderLen:], nil)
}
