package kube

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/internal/kubeerr"
	"github.com/isthmus-net/isthmus/internal/owncluster"
)

// restConfig returns a configuration for watches, which are few and long requests.
func (g *Gateway) restConfig() *rest.Config {
	config := rest.CopyConfig(g.o.Config)
	config.QPS = -1
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &retryingTransport{next, &g.reading} })
	return config
}

// retryingTransport repeats a request while there is no connection to the API server. The
// reflectors of client-go wait up to a minute between attempts, which protects an API server from
// thousands of clients. Gateways are few, so they may reconnect at once.
type retryingTransport struct {
	next http.RoundTripper
	on   *atomic.Bool // false: return an error at once
}

// RoundTrip implements http.RoundTripper.
func (p *retryingTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	for {
		response, err := p.next.RoundTrip(r)
		if err == nil || r.Body != nil || !p.on.Load() {
			return response, err
		}
		select {
		case <-r.Context().Done():
			return nil, err
		case <-time.After(time.Second):
		}
	}
}

// kinds returns the watched kinds.
func (g *Gateway) kinds() map[client.Object]cache.ByObject {
	here := map[string]cache.Config{g.o.Namespace: {}}
	kinds := map[client.Object]cache.ByObject{
		&v1alpha1.TunnelEndpoint{}:   {},
		&v1alpha1.NatMapping{}:       {},
		&isthmus.NetworkAllocation{}: {Transform: slimOwn},
		&corev1.Node{}:               {Transform: slimNode},
		&discoveryv1.EndpointSlice{}: {Namespaces: map[string]cache.Config{
			metav1.NamespaceDefault: {FieldSelector: fields.OneTermEqualSelector("metadata.name", "kubernetes")}}},
		&corev1.Secret{}:        {Namespaces: named(g.o.Namespace, keyring.SecretName)}, // presharedKeys watches the other Secret
		&coordinationv1.Lease{}: {Namespaces: named(g.o.Namespace, isthmus.LeaseGateway)},
		&corev1.Pod{}:           g.pods(here),
		&corev1.Service{}:       {Namespaces: here, Label: labels.SelectorFromSet(serviceLabels)},
	}
	if g.o.Node != "" {
		kinds[&isthmus.NodeNetworks{}] = cache.ByObject{Namespaces: here, Transform: slimReport}
	}
	return kinds
}

// named selects the object with this namespace and name.
func named(namespace, name string) map[string]cache.Config {
	return map[string]cache.Config{namespace: {FieldSelector: fields.OneTermEqualSelector("metadata.name", name)}}
}

// pods selects the gateway's Pods. For a replica in its own network namespace it selects all
// Pods, because this replica delivers packets to them.
func (g *Gateway) pods(here map[string]cache.Config) cache.ByObject {
	if g.o.Node == "" {
		return cache.ByObject{Namespaces: here, Label: labels.SelectorFromSet(podLabels)}
	}
	all := reachablePods()
	all.Transform = func(o any) (any, error) {
		if p, ok := o.(*corev1.Pod); ok && isGateway(p, g.o.Namespace) {
			return o, nil // this package also writes these Pods, so they must be complete
		}
		return slimPod(o)
	}
	return all
}

// Owner returns the owner of an address in the cluster, according to the Pods and Nodes that a
// gateway in a Pod watches to deliver packets. For a host-network gateway, which delivers no
// packets to Pods, the owner is always unknown. Owner may be called concurrently.
func (g *Gateway) Owner(addr netip.Addr) fabric.Owner { return g.locations.owner(addr) }

// podNetwork returns the nodes and pods to which a replica with its own network namespace
// delivers. It is empty for a host-network gateway.
func (g *Gateway) podNetwork() (n fabric.PodNetwork, err error) {
	if g.o.Node == "" {
		return n, nil
	}
	n = g.locations.network(g.o.PodIP)
	for _, node := range n.Nodes {
		if node.Name == n.Node && slices.Contains(node.Addrs, n.Pod) {
			return n, fmt.Errorf("POD_IP %v is an address of Node %s: the Pod has hostNetwork; want --host-network, or hostNetwork: false", n.Pod, node.Name)
		}
	}
	return n, nil
}

// watchReports watches the agents' reports. It returns once the reports have been read, or once
// reading has failed: an older Role may forbid reading, and few clusters need the reports.
func (g *Gateway) watchReports(ctx context.Context, group *sync.WaitGroup) {
	settled := make(chan struct{})
	settle := sync.OnceFunc(func() { close(settled) })
	group.Go(func() {
		defer settle()
		// watchBy returns an error only when ctx ends; the cache logs problems.
		_ = g.objects.watchBy(ctx, g.locations.handler(g.look.set), func(error) { settle() }, &isthmus.NodeNetworks{})
	})
	<-settled
}

// waiter returns a function that logs its argument as the reason for waiting: whenever the reason
// changes, and twice a minute.
func (g *Gateway) waiter() func(error) {
	var lastLogged time.Time
	var last string
	return func(err error) {
		if err == nil {
			return
		}
		g.mu.Lock()
		g.wait = kubeerr.Plain("the API server", err)
		g.mu.Unlock()
		if text := err.Error(); text != last || time.Since(lastLogged) > 30*time.Second {
			last, lastLogged = text, time.Now()
			g.log.Warn("waiting for the API server", "error", err)
		}
	}
}

// identity returns the identity of our cluster. If the options contain a cluster ID, identity
// returns the ID and the name in the options. It does not read a missing name from the API server,
// because names are only shown to people.
func (g *Gateway) identity(ctx context.Context) (v1alpha1.ClusterIdentity, error) {
	if g.o.Cluster.ClusterID != "" {
		return g.o.Cluster, nil // was validated with the command line
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return owncluster.Identify(ctx, g.client, g.o.Namespace, g.o.Cluster)
}

// questioner returns the questioner for e, and the saved state about the other gateways.
func (g *Gateway) questioner(e *election) (*questioner, acquaintance) {
	q := &questioner{election: e, listen: g.listen, log: g.log,
		refused: func(why string, n uint32) { g.metrics.refused.WithLabelValues(why).Add(float64(n)) },
		private: func() [32]byte {
			g.mu.Lock()
			defer g.mu.Unlock()
			return g.desired.snapshot.Keys.Gateways
		}}
	if g.o.StateDirectory == "" {
		return q, acquaintance{}
	}
	before, known, err := rememberOthers(g.o.StateDirectory)
	if err != nil {
		g.log.Error("cannot read the saved state of other gateways; waiting for the API server", "directory", g.o.StateDirectory, "error", err)
	}
	q.savedKey = before
	e.recall(known)
	return q, known
}
