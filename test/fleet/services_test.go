package fleet

import (
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/internal/lab"
)

// Two clusters with the same PodCIDR export a service, and a third cluster imports it from both.
// Each cluster must reach every endpoint that it lists. If an exporter loses its gateways, its
// endpoints must become unready in the other clusters. If it is un-peered from a cluster, its
// endpoints must disappear there.
func TestThreeClustersShareAService(t *testing.T) {
	f := upWith(t, fleet.Options{Services: true, Spec: lab.Spec{Clusters: []lab.ClusterSpec{
		inPods(clusterSpec("10.244.0.0/16", 2)), clusterSpec("10.244.0.0/16", 1), clusterSpec("10.240.0.0/12", 1),
	}}})
	a, b, c := f.Clusters[0], f.Clusters[1], f.Clusters[2]
	for _, pair := range [][2]*fleet.Cluster{{a, b}, {a, c}, {b, c}} {
		isthmus(t, f, "peer", "--request-timeout", "1m", "--timeout", patience.String(), "--services", "default",
			"--context", pair[0].Name, "--remote-context", pair[1].Name)
		waitReady(t, pair[0], pair[1])
	}
	exportShop(t, a)
	exportShop(t, b)
	both := map[string]bool{a.Name: true, b.Name: true}
	for _, at := range f.Clusters {
		waitListed(t, at, both, a, b)
	}
	fetchFromAll(t, c, a, b)
	fetchFromAll(t, a, b)
	fetchFromAll(t, b, a)

	for i := range a.Nodes {
		must(t, a.Kill(fleet.Gateway(i)))
	}
	for _, at := range []*fleet.Cluster{b, c} {
		waitListed(t, at, map[string]bool{a.Name: false, b.Name: true}, a, b)
	}
	fetchFromAll(t, c, b)
	for i := range a.Nodes {
		must(t, a.Start(t.Context(), fleet.Gateway(i)))
	}
	for _, at := range f.Clusters {
		waitListed(t, at, both, a, b)
	}
	fetchFromAll(t, c, a, b)

	isthmus(t, f, "unpeer", "--timeout", patience.String(), "--context", a.Name, "--remote-context", c.Name)
	waitListed(t, c, map[string]bool{b.Name: true}, a, b)
	waitListed(t, a, both, a, b)
	waitListed(t, b, both, a, b)
	fetchFromAll(t, c, b)
	fetchFromAll(t, b, a)
}

// exportShop exports a Service whose endpoints are the first pod of each node.
func exportShop(t *testing.T, c *fleet.Cluster) {
	t.Helper()
	slice := &discoveryv1.EndpointSlice{ObjectMeta: object("default", "shop-1"), AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](80)}}}
	slice.Labels = map[string]string{discoveryv1.LabelServiceName: "shop"}
	for _, p := range shopPods(t, c) {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{p.Addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)},
		})
	}
	for _, o := range []client.Object{
		&corev1.Service{ObjectMeta: object("default", "shop"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}},
		slice,
		&mcs.ServiceExport{ObjectMeta: object("default", "shop")},
	} {
		must(t, c.Client.Create(t.Context(), o))
	}
}

// shopPods returns the pods behind the Service of exportShop.
func shopPods(t *testing.T, c *fleet.Cluster) (pods []*lab.Pod) {
	t.Helper()
	for i := range c.Nodes {
		pods = append(pods, podOn(t, c, i))
	}
	return pods
}

// waitListed waits until the EndpointSlices of a cluster list exactly the pods of the clusters in
// want, each with its translated address. The value in want is the wanted readiness.
func waitListed(t *testing.T, at *fleet.Cluster, want map[string]bool, exporters ...*fleet.Cluster) {
	t.Helper()
	wanted := map[string]bool{}
	for _, e := range exporters {
		isReady, there := want[e.Name]
		if !there {
			continue
		}
		for _, p := range shopPods(t, e) {
			addr := p.Addr
			if at != e {
				addr = seen(t, at, e, addr)
			}
			wanted[e.Name+" "+addr.String()] = isReady
		}
	}
	eventually(t, fmt.Sprintf("cluster %s has %v", at.Name, wanted), func() error {
		var list discoveryv1.EndpointSliceList
		if err := at.Client.List(t.Context(), &list, client.InNamespace("default"), client.MatchingLabels{mcs.LabelServiceName: "shop"}); err != nil {
			return err
		}
		got := map[string]bool{}
		for _, s := range list.Items {
			for _, e := range s.Endpoints {
				got[s.Labels[mcs.LabelSourceCluster]+" "+e.Addresses[0]] = ptr.Deref(e.Conditions.Ready, false)
			}
		}
		if !maps.Equal(got, wanted) {
			return fmt.Errorf("it has %v", got)
		}
		return nil
	})
}

// fetchFromAll fetches a page from each endpoint of some exporters, using the addresses that a
// cluster lists. The right pod must respond.
func fetchFromAll(t *testing.T, at *fleet.Cluster, exporters ...*fleet.Cluster) {
	t.Helper()
	from := podOn(t, at, 0)
	for _, e := range exporters {
		for _, to := range shopPods(t, e) {
			visit(t, from.Host, to.Host, seen(t, at, e, to.Addr), seen(t, e, at, from.Addr))
		}
	}
}
