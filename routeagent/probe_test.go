package routeagent

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/fabric"
)

func TestProbeTargetsANetworkBehindTheActiveGateway(t *testing.T) {
	tunnel := func(gateway, pods string) (t fabric.Tunnel) {
		t.Gateway, _ = netip.ParseAddr(gateway)
		t.Peer.Remote.PodSeen = netip.MustParsePrefix(pods)
		return t
	}
	in := fabric.NodeIntent{Tunnels: []fabric.Tunnel{tunnel("", "10.1.0.0/16"), tunnel("10.0.0.9", "fd00::/64"), tunnel("10.0.0.9", "10.2.0.0/16")}}
	if gateway, remote, ok := probeTarget(&in, 0); !ok || gateway.String() != "10.0.0.9" || remote.String() != "10.2.0.1" {
		t.Error(gateway, remote, ok)
	}
	in.Gateway = netip.MustParseAddr("10.0.0.8")
	allocate(&in, netip.MustParsePrefix("fd00::/64"), netip.MustParsePrefix("10.3.0.0/16"))
	if gateway, remote, ok := probeTarget(&in, 0); !ok || gateway.String() != "10.0.0.8" || remote.String() != "10.3.0.1" {
		t.Error("the one gateway:", gateway, remote, ok)
	}
	in.Gateway, in.Tunnels = netip.Addr{}, in.Tunnels[:2]
	if _, _, ok := probeTarget(&in, 0); ok {
		t.Error("found a way where there is none")
	}
}

// Lost answers of a gateway are evidence only if it has answered before.
func TestOneWayLossIsReportedOnlyIfTheGatewayAnsweredBefore(t *testing.T) {
	silent, known := netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("10.3.0.1")
	var p backProbe
	if got := p.targets(true, silent); len(got) != 0 {
		t.Errorf("asks %v although none has ever answered", got)
	}
	p.answered(known)
	for _, c := range []struct {
		suspected bool
		remote    netip.Addr
		want      []netip.Addr
	}{{false, silent, []netip.Addr{silent}}, {true, silent, []netip.Addr{known}}, {false, known, nil}, {true, known, []netip.Addr{known}}} {
		if got := p.targets(c.suspected, c.remote); !slices.Equal(got, c.want) {
			t.Errorf("suspected %v, turn of %v: asks %v; want %v", c.suspected, c.remote, got, c.want)
		}
	}
	first := known
	for i := range 20 {
		last := netip.AddrFrom4([4]byte{10, 9, byte(i), 1})
		if p.answered(last); i < backPeers-1 {
			p.answered(first)
		}
		if !slices.Contains(p.answering, last) || len(p.answering) > backPeers || slices.Contains(p.answering, first) != (i < 2*backPeers-2) {
			t.Errorf("after %d more: %v", i+1, p.answering)
		}
	}
}

// A firewall between the nodes drops VXLAN. The agent reports the fault, and later its end.
func TestAnAgentReportsABrokenOverlay(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	t.Setenv(childProbe, "1")
	c := newCluster(t, 2)
	c.start(c.Nodes...)
	n, gateway := c.Nodes[1], c.Nodes[0]
	wants := func(what string, good func(s Status) bool) {
		t.Helper()
		c.eventually(n, func() error {
			text, err := n.Get(c.ctx, "http://"+statusAt+"/status")
			if err != nil {
				return err
			}
			var s Status
			if err := json.Unmarshal([]byte(text), &s); err != nil || s.Overlay == nil || !good(s) {
				return fmt.Errorf("not %s: %v, error %q, overlay %+v", what, s.Ready, s.Error, s.Overlay)
			}
			return nil
		})
	}
	metric := func(want string) {
		t.Helper()
		text, err := n.Get(c.ctx, "http://"+metricsAt+"/metrics")
		if line := fmt.Sprintf("isthmus_route_agent_overlay_up{gateway=\"%v\"} %s", gateway.Addr, want); err != nil || !strings.Contains(text, line) {
			t.Errorf("no %s in the metrics: %v", line, err)
		}
	}
	whole := func(s Status) bool {
		return s.Ready && !s.Overlay.Broken && !s.Overlay.Answered.IsZero() && s.Overlay.Gateway == gateway.Addr
	}
	wants("answered", whole)
	metric("1")

	c.run(gateway.Host, "nft add table ip wall")
	c.run(gateway.Host, "nft add chain ip wall in { type filter hook prerouting priority -310 ; }")
	c.run(gateway.Host, "nft add rule ip wall in udp dport 4800 drop")
	wants("broken", func(s Status) bool {
		return !s.Ready && s.Overlay.Broken && strings.Contains(s.Error, "allow UDP 4800 between nodes")
	})
	c.eventually(n, func() error { // the report to the manager names the fault
		b, err := os.ReadFile(c.reportPath(n))
		if !strings.Contains(string(b), fmt.Sprintf(`"BrokenOverlay":{"Gateway":"%v","Since":"2`, gateway.Addr)) {
			return fmt.Errorf("told %s%w", b, err)
		}
		return nil
	})
	metric("0")
	if _, err := n.Get(c.ctx, "http://"+metricsAt+"/readyz"); err == nil {
		t.Error("ready, but the overlay is broken")
	}
	c.run(gateway.Host, "nft delete table ip wall")
	wants("whole again", whole)
}
