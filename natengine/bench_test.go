package natengine

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// benchPeers are n peers like those of a Liqo fabric in which all clusters have the same PodCIDR.
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
		c.MaxFlowsPerHost = 1 << 30 // some have all flows come from one host
	}
	e := New(c)
	if err := e.SetPeers(peers); err != nil {
		b.Fatal(err)
	}
	return e
}

// BenchmarkPrefixMap is the whole engine call for a known 1:1 rule on a parsed view. Two engines take turns, of which one
// undoes what the other did, so that nothing but engine calls is measured.
func BenchmarkPrefixMap(b *testing.B) {
	for _, peers := range []int{1, 10, 100} {
		there, back := benchPeers(peers), benchPeers(peers)
		for i := range back {
			m := &back[i].Pods[0]
			m.From, m.To, back[i].External, back[i].Endpoints = m.To, m.From, nil, nil
		}
		engines := [2]*Engine{benchEngine(b, Config{}, there), benchEngine(b, Config{}, back)}
		for _, c := range []struct {
			name string
			body packettest.Body
		}{{"udp", packettest.UDP{SrcPort: 1, DstPort: 2}}, {"tcp", packettest.TCP{SrcPort: 1, DstPort: 2, Flags: packettest.ACK}}} {
			for dir := range directions {
				b.Run(fmt.Sprintf("%v/%s/peers=%d", dir, c.name, peers), func(b *testing.B) {
					var views [64]packet.View
					for i := range views {
						src, dst := ip("192.168.3.4"), netip.AddrFrom4([4]byte{10, byte(i % peers), byte(i), 9})
						if dir == Inbound {
							src, dst = dst, ip("10.246.3.4")
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

// conversation is a NAPT flow.
type conversation struct {
	local, remote         uint32
	localPort, remotePort uint16
}

// spread gives a million different conversations: few inside ends with many remote ones each, as nodes have.
func spread(i int) conversation {
	return conversation{
		local: 0xac100000 + uint32(i&0xff), localPort: uint16(1024 + i>>8&0x7f),
		remote: 0x0a000000 + uint32(i>>15)<<8 + 7, remotePort: 443,
	}
}

// write puts the conversation into a UDP packet without checksum work, so that benchmarks measure the engine.
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
func fill(b testing.TB, e *Engine, n int, of func(int) conversation) {
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	for i := range n {
		copy(pkt, tmpl)
		of(i).write(pkt)
		if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
			b.Fatal(err)
		}
		if verdict := e.Outbound(&v, 0); verdict.Action != Forward {
			b.Fatalf("flow %d: %v", i, verdict.Drop)
		}
	}
}

// BenchmarkNAPTHit is a packet of a random known flow; parse is what of it is not the engine.
func BenchmarkNAPTHit(b *testing.B) {
	for _, n := range []int{1_000, 100_000, 1_000_000} {
		e := benchEngine(b, Config{}, benchPeers(1))
		fill(b, e, n, spread)
		var order [1 << 16]uint32
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range order {
			order[i] = uint32(rng.IntN(n))
		}
		run := func(name string, engine bool) {
			b.Run(fmt.Sprintf("%s/flows=%d", name, n), func(b *testing.B) {
				pkt := udpTemplate()
				var v packet.View
				if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				i := rng.IntN(len(order)) // so that short runs do not all hit the same flows
				for b.Loop() {
					spread(int(order[i&0xffff])).write(pkt)
					i++
					if engine && e.Outbound(&v, 0).Action != Forward {
						b.Fatal("not forwarded")
					}
				}
			})
		}
		run("hit", true)
		run("without", false)
	}
}

// BenchmarkNAPTInsert opens new flows, from an empty table and over again; churn ends as many as it opens.
func BenchmarkNAPTInsert(b *testing.B) {
	for _, c := range []struct {
		name string
		of   func(int) conversation
	}{{"shared-ports", spread}, {"own-ports", func(i int) conversation {
		c := spread(i)
		c.localPort, c.local = uint16(1024+i%60000), c.local+uint32(i/60000)
		return c
	}}} {
		b.Run(c.name, func(b *testing.B) {
			const n = 60_000
			pkt, tmpl := udpTemplate(), udpTemplate()
			var v packet.View
			if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
				b.Fatal(err)
			}
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
		for b.Loop() {
			fill(b, benchEngine(b, Config{}, benchPeers(1)), 1_000_000, spread)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1e6, "ns/flow")
	})
}

// BenchmarkEvict inserts into a table that is full of half-open flows.
func BenchmarkEvict(b *testing.B) {
	e := benchEngine(b, Config{MaxFlows: 100_000}, benchPeers(1))
	fill(b, e, 100_000, spread)
	pkt, tmpl := udpTemplate(), udpTemplate()
	var v packet.View
	if err := v.Parse(pkt, packet.ChecksumComplete); err != nil {
		b.Fatal(err)
	}
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

// BenchmarkSweep walks a million flows of which none has expired.
func BenchmarkSweep(b *testing.B) {
	e := benchEngine(b, Config{}, benchPeers(1))
	fill(b, e, 1_000_000, spread)
	for b.Loop() {
		e.Sweep(time.Second)
	}
}

// BenchmarkFlowMemory reports octets of heap per flow, and what the engine says itself.
func BenchmarkFlowMemory(b *testing.B) {
	for _, c := range []struct {
		name  string
		peers int
		of    func(int) conversation
		n     int
	}{{"shared-ports", 1, spread, 1 << 20}, {"own-ports", 32, nil, 1 << 20}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				e := benchEngine(b, Config{}, benchPeers(c.peers))
				if c.of != nil {
					fill(b, e, c.n, c.of)
				} else { // 32,768 flows to each peer, each from a port of its own
					fill(b, e, c.n, func(i int) conversation {
						return conversation{local: 0xac100001, localPort: uint16(1024 + i>>5), remote: 0x0a000007 + uint32(i&31)<<16, remotePort: 443}
					})
				}
				runtime.GC()
				runtime.ReadMemStats(&after)
				b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(c.n), "heap-B/flow")
				b.ReportMetric(float64(e.Stats().Bytes)/float64(c.n), "stated-B/flow")
				runtime.KeepAlive(e)
			}
		})
	}
}
