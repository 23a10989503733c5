// Package noise implements both sides of WireGuard's handshake and its data messages, from the
// WireGuard paper (section 5.4). Tests use it for messages that no real implementation would send.
// Benchmarks use it to simulate thousands of peers.
package noise

import (
	"crypto/cipher"
	"crypto/ecdh"
	"crypto/hkdf"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"net"
	"slices"
	"time"

	"golang.org/x/crypto/blake2s"
	"golang.org/x/crypto/chacha20poly1305"
)

// Types of messages. Lengths in octets of the handshake messages, and of the header and the tag of
// a data message.
const (
	InitiationType, ResponseType, CookieType, DataType = 1, 2, 3, 4
	InitiationLen, ResponseLen, CookieLen              = 148, 92, 64
	HeaderLen, TagLen                                  = 16, 16
)

// answerTime is how long Connect waits for the response to each of its ten initiations.
const answerTime = 6 * time.Second

// A Session is the result of a handshake: the keys, and the receiver's index of the session. It
// is not safe for concurrent use.
type Session struct {
	index   uint32
	send    cipher.AEAD
	receive cipher.AEAD
	counter uint64
}

// Seal makes a data message with the next counter.
func (s *Session) Seal(inner []byte) []byte {
	var nonce [12]byte
	binary.LittleEndian.PutUint64(nonce[4:], s.counter)
	m := DataHeader(s.index, s.counter)
	s.counter++
	return s.send.Seal(m, nonce[:], inner, nil)
}

// SealPadded is like Seal, but pads a packet to a multiple of 16 octets as WireGuard does.
func (s *Session) SealPadded(packet []byte) []byte {
	return s.Seal(append(slices.Clone(packet), make([]byte, -len(packet)&15)...))
}

// DataHeader returns the header of a data message in a slice with capacity for the payload.
func DataHeader(index uint32, counter uint64) []byte {
	m := make([]byte, HeaderLen, 2048)
	m[0] = DataType
	binary.LittleEndian.PutUint32(m[4:], index)
	binary.LittleEndian.PutUint64(m[8:], counter)
	return m
}

// A Handshake is the initiator's state of a handshake in progress.
type Handshake struct {
	// Preshared is the preshared key, or zero if there is none. It may be set until Finish is
	// called.
	Preshared      [32]byte
	own, ephemeral *ecdh.PrivateKey
	chain, hash    []byte
}

// Ephemeral returns the ephemeral private key of this handshake.
func (h *Handshake) Ephemeral() *ecdh.PrivateKey { return h.ephemeral }

// Initiate returns an initiation message and the Handshake to finish it.
func Initiate(own *ecdh.PrivateKey, peer *ecdh.PublicKey, now time.Time) ([]byte, *Handshake) {
	h := &Handshake{own: own, ephemeral: NewKey()}
	h.chain = hashed([]byte("Noise_IKpsk2_25519_ChaChaPoly_BLAKE2s"))
	h.hash = hashed(h.chain, []byte("WireGuard v1 zx2c4 Jason@zx2c4.com"))
	h.mix(peer.Bytes())

	m := make([]byte, 8, InitiationLen)
	m[0] = InitiationType
	rand.Read(m[4:8])
	m = append(m, h.ephemeral.PublicKey().Bytes()...)
	h.chain = expand(h.chain, h.ephemeral.PublicKey().Bytes(), 1)
	h.mix(h.ephemeral.PublicKey().Bytes())
	m = append(m, h.seal(shared(h.ephemeral, peer), own.PublicKey().Bytes())...)
	stamp := binary.BigEndian.AppendUint64(nil, 1<<62+10+uint64(now.Unix())) // TAI64N: seconds, with the epoch's offset
	stamp = binary.BigEndian.AppendUint32(stamp, uint32(now.Nanosecond()))
	m = append(m, h.seal(shared(own, peer), stamp)...)
	return append(m, macs(peer, m)...), h
}

// Finish reads the response and returns the session.
func (h *Handshake) Finish(m []byte) (*Session, error) {
	if len(m) != ResponseLen || m[0] != ResponseType {
		return nil, fmt.Errorf("message of type %d with %d octets, want a response", m[0], len(m))
	}
	ephemeral, err := ecdh.X25519().NewPublicKey(m[12:44])
	if err != nil {
		return nil, err
	}
	h.chain = expand(h.chain, m[12:44], 1)
	h.mix(m[12:44])
	h.chain = expand(h.chain, shared(h.ephemeral, ephemeral), 1)
	h.chain = expand(h.chain, shared(h.own, ephemeral), 1)
	keys := expand(h.chain, h.Preshared[:], 3)
	h.mix(keys[32:64])
	if _, err := aead(keys[64:]).Open(nil, make([]byte, 12), m[44:60], h.hash); err != nil {
		return nil, errors.New("a response that does not authenticate")
	}
	keys = expand(keys[:32], nil, 2)
	return &Session{index: binary.LittleEndian.Uint32(m[4:]), send: aead(keys[:32]), receive: aead(keys[32:])}, nil
}

// Connect makes a session over a socket that is connected to the gateway. If preshared is zero,
// there is no preshared key.
func Connect(c net.Conn, own *ecdh.PrivateKey, peer *ecdh.PublicKey, preshared [32]byte) (*Session, error) {
	var last error
	for range 10 {
		m, h := Initiate(own, peer, time.Now())
		h.Preshared = preshared
		if _, err := c.Write(m); err != nil {
			return nil, err
		}
		if err := c.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
			return nil, err
		}
		buf := make([]byte, 2048)
		for {
			n, err := c.Read(buf)
			if last = err; err != nil {
				break
			}
			if buf[0] != ResponseType { // for example an initiation by the gateway
				continue
			}
			if s, err := h.Finish(buf[:n]); err == nil {
				return s, nil
			}
		}
	}
	return nil, last
}

func (h *Handshake) mix(b []byte) { h.hash = hashed(h.hash, b) }

// seal encrypts a field of the initiation.
func (h *Handshake) seal(secret, plain []byte) []byte {
	keys := expand(h.chain, secret, 2)
	h.chain = keys[:32]
	b := aead(keys[32:]).Seal(nil, make([]byte, 12), plain, h.hash)
	h.mix(b)
	return b
}

// macs returns the last 32 octets of a handshake message: mac1, and a mac2 of zeros, which means no
// cookie.
func macs(to *ecdh.PublicKey, m []byte) []byte {
	key := blake2s.Sum256(append([]byte("mac1----"), to.Bytes()...))
	mac, err := blake2s.New128(key[:])
	if err != nil {
		panic(err)
	}
	mac.Write(m)
	return append(mac.Sum(nil), make([]byte, 16)...)
}

func hashed(parts ...[]byte) []byte {
	h := newHash()
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)
}

// expand is KDFn of the paper: HKDF (RFC 5869) without info.
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

func shared(private *ecdh.PrivateKey, public *ecdh.PublicKey) []byte {
	b, err := private.ECDH(public)
	if err != nil {
		panic(err)
	}
	return b
}

// NewKey makes a private key.
func NewKey() *ecdh.PrivateKey {
	k, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	return k
}
