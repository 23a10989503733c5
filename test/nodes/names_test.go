package nodes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/kubenodes/probe"
)

// namesWorld creates two clusters with CoreDNS and images, without Isthmus.
func namesWorld(t *testing.T, p plan, images ...string) *world {
	t.Helper()
	if fixture.skip != "" {
		t.Skip(fixture.skip)
	}
	if !*all {
		t.Skip("CoreDNS takes minutes to build: -all (make test-nodes) runs it")
	}
	var err error
	p.dns, err = kubenodes.CoreDNS(t.Context(), t.TempDir())
	must(t, err)
	w, err := makeClusters(t.Context(), p, append(images, fixture.image)...)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			for _, c := range w.set.Clusters {
				t.Log(c.Explain())
			}
			if *keep {
				t.Logf("kept: KUBECONFIG=%s", w.set.Kubeconfig)
				select {}
			}
		}
		if err := w.down(); err != nil {
			t.Error(err)
		}
	})
	for _, c := range w.set.Clusters {
		must(t, startPods(t.Context(), c))
	}
	return w
}

// corefileOf returns the Corefile of a cluster's CoreDNS.
func corefileOf(t *testing.T, c *kubenodes.Cluster) string {
	t.Helper()
	var m corev1.ConfigMap
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: "kube-system", Name: "coredns"}, &m))
	return m.Data["Corefile"]
}

// fetchByName makes a pod fetch octets from a host name. It retries, because CoreDNS learns new
// names with a delay.
func fetchByName(t *testing.T, from *kubenodes.Cluster, n *kubenodes.Node, name string) error {
	t.Helper()
	own, err := address(t.Context(), from, podName(pod, n))
	must(t, err)
	const size = 100_000
	want, err := probe.SHA256(size)
	must(t, err)
	query := url.Values{"url": {fmt.Sprintf("http://%s:%d/octets?n=%d", name, port, size)}}
	for deadline := time.Now().Add(patience); ; time.Sleep(500 * time.Millisecond) {
		var got probe.Transfer
		err := ask(t.Context(), n, own, http.MethodGet, "/fetch", query, &got)
		if err == nil && got.SHA256 != want {
			err = errors.New("other octets than were sent")
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// When the Corefile has the zone, pods must resolve names of imported services by the cluster's own
// CoreDNS. The uninstallation must restore the former Corefile.
func TestNamesOfImportedServicesAreResolvedUntilUninstall(t *testing.T) {
	w := namesWorld(t, samePlan)
	before := map[*kubenodes.Cluster]state{w.a: stateOf(t, w.a), w.b: stateOf(t, w.b)}
	corefile := corefileOf(t, w.a)

	must(t, w.set.Install(t.Context(), fixture.program, "--services"))
	if out, code := w.isthmus(t, "diagnose", "--context", "a"); code != 1 || !strings.Contains(out, "broken: a: names: ZoneMissing") {
		t.Error("diagnose does not say that the zone is missing")
	}
	if got := corefileOf(t, w.a); got != corefile {
		t.Errorf("the Corefile is\n%s", got)
	}
	must(t, w.set.Install(t.Context(), fixture.program, "--configure-dns"))
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Second) { // until CoreDNS has reloaded the Corefile
		if out, code := w.isthmus(t, "diagnose", "--context", "a"); code == 0 && strings.Contains(out, "CoreDNS answers for clusterset.local") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("CoreDNS does not answer")
		}
	}

	own, err := address(t.Context(), w.a, podName(pod, w.a.Nodes[1]))
	must(t, err)
	must(t, importByHand(t.Context(), w.a, own))
	must(t, fetchByName(t, w.a, w.a.Nodes[0], "shop.default.svc.clusterset.local"))
	must(t, w.a.Apply(t.Context(), `{apiVersion: multicluster.x-k8s.io/v1beta1, kind: ServiceExport, metadata: {namespace: default, name: shop}}`))

	for _, c := range w.set.Clusters {
		if _, code := w.isthmus(t, "uninstall", "--context", c.Name); code != 0 {
			t.Fatalf("cluster %s: exit code %d", c.Name, code)
		}
		if got := corefileOf(t, c); got != corefile {
			t.Errorf("cluster %s: the Corefile is\n%s", c.Name, got)
		}
	}
	before[w.b].waitSame(t, w.b)
	// Objects of the user, and the CRD of their kind, must remain.
	var left []string
	for line := range stateOf(t, w.a) {
		if !before[w.a][line] && strings.HasPrefix(line, "object: CustomResourceDefinition") {
			left = append(left, line)
		}
	}
	slices.Sort(left)
	if want := []string{"object: CustomResourceDefinition /serviceexports.multicluster.x-k8s.io", "object: CustomResourceDefinition /serviceimports.multicluster.x-k8s.io"}; !slices.Equal(left, want) {
		t.Errorf("left is %v; want %v", left, want)
	}
	must(t, fetchByName(t, w.a, w.a.Nodes[0], "hand.default.svc.cluster.local"))
}

// importByHand creates the objects of a controller of another implementation, for one pod.
func importByHand(ctx context.Context, c *kubenodes.Cluster, endpoint netip.Addr) error {
	err := c.Apply(ctx, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: hand, namespace: default}
spec: {ports: [{port: %[1]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hand, namespace: default, labels: {kubernetes.io/service-name: hand}}
addressType: IPv4
ports: [{port: %[1]d}]
endpoints: [{addresses: [%[2]q], conditions: {ready: true}}]
`, port, endpoint))
	if err != nil {
		return err
	}
	var s corev1.Service
	if err := c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: "hand"}, &s); err != nil {
		return err
	}
	return c.Apply(ctx, fmt.Sprintf(`
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {name: shop, namespace: default}
spec: {type: ClusterSetIP, ips: [%[1]s], ports: [{port: %[2]d, protocol: TCP}]}
`, s.Spec.ClusterIP, port))
}

// A Service is exported in one cluster. Pods of the other cluster, which have the same addresses,
// reach it by its Multi-Cluster Services name.
func TestAnExportedServiceIsReachedByItsClustersetName(t *testing.T) {
	w := namesWorld(t, samePlan)
	must(t, w.set.Install(t.Context(), fixture.program, "--services", "--configure-dns"))
	must(t, w.set.Peer(t.Context(), fixture.program, w.a, w.b, "--services", "default"))
	must(t, w.a.Watch(t.Context(), w.sniffer, w.b))
	must(t, w.b.Watch(t.Context(), w.sniffer, w.a))
	must(t, w.b.Apply(t.Context(), fmt.Sprintf(`
apiVersion: apps/v1
kind: Deployment
metadata: {name: shop, namespace: default}
spec:
  replicas: 2
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: server
        image: %[1]s
        args: [serve, "%[2]d"]
        env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
        readinessProbe: {httpGet: {path: /, port: %[2]d}, periodSeconds: 1}
---
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: default}
spec: {selector: {app: shop}, ports: [{port: 80, targetPort: %[2]d}]}
---
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: shop, namespace: default}
`, kubenodes.TestImage, port)))
	for _, c := range w.set.Clusters { // the exporting cluster resolves the name, too
		for _, n := range c.Nodes {
			if got, err := getByName(t, c, n, "http://shop.default.svc.clusterset.local", "hello from shop-"); err != nil {
				t.Errorf("%s: %v, last %q", n.Name, err, got)
			}
		}
	}
	if out, _ := w.isthmus(t, "status", "--context", "a"); !strings.Contains(out, "THEIR SERVICES HERE") {
		t.Error("status shows no services")
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(2 * time.Second) { // until each CoreDNS has reloaded its Corefile
		if out, code := w.isthmus(t, "diagnose", "--context", "a", "--remote-context", "b"); code == 0 && strings.Contains(out, "1 imported") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("diagnose does not show the service")
		}
	}
	for _, more := range [][]string{nil, {"--remote-context", "b"}} {
		out, code := w.isthmus(t, append([]string{"trace", "--context", "a", "default/" + podName(pod, w.a.Nodes[0]), "shop.default.svc.clusterset.local:80"}, more...)...)
		if code != 0 || !strings.Contains(out, "endpoint of b; ready endpoints: b 2 of 2)") || len(more) > 0 && !strings.Contains(out, "the answer arrives") {
			t.Errorf("trace: exit code %d", code)
		}
	}
	v, code := w.verify(t, "--only", "pod,out,tcp", "--sizes", "100")
	asked := map[string]int{}
	for _, r := range v.Results {
		asked[r.What]++
	}
	if of := "imported Service default/shop"; code != 0 || asked[of] != 2 || asked["endpoint of "+of] != 2 {
		t.Errorf("verify: exit code %d, asked %v", code, asked)
	}
	w.noPlaintext(t)
}

// getByName makes a pod fetch a page by HTTP until the page begins with the wanted text.
func getByName(t *testing.T, from *kubenodes.Cluster, n *kubenodes.Node, page, want string) (got string, err error) {
	t.Helper()
	own, err := address(t.Context(), from, podName(pod, n))
	must(t, err)
	u := fmt.Sprintf("http://%v/get?url=%s", netip.AddrPortFrom(own, port), url.QueryEscape(page))
	c := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: n.Dial}}
	for deadline := time.Now().Add(patience); ; time.Sleep(500 * time.Millisecond) {
		var resp *http.Response
		if resp, err = c.Get(u); err == nil { //nolint:noctx // the client has a timeout
			var text []byte
			text, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if got = string(text); strings.HasPrefix(got, want) {
				return got, err
			}
		}
		if time.Now().After(deadline) {
			return got, cmp.Or(err, errors.New("it never came"))
		}
	}
}
