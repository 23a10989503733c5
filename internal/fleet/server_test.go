package fleet

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

func TestControlPlanesRunInsideTheLab(t *testing.T) {
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	kube, err := kubetest.Build(t.Context(), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("fleet"), Clusters: []lab.ClusterSpec{{Control: true, Nodes: 2}}})
	if err != nil {
		t.Fatal(err)
	}
	f := newFleet(l, Options{})
	t.Cleanup(func() {
		if err := f.Down(); err != nil {
			t.Error(err)
		}
	})
	c := f.Clusters[0]
	if err := c.startServer(t.Context(), kube, false); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := c.Table(t.Context(), &out, "/api/v1/namespaces", false); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); !strings.HasPrefix(got, "NAME") || !strings.Contains(got, "kube-system") {
		t.Errorf("namespaces:\n%s", got)
	}
}
