package natengine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// lookaheadPeer returns a peer with both families, 1:1 maps, an endpoint and nodes behind
// NAPT.
func lookaheadPeer() Peer {
	return Peer{
		ID: "b", RemotePods: pfxs("10.0.0.0/10", "fd00:b::/64"),
		Pods:     []Remap{{pfx("192.168.0.0/20"), pfx("10.246.16.0/20")}, {pfx("fd00:a::/80"), pfx("fd00:a:b::/80")}},
		External: pfxs("10.247.0.0/24"), Endpoints: []Endpoint{{ip("172.16.9.9"), ip("10.247.0.9")}},
	}
}

// lookaheadPacket returns a random packet of one direction. There are few different tuples, so
// most packets match a flow.
func lookaheadPacket(rng *rand.Rand, dir Direction) []byte {
	pick := func(choices ...string) string { return choices[rng.IntN(len(choices))] }
	nodes := []string{"172.16.9.1", "172.16.9.2", "192.168.0.0", "fd00:c::1"}
	node := rng.IntN(len(nodes))
	near, far := ip(nodes[node]), ip(pick("10.0.0.7", "10.0.1.7", "10.0.2.7", "10.128.0.1"))
	switch {
	case near.Is6() && dir == Outbound:
		near, far = ip(pick(nodes[node], "fd00:a::5")), ip(pick("fd00:b::1", "fd00:b::2"))
	case near.Is6():
		near, far = ip(pick("fd00:a:b::", "fd00:a:b::5")), ip(pick("fd00:b::1", "fd00:b::2"))
	case dir == Outbound:
		near = ip(pick(nodes[node], "192.168.3.4", "172.16.9.9"))
	default:
		near = ip(pick("10.246.16.0", "10.246.16.0", "10.246.19.4", "10.247.0.9", "10.247.0.8"))
	}
	if near == ip("172.16.9.9") {
		node = len(nodes)
	}
	h := packettest.IP{Src: near, Dst: far}
	nearPort, farPort := uint16(20_000+100*node+rng.IntN(8)), uint16(443) // each node has its own ports, so none is chosen at random
	if dir == Inbound {
		h.Src, h.Dst = h.Dst, h.Src
		nearPort, farPort = farPort, nearPort
	}
	switch rng.IntN(4) {
	case 0:
		return packettest.Build(h, packettest.TCP{SrcPort: nearPort, DstPort: farPort, Flags: packettest.ACK})
	case 1:
		b := packettest.Build(h, packettest.UDP{SrcPort: nearPort, DstPort: farPort, Data: make([]byte, 40)})
		if fragments := packettest.Fragments(b, 24, rng.Uint32N(4)); rng.IntN(8) == 0 {
			return fragments[rng.IntN(len(fragments))]
		}
		return b
	case 2:
		return packettest.Build(h, packettest.Echo{ID: nearPort})
	}
	return packettest.Build(h, packettest.UDP{SrcPort: nearPort, DstPort: farPort, Data: make([]byte, 8)})
}

// Two engines process the same batches, one of them with lookahead. Their verdicts must be
// equal.
func TestLookaheadChangesNoVerdict(t *testing.T) {
	with, without := newEngine(t, Config{}, lookaheadPeer()), newEngine(t, Config{}, lookaheadPeer())
	own := func(i int) conversation { // each port belongs to one host
		return conversation{local: 0xac100000 + uint32(i%16), localPort: uint16(1024 + i%1024), remote: 0x0a000000 + uint32(i/1024)<<8 + 7, remotePort: 443}
	}
	fill(t, with, lookaheadFrom, own)
	fill(t, without, lookaheadFrom, own)
	rng := rand.New(rand.NewPCG(7, 8))
	var ahead Lookahead
	fetched := 0
	for batch := range 300 {
		dir := Direction(batch % 2)
		now := time.Duration(batch) * time.Second
		packets := make([][]byte, 1+rng.IntN(lookaheadMax+20)) // includes batches larger than lookaheadMax
		views := make([]packet.View, len(packets))
		if !ahead.Begin(with, dir) {
			t.Fatalf("batch %d: no lookahead with %d flows", batch, with.total.Load())
		}
		for i := range packets {
			packets[i] = lookaheadPacket(rng, dir)
			parse(t, &views[i], bytes.Clone(packets[i]))
			ahead.Add(&views[i])
		}
		fetched += ahead.n
		ahead.Fetch()
		if ahead != (Lookahead{dir: dir}) {
			t.Fatal("lookahead keeps something alive after Fetch")
		}
		for i := range packets {
			var got Verdict
			if dir == Outbound {
				got = with.Outbound(&views[i], now)
			} else {
				got = with.Inbound(&views[i], now)
			}
			b, want := send(t, without, dir, packets[i], tickOf(now))
			if got.Action != want.Action || got.Drop != want.Drop || !bytes.Equal(views[i].Bytes(), b) {
				t.Fatalf("batch %d, packet %d %x: %v %v with lookahead, %v %v without", batch, i, packets[i], got.Action, got.Drop, want.Action, want.Drop)
			}
		}
	}
	if fetched == 0 {
		t.Error("no packet looked up a flow")
	}
}

// Lookahead must fetch the entry that find will return, and none for 1:1 maps.
func TestLookaheadFetchesTheEntryThatFindReturns(t *testing.T) {
	e := newEngine(t, Config{}, lookaheadPeer())
	fill(t, e, lookaheadFrom, spread)
	var ahead Lookahead
	ahead.Begin(e, Outbound)
	table := &e.Peers()[0].flows
	for i := range lookaheadMax {
		b := udpTemplate()
		spread(i * 250).write(b)
		var v packet.View
		parse(t, &v, b)
		ahead.Add(&v)
		c := translation{v: &v, near: source(&v), far: destination(&v)}
		k, _ := c.key()
		f, ok := table.find(Outbound, &k)
		if w := ahead.wanted[i]; ahead.n != i+1 || !ok || w.table.candidate(w.slots, w.tag) != f.entry {
			t.Fatalf("flow %d: another entry is looked for, or none", i)
		}
	}
	ahead.Begin(e, Outbound)
	for _, b := range [][]byte{
		udp("192.168.3.4:4000", "10.0.0.7:443"), udp("172.16.0.1:4000", "11.0.0.7:443"), udp("[fd00:a::5]:4000", "[fd00:b::1]:443"),
	} {
		var v packet.View
		parse(t, &v, b)
		if ahead.Add(&v); ahead.n != 0 {
			t.Errorf("%x asks for no flow, yet one is looked for", b)
		}
	}
}

// This test is for the race detector: the table changes while its slots and entries are
// fetched.
func TestLookaheadIsSafeDuringWrites(t *testing.T) {
	e := newEngine(t, Config{MaxFlows: lookaheadFrom + 2000}, lookaheadPeer())
	fill(t, e, lookaheadFrom+1000, spread)
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		defer close(stop)
		b, tmpl := udpTemplate(), udpTemplate()
		for i := range 20_000 { // the table grows to the bound, then flows are evicted; half of the flows end
			copy(b, tmpl)
			spread(100_000 + i).write(b)
			var v packet.View
			if v.Parse(b, packet.ChecksumComplete) == nil {
				e.Outbound(&v, time.Duration(i)*10*time.Millisecond)
			}
			if i%5000 == 0 {
				e.Sweep(time.Duration(i) * 10 * time.Millisecond)
			}
		}
	})
	done.Go(func() {
		var ahead Lookahead
		b := udpTemplate()
		var v packet.View
		if v.Parse(b, packet.ChecksumComplete) != nil {
			return
		}
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if ahead.Begin(e, Outbound) {
				for j := range 32 {
					spread(100_000 + (i*32+j)%20_000).write(b)
					ahead.Add(&v)
				}
				ahead.Fetch()
			}
		}
	})
	done.Wait()
	e.checkTables(t)
}

// With few flows, lookahead would cost more than it saves.
func TestLookaheadIsOffWhileFlowsAreFew(t *testing.T) {
	e := newEngine(t, Config{}, lookaheadPeer())
	var ahead Lookahead
	for _, c := range []struct {
		flows int
		on    bool
	}{{lookaheadFrom - 1, false}, {lookaheadFrom, true}} {
		fill(t, e, c.flows, spread)
		if on := ahead.Begin(e, Inbound); on != c.on {
			t.Error(fmt.Sprintf("with %d flows", c.flows), "Begin returned", on)
		}
	}
}
