// Package datapath carries packets between the hosts of this cluster and the peers. It has one path
// in each direction. One goroutine handles a packet from the first step to the last.
//
//	outbound.go  Link ─ read ─► parse ─► NAT ─► segment ─┐
//	                 ▲ packets of Local                  └─► seal ─► send ─► Wire      seal.go
//	write.go     Link ◄─ write ◄─ NAT ◄─ coalesce ◄──────┐
//	                 ▼ or Local                          └◄─ window ◄─ open ◄─ receive ─ Wire
//	                                                                                inbound.go
//
// A superpacket passes the engine once: outbound before it is segmented, inbound after it is
// coalesced. For a known flow neither path allocates, logs, or takes a lock that packets share.
// The clock is read once per batch.
//
// wireguard-go's device handles handshakes, cookies and rate limits, keys, the index table and
// endpoints. It never sees data (handshake.go). session.go has the timers that depend on data,
// staging.go the ring in which packets wait for a session, and layout.go the access to unexported
// fields of the device.
package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"golang.zx2c4.com/wireguard/device"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
)

// Options are the options of a Tunnel. The zero value has the defaults.
type Options struct {
	// CoalesceUDP joins UDP datagrams of the same flow and size into superpackets for the link,
	// until the link refuses one with EINVAL. Linux accepts them from version 6.2 on (see
	// tun.TrustsUSO).
	CoalesceUDP bool
	// Logger receives the log lines of wireguard-go's device. If it is nil, the lines are
	// discarded.
	Logger *device.Logger
}

// A Tunnel is a data path with its own WireGuard keys and UDP port. Its methods may be called
// concurrently.
type Tunnel struct {
	link    Link
	wire    Wire
	engine  *natengine.Engine
	local   *Local // may be nil
	options Options
	start   time.Time
	mtu     atomic.Int64

	coalesceUDP atomic.Bool // requested, and the link has not refused a UDP superpacket

	ids       atomic.Pointer[identities]
	locations locationCounts
	peers     atomic.Pointer[peerTable]

	admission sync.Mutex // guards budgets
	budgets   budgets    // limits of handshakes and cookies

	sourceFilter atomic.Pointer[func(netip.Addr) bool] // reports whether a source of messages is allowed; nil: all are
	relays       atomic.Pointer[func(netip.Addr) bool] // reports whether an address is that of a relay (SetRelays); nil: there are no relays
	relayed      addrSigns                             // signs of messages that came through relays

	onUnknownSession atomic.Pointer[func(key [32]byte)] // nil: unknown sessions are not reported
	searched         atomic.Int64                       // when unknownSession last searched for a peer

	capture atomic.Pointer[captured] // nil: no capture is running

	diverted atomic.Pointer[diversion] // nil: the link's packets go to peers
	injected parcels                   // packets from another gateway

	hurry   *rate.Limiter // limits the handshakes that peer.hurry allows
	waiting atomic.Bool   // some packets wait for a session
	recheck atomic.Bool   // check the waiting packets: they may have a session now, or have waited too long
	out     outbound      // state of the outbound goroutine
	running sync.WaitGroup
	ended   chan struct{} // closed when the link has ended, or by Close

	mu        sync.Mutex                               // guards the configuration, which is the following fields
	endpoints map[device.NoisePublicKey]netip.AddrPort // the endpoints of the last SetPeers or Change
	port      uint16                                   // 0: no socket is open
	receiver  sync.WaitGroup                           // goroutines that receive from the sockets
	sweep     *time.Timer                              // runs sweepRetired; nil: no peer was ever retired
	laggards  *time.Timer                              // runs lookForLaggards; nil: no key was ever rotated
	up        bool
	closed    bool
}

// New returns a Tunnel that connects a link, a wire and an engine. local is the in-process
// endpoint, or nil. The Tunnel owns link, wire and local: Close closes them. It carries no packets
// before Up.
func New(link Link, wire Wire, engine *natengine.Engine, local *Local, o Options) *Tunnel {
	return newTunnel(link, wire, engine, local, time.Now(), o)
}

// Beside returns another tunnel of the same gateway. It shares t's engine and clock, and has a
// link, a wire and an in-process endpoint of its own. That endpoint has the same addresses as
// t's, and answers only packets of its own tunnel.
func (t *Tunnel) Beside(link Link, wire Wire, local *Local, logger *device.Logger) *Tunnel {
	o := t.options
	o.Logger = logger
	return newTunnel(link, wire, t.engine, local, t.start, o)
}

func newTunnel(link Link, wire Wire, engine *natengine.Engine, local *Local, start time.Time, o Options) *Tunnel {
	if o.Logger == nil {
		o.Logger = device.NewLogger(device.LogLevelSilent, "")
	}
	t := &Tunnel{
		link: link, wire: wire, engine: engine, local: local, options: o, start: start,
		hurry: rate.NewLimiter(hurriesPerSecond, hurriesPerSecond),
		ended: make(chan struct{}), endpoints: make(map[device.NoisePublicKey]netip.AddrPort),
	}
	t.mtu.Store(int64(link.MTU()))
	t.coalesceUDP.Store(o.CoalesceUDP)
	t.peers.Store(newPeerTable(0))
	t.out = newOutbound(t)
	t.ids.Store(&identities{current: newIdentity(t)})
	if local != nil {
		local.attach(link.Wake, func() { engine.Count(nil, natengine.Outbound, natengine.DropLocalQueue) })
	}
	return t
}

// logger returns a logger for the device that also counts the handshakes that the device refuses.
func (t *Tunnel) logger() *device.Logger {
	to := t.options.Logger
	return &device.Logger{Errorf: to.Errorf, Verbosef: func(format string, args ...any) {
		if slices.Contains(refusals[:], format) {
			t.engine.Count(nil, natengine.Inbound, natengine.DropHandshakeRefused)
		}
		to.Verbosef(format, args...)
	}}
}

// Now returns the monotonic time since New. The Tunnel passes this time to the engine. So it must
// also be the argument of the engine's Sweep and Trace.
func (t *Tunnel) Now() time.Duration { return time.Since(t.start) }

// stamp converts a time to the form in which peers store it. It never returns 0, which means never.
func (t *Tunnel) stamp(now time.Time) int64 { return max(1, int64(now.Sub(t.start))) }

// timeOf converts the result of stamp back to a time; 0 becomes the zero time. The age of the
// result is right even if the wall clock was set in between.
func (t *Tunnel) timeOf(stamp int64, now time.Time) time.Time {
	if stamp == 0 {
		return time.Time{}
	}
	return now.Add(time.Duration(stamp - t.stamp(now)))
}

// Up sets the private key, opens the UDP port (0: any free one), and starts the tunnel. Call it
// only once. A next key that SetKeys has set stays.
func (t *Tunnel) Up(private [32]byte, port uint16) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.setKeys(private, t.NextKey()); err != nil {
		return err
	}
	if err := t.listen(port); err != nil {
		return err
	}
	for _, id := range t.ids.Load().all() {
		if err := id.up(t.port); err != nil {
			return errors.Join(err, t.unlisten())
		}
	}
	t.up = true
	t.running.Go(t.out.run)
	return nil
}

// listen opens the wire, and starts a goroutine for each of its sockets, which receives data and
// handshakes. The caller holds t.mu.
func (t *Tunnel) listen(port uint16) error {
	sockets, port, err := t.wire.Listen(port)
	if err != nil {
		return err
	}
	t.port = port
	for _, next := range sockets {
		t.receiver.Go(func() { newInbound(t).receiveAll(next) })
	}
	return nil
}

// unlisten closes the wire and waits for its goroutines. These goroutines never wait for t.mu or a
// device, so unlisten cannot deadlock. The caller holds t.mu.
func (t *Tunnel) unlisten() error {
	if t.port == 0 {
		return nil
	}
	t.port = 0
	err := t.wire.Close()
	t.receiver.Wait()
	return err
}

// Port returns the UDP port, or 0 while no socket is open.
func (t *Tunnel) Port() uint16 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.port
}

// SetPort moves the tunnel to another UDP port. After an error no socket is open until the next
// call.
func (t *Tunnel) SetPort(port uint16) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed || !t.up {
		return nil
	}
	if err := errors.Join(t.unlisten(), t.listen(port)); err != nil {
		return err
	}
	var errs []error
	// Forget our source addresses, which belong to the old socket.
	for _, id := range t.ids.Load().all() {
		errs = append(errs, id.dev.IpcSet(fmt.Sprintf("listen_port=%d\n", t.port)))
	}
	return errors.Join(errs...)
}

// SetMTU sets the size of the largest packet in the tunnel, in octets. Padding does not exceed it.
// The caller must set the link's own MTU.
func (t *Tunnel) SetMTU(mtu int) {
	t.mtu.Store(int64(mtu))
	if t.local != nil {
		t.local.SetMTU(mtu)
	}
}

// MTU returns the size of the largest packet in the tunnel, in octets.
func (t *Tunnel) MTU() int { return int(t.mtu.Load()) }

// SetSources sets the test for the sources of messages. If the source of a message fails the test,
// the tunnel drops the message at once. The reason is that answers are sent to the source of the
// last message (roaming), and anybody who has a key may forge a source. Results are cached until
// the next call of SetSources.
func (t *Tunnel) SetSources(allowed func(netip.Addr) bool) { t.sourceFilter.Store(&allowed) }

// SetRelays sets the test for the addresses of relays. A relay is a node of this cluster that
// forwards messages for the gateway's Service, and replaces their source by its own address. So the
// source address of a relayed handshake does not identify its sender.
func (t *Tunnel) SetRelays(relays func(netip.Addr) bool) { t.relays.Store(&relays) }

// OnUnknownSession sets the function that is called when data of an unknown session comes from the
// address of a peer that has a session here. It is called at most once in five seconds for each
// peer, with the peer's public key. Anybody can forge such data, so it proves nothing. f must not
// block.
func (t *Tunnel) OnUnknownSession(f func(key [32]byte)) { t.onUnknownSession.Store(&f) }

// Forget makes the next SetPeers set the peer's endpoint to the configured one, even if the peer
// has roamed.
func (t *Tunnel) Forget(key [32]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.endpoints, key)
}

// Handshake starts a handshake with a peer, unless one was started within RekeyTimeout. It takes
// about 0.2 ms of processor time.
func (t *Tunnel) Handshake(key [32]byte) { t.handshake(key, false) }

// HandshakeNow starts a handshake with a peer even if one was started within RekeyTimeout. An
// answer to the earlier one will be refused.
func (t *Tunnel) HandshakeNow(key [32]byte) { t.handshake(key, true) }

func (t *Tunnel) handshake(key [32]byte, now bool) {
	table := t.peers.Load()
	p := t.peer(key)
	if p == nil {
		return
	}
	for _, q := range table.livePeers(p.state) {
		q.follow(table)
		if now {
			q.forgetInitiation()
		}
		_ = q.dev.SendHandshakeInitiation(false) // the device logs an error itself
	}
}

// Rest stops attempts to reach a peer until there is a packet for the peer. A session that has
// been made in the meantime stays.
func (t *Tunnel) Rest(key [32]byte) {
	if p := t.peer(key); p != nil {
		for _, q := range t.peers.Load().livePeers(p.state) {
			(*peerRetransmit.ptr(q.dev)).Del()
		}
	}
}

func (t *Tunnel) peer(key [32]byte) *peer {
	return t.peers.Load().byDevice[t.current().dev.LookupPeer(key)]
}

// Wait returns a channel that is closed when the tunnel has ended, because its link has ended or
// Close was called.
func (t *Tunnel) Wait() <-chan struct{} { return t.ended }

// Close ends the tunnel and waits for its goroutines. Further calls do nothing.
func (t *Tunnel) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.closed = true
	err := t.link.Close()
	if t.local != nil {
		t.local.Close()
	}
	for _, p := range t.peers.Load().byDevice {
		p.stop()
	}
	for _, timer := range []*time.Timer{t.sweep, t.laggards} {
		if timer != nil {
			timer.Stop()
		}
	}
	err = errors.Join(err, t.unlisten())
	for _, id := range t.ids.Load().all() {
		id.dev.Close()
	}
	t.running.Wait()
	if !t.up {
		close(t.ended)
	}
	return err
}

// recheckSoon makes the outbound goroutine check the packets that wait for a session, if there are
// any.
func (t *Tunnel) recheckSoon() {
	if t.waiting.Load() {
		t.recheck.Store(true)
		t.link.Wake()
	}
}

// dropOf returns the reason to drop a packet, given the error of Parse.
func dropOf(err error) natengine.Drop {
	if errors.Is(err, packet.ErrTinyFragment) || errors.Is(err, packet.ErrFragmentRange) {
		return natengine.DropFragment
	}
	return natengine.DropMalformed
}
