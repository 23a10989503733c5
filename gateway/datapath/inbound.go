package datapath

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// inbound is the goroutine that receives from one socket, with its scratch memory. It blocks only
// on the socket. While it keeps up, messages pass directly from the socket to NAT:
//
//	socket ── slab ─┬───────────────────────────────── run ─ open, NAT, write
//	                └─ backlog: a queue for each peer ──┘
//
// If more messages wait in the socket than one call receives, inbound first drains the socket.
// The messages then wait in the backlog, which refers to them in the slab where they were
// received.
type inbound struct {
	t     *Tunnel
	slab  *slab   // the slab being filled; nil: none
	slabs int     // number of allocated slabs, including free ones
	free  []*slab // slabs without messages
	now   time.Time
	nonce [12]byte
	run   run
	tap   *tap
	write writer

	backlog backlog
	taken   []*slab // slabs of the messages taken from the backlog and not released yet, one entry per message

	source struct { // result of the last sourceAllowed
		from    conn.Endpoint
		filter  *func(netip.Addr) bool
		allowed bool
	}
	sender struct { // result of the last senderOf
		session bool // a session has the index; otherwise the other fields are not set
		index   uint32
		from    conn.Endpoint
		peer    *peer
	}
}

// A run is a sequence of data messages with the same receiver index.
type run struct {
	index    uint32
	messages []message
	octets   int
	packets  [][]byte
}

// message is a data message. After decryption, its content is a packet.
type message struct {
	b       []byte // nil if the message was refused
	counter uint64
	from    conn.Endpoint
}

func newInbound(t *Tunnel) *inbound {
	shown := &tap{t: t, dir: natengine.Inbound}
	return &inbound{t: t, tap: shown, write: newWriter(t, shown)}
}

// receiveAll calls receive again and again, and handles the datagrams, until the socket is closed.
func (in *inbound) receiveAll(receive func(b *bind.Batch, mayBlock bool) error) {
	for {
		if err := in.drain(receive); errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			in.t.options.Logger.Errorf("receive: %v", err)
			time.Sleep(receivePause)
		}
		if !in.backlog.empty() {
			in.work()
			runtime.Gosched() // give other goroutines of this processor a turn
		}
	}
}

// drain receives until the socket is empty. If the backlog is empty and one call empties the
// socket, drain handles the messages at once. Otherwise it adds them to the backlog. If the backlog
// is empty, drain waits for a message.
func (in *inbound) drain(receive func(b *bind.Batch, mayBlock bool) error) error {
	mayBlock := in.backlog.empty()
	in.sender.session = false // the cached result may be outdated
	for range drainCalls {
		s := in.room()
		if s == nil {
			return nil
		}
		if err := receive(&s.Batch, mayBlock); err != nil {
			return err
		}
		in.now = time.Now()
		in.tap.begin()
		if s.Lost > 0 {
			in.t.engine.CountMany(nil, natengine.Inbound, natengine.DropSocketBuffer, s.Lost)
			s.Lost = 0
		}
		if mayBlock && !s.More {
			for !s.Empty() {
				in.accept(s.Next())
			}
			in.open()
			s.Reset()
			return nil
		}
		mayBlock = false
		for !s.Empty() {
			if m, from := s.Next(); in.classify(m, from) {
				in.enqueue(m, from, s)
			}
		}
		s.Pack()
		if !s.More {
			return nil
		}
	}
	return nil
}

// room returns a slab with room for a datagram, or nil if all slabs are full of waiting messages.
func (in *inbound) room() *slab {
	if s := in.slab; s != nil {
		if s.waiting == 0 {
			s.Reset()
		}
		if s.Space() != nil {
			return s
		}
		in.slab = nil // release reuses the slab once none of its messages is waiting
	}
	if n := len(in.free); n > 0 {
		in.slab, in.free = in.free[n-1], in.free[:n-1]
	} else if in.slabs < maxSlabs {
		in.slab = new(slab)
		in.slabs++
	}
	return in.slab
}

// release releases the messages taken from the backlog, and reuses slabs in which no message waits.
func (in *inbound) release() {
	for i, s := range in.taken {
		if s.waiting--; s.waiting == 0 && s != in.slab {
			s.Reset()
			in.free = append(in.free, s)
		}
		in.taken[i] = nil
	}
	in.taken = in.taken[:0]
	if in.backlog.empty() && len(in.free) > keptSlabs { // the flood has ended
		in.slabs -= len(in.free) - keptSlabs
		clear(in.free[keptSlabs:])
		in.free = in.free[:keptSlabs]
		in.backlog.trim()
	}
}

// enqueue adds a data message to the backlog, or refuses it.
func (in *inbound) enqueue(m []byte, from conn.Endpoint, s *slab) {
	p, session := in.senderOf(m, from)
	// Refuse the message now if no session can decrypt it. It must not fill the queue of messages
	// without a peer, because peers that have just moved need that queue.
	if !session {
		in.refuse(nil, m, from, natengine.DropTunnelSession)
		in.t.unknownSession(from, in.now)
		return
	}
	if in.backlog.push(p, waitingMessage{m, from, s}) {
		return
	}
	var state *natengine.PeerState
	if p != nil {
		state = p.state
	}
	in.refuse(state, m, from, natengine.DropReceiveQueue)
}

// senderOf returns the peer in whose queue a data message waits for decryption: the peer with the
// message's receiver index, if the message comes from that peer's address. The index alone proves
// nothing, because an observer on the path can read it and forge messages from elsewhere. So a
// message from another address has no peer. If a peer moves, its messages have no peer until one of
// them is decrypted. session reports whether any session has the index.
func (in *inbound) senderOf(m []byte, from conn.Endpoint) (p *peer, session bool) {
	c, index := &in.sender, binary.LittleEndian.Uint32(m[4:])
	if c.session && c.index == index && c.from == from {
		return c.peer, true
	}
	dev, k := in.t.lookup(index)
	p = in.t.peers.Load().byDevice[dev]
	session = p != nil && k != nil
	if !session || !sameEndpoint(endpointOf(dev), from) {
		p = nil
	}
	c.session, c.index, c.from, c.peer = session, index, from, p
	return p, session
}

// sameEndpoint reports whether two endpoints have the same remote address and port.
func sameEndpoint(a, b conn.Endpoint) bool {
	if a == b {
		return true
	}
	x, ok := a.(interface{ AddrPort() netip.AddrPort })
	y, too := b.(interface{ AddrPort() netip.AddrPort })
	return ok && too && x.AddrPort() == y.AddrPort()
}

// work decrypts and handles a part of the backlog.
func (in *inbound) work() {
	in.now = time.Now()
	in.tap.begin()
	for cost := 0; cost < workCost && len(in.taken) < workMessages && !in.backlog.empty(); {
		w := in.backlog.pop()
		in.taken = append(in.taken, w.in)
		cost += w.cost()
		in.add(w.b, w.from)
	}
	in.open()
	in.release()
}

// accept handles one message of a batch. After the last one, the caller must call open.
func (in *inbound) accept(m []byte, from conn.Endpoint) {
	if in.classify(m, from) {
		in.add(m, from)
	}
}

// add adds a data message to the current run. A message with another receiver index ends the run
// and starts a new one.
func (in *inbound) add(m []byte, from conn.Endpoint) {
	if index := binary.LittleEndian.Uint32(m[4:]); index != in.run.index {
		in.open()
		in.run.index = index
	}
	in.run.messages = append(in.run.messages, message{b: m, counter: binary.LittleEndian.Uint64(m[8:]), from: from})
}

// classify reports whether a message is data. It queues a handshake message for the device, and
// refuses any other message.
func (in *inbound) classify(m []byte, from conn.Endpoint) bool {
	if !in.sourceAllowed(from) {
		in.refuse(nil, m, from, natengine.DropTunnelSource)
		return false
	}
	var messageType uint32
	if len(m) >= 4 {
		messageType = binary.LittleEndian.Uint32(m)
	}
	switch {
	case messageType == device.MessageTransportType && len(m) >= headerLen+tagLen:
		return true
	case messageType == device.MessageTransportType:
		in.refuse(nil, m, from, natengine.DropTunnelShort)
	case len(m) != 0 && len(m) == handshakeLen(messageType):
		if in.tap.active() {
			in.tap.to.handshake(in.t, natengine.Inbound, m, from, natengine.DropNone)
		}
		in.t.identityOf(m).bind.offer(m, from, in.now)
	default:
		in.refuse(nil, m, from, natengine.DropTunnelType)
	}
	return false
}

// sourceAllowed reports whether messages may come from an endpoint. It caches its last result,
// because consecutive messages mostly have the same source.
func (in *inbound) sourceAllowed(from conn.Endpoint) bool {
	f := in.t.sourceFilter.Load()
	if f == nil {
		return true
	}
	if in.source.from != from || in.source.filter != f {
		in.source.from, in.source.filter, in.source.allowed = from, f, (*f)(from.DstIP())
	}
	return in.source.allowed
}

// open decrypts the current run in place, and passes its packets to the writer.
func (in *inbound) open() {
	r := &in.run
	if len(r.messages) == 0 {
		return
	}
	dev, k := in.t.lookup(r.index)
	if p := in.t.peers.Load().byDevice[dev]; p != nil && k != nil && isFresh(k, in.now) {
		in.openFor(p, k)
	} else {
		for i := range r.messages {
			in.refuse(nil, r.messages[i].b, r.messages[i].from, natengine.DropTunnelSession)
		}
		in.t.unknownSession(r.messages[len(r.messages)-1].from, in.now)
	}
	clear(r.messages)
	r.messages, r.octets = r.messages[:0], 0
}

func (in *inbound) openFor(p *peer, k *device.Keypair) {
	r := &in.run
	aead := *keypairReceive.ptr(k)
	for i := range r.messages {
		m := &r.messages[i]
		binary.LittleEndian.PutUint64(in.nonce[4:], m.counter)
		content := m.b[headerLen:]
		if opened, err := aead.Open(content[:0], in.nonce[:], content, nil); err != nil {
			in.refuse(p.state, m.b, m.from, natengine.DropTunnelForged)
			m.b = nil
		} else {
			m.b = m.b[:headerLen+len(opened)]
		}
	}
	from, data := in.refuseReplays(p, k)
	if from == nil {
		return
	}
	p.recordEndpoint(k, from) // before any answer is sent, because send uses the recorded endpoint
	p.dev.SetEndpointFromPacket(from)
	in.t.locations.note(p, from, in.now)
	peerReceived.ptr(p.dev).Add(uint64(r.octets))
	p.recordReceived(k, in.now, data)
	for i := range r.messages {
		m := &r.messages[i]
		if len(m.b) <= headerLen { // nil if refused; otherwise a keepalive
			if in.tap.active() && m.b != nil {
				in.showKeepalive(p.state, m)
			}
			continue
		}
		size := packetLen(m.b[headerLen:])
		if size < 0 {
			in.refuse(p.state, m.b, m.from, natengine.DropMalformed)
			continue
		}
		if in.tap.active() {
			in.show(p.state, m, size)
		}
		r.packets = append(r.packets, m.b[headerLen:headerLen+size])
	}
	if len(r.packets) > 0 {
		// Ignore the error: dropped packets are already counted, and the outbound goroutine detects
		// the end of the link.
		_ = in.write.writePackets(p, r.packets)
		clear(r.packets)
		r.packets = r.packets[:0]
	}
}

// refuseReplays refuses the replayed messages of the current run. from is the endpoint of the last
// other message, or nil if all are replays. data reports whether one of the other messages is more
// than a keepalive. refuseReplays ignores messages that failed decryption, so forged ones do not
// move the replay window.
func (in *inbound) refuseReplays(p *peer, k *device.Keypair) (from conn.Endpoint, data bool) {
	r := &in.run
	window := keypairWindow.ptr(k)
	p.windows.Lock()
	defer p.windows.Unlock()
	for i := range r.messages {
		m := &r.messages[i]
		if m.b == nil {
			continue
		}
		if !window.ValidateCounter(m.counter, device.RejectAfterMessages) {
			in.refuse(p.state, m.b, m.from, natengine.DropTunnelReplay)
			m.b = nil
			continue
		}
		from, data = m.from, data || len(m.b) > headerLen
		r.octets += len(m.b) + tagLen
	}
	return from, data
}

// refuse counts a refused message and shows it to a capture.
func (in *inbound) refuse(peer *natengine.PeerState, m []byte, from conn.Endpoint, why natengine.Drop) {
	in.t.engine.Count(peer, natengine.Inbound, why)
	if in.tap.active() && !in.tap.to.Narrow() {
		in.tap.showOuter(peer, m, from, why)
	}
}

// show shows an opened message and its packet to a capture. m.b includes the message's header,
// but not its tag.
func (in *inbound) show(peer *natengine.PeerState, m *message, size int) {
	p := m.b[headerLen : headerLen+size]
	if headers, wanted := in.tap.wantsInner(peer, p, false, time.Duration(in.t.stamp(in.now))); wanted {
		in.tap.showOuter(peer, m.b[:len(m.b)+tagLen], m.from, natengine.DropNone)
		in.tap.addInner(peer, p, headers)
	}
}

func (in *inbound) showKeepalive(peer *natengine.PeerState, m *message) {
	if !in.tap.to.Narrow() {
		in.tap.showOuter(peer, m.b[:len(m.b)+tagLen], m.from, natengine.DropNone)
	}
}

// packetLen returns the length given in the header of an IP packet, which excludes WireGuard's
// padding. It returns a negative number if the length is invalid.
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
