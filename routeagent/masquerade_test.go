package routeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/lab"
)

const (
	clusterIP = "10.96.0.10" // of a Service with a remote endpoint
	nodePort  = 30080
)

// masquerades returns the rules with which CNIs masquerade traffic of pods, by the program that
// makes them. Some CNIs masquerade packets that leave the cluster (bridge with ipMasq, flannel,
// kindnet, Calico's natOutgoing), some also packets that enter it (flannel).
func masquerades(pods netip.Prefix) map[string][]string {
	xtables := func(program string) []string {
		return []string{
			fmt.Sprintf("%s -w -t nat -A POSTROUTING -s %v ! -d %v -j MASQUERADE", program, pods, pods),
			fmt.Sprintf("%s -w -t nat -A POSTROUTING ! -s %v -d %v -j MASQUERADE", program, pods, pods),
		}
	}
	nft := func(priority int) []string {
		return []string{
			"nft add table ip cni",
			fmt.Sprintf("nft add chain ip cni post { type nat hook postrouting priority %d ; }", priority),
			fmt.Sprintf("nft add rule ip cni post ip saddr %v ip daddr != %v masquerade", pods, pods),
			fmt.Sprintf("nft add rule ip cni post ip saddr != %v ip daddr %v masquerade", pods, pods),
		}
	}
	return map[string][]string{
		"iptables-legacy": xtables("iptables-legacy"), "iptables-nft": xtables("iptables-nft"), "nftables": nft(100), "nftables, early": nft(90),
	}
}

// services returns the rules of kube-proxy for a Service with a remote endpoint: a cluster IP, and
// a NodePort for which it masquerades packets from outside.
func services(at string, pods netip.Prefix) []string {
	return []string{
		"nft add table ip kube",
		"nft add chain ip kube pre { type nat hook prerouting priority -100 ; }",
		"nft add chain ip kube out { type nat hook output priority -100 ; }",
		"nft add chain ip kube post { type nat hook postrouting priority 100 ; }",
		fmt.Sprintf("nft add rule ip kube pre fib daddr type local tcp dport %d meta mark set 0x4000 dnat to %s", nodePort, at),
		fmt.Sprintf("nft add rule ip kube pre ip daddr %s tcp dport 80 dnat to %s", clusterIP, at),
		fmt.Sprintf("nft add rule ip kube out ip daddr %s tcp dport 80 meta mark set 0x4000 dnat to %s", clusterIP, at),
		"nft add rule ip kube post meta mark 0x4000 masquerade",
	}
}

// With the masquerade rules of each CNI, pods and peers see each other's addresses, directly and
// through a Service. If a node translates packets for other hosts, their source is the node's own
// address.
func TestPodsKeepTheirAddressesDespiteMasqueradeRules(t *testing.T) {
	t.Parallel()
	for name, commands := range masquerades(localPods) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, command := range commands {
				if _, err := exec.LookPath(strings.Fields(command)[0]); err != nil {
					t.Skip(err)
				}
			}
			c := newCluster(t, 2)
			at := netip.AddrPortFrom(remotePod, 8080)
			for _, n := range c.Nodes {
				for _, command := range append(commands, services(at.String(), localPods)...) {
					c.run(n.Host, "%s", command)
				}
			}
			c.start(c.Nodes...)
			for i, n := range c.Nodes {
				p := c.pod(i)
				asked := map[netip.AddrPort]netip.Addr{
					at: p.Addr,
					netip.AddrPortFrom(netip.MustParseAddr(clusterIP), 80): p.Addr,
					netip.AddrPortFrom(n.Addr, nodePort):                   p.Addr,
				}
				if i == 0 { // the gateway's node sends answers for other nodes through the overlay, and its strict rp_filter expects packets from there
					asked[netip.AddrPortFrom(c.Nodes[1].Addr, nodePort)] = c.Nodes[1].Addr
				}
				for to, want := range asked {
					if got := c.seenAt(at, p.Host, to); got != want {
						t.Errorf("pod %v of node %v at %v has the source %v, want %v", p.Addr, n.Addr, to, got, want)
					}
				}
				for _, to := range []netip.AddrPort{at, netip.AddrPortFrom(netip.MustParseAddr(clusterIP), 80)} {
					if got := c.seenAt(at, n.Host, to); got != n.Addr && i == 1 { // on the gateway's node, the source is its address on the device to the stand-in
						t.Errorf("the source of node %v at %v is %v", n.Addr, to, got)
					}
				}
				if got := c.seenAt(at, c.Control.Host, netip.AddrPortFrom(n.Addr, nodePort)); got != n.Addr {
					t.Errorf("through the NodePort of %v, the source of a foreign host is %v", n.Addr, got)
				}
				c.run(c.OnPrem.Host, "ip route replace %v via %s src %v", p.Addr, hopStandIn, remotePod)
				if got := c.seenAt(netip.AddrPortFrom(p.Addr, 8081), c.OnPrem.Host, netip.AddrPortFrom(p.Addr, 8081)); got != remotePod {
					t.Errorf("pod %v sees the source %v of a remote pod", p.Addr, got)
				}
			}
			if s := c.run(c.Nodes[1].Host, "nft list chain ip isthmus postrouting"); !strings.Contains(s, "topeers") {
				t.Errorf("no exemption: %s", s)
			}
			c.run(c.Nodes[1].Host, "nft delete table ip %s", kernel.FilterTable)
			c.eventually(c.Nodes[1], func() error {
				return c.Nodes[1].Command(c.ctx, "nft", "list", "chain", "ip", kernel.FilterTable, "topeers").Run()
			})
		})
	}
}

// seenAt connects a host to an address, and returns the source of the connection at the listener.
// It waits for an answer of one octet.
func (c *cluster) seenAt(listener netip.AddrPort, from *lab.Host, to netip.AddrPort) netip.Addr {
	c.t.Helper()
	at := c.OnPrem.Host
	for _, p := range c.Pods {
		if p.Addr == listener.Addr() {
			at = p.Host
		}
	}
	var l net.Listener
	c.eventually(at, func() (err error) { // a process that another test starts may briefly inherit our sockets
		l, err = at.Listen("tcp", listener.String())
		return err
	})
	defer l.Close()
	accepted := make(chan netip.Addr, 1)
	go func() {
		if conn, err := l.Accept(); err == nil {
			accepted <- netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr()
			_, _ = conn.Write([]byte{1})
			conn.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(c.ctx, time.Minute)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp", to.String())
	if err != nil {
		c.t.Errorf("%s to %v: %v", from, to, err)
		return netip.Addr{}
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		c.t.Errorf("%s to %v: %v", from, to, err)
		return netip.Addr{}
	}
	return <-accepted
}

// Foreign rules that block traffic, and that the agent cannot avoid, are reported in the status and
// to the manager for as long as they exist.
func TestAnAgentReportsBlockingForeignRules(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"nft", "iptables-legacy", "iptables-nft"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skip(err)
		}
	}
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.run(n.Host, "iptables-nft -P FORWARD DROP")
	c.run(n.Host, "iptables-legacy -w -P FORWARD DROP")
	c.run(n.Host, "nft add table inet fw")
	c.run(n.Host, "nft add chain inet fw fw { type filter hook forward priority 5 ; policy drop ; }")
	c.start(c.Nodes...)
	c.ping(c.pod(1).Host, remotePod) // through all three chains, because of the agent's accept rules
	c.run(n.Host, "nft flush chain inet fw fw")
	c.ping(c.pod(1).Host, remotePod)
	c.run(n.Host, "nft add chain inet fw later { type filter hook forward priority 6 ; policy drop ; }")
	c.ping(c.pod(1).Host, remotePod)
	c.run(n.Host, "iptables-legacy -w -N WALL") // a foreign chain
	c.run(n.Host, "iptables-legacy -w -A WALL -j DROP")
	c.run(n.Host, "iptables-legacy -w -I FORWARD -j WALL")
	c.run(n.Host, "nft delete table ip %s", kernel.FilterTable) // makes the agent read the rules again
	status := func(want string, there bool) {
		t.Helper()
		c.eventually(n, func() error {
			b, err := n.Get(c.ctx, "http://"+statusAt+"/status")
			if err == nil && strings.Contains(b, want) != there {
				err = fmt.Errorf("want %q: %t, in %s", want, there, b)
			}
			return err
		})
	}
	status("ForwardingRefused: chain FORWARD of iptables-legacy drops", true)
	status(`"ready": true`, true)
	c.eventually(n, func() error {
		b, err := os.ReadFile(c.reportPath(n))
		if err == nil && !strings.Contains(string(b), "ForwardingRefused") {
			err = fmt.Errorf("the report to the manager is %s", b)
		}
		return err
	})
	c.run(n.Host, "iptables-legacy -w -I FORWARD -i isthmus+ -j ACCEPT") // the remedy in the message
	c.run(n.Host, "iptables-legacy -w -I FORWARD -o isthmus+ -j ACCEPT")
	c.ping(c.pod(1).Host, remotePod)                            // through both
	c.run(n.Host, "nft delete table ip %s", kernel.FilterTable) // makes the agent read the rules again
	status("ForwardingRefused", false)
	c.run(n.Host, "iptables-nft -F FORWARD")
	c.ping(c.pod(1).Host, remotePod)
}

// The agent does not wait for programs that hold the lock of iptables-legacy, nor do they wait for
// the agent. The agent makes its changes when the lock is free, and so does Cleanup.
func TestChangesBlockedByTheIptablesLockAreMadeLater(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("iptables-legacy"); err != nil {
		t.Skip(err)
	}
	c := newCluster(t, 2)
	n := c.Nodes[1]
	c.run(n.Host, "iptables-legacy -w -P FORWARD DROP")
	c.start(c.Nodes[0])
	lock, err := os.Open("/run/xtables.lock")
	if err != nil {
		t.Skip(err)
	}
	defer lock.Close()
	hold := func(how int) {
		t.Helper()
		if err := unix.Flock(int(lock.Fd()), how); err != nil {
			t.Fatal(err)
		}
	}
	hold(unix.LOCK_EX)
	c.start(n) // the agent becomes ready in spite of the lock
	tries := make(map[string]bool)
	c.eventually(n, func() error { // the agent tries again and again without events
		text, err := n.Get(c.ctx, "http://"+metricsAt+"/metrics")
		_, at, _ := strings.Cut(text, "\nisthmus_route_agent_last_apply_timestamp_seconds ")
		at, _, _ = strings.Cut(at, "\n")
		if tries[at] = true; err != nil || len(tries) < 30 {
			return fmt.Errorf("%d comparisons were seen: %w", len(tries), err)
		}
		return nil
	})
	hold(unix.LOCK_UN)
	c.ping(c.pod(1).Host, remotePod)

	_ = c.agents[n].end(unix.SIGTERM)
	hold(unix.LOCK_EX)
	intent := c.intent
	c.intent = ""
	cleanup := c.launch(n)
	c.intent = intent
	c.eventually(n, func() error {
		if now := c.run(n.Host, "nft list tables"); strings.Contains(now, "table inet "+kernel.FilterTable+"\n") {
			return errors.New(now) // this table is removed after our rules in foreign chains
		}
		return nil
	})
	hold(unix.LOCK_UN)
	if <-cleanup.done; cleanup.err != nil {
		t.Errorf("%v\n%s", cleanup.err, cleanup.log)
	}
	if left := c.run(n.Host, "iptables-legacy -w -S FORWARD"); left != "-P FORWARD DROP\n" {
		t.Errorf("left\n%s", left)
	}
}

// Each comparison checks some of the networks, and successive comparisons check all of them. A
// foreign route for a single network is found, and reported until it is removed.
func TestForeignRouteForOneOfManyPeerNetworksIsReported(t *testing.T) {
	c := newCluster(t, 2)
	n := c.Nodes[1]
	l := &loop{log: slog.New(slog.DiscardHandler)}
	if err := n.Do(func() (err error) { l.kernel, err = rtnl.Open(kernel.RouteAgent, l.log); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.kernel.Close()
	in := fabric.NodeIntent{Self: n.Name}
	for i := range 5 * manyNetworks {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(i), 0}), 24)
		in.Allocated = append(in.Allocated, p)
		c.run(n.Host, "ip route add unreachable %v", p)
	}
	l.decided.refused = in.Refused()
	elsewhere := in.Allocated[4*manyNetworks+3]
	finds := func(refresh bool, added ...netip.Prefix) (reported bool) {
		t.Helper()
		for _, p := range l.findDiverted(in.Self, refresh, added) {
			if reported = true; !strings.Contains(p.Message, elsewhere.String()) {
				t.Errorf("it reports %v", p)
			}
		}
		return reported
	}
	found := func() bool { t.Helper(); return finds(true) }
	if found() || finds(false, elsewhere) {
		t.Error("reported before there is a foreign route")
	}
	c.run(n.Host, "ip route del unreachable %v", elsewhere)
	c.run(n.Host, "ip route add %v via 172.30.1.1", elsewhere)
	if finds(false) || !finds(false, in.Allocated[0], elsewhere) || !finds(false) {
		t.Error("a new network is not checked, or not reported again")
	}
	l.diverted = netip.Prefix{}
	rounds := 1
	for ; !found(); rounds++ {
		if rounds == 6 {
			t.Fatal("not found")
		}
	}
	for range 2 {
		if !found() {
			t.Error("the report ended before the route was removed")
		}
	}
	c.run(n.Host, "ip route del %v", elsewhere)
	c.run(n.Host, "ip route add unreachable %v", elsewhere)
	for range 6 {
		if found() {
			t.Error("reported after the route was removed")
		}
	}
}

// The MTU of the overlay follows the MTU of the path to the gateway's Pod, which may lead through a
// device of the CNI.
func TestOverlayMTUFollowsThePathToTheGateway(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 2)
	n, gateway := c.Nodes[1], c.pod(0).Addr
	c.in.OnlyPods, c.in.Gateways = true, []fabric.GatewayPod{{Addr: gateway, Host: c.Nodes[0].Addr}}
	c.in.Tunnels[0].Gateway = gateway
	c.writeIntent()
	mtuOf := func(dev string) (mtu int) {
		f := strings.Fields(c.run(n.Host, "ip -o link show dev %s", dev))
		_, _ = fmt.Sscan(f[slices.Index(f, "mtu")+1], &mtu)
		return mtu
	}
	wantMTU := func(want int) {
		t.Helper()
		c.eventually(n, func() error {
			if got := mtuOf(kernel.OverlayDevice); got != want {
				return fmt.Errorf("the overlay's MTU is %d, want %d", got, want)
			}
			return nil
		})
	}
	c.start(n)
	under := 1500
	for _, f := range strings.Split(c.run(n.Host, "ip -o route get %v", gateway), " dev ")[1:] {
		under = mtuOf(strings.Fields(f)[0])
	}
	wantMTU(under - 50)
	c.run(n.Host, "ip link add cnitun mtu 1450 type veth peer name cnitun2")
	c.run(n.Host, "ip link set cnitun mtu 1440 up")
	c.run(n.Host, "ip route replace %v/32 dev cnitun", gateway)
	c.run(n.Host, "ip addr add 192.0.2.77/32 dev cnitun2") // an address causes an event, a foreign route does not
	wantMTU(1390)
	c.run(n.Host, "ip link set cnitun mtu 1300")
	wantMTU(1250)
	c.run(n.Host, "ip link del cnitun")
	wantMTU(under - 50)
}
