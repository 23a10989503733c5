package manager

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcscrd "sigs.k8s.io/mcs-api/config/crd"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"
	"sigs.k8s.io/yaml"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/managertest"
	"github.com/isthmus-net/isthmus/manager/services"
)

// sharing enables the sharing of services on a side, with the same PodCIDR on both sides.
func sharing(s *side) {
	s.T.Helper()
	for _, text := range [][]byte{mcscrd.ServiceExportCRD, mcscrd.ServiceImportCRD} {
		var crd apiextensions.CustomResourceDefinition
		s.OK(yaml.Unmarshal(text, &crd))
		s.OK(client.IgnoreAlreadyExists(s.API().Create(s.Ctx, &crd)))
	}
	s.Until("the kinds are served", func() bool {
		ok, err := canShare(s.Ctx, s.API())
		return ok && err == nil
	})
	s.pods, s.services = "10.200.0.0/17", true
	s.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: s.prod()}})
}

func (s *side) prod() string { return s.Prefix + "-prod" }

// joined waits until the tunnel works, and sets the shared namespaces of the Peering.
func (s *side) joined(export, imports []string) {
	s.T.Helper()
	s.connected()
	s.consent(export, imports)
	s.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
}

func (s *side) consent(export, imports []string) {
	s.T.Helper()
	s.Until("the Peering is edited", func() bool {
		var p isthmus.Peering
		s.OK(s.API().Get(s.Ctx, client.ObjectKeyFromObject(s.peer.Peering), &p))
		p.Spec.Services = isthmus.Services{Export: export, Import: imports}
		err := s.API().Update(s.Ctx, &p)
		if !apierrors.IsConflict(err) {
			s.OK(err)
		}
		return err == nil
	})
}

// serve creates a Service with one port, an EndpointSlice with the given addresses, and a
// ServiceExport.
func (s *side) serve(name string, addresses ...string) *discoveryv1.EndpointSlice {
	s.T.Helper()
	s.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: s.prod(), Name: name}, Spec: corev1.ServiceSpec{
		Ports: []corev1.ServicePort{{Name: "http", Port: 80}},
	}})
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: s.prod(), Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080)}},
	}
	for _, a := range addresses {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}})
	}
	s.Create(slice)
	s.Create(&mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: s.prod(), Name: name}})
	return slice
}

// shared returns the objects of a service as text: ServiceImport, Service, and endpoints with their
// clusters.
func (s *side) shared(name string) string {
	s.T.Helper()
	var found []string
	key := services.Key{Namespace: s.prod(), Name: name}
	var i mcs.ServiceImport
	err := s.API().Get(s.Ctx, key, &i)
	s.OK(client.IgnoreNotFound(err))
	if err == nil {
		found = append(found, fmt.Sprintf("import %s", i.Spec.Type))
	}
	var svc corev1.Service
	err = s.API().Get(s.Ctx, services.Key{Namespace: key.Namespace, Name: services.DerivedName(key)}, &svc)
	s.OK(client.IgnoreNotFound(err))
	if err == nil {
		if !slices.Equal(i.Spec.IPs, svc.Spec.ClusterIPs) || i.Annotations[services.AnnotationDerived] != svc.Name {
			found = append(found, "addresses differ")
		}
		found = append(found, "service")
	}
	var list discoveryv1.EndpointSliceList
	s.OK(s.API().List(s.Ctx, &list, client.InNamespace(key.Namespace), client.MatchingLabels{mcs.LabelServiceName: name}))
	var ends []string
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			text := fmt.Sprintf("%s %s:%d", strings.TrimPrefix(slice.Labels[mcs.LabelSourceCluster], s.Prefix+"-"), e.Addresses[0], *slice.Ports[0].Port)
			if !*e.Conditions.Ready {
				text += "!"
			}
			ends = append(ends, text)
		}
	}
	slices.Sort(ends)
	return strings.Join(append(found, ends...), ", ")
}

func (s *side) untilShared(name, want string) {
	s.T.Helper()
	got := ""
	defer func() {
		if s.T.Failed() {
			s.T.Logf("%s has %q, want %q\n%s", s.Self.ClusterName, got, want, s.log.String())
		}
	}()
	s.Until(want, func() bool {
		got = s.shared(name)
		return got == want
	})
}

// untilExport waits until a condition of a ServiceExport has a reason.
func (s *side) untilExport(name string, condition mcs.ServiceExportConditionType, reason mcs.ServiceExportConditionReason) {
	s.T.Helper()
	var e mcs.ServiceExport
	defer func() {
		if s.T.Failed() {
			s.T.Logf("%+v", e.Status)
		}
	}()
	s.Until(fmt.Sprintf("%s is %s", condition, reason), func() bool {
		s.OK(s.API().Get(s.Ctx, services.Key{Namespace: s.prod(), Name: name}, &e))
		c := meta.FindStatusCondition(e.Status.Conditions, string(condition))
		return c != nil && c.Reason == string(reason)
	})
}

// tunnel sets the status of the tunnel, as the gateway would.
func (s *side) tunnel(status v1alpha1.ConnectionStatus) {
	s.T.Helper()
	te := s.peer.Endpoint()
	te.Status.Connection.Status = status
	s.OK(s.API().Status().Update(s.Ctx, te))
}

// tunnelStays reports whether the TunnelEndpoint exists and is not being deleted.
func (s *side) tunnelStays() bool {
	s.T.Helper()
	te := s.peer.Endpoint()
	return te != nil && te.DeletionTimestamp.IsZero()
}

func (s *side) unpeer() {
	s.T.Helper()
	s.peer.Delete()
	s.Until("the Peering is gone", s.peer.Deleted)
}

func TestServicesAreSharedBetweenClustersWithTheSamePodCIDR(t *testing.T) {
	a, b := twoSidesWith(t, managertest.Connect, sharing)
	b.joined([]string{b.prod()}, nil)
	a.joined(nil, []string{"*"})
	seen := netip.MustParsePrefix(a.peer.Status().Remote.PodCIDRSeen)
	if seen.String() == b.pods {
		t.Fatal("the pods of b have to be seen elsewhere")
	}
	addrIn := func(host string) string { // returns the endpoint in a of a pod of b
		moved, ok := services.Remap{From: netip.MustParsePrefix(b.pods), To: seen}.Map(netip.MustParseAddr(host))
		if !ok {
			t.Fatal(host)
		}
		return "that " + moved.String() + ":8080"
	}

	// The endpoint that is not a pod is not exported.
	slice := b.serve("shop", "10.200.0.5", "10.200.1.6", "192.0.2.77")
	a.untilShared("shop", "import ClusterSetIP, service, "+addrIn("10.200.0.5")+", "+addrIn("10.200.1.6"))
	b.untilShared("shop", "import ClusterSetIP, service, that 10.200.0.5:8080, that 10.200.1.6:8080, that 192.0.2.77:8080")
	b.untilExport("shop", mcs.ServiceExportConditionValid, mcs.ServiceExportReasonValid)
	b.untilExport("shop", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonExported)
	b.untilExport("shop", mcs.ServiceExportConditionConflict, mcs.ServiceExportReasonNoConflicts)
	a.peer.WaitForReason(isthmus.ConditionServicesShared, isthmus.ReasonShared)
	b.peer.WaitForReason(isthmus.ConditionServicesShared, isthmus.ReasonShared)

	// Users may write invalid values into a ServiceExport and an EndpointSlice. Such values must
	// not affect other services of the shard.
	odd := sameShard(b.prod(), "shop")
	zone := b.serve(odd, "10.200.3.3")
	zone.Endpoints[0].Zone = ptr.To(strings.Repeat("z", 300))
	b.OK(b.API().Update(b.Ctx, zone))
	var export mcs.ServiceExport
	b.OK(b.API().Get(b.Ctx, services.Key{Namespace: b.prod(), Name: odd}, &export))
	export.Spec.ExportedLabels = map[string]string{strings.Repeat("k", 400): "v", "team": strings.Repeat("v", 600)}
	b.OK(b.API().Update(b.Ctx, &export))
	b.untilExport(odd, mcs.ServiceExportConditionReady, mcs.ServiceExportReasonExported)
	a.untilShared(odd, "import ClusterSetIP, service, "+addrIn("10.200.3.3"))

	slice.Endpoints[1].Conditions.Ready = ptr.To(false)
	b.OK(b.API().Update(b.Ctx, slice))
	a.untilShared("shop", "import ClusterSetIP, service, "+addrIn("10.200.0.5")+", "+addrIn("10.200.1.6")+"!")

	// When the tunnel to a cluster is down, its endpoints become unready as soon as another cluster
	// serves the service.
	a.tunnel(v1alpha1.ConnectionError)
	a.serve("shop", "10.200.0.9")
	a.untilShared("shop", "import ClusterSetIP, service, self 10.200.0.9:8080, "+addrIn("10.200.0.5")+"!, "+addrIn("10.200.1.6")+"!")
	a.tunnel(v1alpha1.Connected)
	a.untilShared("shop", "import ClusterSetIP, service, self 10.200.0.9:8080, "+addrIn("10.200.0.5")+", "+addrIn("10.200.1.6")+"!")

	// Without consent to import, no service of the peer is imported, and the exporter's condition
	// shows that.
	a.consent(nil, nil)
	a.untilShared("shop", "import ClusterSetIP, service, self 10.200.0.9:8080")
	b.untilExport("shop", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonFailed)
	a.OK(a.API().Delete(a.Ctx, &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: a.prod(), Name: "shop"}}))
	a.untilShared("shop", "")
	a.consent(nil, []string{a.prod()})
	a.untilShared("shop", "import ClusterSetIP, service, "+addrIn("10.200.0.5")+", "+addrIn("10.200.1.6")+"!")
	b.untilExport("shop", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonExported)
	b.consent(nil, nil)
	a.untilShared("shop", "")
	b.Until("the peer has nothing of ours", func() bool { return a.offers() == 0 })
	b.consent([]string{"*"}, nil)
	a.untilShared("shop", "import ClusterSetIP, service, "+addrIn("10.200.0.5")+", "+addrIn("10.200.1.6")+"!")

	// A restarted manager withdraws nothing and writes nothing.
	before := a.sharedVersions() + b.sharedVersions()
	for _, s := range []*side{a, b} {
		s.stop()
		s.manage()
	}
	b.OK(b.API().Get(b.Ctx, client.ObjectKeyFromObject(slice), slice))
	slice.Labels["after"] = "restart" // once the peer has this label, the start is complete
	b.OK(b.API().Update(b.Ctx, slice))
	b.serve("late", "10.200.2.2")
	a.untilShared("late", "import ClusterSetIP, service, "+addrIn("10.200.2.2"))
	if after := a.sharedVersions() + b.sharedVersions(); after != before {
		t.Errorf("resource versions were\n%s and are\n%s", before, after)
	}

	// The tunnel stays until the endpoints have been removed.
	b.peer.Delete()
	b.Until("the Peering is gone, and the endpoints before the tunnel", func() bool {
		apart := !a.tunnelStays() || !b.tunnelStays()
		if shop := a.shared("shop"); apart && shop != "" {
			t.Errorf("a has %s without a tunnel", shop)
		}
		return apart && b.peer.Deleted()
	})
	if n := a.offers(); n != 0 {
		t.Errorf("%d PeerServices have stayed", n)
	}
	a.unpeer()
	for _, s := range []*side{a, b} {
		s.stop()
		for line := range strings.Lines(s.log.String()) {
			if strings.Contains(line, "forbidden") || strings.Contains(line, "Reconciler error") && !strings.Contains(line, "context canceled") {
				t.Errorf("the manager of %s had trouble: %s", s.Self.ClusterName, line)
			}
		}
	}
}

// sameShard returns the name of another service that belongs to the same shard.
func sameShard(namespace, name string) string {
	for i := 0; ; i++ {
		other := fmt.Sprintf("odd-%d", i)
		if services.ShardOf(services.Key{Namespace: namespace, Name: other}) == services.ShardOf(services.Key{Namespace: namespace, Name: name}) {
			return other
		}
	}
}

// offers returns the number of PeerServices of the peer.
func (s *side) offers() int {
	s.T.Helper()
	var list isthmus.PeerServicesList
	s.OK(s.API().List(s.Ctx, &list, client.InNamespace(s.peer.NS)))
	return len(list.Items)
}

// sharedVersions returns the resourceVersions of our objects for the service shop.
func (s *side) sharedVersions() string {
	s.T.Helper()
	var i mcs.ServiceImport
	key := services.Key{Namespace: s.prod(), Name: "shop"}
	s.OK(s.API().Get(s.Ctx, key, &i))
	var svc corev1.Service
	s.OK(s.API().Get(s.Ctx, services.Key{Namespace: key.Namespace, Name: services.DerivedName(key)}, &svc))
	text := fmt.Sprintln(i.Name, i.ResourceVersion, svc.Name, svc.ResourceVersion)
	var list discoveryv1.EndpointSliceList
	s.OK(s.API().List(s.Ctx, &list, client.InNamespace(key.Namespace), client.MatchingLabels{mcs.LabelServiceName: "shop"}))
	for _, slice := range list.Items {
		text += fmt.Sprintln(slice.Name, slice.ResourceVersion)
	}
	return text
}

// A foreign ServiceImport or Service with the name of ours is not changed. The conditions of our
// ServiceExport are not changed either. The importer's Peering names the service. All other
// services are shared.
func TestForeignServiceObjectsAreNotChanged(t *testing.T) {
	a, b := twoSidesWith(t, managertest.Connect, sharing)
	theirs := &mcs.ServiceImport{
		ObjectMeta: metav1.ObjectMeta{Namespace: a.prod(), Name: "shop", Labels: map[string]string{"example.com/of": "another"}, Annotations: map[string]string{services.AnnotationDerived: "another-shop"}},
		Spec:       mcs.ServiceImportSpec{Type: mcs.ClusterSetIP, IPs: []string{"192.0.2.99"}, Ports: []mcs.ServicePort{{Port: 443}}},
	}
	a.Create(theirs)
	key := services.Key{Namespace: a.prod(), Name: "cart"}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: a.prod(), Name: services.DerivedName(key)}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}}}
	a.Create(service)
	b.joined([]string{b.prod()}, nil)
	a.joined(nil, []string{"*"})
	for i, name := range []string{"shop", "cart", "till"} {
		b.serve(name, fmt.Sprintf("10.200.0.%d", 5+i))
	}
	a.Until("another service is shared", func() bool { return strings.Contains(a.shared("till"), "service, that ") })
	untouched := func() bool {
		t.Helper()
		var i mcs.ServiceImport
		a.OK(a.API().Get(a.Ctx, client.ObjectKeyFromObject(theirs), &i))
		var s corev1.Service
		a.OK(a.API().Get(a.Ctx, client.ObjectKeyFromObject(service), &s))
		var list discoveryv1.EndpointSliceList
		a.OK(a.API().List(a.Ctx, &list, client.InNamespace(a.prod()), client.MatchingLabels{mcs.LabelServiceName: "shop"}))
		var carts discoveryv1.EndpointSliceList
		a.OK(a.API().List(a.Ctx, &carts, client.InNamespace(a.prod()), client.MatchingLabels{mcs.LabelServiceName: "cart"}))
		derived := services.Key{Namespace: a.prod(), Name: services.DerivedName(services.Key{Namespace: a.prod(), Name: "shop"})}
		return i.ResourceVersion == theirs.ResourceVersion && s.ResourceVersion == service.ResourceVersion && len(list.Items)+len(carts.Items) == 0 &&
			apierrors.IsNotFound(a.API().Get(a.Ctx, derived, &corev1.Service{})) && apierrors.IsNotFound(a.API().Get(a.Ctx, key, &mcs.ServiceImport{}))
	}
	a.Always("the objects of others are untouched", untouched)
	names := "another implementation has " + a.prod() + "/cart, " + a.prod() + "/shop"
	a.Until("the Peering says "+names, func() bool { return strings.Contains(a.peer.Message(isthmus.ConditionServicesShared), names) })
	for _, s := range []*side{a, b} {
		s.peer.WaitForReason(isthmus.ConditionServicesShared, isthmus.ReasonPartlyRefused)
		s.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
	}
	b.untilExport("shop", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonFailed)
	b.untilExport("till", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonExported)

	a.serve("shop", "10.200.0.9")
	a.Always("our export and the objects of others are untouched", func() bool {
		var e mcs.ServiceExport
		a.OK(a.API().Get(a.Ctx, client.ObjectKeyFromObject(theirs), &e))
		return len(e.Status.Conditions) == 0 && untouched()
	})

	// Once the foreign objects are deleted, ours are created.
	a.OK(a.API().Delete(a.Ctx, theirs))
	a.Until("the service is shared", func() bool {
		return strings.HasPrefix(a.shared("shop"), "import ClusterSetIP, service, self 10.200.0.9:8080, that ")
	})
	a.OK(a.API().Delete(a.Ctx, service))
	a.Until("the other one, too", func() bool { return strings.HasPrefix(a.shared("cart"), "import ClusterSetIP, service, that ") })
	for _, s := range []*side{a, b} {
		s.peer.WaitForReason(isthmus.ConditionServicesShared, isthmus.ReasonShared)
	}
}

// A peer may lack the kind PeerServices, such as Liqo v0.9 or an older Isthmus. Its Peering becomes
// ready, but it gets no services, and the Peering has the reason.
func TestPeeringWithAPeerThatLacksPeerServicesBecomesReady(t *testing.T) {
	dir := t.TempDir()
	files, err := filepath.Glob("../deploy/crds/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	a, b := twoSidesWith(t, func(ctx context.Context, server *kubetest.Server) (*rest.Config, client.Client, error) {
		for _, file := range files {
			if filepath.Base(file) == "isthmus.net_peerservices.yaml" {
				continue
			}
			text, err := os.ReadFile(file)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, filepath.Base(file)), text, 0o644)
			}
			if err != nil {
				return nil, nil, err
			}
		}
		return managertest.ConnectWith(ctx, server, dir)
	}, func(s *side) {
		if s.server == managertest.Server {
			sharing(s)
		}
	})
	a.joined([]string{a.prod()}, []string{a.prod()})
	b.connected()
	b.peer.WaitForReason(isthmus.ConditionReady, isthmus.ReasonConnected)
	a.serve("shop", "10.200.0.5")
	a.peer.WaitForReason(isthmus.ConditionServicesShared, isthmus.ReasonNotSupported)
	a.untilExport("shop", mcs.ServiceExportConditionReady, mcs.ServiceExportReasonFailed)
	a.untilShared("shop", "import ClusterSetIP, service, self 10.200.0.5:8080") // the service is still served in its own cluster
	a.Always("the Peering is Ready", func() bool { return a.peer.HasReason(isthmus.ConditionReady, isthmus.ReasonConnected) })

	// Un-peering does not wait for PeerServices that the peer cannot have.
	a.unpeer()
	b.unpeer()
}
