// Package keyring reads and writes the Secret with the gateway's WireGuard keys, and decides
// the steps of their rotation:
//
//	command, or age ─► Secret has a next key ─► gateways respond to both ─► peers get the next key
//	                                                                            │ all have moved, or patience ends
//	                   current key ◄─────────── next key becomes current ◄──────┘
//
// A Secret that another program maintains may provide the next key (OfferName).
//
// The Secret is the only state, and each arrow is one write to it. So a gateway or manager may
// stop at any point, and its successor continues from the Secret.
package keyring

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
)

// SecretName is the name of the Secret. It is Liqo's name (docs/liqo-v0.md, section 6.1).
const SecretName = "wireguard-pubkey"

// OfferName is the name of a Secret that another program may maintain in the same namespace. A new
// private key in its FieldPrivate becomes the next key.
const OfferName = "isthmus-key"

// Fields of the Secret. Keys are base64 text, as wg(8) prints them. Liqo has only the first two
// fields.
const (
	FieldPrivate     = "privateKey"
	FieldPublic      = "publicKey"
	FieldTunnels     = "tunnels"        // the public keys of tunnels 1, 2 and so on, separated by commas
	FieldSince       = "since"          // time at which the current key was made
	FieldNext        = "nextPrivateKey" // present while a rotation is in progress
	FieldNextPublic  = "nextPublicKey"  // present once gateways respond to the next key, so that peers may use it
	FieldNextTunnels = "nextTunnels"
	FieldNextSince   = "nextSince"     // time at which the next key was made
	FieldPublished   = "nextPublished" // time at which FieldNextPublic was written
	FieldGateways    = "gatewayKey"    // see Ring.Gateways
	FieldOffered     = "offeredKey"    // see Ring.Offered
)

var nextFields = []string{FieldNext, FieldNextPublic, FieldNextTunnels, FieldNextSince, FieldPublished}

// A Ring is the parsed content of the Secret.
type Ring struct {
	Private, Next [32]byte // Next is zero unless a rotation is in progress
	// Gateways is the key with which gateways authenticate to each other and to nodes. It is the
	// first private key. Rotations do not change it, because not all gateways read the Secret at
	// the same time.
	Gateways [32]byte
	// Offered is the public key of the last key that was taken from the Secret OfferName. The same
	// key is not taken twice, because a later rotation may have replaced it.
	Offered          [32]byte
	Since, NextSince time.Time // zero: unknown
	Published        bool      // FieldNextPublic is present
	PublishedAt      time.Time // zero: unknown
}

// String hides the keys.
func (Ring) String() string { return "(key ring)" }

// GoString hides the keys from %#v.
func (Ring) GoString() string { return "(key ring)" }

// MarshalText hides the keys from JSON and other encodings.
func (Ring) MarshalText() ([]byte, error) { return []byte("(key ring)"), nil }

// Read parses the data of the Secret. An invalid private key is an error. wrong describes other
// invalid fields, which are left out of r.
func Read(data map[string][]byte) (r Ring, wrong, err error) {
	if r.Private, err = Key(data, FieldPrivate); err != nil {
		return r, nil, fmt.Errorf("data.%s %w", FieldPrivate, err)
	}
	r.Gateways = r.Private
	r.Since, r.NextSince, r.PublishedAt = timeOf(data, FieldSince), timeOf(data, FieldNextSince), timeOf(data, FieldPublished)
	var errs []error
	if _, ok := data[FieldGateways]; ok {
		key, err := Key(data, FieldGateways)
		if err != nil {
			errs = append(errs, fmt.Errorf("data.%s %w", FieldGateways, err))
		} else {
			r.Gateways = key
		}
	}
	if _, ok := data[FieldOffered]; ok {
		if r.Offered, err = Key(data, FieldOffered); err != nil {
			errs = append(errs, fmt.Errorf("data.%s %w", FieldOffered, err))
		}
	}
	if _, ok := data[FieldNext]; !ok {
		for _, field := range nextFields {
			if _, ok := data[field]; ok {
				errs = append(errs, fmt.Errorf("data.%s is set, but data.%s is not", field, FieldNext))
			}
		}
	} else {
		if r.Next, err = Key(data, FieldNext); err != nil {
			errs = append(errs, fmt.Errorf("data.%s %w", FieldNext, err))
			r.Next = [32]byte{}
		} else if r.Next == r.Private {
			r.Next = [32]byte{}
		}
	}
	if r.Next != ([32]byte{}) {
		public, err := Key(data, FieldNextPublic)
		r.Published = err == nil && public == fabric.PublicKeys(r.Next, 1)[0]
	}
	return r, errors.Join(errs...), nil
}

// Public returns the names of the fields that contain the public keys to publish to peers. These
// are the fields of the next key once gateways respond to that key. A public key without its
// private key is ignored, because no gateway responds to it.
func Public(data map[string][]byte) (first, further string) {
	if r, _, err := Read(data); err == nil && r.Published {
		return FieldNextPublic, FieldNextTunnels
	}
	return FieldPublic, FieldTunnels
}

// Key parses a field.
func Key(data map[string][]byte, field string) ([32]byte, error) {
	text, ok := data[field]
	if !ok {
		return [32]byte{}, errors.New("is absent; want a WireGuard key, 32 bytes in 44 base64 characters")
	}
	return fabric.ParseKey(strings.TrimSpace(string(text)))
}

func timeOf(data map[string][]byte, field string) time.Time {
	published, err := time.Parse(time.RFC3339, string(data[field]))
	if err != nil {
		return time.Time{}
	}
	return published
}

// New makes a private key.
func New() (private [32]byte) {
	rand.Read(private[:]) // never fails
	private[0] &= 248     // clamp as in RFC 7748, section 5; wg(8) also does so before it prints a key
	private[31] = private[31]&127 | 64
	return private
}

// Text returns the base64 text of a key, as the Secret stores it.
func Text(key [32]byte) []byte { return []byte(base64.StdEncoding.EncodeToString(key[:])) }

// Tunnels returns the value of FieldTunnels for n tunnels. If the value is empty, the field must be
// absent.
func Tunnels(private [32]byte, n int) string {
	var texts []string
	for _, key := range fabric.PublicKeys(private, n)[1:] {
		texts = append(texts, string(Text(key)))
	}
	return strings.Join(texts, ",")
}

// tunnelsIn returns the number of tunnels whose public keys are in data.
func tunnelsIn(data map[string][]byte) int {
	if text := data[FieldTunnels]; len(text) > 0 {
		return min(2+bytes.Count(text, []byte(",")), fabric.MaxTunnels)
	}
	return 1
}

// Begin returns a copy of data that starts a rotation to the key next.
func Begin(data map[string][]byte, next [32]byte, now time.Time) map[string][]byte {
	data = Abandon(data)
	data[FieldNext], data[FieldNextSince] = Text(next), stamp(now)
	return data
}

// Take returns a copy of data that records an offered key as taken. The copy starts a rotation to
// that key, unless it is already the current key.
func Take(data map[string][]byte, r Ring, offered [32]byte, now time.Time) map[string][]byte {
	if data = Abandon(data); offered != r.Private {
		data = Begin(data, offered, now)
	}
	data[FieldOffered] = Text(fabric.PublicKeys(offered, 1)[0])
	return data
}

// Abandon returns a copy of data without the fields of the next key.
func Abandon(data map[string][]byte) map[string][]byte {
	rest := make(map[string][]byte, len(data))
	for field, value := range data {
		if !slices.Contains(nextFields, field) {
			rest[field] = value
		}
	}
	return rest
}

// Publish returns a copy of data with the public part of the next key. Seen.Patience counts from
// now.
func Publish(data map[string][]byte, r Ring, tunnels int, now time.Time) map[string][]byte {
	data = maps.Clone(data)
	data[FieldPublished] = stamp(now)
	data[FieldNextPublic] = Text(fabric.PublicKeys(r.Next, 1)[0])
	set(data, FieldNextTunnels, []byte(Tunnels(r.Next, tunnels)))
	return data
}

// Promote returns a copy of data in which the next key is the current one.
func Promote(data map[string][]byte, r Ring, now time.Time) map[string][]byte {
	tunnels := tunnelsIn(data)
	data = Abandon(data)
	data[FieldPrivate], data[FieldPublic] = Text(r.Next), Text(fabric.PublicKeys(r.Next, 1)[0])
	data[FieldGateways] = Text(r.Gateways)
	set(data, FieldTunnels, []byte(Tunnels(r.Next, tunnels)))
	since := r.NextSince
	if since.IsZero() || since.After(now) {
		since = now
	}
	data[FieldSince] = stamp(since)
	return data
}

// Replace returns a copy of data with a new key only. It removes all other keys, including
// Ring.Gateways, because they may have been stolen.
func Replace(data map[string][]byte, private [32]byte, now time.Time) map[string][]byte {
	tunnels := tunnelsIn(data)
	data = Abandon(data)
	delete(data, FieldGateways)
	data[FieldPrivate], data[FieldPublic] = Text(private), Text(fabric.PublicKeys(private, 1)[0])
	set(data, FieldTunnels, []byte(Tunnels(private, tunnels)))
	data[FieldSince] = stamp(now)
	return data
}

func set(data map[string][]byte, field string, value []byte) {
	if len(value) == 0 {
		delete(data, field)
		return
	}
	data[field] = value
}

func stamp(t time.Time) []byte { return []byte(t.UTC().Format(time.RFC3339)) }

// Settled is how long all peers must have had a session with the next key before it becomes the
// current key. It allows the last packets of sessions with the former key to arrive.
const Settled = 10 * time.Second

// OfferTimeout is how long the Secret OfferName must be missing before keys are rotated by age
// again.
const OfferTimeout = time.Hour

// Seen holds the settings and observations of the active gateway, from which Step decides.
type Seen struct {
	Now          time.Time
	Answering    bool          // the gateway responds to Ring.Next
	Lagging      int           // number of peers without a session with the next key
	Moved        time.Duration // how long Lagging has been 0
	Age          time.Duration // keys older than this are rotated; 0: never
	Offered      [32]byte      // private key in the Secret OfferName; zero: none. While the Secret exists, age starts no rotation.
	Absent       time.Duration // how long the Secret OfferName has been missing
	PeersUnaware bool          // peers are connected but none has a session with the next key, so perhaps none has received that key
	Patience     time.Duration // how long to wait for peers that lag before the next key becomes current; 0: without limit
}

// A Step is the next write to the Secret during a rotation.
type Step string

// The steps of a rotation. The comment of a step names the function that returns the data to write.
const (
	Nothing  Step = ""
	Start    Step = "start"    // Begin with a new key
	Accept   Step = "accept"   // Take the offered key
	Announce Step = "announce" // Publish; also if PublishedAt is unknown
	Finish   Step = "finish"   // Promote
)

// Step returns the next step. Only the active gateway may call Step.
func (r Ring) Step(s Seen) Step {
	if r.Next == ([32]byte{}) {
		if s.Offered != ([32]byte{}) {
			if fabric.PublicKeys(s.Offered, 1)[0] != r.Offered {
				return Accept
			}
			return Nothing
		}
		// If a key was offered before, the Secret may be missing only for a moment. A rotation by
		// age would replace the offered key permanently, because no key is taken twice.
		if s.Age > 0 && (r.Offered == ([32]byte{}) || s.Absent >= OfferTimeout) && !r.Since.IsZero() && s.Now.Sub(r.Since) >= s.Age {
			return Start
		}
		return Nothing
	}
	switch {
	case !s.Answering:
		return Nothing
	case !r.Published, r.PublishedAt.IsZero(), r.PublishedAt.After(s.Now):
		return Announce
	case s.Lagging == 0 && s.Moved >= Settled, s.Patience > 0 && s.Now.Sub(r.PublishedAt) >= s.Patience && !s.PeersUnaware:
		return Finish
	}
	return Nothing
}

// Fingerprint returns the beginning of a public key's text, short enough for people to compare.
func Fingerprint(public [32]byte) string { return string(Text(public)[:12]) }
