package manager

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

func TestGatewayAddrsReadsTheActiveGatewayFromItsService(t *testing.T) {
	service := func(annotations map[string]string) corev1.Service {
		return corev1.Service{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}
	}
	got := gatewayAddrs([]corev1.Service{
		service(nil),
		service(map[string]string{isthmus.AnnotationGateways: "10.244.0.9", v1alpha1.AnnotationGatewayNodeIP: "192.0.2.1"}),
		service(map[string]string{v1alpha1.AnnotationGatewayNodeIP: "none"}),
	})
	if want := []netip.Addr{netip.MustParseAddr("10.244.0.9"), netip.MustParseAddr("192.0.2.1")}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
