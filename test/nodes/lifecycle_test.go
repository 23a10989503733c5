package nodes

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// previous is the commit of the version from which clusters are upgraded.
const previous = "34053dc7ba9e3ae7aa36481e215a0c2240320e02"

// The images of the current and of the previous version. docs/lifecycle.md names the first.
const (
	newImage = "registry.example.org/isthmus:v1"
	oldImage = "registry.example.org/isthmus:v0"
)

var lifecyclePlan = plan{
	name:     "PodCIDRs of different sizes",
	number:   [2]int{2, 3}, // with two nodes the Lease decides, with three the nodes vote
	clusters: [2]string{"paris", "oslo"},
	pods:     [2]string{"10.244.0.0/16", "10.20.0.0/17"},
	nodes: [2]kubenodes.NodeOptions{
		{Proxy: kubenodes.IPTables, Masquerade: kubenodes.MasqueradePublic},
		{Proxy: kubenodes.NFTables, Masquerade: kubenodes.MasqueradeAll},
	},
}

// The commands of docs/lifecycle.md must have the documented effects, on clusters like those of an
// installer.
func TestCommandsOfLifecyclePageWork(t *testing.T) {
	if fixture.skip != "" {
		t.Skip(fixture.skip)
	}
	if !*all {
		t.Skip("takes minutes: -all (make test-nodes) runs it")
	}
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skip("needs kubectl (Debian's package kubernetes-client)")
	}
	old, err := buildPrevious(t.Context(), filepath.Join(t.TempDir(), "v0"))
	if err != nil {
		t.Logf("without an upgrade: %v", err)
	}
	w := lifecycleWorld(t, old)
	before := map[*kubenodes.Cluster]state{w.a: stateOf(t, w.a), w.b: stateOf(t, w.b)}
	as := func(program string) *shell { return &shell{w: w, program: program} }
	today := as(fixture.program)

	if !t.Run("upgrade", func(t *testing.T) {
		first, image := today, newImage
		if old != "" {
			first, image = as(old), oldImage
		}
		first.section(t, "Install", newImage, image)
		w.waitPeered(t)
		if old != "" {
			w.upgrade(t, today)
			w.checkLives(t, "roll-back of both", func() { first.section(t, "Roll back") })
			w.checkLives(t, "upgrade after the roll-back", func() { today.section(t, "Upgrade") })
		}
	}) {
		return
	}
	t.Run("move", func(t *testing.T) {
		w.checkLives(t, "gateway moved by hand", func() { today.section(t, "Move the gateway") })
	})
	// test/fleet tests the restore itself. This test restarts all components at the same time.
	// After that, `isthmus peer` must change nothing.
	t.Run("restart", func(t *testing.T) {
		w.checkLives(t, "everything restarted", func() { today.section(t, "Restore") })
		w.checkLives(t, "everything of both restarted at once", func() {
			today.run(t, `for what in "rollout restart" "rollout status --timeout=5m"; do for c in paris oslo; do
for component in daemonset/isthmus-route-agent deployment/isthmus-manager deployment/isthmus-gateway; do kubectl --context $c -n isthmus-system $what $component; done; done; done`)
		})
	})
	t.Run("uninstall", func(t *testing.T) {
		w.endWatch(t)
		today.section(t, "Uninstall")
		for _, c := range w.set.Clusters {
			before[c].waitSame(t, c)
		}
	})
	today.section(t, "Install")
	w.waitPeered(t)
	t.Run("namespace deleted, and installed again", func(t *testing.T) {
		today.run(t, "kubectl --context oslo delete namespace isthmus-system --timeout=5m")
		today.run(t, lineWith(t, chapter(t, "lifecycle.md", "Install"), "isthmus install --context oslo "))
		w.waitPeered(t)
		during(t, w, func() {}) // wait for traffic
		w.noPlaintext(t)
	})
	w.endWatch(t)
	t.Run("order went wrong", func(t *testing.T) {
		today.section(t, "When the order went wrong")
		before[w.b].waitSame(t, w.b)
	})
	t.Run("Helm", func(t *testing.T) {
		today.beside = buildHelm(t)
		today.section(t, "With Helm")
		before[w.b].waitSame(t, w.b)
	})
}

// buildHelm returns the path of a folder with the helm program.
func buildHelm(t *testing.T) string {
	t.Helper()
	helm := filepath.Join(t.TempDir(), "helm")
	if out, err := exec.Command("go", "build", "-C", "../helm", "-o", helm, "helm.sh/helm/v4/cmd/helm").CombinedOutput(); err != nil {
		t.Skipf("Helm is not built: %v\n%s", err, out)
	}
	return filepath.Dir(helm)
}

// lifecycleWorld creates clusters with test pods and without Isthmus.
func lifecycleWorld(t *testing.T, old string) *world {
	t.Helper()
	ctx, dir := t.Context(), t.TempDir()
	image, err := kubenodes.ImageAs(fixture.program, newImage, filepath.Join(dir, "v1.tar"))
	must(t, err)
	images := []string{image}
	if old != "" {
		image, err = kubenodes.ImageAs(old, oldImage, filepath.Join(dir, "v0.tar"))
		must(t, err)
		images = append(images, image)
	}
	w, err := makeClusters(ctx, lifecyclePlan, images...)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, c := range w.set.Clusters {
				t.Log(c.Explain())
			}
		}
		if err := w.down(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range w.set.Clusters {
		must(t, startPods(ctx, c))
		var system corev1.Namespace
		must(t, c.Client.Get(ctx, client.ObjectKey{Name: metav1.NamespaceSystem}, &system))
		c.ID = string(system.UID) // the default cluster ID without --cluster-id
	}
	return w
}

// buildPrevious builds the program of the previous version from the repository's history.
func buildPrevious(ctx context.Context, dir string) (program string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "sh", "-ec", `git rev-parse --quiet --verify "$1^{commit}" >/dev/null
git -C ../.. archive "$1" | tar -x -C "$2"
CGO_ENABLED=0 go build -C "$2" -trimpath -ldflags="-s -w" -o "$2/bin/isthmus" ./cmd/isthmus`, "sh", previous, dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("commit %.7s: %w\n%s", previous, err, out)
	}
	return filepath.Join(dir, "bin", "isthmus"), nil
}

// waitPeered waits until the clusters are peered. From then on, the sniffer watches for packets in
// the clear.
func (w *world) waitPeered(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	must(t, w.a.WaitReady(ctx, w.b))
	must(t, w.b.WaitReady(ctx, w.a))
	must(t, w.a.Watch(ctx, w.sniffer, w.b))
	must(t, w.b.Watch(ctx, w.sniffer, w.a))
}

// endWatch ends the sniffer's watch. Call it before the peers' networks are released.
func (w *world) endWatch(t *testing.T) {
	t.Helper()
	w.noPlaintext(t)
	for _, c := range w.set.Clusters {
		w.sniffer.Watch(c.Cluster, lab.Watched{})
	}
}

// tooLong is the longest acceptable pause of a planned change, in seconds. After a longer pause,
// logs are printed.
const tooLong = 1.0

// checkLives checks that the connection survives a call of do, and that no packet is in the clear.
func (w *world) checkLives(t *testing.T, what string, do func()) {
	t.Helper()
	var events []func() string
	for _, c := range w.set.Clusters {
		events = append(events, c.Follow(t.Context()))
	}
	r := during(t, w, do)
	var timelines []string
	for _, list := range events {
		timelines = append(timelines, list())
	}
	if max(r.Pause, r.TCPPause) > tooLong {
		for _, p := range r.Pauses {
			t.Logf("%s, for %.2f s: no answers", p.Begin.Format("05.000"), p.Seconds)
		}
		for i, c := range w.set.Clusters {
			sh := w.set.Command(t.Context(), "kubectl", "--context", c.Name, "-n", kubenodes.Namespace, "logs", "-l", "app.kubernetes.io/part-of=isthmus", "--prefix", "--tail=40")
			out, _ := sh.CombinedOutput()
			t.Logf("%s:\n%s\n%s", c.Name, timelines[i], out)
		}
	}
	t.Logf("%s: %d of %d lost, %.2f s without answers in UDP, %.2f s in TCP, %d connections broken",
		what, r.Sent-r.Answered, r.Sent, r.Pause, r.TCPPause, r.Broken)
	if r.Broken > 0 {
		t.Errorf("%s: %d connections broken", what, r.Broken)
	}
	w.noPlaintext(t)
}

// upgrade first replaces the components of one cluster one by one, to test each new component
// beside old ones. Then it runs the commands of the page. As on the page, CRDs and RBAC objects
// come first, because they are compatible with both versions.
func (w *world) upgrade(t *testing.T, sh *shell) {
	t.Helper()
	sh.run(t, "kubectl --context oslo apply --server-side --force-conflicts -f deploy/crds -f deploy/rbac")
	for _, c := range []string{"daemonset/isthmus-route-agent route-agent", "deployment/isthmus-manager manager", "deployment/isthmus-gateway gateway"} {
		kind, container, _ := strings.Cut(c, " ")
		w.checkLives(t, "in oslo alone, new: "+container, func() {
			sh.run(t, fmt.Sprintf("kubectl --context oslo -n isthmus-system set image %s %s=%s", kind, container, newImage))
		})
	}
	w.checkLives(t, "upgrade of both", func() { w.checkManagersStay(t, sh, func() { sh.section(t, "Upgrade") }) })
}

// checkManagersStay checks that `isthmus diagnose` never reports a manager as broken while do runs.
func (w *world) checkManagersStay(t *testing.T, sh *shell, do func()) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	asked, blamed := 0, []string{}
	var group sync.WaitGroup
	defer func() {
		stop()
		group.Wait()
		if t.Logf("diagnose was asked %d times", asked); asked == 0 || len(blamed) > 0 {
			t.Errorf("diagnose, asked %d times, blamed managers: %q", asked, blamed)
		}
	}()
	group.Go(func() {
		for ctx.Err() == nil {
			out, _ := w.set.Command(ctx, sh.program, "diagnose", "--context", w.a.Name, "--remote-context", w.b.Name, "-o", "json").Output() // exit code 1 means that something is broken
			var d struct {
				Hops []struct{ Cluster, Hop, State, Text string }
			}
			if json.Unmarshal(out, &d) != nil {
				continue // the command was canceled
			}
			asked++
			for _, h := range d.Hops {
				if h.Hop == health.HopManager && h.State == string(health.Broken) {
					blamed = append(blamed, h.Cluster+": "+h.Text)
				}
			}
		}
	})
	do()
}

// A shell runs commands of the documents.
type shell struct {
	w       *world
	program string // path of isthmus
	beside  string // folder with further programs
}

// run runs a shell script in the repository's folder, in a network from which all API servers are
// reachable.
func (s *shell) run(t *testing.T, lines string) {
	t.Helper()
	cmd := s.w.set.Command(t.Context(), "sh", "-exc", "cd ../..\n"+lines)
	cmd.Env = append(cmd.Env, "PATH="+filepath.Dir(s.program)+":"+s.beside+":"+os.Getenv("PATH"))
	begin := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s\n%v\n%s", lines, err, out)
	}
	t.Logf("%.1f s: %s", time.Since(begin).Seconds(), strings.ReplaceAll(lines, "\n", "; "))
}

// section runs the commands of a chapter of docs/lifecycle.md. replace has pairs of an old and a
// new text.
func (s *shell) section(t *testing.T, name string, replace ...string) {
	t.Helper()
	s.run(t, strings.NewReplacer(replace...).Replace(chapter(t, "lifecycle.md", name)))
}

// chapter returns the commands of a chapter of a page in docs, one per line.
func chapter(t *testing.T, page, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", page))
	must(t, err)
	_, rest, found := strings.Cut(string(text), "\n## "+name+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	var lines strings.Builder
	for line := range strings.Lines(rest) {
		if command, ok := strings.CutPrefix(line, "    "); ok {
			lines.WriteString(command)
		}
	}
	if !found || lines.Len() == 0 {
		t.Fatalf("docs/%s has no commands for %s", page, name)
	}
	return lines.String()
}

// lineWith returns the line of a chapter that begins with a text.
func lineWith(t *testing.T, lines, begin string) string {
	t.Helper()
	for line := range strings.Lines(lines) {
		if strings.HasPrefix(line, begin) {
			return line
		}
	}
	t.Fatalf("no line begins with %q:\n%s", begin, lines)
	return ""
}

// A state is the set of a cluster's objects and of its nodes' network settings, each as a line of
// text.
type state map[string]bool

// changing lists kinds that the API server, its controllers and kubelets change all the time.
var changing = []string{"Event", "Lease", "EndpointSlice", "Endpoints", "ControllerRevision", "PodMetrics", "NodeMetrics"}

// commands print the network settings of a node, one per line.
var commands = []string{"ip -o link", "ip -o addr", "ip route show table all", "ip -6 route show table all", "ip rule", "ip -6 rule", "nft list ruleset", "iptables-save"}

// volatile matches text that differs between two outputs of an unchanged state: counters, times,
// device numbers, and the devices of pods.
var volatile = regexp.MustCompile(`counter packets \d+ bytes \d+|\[\d+:\d+\]|^\d+: |expires \S+|valid_lft.*|^#.*|@if\d+| state \w+|proto kernel|pref medium`)

func stateOf(t *testing.T, c *kubenodes.Cluster) state {
	t.Helper()
	all := state{}
	lists, err := discovery.NewDiscoveryClientForConfigOrDie(c.Config).ServerPreferredResources()
	must(t, err)
	objects := metadata.NewForConfigOrDie(c.Config)
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		must(t, err)
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") || slices.Contains(changing, r.Kind) {
				continue
			}
			found, err := objects.Resource(version.WithResource(r.Name)).List(t.Context(), metav1.ListOptions{})
			if err != nil {
				continue // the kind was just deleted
			}
			for _, o := range found.Items {
				all[fmt.Sprintf("object: %s %s/%s", r.Kind, o.Namespace, o.Name)] = true
			}
		}
	}
	for _, n := range c.Nodes {
		for _, command := range commands {
			args := strings.Fields(command)
			out, err := n.Command(t.Context(), args[0], args[1:]...).CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v\n%s", command, err, out)
			}
			for line := range strings.Lines(string(out)) {
				if !strings.Contains(line, "veth") {
					all[fmt.Sprintf("%s, %s: %s", n.Name, command, strings.Join(strings.Fields(volatile.ReplaceAllString(line, "")), " "))] = true
				}
			}
		}
	}
	return all
}

// waitSame waits until a cluster is in the same state as before.
func (before state) waitSame(t *testing.T, c *kubenodes.Cluster) {
	t.Helper()
	var left []string
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Second) {
		left = nil
		now := stateOf(t, c)
		for _, line := range slices.Sorted(maps.Keys(now)) {
			if !before[line] {
				left = append(left, "left: "+line)
			}
		}
		for _, line := range slices.Sorted(maps.Keys(before)) {
			if !now[line] {
				left = append(left, "gone: "+line)
			}
		}
		if left == nil {
			return
		}
	}
	t.Errorf("cluster %s is not as before:\n%s", c.Name, strings.Join(left, "\n"))
}
