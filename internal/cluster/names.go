package cluster

import (
	"context"
	"maps"
	"slices"

	"k8s.io/client-go/tools/clientcmd"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// Contexts returns the names of the contexts in a kubeconfig file, sorted. If kubeconfig is empty,
// it reads the files that kubectl uses. After an error it returns none, because its caller, shell
// completion, could not show the error.
func Contexts(kubeconfig string) []string {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := rules.Load()
	if err != nil {
		return nil
	}
	return slices.Sorted(maps.Keys(config.Contexts))
}

// Names returns the names of the Peerings in a cluster and of their peers.
func Names(ctx context.Context, c *Cluster) ([]string, error) {
	var list isthmus.PeeringList
	if err := c.Client.List(ctx, &list); err != nil {
		return nil, c.Explain("Peerings", err)
	}
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name, list.Items[i].Spec.Cluster.ClusterName)
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}
