package datapath_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
)

// latencies are the one-way latencies of the simulated paths.
var latencies = []time.Duration{100 * time.Microsecond, time.Millisecond, 30 * time.Millisecond, 75 * time.Millisecond, 150 * time.Millisecond}

func TestSimultaneousHandshakesMakeASessionWithinASecond(t *testing.T) {
	for _, lower := range []bool{true, false} {
		for _, latency := range latencies {
			t.Run(fmt.Sprintf("lower key %v, round trip %v", lower, 2*latency), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { crossing(t, lower, latency) })
			})
		}
	}
}

func crossing(t *testing.T, lower bool, latency time.Duration) {
	p := newPair(t, orderedKeys(lower))
	for _, e := range p.ends {
		e.wire.delay = latency
	}
	for _, e := range p.ends {
		e.send(t, 1, 2, 3)
	}
	time.Sleep(50 * time.Millisecond)
	for _, e := range p.ends {
		if n := len(e.wire.messages(initiations)); n != 1 {
			t.Fatalf("%d initiations: want 1 of each side", n)
		}
		e.send(t, 4, 5)
	}
	time.Sleep(950 * time.Millisecond)
	for _, e := range p.ends {
		e.send(t, 6)
	}
	time.Sleep(latency + time.Millisecond)
	for i, e := range p.ends {
		e.wants(t, 1, 2, 3, 4, 5, 6)
		if n, what := e.allDrops(); n != 0 {
			t.Errorf("end %d dropped:%s", i, what)
		}
		if n := len(e.wire.messages(initiations)); n > 2 {
			t.Errorf("end %d sent %d initiations: want at most 2", i, n)
		}
	}
	time.Sleep(30 * time.Second) // no initiation may be repeated once there is a session
	for i, e := range p.ends {
		e.wire.forget()
		e.send(t, 7)
		time.Sleep(latency)
		e.other.wants(t, 7)
		if n := len(e.wire.messages(initiations)); n != 0 {
			t.Errorf("end %d sent %d more initiations", i, n)
		}
	}
}

// Even if the latency is longer than on any real path, the session is made within a few round
// trips, not only after seconds.
func TestSimultaneousHandshakesMakeASessionOnASlowPath(t *testing.T) {
	for _, lower := range []bool{true, false} {
		for _, latency := range []time.Duration{200 * time.Millisecond, 300 * time.Millisecond, 600 * time.Millisecond} {
			t.Run(fmt.Sprintf("lower key %v, round trip %v", lower, 2*latency), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPair(t, orderedKeys(lower))
					for _, e := range p.ends {
						e.wire.delay = latency
						e.send(t, 1, 2, 3)
					}
					time.Sleep(6*latency + time.Second)
					for _, e := range p.ends {
						e.wants(t, 1, 2, 3)
						if n := len(e.wire.messages(initiations)); n > 3 {
							t.Errorf("%d initiations", n)
						}
					}
				})
			})
		}
	}
}

// An initiation is repeated early only if both sides have sent one at the same time. Here a's
// initiations are lost, and b starts its handshake later.
func TestHandshakeOfOnlyOneSideIsNotRepeatedEarly(t *testing.T) {
	for _, lower := range []bool{true, false} {
		t.Run(fmt.Sprintf("lower key %v", lower), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, orderedKeys(lower))
				a, b := p.ends[0], p.ends[1]
				a.wire.delay, b.wire.delay = 100*time.Millisecond, 100*time.Millisecond
				a.wire.dropAll(everything)
				a.send(t, 1)
				time.Sleep(3 * time.Second)
				a.wire.dropAll(nil) // a would send its next initiation after 5 s
				a.wire.forget()
				b.send(t, 2)
				time.Sleep(time.Second)
				if n := len(a.wire.messages(initiations)); n != 0 {
					t.Errorf("%d initiations of the end that had been asked: want none", n)
				}
				a.wants(t, 2)
				b.wants(t, 1)
			})
		})
	}
}

// A change of our key may change which side starts again first.
func TestSimultaneousHandshakesMakeASessionAfterAKeyChange(t *testing.T) {
	for _, lower := range []bool{true, false} {
		t.Run(fmt.Sprintf("lower key before %v", lower), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				keys, after := orderedKeys(lower), key{}
				for n := uint32(10); ; n++ { // find a key that compares to the peer's key the other way round
					after = numberedKey(n)
					if (string(after.public[:]) < string(keys[1].public[:])) != lower {
						break
					}
				}
				p := newPair(t, keys)
				a, b := p.ends[0], p.ends[1]
				if err := a.SetKeys(after.private, [32]byte{}); err != nil {
					t.Fatal(err)
				}
				a.key = after
				b.setPeer(t, after, a.place)
				for _, e := range p.ends {
					e.wire.delay = 20 * time.Millisecond
					e.send(t, 1, 2)
				}
				time.Sleep(time.Second)
				for _, e := range p.ends {
					e.wants(t, 1, 2)
				}
			})
		})
	}
}

// --- tests with an unmodified wireguard-go device

// packets is the TUN of a wireguard-go device.
type packets struct {
	in     chan []byte
	events chan tun.Event
	once   sync.Once
	answer func(number uint32) // may be nil
	mu     sync.Mutex
	got    []uint32
}

func (p *packets) File() *os.File { return nil }

func (p *packets) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	b, ok := <-p.in
	if !ok {
		return 0, os.ErrClosed
	}
	sizes[0] = copy(bufs[0][offset:], b)
	return 1, nil
}

func (p *packets) Write(bufs [][]byte, offset int) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range bufs {
		n := binary.BigEndian.Uint32(b[offset+28:])
		p.got = append(p.got, n)
		if p.answer != nil {
			p.answer(n)
		}
	}
	return len(bufs), nil
}

func (*packets) MTU() (int, error)          { return 1420, nil }
func (*packets) Name() (string, error)      { return "wg", nil }
func (p *packets) Events() <-chan tun.Event { return p.events }
func (*packets) BatchSize() int             { return 1 }
func (p *packets) Close() error {
	p.once.Do(func() { close(p.in); close(p.events) })
	return nil
}

func TestSimultaneousHandshakesWithWireGuardGoMakeASession(t *testing.T) {
	for _, lower := range []bool{true, false} {
		for _, latency := range append(latencies[:4:4], 90*time.Millisecond) {
			t.Run(fmt.Sprintf("lower key %v, round trip %v", lower, 2*latency), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { crossingWireGuardGo(t, lower, latency) })
			})
		}
	}
}

func crossingWireGuardGo(t *testing.T, lower bool, latency time.Duration) {
	keys := orderedKeys(lower)
	p := newPair(t, keys)
	a, b := p.ends[0], p.ends[1]
	b.Close()
	theirs := &wire{Bind: p.network.Bind(b.place.Addr()), delay: latency}
	a.wire.delay = latency
	packets := &packets{in: make(chan []byte, 10), events: make(chan tun.Event)}
	dev := device.NewDevice(packets, theirs, device.NewLogger(device.LogLevelSilent, ""))
	defer dev.Close()
	if err := dev.IpcSet(fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nendpoint=%s\nallowed_ip=%s\n",
		hex.EncodeToString(keys[1].private[:]), b.place.Port(), hex.EncodeToString(keys[0].public[:]), a.place, pairPlan[0].seen)); err != nil {
		t.Fatal(err)
	}
	datapath.WithoutFinalizers(dev.LookupPeer(keys[0].public))
	if err := dev.Up(); err != nil {
		t.Fatal(err)
	}
	for n := range uint32(3) {
		a.send(t, n)
		packets.in <- numbered(a.to, podOf(0), 100+n, 100)
	}
	time.Sleep(time.Second)
	synctest.Wait()
	packets.mu.Lock()
	defer packets.mu.Unlock()
	if fmt.Sprint(packets.got) != "[0 1 2]" {
		t.Errorf("wireguard-go got %v: want [0 1 2]", packets.got)
	}
	a.mu.Lock()
	slices.Sort(a.got) // wireguard-go empties its queue with two goroutines, which may overtake each other
	a.mu.Unlock()
	a.wants(t, 100, 101, 102)
	if n := len(theirs.messages(initiations)) + len(a.wire.messages(initiations)); n < 3 {
		t.Errorf("%d initiations: these have not crossed", n)
	}
}

// --- cookies

// initiationFor returns an initiation with random content, but with a mac1 that is right for the
// receiver (section 5.4.4).
func initiationFor(public [32]byte, n uint32) []byte {
	m := make([]byte, device.MessageInitiationSize)
	m[0] = 1
	binary.LittleEndian.PutUint32(m[4:], n)
	copy(m[8:], random(32))
	binary.LittleEndian.PutUint32(m[8:], n)
	var g device.CookieGenerator
	g.Init(public)
	g.AddMacs(m)
	return m
}

// flood sends 5,000 initiations a second to an end, until the test ends.
func (p *pair) flood(t *testing.T, to *end, offer func(m [][]byte)) {
	stop := make(chan struct{})
	var flooding sync.WaitGroup
	flooding.Go(func() {
		for n := uint32(0); ; n += 5 {
			var flood [][]byte
			for i := range uint32(5) {
				flood = append(flood, initiationFor(to.key.public, n+i))
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				offer(flood)
			}
		}
	})
	t.Cleanup(func() { close(stop); flooding.Wait() })
}

func (p *pair) floodFromElsewhere(t *testing.T, to *end) {
	bad := p.stranger(t, "192.0.2.66")
	p.flood(t, to, func(m [][]byte) { _ = bad.Send(m, to.wire.Endpoint(to.place)) })
}

// hasCookie reports whether an initiation was made with a cookie.
func hasCookie(m message) bool { return string(m.b[132:]) != string(make([]byte, 16)) }

// A peer at its known address is answered at once while initiations from other addresses flood
// the gateway.
func TestAKnownPeerReconnectsDuringAFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		p.floodFromElsewhere(t, b)
		time.Sleep(450*time.Millisecond + 300*time.Microsecond)
		a.send(t, 1)
		time.Sleep(10 * time.Millisecond)
		b.wants(t, 1)
		if n := len(b.wire.messages(cookies)); n == 0 {
			t.Error("no cookie was sent: this was no load")
		}
		if list := a.wire.messages(initiations); len(list) != 1 {
			t.Errorf("%d initiations of the peer: want 1", len(list))
		}
	})
}

// A Service relays the messages of all peers, and also a flood, from one address. A peer that
// restarts at its previous port is answered at once, whether the flood comes from strangers or
// from another peer behind the relay.
func TestAKnownPeerBehindARelayReconnectsDuringAFlood(t *testing.T) {
	for _, name := range []string{"strangers", "another peer"} {
		t.Run(name, func(t *testing.T) {
			inPair(t, func(t *testing.T, p *pair, a, b *end) {
				relay := a.place.Addr()
				b.SetRelays(func(addr netip.Addr) bool { return addr == relay })
				r, port := datapath.NewReceiver(b.Tunnel), uint16(10_000)
				at := func() conn.Endpoint { return b.wire.Endpoint(netip.AddrPortFrom(relay, port)) }
				if name == "another peer" {
					c := p.third(t)
					time.Sleep(2 * time.Second) // the peer may move only after this time
					r.Receive([][]byte{c.Seal(b.key.public, nil)}, at())
				}
				p.flood(t, b, func(m [][]byte) {
					if r.Receive(m, at()); name == "strangers" {
						port++
					}
				})
				time.Sleep(450*time.Millisecond + 300*time.Microsecond)
				a.wire.forget()
				a.setPeers(t)
				a.setPeer(t, b.key, b.place)
				a.send(t, 1)
				time.Sleep(10 * time.Millisecond)
				b.wants(t, 1)
				if n := b.drops(natengine.Inbound, natengine.DropHandshakeQueue); n < 1000 {
					t.Errorf("%d initiations counted as beyond the budget: this was no load", n)
				}
				if list := a.wire.messages(initiations); len(list) != 1 {
					t.Errorf("%d initiations of the peer: want 1", len(list))
				}
			})
		})
	}
}

// roam sends 40,000 initiations from e to the other end in ten seconds: 20 from each of 2,000
// addresses. At each address it first sends a data message.
func (e *end) roam(t *testing.T, to *end, nth func(i int) netip.AddrPort) {
	t.Helper()
	r := datapath.NewReceiver(to.Tunnel)
	for i := range 2000 {
		from := to.wire.Endpoint(nth(i))
		r.Receive([][]byte{e.Seal(to.key.public, nil)}, from)
		var flood [][]byte
		for n := range uint32(20) {
			flood = append(flood, initiationFor(to.key.public, 20*uint32(i)+n))
		}
		r.Receive(flood, from)
		time.Sleep(5 * time.Millisecond)
	}
}

// A peer that roams has the budget of only one address at a time. Its other initiations use the
// budget of strangers. Meanwhile, a restarted peer is connected again at once.
func TestRoamingPeerGetsTheHandshakeBudgetOfOneAddress(t *testing.T) {
	relay := netip.MustParseAddr("198.18.255.1")
	for _, tc := range []struct {
		name string
		nth  func(i int) netip.AddrPort
	}{
		{"IPv4", func(i int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}), 5871)
		}},
		{"one network of IPv6", func(i int) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 14: byte(i >> 8), 15: byte(i)}), 5871)
		}},
		{"ports of a relay", func(i int) netip.AddrPort { return netip.AddrPortFrom(relay, uint16(10_000+i)) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, orderedKeys(true))
				a, b := p.ends[0], p.ends[1]
				c := p.third(t)
				b.SetRelays(func(addr netip.Addr) bool { return addr == relay })
				b.setPeers(t, datapath.Peer{State: b.state(t, "0"), Key: a.key.public, Endpoint: a.place},
					datapath.Peer{State: b.state(t, "2"), Key: c.key.public, Endpoint: c.place})
				before := b.drops(natengine.Inbound, natengine.DropHandshakeRefused)
				var restart sync.WaitGroup
				restart.Go(func() {
					time.Sleep(5*time.Second + 300*time.Microsecond)
					a.send(t, 1)
					time.Sleep(10 * time.Millisecond)
					b.mu.Lock()
					defer b.mu.Unlock()
					if !slices.Equal(b.got, []uint32{1}) {
						t.Errorf("packets %v of the peer came within 10 ms", b.got)
					}
				})
				c.roam(t, b, tc.nth)
				restart.Wait()
				synctest.Wait()
				// The budget of an address can be used six times: a burst, plus the tokens of two
				// seconds. In addition, there is the budget of strangers.
				most := uint64(6*(20+20) + 100 + 10*200)
				if n := b.drops(natengine.Inbound, natengine.DropHandshakeRefused) - before; n > most {
					t.Errorf("the device had to read %d initiations of one peer: want %d at most", n, most)
				}
			})
		})
	}
}

// With a cookie, a peer at an unknown address connects during a flood, and so does a peer whose
// address the flood forges.
func TestPeerConnectsWithACookieDuringAFlood(t *testing.T) {
	for _, forged := range []bool{false, true} {
		t.Run(fmt.Sprintf("forged=%v", forged), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, orderedKeys(true))
				a, b := p.ends[0], p.ends[1]
				if forged {
					r := datapath.NewReceiver(b.Tunnel)
					p.flood(t, b, func(m [][]byte) { r.Receive(m, b.wire.Endpoint(a.place)) })
				} else {
					b.setPeer(t, a.key, netip.MustParseAddrPort("192.0.2.99:1"))
					p.floodFromElsewhere(t, b)
				}
				time.Sleep(450*time.Millisecond + 300*time.Microsecond)
				a.send(t, 1)
				time.Sleep(rekeyTimeout + mostJitter + time.Second)
				b.wants(t, 1)
				list := a.wire.messages(initiations)
				if len(list) != 2 || hasCookie(list[0]) || !hasCookie(list[1]) {
					t.Errorf("%d initiations: want two, of which the second shows the cookie", len(list))
				}
				if n := b.drops(natengine.Inbound, natengine.DropHandshakeQueue); n < 1000 {
					t.Errorf("%d initiations counted as beyond the budget", n)
				}
			})
		})
	}
}

// provenFor is like initiationFor, but the initiation carries the cookie that its receiver would
// issue to its source.
func provenFor(to *end, n uint32, from conn.Endpoint) []byte {
	m := initiationFor(to.key.public, n)
	var g device.CookieGenerator
	g.Init(to.key.public)
	g.AddMacs(m)
	g.ConsumeReply(to.Cookie(m, from))
	g.AddMacs(m)
	return m
}

// Several peers share an address. A host behind that address uses many ports, and gets a cookie for
// each port.
func TestPortsOfOneAddressShareOneBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		a, b := p.ends[0], p.ends[1]
		c := p.third(t)
		a.Handshake(b.key.public)
		time.Sleep(3 * time.Second) // both peers may move only after this time
		synctest.Wait()
		at := netip.MustParseAddr("192.0.2.66")
		r := datapath.NewReceiver(b.Tunnel)
		for _, e := range []*end{a, c} {
			r.Receive([][]byte{e.Seal(b.key.public, nil)}, b.wire.Endpoint(netip.AddrPortFrom(at, 1)))
		}
		before := b.drops(natengine.Inbound, natengine.DropHandshakeRefused)
		for port := range uint16(200) {
			from := b.wire.Endpoint(netip.AddrPortFrom(at, 1000+port))
			var flood [][]byte
			for n := range uint32(20) {
				flood = append(flood, provenFor(b, 20*uint32(port)+n, from))
			}
			r.Receive(flood, from)
		}
		time.Sleep(time.Second) // the device pauses between batches
		synctest.Wait()
		const want = 2*20 + 2*20 // bursts of the two peers' budgets: known and proven
		if n := b.drops(natengine.Inbound, natengine.DropHandshakeRefused) - before; n != want {
			t.Errorf("the device had to read %d initiations from one address: want %d", n, want)
		}
	})
}

// A peer knows one index of ours, that of its session, and could flood us with cookie replies to
// that index.
func TestCookieRepliesOfAPeerAreRateLimited(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		reply := make([]byte, device.MessageCookieReplySize)
		reply[0] = device.MessageCookieReplyType
		copy(reply[4:8], a.Seal(b.key.public, nil)[4:8])
		time.Sleep(2 * time.Second) // the budget is full again after the first handshake
		const n = 5000
		r := datapath.NewReceiver(b.Tunnel)
		for i := range uint32(1000) { // a host that forges a's address sends these; they must not use the budget of cookie replies
			r.Receive([][]byte{initiationFor(b.key.public, i)}, b.wire.Endpoint(a.place))
		}
		before := b.drops(natengine.Inbound, natengine.DropHandshakeQueue)
		if before == 0 {
			t.Fatal("the address of a has room in its budget")
		}
		r.Receive(slices.Repeat([][]byte{reply}, n), b.wire.Endpoint(a.place))
		if got := b.drops(natengine.Inbound, natengine.DropHandshakeQueue) - before; got != n-20 {
			t.Errorf("%d of %d counted as beyond the budget: want %d", got, n, n-20)
		}
	})
}

// Anybody can request a cookie, so the rate of cookies is limited.
func TestCookiesAreSentAtABoundedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		b := p.ends[1]
		r, from := datapath.NewReceiver(b.Tunnel), b.wire.Endpoint(netip.MustParseAddrPort("192.0.2.66:1"))
		for i := range uint32(500) { // 50,000 initiations in half a second
			var flood [][]byte
			for n := range uint32(100) {
				flood = append(flood, initiationFor(b.key.public, 100*i+n))
			}
			r.Receive(flood, from)
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		if n := len(b.wire.messages(cookies)); n < 4000 || n > 5200 {
			t.Errorf("%d cookies in half a second: want 5,000, and 200 at once", n)
		}
	})
}

func TestEachRefusedHandshakeIsCounted(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		s := p.stranger(t, "192.0.2.66")
		response := make([]byte, device.MessageResponseSize)
		response[0] = 2
		binary.LittleEndian.PutUint32(response[8:], 4711)
		var g device.CookieGenerator
		g.Init(b.key.public)
		g.AddMacs(response)
		b.sendFrom(t, s, initiationFor(a.key.public, 1), initiationFor(b.key.public, 2), response)
		for reason, want := range map[natengine.Drop]uint64{natengine.DropHandshakeKey: 1, natengine.DropHandshakeRefused: 2} {
			if n := b.drops(natengine.Inbound, reason); n != want {
				t.Errorf("%d counted as %s: want %d", n, reason, want)
			}
		}
		if n, what := b.allDrops(); n != 3 {
			t.Errorf("counted:%s", what)
		}
	})
}

// A peer has a budget at its configured address and at the address where it was last heard, until
// it is removed. It moves to another address at most once in two seconds. Behind a relay, it has a
// budget only at its own port.
func TestAPeerIsKnownAtItsConfiguredAndLastAddress(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		elsewhere := netip.MustParseAddr("192.0.2.66")
		r := datapath.NewReceiver(b.Tunnel)
		knows := func(addr netip.Addr, port uint16, want bool) {
			t.Helper()
			if at := netip.AddrPortFrom(addr, port); b.KnowsPeer(at) != want {
				t.Errorf("%s known %v: want %v", at, !want, want)
			}
		}
		moves := func(port uint16) {
			r.Receive([][]byte{a.Seal(b.key.public, numbered(podOf(0), podOf(1), 1, 60))}, b.wire.Endpoint(netip.AddrPortFrom(elsewhere, port)))
		}
		knows(a.place.Addr(), 1, true)
		knows(elsewhere, 1, false)
		moves(1)
		knows(elsewhere, 1, false)
		time.Sleep(2 * time.Second)
		moves(1)
		knows(elsewhere, 1, true)
		knows(elsewhere, 2, true)
		b.SetRelays(func(at netip.Addr) bool { return at == elsewhere })
		knows(elsewhere, 1, true)
		knows(elsewhere, 2, false)
		moves(2)
		knows(elsewhere, 2, false)
		time.Sleep(2 * time.Second)
		moves(2)
		knows(elsewhere, 1, false)
		knows(elsewhere, 2, true)
		if err := b.SetPeers(nil); err != nil {
			t.Fatal(err)
		}
		knows(elsewhere, 2, false)
		b.SetRelays(func(netip.Addr) bool { return false })
		knows(elsewhere, 2, false)
		knows(a.place.Addr(), 1, false)
		if n := b.NumLocations(); n != 0 {
			t.Errorf("%d addresses of peers are still stored: want none", n)
		}
	})
}

func TestBudgetAllowsItsBurstAndThenItsRate(t *testing.T) {
	const interval, burst = 100 * time.Millisecond, 20
	var b datapath.Budgets
	now := time.Unix(1, 0)
	one, other := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	spend := func(addr netip.Addr, n int) (got int) {
		for range n {
			if b.Spend(addr, false, now, interval, burst) {
				got++
			}
		}
		return got
	}
	for i, tc := range []struct {
		after time.Duration
		addr  netip.Addr
		want  int
	}{{0, one, burst}, {0, other, burst}, {interval, one, 1}, {interval / 2, one, 0}, {interval / 2, one, 1}, {time.Hour, one, burst}} {
		now = now.Add(tc.after)
		if got := spend(tc.addr, 50); got != tc.want {
			t.Errorf("step %d: %d spent, want %d", i, got, tc.want)
		}
	}
	for i := range 100_000 {
		b.Spend(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), true, now, interval, burst)
	}
	if n := b.Len(); n > datapath.MaxBudgets {
		t.Errorf("%d budgets are remembered", n)
	}
	now = now.Add(time.Hour)
	for i := range 100 {
		b.Spend(netip.AddrFrom4([4]byte{11, 0, 0, byte(i)}), true, now, interval, burst)
	}
	if n := b.Len(); n > 200 {
		t.Errorf("%d budgets are remembered that are not spent", n)
	}
}

// crowd returns a tunnel with n peers, at crowdAt(0) and so on. The tunnel is not up, so nothing
// takes messages from its queues.
func crowd(t *testing.T, n int) (*datapath.Tunnel, *natengine.Engine) {
	t.Helper()
	var all []natengine.Peer
	for i := range n {
		p := rules(fmt.Sprint(i))
		p.RemotePods = []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + i), 0, 0}), 16)}
		p.RemoteExternal = nil
		all = append(all, p)
	}
	e := newEngine(t, all...)
	d := newDevice(t, newScript(), e, datapath.Options{})
	var peers []datapath.Peer
	for i, state := range e.Peers() {
		peers = append(peers, datapath.Peer{State: state, Key: newKey(byte(i + 1)).public, Endpoint: crowdAt(i)})
	}
	if err := d.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	return d, e
}

func crowdAt(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), 1)
}

func TestHandshakesBeyondTheQueueAreCounted(t *testing.T) {
	const peers, burst = 60, 20 // burst is the number of messages that an address may send at once
	d, e := crowd(t, peers)
	r, wire := datapath.NewReceiver(d), &memlink.Bind{}
	for i := range peers {
		var batch [][]byte
		for n := range uint32(burst) {
			batch = append(batch, initiationFor([32]byte{}, n))
		}
		r.Receive(batch, wire.Endpoint(crowdAt(i)))
	}
	if n := drops(e, natengine.Inbound, natengine.DropHandshakeQueue); n != peers*burst-1024 {
		t.Errorf("%d counted as handshake_queue: want %d", n, peers*burst-1024)
	}
}

// Handshakes that were made for another key, or that exceed the budget of their source, do not take
// the place of a handshake from a peer at another address.
func TestForgedHandshakesDisplaceNoHandshakeOfAPeer(t *testing.T) {
	victim, honest, elsewhere := crowdAt(0), crowdAt(1), netip.MustParseAddrPort("192.0.2.66:1")
	key, ours := [32]byte{1}, [32]byte{}
	for _, tc := range []struct {
		name   string
		public [32]byte
		from   netip.AddrPort
		reason natengine.Drop
		passed uint64
	}{
		{"for another key, from a peer's address", key, victim, natengine.DropHandshakeKey, 0},
		{"for another key, from elsewhere", key, elsewhere, natengine.DropHandshakeKey, 0},
		{"beyond the budget, from a peer's address", ours, victim, natengine.DropHandshakeQueue, 20},
		{"beyond the budget, from elsewhere", ours, elsewhere, natengine.DropHandshakeQueue, 100},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, e := crowd(t, 2)
			r, wire := datapath.NewReceiver(d), &memlink.Bind{}
			const n = 5000
			flood := make([][]byte, n)
			for i := range flood {
				flood[i] = initiationFor(tc.public, uint32(i))
			}
			r.Receive(flood, wire.Endpoint(tc.from))
			if got := drops(e, natengine.Inbound, tc.reason); got != n-tc.passed {
				t.Errorf("%d of %d counted as %s, want %d", got, n, tc.reason, n-tc.passed)
			}
			before := drops(e, natengine.Inbound, natengine.DropHandshakeQueue)
			r.Receive([][]byte{initiationFor(ours, n)}, wire.Endpoint(honest))
			if got := drops(e, natengine.Inbound, natengine.DropHandshakeQueue); got != before {
				t.Error("the handshake of the peer at the other address was dropped")
			}
		})
	}
}
