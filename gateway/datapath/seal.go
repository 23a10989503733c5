package datapath

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"

	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/capture"
	"github.com/isthmus-net/isthmus/natengine"
)

const (
	headerLen = device.MessageTransportHeaderSize
	tagLen    = 16

	// The bounds of a batch. All packets of a batch are encrypted before any is sent. So packets
	// wait here for up to half a millisecond. With smaller batches, packets would wait in the queue
	// of the TUN instead. With half of slabLen TCP was slower, and with twice slabLen it was no
	// faster.
	slabLen  = 512 << 10 // approximate octets of messages
	maxBatch = 512       // packets
)

// sealer is the second half of the outbound goroutine. It encrypts each packet immediately, without
// copying it first. Consecutive packets for one peer are a run, and sealer sends the messages of a
// run together.
type sealer struct {
	t     *Tunnel
	tap   *tap   // shared with the first half of the outbound goroutine
	slab  []byte // messages: header, packet, padding, tag
	slot  int    // maximum octets of slab that one message uses
	used  int    // octets of slab in use
	large int    // size of the largest packet for which there is room
	mtu   int
	nonce [12]byte

	// State of the current batch.
	taken int // number of packets
	table *peerTable
	now   time.Time

	// State of the current run.
	state   *natengine.PeerState
	peer    *peer           // nil: the tunnel does not have this peer, or not yet
	via     *peer           // the peer that has the session keypair; it may belong to another identity than peer
	keypair *device.Keypair // nil: packets must wait for a session
	sealed  [][]byte

	staged []*peer // peers whose packets wait for a session
	expiry *time.Timer
}

func newSealer(t *Tunnel, shown *tap) sealer {
	s := sealer{t: t, tap: shown, expiry: time.AfterFunc(time.Hour, t.recheckSoon)}
	s.expiry.Stop()
	return s
}

// fit makes room for packets of the given MTU. It never reduces the room, because larger packets
// may be left over from the previous batch.
func (s *sealer) fit(mtu int) {
	s.mtu = mtu
	if mtu > s.large {
		s.large = mtu
		s.slot = slotFor(mtu)
		s.slab = make([]byte, slabLen+s.slot)
	}
}

// slotFor returns the number of octets of slab that the message of a packet uses: a multiple of a
// cache line.
func slotFor(size int) int {
	return (headerLen + size + device.PaddingMultiple - 1 + tagLen + 63) &^ 63
}

// maxSize implements sink. It reads the MTU anew for the first packet of a batch, because the
// goroutine may have waited long for that packet.
func (s *sealer) maxSize() int {
	if s.taken == 0 {
		s.fit(s.t.MTU())
	}
	return s.large
}

// take implements sink.
func (s *sealer) take(state *natengine.PeerState, p []byte) (more bool) {
	if s.taken == 0 {
		s.begin()
	}
	if state != s.state {
		s.turnTo(state, s.table.byState[state])
	}
	if s.keypair == nil || !s.seal(p, true) {
		s.stage(p)
	}
	s.taken++
	return s.taken < maxBatch && s.used+s.slot <= len(s.slab)
}

// begin begins a batch, with the current peers and time.
func (s *sealer) begin() { s.table, s.now = s.t.peers.Load(), time.Now() }

// turnTo ends the current run and begins one for another peer. If packets of that peer wait,
// turnTo encrypts them first.
func (s *sealer) turnTo(state *natengine.PeerState, p *peer) {
	s.flush()
	s.state, s.peer, s.keypair = state, p, nil
	if p == nil {
		return
	}
	if s.via, s.keypair = s.table.newestSession(p, s.now); s.keypair == nil || len(p.staged.ring) == 0 {
		return
	}
	s.expire(p)
	for len(p.staged.ring) > 0 && s.seal(p.staged.ring[0], false) {
		p.staged.drop()
	}
	if len(p.staged.ring) > 0 {
		s.keypair = nil // the waiting packets have used up the session's nonces
	}
}

// seal encrypts a packet. received is true if the packet belongs to the current batch, and false if
// it has waited for a session. seal returns false if the session has no nonce left.
func (s *sealer) seal(p []byte, received bool) bool {
	k := s.keypair
	counter := keypairNonce.ptr(k).Add(1) - 1
	if counter >= device.RejectAfterMessages {
		keypairNonce.ptr(k).Store(device.RejectAfterMessages)
		s.flush()
		s.keypair = nil
		return false
	}
	if s.used+s.slot > len(s.slab) {
		s.flush()
	}
	m := s.slab[s.used : s.used+s.slot : s.used+s.slot]
	s.used += slotFor(len(p))
	binary.LittleEndian.PutUint32(m, device.MessageTransportType)
	binary.LittleEndian.PutUint32(m[4:], *keypairRemote.ptr(k))
	binary.LittleEndian.PutUint64(m[8:], counter)
	binary.LittleEndian.PutUint64(s.nonce[4:], counter)
	shown := s.tap.active() && s.tap.showInner(s.state, p, received)
	if padded := min((len(p)+device.PaddingMultiple-1)&^(device.PaddingMultiple-1), s.mtu); padded > len(p) {
		plain := m[headerLen : headerLen+padded]
		clear(plain[copy(plain, p):])
		p = plain
	}
	s.sealed = append(s.sealed, (*keypairSend.ptr(k)).Seal(m[:headerLen], s.nonce[:], p, nil))
	if shown {
		s.tap.showOuter(s.state, s.sealed[len(s.sealed)-1], endpointOf(s.via.dev), natengine.DropNone)
	}
	return true
}

// flush sends the encrypted messages. Afterwards the slab is free.
func (s *sealer) flush() {
	if len(s.sealed) == 0 {
		return
	}
	// Record the sending time before sending. Otherwise the recorded time could be later than that
	// of an immediate answer of the peer.
	s.via.recordSent(s.keypair, s.now)
	if err := s.via.send(s.keypair, s.sealed, s.now); err != nil {
		reason := natengine.DropTunnelSend
		if errors.Is(err, bind.ErrShut) {
			reason = natengine.DropNoMandate
		}
		s.count(s.state, bind.Unsent(err, len(s.sealed)), reason)
		s.via.recordFailure(err, s.now)
	}
	clear(s.sealed)
	s.sealed, s.used = s.sealed[:0], 0
}

// finish ends a batch. It drops the references to keys and peers, which may be removed before the
// next batch.
func (s *sealer) finish() {
	s.flush()
	if s.t.recheck.Swap(false) && len(s.staged) > 0 {
		s.sendStaged()
	}
	s.taken, s.table, s.state, s.peer, s.via, s.keypair = 0, nil, nil, nil, nil, nil
}

// sendStaged sends or expires the waiting packets of all peers. It runs when the first packet of a
// peer has started to wait, and when recheckSoon was called: after a new session, or by the expiry
// timer.
func (s *sealer) sendStaged() {
	s.begin()
	s.staged = slices.DeleteFunc(s.staged, func(p *peer) bool {
		if s.table.byDevice[p.dev] != p { // the peer was removed or replaced
			s.count(p.state, len(p.staged.ring), natengine.DropTunnelQueue)
			p.staged = staging{}
			return true
		}
		s.expire(p)
		s.turnTo(p.state, p)
		return len(p.staged.ring) == 0
	})
	s.flush()
	if s.t.waiting.Store(len(s.staged) > 0); len(s.staged) > 0 {
		s.expiry.Reset(time.Second)
	}
}

// stage makes a packet wait for a session with its peer, and starts a handshake.
func (s *sealer) stage(p []byte) {
	if s.peer == nil {
		s.count(s.state, 1, natengine.DropPeerDown)
		if s.tap.active() {
			s.tap.showDropped(capture.Tunnel, s.state, p, natengine.DropPeerDown)
		}
		return
	}
	at := s.t.stamp(s.now)
	if len(s.peer.staged.ring) == 0 && !slices.Contains(s.staged, s.peer) {
		s.staged = append(s.staged, s.peer)
		s.t.waiting.Store(true)
		s.t.recheck.Store(true) // a session may have been made in the meantime
	}
	s.count(s.state, s.peer.staged.push(p, time.Duration(at)), natengine.DropTunnelQueue)
	s.peer.requestHandshake(at)
	// The peer may have any of our keys, so each identity starts a handshake.
	for _, q := range s.table.siblings[s.state] {
		if !q.retired.Load() {
			q.requestHandshake(at)
		}
	}
}

func (s *sealer) expire(p *peer) {
	s.count(p.state, p.staged.expire(time.Duration(s.t.stamp(s.now))), natengine.DropTunnelQueue)
}

func (s *sealer) count(state *natengine.PeerState, packets int, why natengine.Drop) {
	for range packets {
		s.t.engine.Count(state, natengine.Outbound, why)
	}
}
