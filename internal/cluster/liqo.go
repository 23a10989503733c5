package cluster

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// ErrLiqo is returned for a cluster that runs Liqo without Isthmus. Commands write nothing to
// such a cluster, because they would replace Liqo's CRDs and take over its network.
var ErrLiqo = errors.New("this cluster has Liqo but not Isthmus")

// ForeignClusters is a kind that only Liqo defines.
var ForeignClusters = schema.GroupKind{Group: "discovery.liqo.io", Kind: "ForeignCluster"}

// IsLiqo reports whether the cluster runs Liqo without Isthmus. A cluster with Isthmus and Liqo's
// control plane counts as one with Isthmus.
func (c *Cluster) IsLiqo() (bool, error) {
	foreign, err := c.Knows(ForeignClusters)
	if err != nil || !foreign {
		return false, err
	}
	own, err := c.Knows(isthmus.GroupVersion.WithKind("Peering").GroupKind())
	return !own, err
}

// refuseLiqo returns ErrLiqo with the remedy if the cluster runs Liqo without Isthmus.
func (c *Cluster) refuseLiqo() error {
	if is, err := c.IsLiqo(); err != nil || !is {
		return err
	}
	return fmt.Errorf("%s: %w: it has Liqo's kind %s and no Peerings; nothing was changed. This command is for clusters with Isthmus; "+
		"docs/liqo.md shows how to join one with a Liqo cluster", c, ErrLiqo, ForeignClusters)
}

// Knows reports whether the API server serves a kind.
func (c *Cluster) Knows(kind schema.GroupKind) (bool, error) {
	_, err := c.Client.RESTMapper().RESTMapping(kind)
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	return err == nil, c.Explain("kinds of the API server", err)
}
