package kubenodes

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// programs returns the folder of what nodes run, where it is built.
func programs(t *testing.T) string {
	t.Helper()
	if err := Available(); err != nil {
		t.Skip(err)
	}
	dir, err := kubetest.FindNodes()
	if err != nil {
		t.Skipf("kubelet and its like are not built ('make deps-nodes' does it): %v", err)
	}
	return dir
}

func TestNodesAreReadyAndNothingIsLeftOfThem(t *testing.T) {
	kube := programs(t)
	s, err := Up(t.Context(), Options{
		Spec: lab.Spec{Name: lab.UniqueName("kubenodes"), RPFilter: lab.RPFilterStrict, Clusters: lab.Clusters(1)},
		Kube: kube, Progress: t.Output(), Nodes: map[string]NodeOptions{"a": {Proxy: NFTables}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Clusters[0]
	if err := c.Nodes[0].Crash(); err != nil {
		t.Error(err)
	}
	if err := c.Nodes[0].Start(t.Context()); err != nil {
		t.Error(err)
	}
	if err := s.Down(); err != nil {
		t.Error(err)
	}
	assertGone(t, s)
}

func assertGone(t *testing.T, s *Set) {
	t.Helper()
	for _, path := range []string{s.dir, s.Lab.Dir} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	groups, err := groupNames()
	if err != nil {
		t.Error(err)
	}
	for _, g := range groups {
		if strings.HasPrefix(g, groupPrefix+s.Lab.Name+".") {
			t.Errorf("control group %s is left", g)
		}
	}
	processes, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Error(err)
	}
	for _, p := range processes {
		if env, err := os.ReadFile(p); err == nil && strings.Contains(string(env), "ISTHMUS_LAB="+s.Lab.Name+"\x00") {
			t.Errorf("process %s is left", filepath.Base(filepath.Dir(p)))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), s.Lab.Name) {
		t.Errorf("mounts are left: %v\n%s", err, mounts)
	}
}
