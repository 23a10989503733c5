// Package clustertest runs two clusters on real API servers for the tests of commands. It imitates
// the effects of their managers that commands can observe.
package clustertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"maps"
	"path/filepath"

	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

var must = expect.NoError

// Kubeconfigs are the paths of the kubeconfigs of two clusters that a package's tests share. Main
// installs Isthmus in both.
var Kubeconfigs struct{ A, B string }

// Main runs the tests of a package. It first creates two clusters and installs Isthmus in them.
func Main(m *testing.M, install func(ctx context.Context, c *cluster.Cluster, name string) error) {
	os.Exit(kubetest.Rounds(func() int { return testMain(m, install) }))
}

func testMain(m *testing.M, install func(context.Context, *cluster.Cluster, string) error) int {
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "peering-test-")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }() // a leftover directory is harmless
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
	for i, file := range []*string{&Kubeconfigs.A, &Kubeconfigs.B} {
		defer func() { _ = servers[i].Stop() }() // the tests have ended: an error no longer matters
		*file = fmt.Sprintf("%s/%c.kubeconfig", dir, 'a'+i)
		if err := servers[i].WriteKubeconfig(*file); err != nil {
			panic(err)
		}
		c, err := cluster.Connect(cluster.Access{Kubeconfig: *file})
		if err != nil {
			panic(err)
		}
		if err := install(ctx, c, string(rune('a'+i))); err != nil {
			panic(err)
		}
	}
	return m.Run()
}

// WithoutWorkloads are values that leave out the Deployments and the DaemonSet.
var WithoutWorkloads = chart.Values{"workloads": false}

// NodePortService returns the values that select a NodePort Service for the gateway.
func NodePortService(port, tunnels int) chart.Values {
	return chart.Values{"gateway": chart.Values{"port": float64(port), "tunnels": float64(tunnels), "service": chart.Values{"type": "NodePort"}}}
}

// A Pair is two clusters for one test, on the two API servers that all tests share. Each cluster
// has its own namespace and identity, and an imitated manager.
type Pair struct {
	A, B     *cluster.Cluster
	Managers [2]*Manager
	Lines    []string
}

// NewPair creates clusters NAME-a and NAME-b.
func NewPair(t *testing.T, name string) *Pair {
	t.Helper()
	p := &Pair{}
	for i, file := range []string{Kubeconfigs.A, Kubeconfigs.B} {
		c := ConnectTo(t, cluster.Access{Kubeconfig: file, Namespace: "install-" + name})
		c.Identity = v1alpha1.ClusterIdentity{ClusterID: fmt.Sprintf("%s-%c-0000", name, 'A'+i), ClusterName: fmt.Sprintf("%s-%c", name, 'a'+i)}
		must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
		must(t, c.Client.Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: "who", Labels: map[string]string{cluster.LabelName: cluster.IdentityLabelValue}},
			Data:       map[string]string{cluster.KeyClusterID: c.Identity.ClusterID, cluster.KeyClusterName: c.Identity.ClusterName},
		}))
		m := &Manager{Cluster: c, Name: name, Dead: map[string]string{}}
		p.Managers[i] = m
		m.Renew(t)
		go m.Run(t.Context())
		if i == 0 {
			p.A = c
		} else {
			p.B = c
		}
	}
	return p
}

// Patient is a timeout that is long enough for any expected event on a busy machine.
const Patient = 2 * time.Minute

// A Deadline is a context whose timeout the test controls: it expires when the test closes Up. The
// test closes Up after all events that must precede the timeout.
type Deadline struct {
	context.Context
	Up chan struct{}
}

// NewDeadline returns a Deadline that expires when the test closes Up.
func NewDeadline(t *testing.T) Deadline { return Deadline{t.Context(), make(chan struct{})} }

// Done returns a channel that is closed when the test closes Up.
func (d Deadline) Done() <-chan struct{} { return d.Up }

// Err returns nil until the test closes Up, and then the error of a command whose own timeout has
// passed.
func (d Deadline) Err() error {
	select {
	case <-d.Up:
		return cluster.ErrNotReady // the error of a command's own timeout
	default:
		return nil
	}
}

// ConnectTo connects to a cluster on this machine.
func ConnectTo(t *testing.T, a cluster.Access) *cluster.Cluster {
	t.Helper()
	c, err := cluster.Connect(a)
	must(t, err)
	c.ServerChosen = true // as with --server: the tests' managers, on the same machine, can use a loopback address
	return c
}

// Report records a line.
func (p *Pair) Report(line string) { p.Lines = append(p.Lines, line) }

// Reported returns the lines that were passed to Report since the last call of Reported.
func (p *Pair) Reported() string {
	text := strings.Join(p.Lines, "\n")
	p.Lines = nil
	return text
}

// A Manager imitates the effects of a manager that a user observes. It uses the identity, sets
// conditions one after the other, and keeps a Peering's finalizer until the Peering may be deleted.
type Manager struct {
	*cluster.Cluster
	Name string

	mu     sync.Mutex
	Dead   map[string]string // conditions that fail, with their messages
	hold   string            // reason to keep all Peerings that are being deleted; empty: none
	paused bool
}

// Renew renews the manager's Lease.
func (m *Manager) Renew(t *testing.T) { m.write(t, "manager-1") }

// Release gives up the Lease, as a manager does when it exits. A test cannot let the Lease expire
// by an old renewal time, because commands use the time at which the API server received the write.
func (m *Manager) Release(t *testing.T) { m.write(t, "") }

func (m *Manager) write(t *testing.T, holder string) {
	t.Helper()
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: m.Namespace, Name: cluster.ManagerLease}}
	_, err := controllerutil.CreateOrUpdate(t.Context(), m.Client, l, func() error {
		l.Spec = coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: new(int32(600)), RenewTime: &metav1.MicroTime{Time: time.Now()}}
		return nil
	})
	must(t, err)
}

// Set makes a condition fail with a message. An empty message lets the condition become true
// again.
func (m *Manager) Set(condition, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if delete(m.Dead, condition); message != "" {
		m.Dead[condition] = message
	}
}

// Keep makes the manager keep all Peerings that are being deleted, for the given reason. An empty
// reason lets them go.
func (m *Manager) Keep(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hold = why
}

// Pause stops the manager after the work in progress.
func (m *Manager) Pause() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = true
}

// Run imitates the manager until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	for ctx.Err() == nil {
		var list isthmus.PeeringList
		if m.Client.List(ctx, &list) == nil {
			for i := range list.Items {
				if strings.HasPrefix(list.Items[i].Spec.Cluster.ClusterID, m.Name+"-") {
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

func (m *Manager) reconcile(ctx context.Context, p *isthmus.Peering) {
	m.mu.Lock()
	dead, hold, paused := maps.Clone(m.Dead), m.hold, m.paused
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
	if !SameJSON(before.Status, p.Status) {
		// An error needs no handling: the next round compares again.
		_ = m.Client.Status().Patch(ctx, p, client.MergeFrom(before))
	}
}

// SameJSON reports whether two values have the same JSON.
func SameJSON(a, b any) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return string(x) == string(y)
}

func (m *Manager) finalizers(ctx context.Context, p *isthmus.Peering, want []string) {
	text, _ := json.Marshal(map[string]any{"metadata": map[string]any{"finalizers": want}})
	_ = m.Client.Patch(ctx, p, client.RawPatch(types.MergePatchType, text))
}

// tryIdentity makes a request with the Peering's identity, as a manager does.
func (m *Manager) tryIdentity(ctx context.Context, p *isthmus.Peering) error {
	c, err := AsPeer(ctx, m.Cluster, p.Spec.TenantNamespace.Local)
	if err != nil {
		return err
	}
	return c.List(ctx, &v1alpha1.NetworkConfigList{}, client.InNamespace(p.Spec.TenantNamespace.Remote))
}

// AsPeer returns a client with the identity that is stored in a tenant namespace of the cluster.
// The cluster's manager uses this identity at the peer.
func AsPeer(ctx context.Context, c *cluster.Cluster, namespace string) (client.Client, error) {
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

// Deleted reports whether an object does not exist.
func Deleted(t *testing.T, c *cluster.Cluster, o client.Object, name string) bool {
	t.Helper()
	err := c.Client.Get(t.Context(), client.ObjectKey{Name: name}, o)
	if client.IgnoreNotFound(err) != nil {
		t.Fatal(err)
	}
	return apierrors.IsNotFound(err)
}

// Lines records the lines that a command reports.
type Lines []string

// Report records a line.
func (l *Lines) Report(line string) { *l = append(*l, line) }

// Has reports whether a line contains a text.
func (l *Lines) Has(text string) bool {
	return slices.ContainsFunc(*l, func(line string) bool { return strings.Contains(line, text) })
}

// NewCluster creates a cluster with its own API server.
func NewCluster(t *testing.T, name string) (c *cluster.Cluster, kubeconfig string) {
	t.Helper()
	server, err := kubetest.Start(t.Context(), kubetest.Options{Name: name, Controllers: true})
	must(t, err)
	t.Cleanup(func() { must(t, server.Stop()) })
	kubeconfig = filepath.Join(t.TempDir(), "kubeconfig")
	must(t, server.WriteKubeconfig(kubeconfig))
	return ConnectTo(t, cluster.Access{Kubeconfig: kubeconfig, Namespace: "twice"}), kubeconfig
}

// ServesServiceCIDRs reports whether a cluster's API server has the kind ServiceCIDR. Kubernetes
// 1.31 and 1.32 do not.
func ServesServiceCIDRs(t *testing.T, c *cluster.Cluster) bool {
	t.Helper()
	err := c.Client.List(t.Context(), &networkingv1.ServiceCIDRList{})
	if err != nil && !meta.IsNoMatchError(err) {
		t.Fatal(err)
	}
	return err == nil
}

// WithServiceNetwork adds the Service network to a user's values, for a cluster in which it
// cannot be detected.
func WithServiceNetwork(t *testing.T, c *cluster.Cluster, chosen chart.Values) chart.Values {
	t.Helper()
	if ServesServiceCIDRs(t, c) {
		return chosen
	}
	return chart.Merge(chosen, chart.Values{"networks": chart.Values{"serviceCIDR": "10.96.0.0/12"}})
}

// Contains fails the test if text lacks one of wants.
func Contains(t *testing.T, text string, wants ...string) {
	t.Helper()
	for _, w := range wants {
		if !strings.Contains(text, w) {
			t.Errorf("no %q in\n%s", w, text)
		}
	}
}
