package replication

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/leaktest"
)

// A cluster is one of the two real API servers that all tests of this package share. Tests use
// their own namespaces and IDs. Tests that count requests, or freeze or restart a server, do not
// run in parallel.
type cluster struct {
	*kubetest.Server
	config *rest.Config // configuration of an administrator
	admin  client.Client
}

// home has our CRDs. away accepts any spec and status, as a hostile peer's API server might.
var home, away cluster

var everything = kubetest.NewScheme()

func TestMain(m *testing.M) {
	flag.Parse()
	code := 1
	err := func() error {
		if testing.Short() {
			code = m.Run()
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // the first run builds the API server
		defer cancel()
		log.SetLogger(logr.Discard()) // discards the log of controller-runtime
		for name, c := range map[string]*cluster{"home": &home, "away": &away} {
			if err := c.start(ctx, name); err != nil {
				return err
			}
			defer c.Stop()
		}
		leaks := goleak.IgnoreCurrent()
		if code = m.Run(); code != 0 {
			return nil
		}
		return leaktest.Find(leaks,
			goleak.IgnoreAnyFunction("golang.org/x/net/http2.(*ClientConn).readLoop"), // client-go keeps connections to home
			goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"),              // kubetest keeps connections to both servers
			goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
			goleak.IgnoreAnyFunction("github.com/isthmus-net/isthmus/internal/kubetest.(*guard).start.func1")) // kubetest waits for both servers
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func (c *cluster) start(ctx context.Context, name string) (err error) {
	if c.Server, err = kubetest.Start(ctx, kubetest.Options{Name: "replication-" + name, Controllers: true}); err != nil {
		return err
	}
	if c.config, err = c.Config(); err != nil {
		return err
	}
	if c.admin, err = c.Client(); err != nil {
		return err
	}
	text, err := os.ReadFile("../../deploy/crds/net.liqo.io_networkconfigs.yaml")
	if err != nil {
		return err
	}
	var crd apiextensions.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(text, &crd); err != nil {
		return err
	}
	if name == "away" {
		anything := apiextensions.JSONSchemaProps{Type: "object", XPreserveUnknownFields: new(true)}
		schema := crd.Spec.Versions[0].Schema.OpenAPIV3Schema
		schema.Properties["spec"], schema.Properties["status"], schema.XValidations = anything, anything, nil
	}
	if err := c.admin.Create(ctx, &crd); err != nil {
		return err
	}
	for {
		var list v1alpha1.NetworkConfigList
		if err := c.admin.List(ctx, &list); err == nil {
			return nil
		} else if ctx.Err() != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// freeze freezes the server, and returns when it has stopped answering. On a busy machine this
// takes a while.
func (c *cluster) freeze(ctx context.Context) error {
	if err := c.Freeze(); err != nil {
		return err
	}
	for ctx.Err() == nil {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second) // a busy server may need this long for an answer
		answers := c.admin.List(ctx, &v1alpha1.NetworkConfigList{}, client.Limit(1)) == nil
		cancel()
		if !answers {
			return nil
		}
	}
	return ctx.Err()
}

// quick is a pace for tests, with much shorter times than defaultPace. Only the timeout of requests
// stays long, for busy machines.
var quick = pace{
	request: 6 * time.Second, watch: time.Minute, check: 2 * time.Second, settled: time.Second,
	min: 50 * time.Millisecond, max: time.Second, renew: 200 * time.Millisecond, authority: time.Hour,
}

// A pair is one peering between home and away, with a Replicator at home.
type pair struct {
	t      *testing.T
	own    string
	peer   Target
	r      *Replicator
	user   string        // our user name at the peer, if the identity is a certificate
	ahead  atomic.Int64  // how far the Replicator's clock is ahead, in ns
	events atomic.Int64  // number of events of Changed, except the marks
	marks  atomic.Int64  // number of events of Changed that news caused
	stop   func()        // stops the Replicator; further calls do nothing
	ended  chan struct{} // closed when stop has returned
}

var pairs atomic.Int64

// newPair creates namespaces and permissions on both sides, but neither an identity nor a
// NetworkConfig.
func newPair(t *testing.T) *pair {
	t.Helper()
	if testing.Short() {
		t.Skip("needs API servers")
	}
	n := pairs.Add(1)
	p := &pair{t: t, own: fmt.Sprintf("own-%d", n), user: fmt.Sprintf("own-%d", n)}
	p.peer = Target{
		ID:             fmt.Sprintf("peer-%d", n),
		Cluster:        v1alpha1.ClusterIdentity{ClusterID: fmt.Sprintf("peer-%d", n), ClusterName: "bravo"},
		LocalNamespace: fmt.Sprintf("tenant-bravo-%d", n), RemoteNamespace: fmt.Sprintf("tenant-alpha-%d", n),
		IdentitySecret: "identity",
	}
	manager := rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: fmt.Sprintf("manager-%d", n)}
	p.create(home,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.peer.LocalNamespace}},
		role(p.peer.LocalNamespace, "manager",
			rule("", "secrets", "list watch patch", p.peer.IdentitySecret),
			rule("net.liqo.io", "networkconfigs", "get list watch patch"), rule("net.liqo.io", "networkconfigs/status", "patch")),
		binding(p.peer.LocalNamespace, "manager", manager))
	p.create(away,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.peer.RemoteNamespace}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.RemoteNamespace, Name: "peer"}},
		role(p.peer.RemoteNamespace, "peer",
			rule("net.liqo.io", "networkconfigs", "get list watch create update patch delete"),
			rule("", "serviceaccounts/token", "create", "peer")),
		binding(p.peer.RemoteNamespace, "peer",
			rbacv1.Subject{Kind: "ServiceAccount", Namespace: p.peer.RemoteNamespace, Name: "peer"},
			rbacv1.Subject{Kind: "User", APIGroup: rbacv1.GroupName, Name: p.user}))

	cert, key, err := home.ClientCert(manager.Name)
	p.must(err)
	config := &rest.Config{Host: home.URL(), QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: home.CA(), CertData: cert, KeyData: key}}
	p.prepare(config)
	t.Cleanup(func() {
		p.stop()
		if c, err := rest.HTTPClientFor(config); err == nil {
			utilnet.CloseIdleConnectionsFor(c.Transport)
		}
		if n := len(p.r.pool.users); n != 0 {
			t.Errorf("%d endpoints are in use after the end", n)
		}
	})
	return p
}

func (p *pair) prepare(config *rest.Config) {
	p.t.Helper()
	c, err := cache.New(config, cache.Options{Scheme: everything, DefaultNamespaces: map[string]cache.Config{p.peer.LocalNamespace: {}}})
	p.must(err)
	writer, err := client.New(config, client.Options{Scheme: everything})
	p.must(err)
	p.r = New(Options{
		ClusterID: p.own, Client: writer, Cache: c, Config: config,
		Log: slog.New(slog.NewTextHandler(testWriter{p.t}, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Now: func() time.Time { return time.Now().Add(time.Duration(p.ahead.Load())) },
	})
	p.r.pace, p.r.own = quick, quick.own()
	p.ended = make(chan struct{})
	close(p.ended)
	p.stop = func() {}
	p.r.Set([]Target{p.peer})
}

// start runs the Replicator until stop is called.
func (p *pair) start() {
	ctx, cancel := context.WithCancel(context.Background())
	caching, running := make(chan error, 1), make(chan error, 1)
	go func() { caching <- p.r.opts.Cache.Start(ctx) }()
	go func() { running <- p.r.Start(ctx) }()
	listening := make(chan struct{})
	go func() {
		defer close(listening)
		for {
			select {
			case e := <-p.r.Changed():
				if e.Object.GetName() == "mark" {
					p.marks.Add(1)
				} else {
					p.events.Add(1)
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	p.stop = func() {
		cancel()
		if err := errors.Join(<-caching, <-running); err != nil {
			p.t.Error(err)
		}
		<-listening
		p.stop = func() {}
	}
}

// news returns the number of events of Changed, including the event for the present State.
func (p *pair) news() int64 {
	p.t.Helper()
	for range 2 { // the first mark may share a batch with an event that is sent after it
		before := p.marks.Load()
		p.r.mu.Lock()
		p.r.news["mark"] = struct{}{}
		p.r.mu.Unlock()
		wake(p.r.wakeup)
		p.eventually(func() string {
			if p.marks.Load() == before {
				return "Changed tells nothing"
			}
			return ""
		})
	}
	return p.events.Load()
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", strings.TrimSpace(string(b)))
	return len(b), nil
}

func (p *pair) must(err error) {
	if err != nil {
		p.t.Helper()
		p.t.Fatal(err)
	}
}

func (p *pair) create(c cluster, objects ...client.Object) {
	p.t.Helper()
	for _, o := range objects {
		p.must(c.admin.Create(p.t.Context(), o))
	}
}

func role(namespace, name string, rules ...rbacv1.PolicyRule) *rbacv1.Role {
	return &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Rules: rules}
}

func rule(group, resource, verbs string, names ...string) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{resource}, Verbs: strings.Fields(verbs), ResourceNames: names}
}

func binding(namespace, name string, subjects ...rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Subjects: subjects,
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
	}
}

// original returns a NetworkConfig like those that the manager makes.
func (p *pair) original() *v1alpha1.NetworkConfig {
	return &v1alpha1.NetworkConfig{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.peer.LocalNamespace, Name: p.peer.Cluster.UniqueName(),
			Labels: map[string]string{
				v1alpha1.LabelReplication: "true", v1alpha1.LabelRemoteID: p.peer.ID, "team": "blue",
				v1alpha1.LabelOwnership: v1alpha1.OwnershipNetworkConfigCreator,
			},
			Annotations: map[string]string{"note": "kept"},
		},
		Spec: v1alpha1.NetworkConfigSpec{
			RemoteCluster: p.peer.Cluster, PodCIDR: "10.244.0.0/16", ExternalCIDR: "10.245.128.0/17", EndpointIP: "198.51.100.7",
			BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{
				v1alpha1.ConfigPublicKey: "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=", v1alpha1.ConfigPort: "51840",
			},
		},
	}
}

// token returns a new token of the ServiceAccount at the peer. It lasts ten minutes, which is the
// shortest possible life.
func (p *pair) token() string {
	p.t.Helper()
	request := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{ExpirationSeconds: new(int64(600))}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.RemoteNamespace, Name: "peer"}}
	p.must(away.admin.SubResource("token").Create(p.t.Context(), account, request))
	return request.Status.Token
}

func kubeconfig(server string, ca []byte, user *clientcmdapi.AuthInfo) []byte {
	b, err := clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "peer",
		Contexts:       map[string]*clientcmdapi.Context{"peer": {Cluster: "bravo", AuthInfo: "us", Namespace: "kept"}},
		Clusters:       map[string]*clientcmdapi.Cluster{"bravo": {Server: server, CertificateAuthorityData: ca}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"us": user},
	})
	if err != nil {
		panic(err)
	}
	return b
}

func withKubeconfig(b []byte) map[string][]byte {
	return map[string][]byte{isthmus.SecretKubeconfig: b}
}

func (p *pair) byToken() map[string][]byte {
	return withKubeconfig(kubeconfig(away.URL(), away.CA(), &clientcmdapi.AuthInfo{Token: p.token()}))
}

func (p *pair) byCert() map[string][]byte {
	cert, key, err := away.ClientCert(p.user)
	p.must(err)
	return withKubeconfig(kubeconfig(away.URL(), away.CA(), &clientcmdapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}))
}

// byLiqo returns the data of a Secret like those that Liqo makes.
func (p *pair) byLiqo() map[string][]byte {
	cert, key, err := away.ClientCert(p.user, "liqo.io")
	p.must(err)
	return map[string][]byte{
		liqoServer: []byte(away.URL()), liqoCA: away.CA(), liqoCert: cert, liqoKey: key,
		"namespace": []byte(p.peer.RemoteNamespace),
	}
}

// identify writes an identity into the Secret.
func (p *pair) identify(data map[string][]byte) {
	p.t.Helper()
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: p.peer.LocalNamespace, Name: p.peer.IdentitySecret}}
	if err := home.admin.Get(p.t.Context(), client.ObjectKeyFromObject(s), s); err != nil {
		s.Data = data
		p.create(home, s)
		return
	}
	s.Data = data
	p.must(home.admin.Update(p.t.Context(), s))
}

// here and there return the original and the copy, or nil.
func (p *pair) here() *v1alpha1.NetworkConfig   { return p.get(home, p.peer.LocalNamespace) }
func (p *pair) atPeer() *v1alpha1.NetworkConfig { return p.get(away, p.peer.RemoteNamespace) }

func (p *pair) get(c cluster, namespace string) *v1alpha1.NetworkConfig {
	p.t.Helper()
	var o v1alpha1.NetworkConfig
	err := c.admin.Get(p.t.Context(), client.ObjectKey{Namespace: namespace, Name: p.peer.Cluster.UniqueName()}, &o)
	if client.IgnoreNotFound(err) != nil {
		p.t.Fatal(err)
	}
	if err != nil {
		return nil
	}
	return &o
}

// change edits an object, as a person would.
func (p *pair) change(c cluster, get func() *v1alpha1.NetworkConfig, edit func(*v1alpha1.NetworkConfig)) {
	p.t.Helper()
	o := get()
	if o == nil {
		p.t.Fatal("nothing there to edit")
	}
	base := o.DeepCopy()
	edit(o)
	p.must(c.admin.Patch(p.t.Context(), o, client.MergeFrom(base)))
}

// answer writes a status into the copy, as the peer does in answer to the copy's present spec.
func (p *pair) answer(status v1alpha1.NetworkConfigStatus) {
	p.t.Helper()
	c := p.atPeer()
	base := c.DeepCopy()
	c.Status = status
	c.Status.Conditions = slices.Clone(status.Conditions)
	for i := range c.Status.Conditions {
		c.Status.Conditions[i].ObservedGeneration = c.Generation
	}
	p.must(away.admin.Status().Patch(p.t.Context(), c, client.MergeFrom(base)))
}

// eventually waits until the function wrong returns "".
func (p *pair) eventually(wrong func() string) {
	p.t.Helper()
	const limit = 2 * time.Minute
	deadline := time.Now().Add(limit)
	for {
		what := wrong()
		if what == "" {
			return
		}
		if time.Now().After(deadline) {
			s, _ := p.r.State(p.peer.ID)
			p.t.Fatalf("after %v: %s\nstate: %+v", limit, what, s)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// awaitState waits until the State has these reasons. The message of the first condition that is
// not True must contain all words.
func (p *pair) awaitState(identity, published string, words ...string) {
	p.t.Helper()
	p.eventually(func() string {
		s, _ := p.r.State(p.peer.ID)
		if s.Identity.Reason != identity || s.Published.Reason != published {
			return fmt.Sprintf("want the reasons %s and %s", identity, published)
		}
		text := s.Identity.Message + "\n" + s.Published.Message + "\n" + s.Answered.Message
		for _, w := range words {
			if !strings.Contains(text, w) {
				return fmt.Sprintf("the messages lack %q", w)
			}
		}
		return ""
	})
}

func (p *pair) awaitUpToDate() {
	p.t.Helper()
	p.awaitState(isthmus.ReasonIdentityAccepted, isthmus.ReasonUpToDate)
}
