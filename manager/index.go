package manager

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Indexes of the cache, by which a reconcile of one peer reads what belongs to
// that peer and nothing else.
const (
	indexClusterID       = "spec.cluster.clusterID"
	indexTenantNamespace = "spec.tenantNamespace.local"
)

func addIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	if err := indexer.IndexField(ctx, &isthmus.Peering{}, indexClusterID, func(o client.Object) []string {
		return []string{o.(*isthmus.Peering).Spec.Cluster.ClusterID}
	}); err != nil {
		return err
	}
	return indexer.IndexField(ctx, &isthmus.Peering{}, indexTenantNamespace, func(o client.Object) []string {
		return []string{o.(*isthmus.Peering).Spec.TenantNamespace.Local}
	})
}
