package kube

import (
	"context"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// An older CRD allows fewer routes in a report.
func TestReportRejectedByAnOlderCRDNamesTheRemedy(t *testing.T) {
	refusal := apierrors.NewInvalid(isthmus.GroupVersion.WithKind("NodeNetworks").GroupKind(), "n1",
		field.ErrorList{field.TooMany(field.NewPath("spec", "routes"), 40, 32)})
	r := &NodeReporter{namespace: "isthmus-system", node: "n1", api: interceptor.NewClient(nil, interceptor.Funcs{
		List: func(_ context.Context, _ client.WithWatch, list client.ObjectList, _ ...client.ListOption) error {
			list.(*metav1.PartialObjectMetadataList).Items = make([]metav1.PartialObjectMetadata, 1)
			return nil
		},
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return refusal
		},
	})}
	err := r.WriteNetworks(t.Context(), fabric.NodeNetworks{})
	if err == nil || !strings.Contains(err.Error(), "install the CRDs of this version") || !strings.Contains(err.Error(), "spec.routes: Too many: 40: must have at most 32 items") {
		t.Error(err)
	}
}
