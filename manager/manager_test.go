package manager

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/internal/owncluster"
	"github.com/isthmus-net/isthmus/internal/postquantum"
	"github.com/isthmus-net/isthmus/manager/facts"
	"github.com/isthmus-net/isthmus/manager/ipamrpc"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// runManager runs the whole manager until the test or stop ends it.
func (w *world) runManager(o Options) (stop func()) {
	w.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, o) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			switch {
			case err != nil && strings.Contains(err.Error(), "grace period"): // a machine that stalls for ten seconds causes this error
				w.T.Logf("the manager ended with: %v", err)
			case err != nil:
				w.T.Errorf("the manager ended with: %v", err)
			}
		case <-time.After(time.Minute):
			w.T.Error("the manager does not end")
		}
	}
	return stop
}

// A side is one of two clusters, each with its own API server and manager. The test plays its
// gateway.
type side struct {
	*world
	server          *kubetest.Server
	pods            string
	peer            *managertest.Remote // the other side, as a peer of this one
	stop            func()
	health, metrics string
	services        bool  // whether services are shared
	old             bool  // whether its API server has no ServiceCIDRs
	log             lines // warnings and errors of its managers
}

// twoSides starts two managers and peers their clusters as `isthmus peer` would. Their PodCIDRs
// have different lengths, and the first contains the second.
func twoSides(t *testing.T) (a, b *side) {
	t.Helper()
	return twoSidesWith(t, managertest.Connect)
}

// twoSidesWith is twoSides with two additions: connect installs the CRDs on the API server of the
// second side, and returns the configuration and a client of that server; edits change each side
// before its manager starts.
func twoSidesWith(t *testing.T, connect func(context.Context, *kubetest.Server) (*rest.Config, client.Client, error), edits ...func(*side)) (a, b *side) {
	t.Helper()
	w := bare(t)
	a = &side{world: w, server: managertest.Server, pods: "10.200.0.0/17"}
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: "manager-peer", Controllers: true})
	w.OK(err)
	t.Cleanup(func() { w.OK(server.Stop()) })
	_, api, err := connect(t.Context(), server)
	w.OK(err)
	v := &world{World: &managertest.World{T: t, Other: api, Ctx: w.Ctx, Prefix: w.Prefix, System: w.System, Stop: func() {}}}
	v.Self = v1alpha1.ClusterIdentity{ClusterID: w.Prefix + "-that", ClusterName: w.Prefix + "-that"}
	v.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: v.System}})
	b = &side{world: v, server: server, pods: "10.200.64.0/19"}
	for _, s := range []*side{a, b} {
		s.Create(&corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: s.System, Name: "isthmus-cluster", Labels: map[string]string{"app.kubernetes.io/name": "clusterid-configmap"}},
			Data:       map[string]string{"CLUSTER_ID": s.Self.ClusterID, "CLUSTER_NAME": s.Self.ClusterName},
		})
		for _, edit := range edits {
			edit(s)
		}
		s.manage()
	}
	a.GatewayWith("192.0.2.1", managertest.SomeKey)
	b.GatewayWith("192.0.2.2", managertest.AnotherKey)
	for _, s := range [][2]*side{{a, b}, {b, a}} {
		s[0].peerWith(s[1])
	}
	return a, b
}

// lines collects a log.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// permit creates the roles of the manager's ServiceAccount from deploy/rbac, in the namespace of
// the test. It returns a kubeconfig of a client that has only these permissions.
func (s *side) permit() (kubeconfig string) {
	s.T.Helper()
	text, err := os.ReadFile("../deploy/rbac/manager.yaml")
	s.OK(err)
	if s.services {
		more, err := os.ReadFile("../deploy/optional/services.yaml")
		s.OK(err)
		text = append(append(text, "\n---\n"...), more...)
	}
	for _, document := range strings.Split(string(text), "\n---\n") {
		var o unstructured.Unstructured
		s.OK(yaml.Unmarshal([]byte(strings.ReplaceAll(document, "isthmus-system", s.System)), &o.Object))
		s.OK(client.IgnoreAlreadyExists(s.API().Create(s.Ctx, &o)))
		s.T.Cleanup(func() { s.OK(client.IgnoreNotFound(s.API().Delete(context.Background(), &o))) })
	}
	cert, key, err := s.server.ClientCert("system:serviceaccount:"+s.System+":isthmus-manager", "system:serviceaccounts", "system:authenticated")
	s.OK(err)
	config, err := clientcmd.Load(s.server.Kubeconfig())
	s.OK(err)
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData = cert, key
	}
	kubeconfig = filepath.Join(s.T.TempDir(), "kubeconfig")
	s.OK(clientcmd.WriteToFile(*config, kubeconfig))
	return kubeconfig
}

// manage runs the manager of a side, with the permissions that it has in a cluster.
func (s *side) manage() {
	s.T.Helper()
	kubeconfig, plan := s.permit(), facts.AddressPlan{PodCIDR: netip.MustParsePrefix(s.pods), ServiceCIDR: managertest.ServicesWherePlanned()}
	if s.old {
		kubeconfig, plan.ServiceCIDR = startOldServer(s.T).kubeconfig(s.T), netip.MustParsePrefix("10.96.0.0/12")
	}
	if s.health = kubetest.Address(9443); s.server == managertest.Server {
		s.metrics = kubetest.Address(9443)
	}
	s.stop = s.runManager(Options{
		Kubeconfig: kubeconfig, Namespace: s.System, LeaderElect: true, Services: s.services,
		Log:           slog.New(slog.NewTextHandler(&s.log, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Plan:          plan,
		HealthAddress: s.health, MetricsAddress: s.metrics, IPAM: ipamrpc.Options{Address: kubetest.Address(9443), Plain: true},
	})
	s.T.Cleanup(s.stop)
}

// peerWith creates the namespace, the identity and the Peering for the other side.
func (s *side) peerWith(other *side) {
	s.T.Helper()
	s.peer = &managertest.Remote{W: s.World, Cluster: other.Self, NS: other.Self.TenantNamespace(), Peering: &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: other.Self.UniqueName()},
		Spec: isthmus.PeeringSpec{Cluster: other.Self,
			TenantNamespace: isthmus.TenantNamespace{Local: other.Self.TenantNamespace(), Remote: s.Self.TenantNamespace()}},
	}}
	s.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.peer.NS}})
	name := metav1.ObjectMeta{Namespace: s.peer.NS, Name: isthmus.DefaultIdentitySecret}
	s.Create(&rbacv1.Role{ObjectMeta: name, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{""}, Resources: []string{"secrets"}, ResourceNames: []string{name.Name}, Verbs: []string{"get", "list", "watch", "patch"},
	}}})
	s.Create(&rbacv1.RoleBinding{ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name.Name},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: s.System, Name: "isthmus-manager"}}})
	s.Create(&corev1.Secret{ObjectMeta: name,
		Data: map[string][]byte{isthmus.SecretKubeconfig: other.server.Kubeconfig()}})
	s.Create(s.peer.Peering)
}

// connected writes into the TunnelEndpoint, as the gateway would, that the tunnel is connected.
func (s *side) connected() {
	s.T.Helper()
	s.Until("there is a TunnelEndpoint", func() bool { return s.peer.Endpoint() != nil })
	te := s.peer.Endpoint()
	te.Status.Connection.Status = v1alpha1.Connected
	s.OK(s.API().Status().Update(s.Ctx, te))
}

// preshared returns the stored state of the exchange of a preshared key with the other side.
func (s *side) preshared(with *side) (state postquantum.State) {
	s.T.Helper()
	var secret corev1.Secret
	s.OK(s.API().Get(s.Ctx, types.NamespacedName{Namespace: s.System, Name: postquantum.SecretName}, &secret))
	s.OK(json.Unmarshal(secret.Data[with.Self.ClusterID], &state))
	return state
}

// waitIdle waits until both sides have a preshared key, because that is the last step of a peering.
// It returns the versions of all objects.
func waitIdle(a, b *side) (versions string) {
	a.T.Helper()
	a.Until("both sides have a preshared key, and nothing is written", func() bool {
		versions = a.versions() + b.versions()
		time.Sleep(time.Second)
		ours := a.preshared(b).Use
		return ours.ID != "" && ours == b.preshared(a).Use && versions == a.versions()+b.versions()
	})
	return versions
}

func TestTwoManagersPeerAndUnpeer(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	a, b := twoSides(t)
	started := time.Now()
	for _, s := range []*side{a, b} {
		s.peer.WaitForReason(isthmus.ConditionTunnelEndpoint, isthmus.ReasonAgreed)
	}
	t.Logf("TunnelEndpoints on both sides after %v", time.Since(started))
	for _, s := range []*side{a, b} {
		s.connected()
		s.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
	}
	as, bs := a.peer.Status(), b.peer.Status()
	for _, n := range []*isthmus.Networks{&as.Remote, &bs.Remote} {
		if n.PodCIDRWhy == "" || n.ExternalCIDRWhy == "" {
			t.Errorf("nobody says why: %+v", n)
		}
		n.PodCIDRWhy, n.ExternalCIDRWhy = "", "" // each side writes its own reasons
	}
	if as.Local != bs.Remote || as.Remote != bs.Local {
		t.Errorf("the two sides do not mirror each other:\n%+v\n%+v", as, bs)
	}
	if as.Local.PodCIDR != a.pods || as.Remote.PodCIDR != b.pods || as.Remote.PodCIDRSeen == b.pods || as.Local.PodCIDRSeen == a.pods {
		t.Errorf("overlapping networks have to be seen as others: %+v", as)
	}
	for url, want := range map[string]string{
		"http://" + a.health + "/healthz":  "ok",
		"http://" + a.health + "/readyz":   "ok",
		"http://" + a.metrics + "/metrics": fmt.Sprintf(`isthmus_manager_peering_ready{peer=%q,peering=%q,reason="Connected"} 1`, b.Self.ClusterID, a.peer.Peering.Name),
	} {
		a.Until(fmt.Sprintf("%s says %q", url, want), func() bool { return strings.Contains(get(t, url), want) }) // the cache may be outdated
	}

	// A restarted manager finds everything as it was, and writes nothing.
	before := waitIdle(a, b)
	if ours, theirs := a.preshared(b), b.preshared(a); ours.Use != theirs.Use || ours.Use.ID == "" || !ours.Changing() {
		t.Error("the two sides have no preshared key in common, or trust it before there was a session")
	}
	a.stop()
	var lease coordinationv1.Lease
	a.OK(a.API().Get(a.Ctx, types.NamespacedName{Namespace: a.System, Name: component}, &lease))
	if holder := lease.Spec.HolderIdentity; holder != nil && *holder != "" {
		t.Errorf("the lease is still held by %q", *holder)
	}
	a.manage()
	a.Until("it leads again", func() bool {
		a.OK(a.API().Get(a.Ctx, types.NamespacedName{Namespace: a.System, Name: component}, &lease))
		return lease.Spec.HolderIdentity != nil && *lease.Spec.HolderIdentity != ""
	})
	time.Sleep(2 * time.Second)
	if after := a.versions() + b.versions(); after != before {
		t.Errorf("resource versions were\n%s and are\n%s", before, after)
	}

	// One side un-peers. The other side reports this, and keeps no working tunnel.
	b.peer.Delete()
	b.Until("the Peering of the one side is gone", b.peer.Deleted)
	a.peer.WaitForReason(isthmus.ConditionPeerConfig, isthmus.ReasonPeerWithdrew)
	a.Until("the other side has no TunnelEndpoint", func() bool { return a.peer.Endpoint() == nil })
	a.peer.Delete()
	a.Until("the Peering of the other side is gone", a.peer.Deleted)
	for _, s := range []*side{a, b} {
		var mappings v1alpha1.NatMappingList
		s.OK(s.API().List(s.Ctx, &mappings))
		for i := range mappings.Items {
			if strings.HasPrefix(mappings.Items[i].Spec.ClusterID, s.Prefix) {
				t.Errorf("NatMapping %s has stayed", mappings.Items[i].Name)
			}
		}
		var configs v1alpha1.NetworkConfigList
		s.OK(s.API().List(s.Ctx, &configs, client.InNamespace(s.peer.NS)))
		if n := len(configs.Items); n > 0 {
			t.Errorf("%d NetworkConfigs have stayed", n)
		}
		s.stop()
		for line := range strings.Lines(s.log.String()) {
			// A reconcile that stop interrupts ends with an error.
			if strings.Contains(line, "forbidden") || strings.Contains(line, "Reconciler error") && !strings.Contains(line, "context canceled") {
				t.Errorf("the manager of %s had trouble: %s", s.Self.ClusterName, line)
			}
		}
	}
	http.DefaultClient.CloseIdleConnections()
	if err := leaktest.Find(leaks,
		goleak.IgnoreAnyFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
		// In controller-runtime v0.25.2, a cache that ends during an event leaves the goroutine of the
		// event's sender behind.
		goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/watch.(*filteredWatch).loop"),
		// goroutines of the second API server, and of the test's connections to it
		goleak.IgnoreAnyFunction("github.com/isthmus-net/isthmus/internal/kubetest.(*guard).start.func1"),
		goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
		goleak.IgnoreAnyFunction("internal/poll.runtime_pollWait"),
	); err != nil {
		t.Error(err)
	}
}

// versions returns the resourceVersions of all objects of the peering.
func (s *side) versions() string {
	s.T.Helper()
	var all strings.Builder
	for _, list := range []client.ObjectList{&isthmus.PeeringList{}, &v1alpha1.NetworkConfigList{}, &v1alpha1.TunnelEndpointList{}, &v1alpha1.NatMappingList{}, &isthmus.NetworkAllocationList{}} {
		s.OK(s.API().List(s.Ctx, list))
		s.OK(meta.EachListItem(list, func(o runtime.Object) error {
			m, err := meta.Accessor(o)
			fmt.Fprintf(&all, "%T %s %s\n", o, m.GetName(), m.GetResourceVersion())
			return err
		}))
	}
	return all.String()
}

func get(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	return string(body)
}

func TestOnlyOneOfTwoManagersWithTheSameNameLeads(t *testing.T) {
	w := bare(t)
	var logs [2]lines
	var stops [2]func()
	for i := range logs {
		stops[i] = w.runManager(Options{
			Kubeconfig: kubeconfigOf(t), Namespace: w.System, LeaderElect: true, Name: "isthmus-manager", Cluster: w.Self,
			Log:  slog.New(slog.NewTextHandler(&logs[i], nil)),
			Plan: facts.AddressPlan{PodCIDR: netip.MustParsePrefix("10.200.0.0/17")},
		})
		t.Cleanup(stops[i])
	}
	// If controller-runtime is stopped while a runnable is added, it does not end in time. So no
	// manager is stopped before everything has been added.
	isLeader := func(i int) bool { return strings.Contains(logs[i].String(), "manager is the leader") }
	w.Until("one leads", func() bool { return isLeader(0) || isLeader(1) })
	// This is longer than two attempts to acquire the Lease. If the machine stalls meanwhile, the
	// second manager may acquire the Lease, and LeaseTransitions counts that. LeaseTransitions does
	// not change if both managers are one holder.
	time.Sleep(5 * time.Second)
	if both := isLeader(0) && isLeader(1); both {
		var lease coordinationv1.Lease
		w.OK(w.API().Get(w.Ctx, types.NamespacedName{Namespace: w.System, Name: component}, &lease))
		if ptr.Deref(lease.Spec.LeaseTransitions, 0) == 0 {
			t.Errorf("both lead: %+v", lease.Spec)
		}
		return // the other manager has already taken over
	}
	first := 0
	if isLeader(1) {
		first = 1
	}
	stops[first]()
	for deadline := time.Now().Add(3 * time.Minute); !isLeader(1 - first); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the other one does not follow:\n%s", logs[1-first].String())
		}
	}
}

// kubeconfigOf writes an administrator's kubeconfig for the server of all tests.
func kubeconfigOf(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := managertest.Server.WriteKubeconfig(path); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestIdentifyPrefersFlagsThenConfigMapThenKubeSystem(t *testing.T) {
	w := bare(t)
	var kubeSystem corev1.Namespace
	w.OK(w.API().Get(w.Ctx, types.NamespacedName{Name: "kube-system"}, &kubeSystem))
	uid := string(kubeSystem.UID)
	cm := func(name, id, clusterName string) *corev1.ConfigMap {
		return &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: name, Labels: map[string]string{"app.kubernetes.io/name": "clusterid-configmap"}},
			Data:       map[string]string{"CLUSTER_ID": id, "CLUSTER_NAME": clusterName},
		}
	}
	check := func(what string, configured, want v1alpha1.ClusterIdentity, problem string) {
		t.Helper()
		got, err := identify(w.Ctx, w.API(), w.System, configured)
		if problem != "" {
			if !errors.Is(err, owncluster.ErrUnknown) || !strings.Contains(err.Error(), problem) {
				t.Errorf("%s: %v, want %q", what, err, problem)
			}
			return
		}
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", what, got, err, want)
		}
	}
	id := func(id, name string) v1alpha1.ClusterIdentity {
		return v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: name}
	}
	check("said", id("x", "y"), id("x", "y"), "")
	check("name said, ID from kube-system", id("", "y"), id(uid, "y"), "")
	check("nothing at all", id("", ""), id("", ""), "want --cluster-name")
	w.Create(cm("one", "from-map", "named"))
	check("ConfigMap", id("", ""), id("from-map", "named"), "")
	check("a flag goes before the ConfigMap", id("x", ""), id("x", "named"), "")
	w.Create(cm("two", "other", "other"))
	check("two ConfigMaps", id("", ""), id("", ""), "has 2 ConfigMaps")
	check("bad ID", id("a b", "y"), id("", ""), "character")
}

func TestManagerDetectsWhenLiqoIsInstalled(t *testing.T) {
	if testing.Short() {
		t.Skip("needs an API server")
	}
	kinds, err := discovery.NewDiscoveryClientForConfig(managertest.Config)
	if err != nil {
		t.Fatal(err)
	}
	changed := make(chan struct{})
	scheme, err := newScheme()
	if err != nil {
		t.Fatal(err)
	}
	direct, err := client.New(managertest.Config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	look := func(ctx context.Context) (optionalKinds, error) { return servedKinds(ctx, kinds, direct, false) }
	go watchKinds(t.Context(), look, optionalKinds{serviceCIDRs: managertest.ServesServiceCIDRs}, 50*time.Millisecond, func() { close(changed) })
	select {
	case <-changed:
		t.Fatal("noticed before it happened")
	case <-time.After(300 * time.Millisecond):
	}
	managertest.InstallLiqo(t)
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Fatal("not noticed")
	}
}

// Even if the API server is handling thousands of requests, the Lease has a connection of its own.
func TestLeaseRequestsUseTheirOwnConnection(t *testing.T) {
	var mu sync.Mutex
	by := make(map[string]string) // by requested object: client address and protocol
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		by[path.Base(r.URL.Path)] = r.RemoteAddr + " " + r.Proto
		w.WriteHeader(http.StatusNotFound)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	cfg := &rest.Config{Host: server.URL, QPS: -1, TLSClientConfig: rest.TLSClientConfig{
		CAData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}}
	leases, done, err := leaseClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	others, err := corev1client.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = others.Secrets("n").Get(t.Context(), "before", metav1.GetOptions{})
	_, _ = leases.Leases("n").Get(t.Context(), "lease", metav1.GetOptions{})
	_, _ = others.Secrets("n").Get(t.Context(), "after", metav1.GetOptions{})
	if by["before"] == "" || by["before"] != by["after"] || by["before"] == by["lease"] || !strings.HasSuffix(by["lease"], "HTTP/1.1") {
		t.Errorf("%v", by)
	}
	if cfg.QPS != -1 || cfg.NextProtos != nil {
		t.Error("the others' configuration has changed")
	}
}
