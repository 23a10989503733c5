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

// A Holder is the holder of a Lease.
type Holder struct {
	Name  string       `json:"name,omitempty"`  // empty: nobody
	Epoch int32        `json:"epoch,omitempty"` // each new holder has a higher one
	Since *metav1.Time `json:"since,omitempty"` // when the holder got it; nil: nobody holds it, or unknown
	// Takeover is why the active gateway became active; nil: it is a manager, or that is unknown.
	Takeover *isthmus.Takeover `json:"takeover,omitempty"`
	// Problem is why nobody holds it.
	Problem string `json:"problem,omitempty"`

	Absent bool          `json:"-"` // there is no Lease
	Rolls  bool          `json:"-"` // nobody holds it, because a rollout replaces the holder
	Ahead  time.Duration `json:"-"` // how far the holder's clock is ahead of the API server's; 0: unknown
}

// EndWithPod clears a holder whose Pod has no running container: its Lease lasts some seconds more,
// but nobody renews it. A holder has the name of its Pod; electors of client-go append an
// underscore and more. hasPod is set if every holder of this Lease runs in a Pod: then a missing
// Pod clears it too.
func (h *Holder) EndWithPod(pods []corev1.Pod, lease string, hasPod bool) {
	name, _, _ := strings.Cut(h.Name, "_")
	if name == "" {
		return
	}
	i := slices.IndexFunc(pods, func(p corev1.Pod) bool { return p.Name == name })
	switch {
	case i < 0 && hasPod:
		*h = Holder{Problem: fmt.Sprintf("%s is held by %s, which no longer exists", lease, safetext.Of(name))}
	case i >= 0 && ended(&pods[i]):
		*h = Holder{Problem: fmt.Sprintf("%s is held by %s, which has no running container", lease, safetext.Of(name))}
	}
}

// ended reports whether no container of a Pod runs, according to its kubelet. For a second or two
// after a container has restarted in place, the kubelet still reports that it does not run.
func ended(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	return len(p.Status.ContainerStatuses) > 0 &&
		!slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil })
}

// HolderOf returns the holder of a Lease at now. It uses the time at which the API server received
// the last renewal, if known, because the holder's clock may be wrong. If now is by the API
// server's clock too (exact), the Lease ends at its stated duration; otherwise half a minute later,
// since the clocks may differ.
func HolderOf(name string, lease *coordinationv1.Lease, now time.Time, exact bool) Holder {
	l := lease.Spec
	if l.HolderIdentity == nil || *l.HolderIdentity == "" {
		return Holder{Problem: name + " has no holder"}
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
	if l.LeaseTransitions != nil {
		h.Epoch = *l.LeaseTransitions
	}
	if t := isthmus.TakeoverOf(lease.Annotations[isthmus.AnnotationTakeover], h.Name); t.Reason != "" {
		h.Takeover = &t
	}
	if known && l.RenewTime != nil {
		h.Ahead = l.RenewTime.Sub(taken)
	}
	if l.AcquireTime != nil {
		if at := byServer(metav1.NewTime(l.AcquireTime.Time), h.Ahead, now); !at.IsZero() {
			h.Since = &at
		}
	}
	return h
}

// clocksDiffer is how far a clock may be from the API server's. Code that uses times of other
// clocks allows for that much, and for a slow API server, which receives a renewal seconds after
// its date.
const clocksDiffer = 30 * time.Second

// SecondsOff is the uncertainty of the difference of two clocks: the API server returns whole
// seconds, and a request takes time.
const SecondsOff = 2 * time.Second

// byServer converts a time by a clock that is ahead to the API server's clock. It returns zero,
// unknown, for a time in the future.
func byServer(at metav1.Time, ahead time.Duration, now time.Time) metav1.Time {
	if ahead.Abs() > SecondsOff && !at.IsZero() {
		at.Time = at.Add(-ahead)
	}
	if at.After(now.Add(SecondsOff)) {
		return metav1.Time{}
	}
	return at
}

// DateByServer converts the times that the manager has written into Peerings.
func DateByServer(peerings []isthmus.Peering, manager Holder, now time.Time) {
	for i := range peerings {
		for j := range peerings[i].Status.Conditions {
			c := &peerings[i].Status.Conditions[j]
			c.LastTransitionTime = byServer(c.LastTransitionTime, manager.Ahead, now)
		}
	}
}

// writtenAt is when the API server received the last version of an object, by its own clock and to
// a second.
func writtenAt(o metav1.Object) time.Time {
	at := o.GetCreationTimestamp().Time
	for _, f := range o.GetManagedFields() {
		if f.Time != nil && f.Time.After(at) {
			at = f.Time.Time
		}
	}
	return at
}

// takenAt is when the API server received the last renewal of a Lease, by its own clock and to a
// second. known is false if metadata.managedFields does not show it.
func takenAt(l *coordinationv1.Lease) (at time.Time, known bool) {
	for _, f := range l.ManagedFields {
		if f.Time != nil && f.FieldsV1 != nil && strings.Contains(f.FieldsV1.GetRawString(), `"f:renewTime"`) && f.Time.After(at) {
			at, known = f.Time.Time, true
		}
	}
	return at, known
}

// CheckClocks compares the times that manager, gateway and kubelets write into their Leases with
// the times at which the API server received them. It returns false if none differs.
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
		"; with a wrong clock, valid tokens and certificates are refused; after a clock was set back, peers refuse handshakes until it catches up; set the clocks, for example by NTP"
	return hop, true
}
