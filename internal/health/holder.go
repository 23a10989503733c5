package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
	"github.com/isthmus-net/isthmus/internal/safetext"
)

// A Holder is who holds a Lease.
type Holder struct {
	Name string `json:"name,omitempty"` // empty: nobody
	// Problem says why nobody does.
	Problem string `json:"problem,omitempty"`

	Absent bool          `json:"-"` // there is no Lease
	Rolls  bool          `json:"-"` // nobody holds it between two steps of a rollout
	since  *metav1.Time  // the holder has held it; nil: nobody does, or it is not said
	Ahead  time.Duration `json:"-"` // of the API server's clock, the holder's; 0: not known
}

// EndWithPod takes back who holds a Lease where the holder's Pod says that none of its containers runs: the
// Lease is good for some seconds more, and nobody renews it. A holder is named as its Pod, with what an
// elector of client-go adds after an underscore. A Pod that is not there tells something of a holder only
// that cannot be without one.
func (h *Holder) EndWithPod(pods []corev1.Pod, lease string, hasPod bool) {
	name, _, _ := strings.Cut(h.Name, "_")
	if name == "" {
		return
	}
	i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name })
	switch {
	case i < 0 && hasPod:
		*h = Holder{Problem: fmt.Sprintf("%s is held by %s, which is gone", lease, safetext.Of(name))}
	case i >= 0 && ended(&pods[i]):
		*h = Holder{Problem: fmt.Sprintf("%s is held by %s, none of whose containers runs", lease, safetext.Of(name))}
	}
}

// ended reports whether a kubelet says that nothing of a Pod runs. Of a container that starts again in place
// it says so for a second or two more: for that long nobody seems to be at work who is.
func ended(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	return len(p.Status.ContainerStatuses) > 0 &&
		!slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil })
}

// HolderOf goes by when the API server took a renewal, where it says so: the holder's clock may be wrong
// by any amount. Where now is by the same clock (exact), a Lease is over when it says so; otherwise two
// clocks are allowed half a minute.
func HolderOf(name string, lease *coordinationv1.Lease, now time.Time, exact bool) Holder {
	l := lease.Spec
	if l.HolderIdentity == nil || *l.HolderIdentity == "" {
		return Holder{Problem: name + " is held by nobody"}
	}
	taken, known := takenAt(lease)
	if l.RenewTime != nil && l.LeaseDurationSeconds != nil {
		renewed, allowed := l.RenewTime.Time, clocksDiffer
		if known {
			renewed = taken
		}
		if known && exact {
			allowed = SecondsOff
		}
		if until := renewed.Add(time.Duration(*l.LeaseDurationSeconds) * time.Second); now.After(until.Add(allowed)) {
			return Holder{Problem: fmt.Sprintf("%s was last renewed by %s at %s", name, safetext.Of(*l.HolderIdentity), renewed.UTC().Format(time.RFC3339))}
		}
	}
	h := Holder{Name: *l.HolderIdentity}
	if known && l.RenewTime != nil {
		h.Ahead = l.RenewTime.Sub(taken)
	}
	if l.AcquireTime != nil {
		if at := byServer(metav1.NewTime(l.AcquireTime.Time), h.Ahead, now); !at.IsZero() {
			h.since = &at
		}
	}
	return h
}

// clocksDiffer is how far a clock may be from that of the API server. What takes times of others into
// account allows as much, and a slow API server sees a renewal seconds after it was dated.
const clocksDiffer = 30 * time.Second

// SecondsOff is what the difference of two clocks is uncertain by: the API server tells whole seconds, and a
// request takes its time.
const SecondsOff = 2 * time.Second

// byServer is a time that a clock which is ahead has shown, by the API server's clock; zero where that is
// still to come: by that clock nobody knows it.
func byServer(at metav1.Time, ahead time.Duration, now time.Time) metav1.Time {
	if ahead.Abs() > SecondsOff && !at.IsZero() {
		at.Time = at.Add(-ahead)
	}
	if at.After(now.Add(SecondsOff)) {
		return metav1.Time{}
	}
	return at
}

// DateByServer does that with what the manager has written of Peerings.
func DateByServer(peerings []isthmus.Peering, manager Holder, now time.Time) {
	for i := range peerings {
		for j := range peerings[i].Status.Conditions {
			c := &peerings[i].Status.Conditions[j]
			c.LastTransitionTime = byServer(c.LastTransitionTime, manager.Ahead, now)
		}
	}
}

// writtenAt is when the API server took the last version of an object, by its own clock and to a second.
func writtenAt(o metav1.Object) time.Time {
	at := o.GetCreationTimestamp().Time
	for _, f := range o.GetManagedFields() {
		if f.Time != nil && f.Time.After(at) {
			at = f.Time.Time
		}
	}
	return at
}

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

// CheckClocks compares the times that manager, gateway and kubelets write into their Leases with when the
// API server took them; false: none differs.
func CheckClocks(cluster string, manager, gateway Holder, leases []coordinationv1.Lease) (Hop, bool) {
	hop := Hop{Cluster: cluster, Name: HopClocks, State: Limited, Source: "Leases"}
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
	note("that of "+safetext.Of(manager.Name)+" (manager)", manager.Ahead)
	note("that of "+safetext.Of(gateway.Name)+" (gateway)", gateway.Ahead)
	for i := range leases {
		l := &leases[i]
		if taken, known := takenAt(l); known && l.Spec.RenewTime != nil {
			note("that of Node "+safetext.Of(l.Name), l.Spec.RenewTime.Sub(taken))
		}
	}
	if len(wrong) == 0 {
		return hop, false
	}
	slices.Sort(wrong)
	hop.Text = "clocks differ from the API server's: " + safetext.FirstFew(wrong, ", ") +
		"; set them (NTP): by a wrong clock tokens and certificates are not valid yet or any more, and after one was set back peers refuse handshakes as old until it has caught up"
	return hop, true
}
