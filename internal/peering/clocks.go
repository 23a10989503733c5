package peering

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// hopClocks is about machines whose clocks differ from the API server's: only where one does.
const hopClocks = "clocks"

// clocksDiffer is how far a clock may be from that of the API server. What takes times of others into
// account allows as much, and a slow API server sees a renewal seconds after it was dated.
const clocksDiffer = 30 * time.Second

// takenAt is when the API server took the last renewal of a Lease, by its own clock and to a second;
// false where it does not say (Kubernetes keeps that in metadata.managedFields).
func takenAt(l *coordinationv1.Lease) (at time.Time, known bool) {
	for _, f := range l.ManagedFields {
		if f.Time != nil && f.FieldsV1 != nil && strings.Contains(f.FieldsV1.GetRawString(), `"f:renewTime"`) && f.Time.After(at) {
			at, known = f.Time.Time, true
		}
	}
	return at, known
}

// clockHop compares the times that manager, gateway and kubelets write into their Leases with when
// the API server took them; false: none differs, as far as that may be read.
func (c *Cluster) clockHop(ctx context.Context, manager, gateway Holder) (Hop, bool) {
	hop := Hop{Cluster: c.String(), Name: hopClocks, State: Limited, Source: "Leases"}
	var wrong []string
	note := func(whose string, ahead time.Duration) {
		if ahead.Abs() > clocksDiffer {
			which := "ahead"
			if ahead < 0 {
				which = "behind"
			}
			wrong = append(wrong, fmt.Sprintf("%s is %v %s", whose, ahead.Abs().Round(time.Second), which))
		}
	}
	note("that of "+Printable(manager.Name)+" (manager)", manager.ahead)
	note("that of "+Printable(gateway.Name)+" (gateway)", gateway.ahead)
	var leases coordinationv1.LeaseList
	if err := c.client.List(ctx, &leases, client.InNamespace(corev1.NamespaceNodeLease)); err == nil { // a help: who may not read them sees the two
		for i := range leases.Items {
			l := &leases.Items[i]
			if taken, known := takenAt(l); known && l.Spec.RenewTime != nil {
				note("that of Node "+Printable(l.Name), l.Spec.RenewTime.Sub(taken))
			}
		}
	}
	if len(wrong) == 0 {
		return hop, false
	}
	slices.Sort(wrong)
	hop.Text = "clocks differ from the API server's: " + firstFew(wrong, ", ") +
		"; set them (NTP): by a wrong clock tokens and certificates are not valid yet or any more, and after one was set back peers refuse handshakes as old until it has caught up"
	return hop, true
}
