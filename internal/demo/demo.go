// Package demo shows what Isthmus does, with real packets, in a lab of three clusters that all use the same PodCIDR. Each
// step checks what it shows: a demo that comes to its end has proved it.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/natengine"
)

// Options of a demo.
type Options struct {
	Out    io.Writer // what the reader follows
	Binary string    // the isthmus program; absolute path
	Name   string    // of the lab; default "demo"
	Keep   bool      // leave the lab and its gateways standing, as a persistent lab, without its web servers
	Color  bool      // the reader's terminal shows it
}

const (
	connectTimeout  = 20 * time.Second // from the start of the gateways to all peers connected
	downloadSize    = 4 << 30
	downloadTime    = 3 * time.Second
	downloadAtLeast = 16 << 20 // octets; below that something holds the traffic up
	logLines        = 20       // of each gateway's log after a failure
)

// Metrics of the gateway that the demo reads.
const (
	metricConnected = "isthmus_peer_up"
	metricDrops     = "isthmus_drops_total"
)

// metricsToShow are those that are printed where they are not 0.
var metricsToShow = []string{
	metricConnected, "isthmus_peer_receive_bytes_total", "isthmus_peer_transmit_bytes_total", "isthmus_peer_probe_loss_ratio",
	"isthmus_nat_sessions", "isthmus_nat_sessions_limit", metricDrops,
}

// ErrInterrupted is the error of a Run whose context ended first.
var ErrInterrupted = errors.New("interrupted")

// A show is one run of the demo.
type show struct {
	Options
	ctx context.Context
	lab *lab.Lab
	a   *lab.Cluster
	b   *lab.Cluster
	c   *lab.Cluster
}

// Run runs the demo and removes its lab, whatever happens. The error says which step failed and how; the ends of the
// gateways' logs have then been written to o.Out.
func Run(ctx context.Context, o Options) (err error) {
	if o.Name == "" {
		o.Name = "demo"
	}
	s := &show{Options: o, ctx: ctx}
	start := time.Now()
	defer func() {
		if err != nil && ctx.Err() == nil {
			s.explain()
		}
		if tidy := s.leave(err == nil, start); tidy != nil {
			err = errors.Join(err, tidy)
		}
	}()
	steps := []struct {
		title string
		do    func() error
	}{
		{"Three clusters, one PodCIDR", s.build},
		{"Join each pair", s.join},
		{"Pod to pod: ping and HTTP, all six directions", s.podToPod},
		{"A node reaches a remote pod", s.nodeToPod},
		{"A server outside the cluster, mapped for the peers", s.mapped},
		{"A large download", s.download},
		{"What the gateways do to a packet", s.trace},
		{"What is not allowed is refused, and counted", s.refused},
		{"Status of a gateway", s.status},
		{"Some of its metrics", s.metrics},
	}
	for i, step := range steps {
		s.heading(fmt.Sprintf("%d. %s", i+1, step.title))
		if err := step.do(); err != nil {
			if ctx.Err() != nil {
				return ErrInterrupted
			}
			return fmt.Errorf("step %d, %q: %w", i+1, step.title, err)
		}
	}
	return nil
}

// build makes the lab.
func (s *show) build() error {
	begin := time.Now()
	l, err := lab.Up(s.ctx, lab.Spec{Name: s.Name, Clusters: lab.Clusters(3)})
	if err != nil {
		return err
	}
	s.lab, s.a, s.b, s.c = l, l.Clusters[0], l.Clusters[1], l.Clusters[2]
	if err := l.ServeHosts(); err != nil {
		return err
	}
	s.say(`Made of network namespaces on this machine, %d of them, in %v. All three clusters have
the PodCIDR %v, and even the same addresses in use:
`, len(l.Hosts()), since(begin), s.a.PodCIDR)
	s.picture()
	return nil
}

// picture draws the clusters side by side.
func (s *show) picture() {
	row := func(cell func(*lab.Cluster) string) {
		var line strings.Builder
		for _, c := range s.lab.Clusters {
			fmt.Fprintf(&line, "  %-26s", cell(c))
		}
		s.say("%s", strings.TrimRight(line.String(), " "))
	}
	host := func(mark string, h *lab.Host, addr netip.Addr) string {
		return fmt.Sprintf("%s %-8s %v", mark, h, addr)
	}
	row(func(c *lab.Cluster) string { return "cluster " + c.Name })
	for i := range s.a.Pods {
		row(func(c *lab.Cluster) string { return host("|-", c.Pods[i].Host, c.Pods[i].Addr) })
	}
	row(func(c *lab.Cluster) string { return host("|-", c.OnPrem.Host, c.OnPrem.Addr) })
	row(func(*lab.Cluster) string { return "|           (not a pod)" })
	row(func(c *lab.Cluster) string { return host("'-", c.Gateway().Host, c.Gateway().Addr) })
	row(func(*lab.Cluster) string { return "      |" })
	s.say("  ======= underlay: only the nodes can reach one another, as on the Internet =======\n")
}

// join writes the configuration, starts the gateways and waits until all are connected.
func (s *show) join() error {
	begin := time.Now()
	if err := s.lab.JoinAll(); err != nil {
		return err
	}
	for _, c := range s.lab.Clusters {
		if err := s.lab.Map(c, c.OnPrem.Addr); err != nil {
			return err
		}
	}
	if err := s.lab.StartGateways(s.ctx, s.Binary); err != nil {
		return err
	}
	s.say(`Each cluster gives its peers networks that are free in it, as Liqo's IPAM does. So a pod has
one address at home and another for each peer:
`)
	if err := s.lab.Describe(indent(s.Out)); err != nil {
		return err
	}
	s.say(`
A gateway per cluster reads that from YAML files (those of cluster a are in
%s) and connects to the others over WireGuard.`, s.a.ConfigDir)
	ctx, cancel := context.WithTimeout(s.ctx, connectTimeout)
	defer cancel()
	for _, c := range s.lab.Clusters {
		if err := s.connected(ctx, c); err != nil {
			return err
		}
	}
	s.ok("all six sides connected after %v", since(begin))
	return nil
}

// connected waits until the gateway of c has heard from all its peers.
func (s *show) connected(ctx context.Context, c *lab.Cluster) error {
	for {
		peers, err := s.lab.Metric(ctx, c, metricConnected)
		if err == nil && int(peers) == len(s.lab.Clusters)-1 {
			return nil
		}
		select {
		case <-ctx.Done():
			if err == nil {
				err = fmt.Errorf("%v of %d peers after %v", peers, len(s.lab.Clusters)-1, connectTimeout)
			}
			return fmt.Errorf("the gateway of cluster %s is not connected: %w", c, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// podToPod has the first pod of each cluster talk to the second one of each other.
func (s *show) podToPod() error {
	for _, at := range s.lab.Clusters {
		for _, of := range s.lab.Clusters {
			if at == of {
				continue
			}
			from, to := at.Pods[0], of.Pods[1]
			caller, err := s.lab.Seen(of, at, from.Addr)
			if err != nil {
				return err
			}
			if err := s.talk(from.Host, at, to.Host, of, to.Addr, caller); err != nil {
				return err
			}
		}
	}
	s.say("The one who answers sees the caller under an address of its own cluster's choice, and can call back.")
	return nil
}

// nodeToPod shows the NAPT of sources that are not pods.
func (s *show) nodeToPod() error {
	view, _ := s.lab.View(s.b, s.a)
	err := s.talk(s.a.Gateway().Host, s.a, s.b.Pods[0].Host, s.b, s.b.Pods[0].Addr, view.Pod.Addr())
	if err != nil {
		return err
	}
	s.say("A node has no address that b could know: it shares the network address of a's range at b.")
	return nil
}

// mapped shows an endpoint of a NatMapping.
func (s *show) mapped() error {
	server := s.b.OnPrem
	s.say("%s, %v, is no pod: a NatMapping of cluster b gives it an address of b's ExternalCIDR.", server, server.Addr)
	for _, at := range []*lab.Cluster{s.a, s.c} {
		caller, err := s.lab.Seen(s.b, at, at.Pods[0].Addr)
		if err != nil {
			return err
		}
		if err := s.talk(at.Pods[0].Host, at, server.Host, s.b, server.Addr, caller); err != nil {
			return err
		}
	}
	return nil
}

// talk pings and fetches from one host to another one, at addr in its own cluster, and checks that the answer comes from
// it and names the caller's address as expected.
func (s *show) talk(from *lab.Host, at *lab.Cluster, to *lab.Host, of *lab.Cluster, addr, caller netip.Addr) error {
	seen, err := s.lab.Seen(at, of, addr)
	if err != nil {
		return err
	}
	rtt, err := from.Ping(s.ctx, seen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	got, err := from.Get(ctx, fmt.Sprintf("http://%v/", seen))
	if err != nil {
		return err
	}
	got = strings.TrimSpace(got)
	if want := fmt.Sprintf("%s sees %v", to, caller); got != want {
		return fmt.Errorf("http://%v from %s: %q; want %q", seen, from, got, want)
	}
	s.ok("%-7s -> %-8s at %-12v ping %5.2f ms   HTTP: %q", from, to, seen, float64(rtt.Microseconds())/1000, got)
	return nil
}

// download moves as much as goes in a few seconds.
func (s *show) download() error {
	from, to := s.a.Pods[0], s.c.Pods[0]
	seen, err := s.lab.Seen(s.a, s.c, to.Addr)
	if err != nil {
		return err
	}
	rate, err := from.Download(s.ctx, seen, downloadSize, downloadTime)
	if err != nil {
		return err
	}
	if rate.Bytes < downloadAtLeast {
		return fmt.Errorf("only %d octets from %s in %v", rate.Bytes, to, rate.Duration)
	}
	s.ok("%s <- %s  one TCP stream: %.0f MB in %.1f s, %.2f Gbit/s, all on this machine",
		from, to, float64(rate.Bytes)/1e6, rate.Duration.Seconds(), rate.BitsPerSecond()/1e9)
	return nil
}

// trace asks both gateways what happens to the same packet.
func (s *show) trace() error {
	src, dst := s.a.Pods[0].Addr, s.b.Pods[1].Addr
	seenDst, err := s.lab.Seen(s.a, s.b, dst)
	if err != nil {
		return err
	}
	seenSrc, err := s.lab.Seen(s.b, s.a, src)
	if err != nil {
		return err
	}
	s.say("a-pod1 sends to b-pod2. Cluster a's gateway rewrites the source, on the way into the tunnel:\n")
	if err := s.run(s.a, "trace", "--direction", "out", src.String()+":40000", seenDst.String()+":80", "tcp"); err != nil {
		return err
	}
	s.say("\nCluster b's gateway rewrites the destination, on the way out of it:\n")
	return s.run(s.b, "trace", "--direction", "in", seenSrc.String()+":40000", seenDst.String()+":80", "tcp")
}

// status prints the table of peers.
func (s *show) status() error { return s.run(s.b, "status") }

// run runs the isthmus program next to a cluster's gateway and shows what it prints.
func (s *show) run(c *lab.Cluster, args ...string) error {
	s.say("  %s$ isthmus %s", c.Gateway(), strings.Join(args, " "))
	out, err := c.Gateway().Command(s.ctx, s.Binary, args...).Output()
	fmt.Fprint(indent(s.Out), string(out))
	return err
}

// refused sends where nothing is mapped and looks at the counter of the gateway that refuses it.
func (s *show) refused() error {
	view, ok := s.lab.View(s.a, s.b)
	if !ok {
		return errors.New("clusters a and b are not joined")
	}
	nobody := view.External.Addr()
	for range 99 {
		nobody = nobody.Next()
	}
	for _, attempt := range []struct {
		dst    netip.Addr
		why    string
		reason natengine.Drop
	}{
		{nobody, "an address of b's ExternalCIDR that is mapped to nothing", natengine.DropNoMapping},
		{view.Pod.Addr(), "the address that nodes share, without a flow of theirs", natengine.DropNoFlow},
	} {
		labels := []string{fmt.Sprintf("direction=%q", natengine.Inbound), fmt.Sprintf("peer=%q", s.a.ID), fmt.Sprintf("reason=%q", attempt.reason)}
		before, err := s.lab.Metric(s.ctx, s.b, metricDrops, labels...)
		if err != nil {
			return err
		}
		_, err = s.a.Pods[0].PingWith(s.ctx, attempt.dst, lab.PingOptions{Wait: 300 * time.Millisecond})
		if err == nil {
			return fmt.Errorf("%v, %s, answers", attempt.dst, attempt.why)
		}
		if err := s.ctx.Err(); err != nil {
			return err
		}
		after, err := s.lab.Metric(s.ctx, s.b, metricDrops, labels...)
		if err != nil {
			return err
		}
		if after <= before {
			return fmt.Errorf("b's gateway did not count the packet to %v: %s{%s} stays %v", attempt.dst, metricDrops, strings.Join(labels, ","), before)
		}
		s.ok("a-pod1 -> %-12v no answer: %s", attempt.dst, attempt.why)
		s.say("     counted at b, for peer a: %s{%s,%s} %v -> %v", metricDrops, labels[0], labels[2], before, after)
	}
	return nil
}

// metrics shows lines of /metrics that people look at first.
func (s *show) metrics() error {
	text, err := s.lab.Metrics(s.ctx, s.b)
	if err != nil {
		return err
	}
	s.say("  %s$ curl -s http://127.0.0.1:5872/metrics", s.b.Gateway())
	shown := 0
	out := indent(s.Out)
	for line := range strings.Lines(text) {
		for _, name := range metricsToShow {
			if (strings.HasPrefix(line, name+"{") || strings.HasPrefix(line, name+" ")) && !strings.HasSuffix(line, " 0\n") {
				fmt.Fprint(out, line)
				shown++
			}
		}
	}
	if shown == 0 {
		return errors.New("none of the metrics is there")
	}
	return nil
}

// explain shows what the gateways have to say after a failure.
func (s *show) explain() {
	if s.lab == nil {
		return
	}
	for _, c := range s.lab.Clusters {
		s.heading(fmt.Sprintf("Log of the gateway of cluster %s, its end", c))
		s.say("%s", s.lab.GatewayTail(c, logLines))
	}
}

// leave removes the lab, or leaves it standing where that was asked for.
func (s *show) leave(passed bool, start time.Time) error {
	if s.lab == nil {
		return nil
	}
	if s.Keep {
		return errors.Join(s.lab.StopServing(), s.lab.Persist())
	}
	s.heading("Tidy up")
	err := errors.Join(s.lab.StopGateways(), s.lab.Down())
	if err != nil {
		return fmt.Errorf("tidy up: %w", err)
	}
	s.ok("gateways stopped, %d namespaces removed: nothing is left", len(s.lab.Hosts()))
	if passed {
		s.say("\nEverything worked, in %.1f s.", time.Since(start).Seconds())
	}
	return nil
}

func (s *show) heading(text string) {
	if s.Color {
		text = "\x1b[1m" + text + "\x1b[0m"
	}
	fmt.Fprintf(s.Out, "\n%s\n", text)
}

func (s *show) say(format string, args ...any) { fmt.Fprintf(s.Out, format+"\n", args...) }

func (s *show) ok(format string, args ...any) {
	mark := "ok"
	if s.Color {
		mark = "\x1b[32mok\x1b[0m"
	}
	fmt.Fprintf(s.Out, "  "+mark+" "+format+"\n", args...)
}

func since(t time.Time) time.Duration { return time.Since(t).Round(10 * time.Millisecond) }

// indent returns a writer that begins each line with two blanks.
func indent(w io.Writer) io.Writer { return &indenter{w: w} }

type indenter struct {
	w      io.Writer
	inLine bool
}

func (i *indenter) Write(p []byte) (int, error) {
	var out []byte
	for _, b := range p {
		if !i.inLine && b != '\n' {
			out = append(out, "  "...)
		}
		out = append(out, b)
		i.inLine = b != '\n'
	}
	if _, err := i.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}
