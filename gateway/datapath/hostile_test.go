package datapath_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// badMessages are the kinds of messages that end b must refuse. build returns message number n,
// for a session of end b with end e.
var badMessages = []struct {
	name   string
	reason natengine.Drop
	known  bool // the drop is counted for that peer
	n      int
	build  func(e *end, n int) []byte
}{
	{"data messages below 32 octets", natengine.DropTunnelShort, false, 28, func(_ *end, n int) []byte {
		return append([]byte{4, 0, 0, 0}, make([]byte, n%28)...)
	}},
	{"less than a type", natengine.DropTunnelType, false, 4, func(_ *end, n int) []byte { return []byte{4, 0, 0, 0}[:n%4] }},
	{"unknown types", natengine.DropTunnelType, false, 5, func(_ *end, n int) []byte {
		m := make([]byte, 148)
		binary.LittleEndian.PutUint32(m, []uint32{0, 5, 255, 1 << 8, 4 | 1<<24}[n%5])
		return m
	}},
	{"handshakes of a wrong length", natengine.DropTunnelType, false, 6, func(_ *end, n int) []byte {
		m := make([]byte, []int{147, 149, 91, 93, 63, 65}[n%6])
		m[0] = byte(1 + n%6/2)
		return m
	}},
	{"unknown receiver indices", natengine.DropTunnelSession, false, 50, func(e *end, n int) []byte {
		m := e.Seal(e.other.key.public, make([]byte, 64))
		binary.LittleEndian.PutUint32(m[4:], binary.LittleEndian.Uint32(m[4:])+1+uint32(n))
		return m
	}},
	{"forged content", natengine.DropTunnelForged, true, 50, func(e *end, n int) []byte {
		m := datapath.SealWith(e.session(), uint64(1<<40+n), make([]byte, 64))
		m[20] ^= 1
		return m
	}},
	{"forged keepalives", natengine.DropTunnelForged, true, 16, func(e *end, n int) []byte {
		m := datapath.SealWith(e.session(), uint64(1<<40+n), nil)
		m[16+n%16] ^= 1
		return m
	}},
	{"another version of IP", natengine.DropMalformed, true, 14, func(e *end, n int) []byte {
		b := numbered(e.from, e.to, 1, 100)
		b[0] = []byte{0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15}[n%14]<<4 | 5
		return e.Seal(e.other.key.public, b)
	}},
	{"IPv4 longer than its message", natengine.DropMalformed, true, 1, func(e *end, _ int) []byte {
		b := numbered(e.from, e.to, 1, 96)
		binary.BigEndian.PutUint16(b[2:], 97)
		return e.Seal(e.other.key.public, b)
	}},
	{"IPv4 shorter than its header", natengine.DropMalformed, true, 20, func(e *end, n int) []byte {
		b := numbered(e.from, e.to, 1, 96)
		binary.BigEndian.PutUint16(b[2:], uint16(n%20))
		return e.Seal(e.other.key.public, b)
	}},
	{"IPv6 longer than its message", natengine.DropMalformed, true, 2, func(e *end, n int) []byte {
		b := numbered(netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), 1, 96)
		binary.BigEndian.PutUint16(b[4:], []uint16{57, 65535}[n%2])
		return e.Seal(e.other.key.public, b)
	}},
	{"less than a header", natengine.DropMalformed, true, 39, func(e *end, n int) []byte {
		b := numbered(netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2"), 1, 96)[:1+n%39]
		if n%39 < 19 {
			b[0] = 0x45
		}
		return e.Seal(e.other.key.public, b)
	}},
	{"sources of another peer", natengine.DropSource, true, 3, func(e *end, n int) []byte {
		return e.Seal(e.other.key.public, numbered(netip.MustParseAddr("10.82.16.7"), podOf(1), uint32(n), 100))
	}},
	{"sources that belong to no peer", natengine.DropSource, true, 3, func(e *end, n int) []byte {
		return e.Seal(e.other.key.public, numbered(netip.MustParseAddr("10.99.0.7"), podOf(1), uint32(n), 100))
	}},
}

func TestEachBadMessageIsCountedOnceWithItsReason(t *testing.T) {
	for _, kind := range badMessages {
		t.Run(kind.name, func(t *testing.T) {
			inPair(t, func(t *testing.T, p *pair, a, b *end) {
				p.third(t)
				s := p.stranger(t, "192.0.2.66")
				for i := range kind.n {
					b.sendFrom(t, s, kind.build(a, i))
				}
				var n uint64
				if kind.known {
					n = b.state(t, "0").Drops(natengine.Inbound, kind.reason)
				} else {
					n = b.engine.Stats().NoPeerDrops[natengine.Inbound][kind.reason]
				}
				if all, what := b.allDrops(); n != uint64(kind.n) || all != n {
					t.Errorf("%d counted as %s, of all:%s: want %d", n, kind.reason, what, kind.n)
				}
				a.send(t, 5)
				b.wants(t, 5)
			})
		})
	}
}

func TestAReplayedMessageIsRefusedFromAnyAddress(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		a.wire.forget()
		a.send(t, 1, 2, 3)
		b.wants(t, 1, 2, 3)
		recorded := a.wire.messages(data)
		s := p.stranger(t, "192.0.2.66")
		want := uint64(0)
		again := func() {
			t.Helper()
			for _, m := range recorded {
				b.sendFrom(t, s, m.b, m.b)
				if err := s.Send([][]byte{m.b}, b.wire.Endpoint(netip.MustParseAddrPort("[2001:db8::2]:5871"))); err != nil {
					t.Fatal(err) // this message went to b's other socket
				}
				want += 3
			}
			b.wants(t)
			if n := b.state(t, "0").Drops(natengine.Inbound, natengine.DropTunnelReplay); n != want {
				t.Errorf("%d counted as replayed: want %d", n, want)
			}
		}
		again()
		if at := b.Stats()[a.key.public].Endpoint; at != a.place {
			t.Errorf("the peer is at %s by a replayed message: want %s", at, a.place)
		}
		old := a.session()
		time.Sleep(rekeyAfterTime + time.Second)
		a.send(t, 4)
		time.Sleep(time.Second)
		b.wants(t, 4)
		if a.session() == old {
			t.Fatal("no second session")
		}
		a.send(t, 5)
		b.wants(t, 5)
		again() // now b has a newer session
	})
}

func TestForgedMessagesDoNotMoveTheReplayWindow(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		s := p.stranger(t, "192.0.2.66")
		for n := range 100 {
			m := datapath.SealWith(a.session(), uint64(1<<50+n*10000), numbered(a.from, a.to, 9, 100))
			m[len(m)-1] ^= 0x80
			b.sendFrom(t, s, m)
		}
		a.send(t, 1)
		b.wants(t, 1)
	})
}

func TestReplayWindowAcceptsEightThousandMessagesInAnyOrder(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		s := p.stranger(t, "192.0.2.66")
		const n = 8000
		var messages [][]byte
		for i := range uint32(n) {
			messages = append(messages, a.Seal(b.key.public, numbered(podOf(0), a.to, i, 60)))
		}
		rng := rand.New(rand.NewPCG(1, 2))
		rng.Shuffle(n, func(i, j int) { messages[i], messages[j] = messages[j], messages[i] })
		counts := map[uint32]int{}
		b.on = func(number uint32) { counts[number]++ }
		for range 3 {
			for i := 0; i < n; i += 100 {
				b.sendFrom(t, s, messages[i:i+100]...)
			}
		}
		for i := range uint32(n) {
			if counts[i] != 1 {
				t.Fatalf("packet %d came %d times", i, counts[i])
			}
		}
		if d := b.state(t, "0").Drops(natengine.Inbound, natengine.DropTunnelReplay); d != 2*n {
			t.Errorf("%d counted as replayed: want %d", d, 2*n)
		}
		old := datapath.SealWith(a.session(), 1<<20, numbered(podOf(0), a.to, 1<<20, 60))
		b.sendFrom(t, s, old, datapath.SealWith(a.session(), 1<<20-8128, numbered(podOf(0), a.to, 1, 60)), datapath.SealWith(a.session(), 1<<20-8129, numbered(podOf(0), a.to, 2, 60)))
		if counts[1<<20] != 1 || counts[1] != 2 || counts[2] != 1 {
			t.Error("the window has another size than 8128")
		}
	})
}

// A packet belongs to the peer whose key decrypted it. A source address of another peer is
// refused, in both address families.
func TestAPacketWithAnotherPeersSourceIsDropped(t *testing.T) {
	v6 := func(i, j int) natengine.Peer {
		prefix := func(format string, n int) netip.Prefix { return netip.MustParsePrefix(fmt.Sprintf(format, n)) }
		size := []string{"/64", "/60", "/112"}
		return natengine.Peer{
			ID:         fmt.Sprint(j),
			RemotePods: []netip.Prefix{prefix("fd00:c:0:%d00::"+size[j], j)}, RemoteExternal: []netip.Prefix{prefix("fd00:e:0:%d00::/64", j)},
			Pods:     []natengine.Remap{{From: prefix("fd00:a:0:%d00::"+size[i], i), To: prefix("fd00:c:0:%d00::"+size[i], i)}},
			External: []netip.Prefix{prefix("fd00:e:0:%d00::/64", i)},
		}
	}
	for _, tc := range []struct {
		family            string
		rules             func(i, j int) natengine.Peer
		own, foreign, dst string
	}{
		{"IPv4", rulesOf, "10.71.0.7", "10.82.16.7", "10.80.128.2"},
		{"IPv6", v6, "fd00:c:0:000::7", "fd00:c:0:200::7", "fd00:c:0:100::2"},
	} {
		t.Run(tc.family, func(t *testing.T) {
			inPair(t, func(t *testing.T, p *pair, a, b *end) {
				c := p.third(t)
				if err := b.engine.SetPeers([]natengine.Peer{tc.rules(1, 0), tc.rules(1, 2)}); err != nil {
					t.Fatal(err)
				}
				own, foreign, dst := netip.MustParseAddr(tc.own), netip.MustParseAddr(tc.foreign), netip.MustParseAddr(tc.dst)
				s := p.stranger(t, "192.0.2.66")
				b.sendFrom(t, s, a.Seal(b.key.public, numbered(own, dst, 1, 100)), c.Seal(b.key.public, numbered(foreign, dst, 2, 100)))
				b.wants(t, 1, 2)
				b.sendFrom(t, s, a.Seal(b.key.public, numbered(foreign, dst, 3, 100)), c.Seal(b.key.public, numbered(own, dst, 4, 100)))
				b.wants(t)
				for _, id := range []string{"0", "2"} {
					if n := b.state(t, id).Drops(natengine.Inbound, natengine.DropSource); n != 1 {
						t.Errorf("%d counted for peer %s: want 1", n, id)
					}
				}
				if n, what := b.allDrops(); n != 2 {
					t.Errorf("dropped:%s: want 2", what)
				}
			})
		})
	}
}

// A range moves from one peer to another while packets of the first peer arrive. Each packet is
// checked against the old rules or against the new ones, and never against a mixture of both.
func TestMovedNetworkIsNeverCheckedAgainstMixedRules(t *testing.T) {
	p := newPair(t, orderedKeys(true))
	a, b := p.ends[0], p.ends[1]
	a.Handshake(b.key.public)
	for end := time.Now().Add(time.Minute); b.session() == nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	moving := netip.MustParsePrefix("10.82.16.0/20")
	ofA, ofC := rulesOf(1, 0), rulesOf(1, 2)
	ofC.Pods = []natengine.Remap{{From: netip.MustParsePrefix("10.201.64.0/18"), To: ofA.Pods[0].To}} // maps to other pods
	withA, withC := ofA, ofC
	withA.RemotePods = append([]netip.Prefix{moving}, ofA.RemotePods...)
	ofC.RemotePods = []netip.Prefix{netip.MustParsePrefix("10.83.0.0/24")}
	withC.RemotePods = append([]netip.Prefix{moving}, ofC.RemotePods...)
	var passed, wrong atomic.Int64
	right := netip.MustParseAddr("10.200.64.2").As4()
	b.link.OnReceive(func(bufs [][]byte) error {
		if passed.Add(1); [4]byte(bufs[1][16:20]) != right {
			wrong.Add(1)
		}
		return nil
	})
	done := make(chan struct{})
	var moves sync.WaitGroup
	moves.Go(func() {
		for i := 0; ; i++ {
			rules := []natengine.Peer{withA, ofC}
			if i%2 == 1 {
				rules = []natengine.Peer{ofA, withC}
			}
			if err := b.engine.SetPeers(rules); err != nil {
				t.Error(err)
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	packet := numbered(netip.MustParseAddr("10.82.16.7"), podOf(1), 1, 60)
	r, from := datapath.NewReceiver(b.Tunnel), b.wire.Endpoint(a.place)
	rounds := 3000
	if testing.Short() || raceEnabled {
		rounds = 300
	}
	for range rounds {
		var batch [][]byte
		for range 64 {
			batch = append(batch, a.Seal(b.key.public, packet))
		}
		r.Receive(batch, from)
	}
	close(done)
	moves.Wait()
	refused := b.drops(natengine.Inbound, natengine.DropSource)
	t.Logf("%d passed, %d refused", passed.Load(), refused)
	if wrong.Load() != 0 {
		t.Errorf("%d packets of one peer went to the pods of another", wrong.Load())
	}
	if n := uint64(passed.Load()) + refused; n != uint64(rounds*64) {
		t.Errorf("%d packets passed or counted: want %d", n, rounds*64)
	}
}

// --- floods

func TestFloodOfOnePeerDoesNotAffectAnother(t *testing.T) {
	for _, kind := range badMessages {
		t.Run(kind.name, func(t *testing.T) {
			inPair(t, func(t *testing.T, p *pair, a, b *end) {
				c := p.third(t)
				if kind.name == "sources of another peer" {
					kind.build = func(e *end, n int) []byte {
						return e.Seal(e.other.key.public, numbered(podOf(0), podOf(1), uint32(n), 100))
					}
				}
				s := p.stranger(t, "192.0.2.66")
				var want []uint32
				const flood = 3000 // messages per second
				for i := range 100 {
					a.send(t, uint32(i))
					want = append(want, uint32(i))
					var batch [][]byte
					for j := range flood / 100 {
						batch = append(batch, kind.build(c, i*flood/100+j))
					}
					b.sendFrom(t, s, batch...)
					time.Sleep(time.Second / 100)
				}
				b.wants(t, want...)
				if n := b.drops(natengine.Inbound, kind.reason); n != flood {
					t.Errorf("%d counted as %s: want %d", n, kind.reason, flood)
				}
				if n := p.network.Overflowed(); n != 0 {
					t.Errorf("%d lost on the way", n)
				}
				if a.session() == nil || b.Stats()[a.key.public].Endpoint != a.place {
					t.Error("the session of the honest peer has suffered")
				}
			})
		})
	}
}

func TestFloodOfValidInitiationsDoesNotDelayData(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		c := p.third(t)
		s := p.stranger(t, "192.0.2.66")
		const each = 80 // initiations in 10 ms
		rounds := 50
		if testing.Short() || raceEnabled {
			rounds = 10
		}
		var want []uint32
		for i := range rounds {
			var batch [][]byte
			for range each {
				batch = append(batch, c.Initiation(b.key.public))
			}
			if err := s.Send(batch, b.wire.Endpoint(b.place)); err != nil {
				t.Fatal(err)
			}
			a.send(t, uint32(i))
			want = append(want, uint32(i))
			time.Sleep(time.Second / 100)
		}
		b.wants(t, want...)
		a.wants(t)
		b.send(t, 1)
		a.wants(t, 1)
	})
}

// --- many peers

func TestAReconnectedPeerKeepsItsSession(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		peers := 1000
		if testing.Short() || raceEnabled {
			peers = 100
		}
		rules := []natengine.Peer{rulesOf(1, 0)}
		keys := map[string]key{"0": a.key}
		for i := range peers - 1 {
			at := netip.AddrFrom4([4]byte{10, 100, byte(i >> 6), byte(i << 2)})
			id := fmt.Sprintf("away %d", i)
			rules = append(rules, natengine.Peer{
				ID: id, RemotePods: []netip.Prefix{netip.PrefixFrom(at, 30)}, Pods: rules[0].Pods, External: rules[0].External,
			})
			keys[id] = numberedKey(uint32(100 + i))
		}
		if err := b.engine.SetPeers(rules); err != nil {
			t.Fatal(err)
		}
		var list []datapath.Peer
		for _, s := range b.engine.Peers() {
			list = append(list, datapath.Peer{State: s, Key: keys[s.ID()].public, Endpoint: netip.MustParseAddrPort("192.0.2.77:1")})
		}
		b.wire.dropAll(everything)
		b.setPeers(t, list...) // with a wrong endpoint for all of them, including a
		for _, k := range keys {
			b.Handshake(k.public)
		}
		time.Sleep(rekeyTimeout)
		b.wire.dropAll(nil)
		a.SetKeys(a.key.private, [32]byte{})
		a.Close() // restart a
		back := p.newEnd(t, 0, 1, a.key, b.key)
		back.other, b.other = b, back
		back.send(t, 1)
		time.Sleep(time.Second)
		b.wants(t, 1)
		made := b.session()
		for _, k := range keys {
			b.Rest(k.public)
		}
		b.wire.forget()
		back.wire.forget()
		time.Sleep(time.Minute)
		back.send(t, 2)
		b.send(t, 3)
		b.wants(t, 2)
		back.wants(t, 3)
		if b.session() != made {
			t.Error("the session is another one")
		}
		if n := len(b.wire.messages(initiations)); n != 0 {
			t.Errorf("%d initiations after all attempts ended", n)
		}
	})
}

// --- fuzzing

func FuzzReceive(f *testing.F) {
	f.Add([]byte{0, 4, 0, 0, 0}, uint8(0))
	f.Add(bytes.Repeat([]byte{40, 4}, 60), uint8(3))
	f.Add(append([]byte{90}, numbered(podOf(0), podOf(1), 1, 90)...), uint8(255))
	p := newPair(f, orderedKeys(true))
	a, b := p.ends[0], p.ends[1]
	a.Handshake(b.key.public)
	for end := time.Now().Add(time.Minute); a.session() == nil || b.session() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			f.Fatal("no session")
		}
	}
	var delivered atomic.Uint64
	b.link.OnReceive(func([][]byte) error { delivered.Add(1); return nil })
	r, from := datapath.NewReceiver(b.Tunnel), b.wire.Endpoint(a.place)
	// octets are messages, each preceded by its length. A message whose bit in seal is set is
	// encrypted as the content of a data message.
	f.Fuzz(func(t *testing.T, octets []byte, seal uint8) {
		var batch [][]byte
		passed := uint64(0) // messages that are neither counted nor delivered: handshakes and keepalives
		for i := 0; len(octets) > 0; i++ {
			n := min(int(octets[0]), len(octets)-1)
			m := bytes.Clone(octets[1 : 1+n])
			octets = octets[1+n:]
			if seal>>(i%8)&1 == 1 {
				if n == 0 {
					passed++
				}
				m = a.Seal(b.key.public, m)
			} else if len(m) >= 4 {
				switch kind := binary.LittleEndian.Uint32(m); {
				case kind == 1 && n == 148, kind == 2 && n == 92, kind == 3 && n == 64:
					passed++
				}
			}
			batch = append(batch, m)
		}
		before, _ := b.allDrops()
		delivered.Store(0)
		total := uint64(len(batch))
		r.Receive(batch, from)
		after, what := b.allDrops()
		queue := b.drops(natengine.Inbound, natengine.DropHandshakeQueue)
		if after-before+delivered.Load()+passed < total || after-before+delivered.Load() > total {
			t.Errorf("%d messages, of which %d may pass: %d delivered, %d counted (%d of them handshakes):%s",
				total, passed, delivered.Load(), after-before, queue, what)
		}
	})
}
