package datapath

import (
	"encoding/binary"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/internal/noise"
)

// While a preshared key changes, the device's key may change after the device has made a response
// and before it sends the response. The gateway must record the key with which the response was
// made. Otherwise it could report a session with a key that the session does not have.
func TestResponseRecordsThePresharedKeyThatItUses(t *testing.T) {
	previous, key := [32]byte{1}, [32]byte{2}
	for name, step := range map[string]func(*device.Peer) error{
		"before its session": func(*device.Peer) error { return nil },
		"with its session":   (*device.Peer).BeginSymmetricSession,
	} {
		t.Run(name, func(t *testing.T) {
			tunnel, own, far := benchTunnel(t, PresharedKeys{Key: key, Previous: previous, Changing: true}, 1)
			dev := tunnel.current().dev
			var s *preshared
			for _, p := range tunnel.peers.Load().byDevice {
				s = p.preshared
			}
			answer := func() uint32 {
				t.Helper()
				time.Sleep(50 * time.Millisecond) // the device accepts one initiation of a peer in 20 ms
				m, _ := noise.Initiate(far[0], own.PublicKey(), time.Now())
				var initiation device.MessageInitiation
				if _, err := binary.Decode(m, binary.LittleEndian, &initiation); err != nil {
					t.Fatal(err)
				}
				peer := dev.ConsumeMessageInitiation(&initiation)
				if peer == nil {
					t.Fatal("an initiation was refused")
				}
				response, err := dev.CreateMessageResponse(peer)
				if err != nil {
					t.Fatal(err)
				}
				if err := step(peer); err != nil {
					t.Fatal(err)
				}
				return response.Sender
			}
			s.recordResponse(answer())
			if s.sent != key || s.next != previous {
				t.Fatalf("the first response has key %d, the next one would have %d", s.sent[0], s.next[0])
			}
			index := answer()
			s.tryKey()
			s.tryKey()
			s.recordResponse(index)
			if s.sent != previous || s.next != key {
				t.Errorf("a response with the previous key counts as one with key %d, the next one would have %d", s.sent[0], s.next[0])
			}
			s.recordResponse(answer())
			if s.sent != key {
				t.Errorf("the response after it has key %d", s.sent[0])
			}
		})
	}
}

// If two handshakes cross after the keys were replaced, the next response uses one of the current
// keys.
func TestSimultaneousHandshakesUseNoReplacedKey(t *testing.T) {
	tunnel, _, _ := benchTunnel(t, PresharedKeys{Key: [32]byte{1}}, 1)
	for _, p := range tunnel.peers.Load().byDevice {
		s := p.preshared
		s.sent = [32]byte{1}
		s.set(PresharedKeys{Key: [32]byte{3}, Previous: [32]byte{2}, Changing: true})
		if s.handleCrossing(); s.next != [32]byte{3} {
			t.Errorf("the next response has key %d", s.next[0])
		}
	}
}
