package cni

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var must, eventually = expect.NoError, expect.Eventually

// internet is a host outside of all clusters.
var internet = netip.MustParseAddr("198.51.100.1")

// A world has two clusters with the shapes of two plans.
type world struct {
	*fleet.Fleet
	plans  []plan
	nodes  int // of each cluster
	sides  []*fleet.Cluster
	before []side

	listeners map[*lab.Host]*listener
	outside   *listener // the listener on the host internet
}

// A side has the state of a cluster's nodes, and the result of the traffic inside the cluster.
type side struct {
	states  []string
	traffic []string
}

// up makes a world. It records the state and the traffic of the clusters before Isthmus runs.
func up(t *testing.T, plans [2]plan, nodes int) *world {
	t.Helper()
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	w := &world{plans: plans[:], nodes: nodes, listeners: map[*lab.Host]*listener{}}
	begin := time.Now()
	f, err := fleet.Up(t.Context(), fleet.Options{Spec: w.spec("cni"), Binary: binary, Kube: kube, Prepare: w.prepare, Network: w.network, IPAMAllow: "172.30.0.0/16"})
	if err != nil {
		w.close()
		t.Fatal(err)
	}
	w.Fleet = f
	t.Cleanup(func() {
		w.close()
		if t.Failed() {
			for _, c := range f.Clusters {
				for _, name := range c.Components() {
					t.Logf("the end of the log of %s of cluster %s:\n%s", name, c, c.Tail(name, 6))
				}
			}
		}
		if err := f.Down(); err != nil {
			t.Error(err)
		}
		t.Log(f.Sniffer.Report())
	})
	t.Logf("%v and %v are up after %.1f s", plans[0], plans[1], time.Since(begin).Seconds())
	w.sides = f.Clusters
	if out, err := f.Isthmus(t.Context(), "peer", "--context", "a", "--remote-context", "b"); err != nil {
		t.Fatalf("isthmus peer: %v\n%s", err, out)
	}
	for i, c := range w.sides {
		must(t, c.WaitReady(t.Context(), w.sides[1-i], patience))
		w.activateFirst(t, c)
	}
	return w
}

// spec returns the lab for the plans.
func (w *world) spec(word string) lab.Spec {
	spec := lab.Spec{Name: lab.UniqueName(word), RPFilter: lab.RPFilterOff}
	for i, p := range w.plans {
		network := p.podCIDR
		if p.shape.vpc { // the upper half of the nodes' subnet
			network = fmt.Sprintf("172.30.%d.128/25", i+1)
		}
		c := lab.ClusterSpec{PodCIDR: netip.MustParsePrefix(network), Nodes: w.nodes, PodsPerNode: 2, Bare: true}
		if !p.host {
			c.GatewayPods = 2
		}
		spec.Clusters = append(spec.Clusters, c)
	}
	return spec
}

// activateFirst makes the gateway of node 1 active, because the server outside of the cluster is
// behind that node.
func (w *world) activateFirst(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	if at, err := c.ActiveGateway(t.Context()); err != nil || at == 0 {
		must(t, err)
		return
	}
	must(t, c.Stop(fleet.Gateway(1)))
	eventually(t, "the gateway of node 1 is active", func() error {
		at, err := c.ActiveGateway(t.Context())
		if err == nil && at != 0 {
			err = fmt.Errorf("the gateway of node %d is active", at+1)
		}
		return err
	})
	must(t, c.Start(t.Context(), fleet.Gateway(1)))
}

// prepare sets up the nodes according to the shapes, and starts listeners on all hosts.
func (w *world) prepare(ctx context.Context, l *lab.Lab) error {
	if err := batch(ctx, l.Underlay, "ip", []string{fmt.Sprintf("addr add %v/32 dev lo", internet)}); err != nil {
		return err
	}
	if err := w.listen(l.Underlay, internet); err != nil {
		return err
	}
	w.outside = w.listeners[l.Underlay]
	w.before = make([]side, len(l.Clusters))
	for i, c := range l.Clusters {
		w.plans[i].cluster = c.Name
		if err := w.plans[i].setUp(ctx, l, c); err != nil {
			return err
		}
		for _, p := range c.Pods {
			if err := w.listen(p.Host, netip.IPv4Unspecified()); err != nil {
				return err
			}
		}
		for _, n := range c.Nodes {
			if err := w.listen(n.Host, n.Addr); err != nil {
				return err
			}
		}
		if err := w.listen(c.OnPrem.Host, netip.IPv4Unspecified()); err != nil {
			return err
		}
	}
	return nil
}

// network starts the real programs of a cluster's CNI, and records the cluster's state and traffic.
func (w *world) network(ctx context.Context, c *fleet.Cluster) error {
	i := slices.IndexFunc(w.plans, func(p plan) bool { return p.cluster == c.Name })
	if run := w.plans[i].shape.run; run != nil {
		if err := run(ctx, c, w.plans[i].filter); err != nil {
			return err
		}
	}
	return w.recordBefore(ctx, i, c.Cluster)
}

// recordBefore records the state and the traffic of a cluster before Isthmus runs.
func (w *world) recordBefore(ctx context.Context, i int, c *lab.Cluster) (err error) {
	if w.before[i], err = w.observe(ctx, c); err != nil {
		return err
	}
	for _, line := range w.before[i].traffic {
		if strings.Contains(line, noAnswer) {
			return fmt.Errorf("%v does not work without Isthmus:\n%s", w.plans[i], strings.Join(w.before[i].traffic, "\n"))
		}
	}
	return nil
}

func (w *world) listen(h *lab.Host, at netip.Addr) error {
	l, err := listen(h, at)
	if err != nil {
		return fmt.Errorf("%s: %w", h, err)
	}
	w.listeners[h] = l
	return nil
}

func (w *world) close() {
	for _, l := range w.listeners {
		l.close()
	}
}

// observe returns the present state of a cluster's nodes, and the traffic inside the cluster.
func (w *world) observe(ctx context.Context, c *lab.Cluster) (s side, err error) {
	s.traffic = w.traffic(ctx, c)
	for _, n := range c.Nodes {
		state, err := stateOf(ctx, n)
		if err != nil {
			return s, err
		}
		s.states = append(s.states, state)
	}
	return s, nil
}

// traffic runs the exchanges inside a cluster, and returns a line with the seen source for each.
func (w *world) traffic(ctx context.Context, c *lab.Cluster) []string {
	n1, n2 := c.Nodes[0], c.Nodes[1]
	first, second, third := c.Pods[0], c.Pods[1], c.Pods[2] // third is on the other node
	behind := c.Pods[len(c.Pods)-1]
	out := w.outside
	type way struct {
		name string
		from *lab.Host
		to   netip.Addr
		at   *listener
	}
	ways := []way{
		{"pod to pod of its node", first.Host, second.Addr, w.listeners[second.Host]},
		{"pod to pod of another node", first.Host, third.Addr, w.listeners[third.Host]},
		{"pod of another node to pod", third.Host, first.Addr, w.listeners[first.Host]},
		{"last pod to pod of another node", behind.Host, first.Addr, w.listeners[first.Host]},
		{"pod to its node", first.Host, n1.Addr, w.listeners[n1.Host]},
		{"pod to another node", first.Host, n2.Addr, w.listeners[n2.Host]},
		{"node to its pod", n1.Host, first.Addr, w.listeners[first.Host]},
		{"node to pod of another node", n1.Host, third.Addr, w.listeners[third.Host]},
		{"pod to Service", first.Host, ownService, w.listeners[behind.Host]},
		{"node to Service", n1.Host, ownService, w.listeners[behind.Host]},
		{"pod to Internet", first.Host, internet, out},
		{"last pod to Internet", behind.Host, internet, out},
		{"node to Internet", n1.Host, internet, out},
	}
	lines := make([]string, len(ways)*len(talks))
	var group sync.WaitGroup
	for i, way := range ways {
		for j, k := range talks {
			if way.to == ownService && k.network == "icmp" {
				continue
			}
			group.Go(func() {
				saw, err := patiently(ctx, way.from, netip.Addr{}, way.to, k, way.at, 10*time.Second)
				text := saw.String()
				if err != nil {
					text = "no answer: " + err.Error()
				}
				lines[i*len(talks)+j] = fmt.Sprintf("%s, %s: from %s", way.name, k.name, text)
			})
		}
	}
	group.Wait()
	return slices.DeleteFunc(lines, func(s string) bool { return s == "" })
}

// end stops Isthmus on all nodes and removes all its objects.
func (w *world) end(t *testing.T) {
	t.Helper()
	for i, c := range w.sides {
		for _, name := range c.Components() {
			if name != fleet.Manager {
				must(t, c.Stop(name))
			}
		}
		for _, n := range c.Nodes {
			commands := [][]string{{"route-agent", "--cleanup"}}
			if w.plans[i].host {
				commands = append(commands, []string{"gateway", "--cleanup"})
			}
			for _, args := range commands {
				if out, err := n.Command(t.Context(), binary, args...).CombinedOutput(); err != nil {
					t.Fatalf("%s: isthmus %v: %v\n%s", n, args, err, out)
				}
			}
		}
	}
}

// checkUnchanged compares the present state and traffic with those before Isthmus ran. If all is
// true, no object of Isthmus may be left.
func (w *world) checkUnchanged(t *testing.T, when string, all bool) (same bool) {
	t.Helper()
	same = true
	for i, c := range w.sides {
		now, err := w.observe(t.Context(), c.Cluster)
		must(t, err)
		for j, line := range w.before[i].traffic {
			if now.traffic[j] != line {
				same = false
				t.Errorf("%v: %s: the cluster's own traffic is another one: %q, was %q", w.plans[i], when, now.traffic[j], line)
			}
		}
		for j, was := range w.before[i].states {
			is := now.states[j]
			if !all {
				was, is = foreign(was), foreign(is)
			}
			if is != was {
				same = false
				t.Errorf("%v: %s: the state of %s has changed:\n%s", w.plans[i], when, c.Nodes[j], difference(was, is))
			}
		}
	}
	return same
}

// difference returns the lines that only one of two texts has.
func difference(was, is string) string {
	var b strings.Builder
	old, now := strings.SplitAfter(was, "\n"), strings.SplitAfter(is, "\n")
	for _, l := range old {
		if !slices.Contains(now, l) {
			b.WriteString("- " + l)
		}
	}
	for _, l := range now {
		if !slices.Contains(old, l) {
			b.WriteString("+ " + l)
		}
	}
	if b.Len() == 0 {
		return "the same lines in another order, or another number of times:\n" + was + "and now:\n" + is
	}
	return b.String()
}
