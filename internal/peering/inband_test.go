package peering

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/cluster"
)

// Without a CA, the identity would be sent to any API server that the system's CAs certify.
func TestAnAPIServerWithoutCertificatesIsRefused(t *testing.T) {
	for _, data := range []map[string]string{nil, {"ca.crt": ""}, {"ca.crt": "PEM"}} {
		published := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "isthmus", Name: isthmus.ConfigMapRootCA}, Data: data}
		c := &cluster.Cluster{Namespace: "isthmus", Client: fake.NewClientBuilder().WithObjects(published).Build()}
		if ca, err := ownAuthority(t.Context(), c); (err == nil) != (string(ca) == "PEM") || (err == nil) != (data["ca.crt"] != "") {
			t.Errorf("%v: %q, %v", data, ca, err)
		}
	}
}
