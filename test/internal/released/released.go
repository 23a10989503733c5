// Package released frees the networks of removed peers. Nodes refuse such a network for a day, in
// which no other cluster gets it (fabric.ReleaseHold); tests cannot wait for so long.
package released

import (
	"context"
	"slices"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// EndHolds frees the held networks. It edits the NetworkAllocations as a user would, so that nodes
// stop refusing these networks. Its error may be a conflict; then call it again.
func EndHolds(ctx context.Context, c client.Client) error {
	var allocations isthmus.NetworkAllocationList
	if err := c.List(ctx, &allocations); err != nil {
		return err
	}
	for i := range allocations.Items {
		o := &allocations.Items[i]
		spec, revision := &o.Spec, time.Now().UnixMilli()
		kept := slices.DeleteFunc(slices.Clone(spec.Networks), func(n string) bool {
			return spec.ReleasedAt != "" || slices.ContainsFunc(spec.Held, func(h isthmus.HeldNetwork) bool { return h.Network == n })
		})
		if len(kept) == len(spec.Networks) {
			continue
		}
		for _, n := range spec.Networks {
			if !slices.Contains(kept, n) {
				spec.Freed = append(spec.Freed, isthmus.FreedNetwork{Network: n, Revision: revision})
			}
		}
		spec.Networks, spec.Revision = kept, revision
		if err := c.Update(ctx, o); err != nil {
			return err
		}
	}
	return nil
}
