package kube

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A takeover is why and when a replica became active.
type takeover struct {
	isthmus.Takeover
	since time.Time // zero: unknown
}

// takeoverOf returns the takeover of the holder of a Lease.
func takeoverOf(lease *coordinationv1.Lease) takeover {
	t := takeover{Takeover: isthmus.TakeoverOf(lease.Annotations[isthmus.AnnotationTakeover], holderOf(lease))}
	if at := lease.Spec.AcquireTime; at != nil {
		t.since = at.Time
	}
	return t
}

// mark writes t, unless it is unknown, into a Lease whose holder it concerns.
func (t takeover) mark(lease *coordinationv1.Lease) {
	if t.since.IsZero() {
		return
	}
	if lease.Annotations == nil {
		lease.Annotations = make(map[string]string)
	}
	lease.Annotations[isthmus.AnnotationTakeover] = t.Annotation()
	at := metav1.NewMicroTime(t.since)
	lease.Spec.AcquireTime = &at
}

// takes returns the takeover of a replica that takes the Lease as last read. Only run may call it.
func (e *election) takes(now time.Time) takeover {
	t := takeover{isthmus.Takeover{Pod: e.identity, Reason: isthmus.TakeoverExpired, Former: holderOf(e.lease)}, now}
	switch {
	case e.lease == nil:
		t.Reason = isthmus.TakeoverNoneActive
	case t.Former == "":
		t.Reason, t.Former = isthmus.TakeoverReleased, e.holder()
	}
	return t
}

// elected explains why the nodes elect this replica. The caller holds e.mu.
func (e *election) elected(released bool) isthmus.Takeover {
	t := isthmus.Takeover{Pod: e.identity, Reason: isthmus.TakeoverNotHeard, Former: e.name}
	switch {
	case released:
		t.Reason = isthmus.TakeoverReleased
	case e.name == "":
		t.Reason = isthmus.TakeoverNoneActive
	}
	return t
}

// A Mandate says since when a replica is active, and why.
type Mandate struct {
	Epoch int32     // each takeover has a higher one
	Since time.Time // zero: unknown
	isthmus.Takeover
}

// Mandate returns the mandate of this replica; ok is false unless it is the active one.
func (g *Gateway) Mandate() (m Mandate, ok bool) {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return Mandate{}, false
	}
	return e.mandate()
}

func (e *election) mandate() (m Mandate, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return Mandate{e.transition, e.taken.since, e.taken.Takeover}, e.name == e.identity && e.speaking
}
