package attacks

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/noise"
)

const wireGuardPort = 5871

func podChapter() chapter {
	return chapter{title: "From pods and hosts", attacks: []attack{
		{attacker: "a pod of a on the gateway's node", attempt: "packets from the address of a pod of b to a pod of another node",
			now: "only the gateway sends a peer's source into the overlay",
			run: func(t *testing.T, s *site) {
				p, v := s.onPod(t)
				s.spoof(t, s.podOfA(s.gateway).Host, s.seen(t, s.a, s.b, s.podOfB().Addr), p.Addr, v)
			}},
		{attacker: "a pod of a on another node", attempt: "packets from the address of a pod of b to a pod of another node",
			now: "dropped on its node: only the gateway may send a peer's source",
			run: func(t *testing.T, s *site) {
				p, v := s.onPod(t)
				s.spoof(t, s.podOfA(s.other).Host, s.seen(t, s.a, s.b, s.podOfB().Addr), p.Addr, v)
			}},
		{attacker: "a pod of a", attempt: "packets from the address of another pod of a to a pod of b",
			now: "dropped on its node, if pods have addresses of their nodes' podCIDRs. Within a node, the CNI must check addresses",
			run: func(t *testing.T, s *site) {
				b := s.podOfB()
				v := listen(t, b.Host, netip.AddrPortFrom(b.Addr, victimPort))
				s.spoof(t, s.podOfA(s.other).Host, s.podOfA(s.victimNode()).Addr, s.seen(t, s.a, s.b, b.Addr), v)
			}},
		{attacker: "a pod of a", attempt: "packets to a pod of b from an address that no host has",
			now: "dropped on its node: the source needs a route through the pod's device",
			run: func(t *testing.T, s *site) {
				b := s.podOfB()
				v := listen(t, b.Host, netip.AddrPortFrom(b.Addr, victimPort))
				s.spoof(t, s.podOfA(s.other).Host, netip.MustParseAddr("203.0.113.77"), s.seen(t, s.a, s.b, b.Addr), v)
			}},
		{attacker: "a pod of a", attempt: "packets that are no WireGuard messages, and messages of no session, to its own gateway's port",
			now: "dropped and counted", run: garbage},
		{attacker: "a pod of a, a pod of c", attempt: "reads the status of gateway and agents", now: "refused: it listens on the loopback address",
			run: func(t *testing.T, s *site) {
				for _, port := range []uint16{5873, 5875} {
					if s.inPod() {
						s.checkRefused(t, s.podOfA(s.other).Host, netip.AddrPortFrom(s.addr(), port))
						s.checkRefused(t, s.podOfC().Host, netip.AddrPortFrom(s.seen(t, s.c, s.a, s.addr()), port))
					}
					s.checkRefused(t, s.podOfA(s.other).Host, netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, port))
					s.checkRefused(t, s.podOfA(s.gateway).Host, netip.AddrPortFrom(podNetworkAddr(s.a.Nodes[s.gateway]), port))
					s.checkRefused(t, s.podOfC().Host, netip.AddrPortFrom(s.seen(t, s.c, s.a, podNetworkAddr(s.a.Nodes[s.gateway])), port))
				}
			}},
		{attacker: "a pod of a, a node", attempt: "maps endpoints by Liqo's IPAM service on port 6000",
			now: "off by default; here it listens on the manager's loopback address",
			run: func(t *testing.T, s *site) {
				for _, from := range []*lab.Host{s.podOfA(s.other).Host, s.a.Nodes[s.gateway].Host} {
					s.checkRefused(t, from, netip.AddrPortFrom(s.a.Control.Addr, 6000))
				}
			}},
		{attacker: "a host of the underlay", attempt: "replays recorded messages of b's gateway, with its address and its own",
			now: "dropped as replays; b's endpoint is unchanged", run: replays},
		{attacker: "a host of the underlay", attempt: "forged messages for the session of b", now: "dropped as forged", run: forged},
		{attacker: "a host of the underlay, a pod with CAP_NET_RAW", attempt: "ICMP \"fragmentation needed\" about the gateway's own messages to b",
			now: "ignored below 1280 octets: the tunnel's MTU stays at least 1200",
			run: shrinkPath},
		{attacker: "a caller of the IPAM", attempt: "maps a node, a Service, the API server, a metadata service, the IPAM's own host and a pod of b for c",
			now: "refused; --ipam-allow can admit nodes, Services and networks of peers", run: mapForbidden},
	}}
}

// spoof sends packets with a foreign source address and checks that none arrives.
func (s *site) spoof(t *testing.T, from *lab.Host, src, dst netip.Addr, v *victim) {
	t.Helper()
	v.checkStopped(t, t.Name(), func() error {
		return sendRaw(from, datagram(netip.AddrPortFrom(src, 9), netip.AddrPortFrom(dst, victimPort), t.Name()))
	})
}

// checkRefused checks that a TCP connection fails.
func (s *site) checkRefused(t *testing.T, from *lab.Host, to netip.AddrPort) {
	t.Helper()
	ctx, cancel := contextOf(t, grace)
	defer cancel()
	if conn, err := from.Dial(ctx, "tcp4", to.String()); err == nil {
		conn.Close()
		t.Errorf("%s connects to %v", from, to)
	}
}

func garbage(t *testing.T, s *site) {
	const each = 500
	to := netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, wireGuardPort)
	from := s.podOfA(s.other).Host
	kinds := map[string]func() []byte{
		"tunnel_type":    func() []byte { return []byte("what is no message at all") },
		"tunnel_session": func() []byte { return append(noise.DataHeader(0x12345678, 7), make([]byte, 64)...) },
	}
	for reason, next := range kinds {
		s.checkGrows(t, each/2, "isthmus_drops_total", fmt.Sprintf("reason=%q", reason), func() { // the kernel may lose some packets
			for range each {
				must(t, sendUDP(from, to, next()))
			}
		})
	}
}

// gatewayOfB returns the address of the node with b's active gateway.
func (s *site) gatewayOfB(t *testing.T) netip.Addr {
	t.Helper()
	i, err := s.b.ActiveGateway(t.Context())
	must(t, err)
	return s.b.Nodes[i].Addr
}

// recorded captures n data messages from b's gateway to a's. It returns complete IP packets.
func (s *site) recorded(t *testing.T, n int) [][]byte {
	t.Helper()
	from, to := s.gatewayOfB(t), s.a.Nodes[s.gateway].Addr
	k := newTap(t, s.a.Nodes[s.gateway].Host, func(ip []byte) bool {
		const headers = 20 + 8
		return ip[9] == unix.IPPROTO_UDP && bytes.Equal(ip[12:16], from.AsSlice()) && bytes.Equal(ip[16:20], to.AsSlice()) && len(ip) > headers && len(ip) <= 1500 && ip[headers] == noise.DataType
	})
	eventually(t, "messages of b", func() error { // the talks' pings cause messages
		if len(k.packets()) < n {
			return errors.New("not yet")
		}
		return nil
	})
	return k.packets()
}

func replays(t *testing.T, s *site) {
	before := endpointOf(t, s.a, s.b).Status.Connection.PeerConfiguration
	to := netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, wireGuardPort)
	messages := s.recorded(t, 20) // a packet may contain several messages, because the tap sees it before the kernel segments it
	s.checkGrows(t, 5, "isthmus_drops_total", `reason="tunnel_replay"`, func() {
		for _, m := range messages {
			must(t, sendRaw(s.Lab.Underlay, m))
			must(t, sendUDP(s.b.Control.Host, to, m[28:])) // from the control plane's host, which could run a gateway of the peer
		}
	})
	after := endpointOf(t, s.a, s.b).Status.Connection.PeerConfiguration
	if fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("the peer was at %v, and is at %v", before, after)
	}
}

func shrinkPath(t *testing.T, s *site) {
	n, b := s.a.Nodes[s.gateway], s.gatewayOfB(t)
	quoted := datagram(netip.AddrPortFrom(n.Addr, wireGuardPort), netip.AddrPortFrom(b, wireGuardPort), "a message")
	packet := ipv4(s.a.Control.Addr, n.Addr, unix.IPPROTO_ICMP, header{}, icmp(3, 4, 576, quoted))
	before := s.mtuTo(t, s.b)
	defer func() {
		if out, err := s.host().Command(t.Context(), "ip", "route", "flush", "cache").CombinedOutput(); err != nil {
			t.Errorf("%v %s", err, out)
		}
		eventually(t, "the MTU from before", func() error {
			if now := s.mtuTo(t, s.b); now != before {
				return fmt.Errorf("it is %d; want %d", now, before)
			}
			return nil
		})
	}()
	least := before
	eventually(t, "the kernel believes it", func() error {
		must(t, sendRaw(s.a.Control.Host, packet))
		if least = s.mtuTo(t, s.b); least == before {
			return errors.New("not yet")
		}
		return nil
	})
	if least < 1200 {
		t.Errorf("the tunnel's MTU is %d", least)
	}
	s.wholeMessages(t, n, b)
}

// wholeMessages checks that a message of more than 576 octets, but no fragment, leaves for b's
// gateway.
func (s *site) wholeMessages(t *testing.T, n *lab.Node, b netip.Addr) {
	t.Helper()
	k := newTap(t, n.Host, func(ip []byte) bool {
		return ip[9] == unix.IPPROTO_UDP && bytes.Equal(ip[16:20], b.AsSlice()) && (binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 || len(ip) > 576)
	})
	from, to := s.podOfA(s.gateway), s.seen(t, s.a, s.b, s.podOfB().Addr)
	eventually(t, "an answer to 1000 octets", func() error {
		_, err := from.PingWith(t.Context(), to, lab.PingOptions{Size: 1000, Wait: time.Second})
		return err
	})
	eventually(t, "a message of b's", func() error {
		if len(k.packets()) == 0 {
			return errors.New("none was seen")
		}
		return nil
	})
	for _, ip := range k.packets() {
		if binary.BigEndian.Uint16(ip[6:])&0x3fff != 0 {
			t.Errorf("a fragment of %d octets", len(ip))
		}
	}
}

// mtuTo returns the MTU of the tunnel from a's gateway to another cluster.
func (s *site) mtuTo(t *testing.T, of *fleet.Cluster) int {
	t.Helper()
	text, err := s.host().Get(t.Context(), "http://127.0.0.1:5873/status")
	must(t, err)
	var status struct {
		Peers []struct {
			ID  string `json:"id"`
			MTU int    `json:"mtu"`
		} `json:"peers"`
	}
	must(t, json.Unmarshal([]byte(text), &status))
	for _, p := range status.Peers {
		if p.ID == of.ID {
			return p.MTU
		}
	}
	t.Fatalf("cluster %s is no peer of the gateway", of)
	return 0
}

func forged(t *testing.T, s *site) {
	m := bytes.Clone(s.recorded(t, 1)[0])
	m[28+8+5] = 1 // a counter far ahead of the current one
	rand.Read(m[28+noise.HeaderLen:])
	s.checkGrows(t, tries, "isthmus_drops_total", `reason="tunnel_forged"`, func() {
		for range tries {
			must(t, sendUDP(s.b.Control.Host, netip.AddrPortFrom(s.a.Nodes[s.gateway].Addr, wireGuardPort), m[28:]))
		}
	})
}

func mapForbidden(t *testing.T, s *site) {
	for what, addr := range map[string]netip.Addr{
		"a node":             s.a.Nodes[0].Addr,
		"the API server":     s.a.Control.Addr,
		"a Service":          netip.MustParseAddr("10.96.0.1"),
		"a metadata service": netip.MustParseAddr("169.254.169.254"),
		"Alibaba's":          netip.MustParseAddr("100.100.100.200"),
		"loopback":           netip.MustParseAddr("127.0.0.1"),
		"everybody":          netip.MustParseAddr("255.255.255.255"),
		"a pod of b":         s.seen(t, s.a, s.b, s.podOfB().Addr),
	} {
		if got, err := s.a.MapEndpoint(t.Context(), addr, s.c); err == nil {
			t.Errorf("%s, %v, is mapped to %v", what, addr, got)
		}
	}
	if _, err := s.a.MapEndpoint(t.Context(), s.a.OnPrem.Addr, s.b); err != nil {
		t.Errorf("what may be mapped: %v", err)
	}
	time.Sleep(grace)
}
