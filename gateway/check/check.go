// Package check finds out which peers of a gateway answer, and how large packets to them may be.
//
// For all peers of one tunnel, a Monitor has both roles of Liqo's connection check
// (docs/liqo-v0.md, section 8): it pings the peers, and it answers their PINGs.
//
//	Set, Change ─► peers ─► PING ─► Port ─► PONG ─► Result ─► Observe
//	                 ▲        └ padded: search for the path MTU (pathmtu.go)
//	Sessions ────────┘ peers that are away, and handshakes with them (away.go)
//
// The Monitor owns its Port and the results. It identifies peers by cluster ID and address, and
// does not depend on the gateway. Package gateway, its only user, has one Monitor for each
// tunnel. All methods may be called concurrently. The Monitor calls the functions of Options from
// its own goroutines, while it holds no lock.
package check

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// MaxMessage is the length of the longest accepted message, in octets. A real message has about
// 113. Liqo accepts up to 1024.
const MaxMessage = 512

// Liqo's connection check uses UDP port 12345 of the gateways' own addresses, with one JSON object
// in each message. Each side sends a PING every two seconds and answers a PING with a PONG.
// Messages and states are the same as in Liqo, because Liqo derives the readiness of a virtual node
// from the states. The Monitor accepts fewer PONGs than Liqo does (see acceptPong).
const (
	interval        = 2 * time.Second
	threshold       = 5 // intervals without an answer after which the peer counts as lost
	observeInterval = threshold * interval / 10
	maxColons       = 16 // limits the members of a message's JSON object; a real one has 6 colons

	// window is the number of PINGs over which loss is measured: those of the last minute.
	window = 30

	// slots is the number of turns in an interval. A turn lasts slotTime. Each peer is pinged in
	// one of the turns, because PINGs to a thousand peers at once would overflow the queue of the
	// in-process endpoint and delay packets on the same processor.
	slots    = 100
	slotTime = interval / slots
	// burst is the number of new peers that are pinged at once. If more peers are added in one
	// call, the others count as away at first (see Sessions).
	burst = 64

	// pathMessages is the approximate number of path probes sent at once. It is small because other
	// packets wait while probes are sent.
	pathMessages = 128
)

// State is the connection check's state of a peer. The values are Liqo's.
type State string

// The values of State.
const (
	Connecting   State = "Connecting" // no answer yet, for less than ten seconds
	Connected    State = "Connected"  // the peer answers
	Disconnected State = "Error"      // no answer for ten seconds
)

// Peer is the configuration of one peer for the connection check. If it changes, the state of the
// peer becomes Connecting again. Exceptions are a new Key, a new endpoint of a connected peer
// (see moved), and new bounds of the path MTU.
type Peer struct {
	ID       string          // cluster ID
	Probe    netip.AddrPort  // destination of PINGs, and source of PONGs
	Allowed  [2]netip.Prefix // AllowedIPs; the peer's PINGs come from the network address of the first prefix
	Key      [32]byte        // the peer's WireGuard public key
	Endpoint string          // host name or address, as configured
	Port     uint16
	// Threshold is the number of intervals without an answer after which the peer counts as lost.
	// The default is five.
	Threshold int
	// BaseMTU and MaxMTU are the bounds of the search for the path MTU, in octets inside the
	// tunnel. Every path should carry packets of BaseMTU octets. The search tries no size above
	// MaxMTU. If both are 0, there is no search.
	BaseMTU, MaxMTU int
}

// Result is the result of the connection check for one peer.
type Result struct {
	State    State
	RTT      time.Duration // round-trip time of the last answer; 0 if not connected
	Loss     float64       // share of the last minute's PINGs that were not answered, 0 to 1
	Sent     int           // number of PINGs from which Loss is computed
	Since    time.Time     // when State last changed
	Answered time.Time     // when the peer last answered; zero: never
	Asked    time.Time     // when we last answered a PING of the peer; zero: never
	Path     PathMTU
}

// Unasked reports whether no PING of the peer has arrived for ten seconds. A peer that can reach us
// sends one every two seconds, from the network address of its PodCIDR. If the two sides disagree
// about that network, this side drops the PINGs, and only this side can detect that.
func (r *Result) Unasked(now time.Time) bool {
	last := r.Since
	if r.Asked.After(last) {
		last = r.Asked
	}
	return now.Sub(last) > threshold*interval
}

// Late reports whether the last answer is older than the given number of intervals.
func (r *Result) Late(now time.Time, intervals int) bool {
	return now.Sub(r.Answered) > time.Duration(intervals)*interval+r.RTT
}

// A Port sends and receives messages. datapath.Port implements this interface. A Port limits the
// messages from each peer, and thereby the work that a peer can cause in the Monitor.
type Port interface {
	Receive() (message []byte, from netip.AddrPort, err error) // returns net.ErrClosed after Close
	Send(message []byte, to netip.AddrPort, size int) error    // pads the packet to size octets; 0: no padding
	Close()
}

// Options are the options of Start. All except Log are optional.
type Options struct {
	Log *slog.Logger
	// RTT is called with the round-trip time of each answer.
	RTT func(id string, rtt time.Duration)
	// Handshake starts a handshake with a peer. It is required if TestSession is used.
	Handshake func(key [32]byte)
	// Hold, if not nil, is closed when the first PINGs may be sent.
	Hold <-chan struct{}
	// PathChanged is called when the path MTU of a peer has changed. If it is nil, the Monitor does
	// not search for path MTUs.
	PathChanged func()
}

// A Monitor pings all peers and answers their PINGs.
type Monitor struct {
	port Port
	o    Options

	fresh    chan struct{} // wakes send: there are peers that were never pinged
	suspects chan [32]byte // public keys passed to TestSession
	done     chan struct{}
	wg       sync.WaitGroup

	more time.Time   // when more new peers may be pinged; used only by send
	held atomic.Bool // Options.Hold is not closed yet: new peers are not pinged

	rejected [numRejections]atomic.Uint64
	answered atomic.Uint64 // number of answered PINGs

	mu       sync.Mutex
	peers    map[string]*peerState
	bySource map[netip.Addr]*peerState // peers by the source address of their PINGs
	slots    [slots][]*peerState
	// answers holds two moving averages, in handshakes per second: of the handshakes that peers
	// answered, and of those that they did not answer (see Sessions).
	answers struct{ answered, lost float64 }
}

// peerState is the Monitor's state of one peer.
type peerState struct {
	Peer
	result Result
	slot   int
	begun  time.Time // when the peer was configured
	newest time.Time // when the newest answered PING was sent

	away  bool      // the peer has no session, see Sessions
	back  bool      // the peer has a session again, and has not been pinged since
	tried time.Time // when a handshake was last started
	rests bool      // wireguard-go does not repeat the last handshake any more
	waits bool      // the last handshake may still be answered

	sent [window]probe // ring buffer of the last PINGs
	n    int           // number of PINGs ever sent

	path pathSearch
}

type probe struct {
	at       time.Time
	answered bool
}

// Start starts a Monitor without peers. The Monitor owns port.
func Start(port Port, o Options) *Monitor {
	m := &Monitor{port: port, o: o,
		fresh: make(chan struct{}, 1), suspects: make(chan [32]byte, burst), done: make(chan struct{}), peers: make(map[string]*peerState), bySource: make(map[netip.Addr]*peerState)}
	if o.Hold != nil {
		m.hold(o.Hold)
	}
	m.wg.Go(m.receive)
	m.wg.Go(m.send)
	return m
}

// Close stops the Monitor and closes the port.
func (m *Monitor) Close() {
	close(m.done)
	m.port.Close()
	m.wg.Wait()
}

// Set replaces the peers. An unchanged peer keeps its state.
func (m *Monitor) Set(peers []Peer) {
	stay := make(map[string]bool, len(peers))
	for i := range peers {
		stay[peers[i].ID] = true
	}
	var removed []string
	m.mu.Lock()
	for id := range m.peers {
		if !stay[id] {
			removed = append(removed, id)
		}
	}
	m.mu.Unlock()
	m.Change(peers, removed)
}

// Change adds or updates the given peers, and removes those with the cluster IDs in removed.
func (m *Monitor) Change(peers []Peer, removed []string) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range removed {
		if p := m.peers[id]; p != nil {
			m.forget(p)
		}
	}
	var anew []*peerState
	for i := range peers {
		was := m.peers[peers[i].ID]
		if was != nil {
			was.limit(peers[i].BaseMTU, peers[i].MaxMTU, now)
			if was.Peer == peers[i] || m.moved(was, peers[i], now) {
				continue
			}
			m.forget(was)
		}
		p := &peerState{Peer: peers[i], begun: now, result: Result{State: Connecting, Since: now}}
		p.limit(p.BaseMTU, p.MaxMTU, now)
		anew = append(anew, p)
	}
	for i, p := range anew {
		for slot := range m.slots {
			if len(m.slots[slot]) < len(m.slots[p.slot]) {
				p.slot = slot
			}
		}
		m.peers[p.ID] = p
		m.bySource[p.Allowed[0].Addr()] = p // gateway.gatewayOf derives the same address
		m.slots[p.slot] = append(m.slots[p.slot], p)
		p.away = i >= burst
		m.wakeSender()
	}
}

// moved applies a new key or endpoint to a peer, and reports whether the peer keeps its state. The
// peer keeps its state after a rotation of the key, because sessions survive that. A connected peer
// also keeps its state if only the configured endpoint of its gateway changes. It is then pinged at
// once, and counts as lost only after the usual threshold. The caller holds m.mu.
func (m *Monitor) moved(p *peerState, to Peer, now time.Time) bool {
	from := p.Peer
	rotated := from
	rotated.Key = to.Key
	at := rotated
	at.Endpoint, at.Port = to.Endpoint, to.Port
	if rotated != to && (at != to || p.result.State != Connected) {
		return false
	}
	p.Peer = to
	if rotated != to {
		p.back = true
		p.path.begin(now)
		m.wakeSender()
	}
	return true
}

// forget removes a peer. The caller holds m.mu.
func (m *Monitor) forget(p *peerState) {
	delete(m.peers, p.ID)
	if m.bySource[p.Allowed[0].Addr()] == p {
		delete(m.bySource, p.Allowed[0].Addr())
	}
	m.slots[p.slot] = slices.DeleteFunc(m.slots[p.slot], func(other *peerState) bool { return other == p })
}

// wakeSender makes the goroutine of send ping new peers.
func (m *Monitor) wakeSender() {
	select {
	case m.fresh <- struct{}{}:
	default:
	}
}

// hold delays the first PING to every peer until the channel released is closed.
func (m *Monitor) hold(released <-chan struct{}) {
	m.held.Store(true)
	m.wg.Go(func() {
		select {
		case <-released:
		case <-m.done:
		}
		m.held.Store(false)
		m.wakeSender()
	})
}

// Observe returns the result for one peer, or the zero Result if the Monitor does not have that
// peer.
func (m *Monitor) Observe(id string) Result {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.peers[id]
	if p == nil {
		return Result{}
	}
	r := p.result
	r.Loss, r.Sent = p.loss(now)
	r.Path = p.path.PathMTU
	return r
}

// Peers returns the peers in random order.
func (m *Monitor) Peers() []Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]Peer, 0, len(m.peers))
	for _, p := range m.peers {
		all = append(all, p.Peer)
	}
	return all
}

// send runs in a goroutine of its own. It pings new peers at once, and every peer once per
// interval, in the peer's turn. It also looks for peers that have not answered, and sends the
// probes of the path MTU.
func (m *Monitor) send() {
	began, turn := time.Now(), 1
	turns := time.NewTimer(interval)
	defer turns.Stop()
	looks := time.NewTicker(observeInterval)
	defer looks.Stop()
	paths := time.NewTicker(pathLook)
	defer paths.Stop()
	if m.o.PathChanged == nil {
		paths.Stop()
	}
	for {
		turns.Reset(time.Until(began.Add(time.Duration(turn+m.idle(turn)) * slotTime)))
		select {
		case <-m.done:
			return
		case <-m.fresh:
			m.pingNew()
		case key := <-m.suspects:
			m.testSession(key)
		case <-turns.C:
			now := int(time.Since(began) / slotTime)
			for turn = max(turn, now-slots+1); turn <= now; turn++ {
				m.ping(m.due(turn))
			}
		case <-looks.C:
			m.findLate(time.Now())
		case <-paths.C:
			m.searchPaths(time.Now())
		}
	}
}

// idle returns the number of successive turns without a peer to ping, beginning with the given
// turn.
func (m *Monitor) idle(turn int) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	for n := range slots {
		if len(m.slots[(turn+n)%slots]) > 0 {
			return n
		}
	}
	return slots
}

// due returns the peers to ping in a turn. It leaves out new peers whose first PING must wait for
// Options.Hold, and peers that were pinged a moment ago.
func (m *Monitor) due(turn int) (peers []*peerState) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.slots[turn%slots] {
		if p.n == 0 && m.held.Load() {
			continue
		}
		last := p.begun
		if p.n > 0 {
			last = p.sent[(p.n-1)%window].at
		}
		if now.Sub(last) >= interval/2 {
			peers = append(peers, p)
		}
	}
	return peers
}

// pingNew pings peers that were never pinged or that have a session again, up to burst at once.
func (m *Monitor) pingNew() {
	now := time.Now()
	if now.Before(m.more) || m.held.Load() {
		return
	}
	var peers []*peerState
	m.mu.Lock()
	for _, p := range m.peers {
		if !p.back && p.n > 0 {
			continue
		}
		if len(peers) == burst {
			m.more = now.Add(slotTime)
			time.AfterFunc(slotTime, m.wakeSender)
			break
		}
		p.back = false
		peers = append(peers, p)
	}
	m.mu.Unlock()
	m.ping(peers)
}

// ping pings peers. If a peer is away, ping counts a PING without sending it, because the packet
// would occupy memory until there is a session.
func (m *Monitor) ping(peers []*peerState) {
	type ping struct {
		to   netip.AddrPort
		text []byte
	}
	var pings []ping
	m.mu.Lock()
	for _, p := range peers {
		now := time.Now()
		p.sent[p.n%window] = probe{at: now}
		p.n++
		if p.away {
			continue
		}
		text, err := json.Marshal(message{p.ID, "PING", now.UTC().Format(time.RFC3339Nano)})
		if err == nil {
			pings = append(pings, ping{p.Probe, text})
		}
	}
	m.mu.Unlock()
	for _, p := range pings {
		_ = m.port.Send(p.text, p.to, 0) // ignore the error: the missing answer counts as loss
	}
}

// findLate marks the peers that have not answered for too long as Disconnected.
func (m *Monitor) findLate(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.peers {
		r := p.result
		if r.Answered.IsZero() {
			r.Answered = p.begun
		}
		if r.State != Disconnected && r.Late(now, cmp.Or(p.Threshold, threshold)) {
			p.result.RTT = 0
			m.enter(p, Disconnected, now)
		}
	}
}

// loss returns the share of PINGs that were not answered, and the number of PINGs from which the
// share is computed. PINGs of the last interval do not count, because they may still be answered.
func (p *peerState) loss(now time.Time) (share float64, sent int) {
	lost := 0
	for _, s := range p.sent[:min(p.n, window)] {
		if !s.answered && now.Sub(s.at) < interval {
			continue
		}
		if sent++; !s.answered {
			lost++
		}
	}
	if sent == 0 {
		return 0, 0
	}
	return float64(lost) / float64(sent), sent
}
