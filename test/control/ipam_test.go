package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/kubetest"
)

// A managerPod is one of several managers. pod is its address in the EndpointSlice, which may not
// contain loopback addresses, so pod is from a network for documentation. The manager actually
// listens at listen.
type managerPod struct {
	s           *site
	name        string
	pod, listen string
	cmd         *exec.Cmd
}

func (p *managerPod) start() {
	p.s.t.Helper()
	log, err := os.OpenFile(filepath.Join(p.s.dir, p.name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.s.t.Fatal(err)
	}
	defer log.Close()
	args := []string{"manager", "--kubeconfig", p.s.identity("isthmus-manager"), "--namespace", installed, "--pod-cidr", p.s.podCIDR,
		"--health-address=", "--metrics-address=", "--ipam-address", p.listen, "--ipam-plain", "--ipam-service", "isthmus-ipam"}
	p.cmd = exec.Command(binary, append(args, p.s.serviceNetwork()...)...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Env = append(os.Environ(), "POD_NAME="+p.name, "POD_UID="+p.name, "POD_IP="+p.pod)
	if err := p.cmd.Start(); err != nil {
		p.s.t.Fatal(err)
	}
}

func (p *managerPod) end(signal syscall.Signal) {
	_ = p.cmd.Process.Signal(signal)
	_ = p.cmd.Wait()
}

// Of two managers, the IPAM's Service must always point to the leader. A virtual kubelet keeps one
// connection, as in Liqo. That kubelet must get answers again after the other manager has taken
// over. The test plays kube-proxy: it directs each new connection to the address in the
// EndpointSlice.
func TestIPAMServicePointsToTheLeader(t *testing.T) {
	t.Parallel()
	s := newSites(t, "10.244.0.0/16")[0]
	slice := func() (found discoveryv1.EndpointSlice, endpoint string) {
		t.Helper()
		if !s.get(client.ObjectKey{Namespace: installed, Name: "isthmus-ipam"}, &found) || len(found.Endpoints) != 1 || len(found.Endpoints[0].Addresses) != 1 {
			return found, ""
		}
		return found, found.Endpoints[0].Addresses[0]
	}
	install := func() {
		t.Helper()
		if out, err := s.isthmus("install", "--without-workloads", "--kubeconfig", s.kubeconfig, "--cluster-name", s.name, "--cluster-id", s.id, "--set", "ipam.port=6000"); err != nil {
			t.Fatalf("isthmus install: %v\n%s", err, out)
		}
	}
	install()
	if got, to := slice(); to != "" || got.Labels[discoveryv1.LabelServiceName] != "isthmus-ipam" {
		t.Fatalf("before a manager leads: %+v", got)
	} else if err := s.client.Patch(t.Context(), &got, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"meta.helm.sh/release-name":"isthmus"}}}`))); err != nil {
		t.Fatal(err) // Helm adds annotations like these to all objects that it installs
	}
	pods := map[string]*managerPod{}
	for i := range 2 {
		pod := fmt.Sprintf("192.0.2.%d", 11+i)
		pods[pod] = &managerPod{s: s, name: fmt.Sprintf("isthmus-manager-%d", i), pod: pod, listen: fmt.Sprintf("%s:%d", s.address(), 8091+i)}
		pods[pod].start()
		t.Cleanup(func() { pods[pod].end(syscall.SIGKILL) })
	}
	t.Cleanup(func() {
		for _, p := range pods {
			if text, err := os.ReadFile(filepath.Join(s.dir, p.name+".log")); err == nil && t.Failed() {
				t.Logf("%s:\n%s", p.name, text)
			}
		}
	})
	conn, err := grpc.NewClient("passthrough:///isthmus-ipam.isthmus-system:6000", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var found discoveryv1.EndpointSlice
			err := s.client.Get(ctx, client.ObjectKey{Namespace: installed, Name: "isthmus-ipam"}, &found)
			if err != nil || len(found.Endpoints) == 0 {
				return nil, errors.Join(errors.New("no endpoint"), err)
			}
			to, known := pods[found.Endpoints[0].Addresses[0]]
			if !known {
				return nil, errors.New("nobody is there")
			}
			var d net.Dialer
			return d.DialContext(ctx, "tcp", to.listen)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	k := &kubelet{t, conn}
	// served waits until the kubelet gets an answer, and returns the manager to which the Service
	// points.
	served := func(what string, since time.Time) *managerPod {
		t.Helper()
		s.eventually("an answer "+what, func() (string, bool) {
			got, err := k.call("BelongsToPodCIDR", "10.244.200.1")
			return fmt.Sprintf("%q, %v", got, err), err == nil && got == "1"
		})
		_, to := slice()
		t.Logf("%s: served after %v, by %s", what, time.Since(since).Round(time.Millisecond), to)
		return pods[to]
	}
	leads := served("at the start", time.Now())

	// The leader must correct a wrong address in the slice. A second installation must not remove
	// the endpoint.
	wrong, _ := slice()
	before := wrong.DeepCopy()
	wrong.Endpoints[0].Addresses[0] = "192.0.2.99"
	if err := s.client.Patch(t.Context(), &wrong, client.MergeFrom(before)); err != nil {
		t.Fatal(err)
	}
	s.eventually("the address of the one that leads", func() (string, bool) { _, to := slice(); return to, to == leads.pod })
	have, _ := slice()
	install()
	if now, to := slice(); to != leads.pod || now.ResourceVersion != have.ResourceVersion {
		t.Errorf("the second installation changes the EndpointSlice: %+v", now)
	}

	// The leader ends by SIGTERM, as in an upgrade.
	began := time.Now()
	leads.end(syscall.SIGTERM)
	after := served("after the end of the one that led", began)
	if after == nil || after == leads {
		t.Fatal("the Service still leads to a manager that has ended")
	}
	leads.start()
	// A container is killed and restarts in its Pod.
	began = time.Now()
	after.end(syscall.SIGKILL)
	after.start()
	leads = served("after a container was killed", began)
	// The leader's node fails, so the leader does not restart.
	began = time.Now()
	leads.end(syscall.SIGKILL)
	if last := served("after a node's end", began); last == nil || last == leads {
		t.Fatal("the Service still leads to a manager that is gone")
	}

	// The last manager ends by SIGTERM. It marks its endpoint as not ready, because another Pod may
	// soon have its address.
	pods[func() string { _, to := slice(); return to }()].end(syscall.SIGTERM)
	s.eventually("an endpoint that is not ready", func() (string, bool) {
		got, _ := slice()
		ready := len(got.Endpoints) != 1 || got.Endpoints[0].Conditions.Ready == nil || *got.Endpoints[0].Conditions.Ready
		return fmt.Sprintf("%+v", got.Endpoints), !ready
	})

	// The manager's token may change the endpoint, but no other field of the slice, and no other
	// slice.
	config, err := clientcmd.BuildConfigFromFlags("", s.identity("isthmus-manager"))
	if err != nil {
		t.Fatal(err)
	}
	manager, err := client.New(config, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		t.Fatal(err)
	}
	other := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4}
	other.Name, other.Namespace = "other", installed
	if err := s.client.Create(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	for name, patch := range map[string]string{
		"a label":       `{"metadata":{"labels":{"kubernetes.io/service-name":"isthmus-gateway"}}}`,
		"a port":        `{"ports":[{"name":"ipam","port":22}]}`,
		"an annotation": `{"metadata":{"annotations":{"a":"b"}}}`,
		"two":           `{"endpoints":[{"addresses":["192.0.2.11"]},{"addresses":["192.0.2.12"]}]}`,
		"none":          `{"endpoints":[]}`,
	} {
		of, _ := slice()
		if err := manager.Patch(t.Context(), &of, client.RawPatch(types.MergePatchType, []byte(patch))); !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := manager.Patch(t.Context(), other, client.RawPatch(types.MergePatchType, []byte(`{"endpoints":[{"addresses":["192.0.2.11"]}]}`))); !apierrors.IsForbidden(err) {
		t.Errorf("another EndpointSlice: %v", err)
	}
}
