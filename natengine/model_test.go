package natengine_test

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// model is a second implementation of the whole stateful engine, based on the reference for single
// packets. It implements bounds, eviction, rule changes, sweeps and counters with lists and linear
// searches. Where the engine may choose a port or the flow to evict, the model reads the choice and
// checks that it is allowed.
type model struct {
	reference
	config natengine.Config
	now    time.Duration
	swept  time.Duration
	ledger map[string]*ledger   // counters by peer ID; those with "" are of packets without a peer
	listed []natengine.FlowInfo // the engine's flows after the packet under test
	have   map[identity]bool    // identities of listed
	wrong  error                // error about a wrong eviction
	recent [2][][]byte          // forwarded packets by direction, the newest last
	log    func(what string)    // called with each command
	seen   map[string]int       // number of occurrences of each outcome
	loose  map[*refFlow]bool    // flows that were established at some time since the last sweep; if closed, they may be evicted, but need not be
	engine *natengine.Engine
}

// ledger holds the counters of one peer.
type ledger struct {
	drops                                       [2]map[natengine.Drop]uint64
	created, expired, evicted, purged, halfOpen int
}

// identity distinguishes flows.
type identity struct {
	peer                  string
	proto                 uint8
	query                 refQuery
	local, mapped, remote netip.AddrPort
}

func (id identity) String() string {
	return fmt.Sprintf("the flow of %s, protocol %d, %v as %v to %v", id.peer, id.proto, id.local, id.mapped, id.remote)
}

func (f *refFlow) identity() identity {
	return identity{f.peer, f.proto, f.query, f.local, f.mapped, f.remote}
}

func identityOf(f natengine.FlowInfo) identity {
	id := identity{f.Peer, f.Proto, refQuery{request: f.Query}, f.Local, f.Mapped, f.Remote}
	if f.Query != 0 && f.Kind == "endpoint" {
		id.query.asker = natengine.Inbound
	}
	return id
}

func newLedger() *ledger {
	return &ledger{drops: [2]map[natengine.Drop]uint64{{}, {}}}
}

// modelBounds are the bounds under which engine and model are compared. Some are low enough to
// reach every bound, others are never reached.
var modelBounds = []natengine.Config{
	{}, {MaxFlows: 8}, {MaxFlows: 8, MaxFlowsPerPeer: 3}, {MaxFlows: 24}, {MaxFlows: 6, MaxFlowsPerPeer: 6}, {MaxFlows: 24, MaxFlowsPerHost: 2},
	{RandomPorts: true}, {MaxFlows: 30, MaxFlowsPerPeer: 12, MaxFlowsPerHost: 1, RandomPorts: true},
}

func newModel(bounds byte) *model {
	c := modelBounds[int(bounds)%len(modelBounds)]
	c.Timeouts = oddTimeouts
	c.Timeouts.TCPClosing = 125 * time.Second
	c.MaxErrorsPerSecond = 1 << 20
	c.Self6 = netip.MustParseAddr("fd00::1")
	m := &model{
		reference: reference{self: []netip.Addr{netip.MustParseAddr("169.254.0.1"), c.Self6}, timeouts: c.Timeouts, random: c.RandomPorts},
		config:    c, engine: natengine.New(c), log: func(string) {}, seen: map[string]int{}, loose: map[*refFlow]bool{},
		ledger: map[string]*ledger{"": newLedger()},
	}
	if m.config.MaxFlows == 0 {
		m.config.MaxFlows = 1 << 20
	}
	m.room = m.makeRoom
	m.expired = func(f *refFlow) { m.ledger[f.peer].expired++ }
	return m
}

// command is one step: a packet, a pause, a sweep or new rules. All parameters are small
// numbers, so any octets are a valid command, and a list of commands can be cut anywhere.
type command [8]byte

// Kinds of commands, in their first octet.
const (
	cmdRules = iota
	cmdWait
	cmdWaitLong
	cmdSweep
	cmdSend     // this value and all larger ones
	numCommands = 64
)

func (m *model) do(c command) error {
	switch c[0] % numCommands {
	case cmdRules:
		return m.setRules(c)
	case cmdWait:
		m.now += time.Duration(c[1]%8) * 10 * time.Second
		m.log(fmt.Sprint("time is ", m.now))
	case cmdWaitLong:
		seconds := []int{70, 70, 130, 130, 250, 310, 600, 7450}[c[1]%8]
		m.now += time.Duration(seconds) * time.Second
		m.log(fmt.Sprint("time is ", m.now))
	case cmdSweep:
		m.log("sweep")
		m.engine.Sweep(m.now)
		m.sweepAll()
	default:
		if err := m.send(c); err != nil {
			return err
		}
		return m.compare(m.listed)
	}
	return m.compare(m.engine.Flows(1 << 20))
}

func (m *model) sweepAll() {
	m.sweep(m.now)
	m.swept = m.now
	for _, l := range m.ledger {
		l.halfOpen = 0
	}
	for _, f := range m.flows {
		if !f.established() {
			m.ledger[f.peer].halfOpen++
			delete(m.loose, f)
		}
	}
}

// modelPeers derives rules from three octets of a command. The octets select the peers, and for
// each peer the addresses under which it sees us and may reach us.
func modelPeers(c command) []natengine.Peer {
	has := func(octet, bit int) bool { return c[octet]>>bit&1 != 0 }
	var peers []natengine.Peer
	b := natengine.Peer{
		ID: "b", RemotePods: prefixList("10.71.0.0/18", "fd71::/64"), RemoteExternal: prefixList("10.72.0.0/24", "fd72::/96"),
		Pods:     []natengine.Remap{remapOf("10.244.0.0/20", "10.246.16.0/20"), remapOf("fd44::/64", "fd46::/64")},
		External: prefixList("10.247.0.0/24", "fd47::/64"),
		Endpoints: []natengine.Endpoint{
			endpointOf("169.254.0.1", "10.247.0.1"), endpointOf("192.168.7.7", "10.247.0.9"), endpointOf("fd01::7", "fd47::7"), endpointOf("fd00::1", "fd47::1"),
		},
	}
	if has(2, 0) {
		b.Pods[0] = remapOf("10.244.0.0/20", "10.244.0.0/20")
	}
	if has(2, 1) {
		b.MSS = 1200
	}
	if has(2, 2) { // a pod that is also mapped, and a second mapped address of a node
		b.Endpoints = append(b.Endpoints, endpointOf("10.244.3.3", "10.247.0.33"), endpointOf("192.168.7.7", "10.247.0.99"), endpointOf("fd44::3", "fd47::33"))
	}
	if has(2, 3) {
		b.Endpoints[1] = endpointOf("192.168.1.2", "10.247.0.9")
	}
	if has(2, 4) {
		b.RemotePods = append(b.RemotePods, b.RemoteExternal...)
		b.RemoteExternal = nil
	}
	if has(2, 5) {
		b.Pods = b.Pods[:1]
	}
	if has(2, 6) {
		b.RemotePods[0] = netip.MustParsePrefix("10.71.0.0/24")
	}
	if has(2, 7) { // the nodes become pods
		b.Pods[0] = remapOf("192.168.0.0/20", "10.246.16.0/20")
	}
	if absent := c[1] & 15; absent != 1 && absent != 5 {
		peers = append(peers, b)
	}
	// c sees us under the same range under which we see c. d sees us under some addresses that
	// b uses too.
	c2 := natengine.Peer{
		ID: "c", RemotePods: prefixList("10.250.0.0/20", "fd73::/64"), Pods: []natengine.Remap{remapOf("10.244.0.0/20", "10.250.0.0/20"), remapOf("fd44::/64", "fd73::/64")},
		External: prefixList("10.247.0.0/25"), Endpoints: []natengine.Endpoint{endpointOf("192.168.7.7", "10.247.0.9")},
	}
	if has(3, 0) {
		c2.RemotePods[0] = netip.MustParsePrefix("10.71.64.0/18")
	}
	if has(3, 1) { // the in-process endpoint has an address in the PodCIDR
		c2.Pods[0] = remapOf("169.254.0.0/20", "10.250.0.0/20")
	}
	if has(3, 2) {
		c2.MSS = 1300
	}
	if absent := c[1] & 15; absent != 2 && absent != 5 && absent != 4 {
		peers = append(peers, c2)
	}
	// d sees us as a single address, which is the pod's and also the NAPT address.
	d := natengine.Peer{
		ID: "d", RemotePods: prefixList("10.75.0.0/16", "fd75::/64"), Pods: []natengine.Remap{remapOf("10.244.1.1/32", "10.249.1.1/32")},
		External: prefixList("10.247.0.0/24"), Endpoints: []natengine.Endpoint{endpointOf("10.244.3.3", "10.247.0.33")},
	}
	if absent := c[1] & 15; absent != 3 && absent != 5 && absent != 4 {
		peers = append(peers, d)
	}
	if c[1]>>4 == 0 { // rules that are refused as a whole
		peers = append(peers, natengine.Peer{ID: "e", RemotePods: prefixList("10.71.0.0/25", "10.75.1.0/24", "fd73::/48")})
	}
	return peers
}

func prefixList(list ...string) (p []netip.Prefix) {
	for _, s := range list {
		p = append(p, netip.MustParsePrefix(s))
	}
	return p
}

func remapOf(from, to string) natengine.Remap {
	return natengine.Remap{From: netip.MustParsePrefix(from), To: netip.MustParsePrefix(to)}
}

func endpointOf(real, seen string) natengine.Endpoint {
	return natengine.Endpoint{Real: netip.MustParseAddr(real), Seen: netip.MustParseAddr(seen)}
}

// The addresses in packets: ours, those of the peers, and ours as the peers see them.
var (
	modelNear = addrList("192.168.1.1 192.168.1.2 192.168.7.7 10.244.1.1 10.244.3.3 10.244.0.0 169.254.0.1 127.0.0.1 " +
		"fd01::1 fd01::2 fd01::7 fd44::1 fd44::3 fd44:: fd00::1 fe80::1")
	modelFar = addrList("10.71.0.5 10.71.0.5 10.71.0.5 10.71.0.5 10.71.0.5 10.71.1.6 10.71.1.6 10.71.64.7 " +
		"10.72.0.5 10.72.0.5 10.250.0.5 10.250.0.5 10.250.1.1 10.75.0.5 10.75.0.5 10.99.0.9 " +
		"fd71::5 fd71::5 fd71::5 fd71::5 fd71::5 fd71::6 fd71::6 fd72::5 fd72::5 fd73::5 fd73::5 fd73::3 fd75::5 fd75::6 fd71::7 fd99::9")
	modelSeen = addrList("10.246.16.0 10.246.17.1 10.246.19.3 10.247.0.1 10.247.0.9 10.247.0.33 10.247.0.99 10.249.1.1 10.244.0.0 10.244.1.1 " +
		"10.250.0.0 10.250.1.1 10.250.3.3 192.0.2.1 10.247.0.9 10.246.16.0 " +
		"fd46:: fd46::1 fd46::3 fd47::7 fd47::1 fd47::33 fd47::99 fd73:: fd73::1 fd73::3 fd44::1 fd46:: fd47::7 fd73:: fd46:: fd47::33")
	modelPorts = []uint16{0, 53, 80, 1023, 1024, 40000, 40001, 65535}
	modelFlags = []uint8{
		packettest.SYN, packettest.SYN | packettest.ACK, packettest.ACK, packettest.ACK, packettest.ACK | packettest.PSH, packettest.FIN | packettest.ACK,
		packettest.FIN, packettest.RST, packettest.RST | packettest.ACK, 0, packettest.SYN, packettest.SYN | packettest.FIN, packettest.ACK,
		packettest.SYN | packettest.RST, packettest.SYN | packettest.ACK, packettest.FIN | packettest.ACK,
	}
)

func addrList(list string) (a []netip.Addr) {
	for s := range strings.FieldsSeq(list) {
		a = append(a, netip.MustParseAddr(s))
	}
	return a
}

// setRules sets the rules in engine and model, or in neither.
func (m *model) setRules(c command) error {
	peers := modelPeers(c)
	m.log(fmt.Sprintf("rules %v", peers))
	err := m.engine.SetPeers(peers)
	if contradictory := slices.ContainsFunc(peers, func(p natengine.Peer) bool { return p.ID == "e" }) && len(peers) > 1; contradictory != (err != nil) {
		return fmt.Errorf("SetPeers and the model disagree: %w", cmp.Or(err, errors.New("nothing")))
	}
	if err == nil {
		m.adopt(peers)
	}
	return m.compare(m.engine.Flows(1 << 20))
}

// adopt sets new rules and ends the flows that they do not permit.
func (m *model) adopt(peers []natengine.Peer) {
	before := m.ledger
	m.ledger = map[string]*ledger{"": before[""]}
	for _, p := range peers {
		m.ledger[p.ID] = cmp.Or(before[p.ID], newLedger())
	}
	m.peers = peers
	m.flows = slices.DeleteFunc(m.flows, func(f *refFlow) bool {
		if m.permitted(f) {
			return false
		}
		before[f.peer].purged++
		return true
	})
}

// permitted reports whether the rules would let the flow be opened.
func (m *model) permitted(f *refFlow) bool {
	p, pods, ok := m.peerOf(f.remote.Addr())
	if !ok || p.ID != f.peer {
		return false
	}
	if f.endpoint {
		return pods && slices.Contains(p.Endpoints, natengine.Endpoint{Real: f.local.Addr(), Seen: f.mapped.Addr()})
	}
	to, ok := networkOf(p, f.local.Addr())
	return ok && f.mapped.Addr() == to.To.Addr() && (!isPod(f.local.Addr(), to.From) || m.isSelf(f.local.Addr()))
}

// quota returns the maximum number of flows of one peer.
func (m *model) quota() int {
	if m.config.MaxFlowsPerPeer > 0 {
		return m.config.MaxFlowsPerPeer
	}
	return max(m.config.MaxFlows/max(len(m.peers), 1), 1)
}

// share returns the number of flows that each peer is guaranteed.
func (m *model) share() int { return max(m.config.MaxFlows/max(len(m.peers), 1), 1) }

// hostQuota returns the maximum number of flows of one host.
func (m *model) hostQuota() int {
	n := m.config.MaxFlowsPerHost
	if n == 0 {
		n = min(max(m.quota()/4, 1024), 16384)
	}
	return min(n, m.quota())
}

// owner returns the host that the flow counts for: our host for a NAPT flow, the peer's host
// for a flow to a mapped endpoint.
func (f *refFlow) owner() netip.Addr {
	if f.endpoint {
		return f.remote.Addr()
	}
	return f.local.Addr()
}

// makeRoom admits a flow if the bounds allow it. At a bound, the oldest half-open flow is evicted:
// of the same host, or of the same peer. If MaxFlows is reached and this peer is below its share, a
// flow of a peer above its share is evicted. A flow that has closed since the last sweep may be
// evicted, but it need not be, because the engine queues it at the next sweep.
func (m *model) makeRoom(f *refFlow) natengine.Drop {
	byPeer := map[string][]*refFlow{}
	var ofHost []*refFlow
	for _, g := range m.flows {
		byPeer[g.peer] = append(byPeer[g.peer], g)
		if g.peer == f.peer && g.endpoint == f.endpoint && g.owner() == f.owner() {
			ofHost = append(ofHost, g)
		}
	}
	same, drop := byPeer[f.peer], natengine.DropFlowTableFull
	var elsewhere [][]*refFlow
	switch {
	case len(ofHost) >= m.hostQuota():
		same, drop = ofHost, natengine.DropHostQuota
	case len(same) >= m.quota():
	case len(m.flows) < m.config.MaxFlows:
		m.ledger[f.peer].created++
		return natengine.DropNone
	case len(same) < m.share():
		for _, flows := range byPeer {
			if len(flows) > m.share() {
				elsewhere = append(elsewhere, flows)
			}
		}
	}
	var victim, due *refFlow
	for _, queue := range append(elsewhere, same) {
		for i, g := range queue {
			if victim == nil && !m.have[g.identity()] {
				if victim = g; due != nil && due.peer != g.peer && g.peer == f.peer {
					m.wrong = fmt.Errorf("%v was evicted although %v is half-open and of a peer above its share", g.identity(), due.identity())
				}
				for _, older := range queue[:i] {
					if !older.settled {
						m.wrong = fmt.Errorf("%v was evicted although %v is older and half-open", g.identity(), older.identity())
					}
				}
			}
			if due == nil && !g.established() && !m.loose[g] {
				due = g
			}
		}
	}
	switch {
	case victim == nil && due == nil:
		return drop
	case victim == nil:
		m.wrong = fmt.Errorf("nothing was evicted although %v is half-open", due.identity())
		return natengine.DropNone
	case victim.established():
		m.wrong = fmt.Errorf("%v was evicted and is established", victim.identity())
	}
	m.flows = slices.DeleteFunc(m.flows, func(g *refFlow) bool { return g == victim })
	m.justEvicted = append(m.justEvicted, victim)
	m.ledger[victim.peer].evicted++
	m.ledger[f.peer].created++
	return natengine.DropNone
}

// packet builds the packet of a command. The second octet selects the direction and the kind
// of packet; addresses, protocol, ports and flags follow. A reply or an error refers to one of
// the last packets of the other direction.
func (m *model) packet(c command) (dir natengine.Direction, b []byte) {
	dir = natengine.Direction(c[1] & 1)
	far := modelFar[int(c[3])%len(modelFar)]
	near := modelNear[int(c[2])%len(modelNear)]
	if dir == natengine.Inbound {
		near = modelSeen[int(c[2])%len(modelSeen)]
	}
	if near.Is4() != far.Is4() {
		far = modelFar[(int(c[3])+len(modelFar)/2)%len(modelFar)]
	}
	src, dst := near, far
	if dir == natengine.Inbound {
		src, dst = far, near
	}
	if recent := m.recent[1-dir]; len(recent) > 0 {
		about := recent[len(recent)-1-int(c[3])%min(len(recent), 12)]
		p := packettest.MustDecode(about)
		switch c[1] >> 1 & 7 {
		case 0, 1, 2, 3:
			return dir, m.answer(c, p)
		case 4:
			if c[2]%2 == 0 || src.Is4() != p.Src.Is4() {
				src = p.Dst
			}
			return dir, m.fault(c, about, src, p.Src)
		}
	}
	h := packettest.IP{Src: src, Dst: dst}
	return dir, packettest.Build(h, modelBody(c, c[4]%12, modelPorts[c[5]%8], modelPorts[c[6]%8], src.Is4()))
}

// modelBody returns the body of a packet of the given kind.
func modelBody(c command, kind byte, src, dst uint16, is4 bool) packettest.Body {
	switch kind {
	case 0, 1, 2:
		return packettest.UDP{SrcPort: src, DstPort: dst, NoChecksum: is4 && c[7]%4 == 0, Data: []byte("datagram")}
	case 3, 4, 5, 6, 7, 8:
		return packettest.TCP{SrcPort: src, DstPort: dst, Flags: modelFlags[c[7]%16], Data: []byte("stream")}
	case 9:
		return packettest.Echo{ID: src, Seq: 1, Reply: c[7]%3 == 0, Data: []byte("ping")}
	case 10:
		if is4 { // timestamp, information, address mask, and messages that are neither query nor error
			return packettest.Raw{Proto: 1, Data: icmpQuery(queryTypes[c[7]%8], src)}
		}
		return packettest.Echo{ID: src, Seq: 2}
	default:
		return packettest.Raw{Proto: 47 + c[7]%2*85, Data: []byte("tunnelled, or SCTP with ports that NAT leaves alone")}
	}
}

var queryTypes = [8]uint8{13, 14, 15, 16, 17, 18, 9, 42}

func icmpQuery(kind uint8, id uint16) []byte {
	b := []byte{kind, 0, 0, 0, byte(id >> 8), byte(id), 0, 1, 1, 2, 3, 4, 5, 6, 7, 8}
	sum := packettest.InternetChecksum(b)
	b[2], b[3] = byte(sum>>8), byte(sum)
	return b
}

func (m *model) answer(c command, p packettest.Packet) []byte {
	h := packettest.IP{Src: p.Dst, Dst: p.Src}
	switch {
	case p.Proto == 17:
		return packettest.Build(h, modelBody(c, 0, p.DstPort, p.SrcPort, p.Src.Is4()))
	case p.Proto == 6:
		return packettest.Build(h, modelBody(c, 3, p.DstPort, p.SrcPort, p.Src.Is4()))
	case isICMP(p) && p.Src.Is4() && c[6]%4 == 0: // reply to another query, or to none
		return packettest.Build(h, packettest.Raw{Proto: 1, Data: icmpQuery(queryTypes[c[7]%8], p.ICMPID)})
	case isICMP(p):
		return packettest.Build(h, packettest.Echo{ID: p.ICMPID, Reply: c[7]%8 != 0, Data: []byte("pong")})
	}
	return packettest.Build(h, packettest.Raw{Proto: p.Proto, Data: []byte("answer, whatever it was")})
}

// fault returns an ICMP error that quotes a random part of the packet about.
func (m *model) fault(c command, about []byte, src, dst netip.Addr) []byte {
	header, kinds := 20, []uint8{3, 11, 12, 4, 5, 3, 3, 11}
	if src.Is6() {
		header, kinds = 40, []uint8{1, 2, 3, 4, 1, 2, 3, 3}
	}
	e := packettest.ICMPError{Type: kinds[c[4]%8], Code: c[7] % 2, Quote: about[:min(len(about), header+[]int{8, 1400, 8, int(c[6] % 8)}[c[5]%4])]}
	return packettest.Build(packettest.IP{Src: src, Dst: dst}, e)
}

// send sends the packet of a command through engine and model and compares the results.
func (m *model) send(c command) error {
	dir, in := m.packet(c)
	out := slices.Clone(in)
	var v packet.View
	if err := v.Parse(out, packet.ChecksumComplete); err != nil {
		return fmt.Errorf("parse %x: %w", in, err)
	}
	trace := m.engine.Trace(&v, dir, m.now)
	verdict := m.engine.Outbound
	if dir == natengine.Inbound {
		verdict = m.engine.Inbound
	}
	got := verdict(&v, m.now)
	m.log(fmt.Sprintf("%v %v: %v %v, left as %v", dir, summary(in), got.Action, got.Drop, summary(out)))
	m.have = map[identity]bool{}
	m.listed = m.engine.Flows(1 << 20)
	for _, f := range m.listed {
		m.have[identityOf(f)] = true
	}
	m.justEvicted = nil
	err := m.judge(dir, in, out, got, m.now)
	if err = cmp.Or(m.wrong, err); err != nil {
		return err
	}
	if trace.Action != got.Action || trace.Drop != got.Drop {
		return fmt.Errorf("trace said %v %v, engine %v %v", trace.Action, trace.Drop, got.Action, got.Drop)
	}
	m.seen[fmt.Sprint(dir, " ", got.Action, " ", got.Drop)]++
	p := packettest.MustDecode(in)
	far := p.Dst
	if dir == natengine.Inbound {
		far = p.Src
	}
	peer, _, _ := m.peerOf(far)
	if (got.Peer == nil) != (peer.ID == "") || got.Peer != nil && got.Peer.ID() != peer.ID {
		return fmt.Errorf("verdict names peer %v, which is %q", got.Peer, peer.ID)
	}
	if got.Action == natengine.Discard {
		m.ledger[peer.ID].drops[dir][got.Drop]++
	} else if !isError(p) {
		m.recent[dir] = append(m.recent[dir], out)
		if dir == natengine.Outbound && c[6]>>5 == 0 && p.Flags&packettest.RST == 0 { // not after a RST, which may have ended the packet's flow
			return m.tooBig(&v, in)
		}
	}
	for _, f := range m.flows {
		if f.established() {
			m.loose[f] = true
		}
	}
	return nil
}

// tooBig treats a forwarded packet as too big. Its sender must get an error that quotes
// exactly the octets that it sent.
func (m *model) tooBig(v *packet.View, in []byte) error {
	silent := func() (n uint64) {
		for _, p := range m.engine.Stats().Peers {
			n += p.ErrorsLimited
		}
		return n
	}
	before := silent()
	answer, action := m.engine.TooBig(v, 1280, make([]byte, packet.MaxTooBig), m.now)
	switch {
	case action == natengine.Discard && silent() > before:
		return nil // more than a hundred errors at once
	case action == natengine.Discard:
		return errors.New("nobody is told that it is too big")
	}
	m.log("too big: " + summary(answer))
	p, sent := packettest.MustDecode(answer), packettest.MustDecode(in)
	if p.Src != sent.Dst || p.Dst != sent.Src || !slices.Equal(p.Data, in[:min(len(in), len(p.Data))]) || (action == natengine.Deliver) != m.isSelf(sent.Src) {
		return fmt.Errorf("%v is answered by %v, %v\n%x", summary(in), summary(answer), action, answer)
	}
	return packettest.ValidChecksums()(p)
}

// summary returns a short text about a packet.
func summary(b []byte) string {
	p := packettest.MustDecode(b)
	s := fmt.Sprintf("%v:%d > %v:%d", p.Src, p.SrcPort, p.Dst, p.DstPort)
	switch {
	case isError(p):
		q, _ := packettest.DecodeQuote(p.Data)
		return fmt.Sprintf("ICMP error %d %v > %v about protocol %d %v:%d > %v:%d", p.Type, p.Src, p.Dst, q.Proto, q.Src, q.SrcPort, q.Dst, q.DstPort)
	case isICMP(p):
		return fmt.Sprintf("ICMP %d %v > %v id %d", p.Type, p.Src, p.Dst, p.ICMPID)
	case p.Proto == 6:
		names := ""
		for i, c := range "FSRPA" {
			if p.Flags>>i&1 != 0 {
				names += string(c)
			}
		}
		return "TCP " + s + " " + names
	case p.Proto == 17:
		return "UDP " + s
	}
	return fmt.Sprintf("protocol %d %v > %v", p.Proto, p.Src, p.Dst)
}

// compare checks that engine and model have the same flows and the same counters.
func (m *model) compare(flows []natengine.FlowInfo) error {
	want := map[identity]*refFlow{}
	mappings := map[string]map[identity]bool{}
	for _, f := range m.flows {
		want[f.identity()] = f
		if hasPorts(packettest.Packet{Proto: f.proto, Src: f.local.Addr()}) && !f.endpoint {
			if mappings[f.peer] == nil {
				mappings[f.peer] = map[identity]bool{}
			}
			mappings[f.peer][identity{proto: f.proto, mapped: f.mapped}] = true
		}
	}
	inbound := map[identity]bool{}
	for _, f := range flows {
		id := identityOf(f)
		g := want[id]
		if g == nil {
			return fmt.Errorf("the engine has a flow that the model has not: %+v", f)
		}
		delete(want, id)
		if id.local = (netip.AddrPort{}); inbound[id] {
			return fmt.Errorf("two flows have the tuple of %+v", f)
		}
		inbound[id] = true
		if err := m.sameFlow(f, g); err != nil {
			return fmt.Errorf("%+v: %w", f, err)
		}
	}
	for id := range want {
		return fmt.Errorf("the engine has lost %+v", id)
	}
	s := m.engine.Stats()
	if s.Flows != len(m.flows) || s.Flows > m.config.MaxFlows {
		return fmt.Errorf("%d flows counted, %d are there", s.Flows, len(m.flows))
	}
	if err := m.sameDrops(m.ledger[""], func(dir natengine.Direction, d natengine.Drop) uint64 { return s.NoPeerDrops[dir][d] }); err != nil {
		return fmt.Errorf("without peer: %w", err)
	}
	for _, p := range m.engine.Peers() {
		l := m.ledger[p.ID()]
		if l == nil {
			return fmt.Errorf("unknown peer %s", p.ID())
		}
		if err := m.samePeer(p.Stats(), l, len(mappings[p.ID()])); err != nil {
			return fmt.Errorf("peer %s: %w", p.ID(), err)
		}
		if err := m.sameDrops(l, p.Drops); err != nil {
			return fmt.Errorf("peer %s: %w", p.ID(), err)
		}
	}
	return nil
}

func (m *model) sameFlow(f natengine.FlowInfo, g *refFlow) error {
	state, kind := "established", "napt"
	if !g.established() {
		state = "half-open"
		if g.proto == 6 && (g.reset || g.finished[natengine.Outbound] || g.finished[natengine.Inbound]) {
			state = "closing"
		}
	}
	if g.endpoint {
		kind = "endpoint"
	}
	if f.State != state || f.Kind != kind {
		return fmt.Errorf("should be %s, %s", kind, state)
	}
	idle := max(m.swept-g.seen, 0)
	left := max(m.lifetime(g)-idle, 0)
	if (f.Idle-idle).Abs() > time.Second || (f.Left-left).Abs() > time.Second {
		return fmt.Errorf("should be idle for %v and have %v left", idle, left)
	}
	return nil
}

func (m *model) samePeer(s natengine.PeerStats, l *ledger, mappings int) error {
	flows, full := 0, 0
	hosts := map[string]int{}
	for _, f := range m.flows {
		if f.peer == s.ID {
			flows++
			hosts[fmt.Sprint(f.endpoint, f.owner())]++
		}
	}
	for _, n := range hosts {
		if n >= m.hostQuota() {
			full++
		}
	}
	ports := 0
	for _, p := range s.Ports {
		ports += p.Used
	}
	got := []int{s.Flows, s.MaxFlows, s.Mappings, ports, s.Hosts, s.HostsAtQuota, s.HalfOpen, int(s.Created), int(s.Expired), int(s.Evicted), int(s.Purged)}
	want := []int{flows, m.quota(), mappings, mappings, len(hosts), full, l.halfOpen, l.created, l.expired, l.evicted, l.purged}
	if !slices.Equal(got, want) {
		return fmt.Errorf("flows, bound, mappings, ports, hosts, hosts at their quota, half-open, created, expired, evicted, purged are counted as %v, model says %v",
			got, want)
	}
	return nil
}

func (m *model) sameDrops(l *ledger, count func(natengine.Direction, natengine.Drop) uint64) error {
	for dir, drops := range l.drops {
		for _, d := range natengine.Drops() {
			if got := count(natengine.Direction(dir), d); got != drops[d] {
				return fmt.Errorf("%d packets counted as %v %v, model says %d", got, natengine.Direction(dir), d, drops[d])
			}
		}
	}
	return nil
}

// recorder is a testing.TB that records failures instead of failing the test.
type recorder struct {
	testing.TB
	failed []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.failed = append(r.failed, fmt.Sprintf(format, args...))
}
func (r *recorder) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (r *recorder) Fatal(args ...any)                 { panic(fmt.Sprint(args...)) }

// runModel executes the commands in a new engine and a new model. It stops and returns an
// error at the first difference, or if the engine panics.
func runModel(bounds byte, commands []command, log func(string), seen map[string]int) (err error) {
	m := newModel(bounds)
	m.log, m.seen = log, seen
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v\n%s", r, debug.Stack())
		}
	}()
	if err := m.do(command{cmdRules, 16}); err != nil {
		return err
	}
	for _, c := range commands {
		if err := m.do(c); err != nil {
			return err
		}
	}
	var r recorder
	m.engine.CheckTables(&r)
	for _, p := range m.engine.Peers() {
		if p.Stats().Evicted > 0 {
			seen["evicted"]++
		}
	}
	if len(r.failed) > 0 {
		return errors.New(strings.Join(r.failed, "\n"))
	}
	return nil
}

// shrunk removes commands while the remaining ones still fail: first halves, then ever smaller
// parts.
func shrunk(commands []command, fails func([]command) bool) []command {
	for size := len(commands) / 2; size > 0; {
		again := false
		for at := 0; at+size <= len(commands); {
			rest := slices.Concat(commands[:at], commands[at+size:])
			if fails(rest) {
				commands, again = rest, true
			} else {
				at += size
			}
		}
		if !again || size > 1 {
			size /= 2
		}
	}
	return commands
}

// explain fails the test with the shortest failing list of commands that it finds.
func explain(t *testing.T, bounds byte, commands []command) {
	t.Helper()
	quiet := func(string) {}
	commands = shrunk(commands, func(c []command) bool { return runModel(bounds, c, quiet, map[string]int{}) != nil })
	var what []string
	err := runModel(bounds, commands, func(s string) { what = append(what, s) }, map[string]int{})
	t.Fatalf("bounds %+v\n%s\n%v\ncommands %#v", modelBounds[int(bounds)%len(modelBounds)], strings.Join(what, "\n"), err, commands)
}

func randomCommands(rng *rand.Rand, n int) []command {
	list := make([]command, n)
	for i := range list {
		for j := range list[i] {
			list[i][j] = byte(rng.Uint32())
		}
	}
	return list
}

var long = flag.Bool("long", false, "forty times the random commands for engine and model")

// Random commands drive engine and model together. They send packets of every kind in both
// directions and families, pause from zero to hours, sweep and set new rules. There are enough
// packets to reach each bound. After each command, the verdict, octets, flows and counters must be
// equal.
func TestEngineAgreesWithModel(t *testing.T) {
	seeds, length := 200, 500
	switch {
	case testing.Short():
		seeds = 40
	case *long:
		seeds, length = 2000, 2000
	}
	rng := rand.New(rand.NewPCG(3, 4))
	seen := map[string]int{}
	for i := range seeds {
		commands := randomCommands(rng, length)
		if err := runModel(byte(i), commands, func(string) {}, seen); err != nil {
			t.Logf("seed %d: %v", i, err)
			explain(t, byte(i), commands)
		}
	}
	for _, what := range slices.Sorted(maps.Keys(seen)) {
		t.Log(seen[what], what)
	}
	for _, what := range []string{
		"outbound forward none", "inbound forward none", "inbound deliver none", "outbound discard icmp_error", "inbound discard icmp_error",
		"inbound discard no_flow", "inbound discard no_mapping", "inbound discard destination", "outbound discard no_peer", "outbound discard source",
		"outbound discard protocol", "outbound discard flow_table_full", "inbound discard flow_table_full", "inbound discard flow_clash",
		"outbound discard flow_clash", "outbound discard host_quota", "inbound discard host_quota", "evicted",
	} {
		if seen[what] == 0 {
			t.Errorf("the commands never resulted in %q", what)
		}
	}
}

// Four goroutines send random packets of commands concurrently, while time passes, sweeps run and
// rules change. Afterwards the tables must be consistent, and no two flows may have the same tuple.
// After all flows have expired, no port or host may be in use.
func TestConcurrentPacketsLeaveTheTablesConsistent(t *testing.T) {
	for _, c := range []natengine.Config{{}, {MaxFlows: 40, MaxFlowsPerHost: 6}, {MaxFlows: 30, MaxFlowsPerPeer: 25, RandomPorts: true}} {
		e := natengine.New(c)
		if err := e.SetPeers(modelPeers(command{cmdRules, 16})); err != nil {
			t.Fatal(err)
		}
		var now atomic.Int64
		var wg sync.WaitGroup
		for g := range uint64(4) {
			wg.Go(func() {
				m := newModel(0)
				for _, c := range randomCommands(rand.New(rand.NewPCG(g, 7)), 10_000) {
					at := time.Duration(now.Load())
					switch {
					case c[0] >= cmdSend:
						burst(e, m, c, at)
					case c[0] == cmdRules && g == 0:
						_ = e.SetPeers(modelPeers(c)) // may be refused
					case c[0] == cmdSweep:
						e.Sweep(at)
					default:
						now.Add(int64(c[1]) * int64(time.Second) / 4)
					}
				}
			})
		}
		wg.Wait()
		var r recorder
		e.CheckTables(&r)
		if len(r.failed) > 0 {
			t.Error(strings.Join(r.failed, "\n"))
		}
		ends := map[identity]bool{}
		for _, f := range e.Flows(1 << 20) {
			inside, outside := identityOf(f), identityOf(f)
			inside.mapped, outside.local = netip.AddrPort{}, netip.AddrPort{}
			if ends[inside] || ends[outside] {
				t.Errorf("two flows have a tuple of %v", identityOf(f))
			}
			ends[inside], ends[outside] = true, true
		}
		if s := e.Stats(); s.Flows > e.Config().MaxFlows || s.Flows != len(ends)/2 {
			t.Errorf("%d flows are counted, %d are there, the bound is %d", s.Flows, len(ends)/2, e.Config().MaxFlows)
		}
		e.Sweep(time.Duration(now.Load()) + 3*time.Hour)
		s := e.Stats()
		for _, p := range s.Peers {
			if p.Flows+p.Mappings+p.Hosts+p.HostsAtQuota+p.FragmentSets > 0 {
				t.Errorf("left over: %+v", p)
			}
		}
		if s.Flows != 0 {
			t.Errorf("%d flows are left", s.Flows)
		}
	}
}

// burst sends the packet of a command through an engine. m only records the forwarded packets.
func burst(e *natengine.Engine, m *model, c command, now time.Duration) {
	dir, b := m.packet(c)
	var v packet.View
	if v.Parse(b, packet.ChecksumComplete) != nil {
		return
	}
	verdict := e.Outbound
	if dir == natengine.Inbound {
		verdict = e.Inbound
	}
	if verdict(&v, now).Action != natengine.Discard && !v.IsICMPError() {
		m.recent[dir] = append(m.recent[dir], b)
	}
}

// FuzzConversation is TestEngineAgreesWithModel with commands from the fuzzer, of eight octets
// each.
func FuzzConversation(f *testing.F) {
	rng := rand.New(rand.NewPCG(5, 6))
	for bounds := range byte(len(modelBounds)) {
		for range 4 {
			var data []byte
			for _, c := range randomCommands(rng, 60) {
				data = append(data, c[:]...)
			}
			f.Add(bounds, data)
		}
	}
	f.Fuzz(func(t *testing.T, bounds byte, data []byte) {
		var commands []command
		for c := range slices.Chunk(data, len(command{})) {
			if len(c) == len(command{}) && len(commands) < 200 {
				commands = append(commands, command(c))
			}
		}
		if runModel(bounds, commands, func(string) {}, map[string]int{}) != nil {
			explain(t, bounds, commands)
		}
	})
}

// FuzzICMPError sends errors about packets that were forwarded. The fuzzer chooses type, code,
// second word and length of the quote, changes octets of the quote and appends octets to it. The
// errors must not open, refresh or end a flow. A discarded error must be unchanged. An error that
// passes must have the same address of our end in its header and in its quote. Only addresses,
// ports and checksums may have changed.
func FuzzICMPError(f *testing.F) {
	for which := range byte(14) {
		f.Add(which, uint8(3), uint8(4), uint32(1400), uint16(28), []byte{}, []byte{})
		f.Add(which, uint8(1), uint8(0), uint32(0), uint16(1400), []byte{}, []byte{0x20, 0, 0xdf, 0xff, 0, 8, 1, 1, 0, 1, 2, 3})
		f.Add(which, uint8(11), uint8(0), uint32(0), uint16(56), []byte{0, 0x05, 9, 0xff}, []byte{})
		f.Add(which, uint8(2), uint8(0), uint32(1280), uint16(48), []byte{21, 1}, []byte{})
	}
	f.Fuzz(func(t *testing.T, which, kind, code uint8, rest uint32, cut uint16, change, behind []byte) {
		m := newModel(0)
		if err := m.do(command{cmdRules, 16, 4}); err != nil {
			t.Fatal(err)
		}
		for _, c := range conversation {
			if err := m.do(c); err != nil {
				t.Fatal(err)
			}
		}
		m.now += 10 * time.Second
		if err := m.do(command{cmdSweep}); err != nil {
			t.Fatal(err)
		}
		dir := natengine.Direction(which & 1)
		recent := m.recent[1-dir]
		quote := slices.Clone(recent[int(which>>1)%len(recent)])
		p := packettest.MustDecode(quote)
		for i := 0; i+1 < len(change); i += 2 {
			quote[int(change[i])%len(quote)] ^= change[i+1]
		}
		quote = quote[:min(len(quote), int(cut))]
		src := p.Dst
		if which&0x80 != 0 {
			src = modelNear[0]
			if dir == natengine.Inbound {
				src = modelFar[0]
			}
			if p.Src.Is6() {
				src = map[natengine.Direction]netip.Addr{natengine.Outbound: modelNear[8], natengine.Inbound: modelFar[16]}[dir]
			}
		}
		if len(behind) > 0 && len(behind) < 200 {
			quote = append(append(quote, make([]byte, max(0, 128-len(quote)))...), behind...)
		}
		in := packettest.Build(packettest.IP{Src: src, Dst: p.Src}, packettest.ICMPError{Type: kind, Code: code, Rest: rest, Quote: quote})
		judgeError(t, m, dir, in)
	})
}

// conversation lists packets that open flows of every kind, a packet of a pod, and the replies to
// all of these.
var conversation = []command{
	{cmdSend, 14, 0, 0, 0, 2, 1, 1}, {cmdSend, 15, 0, 0, 0, 1, 2, 1}, // UDP from a node, to the NAPT address
	{cmdSend, 14, 0, 1, 3, 3, 2, 0}, {cmdSend, 14, 1, 0, 9, 5, 0, 1}, {cmdSend, 14, 2, 1, 11, 0, 0, 0}, {cmdSend, 14, 3, 0, 0, 5, 1, 1},
	{cmdSend, 15, 4, 0, 0, 5, 1, 1}, {cmdSend, 15, 5, 1, 3, 5, 2, 0}, {cmdSend, 15, 3, 0, 9, 6, 0, 1},
	{cmdSend, 14, 8, 8, 0, 2, 1, 1}, {cmdSend, 14, 9, 9, 9, 2, 1, 1}, {cmdSend, 14, 11, 8, 3, 6, 2, 0}, {cmdSend, 15, 19, 8, 0, 5, 2, 1},
	{cmdSend, 15, 17, 8, 3, 5, 2, 0},
}

func judgeError(t *testing.T, m *model, dir natengine.Direction, in []byte) {
	t.Helper()
	before := m.engine.Flows(1 << 20)
	out := slices.Clone(in)
	var v packet.View
	if v.Parse(out, packet.ChecksumComplete) != nil || !v.IsICMPError() {
		return
	}
	verdict := m.engine.Outbound
	if dir == natengine.Inbound {
		verdict = m.engine.Inbound
	}
	got := verdict(&v, m.now)
	m.engine.Sweep(m.now)
	if after := m.engine.Flows(1 << 20); !slices.Equal(before, after) {
		t.Fatalf("%v: the flows were\n%+v\nand are\n%+v", summary(in), before, after)
	}
	if got.Action == natengine.Discard {
		if !slices.Equal(in, out) {
			t.Fatal("a discarded packet was changed")
		}
		return
	}
	was, p := packettest.MustDecode(in), packettest.MustDecode(out)
	if err := packettest.ValidChecksums()(p); err != nil {
		t.Fatal(err)
	}
	q, err := packettest.DecodeQuote(p.Data)
	if err != nil { // the quote ends within the IPv6 extension headers: only the addresses are known
		q.Src, q.Dst = netip.AddrFrom16([16]byte(p.Data[8:24])), netip.AddrFrom16([16]byte(p.Data[24:40]))
	} else if err := unchanged(was, p, in, out, true); err != nil {
		t.Fatalf("%v became %v: %v", summary(in), summary(out), err)
	}
	near, far := q.Src, was.Src
	if dir == natengine.Outbound {
		near, far = q.Dst, was.Dst
	}
	switch {
	case dir == natengine.Inbound && (p.Dst != near || p.Src != far):
		t.Fatalf("half rewritten: %v", summary(out))
	case dir == natengine.Outbound && (q.Src != p.Dst || p.Dst != far || was.Src == p.Src && slices.Contains(modelNear[:3], p.Src)):
		t.Fatalf("half rewritten: %v", summary(out))
	}
}
