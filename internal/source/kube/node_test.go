package kube_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/fabric"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/leaktest"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

type delivery struct {
	intent   fabric.NodeIntent
	problems []fabric.Problem
}

// agentServer is an API server of its own with the objects that WatchNode reads, and a
// WatchNode with the permissions of a route agent.
type agentServer struct {
	t      *testing.T
	ctx    context.Context
	server *kubetest.Server
	admin  client.Client
	got    chan delivery
	done   chan error
}

func (s *agentServer) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// install creates the objects in the files that match pattern.
func (s *agentServer) install(pattern string) {
	s.t.Helper()
	names, err := fs.Glob(deploy.Files, pattern)
	s.must(err)
	for _, name := range names {
		b, err := deploy.Files.ReadFile(name)
		s.must(err)
		for doc := range strings.SplitSeq(string(b), "\n---\n") {
			var u unstructured.Unstructured
			s.must(yaml.Unmarshal([]byte(doc), &u.Object))
			s.must(s.admin.Create(s.ctx, &u))
		}
	}
}

// create creates an object together with its status.
func (s *agentServer) create(o client.Object) {
	s.t.Helper()
	whole := o.DeepCopyObject().(client.Object)
	s.must(s.admin.Create(s.ctx, o))
	whole.SetResourceVersion(o.GetResourceVersion())
	whole.SetUID(o.GetUID())
	s.must(s.admin.Status().Update(s.ctx, whole))
}

func (s *agentServer) next() delivery {
	s.t.Helper()
	select {
	case d := <-s.got:
		return d
	case err := <-s.done:
		s.t.Fatalf("ended: %v", err)
	case <-time.After(time.Minute):
		s.t.Fatalf("nothing delivered\n%s", s.server.Logs(5))
	}
	panic("unreachable")
}

// until returns the first delivery for which good returns true. Simultaneous changes may be
// delivered one after the other.
func (s *agentServer) until(good func(delivery) bool) delivery {
	s.t.Helper()
	for {
		if d := s.next(); good(d) {
			return d
		}
	}
}

func (s *agentServer) silence(what string, d time.Duration) {
	s.t.Helper()
	select {
	case got := <-s.got:
		s.t.Errorf("%s: delivered %+v", what, got)
	case <-time.After(d):
	}
}

func node(name, addr, pods string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.NodeSpec{PodCIDR: pods, PodCIDRs: []string{pods, "fd00:" + name[1:] + "::/64"}},
		Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
			{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeExternalIP, Address: "192.0.2.1"},
			{Type: corev1.NodeInternalIP, Address: addr}, {Type: corev1.NodeInternalIP, Address: "fd00::" + name[1:]},
		}},
	}
}

func pod(name, node, addr string, change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, PodIP: addr, PodIPs: []corev1.PodIP{{IP: addr}}, HostIPs: []corev1.HostIP{{IP: "172.30.1.9"}}, HostIP: "172.30.1.9"},
	}
	if change != nil {
		change(p)
	}
	return p
}

func endpoint(name string, key byte, change func(*v1alpha1.TunnelEndpoint)) *v1alpha1.TunnelEndpoint {
	te := &v1alpha1.TunnelEndpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: name, ClusterName: name},
			LocalPodCIDR:    "10.64.0.0/14", LocalNATPodCIDR: "None", LocalExternalCIDR: "10.80.0.0/14", LocalNATExternalCIDR: "None",
			RemotePodCIDR: "10.64.0.0/16", RemoteNATPodCIDR: "10.246.0.0/16", RemoteExternalCIDR: "10.250.16.0/20", RemoteNATExternalCIDR: "None",
			EndpointIP: "192.0.2.2", BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{"port": "5871", "publicKey": base64.StdEncoding.EncodeToString([]byte(strings.Repeat(string(key), 32)))},
		},
		Status: v1alpha1.TunnelEndpointStatus{GatewayIP: "172.30.1.11"},
	}
	if change != nil {
		change(te)
	}
	return te
}

func TestWatchNodeDeliversEachChangeOnce(t *testing.T) {
	leaks := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server, err := kubetest.Start(ctx, kubetest.Options{Name: "agent"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	s := &agentServer{t: t, ctx: ctx, server: server, got: make(chan delivery, 100), done: make(chan error, 1)}

	s.admin, err = server.Client()
	s.must(err)
	s.must(s.admin.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: deploy.Namespace}}))
	s.install("rbac/route-agent.yaml")

	account := "system:serviceaccount:" + deploy.Namespace + ":" + deploy.RouteAgentServiceAccount
	cert, key, err := server.ClientCert(account, "system:serviceaccounts")
	s.must(err)
	config := &rest.Config{Host: server.URL(), TLSClientConfig: rest.TLSClientConfig{CAData: server.CA(), CertData: cert, KeyData: key}}
	go func() {
		s.done <- kube.WatchNode(ctx, config, deploy.Namespace, "n1", nil, slog.New(slog.NewTextHandler(t.Output(), nil)), func(in fabric.NodeIntent, problems []fabric.Problem) {
			s.got <- delivery{in, problems}
		})
	}()

	s.silence("without the CRDs", 1500*time.Millisecond)
	s.install("crds/net.liqo.io_tunnelendpoints.yaml")
	s.install("crds/isthmus.net_networkallocations.yaml")
	if d := s.next(); len(d.intent.Nodes)+len(d.intent.Pods)+len(d.intent.Tunnels)+len(d.problems) != 0 || d.intent.Revision != 0 {
		t.Errorf("of an empty cluster: %+v", d)
	}
	us := &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "us"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "us", Revision: 1}}
	s.must(s.admin.Create(ctx, us))
	s.until(func(d delivery) bool { return d.intent.Revision == 1 && len(d.intent.Named) == 0 })
	s.must(s.admin.Create(ctx, &isthmus.NetworkAllocation{ObjectMeta: metav1.ObjectMeta{Name: "b"}, Spec: isthmus.NetworkAllocationSpec{ClusterID: "b", Revision: 2,
		Networks: []string{"10.246.0.0/16", "10.250.16.0/20"}}}))
	s.until(func(d delivery) bool { return len(d.intent.Named) == 2 })

	s.create(node("n1", "172.30.1.11", "10.64.0.0/24"))
	s.create(node("n2", "172.30.1.12", "10.64.1.0/24"))
	s.create(pod("p", "n1", "10.64.0.5", nil))
	s.create(pod("host", "n1", "172.30.1.11", func(p *corev1.Pod) { p.Spec.HostNetwork = true }))
	s.create(pod("waiting", "", "", func(p *corev1.Pod) { p.Status.PodIPs, p.Status.Phase = nil, corev1.PodPending }))
	s.create(pod("ended", "n1", "10.64.0.6", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }))
	s.create(pod("shadow", "n2", "10.246.0.9", func(p *corev1.Pod) { p.Labels = map[string]string{v1alpha1.LabelShadowPod: "true"} }))
	s.create(pod("q", "n2", "10.64.1.5", nil))
	s.create(endpoint("b", 2, nil))
	s.create(endpoint("c", 3, func(te *v1alpha1.TunnelEndpoint) { te.Spec.RemoteNATPodCIDR = "10.65.0.0/16" }))
	full := s.until(func(d delivery) bool {
		return len(d.intent.Nodes) == 2 && len(d.intent.Pods) == 2 && len(d.intent.Tunnels) == 1 && len(d.problems) == 1 && d.intent.Tunnels[0].Gateway.IsValid() &&
			len(d.intent.Nodes[0].Addrs) == 2 && len(d.intent.Nodes[1].Addrs) == 2
	})
	var pods []string
	for _, p := range full.intent.Pods {
		if p.Created == 0 {
			t.Errorf("pod %v: no time", p.Addr)
		}
		pods = append(pods, fmt.Sprint(p.Addr, " ", p.Node))
	}
	if want := []string{"10.64.0.5 n1", "10.64.1.5 n2"}; !reflect.DeepEqual(pods, want) {
		t.Errorf("pods %v", pods)
	}
	n2 := full.intent.Nodes[1]
	n2.Created = 0
	want := fabric.ClusterNode{Name: "n2", Addrs: []netip.Addr{netip.MustParseAddr("172.30.1.12"), netip.MustParseAddr("fd00::2")},
		PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.64.1.0/24"), netip.MustParsePrefix("fd00:2::/64")}}
	if !reflect.DeepEqual(n2, want) {
		t.Errorf("node %+v", n2)
	}
	if got := full.problems[0].Error(); got != "TunnelEndpoint default/c: spec.remoteNATPodCIDR: 10.65.0.0/16 overlaps spec.localPodCIDR, 10.64.0.0/14; want networks that do not overlap" {
		t.Error(got)
	}

	// Changes of fields that WatchNode does not use are not delivered: a heartbeat, an
	// annotation, the latency of a tunnel.
	var n corev1.Node
	s.must(s.admin.Get(ctx, client.ObjectKey{Name: "n1"}, &n))
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now()}}
	s.must(s.admin.Status().Update(ctx, &n))
	n.Annotations = map[string]string{"a": "b"}
	s.must(s.admin.Update(ctx, &n))
	var b v1alpha1.TunnelEndpoint
	s.must(s.admin.Get(ctx, client.ObjectKey{Namespace: "default", Name: "b"}, &b))
	b.Status.Connection.Latency.Value = "7ms"
	s.must(s.admin.Status().Update(ctx, &b))
	s.silence("a heartbeat", 500*time.Millisecond)

	// The API server restarts: nothing is delivered until an object changes.
	s.must(server.RestartAPIServer(ctx))
	s.silence("a restart", 2*time.Second)
	p := pod("p", "n1", "10.64.0.5", nil)
	now := metav1.NewTime(time.Now())
	p.Status.Phase, p.Status.StartTime = corev1.PodFailed, &now
	s.must(s.admin.Get(ctx, client.ObjectKeyFromObject(p), p))
	p.Status.Phase = corev1.PodFailed
	s.must(s.admin.Status().Update(ctx, p))
	if d := s.next(); len(d.intent.Pods) != 1 || d.intent.Pods[0].Node != "n2" || len(d.intent.Tunnels) != 1 {
		t.Errorf("after a pod ended: %+v", d)
	}

	// While every gateway is a Pod with its own network namespace, other nodes and pods are not
	// delivered, even after a gateway was deleted. With a host-network gateway, all are
	// delivered.
	gateway := func(name, node, addr string, hostNetwork bool) {
		s.create(pod(name, node, addr, func(p *corev1.Pod) {
			p.Namespace, p.Spec.HostNetwork = deploy.Namespace, hostNetwork
			p.Status.HostIP, p.Status.HostIPs = "172.30.1.12", []corev1.HostIP{{IP: "172.30.1.12"}}
			p.Labels = map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}
		}))
	}
	own := fabric.GatewayPod{Addr: netip.MustParseAddr("10.64.1.254"), Host: netip.MustParseAddr("172.30.1.12")}
	gateway("gateway-1", "n2", "10.64.1.254", false)
	s.until(func(d delivery) bool {
		return d.intent.OnlyPods && len(d.intent.Nodes) == 1 && d.intent.Nodes[0].Name == "n1" && len(d.intent.Pods) == 0 &&
			len(d.intent.Tunnels) == 1 && len(d.intent.Gateways) == 1 && d.intent.Gateways[0] == own
	})
	s.create(pod("r", "n2", "10.64.1.6", nil))
	s.create(node("n3", "172.30.1.13", "10.64.2.0/24"))
	s.silence("a pod and a node, none of which matter", 500*time.Millisecond)

	// Our own networks are known, and the Service names an active gateway. Now TunnelEndpoints are
	// not read, even if they change. An address in the Service that belongs to none of the gateway
	// Pods is ignored.
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"},
		Annotations: map[string]string{isthmus.AnnotationGateways: "10.64.1.254", v1alpha1.AnnotationGatewayNodeIP: "172.30.1.12"}}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 5871}}}}
	s.must(s.admin.Create(ctx, service))
	s.silence("no object says where our pods are", 500*time.Millisecond)
	us.Spec.Own, us.Spec.Revision = &isthmus.OwnNetworks{PodCIDR: "10.64.0.0/14"}, 3
	s.must(s.admin.Update(ctx, us))
	s.until(func(d delivery) bool {
		return d.intent.Gateway == own.Addr && len(d.intent.Tunnels) == 0 && len(d.intent.OwnPods) == 1 && len(d.intent.Named) == 2
	})
	te := endpoint("x", 'x', nil)
	s.create(te)
	s.silence("a TunnelEndpoint that nobody reads", 500*time.Millisecond)
	s.must(s.admin.Delete(ctx, te))
	service.Annotations[isthmus.AnnotationGateways] = "10.64.1.253"
	s.must(s.admin.Update(ctx, service))
	s.until(func(d delivery) bool { return !d.intent.Gateway.IsValid() && len(d.intent.Tunnels) == 1 })
	s.must(s.admin.Delete(ctx, service))
	s.must(s.admin.Delete(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "gateway-1"}}, client.GracePeriodSeconds(0)))
	s.until(func(d delivery) bool {
		return d.intent.OnlyPods && len(d.intent.Gateways) == 0 && len(d.intent.Nodes) == 1
	})
	gateway("gateway-2", "n2", "172.30.1.12", true)
	s.until(func(d delivery) bool {
		return !d.intent.OnlyPods && len(d.intent.Nodes) == 3 && len(d.intent.Pods) == 2 && len(d.intent.Gateways) == 1 && d.intent.Gateways[0].HostNetwork
	})

	cancel()
	if err := <-s.done; err != nil {
		t.Error(err)
	}
	_ = server.Stop()
	if err := leaktest.Find(leaks, goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop")); err != nil {
		t.Fatal(err)
	}
}
