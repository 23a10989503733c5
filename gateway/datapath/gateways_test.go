package datapath_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/curve25519"
	"golang.zx2c4.com/wireguard/device"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/natengine"
)

// These tests run two gateways without a kernel. Everything between two pods is our code or
// wireguard-go's, with real handshakes.
//
//	pods, node (gVisor) ⇄ link ⇄ Tunnel ⇄ memory ⇄ Tunnel ⇄ link ⇄ pods, node

const (
	tunnelMTU = 1420
	podMTU    = 1500 // MTU of the pods; only the MSS clamp keeps their TCP segments small enough for the tunnel
)

// A plan is the address plan of two clusters, a and b. The notation is that of docs/liqo-v0.md.
type plan struct {
	name         string
	pods         [2]string // Pa, Pb
	podsSeen     [2]string // Pa@B, Pb@A
	externalSeen [2]string // Xa@B, Xb@A
	node         [2]string // address of a node, outside the PodCIDR
	external     [2]string // address of a mapped endpoint
}

var plans = []plan{
	{
		name:         "same pods, same remapped range, different external sizes",
		pods:         [2]string{"10.244.0.0/16", "10.244.0.0/16"},
		podsSeen:     [2]string{"10.71.0.0/16", "10.71.0.0/16"},
		externalSeen: [2]string{"10.90.0.0/24", "10.90.0.0/20"},
		node:         [2]string{"172.16.0.9", "172.16.1.9"},
		external:     [2]string{"10.0.50.5", "10.0.50.6"},
	},
	{
		name:         "pods of different sizes in the same remapped range, one external not remapped",
		pods:         [2]string{"10.244.0.0/16", "10.244.0.0/18"},
		podsSeen:     [2]string{"10.71.0.0/16", "10.71.0.0/18"},
		externalSeen: [2]string{"10.245.0.0/16", "10.90.0.0/27"},
		node:         [2]string{"172.16.0.9", "172.16.0.9"},
		external:     [2]string{"10.0.50.5", "10.0.50.5"},
	},
	{
		name:         "IPv6, same pods, same remapped range",
		pods:         [2]string{"fd00:a::/64", "fd00:a::/64"},
		podsSeen:     [2]string{"fd00:c::/64", "fd00:c::/64"},
		externalSeen: [2]string{"fd00:e::/64", "fd00:e::/112"},
		node:         [2]string{"fd00:16::9", "fd00:16::9"},
		external:     [2]string{"fd00:50::5", "fd00:50::5"},
	},
}

var self6 = netip.MustParseAddr("fd00:ffff::1")

// A side is one cluster with its gateway.
type side struct {
	host   *memlink.Host
	link   *memlink.Link
	engine *natengine.Engine
	local  *datapath.Local
	tunnel *datapath.Tunnel
	peer   datapath.Peer
	rules  natengine.Peer

	pod, pod2, node, external, self netip.Addr // addresses in this cluster
}

// seenAddr returns an address of this cluster as the other cluster sees it.
func (s *side) seenAddr(a netip.Addr) netip.Addr {
	for _, e := range s.rules.Endpoints {
		if e.Real == a {
			return e.Seen
		}
	}
	if seen, ok := s.rules.Pods[0].Map(a); ok {
		return seen
	}
	return s.rules.Pods[0].To.Addr() // NAPT
}

func startGateways(t testing.TB, network *memlink.Network, p plan, o datapath.Options) (a, b *side) {
	t.Helper()
	sides := [2]*side{}
	keys := [2]key{newKey(1), newKey(2)}
	wan := [2]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	for i, id := range []string{"b", "a"} { // the ID of each side's peer
		j := 1 - i
		pods, podsSeen := netip.MustParsePrefix(p.pods[i]), netip.MustParsePrefix(p.podsSeen[i])
		external := netip.MustParsePrefix(p.externalSeen[i])
		remotePods, remoteExternal := netip.MustParsePrefix(p.podsSeen[j]), netip.MustParsePrefix(p.externalSeen[j])
		s := &side{
			pod:      pods.Addr().Next().Next(),
			pod2:     pods.Addr().Next().Next().Next(),
			node:     netip.MustParseAddr(p.node[i]),
			external: netip.MustParseAddr(p.external[i]),
			self:     self,
			link:     memlink.NewLink("mem", tunnelMTU),
			engine:   natengine.New(natengine.Config{Self4: self, Self6: self6}),
		}
		if pods.Addr().Is6() {
			s.self = self6
		}
		s.rules = natengine.Peer{
			ID: id, MSS: tunnelMTU - 40,
			RemotePods: []netip.Prefix{remotePods}, RemoteExternal: []netip.Prefix{remoteExternal},
			Pods:     []natengine.Remap{{From: pods, To: podsSeen}},
			External: []netip.Prefix{external},
			Endpoints: []natengine.Endpoint{
				{Real: s.self, Seen: external.Addr().Next()},
				{Real: s.external, Seen: external.Addr().Next().Next()},
			},
		}
		if err := s.engine.SetPeers([]natengine.Peer{s.rules}); err != nil {
			t.Fatal(err)
		}
		var err error
		s.host, err = memlink.NewHost(s.link, memlink.HostOptions{
			Addrs: []netip.Addr{s.pod, s.pod2, s.node, s.external}, TSO: true, MTU: podMTU,
		})
		if err != nil {
			t.Fatal(err)
		}
		if s.local, err = datapath.NewLocal(self, self6, tunnelMTU); err != nil {
			t.Fatal(err)
		}
		logger := device.NewLogger(device.LogLevelError, "gateway of "+map[string]string{"b": "a", "a": "b"}[id]+": ")
		logger.Errorf = func(format string, args ...any) { t.Errorf(format, args...) }
		o.Logger = logger
		s.tunnel = datapath.New(s.link, network.Bind(wan[i]), s.engine, s.local, o)
		if err := s.tunnel.Up(keys[i].private, 5871); err != nil {
			t.Fatal(err)
		}
		s.peer = datapath.Peer{State: s.engine.Peers()[0], Key: keys[j].public, Endpoint: netip.AddrPortFrom(wan[j], 5871),
			Gateway: [2]netip.Addr{remotePods.Addr(), remoteExternal.Addr().Next()}}
		if err := s.tunnel.SetPeers([]datapath.Peer{s.peer}); err != nil {
			t.Fatal(err)
		}
		sides[i] = s
		t.Cleanup(func() {
			s.host.Close()
			s.tunnel.Close() // also closes link and endpoint
		})
	}
	meet(t, sides[0], sides[1])
	return sides[0], sides[1]
}

// meet makes a start the first session with b.
func meet(t testing.TB, a, b *side) {
	t.Helper()
	a.tunnel.Handshake(a.peer.Key)
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		met := 0
		for _, s := range []*side{a, b} {
			if !s.tunnel.Stats()[s.peer.Key].Handshake.IsZero() {
				met++
			}
		}
		if met == 2 {
			return
		}
	}
	t.Fatal("no session after a minute")
}

type key struct{ private, public [32]byte }

func newKey(seed byte) key {
	private := [32]byte(bytes.Repeat([]byte{seed}, 32))
	private[0] &= 248
	private[31] = private[31]&127 | 64
	public, _ := curve25519.X25519(private[:], curve25519.Basepoint)
	return key{private, [32]byte(public)}
}

// checkHealthy fails the test if any packet was damaged on its way.
func checkHealthy(t *testing.T, sides ...*side) {
	t.Helper()
	for _, s := range sides {
		if n := s.host.BadHeaders(); n != 0 {
			t.Errorf("cluster of peer %s: %d packets with a wrong virtio header", s.rules.ID, n)
		}
		if n := s.host.BadChecksums(); n != 0 {
			t.Errorf("cluster of peer %s: %d packets with a wrong checksum", s.rules.ID, n)
		}
	}
}

// lossReport describes all packets that were dropped anywhere; "" if there are none.
func lossReport(network *memlink.Network, sides ...*side) string {
	var out []string
	add := func(what string, n uint64) {
		if n > 0 {
			out = append(out, fmt.Sprintf("%s: %d", what, n))
		}
	}
	add("network", network.Lost()+network.Overflowed())
	for _, s := range sides {
		add("link queue of peer "+s.rules.ID, s.link.Dropped())
		add("too big at peer "+s.rules.ID, s.host.TooBig())
		for _, dir := range []natengine.Direction{natengine.Outbound, natengine.Inbound} {
			for _, d := range natengine.Drops() {
				add(fmt.Sprintf("%s %s at peer %s", dir, d, s.rules.ID), drops(s.engine, dir, d))
			}
		}
	}
	return strings.Join(out, ", ")
}

// transfer opens a connection and sends a different stream of size octets in each direction at
// the same time. It compares hashes.
func transfer(ctx context.Context, client *side, from netip.Addr, server *side, to netip.Addr, port uint16, size int) error {
	l, err := server.host.ListenTCP(netip.AddrPortFrom(to, port))
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer l.Close()
	streams := [2][]byte{make([]byte, size), make([]byte, size)}
	for i, b := range streams {
		rand.NewChaCha8([32]byte{byte(port), byte(port >> 8), byte(i)}).Read(b)
	}
	both := func(c net.Conn, send, want []byte) error {
		sent := make(chan error, 1)
		go func() { _, err := c.Write(send); sent <- err }()
		h := sha256.New()
		n, err := io.CopyN(h, c, int64(size))
		if err != nil {
			return fmt.Errorf("after %d octets: %w", n, err)
		}
		if err := <-sent; err != nil {
			return err
		}
		if [32]byte(h.Sum(nil)) != sha256.Sum256(want) {
			return fmt.Errorf("what arrived differs from what was sent")
		}
		return nil
	}
	type end struct {
		conn net.Conn
		err  error
	}
	served := make(chan end, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			err = both(c, streams[1], streams[0])
		}
		served <- end{c, err}
	}()
	c, err := client.host.DialTCP(ctx, from, netip.AddrPortFrom(server.seenAddr(to), port))
	if err != nil {
		return fmt.Errorf("dial: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	err = both(c, streams[0], streams[1])
	if err != nil {
		c.Close()
		l.Close()
	}
	s := <-served
	if s.conn != nil {
		s.conn.Close()
	}
	if err != nil {
		return fmt.Errorf("client: %w", err)
	}
	if s.err != nil {
		return fmt.Errorf("server: %w", s.err)
	}
	return nil
}

// transfers runs several transfers between pods at the same time, in both directions.
func transfers(t *testing.T, a, b *side, flows, size int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	var wg sync.WaitGroup
	for i := range flows {
		wg.Go(func() {
			client, server := a, b
			if i%2 == 1 {
				client, server = b, a
			}
			if err := transfer(ctx, client, client.pod, server, server.pod2, uint16(8000+i), size); err != nil {
				t.Errorf("flow %d: %v", i, err)
			}
		})
	}
	wg.Wait()
}

func TestTwoGatewaysCarryTCPUnaltered(t *testing.T) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			network := &memlink.Network{}
			a, b := startGateways(t, network, p, datapath.Options{})
			size := 3 << 20
			if raceEnabled {
				size >>= 2
			}
			transfers(t, a, b, 4, size)
			checkHealthy(t, a, b)
			for _, s := range []*side{a, b} {
				sent, received := s.host.Superpackets()
				if sent == 0 || received == 0 {
					t.Errorf("superpackets sent %d, received %d: want both", sent, received)
				}
			}
			// b receives every octet that a has sent through the tunnel.
			if l := lossReport(network, a, b); l != "" {
				t.Logf("lost on the way and sent again by TCP: %s", l)
			} else {
				var ap, ab, bp, bb uint64
				for end := time.Now().Add(time.Minute); time.Now().Before(end); { // the last acknowledgements may still be on their way
					ap, ab = a.engine.Peers()[0].Traffic(natengine.Outbound)
					bp, bb = b.engine.Peers()[0].Traffic(natengine.Inbound)
					if ap == bp && ab == bb {
						return
					}
					time.Sleep(10 * time.Millisecond)
				}
				t.Errorf("a has sent %d packets, %d octets; b has received %d, %d", ap, ab, bp, bb)
			}
		})
	}
}

func TestTwoGatewaysCarryTCPOfNodesAndExternalEndpoints(t *testing.T) {
	eachPlan(t, nodesAndExternalEndpoints)
}

// eachPlan runs a test for each address plan, with two new gateways.
func eachPlan(t *testing.T, f func(t *testing.T, a, b *side)) {
	for _, p := range plans {
		t.Run(p.name, func(t *testing.T) {
			a, b := startGateways(t, &memlink.Network{}, p, datapath.Options{})
			f(t, a, b)
			checkHealthy(t, a, b)
		})
	}
}

func nodesAndExternalEndpoints(t *testing.T, a, b *side) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for i, f := range []struct {
		client *side
		from   netip.Addr
		server *side
		at     netip.Addr
	}{
		{a, a.node, b, b.pod},     // NAPT to the network address of Pa@B
		{b, b.node, a, a.pod},     // the same from b to a
		{a, a.pod, b, b.external}, // a mapped endpoint, whose replies leave as the mapped address
		{b, b.node, a, a.external},
	} {
		if err := transfer(ctx, f.client, f.from, f.server, f.at, uint16(9000+i), 1<<20); err != nil {
			t.Errorf("%v -> %v: %v", f.from, f.at, err)
		}
	}
}

func TestTwoGatewaysClampTheMSS(t *testing.T) {
	network := &memlink.Network{}
	a, b := startGateways(t, network, plans[0], datapath.Options{})
	var syns, wrong atomic.Int64
	for _, s := range []*side{a, b} {
		s.link.OnReceive(func(bufs [][]byte) error {
			p := bytes.Join(bufs, nil)[10:]
			if ip := header.IPv4(p); ip.TransportProtocol() == header.TCPProtocolNumber {
				h := header.TCP(ip.Payload())
				if h.Flags()&header.TCPFlagSyn != 0 {
					syns.Add(1)
					if o := header.ParseSynOptions(h.Options(), h.Flags()&header.TCPFlagAck != 0); o.MSS != tunnelMTU-40 {
						wrong.Add(1)
					}
				}
			}
			return s.host.Receive(bufs)
		})
	}
	transfers(t, a, b, 2, 1<<20)
	if syns.Load() < 4 || wrong.Load() != 0 {
		t.Errorf("%d SYNs, %d of them with an MSS other than %d", syns.Load(), wrong.Load(), tunnelMTU-40)
	}
	if n := a.host.TooBig() + b.host.TooBig(); n != 0 {
		t.Errorf("%d packets did not fit the tunnel", n)
	}
}

func TestTwoGatewaysCarryUDP(t *testing.T) {
	for _, noChecksum := range []bool{false, true} {
		t.Run(fmt.Sprintf("no checksum %v", noChecksum), func(t *testing.T) {
			network := &memlink.Network{}
			a, b := startGateways(t, network, plans[0], datapath.Options{})
			var zero, other atomic.Int64
			b.link.OnReceive(func(bufs [][]byte) error {
				if ip := header.IPv4(bytes.Join(bufs, nil)[10:]); ip.TransportProtocol() == header.UDPProtocolNumber {
					if header.UDP(ip.Payload()).Checksum() == 0 {
						zero.Add(1)
					} else {
						other.Add(1)
					}
				}
				return b.host.Receive(bufs)
			})
			for _, from := range []netip.Addr{a.pod, a.node} {
				for _, to := range []netip.Addr{b.pod, b.external} {
					if err := echoUDP(a, from, b, to, 50, noChecksum, nil); err != nil {
						t.Errorf("%v -> %v: %v", from, to, err)
					}
				}
			}
			if noChecksum && other.Load() != 0 || !noChecksum && zero.Load() != 0 {
				t.Errorf("%d datagrams without checksum arrived, %d with one", zero.Load(), other.Load())
			}
			checkHealthy(t, a, b)
		})
	}
}

// echoUDP sends n datagrams of different sizes. Each must come back, unaltered and from the
// address to which it was sent.
func echoUDP(client *side, from netip.Addr, server *side, dst netip.Addr, n int, noChecksum bool, between func(i int)) error {
	const port = 7
	s, err := server.host.ListenUDP(netip.AddrPortFrom(dst, port), noChecksum)
	if err != nil {
		return err
	}
	defer s.Close()
	go func() {
		p := make([]byte, 2000)
		for {
			n, from, err := s.ReadFrom(p)
			if err != nil {
				return
			}
			s.WriteTo(p[:n], from)
		}
	}()
	c, err := client.host.ListenUDP(netip.AddrPortFrom(from, 0), noChecksum)
	if err != nil {
		return err
	}
	defer c.Close()
	to := udpAddr(netip.AddrPortFrom(server.seenAddr(dst), port).String())
	got := make([]byte, 2000)
	for i := range n {
		want := random(1 + i*27%1390)
		if _, err := c.WriteTo(want, to); err != nil {
			return err
		}
		c.SetReadDeadline(time.Now().Add(time.Minute))
		size, from, err := c.ReadFrom(got)
		if err != nil {
			return fmt.Errorf("datagram %d: %w", i, err)
		}
		if !bytes.Equal(got[:size], want) || from.String() != to.String() {
			return fmt.Errorf("datagram %d differs, or came from %v instead of %v", i, from, to)
		}
		if between != nil {
			between(i)
		}
	}
	return nil
}

// If the configured endpoint of a peer is refused, the gateway sends nothing there until the peer
// sends from that address. Then the peer's key proves that the peer is there.
func TestNothingIsSentToARefusedEndpointUntilThePeerUsesIt(t *testing.T) {
	a, b := startGateways(t, &memlink.Network{}, plans[0], datapath.Options{})
	at := func() netip.AddrPort { return a.tunnel.Stats()[a.peer.Key].Endpoint }
	refuse := func() {
		t.Helper()
		if err := a.tunnel.SetPeers([]datapath.Peer{{State: a.peer.State, Key: a.peer.Key, Refused: true}}); err != nil {
			t.Fatal(err)
		}
	}
	configured := at()
	if configured != a.peer.Endpoint {
		t.Fatalf("b is at %v, want %v", configured, a.peer.Endpoint)
	}
	refuse()
	if got := at(); got.IsValid() {
		t.Errorf("refused, and still at %v", got)
	}
	if err := echoUDP(b, b.pod, a, a.pod, 1, false, nil); err != nil { // b sends first
		t.Fatal(err)
	}
	if got := at(); got != configured {
		t.Errorf("b has sent a packet and is at %v", got)
	}
	refuse()
	if got := at(); got != configured {
		t.Errorf("where b has shown itself is forgotten: %v", got)
	}
}

func TestTwoGatewaysAnswerPings(t *testing.T) { eachPlan(t, pings) }

func pings(t *testing.T, a, b *side) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, tc := range []struct {
		name     string
		s        *side
		from, to netip.Addr
	}{
		{"pod to pod", a, a.pod, b.seenAddr(b.pod)},
		{"and back", b, b.pod, a.seenAddr(a.pod)},
		{"node to pod", a, a.node, b.seenAddr(b.pod2)},
		{"pod to external endpoint", a, a.pod2, b.seenAddr(b.external)},
		{"pod to the gateway's endpoint", a, a.pod, b.seenAddr(b.self)},
		{"node to the gateway's endpoint", b, b.node, a.seenAddr(a.self)},
	} {
		if _, err := tc.s.host.Ping(ctx, tc.from, tc.to, random(1000)); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}

func TestTwoGatewaysCarryFragments(t *testing.T) { eachPlan(t, bigPings) }

func bigPings(t *testing.T, a, b *side) {
	a.host.SetMTU(tunnelMTU)
	b.host.SetMTU(tunnelMTU)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for _, from := range []netip.Addr{a.pod, a.node} { // translated statelessly, and by NAPT
		for _, to := range []netip.Addr{b.seenAddr(b.pod), b.seenAddr(b.external), b.seenAddr(b.self)} {
			if _, err := a.host.Ping(ctx, from, to, random(5000)); err != nil {
				t.Errorf("%v -> %v: %v", from, to, err)
			}
		}
	}
}

// The endpoints of both sides send PINGs to UDP port 12345 of the first address of the other's
// ExternalCIDR.
func TestTwoGatewaysAnswerTheConnectionCheck(t *testing.T) { eachPlan(t, connectionCheck) }

func connectionCheck(t *testing.T, a, b *side) {
	ours, theirs := listen(t, a.local), listen(t, b.local)
	go func() { // b's side answers
		for {
			m, from, err := theirs.Receive()
			if err != nil {
				return
			}
			theirs.Send(bytes.Replace(m, []byte("PING"), []byte("PONG"), 1), from, 0)
		}
	}()
	to := netip.AddrPortFrom(b.seenAddr(b.self), 12345)
	if err := ours.Send([]byte("PING"), to, 0); err != nil {
		t.Fatal(err)
	}
	lost := time.AfterFunc(time.Minute, ours.Close)
	defer lost.Stop()
	if m, from, err := ours.Receive(); err != nil || string(m) != "PONG" || from != to {
		t.Errorf("%q from %v, %v: want PONG from %s", m, from, err, to)
	}
}

func TestRuleChangeInTheMiddleOfATransferLosesNothing(t *testing.T) {
	network := &memlink.Network{}
	a, b := startGateways(t, network, plans[0], datapath.Options{})
	other := func(i int) natengine.Peer {
		return natengine.Peer{
			ID:         fmt.Sprintf("c%d", i),
			RemotePods: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(100 + i), 0, 0}), 16)},
			Pods:       a.rules.Pods,
			External:   a.rules.External,
		}
	}
	stop := make(chan struct{})
	var changes atomic.Int64
	var changing sync.WaitGroup
	changing.Go(func() {
		for {
			for _, s := range []*side{a, b} {
				peers := []natengine.Peer{s.rules}
				for i := range int(changes.Load() % 4) {
					peers = append(peers, other(i))
				}
				if changes.Load()%2 == 1 { // also change the peer itself: one more mapping
					peers[0].Endpoints = append([]natengine.Endpoint{{
						Real: netip.MustParseAddr("10.0.50.99"), Seen: peers[0].External[0].Addr().Next().Next().Next(),
					}}, peers[0].Endpoints...)
				}
				if err := s.engine.SetPeers(peers); err != nil {
					t.Errorf("rule change %d: %v", changes.Load(), err)
				}
			}
			changes.Add(1)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for round := 0; round == 0 || changes.Load() < 20 && !t.Failed(); round++ {
		var wg sync.WaitGroup
		for i, f := range []struct{ from, to netip.Addr }{{a.pod, b.pod}, {a.node, b.pod2}, {a.pod2, b.external}} {
			wg.Go(func() {
				if err := transfer(ctx, a, f.from, b, f.to, uint16(9000+3*round+i), 2<<20); err != nil {
					t.Errorf("TCP %v -> %v: %v", f.from, f.to, err)
				}
			})
		}
		wg.Go(func() { // UDP: a lost datagram is not sent again
			if err := echoUDP(a, a.node, b, b.pod, 300, false, nil); err != nil {
				t.Errorf("UDP: %v; lost: %s", err, lossReport(network, a, b))
			}
		})
		wg.Wait()
	}
	close(stop)
	changing.Wait()
	t.Logf("%d rule changes; lost: %s", changes.Load(), lossReport(network, a, b))
	for _, s := range []*side{a, b} {
		for _, dir := range []natengine.Direction{natengine.Outbound, natengine.Inbound} {
			for _, d := range natengine.Drops() {
				if n := drops(s.engine, dir, d); n != 0 {
					t.Errorf("%s %s: %d dropped", dir, d, n)
				}
			}
		}
	}
	checkHealthy(t, a, b)
}

func TestTwoGatewaysCarryTCPOverALossyReorderingNetwork(t *testing.T) {
	network := &memlink.Network{Loss: 0.01, Reorder: 0.01, Seed: 1}
	a, b := startGateways(t, network, plans[0], datapath.Options{})
	transfers(t, a, b, 2, 512<<10)
	checkHealthy(t, a, b)
	if network.Lost() == 0 || network.Reordered() == 0 {
		t.Errorf("%d lost, %d reordered: want some", network.Lost(), network.Reordered())
	}
	t.Logf("%d lost, %d reordered", network.Lost(), network.Reordered())
}

func TestTwoGatewaysCoalesceUDPIfEnabled(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that the datagrams of a burst arrive in one batch
	network := &memlink.Network{}
	a, b := startGateways(t, network, plans[0], datapath.Options{CoalesceUDP: true})
	s, err := b.host.ListenUDP(netip.AddrPortFrom(b.pod, 7), false)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	const n = 300
	to := netip.AddrPortFrom(b.seenAddr(b.pod), 7)
	got, buf := 0, make([]byte, 2000)
	for i := 0; i < n; i += 20 {
		for j := range 20 {
			// Do not use a socket: gVisor gives each datagram a random identification, which keeps
			// datagrams from being joined.
			a.link.Inject(plain(udp4(at(a.pod, 9), to, bytes.Repeat([]byte{byte(i + j)}, 400))))
		}
		for j := range 20 {
			s.SetReadDeadline(time.Now().Add(time.Minute))
			size, _, err := s.ReadFrom(buf)
			if err != nil {
				t.Fatalf("after %d datagrams: %v", got, err)
			}
			if !bytes.Equal(buf[:size], bytes.Repeat([]byte{byte(i + j)}, 400)) {
				t.Fatalf("datagram %d differs", i+j)
			}
			got++
		}
	}
	if _, received := b.host.Superpackets(); received == 0 {
		t.Error("no UDP superpacket was received")
	}
	checkHealthy(t, a, b)
}
