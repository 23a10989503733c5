package datapath

import (
	"encoding/binary"
	"net/netip"
	"reflect"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/natengine"
)

// MaxInjected exports maxInjected.
const MaxInjected = maxInjected

// Read and Write are the two halves of a Tunnel between link and engine, without encryption and
// decryption.

// Attach adds an in-process endpoint to the tunnel. The tunnel's Close closes it as well.
func (t *Tunnel) Attach(local *Local) {
	t.local = local
	local.attach(t.link.Wake, func() {})
}

// Read fills bufs with translated packets, each at offset in its buffer. All buffers must have
// the same length.
func (t *Tunnel) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	b := reads.Get().(*buffers)
	defer reads.Put(b)
	*b = buffers{bufs: bufs, sizes: sizes, offset: offset}
	err := t.out.read(&batch{to: b})
	return b.n, err
}

type buffers struct {
	bufs   [][]byte
	sizes  []int
	offset int
	n      int // number of full buffers
}

func (b *buffers) maxSize() int { return len(b.bufs[0]) - b.offset - 31 }

func (b *buffers) take(_ *natengine.PeerState, p []byte) (more bool) {
	b.sizes[b.n] = copy(b.bufs[b.n][b.offset:], p)
	b.n++
	return b.n < len(b.bufs)
}

// Write translates packets, each at offset in its buffer. They count as packets from the tunnel's
// peer, or from no peer if the tunnel has none.
func (t *Tunnel) Write(bufs [][]byte, offset int) (int, error) {
	w := writes.Get().(*write)
	defer writes.Put(w)
	w.t, w.bufs = t, w.bufs[:0]
	for _, b := range bufs {
		w.bufs = append(w.bufs, b[offset:])
	}
	from := w.anyone
	from.messages[0].paid.Store(0)
	from.messages[1].paid.Store(0)
	from.others.paid.Store(0)
	for _, p := range t.peers.Load().byState {
		from = p
	}
	if err := w.writePackets(from, w.bufs); err != nil {
		return 0, err
	}
	return len(bufs), nil
}

type write struct {
	writer
	bufs   [][]byte
	anyone *peer
}

var (
	reads  = sync.Pool{New: func() any { return new(buffers) }}
	writes = sync.Pool{New: func() any { return &write{writer: newWriter(nil, &tap{dir: natengine.Inbound}), anyone: new(peer)} }}
)

// The functions below give tests access to the state of a session.

// Keypair returns the keypair with which a tunnel encrypts for a peer; nil: none.
func (t *Tunnel) Keypair(key [32]byte) *device.Keypair {
	p := t.peer(key)
	if p == nil {
		return nil
	}
	return peerKeypairs.ptr(p.dev).Current()
}

// Unconfirmed reports whether there is a session with the peer that the peer has started and not
// yet confirmed.
func (t *Tunnel) Unconfirmed(key [32]byte) bool {
	return keypairsNext.ptr(peerKeypairs.ptr(t.peer(key).dev)).Load() != nil
}

// Initiator reports whether this side started the session.
func Initiator(k *device.Keypair) bool { return *keypairInitiator.ptr(k) }

// Created returns the creation time of a session.
func Created(k *device.Keypair) time.Time { return *keypairCreated.ptr(k) }

// SetNonce sets the next nonce of a session.
func SetNonce(k *device.Keypair, n uint64) { keypairNonce.ptr(k).Store(n) }

// Seal returns a data message with the given content and the next nonce of the session.
func (t *Tunnel) Seal(key [32]byte, content []byte) []byte {
	k := t.Keypair(key)
	return SealWith(k, keypairNonce.ptr(k).Add(1)-1, content)
}

// SealWith returns a data message with the given nonce and content.
func SealWith(k *device.Keypair, counter uint64, content []byte) []byte {
	m := make([]byte, headerLen, headerLen+len(content)+tagLen)
	binary.LittleEndian.PutUint32(m, device.MessageTransportType)
	binary.LittleEndian.PutUint32(m[4:], *keypairRemote.ptr(k))
	binary.LittleEndian.PutUint64(m[8:], counter)
	var nonce [12]byte
	binary.LittleEndian.PutUint64(nonce[4:], counter)
	return (*keypairSend.ptr(k)).Seal(m, nonce[:], content, nil)
}

// Initiation returns a valid handshake initiation.
func (t *Tunnel) Initiation(key [32]byte) []byte {
	dev := t.peer(key).dev
	msg, err := t.current().dev.CreateMessageInitiation(dev)
	if err != nil {
		panic(err)
	}
	m, _ := binary.Append(nil, binary.LittleEndian, msg) // cannot fail
	var macs device.CookieGenerator
	macs.Init(key)
	macs.AddMacs(m)
	return m
}

// Keepalive makes the device send a keepalive.
func (t *Tunnel) Keepalive(key [32]byte) { t.peer(key).dev.SendKeepalive() }

// Waiting reports whether packets wait for a session.
func (t *Tunnel) Waiting() bool { return t.waiting.Load() }

// A Receiver does the work of an inbound goroutine, without a socket.
type Receiver struct{ in *inbound }

func NewReceiver(t *Tunnel) Receiver { return Receiver{newInbound(t)} }

// Receive handles a batch of datagrams and modifies them.
func (r Receiver) Receive(datagrams [][]byte, from conn.Endpoint) {
	r.in.now = time.Now()
	for _, m := range datagrams {
		r.in.accept(m, from)
	}
	r.in.open()
}

// ReceiveAll handles the datagrams that next returns, until next returns net.ErrClosed.
func (r Receiver) ReceiveAll(next func(b *bind.Batch, mayBlock bool) error) { r.in.receiveAll(next) }

// Slabs returns the number of allocated slabs.
func (r Receiver) Slabs() int { return r.in.slabs }

// FieldOf exports fieldOf.
func FieldOf[S, F any](names ...string) (offset uintptr) { return fieldOf[S, F](names...).offset }

const (
	WireguardVersion = wireguardVersion
	MaxStaged        = maxStaged
	MaxStagedBytes   = maxStagedBytes
	LaggardSilence   = laggardSilence
	LaggardInterval  = laggardInterval
)

// Staging exports staging.
type Staging struct{ s staging }

func (s *Staging) Push(p []byte, now time.Duration) (dropped int) { return s.s.push(p, now) }
func (s *Staging) Expire(now time.Duration) (dropped int)         { return s.s.expire(now) }
func (s *Staging) Oldest() []byte                                 { return s.s.ring[0] }
func (s *Staging) Drop()                                          { s.s.drop() }
func (s *Staging) Len() (packets, octets int)                     { return len(s.s.ring), s.s.bytes }
func (s *Staging) Empty() bool                                    { return s.s.ring == nil && s.s.times == nil && s.s.bytes == 0 }

// WithoutFinalizers makes the peers of a tunnel usable in a testing/synctest bubble. wireguard-go
// sets a finalizer that reads from a channel; outside of the bubble, that would end the process.
func (t *Tunnel) WithoutFinalizers() {
	for dev := range t.peers.Load().byDevice {
		WithoutFinalizers(dev)
	}
}

// WithoutFinalizers removes the finalizer of one peer.
func WithoutFinalizers(p *device.Peer) {
	for _, name := range []string{"inbound", "outbound"} {
		f := reflect.ValueOf(p).Elem().FieldByName("queue").FieldByName(name)
		runtime.SetFinalizer(reflect.NewAt(f.Type(), unsafe.Pointer(f.UnsafeAddr())).Elem().Interface(), nil)
	}
}

// Requested returns 1 if a handshake with a peer is requested or scheduled, and otherwise 0.
func (t *Tunnel) Requested(key [32]byte) int {
	if t.peer(key).initiation.armed.Load() {
		return 1
	}
	return 0
}

// Backlog exports backlog, with numbered peers. Messages with the number 0 belong to no peer.
type Backlog struct {
	b     backlog
	peers map[int]*peer
	slab  slab
}

// Push adds a message, whose first octet is the number of its peer.
func (b *Backlog) Push(m []byte) bool {
	p := b.peers[int(m[0])]
	if p == nil && m[0] != 0 {
		if b.peers == nil {
			b.peers = make(map[int]*peer)
		}
		p = new(peer)
		b.peers[int(m[0])] = p
	}
	return b.b.push(p, waitingMessage{m, nil, &b.slab})
}

func (b *Backlog) Pop() []byte { return b.b.pop().b }
func (b *Backlog) Empty() bool { return b.b.empty() }

const (
	MessageCost    = messageCost
	Quantum        = quantum
	UnknownQuantum = unknownQuantum
	BacklogLimit   = backlogLimit
	LeastQueue     = leastQueue
	UnknownLimit   = unknownLimit
)

// Budgets exports budgets, with numbered addresses.
type Budgets struct{ b budgets }

func (b *Budgets) Spend(addr netip.Addr, proven bool, now time.Time, every time.Duration, burst int) bool {
	return b.b.spend(budget{addr: addr, proven: proven}, now, every, burst)
}
func (b *Budgets) Len() int { return len(b.b.spent) }

const MaxBudgets = maxBudgets

// KnowsPeer reports whether handshakes from an address use the budget of a peer.
func (t *Tunnel) KnowsPeer(source netip.AddrPort) bool { return t.peersAt(source) > 0 }

// NumLocations returns the number of addresses that are stored for peers.
func (t *Tunnel) NumLocations() int { return len(t.locations.byAddr) + len(t.locations.byPort) }

// Turns exports turns.
type Turns struct{ t turns }

func (t *Turns) Push(at netip.AddrPort, b []byte) bool { return t.t.push(datagram{at: at, b: b}) }
func (t *Turns) Pop() (at netip.AddrPort, b []byte, ok bool) {
	d, ok := t.t.pop()
	return d.at, d.b, ok
}

// Bucket exports bucket.
type Bucket struct{ b bucket }

func (b *Bucket) Take(now time.Duration, rate, burst int64) bool {
	return b.b.take(now, 1, rate, burst)
}

const (
	OtherBurst = otherBurst
	TurnsEach  = turnsEach
	TurnsAll   = turnsAll
)

// A Held holds the lock of a peer's timers.
type Held struct{ p *peer }

// Hold locks the timers of a peer until Release.
func (t *Tunnel) Hold(key [32]byte) Held {
	p := t.peer(key)
	p.mu.Lock()
	return Held{p}
}

// Release unlocks the timers.
func (h Held) Release() { h.p.mu.Unlock() }

// Peers returns the number of peers of all devices.
func (t *Tunnel) Peers() int { return len(t.peers.Load().byDevice) }

// HasPeer reports whether the device has a peer.
func (t *Tunnel) HasPeer(key [32]byte) bool { return t.current().dev.LookupPeer(key) != nil }

// Replay is a session, and the peer that owned the session when Tunnel.Replay was called.
type Replay struct {
	p *peer
	k *device.Keypair
}

// Replay returns the current session with a peer.
func (t *Tunnel) Replay(key [32]byte) Replay { return Replay{t.peer(key), t.Keypair(key)} }

// First checks a counter against the replay window, as an inbound goroutine does, and reports
// whether the counter is new.
func (r Replay) First(counter uint64) bool {
	in := newInbound(r.p.t)
	in.run.messages = []message{{b: make([]byte, headerLen+1), counter: counter, from: endpointOf(r.p.dev)}}
	from, _ := in.refuseReplays(r.p, r.k)
	return from != nil
}

// SameLock reports whether two different peers share the lock of their replay windows.
func SameLock(a, b Replay) bool { return a.p != b.p && a.p.windows == b.p.windows }

// Cookie returns the cookie reply to a handshake message from an address.
func (t *Tunnel) Cookie(m []byte, to conn.Endpoint) *device.MessageCookieReply {
	reply, _ := t.current().checker.Load().CreateReply(m, binary.LittleEndian.Uint32(m[4:]), to.DstToBytes()) // cannot fail
	return reply
}

// AskForCookies makes the device create the secret with which cookies are checked.
func (t *Tunnel) AskForCookies() {
	_, _ = t.current().checker.Load().CreateReply(make([]byte, device.MessageInitiationSize), 0, nil)
}

// Left returns the number of connections that the stack still has.
func (s *Streams) Left() int {
	return len(s.stack.RegisteredEndpoints()) + len(s.stack.CleanupEndpoints())
}

// A Sender is a peer that sends to the in-process endpoint.
type Sender struct{ p peer }

// DeliverFrom exports deliver.
func (l *Local) DeliverFrom(s *Sender, b []byte) bool { return l.deliver(&s.p, b) }

// LocalQueueLen exports localQueueLen.
const LocalQueueLen = localQueueLen

// Waiting returns the number of packets of streams that wait to be sent.
func (l *Local) Waiting() int { return int(l.streams.Load().link.out.n.Load()) }

// Next copies the next packet that the endpoint sends into p, and returns its length.
func (l *Local) Next(p []byte) int {
	n, _ := l.next(p)
	return n
}
