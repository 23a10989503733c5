package cluster

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// FieldManager is the name under which commands own fields in server-side apply.
const FieldManager = "isthmus"

const (
	// LabelManagedBy marks objects that Isthmus created. No other objects are deleted.
	LabelManagedBy = "app.kubernetes.io/managed-by"
	ManagedBy      = "isthmus"
)

// Outcome states how Apply changed an object.
type Outcome string

const (
	Created   Outcome = "created"
	Changed   Outcome = "changed"
	Unchanged Outcome = "unchanged"
)

// Apply applies the object server-side. Fields that the object does not set keep their values.
func (c *Cluster) Apply(ctx context.Context, o client.Object) (Outcome, error) {
	u, err := c.Unstructured(o)
	if err != nil {
		return "", err
	}
	before := &unstructured.Unstructured{}
	before.SetGroupVersionKind(u.GroupVersionKind())
	outcome := Changed
	if err := c.Client.Get(ctx, client.ObjectKeyFromObject(u), before); apierrors.IsNotFound(err) {
		outcome = Created
	} else if err != nil {
		return "", c.Explain(Describe(u), err)
	}
	err = c.Client.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner(FieldManager), client.ForceOwnership)
	if err != nil {
		return "", c.Explain("apply "+Describe(u), err)
	}
	if u.GetResourceVersion() == before.GetResourceVersion() {
		outcome = Unchanged
	}
	return outcome, nil
}

// Unstructured returns the object as an apply configuration, without the fields that the API
// server fills in.
func (c *Cluster) Unstructured(o client.Object) (*unstructured.Unstructured, error) {
	if u, ok := o.(*unstructured.Unstructured); ok {
		return u.DeepCopy(), nil
	}
	gvk, err := c.Client.GroupVersionKindFor(o)
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

// Describe returns the kind and name of an object: `Role liqo-tenant-b-1a2b3c/isthmus-peer`.
func Describe(u *unstructured.Unstructured) string {
	if u.GetNamespace() == "" {
		return u.GetKind() + " " + u.GetName()
	}
	return u.GetKind() + " " + u.GetNamespace() + "/" + u.GetName()
}

// Get reads an object. It returns nil if the object or its kind does not exist.
func (c *Cluster) Get(ctx context.Context, kind schema.GroupVersionKind, namespace, name string) (*unstructured.Unstructured, error) {
	u := &unstructured.Unstructured{}
	u.SetGroupVersionKind(kind)
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, u)
	if apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		return nil, nil
	}
	return u, c.Explain(kind.Kind+" "+name, err)
}
