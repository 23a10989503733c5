package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/gateway/check"
)

// traceroute sends one probe by UDP, ICMP or TCP for each TTL. It returns the source of each
// hop's ICMP error, which must quote the probe as it was sent, followed by the address that answers
// as the destination.
func (s *space) traceroute(method, dst string) (hops []string) {
	s.t.Helper()
	for ttl := 1; ttl <= 8; ttl++ {
		from, reached := s.probe(method, netip.MustParseAddr(dst), ttl, patience)
		if hops = append(hops, from); reached {
			return hops
		}
	}
	return hops
}

// probe sends one probe and returns the address that answers, or "*" if none does in time. reached
// is true if the probe has reached its destination.
func (s *space) probe(method string, dst netip.Addr, ttl int, wait time.Duration) (from string, reached bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	var dialing sync.WaitGroup
	defer dialing.Wait()
	defer cancel()
	network, protocol := "ip4:icmp", 1
	if dst.Is6() {
		network, protocol = "ip6:ipv6-icmp", 58
	}
	const port = 33434
	var listener *net.IPConn
	var udp *net.UDPConn
	var connected atomic.Bool // or refused, which also shows that the destination was reached
	source := 0               // source port, or identifier of the echo request
	s.do(func() (err error) {
		if listener, err = net.ListenIP(network, nil); err != nil {
			return err
		}
		listener.SetReadDeadline(time.Now().Add(wait))
		switch method {
		case "udp":
			if udp, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, port))); err != nil {
				return err
			}
			source = udp.LocalAddr().(*net.UDPAddr).Port
			if dst.Is6() {
				err = ipv6.NewConn(udp).SetHopLimit(ttl)
			} else {
				err = ipv4.NewConn(udp).SetTTL(ttl)
			}
			if err == nil {
				_, err = udp.Write([]byte("probe"))
			}
		case "icmp":
			source = 4242
			m := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: source, Seq: ttl}}
			if dst.Is6() {
				m.Type = ipv6.ICMPTypeEchoRequest
				err = ipv6.NewPacketConn(listener).SetHopLimit(ttl)
			} else {
				err = ipv4.NewPacketConn(listener).SetTTL(ttl)
			}
			var b []byte
			if err == nil {
				b, err = m.Marshal(nil)
			}
			if err == nil {
				_, err = listener.WriteTo(b, &net.IPAddr{IP: dst.AsSlice()})
			}
		case "tcp":
			source = 20000 + ttl
			d := net.Dialer{LocalAddr: &net.TCPAddr{Port: source}, Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				c.Control(func(fd uintptr) {
					if dst.Is6() {
						err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, ttl)
					} else {
						err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, ttl)
					}
				})
				return err
			}}
			dialing.Go(func() {
				err := s.runIn(func() error {
					c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(dst, port).String())
					if err == nil {
						c.Close()
					}
					return err
				})
				if err == nil || errors.Is(err, unix.ECONNREFUSED) {
					connected.Store(true)
					listener.SetReadDeadline(time.Now())
				}
			})
		}
		return err
	})
	defer listener.Close()
	if udp != nil {
		defer udp.Close()
	}
	buf := make([]byte, 2000)
	for {
		n, peer, err := listener.ReadFrom(buf)
		if connected.Load() {
			return dst.String(), true
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return "*", false
		}
		s.must(err)
		m, err := icmp.ParseMessage(protocol, buf[:n])
		if err != nil {
			continue
		}
		var quote []byte
		switch body := m.Body.(type) {
		case *icmp.Echo:
			if (m.Type == ipv4.ICMPTypeEchoReply || m.Type == ipv6.ICMPTypeEchoReply) && body.ID == source && body.Seq == ttl {
				return peer.String(), true
			}
		case *icmp.TimeExceeded:
			quote = body.Data
		case *icmp.DstUnreach:
			quote, reached = body.Data, true
		}
		if s.quotes(quote, dst, method, source, port) {
			return peer.String(), reached
		}
	}
}

// quotes reports whether an ICMP error quotes the probe with the addresses and ports with which
// it was sent.
func (s *space) quotes(b []byte, dst netip.Addr, method string, source, port int) bool {
	header, at := 20, 16
	if dst.Is6() {
		header, at = 40, 24
	}
	if len(b) < header+8 {
		return false
	}
	to, _ := netip.AddrFromSlice(b[at : at+len(dst.AsSlice())])
	t := b[header:]
	if to != dst {
		return false
	}
	if method == "icmp" {
		return int(t[4])<<8|int(t[5]) == source
	}
	return int(t[0])<<8|int(t[1]) == source && int(t[2])<<8|int(t[3]) == port
}

// Every hop on the path answers with an address that the sender knows, and all of these differ:
// our node, our gateway, the other gateway (with the address that the connection check uses), the
// other node, and the pod. The other node answers with the NAPT address or, if its kernel uses an
// address of the PodCIDR, with that one.
func TestTracerouteShowsEveryHop(t *testing.T) {
	needRoot(t)
	for _, six := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6 %t", six), func(t *testing.T) {
			wire := newWire(t)
			a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
			pod, way := "10.246.1.10", []string{"10.244.1.1", "169.254.100.1", "10.247.0.1", "10.246.0.0", "10.246.1.10"}
			if six {
				pod, way = "fd00:246::10", []string{"fd00:244::1", "100::a9fe:6401", "fd00:247::1", "fd00:246::1", "fd00:246::10"}
				a.overIPv6(1)
				b.overIPv6(2)
				a.write("b.yaml", a.peering6(b, 246, 250, "2001:db8::2"))
				b.write("a.yaml", b.peering6(a, 250, 246, "2001:db8::1"))
			} else {
				a.write("b.yaml", a.peering(b, 246, 250, b.addr))
				b.write("a.yaml", b.peering(a, 250, 246, a.addr))
			}
			for _, s := range []*site{a, b} {
				s.sysctl("net/ipv4/icmp_ratelimit", "0")
				s.sysctl("net/ipv6/icmp/ratelimit", "0")
				s.start()
			}
			a.pod.ping(pod)
			for _, method := range []string{"udp", "icmp", "tcp"} {
				if got := a.pod.traceroute(method, pod); !slices.Equal(got, way) {
					t.Errorf("%s from a pod: %s\nwant %s", method, strings.Join(got, " "), strings.Join(way, " "))
				}
				if got := a.traceroute(method, pod); !slices.Equal(got, way[1:]) {
					t.Errorf("%s from a node: %s\nwant %s", method, strings.Join(got, " "), strings.Join(way[1:], " "))
				}
			}
		})
	}
}

// Two gateways send a packet back and forth, because each has a mapped endpoint whose real address
// is the mapped endpoint of the other cluster. Both kernels decrement the TTL, so one packet
// crosses the tunnel at most TTL times. It also causes at most one ICMP "time exceeded", which must
// find its way back through all the flows to the sender.
func TestALoopBetweenGatewaysEndsByTTL(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	mapped := func(peer *site, pods, external int, real, seen string) string {
		return fmt.Sprintf(`---
apiVersion: net.liqo.io/v1alpha1
kind: NatMapping
metadata: {name: natmapping-%s}
spec:
  clusterID: %s
  podCIDR: 10.%d.0.0/16
  externalCIDR: 10.%d.0.0/16
  clusterMappings: {%s: %s}
`, peer.name, peer.id, pods, external, real, seen)
	}
	a.write("b.yaml", a.peering(b, 246, 250, b.addr)+mapped(b, 246, 251, "10.247.0.9", "10.251.0.9"))
	b.write("a.yaml", b.peering(a, 250, 246, a.addr)+mapped(a, 250, 247, "10.251.0.9", "10.247.0.9"))
	for _, s := range []*site{a, b} {
		s.sysctl("net/ipv4/icmp_ratelimit", "0")
		s.start()
	}
	a.pod.ping("10.246.1.10")
	for _, s := range []*site{a, b} {
		s.eventually("still looking for the path MTU", func() error {
			if path := s.status().Peers[0].PathMTU; path.State != check.PathSearchComplete {
				return fmt.Errorf("%+v", path)
			}
			return nil
		})
	}
	sent := func() (n int) {
		for s, peer := range map[*site]*site{a: b, b: a} {
			value := s.metric(`isthmus_peer_transmit_packets_total{peer="` + peer.id + `"}`)
			count, err := strconv.Atoi(value)
			s.must(err)
			n += count
		}
		return n
	}
	loop := netip.MustParseAddr("10.247.0.9")
	for _, ttl := range []int{10, 30, 64} {
		start := time.Now()
		before := sent()
		wait := patience
		if ttl == 64 {
			wait = 600 * time.Millisecond // the path back may be too long for the "time exceeded" itself
		}
		from, _ := a.pod.probe("icmp", loop, ttl, wait)
		if ttl < 64 && from == "*" {
			t.Errorf("TTL %d: no time exceeded", ttl)
		}
		n := 0
		for end := time.Now().Add(patience); n < ttl-2 && time.Now().Before(end); n = sent() - before {
			time.Sleep(300 * time.Millisecond)
		}
		// The packet and the ICMP error cross the tunnel. In addition, each connection check sends
		// at most three messages per second, two of them for the path MTU, and their answers.
		most := 2*ttl + 12*int(1+time.Since(start)/time.Second)
		if n > most || n < ttl-2 {
			t.Errorf("TTL %d: %d packets in the tunnel, want %d to %d", ttl, n, ttl-2, most)
		}
		t.Logf("TTL %d: %s answers, %d packets in the tunnel", ttl, from, n)
	}
}
