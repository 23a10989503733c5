package manager

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func gatewayService(kind corev1.ServiceType, annotations map[string]string) corev1.Service {
	return corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus-system", Name: "isthmus-gateway", Annotations: annotations,
			Labels: map[string]string{v1alpha1.LabelGateway: "true"}},
		Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{
			{Name: "metrics", Port: 5872, NodePort: 30001, Protocol: corev1.ProtocolTCP},
			{Name: "wireguard", Port: 5871, NodePort: 30002, Protocol: corev1.ProtocolUDP},
		}},
	}
}

func TestEndpointOfTheGatewayService(t *testing.T) {
	balanced := func(ingress ...corev1.LoadBalancerIngress) corev1.Service {
		s := gatewayService(corev1.ServiceTypeLoadBalancer, nil)
		s.Status.LoadBalancer.Ingress = ingress
		return s
	}
	with := func(kind corev1.ServiceType, annotations ...string) corev1.Service {
		m := make(map[string]string)
		for i := 0; i < len(annotations); i += 2 {
			m[annotations[i]] = annotations[i+1]
		}
		return gatewayService(kind, m)
	}
	noPort := gatewayService(corev1.ServiceTypeNodePort, map[string]string{v1alpha1.AnnotationGatewayNodeIP: "192.0.2.7"})
	noPort.Spec.Ports = noPort.Spec.Ports[:1]
	noPort.Spec.Ports[0].Protocol = corev1.ProtocolTCP
	const ip, address, port = v1alpha1.AnnotationGatewayNodeIP, v1alpha1.AnnotationOverrideAddress, v1alpha1.AnnotationOverridePort
	for _, c := range []struct {
		name     string
		services []corev1.Service
		host     string
		port     uint16
		missing  string // part of it
	}{
		{"NodePort with the active gateway's node", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7")}, "192.0.2.7", 30002, ""},
		{"NodePort without active gateway", []corev1.Service{with(corev1.ServiceTypeNodePort)}, "", 30002, "no annotation " + ip},
		{"LoadBalancer with an address", []corev1.Service{balanced(corev1.LoadBalancerIngress{IP: "198.51.100.1", Hostname: "x"})}, "198.51.100.1", 5871, ""},
		{"LoadBalancer with a name", []corev1.Service{balanced(corev1.LoadBalancerIngress{Hostname: "lb.example.org"})}, "lb.example.org", 5871, ""},
		{"LoadBalancer that is not ready", []corev1.Service{balanced()}, "", 5871, "no address yet"},
		{"both overridden", []corev1.Service{with(corev1.ServiceTypeClusterIP, address, "vpn.example.org", port, "443")}, "vpn.example.org", 443, ""},
		{"one overridden, the other known", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "443")}, "192.0.2.7", 443, ""},
		{"one overridden, the other not known", []corev1.Service{with(corev1.ServiceTypeClusterIP, address, "192.0.2.7")}, "192.0.2.7", 0, "of type ClusterIP"},
		{"port that is none", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "65536")}, "192.0.2.7", 0, `annotation liqo.io/override-port is "65536"; want a UDP port`},
		{"port zero", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", port, "0")}, "192.0.2.7", 0, "want a UDP port"},
		{"address that is none", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7", address, " ")}, "", 30002, "annotation liqo.io/override-address is empty"},
		{"no UDP port", []corev1.Service{noPort}, "192.0.2.7", 0, "is not UDP"},
		{"no Service", nil, "", 0, "no Service with label net.liqo.io/gateway=true"},
		{"two Services", []corev1.Service{with(corev1.ServiceTypeNodePort, ip, "192.0.2.7"), with(corev1.ServiceTypeNodePort, ip, "192.0.2.8")}, "", 0, "want exactly one"},
	} {
		t.Run(c.name, func(t *testing.T) {
			host, port, missing := endpointOf("isthmus-system", c.services)
			if host != c.host || port != c.port || (missing == "") != (c.missing == "") || !strings.Contains(missing, c.missing) {
				t.Errorf("got %q, %d, %q", host, port, missing)
			}
		})
	}
}

func TestNodeAddressesAreSortedAndAreAddresses(t *testing.T) {
	node := func(addresses ...string) (n corev1.Node) {
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Address: a})
		}
		return n
	}
	got := nodeAddresses([]corev1.Node{node("192.0.2.9", "node-1"), node("192.0.2.10", "192.0.2.9", "2001:db8::1")})
	want := []netip.Addr{netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::1")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestKubeadmPodSubnets(t *testing.T) {
	for text, want := range map[string]string{
		"networking:\n  podSubnet: 10.244.0.0/16\n  serviceSubnet: 10.96.0.0/12\n": "[10.244.0.0/16]",
		"networking:\n  podSubnet: 10.1.0.0/18,fd00:1::/48\n":                      "[10.1.0.0/18 fd00:1::/48]",
		"networking: {}\n": "[]",
		"networking:\n  podSubnet: 10.1.0.0/18,nonsense\n": "[]",
		"]": "[]",
		"":  "[]",
	} {
		got := kubeadmPodSubnets(text)
		texts := make([]string, len(got))
		for i, p := range got {
			texts[i] = p.String()
		}
		if s := "[" + strings.Join(texts, " ") + "]"; s != want {
			t.Errorf("%q: got %s, want %s", text, s, want)
		}
	}
}
