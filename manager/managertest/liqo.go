package managertest

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/manager/peers"
)

// InstallLiqo installs the CRD of ForeignClusters for one test.
func InstallLiqo(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs an API server")
	}
	kinds, err := discovery.NewDiscoveryClientForConfig(Config)
	if err != nil {
		t.Fatal(err)
	}
	if err := ApplyCRDs(t.Context(), Client, filepath.Join(Root(), "manager/testdata/liqo")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		crd := &apiextensions.CustomResourceDefinition{ObjectMeta: metav1.ObjectMeta{Name: "foreignclusters.discovery.liqo.io"}}
		if err := Client.Delete(context.Background(), crd); err != nil {
			t.Error(err)
		}
		for { // the next test needs an API server that no longer serves the kind
			deleted := apierrors.IsNotFound(Client.Get(context.Background(), client.ObjectKeyFromObject(crd), crd))
			if _, err := kinds.ServerResourcesForGroupVersion(peers.ForeignClusterVersion.String()); deleted && apierrors.IsNotFound(err) {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
}
