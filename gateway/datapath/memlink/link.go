// Package memlink connects the gateway's data path to hosts and a network in memory, so that
// tests need no kernel, no privileges and no real addresses.
//
//	Host (gVisor) ⇄ Link (a TUN) ⇄ datapath ⇄ wireguard-go ⇄ Bind ⇄ Bind ⇄ …
//
// A Link behaves like a Linux TUN with virtio-net header and offloads: it drops packets when its
// queue is full, and it handles a written packet before Write returns.
package memlink

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/packet"
)

// queueLen is the capacity of a link's queue in packets: the default txqueuelen of a Linux TUN
// (drivers/net/tun.c, TUN_READQ_SIZE).
const queueLen = 500

// maxPacket is the size of the largest packet with its virtio header.
const maxPacket = packet.VirtioHeaderLen + 65535

// A Link is a TUN in memory. It implements datapath.Link.
type Link struct {
	name    string
	mtu     atomic.Int64
	receive atomic.Pointer[func(bufs [][]byte) error]

	queue  chan []byte // packets from the host to the gateway; their memory comes from buffers
	woken  chan struct{}
	closed chan struct{}
	once   sync.Once

	dropped atomic.Uint64
	buffers sync.Pool
}

var _ datapath.Link = (*Link)(nil)

// NewLink returns a link. Its host side sends packets to the gateway with Inject, and receives
// packets with the function set by OnReceive. mtu is in octets.
func NewLink(name string, mtu int) *Link {
	l := &Link{
		name:   name,
		queue:  make(chan []byte, queueLen),
		woken:  make(chan struct{}, 1),
		closed: make(chan struct{}),
	}
	l.mtu.Store(int64(mtu))
	l.buffers.New = func() any { b := make([]byte, 0, maxPacket); return &b }
	return l
}

// Inject sends one packet from the host to the gateway. The packet is the concatenation of bufs,
// which starts with the virtio header. Inject copies bufs and never blocks: if the queue is full,
// it drops and counts the packet, like a TUN, and returns false.
func (l *Link) Inject(bufs ...[]byte) bool {
	b := (*l.buffers.Get().(*[]byte))[:0]
	for _, part := range bufs {
		b = append(b, part...)
	}
	select {
	case <-l.closed:
		return false
	default:
	}
	select {
	case l.queue <- b:
		return true
	default:
		l.dropped.Add(1)
		l.buffers.Put(&b)
		return false
	}
}

// Dropped returns the number of packets that Inject dropped because the queue was full.
func (l *Link) Dropped() uint64 { return l.dropped.Load() }

// OnReceive sets the function that handles packets from the gateway. The goroutines that write
// packets call f, possibly concurrently. bufs starts with the virtio header, and is borrowed
// until f returns. Without f, packets are dropped.
func (l *Link) OnReceive(f func(bufs [][]byte) error) { l.receive.Store(&f) }

// Read implements datapath.Link.
func (l *Link) Read(p []byte, mayBlock bool) (int, error) {
	select {
	case <-l.closed:
		return 0, os.ErrClosed
	default:
	}
	select {
	case b := <-l.queue:
		return l.take(p, b)
	default:
	}
	if !mayBlock {
		return 0, datapath.ErrAgain
	}
	select {
	case b := <-l.queue:
		return l.take(p, b)
	case <-l.woken:
		return 0, datapath.ErrWoken
	case <-l.closed:
		return 0, os.ErrClosed
	}
}

func (l *Link) take(p, b []byte) (int, error) {
	n := copy(p, b)
	short := n < len(b)
	l.buffers.Put(&b)
	if short {
		return 0, fmt.Errorf("link %s: packet of %d octets for a buffer of %d", l.name, len(b), len(p))
	}
	return n, nil
}

// Wake implements datapath.Link.
func (l *Link) Wake() {
	select {
	case l.woken <- struct{}{}:
	default:
	}
}

// Write implements datapath.Link.
func (l *Link) Write(bufs [][]byte) error {
	select {
	case <-l.closed:
		return os.ErrClosed
	default:
	}
	if f := l.receive.Load(); f != nil {
		return (*f)(bufs)
	}
	return nil
}

// Name implements datapath.Link.
func (l *Link) Name() string { return l.name }

// MTU implements datapath.Link.
func (l *Link) MTU() int { return int(l.mtu.Load()) }

// SetMTU sets the MTU.
func (l *Link) SetMTU(mtu int) { l.mtu.Store(int64(mtu)) }

// Close implements datapath.Link.
func (l *Link) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}
