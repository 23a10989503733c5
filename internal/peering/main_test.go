package peering

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/health"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

var must = expect.NoError

// The kubeconfig files of the two clusters that this package's tests share. Isthmus is installed in
// both.
var files struct{ a, b string }

func TestMain(m *testing.M) { os.Exit(kubetest.Rounds(func() int { return testMain(m) })) }

func testMain(m *testing.M) int {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "peering-test-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	kube, err := kubetest.Build(ctx, os.Stderr)
	if err != nil {
		panic(err)
	}
	servers, errs := make([]*kubetest.Server, 2), make([]error, 2)
	var group sync.WaitGroup
	for i, name := range []string{"a", "b"} {
		group.Go(func() {
			servers[i], errs[i] = kubetest.Start(ctx, kubetest.Options{Name: name, Dir: kube, Controllers: true})
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		panic(err)
	}
	for i, file := range []*string{&files.a, &files.b} {
		defer servers[i].Stop()
		*file = fmt.Sprintf("%s/%c.kubeconfig", dir, 'a'+i)
		if err := servers[i].WriteKubeconfig(*file); err != nil {
			panic(err)
		}
		c, err := Connect(Access{Kubeconfig: *file})
		if err != nil {
			panic(err)
		}
		var said []string
		err = Install(ctx, c, InstallOptions{Identity: v1alpha1.ClusterIdentity{ClusterName: string(rune('a' + i))}, Values: chart.Merge(nodePortService(5871, 1), withoutWorkloads),
			Report: func(line string) { said = append(said, line) }})
		if err != nil {
			panic(err)
		}
		if len(said) < 20 {
			panic(strings.Join(said, "\n"))
		}
	}
	return m.Run()
}

var withoutWorkloads = chart.Values{"workloads": false}

// nodePortService is what a person chooses for a Service of the gateway.
func nodePortService(port, tunnels int) chart.Values {
	return chart.Values{"gateway": chart.Values{"port": float64(port), "tunnels": float64(tunnels), "service": chart.Values{"type": "NodePort"}}}
}

// A pair is two clusters of a test's own, on the two servers that all tests share: an identity in a
// namespace each, and something that does what managers do as far as a person sees it.
type pair struct {
	a, b     *Cluster
	managers [2]*manager
	lines    []string
}

// newPair makes clusters NAME-a and NAME-b.
func newPair(t *testing.T, name string) *pair {
	t.Helper()
	p := &pair{}
	for i, file := range []string{files.a, files.b} {
		c := connectTo(t, Access{Kubeconfig: file, Namespace: "install-" + name})
		c.Identity = v1alpha1.ClusterIdentity{ClusterID: fmt.Sprintf("%s-%c-0000", name, 'A'+i), ClusterName: fmt.Sprintf("%s-%c", name, 'a'+i)}
		must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
		must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "who", Labels: map[string]string{LabelName: identityLabelValue}},
			Data:       map[string]string{keyClusterID: c.Identity.ClusterID, keyClusterName: c.Identity.ClusterName},
		}))
		m := &manager{Cluster: c, name: name, dead: map[string]string{}}
		p.managers[i] = m
		m.renew(t)
		go m.run(t.Context())
		if i == 0 {
			p.a = c
		} else {
			p.b = c
		}
	}
	return p
}

// patient is long enough for whatever has to come true, on however busy a machine.
const patient = 2 * time.Minute

// A deadline is a context whose time is up when the test says so: when all that was to happen
// before has happened.
type deadline struct {
	context.Context
	up chan struct{}
}

func newDeadline(t *testing.T) deadline { return deadline{t.Context(), make(chan struct{})} }

func (d deadline) Done() <-chan struct{} { return d.up }

func (d deadline) Err() error {
	select {
	case <-d.up:
		return ErrNotReady // what the commands' own time is up with
	default:
		return nil
	}
}

func connectTo(t *testing.T, a Access) *Cluster {
	t.Helper()
	c, err := Connect(a)
	must(t, err)
	c.ServerChosen = true // the tests' managers are on this machine as well
	return c
}

func (p *pair) report(line string) { p.lines = append(p.lines, line) }

// said returns the lines since the last call.
func (p *pair) said() string {
	text := strings.Join(p.lines, "\n")
	p.lines = nil
	return text
}

func (p *pair) peer(t *testing.T) error {
	t.Helper()
	_, err := Peer(t.Context(), p.a, p.b, PeerOptions{Timeout: patient, Report: p.report})
	return err
}

func (p *pair) unpeer(t *testing.T) error {
	t.Helper()
	return Unpeer(t.Context(), p.a, p.b, UnpeerOptions{Timeout: patient, Report: p.report})
}

// everything is the resourceVersion of each object that a peering consists of, on both sides.
func (p *pair) everything(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, c := range []*Cluster{p.a, p.b} {
		peer := p.a
		if c == p.a {
			peer = p.b
		}
		s := &side{Cluster: c, peer: &side{Cluster: peer}, namespace: peer.Identity.TenantNamespace(), secret: isthmus.DefaultIdentitySecret}
		secret := &corev1.Secret{}
		secret.Namespace, secret.Name = s.namespace, s.secret
		peering := newPeering(peer.Identity.UniqueName(), peer.Identity, "", "")
		for _, o := range append(s.rights(), s.tenantNamespace(), secret, peering) {
			key := fmt.Sprintf("%s: %T %s", c, o, o.GetName())
			err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o)
			if client.IgnoreNotFound(err) != nil {
				t.Fatal(err)
			}
			if err == nil {
				all[key] = string(o.GetUID()) + " " + o.GetResourceVersion()
			}
			if _, ok := o.(*flowcontrolv1.FlowSchema); ok && err == nil {
				all[key] = string(o.GetUID()) // its status is the API server's
			}
		}
	}
	return all
}

func diff(a, b map[string]string) (changed []string) {
	for _, k := range slices.Sorted(maps.Keys(a)) {
		if a[k] != b[k] {
			changed = append(changed, k)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[k]; !ok {
			changed = append(changed, k)
		}
	}
	return changed
}

// A manager does what the managers do as far as a person outside sees it: it uses the identity,
// writes conditions one after the other, and keeps a Peering until it may go.
type manager struct {
	*Cluster
	name string

	mu     sync.Mutex
	dead   map[string]string // conditions that do not come true, and why
	hold   string            // why no Peering may go; empty: they may
	paused bool
}

func (m *manager) renew(t *testing.T) { m.write(t, "manager-1") }

// release is what a manager does at its end. That a renewal is long ago cannot be written to an API
// server, which says itself when it took it.
func (m *manager) release(t *testing.T) { m.write(t, "") }

func (m *manager) write(t *testing.T, holder string) {
	t.Helper()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: managerLease}}
	_, err := controllerutil.CreateOrUpdate(t.Context(), m.Client, l, func() error {
		l.Spec = coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: new(int32(600)), RenewTime: &metav1.MicroTime{Time: time.Now()}}
		return nil
	})
	must(t, err)
}

// set changes how the manager behaves: kill a condition by a message, let it live again by "".
func (m *manager) set(condition, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if delete(m.dead, condition); message != "" {
		m.dead[condition] = message
	}
}

func (m *manager) keep(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hold = why
}

// pause is the end of the manager, as far as a test goes. What it has begun it ends.
func (m *manager) pause() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = true
}

func (m *manager) run(ctx context.Context) {
	for ctx.Err() == nil {
		var list isthmus.PeeringList
		if m.Client.List(ctx, &list) == nil {
			for i := range list.Items {
				if strings.HasPrefix(list.Items[i].Spec.Cluster.ClusterID, m.name+"-") {
					m.reconcile(ctx, &list.Items[i])
				}
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(30 * time.Millisecond):
		}
	}
}

func (m *manager) reconcile(ctx context.Context, p *isthmus.Peering) {
	m.mu.Lock()
	dead, hold, paused := maps.Clone(m.dead), m.hold, m.paused
	m.mu.Unlock()
	if paused {
		return
	}
	before := p.DeepCopy()
	ready := metav1.Condition{Type: isthmus.ConditionReady, Status: metav1.ConditionTrue, Reason: isthmus.ReasonConnected, ObservedGeneration: p.Generation}
	if !p.DeletionTimestamp.IsZero() {
		if hold == "" || p.Annotations[isthmus.AnnotationForce] == "true" {
			m.finalizers(ctx, p, []string{})
			return
		}
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, isthmus.ReasonUnpeering, hold
	} else if len(p.Finalizers) == 0 {
		m.finalizers(ctx, p, []string{isthmus.FinalizerPeering})
		return
	}
	if _, ok := dead[isthmus.ConditionIdentity]; !ok {
		if err := m.tryIdentity(ctx, p); err != nil {
			dead[isthmus.ConditionIdentity] = err.Error()
		}
	}
	for _, t := range health.Steps {
		c := metav1.Condition{Type: t, Status: metav1.ConditionTrue, Reason: "Fine", ObservedGeneration: p.Generation}
		if why, ok := dead[t]; ok {
			c.Status, c.Reason, c.Message = metav1.ConditionFalse, "Broken", why
			if rest, ok := strings.CutPrefix(why, v1alpha1.ReasonConsent+" "); ok {
				c.Reason, c.Message = v1alpha1.ReasonConsent, rest
			}
			if ready.Status == metav1.ConditionTrue {
				ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, "Broken", t
			}
		}
		meta.SetStatusCondition(&p.Status.Conditions, c)
	}
	meta.SetStatusCondition(&p.Status.Conditions, ready)
	p.Status.ObservedGeneration = p.Generation
	p.Status.Local = isthmus.Networks{PodCIDR: "10.244.0.0/16", PodCIDRSeen: "10.246.0.0/16"}
	p.Status.Remote = isthmus.Networks{PodCIDR: "10.60.0.0/20", PodCIDRSeen: "10.60.0.0/20", PodCIDRWhy: "it is in private space"}
	p.Status.Endpoint, p.Status.Latency = "192.0.2.2:5871", "700µs"
	if !equal(before.Status, p.Status) {
		_ = m.Client.Status().Patch(ctx, p, client.MergeFrom(before)) // the next round sees what became of it
	}
}

func equal(a, b any) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return string(x) == string(y)
}

func (m *manager) finalizers(ctx context.Context, p *isthmus.Peering, want []string) {
	text, _ := json.Marshal(map[string]any{"metadata": map[string]any{"finalizers": want}})
	_ = m.Client.Patch(ctx, p, client.RawPatch(types.MergePatchType, text))
}

// tryIdentity uses the identity for what it is for.
func (m *manager) tryIdentity(ctx context.Context, p *isthmus.Peering) error {
	c, err := m.asPeer(ctx, p.Spec.TenantNamespace.Local)
	if err != nil {
		return err
	}
	return c.List(ctx, &v1alpha1.NetworkConfigList{}, client.InNamespace(p.Spec.TenantNamespace.Remote))
}

// asPeer is a client with the identity that lies in a tenant namespace of the cluster: what its
// manager is at the peer.
func (c *Cluster) asPeer(ctx context.Context, namespace string) (client.Client, error) {
	var secret corev1.Secret
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: isthmus.DefaultIdentitySecret}, &secret); err != nil {
		return nil, err
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[isthmus.SecretKubeconfig])
	if err != nil {
		return nil, err
	}
	config.QPS = -1
	return client.New(config, client.Options{Scheme: c.Client.Scheme(), Mapper: c.Client.RESTMapper()})
}

func gone(t *testing.T, c *Cluster, o client.Object, name string) bool {
	t.Helper()
	err := c.Client.Get(t.Context(), client.ObjectKey{Name: name}, o)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return apierrors.IsNotFound(err)
}
