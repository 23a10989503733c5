package peering

import (
	"fmt"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestAGatewayMayOnlyLabelItsOwnPod(t *testing.T) {
	t.Parallel()
	const home = deploy.Namespace
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.B})
	gateway, err := client.New(accountConfig(t, c, home, deploy.GatewayServiceAccount), client.Options{Scheme: c.Client.Scheme(), Mapper: c.Client.RESTMapper()})
	must(t, err)
	object := func(name string, labels map[string]string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: home, Name: name, Labels: labels, Annotations: map[string]string{"example.com/a": "1"}}
	}
	spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "isthmus:1"}}}
	ours := map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"}
	own := &corev1.Pod{ObjectMeta: object("gateway-1", ours), Spec: spec}
	manager := &corev1.Pod{ObjectMeta: object("manager-1", map[string]string{"app.kubernetes.io/name": "manager"}), Spec: spec}
	other := &corev1.Service{ObjectMeta: object("metrics", nil), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	for _, o := range []client.Object{
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: "default"}}, own, manager, other,
	} {
		must(t, client.IgnoreAlreadyExists(c.Client.Create(t.Context(), o)))
		t.Cleanup(func() { _ = c.Client.Delete(t.Context(), o) })
	}
	service := &corev1.Service{}
	must(t, c.Client.Get(t.Context(), client.ObjectKey{Namespace: home, Name: "isthmus-gateway"}, service))

	pod := func(patch string) func(*corev1.Pod) error {
		return func(p *corev1.Pod) error {
			return gateway.Patch(t.Context(), p.DeepCopy(), client.RawPatch("application/strategic-merge-patch+json", []byte(patch)))
		}
	}
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) { // new policies and permissions take a moment to become effective
		err := pod(`{"metadata":{"annotations":{"example.com/a":"2"}}}`)(own)
		if apierrors.IsForbidden(err) && pod(`{"metadata":{"labels":{"net.liqo.io/gateway":"standby"}}}`)(own) == nil {
			break
		}
		if time.Since(begin) > clustertest.Patient {
			t.Fatalf("an annotation of its Pod: %v", err)
		}
	}
	// The normal work of a gateway is allowed.
	must(t, pod(`{"metadata":{"labels":{"net.liqo.io/gateway":"active"}}}`)(own))
	must(t, pod(`{"metadata":{"labels":{"net.liqo.io/gateway":"standby"}}}`)(own))
	serve := func(s *corev1.Service, patch string) error {
		return gateway.Patch(t.Context(), s.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(patch)))
	}
	must(t, serve(service, `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"192.0.2.7"}}}`))
	must(t, serve(service, `{"metadata":{"annotations":{"isthmus.net/gateways":"10.244.1.9"}}}`))
	secret := func(name string, kind corev1.SecretType) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name,
			Annotations: map[string]string{corev1.ServiceAccountNameKey: deploy.ManagerServiceAccount}}, Type: kind}
	}
	must(t, gateway.Create(t.Context(), secret("wireguard-pubkey", ""), client.DryRunAll))
	lease := func(name string) error {
		return gateway.Create(t.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: home, Name: name}}, client.DryRunAll)
	}
	must(t, lease("isthmus-gateway"))

	image := `{"spec":{"containers":[{"name":"main","image":"evil:1"}]}}`
	for name, err := range map[string]error{
		"the manager's image":         pod(image)(manager),
		"its own image":               pod(image)(own),
		"a mark on the manager":       pod(`{"metadata":{"labels":{"net.liqo.io/gateway":"active"}}}`)(manager),
		"another mark":                pod(`{"metadata":{"labels":{"net.liqo.io/gateway":"true"}}}`)(own),
		"no mark":                     pod(`{"metadata":{"labels":{"net.liqo.io/gateway":null}}}`)(own),
		"another label":               pod(`{"metadata":{"labels":{"app":"x"}}}`)(own),
		"a label removed":             pod(`{"metadata":{"labels":{"app.kubernetes.io/name":null}}}`)(own),
		"a finalizer of a Pod":        pod(`{"metadata":{"finalizers":["example.com/x"]}}`)(own),
		"an owner of a Pod":           pod(`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"x","uid":"x"}]}}`)(own),
		"where its Service leads":     serve(service, `{"spec":{"selector":{"app":"x"}}}`),
		"an external address":         serve(service, `{"spec":{"externalIPs":["192.0.2.99"]}}`),
		"a label of its Service":      serve(service, `{"metadata":{"labels":{"a":"b"}}}`),
		"no address":                  serve(service, `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"x"}}}`),
		"no address of a gateway":     serve(service, `{"metadata":{"annotations":{"isthmus.net/gateways":"10.244.1.9,x"}}}`),
		"another annotation":          serve(service, `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"192.0.2.7","liqo.io/override-address":"192.0.2.99"}}}`),
		"another Service":             serve(other, `{"metadata":{"annotations":{"net.liqo.io/gatewayNodeIP":"192.0.2.7"}}}`),
		"another Secret":              gateway.Create(t.Context(), secret("mine", ""), client.DryRunAll),
		"a token of the manager":      gateway.Create(t.Context(), secret("wireguard-pubkey", corev1.SecretTypeServiceAccountToken), client.DryRunAll),
		"another Lease":               lease("isthmus-manager"),
		"a Lease that nobody expects": lease("x"),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var now corev1.Pod
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(manager), &now))
	if got := fmt.Sprint(now.Spec.Containers[0].Image, now.Labels); got != "isthmus:1"+fmt.Sprint(manager.Labels) {
		t.Errorf("the manager is %s", got)
	}
}
