package manager

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/keyring"
	"github.com/isthmus-net/isthmus/manager/ipamstore"
	"github.com/isthmus-net/isthmus/manager/peers"
)

// prepare sets up everything that a manager needs even while another manager leads: indexes, caches
// and health checks.
func prepare(ctx context.Context, mgr ctrl.Manager, has optionalKinds) error {
	if err := peers.AddIndexes(ctx, mgr.GetFieldIndexer(), has.foreignClusters); err != nil {
		return fmt.Errorf("indexes: %w", installFirst(err))
	}
	kinds := []client.Object{
		&v1alpha1.NetworkConfig{}, &v1alpha1.TunnelEndpoint{}, &v1alpha1.NatMapping{}, ipamstore.Metadata(),
		&corev1.Service{}, &corev1.Secret{}, &corev1.Node{}, &isthmus.NodeNetworks{}, &isthmus.NetworkAllocation{},
	}
	if has.serviceCIDRs {
		kinds = append(kinds, &networkingv1.ServiceCIDR{})
	}
	for _, o := range kinds {
		if _, err := mgr.GetCache().GetInformer(ctx, o, cache.BlockUntilSynced(false)); err != nil {
			return fmt.Errorf("cache of %T: %w", o, err)
		}
	}
	return nil
}

// installFirst adds the remedy to an error about missing CRDs.
func installFirst(err error) error {
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: the CRDs have to be installed first, see `isthmus install`", err)
	}
	return err
}

// cacheOptions restricts the cache to the data that the manager reads: the gateway's Secrets and
// Services, the addresses of Nodes, and the names of Namespaces. It caches reports of nodes only
// from the installation namespace: in other namespaces, a node could write the report of another
// node.
func cacheOptions(namespace string) cache.Options {
	only := func(c cache.Config) cache.ByObject {
		return cache.ByObject{Namespaces: map[string]cache.Config{namespace: c}}
	}
	return cache.Options{
		DefaultTransform: cache.TransformStripManagedFields(),
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Secret{}:        only(cache.Config{FieldSelector: fields.OneTermEqualSelector("metadata.name", keyring.SecretName)}),
			&corev1.Service{}:       only(cache.Config{LabelSelector: labels.SelectorFromSet(labels.Set{v1alpha1.LabelGateway: "true"})}),
			&isthmus.NodeNetworks{}: only(cache.Config{}),
			&corev1.Node{}: {Transform: func(o any) (any, error) {
				if node, ok := o.(*corev1.Node); ok {
					node.ObjectMeta = metav1.ObjectMeta{Name: node.Name, UID: node.UID, ResourceVersion: node.ResourceVersion}
					node.Spec = corev1.NodeSpec{PodCIDRs: node.Spec.PodCIDRs}
					node.Status = corev1.NodeStatus{Addresses: node.Status.Addresses}
				}
				return o, nil
			}},
			&corev1.Namespace{}: {Transform: func(o any) (any, error) {
				if ns, ok := o.(*metav1.PartialObjectMetadata); ok {
					ns.Labels, ns.Annotations, ns.ManagedFields = nil, nil, nil
				}
				return o, nil
			}},
		},
	}
}
