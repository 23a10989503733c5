package datapath

import (
	"fmt"
	"testing"

	"golang.org/x/crypto/chacha20poly1305"
)

// BenchmarkCipher measures only the ChaCha20-Poly1305 encryption of one packet.
func BenchmarkCipher(b *testing.B) {
	aead, err := chacha20poly1305.New(make([]byte, chacha20poly1305.KeySize))
	if err != nil {
		b.Fatal(err)
	}
	for _, size := range []int{64, 1420, 8920} {
		var nonce [12]byte
		m := make([]byte, headerLen+size+tagLen)
		sealed := aead.Seal(m[:headerLen], nonce[:], m[headerLen:headerLen+size], nil)
		b.Run(fmt.Sprintf("seal/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				aead.Seal(m[:headerLen], nonce[:], m[headerLen:headerLen+size], nil)
			}
		})
		b.Run(fmt.Sprintf("open/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			into := make([]byte, 0, size)
			for b.Loop() {
				if _, err := aead.Open(into, nonce[:], sealed[headerLen:], nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
