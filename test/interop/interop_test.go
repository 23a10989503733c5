// Package interop connects a real `isthmus gateway` with a peer that shares no code with it. The
// peer consists of Debian's wireguard-go package, a hand-made kernel configuration without NAT,
// and a ping/pong implementation written from section 8 of docs/liqo-v0.md.
//
//	pod a ── node of A ═ isthmus gateway ══ UDP ══ wireguard-go ─ cluster B, as A sees it
//
// A real gateway of B would translate b@A to b. Here the peer itself has the address b@A, which
// makes no difference to the packets in the tunnel.
package interop

import (
	"bytes"
	"context"
	"crypto/ecdh"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/testbin"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// patience is the time limit for expected events, on a machine that may be busy.
const patience = time.Minute

const (
	idA = "aaaaaaaa-1111-4111-8111-111111111111"
	idB = "bbbbbbbb-2222-4222-8222-222222222222"
)

// Both clusters have the PodCIDR 10.244.0.0/16 and the ExternalCIDR 10.247.0.0/16. Each side has
// remapped the other side's networks. The notation is that of docs/liqo-v0.md: podsAatB is Pa@B.
var (
	podsAatB, extAatB = netip.MustParsePrefix("10.246.0.0/16"), netip.MustParsePrefix("10.248.0.0/16")
	podsBatA, extBatA = netip.MustParsePrefix("10.245.0.0/16"), netip.MustParsePrefix("10.249.0.0/16")

	a, aAtB   = netip.MustParseAddr("10.244.1.10"), netip.MustParseAddr("10.246.1.10")
	bAtA      = netip.MustParseAddr("10.245.1.20")
	endpoint  = netip.MustParseAddr("198.51.100.7") // an external endpoint of A, not a pod
	endpointX = netip.MustParseAddr("10.248.0.9")   // x@B: the address at which B reaches it
	serverX   = netip.MustParseAddr("10.249.0.5")   // x@A: the address at which A reaches an endpoint of B

	natIPofA = podsAatB.Addr() // source, as B sees it, of packets from hosts of A that are not pods
	natIPofB = podsBatA.Addr()
	checkA   = extAatB.Addr().Next()
	checkB   = extBatA.Addr().Next()

	nodeUnderlay = netip.MustParseAddr("192.0.2.1")
	peerUnderlay = netip.MustParseAddr("192.0.2.2")
)

type site struct {
	*testing.T
	pod, node, peer *hosts.Host
	wg              *wgDevice
	keyA, keyB      *ecdh.PrivateKey
	tap             *hosts.Raw // captures both directions on the peer's tunnel device
	responder       *responder

	config      string // directory with the gateway's configuration
	gatewayYAML string // the configuration in it, without a next key
	keyFile     string // file with keyA
}

func TestGatewayInteroperatesWithWireGuardGo(t *testing.T) {
	s := newSite(t)
	s.step("handshake", (*site).handshake)
	s.step("connection check: our PING", (*site).ourPings)
	s.step("connection check: our PONG", (*site).ourPongs)
	s.step("addresses in the tunnel", (*site).addressesInTheTunnel)
	s.step("ping of a full MTU", (*site).bigPing)
	s.step("TCP both ways with ten megabytes each", (*site).tcpBothWays)
	s.step("node to remote pod", (*site).nodeToPod)
	s.step("pod to an external endpoint of the peer", (*site).podToExternal)
	s.step("peer to an external endpoint of ours", (*site).peerToEndpoint)
	s.step("allowed IPs are exactly the two networks", (*site).allowedIPs)
	s.step("default deny towards everything else", (*site).defaultDeny)
	s.step("a silent peer becomes Error, then Connected when it answers again", (*site).silence)
}

func (s *site) step(name string, f func(*site)) {
	s.Run(name, func(t *testing.T) {
		in := *s
		in.T = t
		f(&in)
	})
}

// newSite starts both sides and waits until each has received a message of the other.
func newSite(t *testing.T) *site {
	hosts.Need(t, "wireguard-go")
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip("needs /dev/net/tun")
	}
	s := &site{T: t, keyA: newKey(t), keyB: newKey(t),
		pod: hosts.New(t, "pod"), node: hosts.New(t, "node"), peer: hosts.New(t, "peer")}
	hosts.Veth(s.node, "lan", s.pod, "eth0", 1500)
	hosts.Veth(s.node, "eth0", s.peer, "eth0", 1500)

	s.node.Addr("lan", netip.MustParsePrefix("10.244.1.1/24"))
	s.node.Route(netip.PrefixFrom(endpoint, 32), a, "lan")
	s.node.Addr("eth0", netip.PrefixFrom(nodeUnderlay, 24))
	s.pod.Addr("eth0", netip.PrefixFrom(a, 24))
	s.pod.Addr("lo", netip.PrefixFrom(endpoint, 32))
	s.pod.Route(netip.MustParsePrefix("0.0.0.0/0"), netip.MustParseAddr("10.244.1.1"), "eth0")
	s.peer.Addr("eth0", netip.PrefixFrom(peerUnderlay, 24))

	s.wg = startWireGuardGo(t, s.peer)
	for _, addr := range []netip.Addr{bAtA, natIPofB, checkB, serverX} {
		s.peer.Addr(s.wg.name, netip.PrefixFrom(addr, 32))
	}
	s.peer.SetUp(s.wg.name)
	for _, p := range []netip.Prefix{podsAatB, extAatB} {
		s.peer.Route(p, netip.Addr{}, s.wg.name)
	}
	s.wg.configure(s.keyB, 51820, s.keyA.PublicKey(), netip.AddrPortFrom(nodeUnderlay, 5871), podsAatB, extAatB)
	s.tap = s.peer.Tap(s.wg.name)
	s.responder = respond(s.peer, checkB)
	s.startGateway()
	return s
}

// startGateway builds isthmus, writes a configuration like the output of `kubectl get -o yaml`,
// and starts the gateway.
func (s *site) startGateway() {
	s.Helper()
	dir := s.TempDir()
	s.config, s.gatewayYAML, s.keyFile = dir, gatewayYAML, "private.key"
	binary, err := testbin.Isthmus(s.TempDir())
	if err != nil {
		s.Fatal(err)
	}
	for name, content := range map[string]string{
		"private.key":  text(s.keyA.Bytes()) + "\n",
		"gateway.yaml": gatewayYAML,
		"peers.yaml":   fmt.Sprintf(peersYAML, text(s.keyB.PublicKey().Bytes())),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			s.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "gateway.log"))
	if err != nil {
		s.Fatal(err)
	}
	cmd := exec.Command(binary, "gateway", "--config", dir)
	cmd.Stdout, cmd.Stderr = log, log
	s.node.Start(cmd)
	s.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		killer := time.AfterFunc(patience, func() { cmd.Process.Kill() })
		if err := cmd.Wait(); err != nil {
			s.Errorf("the gateway ended with %v after SIGTERM", err)
		}
		killer.Stop()
		if said, _ := os.ReadFile(log.Name()); s.Failed() {
			s.Logf("the gateway said:\n%s", tail(string(said), 60))
		}
		log.Close()
	})
	s.eventually("the gateway serves its status", func() error {
		_, err := s.status()
		return err
	})
}

const gatewayYAML = `
apiVersion: isthmus.net/v1alpha1
kind: Gateway
clusterID: ` + idA + `
clusterName: alpha
privateKeyFile: private.key
listenPort: 5871
mtu: auto
`

const peersYAML = `
apiVersion: net.liqo.io/v1alpha1
kind: TunnelEndpoint
metadata:
  name: bravo-924e89
  namespace: liqo-tenant-bravo-924e89
  labels:
    clusterID: ` + idB + `
spec:
  clusterIdentity:
    clusterID: ` + idB + `
    clusterName: bravo
  localPodCIDR: 10.244.0.0/16
  localNATPodCIDR: 10.246.0.0/16
  localExternalCIDR: 10.247.0.0/16
  localNATExternalCIDR: 10.248.0.0/16
  remotePodCIDR: 10.244.0.0/16
  remoteNATPodCIDR: 10.245.0.0/16
  remoteExternalCIDR: 10.247.0.0/16
  remoteNATExternalCIDR: 10.249.0.0/16
  endpointIP: 192.0.2.2
  backendType: wireguard
  backend_config:
    port: "51820"
    publicKey: %s
---
apiVersion: net.liqo.io/v1alpha1
kind: NatMapping
metadata:
  name: natmapping-x7k2p
  labels:
    clusterID: ` + idB + `
    net.liqo.io/natmapping: "true"
spec:
  clusterID: ` + idB + `
  podCIDR: 10.245.0.0/16
  externalCIDR: 10.248.0.0/16
  clusterMappings:
    169.254.0.1: 10.248.0.1
    198.51.100.7: 10.248.0.9
`

// gatewayStatus is the part of the gateway's status that this test reads.
type gatewayStatus struct {
	PublicKey     string       `json:"publicKey"`
	NextPublicKey string       `json:"nextPublicKey"`
	Drops         []dropStatus `json:"drops"`
	Peers         []struct {
		ID    string       `json:"id"`
		State string       `json:"state"`
		RTT   float64      `json:"rttSeconds"`
		Drops []dropStatus `json:"drops"`
	} `json:"peers"`
}

type dropStatus struct {
	Direction string `json:"direction"`
	Reason    string `json:"reason"`
	Packets   uint64 `json:"packets"`
}

func (s *site) status() (st gatewayStatus, err error) {
	client := &http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			to, err := netip.ParseAddrPort(addr)
			if err != nil {
				return nil, err
			}
			return s.node.DialTCP(netip.Addr{}, to)
		},
	}}
	resp, err := client.Get("http://127.0.0.1:5873/status")
	if err != nil {
		return st, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return st, fmt.Errorf("status: %s", resp.Status)
	}
	return st, json.NewDecoder(resp.Body).Decode(&st)
}

// waitState waits until the gateway reports its only peer in the given state.
func (s *site) waitState(want string) {
	s.Helper()
	s.eventually("the peer is "+want, func() error {
		st, err := s.status()
		if err != nil {
			return err
		}
		if len(st.Peers) != 1 || st.Peers[0].ID != idB || st.Peers[0].State != want {
			return fmt.Errorf("peers are %+v", st.Peers)
		}
		return nil
	})
}

// drops returns the number of the peer's inbound packets that were dropped for a reason.
func (s *site) drops(reason string) (n uint64) {
	s.Helper()
	st, err := s.status()
	if err != nil {
		s.Fatal(err)
	}
	for _, list := range [][]dropStatus{st.Drops, st.Peers[0].Drops} {
		for _, d := range list {
			if d.Direction == "inbound" && d.Reason == reason {
				n += d.Packets
			}
		}
	}
	return n
}

func (s *site) eventually(what string, try func() error) {
	s.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.Fatalf("not within %v: %s: %v", patience, what, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (s *site) handshake() {
	s.eventually("a handshake, begun by either side", func() error {
		if at := s.wg.value("last_handshake_time_sec"); at == "" || at == "0" {
			return fmt.Errorf("wireguard-go's last handshake is at %q", at)
		}
		return nil
	})
	s.waitState("Connected")
}

// sentAt parses the time stamp of a PING.
func sentAt(raw string) (time.Time, error) {
	var ping struct {
		TimeStamp time.Time `json:"timeStamp"`
	}
	err := json.Unmarshal([]byte(raw), &ping)
	return ping.TimeStamp, err
}

// withoutBursts returns the times that have no other time within a microsecond. These are times of
// the connection check. A probe of the path MTU consists of several PINGs, whose time stamps differ
// by a nanosecond.
func withoutBursts(said []time.Time) (alone []time.Time) {
	said = slices.SortedFunc(slices.Values(said), time.Time.Compare)
	for i, at := range said {
		if (i == 0 || at.Sub(said[i-1]) > time.Microsecond) && (i+1 == len(said) || said[i+1].Sub(at) > time.Microsecond) {
			alone = append(alone, at)
		}
	}
	return alone
}

// ourPings checks the gateway's PINGs byte by byte.
func (s *site) ourPings() {
	s.eventually("seven PINGs of the connection check", func() error {
		pings, _ := s.responder.receivedPings()
		var said []time.Time
		for _, p := range pings {
			if sent, err := sentAt(p.raw); err == nil {
				said = append(said, sent)
			}
		}
		if alone := withoutBursts(said); len(alone) < 7 {
			return fmt.Errorf("%d so far", len(alone))
		}
		return nil
	})
	pings, broken := s.responder.receivedPings()
	if len(broken) > 0 {
		s.Errorf("no PINGs: %q", broken)
	}
	var said []time.Time
	for _, p := range pings {
		if p.from.Addr() != natIPofA {
			s.Errorf("PING came from %v, want the NAPT address %v", p.from, natIPofA)
		}
		fields := map[string]string{}
		if err := json.Unmarshal([]byte(p.raw), &fields); err != nil || len(fields) != 3 {
			s.Fatalf("PING %s: want an object of three strings: %v", p.raw, err)
		}
		if fields["clusterID"] != idB || fields["msgType"] != "PING" {
			s.Errorf("PING %s: want clusterID %s, that of who is pinged", p.raw, idB)
		}
		sent, err := time.Parse(time.RFC3339Nano, fields["timeStamp"])
		if age := p.at.Sub(sent); err != nil || age < 0 || age > patience {
			s.Errorf("PING %s: the time stamp is %v old (%v)", p.raw, age, err)
		}
		if len(p.raw) > 1024 {
			s.Errorf("PING of %d octets", len(p.raw))
		}
		said = append(said, sent)
	}
	// Check only the median of the intervals, because on a busy machine single intervals may be
	// longer or shorter.
	var gaps []time.Duration
	said = withoutBursts(said)
	for i := range said[2:] { // the first PING is sent early, because a new peer is pinged before its turn
		gaps = append(gaps, said[i+2].Sub(said[i+1]))
	}
	slices.Sort(gaps)
	if gap := gaps[len(gaps)/2]; gap < 1500*time.Millisecond || gap > 4*time.Second {
		s.Errorf("between two PINGs are %v, want 2s", gaps)
	}
	st, err := s.status()
	if err != nil {
		s.Fatal(err)
	}
	if rtt := st.Peers[0].RTT; rtt <= 0 || rtt > patience.Seconds() {
		s.Errorf("round trip time %vs", rtt)
	}
}

// ourPongs sends PINGs from the NAPT address of the peer's gateway, and checks the answers.
func (s *site) ourPongs() {
	c := s.peer.ListenUDP(netip.AddrPortFrom(natIPofB, checkPort))
	to := netip.AddrPortFrom(checkA, checkPort)
	// The answer must repeat the clusterID of the PING, even if it is unknown.
	for _, id := range []string{idA, idB, "somebody-else"} {
		m := message{ClusterID: id, MsgType: "PING", TimeStamp: time.Now().Truncate(0)}
		got, from := askPong(s.T, c, to, m)
		if from != to {
			s.Errorf("PONG came from %v, want %v", from, to)
		}
		var answer message
		if err := json.Unmarshal([]byte(got), &answer); err != nil {
			s.Fatalf("PONG %s: %v", got, err)
		}
		if answer.ClusterID != id || answer.MsgType != "PONG" || !answer.TimeStamp.Equal(m.TimeStamp) {
			s.Errorf("PONG %s does not answer %+v", got, m)
		}
	}
}

// addressesInTheTunnel captures a ping in each direction on the peer's tunnel device, and
// compares the addresses with the table in section 7.2 of docs/liqo-v0.md.
func (s *site) addressesInTheTunnel() {
	s.Run("pod to pod", func(t *testing.T) {
		s := s.in(t)
		s.tap.Drain(t)
		s.ping(s.pod, a, bAtA, 0xa001, 56)
		s.waitCaptured(0xa001, [2]netip.Addr{aAtB, bAtA}, [2]netip.Addr{bAtA, aAtB})
	})
	s.Run("the peer's pod to ours", func(t *testing.T) {
		s := s.in(t)
		s.tap.Drain(t)
		s.ping(s.peer, bAtA, aAtB, 0xa002, 56)
		s.waitCaptured(0xa002, [2]netip.Addr{bAtA, aAtB}, [2]netip.Addr{aAtB, bAtA})
	})
	s.Run("the peer pings the gateway", func(t *testing.T) {
		s := s.in(t)
		s.tap.Drain(t)
		s.ping(s.peer, natIPofB, checkA, 0xa003, 56)
		s.waitCaptured(0xa003, [2]netip.Addr{natIPofB, checkA}, [2]netip.Addr{checkA, natIPofB})
	})
}

func (s *site) in(t *testing.T) *site {
	sub := *s
	sub.T = t
	return &sub
}

// waitCaptured waits for an echo request and its reply on the tap, with these sources and
// destinations.
func (s *site) waitCaptured(id uint16, request, reply [2]netip.Addr) {
	s.Helper()
	found := map[byte]bool{}
	for len(found) < 2 {
		b := s.tap.Receive(s.T, time.Second)
		if b == nil {
			break
		}
		if len(b) < 28 || b[0] != 0x45 || b[9] != 1 || binary.BigEndian.Uint16(b[24:]) != id {
			continue // mostly messages of the connection check
		}
		want, kind := request, b[20]
		if kind == 0 {
			want = reply
		}
		got := [2]netip.Addr{netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))}
		if got != want {
			s.Errorf("ICMP type %d in the tunnel: %v, want %v", kind, got, want)
		}
		found[kind] = true
	}
	if !found[8] || !found[0] {
		s.Errorf("request seen: %v, reply seen: %v", found[8], found[0])
	}
}

// ping sends one echo request with size octets of data and waits for its reply.
func (s *site) ping(from *hosts.Host, src, dst netip.Addr, id uint16, size int) {
	s.Helper()
	c := from.ListenICMP(src)
	m := make([]byte, 8+size)
	m[0] = 8
	binary.BigEndian.PutUint16(m[4:], id)
	for i := range size {
		m[8+i] = byte(i)
	}
	var sum uint32
	for i := 0; i < len(m); i += 2 {
		sum += uint32(m[i])<<8 | uint32(m[i+1])
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	binary.BigEndian.PutUint16(m[2:], ^uint16(sum))
	if _, err := c.WriteTo(m, &net.IPAddr{IP: dst.AsSlice()}); err != nil {
		s.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	for deadline := time.Now().Add(patience); ; {
		if err := c.SetReadDeadline(deadline); err != nil {
			s.Fatal(err)
		}
		n, who, err := c.ReadFrom(buf)
		if err != nil {
			s.Fatalf("ping %v -> %v: %v", src, dst, err)
		}
		if n >= 8 && buf[0] == 0 && binary.BigEndian.Uint16(buf[4:]) == id {
			if who.String() != dst.String() || !bytes.Equal(buf[8:n], m[8:]) {
				s.Errorf("ping %v -> %v: the reply is from %v, %d octets of data", src, dst, who, n-8)
			}
			return
		}
	}
}

// bigPing sends pings that must be fragmented: one outbound and one inbound.
func (s *site) bigPing() {
	s.ping(s.pod, a, bAtA, 0xb001, 4000)
	s.ping(s.peer, bAtA, aAtB, 0xb002, 4000)
}

func (s *site) tcpBothWays() {
	s.transfer(s.pod, netip.Addr{}, s.peer, netip.AddrPortFrom(bAtA, 8080), netip.AddrPortFrom(bAtA, 8080), aAtB)
	s.transfer(s.peer, bAtA, s.pod, netip.AddrPortFrom(aAtB, 8080), netip.AddrPortFrom(a, 8080), bAtA)
}

// nodeToPod connects from the node's own address, because its address in the pod network would
// count as a pod.
func (s *site) nodeToPod() {
	s.transfer(s.node, nodeUnderlay, s.peer, netip.AddrPortFrom(bAtA, 8081), netip.AddrPortFrom(bAtA, 8081), natIPofA)
}

func (s *site) podToExternal() {
	s.transfer(s.pod, a, s.peer, netip.AddrPortFrom(serverX, 8082), netip.AddrPortFrom(serverX, 8082), aAtB)
}

func (s *site) peerToEndpoint() {
	s.transfer(s.peer, bAtA, s.pod, netip.AddrPortFrom(endpointX, 8083), netip.AddrPortFrom(endpoint, 8083), bAtA)
}

// transfer opens a connection and sends ten megabytes in each direction at the same time, comparing
// hashes. The server must see the client under the address seen.
func (s *site) transfer(client *hosts.Host, src netip.Addr, server *hosts.Host, dst, listen netip.AddrPort, seen netip.Addr) {
	s.Helper()
	const size = 10 << 20
	l := server.ListenTCP(listen)
	served := make(chan error, 1)
	go func() {
		c, err := l.AcceptTCP()
		if err != nil {
			served <- err
			return
		}
		defer c.Close()
		if got := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr(); got != seen {
			served <- fmt.Errorf("the server sees %v, want %v", got, seen)
			return
		}
		served <- exchange(c, 2, 1, size)
	}()
	c, err := client.DialTCP(src, dst)
	if err != nil {
		s.Fatalf("%s -> %v: %v", client.Name, dst, err)
	}
	defer c.Close()
	if err := exchange(c, 1, 2, size); err != nil {
		s.Errorf("client %s -> %v: %v", client.Name, dst, err)
	}
	if err := <-served; err != nil {
		s.Errorf("server at %v: %v", listen, err)
	}
	l.Close()
}

// exchange writes one pattern, and reads and checks another one.
func exchange(c *net.TCPConn, mine, theirs byte, size int64) error {
	if err := c.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		return err
	}
	var written sync.WaitGroup
	var writeErr error
	written.Go(func() {
		if _, writeErr = io.CopyN(c, &pattern{seed: mine}, size); writeErr == nil {
			writeErr = c.CloseWrite()
		}
	})
	got, want := sha256.New(), sha256.New()
	n, err := io.Copy(got, c)
	written.Wait()
	io.CopyN(want, &pattern{seed: theirs}, size) // writing to a hash cannot fail
	switch {
	case err != nil:
		return fmt.Errorf("read after %d octets: %w", n, err)
	case writeErr != nil:
		return fmt.Errorf("write: %w", writeErr)
	case !bytes.Equal(got.Sum(nil), want.Sum(nil)):
		return fmt.Errorf("%d octets arrived, and not those that were sent", n)
	}
	return nil
}

// A pattern is an endless stream that does not repeat at packet boundaries.
type pattern struct {
	seed byte
	n    uint64
}

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(p.n*2654435761>>13) ^ p.seed
		p.n++
	}
	return len(b), nil
}

// allowedIPs checks that only sources inside the peer's two networks pass. WireGuard itself drops
// packets from other sources.
func (s *site) allowedIPs() {
	at := netip.AddrPortFrom(a, 9000)
	inbox := s.pod.ListenUDP(at)
	to := netip.AddrPortFrom(aAtB, at.Port())
	last := netip.AddrPortFrom(lastOf(podsBatA), 0)
	for _, src := range []string{
		"192.168.77.1",                 // an arbitrary address
		"10.244.1.20",                  // the pod's real address, which also exists in our cluster
		"10.244.255.255",               // one below the peer's pod network, as we see it
		"10.246.0.1",                   // one above that network; also our own pods' network, as the peer sees it
		"10.248.255.255", "10.250.0.0", // just below and above the peer's external network
		"169.254.0.1", "192.0.2.2",
	} {
		s.sendFrom(netip.MustParseAddr(src), to, src)
	}
	for _, src := range []netip.Addr{bAtA, last.Addr()} {
		s.sendFrom(src, to, "ok")
	}
	for range 2 {
		if got, from := s.receive(inbox); got != "ok" {
			s.Errorf("%q from %v got through", got, from)
		}
	}
	s.nothing(inbox)
}

// defaultDeny checks that a hostile peer, which sends packets to any address, reaches only pods
// and mapped endpoints. All other packets are counted as dropped.
func (s *site) defaultDeny() {
	everything := netip.MustParsePrefix("0.0.0.0/0")
	s.wg.configure(s.keyB, 51820, s.keyA.PublicKey(), netip.AddrPortFrom(nodeUnderlay, 5871), everything)
	defer s.wg.configure(s.keyB, 51820, s.keyA.PublicKey(), netip.AddrPortFrom(nodeUnderlay, 5871), podsAatB, extAatB)
	any := netip.AddrPortFrom(netip.IPv4Unspecified(), 9001)
	inboxes := []*net.UDPConn{s.pod.ListenUDP(any), s.node.ListenUDP(any)}
	for _, c := range []struct{ dst, reason string }{
		{"10.246.0.0", "no_flow"},                                      // the NAPT address, without a flow
		{"10.248.0.77", "no_mapping"},                                  // nothing is mapped there
		{"10.244.1.10", "destination"},                                 // the real address of a pod
		{"10.244.1.1", "destination"}, {"198.51.100.7", "destination"}, // the node, and the endpoint's real address
		{"169.254.0.1", "destination"}, {"169.254.100.1", "destination"}, // the gateway's own addresses
		{"10.249.0.9", "destination"}, {"8.8.8.8", "destination"}, // addresses outside this cluster
	} {
		before := s.drops(c.reason)
		dst := netip.MustParseAddr(c.dst)
		if !podsAatB.Contains(dst) && !extAatB.Contains(dst) {
			s.peer.Route(netip.PrefixFrom(dst, 32), netip.Addr{}, s.wg.name)
		}
		s.sendFrom(bAtA, netip.AddrPortFrom(dst, 9001), c.dst)
		s.eventually(c.dst+" is counted as "+c.reason, func() error {
			if n := s.drops(c.reason); n != before+1 {
				return fmt.Errorf("counted %d times", n-before)
			}
			return nil
		})
	}
	for _, inbox := range inboxes {
		s.nothing(inbox)
	}
}

// sendFrom sends a datagram into the tunnel from any source address.
func (s *site) sendFrom(src netip.Addr, to netip.AddrPort, what string) {
	s.Helper()
	c := s.peer.ListenTransparent(s.T, src)
	defer c.Close()
	if _, err := c.WriteToUDPAddrPort([]byte(what), to); err != nil {
		s.Fatalf("%v -> %v: %v", src, to, err)
	}
}

func (s *site) receive(c *net.UDPConn) (string, netip.AddrPort) {
	s.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		s.Fatal(err)
	}
	buf := make([]byte, 100)
	n, from, err := c.ReadFromUDPAddrPort(buf)
	if err != nil {
		s.Fatal(err)
	}
	return string(buf[:n]), from
}

func (s *site) nothing(c *net.UDPConn) {
	s.Helper()
	if err := c.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
		s.Fatal(err)
	}
	buf := make([]byte, 100)
	if n, from, err := c.ReadFromUDPAddrPort(buf); err == nil {
		s.Errorf("%q from %v got through", buf[:n], from)
	}
}

// silence checks that the gateway reports the peer as lost ten seconds after its last answer
// (docs/liqo-v0.md, section 8).
func (s *site) silence() {
	before, _ := s.responder.receivedPings()
	s.eventually("one more PING", func() error {
		pings, _ := s.responder.receivedPings()
		if len(pings) == len(before) {
			return fmt.Errorf("%d so far", len(pings))
		}
		return nil
	})
	answered := s.responder.silence(true)
	s.waitState("Error")
	if took := time.Since(answered); took < 9900*time.Millisecond || took > 30*time.Second {
		s.Errorf("Error %v after the last answer, want ten seconds and the observer's interval, and little more", took)
	}
	s.responder.silence(false)
	s.waitState("Connected")
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	n := binary.BigEndian.Uint32(b[:]) | (1<<(32-p.Bits()) - 1)
	binary.BigEndian.PutUint32(b[:], n)
	return netip.AddrFrom4(b)
}
