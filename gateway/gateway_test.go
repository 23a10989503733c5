package gateway

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"crypto/ecdh"
	"crypto/rand"

	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/source/file"
)

// A gateway serves the network namespace of its process. So the tests run each gateway as a
// process of its own: this binary, started with the environment variable childConfig.
const childConfig = "ISTHMUS_TEST_GATEWAY_CONFIG"

// childBegins is the environment variable that determines when a gateway becomes active:
// beginsLater or beginsAtOnce. Without it, the gateway is active from its start.
const (
	childBegins  = "ISTHMUS_TEST_GATEWAY_BEGINS"
	beginsLater  = "at SIGUSR1"
	beginsAtOnce = "at once"
)

// patience is the time limit for expected events, however slow the machine is.
const patience = time.Minute

func TestMain(m *testing.M) {
	if dir := os.Getenv(childConfig); dir != "" {
		os.Exit(child(dir))
	}
	os.Exit(m.Run())
}

// child runs a gateway, and afterwards checks that it has left nothing behind in its process.
func child(dir string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	o := Options{
		Source:  testSource(dir),
		Log:     slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Version: "test",
	}
	begin := make(chan struct{})
	switch os.Getenv(childBegins) {
	case beginsLater:
		requested := make(chan os.Signal, 1)
		signal.Notify(requested, syscall.SIGUSR1)
		go func() {
			<-requested
			close(begin)
		}()
		o.Begin = begin
	case beginsAtOnce:
		close(begin)
		o.Begin = begin
	}
	err := Run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		return 1
	}
	err = leftovers()
	for end := time.Now().Add(patience); err != nil && time.Now().Before(end); err = leftovers() {
		time.Sleep(10 * time.Millisecond) // goroutines and threads need a moment to end
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	return 0
}

// leftovers returns an error that describes what a gateway has left behind in its process.
func leftovers() error {
	if err := goleak.Find(goleak.IgnoreAnyFunction("os/signal.loop"), goleak.IgnoreAnyFunction("os/signal.signal_recv")); err != nil {
		return fmt.Errorf("left behind: %w", err)
	}
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		if strings.HasPrefix(to, "net:") || strings.HasSuffix(to, "/ns/net") || strings.HasPrefix(to, "socket:") || to == "/dev/net/tun" {
			return fmt.Errorf("left open: %s", to)
		}
	}
	tasks, _ := filepath.Glob("/proc/self/task/*/ns/net")
	own, _ := os.Readlink("/proc/self/ns/net")
	for _, t := range tasks {
		if in, err := os.Readlink(t); err == nil && in != own {
			return fmt.Errorf("thread left in another namespace: %s %s", t, in)
		}
	}
	return nil
}

func testSource(dir string) Source {
	return func(ctx context.Context, deliver func(Config, error)) {
		file.Watch(ctx, dir, func(s file.Snapshot, err error) {
			deliver(Config{
				Gateway: s.Gateway, PrivateKey: Key(s.PrivateKey), ListenPort: s.File.ListenPort, MTU: int(s.File.MTU),
				NAT: s.File.NAT.Config(), MetricsAddress: s.File.MetricsAddress, StatusAddress: s.File.StatusAddress,
			}, err)
		})
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip("needs /dev/net/tun")
	}
}

// A space is a network namespace of a test.
type space struct {
	t    *testing.T
	name string
	file *os.File
	nl   *netlink.Handle
}

func newSpace(t *testing.T, name string) *space {
	t.Helper()
	f, err := rtnl.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	s := &space{t: t, name: name, file: f}
	t.Cleanup(func() { s.nl.Close(); f.Close() })
	s.do(func() (err error) {
		s.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	s.must(s.nl.LinkSetUp(s.link("lo")))
	return s
}

func (s *space) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%s: %v", s.name, err)
	}
}

// runIn runs fn in the namespace.
func (s *space) runIn(fn func() error) error {
	return rtnl.Do(s.file, fn)
}

func (s *space) do(fn func() error) {
	s.t.Helper()
	s.must(s.runIn(fn))
}

func (s *space) link(name string) netlink.Link {
	s.t.Helper()
	l, err := s.nl.LinkByName(name)
	s.must(err)
	return l
}

func (s *space) sysctl(path, value string) {
	s.t.Helper()
	s.do(func() error { return os.WriteFile("/proc/sys/"+path, []byte(value), 0) })
}

func (s *space) address(link, prefix string) {
	s.t.Helper()
	a, err := netlink.ParseAddr(prefix)
	s.must(err)
	if strings.Contains(prefix, ":") {
		a.Flags = unix.IFA_F_NODAD
	}
	s.must(s.nl.AddrAdd(s.link(link), a))
	s.must(s.nl.LinkSetUp(s.link(link)))
}

// veth2 connects two namespaces by a veth pair.
func veth2(a *space, nameA string, b *space, nameB string, mtu int) {
	a.t.Helper()
	l := netlink.NewVeth(netlink.LinkAttrs{Name: nameA, MTU: mtu, TxQLen: -1})
	l.PeerName, l.PeerNamespace, l.PeerMTU = nameB, netlink.NsFd(b.file.Fd()), uint32(mtu)
	a.must(a.nl.LinkAdd(l))
	a.must(a.nl.LinkSetUp(a.link(nameA)))
	b.must(b.nl.LinkSetUp(b.link(nameB)))
}

// A site is one cluster: a node with a gateway and a pod. All sites have the same PodCIDR and
// ExternalCIDR.
type site struct {
	*space
	pod     *space
	id      string
	addr    string // on the underlay
	dir     string
	private [32]byte
	gateway *process
	dropped uintptr // a capability that gateways must not have
	begins  string  // value of childBegins
}

const podAddr = "10.244.1.10"

func newSite(t *testing.T, name string, n int, wire *space, mtu int) *site {
	t.Helper()
	s := &site{space: newSpace(t, name), id: strings.Repeat(strconv.Itoa(n), 8) + "-0000-4000-8000-000000000000",
		addr: fmt.Sprintf("192.0.2.%d", n), dir: t.TempDir()}
	rand.Read(s.private[:])
	s.pod = newSpace(t, name+"-pod")
	veth2(s.space, "eth0", wire, name, mtu)
	wire.must(wire.nl.LinkSetMaster(wire.link(name), wire.link("br0")))
	s.address("eth0", s.addr+"/24")
	veth2(s.space, "pod", s.pod, "eth0", mtu)
	s.address("pod", "10.244.1.1/24")
	s.pod.address("eth0", podAddr+"/24")
	s.pod.must(s.pod.nl.RouteAdd(&netlink.Route{Gw: net.IPv4(10, 244, 1, 1)}))
	s.sysctl("net/ipv4/ip_forward", "1")
	s.write("private.key", base64.StdEncoding.EncodeToString(s.private[:]))
	s.write("gateway.yaml", fmt.Sprintf("apiVersion: isthmus.net/v1alpha1\nkind: Gateway\nclusterID: %s\nclusterName: %s\nprivateKeyFile: private.key\n", s.id, name))
	return s
}

func newWire(t *testing.T) *space {
	t.Helper()
	wire := newSpace(t, "wire")
	wire.must(wire.nl.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", TxQLen: -1}}))
	wire.must(wire.nl.LinkSetUp(wire.link("br0")))
	return wire
}

func (s *site) write(name, text string) {
	s.t.Helper()
	tmp := filepath.Join(s.dir, "."+name)
	s.must(os.WriteFile(tmp, []byte(text), 0o600))
	s.must(os.Rename(tmp, filepath.Join(s.dir, name)))
}

func (s *site) publicKey() string {
	k, err := ecdh.X25519().NewPrivateKey(s.private[:])
	s.must(err)
	return base64.StdEncoding.EncodeToString(k.PublicKey().Bytes())
}

// peering returns the configuration of s for the peer other. s sees other's pods as
// 10.pods.0.0/16 and its external addresses as 10.(pods+1).0.0/16. other sees those of s as
// 10.theirs.0.0/16 and 10.(theirs+1).0.0/16.
func (s *site) peering(other *site, pods, theirs int, endpoint string) string {
	return fmt.Sprintf(`apiVersion: net.liqo.io/v1alpha1
kind: TunnelEndpoint
metadata: {name: %[1]s, namespace: liqo-tenant-%[1]s}
spec:
  clusterIdentity: {clusterID: %[2]s, clusterName: %[1]s}
  localPodCIDR: 10.244.0.0/16
  localNATPodCIDR: 10.%[3]d.0.0/16
  localExternalCIDR: 10.245.0.0/16
  localNATExternalCIDR: 10.%[4]d.0.0/16
  remotePodCIDR: 10.244.0.0/16
  remoteNATPodCIDR: 10.%[5]d.0.0/16
  remoteExternalCIDR: 10.245.0.0/16
  remoteNATExternalCIDR: 10.%[6]d.0.0/16
  endpointIP: %[7]s
  backendType: wireguard
  backend_config: {port: "5871", publicKey: "%[8]s"}
`, other.name, other.id, theirs, theirs+1, pods, pods+1, endpoint, other.publicKey())
}

// overIPv6 adds IPv6 to a site: on the underlay and for its pod.
func (s *site) overIPv6(n int) {
	s.address("eth0", fmt.Sprintf("2001:db8::%d/64", n))
	s.address("pod", "fd00:244::1/64")
	s.pod.address("eth0", "fd00:244::10/64")
	s.pod.must(s.pod.nl.RouteAdd(&netlink.Route{Gw: net.ParseIP("fd00:244::1"), Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}}))
	s.sysctl("net/ipv6/conf/all/forwarding", "1")
}

// peering6 is like peering, with IPv6 inside and outside the tunnel.
func (s *site) peering6(other *site, pods, theirs int, endpoint string) string {
	text := s.peering(other, pods, theirs, endpoint)
	for _, n := range []int{244, 245, pods, pods + 1, theirs, theirs + 1} {
		text = strings.ReplaceAll(text, fmt.Sprintf(" 10.%d.0.0/16", n), fmt.Sprintf(" fd00:%d::/32", n))
	}
	return text
}

// A process is a running gateway.
type process struct {
	cmd  *exec.Cmd
	done chan error
	mu   sync.Mutex
	log  bytes.Buffer
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// launch starts a gateway without waiting until it is ready.
func (s *site) launch() *process {
	s.t.Helper()
	p := &process{done: make(chan error, 1)}
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), childConfig+"="+s.dir, childBegins+"="+s.begins)
	p.cmd.Stderr, p.cmd.Stdout = p, p
	// A child inherits the namespace and the bounding set of the thread that starts it.
	s.do(func() error {
		if s.dropped != 0 {
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, s.dropped, 0, 0, 0); err != nil {
				return err
			}
		}
		return p.cmd.Start()
	})
	go func() { p.done <- p.cmd.Wait() }()
	s.t.Cleanup(func() {
		p.cmd.Process.Kill()
		if s.t.Failed() {
			s.t.Logf("gateway %s:\n%s", s.name, p.text())
		}
	})
	return p
}

func (s *site) start() {
	s.t.Helper()
	s.gateway = s.launch()
	s.eventually("gateway not ready", func() error {
		select {
		case err := <-s.gateway.done:
			s.t.Fatalf("%s: gateway ended: %v\n%s", s.name, err, s.gateway.text())
		default:
		}
		_, err := s.get("http://127.0.0.1:5872/readyz")
		return err
	})
}

func (s *site) stop() {
	s.t.Helper()
	s.gateway.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-s.gateway.done:
		if err != nil {
			s.t.Errorf("%s: gateway ended with %v\n%s", s.name, err, s.gateway.text())
		}
	case <-time.After(patience):
		s.t.Fatalf("%s: gateway does not end", s.name)
	}
}

func (s *site) eventually(what string, try func() error) {
	s.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s: %s: %v", s.name, what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (s *space) get(url string) (string, error) {
	var body string
	dial := func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = s.runIn(func() error {
			c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return c, err
	}
	client := &http.Client{Timeout: patience, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if body = string(b); err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status + " " + body)
	}
	return body, err
}

func (s *site) status() (st Status) {
	s.t.Helper()
	text, err := s.get("http://127.0.0.1:5873/status?flows=10")
	s.must(err)
	s.must(json.Unmarshal([]byte(text), &st))
	return st
}

func (s *site) metric(line string) string {
	s.t.Helper()
	text, err := s.get("http://127.0.0.1:5872/metrics")
	s.must(err)
	for l := range strings.SplitSeq(text, "\n") {
		if v, ok := strings.CutPrefix(l, line+" "); ok {
			return v
		}
	}
	return ""
}

// A pinger sends ICMP echo requests from the namespace.
type pinger struct {
	conn *net.IPConn
	dst  net.IP
	id   int
	six  bool
}

var pingers atomic.Uint32

func (s *space) pinger(dst string) *pinger {
	s.t.Helper()
	p := &pinger{dst: net.ParseIP(dst), id: int(pingers.Add(1) & 0xffff), six: strings.Contains(dst, ":")}
	s.do(func() (err error) {
		network := "ip4:icmp"
		if p.six {
			network = "ip6:ipv6-icmp"
		}
		p.conn, err = net.ListenIP(network, nil)
		return err
	})
	s.t.Cleanup(func() { p.conn.Close() })
	raw, err := p.conn.SyscallConn()
	s.must(err)
	// The socket receives all ICMP of the namespace, and the test may be slow to read it.
	raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	})
	s.must(err)
	return p
}

func (p *pinger) send(seq, size int) error {
	m := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: p.id, Seq: seq, Data: make([]byte, size)}}
	if p.six {
		m.Type = ipv6.ICMPTypeEchoRequest // the kernel computes the checksum
	}
	b, err := m.Marshal(nil)
	if err == nil {
		_, err = p.conn.WriteTo(b, &net.IPAddr{IP: p.dst})
	}
	return err
}

// receive returns the sequence number of an answer.
func (p *pinger) receive(deadline time.Time) (int, error) {
	buf := make([]byte, 65536)
	p.conn.SetReadDeadline(deadline)
	for {
		n, from, err := p.conn.ReadFrom(buf)
		if err != nil {
			return 0, err
		}
		protocol, reply := 1, icmp.Type(ipv4.ICMPTypeEchoReply)
		if p.six {
			protocol, reply = 58, ipv6.ICMPTypeEchoReply
		}
		m, err := icmp.ParseMessage(protocol, buf[:n])
		if err != nil {
			continue
		}
		if e, ok := m.Body.(*icmp.Echo); ok && m.Type == reply && e.ID == p.id && from.(*net.IPAddr).IP.Equal(p.dst) {
			return e.Seq, nil
		}
	}
}

// ping sends pings until one is answered. It waits half a second for each answer.
func (s *space) ping(dst string) {
	s.t.Helper()
	p := s.pinger(dst)
	var err error
	for end, seq := time.Now().Add(patience), 1; time.Now().Before(end); seq++ {
		if err = p.send(seq, 8); err == nil {
			if _, err = p.receive(time.Now().Add(500 * time.Millisecond)); err == nil {
				return
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	s.t.Fatalf("%s: no answer from %s: %v", s.name, dst, err)
}

// flood pings until stop is called, which returns the numbers of sent and answered pings. It
// keeps few pings in flight, so that no queue on the path overflows while a process there waits
// for a processor.
func (s *space) flood(dst string, every time.Duration) (stop func() (sent, got int)) {
	s.t.Helper()
	const least, underWay = 300, 100
	p := s.pinger(dst)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	var wg sync.WaitGroup
	var sent, got atomic.Int64
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for ctx.Err() == nil {
			if n := sent.Load(); n-got.Load() < underWay && p.send(int(n&0xffff), 56) == nil {
				sent.Add(1)
			}
			<-tick.C
		}
	})
	wg.Go(func() {
		for {
			if _, err := p.receive(time.Now().Add(100 * time.Millisecond)); err == nil {
				got.Add(1)
				continue
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	return func() (int, int) {
		for end := time.Now().Add(patience); sent.Load() < least && time.Now().Before(end); {
			time.Sleep(every)
		}
		cancel()
		for end := time.Now().Add(patience); got.Load() < sent.Load() && time.Now().Before(end); {
			time.Sleep(every)
		}
		close(done)
		wg.Wait()
		return int(sent.Load()), int(got.Load())
	}
}

// restores checks that a deleted object is restored soon. The kernel's event must cause that,
// because the gateway by itself compares only every compareInterval. restores tries several times,
// and one quick restoration is enough, because the machine may be busy during the other attempts.
func (s *site) restores(what, dst string, del func() error) {
	s.t.Helper()
	before := s.ourObjects()
	var took time.Duration
	for range 5 {
		s.eventually(what+" not deleted", del)
		start := time.Now()
		s.pod.ping(dst)
		s.eventually(what+" not back", func() error {
			if now := s.ourObjects(); len(now) != len(before) {
				return fmt.Errorf("have %q, had %q", now, before)
			}
			return nil
		})
		if took = time.Since(start); took < compareInterval/2 {
			s.t.Logf("%s back after %v", what, took.Round(time.Millisecond))
			return
		}
	}
	s.t.Fatalf("%s: %s back after %v only", s.name, what, took)
}

// onlyRefuses checks that an ended gateway has left only rules and unreachable routes. If forPeer
// is set, addr belongs to a peer, and packets for addr must be refused.
func (s *space) onlyRefuses(addr string, forPeer bool) {
	s.t.Helper()
	for _, o := range s.ourObjects() {
		if strings.HasPrefix(o, "link ") {
			s.t.Errorf("%s: left %s", s.name, o)
		}
	}
	if r, err := s.nl.RouteGet(net.ParseIP(addr)); forPeer && !errors.Is(err, unix.EHOSTUNREACH) {
		s.t.Errorf("%s: packets for %s are not refused: %v %v", s.name, addr, r, err)
	}
}

// clear runs Clear, and checks that nothing is left.
func (s *space) clear() {
	s.t.Helper()
	s.do(func() error { return Clear(false, slog.New(slog.DiscardHandler)) })
	if left := s.ourObjects(); len(left) > 0 {
		s.t.Errorf("%s: left %q", s.name, left)
	}
}

// ourObjects lists the gateway's kernel objects in the host's namespace.
func (s *space) ourObjects() []string {
	s.t.Helper()
	var all []string
	links, err := s.nl.LinkList()
	s.must(err)
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "isthmus") {
			all = append(all, "link "+l.Attrs().Name)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := s.nl.RuleList(family)
		s.must(err)
		for _, r := range rules {
			if r.Priority == kernel.GatewayRulePriority {
				all = append(all, r.String())
			}
		}
		routes, err := s.nl.RouteListFiltered(family, &netlink.Route{}, netlink.RT_FILTER_TABLE)
		s.must(err)
		for _, r := range routes {
			if r.Protocol == kernel.GatewayProtocol || r.Table == kernel.GatewayTable {
				all = append(all, "route "+r.String())
			}
		}
	}
	return all
}

// Three clusters have the same PodCIDR. Cluster a is joined with b and with c.
func TestGatewaysJoinClustersWithTheSamePodCIDR(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b, c := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500), newSite(t, "c", 3, wire, 1500)
	a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	a.write("c.yaml", a.peering(c, 248, 246, c.addr))
	b.write("a.yaml", b.peering(a, 250, 246, a.addr))
	c.write("a.yaml", c.peering(a, 246, 248, a.addr))
	// These are foreign objects similar to ours, which must survive.
	foreign := netlink.NewRule()
	foreign.Priority, foreign.Table, foreign.Family = kernel.GatewayRulePriority+1, kernel.GatewayTable, netlink.FAMILY_V4
	a.must(a.nl.RuleAdd(foreign))
	for _, s := range []*site{a, b, c} {
		s.start()
	}

	t.Run("pods reach pods both ways", func(t *testing.T) {
		a.pod.ping("10.246.1.10")
		b.pod.ping("10.250.1.10")
		a.pod.ping("10.248.1.10")
		c.pod.ping("10.246.1.10")
	})
	t.Run("a node reaches a remote pod", func(t *testing.T) { a.ping("10.246.1.10") })
	t.Run("the connection check finds the peers", func(t *testing.T) {
		a.eventually("not connected", func() error {
			st := a.status()
			if fine, wrong := st.Healthy(); !fine {
				return fmt.Errorf("%q", wrong)
			}
			if up := a.metric(`isthmus_peer_up{peer="` + b.id + `"}`); up != "1" {
				return fmt.Errorf("isthmus_peer_up is %q", up)
			}
			if len(st.Peers) != 2 || st.Peers[0].RTT <= 0 || st.Peers[0].LastHandshake == nil || st.MTU != 1440 || !st.MTUAuto {
				return fmt.Errorf("%+v", st)
			}
			return nil
		})
		if n := a.metric(`isthmus_peer_receive_packets_total{peer="` + b.id + `"}`); n == "" || n == "0" {
			t.Errorf("received packets: %q", n)
		}
	})
	t.Run("a full-size packet passes and the sender of a larger one learns the MTU", func(t *testing.T) {
		p := a.pod.pinger("10.246.1.10")
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
		if err := p.send(1, 1440-28); err != nil {
			t.Fatal(err)
		}
		if _, err := p.receive(time.Now().Add(patience)); err != nil {
			t.Errorf("1440 octets: %v", err)
		}
		p.send(2, 1441-28)
		a.eventually("1441 octets again", func() error {
			if err := p.send(3, 1441-28); !errors.Is(err, unix.EMSGSIZE) {
				return fmt.Errorf("%s, want EMSGSIZE", fmt.Sprint(err))
			}
			return nil
		})
	})
	t.Run("status shows namespace and flows", func(t *testing.T) {
		st := a.status()
		if f, err := os.Open(st.Namespace); err != nil {
			t.Error(err)
		} else {
			f.Close()
		}
		if len(st.Flows) == 0 {
			t.Error("no flows, although a node pinged and probes were sent")
		}
	})
	t.Run("deleted objects are restored at once", func(t *testing.T) {
		rule := netlink.NewRule()
		rule.Priority, rule.Table, rule.Family = kernel.GatewayRulePriority, kernel.GatewayTable, netlink.FAMILY_V4
		prefix := &net.IPNet{IP: net.IPv4(10, 246, 0, 0), Mask: net.CIDRMask(16, 32)}
		for _, deleted := range []struct {
			what string
			del  func() error
		}{
			{"rule", func() error { return a.nl.RuleDel(rule) }},
			{"route", func() error { return a.nl.RouteDel(&netlink.Route{Table: kernel.GatewayTable, Dst: prefix}) }},
			{"veth", func() error { return a.nl.LinkDel(a.link(kernel.VethHost)) }},
			{"veth up", func() error { return a.nl.LinkSetDown(a.link(kernel.VethHost)) }},
			{"inner route", func() error {
				return inNamespace(a.status().Namespace, func() error {
					return netlink.RouteDel(&netlink.Route{Dst: prefix, Table: kernel.MainTable, Scope: netlink.SCOPE_LINK})
				})
			}},
			{"inner neighbour", func() error {
				return inNamespace(a.status().Namespace, func() error {
					l, err := netlink.LinkByName(kernel.VethGateway)
					if err != nil {
						return err
					}
					return netlink.NeighDel(&netlink.Neigh{LinkIndex: l.Attrs().Index, IP: net.ParseIP("169.254.100.2"), State: netlink.NUD_PERMANENT})
				})
			}},
		} {
			a.restores(deleted.what, "10.246.1.10", deleted.del)
		}
	})
	t.Run("a change of one peer loses no packet of another", func(t *testing.T) {
		logged := len(a.gateway.text())
		stop := a.pod.flood("10.246.1.10", 2*time.Millisecond)
		generation := func(n int) {
			a.eventually("change not applied", func() error {
				if g := a.status().Config.Generation; g < n {
					return fmt.Errorf("generation %d, want %d", g, n)
				}
				return nil
			})
		}
		g := a.status().Config.Generation
		a.write("c.yaml", a.peering(c, 248, 246, "192.0.2.33")) // change the endpoint
		generation(g + 1)
		rand.Read(c.private[:]) // change the key
		a.write("c.yaml", a.peering(c, 252, 246, c.addr))
		generation(g + 2)
		os.Remove(filepath.Join(a.dir, "c.yaml")) // remove the peer
		generation(g + 3)
		if m := a.metric(`isthmus_peer_up{peer="` + c.id + `"}`); m != "" {
			t.Errorf("the removed peer still has a series: %q", m)
		}
		a.write("c.yaml", a.peering(c, 248, 246, c.addr))
		generation(g + 4)
		if sent, got := stop(); sent != got || sent < 300 {
			t.Errorf("sent %d, received %d", sent, got)
		} else {
			t.Logf("%d of %d", got, sent)
		}
		// Do not compare the time of the handshake: wireguard-go sometimes repeats a handshake whose
		// answer came before its timer was set.
		key := b.publicKey()
		if text := "peer(" + key[:4] + "…" + key[39:43] + ") - Starting"; strings.Contains(a.gateway.text()[logged:], text) {
			t.Error("b was touched in WireGuard")
		} else if !strings.Contains(a.gateway.text()[:logged], text) {
			t.Errorf("no %q in the log when b was added", text)
		}
		// c gets its own new key, too.
		c.write("private.key", base64.StdEncoding.EncodeToString(c.private[:]))
		c.pod.ping("10.246.1.10")
		a.pod.ping("10.248.1.10")
	})
	t.Run("a broken file is reported and changes nothing", func(t *testing.T) {
		stop := a.pod.flood("10.246.1.10", 5*time.Millisecond)
		a.write("b.yaml", strings.Replace(a.peering(b, 246, 250, b.addr), "10.246.0.0/16", "10.246.1.0/16", 1))
		a.eventually("not reported", func() error {
			if e := a.status().Config.Errors; len(e) != 1 || !strings.Contains(e[0], "b.yaml") || !strings.Contains(e[0], "spec.remoteNATPodCIDR") {
				return fmt.Errorf("%q", e)
			}
			return nil
		})
		if m := a.metric("isthmus_config_last_reload_successful"); m != "0" {
			t.Errorf("isthmus_config_last_reload_successful is %q", m)
		}
		a.eventually("not logged", func() error { // it is logged after the status has changed
			if !strings.Contains(a.gateway.text(), "configuration rejected") {
				return errors.New("no line")
			}
			return nil
		})
		time.Sleep(1500 * time.Millisecond)
		if n := strings.Count(a.gateway.text(), "configuration rejected"); n != 1 {
			t.Errorf("logged %d times", n)
		}
		a.write("b.yaml", a.peering(b, 246, 250, b.addr))
		a.eventually("not repaired", func() error {
			if m := a.metric("isthmus_config_last_reload_successful"); m != "1" {
				return fmt.Errorf("%q", m)
			}
			return nil
		})
		if sent, got := stop(); sent != got {
			t.Errorf("sent %d, received %d", sent, got)
		}
	})
	t.Run("a second gateway in the namespace is refused", func(t *testing.T) {
		p := a.launch()
		if err := <-p.done; err == nil || !strings.Contains(p.text(), "another isthmus gateway (process "+strconv.Itoa(a.gateway.cmd.Process.Pid)+")") {
			t.Errorf("%v: %s", err, p.text())
		}
		a.pod.ping("10.246.1.10")
	})
	t.Run("a killed gateway leaks nothing and its leftovers are adopted", func(t *testing.T) {
		a.gateway.cmd.Process.Kill()
		<-a.gateway.done
		p := a.pod.pinger("10.246.1.10")
		p.send(1, 8)
		a.eventually("still reachable or sent elsewhere", func() error {
			r, err := a.nl.RouteGet(net.ParseIP("10.246.1.10"))
			if !errors.Is(err, unix.EHOSTUNREACH) {
				return fmt.Errorf("route %v, error %w", r, err)
			}
			return nil
		})
		a.start()
		a.pod.ping("10.246.1.10")
		b.pod.ping("10.250.1.10")
		rules := 0
		for _, o := range a.ourObjects() {
			if strings.HasPrefix(o, "ip rule") {
				rules++
			}
		}
		if rules != 1 {
			t.Errorf("%d rules: %q", rules, a.ourObjects())
		}
	})
	t.Run("SIGTERM leaves unreachable routes and Clear removes them", func(t *testing.T) {
		for _, s := range []*site{a, b, c} {
			s.stop()
			s.onlyRefuses("10.246.1.10", s != b)
			s.clear()
		}
		foreign.Priority = kernel.GatewayRulePriority + 1
		if err := a.nl.RuleDel(foreign); err != nil {
			t.Errorf("the foreign rule: %v", err)
		}
	})
}

// Liqo does not support IPv6. The gateway does, with the same TunnelEndpoint.
func TestGatewaysJoinClustersOverIPv6(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	a.overIPv6(1)
	b.overIPv6(2)
	a.write("b.yaml", a.peering6(b, 246, 250, "2001:db8::2"))
	b.write("a.yaml", b.peering6(a, 250, 246, "2001:db8::1"))
	a.start()
	b.start()
	a.pod.ping("fd00:246::10")
	b.pod.ping("fd00:250::10")
	a.ping("fd00:246::10") // from the node, so by NAPT
	a.eventually("not connected", func() error {
		st := a.status()
		if fine, wrong := st.Healthy(); !fine || st.MTU != 1420 || !strings.HasPrefix(st.Peers[0].Endpoint, "[2001:db8::2]:") {
			return fmt.Errorf("%q, MTU %d, endpoint %s", wrong, st.MTU, st.Peers[0].Endpoint)
		}
		return nil
	})
	a.restores("veth", "fd00:246::10", func() error { return a.nl.LinkDel(a.link(kernel.VethHost)) })
	for _, s := range []*site{a, b} {
		s.stop()
		s.onlyRefuses("fd00:246::10", s == a)
		s.clear()
	}
}

func TestStandbyGatewaySendsNothingUntilItIsActive(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	b.write("a.yaml", b.peering(a, 250, 246, a.addr))
	b.start()
	a.begins = beginsLater
	p := a.launch()
	prepared := func() error {
		if !strings.Contains(p.text(), "configuration in force") {
			return errors.New(p.text())
		}
		return nil
	}
	a.eventually("not prepared", prepared)
	if len(a.ourObjects()) == 0 {
		t.Error("it has prepared nothing in the kernel")
	}
	a.do(func() error { // no socket is open
		c, err := net.ListenPacket("udp", ":5871")
		if err == nil {
			c.Close()
		}
		return err
	})
	silent := a.pod.pinger("10.246.1.10") // a gateway that is not active must not send its packets
	for seq := range 20 {
		a.must(silent.send(seq, 8))
	}
	a.eventually("what it gets is not dropped", func() error {
		if n, _ := strconv.Atoi(a.metric(`isthmus_drops_total{direction="outbound",peer="",reason="no_mandate"}`)); n < 20 {
			return fmt.Errorf("%d packets are", n)
		}
		return nil
	})
	if st := b.status(); st.Peers[0].LastHandshake != nil {
		t.Errorf("b has heard of it: %+v", st.Peers[0])
	}
	a.must(p.cmd.Process.Signal(syscall.SIGUSR1))
	a.pod.ping("10.246.1.10")
	b.pod.ping("10.250.1.10")
	// The active gateway must not send those packets later.
	if seq, err := silent.receive(time.Now().Add(100 * time.Millisecond)); err == nil {
		t.Errorf("ping %d was answered", seq)
	}
	a.gateway = p
	a.stop()
	a.begins = ""
	b.stop()
}

func TestGatewayThatStartsActiveAppliesItsConfigurationOnce(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	b.write("a.yaml", b.peering(a, 250, 246, a.addr))
	a.begins = beginsAtOnce
	a.start()
	b.start()
	a.pod.ping("10.246.1.10")
	if n := strings.Count(a.gateway.text(), "configuration in force"); n != 1 {
		t.Errorf("applied %d times; want once", n)
	}
	a.stop()
	b.stop()
}

func inNamespace(path string, fn func() error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return rtnl.Do(f, fn)
}

func TestFailedStartReportsTheReasonAndLeavesNothing(t *testing.T) {
	needRoot(t)
	wire := newWire(t)
	a, b := newSite(t, "a", 1, wire, 1500), newSite(t, "b", 2, wire, 1500)
	try := func(t *testing.T, want string) {
		t.Helper()
		p := a.launch()
		select {
		case <-p.done:
		case <-time.After(patience):
			t.Fatal("still runs")
		}
		if !strings.Contains(p.text(), want) || p.cmd.ProcessState.ExitCode() != 1 {
			t.Errorf("want %q and exit code 1, got %v:\n%s", want, p.cmd.ProcessState, p.text())
		}
		if left := a.ourObjects(); len(left) > 0 {
			t.Errorf("left %q", left)
		}
	}
	t.Run("broken configuration", func(t *testing.T) {
		a.write("b.yaml", strings.Replace(a.peering(b, 246, 250, b.addr), "10.246.0.0/16", "10.246.1.0/16", 1))
		try(t, "b.yaml: TunnelEndpoint liqo-tenant-b/b: spec.remoteNATPodCIDR")
		a.write("b.yaml", a.peering(b, 246, 250, b.addr))
	})
	for name, cap := range map[string]uintptr{"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN} {
		t.Run("without "+name, func(t *testing.T) {
			a.dropped = cap
			defer func() { a.dropped = 0 }()
			try(t, name)
		})
	}
	t.Run("listen port in use", func(t *testing.T) {
		var c net.PacketConn
		a.do(func() (err error) { c, err = net.ListenPacket("udp", ":5871"); return err })
		defer c.Close()
		try(t, "listen port 5871/udp is in use by another process")
	})
	t.Run("metrics address in use", func(t *testing.T) {
		var l net.Listener
		a.do(func() (err error) { l, err = net.Listen("tcp", ":5872"); return err })
		defer l.Close()
		try(t, "metrics address")
	})
}
