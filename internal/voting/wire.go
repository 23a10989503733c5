// Package voting transmits the messages of package mandate over UDP. The Candidate of each
// gateway sends asks to the nodes. The Voter of each route agent answers, and stores its
// promises. Decision 23 has the reasons.
package voting

import (
	"bytes"
	"crypto/ed25519"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/isthmus-net/isthmus/internal/mandate"
)

// Port is the UDP port of voters, at the addresses of their nodes.
const Port = 4801

// An ask is one datagram, in network byte order:
//
//	 0  magic    4
//	 4  kind     1  mandate.Kind
//	 5  flags    1  flagHolds
//	 6  length   1  of from
//	 7  zero     1
//	 8  epoch    8
//	16  list     8  version
//	24  sent     8  nanoseconds of the gateway's clock
//	32  nonce    8
//	40  heard    8
//	48  cookie   16
//	64  address  16 of the gateway's Pod, an IPv4 address as RFC 4291 maps it
//	80  from     name of the gateway's Pod
//	..  signature 64 Ed25519, of all octets before it
//
// An answer is one datagram, too:
//
//	 0  magic    4
//	 4  flags    1  flagGranted, flagEnded
//	 5  lengths  2  of from and holder
//	 7  zero     1
//	 8  epoch    8  of the promise
//	16  list     8  of the promise
//	24  free     8  nanoseconds
//	32  sent     8  of the ask
//	40  nonce    8  of the ask
//	48  incarnation 8
//	56  cookie   16 of the ask
//	72  from     name of the voter's Node
//	..  holder   of the promise
//
// Gateways sign with a key that is derived from the WireGuard private key, which agents do not
// have. Answers are not signed. A gateway sends each voter another random cookie in its asks, and
// accepts an answer of the voter only with that cookie.
const (
	askHead    = 80
	answerHead = 72

	nameLimit   = 253 // maximum length of a DNS subdomain name, in octets
	askLimit    = askHead + nameLimit + ed25519.SignatureSize
	answerLimit = answerHead + 2*nameLimit

	flagHolds   = 1 << 0
	flagGranted = 1 << 0
	flagEnded   = 1 << 1
)

var (
	askMagic    = [4]byte{'I', 'V', 'Q', 1}
	answerMagic = [4]byte{'I', 'V', 'A', 1}
)

type cookie [16]byte

// An ask is a mandate.Ask with the fields that only the datagram has.
type ask struct {
	mandate.Ask
	cookie cookie
	addr   netip.Addr // address of the gateway's Pod
}

// An answer is a mandate.Answer with the cookie of its ask.
type answer struct {
	mandate.Answer
	cookie cookie
}

// KeyOf returns the key with which the gateways of an installation sign. private is the WireGuard
// private key that they share.
func KeyOf(private [32]byte) ed25519.PrivateKey {
	seed, err := hkdf.Key(sha256.New, private[:], nil, "isthmus gateway votes", ed25519.SeedSize)
	if err != nil {
		panic(err) // fails only for lengths over 255 hashes
	}
	return ed25519.NewKeyFromSeed(seed)
}

// seal returns the datagram of an ask.
func (a ask) seal(key ed25519.PrivateKey) []byte {
	b := make([]byte, askHead, askLimit)
	copy(b, askMagic[:])
	b[4] = byte(a.Kind)
	if a.Holds {
		b[5] |= flagHolds
	}
	b[6] = byte(len(a.From))
	binary.BigEndian.PutUint64(b[8:], a.Epoch)
	binary.BigEndian.PutUint64(b[16:], a.List)
	binary.BigEndian.PutUint64(b[24:], uint64(a.Sent))
	binary.BigEndian.PutUint64(b[32:], a.Nonce)
	binary.BigEndian.PutUint64(b[40:], a.Heard)
	copy(b[48:], a.cookie[:])
	addr := a.addr.As16()
	copy(b[64:], addr[:])
	b = append(b, a.From...)
	return append(b, ed25519.Sign(key, b)...)
}

// openAsk parses the result of seal. It does not check the signature; signed does.
func openAsk(b []byte) (a ask, ok bool) {
	if len(b) < askHead || [4]byte(b) != askMagic || len(b) != askHead+int(b[6])+ed25519.SignatureSize || b[6] == 0 || b[6] > nameLimit ||
		b[4] > byte(mandate.Release) || b[5]&^flagHolds != 0 || b[7] != 0 {
		return a, false
	}
	a.Kind, a.Holds = mandate.Kind(b[4]), b[5]&flagHolds != 0
	a.Epoch, a.List = binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
	a.Sent = time.Duration(binary.BigEndian.Uint64(b[24:]))
	a.Nonce, a.Heard = binary.BigEndian.Uint64(b[32:]), binary.BigEndian.Uint64(b[40:])
	a.cookie, a.addr = cookie(b[48:]), netip.AddrFrom16([16]byte(b[64:])).Unmap()
	a.From = mandate.ID(b[askHead : askHead+int(b[6])])
	return a, true
}

// signed reports whether the datagram of an ask is signed by the key of the installation.
func signed(b []byte, key ed25519.PublicKey) bool {
	text := b[:len(b)-ed25519.SignatureSize]
	return len(key) == ed25519.PublicKeySize && ed25519.Verify(key, text, b[len(text):])
}

// datagram returns the datagram of an answer.
func (a answer) datagram() []byte {
	b := make([]byte, answerHead, answerLimit)
	copy(b, answerMagic[:])
	if a.Granted {
		b[4] |= flagGranted
	}
	if a.Ended {
		b[4] |= flagEnded
	}
	b[5], b[6] = byte(len(a.From)), byte(len(a.Promise.Holder))
	binary.BigEndian.PutUint64(b[8:], a.Promise.Epoch)
	binary.BigEndian.PutUint64(b[16:], a.Promise.List)
	binary.BigEndian.PutUint64(b[24:], uint64(a.Free))
	binary.BigEndian.PutUint64(b[32:], uint64(a.Sent))
	binary.BigEndian.PutUint64(b[40:], a.Nonce)
	binary.BigEndian.PutUint64(b[48:], a.Incarnation)
	copy(b[56:], a.cookie[:])
	b = append(b, a.From...)
	return append(b, a.Promise.Holder...)
}

// openAnswer parses the result of datagram.
func openAnswer(b []byte) (a answer, ok bool) {
	if len(b) < answerHead || [4]byte(b) != answerMagic || len(b) != answerHead+int(b[5])+int(b[6]) || b[4]&^(flagGranted|flagEnded) != 0 ||
		b[5] == 0 || b[5] > nameLimit || b[6] > nameLimit || b[7] != 0 {
		return a, false
	}
	a.Granted, a.Ended = b[4]&flagGranted != 0, b[4]&flagEnded != 0
	a.Promise.Epoch, a.Promise.List = binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
	a.Free, a.Sent = time.Duration(binary.BigEndian.Uint64(b[24:])), time.Duration(binary.BigEndian.Uint64(b[32:]))
	a.Nonce, a.Incarnation = binary.BigEndian.Uint64(b[40:]), binary.BigEndian.Uint64(b[48:])
	a.cookie = cookie(b[56:])
	from, holder := b[answerHead:answerHead+int(b[5])], b[answerHead+int(b[5]):]
	a.From, a.Promise.Holder = mandate.ID(bytes.Clone(from)), mandate.ID(bytes.Clone(holder))
	return a, true
}
