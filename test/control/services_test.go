package control

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/kubetest"
	"github.com/isthmus-net/isthmus/manager/services"
)

// TestHostileServicesAffectNoOtherNamespace lets b attack a by PeerServices, with the identity that
// `isthmus peer` gave it. Both clusters have the same PodCIDR. The policies are those of `isthmus
// install --services`, and a's manager has the permissions of its ServiceAccount.
// testdata/hostile-services.txt lists the result for each input.
func TestHostileServicesAffectNoOtherNamespace(t *testing.T) {
	t.Parallel()
	sites := planSites(t, "10.244.0.0/16", "10.244.0.0/16")
	a, b := sites[0], sites[1]
	a.services, b.services = true, true
	startSites(t, sites)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
	if err := a.client.Create(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "198.51.100.10"}}
	if err := a.client.Status().Update(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	for _, s := range sites {
		for _, name := range []string{"prod", "secret"} {
			if err := s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}); err != nil {
				t.Fatal(err)
			}
		}
		s.startManager("--services")
	}
	peer(t, a, b, "--services", "prod,missing,kube-system,"+installed+","+a.tenant(b))
	c := honest(t, a)

	// For an honest service, the policies must accept the writes of both the peer and the manager.
	serve(b, "shop", "10.244.1.5")
	f := &seller{foe: &foe{a: a, b: b, c: c, namespace: a.tenant(b)}, peer: identityOf(t, b, a)}
	f.untilServed("shop", "that is 10.244.1.5", f.addrAtA("10.244.1.5"))
	a.waitCondition(b, isthmus.ConditionServicesShared, metav1.ConditionTrue, isthmus.ReasonShared)
	b.waitCondition(a, isthmus.ConditionServicesShared, metav1.ConditionTrue, isthmus.ReasonShared)
	f.testExportWithoutService(t)
	b.killManager()

	for _, part := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"permissions of the manager", f.testManagersRights},
		{"names and metadata", f.testNamesAndMetadata},
		{"exports", f.testExports},
		{"as many exports as allowed", f.testBounds},
		{"wrong ages", f.testAge},
		{"flapping endpoint", f.testFlapping},
		{"repeated deletion and creation", f.testReplacement},
		{"foreign objects", f.testObjectsOfOthers},
	} {
		t.Run(part.name, func(t *testing.T) {
			reportTo(t, a, b)
			part.run(t)
			f.checkHarmless()
		})
		if t.Failed() {
			return
		}
	}
}

// serve creates a Service with one port in namespace prod, its endpoints, and a ServiceExport.
func serve(s *site, name string, addresses ...string) {
	s.t.Helper()
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "prod", Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080))}},
	}
	for _, address := range addresses {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{address}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}})
	}
	for _, o := range []client.Object{
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}},
		slice, &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}},
	} {
		if err := s.client.Create(s.t.Context(), o); err != nil {
			s.t.Fatalf("%T %s of %s: %v", o, name, s.name, err)
		}
	}
}

// A seller is a foe that exports services.
type seller struct {
	*foe
	peer client.Client // client of a's API server with b's identity
}

// addrAtA returns the address at a of a pod of b.
func (f *seller) addrAtA(address string) string {
	f.a.t.Helper()
	remote := f.a.peering(f.b).Status.Remote
	translationOf, ok := services.Remap{From: netip.MustParsePrefix(remote.PodCIDR), To: f.network()}.Map(netip.MustParseAddr(address))
	if !ok {
		f.a.t.Fatalf("%s is no pod of b, which has %s", address, remote.PodCIDR)
	}
	return translationOf.String()
}

// network returns the network of b's pods at a.
func (f *seller) network() netip.Prefix {
	f.a.t.Helper()
	seen := f.a.peering(f.b).Status.Remote.PodCIDRSeen
	if seen == f.b.podCIDR {
		f.a.t.Fatal("a has to see b's pods elsewhere than its own")
	}
	return netip.MustParsePrefix(seen)
}

// exported returns a service with one port and the given endpoints.
func exported(name string, addresses ...string) isthmus.ExportedService {
	s := isthmus.ExportedService{
		Namespace: "prod", Name: name, Since: isthmus.UTCTimeOf(time.Now()), Type: string(mcs.ClusterSetIP),
		Ports:   []isthmus.ExportedPort{{Name: "http", Protocol: "TCP", Port: 80}},
		Subsets: []isthmus.EndpointSubset{{Targets: []isthmus.TargetPort{{Name: "http", Port: 8080}}}},
	}
	for _, address := range addresses {
		s.Subsets[0].Endpoints = append(s.Subsets[0].Endpoints, isthmus.ExportedEndpoint{Address: address, Ready: true, Serving: true})
	}
	return s
}

func keyFor(s isthmus.ExportedService) services.Key {
	return services.Key{Namespace: s.Namespace, Name: s.Name}
}

// put writes the services of one object as b's manager would: with a POST, and later with PUTs.
func (f *seller) put(name string, all ...isthmus.ExportedService) error {
	f.a.t.Helper()
	for {
		o := &isthmus.PeerServices{}
		err := f.peer.Get(f.a.t.Context(), types.NamespacedName{Namespace: f.namespace, Name: name}, o)
		switch {
		case apierrors.IsNotFound(err):
			o.Namespace, o.Name, o.Spec.Services = f.namespace, name, all
			return f.peer.Create(f.a.t.Context(), o)
		case err != nil:
			return err
		}
		o.Spec.Services = all
		if err = f.peer.Update(f.a.t.Context(), o); !apierrors.IsConflict(err) { // conflicts with a's answers are normal
			return err
		}
	}
}

// offer exports one service, as the only one in its object.
func (f *seller) offer(s isthmus.ExportedService) error {
	f.a.t.Helper()
	return f.put(services.ShardOf(keyFor(s)), s)
}

// waitRefusal waits until a refuses a service, and returns a's answer.
func (f *seller) waitRefusal(shard string, key services.Key) (found isthmus.RefusedService) {
	f.a.t.Helper()
	f.a.eventually(fmt.Sprintf("a refusal of %v in %s", key, shard), func() (string, bool) {
		o := &isthmus.PeerServices{}
		f.a.get(types.NamespacedName{Namespace: f.namespace, Name: shard}, o)
		at := slices.IndexFunc(o.Status.Refused, func(r isthmus.RefusedService) bool { return r.Namespace == key.Namespace && r.Name == key.Name })
		if at >= 0 {
			found = o.Status.Refused[at]
		}
		return fmt.Sprintf("generation %d, %+v", o.Generation, o.Status), at >= 0 && o.Status.ObservedGeneration == o.Generation
	})
	return found
}

// servedEndpoints returns the ready endpoints of a service in namespace prod of a, and whether
// there is a ServiceImport.
func (f *seller) servedEndpoints(name string) (addresses []string, imported bool) {
	f.a.t.Helper()
	var list discoveryv1.EndpointSliceList
	f.a.list(&list, client.InNamespace("prod"), client.MatchingLabels{mcs.LabelServiceName: name})
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			if *e.Conditions.Ready {
				addresses = append(addresses, e.Addresses...)
			}
		}
	}
	slices.Sort(addresses)
	return addresses, f.a.get(types.NamespacedName{Namespace: "prod", Name: name}, &mcs.ServiceImport{})
}

// untilServed waits until a service in namespace prod of a has exactly these endpoints.
func (f *seller) untilServed(name, what string, want ...string) {
	f.a.t.Helper()
	slices.Sort(want)
	f.a.eventually(fmt.Sprintf("service %s: %s: %v", name, what, want), func() (string, bool) {
		have, imported := f.servedEndpoints(name)
		return fmt.Sprintf("imported: %v, with %v", imported, have), imported && slices.Equal(have, want)
	})
}

// waitGone waits until no object exists for a service in namespace prod of a.
func (f *seller) waitGone(name string) {
	f.a.t.Helper()
	f.a.eventually("an end of service "+name, func() (string, bool) {
		have, imported := f.servedEndpoints(name)
		derived := f.a.get(types.NamespacedName{Namespace: "prod", Name: services.DerivedName(services.Key{Namespace: "prod", Name: name})}, &corev1.Service{})
		return fmt.Sprintf("imported: %v, Service: %v, endpoints %v", imported, derived, have), !imported && !derived && len(have) == 0
	})
}

// checkHarmless fails the test unless all objects of a's manager are in namespace prod, none of its
// Services has a selector, and each endpoint is a pod of the cluster that exports it.
func (f *seller) checkHarmless() {
	f.a.t.Helper()
	var all corev1.ServiceList
	f.a.list(&all, client.HasLabels{isthmus.LabelService})
	for _, s := range all.Items {
		if s.Namespace != "prod" || s.Spec.Type != corev1.ServiceTypeClusterIP || len(s.Spec.Selector)+len(s.Spec.ExternalIPs) > 0 {
			f.a.t.Errorf("Service %s/%s: %+v", s.Namespace, s.Name, s.Spec)
		}
	}
	var slicesOf discoveryv1.EndpointSliceList
	f.a.list(&slicesOf, client.HasLabels{isthmus.LabelService})
	for _, slice := range slicesOf.Items {
		for _, e := range slice.Endpoints {
			addr := netip.MustParseAddr(e.Addresses[0])
			if of := slice.Labels[mcs.LabelSourceCluster]; slice.Namespace != "prod" || of == f.b.name && !f.network().Contains(addr) ||
				of == f.a.name && !prefix(f.a.podCIDR).Contains(addr) || of != f.a.name && of != f.b.name {
				f.a.t.Errorf("EndpointSlice %s/%s, of cluster %q, has %v", slice.Namespace, slice.Name, of, addr)
			}
		}
	}
	var imports mcs.ServiceImportList
	f.a.list(&imports)
	for _, i := range imports.Items {
		if i.Namespace != "prod" {
			f.a.t.Errorf("ServiceImport %s/%s", i.Namespace, i.Name)
		}
	}
}

// forbidden fails the test unless err means that an API server forbids the request.
func forbidden(t *testing.T, what string, err error) {
	t.Helper()
	if !apierrors.IsForbidden(err) {
		t.Errorf("%s: %v; want Forbidden", what, err)
	}
}

// testManagersRights uses the manager's token for requests that the manager never sends.
func (f *seller) testManagersRights(t *testing.T) {
	a := f.a
	config, err := clientcmd.BuildConfigFromFlags("", a.identity("isthmus-manager"))
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	c, err := client.New(config, client.Options{Scheme: kubetest.NewScheme()})
	if err != nil {
		t.Fatal(err)
	}
	ours := map[string]string{isthmus.LabelService: "x"}
	service := func(change func(*corev1.Service)) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "derived-x", Labels: ours}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
		change(s)
		return s
	}
	slice := func(change func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
		s := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "derived-x-1", Labels: map[string]string{
			isthmus.LabelService: "x", discoveryv1.LabelServiceName: "derived-x", discoveryv1.LabelManagedBy: services.ManagedBy,
		}}, AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.66"}}}}
		change(s)
		return s
	}
	for what, o := range map[string]client.Object{
		"a Service without our label":    service(func(s *corev1.Service) { s.Labels = nil }),
		"a Service of another name":      service(func(s *corev1.Service) { s.Name = "x" }),
		"a Service whose name is made":   service(func(s *corev1.Service) { s.Name, s.GenerateName = "", "x-" }),
		"a Service with a selector":      service(func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "x"} }),
		"a Service with external IPs":    service(func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.66"} }),
		"a Service of type LoadBalancer": service(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeLoadBalancer }),
		"a Service of type NodePort":     service(func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort }),
		"a Service of type ExternalName": service(func(s *corev1.Service) {
			s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "evil.example"}
		}),
		"a Service in kube-system": service(func(s *corev1.Service) { s.Namespace = metav1.NamespaceSystem }),
		"the Service of the IPAM": service(func(s *corev1.Service) {
			s.Namespace, s.Name, s.Spec.Selector = installed, "isthmus-ipam", map[string]string{"app": "x"}
		}),
		"an EndpointSlice without our label":  slice(func(s *discoveryv1.EndpointSlice) { delete(s.Labels, isthmus.LabelService) }),
		"an EndpointSlice of another name":    slice(func(s *discoveryv1.EndpointSlice) { s.Name = "own-2" }),
		"an EndpointSlice of another Service": slice(func(s *discoveryv1.EndpointSlice) { s.Labels[discoveryv1.LabelServiceName] = "own" }),
		"an EndpointSlice of no Service":      slice(func(s *discoveryv1.EndpointSlice) { delete(s.Labels, discoveryv1.LabelServiceName) }),
		"an EndpointSlice of another manager": slice(func(s *discoveryv1.EndpointSlice) {
			s.Labels[discoveryv1.LabelManagedBy] = "endpointslice-controller.k8s.io"
		}),
		"an EndpointSlice in kube-system": slice(func(s *discoveryv1.EndpointSlice) { s.Namespace = metav1.NamespaceSystem }),
		"an EndpointSlice for the gateway, with the name of the IPAM's": slice(func(s *discoveryv1.EndpointSlice) {
			s.Namespace, s.Name, s.Labels = installed, "isthmus-ipam", map[string]string{discoveryv1.LabelServiceName: "isthmus-gateway"}
		}),
	} {
		forbidden(t, what, c.Create(t.Context(), o))
	}

	// The manager may neither change foreign objects, nor change its own objects into forbidden
	// ones.
	serve(a, "own", "10.244.3.3")
	derived := types.NamespacedName{Namespace: "prod", Name: services.DerivedName(services.Key{Namespace: "prod", Name: "shop"})}
	var list discoveryv1.EndpointSliceList
	a.list(&list, client.InNamespace("prod"), client.MatchingLabels{mcs.LabelServiceName: "shop"})
	own := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "own"}}
	ownSlice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "own-1"}}
	shop := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: derived.Name}}
	shopSlice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: list.Items[0].Name}}
	for _, edit := range []struct {
		what string
		o    client.Object
		text string
	}{
		{"takes a Service over", own, `{"metadata":{"labels":{"isthmus.net/service":"own"}}}`},
		{"leads a Service elsewhere", own, `{"spec":{"externalIPs":["192.0.2.66"]}}`},
		{"takes an EndpointSlice over", ownSlice, `{"metadata":{"labels":{"isthmus.net/service":"own"}}}`},
		{"leads an EndpointSlice elsewhere", ownSlice, `{"endpoints":[{"addresses":["192.0.2.66"]}]}`},
		{"gives its own Service a selector", shop, `{"spec":{"selector":{"app":"x"}}}`},
		{"gives its own Service an address outside", shop, `{"spec":{"externalIPs":["192.0.2.66"]}}`},
		{"gives its own Service another type", shop, `{"spec":{"type":"LoadBalancer"}}`},
		{"takes the label off its own Service", shop, `{"metadata":{"labels":{"isthmus.net/service":null}}}`},
		{"makes its own EndpointSlice one of another Service", shopSlice, `{"metadata":{"labels":{"kubernetes.io/service-name":"own"}}}`},
		{"gives its own EndpointSlice another manager", shopSlice, `{"metadata":{"labels":{"endpointslice.kubernetes.io/managed-by":"x"}}}`},
		{"takes the label off its own EndpointSlice", shopSlice, `{"metadata":{"labels":{"isthmus.net/service":null}}}`},
	} {
		forbidden(t, edit.what, c.Patch(t.Context(), edit.o.DeepCopyObject().(client.Object), client.RawPatch(types.MergePatchType, []byte(edit.text))))
	}
	forbidden(t, "deletes a Service", c.Delete(t.Context(), own))
	forbidden(t, "deletes an EndpointSlice", c.Delete(t.Context(), ownSlice))
	for _, o := range []client.Object{&corev1.ConfigMap{}, &corev1.Secret{}} {
		o.SetNamespace("prod")
		o.SetName("x")
		forbidden(t, fmt.Sprintf("makes a %T", o), c.Create(t.Context(), o))
	}
	forbidden(t, "makes a ServiceExport", c.Create(t.Context(), &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "x"}}))
	f.untilServed("own", "our own alone", "10.244.3.3")
}

// edit changes an existing object with the peer's identity.
func (f *seller) edit(o *isthmus.PeerServices, change func(*isthmus.PeerServices)) error {
	for {
		if err := f.peer.Get(f.a.t.Context(), client.ObjectKeyFromObject(o), o); err != nil {
			return err
		}
		change(o)
		if err := f.peer.Update(f.a.t.Context(), o); !apierrors.IsConflict(err) { // conflicts with a's answers are normal
			return err
		}
	}
}

// testNamesAndMetadata writes objects that the policy isthmus-peer-services forbids.
func (f *seller) testNamesAndMetadata(t *testing.T) {
	ctx := t.Context()
	object := func(name string) *isthmus.PeerServices {
		return &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name}}
	}
	for i := range isthmus.PeerServicesShards {
		if err := f.put(fmt.Sprint(isthmus.PeerServicesPrefix, i)); err != nil {
			t.Errorf("services-%d: %v", i, err)
		}
	}
	for _, name := range []string{"services-16", "services--1", "services-00", "services-1a", "services-", "services", "x", "services-0.x"} {
		if err := f.peer.Create(ctx, object(name)); !apierrors.IsForbidden(err) && !apierrors.IsInvalid(err) {
			t.Errorf("PeerServices %q: %v; want a refusal", name, err)
		}
	}
	made := object("")
	made.GenerateName = isthmus.PeerServicesPrefix
	forbidden(t, "a name that is made", f.peer.Create(ctx, made))
	elsewhere := object("services-0")
	elsewhere.Namespace = f.a.tenant(f.c)
	forbidden(t, "PeerServices in the namespace of c", f.peer.Create(ctx, elsewhere))
	forbidden(t, "a read of those of all peers", f.peer.List(ctx, &isthmus.PeerServicesList{}))
	forbidden(t, "a deletion of all at once", f.peer.DeleteAllOf(ctx, object(""), client.InNamespace(f.namespace)))

	if err := f.peer.Delete(ctx, object("services-15")); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*isthmus.PeerServices){
		"a label":       func(o *isthmus.PeerServices) { o.Labels = map[string]string{"x": "y"} },
		"an annotation": func(o *isthmus.PeerServices) { o.Annotations = map[string]string{"x": strings.Repeat("y", 1<<17)} },
		"a finalizer":   func(o *isthmus.PeerServices) { o.Finalizers = []string{"example.com/x"} },
		"an owner": func(o *isthmus.PeerServices) {
			o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "x"}}
		},
	} {
		fresh := object("services-15")
		change(fresh)
		forbidden(t, what+" on a new one", f.peer.Create(ctx, fresh))
		forbidden(t, what+" on one that is there", f.edit(object("services-14"), change))
	}

	// Metadata that tools of a have added must stay, and must not block the peer's writes.
	there := object("services-14")
	text := `{"metadata":{"labels":{"of":"a"},"annotations":{"of":"a"},"finalizers":["example.com/a"],"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"x"}]}}`
	if err := f.a.client.Patch(ctx, there, client.RawPatch(types.MergePatchType, []byte(text))); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*isthmus.PeerServices){
		"removes a label":       func(o *isthmus.PeerServices) { o.Labels = nil },
		"removes an annotation": func(o *isthmus.PeerServices) { o.Annotations = nil },
		"removes a finalizer":   func(o *isthmus.PeerServices) { o.Finalizers = nil },
		"removes an owner":      func(o *isthmus.PeerServices) { o.OwnerReferences = nil },
	} {
		forbidden(t, what, f.edit(object("services-14"), change))
	}
	if err := f.put("services-14", isthmus.ExportedService{Namespace: "secret", Name: "x", Since: isthmus.UTCTimeOf(time.Now()), Type: "Headless"}); err != nil {
		t.Errorf("an honest write beside a's own labels: %v", err)
	}
	forbidden(t, "its status", f.peer.Status().Update(ctx, there.DeepCopy()))
	forbidden(t, "its status, by a patch", f.peer.Status().Patch(ctx, there.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(`{"status":{"refused":[]}}`))))
	written := object("services-15")
	written.Status.Refused = []isthmus.RefusedService{{Namespace: "prod", Name: "shop", Reason: "x"}}
	if err := f.peer.Create(ctx, written); err != nil || len(written.Status.Refused) > 0 {
		t.Errorf("a status beside the spec: %v, %+v", err, written.Status)
	}
	if err := f.a.client.Patch(ctx, there, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":null,"annotations":null,"finalizers":null,"ownerReferences":null}}`))); err != nil {
		t.Fatal(err)
	}
}

// testExports exports services with one fault each.
func (f *seller) testExports(t *testing.T) {
	type service = isthmus.ExportedService
	address := func(text string) func(*service) {
		return func(s *service) { s.Subsets[0].Endpoints[0].Address = text }
	}
	namespace := func(name string) func(*service) { return func(s *service) { s.Namespace = name } }
	port := func(change func(*isthmus.ExportedPort)) func(*service) {
		return func(s *service) { change(&s.Ports[0]) }
	}
	label := func(key, value string) func(*service) {
		return func(s *service) { s.Labels = map[string]isthmus.MetadataValue{key: isthmus.MetadataValue(value)} }
	}
	const invalid, foreign, metadata = services.RefusedInvalid, services.RefusedAddress, services.RefusedMetadata
	table := []string{"# input, what refuses it (form: the API server; meaning: the manager), reason, message"}
	for i, test := range []struct {
		name   string
		reason string // expected reason of the refusal, and then no faulty endpoint may be served; "form": the API server refuses; empty: accepted
		change func(*service)
	}{
		{"an address with a prefix, 0.0.0.0/0", "form", address("0.0.0.0/0")},
		{"an address with a prefix, 10.244.0.9/32", "form", address("10.244.0.9/32")},
		{"an address with a prefix, ::/0", "form", address("::/0")},
		{"a pod of b as IPv4 in IPv6, with dots", "form", address("::ffff:10.244.0.9")},
		{"an address with a zone", "form", address("fe80::1%eth0")},
		{"a name for an address", "form", address("evil.example")},
		{"two lines for an address", "form", address("10.244.0.9\n")},
		{"no address", "form", address("")},
		{"a pod of b as IPv4 in IPv6", foreign, address("::ffff:af4:9")},
		{"an address with leading zeros", foreign, address("10.244.0.09")},
		{"an address that is none", foreign, address("10.244.0.999")},
		{"an address of another family", foreign, address("fd00::1")},
		{"an address of IPv6 that is none", foreign, address("1:2:3")},
		{"a mapped address of ours", foreign, func(s *service) { s.Subsets[0].Endpoints[0].Address = f.external(9) }},
		{"a pod of b as a sees it", foreign, func(s *service) { s.Subsets[0].Endpoints[0].Address = f.addrAtA("10.244.0.9") }},
		{"a node of ours", foreign, address("198.51.100.10")},
		{"our gateway", foreign, address("203.0.113.1")},
		{"our API server's Service", foreign, address("10.96.0.1")},
		{"a pod of c", foreign, address("10.160.1.1")},
		{"a mapped address of c", foreign, address("10.161.1.1")},
		{"a host in the Internet", foreign, address("8.8.8.8")},
		{"the metadata service", foreign, address("169.254.169.254")},
		{"loopback", foreign, address("127.0.0.1")},
		{"loopback of IPv6", foreign, address("::1")},
		{"all hosts", foreign, address("255.255.255.255")},
		{"multicast", foreign, address("224.0.0.1")},
		{"0.0.0.0", foreign, address("0.0.0.0")},
		{"a pod of ours, which is one of b in its words", "", address("10.244.3.3")},

		{"a name with a dot", "form", func(s *service) { s.Name = "a.b" }},
		{"a name in capitals", "form", func(s *service) { s.Name = "Shop" }},
		{"a name of 64 characters", "form", func(s *service) { s.Name = strings.Repeat("a", 64) }},
		{"a name that ends in a dash", "form", func(s *service) { s.Name = "a-" }},
		{"a name that begins with a wildcard", "form", func(s *service) { s.Name = "*" }},
		{"no name", "form", func(s *service) { s.Name = "" }},
		{"a namespace with a slash", "form", namespace("../prod")},
		{"no namespace", "form", namespace("")},
		{"kube-system, to which a agreed", services.RefusedReserved, namespace(metav1.NamespaceSystem)},
		{"kube-public", services.RefusedReserved, namespace(metav1.NamespacePublic)},
		{"the namespace of Isthmus, to which a agreed", services.RefusedReserved, namespace(installed)},
		{"the tenant namespace of b, to which a agreed", services.RefusedReserved, namespace(f.namespace)},
		{"the tenant namespace of c", services.RefusedReserved, namespace(f.a.tenant(f.c))},
		{"a namespace to which a did not agree", services.RefusedConsent, namespace("secret")},
		{"a namespace that a does not have", services.RefusedNamespace, namespace("missing")},

		{"type ExternalName", "form", func(s *service) { s.Type = "ExternalName" }},
		{"no type", "form", func(s *service) { s.Type = "" }},
		{"port 0", "form", port(func(p *isthmus.ExportedPort) { p.Port = 0 })},
		{"port 65536", "form", port(func(p *isthmus.ExportedPort) { p.Port = 65536 })},
		{"a port with a dot in its name", "form", port(func(p *isthmus.ExportedPort) { p.Name = "a.b" })},
		{"protocol ICMP", "form", port(func(p *isthmus.ExportedPort) { p.Protocol = "ICMP" })},
		{"an appProtocol that is none", invalid, port(func(p *isthmus.ExportedPort) { p.AppProtocol = "a b" })},
		{"no ports", invalid, func(s *service) { s.Ports = nil }},
		{"two ports without names", invalid, func(s *service) {
			s.Ports = []isthmus.ExportedPort{{Protocol: "TCP", Port: 80}, {Protocol: "TCP", Port: 81}}
		}},
		{"two ports of one number", invalid, func(s *service) {
			s.Ports = append(s.Ports, isthmus.ExportedPort{Name: "b", Protocol: "TCP", Port: 80})
		}},
		{"65 ports", "form", func(s *service) {
			for i := range int32(64) {
				s.Ports = append(s.Ports, isthmus.ExportedPort{Name: fmt.Sprint("p", i), Protocol: "TCP", Port: 100 + i})
			}
		}},
		{"target port 0", "form", func(s *service) { s.Subsets[0].Targets[0].Port = 0 }},
		{"a target port twice", invalid, func(s *service) { s.Subsets[0].Targets = append(s.Subsets[0].Targets, s.Subsets[0].Targets[0]) }},
		{"9 subsets", "form", func(s *service) { s.Subsets = slices.Repeat(s.Subsets, 9) }},
		{"a hostname with a dot", "form", func(s *service) { s.Subsets[0].Endpoints[0].Hostname = "a.b" }},
		{"a zone that is no label's value", invalid, func(s *service) { s.Subsets[0].Endpoints[0].Zone = "a b" }},
		{"a session of two days", "form", func(s *service) { s.SessionAffinity, s.SessionAffinitySeconds = "ClientIP", 172800 }},
		{"an internalTrafficPolicy that is none", "form", func(s *service) { s.InternalTrafficPolicy = "x" }},
		{"a trafficDistribution that is none", "form", func(s *service) { s.TrafficDistribution = "x" }},
		{"our own label", metadata, label(isthmus.LabelService, "x")},
		{"a label that is none", metadata, label("a b", "x")},
		{"a label's value that is none", metadata, label("x", "\x00")},
		{"the label of who manages it", metadata, label("app.kubernetes.io/managed-by", "Helm")},
		{"the annotation that names the derived Service", metadata, func(s *service) {
			s.Annotations = map[string]isthmus.MetadataValue{services.AnnotationDerived: "kubernetes"}
		}},
		{"a label of 513 characters", "form", label("x", strings.Repeat("x", 513))},
		{"17 labels", "form", func(s *service) {
			s.Labels = make(map[string]isthmus.MetadataValue)
			for i := range 17 {
				s.Labels[fmt.Sprint("k", i)] = ""
			}
		}},
		{"the name of a derived Service", "", func(s *service) { s.Name = services.DerivedName(services.Key{Namespace: "prod", Name: "shop"}) }},
	} {
		s := exported(fmt.Sprint("case-", i), "10.244.0.9")
		test.change(&s)
		key := keyFor(s)
		shard := services.ShardOf(key)
		err := f.put(shard, s)
		switch {
		case test.reason == "form":
			if !apierrors.IsInvalid(err) {
				t.Errorf("%s: %v; want Invalid", test.name, err)
				continue
			}
			_, message, _ := strings.Cut(err.Error(), "is invalid: ")
			table = append(table, tableRow(test.name, "form", "Invalid", message))
			continue
		case err != nil:
			t.Errorf("%s: %v", test.name, err)
			continue
		case test.reason == "":
			f.untilServed(s.Name, test.name, f.addrAtA(s.Subsets[0].Endpoints[0].Address))
			table = append(table, tableRow(test.name, "taken", "-", ""))
		default:
			r := f.waitRefusal(shard, key)
			if r.Reason != test.reason {
				t.Errorf("%s: %+v; want %s", test.name, r, test.reason)
			}
			table = append(table, tableRow(test.name, "meaning", r.Reason, r.Message))
			switch test.reason {
			case foreign: // the Service exists without endpoints
				f.untilServed(s.Name, test.name)
			case metadata:
				f.untilServed(s.Name, test.name, f.addrAtA("10.244.0.9"))
				var i mcs.ServiceImport
				f.a.get(key, &i)
				if len(i.Labels) != 1 || i.Labels[isthmus.LabelService] != s.Name || len(i.Annotations) != 1 || i.Annotations[services.AnnotationDerived] != services.DerivedName(key) {
					t.Errorf("%s: labels %v, annotations %v", test.name, i.Labels, i.Annotations)
				}
			default:
				if f.a.get(key, &mcs.ServiceImport{}) {
					t.Errorf("%s: there is a ServiceImport", test.name)
				}
			}
		}
		f.checkHarmless()
		if err := f.put(shard); err != nil {
			t.Fatal(err)
		}
		if s.Namespace == "prod" {
			f.waitGone(s.Name)
		}
	}

	// A service's name determines its object, so that no service is in two objects.
	s := exported("astray", "10.244.0.9")
	wrong := isthmus.PeerServicesPrefix + "0"
	if services.ShardOf(keyFor(s)) == wrong {
		wrong = isthmus.PeerServicesPrefix + "1"
	}
	both := []isthmus.ExportedService{s, s}
	if err := f.put(services.ShardOf(keyFor(s)), both...); !apierrors.IsInvalid(err) {
		t.Errorf("a service twice in an object: %v; want Invalid", err)
	}
	if err := f.put(wrong, s); err != nil {
		t.Fatal(err)
	}
	r := f.waitRefusal(wrong, keyFor(s))
	if r.Reason != services.RefusedShard {
		t.Errorf("a service in the wrong object: %+v; want %s", r, services.RefusedShard)
	}
	table = append(table, tableRow("a service in the wrong object", "meaning", r.Reason, r.Message))
	if _, imported := f.servedEndpoints(s.Name); imported {
		t.Error("a service in the wrong object is served")
	}
	if err := f.put(wrong); err != nil {
		t.Fatal(err)
	}
	goldenTable(t, "testdata/hostile-services.txt", table)
}

// external returns an address of the ExternalCIDR of a, to which a maps endpoints.
func (f *seller) external(host byte) string {
	bytes := prefix(f.a.ipamStorage().ExternalCIDR).Addr().As4()
	bytes[3] = host
	return netip.AddrFrom4(bytes).String()
}

// testBounds exports more than a peer may export, and then exactly as much as it may.
func (f *seller) testBounds(t *testing.T) {
	addresses := func(n int) (all []string) {
		for i := range n {
			all = append(all, fmt.Sprintf("10.244.%d.%d", i/250, i%250))
		}
		return all
	}
	many := func(n int, namespace string) (all []isthmus.ExportedService) {
		for i := 0; len(all) < n; i++ {
			s := exported(fmt.Sprintf("s%062d", i))
			if s.Namespace = namespace; services.ShardOf(keyFor(s)) == "services-3" {
				all = append(all, s)
			}
		}
		return all
	}
	great := exported("great", addresses(2500)...)
	shard := services.ShardOf(keyFor(great))
	for what, all := range map[string][]isthmus.ExportedService{
		"20,001 endpoints":                {exported("great", addresses(20_001)...)},
		"2,501 endpoints of one service":  {exported("great", addresses(2501)...)},
		"2,501 endpoints of two services": {exported("a", addresses(1250)...), exported("b", addresses(1251)...)},
		"129 services":                    many(129, "prod"),
	} {
		if err := f.put(shard, all...); !apierrors.IsInvalid(err) && !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("%s: %v; want a refusal", what, err)
		}
	}
	if err := f.put(shard, great); err != nil {
		t.Fatalf("2,500 endpoints: %v", err)
	}
	f.a.eventually("2,500 endpoints", func() (string, bool) {
		have, _ := f.servedEndpoints("great")
		return fmt.Sprint(len(have)), len(have) == 2500
	})
	if took := f.change(); took > prompt {
		t.Errorf("a change of c took %v", took)
	}
	if err := f.put(shard); err != nil {
		t.Fatal(err)
	}
	f.waitGone("great")

	// In the worst case, an honest exporter has 128 services with long names and metadata, and a
	// refuses all of them. Even then the managedFields of both writers must stay within the limit
	// of the policy.
	all := many(128, "secret")
	for i := range all {
		s := &all[i]
		s.SessionAffinity, s.SessionAffinitySeconds, s.InternalTrafficPolicy, s.TrafficDistribution = "ClientIP", 60, "Cluster", "PreferClose"
		s.Labels, s.Annotations = make(map[string]isthmus.MetadataValue), make(map[string]isthmus.MetadataValue)
		for k := range 4 {
			s.Labels[fmt.Sprintf("app.kubernetes.io/label-%d", k)] = "value"
			s.Annotations[fmt.Sprintf("example.com/annotation-%d", k)] = "value"
		}
	}
	for round := range 2 {
		all[0].SessionAffinitySeconds++
		if err := f.put("services-3", all...); err != nil {
			t.Fatalf("128 services, round %d: %v", round, err)
		}
		f.waitRefusal("services-3", keyFor(all[127]))
	}
	o := &isthmus.PeerServices{}
	f.a.get(types.NamespacedName{Namespace: f.namespace, Name: "services-3"}, o)
	if len(o.Status.Refused) != 128 {
		t.Errorf("%d services are refused", len(o.Status.Refused))
	}
	if err := f.put("services-3"); err != nil {
		t.Errorf("the end of 128 services: %v", err)
	}
}

// testAge exports services with wrong times.
func (f *seller) testAge(t *testing.T) {
	serve(f.a, "till", "10.244.3.4")
	f.untilServed("till", "our own alone", "10.244.3.4")
	conflict := func(status metav1.ConditionStatus, names string) {
		t.Helper()
		f.a.eventually(fmt.Sprintf("Conflict=%s of our export, naming %q", status, names), func() (string, bool) {
			var e mcs.ServiceExport
			f.a.get(types.NamespacedName{Namespace: "prod", Name: "till"}, &e)
			c := meta.FindStatusCondition(e.Status.Conditions, string(mcs.ServiceExportConditionConflict))
			return fmt.Sprintf("%+v", c), c != nil && c.Status == status && strings.Contains(c.Message, names)
		})
	}
	conflict(metav1.ConditionFalse, "")
	affinity := func(want corev1.ServiceAffinity) {
		t.Helper()
		f.a.eventually("session affinity "+string(want), func() (string, bool) {
			var i mcs.ServiceImport
			f.a.get(types.NamespacedName{Namespace: "prod", Name: "till"}, &i)
			return string(i.Spec.SessionAffinity), i.Spec.SessionAffinity == want
		})
	}
	s := exported("till", "10.244.0.9")
	s.SessionAffinity = string(corev1.ServiceAffinityClientIP)
	both := []string{"10.244.3.4", f.addrAtA("10.244.0.9")}

	// A time in the future counts as now. So b's export is younger than ours, and ours determines
	// the Service.
	s.Since = "2100-01-01T00:00:00Z"
	if err := f.offer(s); err != nil {
		t.Fatal(err)
	}
	f.untilServed("till", "both clusters", both...)
	affinity(corev1.ServiceAffinityNone)
	if r := f.waitRefusal(services.ShardOf(keyFor(s)), keyFor(s)); r.Reason != string(mcs.ServiceExportReasonSessionAffinityConflict) {
		t.Errorf("refused: %+v", r)
	}
	conflict(metav1.ConditionTrue, "it differs in "+f.b.name)

	// The older export determines ports and affinity, even if its time is wrong. The condition of
	// our export must name the cluster of that export.
	s.Since = "1970-01-01T00:00:00Z"
	s.Ports[0].Port = 81
	if err := f.offer(s); err != nil {
		t.Fatal(err)
	}
	affinity(corev1.ServiceAffinityClientIP)
	conflict(metav1.ConditionTrue, "session affinity of cluster "+f.b.name)
	if err := f.put(services.ShardOf(keyFor(s))); err != nil {
		t.Fatal(err)
	}
	f.untilServed("till", "our own alone again", "10.244.3.4")
	affinity(corev1.ServiceAffinityNone)
	conflict(metav1.ConditionFalse, "")
}

// testExportWithoutService exports a name at b that has no Service and is not a valid label value.
func (f *seller) testExportWithoutService(t *testing.T) {
	long := &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "secret", Name: strings.Repeat("x", 64)}}
	if err := f.b.client.Create(t.Context(), long); err != nil {
		t.Fatal(err)
	}
	f.b.eventually("an answer to an export without a Service", func() (string, bool) {
		f.b.get(client.ObjectKeyFromObject(long), long)
		c := meta.FindStatusCondition(long.Status.Conditions, string(mcs.ServiceExportConditionValid))
		return fmt.Sprintf("%+v", c), c != nil && c.Reason == string(mcs.ServiceExportReasonNoService)
	})
	serve(f.b, "second", "10.244.1.6")
	f.untilServed("second", "beside an export without a Service", f.addrAtA("10.244.1.6"))
}

// testObjectsOfOthers creates foreign objects with the names of a's own objects, and some with a's
// labels.
func (f *seller) testObjectsOfOthers(t *testing.T) {
	ours := map[string]string{isthmus.LabelService: "cart", discoveryv1.LabelManagedBy: services.ManagedBy}
	alike := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "mine", Labels: ours}, AddressType: discoveryv1.AddressTypeIPv4}
	if err := f.a.client.Create(t.Context(), alike); err != nil {
		t.Fatal(err)
	}
	s := exported("cart", "10.244.0.9")
	offer := func() {
		t.Helper()
		if err := f.offer(s); err != nil {
			t.Fatal(err)
		}
	}
	offer()
	f.untilServed("cart", "beside a slice with our labels", f.addrAtA("10.244.0.9"))

	label := func(o client.Object, value string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, isthmus.LabelService, value)
		if err := f.a.client.Patch(t.Context(), o, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			t.Fatal(err)
		}
	}
	derived := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: services.DerivedName(keyFor(s))}}
	label(derived, `"other"`)
	if r := f.waitRefusal(services.ShardOf(keyFor(s)), keyFor(s)); r.Reason != services.RefusedForeign || !strings.Contains(r.Message, derived.Name) {
		t.Errorf("a Service of another name: %+v", r)
	}
	label(derived, `"cart"`)
	s.Subsets[0].Endpoints[0].Address = "10.244.0.10"
	offer()
	f.untilServed("cart", "once its Service is ours again", f.addrAtA("10.244.0.10"))

	var list discoveryv1.EndpointSliceList
	f.a.list(&list, client.InNamespace("prod"), client.MatchingLabels{mcs.LabelServiceName: "cart"})
	label(&list.Items[0], "null")
	if r := f.waitRefusal(services.ShardOf(keyFor(s)), keyFor(s)); r.Reason != services.RefusedForeign || !strings.Contains(r.Message, list.Items[0].Name) {
		t.Errorf("a slice without our label: %+v", r)
	}
	before, began := f.writes(), time.Now()
	time.Sleep(2 * time.Second)
	if n := f.writes() - before; n > 2+leases(began) {
		t.Errorf("%d writes in 2 s while a slice is in the way", n)
	}
	if err := f.a.client.Delete(t.Context(), &list.Items[0]); err != nil {
		t.Fatal(err)
	}
	s.Subsets[0].Endpoints[0].Zone = "z" // causes an event, by which the manager notices the deleted slice; the deletion itself causes none
	offer()
	f.untilServed("cart", "once the slice is gone", f.addrAtA("10.244.0.10"))
	for range 2 { // foreign labels stay, and cause no writes
		if err := f.a.client.Patch(t.Context(), derived, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"team":"blue"}}}`))); err != nil {
			t.Fatal(err)
		}
		s.Subsets[0].Endpoints[0].Zone += "z"
		offer()
	}
	f.a.eventually("the last zone", func() (string, bool) {
		f.a.list(&list, client.InNamespace("prod"), client.MatchingLabels{mcs.LabelServiceName: "cart"})
		return fmt.Sprint(list.Items), len(list.Items) == 1 && *list.Items[0].Endpoints[0].Zone == "zzz"
	})
	if f.a.get(client.ObjectKeyFromObject(derived), derived); derived.Labels["team"] != "blue" {
		t.Errorf("labels of the derived Service: %v", derived.Labels)
	}
	imported := &mcs.ServiceImport{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "cart"}}
	label(imported, "null") // makes the ServiceImport foreign, so the manager must delete all its objects that depend on it
	f.a.eventually("an end of what depends on the ServiceImport", func() (string, bool) {
		have, _ := f.servedEndpoints("cart")
		service := f.a.get(client.ObjectKeyFromObject(derived), &corev1.Service{})
		return fmt.Sprintf("%v, Service %v", have, service), len(have) == 0 && !service
	})
	if err := f.a.client.Delete(t.Context(), imported); err != nil {
		t.Fatal(err)
	}
	f.untilServed("cart", "once its name is free", f.addrAtA("10.244.0.10"))
	if err := f.put(services.ShardOf(keyFor(s))); err != nil {
		t.Fatal(err)
	}
	f.waitGone("cart")
	if err := f.a.client.Delete(t.Context(), alike); err != nil {
		t.Fatal(err)
	}

	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "none"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/services": resource.MustParse("0")}}}
	if err := f.a.client.Create(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	s = exported("sold-out", "10.244.0.9")
	offer()
	if r := f.waitRefusal(services.ShardOf(keyFor(s)), keyFor(s)); r.Reason != services.RefusedFailed {
		t.Errorf("a service beyond the quota: %+v", r)
	}
	if err := f.a.client.Delete(t.Context(), quota); err != nil {
		t.Fatal(err)
	}
	f.untilServed("sold-out", "without the quota", f.addrAtA("10.244.0.9"))
	if err := f.put(services.ShardOf(keyFor(s))); err != nil {
		t.Fatal(err)
	}
	f.waitGone("sold-out")
	f.testTimes(t)
}

// testTimes writes times that managers cannot parse. A single such object would make each list
// unreadable.
func (f *seller) testTimes(t *testing.T) {
	export := &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: "secret", Name: "clock"}}
	if err := f.a.client.Create(t.Context(), export); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{"2026-01-01t00:00:00z", "2026-01-01T00:00:00+99:99", "2026-01-01T00:00:00Z"} {
		patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"X","status":"True","reason":"R","message":"","lastTransitionTime":%q}]}}`, at)
		err := f.a.client.Status().Patch(t.Context(), export.DeepCopy(), client.RawPatch(types.MergePatchType, []byte(patch)))
		if fine := at == "2026-01-01T00:00:00Z"; fine && err != nil || !fine && !apierrors.IsInvalid(err) {
			t.Errorf("%s: %v", at, err)
		}
	}
	if err := f.a.client.Delete(t.Context(), export); err != nil {
		t.Fatal(err)
	}
}

// testFlapping changes the readiness of an endpoint as often as the API server accepts it.
func (f *seller) testFlapping(t *testing.T) {
	duration := 3 * time.Second
	if *long {
		duration = 20 * time.Second
	}
	s := exported("flag", "10.244.0.9", "10.244.0.10")
	if err := f.offer(s); err != nil {
		t.Fatal(err)
	}
	f.untilServed("flag", "at the beginning", f.addrAtA("10.244.0.9"), f.addrAtA("10.244.0.10"))
	before, events, updates := f.writes(), f.events(), 0
	began := time.Now()
	for ; time.Since(began) < duration; updates++ {
		s.Subsets[0].Endpoints[0].Ready = updates%2 == 1
		if err := f.offer(s); err != nil {
			t.Fatal(err)
		}
	}
	took := f.change()
	s.Subsets[0].Endpoints[0].Ready = false
	if err := f.offer(s); err != nil {
		t.Fatal(err)
	}
	f.untilServed("flag", "at the end", f.addrAtA("10.244.0.10"))
	done := f.writes() - before
	t.Logf("%d updates in %v: %d writes of the manager; a change of c is applied after %v", updates, time.Since(began).Round(time.Millisecond), done, took)
	// Each update causes one write of the slice and one of the status. c's change causes some more.
	if most := 2*updates + 20 + leases(began); done > most {
		t.Errorf("%d writes; want at most %d", done, most)
	}
	if took > prompt {
		t.Errorf("a change of c took %v", took)
	}
	if n := f.events() - events; n > 10 {
		t.Errorf("%d new Events", n)
	}
	f.checkQuiet()
	if err := f.put(services.ShardOf(keyFor(s))); err != nil {
		t.Fatal(err)
	}
	f.waitGone("flag")
}

// testReplacement repeatedly deletes an export, and creates a different one.
func (f *seller) testReplacement(t *testing.T) {
	s := exported("ghost")
	name := services.ShardOf(keyFor(s))
	var last string
	for i := range 15 {
		last = fmt.Sprintf("10.244.9.%d", i)
		s = exported("ghost", last)
		s.Type = []string{string(mcs.ClusterSetIP), string(mcs.Headless)}[i%2]
		if err := f.put(name, s); err != nil {
			t.Fatal(err)
		}
		if i == 14 {
			break
		}
		o := &isthmus.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: f.namespace, Name: name}}
		if err := f.peer.Delete(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	f.untilServed("ghost", "the last one", f.addrAtA(last))
	f.a.eventually("its addresses", func() (string, bool) {
		var i mcs.ServiceImport
		var derived corev1.Service
		f.a.get(keyFor(s), &i)
		f.a.get(types.NamespacedName{Namespace: "prod", Name: services.DerivedName(keyFor(s))}, &derived)
		return fmt.Sprintf("%+v, %+v", i.Spec, derived.Spec), i.Spec.Type == mcs.ClusterSetIP && len(i.Spec.IPs) > 0 && slices.Equal(i.Spec.IPs, derived.Spec.ClusterIPs)
	})
	f.checkQuiet()
	if err := f.put(name); err != nil {
		t.Fatal(err)
	}
	f.waitGone("ghost")
	f.a.waitReady(f.b)
}

// If a cluster does not share services, its peers have no permission to write PeerServices. Even so
// the peering must become Ready. As soon as Isthmus is installed with services there, the clusters
// must share services.
func TestPeeringIsReadyIfThePeerDoesNotShareServices(t *testing.T) {
	t.Parallel()
	sites := planSites(t, "10.244.0.0/16", "10.128.0.0/14")
	a, b := sites[0], sites[1]
	a.services = true
	startSites(t, sites)
	for _, s := range sites {
		if err := s.client.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}); err != nil {
			t.Fatal(err)
		}
	}
	a.startManager("--services")
	b.startManager()
	peer(t, a, b)
	share := []string{"peer", "--kubeconfig", a.kubeconfig, "--remote-kubeconfig", b.kubeconfig, "--services", "prod"}
	if out, err := a.isthmus(share...); err == nil || !strings.Contains(out, "isthmus install") || !strings.Contains(out, "--services") {
		t.Errorf("isthmus peer --services: %v: %s; want an error that names isthmus install --services", err, out)
	}

	serve(a, "shop", "10.244.1.5")
	patch := client.RawPatch(types.MergePatchType, []byte(`{"spec":{"services":{"export":["prod"],"import":["prod"]}}}`))
	if err := a.client.Patch(t.Context(), a.peering(b), patch); err != nil {
		t.Fatal(err)
	}
	c := a.waitCondition(b, isthmus.ConditionServicesShared, metav1.ConditionFalse, isthmus.ReasonNotSupported)
	if !strings.Contains(c.Message, "isthmus install --services") {
		t.Errorf("nothing is advised: %s", c.Message)
	}
	a.eventually("an export that is not Ready", func() (string, bool) {
		var e mcs.ServiceExport
		a.get(types.NamespacedName{Namespace: "prod", Name: "shop"}, &e)
		ready := meta.FindStatusCondition(e.Status.Conditions, string(mcs.ServiceExportConditionReady))
		return fmt.Sprintf("%+v", ready), ready != nil && ready.Status == metav1.ConditionFalse && strings.Contains(ready.Message, "cluster b: ")
	})
	for _, s := range [][2]*site{{a, b}, {b, a}} {
		if ready := s[0].conditionOf(s[1], isthmus.ConditionReady); ready.Status != metav1.ConditionTrue {
			t.Errorf("the Peering of %s is not Ready: %s: %s", s[0].name, ready.Reason, ready.Message)
		}
	}

	if out, err := b.isthmus("install", "--without-workloads", "--services", "--kubeconfig", b.kubeconfig, "--cluster-name", b.name, "--cluster-id", b.id); err != nil {
		t.Fatalf("isthmus install --services: %v\n%s", err, out)
	}
	b.stopManager()
	b.startManager("--services")
	if out, err := a.isthmus(share...); err != nil {
		t.Fatalf("isthmus peer --services: %v\n%s", err, out)
	}
	f := &seller{foe: &foe{a: b, b: a}}
	f.untilServed("shop", "that of a", "10.244.1.5")
	a.waitCondition(b, isthmus.ConditionServicesShared, metav1.ConditionTrue, isthmus.ReasonShared)

	// If services are turned off at a, a must withdraw its exported services.
	if out, err := a.isthmus("install", "--without-workloads", "--services=false", "--kubeconfig", a.kubeconfig, "--cluster-name", a.name, "--cluster-id", a.id); err != nil {
		t.Fatalf("isthmus install --services=false: %v\n%s", err, out)
	}
	a.stopManager()
	a.startManager()
	b.eventually("nothing of a", func() (string, bool) {
		var offered isthmus.PeerServicesList
		var imports mcs.ServiceImportList
		b.list(&offered)
		b.list(&imports)
		return fmt.Sprintf("%+v, %+v", offered.Items, imports.Items), len(offered.Items)+len(imports.Items) == 0
	})
	b.waitReady(a)
}
