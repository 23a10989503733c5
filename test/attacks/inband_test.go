package attacks

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/inband"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// inBandChapter lets the managers of clusters a and b use the tunnel. Cluster c has not enabled
// that.
func inBandChapter() chapter {
	return chapter{title: "At a's API server, through the tunnel (`spec.inBand` of a and b)", prepare: prepareInBand, attacks: []attack{
		{attacker: "a pod of b", attempt: "TCP to the port at which a's gateway serves b's manager", now: "dropped: the source must be the address of b's gateway, which no pod has",
			run: func(t *testing.T, s *site) {
				s.checkGrows(t, 1, "isthmus_drops_total", `reason="local_source"`, func() { s.checkRefused(t, s.podOfB().Host, s.inBandPort(t, s.b)) })
			}},
		{attacker: "a node of b", attempt: "TCP to the port at which a's gateway serves b's manager, from the address of b's gateway (NAPT)", now: "dropped by b's gateway: only it may connect to a peer's gateway",
			run: func(t *testing.T, s *site) { s.checkRefused(t, s.b.Nodes[len(s.b.Nodes)-1].Host, s.inBandPort(t, s.b)) }},
		{attacker: "a pod of b", attempt: "raw packets to the port at which a's gateway serves b's manager, from the addresses of the gateways of a, b and c",
			now: "dropped: a pod must use its own address, and only b's gateway may connect to a peer's gateway", run: inBandSpoofed},
		{attacker: "c's gateway", attempt: "TCP to the port at which a's gateway serves b's manager, with its own address, and with those of b's gateway",
			now: "dropped: c has not agreed, and the source must be in the networks of the peer whose key opened the message", run: inBandOfAnother},
		{attacker: "a pod and a node of a", attempt: "TCP to the port at which b's gateway serves a's manager", now: "dropped by one of the two gateways",
			run: func(t *testing.T, s *site) {
				at := netip.AddrPortFrom(external(t, s.a, s.b).Addr().Next(), inband.Port)
				for _, h := range []*lab.Host{s.podOfA(s.other).Host, s.a.Nodes[s.other].Host} {
					s.checkRefused(t, h, at)
				}
			}},
		{attacker: "a pod of a", attempt: "TCP to the port at which a's gateway serves a's manager", now: "refused: the TLS handshake needs the gateways' private key; the chart's NetworkPolicy admits only managers",
			run: inBandStranger},
	}}
}

// prepareInBand lets b's manager reach a's API server through the tunnel, and replaces c's
// gateway by the attacker's.
func prepareInBand(t *testing.T, s *site) {
	if s.inPod() { // the manager's host needs routes to pods, because a real manager would be a Pod
		for _, n := range s.a.Nodes {
			to := &net.IPNet{IP: n.PodCIDR.Addr().AsSlice(), Mask: net.CIDRMask(n.PodCIDR.Bits(), n.PodCIDR.Addr().BitLen())}
			route := &netlink.Route{Dst: to, Gw: n.Addr.AsSlice()}
			must(t, s.a.Control.Do(func() error { return netlink.RouteReplace(route) }))
		}
	}
	inBand := func(t *testing.T, on bool) {
		s.isthmus(t, "peer", fmt.Sprintf("--in-band=%t", on), "--context", s.a.Name, "--remote-context", s.b.Name, "--services", importable)
	}
	s.after(func(t *testing.T) { inBand(t, false) })
	inBand(t, true)
	eventually(t, "b's manager at a's API server", func() error {
		n, err := s.a.Metric(t.Context(), "isthmus_peer_in_band_connections", `side="theirs"`)
		if err == nil && n == 0 {
			err = errors.New("it has no connection")
		}
		return err
	})
	s.becomeGateway(t)
}

// inBandPort returns the address of a's in-band port, as another cluster reaches it through the
// tunnel.
func (s *site) inBandPort(t *testing.T, at *fleet.Cluster) netip.AddrPort {
	t.Helper()
	return netip.AddrPortFrom(external(t, at, s.a).Addr().Next(), inband.Port)
}

// gatewayAddrs returns the addresses of a cluster's gateway inside the tunnel, as another cluster
// sees them.
func gatewayAddrs(t *testing.T, at, of *fleet.Cluster) []netip.Addr {
	t.Helper()
	p, err := at.Peering(t.Context(), of)
	must(t, err)
	pods := netip.MustParsePrefix(p.Status.Remote.PodCIDRSeen)
	return []netip.Addr{pods.Addr(), external(t, at, of).Addr().Next()}
}

// syns returns more TCP connection requests than a gateway accepts from one peer at once. If they
// arrive, the gateway refuses some of them and counts these.
func syns(src netip.Addr, to netip.AddrPort) (packets [][]byte) {
	be := binary.BigEndian
	for i := range 4 * inband.OpeningBurst {
		b := be.AppendUint16(be.AppendUint16(nil, uint16(20000+i)), to.Port())
		b = append(b, 0, 0, 0, 1, 0, 0, 0, 0, 5<<4, 2, 0xff, 0xff, 0, 0, 0, 0) // SYN
		pseudo := append(append([]byte{}, src.AsSlice()...), to.Addr().AsSlice()...)
		pseudo = append(pseudo, 0, unix.IPPROTO_TCP, 0, byte(len(b)))
		be.PutUint16(b[16:], checksum(append(pseudo, b...)))
		packets = append(packets, ipv4(src, to.Addr(), unix.IPPROTO_TCP, header{}, b))
	}
	return packets
}

// noRequests calls send, and checks that its packets do not count as connection requests of b at
// a's in-band port. If more than a few of them did, the gateway would refuse and count some.
func (s *site) noRequests(t *testing.T, send func()) {
	t.Helper()
	const refused = "isthmus_peer_in_band_refused_total"
	before := s.metric(t, refused, fmt.Sprintf("peer=%q", s.b.ID))
	send()
	s.checkTraffic(t) // when checkTraffic returns, the gateway has processed the packets of send
	if n := s.metric(t, refused, fmt.Sprintf("peer=%q", s.b.ID)) - before; n > 0 {
		t.Errorf("%v connections of b were refused, so they had arrived", n)
	}
}

func inBandSpoofed(t *testing.T, s *site) {
	to, pod := s.inBandPort(t, s.b), s.podOfB().Host
	sources := append(gatewayAddrs(t, s.a, s.b), gatewayAddrs(t, s.b, s.a)...)
	sources = append(sources, gatewayAddrs(t, s.b, s.c)...)
	sources = append(sources, s.b.Nodes[0].PodCIDR.Addr(), netip.MustParseAddr("10.244.128.0"), netip.MustParseAddr("169.254.0.1"))
	s.noRequests(t, func() {
		for _, src := range sources {
			for _, p := range syns(src, to) {
				if err := sendRaw(pod, p); err != nil && !refusedLocally(err) {
					t.Fatal(err)
				}
			}
		}
	})
}

func inBandOfAnother(t *testing.T, s *site) {
	to := s.inBandPort(t, s.c)
	own := gatewayAddrs(t, s.a, s.c)
	s.noRequests(t, func() {
		packets := append(syns(own[0], to), syns(own[1], to)...)
		s.checkGrows(t, len(packets), "isthmus_drops_total", `direction="inbound"`, func() { must(t, s.rogue.send(packets...)) })
		for _, src := range gatewayAddrs(t, s.a, s.b) {
			s.checkDropped(t, "source", syns(src, to)...)
		}
	})
}

func inBandStranger(t *testing.T, s *site) {
	at := netip.AddrPortFrom(s.addr(), inband.ManagerPort)
	s.checkGrows(t, 1, "isthmus_in_band_strangers_total", "", func() {
		ctx, cancel := contextOf(t, patience)
		defer cancel()
		conn, err := s.podOfA(s.other).Host.Dial(ctx, "tcp4", at.String())
		must(t, err)
		defer conn.Close()
		_, err = fmt.Fprintf(conn, "CONNECT %[1]s:%[2]d HTTP/1.1\r\nHost: %[1]s:%[2]d\r\n\r\n", s.b.ID, inband.Port)
		must(t, err)
		if n, err := conn.Read(make([]byte, 1)); err == nil && n > 0 {
			buf := make([]byte, 4)
			if _, _ = conn.Read(buf); string(buf) == "TTP/" {
				t.Error("a stranger was answered")
			}
		}
	})
}
