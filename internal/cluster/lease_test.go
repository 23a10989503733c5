package cluster

import (
	"context"
	"testing"
	"time"

	"github.com/isthmus-net/isthmus/internal/expect"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"math/rand/v2"
	"testing/synctest"
)

var must = expect.NoError

// For a displayed holder, the API server's clock at the time of the request decides whether the
// Lease has expired. An action that requires the lack of a holder waits until the Lease has expired
// by both clocks.
func TestActionsNeedALeaseThatExpiredByBothClocks(t *testing.T) {
	for _, tc := range []struct {
		name            string
		ago, took       time.Duration // by our clock: the time from the renewal to the request, and from the request to the response
		low             time.Duration // lower bound of how far the API server's clock is ahead
		unknown         bool
		display, action bool // whether the Lease counts as held, with and without forDisplay
	}{
		{"renewed just now", time.Second, 0, 0, false, true, true},
		{"the answer took its time", 16 * time.Second, 5 * time.Second, 0, false, true, true},
		{"over", 18 * time.Second, 0, 0, false, false, true},
		{"over for half a minute", 46 * time.Second, 0, 0, false, false, false},
		{"over for half a minute, and no answer has a time", 46 * time.Second, 0, 0, true, false, false},
		{"over, and no answer has a time", 18 * time.Second, 0, 0, true, true, true},
		{"a proxy whose clock is an hour ahead", time.Second, 0, time.Hour, false, false, true},
		{"our clock is an hour ahead", time.Hour, 0, -time.Hour, false, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for forDisplay, want := range map[bool]bool{true: tc.display, false: tc.action} {
					at := metav1.NewTime(time.Now().Add(-tc.ago))
					lease := coordinationv1.Lease{Spec: coordinationv1.LeaseSpec{HolderIdentity: new("m"), LeaseDurationSeconds: new(int32(15)), RenewTime: &metav1.MicroTime{Time: at.Time}}}
					lease.ManagedFields = []metav1.ManagedFieldsEntry{{Time: &at, FieldsV1: metav1.NewFieldsV1(`{"f:spec":{"f:renewTime":{}}}`)}}
					c := &Cluster{Client: leaseAfter{lease: lease, took: tc.took}, clock: &serverClock{known: !tc.unknown, low: tc.low, high: tc.low + time.Second}}
					h, err := HolderOf(t.Context(), c, ManagerLease, forDisplay)
					must(t, err)
					if (h.Name != "") != want {
						t.Errorf("forDisplay %v: %+v; want it held: %v", forDisplay, h, want)
					}
				}
			})
		})
	}
}

// leaseAfter is a client that returns one Lease, after a delay.
type leaseAfter struct {
	client.Client
	lease coordinationv1.Lease
	took  time.Duration
}

func (l leaseAfter) Get(_ context.Context, _ client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	time.Sleep(l.took)
	l.lease.DeepCopyInto(o.(*coordinationv1.Lease))
	return nil
}

// Each response narrows the bounds of the difference between the clocks. A response that
// contradicts the bounds shows that a clock was set.
func TestAPIServerClockIsEstimatedFromResponses(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	base := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	var c serverClock
	if _, known := c.ahead(); known {
		t.Error("known before an answer")
	}
	for _, ahead := range []time.Duration{0, 300 * time.Millisecond, -time.Hour, 10*time.Second + 999*time.Millisecond} {
		for i := range 200 {
			sent := base.Add(time.Duration(rng.Int64N(int64(time.Minute))))
			answered := sent.Add(time.Duration(rng.Int64N(int64(2 * time.Second))))
			received := answered.Add(time.Duration(rng.Int64N(int64(2 * time.Second))))
			c.observe(answered.Add(ahead).Truncate(time.Second), sent, received)
			got, known := c.ahead()
			if off := (got - ahead).Abs(); !known || off > 5*time.Second || i > 100 && off > time.Second || got.Abs() > ahead.Abs() {
				t.Fatalf("after %d answers: %v ahead (known: %v), it is %v", i+1, got, known, ahead)
			}
		}
	}
}
