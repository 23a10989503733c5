package routeagent

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// sendDatagrams sends datagrams to the remote networks from a host until stop is called. stop
// returns the number of datagrams.
func (c *cluster) sendDatagrams(from *lab.Host) (stop func() int) {
	c.t.Helper()
	var conns []net.PacketConn
	for range 2 {
		conn, err := from.ListenPacket("udp4", "0.0.0.0:0")
		if err != nil {
			c.t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	end, sent := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for tick := time.NewTicker(time.Millisecond); ; {
			select {
			case <-end:
				tick.Stop()
				sent <- n
				return
			case <-tick.C:
			}
			for i, to := range []netip.Addr{remotePod, remoteEndpoint} { // an error means that the datagram was refused
				_, _ = conns[i].WriteTo([]byte("secret"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
				n++
			}
		}
	}()
	return func() int {
		close(end)
		n := <-sent
		for _, conn := range conns {
			conn.Close()
		}
		return n
	}
}

// From the allocation of the networks to the end of the peering, no packet for them is on the
// underlay outside VXLAN, even if components stop or objects disappear.
func TestNothingLeavesInTheClearWhenComponentsStop(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	n1, n2 := c.Nodes[0], c.Nodes[1]
	tunnels := c.in.Tunnels
	c.in.Tunnels = nil // the networks are allocated, but have no tunnel
	allocate(&c.in, remotePods, remoteExternal)
	c.writeIntent()
	c.start(c.Nodes...)
	captures := []*capture{newCapture(t, n1), newCapture(t, n2)}
	stops := []func() int{c.sendDatagrams(c.pod(1).Host), c.sendDatagrams(n2.Host), c.sendDatagrams(c.pod(0).Host)}
	quiet := func(when string) {
		t.Helper()
		time.Sleep(300 * time.Millisecond) // packets are sent meanwhile
		for i, p := range captures {
			if n := p.leaving.Load(); n > 0 {
				t.Fatalf("%s: %d packets in the clear on node %d", when, n, i+1)
			}
		}
	}
	quiet("granted, without a TunnelEndpoint")
	c.in.Tunnels = tunnels
	c.writeIntent()
	c.ping(c.pod(1).Host, remotePod)
	quiet("connected")
	ends := []unix.Signal{unix.SIGTERM, unix.SIGKILL, unix.SIGHUP}
	if signal.Ignored(unix.SIGHUP) { // by nohup, for example; then the agent ignores it as well
		ends = ends[:2]
	}
	for _, sig := range ends {
		for _, n := range []*lab.Node{n2, n1} {
			_ = c.agents[n].end(sig)
			quiet(fmt.Sprintf("%v of the agent of %s", sig, n))
			c.start(n)
			quiet(fmt.Sprintf("the agent of %s again after %v", n, sig))
		}
	}
	// An agent that starts while the IPAM state is wrong learns the networks from its snapshot, or
	// from the kernel alone.
	for name, state := range map[string]func(){
		"":                     func() {},
		", without a snapshot": func() { _ = os.Remove(filepath.Join(c.state, n2.Name, snapshotName)) },
	} {
		before := c.in
		_ = c.agents[n2].end(unix.SIGKILL)
		state()
		c.in.Tunnels, c.in.Named = nil, nil
		c.writeIntent()
		c.start(n2)
		quiet("the IPAM state emptied while no agent ran" + name)
		c.in = before
		c.writeIntent()
		c.ping(c.pod(1).Host, remotePod)
	}
	for name, change := range map[string]func(){
		"another gateway":                             func() { c.in.Tunnels[0].Gateway = c.Nodes[2].Addr },
		"no gateway":                                  func() { c.in.Tunnels[0].Gateway = netip.Addr{} },
		"an unknown gateway address":                  func() { c.in.Tunnels[0].Gateway = netip.MustParseAddr("192.0.2.1") },
		"no TunnelEndpoint":                           func() { c.in.Tunnels = nil },
		"no TunnelEndpoint and no NetworkAllocation":  func() { c.in.Tunnels, c.in.Allocations = nil, fabric.Allocations{} },
		"a network deleted from an object by hand":    func() { c.in.Tunnels, c.in.Named = nil, c.in.Named[1:] },
		"all networks deleted from an object by hand": func() { c.in.Tunnels, c.in.Named = nil, nil },
		"objects from an old backup": func() {
			c.in.Tunnels = nil
			c.in.Allocations = fabric.Allocations{Freed: []fabric.Allocation{{Object: "b", Network: remotePods, Revision: 1}, {Object: "b", Network: remoteExternal, Revision: 1}}, Revision: 1}
		},
		"a node with a second address in the peer's network": func() { c.in.Nodes[2].Addrs = []netip.Addr{c.Nodes[2].Addr, remotePod} },
		"a node whose only address is in the peer's network": func() { c.in.Nodes[2].Addrs = []netip.Addr{remotePod} },
		"no other Nodes":                              func() { c.in.Nodes = c.in.Nodes[1:2] },
		"no Node of our own":                          func() { c.in.Nodes = c.in.Nodes[:1] },
		"our own node as the gateway's":               func() { c.in.Tunnels[0].Gateway = n2.Addr },
		"a pod with an address in the peer's network": func() { c.in.Pods[0].Addr = remotePod },
	} {
		before := c.in
		c.in.Nodes = append(c.in.Nodes[:0:0], c.in.Nodes...)
		c.in.Pods = append(c.in.Pods[:0:0], c.in.Pods...)
		c.in.Tunnels = append(c.in.Tunnels[:0:0], c.in.Tunnels...)
		change()
		c.writeIntent()
		quiet(name)
		c.run(n2.Host, "ip link del isthmus.vxlan")
		quiet(name + ", and the overlay's device")
		c.in = before
		c.writeIntent()
		quiet(name + " no more")
	}
	c.ping(c.pod(1).Host, remotePod)

	// After a reboot the kernel has none of our objects, and the API server is down. The snapshot
	// is enough.
	_ = c.agents[n2].end(unix.SIGKILL)
	stops[1]() // a booting node sends nothing yet
	stops[0]()
	flush(c, n2)
	if err := os.Remove(c.intent); err != nil {
		t.Fatal(err)
	}
	a := c.launch(n2)
	c.agents[n2] = a
	c.eventually(n2, func() error {
		if s := c.snapshot(n2); !strings.Contains(s, "lookup 4202") {
			return errors.New(s)
		}
		return nil
	})
	stops[0], stops[1] = c.sendDatagrams(c.pod(1).Host), c.sendDatagrams(n2.Host)
	quiet("rebooted, and no API server")
	c.writeIntent()
	c.ping(c.pod(1).Host, remotePod)
	quiet("rebooted")

	// Without our objects, packets must be in the clear. Otherwise the test proves nothing.
	_ = c.agents[n2].end(unix.SIGTERM)
	c.cleanup(n2)
	c.eventually(n2, func() error {
		if captures[1].leaving.Load() == 0 {
			return errors.New("after the cleanup nothing is in the clear: the test proves nothing")
		}
		return nil
	})
	for _, stop := range stops {
		if n := stop(); n < 50 {
			t.Errorf("only %d packets were sent", n)
		}
	}
}

// flush removes everything that a reboot removes.
func flush(c *cluster, n *lab.Node) {
	c.t.Helper()
	c.run(n.Host, "ip link del isthmus.vxlan")
	for _, table := range []string{"4201", "4202"} {
		_ = n.Command(c.ctx, "ip", "route", "flush", "table", table).Run()
	}
	for range 20 { // ip rule del removes one rule at a time
		if n.Command(c.ctx, "ip", "rule", "del", "protocol", "72").Run() != nil {
			return
		}
	}
}

func TestAnUnreadableSnapshotIsReportedAndIgnored(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.start(n)
	before := c.snapshot(n)
	path := filepath.Join(c.state, n.Name, snapshotName)
	good, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(good), remotePods.String()) {
		t.Fatalf("%s, %v", good, err)
	}
	intent, err := os.ReadFile(c.intent)
	if err != nil {
		t.Fatal(err)
	}
	for bad, want := range map[string]string{
		"":              "unexpected end of JSON input",
		"{}":            "version 0; want 2",
		`{"version":3}`: "version 3; want 2",
		`{"version":2,"refused":[` + strings.Repeat(" ", snapshotLimit):         "larger than",
		`{"version":2,"refused":[{"object":"b","network":"0.0.0.0/0"}]}`:        "refused has 0.0.0.0/0; want a network",
		`{"version":2,"refused":[{"object":"b","revision":7}]}`:                 "refused has invalid Prefix; want a network",
		`{"version":2,"refused":[{"object":"b","network":"10.1.2.3/8"}]}`:       "refused has 10.1.2.3/8; want a network",
		`{"version":2,"refused":[{"object":"b","network":"10.0.0.0/8"},["x"]]}`: "cannot unmarshal",
	} {
		_ = c.agents[n].end(unix.SIGTERM)
		if err := errors.Join(os.WriteFile(path, []byte(bad), 0o600), os.Remove(c.intent)); err != nil {
			t.Fatal(err)
		}
		c.agents[n] = c.launch(n)
		c.eventually(n, func() error {
			s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
			if err != nil || !strings.Contains(s, want) || !strings.Contains(s, `"ready": false`) {
				return fmt.Errorf("no %q: %s%w", want, s, err)
			}
			return nil
		})
		if now := c.snapshot(n); now != before {
			t.Fatalf("%.60q: before\n%s\nafter\n%s", bad, before, now)
		}
		if err := os.WriteFile(c.intent, intent, 0o600); err != nil {
			t.Fatal(err)
		}
		c.eventually(n, func() error {
			now, err := os.ReadFile(path)
			if !strings.Contains(string(now), fmt.Sprintf(`{"object":"b","network":"%v"`, remotePods)) {
				return fmt.Errorf("not replaced: %.60s %w", now, err)
			}
			return nil
		})
		c.eventually(n, func() error { _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); return err })
	}
}

// A node reports that it refuses a network only when the network is in its snapshot, so that the
// node refuses it after a boot, too.
func TestASnapshotIsWrittenBeforeTheReport(t *testing.T) {
	c := newCluster(t, 1)
	n, log := c.Nodes[0], slog.New(slog.DiscardHandler)
	var k *rtnl.Kernel
	if err := n.Do(func() (err error) { k, err = rtnl.Open(kernel.RouteAgent, log); return err }); err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	a := newAgent(Options{Node: n.Name, StateDirectory: t.TempDir(), Log: log})
	a.deliver(c.in, nil)
	saved := make(chan error)
	go func() {
		<-a.refusing
		_, err := os.Stat(filepath.Join(a.opts.StateDirectory, snapshotName))
		saved <- err
	}()
	if a.compare(a.newLoop(k)); a.current().refused == 0 {
		t.Error(a.current().err)
	}
	if err := <-saved; err != nil {
		t.Error(err)
	}
}

// The packet filter drops packets for a peer that do not leave through our devices. Packets leave
// through other devices if a foreign rule comes before ours, or if somebody removes our routes.
func TestForeignRoutesLeakNoPlaintext(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n1, n2 := c.Nodes[0], c.Nodes[1]
	c.start(c.Nodes...)
	c.ping(c.pod(1).Host, remotePod)
	captures := []*capture{newCapture(t, n1), newCapture(t, n2)}
	stops := []func() int{c.sendDatagrams(c.pod(1).Host), c.sendDatagrams(n2.Host), c.sendDatagrams(c.pod(0).Host), c.sendDatagrams(n1.Host)}
	quiet := func(when string) {
		t.Helper()
		time.Sleep(300 * time.Millisecond) // packets are sent meanwhile
		for i, p := range captures {
			if n := p.leaving.Load(); n > 0 {
				t.Errorf("%s: %d packets in the clear on node %d", when, n, i+1)
			}
		}
	}
	quiet("without foreign rules")
	for _, rule := range []string{"priority 100 lookup main", "priority 100 to " + remotePods.String() + " lookup main"} {
		for _, n := range c.Nodes {
			c.run(n.Host, "ip rule add %s", rule)
		}
		quiet("a rule of others: " + rule)
		for _, n := range c.Nodes {
			c.eventually(n, func() error { // the node sends packets to the peer, and counts its drops
				for _, page := range []struct{ address, has string }{{metricsAt + "/metrics", `isthmus_filter_drops_total{reason="in_the_clear"} `}, {statusAt + "/status", `"in_the_clear": `}} {
					if s, err := n.Get(c.ctx, "http://"+page.address); err != nil || !strings.Contains(s, page.has) {
						return fmt.Errorf("no %s: %s%w", page.has, s, err)
					}
				}
				return nil
			})
			c.eventually(n, func() error { // the status reports the cause
				s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
				if err != nil || !strings.Contains(s, "are routed to device") {
					return fmt.Errorf("the status does not report it: %s%w", s, err)
				}
				return nil
			})
			c.run(n.Host, "ip rule del %s", rule)
		}
	}
	c.ping(c.pod(1).Host, remotePod)
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s, err := n.Get(c.ctx, "http://"+statusAt+"/status"); err != nil || strings.Contains(s, "are routed to device") {
				return fmt.Errorf("the status still reports it: %s%w", s, err)
			}
			return nil
		})
	}
	quiet("after the rule was removed")

	// Without an agent, nothing repairs the routes and rules.
	for _, n := range c.Nodes {
		_ = c.agents[n].end(unix.SIGKILL)
		flush(c, n)
	}
	_ = n1.Command(c.ctx, "ip", "rule", "del", "priority", fmt.Sprint(kernel.GatewayRulePriority)).Run()
	quiet("no agent, and its routes and rules are taken away")

	// Without the filter, packets must be in the clear. Otherwise the test proves nothing.
	for _, n := range c.Nodes {
		c.run(n.Host, "nft delete table inet isthmus")
	}
	for i, n := range c.Nodes {
		c.eventually(n, func() error {
			if captures[i].leaving.Load() == 0 {
				return errors.New("without the filter nothing is in the clear: the test proves nothing")
			}
			return nil
		})
	}
	for _, stop := range stops {
		stop()
	}
}

func TestUnwritableSnapshotIsReportedAndTrafficContinues(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.start(n)
	before := c.snapshot(n)
	_ = c.agents[n].end(unix.SIGTERM)
	directory := filepath.Join(c.state, n.Name)
	if err := errors.Join(os.RemoveAll(directory), os.WriteFile(directory, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	c.agents[n] = c.launch(n)
	reports := func(want bool) {
		t.Helper()
		c.eventually(n, func() error {
			s, err := n.Get(c.ctx, "http://"+statusAt+"/status")
			if err != nil || strings.Contains(s, kernel.LimitSnapshot) != want || !strings.Contains(s, `"ready": true`) {
				return fmt.Errorf("want it to be ready, and %s %v: %s%w", kernel.LimitSnapshot, want, s, err)
			}
			return nil
		})
	}
	reports(true)
	if now := c.snapshot(n); now != before {
		t.Errorf("before\n%s\nnow\n%s", before, now)
	}
	if err := os.Remove(directory); err != nil {
		t.Fatal(err)
	}
	reports(false)
}
