package overlay

import (
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/isthmus-net/isthmus/internal/lab"
)

// A gateway has routes for the peers to which it is connected, and refuses packets for the others.
func TestProbeIsAnsweredWithAndWithoutARouteAtTheOtherEnd(t *testing.T) {
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
	answered := func() (answer Answer) {
		t.Helper()
		for range 5 { // a loaded machine may answer later than patience permits
			err := n.Do(func() error {
				answer = Datagram{To: to, TTL: 1}.Send(t.Context())
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if answer != NoAnswer {
				break
			}
		}
		return answer
	}
	ip(n, "route", "add", "10.246.0.0/16", "via", end.Addr.String())
	ip(end, "route", "add", "unreachable", "10.246.0.0/16")
	if got := answered(); got != Ended {
		t.Error("an end without a way on:", got)
	}
	ip(end, "route", "del", "unreachable", "10.246.0.0/16")
	ip(end, "route", "add", "10.246.0.0/16", "via", n.Addr.String())
	if got := answered(); got != Expired {
		t.Error("an end with a way on:", got)
	}
	for by, want := range map[string]Answer{"eth0": Expired, "lo": NoAnswer} {
		var got Answer
		for range 5 {
			err := n.Do(func() error {
				link, err := net.InterfaceByName(by)
				if err == nil {
					got = Datagram{To: to, TTL: 1, By: link.Index}.Send(t.Context())
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			if got == want {
				break
			}
		}
		if got != want {
			t.Errorf("answers by %s: %v, want %v", by, got, want)
		}
	}
}
