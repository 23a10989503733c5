// Package released ends the holds of released networks, for tests that cannot wait for a day.
package released

import (
	"context"
	"strconv"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/apis/net/v1alpha1"
	"github.com/isthmus-net/isthmus/fabric"
)

// EndHolds edits the IPAM state of a cluster as a person would: nothing in it is held afterwards, and nodes
// let go of the networks of peers that have left. Call it again after an error, which may be a conflict.
func EndHolds(ctx context.Context, c client.Client) error {
	var list v1alpha1.IpamStorageList
	if err := c.List(ctx, &list); err != nil {
		return err
	}
	for i := range list.Items {
		o := &list.Items[i]
		held, err := fabric.ReleasedFrom(o.Annotations)
		if err != nil {
			return err
		}
		if held.Text() == "" {
			continue
		}
		for _, ids := range held.Peers {
			for _, id := range ids {
				delete(o.Spec.ClusterSubnets, id)
			}
		}
		delete(o.Annotations, isthmus.AnnotationReleased)
		o.Annotations[isthmus.AnnotationEdition] = strconv.FormatInt(time.Now().UnixMilli(), 10)
		if err := c.Update(ctx, o); err != nil {
			return err
		}
	}
	return nil
}
