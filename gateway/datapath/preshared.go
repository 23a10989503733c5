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

// A preshared key enters a handshake with the response (Noise's psk2), and the two sides never change it at
// the same moment. While it changes, each side has two keys:
//
//	response made   with the new key and the former one in turn, since the peer may have only one of them
//	response read   with the one that it was made with: its tag says which
//
// So a handshake fails at most once, when the peer has only the former key, and is repeated after
// RekeyTimeout. The session before it is good for a minute more. The first session with the new key ends
// the change: both sides have it then.

// PresharedKeys are the keys that handshakes with a peer may use. A zero key is none, as in WireGuard.
type PresharedKeys struct {
	ID  string // of Key, for Stats
	Key [32]byte
	// Former may be used, too, while Changing is set, which is until there is a session with Key.
	Former   [32]byte
	Changing bool
}

// String hides the keys.
func (PresharedKeys) String() string { return hidden }

// GoString hides the keys from %#v.
func (PresharedKeys) GoString() string { return hidden }

// LogValue hides the keys from loggers that print JSON.
func (PresharedKeys) LogValue() slog.Value { return slog.StringValue(hidden) }

const hidden = "(preshared keys)"

// presharedGrace is for a handshake in progress when a key changes: the longest time from when the
// device reads the key until there is a session.
const presharedGrace = time.Second

// preshared are the keys of one peer of a device. Methods may be called concurrently.
type preshared struct {
	mu      sync.Mutex
	dev     *device.Peer
	keys    PresharedKeys
	begun   bool            // keys were set before: handshakes with other keys may be in progress
	settled bool            // only keys.Key is used
	since   time.Time       // sessions made later have keys.Key
	certain *device.Keypair // an earlier session that has it, too; may be nil
	next    [32]byte        // the device's present key
	sent    [32]byte        // the key of the device's last response
	made    keyOfResponse   // of the response that the device had made when its key changed
}

type keyOfResponse struct {
	index uint32 // the response's sender index
	key   [32]byte
}

// set changes the keys. The current session stays.
func (s *preshared) set(keys PresharedKeys) {
	if !keys.Changing {
		keys.Former = [32]byte{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	grace := presharedGrace
	if !s.begun {
		grace = 0 // a gateway that takes over makes its sessions within a second
	}
	s.begun = true
	if s.keys == keys {
		return
	}
	if s.settled && s.keys.Key == keys.Key {
		s.keys = keys // a session has already shown that the peer has the key
		return
	}
	s.keys, s.settled, s.certain = keys, false, nil
	if s.use(keys.Key); !keys.Changing {
		s.settle(grace)
	}
}

// use gives the device a key. A response that the device has made and not sent keeps the previous
// key, so use records which key that is. The caller holds s.mu.
func (s *preshared) use(key [32]byte) {
	mu := peerHandshakeMu.of(s.dev)
	mu.Lock()
	defer mu.Unlock()
	index := *peerIndex.of(s.dev)
	if k := keypairsNext.of(peerKeypairs.of(s.dev)).Load(); index == 0 && k != nil {
		index = *keypairLocal.of(k)
	}
	if index != s.made.index {
		s.made = keyOfResponse{index, s.next}
	}
	s.next, *peerPreshared.of(s.dev) = key, key
}

// settle ends a change. The caller holds s.mu.
func (s *preshared) settle(grace time.Duration) {
	s.use(s.keys.Key)
	s.settled, s.since = true, time.Now().Add(grace)
}

// responded notes that the device sends a response, by its sender index.
func (s *preshared) responded(index uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent = s.next; index == s.made.index {
		s.sent = s.made.key
	}
	switch {
	case s.settled || !s.keys.Changing:
	case s.sent == s.keys.Key:
		s.use(s.keys.Former)
	default:
		s.use(s.keys.Key)
	}
}

// confirmed notes that the peer has used the session of the last response.
func (s *preshared) confirmed(k *device.Keypair) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.Changing && !s.settled && s.sent == s.keys.Key {
		s.certain = k
		s.settle(presharedGrace)
	}
}

// choose gives the device the key with which a response was made.
func (s *preshared) choose(private *device.NoisePrivateKey, m []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.settled || !s.keys.Changing {
		return
	}
	r, ok := readResponse(s.dev, private, m)
	switch {
	case ok && r.madeWith(s.keys.Key):
		s.settle(0)
	case ok && r.madeWith(s.keys.Former):
		s.use(s.keys.Former)
		time.AfterFunc(presharedGrace, s.tryKey)
	}
}

// tryKey makes the next response with the new key, after the peer's last response had the former
// one. Otherwise two sides that begin handshakes in turn would both answer with the former key for
// ever.
func (s *preshared) tryKey() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys.Changing && !s.settled {
		s.use(s.keys.Key)
	}
}

// crossed notes that the last response is void, because two handshakes have crossed. It is still
// not known whether the peer has the new key, so the next response tries the same one.
func (s *preshared) crossed() {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.settled || !s.keys.Changing:
	case s.sent == s.keys.Former:
		s.use(s.keys.Former)
	default: // the keys may have changed since that response
		s.use(s.keys.Key)
	}
}

// protects reports whether a session was made with the present preshared key, which is not zero. id
// is the key's ID.
func (s *preshared) protects(k *device.Keypair) (id string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok = k != nil && s.keys.Key != [32]byte{} && (k == s.certain || s.settled && !keypairCreated.of(k).Before(s.since))
	if ok {
		id = s.keys.ID
	}
	return id, ok
}

// choose gives the peer of a response the key for it, before the device reads the response.
func (h *handshakes) choose(m []byte) {
	if m[0] != device.MessageResponseType {
		return
	}
	dev, _ := lookup(h.of.dev, binary.LittleEndian.Uint32(m[8:]))
	if p := h.t.peers.Load().byDevice[dev]; p != nil {
		p.preshared.choose(h.of.private.Load(), m)
	}
}

// A response is the state of the initiator before it mixes in the preshared key.
type response struct {
	chain, hash [blake2s.Size]byte
	tag         []byte // tag of the empty field
}

// readResponse repeats the device's work on a response up to the preshared key.
func readResponse(dev *device.Peer, private *device.NoisePrivateKey, m []byte) (r response, ok bool) {
	mu := peerHandshakeMu.of(dev)
	mu.RLock()
	r.chain, r.hash = *peerChain.of(dev), *peerHash.of(dev)
	ephemeral := *peerEphemeral.of(dev)
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

// madeWith reports whether the response was made with a preshared key.
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
