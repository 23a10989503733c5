package routeagent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

const victimPort = 4444

// vxlan returns the payload of an outer packet to a node: a VXLAN header, and a datagram from src
// to dst. receiver is the name of the node.
func vxlan(receiver string, src, dst netip.Addr, payload string) []byte {
	be := binary.BigEndian
	b := []byte{8, 0, 0, 0} // flag: the VNI is valid
	b = be.AppendUint32(b, kernel.OverlayID<<8)
	mac := fabric.OverlayMAC(receiver)
	b = append(b, mac[:]...)
	b = append(b, 0x66, 1, 2, 3, 4, 5, 8, 0)
	return append(b, datagram(src, dst, 9, victimPort, payload)...)
}

// datagram returns an IPv4 packet with a UDP datagram without a checksum.
func datagram(src, dst netip.Addr, from, to uint16, payload string) []byte {
	be := binary.BigEndian
	ip := []byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
	be.PutUint16(ip[2:], uint16(28+len(payload)))
	ip = append(append(ip, src.AsSlice()...), dst.AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(ip); i += 2 {
		sum += uint32(be.Uint16(ip[i:]))
	}
	sum = sum>>16 + sum&0xffff
	be.PutUint16(ip[10:], ^uint16(sum+sum>>16))
	ip = be.AppendUint16(be.AppendUint16(ip, from), to)
	ip = be.AppendUint16(be.AppendUint16(ip, uint16(8+len(payload))), 0)
	return append(ip, payload...)
}

// An attack sends a packet that pretends to come from the overlay or from a peer.
type attack struct {
	name   string
	from   *lab.Host
	to     netip.AddrPort
	packet func(payload string) []byte
	source netip.Addr // of the outer packet; zero: the host's own
	victim net.PacketConn
}

func (a attack) run(payload string) error {
	if a.source.IsValid() {
		return a.from.Do(func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			whole := datagram(a.source, a.to.Addr(), 9999, a.to.Port(), string(a.packet(payload)))
			return unix.Sendto(fd, whole, 0, &unix.SockaddrInet4{Addr: a.to.Addr().As4()})
		})
	}
	conn, err := a.from.ListenPacket("udp4", "0.0.0.0:0")
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.WriteTo(a.packet(payload), net.UDPAddrFromAddrPort(a.to))
	return err
}

// arrives reports whether the victim receives the attacker's packet within the given time.
func (a attack) arrives(t *testing.T, payload string, within time.Duration) bool {
	t.Helper()
	buf := make([]byte, 2000)
	for end := time.Now().Add(within); time.Now().Before(end); {
		if err := a.run(payload); err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EHOSTUNREACH) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("%s: %v", a.name, err)
		}
		_ = a.victim.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if n, _, err := a.victim.ReadFrom(buf); err == nil && string(buf[:n]) == payload {
			return true
		}
	}
	return false
}

// Each attack succeeds if the filter is removed, and none succeeds with the filter.
func TestOnlyNodesReachTheOverlayAndNoPeerReachesANode(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	n1, n2, n3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	far := c.OnPrem.Host // the host of the peer, behind node 1's gateway
	c.start(c.Nodes...)
	for i := range c.Nodes {
		c.ping(c.pod(i).Host, remotePod)
	}
	listen := func(h *lab.Host, at netip.Addr, port uint16) net.PacketConn {
		t.Helper()
		conn, err := h.ListenPacket("udp4", netip.AddrPortFrom(at, port).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	pod3, cluster, attacker := c.pod(2), c.Control.Host, c.pod(1).Host
	inside := n3.PodCIDR.Addr().Next() // the node's own address in its podCIDR
	onPod, onRemote := listen(pod3.Host, pod3.Addr, victimPort), listen(far, remotePod, victimPort)
	overlay := func(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, kernel.OverlayPort) }
	asRemote := func(p string) []byte { return vxlan(n3.Name, remotePod, pod3.Addr, p) }
	asAnybody := func(p string) []byte { return vxlan(n3.Name, netip.MustParseAddr("8.8.8.8"), pod3.Addr, p) }
	asPod := func(p string) []byte { return vxlan(n1.Name, pod3.Addr, remotePod, p) }
	plain := func(p string) []byte { return []byte(p) }

	// The rule of a CNI that masquerades packets from pods to nodes.
	masquerade := "table ip cni { chain p { type nat hook postrouting priority 100; ip saddr " + c.Pods[3].Addr.String() + " ip daddr 172.30.1.0/24 masquerade; }; }"
	if out, err := n2.Command(c.ctx, "nft", masquerade).CombinedOutput(); err != nil {
		t.Skipf("nft: %v %s", err, out)
	}
	// The rule of kube-proxy for a NodePort, which exists at every address of the node.
	const nodePort = 30080
	for _, n := range []*lab.Node{n1, n3} {
		nat := fmt.Sprintf("table ip services { chain p { type nat hook prerouting priority -100; fib daddr type local udp dport %d dnat to %v:%d; }; }", nodePort, pod3.Addr, victimPort)
		if out, err := n.Command(c.ctx, "nft", nat).CombinedOutput(); err != nil {
			t.Skipf("nft: %v %s", err, out)
		}
	}
	attacks := []attack{
		{name: "a pod as a remote pod", from: attacker, to: overlay(n3.Addr), packet: asRemote, victim: onPod},
		{name: "a pod as anybody", from: attacker, to: overlay(n3.Addr), packet: asAnybody, victim: onPod},
		{name: "a pod as another pod towards a peer", from: attacker, to: overlay(n1.Addr), packet: asPod, victim: onRemote},
		{name: "a pod that its CNI masquerades", from: c.Pods[3].Host, to: overlay(n3.Addr), packet: asRemote, victim: onPod},
		{name: "a pod of the node itself", from: c.Pods[5].Host, to: overlay(inside), packet: asRemote, victim: onPod},
		{name: "a pod of the node itself with a node's address", from: c.Pods[5].Host, to: overlay(inside), packet: asRemote, source: n1.Addr, victim: onPod},
		{name: "a host of the underlay", from: cluster, to: overlay(n3.Addr), packet: asRemote, victim: onPod},
		{name: "a host of the underlay towards a peer", from: cluster, to: overlay(n1.Addr), packet: asPod, victim: onRemote},
		{name: "a peer's pod through the tunnel", from: far, to: overlay(inside), packet: asRemote, source: remotePod, victim: onPod},
		{name: "a peer's pod to the gateway's node", from: far, to: overlay(n1.PodCIDR.Addr().Next()), packet: asPod, source: remotePod, victim: onRemote},
		{name: "a peer's pod to a service of a node", from: far, to: netip.AddrPortFrom(inside, 10250), packet: plain, source: remotePod, victim: listen(n3.Host, inside, 10250)},
		{name: "a peer's pod to a service of the gateway's node", from: far, to: netip.AddrPortFrom(n1.PodCIDR.Addr().Next(), 10250), packet: plain,
			source: remotePod, victim: listen(n1.Host, n1.PodCIDR.Addr().Next(), 10250)},
		{name: "a peer's pod to a NodePort", from: far, to: netip.AddrPortFrom(inside, nodePort), packet: plain, source: remotePod, victim: onPod},
		{name: "a peer's pod to a NodePort of the gateway's node", from: far, to: netip.AddrPortFrom(n1.PodCIDR.Addr().Next(), nodePort), packet: plain, source: remotePod, victim: onPod},
		{name: "a pod of the gateway's node as a remote pod", from: c.pod(0).Host, to: netip.AddrPortFrom(pod3.Addr, victimPort), packet: plain, source: remotePod, victim: onPod},
	}
	disableRPFilter(t, c)
	for i, a := range attacks {
		if a.arrives(t, fmt.Sprintf("filtered %d", i), 300*time.Millisecond) {
			t.Errorf("%s: arrives", a.name)
		}
	}
	// A peer may reach a pod on any node, and two mapped endpoints: a node, and a server behind
	// another node.
	server := netip.MustParseAddr("192.0.2.50")
	c.run(pod3.Host, "ip addr add %v/32 dev lo", server)
	c.run(n3.Host, "ip route add %v via %v", server, pod3.Addr)
	c.run(n1.Host, "ip route add %v via %v", server, n3.Addr)
	for _, a := range []attack{
		{name: "a peer's pod to a server behind another node", from: far, to: netip.AddrPortFrom(server, victimPort), packet: plain, source: remotePod,
			victim: listen(pod3.Host, server, victimPort)},
		{name: "a peer's pod to a pod", from: far, to: netip.AddrPortFrom(pod3.Addr, victimPort), packet: plain, source: remotePod, victim: onPod},
		{name: "a peer's pod to a mapped node", from: far, to: netip.AddrPortFrom(n1.Addr, 10251), packet: plain, source: remotePod, victim: listen(n1.Host, n1.Addr, 10251)},
	} {
		if !a.arrives(t, "allowed", time.Minute) {
			t.Errorf("%s: does not arrive", a.name)
		}
	}
	for i := range c.Nodes { // nodes reach peers, and get the answers
		if got, want := c.remoteSees(c.Nodes[i].Host), c.Nodes[i]; !got.IsValid() {
			t.Errorf("%s does not reach the peer", want)
		}
	}

	for _, n := range c.Nodes {
		c.freeze(c.agents[n])
		c.run(n.Host, "nft delete table inet %s", kernel.FilterTable)
	}
	for i, a := range attacks {
		if !a.arrives(t, fmt.Sprintf("unfiltered %d", i), time.Minute) {
			t.Errorf("%s: does not arrive without the filter either: the test proves nothing", a.name)
		}
	}
	for _, n := range c.Nodes {
		_ = c.agents[n].cmd.Process.Signal(unix.SIGCONT)
		c.eventually(n, func() error {
			out, err := n.Command(c.ctx, "nft", "list", "table", "inet", kernel.FilterTable).CombinedOutput()
			if err != nil {
				return fmt.Errorf("the filter is not back: %s", out)
			}
			return nil
		})
	}
	for i, a := range attacks {
		if a.arrives(t, fmt.Sprintf("again %d", i), 100*time.Millisecond) {
			t.Errorf("%s: arrives though the filter is back", a.name)
		}
	}
}

// disableRPFilter switches off the lab's strict reverse path filtering, which would also stop
// forged sources.
func disableRPFilter(t *testing.T, c *cluster) {
	t.Helper()
	for _, n := range c.Nodes {
		err := n.Do(func() error {
			entries, err := os.ReadDir("/proc/sys/net/ipv4/conf")
			for _, e := range entries {
				if e.Name() != kernel.OverlayDevice {
					err = errors.Join(err, os.WriteFile("/proc/sys/net/ipv4/conf/"+e.Name()+"/rp_filter", []byte("0"), 0))
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// Without the packet filter, an agent forwards no packets for peers, and no packet for them leaves
// in the clear.
func TestNoPeerTrafficIsForwardedWithoutTheFilter(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.start(c.Nodes[0])
	// nf_tables refuses changes of a table that belongs to another process, as long as that process
	// runs (NFT_TABLE_F_OWNER).
	owner := n.Command(c.ctx, "nft", "-i")
	in, err := owner.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Skip(err)
	}
	defer owner.Wait()
	defer in.Close()
	if _, err := in.Write([]byte("add table inet " + kernel.FilterTable + " { flags owner; }\n")); err != nil {
		t.Fatal(err)
	}
	c.eventually(n, func() error {
		out, err := n.Command(c.ctx, "nft", "list", "tables").CombinedOutput()
		if err != nil || !strings.Contains(string(out), kernel.FilterTable) {
			return fmt.Errorf("%s%w", out, err)
		}
		return nil
	})
	c.agents[n] = c.launch(n)
	c.eventually(n, func() error {
		s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
		if err != nil || !strings.Contains(s, "no traffic of peers is carried: packet filter: ") || !strings.Contains(s, `"ready": false`) {
			return fmt.Errorf("%s%w", s, err)
		}
		return nil
	})
	if _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); err == nil {
		t.Error("ready")
	}
	if s := c.snapshot(n); strings.Contains(s, kernel.OverlayDevice+":") || strings.Contains(s, "lookup 4201") || !strings.Contains(s, "418:\tfrom all lookup 4202") {
		t.Errorf("carries:\n%s", s)
	}
	in.Close() // the kernel removes the table
	_ = owner.Wait()
	c.eventually(n, func() error { _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); return err })
	c.ping(c.pod(1).Host, remotePod)
}
