package verify

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/natengine"
)

// Mapped addresses outside the peer's agreed network are not probed, because they may belong to
// hosts outside of the peer.
func TestMappedAddressesOutsideThePeersNetworkAreSkipped(t *testing.T) {
	var all []v1alpha1.NatMapping
	for id, mappings := range map[string]v1alpha1.EndpointMap{
		"a": {"172.30.3.3": "10.249.0.7", "169.254.0.1": "10.249.0.1", "172.30.3.4": "169.254.169.254"},
		"c": {"172.30.3.5": "10.249.0.9"},
	} {
		all = append(all, v1alpha1.NatMapping{Spec: v1alpha1.NatMappingSpec{ClusterID: id, ClusterMappings: mappings}})
	}
	want := map[netip.Addr]netip.Addr{netip.MustParseAddr("10.249.0.7"): netip.MustParseAddr("172.30.3.3")}
	if got := mappedIn(all, "a", netip.MustParsePrefix("10.249.0.0/18")); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := mappedIn(all, "a", netip.Prefix{}); len(got) != 0 {
		t.Errorf("%v where nothing was agreed upon", got)
	}
}

func TestServicesWithEndpointsInTheOtherClusterAreFound(t *testing.T) {
	slice := func(service string, ready bool, addresses ...string) discoveryv1.EndpointSlice {
		return discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Labels: map[string]string{discoveryv1.LabelServiceName: service}},
			Ports: []discoveryv1.EndpointPort{
				{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}, {Name: new("dns"), Port: new(int32(53)), Protocol: new(corev1.ProtocolUDP)},
			},
			Endpoints: []discoveryv1.Endpoint{{Addresses: addresses, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		}
	}
	service := func(name, clusterIP string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Spec: corev1.ServiceSpec{
			ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}, {Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}},
		}}
	}
	pods := natengine.Remap{From: netip.MustParsePrefix("10.248.0.0/16"), To: netip.MustParsePrefix("10.244.0.0/16")}
	got := servicesIn([]discoveryv1.EndpointSlice{
		slice("web", true, "10.248.1.9", "10.244.3.3"), slice("web", true, "10.248.1.9"), slice("bare", true, "10.248.1.8"),
		slice("ours", true, "10.244.1.1"), slice("sick", false, "10.248.1.7"), slice("gone", true, "10.248.1.6"),
	}, []corev1.Service{service("web", "10.96.0.9"), service("bare", corev1.ClusterIPNone), service("ours", "10.96.0.8"), service("sick", "10.96.0.7")}, pods.Map)
	want := []Target{
		{"bare.shop.svc:8080", "Service shop/bare", "10.244.1.8:8080"}, {"web.shop.svc:80", "Service shop/web", "10.244.1.9:8080"},
		{"10.248.1.8:8080", "endpoint of Service shop/bare", "10.244.1.8:8080"}, {"10.248.1.9:8080", "endpoint of Service shop/web", "10.244.1.9:8080"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	only, err := ParseOnly([]string{"udp", "pod"})
	if err != nil {
		t.Fatal(err)
	}
	if checks := Targets(ends("a", 2), only, append(got, Target{Host: "10.9.0.1"})); len(checks) != 2 || checks[0].Target != "10.9.0.1" {
		t.Errorf("%+v", checks)
	}
}

func TestImportedServicesAreProbedByNameAndEndpoint(t *testing.T) {
	slice := func(service, derived string, ready bool, addresses ...string) discoveryv1.EndpointSlice {
		return discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Labels: map[string]string{isthmus.LabelService: service, discoveryv1.LabelServiceName: derived}},
			Ports: []discoveryv1.EndpointPort{
				{Name: new("dns"), Port: new(int32(53)), Protocol: new(corev1.ProtocolUDP)},
				{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}, {Name: new("admin"), Port: new(int32(9090)), Protocol: new(corev1.ProtocolTCP)},
			},
			Endpoints: []discoveryv1.Endpoint{{Addresses: addresses, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}},
		}
	}
	derived := func(name string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}, Spec: corev1.ServiceSpec{
			ClusterIP: "10.96.0.9", Ports: []corev1.ServicePort{{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP}, {Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		}}
	}
	pods := natengine.Remap{From: netip.MustParsePrefix("10.248.0.0/16"), To: netip.MustParsePrefix("10.244.0.0/16")}
	all := []discoveryv1.EndpointSlice{
		slice("shop", "derived-1", true, "10.248.1.9"), slice("shop", "derived-1", true, "10.248.1.8"), slice("shop", "derived-1", true, "10.250.1.1"), // the last slice is of another exporter
		slice("db", "derived-2", true, "10.248.1.7"), // a headless Service
		slice("sick", "derived-3", false, "10.248.1.6"), slice("theirs", "derived-4", true, "10.250.1.2"),
	}
	services := []corev1.Service{derived("derived-1"), derived("derived-3"), derived("derived-4")}
	names, ends := importsIn(all, services, pods.Map)
	if want := []Target{
		{"db.prod.svc.clusterset.local:8080", "imported Service prod/db", "10.244.1.7:8080"},
		{"shop.prod.svc.clusterset.local:80", "imported Service prod/shop", "10.244.1.8:8080"},
	}; !reflect.DeepEqual(names, want) {
		t.Errorf("names: got  %+v\nwant %+v", names, want)
	}
	if want := []Target{
		{"10.248.1.7:8080", "endpoint of imported Service prod/db", "10.244.1.7:8080"},
		{"10.248.1.8:8080", "endpoint of imported Service prod/shop", "10.244.1.8:8080"},
	}; !reflect.DeepEqual(ends, want) {
		t.Errorf("endpoints: got  %+v\nwant %+v", ends, want)
	}
	if more := servicesIn(all, services, pods.Map); len(more) != 0 {
		t.Errorf("by the names of derived Services: %+v", more)
	}
}

// A target that does not answer in its own cluster either is not counted as failed. A target that
// answers there is counted.
func TestTargetsThatFailInTheirOwnClusterAreNotCounted(t *testing.T) {
	home := func(r *http.Request) (*http.Response, error) {
		var requests []Request
		if err := json.NewDecoder(r.Body).Decode(&requests); err != nil {
			return nil, err
		}
		answers := make([]Answer, len(requests))
		for i, q := range requests {
			if q.Host == "172.30.3.4" {
				answers[i].Error = "no answer within 3s"
			}
		}
		text, err := json.Marshal(answers)
		return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(bytes.NewReader(text)), Request: r}, err
	}
	sites, _ := twoSites(healthyPod, home)
	from, lost := sites[0].pods[0].End, Answer{Error: "no answer within 3s"}
	results := []Result{
		{Check: Check{From: from, Target: "10.249.0.7", Protocol: ICMP, own: "172.30.3.3"}, Answer: lost},
		{Check: Check{From: from, Target: "10.249.0.8", Protocol: ICMP, own: "172.30.3.4"}, Answer: lost},
		{Check: Check{From: from, Target: "10.249.0.9", Protocol: ICMP}, Answer: lost},
	}
	control(t.Context(), sites[1], results)
	for i, unknown := range []bool{false, true, false} {
		r := results[i]
		if (r.Unknown != "") != unknown || (r.Error == "") != unknown || unknown && !strings.Contains(r.Unknown, "in its own cluster") {
			t.Errorf("%s: error %q, unknown %q", r.Target, r.Error, r.Unknown)
		}
	}
}
