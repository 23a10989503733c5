package fleet

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// unused lists permissions that the fleet does not use, with the reason why a component has them.
var unused = map[string]string{
	"isthmus-manager: update peerings/finalizers.isthmus.net":              "asked for by the admission plugin OwnerReferencesPermissionEnforcement, as on OpenShift",
	"isthmus-manager: update networkconfigs/finalizers.net.liqo.io":        "the same",
	"isthmus-manager: update foreignclusters/finalizers.discovery.liqo.io": "the same, with Liqo's control plane",
	"isthmus-manager: list foreignclusters.discovery.liqo.io":              "with Liqo's control plane: TestIsthmusPeersWithImitatedLiqo in test/control",
	"isthmus-manager: watch foreignclusters.discovery.liqo.io":             "the same",
	"isthmus-manager: get namespaces":                                      "where no ConfigMap says who the cluster is: TestIdentifyPrefersFlagsThenConfigMapThenKubeSystem in package manager",
	"isthmus-manager: get configmaps":                                      "without --pod-cidr: TestClusterNetworksAreDetected in package manager/facts",
	"isthmus-manager: create secrets":                                      "asked for where the Secret of the preshared keys is applied and not there, which is a patch",
	"isthmus-manager: patch networkallocations.isthmus.net":                "when networks are replaced, or a day after their release: TestReleasedNetworksAreHeldForADay in package manager",
	"isthmus-manager: patch events.events.k8s.io":                          "when an Event is told again after minutes",
	"isthmus-gateway: create events.events.k8s.io":                         "when something keeps it from working: TestDiagnoseNamesEachFault",
	"isthmus-gateway: patch events.events.k8s.io":                          "the same, told again",
	"isthmus-route-agent: create events.events.k8s.io":                     "when something keeps it from working: TestDiagnoseNamesEachFault",
	"isthmus-route-agent: patch events.events.k8s.io":                      "the same, told again",
	"isthmus-gateway: get namespaces":                                      "where no ConfigMap says who the cluster is",
	"isthmus-gateway: patch secrets":                                       "when the number of tunnels changes: TestPeersUseTheSmallerNumberOfTunnels",
	"isthmus-peer: create serviceaccounts/token":                           "when a tenth of a token's life is over: TestAPeersTokensAreBoundToThisClusterAndExpire in internal/peering",
}

// TestComponentsUseAllTheirPermissions exercises a fleet and compares the API requests of its
// components with the permissions in deploy/rbac and those that `isthmus peer` grants. An unused
// permission only helps an attacker who controls the component.
func TestComponentsUseAllTheirPermissions(t *testing.T) {
	f := upWith(t, fleet.Options{Audit: true, Spec: lab.Spec{Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 2)), clusterSpec("10.244.64.0/19", 2),
	}}})
	a, b := f.Clusters[0], f.Clusters[1]
	peer(t, f, a, b)
	mappedEndpoint(t, b, a)
	podsToPods(t, a, b)
	rights := granted(t, a)
	// Another gateway and another manager take over, and the manager publishes a change.
	was := active(t, a)
	must(t, a.Kill(fleet.Gateway(was)))
	eventually(t, "the other gateway", func() error {
		if i, err := a.ActiveGateway(t.Context()); err != nil || i == was {
			return fmt.Errorf("gateway %d: %w", i, err)
		}
		return nil
	})
	must(t, a.Start(t.Context(), fleet.Gateway(was)))
	must(t, a.Kill(fleet.Manager))
	must(t, a.Start(t.Context(), fleet.Manager))
	waitReady(t, a, b)
	var service corev1.Service
	must(t, b.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "isthmus-gateway"}, &service))
	must(t, b.Client.Patch(t.Context(), &service, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"liqo.io/override-port":"5899"}}}`))))
	eventually(t, "the port that b publishes", func() error {
		var list v1alpha1.TunnelEndpointList
		err := a.Client.List(t.Context(), &list)
		if err == nil && (len(list.Items) != 1 || list.Items[0].Spec.BackendConfig["port"] != "5899") {
			err = fmt.Errorf("%+v", list.Items)
		}
		return err
	})
	isthmus(t, f, "unpeer", "--context", a.Name, "--remote-context", b.Name)

	asked := map[string]bool{}
	log, err := os.Open(a.AuditLog())
	must(t, err)
	defer log.Close()
	for lines := bufio.NewReader(log); ; {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			break // ignore an incomplete last line
		}
		var event struct {
			Verb           string
			RequestURI     string
			User           struct{ Username string }
			ObjectRef      struct{ APIGroup, Resource, Subresource, Namespace, Name string }
			ResponseStatus struct{ Code int }
		}
		must(t, json.Unmarshal(line, &event))
		account := event.User.Username[strings.LastIndexByte(event.User.Username, ':')+1:]
		right := rightOf(account, event.Verb, event.ObjectRef.APIGroup, event.ObjectRef.Resource, event.ObjectRef.Subresource)
		switch code := event.ResponseStatus.Code; {
		case code == http.StatusForbidden || code == http.StatusUnauthorized:
			t.Logf("%d: %s %s/%s", code, right, event.ObjectRef.Namespace, event.ObjectRef.Name)
			continue
		case strings.Contains(event.RequestURI, "sendInitialEvents=true"): // a watch that includes the list
			asked[strings.Replace(right, ": watch ", ": list ", 1)] = true
		}
		asked[right] = true
	}
	for _, right := range rights {
		why, known := unused[right]
		switch {
		case !asked[right] && !known:
			t.Errorf("nobody uses the right %s", right)
		case asked[right] && known:
			t.Logf("the right %s was used this time: %s", right, why)
		}
	}
	for right := range unused {
		if !slices.Contains(rights, right) {
			t.Errorf("there is no right %s", right)
		}
	}
}

func rightOf(account, verb, group, resource, sub string) string {
	if sub != "" {
		resource += "/" + sub
	}
	if group != "" {
		resource += "." + group
	}
	return account + ": " + verb + " " + resource
}

// granted lists the permissions in the manifests, and those of the peer in a cluster.
func granted(t *testing.T, c *fleet.Cluster) (rights []string) {
	t.Helper()
	add := func(account string, rules []rbacv1.PolicyRule) {
		for _, r := range rules {
			for _, group := range r.APIGroups {
				for _, resource := range r.Resources {
					for _, verb := range r.Verbs {
						name, sub, _ := strings.Cut(resource, "/")
						if right := rightOf(account, verb, group, name, sub); !slices.Contains(rights, right) {
							rights = append(rights, right)
						}
					}
				}
			}
		}
	}
	files, err := fs.Glob(deploy.Files, "rbac/*.yaml")
	must(t, err)
	for _, file := range files {
		text, err := fs.ReadFile(deploy.Files, file)
		must(t, err)
		for document := range strings.SplitSeq(string(text), "\n---\n") {
			var role rbacv1.ClusterRole // a Role has the same fields
			must(t, yaml.Unmarshal([]byte(document), &role))
			if strings.HasSuffix(role.Kind, "Role") {
				add(role.Name, role.Rules)
			}
		}
	}
	var roles rbacv1.RoleList
	must(t, c.Client.List(t.Context(), &roles, client.MatchingLabels{"app.kubernetes.io/managed-by": "isthmus"}))
	for i := range roles.Items {
		account := roles.Items[i].Name
		if account == "isthmus-manager-identity" {
			account = deploy.ManagerServiceAccount
		}
		add(account, roles.Items[i].Rules)
	}
	return rights
}
