package install

import (
	"os"
	"slices"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// The API server accepts the policy for `isthmus manager --ipam-plain`. By the rules of
// Kubernetes, the policy allows the intended clients on each port.
func TestTheNetworkPolicyOfAPlainIPAMAllowsVirtualKubelets(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../deploy/networkpolicy/ipam.yaml")
	must(t, err)
	var u unstructured.Unstructured
	must(t, yaml.Unmarshal(text, &u.Object))
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	must(t, c.Client.Create(t.Context(), &u, client.DryRunAll, client.FieldValidation("Strict")))

	var p networkingv1.NetworkPolicy
	must(t, yaml.UnmarshalStrict(text, &p))
	matches := func(s *metav1.LabelSelector, have map[string]string) bool {
		selector, err := metav1.LabelSelectorAsSelector(s)
		must(t, err)
		return selector.Matches(labels.Set(have))
	}
	admits := func(namespace, pod map[string]string, port int32) bool {
		return slices.ContainsFunc(p.Spec.Ingress, func(r networkingv1.NetworkPolicyIngressRule) bool {
			from := len(r.From) == 0 || slices.ContainsFunc(r.From, func(peer networkingv1.NetworkPolicyPeer) bool {
				return peer.IPBlock == nil && peer.NamespaceSelector != nil && peer.PodSelector != nil &&
					matches(peer.NamespaceSelector, namespace) && matches(peer.PodSelector, pod)
			})
			return from && slices.ContainsFunc(r.Ports, func(n networkingv1.NetworkPolicyPort) bool {
				last := n.Port.IntVal
				if n.EndPort != nil {
					last = *n.EndPort
				}
				return *n.Protocol == "TCP" && n.Port.IntVal <= port && port <= last
			})
		})
	}
	if !matches(&p.Spec.PodSelector, map[string]string{"app.kubernetes.io/name": "manager"}) || matches(&p.Spec.PodSelector, map[string]string{"app.kubernetes.io/name": "gateway"}) ||
		!slices.Equal(p.Spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}) {
		t.Errorf("it is about %+v, %v", p.Spec.PodSelector, p.Spec.PolicyTypes)
	}
	tenant, other := map[string]string{"discovery.liqo.io/tenant-namespace": "true"}, map[string]string{"kubernetes.io/metadata.name": "default"}
	kubelet := map[string]string{"app.kubernetes.io/name": "virtual-kubelet", "app.kubernetes.io/part-of": "liqo"}
	anybody := map[string]string{"app.kubernetes.io/name": "nginx"}
	for _, tc := range []struct {
		what           string
		namespace, pod map[string]string
		ipam           bool
	}{
		{"a virtual kubelet", tenant, kubelet, true},
		{"another pod beside it", tenant, anybody, false},
		{"a pod elsewhere that is labelled as one", other, kubelet, false},
		{"any pod", other, anybody, false},
	} {
		if got := admits(tc.namespace, tc.pod, 6000); got != tc.ipam {
			t.Errorf("%s comes to the IPAM: %v, want %v", tc.what, got, tc.ipam)
		}
		for _, port := range []int32{1, 5876, 5877, 5999, 6001, 65535} {
			if !admits(tc.namespace, tc.pod, port) {
				t.Errorf("%s does not come to port %d any more", tc.what, port)
			}
		}
	}
}
