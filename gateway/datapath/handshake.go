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

// wireguard-go's device processes only handshakes. Its conn.Bind delivers handshake messages, the
// newest first, and its tun.Device carries no packets.
//
//	socket ─ inbound ─┬─ data ─► open, NAT, write
//	                  └─ handshakes ─ admit ─┬─ known sources ─┬─► device ─ its messages ─► socket
//	                                         └─ other sources ─┴─► cookies ─► socket
//
// The device needs as much time to answer one handshake as to process a hundred packets. Anybody
// who knows our public key can make the device process an initiation, with a forged source.
// Therefore addresses of peers have priority, and each has a budget. All other sources share one
// budget. A message beyond its budget must carry a cookie (section 5.4.7 of the WireGuard paper),
// which proves that its source is not forged. All of this is checked before a message is queued, so
// that forged messages do not fill the queues (handshakeStack). The device's own queue is kept so
// short that the device never demands cookies itself.

const (
	// knownHandshakes and otherHandshakes are the capacities of the two stacks. The first stack
	// holds a handshake from each of a thousand peers, because all of them may start handshakes at
	// once when this gateway restarts.
	knownHandshakes = 1024
	otherHandshakes = 512
	// At most one in cookieShare entries of a stack is a message that is answered only with a
	// cookie.
	cookieShare = 4
	// handshakeBatch is the number of messages that the device receives at once. The device has a
	// buffer of 64 KiB for each message.
	handshakeBatch = 16
	// While more than deviceHandshakes messages wait in the device, it gets no further ones. It
	// answers messages in order of arrival, and would demand cookies if 128 messages waited.
	deviceHandshakes = 16
	// devicePause is the interval at which the length of the device's queue is checked while that
	// length is above deviceHandshakes.
	devicePause = time.Millisecond

	// Each budget for handshakes has an interval and a burst. A peer starts one handshake in five
	// seconds. The budgets are:
	//   - known: one for each address of peers; its rate and burst are multiplied by the number of
	//     peers at the address
	//   - stranger: one for all sources without a peer
	//   - proven: one for each address (IPv6: each /64 network) that returned a cookie, multiplied
	//     in the same way if peers are at the address
	//   - guest: one for all addresses without a peer that returned a cookie. A handshake from such
	//     an address must fit both its proven budget and this one.
	// Each port of a relay has budgets of its own, because messages of any sender can come from the
	// relay's address (see Tunnel.relay).
	knownEvery, knownBurst       = time.Second / 10, 20
	strangerEvery, strangerBurst = time.Second / 200, 100
	provenEvery, provenBurst     = time.Second / 20, 20
	guestEvery, guestBurst       = time.Second / 500, 200
	// Anybody can request cookies, so cookies have budgets, too.
	cookieEvery, cookieBurst = time.Second / 10_000, 200

	// movePause is the minimum time between two moves of a peer to another address. It is the time
	// in which a budget fills. So a peer that sends from many addresses can use only two budgets:
	// that of one of these addresses and that of its configured address.
	movePause = knownBurst * knownEvery

	// If maxBudgets budgets are in memory, no budget for a further proven source is added.
	maxBudgets = 8192

	// receivePause is the pause after an error of a socket that is not closed.
	receivePause = 100 * time.Millisecond
)

// Wire is the UDP side of a tunnel: a *bind.Bind, or a network in memory. All methods may be
// called concurrently.
type Wire interface {
	// Listen opens a port; 0 means any free one. It returns a receive function for each of its
	// sockets, and the port. A receive function appends the waiting datagrams to b. If mayBlock is
	// true and no datagram waits, it waits for one. Only one goroutine may call the same receive
	// function. After Close the functions return net.ErrClosed.
	Listen(port uint16) ([]func(b *bind.Batch, mayBlock bool) error, uint16, error)
	// Close closes the sockets that Listen opened. Listen may be called again.
	Close() error
	// Send sends datagrams in order, and continues after an error.
	Send(bufs [][]byte, to conn.Endpoint) error
	// Endpoint returns the endpoint for an address and port.
	Endpoint(netip.AddrPort) conn.Endpoint
}

// handshake is a handshake message and its source.
type handshake struct {
	from     conn.Endpoint
	unproven bool // the message was refused and is answered only with a cookie
	n        int
	b        [device.MessageHandshakeSize]byte
}

// handshakeLen returns the length of a handshake message by its type (section 5.4), or 0 for any
// other message.
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

// handshakes is the conn.Bind of a device. It delivers the messages of its stacks to the device,
// and sends the device's messages to the wire.
type handshakes struct {
	t             *Tunnel
	identity      *identity
	known, others *handshakeStack

	mu     sync.Mutex
	closed chan struct{} // closed by Close; nil while not open

	crossings sync.Mutex // guards forgotten and peer.begun
	// forgotten holds, by sender index, our initiations that the device forgot when it answered an
	// initiation from the same peer.
	forgotten map[uint32]*peer
}

// initiation is our last initiation of a handshake with a peer.
type initiation struct {
	index uint32 // sender index, which the response repeats
	at    time.Time
}

var _ conn.Bind = (*handshakes)(nil)

func newHandshakes(id *identity) *handshakes {
	return &handshakes{
		t: id.t, identity: id, known: newHandshakeStack(knownHandshakes), others: newHandshakeStack(otherHandshakes),
		forgotten: make(map[uint32]*peer),
	}
}

// offer queues a copy of a handshake message for the device, if admit allows that. now is the
// time of its arrival. offer never blocks.
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
		// An unproven message was already counted when it arrived.
		if lost, dropped := stack.push(msg); dropped && !lost.unproven {
			h.refuse(lost.b[:lost.n], lost.from, natengine.DropHandshakeQueue)
		}
	}
	if why != natengine.DropNone {
		h.refuse(m, from, why)
	}
}

// refuse counts a refused handshake message, and shows it to a capture.
func (h *handshakes) refuse(m []byte, from conn.Endpoint, why natengine.Drop) {
	h.t.engine.Count(nil, natengine.Inbound, why)
	if c := h.t.capture.Load(); c != nil {
		c.handshake(h.t, natengine.Inbound, m, from, why)
	}
}

// next returns a queued message; messages of known sources come first. If mayBlock is true, it
// waits for a message. ok is false if no message is queued or the wire is closed.
func (h *handshakes) next(closed <-chan struct{}, mayBlock bool) (m handshake, ok bool) {
	for {
		if m, ok = h.known.pop(); ok {
			return m, true
		}
		if m, ok = h.others.pop(); ok || !mayBlock {
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

// receive fills bufs with messages for the device. It waits only for the first message. An unproven
// message does not go to the device: receive sends a cookie to its sender.
func (h *handshakes) receive(closed <-chan struct{}, bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
	for handshakesWaiting(h.identity.dev) > deviceHandshakes {
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
			if h.sendCookie(&m); n > 0 { // return the n messages now instead of waiting for another one
				return n, nil
			}
			continue
		}
		if h.forgot(m.b[:m.n]) {
			continue
		}
		h.chooseKey(m.b[:m.n])
		sizes[n], eps[n] = copy(bufs[n], m.b[:m.n]), m.from
		if n++; n == len(bufs) {
			return n, nil
		}
	}
}

// admit returns DropNone if the device may process a message, and otherwise the reason to refuse
// it. peerCount is the number of peers at the source address. If the message exceeds its budget,
// unproven reports whether its sender gets a cookie.
//
// A cookie reply carries no MAC. So admit accepts it only if it refers to an initiation of ours,
// and charges the peer to which we sent that initiation. If admit charged the source address
// instead, somebody who forges that address could keep the peer's cookies from us.
func (h *handshakes) admit(m []byte, from conn.Endpoint, peerCount int, now time.Time) (why natengine.Drop, unproven bool) {
	t, checker := h.t, h.identity.checker.Load()
	if m[0] == device.MessageCookieReplyType {
		dev, _ := lookup(h.identity.dev, binary.LittleEndian.Uint32(m[4:]))
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
	if t.recordHandshake(m, from, ours); !ours {
		return natengine.DropHandshakeKey, false
	}
	t.admission.Lock()
	defer t.admission.Unlock()
	addr, source := from.DstIP(), from.DstToBytes()
	if peerCount > 0 {
		known := budget{addr: addr}
		if t.relay(addr) { // other senders that use the relay must not use up the budget
			known.source = string(source)
		}
		if t.budgets.spend(known, now, knownEvery/time.Duration(peerCount), knownBurst*peerCount) {
			return natengine.DropNone, false
		}
	} else if t.budgets.spend(budget{}, now, strangerEvery, strangerBurst) {
		return natengine.DropNone, false
	}
	if bytes.Equal(m[len(m)-len(noMAC2):], noMAC2[:]) || !checker.CheckMAC2(m, source) {
		return natengine.DropHandshakeQueue, t.budgets.spend(budget{cookie: true, proven: peerCount > 0}, now, cookieEvery, cookieBurst)
	}
	proven, n := budget{addr: addr, proven: true}, max(1, peerCount)
	switch {
	case t.relay(addr): // many peers share the address; the guest budget limits all of them
		proven.source = string(source)
	case addr.Is6(): // a host can use many addresses of its network
		proven.addr = netip.PrefixFrom(addr, 64).Masked().Addr()
	}
	if t.budgets.spend(proven, now, provenEvery/time.Duration(n), provenBurst*n) &&
		(peerCount > 0 || t.budgets.spend(budget{proven: true}, now, guestEvery, guestBurst)) {
		return natengine.DropNone, false
	}
	return natengine.DropHandshakeQueue, false
}

// noMAC2 is the mac2 of a message that was made without a cookie.
var noMAC2 [16]byte

// sendCookie answers a message with a cookie. It ignores errors, because the sender repeats the
// message if no cookie arrives.
func (h *handshakes) sendCookie(msg *handshake) {
	m := msg.b[:msg.n]
	reply, err := h.identity.checker.Load().CreateReply(m, binary.LittleEndian.Uint32(m[4:]), msg.from.DstToBytes())
	if err != nil {
		return
	}
	b, _ := binary.Append(nil, binary.LittleEndian, reply) // cannot fail
	_ = h.Send([][]byte{b}, msg.from)
}

// Open implements conn.Bind. It opens no socket: the Tunnel opens the wire itself, because
// several devices use it while our key rotates.
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

// Close makes the ReceiveFuncs return. It implements conn.Bind.
func (h *handshakes) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		close(h.closed)
		h.closed = nil
	}
	return nil
}

// Send sends the device's messages, which are handshakes and keepalives. The outbound goroutine
// also sends data messages with it. It implements conn.Bind.
func (h *handshakes) Send(bufs [][]byte, to conn.Endpoint) error {
	m := bufs[0]
	alone := len(bufs) == 1 && len(m) <= device.MessageHandshakeSize
	if alone {
		if c := h.t.capture.Load(); c != nil && (binary.LittleEndian.Uint32(m) != device.MessageTransportType || len(m) == device.MessageKeepaliveSize) {
			c.handshake(h.t, natengine.Outbound, m, to, natengine.DropNone)
		}
		h.observe(binary.LittleEndian.Uint32(m), m, to) // before sending, because an answer may come at once
	}
	err := h.t.wire.Send(bufs, to)
	if err != nil && alone {
		if p := h.peerOf(m); p != nil {
			p.recordFailure(err, time.Now())
		}
	}
	return err
}

// peerOf returns the peer for which the device made a handshake message, or nil if the peer is
// unknown. It finds the peer by the sender index, which the device chose.
func (h *handshakes) peerOf(m []byte) *peer {
	switch binary.LittleEndian.Uint32(m) {
	case device.MessageInitiationType, device.MessageResponseType:
		dev, _ := lookup(h.identity.dev, binary.LittleEndian.Uint32(m[4:]))
		return h.t.peers.Load().byDevice[dev]
	}
	return nil
}

// observe updates the timers of a peer for a message that the device sends. If there may be a new
// session, it wakes the goroutine that sends waiting packets.
func (h *handshakes) observe(messageType uint32, m []byte, to conn.Endpoint) {
	switch messageType {
	case device.MessageTransportType:
		// The device sends a keepalive, for example, when it has received the response to our
		// initiation.
		if len(m) == device.MessageKeepaliveSize {
			h.t.recheckSoon()
		}
	case device.MessageCookieReplyType:
		h.t.recordAnswer(binary.LittleEndian.Uint32(m[4:]), to)
	case device.MessageInitiationType, device.MessageResponseType:
		if messageType == device.MessageResponseType {
			h.t.recordAnswer(binary.LittleEndian.Uint32(m[8:]), to)
		}
		p := h.peerOf(m)
		if p == nil {
			return
		}
		index := binary.LittleEndian.Uint32(m[4:])
		if messageType == device.MessageResponseType {
			p.preshared.recordResponse(index)
			p.initiated.Store(&answeredInitiation{to, time.Now()})
		}
		p.recordAnySent()
		h.crossings.Lock()
		defer h.crossings.Unlock()
		if messageType == device.MessageInitiationType {
			delete(h.forgotten, p.begun.index)
			p.begun = initiation{index, time.Now()}
			return
		}
		p.recordAnyReceived() // the device responds only to authentic initiations
		p.answerCount.Add(1)
		p.answered.Store(h.t.stamp(time.Now()))
		if time.Since(p.begun.at) < device.RekeyTimeout {
			h.forgotten[p.begun.index] = p
		}
	}
}

// forgot reports whether a message is a response to an initiation that the device has forgotten.
// The device would refuse it.
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
	p.preshared.handleCrossing()
	p.handleCrossing(time.Since(p.begun.at))
	return true
}

// forget deletes the record of our last initiation to a peer.
func (h *handshakes) forget(p *peer) {
	h.crossings.Lock()
	defer h.crossings.Unlock()
	delete(h.forgotten, p.begun.index)
}

// SetMark implements conn.Bind. The gateway sets no mark.
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

// noPackets is the tun.Device of the device. No packet arrives on it, and none is written to it.
type noPackets struct {
	events chan tun.Event
	once   sync.Once
}

var _ tun.Device = (*noPackets)(nil)

func newNoPackets() *noPackets { return &noPackets{events: make(chan tun.Event)} }

func (*noPackets) File() *os.File { return nil }

// Read blocks until Close.
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
