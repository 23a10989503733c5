package attacks

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/lab"
	"github.com/isthmus-net/isthmus/internal/postquantum"
)

var must, eventually = expect.NoError, expect.Eventually

const (
	pingInterval = 100 * time.Millisecond
	importable   = shared + ",kube-system," + fleet.Namespace // namespaces whose services may be imported
)

// A site is the fleet of the attacks.
type site struct {
	*fleet.Fleet
	a, b, c *fleet.Cluster
	gateway int                // index of a's node with the active gateway or with its Pod
	other   int                // index of a node of cluster a without the active gateway
	undo    []func(*testing.T) // run at the end of the chapter, in reverse order
	talks   []*talk
	rogue   *rogue             // set in chapters where the attacker runs c's gateway
	restore []func(*testing.T) // run at the end of a row that changes an identity Secret

	identityOfC client.Client // c's client for cluster a, in the chapter that un-peers cluster c
}

// madeUpByC returns a filter for packets in the clear that an attacker has crafted: packets from
// c's nodes to the overlay of another cluster. Isthmus in cluster c sends no such packets.
func madeUpByC(c *fleet.Cluster) func(lab.Leak) bool {
	return func(l lab.Leak) bool {
		return slices.ContainsFunc(c.Nodes, func(n *lab.Node) bool { return n.Name == l.Node }) &&
			strings.Contains(l.Packet, fmt.Sprintf(":%d, ", kernel.OverlayPort)) &&
			!slices.ContainsFunc(c.Nodes, func(n *lab.Node) bool {
				return strings.Contains(l.Packet, fmt.Sprintf("-> %v:%d, ", n.Addr, kernel.OverlayPort))
			})
	}
}

// newSite creates the fleet. a's gateways are Pods, or on their nodes' network. The gateways of b
// and c are on their nodes' network.
func newSite(t *testing.T, inPods bool) *site {
	t.Helper()
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	spec := func(podCIDR string, nodes int) lab.ClusterSpec {
		return lab.ClusterSpec{PodCIDR: netip.MustParsePrefix(podCIDR), Nodes: nodes}
	}
	clusters := []lab.ClusterSpec{spec("10.244.0.0/16", 3), spec("10.244.128.0/18", 2), spec("172.20.0.0/22", 2)}
	if inPods {
		clusters[0].GatewayPods = 2
	}
	f, err := fleet.Up(t.Context(), fleet.Options{Binary: isthmus, Kube: kube, Services: true, Spec: lab.Spec{Name: lab.UniqueName("attacks"), Clusters: clusters}})
	must(t, err)
	t.Cleanup(func() {
		for _, l := range f.Sniffer.Excuse(madeUpByC(f.Clusters[2])) {
			t.Logf("an attacker's own: %v", l)
		}
		if t.Failed() {
			for _, c := range f.Clusters {
				for _, name := range c.Components() {
					t.Logf("the end of the log of %s of cluster %s:\n%s", name, c, c.Tail(name, 10))
				}
			}
		}
		if err := f.Down(); err != nil {
			t.Error(err)
		}
	})
	must(t, f.Lab.ServeHosts())
	s := &site{Fleet: f, a: f.Clusters[0], b: f.Clusters[1], c: f.Clusters[2]}
	for _, c := range f.Clusters {
		for _, name := range []string{shared, closed} {
			must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
		}
	}
	for _, pair := range [][2]*fleet.Cluster{{s.a, s.b}, {s.a, s.c}, {s.b, s.c}} {
		s.isthmus(t, "peer", "--context", pair[0].Name, "--remote-context", pair[1].Name, "--services", importable)
	}
	s.gateway, err = s.a.ActiveGateway(t.Context())
	must(t, err)
	s.other = (s.gateway + 1) % len(s.a.Nodes)
	s.checkTraffic(t)
	s.talk(t, s.podOfA(s.other), s.a, s.podOfB(), s.b)
	s.talk(t, s.podOfB(), s.b, s.podOfA(s.gateway), s.a)
	return s
}

// isthmus runs the isthmus program as an administrator does, and returns its output.
func (s *site) isthmus(t *testing.T, args ...string) string {
	t.Helper()
	out, err := s.Isthmus(t.Context(), args...)
	if err != nil {
		t.Fatalf("isthmus %v: %v\n%s", args, err, out)
	}
	return out
}

// after registers a function to run at the end of the chapter.
func (s *site) after(do func(*testing.T)) { s.undo = append(s.undo, do) }

func podOn(c *fleet.Cluster, node int) *lab.Pod { return c.Pods[node*len(c.Pods)/len(c.Nodes)] }

// podOfA returns the first pod of a node of cluster a. podOfB and podOfC return the last pod of
// their cluster.
func (s *site) podOfA(node int) *lab.Pod { return podOn(s.a, node) }
func (s *site) podOfB() *lab.Pod         { return s.b.Pods[len(s.b.Pods)-1] }
func (s *site) podOfC() *lab.Pod         { return s.c.Pods[len(s.c.Pods)-1] }

// host returns the host with the sockets of a's active gateway. addr returns the gateway's address
// there: that of its Pod or of its node.
func (s *site) host() *lab.Host  { return s.a.GatewayHost(s.gateway) }
func (s *site) addr() netip.Addr { return s.a.GatewayAddr(s.gateway) }

// inPod reports whether the gateways of a are Pods.
func (s *site) inPod() bool { return len(s.a.GatewayPods) > 0 }

// seen returns the address under which the local cluster reaches a pod of the remote one.
func (s *site) seen(t *testing.T, local, remote *fleet.Cluster, addr netip.Addr) (seen netip.Addr) {
	t.Helper()
	eventually(t, "networks agreed upon", func() (err error) {
		seen, err = local.Seen(t.Context(), remote, addr)
		return err
	})
	return seen
}

// checkTraffic checks that traffic between the honest clusters passes.
func (s *site) checkTraffic(t *testing.T) {
	t.Helper()
	for _, way := range [][2]*fleet.Cluster{{s.a, s.b}, {s.b, s.a}} {
		from, to := way[0].Pods[len(way[0].Pods)-1], podOn(way[1], 0)
		addr, caller := s.seen(t, way[0], way[1], to.Addr), s.seen(t, way[1], way[0], from.Addr)
		eventually(t, fmt.Sprintf("%s -> %s", from, to), func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			got, err := from.Get(ctx, fmt.Sprintf("http://%v/", addr))
			if want := fmt.Sprintf("%s sees %v\n", to, caller); err == nil && got != want {
				err = fmt.Errorf("%q; want %q", got, want)
			}
			return err
		})
	}
}

// A talk sends pings from one pod to another during the attacks.
type talk struct {
	name         string
	stop, giveUp context.CancelFunc
	group        sync.WaitGroup

	mu    sync.Mutex
	sent  int
	lost  []time.Time
	begun time.Time
}

func (s *site) talk(t *testing.T, from *lab.Pod, at *fleet.Cluster, to *lab.Pod, of *fleet.Cluster) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	pings, giveUp := context.WithCancel(t.Context())
	addr := s.seen(t, at, of, to.Addr)
	k := &talk{name: fmt.Sprintf("%s -> %s", from, to), stop: stop, giveUp: giveUp, begun: time.Now()}
	s.talks = append(s.talks, k)
	t.Cleanup(func() { stop(); giveUp(); k.group.Wait() })
	k.group.Go(func() {
		tick := time.NewTicker(pingInterval)
		defer tick.Stop()
		for ctx.Err() == nil {
			k.group.Go(func() {
				at := time.Now()
				_, err := from.PingWith(pings, addr, lab.PingOptions{Wait: patience})
				k.mu.Lock()
				defer k.mu.Unlock()
				if k.sent++; err != nil {
					k.lost = append(k.lost, at)
				}
			})
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	})
}

// endWithoutLoss ends the talks and checks that no ping was lost. Answers may be late, because
// the machine is busy.
func (s *site) endWithoutLoss(t *testing.T) {
	t.Helper()
	for _, k := range s.talks {
		k.stop()
	}
	defer func() { s.talks = nil }()
	for _, k := range s.talks {
		defer time.AfterFunc(patience, k.giveUp).Stop()
		k.group.Wait()
		t.Logf("%s: %d of %d pings lost", k.name, len(k.lost), k.sent)
		for _, at := range k.lost {
			t.Errorf("%s: the ping of %s, %.1f s after the first, was lost", k.name, at.Format(time.TimeOnly), at.Sub(k.begun).Seconds())
		}
	}
}

// identity returns the identity of a cluster in API objects.
func identity(c *fleet.Cluster) v1alpha1.ClusterIdentity {
	return v1alpha1.ClusterIdentity{ClusterID: c.ID, ClusterName: c.Name}
}

// tenant returns the name of the namespace for a peer.
func tenant(of *fleet.Cluster) string { return identity(of).TenantNamespace() }

// configAs returns a client configuration for a cluster's API server with the identity of its peer.
// Connections start at the peer's control plane, because pods and the test process cannot reach API
// servers.
func configAs(t *testing.T, peer, cluster *fleet.Cluster) *rest.Config {
	t.Helper()
	var secret corev1.Secret
	must(t, peer.Client.Get(t.Context(), client.ObjectKey{Namespace: tenant(cluster), Name: api.DefaultIdentitySecret}, &secret))
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data[api.SecretKubeconfig])
	must(t, err)
	config.Dial, config.QPS = peer.Control.Dial, -1
	return config
}

func clientFor(t *testing.T, config *rest.Config, like client.Client) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: like.Scheme(), Mapper: like.RESTMapper()})
	must(t, err)
	return c
}

// endpointOf returns a cluster's TunnelEndpoint for another cluster.
func endpointOf(t *testing.T, at, of *fleet.Cluster) *v1alpha1.TunnelEndpoint {
	t.Helper()
	var list v1alpha1.TunnelEndpointList
	must(t, at.Client.List(t.Context(), &list, client.MatchingLabels{v1alpha1.LabelClusterID: of.ID}))
	if len(list.Items) != 1 {
		t.Fatalf("%s has %d TunnelEndpoints for %s; want one", at, len(list.Items), of)
	}
	return &list.Items[0]
}

// keysOf returns the WireGuard keys of a cluster's gateways in base64.
func keysOf(t *testing.T, c *fleet.Cluster) (private, public string) {
	t.Helper()
	var secret corev1.Secret
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: "wireguard-pubkey"}, &secret))
	return string(secret.Data["privateKey"]), string(secret.Data["publicKey"])
}

// presharedOf returns a cluster's preshared key for another cluster; zero means none.
func presharedOf(t *testing.T, c, with *fleet.Cluster) [32]byte {
	t.Helper()
	var secret corev1.Secret
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: fleet.Namespace, Name: postquantum.SecretName}, &secret))
	var state postquantum.State
	must(t, json.Unmarshal(secret.Data[with.ID], &state))
	return state.Use.Secret
}

// metric returns the sum of those series of a metric of a's active gateway that have the given
// labels.
func (s *site) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	n, err := s.a.Metric(t.Context(), name, labels...)
	must(t, err)
	return n
}

// checkGrows checks that a metric of a's gateway grows by at least n while do runs.
func (s *site) checkGrows(t *testing.T, n int, name, label string, do func()) {
	t.Helper()
	before := s.metric(t, name, label)
	do()
	eventually(t, fmt.Sprintf("%d more of %s{%s}", n, name, label), func() error {
		if more := s.metric(t, name, label) - before; more < float64(n) {
			return fmt.Errorf("%v more", more)
		}
		return nil
	})
}

func contextOf(t *testing.T, d time.Duration) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithTimeout(t.Context(), d)
}
