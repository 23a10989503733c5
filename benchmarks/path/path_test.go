// Package path benchmarks the complete data path in memory, from one cluster's TUN to the other's,
// without a kernel and without root. The sender parses, translates, segments and encrypts each
// packet, and the receiver undoes these steps.
//
//	go test -run '^$' -bench . ./benchmarks/path
//
// A benchmark's name contains its parameters. Each benchmark changes one parameter of
// size=64/nat=pod/flows=1/peers=1. A packet of 62140 octets is a TCP superpacket, which is
// segmented for the tunnel and coalesced behind it. It counts as its 45 segments. Because sender
// and receiver are one process, cpu-ns/packet is the sum of both gateways, and the packet rate
// depends on the machine's number of processors.
package path

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/curve25519"

	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/cputime"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet/packettest"
)

const (
	tunnelMTU = 1420
	segment   = 1380 // TCP payload of a tunnel packet, and UDP payload of a large packet, in octets
	segments  = 45   // of a superpacket
	inFlight  = 256  // tunnel packets
	virtioLen = 10   // struct virtio_net_hdr (Linux, include/uapi/linux/virtio_net.h)
)

// Both clusters have the same PodCIDR. node is an address in cluster a outside of the PodCIDR.
var (
	podsA   = netip.MustParsePrefix("10.244.0.0/16")
	podsB   = netip.MustParsePrefix("10.244.0.0/18")
	podsInB = netip.MustParsePrefix("10.71.0.0/16")
	podsInA = netip.MustParsePrefix("10.71.0.0/18")
	outside = [2]netip.Prefix{netip.MustParsePrefix("10.90.0.0/24"), netip.MustParsePrefix("10.91.0.0/20")} // ExternalCIDR of a at b, and of b at a
	pod     = netip.MustParseAddr("10.244.0.11")
	node    = netip.MustParseAddr("172.16.0.9")
	mapped  = netip.MustParseAddr("10.0.50.5") // a mapped endpoint of a
	remote  = netip.MustParseAddr("10.71.0.12")
	self    = netip.MustParseAddr("169.254.0.1")
)

// A load describes the traffic, which all goes to one peer.
type load struct {
	size  int // octets of the IP packet that the TUN delivers
	nat   string
	flows int
	peers int // configured; all but one are silent
}

func (l load) String() string {
	return fmt.Sprintf("size=%d/nat=%s/flows=%d/peers=%d", l.size, l.nat, l.flows, l.peers)
}

var sources = map[string]netip.Addr{"pod": pod, "node": node, "endpoint": mapped}

func loads() []load {
	base := load{size: 64, nat: "pod", flows: 1, peers: 1}
	all := []load{base}
	vary := func(change func(*load)) {
		l := base
		change(&l)
		all = append(all, l)
	}
	for _, size := range []int{512, segment + 40, segments*segment + 40} {
		vary(func(l *load) { l.size = size })
	}
	for _, nat := range []string{"node", "endpoint"} { // port translation, and a mapped endpoint
		vary(func(l *load) { l.nat = nat })
	}
	for _, flows := range []int{100, 10_000} {
		vary(func(l *load) { l.flows = flows })
		vary(func(l *load) { l.flows, l.nat = flows, "node" })
	}
	for _, peers := range []int{100, 1000} {
		vary(func(l *load) { l.peers = peers })
	}
	return all
}

func BenchmarkPath(b *testing.B) {
	for _, l := range loads() {
		b.Run(l.String(), func(b *testing.B) { run(b, l, func(*gateway) {}) })
	}
}

// run measures a load. prepare may change the sender first.
func run(b *testing.B, l load, prepare func(from *gateway)) {
	from, to := gateways(b, l.peers)
	prepare(from)
	var received atomic.Int64 // octets of payload, because coalescing changes the number of packets
	arrived := make(chan struct{}, 1)
	to.link.OnReceive(func(bufs [][]byte) error {
		n := 0
		for _, p := range bufs {
			n += len(p)
		}
		received.Add(int64(n - virtioLen))
		select {
		case arrived <- struct{}{}:
		default:
		}
		return nil
	})
	packets, per := l.packets(), int64(1)
	if l.size > tunnelMTU {
		per = segments
	}
	size := int64(len(packets[0]) - virtioLen)
	// A superpacket that arrives in parts has more headers, so there may be more octets received
	// than sent, but not fewer.
	sent, window := int64(0), max(1, inFlight/per)
	wait := func(open int64) {
		for sent*size-received.Load() > open*size {
			select {
			case <-arrived:
			case <-time.After(10 * time.Second):
				b.Fatalf("%d of %d octets arrived", received.Load(), sent*size)
			}
		}
	}
	send := func(i int) {
		wait(window - 1)
		if !from.link.Inject(packets[i%len(packets)]) {
			b.Fatal("the link's queue is full")
		}
		sent++
	}
	for i := range packets { // open each flow before the measurement
		send(i)
	}
	wait(0)
	b.SetBytes(size)
	before := cputime.Used(b)
	for i := 0; b.Loop(); i++ {
		send(i)
	}
	wait(0)
	n := float64(int64(b.N) * per)
	b.ReportMetric(n/b.Elapsed().Seconds(), "packets/s")
	b.ReportMetric(float64(int64(b.N)*size*8)/b.Elapsed().Seconds()/1e9, "Gbit/s")
	b.ReportMetric(float64((cputime.Used(b)-before).Nanoseconds())/n, "cpu-ns/packet")
	b.ReportMetric(0, "ns/op")
}

// packets returns one packet of each flow, in the form in which a TUN delivers it.
func (l load) packets() [][]byte {
	var all [][]byte
	for i := range l.flows {
		ip := packettest.IP{Src: sources[l.nat], Dst: remote}
		port := uint16(20_000 + i)
		virtio := make([]byte, virtioLen)
		if l.size <= tunnelMTU {
			data := make([]byte, l.size-28)
			all = append(all, append(virtio, packettest.Build(ip, packettest.UDP{SrcPort: port, DstPort: 80, Data: data})...))
			continue
		}
		data := make([]byte, l.size-40)
		super := packettest.Partial(packettest.Build(ip, packettest.TCP{SrcPort: port, DstPort: 80, Flags: packettest.ACK, Data: data}))
		virtio[0], virtio[1] = 1, 1                        // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4
		for at, v := range []uint16{40, segment, 20, 16} { // hdr_len, gso_size, csum_start, csum_offset
			binary.NativeEndian.PutUint16(virtio[2+2*at:], v)
		}
		all = append(all, append(virtio, super...))
	}
	return all
}

// A gateway is one side of the path, without a kernel.
type gateway struct {
	link   *memlink.Link
	tunnel *datapath.Tunnel
}

// gateways returns two connected gateways. The sender has the given number of peers.
func gateways(b *testing.B, peers int) (from, to *gateway) {
	b.Helper()
	network := &memlink.Network{}
	wan := [2]netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:5871"), netip.MustParseAddrPort("192.0.2.2:5871")}
	pods, seen := [2]netip.Prefix{podsA, podsB}, [2]netip.Prefix{podsInB, podsInA}
	endpoints := [2]netip.Addr{mapped, netip.MustParseAddr("10.0.50.6")}
	var both [2]*gateway
	for i := range both {
		j := 1 - i
		g := &gateway{link: memlink.NewLink("mem", tunnelMTU)}
		engine := natengine.New(natengine.Config{Self4: self})
		rules := []natengine.Peer{{
			ID: "the other", MSS: tunnelMTU - 40, RemotePods: []netip.Prefix{seen[j]}, RemoteExternal: []netip.Prefix{outside[j]},
			Pods: []natengine.Remap{{From: pods[i], To: seen[i]}}, External: []netip.Prefix{outside[i]},
			Endpoints: []natengine.Endpoint{{Real: self, Seen: outside[i].Addr().Next()}, {Real: endpoints[i], Seen: outside[i].Addr().Next().Next()}},
		}}
		known := []datapath.Peer{{Key: public(private(byte(j))), Endpoint: wan[j]}}
		for k := 1; i == 0 && k < peers; k++ { // silent peers
			prefix := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(64 + k>>8), byte(k), 0}), 24)
			rules = append(rules, natengine.Peer{
				ID: fmt.Sprintf("silent %04d", k), RemotePods: []netip.Prefix{prefix},
				Pods: []natengine.Remap{{From: pods[i], To: seen[i]}}, External: []netip.Prefix{outside[i]},
			})
			secret := private(byte(j))
			binary.BigEndian.PutUint32(secret[8:], uint32(k))
			known = append(known, datapath.Peer{Key: public(secret)})
		}
		if err := engine.SetPeers(rules); err != nil {
			b.Fatal(err)
		}
		for _, state := range engine.Peers() {
			known[slices.IndexFunc(rules, func(r natengine.Peer) bool { return r.ID == state.ID() })].State = state
		}
		local, err := datapath.NewLocal(self, netip.Addr{}, tunnelMTU)
		if err != nil {
			b.Fatal(err)
		}
		g.tunnel = datapath.New(g.link, network.Bind(wan[i].Addr()), engine, local, datapath.Options{})
		b.Cleanup(func() { g.tunnel.Close() })
		if err := g.tunnel.Up(private(byte(i)), wan[i].Port()); err != nil {
			b.Fatal(err)
		}
		if err := g.tunnel.SetPeers(known); err != nil {
			b.Fatal(err)
		}
		both[i] = g
	}
	key := public(private(1))
	both[0].tunnel.Handshake(key)
	for end := time.Now().Add(time.Minute); both[0].tunnel.Stats()[key].Handshake.IsZero(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatal("no session after a minute")
		}
	}
	return both[0], both[1]
}

// private returns the private key of gateway i, the same in each run.
func private(i byte) (key [32]byte) {
	for at := range key {
		key[at] = i + 1
	}
	return key
}

func public(private [32]byte) [32]byte {
	key, _ := curve25519.X25519(private[:], curve25519.Basepoint) // fails only for a point of low order
	return [32]byte(key)
}
