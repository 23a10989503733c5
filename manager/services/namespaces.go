package services

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	net "github.com/isthmus-net/isthmus/apis/net/v1alpha1"
)

// namespaces implements Namespaces.
type namespaces struct {
	c        *Controller
	ctx      context.Context //nolint:containedctx // lives as long as one reconcile
	peerings []*isthmus.Peering
}

func (n namespaces) Reserved(name string) bool {
	ns, _ := n.get(name)
	return slices.Contains(systemNamespaces, name) || name == n.c.Namespace || ns.Labels[net.LabelTenantClusterID] != "" ||
		slices.ContainsFunc(n.peerings, func(p *isthmus.Peering) bool { return p.Spec.TenantNamespace.Local == name })
}

func (n namespaces) Exists(name string) bool {
	ns, ok := n.get(name)
	return ok && ns.DeletionTimestamp.IsZero()
}

func (n namespaces) get(name string) (ns metav1.PartialObjectMetadata, ok bool) {
	ns.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Namespace"))
	err := n.c.Cache.Get(n.ctx, client.ObjectKey{Name: name}, &ns)
	return ns, err == nil
}
