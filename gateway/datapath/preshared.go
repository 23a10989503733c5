package datapath

import (
	"encoding/binary"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/crypto/blake2s"
	"golang.org/x/crypto/chacha20poly1305"
	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/device"
)

// A preshared key is mixed into a handshake with its response (Noise's psk2). The two sides
// cannot change it at the same moment. So while it changes, each side has two keys:
//
//	making a response   uses the new and the former key in turn, because the peer may have only one
//	reading a response  uses the key with which it was made, which the tag reveals
//
// If the peer has only the former key, at most one handshake fails. It is repeated after
// RekeyTimeout, and the previous session stays valid for a minute more. The first session with the
// new key ends the change, because then both sides have that key.

// PresharedKeys are the preshared keys that handshakes with a peer may use. The zero key means no
// preshared key, as in WireGuard.
type PresharedKeys struct {
	ID  string // identifies Key in Stats
	Key [32]byte
	// While Changing is set, handshakes may also use Previous, until there is a session with Key.
	Previous [32]byte
	Changing bool
}

// String hides the keys.
func (PresharedKeys) String() string { return hidden }

// GoString hides the keys from %#v.
func (PresharedKeys) GoString() string { return hidden }

// LogValue hides the keys from loggers that print JSON.
func (PresharedKeys) LogValue() slog.Value { return slog.StringValue(hidden) }

const hidden = "(preshared keys)"

// presharedGrace is the time allowed for a handshake that is in progress when the key changes: the
// longest time from the moment when the device reads the key until there is a session.
const presharedGrace = time.Second

// preshared holds the preshared keys of one peer of a device. Methods may be called concurrently.
type preshared struct {
	mu      sync.Mutex
	dev     *device.Peer
	keys    PresharedKeys
	begun   bool            // the method set was called before, so handshakes with other keys may be in progress
	settled bool            // the change has ended: only keys.Key is used
	since   time.Time       // if settled is true, sessions made at this time or later use keys.Key
	certain *device.Keypair // an older session that also uses keys.Key; may be nil
	next    [32]byte        // the preshared key that the device uses now
	sent    [32]byte        // the preshared key with which the last response that was sent was made
	made    keyOfResponse   // a response that the device had made, but not sent, when its key changed
}

type keyOfResponse struct {
	index uint32 // the response's sender index
	key   [32]byte
}

// set changes the keys. Existing sessions stay.
func (s *preshared) set(keys PresharedKeys) {
	if !keys.Changing {
		keys.Previous = [32]byte{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	grace := presharedGrace
	if !s.begun {
		grace = 0 // no handshake can be in progress, and sessions made within the first second must count
	}
	s.begun = true
	if s.keys == keys {
		return
	}
	if s.settled && s.keys.Key == keys.Key {
		s.keys = keys // a session has already shown that the peer has Key
		return
	}
	s.keys, s.settled, s.certain = keys, false, nil
	if s.useKey(keys.Key); !keys.Changing {
		s.settle(grace)
	}
}

// useKey sets the device's key. A response that the device has made but not sent keeps its key, so
// useKey records that key in made. The caller holds s.mu.
func (s *preshared) useKey(key [32]byte) {
	mu := peerHandshakeMu.ptr(s.dev)
	mu.Lock()
	defer mu.Unlock()
	index := *peerIndex.ptr(s.dev)
	if k := keypairsNext.ptr(peerKeypairs.ptr(s.dev)).Load(); index == 0 && k != nil {
		index = *keypairLocal.ptr(k)
	}
	if index != s.made.index {
		s.made = keyOfResponse{index, s.next}
	}
	s.next, *peerPreshared.ptr(s.dev) = key, key
}

// settle ends a change of the key. grace is the maximum remaining time of handshakes in progress,
// which may still use another key. The caller holds s.mu.
func (s *preshared) settle(grace time.Duration) {
	s.useKey(s.keys.Key)
	s.settled, s.since = true, time.Now().Add(grace)
}

// recordResponse records that the device sends the response with this sender index. It then selects
// the key for the next response.
func (s *preshared) recordResponse(index uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent = s.next; index == s.made.index {
		s.sent = s.made.key
	}
	switch {
	case s.settled || !s.keys.Changing:
	case s.sent == s.keys.Key:
		s.useKey(s.keys.Previous)
	default:
		s.useKey(s.keys.Key)
	}
}

// recordConfirmation records that the peer has used k, the session of the last response. So the
// peer has the preshared key of that session.
func (s *preshared) recordConfirmation(k *device.Keypair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.Changing && !s.settled && s.sent == s.keys.Key {
		s.certain = k
		s.settle(presharedGrace)
	}
}

// chooseKey sets the device's preshared key to the one with which m, a response of the peer, was
// made.
func (s *preshared) chooseKey(private *device.NoisePrivateKey, m []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled || !s.keys.Changing {
		return
	}
	r, ok := readResponse(s.dev, private, m)
	switch {
	case ok && r.madeWith(s.keys.Key):
		s.settle(0)
	case ok && r.madeWith(s.keys.Previous):
		s.useKey(s.keys.Previous)
		time.AfterFunc(presharedGrace, s.tryKey)
	}
}

// tryKey runs after the peer has sent a response that used the former key. It selects the new key
// for our next response. Without this, both sides might use the former key for ever if they start
// handshakes in turn.
func (s *preshared) tryKey() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.Changing && !s.settled {
		s.useKey(s.keys.Key)
	}
}

// handleCrossing handles two handshakes that have crossed. The peer ignores our last response, so we
// do not learn whether it has the new key. The next response therefore uses the key of the last one.
func (s *preshared) handleCrossing() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.settled || !s.keys.Changing:
	case s.sent == s.keys.Previous:
		s.useKey(s.keys.Previous)
	default: // that response used the new key, or the keys have changed since then
		s.useKey(s.keys.Key)
	}
}

// protects reports whether a session was made with the current preshared key, and returns the ID
// of that key. It returns false if that key is zero.
func (s *preshared) protects(k *device.Keypair) (id string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok = k != nil && s.keys.Key != [32]byte{} && (k == s.certain || s.settled && !keypairCreated.ptr(k).Before(s.since))
	if ok {
		id = s.keys.ID
	}
	return id, ok
}

// If m is a response, chooseKey makes the device use the preshared key with which m was made. Call
// it before the device reads m.
func (h *handshakes) chooseKey(m []byte) {
	if m[0] != device.MessageResponseType {
		return
	}
	dev, _ := lookup(h.identity.dev, binary.LittleEndian.Uint32(m[8:]))
	if p := h.t.peers.Load().byDevice[dev]; p != nil {
		p.preshared.chooseKey(h.identity.private.Load(), m)
	}
}

// A response is the initiator's state of a handshake just before the preshared key is mixed in.
type response struct {
	chain, hash [blake2s.Size]byte
	tag         []byte // tag of the encrypted empty field
}

// readResponse repeats the device's processing of a response, up to the preshared key.
func readResponse(dev *device.Peer, private *device.NoisePrivateKey, m []byte) (r response, ok bool) {
	mu := peerHandshakeMu.ptr(dev)
	mu.RLock()
	r.chain, r.hash = *peerChain.ptr(dev), *peerHash.ptr(dev)
	ephemeral := *peerEphemeral.ptr(dev)
	mu.RUnlock()
	theirs := m[12:44]
	r.mix(theirs)
	device.KDF1(&r.chain, r.chain[:], theirs)
	for _, own := range []*device.NoisePrivateKey{&ephemeral, private} {
		secret, err := curve25519.X25519(own[:], theirs)
		if err != nil {
			return r, false
		}
		device.KDF1(&r.chain, r.chain[:], secret)
	}
	r.tag = m[44:60]
	return r, true
}

func (r *response) mix(b []byte) {
	r.hash = blake2s.Sum256(append(r.hash[:], b...))
}

// madeWith reports whether the response was made with the given preshared key.
func (r response) madeWith(preshared [32]byte) bool {
	var tau, key [blake2s.Size]byte
	device.KDF3(&r.chain, &tau, &key, r.chain[:], preshared[:])
	r.mix(tau[:])
	aead, err := chacha20poly1305.New(key[:])
	if err != nil {
		return false
	}
	_, err = aead.Open(nil, device.ZeroNonce[:], r.tag, r.hash[:])
	return err == nil
}
