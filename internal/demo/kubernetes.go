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
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubenodes"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// RunKubernetes shows the way from nothing to the first HTTP answer of another cluster on two
// clusters with real nodes, with the time of each step. It removes the clusters, whatever happens.
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
	for _, step := range []struct {
		title string
		do    func() error
	}{
		{"Two clusters of two nodes, with kubelet, containerd, kube-proxy, and the same PodCIDR", k.clusters},
		{"isthmus install --cluster-name NAME, in both", k.install},
		{"isthmus peer --context a --remote-context b", k.peer},
		{"A web server in b, a pod in a", k.pods},
		{"The first HTTP answer, from the pod in a", k.answer},
	} {
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

// kubernetes is one run of that demo.
type kubernetes struct {
	Options
	ctx     context.Context
	begin   time.Time
	images  string // folder
	set     *kubenodes.Set
	sniffer *lab.Sniffer
	server  netip.Addr // as a sees it
	client  netip.Addr
	at      *kubenodes.Node // of the client
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
	k.set, err = kubenodes.Up(k.ctx, kubenodes.Options{
		Spec: lab.Spec{Name: k.Name, Clusters: lab.Clusters(2), RPFilter: lab.RPFilterStrict}, Kube: kube,
		Images: []string{image}, Progress: indent(k.Out),
	})
	if err != nil {
		return err
	}
	k.sniffer, err = k.set.Lab.Sniff(nil)
	return err
}

func (k *kubernetes) install() error { return k.set.Install(k.ctx, k.Binary) }

func (k *kubernetes) peer() error {
	a, b := k.set.Clusters[0], k.set.Clusters[1]
	if err := k.set.Peer(k.ctx, k.Binary, a, b); err != nil {
		return err
	}
	return errors.Join(a.Watch(k.ctx, k.sniffer, b), b.Watch(k.ctx, k.sniffer, a))
}

const demoPort = 8080

// pods starts the server and the client on nodes without the active gateway, the longest way.
func (k *kubernetes) pods() error {
	a, b := k.set.Clusters[0], k.set.Clusters[1]
	server, _, err := k.start(b, "web")
	if err != nil {
		return err
	}
	if k.client, k.at, err = k.start(a, "client"); err != nil {
		return err
	}
	k.server, err = a.Seen(k.ctx, b, server)
	return err
}

// start starts a pod and waits for its address.
func (k *kubernetes) start(c *kubenodes.Cluster, name string) (addr netip.Addr, at *kubenodes.Node, err error) {
	gateway, err := c.ActiveGateway(k.ctx)
	if err != nil {
		return addr, nil, err
	}
	if at = c.Nodes[0]; at.Name == gateway.Spec.NodeName {
		at = c.Nodes[1]
	}
	err = c.Apply(k.ctx, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %[1]q, "namespace": "default"}, "spec": {
"nodeName": %[2]q, "terminationGracePeriodSeconds": 0, "containers": [{"name": %[1]q, "image": %[3]q, "args": ["serve", "%[4]d"],
"env": [{"name": "POD_NAME", "value": "%[1]s of cluster %[5]s"}],
"readinessProbe": {"httpGet": {"path": "/", "port": %[4]d}, "periodSeconds": 1}}]}}`, name, at.Name, kubenodes.TestImage, demoPort, c.Name))
	if err != nil {
		return addr, nil, err
	}
	err = wait.PollUntilContextTimeout(k.ctx, 50*time.Millisecond, readyTimeout, true, func(ctx context.Context) (bool, error) {
		var p corev1.Pod
		if err := c.Client.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, &p); err != nil {
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
	fmt.Fprintf(k.Out, "  pod %s of cluster %s runs on %s with the address %v\n", name, c.Name, at.Name, addr)
	return addr, at, nil
}

func (k *kubernetes) answer() error {
	from := fmt.Sprintf("http://%v/", netip.AddrPortFrom(k.server, demoPort))
	ctx, cancel := context.WithTimeout(k.ctx, readyTimeout)
	defer cancel()
	// The client asks, by order of the node that it is on.
	u := url.URL{Scheme: "http", Host: netip.AddrPortFrom(k.client, demoPort).String(), Path: "/get", RawQuery: url.Values{"url": {from}}.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), http.NoBody)
	if err != nil {
		return err
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		return k.at.Dial(ctx, network, address)
	}}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", from, resp.Status, body)
	}
	fmt.Fprintf(k.Out, "  GET %s\n  %s", from, body)
	return nil
}
