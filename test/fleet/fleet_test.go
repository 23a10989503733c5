// Package fleet tests Isthmus as a whole, with real packets between pods while components and API
// servers fail. The clusters have their own API servers, managers, gateways and route agents, and
// are peered by `isthmus peer`. The tests need root.
//
// With -long, faults last as long as the project promises to tolerate them. Without -long they are
// shorter.
package fleet

import (
	"context"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/programs"
)

var must, eventually = expect.NoError, expect.Eventually

var long = flag.Bool("long", false, "let faults last for a minute and more")

const patience = expect.Patience

// binary is the path of the isthmus program, and kube the folder of etcd and kube-apiserver.
// TestMain builds both.
var binary, kube string

func TestMain(m *testing.M) { os.Exit(programs.Run(m, &binary, &kube)) }

// seats limits the number of fleets that run at the same time. Each needs a dozen processes and a
// GiB of memory per cluster. Two fleets beside the tests of other packages would overload two
// cores, and tests would fail.
var seats = make(chan struct{}, 1)

// up creates a fleet for the test. The test then runs in parallel with others. If it fails, up
// prints the last lines of all logs. The test fails if a node has sent a packet for a peer in the
// clear.
func up(t *testing.T, spec lab.Spec) *fleet.Fleet {
	t.Helper()
	return upWith(t, fleet.Options{Spec: spec})
}

func upWith(t *testing.T, o fleet.Options) *fleet.Fleet {
	t.Helper()
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	t.Parallel() // a fleet mostly waits: for elections, timeouts and pings
	seats <- struct{}{}
	t.Cleanup(func() { <-seats })
	o.Spec.Name, o.Binary, o.Kube = lab.UniqueName("fleet"), binary, kube
	begin := time.Now()
	f, err := fleet.Up(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d clusters are up after %.1f s", len(f.Clusters), time.Since(begin).Seconds())
	t.Cleanup(func() {
		if t.Failed() || f.Sniffer.Report().Leaked > 0 {
			for _, c := range f.Clusters {
				for _, name := range c.Components() {
					t.Logf("the end of the log of %s of cluster %s:\n%s", name, c, c.Tail(name, 10))
				}
			}
		}
		if err := f.Down(); err != nil {
			t.Error(err)
		}
		t.Log(f.Sniffer.Report())
	})
	if err := f.Lab.ServeHosts(); err != nil {
		t.Fatal(err)
	}
	return f
}

func clusterSpec(podCIDR string, nodes int) lab.ClusterSpec {
	return lab.ClusterSpec{PodCIDR: netip.MustParsePrefix(podCIDR), Nodes: nodes}
}

// inPods makes the gateways of a cluster Pods with their own networks. By default a fleet's
// gateways use their nodes' networks.
func inPods(spec lab.ClusterSpec) lab.ClusterSpec {
	spec.GatewayPods = min(spec.Nodes, 2)
	return spec
}

// isthmus runs the isthmus program as an administrator does.
func isthmus(t *testing.T, f *fleet.Fleet, args ...string) {
	t.Helper()
	if out, err := f.Isthmus(t.Context(), args...); err != nil {
		t.Fatalf("isthmus %v: %v\n%s", args, err, out)
	}
}

// peer peers two clusters and waits until both are ready.
func peer(t *testing.T, f *fleet.Fleet, a, b *fleet.Cluster) {
	t.Helper()
	isthmus(t, f, "peer", "--request-timeout", "1m", "--timeout", patience.String(), "--context", a.Name, "--remote-context", b.Name)
	waitReady(t, a, b)
}

func waitReady(t *testing.T, a, b *fleet.Cluster) {
	t.Helper()
	for _, pair := range [][2]*fleet.Cluster{{a, b}, {b, a}} {
		if err := pair[0].WaitReady(t.Context(), pair[1], patience); err != nil {
			t.Fatal(err)
		}
	}
}

// seen returns the address under which a cluster reaches a pod's address of another cluster.
func seen(t *testing.T, at, of *fleet.Cluster, addr netip.Addr) netip.Addr {
	t.Helper()
	var s netip.Addr
	eventually(t, "networks agreed upon", func() (err error) {
		s, err = at.Seen(t.Context(), of, addr)
		return err
	})
	return s
}

// active returns the index of the node with the active gateway.
func active(t *testing.T, c *fleet.Cluster) int {
	t.Helper()
	var i int
	eventually(t, "one active gateway", func() (err error) {
		i, err = c.ActiveGateway(t.Context())
		return err
	})
	return i
}

// remotePod returns a pod on a node without the active gateway.
func remotePod(t *testing.T, c *fleet.Cluster) *lab.Pod {
	t.Helper()
	var p *lab.Pod
	eventually(t, "a pod away from the active gateway", func() (err error) {
		p, err = c.RemotePod(t.Context())
		return err
	})
	return p
}

// podOn returns the first pod of node i.
func podOn(t *testing.T, c *fleet.Cluster, i int) *lab.Pod {
	t.Helper()
	for _, p := range c.Pods {
		if p.Node == c.Nodes[i] {
			return p
		}
	}
	t.Fatalf("no pod on %s", c.Nodes[i])
	return nil
}

// firstPing sends echo requests until one gets an answer, at first every 100 ms, later less often,
// and for two minutes at most. It returns the time until the answer.
func firstPing(ctx context.Context, from *lab.Host, to func() (netip.Addr, error)) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	begin := time.Now()
	for wait := 100 * time.Millisecond; ; {
		addr, err := to()
		if err == nil {
			_, err = from.PingWith(ctx, addr, lab.PingOptions{Wait: wait})
			wait = min(wait+wait/20, 5*time.Second) // because an answer may need more time
		}
		if err == nil {
			return time.Since(begin), nil
		}
		if ctx.Err() != nil {
			return 0, fmt.Errorf("no ping from %s was answered within %v: %w", from, time.Since(begin).Round(time.Millisecond), err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}
