package natengine

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// A witness is a conversation that must continue during an attack. It holds a packet for each
// direction and the expected translation of that packet.
type witness struct {
	name     string
	sent     [directions][]byte
	expected [directions][]byte
	stateful bool
}

// witnesses returns established flows of every kind with peers b and c. The flows belong to pods,
// nodes and mapped endpoints.
func witnesses(t testing.TB, e *Engine) (list []witness) {
	t.Helper()
	add := func(name string, first Direction, stateful bool, out, back []byte) {
		w := witness{name: name, stateful: stateful}
		w.sent[first], w.sent[1-first] = out, back
		for _, dir := range []Direction{first, 1 - first, first} {
			got, v := send(t, e, dir, w.sent[dir], 0)
			if v.Action != Forward {
				t.Fatalf("%s, %v: %v", name, dir, v.Drop)
			}
			w.expected[dir] = got
		}
		list = append(list, w)
	}
	for peer, far := range map[string]string{"b": "10.71.0.5", "c": "10.73.0.5"} {
		const ack = packettest.ACK
		add(peer+" TCP of a node", Outbound, true, tcp("192.168.1.1:4000", far+":80", ack), tcp(far+":80", "10.246.0.0:4000", ack))
		add(peer+" UDP of a node", Outbound, true, udp("192.168.1.1:4000", far+":53"), udp(far+":53", "10.246.0.0:4000"))
		add(peer+" ping of a node", Outbound, true, ping("192.168.1.1", far, 77, false), ping(far, "10.246.0.0", 77, true))
		add(peer+" TCP to an endpoint", Inbound, true, tcp(far+":4000", "10.247.0.9:80", ack), tcp("192.168.7.7:80", far+":4000", ack))
		add(peer+" UDP to an endpoint", Inbound, true, udp(far+":4000", "10.247.0.9:53"), udp("192.168.7.7:53", far+":4000"))
		add(peer+" TCP of a pod", Outbound, false, tcp("10.244.1.1:4000", far+":80", ack), tcp(far+":80", "10.246.1.1:4000", ack))
	}
	return list
}

func ping(src, dst string, id uint16, reply bool) []byte {
	return packettest.Build(packettest.IP{Src: ip(src), Dst: ip(dst)}, packettest.Echo{ID: id, Reply: reply})
}

// checkResumes checks that both packets of the conversation still have the same translation, octet
// for octet.
func (w *witness) checkResumes(t testing.TB, e *Engine, now time.Duration) {
	t.Helper()
	for dir := range directions {
		if got, v := sendAt(t, e, dir, w.sent[dir], now); v.Action != Forward || !bytes.Equal(got, w.expected[dir]) {
			t.Fatalf("%s, %v: %v %v\n%x\nwant\n%x", w.name, dir, v.Action, v.Drop, got, w.expected[dir])
		}
	}
}

func sendAt(t testing.TB, e *Engine, dir Direction, b []byte, now time.Duration) ([]byte, Verdict) {
	t.Helper()
	return send(t, e, dir, b, tickOf(now))
}

// checkNewFlows checks that hosts of ours without flows can open flows to the peers, and that pods
// of the peers can open flows to our endpoint.
func checkNewFlows(t testing.TB, e *Engine, i int, now time.Duration, peers ...string) {
	t.Helper()
	for _, far := range peers {
		host := fmt.Sprintf("192.168.9.%d:%d", 1+i%250, 5000+i)
		if _, v := sendAt(t, e, Outbound, udp(host, far+".0.9:53"), now); v.Action != Forward {
			t.Fatalf("a new flow of %s to %s: %v", host, far, v.Drop)
		}
		pod := fmt.Sprintf("%s.9.%d:%d", far, 1+i%250, 5000+i)
		if _, v := sendAt(t, e, Inbound, tcp(pod, "10.247.0.9:443", packettest.SYN), now); v.Action != Forward {
			t.Fatalf("a new flow of %s to our endpoint: %v", pod, v.Drop)
		}
	}
}

// An attack is a stream of packets. packet returns the i-th one.
type attack struct {
	name   string
	dir    Direction
	packet func(i int) []byte
	// answered means that the victim answers, which establishes the attacker's flows.
	answered bool
}

func attacks() []attack {
	host := func(i int) string { return fmt.Sprintf("10.73.%d.%d", 16+i/250%200, 1+i%250) }
	const syn = packettest.SYN
	cut := packettest.Fragments(udp("10.73.0.66:66", "10.247.0.9:80", make([]byte, 2000)...), 1000, 0)
	fragment := func(whole []byte, i int) []byte {
		b := slices.Clone(whole)
		b[4], b[5] = byte(i>>8), byte(i)
		b[10], b[11] = 0, 0
		sum := packettest.InternetChecksum(b[:20])
		b[10], b[11] = byte(sum>>8), byte(sum)
		return b
	}
	return []attack{
		{"SYNs to an endpoint, each from another address", Inbound, func(i int) []byte { return tcp(host(i)+":6000", "10.247.0.9:80", syn) }, false},
		{"SYNs to an endpoint from one address", Inbound, func(i int) []byte { return tcp(fmt.Sprint("10.73.0.66:", 1+i), "10.247.0.9:80", syn) }, false},
		{"port scan of an endpoint", Inbound, func(i int) []byte { return tcp("10.73.0.66:6000", fmt.Sprint("10.247.0.9:", 1+i), syn) }, false},
		{"port scan of the NAPT address", Inbound, func(i int) []byte { return udp("10.73.0.66:6000", fmt.Sprint("10.246.0.0:", 1+i)) }, false},
		{"forged answers from the peer of a flow", Inbound, func(i int) []byte { return udp(fmt.Sprint("10.73.0.5:", 54+i), "10.246.0.0:4000") }, false},
		{"datagrams to an endpoint", Inbound, func(i int) []byte { return udp(host(i)+":6000", fmt.Sprint("10.247.0.9:", 1+i/7)) }, false},
		{"datagrams to an endpoint, answered", Inbound, func(i int) []byte { return udp(fmt.Sprint("10.73.0.66:", 1+i), "10.247.0.9:53") }, true},
		{"pings of an endpoint", Inbound, func(i int) []byte { return ping(host(i), "10.247.0.9", uint16(i), false) }, false},
		{"first fragments without later ones", Inbound, func(i int) []byte { return fragment(cut[0], i) }, false},
		{"last fragments without earlier ones", Inbound, func(i int) []byte { return fragment(cut[1], i) }, false},
		{"ICMP errors about guesses", Inbound, func(i int) []byte {
			return fault("10.73.0.66", "10.246.0.0", udp(fmt.Sprint("10.246.0.0:", 1+i), "10.73.0.5:53"), 28)
		}, false},
		{"RSTs to a range of ports", Inbound, func(i int) []byte { return tcp("10.73.0.5:80", fmt.Sprint("10.246.0.0:", 4001+i), packettest.RST) }, false},
		{"a protocol without ports", Inbound, func(i int) []byte {
			return packettest.Build(packettest.IP{Src: ip(host(i)), Dst: ip("10.247.0.9")}, packettest.Raw{Proto: 47})
		}, false},
		{"datagrams of a host of ours", Outbound, func(i int) []byte { return udp(fmt.Sprint("192.168.66.6:", 1+i), "10.73.0.7:53") }, false},
		{"a port scan by a host of ours", Outbound, func(i int) []byte { return tcp("192.168.66.6:6000", fmt.Sprint("10.73.0.7:", 1+i), syn) }, false},
		{"datagrams of a host of ours, answered", Outbound, func(i int) []byte { return udp(fmt.Sprint("192.168.66.6:", 1+i), "10.73.0.7:53") }, true},
	}
}

// Peer c or one of its hosts attacks. All established flows must continue unchanged, including
// those with c. Other hosts and other peers must be able to open new flows, and memory must stay
// within its bounds. After the attack everything must recover.
func TestAttacksDoNotAffectOtherFlowsHostsAndPeers(t *testing.T) {
	for name, c := range map[string]Config{
		"equal shares":          {MaxFlows: 1000, MaxFlowsPerHost: 100},
		"shares above MaxFlows": {MaxFlows: 600, MaxFlowsPerPeer: 600, MaxFlowsPerHost: 100},
	} {
		c.MaxFragmentBytes = 1 << 16
		for _, a := range attacks() {
			t.Run(name+"/"+a.name, func(t *testing.T) {
				e := newEngine(t, c, peerB(), peerC())
				list := witnesses(t, e)
				now := a.run(t, e, list)
				if s := e.Stats(); s.Flows > c.MaxFlows || s.Bytes > 1<<20 {
					t.Errorf("%d flows, %d octets", s.Flows, s.Bytes)
				}
				if p := e.Stats().Peers[0]; p.Evicted != 0 || p.Flows == 0 {
					t.Errorf("peer b, far below its share, has lost flows: %+v", p)
				}
				e.checkTables(t)
				stateful := 0
				for range 7 { // until the timeouts of the other flows have passed
					now += 50 * time.Second
					e.Sweep(now)
					stateful = 0
					for _, w := range list {
						w.checkResumes(t, e, now)
						if w.stateful {
							stateful++
						}
					}
				}
				s := e.Stats()
				if s.Flows != stateful {
					t.Errorf("%d flows are left, want the %d that go on", s.Flows, stateful)
				}
				for _, p := range s.Peers {
					if p.FragmentBytes != 0 || p.FragmentSets != 0 || p.Mappings > stateful || p.HostsAtQuota != 0 {
						t.Errorf("%+v", p)
					}
				}
				checkNewFlows(t, e, 0, now, "10.71", "10.73")
			})
		}
	}
}

// run sends 6000 packets of the attack, a thousand a second. After every 500 packets it checks the
// other flows.
func (a *attack) run(t *testing.T, e *Engine, list []witness) (now time.Duration) {
	for i := range 6000 {
		now = time.Duration(i) * time.Millisecond
		b, v := sendAt(t, e, a.dir, a.packet(i), now)
		if a.answered && v.Action == Forward {
			p := packettest.MustDecode(b)
			back := packettest.Build(packettest.IP{Src: p.Dst, Dst: p.Src}, packettest.UDP{SrcPort: p.DstPort, DstPort: p.SrcPort})
			sendAt(t, e, 1-a.dir, back, now)
		}
		if i%500 == 499 {
			for _, w := range list {
				w.checkResumes(t, e, now)
			}
			checkNewFlows(t, e, i, now, "10.71", "10.73")
			checkFragmented(t, e, i, now)
		}
		if i%1000 == 999 {
			e.Sweep(now)
		}
	}
	return now
}

// checkFragmented checks that a fragmented datagram reaches an endpoint during the attack.
func checkFragmented(t *testing.T, e *Engine, id int, now time.Duration) {
	t.Helper()
	_, fragments := datagram("10.73.0.5:4001", "10.247.0.9:53", uint32(id)|0x8000)
	left := 0
	for _, i := range []int{1, 0, 2} {
		_, v := sendAt(t, e, Inbound, fragments[i], now)
		if v.Action == Forward {
			left++
		}
	}
	if left != 1 {
		t.Fatalf("%d datagrams got through", left)
	}
}

// The hosts of c fill c's whole share with established flows. The engine must then refuse new flows
// of c, and b must still be able to use its whole share.
func TestPeerFullOfEstablishedFlowsDoesNotAffectOtherPeers(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 1000, MaxFlowsPerHost: 100}, peerB(), peerC())
	list := witnesses(t, e)
	for i := range 1000 {
		pod := fmt.Sprintf("10.73.66.%d:%d", i/80, 6000+i)
		if _, v := send(t, e, Inbound, udp(pod, "10.247.0.9:53"), 0); v.Action == Forward {
			out(t, e, udp("192.168.7.7:53", pod), 0)
		}
	}
	refused(t, e, Inbound, udp("10.73.66.77:6000", "10.247.0.9:53"), 0, DropFlowTableFull)
	for _, w := range list {
		w.checkResumes(t, e, 0)
	}
	for i := range 200 {
		checkNewFlows(t, e, i, 0, "10.71")
	}
}

// Flows and fragments that are never completed must stay within the bound of memory, and not only
// within the bound of their number.
func TestFloodsDoNotGrowTheHeap(t *testing.T) {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	c := Config{MaxFlows: 2000, MaxFlowsPerHost: 100, MaxFragmentBytes: 1 << 18}
	e := newEngine(t, c, peerB(), peerC())
	before := heap()
	var v packet.View
	for _, a := range attacks() {
		for i := range 5000 {
			parse(t, &v, a.packet(i))
			if a.dir == Inbound {
				e.Inbound(&v, 0)
			} else {
				e.Outbound(&v, 0)
			}
		}
	}
	grown := int64(heap()) - int64(before)
	s := e.Stats()
	if bound := int64(1 << 20); grown > bound || int64(s.Bytes) > bound {
		t.Errorf("the heap has grown by %d octets; the engine reports %d", grown, s.Bytes)
	}
	if grown > int64(s.Bytes)*3/2 {
		t.Errorf("the heap has grown by %d octets; the engine reports %d", grown, s.Bytes)
	}
	runtime.KeepAlive(e)
}

// probes returns how many slots lookups in the indexes of a peer read: the mean per lookup, and the
// length of the longest run of non-empty slots.
func probes(p *PeerState) (mean float64, longest int) {
	total, filled := 0, 0
	for dir := range p.flows.index {
		for i := range p.flows.index[dir].slots {
			s := p.flows.index[dir].slots[i].Load()
			if s == nil {
				continue
			}
			run := 0
			for at := range 2 * len(s.list) { // twice, because a run may wrap around the end
				slot := s.list[at%len(s.list)]
				if slot == 0 {
					run = 0
					continue
				}
				run++
				longest = max(longest, run)
				if at < len(s.list) {
					filled++
					total += int((uint32(at) - uint32(slot>>32)) & uint32(len(s.list)-1))
				}
			}
		}
	}
	return float64(total) / float64(max(filled, 1)), longest
}

// openAll opens a flow for each outbound tuple.
func openAll(t testing.TB, tuples []conversation) *PeerState {
	t.Helper()
	e := newEngine(t, Config{MaxFlows: 1 << 18, MaxFlowsPerHost: 1 << 18}, benchPeers(1)...)
	tmpl := udpTemplate()
	var v packet.View
	for _, c := range tuples {
		b := slices.Clone(tmpl)
		c.write(b)
		parse(t, &v, b)
		if got := e.Outbound(&v, 0); got.Action != Forward {
			t.Fatal(got.Drop)
		}
	}
	return e.Peers()[0]
}

// Each of the following sets of tuples must be looked up as fast as random tuples: sequential
// tuples, tuples with equal low or high bits, tuples with correlated ends, tuples that collide in
// another engine.
func TestAdversarialTuplesDoNotSlowLookups(t *testing.T) {
	const n = 24_000 // just below the size at which the index grows; lookups are slowest there
	base := conversation{local: 0xac100001, localPort: 4000, remote: 0x0a000007, remotePort: 443}
	tuples := func(change func(c *conversation, i uint32)) (list []conversation) {
		for i := range uint32(n) {
			c := base
			change(&c, i)
			list = append(list, c)
		}
		return list
	}
	mix := func(i uint32) uint32 { i *= 0x9e3779b1; return i ^ i>>15 }
	mean, longest := probes(openAll(t, tuples(func(c *conversation, i uint32) { c.remotePort, c.remote = uint16(mix(i)), 0x0a000000|mix(i)>>16 })))
	t.Logf("random: %.2f slots, longest run %d", mean, longest)
	check := func(name string, list []conversation) {
		p := openAll(t, list)
		if flows := p.flows.live.Load(); flows < n*9/10 {
			t.Fatalf("%s: only %d flows", name, flows)
		}
		m, l := probes(p)
		t.Logf("%s: %.2f slots, longest run %d", name, m, l)
		if m > 2*mean+0.5 || l > 4*longest {
			t.Errorf("%s: %.2f slots and a run of %d, for random tuples %.2f and %d", name, m, l, mean, longest)
		}
	}
	check("remote ports in sequence", tuples(func(c *conversation, i uint32) { c.remotePort = uint16(i) }))
	check("local ports in sequence", tuples(func(c *conversation, i uint32) { c.localPort = uint16(1024 + i) }))
	check("both ports in step", tuples(func(c *conversation, i uint32) { c.localPort, c.remotePort = uint16(1024+i), uint16(1024+i) }))
	check("ports that cancel each other", tuples(func(c *conversation, i uint32) { c.localPort, c.remotePort = uint16(1024+i), ^uint16(1024+i) }))
	check("remote addresses in sequence", tuples(func(c *conversation, i uint32) { c.remote = 0x0a000000 + i }))
	check("remote addresses with equal low bits", tuples(func(c *conversation, i uint32) {
		c.remote, c.remotePort, c.localPort = 0x0a000007+i%256<<8, uint16(i/256%16<<12), uint16(1024+i/4096<<12)
	}))
	check("local addresses in sequence", tuples(func(c *conversation, i uint32) { c.local += i }))
	check("local and remote address in step", tuples(func(c *conversation, i uint32) { c.local, c.remote = 0xac100000+i, 0x0a000000+i }))

	other := newEngine(t, Config{}, benchPeers(1)...).Peers()[0]
	var colliding []conversation
	for i := uint32(0); len(colliding) < n; i++ { // all have their first slot among a few slots of each shard
		c := conversation{local: 0xac100000 | mix(i)>>12, localPort: uint16(i), remote: 0x0a000000 | mix(i)&0xffff, remotePort: uint16(i >> 16)}
		k := keyOf(Outbound, addr4(c.local), addr4(c.remote), packet.UDP, c.localPort, c.remotePort)
		if k.hash(&other.flows.keys)&0xff == 0x55 && c.localPort >= firstUserPort {
			colliding = append(colliding, c)
		}
	}
	check("tuples that collide in another engine", colliding)
}

func TestReopenedConnectionMayBeEvicted(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 2}, peerB())
	seen := established(t, e, "192.168.1.1:4000", "10.71.0.5:80", 0)
	out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0)
	out(t, e, udp("192.168.1.3:4000", "10.71.0.5:53"), 0) // evicts the second flow; the eviction finds that the first is established and skips it
	in(t, e, tcp("10.71.0.5:80", seen.String(), packettest.RST), 0)
	out(t, e, tcp("192.168.1.1:4000", "10.71.0.5:80", packettest.SYN), 0)
	e.Sweep(0)
	out(t, e, udp("192.168.1.4:4000", "10.71.0.5:53"), 0)
	last, _ := out(t, e, udp("192.168.1.5:4000", "10.71.0.5:53"), 0)
	refused(t, e, Inbound, tcp("10.71.0.5:80", seen.String(), packettest.ACK), 0, DropNoFlow)
	in(t, e, udp("10.71.0.5:53", last.String()), 0)
}

func TestHalfOpenGaugeExcludesExpiredFlows(t *testing.T) {
	e := newEngine(t, Config{}, peerB())
	seen, _ := out(t, e, udp("192.168.1.1:4000", "10.71.0.5:53"), 0)
	in(t, e, udp("10.71.0.5:53", seen.String()), 0)
	out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), at(200))
	e.Sweep(400 * time.Second)
	if s := e.Stats().Peers[0]; s.HalfOpen != 1 || s.Expired != 1 {
		t.Errorf("%+v", s)
	}
}

func TestTraceIgnoresExpiredFlowsAtTheFlowLimit(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 1}, peerB())
	in(t, e, udp("10.71.0.5:53", "10.247.0.9:80"), 0)
	out(t, e, udp("192.168.7.7:80", "10.71.0.5:53"), 0)
	var v packet.View
	for _, c := range []struct {
		again string
		want  Action
	}{{"10.71.0.6:53", Discard}, {"10.71.0.5:53", Forward}} {
		parse(t, &v, udp(c.again, "10.247.0.9:80"))
		trace := e.Trace(&v, Inbound, time.Hour)
		if got := e.Inbound(&v, time.Hour); got.Action != c.want || trace.Action != c.want {
			t.Errorf("from %s: %v, by the trace %v, want %v", c.again, got.Action, trace.Action, c.want)
		}
	}
}
