package peering

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// fieldManager is who we are to server-side apply.
const fieldManager = "isthmus"

// Outcome says what applying an object changed.
type Outcome string

const (
	Created   Outcome = "created"
	Changed   Outcome = "changed"
	Unchanged Outcome = "unchanged"
)

// apply makes the object be as it is given, server-side: fields that others set and we do not
// mention stay.
func (c *Cluster) apply(ctx context.Context, o client.Object) (Outcome, error) {
	u, err := c.unstructured(o)
	if err != nil {
		return "", err
	}
	before := &unstructured.Unstructured{}
	before.SetGroupVersionKind(u.GroupVersionKind())
	outcome := Changed
	if err := c.client.Get(ctx, client.ObjectKeyFromObject(u), before); apierrors.IsNotFound(err) {
		outcome = Created
	} else if err != nil {
		return "", c.explain(describe(u), err)
	}
	err = c.client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(fieldManager), client.ForceOwnership)
	if err != nil {
		return "", c.explain("apply "+describe(u), err)
	}
	if u.GetResourceVersion() == before.GetResourceVersion() {
		outcome = Unchanged
	}
	return outcome, nil
}

// unstructured returns the object as an apply configuration: without what the API server fills in.
func (c *Cluster) unstructured(o client.Object) (*unstructured.Unstructured, error) {
	if u, ok := o.(*unstructured.Unstructured); ok {
		return u.DeepCopy(), nil
	}
	gvk, err := c.client.GroupVersionKindFor(o)
	if err != nil {
		return nil, err
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(o)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", gvk.Kind, o.GetName(), err)
	}
	u := &unstructured.Unstructured{Object: content}
	u.SetGroupVersionKind(gvk)
	delete(u.Object, "status")
	return u, nil
}

// describe names an object: `Role liqo-tenant-b-1a2b3c/isthmus-peer`.
func describe(u *unstructured.Unstructured) string {
	if u.GetNamespace() == "" {
		return u.GetKind() + " " + u.GetName()
	}
	return u.GetKind() + " " + u.GetNamespace() + "/" + u.GetName()
}
