package manager

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

func TestTheTunnelStaysWhileClientsLeaveServices(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	for _, step := range [][]struct {
		after  time.Duration
		shared bool
		left   time.Duration
	}{
		{{0, false, drainTime}, {drainTime - time.Second, false, time.Second}, {drainTime, false, 0}}, // there were none, or they left at once
		{{0, true, drainPatience}, {time.Second, true, drainPatience - time.Second}, {2 * time.Second, false, drainTime}, {2*time.Second + drainTime, false, 0}},
		{{0, false, drainTime}, {time.Second, true, drainPatience - time.Second}, {2 * time.Second, false, drainTime}},                                            // the cache was behind
		{{0, true, drainPatience}, {drainPatience - time.Second, true, time.Second}, {drainPatience - time.Second, false, time.Second}, {drainPatience, true, 0}}, // the peer does not answer
	} {
		var d drain
		for _, s := range step {
			var left time.Duration
			if d, left = d.next(at.Add(s.after), s.shared); left != s.left {
				t.Errorf("%v: after %v %v is left, want %v", step, s.after, left, s.left)
			}
		}
	}
}

func TestOnlyAPeeringThatSharesServicesIsDrained(t *testing.T) {
	now := metav1.Now()
	is := func(want bool, change func(*isthmus.Peering)) {
		t.Helper()
		p := &isthmus.Peering{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now, Annotations: map[string]string{}}}
		p.Spec.Services.Import = []isthmus.ServiceNamespace{"prod"}
		change(p)
		if peer := peerFrom(p); peer.Draining != want || peer.Leaving == p.DeletionTimestamp.IsZero() || peer.begun() && peer.Leaving {
			t.Errorf("%+v: draining %v, leaving %v; want %v", p, peer.Draining, peer.Leaving, want)
		}
	}
	is(true, func(*isthmus.Peering) {})
	is(false, func(p *isthmus.Peering) { p.DeletionTimestamp = nil })
	is(false, func(p *isthmus.Peering) { p.Spec.Services = isthmus.Services{} })
	is(false, func(p *isthmus.Peering) { p.Annotations[isthmus.AnnotationDrained] = "true" })
	is(false, func(p *isthmus.Peering) { p.Annotations[isthmus.AnnotationForce] = "true" })
}
