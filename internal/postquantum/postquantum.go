// Package postquantum agrees with a peer on a preshared key, by ML-KEM-768 (FIPS 203). An attacker
// who records traffic now and has a quantum computer later cannot compute the key. The messages of
// the exchange are fields of API objects.
//
//	lower cluster ID  ── key ────────────►  higher cluster ID
//	                  ◄─ answer, its tag ──
//	                  ── tag ────────────►
//
// Each side keeps a State. Step computes the next State from the fields that the peer has
// published. The fields that a side publishes are a function of its State. So a manager that stores
// the State before it publishes may stop at any point and continue from there. Each tag proves that
// its sender has the preshared key. Neither side uses the key before it has seen the other side's
// tag.
//
// To save space, a State has only the hash of its message (key or answer). The message would be
// three times as long as the rest of the State. Step reads the message from the fields that this
// side has published. If a manager stops before it publishes an answer, that answer is lost, and
// another one replaces it.
//
// This package does not authenticate the peer: anybody who may write the peer's objects can act
// as the peer.
package postquantum

import (
	"bytes"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/mlkem"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
)

// SecretName is the name of a Secret. For each peer it has the State of the exchange as JSON, under
// the peer's cluster ID. The manager writes the Secret, and gateways read it.
const SecretName = "isthmus-psk"

// MaxStored is the maximum length of a State as JSON, in octets. A Secret may have one MiB in
// total.
const MaxStored = 642

// Names of Fields. In every deployed CRD, a value of backend_config may have at most 1,024
// characters. So a key or an answer is split into two halves.
const (
	fieldFirst  = "kem0"   // first half of a key or answer, in base64
	fieldSecond = "kem1"   // second half
	fieldFor    = "kemFor" // in an answer: ID of the exchange that is answered
	fieldUse    = "kemUse" // only beside an answer: ID of the exchange whose key is in use; absent: none
	fieldTag    = "kemTag" // proves that the sender has the preshared key
)

// label keeps the hashes and keys of the exchange different from those for other purposes.
const label = "isthmus-psk-v1"

// Fields are the values that a side publishes in backend_config for the other side.
type Fields map[string]string

// FieldsIn returns the Fields in values. It ignores values with other names.
func FieldsIn(values map[string]string) Fields {
	w := make(Fields)
	for _, name := range []string{fieldFirst, fieldSecond, fieldFor, fieldUse, fieldTag} {
		if value := values[name]; value != "" {
			w[name] = value
		}
	}
	return w
}

// An Identity identifies one side: its cluster ID, and the WireGuard public keys of its
// tunnels.
type Identity struct {
	ClusterID string
	Keys      [][32]byte
}

// A State is one side's state of an exchange with a peer. It is secret.
type State struct {
	ID      string `json:"id,omitempty"`         // ID of the exchange: a hash of the key and both identities
	Seed    []byte `json:"privateKey,omitempty"` // seed of the decapsulation key; erased once there is a valid answer
	Message []byte `json:"-"`                    // our key or our answer; nil: not read yet from the Fields that this side published
	Sum     []byte `json:"sum,omitempty"`        // hash of Message
	Tag     []byte `json:"tag,omitempty"`        // our tag
	Theirs  []byte `json:"theirs,omitempty"`     // the tag that the peer must publish, or has published
	// Pending is the key of this exchange. It becomes Use once the peer has proved that it has
	// the key, too.
	Pending *Key `json:"pending,omitempty"`
	Use     Key  `json:"use"` // key for handshakes; zero: none
	// Previous is the previous key, which the peer may still use, or zero.
	Previous Key `json:"previous"`
	// Sure is the ID of the exchange whose key the peer has used in a session.
	Sure string `json:"sure,omitempty"`
}

// A Key is a preshared key and the exchange that made it. The zero value is no preshared key.
type Key struct {
	ID     string `json:"id,omitempty"`
	Secret Secret `json:"presharedKey,omitzero"` // package redact recognizes secret fields by this name
}

// A Secret is 32 octets, in base64 as wg(8) prints keys.
type Secret [32]byte

// MarshalText implements encoding.TextMarshaler.
func (s Secret) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, s[:]), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *Secret) UnmarshalText(text []byte) error {
	b := decoded(string(text), len(s))
	if b == nil {
		return errors.New("want 32 octets in base64")
	}
	*s = Secret(b)
	return nil
}

// String hides a Secret.
func (Secret) String() string { return hidden }

// GoString hides a Secret from %#v.
func (Secret) GoString() string { return hidden }

// String hides a State.
func (State) String() string { return hidden }

// GoString hides a State from %#v.
func (State) GoString() string { return hidden }

// LogValue hides a State from loggers that print JSON.
func (State) LogValue() slog.Value { return slog.StringValue(hidden) }

// String hides a Key.
func (Key) String() string { return hidden }

// GoString hides a Key from %#v.
func (Key) GoString() string { return hidden }

// LogValue hides a Key from loggers that print JSON.
func (Key) LogValue() slog.Value { return slog.StringValue(hidden) }

const hidden = "(secret)"

// A Progress is the result of a Step.
type Progress string

// The values of Progress. Each value except Agreed and Waiting is a reason why there is no new
// preshared key.
const (
	Agreed    Progress = "Agreed"    // both sides have the key in use
	Waiting   Progress = "Waiting"   // our side has published, and the peer has not answered yet
	NotOffers Progress = "NotOffers" // the peer publishes no Fields
	Malformed Progress = "Malformed" // the peer publishes an invalid key, answer or tag
	Other     Progress = "Other"     // the peer's answer is for another key or another cluster
	Altered   Progress = "Altered"   // the peer's tag is wrong, so the published Fields of a side were changed or replaced
	Changed   Progress = "Changed"   // the peer has replaced its accepted answer, so the exchange starts again
)

// Step advances a State. received has the Fields that the peer has published. published has the
// Fields that this side published last. The caller must store the resulting State before it
// publishes its Fields. The keys in use change only if the peer proves that it has the new key, or
// if the peer leaves the exchange.
func (s State) Step(ours, theirs Identity, received, published Fields) (State, Progress, error) {
	offers := ours.ClusterID < theirs.ClusterID
	context := contextOf(ours, theirs)
	if !offers {
		context = contextOf(theirs, ours)
	}
	s = s.recall(published)
	if offers && s.ID != idOf(context, s.Message) {
		if err := s.begin(context); err != nil {
			return s, "", err
		}
	}
	if received[fieldFirst] == "" && received[fieldSecond] == "" {
		return s.withoutPeer(offers, context)
	}
	if offers {
		return s.readAnswer(received, context)
	}
	return s.readKey(received, context)
}

// recall completes a State that was read from the Secret. It derives the message from our seed, or
// else reads it from the Fields that this side published. If the message does not have the stored
// hash, the exchange starts again.
func (s State) recall(published Fields) State {
	if s.Message != nil || s.ID == "" {
		return s
	}
	if s.Message = message(published, mlkem.CiphertextSize768); s.Message == nil {
		s.Message = message(published, mlkem.EncapsulationKeySize768)
	}
	if key, err := mlkem.NewDecapsulationKey768(s.Seed); err == nil {
		s.Message = key.EncapsulationKey().Bytes()
	}
	if sum := sha256.Sum256(s.Message); !bytes.Equal(sum[:], s.Sum) {
		return State{}.withKeysOf(s)
	}
	return s
}

// withMessage returns s with the message that this side has made for a new exchange.
func (s State) withMessage(message []byte) State {
	sum := sha256.Sum256(message)
	s.Message, s.Sum = message, sum[:]
	return s
}

// Fields returns the values to publish for the peer.
func (s State) Fields() Fields {
	if s.Message == nil {
		return nil
	}
	text := base64.StdEncoding.EncodeToString(s.Message)
	w := Fields{fieldFirst: text[:len(text)/2], fieldSecond: text[len(text)/2:]}
	set := func(name, value string) {
		if value != "" {
			w[name] = value
		}
	}
	set(fieldTag, base64.StdEncoding.EncodeToString(s.Tag))
	if len(s.Message) == mlkem.CiphertextSize768 {
		set(fieldFor, s.ID)
		set(fieldUse, s.Use.ID)
	}
	return w
}

// withoutPeer advances the State while the peer publishes no Fields, because it has left the
// exchange or not joined it yet.
func (s State) withoutPeer(offers bool, context []byte) (State, Progress, error) {
	if s.Use != (Key{}) {
		s.Use, s.Previous = Key{}, s.Use
	}
	if !offers {
		return State{}.withKeysOf(s), NotOffers, nil
	}
	if s.Seed == nil {
		if err := s.begin(context); err != nil {
			return s, "", err
		}
	}
	return s, NotOffers, nil
}

// begin starts an exchange with a new key.
func (s *State) begin(context []byte) error {
	key, err := mlkem.GenerateKey768()
	if err != nil {
		return fmt.Errorf("ML-KEM key: %w", err)
	}
	public := key.EncapsulationKey().Bytes()
	*s = State{ID: idOf(context, public), Seed: key.Bytes()}.withMessage(public).withKeysOf(*s)
	return nil
}

// readAnswer advances the State of the side with the lower cluster ID.
func (s State) readAnswer(received Fields, context []byte) (State, Progress, error) {
	answer, tag := message(received, mlkem.CiphertextSize768), decoded(received[fieldTag], sha256.Size)
	use := received[fieldUse]
	switch {
	case answer == nil || tag == nil || len(received[fieldFor]) > 2*sha256.Size || len(use) > 2*sha256.Size:
		return s, Malformed, nil
	case received[fieldFor] != s.ID:
		return s, Other, nil
	case s.Seed == nil && hmac.Equal(tag, s.Theirs):
		return s, Agreed, nil
	case s.Seed == nil:
		err := s.begin(context)
		return s, Changed, err
	}
	key, err := mlkem.NewDecapsulationKey768(s.Seed)
	if err != nil {
		return s, "", fmt.Errorf("stored ML-KEM key: %w", err)
	}
	shared, err := key.Decapsulate(answer)
	if err != nil {
		return s, "", fmt.Errorf("ML-KEM answer: %w", err) // fails only for an answer of the wrong length
	}
	d := derive(shared, s.Message, answer, context)
	theirs := d.tag("answer", use)
	if !hmac.Equal(tag, theirs) {
		return s, Altered, nil
	}
	// The peer may still use an earlier key than this side. Keep that key as Previous.
	if use != s.Previous.ID || use == s.Use.ID {
		s.Previous = s.Use
	}
	s.Use, s.Seed, s.Theirs, s.Tag = Key{s.ID, d.secret}, nil, theirs, d.tag("key", "")
	return s, Agreed, nil
}

// readKey advances the State of the side with the higher cluster ID.
func (s State) readKey(received Fields, context []byte) (State, Progress, error) {
	public := message(received, mlkem.EncapsulationKeySize768)
	if public == nil {
		return s, Malformed, nil
	}
	if id := idOf(context, public); id != s.ID {
		key, err := mlkem.NewEncapsulationKey768(public)
		if err != nil {
			return s, Malformed, nil //nolint:nilerr // the peer's mistake, not ours
		}
		shared, answer := key.Encapsulate()
		d := derive(shared, public, answer, context)
		s = State{ID: id, Pending: &Key{id, d.secret}}.withMessage(answer).withKeysOf(s)
		s.Tag, s.Theirs = d.tag("answer", s.Use.ID), d.tag("key", "")
	}
	text := received[fieldTag]
	switch tag := decoded(text, sha256.Size); {
	case text == "":
		return s, Waiting, nil
	case tag == nil:
		return s, Malformed, nil
	case !hmac.Equal(tag, s.Theirs):
		return s, Altered, nil
	}
	if s.Pending != nil {
		s.Use, s.Previous, s.Pending = *s.Pending, s.Use, nil
	}
	return s, Agreed, nil
}

// withKeysOf returns s, the State of a new exchange, with the keys that are in use according to
// source.
func (s State) withKeysOf(source State) State {
	s.Use, s.Previous, s.Sure = source.Use, source.Previous, source.Sure
	return s
}

// Settled erases the former key. Call it once the peer has used the current key in a session.
func (s State) Settled() State {
	s.Previous, s.Sure = Key{}, s.Use.ID
	return s
}

// Changing reports whether the peer may still use the former key.
func (s State) Changing() bool { return s.Sure != s.Use.ID || s.Previous != (Key{}) }

// Secrets returns all secret values of the State.
func (s State) Secrets() [][]byte {
	all := [][]byte{s.Use.Secret[:], s.Previous.Secret[:], s.Seed}
	if s.Pending != nil {
		all = append(all, s.Pending.Secret[:])
	}
	return slices.DeleteFunc(all, func(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 })
}

// message joins the halves of a key or an answer. It returns nil if they are invalid, or if the
// result is not length octets long.
func message(received Fields, length int) []byte {
	return decoded(received[fieldFirst]+received[fieldSecond], length)
}

func decoded(text string, want int) []byte {
	if len(text) != base64.StdEncoding.EncodedLen(want) {
		return nil
	}
	b, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != want {
		return nil
	}
	return b
}

// contextOf returns a hash of both identities. The input of the hash has a length before each field
// of variable length.
func contextOf(lower, higher Identity) []byte {
	b := []byte(label)
	for _, side := range []Identity{lower, higher} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(side.ClusterID)))
		b = append(b, side.ClusterID...)
		b = binary.BigEndian.AppendUint32(b, uint32(len(side.Keys)))
		for _, key := range side.Keys {
			b = append(b, key[:]...)
		}
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

func idOf(context, public []byte) string {
	sum := sha256.Sum256(bytes.Join([][]byte{[]byte(label), context, public}, nil))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// derived has the values that both sides derive from the shared secret.
type derived struct {
	secret  Secret
	confirm []byte // MAC key for both tags
}

func derive(shared, public, answer, context []byte) (d derived) {
	salt := sha256.Sum256(append(bytes.Clone(public), answer...))
	b, err := hkdf.Key(sha256.New, shared, salt[:], label+string(context), 64)
	if err != nil {
		panic(err) // fails only for more than 8,160 octets
	}
	d.secret, d.confirm = Secret(b[:32]), b[32:]
	return d
}

// tag returns the tag of one side ("key" or "answer"). The tags of the two sides differ, so a peer
// cannot return a tag that it received.
func (d derived) tag(side, use string) []byte {
	mac := hmac.New(sha256.New, d.confirm)
	mac.Write([]byte(side + "\n" + use))
	return mac.Sum(nil)
}
