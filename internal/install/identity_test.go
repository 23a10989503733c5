package install

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"maps"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestClusterIdentityNeverChanges(t *testing.T) {
	id := func(id, name string) v1alpha1.ClusterIdentity {
		return v1alpha1.ClusterIdentity{ClusterID: id, ClusterName: name}
	}
	have := id("X", "x")
	for _, tc := range []struct {
		have        *v1alpha1.ClusterIdentity
		flags, want v1alpha1.ClusterIdentity
		err         string
	}{
		{nil, id("", "a"), id("uid", "a"), ""},
		{nil, id("me", "a"), id("me", "a"), ""},
		{nil, id("me", ""), id("", ""), "want --cluster-name"},
		{nil, id("me", "Größe"), id("", ""), "cluster name Größe: want at most 44 lower-case letters"},
		{nil, id("me", "a.b"), id("", ""), "want at most 44 lower-case letters"},
		{nil, id("me", strings.Repeat("a", 45)), id("", ""), "at most 44"},
		{nil, id("me and you", "a"), id("", ""), "cluster ID me and you: want"},
		{&have, id("", ""), have, ""},
		{&have, id("X", ""), have, ""},
		{&have, id("", "y"), id("", ""), "as x (X), not y (X)"},
	} {
		got, err := chooseIdentity(tc.have, tc.flags, "uid")
		if tc.err == "" && (err != nil || got != tc.want) || tc.err != "" && (err == nil || !strings.Contains(err.Error(), tc.err)) {
			t.Errorf("%v, %v: %v, %v", tc.have, tc.flags, got, err)
		}
	}
	if longest := id("X", strings.Repeat("a", 44)).TenantNamespace(); len(longest) > 63 {
		t.Errorf("%s is no namespace", longest)
	}
}

func TestInstallIsIdempotentAndKeepsTheIdentity(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	var reported []string
	o := Options{Report: func(line string) { reported = append(reported, line) }}
	must(t, Run(t.Context(), c, o))
	if len(reported) == 0 || !strings.Contains(reported[0], "without the components, as before") {
		t.Errorf("that it was without workloads is not remembered, or not said:\n%s", strings.Join(reported, "\n"))
	}
	for _, line := range reported[min(1, len(reported)):] {
		if !strings.HasSuffix(line, " unchanged") {
			t.Error(line)
		}
	}
	if c.Identity.ClusterName != "a" || c.Identity.ClusterID != c.UID {
		t.Errorf("it is %v", c.Identity)
	}
	reported = nil
	o.Identity.ClusterID = "another"
	if err := Run(t.Context(), c, o); err == nil || !strings.Contains(err.Error(), "already") || reported != nil {
		t.Errorf("%v, %v", err, reported)
	}
}

// A gateway that runs from its saved state is not ready. When the API server is back, the
// kubelet's first report must not remove the gateway from the Service. Existing Services are
// updated.
func TestTheServiceSelectsAnUnreadyActiveGateway(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "ready-or-not"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	want := gatewayService(t, c.Namespace, 6873, 1)
	older := want.DeepCopy()
	must(t, unstructured.SetNestedField(older.Object, false, "spec", "publishNotReadyAddresses"))
	for _, s := range []*unstructured.Unstructured{older, want} {
		_, err := c.Apply(t.Context(), s)
		must(t, err)
	}
	var service corev1.Service
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(want), &service))
	if !service.Spec.PublishNotReadyAddresses || !maps.Equal(service.Spec.Selector, map[string]string{v1alpha1.LabelGateway: v1alpha1.GatewayActive}) {
		t.Errorf("%+v; want it to lead to whoever is labelled as active", service.Spec)
	}
}

func TestInstallChangesTheNumberOfTunnelsOfTheService(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B, Namespace: "tunnels"})
	must(t, c.Client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: c.Namespace}}))
	nodePort := map[string]int32{}
	for _, tunnels := range []int{1, 3, 2, 2} {
		outcome, err := c.Apply(t.Context(), gatewayService(t, c.Namespace, 6871, tunnels))
		must(t, err)
		var service corev1.Service
		must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: c.Namespace, Name: "isthmus-gateway"}, &service))
		var got []string
		for i, p := range service.Spec.Ports {
			got = append(got, p.Name)
			if p.Port != 6871+int32(i) || p.TargetPort.IntValue() != int(p.Port) || p.Protocol != corev1.ProtocolUDP || p.NodePort == 0 {
				t.Errorf("with %d tunnels: port %+v", tunnels, p)
			}
			if was := nodePort[p.Name]; was != 0 && was != p.NodePort {
				t.Errorf("with %d tunnels the port %s is published as %d, before as %d", tunnels, p.Name, p.NodePort, was)
			}
			nodePort[p.Name] = p.NodePort
		}
		if want := []string{"wireguard", "wireguard-1", "wireguard-2"}[:tunnels]; !slices.Equal(got, want) {
			t.Errorf("with %d tunnels: %v (%s)", tunnels, got, outcome)
		}
	}
}

// gatewayService returns the Service of the chart.
func gatewayService(t *testing.T, namespace string, port, tunnels int) *unstructured.Unstructured {
	t.Helper()
	values := chart.Merge(clustertest.NodePortService(port, tunnels), chart.Values{"cluster": chart.Values{"name": "x"}})
	all, err := chart.Objects(chart.Options{Namespace: namespace, Values: values})
	must(t, err)
	i := slices.IndexFunc(all, func(u *unstructured.Unstructured) bool { return u.GetKind() == "Service" })
	return all[i]
}
