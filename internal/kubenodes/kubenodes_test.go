package kubenodes

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

var must = expect.NoError

// programs returns the folder of the nodes' programs, which it builds if necessary.
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

func TestNodesBecomeReadyAndLeaveNothingBehind(t *testing.T) {
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
	assertRemoved(t, s)
}

func TestPodsResolveNames(t *testing.T) {
	kube := programs(t)
	dns, err := CoreDNS(t.Context(), t.TempDir())
	must(t, err)
	s, err := Up(t.Context(), Options{
		Spec: lab.Spec{Name: lab.UniqueName("kubenodes"), RPFilter: lab.RPFilterStrict, Clusters: []lab.ClusterSpec{{Name: "a", PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), Nodes: 1}}},
		Kube: kube, Progress: t.Output(), DNS: dns,
	})
	must(t, err)
	defer func() { must(t, s.Down()) }()
	c := s.Clusters[0]
	must(t, c.Apply(t.Context(), fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: server, namespace: default, labels: {app: server}}
spec: {containers: [{name: server, image: %[1]s, args: [serve, "7000"], readinessProbe: {httpGet: {path: /, port: 7000}, periodSeconds: 1}}]}
---
apiVersion: v1
kind: Service
metadata: {name: named, namespace: default}
spec: {selector: {app: server}, ports: [{port: 7000}]}
`, TestImage)))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var last error
	if wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if last = c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "server"}, &p); last != nil || p.Status.PodIP == "" {
			return false, nil //nolint:nilerr // continue to wait; a timeout reports this error
		}
		transport := &http.Transport{DisableKeepAlives: true, DialContext: c.Nodes[0].Dial}
		for _, name := range []string{"named", "named.default.svc.cluster.local"} {
			var resp *http.Response
			if resp, last = (&http.Client{Transport: transport}).Get("http://" + p.Status.PodIP + ":7000/fetch?url=http://" + name + ":7000/octets?n=10"); last != nil {
				return false, nil //nolint:nilerr // see above
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if last = fmt.Errorf("%s: %s", resp.Status, text); resp.StatusCode != http.StatusOK || !strings.Contains(string(text), `"octets":10`) {
				return false, nil
			}
		}
		return true, nil
	}) != nil {
		t.Errorf("%v\n%s", last, c.Explain())
	}
}

func assertRemoved(t *testing.T, s *Set) {
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
