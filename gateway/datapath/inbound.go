package datapath

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// inbound is the goroutine that receives from one socket, and its scratch. It waits for nothing but
// the socket: what one peer sends costs the others no more than the time that it takes to refuse
// it.
type inbound struct {
	t     *Tunnel
	batch bind.Batch
	now   time.Time
	nonce [12]byte
	run   run
	tap   *tap
	write writer

	source struct { // of the last message
		from  conn.Endpoint
		judge *func(netip.Addr) bool
		may   bool
	}
}

// run is data messages that came one behind the other under one index.
type run struct {
	index    uint32
	messages []message
	octets   int
	packets  [][]byte
}

// message is a data message, which becomes the packet in it.
type message struct {
	b       []byte // nil: refused
	counter uint64
	from    conn.Endpoint
}

func newInbound(t *Tunnel) *inbound {
	shown := &tap{t: t, dir: natengine.Inbound}
	return &inbound{t: t, tap: shown, write: newWriter(t, shown)}
}

// receiveAll handles what next receives until the socket is closed.
func (in *inbound) receiveAll(next func(*bind.Batch) error) {
	for {
		if err := next(&in.batch); errors.Is(err, net.ErrClosed) {
			return
		} else if err != nil {
			in.t.options.Logger.Errorf("receive: %v", err)
			time.Sleep(receivePause)
			continue
		}
		in.now = time.Now()
		in.tap.begin()
		for !in.batch.Empty() {
			in.accept(in.batch.Next())
		}
		in.open()
	}
}

// accept sorts one message: data into the run at hand, handshakes into the device's queue.
func (in *inbound) accept(m []byte, from conn.Endpoint) {
	if !in.mayCome(from) {
		in.refuse(nil, m, from, natengine.DropTunnelSource)
		return
	}
	var messageType uint32
	if len(m) >= 4 {
		messageType = binary.LittleEndian.Uint32(m)
	}
	switch {
	case messageType == device.MessageTransportType && len(m) >= headerLen+tagLen:
		if index := binary.LittleEndian.Uint32(m[4:]); index != in.run.index {
			in.open()
			in.run.index = index
		}
		in.run.messages = append(in.run.messages, message{b: m, counter: binary.LittleEndian.Uint64(m[8:]), from: from})
	case messageType == device.MessageTransportType:
		in.refuse(nil, m, from, natengine.DropTunnelShort)
	case len(m) != 0 && len(m) == handshakeLen(messageType):
		if in.tap.on() {
			in.tap.to.handshake(in.t, natengine.Inbound, m, from, natengine.DropNone)
		}
		in.t.bind.offer(m, from)
	default:
		in.refuse(nil, m, from, natengine.DropTunnelType)
	}
}

// mayCome says whether messages may come from there. Those of one source are mostly together.
func (in *inbound) mayCome(from conn.Endpoint) bool {
	f := in.t.mayCome.Load()
	if f == nil {
		return true
	}
	if in.source.from != from || in.source.judge != f {
		in.source.from, in.source.judge, in.source.may = from, f, (*f)(from.DstIP())
	}
	return in.source.may
}

// open opens the run at hand, in the place of the messages, and writes its packets.
func (in *inbound) open() {
	r := &in.run
	if len(r.messages) == 0 {
		return
	}
	dev, k := lookup(in.t.dev, r.index)
	if p := in.t.peers.Load().byDevice[dev]; p != nil && k != nil && fresh(k, in.now) {
		in.openFor(p, k)
	} else {
		for i := range r.messages {
			in.refuse(nil, r.messages[i].b, r.messages[i].from, natengine.DropTunnelSession)
		}
		in.t.strange(r.messages[len(r.messages)-1].from, in.now)
	}
	clear(r.messages)
	r.messages, r.octets = r.messages[:0], 0
}

// openFor opens the run at hand under the keypair of a peer.
func (in *inbound) openFor(p *peer, k *device.Keypair) {
	r := &in.run
	aead := *keypairReceive.of(k)
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
	from, data := in.first(p, k)
	if from == nil {
		return
	}
	p.dev.SetEndpointFromPacket(from)
	peerReceived.of(p.dev).Add(uint64(r.octets))
	p.received(k, in.now, data)
	for i := range r.messages {
		m := &r.messages[i]
		if len(m.b) <= headerLen { // refused, or a keepalive
			if in.tap.on() && m.b != nil {
				in.showKeepalive(p.state, m)
			}
			continue
		}
		size := packetLen(m.b[headerLen:])
		if size < 0 {
			in.refuse(p.state, m.b, m.from, natengine.DropMalformed)
			continue
		}
		if in.tap.on() {
			in.show(p.state, m, size)
		}
		r.packets = append(r.packets, m.b[headerLen:headerLen+size])
	}
	if len(r.packets) > 0 {
		_ = in.write.packets(p.state, r.packets) // drops are counted there; the end of the link ends the outbound goroutine
		clear(r.packets)
		r.packets = r.packets[:0]
	}
}

// first refuses what was received before. It says where the last message came from that was not,
// nil for none, and whether one of them was more than a keepalive. Only opened messages come here,
// so forged ones move no window.
func (in *inbound) first(p *peer, k *device.Keypair) (from conn.Endpoint, data bool) {
	r := &in.run
	window := keypairWindow.of(k)
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

// refuse counts a message, or what was in it.
func (in *inbound) refuse(peer *natengine.PeerState, m []byte, from conn.Endpoint, why natengine.Drop) {
	in.t.engine.Count(peer, natengine.Inbound, why)
	if in.tap.on() && !in.tap.to.Narrow() {
		in.tap.outer(peer, m, from, why)
	}
}

// show shows a message that was opened, and the packet in it. The message's tag is gone, but not its
// header.
func (in *inbound) show(peer *natengine.PeerState, m *message, size int) {
	p := m.b[headerLen : headerLen+size]
	if headers, wanted := in.tap.wantsInner(peer, p, false, time.Duration(in.t.at(in.now))); wanted {
		in.tap.outer(peer, m.b[:len(m.b)+tagLen], m.from, natengine.DropNone)
		in.tap.showInner(peer, p, headers)
	}
}

func (in *inbound) showKeepalive(peer *natengine.PeerState, m *message) {
	if !in.tap.to.Narrow() {
		in.tap.outer(peer, m.b[:len(m.b)+tagLen], m.from, natengine.DropNone)
	}
}

// packetLen is the length that an IP packet says it has, without WireGuard's padding; negative when
// it cannot be.
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
