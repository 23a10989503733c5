package inline

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/crypto/chacha20poly1305"
	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/natengine"
)

var sizes = []int{64, 1420, 8920}

// BenchmarkCipher is the ChaCha20-Poly1305 of one packet, without anything around it.
func BenchmarkCipher(b *testing.B) {
	aead, err := chacha20poly1305.New(make([]byte, chacha20poly1305.KeySize))
	if err != nil {
		b.Fatal(err)
	}
	for _, size := range sizes {
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

// kept is a bind that keeps what was sent last, where it lies.
type kept struct {
	conn.Bind
	messages [][]byte
}

func (k *kept) Send(bufs [][]byte, _ conn.Endpoint) error {
	k.messages = append(k.messages[:0], bufs...)
	return nil
}

// BenchmarkThroughBothEnds seals a batch at one end and opens it at the other: everything that the transport does for a
// packet but reading, writing, NAT and the socket. One operation is one packet.
func BenchmarkThroughBothEnds(b *testing.B) {
	for _, size := range sizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p := newPair(b)
			p.warm(b)
			from, to := p.ends[0].transport, p.ends[1].transport
			const batch = 45 // segments of a TCP superpacket
			wire := &kept{Bind: p.ends[0].tap.Bind}
			p.ends[0].tap.mu.Lock()
			p.ends[0].tap.Bind = wire
			p.ends[0].tap.quiet = true
			p.ends[0].tap.mu.Unlock()
			o := &from.out
			out := p.packet(0, 1, size)
			left := make([][]byte, batch)
			r := newReceiver(to, nil)
			to.path = nowhere{to.path}
			peer := from.peers.Load().byState[p.ends[0].peer]
			start := time.Now()
			peer.sampled = start.Add(time.Hour) // nothing goes through the device
			b.SetBytes(int64(size))
			b.ReportAllocs()
			packets := 0
			for b.Loop() {
				if packets%batch == 0 {
					o.fit(size)
					o.bufs, o.taken, o.used = left, 0, 0
					for range batch {
						o.Take(peer.state, out)
					}
					o.flush()
					if o.left > 0 {
						b.Fatal("not sent inline")
					}
					r.from = incoming{}
					for _, m := range wire.messages {
						if r.accept(m, nil, start) {
							b.Fatal("not received inline")
						}
					}
					r.flush()
				}
				packets++
			}
		})
	}
}

// nowhere is a path that takes what comes.
type nowhere struct{ Path }

func (nowhere) WriteFrom(_ *natengine.PeerState, bufs [][]byte, _ int) (int, error) {
	return len(bufs), nil
}
