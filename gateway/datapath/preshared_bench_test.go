package datapath

import (
	"crypto/ecdh"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/natengine"
)

// benchPeers is the number of peers of a benchmark. A device accepts one handshake of a peer in
// 20 ms, so run it with -benchtime=500x, which uses each peer once.
const benchPeers = 500

// BenchmarkPresharedKey measures the work of each side for a handshake: without a preshared key,
// with one, and while the key changes.
func BenchmarkPresharedKey(b *testing.B) {
	for _, c := range []struct {
		name string
		keys PresharedKeys
	}{{"none", PresharedKeys{}}, {"one", PresharedKeys{Key: [32]byte{1}}}, {"changing", PresharedKeys{Key: [32]byte{1}, Changing: true}}} {
		name, keys := c.name, c.keys
		b.Run("answer/"+name, func(b *testing.B) {
			tunnel, own, far := benchTunnel(b, keys, benchPeers)
			initiations := make([]device.MessageInitiation, benchPeers)
			for i, key := range far {
				m, _ := noise.Initiate(key, own.PublicKey(), time.Now())
				if _, err := binary.Decode(m, binary.LittleEndian, &initiations[i]); err != nil {
					b.Fatal(err)
				}
			}
			b.ResetTimer()
			defer reportProcessorTime(b)()
			for i := range b.N {
				dev := tunnel.current().dev.ConsumeMessageInitiation(&initiations[i%benchPeers])
				if dev == nil {
					b.Fatal("an initiation was refused")
				}
				response, err := tunnel.current().dev.CreateMessageResponse(dev)
				if err != nil {
					b.Fatal(err)
				}
				tunnel.peers.Load().byDevice[dev].preshared.recordResponse(response.Sender)
			}
		})
		if name == "one" {
			continue // in package noise, the responder supports no preshared key
		}
		b.Run("finish/"+name, func(b *testing.B) {
			tunnel, _, far := benchTunnel(b, keys, benchPeers)
			responses := make([][]byte, benchPeers)
			for i, key := range far {
				initiation := tunnel.Initiation([32]byte(key.PublicKey().Bytes()))
				var err error
				if responses[i], _, err = noise.Respond(key, initiation, uint32(i)); err != nil {
					b.Fatal(err)
				}
			}
			b.ResetTimer()
			defer reportProcessorTime(b)()
			for i := range b.N {
				m := responses[i%benchPeers]
				tunnel.current().bind.chooseKey(m)
				var msg device.MessageResponse
				if _, err := binary.Decode(m, binary.LittleEndian, &msg); err != nil {
					b.Fatal(err)
				}
				if tunnel.current().dev.ConsumeMessageResponse(&msg) == nil {
					b.Fatal("a response was refused")
				}
			}
		})
	}
}

func benchTunnel(t testing.TB, keys PresharedKeys, n int) (*Tunnel, *ecdh.PrivateKey, []*ecdh.PrivateKey) {
	engine := natengine.New(natengine.Config{})
	rules := make([]natengine.Peer, n)
	for i := range rules {
		pods := netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24)
		rules[i] = natengine.Peer{ID: fmt.Sprintf("%04d", i), RemotePods: []netip.Prefix{pods}}
	}
	if err := engine.SetPeers(rules); err != nil {
		t.Fatal(err)
	}
	tunnel, own := New(silentLink{}, bind.New(), engine, nil, Options{}), noise.NewKey()
	t.Cleanup(func() { _ = tunnel.Close() })
	if err := tunnel.SetKeys([32]byte(own.Bytes()), [32]byte{}); err != nil {
		t.Fatal(err)
	}
	far, peers := make([]*ecdh.PrivateKey, n), make([]Peer, n)
	for i, state := range engine.Peers() {
		far[i] = noise.NewKey()
		peers[i] = Peer{State: state, Key: [32]byte(far[i].PublicKey().Bytes()), Preshared: keys}
	}
	if err := tunnel.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	for dev := range tunnel.peers.Load().byDevice {
		dev.Start()
	}
	return tunnel, own, far
}
