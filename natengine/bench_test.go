package natengine

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// benchPeers returns n peers whose clusters all have the same PodCIDR.
func benchPeers(n int) []Peer {
	var peers []Peer
	for i := range n {
		remote := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i), 0, 0}), 16)
		external := netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i), 0, 0}), 16)
		peers = append(peers, Peer{
			ID:         fmt.Sprintf("peer-%03d", i),
			RemotePods: []netip.Prefix{remote}, RemoteExternal: []netip.Prefix{external},
			Pods:      []Remap{{pfx("192.168.0.0/16"), pfx("10.246.0.0/16")}},
			External:  []netip.Prefix{pfx("10.247.0.0/16")},
			Endpoints: []Endpoint{{ip("169.254.0.1"), ip("10.247.0.1")}},
			MSS:       1340,
		})
	}
	return peers
}

func benchEngine(b testing.TB, c Config, peers []Peer) *Engine {
	if c.MaxFlowsPerHost == 0 {
		c.MaxFlowsPerHost = 1 << 30 // in some benchmarks all flows belong to one host
	}
	e := New(c)
	if err := e.SetPeers(peers); err != nil {
		b.Fatal(err)
	}
	return e
}

// BenchmarkPrefixMap measures one whole engine call that uses a 1:1 rule on a parsed view. Two
// engines take turns, and each undoes the translation of the other, so that only engine calls
// are measured.
func BenchmarkPrefixMap(b *testing.B) {
	benchPrefixMap(b, benchPeers, ip("192.168.3.4"), ip("10.246.3.4"), func(peer, i int) netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(peer), byte(i), 9})
	})
}

// benchPrefixMap runs BenchmarkPrefixMap with peers that all see the address pod as podAtPeer.
// remote returns addresses of a peer's pods.
func benchPrefixMap(b *testing.B, peersOf func(int) []Peer, pod, podAtPeer netip.Addr, remote func(peer, i int) netip.Addr) {
	for _, peers := range []int{1, 10, 100} {
		out, back := peersOf(peers), peersOf(peers)
		for i := range back {
			m := &back[i].Pods[0]
			m.From, m.To, back[i].External, back[i].Endpoints = m.To, m.From, nil, nil
		}
		engines := [2]*Engine{benchEngine(b, Config{}, out), benchEngine(b, Config{}, back)}
		for _, c := range []struct {
			name string
			body packettest.Body
		}{{"udp", packettest.UDP{SrcPort: 1, DstPort: 2}}, {"tcp", packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.ACK}}} {
			for dir := range directions {
				b.Run(fmt.Sprintf("%v/%s/peers=%d", dir, c.name, peers), func(b *testing.B) {
					var views [64]packet.View
					for i := range views {
						src, dst := pod, remote(i%peers, i)
						if dir == Inbound {
							src, dst = dst, podAtPeer
						}
						parse(b, &views[i], packettest.Build(packettest.IP{Src: src, Dst: dst}, c.body))
					}
					b.ReportAllocs()
					i := 0
					for b.Loop() {
						v, e := &views[i%64], engines[i/64%2]
						i++
						if dir == Outbound {
							e.Outbound(v, 0)
						} else {
							e.Inbound(v, 0)
						}
					}
				})
			}
		}
	}
}

// conversation is the tuple of a NAPT flow.
type conversation struct {
	local, remote         uint32
	localPort, remotePort uint16
}

// spread returns the i-th of a million different conversations. Like those of nodes, they have few
// inside ends, each with many remote ends.
func spread(i int) conversation {
	return conversation{
		local: 0xac100000 + uint32(i&0xff), localPort: uint16(1024 + i>>8&0x7f),
		remote: 0x0a000000 + uint32(i>>15)<<8 + 7, remotePort: 443,
	}
}

// write writes the conversation into a UDP packet without updating the checksum, so that
// benchmarks measure only the engine.
func (c conversation) write(b []byte) {
	binary.BigEndian.PutUint32(b[12:], c.local)
	binary.BigEndian.PutUint32(b[16:], c.remote)
	binary.BigEndian.PutUint16(b[20:], c.localPort)
	binary.BigEndian.PutUint16(b[22:], c.remotePort)
}

func udpTemplate() []byte {
	return packettest.Build(packettest.IP{Src: ip("172.16.0.1"), Dst: ip("10.0.0.7")}, packettest.UDP{SrcPort: 1, DstPort: 2, Data: make([]byte, 32)})
}

// fill opens n flows.
func fill(b testing.TB, e *Engine, n int, pick func(int) conversation) {
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	for i := range n {
		copy(pkt, tmpl)
		pick(i).write(pkt)
		if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
			b.Fatal(err)
		}
		if verdict := e.Outbound(&v, 0); verdict.Action != Forward {
			b.Fatalf("flow %d: %v", i, verdict.Drop)
		}
	}
}

// orderOf returns the random order in which n flows are looked up. The order is the same in
// each run.
func orderOf(n int) []uint32 {
	order := make([]uint32, 1<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range order {
		order[i] = rng.Uint32N(uint32(n))
	}
	return order
}

// BenchmarkNAPTHit measures a packet of a known flow, chosen at random. The packets are processed
// one by one, as the gateway's TUN reader does, and in batches, as its tunnel receivers do. The
// variant "without" does not call the engine, so its time is the cost of the benchmark itself.
func BenchmarkNAPTHit(b *testing.B) {
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		e := benchEngine(b, Config{}, benchPeers(1))
		fill(b, e, n, spread)
		order := orderOf(n)
		next := 0
		run := func(name string, batch int, ahead, engine bool) {
			b.Run(fmt.Sprintf("%s/flows=%d", name, n), func(b *testing.B) {
				packets, views := make([][]byte, batch), make([]packet.View, batch)
				for i := range packets {
					packets[i] = udpTemplate()
					parse(b, &views[i], packets[i])
				}
				var l Lookahead
				left := 0
				b.ReportAllocs()
				for b.Loop() {
					if left == 0 {
						for i := range packets {
							spread(int(order[next&(len(order)-1)])).write(packets[i])
							next++ // so that each run uses other flows
						}
						if ahead && l.Begin(e, Outbound) {
							for i := range views {
								l.Add(&views[i])
							}
							l.Fetch()
						}
						left = batch
					}
					left--
					if engine && e.Outbound(&views[left], 0).Action != Forward {
						b.Fatal("not forwarded")
					}
				}
			})
		}
		run("alone", 1, false, true)
		run("batch=8", 8, true, true)
		run("batch=128", 128, true, true)
		run("without", 128, false, false)
	}
}

// BenchmarkTwoCores measures an outbound packet and its reply. In one variant a goroutine processes
// both. In the other, two goroutines process one direction each, of the same flows. In both
// variants ns/op is the time of a packet and its reply.
func BenchmarkTwoCores(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		e := benchEngine(b, Config{}, benchPeers(1))
		fill(b, e, n, spread)
		order := orderOf(n)
		mapped := make([]uint16, n)
		e.Peers()[0].flows.each(func(i uint32, _ *entry, word uint64) { mapped[i] = uint16(word >> nearShift[Inbound]) })
		way := func(dir Direction) func(i int) {
			pkt := udpTemplate()
			var v packet.View
			parse(b, &v, pkt)
			return func(i int) {
				f := int(order[i&(len(order)-1)])
				c := spread(f)
				if dir == Outbound {
					c.write(pkt)
					e.Outbound(&v, 0)
					return
				}
				c.local, c.localPort, c.remote, c.remotePort = c.remote, c.remotePort, 0x0af60000, mapped[f] // the remote address is 10.246.0.0
				c.write(pkt)
				e.Inbound(&v, 0)
			}
		}
		b.Run(fmt.Sprintf("one/flows=%d", n), func(b *testing.B) {
			out, in := way(Outbound), way(Inbound)
			for i := range b.N {
				out(i)
				in(i)
			}
		})
		b.Run(fmt.Sprintf("two/flows=%d", n), func(b *testing.B) {
			var done sync.WaitGroup
			for dir := range directions {
				one := way(dir)
				done.Go(func() {
					for i := range b.N {
						one(i)
					}
				})
			}
			done.Wait()
		})
		for _, d := range Drops() {
			if p := e.Peers()[0]; p.Drops(Outbound, d)+p.Drops(Inbound, d) != 0 {
				b.Errorf("packets were dropped: %v", d)
			}
		}
	}
}

// BenchmarkHitBesideInserts measures a packet of one of 1,000 known flows. Another core
// meanwhile opens new flows of the same peer, whose table is full.
func BenchmarkHitBesideInserts(b *testing.B) {
	const flows = 1000
	e := benchEngine(b, Config{MaxFlows: 4 * flows}, benchPeers(1))
	fill(b, e, flows, spread)
	e.Peers()[0].flows.each(func(_ uint32, f *entry, _ uint64) { f.word.Or(stateSeen) })
	var stop atomic.Bool
	opened := make(chan int)
	go func() {
		pkt, tmpl := udpTemplate(), udpTemplate()
		var v packet.View
		parse(b, &v, pkt)
		n := 0
		for ; !stop.Load(); n++ {
			copy(pkt, tmpl)
			spread((2*flows + n) % 1_000_000).write(pkt)
			e.Outbound(&v, 0)
		}
		opened <- n
	}()
	pkt := udpTemplate()
	var v packet.View
	parse(b, &v, pkt)
	i := 0
	for b.Loop() {
		spread(i % flows).write(pkt)
		i++
		if e.Outbound(&v, 0).Action != Forward {
			b.Fatal("not forwarded")
		}
	}
	stop.Store(true)
	b.ReportMetric(float64(<-opened)/float64(b.N), "new-flows/op")
}

// BenchmarkNAPTInsert opens new flows. When the table is full, it starts again with an empty one.
// The variant to-a-million includes the growth of all tables.
func BenchmarkNAPTInsert(b *testing.B) {
	for _, c := range []struct {
		name string
		of   func(int) conversation
	}{{"shared-ports", spread}, {"own-ports", ownPorts}, {"own-hosts", ownHosts}} {
		b.Run(c.name, func(b *testing.B) {
			const n = 60_000
			pkt, tmpl := udpTemplate(), udpTemplate()
			var v packet.View
			parse(b, &v, pkt)
			e := benchEngine(b, Config{}, benchPeers(1))
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				if i == n {
					b.StopTimer()
					e.Sweep(time.Hour)
					i = 0
					b.StartTimer()
				}
				copy(pkt, tmpl)
				c.of(i).write(pkt)
				i++
				if e.Outbound(&v, 0).Action != Forward {
					b.Fatal("not forwarded")
				}
			}
		})
	}
	b.Run("to-a-million", func(b *testing.B) {
		b.ReportAllocs()
		var longest time.Duration
		for b.Loop() {
			e := benchEngine(b, Config{}, benchPeers(1))
			pkt, tmpl := udpTemplate(), udpTemplate()
			var v packet.View
			parse(b, &v, pkt)
			start := time.Now()
			for i := range 1_000_000 {
				copy(pkt, tmpl)
				spread(i).write(pkt)
				if e.Outbound(&v, 0).Action != Forward {
					b.Fatal("not forwarded")
				}
				if i%64 == 0 { // rare enough to cost nothing, frequent enough to notice when a table grows
					longest = max(longest, time.Since(start))
					start = time.Now()
				}
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/flow")
		b.ReportMetric(float64(longest.Microseconds()), "longest-us") // longest time for 64 flows, including other activity of the machine
	})
}

// ownPorts returns conversations that each have their own inside port. The conversations of
// ownHosts each have their own inside host too.
func ownPorts(i int) conversation {
	c := spread(i)
	c.localPort, c.local = uint16(1024+i%60_000), 0xac100000+uint32(i%16)
	return c
}

func ownHosts(i int) conversation {
	c := ownPorts(i)
	c.local = 0xac100000 + uint32(i)
	return c
}

// BenchmarkEvict inserts into a table that is full of half-open flows.
func BenchmarkEvict(b *testing.B) {
	e := benchEngine(b, Config{MaxFlows: 100_000}, benchPeers(1))
	fill(b, e, 100_000, spread)
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	parse(b, &v, pkt)
	b.ReportAllocs()
	i := 100_000
	for b.Loop() {
		copy(pkt, tmpl)
		spread(i % 1_000_000).write(pkt)
		i++
		if e.Outbound(&v, 0).Action != Forward {
			b.Fatal("not forwarded")
		}
	}
}

// BenchmarkUnderAttack measures a packet of one of 100,000 established flows, while some of the
// packets belong to an attack on a full table. Half of the attack's packets open flows from random
// hosts and ports to random addresses, and each of these flows evicts another one. The others have
// no peer, are not permitted, or are malformed. No packet of an established flow may be lost.
func BenchmarkUnderAttack(b *testing.B) {
	const flows, halfOpen = 100_000, 20_000
	e := benchEngine(b, Config{MaxFlows: flows + halfOpen}, benchPeers(1))
	fill(b, e, flows, spread)
	reply, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	table := &e.Peers()[0].flows
	table.each(func(i uint32, f *entry, word uint64) {
		c := spread(int(i))
		parse(b, &v, reply)
		conversation{local: c.remote, localPort: c.remotePort, remote: 0x0af60000, remotePort: uint16(word >> nearShift[Inbound])}.write(reply)
		if e.Inbound(&v, 0).Action != Forward {
			b.Fatal("no answer")
		}
		copy(reply, tmpl)
	})
	order := orderOf(flows)
	for _, percent := range []int{0, 10, 50} {
		b.Run(fmt.Sprintf("attack=%d%%", percent), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(3, 4))
			pkt, bad := udpTemplate(), udpTemplate()
			var v, w packet.View
			parse(b, &v, pkt)
			b.ReportAllocs()
			due, attacks, i := 0, 0, 0
			for b.Loop() {
				i++
				if due += percent; due < 100 {
					spread(int(order[i&(len(order)-1)])).write(pkt)
					if e.Outbound(&v, 0).Action != Forward {
						b.Fatal("an established flow lost a packet")
					}
					continue
				}
				due -= 100
				attacks++
				copy(bad, tmpl)
				r := rng.Uint64()
				c := conversation{local: 0xac100000 | uint32(r)&0xfffff, localPort: uint16(r >> 20), remote: 0x0a000000 | uint32(r>>36)&0xffff, remotePort: uint16(r >> 48)}
				switch attacks % 6 {
				case 0: // no peer
					c.remote = 0x0b800000
					fallthrough
				case 1, 2, 3: // a new flow
					c.write(bad)
					parse(b, &w, bad)
					e.Outbound(&w, 0)
				case 4: // not permitted
					c.local, c.remote = c.remote, 0x0a630000
					c.write(bad)
					parse(b, &w, bad)
					e.Inbound(&w, 0)
				case 5: // malformed
					bad[0] = 0x4f
					if w.Parse(bad, packet.ChecksumComplete) == nil {
						b.Fatal("parsed")
					}
					e.Count(nil, Outbound, DropMalformed)
				}
			}
		})
	}
	if s := e.Stats().Peers[0]; s.Created > flows+halfOpen && s.Evicted == 0 { // with few iterations, the table never fills
		b.Errorf("nothing was evicted: %+v", s)
	}
}

// BenchmarkCollection measures a packet of a known flow, chosen at random, while the garbage
// collector runs all the time. Entries hold no pointers, so a flow must cost the collector nothing.
// gc-µs is the duration of a whole collection, and pause-µs is the longest stop of all goroutines.
// worst-µs and p99.99-ns are times per packet; they include other activity of the machine.
func BenchmarkCollection(b *testing.B) {
	for _, n := range []int{1_000, 1_000_000} {
		b.Run(fmt.Sprintf("flows=%d", n), func(b *testing.B) {
			e := benchEngine(b, Config{}, benchPeers(1))
			fill(b, e, n, spread)
			order := orderOf(n)
			pkt := udpTemplate()
			var v packet.View
			parse(b, &v, pkt)
			var before, after debug.GCStats
			runtime.GC()
			debug.ReadGCStats(&before)
			var over atomic.Bool
			var collector sync.WaitGroup
			collector.Go(func() {
				for !over.Load() {
					runtime.GC()
				}
			})
			var took [1 << 16]uint32 // number of packets by ns; the last element counts all slower ones
			worst, i := time.Duration(0), 0
			begin := time.Now()
			for b.Loop() {
				spread(int(order[i&(len(order)-1)])).write(pkt)
				i++
				at := time.Now()
				if e.Outbound(&v, 0).Action != Forward {
					b.Fatal("an established flow lost a packet")
				}
				d := time.Since(at)
				took[min(int(d), len(took)-1)]++
				worst = max(worst, d)
			}
			elapsed := time.Since(begin)
			over.Store(true)
			collector.Wait()
			debug.ReadGCStats(&after)
			cycles := int(after.NumGC - before.NumGC)
			var pause time.Duration
			for _, p := range after.Pause[:min(cycles, len(after.Pause))] {
				pause = max(pause, p)
			}
			p9999 := 0
			for left := i / 10_000; p9999 < len(took)-1; p9999++ {
				if left -= int(took[len(took)-1-p9999]); left < 0 {
					break
				}
			}
			b.ReportMetric(float64(elapsed.Microseconds())/float64(cycles), "gc-µs")
			b.ReportMetric(float64(pause.Microseconds()), "pause-µs")
			b.ReportMetric(float64(worst.Microseconds()), "worst-µs")
			b.ReportMetric(float64(len(took)-1-p9999), "p99.99-ns")
		})
	}
}

// BenchmarkSweep sweeps a million flows. In the first variant no flow can have expired. In the
// second, each flow must be examined because its chunk has changed. In the third, all flows have
// expired.
func BenchmarkSweep(b *testing.B) {
	b.Run("nothing", func(b *testing.B) {
		e := benchEngine(b, Config{}, benchPeers(1))
		fill(b, e, 1_000_000, spread)
		for b.Loop() {
			e.Sweep(time.Second)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/flow")
	})
	b.Run("looked-at", func(b *testing.B) {
		e := benchEngine(b, Config{}, benchPeers(1))
		fill(b, e, 1_000_000, spread)
		flows := &e.Peers()[0].flows
		for b.Loop() {
			for i := uint32(0); i < flows.used; i += chunkSize {
				flows.changed(i)
			}
			e.Sweep(time.Second)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/flow")
	})
	b.Run("all", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			e := benchEngine(b, Config{}, benchPeers(1))
			fill(b, e, 1_000_000, spread)
			b.StartTimer()
			e.Sweep(time.Hour)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/flow")
	})
}

// BenchmarkFlowMemory reports the octets of heap per flow, and the engine's own figure, for
// 1,048,576 flows. The variants are:
//
//   - flows of a few hosts with few ports, like those of nodes
//   - flows that each have their own inside port
//   - flows that each have their own inside host and port, which need 32 peers for enough ports
//   - flows to a mapped endpoint that each have their own remote host
//   - flows of a few hosts over IPv6
func BenchmarkFlowMemory(b *testing.B) {
	const n = 1 << 20
	packets := func(open func(b *testing.B, e *Engine, of func(int) conversation), of func(int) conversation) func(*testing.B, *Engine) {
		return func(b *testing.B, e *Engine) { open(b, e, of) }
	}
	out := func(b *testing.B, e *Engine, of func(int) conversation) { fill(b, e, n, of) }
	for _, c := range []struct {
		name  string
		peers int
		open  func(b *testing.B, e *Engine)
	}{
		{"few-hosts", 1, packets(out, spread)},
		{"own-ports", 32, packets(out, func(i int) conversation {
			return conversation{local: 0xac100001 + uint32(i>>5&7), localPort: uint16(1024 + i>>5), remote: 0x0a000007 + uint32(i&31)<<16, remotePort: 443}
		})},
		{"own-hosts", 32, packets(out, func(i int) conversation {
			return conversation{local: 0xac100000 + uint32(i), localPort: uint16(1024 + i>>5), remote: 0x0a000007 + uint32(i&31)<<16, remotePort: 443}
		})},
		{"to-endpoint", 32, func(b *testing.B, e *Engine) { fillIn(b, e, n) }},
		{"ipv6", 1, func(b *testing.B, e *Engine) { fill6(b, e, n) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				e := benchEngine(b, Config{}, benchPeers(c.peers))
				c.open(b, e)
				runtime.GC()
				runtime.ReadMemStats(&after)
				if got := e.total.Load(); got != n {
					b.Fatalf("%d flows", got)
				}
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "heap-B/flow")
				b.ReportMetric(float64(e.Stats().Bytes)/n, "stated-B/flow")
				runtime.KeepAlive(e)
			}
		})
	}
}

// fillIn opens n flows to a mapped endpoint, each from another pod of 32 peers.
func fillIn(b *testing.B, e *Engine, n int) {
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	for i := range n {
		copy(pkt, tmpl)
		conversation{local: 0x0a000000 + uint32(i&31)<<16 + uint32(i>>5), localPort: 4000, remote: 0x0af70001, remotePort: 53}.write(pkt)
		parse(b, &v, pkt)
		if verdict := e.Inbound(&v, 0); verdict.Action != Deliver {
			b.Fatalf("flow %d: %v", i, verdict.Drop)
		}
	}
}

// fill6 opens n flows of 256 hosts over IPv6.
func fill6(b *testing.B, e *Engine, n int) {
	p := benchPeers(1)[0]
	p.RemotePods, p.Pods = append(p.RemotePods, pfx("fd00:b::/64")), append(p.Pods, Remap{pfx("fd00:a::/64"), pfx("fd00:a:b::/64")})
	if err := e.SetPeers([]Peer{p}); err != nil {
		b.Fatal(err)
	}
	tmpl := packettest.Build(packettest.IP{Src: ip("fd00:c::"), Dst: ip("fd00:b::")}, packettest.UDP{Data: make([]byte, 32)})
	pkt := make([]byte, len(tmpl))
	var v packet.View
	for i := range n {
		copy(pkt, tmpl)
		c := spread(i)
		binary.BigEndian.PutUint32(pkt[20:], c.local)
		binary.BigEndian.PutUint32(pkt[36:], c.remote)
		binary.BigEndian.PutUint16(pkt[40:], c.localPort)
		binary.BigEndian.PutUint16(pkt[42:], c.remotePort)
		parse(b, &v, pkt)
		if verdict := e.Outbound(&v, 0); verdict.Action != Forward {
			b.Fatalf("flow %d: %v", i, verdict.Drop)
		}
	}
}
