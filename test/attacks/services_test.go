package attacks

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
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcs "sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	api "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/fleet"
	"github.com/isthmus-net/isthmus/manager/services"
)

// The clusters share the services of namespace shared, but not those of namespace closed.
const shared, closed = "shared", "closed"

// seller writes exports of cluster c to cluster a, with c's identity.
type seller struct {
	*site
	client client.Client
	pod    string // address under which cluster a reaches the pod behind b's service "shop"
}

// shareServices exports the service shop from cluster b and waits until cluster a has imported
// it.
func (s *site) shareServices(t *testing.T) *seller {
	t.Helper()
	for _, o := range []client.Object{
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "shop"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}},
		&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "shop-1", Labels: map[string]string{discoveryv1.LabelServiceName: "shop"}},
			AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(80))}},
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{s.podOfB().Addr.String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}}},
		&mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Name: "shop"}},
	} {
		o.SetNamespace(shared)
		must(t, s.b.Client.Create(t.Context(), o))
	}
	s.stopManagerOfC(t)
	f := &seller{site: s, client: clientFor(t, configAs(t, s.c, s.a), s.c.Client), pod: s.seen(t, s.a, s.b, s.podOfB().Addr).String()}
	f.waitServed(t, "shop", f.pod)
	s.after(func(t *testing.T) {
		must(t, client.IgnoreNotFound(s.b.Client.Delete(t.Context(), &mcs.ServiceExport{ObjectMeta: metav1.ObjectMeta{Namespace: shared, Name: "shop"}})))
		f.gone(t, "shop")
	})
	return f
}

// addrAtA returns the address under which cluster a reaches a pod of cluster c.
func (f *seller) addrAtA(t *testing.T, addr string) string {
	t.Helper()
	return f.seen(t, f.a, f.c, netip.MustParseAddr(addr)).String()
}

// service returns an exported service with one port and the given endpoints.
func service(name string, addresses ...string) api.ExportedService {
	s := api.ExportedService{
		Namespace: shared, Name: name, Since: api.UTCTimeOf(time.Now()), Type: string(mcs.ClusterSetIP),
		Ports:   []api.ExportedPort{{Name: "http", Protocol: "TCP", Port: 80}},
		Subsets: []api.EndpointSubset{{Targets: []api.TargetPort{{Name: "http", Port: 8080}}}},
	}
	for _, address := range addresses {
		s.Subsets[0].Endpoints = append(s.Subsets[0].Endpoints, api.ExportedEndpoint{Address: address, Ready: true, Serving: true})
	}
	return s
}

func shardOf(s api.ExportedService) string {
	return services.ShardOf(services.Key{Namespace: s.Namespace, Name: s.Name})
}

// put writes the services of one PeerServices object, as c's manager does.
func (f *seller) put(t *testing.T, name string, all ...api.ExportedService) error {
	t.Helper()
	for {
		o := &api.PeerServices{}
		switch err := f.client.Get(t.Context(), client.ObjectKey{Namespace: tenant(f.c), Name: name}, o); {
		case apierrors.IsNotFound(err):
			o.Namespace, o.Name, o.Spec.Services = tenant(f.c), name, all
			return f.client.Create(t.Context(), o)
		case err != nil:
			return err
		}
		o.Spec.Services = all
		if err := f.client.Update(t.Context(), o); !apierrors.IsConflict(err) { // a's manager may have written the status meanwhile
			return err
		}
	}
}

// export exports services, each in its own PeerServices object.
func (f *seller) export(t *testing.T, all ...api.ExportedService) {
	t.Helper()
	for _, s := range all {
		must(t, f.put(t, shardOf(s), s))
	}
}

// withdraw removes c's exports. It waits until cluster a has removed them, and b's service is
// unchanged.
func (f *seller) withdraw(t *testing.T, all ...api.ExportedService) {
	t.Helper()
	for _, s := range all {
		must(t, f.put(t, shardOf(s)))
	}
	for _, s := range all {
		if s.Namespace == shared && s.Name != "shop" {
			f.gone(t, s.Name)
		}
	}
	f.waitServed(t, "shop", f.pod)
}

// endpoints returns the ready endpoints of a service at cluster a, and whether there is a
// ServiceImport.
func (f *seller) endpoints(t *testing.T, name string) (addresses []string, imported bool) {
	t.Helper()
	var list discoveryv1.EndpointSliceList
	must(t, f.a.Client.List(t.Context(), &list, client.InNamespace(shared), client.MatchingLabels{mcs.LabelServiceName: name}))
	for _, slice := range list.Items {
		for _, e := range slice.Endpoints {
			if *e.Conditions.Ready {
				addresses = append(addresses, e.Addresses...)
			}
		}
	}
	slices.Sort(addresses)
	err := f.a.Client.Get(t.Context(), client.ObjectKey{Namespace: shared, Name: name}, &mcs.ServiceImport{})
	must(t, client.IgnoreNotFound(err))
	return addresses, err == nil
}

// waitServed waits until cluster a serves a service with exactly these endpoints.
func (f *seller) waitServed(t *testing.T, name string, want ...string) {
	t.Helper()
	slices.Sort(want)
	eventually(t, fmt.Sprintf("service %s with %v", name, want), func() error {
		if have, imported := f.endpoints(t, name); !imported || !slices.Equal(have, want) {
			return fmt.Errorf("imported: %v, with %v", imported, have)
		}
		return nil
	})
}

func (f *seller) gone(t *testing.T, name string) {
	t.Helper()
	eventually(t, "an end of service "+name, func() error {
		have, imported := f.endpoints(t, name)
		derived := client.ObjectKey{Namespace: shared, Name: services.DerivedName(services.Key{Namespace: shared, Name: name})}
		if err := f.a.Client.Get(t.Context(), derived, &corev1.Service{}); imported || len(have) > 0 || !apierrors.IsNotFound(err) {
			return fmt.Errorf("imported: %v, with %v; Service: %w", imported, have, err)
		}
		return nil
	})
}

// waitRefused waits until cluster a reports the reason why it does not serve a service.
func (f *seller) waitRefused(t *testing.T, s api.ExportedService, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s/%s refused: %s", s.Namespace, s.Name, reason), func() error {
		o := &api.PeerServices{}
		must(t, f.client.Get(t.Context(), client.ObjectKey{Namespace: tenant(f.c), Name: shardOf(s)}, o))
		for _, r := range o.Status.Refused {
			if r.Namespace == s.Namespace && r.Name == s.Name && r.Reason == reason {
				return nil
			}
		}
		return fmt.Errorf("%+v", o.Status)
	})
}

// checkInvalid checks that the API server rejects services.
func (f *seller) checkInvalid(t *testing.T, what string, all ...api.ExportedService) {
	t.Helper()
	if err := f.put(t, "services-0", all...); !apierrors.IsInvalid(err) && !apierrors.IsRequestEntityTooLargeError(err) {
		t.Errorf("%s: %v; want Invalid", what, err)
	}
}

func servicesChapter() chapter {
	f := &seller{}
	row := func(attempt, now string, run func(*testing.T)) attack {
		return attack{attacker: "c, accepted", attempt: attempt, now: now, run: func(t *testing.T, _ *site) {
			run(t)
			f.waitServed(t, "shop", f.pod)
		}}
	}
	return chapter{title: "What a peer exports as services", prepare: func(t *testing.T, s *site) { *f = *s.shareServices(t) }, attacks: []attack{
		row("endpoints at addresses of a's pods, nodes, gateway, Services and API server, of b's pods, of a metadata service, loopback, multicast",
			"ForeignAddress: no EndpointSlice has them, because an address must be in c's PodCIDR, and is translated into c's network at a", func(t *testing.T) {
				own := f.podOfC().Addr.String()
				s := service("stall", own, f.podOfA(0).Addr.String(), f.a.Nodes[f.gateway].Addr.String(), f.addr().String(), "10.96.0.1", f.a.Control.Addr.String(), f.pod,
					"169.254.169.254", "127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::1", "::ffff:ac14:1")
				f.export(t, s)
				f.waitRefused(t, s, services.RefusedAddress)
				f.waitServed(t, "stall", f.addrAtA(t, own))
				f.withdraw(t, s)
			}),
		row("invalid endpoint addresses: 0.0.0.0/0, ::/0, IPv4 in IPv6, a zone, a name", "the API server refuses them", func(t *testing.T) {
			for _, address := range []string{"0.0.0.0/0", "::/0", "10.244.0.0/16", "::ffff:172.20.0.11", "fe80::1%eth0", "evil.example", ""} {
				f.checkInvalid(t, address, service("stall", address))
			}
		}),
		row("a `since` that the format date-time allows and Go cannot parse, to break a's list of all PeerServices", "the API server refuses it", func(t *testing.T) {
			for _, since := range []string{"2026-01-01t00:00:00z", "2026-01-01T00:00:00+99:99", "2026-01-01T00:00:00x5Z", "2026-01-01T00:00:00ZTx"} {
				s := service("stall")
				s.Since = since
				f.checkInvalid(t, since, s)
			}
		}),
		row("invalid DNS labels as names: dots, capitals, wildcards, paths, 64 characters; also of namespaces, ports and hostnames", "the API server refuses them", func(t *testing.T) {
			for _, name := range []string{"a.b", "Shop", "*", "../shop", "-a", "a-", "a\n", strings.Repeat("a", 64), ""} {
				s := service(name)
				f.checkInvalid(t, name, s)
				s.Namespace, s.Name = name, "stall"
				f.checkInvalid(t, "namespace "+name, s)
				if s = service("stall", "172.20.0.11"); name != "" {
					s.Ports[0].Name = name
					f.checkInvalid(t, "port "+name, s)
					s = service("stall", "172.20.0.11")
					s.Subsets[0].Endpoints[0].Hostname = name
					f.checkInvalid(t, "hostname "+name, s)
				}
			}
		}),
		row("a service in kube-system, in Isthmus's namespace, in its own tenant namespace and that of b; in a namespace that a does not import from it",
			"NamespaceReserved, also if a agreed to it; NotImported", func(t *testing.T) {
				var all []api.ExportedService
				for namespace, reason := range map[string]string{
					metav1.NamespaceSystem: services.RefusedReserved, fleet.Namespace: services.RefusedReserved, tenant(f.c): services.RefusedReserved,
					tenant(f.b): services.RefusedReserved, closed: services.RefusedConsent,
				} {
					s := service("kube-dns", f.podOfC().Addr.String())
					s.Namespace = namespace
					f.export(t, s)
					f.waitRefused(t, s, reason)
					if err := f.a.Client.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: s.Name}, &mcs.ServiceImport{}); !apierrors.IsNotFound(err) {
						t.Errorf("namespace %s has a ServiceImport (%v)", namespace, err)
					}
					all = append(all, s)
				}
				f.withdraw(t, all...)
			}),
		row("20,001 endpoints, 129 services in an object, a service twice", "the API server refuses it: an object has 2,500 endpoints and 128 services", func(t *testing.T) {
			many := make([]string, 20_001)
			for i := range many {
				many[i] = fmt.Sprintf("172.20.%d.%d", i>>8, i&0xff)
			}
			f.checkInvalid(t, "20,001 endpoints", service("stall", many...))
			f.checkInvalid(t, "2,501 endpoints", service("stall", many[:1251]...), service("stand", many[:1250]...))
			f.checkInvalid(t, "twice", service("stall"), service("stall"))
			var all []api.ExportedService
			for i := range 129 {
				all = append(all, service(fmt.Sprint("stall-", i)))
			}
			f.checkInvalid(t, "129 services", all...)
		}),
		row("a 17th object, or one of another name; labels, annotations, finalizers and owners on its own objects; their status; objects of b",
			"forbidden, or refused by the admission policy: c may write the spec of 16 objects", f.beyondItsObjects),
		row("our labels, and the name of another Service, as exported labels and annotations of a service", "dropped: InvalidMetadata", func(t *testing.T) {
			own := f.podOfC().Addr.String()
			s := service("stall", own)
			s.Labels = map[string]api.MetadataValue{api.LabelService: "shop", "app.kubernetes.io/managed-by": "Helm", "multicluster.kubernetes.io/x": "y"}
			s.Annotations = map[string]api.MetadataValue{services.AnnotationDerived: "kubernetes"}
			f.export(t, s)
			f.waitRefused(t, s, services.RefusedMetadata)
			f.waitServed(t, "stall", f.addrAtA(t, own))
			var i mcs.ServiceImport
			must(t, f.a.Client.Get(t.Context(), client.ObjectKey{Namespace: shared, Name: "stall"}, &i))
			if len(i.Labels) != 1 || i.Labels[api.LabelService] != "stall" || len(i.Annotations) != 1 || i.Annotations[services.AnnotationDerived] == "kubernetes" {
				t.Errorf("labels %v, annotations %v", i.Labels, i.Annotations)
			}
			f.withdraw(t, s)
		}),
		row("exports shop, as b does, with a `since` in the future and another session affinity", "a future time counts as now, so b's export is older and decides; the status of c's object reports the conflict", func(t *testing.T) {
			s := f.rival()
			s.Since = "2100-01-01T00:00:00Z"
			f.export(t, s)
			f.waitServed(t, "shop", f.pod, f.addrAtA(t, f.podOfC().Addr.String()))
			f.waitRefused(t, s, string(mcs.ServiceExportReasonSessionAffinityConflict))
			f.waitAffinity(t, corev1.ServiceAffinityNone)
			f.withdraw(t, s)
		}),
		row("exports shop, as b does, with a `since` of 1970", "accepted, in a namespace that a imports from c: the older export decides ports and affinity; the status of both exports reports the conflict",
			func(t *testing.T) {
				s := f.rival()
				s.Since = "1970-01-01T00:00:00Z"
				f.export(t, s)
				f.waitAffinity(t, corev1.ServiceAffinityClientIP)
				f.waitServed(t, "shop", f.pod, f.addrAtA(t, f.podOfC().Addr.String()))
				eventually(t, "a conflict at b", func() error {
					var e mcs.ServiceExport
					must(t, f.b.Client.Get(t.Context(), client.ObjectKey{Namespace: shared, Name: "shop"}, &e))
					for _, c := range e.Status.Conditions {
						if c.Type == string(mcs.ServiceExportConditionConflict) && c.Status == metav1.ConditionTrue {
							return nil
						}
					}
					return fmt.Errorf("%+v", e.Status.Conditions)
				})
				f.withdraw(t, s)
				f.waitAffinity(t, corev1.ServiceAffinityNone)
			}),
		row("an endpoint that comes and goes as fast as the API server accepts it", "a follows; b's service and traffic with b are not affected", f.flap),
		row("deletes an export and brings it back with another type and other endpoints, as fast as the API server accepts it", "a follows; nothing of the previous exports is left",
			func(t *testing.T) {
				own, other := f.podOfC().Addr, f.c.Pods[0].Addr
				s := service("stall", own.String())
				for i := range 20 {
					s = service("stall", []string{other.String(), own.String()}[i%2])
					s.Type = []string{string(mcs.Headless), string(mcs.ClusterSetIP)}[i%2]
					must(t, f.put(t, shardOf(s), s))
					if i < 19 {
						must(t, f.client.Delete(t.Context(), &api.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: tenant(f.c), Name: shardOf(s)}}))
					}
				}
				f.waitServed(t, "stall", f.addrAtA(t, own.String()))
				f.withdraw(t, s)
			}),
	}}
}

// rival returns c's export of the same service that b exports.
func (f *seller) rival() api.ExportedService {
	s := service("shop", f.podOfC().Addr.String())
	s.SessionAffinity = string(corev1.ServiceAffinityClientIP)
	return s
}

// waitAffinity waits until shop has the given session affinity.
func (f *seller) waitAffinity(t *testing.T, want corev1.ServiceAffinity) {
	t.Helper()
	eventually(t, "session affinity "+string(want), func() error {
		var i mcs.ServiceImport
		must(t, f.a.Client.Get(t.Context(), client.ObjectKey{Namespace: shared, Name: "shop"}, &i))
		if i.Spec.SessionAffinity != want {
			return fmt.Errorf("it is %s", i.Spec.SessionAffinity)
		}
		return nil
	})
}

func (f *seller) beyondItsObjects(t *testing.T) {
	object := func(name string) *api.PeerServices {
		return &api.PeerServices{ObjectMeta: metav1.ObjectMeta{Namespace: tenant(f.c), Name: name}}
	}
	for i := range api.PeerServicesShards {
		must(t, f.put(t, fmt.Sprint(api.PeerServicesPrefix, i)))
	}
	for _, name := range []string{"services-16", "services-00", "services", "x"} {
		checkDenied(t, name, f.client.Create(t.Context(), object(name)))
	}
	of := object("services-0")
	of.Namespace = tenant(f.b)
	checkDenied(t, "in b's namespace", f.client.Create(t.Context(), of))
	for what, change := range map[string]func(*api.PeerServices){
		"a label":       func(o *api.PeerServices) { o.Labels = map[string]string{"x": "y"} },
		"an annotation": func(o *api.PeerServices) { o.Annotations = map[string]string{"x": strings.Repeat("y", 1<<17)} },
		"a finalizer":   func(o *api.PeerServices) { o.Finalizers = []string{"example.com/x"} },
		"an owner": func(o *api.PeerServices) {
			o.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "x", UID: "x"}}
		},
	} {
		o := object("services-15")
		must(t, f.client.Get(t.Context(), client.ObjectKeyFromObject(o), o))
		change(o)
		checkDenied(t, what, f.client.Update(t.Context(), o))
	}
	path := "/apis/isthmus.net/v1alpha1/namespaces/"
	checkForbidden(t, configAs(t, f.c, f.a), slices.Concat(patch(`{"status":{"refused":[]}}`, path+tenant(f.c)+"/peerservices/services-0/status", path+tenant(f.b)+"/peerservices/services-0"),
		get("/apis/isthmus.net/v1alpha1/peerservices", path+tenant(f.b)+"/peerservices", "/apis/multicluster.x-k8s.io/v1beta1/serviceimports",
			"/apis/discovery.k8s.io/v1/endpointslices"))...)
}

func (f *seller) flap(t *testing.T) {
	own, other := f.podOfC().Addr.String(), f.c.Pods[0].Addr.String()
	s := service("stall", own, other)
	n := 0
	for begin := time.Now(); time.Since(begin) < 2*time.Second; n++ {
		s.Subsets[0].Endpoints[0].Ready = n%2 == 0
		f.export(t, s)
	}
	t.Logf("%d changes", n)
	s.Subsets[0].Endpoints[0].Ready = true
	f.export(t, s)
	f.waitServed(t, "stall", f.addrAtA(t, own), f.addrAtA(t, other))
	f.withdraw(t, s)
}

// managerWritesServices checks, with the manager's token, that the manager can write only the
// Services that it should.
func managerWritesServices(t *testing.T, s *site) {
	_, c := s.componentOf(t, deploy.ManagerServiceAccount)
	ours := map[string]string{api.LabelService: "x"}
	ports := []corev1.ServicePort{{Port: 80}}
	for what, spec := range map[string]corev1.ServiceSpec{
		"a selector":          {Ports: ports, Selector: map[string]string{"app": "x"}},
		"external IPs":        {Ports: ports, ExternalIPs: []string{"172.30.1.10"}},
		"of a load balancer":  {Ports: ports, Type: corev1.ServiceTypeLoadBalancer},
		"of ports of nodes":   {Ports: ports, Type: corev1.ServiceTypeNodePort},
		"with another's name": {Type: corev1.ServiceTypeExternalName, ExternalName: "evil.example"},
	} {
		checkDenied(t, what, c.Create(t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: shared, Name: "derived-x", Labels: ours}, Spec: spec}))
	}
	for _, o := range []client.Object{
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "derived-x", Labels: ours}, Spec: corev1.ServiceSpec{Ports: ports}},
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: shared, Name: "derived-x"}, Spec: corev1.ServiceSpec{Ports: ports}},
		&discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "isthmus-ipam",
			Labels: map[string]string{discoveryv1.LabelServiceName: "isthmus-gateway"}}},
		&discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "derived-x",
			Labels: map[string]string{discoveryv1.LabelServiceName: "kubernetes", discoveryv1.LabelManagedBy: services.ManagedBy, api.LabelService: "x"}}},
	} {
		checkDenied(t, fmt.Sprintf("%T %s/%s", o, o.GetNamespace(), o.GetName()), c.Create(t.Context(), o))
	}
	gateway := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: fleet.Namespace, Name: "isthmus-gateway"}}
	checkDenied(t, "the gateway's Service", c.Patch(t.Context(), gateway, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"labels":{"isthmus.net/service":"x"}}}`))))
	checkDenied(t, "the end of the gateway's Service", c.Delete(t.Context(), gateway))
	checkDenied(t, "the end of the API server's EndpointSlice", c.Delete(t.Context(), &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}}))
}
