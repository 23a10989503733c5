package nodes

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
)

// isthmus runs the command and returns its standard output and its exit code.
func (w *world) isthmus(t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	var stdout, stderr strings.Builder
	cmd := w.set.Command(t.Context(), fixture.program, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	t.Logf("isthmus %s: exit code %d\n%s%s", strings.Join(args, " "), cmd.ProcessState.ExitCode(), stderr.String(), stdout.String())
	return stdout.String(), cmd.ProcessState.ExitCode()
}

// verified is the output of isthmus verify -o json.
type verified struct {
	Checks, Failed int
	Results        []struct {
		From, To                      struct{ Cluster, Network, Place, Pod string }
		Protocol, What, Error, SeenAs string
	}
}

func (w *world) verify(t *testing.T, args ...string) (v verified, code int) {
	t.Helper()
	out, code := w.isthmus(t, append([]string{"verify", "--context", "a", "--remote-context", "b", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &v); err != nil {
		t.Fatal(err)
	}
	return v, code
}

// checkNothingLeft fails the test if a Pod of isthmus verify still exists.
func (w *world) checkNothingLeft(t *testing.T) {
	t.Helper()
	for _, c := range w.set.Clusters {
		var pods corev1.PodList
		must(t, c.Client.List(t.Context(), &pods, client.HasLabels{"isthmus.net/verify"}))
		for _, p := range pods.Items {
			t.Errorf("cluster %s still has Pod %s", c.Name, p.Name)
		}
	}
}

func TestVerifyReportsDeliveryAndLeavesNothing(t *testing.T) {
	if !*all {
		t.Skip("with -all")
	}
	w := shared.get(t)
	v, code := w.verify(t)
	// In each cluster, a pod and a hostNetwork pod on two nodes each send to two pods: 8 pairs in
	// each direction, with 8 sizes.
	if code != 0 || v.Failed != 0 || v.Checks != 2*8*8 || len(v.Results) != v.Checks {
		t.Errorf("exit code %d: %d checks, %d failed", code, v.Checks, v.Failed)
	}
	w.checkNothingLeft(t)

	receiver, err := address(t.Context(), w.b, podName(pod, w.b.Nodes[0]))
	must(t, err)
	seen, err := w.a.Seen(t.Context(), w.b, receiver)
	must(t, err)
	v, code = w.verify(t, "--only", "pod,out,icmp", "--sizes", "56", "--to", fmt.Sprintf("%v:%d,%v", seen, port, seen))
	if code != 0 || v.Checks != 2*2+2*2 {
		t.Errorf("exit code %d: %d checks", code, v.Checks)
	}

	// verify finds a Service with an endpoint in the other cluster. It tests the Service by address
	// and by name. The test cluster does not resolve names.
	serviceFor(t, w.a, w.b, w.b.Nodes[0])
	v, code = w.verify(t, "--only", "pod,out,tcp", "--sizes", "100")
	found := map[string]int{}
	for _, r := range v.Results {
		what, _, _ := strings.Cut(r.What, " ")
		found[what]++
		if (what == "Service") != strings.Contains(r.Error, "lookup") || what != "Service" && r.Error != "" {
			t.Errorf("%s: %q", r.What, r.Error)
		}
	}
	if want := map[string]int{"": 2 * 2, "endpoint": 2, "Service": 2}; code != 1 || !maps.Equal(found, want) {
		t.Errorf("exit code %d, %v; want 1 and %v", code, found, want)
	}

	// With one fault, verify must report this fault and no other.
	for _, n := range w.b.Nodes {
		rules := "add table ip fault; add chain ip fault f { type filter hook forward priority 0; }; add rule ip fault f ip daddr " + w.plan.pods[1] + " udp dport 7468 drop"
		if out, err := n.Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		defer func() { _ = n.Command(t.Context(), "nft", "delete table ip fault").Run() }()
	}
	v, code = w.verify(t, "--only", "pod", "--sizes", "100")
	if code != 1 || v.Failed == 0 {
		t.Errorf("exit code %d: %d failed", code, v.Failed)
	}
	for _, r := range v.Results {
		if strings.HasPrefix(r.What, "Service") {
			continue // names are not resolved, see above
		}
		if broken := r.Protocol == "udp" && r.To.Cluster == "b"; broken != (r.Error != "") {
			t.Errorf("%s from %+v to %+v: %q", r.Protocol, r.From, r.To, r.Error)
		}
	}
	w.checkNothingLeft(t)
}

// verify can use existing pods of users as senders and receivers, with their own names and
// addresses. The pods stay unchanged.
func TestVerifyUsesExistingPods(t *testing.T) {
	if !*all {
		t.Skip("with -all")
	}
	w := shared.get(t)
	ours, theirs := podName(pod, w.a.Nodes[0]), podName(pod, w.b.Nodes[1])
	var before, after corev1.Pod
	must(t, w.a.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: ours}, &before))
	// Without additional privileges, the container runtime does not let pods ping.
	v, code := w.verify(t, "--pod", "default/"+ours, "--remote-pod", "default/"+theirs, "--only", "tcp,udp", "--sizes", "100")
	if code != 0 || v.Checks != 2*2 {
		t.Errorf("exit code %d: %d checks", code, v.Checks)
	}
	from, err := w.b.Seen(t.Context(), w.a, netip.MustParseAddr(before.Status.PodIP))
	must(t, err)
	for _, r := range v.Results {
		if r.From.Cluster == "a" && (r.From.Pod != "default/"+ours || r.SeenAs != from.String()) {
			t.Errorf("%+v; want it seen as %v", r, from)
		}
	}
	must(t, w.a.Client.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: ours}, &after))
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != before.Status.ContainerStatuses[0].RestartCount {
		t.Error("the Pod is another one")
	}
	for _, c := range after.Status.EphemeralContainerStatuses {
		if c.State.Terminated == nil {
			t.Errorf("container %s goes on", c.Name)
		}
	}
	w.checkNothingLeft(t)
}

func TestAnInterruptedVerifyLeavesNothing(t *testing.T) {
	if !*all {
		t.Skip("with -all")
	}
	w := shared.get(t)
	cmd := w.set.Command(t.Context(), fixture.program, "verify", "--context", "a", "--remote-context", "b", "--continuous")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := bufio.NewScanner(out)
	if !lines.Scan() || !strings.Contains(lines.Text(), "sent, 0 lost") {
		t.Errorf("%q", lines.Text())
	}
	must(t, cmd.Process.Signal(syscall.SIGINT))
	last := ""
	for lines.Scan() {
		last = lines.Text()
	}
	if err := cmd.Wait(); err != nil || !strings.Contains(last, " sent, 0 lost") {
		t.Errorf("%v: %q\n%s", err, last, stderr.String())
	}
	w.checkNothingLeft(t)
}

func TestGatherReadsTheOutputOfEachComponent(t *testing.T) {
	if !*all {
		t.Skip("with -all")
	}
	w := shared.get(t)
	name := filepath.Join(t.TempDir(), "gathered.tar.gz")
	if _, code := w.isthmus(t, "gather", "--context", "a", "--file", name); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	info, err := os.Stat(name)
	must(t, err)
	if info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", info.Mode())
	}
	files := unpack(t, name)
	if !strings.Contains(files["summary.md"], "Nothing: the archive is complete.") {
		t.Errorf("summary.md:\n%s", files["summary.md"])
	}
	var pods corev1.PodList
	must(t, w.a.Client.List(t.Context(), &pods, client.InNamespace(kubenodes.Namespace)))
	seen := 0
	for _, p := range pods.Items {
		for account, want := range map[string]map[string]string{
			"isthmus-manager":     {"manager.log": `"msg":`, "metrics.txt": "isthmus_ipam_peers_left"},
			"isthmus-gateway":     {"gateway.log": `"msg":`, "metrics.txt": "isthmus_gateway_active"},
			"isthmus-route-agent": {"route-agent.log": `"msg":`, "metrics.txt": "isthmus_route_agent_ready 1", "status.json": "ip route replace"},
		} {
			if p.Spec.ServiceAccountName != account {
				continue
			}
			if p.Labels["net.liqo.io/gateway"] == "active" {
				want["status.json"] = `"state": "Connected"`
			}
			for file, text := range want {
				seen++
				if at := "pods/" + p.Name + "/" + file; !strings.Contains(files[at], text) {
					t.Errorf("%s lacks %s:\n%.2000s", at, text, files[at])
				}
			}
		}
	}
	if seen < 10 {
		t.Errorf("%d Pods looked at", seen)
	}
}

func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(name)
	must(t, err)
	defer f.Close()
	plain, err := gzip.NewReader(f)
	must(t, err)
	files := map[string]string{}
	for r := tar.NewReader(plain); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		text, err := io.ReadAll(r)
		must(t, err)
		_, below, _ := strings.Cut(h.Name, "/")
		files[below] = string(text)
	}
}
