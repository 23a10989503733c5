package voting

import (
	"bytes"
	"crypto/ed25519"
	"net/netip"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/mandate"
)

func someAsk() ask {
	return ask{mandate.Ask{Kind: mandate.Claim, From: "gateway-1", Epoch: 7, List: 3, Sent: 12345, Nonce: 1 << 63, Heard: 99, Holds: true},
		cookie{1, 2, 3}, netip.MustParseAddr("10.244.0.9")}
}

func someAnswer() answer {
	return answer{mandate.Answer{From: "node-1", Granted: true, Ended: true, Promise: mandate.Promise{Epoch: 7, Holder: "gateway-1", List: 3},
		Free: 900, Sent: 12345, Nonce: 1 << 63, Incarnation: 99}, cookie{1, 2, 3}}
}

func TestMessagesRoundTrip(t *testing.T) {
	key := KeyOf([32]byte{1})
	b := someAsk().seal(key)
	if got, ok := openAsk(b); !ok || got != someAsk() || !signed(b, key.Public().(ed25519.PublicKey)) {
		t.Errorf("%+v, %v; want %+v", got, ok, someAsk())
	}
	if got, ok := openAnswer(someAnswer().datagram()); !ok || got != someAnswer() {
		t.Errorf("%+v, %v; want %+v", got, ok, someAnswer())
	}
	long := someAsk()
	long.From = mandate.ID(strings.Repeat("x", nameLimit))
	if b := long.seal(key); len(b) != askLimit {
		t.Errorf("the longest ask has %d octets; want %d", len(b), askLimit)
	}
	for i := range b { // no change of a single bit may be accepted
		b[i] ^= 1
		if _, ok := openAsk(b); ok && signed(b, key.Public().(ed25519.PublicKey)) {
			t.Errorf("octet %d is another, and the ask is believed", i)
		}
		b[i] ^= 1
	}
	if signed(b, KeyOf([32]byte{2}).Public().(ed25519.PublicKey)) || signed(b, nil) {
		t.Error("another key, and the ask is believed")
	}
}

func FuzzOpenAsk(f *testing.F) {
	f.Add(someAsk().seal(KeyOf([32]byte{1})))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := openAsk(b)
		if !ok {
			return
		}
		again := a.seal(KeyOf([32]byte{1}))
		if a.addr.Is4() || !a.addr.Is4In6() {
			if text := len(b) - ed25519.SignatureSize; !bytes.Equal(again[:text], b[:text]) {
				t.Errorf("%x\n%x", again[:text], b[:text])
			}
		}
		signed(b, KeyOf([32]byte{1}).Public().(ed25519.PublicKey))
	})
}

func FuzzOpenAnswer(f *testing.F) {
	f.Add(someAnswer().datagram())
	f.Fuzz(func(t *testing.T, b []byte) {
		if a, ok := openAnswer(b); ok && !bytes.Equal(a.datagram(), b) {
			t.Errorf("%x\n%x", a.datagram(), b)
		}
	})
}
