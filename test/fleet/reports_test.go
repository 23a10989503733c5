package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/manager/ipam"
)

// The manager must not allocate networks that nodes already use. It knows them only from the
// nodes' reports. Here, one node of cluster a has a static route to the network of b's pods.
func TestPeerIsNotAllocatedANetworkThatANodeUses(t *testing.T) {
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 2), clusterSpec("192.168.84.0/22", 2)}})
	a, b := f.Clusters[0], f.Clusters[1]
	onPrem := netip.MustParseAddr("192.168.85.200") // unused in b
	ip(t, a.OnPrem.Host, "addr add %v/32 dev lo", onPrem)
	ip(t, a.Nodes[0].Host, "route add 192.168.84.0/22 via %v", a.OnPrem.Addr)
	untilReported(t, a, 0, true, "192.168.84.0/22")
	for i := range a.Nodes {
		untilReported(t, a, i, true, "192.168.77.0/24")
		untilReported(t, a, i, true, netip.PrefixFrom(a.Nodes[i].Addr, 24).Masked().String())
	}
	untilKnown(t, a)
	pod := podOn(t, a, 0)
	reach := func(when string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := firstPing(ctx, pod.Host, func() (netip.Addr, error) { return onPrem, nil }); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
	}
	reach("before")
	peer(t, f, a, b)
	networks := statusOf(t, a, b).Remote
	if networks.PodCIDR != "192.168.84.0/22" || netip.MustParsePrefix(networks.PodCIDRSeen).Overlaps(b.PodCIDR) {
		t.Errorf("b's pods are %s, and %s to a", networks.PodCIDR, networks.PodCIDRSeen)
	}
	if networks := statusOf(t, b, a).Remote; networks.PodCIDRSeen != networks.PodCIDR {
		t.Errorf("a's pods are %s, and %s to b, where nothing is in the way", networks.PodCIDR, networks.PodCIDRSeen)
	}
	podsToPods(t, a, b)
	podsToPods(t, b, a)
	reach("beside the peering")

	// A later route to the peer's network must not interrupt the peering, but the Peering must
	// report it.
	later := netip.PrefixFrom(netip.MustParsePrefix(networks.PodCIDRSeen).Addr(), 23).String()
	ip(t, a.Nodes[1].Host, "route add blackhole %s", later)
	overlap := fmt.Sprintf("%s here, overlaps a network of node %s, %s", networks.PodCIDRSeen, a.Nodes[1].Name, later)
	untilSays(t, a, b, api.ReasonOverlap, overlap)
	podsToPods(t, a, b)
	podsToPods(t, b, a)
	ip(t, a.Nodes[1].Host, "route del blackhole %s", later)
	untilSays(t, a, b, api.ReasonConnected, "traffic can flow")

	// When a Node is deleted, its report must be deleted, too.
	node := a.Nodes[1].Name
	must(t, a.Kill(fleet.Agent(1)))
	must(t, a.Client.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}))
	eventually(t, "the end of the report", func() error {
		err := a.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: node}, &api.NodeNetworks{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is still there: %w", err)
	})
}

// ip runs ip(8) on a host.
func ip(t *testing.T, h *lab.Host, format string, args ...any) {
	t.Helper()
	command := strings.Fields(fmt.Sprintf(format, args...))
	if out, err := h.Command(t.Context(), "ip", command...).CombinedOutput(); err != nil {
		t.Fatalf("%s: ip %v: %v: %s", h, command, err, out)
	}
}

// untilReported waits until the report of node i contains a network, or no longer contains it.
func untilReported(t *testing.T, c *fleet.Cluster, i int, has bool, network string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%v reported by %s: %v", network, c.Nodes[i].Name, has), func() error {
		var report api.NodeNetworks
		err := c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: c.Nodes[i].Name}, &report)
		if err == nil && slices.Contains(report.Spec.Networks, network) != has {
			err = fmt.Errorf("%+v", report.Spec)
		}
		return err
	})
}

// untilKnown waits until the manager's log shows that the manager knows all reports of the nodes.
func untilKnown(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	eventually(t, "the manager knows the reports", func() error {
		var reports api.NodeNetworksList
		if err := c.Client.List(t.Context(), &reports, client.InNamespace(fleet.Namespace)); err != nil {
			return err
		}
		var all []ipam.Reached
		for _, r := range reports.Items {
			for _, text := range r.Spec.Networks {
				all = append(all, ipam.Reached{Prefix: netip.MustParsePrefix(text), Node: r.Name})
			}
			for _, text := range r.Spec.Resolvers {
				all = append(all, ipam.Reached{Prefix: netip.MustParsePrefix(text + "/32"), Node: r.Name, Resolver: true})
			}
		}
		log, err := os.ReadFile(c.Log(fleet.Manager))
		if err != nil {
			return err
		}
		known := regexp.MustCompile(`networks and endpoint of this cluster.*"reached":(\d+)`).FindAllStringSubmatch(string(log), -1)
		if want := strconv.Itoa(len(ipam.MergeReached(all))); len(known) == 0 || known[len(known)-1][1] != want {
			return fmt.Errorf("it knows %v; want %s of %v", known, want, all)
		}
		return nil
	})
}

func statusOf(t *testing.T, at, of *fleet.Cluster) api.PeeringStatus {
	t.Helper()
	p, err := at.Peering(t.Context(), of)
	must(t, err)
	return p.Status
}

// untilSays waits until the condition Ready has the reason, with a message that contains the
// text.
func untilSays(t *testing.T, at, of *fleet.Cluster, reason, text string) {
	t.Helper()
	eventually(t, reason, func() error {
		c := meta.FindStatusCondition(statusOf(t, at, of).Conditions, api.ConditionReady)
		if c == nil || c.Reason != reason || !strings.Contains(c.Message, text) {
			return fmt.Errorf("Ready is %+v", c)
		}
		return nil
	})
}
