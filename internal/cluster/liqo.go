package cluster

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// ErrLiqo says that a cluster is a Liqo without Isthmus. Nothing is written there: what Isthmus
// installs replaces Liqo's CRDs and would take over its network.
var ErrLiqo = errors.New("this is a Liqo without Isthmus")

// ForeignClusters is the kind by which a Liqo is known.
var ForeignClusters = schema.GroupKind{Group: "discovery.liqo.io", Kind: "ForeignCluster"}

// IsLiqo reports whether the cluster is a Liqo. Where Isthmus is beside Liqo's control plane, it is
// an Isthmus.
func (c *Cluster) IsLiqo() (bool, error) {
	foreign, err := c.Knows(ForeignClusters)
	if err != nil || !foreign {
		return false, err
	}
	own, err := c.Knows(isthmus.GroupVersion.WithKind("Peering").GroupKind())
	return !own, err
}

// refuseLiqo returns ErrLiqo with what to do instead.
func (c *Cluster) refuseLiqo() error {
	if is, err := c.IsLiqo(); err != nil || !is {
		return err
	}
	return fmt.Errorf("%s: %w: it has the kind %s of Liqo's and no Peerings. This command is for clusters with Isthmus, and has changed "+
		"nothing; docs/liqo.md has the few objects that join one with a Liqo, and what to look at there", c, ErrLiqo, ForeignClusters)
}

// Knows asks whether the API server has a kind.
func (c *Cluster) Knows(kind schema.GroupKind) (bool, error) {
	_, err := c.Client.RESTMapper().RESTMapping(kind)
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	return err == nil, c.Explain("kinds of the API server", err)
}
