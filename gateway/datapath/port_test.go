package datapath_test

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// endpointSeen is the address of the in-process endpoint as the peers of newEngine see it.
var endpointSeen = netip.MustParseAddr("10.90.0.1")

// --- queues and token buckets

// For random calls of push and pop, addresses are served in turn, the datagrams of an address stay
// in order, and no address uses the room of another.
func TestFairQueueServesAddressesAlternately(t *testing.T) {
	rng := rand.New(rand.NewPCG(24, 1))
	var turns datapath.Turns
	waiting := make(map[netip.AddrPort][]uint32)
	passed := make(map[netip.AddrPort]int) // datagrams from other addresses since an address was last served, or queued its first datagram
	total := 0
	for n := range uint32(200_000) {
		if rng.IntN(16) < 9 || total < 100 && n%50_000 < 25_000 {
			from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(rng.IntN(2)), byte(rng.IntN(200))}), 1)
			if rng.IntN(2) == 0 {
				// One address floods the queue.
				from = netip.MustParseAddrPort("10.0.0.1:1")
			}
			room := len(waiting[from]) < datapath.TurnsEach && (len(waiting[from]) == 0 || total < datapath.TurnsAll)
			if got := turns.Push(from, binary.BigEndian.AppendUint32(nil, n)); got != room {
				t.Fatalf("%d of %d wait: pushed %t", len(waiting[from]), total, got)
			}
			if room {
				waiting[from] = append(waiting[from], n)
				total++
			}
			continue
		}
		at, b, ok := turns.Pop()
		if ok != (total > 0) {
			t.Fatalf("%d wait: popped %t", total, ok)
		}
		if !ok {
			continue
		}
		if got := binary.BigEndian.Uint32(b); got != waiting[at][0] {
			t.Fatalf("%v: %d, want %d", at, got, waiting[at][0])
		}
		if waiting[at] = waiting[at][1:]; len(waiting[at]) == 0 {
			delete(waiting, at)
		}
		total--
		delete(passed, at)
		for other := range waiting {
			if passed[other]++; other != at && passed[other] > 400 {
				t.Fatalf("%v waits for more than one datagram of each other address", other)
			}
		}
	}
}

func TestFullFairQueueAcceptsADatagramOfANewAddress(t *testing.T) {
	var turns datapath.Turns
	addr := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 1)
	}
	n := 0
	for i := range 1000 {
		for range 2 * datapath.TurnsEach {
			if turns.Push(addr(i), nil) {
				n++
			}
		}
	}
	if flooders := datapath.TurnsAll / datapath.TurnsEach; n != datapath.TurnsAll+1000-flooders {
		t.Errorf("%d datagrams wait", n)
	}
	if !turns.Push(addr(5000), []byte("honest")) {
		t.Error("no room for one that sends nothing else")
	}
	for i := range 1001 {
		if at, _, _ := turns.Pop(); at == addr(5000) {
			if i != 1000 {
				t.Errorf("it was served after %d", i)
			}
			return
		}
	}
	t.Error("it was not served")
}

// The bucket agrees with a slow and simple reference.
func TestBucketAgreesWithASimpleTokenBucket(t *testing.T) {
	rng := rand.New(rand.NewPCG(24, 2))
	for range 200 {
		rate, burst := int64(1+rng.IntN(1000)), int64(1+rng.IntN(100))
		interval := int64(time.Second) / rate
		var b datapath.Bucket
		now, debt := int64(rng.IntN(1e9)), int64(0) // debt: time until the bucket is full again
		for range 2000 {
			step := rng.Int64N(2*interval + 1)
			now, debt = now+step, max(0, debt-step)
			want := debt+interval <= burst*interval
			if want {
				debt += interval
			}
			if got := b.Take(time.Duration(now), rate, burst); got != want {
				t.Fatalf("rate %d, burst %d: took a token: %t, want %t", rate, burst, got, want)
			}
		}
	}
}

// --- packets to the in-process endpoint

func datagramFrom(from netip.Addr, text string) []byte {
	return packettest.Build(packettest.IP{Src: from, Dst: endpointSeen}, packettest.UDP{SrcPort: 12345, DstPort: 12345, Data: []byte(text)})
}

// Only the peer's gateway may send messages, at a limited rate. No other packets of the peer use
// up that rate.
func TestPortAcceptsOnlyMessagesOfThePeersGateway(t *testing.T) {
	gateway, probe := netip.MustParseAddr("10.71.0.0"), netip.MustParseAddr("10.90.8.1")
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	e := newEngine(t, func() natengine.Peer {
		p := rules("b")
		p.RemoteExternal = []netip.Prefix{netip.MustParsePrefix("10.90.8.0/24")}
		return p
	}())
	link := newScript()
	d := datapath.New(link, bind.New(), e, local, datapath.Options{})
	defer d.Close()
	if err := d.SetPeers([]datapath.Peer{{State: e.Peers()[0], Key: newKey(9).public, Gateway: [2]netip.Addr{gateway, probe}}}); err != nil {
		t.Fatal(err)
	}
	port := listen(t, local)
	hangs := time.AfterFunc(time.Minute, port.Close)
	defer hangs.Stop()
	write := func(packets ...[]byte) {
		t.Helper()
		if _, err := d.Write(behindOffset(packets...), offset); err != nil {
			t.Fatal(err)
		}
	}
	counts := func(why natengine.Drop, want int) {
		t.Helper()
		if got := e.Peers()[0].Drops(natengine.Inbound, why); got != uint64(want) {
			t.Errorf("%s counted %d times: want %d", why, got, want)
		}
	}
	const flood = 2000
	for range flood { // messages from a pod, and all other kinds of packets that a pod may send
		write(datagramFrom(podB, "flood"), echo4(podB, endpointSeen, 1, 1))
	}
	counts(natengine.DropLocalSource, flood)
	counts(natengine.DropBadChecksum, 0)
	rate := e.Peers()[0].Drops(natengine.Inbound, natengine.DropLocalRate)
	if rate == 0 {
		t.Error("echoes are not limited")
	}
	bad := datagramFrom(gateway, "bad")
	bad[len(bad)-1]++
	write(datagramFrom(gateway, "first"), bad, datagramFrom(gateway, "second"))
	counts(natengine.DropBadChecksum, 1)
	for _, want := range []string{"first", "second"} {
		if m, from, err := port.Receive(); err != nil || string(m) != want || from != at(gateway, 12345) {
			t.Errorf("%q from %v, %v: want %q", m, from, err, want)
		}
	}
	start := time.Now()
	for range flood { // messages from the gateway
		write(datagramFrom(gateway, "flood"))
	}
	most := datapath.MessageBurst + 1 + int(time.Since(start)*datapath.MessageRate/time.Second)
	over := int(e.Peers()[0].Drops(natengine.Inbound, natengine.DropLocalRate) - rate)
	if over < flood-most {
		t.Errorf("%d of %d refused: at most %d may pass", over, flood, most)
	}
	for range datapath.TurnsEach { // further messages found the queue full
		if m, _, err := port.Receive(); string(m) != "flood" || err != nil {
			t.Fatalf("%q, %v", m, err)
		}
	}
	if err := port.Send([]byte("PING"), at(probe, 12345), 0); err != nil {
		t.Fatal(err)
	}
	b := newBuffers(8, 2048)
	read(t, d, b)
	query := header.IPv4(b.packet(0)) // creates a flow; without it, the answers below would be dropped
	answer := func(text string) []byte {
		return packettest.Build(packettest.IP{Src: probe, Dst: netip.AddrFrom4(query.SourceAddress().As4())},
			packettest.UDP{SrcPort: 12345, DstPort: header.UDP(query.Payload()).SourcePort(), Data: []byte(text)})
	}
	write(answer("answer"))
	if m, from, _ := port.Receive(); string(m) != "answer" || from != at(probe, 12345) {
		t.Errorf("%q from %v: want the answer, which a flood of PINGs does not hold up", m, from)
	}
	write(answer(string(make([]byte, 1025))))
	if m, _, _ := port.Receive(); len(m) != 1024 {
		t.Errorf("a message of 1025 octets came as %d", len(m))
	}
	if len(link.written) != 0 {
		t.Errorf("%d packets to the link", len(link.written))
	}
}

// Every packet that the endpoint does not use is counted as dropped, for its peer and with a
// reason. If RFC 1122 requires it, the sender gets an ICMP error.
func TestEndpointCountsPacketsThatItDoesNotAnswer(t *testing.T) {
	ip := packettest.IP{Src: podB, Dst: endpointSeen}
	raw := func(proto uint8, data ...byte) []byte {
		return packettest.Build(ip, packettest.Raw{Proto: proto, Data: data})
	}
	icmp := func(kind byte) []byte {
		b := append([]byte{kind, 0, 0, 0}, make([]byte, 16)...)
		var sum uint32
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
		binary.BigEndian.PutUint16(b[2:], ^uint16(sum))
		return raw(1, b...)
	}
	damaged := func(p []byte) []byte { p[len(p)-1]++; return p }
	for _, tc := range []struct {
		name     string
		p        []byte
		want     natengine.Drop
		answered bool
	}{
		{"echo", echo4(podB, endpointSeen, 1, 1), natengine.DropNone, true},
		{"echo with a bad timestamp option", packettest.Build(packettest.IP{Src: podB, Dst: endpointSeen, Options: []byte{68, 5, 5, 0, 0}},
			packettest.Echo{ID: 1, Data: []byte("x")}), natengine.DropMalformed, true},
		{"UDP port", udp4(at(podB, 9), at(endpointSeen, 53), []byte("x")), natengine.DropLocalPort, true},
		{"first fragment alone", fragments(udp4(at(podB, 9), at(endpointSeen, 53), make([]byte, 100)), 48)[0], natengine.DropNone, false}, // held until the datagram is complete
		{"TCP", tcp4(at(podB, 9), at(endpointSeen, 22), 1, 2, nil), natengine.DropLocalProtocol, true},
		{"IGMP", raw(2, 0x16, 0, 0, 0, 0, 0, 0, 0), natengine.DropLocalProtocol, false},
		{"protocol 255", raw(255, 1, 2, 3, 4), natengine.DropLocalProtocol, false},
		{"ICMP timestamp", icmp(13), natengine.DropLocalProtocol, false},
		{"damaged echo", damaged(echo4(podB, endpointSeen, 1, 1)), natengine.DropBadChecksum, false},
		{"damaged UDP", damaged(udp4(at(podB, 9), at(endpointSeen, 53), []byte("xy"))), natengine.DropBadChecksum, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			e, link := newEngine(t), newScript(plain(udp4(at(podA, 1), at(podB, 2), []byte("end"))))
			d := newDevice(t, link, e, datapath.Options{})
			if _, err := d.Write(behindOffset(tc.p), offset); err != nil {
				t.Fatal(err)
			}
			for _, why := range natengine.Drops() {
				want := uint64(0)
				if why == tc.want {
					want = 1
				}
				if got := e.Peers()[0].Drops(natengine.Inbound, why); got != want {
					t.Errorf("%s counted %d times: want %d", why, got, want)
				}
			}
			b := newBuffers(8, 2048)
			n := read(t, d, b)
			if answered := n == 2; answered != tc.answered || !bytes.HasSuffix(b.packet(n-1), []byte("end")) {
				t.Errorf("%d packets back", n-1)
			}
			if len(link.written) != 0 {
				t.Error("a packet to the endpoint reached the link")
			}
		})
	}
}

// A peer can choose its source addresses, and so the destinations of answers. All answers to a peer
// must share one queue anyway.
func TestAnswersToAllAddressesOfAPeerShareOneQueue(t *testing.T) {
	local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	var flooder, honest datapath.Sender
	for i := range byte(datapath.OtherBurst) {
		local.DeliverFrom(&flooder, echo4(netip.AddrFrom4([4]byte{10, 71, 0, 1 + i}), self, 1, 1))
	}
	from := netip.MustParseAddr("10.72.0.1")
	local.DeliverFrom(&honest, echo4(from, self, 1, 1))
	b, before := make([]byte, 2048), 0
	for {
		n := local.Next(b)
		if n == 0 {
			t.Fatal("no answer")
		}
		if netip.AddrFrom4([4]byte(b[16:20])) == from {
			break
		}
		before++
	}
	if before > 1 {
		t.Errorf("the answer waits for %d of another peer; want 1 at most", before)
	}
}

// The limit of a peer does not depend on how its messages are interleaved with other messages.
// For example, anybody may send messages with an unknown index in between.
func TestEndpointRateLimitHoldsForInterleavedMessages(t *testing.T) {
	inPair(t, func(t *testing.T, p *pair, a, b *end) {
		external := netip.MustParsePrefix(pairPlan[1].external)
		withEndpoint := rulesOf(1, 0)
		withEndpoint.Endpoints = []natengine.Endpoint{{Real: self, Seen: external.Addr().Next()}}
		if err := b.engine.SetPeers([]natengine.Peer{withEndpoint}); err != nil {
			t.Fatal(err)
		}
		local, err := datapath.NewLocal(self, netip.Addr{}, 1420)
		if err != nil {
			t.Fatal(err)
		}
		b.Attach(local)
		echo := packettest.Build(packettest.IP{Src: podOf(0), Dst: external.Addr().Next()}, packettest.Echo{ID: 1, Data: make([]byte, 30)})
		r, from := datapath.NewReceiver(b.Tunnel), b.wire.Endpoint(a.place)
		const echoes = 192
		for _, between := range []bool{false, true} {
			before := b.drops(natengine.Inbound, natengine.DropLocalRate)
			var batch [][]byte
			for i := range echoes {
				batch = append(batch, a.Seal(b.key.public, slices.Clone(echo)))
				if between {
					m := a.Seal(b.key.public, make([]byte, 64))
					binary.LittleEndian.PutUint32(m[4:], uint32(i)<<8|7)
					batch = append(batch, m)
				}
			}
			r.Receive(batch, from)
			if got := b.drops(natengine.Inbound, natengine.DropLocalRate) - before; got != echoes-datapath.OtherBurst {
				t.Errorf("messages in between: %t: %d of %d refused, want all but %d", between, got, echoes, datapath.OtherBurst)
			}
			time.Sleep(time.Second) // the bucket is full again
		}
	})
}
