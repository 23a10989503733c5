package facts

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/ipam"
	"github.com/isthmus-net/isthmus/manager/managertest"
)

// newKeeper returns a Keeper in a cluster with the PodCIDR 10.244.0.0/16. The test calls its
// Reconcile.
func newKeeper(w *managertest.World) (*Keeper, *managertest.Store, *events.FakeRecorder) {
	store, recorder := new(managertest.Store), events.NewFakeRecorder(100)
	return &Keeper{
		Cache: w.API(), Direct: w.API(), Store: store, Cluster: w.Self, Namespace: w.System, Events: recorder, Log: slog.New(slog.DiscardHandler),
		Plan: AddressPlan{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16")},
	}, store, recorder
}

// If a peer claims a network that a node reaches, it gets another one, which no node reaches
// either.
func TestPeersGetNoNetworkThatANodeReaches(t *testing.T) {
	w := managertest.New(t)
	w.Report("n1", []string{"172.30.1.0/24", "192.168.77.0/24"}, "192.168.79.53", "2001:db8::53")
	w.Report("n2", []string{"172.30.1.0/24", "10.0.0.0/11", "192.168.32.0/22", "100.64.7.0/24", "fd00:5::/48"})
	keeper, store, recorder := newKeeper(w)
	_, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
	w.OK(err)
	reached := []string{"172.30.1.0/24", "192.168.77.0/24", "192.168.79.53/32", "10.0.0.0/11", "192.168.32.0/22", "100.64.7.0/24", "fd00:5::/48"}
	for pod, as := range map[string]bool{
		"172.30.1.0/24":   false, // on-link
		"172.30.0.0/16":   false, // contains the network above
		"172.30.2.0/24":   true,
		"192.168.77.0/26": false, // part of a node's on-link network
		"192.168.33.0/24": false, // contains a static route of a node
		"192.168.36.0/22": true,
		"100.64.0.0/20":   false,
		"192.168.79.0/24": false, // contains a DNS server
		"192.168.78.0/24": true,
		"10.9.0.0/16":     false,
		"10.40.0.0/16":    true,
		"fd00:6::/48":     true,
	} {
		external := "172.20.0.0/20"
		if strings.HasPrefix(pod, "fd") {
			external = "fd00:7::/64"
		}
		_, g, err := store.State().Allocate(ipam.Request{ID: "b", Pod: netip.MustParsePrefix(pod), External: netip.MustParsePrefix(external)})
		if w.OK(err); (g.Pod.String() == pod) != as {
			t.Errorf("%s is %v", pod, g.Pod)
		}
		for _, r := range append(reached, store.State().Own().ExternalCIDR.String()) {
			if g.Pod.Overlaps(netip.MustParsePrefix(r)) || g.External.Overlaps(netip.MustParsePrefix(r)) {
				t.Errorf("%s is %v, and a node reaches %s", pod, g, r)
			}
		}
	}
	// If the pools have no room, the claim is refused. The refusal does not name our nodes.
	_, _, err = store.State().Allocate(ipam.Request{ID: "b", Pod: netip.MustParsePrefix("fd00:5::/56"), External: netip.MustParsePrefix("fd00:7::/64")})
	if err == nil || !strings.Contains(err.Error(), "fd00:5::/56 overlaps a network of a node, fd00:5::/48") {
		t.Errorf("an IPv6 network of node n2: %v", err)
	}
	if n := len(recorder.Events); n > 0 {
		t.Errorf("%d Events, such as %s", n, <-recorder.Events)
	}
}

// A node reports networks that contain those of all peers. The report is ignored, and an Event
// names the node.
func TestNodeReportOfTooWideNetworksIsIgnoredWithAnEvent(t *testing.T) {
	w := managertest.New(t)
	r := w.Report("n3", []string{"0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/7", "::/0", "192.168.32.0/22"})
	keeper, store, recorder := newKeeper(w)
	for range 2 { // the second call records no other Event
		_, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
		w.OK(err)
	}
	for pod, as := range map[string]bool{"192.168.96.0/22": true, "10.50.0.0/18": true, "192.168.32.0/24": false} {
		_, g, err := store.State().Allocate(ipam.Request{ID: "b", Pod: netip.MustParsePrefix(pod), External: netip.MustParsePrefix("172.20.0.0/20")})
		if w.OK(err); (g.Pod.String() == pod) != as {
			t.Errorf("%s is %v", pod, g.Pod)
		}
	}
	if n := len(recorder.Events); n != 1 {
		t.Fatalf("%d Events", n)
	}
	if text := <-recorder.Events; !strings.Contains(text, `Warning Ignored spec.networks: node "n3" reports "0.0.0.0/0" and 3 more`) {
		t.Error(text)
	}
	facts, err := keeper.Facts(w.Ctx)
	w.OK(err)
	if len(facts.Reached) != 1 || len(facts.Ignored) != 1 || facts.Ignored[0].Origin.Name != r.Name {
		t.Errorf("%+v", facts)
	}
}

func TestNodeReportsAreAwaitedForALimitedTime(t *testing.T) {
	w := managertest.New(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: w.Prefix + "-n1"}}
	w.Create(node)
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), node)) })
	keeper, _, _ := newKeeper(w)
	awaits := func() bool {
		t.Helper()
		result, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
		w.OK(err)
		facts, err := keeper.Facts(w.Ctx)
		w.OK(err)
		if facts.Awaiting && result.RequeueAfter > time.Second {
			t.Errorf("it looks again after %v", result.RequeueAfter)
		}
		return facts.Awaiting
	}
	keeper.began = time.Now().Add(time.Hour) // in the future, so that the speed of this machine does not matter
	if !awaits() {
		t.Error("a node has not reported, and nobody waits")
	}
	keeper.began = time.Now().Add(-reportPatience)
	if awaits() {
		t.Error("a node never reports, and all wait for ever")
	}
	keeper.began = time.Now().Add(time.Hour)
	w.Report(node.Name, nil)
	if awaits() {
		t.Error("all nodes have reported, and somebody waits")
	}
}

// An API server has an address that no Node has. A claimed network with that address is remapped.
func TestNetworksWithAnAPIServersAddressAreRemapped(t *testing.T) {
	w := managertest.New(t)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "kubernetes", Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.168.99.7"}}, {Addresses: []string{"192.168.98.7"}}},
	}
	if err := w.API().Create(w.Ctx, slice); apierrors.IsAlreadyExists(err) {
		t.Skip("this API server writes its own addresses")
	} else {
		w.OK(err)
	}
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), slice)) })
	store := new(managertest.Store)
	keeper := &Keeper{Cache: w.API(), Direct: w.API(), Store: store, Cluster: w.Self, Namespace: w.System, Log: slog.New(slog.DiscardHandler),
		Plan: AddressPlan{PodCIDR: netip.MustParsePrefix("10.244.0.0/16"), ServiceCIDR: netip.MustParsePrefix("10.96.0.0/12"),
			ExternalCIDR: netip.MustParsePrefix("10.245.0.0/16")}}
	facts, err := keeper.gather(w.Ctx)
	w.OK(err)
	if want := []netip.Addr{netip.MustParseAddr("192.168.98.7"), netip.MustParseAddr("192.168.99.7")}; !slices.Equal(facts.APIServers, want) {
		t.Errorf("API servers %v, want %v", facts.APIServers, want)
	}
	for pod, as := range map[string]bool{"192.168.99.0/24": false, "192.168.98.0/24": false, "192.168.96.0/24": true} {
		_, g, err := store.State().Allocate(ipam.Request{ID: "b", Pod: netip.MustParsePrefix(pod), External: netip.MustParsePrefix("172.20.0.0/20")})
		if w.OK(err); (g.Pod.String() == pod) != as {
			t.Errorf("%s is %v", pod, g.Pod)
		}
	}
}

func TestClusterNetworksAreDetected(t *testing.T) {
	w := managertest.New(t)
	own := &Keeper{Cache: w.API(), Direct: w.API(), Store: &managertest.Store{}, Cluster: w.Self, Namespace: w.System, Log: slog.New(slog.DiscardHandler),
		Plan: AddressPlan{ServiceCIDR: managertest.ServicesWherePlanned()}}
	f, err := own.gather(w.Ctx)
	w.OK(err)
	if f.PodCIDR.IsValid() || !strings.Contains(strings.Join(f.Missing, "\n"), "set --pod-cidr") {
		t.Errorf("without kubeadm: PodCIDR %v, missing %q", f.PodCIDR, f.Missing)
	}
	kubeadm := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kubeadm-config"},
		Data:       map[string]string{"ClusterConfiguration": "kind: ClusterConfiguration\nnetworking:\n  podSubnet: 10.32.0.0/19\n"},
	}
	w.Create(kubeadm)
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), kubeadm)) })
	f, err = own.gather(w.Ctx)
	w.OK(err)
	if f.PodCIDR.String() != "10.32.0.0/19" || f.ServiceCIDR.String() != "10.96.0.0/12" || !f.ExternalCIDR.IsValid() {
		t.Errorf("with kubeadm: %+v", f)
	}
	own.Plan.ServiceCIDR = netip.MustParsePrefix("10.32.16.0/24")
	f, err = own.gather(w.Ctx)
	w.OK(err)
	if !strings.Contains(strings.Join(f.Missing, "\n"), "overlaps ServiceCIDR") {
		t.Errorf("overlap: missing %q", f.Missing)
	}
}

// A TunnelEndpoint names a previous network of ours, so no other peer gets that network.
func TestPreviousNetworkNamedByATunnelEndpointIsNotReallocated(t *testing.T) {
	w := managertest.New(t)
	keeper, store, _ := newKeeper(w)
	tunnel := &v1alpha1.TunnelEndpoint{ObjectMeta: metav1.ObjectMeta{Namespace: w.System, Name: "b"}, Spec: v1alpha1.TunnelEndpointSpec{
		ClusterIdentity: v1alpha1.ClusterIdentity{ClusterID: "b", ClusterName: "b"},
		LocalPodCIDR:    "10.200.0.0/16", LocalNATPodCIDR: v1alpha1.None, LocalExternalCIDR: "10.201.0.0/16", LocalNATExternalCIDR: v1alpha1.None,
		RemotePodCIDR: "10.50.0.0/16", RemoteNATPodCIDR: v1alpha1.None, RemoteExternalCIDR: "10.51.0.0/16", RemoteNATExternalCIDR: v1alpha1.None,
		EndpointIP: "203.0.113.1", BackendType: v1alpha1.BackendWireGuard,
		BackendConfig: v1alpha1.BackendConfig{"publicKey": managertest.KeyText(7), "port": "5871"},
	}}
	w.Create(tunnel)
	t.Cleanup(func() { w.OK(w.API().Delete(context.Background(), tunnel)) })
	_, err := keeper.Reconcile(w.Ctx, ctrl.Request{})
	w.OK(err)
	_, g, err := store.State().Allocate(ipam.Request{ID: "d", Pod: netip.MustParsePrefix("10.200.0.0/16"), External: netip.MustParsePrefix("10.201.0.0/20")})
	w.OK(err)
	if used := netip.MustParsePrefix("10.200.0.0/15"); g.Pod.Overlaps(used) || g.External.Overlaps(used) {
		t.Errorf("%v", g)
	}
}
