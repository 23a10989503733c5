package gateway

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/gateway/check"
)

var long = flag.Bool("long", false, "also what takes long: half a minute until a path is tried again that has dropped large packets, and fairness among 4,000 peers")

// dontFragment makes the pinger send with DF, and fail if the kernel knows a smaller path MTU.
func (p *pinger) dontFragment(t *testing.T) *pinger {
	t.Helper()
	raw, err := p.conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// passes checks that a ping with IPv4 packets of the given size is answered.
func (s *space) passes(p *pinger, size int) {
	s.t.Helper()
	if err := p.send(size, size-28); err != nil {
		s.t.Errorf("%s to %v: %d octets: %v", s.name, p.dst, size, err)
		return
	}
	if _, err := p.receive(time.Now().Add(patience)); err != nil {
		s.t.Errorf("%s to %v: %d octets: %v", s.name, p.dst, size, err)
	}
}

// learns checks that the kernel of s learns the path MTU from the answer to a packet that is too
// large. The kernel may know that MTU already.
func (s *space) learns(p *pinger, size, mtu int) {
	s.t.Helper()
	if err := p.send(size, size-28); err != nil && !errors.Is(err, unix.EMSGSIZE) {
		s.t.Errorf("%s to %v: %d octets: %v", s.name, p.dst, size, err)
	}
	deadline := time.Now().Add(patience)
	for {
		routes, err := s.nl.RouteGet(p.dst)
		if err == nil && routes[0].MTU == mtu {
			break
		}
		if time.Now().After(deadline) {
			s.t.Errorf("%s to %v: %v, %v, want MTU %d", s.name, p.dst, routes, err, mtu)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := p.send(size, size-28); !errors.Is(err, unix.EMSGSIZE) {
		s.t.Errorf("%s to %v: %d octets a second time: %v, want EMSGSIZE", s.name, p.dst, size, err)
	}
	s.passes(p, mtu)
}

// One peer is behind a path with a smaller MTU. Only packets for that peer are limited, and each
// sender learns the limit from the engine. If a router's next link becomes even smaller, the
// gateway finds that out as well.
func TestEachPeerHasItsOwnMTU(t *testing.T) {
	needRoot(t)
	wire, far := newWire(t), newWire(t)
	a, b, c := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500), newSite(t, "c", 3, far, 1500)
	router := newSpace(t, "router")
	router.sysctl("net/ipv4/ip_forward", "1")
	for name, w := range map[string]*space{"near": wire, "far": far} {
		veth2(router, name, w, "router", 1500)
		w.must(w.nl.LinkSetMaster(w.link("router"), w.link("br0")))
	}
	router.address("near", "192.0.2.254/32")
	route := func(s *space, dst, link string, via net.IP, mtu int) {
		r := &netlink.Route{Dst: &net.IPNet{IP: net.ParseIP(dst).To4(), Mask: net.CIDRMask(32, 32)},
			LinkIndex: s.link(link).Attrs().Index, Scope: netlink.SCOPE_LINK, MTU: mtu}
		if via != nil {
			r.Gw, r.Flags, r.Scope = via, int(netlink.FLAG_ONLINK), netlink.SCOPE_UNIVERSE
		}
		s.must(s.nl.RouteReplace(r))
	}
	route(router, a.addr, "near", nil, 0)
	route(router, c.addr, "far", nil, 0)
	route(c.space, a.addr, "eth0", net.ParseIP("192.0.2.254"), 0)
	route(a.space, c.addr, "eth0", net.ParseIP("192.0.2.254"), 1400)
	a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	a.write("c.yaml", a.peering(c, 248, 246, "c.invalid")) // a learns c's address only from c's messages
	b.write("a.yaml", b.peering(a, 250, 246, a.addr))
	c.write("a.yaml", c.peering(a, 246, 248, a.addr))
	for _, s := range []*site{a, b, c} {
		s.start()
	}
	a.pod.ping("10.246.1.10")
	a.pod.ping("10.248.1.10")
	mtuOf := func(id string) int {
		for _, p := range a.status().Peers {
			if p.ID == id {
				return p.MTU
			}
		}
		return 0
	}
	a.eventually("not the MTUs of the ways", func() error {
		if st := a.status(); st.MTU != 1440 || mtuOf(b.id) != 1440 || mtuOf(c.id) != 1328 {
			return fmt.Errorf("MTU %d, to b %d, to c %d", st.MTU, mtuOf(b.id), mtuOf(c.id))
		}
		return nil
	})

	a.pod.passes(a.pod.pinger("10.246.1.10").dontFragment(t), 1440)
	toC := a.pod.pinger("10.248.1.10").dontFragment(t)
	a.pod.passes(toC, 1328)
	a.pod.learns(toC, 1440, 1328)
	a.learns(a.pinger("10.248.1.10").dontFragment(t), 1329, 1328) // from a node, behind the NAPT address

	b.pod.passes(b.pod.pinger("10.250.1.10").dontFragment(t), 1440)
	if n := a.metric(`isthmus_peer_too_big_total{peer="` + c.id + `",result="reported"}`); n != "2" {
		t.Errorf("%s errors were sent", n)
	}

	// A packet without DF arrives regardless of its size. The pod's kernel fragments it once that
	// kernel has learned the MTU. If the sender ignores the MTU, the engine fragments it.
	cut := a.pod.pinger("10.248.1.10")
	raw, err := cut.conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT)
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{1328, 1329, 1440, 1500, 3000, 20000} {
		a.pod.passes(cut, size)
	}
	if n := a.metric(`isthmus_peer_too_big_total{peer="` + c.id + `",result="fragmented"}`); n == "0" || n == "" {
		t.Errorf("%s packets were fragmented", n)
	}

	// The router's next link gets a smaller MTU. The kernel learns of it from the router, and the
	// gateway queries the kernel.
	router.must(router.nl.LinkSetMTU(router.link("far"), 1300))
	start := time.Now()
	a.eventually("the smaller path was not noticed", func() error {
		toC.send(1, 1328-28)
		time.Sleep(100 * time.Millisecond)
		if mtu := mtuOf(c.id); mtu != 1232 {
			return fmt.Errorf("MTU %d", mtu)
		}
		return nil
	})
	t.Logf("noticed after %v", time.Since(start).Round(time.Millisecond))
	a.pod.learns(toC, 1328, 1232)
	if mtu := mtuOf(b.id); mtu != 1440 {
		t.Errorf("MTU towards b is %d now", mtu)
	}
}

// With IPv6 in the tunnel, ICMPv6 "packet too big" limits only the packets for that peer, as in
// TestEachPeerHasItsOwnMTU. The limit is never below 1280 octets: on a path that carries less, the
// outer packets are fragmented.
func TestEachPeerHasItsOwnMTUOverIPv6(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b, c := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500), newSite(t, "c", 3, wire, 1500)
	for i, s := range []*site{a, b, c} {
		s.overIPv6(i + 1)
	}
	setMTU := func(mtu int) {
		a.must(a.nl.RouteReplace(&netlink.Route{Dst: &net.IPNet{IP: net.ParseIP(c.addr).To4(), Mask: net.CIDRMask(32, 32)},
			LinkIndex: a.link("eth0").Attrs().Index, Scope: netlink.SCOPE_LINK, MTU: mtu}))
	}
	setMTU(1400)
	a.write("b.yaml", a.peering6(b, 246, 250, b.addr))
	a.write("c.yaml", a.peering6(c, 248, 246, c.addr))
	b.write("a.yaml", b.peering6(a, 250, 246, a.addr))
	c.write("a.yaml", c.peering6(a, 246, 248, a.addr))
	for _, s := range []*site{a, b, c} {
		s.start()
	}
	a.pod.ping("fd00:246::10")
	a.pod.ping("fd00:248::10")
	pass := func(p *pinger, size int) {
		t.Helper()
		if err := p.send(size, size-48); err != nil {
			t.Errorf("%v: %d octets: %v", p.dst, size, err)
		} else if _, err := p.receive(time.Now().Add(patience)); err != nil {
			t.Errorf("%v: %d octets: %v", p.dst, size, err)
		}
	}
	learn := func(s *space, p *pinger, size, mtu int) {
		t.Helper()
		a.eventually("not told", func() error {
			if err := p.send(size, size-48); err != nil {
				return err
			}
			time.Sleep(20 * time.Millisecond)
			routes, err := s.nl.RouteGet(p.dst)
			if err == nil && routes[0].MTU != mtu {
				err = fmt.Errorf("%v, want MTU %d", routes, mtu)
			}
			return err
		})
	}
	pass(a.pod.pinger("fd00:246::10"), 1440)
	toC := a.pod.pinger("fd00:248::10")
	pass(toC, 1328)
	learn(a.pod, toC, 1329, 1328)
	pass(toC, 1400) // the pod sends it as fragments
	node := a.pinger("fd00:248::10")
	learn(a.space, node, 1329, 1328)

	setMTU(1300)
	learn(a.pod, toC, 1328, 1280)
	pass(toC, 1280)
}

// A path drops large packets without an ICMP error, like a bridge whose port has a smaller MTU.
// Such a bridge passes superpackets of any size, so the test makes the kernel segment WireGuard's
// superpackets before the bridge. Both sides must find out and inform their senders. When the path
// is repaired, they must return to the full size.
func TestPathMTUFollowsABlackHoleAndItsRepair(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	for _, s := range []*site{a, b} {
		s.must(s.nl.LinkSetGSOMaxSegs(s.link("eth0"), 1))
	}
	a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	b.write("a.yaml", b.peering(a, 250, 246, a.addr))
	a.start()
	b.start()
	a.pod.ping("10.246.1.10")
	b.pod.ping("10.250.1.10")
	both := func(what string, mtu int) {
		t.Helper()
		for _, s := range []*site{a, b} {
			s.eventually(what, func() error {
				p := s.status().Peers[0]
				if p.PathMTU.State != check.PathSearchComplete || p.PathMTU.Bytes != mtu || p.MTU != mtu || p.State != check.Connected || p.Loss != 0 {
					return fmt.Errorf("%s: %s, loss %v, MTU %d, path %+v", s.name, p.State, p.Loss, p.MTU, p.PathMTU)
				}
				if reported := strings.Contains(p.Message, "drops larger packets"); reported != p.PathMTU.Narrow() || (p.Reason == v1alpha1.CauseNarrowPath) != reported || !v1alpha1.Carries(p.Reason) {
					return fmt.Errorf("%s: %s: %s", s.name, p.Reason, p.Message)
				}
				return nil
			})
		}
	}
	both("not what the way takes", 1440)
	large := a.pod.pinger("10.246.1.10").dontFragment(t)
	a.pod.passes(large, 1440)

	wire.must(wire.nl.LinkSetMTU(wire.link("b"), 1300))
	start := time.Now()
	both("the black hole is not found", 1232)
	t.Logf("found after %v", time.Since(start).Round(time.Millisecond))
	a.pod.learns(large, 1440, 1232)
	b.pod.passes(b.pod.pinger("10.250.1.10").dontFragment(t), 1232)
	peer := `{peer="` + b.id + `"}`
	if path, expected := a.metric("isthmus_peer_path_mtu_bytes"+peer), a.metric("isthmus_peer_expected_mtu_bytes"+peer); path != "1232" || expected != "1440" {
		t.Errorf("metrics report %s of %s", path, expected)
	}

	if !*long {
		return
	}
	wire.must(wire.nl.LinkSetMTU(wire.link("b"), 1500))
	start = time.Now()
	both("still what it was", 1440)
	t.Logf("forgotten after %v", time.Since(start).Round(time.Millisecond))
	a.pod.passes(a.pod.pinger("10.246.1.10"), 1440)
}
