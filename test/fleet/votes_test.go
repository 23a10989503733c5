package fleet

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	peerings "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/test/internal/hosts"
)

// With votes, a standby must be able to take over without an API server. A gateway that reaches the
// API server, but not most nodes, must stop forwarding.
func TestVotesElectTheGateway(t *testing.T) {
	f := upWith(t, fleet.Options{Votes: true, Spec: lab.Spec{RPFilter: lab.RPFilterStrict, Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 3)), clusterSpec("10.240.0.0/12", 2),
	}}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
	time.Sleep(2 * time.Second) // until agents have read the Service
	other := func(t *testing.T, was int) {
		t.Helper()
		eventually(t, "another active gateway", func() error {
			if now := active(t, a); now == was {
				return fmt.Errorf("active: %s", a.Nodes[now])
			}
			return nil
		})
	}

	t.Run("ActiveKilledDuringAPIServerOutage", func(t *testing.T) {
		was := active(t, a)
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		addr := seen(t, a, b, to.Addr)
		must(t, a.Server.Freeze())
		begin := time.Now()
		must(t, a.Kill(fleet.Gateway(was)))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return addr, nil })
		must(t, a.Server.Thaw())
		must(t, err)
		t.Logf("%s -> %s answers %.2f s after the end of the gateway on %s", from, to, time.Since(begin).Seconds(), a.Nodes[was])
		other(t, was)
		waitTakeover(t, a, peerings.TakeoverNotHeard)
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
		eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
		podsToPods(t, a, b)
	})

	t.Run("AgentStartsDuringAPIServerOutage", func(t *testing.T) {
		was := active(t, a)
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		addr := seen(t, a, b, to.Addr)
		must(t, a.Server.Freeze())
		must(t, a.Kill(fleet.Agent(2)))
		must(t, a.Launch(fleet.Agent(2)))
		must(t, a.Kill(fleet.Gateway(was)))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		took, err := firstPing(ctx, from.Host, func() (netip.Addr, error) { return addr, nil })
		must(t, a.Server.Thaw())
		must(t, err)
		t.Logf("%s -> %s answers after %.2f s", from, to, took.Seconds())
		other(t, was)
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
		eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
		podsToPods(t, a, b)
	})

	t.Run("MostNodesDeleted", func(t *testing.T) {
		var gone []corev1.Node
		for _, n := range a.Nodes[1:] {
			var o corev1.Node
			must(t, a.Client.Get(t.Context(), client.ObjectKey{Name: n.Name}, &o))
			must(t, a.Client.Delete(t.Context(), &o))
			gone = append(gone, o)
		}
		begin := time.Now()
		eventually(t, "the Lease to decide", func() error {
			if list := votersOf(t, a); len(list) > 0 {
				return fmt.Errorf("voters: %v", list)
			}
			return nil
		})
		t.Logf("the Lease decides %.1f s after the Nodes were deleted", time.Since(begin).Seconds())
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := firstPing(ctx, podOn(t, a, 0).Host, func() (netip.Addr, error) { return a.Seen(ctx, b, podOn(t, b, 1).Addr) })
		must(t, err)
		t.Logf("traffic is back %.1f s after them", time.Since(begin).Seconds())
		for i := range gone {
			o := gone[i]
			o.ResourceVersion, o.UID = "", ""
			must(t, a.Client.Create(t.Context(), &o))
			o.Status = gone[i].Status
			must(t, a.Client.Status().Update(t.Context(), &o))
		}
		eventually(t, "votes", func() error { return checkVoting(t, a, 3) })
		podsToPods(t, a, b)
	})

	t.Run("ActiveLosesContactToMostNodes", func(t *testing.T) {
		hosts.Need(t, "nft")
		was := active(t, a)
		during := startTraffic(t, a, b)
		filter(t, a.GatewayHost(was), "add chain ip fault on { type filter hook output priority 0; }; add rule ip fault on udp dport 4801 drop")
		other(t, was)
		waitResponse(t, a, was, 5872, "/readyz", "503", "this standby cannot take over: of the 3 nodes that vote")
		time.Sleep(time.Second)
		for _, o := range during.end(t) {
			if o.outage > takeover {
				t.Errorf("pings were lost over %v; want at most %v", o.outage, takeover)
			}
		}
		filter(t, a.GatewayHost(was), "")
		podsToPods(t, a, b)
	})

	t.Run("NoMajority", func(t *testing.T) {
		was := active(t, a)
		for i := range 2 {
			must(t, a.Kill(fleet.Agent(i)))
		}
		waitResponse(t, a, was, 5872, "/readyz", "503", "not sending: this gateway has no majority of the 3 nodes that vote")
		for i := range 2 {
			must(t, a.Start(t.Context(), fleet.Agent(i)))
		}
		waitReady(t, a, b)
		podsToPods(t, a, b)
	})

	t.Run("AgentsReplaced", func(t *testing.T) {
		during := startTraffic(t, a, b)
		for i := range a.Nodes {
			must(t, a.Stop(fleet.Agent(i)))
			must(t, a.Start(t.Context(), fleet.Agent(i)))
		}
		time.Sleep(time.Second)
		for _, o := range during.end(t) {
			if o.outage > takeover {
				t.Errorf("pings were lost over %v; want at most %v", o.outage, takeover)
			}
		}
	})

	t.Run("ActiveStops", func(t *testing.T) {
		was := active(t, a)
		from, to := podOn(t, a, 2), podOn(t, b, 1)
		during := startTraffic(t, a, b)
		l := echoes(t, from, to, seen(t, a, b, to.Addr), 1, 4*time.Second, 4*time.Second, func() { must(t, a.Stop(fleet.Gateway(was))) })
		other(t, was)
		t.Logf("a planned move: %v", l)
		waitTakeover(t, a, peerings.TakeoverReleased)
		for _, o := range during.end(t) {
			if o.outage > takeover {
				t.Errorf("pings were lost over %v; want at most %v", o.outage, takeover)
			}
		}
		// The former gateway relays packets that nodes send to it after it has released the votes,
		// so that they are not lost.
		if n, err := a.Metric(t.Context(), "isthmus_gateway_relayed_packets_total", `result="taken"`); err != nil || n == 0 {
			t.Errorf("%v packets of the former gateway were taken: %v", n, err)
		}
		must(t, a.Start(t.Context(), fleet.Gateway(was)))
		podsToPods(t, a, b)
	})
}

// waitTakeover waits until the Lease says that its holder became active for the given reason.
func waitTakeover(t *testing.T, c *fleet.Cluster, reason string) {
	t.Helper()
	eventually(t, "the reason of the takeover", func() error {
		var l coordinationv1.Lease
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: peerings.LeaseGateway}, &l))
		text := l.Annotations[peerings.AnnotationTakeover]
		if got := peerings.TakeoverOf(text, *l.Spec.HolderIdentity); got.Reason != reason || got.Previous == "" {
			return fmt.Errorf("%q, held by %s; want %s", text, *l.Spec.HolderIdentity, reason)
		}
		return nil
	})
}

// checkVoting returns an error unless the given number of nodes vote, and the Lease, the Services
// and both gateways show that.
func checkVoting(t *testing.T, c *fleet.Cluster, want int) error {
	t.Helper()
	if list := votersOf(t, c); len(list) != want {
		return fmt.Errorf("voters: %v", list)
	}
	var services corev1.ServiceList
	if err := c.Client.List(t.Context(), &services, client.InNamespace(fleet.Namespace), client.HasLabels{v1alpha1.LabelGateway}); err != nil {
		return err
	}
	for _, s := range services.Items {
		if mark := s.Annotations[peerings.AnnotationVotes]; !strings.Contains(mark, `"voting":true`) {
			return fmt.Errorf("Service %s: %q", s.Name, mark)
		}
	}
	for i := range 2 {
		text, err := c.GatewayHost(i).Get(t.Context(), "http://127.0.0.1:5873/metrics")
		if err != nil {
			return err
		}
		for _, name := range []string{"isthmus_gateway_voters", "isthmus_gateway_voters_heard"} {
			if line := fmt.Sprintf("%s %d\n", name, want); !strings.Contains(text, line) {
				return fmt.Errorf("%s: no %q", c.Nodes[i], line)
			}
		}
	}
	return nil
}

// votersOf returns the voters that the Lease lists.
func votersOf(t *testing.T, c *fleet.Cluster) map[string]netip.Addr {
	t.Helper()
	var l coordinationv1.Lease
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: peerings.LeaseGateway}, &l))
	var list struct{ Voters map[string]netip.Addr }
	if text := l.Annotations[peerings.AnnotationVoters]; text != "" {
		must(t, json.Unmarshal([]byte(text), &list))
	}
	return list.Voters
}
