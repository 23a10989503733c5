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

// A session is a device.Keypair: two keys, a counter of nonces, a replay window, two indices and a
// creation time. wireguard-go's device makes it by a handshake, finds it by its index, and replaces
// it by the next one. This file has the rest: the data under a session, and the timers that data
// moves (WireGuard paper, section 6).

const (
	// crossedPause is the least time between two initiations of handshakes that cross: their
	// timestamps have to differ by 17 ms (package tai64n), and a peer accepts one in 20 ms.
	crossedPause = 100 * time.Millisecond
	// crossedGrace is how much longer the side with the higher key waits, beyond crossedPause and a
	// round trip.
	crossedGrace = 50 * time.Millisecond

	// askAgain is the least time between two requests for a handshake with one peer. The device
	// itself sends no two initiations within RekeyTimeout.
	askAgain = time.Second

	// A handshake that packets wait for is begun again after hurryAfter, at most hurries times until
	// there is a session: the Service of the peer, or ours, may still lead to a former gateway. In
	// all, hurriesPerSecond take two hundredths of a processor.
	hurryAfter       = 900 * time.Millisecond
	hurries          = 5
	hurriesPerSecond = 100

	// confirmMost is how long messages still go to the previous address after the peer has begun
	// another session from elsewhere. The first message under the other session ends this, usually
	// within a round trip.
	confirmMost = time.Second

	silenceTimeout = device.KeepaliveTimeout + device.RekeyTimeout
	lastMinute     = device.RejectAfterTime - device.KeepaliveTimeout - device.RekeyTimeout
)

// A peer is a peer of a tunnel: its peer in the engine, its keys in the device, packets that wait
// for a session, and the timers of its data. Times are those of Tunnel.Now; 0 means never.
type peer struct {
	t     *Tunnel
	of    *identity
	state *natengine.PeerState
	key   device.NoisePublicKey
	dev   *device.Peer

	// the peer has another key: existing sessions last, and no new ones are made
	retired          atomic.Bool
	retiredAt        time.Time     // with t.mu
	replaced         time.Time     // when a session with the new key was first seen; with t.mu
	received0, sent0 atomic.Uint64 // octets of the peers that it replaced

	introductions int       // since the peer fell silent, see laggards.go; with t.mu
	introduced    time.Time // time of the last one; with t.mu

	staged staging // used by the outbound goroutine only

	// Limits for packets to the in-process endpoint: messages, for each address of the peer's
	// gateway, and all other packets.
	gateway  atomic.Pointer[[2]netip.Addr] // Peer.Gateway; nil: none
	messages [2]bucket
	others   bucket
	segments bucket      // of streams
	streams  atomic.Bool // Peer.Streams

	// windows guards the replay windows of all keypairs of dev, because messages may arrive over
	// IPv4 and IPv6 at once. A peer shares it with its predecessor that has the same dev, because
	// an inbound goroutine may still use the predecessor.
	windows *sync.Mutex
	// preshared has the keys of dev, so it is shared in the same way.
	preshared *preshared

	unanswered     atomic.Int64 // time of the first data sent since the last message received
	unacknowledged atomic.Int64 // time of the first data received since the last message sent
	more           atomic.Bool  // further data was received since
	asked          atomic.Int64 // time of the last request for a handshake
	answers        atomic.Int64 // number of handshakes of the peer that the device answered
	answered       atomic.Int64 // time of the last of them
	made           atomic.Int64 // creation time of the last session, see session
	unsent         atomic.Pointer[unsent]
	heardAt        atomic.Pointer[whereabouts] // set by heard
	gone           bool                        // the peer is removed; guarded by heard
	renewed        atomic.Int64                // of the session that received last asked to renew
	doubted        atomic.Int64                // time of the last report that the peer may have another session

	// endpoint of the session under which the peer last sent; nil: its endpoint was set since
	seat   atomic.Pointer[seat]
	called atomic.Pointer[called] // the peer's last answered initiation

	crossedAt atomic.Int64 // value of answers when two handshakes crossed
	begun     initiation   // our last initiation, guarded by handshakes.crossings

	// held while a timer acts, so that no timer acts after stop
	mu                                       sync.Mutex
	stopped                                  bool
	hurried                                  int   // handshakes that hurry let begin, with mu
	hurriedSince                             int64 // value of made then, with mu
	keepalive, silence, initiation, crossing deadline
}

// newPeer makes a peer. old is the predecessor with the same dev; nil: none.
func newPeer(of *identity, state *natengine.PeerState, key device.NoisePublicKey, dev *device.Peer, old *peer) *peer {
	p := &peer{t: of.t, of: of, state: state, key: key, dev: dev, windows: new(sync.Mutex), preshared: &preshared{dev: dev}}
	if old != nil {
		p.windows, p.preshared = old.windows, old.preshared
	}
	p.keepalive.timer = time.AfterFunc(time.Hour, func() { p.act(&p.keepalive, p.acknowledge) })
	p.silence.timer = time.AfterFunc(time.Hour, func() { p.act(&p.silence, p.breakSilence) })
	p.initiation.timer = time.AfterFunc(time.Hour, func() { p.act(&p.initiation, p.begin) })
	p.crossing.timer = time.AfterFunc(time.Hour, func() { p.act(&p.crossing, p.uncross) })
	for _, d := range p.deadlines() {
		d.timer.Stop()
	}
	return p
}

func (p *peer) deadlines() []*deadline {
	return []*deadline{&p.keepalive, &p.silence, &p.initiation, &p.crossing}
}

// A seat is the endpoint from which messages under a session come. The peer's index names the
// session: a pointer to the keypair would keep its keys in memory.
type seat struct {
	session uint32
	at      conn.Endpoint
}

// called is the endpoint and the time of an answered initiation.
type called struct {
	from conn.Endpoint
	at   time.Time
}

// sit records the endpoint from which messages under k come.
func (p *peer) sit(k *device.Keypair, from conn.Endpoint) {
	session := *keypairRemote.of(k)
	if was := p.seat.Load(); was == nil || was.session != session || !samePlace(was.at, from) {
		p.seat.Store(&seat{session, from})
	}
}

// send sends messages encrypted with k. The device sends to the endpoint where it last heard the
// peer, initiations included. An initiation may come from another gateway of the peer's cluster,
// which does not have this session. So until that gateway has confirmed its own session, messages
// go to the previous endpoint.
func (p *peer) send(k *device.Keypair, messages [][]byte, now time.Time) error {
	s, at := p.seat.Load(), endpointOf(p.dev)
	if s == nil || s.session != *keypairRemote.of(k) || samePlace(s.at, at) {
		return p.dev.SendBuffers(messages)
	}
	if c := p.called.Load(); c != nil && samePlace(c.from, at) && now.Sub(c.at) > confirmMost {
		return p.dev.SendBuffers(messages)
	}
	for _, m := range messages {
		peerSent.of(p.dev).Add(uint64(len(m)))
	}
	return p.of.bind.Send(messages, s.at)
}

// gatewayOf returns the index of a among the addresses of the peer's gateway; -1: none of them.
func (p *peer) gatewayOf(a netip.Addr) int {
	if gateway := p.gateway.Load(); gateway != nil {
		return slices.Index(gateway[:], a)
	}
	return -1
}

// stop ends the timers. None of them acts afterwards.
func (p *peer) stop() {
	p.of.bind.forget(p)
	p.t.heard.move(p, nil)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	for _, d := range p.deadlines() {
		d.timer.Stop()
	}
}

// A deadline is a timer. Any goroutine with a reason arms it, and it checks the reason again when
// it fires. Arming an armed deadline costs a load.
type deadline struct {
	timer *time.Timer
	armed atomic.Bool
}

func (d *deadline) arm(after time.Duration) {
	if !d.armed.Load() && d.armed.CompareAndSwap(false, true) {
		d.timer.Reset(after)
	}
}

// act runs the function of a deadline. The function may arm the deadline again.
func (p *peer) act(d *deadline, f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stopped {
		d.armed.Store(false)
		f()
	}
}

// sending returns the keypair that encrypts; nil: there is no usable one (section 6.1).
func (p *peer) sending(now time.Time) *device.Keypair {
	k := peerKeypairs.of(p.dev).Current()
	if k == nil || !fresh(k, now) || keypairNonce.of(k).Load() >= device.RejectAfterMessages {
		return nil
	}
	return k
}

// fresh reports whether k is young enough to send and to accept messages.
func fresh(k *device.Keypair, now time.Time) bool {
	return now.Sub(*keypairCreated.of(k)) < device.RejectAfterTime
}

// sent notes that data was sent under k at now.
func (p *peer) sent(k *device.Keypair, now time.Time) {
	at := p.t.at(now)
	p.sentAny()
	if p.unanswered.Load() == 0 {
		p.unanswered.Store(at)
		p.silence.arm(silenceTimeout + jitter())
	}
	initiator := *keypairInitiator.of(k) && now.Sub(*keypairCreated.of(k)) > device.RekeyAfterTime
	if initiator || keypairNonce.of(k).Load() > device.RekeyAfterMessages {
		p.ask(at)
	}
}

// sentAny notes that the peer was sent an authentic message, so it needs no keepalive.
func (p *peer) sentAny() {
	if p.unacknowledged.Load() != 0 {
		p.more.Store(false)
		p.unacknowledged.Store(0)
	}
}

// received notes that messages under k were received at now, none of them replayed. data says that
// one of them was more than a keepalive.
func (p *peer) received(k *device.Keypair, now time.Time, data bool) {
	at := p.t.at(now)
	p.receivedAny()
	if data {
		if p.unacknowledged.Load() == 0 {
			p.unacknowledged.Store(at)
			p.keepalive.arm(device.KeepaliveTimeout)
		} else if !p.more.Load() {
			p.more.Store(true)
		}
	}
	if p.dev.ReceivedWithKeypair(k) { // k was made as responder, and this is its first message
		p.confirmed()
		p.preshared.confirmed(k)
	}
	created := *keypairCreated.of(k)
	if *keypairInitiator.of(k) && now.Sub(created) > lastMinute &&
		peerKeypairs.of(p.dev).Current() == k && p.renewed.Swap(p.t.at(created)) != p.t.at(created) {
		p.asked.Store(0)
		p.ask(at)
	}
}

// receivedAny notes that the peer has sent an authentic message.
func (p *peer) receivedAny() {
	if p.unanswered.Load() != 0 {
		p.unanswered.Store(0)
	}
}

// confirmed repeats what the device's own receiver would do for a confirmed session, so that the
// device stops repeating its initiation.
func (p *peer) confirmed() {
	(*peerRetransmit.of(p.dev)).Del()
	peerAttempts.of(p.dev).Store(0)
	p.t.lookSoon()
}

// session returns the creation time of the present session, or of the last one if the device has erased
// its keys; zero: there was none. Its age by the monotonic clock decides whether messages are sent and
// accepted (see fresh).
func (p *peer) session(now time.Time) time.Time {
	if k := peerKeypairs.of(p.dev).Current(); k != nil {
		p.made.Store(p.t.at(*keypairCreated.of(k)))
	}
	return p.t.when(p.made.Load(), now)
}

// acknowledge sends a passive keepalive (section 6.5).
func (p *peer) acknowledge() {
	since := p.unacknowledged.Load()
	if since == 0 {
		return
	}
	if left := device.KeepaliveTimeout - time.Duration(p.t.at(time.Now())-since); left > 0 {
		p.keepalive.arm(left)
		return
	}
	more := p.more.Swap(false)
	p.unacknowledged.Store(0)
	if p.t.peers.Load().latest(p, time.Now()) != p {
		return // a newer session carries our data, and the peer may have dropped this one
	}
	p.dev.SendKeepalive()
	if more {
		p.unacknowledged.CompareAndSwap(0, p.t.at(time.Now()))
		p.keepalive.arm(device.KeepaliveTimeout)
	}
}

// breakSilence begins a handshake when the peer has not answered data (section 6.5).
func (p *peer) breakSilence() {
	since := p.unanswered.Load()
	if since == 0 {
		return
	}
	// the answer to it, or its confirmation, made the session
	if k := peerKeypairs.of(p.dev).Current(); k != nil {
		since = max(since, p.t.at(*keypairCreated.of(k)))
	}
	if left := silenceTimeout - time.Duration(p.t.at(time.Now())-since); left > 0 {
		p.silence.arm(left)
		return
	}
	p.unanswered.Store(0)
	if p.t.peers.Load().latest(p, time.Now()) != p {
		return // a newer session carries our data, and has its own silence
	}
	if e := endpointOf(p.dev); e != nil {
		e.ClearSrc() // the source address may be the cause
	}
	p.begin()
}

// ask requests a handshake from another goroutine, because making an initiation takes longer than
// encrypting a hundred packets.
func (p *peer) ask(at int64) {
	if asked := p.asked.Load(); asked == 0 || time.Duration(at-asked) >= askAgain {
		p.asked.Store(at)
		p.initiation.arm(0)
	}
}

// begin begins a handshake. The device begins none within RekeyTimeout of the last one. If it has
// no handshake in progress either, begin runs again later.
func (p *peer) begin() {
	table := p.t.peers.Load()
	if p.retired.Load() {
		for _, q := range table.living(p.state) {
			q.initiation.arm(0)
		}
		return
	}
	p.follow(table)
	last, hurried := p.hurry(time.Now())
	if p.dev.SendHandshakeInitiation(false) != nil {
		return // the device has logged the reason, and tries again if that can help
	}
	if hurried {
		p.keepPace(last)
	}
	if !(*peerRetransmit.of(p.dev)).IsPending() && p.sending(time.Now()) == nil {
		p.initiation.arm(askAgain)
	}
}

// hurry lets the device begin a handshake within RekeyTimeout of the last one, if that has brought
// no session. It returns when that was. The caller holds mu.
func (p *peer) hurry(now time.Time) (last time.Time, hurried bool) {
	if made := p.made.Load(); p.hurriedSince != made {
		p.hurried, p.hurriedSince = 0, made
	}
	if p.hurried == hurries || p.sending(now) != nil {
		return last, false
	}
	lock := peerHandshakeMu.of(p.dev)
	lock.Lock()
	defer lock.Unlock()
	last = *peerInitiated.of(p.dev)
	since := now.Sub(last)
	if since < hurryAfter || since > device.RekeyTimeout-hurryAfter || !p.t.hurry.Allow() {
		return last, false
	}
	p.hurried++
	*peerInitiated.of(p.dev) = time.Time{}
	return last, true
}

// keepPace makes the device begin its next handshake as if it had begun none since last, unless an
// answer has come meanwhile.
func (p *peer) keepPace(last time.Time) {
	lock := peerHandshakeMu.of(p.dev)
	lock.Lock()
	defer lock.Unlock()
	*peerInitiated.of(p.dev) = last
	if t := *peerRetransmit.of(p.dev); t.IsPending() {
		t.Mod(device.RekeyTimeout - time.Since(last) + jitter())
	}
}

// crossed runs when the peer answers our handshake, begun roundTrip ago, after the device has
// dropped it to answer one of the peer's: the two have crossed. The peer has dropped its own
// handshake, too, so both would begin again only after RekeyTimeout. Instead the side with the
// lower public key begins at once. The other side begins if that does not help, for example because
// the peer is not an Isthmus.
func (p *peer) crossed(roundTrip time.Duration) {
	if roundTrip >= device.RekeyTimeout {
		return
	}
	p.crossedAt.Store(p.answers.Load())
	pause := max(0, crossedPause-roundTrip)
	if own := p.of.public.Load(); bytes.Compare(own[:], p.key[:]) > 0 {
		pause = crossedPause + roundTrip + crossedGrace
	}
	p.crossing.arm(pause)
}

func (p *peer) uncross() {
	if p.answers.Load() != p.crossedAt.Load() || p.sending(time.Now()) != nil || !(*peerRetransmit.of(p.dev)).IsPending() {
		return
	}
	p.dev.ExpireCurrentKeypairs() // no usable session is among them; the device then begins anew
	p.begin()
}

// jitter keeps peers from beginning handshakes at the same moment.
func jitter() time.Duration { return rand.N(device.RekeyTimeoutJitterMaxMs * time.Millisecond) }
