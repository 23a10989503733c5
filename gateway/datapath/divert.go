package datapath

import (
	"sync"
	"sync/atomic"

	"github.com/isthmus-net/isthmus/natengine"
)

// maxInjected is the maximum number of octets that wait in a Tunnel, between Inject and the
// outbound goroutine.
const maxInjected = 4 << 20

// A diversion is the state of Divert.
type diversion struct {
	f     func(p []byte)
	begun chan struct{} // closed when f gets every packet and no packet is on its way to a peer
	once  sync.Once
}

// Divert makes the tunnel pass each further packet of the link to f instead of sending it to a
// peer. When Divert returns, every earlier packet has been sent or dropped, or waits for a
// session.
//
// The outbound goroutine calls f, which must neither block nor keep the packet. The packet starts
// with the virtio header. Packets of the in-process endpoint and of Inject still go to peers. Call
// Divert once, after Up.
func (t *Tunnel) Divert(f func(p []byte)) {
	d := &diversion{f: f, begun: make(chan struct{})}
	t.diverted.Store(d)
	t.link.Wake()
	select {
	case <-d.begun:
	case <-t.ended:
	}
}

// divert makes a waiting call of Divert return. From now on, the function passed to Divert gets all
// packets of the link. divert is called between batches, when no packet is on its way to a peer.
func (o *outbound) divert() {
	if d := o.t.diverted.Load(); d != nil {
		d.once.Do(func() { close(d.begun) })
	}
}

// Inject sends a packet to its peer, as if the link had delivered the packet. p starts with the
// virtio header; Inject copies it. If there is no room, the packet is dropped and counted as
// DropNoMandate. Before Up, packets wait.
func (t *Tunnel) Inject(p []byte) {
	if !t.injected.push(p) {
		t.engine.Count(nil, natengine.Outbound, natengine.DropNoMandate)
		return
	}
	t.link.Wake()
}

// readInjected adds the packets of Inject to a batch, until the batch is full.
func (o *outbound) readInjected(b *batch) {
	for !b.full {
		n := o.t.injected.pop(o.scratch)
		if n == 0 {
			return
		}
		o.handlePacket(b, o.scratch[:n])
	}
}

// parcels is a first-in, first-out queue of packets.
type parcels struct {
	nonEmpty atomic.Bool // lets most batches skip the lock
	mu       sync.Mutex
	all      [][]byte
	octets   int
}

func (q *parcels) push(p []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.octets+len(p) > maxInjected {
		return false
	}
	q.all = append(q.all, append([]byte(nil), p...))
	q.octets += len(p)
	q.nonEmpty.Store(true)
	return true
}

// pop removes the oldest packet, copies it into p, and returns its length. It returns 0 if the
// queue is empty.
func (q *parcels) pop(p []byte) int {
	if !q.nonEmpty.Load() {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	n := copy(p, q.all[0])
	q.octets -= len(q.all[0])
	q.all[0] = nil
	if q.all = q.all[1:]; len(q.all) == 0 {
		q.all = nil
		q.nonEmpty.Store(false)
	}
	return n
}
