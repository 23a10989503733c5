package peering

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// A request is one request of the sweep.
type request struct{ verb, group, resource, namespace, name string }

func (r request) String() string {
	return fmt.Sprintf("%s %s.%s %s/%s", r.verb, r.resource, r.group, r.namespace, r.name)
}

// A right is a right that an identity must have. The tests list the rights independently of the
// manifests. An empty namespace or name matches any.
type right struct{ verbs, group, resources, namespace, name string }

func (r right) covers(q request) bool {
	return slices.Contains(strings.Fields(r.verbs), q.verb) && r.group == q.group && slices.Contains(strings.Fields(r.resources), q.resource) &&
		(r.namespace == "" || r.namespace == q.namespace) && (r.name == "" || r.name == q.name)
}

// commonRights are the rights that every identity has: to ask about itself.
var commonRights = []right{
	{"create", "authorization.k8s.io", "selfsubjectaccessreviews selfsubjectrulesreviews", "", ""},
	{"create", "authentication.k8s.io", "selfsubjectreviews", "", ""},
}

var verbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

// names are object names that the sweep tries, in addition to an arbitrary name.
var names = map[string][]string{
	"secrets": {"wireguard-pubkey", isthmus.DefaultIdentitySecret}, "serviceaccounts": {peerAccount, "default"}, "serviceaccounts/token": {peerAccount, "default"},
	"roles": {peerAccount, managerRole}, "rolebindings": {peerAccount, managerRole},
	"leases": {"isthmus-manager", "isthmus-gateway"}, "configmaps": {"kubeadm-config", isthmus.ConfigMapRootCA}, "namespaces": {"kube-system"}, "servicecidrs": {"kubernetes"}, "endpointslices": {"kubernetes"},
	"clusterroles": {"cluster-admin"}, "clusterrolebindings": {"cluster-admin"},
}

// try sends a request that changes nothing even if it is allowed. It reports whether RBAC
// allowed it.
func try(ctx context.Context, c *http.Client, host, version string, r request) (allowed bool, err error) {
	path := "/apis/" + r.group + "/" + version
	if r.group == "" {
		path = "/api/" + version
	}
	if r.namespace != "" {
		path += "/namespaces/" + r.namespace
	}
	resource, sub, _ := strings.Cut(r.resource, "/")
	path += "/" + resource
	query := url.Values{}
	if sub != "" || slices.Contains([]string{"get", "update", "patch", "delete"}, r.verb) {
		path += "/" + r.name
		if sub != "" {
			path += "/" + sub
		}
	} else if r.name != "" && r.verb != "create" {
		query.Set("fieldSelector", "metadata.name="+r.name)
	}
	if r.verb == "watch" {
		query.Set("watch", "1")
		query.Set("timeoutSeconds", "1")
	}
	method := map[string]string{"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE",
		"deletecollection": "DELETE"}[r.verb]
	body := ""
	if method == "POST" || method == "PUT" || method == "PATCH" {
		body = "{}"
	}
	req, err := http.NewRequestWithContext(ctx, method, host+path+"?"+query.Encode(), strings.NewReader(body))
	if err != nil {
		return false, err
	}
	req.Header.Set("Content-Type", "application/json")
	if method == "PATCH" {
		req.Header.Set("Content-Type", "application/merge-patch+json")
	}
	resp, err := c.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusUnauthorized {
		return false, fmt.Errorf("%v: %s", r, resp.Status)
	}
	if resp.StatusCode != http.StatusForbidden {
		return true, nil
	}
	text, err := io.ReadAll(resp.Body)
	return !strings.Contains(string(text), " cannot "), err
}

// sweep tries every verb on every resource of the API server, in the given namespaces and
// cluster-wide, and compares the allowed requests with rights.
func sweep(t *testing.T, admin *cluster.Cluster, config *rest.Config, namespaces []string, rights []right) {
	t.Helper()
	rights = append(rights, commonRights...)
	d, err := discovery.NewDiscoveryClientForConfig(admin.Config)
	must(t, err)
	_, lists, err := d.ServerGroupsAndResources()
	must(t, err)
	httpClient, err := rest.HTTPClientFor(config)
	must(t, err)
	defer httpClient.CloseIdleConnections()

	tried := maps.Clone(names)
	for _, r := range rights {
		for _, resource := range strings.Fields(r.resources) {
			if r.name != "" && !slices.Contains(tried[resource], r.name) {
				tried[resource] = append(slices.Clone(tried[resource]), r.name)
			}
		}
	}
	type attempt struct {
		request
		version string
	}
	var attempts []attempt
	used := make([]bool, len(rights))
	for _, l := range lists {
		group, version, ok := strings.Cut(l.GroupVersion, "/")
		if !ok {
			group, version = "", l.GroupVersion
		}
		for _, resource := range l.APIResources {
			scopes := []string{""}
			if resource.Namespaced {
				scopes = append(scopes, namespaces...)
			}
			for _, namespace := range scopes {
				for _, name := range append([]string{"sweep"}, tried[resource.Name]...) {
					for _, verb := range verbs {
						byName := slices.Contains([]string{"get", "update", "patch", "delete"}, verb) || strings.Contains(resource.Name, "/")
						if byName && resource.Namespaced && namespace == "" || verb == "create" && resource.Namespaced && namespace == "" {
							continue // the API has no such path
						}
						if strings.Contains(resource.Name, "/") && (verb == "list" || verb == "watch" || verb == "deletecollection") {
							continue
						}
						r := request{verb, group, resource.Name, namespace, name}
						if !byName && name == "sweep" {
							r.name = "" // the request is for all objects
						}
						attempts = append(attempts, attempt{r, version})
					}
				}
			}
		}
	}
	allowed := make([]bool, len(attempts))
	errs := make([]error, len(attempts))
	var group sync.WaitGroup
	limit := make(chan bool, 16)
	for i, a := range attempts {
		group.Go(func() {
			limit <- true
			defer func() { <-limit }()
			allowed[i], errs[i] = try(t.Context(), httpClient, config.Host, a.version, a.request)
		})
	}
	group.Wait()
	count := 0
	for i, a := range attempts {
		must(t, errs[i])
		want := false
		for j, r := range rights {
			if r.covers(a.request) {
				want, used[j] = true, true
			}
		}
		if allowed[i] {
			count++
		}
		if allowed[i] != want {
			t.Errorf("%v: allowed is %v, want %v", a.request, allowed[i], want)
		}
	}
	for j, r := range rights {
		if !used[j] {
			t.Errorf("%v was never tried", r)
		}
	}
	t.Logf("%d requests, %d of them allowed", len(attempts), count)
	for _, path := range []string{"/metrics", "/logs", "/debug/pprof/", "/configz"} {
		resp, err := httpClient.Get(config.Host + path)
		must(t, err)
		resp.Body.Close()
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("GET %s: %s", path, resp.Status)
		}
	}
}

func TestAPeersIdentityGrantsOnlyItsNetworkConfigs(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "rights")
	must(t, peerUp(t, p))
	here, there := p.B.Identity.TenantNamespace(), p.A.Identity.TenantNamespace()

	var secret corev1.Secret // the Secret in b with its identity at a
	must(t, p.B.Client.Get(t.Context(), client.ObjectKey{Namespace: there, Name: isthmus.DefaultIdentitySecret}, &secret))
	access, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[isthmus.SecretKubeconfig])
	must(t, err)
	access.QPS = -1
	sweep(t, p.A, access, []string{here, p.A.Namespace, "kube-system", "default"}, []right{
		{"list watch create", "net.liqo.io", "networkconfigs", here, ""},
		{"get update delete", "net.liqo.io", "networkconfigs", here, p.A.Identity.UniqueName()},
		{"create", "", "serviceaccounts/token", here, peerAccount},
		{"get", "", "configmaps", here, isthmus.ConfigMapRootCA},
	})

	// The peer may do its normal work.
	peer, err := clustertest.AsPeer(t.Context(), p.B, there)
	must(t, err)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: here, Name: peerAccount}}
	must(t, peer.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{}))
	mine := networkConfig(p.A, p.B)
	must(t, peer.Create(t.Context(), mine))
	mine.Spec.PodCIDR = "10.62.0.0/20"
	must(t, peer.Update(t.Context(), mine))
	mine.Status.Processed = true
	if err := peer.Status().Update(t.Context(), mine); !apierrors.IsForbidden(err) {
		t.Errorf("writes the answer itself: %v", err)
	}
	must(t, peer.Delete(t.Context(), mine))

	// Our original is in the same namespace, under another name.
	original := networkConfig(p.A, p.B)
	original.Name = p.B.Identity.UniqueName()
	must(t, p.A.Client.Create(t.Context(), original))
	for what, write := range map[string]func(*v1alpha1.NetworkConfig) error{
		"an update": func(nc *v1alpha1.NetworkConfig) error { return peer.Update(t.Context(), nc) },
		"a finalizer": func(nc *v1alpha1.NetworkConfig) error {
			return peer.Patch(t.Context(), nc, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/x"]}}`)))
		},
		"a deletion": func(nc *v1alpha1.NetworkConfig) error { return peer.Delete(t.Context(), nc) },
	} {
		if err := write(original.DeepCopy()); !apierrors.IsForbidden(err) {
			t.Errorf("%s of our original by the peer: %v", what, err)
		}
	}

	// A revoked identity must stop working within the time for which API servers cache tokens.
	must(t, p.A.Client.Delete(t.Context(), account))
	for begin := time.Now(); ; time.Sleep(200 * time.Millisecond) {
		if err := peer.List(t.Context(), &v1alpha1.NetworkConfigList{}, client.InNamespace(here)); apierrors.IsUnauthorized(err) {
			break
		}
		if time.Since(begin) > time.Minute { // usually 10 s, the API server's cache time
			t.Fatal("a revoked identity still works after a minute")
		}
	}
}

// accountConfig returns a configuration with a token of a component's ServiceAccount.
func accountConfig(t *testing.T, c *cluster.Cluster, namespace, account string) *rest.Config {
	t.Helper()
	token := &authenticationv1.TokenRequest{}
	must(t, c.Client.SubResource("token").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: account}}, token))
	config := rest.AnonymousClientConfig(c.Config)
	config.BearerToken = token.Status.Token
	return config
}

func TestComponentsHaveTheRightsTheyNeedAndNoOthers(t *testing.T) {
	t.Parallel()
	const home = deploy.Namespace
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	for _, tc := range []struct {
		account string
		rights  []right
	}{
		{deploy.ManagerServiceAccount, []right{
			{"list watch patch", "isthmus.net", "peerings", "", ""},
			{"patch", "isthmus.net", "peerings/status", "", ""},
			{"list watch create patch delete", "net.liqo.io", "networkconfigs tunnelendpoints natmappings", "", ""},
			{"patch", "net.liqo.io", "networkconfigs/status", "", ""},
			{"list watch create patch", "net.liqo.io", "ipamstorages", "", ""},
			{"list watch create patch", "isthmus.net", "networkallocations", "", ""},
			{"list watch", "", "nodes namespaces", "", ""},
			{"list", "", "pods services", "", ""},
			{"get", "", "namespaces", "", "kube-system"},
			{"list watch", "networking.k8s.io", "servicecidrs", "", ""},
			{"get", "discovery.k8s.io", "endpointslices", "", "kubernetes"},
			{"create patch", "events.k8s.io", "events", "", ""},
			{"list watch", "", "secrets", home, "wireguard-pubkey"},
			{"list watch", "isthmus.net", "nodenetworks", home, ""},
			{"list watch", "", "services", home, ""},
			{"list", "", "configmaps", home, ""},
			{"get", "", "configmaps", "kube-system", "kubeadm-config"},
			{"create", "coordination.k8s.io", "leases", home, ""},
			{"get update", "coordination.k8s.io", "leases", home, "isthmus-manager"},
			{"get", "coordination.k8s.io", "leases", home, "isthmus-gateway"},
		}},
		{deploy.GatewayServiceAccount, []right{
			{"list watch", "net.liqo.io", "tunnelendpoints natmappings", "", ""},
			{"list watch", "isthmus.net", "networkallocations", "", ""},
			{"patch", "net.liqo.io", "tunnelendpoints/status", "", ""},
			{"list watch", "", "nodes", "", ""},
			{"list watch", "discovery.k8s.io", "endpointslices", "", "kubernetes"},
			{"get", "", "namespaces", "", "kube-system"},
			{"create", "", "secrets", home, ""},
			{"list watch patch", "", "secrets", home, "wireguard-pubkey"},
			{"list", "", "configmaps", home, ""},
			{"list watch", "", "pods", "", ""},
			{"list watch patch", "", "pods services", home, ""},
			{"list watch", "isthmus.net", "nodenetworks", home, ""},
			{"create", "coordination.k8s.io", "leases", home, ""},
			{"get list watch update", "coordination.k8s.io", "leases", home, "isthmus-gateway"},
			{"create patch", "events.k8s.io", "events", home, ""},
		}},
		{deploy.RouteAgentServiceAccount, []right{
			{"list watch", "net.liqo.io", "tunnelendpoints", "", ""},
			{"list watch", "isthmus.net", "networkallocations", "", ""},
			{"list watch", "", "nodes", "", ""},
			{"list watch", "", "pods", "", ""},
			{"create patch", "isthmus.net", "nodenetworks", home, ""},
			{"create patch", "events.k8s.io", "events", home, ""},
			{"list watch", "", "services", home, ""},
		}},
	} {
		t.Run(tc.account, func(t *testing.T) {
			rights := slices.DeleteFunc(tc.rights, func(r right) bool { return r.resources == "servicecidrs" && !clustertest.ServesServiceCIDRs(t, c) })
			sweep(t, c, accountConfig(t, c, home, tc.account), []string{home, "kube-system", "default"}, rights)
		})
	}
}

func TestTheManagerMayReadOnlyItsIdentitySecret(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "keys")
	must(t, p.A.Client.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: p.A.Namespace, Name: deploy.ManagerServiceAccount}}))
	must(t, peerUp(t, p))
	here := p.B.Identity.TenantNamespace()
	config := accountConfig(t, p.A, p.A.Namespace, deploy.ManagerServiceAccount)
	manager, err := client.New(config, client.Options{Scheme: p.A.Client.Scheme(), Mapper: p.A.Client.RESTMapper()})
	must(t, err)
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // the new binding takes a moment to become effective
		err := manager.List(t.Context(), &corev1.SecretList{}, client.InNamespace(here), client.MatchingFields{"metadata.name": isthmus.DefaultIdentitySecret})
		if err == nil {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal(err)
		}
	}
	sweep(t, p.A, config, []string{here, p.A.Namespace, deploy.Namespace}, []right{
		{"list watch patch", "", "secrets", here, isthmus.DefaultIdentitySecret},
	})
}
