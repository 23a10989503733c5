package install

import (
	"context"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
	"github.com/isthmus-net/isthmus/internal/cluster"
	"github.com/isthmus-net/isthmus/internal/clustertest"
)

func TestMain(m *testing.M) {
	clustertest.Main(m, func(ctx context.Context, c *cluster.Cluster, name string) error {
		return Run(ctx, c, Options{Identity: v1alpha1.ClusterIdentity{ClusterName: name}, Values: chart.Merge(clustertest.NodePortService(5871, 1), clustertest.WithoutWorkloads), Report: func(string) {}})
	})
}
