package datapath_test

import (
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.zx2c4.com/wireguard/conn"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
)

// messageFrom returns a message of size octets that belongs to peer n; 0: to no peer.
func messageFrom(n byte, size int) []byte {
	m := make([]byte, size)
	m[0] = n
	return m
}

func TestBacklogServesPeersInTurn(t *testing.T) {
	const floods = 5
	var b datapath.Backlog
	for range 20_000 {
		for peer := range byte(floods + 1) {
			b.Push(messageFrom(peer, 64))
		}
	}
	for range 100 {
		b.Pop()
	}
	b.Push(messageFrom(200, 1452))
	cost := 0
	for m := b.Pop(); m[0] != 200; m = b.Pop() {
		cost += len(m) + datapath.MessageCost
	}
	if most := floods*(datapath.Quantum+2000) + datapath.UnknownQuantum + 2000; cost > most {
		t.Errorf("messages of cost %d went first: want %d at most", cost, most)
	}
}

// Each peer gets the same share, whether its messages are large or small. Messages without a peer
// get a quarter of a peer's share.
func TestBacklogSharesTimeByMessageCost(t *testing.T) {
	sizes := map[byte]int{0: 64, 1: 64, 2: 1452, 3: 9000}
	var b datapath.Backlog
	got := map[byte]int{}
	for range 50_000 {
		for peer, size := range sizes {
			b.Push(messageFrom(peer, size))
		}
		m := b.Pop()
		got[m[0]] += len(m) + datapath.MessageCost
	}
	for peer := range sizes {
		want := got[1]
		if peer == 0 {
			want /= datapath.Quantum / datapath.UnknownQuantum
		}
		if diff := got[peer] - want; diff < -want/20-2*datapath.Quantum || diff > want/20+2*datapath.Quantum {
			t.Errorf("peer %d got %d: want about %d", peer, got[peer], want)
		}
	}
}

// The messages of each peer stay in order, no message is lost or invented, and the size of the
// backlog is limited.
func TestTheBacklogKeepsOrderAndBounds(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var b datapath.Backlog
	waiting, cost, sum := map[byte][]uint32{}, map[byte]int{}, 0
	pop := func() {
		m := b.Pop()
		n, peer := binary.BigEndian.Uint32(m[1:]), m[0]
		if len(waiting[peer]) == 0 || waiting[peer][0] != n {
			t.Fatalf("message %d of peer %d: want one of %v", n, peer, waiting[peer][:min(3, len(waiting[peer]))])
		}
		if waiting[peer] = waiting[peer][1:]; len(waiting[peer]) == 0 {
			delete(waiting, peer)
		}
		c := len(m) + datapath.MessageCost
		cost[peer], sum = cost[peer]-c, sum-c
	}
	for i := range uint32(200_000) {
		if rng.IntN(3) == 0 && !b.Empty() {
			pop()
			continue
		}
		m := messageFrom(byte(rng.IntN(12)), 5+rng.IntN(1500))
		binary.BigEndian.PutUint32(m[1:], i)
		peer := m[0]
		limit := datapath.UnknownLimit
		if peer != 0 {
			limit = max(datapath.LeastQueue, datapath.BacklogLimit/max(1, len(waiting)))
		}
		c := len(m) + datapath.MessageCost
		if admitted := b.Push(m); admitted != (len(waiting[peer]) == 0 || cost[peer]+c <= limit) {
			t.Fatalf("admitted %v, where %d wait of %d", admitted, cost[peer], limit)
		} else if admitted {
			waiting[peer] = append(waiting[peer], i)
			cost[peer], sum = cost[peer]+c, sum+c
		}
	}
	for !b.Empty() {
		pop()
	}
	if sum != 0 || len(waiting) != 0 {
		t.Errorf("%d peers have messages left", len(waiting))
	}
}

// --- tests with an inbound goroutine

// arrival is a received message and its source.
type arrival struct {
	b    []byte
	from conn.Endpoint
}

// socket returns the receive function of a simulated socket, in which all batches wait, one after
// the other. The socket closes after the last batch.
func socket(batches [][]arrival) func(*bind.Batch, bool) error {
	return func(b *bind.Batch, mayBlock bool) error {
		if len(batches) == 0 {
			if b.More = false; mayBlock {
				return net.ErrClosed
			}
			return nil
		}
		for len(batches[0]) > 0 && b.Space() != nil {
			a := batches[0][0]
			b.Received(copy(b.Space(), a.b), 0, a.from)
			batches[0] = batches[0][1:]
		}
		if len(batches[0]) == 0 {
			batches = batches[1:]
		}
		b.More = true
		return nil
	}
}

// messagesBefore makes end b receive batches that each have 300 messages of a flood and one message
// from end a. For each message from a, it returns the number of flood messages handled before.
func messagesBefore(t *testing.T, b, a *end, batches int, flood func() arrival) (before []int) {
	t.Helper()
	all := make([][]arrival, batches)
	rng, at := rand.New(rand.NewPCG(1, 2)), b.wire.Endpoint(a.place)
	for i := range all {
		for range 300 {
			all[i] = append(all[i], flood())
		}
		honest := arrival{a.Seal(b.key.public, numbered(podOf(0), podOf(1), uint32(1000+i), 100)), at}
		all[i] = slices.Insert(all[i], rng.IntN(300), honest)
	}
	others := 0
	b.on = func(number uint32) {
		if number >= 1000 {
			before = append(before, others)
		} else {
			others++
		}
	}
	datapath.NewReceiver(b.Tunnel).ReceiveAll(socket(all))
	b.on = nil
	return before
}

func TestAPeerAboveItsRateDelaysOnlyItself(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		c := p.third(t)
		at, sent := b.wire.Endpoint(c.place), 0
		before := messagesBefore(t, b, a, 60, func() arrival {
			sent++
			return arrival{c.Seal(b.key.public, numbered(podOf(2), podOf(1), 1, 60)), at}
		})
		if len(before) != 60 {
			t.Fatalf("%d messages of the honest peer arrived: want 60", len(before))
		}
		// End b drains more than eight batches before it decrypts any message, and the eight
		// messages from end a cost less than one turn.
		if n := before[7]; n > 2*datapath.Quantum/datapath.MessageCost {
			t.Errorf("%d messages of the flood were handled before the first eight of the honest peer", n)
		}
		delivered, _ := b.state(t, "2").Traffic(natengine.Inbound)
		if n := b.state(t, "2").Drops(natengine.Inbound, natengine.DropReceiveQueue); n == 0 || delivered+n != uint64(sent) {
			t.Errorf("%d delivered and %d counted for the peer that floods: want %d together", delivered, n, sent)
		}
		if n := b.state(t, "0").Drops(natengine.Inbound, natengine.DropReceiveQueue); n != 0 {
			t.Errorf("%d counted for the honest peer", n)
		}
	})
}

// A host on the underlay reads the receiver index of a peer and sends junk with that index from
// another address. The junk waits in the small queue for messages without a peer. Messages of the
// peer from a new address wait there as well, until one of them is decrypted.
func TestJunkWithTheIndexOfAPeerDoesNotAffectThatPeer(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		bad, n := b.wire.Endpoint(netip.MustParseAddrPort("192.0.2.66:9999")), uint64(0)
		junk := func() arrival {
			n++
			m := datapath.SealWith(a.session(), 1<<40+n, make([]byte, 64))
			m[20] ^= 1
			return arrival{m, bad}
		}
		if before := messagesBefore(t, b, a, 60, junk); len(before) != 60 {
			t.Fatalf("%d messages of the honest peer arrived: want 60", len(before))
		}
		if n := b.state(t, "0").Drops(natengine.Inbound, natengine.DropReceiveQueue); n != 0 {
			t.Errorf("%d counted for the honest peer", n)
		}
		forged := b.state(t, "0").Drops(natengine.Inbound, natengine.DropTunnelForged)
		queue := b.engine.Stats().NoPeerDrops[natengine.Inbound][natengine.DropReceiveQueue]
		if queue == 0 || forged+queue != n {
			t.Errorf("%d counted as forged, %d as receive_queue: want %d together", forged, queue, n)
		}
		a.place = netip.MustParseAddrPort("192.0.2.77:4711") // a moves
		if before := messagesBefore(t, b, a, 200, junk); len(before) < 100 || b.Stats()[a.key.public].Endpoint != a.place {
			t.Errorf("%d messages arrived of a peer that has moved, and it is at %s for us", len(before), b.Stats()[a.key.public].Endpoint)
		}
	})
}

// Refused messages use no memory, even if a flooding peer mixes them with messages that wait.
// Otherwise refused messages would use up the slabs, and messages of other peers would wait in the
// socket.
func TestRefusedMessagesUseNoMemory(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		c := p.third(t)
		flooder, host := b.wire.Endpoint(c.place), b.wire.Endpoint(netip.MustParseAddrPort("192.0.2.66:9999"))
		junk := make([]byte, 1452) // belongs to no session
		junk[0], junk[4] = 4, 1
		const calls, each = 30, 340 // about a slab per call
		all, sent := make([][]arrival, calls), uint32(0)
		for i := range all {
			for range each / 20 {
				sent++
				all[i] = append(all[i], arrival{c.Seal(b.key.public, numbered(podOf(2), podOf(1), sent, 1400)), flooder})
				all[i] = append(all[i], slices.Repeat([]arrival{{junk, host}}, 19)...)
			}
		}
		var numbers []uint32
		b.on = func(number uint32) { numbers = append(numbers, number) }
		r, next, most := datapath.NewReceiver(b.Tunnel), socket(all), 0
		r.ReceiveAll(func(b *bind.Batch, mayBlock bool) error {
			most = max(most, r.Slabs())
			return next(b, mayBlock)
		})
		if len(numbers) != int(sent) || !slices.IsSorted(numbers) {
			t.Errorf("%d of %d packets arrived, in order: %v", len(numbers), sent, slices.IsSorted(numbers))
		}
		if most > 3 {
			t.Errorf("%d slabs were used for %d messages that waited", most, sent)
		}
	})
}

// Drops that the kernel reports for a socket are counted like all other drops.
func TestDropsOfTheSocketAreCounted(t *testing.T) {
	e := newEngine(t)
	d := newDevice(t, newScript(), e, datapath.Options{})
	calls := 0
	datapath.NewReceiver(d).ReceiveAll(func(b *bind.Batch, _ bool) error {
		if calls++; calls > 3 {
			return net.ErrClosed
		}
		b.Lost = uint64(calls)
		return nil
	})
	if n := drops(e, natengine.Inbound, natengine.DropSocketBuffer); n != 1+2+3 {
		t.Errorf("%d counted: want 6", n)
	}
}
