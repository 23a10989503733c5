// Package inline is a second transport beside wireguard-go's device: a packet is read, translated, sealed and sent by one
// goroutine, and received, opened, translated and written by another, where the device hands it through three. Handshakes,
// timers, cookies, roaming and the keys themselves stay the device's; only the data messages of an established session
// take the short way.
//
//	        ┌────────── Transport ───────────┐
//	TUN ──► │ Read:    seal ─────────────────┼──────────────► Bind ══ peer
//	        │   no session ──► device ───────┼──► Send ─────►
//	TUN ◄── │ receive: open ◄────────────────┼─────────────── Bind ══ peer
//	        │   the rest ──► device ──► Write│
//	        └────────────────────────────────┘
//
// # What is shared with the device
//
// The keys of a session are unexported fields of wireguard-go's Keypair, found by name and type when the process starts
// (layout.go). New fails, and the gateway uses the device alone, when a field is not what it was, when the module is not
// the version that was reviewed, or when a trial session does not work both ways (trial.go).
//
//   - Nonces are drawn from the keypair's own counter, so that none is used twice.
//   - A keypair is used for sending while the device itself would (Keypairs.Current), and for at most RejectAfterTime.
//   - Replays: a message that belongs to a session passes the window of this package first, whichever way it goes on.
//     What goes on to the device has been opened once before, so that forged messages move no window.
//   - Timers: once a second a batch of each peer and direction goes through the device, which so renews keys, sends
//     keepalives and notices a dead peer as always. Messages under the keypair that is yet to be confirmed, and those
//     under the previous one, go through the device too.
//   - Order: what was left to the device is waited for, for at most 100 ms, before anything else of that session goes on.
//   - Allowed IPs: the source of an opened packet has to belong to the peer whose key opened it (datapath.WriteFrom).
package inline

import (
	"encoding/binary"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/replay"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

const (
	headerLen = device.MessageTransportHeaderSize
	tagLen    = 16

	// sampleInterval is how often a batch of a peer goes through the device. Its shortest timer is KEEPALIVE_TIMEOUT, 10 s.
	sampleInterval = time.Second
	// patience is how long a batch waits for one that the device has, so that order is kept. Microseconds are usual, but on
	// a busy machine its goroutines wait for their turn: with 2 ms here, 109 of 1,200,000 datagrams were overtaken in twenty
	// minutes beside other load. It ends at all because the device may have dropped that batch, with its peer.
	patience = 100 * time.Millisecond
)

// A Path is the gateway's packet path without a transport; *datapath.Device is one.
type Path interface {
	tun.Device
	// ReadEach is Read for who takes packets of up to most octets one by one, with the peer that each is for.
	ReadEach(most int, to datapath.Taker) error
	// WriteFrom is Write for packets of one peer, whose source has to be its own.
	WriteFrom(peer *natengine.PeerState, bufs [][]byte, offset int) (int, error)
}

// A Peer is a peer of the engine and its public key.
type Peer struct {
	State *natengine.PeerState
	Key   [32]byte
}

// Transport carries the packets of established sessions. TUN and Bind are what wireguard-go's device has to be made with,
// in the places of the path and of the bind given to New; Attach names the device. Until then, and for peers that SetPeers
// did not name, everything goes through the device.
type Transport struct {
	path   Path
	bind   conn.Bind
	layout layout
	count  func(*natengine.PeerState, natengine.Direction, natengine.Drop)

	dev      atomic.Pointer[device.Device]
	peers    atomic.Pointer[peerTable]
	sessions sync.Map // *device.Keypair: *session
	out      sender

	// sent is the counter after the last data message under each remote index, whoever sealed it.
	sentMu sync.Mutex
	sent   map[uint32]uint64
}

// peerTable is never modified after it was published.
type peerTable struct {
	byState  map[*natengine.PeerState]*peer
	byDevice map[*device.Peer]*peer
}

// peer is one peer as both sides of the seam know it.
type peer struct {
	state *natengine.PeerState
	dev   *device.Peer

	// Of the one sender.
	keypair *device.Keypair // last used inline
	sampled time.Time
	plain   uint64 // the batch since which, and in which, packets go through the device
}

// session is the receiving half of a keypair. Two goroutines may receive under one, over IPv4 and IPv6.
type session struct {
	index uint32
	peer  *device.Peer

	mu      sync.Mutex
	window  replay.Filter
	sampled time.Time

	written atomic.Uint64 // counter after the last message that the device has written
}

// New joins a path and a bind. count is told of every packet that is dropped here. The error says why this build of
// wireguard-go cannot be used in this way.
func New(path Path, bind conn.Bind, count func(*natengine.PeerState, natengine.Direction, natengine.Drop)) (*Transport, error) {
	if err := checkVersion(); err != nil {
		return nil, fmt.Errorf("inline transport: %w", err)
	}
	l, err := findLayout()
	if err != nil {
		return nil, fmt.Errorf("inline transport: %w", err)
	}
	t := &Transport{path: path, bind: bind, layout: l, count: count, sent: map[uint32]uint64{}}
	t.peers.Store(&peerTable{})
	t.out = sender{t: t, batch: 1} // 0 is no batch
	return t, nil
}

// Attach names the device that was made with TUN and Bind. Once, before any packet is expected to take the short way.
func (t *Transport) Attach(d *device.Device) { t.dev.Store(d) }

// SetPeers says which peer of the engine has which key. To be called after each change of either. Peers that the device
// does not know are left out.
func (t *Transport) SetPeers(peers []Peer) {
	dev, old := t.dev.Load(), t.peers.Load()
	table := &peerTable{byState: map[*natengine.PeerState]*peer{}, byDevice: map[*device.Peer]*peer{}}
	for _, want := range peers {
		d := dev.LookupPeer(device.NoisePublicKey(want.Key))
		if d == nil {
			continue
		}
		p := old.byState[want.State]
		if p == nil || p.dev != d {
			p = &peer{state: want.State, dev: d}
		}
		table.byState[want.State], table.byDevice[d] = p, p
	}
	t.peers.Store(table)
}

// Sweep forgets sessions that the device has forgotten. Call it about once a second.
func (t *Transport) Sweep() {
	dev := t.dev.Load()
	sessions := 0
	t.sessions.Range(func(key, value any) bool {
		if _, k := t.layout.lookup(dev, value.(*session).index); k != key.(*device.Keypair) {
			t.sessions.Delete(key)
		} else {
			sessions++
		}
		return true
	})
	t.sentMu.Lock()
	defer t.sentMu.Unlock()
	if len(t.sent) > 4*sessions+1024 { // indices of the past: forgetting those in use costs a wait of patience
		clear(t.sent)
	}
}

// TUN is the tun.Device for wireguard-go's device.
func (t *Transport) TUN() tun.Device { return tunSide{t.path, t} }

// Bind is the conn.Bind for wireguard-go's device.
func (t *Transport) Bind() conn.Bind { return bindSide{t.bind, t} }

// tunSide is what the device sees of the path.
type tunSide struct {
	tun.Device
	t *Transport
}

// Read returns only what has to go through the device.
func (s tunSide) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	return s.t.read(bufs, sizes, offset)
}

// Write takes what went through the device. The octets before a packet are still the header of its message.
func (s tunSide) Write(bufs [][]byte, offset int) (int, error) {
	n, err := s.Device.Write(bufs, offset)
	if len(bufs) > 0 && offset == headerLen {
		s.t.noteWritten(bufs[len(bufs)-1])
	}
	return n, err
}

// bindSide is what the device sees of the sockets.
type bindSide struct {
	conn.Bind
	t *Transport
}

// inPlace is a bind that hands messages on where it received them; *bind.Bind is one.
type inPlace interface {
	OpenInPlace(port uint16) ([]func(*bind.Batch) error, uint16, error)
}

// Open wraps the receive functions: they return only what has to go through the device.
func (s bindSide) Open(port uint16) (all []conn.ReceiveFunc, actual uint16, err error) {
	var fns []func(*bind.Batch) error
	if b, ok := s.Bind.(inPlace); ok {
		fns, actual, err = b.OpenInPlace(port)
	} else {
		var plain []conn.ReceiveFunc
		plain, actual, err = s.Bind.Open(port)
		for _, next := range plain {
			fns = append(fns, buffered(next, s.BatchSize()))
		}
	}
	for _, next := range fns {
		all = append(all, newReceiver(s.t, next).receive)
	}
	return all, actual, err
}

// Send notes how far the data messages of a session went.
func (s bindSide) Send(bufs [][]byte, ep conn.Endpoint) error {
	err := s.Bind.Send(bufs, ep)
	if len(bufs) > 0 && isData(bufs[len(bufs)-1]) {
		last := bufs[len(bufs)-1]
		s.t.noteSent(receiverOf(last), counterOf(last)+1)
	}
	return err
}

// noteWritten notes how far the device has come with what it received under a session.
func (t *Transport) noteWritten(last []byte) {
	if _, k := t.layout.lookup(t.dev.Load(), receiverOf(last)); k != nil {
		if s, ok := t.sessions.Load(k); ok {
			raise(&s.(*session).written, counterOf(last)+1)
		}
	}
}

func (t *Transport) noteSent(index uint32, next uint64) {
	t.sentMu.Lock()
	defer t.sentMu.Unlock()
	t.sent[index] = max(t.sent[index], next)
}

func (t *Transport) sentUpTo(index uint32) uint64 {
	t.sentMu.Lock()
	defer t.sentMu.Unlock()
	return t.sent[index]
}

// await waits until done says so, or for as long as patience lasts. It looks a few times in any case: when the process was
// stopped meanwhile, so was the device.
func await(done func() bool) {
	end := time.Now().Add(patience)
	for looks := 0; !done() && (looks < 20 || time.Now().Before(end)); looks++ {
		time.Sleep(20 * time.Microsecond)
	}
}

func raise(v *atomic.Uint64, to uint64) {
	for {
		old := v.Load()
		if old >= to || v.CompareAndSwap(old, to) {
			return
		}
	}
}

// A data message (WireGuard paper, section 5.4.6): type 4 and three zero octets, the receiver's index, the counter, all
// little-endian; then the sealed packet.
func isData(m []byte) bool {
	return len(m) >= headerLen+tagLen && binary.LittleEndian.Uint32(m) == device.MessageTransportType
}
func receiverOf(m []byte) uint32 { return binary.LittleEndian.Uint32(m[4:]) }
func counterOf(m []byte) uint64  { return binary.LittleEndian.Uint64(m[8:]) }

// setNonce makes the AEAD's nonce of a counter.
func setNonce(nonce *[12]byte, counter uint64) { binary.LittleEndian.PutUint64(nonce[4:], counter) }
