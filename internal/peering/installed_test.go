package peering

import (
	"context"
	"testing"

	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/chart"
)

func TestMain(m *testing.M) {
	Main(m, func(ctx context.Context, c *Cluster, name string) error {
		return Install(ctx, c, InstallOptions{Identity: v1alpha1.ClusterIdentity{ClusterName: name}, Values: chart.Merge(NodePortService(5871, 1), WithoutWorkloads), Report: func(string) {}})
	})
}
