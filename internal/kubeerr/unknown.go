package kubeerr

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
)

// IgnoreUnknown returns nil for an object that does not exist, that we may not read, or whose kind
// the API server does not serve.
func IgnoreUnknown(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || meta.IsNoMatchError(err) {
		return nil
	}
	return err
}
