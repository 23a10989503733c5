package cluster

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/deploy"
	"github.com/isthmus-net/isthmus/internal/health"
)

// ManagerLease is the Lease that the active manager holds.
const ManagerLease = deploy.ManagerServiceAccount

// HolderOf returns the active manager or gateway, by the Lease that it renews. Set sharp to show
// the result. A caller that acts when there is none, and for example removes objects that the
// holder maintains, must not set it: then the Lease counts as over only half a minute later by both
// clocks. The API server's clock may be a proxy's, or that of one of several servers.
func HolderOf(ctx context.Context, c *Cluster, leaseName string, sharp bool) (health.Holder, error) {
	var lease coordinationv1.Lease
	// The answer may be as old as that.
	asked := time.Now()
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: leaseName}, &lease)
	name := LeaseText(c, leaseName)
	if apierrors.IsNotFound(err) {
		return health.Holder{Problem: name + " not found", Absent: true}, nil
	}
	if err != nil {
		return health.Holder{}, c.Explain(name, err)
	}
	ahead, known := c.clock.atLeast()
	if !sharp {
		ahead, known = min(ahead, 0), false
	}
	return health.HolderOf(name, &lease, asked.Add(ahead), known), nil
}

// LeaseText names a Lease of the installation for messages.
func LeaseText(c *Cluster, lease string) string { return "Lease " + c.Namespace + "/" + lease }
