package place

import (
	"os"
	"strings"
	"testing"

	"github.com/isthmus-net/isthmus/internal/expect"
	"github.com/isthmus-net/isthmus/internal/kubetest"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/install"
)

var must = expect.NoError

func TestMain(m *testing.M) { os.Exit(kubetest.Rounds(m.Run)) }

// importedSlice returns a slice with one endpoint of a cluster, at port 8080 with the name
// http.
func importedSlice(service, cluster, host, address string, ready bool) discoveryv1.EndpointSlice {
	return discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "prod", GenerateName: "derived-", Labels: map[string]string{mcs.LabelServiceName: service, mcs.LabelSourceCluster: cluster}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}, Hostname: &host, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
	}
}

func TestAnImportedNameResolvesToAnEndpointOfAPeer(t *testing.T) {
	peeringWith := func(id, seen string, connected metav1.ConditionStatus) isthmus.Peering {
		return isthmus.Peering{Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: id}}, Status: isthmus.PeeringStatus{
			Remote:     isthmus.Networks{PodCIDRSeen: seen},
			Conditions: []metav1.Condition{{Type: isthmus.ConditionConnected, Status: connected, Reason: "PeerSilent"}},
		}}
	}
	peerings := []isthmus.Peering{peeringWith("o", "10.246.0.0/16", metav1.ConditionTrue), peeringWith("r", "10.245.0.0/16", metav1.ConditionFalse)}
	list := []discoveryv1.EndpointSlice{
		importedSlice("shop", "oslo", "web-0", "10.246.1.9", true), importedSlice("shop", "oslo", "web-1", "10.246.1.8", true), importedSlice("shop", "oslo", "web-2", "10.246.1.7", false),
		importedSlice("shop", "rome", "web-0", "10.245.1.2", true), importedSlice("shop", "paris", "web-0", "10.10.1.1", true),
	}
	const name, counts = "shop.prod.svc.clusterset.local", "; ready endpoints: oslo 2 of 3, paris 1 of 1, rome 1 of 1 (not connected: PeerSilent)"
	for _, tc := range []struct {
		text, peer    string
		kind          mcs.ServiceImportType
		list          []discoveryv1.EndpointSlice
		addr, problem string
	}{
		{name, "", mcs.ClusterSetIP, list, "10.245.1.2:8080", name + ", endpoint of rome" + counts},
		{name + ".:80", "o", mcs.ClusterSetIP, list, "10.246.1.8:8080", name + "., endpoint of oslo" + counts},
		{name + ":81", "o", mcs.ClusterSetIP, list, "", "has no port 81"},
		{name + ":9090", "o", mcs.Headless, list, "10.246.1.8:9090", name + ", endpoint of oslo" + counts},
		{"web-0.oslo." + name, "r", mcs.Headless, list, "10.246.1.9:0", "web-0.oslo." + name + ", endpoint of oslo; ready endpoints: oslo 1 of 1"},
		{"web-3.oslo." + name, "r", mcs.Headless, list, "", "has no ready endpoint web-3 of cluster oslo; ready endpoints: oslo 0 of 0"},
		{name, "o", mcs.ClusterSetIP, list[4:], "10.10.1.1:8080", name + ", endpoint of paris; ready endpoints: oslo 0 of 0, paris 1 of 1"},
		{name, "r", mcs.ClusterSetIP, []discoveryv1.EndpointSlice{importedSlice("shop", "rome", "", "10.245.1.2", false)}, "",
			"has no ready endpoint; ready endpoints: oslo 0 of 0, rome 0 of 1 (not connected: PeerSilent)"},
	} {
		if !IsImportedName(tc.text) {
			t.Errorf("%s is not taken for the name of an imported Service", tc.text)
		}
		n, err := parseImportedName(tc.text)
		must(t, err)
		i := &mcs.ServiceImport{
			Spec:   mcs.ServiceImportSpec{Type: tc.kind, Ports: []mcs.ServicePort{{Name: "http", Port: 80}}},
			Status: mcs.ServiceImportStatus{Clusters: []mcs.ClusterStatus{{Cluster: "oslo"}}},
		}
		addr, text, err := n.choose(i, tc.list, peerings, tc.peer)
		if err != nil {
			text = err.Error()
		}
		if (err != nil) != (tc.addr == "") || err == nil && addr.String() != tc.addr || text != tc.problem {
			t.Errorf("%s, %s:\ngot  %v, %s\nwant %s, %s", tc.text, tc.kind, addr, text, tc.addr, tc.problem)
		}
	}
	for _, name := range []string{"clusterset.local", "shop.prod.svc", "10.0.0.1:80", "shop/web-0"} {
		if IsImportedName(name) {
			t.Errorf("%s is taken for the name of an imported Service", name)
		}
	}
	if _, err := parseImportedName("prod.svc.clusterset.local"); err == nil || !strings.Contains(err.Error(), "want NAME.NAMESPACE.svc.clusterset.local") {
		t.Error(err)
	}
}

func TestAMissingServiceImportIsExplained(t *testing.T) {
	t.Parallel()
	c, _ := clustertest.NewCluster(t, "imports")
	options := install.Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "imports"}, Values: clustertest.WithoutWorkloads, Report: new(clustertest.Lines).Report}
	must(t, install.Run(t.Context(), c, options))
	wants := func(name, want string) {
		t.Helper()
		p, err := Imported(t.Context(), c, name+".prod.svc.clusterset.local", "")
		if got := p.String(); err == nil && got != want || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %s, %v; want %s", name, got, err, want)
		}
	}
	wants("shop", "this cluster does not share services; run `isthmus install --context")
	options.Values = chart.Merge(clustertest.WithoutWorkloads, chart.Values{"services": chart.Values{"enabled": true}})
	must(t, install.Run(t.Context(), c, options))
	slice := importedSlice("shop", "oslo", "web-0", "10.246.1.9", true)
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "oslo"}},
		&mcs.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "shop"}, Spec: mcs.ServiceImportSpec{Type: mcs.ClusterSetIP, Ports: []mcs.ServicePort{{Name: "http", Port: 80}}}},
		&slice,
	} {
		must(t, c.Client.Create(t.Context(), o))
	}
	wants("shop", "10.246.1.9:8080 (shop.prod.svc.clusterset.local, endpoint of oslo; ready endpoints: oslo 1 of 1)")
	wants("cart", "Service prod/cart is not imported: no peer exports it to this cluster")
	p := &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: "oslo", Name: "services-0"}, Spec: isthmus.PeerServicesSpec{
		Services: []isthmus.ExportedService{{Namespace: "prod", Name: "cart", Since: "2026-11-22T12:00:00Z", Type: "Headless"}}}}
	must(t, c.Client.Create(t.Context(), p))
	wants("cart", "peer oslo exports it: the manager has not checked it yet")
	p.Status = isthmus.PeerServicesStatus{ObservedGeneration: p.Generation, Refused: []isthmus.RefusedService{{Namespace: "prod", Name: "cart", Reason: "NotImported", Message: "the Peering does not import"}}}
	must(t, c.Client.Status().Update(t.Context(), p))
	wants("cart", "peer oslo exports it: NotImported: the Peering does not import")
}
