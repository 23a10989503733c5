package datapath

import (
	"sync"
	"sync/atomic"

	"github.com/isthmus-net/isthmus/natengine"
)

// maxBrought bounds the octets that wait in a Tunnel for its outbound goroutine after Bring.
const maxBrought = 4 << 20

// A diversion hands the packets of the link to f.
type diversion struct {
	f     func(p []byte)
	begun chan struct{} // closed when f gets every packet, and none is still on its way to a peer
	once  sync.Once
}

// Divert gives f each packet that the link delivers from now on, virtio header first, instead of
// sending it to a peer. When Divert returns, all earlier packets are sent, dropped, or wait for a
// session. The outbound goroutine calls f, which must neither block nor keep the packet. Packets of
// the in-process endpoint and of Bring still go to peers. Call Divert once, after Up.
func (t *Tunnel) Divert(f func(p []byte)) {
	d := &diversion{f: f, begun: make(chan struct{})}
	t.diverted.Store(d)
	t.link.Wake()
	select {
	case <-d.begun:
	case <-t.ended:
	}
}

// divert notes that the batch is empty. So no packet is on its way, and f gets all later packets.
func (o *outbound) divert() {
	if d := o.t.diverted.Load(); d != nil {
		d.once.Do(func() { close(d.begun) })
	}
}

// Bring sends a packet, virtio header first, as if the link had delivered it. It copies the packet.
// If there is no room, it drops the packet and counts it as DropNoMandate. Before Up packets wait.
func (t *Tunnel) Bring(p []byte) {
	if !t.brought.push(p) {
		t.engine.Count(nil, natengine.Outbound, natengine.DropNoMandate)
		return
	}
	t.link.Wake()
}

// readBrought hands on packets of Bring. If some remain queued, the batch is full.
func (o *outbound) readBrought(b *batch) {
	for !b.full {
		n := o.t.brought.pop(o.scratch)
		if n == 0 {
			return
		}
		o.outbound(b, o.scratch[:n])
	}
}

// parcels is a queue of packets, first in first out.
type parcels struct {
	some   atomic.Bool // the queue is not empty; testing this spares most batches the lock
	mu     sync.Mutex
	all    [][]byte
	octets int
}

func (q *parcels) push(p []byte) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.octets+len(p) > maxBrought {
		return false
	}
	q.all = append(q.all, append([]byte(nil), p...))
	q.octets += len(p)
	q.some.Store(true)
	return true
}

// pop copies the oldest packet into p and returns its length, 0 if the queue is empty.
func (q *parcels) pop(p []byte) int {
	if !q.some.Load() {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	n := copy(p, q.all[0])
	q.octets -= len(q.all[0])
	q.all[0] = nil
	if q.all = q.all[1:]; len(q.all) == 0 {
		q.all = nil
		q.some.Store(false)
	}
	return n
}
