package memlink

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
)

// bindQueueLen is the capacity of a Bind's queue, in datagrams. It is about what a UDP socket
// with a buffer of 7 MiB holds.
const bindQueueLen = 4096

// A Network connects Binds by address. The zero value loses datagrams only when a queue overflows
// or no Bind has the destination address.
type Network struct {
	// Loss and Reorder are shares, from 0 to 1, of WireGuard data messages. Loss is the share that
	// is lost. Reorder is the share that is held back until the next message to the same receiver
	// has passed. Handshake messages always pass, because WireGuard repeats a lost one only after
	// five seconds. Seed makes the random choice repeatable. Set all three before use.
	Loss, Reorder float64
	Seed          uint64

	mu    sync.RWMutex
	binds map[netip.AddrPort]*Bind

	lost, overflowed, reordered atomic.Uint64
}

// Lost returns the number of datagrams lost because of Loss.
func (n *Network) Lost() uint64 { return n.lost.Load() }

// Overflowed returns the number of datagrams lost because a queue was full or there was no
// receiver.
func (n *Network) Overflowed() uint64 { return n.overflowed.Load() }

// Reordered returns the number of datagrams that a later datagram overtook.
func (n *Network) Reordered() uint64 { return n.reordered.Load() }

// Bind returns a Bind with the given IP address. Its port is set when wireguard-go opens it; port
// 0 becomes 51820.
func (n *Network) Bind(addr netip.Addr) *Bind {
	return &Bind{
		network: n,
		addr:    addr,
		queue:   make(chan *datagram, bindQueueLen),
		rng:     rand.New(rand.NewPCG(n.Seed, uint64(addr.As16()[15]))),
	}
}

// A Bind is a UDP socket in memory. It implements datapath.Wire, and also conn.Bind for a device
// of wireguard-go.
type Bind struct {
	network *Network
	addr    netip.Addr
	queue   chan *datagram

	mu     sync.Mutex
	local  netip.AddrPort
	closed chan struct{} // closed by Close; nil while not open

	rng  *rand.Rand                   // guarded by mu
	held map[netip.AddrPort]*datagram // datagrams held back, by receiver; guarded by mu
}

type datagram struct {
	from conn.Endpoint
	n    int
	b    [2048]byte
	big  []byte // used when b is too small
}

func (d *datagram) bytes() []byte {
	if d.big != nil {
		return d.big
	}
	return d.b[:d.n]
}

var datagrams = sync.Pool{New: func() any { return new(datagram) }}

// Open implements conn.Bind.
func (b *Bind) Open(port uint16) ([]conn.ReceiveFunc, uint16, error) {
	closed, port, err := b.open(port)
	if err != nil {
		return nil, 0, err
	}
	receive := func(bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
		n, err := b.receive(closed, len(bufs), func(i int, d *datagram) (more bool) {
			sizes[i], eps[i] = copy(bufs[i], d.bytes()), d.from
			return true
		})
		return n, err
	}
	return []conn.ReceiveFunc{receive}, port, nil
}

// Listen implements datapath.Wire.
func (b *Bind) Listen(port uint16) ([]func(*bind.Batch, bool) error, uint16, error) {
	closed, port, err := b.open(port)
	if err != nil {
		return nil, 0, err
	}
	receive := func(batch *bind.Batch, mayBlock bool) error {
		batch.More = batch.Space() == nil
		if batch.More || !mayBlock && len(b.queue) == 0 {
			return nil
		}
		n, err := b.receive(closed, conn.IdealBatchSize, func(_ int, d *datagram) (more bool) {
			batch.Received(copy(batch.Space(), d.bytes()), 0, d.from)
			return batch.Space() != nil
		})
		batch.More = n == conn.IdealBatchSize || batch.Space() == nil
		return err
	}
	return []func(*bind.Batch, bool) error{receive}, port, nil
}

// open registers the Bind in its network. Close closes the returned channel.
func (b *Bind) open(port uint16) (closed chan struct{}, actual uint16, err error) {
	if port == 0 {
		port = 51820
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	local := netip.AddrPortFrom(b.addr, port)
	n := b.network
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.binds[local] != nil {
		return nil, 0, fmt.Errorf("%s is in use", local)
	}
	if n.binds == nil {
		n.binds = make(map[netip.AddrPort]*Bind)
	}
	n.binds[local] = b
	b.local, b.held = local, make(map[netip.AddrPort]*datagram)
	b.closed = make(chan struct{})
	return b.closed, port, nil
}

// receive waits for a datagram. It calls handle with up to limit datagrams, until handle returns
// false or no datagram waits.
func (b *Bind) receive(closed <-chan struct{}, limit int, handle func(i int, d *datagram) (more bool)) (int, error) {
	select {
	case <-closed:
		return 0, net.ErrClosed
	case d := <-b.queue:
		i := 0
		for {
			more := handle(i, d)
			d.big = nil
			datagrams.Put(d)
			if i++; i == limit || !more {
				return i, nil
			}
			select {
			case d = <-b.queue:
			default:
				return i, nil
			}
		}
	}
}

// Close implements conn.Bind.
func (b *Bind) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed == nil {
		return nil
	}
	b.network.mu.Lock()
	delete(b.network.binds, b.local)
	b.network.mu.Unlock()
	close(b.closed)
	b.closed = nil
	return nil
}

// SetMark implements conn.Bind.
func (b *Bind) SetMark(uint32) error { return nil }

// BatchSize implements conn.Bind.
func (b *Bind) BatchSize() int { return conn.IdealBatchSize }

// Endpoint implements datapath.Wire.
func (b *Bind) Endpoint(at netip.AddrPort) conn.Endpoint { return Endpoint{at} }

// ParseEndpoint implements conn.Bind.
func (b *Bind) ParseEndpoint(s string) (conn.Endpoint, error) {
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		return nil, err
	}
	return Endpoint{ap}, nil
}

// Send implements conn.Bind. It never blocks.
func (b *Bind) Send(bufs [][]byte, ep conn.Endpoint) error {
	to, ok := ep.(Endpoint)
	if !ok {
		return conn.ErrWrongEndpointType
	}
	n := b.network
	n.mu.RLock()
	peer := n.binds[to.at]
	n.mu.RUnlock()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed == nil {
		return net.ErrClosed
	}
	if peer == nil {
		n.overflowed.Add(uint64(len(bufs)))
		return nil
	}
	for _, p := range bufs {
		data := len(p) > 0 && p[0] == device.MessageTransportType
		if data && n.Loss > 0 && b.rng.Float64() < n.Loss {
			n.lost.Add(1)
			continue
		}
		d := datagrams.Get().(*datagram)
		if d.from, d.n = (Endpoint{b.local}), len(p); len(p) > len(d.b) {
			d.big = append([]byte(nil), p...)
		} else {
			copy(d.b[:], p)
		}
		held := b.held[to.at]
		if held == nil && data && n.Reorder > 0 && b.rng.Float64() < n.Reorder {
			b.held[to.at] = d
			n.reordered.Add(1)
			continue
		}
		peer.enqueue(d)
		if held != nil {
			delete(b.held, to.at)
			peer.enqueue(held)
		}
	}
	return nil
}

// enqueue takes no lock, because two Binds that send to each other could deadlock.
func (b *Bind) enqueue(d *datagram) {
	select {
	case b.queue <- d:
	default:
		b.network.overflowed.Add(1)
		d.big = nil
		datagrams.Put(d)
	}
}

// An Endpoint is an address and port in a Network.
type Endpoint struct{ at netip.AddrPort }

// AddrPort returns the address and port.
func (e Endpoint) AddrPort() netip.AddrPort { return e.at }

// ClearSrc implements conn.Endpoint. It does nothing, because there is no source address to
// forget.
func (e Endpoint) ClearSrc() {}

// SrcToString implements conn.Endpoint.
func (e Endpoint) SrcToString() string { return "" }

// SrcIP implements conn.Endpoint.
func (e Endpoint) SrcIP() netip.Addr { return netip.Addr{} }

// DstIP implements conn.Endpoint.
func (e Endpoint) DstIP() netip.Addr { return e.at.Addr() }

// DstToString implements conn.Endpoint.
func (e Endpoint) DstToString() string { return e.at.String() }

// DstToBytes implements conn.Endpoint.
func (e Endpoint) DstToBytes() []byte {
	b, _ := e.at.MarshalBinary() // cannot fail
	return b
}

var (
	_ conn.Bind     = (*Bind)(nil)
	_ datapath.Wire = (*Bind)(nil)
	_ conn.Endpoint = Endpoint{}
)
