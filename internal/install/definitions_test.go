package install

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

// A definition that somebody's finalizer keeps, as an API server does that has overlooked it, is changed until it is
// gone.
func TestADefinitionThatDoesNotGoIsHurried(t *testing.T) {
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
	if gone, err := untilGone(t.Context(), c, u.GetName()); err != nil || gone {
		t.Fatalf("gone before it is deleted: %v, %v", gone, err)
	}
	must(t, c.Client.Delete(t.Context(), u))
	type end struct {
		gone bool
		err  error
	}
	ended := make(chan end, 1)
	go func() {
		gone, err := untilGone(t.Context(), c, u.GetName())
		ended <- end{gone, err}
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
	if e := <-ended; !e.gone || e.err != nil {
		t.Errorf("%+v", e)
	}
}

// What is applied to a definition that is being deleted goes with it.
func TestAnInstallationWaitsForDefinitionsThatGo(t *testing.T) {
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
	must(t, untilNoneGoes(t.Context(), c, objects)) // it is not there
	must(t, c.Client.Create(t.Context(), u.DeepCopy()))
	must(t, untilNoneGoes(t.Context(), c, objects)) // it is there and stays
	must(t, c.Client.Delete(t.Context(), u))
	ended := make(chan error, 1)
	go func() { ended <- untilNoneGoes(t.Context(), c, objects) }()
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
