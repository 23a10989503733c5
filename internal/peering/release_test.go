package peering

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/source/kube"
)

// gatewayInPod runs the election of a gateway, and imitates the kubelet: once the Pod is being
// deleted, it ends the gateway and then removes the Pod.
func gatewayInPod(t *testing.T, c *cluster.Cluster, name, node string, addr netip.Addr) (*kube.Gateway, *corev1.Pod) {
	t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: c.Namespace, Name: name, Labels: map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}},
		Spec: corev1.PodSpec{NodeName: node, AutomountServiceAccountToken: new(bool), Containers: []corev1.Container{{Name: "gateway", Image: "isthmus"}}}}
	must(t, c.Client.Create(t.Context(), p))
	g, err := kube.NewGateway(kube.GatewayOptions{Config: c.Config, Namespace: c.Namespace, Pod: name, PodIP: addr, Log: slog.New(slog.DiscardHandler)})
	must(t, err)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- g.Run(ctx, func(ctx context.Context, _ <-chan struct{}) error { <-ctx.Done(); return nil }, func() error { return nil })
	}()
	removed, key := make(chan struct{}), client.ObjectKeyFromObject(p)
	go func() {
		defer close(removed)
		_ = wait.PollUntilContextCancel(ctx, cluster.PollInterval, true, func(ctx context.Context) (bool, error) {
			var now corev1.Pod
			if c.Client.Get(ctx, key, &now) == nil && now.DeletionTimestamp != nil {
				end()
				_ = c.Client.Delete(t.Context(), &now, client.GracePeriodSeconds(0)) // ignore the error: the garbage collector may have removed the Pod
			}
			return false, nil
		})
	}()
	t.Cleanup(func() {
		end()
		<-removed
		if err := <-ended; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	})
	return g, p
}

// eventually calls try until it succeeds. It fails the test after a time that is too long even for
// a busy machine.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), cluster.PollInterval, clustertest.Patient, true, func(context.Context) (bool, error) {
		last = try()
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("%s: %v", what, last)
	}
}

func setReady(t *testing.T, c *cluster.Cluster, p *corev1.Pod, ready corev1.ConditionStatus) {
	t.Helper()
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready, Reason: "ContainersNotReady"}}
	must(t, c.Client.Status().Patch(t.Context(), p, client.Merge))
}

// busyServer is a client that fails the first three reads of Leases after the eviction, as if
// the API server had lost etcd.
type busyServer struct {
	client.Client
	pair     *clustertest.Pair
	refusals int
}

// SubResource returns a client whose requests are executed but return the error ServiceUnavailable.
func (b *busyServer) SubResource(name string) client.SubResourceClient {
	return unanswered{b.Client.SubResource(name)}
}

type unanswered struct{ client.SubResourceClient }

func (u unanswered) Create(ctx context.Context, o, sub client.Object, opts ...client.SubResourceCreateOption) error {
	return errors.Join(u.SubResourceClient.Create(ctx, o, sub, opts...), apierrors.NewServiceUnavailable("etcd is slow"))
}

func (b *busyServer) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	if _, lease := o.(*coordinationv1.Lease); lease && len(b.pair.Lines) > 0 && b.refusals < 3 {
		b.refusals++
		return apierrors.NewServiceUnavailable("etcd is down")
	}
	return b.Client.Get(ctx, key, o, opts...)
}

func TestAGatewayIsReleasedOnlyToAReadyStandby(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "release")
	c := p.A
	release := func(c *cluster.Cluster) error {
		return ReleaseGateway(t.Context(), c, ReleaseOptions{Timeout: clustertest.Patient, Report: p.Report})
	}
	refused := func(want string) {
		t.Helper()
		err := release(c)
		clustertest.Contains(t, fmt.Sprint(err), want)
		if reported := p.Reported(); reported != "" {
			t.Errorf("it does %q", reported)
		}
	}
	refused("no gateway is active: Lease install-release/isthmus-gateway not found")

	first, firstPod := gatewayInPod(t, c, "gateway-1", "n1", netip.MustParseAddr("127.50.1.1"))
	eventually(t, "an active gateway", func() error {
		if pod, self := first.Active(); !self {
			return fmt.Errorf("active: %q", pod)
		}
		return nil
	})
	setReady(t, c, firstPod, corev1.ConditionTrue)
	refused("the gateway stays on Pod gateway-1, because no standby is ready: there is no other gateway Pod")

	second, secondPod := gatewayInPod(t, c, "gateway-2", "n2", netip.MustParseAddr("127.50.1.2"))
	eventually(t, "a standby", func() error {
		if pod, _ := second.Active(); pod != "gateway-1" {
			return fmt.Errorf("it follows %q", pod)
		}
		return second.Ready()
	})
	setReady(t, c, secondPod, corev1.ConditionFalse)
	refused("because no standby is ready: Pod gateway-2 is not ready: ContainersNotReady")
	setReady(t, c, secondPod, corev1.ConditionTrue)

	refusing := &busyServer{Client: c.Client, pair: p}
	busy := *c // a copy, because other goroutines read c.Client
	busy.Client = refusing
	must(t, release(&busy))
	if refusing.refusals != 3 {
		t.Errorf("%d of 3 refusals", refusing.refusals)
	}
	clustertest.Contains(t, p.Reported(), "unknown whether the API server has executed the eviction: release-a: eviction of Pod gateway-1: etcd is slow\nPod gateway-2 on node n2 is active after ", ", epoch 2")
	h, err := cluster.HolderOf(t.Context(), c, isthmus.LeaseGateway, true)
	must(t, err)
	if want := (isthmus.Takeover{Pod: "gateway-2", Reason: isthmus.TakeoverReleased, Previous: "gateway-1"}); h.Takeover == nil || *h.Takeover != want || h.Epoch != 2 || h.Since == nil {
		t.Errorf("%+v, %+v; want %+v", h, h.Takeover, want)
	}
	eventually(t, "the end of the former Pod", func() error {
		if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(firstPod), new(corev1.Pod)); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
	refused("the gateway stays on Pod gateway-2, because no standby is ready: there is no other gateway Pod")
}
