package kube

import (
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

func TestActiveGatewayMustBeOnTheNodeNamedByTheService(t *testing.T) {
	gateways := []fabric.GatewayPod{
		{Addr: netip.MustParseAddr("10.64.1.254"), Host: netip.MustParseAddr("172.30.1.12")},
		{Addr: netip.MustParseAddr("172.30.1.13"), Host: netip.MustParseAddr("172.30.1.13"), HostNetwork: true},
	}
	for _, c := range []struct{ gateway, node, want string }{
		{"10.64.1.254", "172.30.1.12", "10.64.1.254"},
		{"10.64.1.254", "172.30.1.14", "invalid IP"}, // the Service names a host-network gateway that has taken over
		{"10.64.1.254", "", "invalid IP"},
		{"10.64.1.253", "172.30.1.12", "invalid IP"},
		{"172.30.1.13", "172.30.1.13", "invalid IP"}, // a host-network gateway cannot be named by its address
		{"", "", "invalid IP"},
	} {
		slim, err := slimService(&corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Annotations: map[string]string{isthmus.AnnotationGateways: c.gateway, v1alpha1.AnnotationGatewayNodeIP: c.node}}})
		if err != nil {
			t.Fatal(err)
		}
		s := *slim.(*corev1.Service)
		if got := activeGateway([]corev1.Service{s}, gateways); got.String() != c.want {
			t.Errorf("%q on %q: %v, want %s", c.gateway, c.node, got, c.want)
		}
		if got := activeGateway([]corev1.Service{s, s}, gateways); got.IsValid() {
			t.Errorf("of two Services: %v", got)
		}
	}
}
