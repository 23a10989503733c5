package manager

import (
	"bytes"
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// An aging is an expiry with an IPAM state in memory and a clock that the test sets. The API server
// is real.
type aging struct {
	*world
	*expiry
	nodes []netip.Addr
	log   bytes.Buffer
	now   time.Time
}

func newAging(t *testing.T) *aging {
	t.Helper()
	a := &aging{world: bare(t), now: time.Unix(0, 0), nodes: []netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("172.30.0.2")}}
	a.expiry = newExpiry(managertest.Client, new(managertest.Store), slog.New(slog.NewTextHandler(&a.log, nil)))
	a.callerLookups.SetLimit(1000) // untilKind calls ownerKind often
	a.configure()
	a.joined("p", "172.16.0.0/20")
	a.OK(client.IgnoreAlreadyExists(managertest.Client.Create(a.Ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: a.System, Name: "default"}})))
	return a
}

func (a *aging) update(f func(ipam.State) (ipam.State, error)) {
	a.T.Helper()
	_, err := a.Store.Update(a.Ctx, f)
	a.OK(err)
}

// configure writes the nodes into the IPAM state. The test's pods have addresses outside of the
// PodCIDR.
func (a *aging) configure() {
	a.T.Helper()
	a.update(func(b ipam.State) (ipam.State, error) {
		b, _ = b.Configure(ipam.Config{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/20"), Nodes: a.nodes})
		return b, nil
	})
}

// joined adds a peer that has networks here and has answered.
func (a *aging) joined(id, network string) {
	a.T.Helper()
	a.update(func(b ipam.State) (ipam.State, error) {
		external := netip.MustParsePrefix("192.168.0.0/24")
		if id != "p" {
			external = netip.MustParsePrefix("192.168.7.0/25")
		}
		b, _, err := b.Allocate(ipam.Request{ID: id, Pod: netip.MustParsePrefix(network), External: external})
		return b.Answered(id, netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.245.0.0/20")), err
	})
}

// mapped maps an endpoint for peer p, as the IPAM service does.
func (a *aging) mapped(ip, want string) {
	a.T.Helper()
	addr := netip.MustParseAddr(ip)
	what, err := a.ownerKind(a.Ctx, addr)
	if a.OK(err); what != want {
		a.T.Errorf("%s is %q, want %q", ip, what, want)
	}
	a.update(func(b ipam.State) (ipam.State, error) {
		b, _, err := b.MapEndpoint("p", addr)
		if err != nil {
			return b, err
		}
		return b.AddRequester("p", addr, "certificate CN=kubelet", what)
	})
}

// mappedAfter advances the clock by after, runs sweep, and checks that exactly the given endpoints
// are mapped.
func (a *aging) mappedAfter(after time.Duration, ips ...string) {
	a.T.Helper()
	a.now = a.now.Add(after)
	a.OK(a.sweep(a.Ctx, a.now))
	have := a.Store.State().Spec().EndpointMappings
	delete(have, "169.254.0.1")
	for _, ip := range ips {
		if _, mapped := have[ip]; !mapped {
			a.T.Errorf("%s is not mapped any more after %v", ip, after)
		}
		delete(have, ip)
	}
	for ip := range have {
		a.T.Errorf("%s is still mapped after %v", ip, after)
	}
}

// pod creates a Pod with an address, and returns a function that deletes the Pod.
func (a *aging) pod(name, ip string, phase corev1.PodPhase) (remove func()) {
	a.T.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: a.System, Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "isthmus:1"}}}}
	pod.Spec.HostNetwork = slices.Contains(a.nodes, netip.MustParseAddr(ip))
	a.Create(pod)
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = phase, ip, []corev1.PodIP{{IP: ip}}
	a.OK(managertest.Client.Status().Update(a.Ctx, pod))
	if phase == corev1.PodRunning && !pod.Spec.HostNetwork {
		a.untilKind(ip, "pod")
	}
	return func() {
		a.T.Helper()
		a.OK(managertest.Client.Delete(a.Ctx, pod, client.GracePeriodSeconds(0)))
		a.untilKind(ip, "")
	}
}

// untilKind waits until ownerKind returns want, because the API server's memory may be outdated.
func (a *aging) untilKind(ip, want string) {
	a.T.Helper()
	a.Until(ip+" is "+want, func() bool {
		what, err := a.ownerKind(a.Ctx, netip.MustParseAddr(ip))
		a.OK(err)
		return what == want
	})
}

func TestMappingsOfDeletedObjectsExpire(t *testing.T) {
	a := newAging(t)
	a.joined("q", "172.16.16.0/20")
	removePod := a.pod("gone", "10.9.7.1", corev1.PodRunning)
	a.pod("stays", "10.9.7.2", corev1.PodRunning)
	a.pod("done", "10.9.7.3", corev1.PodSucceeded)   // an ended Pod has no address any more
	a.pod("shares", "172.30.0.1", corev1.PodRunning) // a Pod on the host network has its node's address
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: a.System, Name: "gone"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	a.Create(service)
	a.untilKind(service.Spec.ClusterIP, "service")
	for ip, want := range map[string]string{"10.9.7.1": "pod", "10.9.7.2": "pod", "10.9.7.3": "", "172.30.0.1": "node", "172.30.0.2": "node",
		service.Spec.ClusterIP: "service", "172.16.17.1": "peer q", "198.51.100.7": ""} {
		a.mapped(ip, want)
	}
	all := []string{"10.9.7.1", "10.9.7.2", "10.9.7.3", "172.30.0.1", "172.30.0.2", service.Spec.ClusterIP, "172.16.17.1", "198.51.100.7"}
	a.mappedAfter(0, all...)
	a.mappedAfter(24*time.Hour, all...)

	removePod()
	a.OK(managertest.Client.Delete(a.Ctx, service))
	a.untilKind(service.Spec.ClusterIP, "")
	a.nodes = a.nodes[1:]
	a.configure()
	a.update(func(b ipam.State) (ipam.State, error) { return b.Release("q"), nil })
	a.mappedAfter(time.Minute, all...)
	a.mappedAfter(expiryGrace-time.Minute, all...)
	a.mappedAfter(time.Minute, "10.9.7.2", "10.9.7.3", "172.30.0.2", "198.51.100.7")
	if n := a.expired.Load(); n != 4 {
		t.Errorf("%d expired, want 4", n)
	}
	for _, logged := range []string{"endpoint=10.9.7.1 was=pod", "endpoint=172.30.0.1 was=node", "endpoint=172.16.17.1 was=\"peer q\"", "was=service",
		"peer=p requesters=\"[certificate CN=kubelet]\""} {
		if !strings.Contains(a.log.String(), logged) {
			t.Errorf("%s is not in the log:\n%s", logged, a.log.String())
		}
	}
}

func TestPodRecreatedWithinTheGracePeriodKeepsItsMappings(t *testing.T) {
	a := newAging(t)
	remove := a.pod("one", "10.9.8.1", corev1.PodRunning)
	a.mapped("10.9.8.1", "pod")
	a.mappedAfter(0, "10.9.8.1")
	remove()
	a.mappedAfter(time.Minute, "10.9.8.1")
	remove = a.pod("two", "10.9.8.1", corev1.PodRunning)
	a.mappedAfter(expiryGrace, "10.9.8.1")
	remove()
	a.mappedAfter(time.Minute, "10.9.8.1") // the grace period begins again now
	a.mappedAfter(expiryGrace-time.Second, "10.9.8.1")
	a.mappedAfter(time.Second)
}

// The address belongs to a pod of another peer now, and that pod was never mapped.
func TestMappingExpiresAtOnceWhenTheAddressHasAnotherOwner(t *testing.T) {
	a := newAging(t)
	a.joined("q", "172.16.16.0/20")
	a.mapped("172.16.17.1", "peer q")
	a.mapped("172.16.17.2", "peer q")
	a.mappedAfter(0, "172.16.17.1", "172.16.17.2")
	a.update(func(b ipam.State) (ipam.State, error) { return b.Release("q"), nil })
	a.joined("r", "172.16.16.0/20")
	a.mappedAfter(0)
}

func TestNoMappingExpiresWhileTheAPIServerDoesNotAnswer(t *testing.T) {
	a := newAging(t)
	remove := a.pod("one", "10.9.9.1", corev1.PodRunning)
	a.mapped("10.9.9.1", "pod")
	remove()
	a.mappedAfter(0, "10.9.9.1")
	a.OK(managertest.Server.Freeze())
	away, cancel := context.WithTimeout(a.Ctx, time.Second)
	defer cancel()
	err := a.sweep(away, a.now.Add(2*expiryGrace))
	a.OK(managertest.Server.Thaw())
	if err == nil || !a.Store.State().Mapped("p", netip.MustParseAddr("10.9.9.1")) {
		t.Errorf("%v, mapped %v", err, a.Store.State().Mapped("p", netip.MustParseAddr("10.9.9.1")))
	}
	a.mappedAfter(2 * expiryGrace)
}
