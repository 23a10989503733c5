package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cli"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// With this environment variable the test binary acts as the program isthmus.
const beProgram = "ISTHMUS_TEST_BE_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(beProgram) != "" {
		os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// kubeSite is a cluster of the lab with an API server on its control machine.
type kubeSite struct {
	*lab.Cluster
	t      *testing.T
	server *kubetest.Server
	client client.Client
	dir    string
	token  string // path of the gateways' kubeconfig
}

func newKubeSite(t *testing.T, c *lab.Cluster) *kubeSite {
	t.Helper()
	s := &kubeSite{Cluster: c, t: t, dir: t.TempDir()}
	var err error
	s.server, err = kubetest.Start(t.Context(), kubetest.Options{Name: c.Name, Host: c.Control.Addr, Controllers: true, Starter: c.Control.Start, Dial: c.Control.Dial})
	s.must(err)
	t.Cleanup(func() { _ = s.server.Stop() })
	s.client, err = s.server.Client()
	s.must(err)

	admin := filepath.Join(s.dir, "admin.kubeconfig")
	s.must(s.server.WriteKubeconfig(admin))
	cmd := c.Control.Command(t.Context(), "/proc/self/exe", "install", "--without-workloads", "--kubeconfig", admin, "--cluster-name", c.Name, "--cluster-id", c.ID)
	cmd.Env = append(os.Environ(), beProgram+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("install: %v\n%s", err, out)
	}
	s.identity()
	s.eventually("default ServiceAccount", func() error {
		return s.client.Get(t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "default"}, &corev1.ServiceAccount{})
	})
	for i, n := range c.Nodes {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: replicaName(i),
				Labels: map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}},
			Spec: corev1.PodSpec{NodeName: n.Name, AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "gateway", Image: "none"}}},
		}
		s.must(s.client.Create(t.Context(), p))
	}
	s.must(s.client.Create(t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "isthmus-gateway", Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Name: "wireguard", Protocol: "UDP", Port: 5871}}},
	}))
	s.must(s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "tenants"}}))
	return s
}

// identity gives the gateways an identity with the rights of their ServiceAccount.
func (s *kubeSite) identity() {
	s.t.Helper()
	token := &authenticationv1.TokenRequest{}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: deploy.GatewayServiceAccount}}
	s.must(s.client.SubResource("token").Create(s.t.Context(), account, token))
	config, err := clientcmd.Load(s.server.Kubeconfig())
	s.must(err)
	for _, user := range config.AuthInfos {
		user.ClientCertificateData, user.ClientKeyData, user.Token = nil, nil, token.Status.Token
	}
	s.token = filepath.Join(s.dir, "gateway.kubeconfig")
	s.must(clientcmd.WriteToFile(*config, s.token))
}

func replicaName(i int) string { return fmt.Sprintf("gateway-%d", i+1) }

// replica is a process of a gateway.
type replica struct {
	cmd  *lab.Cmd
	done chan struct{}
	log  *os.File
}

func (s *kubeSite) start(i int) *replica {
	s.t.Helper()
	n := s.Nodes[i]
	log, err := os.OpenFile(filepath.Join(s.dir, replicaName(i)+".log"), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	s.must(err)
	r := &replica{cmd: n.Command(context.Background(), "/proc/self/exe", "gateway", "--host-network", "--kubeconfig", s.token), done: make(chan struct{}), log: log}
	r.cmd.Env = append(os.Environ(), beProgram+"=1", "POD_NAME="+replicaName(i), "POD_IP="+n.Addr.String(), "POD_NAMESPACE="+deploy.Namespace, "NODE_NAME="+n.Name)
	r.cmd.Stdout, r.cmd.Stderr = log, log
	s.must(r.cmd.Start())
	go func() { _ = r.cmd.Wait(); close(r.done) }()
	s.t.Cleanup(func() {
		r.end(syscall.SIGTERM)
		if s.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			s.t.Logf("%s %s:\n%s", s.Name, replicaName(i), text)
		}
		log.Close()
	})
	return r
}

func (r *replica) end(signal syscall.Signal) {
	_ = r.cmd.Process.Signal(signal)
	select {
	case <-r.done:
	case <-time.After(time.Minute):
		_ = r.cmd.Process.Kill()
		<-r.done
	}
}

func (r *replica) running() bool {
	select {
	case <-r.done:
		return false
	default:
		return true
	}
}

// ready waits for a successful /readyz and returns its text.
func (s *kubeSite) ready(i int) (text string) {
	s.t.Helper()
	s.eventually(replicaName(i)+" ready", func() (err error) {
		text, err = s.Nodes[i].Get(s.t.Context(), "http://127.0.0.1:5872/readyz")
		return err
	})
	return text
}

func (s *kubeSite) metric(i int, name string, labels ...string) float64 {
	s.t.Helper()
	text, err := s.Nodes[i].Get(s.t.Context(), "http://127.0.0.1:5872/metrics")
	s.must(err)
	v, err := lab.SumMetric(text, name, labels)
	s.must(err)
	return v
}

func (s *kubeSite) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("cluster %s: %v", s.Name, err)
	}
}

// eventually retries try until it succeeds. It fails the test if try still fails after the time
// limit for a busy machine.
func (s *kubeSite) eventually(what string, try func() error) {
	s.t.Helper()
	const limit = time.Minute
	for begin := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		late := time.Since(begin) > limit
		err := try()
		if err == nil {
			return
		}
		if late {
			s.t.Fatalf("cluster %s: %s: not within %v: %v", s.Name, what, limit, err)
		}
	}
}

func (s *kubeSite) publicKey() string {
	s.t.Helper()
	var secret corev1.Secret
	s.must(s.client.Get(s.t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "wireguard-pubkey"}, &secret))
	if secret.Labels[v1alpha1.LabelKey] != "wireguard" {
		s.t.Errorf("labels of the key Secret: %v", secret.Labels)
	}
	return string(secret.Data["publicKey"])
}

// A view has the networks of one cluster, and the networks to which the peer remaps them.
type view struct{ pod, podAtPeer, external, externalAtPeer string }

func (s *kubeSite) tunnelEndpoint(mine, its view, peer *kubeSite) *v1alpha1.TunnelEndpoint {
	s.t.Helper()
	return &v1alpha1.TunnelEndpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "tenants", Name: peer.Name, Labels: map[string]string{v1alpha1.LabelClusterID: peer.ID}},
		Spec: v1alpha1.TunnelEndpointSpec{
			ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: peer.ID, ClusterName: peer.Name},
			LocalPodCIDR:    mine.pod, LocalNATPodCIDR: mine.podAtPeer, LocalExternalCIDR: mine.external, LocalNATExternalCIDR: mine.externalAtPeer,
			RemotePodCIDR: its.pod, RemoteNATPodCIDR: its.podAtPeer, RemoteExternalCIDR: its.external, RemoteNATExternalCIDR: its.externalAtPeer,
			EndpointIP: peer.Nodes[0].Addr.String(), BackendType: v1alpha1.BackendWireGuard,
			BackendConfig: v1alpha1.BackendConfig{v1alpha1.ConfigPublicKey: peer.publicKey(), v1alpha1.ConfigPort: "5871"},
		},
	}
}

func (s *kubeSite) status(name string) v1alpha1.TunnelEndpointStatus {
	s.t.Helper()
	var te v1alpha1.TunnelEndpoint
	s.must(s.client.Get(s.t.Context(), client.ObjectKey{Namespace: "tenants", Name: name}, &te))
	return te.Status
}

func (s *kubeSite) connected(name, gatewayIP string) {
	s.t.Helper()
	s.eventually("connection to "+name, func() error {
		if got := s.status(name); got.Connection.Status != v1alpha1.Connected || got.GatewayIP != gatewayIP {
			return fmt.Errorf("%+v", got)
		}
		return nil
	})
}

// versions returns the resource versions of everything that a gateway may write, except the
// Lease. For a TunnelEndpoint it returns the status without the latency, which is written twice
// a minute on a busy machine.
func (s *kubeSite) versions() map[string]string {
	s.t.Helper()
	all := make(map[string]string)
	for _, list := range []client.ObjectList{&v1alpha1.TunnelEndpointList{}, &v1alpha1.NatMappingList{}, &corev1.PodList{}, &corev1.ServiceList{}, &corev1.SecretList{}} {
		s.must(s.client.List(s.t.Context(), list))
		s.must(meta.EachListItem(list, func(o runtime.Object) error {
			m, err := meta.Accessor(o)
			version := m.GetResourceVersion()
			if te, ok := o.(*v1alpha1.TunnelEndpoint); ok {
				status := te.Status.DeepCopy()
				status.Connection.Latency = v1alpha1.ConnectionLatency{}
				version = fmt.Sprintf("%s, %d, %+v", te.UID, te.Generation, *status)
			}
			all[fmt.Sprintf("%T %s/%s", o, m.GetNamespace(), m.GetName())] = version
			return err
		}))
	}
	return all
}

// startPings sends pings until stop is called. stop returns the number of pings sent, and the
// number of those without an answer.
func startPings(t *testing.T, from *lab.Host, to netip.Addr) (stop func() (sent, lost int)) {
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	sent, lost := 0, 0
	group.Go(func() {
		for ctx.Err() == nil {
			sent++
			if _, err := from.PingWith(context.Background(), to, lab.PingOptions{Wait: 10 * time.Second}); err != nil {
				lost++
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	return func() (int, int) { cancel(); group.Wait(); return sent, lost }
}

func holder(s *kubeSite) string {
	var lease coordinationv1.Lease
	if s.client.Get(s.t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "isthmus-gateway"}, &lease) != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// Two clusters have overlapping PodCIDRs with masks of different lengths. Cluster a has two
// replicas. Each part of the test continues with the state that the previous one has left.
func TestGatewaysReadTheirConfigurationFromAPIServers(t *testing.T) {
	if testing.Short() {
		t.Skip("needs API servers and a minute")
	}
	if err := lab.Available(); err != nil {
		t.Skip(err)
	}
	if _, err := kubetest.Build(t.Context(), os.Stderr); err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	l, err := lab.Up(t.Context(), lab.Spec{Name: lab.UniqueName("gwkube"), RPFilter: lab.RPFilterOff, Clusters: []lab.ClusterSpec{
		{Name: "a", PodCIDR: prefix("10.244.0.0/16"), ExternalCIDR: prefix("10.245.0.0/16"), Nodes: 2, PodsPerNode: 1, Control: true},
		{Name: "b", PodCIDR: prefix("10.244.0.0/18"), ExternalCIDR: prefix("10.245.0.0/18"), Nodes: 1, PodsPerNode: 1, Control: true},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Down(); err != nil {
			t.Error(err)
		}
	})
	var a, b *kubeSite
	a, b = newKubeSite(t, l.Clusters[0]), newKubeSite(t, l.Clusters[1])
	viewA := view{"10.244.0.0/16", "10.250.0.0/16", "10.245.0.0/16", "10.251.0.0/16"}
	viewB := view{"10.244.0.0/18", "10.246.0.0/18", "10.245.0.0/18", "10.246.64.0/18"}
	podB := lab.Move(b.Pods[0].Addr, prefix(viewB.pod), prefix(viewB.podAtPeer))

	// The first replica is active. The replica that starts first creates the key.
	a1, b1 := a.start(0), b.start(0)
	if text := a.ready(0) + b.ready(0); strings.Count(text, "active") != 2 {
		t.Fatalf("ready: %q", text)
	}
	a2 := a.start(1)
	if text := a.ready(1); !strings.Contains(text, "standby for gateway-1") {
		t.Fatalf("second replica: %q", text)
	}

	begin := time.Now()
	a.must(a.client.Create(t.Context(), a.tunnelEndpoint(viewA, viewB, b)))
	b.must(b.client.Create(t.Context(), b.tunnelEndpoint(viewB, viewA, a)))
	a.eventually("first ping", func() error {
		_, err := a.Pods[0].Ping(t.Context(), podB)
		return err
	})
	t.Logf("first ping %v after the TunnelEndpoints were written", time.Since(begin).Round(time.Millisecond))
	a.connected("b", a.Nodes[0].Addr.String())
	b.connected("a", b.Nodes[0].Addr.String())
	if _, err := b.Pods[0].Ping(t.Context(), lab.Move(a.Pods[0].Addr, prefix(viewA.pod), prefix(viewA.podAtPeer))); err != nil {
		t.Fatal(err)
	}

	t.Run("the status is Liqo's", func(t *testing.T) {
		s := a.status("b")
		c := s.Connection
		want := v1alpha1.PeerConfiguration{"endpointIP": b.Nodes[0].Addr.String(), "port": "5871", "publicKey": b.publicKey(), "ownPublicKey": a.publicKey(), "allowedIPs": "10.246.0.0/18, 10.246.64.0/18"}
		if fmt.Sprint(c.PeerConfiguration) != fmt.Sprint(want) {
			t.Errorf("peerConfiguration %v, want %v", c.PeerConfiguration, want)
		}
		if c.StatusMessage != "VPN connection established" || c.Latency.Timestamp == nil || !strings.HasSuffix(c.Latency.Value, "μs") && !strings.HasSuffix(c.Latency.Value, "ms") {
			t.Errorf("connection %+v", c)
		}
		if s.VethIFaceName != "isthmus.host" || s.VethIFaceIndex == 0 || s.VethIP != "169.254.100.1" {
			t.Errorf("status %+v", s)
		}
		if !meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionAccepted) {
			t.Errorf("conditions %+v", s.Conditions)
		}
	})

	marked := func(t *testing.T, active int) {
		t.Helper()
		a.eventually("labels", func() error {
			var pods corev1.PodList
			a.must(a.client.List(t.Context(), &pods, client.InNamespace(deploy.Namespace)))
			for _, p := range pods.Items {
				want := v1alpha1.GatewayStandby
				if p.Name == replicaName(active) {
					want = v1alpha1.GatewayActive
				}
				if got := p.Labels[v1alpha1.LabelGateway]; got != want {
					return fmt.Errorf("Pod %s is marked %q, want %q", p.Name, got, want)
				}
			}
			var service corev1.Service
			a.must(a.client.Get(t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "isthmus-gateway"}, &service))
			if got, want := service.Annotations[v1alpha1.AnnotationGatewayNodeIP], a.Nodes[active].Addr.String(); got != want {
				return fmt.Errorf("gatewayNodeIP %q, want %q", got, want)
			}
			return nil
		})
	}
	t.Run("Pods and Service name the active gateway", func(t *testing.T) { marked(t, 0) })

	t.Run("both gateways report since when and why one is active", func(t *testing.T) {
		for i, want := range []string{"\nactive for ", "this gateway is a standby; the active one is Pod gateway-1; 0 of its NAT flows are copied here, and the copy was complete "} {
			cmd := a.Nodes[i].Command(t.Context(), "/proc/self/exe", "status", "--gateway")
			cmd.Env = append(os.Environ(), beProgram+"=1")
			if out, _ := cmd.CombinedOutput(); !strings.Contains(string(out), want) || i == 0 && !strings.Contains(string(out), "s, epoch 1: no gateway was active\n") {
				t.Errorf("on node %d: %s: want %q", i, out, want)
			}
			if epoch := a.metric(i, "isthmus_gateway_epoch"); epoch != 1 {
				t.Errorf("on node %d: epoch %v", i, epoch)
			}
		}
		if n := a.metric(0, "isthmus_gateway_takeovers_total", `reason="NoneActive"`); n != 1 {
			t.Errorf("%v takeovers as the first gateway", n)
		}
		if since := time.UnixMilli(int64(1000 * a.metric(0, "isthmus_gateway_active_since_timestamp_seconds"))); time.Since(since) > time.Hour {
			t.Errorf("active since %v", since)
		}
	})

	t.Run("only the active gateway makes captures", func(t *testing.T) {
		for i, want := range []string{"4 packets, 0 missed", "this gateway is a standby; the active one is Pod " + replicaName(0)} {
			cmd := a.Nodes[i].Command(t.Context(), "/proc/self/exe", "capture", "--packets", "4", "--write", "/dev/null")
			cmd.Env = append(os.Environ(), beProgram+"=1")
			if out, _ := cmd.CombinedOutput(); !strings.Contains(string(out), want) {
				t.Errorf("on node %d: %s: want %q", i, out, want)
			}
		}
	})

	t.Run("an endpoint that becomes an address of ours is abandoned until the peer connects", func(t *testing.T) {
		ours := func(are bool) {
			t.Helper()
			a.eventually("what the status says of b's endpoint", func() error {
				text, err := a.Nodes[0].Get(t.Context(), "http://127.0.0.1:5873/status")
				if says := strings.Contains(text, fmt.Sprintf("endpoint %v: %[1]v is a node of ours", b.Nodes[0].Addr)); err == nil && says != are {
					err = errors.New(text)
				}
				return err
			})
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "claims-to-be-b"}}
		a.must(a.client.Create(t.Context(), node))
		node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeExternalIP, Address: b.Nodes[0].Addr.String()}}
		a.must(a.client.Status().Update(t.Context(), node))
		ours(true)
		a.eventually("b shows itself", func() error {
			_, err := a.Pods[0].Ping(t.Context(), podB)
			return err
		})
		a.must(a.client.Delete(t.Context(), node))
		ours(false)
	})

	t.Run("an invalid TunnelEndpoint affects no other", func(t *testing.T) {
		stop := startPings(t, a.Pods[0].Host, podB)
		broken := a.tunnelEndpoint(viewA, viewB, b) // has the networks and the key of b
		broken.Name, broken.Spec.ClusterIdentity = "mallory", v1alpha1.ClusterIdentity{ClusterID: "mallory", ClusterName: "mallory"}
		a.must(a.client.Create(t.Context(), broken))
		a.eventually("refusal", func() error {
			s := a.status("mallory")
			c := meta.FindStatusCondition(s.Conditions, v1alpha1.ConditionAccepted)
			if c == nil || c.Status != metav1.ConditionFalse || c.Reason != "Invalid" || !strings.Contains(c.Message, "spec.backend_config.publicKey: is also the key of cluster") {
				return fmt.Errorf("conditions %+v", s.Conditions)
			}
			if s.Connection.Status != v1alpha1.ConnectionError || s.Connection.StatusMessage != c.Message || s.GatewayIP != "" {
				return fmt.Errorf("status %+v", s)
			}
			return nil
		})
		if n := a.metric(0, "isthmus_gateway_left_out_objects", `kind="TunnelEndpoint"`); n != 1 {
			t.Errorf("isthmus_gateway_left_out_objects %v, want 1", n)
		}
		a.must(a.client.Delete(t.Context(), broken))
		if sent, lost := stop(); lost > 0 {
			t.Errorf("%d of %d pings lost", lost, sent)
		}
		a.connected("b", a.Nodes[0].Addr.String())
	})

	t.Run("a frozen API server has no effect, and nothing is written without a change", func(t *testing.T) {
		marked(t, 0)            // wait for the last write
		time.Sleep(time.Second) // give the metrics time to count the write
		generation := a.metric(0, "isthmus_config_generation")
		beforeA, before := a.versions(), b.versions()
		stop := startPings(t, a.Pods[0].Host, podB)
		a.must(a.server.Freeze())
		time.Sleep(15 * time.Second)
		if text := a.ready(0); !strings.Contains(text, "active") {
			t.Errorf("while frozen: %q", text)
		}
		for name, version := range b.versions() {
			if before[name] != version {
				t.Errorf("%s was written: %s, then %s", name, before[name], version)
			}
		}
		a.must(a.server.Thaw())
		time.Sleep(9 * time.Second) // longer than the Lease is valid
		if sent, lost := stop(); lost > 0 || sent < 30 {
			t.Errorf("%d of %d pings lost", lost, sent)
		}
		if h := holder(a); h != "gateway-1" || !a1.running() || !strings.Contains(a.ready(1), "standby") {
			t.Errorf("the Lease is held by %q", h)
		}
		for name, before := range map[string]float64{"isthmus_config_generation": generation, "isthmus_gateway_takeovers_total": 1} {
			if now := a.metric(0, name); now != before {
				t.Errorf("%s %v, before %v", name, now, before)
			}
		}
		for name, version := range a.versions() {
			if beforeA[name] != version {
				t.Errorf("%s was written: %s, then %s", name, beforeA[name], version)
			}
		}
	})

	firstPing := func(t *testing.T, from *lab.Host, since time.Time) time.Duration {
		t.Helper()
		for time.Since(since) < 2*time.Minute {
			if _, err := from.PingWith(t.Context(), podB, lab.PingOptions{Wait: 200 * time.Millisecond}); err == nil {
				return time.Since(since)
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Fatal("no ping within two minutes")
		return 0
	}

	t.Run("a restarted gateway stays active", func(t *testing.T) {
		begin := time.Now()
		a1.end(syscall.SIGKILL)
		a1 = a.start(0)
		t.Logf("first ping %v after the kill", firstPing(t, a.Pods[0].Host, begin).Round(time.Millisecond))
		if h := holder(a); h != "gateway-1" {
			t.Errorf("the Lease is held by %q", h)
		}
	})

	t.Run("a killed gateway is replaced", func(t *testing.T) {
		begin := time.Now()
		a1.end(syscall.SIGKILL)
		took := firstPing(t, a.Pods[1].Host, begin)
		t.Logf("first ping through the standby %v after the kill", took.Round(time.Millisecond))
		if took > 40*time.Second { // usually 7 s
			t.Errorf("took %v", took)
		}
		marked(t, 1)
		a.connected("b", a.Nodes[1].Addr.String())
	})

	t.Run("a killed gateway returns as a standby and removes its routes", func(t *testing.T) {
		if out, err := a.Nodes[0].Command(t.Context(), "ip", "route", "show", "table", "4200").Output(); err != nil || !strings.Contains(string(out), "unreachable") {
			t.Errorf("before: %v\n%s", err, out)
		}
		a1 = a.start(0)
		a.eventually("standby", func() error {
			text, err := a.Nodes[0].Get(t.Context(), "http://127.0.0.1:5872/readyz")
			if err == nil && !strings.Contains(text, "standby for gateway-2") {
				err = errors.New(text)
			}
			return err
		})
		a.eventually("no leftovers", func() error {
			out, _ := a.Nodes[0].Command(t.Context(), "ip", "route", "show", "table", "4200").Output()
			rules, _ := a.Nodes[0].Command(t.Context(), "ip", "rule").Output()
			if len(out) > 0 || strings.Contains(string(rules), "4200") {
				return fmt.Errorf("%s%s", out, rules)
			}
			return nil
		})
	})

	t.Run("a gateway that ends hands over immediately", func(t *testing.T) {
		before := a.versions()
		begin := time.Now()
		a2.end(syscall.SIGTERM)
		ended := time.Since(begin)
		if h := holder(a); h == "gateway-2" {
			t.Error("it did not release the Lease")
		}
		if code := a2.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("exit code %d", code)
		}
		took := firstPing(t, a.Pods[0].Host, begin)
		t.Logf("ended after %v, first ping through the standby after %v", ended.Round(time.Millisecond), took.Round(time.Millisecond))
		if took > 40*time.Second { // usually 0.2 s
			t.Errorf("took %v", took)
		}
		for name := range before {
			if _, there := a.versions()[name]; !there {
				t.Errorf("%s is gone", name)
			}
		}
		marked(t, 0)
		a.connected("b", a.Nodes[0].Addr.String())
	})

	t.Run("another holder in the Lease makes it a standby", func(t *testing.T) {
		a2 = a.start(1)
		a.ready(1)
		var lease coordinationv1.Lease
		a.eventually("edit of the Lease", func() error {
			a.must(a.client.Get(t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "isthmus-gateway"}, &lease))
			name := "gateway-2"
			lease.Spec.HolderIdentity = &name
			return a.client.Update(t.Context(), &lease)
		})
		a.eventually("the former one as a standby", func() error {
			if text := a.ready(0); !strings.Contains(text, "standby for gateway-2") || !a1.running() {
				return errors.New(text)
			}
			return nil
		})
		a.connected("b", a.Nodes[1].Addr.String())
		marked(t, 1)
		if _, err := a.Pods[1].Ping(t.Context(), podB); err != nil {
			t.Error(err)
		}
	})

	t.Run("a deleted key Secret is recreated with the same key", func(t *testing.T) {
		key := b.publicKey()
		b.must(b.client.Delete(t.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: deploy.Namespace, Name: "wireguard-pubkey"}}))
		b.eventually("Secret", func() error {
			return b.client.Get(t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "wireguard-pubkey"}, &corev1.Secret{})
		})
		if got := b.publicKey(); got != key {
			t.Errorf("publicKey %s, before %s", got, key)
		}
	})

	t.Run("an unusable key Secret changes nothing", func(t *testing.T) {
		var secret corev1.Secret
		b.must(b.client.Get(t.Context(), client.ObjectKey{Namespace: deploy.Namespace, Name: "wireguard-pubkey"}, &secret))
		secret.Data["privateKey"] = []byte(base64.StdEncoding.EncodeToString([]byte("short")))
		b.must(b.client.Update(t.Context(), &secret))
		b.eventually("report", func() error {
			text, err := b.Nodes[0].Get(t.Context(), "http://127.0.0.1:5873/status")
			if err == nil && !strings.Contains(text, "data.privateKey: has 5 bytes") {
				err = errors.New(text)
			}
			return err
		})
		if b.metric(0, "isthmus_gateway_source_ok") != 0 || !b1.running() {
			t.Error("isthmus_gateway_source_ok is not 0")
		}
		if _, err := a.Pods[1].Ping(t.Context(), podB); err != nil {
			t.Error(err)
		}
	})
}

func TestGatewayNamesTheInvalidFlag(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte("apiVersion: v1\nkind: Config\nclusters: [{name: x, cluster: {server: https://127.0.0.1:1}}]\n"+
		"contexts: [{name: x, context: {cluster: x}}]\ncurrent-context: x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--kubeconfig", "/no/such/file"}, "kubeconfig"},
		{[]string{"--kubeconfig", kubeconfig, "--mtu", "9"}, "--mtu"},
		{[]string{"--kubeconfig", kubeconfig, "--port", "0"}, "--port"},
		{[]string{"--kubeconfig", kubeconfig, "--port", "5869", "--tunnels", "2"}, "--port 5869: a tunnel would use port 5870"},
		{[]string{"--kubeconfig", kubeconfig, "--tunnels", "0"}, "--tunnels 0: want 1 to 16"},
		{[]string{"--kubeconfig", kubeconfig, "--tunnels", "17"}, "--tunnels 17: want 1 to 16"},
		{[]string{"--kubeconfig", kubeconfig, "--port", "65534", "--tunnels", "3"}, "--tunnels 3: the last would listen on port 65536"},
		{[]string{"--kubeconfig", kubeconfig, "--max-flows", "-1"}, `--max-flows "-1": is -1; want a number from 0 to`},
		{[]string{"--kubeconfig", kubeconfig, "--udp-timeout", "1"}, `--udp-timeout "1": is no duration; want a time from 1s`},
		{[]string{"--kubeconfig", kubeconfig, "--rotate-keys", "59m"}, "--rotate-keys 59m0s: want an hour or more, or 0"},
		{[]string{"--kubeconfig", kubeconfig, "--rotation-patience", "1s"}, "--rotation-patience 1s: want an hour or more, or 0"},
		{[]string{"--kubeconfig", kubeconfig, "--cluster-id", "a b"}, "--cluster-id"},
		{[]string{"--kubeconfig", kubeconfig, "--metrics-address", "nowhere"}, "--metrics-address"},
		{[]string{"--kubeconfig", kubeconfig, "--metrics-cert-dir", "/x"}, "--metrics-cert-dir needs --metrics-secure"},
		{[]string{"--kubeconfig", kubeconfig}, "POD_NAME"},
		{[]string{"--config", t.TempDir(), "--tunnels", "2"}, "--tunnels has no effect with --config"},
		{[]string{"--config", t.TempDir(), "--metrics-secure"}, "--metrics-secure has no effect with --config"},
		{[]string{"--config", t.TempDir(), "--port", "1"}, "--port has no effect with --config"},
		{[]string{"--config", t.TempDir(), "--random-ports"}, "--random-ports has no effect with --config; set this in gateway.yaml"},
	} {
		var errs strings.Builder
		code := run(append([]string{"gateway"}, tc.args...), strings.NewReader(""), io.Discard, &errs)
		if code != cli.Wrong || !strings.Contains(errs.String(), tc.want) {
			t.Errorf("%v: code %d, stderr %q; want %d and %q", tc.args, code, errs.String(), cli.Wrong, tc.want)
		}
	}
}

func TestEventOfAFailedGatewayContainsNoLibraryText(t *testing.T) {
	err := fmt.Errorf("Lease: %w", &url.Error{Op: "Get", URL: "https://10.96.0.1:443/apis/coordination.k8s.io/v1", Err: io.ErrUnexpectedEOF})
	if got, want := endedMessage(err), "the gateway ended: Lease: the API server closes the connection"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
