package routeagent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// An agent serves the network namespace of its process. Therefore the tests run each agent in a
// process of its own, which is this test binary with these environment variables.
const (
	childNode   = "ISTHMUS_TEST_AGENT_NODE"
	childIntent = "ISTHMUS_TEST_AGENT_INTENT" // a file with a fabric.NodeIntent as JSON, or a kubeconfig; empty: run Cleanup
	childState  = "ISTHMUS_TEST_AGENT_STATE"  // directory of the snapshot
	childReport = "ISTHMUS_TEST_AGENT_REPORT" // file for the agent's reports, if there is no API server
	childProbe  = "ISTHMUS_TEST_AGENT_PROBE"  // not empty: probe the overlay, with short intervals
	statusAt    = "127.0.0.1:5875"
	metricsAt   = "127.0.0.1:5874"
)

func TestMain(m *testing.M) {
	if node := os.Getenv(childNode); node != "" {
		os.Exit(child(node, os.Getenv(childIntent)))
	}
	os.Exit(m.Run())
}

// child runs an agent, and then checks that it has left no goroutine running.
func child(node, path string) int {
	probeInterval, probeAgain = time.Hour, time.Hour // most tests have no gateway that answers
	if os.Getenv(childProbe) != "" {
		probeInterval, probeAgain = 100*time.Millisecond, 100*time.Millisecond
	}
	compareInterval = time.Hour // so that every repair is caused by an event, even on a slow machine
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if path == "" {
		if err := Cleanup(log, os.Getenv(childState)); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			return 1
		}
		return 0
	}
	file := os.Getenv(childReport)
	source, report := fileSource(path), reportFile(file)
	reportRefused := refusedFile(file + ".refused")
	if filepath.Ext(path) == ".kubeconfig" {
		config, err := owncluster.RESTConfig(path)
		if err == nil {
			var reporter *kube.NodeReporter
			if reporter, err = kube.NewNodeReporter(config, "default", node); err == nil {
				report, reportRefused = reporter.WriteNetworks, reporter.WriteRefused
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			return 1
		}
		source = func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
			return kube.WatchNode(ctx, config, "isthmus-system", node, nil, log, deliver)
		}
	}
	err := Run(ctx, Options{Node: node, Source: source, Log: log, Version: "test", MetricsAddress: metricsAt, StatusAddress: statusAt,
		StateDirectory: os.Getenv(childState), ReportNetworks: report, ReportRefused: reportRefused, Pod: strconv.Itoa(os.Getpid()), Resolvers: filepath.Join(filepath.Dir(file), "resolv.conf")})
	stop()
	if err == nil {
		err = leaktest.Find(goleak.IgnoreAnyFunction("os/signal.loop"), goleak.IgnoreAnyFunction("os/signal.signal_recv"),
			goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*ClientConn).readLoop")) // an idle connection, which client-go keeps for the next client
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		return 1
	}
	return 0
}

// fileSource reads a file whenever it changes. A missing file delivers nothing.
func fileSource(path string) Source {
	return func(ctx context.Context, deliver func(fabric.NodeIntent, []fabric.Problem)) error {
		var last []byte
		for ctx.Err() == nil {
			if b, err := os.ReadFile(path); err == nil && !bytes.Equal(b, last) {
				var in fabric.NodeIntent
				if err := json.Unmarshal(b, &in); err != nil {
					return err
				}
				last = b
				deliver(in, nil)
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
		return nil
	}
}

// Networks and addresses as cluster a sees them. The PodCIDR of a has another length than the
// remote networks.
var (
	localPods      = netip.MustParsePrefix("10.64.0.0/14")
	remotePods     = netip.MustParsePrefix("10.246.0.0/16")
	remoteExternal = netip.MustParsePrefix("10.250.16.0/20")
	remotePod      = netip.MustParseAddr("10.246.7.7")
	remoteEndpoint = netip.MustParseAddr("10.250.17.1")
)

// cluster is a lab with one cluster and strict reverse path filtering. Node 1 has a stand-in for
// the gateway and the remote cluster: the rule and the table of a gateway send packets to a host
// that has remote addresses.
type cluster struct {
	*lab.Cluster
	t      testing.TB
	ctx    context.Context
	intent string // file
	state  string // directory with a subdirectory for each node's agent
	in     fabric.NodeIntent
	agents map[*lab.Node]*agentProcess
}

func newCluster(t testing.TB, nodes int) *cluster {
	t.Helper()
	for _, program := range []string{"ip", "bridge"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 9*time.Minute)
	l, err := lab.Up(ctx, lab.Spec{Name: lab.UniqueName("agent"), RPFilter: lab.RPFilterStrict,
		Clusters: []lab.ClusterSpec{{PodCIDR: localPods, Nodes: nodes, PodsPerNode: 2, Control: true}}})
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{Cluster: l.Clusters[0], t: t, ctx: ctx, intent: filepath.Join(t.TempDir(), "intent.json"), state: t.TempDir(), agents: map[*lab.Node]*agentProcess{}}
	t.Cleanup(func() {
		for _, a := range c.agents {
			a.end(unix.SIGKILL)
			if t.Failed() {
				t.Logf("%s:\n%s", a.node.Name, a.log.String())
			}
		}
		cancel()
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	c.standIn(c.Nodes[0], c.OnPrem.Host)

	for _, n := range c.Nodes {
		c.in.Nodes = append(c.in.Nodes, fabric.ClusterNode{Name: n.Name, Addrs: []netip.Addr{n.Addr}, PodCIDRs: []netip.Prefix{n.PodCIDR}})
	}
	for _, p := range c.Pods {
		c.in.Pods = append(c.in.Pods, fabric.NodePod{Addr: p.Addr, Node: p.Node.Name})
	}
	c.in.Tunnels = []fabric.Tunnel{{Gateway: c.Nodes[0].Addr, Peer: fabric.Peer{
		ID: "b", Name: "b", Endpoint: "192.0.2.1", Port: 5871, PublicKey: [32]byte{9},
		Local: fabric.Networks{Pod: localPods, PodSeen: netip.MustParsePrefix("10.80.0.0/14"),
			External: netip.MustParsePrefix("10.84.0.0/14"), ExternalSeen: netip.MustParsePrefix("10.84.0.0/14")},
		Remote: fabric.Networks{Pod: netip.MustParsePrefix("10.64.0.0/16"), PodSeen: remotePods, External: remoteExternal, ExternalSeen: remoteExternal},
		Origin: fabric.Origin{Kind: "TunnelEndpoint", Name: "b"},
	}}}
	allocate(&c.in, remotePods, remoteExternal)
	c.writeIntent()
	return c
}

// allocate makes the NetworkAllocations of an intent name these networks, and free the networks
// that they named before.
func allocate(in *fabric.NodeIntent, networks ...netip.Prefix) {
	was := in.Named
	in.Revision++
	in.Version = in.Revision
	in.Named, in.Freed = nil, slices.Clone(in.Freed)
	for _, p := range networks {
		in.Named = append(in.Named, fabric.Allocation{Object: "b", Network: p, Revision: in.Revision})
	}
	in.Named = fabric.Latest(in.Named)
	for _, a := range was {
		if !slices.Contains(networks, a.Network) {
			in.Freed = append(in.Freed, fabric.Allocation{Object: "b", Network: a.Network, Revision: in.Revision})
		}
	}
	in.Freed = fabric.Latest(in.Freed)
}

// hopStandIn is the node's address on the device that leads to the stand-in.
const hopStandIn = "169.254.77.1"

// standIn adds the rule and the routes of a gateway to a node, and a device to remoteHost, which
// answers for remote addresses.
func (c *cluster) standIn(n *lab.Node, remoteHost *lab.Host) {
	const dev, addr = kernel.VethHost, "169.254.77.2"
	c.run(n.Host, "ip link add %s type veth peer name standin netns %s", dev, remoteHost.Netns())
	c.run(n.Host, "ip addr add %s/30 dev %s", hopStandIn, dev)
	c.run(n.Host, "ip link set %s up", dev)
	c.run(remoteHost, "ip addr add %s/30 dev standin", addr)
	c.run(remoteHost, "ip link set standin up")
	c.run(remoteHost, "ip route replace default via %s", hopStandIn)
	c.run(n.Host, "ip rule add priority %d lookup %d protocol %d", kernel.GatewayRulePriority, kernel.GatewayTable, kernel.GatewayProtocol)
	for _, p := range []netip.Prefix{remotePods, remoteExternal} {
		c.run(n.Host, "ip route add %v via %v dev %s table %d proto %d", p, addr, dev, kernel.GatewayTable, kernel.GatewayProtocol)
		c.run(n.Host, "ip route add unreachable %v table %d metric 420000 proto %d", p, kernel.GatewayTable, kernel.GatewayProtocol)
	}
	for _, a := range []netip.Addr{remotePod, remoteEndpoint} {
		c.run(remoteHost, "ip addr add %v/32 dev lo", a)
	}
}

// pod returns the first pod of node i, counted from 0.
func (c *cluster) pod(i int) *lab.Pod { return c.Pods[2*i] }

// writeIntent writes the intent for all agents in one step.
func (c *cluster) writeIntent() {
	c.t.Helper()
	b, err := json.Marshal(c.in)
	if err == nil {
		err = os.WriteFile(c.intent+".new", b, 0o600)
	}
	if err == nil {
		err = os.Rename(c.intent+".new", c.intent)
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) run(h *lab.Host, format string, args ...any) string {
	c.t.Helper()
	command := strings.Fields(fmt.Sprintf(format, args...))
	out, err := h.Command(c.ctx, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s: %v: %v: %s", h, command, err, out)
	}
	return string(out)
}

type agentProcess struct {
	node *lab.Node
	cmd  *lab.Cmd
	log  *syncBuffer
	done chan struct{}
	err  error
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// start starts an agent on each of the nodes and waits until it is ready.
func (c *cluster) start(nodes ...*lab.Node) {
	c.t.Helper()
	for _, n := range nodes {
		a := c.launch(n)
		c.eventually(n, func() error { // each request has its own timeout, so that a hanging request is repeated
			ctx, cancel := context.WithTimeout(c.ctx, 5*time.Second)
			defer cancel()
			_, err := n.Get(ctx, "http://"+metricsAt+"/readyz")
			return err
		})
		c.agents[n] = a
	}
}

func (c *cluster) launch(n *lab.Node, wrapper ...string) *agentProcess {
	c.t.Helper()
	a := &agentProcess{node: n, log: &syncBuffer{}, done: make(chan struct{})}
	program, err := filepath.Abs(os.Args[0])
	if err != nil {
		c.t.Fatal(err)
	}
	command := slices.Concat(wrapper, []string{program})
	a.cmd = n.Command(c.ctx, command[0], command[1:]...)
	a.cmd.Env = append(os.Environ(), childNode+"="+n.Name, childIntent+"="+c.intent, childState+"="+filepath.Join(c.state, n.Name),
		childReport+"="+c.reportPath(n))
	a.cmd.Stderr = a.log
	if err := a.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	go func() { a.err = a.cmd.Wait(); close(a.done) }()
	return a
}

// cleanup runs Cleanup on the node.
func (c *cluster) cleanup(n *lab.Node) {
	c.t.Helper()
	intent := c.intent
	c.intent = ""
	a := c.launch(n)
	c.intent = intent
	if <-a.done; a.err != nil {
		c.t.Errorf("%s: %v\n%s", n, a.err, a.log)
	}
}

func (a *agentProcess) end(sig syscall.Signal) error {
	_ = a.cmd.Process.Signal(sig)
	<-a.done
	return a.err
}

// freeze stops a process. It returns when the process has stopped, which may take some time on a
// busy machine.
func (c *cluster) freeze(a *agentProcess) {
	c.t.Helper()
	_ = a.cmd.Process.Signal(unix.SIGSTOP)
	c.eventually(a.node, func() error {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", a.cmd.Process.Pid))
		if _, state, _ := strings.Cut(string(stat), ") "); !strings.HasPrefix(state, "T") {
			return fmt.Errorf("not stopped: %s%w", stat, err)
		}
		return nil
	})
}

func (c *cluster) eventually(n fmt.Stringer, try func() error) {
	c.t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	c.t.Fatalf("%s: %v", n, err)
}

func (c *cluster) ping(from *lab.Host, to netip.Addr) {
	c.t.Helper()
	c.eventually(from, func() error { _, err := from.Ping(c.ctx, to); return err })
}

// snapshot returns the output of iproute2 about everything in the namespace that an agent could
// change, without the parts that change by themselves.
func (c *cluster) snapshot(n *lab.Node) string {
	var b strings.Builder
	for _, command := range []string{"ip rule show", "ip route show table all", "ip -o -d link show type vxlan", "ip -o addr show",
		"ip neigh show nud permanent", "bridge fdb show dev " + kernel.OverlayDevice, "cat /proc/sys/net/ipv4/conf/" + kernel.OverlayDevice + "/rp_filter"} {
		f := strings.Fields(command)
		out, err := n.Command(c.ctx, f[0], f[1:]...).CombinedOutput()
		if err != nil {
			out = []byte("none\n") // the device does not exist
		}
		var lines []string
		for line := range strings.Lines(string(out)) {
			if strings.Contains(line, ": "+kernel.OverlayDevice) {
				_, line, _ = strings.Cut(line, ": ") // without the index of the device
			}
			if !strings.Contains(line, "fe80::") && !strings.Contains(line, "ff00::") { // link-local and multicast routes appear when duplicate address detection ends
				lines = append(lines, line)
			}
		}
		slices.Sort(lines) // the kernel lists rules of the same priority in the order of their addition
		b.WriteString(strings.Join(lines, ""))
	}
	return b.String()
}

func TestPodsAndRemotePodsReachEachOtherOnlyThroughTheOverlay(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	short, cancel := context.WithTimeout(c.ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := c.pod(1).Ping(short, remotePod); err == nil {
		t.Fatal("a pod on node 2 reaches the remote pod without agents: the test proves nothing")
	}
	c.start(c.Nodes...)
	captures := make([]*capture, len(c.Nodes))
	for i, n := range c.Nodes {
		captures[i] = newCapture(t, n)
	}
	for _, p := range c.Pods {
		c.ping(p.Host, remotePod)
		c.ping(p.Host, remoteEndpoint)
	}
	seen := c.remoteSees(c.Nodes[1].Host)
	if want := c.Nodes[1].Addr; seen != want { // the kernel must choose this source for a socket that binds no address
		t.Errorf("the source of node 2 is %v, want %v", seen, want)
	}
	for _, p := range c.Pods {
		if got := c.remoteSees(p.Host); got != p.Addr {
			t.Errorf("the source of pod %v is %v", p.Addr, got)
		}
		c.transfer(p.Host)
		// Ping from a remote address. The host has the address on lo, and its default route leads
		// to node 1.
		c.run(c.OnPrem.Host, "ip route replace %v via %s src %v", p.Addr, hopStandIn, remotePod)
		c.ping(c.OnPrem.Host, p.Addr)
	}
	for i, p := range captures {
		c.eventually(c.Nodes[i], func() error {
			if p.inner.Load() == 0 {
				return errors.New("no packet with a remote address was inside VXLAN")
			}
			return nil
		})
		p.stop()
		if n := p.bare.Load(); n > 0 {
			t.Errorf("%s: %d packets with a remote address were outside VXLAN", c.Nodes[i], n)
		}
	}
}

// remoteSees returns the source address of a connection from the host, as seen by the remote pod.
func (c *cluster) remoteSees(from *lab.Host) netip.Addr {
	c.t.Helper()
	l, err := c.OnPrem.Listen("tcp", netip.AddrPortFrom(remotePod, 0).String())
	if err != nil {
		c.t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		c.t.Error(err)
		return netip.Addr{}
	}
	defer conn.Close()
	other, err := l.Accept()
	if err != nil {
		c.t.Fatal(err)
	}
	defer other.Close()
	return netip.MustParseAddrPort(other.RemoteAddr().String()).Addr()
}

// transfer sends more data than fits in one packet to the remote pod and back, to cover the
// overlay's smaller MTU and the kernel's offloads.
func (c *cluster) transfer(from *lab.Host) {
	c.t.Helper()
	l, err := c.OnPrem.Listen("tcp", netip.AddrPortFrom(remotePod, 0).String())
	if err != nil {
		c.t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_, _ = io.Copy(conn, conn)
			conn.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", l.Addr().String())
	if err != nil {
		c.t.Errorf("%s: %v", from, err)
		return
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(i * 7 >> 3)
	}
	go func() { _, _ = conn.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(conn, got); err != nil || !bytes.Equal(got, sent) {
		c.t.Errorf("%s: the answer differs from the sent data: %v", from, err)
	}
}

func TestEventsRestoreDeletedAndChangedObjects(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.start(c.Nodes[:2]...)
	const dev = kernel.OverlayDevice
	n2, n3 := c.Nodes[1], c.Nodes[2]
	other := fabric.OverlayAddr(n3.Addr)
	for _, tc := range []struct {
		node     int
		commands []string
	}{
		{1, []string{fmt.Sprintf("ip route del %v table 4201 metric 0", remotePods)}},
		{1, []string{fmt.Sprintf("ip route del unreachable %v table 4201", remoteExternal)}},
		{1, []string{fmt.Sprintf("ip route replace %v via %v dev %s onlink table 4201 proto 72", remotePods, other, dev)}},
		{1, []string{fmt.Sprintf("ip route replace %v via %v dev eth0 onlink table 4201 proto 72", remotePods, n3.Addr)}},
		{1, []string{fmt.Sprintf("ip route replace unreachable %v table 4201", remotePods)}},
		{1, []string{"ip route flush table 4201"}},
		{1, []string{"ip route del 240.0.0.0/8"}},
		{1, []string{fmt.Sprintf("ip rule del to %v", remotePods)}},
		{1, []string{"ip rule del priority 418"}},
		{1, []string{"ip rule add priority 419 to 10.99.0.0/16 lookup 4201 protocol 72"}},
		{1, []string{"ip addr flush dev " + dev}},
		{1, []string{"ip addr add 240.9.9.9/32 dev " + dev}},
		{1, []string{fmt.Sprintf("ip neigh del %v dev %s", other, dev)}},
		{1, []string{fmt.Sprintf("ip neigh replace %v lladdr 66:00:00:00:00:01 dev %s nud permanent", other, dev)}},
		{1, []string{fmt.Sprintf("bridge fdb del %v dev %s dst %v self", fabric.OverlayMAC(n3.Name), dev, n3.Addr)}},
		{1, []string{fmt.Sprintf("bridge fdb append 00:00:00:00:00:00 dev %s dst 192.0.2.1 self permanent", dev)}},
		{1, []string{"ip link del " + dev}},
		{1, []string{"ip link set down dev " + dev}},
		{1, []string{"ip link set mtu 1000 dev " + dev}},
		{1, []string{"ip link set address 66:00:00:00:00:02 dev " + dev}},
		{1, []string{"ip link del " + dev, "ip link add " + dev + " type vxlan id 7 dstport 4801 learning", "ip link set up dev " + dev}},
		{1, []string{"ip link del " + dev, "ip link add " + dev + " type bridge"}},
		{1, []string{"sysctl -q -w net/ipv4/conf/" + dev + "/rp_filter=1"}},
		{0, []string{fmt.Sprintf("ip rule del from %v", remotePods)}},
		{0, []string{fmt.Sprintf("ip route del %v table 4201", n2.PodCIDR)}},
		{0, []string{"ip link del " + dev}},
	} {
		n := c.Nodes[tc.node]
		before := c.snapshot(n)
		time.Sleep(2 * compareGap) // wait until the agent has read the events of its own repair, so that only a new event can cause the next repair
		if len(tc.commands) > 1 {  // so that the agent cannot compare between two commands
			c.freeze(c.agents[n])
		}
		for _, command := range tc.commands {
			if strings.HasPrefix(command, "sysctl") {
				if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/conf/"+dev+"/rp_filter", []byte("1"), 0) }); err != nil {
					t.Fatal(err)
				}
				continue
			}
			c.run(n.Host, "%s", command)
		}
		_ = c.agents[n].cmd.Process.Signal(unix.SIGCONT)
		start := time.Now()
		for c.snapshot(n) != before {
			if time.Since(start) > time.Minute {
				t.Fatalf("%s: %v: not repaired\nbefore\n%s\nnow\n%s", n, tc.commands, before, c.snapshot(n))
			}
		}
		t.Logf("%s: %v: repaired after %v", n, tc.commands, time.Since(start))
	}
	c.start(n3)
	c.ping(c.pod(1).Host, remotePod)
	metrics, err := c.Nodes[1].Get(c.ctx, "http://"+metricsAt+"/metrics")
	if err != nil || !strings.Contains(metrics, "isthmus_route_agent_drift_repaired_total ") || strings.Contains(metrics, "isthmus_route_agent_drift_repaired_total 0\n") {
		t.Errorf("%v\n%s", err, metrics)
	}
}

func TestStoppedAgentLeavesItsObjectsAndCleanupRemovesThem(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	for i, n := range c.Nodes[:2] {
		for _, foreign := range []string{
			"ip route add 10.99.0.0/16 via 172.30.1.1 table 4201 proto 4",
			"ip route add 10.98.0.0/16 via 172.30.1.1 proto static",
			"ip rule add priority 419 to 10.99.0.0/16 lookup 4201",
			"ip rule add priority 418 to 10.97.0.0/16 lookup main protocol 71",
			"ip link add other.vxlan type vxlan id 4200 local " + n.Addr.String() + " dstport 4879 nolearning",
			"bridge fdb append 00:00:00:00:00:00 dev other.vxlan dst 192.0.2.1 self permanent",
			"ip neigh add 192.0.2.7 lladdr 66:00:00:00:00:01 dev other.vxlan nud permanent",
		} {
			c.run(n.Host, "%s", foreign)
		}
		before := c.snapshot(n)
		c.start(n)
		during := c.snapshot(n)
		for line := range strings.Lines(before) {
			if line != "none\n" && !strings.Contains(during, line) {
				t.Errorf("%s: an agent removed %s", n, line)
			}
		}
		if err := c.agents[n].end(unix.SIGTERM); err != nil {
			t.Errorf("%s: %v\n%s", n, err, c.agents[n].log)
		}
		if after := c.snapshot(n); after != during {
			t.Errorf("node %d: before\n%s\nafter\n%s", i+1, during, after)
		}
		c.cleanup(n)
		if after := c.snapshot(n); after != before {
			t.Errorf("node %d: before\n%s\nafter cleanup\n%s", i+1, before, after)
		}
		if left, err := os.ReadDir(filepath.Join(c.state, n.Name)); err != nil || len(left) > 0 {
			t.Errorf("snapshot: %v, %v", left, err)
		}
	}
}

func TestAgentStartedAfterAKilledOneChangesNothing(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.start(c.Nodes...)
	ctx, stop := context.WithCancel(c.ctx)
	lost, sent := 0, 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil || lost == 0 && sent < 50 {
			if _, err := c.pod(1).PingWith(c.ctx, remotePod, lab.PingOptions{Wait: time.Minute}); err != nil {
				lost++
			}
			sent++
			time.Sleep(5 * time.Millisecond)
		}
	}()
	for _, n := range c.Nodes {
		before := c.snapshot(n) + c.run(n.Host, "ip -o link show %s", kernel.OverlayDevice) // including the device's index
		_ = c.agents[n].end(unix.SIGKILL)
		time.Sleep(200 * time.Millisecond)
		c.start(n)
		time.Sleep(200 * time.Millisecond)
		if after := c.snapshot(n) + c.run(n.Host, "ip -o link show %s", kernel.OverlayDevice); after != before {
			t.Errorf("%s: before\n%s\nafter\n%s", n, before, after)
		}
		if log := c.agents[n].log.String(); strings.Contains(log, "changed") || strings.Contains(log, "repaired") {
			t.Errorf("%s: the second agent changed something:\n%s", n, log)
		}
	}
	stop()
	<-done
	if lost > 0 {
		t.Errorf("%d of %d pings lost", lost, sent)
	}

	// The next agent removes objects that became obsolete while no agent ran.
	n := c.Nodes[1]
	_ = c.agents[n].end(unix.SIGKILL)
	c.in.Tunnels = nil
	allocate(&c.in)
	c.writeIntent()
	c.start(n)
	if s := c.snapshot(n); strings.Contains(s, remotePods.String()) {
		t.Errorf("still there:\n%s", s)
	}
}

// An older version had its rules at other priorities. After an upgrade, the new agent at first
// knows only which networks to refuse. Until it has an intent, it must leave the older rules in
// force.
func TestUpgradeFromAnAgentWithOtherRulePrioritiesKeepsTrafficFlowing(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	c.start(c.Nodes...)
	n, p := c.Nodes[1], c.pod(1)
	c.ping(p.Host, remotePod)
	_ = c.agents[n].end(unix.SIGKILL)
	for priority, table := range map[int]int{kernel.NodeRulePriority: kernel.NodeTable, kernel.RefuseRulePriority: kernel.RefuseTable} {
		c.run(n.Host, "ip rule add pref %d table %d protocol %d", priority+3780, table, kernel.NodeProtocol)
		c.run(n.Host, "ip rule del pref %d table %d", priority, table)
	}
	if err := os.Remove(c.intent); err != nil {
		t.Fatal(err)
	}
	c.agents[n] = c.launch(n)
	c.eventually(n, func() error { _, err := n.Get(c.ctx, "http://"+metricsAt+"/healthz"); return err }) // the new agent has read the kernel's state
	if _, err := p.PingWith(c.ctx, remotePod, lab.PingOptions{Wait: 10 * time.Second}); err != nil {
		t.Errorf("%v\n%s", err, c.snapshot(n))
	}
	c.writeIntent()
	c.eventually(n, func() error {
		if s := c.run(n.Host, "ip rule"); strings.Contains(s, "4199:") || strings.Contains(s, "4202:") || !strings.Contains(s, "422:") {
			return errors.New(s)
		}
		return nil
	})
	c.ping(p.Host, remotePod)
}

// A killed gateway leaves routes that refuse traffic. They must not interfere when another node has
// the gateway.
func TestEveryNodeRoutesToAMovedGateway(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	c.start(c.Nodes...)
	n1, n2, n3 := c.Nodes[0], c.Nodes[1], c.Nodes[2]
	c.ping(c.pod(2).Host, remotePod)

	// The gateway moves from node 1 to node 2, where the second pod represents the remote cluster.
	c.run(n1.Host, "ip route del %v table %d metric 0", remotePods, kernel.GatewayTable)
	far := c.Pods[3]
	c.standIn(n2, far.Host)
	c.in.Tunnels[0].Gateway = n2.Addr
	start := time.Now()
	c.writeIntent()
	for i := range c.Nodes {
		p := c.pod(i)
		c.eventually(p.Node, func() error {
			ctx, cancel := context.WithTimeout(c.ctx, 2*time.Second)
			defer cancel()
			_, err := p.Ping(ctx, remotePod)
			return err
		})
	}
	t.Logf("all nodes followed within %v", time.Since(start))
	if s := c.snapshot(n3); !strings.Contains(s, fmt.Sprintf("%v via %v", remotePods, fabric.OverlayAddr(n2.Addr))) {
		t.Errorf("%s:\n%s", n3, s)
	}

	// The peer disappears, and then its networks are freed. Every node removes its routes and
	// rules.
	c.in.Tunnels = nil
	c.writeIntent()
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s := c.snapshot(n); strings.Contains(s, "table 4201") || strings.Contains(s, "lookup 4201") || !strings.Contains(s, "lookup 4202") {
				return errors.New(s)
			}
			return nil
		})
	}
	allocate(&c.in)
	c.writeIntent()
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s := c.snapshot(n); strings.Contains(s, "4202") {
				return errors.New(s)
			}
			return nil
		})
	}
}

// During an upgrade the new agent starts while the old one still runs, so that an agent handles
// events at any time.
func TestNewAgentTakesOverWhenTheRunningOneStops(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.writeIntent()
	c.start(n)
	first := c.agents[n]

	started := func(a *agentProcess) error {
		return n.Do(func() error { return Started(c.ctx, strconv.Itoa(a.cmd.Process.Pid)) })
	}
	if err := started(first); err != nil {
		t.Errorf("the first: %v", err)
	}
	intent := c.intent
	c.intent += ".second"
	second := c.launch(n) // the second agent has no intent yet
	c.eventually(n, func() error {
		if err := started(second); err == nil || !strings.Contains(err.Error(), "has not read its configuration yet") {
			return fmt.Errorf("%w\n%s", errors.Join(err, errors.New("it must not have started")), second.log)
		}
		return nil
	})
	c.eventually(n, func() error {
		if !strings.Contains(second.log.String(), "another isthmus route agent (process ") {
			return fmt.Errorf("it does not say whom it follows:\n%s", second.log)
		}
		return nil
	})
	allocate(&c.in)
	c.in.Tunnels = nil
	c.writeIntent()
	nodes := c.in.Nodes
	c.in.Nodes = nodes[:1]
	c.writeIntent()
	c.eventually(n, func() error { // the second agent cannot take over, and reports that before the first agent is stopped
		if err := started(second); err == nil || !strings.Contains(err.Error(), "does not find its Node") {
			return errors.Join(err, errors.New("it must not have started"))
		}
		return nil
	})
	c.in.Nodes = nodes
	c.writeIntent()
	c.eventually(n, func() error { return started(second) })
	if s := c.snapshot(n); !strings.Contains(s, "from all to 10.246.0.0/16") {
		t.Errorf("the second has touched the kernel beside the first:\n%s", s)
	}
	c.intent = intent

	if err := first.end(syscall.SIGTERM); err != nil {
		t.Errorf("the first: %v\n%s", err, first.log)
	}
	c.agents[n] = second
	c.eventually(n, func() error {
		if s := c.snapshot(n); strings.Contains(s, "from all to 10.246.0.0/16") {
			return errors.New(s)
		}
		_, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz")
		return err
	})
}

func TestAnAgentReportsProblems(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.in.Nodes = append(c.in.Nodes, fabric.ClusterNode{Name: "clash", Addrs: []netip.Addr{netip.MustParseAddr("10.30.1.11")}, Created: 9})
	c.writeIntent()
	c.start(n)

	status := func(want ...string) {
		t.Helper()
		c.eventually(n, func() error {
			s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
			for _, w := range want {
				if !strings.Contains(s, w) {
					return fmt.Errorf("no %q in\n%s%w", w, s, err)
				}
			}
			return nil
		})
	}
	status(`"ready": true`, "map to the same overlay address, 240.30.1.11", "ip rule add priority 419 to 10.246.0.0/16")

	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("0"), 0) }); err != nil {
		t.Fatal(err)
	}
	status(`"ready": false`, "net.ipv4.ip_forward is 0: the node does not forward packets of pods; want 1")
	if _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); err == nil {
		t.Error("ready, but does not forward")
	}
	if err := n.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	status(`"ready": true`)

	// Our Node is deleted: the agent reports that, but removes nothing.
	before := c.snapshot(n)
	nodes := c.in.Nodes
	c.in.Nodes = nodes[:1]
	c.writeIntent()
	status(`"ready": false`, `no Node is called`)
	if _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); err == nil {
		t.Error("ready, but knows no Node of its own")
	}
	if after := c.snapshot(n); after != before {
		t.Errorf("before\n%s\nafter\n%s", before, after)
	}
	c.in.Nodes = nodes
	c.in.Nodes[1].Addrs = []netip.Addr{netip.MustParseAddr("172.30.1.99")}
	c.writeIntent()
	status(`"ready": false`, "no device here has 172.30.1.99")
}

// In an unprivileged container /proc/sys is read-only. Strict filtering on all devices would drop
// packets from the overlay, unless the overlay's own setting is less strict.
func TestAgentWorksWithReadOnlyProcSys(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.agents[n] = c.launch(n, "unshare", "--mount", "sh", "-c",
		`mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec "$0"`)
	c.eventually(n, func() error { _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); return err })
	for name, want := range map[string]string{"rp_filter": "2", "forwarding": "1"} {
		var value []byte
		err := n.Do(func() (err error) {
			value, err = os.ReadFile("/proc/sys/net/ipv4/conf/" + kernel.OverlayDevice + "/" + name)
			return err
		})
		if err != nil || strings.TrimSpace(string(value)) != want {
			t.Errorf("%s is %q, want %s: %v", name, value, want, err)
		}
	}
	time.Sleep(3 * compareGap)
	if log := c.agents[n].log.String(); strings.Contains(log, "repaired") || strings.Count(log, "ip link add") != 1 {
		t.Errorf("not at rest:\n%s", log)
	}
}

// New networks and gateways of peers are applied at once, because packets for them take other paths
// until then. Other changes wait for compareGap.
func TestNewPeerNetworksAndGatewaysAreAppliedAtOnce(t *testing.T) {
	a := &agent{wake: make(chan struct{}, 1), urgent: make(chan struct{}, 1)}
	tunnel := fabric.Tunnel{Peer: fabric.Peer{ID: "b"}}
	var in fabric.NodeIntent
	for _, step := range []struct {
		name   string
		change func()
		urgent bool
	}{
		{"the first", func() {}, true},
		{"the same", func() {}, false},
		{"a pod", func() { in.Pods = []fabric.NodePod{{Node: "n1"}} }, false},
		{"a node", func() { in.Nodes = []fabric.ClusterNode{{Name: "n1"}} }, false},
		{"a network is granted", func() { allocate(&in, remotePods) }, true},
		{"a tunnel", func() { in.Tunnels = []fabric.Tunnel{tunnel} }, true},
		{"a gateway", func() { tunnel.Gateway = netip.MustParseAddr("172.30.1.11"); in.Tunnels = []fabric.Tunnel{tunnel} }, true},
		{"another pod", func() { in.Pods = nil }, false},
	} {
		step.change()
		a.deliver(in, nil)
		<-a.wake
		if got := len(a.urgent) > 0; got != step.urgent {
			t.Errorf("%s: urgent %t; want %t", step.name, got, step.urgent)
		}
		select {
		case <-a.urgent:
		default:
		}
	}
}

// Packets of a peer for a mapped endpoint behind another node than the gateway's go through the
// overlay to that node, on the path of the answers. That node's strict filter would drop packets
// that come through the underlay.
func TestMappedEndpointBehindAnotherNodeIsReachedWithStrictRPFilter(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	node, endpoint := c.Nodes[1], c.Pods[3].Host // a pod plays a machine on a network behind node 2
	const server, own = "198.18.7.10", "198.18.7.1"
	c.run(node.Host, "ip link add lan7 type veth peer name lan7 netns %s", endpoint.Netns())
	c.run(node.Host, "ip addr add %v/24 dev lan7", own)
	c.run(node.Host, "ip link set lan7 up")
	c.run(endpoint, "ip addr add %v/24 dev lan7", server)
	c.run(endpoint, "ip link set lan7 up")
	c.run(endpoint, "ip route replace default via %v dev lan7", own)
	c.run(c.Nodes[0].Host, "ip route add 198.18.7.0/24 via %v", node.Addr)
	c.run(c.OnPrem.Host, "ip route replace %v via %s src %v", server, hopStandIn, remotePod)
	c.start(c.Nodes...)
	routed := func(want bool) {
		c.eventually(c.Nodes[0], func() error {
			if out := c.run(c.Nodes[0].Host, "ip route show table %d", kernel.NodeTable); strings.Contains(out, "198.18.7.0") != want {
				return errors.New(out)
			}
			return nil
		})
	}
	routed(true) // the agent reads foreign routes after it is ready
	captured := newCapture(t, c.Nodes[0])
	c.ping(c.OnPrem.Host, netip.MustParseAddr(server))
	captured.stop()
	if n := captured.bare.Load(); n > 0 {
		t.Errorf("%d packets with a remote address were outside VXLAN", n)
	}
	// A route that disappears is removed from our table as well.
	c.run(c.Nodes[0].Host, "ip route del 198.18.7.0/24")
	routed(false)
	// The kernel uses the route with the lower metric. Its next hop is no node.
	c.run(c.Nodes[0].Host, "ip route add 198.18.7.0/24 via %v metric 200", node.Addr)
	routed(true)
	c.run(c.Nodes[0].Host, "ip route add 198.18.7.0/24 via %v metric 100", c.OnPrem.Addr)
	routed(false)
}
