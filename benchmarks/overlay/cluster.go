package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kernel/rtnl"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var (
	localPods      = netip.MustParsePrefix("10.64.0.0/14")
	externals      = netip.MustParsePrefix("10.84.0.0/14")
	remotePods     = netip.MustParsePrefix("10.246.0.0/16")
	remoteExternal = netip.MustParsePrefix("10.250.16.0/20")
	remotePod      = netip.MustParseAddr("10.246.7.7")
)

const (
	podDevice = "eth0" // the pod's device in every lab
	podNode   = 2      // index of the pod's node
)

// gatewayNodes are the nodes on which a gateway can run.
var gatewayNodes = []int{0, 1}

// A cluster is a lab with one cluster of three nodes. The pod runs on the third node; gateways
// can run on the other two. A stand-in replaces each gateway: it has the device, rule and table
// that a gateway creates. The other ends of both devices are in one host, which acts as the
// remote pod.
type cluster struct {
	*lab.Cluster
	lab    *lab.Lab
	self   string // path of this program
	pod    *lab.Pod
	far    *lab.Host
	agents []*agent
}

func newCluster(ctx context.Context) (_ *cluster, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	l, err := lab.Up(ctx, lab.Spec{Name: lab.UniqueName("overlay"), Clusters: []lab.ClusterSpec{{PodCIDR: localPods, Nodes: 3, PodsPerNode: 1}}})
	if err != nil {
		return nil, err
	}
	c := &cluster{Cluster: l.Clusters[0], lab: l, self: self}
	c.pod, c.far = c.Pods[podNode], c.OnPrem.Host
	if err := command(ctx, c.far, "ip addr add %v/32 dev lo", remotePod); err != nil {
		return nil, errors.Join(err, c.close())
	}
	for _, i := range gatewayNodes {
		if err := c.standIn(ctx, i); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	for _, n := range c.Nodes {
		c.agents = append(c.agents, newAgent(n))
	}
	return c, nil
}

func (c *cluster) close() error {
	var errs []error
	for _, a := range c.agents {
		errs = append(errs, a.close())
	}
	return errors.Join(append(errs, c.lab.Down())...)
}

// command runs a command inside h until it exits.
func command(ctx context.Context, h *lab.Host, format string, args ...any) error {
	words := strings.Fields(fmt.Sprintf(format, args...))
	if out, err := h.Command(ctx, words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %s: %w: %s", h, strings.Join(words, " "), err, out)
	}
	return nil
}

// standIn returns the name of the remote pod's device that leads to a gateway node.
func standIn(node int) string { return fmt.Sprintf("standin%d", node) }

// standIn creates a gateway's kernel objects on its node. The remote pod replies through the
// first gateway, unless a socket is bound to the other device.
func (c *cluster) standIn(ctx context.Context, i int) error {
	n, near, away := c.Nodes[i].Host, fmt.Sprintf("169.254.77.%d", 4*i+1), fmt.Sprintf("169.254.77.%d", 4*i+2)
	var errs []error
	in := func(h *lab.Host, format string, args ...any) { errs = append(errs, command(ctx, h, format, args...)) }
	in(n, "ip link add %s type veth peer name %s netns %s", kernel.VethHost, standIn(i), c.far.Netns())
	in(n, "ip addr add %s/30 dev %s", near, kernel.VethHost)
	in(n, "ip link set %s up", kernel.VethHost)
	in(c.far, "ip addr add %s/30 dev %s", away, standIn(i))
	in(c.far, "ip link set %s up", standIn(i))
	if i == gatewayNodes[0] {
		in(c.far, "ip route replace default via %s dev %s src %v", near, standIn(i), remotePod)
	} else {
		in(c.far, "ip route add default via %s dev %s src %v metric %d", near, standIn(i), remotePod, i)
	}
	in(n, "ip rule add priority %d lookup %d protocol %d", kernel.GatewayRulePriority, kernel.GatewayTable, kernel.GatewayProtocol)
	in(n, "ip route add %v via %v dev %s table %d proto %d", remotePods, away, kernel.VethHost, kernel.GatewayTable, kernel.GatewayProtocol)
	return errors.Join(errs...)
}

// listen starts the servers in the remote pod.
func (c *cluster) listen(ctx context.Context) (stop func(), err error) {
	var all []*os.Process
	stop = func() {
		for _, p := range all {
			_ = p.Kill()
			_, _ = p.Wait()
		}
	}
	for _, what := range []string{"sink", "echo"} {
		p, err := load.Start(ctx, c.far, nil, c.self, "load", what)
		if err != nil {
			stop()
			return nil, err
		}
		all = append(all, p)
	}
	return stop, nil
}

// configure configures the nodes for a variant, and waits for the first reply.
func (c *cluster) configure(ctx context.Context, v variant) error {
	const table = "inet others"
	for _, n := range c.Nodes {
		program := fmt.Sprintf("add table %s; delete table %[1]s", table)
		if v.tracks {
			program = fmt.Sprintf("add table %s; delete table %[1]s; table %[1]s { chain c { type filter hook forward priority 0; ct state established accept; }; }", table)
		}
		if out, err := n.Command(ctx, "nft", program).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: nft: %w: %s", n, err, out)
		}
	}
	if err := c.reset(v.filter); err != nil {
		return err
	}
	if err := c.apply(c.intent(len(c.Nodes), 1, gatewayNodes[0])); err != nil {
		return err
	}
	_, err := c.pod.Ping(ctx, remotePod)
	return err
}

// intent returns the intent that each agent would receive from its source, for the given number of
// nodes and peers, all behind the gateway of one node. Of these, only three nodes and the first
// peer exist in the lab.
func (c *cluster) intent(nodes, peers, gateway int) (in fabric.NodeIntent) {
	for _, n := range c.Nodes {
		in.Nodes = append(in.Nodes, fabric.ClusterNode{Name: n.Name, Addrs: []netip.Addr{n.Addr}, PodCIDRs: []netip.Prefix{n.PodCIDR}})
	}
	for i := len(in.Nodes); i < nodes; i++ { // a node that is not in the lab, with a slice of the PodCIDR that no node of the lab uses
		in.Nodes = append(in.Nodes, fabric.ClusterNode{Name: fmt.Sprintf("away-%d", i),
			Addrs:    []netip.Addr{netip.AddrFrom4([4]byte{192, 168, byte(i >> 8), byte(i)})},
			PodCIDRs: []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 67, byte(i), 0}), 24)}})
	}
	for i := range peers {
		remote := fabric.Networks{Pod: netip.MustParsePrefix("10.64.0.0/16"), PodSeen: remotePods, External: remoteExternal, ExternalSeen: remoteExternal}
		if i > 0 {
			remote = fabric.Networks{Pod: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 128, byte(i), 0}), 24),
				External: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 129, byte(i), 0}), 24)}
			remote.PodSeen, remote.ExternalSeen = remote.Pod, remote.External
		}
		id := fmt.Sprintf("peer-%d", i)
		in.Tunnels = append(in.Tunnels, fabric.Tunnel{Gateway: c.Nodes[gateway].Addr, Peer: fabric.Peer{
			ID: id, Name: id, Endpoint: "192.0.2.1", Port: 5871, PublicKey: [32]byte{9, byte(i)},
			Local:  fabric.Networks{Pod: localPods, PodSeen: netip.MustParsePrefix("10.80.0.0/14"), External: externals, ExternalSeen: externals},
			Remote: remote, Origin: fabric.Origin{Kind: "TunnelEndpoint", Name: id},
		}})
	}
	return in
}

// reset makes all nodes start again, with the filter or without it.
func (c *cluster) reset(filter bool) error {
	return c.each(func(a *agent) error { return a.open(filter) })
}

// apply applies an intent on all nodes at the same time.
func (c *cluster) apply(in fabric.NodeIntent) error {
	return c.each(func(a *agent) error { return a.apply(in) })
}

func (c *cluster) each(do func(*agent) error) error {
	errs := make([]error, len(c.agents))
	var all sync.WaitGroup
	for i, a := range c.agents {
		all.Go(func() { errs[i] = do(a) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// An agent configures one node in the way a route agent does. It has a thread in the node's
// namespace.
type agent struct {
	node   *lab.Node
	filter bool
	kernel *rtnl.Kernel
	work   chan func() error
	done   chan error
	ended  chan error
}

func newAgent(n *lab.Node) *agent {
	a := &agent{node: n, work: make(chan func() error), done: make(chan error), ended: make(chan error, 1)}
	go func() {
		a.ended <- n.Do(func() error {
			for f := range a.work {
				a.done <- f()
			}
			return nil
		})
	}()
	return a
}

func (a *agent) do(f func() error) error {
	a.work <- f
	return <-a.done
}

func (a *agent) close() error {
	if a.kernel != nil {
		a.kernel.Close()
	}
	close(a.work)
	return <-a.ended
}

// open removes all kernel objects of the route agent. If filter is false, the agent ignores the
// filter in later changes.
func (a *agent) open(filter bool) error {
	return a.do(func() (err error) {
		if a.kernel != nil {
			a.kernel.Close()
			a.kernel = nil
		}
		owner := kernel.RouteAgent
		k, err := rtnl.Open(owner, slog.New(slog.DiscardHandler))
		if err != nil {
			return err
		}
		_, err = k.Apply(kernel.State{})
		k.Close()
		if err != nil {
			return err
		}
		owner.Filter, a.filter = filter, filter
		a.kernel, err = rtnl.Open(owner, slog.New(slog.DiscardHandler))
		return err
	})
}

func (a *agent) apply(in fabric.NodeIntent) error {
	return a.do(func() error {
		in.Self = a.node.Name
		state, problems := fabric.NodeFor(in)
		if len(problems) > 0 {
			return problems[0]
		}
		if !a.filter {
			state.Filters = nil
		}
		_, err := a.kernel.Apply(state)
		return err
	})
}
