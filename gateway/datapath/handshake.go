package datapath

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// wireguard-go's device gets only handshakes. Its conn.Bind holds handshake messages, the newest first, and
// its tun.Device carries no packets.
//
//	socket ─ inbound ─┬─ data ─► open, NAT, write
//	                  └─ handshakes ─ admit ─┬─ of known sources ─┬─► device ─ handshakes, keepalives ─► socket
//	                                         └─ of others ────────┴─► cookies ─► socket
//
// To answer a handshake, the device needs as much time as for a hundred packets. Anybody who knows our
// public key can make it process an initiation, with a forged source. So addresses of peers go first, and
// each has a budget. All other sources share one budget. Beyond its budget a message must carry a cookie
// (section 5.4.7 of the WireGuard paper), which proves that its source is not forged. All of that is checked
// before a message takes a place, so that forged ones fill no stack. The device's own queue stays so short
// that the device never asks for cookies itself.

const (
	// knownHandshakes and otherHandshakes bound the two stacks. The first holds one handshake each of a
	// thousand peers, which may all start at once when this gateway returns.
	knownHandshakes = 1024
	otherHandshakes = 512
	// One in cookieShare places of a stack may hold a message that only gets a cookie.
	cookieShare = 4
	// handshakeBatch is how many the device takes at once. It has a buffer of 64 KiB for each.
	handshakeBatch = 16
	// deviceHandshakes bounds the messages that wait in the device when it gets more. The device answers
	// in order of arrival, and asks for cookies when 128 wait.
	deviceHandshakes = 16
	// devicePause is the delay before the next batch when that many wait.
	devicePause = time.Millisecond

	// Budgets for handshakes: interval and burst. A peer starts one handshake in five seconds, and an
	// address has a budget for each peer there. All other sources share one budget. An address (IPv6: a
	// /64 network) that returned a cookie has a second budget for each peer there. If no peer is there,
	// it has one, and shares another with all such addresses. Behind a relay, all this is true of each
	// port, because anybody may send from the relay's address.
	knownEvery, knownBurst       = time.Second / 10, 20
	strangerEvery, strangerBurst = time.Second / 200, 100
	provenEvery, provenBurst     = time.Second / 20, 20
	guestEvery, guestBurst       = time.Second / 500, 200
	// Anybody can ask for cookies.
	cookieEvery, cookieBurst = time.Second / 10_000, 200

	// movePause is the least time between two moves of a peer: the time in which a budget fills. So a peer that
	// sends from many addresses has two budgets: that of one of them, and that of its configured address.
	movePause = knownBurst * knownEvery

	// maxBudgets bounds the sources whose budgets are stored, not counting peers.
	maxBudgets = 8192

	// receivePause is for a socket that fails without being closed.
	receivePause = 100 * time.Millisecond
)

// Wire is the UDP side of a tunnel: *bind.Bind, or memory. All methods may be called concurrently.
type Wire interface {
	// Listen opens a port, 0 for any free one. Each of the functions appends the datagrams of its socket
	// to the Batch. With wait it first waits for a datagram. One goroutine calls it, and it returns
	// net.ErrClosed after Close.
	Listen(port uint16) ([]func(b *bind.Batch, wait bool) error, uint16, error)
	// Close ends what Listen began. Listen may be called again.
	Close() error
	// Send sends datagrams in order, and goes on after an error.
	Send(bufs [][]byte, to conn.Endpoint) error
	// Endpoint is a place to send to.
	Endpoint(netip.AddrPort) conn.Endpoint
}

// handshake is a handshake message and where it came from.
type handshake struct {
	from     conn.Endpoint
	unproven bool // it was refused, but its sender gets a cookie
	n        int
	b        [device.MessageHandshakeSize]byte
}

// handshakeLen is the length of handshake messages by their type (section 5.4), 0 for anything
// else.
func handshakeLen(messageType uint32) int {
	switch messageType {
	case device.MessageInitiationType:
		return device.MessageInitiationSize
	case device.MessageResponseType:
		return device.MessageResponseSize
	case device.MessageCookieReplyType:
		return device.MessageCookieReplySize
	}
	return 0
}

// handshakes is the conn.Bind of a device: it receives from the stacks and sends to the wire.
type handshakes struct {
	t             *Tunnel
	of            *identity
	known, others *handshakeStack

	mu     sync.Mutex
	closed chan struct{} // nil while not open

	crossings sync.Mutex // guards forgotten, and begun of peers
	// by sender's index: our handshakes that the device forgot when it answered one from the same
	// peer
	forgotten map[uint32]*peer
}

// initiation is our last handshake initiation to a peer.
type initiation struct {
	index uint32 // sender index, which the answer repeats
	at    time.Time
}

var _ conn.Bind = (*handshakes)(nil)

func newHandshakes(of *identity) *handshakes {
	return &handshakes{
		t: of.t, of: of, known: newHandshakeStack(knownHandshakes), others: newHandshakeStack(otherHandshakes),
		forgotten: make(map[uint32]*peer),
	}
}

// offer queues a copy of a handshake message, received at now, for the device. It never blocks.
func (h *handshakes) offer(m []byte, from conn.Endpoint, now time.Time) {
	peers := h.t.peersAt(remoteOf(from))
	why, unproven := h.admit(m, from, peers, now)
	if why == natengine.DropNone || unproven {
		msg := handshake{from: from, unproven: unproven, n: len(m)}
		copy(msg.b[:], m)
		stack := h.others
		if peers > 0 {
			stack = h.known
		}
		// unproven messages are counted on arrival
		if lost, dropped := stack.push(msg); dropped && !lost.unproven {
			h.refuse(lost.b[:lost.n], lost.from, natengine.DropHandshakeQueue)
		}
	}
	if why != natengine.DropNone {
		h.refuse(m, from, why)
	}
}

// refuse counts a handshake message.
func (h *handshakes) refuse(m []byte, from conn.Endpoint, why natengine.Drop) {
	h.t.engine.Count(nil, natengine.Inbound, why)
	if c := h.t.capture.Load(); c != nil {
		c.handshake(h.t, natengine.Inbound, m, from, why)
	}
}

// next takes a message, preferring known sources. With wait it waits for one. It reports false when there
// is none or the wire is closed.
func (h *handshakes) next(closed <-chan struct{}, wait bool) (m handshake, ok bool) {
	for {
		if m, ok = h.known.pop(); ok {
			return m, true
		}
		if m, ok = h.others.pop(); ok || !wait {
			return m, ok
		}
		select {
		case <-closed:
			return m, false
		case <-h.known.ready:
		case <-h.others.ready:
		}
	}
}

// receive fills bufs with messages for the device and waits for the first of them. Unproven
// messages only get a cookie.
func (h *handshakes) receive(closed <-chan struct{}, bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
	for handshakesWaiting(h.of.dev) > deviceHandshakes {
		select {
		case <-closed:
			return 0, net.ErrClosed
		case <-time.After(devicePause):
		}
	}
	for n := 0; ; {
		m, ok := h.next(closed, n == 0)
		if !ok && n == 0 {
			return 0, net.ErrClosed
		} else if !ok {
			return n, nil
		}
		if m.unproven {
			if h.sendCookie(&m); n > 0 { // with messages in hand, do not wait for another
				return n, nil
			}
			continue
		}
		if h.forgot(m.b[:m.n]) {
			continue
		}
		h.choose(m.b[:m.n])
		sizes[n], eps[n] = copy(bufs[n], m.b[:m.n]), m.from
		if n++; n == len(bufs) {
			return n, nil
		}
	}
}

// admit returns the reason why the device may not process a message, or none. peers is the number
// of peers at its address. A message that exceeds its budget may be unproven: its sender then gets
// a cookie. A cookie reply carries no MAC, so it must name a handshake of ours, and that peer's
// budget is charged. Otherwise somebody who forges the peer's address could keep the peer's cookies
// from us.
func (h *handshakes) admit(m []byte, from conn.Endpoint, peers int, now time.Time) (why natengine.Drop, unproven bool) {
	t, checker := h.t, h.of.checker.Load()
	if m[0] == device.MessageCookieReplyType {
		dev, _ := lookup(h.of.dev, binary.LittleEndian.Uint32(m[4:]))
		if dev == nil {
			return natengine.DropHandshakeRefused, false
		}
		t.admission.Lock()
		defer t.admission.Unlock()
		if t.budgets.spend(budget{replies: dev}, now, knownEvery, knownBurst) {
			return natengine.DropNone, false
		}
		return natengine.DropHandshakeQueue, false
	}
	ours := checker.CheckMAC1(m)
	if t.came(m, from, ours); !ours {
		return natengine.DropHandshakeKey, false
	}
	t.admission.Lock()
	defer t.admission.Unlock()
	addr, source := from.DstIP(), from.DstToBytes()
	if peers > 0 {
		known := budget{addr: addr}
		if t.relay(addr) { // others behind it must not use up the budget
			known.source = string(source)
		}
		if t.budgets.spend(known, now, knownEvery/time.Duration(peers), knownBurst*peers) {
			return natengine.DropNone, false
		}
	} else if t.budgets.spend(budget{}, now, strangerEvery, strangerBurst) {
		return natengine.DropNone, false
	}
	if bytes.Equal(m[len(m)-len(noMAC2):], noMAC2[:]) || !checker.CheckMAC2(m, source) {
		return natengine.DropHandshakeQueue, t.budgets.spend(budget{cookie: true, proven: peers > 0}, now, cookieEvery, cookieBurst)
	}
	proven, n := budget{addr: addr, proven: true}, max(1, peers)
	switch {
	case t.relay(addr): // many peers share the address, and guests bounds them all
		proven.source = string(source)
	case addr.Is6(): // a host has many addresses in its network
		proven.addr = netip.PrefixFrom(addr, 64).Masked().Addr()
	}
	if t.budgets.spend(proven, now, provenEvery/time.Duration(n), provenBurst*n) &&
		(peers > 0 || t.budgets.spend(budget{proven: true}, now, guestEvery, guestBurst)) {
		return natengine.DropNone, false
	}
	return natengine.DropHandshakeQueue, false
}

// noMAC2 is the second MAC of a message without a cookie: most messages of a flood have it.
var noMAC2 [16]byte

// sendCookie answers a message with a cookie. If the cookie is lost, the sender asks again.
func (h *handshakes) sendCookie(msg *handshake) {
	m := msg.b[:msg.n]
	reply, err := h.of.checker.Load().CreateReply(m, binary.LittleEndian.Uint32(m[4:]), msg.from.DstToBytes())
	if err != nil {
		return
	}
	b, _ := binary.Append(nil, binary.LittleEndian, reply) // never fails
	_ = h.Send([][]byte{b}, msg.from)
}

// Open implements conn.Bind. The Tunnel opens the wire itself, because it has several devices while
// its key rotates.
func (h *handshakes) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	closed := make(chan struct{})
	h.closed = closed
	receive := func(bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		return h.receive(closed, bufs, sizes, eps)
	}
	return []conn.ReceiveFunc{receive}, port, nil
}

// Close ends the ReceiveFuncs.
func (h *handshakes) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		close(h.closed)
		h.closed = nil
	}
	return nil
}

// Send sends the device's messages, which are handshakes and keepalives, and the data messages of
// the outbound goroutine. The device chose the sender index of a handshake, so the index identifies
// the peer.
func (h *handshakes) Send(bufs [][]byte, to conn.Endpoint) error {
	m := bufs[0]
	alone := len(bufs) == 1 && len(m) <= device.MessageHandshakeSize
	if alone {
		if c := h.t.capture.Load(); c != nil && (binary.LittleEndian.Uint32(m) != device.MessageTransportType || len(m) == device.MessageKeepaliveSize) {
			c.handshake(h.t, natengine.Outbound, m, to, natengine.DropNone)
		}
		h.observe(binary.LittleEndian.Uint32(m), m, to) // before sending, as in flush
	}
	err := h.t.wire.Send(bufs, to)
	if err != nil && alone {
		if p := h.peerOf(m); p != nil {
			p.fail(err, time.Now())
		}
	}
	return err
}

// peerOf returns the peer for which the device made a handshake message; nil: unknown.
func (h *handshakes) peerOf(m []byte) *peer {
	switch binary.LittleEndian.Uint32(m) {
	case device.MessageInitiationType, device.MessageResponseType:
		dev, _ := lookup(h.of.dev, binary.LittleEndian.Uint32(m[4:]))
		return h.t.peers.Load().byDevice[dev]
	}
	return nil
}

// observe updates the timers of data, and wakes the sender of waiting packets, by a message that
// the device sends.
func (h *handshakes) observe(messageType uint32, m []byte, to conn.Endpoint) {
	switch messageType {
	case device.MessageTransportType:
		// the device sends one after an answer to our handshake, for example
		if len(m) == device.MessageKeepaliveSize {
			h.t.lookSoon()
		}
	case device.MessageCookieReplyType:
		h.t.answered(binary.LittleEndian.Uint32(m[4:]), to)
	case device.MessageInitiationType, device.MessageResponseType:
		if messageType == device.MessageResponseType {
			h.t.answered(binary.LittleEndian.Uint32(m[8:]), to)
		}
		p := h.peerOf(m)
		if p == nil {
			return
		}
		index := binary.LittleEndian.Uint32(m[4:])
		if messageType == device.MessageResponseType {
			p.preshared.responded(index)
			p.called.Store(&called{to, time.Now()})
		}
		p.sentAny()
		h.crossings.Lock()
		defer h.crossings.Unlock()
		if messageType == device.MessageInitiationType {
			delete(h.forgotten, p.begun.index)
			p.begun = initiation{index, time.Now()}
			return
		}
		p.receivedAny() // the device responds only to an authentic initiation
		p.answers.Add(1)
		p.answered.Store(h.t.at(time.Now()))
		if time.Since(p.begun.at) < device.RekeyTimeout {
			h.forgotten[p.begun.index] = p
		}
	}
}

// forgot reports whether a message answers a handshake that the device has forgotten, so that it
// would refuse the answer.
func (h *handshakes) forgot(m []byte) bool {
	if m[0] != device.MessageResponseType {
		return false
	}
	index := binary.LittleEndian.Uint32(m[8:])
	h.crossings.Lock()
	defer h.crossings.Unlock()
	p := h.forgotten[index]
	if p == nil {
		return false
	}
	delete(h.forgotten, index)
	p.preshared.crossed()
	p.crossed(time.Since(p.begun.at))
	return true
}

// forget removes the record of our handshake with a peer.
func (h *handshakes) forget(p *peer) {
	h.crossings.Lock()
	defer h.crossings.Unlock()
	delete(h.forgotten, p.begun.index)
}

// SetMark implements conn.Bind. The gateway uses none.
func (h *handshakes) SetMark(uint32) error { return nil }

// ParseEndpoint implements conn.Bind.
func (h *handshakes) ParseEndpoint(s string) (conn.Endpoint, error) {
	at, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return h.t.wire.Endpoint(at), nil
}

// BatchSize implements conn.Bind.
func (h *handshakes) BatchSize() int { return handshakeBatch }

// noPackets is the tun.Device of the device: nothing ever arrives on it, and nothing is written to
// it.
type noPackets struct {
	events chan tun.Event
	once   sync.Once
}

var _ tun.Device = (*noPackets)(nil)

func newNoPackets() *noPackets { return &noPackets{events: make(chan tun.Event)} }

func (*noPackets) File() *os.File { return nil }

// Read waits for Close.
func (n *noPackets) Read([][]byte, []int, int) (int, error) {
	<-n.events
	return 0, os.ErrClosed
}

func (*noPackets) Write([][]byte, int) (int, error) { return 0, os.ErrInvalid }
func (*noPackets) MTU() (int, error)                { return device.DefaultMTU, nil }
func (*noPackets) Name() (string, error)            { return "", nil }
func (n *noPackets) Events() <-chan tun.Event       { return n.events }
func (*noPackets) BatchSize() int                   { return handshakeBatch }

func (n *noPackets) Close() error {
	n.once.Do(func() { close(n.events) })
	return nil
}
