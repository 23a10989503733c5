package voting

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/isthmus-net/isthmus/internal/mandate"
)

// A Gate is open while a gateway may send to peers. Senders check it just before each system call
// that sends. The zero Gate is shut.
type Gate struct{ until atomic.Int64 } // end of the permission, as time since clockStart

// clockStart is the zero point of the gateways' clock.
var clockStart = time.Now()

func clock() mandate.Time { return time.Since(clockStart) }

// Open reports whether the gateway may send now.
func (g *Gate) Open() bool { return int64(clock()) < g.until.Load() }

// A List is the nodes that vote, by name, with their addresses.
type List struct {
	Version uint64                `json:"version"`
	Voters  map[string]netip.Addr `json:"voters,omitempty"`
}

func (l List) list() mandate.List {
	m := mandate.List{Version: l.Version}
	for name := range l.Voters {
		m.Voters = append(m.Voters, mandate.ID(name))
	}
	slices.Sort(m.Voters)
	return m
}

// A View is the state of a candidate.
type View struct {
	Epoch  uint64   // epoch of the mandate or claim; 0: the candidate claims no epoch
	Holds  bool     // the candidate has a mandate
	Holder string   // the Pod that a majority has voted for; empty: unknown
	Since  uint64   // the epoch of Holder
	Heard  []string // nodes that have answered an ask recently, sorted
	Newest uint64   // a list with a lower version gets no majority
	List   uint64   // version of the list by which the candidate counts votes
	// Pending reports that a proposed list, or a fence, does not count yet.
	Pending bool
	// Released reports that the former holder has released a majority of the voters. If it is
	// false, the voters became free because they no longer heard the holder.
	Released bool
}

// A Candidate asks nodes for their votes on behalf of one gateway. Run may be called only once.
// The other methods may be called concurrently with Run.
type Candidate struct {
	Pod    string
	Addr   netip.Addr                     // address of the Pod
	Key    func() [32]byte                // the WireGuard private key; zero: not known yet
	Gate   *Gate                          // see Allow
	Change func()                         // called when View changes; it must not call the candidate
	Listen func() (net.PacketConn, error) // opens the socket; nil: on a free UDP port at Addr
	Log    *slog.Logger

	soon chan struct{} // makes Run send before the next beat

	mu      sync.Mutex
	machine *mandate.Gateway
	voters  map[mandate.ID]*target // voters of the current list and of the proposed list
	nodes   map[string]netip.Addr
	notices map[string]*notice // by the name of a node that does not vote
	may     bool
	lease   bool // the Lease gives the gateway a mandate
	gated   bool
	last    View
}

// A target is the candidate's record of a node with a vote.
type target struct {
	addr   netip.Addr
	cookie cookie

	free     mandate.Time // when the vote becomes free if its holder (another gateway) sends nothing more
	released bool         // the vote became free earlier than the field free says, so the holder has released it
}

// heard records an answer. pod is the Pod of the candidate that received it. A vote counts as
// released if it becomes free more than two beats early.
func (t *target) heard(a mandate.Answer, pod mandate.ID, now mandate.Time) {
	switch {
	case a.Promise.Holder == pod:
	case a.Free > 0:
		t.free, t.released = now+a.Free, false
	case now < t.free-2*mandate.Usual.Beat:
		t.released = true
	}
}

// notice has the progress of notifying one node without a vote of a new mandate.
type notice struct {
	heard mandate.Time // time at which the last answered ask was sent; 0: the node never answered
	tries int          // notices sent for the current epoch
	again mandate.Time
}

const (
	maxNotices     = 20               // number of beats in which a node is notified of a new mandate
	noticeInterval = 10 * time.Second // interval of further notices, for nodes that were unreachable before
)

// NewCandidate returns a candidate that asks no node yet. Its fields may be changed until Run
// is called.
func NewCandidate(pod string, addr netip.Addr, key func() [32]byte, log *slog.Logger) *Candidate {
	return &Candidate{Pod: pod, Addr: addr, Key: key, Log: log, Gate: new(Gate), Change: func() {}, soon: make(chan struct{}, 1),
		machine: mandate.NewGateway(mandate.ID(pod), mandate.Usual, random(), mandate.List{}),
		voters:  make(map[mandate.ID]*target), notices: make(map[string]*notice)}
}

// Learn passes a list to the candidate: the list in the Lease, or the list of a trial. proposed
// means that this gateway has proposed the list as the next one. A list that the candidate does not
// use ends the mandate, unless proposed is true.
func (c *Candidate) Learn(l List, proposed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock()
	if proposed && l.Version < c.machine.List().Version { // Fence has been called since the proposal
		return
	}
	if !proposed || !c.machine.Propose(l.list(), now) {
		c.machine.Learn(l.list(), now)
	}
	before := c.voters
	c.voters = make(map[mandate.ID]*target)
	for name, addr := range l.Voters {
		c.target(before, mandate.ID(name), addr)
	}
	for _, id := range c.machine.List().Voters { // the voters of the current list vote until the next list counts
		if old := before[id]; c.voters[id] == nil && old != nil {
			c.target(before, id, old.addr)
		}
	}
	c.update(now)
}

func (c *Candidate) target(before map[mandate.ID]*target, id mandate.ID, addr netip.Addr) {
	t := before[id]
	if t == nil {
		t = new(target)
		rand.Read(t.cookie[:]) // never fails
	}
	t.addr = addr
	c.voters[id] = t
}

// Fence makes the voters store a version that is newer than the version of any list with voters.
// Then no gateway gets a vote any more. Fence requires a mandate. It is complete when View returns
// that version as List.
func (c *Candidate) Fence() {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.machine.List()
	l.Version++
	c.machine.Propose(l, clock())
}

// SetNodes sets the nodes of the cluster, which are notified of a mandate.
func (c *Candidate) SetNodes(nodes map[string]netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes = nodes
	maps.DeleteFunc(c.notices, func(name string, _ *notice) bool { return !nodes[name].IsValid() })
}

// Nodes returns the map passed to SetNodes. The caller must not change it.
func (c *Candidate) Nodes() map[string]netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes
}

// Answering returns the nodes that have answered recently while this candidate has a mandate by
// votes: voters within about a second, other nodes within three times noticeInterval.
func (c *Candidate) Answering() map[string]netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock()
	all := make(map[string]netip.Addr)
	heard, _ := c.machine.Heard(now)
	for _, id := range heard {
		if addr, ok := c.nodes[string(id)]; ok {
			all[string(id)] = addr
		}
	}
	for name, t := range c.notices {
		if t.heard != 0 && now-t.heard < 3*noticeInterval {
			all[name] = c.nodes[name]
		}
	}
	return all
}

// Allow sets the conditions of the candidate. mayClaim permits it to claim a mandate. hasLease
// means that its gateway has a mandate by the Lease. If gated is true, the Gate is open only during
// a mandate by votes. If gated is false, the Gate is always open.
func (c *Candidate) Allow(mayClaim, hasLease, gated bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.may, c.lease, c.gated = mayClaim, hasLease, gated
	c.update(clock())
}

// See records an epoch that was read from the Lease.
func (c *Candidate) See(epoch uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.machine.See(epoch)
}

// View returns the current state of the candidate.
func (c *Candidate) View() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.view(clock())
}

func (c *Candidate) view(now mandate.Time) View {
	heard, newest := c.machine.Heard(now)
	holder, since := c.machine.Elected()
	v := View{Epoch: c.machine.Epoch(), Holds: c.machine.Holds(now), Holder: string(holder), Since: since, Newest: newest, List: c.machine.List().Version, Pending: c.machine.Pending()}
	for _, id := range heard {
		v.Heard = append(v.Heard, string(id))
	}
	voters, released := c.machine.List().Voters, 0
	for _, id := range voters {
		if t := c.voters[id]; t != nil && t.released {
			released++
		}
	}
	v.Released = released > len(voters)/2
	return v
}

// update sets the gate and reports changes. The caller holds c.mu.
func (c *Candidate) update(now mandate.Time) {
	if c.gated {
		c.Gate.until.Store(int64(c.machine.Until()))
	} else {
		c.Gate.until.Store(math.MaxInt64)
	}
	v := c.view(now)
	if reflect.DeepEqual(v, c.last) {
		return
	}
	switch {
	case v.Holds && !c.last.Holds:
		c.Log.Info("nodes have elected this gateway", "epoch", v.Epoch)
		c.beatSoon() // nodes switch to this gateway when they receive this beat
	case c.last.Holds && !v.Holds:
		c.Log.Warn("this gateway has lost the majority of votes", "epoch", c.last.Epoch, "answered", v.Heard, "list", v.List)
	}
	if v.Epoch != c.last.Epoch {
		for _, t := range c.notices {
			t.tries, t.again = 0, 0
		}
	}
	c.last = v
	c.Change()
}

// Run asks for votes until ctx ends. If the socket fails, Run opens it again.
func (c *Candidate) Run(ctx context.Context) {
	listen := c.Listen
	if listen == nil {
		listen = func() (net.PacketConn, error) {
			return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.Addr, 0)))
		}
	}
	for {
		conn, err := listen()
		if err == nil {
			err = c.ask(ctx, conn)
		}
		if ctx.Err() != nil {
			return
		}
		c.Log.Warn("cannot ask nodes for votes", "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(listenAgain):
		}
	}
}

func (c *Candidate) ask(ctx context.Context, conn net.PacketConn) error {
	ended := make(chan struct{})
	var failed error // the error of reading
	go func() {
		defer close(ended)
		failed = c.read(conn)
	}()
	tick := time.NewTicker(mandate.Usual.Beat)
	defer tick.Stop()
	var private [32]byte
	var key ed25519.PrivateKey
	for {
		if p := c.Key(); p != private {
			private, key = p, KeyOf(p)
		}
		if key != nil {
			c.beat(conn, key)
		}
		select {
		case <-ctx.Done():
			err := conn.Close()
			<-ended
			return err
		case <-ended:
			return errors.Join(failed, conn.Close())
		case <-tick.C:
		case <-c.soon:
		}
	}
}

func (c *Candidate) beat(conn net.PacketConn, key ed25519.PrivateKey) {
	for _, m := range c.messages(clock(), key) {
		_, _ = conn.WriteTo(m.text, net.UDPAddrFromAddrPort(netip.AddrPortFrom(m.to, Port))) // a failed send counts as a lost message
	}
}

type message struct {
	to   netip.Addr
	text []byte
}

func (c *Candidate) messages(now mandate.Time, key ed25519.PrivateKey) (all []message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	asks := c.machine.Tick(now, c.may, c.lease)
	for id, a := range asks {
		if t := c.voters[id]; t != nil && t.addr.IsValid() {
			all = append(all, message{t.addr, ask{a, t.cookie, c.Addr}.seal(key)})
		}
	}
	c.update(now)
	if !c.machine.Holds(now) || !c.gated {
		return all
	}
	var text []byte // sealed once, because all nodes without a vote get the same text
	for name, addr := range c.nodes {
		t := c.notices[name]
		if t == nil {
			t = new(notice)
			c.notices[name] = t
		}
		if _, votes := asks[mandate.ID(name)]; votes || now < t.again {
			continue
		}
		if text == nil {
			text = ask{mandate.Ask{Kind: mandate.Probe, From: mandate.ID(c.Pod), Epoch: c.machine.Epoch(), Holds: true, Sent: now}, cookie{}, c.Addr}.seal(key)
		}
		all = append(all, message{addr, text})
		if t.tries++; t.tries >= maxNotices {
			t.tries, t.again = 0, now+noticeInterval
		}
	}
	return all
}

// read processes answers until the socket fails.
func (c *Candidate) read(conn net.PacketConn) error {
	buf := make([]byte, answerLimit+1)
	for failures := 0; ; {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			// ReadFrom may return ICMP errors of earlier asks, which do not affect other
			// messages.
			if failures++; failures > 100 || errors.Is(err, net.ErrClosed) {
				return err
			}
			continue
		}
		failures = 0
		if a, ok := openAnswer(buf[:n]); ok {
			c.receive(a, from)
		}
	}
}

func (c *Candidate) receive(a answer, from net.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := clock()
	t := c.voters[a.From]
	if t == nil || t.cookie != a.cookie {
		if n := c.notices[string(a.From)]; n != nil && a.cookie == (cookie{}) && c.sentBy(string(a.From), from) {
			n.tries, n.again, n.heard = 0, now+noticeInterval, now
		}
		return
	}
	t.heard(a.Answer, mandate.ID(c.Pod), now)
	c.machine.Receive(a.Answer, now)
	if c.may && c.machine.Could(now) {
		c.beatSoon()
	}
	c.update(now)
}

// beatSoon makes Run send the next beat at once.
func (c *Candidate) beatSoon() {
	select {
	case c.soon <- struct{}{}:
	default:
	}
}

// sentBy reports whether from, the source address of a datagram, belongs to the named node. A
// forged datagram only delays the next notice to that node by noticeInterval.
func (c *Candidate) sentBy(name string, from net.Addr) bool {
	u, ok := from.(*net.UDPAddr)
	return ok && u.AddrPort().Addr().Unmap() == c.nodes[name]
}

// Release ends the mandate and sends a release to the voters.
func (c *Candidate) Release() {
	private := c.Key()
	c.mu.Lock()
	asks := c.machine.Release(clock())
	targets := make(map[mandate.ID]target)
	for id, t := range c.voters {
		targets[id] = *t
	}
	c.may = false
	c.update(clock())
	c.mu.Unlock()
	listen := c.Listen
	if listen == nil {
		listen = func() (net.PacketConn, error) {
			return net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(c.Addr, 0)))
		}
	}
	conn, err := listen()
	if err != nil {
		return // the voters become free by themselves when the last ask no longer binds them
	}
	defer conn.Close()
	key := KeyOf(private)
	for i := range 3 { // datagrams may be lost
		if i > 0 {
			time.Sleep(20 * time.Millisecond)
		}
		for id, a := range asks {
			if t, ok := targets[id]; ok && t.addr.IsValid() {
				_, _ = conn.WriteTo(ask{a, t.cookie, c.Addr}.seal(key), net.UDPAddrFromAddrPort(netip.AddrPortFrom(t.addr, Port)))
			}
		}
	}
}
