package gateway

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

// Liqo's connection check (docs/liqo-v0.md, section 8): UDP port 12345 of the gateways' own
// addresses, one JSON object a message. Each side sends PING every two seconds and answers PING
// with PONG. Messages and states follow Liqo to the letter, because Liqo derives the readiness of a
// virtual node from them. The checker accepts fewer PONGs than Liqo, see take.
const (
	checkInterval  = 2 * time.Second
	checkThreshold = 5 // intervals without an answer until the peer counts as lost
	checkObserve   = checkThreshold * checkInterval / 10
	checkMaxLen    = 512 // octets of a message; a real one has about 113, and Liqo reads 1024
	checkMaxColons = 16  // bounds the members of a message; a real one has 6

	// checkWindow is the number of probes over which loss is measured: those of one minute.
	checkWindow = 30

	// checkSlots is the number of turns of checkStep in an interval. Each peer has one turn: PINGs
	// to a thousand peers at once would overflow the queue of the in-process endpoint, and delay
	// packets on the same processor.
	checkSlots = 100
	checkStep  = checkInterval / checkSlots
	// new peers that are pinged at once; if more are new, the rest counts as away, see sessions
	checkFirst = 64

	// pathMessages is about how many path probes are sent at once, because packets wait meanwhile.
	pathMessages = 128
)

// CheckState is the state of a peer by the connection check, in Liqo's words.
type CheckState string

const (
	Connecting   CheckState = "Connecting" // no answer yet, for less than ten seconds
	Connected    CheckState = "Connected"  // answers
	Disconnected CheckState = "Error"      // no answer for ten seconds
)

// Message returns Liqo's explanation of the state.
func (s CheckState) Message() string {
	switch s {
	case Connected:
		return "VPN connection established"
	case Connecting:
		return "Waiting VPN connection to be established"
	}
	return "No network connectivity towards remote cluster"
}

// checkMessage is the JSON object, its fields in Liqo's order.
type checkMessage struct {
	ClusterID string `json:"clusterID"` // in a PING: the cluster that is pinged; in a PONG: the same
	MsgType   string `json:"msgType"`
	Timestamp string `json:"timeStamp"` // RFC 3339 with nanoseconds, of the PING, by the pinger's clock
}

// checkPeer is the configuration of a peer for the check. If it changes, the peer starts again as
// Connecting. Exceptions are its key, and the endpoint of a connected peer, see moved.
type checkPeer struct {
	id       string
	probe    netip.AddrPort
	allowed  [2]netip.Prefix
	key      [32]byte
	endpoint string
	port     uint16
	// threshold is the number of intervals without an answer after which the peer counts as lost;
	// 0: checkThreshold.
	threshold int
	// The search for the path MTU has these bounds: every path should carry packets of baseMTU
	// octets in the tunnel, and none is known to carry more than maxMTU. They may change without
	// another beginning. 0: no search.
	baseMTU, maxMTU int
}

// CheckResult is the result of the check for one peer.
type CheckResult struct {
	State    CheckState
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
func (r *CheckResult) Unasked(now time.Time) bool {
	last := r.Since
	if r.Asked.After(last) {
		last = r.Asked
	}
	return now.Sub(last) > checkThreshold*checkInterval
}

// Late reports whether the last answer is older than that many intervals.
func (r *CheckResult) Late(now time.Time, intervals int) bool {
	return now.Sub(r.Answered) > time.Duration(intervals)*checkInterval+r.RTT
}

// A checkPort sends and receives messages: a datapath.Port. It limits the messages of each peer, and so
// bounds the work of the checker per peer.
type checkPort interface {
	Receive() (message []byte, from netip.AddrPort, err error) // net.ErrClosed after Close
	Send(message []byte, to netip.AddrPort, size int) error    // in a packet of size octets, if not 0
	Close()
}

// checkOptions are the options of newChecker. All but Log may be left out.
type checkOptions struct {
	Log *slog.Logger
	// RTT is called with the round trip of each answer.
	RTT func(id string, rtt time.Duration)
	// Handshake begins a handshake with a peer. doubt needs it.
	Handshake func(key [32]byte)
	// Hold, if not nil, delays the first PINGs to all peers until it is closed.
	Hold <-chan struct{}
	// PathChanged is called when another path MTU is in force. nil: the checker does not search for
	// path MTUs.
	PathChanged func()
}

// checker has both roles of the check for all peers. Methods may be called concurrently.
type checker struct {
	port checkPort
	o    checkOptions

	fresh  chan struct{} // holds a token while there are peers that were never pinged
	doubts chan [32]byte // keys of peers, see doubt
	done   chan struct{}
	wg     sync.WaitGroup

	more time.Time   // when the next new peers may be pinged; used by send only
	held atomic.Bool // new peers are not pinged yet

	rejected [numRejections]atomic.Uint64
	answered atomic.Uint64 // PINGs answered

	mu    sync.Mutex
	peers map[string]*checked
	at    map[netip.Addr]*checked // by the address from which a peer pings
	slots [checkSlots][]*checked
	// Handshakes of the last seconds, per second: answered, and not answered, see sessions.
	answers struct{ answered, lost float64 }
}

// checked is the state of one peer.
type checked struct {
	checkPeer
	result CheckResult
	slot   int
	begun  time.Time // when the peer was configured
	newest time.Time // sending time of the newest answered PING

	away  bool      // the peer has no session, see sessions
	back  bool      // the peer has a session again, and was not pinged since
	tried time.Time // when a handshake was last begun
	rests bool      // that handshake was given up
	waits bool      // that handshake may still be answered

	sent [checkWindow]probe // ring
	n    int                // probes ever sent

	path pathSearch
}

type probe struct {
	at       time.Time
	answered bool
}

// newChecker starts both roles on port, which it owns.
func newChecker(port checkPort, o checkOptions) *checker {
	c := &checker{port: port, o: o,
		fresh: make(chan struct{}, 1), doubts: make(chan [32]byte, checkFirst), done: make(chan struct{}), peers: make(map[string]*checked), at: make(map[netip.Addr]*checked)}
	if o.Hold != nil {
		c.hold(o.Hold)
	}
	c.wg.Go(c.receive)
	c.wg.Go(c.send)
	return c
}

// close ends both roles and the socket.
func (c *checker) close() {
	close(c.done)
	c.port.Close()
	c.wg.Wait()
}

// set replaces the peers. An unchanged peer keeps its state.
func (c *checker) set(peers []checkPeer) {
	stay := make(map[string]bool, len(peers))
	for i := range peers {
		stay[peers[i].id] = true
	}
	var gone []string
	c.mu.Lock()
	for id := range c.peers {
		if !stay[id] {
			gone = append(gone, id)
		}
	}
	c.mu.Unlock()
	c.change(peers, gone)
}

// change is set for the changed and removed peers only.
func (c *checker) change(peers []checkPeer, gone []string) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range gone {
		if p := c.peers[id]; p != nil {
			c.forget(p)
		}
	}
	var anew []*checked
	for i := range peers {
		was := c.peers[peers[i].id]
		if was != nil {
			was.limit(peers[i].baseMTU, peers[i].maxMTU, now)
			if was.checkPeer == peers[i] || c.moved(was, peers[i], now) {
				continue
			}
			c.forget(was)
		}
		p := &checked{checkPeer: peers[i], begun: now, result: CheckResult{State: Connecting, Since: now}}
		p.limit(p.baseMTU, p.maxMTU, now)
		anew = append(anew, p)
	}
	for i, p := range anew {
		for slot := range c.slots {
			if len(c.slots[slot]) < len(c.slots[p.slot]) {
				p.slot = slot
			}
		}
		c.peers[p.id] = p
		c.at[p.allowed[0].Addr()] = p // see gatewayOf
		c.slots[p.slot] = append(c.slots[p.slot], p)
		p.away = i >= checkFirst
		c.look()
	}
}

// moved gives a peer another key or endpoint, and reports whether the peer keeps its state. It does
// after a rotation of the key, which keeps sessions, and if it was connected while its gateway
// moved. The checker then pings it at once, and it stays connected until the usual threshold. The
// caller holds c.mu.
func (c *checker) moved(p *checked, to checkPeer, now time.Time) bool {
	from := p.checkPeer
	rotated := from
	rotated.key = to.key
	at := rotated
	at.endpoint, at.port = to.endpoint, to.port
	if rotated != to && (at != to || p.result.State != Connected) {
		return false
	}
	p.checkPeer = to
	if rotated != to {
		p.back = true
		p.path.begin(now)
		c.look()
	}
	return true
}

// forget removes a peer. The caller holds c.mu.
func (c *checker) forget(p *checked) {
	delete(c.peers, p.id)
	if c.at[p.allowed[0].Addr()] == p {
		delete(c.at, p.allowed[0].Addr())
	}
	c.slots[p.slot] = slices.DeleteFunc(c.slots[p.slot], func(other *checked) bool { return other == p })
}

// look wakes send for a peer that was never pinged.
func (c *checker) look() {
	select {
	case c.fresh <- struct{}{}:
	default:
	}
}

// hold delays the first PINGs to all peers until released is closed.
func (c *checker) hold(released <-chan struct{}) {
	c.held.Store(true)
	c.wg.Go(func() {
		select {
		case <-released:
		case <-c.done:
		}
		c.held.Store(false)
		c.look()
	})
}

// observe returns the result for one peer; zero: the check does not have that peer.
func (c *checker) observe(id string) CheckResult {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[id]
	if p == nil {
		return CheckResult{}
	}
	r := p.result
	r.Loss, r.Sent = p.loss(now)
	r.Path = p.path.PathMTU
	return r
}

// Peers returns the peers, in no order.
func (c *checker) Peers() []checkPeer {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]checkPeer, 0, len(c.peers))
	for _, p := range c.peers {
		all = append(all, p.checkPeer)
	}
	return all
}

// send pings a new peer at once, and every peer once per interval at its turn. In between it looks
// for peers that have not answered.
func (c *checker) send() {
	began, turn := time.Now(), 1
	turns := time.NewTimer(checkInterval)
	defer turns.Stop()
	looks := time.NewTicker(checkObserve)
	defer looks.Stop()
	paths := time.NewTicker(pathLook)
	defer paths.Stop()
	if c.o.PathChanged == nil {
		paths.Stop()
	}
	for {
		turns.Reset(time.Until(began.Add(time.Duration(turn+c.idle(turn)) * checkStep)))
		select {
		case <-c.done:
			return
		case <-c.fresh:
			c.pingNew()
		case key := <-c.doubts:
			c.test(key)
		case <-turns.C:
			now := int(time.Since(began) / checkStep)
			for turn = max(turn, now-checkSlots+1); turn <= now; turn++ {
				c.ping(c.due(turn))
			}
		case <-looks.C:
			c.findLate(time.Now())
		case <-paths.C:
			c.searchPaths(time.Now())
		}
	}
}

// idle returns the number of turns without a PING, from this one on.
func (c *checker) idle(turn int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := range checkSlots {
		if len(c.slots[(turn+n)%checkSlots]) > 0 {
			return n
		}
	}
	return checkSlots
}

// due returns the peers to ping in a turn. It leaves out peers whose first PING was sent a moment
// ago, or is still to be sent.
func (c *checker) due(turn int) (peers []*checked) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.slots[turn%checkSlots] {
		if p.n == 0 && c.held.Load() {
			continue
		}
		last := p.begun
		if p.n > 0 {
			last = p.sent[(p.n-1)%checkWindow].at
		}
		if now.Sub(last) >= checkInterval/2 {
			peers = append(peers, p)
		}
	}
	return peers
}

// pingNew pings some of the peers that were never pinged, or are back.
func (c *checker) pingNew() {
	now := time.Now()
	if now.Before(c.more) || c.held.Load() {
		return
	}
	var peers []*checked
	c.mu.Lock()
	for _, p := range c.peers {
		if !p.back && p.n > 0 {
			continue
		}
		if len(peers) == checkFirst {
			c.more = now.Add(checkStep)
			time.AfterFunc(checkStep, c.look)
			break
		}
		p.back = false
		peers = append(peers, p)
	}
	c.mu.Unlock()
	c.ping(peers)
}

// ping pings peers. A PING to a peer that is away counts as sent, but is not sent: it could only
// wait for a session and occupy memory.
func (c *checker) ping(peers []*checked) {
	type ping struct {
		to   netip.AddrPort
		text []byte
	}
	var pings []ping
	c.mu.Lock()
	for _, p := range peers {
		now := time.Now()
		p.sent[p.n%checkWindow] = probe{at: now}
		p.n++
		if p.away {
			continue
		}
		text, err := json.Marshal(checkMessage{p.id, "PING", now.UTC().Format(time.RFC3339Nano)})
		if err == nil {
			pings = append(pings, ping{p.probe, text})
		}
	}
	c.mu.Unlock()
	for _, p := range pings {
		_ = c.port.Send(p.text, p.to, 0) // lost or refused: the missing answer counts
	}
}

// findLate changes the state of peers that have not answered for too long.
func (c *checker) findLate(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.peers {
		r := p.result
		if r.Answered.IsZero() {
			r.Answered = p.begun
		}
		if r.State != Disconnected && r.Late(now, cmp.Or(p.threshold, checkThreshold)) {
			p.result.RTT = 0
			c.enter(p, Disconnected, now)
		}
	}
}

// loss returns the share of unanswered probes. A probe of the last interval may still be answered
// and does not count yet.
func (p *checked) loss(now time.Time) (share float64, of int) {
	lost := 0
	for _, s := range p.sent[:min(p.n, checkWindow)] {
		if !s.answered && now.Sub(s.at) < checkInterval {
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
