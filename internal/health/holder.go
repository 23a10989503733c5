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

// A Holder is the holder of a Lease, or the reason why there is none.
type Holder struct {
	Name  string       `json:"name,omitempty"`  // empty: the Lease has no holder
	Epoch int32        `json:"epoch,omitempty"` // increases with each new holder
	Since *metav1.Time `json:"since,omitempty"` // when the holder acquired the Lease; nil: there is no holder, or the time is unknown
	// Takeover is the reason why the active gateway became active. It is nil if the holder is a
	// manager, or if the reason is unknown.
	Takeover *isthmus.Takeover `json:"takeover,omitempty"`
	// Problem is the reason why there is no holder.
	Problem string `json:"problem,omitempty"`

	Absent bool          `json:"-"` // the Lease does not exist
	Rolls  bool          `json:"-"` // there is no holder because a rollout is replacing the manager
	Ahead  time.Duration `json:"-"` // how far the holder's clock is ahead of the API server's; 0: unknown
}

// EndWithPod clears a holder whose Pod has no running container. Its Lease stays valid for some
// seconds, but is no longer renewed. A holder's name is the name of its Pod, to which electors of
// client-go append an underscore and a suffix. If hasPod is true, every holder of this Lease runs
// in a Pod, so a missing Pod clears the holder, too.
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

// ended reports whether a Pod has no running container, according to its kubelet. After a container
// was restarted in place, the kubelet reports for a second or two that the container does not run.
func ended(p *corev1.Pod) bool {
	if p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		return true
	}
	return len(p.Status.ContainerStatuses) > 0 &&
		!slices.ContainsFunc(p.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.State.Running != nil })
}

// HolderOf returns the holder of a Lease at the time now. The duration of the Lease begins when the
// API server received the last renewal, if that time is known, because the holder's clock may be
// wrong. If exact is true, now is a time of the API server's clock. If exact is false, the Lease
// ends maxClockDifference later than it states, because the clocks may differ.
func HolderOf(name string, lease *coordinationv1.Lease, now time.Time, exact bool) Holder {
	l := lease.Spec
	if l.HolderIdentity == nil || *l.HolderIdentity == "" {
		return Holder{Problem: name + " has no holder"}
	}
	taken, known := renewalTime(lease)
	if l.RenewTime != nil && l.LeaseDurationSeconds != nil {
		renewed, allowed := l.RenewTime.Time, maxClockDifference
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
		if since := byServer(metav1.NewTime(l.AcquireTime.Time), h.Ahead, now); !since.IsZero() {
			h.Since = &since
		}
	}
	return h
}

// maxClockDifference is the tolerated difference between a clock and the API server's clock. It
// includes the delay of a slow API server, which may receive a renewal seconds after it was sent.
const maxClockDifference = 30 * time.Second

// SecondsOff is the uncertainty of the difference between two clocks. The API server returns
// whole seconds, and a request takes time.
const SecondsOff = 2 * time.Second

// byServer converts t to the API server's clock. ahead is the time by which the clock that showed t
// is ahead of the API server's clock. If the result would be in the future, byServer returns zero,
// which means unknown.
func byServer(t metav1.Time, ahead time.Duration, now time.Time) metav1.Time {
	if ahead.Abs() > SecondsOff && !t.IsZero() {
		t.Time = t.Add(-ahead)
	}
	if t.After(now.Add(SecondsOff)) {
		return metav1.Time{}
	}
	return t
}

// DateByServer converts the times that the manager has written into Peerings to the API
// server's clock.
func DateByServer(peerings []isthmus.Peering, manager Holder, now time.Time) {
	for i := range peerings {
		for j := range peerings[i].Status.Conditions {
			c := &peerings[i].Status.Conditions[j]
			c.LastTransitionTime = byServer(c.LastTransitionTime, manager.Ahead, now)
		}
	}
}

// writeTime returns the time at which the API server received the last version of an object, by
// its own clock, in whole seconds.
func writeTime(o metav1.Object) time.Time {
	latest := o.GetCreationTimestamp().Time
	for _, f := range o.GetManagedFields() {
		if f.Time != nil && f.Time.After(latest) {
			latest = f.Time.Time
		}
	}
	return latest
}

// renewalTime returns the time at which the API server received the last renewal of a Lease, by its
// own clock, in whole seconds. known is false if metadata.managedFields does not contain it.
func renewalTime(l *coordinationv1.Lease) (renewed time.Time, known bool) {
	for _, f := range l.ManagedFields {
		if f.Time != nil && f.FieldsV1 != nil && strings.Contains(f.FieldsV1.GetRawString(), `"f:renewTime"`) && f.Time.After(renewed) {
			renewed, known = f.Time.Time, true
		}
	}
	return renewed, known
}

// CheckClocks compares the times that manager, gateway and kubelets write into their Leases with
// the times at which the API server received them. It returns false if no clock differs from the
// API server's clock.
func CheckClocks(cluster string, manager, gateway Holder, leases []coordinationv1.Lease) (Hop, bool) {
	hop := Hop{Cluster: cluster, Name: HopClocks, State: Limited, Source: "Leases"}
	var wrong []string
	note := func(whose string, ahead time.Duration) {
		if ahead.Abs() > maxClockDifference {
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
		if taken, known := renewalTime(l); known && l.Spec.RenewTime != nil {
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
