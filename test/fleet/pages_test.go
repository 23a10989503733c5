package fleet

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/pages"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

// chapterOf returns the commands in a chapter of a page.
func chapterOf(t *testing.T, page, chapter string) (lines []string) {
	t.Helper()
	all, err := pages.Of("../../" + page)
	must(t, err)
	for _, c := range all {
		if c.Chapter == chapter {
			lines = append(lines, c.Text)
		}
	}
	if len(lines) == 0 {
		t.Fatalf("%s has no commands under %q", page, chapter)
	}
	return lines
}

// createPod creates a Pod object with a name that the pages use.
func (s *troubleSite) createPod(t *testing.T, c *fleet.Cluster, namespace, name string, at *lab.Pod) {
	t.Helper()
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: object("", namespace)}))
	must(t, c.Client.Delete(t.Context(), &corev1.Pod{ObjectMeta: object(metav1.NamespaceDefault, at.Name)}))
	pod := &corev1.Pod{ObjectMeta: object(namespace, name), Spec: corev1.PodSpec{NodeName: at.Node.Name,
		AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "main", Image: "x"}}}}
	must(t, c.Client.Create(t.Context(), pod))
	pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: at.Addr.String(), PodIPs: []corev1.PodIP{{IP: at.Addr.String()}}}
	must(t, c.Client.Status().Update(t.Context(), pod))
}

// elsewhere lists prefixes of commands that need containers. test/nodes runs these commands.
var elsewhere = []string{"isthmus install ", "isthmus verify ", "isthmus uninstall ", "kubectl "}

// The commands for clusters in README.md and docs/troubleshooting.md work on two clusters with
// the names that the pages use.
func TestCommandsOfThePagesWorkOnClusters(t *testing.T) {
	spec := lab.Spec{Clusters: []lab.ClusterSpec{clusterSpec("10.244.0.0/16", 1), clusterSpec("10.244.0.0/16", 2)}}
	spec.Clusters[0].Name, spec.Clusters[1].Name = "paris", "oslo"
	f := up(t, spec)
	s := &troubleSite{Fleet: f, a: f.Clusters[0], b: f.Clusters[1]}
	s.createPod(t, s.a, "shop", "web-0", s.a.Pods[0])
	s.createPod(t, s.b, "db", "postgres-0", s.b.Pods[0])
	lines := chapterOf(t, "README.md", "Use it on clusters")
	apart := slices.IndexFunc(lines, func(line string) bool { return strings.HasPrefix(line, "isthmus unpeer ") })
	if apart < 0 {
		t.Fatal("nobody is told how to un-peer")
	}
	lines = slices.Concat(lines[:apart], chapterOf(t, "docs/troubleshooting.md", "Troubleshooting"), lines[apart:])
	dir := t.TempDir()
	run := func(args []string) error {
		cmd := f.Command(t.Context(), binary, args...)
		cmd.Dir = dir // isthmus gather writes an archive there
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	}
	for _, line := range lines {
		args := strings.Fields(line)
		switch {
		case slices.ContainsFunc(elsewhere, func(begin string) bool { return strings.HasPrefix(line, begin) }):
			continue
		case args[1] == "peer":
			args = append(args, "--timeout", patience.String(), "--request-timeout", "1m")
		}
		switch args[1] {
		case "status", "diagnose", "trace": // retry, because each agent applies the peering at a different time
			eventually(t, line, func() error { return run(args[1:]) })
		default:
			if err := run(args[1:]); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
		}
		if args[1] == "peer" {
			waitReady(t, s.a, s.b)
		}
	}
	if archives, _ := filepath.Glob(filepath.Join(dir, "isthmus-gather-*.tar.gz")); len(archives) != 1 {
		t.Errorf("archives of isthmus gather: %v", archives)
	}
}

// The commands for machines without Kubernetes work with the gateway.yaml on the page.
func TestCommandsOfThePagesWorkWithoutKubernetes(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	t.Parallel()
	lines := chapterOf(t, "README.md", "Use it without Kubernetes")
	readme, err := os.ReadFile("../../README.md")
	must(t, err)
	_, rest, _ := strings.Cut(string(readme), "```yaml\n")
	config, _, found := strings.Cut(rest, "```")
	if len(lines) != 5 || !found {
		t.Fatalf("another page than this test knows: %q", lines)
	}
	programs, dir, name := t.TempDir(), t.TempDir(), lab.UniqueName("pages")
	must(t, testbin.Build(programs, "isthmus", "isthmus-lab"))
	must(t, os.Mkdir(filepath.Join(dir, "a"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "a", "gateway.yaml"), []byte(config), 0o644))
	shell := func(line string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "sh", "-ec", line)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"))
		return cmd
	}
	run := func(line string) {
		t.Helper()
		if out, err := shell(line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	inLab := func(line string) string { // adds the name of this test's lab
		words := strings.Fields(line)
		return strings.Join(slices.Insert(words, 2, "--name", name), " ")
	}
	steps := strings.Split(lines[4], "; ") // the first step starts the lab, the last one removes it
	run(inLab(steps[0]))
	t.Cleanup(func() {
		cmd := exec.Command(filepath.Join(programs, "isthmus-lab"), "down", "--name", name)
		if out, err := cmd.CombinedOutput(); err != nil && !strings.Contains(string(out), "is not up") {
			t.Errorf("%v\n%s", err, out)
		}
	})
	for _, step := range steps[1 : len(steps)-1] {
		eventually(t, step, func() error { // until the gateways have connected
			if out, err := shell(inLab(step)).CombinedOutput(); err != nil {
				return fmt.Errorf("%w\n%s", err, out)
			}
			return nil
		})
	}
	run(inLab("isthmus-lab exec a-node1 -- " + lines[3]))

	run(lines[0])
	gateway := shell("exec " + inLab("isthmus-lab exec a-onprem -- "+lines[1]))
	var said bytes.Buffer
	gateway.Stdout, gateway.Stderr = &said, &said
	gateway.Cancel = func() error { return gateway.Process.Signal(syscall.SIGTERM) }
	must(t, gateway.Start())
	ended := make(chan error, 1)
	go func() { ended <- gateway.Wait() }()
	eventually(t, lines[2], func() error {
		out, err := shell(inLab("isthmus-lab exec a-onprem -- " + lines[2])).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		return nil
	})
	must(t, gateway.Process.Signal(syscall.SIGTERM))
	if err := <-ended; err != nil {
		t.Errorf("%s: %v\n%s", lines[1], err, said.String())
	}
	run(inLab(steps[len(steps)-1]))
}
