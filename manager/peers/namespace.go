package peers

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// NamespaceProblem explains why nothing can be created in a namespace, or returns "".
func NamespaceProblem(ctx context.Context, reader client.Reader, name string) (string, error) {
	var ns metav1.PartialObjectMetadata
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	switch err := reader.Get(ctx, types.NamespacedName{Name: name}, &ns); {
	case apierrors.IsNotFound(err):
		return fmt.Sprintf("tenant namespace %s: not found; `isthmus peer` creates it", name), nil
	case err != nil:
		return "", fmt.Errorf("namespace %s: %w", name, err)
	case !ns.DeletionTimestamp.IsZero():
		return fmt.Sprintf("tenant namespace %s: is being deleted; once it is gone, `isthmus peer` creates it again", name), nil
	}
	return "", nil
}

// NamespaceEnding reports whether a namespace is being deleted.
func NamespaceEnding(ctx context.Context, reader client.Reader, name string) (bool, error) {
	var ns metav1.PartialObjectMetadata
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	err := reader.Get(ctx, types.NamespacedName{Name: name}, &ns)
	return err == nil && !ns.DeletionTimestamp.IsZero(), client.IgnoreNotFound(err)
}
