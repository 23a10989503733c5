package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Whatever goes away here is not on the way of a packet.
func TestControlPlaneOutage(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{
		clusterSpec("10.244.0.0/16", 3), clusterSpec("10.244.64.0/19", 2),
	}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)

	t.Run("APIServersFrozenAndRestarted", func(t *testing.T) {
		during := startTraffic(t, a, b)
		freeze := 10 * time.Second // each alone and then both: 20 s for each
		if *long {
			freeze = 30 * time.Second
		}
		must(t, a.Server.Freeze())
		time.Sleep(freeze)
		must(t, b.Server.Freeze())
		time.Sleep(freeze)
		must(t, a.Server.Thaw())
		time.Sleep(freeze)
		must(t, b.Server.Thaw())
		must(t, a.Server.RestartAPIServer(t.Context()))
		must(t, b.Server.RestartAPIServer(t.Context()))
		begin := time.Now()
		mappedEndpoint(t, a, b) // managers write and gateways read again
		mappedEndpoint(t, b, a)
		t.Logf("endpoints of both sides are mapped %.2f s after the second restart", time.Since(begin).Seconds())
		ready(t, a, b)
		during.endWithoutLoss(t)
		active(t, a)
		active(t, b)
		podsToPods(t, a, b)
	})

	t.Run("ManagerDownNewPodIsReached", func(t *testing.T) {
		must(t, a.Kill(fleet.Manager))
		must(t, b.Kill(fleet.Manager))
		during := startTraffic(t, a, b)
		// The new pod's address is of node 1's network; it runs on another node.
		last := len(b.Nodes) - 1
		fresh := addPod(t, b, podOn(t, b, last), b.Nodes[0])
		from := remotePod(t, a)
		// The address of cluster b's pods at a is in the spec of the Peering, which is there
		// without managers.
		addr := seen(t, a, b, fresh.Addr)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		took, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return addr, nil })
		must(t, err)
		t.Logf("the new pod answers %.2f s after the API server knows it", took.Seconds())
		if *long {
			time.Sleep(time.Minute)
		}
		must(t, a.Start(t.Context(), fleet.Manager))
		must(t, b.Start(t.Context(), fleet.Manager))
		ready(t, a, b)
		during.endWithoutLoss(t)
		if now := seen(t, a, b, fresh.Addr); now != addr {
			t.Errorf("after the managers' return the new pod is at %v; it was at %v", now, addr)
		}
		// What docs/security.md says is left: a pod that is not in a network of its node, until the
		// gateway's node knows of it.
		for _, l := range f.Sniffer.Excuse(func(l lab.Leak) bool { return strings.Contains(l.Packet, fmt.Sprintf(" -> %v,", fresh.Addr)) }) {
			t.Logf("in the clear, as docs/security.md says: %v", l)
		}
	})

	t.Run("RouteAgentsKilledAndStarted", func(t *testing.T) {
		during := startTraffic(t, a, b)
		for _, c := range f.Clusters {
			for i := range c.Nodes {
				must(t, c.Kill(fleet.Agent(i)))
			}
			time.Sleep(time.Second)
			for i := range c.Nodes {
				must(t, c.Start(t.Context(), fleet.Agent(i)))
			}
		}
		time.Sleep(time.Second)
		during.endWithoutLoss(t)
	})

	t.Run("PeeredAnewAfterAllThat", func(t *testing.T) {
		isthmus(t, f, "unpeer", "--context", "a", "--remote-context", "b")
		firstPingAfterPeer(t, f, b, a)
		podsToPods(t, a, b)
	})
}

// A pair of traffics: both ways, one between nodes without the active gateway, one between those
// with it.
type both struct{ remote, near *traffic }

func startTraffic(t *testing.T, a, b *fleet.Cluster) both {
	t.Helper()
	from, to := remotePod(t, a), remotePod(t, b)
	back, forth := podOn(t, b, active(t, b)), podOn(t, a, active(t, a))
	r := both{talk(t, from, to, seen(t, a, b, to.Addr)), talk(t, back, forth, seen(t, b, a, forth.Addr))}
	time.Sleep(time.Second) // something to compare with
	return r
}

func (r both) endWithoutLoss(t *testing.T) {
	t.Helper()
	r.remote.endWithoutLoss(t)
	r.near.endWithoutLoss(t)
}

func (r both) end(t *testing.T) [2]outcome {
	t.Helper()
	return [2]outcome{r.remote.end(t), r.near.end(t)}
}
