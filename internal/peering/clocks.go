package peering

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	isthmus "github.com/isthmus-net/isthmus/apis/isthmus/v1alpha1"
)

// A serverClock is how far the API server's clock is ahead of ours, by what its answers say (RFC 9110,
// section 6.6.1): their Date is of a moment between question and answer, to a second. Each answer bounds
// the difference further.
type serverClock struct {
	mu        sync.Mutex
	known     bool
	low, high time.Duration // the difference is between them
}

func (s *serverClock) heard(date, sent, received time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	low, high := date.Sub(received), date.Add(time.Second).Sub(sent)
	if s.known && max(low, s.low) <= min(high, s.high) { // else one of the clocks was set
		low, high = max(low, s.low), min(high, s.high)
	}
	s.low, s.high, s.known = low, high, true
}

// ahead is 0 where the two may be the same; false: no answer had a time.
func (s *serverClock) ahead() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(s.low, min(s.high, 0)), s.known
}

// atLeast is the least that it may be, which makes nothing older than it is.
func (s *serverClock) atLeast() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.low, s.known
}

// listening hears the answers to what a client asks.
func (s *serverClock) listening(to http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		sent := time.Now()
		resp, err := to.RoundTrip(r)
		if err == nil {
			if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
				s.heard(date, sent, time.Now())
			}
		}
		return resp, err
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// now is the time by the API server's clock, with which objects say when they were written; false: it is
// not known, and the time is ours.
func (c *Cluster) now() (time.Time, bool) {
	ahead, known := c.clock.ahead()
	return time.Now().Add(ahead), known
}

// hopClocks is about machines whose clocks differ from the API server's: only where one does.
const hopClocks = "clocks"

// clocksDiffer is how far a clock may be from that of the API server. What takes times of others into
// account allows as much, and a slow API server sees a renewal seconds after it was dated.
const clocksDiffer = 30 * time.Second

// secondsOff is what the difference of two clocks is uncertain by: the API server tells whole seconds, and a
// request takes its time.
const secondsOff = 2 * time.Second

// byServer is a time that a clock which is ahead has shown, by the API server's clock; zero where that is
// still to come: by that clock nobody knows it.
func byServer(at metav1.Time, ahead time.Duration, now time.Time) metav1.Time {
	if ahead.Abs() > secondsOff && !at.IsZero() {
		at.Time = at.Add(-ahead)
	}
	if at.After(now.Add(secondsOff)) {
		return metav1.Time{}
	}
	return at
}

// dateByServer does that with what the manager has written of Peerings.
func dateByServer(peerings []isthmus.Peering, manager Holder, now time.Time) {
	for i := range peerings {
		for j := range peerings[i].Status.Conditions {
			c := &peerings[i].Status.Conditions[j]
			c.LastTransitionTime = byServer(c.LastTransitionTime, manager.ahead, now)
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

// clockHop compares the times that manager, gateway and kubelets write into their Leases with when
// the API server took them; false: none differs, as far as that may be read.
func (c *Cluster) clockHop(ctx context.Context, manager, gateway Holder) (Hop, bool) {
	var leases coordinationv1.LeaseList // a help: who may not read them sees the two
	_ = c.client.List(ctx, &leases, client.InNamespace(corev1.NamespaceNodeLease))
	return judgeClocks(c.String(), manager, gateway, leases.Items)
}

func judgeClocks(cluster string, manager, gateway Holder, leases []coordinationv1.Lease) (Hop, bool) {
	hop := Hop{Cluster: cluster, Name: hopClocks, State: Limited, Source: "Leases"}
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
	for i := range leases {
		l := &leases[i]
		if taken, known := takenAt(l); known && l.Spec.RenewTime != nil {
			note("that of Node "+Printable(l.Name), l.Spec.RenewTime.Sub(taken))
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
