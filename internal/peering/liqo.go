package peering

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

var foreignClusters = schema.GroupKind{Group: "discovery.liqo.io", Kind: "ForeignCluster"}

// refuseLiqo returns ErrLiqo with what to do instead. Where Isthmus is beside Liqo's control plane,
// it is an Isthmus.
func (c *Cluster) refuseLiqo() error {
	foreign, err := c.knows(foreignClusters)
	if err != nil || !foreign {
		return err
	}
	own, err := c.knows(isthmus.GroupVersion.WithKind("Peering").GroupKind())
	if err != nil || own {
		return err
	}
	return fmt.Errorf("%s: %w: it has the kind %s of Liqo's and no Peerings. This command joins two clusters with Isthmus, and has changed "+
		"nothing; docs/liqo.md has the few objects that join one with a Liqo", c, ErrLiqo, foreignClusters)
}

// knows asks whether the API server has a kind.
func (c *Cluster) knows(kind schema.GroupKind) (bool, error) {
	_, err := c.client.RESTMapper().RESTMapping(kind)
	if meta.IsNoMatchError(err) {
		return false, nil
	}
	return err == nil, c.explain("kinds of the API server", err)
}
