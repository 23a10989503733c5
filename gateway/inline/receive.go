package inline

import (
	"encoding/binary"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// receiver is the scratch of the one goroutine that receives from a socket.
type receiver struct {
	t     *Transport
	next  func(*bind.Batch) error
	batch bind.Batch
	nonce [12]byte

	scratch []byte            // a message opened before the device gets it
	run     [][]byte          // opened packets of one session, in the place of their messages
	from    incoming          // whose
	octets  int               // of their messages
	last    conn.Endpoint     // where the last of them came from
	pending []pendingReceived // what the device was given last
}

// incoming is what a receiver index means.
type incoming struct {
	index   uint32
	session *session // nil: the index is nobody's
	keypair *device.Keypair
	state   *natengine.PeerState
	inline  bool // else the device has to have its messages
}

// pendingReceived is a packet that has to be written before the next of its session is.
type pendingReceived struct {
	session *session
	next    uint64
}

func newReceiver(t *Transport, next func(*bind.Batch) error) *receiver {
	return &receiver{t: t, next: next, scratch: make([]byte, 0, device.MaxMessageSize)}
}

// buffered is for a bind that receives into buffers that it is given.
func buffered(next conn.ReceiveFunc, batch int) func(*bind.Batch) error {
	slots, sizes, eps := make([][]byte, batch), make([]int, batch), make([]conn.Endpoint, batch)
	for i := range slots {
		slots[i] = make([]byte, device.MaxMessageSize)
	}
	return func(b *bind.Batch) error {
		n, err := next(slots, sizes, eps)
		for i := range n {
			b.Add(slots[i][:sizes[i]], 0, eps[i])
		}
		return err
	}
}

// receive is a conn.ReceiveFunc: it hands on packets until there are messages for the device, and returns those.
func (r *receiver) receive(bufs [][]byte, sizes []int, eps []conn.Endpoint) (int, error) {
	for _, p := range r.pending {
		await(func() bool { return p.session.written.Load() >= p.next })
	}
	clear(r.pending)
	r.pending = r.pending[:0]
	for {
		if r.batch.Empty() {
			if err := r.next(&r.batch); err != nil {
				return 0, err
			}
		}
		left, now := 0, time.Now()
		r.from = incoming{} // what an index means may have changed
		for left < len(bufs) && !r.batch.Empty() {
			if m, from := r.batch.Next(); r.accept(m, from, now) {
				sizes[left], eps[left] = copy(bufs[left], m), from
				left++
			}
		}
		r.flush()
		if left > 0 {
			return left, nil
		}
	}
}

// accept handles one message. It says whether the device has to have it, which then is as it came.
func (r *receiver) accept(m []byte, ep conn.Endpoint, now time.Time) bool {
	if !isData(m) {
		return true
	}
	if index := receiverOf(m); r.from.index != index || r.from.session == nil {
		r.flush()
		r.from = r.incoming(index, now)
	}
	f := &r.from
	if f.session == nil {
		r.t.count(nil, natengine.Inbound, natengine.DropTunnelSession)
		return false // the device would drop it too, and tell nobody
	}
	counter, content := counterOf(m), m[headerLen:]
	setNonce(&r.nonce, counter)
	into := content[:0]
	keepalive := len(content) == tagLen
	plain := !f.inline || keepalive
	if plain {
		into = r.scratch
	}
	p, err := r.t.layout.opener(f.keypair).Open(into, r.nonce[:], content, nil)
	if err != nil {
		r.t.count(f.state, natengine.Inbound, natengine.DropTunnelForged)
		return false
	}
	if !f.session.first(counter) {
		r.t.count(f.state, natengine.Inbound, natengine.DropTunnelReplay)
		return false
	}
	if plain {
		if !keepalive {
			r.pending = append(r.pending, pendingReceived{f.session, counter + 1})
		}
		return true
	}
	size := packetLen(p)
	if size < 0 {
		r.t.count(f.state, natengine.Inbound, natengine.DropMalformed)
		return false
	}
	r.run = append(r.run, m[:headerLen+size])
	r.octets += len(m)
	r.last = ep
	return false
}

// flush writes the opened packets.
func (r *receiver) flush() {
	if len(r.run) == 0 {
		return
	}
	dev := r.from.session.peer
	dev.SetEndpointFromPacket(r.last)
	r.t.layout.received(dev, r.octets)
	_, _ = r.t.path.WriteFrom(r.from.state, r.run, headerLen) // drops are counted there; the end of the link ends Read
	clear(r.run)
	r.run, r.octets, r.last = r.run[:0], 0, nil
}

// first reports whether a counter is seen for the first time, and remembers it.
func (s *session) first(counter uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.window.ValidateCounter(counter, device.RejectAfterMessages)
}

// due reports whether the device should see a batch again.
func (s *session) due(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.sampled) < sampleInterval {
		return false
	}
	s.sampled = now
	return true
}

// incoming looks a receiver index up, for one batch. A session begins with the first message under its keypair, so that
// its window sees all of them: nobody can seal one before the keypair is in the device's table.
func (r *receiver) incoming(index uint32, now time.Time) incoming {
	t := r.t
	dev, k := t.layout.lookup(t.dev.Load(), index)
	if k == nil || !t.layout.fresh(k, now) {
		return incoming{}
	}
	value, ok := t.sessions.Load(k)
	if !ok {
		value, _ = t.sessions.LoadOrStore(k, &session{index: index, peer: dev})
	}
	f := incoming{index: index, session: value.(*session), keypair: k}
	if p := t.peers.Load().byDevice[dev]; p != nil {
		f.state = p.state
		f.inline = k == t.layout.current(dev) && !r.waits(f.session) && !f.session.due(now)
	}
	return f
}

// waits reports whether the device is given packets of the session in this batch.
func (r *receiver) waits(s *session) bool {
	return slices.ContainsFunc(r.pending, func(p pendingReceived) bool { return p.session == s })
}

// packetLen is the length that an IP packet says it has, without WireGuard's padding; negative when it cannot be.
func packetLen(p []byte) int {
	size := -1
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		size = int(binary.BigEndian.Uint16(p[2:]))
	case len(p) >= 40 && p[0]>>4 == 6:
		size = 40 + int(binary.BigEndian.Uint16(p[4:]))
	}
	if size > len(p) {
		return -1
	}
	return size
}
