package attacks

import (
	"crypto/ecdh"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/noise"
)

// A rogue is an attacker with the key and the address of c's gateway, who sends arbitrary packets
// to cluster a.
type rogue struct {
	socket  net.Conn
	session *noise.Session
	pod     netip.Addr // address under which cluster a reaches a pod of cluster c
}

// becomeGateway stops c's gateways and replaces them by a rogue.
func (s *site) becomeGateway(t *testing.T) {
	t.Helper()
	active, err := s.c.ActiveGateway(t.Context())
	must(t, err)
	for _, i := range []int{1 - active, active} {
		must(t, s.c.Kill(fleet.Gateway(i)))
	}
	private, _ := keysOf(t, s.c)
	_, public := keysOf(t, s.a)
	raw, err := base64.StdEncoding.DecodeString(private)
	must(t, err)
	own, err := ecdh.X25519().NewPrivateKey(raw)
	must(t, err)
	raw, err = base64.StdEncoding.DecodeString(public)
	must(t, err)
	peer, err := ecdh.X25519().NewPublicKey(raw)
	must(t, err)
	r := &rogue{pod: s.seen(t, s.a, s.c, s.podOfC().Addr)}
	n := s.c.Nodes[active]
	must(t, n.Do(func() (err error) {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.Addr, wireGuardPort))}
		r.socket, err = d.DialContext(t.Context(), "udp4", netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, wireGuardPort).String())
		return err
	}))
	r.session, err = noise.Connect(r.socket, own, peer, presharedOf(t, s.c, s.a))
	must(t, err)
	s.rogue = r
	s.after(func(t *testing.T) {
		r.socket.Close()
		for i := range 2 {
			if err := s.c.Start(t.Context(), fleet.Gateway(i)); err != nil {
				t.Error(err)
			}
		}
		for _, pair := range [][2]*fleet.Cluster{{s.a, s.c}, {s.c, s.a}, {s.b, s.c}, {s.c, s.b}} {
			if err := pair[0].WaitReady(t.Context(), pair[1], patience); err != nil {
				t.Error(err)
			}
		}
	})
}

func (r *rogue) send(packets ...[]byte) error {
	for _, p := range packets {
		if _, err := r.socket.Write(r.session.Seal(p)); err != nil {
			return err
		}
	}
	return nil
}

// checkDropped checks that a's gateway drops all packets and counts them under a reason.
func (s *site) checkDropped(t *testing.T, reason string, packets ...[]byte) {
	t.Helper()
	s.checkGrows(t, len(packets), "isthmus_drops_total", fmt.Sprintf("reason=%q", reason), func() { must(t, s.rogue.send(packets...)) })
}

func (s *site) toPod(t *testing.T) (netip.AddrPort, *victim) {
	t.Helper()
	p, v := s.onPod(t)
	return netip.AddrPortFrom(s.seen(t, s.c, s.a, p.Addr), victimPort), v
}

func from(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 9) }

func tunnelChapter() chapter {
	return chapter{title: "Through the tunnel, from the attacker's gateway", prepare: func(t *testing.T, s *site) {
		s.becomeGateway(t)
		t.Run("LegitimatePacketsArrive", func(t *testing.T) {
			to, v := s.toPod(t)
			v.checkArrives(t, "of c", func() error { return s.rogue.send(datagram(from(s.rogue.pod), to, "of c")) })
		})
	}, attacks: []attack{
		{attacker: "c's gateway", attempt: "packets to a pod from addresses of b's pods, of a's own pods and nodes, and of no host",
			now: "dropped: the source must be in the networks of the peer whose key opened the message", run: spoofedSources},
		{attacker: "c's gateway", attempt: "packets to b through a", now: "dropped: the destination must be a pod of a, or mapped", run: func(t *testing.T, s *site) {
			b := s.podOfB()
			v := listen(t, b.Host, netip.AddrPortFrom(b.Addr, victimPort))
			dst := s.seen(t, s.a, s.b, b.Addr)
			s.checkDropped(t, "destination", datagram(from(s.rogue.pod), netip.AddrPortFrom(dst, victimPort), t.Name()))
			v.checkStopped(t, t.Name(), func() error { return nil })
		}},
		{attacker: "c's gateway", attempt: "packets to nodes, Services, and loopback, link-local, metadata, broadcast, multicast and overlay addresses of a",
			now: "the same", run: forbiddenDestinations},
		{attacker: "c's gateway", attempt: "packets to a's gateway itself, where it is a Pod", now: "dropped: it accepts only answers", run: gatewayItself},
		{attacker: "c's gateway", attempt: "packets to endpoints that are mapped for b", now: "dropped: a mapping is for one peer", run: mappedForAnother},
		{attacker: "c's gateway", attempt: "packets for addresses of a's PodCIDR that no node has",
			now: "refused by the gateway, or on its node", run: unallocated},
		{attacker: "c's gateway", attempt: "ICMP errors and redirects about a flow between a and b",
			now: "dropped: an error must quote a packet that was sent to this peer", run: foreignErrors},
		{attacker: "c's gateway", attempt: "VXLAN to a node in fragments, with the port only in the first; a second first fragment; overlapping fragments",
			now: "complete datagrams are checked, and overlapping fragments are dropped", run: fragments},
		{attacker: "c's gateway", attempt: "fragmented datagrams whose first, last or middle fragment never arrives",

			now: "held by the gateway, within c's bound, until the datagram is complete", run: incomplete},
		{attacker: "c's gateway", attempt: "a source route (IP option) through a node to the server behind it", now: "does not arrive", run: sourceRoute},
		{attacker: "c's gateway", attempt: "answers of the connection check in b's name, and for clusters that do not exist", now: "rejected; b stays Connected",
			run: forgedCheck},
		{attacker: "c's gateway", attempt: "sealed messages from the address of a's API server, so that a's gateway sends packets for c there (roaming)",
			now: "dropped: the source of a message is checked like a peer's endpoint; nodes of a are exempt, because a Service may relay a peer's messages with a node's address",
			run: roam},
		{attacker: "c's gateway", attempt: "a service of a node, from a source port that looks like an answer's",
			now: "dropped: an answer must belong to a flow that the node began", run: func(t *testing.T, s *site) {
				for _, i := range []int{s.gateway, s.victimNode()} {
					n := s.a.Nodes[i]
					v := listen(t, n.Host, netip.AddrPortFrom(podNetworkAddr(n), 10250))
					to := netip.AddrPortFrom(s.seen(t, s.c, s.a, podNetworkAddr(n)), 10250)
					v.checkStopped(t, t.Name(), func() error {
						return s.rogue.send(datagram(netip.AddrPortFrom(s.rogue.pod, 53), to, t.Name()))
					})
				}
			}},
	}}
}

func spoofedSources(t *testing.T, s *site) {
	to, v := s.toPod(t)
	var packets [][]byte
	for _, src := range []netip.Addr{
		s.seen(t, s.a, s.b, s.podOfB().Addr), s.podOfA(s.other).Addr, s.a.Nodes[s.other].Addr, netip.MustParseAddr("10.96.0.1"),
		netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("169.254.0.1"), netip.IPv4Unspecified(),
		netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("255.255.255.255"),
	} {
		packets = append(packets, datagram(from(src), to, t.Name()))
	}
	s.checkGrows(t, len(packets), "isthmus_drops_total", `direction="inbound"`, func() { must(t, s.rogue.send(packets...)) })
	v.checkStopped(t, t.Name(), func() error { return nil })
}

func forbiddenDestinations(t *testing.T, s *site) {
	n := s.a.Nodes[s.gateway]
	v := listen(t, n.Host, netip.AddrPortFrom(netip.IPv4Unspecified(), victimPort))
	if s.inPod() {
		inside := listen(t, s.host(), netip.AddrPortFrom(netip.IPv4Unspecified(), victimPort))
		defer inside.checkStopped(t, t.Name(), func() error { return nil })
	}
	var packets [][]byte
	for _, dst := range []netip.Addr{
		n.Addr, s.a.Nodes[s.other].Addr, s.a.Control.Addr, s.a.OnPrem.Addr, netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("127.0.0.1"),
		netip.MustParseAddr("169.254.169.254"), netip.MustParseAddr("169.254.100.2"), netip.MustParseAddr("255.255.255.255"),
		netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("240.30.1.11"), netip.MustParseAddr("8.8.8.8"),
	} {
		packets = append(packets, datagram(from(s.rogue.pod), netip.AddrPortFrom(dst, victimPort), t.Name()))
	}
	s.checkGrows(t, len(packets), "isthmus_drops_total", `direction="inbound"`, func() { must(t, s.rogue.send(packets...)) })
	v.checkStopped(t, t.Name(), func() error { return nil })
}

// gatewayItself sends packets to a's gateway Pod. Without a gateway Pod there is nothing to test.
func gatewayItself(t *testing.T, s *site) {
	if !s.inPod() {
		return
	}
	dst := s.seen(t, s.c, s.a, s.addr())
	for _, port := range []uint16{victimPort, 53} {
		at := netip.AddrPortFrom(s.addr(), port)
		v := listen(t, s.host(), at)
		v.checkStopped(t, t.Name(), func() error {
			return s.rogue.send(datagram(netip.AddrPortFrom(s.rogue.pod, 53), netip.AddrPortFrom(dst, port), t.Name()))
		})
		v.checkArrives(t, "from a pod of a", func() error { return sendUDP(s.podOfA(s.other).Host, at, []byte("from a pod of a")) })
	}
}

// external returns the network under which a cluster reaches the ExternalCIDR of another cluster.
func external(t *testing.T, at, of *fleet.Cluster) netip.Prefix {
	t.Helper()
	p, err := at.Peering(t.Context(), of)
	must(t, err)
	return netip.MustParsePrefix(p.Status.Remote.ExternalCIDRSeen)
}

func mappedForAnother(t *testing.T, s *site) {
	var addr netip.Addr
	eventually(t, "an address for b", func() (err error) {
		addr, err = s.a.MapEndpoint(t.Context(), s.a.OnPrem.Addr, s.b)
		return err
	})
	v := listen(t, s.a.OnPrem.Host, netip.AddrPortFrom(s.a.OnPrem.Addr, victimPort))
	dst := lab.Move(addr, external(t, s.b, s.a), external(t, s.c, s.a))
	s.checkDropped(t, "no_mapping", datagram(from(s.rogue.pod), netip.AddrPortFrom(dst, victimPort), t.Name()))
	v.checkStopped(t, t.Name(), func() error { return nil })
}

func unallocated(t *testing.T, s *site) {
	nobody := netip.MustParseAddr("10.244.200.9") // outside of all nodes' networks, 10.244.0.0/24 to 10.244.2.0/24
	k := newTap(t, s.Lab.Underlay, func(ip []byte) bool { return netip.AddrFrom4([4]byte(ip[16:20])) == nobody })
	must(t, s.rogue.send(datagram(from(s.rogue.pod), netip.AddrPortFrom(s.seen(t, s.c, s.a, nobody), victimPort), t.Name())))
	to, v := s.toPod(t)
	v.checkArrives(t, "after it", func() error { return s.rogue.send(datagram(from(s.rogue.pod), to, "after it")) })
	time.Sleep(grace)
	if n := len(k.packets()); n > 0 {
		t.Errorf("%d packets on the underlay: %x", n, k.packets()[0])
	}
}

func foreignErrors(t *testing.T, s *site) {
	pod := s.podOfA(s.victimNode())
	b := s.seen(t, s.a, s.b, s.podOfB().Addr)
	dst := s.seen(t, s.c, s.a, pod.Addr)
	v := listenOn(t, pod.Host, "ip4:icmp", pod.Addr.String())
	var packets [][]byte
	const marker = "quoted by c"
	for _, e := range []struct {
		kind, code byte
		rest       uint32
	}{{3, 4, 576}, {3, 3, 0}, {3, 1, 0}, {5, 1, binary.BigEndian.Uint32(s.rogue.pod.AsSlice())}, {11, 0, 0}} {
		for _, src := range []netip.Addr{pod.Addr, dst} { // the pod's address at cluster a, and at cluster c
			quoted := datagram(netip.AddrPortFrom(src, 40000), netip.AddrPortFrom(b, 80), marker)
			packets = append(packets, ipv4(s.rogue.pod, dst, unix.IPPROTO_ICMP, header{}, icmp(e.kind, e.code, e.rest, quoted)))
		}
	}
	s.checkGrows(t, len(packets), "isthmus_drops_total", `direction="inbound"`, func() { must(t, s.rogue.send(packets...)) })
	v.checkStopped(t, marker, func() error { return nil })
	must(t, pod.Do(func() error {
		routes, err := netlink.RouteGet(b.AsSlice())
		if err == nil && (len(routes) != 1 || routes[0].MTU != 0 || routes[0].Gw.String() != podNetworkAddr(pod.Node).String()) {
			err = fmt.Errorf("the pod's route to b is %v", routes)
		}
		return err
	}))
}

func fragments(t *testing.T, s *site) {
	const more = 0x2000
	i := s.asRemote(t, nil, func(n *lab.Node) netip.Addr { return s.seen(t, s.c, s.a, podNetworkAddr(n)) })
	marker := t.Name()[:20] // short enough to be completely in the second fragment
	whole := udp(9, i.to.Port(), i.packet(marker))
	const cut = 64 // octets of the first fragment: about the UDP, VXLAN, Ethernet and IP headers
	id := uint16(77)
	fragment := func(offset int, flags uint16, b []byte) []byte {
		return ipv4(s.rogue.pod, i.to.Addr(), unix.IPPROTO_UDP, header{id: id, fragment: flags | uint16(offset/8)}, b)
	}
	harmless := udp(9, victimPort, i.packet(marker))
	i.victim.checkStopped(t, marker, func() error { // one datagram in two fragments
		id++
		return s.rogue.send(fragment(0, more, whole[:cut]), fragment(cut, 0, whole[cut:]))
	})
	i.victim.checkStopped(t, marker, func() error { // a harmless first fragment before the real one
		id++
		return s.rogue.send(fragment(0, more, harmless[:cut]), fragment(0, more, whole[:cut]), fragment(cut, 0, whole[cut:]))
	})
	// No combination of overlapping fragments to a pod may arrive.
	to, v := s.toPodBeside(t)
	first, second := udp(9, to.Port(), []byte("the first, into which another one is put, octet by octet")), []byte("mixed in by the second...")
	fragment = func(offset int, flags uint16, b []byte) []byte {
		return ipv4(s.rogue.pod, to.Addr(), unix.IPPROTO_UDP, header{id: id, fragment: flags | uint16(offset/8)}, b)
	}
	v.checkStopped(t, "mixed in", func() error {
		id++
		return s.rogue.send(fragment(0, more, first[:48]), fragment(24, more, second[:24]), fragment(48, 0, first[48:]))
	})
}

// incomplete sends more incomplete datagrams than a node's reassembly can hold. None of them must
// reach the node, and a complete fragmented datagram must still arrive.
func incomplete(t *testing.T, s *site) {
	const more, size, datagrams = 0x2000, 1200, 3000
	to, v := s.toPod(t)
	id := uint16(1000)
	fragment := func(at int, flags uint16, b []byte) []byte {
		return ipv4(s.rogue.pod, to.Addr(), unix.IPPROTO_UDP, header{id: id, fragment: flags | uint16(at*size/8)}, b)
	}
	part := make([]byte, size)
	first := udp(9, to.Port(), make([]byte, 3*size-8))[:size]
	s.checkGrows(t, datagrams/2, "isthmus_drops_total", `reason="fragment_store_full"`, func() {
		for range datagrams / 3 {
			must(t, s.rogue.send(fragment(0, more, first)))
			id++
			must(t, s.rogue.send(fragment(2, 0, part)))
			id++
			must(t, s.rogue.send(fragment(0, more, first), fragment(2, 0, part)))
			id++
		}
	})
	for _, h := range []*lab.Host{s.a.Nodes[s.gateway].Host, s.host()} {
		if n := reassembly(t, h); n > 256<<10 {
			t.Errorf("%v holds %d octets of incomplete datagrams", h, n)
		}
	}
	whole := udp(9, to.Port(), append(make([]byte, 2*size), t.Name()...))
	v.checkArrives(t, t.Name(), func() error {
		id++
		return s.rogue.send(fragment(2, 0, whole[2*size:]), fragment(0, more, whole[:size]), fragment(1, more, whole[size:2*size]))
	})
}

// reassembly returns the octets of incomplete IPv4 datagrams that the kernel of a host holds.
func reassembly(t *testing.T, h *lab.Host) (octets int) {
	t.Helper()
	var b []byte
	must(t, h.Do(func() (err error) {
		b, err = os.ReadFile("/proc/thread-self/net/sockstat")
		return err
	}))
	_, line, ok := strings.Cut(string(b), "FRAG: ")
	var inuse int
	if _, err := fmt.Sscanf(line, "inuse %d memory %d", &inuse, &octets); err != nil || !ok {
		t.Fatalf("no memory of fragments in\n%s", b)
	}
	return octets
}

// toPodBeside is toPod for another port of the pod, for use while the first port is in use.
func (s *site) toPodBeside(t *testing.T) (netip.AddrPort, *victim) {
	t.Helper()
	p := s.podOfA(s.victimNode())
	return netip.AddrPortFrom(s.seen(t, s.c, s.a, p.Addr), victimPort+1), listen(t, p.Host, netip.AddrPortFrom(p.Addr, victimPort+1))
}

func roam(t *testing.T, s *site) {
	victim := netip.AddrPortFrom(s.a.Control.Addr, 6443)
	gateway := netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, wireGuardPort)
	to, _ := s.toPod(t)
	s.checkGrows(t, tries, "isthmus_drops_total", `reason="tunnel_source"`, func() {
		for range tries {
			m := s.rogue.session.Seal(datagram(from(s.rogue.pod), to, "roams"))
			must(t, sendRaw(s.c.Nodes[0].Host, datagram(victim, gateway, string(m))))
		}
	})
	text, err := s.host().Get(t.Context(), "http://127.0.0.1:5873/status")
	must(t, err)
	if strings.Contains(text, victim.String()) {
		t.Errorf("a's gateway sends to %v", victim)
	}
}

func sourceRoute(t *testing.T, s *site) {
	v := listen(t, s.a.OnPrem.Host, netip.AddrPortFrom(s.a.OnPrem.Addr, victimPort))
	for _, kind := range []byte{131, 137} { // loose, strict
		options := append([]byte{kind, 7, 4}, s.a.OnPrem.Addr.AsSlice()...)
		packet := func() []byte {
			return ipv4(s.rogue.pod, s.seen(t, s.c, s.a, podNetworkAddr(s.a.Nodes[0])), unix.IPPROTO_UDP, header{options: append(options, 0)}, udp(9, victimPort, []byte(t.Name())))
		}
		v.checkStopped(t, t.Name(), func() error { return s.rogue.send(packet()) })
	}
}

func forgedCheck(t *testing.T, s *site) {
	to := netip.AddrPortFrom(external(t, s.c, s.a).Addr().Next(), 12345)
	peering, err := s.a.Peering(t.Context(), s.c)
	must(t, err)
	src := netip.AddrPortFrom(netip.MustParsePrefix(peering.Status.Remote.PodCIDRSeen).Addr(), 12345) // address of c's gateway
	message := func(id, kind string) []byte {
		text := fmt.Sprintf(`{"clusterID":%q,"msgType":%q,"timeStamp":%q}`, id, kind, time.Now().UTC().Format(time.RFC3339Nano))
		return datagram(src, to, text)
	}
	s.checkGrows(t, 1, "isthmus_probe_rejected_total", `reason="source"`, func() { must(t, s.rogue.send(message(s.b.ID, "PONG"))) })
	s.checkGrows(t, 1, "isthmus_probe_rejected_total", `reason="unknown_peer"`, func() { must(t, s.rogue.send(message("nobody", "PONG"))) })
	s.checkGrows(t, 1, "isthmus_probe_rejected_total", `reason="type"`, func() { must(t, s.rogue.send(message(s.b.ID, "QUIT"))) })
	s.checkDropped(t, "local_source", datagram(netip.AddrPortFrom(s.rogue.pod, 12345), to, "from a pod"))
	if got := endpointOf(t, s.a, s.b).Status.Connection.Status; got != v1alpha1.Connected {
		t.Errorf("b is %s", got)
	}
}
