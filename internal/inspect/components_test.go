package inspect

import (
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/cluster"
)

func TestMissingRightsNameTheInstallCommand(t *testing.T) {
	c := &cluster.Cluster{Context: "paris"}
	if got := repairCommand(c, ""); got != "`isthmus install --context paris`" {
		t.Errorf("without Helm: %s", got)
	}
	if got := repairCommand(c, "mine"); !strings.HasPrefix(got, "`helm upgrade mine`") {
		t.Errorf("with Helm: %s", got)
	}
}

// The rights that status checks are the rights that the manifests grant, for each account and
// scope, and for the object names of each rule.
func TestCheckedRightsMatchTheManifests(t *testing.T) {
	all, err := needs("elsewhere")
	if err != nil {
		t.Fatal(err)
	}
	requested := make(map[string]bool)
	for _, n := range all {
		requested[n.String()] = true
	}
	for _, want := range []string{
		"isthmus-gateway is not allowed to patch pods in elsewhere", "isthmus-gateway is not allowed to watch tunnelendpoints.net.liqo.io",
		"isthmus-gateway is not allowed to update leases.coordination.k8s.io isthmus-gateway in elsewhere",
		"isthmus-gateway is not allowed to patch tunnelendpoints/status.net.liqo.io", "isthmus-route-agent is not allowed to list nodes",
		"isthmus-manager is not allowed to get configmaps kubeadm-config in kube-system",
	} {
		if !requested[want] {
			t.Errorf("nobody asks whether %s", want)
		}
	}
	for text := range requested {
		if strings.Contains(text, "events") {
			t.Errorf("a fault that is none: %s", text)
		}
	}
}
