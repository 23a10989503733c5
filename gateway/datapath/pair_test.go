package datapath_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/curve25519"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A wire is the network interface of one end. A test can use it to observe, drop and delay the
// messages that the end sends. A wire has two sockets, and so two receiving goroutines, like a
// gateway with an IPv4 and an IPv6 socket.
type wire struct {
	*memlink.Bind
	second *memlink.Bind

	mu      sync.Mutex
	drop    func(m []byte) bool // reports whether a sent message gets lost; may be nil
	refuse  func(m []byte) bool // reports whether sending a message must fail; may be nil
	see     func(m []byte)      // is called with each sent message, which is then not recorded; may be nil
	delay   time.Duration
	delayed []func()
	sent    []message
}

// message is a recorded message, whether it was dropped or not.
type message struct {
	at time.Time
	b  []byte
}

func (w *wire) Listen(port uint16) ([]func(*bind.Batch, bool) error, uint16, error) {
	first, port, err := w.Bind.Listen(port)
	if err != nil {
		return nil, 0, err
	}
	second, _, err := w.second.Listen(port)
	if err != nil {
		_ = w.Bind.Close()
		return nil, 0, err
	}
	return append(first, second...), port, nil
}

func (w *wire) Close() error {
	if w.second != nil {
		_ = w.second.Close()
	}
	return w.Bind.Close()
}

// Send implements datapath.Wire, and conn.Bind for a device of wireguard-go.
func (w *wire) Send(bufs [][]byte, to conn.Endpoint) error {
	w.mu.Lock()
	now := time.Now()
	var pass [][]byte
	refused := 0
	for _, m := range bufs {
		if w.refuse != nil && w.refuse(m) {
			refused++
			continue
		}
		if w.see != nil {
			w.see(m)
		} else {
			w.sent = append(w.sent, message{now, bytes.Clone(m)})
		}
		if w.drop == nil || !w.drop(m) {
			pass = append(pass, m)
		}
	}
	delay := w.delay
	if delay == 0 && len(pass) == 1 && !anyData(pass[0]) {
		// Delay the answer until wireguard-go has started the timer that repeats the initiation. It
		// starts this timer only after it has sent the initiation.
		delay = 100 * time.Microsecond
	}
	if delay == 0 {
		w.mu.Unlock()
		err := w.Bind.Send(pass, to)
		if err == nil && refused > 0 {
			err = &bind.SendError{Unsent: refused, Err: unix.EMSGSIZE}
		}
		return err
	}
	for i := range pass {
		pass[i] = bytes.Clone(pass[i])
	}
	w.delayed = append(w.delayed, func() { _ = w.Bind.Send(pass, to) }) // lost if the Bind was closed in the meantime
	w.mu.Unlock()
	time.AfterFunc(delay, func() { // each call sends the oldest one, so that messages stay in order
		w.mu.Lock()
		f := w.delayed[0]
		w.delayed = w.delayed[1:]
		w.mu.Unlock()
		f()
	})
	return nil
}

// dropAll makes the wire drop the messages for which f returns true; nil: none.
func (w *wire) dropAll(f func(m []byte) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drop = f
}

// messages returns the recorded messages for which f returns true.
func (w *wire) messages(f func(m []byte) bool) (list []message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.sent {
		if f(m.b) {
			list = append(list, m)
		}
	}
	return list
}

// forget clears the list of recorded messages.
func (w *wire) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent = nil
}

// Kinds of messages (WireGuard paper, section 5.4). The first octet is the type; a keepalive is a
// data message without content.
func initiations(m []byte) bool { return m[0] == 1 }
func cookies(m []byte) bool     { return m[0] == 3 }
func anyData(m []byte) bool     { return m[0] == 4 }
func data(m []byte) bool        { return m[0] == 4 && len(m) > 32 }
func keepalives(m []byte) bool  { return m[0] == 4 && len(m) == 32 }
func everything([]byte) bool    { return true }

// An end is one of two gateways.
type end struct {
	*datapath.Tunnel
	engine *natengine.Engine
	link   *memlink.Link
	wire   *wire
	key    key
	place  netip.AddrPort
	rules  natengine.Peer // our rules for the other end
	other  *end

	from, to netip.Addr // a pod of this cluster, and one of the other cluster as this one sees it

	mu  sync.Mutex
	got []uint32 // numbers of received packets, in order
	on  func(number uint32)
}

// A pair is two gateways connected in memory. Their networks have different sizes.
type pair struct {
	network memlink.Network
	ends    [2]*end
}

// pairPlan has the addresses of three clusters: the two of a pair and a third one.
var pairPlan = [3]struct{ pods, seen, external, wan, wan6 string }{
	{"10.244.0.0/16", "10.71.0.0/16", "10.90.0.0/24", "192.0.2.1", "2001:db8::1"},
	{"10.200.64.0/18", "10.80.128.0/18", "10.91.0.0/20", "192.0.2.2", "2001:db8::2"},
	{"10.250.0.0/20", "10.82.16.0/20", "10.92.0.0/26", "192.0.2.3", "2001:db8::3"},
}

func numberedKey(n uint32) key {
	k := key{private: [32]byte(random(32))}
	binary.BigEndian.PutUint32(k.private[8:], n)
	k.private[0] &= 248
	k.private[31] = k.private[31]&127 | 64
	public, _ := curve25519.X25519(k.private[:], curve25519.Basepoint)
	k.public = [32]byte(public)
	return k
}

// orderedKeys returns two keys. The first one has the lower public key if lower is set, and
// otherwise the higher one.
func orderedKeys(lower bool) [2]key {
	keys := [2]key{numberedKey(1), numberedKey(2)}
	if (bytes.Compare(keys[0].public[:], keys[1].public[:]) < 0) != lower {
		keys[0], keys[1] = keys[1], keys[0]
	}
	return keys
}

func newPair(t testing.TB, keys [2]key) *pair {
	t.Helper()
	p := &pair{}
	for i := range p.ends {
		p.ends[i] = p.newEnd(t, i, 1-i, keys[i], keys[1-i])
	}
	p.ends[0].other, p.ends[1].other = p.ends[1], p.ends[0]
	return p
}

// newEnd returns the gateway of cluster i, with that of cluster j as its only peer.
func (p *pair) newEnd(t testing.TB, i, j int, ours, theirs key) *end {
	t.Helper()
	e := &end{
		engine: natengine.New(natengine.Config{Self4: self, Self6: self6}),
		key:    ours,
		place:  netip.AddrPortFrom(netip.MustParseAddr(pairPlan[i].wan), 5871),
		rules:  rulesOf(i, j),
		from:   netip.MustParsePrefix(pairPlan[i].pods).Addr().Next().Next(),
		to:     podOf(j),
	}
	e.open(t, &p.network, theirs, netip.AddrPortFrom(netip.MustParseAddr(pairPlan[j].wan), 5871), pairPlan[i].wan6)
	return e
}

// rulesOf returns the rules of cluster i for cluster j.
func rulesOf(i, j int) natengine.Peer {
	prefix := netip.MustParsePrefix
	return natengine.Peer{
		ID:         fmt.Sprintf("%d", j),
		RemotePods: []netip.Prefix{prefix(pairPlan[j].seen)}, RemoteExternal: []netip.Prefix{prefix(pairPlan[j].external)},
		Pods:     []natengine.Remap{{From: prefix(pairPlan[i].pods), To: prefix(pairPlan[i].seen)}},
		External: []netip.Prefix{prefix(pairPlan[i].external)},
	}
}

// sibling returns another gateway of the second end's cluster, which has the same key.
func (p *pair) sibling(t testing.TB) *end {
	t.Helper()
	a, b := p.ends[0], p.ends[1]
	e := &end{engine: natengine.New(natengine.Config{Self4: self, Self6: self6}), key: b.key, place: netip.MustParseAddrPort("192.0.2.4:5871"),
		rules: b.rules, from: b.from, to: b.to, other: a}
	e.open(t, &p.network, a.key, a.place, "2001:db8::4")
	return e
}

// third returns a third gateway, which is another peer of the second end and has a session with it.
func (p *pair) third(t testing.TB) *end {
	t.Helper()
	a, b := p.ends[0], p.ends[1]
	c := p.newEnd(t, 2, 1, numberedKey(3), b.key)
	c.other = b
	if err := b.engine.SetPeers([]natengine.Peer{rulesOf(1, 0), rulesOf(1, 2)}); err != nil {
		t.Fatal(err)
	}
	b.setPeers(t, datapath.Peer{State: b.state(t, "0"), Key: a.key.public}, datapath.Peer{State: b.state(t, "2"), Key: c.key.public})
	c.Handshake(b.key.public)
	time.Sleep(time.Second)
	if synctest.Wait(); c.session() == nil {
		t.Fatal("no session with the third gateway")
	}
	return c
}

// state returns the engine's state of a peer.
func (e *end) state(t testing.TB, id string) *natengine.PeerState {
	for _, p := range e.engine.Peers() {
		if p.ID() == id {
			return p
		}
	}
	t.Fatalf("no peer %s", id)
	return nil
}

// open creates and starts the tunnel of an end, with the rules for its peer.
func (e *end) open(t testing.TB, network *memlink.Network, theirs key, place netip.AddrPort, wan6 string) {
	t.Helper()
	e.prepare(t, network, wan6)
	if err := e.engine.SetPeers([]natengine.Peer{e.rules}); err != nil {
		t.Fatal(err)
	}
	if err := e.Up(e.key.private, e.place.Port()); err != nil {
		t.Fatal(err)
	}
	e.setPeer(t, theirs, place)
}

// prepare creates the tunnel of an end, which is not up yet.
func (e *end) prepare(t testing.TB, network *memlink.Network, wan6 string) {
	t.Helper()
	e.link = memlink.NewLink("mem", 1420)
	e.link.OnReceive(e.receive)
	e.wire = &wire{Bind: network.Bind(e.place.Addr()), second: network.Bind(netip.MustParseAddr(wan6))}
	tunnel := datapath.New(e.link, e.wire, e.engine, nil, datapath.Options{})
	t.Cleanup(func() { tunnel.Close() })
	e.Tunnel = tunnel
}

// setPeer makes the other end the only peer.
func (e *end) setPeer(t testing.TB, theirs key, place netip.AddrPort) {
	t.Helper()
	e.setPeers(t, datapath.Peer{State: e.engine.Peers()[0], Key: theirs.public, Endpoint: place})
}

func (e *end) setPeers(t testing.TB, peers ...datapath.Peer) {
	t.Helper()
	if err := e.SetPeers(peers); err != nil {
		t.Fatal(err)
	}
	e.WithoutFinalizers()
}

// receive records the number of a received packet.
func (e *end) receive(bufs [][]byte) error {
	b := bufs[1]
	at := 28
	if b[0]>>4 == 6 {
		at = 48
	}
	number := binary.BigEndian.Uint32(b[at:])
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.on != nil {
		e.on(number)
	} else {
		e.got = append(e.got, number)
	}
	return nil
}

// numbered returns a datagram with a number. size is the length of the whole packet.
func numbered(from, to netip.Addr, number uint32, size int) []byte {
	headers := 28
	if from.Is6() {
		headers = 48
	}
	payload := make([]byte, max(4, size-headers))
	binary.BigEndian.PutUint32(payload, number)
	return packettest.Build(packettest.IP{Src: from, Dst: to, TTL: 64},
		packettest.UDP{SrcPort: 4000, DstPort: 5000, NoChecksum: from.Is4(), Data: payload})
}

// send makes a pod send packets with these numbers to the other side.
func (e *end) send(t testing.TB, numbers ...uint32) {
	t.Helper()
	for _, n := range numbers {
		if !e.link.Inject(plain(numbered(e.from, e.to, n, 100))) {
			t.Fatalf("no room for packet %d in the queue of the link", n)
		}
	}
}

// wants fails the test unless exactly these packets have arrived, in this order. It then clears
// the list.
func (e *end) wants(t testing.TB, numbers ...uint32) {
	t.Helper()
	synctest.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	if !slices.Equal(e.got, numbers) {
		t.Errorf("packets %v came: want %v", e.got, numbers)
	}
	e.got = nil
}

// session returns the keypair of the current session; nil: none.
func (e *end) session() *device.Keypair { return e.Keypair(e.other.key.public) }

// drops returns the number of packets that an end has dropped, for its peer and for no peer.
func (e *end) drops(dir natengine.Direction, d natengine.Drop) uint64 { return drops(e.engine, dir, d) }

// allDrops returns the number of all packets that an end has dropped, and a description of them.
func (e *end) allDrops() (n uint64, what string) {
	for _, dir := range []natengine.Direction{natengine.Outbound, natengine.Inbound} {
		for _, d := range natengine.Drops() {
			if c := e.drops(dir, d); c > 0 {
				n += c
				what += fmt.Sprintf(" %s %s: %d", dir, d, c)
			}
		}
	}
	return n, what
}

// meet makes the first end start a session. When meet returns, both ends have that session, and
// their lists of messages are empty.
func (p *pair) meet(t testing.TB) {
	t.Helper()
	a, b := p.ends[0], p.ends[1]
	a.Handshake(b.key.public)
	for range 100 {
		if synctest.Wait(); a.session() != nil && b.session() != nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if a.session() == nil || b.session() == nil || !datapath.Initiator(a.session()) {
		t.Fatal("no session")
	}
	a.wire.forget()
	b.wire.forget()
}

// inPair runs a test in a bubble, with two gateways that have a session.
func inPair(t *testing.T, test func(t *testing.T, p *pair, a, b *end)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, orderedKeys(true))
		p.meet(t)
		test(t, p, p.ends[0], p.ends[1])
	})
}

// stranger returns a socket of a host that is no peer.
func (p *pair) stranger(t testing.TB, addr string) *memlink.Bind {
	t.Helper()
	b := p.network.Bind(netip.MustParseAddr(addr))
	if _, _, err := b.Listen(9999); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// sendFrom sends messages to an end, from the socket b.
func (e *end) sendFrom(t testing.TB, b conn.Bind, messages ...[]byte) {
	t.Helper()
	if err := b.Send(messages, e.wire.Endpoint(e.place)); err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
}

// nonces records pairs of index and counter. No pair may repeat, and nonces counts the repetitions.
type nonces struct {
	mu       sync.Mutex
	seen     map[[12]byte]bool
	repeated atomic.Int64
}

func (n *nonces) see(m []byte) {
	if m[0] != 4 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	k := [12]byte(m[4:16])
	if n.seen[k] {
		n.repeated.Add(1)
	}
	n.seen[k] = true
}

func counter(m []byte) uint64 { return binary.LittleEndian.Uint64(m[8:]) }

// podOf returns the address of a pod of cluster i as its peer sees it.
func podOf(i int) netip.Addr { return netip.MustParsePrefix(pairPlan[i].seen).Addr().Next().Next() }
