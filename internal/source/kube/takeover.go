package kube

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A takeover has the reason and the time at which a replica became active.
type takeover struct {
	isthmus.Takeover
	since time.Time // zero: unknown
}

// takeoverOf returns the takeover by which the holder of a Lease became active, as the Lease
// records it.
func takeoverOf(lease *coordinationv1.Lease) takeover {
	t := takeover{Takeover: isthmus.TakeoverOf(lease.Annotations[isthmus.AnnotationTakeover], holderOf(lease))}
	if at := lease.Spec.AcquireTime; at != nil {
		t.since = at.Time
	}
	return t
}

// mark writes t into a Lease held by the replica that took over. It writes nothing if t is
// unknown.
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

// newTakeover returns the takeover for the case that this replica now takes the Lease that it last
// read. Only the goroutine of run may call it.
func (e *election) newTakeover(now time.Time) takeover {
	t := takeover{isthmus.Takeover{Pod: e.identity, Reason: isthmus.TakeoverExpired, Previous: holderOf(e.lease)}, now}
	switch {
	case e.lease == nil:
		t.Reason = isthmus.TakeoverNoneActive
	case t.Previous == "":
		t.Reason, t.Previous = isthmus.TakeoverReleased, e.holder()
	}
	return t
}

// elected explains why the nodes elect this replica. The caller holds e.mu.
func (e *election) elected(released bool) isthmus.Takeover {
	t := isthmus.Takeover{Pod: e.identity, Reason: isthmus.TakeoverNotHeard, Previous: e.name}
	switch {
	case e.name == e.identity: // this replica was the last holder, and had stopped sending
	case released:
		t.Reason = isthmus.TakeoverReleased
	case e.name == "":
		t.Reason = isthmus.TakeoverNoneActive
	}
	return t
}

// Mandate returns the mandate of this replica, or nil if it is not the active one, or if the
// time at which it became active is unknown.
func (g *Gateway) Mandate() *isthmus.Mandate {
	g.mu.Lock()
	e := g.election
	g.mu.Unlock()
	if e == nil {
		return nil
	}
	m, ok := e.mandate()
	if !ok || m.Since.IsZero() {
		return nil
	}
	return &m
}

// mandate is like Mandate, but Since may be zero. ok is true if this replica is the active one.
func (e *election) mandate() (m isthmus.Mandate, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return isthmus.Mandate{Epoch: e.transition, Since: e.taken.since, Takeover: e.taken.Takeover}, e.name == e.identity && e.sending
}
