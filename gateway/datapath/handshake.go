package datapath

import (
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

// wireguard-go's device sees handshakes alone. Its conn.Bind is a queue of them, its tun.Device has
// no packets.
//
//	socket ─ inbound ─┬─ data ─► open, NAT, write
//	                  └─ handshakes ─► queue ─► device ─ handshakes, keepalives ─► socket

const (
	// maxHandshakes bounds the queue. The device has one of 1024 behind it, and goes over to
	// cookies when that is an eighth full.
	maxHandshakes = 512
	// handshakeBatch is how many the device takes at once. It has a buffer of 64 KiB for each.
	handshakeBatch = 16

	// receivePause is for a socket that fails without being closed.
	receivePause = 100 * time.Millisecond
)

// Wire is the UDP side of a tunnel: *bind.Bind, or memory. All methods may be called concurrently.
type Wire interface {
	// Listen opens a port, 0 for a free one. Each of the functions appends to the Batch what is there,
	// and waits for a datagram first where wait says so; it is called by one goroutine and returns
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
	from conn.Endpoint
	n    int
	b    [device.MessageHandshakeSize]byte
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

// handshakes is the conn.Bind of the device: it receives from the queue and sends by the wire.
type handshakes struct {
	t     *Tunnel
	queue chan handshake

	mu      sync.Mutex
	closed  chan struct{} // nil while not open
	port    uint16
	inbound sync.WaitGroup

	crossings sync.Mutex       // guards what follows, and begun of peers
	forgotten map[uint32]*peer // by sender's index: handshakes that the device forgot when it answered one of the peer
}

// initiation is the handshake that was begun last with a peer.
type initiation struct {
	index uint32 // of the sender; the answer names it
	at    time.Time
}

var _ conn.Bind = (*handshakes)(nil)

func newHandshakes(t *Tunnel) *handshakes {
	return &handshakes{t: t, queue: make(chan handshake, maxHandshakes), forgotten: make(map[uint32]*peer)}
}

// offer gives the device a handshake message, of which it keeps a copy. It never waits.
func (h *handshakes) offer(m []byte, from conn.Endpoint) {
	msg := handshake{from: from, n: len(m)}
	copy(msg.b[:], m)
	select {
	case h.queue <- msg:
	default:
		h.t.engine.Count(nil, natengine.Inbound, natengine.DropHandshakeQueue)
		if c := h.t.capture.Load(); c != nil {
			c.handshake(h.t, natengine.Inbound, m, from, natengine.DropHandshakeQueue)
		}
	}
}

// Open opens the wire, for data and handshakes, and starts a goroutine that receives for each of
// its sockets.
func (h *handshakes) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	sockets, port, err := h.t.wire.Listen(port)
	if err != nil {
		return nil, 0, err
	}
	closed := make(chan struct{})
	h.closed, h.port = closed, port
	for _, next := range sockets {
		h.inbound.Go(func() { newInbound(h.t).receiveAll(next) })
	}
	receive := func(bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		select {
		case <-closed:
			return 0, net.ErrClosed
		case m := <-h.queue:
			n := 0
			for {
				h.look(m.b[:m.n])
				h.t.came(m.b[:m.n], m.from)
				sizes[n], eps[n] = copy(bufs[n], m.b[:m.n]), m.from
				if n++; n == len(bufs) {
					return n, nil
				}
				select {
				case m = <-h.queue:
				default:
					return n, nil
				}
			}
		}
	}
	return []conn.ReceiveFunc{receive}, port, nil
}

// Close closes the wire and waits for its goroutines. None of them waits for the device, which
// calls this with its locks held.
func (h *handshakes) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed == nil {
		return nil
	}
	err := h.t.wire.Close()
	close(h.closed)
	h.closed = nil
	h.inbound.Wait()
	return err
}

// Send sends what the device has sealed, handshakes and keepalives, and what the outbound goroutine
// has. The sender's index of a handshake is one of the device's, so that it tells the peer.
func (h *handshakes) Send(bufs [][]byte, to conn.Endpoint) error {
	m := bufs[0]
	alone := len(bufs) == 1 && len(m) <= device.MessageHandshakeSize
	if alone {
		if c := h.t.capture.Load(); c != nil && (binary.LittleEndian.Uint32(m) != device.MessageTransportType || len(m) == device.MessageKeepaliveSize) {
			c.handshake(h.t, natengine.Outbound, m, to, natengine.DropNone)
		}
		h.observe(binary.LittleEndian.Uint32(m), m, to) // first, as in flush
	}
	err := h.t.wire.Send(bufs, to)
	if err != nil && alone {
		if p := h.peerOf(m); p != nil {
			p.fail(err, time.Now())
		}
	}
	return err
}

// peerOf is whom a handshake message of the device's is for, nil when that is not known.
func (h *handshakes) peerOf(m []byte) *peer {
	switch binary.LittleEndian.Uint32(m) {
	case device.MessageInitiationType, device.MessageResponseType:
		dev, _ := lookup(h.t.dev, binary.LittleEndian.Uint32(m[4:]))
		return h.t.peers.Load().byDevice[dev]
	}
	return nil
}

// observe learns from a message of the device's what the timers of data and the packets that wait
// have to know.
func (h *handshakes) observe(messageType uint32, m []byte, to conn.Endpoint) {
	switch messageType {
	case device.MessageTransportType:
		if len(m) == device.MessageKeepaliveSize { // after an answer to our handshake, among others
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
		p.sentAny()
		h.crossings.Lock()
		defer h.crossings.Unlock()
		if messageType == device.MessageInitiationType {
			delete(h.forgotten, p.begun.index)
			p.begun = initiation{index, time.Now()}
			return
		}
		p.receivedAny() // since the peer has sent an initiation, which was authentic
		p.answers.Add(1)
		p.answered.Store(time.Now().UnixNano())
		if time.Since(p.begun.at) < device.RekeyTimeout {
			h.forgotten[p.begun.index] = p
		}
	}
}

// look finds the answers to handshakes that the device has forgotten.
func (h *handshakes) look(m []byte) {
	if m[0] != device.MessageResponseType {
		return
	}
	index := binary.LittleEndian.Uint32(m[8:])
	h.crossings.Lock()
	defer h.crossings.Unlock()
	if p := h.forgotten[index]; p != nil {
		delete(h.forgotten, index)
		p.crossed(time.Since(p.begun.at))
	}
}

// forget makes no more of what was begun with a peer.
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

// openPort is the port that is open, 0 when none is.
func (h *handshakes) openPort() uint16 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed == nil {
		return 0
	}
	return h.port
}

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
