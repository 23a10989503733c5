package install

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// If the deletion of a definition is stuck, here by a finalizer, the definition is changed until it
// is deleted. The change makes the API server continue a deletion that it has overlooked.
func TestStuckDefinitionIsChangedUntilItIsDeleted(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	u := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "hurries.test.isthmus.net", "finalizers": []any{"test.isthmus.net/late"}},
		"spec": map[string]any{"group": "test.isthmus.net", "scope": "Cluster", "names": map[string]any{"plural": "hurries", "kind": "Hurry"},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}}},
	}}
	u.SetGroupVersionKind(DefinitionKind)
	must(t, c.Client.Create(t.Context(), u))
	if deleted, err := untilDeleted(t.Context(), c, u.GetName(), deletionTimeout); err != nil || deleted {
		t.Fatalf("gone before it is deleted: %v, %v", deleted, err)
	}
	must(t, c.Client.Delete(t.Context(), u))
	type end struct {
		deleted bool
		err     error
	}
	ended := make(chan end, 1)
	go func() {
		deleted, err := untilDeleted(t.Context(), c, u.GetName(), deletionTimeout)
		ended <- end{deleted, err}
	}()
	for deadline := time.Now().Add(clustertest.Patient); u.GetAnnotations()[annotationHurried] == ""; time.Sleep(50 * time.Millisecond) {
		if must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(u), u)); time.Now().After(deadline) {
			t.Fatalf("it is not changed: %v", u.Object["metadata"])
		}
		select {
		case e := <-ended:
			t.Fatalf("it does not wait: %+v", e)
		default:
		}
	}
	must(t, c.Client.Patch(t.Context(), u, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	if e := <-ended; !e.deleted || e.err != nil {
		t.Errorf("%+v", e)
	}
}

// A manager that has released one definition needs it again while others are still being
// deleted.
func TestADefinitionIsRecreatedWhileAnotherIsDeleted(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	var held []*unstructured.Unstructured
	for _, name := range []string{"first", "second"} {
		u := &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": name + "s.test.isthmus.net", "annotations": map[string]any{annotationSchema: "1"}},
			"spec": map[string]any{"group": "test.isthmus.net", "scope": "Cluster", "names": map[string]any{"plural": name + "s", "kind": name},
				"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true,
					"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}}},
		}}
		u.SetGroupVersionKind(DefinitionKind)
		held = append(held, u)
		going := u.DeepCopy()
		going.SetFinalizers([]string{"test.isthmus.net/late"})
		must(t, c.Client.Create(t.Context(), going))
		must(t, c.Client.Delete(t.Context(), going))
	}
	removeFinalizers := func(u *unstructured.Unstructured) {
		t.Helper()
		must(t, c.Client.Patch(t.Context(), u.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	}
	ended := make(chan error, 1)
	go func() { ended <- defineAgain(t.Context(), c, held, Options{Report: func(string) {}}) }()
	removeFinalizers(held[1])
	for deadline := time.Now().Add(clustertest.Patient); ; time.Sleep(50 * time.Millisecond) {
		have, err := c.Get(t.Context(), DefinitionKind, "", held[1].GetName())
		if must(t, err); have != nil && have.GetDeletionTimestamp() == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it is not made again")
		}
	}
	removeFinalizers(held[0])
	must(t, <-ended)
	for _, u := range held {
		must(t, c.Client.Delete(t.Context(), u))
	}
}

// Applying a definition that is being deleted does not stop its deletion.
func TestInstallWaitsForDeletedDefinitions(t *testing.T) {
	t.Parallel()
	c := clustertest.ConnectTo(t, cluster.Access{Kubeconfig: clustertest.Kubeconfigs.A})
	u := &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "goers.test.isthmus.net", "finalizers": []any{"test.isthmus.net/late"}},
		"spec": map[string]any{"group": "test.isthmus.net", "scope": "Cluster", "names": map[string]any{"plural": "goers", "kind": "Goer"},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object"}}}}},
	}}
	u.SetGroupVersionKind(DefinitionKind)
	another := &unstructured.Unstructured{}
	another.SetAPIVersion("v1")
	another.SetKind("Namespace")
	another.SetName("default")
	objects := []*unstructured.Unstructured{another, u.DeepCopy()}
	wait := func() error {
		_, err := untilNoneTerminates(t.Context(), c, objects, true)
		return err
	}
	must(t, wait()) // the definition does not exist
	must(t, c.Client.Create(t.Context(), u.DeepCopy()))
	must(t, wait()) // the definition exists and is not being deleted
	must(t, c.Client.Delete(t.Context(), u))
	ended := make(chan error, 1)
	go func() { ended <- wait() }()
	for u.GetAnnotations()[annotationHurried] == "" {
		must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(u), u))
		select {
		case err := <-ended:
			t.Fatalf("it does not wait: %v", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	must(t, c.Client.Patch(t.Context(), u, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":null}}`))))
	must(t, <-ended)
}

// The definitions were deleted after the components. Then only the manager of the new
// installation removes our finalizers.
func TestAnInstallationDoesNotWaitForFinalizersOfItsOwnManager(t *testing.T) {
	t.Parallel()
	c, _ := clustertest.NewCluster(t, "held")
	var reported clustertest.Lines
	options := Options{Identity: v1alpha1.ClusterIdentity{ClusterName: "held"}, Values: chart.Merge(clustertest.NodePortService(5871, 1), clustertest.WithoutWorkloads), Report: reported.Report}
	must(t, Run(t.Context(), c, options))
	peering := &isthmus.Peering{
		ObjectMeta: metav1.ObjectMeta{Name: "peer", Finalizers: []string{isthmus.FinalizerPeering, "test.isthmus.net/late"}},
		Spec: isthmus.PeeringSpec{Cluster: v1alpha1.ClusterIdentity{ClusterID: "peer", ClusterName: "peer"},
			TenantNamespace: isthmus.TenantNamespace{Local: "liqo-tenant-peer", Remote: "liqo-tenant-held"}},
	}
	must(t, c.Client.Create(t.Context(), peering))
	definition := &unstructured.Unstructured{}
	definition.SetGroupVersionKind(DefinitionKind)
	definition.SetName("peerings.isthmus.net")
	held := func() bool {
		t.Helper()
		have, err := c.Get(t.Context(), DefinitionKind, "", definition.GetName())
		must(t, err)
		ours, err := heldByUs(t.Context(), c, have)
		must(t, err)
		return ours
	}
	if held() {
		t.Error("it is not being deleted")
	}
	must(t, c.Client.Delete(t.Context(), definition))
	if held() {
		t.Error("somebody else's finalizer is there, too")
	}
	finalizers := func(text string) {
		t.Helper()
		must(t, c.Client.Patch(t.Context(), peering, client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"finalizers":`+text+`}}`))))
	}
	finalizers(`["` + isthmus.FinalizerPeering + `"]`)
	manager := &clustertest.Manager{Name: "held", Cluster: c}
	manager.Renew(t)
	if held() {
		t.Error("a manager is at work")
	}
	manager.Release(t)
	if !held() {
		t.Fatal("nobody but the manager to be installed can let it go")
	}
	options.Values = clustertest.WithServiceNetwork(t, c, chart.Values{"workloads": true, "networks": chart.Values{"podCIDR": "10.9.0.0/16"}})
	ended := make(chan error, 1)
	go func() { ended <- Run(t.Context(), c, options) }()
	for have := (*unstructured.Unstructured)(nil); have == nil; time.Sleep(50 * time.Millisecond) {
		var err error
		have, err = c.Get(t.Context(), appsv1.SchemeGroupVersion.WithKind("Deployment"), c.Namespace, "isthmus-manager")
		must(t, err)
		select {
		case err := <-ended:
			t.Fatalf("it ends without a manager: %v", err)
		default:
		}
	}
	finalizers("null") // as the manager does
	must(t, <-ended)
	must(t, c.Client.Get(t.Context(), client.ObjectKeyFromObject(definition), definition))
	if definition.GetDeletionTimestamp() != nil || !servesKind(t.Context(), c, definition) {
		t.Errorf("%v", definition.Object["metadata"])
	}
	if !reported.Has("CustomResourceDefinition peerings.isthmus.net created") {
		t.Error(reported)
	}
}
