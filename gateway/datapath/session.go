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

// A session is a device.Keypair: two keys, a counter of nonces, a replay window, two indices and
// its age. wireguard-go's device makes it by a handshake, finds it by its index, puts it in the
// place of the one before and forgets it. What happens to data under it, and the timers that data
// moves (WireGuard paper, section 6), are here.

const (
	// crossedPause is the least time between two initiations of handshakes that cross: their
	// timestamps have to differ by 17 ms (package tai64n), and a peer takes one in 20 ms.
	crossedPause = 100 * time.Millisecond
	// crossedGrace is how much longer than that and a round trip the side waits that does not go
	// first.
	crossedGrace = 50 * time.Millisecond

	// askAgain is the least time between two requests for a handshake with one peer. The device
	// itself sends no two initiations within RekeyTimeout.
	askAgain = time.Second

	// confirmMost is how long a session goes on where it is after the peer has begun another one from elsewhere. The first message
	// under that one ends it, usually within a round trip.
	confirmMost = time.Second

	silenceTimeout = device.KeepaliveTimeout + device.RekeyTimeout
	lastMinute     = device.RejectAfterTime - device.KeepaliveTimeout - device.RekeyTimeout
)

// A peer is a peer of a tunnel: what the engine calls it, its keys in the device, packets that wait
// for a session, and the timers of its data. Times are of Tunnel.Now; 0 says that there was none.
type peer struct {
	t     *Tunnel
	of    *identity
	state *natengine.PeerState
	key   device.NoisePublicKey
	dev   *device.Peer

	retired          atomic.Bool   // it has another key by now: its sessions last, and there will be no new ones
	retiredAt        time.Time     // with t.mu
	replaced         time.Time     // when a session with the new key was seen; with t.mu
	received0, sent0 atomic.Uint64 // octets of peers that it has replaced

	introductions int       // since it fell silent, see laggards.go; with t.mu
	introduced    time.Time // when the last one was; with t.mu

	staged staging // the outbound goroutine's

	// Limits for the in-process endpoint: messages, for each address of the peer's gateway, and all other
	// packets.
	gateway  atomic.Pointer[[2]netip.Addr] // Peer.Gateway; nil: none
	messages [2]bucket
	others   bucket
	segments bucket      // of streams
	streams  atomic.Bool // Peer.Streams

	// windows guards the replay windows of all keypairs of dev, because messages may arrive over IPv4 and
	// IPv6 at once. A peer shares it with its predecessor for the same dev, which an inbound goroutine may
	// still use.
	windows *sync.Mutex
	// preshared, too: its keys are those of dev.
	preshared *preshared

	unanswered     atomic.Int64 // first data sent since anything was received
	unacknowledged atomic.Int64 // first data received since anything was sent
	more           atomic.Bool  // more data was received since
	asked          atomic.Int64 // when a handshake was last asked for
	answers        atomic.Int64 // handshakes of the peer that were answered
	answered       atomic.Int64 // when the last of them was
	made           atomic.Int64 // creation time of the last session, see session
	unsent         atomic.Pointer[unsent]
	heardAt        atomic.Pointer[whereabouts] // set by heard
	gone           bool                        // the peer is removed; guarded by heard
	renewed        atomic.Int64                // creation time of the session that receive asked to renew
	doubted        atomic.Int64                // when it was last said that the peer may have another session

	seat   atomic.Pointer[seat]   // of the session under which the peer last sent; nil: it was placed elsewhere since
	called atomic.Pointer[called] // the peer's last handshake that was answered

	crossedAt atomic.Int64 // answers when two handshakes had crossed
	begun     initiation   // the last one here, guarded by handshakes.crossings

	mu                                       sync.Mutex // held while a timer acts, so that none acts after stop
	stopped                                  bool
	keepalive, silence, initiation, crossing deadline
}

// newPeer makes a peer that replaces old, which had the same dev; nil: there was none.
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

// A seat is where messages under a session come from. It names the session by the peer's index: a keypair that is kept keeps its
// keys.
type seat struct {
	session uint32
	at      conn.Endpoint
}

// called is where an initiation came from that was answered, and when.
type called struct {
	from conn.Endpoint
	at   time.Time
}

// sit notes where messages under k come from.
func (p *peer) sit(k *device.Keypair, from conn.Endpoint) {
	session := *keypairRemote.of(k)
	if was := p.seat.Load(); was == nil || was.session != session || !samePlace(was.at, from) {
		p.seat.Store(&seat{session, from})
	}
}

// send sends messages that are sealed under k. The device sends to where it last heard the peer, an initiation included. That may
// come from another gateway of the peer's cluster, which does not know the session at hand. Until that gateway has confirmed its
// own, the one before takes what is sent.
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

// stop ends the timers. None acts afterwards.
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

// A deadline is a timer that the first goroutine with a reason arms, and that finds out when it fires
// what has become of the reason. Arming one that is armed costs a load.
type deadline struct {
	timer *time.Timer
	armed atomic.Bool
}

func (d *deadline) arm(after time.Duration) {
	if !d.armed.Load() && d.armed.CompareAndSwap(false, true) {
		d.timer.Reset(after)
	}
}

// act runs what a deadline is for. It may arm the deadline again.
func (p *peer) act(d *deadline, f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.stopped {
		d.armed.Store(false)
		f()
	}
}

// sending is the keypair to seal with, nil while there is none that may be used (section 6.1).
func (p *peer) sending(now time.Time) *device.Keypair {
	k := peerKeypairs.of(p.dev).Current()
	if k == nil || !fresh(k, now) || keypairNonce.of(k).Load() >= device.RejectAfterMessages {
		return nil
	}
	return k
}

// fresh reports whether messages under k may be sent and accepted.
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

// sentAny notes that the peer was sent something that it can authenticate: it needs no keepalive.
func (p *peer) sentAny() {
	if p.unacknowledged.Load() != 0 {
		p.more.Store(false)
		p.unacknowledged.Store(0)
	}
}

// received notes that messages under k were received at now, of which none was received before;
// data says that one of them was more than a keepalive.
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
	if p.dev.ReceivedWithKeypair(k) { // the first message under the keypair that we made as responder
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

// receivedAny notes that the peer has sent something authentic.
func (p *peer) receivedAny() {
	if p.unanswered.Load() != 0 {
		p.unanswered.Store(0)
	}
}

// confirmed does what the device's own receiver would: the session is there, for the device too,
// which stops repeating an initiation of its own.
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
		return // a newer session carries what we send, and the other end may have forgotten this one
	}
	p.dev.SendKeepalive()
	if more {
		p.unacknowledged.CompareAndSwap(0, p.t.at(time.Now()))
		p.keepalive.arm(device.KeepaliveTimeout)
	}
}

// breakSilence begins a handshake when nothing came back for data that was sent (section 6.5).
func (p *peer) breakSilence() {
	since := p.unanswered.Load()
	if since == 0 {
		return
	}
	if k := peerKeypairs.of(p.dev).Current(); k != nil { // which its answer made, or its confirmation
		since = max(since, p.t.at(*keypairCreated.of(k)))
	}
	if left := silenceTimeout - time.Duration(p.t.at(time.Now())-since); left > 0 {
		p.silence.arm(left)
		return
	}
	p.unanswered.Store(0)
	if p.t.peers.Load().latest(p, time.Now()) != p {
		return // a newer session carries what we send, and has its own silence
	}
	if e := endpointOf(p.dev); e != nil {
		e.ClearSrc() // in case that is what is wrong
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

// begin begins a handshake. The device begins none within RekeyTimeout of the last one; when it has
// nothing under way either, begin comes back.
func (p *peer) begin() {
	table := p.t.peers.Load()
	if p.retired.Load() {
		for _, q := range table.living(p.state) {
			q.initiation.arm(0)
		}
		return
	}
	p.follow(table)
	if p.dev.SendHandshakeInitiation(false) != nil {
		return // the device has logged why not, and tries again unless that cannot help
	}
	if !(*peerRetransmit.of(p.dev)).IsPending() && p.sending(time.Now()) == nil {
		p.initiation.arm(askAgain)
	}
}

// crossed is called when the peer has answered a handshake that was begun here roundTrip ago, and
// that the device has forgotten since, because it answered one of the peer's: the two have crossed.
// The peer has forgotten its own too, so that both would begin again after RekeyTimeout. Here the
// side with the lower public key does so at once. The other one does when nothing comes of that,
// for instance because the peer is not an Isthmus.
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
	p.dev.ExpireCurrentKeypairs() // among them none that may be used; the device takes this for a new start
	p.begin()
}

// jitter keeps peers from beginning at the same moment.
func jitter() time.Duration { return rand.N(device.RekeyTimeoutJitterMaxMs * time.Millisecond) }
