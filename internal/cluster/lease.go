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

// HolderOf returns the holder of a Lease: the active manager or gateway. With forDisplay, the Lease
// expires at its stated end, by the API server's clock. Without forDisplay, it expires half a
// minute later, and only if both the API server's clock and ours are past that time. The API
// server's clock alone is not reliable: the time may come from a proxy, or from one of several
// servers. A caller must not set forDisplay if it acts when there is no holder, for example by
// removing the holder's objects.
func HolderOf(ctx context.Context, c *Cluster, leaseName string, forDisplay bool) (health.Holder, error) {
	var lease coordinationv1.Lease
	// Read the clock before the request, so that the response is never older than sent.
	sent := time.Now()
	err := c.Client.Get(ctx, client.ObjectKey{Namespace: c.Namespace, Name: leaseName}, &lease)
	name := LeaseText(c, leaseName)
	if apierrors.IsNotFound(err) {
		return health.Holder{Problem: name + " not found", Absent: true}, nil
	}
	if err != nil {
		return health.Holder{}, c.Explain(name, err)
	}
	ahead, known := c.clock.lowerBound()
	if !forDisplay {
		ahead, known = min(ahead, 0), false
	}
	return health.HolderOf(name, &lease, sent.Add(ahead), known), nil
}

// LeaseText returns the name of a Lease of the installation, for messages.
func LeaseText(c *Cluster, lease string) string { return "Lease " + c.Namespace + "/" + lease }
