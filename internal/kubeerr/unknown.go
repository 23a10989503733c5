package kubeerr

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
)

// IgnoreUnknown returns nil if err means that an object does not exist, that we have no right to
// read it, or that the API server does not serve its kind. Otherwise it returns err.
func IgnoreUnknown(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || meta.IsNoMatchError(err) {
		return nil
	}
	return err
}
