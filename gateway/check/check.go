// Package check finds out which peers of a gateway answer, and how large packets to them may be.
//
// A Monitor has both roles of Liqo's connection check (docs/liqo-v0.md, section 8) for all peers of
// one tunnel: it pings them, and answers their PINGs.
//
//	Set, Change ─► peers ─► PING ─► Port ─► PONG ─► Result ─► Observe
//	                 ▲        └ padded: search for the path MTU (pathmtu.go)
//	Sessions ────────┘ who is away, and with whom to begin a handshake (away.go)
//
// The Monitor owns its Port and the results. It knows peers by cluster ID and address, and nothing
// of the gateway. Package gateway, its only user, has one Monitor for each tunnel. All methods may
// be called concurrently. The Monitor calls the functions of Options from its own goroutines,
// without a lock.
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

// MaxMessage is the longest message in octets. A real one has about 113, and Liqo reads 1024.
const MaxMessage = 512

// Liqo's connection check: UDP port 12345 of the gateways' own addresses, one JSON object a
// message. Each side sends PING every two seconds and answers PING with PONG. Messages and states
// follow Liqo to the letter, because Liqo derives the readiness of a virtual node from them. The
// Monitor accepts fewer PONGs than Liqo, see take.
const (
	interval        = 2 * time.Second
	threshold       = 5 // intervals without an answer until the peer counts as lost
	observeInterval = threshold * interval / 10
	maxColons       = 16 // bounds the members of a message; a real one has 6

	// window is the number of probes over which loss is measured: those of one minute.
	window = 30

	// slots is the number of turns of slotTime in an interval. Each peer has one turn: PINGs to a
	// thousand peers at once would overflow the queue of the in-process endpoint, and delay packets
	// on the same processor.
	slots    = 100
	slotTime = interval / slots
	// new peers that are pinged at once; if more are new, the rest counts as away, see Sessions
	burst = 64

	// pathMessages is about how many path probes are sent at once. Packets wait until they are
	// sent.
	pathMessages = 128
)

// State is the state of a peer by the connection check, in Liqo's words.
type State string

// All values of State.
const (
	Connecting   State = "Connecting" // no answer yet, for less than ten seconds
	Connected    State = "Connected"  // answers
	Disconnected State = "Error"      // no answer for ten seconds
)

// Peer is the configuration of a peer for the check. If it changes, the peer starts again as
// Connecting. Exceptions are Key, the endpoint of a connected peer (see moved), and the bounds of
// the path MTU.
type Peer struct {
	ID       string          // cluster ID
	Probe    netip.AddrPort  // where PINGs go, and PONGs come from
	Allowed  [2]netip.Prefix // the peer's PINGs come from the network address of the first one
	Key      [32]byte        // public key of WireGuard
	Endpoint string          // as configured
	Port     uint16
	// Threshold is the number of intervals without an answer after which the peer counts as lost;
	// 0: five.
	Threshold int
	// The search for the path MTU has these bounds: every path should carry packets of BaseMTU
	// octets in the tunnel, and none is known to carry more than MaxMTU. 0: no search.
	BaseMTU, MaxMTU int
}

// Result is the result of the check for one peer.
type Result struct {
	State    State
	RTT      time.Duration // by the last answer; 0 when not connected
	Loss     float64       // share of the probes of the last minute without an answer, 0 to 1
	Sent     int           // number of probes in Loss
	Since    time.Time     // start of the state
	Answered time.Time     // last answer; zero: never
	Asked    time.Time     // when we last answered a PING of the peer; zero: never
	Path     PathMTU
}

// Unasked reports whether the PINGs of the peer are missing. A peer that can reach us sends one
// every two seconds. PINGs come from the network address of the peer's pods. So this side alone
// notices when the two disagree about that network, and only about that one.
func (r *Result) Unasked(now time.Time) bool {
	last := r.Since
	if r.Asked.After(last) {
		last = r.Asked
	}
	return now.Sub(last) > threshold*interval
}

// Late reports whether the last answer is older than that many intervals.
func (r *Result) Late(now time.Time, intervals int) bool {
	return now.Sub(r.Answered) > time.Duration(intervals)*interval+r.RTT
}

// A Port sends and receives messages: a datapath.Port. It limits the messages of each peer, and so
// bounds the work of the Monitor per peer.
type Port interface {
	Receive() (message []byte, from netip.AddrPort, err error) // net.ErrClosed after Close
	Send(message []byte, to netip.AddrPort, size int) error    // in a packet of size octets, if not 0
	Close()
}

// Options are the options of Start. All but Log may be left out.
type Options struct {
	Log *slog.Logger
	// RTT is called with the round trip of each answer.
	RTT func(id string, rtt time.Duration)
	// Handshake begins a handshake with a peer. Doubt needs it.
	Handshake func(key [32]byte)
	// Hold, if not nil, delays the first PINGs to all peers until it is closed.
	Hold <-chan struct{}
	// PathChanged is called when another path MTU is in force. nil: the Monitor does not search for
	// path MTUs.
	PathChanged func()
}

// Monitor has both roles of the check for all peers.
type Monitor struct {
	port Port
	o    Options

	fresh  chan struct{} // holds a token while there are peers that were never pinged
	doubts chan [32]byte // keys of peers, see Doubt
	done   chan struct{}
	wg     sync.WaitGroup

	more time.Time   // when the next new peers may be pinged; used by send only
	held atomic.Bool // new peers are not pinged yet

	rejected [numRejections]atomic.Uint64
	answered atomic.Uint64 // PINGs answered

	mu    sync.Mutex
	peers map[string]*checked
	at    map[netip.Addr]*checked // by the address from which a peer pings
	slots [slots][]*checked
	// Handshakes of the last seconds, per second: answered, and not answered, see Sessions.
	answers struct{ answered, lost float64 }
}

// checked is the state of one peer.
type checked struct {
	Peer
	result Result
	slot   int
	begun  time.Time // when the peer was configured
	newest time.Time // sending time of the newest answered PING

	away  bool      // the peer has no session, see Sessions
	back  bool      // the peer has a session again, and was not pinged since
	tried time.Time // when a handshake was last begun
	rests bool      // that handshake was given up
	waits bool      // that handshake may still be answered

	sent [window]probe // ring
	n    int           // probes ever sent

	path pathSearch
}

type probe struct {
	at       time.Time
	answered bool
}

// Start starts both roles on port, which it owns.
func Start(port Port, o Options) *Monitor {
	m := &Monitor{port: port, o: o,
		fresh: make(chan struct{}, 1), doubts: make(chan [32]byte, burst), done: make(chan struct{}), peers: make(map[string]*checked), at: make(map[netip.Addr]*checked)}
	if o.Hold != nil {
		m.hold(o.Hold)
	}
	m.wg.Go(m.receive)
	m.wg.Go(m.send)
	return m
}

// Close ends both roles and the socket.
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
	var gone []string
	m.mu.Lock()
	for id := range m.peers {
		if !stay[id] {
			gone = append(gone, id)
		}
	}
	m.mu.Unlock()
	m.Change(peers, gone)
}

// Change is Set for the changed and removed peers only.
func (m *Monitor) Change(peers []Peer, gone []string) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, id := range gone {
		if p := m.peers[id]; p != nil {
			m.forget(p)
		}
	}
	var anew []*checked
	for i := range peers {
		was := m.peers[peers[i].ID]
		if was != nil {
			was.limit(peers[i].BaseMTU, peers[i].MaxMTU, now)
			if was.Peer == peers[i] || m.moved(was, peers[i], now) {
				continue
			}
			m.forget(was)
		}
		p := &checked{Peer: peers[i], begun: now, result: Result{State: Connecting, Since: now}}
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
		m.at[p.Allowed[0].Addr()] = p // see gatewayOf
		m.slots[p.slot] = append(m.slots[p.slot], p)
		p.away = i >= burst
		m.look()
	}
}

// moved gives a peer another key or endpoint, and reports whether the peer keeps its state. It does
// after a rotation of the key, which keeps sessions, and if it was connected while its gateway
// moved. The Monitor then pings it at once, and it stays connected until the usual threshold. The
// caller holds m.mu.
func (m *Monitor) moved(p *checked, to Peer, now time.Time) bool {
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
		m.look()
	}
	return true
}

// forget removes a peer. The caller holds m.mu.
func (m *Monitor) forget(p *checked) {
	delete(m.peers, p.ID)
	if m.at[p.Allowed[0].Addr()] == p {
		delete(m.at, p.Allowed[0].Addr())
	}
	m.slots[p.slot] = slices.DeleteFunc(m.slots[p.slot], func(other *checked) bool { return other == p })
}

// look wakes send for a peer that was never pinged.
func (m *Monitor) look() {
	select {
	case m.fresh <- struct{}{}:
	default:
	}
}

// hold delays the first PINGs to all peers until released is closed.
func (m *Monitor) hold(released <-chan struct{}) {
	m.held.Store(true)
	m.wg.Go(func() {
		select {
		case <-released:
		case <-m.done:
		}
		m.held.Store(false)
		m.look()
	})
}

// Observe returns the result for one peer; zero: the check does not have that peer.
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

// Peers returns the peers, in no order.
func (m *Monitor) Peers() []Peer {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]Peer, 0, len(m.peers))
	for _, p := range m.peers {
		all = append(all, p.Peer)
	}
	return all
}

// send pings a new peer at once, and every peer once per interval at its turn. In between it looks
// for peers that have not answered.
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
		case key := <-m.doubts:
			m.test(key)
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

// idle returns the number of turns without a PING, from this one on.
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

// due returns the peers to ping in a turn. It leaves out peers whose first PING was sent a moment
// ago, or is still to be sent.
func (m *Monitor) due(turn int) (peers []*checked) {
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

// pingNew pings some of the peers that were never pinged, or are back.
func (m *Monitor) pingNew() {
	now := time.Now()
	if now.Before(m.more) || m.held.Load() {
		return
	}
	var peers []*checked
	m.mu.Lock()
	for _, p := range m.peers {
		if !p.back && p.n > 0 {
			continue
		}
		if len(peers) == burst {
			m.more = now.Add(slotTime)
			time.AfterFunc(slotTime, m.look)
			break
		}
		p.back = false
		peers = append(peers, p)
	}
	m.mu.Unlock()
	m.ping(peers)
}

// ping pings peers. A PING to a peer that is away counts as sent, but is not sent: it could only
// wait for a session and occupy memory.
func (m *Monitor) ping(peers []*checked) {
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
		_ = m.port.Send(p.text, p.to, 0) // lost or refused: the missing answer counts
	}
}

// findLate changes the state of peers that have not answered for too long.
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

// loss returns the share of unanswered probes. A probe of the last interval may still be answered
// and does not count yet.
func (p *checked) loss(now time.Time) (share float64, of int) {
	lost := 0
	for _, s := range p.sent[:min(p.n, window)] {
		if !s.answered && now.Sub(s.at) < interval {
			continue
		}
		if of++; !s.answered {
			lost++
		}
	}
	if of == 0 {
		return 0, 0
	}
	return float64(lost) / float64(of), of
}
