package main

import (
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"hash"
	"slices"

	"golang.org/x/crypto/blake2s"
	"golang.org/x/crypto/chacha20poly1305"
)

// The responder's side of WireGuard's handshake, from the paper (section 5.4): thousands of peers on one
// machine need one that shares everything but keys.

const (
	initiationType, responseType, dataType = 1, 2, 4
	initiationLen, responseLen             = 148, 92
	headerLen, tagLen                      = 16, 16
)

// A session is what a handshake left.
type session struct {
	index         uint32 // the gateway's name for it
	send, receive cipher.AEAD
	counter       uint64
}

// respond reads an initiation to own, whose index becomes index, and makes the response and the session.
func respond(own *ecdh.PrivateKey, m []byte, index uint32) (response []byte, s *session, err error) {
	if len(m) != initiationLen || m[0] != initiationType {
		return nil, nil, errors.New("no initiation")
	}
	chain := hashed([]byte("Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s"))
	hash := hashed(hashed(chain, []byte("WireGuard v1 zx2c4 Jason@zx2c4.com")), own.PublicKey().Bytes())
	mix := func(b []byte) { hash = hashed(hash, b) }

	ephemeral, err := ecdh.X25519().NewPublicKey(m[8:40])
	if err != nil {
		return nil, nil, err
	}
	chain = expand(chain, m[8:40], 1)
	mix(m[8:40])
	secret, err := own.ECDH(ephemeral)
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
	if secret, err = own.ECDH(peer); err != nil {
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
	response = make([]byte, 8, responseLen)
	response[0] = responseType
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
	keys = expand(chain, make([]byte, 32), 3) // of the preshared key, which is none
	mix(keys[32:64])
	response = append(response, aead(keys[64:]).Seal(nil, make([]byte, 12), nil, hash)...)
	mac, err := blake2s.New128(hashed([]byte("mac1----"), static))
	if err != nil {
		return nil, nil, err
	}
	mac.Write(response)
	response = append(mac.Sum(response), make([]byte, 16)...)
	keys = expand(keys[:32], nil, 2)
	return response, &session{index: binary.LittleEndian.Uint32(m[4:]), receive: aead(keys[:32]), send: aead(keys[32:])}, nil
}

// seal makes a data message of a packet, which it pads.
func (s *session) seal(packet []byte) []byte {
	m := make([]byte, headerLen, headerLen+len(packet)+15+tagLen)
	m[0] = dataType
	binary.LittleEndian.PutUint32(m[4:], s.index)
	binary.LittleEndian.PutUint64(m[8:], s.counter)
	s.counter++
	padded := append(slices.Clone(packet), make([]byte, -len(packet)&15)...)
	return s.send.Seal(m, nonce(m), padded, nil)
}

// open returns the packet of a data message, with its padding.
func (s *session) open(m []byte) ([]byte, error) {
	return s.receive.Open(nil, nonce(m), m[headerLen:], nil)
}

func nonce(m []byte) []byte { return append(make([]byte, 4, 12), m[8:headerLen]...) }

func hashed(parts ...[]byte) []byte {
	h := newHash()
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// expand is KDFn, which is HKDF (RFC 5869) without info.
func expand(chain, input []byte, n int) []byte {
	b, err := hkdf.Key(newHash, input, chain, "", 32*n)
	if err != nil {
		panic(err)
	}
	return b
}

func newHash() hash.Hash {
	h, err := blake2s.New256(nil)
	if err != nil {
		panic(err)
	}
	return h
}

func aead(key []byte) cipher.AEAD {
	a, err := chacha20poly1305.New(key)
	if err != nil {
		panic(err)
	}
	return a
}
