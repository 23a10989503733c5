package gateway

import (
	"crypto/ecdh"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/noise"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

// farPeer is the gateway of a peer that has a session with our gateway.
type farPeer struct {
	key     *ecdh.PrivateKey
	index   uint32 // receiver index of messages to this gateway
	session *noise.Session
	at      netip.Prefix // the peer's pods as our cluster sees them; its gateway has the network address
}

// ping returns an encrypted PING with the source address src.
func (f *farPeer) ping(src netip.Addr) []byte {
	text := `{"clusterID":"11111111-0000-4000-8000-000000000000","msgType":"PING","timeStamp":"2026-01-01T00:00:00.000000001Z"}`
	return f.session.SealPadded(packettest.Build(packettest.IP{Src: src, Dst: netip.MustParseAddr("10.251.0.1")},
		packettest.UDP{SrcPort: 12345, DstPort: 12345, Data: []byte(text)}))
}

// farSocket is the UDP socket that the gateways of all peers share.
type farSocket struct {
	net.Conn // nil; the methods below are enough
	wire     *memlink.Bind
	gateway  netip.AddrPort
	index    uint32 // sender index of the last initiation
	answers  chan []byte

	mu   sync.Mutex
	data map[uint32]int // number of received data messages with content, by receiver index
}

func (s *farSocket) SetReadDeadline(time.Time) error { return nil }

func (s *farSocket) Write(m []byte) (int, error) {
	if m[0] == noise.InitiationType {
		s.index = binary.LittleEndian.Uint32(m[4:])
	}
	return len(m), s.wire.Send([][]byte{m}, s.wire.Endpoint(s.gateway))
}

// Read waits for a handshake message. If none arrives, it fails after a while.
func (s *farSocket) Read(b []byte) (int, error) {
	select {
	case m := <-s.answers:
		return copy(b, m), nil
	case <-time.After(100 * time.Millisecond):
		return 0, os.ErrDeadlineExceeded
	}
}

// receive handles the arriving messages until the socket is closed.
func (s *farSocket) receive(next func(*bind.Batch, bool) error) {
	var batch bind.Batch
	for next(&batch, true) == nil {
		for !batch.Empty() {
			m, _ := batch.Next()
			switch {
			case m[0] != noise.DataType:
				select {
				case s.answers <- append([]byte(nil), m...):
				default: // no reader waits for this handshake message
				}
			case len(m) > noise.HeaderLen+noise.TagLen:
				s.mu.Lock()
				s.data[binary.LittleEndian.Uint32(m[4:])]++
				s.mu.Unlock()
			}
		}
	}
}

func (s *farSocket) received(index uint32) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.data[index]
}

// crowd is a gateway without a kernel, which has real sessions with many peers.
type crowd struct {
	*gateway
	end     *tunnelEnd
	peers   []peer
	far     []*farPeer
	socket  *farSocket
	network *memlink.Network
}

func newCrowd(t *testing.T, peers int) *crowd {
	t.Helper()
	all := crowdOf(peers)
	far := make([]*farPeer, peers)
	for i := range all {
		far[i] = &farPeer{key: noise.NewKey(), at: all[i].Remote.PodSeen}
		all[i].PublicKey = [32]byte(far[i].key.PublicKey().Bytes())
	}
	gw := decided(t, fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000", Peers: all})
	g := &gateway{log: quiet, engine: natengine.New(natengine.Config{Self4: fabric.GatewayAddr, Self6: fabric.GatewayAddr6})}
	s, rules := survey{all: true, peers: make([]peer, len(gw.Peers))}, make([]natengine.Peer, len(gw.Peers))
	for i, p := range gw.Peers {
		s.peers[i].GatewayPeer = p
		s.other, rules[i] = append(s.other, i), rulesFor(p, 1440)
	}
	if err := g.engine.SetPeers(rules); err != nil {
		t.Fatal(err)
	}
	for i := range s.peers {
		s.peers[i].state = g.engine.Peer(s.peers[i].ID)
	}

	network := &memlink.Network{}
	local, err := datapath.NewLocal(fabric.GatewayAddr, fabric.GatewayAddr6, 1440)
	if err != nil {
		t.Fatal(err)
	}
	port, err := local.Listen(fabric.ProbePort, check.MaxMessage+1)
	if err != nil {
		t.Fatal(err)
	}
	e := &tunnelEnd{ // its check sends no PINGs, so every message that it sends is an answer
		Tunnel:  datapath.New(memlink.NewLink("mem", 1440), network.Bind(netip.MustParseAddr("198.51.100.1")), g.engine, local, datapath.Options{}),
		checker: check.Start(port, check.Options{Log: quiet, Hold: make(chan struct{})}),
	}
	g.tunnels = []*tunnelEnd{e}
	t.Cleanup(g.closeTunnels)
	e.observe = e.checker.Observe
	private := noise.NewKey()
	c := Config{PrivateKey: Key(private.Bytes())}
	if err := e.Up(fabric.TunnelKey(c.PrivateKey, 0), 5871); err != nil {
		t.Fatal(err)
	}
	if errs := g.applyTunnels(c, &s); len(errs) > 0 {
		t.Fatal(errs)
	}

	socket := &farSocket{wire: network.Bind(netip.MustParseAddr("192.0.2.1")), gateway: netip.MustParseAddrPort("198.51.100.1:5871"),
		answers: make(chan []byte, 100), data: make(map[uint32]int)}
	sockets, _, err := socket.wire.Listen(5871)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	t.Cleanup(func() {
		socket.wire.Close()
		group.Wait()
	})
	group.Go(func() { socket.receive(sockets[0]) })
	// All peers are behind one address, as behind a Service that hides their addresses.
	e.SetRelays(func(netip.Addr) bool { return true })
	for _, f := range far {
		for end := time.Now().Add(patience); f.session == nil; {
			if f.session, err = noise.Connect(socket, f.key, private.PublicKey(), [32]byte{}); err != nil && time.Now().After(end) {
				t.Fatal(err)
			}
		}
		f.index = socket.index
	}
	return &crowd{g, e, s.peers, far, socket, network}
}

// A pod and the gateway of one peer flood our gateway with PINGs. Every PING of every other peer
// must be answered. Every message of the flood must be answered, or counted as dropped for its
// peer.
func TestPINGFloodOfOnePeerDoesNotSlowOtherPeers(t *testing.T) {
	const (
		peers  = 1000
		rounds = 20 // number of rounds; in each one, the following numbers of PINGs are sent:
		flood  = 100
		honest = peers / rounds
	)
	c := newCrowd(t, peers)
	e, far, socket := c.end, c.far, c.socket
	hostile, state := far[0], c.peers[0].state
	dropped := func(why natengine.Drop) int { return int(state.Drops(natengine.Inbound, why)) }
	counted := func() int {
		return dropped(natengine.DropReceiveQueue) + dropped(natengine.DropLocalSource) + dropped(natengine.DropLocalRate) + dropped(natengine.DropLocalQueue) +
			int(e.checker.Answered())
	}
	begin, sent := time.Now(), 0
	for round := range rounds {
		for i := range flood {
			messages := [][]byte{hostile.ping(hostile.at.Addr().Next()), hostile.ping(hostile.at.Addr())}
			if at := round*honest + i*honest/flood; at > 0 && i*honest%flood == 0 {
				messages = append(messages, far[at].ping(far[at].at.Addr()))
			}
			if err := socket.wire.Send(messages, socket.wire.Endpoint(socket.gateway)); err != nil {
				t.Fatal(err)
			}
			sent += len(messages)
		}
		// Wait here, so that no queue of the network overflows.
		for end := time.Now().Add(patience); counted() < sent; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%d of %d messages are answered or counted", counted(), sent)
			}
		}
	}
	if n := counted(); n != sent {
		t.Errorf("%d messages are answered or counted, of %d", n, sent)
	}
	if n, early := dropped(natengine.DropLocalSource), dropped(natengine.DropReceiveQueue); n > rounds*flood || n+early < rounds*flood {
		t.Errorf("%d of the pod's %d messages are counted as local_source, %d of the peer as receive_queue", n, rounds*flood, early)
	}
	passed := int(e.checker.Answered()) - (peers - 1) // answered PINGs of the hostile gateway
	if most := datapath.MessageBurst + 1 + int(time.Since(begin)*datapath.MessageRate/time.Second); passed > most {
		t.Errorf("%d PINGs of the hostile gateway were answered, want %d at most", passed, most)
	}
	for i, f := range far[1:] {
		for end := time.Now().Add(patience); socket.received(f.index) == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond) // another goroutine sends the answers
		}
		if n := socket.received(f.index); n != 1 {
			t.Fatalf("peer %d: %d answers", i+1, n)
		}
	}
	for i, p := range c.peers {
		for _, why := range natengine.Drops() {
			if n := p.state.Drops(natengine.Inbound, why); n != 0 && p.state != state {
				t.Errorf("peer %s: %d dropped: %v", fmt.Sprint(i), n, why)
			}
		}
	}
	if n := c.network.Overflowed(); n != 0 {
		t.Errorf("%d datagrams were lost in the network", n)
	}
}

// stepped returns now as if the wall clock had been set forward by d, in whole seconds, after the
// process started. The monotonic reading stays.
func stepped(t *testing.T, now time.Time, d time.Duration) time.Time {
	t.Helper()
	is := now
	// If a time has a monotonic reading, bits 30 and up of its first word are the seconds of the
	// wall clock.
	*(*uint64)(unsafe.Pointer(&is)) += uint64(d/time.Second) << 30
	if is.Sub(now) != 0 || is.Round(0).Sub(now.Round(0)) != d {
		t.Fatal("package time keeps times in another way")
	}
	return is
}

// A step of the wall clock changes nothing: peers with a valid session count neither as down nor
// as away, and a peer whose session has expired counts as both.
func TestAWallClockStepDisconnectsNoPeer(t *testing.T) {
	c := newCrowd(t, 30)
	for _, f := range c.far { // the first message confirms the session
		if err := c.socket.wire.Send([][]byte{f.ping(f.at.Addr())}, c.socket.wire.Endpoint(c.socket.gateway)); err != nil {
			t.Fatal(err)
		}
	}
	for end := time.Now().Add(patience); c.end.checker.Answered() < uint64(len(c.far)); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no answers")
		}
	}
	stats := c.end.Stats()
	for _, d := range []time.Duration{0, 4 * time.Minute, -4 * time.Minute, 24 * time.Hour, -24 * time.Hour} {
		for _, old := range []bool{false, true} {
			now := time.Now()
			if old {
				now = now.Add(check.SessionGone + time.Minute)
			}
			now = stepped(t, now, d)
			for _, p := range c.peers {
				was := session{since: now.Add(-time.Hour), heard: now}
				if is := was.updatedFrom(stats[p.PublicKey], now); is.down != old {
					t.Fatalf("clock stepped by %v, old session %t: down %t", d, old, is.down)
				}
			}
			away := make(map[[32]byte]bool) // peers that Sessions returns for a handshake
			for second := range 10 {
				try, _ := c.end.checker.Sessions(stats, now.Add(time.Duration(second)*time.Second))
				for _, key := range try {
					away[key] = true
				}
			}
			if old != (len(away) == len(c.peers)) || !old && len(away) > 0 {
				t.Fatalf("clock stepped by %v, old session %t: %d peers are away", d, old, len(away))
			}
		}
	}
}
