package datapath

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
)

// A session is a device.Keypair: two keys, a nonce counter, a replay window, two indices and a
// creation time. wireguard-go's device makes sessions by handshakes, finds them by their index,
// and replaces a session by the next one. This file does the rest: it records which data passes
// under a session, and runs the timers that depend on data (WireGuard paper, section 6).

const (
	// crossedPause is the minimum time between two initiations of handshakes that cross. Their
	// timestamps must differ by 17 ms (package tai64n), and a peer accepts one initiation in 20 ms.
	crossedPause = 100 * time.Millisecond
	// crossedGrace is the time that the side with the higher public key waits in addition to
	// crossedPause and a round trip.
	crossedGrace = 50 * time.Millisecond

	// requestInterval is the minimum time between two requests for a handshake with one peer. The
	// device itself sends no two initiations within RekeyTimeout.
	requestInterval = time.Second

	// If packets wait for a session, a handshake is repeated after hurryAfter instead of
	// RekeyTimeout, at most hurries times until there is a session. The reason is that the Service
	// of one side may still send messages to a former gateway. hurriesPerSecond limits these
	// handshakes with all peers to 2 % of a processor.
	hurryAfter       = 900 * time.Millisecond
	hurries          = 5
	hurriesPerSecond = 100

	// confirmMost is the maximum time for which messages are still sent to the previous address
	// after the peer has started another session from a new address. The first message of the new
	// session, usually within a round trip, ends this time.
	confirmMost = time.Second

	silenceTimeout = device.KeepaliveTimeout + device.RekeyTimeout
	lastMinute     = device.RejectAfterTime - device.KeepaliveTimeout - device.RekeyTimeout
)

// A peer is the tunnel's state of one peer: the corresponding peers of the engine and of a device,
// the packets that wait for a session, and timers. Times are values of Tunnel.Now; 0 means never.
type peer struct {
	t        *Tunnel
	identity *identity
	state    *natengine.PeerState
	key      device.NoisePublicKey
	dev      *device.Peer

	// retired is set when the peer has another key. Its existing sessions stay, and it makes no new
	// ones.
	retired          atomic.Bool
	retiredAt        time.Time     // guarded by t.mu
	replaced         time.Time     // when a session with the new key was first seen; guarded by t.mu
	received0, sent0 atomic.Uint64 // octets counted for older entries that this one has replaced

	introductions int       // number of calls of introduce since the peer fell silent (laggards.go); guarded by t.mu
	introduced    time.Time // when introduce was last called; guarded by t.mu

	staged staging // used only by the outbound goroutine

	// Limits of the packets to the in-process endpoint: messages from each address of the peer's
	// gateway, all other packets, and segments of streams.
	gateway  atomic.Pointer[[2]netip.Addr] // Peer.Gateway; nil: not set
	messages [2]bucket
	others   bucket
	segments bucket
	streams  atomic.Bool // Peer.Streams

	// windows guards the replay windows of all keypairs of dev, because messages may arrive over
	// IPv4 and IPv6 at the same time. A peer shares the mutex with its predecessor that has the
	// same dev, because an inbound goroutine may still use that predecessor.
	windows *sync.Mutex
	// preshared holds the preshared keys of dev, so it is shared with the predecessor as well.
	preshared *preshared

	unanswered     atomic.Int64 // time of the first data sent after the last message received; 0: all data was answered
	unacknowledged atomic.Int64 // time of the first data received after the last message sent; 0: all data was acknowledged
	more           atomic.Bool  // more data was received after the time in unacknowledged
	requested      atomic.Int64 // time of the last request for a handshake
	answerCount    atomic.Int64 // number of the peer's handshakes that the device answered
	answered       atomic.Int64 // when the device last answered a handshake of the peer
	created        atomic.Int64 // creation time of the last session; stored by the method session
	unsent         atomic.Pointer[sendFailure]
	location       atomic.Pointer[location] // written only by locationCounts
	removed        bool                     // the peer was removed; guarded by locationCounts.mu
	renewed        atomic.Int64             // creation time of the session for which recordReceived last requested a handshake
	checkRequested atomic.Int64             // when checkSession last requested a test of the session

	// sessionEndpoint is the session under which the peer last sent, with its endpoint. It is nil
	// if a configuration has set the endpoint since then.
	sessionEndpoint atomic.Pointer[sessionEndpoint]
	initiated       atomic.Pointer[answeredInitiation] // the peer's last answered initiation

	crossedAt atomic.Int64 // answerCount at the time when two handshakes last crossed
	begun     initiation   // our last initiation, guarded by handshakes.crossings

	// mu is held while a timer's function runs, so that none runs after stop.
	mu                                       sync.Mutex
	stopped                                  bool
	hurried                                  int   // handshakes that hurry has allowed since the last session; guarded by mu
	hurriedSince                             int64 // value of created to which hurried applies; guarded by mu
	keepalive, silence, initiation, crossing deadline
}

// newPeer returns a new peer. old is its predecessor with the same dev, or nil.
func newPeer(id *identity, state *natengine.PeerState, key device.NoisePublicKey, dev *device.Peer, old *peer) *peer {
	p := &peer{t: id.t, identity: id, state: state, key: key, dev: dev, windows: new(sync.Mutex), preshared: &preshared{dev: dev}}
	if old != nil {
		p.windows, p.preshared = old.windows, old.preshared
	}
	p.keepalive.timer = time.AfterFunc(time.Hour, func() { p.runDeadline(&p.keepalive, p.acknowledge) })
	p.silence.timer = time.AfterFunc(time.Hour, func() { p.runDeadline(&p.silence, p.breakSilence) })
	p.initiation.timer = time.AfterFunc(time.Hour, func() { p.runDeadline(&p.initiation, p.beginHandshake) })
	p.crossing.timer = time.AfterFunc(time.Hour, func() { p.runDeadline(&p.crossing, p.uncross) })
	for _, d := range p.deadlines() {
		d.timer.Stop()
	}
	return p
}

func (p *peer) deadlines() []*deadline {
	return []*deadline{&p.keepalive, &p.silence, &p.initiation, &p.crossing}
}

// A sessionEndpoint is the endpoint from which messages of a session come. The session is
// identified by the peer's index, because a pointer to the keypair would keep its keys in memory.
type sessionEndpoint struct {
	session  uint32
	endpoint conn.Endpoint
}

// An answeredInitiation is the source of an initiation that we answered, and the time of the
// answer.
type answeredInitiation struct {
	from conn.Endpoint
	at   time.Time
}

// recordEndpoint records the endpoint from which messages of the session k come.
func (p *peer) recordEndpoint(k *device.Keypair, from conn.Endpoint) {
	session := *keypairRemote.ptr(k)
	if was := p.sessionEndpoint.Load(); was == nil || was.session != session || !sameEndpoint(was.endpoint, from) {
		p.sessionEndpoint.Store(&sessionEndpoint{session, from})
	}
}

// send sends messages encrypted with k. The device would send them to the endpoint from which the
// peer last sent anything, including initiations. But an initiation may come from another gateway
// of the peer's cluster, which does not have this session. So until the other gateway has confirmed
// a session of its own, but at most for confirmMost, send uses the previous endpoint.
func (p *peer) send(k *device.Keypair, messages [][]byte, now time.Time) error {
	s, at := p.sessionEndpoint.Load(), endpointOf(p.dev)
	if s == nil || s.session != *keypairRemote.ptr(k) || sameEndpoint(s.endpoint, at) {
		return p.dev.SendBuffers(messages)
	}
	if c := p.initiated.Load(); c != nil && sameEndpoint(c.from, at) && now.Sub(c.at) > confirmMost {
		return p.dev.SendBuffers(messages)
	}
	for _, m := range messages {
		peerSent.ptr(p.dev).Add(uint64(len(m)))
	}
	return p.identity.bind.Send(messages, s.endpoint)
}

// gatewayOf returns the index of an address among the addresses of the peer's gateway, or -1 if the
// gateway does not have it.
func (p *peer) gatewayOf(a netip.Addr) int {
	if gateway := p.gateway.Load(); gateway != nil {
		return slices.Index(gateway[:], a)
	}
	return -1
}

// stop stops the timers. Their functions do not run afterwards.
func (p *peer) stop() {
	p.identity.bind.forget(p)
	p.t.locations.move(p, nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	for _, d := range p.deadlines() {
		d.timer.Stop()
	}
}

// A deadline is a timer that any goroutine may arm. Its function must check whether there is still
// anything to do. Arming an armed deadline costs one atomic load.
type deadline struct {
	timer *time.Timer
	armed atomic.Bool
}

func (d *deadline) arm(after time.Duration) {
	if !d.armed.Load() && d.armed.CompareAndSwap(false, true) {
		d.timer.Reset(after)
	}
}

// runDeadline runs f, the function of the deadline d. f may arm d again.
func (p *peer) runDeadline(d *deadline, f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stopped {
		d.armed.Store(false)
		f()
	}
}

// sendingKeypair returns the keypair that encrypts messages to the peer, or nil if no keypair is
// usable (section 6.1).
func (p *peer) sendingKeypair(now time.Time) *device.Keypair {
	k := peerKeypairs.ptr(p.dev).Current()
	if k == nil || !isFresh(k, now) || keypairNonce.ptr(k).Load() >= device.RejectAfterMessages {
		return nil
	}
	return k
}

// isFresh reports whether k is young enough to send and accept messages.
func isFresh(k *device.Keypair, now time.Time) bool {
	return now.Sub(*keypairCreated.ptr(k)) < device.RejectAfterTime
}

// recordSent records that data was sent under k at the time now.
func (p *peer) recordSent(k *device.Keypair, now time.Time) {
	at := p.t.stamp(now)
	p.recordAnySent()
	if p.unanswered.Load() == 0 {
		p.unanswered.Store(at)
		p.silence.arm(silenceTimeout + jitter())
	}
	initiator := *keypairInitiator.ptr(k) && now.Sub(*keypairCreated.ptr(k)) > device.RekeyAfterTime
	if initiator || keypairNonce.ptr(k).Load() > device.RekeyAfterMessages {
		p.requestHandshake(at)
	}
}

// recordAnySent records that an authenticated message was sent to the peer, which therefore needs
// no keepalive.
func (p *peer) recordAnySent() {
	if p.unacknowledged.Load() != 0 {
		p.more.Store(false)
		p.unacknowledged.Store(0)
	}
}

// recordReceived records that messages, none of them a replay, were received under k at the time
// now. data is true if one of them was more than a keepalive.
func (p *peer) recordReceived(k *device.Keypair, now time.Time, data bool) {
	at := p.t.stamp(now)
	p.recordAnyReceived()
	if data {
		if p.unacknowledged.Load() == 0 {
			p.unacknowledged.Store(at)
			p.keepalive.arm(device.KeepaliveTimeout)
		} else if !p.more.Load() {
			p.more.Store(true)
		}
	}
	if p.dev.ReceivedWithKeypair(k) { // we were responder, and this is the first message under k
		p.recordConfirmation()
		p.preshared.recordConfirmation(k)
	}
	created := *keypairCreated.ptr(k)
	if *keypairInitiator.ptr(k) && now.Sub(created) > lastMinute &&
		peerKeypairs.ptr(p.dev).Current() == k && p.renewed.Swap(p.t.stamp(created)) != p.t.stamp(created) {
		p.requested.Store(0)
		p.requestHandshake(at)
	}
}

// recordAnyReceived records that the peer has sent an authenticated message.
func (p *peer) recordAnyReceived() {
	if p.unanswered.Load() != 0 {
		p.unanswered.Store(0)
	}
}

// recordConfirmation is called when a session is confirmed. Like the device's own receiver, it
// makes the device stop repeating its initiation.
func (p *peer) recordConfirmation() {
	(*peerRetransmit.ptr(p.dev)).Del()
	peerAttempts.ptr(p.dev).Store(0)
	p.t.recheckSoon()
}

// session returns the creation time of the current session, or of the last one if the device has
// erased its keys. It returns zero if there was no session. Whether messages are sent and accepted
// depends on the session's age by the monotonic clock (see isFresh).
func (p *peer) session(now time.Time) time.Time {
	if k := peerKeypairs.ptr(p.dev).Current(); k != nil {
		p.created.Store(p.t.stamp(*keypairCreated.ptr(k)))
	}
	return p.t.timeOf(p.created.Load(), now)
}

// acknowledge sends a passive keepalive if data was received and nothing has been sent since
// (section 6.5).
func (p *peer) acknowledge() {
	since := p.unacknowledged.Load()
	if since == 0 {
		return
	}
	if left := device.KeepaliveTimeout - time.Duration(p.t.stamp(time.Now())-since); left > 0 {
		p.keepalive.arm(left)
		return
	}
	more := p.more.Swap(false)
	p.unacknowledged.Store(0)
	if p.t.peers.Load().latestPeer(p, time.Now()) != p {
		return // another, newer session carries our data, and the peer may have dropped this one
	}
	p.dev.SendKeepalive()
	if more {
		p.unacknowledged.CompareAndSwap(0, p.t.stamp(time.Now()))
		p.keepalive.arm(device.KeepaliveTimeout)
	}
}

// breakSilence starts a handshake if the peer has not answered data for too long (section 6.5).
func (p *peer) breakSilence() {
	since := p.unanswered.Load()
	if since == 0 {
		return
	}
	// If a session was made after the data was sent, the wait starts with that session: its
	// handshake was an answer.
	if k := peerKeypairs.ptr(p.dev).Current(); k != nil {
		since = max(since, p.t.stamp(*keypairCreated.ptr(k)))
	}
	if left := silenceTimeout - time.Duration(p.t.stamp(time.Now())-since); left > 0 {
		p.silence.arm(left)
		return
	}
	p.unanswered.Store(0)
	if p.t.peers.Load().latestPeer(p, time.Now()) != p {
		return // another, newer session carries our data, and has its own timer
	}
	if e := endpointOf(p.dev); e != nil {
		e.ClearSrc() // a wrong source address may be the cause
	}
	p.beginHandshake()
}

// requestHandshake requests a handshake. A timer's goroutine creates the initiation, because that
// takes longer than encrypting a hundred packets.
func (p *peer) requestHandshake(now int64) {
	if last := p.requested.Load(); last == 0 || time.Duration(now-last) >= requestInterval {
		p.requested.Store(now)
		p.initiation.arm(0)
	}
}

// beginHandshake starts a handshake. The device refuses that within RekeyTimeout of the last
// handshake. If the device refuses and no handshake is in progress, beginHandshake runs again
// later.
func (p *peer) beginHandshake() {
	table := p.t.peers.Load()
	if p.retired.Load() {
		for _, q := range table.livePeers(p.state) {
			q.initiation.arm(0)
		}
		return
	}
	p.follow(table)
	last, hurried := p.hurry(time.Now())
	if p.dev.SendHandshakeInitiation(false) != nil {
		return // the device logs the reason, and tries again if that can help
	}
	if hurried {
		p.keepPace(last)
	}
	if !(*peerRetransmit.ptr(p.dev)).IsPending() && p.sendingKeypair(time.Now()) == nil {
		p.initiation.arm(requestInterval)
	}
}

// hurry lets the device start another handshake before RekeyTimeout has passed since the last one.
// It does nothing if there is a usable session, or if hurryAfter, hurries or hurriesPerSecond does
// not permit the handshake. Otherwise it returns the time of the last handshake, and true. The
// caller holds mu.
func (p *peer) hurry(now time.Time) (previous time.Time, hurried bool) {
	if created := p.created.Load(); p.hurriedSince != created {
		p.hurried, p.hurriedSince = 0, created
	}
	if p.hurried == hurries || p.sendingKeypair(now) != nil {
		return previous, false
	}
	lock := peerHandshakeMu.ptr(p.dev)
	lock.Lock()
	defer lock.Unlock()
	previous = *peerInitiated.ptr(p.dev)
	since := now.Sub(previous)
	if since < hurryAfter || since > device.RekeyTimeout-hurryAfter || !p.t.hurry.Allow() {
		return previous, false
	}
	p.hurried++
	*peerInitiated.ptr(p.dev) = time.Time{}
	return previous, true
}

// A hurried handshake must not delay the device's next one. So keepPace sets back the times that
// the device has recorded for it. previous is the time of the handshake before the hurried one.
func (p *peer) keepPace(previous time.Time) {
	lock := peerHandshakeMu.ptr(p.dev)
	lock.Lock()
	defer lock.Unlock()
	*peerInitiated.ptr(p.dev) = previous
	if t := *peerRetransmit.ptr(p.dev); t.IsPending() {
		t.Mod(device.RekeyTimeout - time.Since(previous) + jitter())
	}
}

// handleCrossing handles two handshakes that have crossed. Each side has dropped its own initiation
// to answer the peer's, so both answers are useless. Without handleCrossing, both sides would start
// again only after RekeyTimeout. The side with the lower public key starts a handshake at once.
// The other side starts a handshake later if no session exists by then, for example because the
// peer is not an Isthmus gateway. roundTrip is the time from our initiation to the peer's answer.
func (p *peer) handleCrossing(roundTrip time.Duration) {
	if roundTrip >= device.RekeyTimeout {
		return
	}
	p.crossedAt.Store(p.answerCount.Load())
	pause := max(0, crossedPause-roundTrip)
	if own := p.identity.public.Load(); bytes.Compare(own[:], p.key[:]) > 0 {
		pause = crossedPause + roundTrip + crossedGrace
	}
	p.crossing.arm(pause)
}

func (p *peer) uncross() {
	if p.answerCount.Load() != p.crossedAt.Load() || p.sendingKeypair(time.Now()) != nil || !(*peerRetransmit.ptr(p.dev)).IsPending() {
		return
	}
	p.dev.ExpireCurrentKeypairs() // no keypair is usable; without keypairs the device starts a new handshake
	p.beginHandshake()
}

// jitter returns a random delay, so that peers do not start handshakes at the same moment.
func jitter() time.Duration { return rand.N(device.RekeyTimeoutJitterMaxMs * time.Millisecond) }
