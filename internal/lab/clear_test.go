package lab

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// watched returns a watch for a cluster with three nodes, two networks of a peer and a mapped
// endpoint.
func watched() *watch {
	c := &Cluster{}
	for i := range 3 {
		c.Nodes = append(c.Nodes, &Node{Addr: offset(netip.MustParseAddr("172.30.1.11"), i)})
	}
	return watchFor(c, Watched{
		Networks:  []netip.Prefix{netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.99.128.0/18"), netip.MustParsePrefix("fd00:1::/48")},
		Endpoints: []netip.Addr{netip.MustParseAddr("192.168.77.10")},
	}, []netip.Addr{netip.MustParseAddr("172.30.1.113")})
}

func ethernet(kind uint16, payload []byte) []byte {
	return append(binary.BigEndian.AppendUint16(make([]byte, 12), kind), payload...)
}

// ip4 returns a frame with an IPv4 packet. frag is the half word with the flags and the fragment
// offset.
func ip4(src, dst string, protocol byte, frag uint16, options int, payload ...byte) []byte {
	b := make([]byte, 20+options)
	b[0], b[9] = 0x40|byte(len(b)/4), protocol
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(payload)))
	binary.BigEndian.PutUint16(b[6:], frag)
	copy(b[12:], netip.MustParseAddr(src).AsSlice())
	copy(b[16:], netip.MustParseAddr(dst).AsSlice())
	return ethernet(unix.ETH_P_IP, append(b, payload...))
}

func udp(from, to uint16, payload ...byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, from)
	b = binary.BigEndian.AppendUint16(b, to)
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(payload)))
	return append(binary.BigEndian.AppendUint16(b, 0), payload...)
}

// vxlan returns an overlay datagram with a frame inside.
func vxlan(inner []byte) []byte { return udp(40000, 4800, append(make([]byte, 8), inner...)...) }

func TestPacketsWithPeerAddressesAreLeaks(t *testing.T) {
	toPeer := ip4("10.244.1.11", "10.246.0.11", unix.IPPROTO_UDP, 0, 0, udp(4000, 9, 1, 2, 3)...)
	six := make([]byte, 40, 48)
	six[6] = unix.IPPROTO_ICMPV6
	copy(six[8:], netip.MustParseAddr("fd00:9::1").AsSlice())
	copy(six[24:], netip.MustParseAddr("fd00:1::7").AsSlice())
	for name, tc := range map[string]struct {
		frame []byte
		want  string // empty: no leak
	}{
		"to a peer":                             {toPeer, "10.246.0.0/16 UDP 10.244.1.11:4000 -> 10.246.0.11:9, 31 octets"},
		"a fragment":                            {ip4("10.244.1.11", "10.246.0.11", unix.IPPROTO_UDP, 100, 0, 1, 2, 3, 4), "10.246.0.0/16 UDP 10.244.1.11 -> 10.246.0.11, 24 octets"},
		"from a peer":                           {ip4("10.99.191.255", "10.244.1.11", unix.IPPROTO_ICMP, 0, 0, 8, 0, 0, 0), "10.99.128.0/18 ICMP 10.99.191.255 -> 10.244.1.11, 24 octets"},
		"to a mapped endpoint":                  {ip4("10.246.0.11", "192.168.77.10", unix.IPPROTO_TCP, 0, 0), ""},
		"from that endpoint":                    {ip4("192.168.77.10", "10.246.0.11", 47, 0, 0), "10.246.0.0/16 IP protocol 47 192.168.77.10 -> 10.246.0.11, 20 octets"},
		"IPv6":                                  {ethernet(unix.ETH_P_IPV6, six), "fd00:1::/48 ICMPv6 fd00:9::1 -> fd00:1::7, 40 octets"},
		"pods of the cluster":                   {ip4("10.244.1.11", "10.244.2.11", unix.IPPROTO_UDP, 0, 0, udp(4000, 9)...), ""},
		"beside the network":                    {ip4("10.244.1.11", "10.99.192.0", unix.IPPROTO_UDP, 0, 0, udp(4000, 9)...), ""},
		"the tunnel":                            {ip4("172.30.1.11", "172.30.2.11", unix.IPPROTO_UDP, 0, 0, udp(5871, 5871, toPeer...)...), ""},
		"the overlay":                           {ip4("172.30.1.11", "172.30.1.13", unix.IPPROTO_UDP, 0, 0, vxlan(toPeer)...), ""},
		"overlay to an added address of a node": {ip4("172.30.1.11", "172.30.1.113", unix.IPPROTO_UDP, 0, 0, vxlan(toPeer)...), ""},
		"overlay to an address of no node": {ip4("172.30.1.11", "172.30.1.14", unix.IPPROTO_UDP, 0, 0, vxlan(toPeer)...),
			"10.246.0.0/16 UDP 172.30.1.11:40000 -> 172.30.1.14:4800, 81 octets, with UDP 10.244.1.11:4000 -> 10.246.0.11:9, 31 octets inside"},
		"overlay from a pod": {ip4("10.244.1.11", "172.30.1.12", unix.IPPROTO_UDP, 0, 8, vxlan(toPeer)...),
			"10.246.0.0/16 UDP 10.244.1.11:40000 -> 172.30.1.12:4800, 89 octets, with UDP 10.244.1.11:4000 -> 10.246.0.11:9, 31 octets inside"},
		"overlay with an unwatched packet inside": {ip4("172.30.1.10", "172.30.1.12", unix.IPPROTO_UDP, 0, 0, vxlan(ip4("10.244.1.1", "8.8.8.8", 1, 0, 0))...), ""},
		"ARP":       {ethernet(unix.ETH_P_ARP, make([]byte, 28)), ""},
		"cut short": {toPeer[:30], ""},
	} {
		network, packet, leaks := watched().leak(tc.frame)
		got := ""
		if leaks {
			got = network.String() + " " + packet
		}
		if got != tc.want {
			t.Errorf("%s: %q; want %q", name, got, tc.want)
		}
	}
}

// The kernel's filter must accept every leak. Of other frames, it may accept only IPv6, packets
// of peers to mapped endpoints, and packets to the overlay's port that are not between two nodes.
func TestKernelFilterPassesEveryLeak(t *testing.T) {
	w := watched()
	vm, err := bpf.NewVM(w.filter())
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	addrs := strings.Fields("172.30.1.10 172.30.1.11 172.30.1.13 172.30.1.14 172.30.1.113 172.30.2.11 10.244.1.11 10.246.0.11 10.245.255.255 10.247.0.0 10.99.128.0 10.99.127.255 192.168.77.10")
	pick := func() string { return addrs[rng.IntN(len(addrs))] }
	leaks, passed := 0, 0
	for range 100_000 {
		inner := ip4(pick(), pick(), unix.IPPROTO_UDP, 0, 0, udp(1, 2)...)
		payload := [][]byte{vxlan(inner), udp(4800, 4801, inner...), nil, {1, 2, 3}}[rng.IntN(4)]
		frame := ip4(pick(), pick(), []byte{unix.IPPROTO_UDP, unix.IPPROTO_TCP}[rng.IntN(2)], []uint16{0, 0x4000, 0x2000, 7}[rng.IntN(4)], 4*rng.IntN(11), payload...)
		if rng.IntN(20) == 0 {
			frame = frame[:rng.IntN(len(frame))]
		}
		n, err := vm.Run(frame)
		if err != nil {
			t.Fatal(err)
		}
		_, packet, leak := w.leak(frame)
		switch h, ok := parseFrame(frame); {
		case leak && n != snapLength:
			t.Fatalf("kept back: %s", packet)
		case leak:
			leaks++
		case n > 0 && ok && h.port(2) != 4800 && h.dst != w.Endpoints[0]:
			t.Fatalf("handed out: %v", h)
		}
		if n > 0 {
			passed++
		}
	}
	if leaks < 10_000 || passed > 90_000 {
		t.Errorf("%d leaks, %d handed out: the test proves little", leaks, passed)
	}
	none, err := bpf.NewVM(watchFor(&Cluster{Nodes: []*Node{{}}}, Watched{}, nil).filter())
	if err != nil {
		t.Fatal(err)
	}
	if n, err := none.Run(ip4("10.244.1.11", "10.246.0.11", unix.IPPROTO_UDP, 0, 0)); n != 0 || err != nil {
		t.Errorf("without networks: %d octets, %v", n, err)
	}
}
