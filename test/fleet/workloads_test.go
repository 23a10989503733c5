package fleet

import (
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/fleet"
)

// wantGateways creates a gateway Deployment with the given number of replicas, which no
// controller acts on. A negative number deletes it, because a fleet normally has no Deployment.
func wantGateways(t *testing.T, c *fleet.Cluster, replicas int32) {
	t.Helper()
	labels := map[string]string{"app.kubernetes.io/name": "gateway"}
	d := &appsv1.Deployment{ObjectMeta: object(fleet.Namespace, "isthmus-gateway"), Spec: appsv1.DeploymentSpec{
		Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "isthmus"}}}},
	}}
	d.Labels = labels
	if replicas < 0 {
		must(t, c.Client.Delete(t.Context(), d))
		return
	}
	must(t, c.Client.Create(t.Context(), d))
}

const pendingGateway = "gateway-pending"

// noStandby replaces the Pod of a's standby by a pending Pod. setStatus sets the pending Pod's
// status as the scheduler or a kubelet would.
func noStandby(t *testing.T, s *troubleSite, setStatus func(*corev1.PodStatus)) {
	t.Helper()
	s.selectFarNode(t)
	wantGateways(t, s.a, 2)
	must(t, s.a.DeleteGateway(t.Context(), s.node))
	p := &corev1.Pod{ObjectMeta: object(fleet.Namespace, pendingGateway), Spec: corev1.PodSpec{
		AutomountServiceAccountToken: new(bool), ServiceAccountName: "isthmus-gateway", Containers: []corev1.Container{{Name: "main", Image: "isthmus"}}}}
	p.Labels = map[string]string{"app.kubernetes.io/name": "gateway", "app.kubernetes.io/component": "networking"} // the labels that the Deployment sets
	must(t, s.a.Client.Create(t.Context(), p))
	p.Status.Phase = corev1.PodPending
	setStatus(&p.Status)
	must(t, s.a.Client.Status().Update(t.Context(), p))
}

func standbyAgain(t *testing.T, s *troubleSite) {
	t.Helper()
	must(t, s.a.Client.Delete(t.Context(), &corev1.Pod{ObjectMeta: object(fleet.Namespace, pendingGateway)}, client.GracePeriodSeconds(0)))
	wantGateways(t, s.a, -1)
	must(t, s.a.AddGateway(t.Context(), s.node))
}

// waitDeleted waits until a deleted object no longer exists.
func waitDeleted(t *testing.T, c *fleet.Cluster, o client.Object) {
	t.Helper()
	eventually(t, "the end of "+o.GetName(), func() error {
		if err := c.Client.Get(t.Context(), client.ObjectKeyFromObject(o), o); !apierrors.IsNotFound(err) {
			return fmt.Errorf("it is there: %w", err)
		}
		return nil
	})
}
