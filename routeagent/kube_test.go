package routeagent

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kernel"
	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// With a real API server: the nodes apply its objects, and keep their state while it is down.
func TestNodesKeepTheirStateWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	server, err := kubetest.Start(c.ctx, kubetest.Options{Name: "nodes", Host: c.Control.Addr, Starter: c.Control.Start, Dial: c.Control.Dial})
	must(err)
	t.Cleanup(func() { _ = server.Stop() })
	c.intent = filepath.Join(t.TempDir(), "admin.kubeconfig")
	must(server.WriteKubeconfig(c.intent))
	api, err := server.Client()
	must(err)
	create := func(o client.Object) { // creates an object with its status
		t.Helper()
		whole := o.DeepCopyObject().(client.Object)
		must(api.Create(c.ctx, o))
		whole.SetResourceVersion(o.GetResourceVersion())
		must(api.Status().Update(c.ctx, whole))
	}
	for _, name := range []string{"net.liqo.io_tunnelendpoints", "isthmus.net_networkallocations", "isthmus.net_nodenetworks"} {
		crd := &unstructured.Unstructured{}
		b, err := deploy.Files.ReadFile("crds/" + name + ".yaml")
		must(err)
		must(yaml.Unmarshal(b, &crd.Object))
		must(api.Create(c.ctx, crd))
	}
	c.eventually(c.Control, func() error { // the new kinds and the namespace do not exist at once
		return errors.Join(api.List(c.ctx, &v1alpha1.TunnelEndpointList{}), api.List(c.ctx, &isthmus.NetworkAllocationList{}), api.List(c.ctx, &isthmus.NodeNetworksList{}),
			api.Get(c.ctx, client.ObjectKey{Name: "default"}, &corev1.Namespace{}))
	})

	for _, n := range c.Nodes {
		create(&corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: n.Name},
			Spec:       corev1.NodeSpec{PodCIDR: n.PodCIDR.String(), PodCIDRs: []string{n.PodCIDR.String()}},
			Status:     corev1.NodeStatus{Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.Addr.String()}}},
		})
	}
	for _, p := range c.Pods {
		create(&corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: p.Name},
			Spec:       corev1.PodSpec{NodeName: p.Node.Name, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: p.Addr.String(), PodIPs: []corev1.PodIP{{IP: p.Addr.String()}}},
		})
	}
	te := &v1alpha1.TunnelEndpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: "b", ClusterName: "b"},
			LocalPodCIDR:    localPods.String(), LocalNATPodCIDR: "10.80.0.0/14", LocalExternalCIDR: "10.84.0.0/14", LocalNATExternalCIDR: "None",
			RemotePodCIDR: "10.64.0.0/16", RemoteNATPodCIDR: remotePods.String(), RemoteExternalCIDR: remoteExternal.String(), RemoteNATExternalCIDR: "None",
			EndpointIP: "192.0.2.1", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32)))},
		},
	}
	own := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "us"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "us", Revision: 1,
		Own: &isthmus.OwnNetworks{PodCIDR: localPods.String(), ServiceCIDR: "10.96.0.0/12"}}}
	allocation := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "b", Revision: 2,
		Networks: []string{remotePods.String(), remoteExternal.String()}}}
	must(api.Create(c.ctx, own))
	must(api.Create(c.ctx, allocation))
	c.start(c.Nodes...)
	if s := c.snapshot(c.Nodes[1]); !strings.Contains(s, fmt.Sprintf("unreachable %v table 4202", remotePods)) || strings.Contains(s, "lookup 4201") {
		t.Errorf("granted, without a gateway node 2 has\n%s", s)
	}
	checkReports(c, api)
	answersAreNotReported(c, api, allocation)
	create(te)

	must(api.Get(c.ctx, client.ObjectKeyFromObject(te), te))
	te.Status.GatewayIP = c.Nodes[0].Addr.String()
	begin := time.Now()
	must(api.Status().Update(c.ctx, te))
	for i, n := range c.Nodes {
		want := fmt.Sprintf("to %v lookup 4201", remoteExternal)
		if i == 0 {
			want = fmt.Sprintf("from %v lookup 4201", remoteExternal)
		}
		c.eventually(n, func() error {
			if s := c.snapshot(n); !strings.Contains(s, want) {
				return fmt.Errorf("no %q in\n%s", want, s)
			}
			return nil
		})
	}
	t.Logf("three nodes followed within %v", time.Since(begin))
	for i := range c.Nodes {
		c.ping(c.pod(i).Host, remotePod)
	}

	// The API server is down. Traffic continues, and deleted objects are restored.
	must(server.Freeze())
	n := c.Nodes[1]
	before := c.snapshot(n)
	c.run(n.Host, "ip link del %s", kernel.OverlayDevice)
	c.eventually(n, func() error {
		if now := c.snapshot(n); now != before {
			return fmt.Errorf("not repaired:\n%s", now)
		}
		return nil
	})
	c.ping(c.pod(1).Host, remotePod)
	must(server.Thaw())

	must(api.Delete(c.ctx, te))
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s := c.snapshot(n); strings.Contains(s, "lookup 4201") || !strings.Contains(s, fmt.Sprintf("unreachable %v table 4202", remotePods)) {
				return fmt.Errorf("the TunnelEndpoint is gone and its networks are granted, and there is\n%s", s)
			}
			return nil
		})
	}
	gatewaysInPods(c, create, api)
	allocation.Spec.Networks, allocation.Spec.Revision = nil, 3
	allocation.Spec.Freed = []isthmus.FreedNetwork{{Network: remotePods.String(), Revision: 3}, {Network: remoteExternal.String(), Revision: 3}}
	must(api.Update(c.ctx, allocation))
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s := c.snapshot(n); strings.Contains(s, remotePods.String()+" table 4202") {
				return fmt.Errorf("no network is granted any more, and still there is\n%s", s)
			}
			return nil
		})
	}
	for _, n := range c.Nodes {
		if err := c.agents[n].end(unix.SIGTERM); err != nil {
			t.Errorf("%s: %v", n, err)
		}
	}
}

// gatewaysInPods makes two gateways that are Pods. The Service names each of them in turn as the
// active gateway, and all nodes send packets to that gateway, without any TunnelEndpoint. When both
// are deleted, the nodes refuse the packets.
func gatewaysInPods(c *cluster, create func(client.Object), api client.Client) {
	c.t.Helper()
	addrs := []netip.Addr{netip.MustParseAddr("10.65.77.1"), netip.MustParseAddr("10.65.77.2")}
	var made []client.Object
	if err := api.Create(c.ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}); err != nil {
		c.t.Fatal(err)
	}
	for i, a := range addrs {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: fmt.Sprintf("gateway-%d", i), Labels: map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}},
			Spec:       corev1.PodSpec{NodeName: c.Nodes[i].Name, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: a.String(), PodIPs: []corev1.PodIP{{IP: a.String()}},
				HostIP: c.Nodes[i].Addr.String(), HostIPs: []corev1.HostIP{{IP: c.Nodes[i].Addr.String()}}},
		}
		create(p)
		made = append(made, p)
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5871}}}}
	if err := api.Create(c.ctx, service); err != nil {
		c.t.Fatal(err)
	}
	made = append(made, service)
	for i, a := range addrs {
		service.Annotations = map[string]string{isthmus.AnnotationGateways: a.String(), v1alpha1.AnnotationGatewayNodeIP: c.Nodes[i].Addr.String()}
		if err := api.Update(c.ctx, service); err != nil {
			c.t.Fatal(err)
		}
		for _, n := range c.Nodes {
			c.eventually(n, func() error {
				s := c.snapshot(n)
				for _, want := range []string{fmt.Sprintf("%v via 192.0.0.8 dev %s table 4201", remotePods, kernel.OverlayDevice),
					fmt.Sprintf("192.0.0.8 dev %s lladdr %v", kernel.OverlayDevice, fabric.GatewayMAC(a))} {
					if !strings.Contains(s, want) {
						return fmt.Errorf("no %q in\n%s", want, s)
					}
				}
				return nil
			})
		}
	}
	for _, o := range made {
		if err := api.Delete(c.ctx, o, client.GracePeriodSeconds(0)); err != nil {
			c.t.Fatal(err)
		}
	}
	for _, n := range c.Nodes {
		c.eventually(n, func() error {
			if s := c.snapshot(n); strings.Contains(s, "via 192.0.0.8") || !strings.Contains(s, fmt.Sprintf("unreachable %v table 4202", remotePods)) {
				return fmt.Errorf("no gateway is there any more, and still there is\n%s", s)
			}
			return nil
		})
	}
}

// checkReports checks the reports of the agents about their nodes.
func checkReports(c *cluster, api client.Client) {
	c.t.Helper()
	n := c.Nodes[1]
	var report isthmus.NodeNetworks
	eventually := func(has bool, network string) {
		c.t.Helper()
		c.eventually(n, func() error {
			report = isthmus.NodeNetworks{}
			err := api.Get(c.ctx, client.ObjectKey{Namespace: "default", Name: n.Name}, &report)
			if err == nil && slices.Contains(report.Spec.Networks, network) != has {
				err = fmt.Errorf("%s: want %v, have %v", network, has, report.Spec)
			}
			return err
		})
	}
	eventually(true, "192.168.77.0/24")
	var node corev1.Node
	if err := api.Get(c.ctx, client.ObjectKey{Name: n.Name}, &node); err != nil {
		c.t.Fatal(err)
	}
	if o := report.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != n.Name || o[0].UID != node.UID {
		c.t.Errorf("the report belongs to %v", o)
	}
	for _, text := range report.Spec.Networks {
		if p := netip.MustParsePrefix(text); p.Overlaps(localPods) {
			c.t.Errorf("a report has %v", p)
		}
	}
	c.eventually(n, func() error { // in addition to the networks
		var all isthmus.NetworkAllocationList
		err := errors.Join(api.List(c.ctx, &all), api.Get(c.ctx, client.ObjectKey{Namespace: "default", Name: n.Name}, &report))
		want := int64(0)
		for _, o := range all.Items {
			want = max(want, fabric.Version(o.ResourceVersion))
		}
		if err == nil && (want == 0 || report.Spec.RefusedResourceVersion != want) {
			err = fmt.Errorf("refused up to %d; want %d", report.Spec.RefusedResourceVersion, want)
		}
		return err
	})
	generation := report.Generation
	c.run(n.Host, "ip route add blackhole 192.168.32.0/22")
	eventually(true, "192.168.32.0/22")
	c.run(n.Host, "ip route del blackhole 192.168.32.0/22")
	eventually(false, "192.168.32.0/22")
	if report.Generation != generation+2 {
		c.t.Errorf("two changes, and the generation went from %d to %d", generation, report.Generation)
	}
}

// answersAreNotReported changes the answer of a peer, and checks that no node reports the change.
// Then it allocates another network, and checks that each node reports it once.
func answersAreNotReported(c *cluster, api client.Client, o *isthmus.NetworkAllocation) {
	c.t.Helper()
	patch := func(spec string) {
		c.t.Helper()
		if err := api.Patch(c.ctx, o, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{`+spec+`}}`))); err != nil {
			c.t.Fatal(err)
		}
	}
	reports := func() (all []isthmus.NodeNetworks) {
		for _, n := range c.Nodes {
			var report isthmus.NodeNetworks
			c.eventually(n, func() error { return api.Get(c.ctx, client.ObjectKey{Namespace: "default", Name: n.Name}, &report) })
			all = append(all, report)
		}
		return all
	}
	named := fabric.Version(o.ResourceVersion)
	for i, report := range reports() {
		c.eventually(c.Nodes[i], func() error {
			if report = reports()[i]; report.Spec.RefusedResourceVersion < named {
				return fmt.Errorf("refused up to %d; want %d", report.Spec.RefusedResourceVersion, named)
			}
			return nil
		})
	}
	before := reports()
	for i := range 20 {
		patch(fmt.Sprintf(`"seen":{"podCIDR":"10.%d.0.0/14"},"networksSince":{"resourceVersion":%d,"revision":%d,"uid":%q}`, i%2*4, named, o.Spec.Revision, o.UID))
	}
	patch(fmt.Sprintf(`"networks":[%q,%q,"10.99.0.0/16"],"networksSince":null`, remotePods, remoteExternal))
	for i := range c.Nodes {
		c.eventually(c.Nodes[i], func() error {
			if got := reports()[i].Spec.RefusedResourceVersion; got != fabric.Version(o.ResourceVersion) {
				return fmt.Errorf("refused up to %d; want %s", got, o.ResourceVersion)
			}
			return nil
		})
		if now := reports()[i]; now.Generation != before[i].Generation+1 {
			c.t.Errorf("%s reported %d times that a peer has another network, after it had answered otherwise 20 times", now.Name, now.Generation-before[i].Generation)
		}
	}
}
