package peers

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Names of the cache indexes that let a reconcile read only the objects of one peer. Peerings and
// ForeignClusters have the same indexes.
const (
	IndexClusterID       = "spec.cluster.clusterID"
	IndexTenantNamespace = "spec.tenantNamespace.local"
)

// AddIndexes adds the indexes that Peers needs.
func AddIndexes(ctx context.Context, indexer client.FieldIndexer, foreignClusters bool) error {
	if err := indexer.IndexField(ctx, &isthmus.Peering{}, IndexClusterID, func(o client.Object) []string {
		return []string{o.(*isthmus.Peering).Spec.Cluster.ClusterID}
	}); err != nil {
		return err
	}
	if err := indexer.IndexField(ctx, &isthmus.Peering{}, IndexTenantNamespace, func(o client.Object) []string {
		return []string{o.(*isthmus.Peering).Spec.TenantNamespace.Local}
	}); err != nil || !foreignClusters {
		return err
	}
	if err := indexer.IndexField(ctx, &ForeignCluster{}, IndexClusterID, func(o client.Object) []string {
		return []string{o.(*ForeignCluster).Spec.ClusterIdentity.ClusterID}
	}); err != nil {
		return err
	}
	return indexer.IndexField(ctx, &ForeignCluster{}, IndexTenantNamespace, func(o client.Object) []string {
		return []string{o.(*ForeignCluster).Status.TenantNamespace.Local}
	})
}
