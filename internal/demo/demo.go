// Package demo shows the features of Isthmus, with real packets and real API servers, in a lab of
// three clusters that all use the same PodCIDR. Each step verifies its result, so a demo that
// completes is also a successful test.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Options configure a demo.
type Options struct {
	Out    io.Writer // output for the reader
	Binary string    // absolute path of the isthmus program
	Name   string    // name of the lab; default "demo"
	Keep   bool      // keep the clusters at the end, until the context ends
	Color  bool      // Out is a terminal that shows colors
	// Kube returns the folder with etcd, kube-apiserver and kube-controller-manager. It may take
	// minutes to build them, so the demo calls it only when it needs the programs.
	Kube func(context.Context) (string, error)
}

const (
	readyTimeout    = 90 * time.Second // from `isthmus peer` to both sides ready
	failoverTimeout = 90 * time.Second // from the exit of the active gateway to the first ping through the other
	downloadSize    = 4 << 30
	downloadTime    = 3 * time.Second
	minDownload     = 16 << 20 // octets; less means that something blocks the traffic
	logLines        = 15       // of each component's log after a failure
)

// ErrInterrupted is the error of a Run whose context was canceled.
var ErrInterrupted = errors.New("interrupted")

// A show is the part of the demo with API servers.
type show struct {
	*narrator
	fleet *fleet.Fleet
	a     *fleet.Cluster
	b     *fleet.Cluster
	c     *fleet.Cluster
}

// Run runs the demo and always removes its labs. The error names the failed step and the reason.
// Before Run returns an error, it writes the last lines of the components' logs to o.Out.
//
// The demo starts with two clusters that are joined by files. They need no API server, so the
// reader sees them while the API servers are built.
func Run(ctx context.Context, o Options) error {
	if o.Name == "" {
		o.Name = "demo"
	}
	n := &narrator{Options: o, ctx: ctx}
	start := time.Now()
	if err := runFiles(n); err != nil {
		return err
	}
	took := time.Since(start)
	kube, err := o.Kube(ctx)
	if ctx.Err() != nil {
		return ErrInterrupted
	}
	if err != nil {
		return err
	}
	return runFleet(n, kube, took)
}

// runFleet runs the part of the demo with API servers. kube is the folder of their programs.
// elapsed is the time that the demo has taken so far.
func runFleet(n *narrator, kube string, elapsed time.Duration) (err error) {
	s := &show{narrator: n}
	start := time.Now().Add(-elapsed)
	defer func() {
		if err != nil && s.ctx.Err() == nil {
			s.explain()
		}
		if tidy := s.leave(err == nil, start); tidy != nil {
			err = errors.Join(err, tidy)
		}
	}()
	return s.play([]step{
		{"Three clusters, one PodCIDR", func() error { return s.build(kube) }},
		{"Peer a and b with one command", s.peer},
		{"Peer the other pairs, and show the agreed networks", s.peerOthers},
		{"Pod to pod, on nodes without a gateway, in all six directions", s.podToPod},
		{"A node reaches a remote pod", s.nodeToPod},
		{"A server outside the cluster, mapped for a peer", s.mapEndpoint},
		{"A large download", s.download},
		{"Forbidden packets are dropped and counted", s.sendUnmapped},
		{"Status", s.status},
		{"The gateway of a is killed, and the standby takes over", s.failover},
		{"Un-peer a and c", s.unpeer},
	})
}

func (s *show) build(kube string) error {
	begin := time.Now()
	s.printf(`Each has three nodes, an etcd, a kube-apiserver and a kube-controller-manager of its own; manager, gateways and
route agents run as processes, each with the rights of its ServiceAccount and no others.
`)
	clusters := lab.Clusters(3)
	for i := range clusters {
		clusters[i].Nodes, clusters[i].GatewayPods = 3, 2
	}
	f, err := fleet.Up(s.ctx, fleet.Options{
		Votes: true, Spec: lab.Spec{Name: s.Name, Clusters: clusters}, Binary: s.Binary, Kube: kube, Progress: indent(s.Out),
	})
	if err != nil {
		return err
	}
	s.fleet, s.a, s.b, s.c = f, f.Clusters[0], f.Clusters[1], f.Clusters[2]
	if err := f.Lab.ServeHosts(); err != nil {
		return err
	}
	s.ok("ready after %v. All three have the PodCIDR %v, and even the same addresses in use:\n", since(begin), s.a.PodCIDR)
	s.picture()
	return nil
}

// picture draws the clusters side by side.
func (s *show) picture() {
	row := func(cell func(*fleet.Cluster) string) {
		var line strings.Builder
		for _, c := range s.fleet.Clusters {
			fmt.Fprintf(&line, "  %-28s", cell(c))
		}
		s.printf("%s", strings.TrimRight(line.String(), " "))
	}
	host := func(mark string, h *lab.Host, addr netip.Addr) string {
		return fmt.Sprintf("%s %-10s %v", mark, h, addr)
	}
	row(func(c *fleet.Cluster) string { return "cluster " + c.Name })
	row(func(c *fleet.Cluster) string { return host("|-", c.Control.Host, c.Control.Addr) })
	for i, n := range s.a.Nodes {
		row(func(c *fleet.Cluster) string { return host("|-", c.Nodes[i].Host, c.Nodes[i].Addr) })
		for j, p := range s.a.Pods {
			if p.Node == n {
				row(func(c *fleet.Cluster) string { return host("|  |-", c.Pods[j].Host, c.Pods[j].Addr) })
			}
		}
	}
	row(func(c *fleet.Cluster) string { return host("'-", c.OnPrem.Host, c.OnPrem.Addr) })
	s.printf("  ======= underlay: only nodes and control planes can reach one another, as on the Internet =======")
}

// peer peers a and b. It measures the time until a pod of a, on a node without the active
// gateway, gets a reply from a pod of b.
func (s *show) peer() error {
	from, err := s.a.RemotePod(s.ctx)
	if err != nil {
		return err
	}
	to, err := s.b.RemotePod(s.ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.ctx, readyTimeout)
	defer cancel()
	type answer struct {
		after time.Duration
		err   error
	}
	first := make(chan answer, 1)
	begin := time.Now()
	go func() {
		err := s.firstPing(ctx, s.a, from, s.b, to.Addr)
		first <- answer{time.Since(begin), err}
	}()
	err = s.isthmus("peer", "--context", "a", "--remote-context", "b")
	if err != nil {
		cancel()
		<-first
		return err
	}
	got := <-first
	if got.err != nil {
		return got.err
	}
	s.ok("%s -> %s: first ping answered %.2f s after `isthmus peer` was started", from, to, got.after.Seconds())
	return nil
}

// firstPing waits until the first cluster has allocated a network for the pods of the second. Then
// it waits until a ping to addr in that network is answered.
func (s *show) firstPing(ctx context.Context, local *fleet.Cluster, from *lab.Pod, peer *fleet.Cluster, addr netip.Addr) error {
	last := errors.New("the clusters have not agreed on networks")
	wait := 50 * time.Millisecond
	for ctx.Err() == nil {
		seen, err := local.Seen(ctx, peer, addr)
		if err == nil {
			if _, err = from.PingWith(ctx, seen, lab.PingOptions{Wait: wait}); err == nil {
				return nil
			}
			wait = longer(wait)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
	return fmt.Errorf("no ping from %s was answered: %w", from, last)
}

// longer returns the next, longer timeout for a reply, because a busy machine may need more time.
func longer(wait time.Duration) time.Duration { return min(wait+wait/20, 2*time.Second) }

// peerOthers peers the other two pairs of clusters and shows the objects.
func (s *show) peerOthers() error {
	for _, pair := range [][2]*fleet.Cluster{{s.a, s.c}, {s.b, s.c}} {
		if err := s.isthmus("peer", "--context", pair[0].Name, "--remote-context", pair[1].Name); err != nil {
			return err
		}
	}
	s.printf("\nThe networks by which each cluster reaches the others:\n")
	for _, local := range s.fleet.Clusters {
		for _, peer := range s.fleet.Clusters {
			if local == peer {
				continue
			}
			if err := local.WaitReady(s.ctx, peer, readyTimeout); err != nil {
				return err
			}
			p, err := local.Peering(s.ctx, peer)
			if err != nil {
				return err
			}
			s.printf("  %s reaches the pods of %s at %-14s and its mapped endpoints at %s", local, peer, p.Status.Remote.PodCIDRSeen, p.Status.Remote.ExternalCIDRSeen)
		}
	}
	for _, list := range []struct{ command, path string }{
		{"get peerings", "/apis/isthmus.net/v1alpha1/peerings"},
		{"get networkconfigs -A", "/apis/net.liqo.io/v1alpha1/networkconfigs"},
		{"get tunnelendpoints -A", "/apis/net.liqo.io/v1alpha1/tunnelendpoints"},
	} {
		s.printf("\n  $ kubectl --context a %s", list.command)
		if err := s.a.Table(s.ctx, indent(s.Out), list.path, false); err != nil {
			return err
		}
	}
	return nil
}

// podToPod makes a pod of each cluster talk to a pod of each other cluster. Both pods are on
// nodes without an active gateway, so the packets cross VXLAN, the tunnel and VXLAN again.
func (s *show) podToPod() error {
	for _, local := range s.fleet.Clusters {
		from, err := local.RemotePod(s.ctx)
		if err != nil {
			return err
		}
		for _, peer := range s.fleet.Clusters {
			if local == peer {
				continue
			}
			to, err := peer.RemotePod(s.ctx)
			if err != nil {
				return err
			}
			seen, err := local.Seen(s.ctx, peer, to.Addr)
			if err != nil {
				return err
			}
			caller, err := peer.Seen(s.ctx, local, from.Addr)
			if err != nil {
				return err
			}
			if err := s.talk(from.Host, to.Host, seen, caller); err != nil {
				return err
			}
		}
	}
	s.printf("The receiver sees the sender at an address that the receiver's cluster chose, and can connect back to it.")
	return nil
}

// nodeToPod shows the NAPT of sources that are not pods.
func (s *show) nodeToPod() error {
	to, err := s.b.RemotePod(s.ctx)
	if err != nil {
		return err
	}
	seen, err := s.a.Seen(s.ctx, s.b, to.Addr)
	if err != nil {
		return err
	}
	p, err := s.b.Peering(s.ctx, s.a)
	if err != nil {
		return err
	}
	network, err := netip.ParsePrefix(p.Status.Remote.PodCIDRSeen)
	if err != nil {
		return err
	}
	for _, n := range s.a.Nodes {
		if err := s.talk(n.Host, to.Host, seen, network.Addr()); err != nil {
			return err
		}
	}
	s.printf("The nodes of a have no addresses of their own at b: they share the first address of a's network there.")
	return nil
}

// download transfers as much data as possible in a few seconds.
func (s *show) download() error {
	from, to := s.a.Pods[0], s.c.Pods[0]
	seen, err := s.a.Seen(s.ctx, s.c, to.Addr)
	if err != nil {
		return err
	}
	rate, err := from.Download(s.ctx, seen, downloadSize, downloadTime)
	if err != nil {
		return err
	}
	if rate.Bytes < minDownload {
		return fmt.Errorf("only %d octets from %s in %v", rate.Bytes, to, rate.Duration)
	}
	s.ok("%s <- %s  one TCP stream: %.0f MB in %.1f s, %.2f Gbit/s, all on this machine",
		from, to, float64(rate.Bytes)/1e6, rate.Duration.Seconds(), rate.BitsPerSecond()/1e9)
	return nil
}

func (s *show) status() error {
	if err := s.isthmus("status", "--context", "b"); err != nil {
		return err
	}
	return s.onGateway(s.b, "status", "--gateway")
}

// failover kills the active gateway of cluster a, while a TCP connection is open.
func (s *show) failover() error {
	active, err := s.a.ActiveGateway(s.ctx)
	if err != nil {
		return err
	}
	from, to := s.a.Pods[0], s.b.Pods[0]
	seen, err := s.a.Seen(s.ctx, s.b, to.Addr)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.ctx, failoverTimeout)
	defer cancel()
	pings := s.count(ctx, from, seen)
	if err := pings.waitUntil(ctx, func() bool { return pings.answered >= 10 }); err != nil {
		return err
	}
	echo, end, err := connect(ctx, from.Host, to.Host, seen)
	if err != nil {
		return err
	}
	defer end()
	if err := echo("before"); err != nil {
		return err
	}
	s.printf("  %s pings %s twenty times a second, and has a TCP connection to it; kill -9 of the gateway on %s", from, to, s.a.Nodes[active])
	if err := s.a.Kill(fleet.Gateway(active)); err != nil {
		return err
	}
	now := active
	for now == active {
		if err := pings.waitUntil(ctx, func() bool { return pings.inRow >= 10 }); err != nil {
			return fmt.Errorf("no answer through the standby: %w", err)
		}
		if now, err = s.a.ActiveGateway(ctx); err != nil {
			return err
		}
	}
	if err := echo("after"); err != nil {
		return fmt.Errorf("the TCP connection did not survive the takeover: %w", err)
	}
	sent, lost, pause := pings.stop()
	s.ok("the TCP connection continues through the standby")
	s.ok("%s answers again, through %s: %d of %d pings lost, the longest pause was %.1f s", to, s.a.Nodes[now], lost, sent, pause.Seconds())
	return s.a.Start(s.ctx, fleet.Gateway(active))
}

// unpeer removes one peering. It checks that the pods of the two clusters no longer reach each
// other, and that the other peerings still work.
func (s *show) unpeer() error {
	to := s.c.Pods[0]
	seen, err := s.a.Seen(s.ctx, s.c, to.Addr)
	if err != nil {
		return err
	}
	if err := s.isthmus("unpeer", "--context", "a", "--remote-context", "c"); err != nil {
		return err
	}
	if _, err := s.a.Pods[0].PingWith(s.ctx, seen, lab.PingOptions{Wait: 300 * time.Millisecond}); err == nil {
		return fmt.Errorf("%v still answers", seen)
	}
	s.ok("%s -> %s: no longer answers", s.a.Pods[0], to)
	if err := s.talkTo(s.a, s.b); err != nil {
		return err
	}
	return s.isthmus("status", "--context", "a")
}

func (s *show) talkTo(local, peer *fleet.Cluster) error {
	seen, err := local.Seen(s.ctx, peer, peer.Pods[0].Addr)
	if err != nil {
		return err
	}
	caller, err := peer.Seen(s.ctx, local, local.Pods[0].Addr)
	if err != nil {
		return err
	}
	return s.talk(local.Pods[0].Host, peer.Pods[0].Host, seen, caller)
}

// isthmus runs the program as an administrator would, and shows its output.
func (s *show) isthmus(args ...string) error {
	s.printf("  $ isthmus %s", strings.Join(args, " "))
	return s.fleet.IsthmusTo(s.ctx, indent(s.Out), args...)
}

// onGateway runs the isthmus program on the host of a cluster's active gateway.
func (s *show) onGateway(c *fleet.Cluster, args ...string) error {
	active, err := c.ActiveGateway(s.ctx)
	if err != nil {
		return err
	}
	s.printf("  %s$ isthmus %s", c.Nodes[active], strings.Join(args, " "))
	out, err := c.GatewayHost(active).Command(s.ctx, s.Binary, args...).Output()
	fmt.Fprint(indent(s.Out), string(out))
	return err
}

// explain shows the components' logs after a failure.
func (s *show) explain() {
	if s.fleet == nil {
		return
	}
	for _, c := range s.fleet.Clusters {
		for _, name := range c.Components() {
			s.heading(fmt.Sprintf("Log of %s of cluster %s, its end", name, c))
			s.printf("%s", c.Tail(name, logLines))
		}
	}
}

// leave removes the lab. With the option Keep, it first waits until the context ends.
func (s *show) leave(passed bool, start time.Time) error {
	if s.fleet == nil {
		return nil
	}
	took := time.Since(start)
	if s.Keep && s.ctx.Err() == nil {
		s.heading("The clusters stand until Ctrl-C")
		s.printf("  ip netns exec %s env KUBECONFIG=%s %s status --context a", s.fleet.Lab.Underlay.Netns(), s.fleet.Kubeconfig, s.Binary)
		if seen, err := s.a.Seen(s.ctx, s.b, s.b.Pods[0].Addr); err == nil { // the clusters are peered, unless a step failed before
			s.printf("  ip netns exec %s ping %s", s.a.Pods[0].Netns(), seen)
		}
		<-s.ctx.Done()
	}
	s.heading("Tidy up")
	if err := s.fleet.Down(); err != nil {
		return fmt.Errorf("tidy up: %w", err)
	}
	s.ok("%v", s.fleet.Sniffer.Report())
	s.ok("all processes ended, %d namespaces removed: nothing is left", len(s.fleet.Lab.Hosts()))
	if passed {
		s.printf("\nEverything worked, in %.1f s.", took.Seconds())
	}
	return nil
}
