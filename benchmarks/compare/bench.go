package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/benchmarks/internal/load"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// A bench is the lab in which all peers run, and the settings that they share.
type bench struct {
	lab       *lab.Lab
	self      string // path of this program
	binary    string // path of isthmus
	tailscale string // path of the program of ../tailscale; empty: not built
	mtu       int    // of the underlay
	nodes     [2]*node
}

// A node is one side of the path: the only node and the only pod of a cluster.
type node struct {
	cluster  *lab.Cluster
	host     *lab.Host
	pod      *lab.Pod
	underlay netip.Addr
	cidr     netip.Prefix // the cluster's PodCIDR
	seen     netip.Prefix // the PodCIDR under which the other cluster reaches this one
}

// seenPod returns the address under which the other cluster reaches the pod.
func (n *node) seenPod() netip.Addr {
	a, net := n.pod.Addr.As4(), n.seen.Addr().As4()
	for i := range a {
		keep := byte(0xff)
		if bits := n.seen.Bits() - 8*i; bits >= 8 {
			keep = 0
		} else if bits > 0 {
			keep = 0xff >> bits
		}
		a[i] = a[i]&keep | net[i]&^keep
	}
	return netip.AddrFrom4(a)
}

// tunnelMTU subtracts 60 octets, as Liqo does, for the headers of IPv4, UDP and WireGuard.
func (b *bench) tunnelMTU() int { return b.mtu - 60 }

// missing returns the reason why a peer cannot be measured, or the empty string.
func (b *bench) missing(program string) string {
	switch {
	case program == "":
	case program == tailscale:
		if _, err := os.Stat(b.tailscale); err != nil {
			return "benchmarks/tailscale is not built"
		}
	default:
		if _, err := exec.LookPath(program); err != nil {
			return err.Error()
		}
	}
	return ""
}

func newBench(ctx context.Context, mtu int, binary, fork string) (*bench, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	spec := lab.Spec{Name: "bench" + strconv.Itoa(os.Getpid()), MTU: mtu, Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: netip.MustParsePrefix("10.201.0.0/16"), ExternalCIDR: netip.MustParsePrefix("10.211.0.0/16"), Nodes: 1, PodsPerNode: 1},
		{Name: "b", PodCIDR: netip.MustParsePrefix("10.202.0.0/16"), ExternalCIDR: netip.MustParsePrefix("10.212.0.0/16"), Nodes: 1, PodsPerNode: 1},
	}}
	l, err := lab.Up(ctx, spec)
	if err != nil {
		return nil, err
	}
	b := &bench{lab: l, self: self, binary: binary, tailscale: fork, mtu: mtu}
	for i, c := range l.Clusters {
		b.nodes[i] = &node{
			cluster: c, host: c.Nodes[0].Host, pod: c.Pods[0], underlay: c.Nodes[0].Addr, cidr: c.PodCIDR,
			seen: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(246 + i)}), 16),
		}
	}
	return b, nil
}

// startListeners starts a sink in both pods and an echo server in pod B, for the whole run.
func (b *bench) startListeners(ctx context.Context) (func(), error) {
	var procs []*os.Process
	stop := func() {
		for _, p := range procs {
			_ = p.Kill()
			_, _ = p.Wait()
		}
	}
	for _, l := range []struct {
		node int
		what string
	}{{0, "sink"}, {1, "sink"}, {1, "echo"}} {
		p, err := load.Start(ctx, b.nodes[l.node].pod.Host, nil, b.self, "load", l.what)
		if err != nil {
			stop()
			return nil, err
		}
		procs = append(procs, p)
	}
	return stop, nil
}

// run runs a command inside h until it exits, with the given standard input.
func (b *bench) run(ctx context.Context, h *lab.Host, stdin, name string, args ...string) error {
	cmd := h.Command(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s in %s: %w: %s", name, strings.Join(args, " "), h.Name, err, out)
	}
	return nil
}

// measureLoad runs one load process in pod A. It also returns the gateways' CPU seconds.
func (b *bench) measureLoad(ctx context.Context, r *running, args ...string) (load.Result, float64, error) {
	before := cpuSeconds(r.gateways)
	res, err := b.load(ctx, 0, args...)
	return res, cpuSeconds(r.gateways) - before, err
}

// load runs one load process in the pod of a node.
func (b *bench) load(ctx context.Context, node int, args ...string) (load.Result, error) {
	return load.Run(ctx, b.nodes[node].pod.Host, b.self, args...)
}

// bothDirections runs one TCP stream in each direction at the same time.
func (b *bench) bothDirections(ctx context.Context, r *running, ms string) (load.Result, float64, error) {
	before := cpuSeconds(r.gateways)
	var res [2]load.Result
	var errs [2]error
	var wg sync.WaitGroup
	for i, to := range []netip.Addr{r.target, r.back} {
		wg.Go(func() { res[i], errs[i] = b.load(ctx, i, "tcp", to.String(), "1", ms) })
	}
	wg.Wait()
	used := cpuSeconds(r.gateways) - before
	return load.Result{Bytes: res[0].Bytes + res[1].Bytes, Seconds: max(res[0].Seconds, res[1].Seconds)}, used, errors.Join(errs[:]...)
}

// waitReady waits for the first reply through the tunnel.
func (b *bench) waitReady(ctx context.Context, r *running) error {
	var err error
	for range 50 {
		if _, err = b.nodes[0].pod.Ping(ctx, r.target); err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("no answer from %v: %w", r.target, err)
}

func (b *bench) stop(r *running) error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, c := range slices.Backward(r.cleanup) {
		errs = append(errs, c())
	}
	for _, g := range r.gateways {
		_ = g.Signal(syscall.SIGTERM)
		_, _ = g.Wait()
	}
	return errors.Join(errs...)
}

// route adds a route through a device of the node's namespace. The kernel deletes it with the
// device.
func (n *node) route(to netip.Prefix, dev string) error { return n.routeVia(to, dev, netip.Addr{}) }

// routeVia adds a route through a device and a next hop. A zero next hop means none.
func (n *node) routeVia(to netip.Prefix, dev string, via netip.Addr) error {
	return n.host.Do(func() error {
		link, err := netlink.LinkByName(dev)
		if err != nil {
			return fmt.Errorf("%s: %w", dev, err)
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		r := netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(to), Scope: netlink.SCOPE_LINK}
		if via.IsValid() {
			r.Gw, r.Scope = via.AsSlice(), netlink.SCOPE_UNIVERSE
		}
		return netlink.RouteReplace(&r)
	})
}
