package fleet

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/routeagent"
)

// A firewall on one node drops its VXLAN packets. `isthmus status` must name this node and no
// other, and after the removal of the firewall it must report no fault.
func TestStatusNamesNodeWithBrokenOverlay(t *testing.T) {
	if !*long {
		t.Skip("takes two minutes: -long runs it")
	}
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{inPods(clusterSpec("10.64.0.0/14", 2)), clusterSpec("10.80.0.0/16", 1)}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	serving := active(t, a)
	far := a.Nodes[1-serving]

	nft := func(args string) {
		t.Helper()
		out, err := far.Command(t.Context(), "nft", strings.Fields(args)...).CombinedOutput()
		if err != nil {
			t.Fatalf("nft %s: %v: %s", args, err, out)
		}
	}
	status := func() string {
		out, _ := f.Isthmus(t.Context(), "status", "--context", a.Name) // status fails when it reports a problem
		return out
	}
	whole := func() {
		t.Helper()
		eventually(t, "an overlay that is whole", func() error {
			if s := status(); strings.Contains(s, "overlay") {
				return fmt.Errorf("status says\n%s", s)
			}
			return nil
		})
	}
	whole()
	nft("add table ip wall")
	nft("add chain ip wall c { type filter hook output priority -310 ; }")
	nft("add rule ip wall c udp dport 4800 drop")
	begin := time.Now()
	eventually(t, "a node that does not reach the gateway", func() error {
		s := status()
		if !strings.Contains(s, "Node "+far.Name+": Pod ") || !strings.Contains(s, " reaches the gateway at "+a.GatewayPods[serving].Addr.String()+" over the underlay") || !strings.Contains(s, "allow UDP 4800 between nodes") ||
			strings.Contains(s, "Node "+a.Nodes[serving].Name+":") {
			return fmt.Errorf("status says\n%s", s)
		}
		return nil
	})
	t.Logf("found after %.0f s", time.Since(begin).Seconds())
	nft("delete table ip wall")
	whole()
}

// In every mode, kube-proxy makes nodes drop forwarded packets with the connection tracking state
// "invalid". The ICMP answers of the gateway to overlay probes are of that kind, because the
// packet that they quote reached the gateway's node inside VXLAN.
func TestOverlayProbesWorkWithKubeProxy(t *testing.T) {
	if _, err := exec.LookPath("nft"); err != nil {
		t.Skip(err)
	}
	f := up(t, lab.Spec{Clusters: []lab.ClusterSpec{inPods(clusterSpec("10.64.0.0/14", 2)), clusterSpec("10.80.0.0/16", 1)}})
	a, b := f.Clusters[0], f.Clusters[1]
	for _, n := range a.Nodes {
		rules := "add table ip proxy; add chain ip proxy f { type filter hook forward priority 0; }; add rule ip proxy f ct state invalid counter drop"
		if out, err := n.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
			t.Fatalf("nft: %v: %s", err, out)
		}
	}
	peer(t, f, a, b)
	far := a.Nodes[1-active(t, a)]
	eventually(t, "an answer to a probe", func() error {
		text, err := far.Get(t.Context(), "http://127.0.0.1:5875/status")
		if err != nil {
			return err
		}
		var s routeagent.Status
		if err := json.Unmarshal([]byte(text), &s); err != nil || s.Overlay == nil || s.Overlay.Answered.IsZero() {
			return fmt.Errorf("%w: overlay %+v", err, s.Overlay)
		}
		return nil
	})
}
