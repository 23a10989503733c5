package kubetest

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// repository creates a module with a small program in place of Kubernetes, and changes the
// working directory to it.
func repository(t *testing.T, mainGo string) (root string) {
	t.Helper()
	root = t.TempDir()
	for name, content := range map[string]string{
		"go.mod":           "module github.com/isthmus-net/isthmus\n",
		"test/go.mod":      "module github.com/isthmus-net/isthmus/test\n",
		"test/kube/go.mod": "module kube\n\ngo 1.26.0\n\nexclude (\n\tk8s.io/kubernetes v1.2.3\n)\n",
		"test/kube/go.sum": "", "test/kube/main.go": mainGo,
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(binEnv, "")
	t.Chdir(filepath.Join(root, "test", "kube")) // a nested module's folder: the main module is found in a parent folder
	return root
}

const hello = "package main\n\nimport \"os\"\n\nvar version string\n\nfunc main() { os.Stdout.WriteString(os.Args[0] + version) }\n"

// leftovers returns the files in bin/ that a failed build must not leave: all except the lock.
func leftovers(t *testing.T, root string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(root, "bin"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != "kube.lock" {
			names = append(names, e.Name())
		}
	}
	return names
}

func TestConcurrentCallsBuildOnlyOnce(t *testing.T) {
	root := repository(t, hello)
	abandoned := filepath.Join(root, "bin", ".kube-1234") // folder of a killed build
	if err := os.MkdirAll(abandoned, 0o755); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	dirs, progress := make([]string, 4), make([]bytes.Buffer, 4)
	for i := range dirs {
		wg.Go(func() {
			var err error
			if dirs[i], err = Build(t.Context(), &progress[i]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	builds := 0
	for i := range dirs {
		if dirs[i] != dirs[0] {
			t.Errorf("folders %s and %s", dirs[0], dirs[i])
		}
		builds += strings.Count(progress[i].String(), "building")
	}
	if builds != 1 {
		t.Errorf("%d builds, want 1", builds)
	}
	if name := filepath.Base(dirs[0]); !strings.HasPrefix(name, "kube-v1.2.3-") || filepath.Dir(dirs[0]) != filepath.Join(root, "bin") {
		t.Errorf("folder %s", dirs[0])
	}
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager"} {
		path := filepath.Join(dirs[0], name)
		if out, err := exec.Command(path).Output(); err != nil || string(out) != path {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
	if left := leftovers(t, root); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}

	var again bytes.Buffer
	before, err := os.Stat(dirs[0])
	if err != nil {
		t.Fatal(err)
	}
	if dir, err := Build(t.Context(), &again); err != nil || dir != dirs[0] || again.Len() > 0 {
		t.Errorf("again: %s, %v, %q", dir, err, &again)
	}
	if after, err := os.Stat(dirs[0]); err != nil || !os.SameFile(before, after) || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("nothing to build, and it was built: %v, %v", after, err)
	}

	if err := os.WriteFile(filepath.Join(root, "test/kube/main.go"), []byte(hello+"// changed\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if dir, err := Build(t.Context(), &again); err != nil || dir == dirs[0] {
		t.Errorf("after a change: %s, %v", dir, err)
	}
}

func TestFailedBuildReportsReasonAndLeavesNothing(t *testing.T) {
	root := repository(t, "package main\n\nfunc main() { undefinedThing() }\n")
	_, err := Build(t.Context(), new(bytes.Buffer))
	if err == nil || !strings.Contains(err.Error(), "main.go:3:15: undefined: undefinedThing") {
		t.Errorf("error: %v", err)
	}
	if left := leftovers(t, root); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestBuildStopsWhenContextIsCanceled(t *testing.T) {
	root := repository(t, hello)
	unlock, err := lock(t.Context(), filepath.Join(mkdir(t, root, "bin"), "kube.lock"), new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	progress := hookBuffer{hook: cancel} // Build reports that it waits
	if _, err := Build(ctx, &progress); !errors.Is(err, context.Canceled) || !strings.Contains(progress.String(), "waiting") {
		t.Errorf("while another builds: %v, %q", err, progress.String())
	}
	unlock()
	if _, err := Build(ctx, &progress); !errors.Is(err, context.Canceled) {
		t.Errorf("while it builds: %v", err)
	}
	if left := leftovers(t, root); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// hookBuffer records the text written to it, and calls hook after each write.
type hookBuffer struct {
	bytes.Buffer
	hook func()
}

func (s *hookBuffer) Write(b []byte) (int, error) {
	defer s.hook()
	return s.Buffer.Write(b)
}

func mkdir(t *testing.T, elem ...string) string {
	t.Helper()
	dir := filepath.Join(elem...)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestExistingFolderReplacesBuild(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(binEnv, dir)
	t.Chdir(dir)
	if _, err := Build(t.Context(), new(bytes.Buffer)); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "etcd") {
		t.Errorf("an empty folder: %v", err)
	}
	for _, name := range programs {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Build(t.Context(), new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), "not a program") {
		t.Errorf("files that are no programs: %v", err)
	}
	for _, name := range programs {
		if err := os.Chmod(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := Build(t.Context(), new(bytes.Buffer)); err != nil || got != dir {
		t.Errorf("%s, %v", got, err)
	}
	t.Setenv(binEnv, "")
	if _, err := Build(t.Context(), new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), binEnv) {
		t.Errorf("outside the repository: %v", err)
	}
}
