// Package nodes tests Isthmus on real Kubernetes: clusters with kubelet, containerd, the bridge
// CNI plugin and kube-proxy (package kubenodes), installed and peered by the command line. It
// needs root, Debian's containerd and the programs that `make deps-nodes` builds. If they are
// missing, all tests are skipped, because building the programs takes longer than `make test`
// should.
//
// With -all (make test-nodes) there are more plans, larger transfers and faults. -update writes
// the pages in docs that show the results.
package nodes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubenodes/probe"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
	kubesource "github.com/isthmus-net/isthmus/internal/source/kube"
	"github.com/isthmus-net/isthmus/internal/testbin"
)

var must = expect.NoError

var (
	all    = flag.Bool("all", false, "all plans, large transfers and faults: half an hour")
	update = flag.Bool("update", false, "write the pages in docs")
	keep   = flag.Bool("keep", false, "after a failure, let the clusters stand until the test binary is interrupted")
)

// patience is the timeout for expected events on a busy machine.
const patience = 2 * time.Minute

// port is the port of the test server in all pods.
const port = 7000

// fixture is the result of TestMain, or the reason why there is none.
var fixture struct {
	skip    string
	program string
	image   string // archive of the isthmus image
	kube    string
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	kubesource.UseLogger(slog.New(slog.DiscardHandler))
	if err := kubenodes.Available(); err != nil {
		fixture.skip = err.Error()
		return m.Run()
	}
	var err error
	if fixture.kube, err = kubetest.FindNodes(); err != nil {
		fixture.skip = fmt.Sprintf("kubelet and its like are not built ('make deps-nodes' does it, in minutes): %v", err)
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "isthmus-nodes-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if fixture.program, err = testbin.Isthmus(dir); err == nil {
		fixture.image, err = kubenodes.ImageOf(fixture.program, fixture.program+"-image.tar")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer shared.down()
	return m.Run()
}

// A plan is the configuration of two clusters.
type plan struct {
	name     string
	clusters [2]string // default a and b
	pods     [2]string // PodCIDRs
	number   [2]int    // numbers of nodes; default 2
	nodes    [2]kubenodes.NodeOptions
	dns      string   // archive of CoreDNS's image; empty: pods resolve no names
	install  []string // additional arguments of isthmus install
}

var samePlan = plan{
	name: "the same PodCIDR",
	pods: [2]string{"10.244.0.0/16", "10.244.0.0/16"},
	nodes: [2]kubenodes.NodeOptions{
		{Proxy: kubenodes.IPTables, Masquerade: kubenodes.MasqueradePublic},
		{Proxy: kubenodes.NFTables, Masquerade: kubenodes.MasqueradeAll},
	},
}

// A world is two peered clusters with test pods on each node, and a sniffer on the underlay.
type world struct {
	plan    plan
	set     *kubenodes.Set
	a, b    *kubenodes.Cluster
	sniffer *lab.Sniffer
}

// shared is a world of samePlan for all tests that leave it unchanged.
var shared sharedWorld

type sharedWorld struct {
	once sync.Once
	w    *world
	err  error
}

func (s *sharedWorld) get(t *testing.T) *world {
	t.Helper()
	if fixture.skip != "" {
		t.Skip(fixture.skip)
	}
	s.once.Do(func() { s.w, s.err = makeWorld(context.Background(), samePlan) })
	if s.err != nil {
		t.Fatal(s.err)
	}
	return s.w
}

func (s *sharedWorld) down() {
	if s.w != nil {
		if err := s.w.down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// makeClusters creates the clusters of a plan without Isthmus, and a sniffer for the underlay.
func makeClusters(ctx context.Context, p plan, images ...string) (w *world, err error) {
	spec := lab.Spec{Name: lab.UniqueName("nodes"), RPFilter: lab.RPFilterStrict}
	options := map[string]kubenodes.NodeOptions{}
	for i, name := range []string{cmp.Or(p.clusters[0], "a"), cmp.Or(p.clusters[1], "b")} {
		spec.Clusters = append(spec.Clusters, lab.ClusterSpec{Name: name, PodCIDR: netip.MustParsePrefix(p.pods[i]), Nodes: p.number[i]})
		options[name] = p.nodes[i]
	}
	set, err := kubenodes.Up(ctx, kubenodes.Options{Spec: spec, Kube: fixture.kube, Images: images, DNS: p.dns, Nodes: options})
	if err != nil {
		return nil, err
	}
	w = &world{plan: p, set: set, a: set.Clusters[0], b: set.Clusters[1]}
	if w.sniffer, err = set.Lab.Sniff(nil); err != nil {
		return nil, errors.Join(err, w.down())
	}
	return w, nil
}

func makeWorld(ctx context.Context, p plan) (w *world, err error) {
	begin := time.Now()
	step := func(what string) { fmt.Fprintf(os.Stderr, "%6.1f s  %s\n", time.Since(begin).Seconds(), what) }
	if w, err = makeClusters(ctx, p, fixture.image); err != nil {
		return nil, err
	}
	set, made := w.set, w // copies for the cleanup, because an error sets the result w to nil
	step("the nodes are ready")
	defer func() {
		if err != nil {
			if *keep {
				fmt.Fprintf(os.Stderr, "%v\nkept: KUBECONFIG=%s\n", err, set.Kubeconfig)
				select {}
			}
			err = errors.Join(err, made.down())
		}
	}()
	if err = set.Install(ctx, fixture.program, append([]string{"--set", fmt.Sprintf("ipam.port=%d", ipamPort)}, p.install...)...); err != nil {
		return nil, err
	}
	step("Isthmus is installed")
	if err = set.Peer(ctx, fixture.program, w.a, w.b); err != nil {
		return nil, err
	}
	step("peered")
	if err = errors.Join(w.a.Watch(ctx, w.sniffer, w.b), w.b.Watch(ctx, w.sniffer, w.a)); err != nil {
		return nil, err
	}
	for _, c := range set.Clusters {
		if err = startPods(ctx, c); err != nil {
			return nil, err
		}
	}
	step("test pods are ready")
	return w, nil
}

func (w *world) down() error {
	var err error
	if w.sniffer != nil {
		err = w.sniffer.Close()
		fmt.Fprintln(os.Stderr, w.sniffer.Report())
	}
	return errors.Join(err, w.set.Down())
}

// noPlaintext fails the test if the sniffer has seen a packet for a peer in the clear.
func (w *world) noPlaintext(t *testing.T) {
	t.Helper()
	if leaks := w.sniffer.Take(); len(leaks) > 0 {
		t.Errorf("in the clear: %v", leaks)
	}
}

// A kind is the kind of a packet's sender.
type kind string

const (
	pod     kind = "pod"
	hostPod kind = "hostNetwork pod"
	node    kind = "node"
)

var kinds = []kind{pod, hostPod, node}

func podName(k kind, n *kubenodes.Node) string {
	if k == hostPod {
		return "host-" + n.Name
	}
	return "pod-" + n.Name
}

// startPods starts a pod and a hostNetwork pod on each node, and waits until they answer.
func startPods(ctx context.Context, c *kubenodes.Cluster) error {
	for _, n := range c.Nodes {
		for _, k := range []kind{pod, hostPod} {
			err := c.Apply(ctx, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %[1]s, namespace: default, labels: {app: test}}
spec:
  nodeName: %[2]s
  hostNetwork: %[3]t
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  containers:
  - name: server
    image: %[4]s
    args: [serve, "%[5]d"]
    env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
    readinessProbe: {httpGet: {path: /, port: %[5]d}, periodSeconds: 1}
`, podName(k, n), n.Name, k == hostPod, kubenodes.TestImage, port))
			if err != nil {
				return err
			}
		}
	}
	for _, n := range c.Nodes {
		for _, k := range []kind{pod, hostPod} {
			if _, err := address(ctx, c, podName(k, n)); err != nil {
				return err
			}
		}
	}
	return nil
}

// address waits until a pod is ready and returns its address.
func address(ctx context.Context, c *kubenodes.Cluster, name string) (addr netip.Addr, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last error
	err = wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if last = c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, &p); last != nil {
			return false, nil //nolint:nilerr // the wait continues; if it fails, its error includes this one
		}
		last = fmt.Errorf("pod %s: %s", name, p.Status.Phase)
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
				addr, last = netip.ParseAddr(p.Status.PodIP)
			}
		}
		return last == nil, nil
	})
	if err != nil {
		return addr, fmt.Errorf("cluster %s: %w\n%s", c.Name, last, c.Explain())
	}
	return addr, nil
}

// ask sends a request to a test server from a node of its cluster, and decodes the response.
func ask(ctx context.Context, n *kubenodes.Node, server netip.Addr, method, path string, query url.Values, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*patience) // a large transfer may take long
	defer cancel()
	u := url.URL{Scheme: "http", Host: netip.AddrPortFrom(server, port).String(), Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), http.NoBody)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return n.Dial(ctx, network, address)
	}}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", path, resp.Status, strings.TrimSpace(string(b)))
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(b, into)
}

// send sends a probe from a sender of kind k on a node.
func send(ctx context.Context, c *kubenodes.Cluster, n *kubenodes.Node, k kind, r probe.Request) (a probe.Answer, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if k == node {
		r.Dial = n.Dial // net/http connects on another goroutine, which is outside of the node's namespace
		err = n.Do(func() (err error) {
			a, err = probe.Do(ctx, r)
			return err
		})
		return a, err
	}
	from, err := address(ctx, c, podName(k, n))
	if err != nil {
		return a, err
	}
	query, err := url.ParseQuery(r.Query())
	if err != nil {
		return a, err
	}
	return a, ask(ctx, n, from, http.MethodGet, "/probe", query, &a)
}
