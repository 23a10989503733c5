package kube

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/leaktest"
)

var quiet = slog.New(slog.DiscardHandler)

// apiServer is a real API server with an administrator's client.
type apiServer struct {
	*kubetest.Server
	config *rest.Config
	client client.Client
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	if _, err := kubetest.Build(t.Context(), os.Stderr); err != nil {
		t.Fatal(err)
	}
	server, err := kubetest.Start(t.Context(), kubetest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	s := &apiServer{Server: server}
	if s.config, err = server.Config(); err != nil {
		t.Fatal(err)
	}
	if s.client, err = server.Client(); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *apiServer) create(t *testing.T, objects ...client.Object) {
	t.Helper()
	for _, o := range objects {
		if err := s.client.Create(t.Context(), o); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
}

func (s *apiServer) namespace(t *testing.T, name string) {
	t.Helper()
	s.create(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
}

func (s *apiServer) installCRDs(t *testing.T) {
	t.Helper()
	names, err := fs.Glob(deploy.Files, "crds/net.liqo.io_*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(names, "crds/isthmus.net_networkallocations.yaml") {
		text, err := deploy.Files.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		crd := &apiextensionsv1.CustomResourceDefinition{}
		if err := yaml.Unmarshal(text, crd); err != nil {
			t.Fatal(err)
		}
		s.create(t, crd)
	}
	within(t, "the kinds are served", func() error {
		return errors.Join(s.client.List(t.Context(), &v1alpha1.TunnelEndpointList{}), s.client.List(t.Context(), &isthmus.NetworkAllocationList{}))
	})
}

// installReports installs the CRD of the agents' reports.
func (s *apiServer) installReports(t *testing.T) {
	t.Helper()
	text, err := deploy.Files.ReadFile("crds/isthmus.net_nodenetworks.yaml")
	if err != nil {
		t.Fatal(err)
	}
	reports := &apiextensionsv1.CustomResourceDefinition{}
	if err := yaml.Unmarshal(text, reports); err != nil {
		t.Fatal(err)
	}
	s.create(t, reports)
}

// restricted returns a configuration for a user with these rules in all namespaces.
func (s *apiServer) restricted(t *testing.T, user string, rules ...rbacv1.PolicyRule) *rest.Config {
	t.Helper()
	cert, key, err := s.ClientCert(user)
	if err != nil {
		t.Fatal(err)
	}
	rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{"", "isthmus.net", "discovery.k8s.io"},
		Resources: []string{"nodes", "networkallocations", "endpointslices"}, Verbs: []string{"list", "watch"}}) // every gateway reads these
	s.create(t, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: user}, Rules: rules},
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}}})
	config := rest.CopyConfig(s.config)
	config.CertData, config.KeyData = cert, key
	return config
}

// within retries try until it returns nil. It fails the test if that takes too long even for a
// busy machine.
func within(t *testing.T, what string, try func() error) {
	t.Helper()
	const limit = time.Minute
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		late := time.Since(begin) > limit
		err := try()
		if err == nil {
			return
		}
		if late {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
	}
}

// testReplica is a Gateway without a data plane.
type testReplica struct {
	*Gateway
	stop    func()
	serving chan bool // receives true when serve begins, and false when it ends
}

func start(t *testing.T, o GatewayOptions, with ...func(*Gateway)) *testReplica {
	t.Helper()
	if o.Log == nil {
		o.Log = quiet
	}
	if !o.PodIP.IsValid() {
		o.PodIP = netip.MustParseAddr("172.30.1.11")
	}
	g, err := NewGateway(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range with {
		change(g)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r := &testReplica{Gateway: g, serving: make(chan bool, 10)}
	done := make(chan error, 1)
	go func() {
		done <- g.Run(ctx, func(ctx context.Context, begin <-chan struct{}) error {
			select {
			case <-ctx.Done():
				return nil
			case <-begin:
			}
			r.serving <- true
			<-ctx.Done()
			r.serving <- false
			return nil
		}, func() error { return nil })
	}()
	var once sync.Once
	r.stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(r.stop)
	return r
}

func TestGatewayAgainstAnAPIServer(t *testing.T) {
	UseLogger(quiet)
	s := newAPIServer(t)
	administrator := goleak.IgnoreCurrent()
	t.Cleanup(func() {
		// client-go keeps idle connections open for later requests.
		if err := leaktest.Find(administrator, goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*clientConnReadLoop).run"),
			// The cache waits for ever for a kind that was never read.
			goleak.IgnoreAnyFunction("sigs.k8s.io/controller-runtime/pkg/cache.newMultiNamespaceInformer.func1"),
			goleak.IgnoreAnyFunction("sigs.k8s.io/controller-runtime/pkg/cache.newMultiNamespaceInformerHandlerRegistration.func1")); err != nil {
			t.Error(err)
		}
	})

	t.Run("without the CRDs it waits and reports the reason", func(t *testing.T) {
		s.namespace(t, "waits")
		r := start(t, GatewayOptions{Config: s.config, Namespace: "waits", Pod: "p"})
		within(t, "reason", func() error {
			if err := r.Ready(); !strings.Contains(fmt.Sprint(err), "install the CRDs") {
				return fmt.Errorf("it waits for something else: %w", err)
			}
			return nil
		})
		s.installCRDs(t)
		within(t, "ready", r.Ready)
		if !<-r.serving {
			t.Error("not active")
		}
		r.mu.Lock()
		id := r.desired.snapshot.Gateway.ClusterID
		r.mu.Unlock()
		var ns corev1.Namespace
		if err := s.client.Get(t.Context(), client.ObjectKey{Name: "kube-system"}, &ns); err != nil || id != string(ns.UID) {
			t.Errorf("cluster ID %q, want the UID of kube-system, %q (%v)", id, ns.UID, err)
		}
	})

	t.Run("a problem is reported once by an Event of the Pod", func(t *testing.T) { podEventsAreSentOnce(t, s) })
	t.Run("it refuses endpoints that no peer's gateway can have", func(t *testing.T) {
		s.namespace(t, "site")
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "site"}}
		s.create(t, node, &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "site"}, Spec: isthmus.NetworkAllocationSpec{
			ClusterID: "site", Revision: 1, Own: &isthmus.OwnNetworks{PodCIDR: "10.244.0.0/18", ServiceCIDR: "10.96.0.0/12", ExternalCIDR: "10.244.64.0/20"}}},
			&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}, AddressType: discoveryv1.AddressTypeIPv4,
				Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"198.51.100.9"}}}})
		r := start(t, GatewayOptions{Config: s.config, Namespace: "site", Pod: "p"})
		refused := func(text, why string) {
			t.Helper()
			within(t, text, func() error {
				r.mu.Lock()
				defer r.mu.Unlock()
				if got := r.desired.snapshot.Gateway.Site.CheckEndpoint(netip.MustParseAddr(text)); !strings.HasSuffix(got, why) || why == "" && got != "" {
					return fmt.Errorf("%q, want %q", got, why)
				}
				return nil
			})
		}
		within(t, "ready", r.Ready)
		refused("10.244.63.1", "inside 10.244.0.0/18, our PodCIDR")
		refused("10.96.0.1", "inside 10.96.0.0/12, our ServiceCIDR")
		refused("10.244.64.1", "inside 10.244.64.0/20, our ExternalCIDR")
		refused("198.51.100.9", "is an API server of ours")
		refused("198.51.100.7", "")
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "site"}, {Type: corev1.NodeExternalIP, Address: "198.51.100.7"}}
		if err := s.client.Status().Update(t.Context(), node); err != nil {
			t.Fatal(err)
		}
		refused("198.51.100.7", "is a node of ours")
		for _, o := range []client.Object{node, &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "site"}}} {
			if err := s.client.Delete(t.Context(), o); err != nil {
				t.Error(err)
			}
		}
		refused("198.51.100.7", "")
	})

	t.Run("without an API server it waits and reports the reason", func(t *testing.T) {
		config := rest.CopyConfig(s.config)
		config.Host = "https://127.0.0.1:1"
		r := start(t, GatewayOptions{Config: config, Namespace: "waits", Pod: "p"})
		within(t, "reason", func() error {
			if err := r.Ready(); fmt.Sprint(err) != "the API server does not answer: connection refused" {
				return fmt.Errorf("it waits for something else: %w", err)
			}
			return nil
		})
	})

	t.Run("replicas that start together agree on one key and one active replica", func(t *testing.T) {
		s.namespace(t, "together")
		s.create(t, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "together", Name: "any", Labels: map[string]string{"app.kubernetes.io/name": "clusterid-configmap"}},
			Data: map[string]string{"CLUSTER_ID": "id-self", "CLUSTER_NAME": "self"}})
		var replicas []*testReplica
		for i := range 4 {
			replicas = append(replicas, start(t, GatewayOptions{Config: s.config, Namespace: "together", Pod: fmt.Sprint("pod-", i)}))
		}
		active := func() (pods []string) {
			for i, r := range replicas {
				if _, self := r.Active(); self {
					pods = append(pods, fmt.Sprint("pod-", i))
				}
			}
			return pods
		}
		within(t, "everyone knows", func() error {
			for _, r := range replicas {
				if err := r.Ready(); err != nil {
					return err
				}
				if pod, _ := r.Active(); pod == "" {
					return errors.New("nobody is active")
				}
			}
			return nil
		})
		if got := active(); len(got) != 1 {
			t.Errorf("active: %v", got)
		}
		keys := make(map[[32]byte]bool)
		for _, r := range replicas {
			r.mu.Lock()
			keys[r.desired.snapshot.Keys.Private] = true
			if got := r.desired.snapshot.Gateway; got.ClusterID != "id-self" || got.ClusterName != "self" {
				t.Errorf("identity %s %s", got.ClusterID, got.ClusterName)
			}
			r.mu.Unlock()
		}
		if len(keys) != 1 {
			t.Errorf("%d keys", len(keys))
		}

		// The active replica ends cleanly: exactly one other replica takes over, at once.
		first := active()[0]
		begin := time.Now()
		for i, r := range replicas {
			if fmt.Sprint("pod-", i) == first {
				r.stop()
				replicas[i] = nil
			}
		}
		replicas = append([]*testReplica{}, compact(replicas)...)
		var lease coordinationv1.Lease
		if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "together", Name: isthmus.LeaseGateway}, &lease); err != nil || holderOf(&lease) == first {
			t.Errorf("after its end the Lease is still that of %s (%v)", first, err)
		}
		within(t, "successor", func() error {
			for _, r := range replicas {
				if pod, _ := r.Active(); pod == first {
					return fmt.Errorf("%s is still believed active", first)
				}
			}
			return nil
		})
		t.Logf("successor known to all after %v", time.Since(begin).Round(time.Millisecond))
		if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "together", Name: isthmus.LeaseGateway}, &lease); err != nil || *lease.Spec.LeaseTransitions != 2 {
			t.Errorf("Lease %+v, %v", lease.Spec, err)
		}
	})

	t.Run("an ending replica serves until another has taken over", func(t *testing.T) { testHandOver(t, s) })

	t.Run("a replica without the API server sends as long as the other replica answers", func(t *testing.T) { testCutOff(t, s) })

	t.Run("a deleted or invalid Secret does not change the key", func(t *testing.T) {
		s.namespace(t, "keys")
		r := start(t, GatewayOptions{Config: s.config, Namespace: "keys", Pod: "p", Cluster: self})
		<-r.serving
		key := client.ObjectKey{Namespace: "keys", Name: keyring.SecretName}
		var before, after corev1.Secret
		if err := s.client.Get(t.Context(), key, &before); err != nil {
			t.Fatal(err)
		}
		if err := s.client.Delete(t.Context(), before.DeepCopy()); err != nil {
			t.Fatal(err)
		}
		within(t, "Secret", func() error { return s.client.Get(t.Context(), key, &after) })
		if string(after.Data["privateKey"]) != string(before.Data["privateKey"]) {
			t.Error("another key")
		}
		type delivery struct {
			s   Snapshot
			err error
		}
		got := make(chan delivery, 10)
		go r.Snapshots(t.Context(), func(s Snapshot, err error) { got <- delivery{s, err} })
		first := <-got
		after.Data["privateKey"] = []byte("nonsense")
		if err := s.client.Update(t.Context(), &after); err != nil {
			t.Fatal(err)
		}
		d := <-got
		for d.err == nil { // a Snapshot with the date of the new Secret may be delivered first
			d = <-got
		}
		if !strings.Contains(d.err.Error(), "data.privateKey") || d.s.Keys.Private != first.s.Keys.Private {
			t.Errorf("delivered %+v", d)
		}
		after.Data["privateKey"] = before.Data["privateKey"]
		if err := s.client.Update(t.Context(), &after); err != nil {
			t.Fatal(err)
		}
		if d := <-got; d.err != nil || d.s.Keys.Private != first.s.Keys.Private {
			t.Errorf("delivered %+v", d)
		}
	})

	t.Run("the Secret has the tunnels of the replica that started last", func(t *testing.T) {
		s.namespace(t, "tunnels")
		key := client.ObjectKey{Namespace: "tunnels", Name: keyring.SecretName}
		var secret corev1.Secret
		sends := func(n int) {
			t.Helper()
			within(t, fmt.Sprintf("%d tunnels", n), func() error {
				if err := s.client.Get(t.Context(), key, &secret); err != nil {
					return err
				}
				private, err := fabric.ParseKey(string(secret.Data["privateKey"]))
				if got, want := string(secret.Data["tunnels"]), keyring.Tunnels(private, n); err != nil || got != want {
					return fmt.Errorf("%q, want %q, %w", got, want, err)
				}
				return nil
			})
		}
		replica := func(name string, tunnels int) *testReplica {
			r := start(t, GatewayOptions{Config: s.config, Namespace: "tunnels", Pod: name, Cluster: self, Tunnels: tunnels})
			within(t, "ready", r.Ready)
			return r
		}
		patch := func(data string) {
			t.Helper()
			if err := s.client.Patch(t.Context(), &secret, client.RawPatch(types.MergePatchType, []byte(`{"data":{`+data+`}}`))); err != nil {
				t.Fatal(err)
			}
		}
		first := replica("first", 1)
		sends(1)
		private := string(secret.Data["privateKey"])
		replica("second", 3)
		sends(3)
		replica("third", 2)
		sends(2)
		if string(secret.Data["privateKey"]) != private {
			t.Error("another key")
		}
		version := secret.ResourceVersion
		time.Sleep(time.Second)
		if sends(2); secret.ResourceVersion != version {
			t.Error("replicas of different numbers of tunnels write in turn")
		}
		first.stop()

		// Data that is not a valid list is replaced, even if another replica wrote the last
		// list.
		patch(`"tunnels":"bm9uc2Vuc2U="`)
		within(t, "a list of ours", func() error {
			if err := s.client.Get(t.Context(), key, &secret); err != nil {
				return err
			}
			if text := string(secret.Data["tunnels"]); text == "nonsense" {
				return errors.New(text)
			}
			return nil
		})
		// A new key gets new tunnels.
		other := keyring.New()
		text := func(b []byte) string {
			return base64.StdEncoding.EncodeToString([]byte(base64.StdEncoding.EncodeToString(b)))
		}
		patch(fmt.Sprintf(`"privateKey":%q,"publicKey":%q`, text(other[:]), text(publicKey(other))))
		within(t, "tunnels of the other key", func() error {
			if err := s.client.Get(t.Context(), key, &secret); err != nil {
				return err
			}
			if got := string(secret.Data["tunnels"]); got != keyring.Tunnels(other, 2) && got != keyring.Tunnels(other, 3) {
				return errors.New(got)
			}
			return nil
		})
	})

	t.Run("a gateway that may not write the Secret reports this and continues", func(t *testing.T) {
		s.namespace(t, "forbidden")
		private := keyring.New()
		s.create(t, keySecret("forbidden", ringOf(private), 1, noon))
		config := s.restricted(t, "reader-of-secrets",
			rbacv1.PolicyRule{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: []string{"get", "list", "watch"}},
			rbacv1.PolicyRule{APIGroups: []string{"", "net.liqo.io"}, Resources: []string{"pods", "services", "natmappings", "tunnelendpoints"}, Verbs: []string{"get", "list", "watch", "patch"}},
			rbacv1.PolicyRule{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Verbs: []string{"*"}})
		r := start(t, GatewayOptions{Config: config, Namespace: "forbidden", Pod: "p", Cluster: self, Tunnels: 2})
		if !<-r.serving {
			t.Error("not active")
		}
		within(t, "it says so", func() error { // the patch is repeated if the Role was not effective yet
			r.mu.Lock()
			defer r.mu.Unlock()
			if problems := r.desired.snapshot.Problems; len(problems) != 1 || problems[0].Field != "data.tunnels" || !strings.Contains(problems[0].Message, "forbidden") {
				return fmt.Errorf("problems %v", problems)
			}
			return nil
		})
	})

	t.Run("a gateway that may not read agents' reports continues without them", func(t *testing.T) {
		s.namespace(t, "rollback")
		s.installCRDs(t)
		s.installReports(t)
		config := s.restricted(t, "before-reports",
			rbacv1.PolicyRule{APIGroups: []string{"", "coordination.k8s.io"}, Resources: []string{"secrets", "pods", "services", "leases", "configmaps"}, Verbs: []string{"*"}},
			rbacv1.PolicyRule{APIGroups: []string{"net.liqo.io"}, Resources: []string{"tunnelendpoints", "natmappings"}, Verbs: []string{"list", "watch"}})
		r := start(t, GatewayOptions{Config: config, Namespace: "rollback", Pod: "p", Node: "n1", Cluster: self})
		within(t, "ready", r.Ready)

		// The gateway knows the owner of a Pod's address.
		web := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "rollback", Name: "web"}, Spec: corev1.PodSpec{NodeName: "n2", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		s.create(t, web)
		web.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.244.2.7", PodIPs: []corev1.PodIP{{IP: "10.244.2.7"}}}
		if err := s.client.Status().Update(t.Context(), web); err != nil {
			t.Fatal(err)
		}
		within(t, "the name of a Pod", func() error {
			if o := r.Owner(netip.MustParseAddr("10.244.2.7")); o != (fabric.Owner{Pod: "rollback/web", Node: "n2"}) {
				return fmt.Errorf("%+v", o)
			}
			return nil
		})
	})

	t.Run("watches resume at once after a long outage of the API server", func(t *testing.T) {
		s.namespace(t, "away")
		path, config := newAPIPath(t, s)
		r := start(t, GatewayOptions{Config: config, Namespace: "away", Pod: "p", Cluster: self})
		<-r.serving
		path.cut()
		before := path.tried.Load()
		// Each of five kinds is watched again once a second. In a minute, the reflectors of
		// client-go alone would make six or seven attempts, and the election thirty.
		within(t, "trying again at once", func() error {
			if n := path.tried.Load() - before; n < 90 {
				return fmt.Errorf("%d times", n)
			}
			return nil
		})
		te := endpoint(9)
		te.Namespace, te.CreationTimestamp, te.Generation = "away", metav1.Time{}, 0
		s.create(t, &te)
		begin := time.Now()
		path.mend()
		within(t, "the new peer", func() error {
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.desired.snapshot.Gateway.Peers) != 1 {
				return errors.New("no peer")
			}
			return nil
		})
		t.Logf("a new peer is known %v after the API server is back", time.Since(begin).Round(time.Millisecond))
		if _, active := r.Active(); !active || len(r.serving) > 0 {
			t.Error("it was not active all the time")
		}
		if err := s.client.Delete(t.Context(), &te); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("a replica starts while the API server is unavailable", func(t *testing.T) { testCarryingOn(t, s) })

	t.Run("a failing status write delays no other", func(t *testing.T) {
		s.namespace(t, "writes")
		s.namespace(t, "tenants")
		all := []string{"get", "list", "watch", "create", "update", "patch"}
		config := s.restricted(t, "writer",
			rbacv1.PolicyRule{APIGroups: []string{"", "coordination.k8s.io"}, Resources: []string{"secrets", "pods", "services", "leases", "configmaps"}, Verbs: all},
			rbacv1.PolicyRule{APIGroups: []string{"net.liqo.io"}, Resources: []string{"tunnelendpoints", "natmappings"}, Verbs: []string{"list", "watch"}},
			rbacv1.PolicyRule{APIGroups: []string{"net.liqo.io"}, Resources: []string{"tunnelendpoints/status"}, ResourceNames: []string{"peer2", "peer3"}, Verbs: []string{"patch"}})
		r := start(t, GatewayOptions{Config: config, Namespace: "writes", Pod: "p", Cluster: self})
		<-r.serving
		ctx, cancel := context.WithCancel(t.Context())
		var group sync.WaitGroup
		defer group.Wait()
		defer cancel()
		rtt := 5 * time.Millisecond
		var mu sync.Mutex
		for _, peer := range []string{"peer2", "peer3"} { // a new Role takes a moment to become effective
			within(t, "the right to write", func() error {
				te := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: "tenants", Name: peer}}
				err := r.client.Status().Patch(t.Context(), te, client.RawPatch(types.MergePatchType, []byte("{}")))
				if apierrors.IsNotFound(err) {
					return nil
				}
				return fmt.Errorf("%w", err)
			})
		}
		begin := time.Now()
		group.Go(func() {
			r.Write(ctx, func() {}, func() (Report, error) {
				mu.Lock()
				defer mu.Unlock()
				report := Report{Interface: "isthmus.host", Index: 7, NextHop: netip.MustParseAddr("169.254.100.1")}
				for i := range 3 {
					report.Peers = append(report.Peers, PeerReport{ID: fmt.Sprint("id-", i+1), Status: v1alpha1.Connected, Message: v1alpha1.ConnectedMessage, RTT: rtt})
				}
				return report, nil
			})
		})
		for n := 1; n <= 3; n++ {
			te := endpoint(n)
			te.CreationTimestamp, te.Generation = metav1.Time{}, 0
			s.create(t, &te)
		}
		version := func(n int) string {
			var te v1alpha1.TunnelEndpoint
			if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "tenants", Name: fmt.Sprint("peer", n)}, &te); err != nil {
				t.Fatal(err)
			}
			if (te.Status.Connection.Status == v1alpha1.Connected) != (n > 1) {
				return ""
			}
			return te.ResourceVersion
		}
		within(t, "the two that can be written", func() error {
			if version(2) == "" || version(3) == "" {
				return errors.New("not yet")
			}
			return nil
		})
		v3 := version(3)

		// Another client changes the status: the gateway writes its value again, once.
		var te v1alpha1.TunnelEndpoint
		if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "tenants", Name: "peer2"}, &te); err != nil {
			t.Fatal(err)
		}
		te.Status.GatewayIP = "192.0.2.66"
		if err := s.client.Status().Update(t.Context(), &te); err != nil {
			t.Fatal(err)
		}
		within(t, "what was edited", func() error {
			if err := s.client.Get(t.Context(), client.ObjectKeyFromObject(&te), &te); err != nil {
				return err
			}
			if te.Status.GatewayIP != "172.30.1.11" {
				return errors.New(te.Status.GatewayIP)
			}
			return nil
		})
		mu.Lock()
		rtt = 500 * time.Millisecond // enough of a change to be written, but too soon after the last write
		mu.Unlock()
		v2 := te.ResourceVersion
		time.Sleep(4 * time.Second)
		if version(2) != v2 || version(3) != v3 || version(1) == "" {
			t.Error("written at rest")
		}
		// The gateway repeated the forbidden write a few times, at growing intervals.
		failed := func() float64 { return testutil.ToFloat64(r.metrics.writes.WithLabelValues("TunnelEndpoint", "error")) }
		within(t, "a second attempt", func() error {
			if failed() < 2 {
				return errors.New("none")
			}
			return nil
		})
		if n, passed := failed(), time.Since(begin); n > 3+math.Log2(1+passed.Seconds()) {
			t.Errorf("%v failed writes in %v", n, passed)
		}
	})
}

func testHandOver(t *testing.T, s *apiServer) {
	s.installCRDs(t)
	s.installReports(t)
	s.namespace(t, "handover")
	s.create(t, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "handover"}})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "handover"}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "172.30.1.7"}}
	if err := s.client.Status().Patch(t.Context(), node, client.Merge); err != nil {
		t.Fatal(err)
	}
	s.create(t, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "handover", Name: "gateway", Labels: serviceLabels},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5871, Protocol: corev1.ProtocolUDP}}}})
	var replicas []*testReplica
	for i := range 2 {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "handover", Name: fmt.Sprint("gateway-", i), Labels: podLabels},
			Spec: corev1.PodSpec{NodeName: "handover", Containers: []corev1.Container{{Name: "gateway", Image: "i"}}}}
		s.create(t, p)
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: fmt.Sprint("10.1.0.", i+1), PodIPs: []corev1.PodIP{{IP: fmt.Sprint("10.1.0.", i+1)}}}
		if err := s.client.Status().Update(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		r := start(t, GatewayOptions{Config: s.config, Namespace: "handover", Pod: p.Name, PodIP: netip.MustParseAddr(p.Status.PodIP), Node: "handover", Cluster: self})
		replicas = append(replicas, r)
		within(t, "ready", func() error { return r.Ready() })
		if i == 0 && !<-r.serving {
			t.Fatal("the first is not active")
		}
	}
	first, second := replicas[0], replicas[1]
	pointsTo := func(to string) func() error {
		return func() error {
			var service corev1.Service
			if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "handover", Name: "gateway"}, &service); err != nil {
				return err
			}
			if at := service.Annotations[isthmus.AnnotationGateways]; at != to {
				return fmt.Errorf("the Service leads to %q", at)
			}
			return nil
		}
	}
	nothing := func() (Report, error) { return Report{}, nil }
	var writing sync.WaitGroup
	writing.Go(func() { first.Write(t.Context(), func() {}, nothing) })
	within(t, "it leads to the first", pointsTo("10.1.0.1"))

	writing.Go(first.stop)
	if !<-second.serving {
		t.Error("the second is not active")
	}
	select {
	case <-first.serving:
		t.Error("the first has ended before the nodes know of the second")
	default:
	}
	// An ending replica continues to wait if the Service names a Pod that does not hold the Lease,
	// because that Pod may not be active.
	stranger := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "handover", Name: "gateway-before", Labels: podLabels},
		Spec: corev1.PodSpec{NodeName: "handover", Containers: []corev1.Container{{Name: "gateway", Image: "i"}}}}
	s.create(t, stranger)
	stranger.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.1.0.9", PodIPs: []corev1.PodIP{{IP: "10.1.0.9"}}}
	if err := s.client.Status().Update(t.Context(), stranger); err != nil {
		t.Fatal(err)
	}
	service := &corev1.Service{}
	key := client.ObjectKey{Namespace: "handover", Name: "gateway"}
	if err := s.client.Get(t.Context(), key, service); err != nil {
		t.Fatal(err)
	}
	service.Annotations[isthmus.AnnotationGateways] = "10.1.0.9"
	if err := s.client.Update(t.Context(), service); err != nil {
		t.Fatal(err)
	}
	within(t, "the first knows both", func() error {
		var p corev1.Pod
		err := errors.Join(first.objects.Get(t.Context(), client.ObjectKeyFromObject(stranger), &p), first.objects.Get(t.Context(), key, service))
		if err == nil && (p.Status.PodIP == "" || service.Annotations[isthmus.AnnotationGateways] != "10.1.0.9") {
			return errors.New("not yet")
		}
		return err
	})
	if next, waiting := first.successor(); next != "" || !waiting {
		t.Errorf("%q follows the first, whose successor has not named itself", next)
	}
	ctx, cancel := context.WithCancel(t.Context())
	placed := make(chan struct{}, 1)
	defer writing.Wait()
	defer cancel()
	writing.Go(func() {
		second.Write(ctx, func() {
			select {
			case placed <- struct{}{}:
			default:
			}
		}, nothing)
	})
	<-placed
	within(t, "it leads to the second", pointsTo("10.1.0.2"))
	if <-first.serving {
		t.Error("the first serves again")
	}
}

// apiPath is a connection to an API server that a test can cut.
type apiPath struct {
	tried       atomic.Int64 // attempts to connect
	mu          sync.Mutex
	unreachable bool
	open        []net.Conn
}

func newAPIPath(t *testing.T, s *apiServer) (*apiPath, *rest.Config) {
	t.Helper()
	w := &apiPath{}
	t.Cleanup(w.cut)
	config := rest.CopyConfig(s.config)
	config.Dial = w.dial
	return w, config
}

func (w *apiPath) dial(ctx context.Context, network, address string) (net.Conn, error) {
	w.tried.Add(1)
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unreachable {
		conn.Close()
		return nil, syscall.ECONNREFUSED
	}
	w.open = append(w.open, conn)
	return conn, nil
}

func (w *apiPath) mend() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unreachable = false
}

func (w *apiPath) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range w.open {
		c.Close()
	}
	w.open, w.unreachable = nil, true
}

func compact(replicas []*testReplica) (some []*testReplica) {
	for _, r := range replicas {
		if r != nil {
			some = append(some, r)
		}
	}
	return some
}

// An older admission policy rejects the deletion cost of Pods. That must not delay the label by
// which peers find the active gateway.
func TestRejectedDeletionCostDoesNotDelayThePodLabel(t *testing.T) {
	s := newAPIServer(t)
	s.namespace(t, "refused")
	g, err := NewGateway(GatewayOptions{Config: s.config, Namespace: "refused", Pod: "p", Cluster: self})
	if err != nil {
		t.Fatal(err)
	}
	w := &writer{Gateway: g, memory: make(map[types.UID]*memory)}
	have := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "refused", Name: "p", UID: "u", ResourceVersion: "1"}} // this Pod does not exist, so the patch fails
	want := have.DeepCopy()
	want.Annotations = map[string]string{corev1.PodDeletionCost: activeDeletionCost}
	m := w.memoryOf(have)
	w.patchFor(t.Context(), "Pod", have, want, false, &m.cost)
	if now := time.Now(); !m.due(have, now) || m.dueFor(have, &m.cost, now) || m.cost.failures != 1 {
		t.Errorf("%+v", m)
	}
}

// mutedConn is a socket that neither sends nor receives while it is muted.
type mutedConn struct {
	net.PacketConn
	muted *atomic.Bool
}

func (c mutedConn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		n, from, err := c.PacketConn.ReadFrom(b)
		if err != nil || !c.muted.Load() {
			return n, from, err
		}
	}
}

func (c mutedConn) WriteTo(b []byte, to net.Addr) (int, error) {
	if c.muted.Load() {
		return len(b), nil
	}
	return c.PacketConn.WriteTo(b, to)
}

func testCutOff(t *testing.T, s *apiServer) {
	s.namespace(t, "cutoff")
	path, config := newAPIPath(t, s)
	var muted atomic.Bool
	// Addresses that no concurrent run of this test uses.
	network := [4]byte{127, byte(rand.IntN(256)), byte(rand.IntN(256)), 0}
	begin := func(i int, config *rest.Config, with ...func(*Gateway)) *testReplica {
		network[3] = byte(i + 1)
		addr := netip.AddrFrom4(network)
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "cutoff", Name: fmt.Sprint("gateway-", i), Labels: podLabels},
			Spec: corev1.PodSpec{NodeName: "cutoff", Containers: []corev1.Container{{Name: "gateway", Image: "i"}}}}
		s.create(t, p)
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: addr.String(), PodIPs: []corev1.PodIP{{IP: addr.String()}}}
		if err := s.client.Status().Update(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		return start(t, GatewayOptions{Config: config, Namespace: "cutoff", Pod: p.Name, PodIP: addr, Cluster: self}, with...)
	}
	first := begin(0, config, func(g *Gateway) {
		listen := g.listen
		g.listen = func() (net.PacketConn, error) {
			c, err := listen()
			return mutedConn{c, &muted}, err
		}
	})
	serves(t, first, true)
	second := begin(1, s.config)
	within(t, "the standby", func() error {
		if err := second.Ready(); err != nil {
			return err
		}
		if n := testutil.CollectAndCount(first.Collector(), "isthmus_gateway_standbys"); n != 1 {
			return fmt.Errorf("%d series", n)
		}
		if n, _ := first.election.standbys(time.Now()); n != 1 {
			return fmt.Errorf("%d standbys", n)
		}
		return nil
	})

	path.cut()
	lease := func() (l coordinationv1.Lease) {
		if err := s.client.Get(t.Context(), client.ObjectKey{Namespace: "cutoff", Name: isthmus.LeaseGateway}, &l); err != nil {
			t.Fatal(err)
		}
		return l
	}
	last := first.election.lastContact()
	within(t, "the standby renews the Lease for the first", func() error {
		if l := lease(); l.Spec.RenewTime.Time.Before(last.Add(leaseDuration)) {
			return fmt.Errorf("renewed at %v", l.Spec.RenewTime)
		}
		return nil
	})
	if l := lease(); holderOf(&l) != "gateway-0" || *l.Spec.LeaseTransitions != 1 {
		t.Errorf("the Lease is %+v", l.Spec)
	}
	if _, active := first.Active(); !active || len(first.serving)+len(second.serving) > 0 {
		t.Error("the first was not the only active one all the time")
	}

	muted.Store(true)
	serves(t, first, false)
	if err := first.Ready(); err == nil || !strings.Contains(err.Error(), "Pod gateway-1, which may have taken over, does not answer at UDP port 5870") {
		t.Errorf("ready: %v", err)
	}
	serves(t, second, true)
	muted.Store(false)
	within(t, "the first hears of its successor", func() error {
		if pod, active := first.Active(); pod != "gateway-1" || active {
			return fmt.Errorf("%q, %v", pod, active)
		}
		return nil
	})
	if len(first.serving) > 0 {
		t.Error("the first has served again")
	}
	path.mend()
	within(t, "ready", first.Ready)
}
