package attacks

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/fleet"
)

// peerAccount is the ServiceAccount of a peer in its tenant namespace.
const peerAccount = "isthmus-peer"

// A request is an API request that must be forbidden.
type request struct {
	method, path, body string
	header             http.Header
}

// checkForbidden checks that the API server forbids all of the requests.
func checkForbidden(t *testing.T, config *rest.Config, requests ...request) {
	t.Helper()
	c, err := rest.HTTPClientFor(config)
	must(t, err)
	defer c.CloseIdleConnections()
	for _, r := range requests {
		req, err := http.NewRequestWithContext(t.Context(), r.method, config.Host+r.path, strings.NewReader(r.body))
		must(t, err)
		req.Header.Set("Content-Type", "application/json")
		if r.method == http.MethodPatch {
			req.Header.Set("Content-Type", "application/merge-patch+json")
		}
		for k, v := range r.header {
			req.Header[k] = v
		}
		resp, err := c.Do(req)
		must(t, err)
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		must(t, err)
		if resp.StatusCode != http.StatusForbidden {
			t.Errorf("%s %s: %s: %.300s; want 403", r.method, r.path, resp.Status, text)
		}
	}
}

func get(paths ...string) (all []request) {
	for _, p := range paths {
		all = append(all, request{method: http.MethodGet, path: p})
	}
	return all
}

func post(body string, paths ...string) (all []request) {
	for _, p := range paths {
		all = append(all, request{method: http.MethodPost, path: p, body: body})
	}
	return all
}

func patch(body string, paths ...string) (all []request) {
	for _, p := range paths {
		all = append(all, request{method: http.MethodPatch, path: p, body: body})
	}
	return all
}

func rightsChapter() chapter {
	const liqo = "/apis/net.liqo.io/v1alpha1"
	asC := func(requests func(*site) []request) func(*testing.T, *site) {
		return func(t *testing.T, s *site) { checkForbidden(t, configAs(t, s.c, s.a), requests(s)...) }
	}
	return chapter{title: "With a peer's identity at the API server", prepare: func(t *testing.T, s *site) { s.stopManagerOfC(t) }, attacks: []attack{
		{attacker: "c's identity at a", attempt: "reads Secrets, Pods, Nodes, the IPAM state, TunnelEndpoints, Peerings and the namespace of b", now: "forbidden",
			run: asC(func(s *site) []request {
				return get("/api/v1/secrets", "/api/v1/namespaces/"+tenant(s.c)+"/secrets/isthmus-identity", "/api/v1/namespaces/kube-system/secrets",
					"/api/v1/pods", "/api/v1/nodes", "/api/v1/namespaces", "/api/v1/namespaces/"+fleet.Namespace+"/configmaps", liqo+"/ipamstorages", "/apis/isthmus.net/v1alpha1/networkallocations",
					liqo+"/tunnelendpoints", liqo+"/networkconfigs", liqo+"/namespaces/"+tenant(s.b)+"/networkconfigs",
					"/apis/isthmus.net/v1alpha1/peerings", "/apis/coordination.k8s.io/v1/leases")
			})},
		{attacker: "c's identity at a", attempt: "creates Pods, runs programs in Pods, creates Roles and bindings, impersonates, requests tokens of other accounts",
			now: "forbidden", run: asC(func(s *site) []request {
				own := "/api/v1/namespaces/" + tenant(s.c)
				return append(append(post("{}", own+"/pods", "/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/pods/a-pod1/exec?command=sh",
					"/apis/rbac.authorization.k8s.io/v1/namespaces/"+tenant(s.c)+"/rolebindings", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
					own+"/serviceaccounts/default/token", own+"/serviceaccounts", "/api/v1/namespaces/"+tenant(s.b)+"/serviceaccounts/"+peerAccount+"/token",
					"/api/v1/namespaces/"+fleet.Namespace+"/serviceaccounts/isthmus-manager/token", "/apis/certificates.k8s.io/v1/certificatesigningrequests"),
					request{method: http.MethodGet, path: "/api/v1/nodes", header: http.Header{"Impersonate-User": {"kubernetes-admin"}, "Impersonate-Group": {"system:masters"}}}),
					patch(`{"rules":[]}`, "/apis/rbac.authorization.k8s.io/v1/namespaces/"+tenant(s.c)+"/roles/"+peerAccount)...)
			})},
		{attacker: "c's identity at a", attempt: "writes a TunnelEndpoint, a NatMapping, a Peering, IPAM state", now: "forbidden", run: asC(func(s *site) []request {
			own := liqo + "/namespaces/" + tenant(s.c)
			return append(post("{}", own+"/tunnelendpoints", own+"/natmappings", "/apis/isthmus.net/v1alpha1/peerings", liqo+"/ipamstorages", "/apis/isthmus.net/v1alpha1/networkallocations"),
				patch("{}", own+"/tunnelendpoints/"+identity(s.c).UniqueName(), "/apis/isthmus.net/v1alpha1/peerings/"+identity(s.c).UniqueName())...)
		})},
		{attacker: "c's identity at a", attempt: "reads /metrics, /debug/pprof, /logs, /configz and /flagz of the API server", now: "forbidden",
			run: asC(func(*site) []request {
				return get("/metrics", "/debug/pprof/", "/logs/", "/configz", "/flagz", "/statusz")
			})},
		{attacker: "c's identity at a", attempt: "writes the status of its own NetworkConfig", now: "forbidden", run: asC(func(s *site) []request {
			path := liqo + "/namespaces/" + tenant(s.c) + "/networkconfigs/" + identity(s.a).UniqueName()
			body := `{"status":{"processed":true,"podCIDRNAT":"8.8.8.0/24","externalCIDRNAT":"None"}}`
			return append(patch(body, path, path+"/status"), request{method: http.MethodPut, path: path + "/status", body: body})
		})},
		{attacker: "c's identity at a", attempt: "sets a finalizer on a's NetworkConfig", now: "forbidden",
			run: asC(func(s *site) []request {
				path := liqo + "/namespaces/" + tenant(s.c) + "/networkconfigs/" + identity(s.c).UniqueName()
				return append(patch(`{"metadata":{"finalizers":["example.com/x"]}}`, path), request{method: http.MethodDelete, path: path},
					request{method: http.MethodPut, path: path, body: "{}"})
			})},
		{attacker: "c's identity at a", attempt: "a finalizer, owner, foreign label or another peer's origin on its copy", now: "refused by the admission policy",
			run: relabel},
		{attacker: "c's identity at a", attempt: "an object of 1 MB: in values, keys, labels, annotations",
			now: "refused: everything is bounded", run: greatObjects},
		{attacker: "c's identity at a", attempt: "an object of 1 MB: in metadata.managedFields, for fields that do not exist",
			now: "refused by the admission policy", run: greatManagedFields},
		{attacker: "c's identity at a", attempt: "1,500 NetworkConfigs", now: "one is created, under the name in its Role", run: manyObjects},
		{attacker: "c's identity at a", attempt: "requests a token for 100 years, for other audiences, for several audiences",
			now: "at most 90 days, and only the API server's own audiences", run: tokens},
		{attacker: "c's identity at a", attempt: "as many requests as possible",
			now: "all peers share a few seats in turn; other clients are not affected", run: floodOfRequests},
		{attacker: "c's identity at a", attempt: "1,000 watches of its NetworkConfigs at a time", open: true,
			now: "the API server does not limit watches: Priority and Fairness counts only the start of a watch, and admission policies " +
				"do not see reads; use a proxy that limits connections, or un-peer", run: manyWatches},
	}}
}

// checkRefusedWith checks that the API server rejects a change of c's NetworkConfig.
func (s *site) checkRefusedWith(t *testing.T, what string, change func(*v1alpha1.NetworkConfig)) {
	t.Helper()
	c := clientFor(t, configAs(t, s.c, s.a), s.c.Client)
	err := s.edit(t, c, change)
	if !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) && !apierrors.IsRequestEntityTooLargeError(err) {
		t.Errorf("%s: %v; want a refusal", what, err)
	}
	nc := s.configOfC(t, s.a.Client)
	text, err := json.Marshal(nc)
	must(t, err)
	if len(text) > 64<<10 {
		t.Errorf("%s: the object has %d bytes now", what, len(text))
	}
}

func relabel(t *testing.T, s *site) {
	for what, change := range map[string]func(*v1alpha1.NetworkConfig){
		"a finalizer":         func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = append(nc.Finalizers, "example.com/x") },
		"no finalizer of a's": func(nc *v1alpha1.NetworkConfig) { nc.Finalizers = nil },
		"an owner": func(nc *v1alpha1.NetworkConfig) {
			nc.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "x"}}
		},
		"an original":     func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelReplication] = "true" },
		"the origin of b": func(nc *v1alpha1.NetworkConfig) { nc.Labels[v1alpha1.LabelOriginID] = s.b.ID },
		"nobody's":        func(nc *v1alpha1.NetworkConfig) { delete(nc.Labels, v1alpha1.LabelOriginID) },
		"no labels":       func(nc *v1alpha1.NetworkConfig) { nc.Labels = nil },
		"a foreign label": func(nc *v1alpha1.NetworkConfig) { nc.Labels["app"] = "x" },
		"an owner's label": func(nc *v1alpha1.NetworkConfig) {
			nc.Labels[v1alpha1.LabelOwnership] = v1alpha1.OwnershipNetworkConfigCreator
		},
	} {
		s.checkRefusedWith(t, what, change)
	}
}

func many(n int, key, value string) map[string]string {
	m := map[string]string{}
	for i := range n {
		m[fmt.Sprintf(key, i)] = value
	}
	return m
}

func greatObjects(t *testing.T, s *site) {
	great := strings.Repeat("x", 1<<20)
	for what, change := range map[string]func(*v1alpha1.NetworkConfig){
		"a value":   func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["x"] = great },
		"a key":     func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig[great] = "" },
		"many keys": func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig = many(1000, "k%d", strings.Repeat("v", 1000)) },
		"a name":    func(nc *v1alpha1.NetworkConfig) { nc.Spec.EndpointIP = great },
		"annotations": func(nc *v1alpha1.NetworkConfig) {
			nc.Annotations = many(500, "example.com/a%d", strings.Repeat("v", 400))
		},
		"one annotation":   func(nc *v1alpha1.NetworkConfig) { nc.Annotations = map[string]string{"x": great[:200<<10]} },
		"labels":           func(nc *v1alpha1.NetworkConfig) { nc.Labels = many(10_000, "example.com/l%d", strings.Repeat("v", 63)) },
		"names of labels":  func(nc *v1alpha1.NetworkConfig) { nc.Labels[strings.Repeat("p.", 120)+"x/y"] = "" },
		"its cluster name": func(nc *v1alpha1.NetworkConfig) { nc.Spec.RemoteCluster.ClusterName = great },
	} {
		s.checkRefusedWith(t, what, change)
	}
}

func greatManagedFields(t *testing.T, s *site) {
	fields := func(n int, name string) *metav1.FieldsV1 {
		names := map[string]any{}
		for i := range n {
			names[fmt.Sprintf("f:%s%d", name, i)] = struct{}{}
		}
		raw, err := json.Marshal(map[string]any{"f:spec": names})
		must(t, err)
		return metav1.NewFieldsV1(string(raw))
	}
	entry := func(manager string, operation metav1.ManagedFieldsOperationType, f *metav1.FieldsV1) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, Operation: operation, APIVersion: "net.liqo.io/v1alpha1", FieldsType: "FieldsV1", FieldsV1: f,
			Time: &metav1.Time{Time: time.Now()}}
	}
	s.checkRefusedWith(t, "one great entry", func(nc *v1alpha1.NetworkConfig) {
		nc.ManagedFields = append(nc.ManagedFields, entry("x", metav1.ManagedFieldsOperationUpdate, fields(1, strings.Repeat("x", 1<<20))))
	})
	s.checkRefusedWith(t, "one entry of many fields", func(nc *v1alpha1.NetworkConfig) {
		nc.ManagedFields = append(nc.ManagedFields, entry("x", metav1.ManagedFieldsOperationUpdate, fields(20_000, "x")))
	})
	s.checkRefusedWith(t, "many entries", func(nc *v1alpha1.NetworkConfig) {
		for i := range 200 {
			nc.ManagedFields = append(nc.ManagedFields, entry(fmt.Sprintf("x%d", i), metav1.ManagedFieldsOperationApply, fields(100, strings.Repeat("x", 10))))
		}
	})
	// As a check of the test itself, the server must accept the unmodified managed fields of a real
	// manager.
	c := clientFor(t, configAs(t, s.c, s.a), s.c.Client)
	must(t, s.edit(t, c, func(nc *v1alpha1.NetworkConfig) { nc.Spec.BackendConfig["x"] = fmt.Sprint(time.Now().UnixNano()) }))
	must(t, s.edit(t, c, func(nc *v1alpha1.NetworkConfig) { delete(nc.Spec.BackendConfig, "x") }))
}

func manyObjects(t *testing.T, s *site) {
	c := clientFor(t, configAs(t, s.c, s.a), s.c.Client)
	like := s.configOfC(t, c)
	var group sync.WaitGroup
	names := make(chan int)
	var mu sync.Mutex
	made := 0
	for range 8 {
		group.Go(func() {
			for i := range names {
				nc := &v1alpha1.NetworkConfig{ObjectMeta: metav1.ObjectMeta{Namespace: like.Namespace, Name: fmt.Sprintf("one-of-many-%d", i), Labels: like.Labels}, Spec: like.Spec}
				if c.Create(t.Context(), nc) == nil {
					mu.Lock()
					made++
					mu.Unlock()
				}
			}
		})
	}
	for i := range 1500 {
		names <- i
	}
	close(names)
	group.Wait()
	var list v1alpha1.NetworkConfigList
	must(t, s.a.Client.List(t.Context(), &list, client.InNamespace(like.Namespace)))
	if made > 0 || len(list.Items) != 2 { // one of cluster a and one of cluster c
		t.Errorf("%d were made, and there are %d", made, len(list.Items))
	}
}

func tokens(t *testing.T, s *site) {
	c := clientFor(t, configAs(t, s.c, s.a), s.c.Client)
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: tenant(s.c), Name: peerAccount}}
	const day = int64(24 * time.Hour / time.Second)
	for what, spec := range map[string]authenticationv1.TokenRequestSpec{
		"a hundred years": {ExpirationSeconds: new(100 * 365 * day)},
		"91 days":         {ExpirationSeconds: new(91 * day)},
		"for elsewhere":   {ExpirationSeconds: new(day), Audiences: []string{"https://elsewhere.example"}},
		"and elsewhere":   {ExpirationSeconds: new(day), Audiences: []string{"https://kubernetes.default.svc.cluster.local", "vault"}},
	} {
		if err := c.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{Spec: spec}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v; want Forbidden", what, err)
		}
	}
	must(t, c.SubResource("token").Create(t.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: new(day)}}))
}

func floodOfRequests(t *testing.T, s *site) {
	config := configAs(t, s.c, s.a)
	c, err := rest.HTTPClientFor(config)
	must(t, err)
	defer c.CloseIdleConnections()
	var level flowcontrolv1.PriorityLevelConfiguration
	must(t, s.a.Client.Get(t.Context(), client.ObjectKey{Name: deploy.PeerPriority}, &level))
	path := config.Host + "/apis/net.liqo.io/v1alpha1/namespaces/" + tenant(s.c) + "/networkconfigs"
	ctx, cancel := contextOf(t, 2*time.Second)
	defer cancel()
	var group sync.WaitGroup
	var mu sync.Mutex
	levels, served := map[string]int{}, 0
	for range 32 {
		group.Go(func() {
			for ctx.Err() == nil {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, path, nil)
				if err != nil {
					return
				}
				resp, err := c.Do(req)
				if err != nil {
					continue
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				mu.Lock()
				levels[resp.Header.Get("X-Kubernetes-Pf-Prioritylevel-Uid")]++
				served++
				mu.Unlock()
			}
		})
	}
	for ctx.Err() == nil {
		if err := s.a.Client.Get(t.Context(), client.ObjectKey{Name: "default"}, &corev1.Namespace{}); err != nil {
			t.Errorf("an administrator meanwhile: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	group.Wait()
	if served == 0 || len(levels) != 1 || levels[string(level.UID)] == 0 {
		t.Errorf("%d requests were served at the levels %v; want %s", served, levels, level.UID)
	}
}

func manyWatches(t *testing.T, s *site) {
	config := configAs(t, s.c, s.a)
	c, err := rest.HTTPClientFor(config)
	must(t, err)
	defer c.CloseIdleConnections()
	path := config.Host + "/apis/net.liqo.io/v1alpha1/namespaces/" + tenant(s.c) + "/networkconfigs?watch=1&timeoutSeconds=30"
	ctx, cancel := contextOf(t, 30*time.Second)
	defer cancel()
	const most = 1000
	open := 0
	for range most {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, path, nil)
		must(t, err)
		resp, err := c.Do(req)
		if err != nil {
			break
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			break
		}
		open++
	}
	if open > most/10 {
		t.Errorf("%d watches are open", open)
	}
}

// componentOf returns a configuration and a client with the identity of a component of cluster a.
func (s *site) componentOf(t *testing.T, account string) (*rest.Config, client.Client) {
	t.Helper()
	token := &authenticationv1.TokenRequest{}
	sa := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: account}}
	must(t, s.a.Client.SubResource("token").Create(t.Context(), sa, token))
	config := rest.AnonymousClientConfig(configAs(t, s.c, s.a)) // keeps the address and the CA, but not c's identity
	config.Dial = s.a.Control.Dial
	config.BearerToken = token.Status.Token
	return config, clientFor(t, config, s.a.Client)
}

func insideChapter() chapter {
	return chapter{title: "With a component's token, and beside the components", attacks: []attack{
		{attacker: "a holder of the gateway's token", attempt: "another image, command or label for the manager's Pod and for the gateway's own",
			now: "it may change only one label of gateways' Pods", run: gatewayPatchesPods},
		{attacker: "a holder of the gateway's token", attempt: "redirects the gateway's Service: selector, ports, external IPs, a peer's address",
			now: "it may change one annotation of the gateway's Service, to an IP address", run: gatewayPatchesServices},
		{attacker: "a holder of the gateway's token", attempt: "creates a Secret for the manager's token; Secrets and Leases of other names",
			now: "it may create only Secret wireguard-pubkey of type Opaque and Lease isthmus-gateway", run: gatewayMakesSecrets},
		{attacker: "a holder of the gateway's token", attempt: "reads Secrets of tenant namespaces, requests tokens, writes NetworkConfigs, Peerings, IPAM state", now: "forbidden",
			run: func(t *testing.T, s *site) {
				config, _ := s.componentOf(t, deploy.GatewayServiceAccount)
				const liqo = "/apis/net.liqo.io/v1alpha1"
				checkForbidden(t, config, append(append(get("/api/v1/secrets", "/api/v1/namespaces/"+tenant(s.c)+"/secrets/isthmus-identity", liqo+"/networkconfigs"),
					post("{}", "/api/v1/namespaces/"+fleet.Namespace+"/serviceaccounts/isthmus-manager/token", liqo+"/ipamstorages", "/apis/isthmus.net/v1alpha1/networkallocations")...),
					patch("{}", liqo+"/namespaces/"+tenant(s.c)+"/tunnelendpoints/"+identity(s.c).UniqueName())...)...)
			}},
		{attacker: "a holder of a route agent's token (any node)", attempt: "writes anything, reads Secrets, requests tokens", now: "forbidden", run: func(t *testing.T, s *site) {
			config, _ := s.componentOf(t, deploy.RouteAgentServiceAccount)
			const liqo = "/apis/net.liqo.io/v1alpha1"
			checkForbidden(t, config, append(append(get("/api/v1/secrets", "/api/v1/namespaces/"+fleet.Namespace+"/secrets/wireguard-pubkey", liqo+"/networkconfigs"),
				post("{}", "/api/v1/namespaces/"+fleet.Namespace+"/serviceaccounts/isthmus-manager/token", "/api/v1/nodes", liqo+"/ipamstorages", "/apis/isthmus.net/v1alpha1/networkallocations")...),
				patch("{}", "/api/v1/nodes/a-node1", "/api/v1/nodes/a-node1/status", liqo+"/namespaces/"+tenant(s.c)+"/tunnelendpoints/"+identity(s.c).UniqueName()+"/status")...)...)
		}},
		{attacker: "a holder of the manager's token", attempt: "writes Services with selectors or external IPs, of other types, in kube-system, or foreign ones; " +
			"EndpointSlices of other Services", now: "refused by the admission policy: it may write only its own Services without selectors, and their EndpointSlices", run: managerWritesServices},
		{attacker: "a mistake in a manifest", attempt: "two managers with one POD_NAME", now: "one leads: the holder's name contains POD_UID", run: twoManagers},
		{attacker: "an unprivileged process of a node", attempt: "takes the agent's lock while the agent restarts",
			now: unprivilegedLock, run: lockOfTheAgent},
		{attacker: "a writer of a Node's status (a kubelet's identity)", attempt: "sets an address inside the network of a peer",
			now: "nodes ignore the address and report a problem that names the Node", run: nodeInAPeersNetwork},
		{attacker: "a writer of a Pod's status (a kubelet's identity)", attempt: "gives one of its Pods the address of a pod of another node",
			now: "ignored if pods have addresses of their nodes' networks, with a problem that names Pod and Node", run: podOfAnother},
		{attacker: "somebody with root on a node", attempt: "deletes the packet filter", now: "restored at the kernel's event", run: filterDeleted},
	}}
}

// checkDenied checks that the error is Forbidden.
func checkDenied(t *testing.T, what string, err error) {
	t.Helper()
	if !apierrors.IsForbidden(err) {
		t.Errorf("%s: %v; want Forbidden", what, err)
	}
}

func gatewayPatchesPods(t *testing.T, s *site) {
	_, c := s.componentOf(t, deploy.GatewayServiceAccount)
	manager := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "manager-1", Labels: map[string]string{"app.kubernetes.io/name": "manager"}},
		Spec:       corev1.PodSpec{AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "main", Image: "none"}}},
	}
	must(t, s.a.Client.Create(t.Context(), manager))
	defer func() { must(t, s.a.Client.Delete(t.Context(), manager, client.GracePeriodSeconds(0))) }()
	for _, name := range []string{"manager-1", fleet.Gateway(0)} {
		for what, text := range map[string]string{
			"image":      `{"spec":{"containers":[{"name":"main","image":"evil"}]}}`,
			"a label":    `{"metadata":{"labels":{"app.kubernetes.io/name":"gateway","app.kubernetes.io/component":"networking","x":"y"}}}`,
			"annotation": `{"metadata":{"annotations":{"x":"y"}}}`,
			"finalizer":  `{"metadata":{"finalizers":["example.com/x"]}}`,
		} {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: name}}
			checkDenied(t, name+": "+what, c.Patch(t.Context(), pod, client.RawPatch(types.StrategicMergePatchType, []byte(text))))
		}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "manager-1"}}
	checkDenied(t, "the active mark on another Pod", c.Patch(t.Context(), pod, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"net.liqo.io/gateway":"active"}}}`))))
}

func gatewayPatchesServices(t *testing.T, s *site) {
	_, c := s.componentOf(t, deploy.GatewayServiceAccount)
	for what, text := range map[string]string{
		"selector":     `{"spec":{"selector":{"app":"evil"}}}`,
		"external IPs": `{"spec":{"externalIPs":["172.30.1.10"]}}`,
		"name":         `{"spec":{"type":"ExternalName","externalName":"evil.example"}}`,
		"the address":  `{"metadata":{"annotations":{"liqo.io/override-address":"198.51.100.66"}}}`,
		"no address":   `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"evil.example"}}}`,
	} {
		service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "isthmus-gateway"}}
		checkDenied(t, what, c.Patch(t.Context(), service, client.RawPatch(types.MergePatchType, []byte(text))))
	}
}

func gatewayMakesSecrets(t *testing.T, s *site) {
	config, c := s.componentOf(t, deploy.GatewayServiceAccount)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "x", Annotations: map[string]string{corev1.ServiceAccountNameKey: "isthmus-manager"}},
		Type: corev1.SecretTypeServiceAccountToken}
	checkDenied(t, "a token's Secret", c.Create(t.Context(), secret.DeepCopy()))
	secret.Name, secret.GenerateName = "", "wireguard-pubkey"
	checkDenied(t, "a token's Secret of a name that is made", c.Create(t.Context(), secret.DeepCopy()))
	checkForbidden(t, config, append(post(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"isthmus-manager"}}`,
		"/apis/coordination.k8s.io/v1/namespaces/"+fleet.Namespace+"/leases"),
		patch(`{"type":"kubernetes.io/service-account-token"}`, "/api/v1/namespaces/"+fleet.Namespace+"/secrets/x")...)...)
	checkDenied(t, "an owner of the key", c.Patch(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "wireguard-pubkey"}},
		client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":["example.com/x"]}}`))))
}

var errNotYet = errors.New("not yet")

// quiet is a buffer for a program's output. It is safe for concurrent use.
type quiet struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (q *quiet) Write(b []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.out.Write(b)
}

func (q *quiet) String() string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.out.String()
}
