package overlay

import (
	"net/netip"
	"os/exec"
	"testing"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// A gateway has routes for the peers that it is connected with, and refuses the rest.
func TestTheOtherEndAnswersWithAndWithoutAWayOn(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip(err)
	}
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("probe"),
		Clusters: []lab.ClusterSpec{{PodCIDR: netip.MustParsePrefix("10.64.0.0/16"), Nodes: 2}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	end, n := l.Clusters[0].Nodes[0], l.Clusters[0].Nodes[1]
	ip := func(h *lab.Node, args ...string) {
		t.Helper()
		if out, err := h.Command(t.Context(), "ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	to := netip.MustParseAddr("10.246.0.1")
	answered := func() (answered bool) {
		t.Helper()
		for range 5 { // a loaded machine may need longer than the patience
			err := n.Do(func() error {
				answered = Datagram{To: to, TTL: 1}.answered(t.Context())
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if answered {
				break
			}
		}
		return answered
	}
	ip(n, "route", "add", "10.246.0.0/16", "via", end.Addr.String())
	ip(end, "route", "add", "unreachable", "10.246.0.0/16")
	if !answered() {
		t.Error("an end without a way on: no answer")
	}
	ip(end, "route", "del", "unreachable", "10.246.0.0/16")
	ip(end, "route", "add", "10.246.0.0/16", "via", n.Addr.String())
	if !answered() {
		t.Error("an end with a way on: no answer")
	}
}
