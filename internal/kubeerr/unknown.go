package kubeerr

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
)

// IgnoreUnknown returns err, or nil if err has one of three meanings: the object does not exist, we
// have no right to read it, or the API server does not serve its kind.
func IgnoreUnknown(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) || meta.IsNoMatchError(err) {
		return nil
	}
	return err
}
