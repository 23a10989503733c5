package natengine

import (
	"fmt"
	"hash/maphash"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// Config sets the engine's bounds. The package comment lists the defaults, which apply to zero
// fields.
type Config struct {
	Self4, Self6       netip.Addr // addresses of the in-process endpoint; defaults: 169.254.0.1 (as in Liqo), none
	Router4, Router6   netip.Addr // source addresses that the gateway's kernel gives its ICMP errors; the engine replaces them by the mapped Self4 and Self6; default none
	MaxFlows           int        // of all peers together
	MaxFlowsPerPeer    int        // 0: an equal share of MaxFlows for each peer
	MaxFlowsPerHost    int        // per host and peer; 0: a quarter of MaxFlowsPerPeer, from 1,024 to 16,384
	RandomPorts        bool       // give each new NAPT mapping a random port, even if its own is free
	MaxFragmentSets    int        // incomplete datagrams, per peer and direction
	MaxFragmentBytes   int        // octets of held fragments, per peer and direction
	MaxFragmentsPerSet int        // fragments held of one datagram
	MaxErrorsPerSecond int        // ICMP errors that the gateway sends, per peer
	Timeouts           Timeouts
}

// Timeouts are the idle times after which flows end, and the time after which held fragments are
// dropped. They are accurate to about 0.13 s. Fragment is limited to 2-30 s (RFC 6146, section
// 3.4).
type Timeouts struct {
	UDP            time.Duration // RFC 4787, REQ-5
	TCPEstablished time.Duration // RFC 5382, REQ-5
	TCPTransitory  time.Duration // half-open; RFC 5382, REQ-5
	TCPClosing     time.Duration // closed or reset; 0: TCPTransitory (RFC 7857, section 2.1)
	ICMP           time.Duration // RFC 5508, REQ-2
	Generic        time.Duration // other protocols
	Fragment       time.Duration
}

const (
	defaultMaxFlows         = 1 << 20
	defaultMaxFragmentSets  = 256
	defaultMaxFragmentBytes = 1 << 20
	// Enough for the largest datagram, 65,535 octets, in fragments of 256 octets of data.
	defaultMaxFragmentsPerSet = 256
	defaultMaxErrorsPerSecond = 1000

	minFragmentTimeout = 2 * time.Second // RFC 6146, section 3.4
	maxFragmentTimeout = 30 * time.Second
)

func (c Config) withDefaults() Config {
	number := func(p *int, n int) {
		if *p <= 0 {
			*p = n
		}
	}
	period := func(p *time.Duration, d time.Duration) {
		if *p <= 0 {
			*p = d
		}
	}
	if !c.Self4.IsValid() {
		c.Self4 = netip.AddrFrom4([4]byte{169, 254, 0, 1})
	}
	number(&c.MaxFlows, defaultMaxFlows)
	c.MaxFlows = min(c.MaxFlows, 1<<30)
	number(&c.MaxFragmentSets, defaultMaxFragmentSets)
	number(&c.MaxFragmentBytes, defaultMaxFragmentBytes)
	number(&c.MaxFragmentsPerSet, defaultMaxFragmentsPerSet)
	number(&c.MaxErrorsPerSecond, defaultMaxErrorsPerSecond)
	period(&c.Timeouts.UDP, 5*time.Minute)
	period(&c.Timeouts.TCPEstablished, 2*time.Hour+4*time.Minute)
	period(&c.Timeouts.TCPTransitory, 4*time.Minute)
	period(&c.Timeouts.TCPClosing, c.Timeouts.TCPTransitory)
	period(&c.Timeouts.ICMP, time.Minute)
	period(&c.Timeouts.Generic, 5*time.Minute)
	period(&c.Timeouts.Fragment, 5*time.Second)
	c.Timeouts.Fragment = min(max(c.Timeouts.Fragment, minFragmentTimeout), maxFragmentTimeout)
	return c
}

// Warnings returns a text for each setting that the engine accepts although it may do harm: a
// timeout shorter than the RFCs demand, or bounds that contradict each other. For the zero value it
// returns nothing.
func (c Config) Warnings() (warnings []string) {
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	t := c.Timeouts
	for _, rule := range []struct {
		name        string
		have, least time.Duration
		rfc         string
	}{
		{"UDP", t.UDP, 2 * time.Minute, "RFC 4787, REQ-5"},
		{"established TCP", t.TCPEstablished, 2*time.Hour + 4*time.Minute, "RFC 5382, REQ-5"},
		{"transitory TCP", t.TCPTransitory, 4 * time.Minute, "RFC 5382, REQ-5"},
		{"closing TCP", t.TCPClosing, 4 * time.Minute, "RFC 5382, REQ-5"},
		{"ICMP", t.ICMP, time.Minute, "RFC 5508, REQ-2"},
		{"fragment", t.Fragment, minFragmentTimeout, "RFC 6146, section 3.4; the minimum is used instead"},
	} {
		if rule.have > 0 && rule.have < rule.least {
			warn("the timeout of %s is %v; want at least %v (%s)", rule.name, rule.have, rule.least, rule.rfc)
		}
	}
	if t.Fragment > maxFragmentTimeout {
		warn("the timeout of fragment is %v; the maximum, %v, is used instead", t.Fragment, maxFragmentTimeout)
	}
	d := c.withDefaults()
	if d.MaxFlowsPerPeer > d.MaxFlows {
		warn("the limit of flows of a peer is %d, above the limit of all peers together, %d", d.MaxFlowsPerPeer, d.MaxFlows)
	}
	if d.MaxFlowsPerHost >= udpPorts.limit() {
		warn("the limit of flows of a host is %d; with so many, one host can take all ports of the NAPT address", d.MaxFlowsPerHost)
	}
	return warnings
}

// Engine translates packets. Outbound and Inbound may be called from any number of goroutines,
// concurrently with all other methods. The engine reads no clock: callers pass the time since
// an arbitrary epoch.
type Engine struct {
	rules     atomic.Pointer[ruleTable]
	config    Config
	lifetimes lifetimes
	self      [2]addr // address of the in-process endpoint by family; zero for none
	router    [2]addr // Router4 and Router6; zero for none
	seed      maphash.Seed
	total     atomic.Int64  // flows of all peers, including flows that are being opened
	share     atomic.Int64  // each peer's equal share of MaxFlows
	yielded   atomic.Uint32 // index of the peer whose flow was last evicted in favour of another peer
	swept     atomic.Uint32
	events    flowEvents
	sweeping  sync.Mutex // held during a sweep
	noPeer    [directions][numDrops]atomic.Uint64

	mu               sync.Mutex // guards the fields below, and serialises SetPeers and Change
	peers            map[string]*PeerState
	quota, hostQuota int // the quotas in force
}

// New returns an engine without peers, which drops every packet.
func New(c Config) *Engine {
	c = c.withDefaults()
	t := c.Timeouts
	e := &Engine{
		config: c,
		lifetimes: lifetimes{
			udp: ticks(t.UDP), established: ticks(t.TCPEstablished), transitory: ticks(t.TCPTransitory),
			closing: ticks(t.TCPClosing), icmp: ticks(t.ICMP), generic: ticks(t.Generic), fragment: ticks(t.Fragment),
		},
		seed:  maphash.MakeSeed(),
		peers: map[string]*PeerState{},
	}
	e.self[0] = addrOf(c.Self4)
	if c.Self6.IsValid() {
		e.self[1] = addrOf(c.Self6)
	}
	for family, a := range [2]netip.Addr{c.Router4, c.Router6} {
		if a.IsValid() {
			e.router[family] = addrOf(a)
		}
	}
	empty, _ := compile(nil, e.self, nil)
	e.rules.Store(empty)
	return e
}

// SetPeers replaces all rules by one atomic swap: a packet sees either the old rules or the
// new ones. If the rules contradict each other (overlapping networks of two peers, masks of
// different length, an address mapped twice), SetPeers changes nothing. It then returns an
// error that names every peer and rule at fault.
//
// Before it returns, SetPeers ends the flows that the new rules do not permit. All other flows keep
// their ports. SetPeers ends flows in steps, and between the steps packets can open new flows. If
// only MSS and MTU change, it examines no flow and drops no fragment. SetPeers copies peers.
func (e *Engine) SetPeers(peers []Peer) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.setPeers(peers)
}

func (e *Engine) setPeers(peers []Peer) error {
	var fresh []*PeerState
	table, err := compile(peers, e.self, e.state(&fresh))
	if err != nil {
		return err
	}
	var removed []string
	for id := range e.peers {
		if _, found := table.find(id); !found {
			removed = append(removed, id)
		}
	}
	e.publish(table, table.rules, fresh, removed)
	return nil
}

// Change is SetPeers for some peers. It adds or replaces the peers in changed, removes those in
// removed, and keeps all others. The time of a change does not depend on the number of other peers,
// except for the copies of the rule tables and the rebuilt table of IPv6 networks.
func (e *Engine) Change(changed []Peer, removed []string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	var fresh []*PeerState
	old := e.rules.Load()
	table := old.changedCopy(changed, removed, e.self, e.state(&fresh))
	if table == nil {
		return e.setPeers(old.specs(changed, removed))
	}
	var rules []*rule
	for i := range changed {
		at, _ := table.find(changed[i].ID)
		rules = append(rules, table.rules[at])
	}
	e.publish(table, rules, fresh, removed)
	return nil
}

// state returns a function that finds the PeerState of an ID. For a new ID, the function makes a
// PeerState and adds it to fresh.
func (e *Engine) state(fresh *[]*PeerState) func(id string) *PeerState {
	return func(id string) *PeerState {
		p := e.peers[id]
		if p == nil {
			p = newPeerState(id, &e.config, e.seed, &e.total)
			p.flows.peer, p.flows.events = p, &e.events
			*fresh = append(*fresh, p)
		}
		return p
	}
}

// publish puts table into force, and deletes the PeerStates of the IDs in removed. rules has the
// rules that are new in table. fresh has the PeerStates of new peers.
func (e *Engine) publish(table *ruleTable, rules []*rule, fresh []*PeerState, removed []string) {
	share, quota, hostQuota := e.config.quotas(len(table.rules))
	bounded := rules
	if e.share.Swap(int64(share)) != int64(share) || quota != e.quota || hostQuota != e.hostQuota {
		bounded = table.rules
	}
	e.quota, e.hostQuota = quota, hostQuota
	for _, r := range bounded {
		r.peer.quota.Store(int64(quota))
		r.peer.setHostQuota(uint32(hostQuota), runtime.Gosched)
	}
	for _, r := range rules {
		r.peer.path.mtu.Store(int32(r.spec.MTU))
	}
	// Every PeerState gets its new rule before the table is published. So a packet that still uses
	// the old table cannot open a flow that the new table forbids. The flows that the new rules
	// forbid end last, because ending many flows takes long.
	var differ []*PeerState
	for _, id := range removed {
		if p := e.peers[id]; p != nil {
			p.setRule(nil)
			differ = append(differ, p)
			delete(e.peers, id)
		}
	}
	for _, r := range rules {
		if r.peer.setRule(r) {
			differ = append(differ, r.peer)
		}
	}
	e.rules.Store(table)
	for _, p := range fresh {
		e.peers[p.id] = p
	}
	for _, p := range differ {
		p.flows.purge(p.rule, runtime.Gosched)
	}
}

// setRule makes r the rule for new flows; if r is nil, no flow is permitted. setRule returns true
// if existing flows may violate r.
func (p *PeerState) setRule(r *rule) (differs bool) {
	t := &p.flows
	t.mu.Lock()
	defer t.mu.Unlock()
	old := p.rule
	p.rule = r
	differs = old != nil && (r == nil || !old.spec.sameFlows(r.spec))
	p.fragments[Outbound].setRule(r, differs)
	if r == nil {
		p.fragments[Inbound].setRule(nil, true)
	}
	return differs
}

// Count adds one to a drop counter. The engine counts the packets that it discards. The
// gateway counts its own drops here, with a nil peer if the peer is not known.
func (e *Engine) Count(p *PeerState, dir Direction, d Drop) {
	e.CountMany(p, dir, d, 1)
}

// CountMany adds n to a drop counter.
func (e *Engine) CountMany(p *PeerState, dir Direction, d Drop, n uint64) {
	if p == nil {
		e.noPeer[dir][d].Add(n)
		return
	}
	p.drops[dir][d].Add(n)
}

// Sweep ends expired flows and drops fragments that were held for too long. Call it about once
// a second. A call during another call does nothing.
func (e *Engine) Sweep(now time.Duration) { e.SweepInSteps(now, func() {}) }

// SweepInSteps is Sweep in steps of about 50 microseconds. After each step it calls pause, without
// holding a lock. If pause sleeps, the processor can handle packets in the meantime. Otherwise
// packets might wait until a million flows have been examined.
func (e *Engine) SweepInSteps(now time.Duration, pause func()) {
	if !e.sweeping.TryLock() {
		return
	}
	defer e.sweeping.Unlock()
	at := tickOf(now)
	e.swept.Store(uint32(at))
	step := sweepStep{pause: pause}
	for _, r := range e.rules.Load().rules {
		r.peer.flows.sweep(&e.lifetimes, at, &step)
		for dir := range r.peer.fragments {
			r.peer.fragments[dir].sweep(at, e.lifetimes.fragment)
		}
	}
}
