package peering

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// boundedClient returns a client with b's identity at a. It waits until the rights and the
// admission policies of b are effective.
func boundedClient(t *testing.T, p *clustertest.Pair) client.Client {
	t.Helper()
	must(t, peerUp(t, p))
	peer, err := clustertest.AsPeer(t.Context(), p.B, p.A.Identity.TenantNamespace())
	must(t, err)
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		stray := networkConfig(p.A, p.B)
		stray.Name = "stray"
		good := peer.Create(t.Context(), networkConfig(p.A, p.B), client.DryRunAll)
		bad := peer.Create(t.Context(), stray, client.DryRunAll)
		if good == nil && bad != nil {
			return peer
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatalf("a peer's own: %v; another one: %v", good, bad)
		}
	}
}

func TestAPeerMayWriteOnlyItsOwnBoundedObject(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "room")
	peer := boundedClient(t, p)
	many := func(n int, key, value string) map[string]string {
		m := map[string]string{}
		for i := range n {
			m[fmt.Sprintf(key, i)] = value
		}
		return m
	}
	for _, tc := range []struct {
		name   string
		change func(*v1alpha1.NetworkConfig)
		want   string // part of the error; empty: the object is accepted
	}{
		{"what a manager writes", func(*v1alpha1.NetworkConfig) {}, ""},
		{"annotations of the original", func(nc *v1alpha1.NetworkConfig) {
			nc.Annotations = many(8, "example.com/a%d", strings.Repeat("v", 512))
		}, ""},
		{"another name", func(nc *v1alpha1.NetworkConfig) { nc.Name = "another" }, "its name is not another"},
		{"a name that the server makes", func(nc *v1alpha1.NetworkConfig) { nc.Name, nc.GenerateName = "", "another-" }, "its name is not another-"},
		{"the name of our original", func(nc *v1alpha1.NetworkConfig) { nc.Name = p.B.Identity.UniqueName() }, "its name is not " + p.B.Identity.UniqueName()},
		{"an original", func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelReplication] = "true" }, "liqo.io/replication must be false"},
		{"no label of a copy", func(nc *v1alpha1.NetworkConfig) { delete(nc.Labels, v1alpha1.LabelReplication) }, "liqo.io/replication must be false"},
		{"no labels", func(nc *v1alpha1.NetworkConfig) { nc.Labels = nil }, "liqo.io/replication must be false"},
		{"another cluster's", func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelOriginID] = p.A.Identity.ClusterID }, "liqo.io/originID must be"},
		{"nobody's", func(nc *v1alpha1.NetworkConfig) { delete(nc.Labels, v1alpha1.LabelOriginID) }, "liqo.io/originID must be"},
		{"a finalizer", func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = []string{"example.com/x"} }, "must not set or remove finalizers"},
		{"our finalizer", func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = []string{v1alpha1.FinalizerReplicator} }, "must not set or remove finalizers"},
		{"an owner", func(nc *v1alpha1.NetworkConfig) {
			nc.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "x"}}
		}, "must not set or remove ownerReferences"},
		{"a foreign label", func(nc *v1alpha1.NetworkConfig) { nc.Labels["app"] = "x" }, "must not set or remove labels"},
		{"a label of originals", func(nc *v1alpha1.NetworkConfig) {
			nc.Labels[v1alpha1.LabelOwnership] = v1alpha1.OwnershipNetworkConfigCreator
		}, "must not set or remove labels"},
		{"9 annotations", func(nc *v1alpha1.NetworkConfig) { nc.Annotations = many(9, "a%d", "") }, "at most 8 annotations"},
		{"a long annotation", func(nc *v1alpha1.NetworkConfig) { nc.Annotations = many(1, "a%d", strings.Repeat("v", 513)) }, "at most 8 annotations"},
		{"a long name of an annotation", func(nc *v1alpha1.NetworkConfig) { nc.Annotations = many(1, strings.Repeat("p", 120)+"/1234567%d", "") }, "at most 8 annotations"},
		{"managed fields that are not there", func(nc *v1alpha1.NetworkConfig) { nc.ManagedFields = managedFields(1, strings.Repeat("x", 1<<20)) }, "managedFields must have at most"},
		{"many of them", func(nc *v1alpha1.NetworkConfig) { nc.ManagedFields = managedFields(2000, "x") }, "managedFields must have at most"},
		{"a great value", func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["x"] = strings.Repeat("v", 1025) }, "Too long"},
		{"a great key", func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig[strings.Repeat("k", 64)] = "" }, "keys must have 1 to 63 characters"},
	} {
		nc := networkConfig(p.A, p.B)
		tc.change(nc)
		err := peer.Create(t.Context(), nc, client.DryRunAll)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
	for i := range 20 {
		nc := networkConfig(p.A, p.B)
		nc.Name = fmt.Sprintf("one-of-many-%d", i)
		if err := peer.Create(t.Context(), nc); err == nil {
			t.Errorf("%s was created", nc.Name)
		}
	}

	// An update is checked like a creation, and the peer cannot change the finalizers that we
	// set.
	mine := networkConfig(p.A, p.B)
	must(t, peer.Create(t.Context(), mine))
	mine.Finalizers = []string{v1alpha1.FinalizerTunnelEndpointCreator}
	must(t, p.A.Client.Update(t.Context(), mine))
	for name, change := range map[string]func(*v1alpha1.NetworkConfig){
		"another finalizer": func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = append(nc.Finalizers, "example.com/x") },
		"ours removed":      func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = nil },
		"relabelled":        func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelReplication] = "true" },
		"9 annotations":     func(nc *v1alpha1.NetworkConfig) { nc.Annotations = many(9, "a%d", "") },
	} {
		nc := mine.DeepCopy()
		change(nc)
		if err := peer.Update(t.Context(), nc); !apierrors.IsForbidden(err) && !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The object stays small even with the largest permitted content and many field managers.
	key := client.ObjectKeyFromObject(mine)
	for i := range 40 {
		must(t, peer.Get(t.Context(), key, mine))
		mine.Annotations = many(8, strings.Repeat("p", 100)+"/"+strings.Repeat("a", 26)+"%d", strings.Repeat("v", 512))
		maps.Copy(mine.Spec.BackendConfig, many(13, strings.Repeat("k", 61)+"%02d", strings.Repeat("v", 1024)))
		mine.Spec.BackendConfig["x"] = fmt.Sprint(i) // each field manager owns a change
		must(t, peer.Update(t.Context(), mine, client.FieldOwner(fmt.Sprintf("%0120d", i))))
	}
	must(t, p.A.Client.Get(t.Context(), key, mine))
	text, err := json.Marshal(mine)
	must(t, err)
	if t.Logf("the greatest object: %d bytes, %d field managers", len(text), len(mine.ManagedFields)); len(text) > 64<<10 {
		t.Errorf("%d bytes", len(text))
	}

	// Labels and annotations that our own tools set on the copy prevent no update, and the peer
	// cannot change them.
	must(t, p.A.Client.Get(t.Context(), key, mine))
	maps.Copy(mine.Labels, many(20, "app.example.com/l%d", "v"))
	mine.Annotations = many(20, "example.com/a%d", strings.Repeat("v", 600))
	owner := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: mine.Namespace, Name: "owner"}} // without an owner that exists, the garbage collector would delete the object
	must(t, p.A.Client.Create(t.Context(), owner))
	mine.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: owner.Name, UID: owner.UID}}
	mine.ManagedFields = append(mine.ManagedFields, managedFields(2000, "x")...)
	must(t, p.A.Client.Update(t.Context(), mine))
	must(t, peer.Get(t.Context(), key, mine))
	mine.Spec.EndpointIP = "192.0.2.77"
	if err := peer.Update(t.Context(), mine); err != nil {
		t.Errorf("beside what our tools have put there: %v", err)
	}
	for name, change := range map[string]func(*v1alpha1.NetworkConfig){
		"another label":              func(nc *v1alpha1.NetworkConfig) { nc.Labels["app"] = "x" },
		"another value of a label":   func(nc *v1alpha1.NetworkConfig) { nc.Labels["app.example.com/l1"] = "w" },
		"a label less":               func(nc *v1alpha1.NetworkConfig) { delete(nc.Labels, "app.example.com/l1") },
		"an annotation more":         func(nc *v1alpha1.NetworkConfig) { nc.Annotations["a"] = "" },
		"an annotation that is long": func(nc *v1alpha1.NetworkConfig) { nc.Annotations["example.com/a1"] = strings.Repeat("w", 513) },
		"an owner less":              func(nc *v1alpha1.NetworkConfig) { nc.OwnerReferences = nil },
		"another owner":              func(nc *v1alpha1.NetworkConfig) { nc.OwnerReferences[0].UID = "y" },
		"more managed fields": func(nc *v1alpha1.NetworkConfig) {
			more := managedFields(200, "y")
			more[0].Manager = "y"
			nc.ManagedFields = append(nc.ManagedFields, more...)
		},
		"more in the same": func(nc *v1alpha1.NetworkConfig) {
			i := slices.IndexFunc(nc.ManagedFields, func(m metav1.ManagedFieldsEntry) bool { return m.Manager == "x" })
			nc.ManagedFields[i] = managedFields(2000, "y")[0]
		},
	} {
		nc := mine.DeepCopy()
		change(nc)
		if err := peer.Update(t.Context(), nc); !apierrors.IsForbidden(err) && !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("beside what our tools have put there, %s: %v", name, err)
		}
	}
}

// managedFields returns an entry that claims to manage n fields.
func managedFields(n int, name string) []metav1.ManagedFieldsEntry {
	fields := make([]string, n)
	for i := range fields {
		fields[i] = fmt.Sprintf("%q:{}", fmt.Sprintf("f:%s%d", name, i))
	}
	return []metav1.ManagedFieldsEntry{{Manager: "x", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: v1alpha1.GroupVersion.String(),
		Time: &metav1.Time{Time: time.Now()}, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:spec":{` + strings.Join(fields, ",") + `}}`)}}
}

func TestAPeersTokensAreBoundToThisClusterAndExpire(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "mint")
	peer := boundedClient(t, p)
	here := p.B.Identity.TenantNamespace()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: here, Name: peerAccount}}
	mint := func(seconds int64, audiences ...string) (*authenticationv1.TokenRequest, error) {
		r := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, Audiences: audiences}}
		return r, peer.SubResource("token").Create(t.Context(), account, r)
	}
	const life = int64(tokenLife / time.Second)
	got, err := mint(life)
	must(t, err)
	ours := claimsOf(got.Status.Token).Audiences
	if len(ours) == 0 {
		t.Fatal("a token without an audience")
	}
	got, err = mint(life, ours...) // managers renew their tokens in this way
	must(t, err)
	if left := time.Until(got.Status.ExpirationTimestamp.Time); left > tokenLife {
		t.Errorf("it is good for %v", left)
	}
	for name, try := range map[string]func() (*authenticationv1.TokenRequest, error){
		"a hundred years":        func() (*authenticationv1.TokenRequest, error) { return mint(100 * 365 * 86400) },
		"a second more":          func() (*authenticationv1.TokenRequest, error) { return mint(life + 1) },
		"for elsewhere":          func() (*authenticationv1.TokenRequest, error) { return mint(3600, "https://elsewhere.example") },
		"for here and elsewhere": func() (*authenticationv1.TokenRequest, error) { return mint(3600, append(ours, "vault")...) },
	} {
		if _, err := try(); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// If the namespace records no audiences, no token is issued.
	must(t, p.A.Client.Patch(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: here}},
		client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"isthmus.net/token-audiences":null}}}`))))
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // the policy takes a moment to see the changed namespace
		if _, err := mint(3600); apierrors.IsForbidden(err) {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatal("a token for audiences that nobody has noted")
		}
	}
}

func TestAPeersRequestsHaveTheirOwnPriorityLevel(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "seats")
	boundedClient(t, p)
	var level flowcontrolv1.PriorityLevelConfiguration
	must(t, p.A.Client.Get(t.Context(), client.ObjectKey{Name: deploy.PeerPriority}, &level))
	var secret corev1.Secret
	must(t, p.B.Client.Get(t.Context(), client.ObjectKey{Namespace: p.A.Identity.TenantNamespace(), Name: isthmus.DefaultIdentitySecret}, &secret))
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[isthmus.SecretKubeconfig])
	must(t, err)
	c, err := rest.HTTPClientFor(config)
	must(t, err)
	defer c.CloseIdleConnections()
	for _, path := range []string{
		"/apis/net.liqo.io/v1alpha1/namespaces/" + p.B.Identity.TenantNamespace() + "/networkconfigs", "/api/v1/nodes", "/version", "/openapi/v2",
	} {
		var levels []string
		for begin := time.Now(); !slices.Contains(levels, string(level.UID)); time.Sleep(50 * time.Millisecond) { // the API server takes a moment to see a new FlowSchema
			if time.Since(begin) > clustertest.Patient {
				t.Fatalf("%s is on the levels %v, want %s", path, levels, level.UID)
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, config.Host+path, nil)
			must(t, err)
			resp, err := c.Do(req)
			must(t, err)
			resp.Body.Close()
			levels = resp.Header.Values("X-Kubernetes-Pf-Prioritylevel-Uid")
		}
	}
	if level.Spec.Limited.BorrowingLimitPercent == nil || *level.Spec.Limited.BorrowingLimitPercent != 0 {
		t.Error("peers may borrow the seats of others")
	}
	// The FlowSchema is deleted with the rights.
	must(t, peerDown(t, p))
	if !clustertest.Deleted(t, p.A, &flowcontrolv1.FlowSchema{}, p.B.Identity.TenantNamespace()) {
		t.Error("the FlowSchema has stayed")
	}
}

// Requests for the election Leases must not queue behind other requests of manager and gateway,
// nor behind those of other clients.
func TestElectionsHaveTheirOwnPriorityLevel(t *testing.T) {
	t.Parallel()
	a := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	levels := map[string]string{}
	for _, name := range []string{deploy.ManagerServiceAccount + "-election", deploy.GatewayServiceAccount + "-election", "leader-election", "workload-low"} {
		var level flowcontrolv1.PriorityLevelConfiguration
		must(t, a.Client.Get(t.Context(), client.ObjectKey{Name: name}, &level))
		levels[string(level.UID)] = name
		if l := level.Spec.Limited; strings.HasPrefix(name, "isthmus-") && (*l.BorrowingLimitPercent != 0 || *l.LendablePercent != 0) {
			t.Errorf("%s lends %d %% and borrows %d %%: want its own, always", name, *l.LendablePercent, *l.BorrowingLimitPercent)
		}
	}
	config := rest.CopyConfig(a.Config)
	for _, account := range []string{deploy.ManagerServiceAccount, deploy.GatewayServiceAccount} {
		config.Impersonate.UserName = "system:serviceaccount:" + deploy.Namespace + ":" + account
		config.Impersonate.Groups = []string{"system:serviceaccounts", "system:authenticated"}
		c, err := rest.HTTPClientFor(config)
		must(t, err)
		leases := "/apis/coordination.k8s.io/v1/namespaces/" + deploy.Namespace + "/leases"
		for _, request := range []struct{ method, path, want string }{
			{http.MethodGet, leases + "/" + account, account + "-election"},
			{http.MethodPut, leases + "/" + account, account + "-election"},
			{http.MethodPost, leases, account + "-election"},
			{http.MethodGet, leases, "workload-low"}, // as for every ServiceAccount: the election lists no Leases
			{http.MethodGet, "/api/v1/nodes", "workload-low"},
		} {
			for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // the API server takes a moment to see a new FlowSchema
				req, err := http.NewRequestWithContext(t.Context(), request.method, config.Host+request.path, strings.NewReader("{}"))
				must(t, err)
				resp, err := c.Do(req)
				must(t, err)
				resp.Body.Close()
				got := levels[resp.Header.Get("X-Kubernetes-Pf-Prioritylevel-Uid")]
				if got == request.want {
					break
				}
				if time.Since(begin) > clustertest.Patient {
					t.Fatalf("%s: %s %s is on the level %q, want %s", account, request.method, request.path, got, request.want)
				}
			}
		}
	}
}

func TestPeeringWithoutAdmissionPoliciesIsRefused(t *testing.T) {
	s := &side{Cluster: clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A}), peer: &side{}}
	must(t, s.checkAdmission(t.Context()))
	level := &flowcontrolv1.PriorityLevelConfiguration{}
	level.Name = "no-such-level"
	if err := s.checkExists(t.Context(), level); err == nil || !strings.Contains(err.Error(), "PriorityLevelConfiguration no-such-level not found") ||
		!strings.Contains(err.Error(), "isthmus install --context a") {
		t.Error(err)
	}
}
