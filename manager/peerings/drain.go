package peerings

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/manager/peers"
)

const (
	// drainTime is the time for which the tunnel stays after both clusters have removed the shared
	// services from their slices. kube-proxy applies a change of a slice within about a second, and
	// later in a large cluster.
	drainTime = 5 * time.Second
	// drainPatience bounds the time for which the tunnel stays. A peer whose API server does not
	// answer never removes our services.
	drainPatience = 15 * time.Second
)

// A drain is the state of draining one Peering. The zero value means that draining has not begun.
type drain struct {
	begun     time.Time
	withdrawn time.Time // when the last shared service was withdrawn; zero: a cluster still has one
}

// update returns the state at the time now, and the remaining time for which the tunnel has to
// stay. shared is true while either cluster still has services of the other cluster.
func (d drain) update(now time.Time, shared bool) (drain, time.Duration) {
	if d.begun.IsZero() {
		d.begun = now
	}
	left := d.begun.Add(drainPatience).Sub(now)
	if shared {
		d.withdrawn = time.Time{}
	} else {
		if d.withdrawn.IsZero() {
			d.withdrawn = now
		}
		left = min(left, d.withdrawn.Add(drainTime).Sub(now))
	}
	return d, max(left, 0)
}

// drains has the drain of each Peering that is being deleted.
type drains struct {
	mu        sync.Mutex
	byPeering map[types.UID]drain
}

func (d *drains) next(id types.UID, now time.Time, shared bool) (left time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.byPeering == nil {
		d.byPeering = make(map[types.UID]drain)
	}
	d.byPeering[id], left = d.byPeering[id].update(now, shared)
	if left == 0 {
		delete(d.byPeering, id)
	}
	return left
}

// drain keeps the tunnel of a deleted Peering until clients no longer use the shared services,
// which package services withdraws. drain returns the maximum remaining time, or zero when draining
// has ended.
func (r *Reconciler) drain(ctx context.Context, s *peeringState) (time.Duration, error) {
	if s.conflict != "" || !peers.From(s.peering).Draining {
		return 0, nil
	}
	if r.Services != nil && !s.ending {
		shared := s.services.imports.Served > 0 || s.services.left
		if left := r.drains.next(s.peering.UID, time.Now(), shared); left > 0 {
			s.waiting = "clients to leave the services that the clusters shared"
			return left, nil
		}
	}
	// The other reconcilers continue the removal once the Peering has this annotation.
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:"true"}}}`, isthmus.AnnotationDrained))
	if err := r.Client.Patch(ctx, s.peering, patch); client.IgnoreNotFound(err) != nil {
		return 0, fmt.Errorf("record that the services are drained: %w", err)
	}
	return 0, nil
}
