package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// RunKubernetes shows the steps on two clusters with real nodes, and how long each takes. The first
// steps lead from an empty machine to an HTTP response from the other cluster. In the last steps, a
// Service is reachable by name, even after one of its two clusters fails. RunKubernetes always
// removes the clusters.
func RunKubernetes(ctx context.Context, o Options) (err error) {
	if o.Name == "" {
		o.Name = "demo"
	}
	k := &kubernetes{Options: o, ctx: ctx, begin: time.Now()}
	defer func() {
		if k.sniffer != nil {
			err = errors.Join(err, k.sniffer.Close())
			if err == nil {
				fmt.Fprintf(o.Out, "\n%v\n", k.sniffer.Report())
			}
		}
		if k.set != nil {
			err = errors.Join(err, k.set.Down())
		}
		if k.images != "" {
			err = errors.Join(err, os.RemoveAll(k.images))
		}
	}()
	type step struct {
		title string
		do    func() error
	}
	steps := []step{
		{"Two clusters of two nodes, with kubelet, containerd, kube-proxy, CoreDNS, and the same PodCIDR and Service CIDR", k.clusters},
		{"isthmus install --cluster-name NAME --services --configure-dns, in both", k.install},
		{"isthmus peer --context a --remote-context b --services default", k.peer},
		{"A web server in b, a pod in a", k.startPods},
		{"The first HTTP answer, from the pod in a", k.answer},
		{"CoreDNS reads its new Corefile, which kubelets give it within two minutes", k.waitForDNS},
		{"kubectl apply, in b: the Service web and its ServiceExport", k.export},
		{"The same in a, which has a web server too; then all nodes of b lose power", k.powerOff},
	}
	if o.Keep {
		steps = append(steps, step{"The nodes of b start again", k.restart})
	}
	for _, step := range steps {
		start := time.Now()
		fmt.Fprintf(o.Out, "\n%s\n", step.title)
		if err := step.do(); err != nil {
			if ctx.Err() != nil {
				return ErrInterrupted
			}
			return fmt.Errorf("%q: %w", step.title, err)
		}
		fmt.Fprintf(o.Out, "  %5.1f s, %5.1f s in all\n", time.Since(start).Seconds(), time.Since(k.begin).Seconds())
	}
	if o.Keep {
		fmt.Fprintf(o.Out, "\nThe clusters stand until Ctrl-C. From another terminal, as root:\n"+
			"  isthmus-lab exec --name %s underlay -- kubectl --kubeconfig %s --context a get pods -A\n", o.Name, k.set.Kubeconfig)
		<-ctx.Done()
	}
	return nil
}

type kubernetes struct {
	Options
	ctx     context.Context
	begin   time.Time
	images  string // folder of image archives
	set     *kubenodes.Set
	sniffer *lab.Sniffer
	server  netip.Addr // the server's address in cluster a
	client  netip.Addr
	node    *kubenodes.Node // node of the client
}

func (k *kubernetes) clusters() (err error) {
	if k.images, err = os.MkdirTemp("", "isthmus-demo-"); err != nil {
		return err
	}
	kube, err := k.Kube(k.ctx)
	if err != nil {
		return err
	}
	image, err := kubenodes.ImageOf(k.Binary, filepath.Join(k.images, "isthmus.tar"))
	if err != nil {
		return err
	}
	dns, err := kubenodes.CoreDNS(k.ctx, k.images)
	if err != nil {
		return err
	}
	k.set, err = kubenodes.Up(k.ctx, kubenodes.Options{
		Spec: lab.Spec{Name: k.Name, Clusters: lab.Clusters(2), RPFilter: lab.RPFilterStrict}, Kube: kube,
		Images: []string{image}, DNS: dns, Progress: indent(k.Out),
	})
	if err != nil {
		return err
	}
	k.sniffer, err = k.set.Lab.Sniff(nil)
	return err
}

func (k *kubernetes) install() error {
	return k.set.Install(k.ctx, k.Binary, "--services", "--configure-dns")
}

func (k *kubernetes) peer() error {
	a, b := k.set.Clusters[0], k.set.Clusters[1]
	if err := k.set.Peer(k.ctx, k.Binary, a, b, "--services", demoNamespace); err != nil {
		return err
	}
	return errors.Join(a.Watch(k.ctx, k.sniffer, b), b.Watch(k.ctx, k.sniffer, a))
}

const (
	demoPort      = 8080
	demoNamespace = "default"
	demoPage      = "http://web.default.svc.clusterset.local:8080/"
)

// startPods starts the server and the client on nodes without the active gateway, to use the
// longest path.
func (k *kubernetes) startPods() error {
	a, b := k.set.Clusters[0], k.set.Clusters[1]
	server, _, err := k.start(b, "web")
	if err != nil {
		return err
	}
	if k.client, k.node, err = k.start(a, "client"); err != nil {
		return err
	}
	k.server, err = a.Seen(k.ctx, b, server)
	return err
}

// start starts a pod and waits for its address.
func (k *kubernetes) start(c *kubenodes.Cluster, name string) (addr netip.Addr, node *kubenodes.Node, err error) {
	gateway, err := c.ActiveGateway(k.ctx)
	if err != nil {
		return addr, nil, err
	}
	if node = c.Nodes[0]; node.Name == gateway.Spec.NodeName {
		node = c.Nodes[1]
	}
	err = c.Apply(k.ctx, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %[1]q, "namespace": "default", "labels": {"app": %[1]q}}, "spec": {
"nodeName": %[2]q, "terminationGracePeriodSeconds": 0, "containers": [{"name": %[1]q, "image": %[3]q, "args": ["serve", "%[4]d"],
"env": [{"name": "POD_NAME", "value": "%[1]s of cluster %[5]s"}],
"readinessProbe": {"httpGet": {"path": "/", "port": %[4]d}, "periodSeconds": 1}}]}}`, name, node.Name, kubenodes.TestImage, demoPort, c.Name))
	if err != nil {
		return addr, nil, err
	}
	err = wait.PollUntilContextTimeout(k.ctx, 50*time.Millisecond, readyTimeout, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if err := c.Client.Get(ctx, client.ObjectKey{Namespace: demoNamespace, Name: name}, &p); err != nil {
			return false, err
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
				addr, err = netip.ParseAddr(p.Status.PodIP)
				return err == nil, err
			}
		}
		return false, nil
	})
	if err != nil {
		return addr, nil, fmt.Errorf("pod %s of cluster %s: %w\n%s", name, c.Name, err, c.Explain())
	}
	fmt.Fprintf(k.Out, "  pod %s of cluster %s runs on %s with the address %v\n", name, c.Name, node.Name, addr)
	return addr, node, nil
}

func (k *kubernetes) answer() error {
	page := fmt.Sprintf("http://%v/", netip.AddrPortFrom(k.server, demoPort))
	body, err := k.get(page, readyTimeout)
	if err != nil {
		return err
	}
	fmt.Fprintf(k.Out, "  GET %s\n  %s", page, body)
	return nil
}

// get makes the client fetch a page, by a request to the client from the client's node.
func (k *kubernetes) get(page string, timeout time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(k.ctx, timeout)
	defer cancel()
	u := url.URL{Scheme: "http", Host: netip.AddrPortFrom(k.client, demoPort).String(), Path: "/get", RawQuery: url.Values{"url": {page}}.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return "", err
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return k.node.Dial(ctx, network, address)
	}}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", page, resp.Status, body)
	}
	return string(body), err
}

// waitForDNS waits until CoreDNS in cluster a answers for the zone of multi-cluster services. The
// answer may be that the name does not exist.
func (k *kubernetes) waitForDNS() error {
	const enough, patience = 10, 3 * time.Minute // number of consecutive answers; one is not enough, because CoreDNS has two Pods
	answers := 0
	var last error
	err := wait.PollUntilContextTimeout(k.ctx, 200*time.Millisecond, patience, true, func(context.Context) (bool, error) {
		_, last = k.get("http://missing.default.svc.clusterset.local/", 2*time.Second)
		if answers++; last == nil || !strings.Contains(last.Error(), "no such host") {
			answers = 0
		}
		return answers == enough, nil
	})
	if err != nil {
		return fmt.Errorf("CoreDNS does not answer for clusterset.local: %w; the last error is %s\n%s", err, errorText(last), k.set.Clusters[0].Explain())
	}
	return nil
}

// errorText returns the text of err, which may be nil.
func errorText(err error) string {
	if err == nil {
		return "none"
	}
	return err.Error()
}

// export exports the web server of b as a Service, and waits until the pod in cluster a gets its
// page by name.
func (k *kubernetes) export() error {
	if err := k.share(k.set.Clusters[1]); err != nil {
		return err
	}
	// Wait for the import before the first query: CoreDNS caches for 30 seconds that a name does
	// not exist.
	imported := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "multicluster.x-k8s.io/v1beta1", "kind": "ServiceImport"}}
	err := wait.PollUntilContextTimeout(k.ctx, 50*time.Millisecond, readyTimeout, true, func(ctx context.Context) (bool, error) {
		err := k.set.Clusters[0].Client.Get(ctx, client.ObjectKey{Namespace: demoNamespace, Name: "web"}, imported)
		ips, _, _ := unstructured.NestedStringSlice(imported.Object, "spec", "ips")
		return len(ips) > 0, client.IgnoreNotFound(err)
	})
	if err != nil {
		return fmt.Errorf("ServiceImport web in cluster a: %w\n%s", err, k.set.Clusters[0].Explain())
	}
	body, err := k.untilAnswered("web of cluster b")
	if err != nil {
		return err
	}
	fmt.Fprintf(k.Out, "  GET %s\n  %s", demoPage, body)
	return nil
}

// share creates a Service for the pod web, and exports the Service.
func (k *kubernetes) share(c *kubenodes.Cluster) error {
	return c.Apply(k.ctx, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: %[1]s}
spec: {selector: {app: web}, ports: [{port: %[2]d}]}
---
apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceExport
metadata: {name: web, namespace: %[1]s}
`, demoNamespace, demoPort))
}

// untilAnswered makes the client fetch the page until the given server answers.
func (k *kubernetes) untilAnswered(server string) (body string, err error) {
	var last error
	err = wait.PollUntilContextTimeout(k.ctx, 100*time.Millisecond, readyTimeout, true, func(context.Context) (bool, error) {
		body, last = k.get(demoPage, 2*time.Second)
		return last == nil && strings.Contains(body, server), nil
	})
	if err != nil {
		return "", fmt.Errorf("%s: no answer of %s: %w; the last answer is %q, the last error is %s\n%s", demoPage, server, err, body, errorText(last), k.set.Clusters[0].Explain())
	}
	return body, nil
}

// powerOff powers off one of two exporting clusters while the client continues.
func (k *kubernetes) powerOff() error {
	a, b := k.set.Clusters[0], k.set.Clusters[1]
	if _, _, err := k.start(a, "web"); err != nil {
		return err
	}
	if err := k.share(a); err != nil {
		return err
	}
	if _, err := k.untilAnswered("web of cluster a"); err != nil {
		return err
	}
	if err := lab.Each(b.Nodes, (*kubenodes.Node).Crash); err != nil {
		return err
	}
	// After the failure, the demo waits until no request has failed for quiet. It returns an error
	// if that takes longer than limit.
	const quiet, limit = 5 * time.Second, time.Minute
	requests, unanswered := 0, 0
	crash, last := time.Now(), time.Duration(0)
	for since := time.Since(crash); since < last+quiet; since = time.Since(crash) {
		if since > limit {
			return fmt.Errorf("%d of %d requests were not answered within %v after the crash", unanswered, requests, limit)
		}
		requests++
		if _, err := k.get(demoPage, time.Second); err != nil {
			if k.ctx.Err() != nil {
				return err
			}
			unanswered, last = unanswered+1, time.Since(crash)
		}
		time.Sleep(50 * time.Millisecond)
	}
	fmt.Fprintf(k.Out, "  %d requests, one after the other, each for a second at most\n", requests)
	fmt.Fprintf(k.Out, "  %d of them got no answer, the last %.1f s after the crash; from then on, only endpoints in a are used\n", unanswered, last.Seconds())
	return nil
}

// restart boots the nodes that powerOff has stopped, because the reader may keep the clusters.
func (k *kubernetes) restart() error {
	return lab.Each(k.set.Clusters[1].Nodes, func(n *kubenodes.Node) error { return n.Start(k.ctx) })
}
