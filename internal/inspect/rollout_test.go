package inspect

import (
	"strings"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
	"github.com/isthmus-net/isthmus/internal/health"
	"github.com/isthmus-net/isthmus/internal/peering"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// During a rolling upgrade of the managers, nobody holds their Lease for some seconds.
func TestAManagerIsNotReportedAsBrokenDuringARollout(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "rollout")
	_, err := peering.Peer(t.Context(), p.A, p.B, peering.PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	must(t, err)
	p.Managers[0].Release(t)
	labels := map[string]string{"app.kubernetes.io/name": "manager"}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: p.A.Namespace, Name: "isthmus-manager", Labels: labels},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "manager", Image: "isthmus"}}}}}}
	must(t, p.A.Client.Create(t.Context(), d))
	for _, tc := range []struct {
		name      string
		ago       time.Duration // time since the last step of the rollout
		available int32
		limited   bool
	}{
		{"it goes on", 0, 1, true},
		{"no Pod is available", 0, 0, false},
		{"it was long ago", time.Hour, 1, false},
	} {
		// The time is a minute in the future, because a busy machine may reach clusterHops much
		// later.
		step := metav1.NewTime(time.Now().Add(time.Minute - tc.ago))
		d.Status = appsv1.DeploymentStatus{Replicas: 2, UpdatedReplicas: 1, ReadyReplicas: tc.available, AvailableReplicas: tc.available,
			Conditions: []appsv1.DeploymentCondition{{Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue, LastUpdateTime: step, LastTransitionTime: step}}}
		must(t, p.A.Client.Status().Update(t.Context(), d))
		hops, _, _, err := clusterHops(t.Context(), p.A)
		must(t, err)
		var manager *health.Hop
		for i := range hops {
			if hops[i].Name == health.HopManager {
				manager = &hops[i]
			}
		}
		rolls := strings.Contains(manager.Text, "Deployment isthmus-manager is being rolled out, and 1 of its Pods are available")
		if limited := manager.State == health.Limited; limited != tc.limited || rolls != tc.limited {
			t.Errorf("%s: %s: %s", tc.name, manager.State, manager.Text)
		}
		s, err := StatusOf(t.Context(), p.A)
		must(t, err)
		for _, row := range s.Peerings {
			if row.Cluster == p.B.Identity && row.Ready != tc.limited {
				t.Errorf("%s: the Peering is ready: %v, %s", tc.name, row.Ready, row.Problem)
			}
		}
	}
}

func TestADeletedNamespaceIsReportedWithTheRepair(t *testing.T) {
	t.Parallel()
	p := clustertest.NewPair(t, "deleted")
	_, err := peering.Peer(t.Context(), p.A, p.B, peering.PeerOptions{Timeout: clustertest.Patient, Report: p.Report})
	must(t, err)
	must(t, p.A.Client.Delete(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: p.A.Namespace, Name: "who"}}))
	report := func() string {
		t.Helper()
		_, err := Diagnose(t.Context(), clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A, Namespace: p.A.Namespace}), nil, "")
		if err == nil {
			t.Fatal("no error")
		}
		return err.Error()
	}
	clustertest.Contains(t, report(), "identity of the cluster: run `isthmus install --context a --cluster-name NAME` with the same flags as before; then its ", " Peerings work again. To remove Isthmus instead, run `isthmus uninstall --context a --image IMAGE`")

	kept := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: p.A.Namespace, Name: "kept", Finalizers: []string{"test.isthmus.net/kept"}}}
	must(t, p.A.Client.Create(t.Context(), kept))
	must(t, p.A.Client.Delete(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: p.A.Namespace}}))
	clustertest.Contains(t, report(), "it is being deleted; once it is gone, run `isthmus install --context a")
	must(t, p.A.Client.Patch(t.Context(), kept, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))))
}
