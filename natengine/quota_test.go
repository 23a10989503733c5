package natengine

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

func TestHostAtItsQuotaLosesItsOwnOldestHalfOpenFlow(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 100, MaxFlowsPerHost: 3}, peerB())
	out(t, e, udp("192.168.1.2:1", "10.71.0.5:53"), 0) // older, but of another host
	kept := established(t, e, "192.168.1.1:1", "10.71.0.5:80", 0)
	for p := 2; p <= 5; p++ {
		out(t, e, udp(fmt.Sprintf("192.168.1.1:%d", p), "10.71.0.5:53"), 0)
	}
	s := e.Stats().Peers[0]
	if s.Flows != 4 || s.Evicted != 2 || s.Hosts != 2 || s.HostsAtQuota != 1 || s.MaxFlowsPerHost != 3 {
		t.Errorf("%+v", s)
	}
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:1"), 0)
	in(t, e, tcp("10.71.0.5:80", kept.String(), packettest.ACK), 0)
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.246.0.0:2"), 0, DropNoFlow)
	refused(t, e, Inbound, udp("10.71.0.5:53", "10.246.0.0:3"), 0, DropNoFlow)
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:4"), 0)
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:5"), 0) // now all flows are established
	refused(t, e, Outbound, udp("192.168.1.1:6", "10.71.0.5:53"), 0, DropHostQuota)
	out(t, e, udp("192.168.1.2:6", "10.71.0.5:53"), 0)
	e.checkTables(t)
	e.Sweep(duration(int32(at(8000))))
	if s := e.Stats().Peers[0]; s.Hosts != 0 || s.HostsAtQuota != 0 {
		t.Errorf("%+v without flows", s)
	}
	e.checkTables(t)
}

func TestRemoteHostsHaveAQuota(t *testing.T) {
	e := newEngine(t, Config{MaxFlowsPerHost: 2}, peerB())
	for _, p := range []string{"10.71.0.5:1", "10.71.0.5:2"} {
		in(t, e, udp(p, "10.247.0.9:80"), 0)
		out(t, e, udp("192.168.7.7:80", p), 0)
	}
	refused(t, e, Inbound, udp("10.71.0.5:3", "10.247.0.9:80"), 0, DropHostQuota)
	in(t, e, udp("10.71.0.6:3", "10.247.0.9:80"), 0)
	// Until now the endpoint has only answered flows, which count for the peer's hosts. It may
	// still open as many flows as its own quota permits.
	out(t, e, udp("192.168.7.7:9", "10.71.0.5:9"), 0)
	if s := e.Stats().Peers[0]; s.Hosts != 3 || s.HostsAtQuota != 1 {
		t.Errorf("%+v", s)
	}
	e.checkTables(t)
}

func TestHostQuotaAppliesToEachPeerSeparately(t *testing.T) {
	e := newEngine(t, Config{MaxFlowsPerHost: 1}, peerB(), peerC())
	established(t, e, "192.168.1.1:1", "10.71.0.5:80", 0)
	refused(t, e, Outbound, udp("192.168.1.1:2", "10.71.0.5:53"), 0, DropHostQuota)
	out(t, e, udp("192.168.1.1:2", "10.73.0.5:53"), 0)
}

func TestDefaultQuotasDependOnBoundsAndPeers(t *testing.T) {
	for _, c := range []struct {
		c                        Config
		peers, share, peer, host int
	}{
		{Config{}, 0, 1 << 20, 1 << 20, 16384},
		{Config{}, 1, 1 << 20, 1 << 20, 16384},
		{Config{}, 16, 65536, 65536, 16384},
		{Config{}, 100, 10485, 10485, 2621},
		{Config{}, 1000, 1048, 1048, 1024},
		{Config{}, 2000, 524, 524, 524},
		{Config{MaxFlows: 3}, 5, 1, 1, 1},
		{Config{MaxFlowsPerPeer: 100_000}, 100, 10485, 100_000, 16384},
		{Config{MaxFlows: 1000, MaxFlowsPerPeer: 5000}, 1, 1000, 1000, 1000},
		{Config{MaxFlowsPerHost: 60_000}, 32, 32768, 32768, 32768},
		{Config{MaxFlowsPerHost: 7}, 1, 1 << 20, 1 << 20, 7},
	} {
		d := c.c.withDefaults()
		if share, peer, host := d.quotas(c.peers); share != c.share || peer != c.peer || host != c.host {
			t.Errorf("%+v with %d peers: %d, %d, %d; want %d, %d, %d", c.c, c.peers, share, peer, host, c.share, c.peer, c.host)
		}
	}
}

func TestOneHostCannotTakeAllPorts(t *testing.T) { // RFC 6888, REQ-4
	e := newEngine(t, Config{}, peerB())
	var v packet.View
	b := udp("192.168.1.1:4000", "10.71.0.5:53")
	for p := 1; p < 1<<16; p++ {
		parse(t, &v, append([]byte(nil), b...))
		v.SetSrcPort(uint16(p))
		if d := e.Outbound(&v, 0).Drop; d != DropNone {
			t.Fatal(d)
		}
	}
	s := e.Stats().Peers[0]
	if s.Mappings != 16384 || s.Ports[1] != (PortUse{"ipv4", "udp", 16384, 65535}) || s.Ports[0].Used != 0 {
		t.Errorf("%+v", s)
	}
	src, _ := out(t, e, udp("192.168.1.2:4000", "10.71.0.5:53"), 0)
	wantEnd(t, src, "10.246.0.0:4000")
}

// When a second peer is added, the share of the first one is halved.
func TestLowerQuotaTakesEffectForNewFlows(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 8}, peerB())
	for p := 1; p <= 6; p++ {
		src := fmt.Sprintf("192.168.1.1:%d", p)
		seen, _ := out(t, e, udp(src, "10.71.0.5:53"), 0)
		in(t, e, udp("10.71.0.5:53", seen.String()), 0)
	}
	if err := e.SetPeers([]Peer{peerB(), peerC()}); err != nil {
		t.Fatal(err)
	}
	if s := e.Stats().Peers[0]; s.Flows != 6 || s.MaxFlows != 4 || s.MaxFlowsPerHost != 4 || s.HostsAtQuota != 1 {
		t.Errorf("%+v", s)
	}
	refused(t, e, Outbound, udp("192.168.1.1:9", "10.71.0.5:53"), 0, DropHostQuota)
	refused(t, e, Outbound, udp("192.168.1.2:9", "10.71.0.5:53"), 0, DropFlowTableFull)
	e.checkTables(t)
	if err := e.SetPeers([]Peer{peerB()}); err != nil {
		t.Fatal(err)
	}
	out(t, e, udp("192.168.1.1:9", "10.71.0.5:53"), 0)
	e.checkTables(t)
}

// Between the steps the lock must be free. A flow that opens or ends between two steps must be
// counted correctly.
func TestHostsAreCountedInStepsWhenTheirQuotaChanges(t *testing.T) {
	const hosts = 3 * hostsAtOnce
	e := newEngine(t, Config{MaxFlows: 4 * hosts, MaxFlowsPerHost: 3}, peerC())
	flood(t, e, hosts)
	p, steps := e.Peers()[0], 0
	p.setHostQuota(2, func() {
		steps++
		if !p.flows.mu.TryLock() {
			t.Fatal("the lock is held between two steps")
		}
		p.flows.mu.Unlock()
		one := func(host, port int) {
			in(t, e, udp(fmt.Sprintf("10.73.%d.%d:%d", host>>8, host&0xff, port), "10.247.0.9:80"), 0)
		}
		one(10*steps, 54)       // a host that is already counted
		one(hosts-10*steps, 54) // a host that is not yet counted
		one(hosts+steps, 53)    // a new host
		one(hosts+steps, 54)
	})
	if s := e.Stats().Peers[0]; steps != 3 || s.HostsAtQuota != 9 {
		t.Errorf("%d hosts at their quota after %d steps", s.HostsAtQuota, steps)
	}
	e.checkTables(t)
}

// flood opens n flows to a mapped endpoint, each from another host of peer c.
func flood(t testing.TB, e *Engine, n int) (opened int) {
	t.Helper()
	b := udp("10.73.0.0:53", "10.247.0.9:80")
	var v packet.View
	for i := range n {
		parse(t, &v, append([]byte(nil), b...))
		v.SetSrc4(v.Src4() + uint32(i))
		if e.Inbound(&v, 0).Action == Forward {
			opened++
		}
	}
	return opened
}

func TestPeerBelowItsShareEvictsAFlowOfAPeerAboveItsShare(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 100, MaxFlowsPerPeer: 90}, peerB(), peerC())
	kept := established(t, e, "192.168.1.1:4000", "10.73.0.5:80", 0)
	flood(t, e, 1000)
	if s := e.Stats(); s.Peers[1].Flows != 90 || s.Flows != 90 {
		t.Fatalf("%+v", s)
	}
	for i := range 60 {
		out(t, e, udp(fmt.Sprintf("192.168.2.1:%d", 1000+i), "10.71.0.5:53"), 0)
	}
	s := e.Stats() // b has reached its share; for a further flow it must evict one of its own, and so must c
	if s.Flows != 100 || s.Peers[0].Flows != 50 || s.Peers[0].Evicted != 10 || s.Peers[1].Flows != 50 {
		t.Errorf("%+v", s)
	}
	_, dst := in(t, e, tcp("10.73.0.5:80", kept.String(), packettest.ACK), 0)
	wantEnd(t, dst, "192.168.1.1:4000")
	e.checkTables(t)
}

func TestEstablishedFlowsOfAPeerAboveItsShareStay(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 10, MaxFlowsPerPeer: 8}, peerB(), peerC())
	for i := range 8 {
		established(t, e, fmt.Sprintf("192.168.1.1:%d", 4000+i), "10.73.0.5:80", 0)
	}
	for i := range 3 {
		out(t, e, udp(fmt.Sprintf("192.168.2.1:%d", 1000+i), "10.71.0.5:53"), 0)
	}
	if s := e.Stats(); s.Flows != 10 || s.Peers[0].Flows != 2 || s.Peers[0].Evicted != 1 || s.Peers[1].Evicted != 0 {
		t.Errorf("%+v", s)
	}
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:1001"), 0)
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:1002"), 0)
	refused(t, e, Outbound, udp("192.168.2.1:7", "10.71.0.5:53"), 0, DropFlowTableFull)
	e.checkTables(t)
}

// Four goroutines open flows of two peers, each of which alone could fill the table.
func TestMaxFlowsIsNeverExceeded(t *testing.T) {
	const bound = 50
	e := newEngine(t, Config{MaxFlows: bound, MaxFlowsPerPeer: bound}, peerB(), peerC())
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var v packet.View
			b := udp("192.168.1.1:1", []string{"10.71.0.5:53", "10.73.0.5:53"}[g%2])
			for i := range 20_000 {
				parse(t, &v, append([]byte(nil), b...))
				v.SetSrc4(v.Src4() + uint32(g))
				v.SetSrcPort(uint16(i + 1))
				e.Outbound(&v, 0)
				one, two := e.Peers()[0], e.Peers()[1]
				n, rest := one.flows.live.Load(), two.flows.live.Load()
				if one.flows.live.Load() != n {
					continue // Stats reads the peers one after the other, so the sum may exceed the bound
				}
				if n += rest; n > bound+4 {
					t.Errorf("%d flows", n)
					return
				}
			}
		})
	}
	wg.Wait()
	e.checkTables(t)
	if s := e.Stats(); s.Flows > bound || s.Flows < bound-4 || s.Peers[0].Flows < bound/2-4 || s.Peers[1].Flows < bound/2-4 {
		t.Errorf("%+v", s)
	}
}

func TestFloodOfAHostAtItsQuotaDoesNotAffectOtherHosts(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: 1000, MaxFlowsPerHost: 200}, peerB())
	half := port("192.168.1.9:77")
	out(t, e, udp(half.String(), "10.71.0.5:53"), 0)
	var v packet.View
	b := tcp("192.168.1.1:1", "10.71.0.5:80", packettest.SYN)
	for i := range 50_000 {
		parse(t, &v, append([]byte(nil), b...))
		v.SetSrcPort(uint16(i%60_000 + 1))
		if d := e.Outbound(&v, 0).Drop; d != DropNone {
			t.Fatal(d)
		}
	}
	in(t, e, udp("10.71.0.5:53", "10.246.0.0:77"), 0) // half-open during the whole flood
	if s := e.Stats().Peers[0]; s.Flows != 201 {
		t.Errorf("%+v", s)
	}
	e.checkTables(t)
}

func TestWarningsNameShortTimeoutsAndContradictoryBounds(t *testing.T) {
	if w := (Config{}).Warnings(); len(w) != 0 {
		t.Errorf("of the defaults: %q", w)
	}
	minute := time.Minute
	c := Config{MaxFlows: 10, MaxFlowsPerPeer: 20, MaxFlowsPerHost: 70_000,
		Timeouts: Timeouts{UDP: minute, TCPEstablished: time.Hour, TCPTransitory: minute, TCPClosing: minute, ICMP: time.Second, Generic: time.Second, Fragment: time.Second}}
	all := strings.Join(c.Warnings(), "\n")
	for _, want := range []string{"UDP is 1m0s; want at least 2m0s (RFC 4787", "established TCP is 1h0m0s", "transitory TCP is 1m0s", "closing TCP is 1m0s", "ICMP is 1s",
		"fragment is 1s", "the limit of flows of a peer is 20, above the limit of all peers together, 10", "the limit of flows of a host is 70000"} {
		if !strings.Contains(all, want) {
			t.Errorf("no %q in\n%s", want, all)
		}
	}
	if strings.Contains(all, "generic") {
		t.Errorf("no RFC bounds the generic timeout:\n%s", all)
	}
	c = Config{Timeouts: Timeouts{Fragment: time.Minute}}
	if w := c.Warnings(); len(w) != 1 || New(c).Config().Timeouts.Fragment != 30*time.Second {
		t.Errorf("%q", w)
	}
}

// Evictions are tested at each of the three bounds, after the tables have reached their size.
func TestEvictionsDoNotAllocate(t *testing.T) {
	for _, c := range []struct {
		name  string
		c     Config
		hosts uint32
	}{
		{"of the peer", Config{MaxFlows: 200, MaxFlowsPerHost: 10}, 1000},
		{"of the host", Config{MaxFlows: 2000, MaxFlowsPerHost: 10}, 1},
		{"of another peer", Config{MaxFlows: 2000, MaxFlowsPerPeer: 2000}, 1000},
	} {
		e := newEngine(t, c.c, peerB(), peerC())
		flood(t, e, 3000)
		b := udp("192.168.0.1:1000", "10.71.0.5:53")
		work := append([]byte(nil), b...)
		var v packet.View
		parse(t, &v, work)
		i := uint32(0)
		open := func() {
			copy(work, b)
			v.SetSrc4(v.Src4() + i%c.hosts)
			v.SetSrcPort(uint16(1000 + i%5000))
			i++
			if d := e.Outbound(&v, 0).Drop; d != DropNone {
				t.Fatalf("%s: %v", c.name, d)
			}
		}
		if c.name != "of another peer" {
			for range 5000 {
				open()
			}
		}
		if n := testing.AllocsPerRun(900, open); n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
		if s := e.Stats(); s.Peers[0].Evicted+s.Peers[1].Evicted < 900 {
			t.Errorf("%s: %+v", c.name, s)
		}
		e.checkTables(t)
	}
}
