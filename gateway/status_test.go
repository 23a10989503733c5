package gateway

import (
	"cmp"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/gateway/bind"
	"github.com/isthmus-net/isthmus/gateway/check"
	"github.com/isthmus-net/isthmus/gateway/datapath"
	"github.com/isthmus-net/isthmus/gateway/datapath/memlink"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/natengine"
	"github.com/isthmus-net/isthmus/packet"
	"github.com/isthmus-net/isthmus/packet/packettest"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

const bravo = "22222222-0000-4000-8000-000000000000"

func fabricPeer(n byte, id, name, podsHere, externalHere string) fabric.Peer {
	p := netip.MustParsePrefix
	return fabric.Peer{
		ID: id, Name: name, Endpoint: "192.0.2.1", Port: 5871, PublicKey: key(n),
		Local:    fabric.Networks{Pod: p("10.244.0.0/16"), PodSeen: p("10.250.0.0/16"), External: p("10.245.0.0/16"), ExternalSeen: p("10.251.0.0/16")},
		Remote:   fabric.Networks{Pod: p("10.244.0.0/16"), PodSeen: p(podsHere), External: p("10.245.0.0/16"), ExternalSeen: p(externalHere)},
		Mappings: []fabric.Mapping{{Real: netip.MustParseAddr("172.16.0.9"), Seen: netip.MustParseAddr("10.251.0.9")}},
	}
}

var (
	alphaBravo = fabricPeer(1, bravo, "bravo", "10.246.0.0/16", "10.247.0.0/16")
	charlie    = fabricPeer(2, "33333333-0000-4000-8000-000000000000", "charlie", "10.248.0.0/16", "10.249.0.0/16")
)

// silent is the port of a connection check that gets no answers. Receive returns the messages
// that a test puts in.
type silent chan []byte

func (s silent) Receive() ([]byte, netip.AddrPort, error) {
	b, open := <-s
	if !open {
		return nil, netip.AddrPort{}, net.ErrClosed
	}
	return b, netip.AddrPort{}, nil
}

func (s silent) Send([]byte, netip.AddrPort, int) error { return nil }

func (s silent) Close() { close(s) }

// newTestLoop returns the loop of a gateway that does not use the kernel. Everything except its
// host and the links is real.
func newTestLoop(t testing.TB, peers ...fabric.Peer) *loop {
	t.Helper()
	return newTestLoopWithPort(t, make(silent), peers...)
}

// newTestLoopWithPort is like newTestLoop, with a given port for the connection check.
func newTestLoopWithPort(t testing.TB, port silent, peers ...fabric.Peer) *loop {
	t.Helper()
	g := &loop{gateway: &gateway{log: quiet, version: "v1", started: time.Now(), host: new(rtnl.Kernel), wake: make(chan struct{}, 1)}}
	g.engine = natengine.New(natengine.Config{Self4: fabric.GatewayAddr, Self6: fabric.GatewayAddr6, MaxFlows: 1000})
	g.metrics = newMetrics(g.gateway)
	wire := bind.New()
	g.tunnels = []*tunnelEnd{{
		wire:    wire,
		Tunnel:  datapath.New(memlink.NewLink("mem", 1440), wire, g.engine, nil, datapath.Options{}),
		checker: check.Start(port, check.Options{Log: quiet, RTT: g.metrics.observeRTT}),
	}}
	g.tunnels[0].observe = g.tunnels[0].checker.Observe
	g.resolver = newResolver(nil, func() {}, quiet)
	t.Cleanup(func() { g.resolver.close(); g.closeTunnels() })
	g.put0(t, peers...)
	return g
}

func decided(t testing.TB, in fabric.Intent) fabric.Gateway {
	t.Helper()
	gw, problems := fabric.GatewayFor(in)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	return gw
}

// put0 applies peers as accept and put do, but without a kernel.
func (l *loop) put0(t testing.TB, peers ...fabric.Peer) {
	t.Helper()
	gw := decided(t, fabric.Intent{ClusterID: "11111111-0000-4000-8000-000000000000", ClusterName: "alpha", Peers: peers})
	c := Config{Gateway: gw, PrivateKey: Key(key(9)), ListenPort: 5871}
	l.resolver.set(gw.Peers, gw.Site)
	survey := l.survey(Config{MTU: 1440}, gw.Peers, false)
	if err := l.setRules(&survey); err != nil {
		t.Fatal(err)
	}
	var checks []check.Peer
	for _, p := range gw.Peers {
		checks = append(checks, check.Peer{ID: p.ID, Probe: p.Probe, Allowed: p.AllowedIPs})
	}
	l.tunnels[0].checker.Set(checks)
	l.now.peers = survey.peers
	l.now.config, l.now.mtu, l.now.ready = c, 1440, true
	l.now.generation++
	l.now.reloaded = time.Now()
	l.publish()
}

// setStates makes the connection check of a tunnel report the given states of peers.
func (e *tunnelEnd) setStates(states map[string]check.State) {
	e.observe = func(id string) check.Result {
		r := e.checker.Observe(id)
		r.State = cmp.Or(states[id], r.State)
		return r
	}
}

// send passes a packet through the engine, and reports whether the engine forwards it.
func (g *gateway) send(t *testing.T, d natengine.Direction, src, dst string, sport, dport uint16) bool {
	t.Helper()
	b, err := TraceQuery{Src: netip.AddrPortFrom(netip.MustParseAddr(src), sport), Dst: netip.AddrPortFrom(netip.MustParseAddr(dst), dport), Protocol: "udp"}.packet()
	if err != nil {
		t.Fatal(err)
	}
	var v packet.View
	if err := v.Parse(b, packet.ChecksumComplete); err != nil {
		t.Fatal(err)
	}
	f := g.engine.Outbound
	if d == natengine.Inbound {
		f = g.engine.Inbound
	}
	verdict := f(&v, time.Second)
	if verdict.Peer != nil && verdict.Action != natengine.Discard {
		verdict.Peer.CountTraffic(d, 1, v.Len())
	}
	return verdict.Action != natengine.Discard
}

func TestMetricsCountPacketsDropsFlowsAndProbes(t *testing.T) {
	port := make(silent)
	g := newTestLoopWithPort(t, port, alphaBravo, charlie)
	for range 3 {
		if !g.send(t, natengine.Outbound, "10.244.1.1", "10.246.1.1", 1, 2) {
			t.Fatal("pod to pod dropped")
		}
	}
	g.send(t, natengine.Inbound, "10.246.1.1", "10.250.1.1", 2, 1)
	g.send(t, natengine.Outbound, "192.168.0.1", "10.246.1.1", 1, 2) // NAPT
	g.send(t, natengine.Outbound, "10.244.1.1", "10.99.0.1", 1, 2)   // to no peer
	g.send(t, natengine.Inbound, "10.246.1.1", "10.99.0.1", 1, 2)    // to none of our networks
	g.metrics.observeRTT(bravo, 3*time.Millisecond)
	port <- []byte(`{"clusterID":"x","msgType":"PUNG","timeStamp":"2026-01-01T00:00:00Z"}`)
	port <- nil // when the check receives it, the previous message has been counted

	want := `
# HELP isthmus_config_generation Configurations applied since the start.
# TYPE isthmus_config_generation gauge
isthmus_config_generation 1
# HELP isthmus_nat_sessions Current NAT flows.
# TYPE isthmus_nat_sessions gauge
isthmus_nat_sessions 1
# HELP isthmus_nat_sessions_limit Limit of NAT flows.
# TYPE isthmus_nat_sessions_limit gauge
isthmus_nat_sessions_limit 1000
# HELP isthmus_peer_info Always 1; the labels have the name and the ID of the peer.
# TYPE isthmus_peer_info gauge
isthmus_peer_info{name="bravo",peer="22222222-0000-4000-8000-000000000000"} 1
isthmus_peer_info{name="charlie",peer="33333333-0000-4000-8000-000000000000"} 1
# HELP isthmus_peer_receive_packets_total IP packets from the peer.
# TYPE isthmus_peer_receive_packets_total counter
isthmus_peer_receive_packets_total{peer="22222222-0000-4000-8000-000000000000"} 1
isthmus_peer_receive_packets_total{peer="33333333-0000-4000-8000-000000000000"} 0
# HELP isthmus_peer_transmit_bytes_total Octets of IP packets to the peer.
# TYPE isthmus_peer_transmit_bytes_total counter
isthmus_peer_transmit_bytes_total{peer="22222222-0000-4000-8000-000000000000"} 112
isthmus_peer_transmit_bytes_total{peer="33333333-0000-4000-8000-000000000000"} 0
# HELP isthmus_peer_up 1 if the peer answers the connection check.
# TYPE isthmus_peer_up gauge
isthmus_peer_up{peer="22222222-0000-4000-8000-000000000000"} 0
isthmus_peer_up{peer="33333333-0000-4000-8000-000000000000"} 0
# HELP isthmus_tunnel_mtu_bytes MTU of the tunnel device: the largest of all peers.
# TYPE isthmus_tunnel_mtu_bytes gauge
isthmus_tunnel_mtu_bytes 1440
`
	if err := testutil.GatherAndCompare(g.metrics, strings.NewReader(want), "isthmus_config_generation", "isthmus_nat_sessions",
		"isthmus_nat_sessions_limit", "isthmus_peer_info", "isthmus_peer_receive_packets_total", "isthmus_peer_transmit_bytes_total",
		"isthmus_peer_up", "isthmus_tunnel_mtu_bytes"); err != nil {
		t.Error(err)
	}
	text := g.scrape(t)
	for _, line := range []string{
		`isthmus_drops_total{direction="outbound",peer="",reason="no_peer"} 1`,
		`isthmus_drops_total{direction="inbound",peer="` + bravo + `",reason="destination"} 1`,
		`isthmus_probe_rejected_total{reason="type"} 1`,
		`isthmus_probe_rtt_seconds_bucket{le="0.0032"} 1`,
		`isthmus_peer_nat_session_events_total{event="created",peer="` + bravo + `"} 1`,
		`isthmus_peer_nat_sessions_limit{peer="` + bravo + `"} 500`,
		`isthmus_peer_nat_host_sessions_limit{peer="` + bravo + `"} 500`,
		`isthmus_peer_nat_hosts{peer="` + bravo + `"} 1`,
		`isthmus_peer_nat_hosts_at_limit{peer="` + bravo + `"} 0`,
		`isthmus_peer_nat_ports{family="ipv4",peer="` + bravo + `",protocol="udp"} 1`,
		`isthmus_peer_nat_ports{family="ipv4",peer="` + bravo + `",protocol="icmp"} 0`,
		`isthmus_nat_ports_limit{protocol="udp"} 65535`,
		`isthmus_peer_nat_fragment_bytes{peer="` + bravo + `"} 0`,
		`isthmus_nat_fragment_bytes_limit 2.097152e+06`,
		`isthmus_nat_fragmented_datagrams_limit 512`,
		`isthmus_nat_timeout_seconds{of="tcp_established"} 7440`,
		`isthmus_config_last_reload_successful 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("missing: %s", line)
		}
	}
	problems, err := testutil.GatherAndLint(g.metrics)
	if err != nil {
		t.Error(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func (g *gateway) scrape(t *testing.T) string {
	t.Helper()
	w := httptest.NewRecorder()
	g.metricsHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if w.Code != 200 {
		t.Fatal(w.Code, w.Body)
	}
	return w.Body.String()
}

func TestSeriesVanishWithTheirPeer(t *testing.T) {
	g := newTestLoop(t, alphaBravo, charlie)
	g.metrics.observeRTT(bravo, time.Millisecond)
	g.send(t, natengine.Outbound, "192.168.0.1", "10.246.1.1", 1, 2)
	if !strings.Contains(g.scrape(t), bravo) {
		t.Fatal("no series of bravo")
	}
	g.put0(t, charlie)
	g.metrics.observeRTT(bravo, time.Millisecond) // an answer that arrives late
	if text := g.scrape(t); strings.Contains(text, bravo) {
		t.Error("series of bravo remain")
	} else if !strings.Contains(text, charlie.ID) {
		t.Error("series of charlie are gone")
	}
}

// A removed peer disappears from the engine a moment before it disappears from the list of peers.
func TestScrapeDuringAPeerRemovalIsConsistent(t *testing.T) {
	g := newTestLoop(t, alphaBravo, charlie)
	if err := g.engine.Change(nil, []string{g.now.peers[1].ID}); err != nil {
		t.Fatal(err)
	}
	if text := g.scrape(t); !strings.Contains(text, `isthmus_peer_nat_sessions{peer="`+bravo+`"}`) {
		t.Error("no series of bravo, who stays")
	}
	g.now.peers = g.now.peers[1:] // the reverse: the list lacks a peer that the engine still has
	g.publish()
	g.scrape(t)
}

func TestStatusIsJSONWithoutSecrets(t *testing.T) {
	g := newTestLoop(t, alphaBravo)
	g.send(t, natengine.Outbound, "192.168.0.1", "10.246.1.1", 1, 2)
	g.send(t, natengine.Outbound, "10.244.1.1", "10.99.0.1", 1, 2)
	w := httptest.NewRecorder()
	g.statusHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/status?flows=5", nil))
	var s Status
	if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil || w.Code != 200 {
		t.Fatal(w.Code, err, w.Body)
	}
	private := key(9)
	for _, secret := range []string{string(private[:]), "CQAAAAAAAAA", "0900000000"} {
		if strings.Contains(w.Body.String(), secret) {
			t.Errorf("the private key is in it")
		}
	}
	if len(s.Peers) != 1 || s.Peers[0].Rules.NAPT.String() != "10.250.0.0" || len(s.Peers[0].Rules.Endpoints) != 2 ||
		len(s.Flows) != 1 || s.Flows[0].Protocol != "udp" || len(s.Drops) != 1 || s.Drops[0].Reason != "no_peer" || s.Sessions.Limit != 1000 {
		t.Errorf("%s", w.Body)
	}
	if fine, wrong := s.Healthy(); fine || len(wrong) != 1 || !strings.Contains(wrong[0], bravo) {
		t.Errorf("healthy %v: %q", fine, wrong)
	}
	for _, path := range []string{"/status?flows=x", "/status?flows=-1", "/status?flows=99999", "/trace", "/trace?src=1&dst=2"} {
		w := httptest.NewRecorder()
		g.statusHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		if w.Code != 400 {
			t.Errorf("%s: %d", path, w.Code)
		}
	}
}

func TestEngineStatusAndTraceShowAPeerWithoutSessionAsDown(t *testing.T) {
	g := newTestLoop(t, alphaBravo, charlie)
	q := TraceQuery{Src: netip.MustParseAddrPort("10.244.1.1:1"), Dst: netip.MustParseAddrPort("10.246.1.1:80"), Protocol: "tcp"}
	for _, tc := range []struct {
		after time.Duration
		down  bool
		drop  string
	}{{time.Second, false, ""}, {sessionFirst + time.Second, true, "peer_down"}} {
		g.tick(time.Now().Add(tc.after))
		s := g.status(0)
		steps, err := Trace(g.engine, q, 0)
		if err != nil {
			t.Fatal(err)
		}
		if s.Peers[0].Down != tc.down || g.engine.Peer(bravo).Down() != tc.down || len(steps) != 1 || steps[0].Drop != tc.drop {
			t.Errorf("after %v: status %v, engine %v, trace %+v", tc.after, s.Peers[0].Down, g.engine.Peer(bravo).Down(), steps)
		}
	}
}

func TestParseTraceAddrAcceptsEveryForm(t *testing.T) {
	for in, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:0", "10.0.0.1:80": "10.0.0.1:80", "fd00::1": "[fd00::1]:0", "[fd00::1]": "[fd00::1]:0", "[fd00::1]:80": "[fd00::1]:80",
		"::ffff:10.0.0.1": "10.0.0.1:0",
	} {
		if got, err := ParseTraceAddr(in); err != nil || got.String() != want {
			t.Errorf("%s: %s, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "x", "10.0.0.1:", "10.0.0.1:99999", "[10.0.0.1]", "fe80::1%eth0", "10.0.0.0/8", "[fd00::1"} {
		if got, err := ParseTraceAddr(in); err == nil {
			t.Errorf("%q: %s", in, got)
		}
	}
}

func TestTracePacketsAreValid(t *testing.T) {
	for _, protocol := range []string{"tcp", "udp", "icmp"} {
		for _, ends := range [][2]string{{"10.244.1.1:1234", "10.246.1.1:80"}, {"[fd00::1]:1234", "[fd01::1]:80"}} {
			b, err := TraceQuery{Src: netip.MustParseAddrPort(ends[0]), Dst: netip.MustParseAddrPort(ends[1]), Protocol: protocol}.packet()
			if err != nil {
				t.Fatal(err)
			}
			if _, err := packettest.Decode(b); err != nil { // also checks lengths and checksums
				t.Errorf("%s %v: %v", protocol, ends, err)
			}
			var v packet.View
			if err := v.Parse(b, packet.ChecksumComplete); err != nil || !v.ValidChecksums() {
				t.Errorf("%s %v: %v, checksums %v", protocol, ends, err, v.ValidChecksums())
			}
		}
	}
}

// A zero UDP checksum would mean that there is none (RFC 768).
func TestTraceDatagramsHaveAChecksum(t *testing.T) {
	q := TraceQuery{Src: netip.MustParseAddrPort("10.244.1.1:1"), Dst: netip.MustParseAddrPort("10.246.1.1:80"), Protocol: "udp"}
	for port := 1; port < 65536; port++ {
		q.Src = netip.AddrPortFrom(q.Src.Addr(), uint16(port))
		if b, err := q.packet(); err != nil || b[26] == 0 && b[27] == 0 {
			t.Fatalf("from port %d: % x, %v", port, b, err)
		}
	}
}

func TestTraceShowsPeerAndTranslation(t *testing.T) {
	c := Config{Gateway: decided(t, fabric.Intent{Peers: []fabric.Peer{alphaBravo, charlie}})}
	for _, tc := range []struct {
		src, dst, protocol, direction string
		want                          []string // direction, peer, translated source, translated destination, drop
	}{
		{"10.244.1.1:5", "10.246.1.1:6", "tcp", "", []string{"outbound bravo 10.250.1.1:5 10.246.1.1:6 "}},
		{"10.244.1.1", "10.246.1.1", "tcp", "out", []string{"outbound bravo 10.250.1.1:40000 10.246.1.1:80 "}},
		{"10.248.1.1:5", "10.250.1.1:6", "udp", "", []string{"inbound charlie 10.248.1.1:5 10.244.1.1:6 "}},
		{"10.248.1.1:5", "10.251.0.9:53", "udp", "", []string{"inbound charlie 10.248.1.1:5 172.16.0.9:53 "}},
		{"10.248.1.1:5", "10.251.0.8:53", "udp", "", []string{"inbound charlie   no_mapping"}},
		{"10.244.1.1", "10.99.0.1", "icmp", "", []string{"outbound    no_peer"}},
		{"10.244.1.1", "10.246.1.1", "tcp", "in", []string{"inbound    no_peer"}},
	} {
		src, err := ParseTraceAddr(tc.src)
		if err != nil {
			t.Fatal(err)
		}
		dst, err := ParseTraceAddr(tc.dst)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := TraceOffline(c, TraceQuery{src, dst, tc.protocol, tc.direction})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, s := range steps {
			got = append(got, strings.Join([]string{s.Direction, s.PeerName, s.NewSrc, s.NewDst, s.Drop}, " "))
		}
		if strings.Join(got, "; ") != strings.Join(tc.want, "; ") {
			t.Errorf("%s %s %s: got %q, want %q", tc.src, tc.dst, tc.protocol, got, tc.want)
		}
	}
	for _, q := range []TraceQuery{
		{Src: netip.MustParseAddrPort("1.2.3.4:0"), Dst: netip.MustParseAddrPort("[::1]:0"), Protocol: "tcp"},
		{Src: netip.MustParseAddrPort("1.2.3.4:0"), Dst: netip.MustParseAddrPort("1.2.3.5:0"), Protocol: "sctp"},
		{Src: netip.MustParseAddrPort("1.2.3.4:0"), Dst: netip.MustParseAddrPort("1.2.3.5:0"), Protocol: "tcp", Direction: "up"},
		{},
	} {
		if steps, err := TraceOffline(c, q); err == nil {
			t.Errorf("%+v: %+v", q, steps)
		}
	}
}

func TestStatusListsRefusedObjects(t *testing.T) {
	g := newTestLoop(t, alphaBravo)
	g.now.config.Refused = []fabric.Problem{{Origin: fabric.Origin{Kind: "TunnelEndpoint", Name: "x"}, Field: "spec.endpointIP", Message: "is empty"}}
	g.publish()
	s := g.status(0)
	if !slices.Equal(s.Config.Refused, []string{"TunnelEndpoint x: spec.endpointIP: is empty"}) {
		t.Errorf("refused %q", s.Config.Refused)
	}
	if healthy, wrong := s.Healthy(); healthy || !slices.Contains(wrong, s.Config.Refused[0]) {
		t.Errorf("healthy %v, wrong %q", healthy, wrong)
	}
}
