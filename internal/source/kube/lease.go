package kube

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func (e *election) write(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	if lease.ResourceVersion == "" {
		return e.leases.Create(ctx, lease, metav1.CreateOptions{})
	}
	return e.leases.Update(ctx, lease, metav1.UpdateOptions{})
}

// standDown returns how long a replica must not write the Lease; 0 means that it may write now.
// firstSeen is election.firstSeen.
func standDown(lease *coordinationv1.Lease, identity string, firstSeen, now time.Time) time.Duration {
	if holder := holderOf(lease); holder == "" || holder == identity {
		return 0
	}
	duration := leaseDuration
	if len(listOf(lease).Voters) > 0 { // nodes vote, and may have elected the holder
		return max(0, firstSeen.Add(maxVotersAbsence).Sub(now))
	}
	if s := lease.Spec.LeaseDurationSeconds; s != nil && *s > 0 {
		duration = time.Duration(*s) * time.Second
	}
	return max(0, firstSeen.Add(duration).Sub(now))
}

// withHolder returns the Lease with this replica as its holder.
func withHolder(lease *coordinationv1.Lease, identity string, now time.Time) *coordinationv1.Lease {
	renewed, seconds := metav1.NewMicroTime(now), int32(leaseDuration/time.Second)
	if lease == nil {
		lease = new(coordinationv1.Lease)
		lease.Name = isthmus.LeaseGateway
	} else {
		lease = lease.DeepCopy()
	}
	if holderOf(lease) != identity {
		transitions := int32(1)
		if t := lease.Spec.LeaseTransitions; t != nil {
			transitions += *t
		}
		lease.Spec.AcquireTime, lease.Spec.LeaseTransitions = &renewed, &transitions
	}
	lease.Spec.HolderIdentity, lease.Spec.LeaseDurationSeconds, lease.Spec.RenewTime = &identity, &seconds, &renewed
	return lease
}

func holderOf(lease *coordinationv1.Lease) string {
	if lease == nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}
