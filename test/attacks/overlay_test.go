package attacks

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// An injection is a packet that pretends to come from the overlay or from a peer.
type injection struct {
	from   *lab.Host
	to     netip.AddrPort
	source netip.Addr // source of the outer packet; zero: the host's own address
	packet func(marker string) []byte
	victim *victim
}

func (i injection) send(marker string) error {
	if !i.source.IsValid() {
		return sendUDP(i.from, i.to, i.packet(marker))
	}
	return sendRaw(i.from, datagram(netip.AddrPortFrom(i.source, 9999), i.to, string(i.packet(marker))))
}

// run checks that the injected packet does not arrive at the victim.
func (i injection) run(t *testing.T) {
	t.Helper()
	marker := t.Name()
	i.victim.checkStopped(t, marker, func() error { return i.send(marker) })
}

// victimNode returns the index of the node whose pod is the victim: neither the active gateway's
// node nor s.other.
func (s *site) victimNode() int { return 3 - s.gateway - s.other }

func (s *site) onPod(t *testing.T) (*lab.Pod, *victim) {
	t.Helper()
	p := s.podOfA(s.victimNode())
	return p, listen(t, p.Host, netip.AddrPortFrom(p.Addr, victimPort))
}

func overlayOf(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, kernel.OverlayPort) }

// podNetworkAddr returns the node's address in its pod network.
func podNetworkAddr(n *lab.Node) netip.Addr { return n.PodCIDR.Addr().Next() }

// asRemote returns an injection of a packet that seems to come from a pod of cluster b. It goes
// to a pod of cluster a, through the overlay to that pod's node.
func (s *site) asRemote(t *testing.T, from *lab.Host, to func(*lab.Node) netip.Addr) injection {
	t.Helper()
	p, v := s.onPod(t)
	source := s.seen(t, s.a, s.b, s.podOfB().Addr)
	return injection{from: from, to: overlayOf(to(p.Node)), victim: v,
		packet: func(m string) []byte { return vxlan(fabric.OverlayMAC(p.Node.Name), source, p.Addr, m) }}
}

// asPod returns an injection of a packet that seems to come from a pod of cluster a. It goes to a
// pod of cluster b, through the overlay to the gateway.
func (s *site) asPod(t *testing.T, from *lab.Host, to netip.Addr) injection {
	t.Helper()
	p, b := s.podOfA(s.victimNode()), s.podOfB()
	dst := s.seen(t, s.a, s.b, b.Addr)
	mac := fabric.OverlayMAC(s.a.Nodes[s.gateway].Name)
	if s.inPod() {
		mac = fabric.GatewayMAC(s.addr())
	}
	return injection{from: from, to: overlayOf(to), victim: listen(t, b.Host, netip.AddrPortFrom(b.Addr, victimPort)),
		packet: func(m string) []byte { return vxlan(mac, p.Addr, dst, m) }}
}

// reachGateway gives a host of the underlay a route to the gateway of cluster a.
func (s *site) reachGateway(t *testing.T, from *lab.Host) {
	t.Helper()
	if !s.inPod() {
		return
	}
	to, via := s.addr().String(), s.a.Nodes[s.gateway].Addr.String()
	if out, err := from.Command(t.Context(), "ip", "route", "replace", to, "via", via).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := from.Command(context.Background(), "ip", "route", "del", to, "via", via).CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
	})
}

func underlay(n *lab.Node) netip.Addr { return n.Addr }

// counterproof checks that the packets of asRemote and asPod arrive if a legitimate node sends
// them. If these did not arrive, the attacks would prove nothing.
func (s *site) counterproof(t *testing.T) {
	t.Helper()
	i := s.asRemote(t, s.host(), underlay)
	i.victim.checkArrives(t, "from a node", func() error { return i.send("from a node") })
	i = s.asPod(t, s.a.Nodes[s.victimNode()].Host, s.addr())
	i.victim.checkArrives(t, "from a node", func() error { return i.send("from a node") })
}

// masquerade makes the node of pod p masquerade this pod's packets to the network dst, as some CNIs
// do.
func (s *site) masquerade(t *testing.T, p *lab.Pod, dst netip.Prefix) {
	t.Helper()
	rules := fmt.Sprintf("table ip cni { chain p { type nat hook postrouting priority 100; ip saddr %v ip daddr %v masquerade; }; }", p.Addr, dst)
	if out, err := p.Node.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
		t.Skipf("needs the command nft: 'make deps' installs it: %v %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := p.Node.Command(context.Background(), "nft", "delete table ip cni").CombinedOutput(); err != nil {
			t.Logf("%v %s", err, out)
		}
	})
}

// checkSeesNode checks that masquerade works: the gateway receives the pod's packets with the
// node's address.
func (s *site) checkSeesNode(t *testing.T, p *lab.Pod) {
	t.Helper()
	conn, err := s.host().ListenPacket("udp4", netip.AddrPortFrom(s.addr(), victimPort).String())
	must(t, err)
	defer conn.Close()
	eventually(t, "a datagram of the pod", func() error {
		must(t, sendUDP(p.Host, netip.AddrPortFrom(s.addr(), victimPort), []byte("x")))
		must(t, conn.SetReadDeadline(time.Now().Add(grace)))
		_, from, err := conn.ReadFrom(make([]byte, 1))
		if err == nil && from.(*net.UDPAddr).AddrPort().Addr() != p.Node.Addr {
			t.Fatalf("the gateway saw %v; want the node, %v", from, p.Node.Addr)
		}
		return err
	})
}

func overlayChapter() chapter {
	return chapter{title: "Into the overlay", prepare: func(t *testing.T, s *site) { t.Run("LegitimatePacketsArrive", s.counterproof) }, attacks: []attack{
		{attacker: "a pod of a", attempt: "VXLAN to another node as a pod of b",
			now: "no forwarded packet reaches the overlay's port",
			run: func(t *testing.T, s *site) { s.asRemote(t, s.podOfA(s.other).Host, underlay).run(t) }},
		{attacker: "a pod of a", attempt: "VXLAN to another node as 8.8.8.8", now: "the same",
			run: func(t *testing.T, s *site) {
				i := s.asRemote(t, s.podOfA(s.other).Host, underlay)
				p := s.podOfA(s.victimNode())
				i.packet = func(m string) []byte {
					return vxlan(fabric.OverlayMAC(p.Node.Name), netip.MustParseAddr("8.8.8.8"), p.Addr, m)
				}
				i.run(t)
			}},
		{attacker: "a pod of a", attempt: "VXLAN to the gateway as another pod, to a pod of b", now: "the same",
			run: func(t *testing.T, s *site) { s.asPod(t, s.podOfA(s.other).Host, s.addr()).run(t) }},
		{attacker: "a pod of a, masqueraded by its CNI", attempt: "VXLAN to another node as a pod of b",
			now: "dropped on the sending node, before source NAT",
			run: func(t *testing.T, s *site) {
				p := s.podOfA(s.other)
				s.masquerade(t, p, netip.MustParsePrefix("172.30.0.0/16"))
				s.asRemote(t, p.Host, underlay).run(t)
			}},
		{attacker: "a pod of a, masqueraded by its CNI", attempt: "VXLAN to the gateway as another pod, to a pod of b",
			now: "dropped: no packet from a pod's device reaches the overlay",
			run: func(t *testing.T, s *site) {
				p := s.podOfA(s.other)
				s.masquerade(t, p, netip.PrefixFrom(s.addr(), 32))
				s.asPod(t, p.Host, s.addr()).run(t)
				if s.inPod() { // otherwise no forwarded packet reaches the overlay's port
					s.checkSeesNode(t, p)
				}
			}},
		{attacker: "a pod of a", attempt: "VXLAN to its own node's pod-side address",
			now: "dropped: the outer source must be another node or a gateway, on the device that routes to it",
			run: func(t *testing.T, s *site) { s.asRemote(t, s.a.Pods[2*s.victimNode()+1].Host, podNetworkAddr).run(t) }},
		{attacker: "a pod of a", attempt: "the same with the gateway's address as the outer source", now: "the same",
			run: func(t *testing.T, s *site) {
				i := s.asRemote(t, s.a.Pods[2*s.victimNode()+1].Host, podNetworkAddr)
				i.source = s.addr()
				i.run(t)
			}},
		{attacker: "a host of the underlay", attempt: "VXLAN to a node as a pod of b", now: "dropped: the outer source must be another node of the cluster, or a gateway",
			run: func(t *testing.T, s *site) { s.asRemote(t, s.a.Control.Host, underlay).run(t) }},
		{attacker: "a host of the underlay", attempt: "VXLAN to the gateway as a pod of a, to a pod of b", now: "the same",
			run: func(t *testing.T, s *site) {
				s.reachGateway(t, s.a.Control.Host)
				s.asPod(t, s.a.Control.Host, s.addr()).run(t)
			}},
		{attacker: "a node of c, with c's own overlay", attempt: "VXLAN to a node of a as a pod of b", now: "dropped: it is no node of a",
			run: func(t *testing.T, s *site) { s.asRemote(t, s.c.Nodes[0].Host, underlay).run(t) }},
		{attacker: "a pod of c", attempt: "VXLAN through the tunnel to a node's pod-side address",
			now: "no packet from a peer reaches the overlay's port",
			run: func(t *testing.T, s *site) {
				s.asRemote(t, s.podOfC().Host, func(n *lab.Node) netip.Addr { return s.seen(t, s.c, s.a, podNetworkAddr(n)) }).run(t)
			}},
		{attacker: "a pod of c", attempt: "the same to the gateway, to a pod of b", now: "the same",
			run: func(t *testing.T, s *site) {
				to := podNetworkAddr(s.a.Nodes[s.gateway])
				if s.inPod() {
					to = s.addr()
				}
				s.asPod(t, s.podOfC().Host, s.seen(t, s.c, s.a, to)).run(t)
			}},
		{attacker: "a pod of c", attempt: "a service of a node (kubelet, metrics) at its pod-side address",
			now: "dropped: nodes accept only answers, and connections to mapped endpoints", run: func(t *testing.T, s *site) { s.serviceOfNode(t, s.a.Nodes[s.victimNode()]) }},
		{attacker: "a pod of c", attempt: "the same on the gateway's node", now: "the same",
			run: func(t *testing.T, s *site) { s.serviceOfNode(t, s.a.Nodes[s.gateway]) }},
		{attacker: "a pod of c", attempt: "a NodePort or hostPort at a node's pod-side address, and through it pods, nodes and outside hosts",
			now: "dropped before destination NAT", run: func(t *testing.T, s *site) { s.nodePort(t, s.a.Nodes[s.victimNode()]) }},
		{attacker: "a pod of c", attempt: "the same on the gateway's node", now: "the same",
			run: func(t *testing.T, s *site) { s.nodePort(t, s.a.Nodes[s.gateway]) }},
		{attacker: "a host of the underlay", attempt: "ARP in the overlay: the gateway's address there has the attacker's MAC address",
			now: "the overlay accepts no frame from it, and the neighbour entries are permanent", run: arpInTheOverlay},
	}}
}

func (s *site) serviceOfNode(t *testing.T, n *lab.Node) {
	t.Helper()
	at := netip.AddrPortFrom(podNetworkAddr(n), 10250)
	v := listen(t, n.Host, at)
	from, to := s.podOfC().Host, netip.AddrPortFrom(s.seen(t, s.c, s.a, at.Addr()), at.Port())
	v.checkStopped(t, t.Name(), func() error { return sendUDP(from, to, []byte(t.Name())) })
	v.checkArrives(t, "from a pod of a", func() error { return sendUDP(podOn(s.a, s.nodeOf(n)).Host, at, []byte("from a pod of a")) })
}

// nodePort makes a node forward a NodePort to another node, as kube-proxy does. It checks that a
// peer's pod cannot use it, and that a pod of cluster a can.
func (s *site) nodePort(t *testing.T, n *lab.Node) {
	t.Helper()
	const port = 30080
	backend := s.a.Nodes[s.other]
	rules := fmt.Sprintf("table ip services { chain pre { type nat hook prerouting priority -100; fib daddr type local udp dport %d dnat to %v:%d; }; "+
		"chain post { type nat hook postrouting priority 100; ip daddr %v udp dport %d masquerade; }; }", port, backend.Addr, victimPort, backend.Addr, victimPort)
	if out, err := n.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
		t.Skipf("needs the command nft: 'make deps' installs it: %v %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := n.Command(context.Background(), "nft", "delete table ip services").CombinedOutput(); err != nil {
			t.Logf("%v %s", err, out)
		}
	})
	v := listen(t, backend.Host, netip.AddrPortFrom(backend.Addr, victimPort))
	to := netip.AddrPortFrom(s.seen(t, s.c, s.a, podNetworkAddr(n)), port)
	v.checkStopped(t, t.Name(), func() error { return sendUDP(s.podOfC().Host, to, []byte(t.Name())) })
	v.checkArrives(t, "from a pod of a", func() error {
		return sendUDP(podOn(s.a, s.nodeOf(n)).Host, netip.AddrPortFrom(podNetworkAddr(n), port), []byte("from a pod of a"))
	})
}

func (s *site) nodeOf(n *lab.Node) int {
	for i := range s.a.Nodes {
		if s.a.Nodes[i] == n {
			return i
		}
	}
	return -1
}

func arpInTheOverlay(t *testing.T, s *site) {
	n, target := s.a.Nodes[s.victimNode()], s.a.Nodes[s.gateway]
	mac := fabric.OverlayMAC(target.Name)
	if s.inPod() {
		mac = fabric.GatewayMAC(s.addr())
	}
	// hop returns the gateway's overlay address according to the node's neighbor table.
	hop := func() (addr netip.Addr, err error) {
		err = n.Do(func() error {
			link, err := netlink.LinkByName(kernel.OverlayDevice)
			if err != nil {
				return err
			}
			neighbours, err := netlink.NeighList(link.Attrs().Index, netlink.FAMILY_V4)
			if err != nil {
				return err
			}
			for _, e := range neighbours {
				if string(e.HardwareAddr) == string(mac[:]) {
					addr, _ = netip.AddrFromSlice(e.IP.To4())
					return nil
				}
			}
			return fmt.Errorf("%v is nobody's", mac)
		})
		return addr, err
	}
	addr, err := hop()
	must(t, err)
	self := fabric.OverlayAddr(n.Addr)
	attacker := []byte{0x66, 6, 6, 6, 6, 6}
	reply := binary.BigEndian.AppendUint16([]byte{0, 1, 8, 0, 6, 4}, 2)
	reply = append(append(reply, attacker...), addr.AsSlice()...)
	own := fabric.OverlayMAC(n.Name)
	reply = append(append(reply, own[:]...), self.AsSlice()...)
	for range tries {
		must(t, sendUDP(s.a.Control.Host, overlayOf(n.Addr), overlayFrame(fabric.OverlayMAC(n.Name), unix.ETH_P_ARP, reply)))
	}
	time.Sleep(grace)
	if now, err := hop(); err != nil || now != addr {
		t.Errorf("%v belonged to %v, and now %v: %v", mac, addr, now, err)
	}
}
