package kubeerr

import (
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// Forbidden reports whether an error means that the caller lacks a right.
func Forbidden(err error) bool {
	if err == nil {
		return false
	}
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return !slices.ContainsFunc(j.Unwrap(), func(e error) bool { return !Forbidden(e) })
	}
	return apierrors.IsForbidden(err)
}
