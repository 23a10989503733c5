package lab

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var (
	peerPods   = netip.MustParsePrefix("10.246.0.0/16")
	peerOthers = netip.MustParsePrefix("10.99.64.0/18")
)

// sniff starts a Sniffer for a lab.
func sniff(t *testing.T, l *Lab, refresh func(*Cluster)) *Sniffer {
	t.Helper()
	s, err := l.Sniff(refresh)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() }) // the test has already checked the leaks
	return s
}

// datagrams sends three datagrams from a host.
func datagrams(t *testing.T, from *Host, source, to string, payload []byte) {
	t.Helper()
	conn, err := from.ListenPacket("udp4", source)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for range 3 {
		if _, err := conn.WriteTo(payload, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(to))); err != nil {
			t.Fatal(err)
		}
	}
}

// expectLeaks waits for exactly three more leaks from a node and checks that all contain the
// description.
func expectLeaks(t *testing.T, s *Sniffer, node, packet string) {
	t.Helper()
	var r Report
	for deadline := time.Now().Add(time.Minute); r.Leaked < 3 && time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		r = s.Report()
	}
	leaks := s.Take()
	if len(leaks) != 3 || slices.ContainsFunc(leaks, func(l Leak) bool { return l.Node != node || !strings.Contains(l.Packet, packet) }) {
		t.Errorf("leaks %v; want three from %s, each with %q", leaks, node, packet)
	}
}

func TestSnifferReportsPacketsInTheClear(t *testing.T) {
	l := up(t, Spec{Clusters: []ClusterSpec{{Nodes: 3}, {}}})
	a, b := l.Clusters[0], l.Clusters[1]
	s := sniff(t, l, nil)
	remote := "10.246.7.7:9"
	mustPing(t, a.Nodes[0].Host, b.Nodes[0].Addr) // resolves the neighbor's MAC, so that no later packet is queued for it
	datagrams(t, a.Pods[0].Host, ":0", remote, []byte("not yet"))
	mustPing(t, a.Pods[0].Host, a.Nodes[1].Addr)
	s.Watch(a, Watched{Networks: []netip.Prefix{peerOthers, peerPods}})
	datagrams(t, b.Pods[0].Host, ":0", remote, []byte("of a cluster that has no such peer"))

	datagrams(t, a.Pods[0].Host, ":0", remote, []byte("secret"))
	expectLeaks(t, s, "a-node1", "-> 10.246.7.7:9, 34 octets")
	datagrams(t, a.Nodes[2].Host, ":0", "10.99.127.255:9", nil)
	expectLeaks(t, s, "a-node3", "UDP 172.30.1.13:")

	inner := ip4("10.244.1.11", "10.246.0.11", unix.IPPROTO_UDP, 0, 0, udp(1, 2)...)
	datagrams(t, a.Nodes[1].Host, ":0", a.Nodes[0].Addr.String()+":4800", vxlan(inner)[8:])
	datagrams(t, a.Nodes[1].Host, ":0", b.Nodes[0].Addr.String()+":4800", vxlan(inner)[8:])
	expectLeaks(t, s, "a-node2", "-> 172.30.2.11:4800, 78 octets, with UDP 10.244.1.11:1 -> 10.246.0.11:2, 28 octets inside")

	// With a loose reverse path filter, a node forwards a packet with a source address of a peer.
	pod := a.Pods[2]
	if err := pod.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(link, &netlink.Addr{IPNet: netlink.NewIPNet(net.IPv4(10, 246, 0, 5))})
	}); err != nil {
		t.Fatal(err)
	}
	to := a.Pods[5]
	conn, err := to.ListenPacket("udp4", ":9") // prevents an ICMP answer
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	datagrams(t, pod.Host, "10.246.0.5:7", to.Addr.String()+":9", nil)
	expectLeaks(t, s, "a-node2", fmt.Sprintf("UDP 10.246.0.5:7 -> %v:9", to.Addr))
	s.Watch(a, Watched{Networks: []netip.Prefix{peerOthers, peerPods}, Endpoints: []netip.Addr{to.Addr}})
	datagrams(t, pod.Host, "10.246.0.5:7", to.Addr.String()+":9", nil)

	// These packets are no leaks, although some are sent in the clear.
	for _, from := range []*Host{a.Pods[0].Host, a.OnPrem.Host, a.Nodes[2].Host} {
		mustPing(t, from, a.Pods[4].Addr)
	}
	mustPing(t, a.Nodes[0].Host, b.Nodes[0].Addr)
	s.Watch(a, Watched{})
	datagrams(t, a.Pods[0].Host, ":0", remote, []byte("no more"))
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if r := s.Report(); r.Packets < 20 || r.Packets > 1000 {
		t.Errorf("%v", r)
	}
}

func TestSnifferChecksALeakAgainAfterRefresh(t *testing.T) {
	l := up(t, Spec{Clusters: Clusters(1)})
	a := l.Clusters[0]
	peered := Watched{Networks: []netip.Prefix{peerPods}}
	requested := make(chan *Cluster, 100)
	wait := func() {
		t.Helper()
		select {
		case c := <-requested:
			if c != a {
				t.Errorf("asked about %v", c)
			}
		case <-time.After(time.Minute):
			t.Fatal("nobody asked")
		}
	}
	var s *Sniffer
	s = sniff(t, l, func(c *Cluster) {
		s.Watch(c, Watched{})
		requested <- c
	})
	s.Watch(a, peered)
	datagrams(t, a.Pods[0].Host, ":0", "10.246.0.1:9", nil)
	wait()
	if err := s.Close(); err != nil {
		t.Errorf("of a peer that is gone: %v", err)
	}

	s = sniff(t, l, func(c *Cluster) { requested <- c })
	s.Watch(a, peered)
	datagrams(t, a.Pods[0].Host, ":0", "10.246.0.1:9", nil)
	for range 3 {
		wait()
	}
	datagrams(t, a.Pods[1].Host, ":0", "10.246.0.1:9", nil)
	for range 3 {
		wait()
	}
	if n := len(s.Excuse(func(l Leak) bool { return strings.Contains(l.Packet, a.Pods[1].Addr.String()+":") })); n != 3 {
		t.Errorf("%d leaks are excused", n)
	}
	err := s.Close()
	if err == nil || !strings.Contains(err.Error(), "3 of them in the clear, and 3 more that docs/security.md lists as remaining risks; want none:") || strings.Count(err.Error(), "a-node1, which must not show 10.246.0.0/16: UDP 10.244.0.11:") != 3 {
		t.Errorf("error %v", err)
	}
	if again := s.Close(); again == nil || again.Error() != err.Error() {
		t.Errorf("closed again: %v", again)
	}
}

// An address that a node gets later becomes an endpoint of the overlay. A new address of another
// host does not.
func TestSnifferAcceptsOverlayAtAddedNodeAddresses(t *testing.T) {
	l := up(t, Spec{Clusters: []ClusterSpec{{Nodes: 2, Control: true}, {}}})
	a, b := l.Clusters[0], l.Clusters[1]
	s := sniff(t, l, nil)
	s.Watch(a, Watched{Networks: []netip.Prefix{peerPods}})
	inner := ip4("10.244.1.11", "10.246.0.11", unix.IPPROTO_UDP, 0, 0, udp(1, 2)...)
	moved := netip.MustParseAddr("172.30.1.112")
	mustPing(t, a.Nodes[0].Host, b.Nodes[0].Addr)
	give := func(h *Host) {
		t.Helper()
		k, err := openKernel(h)
		if err != nil {
			t.Fatal(err)
		}
		defer k.close()
		if err := k.address(uplink, netip.PrefixFrom(moved, 24)); err != nil {
			t.Fatal(err)
		}
	}
	give(a.Control.Host) // a host of the same network that is not a node
	mustPing(t, a.Nodes[0].Host, moved)
	datagrams(t, a.Nodes[0].Host, ":0", moved.String()+":4800", vxlan(inner)[8:])
	expectLeaks(t, s, "a-node1", "-> 172.30.1.112:4800")

	give(a.Nodes[1].Host)
	datagrams(t, a.Nodes[0].Host, ":0", moved.String()+":4800", vxlan(inner)[8:])
	datagrams(t, a.Nodes[1].Host, moved.String()+":0", a.Nodes[0].Addr.String()+":4800", vxlan(inner)[8:])
	datagrams(t, a.Nodes[0].Host, ":0", b.Nodes[0].Addr.String()+":4800", vxlan(inner)[8:])
	expectLeaks(t, s, "a-node1", "-> 172.30.2.11:4800")
	datagrams(t, a.Nodes[1].Host, moved.String()+":0", "10.246.0.1:9", nil) // packets in the clear from the new address are leaks as well
	expectLeaks(t, s, "a-node2", "UDP 172.30.1.112:")
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// A node may be recreated, as after a reboot.
func TestSnifferWatchesRecreatedNodes(t *testing.T) {
	l := up(t, Spec{Clusters: []ClusterSpec{{Nodes: 2}}})
	n := l.Clusters[0].Nodes[1]
	s := sniff(t, l, nil)
	s.Watch(l.Clusters[0], Watched{Networks: []netip.Prefix{peerPods}})
	datagrams(t, n.Host, ":0", "10.246.0.1:9", nil)
	expectLeaks(t, s, n.Name, "-> 10.246.0.1:9")
	before := s.Report().Packets

	underlay, err := openKernel(l.Underlay)
	if err != nil {
		t.Fatal(err)
	}
	defer underlay.close()
	if err := removeNamespace(netnsDir + "/" + n.Netns()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) { // the kernel removes the device asynchronously
		if _, err := underlay.nl.LinkByName(n.Name); err != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the port of a node that is gone is there")
		}
	}
	node, err := newKernel(n.Host, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer node.close()
	if err := underlay.veth(n.Name, 1500, node); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		underlay.setMaster(n.Name, "br-a"),
		node.address(uplink, netip.PrefixFrom(n.Addr, 24)),
		node.route(everywhere, netip.MustParseAddr("172.30.1.1"), uplink),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(time.Minute); s.Report().Leaked == 0; time.Sleep(5 * time.Millisecond) {
		datagrams(t, n.Host, ":0", "10.246.0.1:9", nil)
		if time.Now().After(deadline) {
			t.Fatal("the sniffer does not see the new node")
		}
	}
	s.Take()
	if err := s.Close(); err != nil && !strings.Contains(err.Error(), "in the clear; want none") { // the last datagrams may be processed after Take
		t.Error(err)
	}
	if r := s.Report(); r.Packets <= before {
		t.Errorf("%d packets, before the node went %d", r.Packets, before)
	}
}
