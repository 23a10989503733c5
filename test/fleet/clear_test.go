package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/isthmus-net/isthmus/internal/fleet"
	own "github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Nodes must refuse packets to an allocated network that has no TunnelEndpoint. If such a packet
// leaves a node anyway, the sniffer must report it, because the other tests rely on the sniffer.
func TestNodesRefuseAllocatedNetworksAndSnifferReportsLeaks(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 2), clusterSpec("10.244.64.0/19", 2)}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	podsToPods(t, a, b)
	at := 1 - active(t, a)
	from, to := podOn(t, a, at), seen(t, a, b, podOn(t, b, 0).Addr)

	must(t, a.Kill(fleet.Manager)) // the manager would recreate the TunnelEndpoint
	must(t, a.Client.Delete(t.Context(), endpointOf(t, a, b)))
	eventually(t, "a node that has no way to the peer", func() error {
		n, err := rules(a.Nodes[at], own.NodeRulePriority)
		if err == nil && n > 0 {
			err = fmt.Errorf("%d rules with priority %d", n, own.NodeRulePriority)
		}
		return err
	})
	if n, err := rules(a.Nodes[at], own.RefuseRulePriority); n != 1 || err != nil {
		t.Fatalf("%d rules that refuse, %v", n, err)
	}
	unanswered(t, from, to)
	if leaks := f.Sniffer.Take(); len(leaks) != 0 {
		t.Fatalf("refused, and yet in the clear: %v", leaks)
	}

	must(t, a.Kill(fleet.Agent(at)))                                                                                                  // the agent would restore the rule
	if out, err := a.Nodes[at].Command(t.Context(), "nft", "delete", "table", "inet", own.FilterTable).CombinedOutput(); err != nil { // the packet filter would drop the packets, too
		t.Fatalf("%v: %s", err, out)
	}
	must(t, a.Nodes[at].Do(func() error {
		rule := netlink.NewRule()
		rule.Priority, rule.Table = own.RefuseRulePriority, own.RefuseTable
		return netlink.RuleDel(rule)
	}))
	unanswered(t, from, to)
	eventually(t, "a leak", func() error {
		if r := f.Sniffer.Report(); r.Leaked == 0 {
			return fmt.Errorf("%v", r)
		}
		return nil
	})
	for _, l := range f.Sniffer.Take() {
		if strings.HasPrefix(l.Packet, "TCP ") {
			continue // on a busy machine, an earlier connection may still be closing
		}
		if want := fmt.Sprintf("ICMP %v -> %v, 84 octets", from.Addr, to); l.Node != a.Nodes[at].Name || !l.Network.Contains(to) || !strings.HasPrefix(l.Packet, want) {
			t.Errorf("%v; want %s from %s", l, want, a.Nodes[at])
		}
	}

	must(t, a.Start(t.Context(), fleet.Agent(at)))
	unanswered(t, from, to)
	must(t, a.Start(t.Context(), fleet.Manager))
	waitReady(t, a, b)
	podsToPods(t, a, b)
}

// rules returns the number of a node's policy rules with a priority.
func rules(n *lab.Node, priority int) (count int, err error) {
	err = n.Do(func() error {
		all, err := netlink.RuleList(netlink.FAMILY_V4)
		for _, r := range all {
			if r.Priority == priority {
				count++
			}
		}
		return err
	})
	return count, err
}

func unanswered(t *testing.T, from *lab.Pod, to netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := from.PingWith(ctx, to, lab.PingOptions{Wait: 300 * time.Millisecond}); err == nil {
		t.Errorf("%s -> %v is answered", from, to)
	}
}
